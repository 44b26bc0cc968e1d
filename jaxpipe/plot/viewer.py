"""Make a self-contained HTML page that shows timelines: zoom, pan, hover. No network, no libraries.

The page is ``viewer.html`` with ``viewer.js`` and the data put in. Data are columns (one array a field), so that a hundred
thousand events stay a few megabytes and load at once; the script draws only what is in view, on one canvas.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from jaxpipe.plot.figure import (
    LANE_TITLES,
    Units,
    cells_of,
    colour_of,
    extent,
    ink_on,
    lanes_of,
    op_title,
    origin,
    summary,
)

if TYPE_CHECKING:
    from jaxpipe.plot.figure import Cell
    from jaxpipe.schedule.timeline import Timeline


def viewer_page(timelines: Sequence[Timeline], title: str, units: Units) -> str:
    """Return the HTML text of the page."""
    files = resources.files("jaxpipe.plot")
    page = (files / "viewer.html").read_text(encoding="utf-8")
    script = (files / "viewer.js").read_text(encoding="utf-8")
    data = json.dumps(viewer_data(timelines, title, units), ensure_ascii=False, separators=(",", ":"))
    # names of ops and schedules come from files: </script> in one must not end the script
    texts = {"/*SCRIPT*/": script, "<!--TITLE-->": html.escape(title), "{/*DATA*/}": data.replace("<", "\\u003c")}
    # in one pass: a title may hold one of the marks
    return re.sub("|".join(map(re.escape, texts)), lambda mark: texts[mark[0]], page)


def viewer_data(timelines: Sequence[Timeline], title: str, units: Units) -> dict[str, Any]:
    """Return the page's data: a table of op kinds (op, lane and chunk with colours), and the timelines in columns."""
    # columns name kinds by number: a hundred thousand events repeat neither colours nor titles
    cells = [cells_of(t) for t in timelines]
    everything = [c for group in cells for c in group]
    num_chunks = 1 + max((c.chunk for c in everything), default=0)
    order = {op: k for k, op in enumerate(dict.fromkeys(c.op for c in everything))}
    kinds = sorted(
        {(c.op, c.lane, c.chunk) for c in everything},
        key=lambda kind: (kind[1] in ("tp", "send"), order[kind[0]], *kind),
    )
    numbers = {kind: k for k, kind in enumerate(kinds)}
    colours = [colour_of(op, lane, chunk, num_chunks) for op, lane, chunk in kinds]
    return {
        "title": title,
        "units": units,
        "chunks": num_chunks,
        "lanes": [{"name": lane, "title": LANE_TITLES.get(lane, lane)} for lane in lanes_of(everything)],
        "kinds": [
            {"op": op, "lane": lane, "chunk": chunk, "title": op_title(op), "fill": fill, "ink": ink_on(fill)}
            for (op, lane, chunk), fill in zip(kinds, colours, strict=True)
        ],
        "timelines": [_columns(t, group, numbers, units) for t, group in zip(timelines, cells, strict=True)],
    }


def _columns(
    timeline: Timeline, cells: tuple[Cell, ...], numbers: dict[tuple[str, str, int], int], units: Units
) -> dict[str, Any]:
    begin = origin(timeline)
    return {
        "name": timeline.name,
        "source": timeline.source,
        "summary": summary(timeline, units),
        "ranks": timeline.num_ranks,
        "length": extent(timeline),
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
