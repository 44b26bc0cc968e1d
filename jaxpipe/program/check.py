"""The one checker of programs: slots hold what is read, messages pair up, nothing leaks.

Lowering runs it on everything it makes. It collects all problems before raising.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jaxpipe.errors import ProgramError
from jaxpipe.program.ir import Offload, Program, Recv, Reload, Run, Send, Sync, drops, message_of, reads, writes


def check_programs(programs: Sequence[Program]) -> None:
    """Check the programs of all ranks together.

    Raises:
        ProgramError: a slot is read or dropped while empty, filled while full, out of range, or still full at the end without
            being a result; an array on the host is computed on, sent or offloaded, or one on the device is loaded or awaited
            as a copy; or a message is sent and not received, received and not sent, of other shapes, or sent twice.
    """
    problems = [p for program in programs for p in _slot_problems(program)]
    problems += _message_problems(programs)
    if problems:
        raise ProgramError("; ".join(problems))


def _slot_problems(program: Program) -> Iterator[str]:
    full = {slot for _, slot in program.bound}
    on_host: set[int] = set()
    for k, instruction in enumerate(program.instructions):
        where = f"rank {program.rank}, instruction {k} ({instruction})"
        read, written, dropped = reads(instruction), writes(instruction), drops(instruction)
        for slot in (*read, *written, *dropped):
            if not 0 <= slot < program.num_slots:
                yield f"{where}: slot {slot} is outside 0..{program.num_slots - 1}"
        yield from (f"{where}: reads slot {s}, which is empty" for s in read if s not in full)
        wants_host = isinstance(instruction, Reload | Sync)
        for slot in full.intersection(read):
            if (slot in on_host) is not wants_host:
                yield f"{where}: reads slot {slot}, which is on the {'device' if wants_host else 'host'}"
        replaced = set(read) if isinstance(instruction, Run) else set()  # a donated accumulator is written in place
        yield from (f"{where}: fills slot {s}, which is full" for s in written if s in full and s not in replaced)
        full.update(written)
        (on_host.update if isinstance(instruction, Offload) else on_host.difference_update)(written)
        yield from (f"{where}: drops slot {s}, which is empty" for s in dropped if s not in full)
        full.difference_update(dropped)
    result_slots = {slot for _, slot in program.results} | {slot for v, slot in program.bound if v.kind == "param"}
    if full - result_slots:
        yield f"rank {program.rank}: slots {sorted(full - result_slots)} are still full at the end"
    if result_slots - full:
        yield f"rank {program.rank}: result slots {sorted(result_slots - full)} are empty at the end"


def _message_problems(programs: Sequence[Program]) -> Iterator[str]:
    ends = [(p.rank, i) for p in programs for i in p.instructions if isinstance(i, Send | Recv)]
    sent = Counter((message_of(r, i), len(i.inputs), _shapes(i)) for r, i in ends if isinstance(i, Send))
    received = Counter((message_of(r, i), len(i.outputs), _shapes(i)) for r, i in ends if isinstance(i, Recv))
    for (src, dst, action), n, shapes in sorted((sent - received).keys(), key=str):
        yield f"rank {src} sends {n} arrays of {action}{_text(shapes)} to rank {dst}, which does not receive them"
    for (src, dst, action), n, shapes in sorted((received - sent).keys(), key=str):
        yield f"rank {dst} receives {n} arrays of {action}{_text(shapes)} from rank {src}, which does not send them"
    yield from (
        f"rank {src} sends {action} to rank {dst} {n} times" for ((src, dst, action), *_), n in sent.items() if n > 1
    )


def _shapes(transfer: Send | Recv) -> tuple[Any, ...]:
    return tuple((a.shape, a.dtype) for a in transfer.avals)


def _text(shapes: tuple[Any, ...]) -> str:
    return "".join(f" {dtype}{list(shape)}" for shape, dtype in shapes)
