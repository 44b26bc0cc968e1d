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
``device``     those of a rank to and from other processes and its reductions, in the order of dispatch: NCCL promises no
               progress to two operations of a device at a time
``gate``       a receive waits for the runs of its rank that were handed out before it: it is given memory that they may still
               use (XLA's allocator on GPUs)
``fifo``       the thread waits for each instruction to end before it goes on: the strictest, which covers all others, and a
               transport whose sends or receives block
=============  ======================================================================================================

Not modelled: transports that hold up one message for want of memory, and collectives. On a grid of processes
(:mod:`jaxpipe.runtime.grid`) these join one instruction in all columns of a row, and messages stay within a column. Where
columns have the same programs and issue them alike, as they agree before a run, each edge of the grid's graph lies over one of
a column's, and so would a circle.

The order of messages. Ranks of one process hand arrays over, and a receive stands right before its first reader. Between
processes that would not do: two ranks that both send before they receive wait for each other, where a message ends only when
both sides have started it. If all processes start all messages in one order in which each comes after those that it depends on,
they never do: of the messages that have not ended, the first is the next one of both its processes. So receives move forward to
the place that this order gives them. From there they may move further, to be posted early, where the transport allows it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from jaxpipe.errors import ProgramError
from jaxpipe.program import ir
from jaxpipe.program.traffic import (
    FREE,
    RECV,
    REDUCE,
    RUN,
    SEND,
    SYNC,
    Ints,
    IssueOrder,
    Messages,
    Traffic,
    latest_in_rank,
    traffic_of,
)
from jaxpipe.schedule import Action, Event, Slot, Timeline


def issue_order(programs: Sequence[ir.Program], timeline: Timeline) -> tuple[tuple[int, int], ...]:
    """Return (position in ``programs``, instruction) pairs: each program in its own order, receives after their sends.

    Among the ranks that can go on, the one whose next compute action starts first in ``timeline`` goes. Programs may be a
    subset of the ranks, those of this process. Messages from other processes are not waited for; messages from and to them are
    started in the order of their places.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    traffic = _traffic_of(programs, timeline)
    order = IssueOrder(traffic).of(range(len(programs)))
    positions = traffic.position[order]
    return tuple(zip(positions.tolist(), (order - traffic.first[positions]).tolist(), strict=True))


def _traffic_of(programs: Sequence[ir.Program], timeline: Timeline) -> Traffic:
    return traffic_of(programs, lambda rank: _times(rank, timeline))


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


Rule = Literal["directed", "pair", "four", "device", "gate", "fifo"]
Lanes = tuple[Rule, ...]
"""The rules by which a transport makes messages wait, all of them at once: see the table of the module."""

TAGGED: Lanes = ()
"""Messages are matched by number and wait for nothing but their makers (JAX's transfer server)."""
NATIVE: Lanes = ("pair", "four", "device", "gate")
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

    def crossing_messages(self, messages: Messages) -> NDArray[np.bool_]:
        """Return, by message, whether it crosses."""
        process_of = np.array(self.process_of)
        different: NDArray[np.bool_] = process_of[messages.src] != process_of[messages.dst]
        return different


Node = int
"""A step that runs (numbered over all ranks), one that a thread hands out, or a message."""
Graph = Mapping[Node, Mapping[Node, int]]
"""The nodes that wait for each node, each with the process in which it does so."""


@dataclass(frozen=True, slots=True)
class WaitingGraph:
    """Hold who waits for whom, edge by edge: node ``after`` for node ``before``, in ``process``. ``found_at``: where it is
    found when programs are read as they are issued. ``messages``: their nodes are numbered from ``first_message`` on."""

    before: Ints
    after: Ints
    process: Ints
    found_at: Ints
    first_message: Node
    messages: Messages

    def has_circle(self) -> bool:
        """Return whether there is a circle, and so a deadlock."""
        size = self.first_message + len(self.messages.src)
        matrix = coo_array((np.ones(len(self.before), np.bool_), (self.before, self.after)), (size, size))
        # Every node on a circle is in a component with another one, but for those that wait for themselves.
        return bool((self.before == self.after).any()) or connected_components(matrix, connection="strong")[0] < size

    def by_node(self) -> Graph:
        """Return the graph as a mapping, in the order in which edges are found."""
        graph: dict[Node, dict[Node, int]] = {}
        order = np.argsort(self.found_at, kind="stable")
        for before, after, process in zip(
            *(x[order].tolist() for x in (self.before, self.after, self.process)), strict=True
        ):
            graph.setdefault(before, {}).setdefault(after, process)
        return graph


def check_transfers(programs: Sequence[ir.Program], crossing: Crossing) -> None:
    """Check that the programs of all ranks, in the order in which each process issues its own, always come to an end.

    Raises:
        ProgramError: as :func:`~jaxpipe.program.ir.check_programs`; or messages can wait for each other for ever, with the
            shortest circle.
    """
    ir.check_programs(programs)
    _refuse_circles(_graph_of(programs, crossing), crossing)


def _graph_of(programs: Sequence[ir.Program], crossing: Crossing) -> WaitingGraph:
    return waiting_graph(
        _traffic_of(programs, crossing.timeline), crossing, _copies_awaited(programs, crossing.timeline)
    )


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
            f"{_in_words(graph, circle, waits, crossing)}; start them in one order in all processes (early=0)"
        )


def _copies_awaited(programs: Sequence[ir.Program], timeline: Timeline) -> Sequence[tuple[int, int]]:
    """Return (offload, instruction) pairs, numbered over all programs: what the thread waits for before it goes on."""
    pairs: list[tuple[int, int]] = []
    first = 0
    for program in programs:
        if waits := holds(program, timeline):
            copies: dict[Slot, int] = {}
            for k, instruction in enumerate(program.instructions, start=first):
                pairs += [(copies[action], k) for action, _ in waits.get(k - first, ())]
                if isinstance(instruction, ir.Offload):
                    copies[instruction.action] = k
        first += len(program.instructions)
    return pairs


def waiting_graph(traffic: Traffic, crossing: Crossing, awaited: Sequence[tuple[int, int]] = ()) -> WaitingGraph:
    """Return the graph of what waits for what; the module's docstring lists its edges. ``awaited``: pairs of a copy to the host
    and a step before which the thread waits for it."""
    lanes, process_of = crossing.lanes, np.array(crossing.process_of)
    positions: dict[int, list[int]] = {}
    for k, local_rank in enumerate(traffic.ranks):
        positions.setdefault(crossing.process_of[local_rank], []).append(k)
    issue = IssueOrder(traffic)
    steps = np.concatenate([issue.of(local) for local in positions.values()])
    steps = steps[traffic.kind[steps] != FREE]
    # Everything below is by step, in the order in which programs hold them; ``at`` is the place in the order of issue.
    total, kind, message = len(traffic.kind), traffic.kind, traffic.message
    at = np.full(total, -1, np.int64)
    at[steps] = np.arange(len(steps))
    numbers, rank = np.arange(total), np.array(traffic.ranks)[traffic.position]
    process = process_of[rank]
    is_message, does = kind >= SEND, (kind < SEND) & (kind != FREE)
    crosses = is_message & np.append(crossing.crossing_messages(traffic.messages), False)[message]
    # A copy within a process is the sender's alone: the receive only looks up what has been dispatched.
    started = (kind == SEND) | crosses
    # A step is two nodes: the thread hands it out, and it runs. The thread goes on to the next as soon as it has handed one
    # out, unless the transport blocks it (``fifo``) or it is a sync. A message is one node for both ends: it runs when both
    # have started it, the stricter assumption about any transport.
    node, turn = np.where(is_message, 2 * total + message, numbers), numbers + total
    blocks = (kind == SYNC) | ((does | started) & ("fifo" in lanes))
    edges: list[tuple[Ints, Ints, Ints, int]] = []

    def edge(before: Ints, after: Ints, step: Ints, nth: int) -> None:
        """Add edges of each ``step``, its ``nth``."""
        edges.append((before.astype(np.int32), after.astype(np.int32), step.astype(np.int32), nth))

    def chain(step: Ints, key: Ints, nth: int) -> None:
        """Let the nodes of ``step``, in order of issue, wait for the one before with the same ``key``, in each process."""
        order = np.lexsort((at[step], key[step], process[step]))
        step = step[order]
        before, after = step[:-1], step[1:]
        alike = (key[before] == key[after]) & (process[before] == process[after])
        edge(node[before[alike]], node[after[alike]], after[alike], nth)

    before, after = steps[:-1], steps[1:]
    same = process[before] == process[after]
    edge(np.where(blocks, node, turn)[before[same]], turn[after[same]], after[same], 0)
    copies, waiting = np.array(awaited, np.int64).reshape(-1, 2).T
    edge(copies, turn[waiting], waiting, 1)
    last = np.append(-1, np.maximum.accumulate(np.where(does, numbers, -1)))[:-1]
    behind = (does | (kind == SEND) | (crosses & ("gate" in lanes))) & (last >= traffic.first[traffic.position])
    edge(last[behind & is_message], node[behind & is_message], numbers[behind & is_message], 2)
    edge(turn[does | started], node[does | started], numbers[does | started], 3)
    edge(last[behind & does], node[behind & does], numbers[behind & does], 4)
    if "four" in lanes:
        count = np.cumsum(started)
        of_rank = count - np.append(0, count)[traffic.first[traffic.position]]
        chain(np.flatnonzero(started), rank * STREAMS + of_rank % STREAMS, 4)
    src, dst = (np.append(process_of[ends], 0)[message] for ends in (traffic.messages.src, traffic.messages.dst))
    if "directed" in lanes or "four" in lanes:
        chain(np.flatnonzero(crosses), src * len(process_of) + dst, 5)
    if "pair" in lanes:
        chain(np.flatnonzero(crosses), np.minimum(src, dst) * len(process_of) + np.maximum(src, dst), 6)
    if "device" in lanes:
        chain(np.flatnonzero(crosses | (kind == REDUCE)), rank, 7)
    # JAX blocks the thread that dispatches one run more than this to a device.
    runs = np.flatnonzero((kind == RUN) | (kind == REDUCE))
    late = runs[IN_FLIGHT:]
    early = runs[: len(late)]
    same = rank[early] == rank[late]
    edge(early[same], turn[late[same]], late[same], 5)
    readers, read = traffic.reads
    edge(2 * total + read, node[readers], readers, 7)
    step = np.concatenate([x[2] for x in edges])
    return WaitingGraph(
        before=np.concatenate([x[0] for x in edges]),
        after=np.concatenate([x[1] for x in edges]),
        process=process[step],
        found_at=at[step] * 8 + np.repeat([x[3] for x in edges], [len(x[0]) for x in edges]),
        first_message=2 * total,
        messages=traffic.messages,
    )


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


def _in_words(graph: Graph, circle: list[Node], waits: WaitingGraph, crossing: Crossing) -> str:
    """Say who waits to send or receive what, once around the circle. Only messages that hold up one process on behalf of
    another are named: where one is waited for and what it waits for are in two processes."""
    edges = [graph[a][b] for a, b in pairwise([*circle, circle[0]])]
    held: list[tuple[int, int, str]] = []
    for node, behind, before in reversed(list(zip(circle, [edges[-1], *edges], edges, strict=False))):
        if node >= waits.first_message and behind != before:
            src, dst, action = waits.messages.name(node - waits.first_message)
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


def message_order(traffic: Traffic) -> Ints:
    """Return the place of each run and send in one order of all ranks, each after what it depends on (−1 for other steps): a
    run stands where it starts, a message where the run that makes it ends; ties stand as one thread would issue them.

    Args:
        traffic: of all ranks, as in one process.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    runs, sends = traffic.kind == RUN, traffic.kind == SEND
    # A rank's time only goes forward: a braid that runs as separate calls sends between them what the timeline makes at its
    # end, and a message must stand behind the run before it all the same.
    now_s = np.where(runs, traffic.start_s, np.where(sends, traffic.end_s, -np.inf))
    now_s = latest_in_rank(traffic, now_s)
    order = IssueOrder(traffic).of(range(len(traffic.ranks)))
    order = order[(runs | sends)[order]]
    order = order[np.argsort(now_s[order], kind="stable")]
    places = np.full(len(traffic.kind), -1)
    places[order] = np.arange(len(order))
    return places


def place_receives(
    traffic: Traffic, places: Ints, crosses: NDArray[np.bool_], early: int = 0, in_turn: Collection[int] = ()
) -> tuple[Ints, Traffic]:
    """Return the steps with the receives from other processes where ``places`` say, and by step which one it was.

    Args:
        traffic: as in one process.
        places: of all runs and sends (:func:`message_order`).
        crosses: by message, whether it goes from process to process.
        early: how many runs each receive moves forward from there, past what the rank sends between them, but not past other
            receives.
        in_turn: places of messages that stay.
    """
    kind, rank, size = traffic.kind, traffic.position, len(traffic.kind)
    place = np.where(kind == RUN, places, np.append(_places_of_messages(traffic, places, crosses), -1)[traffic.message])
    is_received = (kind == RECV) & (place >= 0)
    unmoved, received = np.flatnonzero(~is_received), np.flatnonzero(is_received)
    # What follows is by position among the unmoved steps.
    first = np.searchsorted(unmoved, traffic.first)
    ordered = np.flatnonzero(place[unmoved] >= 0)
    runs = np.flatnonzero(kind[unmoved] == RUN)
    received = received[np.lexsort((place[received], rank[received]))]
    keys = rank * (size + 1) + place
    # The first run or send whose place is later; there is one, as the reader follows every message.
    at = ordered[np.searchsorted(keys[unmoved[ordered]], keys[received])]
    post = place[received]
    if early:
        moves = ~np.isin(post, [*in_turn])
        k = np.searchsorted(runs, at) - early
        inside = k >= np.searchsorted(runs, first)[rank[received]]
        run = runs[np.maximum(k, 0)] if len(runs) else k
        at = np.where(moves, np.where(inside, run, first[rank[received]]), at)
        post = np.where(moves, np.where(inside, place[unmoved[run]], 0), post)
    # In front of receives from this process, too: the sender of such a one may itself wait for this message.
    others = np.where(kind[unmoved] == RECV, 0, np.arange(len(unmoved)) + 1)
    at = np.maximum(np.append(0, np.maximum.accumulate(others))[at], first[rank[received]])
    # Never in front of a receive with an earlier place: messages keep their one order however early they are posted.
    at, post = np.divmod(np.maximum.accumulate(at * (size + 1) + post), size + 1)
    order = np.argsort(np.concatenate([2 * at, 2 * np.arange(len(unmoved)) + 1]), kind="stable")
    order = np.concatenate([received, unmoved])[order]
    place[kind == RUN] = -1
    place[received] = post
    return order, traffic.permuted(order, place)


def _places_of_messages(traffic: Traffic, places: Ints, crosses: NDArray[np.bool_]) -> Ints:
    """Return, by message, the place of its send; −1 for those within a process."""
    sends = np.flatnonzero(traffic.kind == SEND)
    place_of = np.full(len(crosses), -1)
    place_of[traffic.message[sends]] = places[sends]
    return np.where(crosses, place_of, -1)


def lower_apart(
    ranks: Mapping[int, RankSteps], traffic: Traffic | None, crossing: Crossing
) -> tuple[tuple[ir.Program, ...], Traffic]:
    """Return the programs of ``ranks``, and the steps of all, with messages from process to process in one order; no processes
    wait for each other in a circle.

    A receive that could not be posted early without a deadlock is posted in its turn.

    Args:
        ranks: the steps of some ranks, as in one process; of all, where ``traffic`` is None.
        traffic: of all ranks.

    Raises:
        ProgramError: ranks wait for each other, for values that a checked schedule does not know of.
    """
    complete = traffic is None
    if traffic is None:
        # Where values lie has no say in the order, so these programs do without slots.
        unordered = [
            ir.Program(rank, tuple([x.kind(x.action, (), (), *x.message) for x in steps]), 0, (), (), (), ())
            for rank, (steps, _) in ranks.items()
        ]
        traffic = _traffic_of(unordered, crossing.timeline)
    places, crosses = message_order(traffic), crossing.crossing_messages(traffic.messages)
    place_of = _places_of_messages(traffic, places, crosses)
    in_turn: set[int] = set()
    # Each round puts the last early receive of every circle back in its turn; with all in turn there is no circle, so it ends.
    while True:
        order, placed = place_receives(traffic, places, crosses, crossing.early, in_turn)
        programs = _assigned(ranks, traffic, order, placed) if complete else ()
        # Which copies to the host the thread waits for follows from slots.
        waits = _graph_of(programs, crossing) if complete else waiting_graph(placed, crossing)
        has_circle = waits.has_circle()
        blamed: set[int] = set()
        if has_circle:
            receives = np.flatnonzero((placed.kind == RECV) & (placed.place >= 0))
            receives = receives[placed.place[receives] < place_of[placed.message[receives]]]
            names = {placed.messages.name(k): int(place_of[k]) for k in placed.message[receives].tolist()}
            for circle in find_circles(waits.by_node()) if names else ():
                nodes = [waits.messages.name(n - waits.first_message) for n in circle if n >= waits.first_message]
                if indices := [names[name] for name in nodes if name in names]:
                    blamed.add(max(indices))
        if not blamed:
            programs = programs or _assigned(ranks, traffic, order, placed)
            ir.check_programs(programs, complete=len(ranks) == len(crossing.process_of))
            if has_circle:
                _refuse_circles(waits, crossing)
            return programs, placed
        in_turn |= blamed


def _assigned(ranks: Mapping[int, RankSteps], traffic: Traffic, order: Ints, placed: Traffic) -> tuple[ir.Program, ...]:
    """Return the programs of ``ranks``, whose steps, those of ``traffic``, stand in ``order``."""
    programs = []
    for k, rank in enumerate(traffic.ranks):
        if rank not in ranks:
            continue
        (steps, value_bytes), (first, end) = ranks[rank], traffic.first[k : k + 2].tolist()
        ordered = [
            steps[at]._replace(message=(*steps[at].message, place)) if place >= 0 else steps[at]
            for at, place in zip((order[first:end] - first).tolist(), placed.place[first:end].tolist(), strict=True)
        ]
        programs.append(ir.assign_slots(rank, ordered, value_bytes))
    return tuple(programs)
