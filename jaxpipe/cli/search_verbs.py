"""Run the verbs that search for an order: ``compare``, ``best``, ``solve``, and ``cache``, which lists what ``solve`` found.

``compare`` and ``best`` put schedule files beside the families in the table, the picture and the choice. ``solve`` says how far
the best schedule within its time limit may be from optimal.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxpipe.cli import flags, schedule_verbs
from jaxpipe.cli.report import FREE_COPIES, Infeasible, Record, print_table
from jaxpipe.errors import ConfigError, JaxpipeError, ScheduleError
from jaxpipe.plot.figure import number
from jaxpipe.schedule import FAMILIES, CostProfile, Family, Placement, Schedule, Timeline, simulate
from jaxpipe.schedule.families.family import cheap_first
from jaxpipe.schedule.passes import with_priced_reductions
from jaxpipe.schedule.placement import circular, one_to_one, placement_named, v_shape, wave
from jaxpipe.schedule.timeline import Objective, at_most, order_key
from jaxpipe.search.best import CHUNKS, NO_TIME, Candidate, Setting, Task, best_for, best_of_family
from jaxpipe.search.budget import within
from jaxpipe.search.solve import Options, Progress, Solution, SolveTask
from jaxpipe.search.solve.cache import VARIABLE, CacheEntry, ScheduleCache, default_folder, entry_name
from jaxpipe.search.solve.solver import solve_cached
from jaxpipe.search.solve.task import gap_of, most_offloaded
from jaxpipe.text import aligned, closest, truncate

_LONGEST_REASON = 100
_PROGRESS_S = 1.0


def _files(arguments: argparse.Namespace) -> Mapping[str, Schedule]:
    """Read the schedule files, by path, and set the sizes.

    Raises:
        JaxpipeError, OSError: one can't be read, is invalid, given twice, or of another size.
    """
    # rows of the table are keyed by path: the second of two equal paths would replace the first without a word
    twice = next((path for k, path in enumerate(arguments.files) if path in arguments.files[:k]), None)
    if twice is not None:
        raise ConfigError(f"{twice!r} is given twice")
    schedules = {path: schedule_verbs.load_schedule(path) for path in arguments.files}
    schedule_verbs.set_sizes(arguments, schedules)
    return schedules


def run_compare(arguments: argparse.Namespace) -> None:
    """Print every family and file at the same sizes, the fastest first. Flags apply to the families that take them."""

    flags.check_output(arguments.plot, flags.PLOTS, "--plot")
    costs = schedule_verbs.chosen_costs(arguments)
    files = _files(arguments)
    most = schedule_verbs.most_chunks(arguments, costs)
    row = _best_row if arguments.explore else _row
    entries = [row(family, arguments, costs, most) for family in FAMILIES.values()]
    entries += [_file_row(path, schedule, arguments, costs) for path, schedule in files.items()]
    records = [e for e in entries if isinstance(e, Record)]
    # the same order of preference as in ``best``, with ties decided by the peak
    records.sort(key=lambda r: order_key("makespan", r.timeline.makespan, r.timeline.max_span, r.peak))
    ordered: list[Record | Infeasible] = [*records, *(e for e in entries if isinstance(e, Infeasible))]
    notes = _notes(arguments, costs, records, explored=arguments.explore)
    if arguments.json:
        flags.print_json({"schedules": [entry.json() for entry in ordered], "notes": notes})
    else:
        print_table(ordered, costs.units)
        for note in notes:
            print(note)
    if arguments.plot:
        _plot(arguments, costs, ordered)
        if not arguments.json:
            print(f"wrote {arguments.plot}")


def _notes(
    arguments: argparse.Namespace, costs: schedule_verbs.CostChoice, records: Sequence[Record], *, explored: bool
) -> list[str]:
    """List what costs nothing under these costs, one line each."""
    notes = []
    if schedule_verbs.chunks_are_free(arguments, costs):
        tried = f": at most {flags.FREE_CHUNKS} a rank are tried" if explored else ""
        notes.append(f"chunks cost nothing here{tried}; --comm prices them, --layers or --max-chunks limits them")
    if any(r.free_copies for r in records):
        notes.append(f"{FREE_COPIES} here, as the costs say")
    return notes


def _row(
    family: Family, arguments: argparse.Namespace, costs: schedule_verbs.CostChoice, most: int | None
) -> Record | Infeasible:
    """Return the row of a family with its defaults and the flags that it takes."""
    takes = "chunks" in family.options
    chunks = arguments.chunks if takes else None
    group = arguments.group if "group" in family.options else None
    if chunks is None and takes:
        default_chunks = family.default_chunks if costs.profile is None else costs.profile.num_stages // arguments.ranks
        chunks = max(1, min(default_chunks, most or default_chunks))

    def generate_simulated() -> tuple[Schedule, CostProfile, Timeline]:
        if most is not None and (chunks or family.default_chunks) > most:
            raise ConfigError(
                f"{family.name} has {family.default_chunks} chunks per rank, more than the {most} allowed"
            )
        return schedule_verbs.make(family, arguments, costs, chunks, group)

    family_limit = arguments.memory_limit if "memory_limit" in family.options else None
    return _entry(family.name, arguments.memory_limit, generate_simulated, group=group, family_limit=family_limit)


def _file_row(
    path: str, schedule: Schedule, arguments: argparse.Namespace, costs: schedule_verbs.CostChoice
) -> Record | Infeasible:
    """Return the row of a schedule that was read from a file."""
    return _entry(
        schedule.name, arguments.memory_limit, lambda: schedule_verbs.simulated(schedule, arguments, costs), file=path
    )


def _entry(
    name: str,
    limit: float | None,
    generate_simulated: Callable[[], tuple[Schedule, CostProfile, Timeline]],
    **facts: Any,
) -> Record | Infeasible:
    """Return the record of what ``generate_simulated`` returns, or a failure with the reason; ``facts`` go to
    :meth:`Record.of`."""

    record = None
    try:
        schedule, profile, timeline = generate_simulated()
        # a bound within the limit holds for schedules that keep it; one that does not is measured against all others
        within = limit if at_most(max(timeline.peak_activations), limit or 0) else None
        record = Record.of(schedule, profile, timeline, within, **facts)
        schedule_verbs.check_limit(timeline, limit)
    except JaxpipeError as error:
        reason = f"needs {record.peak:g} activations, limit {limit:g}" if record else _shortened(str(error), name)
        return Infeasible(name, " ".join(str(error).split()), reason, record, facts.get("file"))
    return record


def _shortened(message: str, name: str) -> str:
    """Return the first sentence of an error, without the family's name before it."""
    return truncate(" ".join(message.split()).removeprefix(f"{name}: ").removeprefix(f"{name} "), _LONGEST_REASON)


def _best_row(
    family: Family, arguments: argparse.Namespace, costs: schedule_verbs.CostChoice, most: int | None
) -> Record | Infeasible:
    """Return the row of a family with its best parameters."""

    try:
        return _candidate_record(best_of_family(family, _task(arguments, costs, most)), arguments.memory_limit)
    except JaxpipeError as error:
        text = " ".join(str(error).split())
        return Infeasible(family.name, text, _shortened(text, family.name))


def _candidate_record(candidate: Candidate, limit: float | None) -> Record:
    facts = {"group": candidate.setting.group, "family_limit": candidate.setting.memory_limit}
    schedule = with_priced_reductions(candidate.schedule, candidate.costs)
    return Record.of(schedule, candidate.costs, candidate.timeline, limit, **facts)


def _task(
    arguments: argparse.Namespace, costs: schedule_verbs.CostChoice, most: int | None, objective: Objective = "makespan"
) -> Task:

    schedule_verbs.check_size(arguments.ranks, arguments.microbatches, arguments.chunks or 1)
    return Task(
        ranks=arguments.ranks,
        microbatches=arguments.microbatches,
        costs=costs.profile or (lambda placement: costs.for_placement(placement, placement.kind)),
        memory_limit=float("inf") if arguments.memory_limit is None else arguments.memory_limit,
        chunks=arguments.chunks,
        group=arguments.group,
        offload=None if costs.offload_time is None else True,
        objective=objective,
        braid=arguments.braid,
        max_chunks=most,
        separate=arguments.separate,
    )


def _plot(arguments: argparse.Namespace, costs: schedule_verbs.CostChoice, entries: list[Record | Infeasible]) -> None:
    from jaxpipe.plot.pareto import Point, plot_pareto

    points = [
        Point(record.label, record.peak, record.timeline.bubble_rate, record is entry)
        for entry in entries
        for record in (entry if isinstance(entry, Record) else entry.record,)
        if record is not None
    ]
    if not points:
        raise ConfigError(f"nothing to draw to {arguments.plot!r}: no family makes a schedule of these sizes")
    title = f"{arguments.ranks} ranks, {arguments.microbatches} microbatches, {costs.describe()}"
    plot_pareto(points, arguments.plot, title=title, limit=arguments.memory_limit)


def run_best(arguments: argparse.Namespace) -> None:
    """Explore all families and their parameters, show and write the best schedule among these and the files."""

    flags.check_outputs(arguments.output, flags.OUTPUTS)
    costs = schedule_verbs.chosen_costs(arguments)
    files = _files(arguments)
    most = schedule_verbs.most_chunks(arguments, costs)
    choices = []
    for path, schedule in files.items():
        entry = _file_row(path, schedule, arguments, costs)
        if isinstance(entry, Infeasible):
            flags.notice(f"{path}: not possible: {entry.error}")
        else:
            choices.append((path, entry))
    progress, ended = _Progress(), False
    try:
        task = _task(arguments, costs, most, arguments.objective)
        # the limit stops the search between two trials; the best so far is then a result like any other, with a note
        candidate, ended = within(arguments.time_limit, lambda: best_for(task, on_trial=progress))
        if candidate is None:
            raise ScheduleError(NO_TIME)
        choices.insert(0, (str(candidate.setting), _candidate_record(candidate, arguments.memory_limit)))
    except ScheduleError:
        # no family keeps the limit, but a file may
        if not choices:
            raise

    def key(choice: tuple[str, Record]) -> tuple[float, float, float]:
        timeline = choice[1].timeline
        return order_key(arguments.objective, timeline.makespan, timeline.max_span, choice[1].peak)

    setting, best = min(choices, key=key)
    notes = _notes(arguments, costs, [best], explored=True)
    if ended:
        where = f"at family {progress.at} of {len(progress.order)}"
        notes.append(f"out of time after {arguments.time_limit:g} s, {where}: the best so far; --time-limit raises it")
    schedule_verbs.conclude(arguments, costs, best, f"best: {setting}", notes, setting=setting)


class _Progress:
    """Report on stderr, about once a second, the current trial and the best so far."""

    def __init__(self) -> None:

        self.order = {family.name: k for k, family in enumerate(cheap_first(FAMILIES.values()), start=1)}
        self.at = self.tried = 0
        self.began = self.last_notice = time.perf_counter()

    def __call__(self, setting: Setting, best: Candidate | None) -> None:
        self.at = max(self.at, self.order[setting.family])
        now = time.perf_counter()
        if now - self.last_notice >= _PROGRESS_S:
            self.last_notice = now
            result = f"best so far {best.setting}, {best.makespan:.6g}" if best is not None else "nothing found yet"
            where = f"family {self.at} of {len(self.order)}, {self.tried} settings tried"
            flags.notice(f"{now - self.began:7.1f} s  {where}, now {setting}; {result}")
        self.tried += 1


_MOST_ACTIONS = 200_000
_MOST_PAIRS = 2_048
"""Pairs of stage and microbatch up to which many chunks are tried."""
_FREE_CHUNKS = (
    f"chunks cost nothing here: at most {flags.FREE_CHUNKS} a rank are tried; --comm prices them, --layers limits them"
)


def run_solve(arguments: argparse.Namespace) -> None:
    """Solve, show and write the schedule. Progress goes to standard error."""

    flags.check_outputs(arguments.output, flags.OUTPUTS)
    costs = schedule_verbs.chosen_costs(arguments)
    starts = {path: schedule_verbs.load_schedule(path) for path in (arguments.start,) if path is not None}
    schedule_verbs.set_sizes(arguments, starts)
    tasks = _tasks(arguments, costs, _started(arguments, starts.values()) or _placements(arguments, costs))
    options = Options(arguments.time_limit, arguments.seed, arguments.workers, arguments.reproducible)
    # a cached answer may be better than what the flags alone find, and --reproducible promises the same schedule anywhere
    use_cache = not (arguments.no_cache or arguments.reproducible)
    solution = solve_cached(
        tasks, options, _progress, starts=[*starts.values()], use_cache=use_cache, notice=flags.notice
    )
    for failure in solution.failures:
        flags.notice(f"part of the search failed: {failure}")
    profile = costs.for_placement(solution.task.placement, solution.schedule.name)
    schedule, timeline = solution.schedule, solution.timeline
    if profile.has_collectives:
        schedule = schedule_verbs.after_passes(schedule, profile, arguments)
        timeline = simulate(schedule, profile)
    record = _with_proof(Record.of(schedule, profile, timeline, arguments.memory_limit), solution)
    notes = [_FREE_CHUNKS] if tasks[1:] and schedule_verbs.chunks_are_free(arguments, costs) else []
    tried = [{"placement": t.placement.kind, "chunks": t.placement.num_chunks} for t in tasks]
    schedule_verbs.conclude(
        arguments, costs, record, _headline(solution, len(tasks)), notes, **_facts(solution), placements=tried
    )


def _with_proof(record: Record, solution: Solution) -> Record:
    """Return ``record`` with the bounds that the search proved for its placement."""
    # proofs hold for schedules without braids, which the search does not make; a braid may be shorter
    if record.timeline.tp_exposed_s:
        return record
    proven = solution.placement_bound
    if solution.task.objective == "span":
        return replace(record, span_lower_bound=max(record.span_lower_bound, proven))
    return replace(record, lower_bound=max(record.lower_bound, proven))


def _progress(progress: Progress, _schedule: Schedule | None) -> None:
    bound = f"bound {progress.lower_bound:.6g}  gap {progress.gap:.2%}"
    flags.notice(f"{progress.wall_s:7.1f} s  {progress.value:.6g}  {bound}  {progress.source}")


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


def _tasks(
    arguments: argparse.Namespace, costs: schedule_verbs.CostChoice, placements: Sequence[Placement]
) -> list[SolveTask]:

    tasks = []
    for placement in placements:
        schedule_verbs.check_size(arguments.ranks, arguments.microbatches, placement.num_chunks)
        actions = 3 * placement.num_stages * arguments.microbatches
        if actions > _MOST_ACTIONS:
            most = max(1, min(flags.MOST_MICROBATCHES, _MOST_ACTIONS // (3 * placement.num_stages)))
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


def _placements(arguments: argparse.Namespace, costs: schedule_verbs.CostChoice) -> Sequence[Placement]:
    """Return the requested placements within the limit on chunks.

    Raises:
        ConfigError: there are none, or as :func:`_asked`.
    """
    most = schedule_verbs.most_chunks(arguments, costs)
    placements = [x for x in _asked(arguments, costs) if x.num_chunks <= (most or x.num_chunks)]
    if not placements:
        raise ConfigError(
            f"no requested placement has at most {most} chunk(s) per rank, the limit of --layers or --max-chunks"
        )
    return placements


def _asked(arguments: argparse.Namespace, costs: schedule_verbs.CostChoice) -> Sequence[Placement]:
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
            except ScheduleError:
                # sizes that the family has no placement for
                continue
    return list(placements)


ACTIONS = ("ls", "clear")
_ENTRY_KEYS = ("value", "lower_bound", "offloaded", "wall_s", "time_limit_s", "stored", "jaxpipe")
"""Fields of an entry that ``--json`` prints as they are."""


def run_cache(arguments: argparse.Namespace) -> int:
    """List or clear; 2 if an entry could not be removed.

    Raises:
        ConfigError: another action, or a folder that is not there or can't be read.
    """

    if arguments.action not in ACTIONS:
        raise ConfigError(
            f"cache {arguments.action!r}{closest(arguments.action, ACTIONS)}; want one of: {', '.join(ACTIONS)}"
        )
    # after the result, which goes to stdout: what could not be read or removed is told apart from it on stderr
    notices: list[str] = []
    cache = ScheduleCache(_folder(arguments.dir), notices.append)
    if arguments.action == "ls":
        _list(cache, arguments.json)
    else:
        _clear(cache, arguments.json)
    for text in notices:
        flags.notice(f"jaxpipe: {text}")
    return 2 if notices and arguments.action == "clear" else 0


def _folder(directory: str | None) -> Path | None:
    """Return the folder ``--dir``, which must exist, or the default, which need not exist."""

    folder = default_folder() if directory is None else Path(directory)
    if directory == "":
        raise ConfigError("--dir is empty; name the cache's folder")
    if directory is not None and not folder.exists():
        raise ConfigError(f"--dir {directory!r}: there is no such folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; name the cache's with --dir or {VARIABLE}")
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{str(folder)!r} can't be read: permission denied")
    return folder


def _list(cache: ScheduleCache, as_json: bool) -> None:
    entries = cache.entries()
    if as_json:
        flags.print_json({"folder": str(cache.folder), "entries": [_record(e) for e in entries]})
    elif not entries:
        print(f"no schedules in {cache.folder}")
    else:
        _print_table(entries)
        print(f"{_counted(len(entries))} in {cache.folder}")


def _record(entry: CacheEntry) -> dict[str, Any]:
    task, limit = entry.task, min(entry.task.limits())
    return {
        "file": entry_name(task),
        "ranks": task.placement.num_ranks,
        "microbatches": task.num_microbatches,
        "chunks": task.placement.num_chunks,
        "placement": task.placement.kind,
        "memory_limit": None if limit == float("inf") else limit,
        "offload": task.offload,
        "objective": task.objective,
        **{name: getattr(entry, name) for name in _ENTRY_KEYS},
        "gap": gap_of(entry.value, entry.lower_bound) if entry.lower_bound > 0 else None,
    }


def _print_table(entries: Sequence[CacheEntry]) -> None:
    """Print one line an entry; ``value`` and ``bound`` in the unit of the costs, ``stored`` in UTC."""
    heads = ("ranks", "microbatches", "chunks", "placement", "limit", "offload", "objective", "value", "bound", "gap")
    rows = [(*heads, "stored (UTC)")]
    for record in map(_record, entries):
        limit, gap = record["memory_limit"], record["gap"]
        rows.append(
            (
                *(str(record[key]) for key in ("ranks", "microbatches", "chunks")),
                " ".join(record["placement"].split()),
                "none" if limit is None else number(limit),
                "yes" if record["offload"] else "no",
                record["objective"],
                number(record["value"]),
                number(record["lower_bound"]),
                "-" if gap is None else f"{gap:.1%}",
                record["stored"][:16].replace("T", " "),
            )
        )
    print("\n".join(aligned(rows)))


def _clear(cache: ScheduleCache, as_json: bool) -> None:
    removed = cache.clear()
    if as_json:
        flags.print_json({"folder": str(cache.folder), "removed": removed})
    else:
        print(f"removed {_counted(removed)} from {cache.folder}")


def _counted(count: int) -> str:
    return f"{count} schedule{'s' * (count != 1)}"
