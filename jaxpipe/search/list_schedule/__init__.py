"""Say what a free rank runs: choosers of the clock, and fillers of a known order. Reading order: README.md."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    policies="Chooser Policy by_turn chain_drafts full_limit least_limit run",
    fillers="Finisher GapFiller Phases Rule improved merit score",
    weights="Filled WeightFilling order_of refilled",
)
