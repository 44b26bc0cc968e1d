"""Run the verbs about machines that are not here: ``plan``, ``tune`` and ``rehearse``, and add their flags.

``plan`` and ``tune`` model a machine; ``rehearse`` runs one rank's real program alone, on as many devices as one rank has (one
without tensor or data parallelism). Importing this must not import JAX: ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe.cli import flags
from jaxpipe.errors import ConfigError
from jaxpipe.files import user_cache, write_atomically
from jaxpipe.train.devices import device_errors, find_devices, memory_fraction, request_devices, request_gpus

if TYPE_CHECKING:
    from jaxpipe.planning.predict import Prediction
    from jaxpipe.planning.roofline import Efficiency
    from jaxpipe.planning.space import Suggestion, Suggestions, TuneResult
    from jaxpipe.planning.stages import Stopwatch
    from jaxpipe.planning.targets import Target
    from jaxpipe.train.config import TrainConfig


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
    flags.add_parallel_flags(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--rank", type=flags.whole_number("rank", 4096, least=0), metavar="R", help="the rank to rehearse"
    )
    which.add_argument("--all-ranks", action="store_true", help="every rank in turn: predicts the whole cluster's step")
    flags.add_value(parser, "--steps", "N", flags.whole_number("steps", 10_000), "timed steps, beside the first", 5)
    flags.add_value(parser, "--memory", "SIZE", memory_size, "rehearse on a device of this size, such as 80GB")
    flags.add_switch(parser, "--no-optimizer", "leave out master parameters and optimizer state")
    flags.add_switch(parser, "--no-host-link", "don't measure copies to the host and back")
    text = "between ranks, for the prediction (default: transfers are free)"
    flags.add_value(parser, "--link-bandwidth", "GB/S", flags.amount("bandwidth", zero=False), text)
    flags.add_value(parser, "--link-latency", "US", flags.amount("latency"), "of a transfer, in microseconds", 0.0)
    flags.add_costs_flag(parser)
    flags.add_json_flag(parser, "print everything as JSON on stdout, progress on stderr")


def run_rehearse(args: argparse.Namespace) -> None:
    from jaxpipe.train.config import load_config

    config = load_config(args.config, flags.with_parallel_flags(args, args.overrides))
    ranks = config.pipeline.ranks
    if args.rank is not None and args.rank >= ranks:
        raise ConfigError(f"--rank {args.rank}: {args.config} has ranks 0 to {ranks - 1}")
    flags.check_output(args.output, (".json",))
    # before JAX is imported, which reads the number of emulated devices from its environment
    size = config.pipeline.mesh.num_devices
    request_devices(size, config.run.machine.platform)
    request_gpus(config.run)
    from jaxpipe.cost.profile import measure_host_link
    from jaxpipe.rehearsal.rank import rehearse, rehearsed_json, rehearsed_text
    from jaxpipe.schedule import Link, write_costs
    from jaxpipe.train.import_export import completed
    from jaxpipe.train.setup import prepare

    progress = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    devices = find_devices(size, config.run.machine.platform, config.pipeline.mesh)
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


_EFFICIENCIES = {
    "matmul": ("--matmul-efficiency", "part of the dense peak that matrix products reach (default: of the target)"),
    "bandwidth": ("--bandwidth-efficiency", "part of the memory bandwidth that other kernels reach (default 0.8)"),
    "link": ("--link-efficiency", "part of NVLink's and the network's bandwidth (default 0.8)"),
    "host": ("--host-efficiency", "part of the host link's bandwidth (default 0.85)"),
    "memory": ("--memory-fraction", "part of the device's memory that arrays may fill (default: what train gets)"),
}


def add_settings_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``CONFIG section.key=value …``."""
    text = "TOML or JSON settings of a training run, and overrides of them; without a file the defaults"
    parser.add_argument("settings", nargs="*", metavar="CONFIG section.key=value", help=text)


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--target --memory-limit-gb`` and the efficiencies."""
    text = "machine: a100 a100-40 a800 h100 h200 h20 b200 cpu, or a file that describes one"
    flags.add_value(parser, "--target", "NAME|FILE.json", str, text, "h100")
    text = "bytes ÷ 10⁹ that arrays may fill on a device, instead of a part of the target's memory"
    flags.add_value(parser, "--memory-limit-gb", "GB", flags.amount("memory limit", zero=False), text)
    for flag, text in _EFFICIENCIES.values():
        flags.add_value(parser, flag, "X", flags.amount(flag.strip("-"), most=1, zero=False), text)
    text = "rows that the device with the most gets for its experts ÷ the mean (default 1)"
    flags.add_value(parser, "--imbalance", "X", flags.amount("imbalance", least=1), text, 1.0)


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


def machine_of(
    args: argparse.Namespace, config: TrainConfig, *, used: bool = False
) -> tuple[Target, Efficiency, float]:
    """Return the target, its efficiencies, and the bytes that arrays may fill on a device, by default those that a run of
    ``config`` gets there. Without the devices here, unless they are ``used``.

    Raises:
        ConfigError: there is no such target, or the environment contradicts ``run.memory_fraction``.
    """
    from jaxpipe.planning.targets import find_target

    target = find_target(args.target)
    # JAX reads its platform when it is imported, which the roofline does: this order, or a GPU's driver starts
    if not used:
        without_devices()
    from jaxpipe.planning.roofline import Efficiency

    efficiencies = {name: getattr(args, flag.strip("-").replace("-", "_")) for name, (flag, _) in _EFFICIENCIES.items()}
    if target.name != "cpu" and args.memory_fraction is None:
        efficiencies["memory"] = memory_fraction(config.run.machine.memory_fraction)
    efficiency = Efficiency(**{name: x for name, x in efficiencies.items() if x is not None})
    efficiency = replace(efficiency, imbalance=args.imbalance)
    return (
        target,
        efficiency,
        args.memory_limit_gb * 1e9 if args.memory_limit_gb else target.memory_bytes * efficiency.memory,
    )


def without_devices() -> None:
    """Make JAX use the CPU: nothing runs on a device, and a GPU's driver may be slow to start. Call it before JAX is
    imported."""
    request_devices(1, "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


_OUTPUTS = (".svg", ".png", ".html", ".trace.json", *flags.SCHEDULE_SUFFIXES)


def configure_plan(parser: argparse.ArgumentParser) -> None:
    add_settings_argument(parser)
    flags.add_parallel_flags(parser)
    text = "the residual stream is split over the tp devices too (pipeline.sequence_parallel=true)"
    flags.add_switch(parser, "--sequence-parallel", text)
    add_machine_flags(parser)
    text = "compile stage functions for the target to get their workspace, for about S seconds (0: estimate it)"
    flags.add_value(parser, "--compile-seconds", "S", flags.amount("seconds"), text, 60.0)
    flags.add_switch(parser, "--suggest", "suggest changes that fit, the fastest first, even if the config fits")
    flags.add_value(
        parser, "--suggest-seconds", "S", flags.amount("seconds"), "try changes for about S processor seconds", 60.0
    )
    flags.add_value(parser, "--schedules", "DIR", str, "write schedules of suggestions that need a file into DIR")
    flags.add_value(parser, "--costs-out", "FILE", str, "write the cost profile (for --costs of the schedule verbs)")
    flags.add_output_flag(parser, _OUTPUTS)
    flags.add_json_flag(parser, "print JSON on stdout")


def run_plan(args: argparse.Namespace) -> None:
    # everything a user can mistype is checked before JAX is imported, which takes longer than all of it
    overrides = flags.with_parallel_flags(args, [x for x in args.settings if "=" in x])
    split = ["pipeline.sequence_parallel=true"] if args.sequence_parallel else []
    config = config_of(args, [*overrides, *split])
    flags.check_outputs(args.output, _OUTPUTS)
    flags.check_output(args.costs_out, (".json",), "--costs-out")
    if args.schedules is not None and not Path(args.schedules).is_dir():
        raise ConfigError(f"--schedules {args.schedules!r}: no such directory; create it first")
    target, efficiency, limit = machine_of(args, config)
    from jaxpipe.planning.predict import predict
    from jaxpipe.planning.report import assumptions
    from jaxpipe.planning.space import suggest
    from jaxpipe.planning.stages import Compiler, stage_costs_of
    from jaxpipe.train.import_export import completed

    config = completed(config)
    stage_costs, compiler = stage_costs_of(config, target, efficiency, flags.notice), None
    if args.compile_seconds > 0:
        say = lambda text: flags.notice(f"notice: {text}")  # noqa: E731
        compiler = Compiler(target, say, args.compile_seconds, stage_costs.shards)
        stage_costs.temp_of = compiler
    prediction = predict(config, stage_costs, limit, compile_stages=True)
    workspace = "estimated from the jaxprs (liveness of what fusion leaves)"
    if compiler is not None and compiler.count:
        estimates = "" if compiler.works else "; the rest is estimated"
        workspace = f"of {compiler.count} functions compiled by XLA for {target.name}{estimates}"
    suggestions = None
    if args.suggest or not prediction.fits:
        suggestions = suggest(
            prediction,
            lambda c, t: predict(c, stage_costs.over(c.pipeline), limit, t),
            flags.notice,
            args.suggest_seconds,
        )
    lines = assumptions(prediction, efficiency, workspace)
    paths = _write(args, prediction, suggestions)
    _show(args, prediction, suggestions, lines, paths)
    # last, after all that was asked for is written and shown: the exit code says that nothing fits
    if suggestions is not None and not prediction.fits and not suggestions.fitting:
        least = suggestions.smallest
        raise ConfigError(
            f"nothing tried fits in {limit / 1e9:g} GB a device: the least memory found is "
            f"{least.prediction.worst.peak_bytes / 1e9:.4g} GB ({least.change})"
        )


def _write(args: argparse.Namespace, p: Prediction, suggestions: Suggestions | None) -> dict[str, str]:
    """Write the requested pictures, schedules and costs; return the path of each suggestion's schedule by its change."""
    from jaxpipe.schedule import write_costs, write_schedule

    for path in args.output:
        if flags.is_picture(path):
            from jaxpipe.plot import plot_timelines

            plot_timelines([p.timeline], path, units="si")
        else:
            write_schedule(p.schedule, path)
    if args.costs_out:
        write_costs(p.costs, args.costs_out)
    paths = {}
    if args.schedules is not None and suggestions is not None:
        for k, s in enumerate(suggestions.fitting):
            if s.schedule is not None:
                paths[s.change] = str(Path(args.schedules) / f"suggestion-{k}.sched")
                write_schedule(s.schedule, paths[s.change])
    return paths


def _show(
    args: argparse.Namespace,
    p: Prediction,
    suggestions: Suggestions | None,
    lines: tuple[str, ...],
    paths: dict[str, str],
) -> None:
    from jaxpipe.planning.report import prediction_json, prediction_text, suggestion_json, suggestions_text

    if not args.json:
        print(prediction_text(p, lines))
        if suggestions is not None:
            print("\n" + suggestions_text(suggestions, paths))
        return
    document = {"target": args.target, **prediction_json(p, lines)}
    if suggestions is not None:

        def plain(s: Suggestion) -> dict[str, Any]:
            return suggestion_json(s, paths.get(s.change))

        document |= {"suggestions": [plain(s) for s in suggestions.fitting], "smallest": plain(suggestions.smallest)}
    print(json.dumps(document))


_MOST_DEVICES = 65536


def configure_tune(parser: argparse.ArgumentParser) -> None:
    add_settings_argument(parser)
    flags.add_value(
        parser, "--devices", "N", flags.whole_number("devices", _MOST_DEVICES), "number of devices to use", 8
    )
    add_machine_flags(parser)
    text = "seconds to search; Ctrl-C ends it earlier with the best so far (default: until nothing can be better)"
    flags.add_value(parser, "--time-limit", "S", flags.amount("time limit", zero=False), text)
    text = "try only these values of a setting, such as pipeline.tp=1,2 or pipeline.schedule=1f1b,zb-h1 (repeatable)"
    flags.add_repeated(parser, "--only", "KEY=VALUE,…", text)
    text = "use stage times measured on local devices, kept in FILE (default: tune-times.json in jaxpipe's cache)"
    flags.add_value(parser, "--measure", "FILE.json", str, text, nargs="?", const="")
    flags.add_value(parser, "-o", "FILE.toml", str, "write the config with the best settings", dest="output")
    flags.add_value(parser, "--json", "FILE.json", str, "write every candidate that was tried")


def run_tune(args: argparse.Namespace) -> None:
    config = config_of(args, [x for x in args.settings if "=" in x])
    flags.check_output(args.output, (".toml",), "-o")
    flags.check_output(args.json, (".json",), "--json")
    flags.check_output(args.measure, (".json",), "--measure")
    target, efficiency, limit = machine_of(args, config, used=args.measure is not None)
    from jaxpipe.planning.report import tuned_json, tuned_text
    from jaxpipe.planning.space import Space
    from jaxpipe.planning.stages import stage_costs_of
    from jaxpipe.planning.tune import tune
    from jaxpipe.train.import_export import completed

    space = Space.of(completed(config), args.devices, args.only)
    # measured times are those of stages that run, and resized stages do not
    how: dict[str, Any] = {"probes": True} if args.measure is None else {"seconds_of": _stopwatch(args.measure)}
    stage_costs = stage_costs_of(space.base, target, efficiency, lambda text: None, **how)
    tuned = tune(space, stage_costs, limit, flags.notice, args.time_limit or float("inf"), fork=args.measure is None)
    # before a missing result raises: what was tried, and why it failed, is what a user then looks for
    if args.json:
        _write_json(args.json, tuned_json(tuned, space, stage_costs, limit))
    if tuned.best is None:
        if tuned.stopped == "interrupted":
            raise KeyboardInterrupt
        raise ConfigError(_nothing(tuned, limit))
    print(tuned_text(tuned, space))
    if args.output:
        _write_config(args.output, tuned)
        print(f"wrote {args.output}")


def _stopwatch(path: str) -> Stopwatch:
    """Return a stopwatch on the local devices of JAX."""
    import jax

    from jaxpipe.planning.stages import Stopwatch

    return Stopwatch(jax.devices(), Path(path) if path else user_cache() / "tune-times.json", flags.notice)


def _write_json(path: str, document: dict[str, Any]) -> None:
    write_atomically(Path(path), json.dumps(document, allow_nan=False))


def _write_config(path: str, tuned: TuneResult) -> None:
    """Write the config, and beside it the schedule if no family name produces it."""
    from jaxpipe.schedule import write_schedule

    assert tuned.best is not None
    config = tuned.best.config
    if tuned.to_file:
        file = str(Path(path).with_suffix(".sched"))
        write_schedule(tuned.best.schedule, file)
        pipe = config.pipeline
        pipe = replace(pipe, schedule=file, memory_limit=None, traverse=type(pipe.traverse)())
        config = replace(config, pipeline=pipe)
    write_atomically(Path(path), config.to_toml())


def _nothing(tuned: TuneResult, limit: float) -> str:
    """Explain why no candidate fits."""
    if tuned.stopped:
        return f"found no candidate that fits in {limit / 1e9:g} GB a device within the time limit: raise --time-limit"
    least = min((max(t.peak_bytes) for t in tuned.trials if t.peak_bytes), default=None)
    if all(t.status == "refused" for t in tuned.trials):
        return f"nothing could be tried: {tuned.trials[0].reason}"
    detail = (
        f"; the least found is {least / 1e9:.4g} GB" if least is not None else " for parameters and optimizer state"
    )
    return f"nothing tried fits in {limit / 1e9:g} GB a device{detail}: use more devices"
