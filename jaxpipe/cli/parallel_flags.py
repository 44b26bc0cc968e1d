"""``--pp --tp --cp --dp``: short forms of the settings ``pipeline.ranks``, ``.tp``, ``.cp`` and ``.dp``.

Importing this must not import JAX: ``--help`` is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxpipe.cli.parser import whole_number
from jaxpipe.errors import ConfigError

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
    flag_values = {key: (f"--{flag}", getattr(args, flag)) for flag, (key, _) in _FLAGS.items() if getattr(args, flag)}
    for override in overrides:
        key, _, text = override.partition("=")
        flag, number = flag_values.get(key.strip(), ("", None))
        if number is not None and text.strip() != str(number):
            raise ConfigError(f"{flag} {number} and {override!r} contradict each other: give one of them")
    return [f"{key}={number}" for key, (_, number) in flag_values.items()] + list(overrides)
