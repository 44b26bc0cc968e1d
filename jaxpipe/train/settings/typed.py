"""Typed settings: frozen dataclasses filled from TOML or JSON files and from dotted overrides.

What: :class:`Collected` takes a mapping (a parsed file) and overrides such as ``run.steps=200`` and keeps checked values by
dotted key; every problem found is kept, with its place (file or override) and key, so that a user mends all of them at once.
:func:`decode` does so for one table. A field that is itself a record is a section, or, inside one, a table; the others are
leaves. One name may be left out of the key of a leaf in a table: that of the section or that of the table. Leaf types that are
understood: ``bool int float str``, ``Literal`` of strings, ``X | None``, unions, ``tuple[X, ...]``, ``tuple[X, Y]``,
``Mapping[str, X]`` and ``Mapping[str, Any]`` (an open table); in a union or a mapping also a record. ``Annotated[X, test, …]``
adds tests of the value: functions that say what is wrong with it, such as :func:`within`.
A value that TOML, strict JSON or a file name can't hold is refused: integers beyond 64 bits, NaN and infinity, text with null
characters or bytes that are no UTF-8, tables nested more than 32 levels deep.
Does not model: environment variables, includes, interpolation, several files.

Written by hand: msgspec 0.22 reports the first problem only, cattrs reads ``"3"`` as a number. pydantic 2.14 in strict mode
reports all, but wants values as JSON text (it refuses lists for tuples otherwise), reports a problem once for each part of a
union, takes infinity, integers of 70 bits and lists 40 deep unless configured, and reads the text of an override its own way
(``3.0`` is an integer, ``on`` is true, ``1,2,3`` no list). It could replace :func:`_fit` and :func:`_first_fit` alone, and
takes 0.23 s of CPU time to import, half of what this room takes.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxpipe.errors import ConfigError
from jaxpipe.files import read_file, unique_keys
from jaxpipe.text import nearest, truncate

Hint = Any  # a type annotation
Test = Callable[[Any], str]  # what is wrong with a value, such as "must be at least 1"; empty: nothing
_T = TypeVar("_T")
_DEEPEST = 32  # tables and lists inside one another
_SHOWN = 60  # characters of a value in a message
_origin: Callable[[Hint], Any] = get_origin
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_DOCUMENTED = re.compile(r"((?:^ +#:.*\n)+) +(\w+):", re.MULTILINE)
_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", NoneType: "none"}


def within(low: float, high: float = 2**31 - 1) -> Test:
    """Make a test of numbers from ``low`` to ``high``; by default what JAX counts steps and positions with."""

    def test(value: float) -> str:
        return f"must be at least {low}" if value < low else f"must be at most {high}" if value > high else ""

    return test


def positive(value: float) -> str:
    """Test that a number is greater than 0."""
    return "" if value > 0 else "must be greater than 0"


def in_float32(value: float) -> str:
    """Test that float32 holds a number without loss of its magnitude."""
    return (
        "" if value == 0 or 1.2e-38 <= abs(value) <= 3.4e38 else "which float32 does not hold: use 1.2e-38 to 3.4e+38"
    )


def not_empty(text: str) -> str:
    """Test that a string is not empty."""
    return "" if text.strip() else "must not be empty"


class _MisfitError(Exception):
    """A value is of another type than its hint. The text says what is expected."""


def _refuse(key: str, value: Any, wrong: str) -> None:
    """Raise ConfigError if anything is ``wrong`` with a value."""
    if wrong:
        raise ConfigError(f"{truncate(key, _SHOWN)} is {_shown(value)}, {wrong}")


def fit(value: Any, hint: Hint, key: str, *, text: bool = False) -> Any:
    """Return ``value`` (as TOML, JSON or Python gives it) as the hint requires; integers pass as numbers, lists become tuples.

    ``key``: what messages call it. ``text``: it is the text of an override, in which lists are ``1,2,3`` or ``[1, 2, 3]``, and
    ``none`` is None.

    Raises:
        ConfigError: it is of another type, one of the tests says what is wrong with it, or no file can hold it.
    """
    try:
        return _fit(value, hint, key, text)
    except _MisfitError as misfit:
        _refuse(key, value, f"expected {misfit}")


def _fit(value: Any, hint: Hint, key: str, text: bool) -> Any:
    """Fit a value as :func:`fit` does; raise _MisfitError for one of another type, so that a union may try its next part."""
    origin, args = _origin(hint), get_args(hint)
    if origin is Annotated:
        fitted = _fit(value, args[0], key, text)
        for test in args[1:]:
            _refuse(key, fitted, test(fitted))
        return fitted
    if origin in (Union, UnionType):
        return _first_fit(value, args, key, text)
    if origin is tuple:
        if text:
            listed = value.strip().removeprefix("[").removesuffix("]").split(",")
            value = [item.strip().strip("\"'") for item in listed if item.strip()]
        if not isinstance(value, (list, tuple)) or (args[-1] is not Ellipsis and len(value) != len(args)):
            raise _MisfitError("a list" if args[-1] is Ellipsis else f"a list of {len(args)} values")
        return tuple(fit(item, args[0], f"{key}[{k}]", text=text) for k, item in enumerate(value))
    if text:
        value = _parse_text(value, hint, key)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        near = nearest(str(value), args, 0.6)
        raise _MisfitError(f"one of {', '.join(map(repr, args))}" + (f" (did you mean {near!r}?)" if near else ""))
    if hint in _SCALARS:
        # An int too large for a double must not raise here: as infinity it is refused by its key like any other.
        if hint is float and type(value) is int:
            value = float(value) if abs(value) <= sys.float_info.max else math.inf
        # Not isinstance: True is an int to Python, and no number to a user.
        if type(value) is not hint:
            raise _MisfitError(_SCALARS[hint])
        _refuse(key, value, "" if value is None else _unstorable(value))
        return value
    if not isinstance(value, Mapping):
        raise _MisfitError("a table")
    if is_dataclass(hint):
        return decode(hint, value, f"{key}.")  # type: ignore[arg-type]  # a class
    if args[1] is Any:
        _refuse(key, value, _unstorable(value))
        return plain(value)
    return {name: fit(x, args[1], f"{key}.{name}") for name, x in value.items()}


def _first_fit(value: Any, hints: Sequence[Hint], key: str, text: bool) -> Any:
    """Fit a value to the first hint that takes it; strings come last, since they fit any text."""
    expected = []
    # One word is not taken for a list of one string, or every misspelt word of a union would fit.
    one_word = text and not re.search(r"^\s*(\[|\d+\s*$)|,", value)
    for hint in sorted(hints, key=lambda h: _bare(h) is str):
        try:
            if one_word and _origin(_bare(hint)) is tuple:
                raise _MisfitError("a list")
            return _fit(value, hint, key, text)
        except _MisfitError as misfit:
            expected.append(str(misfit))
    raise _MisfitError(" or ".join(expected))


def _bare(hint: Hint) -> Hint:
    """Return the hint without tests."""
    return get_args(hint)[0] if _origin(hint) is Annotated else hint


def _parse_text(text: str, hint: Hint, key: str) -> Any:
    """Parse the text of an override by its hint; return the text itself where it says nothing to it."""
    if hint is str or _origin(hint) is Literal:
        return text
    text = text.strip()
    if hint in (bool, NoneType):
        return _WORDS.get(text.lower(), text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return text
    return _parse_open(text, key)


def _parse_open(text: str, key: str) -> Any:
    """Parse a value for an open table: what TOML makes of it, or the text itself."""
    try:
        document = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise ConfigError(f"{key} is nested more than {_DEEPEST} levels deep") from None
    except ValueError:  # more digits than Python reads
        raise ConfigError(f"{key} is too large: integers have 64 bits") from None
    # Text with a line break could go on with keys of its own; then it is a string, not TOML.
    return document["x"] if len(document) == 1 else text


def _unstorable(value: Any, levels: int = _DEEPEST) -> str:
    """Return why TOML, strict JSON or file names can't hold a value nested at most ``levels`` deep; empty if they can."""
    if isinstance(value, (Mapping, list, tuple)):
        if not levels:
            return f"nested more than {_DEEPEST} levels deep"
        inside = [*value, *value.values()] if isinstance(value, Mapping) else value
        return next(filter(None, (_unstorable(x, levels - 1) for x in inside)), "")
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "too large: integers have 64 bits"
    if type(value) is float and not math.isfinite(value):
        return "which is not finite"
    if type(value) is str and "\0" in value:
        return "which holds a null character"
    if type(value) is str and any("\ud800" <= character <= "\udfff" for character in value):
        return "which is not UTF-8 text"
    if type(value) not in (bool, int, float, str):
        return f"which holds {value!r}: use numbers, strings, true, false, lists and tables"
    return ""


def _shown(value: Any) -> str:
    try:
        return truncate(json.dumps(value, ensure_ascii=False, default=repr), _SHOWN)
    except (RecursionError, ValueError):  # nested too deeply, more digits than Python prints
        return "a value too long to print"


@cache
def _hints(record: type) -> Mapping[str, Hint]:
    """Return type hints by field; one that is not compared is no setting."""
    hints = get_type_hints(record, include_extras=True)
    return {f.name: hints[f.name] for f in fields(record) if f.compare}


@cache
def leaf_hints(record: type) -> Mapping[str, Hint]:
    """Return type hints, with their tests, of a record's leaves by dotted key, in order of declaration."""
    hints: dict[str, Hint] = {}
    for name, hint in _hints(record).items():
        if is_dataclass(hint):
            hints |= {f"{name}.{leaf}": x for leaf, x in leaf_hints(hint).items()}  # type: ignore[arg-type]  # a class
        else:
            hints[name] = hint
    return hints


class Section:
    """A record in which what one of its records alone has may be read without its name, as ``run.keep_last`` for
    ``run.output.keep_last``."""

    __slots__ = ()
    # Hidden from type checkers: our own code uses full names, and a misspelt one must not pass as Any.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            inside = [key for key, hint in _hints(type(self)).items() if is_dataclass(hint) and name in _hints(hint)]
            if len(inside) != 1:
                raise AttributeError(f"{type(self).__name__} has no {name!r}", name=name, obj=self)
            return getattr(getattr(self, inside[0]), name)


@cache
def _short_keys(record: type) -> Mapping[str, str]:
    """Return the keys of leaves in tables by what they may be called: without the table, or without the section."""
    # A section may have what several tables have under one name; the later one would win, so names are unique (a test).
    parts = {key: key.split(".") for key in leaf_hints(record)}
    tables = {key: path for key, path in parts.items() if len(path) == 3}
    return {f"{name}.{leaf}": key for key, (*names, leaf) in tables.items() for name in names}


@cache
def _tables(record: type) -> frozenset[str]:
    """Return all names by which a key may call sections and tables."""
    paths = [key.split(".")[:-1] for key in leaf_hints(record)]
    return frozenset(".".join(x[a:b]) for x in paths for a in range(len(x)) for b in range(a + 1, len(x) + 1))


def full_key(record: type, key: str) -> str:
    """Return the key of a leaf of ``record`` that ``key`` may leave a name out of; ``key`` itself where there is none."""
    return key if key in leaf_hints(record) else _short_keys(record).get(key, key)


def leaves_of(record: type, table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in ``table`` by their full keys, also those of leaves that ``record`` does not have."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        inside = not prefix or key in _tables(record)
        if isinstance(value, Mapping) and inside and key not in leaf_hints(record):
            yield from leaves_of(record, value, f"{key}.")
        else:
            yield full_key(record, key), value


def describe_hint(hint: Hint) -> str:
    """Describe in words what a value of this type may be."""
    origin, args = _origin(hint), get_args(hint)
    if origin is Annotated:
        return describe_hint(args[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(describe_hint, args)))
    if origin is Literal:
        return " | ".join(args)
    if origin is tuple:
        return f"a list, each {describe_hint(args[0])}" if args[-1] is Ellipsis else f"a list of {len(args)} values"
    return _SCALARS.get(hint, "a table")


def leaf_docs(record: type, prefix: str = "") -> Mapping[str, str]:
    """Return, by dotted key, what ``#:`` says above each leaf of a record; by the key of each section and table, the first line
    of its docstring."""
    documented = _DOCUMENTED.findall(inspect.getsource(record))
    docs = {prefix + name: " ".join(text.replace("#:", "").split()) for text, name in documented}
    for name, hint in _hints(record).items():
        if is_dataclass(hint):
            docs[f"{prefix}{name}"] = (hint.__doc__ or "").partition("\n")[0]
            docs |= leaf_docs(hint, f"{prefix}{name}.")  # type: ignore[arg-type]  # a class
    return docs


@dataclass(slots=True)
class Collected:
    """Values by dotted key for a record, and the problems met on the way, each a line, with the keys that they involve.

    Keys not given are absent. ``prefix``: what messages put before keys. ``overridden``: keys that overrides gave.
    """

    record: type
    prefix: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    overridden: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    bad_keys: set[str] = field(default_factory=set)

    def problem(self, place: str, message: str, *keys: str) -> None:
        """Note what is wrong; ``message`` names the keys."""
        self.problems.append(" ".join(f"{place}: {message}".removeprefix(": ").split()))
        self.bad_keys.update(keys)

    def add_table(self, table: Mapping[str, Any], place: str) -> None:
        """Check all sections and leaves of a mapping."""
        # Counted before values are checked: a short and a full key may name one leaf, and the later one would win in silence.
        for key, times in Counter(key for key, _ in leaves_of(self.record, table)).items():
            if times > 1:
                self.problem(place, f"{key} is given {times} times", key)
        for key, value in table.items():
            self.add(key, value, place)

    def add(self, key: str, value: Any, place: str, *, text: bool = False) -> None:
        """Check a leaf, or the leaves of a section, and keep what is right. ``text``: as in :func:`fit`."""
        hints, full = leaf_hints(self.record), full_key(self.record, key)
        if full in hints:
            try:
                self.values[full] = fit(value, hints[full], self.prefix + key, text=text)
            except ConfigError as error:
                self.problem(place, str(error), full)
        elif key not in _tables(self.record):
            self._unknown(key, place)
        elif isinstance(value, Mapping):
            for leaf, x in value.items():
                self.add(f"{key}.{leaf}", x, place)
        else:
            inside = [k for k in hints if f".{key}." in f".{k}"]
            self.problem(place, f"{key} is a section: set its keys, such as {inside[0]}", *inside)

    def add_override(self, override: str) -> None:
        """Check one ``section.key=value``; ``section.table.name=value`` sets inside an open table."""
        place = f"override {truncate(override, _SHOWN)!r}"
        key, equals, text = override.partition("=")
        key = key.strip()
        section, *path = key.split(".")
        table = ".".join([section, *path[:1]])
        self.overridden |= {table, full_key(self.record, key)}
        if not equals or not key:
            self.problem(place, "write it as section.key=value", key)
        elif _origin(leaf_hints(self.record).get(table)) is Mapping and path[1:] and all(path):
            try:
                value = _with_nested(plain(self.values.get(table, {})), path[1:], _parse_open(text.strip(), key))
                self.add(table, value, place)
            except ConfigError as error:
                self.problem(place, str(error), key)
        else:
            self.add(key, text, place, text=True)

    def add_missing(self, place: str, needs: str = "needs") -> None:
        """Note the record's own fields that have no default and are not given."""
        required = [f for f in fields(self.record) if f.default is MISSING and f.default_factory is MISSING]
        # A field with a wrong value is not missing as well: one mistake, one message.
        missing = [f"{self.prefix}{f.name}" for f in required if f.name not in self.values.keys() | self.bad_keys]
        if missing:
            self.problem(place, f"{needs} {', '.join(missing)}")

    def _unknown(self, key: str, place: str) -> None:
        """Note a key that does not exist, and the key meant, or those that there are."""
        hints = leaf_hints(self.record)
        section, _, leaf = key.rpartition(".")
        # Climb to the nearest section that exists: a key deep in an unknown table is answered with the keys around it.
        while section and not any(f".{section}." in f".{k}" for k in hints):
            section = section.rpartition(".")[0]
        inside = [k.rpartition(".")[2] for k in hints if section and f".{section}." in f".{k}"]
        names_there = inside or list(dict.fromkeys(k.partition(".")[0] for k in hints))
        candidates = [k for k in hints if k.endswith(f".{leaf}")]
        names = inside or dict.fromkeys(name for k in hints for name in k.split(".")[:-1] or [k])
        if not candidates and (near := nearest(leaf if inside else key.partition(".")[0], names, 0.6)):
            candidates = [f"{section}.{near}" if inside else near]
        advice = f"did you mean {self.prefix}{candidates[0]}?" if candidates else f"there are {', '.join(names_there)}"
        self.problem(place, f"unknown key {self.prefix}{key}: {advice}", key)

    def refuse(self) -> None:
        """Raise ConfigError with all problems on one line, if there are any."""
        if self.problems:
            raise ConfigError("; ".join(self.problems), self.problems)

    def build(self, record: type[_T], section: str = "") -> _T:
        """Build a record like the one that the values are for."""
        values = {}
        for name, hint in _hints(record).items():  # type: ignore[arg-type]  # a class
            if is_dataclass(hint):
                values[name] = self.build(hint, f"{section}{name}.")  # type: ignore[arg-type]  # a class
            elif section + name in self.values:
                values[name] = self.values[section + name]
        return record(**values)


def decode(record: type[_T], table: Mapping[str, Any], prefix: str = "") -> _T:
    """Return the record that ``table`` describes. ``prefix``: what messages put before its keys.

    Raises:
        ConfigError: all that is wrong with it, on one line.
    """
    collected = Collected(record, prefix)
    collected.add_table(table, "")
    collected.add_missing("")
    collected.refuse()
    return collected.build(record)


def _with_nested(table: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return ``table`` with ``value`` at ``path``; tables on the way are made, other values there are replaced."""
    if len(path) > _DEEPEST:
        raise ConfigError(f"{truncate('.'.join(path), _SHOWN)} is nested more than {_DEEPEST} levels deep")
    head, rest = path[0], path[1:]
    inner = table.get(head)
    new = _with_nested(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value
    return {**table, head: new}


def read_mapping(path: Path, what: str = "config file") -> Mapping[str, Any]:
    """Return the parsed content of a ``.toml`` or ``.json`` file, which messages call ``what``.

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


def plain(value: Any) -> Any:
    """Return records, mappings and tuples inside one another as what JSON can hold."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(x) for key, x in value.items()}
    return [plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def to_toml(mapping: Mapping[str, Mapping[str, Any]]) -> str:
    """Write sections and leaves as TOML. None is left out, as TOML has no word for it: such leaves must default to None."""
    parts = []
    for section, leaves in mapping.items():
        lines = [f"{key} = {_toml(value)}" for key, value in leaves.items() if value is not None]
        parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _toml(value: Any) -> str:
    """Write a value as JSON does, but for ``=`` in tables, None in them, and a character that TOML wants escaped."""
    if isinstance(value, Mapping):
        value = {key: x for key, x in value.items() if x is not None}
    return json.dumps(value, ensure_ascii=False, separators=(", ", " = ")).replace("\x7f", "\\u007f")
