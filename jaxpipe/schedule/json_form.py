"""The JSON form of schedules, placements, cost profiles and timelines.

Each is an object with a ``format`` key (``jaxpipe schedule 1``); unknown and missing keys are refused. Infinity, which JSON
lacks, is the string ``"inf"``. ``from_…(to_…(x)) == x``. Of a schedule, ``rows`` alone will do (:mod:`.infer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule.costs import PER_STAGE_FIELDS, CostProfile, Link
from jaxpipe.schedule.infer import infer_microbatches, infer_placement
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import Edges, Placement
from jaxpipe.schedule.text import parse_slot
from jaxpipe.schedule.timeline import Event, MemoryCurve, Timeline
from jaxpipe.wording import clipped, closest

Json = dict[str, Any]
T = TypeVar("T")

SCHEDULE_FORMAT = "jaxpipe schedule 1"
COSTS_FORMAT = "jaxpipe costs 1"
TIMELINE_FORMAT = "jaxpipe timeline 1"

_LANES = ("compute", "tp", "d2h", "h2d", "send")


def to_schedule(schedule: Schedule) -> Json:
    return {
        "format": SCHEDULE_FORMAT,
        "name": schedule.name,
        "microbatches": schedule.num_microbatches,
        "placement": to_placement(schedule.placement),
        "rows": [[str(slot) for slot in row] for row in schedule.rows],
    }


def from_schedule(data: object, name: str = "unnamed") -> Schedule:
    """``name``: of a schedule that has none. Raises ScheduleParseError, naming the key."""
    optional = ("name", "microbatches", "placement")
    value = _object(data, "schedule", ("rows",), optional, SCHEDULE_FORMAT, need_format=False)
    rows = tuple(
        tuple(
            _at(f"rows[{r}][{k}]", parse_slot, _text(x, f"rows[{r}][{k}]"))
            for k, x in enumerate(_list(row, f"rows[{r}]"))
        )
        for r, row in enumerate(_list(value["rows"], "rows"))
    )
    return Schedule(
        _text(value.get("name", name), "name"),
        from_placement(value["placement"]) if "placement" in value else _at("rows", infer_placement, rows),
        _whole(value["microbatches"], "microbatches") if "microbatches" in value else infer_microbatches(rows),
        rows,
    )


def to_placement(placement: Placement) -> Json:
    return {
        "kind": placement.kind,
        "ranks": placement.num_ranks,
        "flows": _write(placement.flows),
        "edges": _write(placement.edges),
    }


def from_placement(data: object) -> Placement:
    """Raises ScheduleParseError, naming the key."""
    value = _object(data, "placement", ("kind", "ranks", "flows", "edges"))
    flows = _read(tuple[tuple[tuple[int, ...], ...], ...], value["flows"], "placement.flows")
    edges = _read(Edges, value["edges"], "placement.edges")
    ranks, kind = _whole(value["ranks"], "placement.ranks"), _text(value["kind"], "placement.kind")
    named = {rank for flow in flows for group in flow for rank in group}
    if ranks > len(named):
        raise ScheduleParseError(
            f"placement.ranks is {ranks}, but the flows name only {len(named)} ranks; every rank needs a stage"
        )
    return _at("placement", lambda kind: Placement(kind, ranks, flows, edges), kind)


def to_costs(costs: CostProfile) -> Json:
    """``tp_comm_s``, ``tp_collectives`` and ``boundary_buffers`` are written where they say something."""
    data: Json = {"format": COSTS_FORMAT, "source": costs.source}
    data |= {name: _write(getattr(costs, name)) for name in PER_STAGE_FIELDS if name != "tp_comm_s"}
    data |= {name: {key: _write(x) for key, x in getattr(costs, name)} for name in ("temp_bytes", "extra")}
    data["link"] = _write(costs.link)
    data["links"] = [{"src": a, "dst": b, **_write(link)} for (a, b), link in costs.links]
    data |= {"host": _write(costs.host), "memory_limit_bytes": _write(costs.memory_limit_bytes)}
    said = {
        "tp_comm_s": any(costs.tp_comm_s),
        "tp_collectives": any(n > 1 for n in costs.tp_collectives),
        "boundary_buffers": costs.boundary_buffers,
    }
    return data | {name: _write(getattr(costs, name)) for name, present in said.items() if present}


def from_costs(data: object) -> CostProfile:
    """Only the keys of :class:`CostProfile` without a default are needed. Raises ScheduleParseError, naming the key."""
    return _record(CostProfile, data, "cost profile", COSTS_FORMAT)


def _pair_link(data: object, where: str) -> tuple[tuple[int, int], Link]:
    value = _object(data, where, ("src", "dst"), tuple(_hints(Link)))
    ends = _whole(value["src"], f"{where}.src"), _whole(value["dst"], f"{where}.dst")
    return ends, _record(Link, {key: x for key, x in value.items() if key not in ("src", "dst")}, where)


def to_timeline(timeline: Timeline) -> Json:
    data = {
        "format": TIMELINE_FORMAT,
        "name": timeline.name,
        "ranks": timeline.num_ranks,
        "source": timeline.source,
        "events": [[e.rank, e.lane, str(e.action), e.start_s, e.end_s] for e in timeline.events],
    }
    data |= {name: _write(getattr(timeline, name)) for name in ("memory", "peak_activations", "static_bytes")}
    return data | ({"tp_exposed_s": _write(timeline.tp_exposed_s)} if timeline.tp_exposed_s else {})


def from_timeline(data: object) -> Timeline:
    """Raises ScheduleParseError, naming the key."""
    keys = ("format", "name", "ranks", "source", "events", "memory", "peak_activations", "static_bytes")
    value = _object(data, "timeline", keys, ("tp_exposed_s",), TIMELINE_FORMAT)
    ranks, hints = _whole(value["ranks"], "ranks"), _hints(Timeline)
    given = {key: _read(hints[key], x, key) for key, x in value.items() if key in hints}
    for key in ("memory", "peak_activations", "static_bytes", "tp_exposed_s"):
        size = len(given.get(key, ()))
        if size != ranks and (size or key in ("memory", "peak_activations")):
            raise ScheduleParseError(f"{key} has {size} entries for {ranks} ranks")
    for k, event in enumerate(given["events"]):
        if event.rank >= ranks:
            raise ScheduleParseError(f"events[{k}] is on rank {event.rank}, but ranks are 0..{ranks - 1}")
    return Timeline(num_ranks=ranks, **given)


def _event(data: object, where: str) -> Event:
    parts = _list(data, where)
    if len(parts) != 5:
        raise ScheduleParseError(f"{where} has {len(parts)} entries; want [rank, lane, action, start_s, end_s]")
    rank = _whole(parts[0], f"{where}[0]")
    if parts[1] not in _LANES:
        raise ScheduleParseError(f"{where} is on lane {parts[1]!r}; want one of {' '.join(_LANES)}")
    start, end = _float(parts[3], f"{where}[3]"), _float(parts[4], f"{where}[4]")
    if end < start:
        raise ScheduleParseError(f"{where} ends at {end}, before it starts at {start}")
    return Event(rank, parts[1], _at(where, parse_slot, _text(parts[2], f"{where}[2]")), start, end)


def _curve(data: object, where: str) -> MemoryCurve:
    value = _object(data, where, ("times_s", "bytes"))
    times, levels = (_read(tuple[float, ...], value[key], f"{where}.{key}") for key in ("times_s", "bytes"))
    if len(times) != len(levels):
        raise ScheduleParseError(f"{where} has {len(times)} times and {len(levels)} levels; want as many of each")
    return MemoryCurve(times, levels)


# By type.


def _write(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_write(x) for x in value]
    if is_dataclass(value):
        return {f.name: _write(getattr(value, f.name)) for f in fields(value)}
    return "inf" if value == float("inf") else value


@cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)


def _record(record: type[T], data: object, where: str, form: str | None = None) -> T:
    """A ``record`` of the keys that ``data`` holds; those without a default must be there."""
    every, hints = fields(record), _hints(record)  # type: ignore[arg-type]
    required = [f.name for f in every if f.default is MISSING and f.default_factory is MISSING]
    value = _object(data, where, required, [f.name for f in every], form, need_format=False)
    prefix = f"{where}." if form is None else ""
    given = {key: _read(hints[key], x, prefix + key) for key, x in value.items() if key != "format"}
    return _at(where, lambda given: record(**given), given)


def _read(hint: Any, data: object, where: str) -> Any:
    """``data`` as the type ``hint`` says."""
    if hint in _READERS:
        return _READERS[hint](data, where)
    if is_dataclass(hint):
        return _record(hint, data, where)  # type: ignore[arg-type]
    if get_origin(hint) is Literal:
        return _text(data, where)
    kinds, items = get_args(hint), _list(data, where)
    if kinds[-1] is ...:
        return tuple(_read(kinds[0], x, f"{where}[{k}]") for k, x in enumerate(items))
    if len(items) != len(kinds):
        raise ScheduleParseError(f"{where} is {data!r}; want a pair [from, to]")
    return tuple(_read(kind, x, f"{where}[{k}]") for k, (kind, x) in enumerate(zip(kinds, items, strict=True)))


def _at(where: str, make: Callable[[Any], T], value: Any) -> T:
    try:
        return make(value)
    except ScheduleError as error:
        raise ScheduleParseError(f"{where}: {error}", error.problems) from None


def _object(
    data: object,
    what: str,
    required: Iterable[str],
    optional: Iterable[str] = (),
    form: str | None = None,
    *,
    need_format: bool = True,
) -> Mapping[str, Any]:
    value = _mapping(data, what)
    if form is not None and value.get("format", None if need_format else form) != form:
        raise ScheduleParseError(f'the {what} has format {value.get("format")!r}; want "format": "{form}"')
    known = list(dict.fromkeys([*required, *optional, *(["format"] if form else [])]))
    listed = f"; known: {' '.join(known)}"
    problems = [f"unknown key {key!r}{closest(key, known, listed)}" for key in value if key not in known]
    problems += [f"key {key!r} is missing" for key in required if key not in value]
    if problems:
        raise ScheduleParseError(f"{what}: " + "; ".join(problems), problems)
    return value


def _of_type(kind: type[T], want: str) -> Callable[[object, str], T]:
    def read(data: object, where: str) -> T:
        if not isinstance(data, kind):
            raise ScheduleParseError(f"{where} is {_shown(data)}; want {want}")
        return data

    return read


_mapping = _of_type(dict, "an object")
_list = _of_type(list, "a list")
_text = _of_type(str, "a string")


def _whole(data: object, where: str) -> int:
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
    return "an object" if isinstance(data, dict) else "a list" if isinstance(data, list) else clipped(repr(data), 40)


_READERS: Mapping[Any, Callable[[object, str], Any]] = {
    str: _text,
    int: _whole,
    float: _float,
    bool: _of_type(bool, "true or false"),
    Event: _event,
    MemoryCurve: _curve,
    tuple[tuple[str, tuple[float, ...]], ...]: _table,
    tuple[tuple[int, int], Link]: _pair_link,
}
