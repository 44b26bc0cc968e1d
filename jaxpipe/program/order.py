"""The order in which one host thread issues the programs of several ranks, and how far it may run ahead of offloads.

XLA lets about 32 computations per device be in flight; the next dispatch blocks the thread. A thread that fills one rank's
queue while others starve would idle them, so instructions are issued in the global order of their simulated start times.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxpipe.errors import ProgramError
from jaxpipe.program.ir import Message, Offload, Program, Recv, Reload, Run, Send, Sync, message_of, reads, writes
from jaxpipe.schedule import Action, Event, Slot, Timeline


def issue_order(programs: Sequence[Program], timeline: Timeline) -> tuple[tuple[int, int], ...]:
    """(position in ``programs``, instruction) pairs: each program in its own order, receives after their sends.

    Among the ranks that can go on, the one whose next compute action starts first in ``timeline`` goes. Programs may be a
    subset of the ranks, those of this process. What comes from elsewhere is not waited for; what goes there or comes from there
    is started in the order of its places.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    start = {(e.rank, a): e.start_s for e in timeline.events if e.lane != "send" for a in (e.action, *e.action.actions)}
    keys = [_instruction_times(p, start) for p in programs]
    local = {p.rank for p in programs}
    sent: set[Message] = set()
    waiting: dict[Message, int] = {}
    turns = deque(
        sorted(i.place for p in programs for i in p.instructions if isinstance(i, Send | Recv) and i.place >= 0)
    )
    next_turn: dict[int, int] = {}
    ready = [(keys[k][0], k) for k, p in enumerate(programs) if p.instructions]
    heapq.heapify(ready)
    at = [0] * len(programs)
    order: list[tuple[int, int]] = []

    def resume(blocked: dict[Any, int], what: Any) -> None:
        if (k := blocked.pop(what, None)) is not None:
            heapq.heappush(ready, (keys[k][at[k]], k))

    while ready:
        _, k = heapq.heappop(ready)
        program = programs[k]
        instruction = program.instructions[at[k]]
        if isinstance(instruction, Send | Recv):
            message, place = message_of(program.rank, instruction), instruction.place
            if isinstance(instruction, Recv) and instruction.src in local and message not in sent:
                waiting[message] = k
                continue
            if place >= 0:
                if place != turns[0]:
                    next_turn[place] = k
                    continue
                turns.popleft()
                resume(next_turn, turns[0] if turns else None)
            if isinstance(instruction, Send):
                sent.add(message)
                resume(waiting, message)
        order.append((k, at[k]))
        at[k] += 1
        if at[k] < len(program.instructions):
            heapq.heappush(ready, (keys[k][at[k]], k))
    if next_turn and not waiting:
        ranks = ", ".join(str(programs[k].rank) for k in sorted(next_turn.values()))
        raise ProgramError(
            f"ranks {ranks} of one process wait for each other's turn to send and receive: their transfers stand in an order "
            "that is not that of the messages' places"
        )
    if waiting:
        (src, dst, action), _ = min(waiting.items())
        raise ProgramError(
            f"rank {dst} waits for ever for what {action} of rank {src} sends: an op that reads a value of another stage waits "
            "for the op that writes it (Wait of its OpSpec)"
        )
    return tuple(order)


def messages_arrived(programs: Sequence[Program]) -> dict[tuple[int, int], list[Message]]:
    """Return, by (rank, instruction), the rank's messages to other processes that have certainly arrived when it can run.

    The instruction is the first of which this is known: it reads what was made after they had been read there. ``programs``: of
    all ranks.
    """
    if not any(isinstance(i, Send) and i.place >= 0 for p in programs for i in p.instructions):
        return {}
    first = {p.rank: _first_reads(p) for p in programs}
    read_at = {m: (rank, k) for rank, reads in first.items() for k, messages in reads.items() for m in messages}
    ran: dict[int, dict[int, int]] = {
        p.rank: {} for p in programs
    }  # how far others have come, for all that a rank knows
    read_before: dict[Message, dict[int, int]] = {}  # the same, for who reads a message
    under_way: dict[int, list[Message]] = {p.rank: [] for p in programs}
    arrived: dict[tuple[int, int], list[Message]] = {}
    todo = {p.rank: deque(enumerate(p.instructions)) for p in programs}
    stuck = False
    while not stuck:
        stuck = True
        for rank, ahead in todo.items():
            position = ran[rank]
            while ahead and all(m in read_before for m in first[rank].get(ahead[0][0], ())):
                stuck = False
                k, instruction = ahead.popleft()
                for message in first[rank].get(k, ()):
                    position.update({r: max(position.get(r, -1), at) for r, at in read_before[message].items()})
                if ended := [m for m in under_way[rank] if m in read_at and position.get(m[1], -1) >= read_at[m][1]]:
                    arrived[(rank, k)] = ended
                    under_way[rank] = [m for m in under_way[rank] if m not in ended]
                if isinstance(instruction, Send):
                    message = message_of(rank, instruction)
                    read_before[message] = position | {rank: k}
                    under_way[rank] += [message] * (instruction.place >= 0)
    return arrived


def _first_reads(program: Program) -> dict[int, list[Message]]:
    """Return, by instruction, the messages that it is the first to read."""
    held: dict[int, Message] = {}
    messages_at: dict[int, list[Message]] = {}
    for k, instruction in enumerate(program.instructions):
        for message in dict.fromkeys(held[slot] for slot in reads(instruction) if slot in held):
            messages_at.setdefault(k, []).append(message)
            held = {slot: m for slot, m in held.items() if m != message}
        for slot in writes(instruction):
            held.pop(slot, None)
            if isinstance(instruction, Recv):
                held[slot] = message_of(program.rank, instruction)
    return messages_at


def offloads_ended(program: Program, timeline: Timeline) -> dict[int, tuple[Offload, ...]]:
    """Return, by instruction, the offloads whose memory is free when it is issued, and was not before.

    These are the offloads that end in ``timeline``
    before it starts (a function or a reload), and the one whose copy it waits for or loads back."""
    times = _times(program, timeline)
    running: list[Offload] = []
    offloads: dict[int, tuple[Offload, ...]] = {}
    for k, instruction in enumerate(program.instructions):
        if isinstance(instruction, Offload):
            running.append(instruction)
        elif isinstance(instruction, Run | Reload | Sync):
            now_s = float("-inf") if isinstance(instruction, Sync) else times[instruction.action].start_s
            ended = [o for o in running if times[o.action].end_s <= now_s or o.outputs == instruction.inputs]
            if ended:
                offloads[k] = tuple(ended)
                running = [o for o in running if o not in ended]
    return offloads


def holds(program: Program, timeline: Timeline) -> dict[int, tuple[tuple[Action, tuple[int, ...]], ...]]:
    """Which offloads must have ended before an instruction is issued: per instruction, O's and their host slots.

    A device allocates when it is given work, and an offload gives its bytes back when it has ended. So that a host that runs
    ahead takes no more memory than ``timeline`` says, what starts there after an offload's end waits for that offload. Those
    that take no time there (their costs are not known) hold nothing up, nor does one that is already being loaded back.
    """
    times = _times(program, timeline)
    long = {a for a, e in times.items() if e.end_s > e.start_s}
    waits_at = {
        k: tuple(
            (o.action, o.outputs) for o in ended if o.action in long and o.outputs != reads(program.instructions[k])
        )
        for k, ended in offloads_ended(program, timeline).items()
    }
    return {k: waits for k, waits in waits_at.items() if waits}


def _times(program: Program, timeline: Timeline) -> dict[Slot, Event]:
    events = (e for e in timeline.events if e.rank == program.rank and e.lane != "send")
    return {a: e for e in events for a in (e.action, *e.action.actions)}


def _instruction_times(program: Program, start: dict[tuple[int, Slot], float]) -> list[float]:
    """Per instruction, when it should be issued: a send or free right behind its run, a receive right before its reader, or
    as soon as it may where its message comes from another process.

    A sync blocks the thread, so it is issued when it is due."""
    times: list[float] = []
    last = float("-inf")
    for instruction in program.instructions:
        if isinstance(instruction, Run | Sync):
            last = max(last, start[(program.rank, instruction.action)])
        times.append(last)
    following = float("inf")
    for k in range(len(times) - 1, -1, -1):
        if isinstance(program.instructions[k], Run | Sync):
            following = times[k]
        elif isinstance(i := program.instructions[k], Recv) and i.place < 0:
            times[k] = min(following, max(times[k], following))
    return times
