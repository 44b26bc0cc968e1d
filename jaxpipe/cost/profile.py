"""The one maker of cost profiles of stages: seconds by op, bytes by shape, links; and the measurement of the link to the host.

Whoever knows seconds (FLOP counts, a measurement, a rehearsal, the roofline of a machine that is not here) hands them to
:func:`cost_profile`; every byte comes from the stages (:mod:`jaxpipe.cost.memory`).

The link between a device and the host (:func:`measure_host_link`): seconds = latency + bytes ÷ bandwidth, fitted over several
sizes. Copies go through ``jax.device_put`` to and from pinned host memory, as the runtime's do. Each is timed until its result
is ready. *One stream*: one copy at a time, each direction. *Two*: a copy out and a copy in of the same size, started together:
if both take about as long as the longer one alone, the directions have a lane each (``duplex``), if they take the sum, they
share one (``shared``). *Two devices*: a copy out of each of two neighbours (devices 0 and 1, 2 and 3, …) at once: if that
takes twice as long as one, the two share their lanes (a PCIe switch), and become a group.

On a CPU "pinned host memory" is the same memory: rates are those of ``memcpy``, and shared lanes are not looked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.cost.memory import compiled_bytes, passing_bytes
from jaxpipe.cost.seconds import (
    Seconds,
    Timing,
    devices_of,
    flop_seconds,
    measured_seconds,
    medians,
    ops_of,
    random_array,
    time_at_once,
    time_collectives,
    time_function,
    timed,
)
from jaxpipe.mesh import PINNED_HOST, memory_kinds
from jaxpipe.schedule import CostProfile, HostLink, Link, Schedule, op_spec, simulate
from jaxpipe.schedule.costs import PER_STAGE_FIELDS
from jaxpipe.schedule.engine import slot_lanes
from jaxpipe.stage.functions import Footprint, StageFunction, StageFunctions, footprint, total_device_bytes
from jaxpipe.stage.weave.units import UnitCosts, collectives

MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
CPU_SIZES = (MIB // 4, 1 * MIB, 4 * MIB, 16 * MIB)
_SHARED = 1.5
"""Two copies at once that take this many times one alone share a lane (1: they don't, 2: they take turns)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """``latency_s + n ÷ bytes_per_s`` seconds for n bytes. ``points``: the (bytes, seconds) it was fitted to."""

    latency_s: float
    bytes_per_s: float
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class HostLinkMeasurement:
    """``d2h`` ``h2d``: one stream, the first device. ``both_bytes_per_s``: bytes per second and direction while both copy.
    ``both_slowdown``: time of both at once ÷ time of the slower alone. ``pairs``: per pair of devices by position, time of two
    copies out at once ÷ time of one. ``platform``: of the devices."""

    d2h: Fit
    h2d: Fit
    both_bytes_per_s: float
    both_slowdown: float
    pairs: tuple[tuple[tuple[int, int], float], ...]
    platform: str

    def host_link(self) -> HostLink:
        """Return the link as the simulator takes it. The latency is the larger of the two directions'."""
        is_accelerator = self.platform != "cpu"
        return HostLink(
            d2h_bytes_per_s=self.d2h.bytes_per_s,
            h2d_bytes_per_s=self.h2d.bytes_per_s,
            latency_s=max(self.d2h.latency_s, self.h2d.latency_s),
            mode="shared" if is_accelerator and self.both_slowdown > _SHARED else "duplex",
            groups=tuple(pair for pair, slowdown in self.pairs if is_accelerator and slowdown > _SHARED),
        )

    def __str__(self) -> str:
        lines = [
            f"host link: out {self.d2h.bytes_per_s / 1e9:.2f} GB/s + {self.d2h.latency_s * 1e6:.0f} µs, "
            f"in {self.h2d.bytes_per_s / 1e9:.2f} GB/s + {self.h2d.latency_s * 1e6:.0f} µs; both at once "
            f"{self.both_bytes_per_s / 1e9:.2f} GB/s each ({self.both_slowdown:.2f} × one alone)"
        ]
        lines += [f"  devices {a} and {b} at once: {x:.2f} × one alone" for (a, b), x in self.pairs]
        return "\n".join(lines)


def measure_host_link(
    devices: Sequence[jax.Device], *, sizes: Sequence[int] | None = None, repeats: int = 5, warm_up: int = 2
) -> HostLinkMeasurement | None:
    """Measure the host link of ``devices`` (ranks in order: positions become ranks in the groups).

    Args:
        devices: the first is measured alone, neighbours in pairs.
        sizes: bytes of the copies, at least two; 1 to 256 MiB by default, less on a CPU.
        repeats: timed copies per size and direction; the median counts.
        warm_up: copies before them.

    Returns:
        The measurement, or None if these devices have no pinned host memory.
    """
    first = devices[0]
    if PINNED_HOST not in memory_kinds(first):
        return None
    sizes = tuple(sizes or (CPU_SIZES if first.platform == "cpu" else SIZES))

    def copies(*moves: tuple[jax.Array, jax.sharding.Sharding]) -> Timing:
        """Time all ``copies``, started together."""
        return timed(lambda: [jax.device_put(array, home) for array, home in moves], repeats, warm_up)

    device_home, host_home = _homes(first)
    alone_s: list[tuple[float, float]] = []
    for n in sizes:
        array = _array(n, device_home)
        on_host = jax.block_until_ready(jax.device_put(array, host_home))
        alone_s.append((copies((array, host_home)).median_s, copies((on_host, device_home)).median_s))
    largest = sizes[-1]
    # Only the largest size: at small ones latencies hide whether two copies share a lane.
    both_s = copies((array, host_home), (on_host, device_home)).median_s
    pairs = []
    for k, (a, b) in enumerate(pairwise(devices)):
        if k % 2 == 0 and a != b:
            two = [(_array(largest, _homes(d)[0]), _homes(d)[1]) for d in (a, b)]
            pairs.append(((k, k + 1), copies(*two).median_s / alone_s[-1][0]))
    return HostLinkMeasurement(
        d2h=fit([(n, out_s) for n, (out_s, _) in zip(sizes, alone_s, strict=True)]),
        h2d=fit([(n, in_s) for n, (_, in_s) in zip(sizes, alone_s, strict=True)]),
        both_bytes_per_s=largest / both_s,
        both_slowdown=both_s / max(alone_s[-1]),
        pairs=tuple(pairs),
        platform=first.platform,
    )


def fit(points: Sequence[tuple[int, float]]) -> Fit:
    """Fit the line through (bytes, seconds) points by least squares of relative errors, its latency at least 0.

    A single point gives a bandwidth without latency, and so do points through which no rising line goes.
    """
    n = np.array([p[0] for p in points], np.float64)
    t = np.array([max(p[1], 1e-9) for p in points], np.float64)
    latency, slope = 0.0, 0.0
    if len(points) > 1:
        # With bytes in units of the largest size both unknowns are seconds, and the matrix is well conditioned.
        unit = n.max()
        latency, slope = np.linalg.lstsq(np.stack([1 / t, n / unit / t], 1), np.ones(len(t)), rcond=None)[0] / [1, unit]
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, float((n / t).sum() / ((n / t) ** 2).sum())
    return Fit(float(latency), float(1 / slope), tuple((int(a), float(b)) for a, b in points))


def _homes(device: jax.Device) -> tuple[jax.sharding.Sharding, jax.sharding.Sharding]:
    """Return shardings in device memory and in pinned host memory."""
    return (
        jax.sharding.SingleDeviceSharding(device, memory_kind="device"),
        jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED_HOST),
    )


def _array(size: int, home: jax.sharding.Sharding) -> jax.Array:
    """Make an array of ``size`` bytes on the device."""
    aval = jax.ShapeDtypeStruct((max(1, size // 4),), jnp.float32, sharding=home)
    return random_array(aval).block_until_ready()


DEFAULT_FLOPS_PER_S = 1e11
_BYTES = (
    "residual_bytes", "w_residual_bytes", "cotangent_bytes", "offloadable_bytes", "boundary_bytes", "param_bytes"
)  # fmt: skip
"""Attributes that a profile, stage functions and :class:`StageSizes` have in common."""


class Exchange(NamedTuple):
    """A collective of a function: its ``primitive``, the bytes of the whole array, the ``devices`` that take part, and among
    how many consecutive devices these lie (``span``): an axis' neighbours are as far apart as inner axes have devices.
    ``of_experts``: it moves rows to experts, or their results back. ``axes``: of the mesh, of several devices."""

    primitive: str
    whole_bytes: float
    devices: int
    span: int
    of_experts: bool = False
    axes: tuple[str, ...] = ()


Exchanges = Mapping[Exchange, float]
"""Collectives of a function: how many there are of each."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """The sizes of a stage that a profile takes beside seconds. Bytes per device, as in :class:`StageFunctions`;
    ``acc_bytes_by_kind``: of gradient accumulators, by the kind of buffer; ``passing``: of the boundaries that an op passes on,
    by op. ``exchanges``: the collectives of F, B and W."""

    residual_bytes: float
    w_residual_bytes: float
    cotangent_bytes: float
    offloadable_bytes: float
    boundary_bytes: float
    param_bytes: float
    acc_bytes_by_kind: Mapping[str, float]
    passing: Mapping[str, float]
    exchanges: Mapping[str, Exchanges]

    @classmethod
    def of(cls, stage: StageFunctions) -> StageSizes:
        """Take the sizes of a stage's functions."""
        functions = {op: f for op, f in stage.functions.items() if op in ("F", "B", "W")}
        acc_bytes = dict.fromkeys(stage.layout.kinds, 0.0)
        for kind, aval in zip(stage.layout.kinds, stage.acc_avals, strict=False):
            acc_bytes[kind] += total_device_bytes([aval])
        return cls(
            **{name: float(getattr(stage, name)) for name in _BYTES},
            acc_bytes_by_kind=acc_bytes,
            passing={op: float(passing_bytes(stage, f)) for op, f in stage.functions.items()},
            exchanges={op: Counter(_exchanges(f)) for op, f in functions.items()},
        )

    @property
    def acc_bytes(self) -> float:
        """Bytes of gradient accumulators."""
        return sum(self.acc_bytes_by_kind.values())

    def exchange_s(self, op: str, seconds_of: Callable[[Exchange], float]) -> float:
        """Estimate the seconds of the collectives of one function."""
        return sum((n * seconds_of(exchange) for exchange, n in self.exchanges.get(op, {}).items()), 0.0)


def _exchanges(function: StageFunction) -> Iterator[Exchange]:
    """Yield the collectives in which at least two devices take part."""
    sizes: Mapping[str, int] = next((a.sharding.mesh.shape for a in function.avals_out if a.sharding is not None), {})
    axes = list(sizes)
    for c in collectives(function.jaxpr):
        several = [axis for axis in axes if axis in c.axes and sizes[axis] > 1]
        if several:
            span = math.prod(sizes[axis] for axis in axes[axes.index(several[0]) :])
            devices = math.prod(sizes[axis] for axis in several)
            yield Exchange(c.primitive, c.whole_bytes, devices, span, c.of_experts, tuple(several))


def sizes_of(stages: Sequence[StageFunctions]) -> tuple[StageSizes, ...]:
    """Return the sizes of each stage."""
    # A plan may name many stages and few different ones: each jaxpr is walked once.
    kinds = {id(s): StageSizes.of(s) for s in stages}
    return tuple(kinds[id(s)] for s in stages)


def cost_profile(
    stages: Sequence[StageSizes],
    seconds: Seconds,
    *,
    source: str,
    workspace: Seconds | None = None,
    state_bytes: Sequence[float] = (),
    extra: Sequence[tuple[str, tuple[float, ...]]] = (),
    **profile_fields: Any,
) -> CostProfile:
    """Make a profile of these ``seconds`` and every byte of the stages, so that the simulator's peak bounds what the runtime
    holds.

    ``temp_bytes`` of an op: ``workspace`` (bytes by op, an entry a stage; 0 without) and what the runtime holds while the op
    runs beside residuals and cotangents. Between actions ``boundary_buffers`` count what was sent and not read.
    ``optimizer_bytes``: gradient accumulators and ``state_bytes`` (by stage: masters, optimizer state, compiled code). Left to
    the caller, as it depends on the number of microbatches: batch arrays, keys and losses. ``extra``: entries of the profile's
    field beside those of ops in ``seconds``. ``profile_fields``: further fields of the profile (links; ``f_comm_s``,
    ``b_comm_s``: of the collectives of F and B, which ``seconds`` leave out).
    """
    fields: dict[str, Any] = {name: tuple(getattr(s, name) for s in stages) for name in _BYTES}
    extras = dict(extra)
    for op, row in seconds.items():
        name = op_spec(op).cost
        (fields if name in PER_STAGE_FIELDS else extras).setdefault(name, tuple(row))
    none = (0.0,) * len(stages)

    def temp(op: str) -> tuple[float, ...]:
        inside = (workspace or {}).get(op, none)
        return tuple(s.passing.get(op, 0.0) + n for s, n in zip(stages, inside, strict=True))

    return CostProfile(
        **fields,
        extra=tuple(extras.items()),
        temp_bytes=tuple((op, temp(op)) for op in dict.fromkeys(op for s in stages for op in s.passing)),
        optimizer_bytes=tuple(s.acc_bytes + n for s, n in zip(stages, state_bytes or none, strict=True)),
        boundary_buffers=True,
        collectives=tuple(max(1, round(sum(s.exchanges.get("F", {}).values()))) for s in stages),
        source=source,
        **profile_fields,
    )


def analytic_profile(stages: Sequence[StageFunctions]) -> CostProfile:
    """Make costs from shapes alone: seconds = FLOPs / :data:`DEFAULT_FLOPS_PER_S`, no workspace. Needs no device, and tells
    enough to choose an order. Collectives take what they would beside an H100 slowed down to that rate,
    latencies left out."""
    # Orders depend on ratios, so collectives must be slowed down as computation is.
    rates = replace(UnitCosts(), link_latency_s=0.0)
    slowed, sizes = rates.flops_per_s / DEFAULT_FLOPS_PER_S, sizes_of(stages)

    def comm_s(op: str) -> tuple[float, ...]:
        return tuple(slowed * s.exchange_s(op, lambda x: rates.collective_s(*x[:3])) for s in sizes)

    return cost_profile(
        sizes,
        flop_seconds(stages, DEFAULT_FLOPS_PER_S),
        source=f"analytic, {DEFAULT_FLOPS_PER_S:.3g} FLOP/s",
        f_comm_s=comm_s("F"),
        b_comm_s=comm_s("B"),
    )


def measured_comm_s(analytic: CostProfile, collectives: Mapping[int, float]) -> dict[str, Any]:
    """Return seconds of collectives by field of a profile and stage: of F as measured, ``collectives`` by stage; of B as much
    longer than ``analytic`` costs say as those of F are; of stages that were not measured at the rate of the others (none, if
    none were)."""
    analytic_s = sum(analytic.f_comm_s[s] for s in collectives)
    rate = sum(collectives.values()) / analytic_s if analytic_s else 0.0
    f_comm_s = tuple(collectives.get(s, rate * x) for s, x in enumerate(analytic.f_comm_s))
    pairs = zip(f_comm_s, analytic.f_comm_s, analytic.b_comm_s, strict=True)
    return {"f_comm_s": f_comm_s, "b_comm_s": tuple(b * (measured / f if f else rate) for measured, f, b in pairs)}


@dataclass(frozen=True, slots=True)
class StageMeasurements:
    """``timings`` and ``footprints`` (workspace, arguments, results: bytes) by (op, stage). ``host``: the host link, if it was
    measured. ``collectives``: by stage, the collectives of its F alone, where it has any. ``crowding``: as in
    the profile."""

    stages: tuple[StageFunctions, ...]
    timings: Mapping[tuple[str, int], Timing]
    footprints: Mapping[tuple[str, int], Footprint]
    host: HostLinkMeasurement | None = None
    collectives: Mapping[int, Timing] = field(default_factory=dict)
    crowding: float = 1.0

    def costs(self, link: Link | None = None) -> CostProfile:
        """Make a cost profile of the medians, with workspace if it was measured. ``link``: between any two ranks; free by
        default.

        F and B are given without their collectives, and BW as B and W are together, unless it was measured and takes less.
        """
        ops = {op for op, _ in self.timings}
        comm = measured_comm_s(analytic_profile(self.stages), medians(self.collectives))
        workspace, code = compiled_bytes(self.stages, ops, self.footprints) if self.footprints else ({}, ())
        costs = cost_profile(
            sizes_of(self.stages),
            measured_seconds(self.stages, medians(self.timings), comm),
            source=f"measured, median of {min(t.count for t in self.timings.values())}",
            workspace=workspace,
            state_bytes=code,
            link=link if link is not None else Link(),
            host=self.host.host_link() if self.host is not None else HostLink(),
            **comm,
        )
        return replace(costs, crowding=self.crowding)

    def as_json(self) -> dict[int, Any]:
        """Return everything but the host link as JSON values, by stage."""
        values_of: dict[int, Any] = {}
        for stage in self.stages:
            s = stage.stage
            ops = [op for op, at in self.timings if at == s]
            timings = [(op, astuple(self.timings[(op, s)])) for op in ops]
            footprints = [(op, astuple(self.footprints[(op, s)])) for op in ops if (op, s) in self.footprints]
            exchange = [astuple(self.collectives[s])] if s in self.collectives else []
            values_of[s] = timings, footprints, exchange, self.crowding
        return values_of

    @classmethod
    def from_json(cls, stages: Sequence[StageFunctions], json_values: Mapping[int, Any]) -> StageMeasurements:
        """Join measurements of ``stages``, each made in its own process; ``json_values``: what :meth:`as_json` returned, by
        stage."""
        return cls(
            tuple(stages),
            {(op, s): Timing(*values) for s, (timings, *_) in json_values.items() for op, values in timings},
            {
                (op, s): Footprint(*values)
                for s, (_, footprints, *_) in json_values.items()
                for op, values in footprints
            },
            collectives={s: Timing(*values) for s, (_, _, exchange, _) in json_values.items() for values in exchange},
            crowding=max(crowding for *_, crowding in json_values.values()),
        )


def measure_stages(
    stages: Sequence[StageFunctions],
    *,
    repeats: int = 5,
    warm_up: int = 1,
    memory: bool = True,
    fused: bool = True,
    too_large: Callable[[str], None] | None = None,
    vocab_size: int = 2,
    in_step: bool = False,
) -> StageMeasurements:
    """Run every function of every stage alone; on emulated devices with the other ranks as busy.

    Args:
        stages: in order.
        fused: ops that do the work of several too (BW), which schedules of B and W never run.
        repeats: timed samples per function.
        warm_up: calls before them, beside the first, which compiles.
        memory: also ask XLA for each function's workspace.
        too_large: called with a line for a function that memory does not suffice for, which is left out; without it, JAX's
            error ends this.
        vocab_size: integers of the batch are below it.
        in_step: functions run on devices of several processes, each of which measures here: all call them equally often, one
            after another, and collectives are not timed alone.
    """
    timings, footprints, exchanged = {}, {}, {}
    functions = {(op, x.stage): f for x in stages for op, f in x.functions.items() if fused or not op_spec(op).parts}
    # Devices emulated on one machine share its cores: timed alone, each rank would have the cores of all.
    shared, crowding = ({}, 1.0) if in_step else _times_at_once(functions, repeats, warm_up, vocab_size)
    for stage in stages:
        s = stage.stage
        for op, function in stage.functions.items():
            if (op, s) not in functions:
                continue
            try:
                timings[(op, s)] = shared.get((op, s)) or time_function(
                    function, repeats, warm_up, calls=1 if in_step else None, vocab_size=vocab_size
                )
            except jax.errors.JaxRuntimeError as error:
                if too_large is None or "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                too_large(f"no memory for {op} of stage {s} alone: not timed")
                continue
            if memory:
                footprints[(op, s)] = footprint(function)
        exchange = None if in_step else time_collectives(stage.functions["F"], repeats, warm_up)
        if exchange is not None:
            exchanged[s] = exchange
    return StageMeasurements(tuple(stages), timings, footprints, collectives=exchanged, crowding=crowding)


def _times_at_once(
    functions: Mapping[tuple[str, int], StageFunction], repeats: int, warm_up: int, vocab_size: int
) -> tuple[dict[tuple[str, int], Timing], float]:
    """Time functions on emulated devices of several ranks all at once, and return with it how much longer they take than those
    of one rank alone; nothing for other devices."""
    ranks: dict[frozenset[Any], list[tuple[str, int]]] = {}
    for at, function in functions.items():
        ranks.setdefault(devices_of(function), []).append(at)
    if len(ranks) < 2 or any(device.platform != "cpu" for device in frozenset().union(*ranks)):
        return {}, 1.0
    timings = time_at_once(
        [[functions[at] for at in keys] for keys in ranks.values()], repeats, warm_up, vocab_size=vocab_size
    )
    first = next(iter(ranks.values()))
    alone_s = sum(time_function(functions[at], repeats, 0, vocab_size=vocab_size).median_s for at in first)
    crowding = max(1.0, sum(t.median_s for t in timings[0]) / alone_s)
    return dict(zip(chain.from_iterable(ranks.values()), chain.from_iterable(timings), strict=True)), crowding


def at_ranks_share(costs: CostProfile, schedule: Schedule) -> CostProfile:
    """Return ``costs`` without ``crowding``: while some ranks of ``schedule`` wait, the others have their cores. Seconds of
    computation are scaled alike, so that all of them together take what they do on cores that are never idle, and a function
    no less than alone."""
    if costs.crowding == 1:
        return costs
    share = max(1 / costs.crowding, 1 - simulate(schedule, costs).bubble_rate)
    costs = replace(costs, crowding=1.0)
    specs = [op_spec(action.op) for action in schedule.actions()]
    names = {
        "f_s",
        "b_s",
        "w_s",
        "bw_s",
        "f_comm_s",
        "b_comm_s",
        *(x.cost for x in specs if x.lane == "compute" and x.cost),
    }
    for name in sorted(names):
        costs = costs.with_values(name, tuple(share * x for x in costs.values(name)))
    return costs


def with_measured_times(costs: CostProfile, seconds: Mapping[tuple[str, int], float]) -> CostProfile:
    """Replace the seconds of some (op, stage) in ``costs`` by averages of a recorded run, in which these actions ran alone: the
    seconds that ``costs`` have for waiting on tensor-parallel collectives are taken off."""

    def compute_s(op: str, stage: int, now_s: float) -> float:
        measured = seconds.get((op, stage))
        return now_s if measured is None else max(0.0, measured - slot_lanes(costs, [(op, stage)]).exposed_s)

    profile = replace(costs, source="measured in the run", crowding=1.0)
    for op in dict.fromkeys(op for op, _ in seconds):
        spec = op_spec(op)
        if spec.lane in ("compute", "net") and spec.cost:
            row = tuple(compute_s(op, s, x) for s, x in enumerate(costs.values(spec.cost)))
            profile = profile.with_values(spec.cost, row)
    return profile


def with_missing_ops(costs: CostProfile, stages: Sequence[StageFunctions]) -> CostProfile:
    """Add to ``costs`` the ops that ``stages`` have functions for and ``costs`` do not know: by FLOPs, as
    :func:`analytic_profile` has them."""
    names = {*PER_STAGE_FIELDS, *(name for name, _ in costs.extra)}
    missing = {name: op for op in ops_of(stages) if (name := op_spec(op).cost) and name not in names}
    seconds = flop_seconds(stages, DEFAULT_FLOPS_PER_S) if missing else {}
    for name, op in missing.items():
        costs = costs.with_values(name, seconds[op])
    return costs


def with_offloadable_bytes(costs: CostProfile, offloadable_bytes: tuple[float, ...]) -> CostProfile:
    """Return ``costs`` for stages that offload other bytes: seconds of O and L in proportion, or by the host link where nothing
    was offloaded before."""
    # In proportion, as measured seconds hold what the link's rate does not (many small leaves).
    linked = replace(costs, offloadable_bytes=offloadable_bytes, offload_s=(), load_s=())

    def scaled(name: str) -> tuple[float, ...]:
        rows = zip(getattr(costs, name), getattr(linked, name), offloadable_bytes, costs.offloadable_bytes, strict=True)
        return tuple(seconds * (new / old) if old else link_s for seconds, link_s, new, old in rows)

    return replace(linked, offload_s=scaled("offload_s"), load_s=scaled("load_s"))
