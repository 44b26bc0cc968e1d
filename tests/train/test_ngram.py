"""Unigram and bigram baselines against counting by hand, and what must hold of any of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import DataError
from jaxpipe.train.corpora import ngram
from jaxpipe.train.corpora.corpus import load_corpus
from jaxpipe.train.corpora.ngram import Bigram, Unigram, baselines, bits_per_byte, evaluate, pair_counts
from jaxpipe.train.corpora.tokenizers import ByteTokenizer
from jaxpipe.train.data import TokenDataset

TEXT = "the cat sat on the mat. the rat sat on the cat. " * 120
LARGE_VOCAB = 2000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(TEXT)
    return TokenDataset.split(load_corpus(path, ByteTokenizer()), ByteTokenizer(), 0.2)


def _pairs(pieces: list[list[int]]) -> list[tuple[int, int]]:
    return [pair for piece in pieces for pair in itertools.pairwise(piece)]


def _bigram_loss(fit: list[list[int]], on: list[tuple[int, int]], vocab: int, kappa: float) -> float:
    """Return the nats a token of the interpolated bigram, one pair at a time."""
    singles, pairs = Counter(x for piece in fit for x in piece), Counter(_pairs(fit))
    contexts = Counter(a for a, _ in _pairs(fit))
    total = sum(singles.values()) + ngram.ADD_K * vocab
    loss = 0.0
    for a, b in on:
        prior = (singles[b] + ngram.ADD_K) / total
        loss -= math.log((pairs[a, b] + kappa * prior) / (contexts[a] + kappa))
    return loss / len(on)


def test_scores_equal_counting_by_hand(data: TokenDataset) -> None:
    fit = [piece.tolist() for piece in data.pieces("train")]
    held_out = _pairs([piece.tolist() for piece in data.pieces("held_out")])
    scores = baselines(data, data.held_out_batches(3, 10))

    singles = Counter(x for piece in fit for x in piece)
    total = sum(singles.values()) + 256 * ngram.ADD_K
    unigram = -sum(math.log((singles[b] + ngram.ADD_K) / total) for _, b in held_out) / len(held_out)
    assert scores["unigram"].loss == pytest.approx(unigram, rel=1e-12)

    heads = [piece[: len(piece) - len(piece) // 10] for piece in fit]
    tails = [piece[len(piece) - len(piece) // 10 - 1 :] for piece in fit]
    kappa = min(ngram.KAPPAS, key=lambda k: _bigram_loss(heads, _pairs(tails), 256, k))
    assert scores["bigram"].loss == pytest.approx(_bigram_loss(fit, held_out, 256, kappa), rel=1e-12)
    assert scores["bigram"].bits_per_byte == pytest.approx(scores["bigram"].loss / math.log(2))


_streams = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=60), min_size=1, max_size=4)


@given(_streams, st.sampled_from([6, LARGE_VOCAB]))
def test_pair_counts_equal_counting_by_hand(streams: list[list[int]], vocab: int) -> None:
    counts = pair_counts([np.array(s, dtype=np.uint16) for s in streams], vocab)
    expected = Counter(_pairs(streams))
    assert counts.toarray()[:6, :6].tolist() == [[expected[a, b] for b in range(6)] for a in range(6)]


@given(_streams, st.sampled_from([6, LARGE_VOCAB]))
def test_probabilities_sum_to_one_and_are_positive(streams: list[list[int]], vocab: int) -> None:
    bigram = Bigram.fit([np.array(s, dtype=np.int32) for s in streams], vocab)
    targets = np.arange(vocab)
    for context in (0, 5, vocab - 1):
        p = bigram.probability(np.full(vocab, context), targets)
        assert (p > 0).all()
        assert p.sum() == pytest.approx(1)
    assert bigram.unigram.probability(targets, targets).sum() == pytest.approx(1)


def test_a_markov_chain_is_recovered_to_its_entropy() -> None:
    rng = np.random.default_rng(0)
    transition = rng.dirichlet(np.full(8, 0.5), size=8)
    chain = np.zeros(60_000, dtype=np.int64)
    draws = rng.random(len(chain))
    cumulative = transition.cumsum(1)
    for t in range(1, len(chain)):
        chain[t] = min(7, np.searchsorted(cumulative[chain[t - 1]], draws[t]))
    fit, held_out = chain[:50_000], chain[50_000:]
    batch = {"tokens": held_out[None, :-1], "targets": held_out[None, 1:], "weights": np.ones((1, len(held_out) - 1))}
    truth = -np.log(transition[held_out[:-1], held_out[1:]]).mean()
    bigram = Bigram.fit([fit], 8)
    assert evaluate(bigram, [batch]).loss == pytest.approx(truth, abs=0.003)
    assert evaluate(bigram.unigram, [batch]).loss > truth + 0.05


@pytest.mark.parametrize(("last", "kappa"), [(1, min(ngram.KAPPAS)), (2, max(ngram.KAPPAS))])
def test_kappa_follows_the_tail(last: int, kappa: float) -> None:
    """The tail is one pair: 0 1, always seen before, wants no smoothing; 0 2, never seen, wants all there is."""
    assert (
        Bigram.fit([np.array([0, 1] * 4 + [0, last])], 3, kappas=sorted(ngram.KAPPAS, reverse=last == 1)).kappa == kappa
    )


def test_weights_choose_what_counts() -> None:
    model = Unigram(np.array([0.5, 0.25, 0.25]))
    tokens, targets = np.array([[0, 0, 0]]), np.array([[0, 1, 2]])
    batch = {"tokens": tokens, "targets": targets, "weights": np.array([[1.0, 3.0, 0.0]])}
    assert evaluate(model, [batch]).loss == pytest.approx((math.log(2) + 3 * math.log(4)) / 4)
    with pytest.raises(DataError, match=r"raise data\.holdout"):
        evaluate(model, [])


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8)
    assert bits_per_byte(math.log(2) * 10, 4.0) == pytest.approx(2.5)
    assert bits_per_byte(1.0, None) is None


def test_real_text_ranks_uniform_above_unigram_above_bigram(tmp_path: Path) -> None:
    import pydoc_data.topics

    path = tmp_path / "topics.txt"
    path.write_bytes(Path(pydoc_data.topics.__file__).read_bytes())
    dataset = TokenDataset.split(load_corpus(path, ByteTokenizer()), ByteTokenizer())
    scores = baselines(dataset, dataset.held_out_batches(8, 64))
    unigram, bigram = scores["unigram"].bits_per_byte, scores["bigram"].bits_per_byte
    assert unigram is not None and bigram is not None
    assert 8 > unigram > bigram + 0.5 > 2.5
