"""The verb ``tune``: the fastest layout and schedule of a training config on so many devices."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe.cli.machine_flags import add_machine_flags, add_settings_argument, config_of, machine_of
from jaxpipe.cli.outputs import check_output, notice
from jaxpipe.cli.parser import add_repeated, add_value, amount, whole_number
from jaxpipe.errors import ConfigError

if TYPE_CHECKING:
    from jaxpipe.planning.measured import Stopwatch
    from jaxpipe.planning.tune import Tuned

_MOST_DEVICES = 65536


def configure_tune(parser: argparse.ArgumentParser) -> None:
    add_settings_argument(parser)
    add_value(parser, "--devices", "N", whole_number("devices", _MOST_DEVICES), "number of devices to use", 8)
    add_machine_flags(parser)
    text = "seconds to search; Ctrl-C ends it earlier with the best so far (default: until nothing can be better)"
    add_value(parser, "--time-limit", "S", amount("time limit", zero=False), text)
    text = "try only these values of a setting, such as pipeline.tp=1,2 or pipeline.schedule=1f1b,zb-h1 (repeatable)"
    add_repeated(parser, "--only", "KEY=VALUE,…", text)
    text = "use stage times measured on local devices, kept in FILE (default: tune-times.json in jaxpipe's cache)"
    add_value(parser, "--measure", "FILE.json", str, text, nargs="?", const="")
    add_value(parser, "-o", "FILE.toml", str, "write the config with the best settings", dest="output")
    add_value(parser, "--json", "FILE.json", str, "write every candidate that was tried")


def run_tune(args: argparse.Namespace) -> None:
    config = config_of(args, [x for x in args.settings if "=" in x])
    check_output(args.output, (".toml",), "-o")
    check_output(args.json, (".json",), "--json")
    check_output(args.measure, (".json",), "--measure")
    target, efficiency, limit = machine_of(args, used=args.measure is not None)
    from jaxpipe.planning.report import tuned_json, tuned_text
    from jaxpipe.planning.space import Space
    from jaxpipe.planning.stages import workbench
    from jaxpipe.planning.tune import SIZES, tune
    from jaxpipe.train.import_export import completed

    space = Space.of(completed(config), args.devices, args.only)
    how = {"sizes": SIZES} if args.measure is None else {"seconds_of": _stopwatch(args.measure)}
    bench = workbench(space.base, target, efficiency, lambda text: None, **how)
    tuned = tune(space, bench, limit, notice, args.time_limit or float("inf"), fork=args.measure is None)
    if args.json:
        _write_json(args.json, tuned_json(tuned, space, bench, limit))
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

    from jaxpipe.files import user_cache
    from jaxpipe.planning.measured import Stopwatch

    return Stopwatch(jax.devices(), Path(path) if path else user_cache() / "tune-times.json", notice)


def _write_json(path: str, document: dict[str, Any]) -> None:
    import json

    from jaxpipe.files import write_atomically

    write_atomically(Path(path), json.dumps(document, allow_nan=False))


def _write_config(path: str, tuned: Tuned) -> None:
    """Write the config, and beside it the schedule if no family name produces it."""
    from jaxpipe.files import write_atomically
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


def _nothing(tuned: Tuned, limit: float) -> str:
    """Explain why no candidate fits."""
    if tuned.stopped:
        return f"found no candidate that fits in {limit / 1e9:g} GB a device within the time limit: raise --time-limit"
    least = min((max(t.peak_bytes) for t in tuned.tried if t.peak_bytes), default=None)
    if all(t.status == "refused" for t in tuned.tried):
        return f"nothing could be tried: {tuned.tried[0].reason}"
    detail = (
        f"; the least found is {least / 1e9:.4g} GB" if least is not None else " for parameters and optimizer state"
    )
    return f"nothing tried fits in {limit / 1e9:g} GB a device{detail}: use more devices"
