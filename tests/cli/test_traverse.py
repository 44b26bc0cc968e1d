"""``jaxpipe schedule traverse``: rules in a line or a file; every mistake is one line and exit code 2."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.cli.flags import PLACEMENTS
from jaxpipe.schedule import Traversal, circular, generate, one_to_one, read_schedule, traverse, wave
from jaxpipe.schedule.placement import CONSTRUCTORS

Run = Callable[[str], tuple[int, str, str]]

RULES = """
from jaxpipe.schedule import Traversal

def few(view, action):
    return action.op != "F" or view.in_flight() < 2

checked = Traversal("backward", checks=[few])
mixed = {range(0, 2): Traversal("interleaved"), (2, 3): Traversal("backward", in_flight=1)}
five = 5

def falling(placement, microbatches):
    return Traversal("backward", in_flight=range(placement.num_ranks, 0, -1))

def broken(placement, microbatches):
    return 1 / 0
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("own_rules.py").write_text(RULES)
    Path("wrong.py").write_text("def f(:\n")

    def call(line: str) -> tuple[int, str, str]:
        code = main(shlex.split(line))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_usual_flags_work(run: Run) -> None:
    code, out, _ = run(
        "schedule traverse --placement circular --chunks 2 --rules 'interleaved forward=breadth:4 backward=depth:4' "
        "--unit-steps --ranks 4 --microbatches 8 --json --memory-limit 6 -o x.sched -o x.svg"
    )
    assert code == 0
    record = json.loads(out)
    assert (record["name"], record["makespan"], max(record["peak_activations"])) == ("traverse", 28.5, 5.5)
    rules = Traversal("interleaved", forward="breadth:4", backward="depth:4")
    assert read_schedule("x.sched").rows == traverse(circular(4, 2), 8, rules).rows


def test_costs_are_real_times_unless_steps_are_asked_for(run: Run) -> None:
    rules = "schedule traverse --placement wave --chunks 2 --rules 'interleaved forward=depth in-flight=8' --json"
    assert [json.loads(run(rules + flag)[1])["makespan"] for flag in ("", " --unit-steps", " --steps")] == [
        30,
        32.5,
        32.5,
    ]
    assert json.loads(run(rules + " --cost 1,2,1 --comm 0.25 --braid --tp-comm 0.1")[1])["makespan"] > 30
    assert traverse(wave(4, 2), 8, Traversal("interleaved", forward="depth", in_flight=8)).num_ranks == 4


def test_rules_from_a_file(run: Run) -> None:
    for name in ("checked", "mixed", "falling"):
        assert run(f"schedule traverse --rules own_rules.py:{name} -o {name}.sched")[0] == 0
    assert read_schedule("falling.sched").rows == generate("1f1b", 4, 8).rows
    assert read_schedule("checked.sched").rows == traverse(one_to_one(4), 8, Traversal("backward", in_flight=2)).rows


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("traverse", "traverse needs --rules"),
        ("traverse --rules fast", "the type that goes first is 'fast'"),
        ("traverse --rules ''", "the type that goes first is ''"),
        ("traverse --rules 'backward in-flight=1,2'", "in-flight=1,2 is for 2, not 4"),
        ("traverse --rules 'backward checks=few'", "name a file, FILE.py:NAME"),
        ("traverse --rules own_rules.py", "say which of its names: own_rules.py:NAME"),
        ("traverse --rules own_rules.py:many", "the file has no 'many'"),
        ("traverse --rules own_rules.py:five", "a rule is of type int; want a Traversal"),
        ("traverse --rules own_rules.py:broken", "own_rules.py:broken: ZeroDivisionError"),
        ("traverse --rules nowhere.py:x", "'nowhere.py' does not exist"),
        ("traverse --rules wrong.py:x", "wrong.py: it can't be run: SyntaxError"),
        ("traverse --rules backward --placement v --chunks 3", "placement v has 2 chunk(s) per rank, not 3"),
        ("traverse --rules backward --group 2", "traverse takes no --group"),
        ("traverse --rules backward --memory-limit 2", "above --memory-limit 2"),
        ("traverse --rules 'backward in-flight=1' --placement v", "in-flight=1 leaves it no room"),
        ("1f1b --rules backward", "1f1b takes no --rules"),
        ("1f1b --placement v", "1f1b takes no --placement"),
        ("1f1b --unit-steps", "1f1b takes no --unit-steps"),
        ("travers", "did you mean 'traverse'?"),
    ],
)
def test_every_mistake_is_one_line(run: Run, flags: str, message: str) -> None:
    code, out, err = run(f"schedule {flags}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("jaxpipe: ") and message in err


def test_the_placements_of_the_flags_are_those_that_there_are() -> None:
    assert sorted(PLACEMENTS) == sorted(CONSTRUCTORS)
