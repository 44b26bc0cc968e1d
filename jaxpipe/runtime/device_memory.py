"""How full a device is while a program runs, and what to say when it is too full.

A :class:`Meter` counts bytes from when it was made: live buffers on a CPU, the allocator's statistics on a GPU. A
:class:`Watch` observes the executor (:class:`~jaxpipe.runtime.executor.Observer`): it knows which instruction runs, what was
held before it and the most that was held, and enforces a limit smaller than the device. :func:`out_of_memory` is the line
for people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, Protocol

import jax

from jaxpipe.errors import RunError
from jaxpipe.program.ir import Free, Instruction, Offload, Program, Recv, Reload, Run, Send, Sync
from jaxpipe.stage.footprint import device_bytes, footprint
from jaxpipe.stage.functions import StageFunctions

Source = Literal["live buffers", "memory statistics"]
ADVICE = "use a smaller microbatch, more ranks, recomputation, offload, or a schedule with a lower peak"


class LimitError(Exception):
    """More than the limit that the user set."""


class Meter(Protocol):
    """Bytes in use on one device, counted from when the meter was made."""

    @property
    def source(self) -> Source: ...

    def held(self) -> int:
        """Now."""

    def peak(self, seen: int) -> tuple[int, bool]:
        """The most so far, and whether that is exact; ``seen``: the most that :meth:`held` said."""


def meter_of(device: jax.Device) -> Meter:
    """The allocator's statistics where there are some, else live buffers."""
    return LiveBuffers(device) if device.memory_stats() is None else Statistics(device)


class LiveBuffers:
    """Sum over the arrays of this process that are in the device's own memory; arrays that share a buffer count once."""

    source: Source = "live buffers"

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._before = self._count()

    def _count(self) -> int:
        sizes: dict[int, int] = {}
        for array in jax.live_arrays(self._device.platform):
            if array.is_deleted() or self._device not in array.devices() or array.sharding.memory_kind == "pinned_host":
                continue
            for shard in array.addressable_shards:
                if shard.device == self._device and shard.data.size:
                    sizes[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        return sum(sizes.values())

    def held(self) -> int:
        return self._count() - self._before

    def peak(self, seen: int) -> tuple[int, bool]:
        return seen, True


class Statistics:
    """What the device's allocator says. Its peak never falls: one that this meter has not seen rise is an earlier one's."""

    source: Source = "memory statistics"

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._before, self._peak_before = self._read()

    def _read(self) -> tuple[int, int]:
        stats: Mapping[str, int] = self._device.memory_stats()
        return stats["bytes_in_use"], stats["peak_bytes_in_use"]

    def held(self) -> int:
        return self._read()[0] - self._before

    def peak(self, seen: int) -> tuple[int, bool]:
        peak = self._read()[1]
        return (peak - self._before, True) if peak > self._peak_before else (seen, False)


class Watch:
    """Follows one step of one rank. ``at``: the instruction it is at (None before the first); ``held``: bytes before it;
    ``most``: the most held once an instruction had its results.

    Raises:
        LimitError: from :meth:`look` and :meth:`before`: what is held and what the instruction allocates exceed ``limit``.
    """

    def __init__(
        self,
        program: Program,
        functions: Mapping[tuple[int, int], StageFunctions],
        meter: Meter,
        limit: float | None,
    ) -> None:
        self._program, self._functions, self._meter, self._limit = program, functions, meter, limit
        self.at: int | None = None
        self.held = self.most = 0

    def look(self) -> None:
        """Read the meter between steps."""
        self.held = self._meter.held()
        self.most = max(self.most, self.held)
        if self._limit is not None and self.held > self._limit:
            raise LimitError

    def before(self, rank: int, at: int) -> None:
        self.at = at
        self.held = self._meter.held()
        if self._limit is not None and self.held + sum(needs(self._program, self._functions, at)) > self._limit:
            raise LimitError

    def after(self, rank: int, at: int) -> None:
        self.most = max(self.most, self._meter.held())


def needs(program: Program, functions: Mapping[tuple[int, int], StageFunctions], at: int) -> tuple[int, int]:
    """Device bytes that instruction ``at`` of a program allocates: for results, and for workspace while it runs."""
    instruction = program.instructions[at]
    match instruction:
        case Run(action):
            function = functions[(program.rank, action.stage)].functions[action.op]
            results = sum(
                device_bytes(aval)
                for k, (port, aval) in enumerate(zip(function.outputs, function.avals_out, strict=True))
                if port.kind != "acc" and k not in function.forwarded
            )
            return results, footprint(function).temp_bytes
        case Recv() | Reload():
            return sum(program.written_bytes[at]), 0
        case _:
            return 0, 0


def out_of_memory(
    error: Exception,
    watch: Watch,
    program: Program,
    functions: Mapping[tuple[int, int], StageFunctions],
    placed_bytes: int,
    limit: float | None,
) -> RunError | None:
    """One line about an error that says memory ran out; None if it says something else.

    ``placed_bytes``: what is on the device before the first instruction, for an error that comes before it. ``limit``: the
    user's, or the device's, if known.
    """
    broke_limit = isinstance(error, LimitError) or isinstance(error.__cause__, LimitError)
    if not broke_limit and "RESOURCE_EXHAUSTED" not in str(error):
        return None
    wanted = _bytes_in(str(error))
    at = _blamed(program, watch.at, error.action if isinstance(error, RunError) else "")
    of = "" if limit is None else f" of {_mb(limit)}"
    if at is None:
        more = f"; an allocation of {_mb(wanted)} failed" if wanted else ""
        return RunError(
            f"rank {program.rank}: out of memory before the first instruction: parameters, accumulators, optimizer state and "
            f"data take {_mb(placed_bytes)}{of}{more}; {ADVICE}"
        )
    instruction = program.instructions[at]
    results, workspace = needs(program, functions, at)
    return RunError(
        f"rank {program.rank}: out of memory at instruction {at} of {len(program.instructions)}, {_name(instruction)}, which "
        f"wanted {_mb(wanted or results + workspace)} (its results take {_mb(results)}, its workspace {_mb(workspace)}) with "
        f"{_mb(watch.held)} held{of}; {ADVICE}",
        _action(instruction),
    )


def _blamed(program: Program, at: int | None, action: str) -> int | None:
    """The instruction to blame: the one being dispatched, unless an earlier one's failure came to light later."""
    if not action or (at is not None and _action(program.instructions[at]) == action):
        return at
    ran = (
        k for k, i in enumerate(program.instructions) if isinstance(i, Run | Offload | Reload) and _action(i) == action
    )
    return next(ran, at)


def _action(instruction: Instruction) -> str:
    return "" if isinstance(instruction, Free) else str(instruction.action)


def _name(instruction: Instruction) -> str:
    match instruction:
        case Run(action):
            return f"{action} (stage {action.stage}, microbatch {action.microbatch})"
        case Recv(action, src):
            return f"receiving {action} from rank {src}"
        case Send(action, dst):
            return f"sending {action} to rank {dst}"
        case Offload(action) | Reload(action) | Sync(action):
            return f"{action} (stage {action.stage}, microbatch {action.microbatch})"
        case Free():
            return "a free"


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "bytes": 1}


def _bytes_in(text: str) -> int:
    """The bytes that XLA says it could not allocate; 0 if it does not say."""
    found = re.search(r"allocat\w*(?: request)?(?: for)?:? ([0-9.]+) ?(bytes|[KMGT]iB|B)?\b", text)
    return int(float(found[1].rstrip(".")) * _UNITS[found[2] or ""]) if found else 0


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.2f} GB"
