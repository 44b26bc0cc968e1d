"""Families and ops from outside: registered, imported by a flag, listed by an installed package."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.cli.registry import VERBS
from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    FAMILIES,
    CostProfile,
    Schedule,
    families,
    generate,
    ir,
    one_f_one_b,
    one_to_one,
    op_spec,
    plugins,
    register_family,
    simulate,
    v_shape,
)
from jaxpipe.schedule.families.family import TABLE
from jaxpipe.search.best import best_schedule
from jaxpipe.search.solve import Options, SolveTask, solve
from jaxpipe.search.solve.jobs import Families, Worker, job_line, tasks_line
from tests.support.paths import ROOT

PATIENT, TEST_OF_PATIENT, RECOMPUTED = (
    block.split("```")[0]
    for block in (Path(families.__file__).parent / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what the test registers, imports or installs."""
    # else the first test that asks for them would have them undone, and nothing loads them twice
    plugins.load_search()
    modules, path = set(sys.modules), sys.path.copy()
    families_before = TABLE.copy()
    monkeypatch.setattr(ir, "_REGISTRY", ir._REGISTRY.copy())
    monkeypatch.setattr(plugins, "_imported", {})
    plugins.load_installed.cache_clear()
    yield
    TABLE.clear()
    TABLE.update(families_before)
    plugins.load_installed.cache_clear()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("outside_"):
            del sys.modules[name]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Provide the op of families/README.md as a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside_example.py").write_text(RECOMPUTED)
    return "outside_example"


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **entry_points: str) -> None:
    """A distribution ``outside-dist`` on ``sys.path`` with one entry point for each group."""
    info = folder / "outside_dist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-dist\nVersion: 1.0\n")
    groups = (f"[jaxpipe.{group}]\nit = {value}\n" for group, value in entry_points.items())
    (info / "entry_points.txt").write_text("".join(groups))
    monkeypatch.syspath_prepend(str(folder))


# Registered in this process.


def test_a_registered_family_is_one_of_the_families() -> None:
    family = replace(FAMILIES["1f1b"], name="mine-1")
    before = list(FAMILIES)
    assert register_family(family) is family
    assert register_family(family) is family
    assert list(FAMILIES) == sorted([*before, "mine-1"])
    assert generate("mine-1", 2, 3).rows == one_f_one_b(2, 3).rows
    with pytest.raises(TypeError):
        FAMILIES["other"] = family  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "1f1b"}, "there is a family '1f1b' already"),
        ({"name": "mine.sched"}, "use letters, digits"),
        ({"name": ""}, "use letters, digits"),
        ({"name": "a b"}, "use letters, digits"),
        (
            {"name": "mine", "options": ("chunk",)},
            "has the option 'chunk'; options are chunks, memory_limit, group, costs, objective",
        ),
    ],
)
def test_families_that_cannot_be_registered(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(words)):
        register_family(replace(FAMILIES["gpipe"], **changes))  # type: ignore[arg-type]
    assert "mine" not in FAMILIES


def incomplete(ranks: int, microbatches: int) -> Schedule:
    schedule = one_f_one_b(ranks, microbatches)
    return replace(schedule, rows=(schedule.rows[0][:-1], *schedule.rows[1:]))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (incomplete, "B of stage 0, microbatch 2 on rank 0 is missing"),
        (lambda p, m: 1 / 0, "mine failed with ZeroDivisionError: division by zero"),
        (lambda p, m: None, "mine makes a NoneType; want a Schedule"),
        (
            lambda p, m: one_f_one_b(p, m + 1),
            "mine makes 2 stages on 2 ranks (one-to-one), 4 microbatches; its placement says 2 on 2 (one-to-one), and 3",
        ),
        (
            lambda p, m: generate("v-zb", p, m),
            "mine makes 4 stages on 2 ranks (v), 3 microbatches; its placement says 2 on 2",
        ),
    ],
)
def test_what_a_family_from_outside_makes_is_checked(
    function: Callable[[int, int], Schedule], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a schedule that lacks work would stand in the table as a fast one."""
    register_family(replace(FAMILIES["1f1b"], name="mine", function=function))
    with pytest.raises(ScheduleError, match=re.escape(words)):
        generate("mine", 2, 3)
    assert main(["compare", "--ranks", "2", "--microbatches", "3"]) == 0
    assert re.search(r"^mine +not possible: ", capsys.readouterr().out, re.MULTILINE)


# --import


def test_every_verb_takes_import(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert main([verb.name, "--help"]) == 0
        assert "--import MODULE" in capsys.readouterr().out, verb.name


def test_the_searching_family_of_the_page_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verb takes it with costs and a limit; its own test is the page's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside_patient.py").write_text(PATIENT)
    sizes = ["--import", "outside_patient", "--ranks", "3", "--microbatches", "6", "--comm", "0.5", "--json"]
    assert main(["schedule", "patient", *sizes, "--memory-limit", "2"]) == 0
    tight = json.loads(capsys.readouterr().out)
    assert main(["schedule", "patient", *sizes, "--memory-limit", "6"]) == 0
    roomy = json.loads(capsys.readouterr().out)
    assert max(tight["peak_activations"]) == 2 < max(roomy["peak_activations"])
    assert roomy["makespan"] < tight["makespan"]
    assert main(["compare", *sizes, "--memory-limit", "2"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["schedules"]}
    assert rows["patient"]["makespan"] == tight["makespan"]
    assert main(["schedule", "patient", *sizes, "--memory-limit", "0.5"]) == 2
    assert capsys.readouterr().err == "jaxpipe: patient: a memory limit of 0.5 holds no microbatch; use 1 or more\n"
    best = best_schedule(3, 6, memory_limit=4, families=["patient"])
    assert best.setting.family == "patient"
    scope: dict[str, object] = {"CostProfile": CostProfile, "generate": generate, "simulate": simulate}
    exec(TEST_OF_PATIENT, scope)
    tests = [test for name, test in scope.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        assert callable(test)
        test()


def test_the_worked_example_runs_draws_and_compares(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "3", "--microbatches", "2"]
    assert (
        main(["schedule", "--import", module, "recomputed", *sizes, "-o", "r.sched", "-o", "r.svg", "-o", "r.html"])
        == 0
    )
    assert "A0" in capsys.readouterr().out
    assert "forward again" in Path("r.svg").read_text()
    assert main(["simulate", "r.sched", "--json", "--import", module]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["makespan"] == 20  # 2 (3 F + R, then 3 BW)
    assert main(["compare", "r.sched", "--import", module, "--json"]) == 0
    rows = {(row["name"], row.get("file")): row for row in json.loads(capsys.readouterr().out)["schedules"]}
    assert rows["recomputed", "r.sched"]["makespan"] == rows["recomputed", None]["makespan"] == 20
    assert main(["schedules", "--import", module]) == 0
    assert "\nrecomputed " in capsys.readouterr().out


def test_a_fresh_process_finds_the_module_in_its_working_directory(module: str, tmp_path: Path) -> None:
    """Also where ``sys.path`` lacks the directory, as for an installed command; and the config's rules know the family."""
    (tmp_path / "config.toml").write_text('[pipeline]\nschedule = "recomputed"\n')
    for argv in (["schedule", "recomputed"], ["train", "--config", "config.toml", "--print-config"]):
        command = [sys.executable, "-P", "-m", "jaxpipe", *argv]
        environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
        without = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (without.returncode, without.stderr.count("\n")) == (2, 1)
        result = subprocess.run(
            [*command, "--import", module], env=environment, capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert "recomputed" in result.stdout


def test_workers_of_the_solver_know_imported_families(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A family with an op that the search does not know gives no answer, and no failure."""
    assert main(["schedules", "--import", module]) == 0
    assert plugins.imported_modules() == (module,)
    TABLE.pop("recomputed")
    del sys.modules[module]
    tasks = tasks_line([SolveTask(one_to_one(2), 3, CostProfile.uniform(2))], [module])
    job = job_line(7, Families(task=0, seconds=9, names=("recomputed", "1f1b")))
    out = io.BytesIO()
    Worker(out).run([tasks, job])
    answers = [json.loads(text) for text in out.getvalue().splitlines()]
    assert [answer["source"] for answer in answers] == ["family 1f1b", ""]
    assert [(answer["job"], answer["done"], answer["error"]) for answer in answers] == [(7, False, ""), (7, True, "")]


def test_workers_of_the_solver_import_from_where_the_caller_does(module: str, tmp_path: Path) -> None:
    """A module that is gone since costs nothing but what it registers, and is told."""
    assert main(["schedules", "--import", module]) == 0
    task = SolveTask(v_shape(2), 4, CostProfile.uniform(4, chunks=2), 2.0)
    solution = solve(task, Options(time_limit_s=600))
    assert (solution.status, solution.failures) == ("optimal", ())
    (tmp_path / f"{module}.py").unlink()
    solution = solve(task, Options(time_limit_s=600))
    assert solution.status == "optimal"
    message = f"no module '{module}' on sys.path or in {Path.cwd()}"
    assert set(solution.failures) <= {f"in a solver process: --import {module}: {message}"}, (
        "none if it ended before a job"
    )


def test_a_worker_that_cannot_import_does_its_jobs_and_tells_once() -> None:
    tasks = tasks_line([SolveTask(one_to_one(2), 3, CostProfile.uniform(2))], ["outside_gone"])
    job = job_line(7, Families(task=0, seconds=9, names=("1f1b",)))
    out = io.BytesIO()
    Worker(out).run([tasks, job, job])
    answers = [json.loads(text) for text in out.getvalue().splitlines()]
    assert [answer["source"] for answer in answers] == ["family 1f1b", ""] * 2
    first, second = (answer["error"] for answer in answers if answer.get("done"))
    assert first.startswith("in a solver process: --import outside_gone: no module 'outside_gone' on sys.path or in ")
    assert not second


BAD_MODULES = {
    "outside_missing": ("", "no module 'outside_missing' on sys.path or in "),
    "outside_file.py": ("", "give the module's name, such as outside_file, not its file"),
    "outside_needs": ("import outside_numpyy", "it imports outside_numpyy, which is not installed"),
    "outside_wrong": ("1 / 0", "ZeroDivisionError: division by zero"),
    "outside_syntax": ("def", "SyntaxError: "),
    "outside_exit": ("raise SystemExit(0)", "SystemExit: 0"),
    "outside_taken": (
        "from jaxpipe.schedule import register_op, OpSpec\nregister_op(OpSpec('F', 'compute', (), 'b_s'))",
        "op 'F' is already registered with another meaning",
    ),
}


@pytest.mark.parametrize("name", BAD_MODULES)
def test_a_module_that_cannot_be_imported_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, words = BAD_MODULES[name]
    if text:
        (tmp_path / f"{name}.py").write_text(text)
    assert main(["compare", "--import", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jaxpipe: --import {name}: {words}")
    assert err.count("\n") == 1
    assert str(tmp_path) not in sys.path


# Installed packages.


def test_installed_families_and_ops_are_found_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_package.py").write_text(
        "from jaxpipe.schedule import Family, OpSpec, Wait, one_f_one_b\n"
        'MINE = Family("mine-2", one_f_one_b, "mine", "me")\n'
        'MEET = OpSpec("OutsideMeet", "compute", (Wait(("F",), "self"),), "")\n'
    )
    installed(tmp_path, monkeypatch, families="outside_package:MINE", ops="outside_package:MEET")
    assert generate("1f1b", 2, 2)
    assert "outside_package" not in sys.modules, "a name that is known loads nothing"
    assert op_spec("OutsideMeet").is_sync
    assert "mine-2" in FAMILIES
    assert FAMILIES["mine-2"].function is one_f_one_b


@pytest.mark.parametrize(
    ("entry", "text", "words"),
    [
        ("outside_absent:MINE", "", "ModuleNotFoundError: No module named 'outside_absent'"),
        ("outside_bad:OTHER", "", "AttributeError: "),
        ("outside_bad:MINE", "MINE = 3", "it is of type int; want Family"),
        (
            "outside_bad:MINE",
            "from jaxpipe.schedule import Family, gpipe\nMINE = Family('gpipe', gpipe, 'another', 'me')",
            "there is a family 'gpipe' already",
        ),
    ],
)
def test_a_broken_package_is_one_line_with_its_name(
    entry: str,
    text: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "outside_bad.py").write_text(text)
    installed(tmp_path, monkeypatch, families=entry)
    assert main(["schedules"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("jaxpipe: outside-dist: jaxpipe.families 'it' (")
    assert words in err
    assert err.endswith("mend or uninstall it\n")
    assert main(["schedule", "1f1b"]) == 0, "verbs that need nothing from outside go on"


def test_an_installed_op_may_not_be_required_of_every_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_strict.py").write_text(
        'from jaxpipe.schedule import OpSpec\nMUST = OpSpec("Must", "compute", (), "f_s", required=True)\n'
    )
    installed(tmp_path, monkeypatch, ops="outside_strict:MUST")
    with pytest.raises(ScheduleError, match=r"outside-dist: .*register it yourself"):
        op_spec("Must")
