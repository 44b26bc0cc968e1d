"""Draw peak memory against bubble: one point a schedule, the Pareto front as a staircase, the memory limit as a line.

As SVG or PNG (matplotlib), or as HTML: a page of its own with the SVG and a table. Schedules at one place share one label.
Labels are set by a small search: each takes the nearest free place around its point, the front's labels first, and never
covers a label, a point or the limit; one that ends up far away gets a leader line.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.plot.figure import number, printable

SUFFIXES = (".svg", ".png", ".html")
_WIDTH_IN, _HEIGHT_IN = 10.0, 6.4
_TEXT_PT, _DOT_PT = 8.5, 5.5
_FRONT, _POINT, _OUT, _LIMIT, _GRID = "#0072b2", "#3b4252", "#a3aab5", "#d55e00", "#e3e6ea"
_ANGLES = [math.radians(a) for a in (0, 180, 30, -30, 150, -150, 60, -60, 120, -120, 90, -90, 15, -15, 165, -165)]
_RADII_PT = (6, 11, 18, 27, 38, 52, 68, 86, 106, 128, 152)
_FAR_PT = 11  # from where on a label has a leader line
_NAMES_A_LINE = 2


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule in the picture: ``peak`` activations, ``bubble`` as a fraction; ``feasible``: within the memory limit."""

    name: str
    peak: float
    bubble: float
    feasible: bool = True


def front_of(points: Iterable[Point]) -> list[Point]:
    """Return the feasible points that no other beats in peak or bubble without losing in the other; by rising peak."""
    # by rising peak, a point is on the front if its bubble is below that of all before it
    front: list[Point] = []
    for point in sorted((p for p in points if p.feasible), key=lambda p: (_rounded(p.peak), _rounded(p.bubble))):
        if not front or _rounded(point.bubble) < _rounded(front[-1].bubble):
            front.append(point)
    return front


def plot_pareto(points: Sequence[Point], path: str | Path, *, title: str, limit: float | None = None) -> None:
    """Draw ``points`` to ``path`` (``.svg``, ``.png`` or ``.html``). The same points give the same bytes.

    Raises:
        ConfigError: no points, an unknown suffix, or no matplotlib.
        OSError: the file can't be written.
    """
    where = Path(path)
    suffix = where.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"can't draw to {str(path)!r}: its suffix is not one of {' '.join(SUFFIXES)}")
    if not points:
        raise ConfigError(f"nothing to draw to {str(path)!r}: no points were given")
    title, points = printable(title), [replace(p, name=printable(p.name)) for p in points]
    if suffix == ".html":
        where.write_text(_page(points, title, limit, _drawn(points, "svg", title, limit, path)), encoding="utf-8")
    else:
        where.write_bytes(_drawn(points, suffix[1:], title, limit, path))


def _drawn(points: Sequence[Point], form: str, title: str, limit: float | None, path: str | Path) -> bytes:
    from jaxpipe.plot.figure import rendered  # which imports the schedules, and --help must not

    def draw(figure: Any) -> None:
        figure.set_size_inches(_WIDTH_IN, _HEIGHT_IN)
        axes = figure.add_axes((0.075, 0.1, 0.9, 0.8))
        _frame(axes, points, title, limit)
        _draw(axes, points, limit)
        _label(axes, points, limit)

    return rendered(path, form, draw)


def _frame(axes: Any, points: Sequence[Point], title: str, limit: float | None) -> None:
    """Set up axes with room around the points; memory on a logarithmic axis where it ranges over more than a factor of 4."""
    axes.set_title(title, fontsize=12, weight="bold", loc="left", parse_math=False)
    key = "blue: Pareto front" + ("   hollow: above the limit" if any(not p.feasible for p in points) else "")
    axes.text(1.0, 1.012, key, transform=axes.transAxes, ha="right", va="bottom", fontsize=8.5, color=_POINT)
    axes.set_xlabel("peak activations on the fullest rank (1 = a rank's share of one microbatch)", fontsize=9)
    axes.set_ylabel("bubble (% of all ranks' time)", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, length=2.5, width=0.6)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    peaks = [p.peak for p in points if p.peak > 0] + ([limit] if limit else [])
    low, high = min(peaks, default=1.0), max(peaks, default=1.0)
    if high > 4 * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.25, high * 1.35)
        round_numbers = [k * 10.0**e for e in range(-3, 7) for k in (1, 1.5, 2, 3, 4, 6, 8)]
        ticks = [x for x in round_numbers if low / 1.25 <= x <= high * 1.35]
        axes.set_xticks(ticks, [number(x) for x in ticks])
        axes.minorticks_off()
    else:
        room = (high - low) * 0.12 or 0.5 * high
        axes.set_xlim(low - room, high + 1.4 * room)
    bubbles = [100 * p.bubble for p in points]
    room = (max(bubbles) - min(bubbles)) * 0.1 or 1.0
    axes.set_ylim(min(bubbles) - room, max(bubbles) + room)


def _draw(axes: Any, points: Sequence[Point], limit: float | None) -> None:
    front = front_of(points)
    line = {"color": _FRONT, "linewidth": 1.4, "alpha": 0.75, "zorder": 2}
    axes.step([p.peak for p in front], [100 * p.bubble for p in front], where="post", **line)
    best = {_place(p) for p in front}
    for point in points:
        colour = _FRONT if point.feasible and _place(point) in best else _POINT if point.feasible else _OUT
        fill = colour if point.feasible else "white"
        axes.plot(point.peak, 100 * point.bubble, "o", ms=_DOT_PT, mec=colour, mfc=fill, mew=1.1, zorder=3)
    if limit is not None:
        axes.axvline(limit, color=_LIMIT, linewidth=1.1, linestyle=(0, (5, 3)), zorder=1)
        where = {"xy": (limit, 1.0), "xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(f"limit {number(limit)}", xytext=(3, -2), va="top", color=_LIMIT, fontsize=_TEXT_PT, **where)


def _label(axes: Any, points: Sequence[Point], limit: float | None) -> tuple[list[Any], Any]:
    """Set the labels of all points, the front's first and then the rest from the top, so that none covers anything.

    Returns:
        The obstacles, labels last, and the frame: boxes (x0, y0, x1, y1) in 1/72 inch of the page.
    """
    import numpy as np
    from matplotlib.text import Text

    front, to_points, renderer = front_of(points), 72 / axes.figure.dpi, axes.figure.canvas.get_renderer()

    def at(point: Point) -> Any:
        return axes.transData.transform((point.peak, 100 * point.bubble)) * to_points

    frame = axes.get_window_extent().extents * to_points
    places, dot = np.array([at(point) for point in points]), _DOT_PT / 2 + 1
    boxes = [*np.hstack([places - dot, places + dot])]
    if limit is not None:
        x = at(Point("", limit, 0.0))[0]
        boxes += [(x - 1, frame[1], x + 1, frame[3]), (x, frame[3] - 14, x + 70, frame[3])]
    for (x0, y0), (x1, y1) in pairwise(map(at, front)):  # the front's line: across, then down
        boxes += [(x0, y0 - 1, x1, y0 + 1), (x1 - 1, y1, x1 + 1, y0)]
    groups: dict[tuple[tuple[float, float], bool], list[Point]] = {}
    for point in points:
        groups.setdefault((_place(point), point.feasible), []).append(point)
    best = {p.name for p in front}

    def turn(group: list[Point]) -> tuple[bool, bool, float]:
        return best.isdisjoint(p.name for p in group), not group[0].feasible, -group[0].bubble

    for group in sorted(groups.values(), key=turn):
        names, (behind, out, _) = [p.name for p in group], turn(group)
        spot = (group[0].peak, 100 * group[0].bubble)
        text = axes.annotate(
            ",\n".join(", ".join(names[k : k + _NAMES_A_LINE]) for k in range(0, len(names), _NAMES_A_LINE)),
            spot,
            (0, 0),
            textcoords="offset points",
            color=_FRONT if not behind else "#7a828e" if out else _POINT,
            weight="normal" if behind else "bold",
            fontsize=_TEXT_PT,
            linespacing=1.05,
            parse_math=False,
            va="center",
            ha="center",
            zorder=5,
        )
        size = Text.get_window_extent(text, renderer).size * to_points * (1.06, 1) + 2
        offset, box = _free_place(at(group[0]), size, np.array(boxes), frame)
        boxes.append(box)
        text.set_position(offset)
        edge = np.clip(0, offset - size / 2, offset + size / 2)
        if max(abs(edge)) > _FAR_PT:
            line = {"arrowstyle": "-", "color": _OUT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", spot, edge, textcoords="offset points", arrowprops=line, zorder=1)
    return boxes, frame


def _free_place(point: Any, size: Any, obstacles: Any, frame: Any) -> tuple[Any, Any]:
    """Return how far from its ``point`` the middle of a label of this ``size`` is best, and the label's box: the nearest place
    where nothing is covered, or the least bad one."""
    import numpy as np

    # candidates come nearest first and argmin takes the first of equals, so the nearest free place wins; a label rather
    # covers another one than leaves the frame, where nobody could read it
    ways = np.array([(math.cos(a), math.sin(a)) for a in _ANGLES])
    offsets = (np.multiply.outer(_RADII_PT, ways) + size / 2 * np.clip(2 * ways, -1, 1)).reshape(-1, 2)
    boxes = np.hstack([point + offsets - size / 2, point + offsets + size / 2])
    shared = np.minimum(boxes[:, None, 2:], obstacles[:, 2:]) - np.maximum(boxes[:, None, :2], obstacles[:, :2])
    outside = np.maximum(0, (boxes - frame) * (-1, -1, 1, 1)).sum(1)
    chosen = np.argmin(np.maximum(0, shared).prod(2).sum(1) + 50 * outside)
    return offsets[chosen], boxes[chosen]


def _place(point: Point) -> tuple[float, float]:
    return _rounded(point.peak), _rounded(point.bubble)


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")


def _page(points: Sequence[Point], title: str, limit: float | None, svg: bytes) -> str:
    """Return an HTML page with the picture and the points as a table."""
    best = {_place(p) for p in front_of(points)}
    ordered = sorted(points, key=lambda p: (not p.feasible, p.bubble, p.peak))
    rows = "\n".join(
        f"<tr{' class=out' if not p.feasible else ''}><td>{html.escape(p.name)}</td><td>{number(p.peak)}</td>"
        f"<td>{p.bubble:.1%}</td><td>{'above the limit' if not p.feasible else 'front' if _place(p) in best else ''}</td></tr>"
        for p in ordered
    )
    picture = svg.decode("utf-8")
    picture = picture[picture.index("<svg") :]
    heading = html.escape(title) + (f", limit {number(limit)}" if limit is not None else "")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>\n<style>'
        "body{font:14px 'DejaVu Sans',sans-serif;margin:1.5em;max-width:70em}svg{width:100%;height:auto}"
        "td,th{padding:.15em .9em .15em 0;text-align:left}td:nth-child(2),td:nth-child(3){text-align:right}"
        ".out{color:#7a828e}</style></head>\n"
        f"<body>\n{picture}\n<table><tr><th>schedule</th><th>peak activations</th><th>bubble</th><th></th></tr>\n"
        f"{rows}</table></body></html>\n"
    )
