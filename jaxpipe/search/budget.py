"""Budgets that limit a search: seconds of the clock, or deterministic ones."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

DETERMINISTIC_SECOND = 0.1  # CP-SAT's deterministic time in a second of the development machine, roughly


@dataclass(slots=True)
class Budget:
    """Wall-clock seconds from its creation, or with ``reproducible`` deterministic seconds that callers spend."""

    seconds: float
    reproducible: bool = False
    spent: float = 0.0
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.perf_counter()

    @property
    def left(self) -> float:
        used = self.spent if self.reproducible else time.perf_counter() - self.began
        return self.seconds - used

    def parameters(self, seconds: float, seed: int) -> dict[str, Any]:
        """CP-SAT parameters for a search of up to so many seconds, which it counts as spent."""
        seconds = max(0.05, min(seconds, self.left))
        self.spent += seconds
        name, scale = (
            ("max_deterministic_time", DETERMINISTIC_SECOND) if self.reproducible else ("max_time_in_seconds", 1.0)
        )
        return {name: seconds * scale, "num_workers": 1, "random_seed": seed}
