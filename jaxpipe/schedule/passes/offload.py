"""Offload as a pass: adds O and L to any schedule, chosen by lifespan, and says what it left out and why.

Source: `pipeoffload.txt` section 2 (longest lifespan first: better than linear), section 4.2 (slots on one host lane, skip what
does not fit) and appendix D (ranks of a PCIe group take turns). Where O and L go: :mod:`~jaxpipe.schedule.passes.host_lane`.
The order of compute actions is never changed. Differs from the paper: slots come from the real times of the schedule and not
from a fixed grid, what does not fit stays, and each rank stops offloading where more would not lower its peak.

Not modelled: host memory, and other traffic on the host link.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.hardware import k_of
from jaxpipe.schedule.ir import Action, Schedule, Slot
from jaxpipe.schedule.passes.host_lane import LanePlan, Move
from jaxpipe.schedule.passes.residency import GRID, RankLife, Resident, rank_lives
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline

_SLACK = 1 + 1e-9
_HALVINGS = 7
_RESERVES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
_FASTER = (1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 10.0, 100.0, 1e6)


@dataclass(frozen=True, slots=True)
class StageOffload:
    """What became of one stage on one rank: microbatches offloaded, microbatches not, and why not (empty: all left)."""

    rank: int
    stage: int
    offloaded: int
    skipped: int
    reason: str


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A schedule with offloads, and the report.

    Peaks are activations per rank, in units of one rank's share of one microbatch; makespan and longest span are seconds.
    ``share``: offloaded part of all (stage, microbatch) pairs. ``k``: round trip ÷ (F + B + W) of the costs (equation 1).
    ``limit_met``: None without a memory limit.
    """

    schedule: Schedule
    peak_before: tuple[float, ...]
    peak_after: tuple[float, ...]
    makespan_before: float
    makespan_after: float
    span_before: float
    span_after: float
    share: float
    k: float
    stages: tuple[StageOffload, ...]
    limit_met: bool | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.schedule.name}: peak {max(self.peak_before):g} -> {max(self.peak_after):g}, "
            f"makespan {self.makespan_before:g} -> {self.makespan_after:g}, "
            f"{100 * self.share:.0f}% offloaded, k = {self.k:.3g}"
        ]
        lines += [
            f"  rank {s.rank} stage {s.stage}: {s.offloaded} offloaded, {s.skipped} not ({s.reason})"
            for s in self.stages
            if s.skipped
        ]
        return "\n".join(lines)


def offload(
    schedule: Schedule,
    costs: CostProfile,
    *,
    fraction: float | None = None,
    memory_limit: float | None = None,
    stages: Iterable[int] | None = None,
) -> Offloaded:
    """``schedule`` with residuals offloaded to the host and loaded back in time.

    ``fraction``: at most this part of each rank's (stage, microbatch) pairs, whole stages of the longest lifespan first
    (default: all). ``stages``: only these. ``memory_limit``: peak activations per rank, in units of one rank's share of a
    microbatch: offload no more than it needs, and where it can't be met for free, let B's wait for their L; without it,
    every rank's peak is made as low as possible at no cost in time. Offloads that ``schedule`` already has are replaced.

    Raises:
        ScheduleError: the schedule is invalid, the costs are for another number of stages, ``fraction`` is outside 0..1,
            a stage does not exist, or the limit is not positive.
    """
    stages = None if stages is None else frozenset(stages)
    _check_request(schedule, fraction, memory_limit, stages)
    bare = without_offloads(schedule)
    check_schedule(bare)
    before = simulate(bare, costs)
    work = _Work(bare, costs, before, fraction, stages)
    if memory_limit is None:
        schedule, after = work.free(work.lowest)
    else:
        schedule, after = work.within(memory_limit)
    check_schedule(schedule)
    met = None if memory_limit is None else _peak(after) <= memory_limit * _SLACK
    stages_report, share = work.report(schedule, after)
    return Offloaded(
        schedule,
        before.peak_activations,
        after.peak_activations,
        before.makespan,
        after.makespan,
        before.max_span,
        after.max_span,
        share,
        k_of(costs),
        stages_report,
        met,
    )


def without_offloads(schedule: Schedule) -> Schedule:
    """``schedule`` without its O and L."""
    rows = tuple(tuple(s for s in row if not (type(s) is Action and s.op in ("O", "L"))) for row in schedule.rows)
    return replace(schedule, rows=rows)


def _check_request(
    schedule: Schedule, fraction: float | None, memory_limit: float | None, stages: Iterable[int] | None
) -> None:
    if fraction is not None and not 0 <= fraction <= 1:
        raise ScheduleError(f"offload: fraction is {fraction}; want a number between 0 and 1")
    if memory_limit is not None and not memory_limit > 0:
        raise ScheduleError(f"offload: memory limit is {memory_limit}; want activations per rank, above 0")
    for s in stages or ():
        if not 0 <= s < schedule.num_stages:
            raise ScheduleError(f"offload: there is no stage {s}; stages are 0..{schedule.num_stages - 1}")


class _Work:
    """One schedule to offload: its lives, the candidates, the lanes that its ranks share."""

    def __init__(
        self,
        schedule: Schedule,
        costs: CostProfile,
        before: Timeline,
        fraction: float | None,
        stages: Iterable[int] | None,
    ) -> None:
        self.schedule, self.costs, self.before = schedule, costs, before
        self.lives = rank_lives(schedule, before, costs)
        wanted = None if stages is None else frozenset(stages)
        self.candidates = [_candidates(life, fraction, wanted) for life in self.lives]
        groups: dict[int, list[int]] = {}
        for rank, group in host_groups(costs.host, schedule.num_ranks).items():
            groups.setdefault(group, []).append(rank)
        grouped = {r for ranks in groups.values() for r in ranks}
        self.lanes = [*groups.values(), *([r] for r in range(schedule.num_ranks) if r not in grouped)]

    # Plans.

    def plan(self, ranks: Sequence[int], targets: Sequence[float], stretch: float) -> list[Move]:
        return LanePlan(
            [self.lives[r] for r in ranks],
            [self.candidates[r] for r in ranks],
            targets,
            shared=self.costs.host.mode == "shared",
            stretch=stretch,
        ).run()

    def lowest(self, stretch: float) -> list[Move]:
        """The plan with the lowest peak that was found, for every lane."""
        return [move for ranks in self.lanes for move in self._lowest(ranks, stretch)]

    def _lowest(self, ranks: Sequence[int], stretch: float) -> list[Move]:
        """Halve the range of levels to aim at; ranks of a group aim at the same part of their ranges."""
        tops = [self.lives[r].peak() for r in ranks]
        floors = [max((x.size for x in self.candidates[r]), default=0) for r in ranks]
        best: tuple[list[float], int] = [float(top) for top in tops], 0
        found: list[Move] = []
        low, high = 0.0, 1.0
        aim = 0.0
        for _ in range(_HALVINGS):
            targets = [floor + aim * (top - floor) for floor, top in zip(floors, tops, strict=True)]
            moves = self.plan(ranks, targets, stretch)
            reached = [float(self._reached(r, moves)) for r in ranks]
            score = [max(reached)] + reached, len(moves)
            if not found or score < best:
                best, found = score, moves
            if all(x <= t for x, t in zip(reached, targets, strict=True)):
                high = aim
            else:
                low = aim
            if high <= low:
                break
            aim = (low + high) / 2
        return found

    def _reached(self, rank: int, moves: Iterable[Move]) -> int:
        return self.lives[rank].peak(
            [
                (m.end_s, -m.resident.size) if m.op == "O" else (m.start_s, m.resident.size)
                for m in moves
                if m.rank == rank
            ]
        )

    # Schedules.

    def free(self, plan: Callable[[float], list[Move]]) -> tuple[Schedule, Timeline]:
        """The schedule of ``plan(stretch)`` that takes no longer than before: in PCIe groups, maybe planned with reserve."""
        for stretch in _RESERVES if any(len(ranks) > 1 for ranks in self.lanes) else _RESERVES[:1]:
            schedule = self.embed(plan(stretch))
            after = simulate(schedule, self.costs)
            if self._no_slower(after):
                return schedule, after
        return self.schedule, self.before

    def within(self, limit: float) -> tuple[Schedule, Timeline]:
        """The first of these that meets the limit: no more offloads than needed; as low as free offloads get; B's that
        wait for their L. If none does, what is free."""
        for plan in (lambda stretch: self.aimed(limit, stretch), self.lowest):
            schedule, after = self.free(plan)
            if _peak(after) <= limit * _SLACK:
                return schedule, after
        return self._delayed(limit) or (schedule, after)

    def aimed(self, limit: float, stretch: float) -> list[Move]:
        """For every lane, the plan that offloads just what stands above ``limit``."""
        return [m for ranks in self.lanes for m in self.plan(ranks, [limit * GRID] * len(ranks), stretch)]

    def _delayed(self, limit: float) -> tuple[Schedule, Timeline] | None:
        """The shortest schedule found that meets the limit: planned for a host link faster than it is, so that B's wait."""
        best: tuple[Schedule, Timeline] | None = None
        failed, met = 1.0, 0.0
        for step in range(len(_FASTER) + _HALVINGS):
            faster = _FASTER[step] if not met and step < len(_FASTER) else (failed + met) / 2
            found = self._late(limit, faster)
            if found is not None:
                met = faster
                best = found if best is None or found[1].makespan < best[1].makespan else best
            elif met:
                failed = faster
            elif step >= len(_FASTER):
                return None
            else:
                failed = faster
        return best

    def _late(self, limit: float, faster: float) -> tuple[Schedule, Timeline] | None:
        best: tuple[Schedule, Timeline] | None = None
        for target in (limit, 0.0):
            schedule = self.embed(self.aimed(target, 1 / faster))
            after = simulate(schedule, self.costs)
            if _peak(after) <= limit * _SLACK and (best is None or after.makespan < best[1].makespan):
                best = schedule, after
        return best

    def _no_slower(self, after: Timeline) -> bool:
        return (
            after.makespan <= self.before.makespan * _SLACK
            and after.max_span <= self.before.max_span * _SLACK
            and _peak(after) <= _peak(self.before) * _SLACK
        )

    def embed(self, moves: Iterable[Move]) -> Schedule:
        rows: list[list[tuple[int, int, Slot]]] = [
            [(j + 1, -1, s) for j, s in enumerate(row)] for row in self.schedule.rows
        ]
        for n, move in enumerate(moves):
            x = move.resident
            rows[move.rank].append((move.position, n, Action(move.op, x.stage, x.microbatch)))
        return replace(
            self.schedule,
            rows=tuple(tuple(slot for *_, slot in sorted(row, key=lambda entry: entry[:2])) for row in rows),
        )

    # The report.

    def report(self, schedule: Schedule, after: Timeline) -> tuple[tuple[StageOffload, ...], float]:
        """What became of every stage on every rank, and the offloaded part of all residuals."""
        stages = []
        gone = total = 0
        for life, row, peak in zip(self.lives, schedule.rows, after.peak_activations, strict=True):
            left = {(a.stage, a.microbatch) for slot in row for a in slot.actions if a.op == "O"}
            asked = {(x.stage, x.microbatch) for x in self.candidates[life.rank]}
            for stage in sorted({x.stage for x in life.residents}):
                held = [x for x in life.residents if x.stage == stage]
                stayed = [x for x in held if (stage, x.microbatch) not in left]
                why = Counter(
                    _why(life, x, peak) if (stage, x.microbatch) in asked else "not asked for" for x in stayed
                )
                reason = ", ".join(f"{n} {text}" for text, n in why.most_common())
                stages.append(StageOffload(life.rank, stage, len(held) - len(stayed), len(stayed), reason))
                total += sum(x.size for x in held)
                gone += sum(x.size for x in held) - sum(x.size for x in stayed)
        return tuple(stages), gone / total if total else 0.0


def _why(life: RankLife, x: Resident, peak: float) -> str:
    """Why a resident that was asked for stayed."""
    if x.size <= 0:
        return "nothing to move"
    if x.life_s < (x.offload_s + x.load_s) * _SLACK or x.b_slot - x.f_slot < 2:
        return "read again too soon"
    if max(life.level[x.f_slot + 1 : x.b_slot]) <= peak * GRID * _SLACK:
        return "would not lower the peak"
    return "did not fit on the host lane"


def _peak(timeline: Timeline) -> float:
    return max(timeline.peak_activations)


def _candidates(life: RankLife, fraction: float | None, stages: frozenset[int] | None) -> tuple[Resident, ...]:
    """What may leave: residents of the stages of longest mean lifespan, as many as the fraction allows."""
    by_stage: dict[int, list[Resident]] = {}
    for x in life.residents:
        if x.size > 0 and (stages is None or x.stage in stages):
            by_stage.setdefault(x.stage, []).append(x)
    if fraction is None:
        return tuple(x for held in by_stage.values() for x in held)
    budget = math.floor(fraction * len(life.residents) + 1e-9)
    chosen: list[Resident] = []
    for held in sorted(by_stage.values(), key=lambda held: -sum(x.life_s for x in held) / len(held)):
        take = min(len(held), budget - len(chosen))
        chosen += [x for n, x in enumerate(held) if (n + 1) * take // len(held) > n * take // len(held)]
    return tuple(chosen)
