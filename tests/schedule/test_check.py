"""The checker: accepts what is valid, and names the rule for each of many mutants that break exactly one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    Action,
    Braid,
    CostProfile,
    MemoryEffect,
    OpSpec,
    Schedule,
    Slot,
    Wait,
    bidirectional,
    build_graph,
    check_schedule,
    circular,
    explicit,
    find_problems,
    one_to_one,
    parse_schedule,
    register_op,
    simulate,
    with_shared,
)
from tests.support.schedule_strategies import gpipe_rows, one_f_one_b_rows, random_schedule, random_valid_schedules

HOLD = register_op(
    OpSpec("Hold", "compute", (Wait(("F",), "self"),), "f_s", (MemoryEffect("start", +1, "boundary_bytes"),))
)
MEET = register_op(
    OpSpec(
        "Along",
        "compute",
        (Wait(("F",), "self"), Wait(("Along",), "pred")),
        "f_s",
        description="sync along the pipeline",
    )
)


def rows(*lines: str, m: int = 2, header: str = "one-to-one", edges: str = "chain") -> Schedule:
    """Return a schedule from its rows' text; ``header`` is a placement's kind, or kind and flows."""
    kind, _, rest = header.partition(" ")
    text = f"# jaxpipe schedule 1\nname: t\nmicrobatches: {m}\nplacement: {kind} ranks={len(lines)} {rest}\nedges: {edges}\n"
    return parse_schedule(text + "".join(f"rank {r}: {line}\n" for r, line in enumerate(lines)))


BASE = ("F0.0 F0.1 B0.0 W0.0 BW0.1", "F1.0 B1.0 F1.1 BW1.1 W1.0")
SHARED = "explicit flow=0,0+1"
SHARED_ROWS = ("F0.0 F1.0 BW1.0 BW0.0", "F1.0 BW1.0")


@given(random_valid_schedules(offload=True, braids=True))
def test_random_valid_schedules_pass(schedule: Schedule) -> None:
    check_schedule(schedule)
    assert find_problems(schedule) == []


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_families_written_by_hand_pass(p: int, m: int) -> None:
    check_schedule(one_f_one_b_rows(p, m))
    check_schedule(gpipe_rows(p, m))


def test_bases_of_the_mutants_pass() -> None:
    check_schedule(rows(*BASE))
    check_schedule(rows(*SHARED_ROWS, m=1, header=SHARED))
    check_schedule(rows("F0.0 O0.0 F0.1 L0.0 BW0.0 BW0.1"))
    check_schedule(rows("F0.0 F0.1+BW0.0 BW0.1"))
    check_schedule(rows("F0.0 Along0.0 BW0.0", "F1.0 Along1.0 BW1.0", m=1))


def mutant(*lines: str, **options: str | int) -> Callable[[], Schedule]:
    return lambda: rows(*lines, **options)  # type: ignore[arg-type]


A, B = BASE
MUTANTS: dict[str, tuple[Callable[[], Schedule], str]] = {
    "missing F of the first stage": (mutant(A.replace("F0.1 ", ""), B), "F of stage 0, microbatch 1 on rank 0 is missing"),
    "missing B": (mutant(A.replace("B0.0 ", "", 1), B), "B of stage 0, microbatch 0 on rank 0 is missing"),
    "missing W": (mutant(A.replace(" W0.0", ""), B), "W of stage 0, microbatch 0 on rank 0 is missing"),
    "missing W at the end": (mutant(A, B.replace(" W1.0", "")), "W of stage 1, microbatch 0 on rank 1 is missing"),
    "F twice": (mutant(A + " F0.0", B), r"F0\.0 appears twice on rank 0 \(slots 0 and 5\)"),
    "B twice": (mutant(A + " B0.0", B), r"B0\.0 appears twice on rank 0"),
    "W twice": (mutant(A, B + " W1.0"), r"W1\.0 appears twice on rank 1"),
    "BW twice": (mutant(A + " BW0.1", B), r"BW0\.1 appears twice on rank 0"),
    "O twice": (mutant("F0.0 O0.0 O0.0 L0.0 BW0.0", m=1), r"O0\.0 appears twice"),
    "L twice": (mutant("F0.0 O0.0 L0.0 L0.0 BW0.0", m=1), r"L0\.0 appears twice"),
    "user op twice": (mutant("F0.0 Along0.0 Along0.0 BW0.0", m=1), r"Along0\.0 appears twice"),
    "twice in one braid": (mutant("F0.0+F0.0 BW0.0", m=1), r"F0\.0 appears twice on rank 0 \(slots 0 and 0\)"),
    "twice on a group": (mutant(SHARED_ROWS[0], "F1.0 BW1.0 F1.0", m=1, header=SHARED), r"F1\.0 appears twice on rank 1"),
    "full backward next to B": (
        mutant(A + " B0.1", B),
        r"B of stage 0, microbatch 1 on rank 0 is performed 2 times, by B0\.1 and BW0\.1|by BW0\.1 and B0\.1",
    ),
    "full backward next to W": (mutant(A + " W0.1", B), "W of stage 0, microbatch 1 on rank 0 is performed 2 times"),
    "stage out of range": (mutant(A + " F2.0", B), r"F2\.0 on rank 0 is out of range: stages are 0\.\.1"),
    "microbatch out of range": (mutant(A, B + " F1.2"), r"F1\.2 on rank 1 is out of range: .*microbatches 0\.\.1"),
    "negative stage": (
        lambda: with_rows(rows(*BASE), 0, (*rows(*BASE).rows[0], Action("F", -1, 0))),
        r"F-1\.0 on rank 0 is out of range",
    ),
    "wrong rank": (
        mutant(A.replace("W0.0 ", ""), B + " W0.0"),
        r"W0\.0 is on rank 1, but the placement runs stage 0 of microbatch 0 on rank 0",
    ),
    "O on the wrong rank": (mutant(A, B + " O0.1"), r"O0\.1 is on rank 1, but the placement"),
    "flows swapped": (
        lambda: dataclasses.replace(rows(*BASE), placement=bidirectional(2)),
        r"F0\.1 is on rank 0, but the placement runs stage 0 of microbatch 1 on rank 1",
    ),
    "a row too few": (lambda: dataclasses.replace(rows(*BASE), rows=rows(*BASE).rows[:1]), "has 1 rows for 2 ranks"),
    "a row too many": (lambda: dataclasses.replace(rows(*BASE), rows=(*rows(*BASE).rows, ())), "has 3 rows for 2 ranks"),
    "no microbatches": (lambda: dataclasses.replace(rows(*BASE), num_microbatches=0), "number of microbatches is 0"),
    "unknown op": (
        lambda: with_rows(rows(*BASE), 0, (*rows(*BASE).rows[0], Action("Nope", 0, 0))),
        r"Nope0\.0 on rank 0: unknown op 'Nope'",
    ),
    "O without L": (mutant("F0.0 O0.0 BW0.0", m=1), r"O0\.0 on rank 0 gives back offloadable_bytes .*; add L0\.0"),
    "L without O": (mutant("F0.0 L0.0 BW0.0", m=1), r"L0\.0 on rank 0 waits for O0\.0, which the schedule does not contain"),
    "read before L": (mutant("F0.0 O0.0 BW0.0 L0.0", m=1), r"BW0\.0 stands before L0\.0, which it waits for, on rank 0"),
    "split read before L": (mutant("F0.0 O0.0 B0.0 L0.0 W0.0", m=1), r"B0\.0 stands before L0\.0"),
    "L before O": (mutant("F0.0 L0.0 O0.0 BW0.0", m=1), r"L0\.0 stands before O0\.0, which it waits for"),
    "S without O": (mutant("F0.0 S0.0 BW0.0", m=1), r"S0\.0 on rank 0 waits for O0\.0, which the schedule does not contain"),
    "S before O": (mutant("F0.0 S0.0 O0.0 L0.0 BW0.0", m=1), r"S0\.0 stands before O0\.0, which it waits for"),
    "S after L": (mutant("F0.0 O0.0 L0.0 S0.0 BW0.0", m=1), r"L0\.0 stands before S0\.0, which it waits for"),
    "O before F": (mutant("O0.0 F0.0 L0.0 BW0.0", m=1), r"O0\.0 stands before F0\.0, which it waits for"),
    "B before F": (mutant("F0.0 B0.1 F0.1 W0.1 BW0.0"), r"B0\.1 stands before F0\.1.*\(slots 1 and 2\)"),
    "W before B": (mutant("F0.0 W0.0 B0.0", m=1), r"W0\.0 stands before B0\.0, which it waits for"),
    "stage order on one rank": (mutant("F1.0 F0.0 BW1.0 BW0.0", m=1, header="circular chunks=2"), r"F1\.0 stands before F0\.0"),
    "braid of dependent actions": (mutant("F0.0+BW0.0", m=1), r"braid F0\.0\+BW0\.0 on rank 0: one of its actions waits"),
    "braid with a host op": (
        lambda: with_rows(rows("F0.0 F0.1 BW0.0 BW0.1"), 0, braid_row()),
        r"braid F0\.1\+O0\.0 on rank 0 holds O, which does not run on the compute lane",
    ),
    "R before a W": (mutant(A.replace("W0.0", "R0.0 W0.0"), B + " R1.0"), r"R0\.0 stands before BW0\.1, which it waits for"),
    "R twice": (mutant(A + " R0.0 R0.0", B + " R1.0"), r"R0\.0 appears twice on rank 0"),
    "R of another microbatch": (mutant(A + " R0.0 R0.1", B + " R1.0"), r"R0\.1 on rank 0: R runs once a step, as R0\.0"),
    "R of one stage": (mutant(A + " R0.0", B), r"R1\.0 is missing on rank 1: R runs once a step on every stage, or on none"),
    "G after an F": (mutant(A.replace("F0.1", "G0.0 F0.1"), "G1.0 " + B), r"F0\.0 stands before G0\.0, which it waits for"),
    "R in a braid": (
        lambda: with_rows(rows("F0.0 BW0.0", m=1), 0, (Braid((Action("F", 0, 0), Action("R", 0, 0))), Action("BW", 0, 0))),
        r"braid F0\.0\+R0\.0 on rank 0 holds R, which does not run on the compute lane",
    ),
    "group lacks a member": (
        mutant("F0.0 F1.0 BW1.0 BW0.0", "F1.0", m=1, header=SHARED),
        "B of stage 1, microbatch 0 on rank 1 is missing",
    ),
    "group disagrees on the split": (
        mutant("F0.0 F1.0 BW1.0 BW0.0", "F1.0 B1.0 W1.0", m=1, header=SHARED),
        r"BW1\.0 is on rank 0 but not on rank 1: stage 1 runs on ranks 0, 1 together",
    ),
    "user op waits for nothing": (
        mutant("F0.0 BW0.0", "F1.0 Along1.0 BW1.0", m=1),
        r"Along1\.0 on rank 1 waits for Along0\.0, which the schedule does not contain",
    ),
    "user op keeps memory": (mutant("F0.0 Hold0.0 BW0.0", m=1), r"Hold0\.0 on rank 0 takes boundary_bytes and nothing gives"),
    "deadlock": (mutant("F0.0 BW0.0 F0.1 BW0.1", "F1.1 BW1.1 F1.0 BW1.0"), "deadlock: 2 of 2 ranks"),
    "deadlock of a group": (
        mutant("F0.0 F0.1 F1.1 F1.0 BW1.0 BW0.0 BW1.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1", header=SHARED),
        "deadlock: 2 of 2 ranks",
    ),
    "empty": (lambda: dataclasses.replace(rows(*BASE), rows=((), ())), "F of stage 0, microbatch 0 on rank 0 is missing|empty"),
}  # fmt: skip


def with_rows(schedule: Schedule, rank: int, row: tuple[Slot, ...]) -> Schedule:
    return dataclasses.replace(schedule, rows=(*schedule.rows[:rank], row, *schedule.rows[rank + 1 :]))


def braid_row() -> tuple[Slot, ...]:
    return (
        Action("F", 0, 0),
        Braid((Action("F", 0, 1), Action("O", 0, 0))),
        Action("L", 0, 0),
        Action("BW", 0, 0),
        Action("BW", 0, 1),
    )


@pytest.mark.parametrize("case", MUTANTS)
def test_mutant_is_caught(case: str) -> None:
    make, message = MUTANTS[case]
    with pytest.raises(ScheduleError, match=message):
        check_schedule(make())


def test_mutants_break_one_rule_each() -> None:
    """One wrong action is one problem: no echoes of the same mistake."""
    echoes = {"a row too few", "empty", "flows swapped", "group disagrees on the split", "wrong rank"}
    for case, (make, _) in MUTANTS.items():
        if case not in echoes:
            assert 1 <= len(find_problems(make())) <= 2, (case, find_problems(make()))


@given(random_valid_schedules(offload=True), st.randoms(use_true_random=False))
def test_dropping_or_repeating_any_action_is_caught(schedule: Schedule, rng: random.Random) -> None:
    rank = rng.choice([r for r, row in enumerate(schedule.rows) if row])
    row = schedule.rows[rank]
    k = rng.randrange(len(row))
    without = with_rows(schedule, rank, row[:k] + row[k + 1 :])
    if row[k].actions[0].op == "S":
        check_schedule(without)
    else:
        with pytest.raises(ScheduleError):
            check_schedule(without)
    at = rng.randrange(len(row) + 1)
    with pytest.raises(ScheduleError, match="appears twice"):
        check_schedule(with_rows(schedule, rank, (*row[:at], row[k], *row[at:])))


@given(random_valid_schedules(max_stages=4, max_microbatches=3), st.randoms(use_true_random=False))
def test_shuffled_rows_pass_exactly_when_they_can_run(schedule: Schedule, rng: random.Random) -> None:
    """The checker agrees with a plain search for a runnable action, whatever the order."""
    shuffled = schedule
    for rank, row in enumerate(schedule.rows):
        mixed = list(row)
        a, b = rng.randrange(len(row)), rng.randrange(len(row))
        mixed[a], mixed[b] = mixed[b], mixed[a]
        shuffled = with_rows(shuffled, rank, tuple(mixed))
    assert (find_problems(shuffled) == []) == _runs(shuffled)


def _runs(schedule: Schedule) -> bool:
    """Play the rows by hand: some rank's next action may run when its inputs are done, and on all its ranks if joint."""
    placement = schedule.placement
    rows = [list(schedule.actions(r)) for r in range(schedule.num_ranks)]
    finished: set[tuple[Action, int]] = set()

    def needs(action: Action, rank: int) -> bool:
        s, i = action.stage, action.microbatch

        def is_done(op: str, stage: int) -> bool:
            return all((Action(op, stage, i), r) in finished for r in placement.ranks(stage, i))

        if action.op == "F":
            return all(is_done("F", a) for a in placement.predecessors(s))
        if action.op == "W":
            return (Action("B", s, i), rank) in finished
        after = placement.successors(s)
        return (Action("F", s, i), rank) in finished and all(is_done("B", b) or is_done("BW", b) for b in after)

    has_progress = True
    while has_progress:
        has_progress = False
        for rank, row in enumerate(rows):
            if row and needs(row[0], rank):
                action = row[0]
                group = (rank,) if action.op == "W" else placement.ranks(action.stage, action.microbatch)
                if all(rows[r] and rows[r][0] == action and needs(action, r) for r in group):
                    for r in group:
                        finished.add((rows[r].pop(0), r))
                    has_progress = True
    return not any(rows)


# Messages.


def test_all_problems_are_collected() -> None:
    schedule = rows("F0.0 F0.0 F9.0 B0.0", "F1.0 BW1.0 L1.1 F1.1 W0.1 BW1.1")
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    text = "\n".join(caught.value.problems)
    for part in (
        "F0.0 appears twice",
        "F9.0 on rank 0 is out of range",
        "W0.1 is on rank 1, but",
        "F of stage 0, microbatch 1",
    ):
        assert part in text
    assert "L1.1 on rank 1 waits for O1.1" in text
    assert all(problem in str(caught.value) for problem in caught.value.problems)


def test_long_lists_of_problems_are_cut_in_the_message_only() -> None:
    schedule = dataclasses.replace(one_f_one_b_rows(2, 40), rows=(one_f_one_b_rows(2, 40).rows[0], ()))
    with pytest.raises(ScheduleError, match="and 80 more problems") as caught:
        check_schedule(schedule)
    assert len(caught.value.problems) == 120


def test_deadlock_message_shows_lines_blocked_actions_and_cycle() -> None:
    schedule = rows("F0.0 F0.1 BW0.1 BW0.0", "F1.0 BW1.0 F1.1 BW1.1", "F2.1 F2.0 BW2.0 BW2.1")
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    message = str(caught.value)
    assert "rank 0: F0.0 F0.1 >BW0.1< BW0.0   waits for BW1.1 on rank 1" in message
    assert "rank 1: F1.0 >BW1.0< F1.1 BW1.1   waits for BW2.0 on rank 2" in message
    assert "rank 2: >F2.1< F2.0 BW2.0 BW2.1   waits for F1.1 on rank 1" in message
    assert "cycle: BW1.0 waits for BW2.0 on rank 2, which stands behind F2.1, F2.1 waits for F1.1 on rank 1" in message
    with pytest.raises(ScheduleError) as simulated:
        simulate(schedule, CostProfile.uniform(3))
    assert str(simulated.value) == message


def test_group_deadlock_names_who_is_absent() -> None:
    make, _ = MUTANTS["deadlock of a group"]
    with pytest.raises(ScheduleError, match=r"rank 0: F0\.0 F0\.1 >F1\.1< .* waits for rank 1 to start F1\.1 together"):
        check_schedule(make())


# The graph.


def test_receiving_in_another_order_than_sending_is_legal() -> None:
    """Transfers are tagged: rank 1 takes microbatch 1 first although rank 0 sent it second."""
    check_schedule(rows("F0.0 F0.1 BW0.1 BW0.0", "F1.1 F1.0 BW1.1 BW1.0"))


def test_graph_of_a_dag_shares_one_transfer_per_destination() -> None:
    """Stage 0 feeds stages 1 and 2, both on rank 1: one activation goes over, two cotangents come back."""
    placement = explicit(2, [0, 1, 1], [(0, 1), (0, 2)])
    schedule = random_schedule(placement, 1, random.Random(0), split="full")
    graph = build_graph(schedule)
    assert sorted((str(t.action), t.src, t.dst, t.stage) for t in graph.transfers) == [
        ("BW1.0", 1, 0, 0),
        ("BW2.0", 1, 0, 0),
        ("F0.0", 0, 1, 0),
    ]


def test_graph_of_a_group() -> None:
    """Stage 1 on both ranks: rank 0 reads its own copy, rank 1 receives; the members of F1.0 are joined."""
    graph = build_graph(rows(*SHARED_ROWS, m=1, header=SHARED))
    assert [(str(t.action), t.src, t.dst) for t in graph.transfers] == [("F0.0", 0, 1)]
    assert [[str(graph.slots[n]) for n in group] for group in graph.joints] == [["F1.0"] * 2, ["BW1.0"] * 2]
    assert graph.slot_of("F", 1, 0, 1) == graph.row_start[1]
    assert graph.slot_of("W", 1, 0, 1) is None


def test_bidirectional_and_shared_placements_pass() -> None:
    for placement in (bidirectional(3), with_shared(circular(2, 2), [0, 3]), with_shared(bidirectional(2), [1])):
        for seed in range(5):
            check_schedule(random_schedule(placement, 4, random.Random(seed), offload=0.3, braid=0.3))


def test_placement_of_one_rank() -> None:
    check_schedule(random_schedule(one_to_one(1), 1, random.Random(0)))
