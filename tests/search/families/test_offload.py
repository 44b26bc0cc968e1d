"""PO-H, PO-F and AdaOffload: against the authors' numbers, the paper's claims about memory, and any sizes and costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, HostLink, Schedule, Timeline, check_schedule, generate, simulate
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.families.pipeoffload import po_rows
from jaxpipe.search.retime import Retimer
from tests.support.paths import GOLDEN
from tests.support.schedule_strategies import random_costs

WANTED = json.loads((GOLDEN / "authors_offload.json").read_text(encoding="utf-8"))
CELLS = [dict(zip(WANTED["fields"], row, strict=True)) for row in WANTED["rows"]]


def profile(p: int, v: int, k: float, f: float = 2, b: float = 2, w: float = 2, comm: float = 0) -> CostProfile:
    """A rank's share costs f, b, w; one shared host lane, a round trip of k (f + b + w)."""
    costs = CostProfile.uniform(p * v, chunks=v, f=f, b=b, w=w, comm=comm, offload_time=k * (f + b + w))
    return replace(costs, host=HostLink(mode="shared"))


def run(name: str, p: int, m: int, v: int, costs: CostProfile, limit: float | None = None) -> Timeline:
    return simulate(generate(name, p, m, chunks=v, costs=costs, memory_limit=limit), costs)


def peak(timeline: Timeline) -> float:
    return max(timeline.peak_activations)


# --- the authors' code ----------------------------------------------------------------------------------------------------


def beats(cell: dict[str, object]) -> None:
    f, b, w = (2 * x for x in WANTED["costs"][cell["costs"]])
    p, m, k, comm = cell["p"], cell["m"], cell["k"], cell["comm"]
    costs = profile(p, 2, k, f, b, w, comm)  # type: ignore[arg-type]
    ours = run(cell["family"], p, m, 2, costs)  # type: ignore[arg-type]
    if cell["makespan"] is None:
        return  # their generator stops here
    assert ours.makespan <= cell["makespan"] * (1 + 1e-6), cell  # type: ignore[operator]
    assert ours.max_span <= cell["span"] * (1 + 1e-6), cell  # type: ignore[operator]
    assert peak(ours) <= cell["peak"] * (1 + 1e-9), cell  # type: ignore[operator]


@pytest.mark.parametrize("p", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_no_worse_than_the_authors_code(p: int) -> None:
    cells = [c for c in CELLS if c["p"] == p and c["m"] == 2 * p and c["costs"] in ("unit", "38.5B")]
    assert len(cells) == 32
    for cell in cells:
        beats(cell)


@pytest.mark.soak
@pytest.mark.parametrize("p", [4, 8, 16, 24, 32])
def test_no_worse_than_the_authors_code_anywhere(p: int) -> None:
    for cell in CELLS:
        if cell["p"] == p:
            beats(cell)


def test_reference_of_facts() -> None:
    """p = 8, m = 16, F = B = W = 2, round trip up to half of compute: 119 to 124 at a peak of 3 (PO-H), 1.5 to 3 (PO-F)."""
    for k in (0, 0.25, 0.5):
        half, full = (run(name, 8, 16, 2, profile(8, 2, k)) for name in ("po-h", "po-f"))
        assert max(half.makespan, half.max_span, full.makespan, full.max_span) <= 119
        assert peak(half) <= 2.5
        assert peak(full) <= 1


# --- what the paper claims ------------------------------------------------------------------------------------------------


def resident_peak(p: int, m: int, v: int) -> float:
    """Return the peak of PipeOffload's order without offload."""
    problem = Problem.of(circular(p, v), m)
    draft = Retimer(problem).draft(po_rows(problem))
    assert draft is not None
    return draft.peak


@pytest.mark.parametrize("v", [4, *(pytest.param(v, marks=pytest.mark.soak) for v in (8, 16))])
def test_half_of_the_chunks_hold_most_of_the_memory(v: int) -> None:
    """Figure 3: p = 8. At most 3/8 of its own peak for any k <= 1 (v >= 4), a quarter of interleaved 1F1B's."""
    m = 16
    interleaved = peak(run("interleaved-1f1b", 8, m, v, profile(8, v, 0)))
    for k in (0, 0.5, 1):
        half = run("po-h", 8, m, v, profile(8, v, k))
        assert peak(half) <= resident_peak(8, m, v) * 3 / 8
        assert peak(half) <= interleaved / 4
        assert half.makespan <= run("1f1b", 8, m, 1, profile(8, 1, k)).makespan


def test_two_chunks() -> None:
    """The short-lived one of two chunks alone fills 4 of 13 places on rank 0, and one is needed to work in: 5/13."""
    assert peak(run("po-h", 8, 32, 2, profile(8, 2, 0.5))) == resident_peak(8, 32, 2) * 5 / 13


def test_full_offload_is_constant_in_the_number_of_ranks() -> None:
    for k, most in ((0, 0.5), (0.25, 1), (0.5, 1)):
        for p in (4, 8):
            assert peak(run("po-f", p, 2 * p, 2, profile(p, 2, k))) <= most


@pytest.mark.soak
def test_full_offload_is_constant_up_to_32_ranks() -> None:
    for v in (2, 4):
        for k in (0, 0.25, 0.5):
            peaks = {peak(run("po-f", p, 2 * p, v, profile(p, v, k))) for p in (4, 8, 16, 24, 32)}
            assert len(peaks) == 1


@pytest.mark.parametrize("name", ["po-h", "po-f"])
@pytest.mark.parametrize(
    "sizes",
    [
        [(2, 1, 2), (3, 5, 2), (4, 4, 3), (8, 3, 2)],
        *(pytest.param([x], marks=pytest.mark.soak) for x in ((5, 12, 2), (8, 8, 4))),
    ],
)
def test_throughput_no_worse_than_1f1b(sizes: list[tuple[int, int, int]], name: str) -> None:
    for p, m, v in sizes:
        for k in (0, 0.5, 1):
            plain = simulate(generate("1f1b", p, m), profile(p, 1, k))
            assert run(name, p, m, v, profile(p, v, k)).makespan <= plain.makespan * (1 + 1e-9)


# --- AdaOffload -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0.5, *(pytest.param(k, marks=pytest.mark.soak) for k in (0, 1)), 3])
@pytest.mark.parametrize("v", [1, 2])
def test_more_memory_is_never_slower(v: int, k: float) -> None:
    last = float("inf")
    for limit in (1, 2, 3, 4, 6, 8):
        timeline = run("ada-offload", 4, 8, v, profile(4, v, k), limit)
        assert peak(timeline) <= limit * (1 + 1e-9)
        assert timeline.makespan <= last * (1 + 1e-9)
        last = timeline.makespan


def test_denser_than_pipeoffload() -> None:
    """Waits are filled as memory allows; the limit holds even if a round trip takes forever."""
    full = run("po-f", 8, 16, 2, profile(8, 2, 0.5))
    dense = run("ada-offload", 8, 16, 2, profile(8, 2, 0.5), 4)
    assert dense.makespan < full.makespan
    for k in (0.5, 50):
        assert peak(run("ada-offload", 4, 8, 1, profile(4, 1, k), 2)) <= 2


def test_an_impossible_limit_names_one_that_works() -> None:
    with pytest.raises(ScheduleError, match=r"within a memory limit of 0\.25; use 1 or more"):
        generate("ada-offload", 4, 4, memory_limit=0.25)
    with pytest.raises(ScheduleError, match="memory limit of 0; want"):
        generate("ada-offload", 4, 4, memory_limit=0)


# --- anything -------------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int, CostProfile]:
    p, v, m = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    return draw(st.sampled_from(["po-h", "po-f", "ada-offload"])), p, v, m, draw(random_costs(p * v, p))


@settings(max_examples=20, deadline=None)
@given(cases())
def test_any_sizes_and_costs(case: tuple[str, int, int, int, CostProfile]) -> None:
    require_valid(case)


@pytest.mark.soak
@settings(max_examples=2000, deadline=None)
@given(cases())
def test_any_sizes_and_costs_soak(case: tuple[str, int, int, int, CostProfile]) -> None:
    require_valid(case)


def require_valid(case: tuple[str, int, int, int, CostProfile]) -> None:
    name, p, v, m, costs = case
    limit = float(p) if name == "ada-offload" else None
    schedule = generate(name, p, m, chunks=v, costs=costs, memory_limit=limit)
    check_schedule(schedule)
    assert list(weights(schedule)) == sorted(weights(schedule))
    if limit is not None:
        assert peak(simulate(schedule, costs)) <= limit * (1 + 1e-9)


def weights(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield (stage, microbatch) of every W, stage by stage in the order of its rank."""
    for stage in range(schedule.num_stages):
        for rank in range(schedule.num_ranks):
            yield from (
                (stage, a.microbatch) for a in schedule.actions(rank) if a.stage == stage and a.op in ("W", "BW")
            )


def test_ada_offload_spreads_microbatches_where_the_host_is_slow() -> None:
    """Seconds of a block on an H200, round trips 2.4 times as long as compute: longer intervals are 14% shorter than the plain
    order with backwards that wait for their loads."""
    costs = CostProfile.uniform(8, f=2.86, b=3.63, w=2.95)
    costs = replace(costs, offload_s=(10.84,) * 8, load_s=(10.84,) * 8)
    schedule = generate("ada-offload", 4, 8, costs=costs, chunks=2, memory_limit=2.0)
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_activations) <= 2
    assert timeline.makespan <= 212
