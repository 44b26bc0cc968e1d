"""A worker process of the solver: ``python -m jaxpipe.schedule.solve.worker``, tasks and jobs in, orders and bounds out.

It reads one JSON object a line (:mod:`~jaxpipe.schedule.solve.messages`), works on one job at a time, and ends when its input
does. It knows no clock but its job's budget. A job that fails says so and the worker goes on.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, BinaryIO, Protocol

from jaxpipe.errors import JaxpipeError
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.json_form import from_schedule, to_schedule
from jaxpipe.schedule.passes.braid import unbraid
from jaxpipe.schedule.passes.offload import without_offloads
from jaxpipe.schedule.plugins import import_module
from jaxpipe.schedule.problem import OPS, Problem
from jaxpipe.schedule.retime import drafted
from jaxpipe.schedule.search_orders import Candidate, best_of_family, cheap_first
from jaxpipe.schedule.settings import Task
from jaxpipe.schedule.solve import messages
from jaxpipe.schedule.solve.search import (
    DETERMINISTIC_SECOND,
    Budget,
    NeighbourhoodSearch,
    Target,
    cycles,
    mirrored_cycles,
)
from jaxpipe.schedule.solve.task import SolveTask
from jaxpipe.schedule.tolerance import at_most

_NICE = 5
_OPS = frozenset((*OPS, "O", "L", "S"))  # that the search knows
_ACTIONS_PER_S = 60_000  # that list scheduling with offload places, roughly
_FEWEST_POLICIES, _MOST_POLICIES = 12, 2_000


Job = dict[str, Any]


class Tell(Protocol):
    """Sends an order, where it comes from, and a proven bound (seconds; 0 for none)."""

    def __call__(self, schedule: Schedule | None, source: str, bound: float = 0.0) -> None: ...


Do = Callable[[SolveTask, Job, Tell], None]


class Worker:
    """The tasks it knows, and how each kind of job is done; ``more`` kinds by name."""

    def __init__(self, out: BinaryIO, **more: Do) -> None:
        self.out = out
        self.tasks: list[SolveTask] = []
        self.unknown = ""  # why a module of the caller's can't be imported here; told once
        self.kinds: dict[str, Do] = {
            "families": _families,
            "cycles": _cycles,
            "mirrored": _cycles,
            "neighbourhoods": _neighbourhoods,
            "offload-neighbourhoods": _offload_neighbourhoods,
            "exact": _exact,
            "offload": _offload,
            **more,
        }

    def run(self, lines: Iterable[bytes]) -> None:
        """Until the input ends."""
        for text in lines:
            message = json.loads(text)
            if "tasks" in message:
                self.tasks = [messages.task_in(x) for x in message["tasks"]]
                self._import(message["imports"])
                continue
            error, self.unknown = self.unknown, ""
            try:
                self.kinds[message["kind"]](self.tasks[message["task"]], message, partial(self._tell, message))
            except Exception as failure:  # the worker can still do other jobs; the solver says what happened
                error = f"{type(failure).__name__}: {failure}"
            self.send({"job": message["job"], "done": True, "error": error})
            gc.collect()

    def _import(self, modules: Iterable[str]) -> None:
        """What the caller imported. Without one of them the families and ops it registers are not known here, no more."""
        for module in modules:
            try:
                import_module(module)
            except JaxpipeError as error:
                self.unknown = f"in a solver process: {error}"

    def _tell(self, job: Job, schedule: Schedule | None, source: str, bound: float = 0.0) -> None:
        answer: dict[str, Any] = {"job": job["job"], "task": job["task"], "source": source}
        if schedule is not None:
            answer["schedule"] = to_schedule(schedule)
        if bound > 0:
            answer["bound"] = bound
        self.send(answer)

    def send(self, message: dict[str, Any]) -> None:
        self.out.write(messages.line(message))
        self.out.flush()


def family_schedules(task: SolveTask, names: Sequence[str], tell: Callable[[Schedule, str], object]) -> None:
    """Every family of the task's placement among ``names``, each that beats those before it."""
    limits = task.safe_limits()
    asked = Task(
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

    for name in names:
        with contextlib.suppress(JaxpipeError):
            best_of_family(FAMILIES[name], asked, keep)


def _families(task: SolveTask, job: Job, tell: Tell) -> None:
    family_schedules(task, job["names"], tell)


def families_of(task: SolveTask) -> list[str]:
    """The families that make schedules of the task's placement, the cheap ones first."""
    p, v = task.placement.num_ranks, max(1, task.placement.num_chunks)
    return [f.name for f in cheap_first(f for f in FAMILIES.values() if _same_placement(f.placement, p, v, task))]


def quick_families(task: SolveTask) -> list[str]:
    """Those of them that make a schedule at once, whatever the memory limit."""
    return [name for name in families_of(task) if "memory_limit" not in FAMILIES[name].options]


def _same_placement(make: Callable[..., Any], ranks: int, chunks: int, task: SolveTask) -> bool:
    try:
        return bool(make(ranks, chunks) == task.placement)
    except JaxpipeError:
        return False


def _target(task: SolveTask, job: Job) -> Target:
    return Target(task.safe_limits(), task.objective == "span", float(job["bound"]))


def _cycles(task: SolveTask, job: Job, tell: Tell) -> None:
    problem = Problem.of(task.placement, task.num_microbatches, task.costs)
    target, best = _target(task, job), None
    budget = Budget(job["seconds"], job["reproducible"])
    if job["kind"] == "mirrored":
        found = mirrored_cycles(problem, target, job["part"], job["parts"], budget, job["seed"])
    else:
        found = cycles(problem, target, job["g"], budget, job["seed"])
    for draft, source in found:
        if best is None or target.key(draft) < best:
            best = target.key(draft)
            tell(problem.schedule("solved", draft.rows), source)


def _neighbourhoods(task: SolveTask, job: Job, tell: Tell) -> None:
    problem = Problem.of(task.placement, task.num_microbatches, task.costs)
    start = drafted(problem, unbraid(without_offloads(from_schedule(job["start"]))))
    if start is None:
        return
    search = NeighbourhoodSearch(problem, _target(task, job), job["seed"])
    for draft in search.run(start, Budget(job["seconds"], job["reproducible"])):
        tell(problem.schedule("solved", draft.rows), "neighbourhood")


def _offload_neighbourhoods(task: SolveTask, job: Job, tell: Tell) -> None:
    from jaxpipe.schedule.solve.offload_neighbourhoods import offload_neighbourhood_search

    start, budget = from_schedule(job["start"]), Budget(job["seconds"], job["reproducible"])
    for schedule in offload_neighbourhood_search(task, start, float(job["bound"]), budget, job["seed"]):
        tell(schedule, "neighbourhood with offload")


def _exact(task: SolveTask, job: Job, tell: Tell) -> None:
    """Microbatches in order first; where that may cost something (with offload), then in any order, which proves more."""
    from jaxpipe.schedule.solve.model import solve_exact

    start = from_schedule(job["start"]) if job.get("start") else None
    seconds = job["seconds"] * (DETERMINISTIC_SECOND if job["reproducible"] else 1.0)
    for every_order in (False, True):
        result = solve_exact(
            task,
            time_limit_s=seconds / 2 if task.offload else seconds,
            seed=job["seed"],
            workers=job["workers"],
            hint=start,
            lower_bound=job["bound"],
            deterministic=job["reproducible"],
            every_order=every_order,
        )
        tell(result.schedule, "exact model", result.lower_bound if result.every_order else 0.0)
        if result.every_order or at_most(result.value, job["bound"]):
            return
        start = result.schedule or start


def _offload(task: SolveTask, job: Job, tell: Tell) -> None:
    from jaxpipe.schedule.solve.offload_list import offload_candidates

    budget = Budget(job["seconds"], job["reproducible"])
    actions = 3 * task.placement.num_stages * task.num_microbatches
    most = (
        max(_FEWEST_POLICIES, int(job["seconds"] * _ACTIONS_PER_S / actions)) if job["reproducible"] else _MOST_POLICIES
    )
    for schedule in offload_candidates(
        task, float(job["bound"]), lambda: budget.left <= 0, seed=job["seed"], most=most
    ):
        tell(schedule, "list with offload")


def serve(**more: Do) -> None:
    """Serve standard input until it ends; that also ends a job under way, since nobody is left to hear of it."""
    os.nice(_NICE)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for text in iter(sys.stdin.buffer.readline, b""):
            lines.put(text)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    Worker(sys.stdout.buffer, **more).run(iter(lines.get, b""))


if __name__ == "__main__":
    serve()
