"""Makes new parameters of gradients: reduction, scalars, optimizers of stages, ties."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    optimizer="Muon adamw learning_rate lion with_ema",
    post_validation="PostValidation",
    scalars="Combined StepReduction TiedLeaves",
    stage_update="GradientReduction compile_update stage_optimizers",
)
