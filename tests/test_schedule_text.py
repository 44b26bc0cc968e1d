"""Text, JSON and CSV forms: what is written is read back equal; what is malformed is refused with place and remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule import (
    Action,
    Braid,
    CostProfile,
    Event,
    HostLink,
    Link,
    MemoryCurve,
    OpSpec,
    Placement,
    Schedule,
    Timeline,
    Wait,
    bidirectional,
    check_schedule,
    circular,
    explicit,
    format_schedule,
    one_to_one,
    parse_schedule,
    read_costs,
    read_schedule,
    read_timeline,
    register_op,
    simulate,
    v_shape,
    wave,
    with_shared,
    write_costs,
    write_schedule,
    write_timeline,
)
from jaxpipe.schedule.csv_form import format_csv, parse_csv
from jaxpipe.schedule.json_form import from_costs, from_schedule, from_timeline, to_costs, to_schedule, to_timeline
from tests.schedule_strategies import one_f_one_b_rows, random_costs, random_valid_schedules

GOLDEN = """\
# jaxpipe schedule 1
name: 1f1b
microbatches: 2
placement: one-to-one ranks=2
edges: chain
rank 0: F0.0 F0.1 BW0.0 BW0.1
rank 1: F1.0 BW1.0 F1.1 BW1.1
"""

SYNC = register_op(
    OpSpec(
        "Sync_x",
        "compute",
        (Wait(("F",), "self"), Wait(("Sync_x",), "pred", optional=True)),
        "f_s",
        description="test op",
    )
)


def schedules(**options: bool) -> st.SearchStrategy[Schedule]:
    return random_valid_schedules(offload=True, braids=True, **options)


# Round trips.


def test_text_is_the_documented_one() -> None:
    assert str(one_f_one_b_rows(2, 2)) == GOLDEN
    assert parse_schedule(GOLDEN) == one_f_one_b_rows(2, 2)


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
    text = GOLDEN.replace("edges: chain\n", "\n# a remark\n").replace("\n", "\r\n")
    assert parse_schedule(text) == one_f_one_b_rows(2, 2)


@given(st.data())
def test_costs_round_trip(data: st.DataObject) -> None:
    costs = data.draw(random_costs(3, 2))
    assert from_costs(json.loads(json.dumps(to_costs(costs)))) == costs


def test_costs_with_infinite_and_extra_values_round_trip() -> None:
    costs = CostProfile.uniform(2, chunks=3, comm=0.1)
    assert from_costs(json.loads(json.dumps(to_costs(costs), allow_nan=False))) == costs
    given_all = CostProfile(
        (1.0,), (1.0,), (1.0,), (2.0,), (3.0,), (1.0,), extra=(("sync_s", (0.5,)),), memory_limit_bytes=(float("inf"),),
        link=Link(1.0, 2.0), links=(((0, 1), Link(2.0, 3.0)),), host=HostLink(1.0, 2.0, 3.0, "shared", ((0, 1),)),
    )  # fmt: skip
    assert from_costs(json.loads(json.dumps(to_costs(given_all), allow_nan=False))) == given_all


@given(schedules(), st.data())
def test_timeline_round_trip(schedule: Schedule, data: st.DataObject) -> None:
    timeline = simulate(schedule, data.draw(random_costs(schedule.num_stages, schedule.num_ranks)))
    assert from_timeline(json.loads(json.dumps(to_timeline(timeline)))) == timeline


# Files.


@pytest.mark.parametrize("suffix", [".sched", ".json"])
def test_schedule_files(tmp_path: Path, suffix: str) -> None:
    schedule = one_f_one_b_rows(3, 4)
    write_schedule(schedule, tmp_path / f"s{suffix}")
    assert read_schedule(tmp_path / f"s{suffix}") == schedule
    assert read_schedule(str(tmp_path / f"s{suffix}")) == schedule
    assert [f.name for f in tmp_path.iterdir()] == [f"s{suffix}"]


def test_csv_file_is_pytorchs(tmp_path: Path) -> None:
    path = tmp_path / "1f1b.csv"
    write_schedule(one_f_one_b_rows(2, 2), path)
    assert path.read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert read_schedule(path) == one_f_one_b_rows(2, 2)
    path.write_text("0F0,,0F1, ,0I0,0W0,0B1\n,1F0,1B0,1F1,1B1,,\n")
    row = tuple(Action(op, 0, i) for op, i in [("F", 0), ("F", 1), ("B", 0), ("W", 0), ("BW", 1)])
    assert read_schedule(path).rows[0] == row


@pytest.mark.parametrize(
    "placement", [one_to_one(3), circular(2, 2), v_shape(3), wave(2, 3), bidirectional(3)], ids=lambda p: p.kind
)
def test_csv_names_the_placement(placement: Placement) -> None:
    rows = tuple(
        tuple(Action(op, s, i) for op in ("F", "BW") for i in range(4) for s in range(placement.num_stages) if (r,) == placement.ranks(s, i))
        for r in range(placement.num_ranks)
    )  # fmt: skip
    schedule = Schedule("x", placement, 4, rows)
    assert parse_csv(format_csv(schedule), "x").placement == placement


def test_costs_and_timeline_files(tmp_path: Path) -> None:
    costs = CostProfile.uniform(2, comm=0.5)
    timeline = simulate(one_f_one_b_rows(2, 3), costs)
    write_costs(costs, tmp_path / "c.json")
    write_timeline(timeline, tmp_path / "t.json")
    assert read_costs(tmp_path / "c.json") == costs
    assert read_timeline(tmp_path / "t.json") == timeline


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    write_schedule(one_f_one_b_rows(2, 2), path)
    before = path.read_bytes()
    offloading = Schedule("o", one_to_one(1), 1, (tuple(Action(op, 0, 0) for op in ("F", "O", "L", "BW")),))
    with pytest.raises(ScheduleError, match=r"can't hold O0\.0 .*write \.sched or \.json"):
        write_schedule(offloading, path)
    with pytest.raises(ScheduleError, match="can't write"):
        write_schedule(one_f_one_b_rows(2, 2), tmp_path / "no" / "s.sched")
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["s.csv"]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("b", one_to_one(1), 2, ((Action("F", 0, 0), Braid((Action("F", 0, 1), Action("BW", 0, 0)))),)),
        Schedule("u", one_to_one(1), 1, ((Action("F", 0, 0), Action("Sync_x", 0, 0)),)),
        Schedule("d", explicit(1, [0, 0, 0], [(0, 2), (1, 2)]), 1, ((Action("F", 0, 0),),)),
    ],
    ids=["braid", "user op", "dag"],
)
def test_csv_refuses_what_it_would_lose(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"CSV .* write \.sched or \.json"):
        format_csv(schedule)


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
    assert GOLDEN.count(old) >= 1
    with pytest.raises(ScheduleParseError, match=message) as caught:
        parse_schedule(GOLDEN.replace(old, new, 1), "x.sched")
    assert str(caught.value).startswith("x.sched: line ")
    assert "\n" not in str(caught.value)


@given(st.integers(0, len(GOLDEN) - 2))
def test_truncated_text_never_passes(size: int) -> None:
    """Cut anywhere, the text is refused by the parser, or, cut inside a row, by the checker."""
    try:
        schedule = parse_schedule(GOLDEN[:size])
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


@given(st.integers(0, len(GOLDEN) - 1), st.characters())
def test_one_changed_character_is_an_error_of_ours_or_a_schedule(at: int, character: str) -> None:
    try:
        schedule = parse_schedule(GOLDEN[:at] + character + GOLDEN[at + 1 :])
        check_schedule(schedule)
    except ScheduleError:
        pass


# Bad files, JSON, CSV.


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "bytes.sched").write_bytes(b"# jaxpipe schedule 1\nname: \xff\xfe\n")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "x.txt").write_text(GOLDEN)
    cases = {
        "none.sched": "can't read .*No such file",
        "folder.json": "can't read .*directory",
        "bytes.sched": "line 2: not UTF-8 text .byte 0xff at offset 27",
        "x.txt": r"ends in \.sched, \.json, \.csv",
    }
    for name, message in cases.items():
        with pytest.raises(ScheduleParseError, match=message):
            read_schedule(tmp_path / name)
    with pytest.raises(ScheduleParseError, match="can't read"):
        read_costs(tmp_path / "none.json")


def broken(**changes: object) -> dict[str, object]:
    data = to_schedule(one_f_one_b_rows(2, 2)) | changes
    return {key: value for key, value in data.items() if value is not None}


BAD_JSON = {
    "not an object": ([1], "schedule is a list; want an object"),
    "format": (broken(format="x"), "has format 'x'"),
    "missing": (broken(rows=None), "key 'rows' is missing"),
    "unknown": (broken(row=[]), "unknown key 'row'; did you mean 'rows'"),
    "type of name": (broken(name=3), "name is 3; want a string"),
    "type of microbatches": (broken(microbatches=2.5), "microbatches is 2.5; want a whole number"),
    "boolean": (broken(microbatches=True), "microbatches is True; want a whole number"),
    "type of rows": (broken(rows="F0.0"), "rows is 'F0.0'; want a list"),
    "type of row": (broken(rows=["F0.0"]), r"rows\[0\] is 'F0.0'; want a list"),
    "cell": (broken(rows=[["F0.0", "F0.1junk"]]), r"rows\[0\]\[1\]: 'F0.1junk' is not an action"),
    "cell type": (broken(rows=[[1]]), r"rows\[0\]\[0\] is 1; want a string"),
    "placement": (broken(placement={}), "placement: key 'kind' is missing; key 'ranks'"),
    "edge": (broken(placement={"kind": "x", "ranks": 1, "flows": [[[0]]], "edges": [[0]]}), "want a pair"),
    "cyclic": (broken(placement={"kind": "x", "ranks": 1, "flows": [[[0]]], "edges": [[0, 0]]}), "placement: .*cycle"),
    "huge": (broken(placement={"kind": "x", "ranks": 10**12, "flows": [[[0]]], "edges": []}), "name only 1 ranks"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_schedule_json(case: str, tmp_path: Path) -> None:
    data, message = BAD_JSON[case]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ScheduleParseError, match=message) as caught:
        read_schedule(path)
    assert str(caught.value).startswith(str(path))


COSTS = to_costs(CostProfile.uniform(2))
BAD_COSTS = {
    "missing": ({k: v for k, v in COSTS.items() if k != "b_s"}, "key 'b_s' is missing"),
    "unknown": (COSTS | {"bs": [1]}, "unknown key 'bs'; did you mean 'b_s'"),
    "length": (COSTS | {"f_s": [1, 2, 3]}, "entries for 3 stages"),
    "negative": (COSTS | {"f_s": [1, -2]}, r"f_s\[1\] is -2.0"),
    "infinite": (COSTS | {"f_s": [1, "inf"]}, r"f_s\[1\] is inf"),
    "text": (COSTS | {"f_s": [1, "2"]}, r"f_s\[1\] is '2'; want a number"),
    "mode": (COSTS | {"host": {"mode": "x"}}, "host.mode is 'x'; want 'duplex' or 'shared'"),
    "bandwidth": (COSTS | {"link": {"bytes_per_s": 0}}, "link.bytes_per_s is 0.0; want a positive"),
    "link": (COSTS | {"links": [{"src": 0, "latency_s": 1}]}, r"links\[0\]: key 'dst' is missing"),
    "huge": (COSTS | {"f_s": [1, 10**400]}, "too large"),
    "temp": (COSTS | {"temp_bytes": {"F": [1]}}, r"temp_bytes\[F\] has 1 entries"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_COSTS)
def test_bad_costs_json(case: str, tmp_path: Path) -> None:
    data, message = BAD_COSTS[case]
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ScheduleParseError, match=message):
        read_costs(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON.*truncated"),
        ('{"format": ', "line 1: not JSON.*truncated"),
        ('{"f_s": [NaN]}', "NaN is not JSON"),
        ('{"f_s": [1], "f_s": [2]}', "key 'f_s' is given twice"),
        ("[" * 100_000, "not JSON"),
        ('{"f_s": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_damaged_json(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ScheduleParseError, match=message):
        read_costs(path)
    with pytest.raises(ScheduleParseError, match="JSON"):
        read_timeline(path)


def test_minimal_costs_are_enough() -> None:
    data = {key: [1, 2] for key in ("f_s", "b_s", "w_s", "bw_s", "residual_bytes", "w_residual_bytes")}
    assert from_costs(data).num_stages == 2


def timeline_with(**changes: object) -> dict[str, object]:
    event = Event(0, "compute", Action("F", 0, 0), 0.0, 1.0)
    curve = MemoryCurve((0.0, 1.0), (1.0, 0.0))
    return to_timeline(Timeline("x", 1, (event,), (curve,), (1.0,), (0.0,))) | changes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (timeline_with(ranks=2), "memory has 1 entries for 2 ranks"),
        (timeline_with(events=[[0, "compute", "F0.0", 1.0]]), "has 4 entries"),
        (timeline_with(events=[[0, "gpu", "F0.0", 0.0, 1.0]]), "on lane 'gpu'"),
        (timeline_with(events=[[1, "compute", "F0.0", 0.0, 1.0]]), "on rank 1"),
        (timeline_with(events=[[0, "compute", "F0.0", 2.0, 1.0]]), "before it starts"),
        (timeline_with(memory=[{"times_s": [0], "bytes": []}]), "1 times and 0 levels"),
    ],
)
def test_bad_timeline_json(data: object, message: str) -> None:
    with pytest.raises(ScheduleParseError, match=message):
        from_timeline(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F1junk\n", r"x\.csv: line 1, cell 2: '0F1junk' is not an action"),
        ("0F0,0SEND_F0\n", "cell 2: '0SEND_F0' is not an action"),
        ("0F0\n1X0\n", "line 2, cell 1: '1X0'"),
        ("0f0\n", "'0f0'"),
        ("00F0\n", "'00F0'"),
        ('"0F0\n', "not CSV"),
        ("", "no action"),
        ("0F0\n\n", "ranks 1 run no stage"),
        ("0F0\n2F0\n", "stage 1 runs nowhere"),
        ("0F0,0F1\n0F2,1F0\n", "stage 0 runs on ranks 0, 1, changing from microbatch to microbatch"),
        ("999999999F0\n", "stage 0 runs nowhere"),
    ],
)
def test_bad_csv(text: str, message: str) -> None:
    with pytest.raises(ScheduleParseError, match=message):
        parse_csv(text, "x", "x.csv")


def test_huge_numbers_do_not_take_memory() -> None:
    for text in (
        GOLDEN.replace("microbatches: 2", "microbatches: 999999999999"),
        GOLDEN.replace("F0.1", "F999999999999.1"),
    ):
        with pytest.raises(ScheduleError, match="number of microbatches right|out of range"):
            check_schedule(parse_schedule(text))
    with pytest.raises(ScheduleError, match="number of microbatches right"):
        check_schedule(parse_csv("0F999999999999\n", "x"))


def test_import_is_light() -> None:
    code = (
        "import sys, time; t = time.process_time(); import jaxpipe.schedule; t = time.process_time() - t; "
        "assert not {'jax', 'numpy', 'jaxpipe.schedule.families'} & set(sys.modules), 'heavy import'; print(t)"
    )
    seconds = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert seconds < 0.2


def test_format_schedule_is_str() -> None:
    schedule = one_f_one_b_rows(2, 3)
    assert format_schedule(schedule) == str(schedule)
