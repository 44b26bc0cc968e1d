"""``jaxpipe rehearse CONFIG --rank R``: one rank's real program alone, on as many devices as one rank has (one without tensor
or data parallelism); ``--all-ranks``: each in turn."""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial

from jaxpipe.cli.outputs import add_costs_flag, check_output
from jaxpipe.cli.parallel_flags import add_parallel_flags, with_parallel_flags
from jaxpipe.cli.parser import add_json_flag, add_switch, add_value, amount, whole_number
from jaxpipe.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def memory_size(text: str) -> float:
    """Parse ``--memory``: a number with a unit, in bytes."""
    size_match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if size_match is None or size_match[2].upper() not in _UNITS or not float(size_match[1]) > 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no amount of memory; want a number and a unit, such as 80GB or 500MiB"
        )
    return float(size_match[1]) * _UNITS[size_match[2].upper()]


def configure_rehearse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="TOML or JSON settings, as for train")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that override the file")
    add_parallel_flags(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--rank", type=whole_number("rank", 4096, least=0), metavar="R", help="the rank to rehearse")
    which.add_argument("--all-ranks", action="store_true", help="every rank in turn: predicts the whole cluster's step")
    add_value(parser, "--steps", "N", whole_number("steps", 10_000), "timed steps, beside the first", 5)
    add_value(parser, "--memory", "SIZE", memory_size, "rehearse on a device of this size, such as 80GB")
    add_switch(parser, "--no-optimizer", "leave out master parameters and optimizer state")
    add_switch(parser, "--no-host-link", "don't measure copies to the host and back")
    text = "between ranks, for the prediction (default: transfers are free)"
    add_value(parser, "--link-bandwidth", "GB/S", amount("bandwidth", zero=False), text)
    add_value(parser, "--link-latency", "US", amount("latency"), "of a transfer, in microseconds", 0.0)
    add_costs_flag(parser)
    add_json_flag(parser, "print everything as JSON on stdout, progress on stderr")


def run_rehearse(args: argparse.Namespace) -> None:
    from jaxpipe.train.config import load_config

    config = load_config(args.config, with_parallel_flags(args, args.overrides))
    ranks = config.pipeline.ranks
    if args.rank is not None and args.rank >= ranks:
        raise ConfigError(f"--rank {args.rank}: {args.config} has ranks 0 to {ranks - 1}")
    check_output(args.output, (".json",))
    from jaxpipe.train.devices import device_errors, find_devices, request_devices

    size = config.pipeline.rank_devices
    request_devices(size, config.run.machine.platform)
    from jaxpipe.cost import measure_host_link
    from jaxpipe.rehearsal.ranks import rehearse, rehearsed_json, rehearsed_text
    from jaxpipe.schedule import Link, write_costs
    from jaxpipe.train.import_export import completed
    from jaxpipe.train.setup import prepare

    progress = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    devices = find_devices(size, config.run.machine.platform, tp=config.pipeline.tp, cp=config.pipeline.cp)
    prepared = prepare(completed(config))
    rate = args.link_bandwidth * 1e9 if args.link_bandwidth is not None else float("inf")
    with device_errors("rehearse"):
        measured = None
        if not args.no_host_link:
            progress("timing copies to the host and back")
            measured = measure_host_link(devices[:1])
        rehearsal = rehearse(
            prepared,
            devices,
            range(ranks) if args.all_ranks else [args.rank],
            progress,
            steps=args.steps,
            optimizer=not args.no_optimizer,
            memory_limit_bytes=args.memory,
            link=Link(args.link_latency * 1e-6, rate),
            host=measured.host_link() if measured is not None else None,
        )
    if args.output:
        write_costs(rehearsal.costs, args.output)
    print(json.dumps(rehearsed_json(rehearsal)) if args.json else rehearsed_text(rehearsal))
