"""An argument parser that answers mistakes with one line and a suggestion, and the types of our flags.

argparse prints usage and exits on an error; here it raises :class:`~jaxpipe.errors.ConfigError`, which ``main`` prints.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
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
        for argument in joined:  # before argparse complains of a flag that is missing because this one is misspelt
            flag = argument.split("=", 1)[0] if argument.startswith("--") else argument[:2]
            if argument.startswith("-") and len(argument) > 1 and flag not in self._option_string_actions:
                self._refuse(argument)
        arguments, extra = self.parse_known_intermixed_args(joined)  # overrides may follow flags
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
    """Type of ``--cost``: three numbers F,B,W, each at least 0 and not all 0."""
    costs = _costs(text, "FBW", "three as F,B,W, such as 1,1,1")
    if sum(costs) == 0:
        raise argparse.ArgumentTypeError("all three costs are 0; at least one must take time")
    return costs


def cost_pair(text: str) -> tuple[float, ...]:
    """Type of ``--head``: two numbers S,T, each at least 0."""
    return _costs(text, "ST", "two as S,T, such as 0.5,0.5")


def _costs(text: str, ops: str, expected: str) -> tuple[float, ...]:
    parts = text.split(",")
    if len(parts) != len(ops):
        raise argparse.ArgumentTypeError(f"{text!r} has {len(parts)} value{'s' * (len(parts) != 1)}; want {expected}")
    return tuple(amount(f"cost of {op}")(part.strip()) for op, part in zip(ops, parts, strict=True))
