"""From start times to rows and back: the order behind a solver's answer, and a schedule as a solver's hint.

Rows hold order only, and the simulator starts everything as early as the order allows, so an answer's times are shifted
left as far as they go. What keeps the memory limit is order too, all but one thing: a compute slot that starts late because
an offload gives room. Rows say it with ``S``, which waits for that O and makes the compute slots behind it wait. An S goes
before the first compute slot that starts no earlier than its O ends, so it delays nothing beyond the solver's times; it is
set only where the limit would be broken without, and never behind the L that brings the same back. Claim (one host lane per
rank): with all of them the limit holds. Take the last of the takes that have happened by some instant, in the solver's
order. All that was given back before it in the solver's times has been given back: by compute slots, as they stand before
it in the row; by an O, through its S if the take is a compute slot's, through the shared lane if it is an L's. With a lane
per direction the last step fails, see ``strict`` in :mod:`.model_memory`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import find_problems
from jaxpipe.schedule.ir import Action, Row, Schedule
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.formulation import Key
from jaxpipe.schedule.solve.instance import Instance
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import MEMORY, at_most

_SYNC = "S"
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Starts:
    """Start in ticks of every action; ``away``: what is offloaded; ``fused``: full backwards (W then has no length)."""

    start: Mapping[Key, int]
    away: frozenset[tuple[int, int]]
    fused: frozenset[tuple[int, int]]

    def end(self, instance: Instance, key: Key) -> int:
        op, k, i = key
        if (k, i) in self.fused and op in ("B", "W"):
            return self.start[key] + (instance.duration["BW"][k] if op == "B" else 0)
        return self.start[key] + instance.duration[op][k]


def schedule_of(instance: Instance, starts: Starts, name: str) -> tuple[Schedule, Timeline]:
    """The schedule that issues everything in the order of ``starts``, and when that happens.

    Raises:
        ScheduleError: the order is not a valid schedule.
    """
    lanes = [_Lane(instance, starts, rank) for rank in range(instance.problem.num_ranks)]
    syncs: set[tuple[int, int]] = set()
    for _ in range(_ROUNDS):
        schedule, timeline = _simulated(instance, name, lanes, syncs)
        if instance.task.fits(timeline):
            return schedule, timeline
        more = {pair for lane in lanes for pair in lane.missing(timeline, syncs)}
        if not more:
            break
        syncs |= more
    return _simulated(instance, name, lanes, set(starts.away))


def _simulated(
    instance: Instance, name: str, lanes: list[_Lane], syncs: set[tuple[int, int]]
) -> tuple[Schedule, Timeline]:
    task = instance.task
    schedule = Schedule(name, task.placement, task.num_microbatches, tuple(lane.row(syncs) for lane in lanes))
    problems = find_problems(schedule)
    if problems:
        raise ScheduleError(f"solver's schedule: {problems[0]}", problems)
    return schedule, simulate(schedule, task.costs)


class _Lane:
    """The actions of one rank in the order of their times."""

    def __init__(self, instance: Instance, starts: Starts, rank: int) -> None:
        self.instance, self.starts, self.rank = instance, starts, rank
        mine = set(instance.problem.replicas_of(rank))
        keys = [key for key in starts.start if key[1] in mine]
        compute = [key for key in keys if key[0] in "FBW" and not (key[0] == "W" and key[1:] in starts.fused)]
        self.compute = sorted(compute, key=self._order)
        self.begin = [starts.start[key] for key in self.compute]
        self.end = [starts.end(instance, key) for key in self.compute]
        self.place = {key: at for at, key in enumerate(self.compute)}
        self.host = [key for key in keys if key[0] in "OL" and key[1:] in starts.away]

    def _order(self, key: Key) -> tuple[int, ...]:
        """By time; what takes no time, in the order in which a microbatch passes."""
        op, k, i = key
        stages = self.instance.num_stages
        way = {"F": k % stages, "B": 2 * stages - k % stages, "W": 2 * stages + 1}[op]
        return self.starts.start[key], self.starts.end(self.instance, key), way, i, k

    def row(self, syncs: set[tuple[int, int]]) -> Row:
        """Compute slots with what goes between them: host actions behind the last slot that has ended, then syncs."""
        between: dict[int, list[tuple[int, int, int, Action]]] = {}
        gap = {key: self._gap(key) for key in self.host}
        for key, at in gap.items():
            op, k, i = key
            start, end = self.starts.start[key], self.starts.end(self.instance, key)
            between.setdefault(at, []).append((start, end, "OL".index(op), self._action(op, k, i)))
            if op == "O" and (k, i) in syncs and (place := max(self._sync_place(k, i), at)) <= gap["L", k, i]:
                between.setdefault(place, []).append((end, end, 2, self._action(_SYNC, k, i)))
        row: list[Action] = []
        for at in range(len(self.compute) + 1):
            row += (action for *_, action in sorted(between.get(at, ())))
            if at < len(self.compute):
                op, k, i = self.compute[at]
                row.append(self._action("BW" if op == "B" and (k, i) in self.starts.fused else op, k, i))
        return tuple(row)

    def _gap(self, key: Key) -> int:
        """How many compute slots stand before this O or L: those that have ended when it starts."""
        _, k, i = key
        after = bisect_right(self.end, self.starts.start[key])
        return min(max(after, self.place["F", k, i] + 1), self.place["B", k, i])

    def _action(self, op: str, k: int, i: int) -> Action:
        return Action(op, k % self.instance.num_stages, i)

    def _sync_place(self, k: int, i: int) -> int:
        """Index of the first compute slot that starts no earlier than this O ends."""
        return bisect_left(self.begin, self.starts.end(self.instance, ("O", k, i)))

    def missing(self, timeline: Timeline, syncs: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """O's that end, by the solver's times, before something that takes memory here, but not so in ``timeline``: at the
        first instant at which the rank holds more than it may."""
        when = self._first_excess(timeline)
        if when is None:
            return
        ended, taking = {}, []
        for event in timeline.of(self.rank):
            for action in event.action.actions:
                if action.op == "O":
                    ended[action.stage, action.microbatch] = event.end_s
                elif action.op in ("F", "L", "B", "W", "BW") and event.start_s <= when and event.lane != "send":
                    taking.append(self._key(action))
        latest = max((self.starts.start[key] for key in taking), default=0)
        for op, k, i in self.host:
            late = op == "O" and (k, i) not in syncs and ended[k % self.instance.num_stages, i] > when
            if late and self.starts.end(self.instance, (op, k, i)) <= latest:
                yield k, i

    def _key(self, action: Action) -> Key:
        flows, stages = self.instance.problem.placement.num_flows, self.instance.num_stages
        op = "B" if action.op == "BW" else action.op
        return op, action.microbatch % flows * stages + action.stage, action.microbatch

    def _first_excess(self, timeline: Timeline) -> float | None:
        """When the rank's memory first passes a limit; activations in bytes of residuals if only their limit is known."""
        task = self.instance.task
        curve = timeline.memory[self.rank]
        allowed = (
            [task.costs.memory_limit_bytes[self.rank] - timeline.static_bytes[self.rank]]
            if (task.costs.memory_limit_bytes)
            else []
        )
        share = sum(task.costs.residual_bytes[s] for s in task.placement.stages_of(self.rank))
        if task.memory_limit < float("inf") and not at_most(timeline.peak_activations[self.rank], task.memory_limit):
            allowed.append(task.memory_limit * share)
        limit = min(allowed, default=float("inf")) * (1 + MEMORY)
        return next((t for t, level in zip(curve.times_s, curve.bytes, strict=True) if level > limit), None)
