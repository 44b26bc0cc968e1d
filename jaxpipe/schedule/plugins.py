"""Families and ops that are not jaxpipe's: those of installed packages, and modules that register their own.

A package names them as entry points, each a :class:`~jaxpipe.schedule.families.Family` or an
:class:`~jaxpipe.schedule.ir.OpSpec`; families are looked for once, when they are listed or a name is not known, ops when one
is not known::

    [project.entry-points."jaxpipe.families"]
    lockstep = "mypackage.schedules:LOCKSTEP"
    [project.entry-points."jaxpipe.ops"]
    recompute = "mypackage.schedules:RECOMPUTE"

A module calls ``register_family`` and ``register_op`` when it is imported: ``jaxpipe VERB … --import MODULE``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module as import_by_name
from pathlib import Path
from typing import TypeVar

from jaxpipe.errors import ConfigError, JaxpipeError, ScheduleError
from jaxpipe.lazy import import_from_here

_Kind = TypeVar("_Kind")

SEARCH = "jaxpipe.search"
"""The package that finds when, as this one says when. Its families register as those of any plug-in do; nothing here imports it
but by this name, when someone asks for a family that is not of fixed order, or lists them."""


@cache
def load_search() -> None:
    """Import the families of :data:`SEARCH`, which registers them; the second call does nothing."""
    import_by_name(f"{SEARCH}.families")


@cache
def load_installed(group: str, kind: type[_Kind], register: Callable[[_Kind], object]) -> None:
    """Hand ``register`` what installed packages name as entry points of ``group``; the second call does nothing.

    Raises:
        ScheduleError: an entry point can't be loaded, is not of the ``kind``, or its name is taken; names the distribution.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group=group):
        try:
            plugin = entry.load()
            if not isinstance(plugin, kind):
                raise ScheduleError(f"it is of type {type(plugin).__name__}; want {kind.__name__}")
            register(plugin)
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else "an installed package"
            raise ScheduleError(
                f"{package}: {group} {entry.name!r} ({entry.value}) can't be used: {_error_text(error)}; mend or uninstall it"
            ) from error


_imported: dict[str, None] = {}


def import_module(name: str) -> None:
    """Import the module ``name`` from ``sys.path`` or the working directory, for what it registers.

    Raises:
        ConfigError: there is no such module, or importing it fails.
    """
    try:
        import_from_here(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--import {name}: {_why(name, error)}") from error
    _imported[name] = None


def imported_modules() -> tuple[str, ...]:
    """Return the names given to :func:`import_module`, for processes that must know the same families."""
    return tuple(_imported)


def _why(name: str, error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return _error_text(error)
    if name.endswith(".py") or "/" in name:
        return f"give the module's name, such as {Path(name).stem}, not its file"
    if error.name == name or name.startswith(f"{error.name}."):
        return f"no module {error.name!r} on sys.path or in {Path.cwd()}"
    return f"it imports {error.name}, which is not installed"


def _error_text(error: BaseException) -> str:
    return str(error) if isinstance(error, JaxpipeError) else f"{type(error).__name__}: {error}"
