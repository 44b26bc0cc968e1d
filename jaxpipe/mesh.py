"""Where ranks live: one submesh per pipeline rank, with axes ``dp`` (data) and ``tp`` (tensor).

The axis names are spelled here and nowhere else. Devices are taken in their own order with ``tp`` innermost and the pipeline
outermost, so that tensor-parallel neighbours are the closest devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpipe.errors import ConfigError

DP = "dp"
TP = "tp"
AXES = (DP, TP)
AnyMesh = Mesh | AbstractMesh
"""A rank's devices, or as many that do not exist: stages can be traced for those, not run."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """How the layers of a rank divide their work over the axis ``tp``.

    ``size``: shards. ``sequence``: between the parallel products each shard holds a part of the time axis (axis 1 of what flows
    between layers), so that norms and dropout are divided too, and all-reduces become all-gathers and reduce-scatters
    (Korthikanti et al., "Reducing Activation Recomputation", 2022). ``fused_residual``: a branch's residual is added before the
    all-reduce that ends it (``stp.txt`` equations 1 and 2). With size 1 nothing of this changes what is computed.
    """

    size: int = 1
    sequence: bool = False
    fused_residual: bool = False

    @property
    def splits_time(self) -> bool:
        """Whether what flows between layers is divided along the time axis."""
        return self.sequence and self.size > 1


ONE_SHARD = TensorParallel()
"""No tensor parallelism."""


def pipeline_submeshes(
    ranks: int, *, dp: int = 1, tp: int = 1, devices: Sequence[jax.Device] | None = None
) -> tuple[Mesh, ...]:
    """One ``dp × tp`` mesh per rank, on consecutive devices (all of ``jax.devices()`` unless given).

    Raises:
        ConfigError: a size is below 1, something is no device, or there are fewer devices than ``ranks · dp · tp``.
    """
    for name, size in (("ranks", ranks), ("dp", dp), ("tp", tp)):
        if size < 1:
            raise ConfigError(f"{name} is {size}; want at least 1")
    have = list(jax.devices() if devices is None else devices)
    if strange := [k for k, device in enumerate(have) if not hasattr(device, "platform")]:
        raise ConfigError(
            f"devices[{strange[0]}] is a {type(have[strange[0]]).__name__}; want devices, as jax.devices() lists"
        )
    need = ranks * dp * tp
    if len(have) < need:
        raise ConfigError(
            f"{ranks} ranks × dp {dp} × tp {tp} need {need} devices, this process sees {len(have)}; use fewer ranks, or on a "
            f"CPU set XLA_FLAGS=--xla_force_host_platform_device_count={need} before JAX starts"
        )
    grid = np.array(have[:need], dtype=object).reshape(ranks, dp, tp)
    return tuple(Mesh(grid[r], AXES) for r in range(ranks))


def replicated(mesh: AnyMesh, memory_kind: str | None = None) -> NamedSharding:
    """The sharding of scalars, and of parameters that are whole on every shard: a copy on every device of the rank."""
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)


def batch_sharded(mesh: AnyMesh, memory_kind: str | None = None) -> NamedSharding:
    """The sharding of data, and of activations that are the same on all ``tp`` shards: axis 0 split over ``dp``."""
    return NamedSharding(mesh, PartitionSpec(DP), memory_kind=memory_kind)


def device_sharded(mesh: AnyMesh, axes: Sequence[str], memory_kind: str | None = None) -> NamedSharding:
    """The sharding of what differs along ``axes`` of the rank: axis 0 is that of the devices' arrays one after another.

    An axis of size 1 is not named (but ``dp``), so that one device's arrays always lie the same way.
    """
    named = tuple(a for a in axes if a == DP or mesh.shape[a] > 1)
    spec = PartitionSpec(named if len(named) > 1 else named[0]) if named else PartitionSpec()
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def spec_of(array: jax.ShapeDtypeStruct | jax.Array) -> PartitionSpec:
    """How an array that lies on a rank is divided over it."""
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding.spec


def varies_over_tp(aval: jax.ShapeDtypeStruct) -> bool:
    """Whether an array, by its sharding, holds something else on each ``tp`` shard."""
    spec: tuple[Any, ...] = tuple(getattr(getattr(aval, "sharding", None), "spec", ()))
    first = spec[0] if spec else None
    return TP in (first if isinstance(first, tuple) else (first,))
