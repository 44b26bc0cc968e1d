"""Pictures: what is drawn is what the timeline says, in every form; units, colours and errors."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import ConfigError
from jaxpipe.plot import SUFFIXES, plot_timelines
from jaxpipe.plot.figure import (
    cells_of,
    chunk_numbers,
    colour_of,
    ink_on,
    lanes_of,
    memory_scale,
    number,
    summary,
    time_scale,
    tint,
)
from jaxpipe.plot.write import trace_text, viewer_data, viewer_page
from jaxpipe.schedule import (
    Action,
    Braid,
    CostProfile,
    Event,
    MemoryCurve,
    Timeline,
    generate,
    registered_ops,
    simulate,
)

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def simulated(
    family: str = "1f1b", ranks: int = 4, microbatches: int = 8, chunks: int | None = None, **costs: float
) -> Timeline:
    schedule = generate(family, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return simulate(schedule, CostProfile.uniform(schedule.num_stages, chunks=schedule.num_chunks, **costs))


def measured() -> Timeline:
    """Return a made-up recording that begins at 100 s: an offload, a load, a transfer, a braided slot; bytes for memory."""
    f, g = Action("F", 0, 0), Action("F", 2, 1)
    events = (
        Event(0, "compute", f, 100.0, 100.002),
        Event(0, "send", f, 100.002, 100.003),
        Event(0, "d2h", Action("O", 0, 0), 100.002, 100.004),
        Event(0, "h2d", Action("L", 0, 0), 100.004, 100.006),
        Event(0, "compute", Braid((g, Action("BW", 0, 0))), 100.006, 100.010),
        Event(1, "compute", Action("F", 1, 0), 100.003, 100.005),
    )
    memory = (
        MemoryCurve((100.0, 100.004, 100.010), (3e6, 1e6, 0.0)),
        MemoryCurve((100.003, 100.005), (2e6, 0.0)),
    )
    return Timeline("run <1> & co", 2, events, memory, (1.5, 1.0), static_bytes=(5e6, 5e6), source="measured")


# ---- cells, colours, units -------------------------------------------------------------------------------------------


def test_cells_begin_at_zero_and_cut_braids_into_bands() -> None:
    cells = cells_of(measured())
    assert min(c.start for c in cells) == 0
    assert max(c.end for c in cells) == pytest.approx(0.010)
    braided = [c for c in cells if c.bands == 2]
    assert [(c.op, c.stage, c.microbatch, c.band) for c in braided] == [("F", 2, 1, 0), ("BW", 0, 0, 1)]
    assert [c.chunk for c in braided] == [1, 0]
    assert lanes_of(cells) == ("compute", "d2h", "h2d", "send")


def test_cells_cover_every_event_of_a_simulation() -> None:
    timeline = simulated("zb-h1", comm=0.1)
    assert sorted((c.rank, c.lane, c.op, c.microbatch, c.start, c.end) for c in cells_of(timeline)) == sorted(
        (e.rank, e.lane, a.op, a.microbatch, e.start_s, e.end_s) for e in timeline.events for a in e.action.actions
    )


def test_chunk_numbers_count_the_stages_of_a_rank() -> None:
    assert chunk_numbers(simulated("interleaved-1f1b", ranks=2, microbatches=2, chunks=3)) == {
        (rank, chunk * 2 + rank): chunk for rank in (0, 1) for chunk in (0, 1, 2)
    }


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    "op", [spec.name for spec in registered_ops() if spec.lane == "compute" and len(spec.name) <= 2]
)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_later_chunks_are_paler_and_numbers_stay_readable(op: str, chunks: int) -> None:
    fills = [colour_of(op, "compute", k, chunks) for k in range(chunks)]
    luminances = [_luminance(fill) for fill in fills]
    assert luminances == sorted(set(luminances))
    for fill, luminance in zip(fills, luminances, strict=True):
        ink = _luminance(ink_on(fill))
        assert (max(ink, luminance) + 0.05) / (min(ink, luminance) + 0.05) >= 3.9


def test_one_chunk_has_the_colour_of_the_op() -> None:
    assert tint("#123456", 0, 1) == "#123456"
    assert tint("#123456", 0, 3) == "#123456"


@pytest.mark.parametrize(
    ("seconds", "text"), [(5e-6, "5 µs"), (0.0125, "12.5 ms"), (3.0, "3 s"), (1234.5, "1234 s"), (0.0, "0 µs")]
)
def test_measured_times_have_units(seconds: float, text: str) -> None:
    assert time_scale(seconds, "si").show(seconds) == text


def test_simulated_times_are_plain() -> None:
    assert time_scale(33, "plain").show(33.0) == "33"
    assert memory_scale(4, "plain").show(4.0) == "4"


@pytest.mark.parametrize(("amount", "text"), [(12.0, "12 B"), (1.5e3, "1.5 kB"), (2e6, "2 MB"), (3.25e9, "3.25 GB")])
def test_bytes_have_units(amount: float, text: str) -> None:
    assert memory_scale(amount, "si").show(amount) == text


@given(st.floats(1e-4, 1e8))
def test_numbers_keep_four_digits(x: float) -> None:
    assert float(number(x)) == pytest.approx(x, rel=6e-4)
    assert "e" not in number(x)


def test_summary_names_makespan_bubbles_and_peak() -> None:
    assert (
        summary(simulated(), "plain")
        == "makespan 33 · bubble 27.3% · bubble by longest span 27.3% · peak 4 activations"
    )
    assert summary(measured(), "si").startswith("makespan 10 ms")
    assert summary(measured(), "si").endswith("peak 1.5 activations · 8 MB a rank")


# ---- figures ---------------------------------------------------------------------------------------------------------


def svg_text(path: Path) -> str:
    """Return all text in an SVG file; fails if it is not well-formed XML."""
    return " ".join(t for e in ElementTree.fromstring(path.read_bytes()).iter() if (t := (e.text or "").strip()))


def test_svg_takes_a_title_of_any_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    stray = [*map(chr, range(32)), "\x7f", "\x85", "\ud800", "\ufffe", "\uffff"]
    plot_timelines([simulated()], path, title=f"<&{''.join(stray)}>")
    assert "<&?????????" in svg_text(path)


def test_svg_has_title_legend_rows_and_axes(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    plot_timelines([simulated("interleaved-1f1b", chunks=2)], path, title="a title with $ and <")
    text = svg_text(path)
    for part in (
        "a title with $ and <",
        "makespan 28.5 · bubble 15.8%",
        "F  forward",
        "BW  gradients of input and weights together",
        "chunk 1",
        "rank 3",
        "time (units of cost)",
        "live activations per rank",
    ):
        assert part in text
    assert "rank 4" not in text


def test_measured_svg_speaks_in_milliseconds_and_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    plot_timelines([measured()], path)
    text = svg_text(path)
    for part in (
        "run <1> & co, measured",
        "time (ms)",
        "live memory per rank",
        "3 MB",
        "transfer to another rank",
        "O  offload",
    ):
        assert part in text


def test_memory_rows_say_what_they_leave_out(tmp_path: Path) -> None:
    """The headline counts parameters and optimizer state, the rows below it don't (users.md 3.9)."""
    timeline = measured()
    largest = max(timeline.static_bytes)
    plot_timelines([timeline], tmp_path / "a.svg")
    note = f"time (ms); rows leave out parameters and optimizer state, up to {number(largest / 1e6)} MB a rank"
    assert note in svg_text(tmp_path / "a.svg")
    plot_timelines([replace(timeline, static_bytes=())], tmp_path / "b.svg")
    assert "rows leave out" not in svg_text(tmp_path / "b.svg")


def test_predicted_over_measured_share_one_figure(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    plot_timelines([simulated("1f1b", f=1e-3, b=1e-3, w=1e-3), measured()], path)
    text = svg_text(path)
    assert text.index("1f1b, simulated — makespan 33 ms") < text.index("run <1> & co, measured — makespan 10 ms")
    assert "simulated filled, then as lines" in text


def test_same_timeline_gives_same_bytes(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        one, two = tmp_path / f"1{suffix}", tmp_path / f"2{suffix}"
        plot_timelines([simulated(microbatches=4)], one)
        plot_timelines([simulated(microbatches=4)], two)
        assert one.read_bytes() == two.read_bytes(), suffix


def _numbers_drawn(path: Path) -> int:
    """Return stamped labels in an SVG: every use of a glyph path (axis ticks are uses of marker paths, a handful)."""
    return len(re.findall(r"<use ", path.read_text()))


def test_every_cell_is_numbered_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    timeline = simulated("zb-h1", ranks=4, microbatches=8)
    plot_timelines([timeline], path)
    assert _numbers_drawn(path) >= len(timeline.events)


def test_numbers_drop_out_where_cells_are_too_narrow(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    timeline = simulated("gpipe", ranks=2, microbatches=1500)
    plot_timelines([timeline], path)
    assert _numbers_drawn(path) < 100 < len(timeline.events)


def test_large_schedule_is_drawn_wide_and_in_seconds(tmp_path: Path) -> None:
    timeline = simulated("zb-h1", ranks=16, microbatches=64)
    path = tmp_path / "a.png"
    began_cpu_s = time.process_time()
    plot_timelines([timeline], path)
    assert time.process_time() - began_cpu_s < 60
    head = path.read_bytes()[:24]
    assert head[:8] == PNG_SIGNATURE
    width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    assert 3500 < width < 8000
    assert 1000 < height < 3000


def test_timelines_without_memory_curves_are_drawn(tmp_path: Path) -> None:
    event = Event(0, "compute", Action("F", 0, 0), 0.0, 0.0)
    plot_timelines([Timeline("t", 1, (event,), (), ())], tmp_path / "a.svg")
    assert "per rank" not in svg_text(tmp_path / "a.svg")


# ---- trace -----------------------------------------------------------------------------------------------------------


def trace(timelines: list[Timeline], units: Any = "plain") -> dict[str, Any]:
    document: dict[str, Any] = json.loads(trace_text(timelines, "t", units))
    return document


def test_trace_has_a_slice_per_event_and_a_process_per_rank() -> None:
    timeline = simulated("zb-h1", comm=0.25)
    events = trace([timeline])["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    assert {(e["pid"], e["name"], e["ts"], e["dur"]) for e in slices if not e["name"].startswith("send")} == {
        (e.rank, str(e.action), e.start_s * 1e3, (e.end_s - e.start_s) * 1e3)
        for e in timeline.events
        if e.lane != "send"
    }
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {r: f"rank {r} ({timeline.name}, simulated)" for r in range(4)}
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads >= {"compute", "send to another rank"}


def test_trace_counters_are_the_memory_curve() -> None:
    events = trace([measured()], "si")["traceEvents"]
    counters = [(e["pid"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [
        (0, 0.0, {"bytes": 3e6}),
        (0, pytest.approx(4000.0), {"bytes": 1e6}),
        (0, pytest.approx(10000.0), {"bytes": 0.0}),
        (1, pytest.approx(3000.0), {"bytes": 2e6}),
        (1, pytest.approx(5000.0), {"bytes": 0.0}),
    ]


def test_two_timelines_have_processes_of_their_own() -> None:
    events = trace([simulated(), measured()], "si")["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names) == list(range(6))
    assert names[4] == "rank 0 (run <1> & co, measured)"


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Draw any events on any lanes, overlapping or not."""
    ranks = draw(st.integers(1, 3))
    instants = st.integers(0, 20).map(float)
    events = []
    for _ in range(draw(st.integers(1, 12))):
        start, end = sorted((draw(instants), draw(instants)))
        action = Action(
            draw(st.sampled_from(["F", "B", "W", "BW", "Xyz"])), draw(st.integers(0, 5)), draw(st.integers(0, 9))
        )
        lane = draw(st.sampled_from(["compute", "send", "d2h", "h2d", "odd"]))
        events.append(Event(draw(st.integers(0, ranks - 1)), lane, action, start, end))
    return Timeline("any", ranks, tuple(events), tuple(MemoryCurve((), ()) for _ in range(ranks)), (0.0,) * ranks)


@given(timelines())
def test_slices_of_one_thread_never_overlap(timeline: Timeline) -> None:
    slices = [e for e in trace([timeline])["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    by_thread = defaultdict(list)
    for e in slices:
        by_thread[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


# ---- HTML viewer -----------------------------------------------------------------------------------------------------


def page_data(page: str) -> dict[str, Any]:
    script = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert script is not None
    data: dict[str, Any] = json.loads(script[1])
    return data


def test_page_holds_the_data_and_needs_no_network() -> None:
    page = viewer_page([simulated(), measured()], "two", "si")
    data = page_data(page)
    assert data == json.loads(json.dumps(viewer_data([simulated(), measured()], "two", "si")))
    assert not re.search(r"https?:|src=|@import|<link", page)
    for mark in ("/*SCRIPT*/", "/*DATA*/", "<!--TITLE-->"):
        assert mark not in page


def test_names_cannot_break_the_page() -> None:
    nasty = "</script><script>alert(1)</script>"
    for title in (nasty, f"{{/*DATA*/}}{nasty}", "<!--TITLE-->/*SCRIPT*/", "\\1\\g<0>"):
        page = viewer_page([simulated()], title, "plain")
        assert page.count("<script>alert") == 0
        assert page_data(page)["title"] == title


@given(timelines())
def test_viewer_columns_are_the_events(timeline: Timeline) -> None:
    data = viewer_data([timeline], "t", "plain")
    (columns,) = data["timelines"]
    begin = min(e.start_s for e in timeline.events)
    kinds = [data["kinds"][k] for k in columns["kind"]]
    rows = zip(
        columns["rank"], kinds, columns["stage"], columns["microbatch"], columns["start"], columns["end"], strict=True
    )
    assert sorted((r, k["lane"], k["op"], s, i, a + begin, b + begin) for r, k, s, i, a, b in rows) == sorted(
        (e.rank, e.lane, a.op, a.stage, a.microbatch, e.start_s, e.end_s)
        for e in timeline.events
        for a in e.action.actions
    )
    assert columns["start"] == sorted(columns["start"])
    assert {k["lane"] for k in kinds} <= {lane["name"] for lane in data["lanes"]}


def test_viewer_has_the_memory_curves() -> None:
    (columns,) = viewer_data([measured()], "t", "si")["timelines"]
    assert columns["memory"][0]["y"] == [3e6, 1e6, 0.0]
    assert columns["memory"][0]["t"] == pytest.approx([0, 0.004, 0.010])
    assert columns["static"] == [5e6, 5e6]


# ---- errors and imports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.sched"])
def test_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"suffix is not one of \.svg"):
        plot_timelines([simulated()], tmp_path / name)


@pytest.mark.parametrize("timelines", [[], [Timeline("empty", 1, (), (MemoryCurve((), ()),), (0.0,))]])
def test_nothing_to_draw_is_refused(tmp_path: Path, timelines: list[Timeline]) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_timelines(timelines, tmp_path / "a.svg")


def test_missing_matplotlib_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plot_timelines([simulated()], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_importing_plot_is_light() -> None:
    code = "import sys, jaxpipe.plot; print(sorted({'jax', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
