"""Stages that form a graph: spans, towers, stages shared by ranks that run together or apart, ops that users insert."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    Action,
    CostProfile,
    Link,
    OpSpec,
    Placement,
    Schedule,
    Traversal,
    Wait,
    bidirectional,
    build_graph,
    check_schedule,
    circular,
    explicit,
    find_problems,
    generate,
    one_to_one,
    parse_schedule,
    read_schedule,
    register_op,
    simulate,
    towers,
    traverse,
    with_shared,
    with_span,
    write_schedule,
)
from jaxpipe.schedule.files import from_costs, to_costs, to_placement
from jaxpipe.schedule.ir import _REGISTRY
from jaxpipe.schedule.passes import braid, insert, offload, separate_gradients
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.best import best_schedule
from jaxpipe.search.bounds import lower_bound, span_lower_bound
from tests.support.schedule_strategies import random_schedule


@pytest.fixture(autouse=True)
def _ops() -> Iterator[None]:
    registered = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(registered)


def rows(*texts: str, placement: Placement, m: int) -> Schedule:
    """Return a schedule written by hand."""
    lines = [f"rank {r}: {text}" for r, text in enumerate(texts)]
    header = str(Schedule("x", placement, m, ((),) * placement.num_ranks)).splitlines()
    return parse_schedule("\n".join([*(x for x in header if not x.startswith("rank")), *lines]) + "\n")


LOSS_OVER_TWO = with_span(explicit(2, [0, 1, 1]), {2: 2})
PAIRS = ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 F2.0 BW2.0 BW1.0 BW1.1")


# Spans.


def test_a_stage_of_span_two_waits_for_both_microbatches_and_frees_both() -> None:
    schedule = rows(*PAIRS, placement=LOSS_OVER_TWO, m=2)
    check_schedule(schedule)
    costs = replace(CostProfile.uniform(3, comm=0.25), boundary_bytes=(1.0, 0.0, 0.0), link=Link(0.25, 4.0))
    timeline = simulate(schedule, costs)
    starts = {str(e.action): e.start_s for e in timeline.events if e.lane == "compute"}
    # F0.1 ends at 2, its boundary takes 1/4 s and 1/4 s a byte
    assert (starts["F1.1"], starts["F2.0"], starts["BW2.0"], starts["BW1.0"]) == (2.5, 3.5, 4.5, 6.5)
    assert timeline.makespan == 6.5 + 2 * 2 + 0.5 + 2


def test_a_cotangent_back_to_a_smaller_span_moves_once_with_all_its_parts() -> None:
    placement = with_span(one_to_one(2), {1: 2})
    schedule = rows("F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0", placement=placement, m=2)
    check_schedule(schedule)
    costs = replace(CostProfile.uniform(2), boundary_bytes=(1.0, 0.0), link=Link(0.0, 1.0), boundary_buffers=True)
    timeline = simulate(schedule, costs)
    sends = [(str(e.action), e.start_s, e.end_s) for e in timeline.events if e.lane == "send"]
    assert sends == [("F0.0", 1.0, 2.0), ("F0.1", 2.0, 3.0), ("BW1.0", 6.0, 8.0)]
    assert timeline.makespan == 12
    # while BW1.0 runs, room for two cotangents waits on rank 0, beside two residuals
    assert max(timeline.memory[0].bytes) == 4


def test_a_coarse_stage_in_the_middle() -> None:
    placement = with_span(one_to_one(3), {1: 2})
    schedule = rows("F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0", "F2.0 F2.1 BW2.0 BW2.1", placement=placement, m=2)
    check_schedule(schedule)
    # 2 F, F1.0, 2 F and 2 BW of stage 2, BW1.0, 2 BW
    assert simulate(schedule, CostProfile.uniform(3)).makespan == 2 + 1 + 2 + 4 + 2 + 4


def test_shares_of_a_span_are_those_of_one_microbatch() -> None:
    schedule = rows(*PAIRS, placement=LOSS_OVER_TWO, m=2)
    costs = replace(
        CostProfile.uniform(3), residual_bytes=(1.0, 1.0, 2.0), w_residual_bytes=(1.0,) * 3, offloadable_bytes=()
    )
    assert simulate(schedule, costs).peak_activations == (2.0, 2.0)  # two microbatches, all that the rank runs for them


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 F2.0 F2.1 BW2.0 BW1.0 BW1.1"), "groups of 2 microbatches 0..0"),
        (("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F2.0 F1.1 BW2.0 BW1.0 BW1.1"), "F2.0 stands before F1.1, which it waits for"),
        (
            ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 F2.0 BW1.0 BW2.0 BW1.1"),
            "BW1.0 stands before BW2.0, which it waits for",
        ),
        (("F0.0 BW0.0 F0.1 BW0.1", PAIRS[1]), "deadlock"),
        (("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"), "F of stage 2, microbatch 0 on rank 1 is missing"),
    ],
)
def test_mutants_of_a_span_are_refused(wrong: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule(rows(*wrong, placement=LOSS_OVER_TWO, m=2))


def test_a_span_must_divide_the_microbatches() -> None:
    message = "stage 2 runs once per 2 microbatches, and 3 is no multiple"
    assert message in find_problems(rows(*PAIRS, placement=LOSS_OVER_TWO, m=3))[0]
    with pytest.raises(ScheduleError, match=message):
        traverse(LOSS_OVER_TWO, 3, Traversal("forward"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_span(one_to_one(2), {2: 2}), "stage 2 with a span is outside 0..1"),
        (
            lambda: with_span(one_to_one(2), {0: 0}),
            "spans are 0 1; want a whole number of at least 1 for each of 2 stages",
        ),
        (lambda: replace(one_to_one(2), span=(1,)), "spans are 1; want"),
        (lambda: with_span(bidirectional(2), {0: 2}), "spans are 2 1, and there are 2 flows"),
        (lambda: towers({"a": one_to_one(2)}, join=("b",)), "join names 'b'; want some of a"),
        (lambda: towers({"a": one_to_one(2)}, join=()), "join names nothing; want some of a"),
        (lambda: towers({"a": bidirectional(2)}, join=("a",)), "'a' has 2 flows; a tower has one"),
    ],
)
def test_placements_that_can_not_be(make: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("suffix", [".sched", ".json"])
def test_spans_round_trip(tmp_path: object, suffix: str) -> None:
    schedule = rows(*PAIRS, placement=LOSS_OVER_TWO, m=2)
    assert "spans: 1 1 2\n" in str(schedule)
    assert parse_schedule(str(schedule)) == schedule
    write_schedule(schedule, path := f"{tmp_path}/x{suffix}")
    assert read_schedule(path) == schedule
    with pytest.raises(ScheduleError, match="CSV can't say that stages are not a chain, or have spans"):
        write_schedule(schedule, f"{tmp_path}/x.csv")


def test_only_a_placement_with_spans_says_so() -> None:
    assert "span" not in to_placement(one_to_one(2)) and "spans" not in str(generate("1f1b", 2, 2))
    assert to_placement(LOSS_OVER_TWO)["span"] == [1, 1, 2]


@pytest.mark.parametrize(("line", "message"), [("1 x 2", "'x' in 'spans: 1 x 2'"), ("1 2", "spans are 1 2; want")])
def test_a_wrong_line_of_spans_is_named(line: str, message: str) -> None:
    text = str(rows(*PAIRS, placement=LOSS_OVER_TWO, m=2)).replace("spans: 1 1 2", f"spans: {line}")
    with pytest.raises(ScheduleError, match=f"line 6: .*{message}"):
        parse_schedule(text)


def _graph(rng: random.Random) -> Placement:
    """Return a random DAG on random ranks, with spans, and perhaps a shared stage."""
    p, n = rng.randint(1, 3), rng.randint(3, 6)
    groups = [*range(p), *(rng.randrange(p) for _ in range(n - p))]
    edges = {(a, b) for b in range(1, n) for a in rng.sample(range(b), rng.randint(0, min(b, 2)))}
    placement = with_span(explicit(p, groups[:n], sorted(edges)), {s: rng.choice((1, 1, 2, 4)) for s in range(n)})
    return with_shared(placement, [rng.randrange(n)]) if rng.random() < 0.3 else placement


@pytest.mark.parametrize("seed", range(25))
def test_rules_order_random_graphs_with_spans(seed: int) -> None:
    rng = random.Random(seed)
    placement, m = _graph(rng), 4 * rng.randint(1, 2)
    costs = replace(
        CostProfile.uniform(placement.num_stages),
        f_s=tuple(rng.choice((0.0, 1.0, 2.0)) for _ in range(placement.num_stages)),
        boundary_bytes=tuple(rng.choice((0.0, 0.5, 1.0)) for _ in range(placement.num_stages)),
        link=Link(0.25, 2.0),
    )
    for rules in (Traversal("forward"), Traversal("interleaved", forward="depth", backward="depth")):
        schedule = traverse(placement, m, rules, costs)
        check_schedule(schedule)
        timeline = simulate(schedule, costs)
        assert lower_bound(placement, m, costs) <= timeline.makespan * (1 + 1e-9)
        assert span_lower_bound(placement, m, costs) <= timeline.max_span * (1 + 1e-9)
        assert parse_schedule(str(schedule)) == schedule
        assert all(curve.bytes[-1] == 0 for curve in timeline.memory)
        for rewritten in (
            separate_gradients(schedule, costs),
            offload(schedule, costs).schedule,
            braid(
                schedule, replace(costs, f_comm_s=(0.5,) * placement.num_stages, b_comm_s=(0.5,) * placement.num_stages)
            ),
        ):
            check_schedule(rewritten)


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_with_spans_follow_their_definition(seed: int) -> None:
    """Every wait of a random valid schedule, against the definition: actions that share a microbatch."""
    rng = random.Random(seed)
    placement, m = _graph(rng), 4
    schedule = random_schedule(placement, m, rng)
    check_schedule(schedule)
    graph = build_graph(schedule)
    for n, slot in enumerate(graph.slots):
        (action,) = slot.actions
        stages = {"F": placement.predecessors, "B": placement.successors, "BW": placement.successors}.get(action.op)
        microbatches = _microbatches(placement, action)
        expected = {
            (a.stage, a.microbatch)
            for row in schedule.rows
            for x in row
            for a in x.actions
            if stages and a.stage in stages(action.stage) and _microbatches(placement, a) & microbatches
        }
        waited_for = {a for x in graph.waits[n] for a in graph.slots[graph.source(x)].actions}
        assert {(a.stage, a.microbatch) for a in waited_for if a.stage != action.stage} == expected


def _microbatches(placement: Placement, action: Action) -> set[int]:
    g = placement.span[action.stage]
    return set(range(action.microbatch * g, (action.microbatch + 1) * g))


# Towers.


def _one_f_one_b(p: int) -> Traversal:
    return Traversal("backward", in_flight_per_stage=(*range(p, 0, -1), *range(p, 0, -1), 1))


def _free_loss(placement: Placement) -> CostProfile:
    free = tuple(float(s < placement.num_stages - 1) for s in range(placement.num_stages))
    return replace(
        CostProfile.uniform(placement.num_stages),
        f_s=free, b_s=free, w_s=free, bw_s=tuple(2 * x for x in free), residual_bytes=free, w_residual_bytes=free,
        offloadable_bytes=free,
    )  # fmt: skip


@pytest.mark.parametrize(("m", "makespan"), [(8, 33), (16, 57)])
def test_two_towers_of_one_f_one_b_take_what_one_takes(m: int, makespan: int) -> None:
    placement = towers({"image": one_to_one(4), "text": one_to_one(4)}, join=("image",))
    costs = _free_loss(placement)
    schedule = traverse(placement, m, _one_f_one_b(4), costs)
    check_schedule(schedule)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == makespan
    assert timeline.peak_activations == (4, 3, 2, 1) * 2


def test_towers_stand_side_by_side_and_meet_in_a_last_stage() -> None:
    placement = towers({"image": circular(2, 2), "text": one_to_one(3)}, join=("text", "image"))
    assert placement.flows == (((0,), (1,), (0,), (1,), (2,), (3,), (4,), (4, 1)),)
    assert placement.edges == ((0, 1), (1, 2), (2, 3), (3, 7), (4, 5), (5, 6), (6, 7))
    assert parse_schedule(str(Schedule("x", placement, 1, ((),) * 5))).placement == placement
    fork = explicit(2, [0, 1, 1], [(0, 1), (0, 2)])
    assert towers({"a": with_span(fork, {2: 2})}, ["a"]).edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert towers({"a": with_span(fork, {2: 2})}, ["a"]).span == (1, 1, 2, 1)


def test_mixed_rules_with_separation_and_a_loss_over_groups() -> None:
    placement = with_span(towers({"image": circular(4, 2), "text": one_to_one(4)}, join=("image",)), {12: 4})
    costs = replace(_free_loss(placement), link=Link(0.1))
    rules = {
        range(4): Traversal("interleaved", forward="breadth:4", backward="depth:4"),
        range(4, 8): Traversal("backward", in_flight_per_stage=7),
    }
    schedule = traverse(placement, 8, rules, costs)
    check_schedule(schedule)
    before = simulate(schedule, costs)
    assert len([a for a in schedule.actions(3) if a.op == "F" and a.stage == 12]) == 2
    assert max(before.peak_activations) >= 4  # all forwards of a group come before its first backward
    separated = separate_gradients(schedule, costs)
    check_schedule(separated)
    assert simulate(separated, costs).makespan < before.makespan


def test_what_orders_chains_refuses_other_graphs_in_one_line() -> None:
    placement = towers({"image": one_to_one(2), "text": one_to_one(2)}, join=("image",))
    for other in (placement, LOSS_OVER_TWO):
        with pytest.raises(ScheduleError, match="'traverse' orders any placement") as error:
            Problem.of(other, 4)
        assert "\n" not in str(error.value)
    with pytest.raises(ScheduleError, match="5 stages") as error:
        generate("1f1b", 4, 8, costs=CostProfile.uniform(5))
    with pytest.raises(ScheduleError):
        best_schedule(4, 8, CostProfile.uniform(5))


# Stages shared by ranks.


def _members_that_run_apart() -> tuple[Schedule, CostProfile]:
    """Return a head V on both ranks that each runs by itself, and N, which waits for the head of all ranks."""
    part = OpSpec("V", "compute", (Wait(("F",), "pred"),), "v_s", sends="succ", together=False)
    register_op(part)
    register_op(OpSpec("N", "compute", (Wait(("V",), "group"),), "n_s"))
    register_op(OpSpec("P", "compute", (Wait(("V",), "pred"),), "n_s"))
    placement = explicit(3, [0, (0, 1), 2])
    texts = ("F0.0 V1.0 N1.0 F1.0 BW1.0 BW0.0", "V1.0 N1.0 F1.0 BW1.0", "P2.0 F2.0 BW2.0")
    costs = replace(
        CostProfile.uniform(3, comm=0.5),
        extra=(("v_s", (0.0, 2.0, 0.0)), ("n_s", (0.0, 1.0, 1.0))),
        group_comm_s=(0.0, 0.25, 0.0),
    )
    return rows(*texts, placement=placement, m=1), costs


def test_members_apart_and_what_waits_for_all_of_them() -> None:
    schedule, costs = _members_that_run_apart()
    check_schedule(schedule)
    starts = {(e.rank, str(e.action)): e.start_s for e in simulate(schedule, costs).events if e.lane == "compute"}
    # F0.0 ends at 1: rank 0 has it at once, rank 1 half a second later; each V takes 2, the collective 1/4
    assert (starts[0, "V1.0"], starts[1, "V1.0"]) == (1.0, 1.5)
    assert (starts[0, "N1.0"], starts[1, "N1.0"]) == (3.75, 3.75)
    assert starts[2, "P2.0"] == 3.5 + 0.25 + 0.5
    assert starts[0, "F1.0"] == starts[1, "F1.0"] == 4.75


def test_members_together_start_at_once() -> None:
    schedule, costs = _members_that_run_apart()
    register_op(OpSpec("U", "compute", (Wait(("F",), "pred"),), "v_s", sends="succ"))
    united = parse_schedule(str(schedule).replace("V", "U").replace("N1.0 ", "").replace("P2.0 ", ""))
    check_schedule(united)
    starts = {(e.rank, str(e.action)): e.start_s for e in simulate(united, costs).events if e.lane == "compute"}
    assert starts[0, "U1.0"] == starts[1, "U1.0"] == 1.5


def test_a_member_that_is_missing_and_a_circle_of_members_are_refused() -> None:
    schedule, _ = _members_that_run_apart()
    torn = parse_schedule(str(schedule).replace("rank 1: V1.0 ", "rank 1: "))
    assert any("V1.0 is on rank 0 but not on rank 1" in x for x in find_problems(torn))
    late = parse_schedule(str(schedule).replace("rank 1: V1.0 N1.0 F1.0", "rank 1: F1.0 V1.0 N1.0"))
    assert "deadlock" in find_problems(late)[0]


def test_barriers_in_files() -> None:
    _, costs = _members_that_run_apart()
    assert from_costs(to_costs(costs)) == costs
    assert "group_comm_s" not in to_costs(CostProfile.uniform(2))


def test_rules_wait_for_all_members() -> None:
    register_op(OpSpec("V", "compute", (Wait(("F",), "self"),), "v_s", sends="succ", together=False, required=True))
    register_op(OpSpec("N", "compute", (Wait(("V",), "group"),), "n_s", required=True))
    placement = explicit(2, [0, (0, 1)])
    costs = replace(CostProfile.uniform(2), extra=(("v_s", (1.0, 2.0)), ("n_s", (1.0, 1.0))), group_comm_s=(0.0, 0.5))
    schedule = traverse(placement, 3, Traversal("backward"), costs)
    check_schedule(schedule)
    events = {(e.rank, str(e.action)): e for e in simulate(schedule, costs).events if e.lane == "compute"}
    for i in range(3):
        last_end = max(events[r, f"V1.{i}"].end_s for r in (0, 1))
        assert all(events[r, f"N1.{i}"].start_s >= last_end + 0.5 for r in (0, 1))


# Ops that users insert.


def test_insert_stands_right_behind_what_it_follows() -> None:
    register_op(OpSpec("Norm", "compute", (Wait(("F",), "self"),), "norm_s"))
    schedule = generate("1f1b", 2, 3)
    extended = insert(schedule, "Norm", after="F", stages=(1,))
    assert [" ".join(map(str, row)) for row in extended.rows] == [
        " ".join(map(str, schedule.rows[0])),
        "F1.0 Norm1.0 BW1.0 F1.1 Norm1.1 BW1.1 F1.2 Norm1.2 BW1.2",
    ]
    late = insert(schedule, "Norm", after="BW", stages=[0, 1])
    assert sum(a.op == "Norm" for r in range(2) for a in late.actions(r)) == 6
    simulate(extended, replace(CostProfile.uniform(2), extra=(("norm_s", (0.1, 0.1)),)))


def test_insert_behind_a_braid_a_span_and_on_every_rank_of_a_group() -> None:
    register_op(OpSpec("Norm", "compute", (Wait(("F",), "self"),), "f_s"))
    braided = insert(generate("stp", 2, 4), "Norm", after="F", stages=range(4))
    assert sum(a.op == "Norm" for r in range(2) for a in braided.actions(r)) == 16
    spanned = insert(rows(*PAIRS, placement=LOSS_OVER_TWO, m=2), "Norm", after="F", stages=[2])
    assert str(spanned.rows[1][3]) == "Norm2.0"
    shared = traverse(with_shared(one_to_one(2), [1]), 2, Traversal("forward"))
    assert [sum(a.op == "Norm" for a in insert(shared, "Norm", after="F", stages=[1]).actions(r)) for r in (0, 1)] == [
        2,
        2,
    ]


def test_insert_waits_in_its_row_for_what_other_ranks_make() -> None:
    """The exchange of two towers: behind the F of the last stage of one, when that of the other has ended as well."""
    register_op(OpSpec("Sync", "compute", (Wait(("F",), "self"), Wait(("BW",), "succ")), "f_s"))
    schedule = generate("1f1b", 4, 8)
    extended = insert(schedule, "Sync", after="F", stages=range(3))
    check_schedule(extended)
    for before, after in zip(schedule.rows, extended.rows, strict=True):
        assert tuple(x for x in after if x.actions[0].op != "Sync") == before
    row = list(map(str, extended.rows[2]))
    assert row[:4] == ["F2.0", "F2.1", "Sync2.0", "BW2.0"]


def test_what_peers_wait_for() -> None:
    """Ends of towers that exchange: a transfer each way, behind the F of either, and nothing else is later for it."""
    register_op(OpSpec("Share", "compute", (Wait(("F",), "self"),), "share_s", sends="peer"))
    register_op(OpSpec("Meet", "compute", (Wait(("Share",), "self"), Wait(("Share",), "peer")), "meet_s"))
    placement = towers({"image": one_to_one(2), "text": one_to_one(1)}, join=("image",))
    assert [placement.peers(s) for s in range(4)] == [(), (2,), (1,), ()]
    costs = replace(_free_loss(placement), link=Link(0.25), extra=(("share_s", (0.0,) * 4), ("meet_s", (0.0,) * 4)))
    schedule = traverse(placement, 4, Traversal("backward", in_flight=(3, 2, 4)), costs)
    extended = insert(insert(schedule, "Share", after="F", stages=(1, 2)), "Meet", after="Share", stages=(1, 2))
    events = {str(e.action): e for e in simulate(extended, costs).events if e.lane == "compute"}
    for i in range(4):
        both = {s: events[f"Share{s}.{i}"].end_s for s in (1, 2)}
        assert events[f"Meet1.{i}"].start_s >= both[2] + 0.25 and events[f"Meet2.{i}"].start_s >= both[1] + 0.25
    row = list(map(str, extended.rows[2]))
    assert row.index("F2.1") < row.index("Meet2.0") < row.index("BW2.0")
    assert simulate(extended, costs).makespan == simulate(schedule, costs).makespan


def test_inserted_ops_may_wait_for_each_other() -> None:
    register_op(OpSpec("Send", "compute", (Wait(("F",), "self"),), "f_s", sends="succ"))
    register_op(OpSpec("Take", "compute", (Wait(("Send",), "pred"),), "f_s"))
    schedule = insert(generate("1f1b", 2, 4), "Send", after="F", stages=[0])
    check_schedule(insert(schedule, "Take", after="F", stages=[1]))
    register_op(OpSpec("Down", "compute", (Wait(("F",), "self"), Wait(("Down",), "pred")), "f_s", sends="succ"))
    check_schedule(insert(generate("1f1b", 4, 4), "Down", after="F", stages=range(4)))


@pytest.mark.parametrize(
    ("op", "after", "stages", "message"),
    [
        ("Nrom", "F", (0,), "unknown op 'Nrom'"),
        ("Norm", "F", (4,), "insert Norm: stage 4 has no place in 0..1"),
        ("Norm", "W", (1,), "insert Norm: stage 1 has no W to stand behind, but BW F"),
        ("Lost", "F", (1,), "waits for Norm1.0, which the schedule does not contain"),
        ("F", "F", (1,), "F1.0 appears twice"),
        ("Ring", "F", (1,), "Ring1.0"),
    ],
)
def test_insert_refuses_in_words(op: str, after: str, stages: tuple[int, ...], message: str) -> None:
    register_op(OpSpec("Norm", "compute", (Wait(("F",), "self"),), "norm_s"))
    register_op(OpSpec("Lost", "compute", (Wait(("Norm",), "self"),), "norm_s"))
    register_op(OpSpec("Ring", "compute", (Wait(("Ring",), "self"),), "norm_s"))
    with pytest.raises(ScheduleError, match=message):
        insert(generate("1f1b", 2, 4), op, after=after, stages=stages)
