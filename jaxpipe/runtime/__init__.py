"""Runs programs: dispatches stage functions, moves arrays between ranks and memories, and records what happened when.

Importing this package imports no JAX: the names below are looked up when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpipe.runtime.assembly import Assembly
    from jaxpipe.runtime.executor import Executor, StepInputs, StepOutputs
    from jaxpipe.runtime.memory_probe import measured_peaks
    from jaxpipe.runtime.offload import OffloadOptions
    from jaxpipe.runtime.peers import Peers, find_peers
    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.runtime.processes import Joined, Processes

__all__ = ["Assembly", "Executor", "Joined", "OffloadOptions", "Peers", "Pipeline", "Processes", "StepInputs"]
__all__ += ["StepOutputs", "find_peers", "measured_peaks"]

_HOMES = {"StepInputs": "executor", "StepOutputs": "executor", "measured_peaks": "memory_probe", "find_peers": "peers"}
_HOMES |= {"Joined": "processes", "OffloadOptions": "offload"}
"""Of names that are not called as their module is."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, name.lower())}"), name)
