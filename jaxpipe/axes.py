"""The axes of a rank's devices: what each divides (:data:`AXES`), how many devices lie along it (:class:`RankMesh`), and what
it means to a parameter (:data:`BUFFER_AXES`).

The axis names are spelled here and nowhere else. All else follows from the tables: submeshes, shardings, reductions, norms,
packing, ZeRO-1, what is woven, and how many devices a config needs. To add an axis, add a row to :data:`AXES`, a field to
:class:`RankMesh`, and kinds of buffers that it divides to :data:`BUFFER_AXES`; if its devices are some of another axis', a row
to :data:`WITHIN`. Configs read this: no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jaxpipe.errors import ConfigError
from jaxpipe.text import nearest_divisors

DP = "dp"
EP = "ep"
CP = "cp"
TP = "tp"
Role = Literal["rows", "time", "width"]
"""The thing that devices along an axis divide: a microbatch's rows, the positions of each, or a layer's work on them."""

AXES: dict[str, Role] = {DP: "rows", EP: "rows", CP: "time", TP: "width"}
"""The axes of a rank's mesh, the outermost first."""

WITHIN: dict[str, str] = {EP: DP}
"""Axes whose devices are some of those that a user gives another axis: a rank's mesh has ``dp / ep`` along ``dp``. So ``ep``
moves experts and never rows: which device has which rows, and which random keys, is the same for any ``ep``."""

ROWS = tuple(axis for axis, role in AXES.items() if role == "rows")
"""The axes over which the rows of a microbatch are divided."""

TIME = tuple(axis for axis, role in AXES.items() if role == "time")
"""The axes over which the positions of a row are divided."""

DATA = (*ROWS, *TIME)
"""The axes over which the positions of a microbatch are divided: devices along them have the same parameters and other data."""

BufferKind = str
"""How a parameter buffer lies on the devices along other axes: the ``same`` on each; ``split``, a part on each along ``tp``;
``partial``, the same, but each makes a part of the gradient; ``experts``, other experts on each along ``ep`` and ``tp``."""


class BufferAxes(NamedTuple):
    """The axes of a rank's mesh that matter to a parameter buffer: ``divided``, along which devices hold other parts of it, and
    ``summed``, along which they make parts of its gradient, which are added up."""

    divided: tuple[str, ...]
    summed: tuple[str, ...]


BUFFER_AXES: dict[BufferKind, BufferAxes] = {
    "same": BufferAxes((), DATA),
    "split": BufferAxes((TP,), DATA),
    "partial": BufferAxes((), (*DATA, TP)),
    # An expert sees the tokens of all devices along ep and tp (which hold other times under sequence parallelism), so that its
    # gradient is whole but for the rest of the data.
    "experts": BufferAxes((EP, TP), tuple(axis for axis in DATA if axis != EP)),
}
"""The axes of each kind of buffer: reductions, norms, packing, ZeRO-1 and traces read them here and in no other place."""


def within_problem(axis: str, size: int, other_size: int, prefix: str = "") -> str:
    """Return what is wrong where ``size`` does not divide the number of devices of the axis that this one is within."""
    other, use = f"{prefix}{WITHIN[axis]}", nearest_divisors(other_size, size)
    return (
        f"{prefix}{axis}={size} does not divide {other}={other_size}: use {use}, or make {other} a multiple of {size}"
    )


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

    ``dp``: devices that share a microbatch's rows. ``ep``: how many of them share the experts of a layer, each with other ones
    (:mod:`jaxpipe.experts`). ``cp``: shards of each sequence (``stp.txt`` section 5.3), which meet in attention alone;
    ``cp_method``: how they do, one of :data:`CP_METHODS` (:mod:`jaxpipe.context_parallel`). ``tp``: shards of the layers' work.
    ``sequence``: between the parallel products each of these holds a part of the time axis (axis 1 of what flows between
    layers), so that norms and dropout are divided too, and all-reduces become all-gathers and reduce-scatters (Korthikanti et
    al., "Reducing Activation Recomputation", 2022). ``fused_residual``: a branch's residual is added before the all-reduce that
    ends it (``stp.txt`` equations 1 and 2). With ``tp`` 1 neither of them changes what is computed.

    Raises:
        ConfigError: an axis has no device, or does not divide that which it is within (:data:`WITHIN`); or ``cp_method`` is
            none of the methods.
    """

    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    sequence: bool = False
    fused_residual: bool = False
    cp_method: str = "gather"

    def __post_init__(self) -> None:
        settings = self.settings
        for axis, size in settings.items():
            if size < 1:
                raise ConfigError(f"{axis} is {size}; want at least 1")
        for axis, other in WITHIN.items():
            if settings[other] % settings[axis]:
                raise ConfigError(within_problem(axis, settings[axis], settings[other]))
        if self.cp_method not in CP_METHODS:
            raise ConfigError(f"cp_method is {self.cp_method!r}; use {', '.join(CP_METHODS[:-1])} or {CP_METHODS[-1]}")

    def __str__(self) -> str:
        several = {axis: size for axis, size in self.settings.items() if size > 1}
        factors = " × ".join(f"{axis} {size}" for axis, size in several.items() if axis not in WITHIN)
        return (factors or "1 device") + "".join(f" ({axis} {several[axis]})" for axis in WITHIN if axis in several)

    @property
    def settings(self) -> dict[str, int]:
        """Return the number that a user gives each axis."""
        return {axis: getattr(self, axis, 1) for axis in AXES}

    @property
    def sizes(self) -> dict[str, int]:
        """Return how many devices lie along each axis, in the order of :data:`AXES`."""
        sizes = self.settings
        for axis, other in WITHIN.items():
            sizes[other] //= sizes[axis]
        return sizes

    def resized(self, sizes: Mapping[str, int]) -> RankMesh:
        """Return this mesh with other numbers of devices along some axes."""
        fields: dict[str, Any] = {**self.sizes, **sizes}
        for axis, other in WITHIN.items():
            fields[other] *= fields[axis]
        return replace(self, **{axis: size for axis, size in fields.items() if hasattr(self, axis)})

    def after(self, text: str) -> str:
        """Return a product of ``text``, such as the number of ranks, and the axes of several devices."""
        return f"{text} × {self}" if self.num_devices > 1 else text

    @property
    def num_devices(self) -> int:
        """Return how many devices a rank has."""
        return math.prod(self.sizes.values())

    @property
    def one_row(self) -> RankMesh:
        """Return the mesh of one of the parts that a microbatch's rows are divided into."""
        return self.resized(dict.fromkeys(ROWS, 1))

    @property
    def one_replica(self) -> RankMesh:
        """Return the mesh of devices that hold each parameter once, or exchange in layers: without those that only have other
        rows."""
        return self.resized({axis: 1 for axis in ROWS if axis not in exchanging()})

    @property
    def rows(self) -> int:
        """Return into how many parts a microbatch's rows are divided."""
        return math.prod(self.sizes[axis] for axis in ROWS)

    def cut(self, parts: int) -> dict[str, int]:
        """Return into how many parts each axis is cut where the devices, in their order, are cut into ``parts`` equal meshes.

        Raises:
            ConfigError: they can't be.
        """
        cut: dict[str, int] = {}
        left = parts
        for axis, size in self.sizes.items():
            # The outermost axis first: of an inner one only whole lines of devices are consecutive.
            cut[axis] = left if size % left == 0 else size
            if left % cut[axis]:
                break
            left //= cut[axis]
        else:
            if left == 1:
                return cut
        raise ConfigError(f"{self} is not cut into {parts} equal parts")

    def column(self, columns: int) -> RankMesh:
        """Return one of ``columns`` equal parts: the devices of one of the processes that share the rank."""
        cut = self.cut(columns)
        return self.resized({axis: size // cut[axis] for axis, size in self.sizes.items()})

    def function_part(self, columns: int) -> RankMesh:
        """Return the part on which a stage function runs where ``columns`` processes share the rank: along the axes whose
        devices exchange in layers it is whole, and may be of several processes."""
        cut = self.cut(columns)
        return self.resized({axis: self.sizes[axis] // cut[axis] for axis in ROWS if axis not in exchanging()})

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

    def divided_axes(self, kind: BufferKind) -> tuple[str, ...]:
        """Return the axes of several devices along which a buffer of this kind is divided."""
        return tuple(axis for axis in BUFFER_AXES[kind].divided if self.sizes[axis] > 1)

    def tells_apart(self, kind: BufferKind) -> bool:
        """Return whether a buffer of this kind lies, or its gradient is made, otherwise than that of kind ``same``."""
        divided, summed = BUFFER_AXES[kind]
        return any(self.sizes[axis] > 1 for axis in (*divided, *(set(summed) - set(DATA))))

    def parts(self, kind: BufferKind) -> int:
        """Return into how many parts a buffer of this kind is divided."""
        return math.prod(self.sizes[axis] for axis in BUFFER_AXES[kind].divided)

    @property
    def splits_time(self) -> bool:
        """Return whether activations between layers are divided along the time axis."""
        return self.sequence and self.tp > 1

    @property
    def time_axes(self) -> tuple[str, ...]:
        """Return the axes of several devices that have other times of one row between layers."""
        axes = (*TIME, TP) if self.splits_time else TIME
        return tuple(axis for axis in axes if self.sizes[axis] > 1)


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
