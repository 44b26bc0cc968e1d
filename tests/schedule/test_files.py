"""JSON, CSV and files: round trips, atomic writing, and refusals that name file, key and remedy."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule import (
    Action,
    CostProfile,
    Event,
    HostLink,
    Link,
    MemoryCurve,
    Placement,
    Schedule,
    Timeline,
    bidirectional,
    check_schedule,
    circular,
    explicit,
    generate,
    one_to_one,
    read_costs,
    read_schedule,
    read_timeline,
    simulate,
    v_shape,
    wave,
    write_costs,
    write_schedule,
    write_timeline,
)
from jaxpipe.schedule.files import format_csv, from_costs, from_timeline, parse_csv, to_costs, to_schedule, to_timeline
from tests.support.schedule_strategies import one_f_one_b_rows, random_costs
from tests.support.schedule_text import SMALL, schedules

# Round trips.


@given(st.data())
def test_costs_round_trip(data: st.DataObject) -> None:
    costs = data.draw(random_costs(3, 2))
    assert from_costs(json.loads(json.dumps(to_costs(costs)))) == costs


def test_costs_with_infinite_and_extra_values_round_trip() -> None:
    costs = CostProfile.uniform(2, chunks=3, comm=0.1)
    assert from_costs(json.loads(json.dumps(to_costs(costs), allow_nan=False))) == costs
    full_costs = CostProfile(
        (1.0,), (1.0,), (1.0,), (2.0,), (3.0,), (1.0,), extra=(("sync_s", (0.5,)),), memory_limit_bytes=(float("inf"),),
        link=Link(1.0, 2.0), links=(((0, 1), Link(2.0, 3.0)),), host=HostLink(1.0, 2.0, 3.0, "shared", ((0, 1),)),
    )  # fmt: skip
    assert from_costs(json.loads(json.dumps(to_costs(full_costs), allow_nan=False))) == full_costs


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


DUAL_PIPE_V = """\
0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3RECV_F1,3I0,3SEND_B0,3W0,3F1,0RECV_B0,(0F2;3B1)OVERLAP_F_B,\
0SEND_F2,3SEND_B1,3RECV_F2,0B0,3F2,3B2,0B1,0B2,0REDUCE_GRAD,3REDUCE_GRAD,0RESHARD,3RESHARD\r
1RECV_F0,1F0,2F0,1F1,2F1,2B0,1B0,1SEND_B0,1F2,2F2,2B1,1B1,2B2,1B2\r
"""
"""A file of PyTorch's ``_dump_csv`` by default, as ``_Action.__repr__`` prints it: a small schedule in DualPipeV's style."""


def test_csv_with_communication_is_read(tmp_path: Path) -> None:
    """users.md 3.3: cells that only communicate are left out, which is said; OVERLAP_F_B is a braid."""
    (tmp_path / "dual.csv").write_bytes(DUAL_PIPE_V.encode())
    notices: list[str] = []
    schedule = read_schedule(tmp_path / "dual.csv", notices.append)
    check_schedule(schedule)
    assert (schedule.name, schedule.placement, schedule.num_microbatches) == ("dual", v_shape(2), 3)
    assert str(schedule.rows[0][6]) == "F0.2+BW3.1"
    assert notices == [
        f"{tmp_path / 'dual.csv'}: 17 cells left out that only communicate (RECV_B 1, RECV_F 4, REDUCE_GRAD 2, RESHARD 2, "
        "SEND_B 3, SEND_F 3, UNSHARD 2); transfers are implied"
    ]
    assert read_schedule(tmp_path / "dual.csv") == schedule
    text = format_csv(schedule)
    assert text.splitlines()[0] == "0F0,0F1,3F0,3I0,3W0,3F1,(0F2;3B1)OVERLAP_F_B,0B0,3F2,3B2,0B1,0B2"
    assert parse_csv(text, "dual", notice=notices.append) == schedule
    assert len(notices) == 1


@pytest.mark.parametrize("name", ["stp", "1f1b", "zb-h1", "dualpipe-v"])
def test_csv_round_trip_of_families(name: str) -> None:
    schedule = generate(name, 2, 6)
    parsed = parse_csv(format_csv(schedule), schedule.name)
    assert (parsed.rows, parsed.placement.flows) == (schedule.rows, schedule.placement.flows)


@pytest.mark.parametrize(
    "placement", [one_to_one(3), circular(2, 2), v_shape(3), wave(2, 3), bidirectional(3)], ids=lambda p: p.kind
)
def test_csv_names_the_placement(placement: Placement) -> None:
    stages = range(placement.num_stages)
    actions = [Action(op, s, i) for op in ("F", "BW") for i in range(4) for s in stages]
    rows = tuple(
        tuple(a for a in actions if placement.ranks(a.stage, a.microbatch) == (r,)) for r in range(placement.num_ranks)
    )
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
    with pytest.raises(ScheduleError, match=r"O0\.0 .*write \.sched.*\.json"):
        write_schedule(offloading, path)
    with pytest.raises(ScheduleError, match="can't write"):
        write_schedule(one_f_one_b_rows(2, 2), tmp_path / "no" / "s.sched")
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["s.csv"]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("u", one_to_one(1), 1, ((Action("F", 0, 0), Action("Sync_x", 0, 0)),)),
        Schedule("d", explicit(1, [0, 0, 0], [(0, 2), (1, 2)]), 1, ((Action("F", 0, 0),),)),
    ],
    ids=["user op", "dag"],
)
def test_csv_refuses_what_it_would_lose(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"\.sched.*\.json"):
        format_csv(schedule)


# Bad files, JSON, CSV.


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "bytes.sched").write_bytes(b"# jaxpipe schedule 1\nname: \xff\xfe\n")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "x.txt").write_text(SMALL)
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


def test_rows_alone_are_a_schedule(tmp_path: Path) -> None:
    body = to_schedule(one_f_one_b_rows(2, 2))
    (tmp_path / "1f1b.json").write_text(json.dumps({"rows": body["rows"]}))
    assert read_schedule(tmp_path / "1f1b.json") == one_f_one_b_rows(2, 2)
    (tmp_path / "s.json").write_text(json.dumps({"name": "mine", "microbatches": 3, "rows": body["rows"]}))
    assert (read_schedule(tmp_path / "s.json").name, read_schedule(tmp_path / "s.json").num_microbatches) == ("mine", 3)
    tree = {"kind": "x", "ranks": 2, "flows": [[[0], [1]]], "edges": []}
    (tmp_path / "s.json").write_text(json.dumps({"placement": tree, "rows": body["rows"]}))
    assert read_schedule(tmp_path / "s.json").placement.edges == ()
    (tmp_path / "s.json").write_text('{"rows": [[], []]}')
    with pytest.raises(ScheduleParseError, match="rows: the rows hold no action"):
        read_schedule(tmp_path / "s.json")


@pytest.mark.parametrize("suffix", [".sched", ".json"])
def test_names_that_are_no_text_survive(tmp_path: Path, suffix: str) -> None:
    """Half of a surrogate pair: what Python makes of a byte of a file name that is not UTF-8."""
    schedule = replace(one_f_one_b_rows(2, 2), name="a\udcffb")
    write_schedule(schedule, tmp_path / f"s{suffix}")
    assert read_schedule(tmp_path / f"s{suffix}") == schedule
    timeline = simulate(schedule, CostProfile.uniform(2))
    write_timeline(timeline, tmp_path / "t.json")
    assert read_timeline(tmp_path / "t.json") == timeline


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would take for ever."""
    os.mkfifo(tmp_path / "pipe.sched")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ScheduleParseError, match="not a regular file"):
        read_schedule(tmp_path / "pipe.sched")
    with pytest.raises(ScheduleParseError, match="not a regular file"):
        read_costs(tmp_path / "pipe.json")
    with pytest.raises(ScheduleParseError, match="null byte"):
        read_schedule("a\0b.sched")


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
    "edge": (broken(placement={"kind": "x", "ranks": 1, "flows": [[[0]]], "edges": [[0]]}), "has 1 entries; want 2"),
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
    "mode": (COSTS | {"host": {"mode": "x"}}, "host: host link: mode is 'x'; want 'duplex' or 'shared'"),
    "bandwidth": (COSTS | {"link": {"bytes_per_s": 0}}, "link: link: bytes_per_s is 0.0; want a positive"),
    "latency": (COSTS | {"link": {"latency_s": -1}}, "latency_s is -1.0; want a finite number >= 0"),
    "negative temp": (COSTS | {"temp_bytes": {"F": [1, -1]}}, r"temp_bytes\[F\]\[1\] is -1.0"),
    "memory limit": (COSTS | {"memory_limit_bytes": [-1]}, r"memory_limit_bytes\[0\] is -1.0"),
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
        ("0F0,0SENT_F0\n", "cell 2: '0SENT_F0' is not an action"),
        ("0F0,SEND_F\n", "cell 2: 'SEND_F' is not an action"),
        ("0SEND_F0,0RECV_B0,1UNSHARD\n", "no action"),
        ("0F0,(0F1;0B0)OVERLAP_B_F\n", r"cell 2: '\(0F1;0B0\)OVERLAP_B_F' is not an action; .*OVERLAP_F_B"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B\n", "cell 2: .* is not an action"),
        ("0F0,(0B0)OVERLAP_F_B\n", "cell 2: .* is not an action"),
        ("0F0,()OVERLAP_F_B\n", "cell 2: .* is not an action"),
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
