"""The quick start's second half, ``scripts/quickstart.py``, at the tiniest sizes; the shell part has its own tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from jaxpipe.train.config import load_config
from tests.support.paths import ROOT
from tests.support.train_runs import contents, settings, write_text


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "scripts" / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_main_job_twice(
    quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "SAMPLE_TOKENS", 5)
    text = write_text(tmp_path / "text.txt")
    overrides = settings(text, tmp_path / "run", "run.steps=4", "pipeline.schedule=zb-1p", "pipeline.recompute=none")
    assert quickstart.main(overrides) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    table = lines.index("loading the checkpoint without a pipeline, on one device") + 2
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["unigram", "bigram", "gpt,"]
    assert "a sample of 5 tokens after 'def ':" in printed
    assert lines[-1].startswith(f"pictures of the schedule as it ran: {tmp_path / 'run' / 'pictures'}")

    before = contents(tmp_path / "run")
    assert quickstart.main(overrides) == 0
    output = capsys.readouterr().out
    assert output.startswith(
        f"{tmp_path / 'run'} holds a finished run, which stays; this one goes to {tmp_path / 'run-2'}\n"
    )
    assert "step 4/4" in output
    assert contents(tmp_path / "run") == before
    assert quickstart.unfinished(tmp_path / "run", 4) == tmp_path / "run-3"
    assert quickstart.unfinished(tmp_path / "run", 5) == tmp_path / "run"


def test_mistakes_are_one_line(quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for override, expected in {"run.stepz=1": "did you mean run.steps", "data.path=none.txt": "none.txt"}.items():
        assert quickstart.main([f"run.out_dir={tmp_path / 'run'}", override]) == 2
        error = capsys.readouterr().err
        assert error.startswith("quickstart: ")
        assert error.count("\n") == 1
        assert expected in error
    assert contents(tmp_path) == {}


def test_its_settings_are_valid_and_shown(quickstart: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(quickstart.CONFIG)
    assert config.pipeline.ranks == 4
    assert quickstart.main(["--help"]) == 0
    assert config.describe() in capsys.readouterr().out
