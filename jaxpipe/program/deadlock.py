"""Proof, before anything runs, that processes which exchange messages never wait for each other for ever.

A schedule is free of deadlock if whoever receives has a place for what arrives. Between processes that may not be so: a message
may be a rendezvous, which ends when both sides have started it, and what a side starts on one stream, communicator or thread
runs in that order. So a graph is built of everything that waits: the thread of each process handing out one instruction after
another, the instructions, and the messages, each of them one node for both of its ends. A circle in it is a deadlock.

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
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from jaxpipe.errors import ProgramError
from jaxpipe.program.check import check_programs
from jaxpipe.program.ir import Free, Message, Offload, Program, Recv, Run, Send, Sync, message_of, reads, writes
from jaxpipe.program.order import holds, issue_order
from jaxpipe.schedule import Action, Timeline

Rule = Literal["directed", "pair", "four", "gate", "fifo"]
Lanes = tuple[Rule, ...]
"""What a transport makes messages wait for, all of it at once: see the table of the module."""

TAGGED: Lanes = ()
"""Messages are matched by number and wait for nothing but their makers (JAX's transfer server)."""
NATIVE: Lanes = ("pair", "four", "gate")
"""``jax.device_put`` to devices of another process, on GPUs."""
STRICT: Lanes = ("fifo",)
"""Whatever a transport may do."""

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

    def crosses(self, message: Message) -> bool:
        return self.process_of[message[0]] != self.process_of[message[1]]


Node = tuple[object, ...]
"""``("hand out", process, n)``, ``("do", rank, instruction)``, or a message."""
Graph = Mapping[Node, Mapping[Node, int]]
"""By node, those that wait for it, each with the process in which it does so."""


def check_transfers(programs: Sequence[Program], crossing: Crossing) -> None:
    """Check that the programs of all ranks, in the order in which each process issues its own, always come to an end.

    Raises:
        ProgramError: as :func:`~jaxpipe.program.check.check_programs`; or messages can wait for each other for ever, with the
            shortest circle.
    """
    check_programs(programs)
    graph = waiting_graph(programs, crossing)
    circles = sorted(find_circles(graph), key=len)
    if circles:
        circle = circles[0]
        for node in dict.fromkeys(node for nodes in circles for node in nodes):
            circle = _shorter(graph, node, circle)
        rules = ", ".join(crossing.lanes) or "tagged"
        raise ProgramError(
            f"messages between processes can wait for each other for ever (lanes: {rules}): "
            f"{_in_words(graph, circle, crossing)}; start them in one order in all processes (early=0)"
        )


def waiting_graph(programs: Sequence[Program], crossing: Crossing) -> Graph:
    """Return the graph of what waits for what; the module's docstring lists its edges."""
    graph: dict[Node, dict[Node, int]] = {}
    process_of, lanes = crossing.process_of, crossing.lanes

    def edge(before: Node | None, after: Node, process: int) -> None:
        if before is not None:
            graph.setdefault(before, {}).setdefault(after, process)

    for process in dict.fromkeys(process_of):
        local_programs = [p for p in programs if process_of[p.rank] == process]
        thread: Node | None = None
        last: dict[Node, Node] = {}  # of a lane, or of what a rank does
        runs: dict[int, list[Node]] = defaultdict(list)
        started: dict[int, int] = defaultdict(int)
        held: dict[tuple[int, int], Node] = {}  # by rank and slot, the message that it holds
        ended = {(p.rank, k): waits for p in local_programs for k, waits in holds(p, crossing.timeline).items()}
        copies: dict[tuple[int, Action], Node] = {}
        for n, (k, at) in enumerate(issue_order(local_programs, crossing.timeline)):
            rank, instruction = local_programs[k].rank, local_programs[k].instructions[at]
            if isinstance(instruction, Free):
                continue
            turn: Node = ("hand out", process, n)
            edge(thread, turn, process)
            for action, _ in ended.get((rank, at), ()):
                edge(copies[(rank, action)], turn, process)
            thread = turn
            node: Node = ("do", rank, at)
            if isinstance(instruction, Send | Recv):
                node = message = message_of(rank, instruction)
                crosses, sends = crossing.crosses(message), isinstance(instruction, Send)
                if sends or (crosses and "gate" in lanes):
                    edge(last.get(("do", rank)), node, process)
                if sends or crosses:  # a copy within a process is the sender's alone
                    edge(turn, node, process)
                    started[rank] += 1
                    for lane in _lanes(message, rank, started[rank], crossing) if crosses or "four" in lanes else ():
                        edge(last.get(lane), node, process)
                        last[lane] = node
                    if "fifo" in lanes:
                        thread = node
            else:
                edge(turn, node, process)
                edge(last.get(("do", rank)), node, process)
                last[("do", rank)] = node
                if isinstance(instruction, Offload):
                    copies[(rank, instruction.action)] = node
                if isinstance(instruction, Run):
                    runs[rank].append(node)
                    if len(runs[rank]) > IN_FLIGHT:
                        edge(runs[rank][-1 - IN_FLIGHT], turn, process)
                if isinstance(instruction, Sync) or "fifo" in lanes:
                    thread = node
            for slot in reads(instruction):
                edge(held.get((rank, slot)), node, process)
            for slot in writes(instruction):
                held.pop((rank, slot), None)
                if isinstance(instruction, Recv):
                    held[(rank, slot)] = node
    return graph


def _lanes(message: Message, rank: int, nth: int, crossing: Crossing) -> Iterator[Node]:
    """The lanes on which ``rank`` starts a message, its ``nth``."""
    if "four" in crossing.lanes:
        yield "four", rank, nth % STREAMS
    if crossing.crosses(message):
        src, dst = (crossing.process_of[r] for r in message[:2])
        if "directed" in crossing.lanes or "four" in crossing.lanes:
            yield "directed", src, dst
        if "pair" in crossing.lanes:
            yield "pair", min(src, dst), max(src, dst)


def find_circles(graph: Graph) -> Iterator[list[Node]]:
    """Circles, one for each edge by which a depth-first walk comes back to where it came from; none if there is none."""
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
    """The shortest circle through ``start``, if it is shorter than ``circle``; else that."""
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


def _in_words(graph: Graph, circle: list[Node], crossing: Crossing) -> str:
    """Who waits to send or receive what, once around the circle. Only messages that hold up one process on behalf of another
    are told: where one is waited for and what it waits for are in two processes."""
    edges = [graph[a][b] for a, b in pairwise([*circle, circle[0]])]
    held: list[tuple[int, int, str]] = []
    for node, behind, before in reversed(list(zip(circle, [edges[-1], *edges], edges, strict=False))):
        if len(node) == 3 and isinstance(node[0], int) and behind != before:
            src, dst, action = node
            assert isinstance(src, int) and isinstance(dst, int)
            sends = crossing.process_of[src] == before
            held.append((src, dst, f"send {action} to") if sends else (dst, src, f"receive {action} from"))
    first = held.index(min(held))
    words, peer = "", -1
    for rank, other, what in held[first:] + held[:first]:
        who = f"rank {rank}" if not words else ", which" if rank == peer else f", in whose process rank {rank}"
        words += f"{who} waits to {what} rank {other}"
        peer = other
    return words
