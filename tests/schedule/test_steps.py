"""Several steps on end: the period by hand and by closed form."""

from __future__ import annotations

import random

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import Action, CostProfile, Link, Schedule, bidirectional, explicit, generate, simulate
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.schedule.simulate import simulate_steps


def schedule_and_costs(name: str, p: int, m: int) -> tuple[Schedule, CostProfile]:
    family = FAMILIES[name]
    placement = family.placement(p, family.default_chunks)
    costs = CostProfile.uniform(placement.num_stages, chunks=family.default_chunks, w_residual=0.4)
    return generate(name, p, m, costs=costs if "costs" in family.options else None), costs


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h2", "zb-2p", "v-zb", "chimera", "hanayo", "stp"])
def test_period_is_longest_span_or_makespan_and_update(name: str) -> None:
    schedule, costs = schedule_and_costs(name, 4, 8)
    single = simulate(schedule, costs)
    for validated, length in ((True, single.max_span), (False, single.makespan)):
        steps = simulate_steps(schedule, costs, 3, 0.5, validated)
        assert steps.period_s == pytest.approx(length + 0.5, rel=1e-12)
        assert steps.ends_s[0] == single.makespan and len(steps.events) == 3 * len(single.events)
        assert steps.peak_activations == pytest.approx(single.peak_activations)


def test_spans_of_zero_bubble_schedules_are_what_post_validation_gains() -> None:
    schedule, costs = schedule_and_costs("zb-2p", 4, 9)
    assert simulate_steps(schedule, costs, 2, post_validation=True).period_s == 27  # the work: no bubble at all
    assert simulate_steps(schedule, costs, 2).period_s == 30


def test_first_backward_waits_for_the_gradients_of_all_ranks() -> None:
    """A chain implies it. Here two stages have nothing to do with each other but the norm of their gradients."""
    placement = explicit(2, [0, 1], edges=())
    rows = tuple((Action("F", r, 0), Action("BW", r, 0)) for r in range(2))
    costs = CostProfile((1.0, 1.0), *[(1.0, 1.0)] * 2, (1.0, 9.0), *[(1.0, 1.0)] * 2)
    steps = simulate_steps(Schedule("apart", placement, 1, rows), costs, 2, 0.5, post_validation=True)
    starts = {str(e.action): e.start_s for e in steps.events}
    assert (starts["F0.1"], starts["F1.1"], starts["BW0.1"], steps.ends_s) == (2.5, 10.5, 10, (10, 20.5))


def test_with_uneven_costs_the_period_is_never_above_longest_span_and_update() -> None:
    """It may be below: a span counts from the rank's first forward, which may stand earlier than it need."""
    generator, shorter = random.Random(1), 0
    for _ in range(60):
        p, m = generator.randint(2, 5), generator.randint(1, 10)
        f, b, w = (tuple(generator.uniform(0.5, 1.5) for _ in range(p)) for _ in range(3))
        both = tuple(x + y for x, y in zip(b, w, strict=True))
        costs = CostProfile(f, b, w, both, (1.0,) * p, (0.4,) * p)
        schedule = generate(generator.choice(["1f1b", "zb-h1", "zb-h2", "gpipe"]), p, m)
        single = simulate(schedule, costs)
        assert simulate_steps(schedule, costs, 3, 0.3).period_s == pytest.approx(single.makespan + 0.3)
        period = simulate_steps(schedule, costs, 3, 0.3, post_validation=True).period_s
        busiest = max(single.compute_s) + 0.3
        assert busiest * (1 - 1e-9) <= period <= (single.max_span + 0.3) * (1 + 1e-9)
        shorter += period < (single.max_span + 0.3) * (1 - 1e-9)
    assert shorter < 10


def test_odd_microbatches_of_two_flows_and_transfers() -> None:
    rows = tuple(
        tuple(Action(op, r if i % 2 == 0 else 1 - r, i) for i in range(3) for op in ("F", "BW")) for r in range(2)
    )
    schedule, costs = Schedule("both ways", bidirectional(2), 3, rows), CostProfile.uniform(2, comm=0.25)
    single, steps = simulate(schedule, costs), simulate_steps(schedule, costs, 3, 1.0)
    assert steps.period_s == single.makespan + 1
    assert sum(e.lane == "send" for e in steps.events) == 3 * sum(e.lane == "send" for e in single.events)


def test_boundaries_in_flight_are_counted() -> None:
    schedule = generate("zb-h2", 3, 6)
    costs = CostProfile(
        *[(1.0,) * 3] * 3, (2.0,) * 3, (1.0,) * 3, (0.5,) * 3, boundary_bytes=(0.5,) * 3, boundary_buffers=True,
        link=Link(latency_s=0.1),
    )  # fmt: skip
    single = simulate(schedule, costs)
    assert simulate_steps(schedule, costs, 2, 0.5).peak_bytes == single.peak_bytes


def test_refusals() -> None:
    schedule, costs = schedule_and_costs("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="at least 2"):
        simulate_steps(schedule, costs, 1)
    with pytest.raises(ScheduleError, match="finite number >= 0"):
        simulate_steps(schedule, costs, 2, -1.0)
    with pytest.raises(ScheduleError, match="costs are for 3 stages"):
        simulate_steps(schedule, CostProfile.uniform(3), 2)
