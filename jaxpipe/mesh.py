"""The axes of a rank's devices: what each divides (:data:`AXES`), how many devices lie along it (:class:`RankMesh`), and what
it means to a parameter (:data:`BUFFER_AXES`).

The axis names are spelled here and nowhere else. Devices are taken in their own order with the last axis innermost and the
pipeline outermost, so that tensor-parallel neighbours are the closest devices, and then those that share a sequence. All else
follows from the tables: submeshes, shardings, reductions, norms, packing, ZeRO-1, and what is woven. To add an axis, add a row
to :data:`AXES`, a field to :class:`RankMesh`, and kinds of buffers that it divides to :data:`BUFFER_AXES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpipe.errors import ConfigError

DP = "dp"
CP = "cp"
TP = "tp"
Role = Literal["rows", "time", "width"]
"""What the devices along an axis divide: the rows of a microbatch, the positions of each, or a layer's work on them."""

AXES: dict[str, Role] = {DP: "rows", CP: "time", TP: "width"}
"""The axes of a rank's mesh, the outermost first."""

ROWS = tuple(axis for axis, role in AXES.items() if role == "rows")
"""The axes over which the rows of a microbatch are divided."""

DATA = tuple(axis for axis, role in AXES.items() if role != "width")
"""The axes over which the positions of a microbatch are divided: devices along them have the same parameters and other data."""

BufferKind = str
"""How a parameter buffer lies on the devices along other axes: the ``same`` on each; ``split``, a part on each along ``tp``;
``partial``, the same, but each makes a part of the gradient."""


class BufferAxes(NamedTuple):
    """The axes of a rank's mesh that matter to a parameter buffer: ``divided``, along which devices hold other parts of it, and
    ``summed``, along which they make parts of its gradient, which are added up."""

    divided: tuple[str, ...]
    summed: tuple[str, ...]


BUFFER_AXES: dict[BufferKind, BufferAxes] = {
    "same": BufferAxes((), DATA),
    "split": BufferAxes((TP,), DATA),
    "partial": BufferAxes((), (*DATA, TP)),
}
"""The axes of each kind of buffer: reductions, norms, packing, ZeRO-1 and traces read them here and in no other place."""

AnyMesh = Mesh | AbstractMesh
"""A rank's devices, or as many that do not exist: stages can be traced for those, not run."""


def exchanging() -> set[str]:
    """Return the axes over which layers exchange: those along which devices work on one row, or hold other parts of a
    parameter."""
    dividing = {axis for axes in BUFFER_AXES.values() for axis in axes.divided}
    return dividing | {axis for axis, role in AXES.items() if role != "rows"}


CP_METHODS = ("gather", "heads", "ring")
"""The ways to compute attention where sequences are divided: every shard gathers all keys and values; shards exchange times for
heads; keys and values go round a ring of shards."""


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """The devices of each rank by axis, and how its layers divide their work over them.

    ``dp``: devices that share a microbatch's rows. ``cp``: shards of each sequence (``stp.txt`` section 5.3), which meet in
    attention alone; ``cp_method``: how they do, one of :data:`CP_METHODS` (:mod:`jaxpipe.context_parallel`). ``tp``: shards of
    the layers' work. ``sequence``: between the parallel products each of these holds a part of the time axis (axis 1 of what
    flows between layers), so that norms and dropout are divided too, and all-reduces become all-gathers and reduce-scatters
    (Korthikanti et al., "Reducing Activation Recomputation", 2022). ``fused_residual``: a branch's residual is added before the
    all-reduce that ends it (``stp.txt`` equations 1 and 2). With ``tp`` 1 neither of them changes what is computed.

    Raises:
        ConfigError: an axis has no device, or ``cp_method`` is none of the methods.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    sequence: bool = False
    fused_residual: bool = False
    cp_method: str = "gather"

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise ConfigError(f"{axis} is {size}; want at least 1")
        if self.cp_method not in CP_METHODS:
            raise ConfigError(f"cp_method is {self.cp_method!r}; use {', '.join(CP_METHODS[:-1])} or {CP_METHODS[-1]}")

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Return how many devices lie along each axis, in the order of :data:`AXES`."""
        return {axis: getattr(self, axis, 1) for axis in AXES}

    @property
    def num_devices(self) -> int:
        """Return how many devices a rank has."""
        return math.prod(self.sizes.values())

    @property
    def one_row(self) -> RankMesh:
        """Return the mesh of one of the parts that a microbatch's rows are divided into."""
        one: dict[str, Any] = dict.fromkeys(ROWS, 1)
        return replace(self, **one)

    @property
    def rows(self) -> int:
        """Return into how many parts a microbatch's rows are divided."""
        return math.prod(self.sizes[axis] for axis in ROWS)

    def column(self, columns: int) -> RankMesh:
        """Return one of ``columns`` equal parts along dp."""
        return replace(self, dp=self.dp // columns)

    @property
    def size(self) -> int:
        """Return ``tp``: layers, whose argument of this type is called ``tp``, read ``tp.size``."""
        return self.tp

    @property
    def divided(self) -> bool:
        """Return whether the devices of a rank exchange anything in layers."""
        return any(self.sizes[axis] > 1 for axis in exchanging())

    @property
    def divides_parameters(self) -> bool:
        """Return whether devices hold other parts of a parameter."""
        return any(self.parts(kind) > 1 for kind in BUFFER_AXES)

    def parts(self, kind: BufferKind) -> int:
        """Return into how many parts a buffer of this kind is divided."""
        return math.prod(self.sizes[axis] for axis in BUFFER_AXES[kind].divided)

    @property
    def splits_time(self) -> bool:
        """Return whether activations between layers are divided along the time axis."""
        return self.sequence and self.tp > 1

    def over(self, devices: Sequence[jax.Device]) -> Mesh:
        """Arrange a rank's ``devices`` by axis."""
        # tp innermost: its shards exchange most, and consecutive devices are mostly the closest.
        return Mesh(np.array(devices, dtype=object).reshape(*self.sizes.values()), tuple(AXES))

    def over_none(self, device: AbstractDevice) -> AbstractMesh:
        """Arrange as many devices like ``device`` that do not exist: stages can be traced for them."""
        return AbstractMesh(tuple(self.sizes.values()), tuple(AXES), abstract_device=device)


class TensorParallel(RankMesh):
    """The earlier name of :class:`RankMesh` for layers alone, which calls ``tp`` ``size``; what it makes is a RankMesh."""

    def __new__(  # type: ignore[misc]  # another class is made
        cls,
        size: int = 1,
        sequence: bool = False,
        fused_residual: bool = False,
        cp: int = 1,
        cp_method: str = "gather",
    ) -> RankMesh:
        return RankMesh(tp=size, sequence=sequence, fused_residual=fused_residual, cp=cp, cp_method=cp_method)


ONE_SHARD = RankMesh()
"""One device."""


def rank_mesh(tp: RankMesh | int, **sizes: int) -> RankMesh:
    """Return ``tp``, which may be the size of that axis alone, with the other ``sizes`` by axis where they are not 1."""
    mesh = RankMesh(tp=tp) if isinstance(tp, int) else tp
    several: dict[str, Any] = {axis: size for axis, size in sizes.items() if size != 1}
    return replace(mesh, **several)


PINNED_HOST = "pinned_host"
"""The kind of host memory that devices copy to and from by themselves, as JAX names it."""


def memory_kinds(device: jax.Device) -> set[str]:
    """Return the kinds of memory that ``device`` reaches."""
    return {memory.kind for memory in device.addressable_memories()}


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
            f"{ranks} ranks{f' × {mesh}' if mesh.num_devices > 1 else ''} need {need} devices, this process sees "
            f"{len(all_devices)}; use fewer ranks, or on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={need} before JAX starts"
        )
    return tuple(mesh.over(all_devices[r : r + mesh.num_devices]) for r in range(0, need, mesh.num_devices))


def column_mesh(mesh: Mesh, columns: int, column: int) -> Mesh:
    """Return one of ``columns`` equal parts of a rank's mesh along dp."""
    if columns == 1:
        return mesh
    return Mesh(np.split(mesh.devices, columns, axis=mesh.axis_names.index(DP))[column], mesh.axis_names)


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
