"""Offload as a pass: any schedule, costs and host link; free by default, within a limit when asked, honest in its report."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, HostLink, Schedule, check_schedule, generate, simulate
from jaxpipe.schedule.costs import k_of
from jaxpipe.schedule.passes import Offloaded, offload, prompt_weights
from jaxpipe.schedule.passes.offload import without_offloads
from scripts.gpu_experiments.layer_k import k_of_layer
from tests.support.schedule_strategies import random_costs, random_valid_schedules

NAMES = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "gis", "gis-h", "po")


def profile(
    schedule: Schedule, k: float, mode: str = "shared", groups: tuple[tuple[int, ...], ...] = ()
) -> CostProfile:
    """F = B = W = 2 for a rank's share, and a round trip of k times their sum."""
    v = schedule.num_chunks
    costs = CostProfile.uniform(schedule.num_stages, chunks=v, f=2, b=2, w=2, offload_time=6 * k)
    return replace(costs, host=HostLink(mode=mode, groups=groups))  # type: ignore[arg-type]


def require_honest(result: Offloaded, schedule: Schedule, costs: CostProfile) -> None:
    """Check that the schedule is valid, the compute order the same but for W's, and the report's numbers the simulator's."""
    check_schedule(result.schedule)
    after, before = simulate(result.schedule, costs), simulate(compute_only(schedule), costs)
    rows, had = compute_only(result.schedule).rows, compute_only(schedule)
    assert rows in (had.rows, prompt_weights(had).rows)
    assert (result.makespan_after, result.span_after) == (after.makespan, after.max_span)
    assert result.peak_after == after.peak_activations
    assert (result.makespan_before, result.peak_before) == (before.makespan, before.peak_activations)
    num_offloads = sum(s.offloaded for s in result.stages)
    assert num_offloads == sum(a.op == "O" for r in range(schedule.num_ranks) for a in result.schedule.actions(r))
    assert all(bool(s.reason) == bool(s.skipped) for s in result.stages)
    assert str(result).startswith(schedule.name)


def require_free(result: Offloaded) -> None:
    assert result.makespan_after <= result.makespan_before * (1 + 1e-9)
    assert result.span_after <= result.span_before * (1 + 1e-9)
    assert max(result.peak_after) <= max(result.peak_before) * (1 + 1e-9)


def compute_only(schedule: Schedule) -> Schedule:
    bare = without_offloads(schedule)
    assert not {a.op for r in range(bare.num_ranks) for a in bare.actions(r)} & {"O", "L", "S"}
    return bare


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["shared", "duplex"])
def test_families_get_lower_for_free(name: str, mode: str) -> None:
    schedule = prompt_weights(generate(name, 4, 8))
    peaks = []
    for k in (0, 0.25, 0.5, 1, 2, 50):
        costs = profile(schedule, k, mode)
        result = offload(schedule, costs)
        require_honest(result, schedule, costs)
        require_free(result)
        assert result.k == pytest.approx(k)
        peaks.append(max(result.peak_after))
    assert peaks[1] < max(result.peak_before)
    assert peaks[-1] == max(result.peak_before)  # a round trip of 50 fits nowhere, and nothing breaks
    assert result.share == 0
    assert any("too soon" in s.reason for s in result.stages)


@pytest.mark.parametrize("mode", ["shared", "duplex"])
def test_pcie_groups_share_a_lane(mode: str) -> None:
    """Two ranks on one lane get as much as one rank whose link is half as fast, or nearly; time is never lost."""
    schedule = generate("1f1b", 4, 12)
    single = offload(schedule, profile(schedule, 0.5, mode))
    shared = profile(schedule, 0.5, mode, ((0, 1), (2, 3)))
    paired = offload(schedule, shared)
    require_honest(paired, schedule, shared)
    require_free(paired)
    assert max(single.peak_after) <= max(paired.peak_after) < max(paired.peak_before)
    at_once = [e for e in simulate(paired.schedule, shared).events if e.rank < 2 and e.lane in ("d2h", "h2d")]
    for lane in ("d2h", "h2d"):
        busy = sorted((e.start_s, e.end_s) for e in at_once if mode == "shared" or e.lane == lane)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(busy))


def test_longest_lifespan_goes_first() -> None:
    schedule = generate("interleaved-1f1b", 4, 16)
    half = offload(schedule, profile(schedule, 0.25), fraction=0.5)
    assert half.share <= 0.5
    gone = {s.stage: s.offloaded for s in half.stages if s.rank == 0}
    assert gone[0] > 0
    assert gone[4] == 0
    partial = offload(schedule, profile(schedule, 0.25), stages=[4])
    assert {s.stage for s in partial.stages if s.offloaded} == {4}
    assert "not asked for" in next(s.reason for s in partial.stages if s.stage == 0)
    peaks = [max(offload(schedule, profile(schedule, 0.25), fraction=x / 8).peak_after) for x in range(9)]
    assert peaks[0] == max(half.peak_before)
    assert peaks[-1] < peaks[4] < peaks[0]


def test_a_limit_is_met_for_free_then_with_delay_then_not_at_all() -> None:
    schedule = generate("gpipe", 4, 12)
    costs = profile(schedule, 1)
    free = offload(schedule, costs)
    lowest = max(free.peak_after)
    met = offload(schedule, costs, memory_limit=lowest)
    assert met.limit_met
    assert met.share <= free.share
    require_free(met)
    slower = offload(schedule, profile(schedule, 3), memory_limit=11)
    require_honest(slower, schedule, profile(schedule, 3))
    hopeless = offload(schedule, costs, memory_limit=0.5)
    assert hopeless.limit_met is False
    require_free(hopeless)
    no_need = offload(schedule, costs, memory_limit=12)
    assert no_need.share == 0
    assert no_need.limit_met


def test_b_waits_where_the_limit_needs_it() -> None:
    """A limit between what is free and what is possible is met late, and the report says how late."""
    schedule = generate("gpipe", 2, 8)
    costs = replace(profile(schedule, 0), load_s=(5.0, 5.0))
    lowest = max(offload(schedule, costs).peak_after)
    late = offload(schedule, costs, memory_limit=lowest - 2)
    require_honest(late, schedule, costs)
    assert late.limit_met
    assert late.makespan_before < late.makespan_after < 2 * late.makespan_before


def test_gis_gets_low_too() -> None:
    """Gaps of GIS are filled with W's, and what W needs can't leave: offload lowers it once W's run behind their B's."""
    schedule = generate("gis", 8, 16)
    costs = profile(schedule, 0.5)
    result = offload(prompt_weights(schedule), costs)
    require_free(result)
    assert max(result.peak_after) <= 8 / 3
    within = offload(schedule, costs, memory_limit=8 / 3)
    require_honest(within, schedule, costs)
    assert within.limit_met


def test_prompt_weights_keeps_everything() -> None:
    schedule = generate("zb-2p", 4, 8)
    prompt = prompt_weights(schedule)
    check_schedule(prompt)
    for row, was in zip(prompt.rows, schedule.rows, strict=True):
        assert sorted(map(str, row)) == sorted(map(str, was))
        assert all(str(row[k + 1]) == f"W{str(s)[1:]}" for k, s in enumerate(row) if str(s)[0] == "B")
    assert prompt_weights(prompt) == prompt


def test_offloading_twice_is_offloading_once() -> None:
    schedule = generate("1f1b", 4, 8)
    once = offload(schedule, profile(schedule, 0.5))
    assert offload(once.schedule, profile(schedule, 0.5)).schedule == once.schedule


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_schedules(data: st.DataObject) -> None:
    random_cases(data)


@pytest.mark.soak
@settings(max_examples=2000, deadline=None)
@given(st.data())
def test_random_schedules_soak(data: st.DataObject) -> None:
    random_cases(data)


def random_cases(data: st.DataObject) -> None:
    schedule = data.draw(random_valid_schedules(braids=True, offload=True))
    costs = data.draw(random_costs(schedule.num_stages, schedule.num_ranks))
    limit = data.draw(st.sampled_from([None, 0.3, 1.0, 2.0, 3.0]))
    fraction = data.draw(st.sampled_from([None, 0.0, 0.5, 0.8]))
    result = offload(schedule, costs, fraction=fraction, memory_limit=limit)
    require_honest(result, schedule, costs)
    if limit is None or not result.limit_met:
        require_free(result)
    if limit is not None:
        assert result.limit_met == (max(result.peak_after) <= limit * (1 + 1e-9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fraction": 1.5}, "fraction is 1.5; want a number between 0 and 1"),
        ({"memory_limit": 0}, "memory limit is 0; want activations per rank, above 0"),
        ({"stages": [9]}, "there is no stage 9; stages are 0..3"),
    ],
)
def test_bad_requests(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        offload(generate("1f1b", 4, 4), CostProfile.uniform(4), **arguments)  # type: ignore[arg-type]


def test_an_invalid_schedule_is_refused() -> None:
    schedule = generate("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="missing"):
        offload(replace(schedule, rows=(schedule.rows[0][:-1], schedule.rows[1])), CostProfile.uniform(2))


# --- equation 1 -----------------------------------------------------------------------------------------------------------

A100 = {"flops_per_s": 0.6 * 312e12, "d2h_bytes_per_s": 16e9}


def test_k_on_the_papers_hardware() -> None:
    """`pipeoffload.txt` section 1: k <= 1 from hidden size 8k, or sequences of 16k, on; larger below."""
    assert k_of_layer(8192, 2048, **A100) < 1
    assert k_of_layer(4096, 16384, **A100) < 1
    assert k_of_layer(4096, 2048, **A100) > 1
    assert k_of_layer(4096, 2048, **A100) > k_of_layer(5120, 2048, **A100) > k_of_layer(5120, 4096, **A100)
    assert k_of_layer(4096, 2048, **A100) == pytest.approx(10 * 0.6 * 312e12 / (3 * 16e9 * (6 * 4096 + 2048)))
    one_way = k_of_layer(4096, 2048, flops_per_s=1e14, d2h_bytes_per_s=1e10, h2d_bytes_per_s=1e30)
    assert one_way == pytest.approx(k_of_layer(4096, 2048, flops_per_s=1e14, d2h_bytes_per_s=1e10) / 2)
    with pytest.raises(ScheduleError, match="hidden is 0; want a number above 0"):
        k_of_layer(0, 2048, **A100)


def test_k_of_a_profile() -> None:
    assert k_of(CostProfile.uniform(8, chunks=2, f=1, b=2, w=3, offload_time=3)) == pytest.approx(0.5)
    assert k_of(CostProfile.uniform(2, f=0, b=0, w=0)) == 0
    assert k_of(CostProfile.uniform(2, f=0, b=0, w=0, offload_time=1)) == float("inf")
