"""From gradients to new parameters: reduction, scalars, optimizers of stages, ties."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    muon="Muon",
    optimizer="adamw learning_rate lion with_ema",
    post_validation="PostValidation",
    reduction="GradientReduction",
    scalars="Combined Scalars",
    stage_optimizer="stage_optimizers",
    stage_update="compile_update",
    ties="TiedLeaves",
)
