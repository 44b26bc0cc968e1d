"""What to say where no schedule keeps the limit: the smallest limit that was found to work, with and without offload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.first import away_schedule, graph_starts, grouped_rows
from jaxpipe.schedule.solve.task import SolveTask


def smallest_limits(task: SolveTask) -> tuple[float, float]:
    """Peak activations, in units of a rank's share of a microbatch, of one microbatch at a time: without and with offload."""
    if not task.placement.is_plain_chain:
        stays = min(max(simulate(x, task.costs).peak_activations) for x, _ in graph_starts(task))
        return stays, stays
    problem = Problem.of(task.placement, min(task.num_microbatches, task.placement.num_flows), task.costs)
    alone = problem.schedule("alone", grouped_rows(problem, 1))
    stays = max(simulate(alone, task.costs).peak_activations)
    away = max(simulate(away_schedule(problem), task.costs).peak_activations)
    return stays, min(stays, away)


def explain(tasks: Sequence[SolveTask]) -> str:
    """The one line; ``tasks`` differ in placement only."""
    task = tasks[0]
    found = [smallest_limits(replace(t, memory_limit=float("inf"))) for t in tasks]
    stays, away = min(x for x, _ in found), min(x for _, x in found)
    limit = min(task.safe_limits())
    asked = f"{task.placement.num_ranks} ranks and {task.num_microbatches} microbatches"
    offload = "with offload" if task.offload else "without offload"
    most = f"{stays:g} without offload and {away:g} with it" if task.placement.is_plain_chain else f"{stays:g}"
    return f"no schedule of {asked} keeps a memory limit of {limit:g} {offload}; the smallest found to work is {most}"
