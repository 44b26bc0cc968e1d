"""Moving arrays between device memory and host memory.

A copy to ``pinned_host`` memory is asynchronous; dropping the source afterwards frees it once the copy is done. (Donating
across memory kinds is not implemented in XLA, and computing on a pinned array runs on the host: FACTS.md.) All leaves of an
action go in one call, each into a buffer of its own: packing them first measured slower (README). Where a backend has no
pinned host memory, copies go to NumPy arrays if the caller allows it: correct, but the dispatching thread waits for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpipe._jax_compat import copier
from jaxpipe.errors import ProgramError

PINNED_HOST = "pinned_host"

Copy = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """``fraction``: of the residual bytes that may leave, what O and L move (:mod:`jaxpipe.stage.compiled.offloadable`).
    ``host_memory_bytes``: what the offloads of one process may hold (None: what the machine has available).
    ``fallback``: offload to NumPy arrays where the backend has no pinned host memory."""

    fraction: float = 1.0
    host_memory_bytes: float | None = None
    fallback: bool = False


OFFLOAD_ALL = OffloadOptions()
"""All that may leave, to pinned host memory, as much as there is available."""


def has_pinned_host(sharding: jax.sharding.Sharding) -> bool:
    """Whether all devices of ``sharding`` have pinned host memory."""
    return all(PINNED_HOST in _memory_kinds(d) for d in sharding.addressable_devices)


def _memory_kinds(device: jax.Device) -> set[str]:
    return {m.kind for m in device.addressable_memories()}


def host_copies(sharding: jax.sharding.Sharding, *, fallback: bool) -> tuple[Copy, Copy]:
    """Two functions that start copying arrays to the host, and back to where they were.

    Each is for one list of leaves on the devices of ``sharding``, always placed alike: how they are placed is found out at the
    first call. (A function that gets its arguments back elsewhere, if only by another name, would be compiled again.)

    Raises:
        ProgramError: the devices have no pinned host memory, and ``fallback`` is not allowed.
    """
    if has_pinned_host(sharding):
        return _copy_both_ways(lambda homes: copier([s.with_memory_kind(PINNED_HOST) for s in homes]), copier)
    if not fallback:
        device: jax.Device = min(sharding.addressable_devices, key=str)
        raise ProgramError(
            f"the schedule offloads, but {device.platform} devices have no {PINNED_HOST!r} memory (they have "
            f"{', '.join(sorted(_memory_kinds(device)))}); choose a schedule without O and L actions, or allow slow copies to "
            "host arrays with --offload-fallback (offload.fallback=true)"
        )
    return _copy_both_ways(lambda homes: _to_numpy, lambda homes: lambda arrays: jax.device_put(list(arrays), homes))


Homes = list[jax.sharding.Sharding]


def _copy_both_ways(out: Callable[[Homes], Copy], back: Callable[[Homes], Copy]) -> tuple[Copy, Copy]:
    copies: list[Copy] = []

    def to_host(arrays: Sequence[Any]) -> Sequence[Any]:
        if not copies:
            homes = [a.sharding for a in arrays]
            copies.extend((out(homes), back(homes)))
        return copies[0](arrays)

    def to_device(arrays: Sequence[Any]) -> Sequence[Any]:
        return copies[1](arrays)

    return to_host, to_device


def _to_numpy(arrays: Sequence[jax.Array]) -> Sequence[Any]:
    return [np.array(a) for a in arrays]  # a copy: np.asarray may be a view that keeps the device buffer


def wait_for_copies(arrays: Sequence[Any]) -> Sequence[Any]:
    """Block the calling thread until ``arrays`` are complete; the memory that they were copied from is then free."""
    for array in arrays:
        if isinstance(array, jax.Array):
            array.block_until_ready()
    return arrays
