"""Data of several arrays: order and division as for tokens, files and functions, and one line for what does not fit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.errors import DataError, JaxpipeError
from jaxpipe.stage.model.reference import resolve_model
from jaxpipe.train.config import load_config
from jaxpipe.train.corpora.datasets import ArrayDataset, UserBatches, UserDataset, dataset_from_function, load_dataset
from jaxpipe.train.corpora.tokenizers import ByteTokenizer
from jaxpipe.train.data import DataState
from jaxpipe.train.setup import build_model, read_by

BYTES = ByteTokenizer()


def numbered(n: int) -> dict[str, np.ndarray]:
    return {
        "images": np.arange(n, dtype=np.uint8)[:, None, None] + np.zeros((1, 2, 3), np.uint8),
        "tokens": np.arange(n)[:, None],
    }


def refusal(make: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(JaxpipeError) as caught:
        make(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("n", "holdout"), [(100, 0.1), (7, 0.3), (1000, 0.05), (5, 0.0)])
def test_rows_are_divided_and_each_is_seen_once_an_epoch(n: int, holdout: float) -> None:
    data = ArrayDataset.split("a", BYTES, numbered(n), holdout)
    train, held_out = data.train["tokens"][:, 0], data.held_out["tokens"][:, 0]
    assert sorted([*train, *held_out]) == list(range(n)) and (len(held_out) > 0) == (holdout > 0)
    batches = data.batches(3, 2, 1)
    rows = np.concatenate([batches.batch_at(k)["tokens"][:, 0] for k in range(len(train))])  # two epochs
    assert sorted(rows) == sorted([*train, *train])
    assert (rows[: len(train)] != rows[len(train) :]).any() or len(train) < 4
    first = batches.batch_at(1)
    np.testing.assert_array_equal(first["images"][:, 0, 0], first["tokens"][:, 0] % 256)  # rows stay together


def test_batches_go_on_where_a_checkpoint_stands_also_with_another_batch_size() -> None:
    data = ArrayDataset.split("a", BYTES, numbered(50), 0.1)
    batches = data.batches(3, 2, 1)
    state = DataState.from_dict(batches.state_at(6).to_dict())
    np.testing.assert_array_equal(data.batches(3, 2, 1, state).batch_at(7)["tokens"], batches.batch_at(7)["tokens"])
    wider = data.batches(3, 4, 1, state)
    both = np.concatenate([batches.batch_at(6)["tokens"], batches.batch_at(7)["tokens"]])
    np.testing.assert_array_equal(wider.batch_at(6)["tokens"], both)
    other = ArrayDataset.split("a", BYTES, numbered(50), 0.2)
    assert "differ from the checkpoint's" in refusal(other.batches, 3, 2, 1, state)
    assert "data.seed=4 where the checkpoint has 3" in refusal(data.batches, 4, 2, 1, state)


def test_the_last_held_out_batch_is_padded_with_weight_zero_or_left_out() -> None:
    arrays = numbered(20)
    plain = ArrayDataset("a", BYTES, arrays, arrays)
    assert [len(b["tokens"]) for b in plain.held_out_batches(8, 1)] == [8, 8]
    weighted = arrays | {"weights": np.ones(20, np.float32)}
    batches = ArrayDataset("a", BYTES, weighted, weighted).held_out_batches(8, 1)
    assert [float(b["weights"].sum()) for b in batches] == [8, 8, 4]
    few = plain.held_out_batches(4, 1, limit=2)
    assert len(few) == 2 and few[0]["tokens"][0, 0] == 0 and few[1]["tokens"][-1, 0] == 19
    assert "too few for a batch of 32" in refusal(plain.held_out_batches, 32, 1)


def test_a_npz_of_several_arrays_is_a_dataset(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **numbered(40))
    config = load_config(None, [f"data.path={tmp_path / 'a.npz'}", "data.holdout=0.25"])
    data = load_dataset(config)
    assert isinstance(data, ArrayDataset)
    assert data.describe().endswith("images uint8[2, 3], tokens int64[1]; 30 rows to train, 10 held out")
    assert data.bytes_per_token() is None


def test_a_model_gets_the_arrays_that_it_reads_in_its_dtypes() -> None:
    data = ArrayDataset.split("a", BYTES, numbered(20) | {"more": np.zeros(20)}, 0.1)
    fitting = data.for_model({"tokens": ((1,), np.int32)}, 1)
    assert {name: a.dtype for name, a in fitting.batches(0, 2, 1).batch_at(0).items()} == {"tokens": np.int32}
    assert fitting.fingerprint == data.fingerprint
    reads = {
        "picture": ((2, 3), np.uint8, "has images, tokens, more, and the model reads 'picture' uint8[2, 3]"),
        "images": ((3, 3), np.uint8, "'images' is uint8[2, 3] a sequence, and the model reads uint8[3, 3]"),
        "tokens": ((1,), np.float32, "'tokens' is int64[1] a sequence, and the model reads float32[1]"),
    }
    for name, (shape, dtype, message) in reads.items():
        assert message in refusal(data.for_model, {name: (shape, dtype)}, 1)
    huge = ArrayDataset("a", BYTES, {"tokens": np.full((4, 1), 2**40)}, {"tokens": np.zeros((0, 1), np.int64)})
    assert "from -2147483648 to 2147483647" in refusal(huge.for_model, {"tokens": ((1,), np.int32)}, 1)


def test_tokens_are_refused_by_a_model_of_pictures() -> None:
    config = load_config(None, ["model.target=models.clip:CLIP", "data.seq_len=8"])
    model = build_model(config, 256)
    assert "has tokens, targets, weights, and the model reads 'images'" in refusal(
        read_by, model, load_dataset(config), config.data.seq_len
    )


MADE = """
import numpy as np

def pair(seq_len, n=10):
    arrays = {"tokens": np.zeros((n, seq_len), np.int32)}
    return arrays, arrays

def one(n=10):
    return {"tokens": np.arange(n)}

def uneven():
    return {"a": np.zeros(3), "b": np.zeros(4)}

def different():
    return {"a": np.zeros(3)}, {"a": np.zeros(3, int)}

def number():
    return 3
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "outside_data.py").write_text(MADE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "outside_data"
    sys.modules.pop("outside_data", None)


def test_a_function_makes_arrays(outside: str) -> None:
    arrays = dataset_from_function(f"{outside}:pair", {"n": 4}, BYTES, 5, 0.1)
    assert arrays.train["tokens"].shape == arrays.held_out["tokens"].shape == (4, 5)
    assert len(dataset_from_function(f"{outside}:one", {}, BYTES, 5, 0.2).held_out["tokens"]) == 2
    config = load_config(None, [f"data.path={outside}:pair", "data.options.n=3"])
    assert load_dataset(config).describe() == f"{outside}:pair: tokens int32[128]; 3 rows to train, 3 held out"


def test_bad_functions_and_arrays_are_one_line(outside: str) -> None:
    messages = {
        "pare": "has no function or class 'pare'; did you mean 'pair'?",
        "number": "returned a int; want a dict of arrays, or two",
        "uneven": "as many rows each, of axis 0; rows: a 3, b 4",
        "different": "differ from those to train on",
    }
    for name, message in messages.items():
        assert message in refusal(dataset_from_function, f"{outside}:{name}", {}, BYTES, 5, 0.1)
    assert "has no option 'm'" in refusal(dataset_from_function, f"{outside}:pair", {"m": 1}, BYTES, 5, 0.1)
    assert "too few to keep" in refusal(dataset_from_function, f"{outside}:one", {"n": 1}, BYTES, 5, 0.1)
    assert "data.options are for a function" in refusal(load_config, None, ["data.options.n=3"])


def test_words_are_drawn_and_held_out_ones_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """All words once, then few."""
    from models import words
    from models.words import pairs, transcripts

    train, held_out = pairs(held_out=50)
    train_words = {bytes(row) for row in train["tokens"].astype(np.uint8)}
    assert len(train_words) == len(train["tokens"]) > 4000
    assert not train_words & {bytes(row) for row in held_out["tokens"].astype(np.uint8)}
    assert train["images"].any(axis=(1, 2)).all()
    few = words._words(8)[:600]
    monkeypatch.setattr(words, "_words", lambda longest: [word for word in few if len(word) <= longest])
    (one, _), (repeat, _) = pairs(held_out=50), pairs(held_out=50)
    np.testing.assert_array_equal(one["images"], repeat["images"])
    transcript, _ = transcripts(seq_len=12)
    in_answer = transcript["weights"][0] > 0
    word = bytes(transcript["targets"][0][in_answer].astype(np.uint8))
    assert word.endswith(b"\n") and word[:-1].isalpha() and (transcript["tokens"][0][:4] == 0).all()
    assert "leaves 1 positions" in refusal(transcripts, seq_len=5)
    assert "is no font of matplotlib's" in refusal(pairs, font="Comic")
    assert "data.options.copies is 0; want a whole number from 1 to 4096" in refusal(pairs, copies=0)
    assert "data.options.height is 12.0; want a whole number" in refusal(transcripts, height=12.0)
    assert "data.seq_len is 100000; want a whole number" in refusal(transcripts, seq_len=100000)
    assert "do not fit into memory; use smaller ones" in refusal(pairs, copies=4000, height=4000)


def test_names_of_models_of_pictures_resolve() -> None:
    assert resolve_model("models.clip:CLIP", {"text_size": 64}).name == "clip"


def test_negative_weights_are_refused_at_the_door() -> None:
    """A step took -1 for a weight, and told a loss of -188."""
    weights = np.ones((8, 3), np.float32)
    weights[5, 2] = -0.5
    kinds = {"weights": ((3,), np.float32)}
    with pytest.raises(DataError, match=r"'weights'.*-0.5.*5"):
        ArrayDataset("a", BYTES, {"weights": weights}, {"weights": weights}).for_model(kinds, 3)
    batches = UserBatches(UserDataset("m:f", {}, BYTES, kinds), 0, 8, 3, {})
    assert batches.checked({"weights": abs(weights)}, 0)
    with pytest.raises(DataError, match=r"7: 'weights'.*-0.5.*5"):
        batches.checked({"weights": weights}, 7)
