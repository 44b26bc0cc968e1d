"""The verb ``cache``: what it lists, as text and JSON, what it removes, and mistakes."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.schedule import (
    CostProfile,
    Placement,
    Schedule,
    generate,
    one_to_one,
    simulate,
    v_shape,
)
from jaxpipe.search.solve.cache import ScheduleCache
from jaxpipe.search.solve.task import Objective, Options, Solution, SolveTask
from tests.support.schedule_strategies import (
    one_f_one_b_rows,
)

UNIT = CostProfile.uniform(4)


def solved(task: SolveTask, schedule: Schedule, bound: float = 1.0, wall_s: float = 2.0) -> Solution:
    """Return the answer of a solver that found ``schedule``."""
    return Solution(task, schedule, simulate(schedule, task.costs), bound, wall_s)


def task_of(
    costs: CostProfile = UNIT,
    limit: float = math.inf,
    *,
    microbatches: int = 8,
    placement: Placement | None = None,
    offload: bool = False,
    objective: Objective = "makespan",
) -> SolveTask:
    placement = placement or one_to_one(costs.num_stages)
    return SolveTask(placement, microbatches, costs, limit, offload, objective)


class Notices(list[str]):
    def take(self) -> list[str]:
        notices = list(self)
        self.clear()
        return notices


@pytest.fixture
def notices() -> Notices:
    return Notices()


@pytest.fixture
def cache(tmp_path: Path, notices: Notices) -> ScheduleCache:
    return ScheduleCache(tmp_path / "cache", notices.append)


@pytest.fixture
def entry(cache: ScheduleCache) -> Path:
    path = cache.store(solved(task_of(), one_f_one_b_rows(4, 8), bound=24.0))
    assert path is not None
    return path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["cache", *map(str, argv)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


def test_ls_lists_what_was_stored(cli: Callable[..., tuple[int, str, str]], cache: ScheduleCache) -> None:
    schedule = generate("v-half", ranks=3, microbatches=8)
    costs = CostProfile.uniform(6, chunks=2)
    cache.store(solved(task_of(costs, 2.5, placement=v_shape(3)), schedule, bound=26.0), Options(time_limit_s=9))
    cache.store(solved(task_of(offload=True, objective="span"), one_f_one_b_rows(4, 8), bound=0.0))
    code, out, err = cli("ls", "--dir", cache.folder)
    lines = out.splitlines()
    assert (code, err, len(lines)) == (0, "", 4)
    heads = ["ranks", "microbatches", "chunks", "placement", "limit", "offload", "objective", "value", "bound", "gap"]
    assert lines[0].split() == [*heads, "stored", "(UTC)"]
    value = simulate(schedule, costs).makespan
    assert lines[1].split()[:10] == [
        "3",
        "8",
        "2",
        "v",
        "2.5",
        "no",
        "makespan",
        f"{value:g}",
        "26",
        f"{value / 26 - 1:.1%}",
    ]
    assert lines[2].split()[:10] == ["4", "8", "1", "one-to-one", "none", "yes", "span", "33", "0", "-"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[3] == f"2 schedules in {cache.folder}"


def test_ls_json(cli: Callable[..., tuple[int, str, str]], cache: ScheduleCache, entry: Path) -> None:
    code, out, err = cli("ls", "--json", "--dir", cache.folder)
    assert (code, err) == (0, "")
    document = json.loads(out)
    (record,) = document["entries"]
    value = simulate(one_f_one_b_rows(4, 8), UNIT).makespan
    assert document["folder"] == str(cache.folder)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record.pop("stored"))
    assert record.pop("jaxpipe")
    assert record == {
        "file": entry.name,
        "ranks": 4,
        "microbatches": 8,
        "chunks": 1,
        "placement": "one-to-one",
        "memory_limit": None,
        "offload": False,
        "objective": "makespan",
        "value": value,
        "lower_bound": 24.0,
        "gap": value / 24 - 1,
        "offloaded": 0,
        "wall_s": 2.0,
        "time_limit_s": None,
    }


def test_damaged_entries_are_notices_on_stderr(
    cli: Callable[..., tuple[int, str, str]], cache: ScheduleCache, entry: Path
) -> None:
    entry.write_text("")
    code, out, err = cli("ls", "--dir", cache.folder)
    assert (code, out) == (0, f"no schedules in {cache.folder}\n")
    assert err.startswith("jaxpipe: schedule cache: ") and err.count("\n") == 1
    assert cli("clear", "--dir", cache.folder) == (0, f"removed 1 schedule from {cache.folder}\n", "")


def test_clear_says_how_many(cli: Callable[..., tuple[int, str, str]], cache: ScheduleCache, entry: Path) -> None:
    (cache.folder / "mine.txt").write_text("x")
    cache.store(solved(task_of(microbatches=9), one_f_one_b_rows(4, 9)))
    assert cli("clear", "--dir", cache.folder) == (0, f"removed 2 schedules from {cache.folder}\n", "")
    assert [p.name for p in cache.folder.iterdir()] == ["mine.txt"]
    code, out, _ = cli("clear", "--json", "--dir", cache.folder)
    assert (code, json.loads(out)) == (0, {"folder": str(cache.folder), "removed": 0})


def test_clear_that_can_not_remove_an_entry_fails(
    cli: Callable[..., tuple[int, str, str]], cache: ScheduleCache, entry: Path
) -> None:
    entry.unlink()
    entry.mkdir()
    code, out, err = cli("clear", "--dir", cache.folder)
    assert (code, out) == (2, f"removed 0 schedules from {cache.folder}\n")
    assert err.count("\n") == 1 and entry.name in err


def test_the_default_folder_need_not_exist(
    cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path / "none"))
    assert cli("ls") == (0, f"no schedules in {tmp_path / 'none'}\n", "")
    assert cli("clear") == (0, f"removed 0 schedules from {tmp_path / 'none'}\n", "")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "ACTION"),
        (("lss",), "did you mean 'ls'"),
        (("list", "--json"), "want one of: ls, clear"),
        (("ls", "clear"), "unexpected argument 'clear'"),
        (("ls", "--dir"), "expected one argument"),
        (("ls", "--dir", ""), "--dir is empty"),
        (("ls", "--dir", "nowhere"), "there is no such folder"),
        (("clear", "--dir", "nowhere"), "there is no such folder"),
        (("clear", "--dir", "file"), "is not a folder"),
        (("clear", "--dirr", "x"), "did you mean '--dir'"),
    ],
)
def test_mistakes_are_one_clear_line(
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    code, out, err = cli(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("jaxpipe: ") and err.count("\n") == 1 and message in err
    assert (tmp_path / "file").read_text() == "mine"


def test_the_verb_imports_neither_jax_nor_ortools(cache: ScheduleCache, entry: Path) -> None:
    code = (
        "import sys; from jaxpipe.cli import main; assert main(sys.argv[1:]) == 0; "
        "print([name for name in ('jax', 'ortools', 'matplotlib') if name in sys.modules])"
    )
    argv = [sys.executable, "-c", code, "cache", "ls", "--dir", str(cache.folder)]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
