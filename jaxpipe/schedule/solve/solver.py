"""The driver: families first, then everything that may improve on them, one budget and one bound."""

from __future__ import annotations

import time

from jaxpipe.schedule.explore import Candidate, offloaded_share
from jaxpipe.schedule.explore import best_schedule as best_family
from jaxpipe.schedule.explore import bounds_within
from jaxpipe.schedule.solve.task import OnProgress, Options, Progress, Solution, SolveTask


def solve(task: SolveTask, options: Options | None = None, on_progress: OnProgress | None = None) -> Solution:
    """The best schedule found for ``task`` within ``options``, with a proven lower bound.

    ``KeyboardInterrupt`` while solving ends it with the best answer so far, if there is one.

    Raises:
        ScheduleError: the sizes and costs don't match, or no schedule keeps the limit (says the smallest found to work).
    """
    began = time.perf_counter()
    best: Candidate = best_family(
        task.placement.num_ranks,
        task.num_microbatches,
        task.costs,
        task.memory_limit,
        offload=task.offload,
        objective="span" if task.objective == "span" else "makespan",
    )
    makespan, span = bounds_within(
        task.placement, task.num_microbatches, task.costs, task.memory_limit, offload=task.offload
    )
    bound = span if task.objective == "span" else makespan
    value = best.span if task.objective == "span" else best.makespan
    wall = time.perf_counter() - began
    progress = Progress(wall, value, bound, f"family {best.setting.family}")
    if on_progress is not None:
        on_progress(progress, best.schedule)
    assert offloaded_share(best.schedule, task.costs) == 0 or task.offload
    return Solution(
        task,
        best.schedule,
        best.timeline,
        bound,
        "optimal" if value <= bound * (1 + 1e-9) else "feasible",
        wall,
        wall,
        (progress,),
        sum(a.op == "O" for r in range(best.schedule.num_ranks) for a in best.schedule.actions(r)),
        (str(best.setting), value),
    )
