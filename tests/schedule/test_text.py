"""Text, JSON and CSV forms: what is written is read back equal; what is malformed is refused with place and remedy."""

from __future__ import annotations

import json
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule import (
    Action,
    Braid,
    Placement,
    Schedule,
    bidirectional,
    check_schedule,
    circular,
    explicit,
    one_to_one,
    parse_schedule,
    v_shape,
    wave,
    with_shared,
)
from jaxpipe.schedule.files import format_csv, from_schedule, parse_csv, to_schedule
from tests.support.schedule_strategies import one_f_one_b_rows, random_valid_schedules
from tests.support.schedule_text import SMALL, schedules

# Round trips.


def test_text_is_the_documented_one() -> None:
    assert str(one_f_one_b_rows(2, 2)) == SMALL
    assert parse_schedule(SMALL) == one_f_one_b_rows(2, 2)


@given(schedules())
def test_text_round_trip(schedule: Schedule) -> None:
    assert parse_schedule(str(schedule)) == schedule


@given(schedules())
def test_json_round_trip(schedule: Schedule) -> None:
    assert from_schedule(json.loads(json.dumps(to_schedule(schedule)))) == schedule


@given(st.text(max_size=20), st.text(max_size=12))
def test_any_name_and_kind_survives(name: str, kind: str) -> None:
    schedule = Schedule(name, Placement(kind, 1, (((0,),),), ()), 1, ((Action("F", 0, 0), Action("BW", 0, 0)),))
    assert parse_schedule(str(schedule)) == schedule


@given(random_valid_schedules(chains_only=True, single_rank_stages=True, one_flow=True))
def test_csv_round_trip(schedule: Schedule) -> None:
    back = parse_csv(format_csv(schedule), schedule.name)
    assert back.rows == schedule.rows
    assert back.placement.flows == schedule.placement.flows
    assert back.num_microbatches == schedule.num_microbatches
    check_schedule(back)


@pytest.mark.parametrize(
    ("placement", "line"),
    [
        (one_to_one(3), "one-to-one ranks=3"),
        (circular(2, 3), "circular ranks=2 chunks=3"),
        (v_shape(2), "v ranks=2"),
        (wave(2, 3), "wave ranks=2 chunks=3"),
        (bidirectional(2), "bidirectional ranks=2"),
        (with_shared(one_to_one(2), [1]), "one-to-one+shared ranks=2 flow=0,0+1"),
        (with_shared(bidirectional(2), [0]), "bidirectional+shared ranks=2 flow=0+1,1 flow=0+1,0"),
        (explicit(2, [1, 0]), "explicit ranks=2 flow=1,0"),
        (Placement("v", 2, (((1,), (0,), (0,), (1,)),), ()), "v ranks=2 flow=1,0,0,1"),
        (Placement("two towers", 1, (((0,),),), ()), '"two towers" ranks=1 flow=0'),
    ],
)
def test_placement_lines(placement: Placement, line: str) -> None:
    schedule = Schedule("x", placement, 1, ((),) * placement.num_ranks)
    assert f"placement: {line}\n" in str(schedule)
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("edges", "line"), [(None, "chain"), ([], "none"), ([(0, 2), (1, 2)], "0->2 1->2"), ([(1, 2), (0, 1)], "1->2 0->1")]
)
def test_edge_lines(edges: list[tuple[int, int]] | None, line: str) -> None:
    schedule = Schedule("x", explicit(1, [0, 0, 0], edges), 1, ((),))
    assert f"edges: {line}\n" in str(schedule)
    assert parse_schedule(str(schedule)) == schedule


def test_user_ops_and_braids_survive() -> None:
    row = (
        Action("F", 0, 0),
        Action("Sync_x", 0, 0),
        Braid((Action("F", 0, 1), Action("BW", 0, 0))),
        Action("BW", 0, 1),
    )
    schedule = Schedule("user", one_to_one(1), 2, (row,))
    assert "F0.0 Sync_x0.0 F0.1+BW0.0 BW0.1" in str(schedule)
    assert parse_schedule(str(schedule)) == schedule
    assert from_schedule(to_schedule(schedule)) == schedule


def test_comments_blank_lines_crlf_and_missing_edges_are_read() -> None:
    text = SMALL.replace("edges: chain\n", "\n# a remark\n").replace("\n", "\r\n")
    assert parse_schedule(text) == one_f_one_b_rows(2, 2)


def test_rank_lines_alone_are_a_schedule() -> None:
    """users.md 3.11: name from the file, the rest inferred as from CSV."""
    rows = "".join(line + "\n" for line in SMALL.splitlines() if line.startswith("rank"))
    for text in (rows, "\n# by hand\n" + rows, "# by hand\r\n" + rows.replace("\n", "\r\n")):
        assert parse_schedule(text, "some/1f1b.sched") == one_f_one_b_rows(2, 2)
    folded = parse_schedule("rank 1: F1.0 F2.0 BW2.0 BW1.0\nrank 0: F0.0 F3.0 BW3.0 BW0.0\n", "x.sched")
    assert (folded.name, folded.placement, folded.num_microbatches) == ("x", v_shape(2), 1)
    hosted = parse_schedule("rank 0: F0.0 O0.0 L0.0 BW0.0\n")
    assert [str(slot) for slot in hosted.rows[0]] == ["F0.0", "O0.0", "L0.0", "BW0.0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: F0.0\nrank 2: F1.0\n", "line 2: there is no line 'rank 1: …'"),
        (
            "rank 0: F0.0\nname: x\n",
            "line 2: a file with a line like this one must begin with the line '# jaxpipe schedule 1'",
        ),
        ("rank 0: F0.0 F0.1junk\n", r"line 1: 'F0\.1junk' is not an action"),
        ("rank 0: F0.0\nrank 1: F2.0\n", "stage 1 runs nowhere, but stage 2 exists"),
        ("rank 0:\n", "the rows hold no action"),
        ("rank 0: F0.0\nrank 1:\n", "ranks 1 run no stage"),
        ("# jaxpipe schedule 2\nrank 0: F0.0\n", "line 1: this version of the format is not known"),
        ("# jaxpipe sched\nrank 0: F0.0\n", "line 1: this is not a schedule in text form; write rank lines, or"),
        ("hello\nrank 0: F0.0\n", "line 1: this is not a schedule in text form; write rank lines, or"),
    ],
)
def test_bad_rank_lines_are_one_line(text: str, message: str) -> None:
    with pytest.raises(ScheduleParseError, match=message) as caught:
        parse_schedule(text, "x.sched")
    assert str(caught.value).startswith("x.sched: ")
    assert "\n" not in str(caught.value)


# Bad text.

BAD_TEXT = {
    "junk after an action": ("F0.1 BW0.0", "F0.1junk BW0.0", r"line 6: 'F0\.1junk' is not an action.*F0\.0 F0\.1junk"),
    "pytorch cell": ("F0.1", "0F1", "'0F1' is not an action"),
    "negative id": ("F0.1", "F0.-1", "is not an action"),
    "leading zero": ("F0.1", "F00.1", "is not an action"),
    "no microbatch": ("F0.1", "F0", "is not an action"),
    "comma": ("F0.0 F0.1", "F0.0,F0.1", "is not an action"),
    "dangling braid": ("F0.1", "F0.1+", "'' is not an action"),
    "lower case": ("F0.1", "f0.1", "op 'f'.*did you mean|op 'f'.*known"),
    "unknown op": ("F0.1", "Q0.1", r"op 'Q' in 'Q0\.1' is not registered; known: .*register_op"),
    "near op": ("F0.1", "Sync_y0.1", "did you mean 'Sync_x'"),
    "unknown key": ("name:", "nmae:", "line 2: unknown key 'nmae'; did you mean 'name'"),
    "no colon": ("name: 1f1b", "name 1f1b", "line 2: expected 'key: value'"),
    "twice a key": ("edges: chain", "microbatches: 2", "line 5: this line repeats line 3"),
    "twice a rank": ("rank 1:", "rank 0:", "line 7: this line repeats line 6"),
    "rank gap": ("rank 1:", "rank 2:", "there is no line 'rank 1: …'"),
    "rank junk": ("rank 1:", "rank one:", "unknown key 'rank one'"),
    "microbatches not a number": ("microbatches: 2", "microbatches: two", "line 3: write a whole number"),
    "microbatches negative": ("microbatches: 2", "microbatches: -2", "line 3: write a whole number"),
    "microbatches missing": ("microbatches: 2\n", "", "the line 'microbatches: …' is missing"),
    "placement missing": ("placement: one-to-one ranks=2\n", "", "the line 'placement: …' is missing"),
    "unknown placement": ("one-to-one", "one-to-two", "line 4: unknown placement 'one-to-two'; did you mean 'one-to-one'"),
    "placement without ranks": (" ranks=2", "", "lacks its number of ranks"),
    "placement with junk": ("ranks=2", "ranks=2x", "is not a whole number"),
    "unknown argument": ("ranks=2", "ranks=2 chunk=1", "unknown placement argument 'chunk=1'; did you mean 'chunks'"),
    "argument twice": ("ranks=2", "ranks=2 ranks=2", "'ranks' is given twice"),
    "argument too many": ("ranks=2", "ranks=2 chunks=1", "takes ranks, got ranks and chunks"),
    "ranks and rows differ": ("ranks=2", "ranks=3", "3 ranks but there are 2 'rank' lines"),
    "empty flow": ("one-to-one ranks=2", "mine ranks=2 flow=", "is not a whole number"),
    "flow out of range": ("one-to-one ranks=2", "mine ranks=2 flow=0,2", "runs on rank 2"),
    "more stages than actions": (
        "one-to-one ranks=2",
        "circular ranks=2 chunks=400000",
        "line 4: the placement has 800000 stages, but the rows hold 8 actions in all",
    ),
    "huge chunks": ("one-to-one ranks=2", "circular ranks=2 chunks=999999999", "more than 1000000 stages"),
    "unclosed kind": ("one-to-one ranks=2", '"one ranks=2 flow=0,1', "close its quotes"),
    "unclosed name": ("name: 1f1b", 'name: "1f1b', "line 2: write plain text or a JSON string"),
    "edge junk": ("edges: chain", "edges: 0>1", "line 5: '0>1' is not an edge"),
    "edge out of range": ("edges: chain", "edges: 0->7", "line 5: .*names a stage outside 0..1"),
    "edge cycle": ("edges: chain", "edges: 0->1 1->0", "form a cycle"),
    "edges empty": ("edges: chain", "edges:", "'edges:' is empty"),
    "first line": ("# jaxpipe schedule 1\n", "", "line 1: this is not a schedule in text form"),
    "newer format": ("schedule 1\n", "schedule 2\n", "line 1: this version of the format is not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TEXT)
def test_bad_text_is_refused(case: str) -> None:
    old, new, message = BAD_TEXT[case]
    assert SMALL.count(old) >= 1
    with pytest.raises(ScheduleParseError, match=message) as caught:
        parse_schedule(SMALL.replace(old, new, 1), "x.sched")
    assert str(caught.value).startswith("x.sched: line ")
    assert "\n" not in str(caught.value)


@given(st.integers(0, len(SMALL) - 2))
def test_truncated_text_never_passes(size: int) -> None:
    """Cut anywhere, the text is refused by the parser, or, cut inside a row, by the checker."""
    try:
        schedule = parse_schedule(SMALL[:size])
    except ScheduleParseError:
        return
    with pytest.raises(ScheduleError, match="is missing"):
        check_schedule(schedule)


@given(st.text(max_size=200))
def test_any_text_gives_a_parse_error(text: str) -> None:
    with pytest.raises(ScheduleParseError):
        parse_schedule(text)
    if text.strip(", \n\r"):
        with pytest.raises(ScheduleParseError):
            parse_csv(text, "x")


@given(st.integers(0, len(SMALL) - 1), st.characters())
def test_one_changed_character_is_an_error_of_ours_or_a_schedule(at: int, character: str) -> None:
    try:
        schedule = parse_schedule(SMALL[:at] + character + SMALL[at + 1 :])
        check_schedule(schedule)
    except ScheduleError:
        pass


def test_huge_numbers_do_not_take_memory() -> None:
    for text in (
        SMALL.replace("microbatches: 2", "microbatches: 999999999999"),
        SMALL.replace("F0.1", "F999999999999.1"),
    ):
        with pytest.raises(ScheduleError, match=r"number of microbatches right|out of range"):
            check_schedule(parse_schedule(text))
    with pytest.raises(ScheduleError, match="number of microbatches right"):
        check_schedule(parse_csv("0F999999999999\n", "x"))


def test_import_is_light() -> None:
    code = (
        "import sys; before = set(sys.modules); import jaxpipe.schedule; "
        "assert not {'jax', 'numpy', 'jaxpipe.schedule.families'} & set(sys.modules), 'heavy import'; "
        "print(len(set(sys.modules) - before))"
    )
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 150, "69 modules, the standard library's too"
