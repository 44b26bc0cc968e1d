"""Jaxprs cut at their tensor-parallel collectives, and woven so that each collective has compute under it."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    units="UnitCosts",
    weaver="weave",
)
