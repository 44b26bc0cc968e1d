"""The later criteria of the lexicographic objective: at the same time, less memory; at the same memory, fewer offloads.

Memory first: solve again with a limit one residual below the peak, as long as the time stays. Then without offload at all. Each
of these is a solve of its own with a part of the time, so what they don't find is not proven not to exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.memory import rank_share
from jaxpipe.schedule.solve.task import Options, Progress, Solution, SolveTask
from jaxpipe.schedule.tolerance import at_most

TIME_SHARE = 0.6
"""Part of the budget that the time is minimised in; like ``_EACH``, the part of what is left that one more solve may take, not
tuned."""
_EACH = 0.35
_LEAST_S = 0.2

Again = Callable[[SolveTask, Options], Solution]


def lexicographic(solution: Solution, options: Options, again: Again) -> Solution:
    """``solution`` or one as fast with a lower peak or fewer offloads. ``again`` solves for the makespan."""
    left = options.time_limit_s * (1 - TIME_SHARE)
    best = solution
    step = _least_share(solution.task)
    while step > 0 and left > _LEAST_S:
        limit = max(best.timeline.peak_activations) - step
        found = _try(best, limit, best.task.offload, replace(options, time_limit_s=left * _EACH), again)
        left *= 1 - _EACH
        if found is None:
            break
        best = found
    if best.offloaded and left > _LEAST_S:
        peak = max(best.timeline.peak_activations)
        best = _try(best, peak, False, replace(options, time_limit_s=left), again) or best
    return best


def _least_share(task: SolveTask) -> float:
    """The least that an F takes of a rank's share of a microbatch; 0 if none takes anything."""
    placement, costs = task.placement, task.costs
    shares = (
        costs.residual_bytes[s] / rank_share(placement, costs, rank, flow)
        for flow, groups in enumerate(placement.flows)
        for s, group in enumerate(groups)
        for rank in group
        if costs.residual_bytes[s] > 0
    )
    return min(shares, default=0.0)


def _try(best: Solution, limit: float, offload: bool, options: Options, again: Again) -> Solution | None:
    """A solution within ``limit`` that takes no longer than ``best``, as an answer to its task."""
    if limit <= 0:
        return None
    try:
        found = again(replace(best.task, memory_limit=limit, offload=offload, objective="makespan"), options)
    except ScheduleError:
        return None
    if not at_most(found.value, best.value):
        return None
    wall_s = best.wall_s + found.wall_s
    improvements = list(best.improvements)
    if not at_most(best.value, found.value):
        source = found.improvements[-1].source
        improvements.append(Progress(wall_s, found.value, best.lower_bound, source))
    return replace(
        best,
        schedule=found.schedule,
        timeline=found.timeline,
        status="optimal" if at_most(found.value, best.lower_bound) else "feasible",
        wall_s=wall_s,
        improvements=tuple(improvements),
        offloaded=found.offloaded,
    )
