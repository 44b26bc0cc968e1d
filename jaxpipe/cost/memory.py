"""Predicts how many bytes each rank holds at every instruction, and of what kind: the peak of a step.

The programs of all ranks are walked in the order in which they are dispatched (:func:`jaxpipe.program.order.issue_order`),
with the buffers that the runtime allocates: a result that is an argument handed on shares its buffer, an accumulator is
updated in place, and a message lives on the receiver from the moment it is sent (that is when the in-process transport
allocates it). A message to another process lives there from its receive on, and on the sender until it has certainly arrived
(:func:`jaxpipe.program.order.messages_arrived`). XLA's workspace of the function that runs
(:mod:`jaxpipe.stage.functions`) counts while it runs.

What is counted as what:

==============  ======================================================================================================
parameters      buffers that stage functions read, all of the rank's stages
gradients       accumulators, in float32 at least; of reduced ones what is left of them and beside them
masters         copies of the parameters that the update works on, where the compute dtype is a smaller one
optimizer       optimizer state
data            batch arrays and PRNG keys of all microbatches: they are placed before a step and stay until its end
residuals       what F saved for B and W
w-residuals     what B saved for W
boundaries      x and dy on the rank that reads them (x stays for the backward pass where that reads it), y and dx until sent
communication   x and dy that were sent and that the receiver has not taken yet
losses          loss sums, and a scalar per action that the runtime waits on
user values     what custom instructions write for themselves and for the caller
temporaries     workspace of the function that runs
code            compiled functions (0 on backends that do not say)
padding         what the allocator of a GPU adds to buffers (:class:`Chunks`)
in flight       what was received and dropped, and a recorded step on GPUs may still hold: it waits for it
==============  ======================================================================================================

Offloaded residuals give their device bytes back at once, or, given a timeline, before the first function or reload that starts
in it when the copy to the host has ended: that is what the runtime waits for (:func:`jaxpipe.program.order.holds`). A sync of
that copy, and its own reload, end it too (:func:`~jaxpipe.program.order.offloads_ended`); a reload takes the bytes back when it
is issued.

:func:`passing_bytes` and :func:`workspace_bytes` are what a cost profile counts while a function runs, for the bound of the
simulator (:mod:`jaxpipe.cost.profile`).

The recorder waits for what was received, and so keeps it, while the host runs ahead of a GPU by at most
:data:`~jaxpipe.program.order.IN_FLIGHT` computations: this bound counts in every step, as training records some.

Not modelled: the source of a message within a process while the copy is under way, what is left of earlier steps between
free chunks, what libraries allocate for themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from jaxpipe.program.ir import (
    Free,
    Instruction,
    Message,
    Offload,
    Program,
    Recv,
    Reduce,
    Reload,
    Run,
    Send,
    Sync,
    message_of,
)
from jaxpipe.program.order import IN_FLIGHT, messages_arrived, offloads_ended
from jaxpipe.schedule import Timeline
from jaxpipe.stage.functions import (
    IN_PLACE,
    AnyFunction,
    Braids,
    Footprint,
    StageFunction,
    StageFunctions,
    device_bytes,
    footprint,
    function_of,
    total_device_bytes,
)
from jaxpipe.text import aligned, format_bytes

Kind = Literal[
    "parameters", "gradients", "masters", "optimizer", "data", "residuals", "w-residuals", "boundaries", "communication",
    "losses", "user values", "temporaries", "code", "padding", "in flight",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
FootprintOf = Callable[[Any], Footprint]
"""Memory of a compiled stage function or braid."""

_KIND_OF_PORT: Mapping[str, Kind] = {
    "res": "residuals", "wres": "w-residuals", "y": "boundaries", "dx": "boundaries", "loss": "losses", "token": "losses",
    "user": "user values",
}  # fmt: skip
_NO_ARRAYS: tuple[Kind, ...] = ("temporaries", "code", "padding", "in flight")
_KEY_BYTES = 8
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Predicted memory of one device of a rank, in bytes.

    ``peak_bytes``: the most it holds; ``at``: during which instruction; ``by_kind``: what it holds then (sums to the peak).
    ``peaks``: the most of each kind, at whatever time. ``live_peak_bytes``: the most without temporaries and code, which is
    what live arrays show. ``host_peak_bytes``: the most in pinned host memory. ``live_bytes``: without temporaries and code,
    after each dispatched instruction of any rank has its results and nothing is dropped yet, and ``host_bytes``, the same of
    host memory: empty unless asked for.
    """

    rank: int
    peak_bytes: int
    at: str
    by_kind: Mapping[Kind, int]
    peaks: Mapping[Kind, int]
    live_peak_bytes: int
    host_peak_bytes: int
    live_bytes: tuple[int, ...] = field(default=(), repr=False, compare=False)
    host_bytes: tuple[int, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Predicted memory of every rank. ``notes``: what the numbers leave out, for people."""

    ranks: tuple[RankMemory, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(r.peak_bytes for r in self.ranks)

    @property
    def live_peak_bytes(self) -> tuple[int, ...]:
        return tuple(r.live_peak_bytes for r in self.ranks)

    @property
    def host_peak_bytes(self) -> tuple[int, ...]:
        return tuple(r.host_peak_bytes for r in self.ranks)

    def __str__(self) -> str:
        """Format a table: a row a rank, what is held at its peak; kinds that no rank has are left out."""
        kinds = [k for k in KINDS if any(r.by_kind.get(k) for r in self.ranks)]
        host = ["host"] if any(self.host_peak_bytes) else []
        rows = [["rank", "peak", *kinds, *host, "at"]]
        for r in self.ranks:
            held = [r.peak_bytes, *(r.by_kind.get(k, 0) for k in kinds), *([r.host_peak_bytes] if host else [])]
            rows.append([str(r.rank), *(format_bytes(n, binary=True) if n else "-" for n in held), r.at])
        table = aligned(rows, left=(len(rows[0]) - 1,))
        return "\n".join(["predicted peak memory of a device", *table, *(f"({n})" for n in self.notes)])


def account(
    programs: Sequence[Program],
    order: Sequence[tuple[int, int]],
    functions: Mapping[tuple[int, int], StageFunctions],
    *,
    num_microbatches: int,
    resident: Mapping[int, Mapping[Kind, int]] | None = None,
    timeline: Timeline | None = None,
    footprint_of: FootprintOf | None = footprint,
    align: int = 1,
    curves: bool = False,
    braids: Braids = MappingProxyType({}),
    all_programs: Sequence[Program] | None = None,
    reductions: Mapping[tuple[int, int], tuple[int, int]] = MappingProxyType({}),
) -> MemoryReport:
    """Predict the memory of the ranks of ``programs``.

    Args:
        programs: of all ranks that this process dispatches.
        order: as :func:`~jaxpipe.program.order.issue_order` gives it for ``programs``.
        functions: by (rank, stage), every stage that lives on a rank, whether its program runs it or not.
        num_microbatches: whose batch arrays are placed before the step.
        resident: by rank, bytes that stay through the step beside what ``functions`` say: masters, optimizer state.
        timeline: when copies to the host end; without it they take no time.
        footprint_of: memory of compiled functions; None leaves temporaries and code out (and compiles nothing).
        align: granularity of the device's allocator in bytes (256 on GPUs); 1 counts bytes as arrays do.
        curves: keep what is held after each instruction (``live_bytes``, ``host_bytes``).
        braids: those that ``programs`` run as one function.
        all_programs: of all ranks, if ``programs`` is a subset: what other processes do tells when a message has arrived there.
        reductions: by (rank, stage), the bytes that R makes beside the accumulators, which it takes, and its workspace; the
            other R's of ``programs`` are left out of the run.
    """

    def called(program: Program, run: Run) -> AnyFunction:
        return function_of(program.rank, run.parts, functions, braids)

    ranks = []
    for p in programs:
        placed = _placed(p.rank, functions, num_microbatches, align, (resident or {}).get(p.rank, {}))
        if footprint_of is not None:
            used = {id(f.jitted): f for i in p.instructions if isinstance(i, Run) for f in [called(p, i)]}
            placed["code"] = placed.get("code", 0) + sum(footprint_of(f).code_bytes for f in used.values())
        ranks.append(_RankAccount(p, placed, align, timeline))
    by_rank = {r.program.rank: r for r in ranks}
    arrived = messages_arrived(programs if all_programs is None else all_programs)
    messages: dict[Message, list[_Buffer]] = {}
    notes: dict[str, None] = {}
    for k, at in order:
        rank, program = ranks[k], programs[k]
        instruction = program.instructions[at]
        # The executor folds a free into the instruction before it; so does ``drop`` below.
        if isinstance(instruction, Free):
            continue
        reduced, workspace = reductions.get((program.rank, instruction.action.actions[0].stage), (-1, 0))
        if isinstance(instruction, Reduce) and reduced < 0:
            continue
        for offload in rank.ended.get(at, ()):
            rank.finish_copy(offload)
        for message in arrived.get((program.rank, at), ()):
            rank.finish_copy(message)
        # Within an instruction as on a device: results and workspace are there before anything is dropped.
        temporaries = None
        match instruction:
            case Run():
                function = called(program, instruction)
                rank.results(instruction, function)
                xla_footprint = footprint_of(function) if footprint_of is not None else None
                if xla_footprint is not None and xla_footprint.note:
                    notes[xla_footprint.note] = None
                else:
                    temporaries = rank.buffer(workspace_bytes(function, xla_footprint), "temporaries")
            case Send(place=place) if place >= 0:
                rank.keep_until_arrival(instruction)
            # Within a process the copy is allocated when it is sent, whenever its receiver reads it.
            case Send(action, slots, dst=dst):
                if (receiver := by_rank.get(dst)) is not None:
                    n = sum(b.bytes for slot in slots if (b := rank.slots[slot]) is not None)
                    messages.setdefault((program.rank, dst, action), []).append(receiver.buffer(n, "communication"))
                    receiver.note_peak(f"{action} arriving")
            case Recv(action, _, slots, src):
                if sent := messages.get((src, program.rank, action)):
                    rank.release(sent.pop(0))
                for slot, n in zip(slots, program.written_bytes[at], strict=True):
                    rank.fill(slot, n, "boundaries")
            case Offload():
                rank.offload(instruction)
            case Reload(_, host, device):
                for from_slot, to_slot in zip(host, device, strict=True):
                    source = rank.slots[from_slot]
                    assert source is not None, f"{instruction} reads an empty slot"
                    rank.fill(to_slot, source.bytes, source.kind)
            case Reduce():
                rank.fill(instruction.outputs[0], reduced, "gradients")
                temporaries = rank.buffer(workspace, "temporaries")
            case Sync():
                pass
        made_here = isinstance(instruction, Recv) and instruction.place < 0 and instruction.src not in by_rank
        rank.dispatched(instruction, computes=isinstance(instruction, Run | Reduce) or made_here)
        rank.note_peak(f"{instruction.action}")
        rank.release(temporaries)
        for other in ranks if curves else ():
            other.curve.append(other.live)
            other.host_curve.append(other.host)
        rank.drop(instruction, at)
    return MemoryReport(tuple(r.memory() for r in ranks), tuple(notes))


LARGEST_REST = 128 << 20
"""The rest of a chunk is left unused only where it is smaller."""


class Chunks:
    """The chunks of a device, as if it had no end: what XLA's allocator on GPUs takes beyond buffers. A chunk is named by where
    it begins.

    XLA's allocator (openxla/xla ``xla/tsl/framework/bfc_allocator.cc``) gives a buffer the smallest free chunk that holds it.
    It divides a chunk only where that is at least twice as large, or 128 MiB larger; else the rest stays unused until the
    buffer is freed, and counts as in use. Freed neighbours become one chunk. Allocations follow the order of dispatch, so the
    order of a program decides the padding. Not modelled: a full device, where more is tried, and what is left of earlier steps.
    """

    def __init__(self) -> None:
        self._begins = [0]
        self._size = {0: 1 << 60}
        self._free = [(1 << 60, 0)]  # size and begin, in this order

    def take(self, n: int) -> tuple[int, int]:
        """Return a chunk for ``n`` bytes, and how many more it has."""
        size, chunk = self._free.pop(bisect_left(self._free, (n, -1)))
        if size < 2 * n and size - n < LARGEST_REST:
            return chunk, size - n
        self._size |= {chunk: n, chunk + n: size - n}
        insort(self._begins, chunk + n)
        insort(self._free, (size - n, chunk + n))
        return chunk, 0

    def give_back(self, chunk: int) -> None:
        """Free a chunk, as one with its free neighbours."""
        at = bisect_left(self._begins, chunk)
        near = [(self._size[begin], begin) for begin in self._begins[max(0, at - 1) : at + 2]]
        joined = [begin for size, begin in near if begin == chunk or (size, begin) in self._free]
        self._free = [entry for entry in self._free if entry[1] not in joined]
        first = bisect_left(self._begins, joined[0])
        self._begins[first : first + len(joined)] = joined[:1]
        self._size[joined[0]] = size = sum(self._size.pop(begin) for begin in joined)
        insort(self._free, (size, joined[0]))


@dataclass(slots=True, eq=False)
class _Buffer:
    """A device or host allocation, and how many slots (or copies under way) show it."""

    bytes: int
    kind: Kind
    slots: int = 1
    arriving: bool = False
    chunk: int = -1  # where the allocator has put it, with so many bytes more
    padding: int = 0


class _RankAccount:
    """Accounts for what one rank holds, slot by slot and by kind, and for its peak so far."""

    def __init__(self, program: Program, placed: Mapping[Kind, int], align: int, timeline: Timeline | None) -> None:
        self.program, self.align = program, align
        self.arriving: deque[list[_Buffer]] = deque([[]])
        self.chunks = Chunks() if align > 1 else None
        self.bytes: dict[Kind, int] = {kind: placed.get(kind, 0) for kind in KINDS}
        self.peaks, self.by_kind = dict(self.bytes), dict(self.bytes)
        self.peak, self.at, self.live_peak, self.host, self.host_peak = -1, "", 0, 0, 0
        self.curve: list[int] = []
        self.host_curve: list[int] = []
        self.slots: dict[int, _Buffer | None] = {slot: None for _, slot in program.bound}
        for (value, slot), n in zip(program.bound, program.bound_bytes, strict=True):
            if value.kind == "state":
                self.fill(slot, n, "user values")
        self.timed = timeline is not None
        self.ended = offloads_ended(program, timeline) if timeline is not None else {}
        self.leaving: dict[Offload | Message, list[_Buffer]] = {}
        self.note_peak("before the first instruction")

    @property
    def live(self) -> int:
        return sum(n for kind, n in self.bytes.items() if kind not in _NO_ARRAYS)

    def add(self, kind: Kind, n: int) -> None:
        self.bytes[kind] += n
        self.peaks[kind] = max(self.peaks[kind], self.bytes[kind])

    def note_peak(self, at: str) -> None:
        total = sum(self.bytes.values())
        if total > self.peak:
            self.peak, self.at, self.by_kind = total, at, dict(self.bytes)
        self.live_peak = max(self.live_peak, self.live)
        self.host_peak = max(self.host_peak, self.host)

    def memory(self) -> RankMemory:
        by_kind, peaks = ({k: n for k, n in of.items() if n} for of in (self.by_kind, self.peaks))
        held = self.peak, self.at, by_kind, peaks, self.live_peak, self.host_peak
        return RankMemory(self.program.rank, *held, tuple(self.curve), tuple(self.host_curve))

    def fill(self, slot: int, n: int, kind: Kind) -> None:
        self.slots[slot] = self.buffer(n, kind)

    def buffer(self, n: int, kind: Kind) -> _Buffer:
        """Take ``n`` bytes and what the allocator adds."""
        buffer = _Buffer(-(-n // self.align) * self.align, kind)
        if self.chunks is not None and n:
            buffer.chunk, buffer.padding = self.chunks.take(buffer.bytes)
            self.add("padding", buffer.padding)
        self.add(kind, buffer.bytes)
        return buffer

    def release(self, buffer: _Buffer | None) -> None:
        if buffer is None:
            return
        buffer.slots -= 1
        if not buffer.slots:
            self.add(buffer.kind, -buffer.bytes)
            if buffer.arriving:
                self.add("in flight", buffer.bytes)
            else:
                self.give_back(buffer)

    def give_back(self, buffer: _Buffer) -> None:
        if self.chunks is not None and buffer.chunk >= 0:
            self.chunks.give_back(buffer.chunk)
            self.add("padding", -buffer.padding)

    def dispatched(self, instruction: Instruction, *, computes: bool) -> None:
        """Keep what is received until so many computations are behind it that a device must have come to it."""
        if self.chunks is None:
            return
        if computes:
            self.arriving.append([])
        for slot in instruction.outputs if isinstance(instruction, Recv) else ():
            if (received := self.slots[slot]) is not None:
                received.arriving = True
                self.arriving[-1].append(received)
        if len(self.arriving) > IN_FLIGHT:
            for buffer in self.arriving.popleft():
                buffer.arriving = False
                if not buffer.slots:
                    self.add("in flight", -buffer.bytes)
                    self.give_back(buffer)

    def results(self, run: Run, function: AnyFunction) -> None:
        for n, (slot, port, aval) in enumerate(zip(run.outputs, function.outputs, function.avals_out, strict=True)):
            # A result that is an argument handed on is no new buffer; it counts as what it is from now on (a dy kept for W is
            # a w-residual).
            if n in function.forwarded:
                self.slots[slot] = shared = self.slots[run.inputs[function.forwarded[n]]]
                if shared is not None:
                    shared.slots += 1
                    self.add(shared.kind, -shared.bytes)
                    shared.kind = _KIND_OF_PORT[port.kind]
                    self.add(shared.kind, shared.bytes)
            elif slot < 0:
                self.buffer(device_bytes(aval), "losses")
            elif port.kind not in IN_PLACE:
                self.fill(slot, device_bytes(aval), _KIND_OF_PORT[port.kind])

    def offload(self, offload: Offload) -> None:
        for device, host in zip(offload.inputs, offload.outputs, strict=True):
            source = self.slots[device]
            assert source is not None, "residuals are made by the program"
            self.slots[host] = _Buffer(source.bytes, source.kind)
            self.host += source.bytes

    def keep_until_arrival(self, send: Send) -> None:
        """Keep the buffers of a message until the other process has received them."""
        buffers = [b for s in send.inputs if (b := self.slots[s]) is not None]
        self.leaving[message_of(self.program.rank, send)] = buffers
        for buffer in buffers:
            buffer.slots += 1

    def finish_copy(self, copied: Offload | Message) -> None:
        """Drop what an offload has copied to the host, or a message has brought to its receiver."""
        for buffer in self.leaving.pop(copied):
            self.release(buffer)

    def drop(self, instruction: Instruction, at: int) -> None:
        """Drop what the instruction itself empties (device slots of an offload, host slots of a reload), and the frees behind
        it."""
        match instruction:
            case Offload(_, device, _):
                self.leaving[instruction] = [b for slot in device if (b := self.slots.pop(slot)) is not None]
                if not self.timed:
                    self.finish_copy(instruction)
            case Reload(_, host, _):
                self.host -= sum(b.bytes for slot in host if (b := self.slots.pop(slot)) is not None)
        for later in self.program.instructions[at + 1 :]:
            if not isinstance(later, Free):
                break
            for slot in later.slots:
                self.release(self.slots.pop(slot))


def workspace_bytes(function: AnyFunction, xla_footprint: Footprint | None) -> int:
    """Return the bytes that exist only while the function runs: XLA's temporaries, and donated results not written in place."""
    if xla_footprint is None:
        return 0
    donated = total_device_bytes([function.avals_in[k] for k in function.donated])
    return xla_footprint.temp_bytes + max(0, donated - xla_footprint.alias_bytes)


def compiled_bytes(
    stages: Sequence[StageFunctions],
    ops: Collection[str] | None = None,
    footprints: Mapping[tuple[str, int], Footprint] = MappingProxyType({}),
) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Return the workspace by op, an entry a stage, and compiled code by stage. ``footprints``: those known already, by (op,
    stage). Compiles the rest of these ops (all by default), unless they are already."""
    ops = ops if ops is not None else dict.fromkeys(op for s in stages for op in s.functions)

    def of(op: str, count: Callable[[StageFunction, Footprint], int]) -> tuple[int, ...]:
        functions = [(s.functions.get(op), footprints.get((op, s.stage))) for s in stages]
        return tuple(0 if f is None else count(f, xla_footprint or footprint(f)) for f, xla_footprint in functions)

    code = zip(*(of(op, lambda _, xla_footprint: xla_footprint.code_bytes) for op in ops), strict=True)
    return {op: of(op, workspace_bytes) for op in ops}, tuple(map(sum, code))


def passing_bytes(stage: StageFunctions, function: StageFunction) -> int:
    """Return the bytes of the boundaries that a function reads or makes and that are no residual, gone when it has run and
    sent: x where no backward pass reads it, y, dy and dx."""
    stored = {p for op in ("B", "W") if op in stage.functions for p in stage.functions[op].inputs if p.kind == "x"}
    # A dy that is handed to W counts as a cotangent already.
    shared = {k for n, k in function.forwarded.items() if function.outputs[n].kind == "wres"}
    passing = {k for k, p in enumerate(function.inputs) if p.kind == "dy"} - shared
    passing |= {k for k, p in enumerate(function.inputs) if p.kind == "x" and p not in stored}
    written = {n for n, p in enumerate(function.outputs) if p.kind in ("y", "dx")} - function.forwarded.keys()
    return total_device_bytes([function.avals_in[k] for k in passing] + [function.avals_out[n] for n in written])


def batch_bytes(stage: StageFunctions, programs: Sequence[Program], num_microbatches: int) -> int:
    """Return the bytes of a stage that grow with the number of microbatches and stay until the step ends, on one device: batch
    arrays and keys, losses, and a scalar per call, for the program that makes the most calls (a braid is a call for the stage
    of its first action)."""
    data = total_device_bytes(list(stage.data_avals.values())) + (_KEY_BYTES if stage.uses_key else 0)
    forward = stage.functions["F"]
    losses = [a for p, a in zip(forward.outputs, forward.avals_out, strict=True) if p.kind == "loss"]
    calls = [sum(isinstance(i, Run) and i.parts[0][1] == stage.stage for i in p.instructions) for p in programs]
    rounds = num_microbatches // stage.links.span
    return num_microbatches * data + rounds * total_device_bytes(losses) + max(calls) * _TOKEN_BYTES


def _placed(
    rank: int,
    functions: Mapping[tuple[int, int], StageFunctions],
    num_microbatches: int,
    align: int,
    resident: Mapping[Kind, int],
) -> dict[Kind, int]:
    """Return the bytes by kind that a rank holds before a step begins and until it ends."""
    stages = [f for (r, _), f in functions.items() if r == rank]
    data = sum(total_device_bytes(list(f.data_avals.values()), align) for f in stages)
    keys = -(-_KEY_BYTES // align) * align if any(f.uses_key for f in stages) else 0
    static_bytes: dict[Kind, int] = {
        "parameters": sum(total_device_bytes(f.param_avals, align) for f in stages),
        "gradients": sum(total_device_bytes(f.acc_avals, align) for f in stages),
        "data": num_microbatches * (data + keys),
    }
    return {kind: static_bytes.get(kind, 0) + resident.get(kind, 0) for kind in KINDS}
