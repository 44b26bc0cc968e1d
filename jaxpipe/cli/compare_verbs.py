"""The verbs ``compare`` and ``best``: all schedule families beside each other, and the best of them within a memory limit.

Schedule files stand beside the families in the table, the picture and the choice.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpipe.cli.costs import (
    CostChoice,
    check_limit,
    check_size,
    chosen_costs,
    chunks_are_free,
    most_chunks,
    set_sizes,
)
from jaxpipe.cli.outputs import check_output, check_outputs, notice, print_json
from jaxpipe.cli.report import FREE_COPIES, Failure, Record, print_table
from jaxpipe.cli.schedule_flags import FREE_CHUNKS, OUTPUTS, PLOTS
from jaxpipe.cli.schedule_verbs import conclude, load_schedule, make, simulated
from jaxpipe.errors import ConfigError, JaxpipeError, ScheduleError
from jaxpipe.schedule import FAMILIES, CostProfile, Family, Schedule, Timeline
from jaxpipe.schedule.retime import Objective, order_key
from jaxpipe.schedule.search_orders import NO_TIME, Candidate, best_for, best_of_family, cheap_first
from jaxpipe.schedule.settings import Setting, Task
from jaxpipe.schedule.time_limit import within
from jaxpipe.schedule.tolerance import at_most
from jaxpipe.text import truncate

_LONGEST_REASON = 100
_PROGRESS_S = 1.0


def _files(arguments: argparse.Namespace) -> Mapping[str, Schedule]:
    """Read the schedule files, by path, and set the sizes.

    Raises:
        JaxpipeError, OSError: one can't be read, is invalid, given twice, or of another size.
    """
    twice = next((path for k, path in enumerate(arguments.files) if path in arguments.files[:k]), None)
    if twice is not None:
        raise ConfigError(f"{twice!r} is given twice")
    schedules = {path: load_schedule(path) for path in arguments.files}
    set_sizes(arguments, schedules)
    return schedules


def run_compare(arguments: argparse.Namespace) -> None:
    """Print every family and file at the same sizes, the fastest first. Flags apply to the families that take them."""

    check_output(arguments.plot, PLOTS, "--plot")
    costs = chosen_costs(arguments)
    files = _files(arguments)
    most = most_chunks(arguments, costs)
    row = _best_row if arguments.explore else _row
    entries = [row(family, arguments, costs, most) for family in FAMILIES.values()]
    entries += [_file_row(path, schedule, arguments, costs) for path, schedule in files.items()]
    records = [e for e in entries if isinstance(e, Record)]
    records.sort(key=lambda r: order_key("makespan", r.timeline.makespan, r.timeline.max_span, r.peak))
    ordered: list[Record | Failure] = [*records, *(e for e in entries if isinstance(e, Failure))]
    notes = _notes(arguments, costs, records, explored=arguments.explore)
    if arguments.json:
        print_json({"schedules": [entry.json() for entry in ordered], "notes": notes})
    else:
        print_table(ordered, costs.units)
        for note in notes:
            print(note)
    if arguments.plot:
        _plot(arguments, costs, ordered)
        if not arguments.json:
            print(f"wrote {arguments.plot}")


def _notes(arguments: argparse.Namespace, costs: CostChoice, records: Sequence[Record], *, explored: bool) -> list[str]:
    """List what costs nothing under these costs, one line each."""
    notes = []
    if chunks_are_free(arguments, costs):
        tried = f": at most {FREE_CHUNKS} a rank are tried" if explored else ""
        notes.append(f"chunks cost nothing here{tried}; --comm prices them, --layers or --max-chunks limits them")
    if any(r.free_copies for r in records):
        notes.append(f"{FREE_COPIES} here, as the costs say")
    return notes


def _row(family: Family, arguments: argparse.Namespace, costs: CostChoice, most: int | None) -> Record | Failure:
    """Return the row of a family with its defaults and the flags that it takes."""
    takes = "chunks" in family.options
    chunks = arguments.chunks if takes else None
    group = arguments.group if "group" in family.options else None
    if chunks is None and takes:
        default_chunks = family.default_chunks if costs.profile is None else costs.profile.num_stages // arguments.ranks
        chunks = max(1, min(default_chunks, most or default_chunks))

    def made() -> tuple[Schedule, CostProfile, Timeline]:
        if most is not None and (chunks or family.default_chunks) > most:
            raise ConfigError(
                f"{family.name} has {family.default_chunks} chunks per rank, more than the {most} allowed"
            )
        return make(family, arguments, costs, chunks, group)

    family_limit = arguments.memory_limit if "memory_limit" in family.options else None
    return _entry(family.name, arguments.memory_limit, made, group=group, family_limit=family_limit)


def _file_row(path: str, schedule: Schedule, arguments: argparse.Namespace, costs: CostChoice) -> Record | Failure:
    """Return the row of a schedule that was read from a file."""
    return _entry(schedule.name, arguments.memory_limit, lambda: simulated(schedule, arguments, costs), file=path)


def _entry(
    name: str,
    limit: float | None,
    generate_simulated: Callable[[], tuple[Schedule, CostProfile, Timeline]],
    **facts: Any,
) -> Record | Failure:
    """Return the record of what ``generate_simulated`` returns, or a failure with the reason; ``facts`` go to
    :meth:`Record.of`."""

    record = None
    try:
        schedule, profile, timeline = generate_simulated()
        within = limit if at_most(max(timeline.peak_activations), limit or 0) else None
        record = Record.of(schedule, profile, timeline, within, **facts)
        check_limit(timeline, limit)
    except JaxpipeError as error:
        reason = f"needs {record.peak:g} activations, limit {limit:g}" if record else _shortened(str(error), name)
        return Failure(name, " ".join(str(error).split()), reason, record, facts.get("file"))
    return record


def _shortened(message: str, name: str) -> str:
    """Return the first sentence of an error, without the family's name before it."""
    return truncate(" ".join(message.split()).removeprefix(f"{name}: ").removeprefix(f"{name} "), _LONGEST_REASON)


def _best_row(family: Family, arguments: argparse.Namespace, costs: CostChoice, most: int | None) -> Record | Failure:
    """Return the row of a family with its best parameters."""

    try:
        return _record(best_of_family(family, _task(arguments, costs, most)), arguments.memory_limit)
    except JaxpipeError as error:
        text = " ".join(str(error).split())
        return Failure(family.name, text, _shortened(text, family.name))


def _record(candidate: Candidate, limit: float | None) -> Record:
    facts = {"group": candidate.setting.group, "family_limit": candidate.setting.memory_limit}
    return Record.of(candidate.schedule, candidate.costs, candidate.timeline, limit, **facts)


def _task(
    arguments: argparse.Namespace, costs: CostChoice, most: int | None, objective: Objective = "makespan"
) -> Task:

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
        max_chunks=most,
        separate=arguments.separate,
    )


def _plot(arguments: argparse.Namespace, costs: CostChoice, entries: list[Record | Failure]) -> None:
    from jaxpipe.plot.pareto import Point, plot_pareto

    points = [
        Point(record.label, record.peak, record.timeline.bubble_rate, record is entry)
        for entry in entries
        for record in (entry if isinstance(entry, Record) else entry.record,)
        if record is not None
    ]
    if not points:
        raise ConfigError(f"nothing to draw to {arguments.plot!r}: no family makes a schedule of these sizes")
    title = f"{arguments.ranks} ranks, {arguments.microbatches} microbatches, {costs.describe()}"
    plot_pareto(points, arguments.plot, title=title, limit=arguments.memory_limit)


def run_best(arguments: argparse.Namespace) -> None:
    """Explore all families and their parameters, show and write the best schedule among these and the files."""

    check_outputs(arguments.output, OUTPUTS)
    costs = chosen_costs(arguments)
    files = _files(arguments)
    most = most_chunks(arguments, costs)
    choices = []
    for path, schedule in files.items():
        entry = _file_row(path, schedule, arguments, costs)
        if isinstance(entry, Failure):
            notice(f"{path}: not possible: {entry.error}")
        else:
            choices.append((path, entry))
    progress, ended = _Progress(), False
    try:
        task = _task(arguments, costs, most, arguments.objective)
        candidate, ended = within(arguments.time_limit, lambda: best_for(task, on_trial=progress))
        if candidate is None:
            raise ScheduleError(NO_TIME)
        choices.insert(0, (str(candidate.setting), _record(candidate, arguments.memory_limit)))
    except ScheduleError:  # no family keeps the limit
        if not choices:
            raise

    def key(choice: tuple[str, Record]) -> tuple[float, float, float]:
        timeline = choice[1].timeline
        return order_key(arguments.objective, timeline.makespan, timeline.max_span, choice[1].peak)

    setting, best = min(choices, key=key)
    notes = _notes(arguments, costs, [best], explored=True)
    if ended:
        where = f"at family {progress.at} of {len(progress.order)}"
        notes.append(f"out of time after {arguments.time_limit:g} s, {where}: the best so far; --time-limit raises it")
    conclude(arguments, costs, best, f"best: {setting}", notes, setting=setting)


class _Progress:
    """Report on stderr, about once a second, the current trial and the best so far."""

    def __init__(self) -> None:

        self.order = {family.name: k for k, family in enumerate(cheap_first(FAMILIES.values()), start=1)}
        self.at = self.tried = 0
        self.began = self.told = time.perf_counter()

    def __call__(self, setting: Setting, best: Candidate | None) -> None:
        self.at = max(self.at, self.order[setting.family])
        now = time.perf_counter()
        if now - self.told >= _PROGRESS_S:
            self.told = now
            result = f"best so far {best.setting}, {best.makespan:.6g}" if best is not None else "nothing found yet"
            where = f"family {self.at} of {len(self.order)}, {self.tried} settings tried"
            notice(f"{now - self.began:7.1f} s  {where}, now {setting}; {result}")
        self.tried += 1
