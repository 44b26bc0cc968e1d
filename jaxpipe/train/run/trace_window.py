"""``run.profile_steps``: some steps of a run as JAX's profiler sees them (XProf, Perfetto), beside our timeline of the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxpipe.errors import short_message


class TraceWindow:
    """A trace of the steps from the first to the last of ``steps`` (None: of none) in ``folder``. What goes wrong is told by
    ``warn`` in a line, and the rest of the trace is left out."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, warn: Callable[[str], None]) -> None:
        self._first, self._last = steps or (0, -1)
        self.folder, self._warn, self._running = folder, warn, False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the dispatch of a step; the trace starts with the first one that is in the window."""
        if not self._first <= number <= self._last:
            yield
            return
        if not self._running:
            self._running = self._tried(lambda: jax.profiler.start_trace(self.folder))
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield

    def close(self) -> bool:
        """End the trace; whether there was one. Call it when the last step has run."""
        running, self._running = self._running, False
        return running and self._tried(jax.profiler.stop_trace)

    def _tried(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:
            self._first, self._last = 0, -1
            self._warn(
                f"warning: the trace of run.profile_steps can't be written: {short_message(error)}; the run goes on without"
            )
            return False
        return True
