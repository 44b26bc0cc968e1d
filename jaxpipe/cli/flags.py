"""Parse arguments, convert the values of flags, and print results: what all verbs share.

argparse prints usage and exits on a mistake; :class:`Parser` raises :class:`~jaxpipe.errors.ConfigError` with one line and a
suggestion, which ``main`` prints. All paths of ``-o FILE`` are checked before any work is done, so a typing error in the second
does not cost the first. Importing this must not import JAX: ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxpipe.errors import ConfigError
from jaxpipe.text import closest

_NUMBER_LIKE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` where argparse would print usage and exit. Flags can't be abbreviated."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments.

        Raises:
            ConfigError: an unknown flag (with the closest known one), a stray argument, or a bad value.
            SystemExit: after ``--help``.
        """
        joined = self._join_negative_values(argv)
        # unknown flags first: argparse would complain of a required flag that is missing because this one is misspelt
        for argument in joined:
            flag = argument.split("=", 1)[0] if argument.startswith("--") else argument[:2]
            if argument.startswith("-") and len(argument) > 1 and flag not in self._option_string_actions:
                self._refuse(argument)
        # intermixed, as overrides (section.key=value) may stand before, between and after flags
        arguments, extra = self.parse_known_intermixed_args(joined)
        if extra:
            self._refuse(extra[0])
        return arguments

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (see '{self.prog} --help')")

    def _refuse(self, argument: str) -> NoReturn:
        if argument.startswith("-"):
            flag = argument.split("=", 1)[0]
            hint = closest(flag, self._option_string_actions) if len(flag) > 2 else ""
            self.error(f"unknown flag {flag!r}{hint}")
        self.error(f"unexpected argument {argument!r}")

    def _join_negative_values(self, argv: Sequence[str]) -> list[str]:
        """Rewrite ``--cost -1,1,1`` as ``--cost=-1,1,1``, so that argparse reads a negative value, not an unknown flag."""
        joined: list[str] = []
        for argument in argv:
            if joined and joined[-1] in self._option_string_actions and _NUMBER_LIKE.match(argument):
                joined[-1] += f"={argument}" if joined[-1].startswith("--") else argument
            else:
                joined.append(argument)
        return joined


def add_value(
    where: argparse._ActionsContainer,
    flags: str,
    metavar: str,
    kind: Callable[[str], Any],
    text: str,
    default: Any = None,
    **options: Any,
) -> None:
    """Add a flag, ``--long`` or ``-s --long``, that takes one value of a ``kind``, such as :func:`amount`; its help is ``text``
    and the default. ``options`` go to ``add_argument``."""
    shown = "" if default is None else f" (default {default if isinstance(default, str) else format(default, 'g')})"
    where.add_argument(*flags.split(), metavar=metavar, type=kind, default=default, help=text + shown, **options)


def add_switch(where: argparse._ActionsContainer, flag: str, text: str) -> None:
    """Add a flag without a value."""
    where.add_argument(flag, action="store_true", help=text)


def add_json_flag(where: argparse._ActionsContainer, text: str = "print one JSON document instead of text") -> None:
    """Add ``--json``."""
    add_switch(where, "--json", text)


def add_repeated(where: argparse._ActionsContainer, flags: str, metavar: str, text: str, **options: Any) -> None:
    """Add a flag that may be given several times: a list of strings."""
    where.add_argument(*flags.split(), metavar=metavar, action="append", help=text, **{"default": [], **options})


def whole_number(name: str, most: int, *, least: int = 1) -> Callable[[str], int]:
    """Return the type of a flag that counts ``name``: an integer from ``least`` to ``most``."""

    def convert(text: str) -> int:
        # int() alone would also read 1_000, blanks and digits of other scripts
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; want {least} to {most} {name}")
        if len(text) > 18 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} {name} can't be; want {least} to {most}")
        return int(text)

    return convert


def amount(name: str, *, most: float = math.inf, zero: bool = True) -> Callable[[str], float]:
    """Return the type of a flag for a finite ``name`` from 0 (or above 0, if not ``zero``) to ``most``."""
    low = "at least 0" if zero else "above 0"
    expected = f"want a number {low}" + (f" and at most {most:g}" if most < math.inf else "")

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name} {text!r} is not a number; {expected}") from None
        if not math.isfinite(value) or value < 0 or value > min(most, 1e15) or (value == 0 and not zero):
            raise argparse.ArgumentTypeError(f"{name} is {text}; {expected}")
        return value

    return convert


def cost_triple(text: str) -> tuple[float, ...]:
    """Convert ``--cost``: three numbers F,B,W, each at least 0 and not all 0."""
    costs = _costs(text, "FBW", "three as F,B,W, such as 1,1,1")
    if sum(costs) == 0:
        raise argparse.ArgumentTypeError("all three costs are 0; at least one must take time")
    return costs


def cost_pair(text: str) -> tuple[float, ...]:
    """Convert ``--head``: two numbers S,T, each at least 0."""
    return _costs(text, "ST", "two as S,T, such as 0.5,0.5")


def _costs(text: str, ops: str, expected: str) -> tuple[float, ...]:
    parts = text.split(",")
    if len(parts) != len(ops):
        raise argparse.ArgumentTypeError(f"{text!r} has {len(parts)} value{'s' * (len(parts) != 1)}; want {expected}")
    return tuple(amount(f"cost of {op}")(part.strip()) for op, part in zip(ops, parts, strict=True))


SCHEDULE_SUFFIXES = (".sched", ".json", ".csv")
PICTURE_SUFFIXES = (".svg", ".png", ".html", ".trace.json")


def add_output_flag(parser: argparse.ArgumentParser, suffixes: Sequence[str], *, required: bool = False) -> None:
    """Add ``-o``/``--output``."""
    text = f"write FILE, in the form its suffix names: {' '.join(suffixes)} (repeatable)"
    add_repeated(parser, "-o --output", "FILE", text, required=required)


def add_costs_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``-o``/``--output`` to a verb that measures costs."""
    add_value(parser, "-o --output", "FILE", str, "write the cost profile as JSON (for --costs of the schedule verbs)")


def check_output(path: str | None, suffixes: Sequence[str], flag: str = "-o") -> None:
    """Run :func:`check_outputs` on one optional path."""
    check_outputs([path] if path else [], suffixes, flag)


def check_outputs(paths: Sequence[str], suffixes: Sequence[str], flag: str = "-o") -> None:
    """Refuse paths, given as ``flag``, that can't be written.

    Raises:
        ConfigError: an unknown suffix, a directory, a missing or unwritable folder, a null byte, or a path given twice.
    """
    for k, path in enumerate(paths):
        if "\0" in path:
            raise ConfigError(f"{flag} {path!r}: a path can't hold a null byte")
        suffix = suffix_of(path)
        if suffix not in suffixes:
            raise ConfigError(
                f"{flag} {path!r}: unknown suffix {suffix!r}{closest(suffix, suffixes)}; use one of {' '.join(suffixes)}"
            )
        where = Path(path)
        # os.access answers for the moment only, but catches what users do: the write itself may still fail
        if where.is_dir():
            raise ConfigError(f"{flag} {path!r} is a directory; name a file in it")
        if not where.parent.is_dir():
            raise ConfigError(f"{flag} {path!r}: there is no directory {str(where.parent)!r}; create it first")
        if not os.access(where if where.exists() else where.parent, os.W_OK):
            raise ConfigError(f"{flag} {path!r} can't be written: permission denied")
        if path in paths[:k]:
            raise ConfigError(f"{flag} {path!r} is given twice")


def suffix_of(path: str) -> str:
    """Return the suffix that decides the format: ``.trace.json`` counts as one."""
    name = Path(path).name.lower()
    return ".trace.json" if name.endswith(".trace.json") else Path(name).suffix


def is_picture(path: str) -> bool:
    """Return whether ``path`` names a picture (or trace) rather than a schedule."""
    return suffix_of(path) in PICTURE_SUFFIXES


def notice(text: str) -> None:
    """Print a line to stderr, where it never mixes with results."""
    print(text, file=sys.stderr, flush=True)


def print_json(document: object) -> None:
    """Print one JSON document; nothing else goes to stdout with ``--json``."""
    # NaN and Infinity are no JSON: better an error here than in the reader's parser
    print(json.dumps(document, allow_nan=False))


_MOST = 65536
_FLAGS = {
    "pp": ("pipeline.ranks", "pipeline ranks"),
    "tp": ("pipeline.tp", "tensor-parallel devices of each rank"),
    "cp": ("pipeline.cp", "devices of each rank that share each sequence"),
    "dp": ("pipeline.dp", "data-parallel devices of each rank"),
}


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; each is None unless given."""
    for flag, (key, text) in _FLAGS.items():
        parser.add_argument(f"--{flag}", type=whole_number(text, _MOST), metavar="N", help=f"{text}: short for {key}=N")


def with_parallel_flags(args: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the flags, followed by ``overrides``.

    Raises:
        ConfigError: a flag and an override say different things about one setting.
    """
    # compared as texts, as neither has been decoded: 04 for 4 is refused, which is odd but safe
    flag_values = {key: (f"--{flag}", getattr(args, flag)) for flag, (key, _) in _FLAGS.items() if getattr(args, flag)}
    for override in overrides:
        key, _, text = override.partition("=")
        flag, number = flag_values.get(key.strip(), ("", None))
        if number is not None and text.strip() != str(number):
            raise ConfigError(f"{flag} {number} and {override!r} contradict each other: give one of them")
    return [f"{key}={number}" for key, (_, number) in flag_values.items()] + list(overrides)
