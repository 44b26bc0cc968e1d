"""Setting a run up: everything is made once, and the memory limit holds with the bytes that the split stages really have."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import optax
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.runtime import pipeline
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate, one_f_one_b, write_schedule
from jaxpipe.train import assemble, loop, schedule_source, trainer
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.devices import find_devices
from jaxpipe.train.setup import compile_setup, prepare
from jaxpipe.train.trainer import Trainer
from jaxpipe.train.update.optimizer import learning_rate, optimizer_remarks
from models.gpt import GPT
from tests.support.pipelines import MICROBATCH, parameters, random_batch, tiny_model
from tests.support.train_runs import config, write_text


def _build(tmp_path: Path, limit: float, notes: list[str]) -> tuple[float, ...]:
    text = write_text(tmp_path / "text.txt")
    overrides = ("pipeline.schedule=zb", f"pipeline.memory_limit={limit}", "pipeline.recompute=cheap")
    settings = config(text, tmp_path / "run", *overrides)
    ready = compile_setup(prepare(settings), find_devices(settings.pipeline.ranks), notes.append, repeats=1)
    return ready.pipeline.predicted_timeline().peak_activations


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
    overrides = (f"pipeline.schedule={tmp_path / 'mine.sched'}", "pipeline.memory_limit=1")
    with pytest.raises(ScheduleError, match=r"'1f1b'.*2 activations.*1"):
        compile_setup(
            prepare(config(text, tmp_path / "run", *overrides)), find_devices(2), lambda note: None, repeats=1
        )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each of these is called: an order drafted, simulated, lowered, linked."""
    counts: Counter[str] = Counter()

    def count(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    for module in (assemble, schedule_source, pipeline, trainer, loop):
        for name in ("generate", "simulate", "lower", "Executor"):
            if hasattr(module, name):
                count(module, name)
    return counts


def test_a_start_drafts_simulates_lowers_and_links_once(tmp_path: Path, calls: Counter[str]) -> None:
    text = write_text(tmp_path / "text.txt")
    loop.train(config(text, tmp_path / "run", "pipeline.schedule=zb", "run.steps=2", "run.log_every=5"), StringIO())
    assert calls == {"generate": 1, "simulate": 1, "lower": 1, "Executor": 1}


@pytest.mark.usefixtures("x64")
def test_a_trainer_and_a_pipeline_make_everything_once(calls: Counter[str]) -> None:
    model = tiny_model("gpt")
    batch = random_batch(2)
    trained = Trainer(
        model,
        optimizer=optax.sgd(0.1),
        microbatch_size=MICROBATCH,
        schedule="1f1b",
        ranks=2,
        microbatches=2,
        dtype="float64",
    )
    assert "bubble" in str(trained) and calls == {"generate": 1, "simulate": 1, "lower": 1}
    trained.step(trained.init(), batch)
    assert calls == {"generate": 1, "simulate": 1, "lower": 1, "Executor": 1}
    calls.clear()
    pipe = Pipeline.build(model, generate("1f1b", 2, 2), microbatch_size=MICROBATCH, compute_dtype="float64")
    params = pipe.place(parameters("gpt"))
    assert pipe.with_costs(pipe.flop_costs).loss_and_grads(params, batch)[0] > 0
    assert calls == {"simulate": 1, "lower": 1, "Executor": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", (0.25, 1, 1, 1, 1)),
        ("linear", (0.25, 1, 0.775, 0.325, 0.1)),
        ("wsd", (0.25, 1, 1, 0.82, 0.1)),
        ("cosine", (0.25, 1, 0.8682, 0.2318, 0.1)),
    ],
)
def test_rates_by_name(name: str, expected: tuple[float, ...]) -> None:
    """Warm-up over 4 of 20 steps, the last 5 of them falling with ``wsd``."""
    rate = learning_rate(1.0, 4, 20, 0.1, name, 0.25)
    assert [float(rate(step)) for step in (0, 4, 8, 16, 20)] == pytest.approx(expected, abs=1e-4)


def test_a_warm_up_longer_than_the_run_is_clipped_and_told() -> None:
    model = GPT(vocab_size=8, d_model=8, num_layers=1, num_heads=2, seq_len=4)
    short = TrainConfig().override(["run.steps=5", "data.path=x"])
    line, _ = optimizer_remarks(short, model)
    assert line == "optimizer.warmup_steps=20 is more than run.steps=5: the rate rises over all 5 steps"
    (decay,) = optimizer_remarks(TrainConfig(), model)
    assert decay.startswith("weight decay 0.1 acts on ") and "; not on bias, scale (" in decay
    assert list(optimizer_remarks(TrainConfig().override(["optimizer.weight_decay=0"]), model)) == []
