"""The verb ``rehearse``: its report, the costs it writes, and one clear line and exit code 2 for mistakes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.cli.plan_verbs import memory_size
from jaxpipe.schedule import generate, read_costs, simulate
from jaxpipe.train.config import load_config
from tests.support.train_runs import settings, write_text

pytestmark = pytest.mark.usefixtures("one_build")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def config(text: Path, tmp_path: Path) -> Path:
    """Provide a config file of two ranks."""
    path = tmp_path / "run.toml"
    path.write_text(load_config(None, settings(text, tmp_path / "run")).to_toml(), encoding="utf-8")
    return path


def _cli(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_verb_writes_costs_that_the_schedule_verbs_read(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs_file = tmp_path / "costs.json"
    code, out, err = _cli(
        capsys, "rehearse", config, "--all-ranks", "--steps", 1, "-o", costs_file, "--json", "--no-host-link"
    )
    assert code == 0, err
    report = json.loads(out)
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert report["predicted_step_s"] > 0
    for r in report["ranks"]:
        memory = r["memory"]
        assert memory["measured_bytes"] <= memory["predicted_bytes"] <= 1.05 * memory["measured_bytes"]
        assert memory["by_kind"]["optimizer"] > 0
    costs = read_costs(costs_file)
    assert costs.num_stages == 2
    assert costs.f_s == tuple(report["costs"]["f_s"])
    schedule = tmp_path / "s.sched"
    schedule.write_text(str(generate("zb-h1", 2, 4)), encoding="utf-8")
    code, out, _ = _cli(capsys, "simulate", schedule, "--costs", costs_file, "--json")
    assert code == 0
    assert json.loads(out)["makespan"] == pytest.approx(simulate(generate("zb-h1", 2, 4), costs).makespan)


def test_verb_says_what_it_did_and_runs_out_of_memory_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _cli(capsys, "rehearse", config, "--rank", 1, "--steps", 1, "pipeline.schedule=zb-h1")
    assert (code, err) == (0, "")
    assert "rank 1 of 2 (stage 1), schedule zb-h1" in out
    assert "predicted ÷ measured 1.0" in out
    assert re.search(r"\bW +1 +[0-9.]+ ", out)
    code, _, err = _cli(capsys, "rehearse", config, "--rank", 1, "--memory", "35KB")
    assert (code, err.count("\n")) == (5, 1)
    assert err.startswith("jaxpipe: rank 1: out of memory")
    assert "held of 35 KB" in err


MISTAKES = {
    "rank out of range": ("{config} --rank 2", "ranks 0 to 1"),
    "negative rank": ("{config} --rank -1", "-1"),
    "no rank": ("{config}", "--rank"),
    "both": ("{config} --rank 0 --all-ranks", "not allowed"),
    "no config": ("--rank 0", "CONFIG"),
    "missing config": ("none.toml --rank 0", "none.toml: no such config file"),
    "costs into nowhere": ("{config} --rank 0 -o none/costs.json", "no directory 'none'"),
    "costs of another kind": ("{config} --rank 0 -o costs.csv", ".json"),
    "memory without sense": ("{config} --rank 0 --memory lots", "such as 80GB"),
    "no memory": ("{config} --rank 0 --memory 0GB", "such as 80GB"),
    "no steps": ("{config} --rank 0 --steps 0", "1 to"),
    "no bandwidth": ("{config} --rank 0 --link-bandwidth 0", "above 0"),
    "unknown key": ("{config} --rank 0 pipeline.rank=3", "did you mean"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(
    case: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    line, expected = MISTAKES[case]
    code, out, err = _cli(capsys, "rehearse", *line.format(config=config).split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_output(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    code, _, err = _cli(capsys, "rehearse", config, "--rank", 0, "-o", folder / "costs.json")
    assert code == 2
    assert "permission denied" in err


def test_a_directory_is_no_output(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "costs.json").mkdir()
    code, _, err = _cli(capsys, "rehearse", config, "--rank", 0, "-o", tmp_path / "costs.json")
    assert code == 2
    assert "is a directory" in err


@pytest.mark.parametrize(
    ("written", "size"), [("80GB", 80e9), ("1.5 GiB", 1.5 * 2**30), ("500mb", 500e6), ("7", 7), ("2KiB", 2048)]
)
def test_memory_sizes(written: str, size: float) -> None:
    assert memory_size(written) == size
