"""The verb ``solve``: the best schedule that the solver finds within a time limit, and how far it may be from optimal."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from jaxpipe.cli.costs import (
    CostChoice,
    check_size,
    chosen_costs,
    chunks_are_free,
    most_chunks,
    set_sizes,
)
from jaxpipe.cli.outputs import check_outputs, notice
from jaxpipe.cli.report import Record
from jaxpipe.cli.schedule_flags import FREE_CHUNKS, MOST_MICROBATCHES, OUTPUTS
from jaxpipe.cli.schedule_verbs import after_passes, conclude, load_schedule
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule import FAMILIES, Placement, Schedule, simulate
from jaxpipe.schedule.placement import circular, one_to_one, placement_named, v_shape, wave
from jaxpipe.schedule.settings import CHUNKS
from jaxpipe.schedule.solve import Options, Progress, Solution, SolveTask
from jaxpipe.schedule.solve.solver import solve_cached
from jaxpipe.schedule.solve.task import most_offloaded
from jaxpipe.schedule.tolerance import at_most

_MOST_ACTIONS = 200_000
_MOST_PAIRS = 2_048  # pairs of stage and microbatch up to which many chunks are tried
_FREE_CHUNKS = (
    f"chunks cost nothing here: at most {FREE_CHUNKS} a rank are tried; --comm prices them, --layers limits them"
)


def run_solve(arguments: argparse.Namespace) -> None:
    """Solve, show and write the schedule. Progress goes to standard error."""

    check_outputs(arguments.output, OUTPUTS)
    costs = chosen_costs(arguments)
    starts = {path: load_schedule(path) for path in (arguments.start,) if path is not None}
    set_sizes(arguments, starts)
    tasks = _tasks(arguments, costs, _started(arguments, starts.values()) or _placements(arguments, costs))
    options = Options(arguments.time_limit, arguments.seed, arguments.workers, arguments.reproducible)
    use_cache = not (arguments.no_cache or arguments.reproducible)
    solution = solve_cached(tasks, options, _progress, starts=[*starts.values()], use_cache=use_cache, notice=notice)
    for failure in solution.failures:
        notice(f"part of the search failed: {failure}")
    profile = costs.for_placement(solution.task.placement, solution.schedule.name)
    schedule, timeline = solution.schedule, solution.timeline
    if any(profile.tp_comm_s):
        schedule = after_passes(schedule, profile, arguments)
        timeline = simulate(schedule, profile)
    record = _with_proof(Record.of(schedule, profile, timeline, arguments.memory_limit), solution)
    notes = [_FREE_CHUNKS] if tasks[1:] and chunks_are_free(arguments, costs) else []
    tried = [{"placement": t.placement.kind, "chunks": t.placement.num_chunks} for t in tasks]
    conclude(arguments, costs, record, _headline(solution, len(tasks)), notes, **_facts(solution), placements=tried)


def _with_proof(record: Record, solution: Solution) -> Record:
    """``record`` with what the search proved for its placement; it searched without braids, so only where none can be."""
    if record.timeline.tp_exposed_s:
        return record
    proven = solution.placement_bound
    if solution.task.objective == "span":
        return replace(record, span_lower_bound=max(record.span_lower_bound, proven))
    return replace(record, lower_bound=max(record.lower_bound, proven))


def _progress(progress: Progress, _schedule: Schedule | None) -> None:
    bound = f"bound {progress.lower_bound:.6g}  gap {progress.gap:.2%}"
    notice(f"{progress.wall_s:7.1f} s  {progress.value:.6g}  {bound}  {progress.source}")


def _headline(solution: Solution, placements: int) -> str:
    """Summarise the solution with both bounds: that of all placements tried and, if it differs, that of the solution's
    placement."""

    kind = solution.task.placement.kind
    where = f" of all {placements} placements tried" if placements > 1 else ""
    placement_text = ""
    if solution.status != "optimal" and solution.optimal_in_placement:
        placement_text = f"; optimal in its placement ({kind})"
    elif solution.placement_bound > solution.lower_bound:
        placement_text = f"; lower bound {solution.placement_bound:.6g} in its placement ({kind})"
    family = ""
    if solution.family is not None:
        name, seconds = solution.family
        family = f"; best family {name}: {seconds:.6g}"
        if not at_most(seconds, solution.value):
            family += f" ({seconds / solution.value - 1:.1%} longer)"
    return (
        f"solved: {solution.task.objective} {solution.value:.6g}, lower bound {solution.lower_bound:.6g}{where}, "
        f"gap {solution.gap:.2%}, {solution.status} after {solution.wall_s:.1f} s{placement_text}{family}"
    )


def _facts(solution: Solution) -> dict[str, Any]:
    """Return the JSON keys beyond those of ``schedule --json``. ``lower_bound`` and ``gap`` are those of all placements
    tried, ``placement_bound`` and ``placement_gap`` those of the placement found."""
    bounds = ("value", "lower_bound", "gap", "placement_bound", "placement_gap", "optimal_in_placement")

    return {
        "objective": solution.task.objective,
        "placement": solution.task.placement.kind,
        **{name: getattr(solution, name) for name in (*bounds, "status", "wall_s", "first_feasible_s")},
        "improvements": [asdict(progress) for progress in solution.improvements],
        "offloaded": solution.offloaded,
        "most_offloaded": most_offloaded(solution.timeline),
        "family": None if solution.family is None else {"name": solution.family[0], "value": solution.family[1]},
    }


def _started(arguments: argparse.Namespace, starts: Iterable[Schedule]) -> Sequence[Placement]:
    """Return the placements of the schedules to start from.

    Raises:
        ConfigError: there is one, and a flag asks for placements, too.
    """
    placements = [start.placement for start in starts]
    placement_flags = arguments.chunks, arguments.placement, arguments.layers, arguments.max_chunks
    if placements and placement_flags != (None, "auto", None, None):
        raise ConfigError("--start sets the placement: drop --placement, --chunks, --layers and --max-chunks")
    return placements


def _tasks(arguments: argparse.Namespace, costs: CostChoice, placements: Sequence[Placement]) -> list[SolveTask]:

    tasks = []
    for placement in placements:
        check_size(arguments.ranks, arguments.microbatches, placement.num_chunks)
        actions = 3 * placement.num_stages * arguments.microbatches
        if actions > _MOST_ACTIONS:
            most = max(1, min(MOST_MICROBATCHES, _MOST_ACTIONS // (3 * placement.num_stages)))
            raise ConfigError(
                f"too large to solve: {actions} actions, and at most {_MOST_ACTIONS} are handled; lower one of the sizes, for "
                f"example --microbatches {most}, or use 'jaxpipe best'"
            )
        profile = costs.for_placement(placement, placement.kind)
        offload = arguments.offload_time is not None or any(profile.offload_s) or any(profile.load_s)
        limit = float("inf") if arguments.memory_limit is None else arguments.memory_limit
        task_options = arguments.objective, arguments.offloads_in_flight
        tasks.append(SolveTask(placement, arguments.microbatches, profile, limit, offload, *task_options))
    return tasks


def _placements(arguments: argparse.Namespace, costs: CostChoice) -> Sequence[Placement]:
    """Return the requested placements within the limit on chunks.

    Raises:
        ConfigError: there are none, or as :func:`_asked`.
    """
    most = most_chunks(arguments, costs)
    placements = [x for x in _asked(arguments, costs) if x.num_chunks <= (most or x.num_chunks)]
    if not placements:
        raise ConfigError(
            f"no requested placement has at most {most} chunk(s) per rank, the limit of --layers or --max-chunks"
        )
    return placements


def _asked(arguments: argparse.Namespace, costs: CostChoice) -> Sequence[Placement]:
    """Return the requested placements; with ``auto`` those that suit the chunks, or the stages of a cost profile.

    Raises:
        ConfigError: the placement has another number of chunks, or the profile's stages don't divide by the ranks.
    """

    ranks, chunks, kind = arguments.ranks, arguments.chunks, arguments.placement
    if costs.profile is not None:
        stages = costs.profile.num_stages
        if stages % ranks:
            raise ConfigError(
                f"{costs.path}: {stages} stages don't divide by --ranks {ranks}; give a number that divides them"
            )
        if chunks is not None and chunks != stages // ranks and kind != "bidirectional":
            raise ConfigError(
                f"--chunks {chunks} contradicts {costs.path}: {stages} stages on {ranks} ranks are {stages // ranks}"
            )
        chunks = stages // ranks
    if kind != "auto":
        return [placement_named(kind, ranks, chunks)]
    if chunks is None:
        return _family_placements(arguments)
    if chunks == 1:
        return [one_to_one(ranks)]
    return [v_shape(ranks) if chunks == 2 else wave(ranks, chunks), circular(ranks, chunks)]


def _family_placements(arguments: argparse.Namespace) -> Sequence[Placement]:
    """Return the placements that the families use, one each; with more chunks than a family has by default only at small
    sizes."""

    placements: dict[Placement, None] = {}
    pairs = arguments.ranks * arguments.microbatches
    for family in FAMILIES.values():
        chunk_counts = CHUNKS if "chunks" in family.options else ()
        for chunks in (family.default_chunks, *(v for v in chunk_counts if pairs * v <= _MOST_PAIRS)):
            try:
                placements[family.placement(arguments.ranks, chunks)] = None
            except ScheduleError:  # sizes that the family has no placement for
                continue
    return list(placements)
