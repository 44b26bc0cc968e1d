"""Import modules when they are first used: those behind the public names of a room, which are slow to import or
import each other, and those that users name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def exported(package: str, **homes: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of ``package``. ``homes``: by module of it, its public names, with blanks
    between."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return sorted(home_of), get


def import_from_here(name: str) -> ModuleType:
    """Import the module ``name`` from ``sys.path`` or else the working directory, which stays on the path unless that fails."""
    # Last on the path, so that nothing there shadows an installed package.
    working_directory = str(Path.cwd())
    added = not {"", working_directory} & set(sys.path)
    if added:
        sys.path.append(working_directory)
    try:
        return import_module(name)
    except BaseException:
        if added:
            sys.path.remove(working_directory)
        raise
