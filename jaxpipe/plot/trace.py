"""Write a timeline as a trace in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Processes are ranks, threads are lanes, counters are memory. Slices of one thread must nest, so overlapping transfers are
put on further threads of the same lane. Times are in µs; one unit of a simulation with unit costs is shown as 1 ms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxpipe.plot.figure import LANE_TITLES, LANES, Units, chunk_numbers, origin, spec_of, summary

if TYPE_CHECKING:
    from jaxpipe.schedule.timeline import Event, Timeline

_LANE_THREADS = 100  # thread ids of lane k begin at k * this


def trace_text(timelines: Sequence[Timeline], title: str, units: Units) -> str:
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
            **{f"timeline {k}": f"{t.name}, {t.source}: {summary(t, units)}" for k, t in enumerate(timelines)},
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _events(timeline: Timeline, first_pid: int, scale: float, units: Units) -> Iterator[dict[str, Any]]:
    begin = origin(timeline)
    chunks = chunk_numbers(timeline)
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
    spec = spec_of(op)
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
        lane_title = LANE_TITLES.get(event.lane, event.lane)
        return self._lane(event.lane) * _LANE_THREADS + slot, (
            (lane_title if slot == 0 else f"{lane_title} {slot + 1}") if new else ""
        )

    def _lane(self, lane: str) -> int:
        if lane in LANES:
            return LANES.index(lane) + 1
        if lane not in self._others:
            self._others.append(lane)
        return len(LANES) + 1 + self._others.index(lane)
