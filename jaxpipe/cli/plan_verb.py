"""The verb ``plan``: does a config fit on a machine that need not be here, and how fast would it be?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe.cli.machine_flags import add_machine_flags, add_settings_argument, config_of, machine_of
from jaxpipe.cli.outputs import SCHEDULE_SUFFIXES, add_output_flag, check_output, check_outputs, is_picture, notice
from jaxpipe.cli.parallel_flags import add_parallel_flags, with_parallel_flags
from jaxpipe.cli.parser import add_json_flag, add_switch, add_value, amount
from jaxpipe.errors import ConfigError

if TYPE_CHECKING:
    from jaxpipe.planning.predict import Prediction
    from jaxpipe.planning.suggest import Suggestion, Suggestions

_OUTPUTS = (".svg", ".png", ".html", ".trace.json", *SCHEDULE_SUFFIXES)


def configure_plan(parser: argparse.ArgumentParser) -> None:
    add_settings_argument(parser)
    add_parallel_flags(parser)
    text = "the residual stream is split over the tp devices too (pipeline.sequence_parallel=true)"
    add_switch(parser, "--sequence-parallel", text)
    add_machine_flags(parser)
    text = "compile stage functions for the target to get their workspace, for about S seconds (0: estimate it)"
    add_value(parser, "--compile-seconds", "S", amount("seconds"), text, 60.0)
    add_switch(parser, "--suggest", "suggest changes that fit, the fastest first, even if the config fits")
    add_value(parser, "--suggest-seconds", "S", amount("seconds"), "try changes for about S processor seconds", 60.0)
    add_value(parser, "--schedules", "DIR", str, "write schedules of suggestions that need a file into DIR")
    add_value(parser, "--costs-out", "FILE", str, "write the cost profile (for --costs of the schedule verbs)")
    add_output_flag(parser, _OUTPUTS)
    add_json_flag(parser, "print JSON on stdout")


def run_plan(args: argparse.Namespace) -> None:
    overrides = with_parallel_flags(args, [x for x in args.settings if "=" in x])
    split = ["pipeline.sequence_parallel=true"] if args.sequence_parallel else []
    config = config_of(args, [*overrides, *split])
    check_outputs(args.output, _OUTPUTS)
    check_output(args.costs_out, (".json",), "--costs-out")
    if args.schedules is not None and not Path(args.schedules).is_dir():
        raise ConfigError(f"--schedules {args.schedules!r}: no such directory; create it first")
    target, efficiency, limit = machine_of(args)
    from jaxpipe.planning.predict import predict
    from jaxpipe.planning.report import assumptions
    from jaxpipe.planning.stages import Compiler, workbench
    from jaxpipe.planning.suggest import suggest
    from jaxpipe.train.import_export import completed

    config = completed(config)
    bench, compiler = workbench(config, target, efficiency, notice), None
    if args.compile_seconds > 0:
        pipe = config.pipeline
        compiler = Compiler(target, lambda text: notice(f"notice: {text}"), args.compile_seconds, pipe.tp, pipe.cp)
        bench.temp_of = compiler
    prediction = predict(config, bench, limit, compile_stages=True)
    workspace = "estimated from the jaxprs (liveness of what fusion leaves)"
    if compiler is not None and compiler.count:
        estimates = "" if compiler.works else "; the rest is estimated"
        workspace = f"of {compiler.count} functions compiled by XLA for {target.name}{estimates}"
    suggestions = None
    if args.suggest or not prediction.fits:
        suggestions = suggest(prediction, lambda c, t: predict(c, bench, limit, t), notice, args.suggest_seconds)
    lines = assumptions(prediction, efficiency, workspace)
    paths = _write(args, prediction, suggestions)
    _show(args, prediction, suggestions, lines, paths)
    if suggestions is not None and not prediction.fits and not suggestions.fitting:
        least = suggestions.smallest
        raise ConfigError(
            f"nothing tried fits in {limit / 1e9:g} GB a device: the least memory found is "
            f"{least.prediction.worst.peak_bytes / 1e9:.4g} GB ({least.change})"
        )


def _write(args: argparse.Namespace, p: Prediction, suggestions: Suggestions | None) -> dict[str, str]:
    """Pictures, schedules and costs asked for; the path of each suggestion's schedule by its change."""
    from jaxpipe.schedule import write_costs, write_schedule

    for path in args.output:
        if is_picture(path):
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
