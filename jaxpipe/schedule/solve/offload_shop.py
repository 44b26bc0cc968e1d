"""The tables of a scheduling task with offload, what a list scheduler may prefer, and the plan that comes of it.

Codes are those of :mod:`~jaxpipe.schedule.problem`, with O, L and S as ops 4, 5 and 6. Memory is counted in whole numbers on
the simulator's grid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor, inf
from typing import Literal

from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.list_schedule.clock import Feed, Tables
from jaxpipe.schedule.problem import Problem, shares
from jaxpipe.schedule.solve.task import SolveTask

OPS = ("F", "B", "W", "BW", "O", "L", "S")
O, L, S = 4, 5, 6  # noqa: E741
GRID = 2.0**50

Weights = Literal["fill", "gap", "half", "eager", "fused"]
"""W when nothing else can run; not when something that is on its way arrives before it ends, or before it is half done; right
behind its B; or as one BW."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank prefers.

    ``caps``: per replica, the most microbatches between the start of F and the start of B. ``weights``: when W's run.
    ``forward_first``: F before B where both can run. ``leave``: ``none``; ``need``, while memory is short; ``all``.
    ``keep``: the next so many microbatches of a stage to turn back don't leave. ``prefetch``: so many may come back early.
    ``away``: per replica, which microbatches may leave; None: any. ``lane``: which a shared lane serves first, unless a B waits
    for its L. ``bold``: F's may take the room that the next B's L needs (only an O can then go on).
    """

    caps: tuple[int, ...]
    weights: Weights = "fill"
    forward_first: bool = False
    leave: Literal["none", "need", "all"] = "need"
    keep: int = 1
    prefetch: int = 2
    away: tuple[tuple[bool, ...], ...] | None = None
    lane: Literal["back", "out", "alternate"] = "back"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of codes, with the times the engine gave them: makespan and longest span, seconds."""

    rows: tuple[list[int], ...]
    makespan: float
    span: float


class Shop:
    """The tables of a task, read only."""

    def __init__(self, task: SolveTask) -> None:
        self.task = task
        self.problem = problem = Problem.of(task.placement, task.num_microbatches, task.costs)
        n, stages = problem.num_replicas, task.placement.num_stages
        self.stages, self.flows = stages, task.placement.num_flows
        self.step = n * task.num_microbatches  # between the codes of one op and the next
        self.base = [k * task.num_microbatches + k // stages for k in range(n)]
        costs = task.costs
        self.count = [len(problem.microbatches(k)) for k in range(n)]
        self.mine = [problem.replicas_of(r) for r in range(problem.num_ranks)]
        units = [1 / x if x > 0 else 0.0 for x in shares(task.placement, costs)]
        self.held = [round(costs.residual_bytes[k % stages] * units[k] * GRID) for k in range(n)]
        self.kept = [round(costs.w_residual_bytes[k % stages] * units[k] * GRID) for k in range(n)]
        self.leaves = [round(costs.offloadable_bytes[k % stages] * units[k] * GRID) for k in range(n)]
        self.room = [floor(x * (1 + 1e-9) * GRID) if x < inf else 1 << 200 for x in task.safe_limits()]
        self.out_s = [costs.offload_s[k % stages] for k in range(n)]
        self.back_s = [costs.load_s[k % stages] for k in range(n)]
        self.shared = costs.host.mode == "shared"
        groups = host_groups(costs.host, problem.num_ranks)
        names = [("group", groups[r]) if r in groups else ("rank", r) for r in range(problem.num_ranks)]
        self.lane = [names.index(x) for x in names]
        self.riders = [[r for r in range(problem.num_ranks) if self.lane[r] == q] for q in range(problem.num_ranks)]
        self.lanes = [(2 * q,) if self.shared else (2 * q, 2 * q + 1) for q in self.lane]
        self.tables = self._tables()

    def _tables(self) -> Tables:
        """Those of the problem, where each host lane is a rank of its own (number p + lane): O's and L's run there. Memory is
        the chooser's business."""
        problem, plain = self.problem, self.problem.tables
        p, n = problem.num_ranks, problem.num_replicas
        back = [(Feed(r, -1, 0.0, ()),) for r in problem.rank]
        copies = [(p + self.lanes[r][which],) for which in (0, -1) for r in problem.rank]
        return replace(
            plain,
            num_ranks=3 * p,
            ranks=[*plain.ranks, *copies],
            seconds=[*plain.seconds, *self.out_s, *self.back_s],
            change=[0.0] * (6 * n),
            feeds=[*plain.feeds, *back, *back],
            needs=[*plain.needs, *([0] * (2 * n))],
        )

    def trip_s(self, replica: int) -> float:
        """Least seconds from the start of a replica's F to the start of its B."""
        q, stages = self.problem, self.task.placement.num_stages
        down = range(replica, (replica // stages + 1) * stages - 1)
        there = sum(q.f_s[k] + q.down_s[k] for k in down)
        last = (replica // stages + 1) * stages - 1
        return there + q.f_s[last] + sum(q.b_s[k + 1] + q.up_s[k + 1] for k in down)

    def schedule(self, name: str, plan: Plan) -> Schedule:
        """The schedule of a plan."""
        n, m, stages = self.problem.num_replicas, self.problem.num_microbatches, self.task.placement.num_stages
        kinds = [(op, k % stages) for op in OPS for k in range(n)]
        rows = tuple(tuple(Action(*kinds[c // m], c % m) for c in row) for row in plan.rows)
        return Schedule(name, self.task.placement, m, rows)
