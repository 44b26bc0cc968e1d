"""Orders that a search starts from: a feasible one at once, whatever the limit.

Groups of microbatches, each ended before the next begins. Groups are as large as every rank's limit allows, so
1F1B's warm-up at best and one microbatch at a time at worst (the "trivial feasible schedule" of `optpipe.txt` section 4.1.3).
Far from good; it is there so that an answer exists in well under a second at any size, and something is left if everything
else is cut short. Graphs of stages start from schedules by rules. The same orders say what to answer where nothing fits: the
smallest limit that was found to work, with and without offload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.ir import Schedule, Slot
from jaxpipe.schedule.passes.braid import with_slots
from jaxpipe.schedule.passes.separate import separate_gradients
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.schedule.rules.traversal import FIRST, Traversal, traverse
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import MEMORY, how_many
from jaxpipe.search.solve.task import SolveTask

_SEPARATED = 6  # of the schedules by rules; not tuned


def group_size(problem: Problem, limits: Sequence[float]) -> int:
    """Return the most microbatches that may be in flight at once if none is given back before all are there; 0 if not even
    one."""
    flows, stages = problem.placement.num_flows, problem.placement.num_stages
    fits = problem.num_microbatches
    for rank, limit in enumerate(limits):
        shares = [0.0] * flows
        for k in problem.replicas_of(rank):
            # B may leave more for W than F kept, so the larger of both must fit
            shares[k // stages] += max(problem.held[k], problem.kept[k])
        if max(shares) > 0 and limit < float("inf"):
            fits = max(0, min(fits, how_many(max(shares), limit)))
    return fits // flows * flows or min(fits, 1)


def grouped_rows(problem: Problem, size: int) -> list[list[int]]:
    """Return rows of codes: groups of ``size`` microbatches, all F's, then each B with its W."""
    m, stages, flows = problem.num_microbatches, problem.placement.num_stages, problem.placement.num_flows
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for first in range(0, m, size):
        group = range(first, min(m, first + size))
        for k, i in [(i % flows * stages + s, i) for s in range(stages) for i in group]:
            rows[problem.rank[k]].append(problem.code(F, k, i))
        for k, i in [(i % flows * stages + s, i) for s in reversed(range(stages)) for i in group]:
            rows[problem.rank[k]] += [problem.code(B, k, i), problem.code(W, k, i)]
    return rows


def away_schedule(problem: Problem) -> Schedule:
    """Return one microbatch at a time, every residual on the host while another stage of its rank runs: the least memory
    there is.

    Each F but the rank's last is followed by O and S (the next F waits for the room); L comes behind the rank's W before.
    """
    stages, flows = problem.placement.num_stages, problem.placement.num_flows
    last = {(rank, k // stages): k for k, rank in enumerate(problem.rank)}

    def away(slot: Slot) -> Iterator[Slot]:
        for a in slot.actions:
            leaves = a.microbatch % flows * stages + a.stage not in last.values()
            if leaves and a.op == "B":
                yield replace(a, op="L")
            yield a
            if leaves and a.op == "F":
                yield from (replace(a, op="O"), replace(a, op="S"))

    return with_slots(problem.schedule("first", grouped_rows(problem, 1)), away)


def graph_starts(task: SolveTask) -> Iterator[tuple[Schedule, str]]:
    """Yield schedules by rules, the surest to keep the limits first; then the shortest of them with backwards separated.

    Raises:
        ScheduleError: the costs are for another number of stages.
    """
    ranked: list[tuple[bool, float, int, Schedule, str]] = []
    rules = (
        Traversal(first, forward=forward, backward=backward, **room)
        for room in _rooms(task)
        for first, forward, backward in product(reversed(FIRST), ("depth", "breadth"), ("depth", "breadth"))
    )
    for rule in rules:
        with suppress(ScheduleError):  # the limits of one stage or another leave no room
            schedule = traverse(task.placement, task.num_microbatches, rule, task.costs)
            timeline = simulate(schedule, task.costs)
            ranked.append((not task.fits(timeline), task.seconds(timeline), len(ranked), schedule, f"rules {rule}"))
            yield schedule, f"rules {rule}"
    for *_, schedule, name in sorted(ranked)[:_SEPARATED]:
        with suppress(ScheduleError):
            yield separate_gradients(schedule, task.costs, memory_limit=task.memory_limit), f"{name}, separated"


def _rooms(task: SolveTask) -> Iterator[dict[str, Any]]:
    """Yield limits on microbatches in flight: one at a time; for each stage what lies behind it, as in 1F1B; for each
    stage, and for each rank, what the limits allow. A stage that holds nothing has no limit."""
    placement, m = task.placement, task.num_microbatches
    most = [max(1, int(min(m, limit * (1 + MEMORY)))) for limit in task.limits()]
    behind: dict[int, int] = {}
    for s in reversed(placement.topological_order()):
        behind[s] = (task.costs.residual_bytes[s] > 0) + max((behind[t] for t in placement.successors(s)), default=0)
    flows = placement.num_flows  # a limit of a stage holds in each
    room = [
        max(1, min(most[r] for flow in placement.flows for r in flow[s]) // flows) for s in range(placement.num_stages)
    ]
    chunks = [len(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    holds = [x > 0 for x in task.costs.residual_bytes]
    yield {"in_flight": tuple(chunks)}
    yield {"in_flight_per_stage": tuple(max(1, min(x, behind[s])) if holds[s] else m for s, x in enumerate(room))}
    yield {"in_flight_per_stage": tuple(x if holds[s] else m for s, x in enumerate(room))}
    yield {"in_flight": tuple(n * x for n, x in zip(chunks, most, strict=True))}


def smallest_limits(task: SolveTask) -> tuple[float, float]:
    """Return the peak activations, in units of a rank's share of a microbatch, of one microbatch at a time: without and
    with offload."""
    if not task.placement.is_plain_chain:
        stays = min(max(simulate(x, task.costs).peak_activations) for x, _ in graph_starts(task))
        return stays, stays
    problem = Problem.of(task.placement, min(task.num_microbatches, task.placement.num_flows), task.costs)
    one_at_a_time = problem.schedule("alone", grouped_rows(problem, 1))
    stays = max(simulate(one_at_a_time, task.costs).peak_activations)
    away = max(simulate(away_schedule(problem), task.costs).peak_activations)
    return stays, min(stays, away)


def explain(tasks: Sequence[SolveTask]) -> str:
    """Return the error line for users; ``tasks`` differ in placement only."""
    task = tasks[0]
    smallest = [smallest_limits(replace(t, memory_limit=float("inf"))) for t in tasks]
    stays, away = min(x for x, _ in smallest), min(x for _, x in smallest)
    limit = min(task.safe_limits())
    sizes = f"{task.placement.num_ranks} ranks and {task.num_microbatches} microbatches"
    offload = "with" if task.offload else "without"
    most = f"{stays:g} without offload and {away:g} with it" if task.placement.is_plain_chain else f"{stays:g}"
    return f"no schedule of {sizes} keeps a memory limit of {limit:g} {offload} offload; the smallest found to work is {most}"
