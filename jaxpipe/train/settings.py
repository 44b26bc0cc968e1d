"""Typed settings: frozen dataclasses of sections, filled from TOML or JSON files and from dotted overrides.

What: :func:`collect` turns a mapping (a parsed file) and overrides such as ``run.steps=200`` into checked values by dotted
key; every problem found is kept, with its place (file or override) and key, so that a user mends all of them at once.
A record class has one level of sections; the fields of a section are leaves. Leaf types understood: ``bool int float str``,
``Literal`` of strings, ``X | None``, unions, ``tuple[X, ...]``, ``tuple[X, Y]`` and ``Mapping[str, Any]`` (an open table).
A value that TOML, strict JSON or a file name can't hold is refused: integers beyond 64 bits, NaN and infinity, text with null
characters or bytes that are no UTF-8, tables nested more than 32 levels deep.
Does not model: environment variables, includes, interpolation, several files.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxpipe.errors import ConfigError
from jaxpipe.files import read_file, unique_keys
from jaxpipe.wording import nearest

Hint = Any  # a type annotation
_LARGEST = sys.float_info.max
_DEEPEST = 32  # tables and lists inside one another
_SHOWN = 60  # characters of a value in a message


class _MisfitError(Exception):
    """A value does not fit its type hint. The text says why, where the expectation alone would not."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong: what (``message`` names the key), the dotted ``keys`` it involves, and its ``place`` (a file, an
    override, or empty for values made in Python)."""

    message: str
    keys: tuple[str, ...]
    place: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


@dataclass(slots=True)
class Collected:
    """Values by dotted key, the place that each came from, and the problems met on the way. Keys not given are absent."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, key: str, value: Any, place: str) -> None:
        self.values[key], self.places[key] = value, place

    @property
    def bad_keys(self) -> set[str]:
        return {key for problem in self.problems for key in problem.keys}


def _anatomy(hint: Hint) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments: ``tuple[int, ...]`` gives ``tuple, (int, Ellipsis)``; a plain class ``None, ()``."""
    return get_origin(hint), get_args(hint)


def expected(hint: Hint) -> str:
    """The hint in words: ``an integer``, ``one of 'auto', 'never'``, ``a list of 2 numbers`` …"""
    simple = {bool: "true or false", int: "an integer", float: "a number", str: "a string", NoneType: "none"}
    if hint in simple:
        return simple[hint]
    origin, args = _anatomy(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (Union, UnionType):
        return " or ".join(map(expected, args))
    if origin is tuple:
        parts = get_args(args[0]) or (args[0],)
        plural = " or ".join({int: "integers", float: "numbers", str: "strings"}.get(part, "values") for part in parts)
        return f"a list of {plural}" if args[-1] is Ellipsis else f"a list of {len(args)} {plural}"
    return "a table"


def fit(value: Any, hint: Hint) -> Any:
    """``value`` (as TOML, JSON or Python gives it) as the hint wants it; integers pass as numbers, lists become tuples.

    Raises:
        _MisfitError: it does not fit.
    """
    origin, args = _anatomy(hint)
    if origin in (Union, UnionType):
        return _first_fit(fit, value, args)
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        near = nearest(str(value), args, 0.6)
        raise _MisfitError(f"did you mean {near!r}?" if near else "")
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or (args[-1] is not Ellipsis and len(value) != len(args)):
            raise _MisfitError
        return tuple(fit(x, args[0]) for x in value)
    if hint is float and type(value) in (int, float):
        if not -_LARGEST <= value <= _LARGEST:
            raise _MisfitError("not finite")
        return float(value)
    if isinstance(hint, type):
        if type(value) is hint:
            return _storable(value)
        raise _MisfitError
    if not isinstance(value, Mapping):
        raise _MisfitError
    return _fit_open(value, _DEEPEST)


def _fit_open(value: Any, levels: int) -> Any:
    """A value of an open table: a scalar, a list or a table of such, nested at most ``levels`` deep."""
    if isinstance(value, (Mapping, list, tuple)):
        if not levels:
            raise _MisfitError(f"nested more than {_DEEPEST} levels deep")
        if isinstance(value, Mapping):
            return {_storable(key): _fit_open(x, levels - 1) for key, x in value.items()}
        return [_fit_open(x, levels - 1) for x in value]
    if type(value) not in (bool, int, float, str):
        raise _MisfitError(f"holds {value!r}: use numbers, strings, true, false, lists and tables")
    return _storable(value)


def _storable(value: Any) -> Any:
    """A scalar that TOML, strict JSON and file names can hold."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise _MisfitError("too large: integers have 64 bits")
    if type(value) is float and not math.isfinite(value):
        raise _MisfitError("not finite")
    if type(value) is str and "\0" in value:
        raise _MisfitError("it holds a null character")
    if type(value) is str and any("\ud800" <= character <= "\udfff" for character in value):
        raise _MisfitError("it is not UTF-8 text")
    return value


def _first_fit(convert: Any, value: Any, hints: Sequence[Hint]) -> Any:
    """The first hint that fits; strings last, since they fit any text. The most telling misfit is passed on."""
    telling = _MisfitError()
    for hint in sorted(hints, key=lambda h: h is str):
        try:
            return convert(value, hint)
        except _MisfitError as misfit:
            telling = misfit if str(misfit) else telling
    raise telling


def parse(text: str, hint: Hint) -> Any:
    """``text`` of an override as the hint wants it. Lists are ``1,2,3`` or ``[1, 2, 3]``; ``none`` is None.

    Raises:
        _MisfitError: it can't be read so.
    """
    origin, args = _anatomy(hint)
    if origin in (Union, UnionType):
        listed = text.strip().startswith("[") or "," in text  # else a misspelt word would be a list of one string
        return _first_fit(parse, text, [arg for arg in args if listed or get_origin(arg) is not tuple])
    if hint is str or origin is Literal:
        return fit(text, hint)
    stripped = text.strip()
    if origin is tuple:
        items = [x.strip().strip("\"'") for x in stripped.removeprefix("[").removesuffix("]").split(",") if x.strip()]
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise _MisfitError
        return tuple(parse(x, args[0]) for x in items)
    if hint is bool or hint is NoneType:
        words: dict[str, bool | None] = {"true": True, "false": False} if hint is bool else {"none": None, "null": None}
        if stripped.lower() not in words:
            raise _MisfitError
        return words[stripped.lower()]
    if hint in (int, float):
        try:
            return fit(hint(stripped), hint)
        except ValueError:
            raise _MisfitError from None
    return fit(_parse_open(stripped), hint)


def _parse_open(text: str) -> Any:
    """A value for an open table: what TOML makes of it, or the text itself."""
    try:
        document = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise _MisfitError(f"nested more than {_DEEPEST} levels deep") from None
    except ValueError:  # more digits than Python reads
        raise _MisfitError("too large: integers have 64 bits") from None
    return document["x"] if len(document) == 1 else text


@cache
def leaf_hints(record: type) -> Mapping[str, Hint]:
    """Type hints of a record's leaves by dotted key, in order of declaration."""
    hints: dict[str, Hint] = {}
    for section, section_type in get_type_hints(record).items():
        if is_dataclass(section_type):
            hints |= {f"{section}.{name}": hint for name, hint in get_type_hints(section_type).items()}
    return hints


def _sections(record: type) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key.split(".")[0] for key in leaf_hints(record)))


def _unknown(record: type, key: str, place: str) -> Problem:
    """The problem of a key that does not exist, with a suggestion: the key meant, or those that there are."""
    hints, sections = leaf_hints(record), _sections(record)
    section, _, leaf = key.partition(".")
    siblings = [k.split(".")[1] for k in hints if k.startswith(section + ".")]
    near = [f"{section}.{found}" for found in [nearest(leaf, siblings, 0.6)] if found]
    near += [k for k in hints if k.split(".")[1] == (leaf or section)]
    if not siblings:
        near += [found for found in [nearest(key, hints if leaf else sections, 0.6)] if found]
    if near:
        advice = f"did you mean {near[0]}?"
    else:
        advice = f"[{section}] has {', '.join(siblings)}" if siblings else f"sections: {', '.join(sections)}"
    return Problem(f"unknown key {key}: {advice}", (key,), place)


def _misfit(key: str, value: Any, hint: Hint, why: _MisfitError, place: str) -> Problem:
    shown = _clipped(json.dumps(_outline(value, 4), ensure_ascii=False, default=repr))
    wanted = "" if hint is None else f", expected {expected(hint)}"
    reason = f" ({why})" if str(why) else ""
    return Problem(f"{_clipped(key)} is {shown}{wanted}{reason}", (key,), place)


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _outline(value: Any, levels: int) -> Any:
    """``value`` with what is nested deeper than ``levels`` left out, and without numbers too long to print."""
    if isinstance(value, (Mapping, list, tuple)) and not levels:
        return "..."
    if isinstance(value, Mapping):
        return {key: _outline(x, levels - 1) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_outline(x, levels - 1) for x in value]
    return "a number of many digits" if type(value) is int and value.bit_length() > 200 else value


def collect_mapping(record: type, mapping: Mapping[str, Any], place: str, into: Collected) -> None:
    """Check the sections and leaves of ``mapping`` against ``record`` and add them to ``into``."""
    hints = leaf_hints(record)
    for section, content in mapping.items():
        if section not in _sections(record):
            into.problems.append(_unknown(record, section, place))
            continue
        if not isinstance(content, Mapping):
            message = f"{section} is a section: write a table with its keys"
            keys = tuple(k for k in hints if k.startswith(section + "."))
            into.problems.append(Problem(message, keys, place))
            continue
        for leaf, value in content.items():
            key = f"{section}.{leaf}"
            if key not in hints:
                into.problems.append(_unknown(record, key, place))
                continue
            try:
                into.add(key, fit(value, hints[key]), place)
            except _MisfitError as why:
                into.problems.append(_misfit(key, value, hints[key], why, place))


def collect_override(record: type, override: str, into: Collected) -> None:
    """Check one ``section.key=value`` and add it to ``into``; ``section.table.name=value`` sets inside an open table."""
    hints, place = leaf_hints(record), f"override {_clipped(override)!r}"
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        into.problems.append(Problem("write it as section.key=value", (key,), place))
        return
    table = ".".join(key.split(".")[:2])
    if key in _sections(record):
        into.problems.append(Problem(f"{key} is a section: set one of its keys, {key}.NAME=value", (key,), place))
    elif key in hints:
        try:
            into.add(key, parse(text, hints[key]), place)
        except _MisfitError as why:
            into.problems.append(_misfit(key, text, hints[key], why, place))
    elif get_origin(hints.get(table)) in (Mapping, dict) and all(key.split(".")):
        try:
            value = _with_nested(into.values.get(table, {}), key.split(".")[2:], _parse_open(text.strip()))
            into.add(table, _fit_open(value, _DEEPEST), place)
        except _MisfitError as why:
            into.problems.append(_misfit(key, text, None, why, place))
    else:
        into.problems.append(_unknown(record, key, place))


def _with_nested(table: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """``table`` with ``value`` at ``path``; tables on the way are made, other values there are replaced."""
    if len(path) > _DEEPEST:
        raise _MisfitError(f"nested more than {_DEEPEST} levels deep")
    head, rest = path[0], path[1:]
    inner = table.get(head)
    new = _with_nested(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value
    return {**table, head: new}


def read_mapping(path: Path, what: str = "config file") -> Mapping[str, Any]:
    """The parsed content of a ``.toml`` or ``.json`` file, which messages call ``what``.

    Raises:
        ConfigError: it is missing, of another kind, or malformed; names the file and, where known, the line.
    """
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path}: a {what} ends in .toml or .json")
    try:
        text = read_file(path).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); is it a {what}?") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror})") from None
    try:
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ConfigError(f"{path}: nested more than {_DEEPEST} levels deep") from None
    except ValueError as error:  # numbers of more digits than Python reads, too; then advice for programmers follows
        kind, why = path.suffix[1:].upper(), str(error).partition("; use sys.")[0]
        raise ConfigError(f"{path}: not valid {kind}: {' '.join(why.split())}") from None
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: the top level is {type(document).__name__}, expected an object with keys")
    return document


def to_mapping(record: Any) -> dict[str, dict[str, Any]]:
    """Sections and leaves as plain values that JSON can hold: tuples become lists."""
    return {
        section.name: {
            leaf.name: _plain(getattr(getattr(record, section.name), leaf.name))
            for leaf in fields(getattr(record, section.name))
        }
        for section in fields(record)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def to_toml(mapping: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML text of sections and leaves. None is left out, as TOML has no word for it: such leaves must default to None."""
    parts = []
    for section, leaves in mapping.items():
        lines = [f"{_toml_key(key)} = {_toml(value)}" for key, value in leaves.items() if value is not None]
        parts.append("\n".join([f"[{_toml_key(section)}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(x)}" for k, x in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
