"""Jobs of the solver, the worker processes that do them, and the answers these send back.

**Jobs.** A job is a frozen record, a class per kind; it travels as JSON by the types of its fields and does itself:
``run(task, tell)``. Schedules need no trust: whoever receives one checks and simulates it.

**Workers** (:class:`WorkerPool`) are started, given jobs, listened to, and gone when the solver is.
Processes, not threads, because half of the work is Python's; and fresh interpreters, not forks, because the caller may have
JAX's threads running. A worker that dies loses its job, nothing else.

A worker (``python -m jaxpipe.search.solve.jobs``) reads one JSON object a line, works on one job at a time, and ends when its
input does. It knows no clock but its job's budget. A job that fails says so and the worker goes on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from jaxpipe.errors import JaxpipeError
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.schedule.families.family import cheap_first
from jaxpipe.schedule.files import from_json, to_json
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.passes.braid import unbraid
from jaxpipe.schedule.plugins import import_module, imported_modules
from jaxpipe.schedule.problem import OPS, Problem
from jaxpipe.schedule.timeline import at_most, nine_digits
from jaxpipe.search.best import Candidate, SettingSearch, Task, placement_of
from jaxpipe.search.bounds.orders import FewRankBounds
from jaxpipe.search.budget import Budget
from jaxpipe.search.solve.task import SolveTask, count_offloads

_OPS = frozenset((*OPS, "O", "L", "S"))  # that the search knows
_ACTIONS_PER_S = 60_000  # that list scheduling with offload places, roughly
_FEWEST_POLICIES = 12
FIRST = ("gis", "gis-h", "zb-h1", "po-f", "po-h", "ada-offload")
"""Families that are tried before all else where activations may leave, the quick ones first: the best of those that the offload
pass helps, and those made for it. Other families follow, with all their settings."""
_FIRST_PAIRS = 1024  # of stage and microbatch, up to which each takes about a second


class Tell(Protocol):
    """Sends an order, where it comes from, and a proven bound (seconds; 0 for none)."""

    def __call__(self, schedule: Schedule | None, source: str, bound: float = 0.0) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """``task``: number of the task it is about. ``seconds``: its budget, deterministic ones with ``reproducible``.
    ``bound``: seconds of the objective that no schedule is below."""

    timed: ClassVar[bool] = True
    """Whether it takes its budget, rather than what it takes."""
    task: int
    seconds: float
    seed: int = 0
    reproducible: bool = False
    bound: float = 0.0

    def run(self, task: SolveTask, tell: Tell) -> None:
        raise NotImplementedError

    def budget(self) -> Budget:
        return Budget(self.seconds, self.reproducible)


@dataclass(frozen=True, slots=True, kw_only=True)
class Families(Job):
    """Families by name, with all their settings or ``once``, with their defaults. Only what may take less than ``value``
    seconds goes through the offload pass."""

    timed = False
    names: tuple[str, ...]
    once: bool = False
    value: float = inf

    def run(self, task: SolveTask, tell: Tell) -> None:
        family_schedules(task, self.names, tell, once=self.once, beat=self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBounds(Job):
    """Bounds from a few ranks at once. ``value``: seconds of the best schedule that is known."""

    value: float

    def run(self, task: SolveTask, tell: Tell) -> None:
        for bound in few_ranks(task).bounds(self.bound, self.value, self.budget()):
            tell(None, "orders of a few ranks", bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadLists(Job):
    """List schedules with offload."""

    timed = False

    def run(self, task: SolveTask, tell: Tell) -> None:
        from jaxpipe.search.solve.offload_list import offload_candidates

        budget = self.budget()
        lot_s = 3 * task.placement.num_stages * task.num_microbatches / _ACTIONS_PER_S
        # a dozen policies, fixed ones first, are played whatever the budget is
        budget.spent -= lot_s * _FEWEST_POLICIES

        def late() -> bool:
            budget.spent += lot_s
            return budget.left <= 0

        for schedule in offload_candidates(task, self.bound, late, seed=self.seed):
            tell(schedule, "list with offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles(Job):
    """Mirrored steady states of a V, every ``parts``-th kind from ``part`` on."""

    part: int = 0
    parts: int = 1

    def run(self, task: SolveTask, tell: Tell) -> None:
        from jaxpipe.search.blocks.mirrored import mirrored_cycles  # NumPy is for those who solve

        problem, limits = Problem.of(task.placement, task.num_microbatches, task.costs), task.safe_limits()
        best: tuple[float, ...] = (float("inf"),)
        for draft, source in mirrored_cycles(problem, limits, self.part, self.parts, self.budget(), self.seed):
            key = *task.order(draft.makespan, draft.span), nine_digits(draft.peak)
            if key < best:
                best = key
                tell(problem.schedule("solved", draft.rows), source)
            if at_most(best[0], self.bound):
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhoods(Job):
    """Large-neighbourhood search from ``start``; with offload only if that has some."""

    start: Schedule

    def run(self, task: SolveTask, tell: Tell) -> None:
        from jaxpipe.search.solve.neighbourhoods import NeighbourhoodSearch

        offload = count_offloads(self.start) > 0
        search = NeighbourhoodSearch(replace(task, offload=offload), self.start, self.seed)
        for schedule in search.run(self.budget(), self.bound):
            tell(schedule, "neighbourhood with offload" if offload else "neighbourhood")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact(Job):
    """The exact model with ``workers`` threads: microbatches in order first; where that may cost something (with offload), then
    in any order, which proves more. Of a graph of stages with the actions of ``start``."""

    start: Schedule | None
    workers: int

    def run(self, task: SolveTask, tell: Tell) -> None:
        from jaxpipe.search.solve.neighbourhoods import solve_exact

        start = self.start
        for every_order in (False, True):
            result = solve_exact(
                task,
                time_limit_s=self.seconds / 2 if task.offload else self.seconds,
                seed=self.seed,
                workers=self.workers,
                hint=start,
                lower_bound=self.bound,
                deterministic=self.reproducible,
                every_order=every_order,
            )
            tell(result.schedule, "exact model", result.lower_bound if result.every_order else 0.0)
            if result.every_order or at_most(result.value, self.bound):
                return
            start = result.schedule or start


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To job number ``job``, about task number ``task``: a schedule, a bound (seconds; 0: none) or both, and what found them.

    ``done``: the job is; nothing else comes. ``error``: what went wrong in it. ``gone``: how its process ended, if it did.
    """

    job: int
    task: int = 0
    source: str = ""
    schedule: Schedule | None = None
    bound: float = 0.0
    done: bool = False
    error: str = ""
    gone: str = ""


def to_line(message: Mapping[str, Any]) -> bytes:
    """Encode one message for a pipe."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def tasks_line(tasks: Sequence[SolveTask], imports: Sequence[str]) -> bytes:
    """Return the first line to a worker: its tasks, and the modules to import for what they register."""
    return to_line({"tasks": [to_json(task) for task in tasks], "imports": list(imports)})


def job_line(number: int, job: Job) -> bytes:
    """Return a job by its number, as :func:`job_in` reads it."""
    return to_line({"number": number, "kind": [type(job).__module__, type(job).__name__], "job": to_json(job)})


def job_in(message: Mapping[str, Any]) -> tuple[int, Job]:
    """Return the job of a line, and its number."""
    module, name = message["kind"]
    return message["number"], from_json(getattr(importlib.import_module(module), name), message["job"], "job")


def few_ranks(task: SolveTask) -> FewRankBounds:
    """Return a task as the bounds from a few ranks take it."""
    span, limits = task.objective == "span", task.limits()
    return FewRankBounds(task.placement, task.num_microbatches, task.costs, limits, offload=task.offload, span=span)


def family_schedules(
    task: SolveTask,
    names: Sequence[str],
    tell: Callable[[Schedule, str], object],
    *,
    once: bool = False,
    beat: float = inf,
) -> None:
    """Try every family of the task's placement among ``names``, and report each schedule that beats those before it: with
    all settings, or ``once`` each. Only what may take less than ``beat`` seconds goes through the offload pass."""
    # families look at activations alone, so workspace comes off the limit before they see it
    limits = task.safe_limits()
    family_task = Task(
        task.placement.num_ranks,
        task.num_microbatches,
        task.costs,
        min(limits),
        offload=task.offload,
        objective="span" if task.objective == "span" else "makespan",
    )

    def keep(candidate: Candidate) -> None:
        ops = {a.op for rank in range(candidate.schedule.num_ranks) for a in candidate.schedule.actions(rank)}
        if candidate.schedule.placement == task.placement and ops <= _OPS:
            tell(unbraid(candidate.schedule), f"family {candidate.setting}")

    if once:
        SettingSearch(family_task, keep, beat=beat).run_once([FAMILIES[name] for name in names], task.placement)
        return
    # a search per family: each reports its own best
    for name in names:
        with contextlib.suppress(JaxpipeError):
            SettingSearch(family_task, keep, beat=beat).run([FAMILIES[name]])


def families_of(task: SolveTask) -> list[str]:
    """Return the families that make schedules of the task's placement, the cheap ones first."""
    p, v = task.placement.num_ranks, max(1, task.placement.num_chunks)
    fitting = (family for family in FAMILIES.values() if placement_of(family, p, v) == task.placement)
    return [family.name for family in cheap_first(fitting)]


def quick_families(task: SolveTask) -> list[str]:
    """Return those of them that make a schedule at once, whatever the memory limit."""
    return [name for name in families_of(task) if "memory_limit" not in FAMILIES[name].options]


def first_families(task: SolveTask) -> list[str]:
    """Return those of :data:`FIRST` on the task's placement, if its size lets them end soon."""
    pairs = sum(map(len, task.placement.flows)) * task.num_microbatches // task.placement.num_flows
    return sorted(set(FIRST).intersection(families_of(task)), key=FIRST.index) if pairs <= _FIRST_PAIRS else []


COMMAND = (sys.executable, "-P", "-m", "jaxpipe.search.solve.jobs")


class _Member:
    """One process, and the threads that write to it and read its answers into ``inbox``, so that neither a full pipe nor a
    process that hangs holds up the caller."""

    def __init__(self, command: Sequence[str], tasks: Sequence[SolveTask], inbox: _Inbox) -> None:
        self.inbox = inbox
        self.job: int | None = None
        self.process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for the caller, who then ends its workers in order
            start_new_session=True,
        )
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.outbox.put(tasks_line(tasks, imported_modules()))
        self.threads = [threading.Thread(target=talk, daemon=True) for talk in (self._write, self._listen)]
        for thread in self.threads:
            thread.start()

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, as the one who listens will say
            for line in iter(self.outbox.get, None):
                self.process.stdin.write(line)
                self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for text in iter(self.process.stdout.readline, b""):
            with contextlib.suppress(ValueError, RecursionError):
                self.inbox.put((self, json.loads(text)))
        self.inbox.put((self, {"job": 0, "gone": _fate(self.process.wait())}))

    def stop(self) -> None:
        # killed before threads are joined: one that writes to a full pipe ends only with its reader
        self.process.kill()
        self.process.wait()
        self.outbox.put(None)
        for thread in self.threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_Inbox = queue.Queue[tuple[_Member, dict[str, Any]]]


def child_environment() -> dict[str, str]:
    """Return our environment with this very package first on the path and then what we import from: the caller may have
    found the package, and modules that register families, in another way than by installing them."""
    path = (Path(__file__).resolve().parents[3], *map(os.path.abspath, sys.path))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}


def _fate(code: int) -> str:
    """Return how a process ended, by its exit code."""
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended before it was done (exit code {code})"


class WorkerPool:
    """``size`` workers that know ``tasks``, processes that run ``command``. To be closed.

    Raises:
        OSError: they can't be started.
    """

    def __init__(self, size: int, tasks: Sequence[SolveTask], command: Sequence[str] = COMMAND) -> None:
        self._inbox: _Inbox = queue.Queue()
        self._members = [_Member(command, tasks, self._inbox) for _ in range(size)]
        self._jobs = 0

    def close(self) -> None:
        """End the workers, whatever they do."""
        for member in self._members:
            member.stop()

    @property
    def idle(self) -> int:
        """Count the workers without a job."""
        return sum(m.job is None for m in self._members)

    @property
    def busy(self) -> int:
        """Count the workers with a job."""
        return len(self._members) - self.idle

    def submit(self, job: Job) -> int:
        """Give a job to an idle worker and return its number, from 0."""
        member = next(m for m in self._members if m.job is None)
        member.job, self._jobs = self._jobs, self._jobs + 1
        member.outbox.put(job_line(member.job, job))
        return member.job

    def receive(self, timeout_s: float | None) -> Answer | None:
        """Return the next answer, or None after ``timeout_s`` without one (None: however long it takes).

        Raises:
            ScheduleParseError: a worker wrote what is no answer.
        """
        try:
            member, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        answer = from_json(Answer, message, "answer")
        if answer.gone:
            self._members.remove(member)
            member.stop()
            return replace(answer, job=member.job or 0, done=True, error=f"a solver process {answer.gone}")
        if answer.done:
            member.job = None
        return answer


_NICE = 5


class Worker:
    """The tasks it knows."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out
        self.tasks: list[SolveTask] = []
        self.unknown = ""  # why a module of the caller's can't be imported here; told once

    def run(self, lines: Iterable[bytes]) -> None:
        """Serve until the input ends."""
        for text in lines:
            message = json.loads(text)
            if "tasks" in message:
                self.tasks = [from_json(SolveTask, x, "task") for x in message["tasks"]]
                self._import(message["imports"])
            else:
                self._work(*job_in(message))
                gc.collect()

    def _work(self, number: int, job: Job) -> None:
        error, self.unknown = self.unknown, ""

        def tell(schedule: Schedule | None, source: str, bound: float = 0.0) -> None:
            self.send(Answer(job=number, task=job.task, source=source, schedule=schedule, bound=bound))

        try:
            job.run(self.tasks[job.task], tell)
        except Exception as failure:  # the worker can still do other jobs; the solver says what happened
            error = f"{type(failure).__name__}: {failure}"
        self.send(Answer(job=number, task=job.task, done=True, error=error))

    def _import(self, modules: Iterable[str]) -> None:
        """Import what the caller imported. Without one of them the families and ops it registers are not known here, no
        more."""
        for module in modules:
            try:
                import_module(module)
            except JaxpipeError as error:
                self.unknown = f"in a solver process: {error}"

    def send(self, answer: Answer) -> None:
        self.out.write(to_line(to_json(answer)))
        self.out.flush()


def serve() -> None:
    """Serve standard input until it ends; that also ends a job under way, since nobody is left to hear of it."""
    os.nice(_NICE)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for text in iter(sys.stdin.buffer.readline, b""):
            lines.put(text)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    Worker(sys.stdout.buffer).run(iter(lines.get, b""))


if __name__ == "__main__":
    serve()
