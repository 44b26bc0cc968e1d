"""Layers, their partition into stages, and the compiled F, B, W and BW of each stage. Knows arrays and jaxprs, no schedule.

Importing this package imports no JAX: the names below are looked up when they are first used.
"""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    **{
        "compiled.compile": "BuildCache build_all",
        "functions": "Footprint Port StageFunction StageFunctions footprint",
        "instructions": "From register_instruction stage_function",
        "model.layer": "Layer LayerContext Matrix Model",
        "model.plan": "StagePlan cut cut_at plan_stages",
        "model.reference": "apply_model init_params model_output resolve_model",
        "split.policies": "POLICIES",
    },
)
