"""What a long call is doing, said while it lasts: compiling a step can take minutes, in which nothing else would be said."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import jax

FIRST_S, EVERY_S = 5.0, 10.0
"""Seconds before the first line, and between lines. What takes less than the first says nothing."""

_ASKED, _LOADED = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
_MADE: Counter[str] = Counter()
"""By event: programs that were asked for, and those of them that the compilation cache had."""


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
    before, started, ended, said = made_programs(), time.monotonic(), threading.Event(), threading.Event()

    def line() -> str:
        compiled, loaded = (now - then for now, then in zip(made_programs(), before, strict=True))
        return f"{doing}: {compiled} programs compiled, {loaded} loaded, {time.monotonic() - started:.0f} s"

    def tell() -> None:
        wait = FIRST_S
        while not ended.wait(wait):
            said.set()
            progress(line())
            wait = EVERY_S

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if said.is_set():
        progress(f"{line()}; done")


def made_programs() -> tuple[int, int]:
    """How many programs this process has compiled, and how many it has loaded from the compilation cache, since this was first
    asked."""
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
