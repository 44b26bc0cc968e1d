"""A timeline as cells ready to draw: shifted to begin at 0, braided slots cut into bands, chunks numbered, colours chosen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.ir import OpSpec, op_spec
from jaxpipe.schedule.timeline import Timeline, chunks_in

LANES = ("compute", "tp", "d2h", "h2d", "send")
LANE_TITLES = {
    "compute": "compute",
    "tp": "TP collectives",
    "d2h": "device → host",
    "h2d": "host → device",
    "send": "send to another rank",
}
_LANE_COLOURS = {"send": "#8a8f98", "tp": "#7b5ea7"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One action's rectangle. ``band`` of ``bands``: its share of the slot's height (a braided slot has several)."""

    rank: int
    lane: str
    op: str
    stage: int
    microbatch: int
    chunk: int
    start: float
    end: float
    band: int = 0
    bands: int = 1


def cells_of(timeline: Timeline) -> tuple[Cell, ...]:
    """The cells of a timeline by start time; a braid has one cell on the TP lane. Times count from the first start."""
    chunks = chunk_numbers(timeline)
    begin = origin(timeline)
    cells = [
        Cell(e.rank, e.lane, a.op, a.stage, a.microbatch, chunks.get((e.rank, a.stage), 0),
             e.start_s - begin, e.end_s - begin, band, len(actions))
        for e in timeline.events
        for actions in (e.action.actions[:1] if e.lane == "tp" else e.action.actions,)
        for band, a in enumerate(actions)
    ]  # fmt: skip
    cells.sort(key=lambda c: (c.start, c.rank, c.band))
    return tuple(cells)


def origin(timeline: Timeline) -> float:
    """Start of the first event; 0 for an empty timeline."""
    return min((e.start_s for e in timeline.events), default=0.0)


def extent(timeline: Timeline) -> float:
    """Last end of any event, transfers included, counted from the first start."""
    return max((e.end_s for e in timeline.events), default=0.0) - origin(timeline)


def chunk_numbers(timeline: Timeline) -> dict[tuple[int, int], int]:
    """(rank, stage) → which chunk of that rank the stage is, by ascending stage."""
    return chunks_in(event for event in timeline.events if event.lane == "compute")


def lanes_of(cells: Iterable[Cell]) -> tuple[str, ...]:
    """The lanes in use: the known ones in their usual order, then any others by name. Compute is always there."""
    used = {c.lane for c in cells}
    return tuple(lane for lane in LANES if lane in used or lane == "compute") + tuple(sorted(used - set(LANES)))


def spec_of(op: str) -> OpSpec | None:
    """The op's spec, or None for an op that is not registered here (a timeline read from another program's file)."""
    try:
        return op_spec(op)
    except ScheduleError:
        return None


def op_title(op: str) -> str:
    """``F  forward``: the op and what it does."""
    spec = spec_of(op)
    return f"{op}  {spec.description}" if spec and spec.description else op


def colour_of(op: str, lane: str, chunk: int, num_chunks: int) -> str:
    """Fill of a cell: the op's colour, paler for later chunks; one colour for all transfers to another rank, and one for
    all TP collectives."""
    if lane in _LANE_COLOURS:
        return _LANE_COLOURS[lane]
    spec = spec_of(op)
    return tint(spec.colour if spec else "#9aa0a6", chunk, num_chunks)


def tint(colour: str, chunk: int, num_chunks: int) -> str:
    """``colour`` (``#rrggbb``) mixed with white: not at all for chunk 0, 55% for the last of many, evenly between."""
    if num_chunks < 2:
        return colour
    share = (0.45 if num_chunks == 2 else 0.55) * chunk / (num_chunks - 1)
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on ``colour`` (WCAG relative luminance, equal contrast at 0.179)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.22 else "#ffffff"
