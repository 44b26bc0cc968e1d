"""The braid pass: valid in, valid out, order kept, never longer; and unbraid, its inverse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpipe.schedule import (
    FAMILIES,
    Action,
    Braid,
    CostProfile,
    Schedule,
    check_schedule,
    generate,
    one_to_one,
    parse_schedule,
    simulate,
)
from jaxpipe.schedule.passes import braid, unbraid
from tests.support.paths import ROOT


def costs_of(name: str, p: int, tp_comm: float, **options: float) -> CostProfile:
    v = FAMILIES[name].default_chunks
    return CostProfile.uniform(p * v, chunks=v, f=1, b=1.2, w=0.8, tp_comm=tp_comm, tp_collectives=4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_any_family(name: str) -> None:
    costs = costs_of(name, 3, 0.4, comm=0.05)
    schedule = generate(name, 3, 7, costs=costs)
    braided = braid(schedule, costs)
    check_schedule(braided)
    assert parse_schedule(str(braided)) == braided
    assert unbraid(braided) == unbraid(schedule)
    assert (braided.name, braided.placement) == (schedule.name, schedule.placement)
    before, after = simulate(schedule, costs), simulate(braided, costs)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    for slot in (s for row in braided.rows for s in row if isinstance(s, Braid) and s not in row_slots(schedule)):
        assert {a.op for a in slot.actions} <= {"F", "B", "BW", "W"}
        assert len({a.microbatch for a in slot.actions}) == 2


def row_slots(schedule: Schedule) -> set[object]:
    return {slot for row in schedule.rows for slot in row}


def test_it_pays_where_forwards_and_backwards_alternate() -> None:
    for name in ("eager-1f1b", "zb-h2", "dualpipe-v"):
        costs = costs_of(name, 4, 0.5)
        schedule = unbraid(generate(name, 4, 16, costs=costs))
        braided = braid(schedule, costs)
        before, after = simulate(schedule, costs), simulate(braided, costs)
        assert after.makespan < before.makespan * 0.99, name
        assert sum(after.tp_exposed_s) < sum(before.tp_exposed_s)
    # v-zb leaves little to gain: its order is laid for what F and B wait.
    costs = costs_of("v-zb", 4, 0.5)
    schedule = generate("v-zb", 4, 16, costs=costs)
    before, after = simulate(schedule, costs), simulate(braid(schedule, costs), costs)
    assert after.makespan < before.makespan and sum(after.tp_exposed_s) < sum(before.tp_exposed_s)


@pytest.mark.parametrize(("p", "m", "comm", "most"), [(8, 32, 0.5, 112.5), (8, 32, 2.0, 172.4375), (4, 16, 1.0, 60)])
def test_dualpipe_v_in_its_published_pairs(p: int, m: int, comm: float, most: float) -> None:
    """The pass finds what the family makes with costs: pairs of which none alone could start together."""
    costs = CostProfile.uniform(2 * p, chunks=2, tp_comm=comm, tp_collectives=8)
    schedule = generate("dualpipe-v", p, m, costs=costs)
    timeline = simulate(schedule, costs)
    assert timeline.makespan <= most + 1e-9
    assert max(timeline.peak_activations) == p + 0.5
    assert generate("dualpipe-v", p, m, costs=replace(costs, f_comm_s=(), b_comm_s=())) == generate("dualpipe-v", p, m)
    if p > 4:
        return
    by_pass = simulate(braid(generate("dualpipe-v", p, m), costs), costs)
    assert by_pass.makespan <= timeline.makespan * (1 + 1e-9)


def test_interleaved_becomes_combined() -> None:
    """A backward braided with the forward behind it: interleaved 1F1B with one more chunk in flight, where memory allows it."""
    p, m = 4, 16
    costs = CostProfile.uniform(2 * p, chunks=2, tp_comm=1.0, tp_collectives=8)
    combined = simulate(generate("combined-1f1b", p, m), costs)
    schedule = generate("interleaved-1f1b", p, m, costs=costs)
    assert simulate(braid(schedule, costs), costs).makespan <= combined.makespan * (1 + 1e-9)
    limited = simulate(braid(schedule, costs, memory_limit=((2 + 1) * p - 1) / 2), costs)
    assert combined.makespan < limited.makespan <= simulate(schedule, costs).makespan


def test_two_forwards_hide_each_others_collectives() -> None:
    published = unbraid(generate("stp-published", 4, 12))
    costs = costs_of("stp", 4, 0.5)
    braided = braid(published, costs)
    assert any(isinstance(x, Braid) and [a.op for a in x.actions] == ["F", "F"] for row in braided.rows for x in row)
    assert simulate(braided, costs).makespan < simulate(published, costs).makespan


def test_forwards_with_backwards_come_first() -> None:
    """Braids of alike actions are tried only on what braids of F and a backward have left."""
    for name in ("eager-1f1b", "zb-h2", "dualpipe-v"):
        costs = costs_of(name, 4, 0.5)
        braided = braid(generate(name, 4, 8, costs=costs), costs)
        kinds = ["F" in {a.op for a in slot.actions} for row in braided.rows for slot in row if isinstance(slot, Braid)]
        assert sum(kinds) > len(kinds) / 2, name


def test_without_collectives_nothing_is_braided() -> None:
    for name in ("1f1b", "dualpipe-v"):
        schedule = generate(name, 4, 8)
        assert braid(schedule, costs_of(name, 4, 0.0)) == schedule


def test_1f1b_is_not_braided_where_its_backwards_wait_for_its_forwards() -> None:
    """On ranks 0 and 1, F0.1+BW0.0 would wait for BW1.0, which stands behind F1.0 alone: fine; F0.2+BW0.0 may be, and so on.
    Whatever is braided, the schedule runs and takes no longer."""
    rows = (
        "F0.0 F0.1 BW0.0 F0.2 BW0.1 F0.3 BW0.2 BW0.3",
        "F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2 F1.3 BW1.3",
    )
    slots = tuple(
        tuple(Action(x[: x.index(".") - 1], int(x[x.index(".") - 1]), int(x[-1])) for x in row.split()) for row in rows
    )
    schedule = Schedule("mine", one_to_one(2), 4, slots)
    costs = CostProfile.uniform(2, f=1, b=1, w=1, tp_comm=0.5, tp_collectives=4)
    braided = braid(schedule, costs)
    check_schedule(braided)
    assert simulate(braided, costs).makespan <= simulate(schedule, costs).makespan


def test_memory_limit_is_kept() -> None:
    costs = costs_of("v-zb", 4, 0.5)
    schedule = generate("v-zb", 4, 16, costs=costs)
    peak = max(simulate(schedule, costs).peak_activations)
    free, limited = braid(schedule, costs), braid(schedule, costs, memory_limit=peak)
    assert max(simulate(free, costs).peak_activations) > peak
    assert max(simulate(limited, costs).peak_activations) <= peak * (1 + 1e-9)
    assert simulate(limited, costs).makespan <= simulate(schedule, costs).makespan


def test_unbraid_takes_stp_apart() -> None:
    costs = costs_of("stp", 4, 0.5)
    schedule = generate("stp", 4, 12, costs=costs)
    plain = unbraid(schedule)
    check_schedule(plain)
    assert all(isinstance(slot, Action) for row in plain.rows for slot in row)
    assert [list(plain.actions(r)) for r in range(4)] == [list(schedule.actions(r)) for r in range(4)]
    assert simulate(schedule, costs).makespan < simulate(plain, costs).makespan


def test_fused_neighbours_hide_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from paper_stp import fuse_neighbours

    costs = costs_of("v-zb", 4, 0.5)
    schedule = generate("v-zb", 4, 16, costs=costs)
    fused = fuse_neighbours(schedule)
    check_schedule(fused)
    assert any(a.op == "BW" for a in fused.actions(0))
    assert sum(simulate(fused, costs).tp_exposed_s) < sum(simulate(schedule, costs).tp_exposed_s)
