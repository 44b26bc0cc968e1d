"""Moving arrays between device memory and pinned host memory.

``device_put`` with a memory kind copies asynchronously; dropping the source afterwards frees it once the copy is done.
(Donating across memory kinds is not implemented in XLA, and computing on a pinned array runs on the host: FACTS.md.)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxpipe.errors import ProgramError

PINNED_HOST = "pinned_host"
DEVICE = "device"


def require_pinned_host(sharding: jax.sharding.Sharding) -> None:
    """Check that the devices of ``sharding`` can offload.

    Raises:
        ProgramError: this backend has no pinned host memory.
    """
    devices: list[jax.Device] = sorted(sharding.addressable_devices, key=str)
    kinds = {m.kind for d in devices for m in d.addressable_memories()}
    if PINNED_HOST not in kinds:
        raise ProgramError(
            f"the schedule offloads, but {devices[0].platform} devices have no {PINNED_HOST!r} memory (they have "
            f"{', '.join(sorted(kinds))}); choose a schedule without O and L actions"
        )


def to_host(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Start copying device arrays to pinned host memory (one call for all of them)."""
    return _copy(arrays, PINNED_HOST)


def to_device(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Start copying pinned host arrays back to where they came from."""
    return _copy(arrays, DEVICE)


def wait_for_copies(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Block the calling thread until ``arrays`` are complete; the memory that they were copied from is then free."""
    for array in arrays:
        array.block_until_ready()
    return arrays


def _copy(arrays: Sequence[jax.Array], memory_kind: str) -> Sequence[jax.Array]:
    shardings = [a.sharding.with_memory_kind(memory_kind) for a in arrays]
    copies: Sequence[jax.Array] = jax.device_put(list(arrays), shardings)
    return copies
