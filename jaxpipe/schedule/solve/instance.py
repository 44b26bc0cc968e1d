"""A :class:`~jaxpipe.schedule.solve.task.SolveTask` in whole numbers: durations in ticks, memory in units, paths between
actions.

Replicas are those of :class:`~jaxpipe.schedule.problem.Problem`: flow k's copy of stage s is ``k * num_stages + s``; with
one flow a replica is a stage. Two limits may hold on a rank, each a :class:`MemoryLimit`: activations (``memory_limit``) and
bytes (``memory_limit_bytes``, where cotangents and workspace count too).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.memory import static_bytes
from jaxpipe.schedule.problem import Problem, shares
from jaxpipe.schedule.solve.task import SolveTask
from jaxpipe.schedule.solve.ticks import FINE, MemoryUnits, Ticks, memory_units, time_grid
from jaxpipe.schedule.tolerance import at_most

OPS = ("F", "B", "W", "BW", "O", "L")


@dataclass(frozen=True, slots=True)
class Holding:
    """What one microbatch of a replica holds, in units of a limit, each part rounded up by itself.

    ``stays``: residuals that can't leave, from F's start to B's end. ``leaves``: those that O may take away. ``kept``: from B's
    end to W's end. ``cotangent``: from B's start to B's end. ``workspace``: op and units while it runs.
    """

    stays: int
    leaves: int
    kept: int
    cotangent: int = 0
    workspace: tuple[tuple[str, int], ...] = ()

    def most(self) -> int:
        """No less than it ever holds."""
        return self.stays + self.leaves + self.kept + self.cotangent + sum(units for _, units in self.workspace)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit on one rank: ``capacity`` in units, what each replica's microbatches hold, and the grid."""

    rank: int
    capacity: int
    holdings: Mapping[int, Holding]
    units: MemoryUnits
    activations: bool


@dataclass(frozen=True, slots=True)
class Instance:
    """A task in whole numbers. Ticks per replica k: ``duration[op][k]``, ``down[k]`` to the next replica, ``up[k]`` to the one
    before.

    ``may_fuse[k]``: a full backward is shorter than B and W. ``may_leave[k]``: the replica's activations may be offloaded.
    """

    task: SolveTask
    problem: Problem
    ticks: Ticks
    duration: Mapping[str, tuple[int, ...]]
    down: tuple[int, ...]
    up: tuple[int, ...]
    may_fuse: tuple[bool, ...]
    may_leave: tuple[bool, ...]
    memory_limits: tuple[MemoryLimit, ...]

    @classmethod
    def of(cls, task: SolveTask, parts: int = FINE) -> Instance:
        """The whole numbers of ``task``; ``parts`` of a mean duration to a tick where costs have no common step.

        Raises:
            ScheduleError: the stages don't form a chain on single ranks, the costs are for another number of stages or too
                uneven for a grid, or there is no microbatch.
        """
        if task.num_microbatches < 1:
            raise ScheduleError(f"number of microbatches is {task.num_microbatches}; want at least 1")
        problem, costs = Problem.of(task.placement, task.num_microbatches, task.costs), task.costs
        host_groups(costs.host, problem.num_ranks)
        stages = [k % task.placement.num_stages for k in range(problem.num_replicas)]
        seconds = {
            "F": problem.f_s,
            "B": problem.b_s,
            "W": problem.w_s,
            "BW": problem.bw_s,
            "O": tuple(costs.offload_s[s] for s in stages),
            "L": tuple(costs.load_s[s] for s in stages),
        }
        fuse = tuple(not at_most(b + w, bw) for b, w, bw in zip(problem.b_s, problem.w_s, problem.bw_s, strict=True))
        used = [op for op in OPS if (op != "BW" or any(fuse)) and (op not in "OL" or task.offload)]
        times = [*(x for op in used for x in seconds[op]), *problem.down_s, *problem.up_s]
        ticks = time_grid(times, 2 * sum(times) * task.num_microbatches, parts)
        memory_limits = tuple(_memory_limits(task, problem, stages))
        bound = {limit.rank for limit in memory_limits}
        leave = tuple(
            task.offload and costs.offloadable_bytes[s] > 0 and problem.rank[k] in bound for k, s in enumerate(stages)
        )
        return cls(
            task,
            problem,
            ticks,
            {op: tuple(ticks.of(x) for x in seconds[op]) if op in used else () for op in OPS},
            tuple(ticks.of(x) for x in problem.down_s),
            tuple(ticks.of(x) for x in problem.up_s),
            fuse,
            leave,
            memory_limits,
        )

    # Shape.

    @property
    def num_stages(self) -> int:
        return self.problem.placement.num_stages

    def is_first(self, k: int) -> bool:
        return k % self.num_stages == 0

    def is_last(self, k: int) -> bool:
        return k % self.num_stages == self.num_stages - 1

    def lane_of(self, k: int, op: str) -> tuple[int, str]:
        """The host lane that O or L of replica ``k`` runs on: (rank or −1 − PCIe group, lane)."""
        groups = host_groups(self.task.costs.host, self.problem.num_ranks)
        rank = self.problem.rank[k]
        lane = "host" if self.task.costs.host.mode == "shared" else op
        return (-1 - groups[rank] if rank in groups else rank), lane

    # Least ticks between actions of one microbatch.

    def back(self, k: int) -> int:
        """Until B's cotangent is there, from B's start."""
        b = self.duration["B"][k]
        return min(b, self.duration["BW"][k]) if self.may_fuse[k] else b

    def rest(self, k: int) -> int:
        """After B's end, until W's."""
        return 0 if self.may_fuse[k] else self.duration["W"][k]

    def heads(self) -> list[int]:
        """Per replica, the earliest start of a forward."""
        at = [0] * self.problem.num_replicas
        for k in range(1, len(at)):
            if not self.is_first(k):
                at[k] = at[k - 1] + self.duration["F"][k - 1] + self.down[k - 1]
        return at

    def round_trips(self) -> list[int]:
        """Per replica, from F's start to B's."""
        trip = list(self.duration["F"])
        for k in reversed(range(len(trip))):
            if not self.is_last(k):
                trip[k] += self.down[k] + trip[k + 1] + self.back(k + 1) + self.up[k + 1]
        return trip

    def tails(self) -> list[int]:
        """Per replica, from a B's end until nothing of its microbatch is left, on any rank."""
        tail = [self.rest(k) for k in range(self.problem.num_replicas)]
        for k in range(len(tail)):
            if not self.is_first(k):
                tail[k] = max(tail[k], self.up[k] + self.back(k - 1) + tail[k - 1])
        return tail

    def first_starts(self) -> list[int] | None:
        """Per rank, when its first action starts in every schedule; None where that depends on the order.

        With one flow, a rank's first action is F of its lowest stage and microbatch 0. That starts as soon as it arrives, which
        is a constant if every stage on the way is the lowest of its rank too.
        """
        if self.problem.placement.num_flows > 1:
            return None
        lowest = [min(self.problem.replicas_of(rank)) for rank in range(self.problem.num_ranks)]
        if any(self.problem.rank[k] in self.problem.rank[:k] for k in range(max(lowest))):
            return None
        at, heads = 0.0, [0.0]
        for f, down in zip(self.problem.f_s, self.problem.down_s, strict=True):
            at += f + down
            heads.append(at)
        return [self.ticks.of(heads[k]) for k in lowest]

    def horizon(self) -> int:
        """Ticks within which an optimal schedule ends: as long as anything is left, something runs."""
        total = sum(self.down) + sum(self.up)
        for op in OPS:
            total += sum(self.duration[op]) if op != "BW" else 0
        return total * self.task.num_microbatches + 1


def _memory_limits(task: SolveTask, problem: Problem, stages: list[int]) -> Iterator[MemoryLimit]:
    """The limits that could be felt; with the lexicographic objective all, since peaks are minimised."""
    everyone = range(problem.num_ranks)
    if task.memory_limit < inf or task.objective == "lexicographic":
        limits = dict.fromkeys(everyone, task.memory_limit)
        yield from _of_kind(task, problem, stages, limits, activations=True)
    if task.costs.memory_limit_bytes:
        static = static_bytes(task.placement, task.costs)
        allowed = zip(everyone, task.costs.memory_limit_bytes, static, strict=True)
        limits = {rank: limit - taken for rank, limit, taken in allowed if limit < inf}
        yield from _of_kind(task, problem, stages, limits, activations=False)


def _of_kind(
    task: SolveTask, problem: Problem, stages: list[int], limits: Mapping[int, float], *, activations: bool
) -> Iterator[MemoryLimit]:
    """Ledgers of these ranks, on one grid."""
    amounts = {
        rank: {k: _amounts(task, problem, stages, k, activations) for k in problem.replicas_of(rank)} for rank in limits
    }
    sizes = [x for mine in amounts.values() for parts in mine.values() for x in parts]
    finite = [x for x in limits.values() if x < inf]
    units = memory_units(sizes, max(finite, default=0.0))
    names = [op for op, _ in task.costs.temp_bytes]
    for rank, limit in limits.items():
        holdings = {}
        for k, parts in amounts[rank].items():
            stays, leaves, kept, *others = (units.size(x) for x in parts)
            workspace = tuple((op, x) for op, x in zip(names, others[1:], strict=False) if x)
            holdings[k] = Holding(stays, leaves, kept, others[0] if others else 0, workspace)
        most = sum(h.most() * len(problem.microbatches(k)) for k, h in holdings.items())
        capacity = most if limit == inf else units.limit(limit) if limit >= 0 else -1
        if capacity < most or task.objective == "lexicographic":
            yield MemoryLimit(rank, min(capacity, most), holdings, units, activations)


def _amounts(task: SolveTask, problem: Problem, stages: list[int], k: int, activations: bool) -> list[float]:
    """What stays, leaves and is kept of one microbatch; in bytes also cotangents and the workspace of each op."""
    costs, s = task.costs, stages[k]
    leaves = min(costs.offloadable_bytes[s], costs.residual_bytes[s])
    sizes = [costs.residual_bytes[s] - leaves, leaves, costs.w_residual_bytes[s]]
    if not activations:
        return [*sizes, costs.cotangent_bytes[s], *(values[s] for _, values in costs.temp_bytes)]
    share = shares(task.placement, costs)[k]
    return [x / share if share > 0 else 0.0 for x in sizes]
