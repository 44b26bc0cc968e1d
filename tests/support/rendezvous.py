"""Processes that exchange messages: simulated step by step, and as real threads. Shares no code with the checker.

:func:`left_over` plays programs instruction by instruction under the rules of a transport, with queues for what is on its way:
what never ends is deadlocked. :class:`Meeting` is a transport for threads in which each process has one FIFO and both ends of a
message block until the other comes; it notices when all are blocked.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxpipe.program.ir import Free, Message, Program, Recv, Run, Send, Sync, reads, writes

IN_FLIGHT, STREAMS = 32, 4
Orders = Mapping[int, Sequence[tuple[int, int]]]
"""(rank, instruction) for each process, in the order in which its thread issues them."""
Joint = Mapping[tuple[int, int], tuple[Any, int]]
"""The collective of each (rank, instruction) that is part of one, and how many ranks take part: it ends when all have come."""


@dataclass(eq=False)
class _Job:
    """A function or a message of one rank, once its thread has handed it out."""

    name: Any
    needs: list[Any]
    queues: list[deque[Any]]
    letter: _Mail | None = None
    done: bool = False

    def at_front(self) -> bool:
        return all(queue[0] is self for queue in self.queues)


@dataclass
class _Mail:
    """A message between processes, or a collective: what each of its sides has started."""

    size: int = 2
    sides: list[_Job] = field(default_factory=list)

    def is_complete(self) -> bool:
        return len(self.sides) == self.size


def left_over(
    programs: Sequence[Program],
    process_of: Sequence[int],
    rules: Sequence[str],
    orders: Orders,
    joint: Joint = MappingProxyType({}),
) -> list[str]:
    """Return what never ends; empty if all does. Two rules beside those of messages: ``blocks``, a collective blocks the thread
    that dispatches it, as small ones do on CPUs; ``device``, messages and collectives of a rank run in order of dispatch, as
    NCCL wants it."""
    by_rank = {p.rank: p for p in programs}
    mail: dict[Any, _Mail] = {}
    jobs: list[_Job] = []
    queues: dict[Any, deque[Any]] = {}
    arrays: dict[tuple[int, int], Any] = {}  # by rank and slot: the job, or the mail, that fills it
    started: dict[int, int] = {}
    threads = {process: deque(order) for process, order in orders.items()}
    blocked: dict[int, list[_Job]] = {process: [] for process in orders}  # what the thread waits for before it goes on

    def queue(*key: Any) -> deque[Any]:
        return queues.setdefault(key, deque())

    def has_ended(thing: Any) -> bool:
        return thing.is_complete() and all(s.done for s in thing.sides) if isinstance(thing, _Mail) else thing.done

    def hand_out(process: int, rank: int, at: int) -> bool:
        """False if the thread has to wait."""
        instruction = by_rank[rank].instructions[at]
        compute = queue("compute", rank)
        if isinstance(instruction, Free):
            return True
        if isinstance(instruction, Run) and sum(isinstance(j.name.get("run"), Run) for j in compute) >= IN_FLIGHT:
            return False
        inputs = [arrays[(rank, s)] for s in reads(instruction) if (rank, s) in arrays]
        job = _Job({"rank": rank, "run": instruction}, inputs, [])
        if isinstance(instruction, Send | Recv):
            peer = instruction.dst if isinstance(instruction, Send) else instruction.src
            src, dst = (rank, peer) if isinstance(instruction, Send) else (peer, rank)
            letter = mail.setdefault((src, dst, instruction.action), _Mail())
            for slot in writes(instruction):
                arrays[(rank, slot)] = letter
            crosses = process_of[src] != process_of[dst]
            if not crosses and isinstance(instruction, Recv):
                return True
            if isinstance(instruction, Send) or "gate" in rules:
                job.needs += [compute[-1]] if compute else []
            letter.sides += [job] if crosses else [job, job]
            job.letter = letter
            if crosses or "four" in rules:
                started[rank] = started.get(rank, 0) + 1
            if "four" in rules:
                job.queues.append(queue("stream", rank, started[rank] % STREAMS))
            if crosses and ("directed" in rules or "four" in rules):
                job.queues.append(queue("directed", process, process_of[src], process_of[dst]))
            if crosses and "pair" in rules:
                job.queues.append(queue("pair", process, process_of[peer]))
            if crosses and "device" in rules:
                job.queues.append(queue("device", rank))
        else:
            job.queues.append(compute)
            if (rank, at) in joint:
                name, size = joint[rank, at]
                job.letter = mail.setdefault(name, _Mail(size))
                job.letter.sides.append(job)
                if "device" in rules:
                    job.queues.append(queue("device", rank))
            for slot in writes(instruction):
                arrays[(rank, slot)] = job
        for q in job.queues:
            q.append(job)
        jobs.append(job)
        if "fifo" in rules or isinstance(instruction, Sync) or ("blocks" in rules and (rank, at) in joint):
            blocked[process] = [job]
        return True

    def side_ready(job: _Job) -> bool:
        return job.at_front() and all(has_ended(x) for x in job.needs)

    def end(job: _Job) -> None:
        job.done = True
        for q in job.queues:
            q.popleft()

    progress = True
    while progress:
        progress = False
        for process, todo in threads.items():
            while todo and all(j.done for j in blocked[process]) and hand_out(process, *todo[0]):
                todo.popleft()
                progress = True
        for job in jobs:
            sides = [job] if job.letter is None else job.letter.sides
            if not job.done and (job.letter is None or job.letter.is_complete()) and all(map(side_ready, sides)):
                for side in {id(s): s for s in sides}.values():
                    end(side)
                progress = True
        jobs[:] = [j for j in jobs if not j.done]
    rest = [str(j.name["run"]) for j in jobs]
    return rest + [f"process {process} stands at {todo[0]}" for process, todo in threads.items() if todo]


class DeadlockError(Exception):
    """All processes wait for each other."""


class Meeting:
    """A meeting point of processes, a thread each: ``meet`` returns when both ends of a message have come to it."""

    def __init__(self, processes: int) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, Message] = {}
        self._busy = processes
        self._met: list[Message] = []
        self.stuck: dict[int, Message] = {}

    def meet(self, process: int, message: Message) -> None:
        with self._changed:
            if message in self._waiting.values():
                other = next(k for k, m in self._waiting.items() if m == message)
                del self._waiting[other]
                self._busy += 1
                self._changed.notify_all()
                return
            self._waiting[process] = message
            self._leave()
            self._changed.wait_for(lambda: process not in self._waiting or bool(self.stuck))
            if self.stuck:
                raise DeadlockError(f"the processes wait for each other: {self.stuck}")

    def end(self) -> None:
        """A process has finished."""
        with self._changed:
            self._leave()

    def _leave(self) -> None:
        self._busy -= 1
        if not self._busy and self._waiting:
            self.stuck = dict(self._waiting)
            self._changed.notify_all()
