"""One stage as one flat jaxpr, and its division into F, B and W by dataflow."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    graph="StagePart",
    policies="POLICIES",
    splitter="Split split",
    trace="StageTrace TraceSpec trace_joint",
)
