"""STP: what its rows promise, at many sizes and costs; the papers' comparison at its costs."""

from __future__ import annotations

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    Braid,
    CostProfile,
    Schedule,
    check_schedule,
    generate,
    lower_bound,
    op_spec,
    simulate,
    v_shape,
)
from jaxpipe.schedule.families.stp_rows import Shape, stp_rows
from jaxpipe.schedule.families.stp_theory import TABLE_1, ChunkCosts

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (2, 8), (3, 2), (3, 11), (4, 4), (4, 12), (5, 9), (8, 24)]


def chunk_costs(p: int, f: float, b: float, w: float, t: float, **more: float) -> CostProfile:
    return CostProfile.uniform(2 * p, chunks=2, f=2 * f, b=2 * b, w=2 * w, tp_comm=2 * t, tp_collectives=8, **more)  # type: ignore[arg-type]


def weights_in_order(schedule: Schedule) -> bool:
    for rank in range(schedule.num_ranks):
        for stage in schedule.placement.stages_of(rank):
            done = [a.microbatch for a in schedule.actions(rank) if a.stage == stage and a.op in ("W", "BW")]
            if done != list(range(schedule.num_microbatches)):
                return False
    return True


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_shape_is_valid(p: int, m: int) -> None:
    for ahead in {1, (p + 1) // 2, p}:
        for split in {0, p - 1}:
            for paired in (False, True):
                for first in (False, True):
                    rows = stp_rows(p, m, Shape(ahead, split, p // 2, paired, first))
                    schedule = Schedule("stp", v_shape(p), m, rows)
                    check_schedule(schedule)
                    assert weights_in_order(schedule)
                    for row in rows:
                        for slot in row:
                            chosen = {a.microbatch for a in slot.actions}
                            assert len(chosen) == len(slot.actions), f"{slot} braids a microbatch with itself"


@pytest.mark.parametrize("name", ["stp", "stp-memory", "stp-offload"])
def test_uneven_costs(name: str) -> None:
    for p, m in [(2, 7), (4, 16)]:
        n = 2 * p
        costs = CostProfile(
            f_s=tuple(1 + 0.1 * s for s in range(n)),
            b_s=tuple(1.2 - 0.05 * s for s in range(n)),
            w_s=(0.8,) * n,
            bw_s=tuple(1.9 - 0.05 * s for s in range(n)),
            residual_bytes=tuple(100.0 + s for s in range(n)),
            w_residual_bytes=(60.0,) * n,
            boundary_bytes=(1.0,) * n,
            offload_s=(0.5,) * n,
            load_s=(0.5,) * n,
            tp_comm_s=(0.3,) * n,
            tp_collectives=(4,) * (n - 1) + (3,),
        )
        schedule = generate(name, p, m, costs=costs)
        check_schedule(schedule)
        assert weights_in_order(schedule)
        assert simulate(schedule, costs).makespan >= lower_bound(v_shape(p), m, costs)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_papers_order(p: int) -> None:
    """With T_AR at 27.5% of the forward (Figure 1): STP is the fastest, 1F1B-I before ZB-V; memory the other way (Table 5)."""
    costs = chunk_costs(p, 1, 1.1, 0.95, 0.38)
    timelines = {name: simulate(generate(name, p, 8 * p, costs=costs), costs) for name in TABLE_1}
    first, second, last = (timelines[n] for n in ("stp", "interleaved-1f1b", "v-zb"))
    assert first.makespan < second.makespan < last.makespan
    assert max(last.peak_activations) < max(second.peak_activations) < max(first.peak_activations)
    for name, promise in TABLE_1.items():
        told = promise(p, 8 * p, ChunkCosts(1, 1.1, 0.95, 0.38))
        exposed = max(timelines[name].tp_exposed_s)
        assert exposed == pytest.approx(told.tp_bubble_s, rel=0.25 if name == "stp" else 1e-6)
        assert 2 * max(timelines[name].peak_activations) <= told.peak_chunks + 1 + 1e-9


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_the_papers_bubble_where_weights_may_be_put_off(p: int) -> None:
    """With F = B = W and no collectives the paper's rule (rank r puts off r weight gradients) gives its PP bubble exactly."""
    m = 4 * p
    schedule = Schedule("stp", v_shape(p), m, stp_rows(p, m, Shape(p, p - 1, paired=False)))
    costs = chunk_costs(p, 1, 1, 1, 0)
    told = TABLE_1["stp"](p, m, ChunkCosts(1, 1, 1))
    assert simulate(schedule, costs).makespan - 6 * m == pytest.approx(told.pp_bubble_s)


def test_memory_variant_holds_less_and_takes_longer() -> None:
    costs = chunk_costs(4, 1, 1.2, 0.8, 0.3)
    full, lean = (simulate(generate(name, 4, 24, costs=costs), costs) for name in ("stp", "stp-memory"))
    assert max(lean.peak_activations) < max(full.peak_activations)
    assert full.makespan < lean.makespan < simulate(generate("v-zb", 4, 24, costs=costs), costs).makespan


def test_offload_moves_chunk_0_for_free() -> None:
    costs = chunk_costs(4, 1, 1.2, 0.8, 0.3, offload_time=2.0)
    plain, moved = generate("stp", 4, 24, costs=costs), generate("stp-offload", 4, 24, costs=costs)
    before, after = simulate(plain, costs), simulate(moved, costs)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert max(after.peak_activations) < 0.9 * max(before.peak_activations)
    gone = {a.stage for rank in range(4) for a in moved.actions(rank) if op_spec(a.op).lane == "d2h"}
    assert gone
    assert gone <= set(range(4))


def test_steady_phase_is_full_braids() -> None:
    """Pattern (2) of section 4.1: F and BW of the same chunk, chunk 1 and chunk 0 in turn."""
    schedule = generate("stp", 2, 12, costs=chunk_costs(2, 1, 1, 1, 0.2))
    middle = [slot for slot in schedule.rows[0] if isinstance(slot, Braid) and slot.actions[-1].op == "BW"]
    assert len(middle) >= 10
    assert all(
        f.op == "F" and f.stage == b.stage and f.microbatch > b.microbatch for f, b in (s.actions for s in middle)
    )


def test_costs_for_another_placement_are_refused() -> None:
    with pytest.raises(ScheduleError, match="costs are for 4 stages; 4 ranks need 8"):
        generate("stp", 4, 4, costs=CostProfile.uniform(4))
