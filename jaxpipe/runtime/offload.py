"""Moves arrays between device memory and host memory, and checks that the host has room for them.

A copy to ``pinned_host`` memory is asynchronous; dropping the source afterwards frees it once the copy is done. (Donating
across memory kinds is not implemented in XLA, and computing on a pinned array runs on the host: FACTS.md.) All leaves of an
action go in one call, each into a buffer of its own: packing them first measured slower (README). Where a backend has no
pinned host memory, copies go to NumPy arrays if the caller allows it: correct, but the dispatching thread waits for each.

:func:`check_host_memory` runs before anything else. Per rank of the process it takes the most bytes that its program keeps on
the host (:mod:`jaxpipe.program.ir`), and allows a budget, or what is available. It does not model the fragmentation of
XLA's pool of pinned memory, nor a buffer that is being loaded back while the next offload already takes another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe._jax_compat import copier
from jaxpipe.errors import ProgramError
from jaxpipe.program.ir import Program, host_bytes

PINNED_HOST = "pinned_host"

Copy = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """``fraction``: of the residual bytes that may leave, what O and L move (:mod:`jaxpipe.stage.compiled.footprint`).
    ``host_memory_bytes``: what the offloads of one process may hold (None: what the machine has available).
    ``fallback``: offload to NumPy arrays where the backend has no pinned host memory."""

    fraction: float = 1.0
    host_memory_bytes: float | None = None
    fallback: bool = False


OFFLOAD_ALL = OffloadOptions()
"""All that may leave, to pinned host memory, as much as there is available."""


def has_pinned_host(sharding: jax.sharding.Sharding) -> bool:
    """Whether all devices of ``sharding`` have pinned host memory."""
    return all(PINNED_HOST in _memory_kinds(d) for d in sharding.addressable_devices)


def _memory_kinds(device: jax.Device) -> set[str]:
    return {m.kind for m in device.addressable_memories()}


def host_copies(sharding: jax.sharding.Sharding, *, fallback: bool) -> tuple[Copy, Copy]:
    """Return two functions that start copying arrays to the host, and back to where they were.

    Each is for one list of leaves on the devices of ``sharding``, always placed alike: how they are placed is found out at the
    first call. (A function that gets its arguments back elsewhere, if only by another name, would be compiled again.)

    Raises:
        ProgramError: the devices have no pinned host memory, and ``fallback`` is not allowed.
    """
    if has_pinned_host(sharding):
        return _copy_both_ways(lambda homes: copier([s.with_memory_kind(PINNED_HOST) for s in homes]), copier)
    if not fallback:
        device: jax.Device = min(sharding.addressable_devices, key=str)
        raise ProgramError(
            f"the schedule offloads, but {device.platform} devices have no {PINNED_HOST!r} memory (they have "
            f"{', '.join(sorted(_memory_kinds(device)))}); choose a schedule without O and L actions, or allow slow copies to "
            "host arrays with --offload-fallback (offload.fallback=true)"
        )
    return _copy_both_ways(lambda homes: _to_numpy, lambda homes: lambda arrays: jax.device_put(list(arrays), homes))


Homes = list[jax.sharding.Sharding]


def _copy_both_ways(out: Callable[[Homes], Copy], back: Callable[[Homes], Copy]) -> tuple[Copy, Copy]:
    copies: list[Copy] = []

    def to_host(arrays: Sequence[Any]) -> Sequence[Any]:
        # The shardings of the first arrays are those of all. Back on the device they must be the same objects by value and by
        # name, or XLA compiles the function that reads them once more.
        if not copies:
            homes = [a.sharding for a in arrays]
            copies.extend((out(homes), back(homes)))
        return copies[0](arrays)

    def to_device(arrays: Sequence[Any]) -> Sequence[Any]:
        return copies[1](arrays)

    return to_host, to_device


def _to_numpy(arrays: Sequence[jax.Array]) -> Sequence[Any]:
    # Not np.asarray: on CPU that is a view, which keeps the device buffer alive.
    return [np.array(a) for a in arrays]


def wait_for_copies(arrays: Sequence[Any]) -> Sequence[Any]:
    """Block the calling thread until ``arrays`` are complete; the memory that they were copied from is then free."""
    for array in arrays:
        if isinstance(array, jax.Array):
            array.block_until_ready()
    return arrays


GPU_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
GPU_POOL_GB = 64.0
"""XLA's pool of pinned memory per process with GPUs, unless the environment variable says otherwise (FACTS.md)."""


def check_host_memory(programs: Sequence[Program], options: OffloadOptions, platform: str, processes: int = 1) -> None:
    """Check that what ``programs`` (of one process) offload fits into host memory. ``processes``: how many share this host.

    Raises:
        ProgramError: it does not; names what is needed at least, and what would help.
    """
    needed_bytes = host_bytes(programs)
    if not needed_bytes:
        return
    if options.host_memory_bytes is not None:
        room, what = options.host_memory_bytes, f"offload.host_memory_gb={options.host_memory_bytes / 1e9:g}"
        advice = f"raise it to at least {_rounded_up(needed_bytes)}"
    else:
        room, what = available_host_bytes(platform, processes)
        advice = "set offload.host_memory_gb to override this check"
        if what.startswith(GPU_POOL_VARIABLE):
            advice = f"set the environment variable to at least {_rounded_up(needed_bytes)}"
    if needed_bytes <= room:
        return
    fraction = options.fraction * room / needed_bytes
    raise ProgramError(
        f"the schedule offloads up to {needed_bytes / 1e9:.4g} GB to host memory at a time, but {what} allows "
        f"{room / 1e9:.4g} GB: {advice}, offload less (offload.fraction below {fraction:.2g}), or choose another schedule"
    )


def _rounded_up(num_bytes: float) -> str:
    """Format gigabytes, not below ``num_bytes``: a reader who sets exactly this must not be refused again."""
    text = f"{num_bytes / 1e9:.3g}"
    return text if float(text) * 1e9 >= num_bytes else f"{num_bytes / 1e9 * 1.01:.3g}"


def available_host_bytes(platform: str, processes: int = 1) -> tuple[float, str]:
    """Return the bytes of host memory that a process may still take, and what says so; infinite where nothing is known.

    The least of the machine's available memory, the limit of the control group, both divided by the ``processes`` that share
    them, and on GPUs XLA's pool of pinned memory.
    """
    share = f", shared by {processes} processes" * (processes > 1)
    # Both versions of control groups, as a container shows the one its host has. Files that are not there read as no limit.
    rooms = [(_available_memory() / processes, f"the memory available on this machine{share}")]
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        left = _number(limit) - _number(usage, 0.0)
        rooms.append((left / processes, f"the memory limit of this container{share}"))
    if platform in ("gpu", "cuda", "rocm"):
        pool = os.environ.get(GPU_POOL_VARIABLE, "")
        gb = float(pool) if pool.replace(".", "", 1).isdigit() else GPU_POOL_GB
        rooms.append((gb * 1e9, f"{GPU_POOL_VARIABLE} ({gb:g})"))
    return min(rooms)


def _available_memory() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    sizes = [float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else float("inf")


def _number(name: str, otherwise: float = float("inf")) -> float:
    """Read a number in a file of the control group; ``otherwise`` if there is none."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return otherwise
    return float(text) if text.isdigit() else otherwise
