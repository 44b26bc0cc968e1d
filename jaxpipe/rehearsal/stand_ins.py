"""Stand-ins for what a rank gets from elsewhere: its neighbours' messages, parameters, batches.

Shapes and dtypes are the real ones, values are pseudo-random (a hash of the position), finite, and small enough that a few
layers leave them finite: power draw and speed of a GPU depend on its data, so zeros would flatter it. Everything is made on
the device by one compiled function a kind, so that neither the host link nor the peak of memory notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._jax_compat import is_key_dtype
from jaxpipe.program.ir import Program, Recv
from jaxpipe.runtime.transfer import message_numbers
from jaxpipe.schedule import op_spec
from jaxpipe.stage.functions import StageFunctions

ACTIVATION, COTANGENT, PARAMETER = 1.0, 1e-2, 0.05
"""Largest absolute values."""


class StandIns:
    """A :class:`~jaxpipe.runtime.transfer.Transport` without neighbours: a receive makes arrays of the message's shapes, a
    send is dropped.

    Args:
        program: of the rank that is rehearsed.
        all_programs: of all ranks.
    """

    def __init__(self, program: Program, all_programs: Sequence[Program]) -> None:
        numbers = message_numbers(all_programs)
        self._make: dict[int, Callable[[], list[jax.Array]]] = {}
        for instruction in program.instructions:
            if isinstance(instruction, Recv):
                scale = COTANGENT if op_spec(instruction.action.op).sends == "pred" else ACTIVATION
                number = numbers[(instruction.src, program.rank, instruction.action)]
                self._make[number] = maker(instruction.avals, scale)

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        """Drops the arrays."""

    def recv(self, message: int) -> Sequence[jax.Array]:
        return self._make[message]()

    def clear(self) -> None:
        """Nothing is kept."""


@cache
def maker(avals: tuple[jax.ShapeDtypeStruct, ...], scale: float, limit: int = 2) -> Callable[[], list[jax.Array]]:
    """A function that makes arrays of these shapes where their shardings say: floats within ``±scale``, integers from 0 to
    ``limit − 1``, booleans, PRNG keys. Compiled once for all that ask for the same."""
    return jax.jit(lambda: [_values(a, scale, limit) for a in avals], out_shardings=[a.sharding for a in avals])


def _values(aval: jax.ShapeDtypeStruct, scale: float, limit: int) -> jax.Array:
    if is_key_dtype(aval.dtype):
        keys: jax.Array = jax.random.split(jax.random.key(0), aval.shape)
        return keys
    bits = jax.lax.iota(jnp.uint32, aval.size) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)).reshape(aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        unit = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - jnp.float32(1.0)
        values = unit * jnp.float32(scale)
    else:
        largest = 1 if aval.dtype == np.bool_ else min(int(np.iinfo(aval.dtype).max), 2**31 - 1)
        values = bits % jnp.uint32(min(limit, largest + 1))
    array: jax.Array = values.astype(aval.dtype)
    return array


def batches(stage: StageFunctions, microbatches: int, vocab_size: int) -> list[list[jax.Array]]:
    """Per microbatch, the batch arrays that ``stage`` reads: integers below ``vocab_size``, floats within ±1."""
    read = stage.data_avals
    if not read:
        return []
    unread = next(iter(read.values()))  # an array that no function reads is never bound: any will do
    avals = tuple(read.get(k, unread) for k in range(len(stage.data_names)))
    return [maker(avals, ACTIVATION, vocab_size)() for _ in range(microbatches)]
