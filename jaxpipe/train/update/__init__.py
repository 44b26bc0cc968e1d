"""From gradients to new parameters: reduction, scalars, optimizers of stages, ties."""
