"""Layers and models: the protocol, Flax modules as layers, parameters as buffers, the unpipelined reference, the cut."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    layer="Layer LayerContext Matrix Model Params",
    params="ParamLayout",
    plan="Cut StageLinks StagePlan links_of plan_stages",
    reference="apply_model init_params resolve_model",
)
