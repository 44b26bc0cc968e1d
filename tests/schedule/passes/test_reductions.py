"""R and G, once a step: where the pass puts them, what they cost beside compute and in its way, one step or several on end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.plot.figure import cells_of, lanes_of
from jaxpipe.schedule import (
    CostProfile,
    Placement,
    Schedule,
    build_graph,
    chain,
    check_schedule,
    explicit,
    find_problems,
    generate,
    parse_schedule,
    simulate,
    simulate_steps,
    with_span,
)
from jaxpipe.schedule.families.family import in_order
from jaxpipe.schedule.files import from_costs, from_schedule, from_timeline, to_costs, to_schedule, to_timeline
from jaxpipe.schedule.passes import braid, offload, prompt_weights, separate_gradients, with_reductions
from jaxpipe.schedule.passes.braid import backwards_like

FAMILIES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "v-zb", "chimera", "hanayo", "vocab-1f1b")


def priced(schedule: Schedule, reduce_s: float, gather_s: float = 0.0) -> CostProfile:
    costs = CostProfile.on(schedule.placement)
    for name, seconds in (("reduce_s", reduce_s), ("gather_s", gather_s)):
        costs = costs.with_values(name, (seconds,) * costs.num_stages)
    return costs


def one_rank(chunks: int) -> Schedule:
    """All stages on one rank, one microbatch: no bubbles but those that R and G make."""
    row = [f"{op}{s}.0" for op, stages in (("F", range(chunks)), ("BW", reversed(range(chunks)))) for s in stages]
    return parse_schedule("rank 0: " + " ".join(row))


@pytest.mark.parametrize("name", FAMILIES)
def test_reductions_of_any_family(name: str) -> None:
    plain = generate(name, 4, 4)
    schedule = with_reductions(plain, gather=True)
    check_schedule(schedule)
    assert with_reductions(schedule, gather=True) == schedule
    assert parse_schedule(str(schedule)) == from_schedule(to_schedule(schedule)) == schedule
    for rank, row in enumerate(schedule.rows):
        assert [x for x in row if str(x)[0] not in "RG"] == list(plain.rows[rank])
        held = len(plain.placement.stages_of(rank))
        assert [sum(str(x)[0] == op for x in row) for op in "RG"] == [held, held]
    costs = priced(schedule, 0.7, 0.3)
    assert from_costs(to_costs(costs)) == costs
    beside, between = (simulate(schedule, replace(costs, net_overlaps=x)) for x in (True, False))
    assert simulate(plain, costs).makespan < beside.makespan <= between.makespan
    assert beside.peak_activations <= between.peak_activations
    assert "net" in lanes_of(cells_of(beside)) and from_timeline(to_timeline(beside)) == beside
    free = simulate(schedule, priced(schedule, 0.0))
    assert [e for e in free.events if e.lane != "net"] == list(simulate(plain, costs).events)


@pytest.mark.parametrize(("reduce_s", "gather_s"), [(1.0, 0.5), (3.0, 1.75)])
def test_one_rank_hides_all_but_the_last_reduction_and_the_first_gather(reduce_s: float, gather_s: float) -> None:
    """BW takes 2 and F takes 1: what is longer than the compute beside it shows."""
    schedule = with_reductions(one_rank(3), gather=True)
    costs = priced(schedule, reduce_s, gather_s)
    costs = replace(costs, f_s=(1.0,) * 3, bw_s=(2.0,) * 3)
    exposed_s = reduce_s + 2 * max(0.0, reduce_s - 2.0) + gather_s + 2 * max(0.0, gather_s - 1.0)
    assert simulate(schedule, costs).makespan == pytest.approx(9.0 + exposed_s)
    between = replace(costs, net_overlaps=False)
    assert simulate(schedule, between).makespan == pytest.approx(9.0 + 3 * (reduce_s + gather_s))
    for validated in (False, True):
        steps = simulate_steps(schedule, costs, 3, 0.25, validated)
        assert steps.period_s == pytest.approx(9.0 + exposed_s + 0.25)


def test_one_stage_a_rank_reduces_in_its_bubble() -> None:
    """1F1B on p ranks: rank r ends 2r before rank 0, so only rank 0's R lengthens the step if none takes longer than that."""
    schedule = with_reductions(generate("1f1b", 4, 8))
    costs = CostProfile.uniform(4).with_values("reduce_s", (0.5, 2.5, 4.5, 6.5))
    plain = simulate(schedule, CostProfile.uniform(4)).makespan
    assert simulate(schedule, costs).makespan == pytest.approx(plain + 0.5)
    ends = {str(e.action): (e.start_s, e.end_s) for e in simulate(schedule, costs).events if e.lane == "net"}
    assert ends == {f"R{r}.0": pytest.approx((plain - 2 * r, plain + 0.5)) for r in range(4)}


def test_between_steps_an_update_waits_for_its_reduction_and_a_gather_for_the_update() -> None:
    schedule = with_reductions(in_order("two", 2, [["F", "F", "BW", "BW"]] * 2), gather=True)
    costs = priced(schedule, 5.0, 1.0)
    steps = simulate_steps(schedule, costs, 2, 0.5, post_validation=True)
    starts = {(e.rank, str(e.action)): (e.start_s, e.end_s) for e in steps.events}
    # rank 1 ends its last BW two seconds before rank 0, and so its R, its update and its G
    assert [starts[r, f"R{r}.0"][1] + 0.5 for r in range(2)] == [starts[r, f"G{r}.2"][0] for r in range(2)]
    assert starts[1, "G1.2"][0] == starts[0, "G0.2"][0] - 2 and starts[0, "F0.2"][0] == starts[0, "G0.2"][1]
    waiting = simulate_steps(schedule, costs, 2, 0.5)
    assert len({e.start_s for e in waiting.events if str(e.action) in ("G0.2", "G1.2")}) == 1
    assert waiting.period_s == simulate(schedule, costs).makespan + 0.5


@pytest.mark.parametrize("name", ["interleaved-1f1b", "chimera"])
def test_several_steps_need_as_many_reductions(name: str) -> None:
    """Each R stands for its own step: the second would never start if the first waited for its microbatches."""
    schedule = with_reductions(generate(name, 4, 4), gather=True)
    steps = simulate_steps(schedule, priced(schedule, 0.5, 0.25), 3)
    assert steps.period_s == pytest.approx(simulate(schedule, priced(schedule, 0.5, 0.25)).makespan)
    assert len(steps.events) == 3 * len(simulate(schedule, priced(schedule, 0.5, 0.25)).events)


def test_reductions_of_shared_stages_and_of_spans() -> None:
    shared = parse_schedule(
        "# jaxpipe schedule 1\nname: t\nmicrobatches: 1\nplacement: explicit ranks=2 flow=0,0+1\nedges: chain\n"
        "rank 0: F0.0 F1.0 BW1.0 BW0.0\nrank 1: F1.0 BW1.0\n"
    )
    assert [str(x) for x in with_reductions(shared).rows[1]] == ["F1.0", "BW1.0", "R1.0"]
    spans = replace(
        in_order("t", 2, [["F", "BW"]] * 2), placement=with_span(explicit(2, [0, 1]), {0: 2}), num_microbatches=4
    )
    rows = ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2 F1.3 BW1.3")
    spans = replace(spans, rows=parse_schedule("\n".join(f"rank {r}: {x}" for r, x in enumerate(rows))).rows)
    graph = build_graph(with_reductions(spans))
    waits = {
        str(slot): [str(graph.slots[graph.source(n)]) for n in graph.waits[at]] for at, slot in enumerate(graph.slots)
    }
    assert waits["R0.0"] == ["BW0.1"] * 2 and waits["R1.0"] == ["BW1.3"] * 2


def test_a_rank_of_two_flows_reduces_once() -> None:
    there = Placement("crossing", 3, (((0,), (1,), (2,)), ((2,), (1,), (0,))), chain(3))
    rows = ("F0.0 F2.1 BW2.1 BW0.0", "F1.0 F1.1 BW1.1 BW1.0", "F0.1 F2.0 BW2.0 BW0.1")
    plain = parse_schedule("\n".join(f"rank {r}: {x}" for r, x in enumerate(rows)))
    schedule = with_reductions(replace(plain, placement=there), gather=True)
    check_schedule(schedule)
    ends = [" ".join(str(x) for x in row if str(x)[0] == "R") for row in schedule.rows]
    assert ends == ["R2.1 R0.0", "R1.0", "R2.0 R0.1"]
    assert (
        simulate_steps(schedule, priced(schedule, 1.0), 2).period_s
        == simulate(schedule, priced(schedule, 1.0)).makespan
    )
    assert "R" not in str(with_reductions(schedule, stages=()))


@pytest.mark.parametrize("gather", [False, True])
def test_passes_that_move_actions_keep_reductions(gather: bool) -> None:
    schedule = with_reductions(generate("interleaved-1f1b", 4, 8), gather=gather)
    costs = replace(priced(schedule, 1.0, 0.5), offload_s=(0.25,) * 8, load_s=(0.25,) * 8)
    separate = separate_gradients(schedule, costs)
    changes = (
        separate,
        prompt_weights(separate),
        braid(separate, costs),
        offload(schedule, costs, memory_limit=5).schedule,
    )
    for changed in (*changes, backwards_like(separate, schedule)):
        check_schedule(changed)
        assert {"R", "G"} & {a.op for a in changed.actions()} == ({"R", "G"} if gather else {"R"})
    assert simulate(separate, costs).makespan < simulate(schedule, costs).makespan
    assert changes[-1].offloads and not changes[0].offloads


def test_a_schedule_with_a_problem_stays_one() -> None:
    assert "stage 0, microbatch 1" in find_problems(with_reductions(parse_schedule("rank 0: F0.0 F0.1 BW0.0")))[0]
    forward = parse_schedule("rank 0: F0.0 R0.0")
    assert any("R0.0 on rank 0 waits for" in x or "is missing" in x for x in find_problems(forward))
    with pytest.raises(ScheduleError, match=r"R0\.0 on rank 0 waits for W0\.0 or BW0\.0"):
        simulate(forward, CostProfile.uniform(1))
