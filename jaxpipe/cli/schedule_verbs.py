"""Run ``schedules``, ``schedule``, ``simulate`` and ``plot``, without importing JAX; and read sizes, costs and the memory
limit, which the verbs that search share with them.

Costs given as ``--cost F,B,W`` are one rank's share of one microbatch and are divided by the chunks of the schedule; a file
given as ``--costs`` has an entry per stage and is used as it is.

``schedule traverse`` makes an order by rules, from a line or a Python file. ``plot`` draws schedule files (simulated here) and
recorded timelines in one picture.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpipe.cli import flags
from jaxpipe.cli.report import FREE_COPIES, Record, copies_are_free, print_summary, sketch
from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.plot import plot_timelines
from jaxpipe.plot.figure import Units, number, time_scale
from jaxpipe.schedule import (
    FAMILIES,
    VOCABULARY_FAMILIES,
    CostProfile,
    Family,
    Placement,
    Schedule,
    Timeline,
    Traversal,
    check_schedule,
    generate,
    read_costs,
    read_schedule,
    read_timeline,
    simulate,
    traverse,
    write_schedule,
)
from jaxpipe.schedule.memory import UNPRICED, offloaded_share
from jaxpipe.schedule.passes import braid, offload, separate_gradients, with_priced_reductions
from jaxpipe.schedule.passes.host_lane import late_offload
from jaxpipe.schedule.placement import placement_named
from jaxpipe.schedule.simulate import StepsTimeline, simulate_steps
from jaxpipe.schedule.timeline import Objective, at_most
from jaxpipe.text import closest


def most_chunks(arguments: argparse.Namespace, costs: CostChoice) -> int | None:
    """Return the most chunks per rank that may be tried; None: as many as the families try by themselves.

    Raises:
        ConfigError: fewer layers than ranks, or ``--chunks`` above the limit.
    """
    limits = {"--max-chunks": arguments.max_chunks}
    if arguments.layers is not None:
        if arguments.layers < arguments.ranks:
            raise ConfigError(
                f"--layers {arguments.layers} can't be spread over {arguments.ranks} ranks; lower --ranks"
            )
        limits["--layers"] = arguments.layers // arguments.ranks
    most, flag = min(((limit, flag) for flag, limit in limits.items() if limit is not None), default=(None, ""))
    if most is not None and arguments.chunks is not None and arguments.chunks > most:
        raise ConfigError(f"--chunks {arguments.chunks} contradicts {flag}, which allows {most} per rank")
    return flags.FREE_CHUNKS if most is None and chunks_are_free(arguments, costs) else most


def chunks_are_free(arguments: argparse.Namespace, costs: CostChoice) -> bool:
    """Return whether no flag or profile limits the number of chunks: no transfer time, no limit, no profile."""
    constraints = (arguments.layers, arguments.max_chunks, arguments.chunks, costs.profile)
    return not costs.comm and all(x is None for x in constraints)


_UNIFORM = ("cost", "head", "comm", "w_residual", "offload_time", "tp_comm", "tp_collectives", "reduction")
"""Flags that a file given as ``--costs`` replaces."""


@dataclass(frozen=True, slots=True)
class CostChoice:
    """The costs that a user chose: a profile read from ``path``, or uniform costs with the values of ``flags``."""

    path: str | None
    profile: CostProfile | None
    flags: Mapping[str, Any]

    @property
    def comm(self) -> float:
        return float(self.flags.get("comm", 0.0))

    @property
    def offload_time(self) -> float | None:
        """The time of an offload in the unit of the costs, or None if no flag describes the host link; see
        :func:`check_copies`."""
        return self.flags.get("offload_time")

    @property
    def units(self) -> Units:
        """A profile from a file is in seconds and bytes; costs given as flags are in whatever unit their user means."""
        return "si" if self.profile is not None else "plain"

    def describe(self) -> str:
        """Describe the costs in a few words, for a heading."""
        if self.path is not None:
            return f"costs of {Path(self.path).name}"
        parts = ["F, B, W = " + ", ".join(f"{x:g}" for x in self.flags.get("cost", (1, 1, 1)))]
        parts += ["S, T = " + ", ".join(f"{x:g}" for x in self.flags["head"])] if "head" in self.flags else []
        parts += [f"transfers {self.comm:g}"] if self.comm else []
        comm = dict.fromkeys(self.flags.get("tp_comm", ()))
        parts += ["collectives " + ", ".join(f"{x:g}" for x in comm)] if any(comm) else []
        parts += ["R, G = " + ", ".join(f"{x:g}" for x in self.flags["reduction"])] if "reduction" in self.flags else []
        parts += [f"offload {self.offload_time:g}"] if self.offload_time is not None else []
        return ", ".join(parts)

    def for_placement(self, placement: Placement, name: str) -> CostProfile:
        """Return the profile for a schedule called ``name``.

        Raises:
            ConfigError: the file has another number of stages.
        """

        if self.profile is None:
            # flags that were not given are absent here, so that CostProfile.on has the only table of defaults
            uniform_costs = {name: value for name, value in self.flags.items() if name != "cost"}
            uniform_costs |= zip("fbw", self.flags.get("cost", ()), strict=False)
            if "head" in uniform_costs and len(placement.trunk) == placement.num_stages:
                raise ConfigError(f"{name} does not divide the head, so --head does not apply; use vocab-1f1b")
            return CostProfile.on(placement, source="command line", **uniform_costs)
        if self.profile.num_stages != placement.num_stages:
            raise ConfigError(
                f"{self.path}: costs of {self.profile.num_stages} stages, but {name} with {placement.num_ranks} ranks and "
                f"{placement.num_chunks} chunks per rank has {placement.num_stages} stages"
            )
        return self.profile


def chosen_costs(arguments: argparse.Namespace) -> CostChoice:
    """Build the costs from the flags.

    Raises:
        ConfigError: ``--costs`` together with a flag it replaces.
        JaxpipeError, OSError: the file can't be read.
    """
    flag_values = {name: value for name in _UNIFORM if (value := getattr(arguments, name, None)) is not None}
    link = arguments.host_link
    if arguments.costs is None:
        return CostChoice(None, None, flag_values if link is None else {**flag_values, "host_mode": link})
    if flag_values:
        raise ConfigError(
            f"--costs FILE and --{next(iter(flag_values)).replace('_', '-')} contradict each other; give one of them"
        )

    require_file(arguments.costs)
    profile = read_costs(arguments.costs)
    # --host-link is no replacement of the file's costs but a question about them: what if the lanes were shared?
    if link is not None:
        profile = replace(profile, host=replace(profile.host, mode=link))
    return CostChoice(arguments.costs, profile, flag_values)


def check_size(ranks: int, microbatches: int, chunks: int) -> None:
    """Refuse sizes whose schedule would not fit a picture, a file or this machine.

    Raises:
        ConfigError: more than ``MOST_ACTIONS`` pairs of stage and microbatch.
    """
    pairs = ranks * microbatches * chunks
    if pairs > flags.MOST_ACTIONS:
        fitting = flags.MOST_ACTIONS // (ranks * chunks) or 1
        raise ConfigError(
            f"too large: {ranks} ranks x {chunks} chunk(s) x {microbatches} microbatches are {pairs} pairs of stage and "
            f"microbatch, and at most {flags.MOST_ACTIONS} are handled; lower one, for example --microbatches {fitting}"
        )


def check_agreement(
    arguments: argparse.Namespace, schedules: Mapping[str, Schedule], size_flags: Iterable[str]
) -> None:
    """Refuse schedules, keyed by file, that differ in size, and size flags that differ from them.

    Raises:
        ConfigError: names the flag and both values, or the files.
    """
    for flag in size_flags:
        sizes = {path: getattr(schedule, f"num_{flag}") for path, schedule in schedules.items()}
        for first, path in itertools.pairwise(sizes):
            if sizes[first] != sizes[path]:
                raise ConfigError(
                    f"{first} has {sizes[first]} {flag} and {path} has {sizes[path]}; compare schedules of one size"
                )
        flag_value = getattr(arguments, flag)
        for path, size in sizes.items():
            if flag_value not in (None, size):
                raise ConfigError(f"--{flag} {flag_value} contradicts {path}, which has {size} {flag}")


def set_sizes(arguments: argparse.Namespace, schedules: Mapping[str, Schedule]) -> None:
    """Set ``--ranks`` and ``--microbatches`` to those of the schedules, keyed by file; without schedules the flags or
    defaults hold.

    Raises:
        ConfigError: as :func:`check_agreement`.
    """
    check_agreement(arguments, schedules, flags.DEFAULT_SIZES)
    for flag, default in flags.DEFAULT_SIZES.items():
        sizes = [getattr(schedule, f"num_{flag}") for schedule in schedules.values()] + [getattr(arguments, flag)]
        setattr(arguments, flag, sizes[0] or default)


def check_copies(schedule: Schedule, profile: CostProfile, costs: CostChoice) -> None:
    """Refuse a schedule that offloads where nothing says how long that takes. ``--offload-time 0`` says it.

    Raises:
        ConfigError: names the schedule and the flag.
    """
    if costs.offload_time is not None or any(profile.offload_s) or any(profile.load_s):
        return

    # a silent 0 would let schedules that offload win every comparison
    if offloaded_share(schedule, profile) > 0:
        raise ConfigError(f"{schedule.name} {UNPRICED}")


def check_limit(timeline: Timeline, limit: float | None) -> None:
    """Refuse a schedule that needs more than ``--memory-limit``.

    Raises:
        ConfigError: names the rank with the highest peak.
    """

    peaks: Sequence[float] = timeline.peak_activations
    if limit is not None and peaks and not at_most(max(peaks), limit):
        rank = peaks.index(max(peaks))
        raise ConfigError(
            f"{timeline.name} holds {max(peaks):g} activations on rank {rank}, above --memory-limit {limit:g}"
        )


def require_file(path: str) -> None:
    """Refuse a path that is not a readable regular file.

    Raises:
        ConfigError: it does not exist, is a directory or no regular file (reading a pipe could take for ever).
    """
    where = Path(path)
    if where.is_dir():
        raise ConfigError(f"{path!r} is a directory; want a file")
    if not where.exists():
        family = path in FAMILIES or path in VOCABULARY_FAMILIES
        advice = f": 'jaxpipe schedule {path} -o {path}.sched' makes a file of that family" if family else ""
        raise ConfigError(f"{path!r} does not exist{advice}")
    if not where.is_file():
        raise ConfigError(f"{path!r} is not a regular file; want one")


def refuse_traverse_flags(arguments: argparse.Namespace) -> None:
    """Refuse the flags of ``traverse`` for families, which have a placement and rules of their own.

    Raises:
        ConfigError: names the flag.
    """
    for flag in ("placement", "rules", "unit-steps"):
        if getattr(arguments, flag.replace("-", "_")):
            raise ConfigError(f"{arguments.name} takes no --{flag}; it is for 'jaxpipe schedule {flags.TRAVERSE}'")


def traversed(arguments: argparse.Namespace, costs: CostChoice) -> tuple[Schedule, CostProfile]:
    """Return the schedule that the flags describe, and its costs.

    Raises:
        JaxpipeError: flags that contradict each other, rules that can't be read, or nothing can go on under them.
    """
    if arguments.rules is None:
        raise ConfigError("traverse needs --rules, such as --rules 'backward in-flight=4,3,2,1'")
    if arguments.group is not None:
        raise ConfigError("traverse takes no --group; give an interval, such as forward=breadth:4")
    placement = placement_named(arguments.placement or "one-to-one", arguments.ranks, arguments.chunks)
    check_size(arguments.ranks, arguments.microbatches, placement.num_chunks)
    profile = costs.for_placement(placement, flags.TRAVERSE)
    rules = _rules(arguments.rules, placement, arguments.microbatches)
    return traverse(placement, arguments.microbatches, rules, None if arguments.unit_steps else profile), profile


def _rules(text: str, placement: Placement, microbatches: int) -> Any:
    """Parse rules from one line, or take those of that name from a Python file."""
    path, _, name = text.rpartition(":")
    if text.endswith(".py"):
        raise ConfigError(f"--rules {text} names a file; say which of its names: {text}:NAME")
    if not path.endswith(".py"):
        return Traversal.parse(text)
    rule = _from_file(path, name)
    if not callable(rule):
        return rule
    try:
        return rule(placement, microbatches)
    except Exception as error:
        raise ConfigError(f"--rules {text}: {_said(error)}") from error


def _from_file(path: str, name: str) -> Any:
    """Run the Python file ``path`` and return its attribute ``name``."""
    require_file(path)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look their module up by name; setdefault, so that a file math.py does not replace math
    sys.modules.setdefault(spec.name, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--rules {path}: it can't be run: {_said(error)}") from error
    if not hasattr(module, name):
        raise ConfigError(f"--rules {path}:{name}: the file has no {name!r}")
    return getattr(module, name)


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, JaxpipeError) else " ".join(f"{type(error).__name__}: {error}".split())


def run_schedules(arguments: argparse.Namespace) -> None:
    """List the families, one line each."""

    families = {**FAMILIES, **VOCABULARY_FAMILIES}
    if arguments.json:
        keys = ("name", "description", "source")
        flags.print_json({"schedules": [{k: getattr(f, k) for k in keys} for f in families.values()]})
        return
    width = max(map(len, families))
    for name, family in families.items():
        print(f"{name:<{width}}  {family.description}")


def run_schedule(arguments: argparse.Namespace) -> None:
    """Generate, simulate, write and show one schedule."""
    flags.check_outputs(arguments.output, flags.OUTPUTS)
    costs, family_limit = chosen_costs(arguments), None
    if arguments.name == flags.TRAVERSE:
        schedule, profile, timeline = _finished(*traversed(arguments, costs), arguments, costs)
    else:
        family = _family(arguments.name)
        refuse_traverse_flags(arguments)
        schedule, profile, timeline = make(
            family, arguments, costs, arguments.chunks, arguments.group, arguments.objective
        )
        family_limit = arguments.memory_limit if "memory_limit" in family.options else None
    heading = ""
    # offload is the last pass: it looks for time under compute slots, which the passes before it still move
    if arguments.offload is not None:
        offloaded = offload(schedule, profile, fraction=arguments.offload, memory_limit=arguments.memory_limit)
        check_copies(offloaded.schedule, profile, costs)
        schedule, timeline, heading = offloaded.schedule, simulate(offloaded.schedule, profile), str(offloaded)
    check_limit(timeline, arguments.memory_limit)
    facts = {"group": arguments.group, "family_limit": family_limit}
    conclude(arguments, costs, Record.of(schedule, profile, timeline, arguments.memory_limit, **facts), heading)


def run_simulate(arguments: argparse.Namespace) -> None:
    """Read, check and simulate one schedule file."""
    flags.check_outputs(arguments.output, flags.OUTPUTS)
    costs = chosen_costs(arguments)
    schedule = load_schedule(arguments.file)
    check_agreement(arguments, {arguments.file: schedule}, ("ranks", "microbatches", "chunks"))
    schedule, profile, timeline = simulated(schedule, arguments, costs)
    check_limit(timeline, arguments.memory_limit)
    record = Record.of(schedule, profile, timeline, arguments.memory_limit)
    if arguments.steps is None:
        if arguments.post_validation or arguments.update is not None:
            raise ConfigError("--update and --post-validation apply to several steps; set their number with --steps")
        conclude(arguments, costs, record)
        return

    check_size(schedule.num_ranks, schedule.num_microbatches * arguments.steps, schedule.num_chunks)
    update = arguments.update or 0.0
    steps = simulate_steps(schedule, profile, arguments.steps, update, arguments.post_validation)
    step_facts = {"steps": arguments.steps, "update": update, "post_validation": arguments.post_validation}
    conclude(arguments, costs, record, shown=steps, period=steps.period_s, **step_facts)


def load_schedule(path: str) -> Schedule:
    """Read and check a schedule file; a notice says what of it was left out.

    Raises:
        JaxpipeError, OSError: it can't be read, or breaks a rule; the message begins with the path.
    """

    require_file(path)
    schedule = read_schedule(path, flags.notice)
    check_schedule(schedule, path)
    return schedule


def simulated(
    schedule: Schedule, arguments: argparse.Namespace, costs: CostChoice
) -> tuple[Schedule, CostProfile, Timeline]:
    """Apply the requested passes to a schedule that was read, and return it with costs and timeline. A notice names an O
    that stands too late.

    Raises:
        JaxpipeError: costs for another number of stages, or none for its copies to the host.
    """

    profile = costs.for_placement(schedule.placement, schedule.name)
    schedule, profile, timeline = _finished(schedule, profile, arguments, costs)
    # a file is kept as it is, but its author may not know that an O waits for the compute slot before it in its row
    _warn_of_late_offloads(schedule, profile, timeline, costs)
    return schedule, profile, timeline


def _warn_of_late_offloads(schedule: Schedule, profile: CostProfile, timeline: Timeline, costs: CostChoice) -> None:

    late = late_offload(schedule, profile, timeline)
    if late is None:
        return
    time = time_scale(timeline.makespan, costs.units)
    shorter = not at_most(timeline.makespan, late.timeline.makespan)
    remainder = f" (and {late.num_others} more likewise)" if late.num_others else ""
    peaks = [number(max(t.peak_activations)) for t in (late.timeline, timeline)]
    gain = (
        f"the makespan would be {time.show(late.timeline.makespan)}, not {time.show(timeline.makespan)}"
        if shorter
        else f"the peak would be {peaks[0]} activations, not {peaks[1]}"
    )
    flags.notice(
        f"warning: {schedule.name}: {late.action} on rank {late.rank} follows {late.after} and waits for its end; "
        f"directly after {late.source}{remainder} {gain}"
    )


def _family(name: str) -> Family:

    family = FAMILIES.get(name) or VOCABULARY_FAMILIES.get(name)
    if family is None:
        names = (*FAMILIES, *VOCABULARY_FAMILIES, flags.TRAVERSE)
        raise ConfigError(f"unknown schedule {name!r}{closest(name, names)}; known: {', '.join(names)}")
    return family


def make(
    family: Family,
    arguments: argparse.Namespace,
    costs: CostChoice,
    chunks: int | None,
    group: int | None,
    objective: Objective = "makespan",
) -> tuple[Schedule, CostProfile, Timeline]:
    """Generate and simulate one family with the flags it takes; its peak is not checked.

    Raises:
        JaxpipeError: a flag it does not take, a size it does not work for, costs for another number of stages, or none for its
            copies to the host.
    """

    if chunks is not None and chunks != family.default_chunks and "chunks" not in family.options:
        raise ConfigError(f"{family.name} takes no --chunks; it always has {family.default_chunks} per rank")
    if group is not None and "group" not in family.options:
        raise ConfigError(f"{family.name} takes no --group")
    # the profile must exist before the schedule: families that order by costs get it
    per_rank = chunks or family.default_chunks
    check_size(arguments.ranks, arguments.microbatches, per_rank)
    profile = costs.for_placement(family.placement(arguments.ranks, per_rank), family.name)
    schedule = generate(
        family.name,
        ranks=arguments.ranks,
        microbatches=arguments.microbatches,
        chunks=per_rank if "chunks" in family.options else None,
        costs=profile if "costs" in family.options else None,
        memory_limit=arguments.memory_limit if "memory_limit" in family.options else None,
        group=group,
        objective=objective,
    )
    return _finished(schedule, profile, arguments, costs)


def _finished(
    schedule: Schedule, profile: CostProfile, arguments: argparse.Namespace, costs: CostChoice
) -> tuple[Schedule, CostProfile, Timeline]:
    """Apply passes to a schedule, add the reductions that ``profile`` prices, and simulate it."""
    check_copies(schedule, profile, costs)
    schedule = with_priced_reductions(after_passes(schedule, profile, arguments), profile)
    return schedule, profile, simulate(schedule, profile)


def after_passes(schedule: Schedule, costs: CostProfile, arguments: argparse.Namespace) -> Schedule:
    """Apply the passes of ``--separate`` and ``--braid``."""

    limit = float("inf") if arguments.memory_limit is None else arguments.memory_limit
    if "separate" in arguments and arguments.separate:
        schedule = separate_gradients(schedule, costs, memory_limit=limit)
    return braid(schedule, costs, memory_limit=limit) if arguments.braid else schedule


def conclude(
    arguments: argparse.Namespace,
    costs: CostChoice,
    record: Record,
    heading: str = "",
    notes: Sequence[str] | None = None,
    shown: StepsTimeline | None = None,
    **facts: Any,
) -> None:
    """Write what ``-o`` names, a schedule or a picture as its suffix says; then show the record: as JSON with ``facts`` and
    ``notes``, or for people below ``heading``, with a picture where it fits and ``notes``. Pictures are of ``shown``."""
    schedule, timeline = record.schedule, shown or record.timeline
    for path in arguments.output:
        if flags.is_picture(path):
            title = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
            title += f", {FREE_COPIES}" if record.free_copies else ""
            plot_timelines([timeline], path, title=title, units=costs.units)
        else:
            write_schedule(schedule, path)
    if arguments.json:
        flags.print_json({**record.json(), **facts, **({} if notes is None else {"notes": notes})})
        return
    if heading:
        print(heading)
    print_summary(record, costs.units, shown)
    print(sketch(timeline, _terminal_width(), costs.units))
    for note in (*(f"wrote {path}" for path in arguments.output), *(notes or ())):
        print(f"  {note}")


def _terminal_width() -> int:
    """Return the columns of the terminal; a generous fixed number when the output goes to a file or another program."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if terminal else 160


_MOST_FILES = 8


def run_plot(arguments: argparse.Namespace) -> None:
    """Draw all files into each output."""

    if len(arguments.files) > _MOST_FILES:
        raise ConfigError(f"{len(arguments.files)} files are too many for one picture; give at most {_MOST_FILES}")
    flags.check_outputs(arguments.output, flags.PLOT_OUTPUTS)
    costs = chosen_costs(arguments)
    drawings = [_drawing(path, costs) for path in arguments.files]
    timelines = [timeline for timeline, _ in drawings]
    # one time axis for all: units of cost beside seconds would draw one of them as a line
    measured = [p for p, t in zip(arguments.files, timelines, strict=True) if t.source == "measured"]
    drawn = [p for p in arguments.files if not _holds_timeline(p)]
    if measured and drawn and costs.profile is None:
        raise ConfigError(
            f"{measured[0]} was measured in seconds and {drawn[0]} has unit costs; "
            "give --costs FILE so that both share a time axis"
        )
    units: Units | None = "si" if measured or costs.profile is not None else None
    title = arguments.title
    if any(free for _, free in drawings):
        title = " · ".join([title or " · ".join(dict.fromkeys(t.name for t in timelines)), FREE_COPIES])
    for path in arguments.output:
        plot_timelines(timelines, path, title=title, units=units)
        print(f"wrote {path}")


def _drawing(path: str, costs: CostChoice) -> tuple[Timeline, bool]:
    """Return the timeline of a file, and whether its copies to the host take no time because the costs say so."""

    require_file(path)
    if _holds_timeline(path):
        return read_timeline(path), False
    if flags.suffix_of(path) == ".trace.json":
        raise ConfigError(
            f"{path!r} is a trace, which is written but not read; give the schedule or {flags.TIMELINE_SUFFIX} file"
        )

    schedule = load_schedule(path)
    profile = costs.for_placement(schedule.placement, schedule.name)
    check_copies(schedule, profile, costs)
    schedule = with_priced_reductions(schedule, profile)
    return simulate(schedule, profile), copies_are_free(schedule, profile)


def _holds_timeline(path: str) -> bool:
    """Return whether a file is a timeline rather than a schedule: by its suffix, or the format named at the top of the JSON."""
    if path.lower().endswith(flags.TIMELINE_SUFFIX):
        return True
    if flags.suffix_of(path) != ".json":
        return False
    # both kinds are JSON with the format's name first: the first bytes tell them without decoding a large file twice
    with Path(path).open("rb") as file:
        return b'"jaxpipe timeline' in file.read(200)
