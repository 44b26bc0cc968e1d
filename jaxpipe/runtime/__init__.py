"""Runs programs: dispatches stage functions, moves arrays between ranks and memories, and records what happened when.

Importing this package imports no JAX: the names below are looked up when they are first used.
"""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    assembly="Assembly",
    executor="Executor StepInputs StepOutputs",
    memory_probe="measured_peaks",
    peers="Peers find_peers",
    pipeline="Pipeline",
    processes="Joined ProcessGroup Processes",
    transfer="OffloadOptions",
)
