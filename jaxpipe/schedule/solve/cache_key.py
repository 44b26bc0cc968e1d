"""When two scheduling problems count as the same, and how far apart they are otherwise.

Source: the *crude schedules* of `optpipe.txt` section 4.2: "we discretize the estimated parameters for computation,
communication, and memory into proportional values". The paper gives no steps and no distance; chosen here: times are divided
by the mean F+B+W of a stage and rounded to steps of 5% (finer than 0.1% of a stage's time counts as nothing); memory limits
are rounded to a quarter of a chunk; the distance is the mean number of steps, summed over what is compared.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.json_form import to_json
from jaxpipe.schedule.solve.task import SolveTask

STEP = 0.05
"""Two times are a step apart when they differ by this fraction; two ratios when they differ by this much."""
_NEGLIGIBLE = 1e-3  # of the mean F+B+W: far below it all times are alike, far above it steps are proportional
_LARGEST = 1e12
_LIMITS_A_CHUNK = 4  # steps of the memory limit in a chunk; not tuned
_OTHERWISE = 20.0  # steps that another objective, host link or permission to offload counts: more than a factor 2


@dataclass(frozen=True, slots=True)
class CrudeProblem:
    """A problem in proportional values. Two problems are the same to the cache when these are equal.

    ``variant``: what either is equal or not: the objective, whether and how much may be offloaded, how host lanes are shared.
    ``levels``: for each kind of cost, whole steps, one entry a stage, transfer or rank.
    """

    variant: tuple[str, ...]
    levels: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, task: SolveTask) -> CrudeProblem:
        """The crude form of ``task``. Raises ScheduleError if its costs are for another number of stages."""
        costs, placement = task.costs, task.placement
        if costs.num_stages != placement.num_stages:
            raise ScheduleError(
                f"the costs are for {costs.num_stages} stages and the placement has {placement.num_stages}; "
                "give one entry per stage"
            )
        scale_s = _scale_s(costs)
        times = {"f": costs.f_s, "b": costs.b_s, "w": costs.w_s, "bw": costs.bw_s, "comm": _transfers_s(task)}
        if task.offload:
            times |= {"offload": costs.offload_s, "load": costs.load_s}
        levels = {name: tuple(_level(x / scale_s) for x in seconds) for name, seconds in times.items()}
        mean_bytes = sum(costs.residual_bytes) / costs.num_stages or 1.0
        levels["residual"] = tuple(_level(x / mean_bytes) for x in costs.residual_bytes)
        levels["w_residual"] = _ratios(costs.w_residual_bytes, costs.residual_bytes)
        if task.offload:
            levels["offloadable"] = _ratios(costs.offloadable_bytes, costs.residual_bytes)
        levels["limit"] = _limits(task)
        host = f"{costs.host.mode} {sorted(costs.host.groups)}" if task.offload else "none"
        offload = f"offload {task.offload} {task.offloads_in_flight}"
        return cls((task.objective, offload, f"host {host}"), levels)

    def distance(self, other: CrudeProblem) -> float:
        """Steps apart: the mean over stages, transfers or ranks of each kind, summed. 0 exactly for equal problems.

        Raises:
            ValueError: the problems are for placements of different sizes.
        """
        steps = _OTHERWISE * sum(a != b for a, b in zip(self.variant, other.variant, strict=True))
        for name, mine in self.levels.items():
            theirs = other.levels.get(name)
            if theirs is None or not mine:
                continue
            apart = _limit_steps if name == "limit" else _steps
            steps += sum(apart(a, b) for a, b in zip(mine, theirs, strict=True)) / len(mine)
        return steps

    def digest(self) -> str:
        """Equal for equal crude problems."""
        return _digest([self.variant, self.levels])


def problem_stem(task: SolveTask) -> str:
    """How the names of all files begin whose schedules fit this problem: same ranks, flows, edges and microbatches."""
    form = to_json(task.placement)
    shape = _digest([form["ranks"], form["flows"], form["edges"]])
    return f"schedule-p{task.placement.num_ranks}-m{task.num_microbatches}-{shape}-"


def _digest(data: object) -> str:
    """Of the canonical JSON of ``data``; 20 hexadecimal digits."""
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _scale_s(costs: CostProfile) -> float:
    """The mean F+B+W of a stage; of BW where those take no time; 1 where nothing does."""
    n = costs.num_stages
    return (sum(costs.f_s) + sum(costs.b_s) + sum(costs.w_s)) / n or sum(costs.bw_s) / n or 1.0


def _level(x: float) -> int:
    return round(math.log1p(min(x, _LARGEST) / _NEGLIGIBLE) / STEP)


def _ratios(part: Sequence[float], whole: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(min(a / b, _LARGEST) / STEP) if b > 0 else 0 for a, b in zip(part, whole, strict=True))


def _transfers_s(task: SolveTask) -> tuple[float, ...]:
    """Seconds of the slowest transfer along each edge of each flow, downwards (activation) and upwards (cotangent)."""
    costs, found = task.costs, []
    for flow in task.placement.flows:
        for a, b in task.placement.edges:
            pairs = [(x, y) for x in flow[a] for y in flow[b]]
            found.append(max(costs.transfer_s(x, y, a) for x, y in pairs))
            found.append(max(costs.transfer_s(y, x, a) for x, y in pairs))
    return tuple(found)


def _limits(task: SolveTask) -> tuple[int, ...]:
    """Per rank, in quarters of a chunk. A limit above all microbatches is none."""
    a_share = _LIMITS_A_CHUNK * task.placement.num_chunks
    return tuple(round(min(max(0.0, x), task.num_microbatches) * a_share) for x in task.limits())


def _steps(a: int, b: int) -> float:
    return abs(a - b)


def _limit_steps(a: int, b: int) -> float:
    return abs(math.log((1 + a) / (1 + b))) / STEP
