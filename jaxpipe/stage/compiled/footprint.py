"""The bytes of compiled stage functions: what XLA needs while one runs, and what of its residuals an offload moves.

**Footprints** (arguments, results, workspace, code) are read from XLA's buffer assignment (``memory_analysis()`` of the
compiled function), so they know about fusion, buffer reuse and donation, which shapes alone do not tell. That works where
nothing can run: compiling for described devices is enough. Compiling is shared with the runtime: a function that has run for
these shapes is not compiled again, nor is one that runs later. Bytes are those of one device. Not in them: the allocator's
rounding, memory that libraries (cuBLAS, NCCL) take for themselves, and constants that a backend places with the code without
counting them.

**Offload** is a choice over the ``res`` ports of F, made once per stage (:func:`with_offload`). A residual may leave if B or W
(and BW) read it later and F made it: parameters, batch arrays, keys and the stage input are never ``res`` ports, and what F
only hands on would free nothing. Scalars, and leaves 256 times smaller than the largest, stay: each costs a transfer and frees
next to nothing. Largest first, and of equal size what W reads after B before what dies with B, until a fraction of the bytes is
reached (`pipeoffload.txt` section 2 offloads by lifespan; all residuals of a microbatch are held from F to B, so within one
stage size decides first). Not modelled: that W alone may read a residual, so that it could come back later than B; a load
brings everything back.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._jax_compat import aval_bytes
from jaxpipe.errors import StageError
from jaxpipe.stage.functions import AnyFunction, StageFunction, StageFunctions


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device. ``alias_bytes``: of the results that are written into donated arguments (accumulators), counted in
    ``argument_bytes`` and in ``output_bytes``. ``temp_bytes``: workspace while the function runs. ``code_bytes``: of the
    program itself, as long as it is loaded. ``host_bytes``: workspace and results in host memory. ``note``: why the numbers
    are zero, where the backend does not tell them; else empty."""

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    host_bytes: int = 0
    note: str = ""

    @property
    def peak_bytes(self) -> int:
        """Return the bytes that are live while the function runs, its code left out."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def __str__(self) -> str:
        if self.note:
            return self.note
        return (
            f"arguments {self.argument_bytes}, results {self.output_bytes} (in place {self.alias_bytes}), workspace "
            f"{self.temp_bytes}, code {self.code_bytes} bytes"
        )


UNKNOWN = Footprint(note="the backend does not report the memory of compiled functions; workspace counts as 0")

# Weak, so that a cache of footprints keeps no compiled function alive.
_footprints_of: weakref.WeakKeyDictionary[Any, dict[tuple[jax.ShapeDtypeStruct, ...], Footprint]] = (
    weakref.WeakKeyDictionary()
)


def footprint(function: AnyFunction) -> Footprint:
    """Return the footprint of a stage function or braid, compiled for its shapes unless it is already. Cached per compiled
    function.

    The first compilation takes seconds for a large stage. What the compiler raises (an out-of-memory plan, an unknown
    target) is passed on.
    """
    footprints = _footprints_of.setdefault(function.jitted, {})
    if function.avals_in not in footprints:
        footprints[function.avals_in] = compiled_footprint(function.jitted.lower(*function.avals_in).compile())
    return footprints[function.avals_in]


def compiled_footprint(compiled: Any) -> Footprint:
    """Return the footprint of any ``jax.stages.Compiled``."""
    stats = compiled.memory_analysis()
    if stats is None:
        return UNKNOWN
    return Footprint(
        argument_bytes=int(stats.argument_size_in_bytes),
        output_bytes=int(stats.output_size_in_bytes),
        alias_bytes=int(stats.alias_size_in_bytes),
        temp_bytes=int(stats.temp_size_in_bytes),
        code_bytes=int(stats.generated_code_size_in_bytes),
        host_bytes=int(stats.host_temp_size_in_bytes + stats.host_output_size_in_bytes),
    )


def device_bytes(aval: jax.ShapeDtypeStruct | jax.Array, align: int = 1) -> int:
    """Return the bytes that an array takes on each of its devices: of one shard if it is split, of the whole if it is
    replicated.

    ``align``: the allocator's granularity, to which every buffer is rounded up.
    """
    size_bytes = aval_bytes(aval)
    if aval.sharding is not None and aval.size:
        size_bytes = size_bytes * math.prod(aval.sharding.shard_shape(tuple(aval.shape))) // aval.size
    return -(-size_bytes // align) * align


def total_device_bytes(avals: Sequence[jax.ShapeDtypeStruct], align: int = 1) -> int:
    """Sum :func:`device_bytes` over ``avals``."""
    return sum(device_bytes(a, align) for a in avals)


TINY = 256
"""A leaf stays if the largest is more than this many times larger."""


def with_offload(stage: StageFunctions, fraction: float = 1.0) -> StageFunctions:
    """Have O and L of ``stage`` move about ``fraction`` of the bytes that may leave: at least that, and no leaf more than
    needed.

    Args:
        stage: any; an earlier choice is replaced.
        fraction: 0 (nothing moves) to 1 (all that may leave).

    Raises:
        StageError: ``fraction`` is outside 0..1.
    """
    if not 0 <= fraction <= 1:
        raise StageError(f"offload: fraction is {fraction}; want a number between 0 and 1")
    sizes = leaves_that_may_leave(stage)
    late = _read([f for f in stage.functions.values() if any(p.kind == "wres" for p in f.inputs)])
    target = fraction * sum(sizes.values())
    chosen: dict[int, int] = {}
    # Few large transfers rather than many small ones; the index last, so that all processes choose the same.
    for index in sorted(sizes, key=lambda i: (-sizes[i], i not in late, i)):
        if sum(chosen.values()) >= target:
            break
        chosen[index] = sizes[index]
    return replace(stage, offloaded=tuple(sorted(chosen)), offloadable_bytes=sum(chosen.values()))


def leaves_that_may_leave(stage: StageFunctions) -> dict[int, int]:
    """Return the bytes per device of every leaf that may be offloaded, by ``res`` index."""
    functions = stage.functions.values()
    read = _read(functions)
    sizes = {
        port.index: device_bytes(aval)
        for f in functions
        for k, (port, aval) in enumerate(zip(f.outputs, f.avals_out, strict=True))
        if port.kind == "res" and port.index in read and k not in f.forwarded and _is_plain_array(aval)
    }
    largest = max(sizes.values(), default=0)
    return {index: n for index, n in sizes.items() if n * TINY >= largest}


def _read(functions: Iterable[StageFunction]) -> set[int]:
    return {p.index for f in functions for p in f.inputs if p.kind == "res"}


def _is_plain_array(aval: jax.ShapeDtypeStruct) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and device_bytes(aval) > aval.dtype.itemsize
