"""Solving with the cache of solved problems: a proven optimum is the answer, anything else is where the search starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxpipe.schedule.solve.cache import CacheHit, ScheduleCache
from jaxpipe.schedule.solve.incumbent import Incumbent
from jaxpipe.schedule.solve.solver import bound_of, solve_any
from jaxpipe.schedule.solve.task import OnProgress, Options, Progress, Solution, SolveTask, count_offloads
from jaxpipe.schedule.solve.worker import family_schedules, quick_families
from jaxpipe.schedule.tolerance import at_most


def solve_cached(
    tasks: Sequence[SolveTask],
    options: Options,
    on_progress: OnProgress | None = None,
    *,
    use_cache: bool = True,
    notice: Callable[[str], None] | None = None,
) -> Solution:
    """:func:`~jaxpipe.schedule.solve.solver.solve_any` with the cache in the user's folder.

    ``notice``: told of trouble with the folder, one line each.

    Raises:
        ScheduleError: as :func:`~jaxpipe.schedule.solve.solver.solve_any`.
    """
    if not use_cache:
        return solve_any(tasks, options, on_progress)
    cache = ScheduleCache(notice=notice)
    hits = [(task, hit) for task in tasks if (hit := cache.lookup(task)) is not None]
    if len(tasks) == 1 and hits and (known := _answer(*hits[0], cache.tell)) is not None:
        if on_progress is not None:
            on_progress(known.improvements[0], known.schedule)
        return known
    solution = solve_any(tasks, options, on_progress, starts=[hit.schedule for _, hit in hits])
    if len(tasks) == 1:
        cache.store(solution, options)
    return solution


def _answer(task: SolveTask, hit: CacheHit, tell: Callable[[str, object], None]) -> Solution | None:
    """A hit that is proven optimal for this very problem: anew and at once, or by a stored bound that no family contradicts."""
    if hit.lower_bound is None or not at_most(hit.value, hit.lower_bound) or task.objective == "lexicographic":
        return None
    if not at_most(hit.value, bound_of(task)):
        incumbent = Incumbent([task], [hit.lower_bound], None)
        family_schedules(task, quick_families(task), lambda schedule, source: incumbent.offer(0, schedule, source))
        if not at_most(hit.lower_bound, incumbent.value):
            tell(
                "ignored a bound",
                f"it is {hit.lower_bound:g}, and {incumbent.improvements[-1].source} takes {incumbent.value:g}",
            )
            return None
    offloaded = count_offloads(hit.schedule)
    progress = Progress(0.0, hit.value, hit.lower_bound, "cache")
    return Solution(
        task, hit.schedule, hit.timeline, hit.lower_bound, "optimal", 0.0, 0.0, (progress,), offloaded, None
    )
