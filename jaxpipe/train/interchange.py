"""Whether one schedule may take another's place in the middle of a run, changing no bit and compiling nothing.

It may if it is valid, places the same stages on the same ranks, runs the same stage functions there (so every function is
compiled, and every backward is rounded as before), and adds up each stage's weight gradients in the same order. It may
offload only if the other does. Imports no JAX.
"""

from __future__ import annotations

from collections import Counter

from jaxpipe.schedule import Action, Schedule, find_problems, op_spec
from jaxpipe.schedule.ir import W


def why_not(schedule: Schedule, running: Schedule) -> str:
    """Why ``schedule`` can't take the place of ``running``; empty if it can."""
    if (schedule.placement.flows, schedule.placement.edges) != (running.placement.flows, running.placement.edges):
        return "it places stages elsewhere"
    if schedule.num_microbatches != running.num_microbatches:
        return f"it has {schedule.num_microbatches} microbatches, the run has {running.num_microbatches}"
    if len(schedule.rows) != len(running.rows):
        return f"it has {len(schedule.rows)} rows for {len(running.rows)} ranks"
    return _other_actions(schedule, running) or next(iter(find_problems(schedule)), "")


def _other_actions(schedule: Schedule, running: Schedule) -> str:
    if offloads(schedule) and not offloads(running):
        return "it offloads, which this run does not"
    for rank in range(running.num_ranks):
        new, old = _functions(schedule, rank), _functions(running, rank)
        if new != old:
            odd = min((new - old) or (old - new))
            return f"rank {rank} {'runs' if odd in new - old else 'lacks'} {odd}; other actions are compiled or rounded apart"
        if _weight_order(schedule, rank) != _weight_order(running, rank):
            return f"rank {rank} would add up weight gradients in another order"
    return ""


def takes_time(op: str) -> bool:
    """Whether an op runs a function of its stage. (O and L copy, S waits for an O.)"""
    spec = op_spec(op)
    return spec.lane == "compute" and bool(spec.cost)


def offloads(schedule: Schedule) -> bool:
    """Whether anything is copied to the host."""
    return any(not takes_time(a.op) for a in schedule.actions())


def _functions(schedule: Schedule, rank: int) -> Counter[Action]:
    return Counter(a for a in schedule.actions(rank) if takes_time(a.op))


def _weight_order(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """Per stage, the microbatches in the order in which their weight gradients are added."""
    order: dict[int, list[int]] = {}
    for action in schedule.actions(rank):
        if W.name in op_spec(action.op).performs():
            order.setdefault(action.stage, []).append(action.microbatch)
    return order
