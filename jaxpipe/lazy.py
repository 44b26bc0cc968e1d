"""The public names of a room whose modules are slow to import, or import each other: looked up when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def exported(package: str, **homes: str) -> tuple[list[str], Callable[[str], Any]]:
    """``__all__`` and ``__getattr__`` of ``package``. ``homes``: by module of it, its public names, with blanks between."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return sorted(home_of), get
