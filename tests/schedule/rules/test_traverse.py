"""Schedules by rules: the textbook against the families, ops and groups, functions, and one line for what can't be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpipe import schedule as room
from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    Action,
    CostProfile,
    Link,
    MemoryEffect,
    OpSpec,
    Placement,
    Schedule,
    Traversal,
    Wait,
    bidirectional,
    check_schedule,
    circular,
    explicit,
    generate,
    one_to_one,
    register_op,
    simulate,
    traverse,
    v_shape,
    wave,
    with_shared,
)
from jaxpipe.schedule.ir import _REGISTRY
from jaxpipe.schedule.passes import separate_gradients
from jaxpipe.schedule.rules import View
from tests.support.paths import ROOT

README = ROOT / "jaxpipe" / "schedule" / "rules" / "README.md"


def unit(num_stages: int, chunks: int) -> CostProfile:
    return CostProfile.uniform(num_stages, chunks=chunks)


def seconds_and_peak(schedule: Schedule) -> tuple[float, float]:
    check_schedule(schedule)
    timeline = simulate(schedule, unit(schedule.num_stages, schedule.num_chunks))
    return pytest.approx(timeline.makespan), pytest.approx(max(timeline.peak_activations))  # type: ignore[return-value]


@pytest.mark.parametrize("p", range(1, 13))
def test_rows_of_the_textbook_on_a_chain(p: int) -> None:
    falling = tuple(range(p, 0, -1))
    for m in range(1, 13):
        for family, rules in (
            ("1f1b", Traversal("backward", in_flight=falling)),
            ("1f1b", Traversal("interleaved", in_flight=falling)),
            ("eager-1f1b", Traversal("backward")),
            ("gpipe", Traversal("forward")),
        ):
            assert traverse(one_to_one(p), m, rules).rows == generate(family, p, m).rows, (family, m)
        assert (
            traverse(one_to_one(p), m, Traversal("backward", in_flight=falling), unit(p, 1)).rows
            == generate("1f1b", p, m).rows
        )


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_rows_of_breadth_first_loops(p: int, v: int) -> None:
    for m in range(1, 9):
        schedule = traverse(circular(p, v), m, Traversal("forward", forward="breadth", backward="depth"))
        assert schedule.rows == generate("looped-bfs", p, m, chunks=v).rows, m
    early_first = traverse(circular(1, 2), 2, Traversal("forward", forward="breadth", backward="breadth"))
    assert early_first.rows != generate("looped-bfs", 1, 2).rows


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_interleaved_where_p_divides_m(p: int, v: int) -> None:
    for m in (p, 2 * p, 3 * p):
        schedule = traverse(circular(p, v), m, Traversal("interleaved", forward=f"breadth:{p}", backward=f"depth:{p}"))
        assert seconds_and_peak(schedule) == seconds_and_peak(generate("interleaved-1f1b", p, m, chunks=v)), m


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_hanayo_where_m_is_p(p: int) -> None:
    schedule = traverse(wave(p, 2), p, Traversal("backward", forward="depth", backward="depth", in_flight=2 * p))
    assert seconds_and_peak(schedule) == seconds_and_peak(generate("hanayo", p, p))


def readme_names() -> dict[str, Any]:
    """Return the names that the README's Python blocks define."""
    names: dict[str, Any] = {name: getattr(room, name) for name in room.__all__}
    names |= {"unit": unit, "separate_gradients": separate_gradients}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    return names


TEXTBOOK = {
    # line of the README: family, whether rows are equal, (makespan, peak) of the line, of the family
    "gpipe": ("gpipe", True, (33, 8), (33, 8)),
    "one_f_one_b": ("1f1b", True, (33, 4), (33, 4)),
    "eager": ("eager-1f1b", True, (33, 7), (33, 7)),
    "interleaved": ("interleaved-1f1b", False, (28.5, 5.5), (28.5, 5.5)),
    "bfs": ("looped-bfs", True, (28.5, 8), (28.5, 8)),
    "dfs": ("looped-dfs", False, (28.5, 5.5), (28.5, 5.5)),
    "hanayo": ("hanayo", False, (30, 4), (32.5, 4)),
    "chimera": ("chimera", False, (31, 4), (29, 4)),
    "zb": ("zb-1p", False, (27, 4), (27, 4)),
    "dualpipe_v": ("dualpipe-v", False, (25.5, 4.5), (25.5, 4.5)),
}


def test_the_readme_says_what_comes_out() -> None:
    names = readme_names()
    for line, (family, same_rows, traversed, theirs) in TEXTBOOK.items():
        published = generate(family, 4, 8)
        assert (names[line].rows == published.rows) is same_rows, line
        assert (seconds_and_peak(names[line]), seconds_and_peak(published)) == (traversed, theirs), line
    for line in ("mine", "latest", "towers"):
        check_schedule(names[line])
    ahead = [0, 0]
    for action in names["mine"].rows[0]:
        ahead[action.stage == 4] += action.op == "F"
    assert sum(ahead) == 32


def splits(schedule: Schedule) -> int:
    return sum(a.op == "B" for rank in range(schedule.num_ranks) for a in schedule.actions(rank))


def test_separated() -> None:
    """Counts of splits are those in the README; ``separate_gradients`` makes three of its lines shorter at the same peak."""
    names = readme_names()
    assert (splits(names["zb"]), splits(names["dualpipe_v"])) == (24, 46)
    assert splits(generate("dualpipe-v", 4, 8)) == 22
    assert seconds_and_peak(traverse(v_shape(4), 8, names["both_deep"])) == (32, 4.5)
    for line in ("hanayo", "chimera", "interleaved"):
        before = names[line]
        after = separate_gradients(before, unit(before.num_stages, before.num_chunks))
        (longer, peak), (shorter, same) = seconds_and_peak(before), seconds_and_peak(after)
        assert (same, shorter.expected < longer.expected) == (peak.expected, True), line  # type: ignore[attr-defined]


def test_a_schedule_in_three_lines() -> None:
    """The one of schedule/README.md, and what the page says of it."""
    page = (README.parents[1] / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    assert len([line for line in block.splitlines() if line]) == 3
    names: dict[str, Any] = {}
    exec(block, names)
    assert seconds_and_peak(names["schedule"])[1] == 4
    short = separate_gradients(names["schedule"], unit(8, 2))
    assert seconds_and_peak(short) == seconds_and_peak(generate("v-zb", 4, 8)) == (25.5, 4)


def test_the_line_of_a_rule_reads_back() -> None:
    rules = Traversal(
        "interleaved",
        forward="breadth:4",
        backward="depth",
        in_flight=[4, 3, 2, 1],
        in_flight_per_stage=2,
        units=[2, 1],
    )
    line = "interleaved 2,1 forward=breadth:4 backward=depth in-flight=4,3,2,1 in-flight-per-stage=2"
    assert str(rules) == line
    assert Traversal.parse(line) == rules
    assert hash(Traversal.parse(line)) == hash(rules)
    assert Traversal.parse("forward") == Traversal("forward") == Traversal.parse(str(Traversal("forward")))
    assert Traversal("forward", in_flight=(3,)) == Traversal("forward", in_flight=3)


def nothing_at_all(view: View, action: Action) -> bool:
    return False


def test_functions_print_as_their_names_and_are_not_read() -> None:
    line = str(Traversal("forward", checks=[nothing_at_all], choose=max))  # type: ignore[arg-type]
    assert line == "forward 1,1 forward=breadth backward=breadth checks=nothing_at_all choose=max"
    for rules in (line, "forward choose=max"):
        with pytest.raises(ScheduleError, match="is a function, which a line can't hold"):
            Traversal.parse(rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("", "the type that goes first is ''"),
        ("backwards", "want forward, backward or interleaved"),
        ("forward forward=deep", "forward is 'deep'; want breadth, depth"),
        ("forward backward=depth:0", "backward is 'depth:0'"),
        ("forward backward=depth:", "backward is 'depth:'"),
        ("forward in-flight=x", "in_flight is 'x'; want a whole number"),
        ("forward in-flight=4,0", "in_flight is (4, 0)"),
        ("forward in-flight=-1", "in_flight is '-1'"),
        ("forward 1", "units is (1,); want two"),
        ("forward 1,2,3", "units is (1, 2, 3)"),
        ("forward 1,1 2,2", "units twice"),
        ("forward speed=3", "'speed' is unknown; known: forward= backward="),
        ("forward in-flight=99999999999999999999", "want a whole number"),
    ],
)
def test_lines_that_say_nothing(rules: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Traversal.parse(rules)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": 3}, "forward is 3"),
        ({"in_flight": True}, "in_flight is True"),
        ({"in_flight": ()}, "in_flight is ()"),
        ({"in_flight": "4"}, "in_flight is '4'"),
        ({"units": 1}, "units is 1"),
        ({"checks": nothing_at_all}, "checks is <function"),
        ({"checks": (1,)}, "checks is (1,)"),
        ({"choose": 1}, "choose is 1"),
    ],
)
def test_values_that_are_no_rules(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Traversal("forward", **arguments)


def picks(answer: object) -> Callable[[View, tuple[Action, ...]], Any]:
    def stubborn(view: View, ready: tuple[Action, ...]) -> Any:
        return answer

    return stubborn


def broken(view: View, action: Action) -> bool:
    raise ValueError("two\nlines")


CANNOT = {
    "limit": (v_shape(2), Traversal("backward", in_flight=1), "0, and in-flight=1 leaves it no room: raise it to at least 2"),
    "limits": (one_to_one(2), Traversal("backward", in_flight=(1, 2, 3)), "in-flight=1,2,3 is for 3, not 2: give one a rank"),
    "stages": (one_to_one(2), Traversal("backward", in_flight_per_stage=(1, 2, 3)), "is for 3, not 2: give one a stage"),
    "veto": (one_to_one(2), Traversal("backward", checks=[nothing_at_all]), "microbatch 0 can't go on: F0.0 is"),
    "never": (one_to_one(2), Traversal("backward", choose=picks(None)), "rank 0, and choose=stubborn takes nothing"),
    "other": (one_to_one(2), Traversal("backward", choose=picks(Action("F", 1, 0))), "on rank 0, and ready are F0.0 F0.1"),
    "number": (one_to_one(2), Traversal("backward", choose=picks(0)), "choose=stubborn answers int on rank 0"),
    "list": (one_to_one(2), Traversal("backward", choose=picks([1])), "choose=stubborn answers list on rank 0"),
    "raises": (one_to_one(2), Traversal("backward", checks=[broken]), "on rank 0 for F0.0: ValueError: two lines"),
    "gap": (one_to_one(2), {0: Traversal("backward")}, "rank 1 has no rules"),
    "twice": (one_to_one(2), {(0, 1): Traversal("backward"), 1: Traversal("forward")}, "the rules name rank 1, twice"),
    "beyond": (one_to_one(2), {range(3): Traversal("backward")}, "the rules name rank 2, and the last one is 1"),
    "odd key": (one_to_one(2), {None: Traversal("backward")}, "the rules name rank None"),
    "no rules": (one_to_one(2), ["backward"], "a rule is of type list; want a Traversal"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_is_one_line(case: str) -> None:
    placement, rules, message = CANNOT[case]
    with pytest.raises(ScheduleError) as caught:
        traverse(placement, 4, rules)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("microbatches", [0, -1, 2.0, True, "4"])
def test_microbatches_are_counted(microbatches: Any) -> None:
    with pytest.raises(ScheduleError, match="want a whole number of at least 1"):
        traverse(one_to_one(2), microbatches, Traversal("forward"))


def test_costs_are_for_the_stages() -> None:
    with pytest.raises(ScheduleError, match=r"3 stages.*2"):
        traverse(one_to_one(2), 4, Traversal("forward"), unit(3, 1))


def test_units_go_in_a_row() -> None:
    def row(rules: Traversal) -> str:
        return " ".join(a.op[0] for a in traverse(one_to_one(1), 6, rules).actions(0))

    assert row(Traversal("interleaved")) == "F B F B F B F B F B F B"
    assert row(Traversal("interleaved", units=(3, 2))) == "F F F B B F F F B B B B"
    assert row(Traversal("backward", units=(2, 1))) == "F F B B F F B B F F B B"
    assert row(Traversal("forward", units=(1, 1))) == "F F F F F F B B B B B B"
    assert row(Traversal("forward", units=(1, 2), in_flight=2)) == "F F B B F F B B F F B B"


def test_an_interval_waits_and_ends_with_its_stage() -> None:
    # m = 7 is no multiple of 3: the last interval of every stage has one microbatch
    schedule = traverse(circular(3, 2), 7, Traversal("forward", forward="breadth:3", backward="depth:3"))
    check_schedule(schedule)
    forwards = [(a.stage, a.microbatch) for a in schedule.actions(0) if a.op == "F"]
    assert forwards == [(s, i) for lot in ((0, 1, 2), (3, 4, 5), (6,)) for s in (0, 3) for i in lot]


def test_an_interval_that_could_never_go_on_ends() -> None:
    # from the latest stage on: stage 4 can't follow stage 0 before stage 2 has run
    check_schedule(traverse(circular(2, 3), 5, Traversal("interleaved", forward="depth:2", backward="breadth:2")))


def test_limits_keep_room_for_later_stages() -> None:
    """Greedy limits would fill a rank with first chunks, or with one flow."""
    for placement, limit in ((wave(4, 2), 2), (bidirectional(4), 2), (circular(2, 3), 3), (v_shape(3), 2)):
        for first in ("forward", "backward", "interleaved"):
            schedule = traverse(placement, 9, Traversal(first, in_flight=limit))
            check_schedule(schedule)
            for rank in range(schedule.num_ranks):
                steps = [1 if a.op == "F" else -1 for a in schedule.actions(rank)]
                assert max(itertools.accumulate(steps)) <= limit


def test_towers_keep_room_for_each_other() -> None:
    """Two sources and the stage where they meet on one rank: the later tower must not take all the room."""
    placement = explicit(1, [0, 0, 0], [(0, 2), (1, 2)])
    schedule = traverse(placement, 5, Traversal("backward", forward="depth", in_flight=3))
    check_schedule(schedule)


def test_steps_ignore_durations_and_costs_do_not() -> None:
    slow = CostProfile(
        f_s=(1.0, 4.0, 1.0), b_s=(1.0,) * 3, w_s=(1.0,) * 3, bw_s=(2.0,) * 3, residual_bytes=(1.0,) * 3,
        w_residual_bytes=(1.0,) * 3, link=Link(latency_s=0.5),
    )  # fmt: skip
    rules = Traversal("backward")
    steps, real = (traverse(one_to_one(3), 8, rules, costs) for costs in (None, slow))
    assert steps.rows == traverse(one_to_one(3), 8, rules).rows != real.rows
    check_schedule(real)


def test_a_check_sees_what_is_done() -> None:
    views: list[tuple[int, float, int, int, int]] = []

    def spy(view: View, action: Action) -> bool:
        if action == Action("BW", 0, 0):
            flight = view.in_flight()
            views.append((view.rank, view.now, view.done("F", 1), flight, view.in_flight(0)))
            assert len(view.row) == flight and view.done("F", 9) == 0
        return True

    traverse(one_to_one(2), 3, Traversal("forward", checks=[spy]))
    assert views == [(0, 4.0 + 1.0, 3, 3, 3)] * len(views) and views


def test_what_a_group_has_done_is_what_all_of_it_has_done() -> None:
    placement = with_shared(one_to_one(2), [1])
    counts: list[int] = []

    def spy(view: View, action: Action) -> bool:
        counts.append(view.done("F", 1) - view.done("BW", 1))
        return True

    check_schedule(traverse(placement, 4, Traversal("backward", checks=[spy])))
    assert min(counts) >= 0 and max(counts) <= 4


@pytest.fixture
def ops() -> Iterator[Callable[[OpSpec], OpSpec]]:
    """Register ops for one test."""
    registered = dict(_REGISTRY)
    yield register_op
    _REGISTRY.clear()
    _REGISTRY.update(registered)


def test_required_ops_are_in_the_schedule(ops: Callable[[OpSpec], OpSpec]) -> None:
    ops(OpSpec("Norm", "compute", (Wait(("F",), "self"),), "f_s", required=True))
    ops(
        OpSpec(
            "Relay", "compute", (Wait(("Norm",), "self"), Wait(("Relay",), "pred")), "f_s", required=True, sends="succ"
        )
    )
    ops(OpSpec("Spare", "compute", (Wait(("F",), "self"),), "f_s"))
    placements = (
        with_shared(circular(2, 2), [1]),
        explicit(3, [0, (0, 1), 2, 1], [(0, 1), (0, 2), (1, 3), (2, 3)]),
        bidirectional(2),
    )
    for placement in placements:
        for costs in (None, unit(placement.num_stages, 1)):
            schedule = traverse(placement, 4, Traversal("backward", in_flight=4), costs)
            check_schedule(schedule)
            assert {a.op for rank in range(schedule.num_ranks) for a in schedule.actions(rank)} == {
                "F",
                "BW",
                "Norm",
                "Relay",
            }
            simulate(schedule, unit(placement.num_stages, 1))


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        ([("W",)], "op Norm waits for W, and the schedule has only F, BW, Norm, Other"),
        ([("Other",)], "it never gets what it waits for: do the waits of op Norm form a circle?"),
    ],
)
def test_ops_that_never_run(ops: Callable[[OpSpec], OpSpec], waits: list[tuple[str, ...]], message: str) -> None:
    ops(OpSpec("Norm", "compute", tuple(Wait(x, "self") for x in waits), "f_s", required=True))
    ops(OpSpec("Other", "compute", (Wait(("Norm",), "self"),), "f_s", required=True))
    with pytest.raises(ScheduleError) as caught:
        traverse(one_to_one(2), 2, Traversal("forward"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_op_without_its_costs(ops: Callable[[OpSpec], OpSpec]) -> None:
    ops(
        OpSpec(
            "Norm", "compute", (Wait(("F",), "self"),), "norm_s", (MemoryEffect("end", 1, "norm_bytes"),), required=True
        )
    )
    with pytest.raises(ScheduleError, match="'norm_s'"):
        traverse(one_to_one(2), 2, Traversal("forward"), unit(2, 1))
    traverse(one_to_one(2), 2, Traversal("forward"))


def test_groups_that_overlap_never_wait_for_each_other() -> None:
    placement = Placement("groups", 3, (((0, 1), (1, 2), (2, 0), (0, 1, 2)),), ((0, 3), (1, 3), (2, 3)))
    for first in ("forward", "backward", "interleaved"):
        check_schedule(traverse(placement, 6, Traversal(first, forward="depth", in_flight=4)))
