"""Moving arrays between device memory and pinned host memory.

``device_put`` with a memory kind copies asynchronously; dropping the source afterwards frees it once the copy is done.
(Donating across memory kinds is not implemented in XLA, and computing on a pinned array runs on the host: FACTS.md.)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxpipe.errors import ProgramError

PINNED_HOST = "pinned_host"


def host_sharding(device: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """The same layout in pinned host memory.

    Raises:
        ProgramError: this backend has no such memory.
    """
    kinds = {m.kind for d in device.mesh.devices.flat for m in d.addressable_memories()}
    if PINNED_HOST not in kinds:
        raise ProgramError(
            f"the schedule offloads, but {device.mesh.devices.flat[0].platform} devices have no {PINNED_HOST!r} memory (they "
            f"have {', '.join(sorted(kinds))}); choose a schedule without O and L actions"
        )
    return device.with_memory_kind(PINNED_HOST)


def copy_to(arrays: Sequence[jax.Array], sharding: jax.sharding.Sharding) -> Sequence[jax.Array]:
    """Start copying ``arrays`` (one call for all of them)."""
    copies: Sequence[jax.Array] = jax.device_put(arrays, sharding)
    return copies
