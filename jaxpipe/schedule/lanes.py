"""Two lanes inside one slot: the rank's compute, and the tensor-parallel (TP) collectives that its functions wait for.

Source: `stp.txt` section 3. F and B of a stage with n collectives are n pairs (compute, collective), one after another: n equal
units of compute, each collective waits for the unit before it and the next unit for the collective. W is n units without
collectives; as part of BW, unit k of W may run once unit k of B has. Alone, F and B leave every collective exposed, and BW
hides those of B under W as far as W is long enough (Figure 3a). In a braided slot the units of all actions share one
compute lane and one collective lane, so each collective has the others' compute under it.

The order inside a braid is made by list scheduling: whichever chain is ready runs its next unit, W fills what would be a wait.
Nine rules (which chain first, how far W may reach beyond the wait) and the actions one after another are timed; the shortest
counts, and ties go to the first. It depends on seconds and counts only, so the same slot always takes the same time. Of 2,309
random slots of up to three collectives a strand, one was longer than the exhaustive optimum, by 1.3% (a test repeats that). A
braid of actions without collectives takes the sum of its actions, exactly.

Not modelled: that compute slows down while a collective runs beside it (`stp.txt` appendix F: 7.5% for a long GEMM).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import op_spec
from jaxpipe.schedule.tolerance import TIME, at_most

_RULES = tuple(product(("longest", "first", "last"), (0.0, 0.5, 1.0)))


@dataclass(frozen=True, slots=True)
class Strand:
    """One action on the two lanes: ``units`` pairs of compute and collective, then as many units that wait for no collective.

    ``chain_s``: compute between the collectives, in all. ``collective_s``: the collectives, in all. ``filler_s``: compute that
    no collective waits for, in all; its unit k may run once unit k of the chain has (at once without a chain).
    """

    chain_s: float
    collective_s: float
    filler_s: float
    units: int

    @property
    def compute_s(self) -> float:
        return self.chain_s + self.filler_s


@dataclass(frozen=True, slots=True)
class Woven:
    """A slot on its two lanes. ``seconds``: until all has ended. ``compute_s``: its compute alone.

    ``collectives``: when the collective lane is busy, from the slot's start on; adjoining intervals are merged.
    """

    seconds: float
    compute_s: float
    collectives: tuple[tuple[float, float], ...] = ()

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which the compute lane waits for a collective."""
        return max(0.0, self.seconds - self.compute_s)


def strand(costs: CostProfile, op: str, stage: int) -> Strand:
    """Return the action ``op`` of ``stage`` as a strand.

    An op whose spec names a ``collective`` cost is a chain. One with several parts (BW) has the chain of the part that does;
    the rest of its compute is filler.
    """
    spec = op_spec(op)
    seconds = costs.seconds(spec.cost, stage)
    units = costs.tp_collectives[stage] if not spec.is_sync else 1
    part = next((x for x in (spec, *map(op_spec, spec.parts)) if x.collective), None)
    if part is None:
        return Strand(0.0, 0.0, seconds, units)
    chain_s = seconds if part is spec else min(seconds, costs.seconds(part.cost, stage))
    return Strand(chain_s, costs.seconds(part.collective, stage), seconds - chain_s, units)


def slot_lanes(costs: CostProfile, actions: Sequence[tuple[str, int]]) -> Woven:
    """Return the lanes of a slot that holds ``actions``, pairs of op and stage.

    Raises:
        ScheduleError: the costs lack what an op takes.
    """
    seconds = [costs.seconds(op_spec(op).cost, stage) for op, stage in actions]
    if not any(costs.tp_comm_s[stage] for _, stage in actions):
        return Woven(total := sum(seconds), total)
    return weave([strand(costs, op, stage) for op, stage in actions], seconds)


def collectives_exposed(costs: CostProfile) -> CostProfile:
    """Return ``costs`` with every TP collective as part of the action that waits for it: F = f + T_AR, B = b + T_AR, and BW
    what it takes alone, where W hides B's collectives as far as it is long enough.

    A schedule without braids takes as long under both; generators and the solver, which make no braids, work on this form.
    """
    if not any(costs.tp_comm_s):
        return costs

    def alone(op: str) -> tuple[float, ...]:
        return tuple(slot_lanes(costs, [(op, s)]).seconds for s in range(costs.num_stages))

    return replace(
        costs, f_s=alone("F"), b_s=alone("B"), w_s=alone("W"), bw_s=alone("BW"), tp_comm_s=(), tp_collectives=()
    )


def weave(strands: Sequence[Strand], seconds: Sequence[float] | None = None) -> Woven:
    """Return the strands of a slot in the shortest of the orders described above. ``seconds``: compute of each, if known
    exactly."""
    return _shortest(tuple(strands), sum(seconds if seconds is not None else (x.compute_s for x in strands)))


@lru_cache(maxsize=4096)  # a search times many orders of the same few slots
def _shortest(strands: tuple[Strand, ...], compute_s: float) -> Woven:
    if not any(x.collective_s for x in strands):
        return Woven(compute_s, compute_s)
    best = _in_turn(strands, compute_s)
    for first, reach in _RULES if len(strands) > 1 else ():
        candidate = _Lanes(strands, first, reach).run(compute_s)
        # of orders that are equal but for rounding, the first
        if not at_most(best.seconds, candidate.seconds):
            best = candidate
    return best


def _alone(x: Strand) -> Woven:
    unit, collective = x.chain_s / x.units, x.collective_s / x.units
    busy = [(k * (unit + collective) + unit, (k + 1) * (unit + collective)) for k in range(x.units)]
    return Woven(x.chain_s + x.collective_s, x.chain_s, merged(busy))


def _in_turn(strands: Sequence[Strand], compute_s: float) -> Woven:
    """Run unit by unit in the order of ``strands``, no strand beginning before the one before it has ended."""
    busy: list[tuple[float, float]] = []
    now = 0.0
    for x in strands:
        done = _Lanes([x], "first", 1.0).run(x.compute_s) if x.filler_s or not x.collective_s else _alone(x)
        busy += [(now + a, now + b) for a, b in done.collectives]
        now += done.seconds
    return Woven(now, compute_s, merged(busy))


class _Lanes:
    """List scheduling over the units of all strands."""

    def __init__(self, strands: Sequence[Strand], first: str, reach: float) -> None:
        self.strands, self.first, self.reach = strands, first, reach
        self.next = [0 if x.chain_s or x.collective_s else x.units for x in strands]
        self.ready = [0.0] * len(strands)
        self.pool = [unit for x, k in zip(strands, self.next, strict=True) if k for unit in _fillers(x) * x.units]
        self.now = self.lane_free = 0.0
        self.busy: list[tuple[float, float]] = []

    def run(self, compute_s: float) -> Woven:
        while waiting := [k for k, x in enumerate(self.strands) if self.next[k] < x.units]:
            soonest = min(self.ready[k] for k in waiting)
            able = [k for k in waiting if at_most(self.ready[k], self.now)]
            if able:
                self._unit(max(able, key=self._preference))
            # filler runs where it delays the next unit by no more than ``reach`` of its own length
            elif self.pool and self.now + self.pool[0] <= soonest * (1 + TIME) + self.reach * self.pool[0]:
                self.now += self.pool.pop(0)
            else:
                self.now = soonest
        # filler that is left runs beside the last collective
        return Woven(max(self.now + sum(self.pool), self.lane_free), compute_s, merged(self.busy))

    def _preference(self, k: int) -> tuple[float, int]:
        x = self.strands[k]
        left = (x.chain_s + x.collective_s) * (x.units - self.next[k]) / x.units
        return (left if self.first == "longest" else 0.0, k if self.first == "last" else -k)

    def _unit(self, k: int) -> None:
        x = self.strands[k]
        self.now += x.chain_s / x.units
        begin = max(self.now, self.lane_free)
        self.ready[k] = self.lane_free = begin + x.collective_s / x.units
        if x.collective_s:
            self.busy.append((begin, self.lane_free))
        self.next[k] += 1
        self.pool += _fillers(x)


def _fillers(x: Strand) -> list[float]:
    """Return the filler that one unit sets free."""
    return [x.filler_s / x.units] if x.filler_s else []


def merged(busy: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return intervals in the order of their beginnings, those that overlap or adjoin as one."""
    intervals: list[tuple[float, float]] = []
    for begin, end in busy:
        if intervals and at_most(begin, intervals[-1][1]):
            intervals[-1] = intervals[-1][0], max(end, intervals[-1][1])
        else:
            intervals.append((begin, end))
    return tuple(intervals)
