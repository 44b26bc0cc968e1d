"""The verb ``plot``: schedule files (simulated here) and recorded timelines, in one picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxpipe.cli.costs import CostChoice, check_copies, chosen_costs, require_file
from jaxpipe.cli.outputs import check_outputs, suffix_of
from jaxpipe.cli.report import FREE_COPIES, copies_are_free
from jaxpipe.cli.schedule_flags import PLOT_OUTPUTS, TIMELINE_SUFFIX
from jaxpipe.cli.schedule_verbs import load_schedule
from jaxpipe.errors import ConfigError
from jaxpipe.plot import plot_timelines
from jaxpipe.plot.units import Units
from jaxpipe.schedule import Timeline, read_timeline, simulate

_MOST_FILES = 8


def run_plot(arguments: argparse.Namespace) -> None:
    """Draw all files into each output."""

    if len(arguments.files) > _MOST_FILES:
        raise ConfigError(f"{len(arguments.files)} files are too many for one picture; give at most {_MOST_FILES}")
    check_outputs(arguments.output, PLOT_OUTPUTS)
    costs = chosen_costs(arguments)
    drawings = [_drawing(path, costs) for path in arguments.files]
    timelines = [timeline for timeline, _ in drawings]
    measured = [p for p, t in zip(arguments.files, timelines, strict=True) if t.source == "measured"]
    drawn = [p for p in arguments.files if not _holds_timeline(p)]
    if measured and drawn and costs.profile is None:
        raise ConfigError(
            f"{measured[0]} was measured in seconds and {drawn[0]} has unit costs; "
            "give --costs FILE so that both share a time axis"
        )
    units: Units | None = "si" if measured or costs.profile is not None else None
    title = arguments.title
    if any(free for _, free in drawings):
        title = " · ".join([title or " · ".join(dict.fromkeys(t.name for t in timelines)), FREE_COPIES])
    for path in arguments.output:
        plot_timelines(timelines, path, title=title, units=units)
        print(f"wrote {path}")


def _drawing(path: str, costs: CostChoice) -> tuple[Timeline, bool]:
    """Return the timeline of a file, and whether its copies to the host take no time because the costs say so."""

    require_file(path)
    if _holds_timeline(path):
        return read_timeline(path), False
    if suffix_of(path) == ".trace.json":
        raise ConfigError(
            f"{path!r} is a trace, which is written but not read; give the schedule or {TIMELINE_SUFFIX} file"
        )

    schedule = load_schedule(path)
    profile = costs.for_placement(schedule.placement, schedule.name)
    check_copies(schedule, profile, costs)
    return simulate(schedule, profile), copies_are_free(schedule, profile)


def _holds_timeline(path: str) -> bool:
    """Return whether a file is a timeline rather than a schedule: by its suffix, or the format named at the top of the JSON."""
    if path.lower().endswith(TIMELINE_SUFFIX):
        return True
    if suffix_of(path) != ".json":
        return False
    with Path(path).open("rb") as file:
        return b'"jaxpipe timeline' in file.read(200)
