"""JAX's persistent compilation cache, on by default: a run that starts again loads the programs that it compiled before.

They are machine code, which whoever can write to the folder could replace: it is this user's alone. Each JAX and each kind of
processor has a folder of its own, as a home folder may be seen from several machines. Nothing is ever deleted by itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax

from jaxpipe._jax_compat import keep_compiled
from jaxpipe.files import user_cache

_LEAST_S = 0.0
"""Of compiling what is kept: everything, so that a second start compiles nothing; JAX alone keeps what took a second."""


def use_compile_cache(setting: str, process: int = 0) -> str:
    """Let what is compiled from now on be kept as ``run.compile_cache`` says: ``off``, a folder, or ``auto``: where JAX was
    told to (``JAX_COMPILATION_CACHE_DIR``), else ``compiled`` in :func:`~jaxpipe.files.user_cache`. Call it before anything
    is compiled. Processes of a run but the first have folders of their own below it. Returns why nothing is kept, if that was
    not asked for."""
    remark = _use(setting)
    if process and jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined,unused-ignore]
        keep_compiled()
        folder = f"{jax.config.jax_compilation_cache_dir}/process-{process}"  # type: ignore[attr-defined,unused-ignore]
        jax.config.update("jax_compilation_cache_dir", folder)
    return remark


def _use(setting: str) -> str:
    if setting == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return ""
    if setting == "auto" and jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined,unused-ignore]
        return ""
    folder = user_cache() / "compiled" / f"jax-{jax.__version__}-{_processor()}"
    if setting != "auto":
        folder = Path(setting).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            return f"compiled programs are not kept: others than you can write to {folder}; its mode should be 0700"
    except OSError as error:
        return f"compiled programs are not kept: {folder}: {error.strerror}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_S)
    return ""


def _processor() -> str:
    """A digest of what code for this machine's processors may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))} or lines)
    return hashlib.sha256("\n".join([platform.machine(), *told]).encode()).hexdigest()[:12]
