"""Setting a run up: the memory limit holds with the bytes that the split stages really have."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import one_f_one_b, write_schedule
from jaxpipe.train.devices import find_devices
from jaxpipe.train.setup import build
from tests.train_runs import config, write_text


def _build(tmp_path: Path, limit: float, notes: list[str]) -> tuple[float, ...]:
    text = write_text(tmp_path / "text.txt")
    more = ("pipeline.schedule=zb", f"pipeline.memory_limit={limit}", "pipeline.recompute=cheap")
    made = config(text, tmp_path / "run", *more)
    setup = build(made, find_devices(made.pipeline.ranks), notes.append, repeats=1)
    return setup.trainer.pipeline.predicted_timeline().peak_activations


def test_a_memory_limit_counts_what_waits_for_w(tmp_path: Path) -> None:
    notes: list[str] = []
    assert max(_build(tmp_path, 2, notes)) <= 2
    assert any("a new order keeps to 2" in note for note in notes), (
        "the test wants a stage whose W keeps more than F saved"
    )


def test_a_limit_below_one_microbatch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"is below the .* of one microbatch"):
        _build(tmp_path, 1, [])


def test_a_schedule_file_keeps_the_memory_limit_or_is_refused(tmp_path: Path) -> None:
    """No family makes another order of it, so the limit can't be met; it was passed over without a word."""
    write_schedule(one_f_one_b(ranks=2, microbatches=4), tmp_path / "mine.sched")
    text = write_text(tmp_path / "text.txt")
    more = (f"pipeline.schedule={tmp_path / 'mine.sched'}", "pipeline.memory_limit=1")
    with pytest.raises(
        ScheduleError, match="schedule '1f1b' holds up to 2 activations on a rank, more than the memory limit of 1"
    ):
        build(config(text, tmp_path / "run", *more), find_devices(2), lambda note: None, repeats=1)
