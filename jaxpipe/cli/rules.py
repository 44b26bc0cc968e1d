"""Flags of ``schedule traverse``: the placement, and the rules by which ranks choose actions."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from jaxpipe.cli.costs import CostChoice, check_size, require_file
from jaxpipe.cli.schedule_flags import TRAVERSE
from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.schedule import CostProfile, Placement, Schedule, Traversal, traverse
from jaxpipe.schedule.placement import placement_named


def refuse_traverse_flags(arguments: argparse.Namespace) -> None:
    """Refuse the flags of ``traverse`` for families, which have a placement and rules of their own.

    Raises:
        ConfigError: names the flag.
    """
    for flag in ("placement", "rules", "unit-steps"):
        if getattr(arguments, flag.replace("-", "_")):
            raise ConfigError(f"{arguments.name} takes no --{flag}; it is for 'jaxpipe schedule {TRAVERSE}'")


def traversed(arguments: argparse.Namespace, costs: CostChoice) -> tuple[Schedule, CostProfile]:
    """Return the schedule that the flags describe, and its costs.

    Raises:
        JaxpipeError: flags that contradict each other, rules that can't be read, or nothing can go on under them.
    """
    if arguments.rules is None:
        raise ConfigError("traverse needs --rules, such as --rules 'backward in-flight=4,3,2,1'")
    if arguments.group is not None:
        raise ConfigError("traverse takes no --group; give an interval, such as forward=breadth:4")
    placement = placement_named(arguments.placement or "one-to-one", arguments.ranks, arguments.chunks)
    check_size(arguments.ranks, arguments.microbatches, placement.num_chunks)
    profile = costs.for_placement(placement, TRAVERSE)
    rules = _rules(arguments.rules, placement, arguments.microbatches)
    return traverse(placement, arguments.microbatches, rules, None if arguments.unit_steps else profile), profile


def _rules(text: str, placement: Placement, microbatches: int) -> Any:
    """Parse rules from one line, or take those of that name from a Python file."""
    path, _, name = text.rpartition(":")
    if text.endswith(".py"):
        raise ConfigError(f"--rules {text} names a file; say which of its names: {text}:NAME")
    if not path.endswith(".py"):
        return Traversal.parse(text)
    rule = _from_file(path, name)
    if not callable(rule):
        return rule
    try:
        return rule(placement, microbatches)
    except Exception as error:
        raise ConfigError(f"--rules {text}: {_said(error)}") from error


def _from_file(path: str, name: str) -> Any:
    """Run the Python file ``path`` and return its attribute ``name``."""
    require_file(path)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--rules {path}: it can't be run: {_said(error)}") from error
    if not hasattr(module, name):
        raise ConfigError(f"--rules {path}:{name}: the file has no {name!r}")
    return getattr(module, name)


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, JaxpipeError) else " ".join(f"{type(error).__name__}: {error}".split())
