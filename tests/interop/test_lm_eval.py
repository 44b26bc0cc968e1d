"""lm-eval on what a run exports: its windows, and its numbers beside ours."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from jaxpipe.train.loop import train
from scripts.lm_eval.compare import MOST, compare, rolling
from tests.support.train_runs import config, write_text

NEEDED = ("lm_eval", "accelerate", "transformers", "torch")
MISSING = [name for name in NEEDED if getattr(find_spec(name), "origin", None) is None]


@pytest.mark.parametrize("length", [1, 5, 8, 9, 16, 29])
def test_every_token_is_a_target_once(length: int) -> None:
    ids = list(range(1, length + 1))
    windows = rolling(ids, 0, 8)
    assert [int(t) for w in windows for t, n in zip(w["targets"][0], w["weights"][0], strict=True) if n] == ids
    assert windows[0]["tokens"][0, 0] == 0
    for window in windows:
        assert all(array.shape == (1, 8) for array in window.values())
        inputs = window["tokens"][0, 1:]
        np.testing.assert_array_equal(window["targets"][0, :-1][inputs > 0], inputs[inputs > 0])
    assert length < 8 or all((window["targets"] > 0).all() for window in windows), "the last one reaches back"


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_lm_eval_says_what_we_say(tmp_path: Path) -> None:
    overrides = ("data.seq_len=96", "data.holdout=0.5", "run.steps=10")
    train(config(write_text(tmp_path / "text.txt", 1200), tmp_path / "run", *overrides), io.StringIO())
    report = compare(tmp_path / "run", tmp_path / "out", sys.executable, count=3, windows=2.5)
    assert report["bits_per_byte_differ"] <= MOST
    assert report["lm_eval"]["jaxpipe_greedy"] == 1.0
    assert report["lm_eval"]["jaxpipe_choice"] == report["jaxpipe"]["jaxpipe_choice"]
