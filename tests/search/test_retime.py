"""The fast re-timing of orders equals the simulator, on any schedule it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, Schedule, generate, one_to_one, simulate, with_shared
from jaxpipe.schedule.clock import Clock
from jaxpipe.schedule.passes.braid import with_fused
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.search.list_schedule.policies import WeightFilling, order_of
from jaxpipe.search.retime import Draft, Retimer, best_of, peaks
from tests.support.schedule_strategies import random_costs, random_placements, random_valid_schedules

CHAINS = random_placements(chains_only=True, single_rank_stages=True)


@given(data=st.data(), schedule=random_valid_schedules(placements=CHAINS, offload=False))
def test_equals_the_simulator(data: st.DataObject, schedule: Schedule) -> None:
    placement = schedule.placement
    costs = data.draw(random_costs(placement.num_stages, placement.num_ranks))
    problem = Problem.of(placement, schedule.num_microbatches, costs)
    rows = problem.codes(schedule)
    assert problem.schedule(schedule.name, rows) == schedule
    timeline = simulate(schedule, costs)
    times = Retimer(problem).times(rows)
    assert not times.deadlocked
    assert times.makespan == pytest.approx(timeline.makespan)
    assert times.span == pytest.approx(timeline.max_span)
    assert [sorted(row, key=times.start_s.__getitem__) for row in rows] == rows
    starts = {str(e.action): e.start_s for e in timeline.events if e.lane == "compute"}
    for row, slots in zip(rows, schedule.rows, strict=True):
        for code, slot in zip(row, slots, strict=True):
            assert times.start_s[code] == pytest.approx(starts[str(slot)])


@given(schedule=random_valid_schedules(placements=CHAINS))
def test_memory_equals_the_simulator(schedule: Schedule) -> None:
    costs = CostProfile.uniform(schedule.num_stages, chunks=schedule.num_chunks, w_residual=0.25)
    problem = Problem.of(schedule.placement, schedule.num_microbatches, costs)
    expected = simulate(schedule, costs).peak_activations
    assert peaks(problem, problem.codes(schedule)) == pytest.approx(expected)


def test_offloads_are_left_out_and_braids_refused() -> None:
    costs = CostProfile.uniform(2)
    schedule = generate("zb-h1", 2, 3)
    problem = Problem.of(schedule.placement, 3, costs)
    draft = Retimer(problem).draft(problem.codes(schedule))
    assert draft is not None
    assert draft.makespan == simulate(schedule, costs).makespan
    from jaxpipe.schedule import parse_schedule

    braided = parse_schedule(str(generate("1f1b", 2, 3)).replace("BW0.0 F0.2", "BW0.0+F0.2"))
    with pytest.raises(ScheduleError, match="only plain F, B, W"):
        Problem.of(braided.placement, 3).codes(braided)


@given(random_valid_schedules(placements=CHAINS), st.data())
def test_the_clock_of_list_schedulers_keeps_the_same_time(schedule: Schedule, data: st.DataObject) -> None:
    """Asked for the head of each row, transfers that take bytes, latency or both included."""
    costs = data.draw(random_costs(schedule.num_stages, schedule.num_ranks))
    problem = Problem.of(schedule.placement, schedule.num_microbatches, costs)
    rows, clock = problem.codes(schedule), Clock(problem.tables)
    m, n = problem.num_microbatches, problem.num_replicas

    def head(rank: int, now: float) -> int:
        rest = rows[rank][len(clock.rows[rank]) :]
        code = rest[0] if rest else -1
        ready = code - 2 * n * m if code >= 3 * n * m else code  # a BW is ready under the code of its B
        return code if rest and clock.ready[ready] <= now + clock.tiny else -1

    clock.run(head, ask_all=True)
    assert max(clock.free) == pytest.approx(max(Retimer(problem).times(rows).last_s))


@given(random_valid_schedules(placements=CHAINS), st.data())
def test_fillings_keep_the_same_time(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(random_costs(schedule.num_stages, schedule.num_ranks))
    problem = Problem.of(schedule.placement, schedule.num_microbatches, costs)
    filling, rows = WeightFilling(problem, 1e9), problem.codes(with_fused(schedule, frozenset()))
    order = order_of(problem, rows, filling.retimer)
    filled = filling.fill(order, (0.0,) * problem.num_ranks, (0.0,) * len(order))
    assert filled is not None
    assert filled.last_s == pytest.approx(filling.retimer.times(filled.rows).last_s)


def test_deadlock_is_seen() -> None:
    problem = Problem.of(one_to_one(1), 1)
    rows = [[problem.code(op, 0, 0) for op in (B, F, W)]]
    assert Retimer(problem).times(rows).deadlocked
    assert Retimer(problem).draft(rows) is None


def test_only_chains_on_single_ranks() -> None:
    with pytest.raises(ScheduleError, match="is not a chain of stages on one rank each"):
        Problem.of(with_shared(one_to_one(2), [1]), 2)
    with pytest.raises(ScheduleError, match=r"3 stages.*2"):
        Problem.of(one_to_one(2), 2, CostProfile.uniform(3))


def test_an_anchor_is_never_traded() -> None:
    anchor = Draft((), 10, 8, 4)
    shorter_but_wider = Draft((), 9, 8.5, 4)
    better = Draft((), 10, 7, 4)
    assert best_of([shorter_but_wider, better, None], anchor) is better
    assert best_of([shorter_but_wider, better, None]) is shorter_but_wider
    assert best_of([Draft((), 9, 7, 5)], anchor) is anchor
