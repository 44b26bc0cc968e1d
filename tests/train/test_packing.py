"""Whole chats in rows: every answer with its question, once an epoch, in any batches and after any stop."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import DataError
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.corpus import Corpus, PackedRows, load_corpus, pack
from jaxpipe.train.corpora.datasets import MixedDataset, load_dataset
from jaxpipe.train.corpora.encoding import Reading
from jaxpipe.train.corpora.tokenizers import ByteTokenizer, IdTokenizer
from jaxpipe.train.data import DataState, TokenDataset
from jaxpipe.train.evaluate import _config as stored_config
from jaxpipe.train.setup import build_model, read_by, with_mask
from tests.support.chats import TEMPLATES, chat

BYTES = ByteTokenizer()
Seen = Counter[tuple[bytes, tuple[bool, ...]]]
"""Documents with which of their tokens count, by how often."""


def documents(corpus: Corpus, spans: tuple[tuple[int, int], ...], seq_len: int) -> Seen:
    """Return what an epoch should contain: the documents that have a target, the ends of too long ones cut off."""
    counts: Seen = Counter()
    for start, stop in zip(corpus.edges[:-1].tolist(), corpus.edges[1:].tolist(), strict=True):
        if any(a <= start and stop <= b for a, b in spans):
            piece = slice(start, min(stop, start + seq_len + 1))
            has_weight = [i > 0 and bool(x) for i, x in enumerate(corpus.answers[piece])]  # type: ignore[index]
            if any(has_weight):
                counts[bytes(corpus.ids[piece]), tuple(has_weight)] += 1
    return counts


def documents_in(batch: dict[str, Any], documents: Seen) -> Seen:
    """Return the documents in a batch with a document mask."""
    counts: Seen = Counter()
    for tokens, targets, weights, segments in zip(
        batch["tokens"], batch["targets"], batch["weights"], batch["segments"], strict=True
    ):
        window = np.concatenate([tokens, targets[-1:]])
        np.testing.assert_array_equal(window[1:], targets)
        has_weight = np.concatenate([[False], weights > 0])
        edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(tokens)]
        for k, (a, b) in enumerate(itertools.pairwise(edges)):
            last = k == len(edges) - 2
            for end in (b + 1, b) if last else (b,):  # the last token of a row is a target only
                key = bytes(window[a:end].astype(np.uint8)), tuple(has_weight[a:end].tolist())
                if key in documents:
                    counts[key] += 1
                    break
            else:
                assert last and not window[a:].any() and not has_weight[a:].any(), "what fills a row up"
    return counts


def batches_of(data: TokenDataset, seq_len: int, epochs: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the rows of some epochs, in batches of a size that changes whenever the run stops and goes on; each batch as
    ranks and devices see it: microbatches, divided over dp."""
    rows, state, at, step = len(data.windows("train", seq_len)), None, 0, 0
    while at < epochs * rows:
        dp, microbatches = rng.choice(((1, 1), (1, 2), (2, 1), (2, 3)))
        size = dp * microbatches * rng.randint(1, 3)
        if size > rows:
            continue
        stream = data.batches(7, size, seq_len, state)
        for step in range(step, step + rng.randint(1, 12)):  # noqa: B020
            batch = stream.batch_at(step)
            for part in np.split(np.arange(size), microbatches * dp):
                part = part[: max(0, epochs * rows - at)]
                at += len(part)
                yield {name: array[part] for name, array in batch.items()}
        step += 1
        state = DataState.from_dict(json.loads(json.dumps(stream.state_at(step).to_dict())))


@pytest.fixture(scope="module", params=TEMPLATES)
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder, rng = tmp_path_factory.mktemp("chats"), random.Random(request.param)
    (folder / "t.jinja").write_text(TEMPLATES[request.param])
    chats = [chat(rng, rng.randint(1, 3), hostile=k % 3 == 0, words=rng.choice((2, 20)))[0] for k in range(150)]
    text = "".join(json.dumps({"messages": messages}) + "\n" for messages in chats)
    (folder / "a.jsonl").write_text(text)
    reading = Reading(format="chat", chat_template=str(folder / "t.jinja"))
    loaded = load_corpus(folder / "a.jsonl", BYTES, reading)
    assert len(loaded.edges) == 151
    return loaded


def test_every_answer_is_seen_with_its_question_once_an_epoch(corpus: Corpus) -> None:
    rng = random.Random(0)
    longest = int(np.diff(corpus.edges).max())
    for seq_len in (longest - 1, longest * 3, 200):
        data = TokenDataset.split(corpus, BYTES, 0.1, mask="document")
        fitting = documents(corpus, data.train, seq_len)
        counts: Seen = Counter()
        for batch in batches_of(data, seq_len, 2, rng):
            counts += documents_in(batch, fitting)
        assert counts == Counter({key: 2 * count for key, count in fitting.items()})
        held_out = documents(corpus, data.held_out, seq_len)
        held_out_counts: Seen = Counter()
        for batch in data.held_out_batches(5, seq_len):
            held_out_counts += documents_in(batch, held_out)
        assert held_out_counts == held_out and data.pack == "whole"
        if seq_len >= longest - 1:
            total = sum(sum(weighted) * n for part in (counts, held_out_counts) for (_, weighted), n in part.items())
            firsts = sum(int(corpus.answers[start]) for start in corpus.edges[:-1])  # type: ignore[index]
            assert total == sum(sum(c) * n for (_, c), n in fitting.items()) + int(corpus.answers.sum()) - firsts  # type: ignore[union-attr]
        causal = TokenDataset.split(corpus, BYTES, 0.1).windows("train", seq_len).batch(np.arange(3))
        masked = data.windows("train", seq_len).batch(np.arange(3))
        masked.pop("segments")
        for name, array in masked.items():
            np.testing.assert_array_equal(array, causal[name])


def best_fit(sizes: list[int], room: int) -> int:
    """Return how many rows the plain algorithm fills."""
    rows: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [k for k, free in enumerate(rows) if free >= size]
        k = min(fits, key=rows.__getitem__, default=len(rows))
        rows[k:] = [rows[k] - size, *rows[k + 1 :]] if fits else [room - size]
    return len(rows)


@given(st.integers(1, 40).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=60))))
@settings(max_examples=200, deadline=None)
def test_packing_is_best_fit_decreasing(room_and_sizes: tuple[int, list[int]]) -> None:
    room, sizes = room_and_sizes
    members, before = pack(np.array(sizes, np.int64), room)
    assert sorted(members.tolist()) == list(range(len(sizes))) and before[0] == 0 and before[-1] == len(sizes)
    rows = [members[a:b].tolist() for a, b in itertools.pairwise(before)]
    assert all(row and sum(sizes[k] for k in row) <= room for row in rows) and len(rows) == best_fit(sizes, room)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=40), st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_text_is_packed_whole_in_pieces(sizes: list[int], seq_len: int) -> None:
    edges = np.concatenate([[0], np.cumsum(sizes)])
    corpus = Corpus("numbers", np.arange(edges[-1], dtype=np.uint16), edges, None, (), "f")
    data = TokenDataset.split(corpus, IdTokenizer(1 << 16), 0.0, mask="document", pack="whole")
    rows = data.windows("train", seq_len)
    batch = rows.batch(np.arange(len(rows)))
    has_weight = batch["weights"] > 0
    expected = sorted(set(range(int(edges[-1]))) - set(edges[:-1].tolist()))
    assert sorted(batch["targets"][has_weight].tolist()) == expected
    assert (batch["targets"][has_weight] == batch["tokens"][has_weight] + 1).all()
    assert data.fingerprint != TokenDataset.split(corpus, data.tokenizer, 0.0, mask="document").fingerprint


def chat_corpus(lengths: list[int], answered: list[int]) -> Corpus:
    """Return chats of these lengths, of which so many last ids are answers."""
    edges = np.concatenate([[0], np.cumsum(lengths)])
    answers = np.zeros(edges[-1], np.uint8)
    for stop, n in zip(edges[1:], answered, strict=True):
        answers[stop - n : stop] = 1
    return Corpus("chats", (np.arange(edges[-1]) % 200 + 1).astype(np.uint8), edges, None, (), "f", answers)


def test_the_data_line_counts_what_is_cut_or_left_out() -> None:
    corpus = chat_corpus([10, 30, 40, 8], [3, 25, 2, 0])
    arrays: dict[str, Any] = {
        n: ((16,), t) for n, t in (("tokens", "int32"), ("targets", "int32"), ("weights", "float32"))
    }
    data = TokenDataset.split(corpus, BYTES, 0.0, mask="auto").for_model(arrays, 16)
    assert data.describe().endswith(
        "; whole chats in 2 rows of 16, 79% filled, 2 longer ones cut at their end, 2 without an answer left out; the "
        "model has no mask for documents: a chat sees those before it in its row"
    )
    masked = TokenDataset.split(corpus, BYTES, 0.0, mask="auto").for_model({**arrays, "segments": ((16,), "int32")}, 16)
    assert masked.by_document and masked.describe().endswith("left out") and masked.fingerprint != data.fingerprint
    end_to_end = TokenDataset.split(corpus, BYTES, 0.0, mask="causal", pack="concat").for_model(arrays, 16)
    assert end_to_end.describe().endswith("; chats end to end in 4 windows of 16, 2 without an answer left out")
    windows = TokenDataset.split(corpus, BYTES, 0.0, pack="windows").for_model(arrays, 16)
    assert windows.describe().endswith("; chats end to end in 6 windows of 16")
    assert len({d.fingerprint for d in (data, end_to_end, windows)}) == 3
    with pytest.raises(DataError, match=r"2 rows.*fewer.*3.*run.batch=2"):
        data.batches(0, 3, 16)
    with pytest.raises(DataError, match=r"or raise data\.seq_len"):
        TokenDataset.split(chat_corpus([100, 90], [1, 1]), BYTES, 0.0).batches(0, 1, 16)
    with pytest.raises(DataError, match="1 documents"):
        TokenDataset.split(chat_corpus([100], [1]), BYTES, 0.1)


def test_a_mixture_holds_whole_chats_and_text() -> None:
    chats = TokenDataset.split(chat_corpus([10, 12, 9, 30] * 30, [3, 4, 5, 20] * 30), BYTES, 0.1, mask="auto")
    text = Corpus("text", np.full(5000, 250, np.uint8), np.array([0, 2000, 5000]), None, (), "t")
    other = TokenDataset.split(text, BYTES, 0.1, mask="auto")
    mixed = MixedDataset.of({"chats": chats, "text": other}, {"chats": 1.0, "text": 1.0})
    names = ("tokens", "targets", "segments")
    read = mixed.for_model({**dict.fromkeys(names, ((32,), np.int32)), "weights": ((32,), np.float32)}, 32)
    assert mixed.has_chats and read.fingerprint != mixed.fingerprint and all(p.by_document for p in read.parts.values())
    batch = read.batches(0, 64, 32).batch_at(3)
    of_text = (batch["tokens"] == 250).any(1)
    assert 10 < of_text.sum() < 54 and not ((batch["tokens"] == 250) & (batch["tokens"] != 250)).any()
    assert not (batch["weights"][~of_text].sum(1) == 0).any()
    assert isinstance(read.parts["chats"].windows("train", 32), PackedRows)
    assert len(read.held_out_batches(4, 32)) > 0


def test_old_settings_keep_their_rule(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATES["chatml"])
    rng = random.Random(1)
    lines = (json.dumps({"messages": chat(rng, 2, False)[0]}) + "\n" for _ in range(60))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    config = TrainConfig().override(
        [
            f"data.path={tmp_path}/a.jsonl",
            "data.format=chat",
            f"data.chat_template={tmp_path}/t.jinja",
            "data.seq_len=512",
        ]
    )
    data = load_dataset(config)
    assert isinstance(data, TokenDataset) and data.pack == "whole" and data.has_chats
    chosen = with_mask(config, 256, has_chats=True)
    assert chosen.data.reading.mask == "document" and with_mask(config, 256, has_chats=False) is config
    for override in ("data.mask=causal", "model.options.attention=cudnn"):
        assert with_mask(config.override([override]), 256, has_chats=True).data.reading.mask == "causal"
    read = read_by(build_model(chosen, 256), data, chosen.data.seq_len)
    assert isinstance(read, TokenDataset) and read.by_document
    assert read.fingerprint == load_dataset(chosen).fingerprint
    stored = config.override(["data.mask=causal"]).to_dict()
    del stored["data"]["reading"]["pack"]
    before = load_dataset(stored_config({"config": stored}, tmp_path)[0])
    assert isinstance(before, TokenDataset) and before.pack == "windows"
    corpus = before.corpus
    assert before.train == TokenDataset.split(corpus, BYTES, pack="concat").train != data.train
