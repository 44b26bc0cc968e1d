"""Fit unigram and bigram models to the train tokens: the bar that a neural model must clear on the held-out ones.

Bigram probabilities interpolate with the unigram by a Dirichlet prior (MacKay and Bauman Peto, "A hierarchical Dirichlet
language model", 1995): ``P(b | a) = (c(a, b) + κ·P(b)) / (c(a) + κ)``; unigrams are ``P(b) = (c(b) + k) / (n + k·V)``. κ is the
best of a grid on the last tenth of each train span, counted on the rest, and the counts are then taken over all of it. Does not
model: longer contexts, Kneser-Ney counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from jaxpipe.errors import DataError
from jaxpipe.train.corpora.tokenizers import Ids
from jaxpipe.train.data import Batch, Dataset, TokenDataset

ADD_K = 0.5
KAPPAS = tuple(2.0**i for i in range(-2, 15))
_MAX_TOKENS = 1 << 25

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Unigram:
    """Probabilities of ids by themselves: ``probabilities[b]``, float64, sums to 1."""

    probabilities: Floats

    @classmethod
    def fit(cls, pieces: Iterable[Ids], vocab_size: int, add_k: float = ADD_K) -> Unigram:
        """Count all ids plus ``add_k``, and normalise."""
        counts = np.zeros(vocab_size)
        for piece in pieces:
            counts += np.bincount(piece.astype(np.int64), minlength=vocab_size)
        counts += add_k
        return cls(counts / counts.sum())

    def probability(self, context: Ids, target: Ids) -> Floats:
        """Return P(target), elementwise; ``context`` (the ids before) plays no part."""
        return self.probabilities[target]


@dataclass(frozen=True, slots=True, eq=False)
class Bigram:
    """Probabilities of ids after another, by the module's formula. ``pairs[a, b]``: how often b follows a, a sparse matrix.
    ``kappa``: weight of the unigram, in counts."""

    pairs: Any
    unigram: Unigram
    kappa: float

    @classmethod
    def fit(cls, pieces: Sequence[Ids], vocab_size: int, kappas: Sequence[float] = KAPPAS) -> Bigram:
        """Count over ``pieces``; κ is the one of ``kappas`` with the least loss on the last tenth of each piece."""
        heads = [piece[: len(piece) - len(piece) // 10] for piece in pieces]
        # The tail begins one id early: its first target needs the id before as context.
        tails = [piece[len(piece) - len(piece) // 10 - 1 :] for piece in pieces if len(piece) >= 10]
        context, target = _neighbours(tails)
        trial = cls(pair_counts(heads, vocab_size), Unigram.fit(heads, vocab_size), 1.0)

        def loss(kappa: float) -> float:
            return float(-np.log(replace(trial, kappa=kappa).probability(context, target)).sum())

        return cls(pair_counts(pieces, vocab_size), Unigram.fit(pieces, vocab_size), min(kappas, key=loss))

    def probability(self, context: Ids, target: Ids) -> Floats:
        """Return P(target | context), elementwise."""
        # Indexed with nothing, a sparse matrix of scipy gives no array.
        counts = self.pairs[np.ravel(context), np.ravel(target)] if np.size(context) else ()
        counts = np.asarray(counts).reshape(np.shape(context))
        mixed = counts + self.kappa * self.unigram.probability(context, target)
        share: Floats = mixed / (np.asarray(self.pairs.sum(axis=1)).ravel()[context] + self.kappa)
        return share


def pair_counts(pieces: Iterable[Ids], vocab_size: int) -> Any:
    """Count how often each id follows each within a piece, a sparse matrix [V, V]."""
    context, target = _neighbours(pieces)
    return sparse.csr_matrix((np.ones(len(context), np.int64), (context, target)), (vocab_size, vocab_size))


@dataclass(frozen=True, slots=True)
class Score:
    """The mean loss on what is held out. ``bits_per_byte`` is None where the ids have no text. ``metrics``: a model's own, by
    name."""

    loss: float
    bits_per_byte: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


def evaluate(model: Unigram | Bigram, batches: Iterable[Batch], bytes_per_token: float | None = 1.0) -> Score:
    """Return the weighted mean loss of ``model`` on batches of tokens, targets and weights.

    Raises:
        DataError: no target has weight.
    """
    loss = weight = 0.0
    for batch in batches:
        nats = -np.log(model.probability(batch["tokens"], batch["targets"]))
        loss += float((nats * batch["weights"]).sum())
        weight += float(batch["weights"].sum(dtype=np.float64))
    if weight == 0:
        raise DataError("no held-out target to evaluate on: raise data.holdout")
    return Score(loss / weight, bits_per_byte(loss / weight, bytes_per_token))


def bits_per_byte(nats_per_token: float, bytes_per_token: float | None) -> float | None:
    """Return a loss in nats a token as bits a byte of text, which compares across tokenisers."""
    return None if bytes_per_token is None else nats_per_token / math.log(2) / bytes_per_token


def baselines(dataset: Dataset, batches: Iterable[Batch]) -> Mapping[str, Score]:
    """Score ``unigram`` and ``bigram``, fitted to the train tokens (the first 2^25 of them), on ``batches``: use the held-out
    batches that the neural model is evaluated on, and all three losses are over the same tokens.

    Raises:
        DataError: the data are no stream of tokens.
    """
    if not isinstance(dataset, TokenDataset):
        raise DataError(f"data {dataset.source}: baselines need a stream of tokens, and these are separate arrays")
    pieces = _first_tokens(dataset.pieces("train"), _MAX_TOKENS)
    vocab_size, batch_list = dataset.tokenizer.vocab_size, list(batches)
    bigram = Bigram.fit(pieces, vocab_size)
    models: dict[str, Any] = {"unigram": bigram.unigram, "bigram": bigram}
    bytes_per_token = dataset.bytes_per_token()
    return {name: evaluate(model, batch_list, bytes_per_token) for name, model in models.items()}


def _neighbours(pieces: Iterable[Ids]) -> tuple[Ids, Ids]:
    """Return the ids of pieces that have one behind them, and the ids behind them."""
    parts = [piece.astype(np.int32) for piece in pieces]
    none = np.empty(0, np.int32)
    return np.concatenate([none, *(p[:-1] for p in parts)]), np.concatenate([none, *(p[1:] for p in parts)])


def _first_tokens(pieces: Iterable[Ids], limit: int) -> list[Ids]:
    heads: list[Ids] = []
    for piece in pieces:
        heads.append(piece[:limit])
        limit -= len(heads[-1])
        if limit <= 0:
            break
    return heads
