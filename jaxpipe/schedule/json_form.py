"""The JSON form of schedules, placements, cost profiles and timelines.

Each is an object with a ``format`` key (``jaxpipe schedule 1``); unknown and missing keys are refused. Infinity, which JSON
lacks, is the string ``"inf"``. ``from_…(to_…(x)) == x``. Of a schedule, ``rows`` alone will do (:mod:`.infer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule.costs import CostProfile, HostLink, Link
from jaxpipe.schedule.infer import infer_microbatches, infer_placement
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.text import parse_slot
from jaxpipe.schedule.timeline import Event, MemoryCurve, Timeline
from jaxpipe.wording import closest

Json = dict[str, Any]
T = TypeVar("T")

SCHEDULE_FORMAT = "jaxpipe schedule 1"
COSTS_FORMAT = "jaxpipe costs 1"
TIMELINE_FORMAT = "jaxpipe timeline 1"

_LANES = ("compute", "tp", "d2h", "h2d", "send")
_PER_STAGE = tuple(
    f.name
    for f in fields(CostProfile)
    if f.type == "tuple[float, ...]" and f.name not in ("memory_limit_bytes", "tp_comm_s")
)
_REQUIRED_COSTS = tuple(f.name for f in fields(CostProfile) if f.default is MISSING and f.default_factory is MISSING)


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
    value = _object(data, "schedule", ("rows",), SCHEDULE_FORMAT, optional, need_format=False)
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
        "flows": [[list(group) for group in flow] for flow in placement.flows],
        "edges": [list(edge) for edge in placement.edges],
    }


def from_placement(data: object) -> Placement:
    """Raises ScheduleParseError, naming the key."""
    value = _object(data, "placement", ("kind", "ranks", "flows", "edges"))
    flows = tuple(
        tuple(
            _wholes(group, f"placement.flows[{k}][{s}]") for s, group in enumerate(_list(flow, f"placement.flows[{k}]"))
        )
        for k, flow in enumerate(_list(value["flows"], "placement.flows"))
    )
    edges = []
    for k, edge in enumerate(_list(value["edges"], "placement.edges")):
        ends = _wholes(edge, f"placement.edges[{k}]")
        if len(ends) != 2:
            raise ScheduleParseError(f"placement.edges[{k}] is {edge!r}; want a pair [from, to]")
        edges.append((ends[0], ends[1]))
    ranks = _whole(value["ranks"], "placement.ranks")
    named = {rank for flow in flows for group in flow for rank in group}
    if ranks > len(named):
        raise ScheduleParseError(
            f"placement.ranks is {ranks}, but the flows name only {len(named)} ranks; every rank needs a stage"
        )
    return _at(
        "placement", lambda kind: Placement(kind, ranks, flows, tuple(edges)), _text(value["kind"], "placement.kind")
    )


def to_costs(costs: CostProfile) -> Json:
    data: Json = {"format": COSTS_FORMAT, "source": costs.source}
    data |= {name: _numbers_out(getattr(costs, name)) for name in _PER_STAGE}
    data["temp_bytes"] = {op: _numbers_out(values) for op, values in costs.temp_bytes}
    data["extra"] = {name: _numbers_out(values) for name, values in costs.extra}
    data["link"] = _link_out(costs.link)
    data["links"] = [{"src": a, "dst": b, **_link_out(link)} for (a, b), link in costs.links]
    data["host"] = {
        "d2h_bytes_per_s": _number_out(costs.host.d2h_bytes_per_s),
        "h2d_bytes_per_s": _number_out(costs.host.h2d_bytes_per_s),
        "latency_s": _number_out(costs.host.latency_s),
        "mode": costs.host.mode,
        "groups": [list(group) for group in costs.host.groups],
    }
    data["memory_limit_bytes"] = _numbers_out(costs.memory_limit_bytes)
    if any(costs.tp_comm_s):
        data["tp_comm_s"] = _numbers_out(costs.tp_comm_s)
    if any(n > 1 for n in costs.tp_collectives):
        data["tp_collectives"] = list(costs.tp_collectives)
    if costs.boundary_buffers:
        data["boundary_buffers"] = True
    return data


def from_costs(data: object) -> CostProfile:
    """Only the keys of :class:`CostProfile` without a default are needed. Raises ScheduleParseError, naming the key."""
    optional = tuple(f.name for f in fields(CostProfile) if f.name not in _REQUIRED_COSTS)
    value = _object(data, "cost profile", _REQUIRED_COSTS, COSTS_FORMAT, optional, need_format=False)
    given: dict[str, Any] = {
        k: _floats(value[k], k) for k in (*_PER_STAGE, "tp_comm_s", "memory_limit_bytes") if k in value
    }
    if "tp_collectives" in value:
        given["tp_collectives"] = _wholes(value["tp_collectives"], "tp_collectives")
    for name in ("temp_bytes", "extra"):
        if name in value:
            table = _mapping(value[name], name)
            given[name] = tuple((key, _floats(x, f"{name}.{key}")) for key, x in table.items())
    if "source" in value:
        given["source"] = _text(value["source"], "source")
    if "link" in value:
        given["link"] = _link_in(_object(value["link"], "link", (), optional=_LINK_KEYS), "link")
    if "links" in value:
        given["links"] = tuple(_pair_link(x, f"links[{k}]") for k, x in enumerate(_list(value["links"], "links")))
    if "host" in value:
        given["host"] = _host_in(value["host"])
    if "boundary_buffers" in value:
        if not isinstance(value["boundary_buffers"], bool):
            raise ScheduleParseError(f"boundary_buffers is {value['boundary_buffers']!r}; want true or false")
        given["boundary_buffers"] = value["boundary_buffers"]
    return _at("cost profile", lambda kwargs: CostProfile(**kwargs), given)


_LINK_KEYS = ("latency_s", "bytes_per_s")


def _link_out(link: Link) -> Json:
    return {key: _number_out(getattr(link, key)) for key in _LINK_KEYS}


def _link_in(value: Mapping[str, Any], where: str) -> Link:
    given = {key: _float(value[key], f"{where}.{key}") for key in _LINK_KEYS if key in value}
    return _at(where, lambda kwargs: Link(**kwargs), given)


def _pair_link(data: object, where: str) -> tuple[tuple[int, int], Link]:
    value = _object(data, where, ("src", "dst"), optional=_LINK_KEYS)
    return (_whole(value["src"], f"{where}.src"), _whole(value["dst"], f"{where}.dst")), _link_in(value, where)


def _host_in(data: object) -> HostLink:
    rates = ("d2h_bytes_per_s", "h2d_bytes_per_s", "latency_s")
    value = _object(data, "host", (), optional=(*rates, "mode", "groups"))
    given: dict[str, Any] = {key: _float(value[key], f"host.{key}") for key in rates if key in value}
    if "mode" in value:
        given["mode"] = _text(value["mode"], "host.mode")
    if "groups" in value:
        groups = _list(value["groups"], "host.groups")
        given["groups"] = tuple(_wholes(group, f"host.groups[{k}]") for k, group in enumerate(groups))
    return _at("host", lambda kwargs: HostLink(**kwargs), given)


def to_timeline(timeline: Timeline) -> Json:
    data = {
        "format": TIMELINE_FORMAT,
        "name": timeline.name,
        "ranks": timeline.num_ranks,
        "source": timeline.source,
        "events": [[e.rank, e.lane, str(e.action), e.start_s, e.end_s] for e in timeline.events],
        "memory": [{"times_s": list(m.times_s), "bytes": list(m.bytes)} for m in timeline.memory],
        "peak_activations": list(timeline.peak_activations),
        "static_bytes": list(timeline.static_bytes),
    }
    if timeline.tp_exposed_s:
        data["tp_exposed_s"] = list(timeline.tp_exposed_s)
    return data


def from_timeline(data: object) -> Timeline:
    """Raises ScheduleParseError, naming the key."""
    keys = ("format", "name", "ranks", "source", "events", "memory", "peak_activations", "static_bytes")
    value = _object(data, "timeline", keys, TIMELINE_FORMAT, ("tp_exposed_s",))
    ranks = _whole(value["ranks"], "ranks")
    curves = tuple(_curve(x, f"memory[{k}]") for k, x in enumerate(_list(value["memory"], "memory")))
    peaks, static = (_floats(value[key], key) for key in ("peak_activations", "static_bytes"))
    exposed = _floats(value.get("tp_exposed_s", []), "tp_exposed_s")
    for key, size in (
        ("memory", len(curves)),
        ("peak_activations", len(peaks)),
        ("static_bytes", len(static) or ranks),
        ("tp_exposed_s", len(exposed) or ranks),
    ):
        if size != ranks:
            raise ScheduleParseError(f"{key} has {size} entries for {ranks} ranks")
    return Timeline(
        name=_text(value["name"], "name"),
        num_ranks=ranks,
        events=tuple(_event(x, f"events[{k}]", ranks) for k, x in enumerate(_list(value["events"], "events"))),
        memory=curves,
        peak_activations=peaks,
        static_bytes=static,
        source=_text(value["source"], "source"),
        tp_exposed_s=exposed,
    )


def _event(data: object, where: str, ranks: int) -> Event:
    parts = _list(data, where)
    if len(parts) != 5:
        raise ScheduleParseError(f"{where} has {len(parts)} entries; want [rank, lane, action, start_s, end_s]")
    rank = _whole(parts[0], f"{where}[0]")
    if rank >= ranks:
        raise ScheduleParseError(f"{where} is on rank {rank}, but ranks are 0..{ranks - 1}")
    if parts[1] not in _LANES:
        raise ScheduleParseError(f"{where} is on lane {parts[1]!r}; want one of {' '.join(_LANES)}")
    start, end = _float(parts[3], f"{where}[3]"), _float(parts[4], f"{where}[4]")
    if end < start:
        raise ScheduleParseError(f"{where} ends at {end}, before it starts at {start}")
    return Event(rank, parts[1], _at(where, parse_slot, _text(parts[2], f"{where}[2]")), start, end)


def _curve(data: object, where: str) -> MemoryCurve:
    value = _object(data, where, ("times_s", "bytes"))
    curve = MemoryCurve(_floats(value["times_s"], f"{where}.times_s"), _floats(value["bytes"], f"{where}.bytes"))
    if len(curve.times_s) != len(curve.bytes):
        raise ScheduleParseError(
            f"{where} has {len(curve.times_s)} times and {len(curve.bytes)} levels; want as many of each"
        )
    return curve


# Readers of single values: each names the key when it refuses.


def _at(where: str, make: Callable[[Any], T], value: Any) -> T:
    try:
        return make(value)
    except ScheduleError as error:
        raise ScheduleParseError(f"{where}: {error}", error.problems) from None


def _object(
    data: object,
    what: str,
    required: Iterable[str],
    form: str | None = None,
    optional: Iterable[str] = (),
    *,
    need_format: bool = True,
) -> Mapping[str, Any]:
    value = _mapping(data, what)
    if form is not None and value.get("format", None if need_format else form) != form:
        raise ScheduleParseError(f'the {what} has format {value.get("format")!r}; want "format": "{form}"')
    required = tuple(required)
    known = (*required, *optional, *(["format"] if form else []))
    listed = f"; known: {' '.join(known)}"
    problems = [f"unknown key {key!r}{closest(key, known, listed)}" for key in value if key not in known]
    problems += [f"key {key!r} is missing" for key in required if key not in value]
    if problems:
        raise ScheduleParseError(f"{what}: " + "; ".join(problems), problems)
    return value


def _mapping(data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ScheduleParseError(f"{where} is {_kind(data)}; want an object")
    return data


def _list(data: object, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise ScheduleParseError(f"{where} is {_kind(data)}; want a list")
    return data


def _text(data: object, where: str) -> str:
    if not isinstance(data, str):
        raise ScheduleParseError(f"{where} is {_kind(data)}; want a string")
    return data


def _whole(data: object, where: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or data < 0:
        raise ScheduleParseError(f"{where} is {_kind(data)}; want a whole number >= 0")
    return data


def _wholes(data: object, where: str) -> tuple[int, ...]:
    return tuple(_whole(x, f"{where}[{k}]") for k, x in enumerate(_list(data, where)))


def _float(data: object, where: str) -> float:
    if data == "inf":
        return float("inf")
    if not isinstance(data, (int, float)) or isinstance(data, bool):
        raise ScheduleParseError(f"{where} is {_kind(data)}; want a number")
    try:
        return float(data)
    except OverflowError:
        raise ScheduleParseError(f"{where} is too large for a number") from None


def _floats(data: object, where: str) -> tuple[float, ...]:
    return tuple(_float(x, f"{where}[{k}]") for k, x in enumerate(_list(data, where)))


def _number_out(value: float) -> float | str:
    return "inf" if value == float("inf") else value


def _numbers_out(values: Iterable[float]) -> list[float | str]:
    return [_number_out(x) for x in values]


def _kind(data: object) -> str:
    if isinstance(data, dict):
        return "an object"
    if isinstance(data, list):
        return "a list"
    shown = repr(data)
    return shown if len(shown) <= 40 else shown[:39] + "…"
