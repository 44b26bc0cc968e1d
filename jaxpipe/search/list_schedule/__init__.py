"""Say what a free rank runs: choosers of the clock, and fillers of a known order. Reading order: README.md."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    policies="Filled Policy WeightFilling by_turn chain_drafts full_limit least_limit order_of refill_weights run",
    fillers="GapFiller Phases Rule improve_order score",
)
