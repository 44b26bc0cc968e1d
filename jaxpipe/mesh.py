"""The submeshes of pipeline ranks, one per rank, with axes ``dp`` (data), ``cp`` (context, that is time) and ``tp`` (tensor).

The axis names are spelled here and nowhere else. Devices are taken in their own order with ``tp`` innermost and the pipeline
outermost, so that tensor-parallel neighbours are the closest devices, and then those that share a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpipe.errors import ConfigError

DP = "dp"
CP = "cp"
TP = "tp"
DATA = (DP, CP)
"""The axes over which the positions of a microbatch are divided: devices along them have the same parameters and other data."""
AXES = (*DATA, TP)
BufferKind = Literal["same", "split", "partial"]
"""How a parameter buffer lies on the ``tp`` shards: the same on each; a part on each; the same, but each makes a part of the
gradient."""


class BufferAxes(NamedTuple):
    """The axes of a rank's mesh that matter to a parameter buffer: ``divided``, along which devices hold other parts of it, and
    ``summed``, along which they make parts of its gradient, which are added up."""

    divided: tuple[str, ...]
    summed: tuple[str, ...]


BUFFER_AXES: Mapping[BufferKind, BufferAxes] = {
    "same": BufferAxes((), DATA),
    "split": BufferAxes((TP,), DATA),
    "partial": BufferAxes((), AXES),
}
"""The axes of each kind of buffer: reductions, norms, packing, ZeRO-1 and traces read them here and in no other place."""

DIVIDING = tuple(a for a in AXES if any(a in axes.divided for axes in BUFFER_AXES.values()))
"""The axes along which any buffer is divided."""

AnyMesh = Mesh | AbstractMesh
"""A rank's devices, or as many that do not exist: stages can be traced for those, not run."""


CP_METHODS = ("gather", "heads", "ring")
"""The ways to compute attention where sequences are divided: every shard gathers all keys and values; shards exchange times for
heads; keys and values go round a ring of shards."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The division of a rank's layers over the axes ``tp`` and ``cp``.

    ``size``: shards. ``sequence``: between the parallel products each shard holds a part of the time axis (axis 1 of what flows
    between layers), so that norms and dropout are divided too, and all-reduces become all-gathers and reduce-scatters
    (Korthikanti et al., "Reducing Activation Recomputation", 2022). ``fused_residual``: a branch's residual is added before the
    all-reduce that ends it (``stp.txt`` equations 1 and 2). With size 1 nothing of this changes what is computed.

    ``cp``: shards of each sequence (``stp.txt`` section 5.3), which meet in attention alone; ``cp_method``: how they do, one of
    :data:`CP_METHODS` (:mod:`jaxpipe.context_parallel`).
    """

    size: int = 1
    sequence: bool = False
    fused_residual: bool = False
    cp: int = 1
    cp_method: str = "gather"

    def __post_init__(self) -> None:
        if self.cp_method not in CP_METHODS:
            raise ConfigError(f"cp_method is {self.cp_method!r}; use {', '.join(CP_METHODS[:-1])} or {CP_METHODS[-1]}")

    @property
    def divided(self) -> bool:
        """Return whether several devices work on one sequence."""
        return self.size * self.cp > 1

    @property
    def splits_time(self) -> bool:
        """Return whether activations between layers are divided along the time axis."""
        return self.sequence and self.size > 1


ONE_SHARD = TensorParallel()
"""One device."""


PINNED_HOST = "pinned_host"
"""The kind of host memory that devices copy to and from by themselves, as JAX names it."""


def memory_kinds(device: jax.Device) -> set[str]:
    """Return the kinds of memory that ``device`` reaches."""
    return {memory.kind for memory in device.addressable_memories()}


def pipeline_submeshes(
    ranks: int, *, dp: int = 1, cp: int = 1, tp: int = 1, devices: Sequence[jax.Device] | None = None
) -> tuple[Mesh, ...]:
    """Return one ``dp × cp × tp`` mesh per rank, on consecutive devices (all of ``jax.devices()`` unless given).

    Raises:
        ConfigError: a size is below 1, something is no device, or there are fewer devices than ``ranks · dp · cp · tp``.
    """
    for name, size in (("ranks", ranks), (DP, dp), (CP, cp), (TP, tp)):
        if size < 1:
            raise ConfigError(f"{name} is {size}; want at least 1")
    all_devices = list(jax.devices() if devices is None else devices)
    if strange := [k for k, device in enumerate(all_devices) if not hasattr(device, "platform")]:
        raise ConfigError(
            f"devices[{strange[0]}] is a {type(all_devices[strange[0]]).__name__}; want devices, as jax.devices() lists"
        )
    need = ranks * dp * cp * tp
    if len(all_devices) < need:
        axes = f"dp {dp}" + (f" × cp {cp}" if cp > 1 else "") + f" × tp {tp}"
        raise ConfigError(
            f"{ranks} ranks × {axes} need {need} devices, this process sees {len(all_devices)}; use fewer ranks, or "
            f"on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={need} before JAX starts"
        )
    # tp innermost: its shards exchange most, and consecutive devices are mostly the closest.
    grid = np.array(all_devices[:need], dtype=object).reshape(ranks, dp, cp, tp)
    return tuple(Mesh(grid[r], AXES) for r in range(ranks))


def with_several(mesh: AnyMesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Return those of ``axes`` along which the rank has more than one device."""
    return tuple(a for a in axes if mesh.shape[a] > 1)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Return the sharding of scalars and replicated parameters: a copy on every device of the rank."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharded(mesh: AnyMesh) -> NamedSharding:
    """Return the sharding of data, and of activations that are the same on all ``tp`` shards: axis 0 is that of the arrays
    of the devices along :data:`DATA`, one after another."""
    return device_sharded(mesh, DATA)


def device_sharded(mesh: AnyMesh, axes: Sequence[str]) -> NamedSharding:
    """Return the sharding of arrays that differ along ``axes`` of the rank: axis 0 is that of the devices' arrays one after
    another.

    An axis of size 1 is not named (but ``dp``), so that one device's arrays always lie the same way.
    """
    # Specs that differ in an axis of size 1 mean the same placement, and would compile a function twice.
    return NamedSharding(mesh, stacked([a for a in axes if a == DP or mesh.shape[a] > 1]))


def stacked(axes: Sequence[str]) -> PartitionSpec:
    """Return the spec of arrays whose axis 0 is that of the arrays of the devices along ``axes``, one after another."""
    return PartitionSpec(tuple(axes) if len(axes) > 1 else axes[0]) if axes else PartitionSpec()


def spec_of(array: jax.ShapeDtypeStruct | jax.Array) -> PartitionSpec:
    """Return the partition spec of an array on a rank."""
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding.spec


def varies_over_tp(aval: jax.ShapeDtypeStruct) -> bool:
    """Return whether an array, by its sharding, differs between ``tp`` shards."""
    spec: tuple[Any, ...] = tuple(getattr(getattr(aval, "sharding", None), "spec", ()))
    first = spec[0] if spec else None
    return TP in (first if isinstance(first, tuple) else (first,))
