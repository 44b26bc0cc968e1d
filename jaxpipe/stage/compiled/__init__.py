"""The compiled functions of stages, and what XLA says of them."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    braid="build_braids",
    compile="BuildCache build_all build_stage_functions",
)
