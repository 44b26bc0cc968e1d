"""One order of all messages between processes, and where their receives stand.

Ranks of one process hand arrays over, and a receive stands right before its first reader. Between processes that would not do:
two ranks that both send before they receive wait for each other, where a message ends only when both sides have come to it
(:mod:`jaxpipe.program.deadlock`). If all processes start all messages in one order in which each comes after those that it
depends on, they never do: of the messages that have not ended, the first is the next one of both its processes. So receives
move forward to the place that this order gives them. From there they may move further, to be posted early, where what carries
the messages allows it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpipe.program.deadlock import Crossing, check_transfers, find_circles, waiting_graph
from jaxpipe.program.ir import Message, Program, Recv, Run, Send, Value, message_of
from jaxpipe.program.liveness import Step, assign_slots
from jaxpipe.program.order import issue_order
from jaxpipe.schedule import Slot, Timeline

RankSteps = tuple[Sequence[Step], Mapping[Value, int]]
"""What a rank does, in order, and the bytes of what it works on."""

Started = Message | tuple[int, Slot]
"""A message, or what a rank runs."""


def message_order(programs: Sequence[Program], timeline: Timeline) -> tuple[Started, ...]:
    """All runs and messages of all ranks in one order, each after what it depends on: a run stands where it starts, a message
    where the run that makes it ends; what is at one time stands as one thread would issue it.

    Args:
        programs: of all ranks, as in one process.
        timeline: of their schedule, simulated.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    times = {(e.rank, a): e for e in timeline.events if e.lane == "compute" for a in (e.action, *e.action.actions)}
    # A braid that runs as separate calls sends between them what is made at its end.
    now_s = [float("-inf")] * len(programs)
    starts: list[tuple[float, int, Started]] = []
    for n, (k, at) in enumerate(issue_order(programs, timeline)):
        rank, instruction = programs[k].rank, programs[k].instructions[at]
        if isinstance(instruction, Run):
            now_s[k] = max(now_s[k], times[(rank, instruction.action)].start_s)
            starts.append((now_s[k], n, (rank, instruction.action)))
        elif isinstance(instruction, Send):
            now_s[k] = max(now_s[k], times[(rank, instruction.action)].end_s)
            starts.append((now_s[k], n, message_of(rank, instruction)))
    return tuple(node for _, _, node in sorted(starts, key=lambda item: item[:2]))


def place_receives(
    rank: int, steps: Sequence[Step], places: Mapping[Any, int], early: int = 0, in_turn: Collection[int] = ()
) -> list[Step]:
    """The steps of ``rank``, where what it receives from other processes stands where ``places`` say.

    Args:
        rank: whose ``steps`` they are, as in one process.
        places: of all runs, and of the messages between processes.
        early: how many runs each receive moves forward from there, past what the rank sends between them, but not past other
            receives.
        in_turn: places of messages that stay.
    """
    unmoved: list[tuple[int, Step]] = []
    received: list[tuple[int, Step]] = []
    for step in steps:
        place = places.get((rank, step.action) if step.kind is Run else _message(rank, step), -1)
        (received if step.kind is Recv and place >= 0 else unmoved).append((place, step))
    ordered = [(place, at) for at, (place, _) in enumerate(unmoved) if place >= 0]
    runs = [(at, place) for at, (place, step) in enumerate(unmoved) if step.kind is Run]
    posted: dict[int, list[Step]] = {}
    last = (0, 0)
    for place, step in sorted(received, key=lambda item: item[0]):
        at = ordered[bisect_left(ordered, (place, 0))][1]  # its reader follows
        if early and place not in in_turn:
            k = bisect_left(runs, (at, 0)) - early
            at, place = runs[k] if k >= 0 else (0, 0)
        while at and unmoved[at - 1][1].kind is Recv:  # from this process; what it waits for may come later
            at -= 1
        last = max(last, (at, place))
        posted.setdefault(last[0], []).append(_placed(step, last[1]))
    out: list[Step] = []
    for at, (place, step) in enumerate(unmoved):
        out += posted.get(at, ())
        out.append(_placed(step, place) if step.kind is Send and place >= 0 else step)
    return out


def _placed(step: Step, place: int) -> Step:
    return replace(step, message=(*step.message, place))


def _message(rank: int, step: Step) -> Any:
    if not step.message:
        return None
    peer = step.message[0]
    return (rank, peer, step.action) if step.kind is Send else (peer, rank, step.action)


def lower_apart(ranks: Sequence[RankSteps], crossing: Crossing) -> tuple[Program, ...]:
    """The programs of all ranks, with messages from process to process in one order; no two processes wait for each other.

    A receive that could not be posted early without a deadlock is posted in its turn.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    unordered = [assign_slots(rank, *steps) for rank, steps in enumerate(ranks)]
    order = message_order(unordered, crossing.timeline)
    places: dict[Any, int] = {node: n for n, node in enumerate(order) if len(node) == 2 or crossing.crosses(node)}
    in_turn: set[int] = set()
    while True:
        placed = [place_receives(r, steps, places, crossing.early, in_turn) for r, (steps, _) in enumerate(ranks)]
        programs = tuple(assign_slots(r, placed[r], sizes) for r, (_, sizes) in enumerate(ranks))
        moved = {
            message: places[message]
            for p in programs
            for i in p.instructions
            if isinstance(i, Recv) and 0 <= i.place < places[message := message_of(p.rank, i)]
        }
        blamed = {
            max(indices)
            for circle in (find_circles(waiting_graph(programs, crossing)) if moved else ())
            if (indices := [moved[node] for node in circle if node in moved])
        }
        if not blamed:
            check_transfers(programs, crossing)
            return programs
        in_turn |= blamed
