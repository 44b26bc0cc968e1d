"""What a run keeps account of between its steps: their pace, those that changed nothing, saves, and the profiler's window.

Steps whose gradient was not finite, or whose weights were negative, count: too many in a row end a run (``run.max_skipped``).
Those whose batch has no target do not.

A run saves at its checkpoint steps, and again after a save that failed, which ends nothing. It is tried again at the next step,
then after 1, 2, 4, … more steps: every try copies the arrays to the host, so a disk that stays full costs few copies, and one
that is full for n steps puts at most about 2n at risk. While steps are being skipped, saves wait for one that counts.

``run.profile_steps`` shows some steps as JAX's profiler sees them (XProf, Perfetto), beside our timeline of the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxpipe.errors import CheckpointError, NotFiniteError, short_message
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.state import Cause


class Pace:
    """Seconds of training steps, waiting for their results included, evaluation and saving left out; the first, which compiles,
    only counts if it is alone."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self._seconds: list[float] = []
        self._lap = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the dispatch of a step."""
        self._seconds.append(0.0)
        with self.waiting():
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what is done for the last step that was dispatched."""
        began = time.perf_counter()
        yield
        if self._seconds:
            self._seconds[-1] += time.perf_counter() - began

    def lap(self) -> float:
        """Tokens a second since the last lap."""
        since, self._lap = max(self._lap, 1), len(self._seconds)
        return self._rate(self._seconds[since:] or self._seconds[-1:])

    @property
    def tokens_per_s(self) -> float:
        return self._rate(self._seconds[1:] or self._seconds)

    def _rate(self, seconds: list[float]) -> float:
        return self.tokens_per_step * len(seconds) / sum(seconds) if seconds else float("nan")


class Skipping:
    """``steps``: how many were skipped; ``row``: of them those up to the last step, none if that counted. ``empty``: how many
    had no target."""

    def __init__(self, config: TrainConfig, note: Callable[[str], None]) -> None:
        self._run, self._note, self._rate = config.run, note, f"optimizer.lr={config.optimizer.lr:g}"
        self.steps = self.row = self.empty = self._first = 0

    def judge(self, step: int, *, cause: Cause | None, finite: bool) -> None:
        """What ``step`` means for the run: why its update was not applied, if so, and whether all parameters are ``finite``
        after it.

        Raises:
            NotFiniteError: the run ends by it.
        """
        run = self._run
        if not finite:
            raise NotFiniteError(
                f"step {step} made parameters that are not finite: {self._rate} or optimizer.weight_decay is too high"
            )
        if cause == "no target":
            self.empty += 1
            if self.empty == 1:
                self._note(f"step {step}: no target in this batch; nothing is learnt of such steps")
            return
        if cause is None:
            if self.row > 1:
                self._note(f"step {step}: finite again; {self.row} steps were skipped")
            self.row = 0
            return
        self._first = self._first if self.row else step
        self.steps, self.row = self.steps + 1, self.row + 1
        if self.row == run.max_skipped:
            since = f"steps {self._first} to {step} were" if self.row > 1 else f"step {step} was"
            if cause == "negative weight":
                raise NotFiniteError(
                    f"{since} skipped (run.max_skipped={run.max_skipped}): the weights of the targets add up to less than zero"
                )
            raise NotFiniteError(
                f"{since} not finite (run.max_skipped={run.max_skipped}): {self._rate} may be too high, or the data hold ids "
                "that the model does not know"
            )
        if self.row == 1:
            why = "the gradient is not finite" if cause == "not finite" else "the weights add up to less than zero"
            self._note(f"step {step}: {why}; parameters were left as they are")


class Saving:
    """Saves into ``store``.

    Args:
        regular: whether a step is one to save at.
        saved: the step that the run starts from, if it is in the store, else -1.
        warn: told, in a line, of each save that failed.
    """

    def __init__(
        self, store: CheckpointStore, regular: Callable[[int], bool], saved: int, warn: Callable[[str], None]
    ) -> None:
        self._store, self._regular, self._warn = store, regular, warn
        self._saved = saved  # or being saved
        self._again: int | None = None  # the step to try again at
        self._failures = 0  # in a row

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``. Looks at the save under way, and does not wait for it."""
        if error := self._store.poll():
            self._failed(error, step)
        return self._regular(step) or (self._again is not None and step >= self._again)

    def put_off(self, step: int) -> None:
        """``step`` was skipped: ask after the next one."""
        self._again = step + 1

    def save(self, step: int, put: Callable[[], None]) -> None:
        """Start to save by ``put``, which waits for the save before this one."""
        if self._again is None:
            self._failures = 0
        self._again = None
        try:
            put()
            self._saved = step
        except CheckpointError as error:
            self._failed(error, step)

    def finish(self, step: int, put: Callable[[], None]) -> None:
        """Bring ``step`` to the disk, by ``put`` where that is not under way.

        Raises:
            CheckpointError: it can't be saved, tried for a last time.
        """
        try:
            if self._saved == step:
                self._store.wait()
                return
        except CheckpointError as error:
            self._warn(f"warning: {error}; trying for the last time")
        put()
        self._store.wait()

    def _failed(self, error: CheckpointError, step: int) -> None:
        """Told after ``step``."""
        wait = (2**self._failures) // 2
        self._saved, self._again, self._failures = -1, step + wait, self._failures + 1
        self._warn(f"warning: {error}; trying again" + (f" after step {self._again}" if wait else ""))


def go_on(step: int | None, first: str = "") -> str:
    """Advice after a failure; ``step``: of the newest checkpoint."""
    if step is None:
        return "no checkpoint was saved before: the same command starts at step 0"
    return f"{first}run the same command again to go on from step {step}"


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
