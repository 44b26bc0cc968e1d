"""What the solver and its worker processes tell each other: one JSON object a line.

A worker is given tasks once and then jobs, which name a task by number; it answers with orders, bounds, and at last ``done``.
Schedules travel in their JSON form (:mod:`~jaxpipe.schedule.json_form`), which needs no trust: whoever receives one checks and
simulates it.
"""

from __future__ import annotations

import json
from typing import Any

from jaxpipe.schedule.json_form import from_costs, from_placement, to_costs, to_placement
from jaxpipe.schedule.solve.task import SolveTask

Json = dict[str, Any]


def task_out(task: SolveTask) -> Json:
    """The task as JSON values."""
    return {
        "placement": to_placement(task.placement),
        "microbatches": task.num_microbatches,
        "costs": to_costs(task.costs),
        "memory_limit": "inf" if task.memory_limit == float("inf") else task.memory_limit,
        "offload": task.offload,
        "objective": task.objective,
    }


def task_in(data: Json) -> SolveTask:
    """The task that :func:`task_out` wrote.

    Raises:
        ScheduleParseError: it is damaged.
    """
    return SolveTask(
        from_placement(data["placement"]),
        int(data["microbatches"]),
        from_costs(data["costs"]),
        float(data["memory_limit"]),
        bool(data["offload"]),
        data["objective"],
    )


def line(message: Json) -> bytes:
    """One message as it goes through a pipe."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
