"""Says what this machine lacks to be asked a question, in a line: "" where it lacks nothing. Imports no JAX."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any


def cannot_ask(why: str) -> dict[str, Any]:
    """Return the answer of an experiment that cannot be asked here."""
    return {"note": f"cannot be asked here: {why}"}


def lacks_module(name: str) -> str:
    """Say that a Python module is not installed; it is not imported."""
    return "" if importlib.util.find_spec(name) else f"there is no {name}"


def lacks_program(name: str) -> str:
    """Say that a program is not on the path."""
    return "" if shutil.which(name) else f"there is no {name}"


def lacks_gpu(platforms: str | None = None) -> str:
    """Say that JAX was told to use a CPU, by ``JAX_PLATFORMS`` or ``platforms``. Looks for no device: JAX takes its memory."""
    chosen = os.environ.get("JAX_PLATFORMS", "") if platforms is None else platforms
    return "JAX_PLATFORMS=cpu, and it takes a GPU" if chosen == "cpu" else ""
