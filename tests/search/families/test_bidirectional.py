"""Chimera, Hanayo, DualPipe-V and looped pipelines: what their papers claim, and what holds at any size and costs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    FAMILIES,
    Action,
    Braid,
    CostProfile,
    Link,
    Schedule,
    Slot,
    Timeline,
    bidirectional,
    check_schedule,
    generate,
    simulate,
    v_shape,
    wave,
)
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.bounds import lower_bound
from jaxpipe.search.families.interleaved import unit_rows, unit_sizes
from jaxpipe.search.list_schedule.fillers import improve_order
from jaxpipe.search.retime import Retimer

NAMES = ("chimera", "hanayo", "dualpipe-v", "looped-bfs", "looped-dfs")


def run(name: str, p: int, m: int, v: int | None = None, **costs: float) -> Timeline:
    chunks = v or FAMILIES[name].default_chunks
    profile = CostProfile.uniform(p * chunks, chunks=chunks, **costs)
    return simulate(generate(name, p, m, chunks=v, costs=profile), profile)


def uneven(seed: int, stages: int, chunks: int) -> CostProfile:
    """Return stages of unlike lengths, some of them 0, with slow links."""
    rng = random.Random(seed)

    def draw_times() -> tuple[float, ...]:
        return tuple(rng.choice([0.0, 1.0, rng.random(), 3 * rng.random()]) for _ in range(stages))

    f, b, w = draw_times(), draw_times(), draw_times()
    profile = CostProfile.uniform(stages, chunks=chunks, w_residual=rng.choice([0.0, 0.3, 1.0]))
    return replace(
        profile,
        f_s=f,
        b_s=b,
        w_s=w,
        bw_s=tuple(map(sum, zip(b, w, strict=True))),
        link=Link(rng.choice([0.0, 0.1, 1.0])),
    )


# --- any size, any costs --------------------------------------------------------------------------------------------------


def peak_claim(name: str, p: int, m: int, v: int) -> float:
    if name == "looped-bfs":
        return m
    if name == "looped-dfs":
        return min((v + 1) * p - 1, v * m) / v
    return min(p + 0.5 * (name == "dualpipe-v"), m)


@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 17), st.integers(1, 4), st.integers(0, 2**32))
def test_valid_within_memory_and_in_order_at_any_size(name: str, p: int, m: int, v: int, seed: int) -> None:
    family = FAMILIES[name]
    v = v if "chunks" in family.options else family.default_chunks
    profile = uneven(seed, p * v, v)
    schedule = generate(name, p, m, chunks=v, costs=profile)
    check_schedule(schedule)
    timeline = simulate(schedule, profile)
    assert max(timeline.peak_activations) <= peak_claim(name, p, m, v) + 1e-9
    assert timeline.makespan >= lower_bound(schedule.placement, m, profile) * (1 - 1e-9)
    for rank in range(p):
        for stage in schedule.placement.stages_of(rank):
            row = [a for a in schedule.actions(rank) if a.stage == stage]
            for flow in range(schedule.placement.num_flows):
                for ops in (("F",), ("B", "BW")):
                    microbatches = [
                        a.microbatch for a in row if a.op in ops and a.microbatch % schedule.placement.num_flows == flow
                    ]
                    assert microbatches == sorted(microbatches)
            added = [a.microbatch for a in row if a.op in ("W", "BW")]
            assert added == [i for i in range(m) if rank in schedule.placement.ranks(stage, i)]


@pytest.mark.parametrize("name", NAMES)
def test_costs_must_fit(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"the costs are for 3 stages, {name} on 4 ranks"):
        generate(name, 4, 4, costs=CostProfile.uniform(3))


# --- Chimera --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 4, 6, 8, 12])
def test_chimera_of_one_unit(p: int) -> None:
    """Li & Hoefler table 2: p − 2 bubbles, p/2 − 1 of F and p/2 − 1 of BW; p/2 + 1 to p activations; half of 1F1B's bubble."""
    timeline = run("chimera", p, p, f=2, b=1, w=1)
    assert timeline.makespan == pytest.approx(4 * p + 2 * (p - 2))
    half = p // 2
    assert timeline.peak_activations == pytest.approx([min(p - r, half) + min(r + 1, half) for r in range(p)])
    assert min(timeline.peak_activations) == half + 1
    assert run("chimera", p, p, f=1, b=1, w=1).makespan < run("1f1b", p, p, f=1, b=1, w=1).makespan


@pytest.mark.parametrize("p", [2, 4, 8])
def test_chimera_units_follow_without_a_gap(p: int) -> None:
    for k in (1, 2, 3, 5):
        even = run("chimera", p, k * p, f=2, b=1, w=1)
        assert even.makespan == pytest.approx(4 * k * p + 2 * (p - 2))
        longer = run("chimera", p, k * p, f=1, b=1, w=1)  # BW = 2F: direct concatenation leaves BW − F a unit
        assert longer.makespan <= 3 * k * p + (p - 2) * (2 + (k - 1)) + 1e-9
        assert max(longer.peak_activations) <= p


def test_chimera_sends_odd_microbatches_up() -> None:
    schedule = generate("chimera", 3, 5)
    assert schedule.placement == bidirectional(3)
    assert [a.microbatch for a in schedule.actions(0) if a.op == "F" and a.stage == 0] == [0, 2, 4]
    assert [a.microbatch for a in schedule.actions(2) if a.op == "F" and a.stage == 0] == [1, 3]


# --- Hanayo ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_hanayo_waves_divide_the_bubble(p: int) -> None:
    for waves in (1, 2, 3):
        timeline = run("hanayo", p, p, v=2 * waves, f=1, b=1, w=1)
        assert timeline.bubble_rate == pytest.approx((2 * p - 2) / (3 * p * waves + 2 * p - 2))
        assert max(timeline.peak_activations) == pytest.approx(p)
        for k in (2, 4):  # F = BW: units follow without a gap
            timeline = run("hanayo", p, k * p, v=2 * waves, f=2, b=1, w=1)
            assert timeline.makespan == pytest.approx(4 * k * p + 2 * (p - 1) / waves)


def test_hanayo_of_one_chunk_is_1f1b() -> None:
    for p, m in [(1, 3), (2, 2), (4, 4), (4, 8), (5, 10)]:
        assert run("hanayo", p, m, v=1).makespan == pytest.approx(run("1f1b", p, m).makespan)
    assert generate("hanayo", 4, 4, chunks=3).placement == wave(4, 3)


# --- DualPipe-V -----------------------------------------------------------------------------------------------------------


def braided(schedule: Schedule) -> Schedule:
    """Return F and the BW of the other leg that follows it as one slot, except the last rank's first pair (as published)."""
    p = schedule.num_ranks

    def row(rank: int) -> tuple[Slot, ...]:
        slots: list[Slot] = []
        for action in schedule.actions(rank):
            before = slots[-1] if slots else None
            if action.op == "BW" and isinstance(before, Action) and before.op == "F":
                slots[-1] = Braid((before, action))
            else:
                slots.append(action)
        if rank == p - 1:
            at = next(k for k, slot in enumerate(slots) if isinstance(slot, Braid))
            slots[at : at + 1] = slots[at].actions
        return tuple(slots)

    return replace(schedule, rows=tuple(row(rank) for rank in range(p)))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("fbw", [(1, 1, 1), (2, 2, 1), (12, 12, 9)])
def test_dualpipe_v_as_published(p: int, fbw: tuple[float, float, float]) -> None:
    """PP = 2p stages have the published numbers: bubble (PP/2 − 1)(F&B + B − 3W), B the full backward, F&B = F + B; PP + 1
    chunks of activations.

    Exact where F is as long as the gradient of the input."""
    f, b, w = fbw
    for m in (2 * p, 2 * p + 1, 4 * p):
        profile = CostProfile.uniform(2 * p, chunks=2, f=2 * f, b=2 * b, w=2 * w)
        schedule = generate("dualpipe-v", p, m, costs=profile)
        pairs = braided(schedule)
        check_schedule(pairs)
        timeline = simulate(pairs, profile)
        backward = b + w
        assert timeline.makespan - 2 * m * (f + b + w) == pytest.approx((p - 1) * (f + backward + backward - 3 * w))
        assert 2 * max(timeline.peak_activations) == pytest.approx(2 * p + 1)
        assert simulate(schedule, profile).makespan == pytest.approx(2 * m * (f + b + w) + (p - 1) * (f + b - w))


def test_dualpipe_v_splits_only_where_w_fills_gaps() -> None:
    for p, m in [(2, 4), (4, 8), (4, 20), (8, 16)]:
        schedule = generate("dualpipe-v", p, m)
        assert schedule.placement == v_shape(p)
        for rank in range(p):
            split = sum(a.op == "W" for a in schedule.actions(rank))
            assert split == 2 * (p - 1 - rank) + rank + 1


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_dualpipe_v_with_few_microbatches(p: int) -> None:
    """Fewer than 2p: never slower than the order for 2p microbatches, and at most m activations."""
    full = run("dualpipe-v", p, 2 * p)
    for m in range(1, 2 * p):
        timeline = run("dualpipe-v", p, m)
        assert timeline.makespan <= full.makespan + 1e-9
        assert max(timeline.peak_activations) <= m


# --- looped ---------------------------------------------------------------------------------------------------------------


def test_looped_bfs_finishes_a_chunk_before_the_next() -> None:
    for row in generate("looped-bfs", 3, 4, chunks=3).rows:
        ops = [(slot.op, slot.stage) for slot in row if isinstance(slot, Action)]
        assert sum(a != b for a, b in itertools.pairwise(ops)) == 2 * 3 - 1
    assert [[str(a) for a in row] for row in generate("looped-bfs", 4, 5, chunks=1).rows] == [
        [str(a) for a in row] for row in generate("gpipe", 4, 5).rows
    ]


@pytest.mark.parametrize(("p", "m", "v"), [(2, 3, 2), (4, 4, 2), (4, 6, 3), (4, 9, 2), (8, 12, 2), (8, 16, 2)])
def test_looped_dfs_is_no_worse_than_interleaved(p: int, m: int, v: int) -> None:
    for profile in (CostProfile.uniform(p * v, chunks=v, comm=0.1), uneven(p + m, p * v, v)):
        fixed = simulate(generate("interleaved-1f1b", p, m, chunks=v, costs=profile), profile)
        free = simulate(generate("looped-dfs", p, m, chunks=v, costs=profile), profile)
        assert free.makespan <= fixed.makespan * (1 + 1e-9)
        assert free.max_span <= fixed.max_span * (1 + 1e-9)
        assert max(free.peak_activations) <= max(fixed.peak_activations) + 1e-9


def test_looped_dfs_gains_where_groups_do_not_fit() -> None:
    for p, m, v in [(4, 6, 2), (4, 9, 3), (8, 20, 2)]:
        assert run("looped-dfs", p, m, v=v).makespan < run("interleaved-1f1b", p, m, v=v).makespan - 1e-9


# --- reordering -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32))
def test_reordering_keeps_the_actions_and_never_loses(p: int, m: int, seed: int) -> None:
    problem = Problem.of(bidirectional(p), m, uneven(seed, p, 1))
    rows = unit_rows(problem, unit_sizes(problem)[0])
    original = Retimer(problem).draft(rows)
    assert original is not None
    reordered = improve_order(problem, [rows])
    assert reordered.no_worse_than(original)
    assert [sorted(row) for row in reordered.rows] == [sorted(row) for row in rows]
    for before, after in zip(rows, reordered.rows, strict=True):
        for kind in {code // m for code in before}:
            assert [c for c in after if c // m == kind] == [c for c in before if c // m == kind]


def test_fillers_close_gaps_between_units() -> None:
    profile = CostProfile.uniform(8, f=1, b=1, w=1)
    problem = Problem.of(bidirectional(8), 16, profile)
    rows = unit_rows(problem, unit_sizes(problem)[0])
    original = Retimer(problem).draft(rows)
    assert original is not None
    assert improve_order(problem, [rows]).makespan < original.makespan
