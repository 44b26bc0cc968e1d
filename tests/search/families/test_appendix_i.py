"""Appendix I: 2/3 of 1F1B's memory with B and W apart, and interleaved 1F1B with less memory."""

from __future__ import annotations

import pytest

from jaxpipe.schedule import CostProfile, Timeline, circular, generate, simulate
from jaxpipe.schedule.placement import one_to_one
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.blocks import repeat
from jaxpipe.search.bounds import lower_bound
from jaxpipe.search.families.interleaved import low_memory_block
from jaxpipe.search.families.within_limit import two_thirds_block
from jaxpipe.search.retime import Retimer

UNEVEN = [(1, 1, 1, 0), (12.96, 13.22, 9.76, 1.3), (2, 3, 1, 0.2)]


def run(
    name: str, p: int, m: int, chunks: int = 1, f: float = 1, b: float = 1, w: float = 1, comm: float = 0
) -> Timeline:
    costs = CostProfile.uniform(p * chunks, chunks=chunks, f=f, b=b, w=w, comm=comm)
    return simulate(generate(name, p, m, chunks=chunks, costs=costs), costs)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31])
@pytest.mark.parametrize("distance", [2, 4])
def test_two_thirds_block_never_collides_and_holds_two_thirds(p: int, distance: int) -> None:
    block = two_thirds_block(p, distance)
    assert not block.collisions()
    assert max(block.steady_peaks()) == 2 * (p // 3) + 2


@pytest.mark.parametrize("p", [4, 5, pytest.param(8, marks=pytest.mark.soak)])
def test_two_thirds_is_no_longer_than_its_block(p: int) -> None:
    for m in (1, p, 3 * p):
        for f, b, w, comm in UNEVEN:
            costs = CostProfile.uniform(p, f=f, b=b, w=w, comm=comm)
            problem = Problem.of(one_to_one(p), m, costs)
            block = Retimer(problem).draft(repeat(two_thirds_block(p), problem))
            assert block is not None
            timeline = simulate(generate("zb-two-thirds", p, m, costs=costs), costs)
            assert timeline.makespan <= block.makespan * (1 + 1e-9)


def test_two_thirds_beats_1f1b() -> None:
    """Appendix I: a lower bubble rate than 1F1B, with two thirds of its memory as p grows."""
    for p in (5, 8, 16):
        ours, theirs = run("zb-two-thirds", p, 2 * p), run("1f1b", p, 2 * p)
        assert ours.makespan < theirs.makespan
        assert max(ours.peak_activations) <= 2 * p / 3 + 2


@pytest.mark.parametrize(("p", "v"), [(1, 2), (2, 2), (4, 2), (5, 3), (8, 4), (9, 2)])
def test_low_memory_block_never_collides(p: int, v: int) -> None:
    block = low_memory_block(p, v)
    assert not block.collisions()
    assert max(block.steady_peaks()) == p * v


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_least_memory_at_the_bubble_of_interleaved(p: int, v: int) -> None:
    """It is as short as interleaved 1F1B with p − 1 chunks less; no schedule of F and BW with one chunk less still is as
    short."""
    m = 4 * p
    ours, theirs = (run(name, p, m, v, v, v, v) for name in ("interleaved-low-memory", "interleaved-1f1b"))
    assert ours.makespan == pytest.approx(theirs.makespan)
    assert ours.max_span == pytest.approx(theirs.max_span)
    assert max(ours.peak_activations) * v == pytest.approx(p * v)
    assert max(theirs.peak_activations) * v == pytest.approx((v + 1) * p - 1)
    fused = CostProfile.uniform(p * v, chunks=v, f=v, b=2 * v, w=0)
    assert lower_bound(circular(p, v), m, fused, memory_limit=p) == pytest.approx(ours.makespan)
    assert lower_bound(circular(p, v), m, fused, memory_limit=p - 1 / v) == pytest.approx(ours.makespan + 3)


def test_low_memory_with_a_remainder_is_no_slower_than_the_full_multiple() -> None:
    for p, m, v in [(4, 5, 2), (4, 13, 4), (3, 7, 2), (8, 9, 2), (8, 3, 2)]:
        for f, b, w, comm in UNEVEN:
            ours = run("interleaved-low-memory", p, m, v, f, b, w, comm)
            full = run("interleaved-low-memory", p, -(-m // p) * p, v, f, b, w, comm)
            assert ours.makespan <= full.makespan * (1 + 1e-9)
            assert max(ours.peak_activations) <= min(p, m) + 1e-9


def test_interleaved_spreads_a_remainder() -> None:
    """p = 4, v = 4, m = 13: 3.6% shorter than with the missing microbatches all left out of the first group."""
    assert run("interleaved-1f1b", 4, 13, 4, 4, 4, 4).makespan <= 171
    assert max(run("interleaved-1f1b", 4, 13, 4).peak_activations) <= (5 * 4 - 1) / 4
