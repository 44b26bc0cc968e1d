"""Measures the link between a device and the host: seconds = latency + bytes ÷ bandwidth, fitted over several sizes.

Copies go through ``jax.device_put`` to and from pinned host memory, as the runtime's do. Each is timed until its result is
ready. *One stream*: one copy at a time, each direction. *Two*: a copy out and a copy in of the same size, started together:
if both take about as long as the longer one alone, the directions have a lane each (``duplex``), if they take the sum, they
share one (``shared``). *Two devices*: a copy out of each of two neighbours (devices 0 and 1, 2 and 3, …) at once: if that
takes twice as long as one, the two share their lanes (a PCIe switch), and become a group.

On a CPU "pinned host memory" is the same memory: rates are those of ``memcpy``, and shared lanes are not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.cost.random_arrays import random_array
from jaxpipe.cost.seconds import Timing, timed
from jaxpipe.schedule import HostLink

MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
CPU_SIZES = (MIB // 4, 1 * MIB, 4 * MIB, 16 * MIB)
PINNED_HOST, DEVICE = "pinned_host", "device"
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


def has_pinned_host(device: jax.Device) -> bool:
    """Whether the device can copy to pinned host memory."""
    return PINNED_HOST in {m.kind for m in device.addressable_memories()}


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
    if not has_pinned_host(first):
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
        jax.sharding.SingleDeviceSharding(device, memory_kind=DEVICE),
        jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED_HOST),
    )


def _array(size: int, home: jax.sharding.Sharding) -> jax.Array:
    """Make an array of ``size`` bytes on the device."""
    aval = jax.ShapeDtypeStruct((max(1, size // 4),), jnp.float32, sharding=home)
    return random_array(aval).block_until_ready()
