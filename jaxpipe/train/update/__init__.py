"""From gradients to new parameters: reduction, scalars, optimizers of stages, ties."""

from __future__ import annotations

from typing import Any

from jaxpipe.train import looked_up

_HOMES = {
    "muon": "Muon",
    "optimizer": "adamw learning_rate lion with_ema",
    "post_validation": "PostValidation",
    "reduction": "GradientReduction",
    "scalars": "Combined Scalars",
    "stage_optimizer": "stage_optimizers",
    "stage_update": "compile_update",
    "ties": "TiedLeaves",
}
__all__ = sorted(" ".join(_HOMES.values()).split())


def __getattr__(name: str) -> Any:
    return looked_up(__name__, _HOMES, name)
