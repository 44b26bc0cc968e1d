"""Schedules, cost profiles and timelines as files; written whole or not at all.

Schedules by suffix: ``.sched`` (text), ``.json``, ``.csv`` (PyTorch's formats). Cost profiles and timelines are JSON.

PyTorch's CSV has one row per rank, cells ``0F1 0I1 0W1 0B1`` (stage, letter, microbatch).

Their F, I, W, B are our F, B, W, BW, and ``(0F1;1B0)OVERLAP_F_B`` is a braid. Both formats of ``torch.distributed.pipelining``
are read: in ``compute_comms``, which ``_dump_csv`` writes by default, cells such as ``0SEND_F0`` and ``1UNSHARD`` say what the
runtime sends, gathers and reduces; they are left out, since transfers follow from the placement here. The format holds
neither placement nor name: reading infers them (:mod:`~jaxpipe.schedule.text`). Empty cells (idle slots) are skipped.
Written is ``compute_only``; what would not be read back is refused: offloading, user ops, stages that are not a chain.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.files import located, no_constant, read_text, unique_keys, write_atomically
from jaxpipe.schedule import json_form
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, Braid, Schedule, Slot
from jaxpipe.schedule.text import parse_schedule, schedule_of
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.text import truncate

LETTERS = {"F": "F", "I": "B", "W": "W", "B": "BW"}
_TO_LETTER = {op: letter for letter, op in LETTERS.items()}
_ACTION = re.compile(r"(0|[1-9][0-9]{0,17})([FIWB])(0|[1-9][0-9]{0,17})")
_BRAID = re.compile(r"\((.*)\)OVERLAP_F_B")
_TRAFFIC = re.compile(r"[0-9]{1,18}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,18}")


def format_csv(schedule: Schedule) -> str:
    """Return ``schedule`` as CSV.

    Raises:
        ScheduleError: it holds something that the format can't say.
    """
    placement = schedule.placement
    if not placement.is_chain or placement.has_spans or placement.detached:
        raise ScheduleError(
            "CSV can't say that stages are not a chain, or have spans, or are detached; write .sched or .json"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, row in enumerate(schedule.rows):
        writer.writerow([_cell(slot, rank) for slot in row])
    return text.getvalue()


def _cell(slot: Slot, rank: int) -> str:
    # refused rather than left out: a file without its offloads would read back as another schedule
    if any(a.op not in _TO_LETTER for a in slot.actions):
        raise ScheduleError(
            f"CSV in PyTorch's format can't hold {slot} (rank {rank}), only F, B, W and BW; write .sched or .json"
        )
    cells = [f"{a.stage}{_TO_LETTER[a.op]}{a.microbatch}" for a in slot.actions]
    return cells[0] if isinstance(slot, Action) else f"({';'.join(cells)})OVERLAP_F_B"


def parse_csv(text: str, name: str, path: str = "<csv>", notice: Callable[[str], None] | None = None) -> Schedule:
    """Return the schedule that the CSV ``text`` describes. ``notice``: told in one line what was left out.

    Raises:
        ScheduleParseError: naming ``path``, row and cell, or why no placement fits.
    """
    traffic: Counter[str] = Counter()
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [tuple(_slots(cells, f"{path}: line {reader.line_num}", traffic)) for cells in reader]
    except csv.Error as error:
        raise ScheduleParseError(f"{path}: line {reader.line_num}: not CSV: {error}") from None
    # rows alone: the format names neither placement nor number of microbatches
    schedule = located(path, schedule_of, name, rows)
    if traffic and notice is not None:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(traffic.items()))
        notice(f"{path}: {traffic.total()} cells left out that only communicate ({kinds}); transfers are implied")
    return schedule


def _slots(cells: list[str], where: str, traffic: Counter[str]) -> Iterator[Slot]:
    """Yield the slots of a row; counts in ``traffic`` the cells that only communicate, by kind."""
    for column, cell in enumerate(map(str.strip, cells), start=1):
        if communicates := _TRAFFIC.fullmatch(cell):
            traffic[communicates[1]] += 1
        elif cell:
            braid = _BRAID.fullmatch(cell)
            parts = [_ACTION.fullmatch(part.strip()) for part in (braid[1].split(";") if braid else [cell])]
            actions = tuple(Action(LETTERS[x[2]], int(x[1]), int(x[3])) for x in parts if x)
            if len(actions) < len(parts) or (braid and len(actions) < 2):
                raise ScheduleParseError(
                    f"{where}, cell {column}: {truncate(cell, 40)!r} is not an action; write stage, F, I, W or B, microbatch, "
                    "for example 0F1, or two of them as one slot, (0F1;1B0)OVERLAP_F_B (PyTorch's format)"
                )
            yield Braid(actions) if braid else actions[0]


StrPath = str | os.PathLike[str]
T = TypeVar("T")


_PARSERS: Mapping[str, Callable[[str, Path, Callable[[str], None] | None], Schedule]] = {
    ".sched": lambda text, path, notice: parse_schedule(text, str(path)),
    ".json": lambda text, path, notice: _from_json(path, text, partial(json_form.from_schedule, name=path.stem)),
    ".csv": lambda text, path, notice: parse_csv(text, path.stem, str(path), notice),
}
SUFFIXES = tuple(_PARSERS)


def read_schedule(path: StrPath, notice: Callable[[str], None] | None = None) -> Schedule:
    """Return the schedule in ``path``, by suffix. Not checked: call :func:`~jaxpipe.schedule.check.check_schedule`.

    ``notice``: told in one line what of the file was left out (cells of a CSV that only communicate).

    Raises:
        ScheduleParseError: the file can't be read, is damaged, or has another suffix.
    """
    parse = _PARSERS[_suffix(path := Path(path), ScheduleParseError)]
    return parse(read_text(path), path, notice)


def write_schedule(schedule: Schedule, path: StrPath) -> None:
    """Write ``schedule`` to ``path``, by suffix, atomically.

    Raises:
        ScheduleError: unknown suffix, a CSV that can't hold this schedule, or the file can't be written.
    """
    suffix = _suffix(path := Path(path), ScheduleError)
    if suffix == ".json":
        text = _to_json(json_form.to_schedule(schedule))
    else:
        text = str(schedule) if suffix == ".sched" else format_csv(schedule)
    write_atomically(path, text)


def read_costs(path: StrPath) -> CostProfile:
    """Return the cost profile in the JSON file ``path``.

    Raises:
        ScheduleParseError: the file can't be read or is not a cost profile.
    """
    return _from_json(Path(path), read_text(Path(path)), json_form.from_costs)


def write_costs(costs: CostProfile, path: StrPath) -> None:
    """Write ``costs`` as JSON, atomically. Raises ScheduleError if the file can't be written."""
    write_atomically(Path(path), _to_json(json_form.to_costs(costs)))


def read_timeline(path: StrPath) -> Timeline:
    """Return the timeline in the JSON file ``path``.

    Raises:
        ScheduleParseError: the file can't be read or is not a timeline.
    """
    return _from_json(Path(path), read_text(Path(path)), json_form.from_timeline)


def write_timeline(timeline: Timeline, path: StrPath) -> None:
    """Write ``timeline`` as JSON, atomically. Raises ScheduleError if the file can't be written."""
    write_atomically(Path(path), _to_json(json_form.to_timeline(timeline)))


def _suffix(path: Path, error: type[ScheduleError]) -> str:
    if path.suffix not in SUFFIXES:
        raise error(f"{path}: a schedule file ends in {', '.join(SUFFIXES)}, not {path.suffix!r}")
    return path.suffix


def _to_json(data: json_form.Json) -> str:
    """Write one line per top-level key, and per entry of a top-level list or object: short enough to read and to diff."""
    parts = []
    for key, value in data.items():
        deep = isinstance(value, list) and value and isinstance(value[0], (list, dict))
        body = "[\n" + ",\n".join("    " + _compact(x) for x in value) + "\n  ]" if deep else _compact(value)
        parts.append(f"  {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _from_json(path: Path, text: str, make: Callable[[object], T]) -> T:
    try:
        data = json.loads(text, parse_constant=no_constant, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        raise ScheduleParseError(
            f"{path}: line {error.lineno}: not JSON: {error.msg} (near {near!r}); is the file truncated?"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ScheduleParseError(f"{path}: not JSON that jaxpipe reads: {error}") from None
    return located(path, make, data)
