"""Live bytes and live activations over time, from the memory effects that ops declare.

Memory is taken when an action starts and given back when it ends (``jaxpipe/README.md``); changes at one instant are merged, so
an action may take what another gives back at the same moment. Workspace (``temp_bytes``) counts while its action runs.
Deltas are summed as integers on a binary grid fine enough for doubles, so that what was taken and given back cancels
exactly.

Boundaries in flight take memory only where the costs say so (``boundary_buffers``; unit costs and the papers' do not): on the
receiving rank, from the start of the action that sends them, since a runtime that issues ahead allocates the destination of
a message when it issues the sender, to the start of the last action that reads them, whose own bytes count them from there.
Not modelled: fragmentation, and reloads that a runtime issues before the host lane is free for them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import DependencyGraph
from jaxpipe.schedule.ir import HOST_LANES, Action, Row, Schedule, Slot, op_spec
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.timeline import MemoryCurve

ACTIVATION_FIELDS = ("residual_bytes", "w_residual_bytes", "offloadable_bytes")
_Number = TypeVar("_Number", int, float)
_BITS = 50
UNIT = 2.0**_BITS
"""One unit of activation on the grid."""


_Delta = tuple[int, int, int, int]
"""Changes that an action makes: bytes at its start, activation units at its start, both at its end, as integers on the grid."""


def memory_curves(
    graph: DependencyGraph, costs: CostProfile, start_s: Sequence[float], end_s: Sequence[float]
) -> tuple[tuple[MemoryCurve, ...], tuple[float, ...]]:
    """Return, per rank, the curve of live bytes and the peak of live activations.

    A unit of activation is one rank's share of one microbatch: the residuals of the stages that the rank runs for it. For
    a stage spread over a group of ranks, costs are what each rank of the group holds; for one of a span, what an action does.
    """
    grid = _Grid(graph, costs)
    waiting: dict[int, list[tuple[float, int, int]]] = {}
    if costs.boundary_buffers:
        for rank, stage, parts, since_s, until_s in graph.waiting_boundaries(start_s, end_s):
            if amount := round(costs.boundary_bytes[stage] * parts * grid.scale):
                waiting.setdefault(rank, []).extend([(since_s, amount, 0), (until_s, -amount, 0)])
    curves = []
    for rank in range(graph.schedule.num_ranks):
        changes = _changes(graph, grid, rank, start_s, end_s)
        curves.append(_accumulate(grid, sorted([*changes, *waiting.get(rank, ())])))
    return tuple(curve for curve, _ in curves), tuple(peak for _, peak in curves)


def static_bytes(placement: Placement, costs: CostProfile) -> tuple[float, ...]:
    """Return, per rank, parameters and optimizer state of the stages it holds in any flow."""
    return tuple(
        sum((costs.param_bytes[s] + costs.optimizer_bytes[s] for s in placement.stages_of(rank)), 0.0)
        for rank in range(placement.num_ranks)
    )


def least_peaks(schedule: Schedule, costs: CostProfile) -> tuple[float, ...]:
    """Return, per rank, bytes that its order can't do without beside :func:`static_bytes`: the peak of what its actions
    take and give back, one after another. All that the simulator counts, but for boundaries that wait to be read. Of ranks
    with host copies 0."""
    temp = dict(costs.temp_bytes)

    @cache
    def change(op: str, stage: int) -> tuple[float, float, float]:
        at_start, left = _change(op, lambda field: costs.values(field)[stage])
        return at_start, temp[op][stage] if op in temp else 0.0, left

    def peak(row: Row) -> float:
        most = live = 0.0
        for slot in row:
            for action in slot.actions:
                # with copies the peak depends on times
                if op_spec(action.op).lane in HOST_LANES:
                    return 0.0
                at_start, workspace, left = change(action.op, action.stage)
                live += at_start
                most = max(most, live + workspace)
                live += left
        return most

    return tuple(map(peak, schedule.rows))


def rank_share(placement: Placement, costs: CostProfile, rank: int, flow: int) -> float:
    """Return bytes of residuals that a rank holds for one microbatch of a flow: the unit of activations."""
    groups = placement.flows[flow]
    return sum(costs.residual_bytes[s] / placement.span[s] for s in placement.stages_of(rank) if rank in groups[s])


def activation_units(costs: CostProfile, op: str, stage: int, share: float) -> tuple[int, int]:
    """Activations that an action takes when it starts and when it ends, in units of ``share`` bytes, times ``2**50``."""
    # a rank without residuals has no unit to count in
    if share <= 0:
        return 0, 0
    return _change(
        op, lambda field: round(costs.values(field)[stage] / share * UNIT) if field in ACTIVATION_FIELDS else 0
    )


def slot_units(placement: Placement, costs: CostProfile) -> Callable[[int, Slot], tuple[int, int]]:
    """Return ``change(rank, slot)``: activations that a slot takes when it starts and when it ends, in a rank's shares of one
    microbatch, times ``2**50``."""

    @cache
    def units(op: str, stage: int, rank: int, flow: int) -> tuple[int, int]:
        return activation_units(costs, op, stage, rank_share(placement, costs, rank, flow))

    def change(rank: int, slot: Slot) -> tuple[int, int]:
        each = [units(a.op, a.stage, rank, a.microbatch % placement.num_flows) for a in slot.actions]
        return sum(at_start for at_start, _ in each), sum(left for _, left in each)

    return change


def _change(op: str, amount: Callable[[str], _Number]) -> tuple[_Number, _Number]:
    """Return what an action takes at its start and at its end, where a field takes ``amount(field)``."""
    change: dict[str, _Number] = {"start": 0, "end": 0}
    for effect in op_spec(op).memory:
        change[effect.at] += effect.sign * amount(effect.field)
    return change["start"], change["end"]


class _Grid:
    """Deltas of every op and stage as integers: ``round(bytes * scale)``, with one power of two for all."""

    def __init__(self, graph: DependencyGraph, costs: CostProfile) -> None:
        self.costs = costs
        self.temp = dict(costs.temp_bytes)
        used = {effect.field for spec in graph.ops() for effect in spec.memory}
        waiting = costs.boundary_bytes if costs.boundary_buffers else ()
        amounts = [*map(costs.values, used), *self.temp.values(), waiting]
        largest = max((x for row in amounts for x in row), default=0.0)
        # sums of integers are exact in any order, so equal schedules have equal curves
        exponent = min(_BITS - math.frexp(largest)[1], sys.float_info.max_exp - 1)
        self.scale = 2.0**exponent if largest > 0 else 1.0

    def delta(self, op: str, stage: int, share: float) -> _Delta:
        """``share``: the unit of activations, in bytes."""
        start, end = _change(op, lambda field: round(self.costs.values(field)[stage] * self.scale))
        workspace = round(self.temp[op][stage] * self.scale) if op in self.temp else 0
        start_units, end_units = activation_units(self.costs, op, stage, share)
        return start + workspace, start_units, end - workspace, end_units


def _changes(
    graph: DependencyGraph, grid: _Grid, rank: int, start_s: Sequence[float], end_s: Sequence[float]
) -> list[tuple[float, int, int]]:
    """Return (time, bytes, units) of every change on ``rank``, in order of time."""
    placement = graph.schedule.placement
    num_flows = placement.num_flows
    shares = [rank_share(placement, grid.costs, rank, flow) for flow in range(num_flows)]
    deltas: dict[tuple[str, int, int], _Delta] = {}
    changes: list[tuple[float, int, int]] = []
    for number, slot in enumerate(graph.schedule.rows[rank], start=graph.row_start[rank]):
        for action in (slot,) if type(slot) is Action else slot.actions:
            key = (action.op, action.stage, action.microbatch % num_flows)
            delta = deltas.get(key)
            if delta is None:
                delta = deltas[key] = grid.delta(action.op, action.stage, shares[key[2]])
            start_bytes, start_units, end_bytes, end_units = delta
            if start_bytes or start_units:
                changes.append((start_s[number], start_bytes, start_units))
            if end_bytes or end_units:
                changes.append((end_s[number], end_bytes, end_units))
    return changes


def _accumulate(grid: _Grid, changes: Sequence[tuple[float, int, int]]) -> tuple[MemoryCurve, float]:
    levels: dict[float, tuple[int, int]] = {}  # running totals after each instant
    live = units = 0
    for time, more_bytes, more_units in changes:
        live += more_bytes
        units += more_units
        # one level an instant: the total after all that is taken and given back then
        levels[time] = live, units
    curve = MemoryCurve(tuple(levels), tuple(live / grid.scale for live, _ in levels.values()))
    return curve, max([0, *(units for _, units in levels.values())]) / UNIT


UNPRICED = "offloads, and the costs don't say how long that takes: give --offload-time, or offload_s and load_s"
"""The message for a schedule that copies to the host under costs without a time for it."""


def offloaded_share(schedule: Schedule, costs: CostProfile) -> float:
    """Return the fraction of all residuals (bytes, or activations without bytes) that the schedule copies to the host."""
    actions = [*schedule.actions()]
    moved = sum(costs.offloadable_bytes[a.stage] for a in actions if op_spec(a.op).lane == "d2h")
    total = sum(costs.residual_bytes[a.stage] for a in actions if a.op == "F")
    return moved / total if total > 0 else 0.0
