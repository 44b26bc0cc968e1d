"""``separate_gradients``: never longer, never above the limit, the order of F and of backwards as it was, idempotent."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, Schedule, Traversal, check_schedule, generate, simulate, traverse
from jaxpipe.schedule.passes import braid, offload, separate_gradients
from tests.schedule_strategies import random_costs, random_placements


def order_of(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    """Per rank, everything but W, a backward by one name."""
    rows = [chain.from_iterable(slot.actions for slot in row) for row in schedule.rows]
    return [[(a.op.removesuffix("W") or a.op, a.stage, a.microbatch) for a in row if a.op != "W"] for row in rows]


def require_honest(given: Schedule, costs: CostProfile, limit: float = float("inf")) -> Schedule:
    """What separation promises of any schedule."""
    before = simulate(given, costs)
    made = separate_gradients(given, costs, memory_limit=limit)
    check_schedule(made)
    after = simulate(made, costs)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert after.max_span <= before.max_span * (1 + 1e-9)
    peak = max(before.peak_activations)
    assert max(after.peak_activations) <= (max(peak, limit) if limit < float("inf") else peak) * (1 + 1e-9)
    assert order_of(made) == order_of(given)
    assert separate_gradients(made, costs, memory_limit=limit).rows == made.rows
    return made


@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (2, 2, 1), (1, 1.2, 0.8)])
@pytest.mark.parametrize("p, m", [(2, 5), (4, 8), (6, 12)])
def test_what_is_left_to_idle_on_equal_stages(p: int, m: int, f: float, b: float, w: float) -> None:
    """Issue: (p − 1)(F + B − W)/v for 1F1B and interleaved-low-memory, (p − 1)(F + B)/v where all forwards go first."""
    for name, idle in (
        ("1f1b", f + b - w),
        ("interleaved-low-memory", f + b - w),
        ("gpipe", f + b),
        ("looped-bfs", f + b),
    ):
        v = 2 if name in ("interleaved-low-memory", "looped-bfs") else 1
        m = -(-m // p) * p if name == "interleaved-low-memory" else m
        costs = CostProfile.uniform(p * v, chunks=v, f=f, b=b, w=w)
        made = require_honest(generate(name, p, m, costs=costs), costs)
        assert simulate(made, costs).makespan <= m * (f + b + w) + (p - 1) * idle / v + 1e-9, (name, p, m)


@pytest.mark.parametrize(
    "name, makespan", [("chimera", 114), ("hanayo", 122), ("1f1b-v", 115), ("interleaved-1f1b", 104), ("1f1b", 110)]
)
def test_the_papers_schedules_get_shorter(name: str, makespan: float) -> None:
    """p = 8, m = 16, F = B = W = 2, at an unchanged peak."""
    stages = generate(name, 8, 16).num_stages
    costs = CostProfile.uniform(stages, chunks=stages // 8, f=2, b=2, w=2)
    schedule = generate(name, 8, 16, costs=costs)
    made = require_honest(schedule, costs)
    assert simulate(made, costs).makespan <= makespan + 1e-9


def test_a_fused_backward_that_splitting_does_not_help_stays() -> None:
    costs = CostProfile.uniform(1)
    schedule = generate("1f1b", 1, 4)
    assert separate_gradients(schedule, costs) == schedule


def test_more_memory_where_it_makes_it_shorter() -> None:
    costs = CostProfile.uniform(4)
    schedule = generate("1f1b", 4, 12)
    more = require_honest(schedule, costs, 8.0)
    assert simulate(more, costs).makespan <= simulate(separate_gradients(schedule, costs), costs).makespan


def test_a_schedule_above_the_limit_is_refused() -> None:
    with pytest.raises(ScheduleError, match="gpipe holds 8 activations on a rank, limit 3"):
        separate_gradients(generate("gpipe", 4, 8), CostProfile.uniform(4), memory_limit=3)


def test_offloads_and_braids() -> None:
    costs = CostProfile.uniform(8, chunks=2, offload_time=1.0, tp_comm=0.25, tp_collectives=2)
    schedule = generate("interleaved-1f1b", 4, 8, costs=costs)
    require_honest(offload(schedule, costs).schedule, costs)
    require_honest(braid(schedule, costs), costs)
    require_honest(generate("stp", 4, 12, costs=costs), costs)


def random_case(data: st.DataObject) -> None:
    placement = data.draw(random_placements(max_ranks=4, max_stages=6))
    m = data.draw(st.integers(1, 6))
    costs = data.draw(random_costs(placement.num_stages, placement.num_ranks))
    first = data.draw(st.sampled_from(["forward", "backward", "interleaved"]))
    schedule = traverse(placement, m, Traversal(first), data.draw(st.sampled_from([None, costs])))
    peak = max(simulate(schedule, costs).peak_activations)
    limit = data.draw(st.sampled_from([float("inf"), peak, 1.5 * peak]))
    require_honest(schedule, costs, limit)


@settings(max_examples=40)
@given(data=st.data())
def test_random_placements(data: st.DataObject) -> None:
    random_case(data)


@pytest.mark.soak
@given(data=st.data())
def test_random_placements_soak(data: st.DataObject) -> None:
    random_case(data)
