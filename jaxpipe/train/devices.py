"""Choosing devices for a run, and saying in one line what went wrong on them.

CPU devices are emulated where JAX's default backend is the CPU, or where ``run.platform=cpu`` asks for it; never in place of
accelerators that are too few.

XLA reads its flags when JAX first looks for devices, so :func:`request_devices` must come before anything that does. It does
not import JAX.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.metadata
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxpipe.axes import DP, ONE_SHARD, TP, WITHIN, RankMesh
from jaxpipe.errors import AgreedError, ConfigError, JaxpipeError, RunError, short_message
from jaxpipe.runtime.peers import find_peers
from jaxpipe.runtime.processes import Processes, ProcessGroup, SingleProcess
from jaxpipe.text import format_bytes

if TYPE_CHECKING:
    import jax

    from jaxpipe.cost.memory import MemoryReport
    from jaxpipe.train.settings.sections import RunConfig

_FLAG = "--xla_force_host_platform_device_count"
_NO_FUSED_SUMS = "--xla_cpu_experimental_ynn_fusion_type="
"""Switches off fused reductions, which give wrong sums for some shapes with jaxlib 0.10 (jax#39103), unless XLA_FLAGS names the
flag; without them a step takes about 10% more."""
_NUMBERS = (
    "jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_threefry_gpu_kernel_lowering",
    "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_random_seed_offset", "jax_softmax_custom_jvp",
    "jax_exec_time_optimization_effort", "jax_optimization_level", "jax_disable_most_optimizations",
)  # fmt: skip
_NUMBERS_OF = ("NVIDIA_TF32_OVERRIDE",)
"""Variables that libraries behind XLA read."""
_THREADS = "NPROC"
"""The threads of XLA's pools on a CPU: as many as cores or emulated devices, where the environment has none."""
_MALLOC = {-4: 0, -1: -1, -2: 256 << 20}
"""Options of mallopt(3) and values: M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD."""
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables that say which part of a GPU's memory JAX gives itself, the newer name first; JAX refuses both together."""
_DEFAULT_FRACTION = 0.75
_AUTOTUNING = "autotuning.txt"
"""The file of a run directory with the kernels that XLA chose; by its suffix XLA writes text."""
_NO_NUMBERS = (
    _FLAG, "--xla_dump", "--xla_gpu_shard_autotuning=", "--xla_gpu_dump_autotune_results_to=",
    "--xla_gpu_load_autotune_results_from=",
)  # fmt: skip
"""Flags that name a path, or a number of devices or processes: two runs that give the same bits may differ in them."""
_MAX_EMULATED = 512
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_LESS_STATE = "more pipeline.ranks or tp, pipeline.zero1 with dp, run.dtype=bfloat16, or a smaller model"
_LESS_WORK = "a smaller run.batch, more microbatches or ranks, pipeline.recompute=full, or a schedule that offloads"


def request_devices(count: int, platform: Literal["auto", "cpu", "gpu"] = "auto", *, processes: int = 1) -> None:
    """Ask XLA to emulate at least ``count`` CPU devices (it changes nothing for accelerators), and pick the platform.
    ``processes``: of the run; ``count`` is of this one.

    Raises:
        ConfigError: ``count`` is absurd.
    """
    if not 1 <= count <= _MAX_EMULATED:
        raise ConfigError(f"{count} devices asked for; want 1 to {_MAX_EMULATED}")
    flags = os.environ.get("XLA_FLAGS", "")
    flag_count = re.search(rf"{_FLAG}=(\d+)", flags)
    if flag_count is None:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()
    # Never lowered: other code of the process may count on what its environment says.
    elif int(flag_count[1]) < count:
        os.environ["XLA_FLAGS"] = flags.replace(flag_count[0], f"{_FLAG}={count}")
    if importlib.metadata.version("jaxlib").startswith("0.10.") and _NO_FUSED_SUMS not in flags:
        os.environ["XLA_FLAGS"] += f" {_NO_FUSED_SUMS}"
    # A call keeps a thread per device while too many are under way; what other processes send needs threads too, or all
    # wait.
    if processes > 1:
        os.environ.setdefault(_THREADS, str(max(count, len(os.sched_getaffinity(0))) + count))
    if platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"


def join(devices: int = 1, platform: Literal["auto", "cpu", "gpu"] = "auto", *, wait_s: float = 300.0) -> Processes:
    """Join the processes in which a launcher started this script, and start JAX in them; call it before anything that looks
    for devices. For :class:`~jaxpipe.Trainer` (``processes=``); when the script ends, it waits for the others, and if it
    fails, they end.

    The processes are found as ``jaxpipe train`` finds them (:mod:`jaxpipe.runtime.peers`): torchrun, ``srun``, Kubernetes, Open
    MPI, or ``JAXPIPE_COORDINATOR``, ``JAXPIPE_PROCESSES`` and ``JAXPIPE_PROCESS``. Without any this one is the only one.

    Args:
        devices: how many CPU devices this process emulates if it has no others.
        platform: ``"cpu"`` where accelerators are not to be used.
        wait_s: how long to wait for the others.

    Raises:
        ConfigError: half of what names the processes is missing, or the others did not come.
        AgreedError: the processes can't reach each other.
    """
    peers = find_peers((None, None, None))
    processes = SingleProcess() if peers is None else ProcessGroup(peers, wait_s)
    request_devices(devices, platform, processes=processes.number)
    if processes.number > 1:
        from jaxpipe.train.settings.sections import MachineConfig, RunConfig

        request_gpus(RunConfig(machine=MachineConfig(platform=platform)), processes=processes.number)
        processes.start_jax()
        # After JAX's own, so that it runs before them: they wait for processes that may be waiting for this one.
        atexit.register(_leave, processes)
    return processes


def _leave(processes: Processes) -> None:
    """Wait for the other processes at the end of a script, or end them if an exception ended it."""
    error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, AgreedError):
        processes.leave()
    else:
        sys.stderr.flush()
        code = error.exit_code if isinstance(error, JaxpipeError) else 1
        processes.end(f"failed: {type(error).__name__}: {short_message(error)}", code)


def memory_fraction(setting: float | None = None) -> float:
    """Return the part of a GPU's memory that JAX gives itself: what the environment says, else ``setting``
    (``run.memory_fraction``), else JAX's default.

    Raises:
        ConfigError: the environment says no such part, or another one than ``setting``.
    """
    name = next((name for name in _FRACTIONS if os.environ.get(name)), None)
    if name is None:
        return _DEFAULT_FRACTION if setting is None else setting
    try:
        fraction = float(os.environ[name])
    except ValueError:
        fraction = 0.0
    # Above 1 JAX pages to the host's memory, which no prediction covers.
    if not 0 < fraction <= 1:
        raise ConfigError(f"{name}={os.environ[name]!r}: want a part of a GPU's memory, above 0 and at most 1")
    if setting is not None and fraction != setting:
        raise ConfigError(
            f"run.memory_fraction={setting:g}, but the environment says {name}={fraction:g}: set only one"
        )
    return fraction


def request_memory(setting: float | None) -> None:
    """Have JAX give itself ``setting`` (``run.memory_fraction``) of a GPU's memory where the environment is silent; it changes
    nothing once JAX has looked for devices."""
    if setting is not None and not any(os.environ.get(name) for name in _FRACTIONS):
        os.environ[_FRACTIONS[0]] = f"{setting:g}"


def request_gpus(run: RunConfig, *, processes: int = 1, mine: int = 0) -> None:
    """Set what XLA and NCCL read of the environment where that is silent, as ``run`` wants it, before JAX looks for devices;
    it changes nothing for CPUs. ``processes``: of the run, of which this is ``mine``.

    Raises:
        ConfigError: as :func:`memory_fraction`, or ``run.deterministic`` with a folder whose name XLA_FLAGS can't hold.
    """
    machine = run.machine
    memory_fraction(machine.memory_fraction)
    request_memory(machine.memory_fraction)
    if machine.platform == "cpu":
        return
    if processes > 1:
        # Most programs are of one process, and sharing their tuning would wait for processes that compile other programs
        # (public post-mortems: a hang). Those that span several turn it on (mesh.py).
        _add_flag("--xla_gpu_shard_autotuning", "false")
        if machine.transport == "nccl":
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if machine.deterministic:
        results = Path(run.out_dir, _AUTOTUNING).absolute()
        if re.search(r"[\s'\"]", str(results)):
            raise ConfigError(
                f"run.deterministic names {str(results)!r} in XLA_FLAGS: choose a run.out_dir without spaces"
            )
        _add_flag("--xla_gpu_deterministic_ops", "true")
        # Process 0's choices go to all, and each keeps those for programs that are its alone. In a file of its own: XLA writes
        # after each program, and a process that reads meanwhile would find half of it.
        own = results
        if mine:
            own = results.with_stem(f"{results.stem}-{mine}")
            own.parent.mkdir(parents=True, exist_ok=True)
            if results.exists() and not own.exists():
                shutil.copyfile(results, own)
        if own.exists():
            _add_flag("--xla_gpu_load_autotune_results_from", str(own))
        _add_flag("--xla_gpu_dump_autotune_results_to", str(own))


def _add_flag(name: str, value: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if f"{name}=" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={value}".strip()


def limit_bytes(device: jax.Device) -> int | None:
    """Return the bytes that JAX's allocator may fill on a device; None where the backend does not tell (CPUs)."""
    return (device.memory_stats() or {}).get("bytes_limit")


def limit_line(device: jax.Device) -> str:
    """Write how much of a device's memory JAX may fill, in a line; nothing where the backend tells no limit."""
    most = limit_bytes(device)
    return "" if most is None else f"JAX may fill {format_bytes(most, binary=True)} of a device (run.memory_fraction)"


def limit_remark(report: Callable[[], MemoryReport], devices: Sequence[jax.Device]) -> str:
    """Write that a step is predicted to need more than JAX's allocator may fill, in a line; nothing where it fits, or the
    backend tells no limit. ``report`` is called if it tells one; ``devices``: one of each of its ranks."""
    limits = [limit_bytes(device) for device in devices]
    if all(most is None for most in limits):
        return ""
    pairs = [(rank, most) for rank, most in zip(report().ranks, limits, strict=True) if most is not None]
    rank, most = max(pairs, key=lambda pair: pair[0].peak_bytes - pair[1])
    if rank.peak_bytes <= most:
        return ""
    peak, room = (format_bytes(n, binary=True) for n in (rank.peak_bytes, most))
    return (
        f"warning: rank {rank.rank} is predicted to need {peak} and workspace, and JAX may fill {room} of its device: use "
        f"{_LESS_WORK}, or a larger run.memory_fraction"
    )


def number_settings() -> dict[str, str]:
    """JAX's settings that change the numbers of a run, those of the environment too. Compares and keeps no path and no count of
    devices. Imports JAX."""
    import jax

    settings = {name: str(getattr(jax.config, name)) for name in _NUMBERS if hasattr(jax.config, name)}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_NO_NUMBERS)]
    return (
        settings
        | {"XLA_FLAGS": " ".join(sorted(set(flags)))}
        | {name: os.environ.get(name, "") for name in _NUMBERS_OF}
    )


def keep_heap() -> bool:
    """Have glibc's malloc keep what XLA frees on a CPU, and not hand it back to the system to be asked for page by page in the
    next call. Whether it does: not where ``MALLOC_…`` or ``GLIBC_TUNABLES`` settle it, nor with another C library."""
    settled = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    mallopt = None if settled else getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) for option, value in _MALLOC.items())


def cpu_settings(keeps_heap: bool) -> str:
    """Return what a run on emulated devices has set, in a line; ``keeps_heap``: as :func:`keep_heap` says."""
    heap = "malloc keeps what is freed" if keeps_heap else "malloc as the environment has it"
    threads = f"; {_THREADS}={os.environ[_THREADS]}" if _THREADS in os.environ else ""
    return f"on a CPU: {heap}; XLA_FLAGS={os.environ.get('XLA_FLAGS', '')}{threads}"


def find_devices(
    count: int, platform: Literal["auto", "cpu", "gpu"] = "auto", mesh: RankMesh = ONE_SHARD
) -> Sequence[jax.Device]:
    """``count`` devices: of JAX's default kind, or of the one that ``platform`` names. ``mesh``: the config's, for
    advice.

    Raises:
        ConfigError: there are not enough; names ways to use those that there are. CPU devices never stand in for others.
    """
    import jax

    if platform == "gpu":
        try:
            devices = jax.devices("gpu")
        except RuntimeError:
            raise ConfigError(
                "run.platform=gpu, but JAX sees no GPU: install jaxpipe[cuda13] (or [cuda12]), or use auto"
            ) from None
    else:
        devices = jax.devices("cpu" if platform == "cpu" else None)
    if len(devices) >= count:
        return devices[:count]
    kind = devices[0].platform
    emulated = "set run.platform=cpu to emulate them, slowly"
    if kind == "cpu":
        emulated = f"before JAX starts set XLA_FLAGS={_FLAG}={count}"
    raise ConfigError(
        f"{count} devices are needed and JAX sees {len(devices)} ({kind}); {_factorings(len(devices), mesh)}, or {emulated}"
    )


def _factorings(count: int, mesh: RankMesh) -> str:
    """Advice: the ways to use all of ``count`` devices, those with this ``tp`` first; at most four. With the other axes as they
    are where that divides the devices, and without them where not."""
    others = {axis: size for axis, size in mesh.settings.items() if axis not in (DP, TP, *WITHIN) and size > 1}
    if count % math.prod(others.values()):
        others = dict.fromkeys(others, 1)
    each = count // math.prod(others.values())
    sizes = range(1, each + 1)
    ways = [(each // (t * d), t, d) for t in sizes for d in sizes if each % (t * d) == 0]
    nearest = sorted(ways, key=lambda way: (way[1] != mesh.tp, way[1], way[2]))[:4]
    flags = "--pp --tp --dp" + "".join(f" with --{axis} {size}" for axis, size in others.items())
    return f"ways to use these ({flags}): " + ", ".join(f"{p}×{t}×{d}" for p, t, d in nearest)


def peak_bytes_in_use(devices: Iterable[jax.Device], more_than: int = 0) -> int | None:
    """Return the most that arrays and programs have filled on one of the devices since this process began; None where that is
    not ``more_than`` so many bytes, or the backend does not count (CPUs)."""
    peaks = ((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices)
    return max((x for x in peaks if x > more_than), default=None)


@contextmanager
def device_errors(
    doing: str, memory: Callable[[], MemoryReport] | None = None, use: str = _LESS_WORK
) -> Iterator[None]:
    """Errors of a device inside the block become one line that begins with ``doing``. ``memory``: the prediction of what a step
    holds, for advice where memory ran out; ``use``: the advice without one.

    Raises:
        RunError: instead of JAX's error.
    """
    try:
        yield
    except Exception as error:
        if not of_device(error):
            raise
        raise RunError(
            f"{doing}: a device failed: {short_message(error)}{memory_advice(error, memory, use)}"
        ) from error


def of_device(error: Exception) -> bool:
    """Return whether JAX raised it for what happened on a device; memory that ran out may be told as any type of error."""
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError) or (
        _OUT_OF_MEMORY in str(error) and not isinstance(error, JaxpipeError)
    )


def memory_advice(error: Exception, memory: Callable[[], MemoryReport] | None, use: str = _LESS_WORK) -> str:
    """If ``error`` says that memory ran out, what to do about it, by what takes most of it, or ``use``; else nothing."""
    if _OUT_OF_MEMORY not in str(error):
        return ""
    try:
        fullest = max(memory().ranks, key=lambda r: r.peak_bytes) if memory is not None else None
    except Exception:  # nothing can be predicted yet, or not in the memory that is left
        fullest = None
    if fullest is None:
        return f"; out of memory{_allowed()}: use {use}"
    state = sum(fullest.by_kind.get(k, 0) for k in ("parameters", "gradients", "masters", "optimizer"))
    of = f"of {format_bytes(fullest.peak_bytes, binary=True)} predicted on rank {fullest.rank}"
    if 2 * state > fullest.peak_bytes:
        what, use = "parameters, gradients and optimizer state", _LESS_STATE
    else:
        what, state, use = "activations and workspace", fullest.peak_bytes - state, _LESS_WORK
    return f"; out of memory: {what} take {format_bytes(state, binary=True)} {of}{_allowed()}: use {use}"


def _allowed() -> str:
    import jax

    most = limit_bytes(jax.local_devices()[0])
    return "" if most is None else f", of {format_bytes(most, binary=True)} that JAX may fill (run.memory_fraction)"
