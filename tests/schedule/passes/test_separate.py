"""``separate_gradients``: never longer, never above the limit, the order of F and of backwards as it was, idempotent."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    CostProfile,
    Schedule,
    Traversal,
    check_schedule,
    generate,
    read_schedule,
    simulate,
    traverse,
)
from jaxpipe.schedule.passes import braid, offload, separate_gradients
from jaxpipe.schedule.passes.braid import fused_backwards, with_fused
from tests.support.schedule_strategies import random_costs, random_placements, random_valid_schedules


def order_of(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    """Return per rank everything but W, a backward by one name."""
    rows = [chain.from_iterable(slot.actions for slot in row) for row in schedule.rows]
    return [[(a.op.removesuffix("W") or a.op, a.stage, a.microbatch) for a in row if a.op != "W"] for row in rows]


def require_honest(schedule: Schedule, costs: CostProfile, limit: float = float("inf")) -> Schedule:
    """Separate gradients and check what that promises of any schedule."""
    before = simulate(schedule, costs)
    separated = separate_gradients(schedule, costs, memory_limit=limit)
    check_schedule(separated)
    after = simulate(separated, costs)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert after.max_span <= before.max_span * (1 + 1e-9)
    peak = max(before.peak_activations)
    assert max(after.peak_activations) <= (max(peak, limit) if limit < float("inf") else peak) * (1 + 1e-9)
    assert order_of(separated) == order_of(schedule)
    assert separate_gradients(separated, costs, memory_limit=limit).rows == separated.rows
    return separated


@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (2, 2, 1), (1, 1.2, 0.8)])
@pytest.mark.parametrize("p, m", [(2, 5), (4, 8), pytest.param(6, 12, marks=pytest.mark.soak)])
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
        separated = require_honest(generate(name, p, m, costs=costs), costs)
        assert simulate(separated, costs).makespan <= m * (f + b + w) + (p - 1) * idle / v + 1e-9, (name, p, m)


@pytest.mark.parametrize(
    "name, makespan", [("chimera", 114), ("hanayo", 122), ("1f1b-v", 115), ("interleaved-1f1b", 104), ("1f1b", 110)]
)
def test_the_papers_schedules_get_shorter(name: str, makespan: float) -> None:
    """p = 8, m = 16, F = B = W = 2, at an unchanged peak."""
    stages = generate(name, 8, 16).num_stages
    costs = CostProfile.uniform(stages, chunks=stages // 8, f=2, b=2, w=2)
    schedule = generate(name, 8, 16, costs=costs)
    separated = require_honest(schedule, costs)
    assert simulate(separated, costs).makespan <= makespan + 1e-9


def test_a_fused_backward_that_splitting_does_not_help_stays() -> None:
    costs = CostProfile.uniform(1)
    schedule = generate("1f1b", 1, 4)
    assert separate_gradients(schedule, costs) == schedule


def test_more_memory_where_it_makes_it_shorter() -> None:
    costs = CostProfile.uniform(4)
    schedule = generate("1f1b", 4, 12)
    separated = require_honest(schedule, costs, 8.0)
    assert simulate(separated, costs).makespan <= simulate(separate_gradients(schedule, costs), costs).makespan


def test_a_schedule_above_the_limit_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"8 activations.*3"):
        separate_gradients(generate("gpipe", 4, 8), CostProfile.uniform(4), memory_limit=3)


def test_offloads_and_braids() -> None:
    costs = CostProfile.uniform(8, chunks=2, offload_time=1.0, tp_comm=0.25, tp_collectives=2)
    schedule = generate("interleaved-1f1b", 4, 8, costs=costs)
    require_honest(offload(schedule, costs).schedule, costs)
    require_honest(braid(schedule, costs), costs)
    require_honest(generate("stp", 4, 12, costs=costs), costs)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "chimera"])
@pytest.mark.parametrize("tp_comm", [0.0, 0.4])
def test_no_split_is_for_nothing(name: str, tp_comm: float) -> None:
    """No single B and W can become BW again without a longer makespan or span, or a W before an earlier one of its stage."""
    plain = generate(name, 4, 8)
    costs = CostProfile.uniform(
        plain.num_stages, chunks=plain.num_chunks, f=1, b=1.1, w=0.9, tp_comm=tp_comm, tp_collectives=4
    )
    separated = require_honest(plain, costs)
    best = simulate(separated, costs)
    assert tp_comm or best.makespan < simulate(plain, costs).makespan
    fused = fused_backwards(separated)
    splits = {(a.stage, a.microbatch) for rank in range(4) for a in separated.actions(rank) if a.op == "B"}
    assert splits or tp_comm
    for backward in splits:
        refused = with_fused(separated, fused | {backward})
        timeline = simulate(refused, costs)
        later = timeline.makespan > best.makespan * (1 + 1e-9) or timeline.max_span > best.max_span * (1 + 1e-9)
        assert later or weights_of(refused, backward[0]) != weights_of(separated, backward[0]), backward


def weights_of(schedule: Schedule, stage: int) -> list[list[int]]:
    """Return per rank the microbatches of a stage in the order in which their gradients add up."""
    rows = [chain.from_iterable(slot.actions for slot in row) for row in schedule.rows]
    return [[a.microbatch for a in row if a.stage == stage and a.op in ("W", "BW")] for row in rows]


def test_every_verb_separates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("--ranks", "3", "--microbatches", "6")

    def run_json(*argv: str) -> Any:
        assert main([*argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    plain, costs, file = generate("1f1b", 3, 6), CostProfile.uniform(3), tmp_path / "plain.sched"
    file.write_text(str(plain), encoding="utf-8")
    separated = separate_gradients(plain, costs)
    makespan = simulate(separated, costs).makespan
    assert run_json("schedule", "1f1b", *sizes, "--separate", "-o", str(tmp_path / "out.sched"))["makespan"] == makespan
    assert read_schedule(tmp_path / "out.sched") == separated
    assert run_json("simulate", str(file), "--separate")["makespan"] == makespan
    rows = {row["name"]: row for row in run_json("compare", str(file), *sizes, "--separate")["schedules"]}
    assert rows["1f1b"]["makespan"] == makespan
    assert run_json("best", *sizes, "--max-chunks", "1", "--memory-limit", "3", "--separate")["makespan"] <= makespan
    assert main(["schedule", "gpipe", *sizes, "--memory-limit", "3", "--separate"]) == 2
    assert "6 activations" in capsys.readouterr().err


@settings(max_examples=20)
@given(data=st.data())
def test_random_schedules(data: st.DataObject) -> None:
    """Schedules are in any order, split anyhow, with O, L, S and braids, and with collectives."""
    split = data.draw(st.sampled_from(["any", "split", "full"]))
    schedule = data.draw(random_valid_schedules(4, 6, 5, split=split, offload=True, braids=True))
    costs = data.draw(random_costs(schedule.num_stages, schedule.num_ranks))
    tp_comm_s = tuple(data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(schedule.num_stages))
    costs = replace(costs, f_comm_s=tp_comm_s, b_comm_s=tp_comm_s[::-1], collectives=(2,) * schedule.num_stages)
    peak = max(simulate(schedule, costs).peak_activations)
    require_honest(schedule, costs, data.draw(st.sampled_from([float("inf"), peak, 1.3 * peak])))


def random_case(data: st.DataObject) -> None:
    placement = data.draw(random_placements(max_ranks=4, max_stages=6))
    m = data.draw(st.integers(1, 6))
    costs = data.draw(random_costs(placement.num_stages, placement.num_ranks))
    first = data.draw(st.sampled_from(["forward", "backward", "interleaved"]))
    schedule = traverse(placement, m, Traversal(first), data.draw(st.sampled_from([None, costs])))
    peak = max(simulate(schedule, costs).peak_activations)
    limit = data.draw(st.sampled_from([float("inf"), peak, 1.5 * peak]))
    require_honest(schedule, costs, limit)


@settings(max_examples=20)
@given(data=st.data())
def test_random_placements(data: st.DataObject) -> None:
    random_case(data)


@pytest.mark.soak
@given(data=st.data())
def test_random_placements_soak(data: st.DataObject) -> None:
    random_case(data)
