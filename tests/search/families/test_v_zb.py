"""V-ZB: against the authors' own code, Table 4, closed forms; W laid into an order of F and B."""

from __future__ import annotations

import json
import random

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, check_schedule, generate, simulate, v_shape
from jaxpipe.schedule.costs import Link
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.blocks.block import repeat_steady_phase
from jaxpipe.search.bounds import lower_bound
from jaxpipe.search.families.within_limit import v_zb
from jaxpipe.search.list_schedule.policies import WeightFilling, full_limit, order_of
from jaxpipe.search.retime import Draft, Retimer
from tests.support.paths import GOLDEN

WANTED = json.loads((GOLDEN / "authors_v_zb.json").read_text(encoding="utf-8"))
NEVER = float("inf")


def even(p: int, chunk: tuple[float, float, float], comm: float = 0.0) -> CostProfile:
    f, b, w = chunk
    return CostProfile.uniform(2 * p, chunks=2, f=2 * f, b=2 * b, w=2 * w, comm=comm)


def v_problem(p: int, m: int, chunk: tuple[float, float, float] = (1, 1, 1), comm: float = 0.0) -> Problem:
    return Problem.of(v_shape(p), m, even(p, chunk, comm))


def uneven(rng: random.Random, n: int) -> CostProfile:
    """Return random costs; some operations take no time, some stages hold nothing."""

    def draw_times(low: float, high: float) -> tuple[float, ...]:
        return tuple(0.0 if rng.random() < 0.1 else rng.uniform(low, high) for _ in range(n))

    f, b, w, residuals = draw_times(0.5, 2), draw_times(0.5, 2), draw_times(0.5, 2), draw_times(0.5, 1)
    w_residual = tuple(x * rng.choice((1.0, 0.5, 1.2)) for x in residuals)
    bw = tuple(x + y for x, y in zip(b, w, strict=True))
    return CostProfile(f, b, w, bw, residuals, w_residual, link=Link(latency_s=rng.choice((0.0, 0.1, 1.0))))


def zb_draft(p: int, m: int, costs: CostProfile) -> Draft:
    problem = Problem.of(v_shape(p), m, costs)
    draft = Retimer(problem).draft(problem.codes(v_zb(p, m, costs)))
    assert draft is not None
    return draft


USUAL = {
    *((4, 4, costs, comm) for costs, comm in (("unit", 0), ("unit", 0.1), ("9.6B", 1.296), ("21B", 0.93), ("38.5B", 0.672))),
    *((4, 8, costs, 0) for costs in ("unit", "9.6B", "21B", "38.5B")),
    (4, 16, "38.5B", 0.672), (4, 16, "21B", 0), (8, 8, "unit", 0.1), (8, 8, "21B", 0), (8, 16, "9.6B", 1.296),
}  # fmt: skip
"""(ranks, microbatches, costs, seconds of a transfer): each costs with and without transfers, and each size."""


def authors_cells() -> list[object]:
    return [
        pytest.param(
            *cell, id="-".join(map(str, cell[:4])), marks=[] if tuple(cell[:4]) in USUAL else [pytest.mark.soak]
        )
        for cell in WANTED["cells"]
    ]


@pytest.mark.parametrize(("p", "m", "costs", "comm", "makespan", "span", "peak"), authors_cells())
def test_makespans_no_worse_than_the_authors(
    p: int, m: int, costs: str, comm: float, makespan: float, span: float, peak: float
) -> None:
    """The longest span, which the makespan is weighed against, may be longer: 1.9% with p microbatches, 0.4% with more."""
    draft = zb_draft(p, m, even(p, WANTED["costs"][costs], comm))
    assert draft.makespan <= makespan + 1e-5
    assert draft.span <= span * (1.02 if m <= p else 1.004)
    assert draft.peak <= peak + 1e-9


def test_facts() -> None:
    timeline = simulate(v_zb(8, 16), even(8, (1, 1, 1)))
    assert timeline.makespan == pytest.approx(103)
    assert timeline.span_bubble_rate == pytest.approx(0)
    assert max(timeline.peak_activations) <= 8


# controllable-memory.txt table 4, V-ZB: costs of table 5, transfers as in FACTS.md; bubble rates in % at m = p, 2p, 4p, ...
TABLE_4 = {
    (16, "9.6B", 1.34): (18.7, 8.88, 4.57, 2.32, 1.16),
    (24, "21B", 0.89): (18.9, 8.51, 4.39, 2.19),
    (32, "38.5B", 0.577): (18.7, 8.61, 4.3, 2.24, 1.14),
}


@pytest.mark.parametrize(
    ("p", "m", "costs", "comm", "percent"),
    [
        pytest.param(p, p << k, costs, comm, percent, marks=[] if (p, k) == (16, 0) else [pytest.mark.soak])
        for (p, costs, comm), row in TABLE_4.items()
        for k, percent in enumerate(row)
    ],
)
def test_table_4(p: int, m: int, costs: str, comm: float, percent: float) -> None:
    profile = even(p, WANTED["costs"][costs], comm)
    timeline = simulate(v_zb(p, m, profile), profile)
    assert 100 * timeline.span_bubble_rate <= percent + 0.3
    assert max(timeline.peak_activations) <= p + 1e-9


@pytest.mark.parametrize(
    ("p", "sizes"),
    [
        *((p, (p, p + 1, 2 * p, 3 * p + 5, 6 * p)) for p in (1, 2, 3, 5)),
        (8, (9, 16)),
        *(pytest.param(p, (p, p + 1, 2 * p, 3 * p + 5, 6 * p), marks=pytest.mark.soak) for p in (8, 13)),
    ],
    ids=["1", "2", "3", "5", "8-few", "8", "13"],
)
def test_closed_forms_at_equal_costs(p: int, sizes: tuple[int, ...]) -> None:
    for m in sizes:
        draft = zb_draft(p, m, even(p, (1, 1, 1)))
        assert draft.makespan == pytest.approx(6 * m + p - 1)
        if m >= 2 * p:
            assert draft.span == pytest.approx(6 * m)


@pytest.mark.parametrize("tries", [6, pytest.param(200, marks=pytest.mark.soak)])
def test_uneven_costs(tries: int) -> None:
    rng = random.Random(7)
    for _ in range(tries):
        p, m = rng.randint(1, 6), rng.randint(1, 16)
        costs = uneven(rng, 2 * p)
        schedule = v_zb(p, m, costs)
        check_schedule(schedule)
        assert max(simulate(schedule, costs).peak_activations) <= full_limit(Problem.of(v_shape(p), m, costs)) + 1e-6


def test_stages_that_differ_much() -> None:
    """GPT of 8 blocks whose head is a stage of its own (FLOPs cut it so): milliseconds measured on one core. Rounds alone left
    a bubble of 18%."""
    f, b, w = (35.3, 34.8, 23.2, 35.0), (36.0, 36.0, 24.0, 16.0), (32.2, 31.2, 20.8, 31.0)
    residuals = (42.5, 42.0, 28.0, 17.0)
    costs = CostProfile(f, b, w, tuple(map(sum, zip(b, w, strict=True))), residuals, tuple(0.45 * x for x in residuals))
    timeline = simulate(v_zb(2, 8, costs), costs)
    assert timeline.makespan <= 1.05 * lower_bound(v_shape(2), 8, costs, memory_limit=2)
    assert max(timeline.peak_activations) <= 2


def test_a_larger_limit_below_p_helps() -> None:
    """Appendix E.2's path is 6m + 6p - 3k - 1 long at a peak of k chunks."""
    p, m, costs = 8, 32, even(8, (1, 1, 1))
    for limit, at_most in ((4, 1.12), (6, 1.05)):
        timeline = simulate(generate("v-adaptive", p, m, costs=costs, memory_limit=limit), costs)
        assert max(timeline.peak_activations) <= limit
        bound = 6 * m + 6 * p - 3 * (2 * limit) - 1
        assert bound <= timeline.makespan <= at_most * bound


def test_filling_is_timed_as_the_retimer_does() -> None:
    costs = even(5, (12.96, 13.22, 9.76), 1.34)
    problem = Problem.of(v_shape(5), 14, costs)
    filling = WeightFilling(problem, 5)
    order = order_of(problem, problem.codes(v_zb(5, 14, costs)), filling.retimer)
    for spare in (-NEVER, 0.0, NEVER):
        filled = filling.fill(order, (spare,) * 5, (0.0,) * len(order))
        assert filled is not None
        draft = filling.draft(filled.rows)
        assert draft is not None
        assert (draft.makespan, draft.span) == pytest.approx((filled.makespan, filled.span))
        assert (
            filling.fill(order_of(problem, draft.rows, filling.retimer), (spare,) * 5, (0.0,) * len(order)) is not None
        )


def test_too_little_memory_gives_none() -> None:
    problem = v_problem(4, 8)
    filling = WeightFilling(problem, 2)
    order = order_of(problem, problem.codes(v_zb(4, 8)), filling.retimer)
    assert filling.fill(order, (-NEVER,) * 4, (0.0,) * len(order)) is None


def test_the_steady_phase_repeated() -> None:
    """Idle seconds stay what they were; a row without a steady phase has nothing to repeat."""
    few = v_problem(4, 12, (12.96, 13.22, 9.76), 1.34)
    many = v_problem(4, 40, (12.96, 13.22, 9.76), 1.34)
    draft = zb_draft(4, 12, even(4, (12.96, 13.22, 9.76), 1.34))
    rows = repeat_steady_phase(few, draft.rows, 40)
    assert rows is not None
    longer = Retimer(many).draft(rows)
    assert longer is not None
    work = 28 * 2 * (12.96 + 13.22 + 9.76)
    assert (longer.makespan - draft.makespan, longer.span - draft.span) == pytest.approx((work, work))
    assert longer.peak == draft.peak
    check_schedule(many.schedule("x", rows))
    one = v_problem(2, 1)
    assert repeat_steady_phase(one, zb_draft(2, 1, even(2, (1, 1, 1))).rows, 5) is None


def test_same_input_same_schedule() -> None:
    costs = uneven(random.Random(5), 8)
    assert v_zb(4, 9, costs) == v_zb(4, 9, costs)


def test_bad_requests() -> None:
    with pytest.raises(ScheduleError, match=r"4 stages.*4 ranks.*2.*8"):
        v_zb(4, 8, CostProfile.uniform(4))
    with pytest.raises(ScheduleError, match="microbatches is 0"):
        v_zb(4, 0)
