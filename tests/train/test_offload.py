"""Training with offload, through the command line: the bits of training without, O and L in the record, and one clear line for
what this machine can't do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.runtime import transfer
from jaxpipe.schedule import generate, write_schedule
from jaxpipe.schedule.passes.offload import without_offloads
from jaxpipe.train.config import load_config
from jaxpipe.train.run import run_directory
from jaxpipe.train.setup import offload_options
from tests.support.pipelines import assert_same_arrays
from tests.support.train_runs import deterministic, final, settings, trace_rows, write_text

pytestmark = pytest.mark.usefixtures("one_build")

STEPS = 2
Overrides = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])
    monkeypatch.setattr(run_directory, "PICTURES", ("timeline.trace.json",))


@pytest.fixture
def tiny(tmp_path: Path) -> Overrides:
    """Provide overrides of a run of 2 steps in ``tmp_path/NAME`` with two chunks a rank."""
    text = write_text(tmp_path / "text.txt")

    def overrides(name: str, *extra: str) -> list[str]:
        base = (f"run.steps={STEPS}", "run.eval_every=0", f"run.checkpoint_every={STEPS}", "run.log_every=1")
        return settings(text, tmp_path / name, *base, "pipeline.chunks=2", *extra)

    return overrides


def _fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code = main(["train", *argv])
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("jaxpipe: ") and err.count("\n") == 1, err
    return err


def test_training_with_offload_has_the_bits_of_training_without(
    tiny: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = generate("po-f", 2, 4)
    # From files, whose orders stay: the family would offload nothing over a link as slow as this machine's.
    write_schedule(without_offloads(schedule), tmp_path / "bare.sched")
    write_schedule(schedule, tmp_path / "all.sched")
    offloading = f"pipeline.schedule={tmp_path / 'all.sched'}"
    runs = {
        "bare": [f"pipeline.schedule={tmp_path / 'bare.sched'}"],
        "all": [offloading, "offload.host_memory_gb=0.001"],
    }
    for name, overrides in runs.items():
        assert main(["train", *tiny(name, *overrides)]) == 0, capsys.readouterr().err
    monkeypatch.setattr(transfer, "PINNED_HOST", "nowhere")
    assert main(["train", *tiny("half", offloading, "offload.fraction=0.5"), "--offload-fallback"]) == 0

    expected = final(tmp_path / "bare", STEPS)
    logged = [{k: v for k, v in r.items() if k != "schedule"} for r in deterministic(tmp_path / "bare")]
    for name in ("all", "half"):
        assert_same_arrays(final(tmp_path / name, STEPS)[:2], expected[:2])
        assert [{k: v for k, v in r.items() if k != "schedule"} for r in deterministic(tmp_path / name)] == logged
        measured = trace_rows(tmp_path / name / "pictures" / "timeline.trace.json", "measured")
        for rank, row in measured.items():
            assert sorted(row) == sorted(map(str, schedule.actions(rank)))
            assert any(a.startswith("O") for a in row) and any(a.startswith("L") for a in row)


def test_what_the_machine_cannot_do_is_one_line(
    tiny: Overrides, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny("run", "pipeline.schedule=po-f")
    message = _fails(capsys, *run, "offload.host_memory_gb=1e-6")
    assert "offload.host_memory_gb=1e-06 allows 1e-06 GB: raise it to at least " in message
    enough = re.findall(r"at least ([\d.e-]+)", message)[0]
    assert (
        offload_options(load_config(None, [f"offload.host_memory_gb={enough}"]).pipeline.offload).host_memory_bytes
        == float(enough) * 1e9
    )
    monkeypatch.setattr(transfer, "PINNED_HOST", "nowhere")
    assert "cpu devices have no 'nowhere' memory" in _fails(capsys, *run)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("offload.fraction=1.5", "offload.fraction is 1.5, must be at most 1"),
        ("offload.fraction=-1", "offload.fraction is -1.0, must be at least 0"),
        ("offload.host_memory_gb=0", "offload.host_memory_gb is 0.0, must be greater than 0"),
        ("offload.fallback=perhaps", "offload.fallback"),
        ("offload.part=1", "offload.part"),
    ],
)
def test_settings_are_checked(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in _fails(capsys, override)
