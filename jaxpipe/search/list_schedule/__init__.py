"""One list scheduler: a clock over all ranks, and choosers that say what a free rank runs. Reading order: README.md."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    choosers="Chooser Policy by_turn full_limit least_limit run",
    policies="chain_drafts",
    fillers="Finisher Phases Rule improved merit",
    weights="Filled WeightFilling order_of refilled",
)
