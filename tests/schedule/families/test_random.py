"""Every family and option under random costs: uneven stages, zero costs, slow links, odd numbers of ranks, any m.

A family may refuse sizes that make no sense, with one line that names numbers; otherwise its schedule is valid, keeps the
memory that it claims or was given, and is not faster than the lower bound for the memory that it really used. The offload
pass on top of it never crashes either. ``-m soak`` runs 2,000 cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    FAMILIES,
    CostProfile,
    HostLink,
    Link,
    Schedule,
    Timeline,
    check_schedule,
    generate,
    simulate,
)
from jaxpipe.schedule.passes import offload, unbraid
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.bounds import lower_bound, span_lower_bound
from jaxpipe.search.retime import peaks
from tests.schedule.families.test_families import most_activations

SLACK = 1 + 1e-9


@cache
def offloads(name: str) -> bool:
    """Return whether the family offloads without a limit; its claims are then for a host link that takes no time."""
    return any(a.op == "O" for r in range(4) for a in generate(name, 4, 8).actions(r))


@dataclass(frozen=True)
class Case:
    """Arguments of ``generate``. ``even``: whether all stages hold as much, which closed forms of memory assume."""

    name: str
    p: int
    m: int
    options: dict[str, float]
    costs: CostProfile
    even: bool

    def generate(self) -> Schedule:
        return generate(self.name, self.p, self.m, costs=self.costs, **self.options)  # type: ignore[arg-type]


TIMES = st.one_of(st.just(0.0), st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.01, 10, allow_nan=False))
FRACTIONS = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))


@st.composite
def cost_profiles(draw: st.DrawFn, stages: int, even: bool) -> CostProfile:
    """Draw any times; bytes alike on all stages if ``even``."""

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        alike = draw(st.booleans())
        return (draw(values),) * stages if alike else tuple(draw(values) for _ in range(stages))

    f, b, w = each(TIMES), each(TIMES), each(TIMES)
    residuals = (1.0,) * stages if even else each(st.floats(0.1, 4))
    fraction = draw(FRACTIONS)
    return CostProfile(
        f_s=f,
        b_s=b,
        w_s=w,
        bw_s=tuple(x + y for x, y in zip(b, w, strict=True)),
        residual_bytes=residuals,
        w_residual_bytes=tuple(fraction * x for x in residuals),
        offload_s=each(TIMES),
        load_s=each(TIMES),
        link=Link(latency_s=draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))),
        host=HostLink(mode=draw(st.sampled_from(["duplex", "shared"]))),
        f_comm_s=each(TIMES) if draw(st.booleans()) else (),
        b_comm_s=each(TIMES) if draw(st.booleans()) else (),
        collectives=(draw(st.integers(1, 4)),) * stages,
        source="random",
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any family, its options drawn without regard to whether they make sense."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    p, m = draw(st.integers(1, 7)), draw(st.integers(1, 14))
    options: dict[str, float] = {}
    if "chunks" in family.options:
        options["chunks"] = draw(st.integers(1, 4))
    if "group" in family.options and draw(st.booleans()):
        options["group"] = draw(st.integers(1, 2 * p))
    if "memory_limit" in family.options and draw(st.booleans()):
        options["memory_limit"] = draw(st.one_of(st.integers(1, 2 * p).map(float), st.floats(0.2, 2.5 * p)))
    v = int(options.get("chunks", family.default_chunks))
    try:
        stages = family.placement(p, v).num_stages
    except ScheduleError:
        stages = p * v
    even = draw(st.booleans())
    return Case(name, p, m, options, draw(cost_profiles(stages, even)), even)


def check(case: Case, fraction: float) -> None:
    """Check everything that must hold for one case."""
    try:
        schedule = case.generate()
    except ScheduleError as error:
        note(str(error))
        assert_refusal_helps(case, str(error))
        return
    check_schedule(schedule)
    timeline = simulate(schedule, case.costs)
    peak = max(timeline.peak_activations)
    limit = case.options.get("memory_limit")
    if limit is not None:
        assert peak <= limit * SLACK
    if case.even and (not offloads(case.name) or not any(case.costs.offload_s + case.costs.load_s)):
        assert peak <= claim(case) * SLACK
    assert_not_below_bounds(schedule, timeline, case.costs)
    offloaded = offload(schedule, case.costs, fraction=fraction)
    assert max(offloaded.peak_after) <= max(offloaded.peak_before) * SLACK
    assert_not_below_bounds(offloaded.schedule, simulate(offloaded.schedule, case.costs), case.costs)


FURTHER: dict[str, Callable[[int, int, int], float]] = {
    "gis-h": lambda p, m, v: min(p, m),
    "po": lambda p, m, v: min(((v - 1) * (p + 1) + p) / v, m),
    "po-h": lambda p, m, v: min((v // 2 * (p + 1) + p) / v, m),
}
"""(p, m, v) -> claim of families that set a microbatch's chunks p/2 turns apart, or up to p where the costs are lopsided."""


def claim(case: Case) -> float:
    """Return the bound on peak activations that the family promises: as in ``test_families.py``, but for any costs."""
    v = int(case.options.get("chunks", FAMILIES[case.name].default_chunks))
    if case.name in FURTHER:
        return FURTHER[case.name](case.p, case.m, v)
    return most_activations(case.name, case.p, case.m, case.options)


def assert_not_below_bounds(schedule: Schedule, timeline: Timeline, costs: CostProfile) -> None:
    """Compare makespan and span with the bounds for just the memory that each rank used.

    The simulator sees nothing held by actions that take no time, so the memory is that of the order; with offloads, which
    have no order of their own, it is the simulator's, and only where all actions take time.
    """
    offloads = any(a.op == "O" for r in range(schedule.num_ranks) for a in schedule.actions(r))
    rank_peaks: Sequence[float] | None = timeline.peak_activations
    if not offloads:
        problem = Problem.of(schedule.placement, schedule.num_microbatches, costs)
        rank_peaks = peaks(problem, problem.codes(unbraid(schedule)))  # F stands first in a braid, so it holds as much
    elif not all((*costs.f_s, *costs.b_s, *costs.w_s)):
        rank_peaks = None
    limit = rank_peaks and [x * SLACK for x in rank_peaks]
    sizes = (schedule.placement, schedule.num_microbatches, costs)
    assert timeline.makespan >= lower_bound(*sizes, memory_limit=limit, offload=offloads) * (1 - 1e-9)
    assert timeline.max_span >= span_lower_bound(*sizes, memory_limit=limit, offload=offloads) * (1 - 1e-9)


def assert_refusal_helps(case: Case, message: str) -> None:
    """Check for one line that begins with the family and names a number; for a limit, one that works."""
    assert "\n" not in message
    assert case.name in message
    assert re.search(r"\d", message), message
    limit = case.options.get("memory_limit")
    if limit is not None and (numbers := re.findall(r"\d+(?:\.\d+)?", message)):
        enlarged = replace(case, options={**case.options, "memory_limit": max(map(float, numbers)) * (1 + 1e-3)})
        check_schedule(enlarged.generate())


@settings(max_examples=25)
@given(cases(), FRACTIONS)
def test_random_costs(case: Case, fraction: float) -> None:
    check(case, fraction)


@pytest.mark.soak
@settings(max_examples=2000)
@given(cases(), FRACTIONS)
def test_random_costs_at_length(case: Case, fraction: float) -> None:
    check(case, fraction)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 1), (5, 7)])
def test_all_costs_zero(name: str, p: int, m: int) -> None:
    family = FAMILIES[name]
    try:
        stages = family.placement(p, family.default_chunks).num_stages
        costs = CostProfile.uniform(stages, chunks=family.default_chunks, f=0, b=0, w=0)
        schedule = generate(name, p, m, costs=costs)
    except ScheduleError as error:
        assert re.search(r"\d", str(error))
        return
    check_schedule(schedule)
    assert simulate(schedule, costs).makespan == 0
