"""Reports of rehearsals, and the costs that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxpipe.cost import Timing, cost_profile
from jaxpipe.cost.memory import RankMemory, compiled_bytes
from jaxpipe.cost.profile import sizes_of
from jaxpipe.cost.seconds import measured_seconds, medians
from jaxpipe.program.ir import Offload, Program, Reload
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import CostProfile, Event, HostLink, Link, op_spec
from jaxpipe.schedule.lanes import merged
from jaxpipe.stage.compiled.footprint import Footprint


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Bytes on the device. ``predicted``: what the accounting says, its peak broken down by kind; ``predicted_bytes`` is the
    figure to compare ``measured_bytes`` with: with workspace where the allocator was asked (``memory statistics``), without
    where buffers were counted (``live buffers``). ``exact``: false if an earlier peak of this process hid the real one, and
    ``measured_bytes`` is the most seen between instructions."""

    predicted: RankMemory
    predicted_bytes: int
    measured_bytes: int
    source: Literal["live buffers", "memory statistics"]
    exact: bool

    @property
    def ratio(self) -> float:
        """Predicted ÷ measured."""
        return self.predicted_bytes / self.measured_bytes if self.measured_bytes else float("inf")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Copies to the host (``d2h``) or back (``h2d``): ``count`` and ``bytes`` a step, seconds of one, and the fraction of their
    time in which the rank computed."""

    lane: str
    count: int
    bytes: int
    timing: Timing
    hidden: float

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth reached."""
        return self.bytes / self.count / self.timing.median_s if self.timing.median_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank's rehearsal.

    ``timings`` by (op, stage): actions of the program, braids left out; ``alone``: every function of its stages, nothing else
    running; ``collectives``: by stage, the tensor-parallel ones of F, as alone.
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
    alone: Mapping[tuple[str, int], Timing]
    collectives: Mapping[int, Timing]
    step: Timing
    host_us: float
    memory: MemoryCheck
    copies: tuple[CopyReport, ...]
    slowdown: float | None
    footprints: Mapping[tuple[str, int], Footprint]
    events: tuple[Event, ...]


def copy_reports(program: Program, steps: Sequence[Sequence[Event]]) -> tuple[CopyReport, ...]:
    """Copies out and in over some recorded steps of ``program``."""
    reports = []
    for lane, kind in (("d2h", Offload), ("h2d", Reload)):
        copies = [(span, k) for k, events in enumerate(steps) for span in _spans(events, lane)]
        if not copies:
            continue
        moved = sum(
            sum(written)
            for i, written in zip(program.instructions, program.written_bytes, strict=True)
            if isinstance(i, kind)
        )
        compute = [_spans(events, "compute") for events in steps]
        lengths = [b - a for (a, b), _ in copies]
        hidden = sum(_shared(span, compute[k]) for span, k in copies)
        total = sum(lengths)
        reports.append(
            CopyReport(lane, len(copies) // len(steps), moved, Timing.of(lengths), hidden / total if total > 0 else 1.0)
        )
    return tuple(reports)


def slowdown(steps: Sequence[Sequence[Event]]) -> float | None:
    """Seconds of a function while copies are under way for more than half of it ÷ seconds with none: the median over
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
            if shared > 0.5:
                during.append(length)
            elif shared == 0:
                without.append(length)
    ratios = [statistics.median(a) / statistics.median(b) for a, b in groups.values() if a and b]
    return statistics.median(ratios) if ratios else None


Span = tuple[float, float]


def _spans(events: Sequence[Event], lane: str) -> list[Span]:
    """When ``lane`` was busy; a sync only waits, so it does not count as compute."""
    chosen = [e for e in events if e.lane == lane and not all(op_spec(a.op).is_sync for a in e.action.actions)]
    return sorted((e.start_s, e.end_s) for e in chosen)


def _shared(span: Span, spans: Sequence[Span]) -> float:
    """Seconds of ``span`` that lie in one of ``others``, which do not overlap each other."""
    return sum(max(0.0, min(span[1], b) - max(span[0], a)) for a, b in spans)


def rehearsed_costs(
    pipeline: Pipeline, reports: Sequence[RankReport], *, link: Link | None = None, host: HostLink | None = None
) -> CostProfile:
    """The measured cost profile of the ranks in ``reports``: seconds in the program, alone where the program does not call a
    function; copies to the host take what they took in the program. For the rest see :func:`costs_from`."""
    medians_s: dict[tuple[str, int], list[float]] = {}
    for r in reports:
        for at, timing in {**r.alone, **r.timings}.items():
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
    """A profile of measured ``seconds`` by (op, stage), F, B, W, BW, O and L, and of the tensor-parallel ``collectives`` of F
    by stage.

    An op of a stage that was not measured gets what :func:`~jaxpipe.cost.seconds.measured_seconds` makes of the others; a
    copy what ``host`` says; collectives what those of the pipeline's costs take at the rate of the measured ones (none, if
    none were). ``link``: between any two ranks; free by default. XLA's workspace is in ``temp_bytes`` only if some function of
    every stage was measured.
    """
    base, stages = pipeline.costs, pipeline.stages
    complete = {s for _, s in seconds} >= set(range(len(stages)))
    workspace, code = compiled_bytes(stages) if complete else ({}, ())
    guessed = sum(base.tp_comm_s[s] for s in collectives)
    rate = sum(collectives.values()) / guessed if guessed else 0.0
    comm = tuple(collectives.get(s, rate * x) for s, x in enumerate(base.tp_comm_s))
    costs = cost_profile(
        sizes_of(stages),
        measured_seconds(stages, seconds, comm),
        source=source if complete else source + "; other stages from FLOPs at the measured rate",
        workspace=workspace,
        state_bytes=code,
        link=link if link is not None else base.link,
        links=base.links,
        host=host if host is not None else base.host,
        tp_comm_s=comm,
        memory_limit_bytes=base.memory_limit_bytes,
        extra=base.extra,
    )
    return replace(
        costs,
        offload_s=tuple(seconds.get(("O", s), x) for s, x in enumerate(costs.offload_s)),
        load_s=tuple(seconds.get(("L", s), x) for s, x in enumerate(costs.load_s)),
    )
