"""Draw a Gantt chart over memory curves, as SVG or PNG; the cells and units here serve the other forms, too.

The chart is drawn with matplotlib's Agg and SVG canvases (no display, no pyplot). One panel a
timeline, one row a rank, a microbatch number in every cell that has room for it; below, one row a rank with live memory over
time, all timelines overlaid. Sizes are worked out in inches from the number of ranks and the length of a typical cell, so a
long schedule gives a wide picture rather than an unreadable one. Cells are polygon collections and the numbers are glyph paths,
one collection a label: thousands of cells draw in a second or two.

A
:class:`~jaxpipe.schedule.timeline.Timeline` holds bare floats; whether they are seconds and bytes is known by whoever made it.
Measured timelines always are; simulated ones only if their cost profile was.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule.ir import OpSpec, op_spec
from jaxpipe.schedule.timeline import Timeline, chunks_in

LANES = ("compute", "tp", "d2h", "h2d", "net", "send")
LANE_TITLES = {
    "compute": "compute",
    "tp": "collectives",
    "d2h": "device → host",
    "h2d": "host → device",
    "net": "reduce and gather over dp",
    "send": "send to another rank",
}
_LANE_COLOURS = {"send": "#8a8f98", "tp": "#7b5ea7"}


@dataclass(frozen=True, slots=True)
class Cell:
    """The rectangle of one action. ``band`` of ``bands``: its share of the slot's height (a braided slot has several)."""

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
    """Return the cells of a timeline by start time; a braid has one cell on the TP lane. Times count from the first start."""
    # the TP lane shows a braid once: a cell of its second action would hide under that of the first
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
    """Return the start of the first event; 0 for an empty timeline."""
    return min((e.start_s for e in timeline.events), default=0.0)


def extent(timeline: Timeline) -> float:
    """Return the last end of any event, transfers included, counted from the first start."""
    return max((e.end_s for e in timeline.events), default=0.0) - origin(timeline)


def chunk_numbers(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Return which chunk of a rank a stage is, by (rank, stage); chunks count by ascending stage."""
    return chunks_in(event for event in timeline.events if event.lane == "compute")


def lanes_of(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the lanes in use: the known ones in their usual order, then any others by name. Compute is always there."""
    used = {c.lane for c in cells}
    return tuple(lane for lane in LANES if lane in used or lane == "compute") + tuple(sorted(used - set(LANES)))


def spec_of(op: str) -> OpSpec | None:
    """Return the op's spec, or None for an op that is not registered here (a timeline of another program's file)."""
    try:
        return op_spec(op)
    except ScheduleError:
        return None


def op_title(op: str) -> str:
    """Return the op and what it does, such as ``F  forward``."""
    spec = spec_of(op)
    return f"{op}  {spec.description}" if spec and spec.description else op


def colour_of(op: str, lane: str, chunk: int, num_chunks: int) -> str:
    """Return the fill of a cell: the op's colour, paler for later chunks; one colour for all transfers to another rank, and
    one for all collectives."""
    if lane in _LANE_COLOURS:
        return _LANE_COLOURS[lane]
    spec = spec_of(op)
    return tint(spec.colour if spec else "#9aa0a6", chunk, num_chunks)


def tint(colour: str, chunk: int, num_chunks: int) -> str:
    """Return ``colour`` (``#rrggbb``) mixed with white: not at all for chunk 0, 55% for the last of many, evenly between."""
    if num_chunks < 2:
        return colour
    # two chunks need less white to be told apart, and the less white, the better an op is recognised by its colour
    share = (0.45 if num_chunks == 2 else 0.55) * chunk / (num_chunks - 1)
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def ink_on(colour: str) -> str:
    """Return black or white, whichever reads better on ``colour`` (WCAG relative luminance, equal contrast at 0.179)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.22 else "#ffffff"


Units = Literal["si", "plain"]
_NOT_IN_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Scale:
    """Shows a number ``x`` as ``x * factor`` followed by ``name`` (empty for plain numbers)."""

    factor: float
    name: str

    def show(self, x: float) -> str:
        """Format ``x`` with four significant digits and its unit."""
        return f"{number(x * self.factor)} {self.name}".rstrip()


_TIMES = ((1e-3, Scale(1e6, "µs")), (1.0, Scale(1e3, "ms")), (float("inf"), Scale(1.0, "s")))
_BYTES = (
    (1e3, Scale(1.0, "B")),
    (1e6, Scale(1e-3, "kB")),
    (1e9, Scale(1e-6, "MB")),
    (float("inf"), Scale(1e-9, "GB")),
)


def units_of(timelines: Sequence[Timeline]) -> Units:
    """Return ``"si"`` if any of the timelines was measured."""
    return "si" if any(t.source == "measured" for t in timelines) else "plain"


def time_scale(longest: float, units: Units) -> Scale:
    """Return how to show times up to ``longest``."""
    return Scale(1.0, "") if units == "plain" else next(s for limit, s in _TIMES if longest < limit)


def memory_scale(largest: float, units: Units) -> Scale:
    """Return how to show amounts of memory up to ``largest``."""
    return Scale(1.0, "") if units == "plain" else next(s for limit, s in _BYTES if largest < limit)


def printable(text: str) -> str:
    """Return ``text`` as SVG can hold it: control characters and halves of surrogate pairs (bytes of a file name that are not
    UTF-8) become ``?``."""
    return _NOT_IN_XML.sub("?", text)


def number(x: float) -> str:
    """Format ``x`` with at most four significant digits, never in exponent form for 1e-4 <= |x| < 1e9."""
    if x == 0:
        return "0"
    if abs(x) >= 1000:
        return f"{x:.0f}" if abs(x) < 1e9 else f"{x:.3e}"
    return f"{x:.4g}"


def summary(timeline: Timeline, units: Units) -> str:
    """Format makespan, both bubble rates and the peak of a timeline on one line."""
    parts = [
        f"makespan {time_scale(timeline.makespan, units).show(timeline.makespan)}",
        f"bubble {timeline.bubble_rate:.1%}",
        f"bubble by longest span {timeline.span_bubble_rate:.1%}",
        f"peak {number(max(timeline.peak_activations, default=0.0))} activations",
    ]
    if timeline.tp_exposed_s:
        parts.insert(3, f"comm exposed {timeline.tp_exposed_rate:.1%}")
    if units == "si":
        most = max(timeline.peak_bytes, default=0.0)
        parts.append(f"{memory_scale(most, units).show(most)} a rank")
    return " · ".join(parts)


_LEFT_IN, _RIGHT_IN, _HEAD_IN = 0.75, 1.2, 0.55
_ROW_COLOURS = ("#5b6472", "#c2410c", "#7c3aed", "#0f766e")
_RASTER_CELLS = 20_000
"""Cells above which an SVG holds them as an image instead of one polygon each."""
_GRID, _IDLE = "#d7dbe0", "#eef0f3"
_NAMED = {"tp": "collectives", "send": "transfer to another rank"}
"""Lanes whose cells have one colour whatever the op, and their text in the legend."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline ready to draw. ``length``: last end, in the timeline's own unit, counted from its first start."""

    timeline: Timeline
    cells: tuple[Cell, ...]
    length: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes in inches (text in points) shared by all panels."""

    width: float
    row: float
    memory_row: float
    text_pt: float
    length: float
    time: Scale
    lanes: tuple[str, ...]
    num_chunks: int

    @property
    def plot_width(self) -> float:
        return self.width - _LEFT_IN - _RIGHT_IN


def save_figure(timelines: Sequence[Timeline], path: Path, form: str, title: str, units: Units) -> None:
    """Draw and save as ``form`` (``svg`` or ``png``). The same timelines give the same bytes.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file can't be written.
    """
    panels = [Panel(t, cells_of(t), extent(t)) for t in timelines]
    layout = _layout(panels, units)
    path.write_bytes(rendered(path, form, lambda figure: _compose(figure, panels, layout, title, units)))


def rendered(path: str | Path, form: str, draw: Callable[[Any], None]) -> bytes:
    """Return what ``draw`` puts on a figure, as ``form`` (``svg`` or ``png``). ``path``: the file it is for, named in errors.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"can't draw {str(path)!r}: matplotlib is missing ({error}); pip install matplotlib"
        ) from None
    # the same bytes each time, so that a picture in a repository changes only with its schedule: a fixed salt for ids and
    # no date; text stays text (fonttype none), so that an SVG can be searched
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpipe", "font.family": ["DejaVu Sans"]}):
        figure = Figure(dpi=144, facecolor="white")
        FigureCanvasAgg(figure)
        draw(figure)
        drawn = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script that the font lacks
            figure.savefig(drawn, format=form, dpi=144, metadata={"Date" if form == "svg" else "Software": None})
    return drawn.getvalue()


def _layout(panels: Sequence[Panel], units: Units) -> Layout:
    cells = [c for p in panels for c in p.cells]
    lanes = lanes_of(cells)
    ranks = max(p.timeline.num_ranks for p in panels)
    length = max(p.length for p in panels) or 1.0
    durations = sorted(c.end - c.start for c in cells if c.lane == "compute" and c.end > c.start) or [length]
    # the 20th percentile is a short action that is common, such as F beside BW: its number must fit into its cell, and one
    # still shorter action alone must not make the picture huge
    typical = durations[len(durations) // 5]
    digits = len(str(max((c.microbatch for c in cells), default=0)))
    width_in = length / typical * (0.052 * digits + 0.035)
    width = min(46.0, max(10.0, width_in + _LEFT_IN + _RIGHT_IN))
    row = max(0.08, min(0.32, 10 / ranks)) * (1.0 if len(lanes) == 1 else 1.4)
    cell_pt = 72 * (width - _LEFT_IN - _RIGHT_IN) * typical / length
    text_pt = max(4.0, min(8.5, 0.62 * 72 * row * (1.0 if len(lanes) == 1 else 0.6), 0.78 * cell_pt / (0.64 * digits)))
    return Layout(
        width=width,
        row=row,
        memory_row=max(0.08, min(0.5, 4.5 / ranks)),
        text_pt=text_pt,
        length=length,
        time=time_scale(length, units),
        lanes=lanes,
        num_chunks=1 + max((c.chunk for c in cells), default=0),
    )


def _compose(figure: Any, panels: Sequence[Panel], layout: Layout, title: str, units: Units) -> None:
    """Stack heading, legend, one Gantt panel a timeline, and the memory panel, from the top down."""
    has_memory = any(len(p.timeline.memory) and any(m.times_s for m in p.timeline.memory) for p in panels)
    ranks = max(p.timeline.num_ranks for p in panels)
    heights = [0.36 + p.timeline.num_ranks * layout.row for p in panels]
    legend = _legend_entries(panels, layout)
    head = _HEAD_IN + 0.17 * (math.ceil(len(legend) / _legend_columns(legend, layout)) - 1)
    total = head + sum(heights) + 0.5 + (0.72 + ranks * layout.memory_row if has_memory else 0.0)
    figure.set_size_inches(layout.width, total)
    figure.text(_LEFT_IN / layout.width, 1 - 0.1 / total, title, fontsize=12, weight="bold", va="top", parse_math=False)
    _legend(figure, legend, layout, 1 - 0.36 / total)
    top = total - head
    for k, (panel, height) in enumerate(zip(panels, heights, strict=True)):
        rows = panel.timeline.num_ranks * layout.row
        axes = _axes(figure, layout, total, top - height, rows)
        _draw_gantt(axes, panel, layout, units)
        if k < len(panels) - 1:
            axes.set_xticklabels([])
        else:
            _label_time(axes, layout)
        top -= height
    if has_memory:
        rows = ranks * layout.memory_row
        axes = _axes(figure, layout, total, top - 0.72 - rows, rows)
        _draw_memory(axes, panels, layout, units, ranks)
        _label_time(axes, layout, _left_out(panels, units))


def _axes(figure: Any, layout: Layout, total: float, bottom: float, height: float) -> Any:
    axes = figure.add_axes((_LEFT_IN / layout.width, bottom / total, layout.plot_width / layout.width, height / total))
    axes.set_xlim(0, layout.length * layout.time.factor)
    axes.tick_params(labelsize=8, length=2.5, width=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=_GRID, linewidth=0.5)
    return axes


def _label_time(axes: Any, layout: Layout, note: str = "") -> None:
    time = f"time ({layout.time.name})" if layout.time.name else "time (units of cost)"
    axes.set_xlabel(time + note, fontsize=8, labelpad=2)


def _left_out(panels: Sequence[Panel], units: Units) -> str:
    """Say what the headlines' bytes count and the rows of memory don't."""
    static = max((x for p in panels for x in p.timeline.static_bytes), default=0.0)
    if not static:
        return ""
    return f"; rows leave out parameters and optimizer state, up to {memory_scale(static, units).show(static)} a rank"


def _label_ranks(axes: Any, ranks: int, row_in: float, middle: float = 0.5) -> None:
    # names of neighbouring ranks must not overlap, so many ranks are named in steps of a power of two
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, ranks) if s * row_in >= 0.13 or s == ranks)
    ticks = list(range(0, ranks, step))
    axes.set_yticks([r + middle for r in ticks], [f"rank {r}" for r in ticks])
    axes.set_ylim(ranks, 0)
    axes.tick_params(axis="y", length=0)


def _bands(layout: Layout) -> dict[str, tuple[float, float]]:
    """Return (top, height) of each lane within a row of height 1: compute on top, the other lanes as strips below it."""
    strips = layout.lanes[1:]
    if not strips:
        return {"compute": (0.06, 0.88)}
    strip = min(0.14, 0.36 / len(strips))
    height = 0.90 - strip * len(strips)
    bands = {"compute": (0.04, height)}
    bands.update({lane: (0.06 + height + k * strip, strip * 0.85) for k, lane in enumerate(strips)})
    return bands


def _draw_gantt(axes: Any, panel: Panel, layout: Layout, units: Units) -> None:
    timeline = panel.timeline
    axes.set_title(
        f"{timeline.name}, {timeline.source} — {summary(timeline, units)}",
        fontsize=9,
        loc="left",
        pad=4,
        parse_math=False,
    )
    bands = _bands(layout)
    _label_ranks(axes, timeline.num_ranks, layout.row, bands["compute"][0] + bands["compute"][1] / 2)
    groups: dict[str, list[tuple[float, float, float, float]]] = {}
    labels: dict[tuple[str, str], list[tuple[float, float]]] = {}
    factor = layout.time.factor
    points = 72 * layout.plot_width / layout.length
    for c in panel.cells:
        top, height = bands[c.lane]
        y, h = c.rank + top + c.band * height / c.bands, height / c.bands
        colour = colour_of(c.op, c.lane, c.chunk, layout.num_chunks)
        groups.setdefault(colour, []).append((c.start * factor, c.end * factor, y, y + h))
        text = str(c.microbatch)
        tall = h * layout.row * 72 >= layout.text_pt * 0.85
        if c.lane == "compute" and tall and (c.end - c.start) * points >= layout.text_pt * 0.62 * len(text) + 0.8:
            spot = ((c.start + c.end) / 2 * factor, y + h / 2)
            labels.setdefault((text, ink_on(colour)), []).append(spot)
    _add_idle(axes, timeline, bands["compute"], layout)
    _add_boxes(axes, groups, raster=len(panel.cells) > _RASTER_CELLS)
    _add_labels(axes, labels, layout.text_pt)


def _add_idle(axes: Any, timeline: Timeline, band: tuple[float, float], layout: Layout) -> None:
    """A pale strip behind each row for as long as the whole timeline lasts, so that bubbles show as gaps in it."""
    extent = (0.0, timeline.makespan * layout.time.factor)
    boxes = [(*extent, r + band[0], r + band[0] + band[1]) for r in range(timeline.num_ranks)]
    _add_boxes(axes, {_IDLE: boxes}, edge="none")


def _add_boxes(axes: Any, groups: dict[str, list[Any]], *, edge: str = "#ffffff", raster: bool = False) -> None:
    import numpy as np
    from matplotlib.collections import PolyCollection

    for colour, boxes in groups.items():
        x0, x1, y0, y1 = np.asarray(boxes, dtype=np.float64).T
        corners: Any = np.stack([np.stack(p, -1) for p in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))], axis=1)
        line = 0.0 if edge == "none" or len(boxes) > 50_000 else 0.35
        axes.add_collection(
            PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=line, rasterized=raster),
            autolim=False,
        )


def _add_labels(axes: Any, labels: dict[tuple[str, str], list[tuple[float, float]]], text_pt: float) -> None:
    """Each label drawn as one glyph path stamped at all its places; far faster than a text object a cell."""
    from matplotlib.collections import PathCollection
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    font = FontProperties(family="DejaVu Sans")
    middle = TextPath((0, 0), "0", size=100, prop=font).get_extents().height / 2
    for (text, colour), places in labels.items():
        path = TextPath((0, 0), text, size=100, prop=font)
        box = path.get_extents()
        to_points = Affine2D().translate(-(box.x0 + box.x1) / 2, -middle).scale(text_pt / 100 / 72)
        stamp = PathCollection([path], offsets=places, offset_transform=axes.transData, facecolors=colour, linewidths=0)
        stamp.set_transform(to_points + axes.figure.dpi_scale_trans)
        axes.add_collection(stamp, autolim=False)


def _draw_memory(axes: Any, panels: Sequence[Panel], layout: Layout, units: Units, ranks: int) -> None:
    """Draw memory over time, one row a rank; the first timeline filled, the others as lines; all rows share one scale."""
    import numpy as np

    highest = max((m.peak for p in panels for m in p.timeline.memory), default=0.0) or 1.0
    scale = memory_scale(highest, units)
    what = "live memory" if units == "si" else "live activations"
    who = "" if len(panels) == 1 else f" ({panels[0].timeline.source} filled, then as lines)"
    axes.set_title(f"{what} per rank{who}, peak at the right; full row height {scale.show(highest)}", fontsize=9,
                   loc="left", pad=4, parse_math=False)  # fmt: skip
    _label_ranks(axes, ranks, layout.memory_row)
    for k, panel in enumerate(panels):
        colour = _ROW_COLOURS[k % len(_ROW_COLOURS)]
        begin, end = origin(panel.timeline), panel.length
        for rank, curve in enumerate(panel.timeline.memory):
            if not curve.times_s:
                continue
            times = np.append(np.asarray(curve.times_s, dtype=np.float64) - begin, max(end, curve.times_s[-1] - begin))
            level = rank + 0.95 - 0.88 * np.append(curve.bytes, curve.bytes[-1]) / highest
            if k == 0:
                axes.fill_between(times * layout.time.factor, level, rank + 0.95, step="post", color="#c9d3df", lw=0)
            axes.step(times * layout.time.factor, level, where="post", color=colour, linewidth=0.8 if k == 0 else 1.0)
    if layout.memory_row >= 0.12:
        for rank in range(ranks):
            peaks = [p.timeline.memory[rank].peak for p in panels if rank < len(p.timeline.memory)]
            text = " / ".join(number(x * scale.factor) for x in peaks)
            axes.text(1.004, rank + 0.55, f"{text} {scale.name}", transform=axes.get_yaxis_transform(),
                      fontsize=7.5, va="center")  # fmt: skip


def _legend_entries(panels: Sequence[Panel], layout: Layout) -> list[tuple[str, str]]:
    """Return (fill, text) of each legend entry: ops, transfers, chunks, idle."""
    cells = [c for p in panels for c in p.cells]
    drawn = {c.lane for c in cells}
    ops = dict.fromkeys(c.op for c in cells if c.lane not in _NAMED)
    entries = [(colour_of(op, "compute", 0, 1), op_title(op)) for op in ops]
    entries += [(colour_of("F", lane, 0, 1), title) for lane, title in _NAMED.items() if lane in drawn]
    last = layout.num_chunks - 1
    shown = range(last + 1) if last < 4 else (0, last)
    if last > 0:
        entries += [(tint("#404040", k, layout.num_chunks), f"chunk {k}") for k in shown]
    return [*entries, (_IDLE, "idle")]


def _legend_columns(entries: Sequence[tuple[str, str]], layout: Layout) -> int:
    """Return the most columns (filled downwards) that fit beside each other, by an estimate of the widths of their texts."""
    room = layout.plot_width + _RIGHT_IN - 0.1
    for rows in range(1, len(entries)):
        columns = [entries[k : k + rows] for k in range(0, len(entries), rows)]
        if sum(max(0.42 + 0.066 * len(text) for _, text in column) for column in columns) <= room:
            return len(columns)
    return 1


def _legend(figure: Any, entries: Sequence[tuple[str, str]], layout: Layout, y: float) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=fill, edgecolor=_GRID if fill == _IDLE else fill, label=text) for fill, text in entries]
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(_LEFT_IN / layout.width, y),
        ncols=_legend_columns(entries, layout),
        fontsize=8,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.2,
        handleheight=0.8,
        columnspacing=1.4,
    )
