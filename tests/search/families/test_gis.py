"""GIS, G(T), GIS-H and PipeOffload's order: closed forms, blocks, the authors' numbers, any size and any costs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, Schedule, check_schedule, generate, simulate
from jaxpipe.schedule.costs import Link
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import F, Problem, W
from jaxpipe.search.blocks.block import interleaved_block, repeat
from jaxpipe.search.families.pipeoffload import (
    group_block,
    po_block,
    po_rows,
    shortest_distance,
    smallest_group,
)
from jaxpipe.search.retime import Draft, Retimer
from tests.support.paths import GOLDEN

NAMES = ("gis", "gis-g", "gis-h", "po")
WANTED = json.loads((GOLDEN / "authors_gis.json").read_text(encoding="utf-8"))
ROWS = [dict(zip(WANTED["columns"], row, strict=True)) for row in WANTED["rows"]]


def profile(p: int, v: int, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0) -> CostProfile:
    """``f b w``: seconds of one chunk."""
    return CostProfile.uniform(p * v, chunks=v, f=f * v, b=b * v, w=w * v, comm=comm)


def draft(schedule: Schedule, costs: CostProfile) -> Draft:
    problem = Problem.of(schedule.placement, schedule.num_microbatches, costs)
    timed = Retimer(problem).draft(problem.codes(schedule))
    assert timed is not None
    return timed


def paper_order(name: str, problem: Problem, group: int) -> Draft:
    """Return the paper's own order: the block repeated and squeezed, gaps left open."""
    rows = po_rows(problem)
    if name != "po":
        rows = repeat(group_block(problem.num_ranks, problem.num_replicas // problem.num_ranks, group), problem)
    timed = Retimer(problem).draft(rows)
    assert timed is not None
    return timed


# --- against the authors --------------------------------------------------------------------------------------------------


def against_the_authors(rows: Iterator[dict[str, float]]) -> None:
    better = total = 0
    for row in rows:
        p, m, v = int(row["p"]), int(row["m"]), int(row["v"])
        costs = profile(p, v, row["f"], row["b"], row["w"], row["comm"])
        schedule = generate(str(row["family"]), p, m, chunks=v, costs=costs, group=row["group"])  # type: ignore[arg-type]
        ours = draft(schedule, costs)
        assert ours.makespan <= row["makespan"] + 1e-5, row
        assert ours.span <= row["span"] + 1e-5, row
        assert ours.peak <= row["peak"] + 1e-5, row
        better += ours.makespan < row["makespan"] - 1e-5
        total += 1
    assert better >= 0.95 * total


def test_no_worse_than_the_authors() -> None:
    against_the_authors(row for row in ROWS if row["p"] * row["m"] <= 40)


@pytest.mark.soak
def test_no_worse_than_the_authors_at_any_size() -> None:
    against_the_authors(iter(ROWS))


# FACTS.md: p = 8, m = 16, F = B = W = 2 (a rank's share), no transfer time: makespan and peak of the authors' code
@pytest.mark.parametrize(
    ("name", "chunks", "makespan", "peak"),
    [
        ("gis", 2, 110, 8),
        ("gis", 4, 103, 8),
        ("gis-h", 2, 114, 6),
        ("gis-h", 4, 109, 5),
        ("po", 2, 119, 6.5),
    ],
)
def test_reference_numbers(name: str, chunks: int, makespan: float, peak: float) -> None:
    costs = CostProfile.uniform(8 * chunks, chunks=chunks, f=2, b=2, w=2)
    theirs = paper_order(name, Problem.of(circular(8, chunks), 16, costs), 8 if name == "gis" else 4)
    assert (theirs.makespan, theirs.span, theirs.peak) == pytest.approx((makespan, makespan, peak))
    ours = draft(generate(name, 8, 16, chunks=chunks, costs=costs), costs)
    assert ours.makespan <= makespan - 3
    assert ours.span <= makespan - 3
    assert ours.peak <= peak


# --- closed forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, pytest.param(8, marks=pytest.mark.soak)])
def test_every_group_size(p: int) -> None:
    """A rank holds, in chunks and with equal costs, (v − 1)g + p; the paper idles (p−1)(F+B) + (v−1)(p−g)F, here (p−1)B
    less."""
    for v in (1, 2, 3, 4):
        for g in range(smallest_group(p), p + 1):
            problem = Problem.of(circular(p, v), 2 * g, profile(p, v))
            work = 3 * v * problem.num_microbatches
            theirs = paper_order("gis-g", problem, g)
            assert theirs.makespan - work == pytest.approx(2 * (p - 1) + (v - 1) * (p - g))
            assert theirs.peak * v == pytest.approx(min((v - 1) * g + p, 2 * g * v))
            ours = draft(generate("gis-g", p, 2 * g, chunks=v, group=g, costs=profile(p, v)), profile(p, v))
            assert ours.makespan - work == pytest.approx(p - 1 + (v - 1) * (p - g))
            assert ours.peak <= theirs.peak


@pytest.mark.parametrize("fbw", [(3, 5, 2), (1, 1, 1), (12.96, 13.22, 9.76), (1, 1, 4), (2, 1, 1)])
def test_gis_idle_time(fbw: tuple[float, float, float]) -> None:
    f, b, w = fbw
    for p, m, v in [(2, 4, 2), (4, 8, 3), (8, 8, 2), (5, 20, 1)]:
        costs = profile(p, v, f, b, w)
        theirs = paper_order("gis", Problem.of(circular(p, v), m, costs), p)
        assert theirs.makespan - m * v * sum(fbw) <= (p - 1) * (f + b) * (1 + 1e-9)
        ours = draft(generate("gis", p, m, chunks=v, costs=costs), costs)
        assert ours.makespan - m * v * sum(fbw) <= 0.9 * (p - 1) * (f + b)
        assert ours.peak <= min(p, m) + 1e-9


def test_po_peak() -> None:
    for p in (1, 2, 3, 4, 7, 8, 12):
        for v in (1, 2, 3, 4, 6, 8):
            half = -(-p // 2)
            problem = Problem.of(circular(p, v), 2 * p + 3, profile(p, v))
            expected = (v - 1) * half + math.gcd(v, half) - 1 + p
            assert paper_order("po", problem, 0).peak * v == pytest.approx(min(expected, v * (2 * p + 3)))


def test_po_is_no_slower_than_1f1b() -> None:
    for p, m in [(2, 4), (4, 4), (5, 11), (8, 8), (8, 32)]:
        for f, b, w in [(1, 1, 1), (12.96, 13.22, 9.76), (1, 2, 0.5)]:
            for v in (2, 4):
                one = CostProfile.uniform(p, f=f * v, b=b * v, w=w * v)
                plain = simulate(generate("1f1b", p, m), one)
                ours = draft(generate("po", p, m, chunks=v, costs=profile(p, v, f, b, w)), profile(p, v, f, b, w))
                assert ours.makespan <= plain.makespan * (1 + 1e-9)


# --- blocks ---------------------------------------------------------------------------------------------------------------


def test_blocks_repeat_without_collision() -> None:
    for p in (1, 2, 3, 4, 7, 8):
        for v in (1, 2, 3, 4, 6, 8):
            for g in range(smallest_group(p), p + 1):
                assert not group_block(p, v, g).collisions()
            assert not po_block(p, v).collisions()


def test_half_the_ranks_is_the_smallest_group() -> None:
    for p in range(3, 12):
        for group, late in ((smallest_group(p), False), (smallest_group(p) - 1, True)):
            (f,), (b,) = (
                (block := interleaved_block(p, range(0, 3 * group, group), group=group)).forward,
                block.backward,
            )
            assert any(a >= b for a, b in [*pairwise(f), *pairwise(b[::-1])]) == late


def test_po_holds_what_its_block_predicts() -> None:
    for p, v in [(2, 2), (4, 3), (8, 2), (8, 4), (5, 5)]:
        predicted = po_block(p, v).steady_peaks()
        problem = Problem.of(circular(p, v), 4 * p, profile(p, v))
        timeline = simulate(problem.schedule("po", po_rows(problem)), profile(p, v))
        for peak, limit in zip(timeline.peak_activations, predicted, strict=True):
            assert limit - 1 <= peak * v <= limit + 1e-9


@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.parametrize("v", [2, 4, 8])
def test_long_lived_half_holds_most_of_the_peak(p: int, v: int) -> None:
    """Without the first half of the chunks, PO holds a third of its peak or less, and a fifth of interleaved 1F1B's."""
    problem = Problem.of(circular(p, v), 3 * p, profile(p, v))
    n, m = problem.num_replicas, problem.num_microbatches
    live = live_late = most = most_late = 0
    for code in po_rows(problem)[0]:
        op, stage, _ = problem.decode(code)
        change = {F: 1, W: -1}.get(op, 0)
        live += change
        live_late += change if stage >= n // 2 else 0
        most, most_late = max(most, live), max(most_late, live_late)
    assert most_late <= most / 3
    assert most_late <= 0.2 * min((v + 1) * p - 1, m * v)


def test_chunks_of_po_are_spread_by_lifespan() -> None:
    block = po_block(8, 4)
    spans = [w - f for f, w in zip(block.forward[0][::8], block.weight[0][::8], strict=True)]
    assert all(a > b for a, b in pairwise(spans))
    assert spans[0] > 4 * spans[-1]


# --- any size, any costs --------------------------------------------------------------------------------------------------


def uneven(rng: random.Random, stages: int) -> CostProfile:
    def seconds() -> tuple[float, ...]:
        return tuple(
            rng.choice((0.0, rng.uniform(0.1, 3))) if rng.random() < 0.2 else rng.uniform(0.5, 2) for _ in range(stages)
        )

    f, b, w = seconds(), seconds(), seconds()
    residuals = tuple(rng.uniform(0.2, 1.0) for _ in range(stages))
    w_residual = tuple(x * rng.choice((0.0, 0.4, 1.0)) for x in residuals)
    link = Link(latency_s=rng.choice((0.0, 0.1, 0.7)))
    return CostProfile(f, b, w, tuple(x + y for x, y in zip(b, w, strict=True)), residuals, w_residual, link=link)


@pytest.mark.parametrize("tries", [5, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", NAMES)
def test_any_size_and_costs(name: str, tries: int) -> None:
    rng = random.Random(name)
    for _ in range(tries):
        p, m, v = rng.randint(1, 9), rng.randint(1, 20), rng.randint(1, 4)
        group = {"gis": p, "gis-h": smallest_group(p)}.get(name, rng.randint(smallest_group(p), p))
        costs = uneven(rng, p * v)
        schedule = generate(name, p, m, chunks=v, costs=costs, group=group if name == "gis-g" else None)
        check_schedule(schedule)
        problem = Problem.of(circular(p, v), m, costs)
        assert draft(schedule, costs).no_worse_than(paper_order(name, problem, group)), (p, m, v, group)
        for rank in range(p):
            for stage in schedule.placement.stages_of(rank):
                for op in "FBW":
                    order = [a.microbatch for a in schedule.actions(rank) if a.stage == stage and a.op == op]
                    assert order == list(range(m))


def test_zero_costs() -> None:
    costs = replace(profile(4, 2), f_s=(0.0,) * 8, b_s=(0.0,) * 8, w_s=(0.0,) * 8, bw_s=(0.0,) * 8)
    for name in NAMES:
        check_schedule(generate(name, 4, 6, costs=costs))


def test_a_short_group_goes_where_it_costs_least() -> None:
    """m = 21 with groups of 4: the authors' order idles 45 chunk units, twice what m = 20 does."""
    costs = profile(8, 4)
    theirs = paper_order("gis-h", Problem.of(circular(8, 4), 21, costs), 4)
    assert theirs.makespan - 21 * 12 == pytest.approx(45)
    ours = draft(generate("gis-h", 8, 21, chunks=4, costs=costs), costs)
    assert ours.makespan - 21 * 12 <= 23 + 1e-9
    full = draft(generate("gis-h", 8, 24, chunks=4, costs=costs), costs)
    assert ours.makespan <= full.makespan


def test_one_chunk_needs_no_groups() -> None:
    assert generate("gis", 4, 8, chunks=1).rows == generate("gis-h", 4, 8, chunks=1).rows


@pytest.mark.parametrize(("ranks", "group"), [(8, 3), (8, 9), (5, 2), (1, 2)])
def test_group_out_of_range(ranks: int, group: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        generate("gis-g", ranks, 8, group=group)
    assert str(caught.value) == (
        f"gis-g: a group of {group} does not suit {ranks} ranks; use a group from {-(-ranks // 2)} to {ranks}"
    )


def test_groups_trade_memory_for_time() -> None:
    costs = profile(8, 2)
    drafts = [draft(generate("gis-g", 8, 32, group=g, costs=costs), costs) for g in range(4, 9)]
    assert [d.peak for d in drafts] == sorted(d.peak for d in drafts)
    assert generate("gis-g", 8, 32, costs=costs).rows == generate("gis", 8, 32, costs=costs).rows


def test_costs_decide_how_far_apart_chunks_are() -> None:
    """Chunks of PO stand further apart where p Bs take longer than ⌈p/2⌉ turns, so rounds don't wait for each other."""
    for p, m in [(4, 16), (9, 27)]:
        costs = profile(p, 3, 1, 2, 0.25)
        problem = Problem.of(circular(p, 3), m, costs)
        assert shortest_distance(problem) == {4: 3, 9: 6}[p]
        close = Retimer(problem).draft(repeat(po_block(p, 3), problem))
        assert close is not None
        assert paper_order("po", problem, 0).makespan < 0.97 * close.makespan
    assert shortest_distance(Problem.of(circular(8, 2), 8, profile(8, 2, 12.96, 13.22, 9.76))) == 4
