"""Gantt chart over memory curves, as SVG or PNG, with matplotlib's Agg and SVG canvases (no display, no pyplot).

One panel a timeline, one row a rank, a microbatch number in every cell that has room for it; below, one row a rank with
live memory over time, all timelines overlaid. Sizes are worked out in inches from the number of ranks and the length of a
typical cell, so a long schedule gives a wide picture rather than an unreadable one. Cells are polygon collections and the
numbers are glyph paths, one collection a label: thousands of cells draw in a second or two.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe.errors import ConfigError
from jaxpipe.plot.cells import Cell, cells_of, colour_of, extent, ink_on, lanes_of, op_title, origin, tint
from jaxpipe.plot.units import Scale, Units, memory_scale, number, summary, time_scale

if TYPE_CHECKING:
    from jaxpipe.schedule.timeline import Timeline

_LEFT_IN, _RIGHT_IN, _HEAD_IN = 0.75, 1.2, 0.55
_ROW_COLOURS = ("#5b6472", "#c2410c", "#7c3aed", "#0f766e")
_RASTER_CELLS = 20_000  # above this an SVG holds its cells as an image
_GRID, _IDLE = "#d7dbe0", "#eef0f3"
_NAMED = {
    "tp": "TP collectives",
    "send": "transfer to another rank",
}  # lanes whose cells have one colour whatever the op


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
    """What ``draw`` puts on a figure, as ``form`` (``svg`` or ``png``), the same bytes each time. ``path``: where it is to go.

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
    typical = durations[len(durations) // 5]  # a shorter one: F beside BW
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
    """What the headlines' bytes count and the rows of memory don't."""
    static = max((x for p in panels for x in p.timeline.static_bytes), default=0.0)
    if not static:
        return ""
    return f"; rows leave out parameters and optimizer state, up to {memory_scale(static, units).show(static)} a rank"


def _label_ranks(axes: Any, ranks: int, row_in: float, middle: float = 0.5) -> None:
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, ranks) if s * row_in >= 0.13 or s == ranks)
    ticks = list(range(0, ranks, step))
    axes.set_yticks([r + middle for r in ticks], [f"rank {r}" for r in ticks])
    axes.set_ylim(ranks, 0)
    axes.tick_params(axis="y", length=0)


def _bands(layout: Layout) -> dict[str, tuple[float, float]]:
    """Lane → (top, height) within a row of height 1: compute on top, the other lanes as strips below it."""
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
    """One row a rank; the first timeline filled, the others as lines; all rows share one scale."""
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
    """(fill, text) of each legend entry: ops, transfers, chunks, idle."""
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
    """The most columns (filled downwards) that fit beside each other, by an estimate of the widths of their texts."""
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
