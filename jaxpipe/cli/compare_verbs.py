"""The verbs ``compare`` and ``best``: all schedule families beside each other, and the best of them within a memory limit."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jaxpipe.cli.cost_flags import (
    CostChoice,
    add_braid_flag,
    add_cost_flags,
    add_group_flag,
    add_limit_flag,
    add_size_flags,
    check_limit,
    check_size,
    chosen_costs,
)
from jaxpipe.cli.outputs import add_output_flag, check_outputs
from jaxpipe.cli.registry import Command
from jaxpipe.cli.report import Failure, Record, print_json, print_table
from jaxpipe.cli.schedule_verbs import OUTPUTS, add_json_flag, make, show, write_outputs
from jaxpipe.errors import ConfigError, JaxpipeError

if TYPE_CHECKING:
    from jaxpipe.schedule import Family
    from jaxpipe.schedule.explore import Candidate
    from jaxpipe.schedule.settings import Objective, Task

_PLOTS = (".svg", ".png", ".html")
_LONGEST_REASON = 100


def configure_compare(parser: argparse.ArgumentParser) -> None:
    add_size_flags(parser)
    add_group_flag(parser)
    add_cost_flags(parser)
    add_limit_flag(parser)
    add_braid_flag(parser)
    parser.add_argument(
        "--explore",
        action="store_true",
        help="let each family choose its best chunks, group and limit (slower); without it, its own defaults",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help=f"draw peak memory against bubble with the Pareto front: {' '.join(_PLOTS)}"
    )
    add_json_flag(parser)


def run_compare(arguments: argparse.Namespace) -> None:
    """Every family at the same sizes, the fastest first. Flags apply to the families that take them."""
    from jaxpipe.schedule import FAMILIES

    if arguments.plot:
        check_outputs([arguments.plot], _PLOTS, "--plot")
    costs = chosen_costs(arguments)
    row = _best_row if arguments.explore else _row
    entries = [row(family, arguments, costs) for family in FAMILIES.values()]
    records = [e for e in entries if isinstance(e, Record)]
    records.sort(key=lambda r: (float(f"{r.makespan:.9g}"), float(f"{r.max_span:.9g}"), r.peak))
    ordered: list[Record | Failure] = [*records, *(e for e in entries if isinstance(e, Failure))]
    if arguments.json:
        print_json({"schedules": [entry.json() for entry in ordered]})
    else:
        print_table(ordered, costs.units)
        if any(r.offloaded_share for r in records) and costs.profile is None and costs.offload_time is None:
            print("offloads take no time here; --offload-time says how long a share's round trip is")
    if arguments.plot:
        _plot(arguments, costs, ordered)
        if not arguments.json:
            print(f"wrote {arguments.plot}")


def _row(family: Family, arguments: argparse.Namespace, costs: CostChoice) -> Record | Failure:
    """The family with its defaults and the flags that it takes."""
    chunks = arguments.chunks if "chunks" in family.options else None
    group = arguments.group if "group" in family.options else None
    if costs.profile is not None and chunks is None and "chunks" in family.options:
        chunks = max(1, costs.profile.num_stages // arguments.ranks)
    limit = arguments.memory_limit
    record = None
    try:
        schedule, profile, timeline = make(family, arguments, costs, chunks, group)
        told = limit if "memory_limit" in family.options else None
        within = limit if max(timeline.peak_activations) <= (limit or 0) * (1 + 1e-9) else None
        record = Record.of(schedule, timeline, profile, within, group=group, family_limit=told)
        check_limit(timeline, limit)
    except JaxpipeError as error:
        reason = (
            f"needs {record.peak:g} activations, limit {limit:g}" if record else _shortened(str(error), family.name)
        )
        return Failure(family.name, " ".join(str(error).split()), reason, record)
    return record


def _shortened(message: str, name: str) -> str:
    """The first sentence of an error, without the family's name, which stands before it."""
    text = " ".join(message.split()).removeprefix(f"{name}: ").removeprefix(f"{name} ")
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 2].rstrip() + " …"


def _best_row(family: Family, arguments: argparse.Namespace, costs: CostChoice) -> Record | Failure:
    """The family with the parameters that suit it best."""
    from jaxpipe.schedule.explore import best_of_family

    try:
        return _record(best_of_family(family, _task(arguments, costs)), arguments.memory_limit)
    except JaxpipeError as error:
        text = " ".join(str(error).split())
        return Failure(family.name, text, _shortened(text, family.name))


def _record(candidate: Candidate, limit: float | None) -> Record:
    setting = candidate.setting
    return Record.of(
        candidate.schedule,
        candidate.timeline,
        candidate.costs,
        limit,
        group=setting.group,
        family_limit=setting.memory_limit,
    )


def _task(arguments: argparse.Namespace, costs: CostChoice, objective: Objective = "makespan") -> Task:
    from jaxpipe.schedule.settings import Task

    check_size(arguments.ranks, arguments.microbatches, arguments.chunks or 1)
    return Task(
        ranks=arguments.ranks,
        microbatches=arguments.microbatches,
        costs=costs.profile or (lambda placement: costs.for_placement(placement, placement.kind)),
        memory_limit=float("inf") if arguments.memory_limit is None else arguments.memory_limit,
        chunks=arguments.chunks,
        group=arguments.group,
        offload=None if costs.offload_time is None else True,
        objective=objective,
        braid=arguments.braid,
    )


def _plot(arguments: argparse.Namespace, costs: CostChoice, entries: list[Record | Failure]) -> None:
    from jaxpipe.plot.pareto import Point, plot_pareto

    points = [
        Point(record.name, record.peak, record.bubble_rate, record is entry)
        for entry in entries
        for record in (entry if isinstance(entry, Record) else entry.record,)
        if record is not None
    ]
    if not points:
        raise ConfigError(f"nothing to draw to {arguments.plot!r}: no family makes a schedule of these sizes")
    title = f"{arguments.ranks} ranks, {arguments.microbatches} microbatches, {costs.describe()}"
    plot_pareto(points, arguments.plot, title=title, limit=arguments.memory_limit)


def configure_best(parser: argparse.ArgumentParser) -> None:
    add_size_flags(parser)
    add_group_flag(parser)
    add_cost_flags(parser)
    add_limit_flag(parser)
    add_braid_flag(parser)
    parser.add_argument(
        "--objective",
        choices=("makespan", "span"),
        default="makespan",
        help="what to minimise: the makespan (default), or the longest span of a rank",
    )
    add_output_flag(parser, OUTPUTS)
    add_json_flag(parser)


def run_best(arguments: argparse.Namespace) -> None:
    """Explore all families and their parameters, show and write the best schedule."""
    from jaxpipe.schedule.explore import best_for

    check_outputs(arguments.output, OUTPUTS)
    costs = chosen_costs(arguments)
    best = best_for(_task(arguments, costs, arguments.objective))
    write_outputs(arguments.output, best.schedule, best.timeline, costs)
    record = _record(best, arguments.memory_limit)
    if arguments.json:
        print_json({**record.json(), "setting": str(best.setting)})
        return
    print(f"best: {best.setting}")
    show(arguments, record, best.timeline, costs)


COMMANDS = {
    "compare": Command(configure_compare, run_compare),
    "best": Command(configure_best, run_best),
}
