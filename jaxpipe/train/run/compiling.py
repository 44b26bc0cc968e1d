"""Compiling: a line while it takes long, and JAX's persistent cache of what has been compiled before.

Compiling a step can take minutes, in which nothing else would be said. Cached programs are machine code, which whoever can
write to the folder could replace: it is this user's alone. Each JAX and each kind of processor has a folder of its own, as a
home folder may be seen from several machines. Nothing is ever deleted by itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax

from jaxpipe._jax_compat import keep_compiled
from jaxpipe.files import user_cache

FIRST_S, EVERY_S = 5.0, 10.0
"""Seconds before the first line, and between lines. What takes less than the first says nothing."""

_ASKED, _LOADED = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
_MADE: Counter[str] = Counter()
"""Counts by event: programs that were asked for, and those of them that the compilation cache had."""


def to_stderr(line: str) -> None:
    """The progress of a :class:`~jaxpipe.train.trainer.Trainer` unless it is told another: lines on standard error."""
    print(f"jaxpipe: {line}", file=sys.stderr, flush=True)


@contextmanager
def saying(progress: Callable[[str], None] | None, doing: str) -> Iterator[None]:
    """Tell ``progress`` every few seconds that the block is ``doing`` something, and how many programs have been compiled for
    it and how many loaded from the compilation cache; once it has been told, also when the block ends."""
    if progress is None:
        yield
        return
    before, started, ended, reported = made_programs(), time.monotonic(), threading.Event(), threading.Event()

    def line() -> str:
        compiled, loaded = (now - then for now, then in zip(made_programs(), before, strict=True))
        return f"{doing}: {compiled} programs compiled, {loaded} loaded, {time.monotonic() - started:.0f} s"

    def tell() -> None:
        wait = FIRST_S
        while not ended.wait(wait):
            reported.set()
            progress(line())
            wait = EVERY_S

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if reported.is_set():
        progress(f"{line()}; done")


def made_programs() -> tuple[int, int]:
    """Return how many programs this process has compiled, and how many it has loaded from the compilation cache, since this was
    first asked."""
    _count_programs()
    return _MADE[_ASKED] - _MADE[_LOADED], _MADE[_LOADED]


@cache
def _count_programs() -> None:
    """Have JAX count them, from the first call on."""
    jax.monitoring.register_event_listener(lambda event, **_: _count(event))
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: _count(event))


def _count(event: str) -> None:
    if event in (_ASKED, _LOADED):
        _MADE[event] += 1


_LEAST_S = 0.0
"""The shortest compilation whose program is kept: any, so that a second start compiles nothing; JAX alone keeps what took a
second."""


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
    """Return a digest of what code for this machine's processors may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    features = sorted(
        {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))} or lines
    )
    return hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()[:12]
