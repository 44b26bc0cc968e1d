"""The picture of peak memory against bubble: its front, its labels, its three forms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.plot import pareto
from jaxpipe.plot.pareto import Point, front_of, plot_pareto
from jaxpipe.schedule import FAMILIES

Box = Sequence[float]
POINTS = [Point("a", 8, 0.2), Point("b", 4, 0.3), Point("c", 8, 0.1), Point("d", 16, 0.1), Point("e", 2, 0.05, False)]


def random_points(seed: int) -> list[Point]:
    """Return points of all families, crowded on few places as real ones are."""
    rng = random.Random(seed)
    return [
        Point(
            name, rng.choice([1, 4, 4.5, 5, 6, 8, 8, 8, 11.5, 16]), rng.choice([0.03, 0.1, 0.11, 0.12, 0.3]), peak < 20
        )
        for name in FAMILIES
        for peak in (rng.choice([3, 30]),)
    ]


def test_front() -> None:
    assert [p.name for p in front_of(POINTS)] == ["b", "c"]
    assert front_of([Point("x", 1, 0.5, False)]) == []


@pytest.mark.parametrize("seed", range(3))
def test_labels_cover_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label_calls: list[tuple[list[Box], Box]] = []
    label = pareto._label
    monkeypatch.setattr(pareto, "_label", lambda *args: label_calls.append(label(*args)))
    points = random_points(seed)
    plot_pareto(points, tmp_path / "p.png", title="random", limit=7)
    ((boxes, frame),) = label_calls
    labels = len({(p.peak, p.bubble, p.feasible) for p in points})
    assert all(not overlap(a, b) for a, b in combinations(boxes[-labels:], 2))
    assert all(not overlap(a, b) for a, b in product(boxes[-labels:], boxes[:-labels]))
    assert all(
        frame[0] <= x0 and frame[1] <= y0 and x1 <= frame[2] and y1 <= frame[3] for x0, y0, x1, y1 in boxes[-labels:]
    )


def overlap(a: Box, b: Box) -> bool:
    return min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_forms(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        plot_pareto(POINTS, path, title="five <points>", limit=9)
    assert first.read_bytes() == second.read_bytes()
    if suffix == ".svg":
        texts = {e.text for e in ElementTree.parse(first).iter() if e.tag.endswith("text")}
        assert {"a", "b", "c", "d", "e", "limit 9", "five <points>"} <= texts
    if suffix == ".html":
        text = first.read_text(encoding="utf-8")
        assert "five &lt;points&gt;, limit 9" in text
        assert "<td>e</td><td>2</td><td>5.0%</td><td>above the limit</td>" in text
        assert "http" not in text.replace("http://www.w3.org", "").replace("https://matplotlib.org", "").replace(
            "http://purl.org", ""
        ).replace("http://creativecommons.org", "")


@pytest.mark.parametrize("points", [[Point("one", 3, 0.0)], [Point("x", 0, 0), Point("y", 0, 0)]])
def test_degenerate_points_are_drawn(tmp_path: Path, points: list[Point]) -> None:
    plot_pareto(points, tmp_path / "p.png", title="few")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its suffix is not one of"):
        plot_pareto(POINTS, tmp_path / "p.pdf", title="")
    with pytest.raises(ConfigError, match="no points were given"):
        plot_pareto([], tmp_path / "p.svg", title="")
