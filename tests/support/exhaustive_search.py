"""The best schedule of a tiny pipeline by trying them all: the reference for the exact solver, and written without looking
at it.

Times are whole numbers and durations at least 1. Rules: jaxpipe/README.md. A rank runs F, B and W one at a time;
F waits for F of the stage before, B for its own F and for B of the stage behind, over links whose transfers queue in issue
order; W for its B; memory is taken at starts and given back at ends; O (after F) and L (after O, before B) run on host
lanes. Anything may wait for as long as it likes, for memory say.

**Why it is exhaustive.** Among the best schedules take one whose starts have the least sum. No single start in it can be
moved to the left, so each start is 0 or something that ends at that moment holds it: what it waits for (or its transfer),
what ran on its lane, or, if it takes memory, something that gave memory back; a release is an end. So it is enough to
decide at time 0 and whenever something ends or arrives, and there each free lane may start any action that can start, or
stay idle. :meth:`_Search.reachable` tries all of these combinations.

**What is cut off, and why nothing is lost.** (1) A state from which the work left on a rank, or the way that is left to a
microbatch, can't be done by the deadline. (2) A state seen before with at least as much time left: states are compared with
all times relative to now, and whether one can be finished depends on nothing else. The optimum is found by raising the
deadline from a lower bound one by one until it can be met, so the first deadline that is met is the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

Job = tuple[str, int, int]
"""(op, stage, microbatch)."""


@dataclass(frozen=True)
class Case:
    """A pipeline with one flow. Per stage: ``rank``, durations ``f b w``, and memory ``held`` from F's start to B's end,
    ``w_held`` (at most ``held``) from B's end to W's end, both counted in full against ``limit`` of its rank.

    ``comm``: every transfer between ranks, until it arrives; ``occupied``: that part of it in which its pair of ranks starts no
    other. ``leaves``: what O takes away, none if empty; ``o``, ``l``: their durations.
    ``shared``: O and L of a rank use one lane; ``group``: all ranks do. ``bw``: full backwards may be used, with these
    durations. ``span``: minimise the longest rank span, where a rank's first F starts as soon as it arrives; else the
    makespan. ``in_order``: microbatches keep their order in F, B and W of every stage. ``in_flight``: so many of a rank's
    O's may have started whose L has not ended (None: any number).
    """

    rank: tuple[int, ...]
    microbatches: int
    f: tuple[int, ...]
    b: tuple[int, ...]
    w: tuple[int, ...]
    held: tuple[int, ...]
    w_held: tuple[int, ...]
    limit: tuple[int, ...]
    comm: int = 0
    occupied: int = 0
    leaves: tuple[int, ...] = ()
    o: tuple[int, ...] = ()
    l: tuple[int, ...] = ()  # noqa: E741
    shared: bool = True
    group: bool = False
    bw: tuple[int, ...] = ()
    span: bool = False
    in_order: bool = True
    in_flight: int | None = None

    @property
    def stages(self) -> int:
        return len(self.rank)

    @property
    def ranks(self) -> int:
        return max(self.rank) + 1

    def duration(self, job: Job) -> int:
        return {"F": self.f, "B": self.b, "W": self.w, "BW": self.bw, "O": self.o, "L": self.l}[job[0]][job[1]]

    def lane(self, job: Job) -> str:
        op, s, _ = job
        if op not in ("O", "L"):
            return f"rank {self.rank[s]}"
        return f"host {'all' if self.group else self.rank[s]} {'both' if self.shared else op}"


@dataclass(frozen=True)
class State:
    """The progress of a schedule at a moment. ``started``: jobs begun. ``until``: what still runs, or is still on its way (a
    job named ``>F`` or ``>B``), with its end. ``level``: memory in use per rank."""

    started: frozenset[Job]
    until: Mapping[Job, int]
    level: tuple[int, ...]

    def relative(self, now: int) -> tuple[frozenset[Job], frozenset[tuple[Job, int]]]:
        return self.started, frozenset((job, end - now) for job, end in self.until.items())


def optimum(case: Case, at_most: int = 10_000) -> int | None:
    """Return the least makespan or longest span, or None if nothing keeps the limits within ``at_most``."""
    return _Search(case).optimum(at_most)


@dataclass
class _Search:
    case: Case
    failed: dict[object, int] = field(default_factory=dict)
    deadline: int = 0

    def optimum(self, at_most: int) -> int | None:
        case = self.case
        for s in range(case.stages):
            if case.held[s] > case.limit[case.rank[s]]:
                return None
        self.deadline = self._least()
        while self.deadline <= at_most:
            if self.reachable(State(frozenset(), {}, (0,) * case.ranks), 0):
                return self.deadline
            self.deadline += 1
        return None

    def _least(self) -> int:
        case = self.case
        return max(
            sum(case.microbatches * (case.f[s] + self._back(s)) for s in range(case.stages) if case.rank[s] == r)
            for r in range(case.ranks)
        )

    def _back(self, s: int) -> int:
        """Return the least time for both backward parts."""
        both_parts = self.case.b[s] + self.case.w[s]
        return min(both_parts, self.case.bw[s]) if self.case.bw else both_parts

    def _due(self, rank: int) -> int:
        """Return when a rank must be done."""
        return self.deadline + (self._arrives(rank) if self.case.span else 0)

    def _arrives(self, rank: int) -> int:
        case = self.case
        lowest = case.rank.index(rank)
        assert len(set(case.rank[: lowest + 1])) == lowest + 1, "a rank's first F depends on the order"
        return sum(case.f[s] + case.comm for s in range(lowest))

    # The search.

    def reachable(self, state: State, now: int) -> bool:
        """Return whether everything can be done in time from ``state``, in which nothing that has ended by ``now`` is still
        held."""
        if self._hopeless(state, now):
            return False
        if self._finished(state):
            return True
        key = state.relative(now)
        if key in self.failed and self.failed[key] >= self.deadline - now:
            return False
        for after in self._choices(state, now, self.lanes):
            if after.until:
                then = min(after.until.values())
                if self.reachable(self._finish_jobs(after, then), then):
                    return True
        self.failed[key] = self.deadline - now
        return False

    @cached_property
    def lane_of(self) -> dict[Job, str]:
        """Return every job, and the lane that it runs on."""
        case = self.case
        ops = ["F", "B", "W", *(["BW"] if case.bw else []), *(["O", "L"] if case.leaves else [])]
        jobs = product(ops, range(case.stages), range(case.microbatches))
        return {job: case.lane(job) for job in jobs}

    @cached_property
    def lanes(self) -> list[tuple[str, list[Job]]]:
        """Return every lane with its jobs."""
        return [
            (lane, [x for x in self.lane_of if self.lane_of[x] == lane]) for lane in sorted({*self.lane_of.values()})
        ]

    def _choices(self, state: State, now: int, lanes: list[tuple[str, list[Job]]]) -> Iterator[State]:
        """Yield every way in which the free lanes may start something, or not."""
        if not lanes:
            yield state
            return
        (lane, jobs), rest = lanes[0], lanes[1:]
        busy = any(self.lane_of.get(job) == lane for job in state.until)
        if not busy:
            for job in jobs:
                if self._can_start(state, job):
                    yield from self._choices(self._start_job(state, job, now), now, rest)
        yield from self._choices(state, now, rest)

    def _can_start(self, state: State, job: Job) -> bool:
        case = self.case
        op, s, i = job
        started = state.started
        if job in started or not self._in_order(started, job):
            return False
        if state.level[case.rank[s]] + self._takes(job) > case.limit[case.rank[s]]:
            return False

        def is_done(*options: Job) -> bool:
            return any(x in started and x not in state.until for x in options)

        def arrived(name: str, t: int) -> bool:
            options = [(name, t, i)] + ([("BW", t, i)] if name == "B" else [])
            return is_done(*options) and (f">{name}", t, i) not in state.until

        ready = {
            "F": lambda: s == 0 or arrived("F", s - 1),
            "W": lambda: is_done(("B", s, i)),
            "O": lambda: (
                is_done(("F", s, i)) and not {("B", s, i), ("BW", s, i)} & started and self._may_leave(state, s)
            ),
            "L": lambda: is_done(("O", s, i)),
        }
        if op in ready:
            ok = ready[op]()
        else:
            twice = ("BW" if op == "B" else "B", s, i) in started
            ok = not twice and is_done(("F", s, i)) and (s == case.stages - 1 or arrived("B", s + 1))
            ok = ok and (("O", s, i) not in started or is_done(("L", s, i)))
        return ok

    def _may_leave(self, state: State, stage: int) -> bool:
        case = self.case
        jobs = {job for job in state.started if case.rank[job[1]] == case.rank[stage]}
        out = sum(job[0] == "O" for job in jobs) - sum(job[0] == "L" and job not in state.until for job in jobs)
        return case.in_flight is None or out < case.in_flight

    def _in_order(self, started: frozenset[Job], job: Job) -> bool:
        """F, B and W of a stage in order of microbatches. Among full backwards and Ws no order is asked for."""
        op, s, i = job
        if op in ("O", "L") or i == 0:
            return True
        if not self.case.in_order:
            return op != "F" or s > 0 or (op, s, i - 1) in started
        if op == "W":
            return all((o, s, j) in started for j in range(i) for o in ("W",) if ("BW", s, j) not in started)
        return any((o, s, i - 1) in started for o in (("F",) if op == "F" else ("B", "BW")))

    def _takes(self, job: Job) -> int:
        op, s, _ = job
        return self.case.held[s] if op == "F" else self.case.leaves[s] if op == "L" else 0

    def _gives(self, job: Job) -> int:
        op, s, _ = job
        case = self.case
        freed = {"B": case.held[s] - case.w_held[s], "W": case.w_held[s], "BW": case.held[s]}
        return case.leaves[s] if op == "O" else freed.get(op, 0)

    def _start_job(self, state: State, job: Job, now: int) -> State:
        case = self.case
        op, s, i = job
        end = now + case.duration(job)
        until = {**state.until, job: end}
        to = s + 1 if op == "F" else s - 1
        if op in ("F", "B", "BW") and case.comm and 0 <= to < case.stages and case.rank[to] != case.rank[s]:
            pair = (case.rank[s], case.rank[to])
            delay = case.comm - case.occupied
            queue = [t - delay for job, t in state.until.items() if job[0].startswith(">") and self._pair(job) == pair]
            until[f">{op[0]}", s, i] = max([end, *queue]) + case.comm
        level = list(state.level)
        level[case.rank[s]] += self._takes(job)
        return State(state.started | {job}, until, tuple(level))

    def _pair(self, moving: Job) -> tuple[int, int]:
        op, s, _ = moving
        return self.case.rank[s], self.case.rank[s + 1 if op == ">F" else s - 1]

    def _finish_jobs(self, state: State, now: int) -> State:
        level = list(state.level)
        for job, end in state.until.items():
            if end <= now and not job[0].startswith(">"):
                level[self.case.rank[job[1]]] -= self._gives(job)
        until = {job: end for job, end in state.until.items() if end > now}
        return State(state.started, until, tuple(level))

    def _finished(self, state: State) -> bool:
        return all(self._backward_begun(state, s, i) == 2 for s, i in self._places())

    def _places(self) -> Iterator[tuple[int, int]]:
        return ((s, i) for s in range(self.case.stages) for i in range(self.case.microbatches))

    def _backward_begun(self, state: State, s: int, i: int) -> int:
        """Return how many of the two backward parts have started."""
        if ("BW", s, i) in state.started:
            return 2
        return (("B", s, i) in state.started) + (("W", s, i) in state.started)

    # What can't be done in time.

    def _hopeless(self, state: State, now: int) -> bool:
        case = self.case
        for rank in range(case.ranks):
            lane = f"rank {rank}"
            busy = [t for job, t in state.until.items() if self.lane_of.get(job) == lane]
            work = sum(self._work_left(state, s, i) for s, i in self._places() if case.rank[s] == rank)
            if (work or busy) and max([now, *busy]) + work > self._due(rank):
                return True
            if case.span and now > self._arrives(rank) and ("F", case.rank.index(rank), 0) not in state.started:
                return True
        return any(self._too_far(state, i, now) for i in range(case.microbatches))

    def _work_left(self, state: State, s: int, i: int) -> int:
        forward = 0 if ("F", s, i) in state.started else self.case.f[s]
        parts_begun = self._backward_begun(state, s, i)
        return forward + (self._back(s), self.case.w[s], 0)[parts_begun]

    def _too_far(self, state: State, i: int, now: int) -> bool:
        """Return whether the way of a microbatch down and up, from where it is, passes a rank's deadline."""
        case, at = self.case, now

        def hop(a: int, b: int) -> int:
            return case.comm if case.rank[a] != case.rank[b] else 0

        for s in range(case.stages):
            if ("F", s, i) in state.started:
                at = max(at, state.until.get((">F", s, i), state.until.get(("F", s, i), now)))
            else:
                at += case.f[s] + (hop(s, s + 1) if s + 1 < case.stages else 0)
        for s in reversed(range(case.stages)):
            parts_begun = self._backward_begun(state, s, i)
            if parts_begun:
                ends = [state.until.get((op, s, i), now) for op in (">B", "B", "BW")]
                at = max(at, *ends)
                continue
            b = min(case.b[s], case.bw[s]) if case.bw else case.b[s]
            if at + self._back(s) > self._due(case.rank[s]):
                return True
            at += b + (hop(s, s - 1) if s else 0)
        return False
