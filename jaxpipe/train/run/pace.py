"""How fast a run is: seconds of its steps, and tokens a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
