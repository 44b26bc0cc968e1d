"""Compute and TP collectives inside a slot: exact numbers, the optimum on small slots, what simulation and reports say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule import FAMILIES, CostProfile, check_schedule, generate, parse_schedule, simulate
from jaxpipe.schedule.engine import Strand, collectives_exposed, slot_lanes, weave
from jaxpipe.schedule.files import from_costs, from_timeline, to_costs, to_timeline
from jaxpipe.schedule.passes import braid
from jaxpipe.search.bounds import lower_bound, span_lower_bound

COSTS = CostProfile.uniform(2, f=4, b=4.8, w=3.2, tp_comm=2, tp_collectives=4)


def seconds(*ops: str, costs: CostProfile = COSTS) -> float:
    return slot_lanes(costs, [(op, 0) for op in ops]).seconds


def test_alone() -> None:
    """F and B leave every collective exposed; W hides B's as far as it is long enough (`stp.txt` section 3)."""
    assert seconds("F") == 6
    assert seconds("B") == 6.8
    assert seconds("W") == 3.2
    assert seconds("BW") == pytest.approx(8)
    short = CostProfile.uniform(1, f=1, b=1, w=0.5, tp_comm=2)
    assert seconds("BW", costs=short) == pytest.approx(3)
    assert slot_lanes(short, [("BW", 0)]).exposed_s == pytest.approx(1.5)


def test_braided() -> None:
    """F+B exposes its last collective; a W in the braid hides that too; F+W hides F's under W."""
    assert seconds("F", "B") == pytest.approx(8.8 + 0.5)
    assert seconds("F", "BW") == pytest.approx(12)
    assert seconds("F", "W") == pytest.approx(7.2)
    assert slot_lanes(COSTS, [("F", 0), ("BW", 1)]).exposed_s == pytest.approx(0)
    lanes = slot_lanes(COSTS, [("F", 0), ("B", 0)])
    assert sum(end - begin for begin, end in lanes.collectives) == pytest.approx(4)


def test_without_collectives_a_braid_is_the_sum_exactly() -> None:
    costs = CostProfile.uniform(2, f=0.1, b=0.2, w=0.3)
    assert seconds("F", "B", costs=costs) == 0.1 + 0.2
    assert collectives_exposed(costs) is costs


def optimum(strands: Sequence[Strand]) -> float:
    """Return the shortest of all orders of the units, by exhaustive search."""
    best = float("inf")
    first = tuple(0 if x.chain_s or x.collective_s else x.units for x in strands)
    free = tuple(x.filler_s / x.units for x, k in zip(strands, first, strict=True) if k for _ in range(x.units))
    states = [(first, (0.0,) * len(strands), free, 0.0, 0.0)]
    while states:
        nexts, ready, pool, now, lane = states.pop()
        if now >= best:
            continue
        open_ = [k for k, x in enumerate(strands) if nexts[k] < x.units]
        if not open_:
            best = min(best, max(now + sum(pool), lane))
        for unit in set(pool):
            rest = list(pool)
            rest.remove(unit)
            states.append((nexts, ready, tuple(rest), now + unit, lane))
        for k in open_:
            x = strands[k]
            end = max(now, ready[k]) + x.chain_s / x.units
            collective_end = max(end, lane) + x.collective_s / x.units
            filler = (x.filler_s / x.units,) if x.filler_s else ()
            after = (
                tuple(n + (i == k) for i, n in enumerate(nexts)),
                tuple(collective_end if i == k else t for i, t in enumerate(ready)),
            )
            states.append((*after, pool + filler, end, collective_end))
    return best


def test_near_the_optimum_of_small_slots() -> None:
    rng = random.Random(0)
    longer = []
    for _ in range(40):
        n, other = rng.choice((1, 2)), rng.choice((1, 2, 3))
        f, b, w, t = (rng.uniform(0.5, 2) for _ in range(4))
        forward, backward = Strand(f, t, 0, n), Strand(b, t, 0, other)
        both, weights = Strand(b, t, w, other), Strand(0, 0, w, other)
        for slot in (
            (forward,),
            (both,),
            (forward, backward),
            (forward, both),
            (forward, weights),
            (backward, weights),
        ):
            seconds, least = weave(slot).seconds, optimum(slot)
            assert seconds >= least - 1e-9
            longer.append(seconds / least - 1)
    assert max(longer) < 0.02
    assert sum(x > 1e-9 for x in longer) <= len(longer) / 100


def test_collectives_of_f_and_b_apart() -> None:
    """Each op waits for its own; a braid of F and B takes what both lanes need."""
    costs = CostProfile.uniform(1, f=4, b=6, w=2, tp_comm=(1.0, 3.0), tp_collectives=4)
    alone = {op: slot_lanes(costs, [(op, 0)]).seconds for op in ("F", "B", "W")}
    assert alone == pytest.approx({"F": 5, "B": 9, "W": 2})
    assert (collectives_exposed(costs).f_s, collectives_exposed(costs).b_s) == ((5,), (9,))
    assert 10 <= slot_lanes(costs, [("F", 0), ("B", 0)]).seconds < 14
    only_b = CostProfile.uniform(1, f=4, b=6, w=2, tp_comm=(0.0, 3.0), tp_collectives=4)
    assert only_b.has_collectives
    assert slot_lanes(only_b, [("F", 0)]).exposed_s == 0
    assert 8 <= slot_lanes(only_b, [("BW", 0)]).seconds < 11, "W hides B's"


def test_generators_without_braids_see_collectives_as_part_of_the_actions() -> None:
    """Simulating with lanes and simulating the folded costs are the same for schedules without braids."""
    for name in FAMILIES:
        v = FAMILIES[name].default_chunks
        costs = CostProfile.uniform(3 * v, chunks=v, f=2, b=2.5, w=1.5, tp_comm=0.5, tp_collectives=4, comm=0.1)
        schedule = generate(name, 3, 5, costs=costs)
        check_schedule(schedule)
        assert parse_schedule(str(schedule)) == schedule
        timeline = simulate(schedule, costs)
        assert len(timeline.tp_exposed_s) == 3
        assert timeline.makespan >= lower_bound(schedule.placement, 5, costs) * (1 - 1e-9)
        if not FAMILIES[name].sees_collectives:
            folded = simulate(schedule, collectives_exposed(costs))
            assert folded.makespan == pytest.approx(timeline.makespan)
            assert not folded.tp_exposed_s
            exposed = [a + b for a, b in zip(timeline.compute_s, timeline.tp_exposed_s, strict=True)]
            assert exposed == pytest.approx(folded.compute_s)


def test_bounds_hold_for_braided_schedules() -> None:
    rng = random.Random(1)
    for name in ("1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h2", "v-zb", "dualpipe-v", "stp", "chimera"):
        v = FAMILIES[name].default_chunks
        for _ in range(3):
            p, m = rng.choice((2, 4)), rng.choice((4, 8))
            f, b, w, t = (rng.uniform(0.2, 2) for _ in range(4))
            costs = CostProfile.uniform(p * v, chunks=v, f=f, b=b, w=w, tp_comm=t, tp_collectives=rng.choice((1, 3)))
            uneven = replace(costs, f_s=tuple(x * rng.uniform(0.5, 2) for x in costs.f_s))
            schedule = braid(generate(name, p, m, costs=uneven), uneven)
            timeline = simulate(schedule, uneven)
            peak = max(timeline.peak_activations)
            for limit in (None, peak):
                least = lower_bound(schedule.placement, m, uneven, memory_limit=limit)
                assert timeline.makespan >= least * (1 - 1e-9), (name, p, m)
                span = span_lower_bound(schedule.placement, m, uneven, memory_limit=limit)
                assert timeline.max_span >= span * (1 - 1e-9), (name, p, m)


def test_exposed_collectives_are_bubble() -> None:
    timeline = simulate(generate("1f1b", 1, 2), CostProfile.uniform(1, f=1, b=1, w=1, tp_comm=0.5, tp_collectives=2))
    assert timeline.makespan == 7
    assert timeline.tp_exposed_s == pytest.approx([1])
    assert timeline.compute_s == pytest.approx([6])
    assert timeline.bubble_rate == pytest.approx(1 / 7)
    assert timeline.tp_exposed_rate == pytest.approx(1 / 7)
    busy = [e for e in timeline.events if e.lane == "tp"]
    assert sum(e.end_s - e.start_s for e in busy) == pytest.approx(2)
    assert [e.start_s for e in timeline.events] == sorted(e.start_s for e in timeline.events)


def test_json_round_trips() -> None:
    assert from_costs(to_costs(COSTS)) == COSTS
    plain = to_costs(CostProfile.uniform(2))
    assert not {"f_comm_s", "b_comm_s", "collectives"} & set(plain)
    timeline = simulate(generate("stp", 2, 4), CostProfile.uniform(4, chunks=2, tp_comm=0.2))
    assert from_timeline(to_timeline(timeline)) == timeline
    assert "tp_exposed_s" not in to_timeline(simulate(generate("1f1b", 2, 4), CostProfile.uniform(2)))
    former = {key: x for key, x in to_costs(COSTS).items() if key not in ("f_comm_s", "b_comm_s", "collectives")}
    assert from_costs({**former, "tp_comm_s": list(COSTS.f_comm_s), "tp_collectives": list(COSTS.collectives)}) == COSTS
    apart = replace(COSTS, b_comm_s=(0.0, 3.0))
    assert from_costs(to_costs(apart)) == apart
    with pytest.raises(ScheduleParseError, match="collectives"):
        from_costs({**to_costs(COSTS), "collectives": [1.5, 2]})


def test_wrong_costs_are_named() -> None:
    with pytest.raises(ScheduleError, match=r"collectives\[1\].*0.*1"):
        replace(COSTS, collectives=(1, 0))
    with pytest.raises(ScheduleError, match=r"b_comm_s.*1 entries.*2 stages"):
        replace(COSTS, b_comm_s=(1.0,))
