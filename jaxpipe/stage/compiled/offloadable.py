"""Which residuals of a stage an offload moves: a choice over the ``res`` ports of F, made once per stage.

A residual may leave if B or W (and BW) read it later and F made it: parameters, batch arrays, keys and the stage input are
never ``res`` ports, and what F only hands on would free nothing. Scalars, and leaves 256 times smaller than the largest, stay:
each costs a transfer and frees next to nothing. Largest first, and of equal size what W reads after B before what dies with B,
until a fraction of the bytes is reached (`pipeoffload.txt` section 2 offloads by lifespan; all residuals of a microbatch are
held from F to B, so within one stage size decides first).

Not modelled: that W alone may read a residual, so that it could come back later than B; a load brings everything back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxpipe.errors import StageError
from jaxpipe.stage.compiled.footprint import device_bytes
from jaxpipe.stage.functions import StageFunction, StageFunctions

TINY = 256
"""A leaf stays if the largest is more than this many times larger."""


def with_offload(stage: StageFunctions, fraction: float = 1.0) -> StageFunctions:
    """``stage`` whose O and L move about ``fraction`` of the bytes that may leave: at least that, and no leaf more than needed.

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
    for index in sorted(sizes, key=lambda i: (-sizes[i], i not in late, i)):
        if sum(chosen.values()) >= target:
            break
        chosen[index] = sizes[index]
    return replace(stage, offloaded=tuple(sorted(chosen)), offloadable_bytes=sum(chosen.values()))


def leaves_that_may_leave(stage: StageFunctions) -> dict[int, int]:
    """Bytes per device of every leaf that may be offloaded, by ``res`` index."""
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
