"""Report what rehearsals measured, derive costs from it, and say at which instruction one ran out of memory.

A :class:`Watch` follows a probed step (:func:`~jaxpipe.runtime.memory_probe.probe_step`) and enforces a limit smaller than the
device, if the user set one; :func:`out_of_memory` makes one line of what an allocator, or the watch, raised.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from jaxpipe.cost.memory import RankMemory, compiled_bytes
from jaxpipe.cost.profile import cost_profile, measured_comm_s, sizes_of
from jaxpipe.cost.seconds import Timing, measured_seconds, medians
from jaxpipe.errors import RunError
from jaxpipe.program.ir import Free, Instruction, Offload, Program, Recv, Reduce, Reload, Run, Send, Sync
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Action, CostProfile, Event, HostLink, Link, op_spec
from jaxpipe.schedule.engine import merged
from jaxpipe.stage.functions import Braids, Footprint, StageFunctions, device_bytes, footprint, function_of
from jaxpipe.text import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Compares the bytes on the device with those that were predicted. ``predicted``: the accounting's peak by kind;
    ``predicted_bytes`` is the figure to compare ``measured_bytes`` with: it has workspace if the allocator was asked
    (``memory statistics``), and none if buffers were counted (``live buffers``). ``exact``: false if an earlier peak of this
    process hid the real one, and ``measured_bytes`` is the most between instructions."""

    predicted: RankMemory
    predicted_bytes: int
    measured_bytes: int
    source: Literal["live buffers", "memory statistics"]
    exact: bool

    @property
    def ratio(self) -> float:
        """Predicted bytes ÷ measured bytes."""
        return self.predicted_bytes / self.measured_bytes if self.measured_bytes else float("inf")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Sums up the copies to the host (``d2h``) or back (``h2d``): ``count`` and ``bytes`` a step, seconds of one, and the
    fraction of their time in which the rank computed."""

    lane: str
    count: int
    bytes: int
    timing: Timing
    hidden: float

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that copies reached, from the median of their times."""
        return self.bytes / self.count / self.timing.median_s if self.timing.median_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank's rehearsal.

    ``timings`` by (op, stage): actions of the program, braids left out; ``standalone``: every function of its stages with
    nothing else running; ``collectives``: by stage, the tensor-parallel ones of F, likewise.
    ``step``: the rank's program without waiting for anybody. ``host_us``: median host time of one instruction. ``slowdown``:
    compute time while copying ÷ without, median over functions that did both, or None. ``footprints``: XLA's own figures.
    """

    rank: int
    num_ranks: int
    schedule: str
    stages: tuple[int, ...]
    num_instructions: int
    device: str
    timings: Mapping[tuple[str, int], Timing]
    standalone: Mapping[tuple[str, int], Timing]
    collectives: Mapping[int, Timing]
    step: Timing
    host_us: float
    memory: MemoryCheck
    copies: tuple[CopyReport, ...]
    slowdown: float | None
    footprints: Mapping[tuple[str, int], Footprint]
    events: tuple[Event, ...]


def copy_reports(program: Program, steps: Sequence[Sequence[Event]]) -> tuple[CopyReport, ...]:
    """Return a report of the copies out and one of those in, over some recorded steps of ``program``."""
    reports = []
    for lane, kind in (("d2h", Offload), ("h2d", Reload)):
        copies = [(span, k) for k, events in enumerate(steps) for span in _spans(events, lane)]
        if not copies:
            continue
        written_by = zip(program.instructions, program.written_bytes, strict=True)
        moved = sum(sum(written) for i, written in written_by if isinstance(i, kind))
        compute = [_spans(events, "compute") for events in steps]
        lengths = [b - a for (a, b), _ in copies]
        hidden = sum(_shared(span, compute[k]) for span, k in copies)
        share = hidden / total if (total := sum(lengths)) > 0 else 1.0
        reports.append(CopyReport(lane, len(copies) // len(steps), moved, Timing.of(lengths), share))
    return tuple(reports)


def slowdown(steps: Sequence[Sequence[Event]]) -> float | None:
    """Return a function's seconds while copies are under way for more than half of it ÷ its seconds with none: the median over
    functions of the ratio of medians; None where no function ran both ways."""
    groups: dict[tuple[tuple[str, int], ...], tuple[list[float], list[float]]] = {}
    for events in steps:
        copies = merged(sorted([*_spans(events, "d2h"), *_spans(events, "h2d")]))
        for e in events:
            length = e.end_s - e.start_s
            if e.lane != "compute" or length <= 0:
                continue
            shared = _shared((e.start_s, e.end_s), copies) / length
            parts = tuple((a.op, a.stage) for a in e.action.actions)
            during, without = groups.setdefault(parts, ([], []))
            # actions that a copy only touches tell neither time
            if shared > 0.5:
                during.append(length)
            elif shared == 0:
                without.append(length)
    ratios = [statistics.median(a) / statistics.median(b) for a, b in groups.values() if a and b]
    return statistics.median(ratios) if ratios else None


Span = tuple[float, float]


def _spans(events: Sequence[Event], lane: str) -> list[Span]:
    """Return when ``lane`` was busy; a sync only waits, so it does not count as compute."""
    chosen = [e for e in events if e.lane == lane and not all(op_spec(a.op).is_sync for a in e.action.actions)]
    return sorted((e.start_s, e.end_s) for e in chosen)


def _shared(span: Span, spans: Sequence[Span]) -> float:
    """Return the seconds of ``span`` that lie in one of ``spans``, which do not overlap each other."""
    return sum(max(0.0, min(span[1], b) - max(span[0], a)) for a, b in spans)


def rehearsed_costs(
    pipeline: Pipeline, reports: Sequence[RankReport], *, link: Link | None = None, host: HostLink | None = None
) -> CostProfile:
    """Return the measured cost profile of the ranks in ``reports``: a function's seconds in the program, or alone where the
    program does not call it; copies to the host take what they took in the program. For the rest see :func:`costs_from`."""
    medians_s: dict[tuple[str, int], list[float]] = {}
    for r in reports:
        # times in the program replace those alone, as they hold what neighbouring kernels and copies do to each other
        for at, timing in {**r.standalone, **r.timings}.items():
            medians_s.setdefault(at, []).append(timing.median_s)
    seconds = {at: statistics.median(values) for at, values in medians_s.items()}
    collectives = {s: x for r in reports for s, x in medians(r.collectives).items()}
    names = ", ".join(str(r.rank) for r in reports)
    source = f"rehearsed rank{'s' * (len(reports) > 1)} {names} of {pipeline.schedule.num_ranks}"
    return costs_from(pipeline, seconds, collectives, source=source, link=link, host=host)


def costs_from(
    pipeline: Pipeline,
    seconds: Mapping[tuple[str, int], float],
    collectives: Mapping[int, float],
    *,
    source: str,
    link: Link | None = None,
    host: HostLink | None = None,
) -> CostProfile:
    """Return a cost profile of measured ``seconds`` by (op, stage), F, B, W, BW, O and L, and of the ``collectives`` of F
    by stage.

    An op of a stage that was not measured gets what :func:`~jaxpipe.cost.seconds.measured_seconds` makes of the others; a
    copy what ``host`` says; collectives what :func:`~jaxpipe.cost.profile.measured_comm_s` makes of the pipeline's costs.
    ``link``: between any two ranks; free by default. XLA's workspace is in ``temp_bytes`` only if some function of every stage
    was measured.
    """
    base, stages = pipeline.costs, pipeline.stages
    complete = {s for _, s in seconds} >= set(range(len(stages)))
    workspace, code = compiled_bytes(stages) if complete else ({}, ())
    comm = measured_comm_s(base, collectives)
    costs = cost_profile(
        sizes_of(stages),
        measured_seconds(stages, seconds, comm),
        source=source if complete else source + "; other stages from FLOPs at the measured rate",
        workspace=workspace,
        state_bytes=code,
        link=link if link is not None else base.link,
        links=base.links,
        host=host if host is not None else base.host,
        **comm,
        memory_limit_bytes=base.memory_limit_bytes,
        extra=base.extra,
    )
    return replace(
        costs,
        offload_s=tuple(seconds.get(("O", s), x) for s, x in enumerate(costs.offload_s)),
        load_s=tuple(seconds.get(("L", s), x) for s, x in enumerate(costs.load_s)),
    )


ADVICE = "use a smaller microbatch, more ranks, recomputation, offload, or a schedule with a lower peak"


class LimitError(Exception):
    """A step needs more than the limit that the user set."""


class Watch:
    """Follows where a probed step of one rank is. ``at``: the instruction being run (None: the first has not begun);
    ``held``: bytes when it began, or a little earlier (what the instruction before it dropped still counts).

    Args:
        program: of the rank.
        functions: of its stages.
        limit: bytes; None for the device's own.
        braids: those that the program runs as one function.
    """

    def __init__(
        self,
        program: Program,
        functions: Mapping[tuple[int, int], StageFunctions],
        limit: float | None,
        braids: Braids = MappingProxyType({}),
    ) -> None:
        self._program, self._functions, self._braids, self._limit = program, functions, braids, limit
        # neither takes a turn: frees are part of the instruction before them, and a rank alone adds no gradients up
        self._visited = [k for k, i in enumerate(program.instructions) if not isinstance(i, Free | Reduce)]
        self.at: int | None = None
        self.held = 0

    def begin(self, placed_bytes: int) -> None:
        """Note that the step starts with ``placed_bytes`` on the device.

        Raises:
            LimitError: that is more than the limit.
        """
        self.held = placed_bytes
        if self._limit is not None and placed_bytes > self._limit:
            raise LimitError
        self.at = self._visited[0] if self._visited else None

    def __call__(self, n: int, held: Sequence[int]) -> None:
        """Note that the ``n``-th instruction has its results, and ``held[0]`` bytes are on the device.

        Raises:
            LimitError: with the instruction's workspace that is more than the limit.
        """
        results, workspace = self.needs(self._visited[n])
        # counted buffers hold no workspace, so what the instruction took while it ran is added from XLA's figures
        if self._limit is not None and held[0] + workspace > self._limit:
            self.held = held[0] - results
            raise LimitError
        self.held = held[0]
        if n + 1 < len(self._visited):
            self.at = self._visited[n + 1]

    def needs(self, at: int) -> tuple[int, int]:
        """Return the device bytes that instruction ``at`` allocates: for results, and for workspace while it runs."""
        instruction = self._program.instructions[at]
        match instruction:
            case Run():
                function = function_of(self._program.rank, instruction.parts, self._functions, self._braids)
                # gradients are added into donated accumulators, and forwarded outputs are inputs: neither takes memory
                outputs = enumerate(zip(function.outputs, function.avals_out, strict=True))
                new = [aval for k, (port, aval) in outputs if port.kind != "acc" and k not in function.forwarded]
                results = sum(map(device_bytes, new))
                return results, footprint(function).temp_bytes
            case Recv() | Reload():
                return sum(self._program.written_bytes[at]), 0
            case _:
                return 0, 0


def out_of_memory(
    error: Exception, watch: Watch, program: Program, placed_bytes: int, limit: float | None
) -> RunError | None:
    """Return one line about an error that says memory ran out; None if it says something else.

    ``placed_bytes``: what is on the device before the first instruction, for an error that comes before it. ``limit``: the
    user's, or the device's, if known.
    """
    broke_limit = isinstance(error, LimitError) or isinstance(error.__cause__, LimitError)
    if not broke_limit and "RESOURCE_EXHAUSTED" not in str(error):
        return None
    request_bytes = _bytes_in(str(error))
    at = _blamed(program, watch.at, error.action if isinstance(error, RunError) else "")
    of = "" if limit is None else f" of {format_bytes(limit)}"
    if at is None:
        request = f"; an allocation of {format_bytes(request_bytes)} failed" if request_bytes else ""
        return RunError(
            f"rank {program.rank}: out of memory before the first instruction: parameters, accumulators, optimizer state and "
            f"data take {format_bytes(placed_bytes)}{of}{request}; {ADVICE}"
        )
    instruction = program.instructions[at]
    results, workspace = watch.needs(at)
    return RunError(
        f"rank {program.rank}: out of memory at instruction {at} of {len(program.instructions)}, {_name(instruction)}, which "
        f"wanted {format_bytes(request_bytes or results + workspace)} (its results take {format_bytes(results)}, its workspace "
        f"{format_bytes(workspace)}) with {format_bytes(watch.held)} held{of}; {ADVICE}",
        _action(instruction),
    )


def _blamed(program: Program, at: int | None, action: str) -> int | None:
    """Return the instruction to blame: the one being dispatched, unless an earlier one's failure came to light later."""
    if not action or (at is not None and _action(program.instructions[at]) == action):
        return at
    ran = (
        k for k, i in enumerate(program.instructions) if isinstance(i, Run | Offload | Reload) and _action(i) == action
    )
    return next(ran, at)


def _action(instruction: Instruction) -> str:
    return "" if isinstance(instruction, Free) else str(instruction.action)


def _name(instruction: Instruction) -> str:
    match instruction:
        case Recv(action, src=src):
            return f"receiving {action} from rank {src}"
        case Send(action, dst=dst):
            return f"sending {action} to rank {dst}"
        case Free():
            return "a free"
        case Run(Action() as action) | Offload(action) | Reload(action) | Sync(action) | Reduce(action):
            return f"{action} (stage {action.stage}, microbatch {action.microbatch})"
        case Run(braid):
            return f"braid {braid}"


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "bytes": 1}


def _bytes_in(text: str) -> int:
    """Return the bytes that XLA says it could not allocate; 0 if it does not say."""
    match = re.search(r"allocat\w*(?: request)?(?: for)?:? ([0-9.]+) ?(bytes|[KMGT]iB|B)?\b", text)
    return int(float(match[1].rstrip(".")) * _UNITS[match[2] or ""]) if match else 0
