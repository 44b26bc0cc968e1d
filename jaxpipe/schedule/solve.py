"""Names of :mod:`jaxpipe.search.solve` under the path that they had, ``from jaxpipe.schedule.solve import solve``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from jaxpipe.schedule import plugins


def __getattr__(name: str) -> Any:
    return getattr(import_module(f"{plugins.SEARCH}.solve"), name)
