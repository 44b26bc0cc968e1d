"""Offload as a pass: adds O and L to any schedule, chosen by lifespan, and says what it left out and why.

Source: `pipeoffload.txt` section 2 (longest lifespan first: better than linear), section 4.2 (slots on one host lane, skip what
does not fit) and appendix D (ranks of a PCIe group take turns). Where O and L go: :mod:`~jaxpipe.schedule.passes.host_lane`.
The order of compute actions changes only where a memory limit needs W's to run sooner. Differs from the paper: slots come from
the real times of the schedule and not from a fixed grid, what does not fit stays, and each rank stops offloading where more
would not lower its peak.

Not modelled: host memory, and other traffic on the host link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile, k_of
from jaxpipe.schedule.ir import Schedule, Slot
from jaxpipe.schedule.passes.backwards import slot_of, with_slots
from jaxpipe.schedule.passes.host_lane import GRID, RankLife, Resident, prompt_weights
from jaxpipe.schedule.passes.plans import Plans, peak_of
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import TIME, at_most


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
    bare = without_offloads(schedule)
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
    return Offloaded(schedule, *figures[0], *figures[1], share, k_of(costs), stages_report, met)


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
