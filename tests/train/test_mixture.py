"""Weighted sources and batches of the user's own: order, shares, epochs and exact resuming."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.errors import ConfigError, DataError, JaxpipeError
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.corpus import Corpus
from jaxpipe.train.corpora.datasets import BLOCK, ArrayDataset, MixedDataset, UserDataset, load_dataset
from jaxpipe.train.corpora.tokenizers import ByteTokenizer, IdTokenizer
from jaxpipe.train.data import Dataset, DataState, TokenDataset

BYTES = ByteTokenizer()


def tokens(first: int, n: int) -> TokenDataset:
    corpus = Corpus("t", np.arange(first, first + n, dtype=np.int32), np.array([0, n]), ("t",), (), str(first), None, 0)
    return TokenDataset.split(corpus, IdTokenizer(1 << 20), 0.1)


def mixed() -> MixedDataset:
    parts = {"a": tokens(0, 5000), "b": tokens(100_000, 900), "c": tokens(200_000, 20)}
    return MixedDataset.of(parts, {"a": 7.0, "b": 2.9, "c": 0.1})


def test_shares_and_epochs_are_exact() -> None:
    data = mixed()
    assert data.shares == (2867, 1188, 41) and sum(data.shares) == BLOCK
    firsts = data.batches(3, 32, 8).batch_at
    got = np.concatenate([firsts(step)["tokens"][:, 0] for step in range(2 * BLOCK // 32)])
    for k, part in enumerate(data.parts.values()):
        rows = part.windows("train", 8)
        expected = rows.batch(np.arange(len(rows)))["tokens"][:, 0].tolist()
        tokens = [int(t) for t in got if t // 100_000 == k]
        assert len(tokens) == 2 * data.shares[k]
        for epoch in range(len(tokens) // len(expected)):
            assert sorted(tokens[epoch * len(expected) : (epoch + 1) * len(expected)]) == expected
        assert (
            max(Counter(tokens).values()) - min(Counter(tokens).values() if len(tokens) >= len(expected) else [0]) <= 1
        )
    early = Counter(int(t) // 100_000 for t in got[:400])
    assert 250 < early[0] < 310 and early[1] > 80, "mixed from the start"


@pytest.mark.parametrize("seed", range(5))
def test_a_mixture_goes_on_exactly_with_any_batch_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data, state, step = mixed(), None, 0
    batch_per_row = data.batches(seed, 1, 8)
    token_batches: list[np.ndarray] = []
    while sum(map(len, token_batches)) < 600:
        batches = data.batches(seed, int(rng.integers(1, 40)), 8, state)
        for _ in range(int(rng.integers(1, 4))):
            token_batches.append(batches.batch_at(step)["tokens"])
            step += 1
        state = DataState.from_dict(batches.state_at(step).to_dict())
    got = np.concatenate(token_batches)
    np.testing.assert_array_equal(got, np.concatenate([batch_per_row.batch_at(k)["tokens"] for k in range(len(got))]))
    held_out = data.held_out_batches(16, 8)
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in held_out])
    assert len(targets) == len(set(targets)) == sum(p.held_out_tokens - len(p.held_out) for p in data.parts.values())
    assert data.describe().startswith("a 70.0% of t: 1 documents")


def packed() -> TokenDataset:
    ids, edges = np.arange(400, dtype=np.int32), np.cumsum([0, *[5, 9, 3, 23] * 10])
    return TokenDataset.split(Corpus("t", ids, edges, None, (), "p", None, 0), IdTokenizer(400), 0.1, pack="whole")


def arrays() -> ArrayDataset:
    values: dict[str, Any] = {"image": np.arange(300, dtype=np.float32).reshape(50, 6), "label": np.arange(50)}
    return ArrayDataset.split("pictures", BYTES, values, 0.1)


@pytest.mark.parametrize(
    "make", [mixed, packed, arrays, lambda: replace(tokens(0, 300), by_document=True), lambda: tokens(0, 300)]
)
@pytest.mark.parametrize("rows", [[], [0, 1, 6, 7], [11], [3, 2]])
def test_rows_of_a_batch_are_those_of_the_whole(make: Callable[[], Dataset], rows: list[int]) -> None:
    batches = make().batches(3, 12, 8)
    for step in (0, 2, 5):  # over the ends of epochs
        whole, own = batches.batch_at(step), batches.batch_at(step, np.array(rows, np.int64))
        assert own.keys() == whole.keys()
        for name, array in own.items():
            np.testing.assert_array_equal(array, whole[name][rows])
            assert array.dtype == whole[name].dtype


def test_sources_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 4000)
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n' * 2000)
    config = TrainConfig().override(
        [f"data.sources.x.path={tmp_path}/a.txt", f"data.sources.y.path={tmp_path}/b.jsonl", "data.sources.y.weight=3"]
    )
    assert TrainConfig.from_dict(config.to_dict()) == config
    data = load_dataset(config.override(["data.sources.x.weight=1"]))
    assert isinstance(data, MixedDataset) and data.shares == (1024, 3072)
    assert data.bytes_per_token() == pytest.approx((200 + 100) / 400, rel=0.05)
    with pytest.raises(ConfigError, match=r"data.path and data.sources are given"):
        config.override([f"data.path={tmp_path}"])
    with pytest.raises(ConfigError, match=r"needs data.sources.z.path"):
        config.override(["data.sources.z.weight=2"])
    with pytest.raises(DataError, match=r"data.sources.x.weight=0.0001 is less than 1/4096"):
        load_dataset(config.override(["data.sources.x.weight=0.0001"]))


OWN = """
import numpy as np
def by_step(seed, step, batch, seq_len, held_out, scale=1):
    tokens = np.random.default_rng([seed, step, held_out]).integers(0, 9, (batch, seq_len)) * scale
    return {"tokens": tokens, "extra": 1}
def stream(batch, seq_len, steps=9):
    for k in range(steps):
        yield {"tokens": np.full((batch, seq_len), k)}
def fails(batch):
    yield from [1 / 0]
def number():
    return 3
"""


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_batches.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_batches", raising=False)
    return "own_batches"


def dataset(target: str, **options: Any) -> UserDataset:
    overrides = [f"data.options.{name}={value}" for name, value in options.items()]
    data = load_dataset(TrainConfig().override([f"data.target={target}", *overrides]))
    assert isinstance(data, UserDataset)
    return data.for_model({"tokens": ((4,), np.int32)}, 4)


def test_a_function_of_the_step_makes_batches(module_name: str) -> None:
    data = dataset(f"{module_name}:by_step", scale=2)
    batches = data.batches(5, 3, 4)
    resumed = data.batches(5, 3, 4, DataState.from_dict(batches.state_at(6).to_dict()))
    for step in (6, 7, 3):
        expected = np.random.default_rng([5, step, 0]).integers(0, 9, (3, 4)) * 2
        for each in (batches, resumed):
            np.testing.assert_array_equal(each.batch_at(step)["tokens"], expected)
    assert len(batches.batch_at(6, np.array([1]))["tokens"]) == 3, "a function makes whole batches"
    assert batches.batch_at(0).keys() == {"tokens"} and batches.batch_at(0)["tokens"].dtype == np.int32
    assert len(data.held_out_batches(3, 4, 2)) == 2
    assert (data.held_out_batches(3, 4, 2)[0]["tokens"] != data.batches(0, 3, 4).batch_at(0)["tokens"]).any()
    assert data.fingerprint != dataset(f"{module_name}:by_step", scale=3).fingerprint


def test_an_iterator_makes_batches_and_goes_on_where_it_was(module_name: str) -> None:
    data = dataset(f"{module_name}:stream")
    batches = data.batches(0, 3, 4)
    assert [int(batches.batch_at(k)["tokens"][0, 0]) for k in range(5)] == [0, 1, 2, 3, 4]
    state = DataState.from_dict(batches.state_at(5).to_dict())
    resumed = data.batches(0, 3, 4, state)
    assert [int(resumed.batch_at(k)["tokens"][0, 0]) for k in (5, 6, 2)] == [5, 6, 2]
    for call, message in (
        (lambda: data.batches(0, 2, 4, state), "goes on with the batch size that it began with"),
        (lambda: data.batches(1, 3, 4, state), "the checkpoint is of another function"),
        (lambda: resumed.batch_at(9), "ended before step 9"),
        (lambda: data.held_out_batches(3, 4), "run.eval_every=0 asks for none"),
        (
            lambda: dataset(f"{module_name}:fails").batches(0, 3, 4).batch_at(0),
            "failed at step 0: ZeroDivisionError: division by zero",
        ),
        (lambda: dataset(f"{module_name}:number").batches(0, 3, 4), "returned a int; want an iterator of batches"),
        (
            lambda: data.for_model({"x": ((), np.int32)}, 4).batches(0, 3, 4).batch_at(0),
            "the batch of step 0: the batch has no 'x'",
        ),
    ):
        with pytest.raises(JaxpipeError) as caught:
            call()
        assert message in str(caught.value) and "\n" not in str(caught.value)
