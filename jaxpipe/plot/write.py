"""Write timelines as the file that its suffix names: a picture, a trace, or a page that shows them.

**Traces** are in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Processes are
ranks, threads are lanes, counters are memory. Slices of one thread must nest, so overlapping transfers are put on further
threads of the same lane. Times are in µs; one unit of a simulation with unit costs is shown as 1 ms.

**Pages** of HTML contain all they need: zoom, pan, hover; no network, no libraries. A page is ``viewer.html`` with
``viewer.js`` and the data put in. Data are columns (one array a field), so that a hundred thousand events stay a few megabytes
and load at once; the script draws only what is in view, on one canvas.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe.errors import ConfigError
from jaxpipe.plot import figure

if TYPE_CHECKING:
    from jaxpipe.plot.figure import Cell
    from jaxpipe.schedule.timeline import Event, Timeline


SUFFIXES = (".svg", ".png", ".html", ".trace.json", ".json")
"""Endings of files that :func:`plot_timelines` writes. ``.trace.json`` and ``.json`` are both the Perfetto (Chrome) trace."""


def check_suffix(path: str | Path) -> str:
    """Return the entry of :data:`SUFFIXES` that ``path`` ends with.

    Raises:
        ConfigError: none of them does.
    """
    # .trace.json comes before .json in SUFFIXES, so the longer one is found
    name = Path(path).name.lower()
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return suffix
    raise ConfigError(f"can't draw to {str(path)!r}: its suffix is not one of {' '.join(SUFFIXES)}")


def plot_timelines(
    timelines: Sequence[Timeline],
    path: str | Path,
    *,
    title: str | None = None,
    units: figure.Units | None = None,
) -> None:
    """Draw ``timelines``, the first on top, to ``path``: ``.svg``, ``.png``, ``.html``, ``.trace.json`` or ``.json``.

    The usual call passes the predicted timeline and then the measured one. Each is shifted to begin at 0, so both share one
    time axis. ``title``: heading of the picture; the timelines' names by default. ``units``: what the numbers in the
    timelines mean, ``"si"`` for seconds and bytes or ``"plain"`` for unit costs and activations; by default ``"si"`` when any
    timeline is measured.

    Raises:
        ConfigError: no timelines or events, an unknown suffix, or no matplotlib for a figure.
        OSError: the file can't be written.
    """
    suffix = check_suffix(path)
    if not timelines or not any(t.events for t in timelines):
        raise ConfigError(f"nothing to draw to {str(path)!r}: there are no events in the timelines given")
    chosen = units or figure.units_of(timelines)
    timelines = [replace(t, name=figure.printable(t.name), source=figure.printable(t.source)) for t in timelines]
    heading = figure.printable(title) if title is not None else " · ".join(dict.fromkeys(t.name for t in timelines))
    if suffix == ".html":
        Path(path).write_text(viewer_page(timelines, heading, chosen), encoding="utf-8")
    elif suffix in (".json", ".trace.json"):
        Path(path).write_text(trace_text(timelines, heading, chosen), encoding="utf-8")
    else:
        from jaxpipe.plot.figure import save_figure

        save_figure(timelines, Path(path), suffix[1:], heading, chosen)


_LANE_THREADS = 100  # thread ids of lane k begin at k * this


def trace_text(timelines: Sequence[Timeline], title: str, units: figure.Units) -> str:
    """Return the JSON text of the trace of all ``timelines``, in order, each shifted to begin at 0."""
    scale = 1e6 if units == "si" else 1e3
    events: list[dict[str, Any]] = []
    first_pid = 0
    for timeline in timelines:
        events += _events(timeline, first_pid, scale, units)
        first_pid += timeline.num_ranks
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title,
            "unit": "seconds" if units == "si" else "1 unit of cost is shown as 1 ms",
            **{f"timeline {k}": f"{t.name}, {t.source}: {figure.summary(t, units)}" for k, t in enumerate(timelines)},
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _events(timeline: Timeline, first_pid: int, scale: float, units: figure.Units) -> Iterator[dict[str, Any]]:
    begin = figure.origin(timeline)
    chunks = figure.chunk_numbers(timeline)
    threads = _Threads()
    for rank in range(timeline.num_ranks):
        pid = first_pid + rank
        yield _meta("process_name", pid, 0, name=f"rank {rank} ({timeline.name}, {timeline.source})")
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
    # of events that start together the longest first: slices of a thread must nest, and a shorter one lies within it
    for event in sorted(timeline.events, key=lambda e: (e.start_s, -e.end_s)):
        pid = first_pid + event.rank
        tid, new_name = threads.place(event)
        if new_name:
            yield _meta("thread_name", pid, tid, name=new_name)
            yield _meta("thread_sort_index", pid, tid, sort_index=tid)
        ops = [a.op for a in event.action.actions]
        yield {
            "name": {"send": "send ", "tp": "collectives "}.get(event.lane, "") + str(event.action),
            "cat": "+".join(ops),
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": round((event.start_s - begin) * scale, 6),
            "dur": round((event.end_s - event.start_s) * scale, 6),
            "args": {
                "what": " + ".join(_description(op) for op in ops),
                "stage": [a.stage for a in event.action.actions],
                "microbatch": [a.microbatch for a in event.action.actions],
                "chunk": [chunks.get((event.rank, a.stage), 0) for a in event.action.actions],
            },
        }
    what = "bytes" if units == "si" else "activations"
    for rank, curve in enumerate(timeline.memory):
        for time, amount in zip(curve.times_s, curve.bytes, strict=True):
            yield {
                "name": "memory",
                "ph": "C",
                "pid": first_pid + rank,
                "ts": round((time - begin) * scale, 6),
                "args": {what: amount},
            }


def _description(op: str) -> str:
    spec = figure.spec_of(op)
    return spec.description if spec and spec.description else op


def _meta(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


class _Threads:
    """Gives each event a thread of its (rank, lane) on which nothing else runs at that time."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, str], list[float]] = {}
        self._others: list[str] = []

    def place(self, event: Event) -> tuple[int, str]:
        """Return a thread id, and the thread's name if it is new (else empty). Events must come by start time."""
        ends = self._ends.setdefault((event.rank, event.lane), [])
        slot = next((k for k, end in enumerate(ends) if end <= event.start_s), len(ends))
        new = slot == len(ends)
        if new:
            ends.append(event.end_s)
        else:
            ends[slot] = event.end_s
        lane_title = figure.LANE_TITLES.get(event.lane, event.lane)
        return self._lane(event.lane) * _LANE_THREADS + slot, (
            (lane_title if slot == 0 else f"{lane_title} {slot + 1}") if new else ""
        )

    def _lane(self, lane: str) -> int:
        if lane in figure.LANES:
            return figure.LANES.index(lane) + 1
        if lane not in self._others:
            self._others.append(lane)
        return len(figure.LANES) + 1 + self._others.index(lane)


def viewer_page(timelines: Sequence[Timeline], title: str, units: figure.Units) -> str:
    """Return the HTML text of the page."""
    files = resources.files("jaxpipe.plot")
    page = (files / "viewer.html").read_text(encoding="utf-8")
    script = (files / "viewer.js").read_text(encoding="utf-8")
    data = json.dumps(viewer_data(timelines, title, units), ensure_ascii=False, separators=(",", ":"))
    # names of ops and schedules come from files: </script> in one must not end the script
    texts = {"/*SCRIPT*/": script, "<!--TITLE-->": html.escape(title), "{/*DATA*/}": data.replace("<", "\\u003c")}
    # in one pass: a title may hold one of the marks
    return re.sub("|".join(map(re.escape, texts)), lambda mark: texts[mark[0]], page)


def viewer_data(timelines: Sequence[Timeline], title: str, units: figure.Units) -> dict[str, Any]:
    """Return the page's data: a table of op kinds (op, lane and chunk with colours), and the timelines in columns."""
    # columns name kinds by number: a hundred thousand events repeat neither colours nor titles
    cells = [figure.cells_of(t) for t in timelines]
    everything = [c for group in cells for c in group]
    num_chunks = 1 + max((c.chunk for c in everything), default=0)
    order = {op: k for k, op in enumerate(dict.fromkeys(c.op for c in everything))}
    kinds = sorted(
        {(c.op, c.lane, c.chunk) for c in everything},
        key=lambda kind: (kind[1] in ("tp", "send"), order[kind[0]], *kind),
    )
    numbers = {kind: k for k, kind in enumerate(kinds)}
    colours = [figure.colour_of(op, lane, chunk, num_chunks) for op, lane, chunk in kinds]
    return {
        "title": title,
        "units": units,
        "chunks": num_chunks,
        "lanes": [{"name": lane, "title": figure.LANE_TITLES.get(lane, lane)} for lane in figure.lanes_of(everything)],
        "kinds": [
            {
                "op": op,
                "lane": lane,
                "chunk": chunk,
                "title": figure.op_title(op),
                "fill": fill,
                "ink": figure.ink_on(fill),
            }
            for (op, lane, chunk), fill in zip(kinds, colours, strict=True)
        ],
        "timelines": [_columns(t, group, numbers, units) for t, group in zip(timelines, cells, strict=True)],
    }


def _columns(
    timeline: Timeline, cells: tuple[Cell, ...], numbers: dict[tuple[str, str, int], int], units: figure.Units
) -> dict[str, Any]:
    begin = figure.origin(timeline)
    return {
        "name": timeline.name,
        "source": timeline.source,
        "summary": figure.summary(timeline, units),
        "ranks": timeline.num_ranks,
        "length": figure.extent(timeline),
        "static": list(timeline.static_bytes),
        "rank": [c.rank for c in cells],
        "kind": [numbers[c.op, c.lane, c.chunk] for c in cells],
        "stage": [c.stage for c in cells],
        "microbatch": [c.microbatch for c in cells],
        "start": [_short(c.start) for c in cells],
        "end": [_short(c.end) for c in cells],
        "band": [c.band for c in cells],
        "bands": [c.bands for c in cells],
        "memory": [
            {"t": [_short(x - begin) for x in m.times_s], "y": [_short(y) for y in m.bytes], "peak": m.peak}
            for m in timeline.memory
        ],
    }


def _short(x: float) -> float:
    """Round ``x`` to 12 significant digits: sums of costs lose their tails, the file half its size."""
    return float(f"{x:.12g}")
