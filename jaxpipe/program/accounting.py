"""How many bytes each rank holds at every instruction, and of what kind: the predicted peak of a step.

The programs of all ranks are walked in the order in which they are dispatched (:func:`jaxpipe.program.order.issue_order`),
with the buffers that the runtime allocates: a result that is an argument handed on shares its buffer, an accumulator is
updated in place, and a message lives on the receiver from the moment it is sent (that is when the in-process transport
allocates it). XLA's workspace of the function that runs (:mod:`jaxpipe.stage.compiled.footprint`) counts while it runs.

What is counted as what:

==============  ======================================================================================================
parameters      buffers that stage functions read, all of the rank's stages
gradients       accumulators, in float32 at least
masters         copies of the parameters that the update works on, where the compute dtype is a smaller one
optimizer       optimizer state
data            batch arrays and PRNG keys of all microbatches: they are placed before a step and stay until its end
residuals       what F saved for B and W
w-residuals     what B saved for W
boundaries      x and dy on the rank that reads them (x stays for the backward pass where that reads it), y and dx until sent
communication   x and dy that were sent and that the receiver has not taken yet
losses          loss sums, and a scalar per action that the runtime waits on
temporaries     workspace of the function that runs
code            compiled functions (0 on backends that do not say)
==============  ======================================================================================================

Offloaded residuals give their device bytes back at once, or, given a timeline, before the first function or reload that starts
in it when the copy to the host has ended: that is what the runtime waits for (:func:`jaxpipe.program.order.holds`). A sync of
that copy, and its own reload, end it too; a reload takes the bytes back when it is issued.

Not modelled: the source of a message while the copy is under way, fragmentation, what libraries allocate for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from jaxpipe.errors import ProgramError
from jaxpipe.program.ir import Free, Instruction, Offload, Program, Recv, Reload, Run, Send, Sync
from jaxpipe.schedule import Action, Slot, Timeline
from jaxpipe.stage.compiled.footprint import Footprint, device_bytes, footprint, total_device_bytes
from jaxpipe.stage.functions import AnyFunction, Braids, StageFunctions, function_of

Kind = Literal[
    "parameters", "gradients", "masters", "optimizer", "data", "residuals", "w-residuals", "boundaries", "communication",
    "losses", "temporaries", "code",
]  # fmt: skip
KINDS: tuple[Kind, ...] = (
    "parameters", "gradients", "masters", "optimizer", "data", "residuals", "w-residuals", "boundaries", "communication",
    "losses", "temporaries", "code",
)  # fmt: skip
FORMAT = "jaxpipe-memory-1"

_KIND_OF_PORT: Mapping[str, Kind] = {
    "res": "residuals", "wres": "w-residuals", "y": "boundaries", "dx": "boundaries", "loss": "losses", "token": "losses",
}  # fmt: skip
_KEY_BYTES = 8
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Predicted memory of one device of a rank, in bytes.

    ``peak_bytes``: the most it holds; ``at``: during which instruction; ``by_kind``: what it holds then (sums to the peak).
    ``peaks``: the most of each kind, at whatever time. ``live_peak_bytes``: the most without temporaries and code, which is
    what live arrays show. ``host_peak_bytes``: the most in pinned host memory. ``live_bytes``: without temporaries and code,
    after each dispatched instruction of any rank has its results and nothing is dropped yet, and ``host_bytes``, the same of
    host memory: empty unless asked for, and not in the JSON form.
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
        """A table: a row a rank, what is held at its peak; kinds that no rank has are left out."""
        kinds = [k for k in KINDS if any(r.by_kind.get(k) for r in self.ranks)]
        unit, scale = _unit(max(self.peak_bytes, default=0))
        host = any(self.host_peak_bytes)
        head = ["rank", "peak", *kinds, *(["host"] if host else []), "at"]
        rows = [head]
        for r in self.ranks:
            numbers = [r.peak_bytes, *(r.by_kind.get(k, 0) for k in kinds), *([r.host_peak_bytes] if host else [])]
            rows.append([str(r.rank), *(_number(n / scale) for n in numbers), r.at])
        widths = [max(len(row[c]) for row in rows) for c in range(len(head))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row[:-1], widths, strict=False)) for row in rows]
        table = [f"{line}  {row[-1]}" for line, row in zip(lines, rows, strict=True)]
        return "\n".join([f"predicted peak memory of a device, {unit}", *table, *(f"({n})" for n in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists; curves are left out."""
        ranks = [
            {
                "rank": r.rank,
                "peak_bytes": r.peak_bytes,
                "at": r.at,
                "by_kind": dict(r.by_kind),
                "peaks": dict(r.peaks),
                "live_peak_bytes": r.live_peak_bytes,
                "host_peak_bytes": r.host_peak_bytes,
            }
            for r in self.ranks
        ]
        return {"format": FORMAT, "ranks": ranks, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryReport:
        """Raises ProgramError if ``data`` is not what :meth:`to_json` writes."""
        try:
            if data["format"] != FORMAT:
                raise ProgramError(f"memory report: format is {data['format']!r}; want {FORMAT!r}")
            return cls(tuple(RankMemory(**r) for r in data["ranks"]), tuple(data["notes"]))
        except (KeyError, TypeError) as error:
            raise ProgramError(f"memory report: {error} is missing or unknown; write it with to_json") from None


def account(
    programs: Sequence[Program],
    order: Sequence[tuple[int, int]],
    functions: Mapping[tuple[int, int], StageFunctions],
    *,
    num_microbatches: int,
    resident: Mapping[int, Mapping[Kind, int]] | None = None,
    timeline: Timeline | None = None,
    footprint_of: Callable[[AnyFunction], Footprint] | None = footprint,
    align: int = 1,
    curves: bool = False,
    braids: Braids = MappingProxyType({}),
) -> MemoryReport:
    """The predicted memory of the ranks of ``programs``.

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
    """
    walk = _Walk(programs, functions, braids, num_microbatches, resident or {}, timeline, footprint_of, align, curves)
    for k, at in order:
        walk.visit(k, at)
    return walk.report()


class _Held:
    """Bytes of one rank by kind, the peak so far and what it was made of."""

    def __init__(self, rank: int, resident: Mapping[Kind, int]) -> None:
        self.rank = rank
        self.bytes: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.peaks: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.total = self.live = self.host = 0
        self.peak, self.at, self.by_kind, self.live_peak, self.host_peak = -1, "", dict(self.bytes), 0, 0
        self.curve: list[int] = []
        self.host_curve: list[int] = []
        for kind, n in resident.items():
            self.add(kind, n)
        self.look("before the first instruction")

    def add(self, kind: Kind, n: int) -> None:
        self.bytes[kind] += n
        self.total += n
        if kind not in ("temporaries", "code"):
            self.live += n
        self.peaks[kind] = max(self.peaks[kind], self.bytes[kind])

    def look(self, at: str) -> None:
        if self.total > self.peak:
            self.peak, self.at, self.by_kind = self.total, at, dict(self.bytes)
        self.live_peak = max(self.live_peak, self.live)
        self.host_peak = max(self.host_peak, self.host)

    def result(self) -> RankMemory:
        by_kind: dict[Kind, int] = {k: n for k, n in self.by_kind.items() if n}
        peaks: dict[Kind, int] = {k: n for k, n in self.peaks.items() if n}
        return RankMemory(
            self.rank, self.peak, self.at, by_kind, peaks, self.live_peak, self.host_peak, tuple(self.curve),
            tuple(self.host_curve),
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Buffer:
    """A device or host allocation and how many slots show it."""

    bytes: int
    kind: Kind
    slots: int = 1


class _Walk:
    """Follows all programs in the order of dispatch."""

    def __init__(
        self,
        programs: Sequence[Program],
        functions: Mapping[tuple[int, int], StageFunctions],
        braids: Braids,
        num_microbatches: int,
        resident: Mapping[int, Mapping[Kind, int]],
        timeline: Timeline | None,
        footprint_of: Callable[[AnyFunction], Footprint] | None,
        align: int,
        curves: bool,
    ) -> None:
        self.programs, self.functions, self.braids, self.align, self.curves = programs, functions, braids, align, curves
        self.footprint_of = footprint_of
        self.notes: dict[str, None] = {}
        self.held = []
        for p in programs:
            placed = _placed(p.rank, functions, num_microbatches, align)
            extra = resident.get(p.rank, {})
            total = {kind: placed.get(kind, 0) + extra.get(kind, 0) for kind in KINDS}
            total["code"] += self._code(p)
            self.held.append(_Held(p.rank, total))
        self.index = {p.rank: k for k, p in enumerate(programs)}
        self.slots: list[dict[int, _Buffer | None]] = [{slot: None for _, slot in p.bound} for p in programs]
        self.messages: dict[tuple[int, int, Action], int] = {}
        self.starts: dict[tuple[int, Slot], float] = {}
        self.ends: dict[tuple[int, Slot], float] = {}
        if timeline is not None:
            on_lane = [(e, a) for e in timeline.events if e.lane != "send" for a in (e.action, *e.action.actions)]
            self.starts = {(e.rank, a): e.start_s for e, a in on_lane}
            self.ends = {(e.rank, a): e.end_s for e, a in on_lane}
        self.leaving: list[list[tuple[Action, list[_Buffer]]]] = [[] for _ in programs]

    def report(self) -> MemoryReport:
        return MemoryReport(tuple(h.result() for h in self.held), tuple(self.notes))

    def _code(self, program: Program) -> int:
        if self.footprint_of is None:
            return 0
        used = {
            id(f.jitted): f
            for i in program.instructions
            if isinstance(i, Run)
            for f in (function_of(program.rank, i.parts, self.functions, self.braids),)
        }
        return sum(self.footprint_of(f).code_bytes for f in used.values())

    def visit(self, k: int, at: int) -> None:
        """One instruction of ``programs[k]``, and the frees behind it, which the executor folds into it."""
        program = self.programs[k]
        instruction = program.instructions[at]
        if isinstance(instruction, Free):
            return
        held = self.held[k]
        self._copies_ended(k, program.rank, instruction)
        workspace = 0
        match instruction:
            case Run():
                workspace = self._run(k, program.rank, instruction)
            case Send(action, dst, slots):
                self._send(program.rank, action, dst, [self.slots[k][s] for s in slots])
            case Recv(action, src, slots):
                held.add("communication", -self.messages.pop((src, program.rank, action), 0))
                for slot, n in zip(slots, program.written_bytes[at], strict=True):
                    self._fill(k, slot, self._aligned(n), "boundaries")
            case Offload(_, device, host):
                for from_slot, to_slot in zip(device, host, strict=True):
                    self._to_host(k, from_slot, to_slot)
            case Reload(_, host, device):
                for from_slot, to_slot in zip(host, device, strict=True):
                    source = self.slots[k][from_slot]
                    assert source is not None, f"{instruction} reads an empty slot"
                    self._fill(k, to_slot, source.bytes, source.kind)
            case Sync():
                pass
        held.look(f"{instruction.action}")
        held.add("temporaries", -workspace)
        for other in self.held if self.curves else ():
            other.curve.append(other.live)
            other.host_curve.append(other.host)
        self._drop(k, instruction)
        for later in program.instructions[at + 1 :]:
            if not isinstance(later, Free):
                break
            for slot in later.slots:
                self._release(k, self.slots[k].pop(slot))

    def _aligned(self, n: int) -> int:
        return -(-n // self.align) * self.align

    def _fill(self, k: int, slot: int, n: int, kind: Kind) -> None:
        self.slots[k][slot] = _Buffer(n, kind)
        self.held[k].add(kind, n)

    def _run(self, k: int, rank: int, run: Run) -> int:
        """Allocates results and workspace; returns the workspace, which is there while the function runs."""
        function = function_of(rank, run.parts, self.functions, self.braids)
        held, slots = self.held[k], self.slots[k]
        for n, (slot, port, aval) in enumerate(zip(run.outputs, function.outputs, function.avals_out, strict=True)):
            if n in function.forwarded:
                shared = slots[run.inputs[function.forwarded[n]]]
                if shared is not None:
                    shared.slots += 1
                    self._relabel(k, shared, _KIND_OF_PORT[port.kind])
                slots[slot] = shared
            elif slot < 0:
                held.add("losses", device_bytes(aval, self.align))
            elif port.kind != "acc":
                self._fill(k, slot, device_bytes(aval, self.align), _KIND_OF_PORT[port.kind])
        if self.footprint_of is None:
            return 0
        found = self.footprint_of(function)
        if found.note:
            self.notes[found.note] = None
            return 0
        donated = total_device_bytes([function.avals_in[n] for n in function.donated])
        workspace = found.temp_bytes + max(0, donated - found.alias_bytes)
        held.add("temporaries", workspace)
        return workspace

    def _relabel(self, k: int, buffer: _Buffer, kind: Kind) -> None:
        self.held[k].add(buffer.kind, -buffer.bytes)
        self.held[k].add(kind, buffer.bytes)
        buffer.kind = kind

    def _send(self, rank: int, action: Action, dst: int, buffers: Sequence[_Buffer | None]) -> None:
        if dst not in self.index:
            return
        n = sum(b.bytes for b in buffers if b is not None)
        self.messages[(rank, dst, action)] = n
        receiver = self.held[self.index[dst]]
        receiver.add("communication", n)
        receiver.look(f"{action} arriving")

    def _to_host(self, k: int, device: int, host: int) -> None:
        source = self.slots[k][device]
        assert source is not None, "residuals are made by the program"
        self.slots[k][host] = _Buffer(source.bytes, source.kind)
        self.held[k].host += source.bytes

    def _drop(self, k: int, instruction: Instruction) -> None:
        """What the instruction itself empties: device slots of an offload, host slots of a reload."""
        match instruction:
            case Offload(action, device, _):
                gone = [b for slot in device if (b := self.slots[k].pop(slot)) is not None]
                if (self.programs[k].rank, action) in self.ends:
                    self.leaving[k].append((action, gone))
                else:
                    for buffer in gone:
                        self._release(k, buffer)
            case Reload(_, host, _):
                back = [b for slot in host if (b := self.slots[k].pop(slot)) is not None]
                self.held[k].host -= sum(b.bytes for b in back)

    def _copies_ended(self, k: int, rank: int, instruction: Instruction) -> None:
        """Gives back what has reached the host by the time this instruction starts."""
        if not self.leaving[k] or isinstance(instruction, Free):
            return
        begins = isinstance(instruction, Run | Reload)
        now = self.starts.get((rank, instruction.action), float("-inf")) if begins else float("-inf")
        waited = None
        if isinstance(instruction, Sync | Reload):
            waited = (instruction.action.stage, instruction.action.microbatch)
        kept = []
        for left, buffers in self.leaving[k]:
            if self.ends[(rank, left)] <= now or (left.stage, left.microbatch) == waited:
                for buffer in buffers:
                    self._release(k, buffer)
            else:
                kept.append((left, buffers))
        self.leaving[k] = kept

    def _release(self, k: int, buffer: _Buffer | None) -> None:
        if buffer is None:
            return
        buffer.slots -= 1
        if buffer.slots == 0:
            self.held[k].add(buffer.kind, -buffer.bytes)


def batch_bytes(stage: StageFunctions, num_microbatches: int, num_tokens: int | None = None) -> int:
    """Bytes of a stage that grow with the number of microbatches and stay until the step ends, on one device: batch arrays
    and keys, losses, and a scalar per call (``num_tokens``; if not known: of F, B and W of every microbatch)."""
    data = total_device_bytes(list(_data_avals(stage))) + (_KEY_BYTES if stage.uses_key else 0)
    forward = stage.functions["F"]
    losses = [a for p, a in zip(forward.outputs, forward.avals_out, strict=True) if p.kind == "loss"]
    tokens = 3 * num_microbatches if num_tokens is None else num_tokens
    return num_microbatches * (data + total_device_bytes(losses)) + tokens * _TOKEN_BYTES


def calls_of(programs: Sequence[Program], stage: int) -> int:
    """The most calls that one program makes for ``stage``; a braid is a call for the stage of its first action."""
    return max(sum(isinstance(i, Run) and i.parts[0][1] == stage for i in p.instructions) for p in programs)


def _placed(
    rank: int, functions: Mapping[tuple[int, int], StageFunctions], num_microbatches: int, align: int
) -> dict[Kind, int]:
    """What is on a rank before a step begins and stays until its end."""
    here = [f for (r, _), f in functions.items() if r == rank]
    data = sum(device_bytes(aval, align) for f in here for aval in _data_avals(f))
    keys = -(-_KEY_BYTES // align) * align if any(f.uses_key for f in here) else 0
    return {
        "parameters": sum(total_device_bytes(f.param_avals, align) for f in here),
        "gradients": sum(total_device_bytes(f.acc_avals, align) for f in here),
        "data": num_microbatches * (data + keys),
    }


def _data_avals(stage: StageFunctions) -> Iterator[Any]:
    """Shapes of the batch arrays that a stage reads, one microbatch."""
    known = {
        port.index: aval
        for f in (*stage.functions.values(), stage.evaluation)
        for port, aval in zip(f.inputs, f.avals_in, strict=True)
        if port.kind == "data"
    }
    return (known[n] for n in range(len(stage.data_names)) if n in known)


def _unit(largest: int) -> tuple[str, int]:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= scale:
            return unit, scale
    return "bytes", 1


def _number(value: float) -> str:
    if value < 0.001:
        return "-" if value == 0 else "<0.001"
    return f"{value:.4g}" if value < 999.95 else f"{value:.0f}"
