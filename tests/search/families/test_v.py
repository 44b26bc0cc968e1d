"""V-Min, V-Half, 1F1B-V and the adaptive V scheduler: closed forms, memory claims, and the authors' own code.

``golden/authors_v.json``: numbers of the authors' generators' orders, timed by jaxpipe's simulator.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, check_schedule, generate, simulate
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.families.within_limit import one_f_one_b_v_block, v_half_block, v_min_block
from jaxpipe.search.retime import Draft, Retimer
from tests.support.paths import GOLDEN

WANTED = json.loads((GOLDEN / "authors_v.json").read_text(encoding="utf-8"))
BLOCKS = {"v-min": v_min_block, "v-half": v_half_block, "1f1b-v": one_f_one_b_v_block}
BEHIND = 1e-7  # percent of makespan or span


def chunk_costs(p: int, f: float, b: float, w: float, comm: float = 0.0) -> CostProfile:
    """Return costs per chunk, as in Table 5."""
    return CostProfile.uniform(2 * p, chunks=2, f=2 * f, b=2 * b, w=2 * w, comm=comm)


def drafts(name: str, p: int, m: int, costs: CostProfile, limit: float | None = None) -> Draft:
    problem = Problem.of(v_shape(p), m, costs)
    draft = Retimer(problem).draft(problem.codes(generate(name, p, m, costs=costs, memory_limit=limit)))
    assert draft is not None
    return draft


def cells(keep: int, largest: int) -> Iterator[list[object]]:
    """Yield every ``keep``-th cell of the golden file with at most ``largest`` ranks."""
    yield from [cell for cell in WANTED["cells"] if cell[1] <= largest][::keep]


def behind(cell: list[object]) -> float:
    """Return by how many percent makespan or span is longer than the authors'; infinity if memory is larger."""
    name, p, m, costs, comm, limit, makespan, span, peak = cell
    draft = drafts(name, p, m, chunk_costs(p, *WANTED["costs"][costs], comm), limit)  # type: ignore[arg-type, misc]
    if draft.peak > (peak if limit is None else limit) + 1e-9:  # type: ignore[operator]
        return float("inf")
    return 100 * (max(draft.makespan / makespan, draft.span / span) - 1)  # type: ignore[operator]


def test_no_worse_than_the_authors_code() -> None:
    for cell in cells(keep=194, largest=8):
        assert behind(cell) <= BEHIND, cell


@pytest.mark.soak
def test_no_worse_than_the_authors_code_in_any_cell() -> None:
    for cell in cells(keep=1, largest=32):
        assert behind(cell) <= BEHIND, cell


@pytest.mark.parametrize("p", [4, 5, 6, *(pytest.param(p, marks=pytest.mark.soak) for p in (7, 8, 10, 16))])
def test_closed_forms_at_unit_cost(p: int) -> None:
    """FACTS.md, in chunk units: V-Half idles 3p − 7 for even p, V-Min at most 4p − 5 unless 3 divides p."""
    m = 2 * p
    costs = chunk_costs(p, 1, 1, 1)
    if p % 2 == 0:
        half = drafts("v-half", p, m, costs)
        assert half.makespan - 6 * m <= 3 * p - 7
        assert half.peak == (p + 2) / 2
    if p % 3:
        assert drafts("v-min", p, m, costs).makespan - 6 * m <= 4 * p - 5


def test_adaptive_at_unit_cost() -> None:
    """FACTS.md: p = 8, m = 16, a rank's share F = B = W = 2: limits 4, 5, 6, 8 give 119, 113, 107, 103."""
    for limit, makespan in ((4, 119), (5, 113), (6, 107), (8, 103)):
        draft = drafts("v-adaptive", 8, 16, chunk_costs(8, 1, 1, 1), limit)
        assert draft.makespan <= makespan
        assert draft.peak <= limit


@pytest.mark.parametrize("name", BLOCKS)
def test_memory_claims_and_uneven_costs(name: str) -> None:
    """Any p, m and costs, zeros among them: valid, and never above the block's own memory."""
    rng = random.Random(1)
    for p, m in [(1, 1), (1, 5), (2, 3), (3, 1), (5, 11), (7, 4)]:
        costs = CostProfile.uniform(2 * p, chunks=2, comm=rng.choice([0, 0.3]))
        f, b, w = (tuple(rng.choice([0, rng.uniform(0.2, 2)]) for _ in range(2 * p)) for _ in range(3))
        costs = replace(costs, f_s=f, b_s=b, w_s=w, bw_s=tuple(x + y for x, y in zip(b, w, strict=True)))
        schedule = generate(name, p, m, costs=costs)
        check_schedule(schedule)
        assert max(simulate(schedule, costs).peak_activations) <= max(BLOCKS[name](p).steady_peaks()) / 2 + 1e-9


def test_adaptive_within_any_limit() -> None:
    for p, m, limit in [(1, 1, 1), (1, 4, 1.5), (2, 5, 1), (3, 7, 1.5), (5, 6, 2), (5, 12, 3.3), (4, 9, 1e9)]:
        costs = chunk_costs(p, 1.3, 0.9, 0.6, comm=0.2)
        schedule = generate("v-adaptive", p, m, costs=costs, memory_limit=limit)
        check_schedule(schedule)
        assert max(simulate(schedule, costs).peak_activations) <= limit + 1e-9


def test_a_limit_too_low_names_one_that_works() -> None:
    for limit in (0.9, 0, -1, float("nan")):
        with pytest.raises(ScheduleError, match="use 1 or more"):
            generate("v-adaptive", 4, 8, memory_limit=limit)
    # a rank whose w-residuals are larger than its residuals needs more
    costs = replace(chunk_costs(4, 1, 1, 1), w_residual_bytes=(1.0,) * 8)
    with pytest.raises(ScheduleError, match="use 2 or more"):
        generate("v-adaptive", 4, 8, costs=costs, memory_limit=1)
    with pytest.raises(ScheduleError, match="ranks is 0"):
        generate("v-min", 0, 8)


def test_adaptive_uses_memory_above_p() -> None:
    """Once what beat the authors' best block was dropped for holding more than that block, though within the limit."""
    costs = chunk_costs(8, 12.96, 13.22, 9.76, 1.3)
    spans = [drafts("v-adaptive", 8, 16, costs, limit).span for limit in (8, 16)]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < 0.97 * spans[0]
