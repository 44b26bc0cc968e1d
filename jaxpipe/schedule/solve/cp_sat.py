"""Running CP-SAT: its parameters, and budgets of time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DETERMINISTIC_SECOND = 0.1  # CP-SAT's deterministic time in a second of the development machine, roughly
LITE: Mapping[str, Any] = {"symmetry_level": 0, "cp_model_probing_level": 0}
"""Less presolve: what it costs is more than it brings on small models."""
WHOLE_RESERVOIRS: Mapping[str, Any] = {
    "expand_reservoir_constraints": False,
    "use_feasibility_jump": False,
    "num_violation_ls": 0,
}
"""Reservoirs kept whole: expanded into pairs of events, larger models find no answer in time. OR-Tools 9.15's local search by
violations does not see whole ones and hands out answers that break them, so it is left out."""


def run(model: Any, *parameters: Mapping[str, Any]) -> tuple[Any, bool, bool]:
    """Solve ``model`` with these parameters, of which later ones win: the solver, whether it has an answer, and whether the
    search came to its end (the answer is optimal, or there is none)."""
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    for some in parameters:
        for name, value in some.items():
            setattr(solver.parameters, name, value)
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver, found, status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)


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
