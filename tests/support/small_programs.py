"""Speed up a process that compiles many small programs: this one, or a child."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any


def collect_seldom() -> None:
    """Tracing makes many small objects that stay: looking for circles among them at every 700 took a twentieth of a run."""
    gc.set_threshold(50_000, 20, 100)


def share_context(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """One MLIR context a thread, not one a program: making them takes a fifth of the time of tests that compile small programs,
    and 1 GB. Where this jax makes them in another way, tests only take longer."""
    contexts = threading.local()
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import mlir

        make = mlir.make_ir_context

        def one() -> Any:
            if not hasattr(contexts, "context"):
                contexts.context = make()
            return contexts.context

        patch(mlir, "make_ir_context", one)
