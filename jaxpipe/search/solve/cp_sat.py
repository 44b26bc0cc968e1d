"""Running CP-SAT, and parameters that several models share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
