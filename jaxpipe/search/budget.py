"""How a search ends in time: by a budget that it asks, in seconds of the clock or deterministic ones, or by an alarm, wherever
it is, which interrupts the main thread between two instructions of Python. CP-SAT is run here too (:func:`run`), with
parameters that several models share.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

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
        """Return CP-SAT parameters for a search of up to so many seconds, which it counts as spent."""
        seconds = max(0.05, min(seconds, self.left))
        self.spent += seconds
        name, scale = (
            ("max_deterministic_time", DETERMINISTIC_SECOND) if self.reproducible else ("max_time_in_seconds", 1.0)
        )
        return {name: seconds * scale, "num_workers": 1, "random_seed": seed}


Found = TypeVar("Found")


class OutOfTimeError(Exception):
    """The search is to end with the best so far."""


def within(seconds: float | None, search: Callable[[], Found]) -> tuple[Found | None, bool]:
    """Return what ``search`` returns, in which OutOfTimeError is raised after so many seconds (None: never), and whether it
    was. None if time was up before the search began."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        return search(), False
    result, searching, ended = None, [True], []

    def ring(*_: object) -> None:
        if searching:
            ended.append(True)
            raise OutOfTimeError

    before, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    left_s, every_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        result = search()
        searching.clear()
    except OutOfTimeError:
        pass
    finally:
        searching.clear()
        signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began), 0.001) if left_s else 0, every_s)
        signal.signal(signal.SIGALRM, before)
    return result, bool(ended)


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
    for values in parameters:
        for name, value in values.items():
            setattr(solver.parameters, name, value)
    status = solver.solve(model)
    # an invalid model is a defect here; it would read as "no answer in time"
    assert status != cp_model.MODEL_INVALID, model.validate()
    has_answer = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver, has_answer, status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
