"""What: layers, the cut into stages, and the compiled F, B, W and BW of each. Knows arrays and jaxprs, no schedule.

Importing this package imports no JAX: the names below are looked up when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpipe.stage.compiled.compile import BuildCache, build_all
    from jaxpipe.stage.functions import Port, StageFunction, StageFunctions
    from jaxpipe.stage.instructions import From, register_instruction, stage_function
    from jaxpipe.stage.model.layer import Layer, LayerContext, Matrix, Model
    from jaxpipe.stage.model.plan import StagePlan, cut, cut_at, plan_stages
    from jaxpipe.stage.model.reference import apply_model, init_params, model_output, resolve_model
    from jaxpipe.stage.split.policies import POLICIES

__all__ = ["BuildCache", "build_all"]
__all__ += ["Port", "StageFunction", "StageFunctions"]
__all__ += ["From", "register_instruction", "stage_function"]
__all__ += ["Layer", "LayerContext", "Matrix", "Model"]
__all__ += ["StagePlan", "cut", "cut_at", "plan_stages"]
__all__ += ["apply_model", "init_params", "model_output", "resolve_model"]
__all__ += ["POLICIES"]

_HOMES = (
    "split.policies",
    "model.layer",
    "model.plan",
    "model.reference",
    "functions",
    "compiled.compile",
    "instructions",
)
"""Looked through in this order."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return next(getattr(found, name) for home in _HOMES if hasattr(found := import_module(f"{__name__}.{home}"), name))
