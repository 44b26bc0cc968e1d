"""A run that has gone elsewhere: another folder, another working directory, its text and its tokenizer.json gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxpipe.cli import main
from jaxpipe.errors import CheckpointError, DataError
from jaxpipe.train.checkpoint import read_manifest
from jaxpipe.train.corpora.tokenizers import load_tokenizer, stored_tokenizer
from jaxpipe.train.evaluate import described
from tests.support.checkpoint_cases import rewrite_manifest
from tests.support.paths import ROOT
from tests.support.train_runs import config, copy_run, run, write_text


def write_words(path: Path, *extra_words: str) -> Path:
    """Write a ``tokenizer.json`` of whole words."""
    words = ["?", "the", "cat", "sat", "on", "a", "mat", "and", "that", "dog", "ran", "to", "its", "old", "red", "barn"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, *extra_words])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(*argv: object, code: int = 0) -> str:
        assert main([str(a) for a in argv]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return call


def test_the_tokenizer_is_in_the_checkpoint(tmp_path: Path) -> None:
    path = write_words(tmp_path / "words.json")
    copy = copy_run(ROOT / "tests" / "golden" / "checkpoint-0.1.0", tmp_path / "run") / "checkpoints" / "00000004"

    def keep(body: dict[str, Any]) -> None:
        body["meta"]["tokenizer"] = stored_tokenizer(load_tokenizer(str(path)))
        body["meta"]["config"]["data"]["tokenizer"] = "gone.json"

    rewrite_manifest(copy, keep)
    path.unlink()
    tokenizer = described(copy)[1].tokenizer
    assert (tokenizer.encode("the cat").tolist(), tokenizer.decode([9]), tokenizer.name) == ([1, 2], "dog", "gone.json")
    assert stored_tokenizer(load_tokenizer("ids:7")) == {"name": "ids:7", "fingerprint": "ids:7"}


@pytest.mark.soak
def test_a_run_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[..., Any]) -> None:
    author, empty = tmp_path / "author", tmp_path / "empty"
    for folder in (author, empty):
        folder.mkdir()
    words, text = write_words(author / "words.json"), write_text(author / "text.txt")
    monkeypatch.chdir(author)
    few = ("pipeline.ranks=1", "run.steps=2", "run.checkpoint_every=2", "run.eval_every=0", "data.tokenizer=words.json")
    run(config(Path("text.txt"), Path("run"), *few))
    monkeypatch.chdir(empty)
    score = json.loads(verb("eval", author / "run", "--json"))["model"]  # its path is relative to where it was trained

    text, out_dir = text.rename(tmp_path / "elsewhere.txt"), (author / "run").rename(tmp_path / "moved")
    tokenizer_json = words.read_text()
    words.unlink()
    assert "cat" in verb("generate", out_dir, "--prompt", "the cat", "--tokens", 3, "--temperature", 0)
    assert "--data PATH" in verb("eval", out_dir, code=2)
    assert json.loads(verb("eval", out_dir, "--json", "--data", text))["model"] == score

    assert (out_dir / "tokenizer" / "tokenizer.json").read_text() == tokenizer_json
    stored = read_manifest(out_dir).meta["tokenizer"]
    assert stored["json"] == tokenizer_json and stored["name"] == "words.json"
    copied = f"data.tokenizer={out_dir / 'tokenizer' / 'tokenizer.json'}"
    _, printed = run(config(text, out_dir, *few, copied, "run.steps=3"))
    assert "resumed from step 2" in printed
    changed = f"data.tokenizer={write_words(empty / 'words.json', 'hen')}"
    with pytest.raises((CheckpointError, DataError), match="tokenizer"):
        run(config(text, out_dir, *few, changed, "run.steps=4", "model.options.vocab_size=32"))

    rewrite_manifest(out_dir / "checkpoints" / "00000003", lambda body: body["meta"].pop("tokenizer"))
    assert verb("generate", out_dir, "--tokens", 1)  # of an older version: the copy in the run
