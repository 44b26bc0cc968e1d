"""Several training steps on end: what the optimizer's update between them costs, with and without post-validation.

Sources: `optpipe.txt` section 3.2, equations 3 and 4, and Qi et al. 2023 (zero bubble), section 4. An update needs the norm
of the whole gradient, for clipping, and whether it is finite. A rank that waits for that begins the next step when the slowest
rank has ended this one: the period is makespan + update. With *post-validation* a rank updates at once, as if the norm were
small, and that is validated later; here, before its first backward of the next step, which waits for the gradients of all
ranks (where all stages feed one loss it does anyhow). Then the period is longest rank span + update.

At uneven stages it can be shorter: a span counts from the rank's first forward, which in the first step stands as early as it
can, and where the rank then waits may stand later in the next ones. It is never longer if all stages feed one loss. Not
modelled: the time that scalars take between ranks, and steps that turn out not to be valid and start again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import DependencyGraph, Transfer
from jaxpipe.schedule.engine import Passage
from jaxpipe.schedule.ir import Action, Braid, Schedule, Slot, op_spec
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import runnable, simulate_graph
from jaxpipe.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepsTimeline(Timeline):
    """A timeline of several steps; microbatches are numbered on from step to step, and updates are gaps.

    ``ends_s[k]``: when the last action of step k has ended. ``update_s``: seconds of an update. Without the last update.
    """

    ends_s: tuple[float, ...] = ()
    update_s: float = 0.0

    @property
    def period_s(self) -> float:
        """Return the seconds from the end of the last step but one to that of the last."""
        return self.ends_s[-1] - self.ends_s[-2]


def simulate_steps(
    schedule: Schedule, costs: CostProfile, steps: int, update_s: float = 0.0, post_validation: bool = False
) -> StepsTimeline:
    """Return ``steps`` steps of ``schedule``, each rank updating for ``update_s`` seconds between them, in the unit of
    ``costs``.

    Raises:
        ScheduleError: as :func:`~jaxpipe.schedule.simulate.simulate`; fewer than two steps, or a negative or infinite update.
    """
    if steps < 2:
        raise ScheduleError(f"simulate_steps of {steps} steps; want at least 2: a period lies between two")
    if not 0 <= update_s < float("inf"):
        raise ScheduleError(f"an update takes {update_s} s; want a finite number >= 0")
    costs.require_stages(schedule.num_stages, f"schedule {schedule.name!r}")
    runnable(schedule)  # what is wrong with it is told of one step
    graph = runnable(_repeated(schedule, steps))
    computes = [_by_step(graph, rank, steps) for rank in range(schedule.num_ranks)]
    linked = _with_updates(graph, computes, post_validation)
    updates = len(linked.transfers) - len(graph.transfers)
    timeline = simulate_graph(linked, costs, [Passage(update_s, update_s)] * updates)
    ended = {(e.rank, e.action): e.end_s for e in timeline.events if e.lane == "compute"}
    last = [{(r, graph.slots[row[k][-1]]) for r, row in enumerate(computes) if row[k]} for k in range(steps)]
    ends_s = tuple(max((ended[slot] for slot in each), default=0.0) for each in last)
    return StepsTimeline(
        **{f.name: getattr(timeline, f.name) for f in fields(Timeline)}, ends_s=ends_s, update_s=update_s
    )


def _repeated(schedule: Schedule, steps: int) -> Schedule:
    """Return ``schedule`` so many times; a step's microbatches begin at a multiple of the flows."""
    placement, m = schedule.placement, schedule.num_microbatches
    stride = -(-m // placement.num_flows) * placement.num_flows
    rows = [tuple(_later(slot, k * stride, placement) for k in range(steps) for slot in row) for row in schedule.rows]
    return replace(schedule, num_microbatches=stride * steps, rows=tuple(rows))


def _later(slot: Slot, microbatches: int, placement: Placement) -> Slot:
    moved = [replace(a, microbatch=a.microbatch + microbatches // placement.span[a.stage]) for a in slot.actions]
    return moved[0] if type(slot) is Action else Braid(tuple(moved))


def _by_step(graph: DependencyGraph, rank: int, steps: int) -> list[list[int]]:
    """Return the numbers of the rank's compute slots, step by step."""
    slots = graph.lanes[rank]["compute"]
    each = len(slots) // steps
    return [slots[k * each : (k + 1) * each] for k in range(steps)]


def _with_updates(graph: DependencyGraph, computes: list[list[list[int]]], post_validation: bool) -> DependencyGraph:
    """Return ``graph`` with the waits between steps; an update is a transfer of a rank to itself that moves nothing."""
    waits, transfers, sends = list(graph.waits), list(graph.transfers), dict(graph.sends)
    for k in range(1, len(computes[0])):
        updates: dict[int, int] = {}
        last = {rank: rows[k - 1][-1] for rank, rows in enumerate(computes) if rows[k - 1]}
        for rank, slot in last.items():
            updates[rank] = len(graph.slots) + len(transfers)
            sends[slot] = (*sends.get(slot, ()), len(transfers))
            transfers.append(Transfer(slot, graph.slots[slot].actions[0], rank, rank, 0, parts=0.0))
        for rank in last:
            first, *_ = now = computes[rank][k]
            # with post-validation a step waits for the rank's own update alone, and its first backward for all ranks' last
            # slots (Qi et al. 2023, section 4)
            waits[first] = (*waits[first], *([updates[rank]] if post_validation else updates.values()))
            backward = next((n for n in now if _sends_back(graph.slots[n])), None)
            if post_validation and backward is not None:
                waits[backward] = (*waits[backward], *last.values())
    return replace(graph, waits=waits, transfers=transfers, sends=sends)


def _sends_back(slot: Slot) -> bool:
    return any(op_spec(a.op).sends == "pred" for a in slot.actions)
