"""Read ``config.json`` of the hub key by key; a value of another type is refused in a line that names the key.

Rotary positions have two forms: ``rope_theta`` and ``rope_scaling`` (transformers 4), and both in ``rope_parameters``
(transformers 5). Both are read, and where a file has both they must agree. The first is what is to be written: transformers 4
takes the second for none at all, without a word, and version 5 reads both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxpipe.errors import ConfigError
from jaxpipe.text import truncate

_T = TypeVar("_T")
MOST_LAYERS = 10_000
"""A file that says more is no model's: lists of layers are made before anything else is looked at."""


def refused(key: str, value: Any, allowed: str) -> ConfigError:
    """Return the error about a value that a model does not support."""
    return ConfigError(
        f"config.json: {key} is {truncate(repr(value), 60)}, and this model has {allowed}; choose another"
    )


def conflict(values: Mapping[str, Any]) -> ConfigError:
    """Return the error about two keys whose values contradict each other."""
    listed = " and ".join(f"{name} is {truncate(repr(value), 80)}" for name, value in values.items())
    return ConfigError(f"config.json: {listed}; take the wrong one away")


@dataclass(frozen=True, slots=True)
class Keys:
    """``config``: of the file, or a table in it; ``where``: what stands before a key's name in messages.

    A key that is absent has the default that transformers' class has, which the model adds to ``config``; null is a value of
    its own, and stands for a method's ``default``. The methods raise ConfigError.
    """

    config: Mapping[str, Any]
    where: str = ""

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.config.get(name)
        if type(value) is float and value.is_integer():  # some tools write 32.0
            value = int(value)
        value = self._of(name, value, int, "a whole number", default)
        if not least <= value <= most:
            raise ConfigError(f"config.json: {self.where}{name} is {truncate(str(value), 60)}; want {least} to {most}")
        return value

    def number(self, name: str, *, above: float = -math.inf, below: float = math.inf) -> float:
        value = self.config.get(name)
        value = self._of(name, float(value) if type(value) is int else value, float, "a number", None)
        if not above < value < below:
            limits = (
                f"{f' above {above:g}' * (above > -math.inf)}{f' below {below:g}' * (below < math.inf)}"
                or " that is finite"
            )
            raise ConfigError(f"config.json: {self.where}{name} is {value:g}; want a number{limits}")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._of(name, self.config.get(name), bool, "true or false", default)

    def text(self, name: str, default: str | None = None) -> str:
        return self._of(name, self.config.get(name), str, "a string", default)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse values that are none of these; an absent key is not."""
        value = self.config.get(name)
        if name in self.config and not any(type(value) is type(one) and value == one for one in allowed):
            allowed_texts = [str(one) for one in allowed if one is not None]
            raise refused(f"{self.where}{name}", value, ", ".join(allowed_texts) or "none")

    def rope(self, theta: float) -> tuple[float, str, Keys]:
        """Return the base of rotary frequencies (``theta`` where none is said), kind of their scaling, and the table of its
        numbers.

        Of two tables transformers 5 takes ``rope_scaling``, as version 4 does; but they differ about which base counts where
        several are said, and a table that says other things than a second one may be a leftover. Both are refused.
        """
        tables = [self._table(name) for name in ("rope_parameters", "rope_scaling") if self.config.get(name)]
        kinds = [table.config.get("rope_type", table.config.get("type", "default")) for table in tables]
        numbers = [_numbers(table, kind) for table, kind in zip(tables, kinds, strict=True)]
        if len(tables) == 2 and kinds[0] != "default" and numbers[0] != numbers[1]:
            raise conflict({table.where[:-1]: dict(table.config) for table in tables})
        places = [keys for keys in (self, *tables) if "rope_theta" in keys.config]
        bases = {f"{keys.where}rope_theta": keys.number("rope_theta", above=1) for keys in places}
        if not places or (len(tables) == 2 and places == tables[:1]):  # which rope_scaling replaces
            bases["rope_theta, where it is absent,"] = theta
        if len(set(bases.values())) > 1:
            raise conflict(bases)
        for keys in (self, *tables):
            keys.only("partial_rotary_factor", 1, 1.0, None)
        return next(iter(bases.values())), kinds[-1] if tables else "default", tables[-1] if tables else Keys({})

    def _table(self, name: str) -> Keys:
        table = self.config[name]
        if not isinstance(table, Mapping) or any(isinstance(value, Mapping) for value in table.values()):
            raise refused(name, table, "one table of numbers")
        kind = "rope_type" if "rope_type" in table else "type"
        if not isinstance(table.get(kind, ""), str):
            raise refused(f"{name}.{kind}", table[kind], "kinds by name")
        return Keys(table, f"{name}.")

    def _of(self, name: str, value: Any, kind: type[_T], what: str, default: _T | None) -> _T:
        value = default if value is None else value
        if type(value) is not kind:
            is_null = "null" if name in self.config else "missing"
            shown = is_null if value is None else truncate(repr(value), 60)
            raise ConfigError(f"config.json: {self.where}{name} is {shown}; want {what}")
        return value


def _numbers(table: Keys, kind: str) -> dict[str, Any]:
    names = table.config.keys() - {"type", "rope_type", "rope_theta"}
    return {"rope_type": kind, **{name: table.config[name] for name in names if table.config[name] is not None}}
