"""Runs on chats: whole ones on any ranks, devices and after a stop, batches without a target, and runs from before."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from jaxpipe.errors import DataError
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.metrics import read_metrics
from tests.support.chats import CHATML, chat
from tests.support.train_runs import config, run

pytestmark = pytest.mark.usefixtures("one_build")

LENGTH = 96
MORE = ("data.format=chat", f"data.seq_len={LENGTH}", "optimizer.schedule=constant", "run.steps=4", "run.eval_every=4",
        "run.checkpoint_every=2", "run.log_every=1", "pipeline.microbatches=2", "run.batch=4")  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("chats"), random.Random(0)
    (folder / "t.jinja").write_text(CHATML)
    records = ({"messages": chat(rng, 1, False, words=3)[0]} for _ in range(60))
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder / "a.jsonl"


def chat_config(chats: Path, out_dir: Path, *overrides: str) -> TrainConfig:
    return config(chats, out_dir, f"data.chat_template={chats.parent}/t.jinja", *MORE, *overrides)


def losses(out_dir: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(out_dir / "metrics.jsonl") if "loss" in r]


def test_whole_chats_train_alike_on_any_ranks_and_devices_and_after_a_stop(chats: Path, tmp_path: Path) -> None:
    _, printed = run(chat_config(chats, tmp_path / "a"))
    assert "; whole chats in " in printed and "the model has no mask" not in printed
    assert load_config(tmp_path / "a" / "config.toml").data.reading.mask == "document"
    run(chat_config(chats, tmp_path / "b", "pipeline.ranks=1", "pipeline.dp=2"))
    run(chat_config(chats, tmp_path / "c", "run.steps=2"))
    run(chat_config(chats, tmp_path / "c", "pipeline.ranks=4", "pipeline.schedule=zb-h1", "pipeline.microbatches=4"))
    expected = losses(tmp_path / "a")
    assert len(expected) == 4
    for name in "bc":
        np.testing.assert_allclose(losses(tmp_path / name), expected, rtol=2e-6)


def test_a_run_keeps_the_packing_that_it_began_with(chats: Path, tmp_path: Path) -> None:
    before = ("data.pack=windows", "data.mask=causal")
    run(chat_config(chats, tmp_path / "a", *before))
    run(chat_config(chats, tmp_path / "b", *before, "run.steps=2"))
    _, printed = run(chat_config(chats, tmp_path / "b"))
    assert "; chats end to end in " in printed and losses(tmp_path / "a") == losses(tmp_path / "b")
    with pytest.raises(DataError, match=r"data\.pack.*data\.mask"):
        run(chat_config(chats, tmp_path / "b", "data.pack=whole", "run.steps=6"))


def test_a_batch_without_a_target_ends_no_run(chats: Path, tmp_path: Path) -> None:
    """It was taken for a gradient that is not finite, and five of them ended the run."""
    messages = [{"role": "user", "content": "word " * 120}, {"role": "assistant", "content": "ok"}]
    path = tmp_path / "rag.jsonl"
    path.write_text((json.dumps({"messages": messages}) + "\n") * 40)
    small = (
        "data.seq_len=32",
        "run.batch=2",
        "run.steps=12",
        "run.eval_every=0",
        "run.checkpoint_every=12",
        "run.max_skipped=1",
    )
    template = f"data.chat_template={chats.parent}/t.jinja"
    with pytest.raises(DataError, match=r"40 longer.*40 without.*data\.seq_len"):
        run(config(path, tmp_path / "a", *MORE, template, *small, "data.holdout=0"))
    result, printed = run(config(path, tmp_path / "b", *MORE, template, *small, "data.pack=windows"))
    records = list(read_metrics(tmp_path / "b" / "metrics.jsonl"))
    empty = [r for r in records if r.get("cause") == "no target"]
    assert result.step == 12 and result.skipped_steps == 0 and result.empty_steps == len(empty) > 5
    assert all((r["loss"], r["tokens"], r["applied"]) == (None, 0, False) for r in empty)
    assert all(r["applied"] and "cause" not in r for r in records if r not in empty)
    assert printed.count("no target in this batch") == 1 and f"{len(empty)} without a target" in printed
    _, printed = run(config(path, tmp_path / "c", *MORE, template, *small, "data.pack=concat", "run.steps=2"))
    assert "without an answer left out" in printed and all(
        r["applied"] for r in read_metrics(tmp_path / "c" / "metrics.jsonl")
    )
