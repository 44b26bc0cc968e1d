"""Schedules, placements, cost profiles and timelines as files, and their forms in JSON and CSV.

A file is written whole or not at all. Schedules by suffix: ``.sched`` (text), ``.json``, ``.csv`` (PyTorch's formats). Cost
profiles and timelines are JSON.

**JSON.** An object with a ``format`` key (``jaxpipe schedule 1``); unknown and missing keys are refused. Infinity,
which JSON lacks, is the string ``"inf"``. ``from_…(to_…(x)) == x``. Of a schedule, ``rows`` alone will do (:mod:`.text`).
Keys are the fields of the records, and what a value must be is their type; :func:`to_json` and :func:`from_json` do the same
with any record of such fields.

**CSV** of PyTorch has one row per rank, cells ``0F1 0I1 0W1 0B1`` (stage, letter, microbatch).
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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.files import located, no_constant, read_text, unique_keys, write_atomically
from jaxpipe.schedule.costs import CostProfile, Link
from jaxpipe.schedule.ir import Action, Braid, Schedule, Slot
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.text import infer_microbatches, infer_placement, parse_schedule, parse_slot, schedule_of
from jaxpipe.schedule.timeline import Event, MemoryCurve, Timeline
from jaxpipe.text import closest, truncate

T = TypeVar("T")

StrPath = str | os.PathLike[str]

_PARSERS: Mapping[str, Callable[[str, Path, Callable[[str], None] | None], Schedule]] = {
    ".sched": lambda text, path, notice: parse_schedule(text, str(path)),
    ".json": lambda text, path, notice: _parse_json(path, text, partial(from_schedule, name=path.stem)),
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
        text = _print_json(to_schedule(schedule))
    else:
        text = str(schedule) if suffix == ".sched" else format_csv(schedule)
    write_atomically(path, text)


def read_costs(path: StrPath) -> CostProfile:
    """Return the cost profile in the JSON file ``path``.

    Raises:
        ScheduleParseError: the file can't be read or is not a cost profile.
    """
    return _parse_json(Path(path), read_text(Path(path)), from_costs)


def write_costs(costs: CostProfile, path: StrPath) -> None:
    """Write ``costs`` as JSON, atomically. Raises ScheduleError if the file can't be written."""
    write_atomically(Path(path), _print_json(to_costs(costs)))


def read_timeline(path: StrPath) -> Timeline:
    """Return the timeline in the JSON file ``path``.

    Raises:
        ScheduleParseError: the file can't be read or is not a timeline.
    """
    return _parse_json(Path(path), read_text(Path(path)), from_timeline)


def write_timeline(timeline: Timeline, path: StrPath) -> None:
    """Write ``timeline`` as JSON, atomically. Raises ScheduleError if the file can't be written."""
    write_atomically(Path(path), _print_json(to_timeline(timeline)))


def _suffix(path: Path, error: type[ScheduleError]) -> str:
    if path.suffix not in SUFFIXES:
        raise error(f"{path}: a schedule file ends in {', '.join(SUFFIXES)}, not {path.suffix!r}")
    return path.suffix


def _print_json(data: Json) -> str:
    """Write one line per top-level key, and per entry of a top-level list or object: short enough to read and to diff."""
    parts = []
    for key, value in data.items():
        deep = isinstance(value, list) and value and isinstance(value[0], (list, dict))
        body = "[\n" + ",\n".join("    " + _compact(x) for x in value) + "\n  ]" if deep else _compact(value)
        parts.append(f"  {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _parse_json(path: Path, text: str, make: Callable[[object], T]) -> T:
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


# JSON.

Json = dict[str, Any]

SCHEDULE_FORMAT = "jaxpipe schedule 1"
COSTS_FORMAT = "jaxpipe costs 1"
TIMELINE_FORMAT = "jaxpipe timeline 1"

_LANES = ("compute", "tp", "d2h", "h2d", "net", "send")
_KEYS = {"num_ranks": "ranks", "num_microbatches": "microbatches"}
"""Fields that are called otherwise in JSON."""
_QUIET = {
    "span": 1,
    "f_comm_s": 0,
    "b_comm_s": 0,
    "collectives": 1,
    "group_comm_s": 0,
    "boundary_buffers": False,
    "crowding": 1.0,
    "reduce_s": 0,
    "gather_s": 0,
    "net_overlaps": True,
    "tp_exposed_s": None,
}
"""Fields that are written where they hold anything else."""
_FORMER_KEYS = {"tp_comm_s": ("f_comm_s", "b_comm_s"), "tp_collectives": ("collectives",)}
"""Keys of cost profiles that jaxpipe 0.1 wrote, and the fields that they now are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairLink(Link):
    """A link between two ranks, as it is written."""

    src: int
    dst: int


def to_json(record: Any) -> Json:
    """Return any frozen record as JSON values, by the types of its fields."""
    return dict(_write(record))


def from_json(kind: type[T], data: object, where: str) -> T:
    """Return the record that :func:`to_json` wrote. Raises ScheduleParseError, naming the key."""
    return _record(kind, data, where)


def to_schedule(schedule: Schedule) -> Json:
    return {"format": SCHEDULE_FORMAT, **_write_fields(schedule)}


def from_schedule(data: object, name: str = "unnamed") -> Schedule:
    """Read a schedule; ``name``: of one that has none. Raises ScheduleParseError, naming the key."""
    values = _values(Schedule, data, "schedule", SCHEDULE_FORMAT, ["rows"])
    if "placement" not in values:
        values["placement"] = located("rows", infer_placement, values["rows"])
    return Schedule(**{"name": name, "num_microbatches": infer_microbatches(values["rows"]), **values})


def to_placement(placement: Placement) -> Json:
    return dict(_write(placement))


def from_placement(data: object, where: str = "placement") -> Placement:
    """Raises ScheduleParseError, naming the key."""
    values = _values(Placement, data, where)
    ranks, named = values["num_ranks"], {rank for flow in values["flows"] for group in flow for rank in group}
    # before the placement is made: a huge number here would fill the memory with rows for nobody
    if ranks > len(named):
        raise ScheduleParseError(
            f"placement.ranks is {ranks}, but the flows name only {len(named)} ranks; every rank needs a stage"
        )
    return located(where, Placement, **values)


def to_costs(costs: CostProfile) -> Json:
    """Write fields by name, those of ``_QUIET`` where they say something."""
    data = {"format": COSTS_FORMAT, **_write_fields(costs)}
    data |= {name: dict(data[name]) for name in ("temp_bytes", "extra")}
    # pairs are no keys in JSON, so a link names its ends itself
    data["links"] = [_write(_PairLink(src=a, dst=b, **asdict(link))) for (a, b), link in costs.links]
    return data


def from_costs(data: object) -> CostProfile:
    """Only the keys of :class:`CostProfile` without a default are needed. Raises ScheduleParseError, naming the key."""
    if isinstance(data, dict):
        data = {name: x for key, x in data.items() for name in _FORMER_KEYS.get(key, (key,))}
    return _record(CostProfile, data, "cost profile", COSTS_FORMAT)


def _pair_link(data: object, where: str) -> tuple[tuple[int, int], Link]:
    read = _record(_PairLink, data, where)
    return (read.src, read.dst), Link(read.latency_s, read.bytes_per_s)


def to_timeline(timeline: Timeline) -> Json:
    return {"format": TIMELINE_FORMAT, **_write(timeline)}


def from_timeline(data: object) -> Timeline:
    """Raises ScheduleParseError, naming the key."""
    required = ["format", *(key for key in _fields(Timeline) if key != "tp_exposed_s")]
    values = _values(Timeline, data, "timeline", TIMELINE_FORMAT, required)
    ranks = values["num_ranks"]
    for key in ("memory", "peak_activations", "static_bytes", "tp_exposed_s"):
        size = len(values.get(key, ()))
        if size != ranks and (size or key in ("memory", "peak_activations")):
            raise ScheduleParseError(f"{key} has {size} entries for {ranks} ranks")
    for k, event in enumerate(values["events"]):
        # drawing and figures index ranks by it, and would fail far from the file
        if event.rank >= ranks:
            raise ScheduleParseError(f"events[{k}] is on rank {event.rank}, but ranks are 0..{ranks - 1}")
    return Timeline(**values)


def _event(data: object, where: str) -> Event:
    event = Event(*_read(tuple[int, str, Slot, float, float], data, where))
    if event.lane not in _LANES:
        raise ScheduleParseError(f"{where} is on lane {event.lane!r}; want one of {' '.join(_LANES)}")
    if event.end_s < event.start_s:
        raise ScheduleParseError(f"{where} ends at {event.end_s}, before it starts at {event.start_s}")
    return event


def _curve(data: object, where: str) -> MemoryCurve:
    curve = _record(MemoryCurve, data, where)
    times, levels = len(curve.times_s), len(curve.bytes)
    if times != levels:
        raise ScheduleParseError(f"{where} has {times} times and {levels} levels; want as many of each")
    return curve


# By type.


def _write(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_write(x) for x in value]
    if isinstance(value, (Action, Braid)):
        return str(value)
    if isinstance(value, Event):
        return [value.rank, value.lane, str(value.action), value.start_s, value.end_s]
    if isinstance(value, CostProfile):
        return to_costs(value)
    if isinstance(value, Schedule):
        return to_schedule(value)
    if is_dataclass(value):
        return _write_fields(value)
    # JSON has no infinity, and readers in other languages refuse Python's
    return "inf" if value == float("inf") else value


def _write_fields(record: Any) -> Json:
    written = ((f.name, getattr(record, f.name)) for f in fields(record) if f.init)
    return {_KEYS.get(name, name): _write(x) for name, x in written if _is_said(name, x)}


def _is_said(name: str, value: Any) -> bool:
    return name not in _QUIET or any(x != _QUIET[name] for x in (value if isinstance(value, tuple) else (value,)))


@cache
def _fields(record: Any) -> dict[str, tuple[str, Any, bool]]:
    """Return, by JSON key, the name and type of the field of ``record``, and whether it is required."""
    hints = get_type_hints(record)
    return {
        _KEYS.get(f.name, f.name): (f.name, hints[f.name], f.default is MISSING and f.default_factory is MISSING)
        for f in fields(record)
        if f.init
    }


def _record(record: type[T], data: object, where: str, form: str | None = None) -> T:
    return located(where, record, **_values(record, data, where, form))


def _values(
    record: Any, data: object, where: str, form: str | None = None, required: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the values of the fields of ``record`` that ``data`` holds.

    ``form``: what ``format`` says if it is given; messages then call a key by its name alone. ``required``: keys that must be
    there; by default the fields that have no default.
    """
    value, fields = _mapping(data, where), _fields(record)
    if form is not None and value.get("format", form) != form:
        raise ScheduleParseError(f'the {where} has format {value["format"]!r}; want "format": "{form}"')
    allowed = [*fields, *(["format"] if form else [])]
    listed = f"; known: {' '.join(allowed)}"
    problems = [f"unknown key {key!r}{closest(key, allowed, listed)}" for key in value if key not in allowed]
    required_keys = [key for key, (_, _, bare) in fields.items() if bare] if required is None else required
    problems += [f"key {key!r} is missing" for key in required_keys if key not in value]
    if problems:
        raise ScheduleParseError(f"{where}: " + "; ".join(problems), problems)
    entries = [(*fields[key][:2], x, key if form else f"{where}.{key}") for key, x in value.items() if key != "format"]
    return {name: _read(hint, x, place) for name, hint, x, place in entries}


def _read(hint: Any, data: object, where: str) -> Any:
    """Return ``data`` as the type ``hint`` says."""
    if hint in _READERS:
        return _READERS[hint](data, where)
    if is_dataclass(hint):
        return _record(hint, data, where)  # type: ignore[arg-type]
    if get_origin(hint) is Literal:
        return _text(data, where)
    if get_origin(hint) is UnionType:  # something or None
        return None if data is None else _read(get_args(hint)[0], data, where)
    kinds, items = get_args(hint), _list(data, where)
    if kinds[-1] is ...:
        kinds = kinds[:1] * len(items)
    if len(items) != len(kinds):
        raise ScheduleParseError(f"{where} has {len(items)} entries; want {len(kinds)}")
    return tuple(_read(kind, x, f"{where}[{k}]") for k, (kind, x) in enumerate(zip(kinds, items, strict=True)))


def _of_type(kind: type[T], expectation: str) -> Callable[[object, str], T]:
    def read(data: object, where: str) -> T:
        if not isinstance(data, kind):
            raise ScheduleParseError(f"{where} is {_shown(data)}; want {expectation}")
        return data

    return read


_mapping = _of_type(dict, "an object")
_list = _of_type(list, "a list")
_text = _of_type(str, "a string")


def _whole(data: object, where: str) -> int:
    # True is an int to Python, and a damaged file must not count as 1
    if not isinstance(data, int) or isinstance(data, bool) or data < 0:
        raise ScheduleParseError(f"{where} is {_shown(data)}; want a whole number >= 0")
    return data


def _float(data: object, where: str) -> float:
    if data == "inf":
        return float("inf")
    if not isinstance(data, (int, float)) or isinstance(data, bool):
        raise ScheduleParseError(f"{where} is {_shown(data)}; want a number")
    try:
        return float(data)
    except OverflowError:
        raise ScheduleParseError(f"{where} is too large for a number") from None


def _table(data: object, where: str) -> tuple[tuple[str, tuple[float, ...]], ...]:
    items = _mapping(data, where).items()
    return tuple((key, _read(tuple[float, ...], x, f"{where}.{key}")) for key, x in items)


def _shown(data: object) -> str:
    return "an object" if isinstance(data, dict) else "a list" if isinstance(data, list) else truncate(repr(data), 40)


_READERS: Mapping[Any, Callable[[object, str], Any]] = {
    Slot: lambda data, where: located(where, parse_slot, _text(data, where)),
    Placement: from_placement,
    Schedule: lambda data, where: located(where, from_schedule, data),
    CostProfile: lambda data, where: located(where, from_costs, data),
    str: _text,
    int: _whole,
    float: _float,
    bool: _of_type(bool, "true or false"),
    Event: _event,
    MemoryCurve: _curve,
    tuple[tuple[str, tuple[float, ...]], ...]: _table,
    tuple[tuple[int, int], Link]: _pair_link,
}


# CSV.

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
