"""The driver: an answer at once, then families, cycles, neighbourhoods and the exact model, one budget and one proven bound.

Worker processes (:mod:`~jaxpipe.schedule.solve.worker_pool`) do the work, this one keeps the score
(:mod:`~jaxpipe.schedule.solve.incumbent`): whatever comes back is simulated, held to the limits and checked here. First
every *opener* runs once: the families of the placement, list schedules with offload, bounds from a few ranks, cyclic steady
states, the exact model where the problem is small. Then neighbourhoods of the best order so far are improved until time is up
or the bound is reached.

With ``reproducible`` jobs go out in rounds, answers are looked at in the order of the jobs, and budgets are deterministic, so
that no clock decides anything; else each worker gets its next job when it is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.bounds import lower_bound, span_lower_bound
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Retimer
from jaxpipe.schedule.solve.cache import CacheHit, ScheduleCache
from jaxpipe.schedule.solve.first import away_schedule, explain, graph_starts, group_size, grouped_rows
from jaxpipe.schedule.solve.incumbent import Incumbent
from jaxpipe.schedule.solve.jobs import (
    Answer,
    Cycles,
    Exact,
    Families,
    Job,
    MirroredCycles,
    Neighbourhoods,
    OffloadLists,
    RankBounds,
    families_of,
    family_schedules,
    quick_families,
)
from jaxpipe.schedule.solve.lexicographic import TIME_SHARE, lexicographic
from jaxpipe.schedule.solve.task import OnProgress, Options, Progress, Solution, SolveTask, count_offloads
from jaxpipe.schedule.solve.worker_pool import WorkerPool
from jaxpipe.schedule.tolerance import MEMORY, at_most

_EXACT_ACTIONS = (320, 800)
"""Up to which the exact model gets most of the time, and any: 192 actions (p=4, m=16) are proved in 0.4 s, 384 (p=8, m=16) in
1.4 s, and as a cumulative, which offload needs, not in 20 s (README)."""
_EXACT_WORKERS = 2  # CP-SAT's own: with one it proves far less
_CYCLE_GROUPS = (1, 2, 3)  # microbatches in a cycle: from p=8 on two or three do better than one (README)
_MIRRORED_PARTS = 2  # jobs that share the shapes: one for each of two workers, the default
_STARTS_SHARE = 0.2  # of the time, for schedules by rules of graphs of stages
_POLL_S = 0.25  # how soon the end of the time is noticed
J = TypeVar("J", bound=Job)


def solve(task: SolveTask, options: Options | None = None, on_progress: OnProgress | None = None) -> Solution:
    """The best schedule found for ``task`` within ``options``, with a proven lower bound.

    ``KeyboardInterrupt`` while solving ends it with the best answer so far, if there is one.

    Raises:
        ScheduleError: the sizes and costs don't match, or no schedule keeps the limit (says the smallest found to work).
    """
    return solve_any([task], options, on_progress)


def solve_any(
    tasks: Sequence[SolveTask],
    options: Options | None = None,
    on_progress: OnProgress | None = None,
    *,
    starts: Sequence[Schedule] = (),
) -> Solution:
    """:func:`solve` over several placements: the best schedule of all of ``tasks``, which differ in placement and costs only.

    ``starts``: schedules to start from, of any of the placements; those that don't keep the limit are ignored. The lower bound
    is that of the best placement.

    Raises:
        ScheduleError: as :func:`solve`; nothing keeps the limit only if no task has an answer.
    """
    options = options or Options()
    if tasks[0].objective != "lexicographic":
        return Portfolio(tasks, options, on_progress).run(starts)
    for_time = replace(options, time_limit_s=options.time_limit_s * TIME_SHARE)
    fastest = Portfolio(tasks, for_time, on_progress).run(starts)
    return lexicographic(fastest, options, lambda task, spend: Portfolio([task], spend, None).run(()))


def solve_cached(
    tasks: Sequence[SolveTask],
    options: Options,
    on_progress: OnProgress | None = None,
    *,
    starts: Sequence[Schedule] = (),
    use_cache: bool = True,
    notice: Callable[[str], None] | None = None,
) -> Solution:
    """:func:`~jaxpipe.schedule.solve.solver.solve_any` with the cache in the user's folder: a proven optimum is the answer,
    anything else is where the search starts.

    ``starts``: as :func:`solve_any`. ``notice``: told of trouble with the folder, one line each.

    Raises:
        ScheduleError: as :func:`~jaxpipe.schedule.solve.solver.solve_any`.
    """
    if not use_cache:
        return solve_any(tasks, options, on_progress, starts=starts)
    cache = ScheduleCache(notice=notice)
    hits = [(task, hit) for task in tasks if (hit := cache.lookup(task)) is not None]
    if len(tasks) == 1 and hits and (known := _answer(*hits[0], cache.tell)) is not None:
        if on_progress is not None:
            on_progress(known.improvements[0], known.schedule)
        return known
    solution = solve_any(tasks, options, on_progress, starts=[*starts, *(hit.schedule for _, hit in hits)])
    if len(tasks) == 1:
        cache.store(solution, options)
    return solution


def _answer(task: SolveTask, hit: CacheHit, tell: Callable[[str, object], None]) -> Solution | None:
    """A hit that is proven optimal for this very problem: anew and at once, or by a stored bound that no family contradicts."""
    bound = hit.lower_bound
    if bound is None or not at_most(hit.value, bound) or task.objective == "lexicographic":
        return None
    if not at_most(hit.value, bound_of(task)):
        incumbent = Incumbent([task], [bound], None)
        family_schedules(task, quick_families(task), lambda schedule, source: incumbent.offer(0, schedule, source))
        if not at_most(bound, incumbent.value):
            who = incumbent.improvements[-1].source
            tell("ignored a bound", f"it is {bound:g}, and {who} takes {incumbent.value:g}")
            return None
    progress = Progress(0.0, hit.value, bound, "cache")
    offloaded = count_offloads(hit.schedule)
    return Solution(task, hit.schedule, hit.timeline, bound, "optimal", 0.0, 0.0, (progress,), offloaded, None)


def bound_of(task: SolveTask) -> float:
    """Seconds that no schedule of the task is below; infinite if none keeps the limits."""
    find = span_lower_bound if task.objective == "span" else lower_bound
    limits = [x * (1 + MEMORY) for x in task.limits()]
    unlimited = all(x == float("inf") for x in limits)
    return find(
        task.placement,
        task.num_microbatches,
        task.costs,
        memory_limit=None if unlimited else limits,
        offload=task.offload,
    )


class Portfolio:
    """One solve."""

    def __init__(self, tasks: Sequence[SolveTask], options: Options, on_progress: OnProgress | None) -> None:
        assert tasks, "no task to solve"
        self.tasks, self.options = tasks, options
        self.incumbent = Incumbent(tasks, [0.0] * len(tasks), on_progress)
        self.problems = [
            Problem.of(t.placement, t.num_microbatches, t.costs) if t.placement.is_plain_chain else None for t in tasks
        ]
        self.neighbourhoods = 0
        self.failures: list[str] = []

    def run(self, starts: Sequence[Schedule]) -> Solution:
        try:
            self._quick(starts)
            if not self.incumbent.solved and min(self.incumbent.bounds) < float("inf") and not self._late():
                with WorkerPool(max(1, self.options.workers), self.tasks) as pool:
                    (self._rounds if self.options.reproducible else self._freely)(pool)
        except KeyboardInterrupt:
            if self.incumbent.schedule is None:
                raise
        if self.incumbent.schedule is None:
            raise ScheduleError(explain(self.tasks))
        return self.incumbent.solution(tuple(self.failures))

    def _quick(self, starts: Sequence[Schedule]) -> None:
        """What needs no worker: bounds, an answer at once, and the caller's own."""
        self.incumbent.bounds = [bound_of(task) for task in self.tasks]
        for number, (task, problem) in enumerate(zip(self.tasks, self.problems, strict=True)):
            if self.incumbent.bounds[number] == float("inf"):
                continue
            if self.incumbent.schedule is not None and self._late():
                break
            if problem is None:
                for schedule, source in graph_starts(task):
                    self.incumbent.offer(number, schedule, source)
                    if self._late(_STARTS_SHARE):
                        break
                continue
            size = group_size(problem, task.safe_limits())
            if size:
                rows = grouped_rows(problem, size)
                draft = Retimer(problem).draft(rows)
                assert draft is not None, "microbatches one group after the other deadlock"
                self.incumbent.offer_first(number, problem.schedule("first", rows), draft)
            elif task.offload:
                self.incumbent.offer(number, away_schedule(problem), "first")
        for number, task in enumerate(self.tasks):
            for schedule in starts:
                if schedule.placement == task.placement:
                    self.incumbent.offer(number, schedule, "start")

    def _late(self, share: float = 1.0) -> bool:
        """Whether this share of the time is up before any worker was started: at thousands of ranks."""
        return not self.options.reproducible and self.incumbent.wall_s >= self.options.time_limit_s * share

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _job(self, number: int, kind: type[J], seconds: float, **more: Any) -> J:
        return kind(
            task=number,
            seconds=seconds,
            **{"seed": self.options.seed, **more},
            reproducible=self.options.reproducible,
            bound=self.incumbent.bounds[number],
        )

    def _openers(self) -> Iterator[Job]:
        """What is tried once, what is cheap first. Every kind of all tasks before the next kind."""
        total = self.options.time_limit_s
        graphs = [number for number, problem in enumerate(self.problems) if problem is None]
        quick = [quick_families(task) for task in self.tasks]
        for number, names in enumerate(quick):
            yield self._job(number, Families, total, names=tuple(names))
        for number, task in enumerate(self.tasks):
            if task.offload and self.problems[number] is not None:
                yield self._job(number, OffloadLists, total * 0.4)
        for number, task in enumerate(self.tasks):
            for name in (n for n in families_of(task) if n not in quick[number]):
                yield self._job(number, Families, total, names=(name,))
        for number, problem in enumerate(self.problems):
            if problem is not None:
                yield self._job(number, RankBounds, total * 0.2, value=self.incumbent.value)
        for number, task in enumerate(self.tasks):
            start, ops = self._start(number), 5 if task.offload else 3
            actions = ops * sum(map(len, chain(*task.placement.flows))) * task.num_microbatches
            if actions <= _EXACT_ACTIONS[1] and (number not in graphs or start is not None):
                part = 0.6 if actions <= _EXACT_ACTIONS[0] else 0.25
                yield self._job(number, Exact, total * part, start=start, workers=_EXACT_WORKERS)
        for g in _CYCLE_GROUPS:
            for number, problem in enumerate(self.problems):
                if problem is not None and problem.placement.num_flows == 1 and g < problem.num_microbatches:
                    yield self._job(number, Cycles, min(10.0, total * 0.15), g=g)
            if g == _CYCLE_GROUPS[0]:
                yield from self._mirrored(min(25.0, total * 0.4))

    def _mirrored(self, seconds: float) -> Iterator[Job]:
        for number, problem in enumerate(self.problems):
            if problem is not None and problem.placement.num_chunks == 2 and problem.placement.num_flows == 1:
                for part in range(_MIRRORED_PARTS):
                    yield self._job(number, MirroredCycles, seconds, part=part, g=_MIRRORED_PARTS)

    def _start(self, number: int) -> Schedule | None:
        known = self.incumbent.per_task[number]
        return None if known is None else known[1]

    def _neighbourhood(self) -> Job | None:
        """The next neighbourhood job: mostly on the best schedule, now and then on the best of another placement."""
        self.neighbourhoods += 1
        order = sorted(
            (n for n, known in enumerate(self.incumbent.per_task) if known is not None and self._improvable(n)),
            key=lambda n: (self.incumbent.per_task[n] or ((float("inf"),),))[0],
        )
        if not order:
            return None
        number = order[self.neighbourhoods // 4 % len(order)] if self.neighbourhoods % 4 == 0 else order[0]
        start = self._start(number)
        away = start is not None and count_offloads(start)
        longest_s, share = (20.0, 0.25) if away else (8.0, 0.1)
        seconds = max(1.0, min(longest_s, self.options.time_limit_s * share))
        seed = self.options.seed * 1_000_003 + self.neighbourhoods
        return self._job(number, Neighbourhoods, seconds, start=start, seed=seed)

    def _improvable(self, number: int) -> bool:
        known = self.incumbent.per_task[number]
        return known is not None and not at_most(known[0][0], self.incumbent.bounds[number])

    def _hopeless(self, job: Job) -> bool:
        """Whether no schedule of the job's placement is better than what is known."""
        return at_most(self.incumbent.value, self.incumbent.bounds[job.task])

    def _note(self, answer: Answer) -> None:
        if answer.error:
            self.failures.append(answer.error)
        if answer.bound:
            self.incumbent.prove(answer.task, answer.bound, answer.source)
        if answer.schedule is not None:
            self.incumbent.offer(answer.task, answer.schedule, answer.source)

    # -- the two ways of running them ---------------------------------------------------------------------------------

    def _freely(self, pool: WorkerPool) -> None:
        openers = self._openers()
        while not self.incumbent.solved and self.incumbent.wall_s < self.options.time_limit_s:
            while pool.idle:
                job = next((j for j in openers if not self._hopeless(j)), None) or self._neighbourhood()
                if job is None:
                    break
                pool.submit(self._shortened(job))
            if not pool.busy:
                return
            left = self.options.time_limit_s - self.incumbent.wall_s
            answer = pool.receive(max(0.0, min(left, _POLL_S)))
            if answer is not None:
                self._note(answer)

    def _shortened(self, job: Job) -> Job:
        left = max(0.1, self.options.time_limit_s - self.incumbent.wall_s)
        return replace(job, seconds=min(job.seconds, left))

    def _rounds(self, pool: WorkerPool) -> None:
        openers, spent = self._openers(), 0.0
        size = pool.idle
        while not self.incumbent.solved and spent < self.options.time_limit_s:
            jobs = [j for _, j in zip(range(size), (j for j in openers if not self._hopeless(j)), strict=False)]
            if not jobs:
                jobs = [j for j in (self._neighbourhood() for _ in range(size)) if j is not None]
            if not jobs:
                return
            spent += max((j.seconds for j in jobs if j.timed), default=0.0)
            self._round(pool, jobs)

    def _round(self, pool: WorkerPool, jobs: Sequence[Job]) -> None:
        """Run jobs side by side; note their answers job by job."""
        numbers = [pool.submit(job) for job in jobs]
        answers: dict[int, list[Answer]] = {n: [] for n in numbers}
        while pool.busy:
            answer = pool.receive(None)
            if answer is None:
                continue
            if answer.gone:
                raise ScheduleError("a solver process ended before its job; run again, or without reproducible mode")
            answers[answer.job].append(answer)
        for number in numbers:
            for answer in answers[number]:
                self._note(answer)
