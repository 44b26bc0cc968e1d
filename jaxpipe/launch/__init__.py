"""Starts the processes of a run: here, or by files for Slurm and Kubernetes. Imports no JAX."""

from __future__ import annotations

from typing import Any

from jaxpipe.train import looked_up

_HOMES = {"cluster": "Job jobset sbatch", "local": "Launch follow_launcher"}
__all__ = sorted(" ".join(_HOMES.values()).split())


def __getattr__(name: str) -> Any:
    return looked_up(__name__, _HOMES, name)
