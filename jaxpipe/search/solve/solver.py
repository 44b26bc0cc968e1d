"""The driver: an answer at once, then families, cycles, neighbourhoods and the exact model, one budget and one proven bound.

Worker processes (:mod:`~jaxpipe.search.solve.jobs`) do the work, this one keeps the score: whatever comes back is simulated,
held to the limits and checked by the :class:`Incumbent`. Where activations may leave for the host, a few families go first,
once each and to their end, so that no answer is worse than they are. Then every *opener* runs once: the families of the
placement, list schedules with offload, bounds from a few ranks, cyclic steady states, the exact model where the problem is
small. Then neighbourhoods of the best order so far are improved until time is up or the bound is reached.

With ``reproducible`` jobs go out in rounds, answers are looked at in the order of the jobs, and budgets are deterministic, so
that no clock decides anything; else each worker gets its next job when it is free.

A :class:`BackgroundSolve` is a solve in a process of its own, for a caller that must not wait: a training run, say. That
process is a worker of lowest priority, which starts workers of its own. All of them end when their input does: with the caller,
however that ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Any, NamedTuple

from jaxpipe.errors import ScheduleError, short_message
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import MEMORY, Timeline, at_most, nine_digits
from jaxpipe.search.bounds import lower_bounds
from jaxpipe.search.retime import Draft
from jaxpipe.search.solve import jobs
from jaxpipe.search.solve.cache import ScheduleCache
from jaxpipe.search.solve.task import (
    OnProgress,
    Options,
    Progress,
    Solution,
    SolveTask,
    count_offloads,
    explain,
    first_schedules,
)
from jaxpipe.text import truncate

_TINY_ACTIONS, _TINY_SHARE = 100, 0.3
"""Actions of a task up to which the exact model runs before the families (circular 2 x 3, m=2 takes 0.4 s), and its part of the
time limit."""
_EXACT_SHARES, _EXACT_WORKERS = ((320, 0.6), (800, 0.25)), 2
"""Actions up to which it runs behind all else, each with its part of the time limit, which placements share, and CP-SAT's own
threads: 192 (p=4, m=16) are proved in 0.4 s, 384 (p=8, m=16) in 1.4 s; with offload (a cumulative) not in 20 s. One thread
proves far less."""
_LISTS_SHARES = ((4000, 0.2), (inf, 0.9))
"""Likewise for list schedules with offload. Up to 4,000 actions neighbourhoods gain more; with k=2 at p=16 and 32 the best came
from lists, after 5 to 33 s, and neighbourhoods gained nothing."""
_NEAR = 1.1  # × the best of all placements is a schedule worth starting the exact model from; not tuned
_CYCLE_PARTS = 2  # jobs that share the shapes of a V's cycles: one for each of two workers, the default
_BOUNDS_SHARE = 0.2  # of the time, for bounds from a few ranks of all placements
_FIRST_S, _GRACE_S = 2.0, 15.0
"""The time limit from which on the first families are looked at to their end, and by how much that may exceed the limit: one
takes about a second, and there may be fifteen placements on a busy machine."""
_STARTS_SHARE = 0.2  # of the time, for schedules by rules of graphs of stages
_LOWEST = 19  # niceness of a solve in the background
_LONGEST = 200
_POLL_S = 0.25  # how soon the end of the time is noticed


class BestSchedule(NamedTuple):
    """The best answer to task ``number``, or to all. ``key``: what it minimises, in order. ``timeline``: None if it has yet to
    be simulated."""

    key: tuple[float, ...]
    number: int
    schedule: Schedule
    timeline: Timeline | None


class Incumbent:
    """Answers to ``tasks``, which differ in placement only; the best of all counts."""

    def __init__(self, tasks: Sequence[SolveTask], bounds: Sequence[float], on_progress: OnProgress | None) -> None:
        self.tasks, self.bounds = tasks, list(bounds)
        self.on_progress = on_progress
        self.began = time.perf_counter()
        self.best: BestSchedule | None = None
        self.best_by_task: dict[int, BestSchedule] = {}
        self.improvements: list[Progress] = []
        self.family: tuple[str, float] | None = None
        self.failures: list[str] = []  # of workers

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self.began

    @property
    def lower_bound(self) -> float:
        """Return a lower bound for the problem: the least of the placements' bounds."""
        return min(self.bounds)

    @property
    def value(self) -> float:
        """Return the seconds of the objective's time; infinite before the first answer."""
        return inf if self.best is None else self.best.key[0]

    @property
    def solved(self) -> bool:
        return at_most(self.value, self.lower_bound)

    def offer(self, number: int, schedule: Schedule, source: str, draft: Draft | None = None) -> None:
        """Take a schedule that answers task ``number`` if it is valid, keeps the limits, and is better than what is known.

        ``draft``: its re-timing by who made it, which is believed: simulating can wait.
        """
        task, timeline = self.tasks[number], None
        if draft is None:
            with suppress(ScheduleError):
                timeline = task.timeline_of(schedule)
            if timeline is None:
                return
            times = timeline.makespan, timeline.max_span
            key = self._key(*times, max(timeline.peak_activations, default=0.0), count_offloads(schedule))
            seconds = task.seconds(timeline)
            if source.startswith("family") and (self.family is None or seconds < self.family[1]):
                self.family = (source.removeprefix("family "), seconds)
        # a draft knows activations only: they must fit whatever workspace comes on top
        elif at_most(draft.peak, min(task.safe_limits())):
            key = self._key(draft.makespan, draft.span, draft.peak, 0)
        else:
            return
        if number in self.best_by_task and self.best_by_task[number].key <= key:
            return
        self.best_by_task[number] = BestSchedule(key, number, schedule, timeline)
        if self.best is not None and self.best.key <= key:
            return
        past_s, self.best = self.value, self.best_by_task[number]
        progress = Progress(self.wall_s, self.value, self.lower_bound, source)
        # what is better in a lesser key only is no improvement to report
        if not at_most(past_s, self.value):
            self.improvements.append(progress)
        if self.on_progress is not None:
            self.on_progress(progress, schedule)

    def _key(self, makespan: float, span: float, peak: float, offloads: int) -> tuple[float, ...]:
        """Return what is minimised, in order: as the objective says, then what any user would rather have less of."""
        first, then = self.tasks[0].order(makespan, span)
        least = nine_digits(peak), float(offloads)
        return (first, *least, then) if self.tasks[0].objective == "lexicographic" else (first, then, *least)

    def prove(self, number: int, bound: float, source: str) -> None:
        """Take a proven bound of task ``number``, in seconds."""
        if at_most(bound, self.bounds[number]):
            return
        self.bounds[number] = bound
        if self.on_progress is not None and self.best is not None:
            self.on_progress(Progress(self.wall_s, self.value, self.lower_bound, source), None)

    def solution(self) -> Solution:
        """Return the answer, simulated.

        Raises:
            ScheduleError: the answer breaks a rule, which is a defect here.
        """
        assert self.best is not None, "no answer yet"
        _, number, schedule, timeline = self.best
        task, own_bound = self.tasks[number], self.bounds[number]
        if timeline is None:
            check_schedule(schedule)
            timeline = simulate(schedule, task.costs)
        seconds = task.seconds(timeline)
        solved = self.solved or at_most(seconds, self.lower_bound)
        return Solution(
            task=task,
            schedule=schedule,
            timeline=timeline,
            lower_bound=seconds if solved else self.lower_bound,  # equal up to rounding
            wall_s=self.wall_s,
            improvements=tuple(self.improvements),
            family=self.family,
            failures=tuple(self.failures),
            placement_bound=seconds if at_most(seconds, own_bound) else own_bound,
        )


TIME_SHARE = 0.6
"""Part of the budget that the time is minimised in; like ``_EACH``, the part of what is left that one more solve may take, not
tuned."""
_EACH = 0.35
_LEAST_S = 0.2
_LESS = 1 - 1e-6  # of a peak is a limit that the next lower peak keeps


def lexicographic(best: Solution, options: Options, again: Callable[[SolveTask, Options], Solution]) -> Solution:
    """Return ``best`` or one as fast with a lower peak or fewer offloads. ``again`` solves for the makespan.

    Memory first: solve again with a limit below the peak, as long as the time stays. Then without offload at all. Each of these
    is a solve of its own with a part of the time, so what they don't find is not proven not to exist.
    """
    left = options.time_limit_s * (1 - TIME_SHARE)
    peak, offload = max(best.timeline.peak_activations), best.task.offload
    while peak > 0 and left > _LEAST_S:
        limit, seconds = (peak * _LESS, left * _EACH) if offload == best.task.offload else (peak, left)
        task = replace(best.task, memory_limit=limit, offload=offload, objective="makespan")
        candidate = None
        with suppress(ScheduleError):
            candidate = again(task, replace(options, time_limit_s=seconds))
        left -= seconds
        if candidate is not None and at_most(candidate.value, best.value):
            best, peak = _with_answer_of(best, candidate), max(candidate.timeline.peak_activations)
        # the peak can't be lowered further: now the same time without offload
        elif offload and best.offloaded:
            offload = False
        else:
            break
    return best


def _with_answer_of(best: Solution, other: Solution) -> Solution:
    """Return ``other``, no slower, as an answer to the task of ``best``."""
    wall_s, improvements = best.wall_s + other.wall_s, best.improvements
    if not at_most(best.value, other.value):
        last = replace(other.improvements[-1], wall_s=wall_s, lower_bound=best.lower_bound)
        improvements = (*improvements, last)
    return replace(best, schedule=other.schedule, timeline=other.timeline, wall_s=wall_s, improvements=improvements)


def solve(task: SolveTask, options: Options | None = None, on_progress: OnProgress | None = None) -> Solution:
    """Return the best schedule found for ``task`` within ``options``, with a proven lower bound.

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
    """Run :func:`solve` over several placements: the best schedule of all of ``tasks``, which differ in placement and costs
    only.

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
    """Run :func:`~jaxpipe.search.solve.solver.solve_any` with the cache in the user's folder: a proven optimum is the answer,
    anything else is where the search starts.

    ``starts``: as :func:`solve_any`. ``notice``: told of trouble with the folder, one line each.

    Raises:
        ScheduleError: as :func:`~jaxpipe.search.solve.solver.solve_any`.
    """
    if not use_cache:
        return solve_any(tasks, options, on_progress, starts=starts)
    cache = ScheduleCache(notice=notice)
    hits = [hit for task in tasks if (hit := cache.lookup(task)) is not None]
    if len(tasks) == 1 and hits and _is_answer(hits[0], cache.tell):
        if on_progress is not None:
            on_progress(hits[0].improvements[0], hits[0].schedule)
        return hits[0]
    solution = solve_any(tasks, options, on_progress, starts=[*starts, *(hit.schedule for hit in hits)])
    if len(tasks) == 1:
        cache.store(solution, options)
    return solution


def _is_answer(hit: Solution, tell: Callable[[str, object], None]) -> bool:
    """Return whether a hit is proven optimal: anew and at once, or by a stored bound that no family contradicts."""
    task, bound = hit.task, hit.lower_bound
    if hit.status != "optimal" or task.objective == "lexicographic":
        return False
    # a stored bound can't be proved anew in no time, so families get the chance to contradict it
    if not at_most(hit.value, bound_of(task)):
        incumbent = Incumbent([task], [bound], None)
        jobs.family_schedules(task, jobs.quick_families(task), partial(incumbent.offer, 0))
        if not at_most(bound, incumbent.value):
            who = incumbent.improvements[-1].source
            tell("ignored a bound", f"it is {bound:g}, and {who} takes {incumbent.value:g}")
            return False
    return True


def bound_of(task: SolveTask) -> float:
    """Return the seconds that no schedule of the task is below; infinite if none keeps the limits."""
    # a schedule may exceed a limit by rounding, and the bound must hold for it, too
    limits = [x * (1 + MEMORY) for x in task.limits()]
    sizes = task.placement, task.num_microbatches, task.costs
    return lower_bounds(*sizes, memory_limit=limits, offload=task.offload)[task.objective == "span"]


def _actions(task: SolveTask) -> int:
    """Return how many start times a solve decides."""
    return (5 if task.offload else 3) * sum(map(len, chain(*task.placement.flows))) * task.num_microbatches


def _share(shares: Iterable[tuple[float, float]], task: SolveTask) -> float:
    """Return the part of the time limit of the first row that has as many actions as ``task``; 0 if it has more than all."""
    return next((share for most, share in shares if _actions(task) <= most), 0.0)


class Portfolio:
    """One solve."""

    def __init__(self, tasks: Sequence[SolveTask], options: Options, on_progress: OnProgress | None) -> None:
        assert tasks, "no task to solve"
        self.tasks, self.options = tasks, options
        self.incumbent = Incumbent(tasks, [0.0] * len(tasks), on_progress)
        self.neighbourhoods = 0

    def run(self, starts: Sequence[Schedule]) -> Solution:
        try:
            self._quick(starts)
            if not self.incumbent.solved and min(self.incumbent.bounds) < inf and not self._is_late():
                with closing(jobs.WorkerPool(max(1, self.options.workers), self.tasks)) as pool:
                    self._search(pool)
        except KeyboardInterrupt:
            if self.incumbent.best is None:
                raise
        if self.incumbent.best is None:
            raise ScheduleError(explain(self.tasks))
        return self.incumbent.solution()

    def _quick(self, starts: Sequence[Schedule]) -> None:
        """Do what needs no worker: bounds, an immediate answer, and the caller's schedules."""
        self.incumbent.bounds = [bound_of(task) for task in self.tasks]
        for number, task in enumerate(self.tasks):
            if self.incumbent.bounds[number] == inf:
                continue
            if self.incumbent.best is not None and self._is_late():
                break
            for schedule, source, draft in first_schedules(task):
                self.incumbent.offer(number, schedule, source, draft)
                if self._is_late(_STARTS_SHARE):
                    break
        for number in range(len(self.tasks)):
            for schedule in starts:
                self.incumbent.offer(number, schedule, "start")

    def _is_late(self, share: float = 1.0) -> bool:
        """Return whether this share of the time is up before any worker was started: at thousands of ranks."""
        return not self.options.reproducible and self.incumbent.wall_s >= self.options.time_limit_s * share

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _job(self, number: int, kind: type[jobs.Job], seconds: float, **options: Any) -> jobs.Job:
        return kind(
            task=number,
            seconds=seconds,
            **{"seed": self.options.seed, **options},
            reproducible=self.options.reproducible,
            bound=self.incumbent.bounds[number],
        )

    def _first(self) -> Iterator[jobs.Job]:
        """Yield the first families where activations may leave, the placement with the least bound first."""
        for number in sorted(range(len(self.tasks)), key=self.incumbent.bounds.__getitem__):
            if self.tasks[number].offload and (names := tuple(jobs.first_families(self.tasks[number]))):
                yield self._families(number, names, once=True)

    def _families(self, number: int, names: Sequence[str], once: bool = False) -> jobs.Job:
        best = self.incumbent.family[1] if self.incumbent.family is not None else inf
        return self._job(number, jobs.Families, self.options.time_limit_s, names=tuple(names), once=once, value=best)

    def _openers(self) -> Iterator[jobs.Job]:
        """Yield the jobs that run once, cheap ones first. Every kind of all tasks before the next kind."""
        total = self.options.time_limit_s
        quick = [jobs.quick_families(task) for task in self.tasks]
        chains = [number for number, task in enumerate(self.tasks) if task.placement.is_plain_chain]
        tiny = [number for number, task in enumerate(self.tasks) if _actions(task) <= _TINY_ACTIONS]
        for number in tiny:
            yield from self._exact(number, total * _TINY_SHARE / len(tiny))
        for number, names in enumerate(quick):
            yield self._families(number, names)
        for number in (n for n in chains if self.tasks[n].offload):
            yield self._job(number, jobs.OffloadLists, total * _share(_LISTS_SHARES, self.tasks[number]))
        cycles = self._cycles()
        # beside families that take as long: 15 s at p=12
        if self.options.workers > 1 and not self.options.reproducible:
            yield from islice(cycles, 1)
        for number, task in enumerate(self.tasks):
            for name in (n for n in jobs.families_of(task) if n not in quick[number]):
                yield self._families(number, (name,))
        yield from cycles
        # these two use up what they get, so the tasks that may still win share it
        one_way = [n for n in self._open_tasks() if n in chains and self.tasks[n].placement.num_flows == 1]
        for number in one_way if self.incumbent.value < inf else ():
            yield self._job(number, jobs.RankBounds, total * _BOUNDS_SHARE / len(one_way), value=self.incumbent.value)
        share_of = {n: share for n in self._open_tasks() if (share := _share(_EXACT_SHARES, self.tasks[n]))}
        for number, share in share_of.items():
            yield from self._exact(number, total * share / len(share_of))

    def _cycles(self) -> Iterator[jobs.Job]:
        """Yield jobs for steady states of V placements."""
        for number, task in enumerate(self.tasks):
            # For circular and wave placements CP-SAT looked for cycles of one microbatch: in 8 cases (p=4 and 8, 2 to 4 chunks,
            # limits p/2 to p, 25 s) none beat what was known; without that search values are 2.1% shorter on average.
            for part in range(_CYCLE_PARTS if task.placement.is_v else 0):
                seconds = min(25.0, self.options.time_limit_s * 0.4)
                yield self._job(number, jobs.Cycles, seconds, part=part, parts=_CYCLE_PARTS)

    def _exact(self, number: int, seconds: float) -> Iterator[jobs.Job]:
        """Yield the exact model from a good start, or one that a graph of stages needs; nothing where it has no time."""
        best, is_chain = self.incumbent.best_by_task.get(number), self.tasks[number].placement.is_plain_chain
        # a start far behind other placements leads astray: a wave of p=4, m=6 at limit 3 stays at 30, and comes to 20 without
        is_start = best is not None and (not is_chain or best.key[0] <= self.incumbent.value * _NEAR)
        if seconds and (is_start or is_chain):
            start = best.schedule if best is not None and is_start else None
            yield self._job(number, jobs.Exact, seconds, start=start, workers=_EXACT_WORKERS)

    def _neighbourhood(self) -> jobs.Job | None:
        """Return the next neighbourhood job: mostly on the best schedule, now and then on the best of another placement."""
        self.neighbourhoods += 1
        bounds = self.incumbent.bounds
        improvable = (x for x in self.incumbent.best_by_task.values() if not at_most(x.key[0], bounds[x.number]))
        order = sorted(improvable, key=lambda x: (x.key, x.number))
        if not order:
            return None
        start = order[self.neighbourhoods // 4 % len(order) if self.neighbourhoods % 4 == 0 else 0]
        longest_s, share = (20.0, 0.25) if count_offloads(start.schedule) else (8.0, 0.1)
        seconds = max(1.0, min(longest_s, self.options.time_limit_s * share))
        # a prime above any number of jobs, so that solves with neighbouring seeds share no job's seed
        seed = self.options.seed * 1_000_003 + self.neighbourhoods
        return self._job(start.number, jobs.Neighbourhoods, seconds, start=start.schedule, seed=seed)

    def _open_tasks(self) -> list[int]:
        """Return the tasks whose placement may have a better schedule than what is known."""
        return [n for n, bound in enumerate(self.incumbent.bounds) if not at_most(self.incumbent.value, bound)]

    def _is_hopeless(self, job: jobs.Job) -> bool:
        """Return whether no schedule of the job's placement is better than what is known."""
        return at_most(self.incumbent.value, self.incumbent.bounds[job.task])

    def _note(self, answer: jobs.Answer) -> None:
        if answer.error:
            self.incumbent.failures.append(answer.error)
        if answer.bound:
            self.incumbent.prove(answer.task, answer.bound, answer.source)
        if answer.schedule is not None:
            self.incumbent.offer(answer.task, answer.schedule, answer.source)

    # -- running them -------------------------------------------------------------------------------------------------

    def _search(self, pool: jobs.WorkerPool) -> None:
        """Hand out jobs as workers become idle; with ``reproducible`` in rounds."""
        first, openers, in_rounds = self._first(), self._openers(), self.options.reproducible
        grace_s = _GRACE_S if self.options.time_limit_s >= _FIRST_S and not in_rounds else 0.0
        spent, underway = 0.0, set[int]()  # jobs of first families
        while not self.incumbent.solved:
            left = self.options.time_limit_s - (spent if in_rounds else self.incumbent.wall_s)
            if left <= -grace_s:
                return
            # these run past the limit by the grace, so that no answer is worse than the first families
            batch: list[jobs.Job] = list(islice((j for j in first if not self._is_hopeless(j)), pool.idle))
            underway.update(pool.submit(job) for job in batch)
            if left <= 0 and not underway:
                return
            if left > 0:
                batch = list(islice((j for j in openers if not self._is_hopeless(j)), pool.idle))
                batch = batch or [j for _ in range(pool.idle) if (j := self._neighbourhood()) is not None]
                for job in batch:
                    pool.submit(job if in_rounds else replace(job, seconds=min(job.seconds, max(0.1, left))))
                # a round takes as long as its longest job
                spent += max((job.seconds for job in batch if job.timed), default=0.0)
            if not pool.busy:
                return
            wait_s = min(left, _POLL_S) if left > 0 else _POLL_S
            for answer in self._round(pool) if in_rounds else [pool.receive(wait_s)]:
                if answer is not None:
                    self._note(answer)
                    if answer.done:
                        underway.discard(answer.job)

    def _round(self, pool: jobs.WorkerPool) -> list[jobs.Answer]:
        """Return all answers to the jobs under way, job by job."""
        answers: list[jobs.Answer] = []
        while pool.busy and (answer := pool.receive(None)) is not None:
            if answer.gone:
                raise ScheduleError("a solver process ended before its job; run again, or without reproducible mode")
            answers.append(answer)
        return sorted(answers, key=lambda x: x.job)


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule, better than those found before. ``source``: what found it."""

    schedule: Schedule
    source: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a search, after which nothing comes. ``lower_bound_s``: no schedule of the task is shorter (0: nothing is
    known). ``remark``: why nothing was found, or empty."""

    lower_bound_s: float = 0.0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a search that went wrong. ``what``: happened to the solver, in one line."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Solve(jobs.Job):
    """A whole solve: tells of every better schedule, and at last the bound, or why there is none."""

    options: Options

    def run(self, task: SolveTask, tell: jobs.Tell) -> None:
        os.nice(_LOWEST)

        def better(progress: Progress, schedule: Schedule | None) -> None:
            if schedule is not None:
                tell(schedule, progress.source)

        try:
            tell(None, "", solve(task, self.options, better).lower_bound)
        except ScheduleError as error:
            tell(None, short_message(error))


class BackgroundSolve:
    """:func:`~jaxpipe.search.solve.solve` of ``task``, under way. Whoever asked checks what is found.

    Raises:
        OSError: its process can't be started.
    """

    def __init__(self, task: SolveTask, options: Options, command: Sequence[str] = jobs.COMMAND) -> None:
        self._pool = jobs.WorkerPool(1, [task], command)
        self._pool.submit(Solve(task=0, seconds=options.time_limit_s, options=options))

    def take(self) -> list[Found | Finished | Failed]:
        """Return the messages since the last call, in order; nothing after the end, whatever becomes of the process."""
        answers: list[Found | Finished | Failed] = []
        try:
            while (answer := self._pool.receive(0.0)) is not None:
                if answer.gone:
                    return [*answers, Failed(answer.gone)]
                if answer.error:
                    return [*answers, Failed(f"failed ({truncate(' '.join(answer.error.split()), _LONGEST)})")]
                if answer.schedule is not None:
                    answers.append(Found(answer.schedule, answer.source))
                elif not answer.done:
                    return [*answers, Finished(answer.bound, answer.source)]
        except Exception as error:  # whatever it wrote
            answers.append(Failed(f"wrote what is no answer ({type(error).__name__}: {short_message(error)})"))
        return answers

    def close(self) -> None:
        """End its processes."""
        self._pool.close()
