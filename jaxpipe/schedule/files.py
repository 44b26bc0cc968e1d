"""Schedules, cost profiles and timelines as files; written whole or not at all.

Schedules by suffix: ``.sched`` (text), ``.json``, ``.csv`` (PyTorch's formats). Cost profiles and timelines are JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.files import located, no_constant, read_text, unique_keys, write_atomically
from jaxpipe.schedule import json_form
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.csv_form import format_csv, parse_csv
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.text import parse_schedule
from jaxpipe.schedule.timeline import Timeline

StrPath = str | os.PathLike[str]
T = TypeVar("T")
SUFFIXES = (".sched", ".json", ".csv")


def read_schedule(path: StrPath, notice: Callable[[str], None] | None = None) -> Schedule:
    """Return the schedule in ``path``, by suffix. Not checked: call :func:`~jaxpipe.schedule.check.check_schedule`.

    ``notice``: told in one line what of the file was left out (cells of a CSV that only communicate).

    Raises:
        ScheduleParseError: the file can't be read, is damaged, or has another suffix.
    """
    suffix = _suffix(path := Path(path), ScheduleParseError)
    text = read_text(path)
    if suffix == ".sched":
        return parse_schedule(text, str(path))
    if suffix == ".csv":
        return parse_csv(text, path.stem, str(path), notice)
    return _from_json(path, text, partial(json_form.from_schedule, name=path.stem))


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
