"""Output of verbs: ``-o FILE``, repeatable, a schedule or picture in the format of its suffix; notices; JSON.

All paths are checked before any work is done, so a typing error in the second does not cost the first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.cli.parser import add_repeated, add_value
from jaxpipe.errors import ConfigError
from jaxpipe.text import closest

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
    print(json.dumps(document, allow_nan=False))
