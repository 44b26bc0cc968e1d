"""Arrays from process to process by ``jax.device_put``: on GPUs from device memory to device memory, by NCCL.

Both sides call it, the sender with its arrays, the receiver with arrays of the same shapes that lie on the sender's devices,
of which it holds nothing. There are no numbers: between two devices the nth call of one side meets the nth of the other's. So
all processes start messages in one order, which is proved to end whatever NCCL makes wait
(:data:`jaxpipe.program.deadlock.NATIVE`), with receives posted early; what goes from rank to rank outside of programs goes in
one order, too (:mod:`jaxpipe.runtime.ownership`).

The first message between two devices makes their communicator, and blocks both threads until it is there. A receive that is
posted early would hold up what its sender waits for; so :meth:`Native.link` makes them all before the first step.

Nobody has run this on GPUs. Two processes on CPUs, where JAX's flags for transfers between data centres have ``device_put``
match calls by their order as well, get the bits of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxpipe.mesh import replicated, spec_of


class Native:
    """``meshes``: of all ranks; ``ranks``: those of this process."""

    def __init__(self, meshes: Sequence[Mesh], ranks: Sequence[int]) -> None:
        self._meshes, self._ranks = meshes, ranks
        self._linked: set[tuple[int, int]] = set()

    def put(self, number: int, arrays: Sequence[jax.Array], avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        assert all(a.committed for a in arrays), "arrays that lie nowhere for good are copied within the process"
        jax.device_put(list(arrays), [a.sharding for a in avals])

    def get(self, number: int, src: int, avals: Sequence[jax.ShapeDtypeStruct]) -> Sequence[jax.Array]:
        homes = [NamedSharding(self._meshes[src], spec_of(a)) for a in avals]
        absent = [
            jax.make_array_from_single_device_arrays(a.shape, home, [], dtype=a.dtype)
            for a, home in zip(avals, homes, strict=True)
        ]
        arrays: Sequence[jax.Array] = jax.device_put(absent, [a.sharding for a in avals])
        return arrays

    def link(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Send something both ways between the ranks of each pair, of two processes, for the first time. All processes call
        this with the same pairs: one after another in their order, nobody waits for ever."""
        for pair in sorted({(min(pair), max(pair)) for pair in pairs} - self._linked):
            self._linked.add(pair)
            for src, dst in (pair, pair[::-1]):
                source_home, target_home = (replicated(self._meshes[rank]) for rank in (src, dst))
                aval = jax.ShapeDtypeStruct((), jnp.float32, sharding=target_home)
                if src in self._ranks:
                    self.put(0, [jnp.zeros((), jnp.float32, device=source_home)], [aval])
                elif dst in self._ranks:
                    jax.block_until_ready(self.get(0, src, [aval]))
