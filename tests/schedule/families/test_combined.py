"""Combined 1F1B: the numbers of its table, and validity at any size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import Braid, CostProfile, check_schedule, generate, simulate

NAME = "combined-1f1b"


# Collectives of F, and of B, as long as so many F = B = W, eight a stage: makespan and peak activations.
@pytest.mark.parametrize(
    ("p", "m", "comm", "two_chunks", "four_chunks"),
    [
        (8, 32, 0.5, (110.5, 12), (105.25, 10)),
        (8, 32, 1.0, (114.5, 12), (109.25, 10)),
        (8, 32, 2.0, (161.4375, 12), (154.21875, 10)),
        (16, 64, 1.0, (230.5, 24), (219.25, 20)),
    ],
)
def test_hides_collectives(
    p: int, m: int, comm: float, two_chunks: tuple[float, float], four_chunks: tuple[float, float]
) -> None:
    usual = simulate(generate("1f1b", p, m), CostProfile.uniform(p, tp_comm=comm, tp_collectives=8))
    for v, (makespan, peak) in ((2, two_chunks), (4, four_chunks)):
        costs = CostProfile.uniform(p * v, chunks=v, tp_comm=comm, tp_collectives=8)
        timeline = simulate(generate(NAME, p, m, chunks=v), costs)
        assert timeline.makespan == pytest.approx(makespan)
        assert max(timeline.peak_activations) == pytest.approx(peak)
        assert usual.makespan / timeline.makespan > 1.2


@given(p=st.integers(1, 8), v=st.integers(1, 4), m=st.integers(1, 40))
@settings(max_examples=40)
def test_any_size_is_valid(p: int, v: int, m: int) -> None:
    """Every steady forward has a backward beside it; a remainder of m takes no longer than the next multiple of p."""
    schedule = generate(NAME, p, m, chunks=v)
    check_schedule(schedule)
    costs = CostProfile.uniform(p * v, chunks=v, tp_comm=0.7, tp_collectives=3)
    full = simulate(generate(NAME, p, -(-m // p) * p, chunks=v), costs)
    assert simulate(schedule, costs).makespan <= full.makespan * (1 + 1e-9)
    if m % p == 0:
        for rank, row in enumerate(schedule.rows):
            warm = min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1)
            assert [type(slot) is Braid for slot in row] == [k >= warm for k in range(m * v)] + [False] * warm
