"""The devices of pipeline ranks, arranged by the axes of :mod:`jaxpipe.axes` (whose values are here too), and how arrays lie.

Devices are taken in their own order with the last axis innermost and the pipeline outermost, so that tensor-parallel neighbours
are the closest devices, and then those that share a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpipe.axes import AXES, DATA, DP
from jaxpipe.axes import ONE_SHARD as ONE_SHARD
from jaxpipe.axes import RankMesh as RankMesh
from jaxpipe.axes import TensorParallel as TensorParallel
from jaxpipe.errors import ConfigError

AnyMesh = Mesh | AbstractMesh
"""A rank's devices, or as many that do not exist: stages can be traced for those, not run."""

PINNED_HOST = "pinned_host"
"""The kind of host memory that devices copy to and from by themselves, as JAX names it."""


def memory_kinds(device: jax.Device) -> set[str]:
    """Return the kinds of memory that ``device`` reaches."""
    return {memory.kind for memory in device.addressable_memories()}


def mesh_over(mesh: RankMesh, devices: Sequence[jax.Device]) -> Mesh:
    """Arrange a rank's devices by axis."""
    # tp innermost: its shards exchange most, and consecutive devices are mostly the closest.
    return Mesh(np.array(devices, dtype=object).reshape(*mesh.sizes.values()), tuple(AXES))


def mesh_over_none(mesh: RankMesh, device: AbstractDevice) -> AbstractMesh:
    """Arrange as many devices like ``device`` that do not exist: stages can be traced for them."""
    return AbstractMesh(tuple(mesh.sizes.values()), tuple(AXES), abstract_device=device)


def pipeline_submeshes(
    ranks: int, mesh: RankMesh = ONE_SHARD, *, devices: Sequence[jax.Device] | None = None
) -> tuple[Mesh, ...]:
    """Return the devices of each rank by axis: consecutive ones (of all ``jax.devices()`` unless given).

    Raises:
        ConfigError: something is no device, or there are fewer than the ranks need.
    """
    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}; want at least 1")
    all_devices = list(jax.devices() if devices is None else devices)
    if strange := [k for k, device in enumerate(all_devices) if not hasattr(device, "platform")]:
        raise ConfigError(
            f"devices[{strange[0]}] is a {type(all_devices[strange[0]]).__name__}; want devices, as jax.devices() lists"
        )
    need = ranks * mesh.num_devices
    if len(all_devices) < need:
        raise ConfigError(
            f"{mesh.after(f'{ranks} ranks')} need {need} devices, this process sees {len(all_devices)}; use fewer ranks, "
            f"or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={need} before JAX starts"
        )
    return tuple(mesh_over(mesh, all_devices[r : r + mesh.num_devices]) for r in range(0, need, mesh.num_devices))


def part_of(mesh: Mesh, part: RankMesh, index: int) -> Mesh:
    """Return the ``index``-th of the equal parts, of these sizes and of consecutive devices, of a rank's mesh."""
    return Mesh(mesh.devices.reshape(-1, *part.sizes.values())[index], mesh.axis_names)


def spanning_options(mesh: AnyMesh) -> dict[str, bool | int | str]:
    """Return what XLA must be told of a program over ``mesh`` if that has GPUs of several processes."""
    # All its processes compile the same module, and must choose the same kernels: they share the tuning, which programs of one
    # process must not (train/devices.py).
    devices: list[Any] = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
    spans = len({device.process_index for device in devices}) > 1
    return {"xla_gpu_shard_autotuning": True} if spans and devices[0].platform == "gpu" else {}


def with_several(mesh: AnyMesh, axes: Iterable[str]) -> tuple[str, ...]:
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


def varies_beside_data(aval: jax.ShapeDtypeStruct) -> bool:
    """Return whether an array, by its sharding, differs between devices that have the same data."""
    spec: tuple[Any, ...] = tuple(getattr(getattr(aval, "sharding", None), "spec", ()))
    first = spec[0] if spec else None
    return not set(DATA).issuperset(a for a in (first if isinstance(first, tuple) else (first,)) if a is not None)
