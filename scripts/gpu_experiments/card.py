"""Measures the card of today: its name, its ceilings for products and copies, its clocks. Reads NVML, sets nothing."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

from scripts.gpu_experiments.blocks import host_link
from scripts.gpu_experiments.registry import Settings

_EVERY_S = 0.02


@cache
def _nvml() -> Any:
    """Return NVML, begun, and its first device; None without it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    # Its errors have no common class where the library or the driver is missing.
    except Exception:
        return None


def card_name() -> str | None:
    """Return the name of the first GPU by NVML or nvidia-smi, not JAX, which would take its memory; or None."""
    if nvml := _nvml():
        library, device = nvml
        name = library.nvmlDeviceGetName(device)
        return name.decode() if isinstance(name, bytes) else str(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return (
            subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0].strip()
        )
    return None


def driver() -> dict[str, Any]:
    """Return the driver's version, the power limit in watts and the highest clocks in MHz; empty without NVML."""
    if (nvml := _nvml()) is None:
        return {}
    library, device = nvml
    version = library.nvmlSystemGetDriverVersion()
    return {
        "driver": version.decode() if isinstance(version, bytes) else version,
        "power_limit_w": library.nvmlDeviceGetPowerManagementLimit(device) / 1e3,
        "most_sm_mhz": library.nvmlDeviceGetMaxClockInfo(device, library.NVML_CLOCK_SM),
        "most_memory_mhz": library.nvmlDeviceGetMaxClockInfo(device, library.NVML_CLOCK_MEM),
    }


class ClockSampler:
    """Reads clock, power and temperature every 20 ms in a thread, from ``with`` to its end; reads nothing without NVML."""

    def __init__(self) -> None:
        self._readings: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> ClockSampler:
        if _nvml() is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _read(self) -> None:
        library, device = _nvml()
        while not self._stop.wait(_EVERY_S):
            with contextlib.suppress(library.NVMLError):
                clock = library.nvmlDeviceGetClockInfo(device, library.NVML_CLOCK_SM)
                power = library.nvmlDeviceGetPowerUsage(device) / 1e3
                self._readings.append((clock, power, library.nvmlDeviceGetTemperature(device, 0)))

    def summary(self) -> dict[str, Any]:
        """Return median and low decile of each reading."""
        names = ("sm_mhz", "power_w", "temperature_c")
        return {
            name: {"median": statistics.median(values), "low_decile": sorted(values)[len(values) // 10]}
            for name, values in zip(names, zip(*self._readings, strict=True), strict=False)
        }


def measure_card(settings: Settings) -> dict[str, Any]:
    """Measure the ceilings: products of 8192 x 8192 in bfloat16, on noise and on zeros, 10 and 300 of them; copies on the
    device and to pinned host memory and back. Names the device and the versions."""
    import platform

    import jax
    import jax.numpy as jnp
    import jaxlib

    from jaxpipe.cost.seconds import random_array

    device = jax.devices()[0]
    home = jax.sharding.SingleDeviceSharding(device)
    ceilings = {
        f"{data}_{count}_flops_per_s": rate
        for data in ("noise", "zeros")
        for count, rate in _product_rates(settings, data, home).items()
    }
    size = 1 << (12 if settings.tiny else 28)
    array = random_array(jax.ShapeDtypeStruct((size,), jnp.float32, sharding=home))
    scale = jax.jit(lambda x: x * 1.0001)
    ceilings["device_copy_bytes_per_s"] = 2 * array.nbytes / seconds_each(lambda: scale(array), 20)
    if (link := host_link(settings)) is not None:
        ceilings |= {
            "d2h_bytes_per_s": link.d2h.bytes_per_s,
            "h2d_bytes_per_s": link.h2d.bytes_per_s,
            "both_bytes_per_s": link.both_bytes_per_s,
        }
    return {
        "device": device.device_kind,
        "ceilings": ceilings,
        "memory": {k: v for k, v in (device.memory_stats() or {}).items() if k in ("bytes_limit", "bytes_reserved")},
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "platform": " ".join(device.client.platform_version.split()),
        },
    }


def measure_noise_product(settings: Settings) -> float:
    """Measure the sustained product of random values again: FLOP/s."""
    import jax

    rates = _product_rates(settings, "noise", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return rates[max(rates)]


def _product_rates(settings: Settings, data: str, home: Any) -> dict[int, float]:
    """Return the FLOP/s of so many products one after the other, cool first."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.cost.seconds import random_array

    n = 64 if settings.tiny else 8192
    aval = jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=home)
    array = random_array(aval) if data == "noise" else jax.device_put(jnp.zeros(aval.shape, aval.dtype), home)
    product = jax.jit(lambda x: x @ x)
    product(array).block_until_ready()
    time.sleep(0 if settings.tiny else 1)
    return {count: 2 * n**3 / seconds_each(lambda: product(array), count) for count in (10, 300)}


def seconds_each(call: Callable[[], Any], count: int) -> float:
    """Return the seconds of one of ``count`` calls back to back; few results are there at once."""
    call().block_until_ready()
    began = time.perf_counter()
    before = call()
    for _ in range(count - 1):
        following = call()
        before.block_until_ready()
        before = following
    before.block_until_ready()
    return (time.perf_counter() - began) / count
