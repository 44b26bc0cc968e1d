"""``config.json`` of the hub key by key: of the type that is wanted, or refused in a line that names the key.

Rotary positions have two forms: ``rope_theta`` and ``rope_scaling`` (transformers 4), and both in ``rope_parameters``
(transformers 5). Both are read. The first is what is to be written: transformers 4 takes the second for none at all, without a
word, and version 5 reads both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxpipe.errors import ConfigError
from jaxpipe.wording import clipped

_T = TypeVar("_T")


def refused(key: str, value: Any, wanted: str) -> ConfigError:
    """The error about a value that a model does not have."""
    return ConfigError(f"config.json: {key} is {clipped(repr(value), 60)}, and this model has {wanted}; choose another")


@dataclass(frozen=True, slots=True)
class Keys:
    """``config``: of the file, or a table in it. A key that is null is absent. The methods raise ConfigError."""

    config: Mapping[str, Any]

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._of(name, int, "a whole number", default)
        if value < least:
            raise ConfigError(f"config.json: {name} is {value}; want {least} or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.config.get(name)
        found = float(value) if type(value) is int else self._of(name, float, "a number", default)
        if not math.isfinite(found):
            raise ConfigError(f"config.json: {name} is {found}; want a finite number")
        return found

    def flag(self, name: str, default: bool) -> bool:
        return self._of(name, bool, "true or false", default)

    def text(self, name: str, default: str | None = None) -> str:
        return self._of(name, str, "a string", default)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses values that are none of these; an absent key is not."""
        value = self.config.get(name)
        if value is not None and value not in allowed:
            raise refused(name, value, ", ".join(map(str, allowed)) or "none")

    def rope(self, theta: float) -> tuple[float, Keys]:
        """The base of rotary frequencies (``theta`` where none is given), and the table of how they are scaled."""
        table = next((name for name in ("rope_parameters", "rope_scaling") if self.config.get(name) is not None), "")
        scaling = self.config.get(table, {})
        if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
            raise refused(table, scaling, "one table of numbers")
        old = self.number("rope_theta", theta)
        return (Keys(scaling).number("rope_theta", old) if table == "rope_parameters" else old), Keys(scaling)

    def _of(self, name: str, kind: type[_T], what: str, default: _T | None) -> _T:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not kind:
            found = "missing" if value is None else clipped(repr(value), 60)
            raise ConfigError(f"config.json: {name} is {found}; want {what}")
        return value
