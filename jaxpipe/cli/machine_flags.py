"""Flags of the verbs that model a machine: the target, the fraction of its rates that is reached, the memory limit.

Importing this must not import JAX: ``--help`` is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpipe.cli.parser import add_value, amount
from jaxpipe.errors import ConfigError

if TYPE_CHECKING:
    from jaxpipe.planning.roofline import Efficiency
    from jaxpipe.planning.targets import Target
    from jaxpipe.train.config import TrainConfig

_EFFICIENCIES = {
    "matmul": ("--matmul-efficiency", "part of the dense peak that matrix products reach (default 0.75)"),
    "bandwidth": ("--bandwidth-efficiency", "part of the memory bandwidth that other kernels reach (default 0.8)"),
    "link": ("--link-efficiency", "part of NVLink's and the network's bandwidth (default 0.8)"),
    "host": ("--host-efficiency", "part of the host link's bandwidth (default 0.85)"),
    "memory": ("--memory-fraction", "part of the device's memory that arrays may fill (default 0.92)"),
}


def add_settings_argument(parser: argparse.ArgumentParser) -> None:
    """``CONFIG section.key=value …``."""
    text = "TOML or JSON settings of a training run, and overrides of them; without a file the defaults"
    parser.add_argument("settings", nargs="*", metavar="CONFIG section.key=value", help=text)


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """``--target --memory-limit-gb`` and the efficiencies."""
    text = "machine: a100 a100-40 a800 h100 h200 h20 b200 cpu, or a file that describes one"
    add_value(parser, "--target", "NAME|FILE.json", str, text, "h100")
    text = "bytes ÷ 10⁹ that arrays may fill on a device, instead of a part of the target's memory"
    add_value(parser, "--memory-limit-gb", "GB", amount("memory limit", zero=False), text)
    for flag, text in _EFFICIENCIES.values():
        add_value(parser, flag, "X", amount(flag.strip("-"), most=1, zero=False), text)


def config_of(args: argparse.Namespace, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load the config file that the arguments name, with their overrides and then ``overrides``.

    Raises:
        ConfigError: two files, or any value is wrong.
    """
    from jaxpipe.train.config import load_config

    files = [x for x in args.settings if "=" not in x]
    if len(files) > 1:
        raise ConfigError(f"give one config file: got {' and '.join(map(repr, files))}")
    return load_config(files[0] if files else None, overrides)


def machine_of(args: argparse.Namespace, *, used: bool = False) -> tuple[Target, Efficiency, float]:
    """Return the target, its efficiencies, and the bytes that arrays may fill on a device. Without the devices here,
    unless they are ``used``.

    Raises:
        ConfigError: there is no such target.
    """
    from jaxpipe.planning.targets import find_target

    target = find_target(args.target)
    if not used:
        without_devices()
    from jaxpipe.planning.roofline import Efficiency

    efficiencies = {name: getattr(args, flag.strip("-").replace("-", "_")) for name, (flag, _) in _EFFICIENCIES.items()}
    efficiency = Efficiency(**{name: x for name, x in efficiencies.items() if x is not None})
    return (
        target,
        efficiency,
        args.memory_limit_gb * 1e9 if args.memory_limit_gb else target.memory_bytes * efficiency.memory,
    )


def without_devices() -> None:
    """Make JAX use the CPU: nothing runs on a device, and a GPU's driver may be slow to start. Call it before JAX is
    imported."""
    import os

    from jaxpipe.train.devices import request_devices

    request_devices(1, "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
