"""Offload as a pass: adds O and L to any schedule, chosen by lifespan, and says what it left out and why.

:class:`Plans` is what the pass (:func:`offload`) and families that offload stand on. It knows the lives
of one simulated schedule, the residents that may leave, and which ranks share a host lane; it makes plans
(:mod:`~jaxpipe.schedule.passes.host_lane`), puts them into the rows, and simulates what comes out.

Source: `pipeoffload.txt` section 2 (longest lifespan first: better than linear), section 4.2 (slots on one host lane, skip what
does not fit) and appendix D (ranks of a PCIe group take turns). Where O and L go: :mod:`~jaxpipe.schedule.passes.host_lane`.
The order of compute actions changes only where a memory limit needs W's to run sooner. Differs from the paper: slots come from
the real times of the schedule and not from a fixed grid, what does not fit stays, and each rank stops offloading where more
would not lower its peak.

Not modelled: host memory, and other traffic on the host link.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile, k_of
from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.ir import Action, Schedule, Slot
from jaxpipe.schedule.passes.braid import slot_of, with_slots
from jaxpipe.schedule.passes.host_lane import (
    GRID,
    LanePlan,
    LaneRank,
    Move,
    RankLife,
    Resident,
    paged,
    prompt_weights,
    rank_lives,
)
from jaxpipe.schedule.passes.reductions import with_reductions_of, without_reductions
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import TIME, Timeline, at_most

_HALVINGS = 7
_RESERVES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
_FASTER = (1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 10.0, 100.0, 1e6)


class Plans:
    """One schedule without offloads: ``before`` is its timeline, ``lives`` its ranks', ``candidates`` what may leave, per rank.

    ``lanes``: the ranks that share a host lane. ``fraction`` and ``stages`` as for
    :func:`~jaxpipe.schedule.passes.offload.offload`.
    """

    def __init__(
        self, schedule: Schedule, costs: CostProfile, fraction: float | None = None, stages: Iterable[int] | None = None
    ) -> None:
        self.schedule, self.costs = schedule, costs
        self.before = simulate(schedule, costs)
        self.lives = rank_lives(schedule, self.before, costs)
        stage_set = frozenset(range(schedule.num_stages) if stages is None else stages)
        self.candidates = [_candidates(life, fraction, stage_set) for life in self.lives]
        group_of, lanes = host_groups(costs.host, schedule.num_ranks), defaultdict[int, list[int]](list)
        for r in range(schedule.num_ranks):
            lanes[group_of.get(r, ~r)].append(r)
        self.lanes = list(lanes.values())

    # Plans.

    def plan(self, ranks: Iterable[int], targets: Iterable[float], stretch: float) -> list[Move]:
        """O and L of one lane. ``targets``: level per rank above which it pays to offload."""
        lives = [self.lives[r] for r in ranks]
        views = [LaneRank(x, self.candidates[x.rank], t, list(x.level)) for x, t in zip(lives, targets, strict=True)]
        return LanePlan(views, self.costs.host.mode == "shared", stretch).run()

    def lowest(self, stretch: float) -> list[Move]:
        """Return the plan with the lowest peak that was found, for every lane."""
        return [move for ranks in self.lanes for move in self._lowest(ranks, stretch)[0]]

    def _lowest(self, ranks: Sequence[int], stretch: float, enough: float = 0.0) -> tuple[list[Move], int]:
        """Return a plan and its peak. Halves the range of levels to aim at; ranks of a group aim at the same part of their
        ranges.

        Stops early at a peak that is ``enough``.
        """
        tops = [self.lives[r].peak() for r in ranks]
        floors = [max((x.size for x in self.candidates[r]), default=0) for r in ranks]
        widest = max(top - floor for floor, top in zip(floors, tops, strict=True))
        finest = min((x.size for r in ranks for x in self.candidates[r]), default=GRID) / 2
        best, best_moves = ([max(tops), *tops], 0), list[Move]()
        low, high, aim = 0.0, 1.0, 0.0
        for _ in range(_HALVINGS):
            targets = [floor + aim * (top - floor) for floor, top in zip(floors, tops, strict=True)]
            moves = self.plan(ranks, targets, stretch)
            reached = [self._reached(r, moves) for r in ranks]
            score = [max(reached), *reached], len(moves)
            if score < best:
                best, best_moves = score, moves
            if all(x <= t for x, t in zip(reached, targets, strict=True)):
                high = aim
            else:
                low = aim
            if best[0][0] <= enough or (high - low) * widest < finest:
                break
            aim = (low + high) / 2
        return best_moves, best[0][0]

    def _reached(self, rank: int, moves: Iterable[Move]) -> int:
        return self.lives[rank].peak(m.change for m in moves if m.rank == rank)

    # Schedules.

    def free(self, plan: Callable[[float], list[Move]]) -> tuple[Schedule, Timeline]:
        """Return the schedule of ``plan(stretch)`` that takes no longer than before: in PCIe groups, maybe planned with
        reserve."""
        for stretch in _RESERVES if any(len(ranks) > 1 for ranks in self.lanes) else _RESERVES[:1]:
            schedule, after = self._with_moves(plan(stretch))
            if self._no_slower(after):
                return schedule, after
        return self.schedule, self.before

    def free_within(self, limit: float, *, sparing: bool = False) -> Schedule | None:
        """Return the schedule offloaded at no cost in time, if every rank's peak gets down to ``limit`` so.

        ``sparing``: with few offloads rather than all that fit.
        """
        top, moves = limit * GRID, list[Move]()
        for ranks in self.lanes:
            group_moves = self.plan(ranks, [top] * len(ranks), 1.0) if sparing else []
            if not sparing or not at_most(max(self._reached(r, group_moves) for r in ranks), top):
                group_moves, peak = self._lowest(ranks, 1.0, enough=top)
                if not at_most(peak, top):
                    return None
            moves += group_moves
        schedule, after = self._with_moves(moves)
        return schedule if self._no_slower(after) and at_most(peak_of(after), limit) else None

    def aimed(self, limit: float, stretch: float) -> list[Move]:
        """For every lane, the plan that offloads just what stands above ``limit``."""
        return [m for ranks in self.lanes for m in self.plan(ranks, [limit * GRID] * len(ranks), stretch)]

    def delayed(self, limit: float) -> tuple[Schedule, Timeline] | None:
        """Return the shortest schedule found that meets the limit: planned for a host link faster than it is, so that B's
        wait."""
        fits = self._within_at(limit, _FASTER[-1])
        if not fits:  # of 353 orders that had to wait, none met its limit at a lower speed then
            return None
        failed, met, faster = 0.0, float("inf"), iter(_FASTER[:-1])
        for _ in range(len(_FASTER) + _HALVINGS):
            # faster and faster until one meets the limit, then between: the slower, the less B's wait
            speed = (failed + met) / 2 if met < float("inf") else next(faster, 0.0)
            if failed >= speed or met <= 1:
                break
            if fit := self._within_at(limit, speed):
                fits, met = fits + fit, speed
            else:
                failed = speed
        return min(fits, key=lambda x: x[1].makespan)

    def paged(self, limit: float) -> tuple[Schedule, Timeline] | None:
        """Return the shortest schedule that meets the limit by order alone (:mod:`~jaxpipe.schedule.passes.offload`), or
        None."""
        tried = ((x, simulate(x, self.costs)) for x in paged(self.schedule, self.lives, self.candidates, limit))
        met = (x for x in tried if at_most(peak_of(x[1]), limit))
        return min(met, key=lambda x: x[1].makespan, default=None)

    def _within_at(self, limit: float, speed: float) -> list[tuple[Schedule, Timeline]]:
        """Return those within the limit of the schedules planned for a host link so many times as fast as it is."""
        tried = (self._with_moves(self.aimed(target, 1 / speed)) for target in (limit, 0.0))
        return [x for x in tried if at_most(peak_of(x[1]), limit)]

    def _no_slower(self, after: Timeline) -> bool:
        return all(map(at_most, figures(after), figures(self.before)))

    def _with_moves(self, moves: Iterable[Move]) -> tuple[Schedule, Timeline]:
        """Return the schedule with these moves, simulated."""
        rows = [[(j, -1, slot) for j, slot in enumerate(row, start=1)] for row in self.schedule.rows]
        for n, move in enumerate(moves):
            x = move.resident
            # behind slot ``position``, in the order in which moves were planned
            rows[move.rank].append((move.position, n, Action(move.op, x.stage, x.microbatch)))
        ordered = (tuple(slot for *_, slot in sorted(row, key=itemgetter(0, 1))) for row in rows)
        schedule = replace(self.schedule, rows=tuple(ordered))
        return schedule, simulate(schedule, self.costs)


def figures(timeline: Timeline) -> tuple[float, float, float]:
    """Makespan, longest span, peak."""
    return timeline.makespan, timeline.max_span, peak_of(timeline)


def peak_of(timeline: Timeline) -> float:
    """Return the highest peak of activations over all ranks."""
    return max(timeline.peak_activations)


def _candidates(life: RankLife, fraction: float | None, stages: frozenset[int]) -> tuple[Resident, ...]:
    """Return what may be offloaded: residents of the stages of longest mean lifespan, as many as the fraction allows."""
    by_stage = defaultdict[int, list[Resident]](list)
    for x in life.residents:
        if x.size > 0 and x.stage in stages:
            by_stage[x.stage].append(x)
    budget = len(life.residents) if fraction is None else math.floor(fraction * len(life.residents) + 1e-9)
    chosen: list[Resident] = []
    for held in sorted(by_stage.values(), key=lambda held: -sum(x.life_s for x in held) / len(held)):
        take = min(len(held), budget - len(chosen))
        # evenly spread over the microbatches
        chosen += [x for n, x in enumerate(held) if (n + 1) * take // len(held) > n * take // len(held)]
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class StageOffload:
    """Report on one stage on one rank: microbatches offloaded, microbatches not, and why not (empty: all left)."""

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
    makespan_before: float
    span_before: float
    peak_after: tuple[float, ...]
    makespan_after: float
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
        lines += (
            f"  rank {s.rank} stage {s.stage}: {s.offloaded} offloaded, {s.skipped} not ({s.reason})"
            for s in self.stages
            if s.skipped
        )
        return "\n".join(lines)


def offload(
    schedule: Schedule,
    costs: CostProfile,
    *,
    fraction: float | None = None,
    memory_limit: float | None = None,
    stages: Iterable[int] | None = None,
) -> Offloaded:
    """Return ``schedule`` with residuals offloaded to the host and loaded back in time.

    ``fraction``: at most this part of each rank's (stage, microbatch) pairs, whole stages of the longest lifespan first
    (default: all). ``stages``: only these. ``memory_limit``: peak activations per rank, in units of one rank's share of a
    microbatch: offload no more than it needs, and where it can't be met for free, let B's wait for their L, or run W's
    right behind their B; without it, every rank's peak is made as low as possible at no cost in time. Offloads that
    ``schedule`` already has are replaced.

    Raises:
        ScheduleError: the schedule is invalid, the costs are for another number of stages, ``fraction`` is outside 0..1,
            a stage does not exist, or the limit is not positive.
    """
    stages = None if stages is None else frozenset(stages)
    if fraction is not None and not 0 <= fraction <= 1:
        raise ScheduleError(f"offload: fraction is {fraction}; want a number between 0 and 1")
    if memory_limit is not None and not memory_limit > 0:
        raise ScheduleError(f"offload: memory limit is {memory_limit}; want activations per rank, above 0")
    for s in stages or ():
        if not 0 <= s < schedule.num_stages:
            raise ScheduleError(f"offload: there is no stage {s}; stages are 0..{schedule.num_stages - 1}")
    like, bare = schedule, without_offloads(without_reductions(schedule))
    check_schedule(bare)
    planned = partial(Plans, costs=costs, fraction=fraction, stages=stages)
    plans = planned(bare)
    if memory_limit is None:
        schedule, after = plans.free(plans.lowest)
    else:
        schedule, after = _within(memory_limit, plans, planned)
    check_schedule(schedule)
    met = None if memory_limit is None else at_most(peak_of(after), memory_limit)
    figures = [(x.peak_activations, x.makespan, x.max_span) for x in (plans.before, after)]
    stages_report, share = _report(plans, schedule, after)
    return Offloaded(
        with_reductions_of(schedule, like), *figures[0], *figures[1], share, k_of(costs), stages_report, met
    )


def _within(limit: float, plans: Plans, planned: Callable[[Schedule], Plans]) -> tuple[Schedule, Timeline]:
    """Return the first of these that meets the limit: no more offloads than needed; as low as free offloads get; the
    shortest of B's that wait for their L, F's that wait for an O, and W's right behind their B. If none does, what is
    free."""
    for plan in (lambda stretch: plans.aimed(limit, stretch), plans.lowest):
        schedule, after = plans.free(plan)
        if at_most(peak_of(after), limit):
            return schedule, after
    candidates, prompt = [plans.delayed(limit), plans.paged(limit)], prompt_weights(plans.schedule)
    if prompt.rows != plans.schedule.rows:
        sooner = planned(prompt)
        low = sooner.free_within(limit)
        candidates += (
            [sooner.delayed(limit), sooner.paged(limit)] if low is None else [(low, simulate(low, plans.costs))]
        )
    met = (x for x in candidates if x is not None)
    return min(met, key=lambda x: x[1].makespan, default=(schedule, after))


def without_offloads(schedule: Schedule) -> Schedule:
    """Return ``schedule`` without its O, L and S."""

    def left(slot: Slot) -> tuple[Slot, ...]:
        return slot_of(a for a in slot.actions if a.op not in ("O", "L", "S"))

    return with_slots(schedule, left)


def _report(plans: Plans, schedule: Schedule, after: Timeline) -> tuple[tuple[StageOffload, ...], float]:
    """Return the reports of every stage on every rank, and the offloaded part of all residuals."""
    stages = []
    gone = total = 0
    for life, peak in zip(plans.lives, after.peak_activations, strict=True):
        left = {(a.stage, a.microbatch) for a in schedule.actions(life.rank) if a.op == "O"}
        offloadable = set(plans.candidates[life.rank])
        for stage in sorted({x.stage for x in life.residents}):
            held = [x for x in life.residents if x.stage == stage]
            stayed = [x for x in held if (stage, x.microbatch) not in left]
            why = Counter(_why(life, x, peak, x in offloadable) for x in stayed)
            reason = ", ".join(f"{n} {text}" for text, n in why.most_common())
            stages.append(StageOffload(life.rank, stage, len(held) - len(stayed), len(stayed), reason))
            total += sum(x.size for x in held)
            gone += sum(x.size for x in held) - sum(x.size for x in stayed)
    return tuple(stages), gone / total if total else 0.0


def _why(life: RankLife, x: Resident, peak: float, is_candidate: bool) -> str:
    """Explain why a resident stayed."""
    if x.size <= 0:
        return "nothing to move"
    if not is_candidate:
        return "not asked for"
    if x.life_s < (x.offload_s + x.load_s) * (1 + TIME) or x.b_slot - x.f_slot < 2:
        return "read again too soon"
    if at_most(max(life.level[x.f_slot + 1 : x.b_slot]), peak * GRID):
        return "would not lower the peak"
    return "did not fit on the host lane"
