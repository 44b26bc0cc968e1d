"""``pipeline.schedule = "towers"``: the branches of a model on ranks of their own, each in an order by rules of its own, and
the loss, which takes the results of them all (FlexPipe, `flexpipe.txt` section 7.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule import Placement, Traversal
from jaxpipe.schedule.placement import placement_named, towers

_JOIN = "join"
_KEYS: Mapping[str, type] = {"ranks": int, "chunks": int, "placement": str, "rules": str}
_MOST = 4096


def towers_of(settings: Mapping[str, Any]) -> tuple[Placement, dict[int | tuple[int, ...] | range, Traversal]]:
    """The placement of ``pipeline.towers``, and the rules of each tower's ranks.

    Raises:
        ConfigError: a tower lacks a setting, has one that there is not, or a value is none that would work.
    """
    names = [name for name in settings if name != _JOIN]
    if not names:
        raise ConfigError('there is no tower: add one line for each, such as image = {ranks = 2, rules = "backward"}')
    parts: dict[str, Placement] = {}
    rules: dict[int | tuple[int, ...] | range, Traversal] = {}
    first = 0
    for name in names:
        try:
            parts[name], rule = _tower(settings[name])
        except (ConfigError, ScheduleError) as error:
            raise ConfigError(f"{name}: {error}") from None
        rules[range(first, first := first + parts[name].num_ranks)] = rule
    join = settings.get(_JOIN, names[-1])
    join = join if isinstance(join, list) else [join]
    if not all(isinstance(name, str) for name in join):
        raise ConfigError(f"join is {join}; want the tower on whose last rank the loss runs, one of {', '.join(names)}")
    return towers(parts, join), rules


def _tower(given: Any) -> tuple[Placement, Traversal]:
    if not isinstance(given, Mapping):
        raise ConfigError(f'a tower is {given!r}; want a table, such as {{ranks = 2, rules = "backward"}}')
    for key, value in given.items():
        if key not in _KEYS:
            raise ConfigError(f"there is no setting {key!r}; a tower has {', '.join(_KEYS)}")
        if type(value) is not _KEYS[key] or (isinstance(value, int) and not 1 <= value <= _MOST):
            wanted = f"a whole number from 1 to {_MOST}" if _KEYS[key] is int else "a string"
            raise ConfigError(f"{key} is {value!r}; want {wanted}")
    if missing := [key for key in ("ranks", "rules") if key not in given]:
        raise ConfigError(f"{' and '.join(missing)} are missing" if len(missing) > 1 else f"{missing[0]} is missing")
    chunks = given.get("chunks")
    if (stages := given["ranks"] * (chunks or 1)) > _MOST:
        raise ConfigError(f"{given['ranks']} ranks × {chunks} chunks are {stages} stages; use at most {_MOST}")
    kind = given.get("placement", "one-to-one" if chunks in (None, 1) else "circular")
    placement = placement_named(kind, given["ranks"], chunks)
    return placement, Traversal.parse(given["rules"])
