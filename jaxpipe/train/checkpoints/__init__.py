"""What lies on disk: one checkpoint's files, the directory of them, and what several processes do with both."""

from __future__ import annotations

from typing import Any

from jaxpipe.train import looked_up

_HOMES = {
    "directory": "Intact",
    "load": "StepName find load_group reading",
    "manifest": "Manifest",
    "stored": "load_state model_digest same_program stored_params",
    "tree": "Placement PyTree",
}
__all__ = sorted(" ".join(_HOMES.values()).split())


def __getattr__(name: str) -> Any:
    return looked_up(__name__, _HOMES, name)
