"""STP: what its rows promise, at many sizes and costs; the papers' comparison at its costs."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    FAMILIES,
    Braid,
    CostProfile,
    Link,
    Schedule,
    check_schedule,
    generate,
    op_spec,
    simulate,
    v_shape,
)
from jaxpipe.schedule.engine import collectives_exposed
from jaxpipe.schedule.families.stp import Shape, stp_rows
from jaxpipe.search.best import best_schedule
from jaxpipe.search.bounds import lower_bound
from tests.support.paths import ROOT

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (2, 8), (3, 2), (3, 11), (4, 4), (4, 12), (5, 9), (8, 24)]


def chunk_costs(p: int, f: float, b: float, w: float, t: float, **options: float) -> CostProfile:
    return CostProfile.uniform(2 * p, chunks=2, f=2 * f, b=2 * b, w=2 * w, tp_comm=2 * t, tp_collectives=8, **options)  # type: ignore[arg-type]


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import paper_stp

    return paper_stp


def weights_in_order(schedule: Schedule) -> bool:
    for rank in range(schedule.num_ranks):
        for stage in schedule.placement.stages_of(rank):
            microbatches = [a.microbatch for a in schedule.actions(rank) if a.stage == stage and a.op in ("W", "BW")]
            if microbatches != list(range(schedule.num_microbatches)):
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
            f_comm_s=(0.3,) * n,
            b_comm_s=(0.3,) * n,
            collectives=(4,) * (n - 1) + (3,),
        )
        schedule = generate(name, p, m, costs=costs)
        check_schedule(schedule)
        assert weights_in_order(schedule)
        assert simulate(schedule, costs).makespan >= lower_bound(v_shape(p), m, costs)


@pytest.mark.parametrize("p", [2, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_the_papers_order(p: int, paper: ModuleType) -> None:
    """STP is the fastest and 1F1B-I before ZB-V at T_AR = 27.5% of F (Figure 1); memory is the other way round (Table 5)."""
    costs = chunk_costs(p, 1, 1.1, 0.95, 0.38)
    timelines = {name: simulate(generate(name, p, 8 * p, costs=costs), costs) for name in paper.SCHEDULES[:3]}
    first, second, last = (timelines[n] for n in ("stp", "interleaved-1f1b", "v-zb"))
    assert first.makespan < second.makespan < last.makespan
    assert max(last.peak_activations) < max(second.peak_activations) < max(first.peak_activations)
    for name in timelines:
        published = paper.TABLE_1[name](p, 8 * p, paper.ChunkCosts(1, 1.1, 0.95, 0.38))
        exposed = max(timelines[name].tp_exposed_s)
        assert exposed == pytest.approx(published.tp_bubble_s, rel=0.25 if name == "stp" else 1e-6)
        assert 2 * max(timelines[name].peak_activations) <= published.peak_chunks + 1 + 1e-9


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_the_papers_bubble_where_weights_may_be_put_off(p: int, paper: ModuleType) -> None:
    """The published order, in which rank r delays r Ws, has the paper's PP bubble with F = B = W and no collectives."""
    m = 4 * p
    published = paper.TABLE_1["stp"](p, m, paper.ChunkCosts(1, 1, 1))
    timeline = simulate(generate("stp-published", p, m), chunk_costs(p, 1, 1, 1, 0))
    assert timeline.makespan - 6 * m == pytest.approx(published.pp_bubble_s)


# the authors' published code, simulated: p, m, T_AR, W, makespan, peak in chunks by rank, exposed (papers_rest.md section 6)
PUBLISHED = [
    (2, 8, 0, 1, 49, [7, 7], 0),
    (2, 8, 0, 0.75, 45.75, [7, 7], 0),
    (4, 12, 0, 1, 75, [13, 13, 14, 15], 0),
    (4, 16, 0.2, 0.75, 95.8, [13, 13, 14, 15], 2.025),
    (8, 32, 0, 1, 199, [25, 25, 26, 27, 28, 29, 30, 31], 0),
    (8, 32, 0.2, 1, 204.4, [25, 25, 26, 27, 28, 29, 30, 31], 3.925),
]


@pytest.mark.parametrize(("p", "m", "t", "w", "makespan", "peaks", "exposed"), PUBLISHED)
def test_published_code(
    p: int, m: int, t: float, w: float, makespan: float, peaks: list[float], exposed: float
) -> None:
    costs = chunk_costs(p, 1, 1, w, t)
    timeline = simulate(generate("stp-published", p, m), costs)
    assert timeline.makespan == pytest.approx(makespan)
    assert [2 * x for x in timeline.peak_activations] == peaks
    assert max(timeline.tp_exposed_s, default=0) == pytest.approx(exposed)
    allowed = simulate(generate("stp", p, m, costs=costs, memory_limit=peaks[-1] / 2), costs)
    assert allowed.makespan <= makespan * (1 + 1e-9)
    assert 2 * max(allowed.peak_activations) <= peaks[-1]


def test_published_counts_and_small_sizes() -> None:
    """2 below F0, r + 1 pairs, r + 1 F0's two by two; any m: the last microbatches of 3p - 1 are left out."""
    row = generate("stp-published", 4, 12).rows[3]
    assert " ".join(map(str, row[:10])) == "F3.0 F4.0 F3.1 F4.1 F3.2 F4.2 F3.3 F4.3 F3.4+F3.5 F3.6+F3.7"
    for p in (1, 2, 3, 5):
        for m in range(1, 3 * p + 1):
            schedule = generate("stp-published", p, m)
            check_schedule(schedule)
            assert weights_in_order(schedule)
            if p > 1:
                assert max(simulate(schedule, chunk_costs(p, 1, 1, 1, 0)).peak_activations) <= (4 * p - 1) / 2


def test_memory_limit() -> None:
    """It is kept from p + 1 activations on, and room makes it shorter; less is refused in one line."""
    for p, m in [(2, 6), (3, 10)]:
        costs = chunk_costs(p, 1, 1.1, 0.8, 0.2)
        makespans = []
        for chunks in range(2 * p + 2, 4 * p + 1):
            timeline = simulate(generate("stp", p, m, costs=costs, memory_limit=chunks / 2), costs)
            assert 2 * max(timeline.peak_activations) <= chunks
            makespans.append(timeline.makespan)
        assert makespans[-1] == min(makespans)
        assert makespans[0] > makespans[-1]
        assert makespans[p - 1] == simulate(generate("stp", p, m, costs=costs), costs).makespan, (
            "3p + 1 chunks is the default"
        )
    for limit in (1, 4.5, float("nan")):
        with pytest.raises(
            ScheduleError, match=rf"^stp: a memory limit of {limit:g} is below the 5 it needs; use 5 or m"
        ):
            generate("stp", 4, 16, memory_limit=limit)


def test_best_may_choose_the_published_order() -> None:
    costs = chunk_costs(4, 1, 1, 1, 0.4)
    best = best_schedule(4, 16, costs, families=["stp", "stp-memory", "stp-published"])
    assert best.makespan <= simulate(generate("stp-published", 4, 16), costs).makespan
    assert best.makespan < simulate(generate("stp", 4, 16, costs=costs), costs).makespan


def random_costs(n: int, rng: random.Random) -> CostProfile:
    f, b, w = ([rng.uniform(0.3, 1.7) for _ in range(n)] for _ in range(3))
    return CostProfile(
        f_s=tuple(f),
        b_s=tuple(b),
        w_s=tuple(w),
        bw_s=tuple(0.95 * (x + y) for x, y in zip(b, w, strict=True)),
        residual_bytes=(1.0,) * n,
        w_residual_bytes=(rng.choice((0.4, 1.0)),) * n,
        boundary_bytes=(1.0,) * n,
        link=Link(latency_s=rng.choice((0, 0.1, 0.3))),
        offload_s=(0.2,) * n,
        load_s=(0.2,) * n,
        f_comm_s=(rng.choice((0.0, 0.2)),) * n,
        b_comm_s=(rng.choice((0.0, 0.2)),) * n,
        collectives=(4,) * n,
    )


@pytest.mark.parametrize("name", ["stp", "stp-memory", "stp-offload", "zb", "zb-1p", "zb-2p", "1f1b", "stp-published"])
def test_by_span_the_longest_span_is_no_longer(name: str) -> None:
    """For families that choose; fixed orders are the same for both objectives."""
    rng = random.Random(name)
    shorter = 0
    for _ in range(6 if name == "stp-offload" else 12):
        p, m = rng.choice((2, 3, 4)), rng.choice((2, 5, 8, 12))
        costs = random_costs(p * FAMILIES[name].default_chunks, rng)
        visible_costs = costs if FAMILIES[name].sees_collectives else collectives_exposed(costs)
        first = generate(name, p, m, costs=costs)
        other = generate(name, p, m, costs=costs, objective="span")
        if "objective" not in FAMILIES[name].options:
            assert first == other
        check_schedule(other)
        spans = [simulate(x, visible_costs).max_span for x in (first, other)]
        assert spans[1] <= spans[0] * (1 + 1e-9)
        shorter += spans[1] < spans[0] * (1 - 1e-9)
    assert shorter or name != "stp"


def test_memory_variant_holds_less_and_takes_longer() -> None:
    costs = chunk_costs(4, 1, 1.2, 0.8, 0.3)
    full, lean = (simulate(generate(name, 4, 24, costs=costs), costs) for name in ("stp", "stp-memory"))
    assert max(lean.peak_activations) < max(full.peak_activations)
    assert full.makespan < lean.makespan < simulate(generate("v-zb", 4, 24, costs=costs), costs).makespan


def test_offload_moves_chunk_0_for_free() -> None:
    costs = chunk_costs(4, 1, 1.2, 0.8, 0.3, offload_time=2.0)
    plain, offloaded = generate("stp", 4, 24, costs=costs), generate("stp-offload", 4, 24, costs=costs)
    before, after = simulate(plain, costs), simulate(offloaded, costs)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert max(after.peak_activations) < 0.9 * max(before.peak_activations)
    gone = {a.stage for rank in range(4) for a in offloaded.actions(rank) if op_spec(a.op).lane == "d2h"}
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
    with pytest.raises(ScheduleError, match=r"4 stages.*4 ranks.*2.*8"):
        generate("stp", 4, 4, costs=CostProfile.uniform(4))
