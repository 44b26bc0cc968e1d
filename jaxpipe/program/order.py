"""The order in which processes issue instructions and messages, and the proof that it can't deadlock.

1. **Instructions of one process** (:func:`issue_order`). XLA lets about 32 computations per device be in flight; the next
   dispatch blocks the thread. A thread that fills one rank's queue while others starve would idle them, so instructions are
   issued in the global order of their simulated start times. :func:`holds` says how far the thread may run ahead of offloads.
2. **Proof, before anything runs, that processes which exchange messages never wait for each other for ever**
   (:func:`check_transfers`), by the rules of the transport in the table below.
3. **Messages between processes** (:func:`message_order`, :func:`place_receives`) stand in one order in all processes.
4. **Copies to the host and back** (:func:`copies_in_parts`) are issued part by part where devices put all they copy on a few
   streams in order, as XLA does on GPUs: a message behind a whole copy would wait for all of it.

The proof. A schedule is free of deadlock if whoever receives has a place for what arrives. Between processes that may not be
so: a message may be a rendezvous, which ends when both sides have started it, and what a side starts on one stream,
communicator or thread runs in that order. So a graph is built of everything that waits: the thread of each process handing out
one instruction after another, the instructions, and the messages, each of them one node for both of its ends. A circle in it is
a deadlock.

=============  ======================================================================================================
always         an instruction waits for the thread to hand it out, and for those of its rank before it; a message for the run
               that makes it; who reads it for the message; the thread, for copies to the host that it waits for, and where
               ``IN_FLIGHT`` runs of a rank have not ended
``directed``   messages from one process to another run one after another
``pair``       messages between two processes, either way (one NCCL communicator a pair)
``four``       those of a rank, on four streams in turn (XLA's device-to-device streams on GPUs); matched by order, not number
``gate``       a receive waits for the runs of its rank that were handed out before it: it is given memory that they may still
               use (XLA's allocator on GPUs)
``fifo``       the thread waits for each instruction to end before it goes on: the strictest, which covers all others, and a
               transport whose sends or receives block
=============  ======================================================================================================

Not modelled: collectives between processes within a step, transports that hold up one message for want of memory.

The order of messages. Ranks of one process hand arrays over, and a receive stands right before its first reader. Between
processes that would not do: two ranks that both send before they receive wait for each other, where a message ends only when
both sides have started it. If all processes start all messages in one order in which each comes after those that it depends on,
they never do: of the messages that have not ended, the first is the next one of both its processes. So receives move forward to
the place that this order gives them. From there they may move further, to be posted early, where the transport allows it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from jaxpipe.errors import ProgramError
from jaxpipe.program import ir
from jaxpipe.schedule import Action, Event, Slot, Timeline


def issue_order(programs: Sequence[ir.Program], timeline: Timeline) -> tuple[tuple[int, int], ...]:
    """Return (position in ``programs``, instruction) pairs: each program in its own order, receives after their sends.

    Among the ranks that can go on, the one whose next compute action starts first in ``timeline`` goes. Programs may be a
    subset of the ranks, those of this process. Messages from other processes are not waited for; messages from and to them are
    started in the order of their places.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    keys = [_instruction_times(p, timeline) for p in programs]
    local = {p.rank for p in programs}
    sent: set[ir.Message] = set()
    waiting: dict[ir.Message, int] = {}
    # Places of messages to and from other processes: all processes start theirs in this order, which is what keeps them from
    # waiting for each other in a circle.
    messages = [i for p in programs for i in p.instructions if isinstance(i, (ir.Send, ir.Recv))]
    turns = deque(sorted(i.place for i in messages if i.place >= 0))
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
        # A rank that can't go on leaves the heap; what it waits for puts it back. So no rank is looked at in vain.
        if isinstance(instruction, (ir.Send, ir.Recv)):
            place, sends = instruction.place, isinstance(instruction, ir.Send)
            message = ir.message_of(program.rank, instruction)
            if not sends and message[0] in local and message not in sent:
                waiting[message] = k
                continue
            if place >= 0:
                if place != turns[0]:
                    next_turn[place] = k
                    continue
                turns.popleft()
                resume(next_turn, turns[0] if turns else None)
            if sends and message[1] in local:
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


def messages_arrived(programs: Sequence[ir.Program]) -> dict[tuple[int, int], list[ir.Message]]:
    """Return, by (rank, instruction), the rank's messages to other processes that have certainly arrived when it can run.

    The instruction is the first of which this is known: it reads what was made after they had been read there. A buffer that
    was sent is held until then, so predicted memory counts it that long. ``programs``: of all ranks.
    """
    if not any(isinstance(i, ir.Send) and i.place >= 0 for p in programs for i in p.instructions):
        return {}
    first = {p.rank: _first_reads(p) for p in programs}
    read_at = {
        m: (rank, k) for rank, by_position in first.items() for k, messages in by_position.items() for m in messages
    }
    # As vector clocks: how far each rank knows the others to have come, and the same for who reads a message.
    ran: dict[int, dict[int, int]] = {p.rank: {} for p in programs}
    read_before: dict[ir.Message, dict[int, int]] = {}
    under_way: dict[int, list[ir.Message]] = {p.rank: [] for p in programs}
    arrived: dict[tuple[int, int], list[ir.Message]] = {}
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
                if isinstance(instruction, ir.Send):
                    message = ir.message_of(rank, instruction)
                    read_before[message] = position | {rank: k}
                    under_way[rank] += [message] * (instruction.place >= 0)
    return arrived


def _first_reads(program: ir.Program) -> dict[int, list[ir.Message]]:
    """Return, by instruction, the messages that it is the first to read."""
    held: dict[int, ir.Message] = {}
    messages_at: dict[int, list[ir.Message]] = {}
    for k, instruction in enumerate(program.instructions):
        for message in dict.fromkeys(held[slot] for slot in ir.reads(instruction) if slot in held):
            messages_at.setdefault(k, []).append(message)
            held = {slot: m for slot, m in held.items() if m != message}
        for slot in ir.writes(instruction):
            held.pop(slot, None)
            if isinstance(instruction, ir.Recv):
                held[slot] = ir.message_of(program.rank, instruction)
    return messages_at


def offloads_ended(program: ir.Program, timeline: Timeline) -> dict[int, tuple[ir.Offload, ...]]:
    """Return, by instruction, the offloads whose memory is free when it is issued, and was not before.

    These are the offloads that end in ``timeline`` before it starts (a function or a reload), and the one whose copy it waits
    for or loads back.
    """
    if not any(isinstance(i, ir.Offload) for i in program.instructions):
        return {}
    times = _times(program.rank, timeline)
    # When each instruction is due: a reload with the next run, which it must not hold up.
    due, now_s = [], float("inf")
    for i in reversed(program.instructions):
        if isinstance(i, ir.Run | ir.Reload):
            now_s = min(times[i.action].start_s, now_s) if isinstance(i, ir.Reload) else times[i.action].start_s
        due.append(float("-inf") if isinstance(i, ir.Sync) else now_s)
    running: list[ir.Offload] = []
    offloads: dict[int, tuple[ir.Offload, ...]] = {}
    for k, (instruction, due_s) in enumerate(zip(program.instructions, reversed(due), strict=True)):
        if isinstance(instruction, ir.Offload):
            running.append(instruction)
        elif isinstance(instruction, ir.Run | ir.Reload | ir.Sync):
            read = {*instruction.inputs}
            ended = [o for o in running if times[o.action].end_s <= due_s or not read.isdisjoint(o.outputs)]
            if ended:
                offloads[k] = tuple(ended)
                running = [o for o in running if o not in ended]
    return offloads


def holds(program: ir.Program, timeline: Timeline) -> dict[int, tuple[tuple[Action, tuple[int, ...]], ...]]:
    """Return, by instruction, the offloads that must have ended before it is issued, and their host slots.

    A device allocates when it is given work, and an offload gives its bytes back when it has ended. So that a host that runs
    ahead takes no more memory than ``timeline`` says, what starts there after an offload's end waits for that offload. Those
    that take no time there (their costs are not known) hold nothing up, nor does one that is already being loaded back.
    """
    offloads = offloads_ended(program, timeline)
    times = _times(program.rank, timeline) if offloads else {}
    long = {a for a, e in times.items() if e.end_s > e.start_s}
    waits: dict[int, tuple[tuple[Action, tuple[int, ...]], ...]] = {}
    for k, ended in offloads.items():
        read = ir.reads(program.instructions[k])
        if running := tuple((o.action, o.outputs) for o in ended if o.action in long and o.outputs != read):
            waits[k] = running
    return waits


def _times(rank: int, timeline: Timeline) -> dict[Slot, Event]:
    # A simulated timeline holds its events rank after rank. To look through all of them for each of p ranks took time that grew
    # with p² · m: two thirds of lowering at 64 ranks.
    first, end = (bisect_left(timeline.events, r, key=attrgetter("rank")) for r in (rank, rank + 1))
    events = (e for e in timeline.events[first:end] if e.lane != "send")
    return {a: e for e in events for a in (e.action, *e.action.actions)}


def _instruction_times(program: ir.Program, timeline: Timeline) -> list[float]:
    """Return when each instruction should be issued: a send or free right behind its run, a receive right before its reader, or
    as soon as it may where its message comes from another process.

    A sync or a reload may block the thread (:func:`holds`), so it is issued when it is due: before that, all ranks would wait.
    """
    times: list[float] = []
    last, events = float("-inf"), _times(program.rank, timeline)
    for instruction in program.instructions:
        if isinstance(instruction, (ir.Run, ir.Sync)):
            last = max(last, events[instruction.action].start_s)
        times.append(last)
    # Backwards, as a receive takes the time of the run that follows it, and a reload must not hold that run up.
    following = float("inf")
    for k in range(len(times) - 1, -1, -1):
        if isinstance(i := program.instructions[k], (ir.Run, ir.Sync)):
            following = times[k]
        elif isinstance(i, ir.Reload):
            times[k] = max(times[k], min(following, events[i.action].start_s))
        elif isinstance(i, ir.Recv) and i.place < 0:
            times[k] = min(following, max(times[k], following))
    return times


Rule = Literal["directed", "pair", "four", "gate", "fifo"]
Lanes = tuple[Rule, ...]
"""The rules by which a transport makes messages wait, all of them at once: see the table of the module."""

TAGGED: Lanes = ()
"""Messages are matched by number and wait for nothing but their makers (JAX's transfer server)."""
NATIVE: Lanes = ("pair", "four", "gate")
"""``jax.device_put`` to devices of another process, on GPUs."""
STRICT: Lanes = ("fifo",)
"""Whatever a transport may do."""

Lane = tuple[object, ...]
"""A lane names what a rank does, or a rule of a transport with the two processes, or the rank and its stream."""

IN_FLIGHT = 32
"""Computations of a device that have not ended, at which JAX lets the thread that starts another one wait."""
STREAMS = 4


@dataclass(frozen=True)
class Crossing:
    """Which messages cross from process to process, and how.

    ``process_of``: by rank. ``timeline``: of the schedule, simulated; all processes must have the same. ``lanes``: of the
    transport between processes. ``early``: how many runs before its turn a receive is posted, where ``lanes`` allow it.
    """

    process_of: tuple[int, ...]
    timeline: Timeline
    lanes: Lanes = STRICT
    early: int = 0

    def crosses(self, message: ir.Message) -> bool:
        return self.process_of[message[0]] != self.process_of[message[1]]


Node = int
"""An instruction that runs (numbered over all ranks), one that a thread hands out, or a message."""
Graph = Mapping[Node, Mapping[Node, int]]
"""The nodes that wait for each node, each with the process in which it does so."""


@dataclass(frozen=True, slots=True)
class WaitingGraph:
    """Hold who waits for whom, edge by edge: node ``after`` for node ``before``, in ``process``. ``messages``: the nodes
    of messages, numbered from ``first_message`` on."""

    first_message: Node
    before: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)
    process: list[int] = field(default_factory=list)
    messages: dict[ir.Message, Node] = field(default_factory=dict)

    def has_circle(self) -> bool:
        """Return whether there is a circle, and so a deadlock."""
        ends, size = np.array([self.before, self.after], np.int32), self.first_message + len(self.messages)
        matrix = coo_array((np.ones(ends.shape[1], np.bool_), (ends[0], ends[1])), (size, size))
        # Every node on a circle is in a component with another one, but for those that wait for themselves.
        return bool((ends[0] == ends[1]).any()) or connected_components(matrix, connection="strong")[0] < size

    def by_node(self) -> Graph:
        """Return the graph as a mapping, in the order of the edges."""
        graph: dict[Node, dict[Node, int]] = {}
        for before, after, process in zip(self.before, self.after, self.process, strict=True):
            graph.setdefault(before, {}).setdefault(after, process)
        return graph


def check_transfers(programs: Sequence[ir.Program], crossing: Crossing) -> None:
    """Check that the programs of all ranks, in the order in which each process issues its own, always come to an end.

    Raises:
        ProgramError: as :func:`~jaxpipe.program.ir.check_programs`; or messages can wait for each other for ever, with the
            shortest circle.
    """
    ir.check_programs(programs)
    _refuse_circles(waiting_graph(programs, crossing), crossing)


def _refuse_circles(waits: WaitingGraph, crossing: Crossing) -> None:
    if not waits.has_circle():
        return
    graph = waits.by_node()
    circles = sorted(find_circles(graph), key=len)
    # A depth-first circle may wander through the whole step; the shortest through one of its nodes is what people can follow.
    if circles:
        circle = circles[0]
        for node in dict.fromkeys(node for nodes in circles for node in nodes):
            circle = _shorter(graph, node, circle)
        rules = ", ".join(crossing.lanes) or "tagged"
        raise ProgramError(
            f"messages between processes can wait for each other for ever (lanes: {rules}): "
            f"{_in_words(graph, circle, waits.messages, crossing)}; start them in one order in all processes (early=0)"
        )


def waiting_graph(programs: Sequence[ir.Program], crossing: Crossing) -> WaitingGraph:
    """Return the graph of what waits for what; the module's docstring lists its edges."""
    process_of, lanes = crossing.process_of, crossing.lanes
    *firsts, total = accumulate((len(p.instructions) for p in programs), initial=0)
    first_of_rank = dict(zip((p.rank for p in programs), firsts, strict=True))
    graph = WaitingGraph(first_message=2 * total)

    def edge(before: Node | None, after: Node) -> None:
        if before is not None:
            graph.before.append(before)
            graph.after.append(after)
            graph.process.append(process)

    for process in dict.fromkeys(process_of):
        local_programs = [p for p in programs if process_of[p.rank] == process]
        thread: Node | None = None
        # The last node of each lane, and of what each rank does: whatever comes next on it waits for that one.
        last: dict[Lane, Node] = {}
        runs: dict[int, list[Node]] = defaultdict(list)
        started: dict[int, int] = defaultdict(int)
        # The message that a slot of a rank holds.
        held: dict[tuple[int, int], Node] = {}
        ended = {(p.rank, k): waits for p in local_programs for k, waits in holds(p, crossing.timeline).items()}
        copies: dict[tuple[int, Action], Node] = {}
        for k, at in issue_order(local_programs, crossing.timeline):
            rank, instruction = local_programs[k].rank, local_programs[k].instructions[at]
            if isinstance(instruction, ir.Free):
                continue
            # An instruction is two nodes: the thread hands it out, and it runs. The thread goes on to the next as soon as it
            # has handed one out, unless the transport blocks it (``fifo``) or it is a sync.
            node = first_of_rank[rank] + at
            turn = node + total
            edge(thread, turn)
            for action, _ in ended.get((rank, at), ()):
                edge(copies[(rank, action)], turn)
            thread = turn
            if isinstance(instruction, (ir.Send, ir.Recv)):
                # One node for both ends: it runs when both have started it, the stricter assumption about any transport.
                message = ir.message_of(rank, instruction)
                node = graph.messages.setdefault(message, 2 * total + len(graph.messages))
                crosses, sends = crossing.crosses(message), isinstance(instruction, ir.Send)
                if sends or (crosses and "gate" in lanes):
                    edge(last.get(("do", rank)), node)
                # A copy within a process is the sender's alone: the receive only looks up what has been dispatched.
                if sends or crosses:
                    edge(turn, node)
                    started[rank] += 1
                    for lane in _lanes(message, rank, started[rank], crossing) if crosses or "four" in lanes else ():
                        edge(last.get(lane), node)
                        last[lane] = node
                    if "fifo" in lanes:
                        thread = node
            else:
                edge(turn, node)
                edge(last.get(("do", rank)), node)
                last[("do", rank)] = node
                if isinstance(instruction, ir.Offload):
                    copies[(rank, instruction.action)] = node
                if isinstance(instruction, ir.Run):
                    runs[rank].append(node)
                    # JAX blocks the thread that dispatches one more than this to a device.
                    if len(runs[rank]) > IN_FLIGHT:
                        edge(runs[rank][-1 - IN_FLIGHT], turn)
                if isinstance(instruction, ir.Sync) or "fifo" in lanes:
                    thread = node
            for slot in ir.reads(instruction):
                edge(held.get((rank, slot)), node)
            for slot in ir.writes(instruction):
                held.pop((rank, slot), None)
                if isinstance(instruction, ir.Recv):
                    held[(rank, slot)] = node
    return graph


def _lanes(message: ir.Message, rank: int, nth: int, crossing: Crossing) -> Iterator[Lane]:
    """Yield the lanes on which ``rank`` starts a message, its ``nth``."""
    if "four" in crossing.lanes:
        yield "four", rank, nth % STREAMS
    if crossing.crosses(message):
        src, dst = (crossing.process_of[r] for r in message[:2])
        if "directed" in crossing.lanes or "four" in crossing.lanes:
            yield "directed", src, dst
        if "pair" in crossing.lanes:
            yield "pair", min(src, dst), max(src, dst)


def find_circles(graph: Graph) -> Iterator[list[Node]]:
    """Yield circles, one for each edge by which a depth-first walk comes back to a node of its path; none if there is none."""
    # Iterative, as paths are as long as a step has instructions, far beyond Python's limit of recursion.
    done: set[Node] = set()
    for root in graph:
        path: list[Node] = []
        place: dict[Node, int] = {}
        following = [iter((root,))]
        while following:
            node = next(following[-1], None)
            if node is None:
                following.pop()
                if path:
                    done.add(path[-1])
                    del place[path.pop()]
            elif node in place:
                yield path[place[node] :]
            elif node not in done:
                place[node] = len(path)
                path.append(node)
                following.append(iter(graph.get(node, ())))


def _shorter(graph: Graph, start: Node, circle: list[Node]) -> list[Node]:
    """Return the shortest circle through ``start``, if it is shorter than ``circle``; else that."""
    came_from: dict[Node, Node] = {}
    front = [start]
    for _ in range(len(circle) - 1):
        following = []
        for node in front:
            for after in graph.get(node, ()):
                if after == start:
                    path = [node]
                    while path[-1] != start:
                        path.append(came_from[path[-1]])
                    return path[::-1]
                if after not in came_from:
                    came_from[after] = node
                    following.append(after)
        front = following
    return circle


def _in_words(graph: Graph, circle: list[Node], nodes: Mapping[ir.Message, Node], crossing: Crossing) -> str:
    """Say who waits to send or receive what, once around the circle. Only messages that hold up one process on behalf of
    another are named: where one is waited for and what it waits for are in two processes."""
    edges = [graph[a][b] for a, b in pairwise([*circle, circle[0]])]
    messages = {node: message for message, node in nodes.items()}
    held: list[tuple[int, int, str]] = []
    for node, behind, before in reversed(list(zip(circle, [edges[-1], *edges], edges, strict=False))):
        if node in messages and behind != before:
            src, dst, action = messages[node]
            sends = crossing.process_of[src] == before
            held.append((src, dst, f"send {action} to") if sends else (dst, src, f"receive {action} from"))
    first = held.index(min(held))
    words, peer = "", -1
    for rank, other, what in held[first:] + held[:first]:
        who = f"rank {rank}" if not words else ", which" if rank == peer else f", in whose process rank {rank}"
        words += f"{who} waits to {what} rank {other}"
        peer = other
    return words


RankSteps = tuple[Sequence[ir.ValueInstruction], Mapping[ir.Value, int]]
"""The instructions of a rank over values, in order, and the bytes of the values."""


PARTS = 3
"""Into how many parts a copy is divided: of the usual nine arrays a part has three, which leave one of XLA's four copy streams
to what is sent next."""


def copies_in_parts(rank: int, steps: RankSteps, timeline: Timeline) -> RankSteps:
    """Return the steps of ``rank`` with each O and L in up to :data:`PARTS` parts of about equal bytes, whole arrays. A part of
    O stands behind the runs that start in ``timeline`` before the part does, a part of L before the run that it overlaps.

    XLA's GPU client puts what a device copies on four streams, array by array in turn, each in order; and it loads into memory
    that the compute dispatched before the load may still use. So what is issued later waits for a part rather than for a whole
    copy, and a load is under way while the run behind it is.
    """
    times, value_bytes = _times(rank, timeline), steps[1]
    placed: list[ir.ValueInstruction] = []
    waiting: list[tuple[float, int, ir.ValueInstruction]] = []
    for step in steps[0]:
        if step.kind in (ir.Offload, ir.Reload):
            event, total, moved = times[step.action], max(1, sum(value_bytes[v] for v in step.inputs)), 0
            parts: dict[int, tuple[float, list[ir.Value]]] = {} if step.inputs else {0: (event.start_s, [])}
            for value in step.inputs:
                start_s = event.start_s + (event.end_s - event.start_s) * moved / total
                # By its middle, so that a part is not much more than its share where arrays differ in size.
                n = int(PARTS * (moved + value_bytes[value] / 2) / total)
                parts.setdefault(n, (start_s, []))[1].append(value)
                moved += value_bytes[value]
            for start_s, values in parts.values():
                part = step._replace(inputs=tuple(values), outputs=tuple(values))
                waiting.append((start_s, len(placed) + len(waiting), part))
            continue
        if step.kind in (ir.Run, ir.Sync):
            event, read = times[step.action], {*step.inputs}
            waiting.sort()
            last, at = 0, len(placed)
            for n, (start_s, _, part) in enumerate(waiting, start=1):
                overlaps = part.kind is ir.Reload and start_s < event.end_s
                if start_s <= event.start_s or overlaps or not read.isdisjoint(part.inputs):
                    last = n
            # In front of what the run receives, which is issued with it.
            while at and placed[at - 1].kind is ir.Recv:
                at -= 1
            placed[at:at] = [part for *_, part in waiting[:last]]
            waiting = waiting[last:]
        placed.append(step)
    return [*placed, *(part for *_, part in sorted(waiting))], value_bytes


Started = ir.Message | tuple[int, Slot]
"""A message, or a rank and what it runs."""


def message_order(programs: Sequence[ir.Program], timeline: Timeline) -> tuple[Started, ...]:
    """Return all runs and messages of all ranks in one order, each after what it depends on: a run stands where it starts, a
    message where the run that makes it ends; ties stand as one thread would issue them.

    Args:
        programs: of all ranks, as in one process.
        timeline: of their schedule, simulated.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    times = {(e.rank, a): e for e in timeline.events if e.lane == "compute" for a in (e.action, *e.action.actions)}
    # A rank's time only goes forward: a braid that runs as separate calls sends between them what the timeline makes at its
    # end, and a message must stand behind the run before it all the same.
    now_s = [float("-inf")] * len(programs)
    starts: list[tuple[float, int, Started]] = []
    for n, (k, at) in enumerate(issue_order(programs, timeline)):
        rank, instruction = programs[k].rank, programs[k].instructions[at]
        if isinstance(instruction, ir.Run):
            now_s[k] = max(now_s[k], times[(rank, instruction.action)].start_s)
            starts.append((now_s[k], n, (rank, instruction.action)))
        elif isinstance(instruction, ir.Send):
            now_s[k] = max(now_s[k], times[(rank, instruction.action)].end_s)
            starts.append((now_s[k], n, ir.message_of(rank, instruction)))
    return tuple(node for _, _, node in sorted(starts, key=lambda item: item[:2]))


def place_receives(
    rank: int,
    steps: Sequence[ir.ValueInstruction],
    places: Mapping[Any, int],
    early: int = 0,
    in_turn: Collection[int] = (),
) -> list[ir.ValueInstruction]:
    """Return the steps of ``rank`` with the receives from other processes where ``places`` say.

    Args:
        rank: whose ``steps`` they are, as in one process.
        places: of all runs, and of the messages between processes.
        early: how many runs each receive moves forward from there, past what the rank sends between them, but not past other
            receives.
        in_turn: places of messages that stay.
    """
    unmoved: list[tuple[int, ir.ValueInstruction]] = []
    received: list[tuple[int, ir.ValueInstruction]] = []
    for step in steps:
        place = places.get((rank, step.action) if step.kind is ir.Run else _message(rank, step), -1)
        (received if step.kind is ir.Recv and place >= 0 else unmoved).append((place, step))
    ordered = [(place, at) for at, (place, _) in enumerate(unmoved) if place >= 0]
    runs = [(at, place) for at, (place, step) in enumerate(unmoved) if step.kind is ir.Run]
    posted: dict[int, list[ir.ValueInstruction]] = {}
    last = (0, 0)
    for place, step in sorted(received, key=lambda item: item[0]):
        # The first run or send whose place is later; there is one, as the reader follows every message.
        at = ordered[bisect_left(ordered, (place, 0))][1]
        if early and place not in in_turn:
            k = bisect_left(runs, (at, 0)) - early
            at, place = runs[k] if k >= 0 else (0, 0)
        # In front of receives from this process, too: the sender of such a one may itself wait for this message.
        while at and unmoved[at - 1][1].kind is ir.Recv:
            at -= 1
        # Never in front of a receive with an earlier place: messages keep their one order however early they are posted.
        last = max(last, (at, place))
        posted.setdefault(last[0], []).append(_placed(step, last[1]))
    result: list[ir.ValueInstruction] = []
    for at, (place, step) in enumerate(unmoved):
        result += posted.get(at, ())
        result.append(_placed(step, place) if step.kind is ir.Send and place >= 0 else step)
    return result


def _placed(step: ir.ValueInstruction, place: int) -> ir.ValueInstruction:
    return step._replace(message=(*step.message, place))


def _message(rank: int, step: ir.ValueInstruction) -> Any:
    if not step.message:
        return None
    peer = step.message[0]
    return (rank, peer, step.action) if step.kind is ir.Send else (peer, rank, step.action)


def lower_apart(ranks: Sequence[RankSteps], crossing: Crossing) -> tuple[ir.Program, ...]:
    """Return the programs of all ranks, with messages from process to process in one order; no processes wait for each other in
    a circle.

    A receive that could not be posted early without a deadlock is posted in its turn.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    # Where values lie has no say in the order, so these programs do without slots.
    unordered = [
        ir.Program(rank, tuple([x.kind(x.action, (), (), *x.message) for x in steps]), 0, (), (), (), ())
        for rank, (steps, _) in enumerate(ranks)
    ]
    order = message_order(unordered, crossing.timeline)
    places: dict[Any, int] = {node: n for n, node in enumerate(order) if len(node) == 2 or crossing.crosses(node)}
    in_turn: set[int] = set()
    # Each round puts the last early receive of every circle back in its turn; with all in turn there is no circle, so it ends.
    while True:
        placed = [place_receives(r, steps, places, crossing.early, in_turn) for r, (steps, _) in enumerate(ranks)]
        programs = tuple(ir.assign_slots(r, placed[r], sizes) for r, (_, sizes) in enumerate(ranks))
        waits = waiting_graph(programs, crossing)
        moved = {
            waits.messages[message]: places[message]
            for p in programs
            for i in p.instructions
            if isinstance(i, ir.Recv) and 0 <= i.place < places[message := ir.message_of(p.rank, i)]
        }
        blamed = {
            max(indices)
            for circle in (find_circles(waits.by_node()) if moved and waits.has_circle() else ())
            if (indices := [moved[node] for node in circle if node in moved])
        }
        if not blamed:
            ir.check_programs(programs)
            _refuse_circles(waits, crossing)
            return programs
        in_turn |= blamed
