"""Whether the host has room for what a schedule offloads, checked before anything runs.

Needed: per rank of the process, the most bytes that its program keeps on the host (:mod:`jaxpipe.program.liveness`). Allowed: a
budget, or what is available. Not modelled: fragmentation of XLA's pool of pinned memory, and a buffer that is being loaded back
while the next offload already takes another.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.errors import ProgramError
from jaxpipe.program.ir import Program
from jaxpipe.program.liveness import host_bytes
from jaxpipe.runtime.offload import OffloadOptions

GPU_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
GPU_POOL_GB = 64.0
"""XLA's pool of pinned memory per process with GPUs, unless the environment variable says otherwise (FACTS.md)."""


def check_host_memory(programs: Sequence[Program], options: OffloadOptions, platform: str, processes: int = 1) -> None:
    """Check that what ``programs`` (of one process) offload fits into host memory, before anything runs. ``processes``: that
    share this host.

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
    """Gigabytes, not below ``num_bytes``."""
    text = f"{num_bytes / 1e9:.3g}"
    return text if float(text) * 1e9 >= num_bytes else f"{num_bytes / 1e9 * 1.01:.3g}"


def available_host_bytes(platform: str, processes: int = 1) -> tuple[float, str]:
    """Bytes of host memory that a process may still take, and what says so; infinite where nothing is known.

    The least of the machine's available memory, the limit of the control group, both divided by the ``processes`` that share
    them, and on GPUs XLA's pool of pinned memory.
    """
    share = f", shared by {processes} processes" * (processes > 1)
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
    """A number in a file of the control group; ``otherwise`` if there is none."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return otherwise
    return float(text) if text.isdigit() else otherwise
