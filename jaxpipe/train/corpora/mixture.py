"""Mix several sources with weights, in an order that is a function of (seed, position) alone.

Of every 4,096 sequences each source gives as many as its weight says, rounded; which places are its own is a permutation chosen
by (seed, block). Within a source sequences follow its own epochs: each is seen once before any is seen again. So a run goes on
exactly where it stopped, whatever its ranks and batch size (:class:`~jaxpipe.train.data.Batches`). Does not model: weights that
change during a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.train.corpora.packing import PackedRows
from jaxpipe.train.corpora.permutation import Permutation, mix
from jaxpipe.train.corpora.tokenizers import Tokenizer
from jaxpipe.train.data import ArraySpec, Batch, Batches, DataState, TokenDataset, Windows, in_epochs, padded_batches

BLOCK = 4096


@dataclass(frozen=True, slots=True, eq=False)
class MixedRows:
    """The sequences of several sources, source after source; those of source k begin at ``before[k]``."""

    parts: tuple[Windows | PackedRows, ...]
    before: npt.NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[Windows | PackedRows]) -> MixedRows:
        return cls(tuple(parts), np.cumsum([0, *map(len, parts)]))

    def __len__(self) -> int:
        return int(self.before[-1])

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """See :class:`~jaxpipe.train.data.Windows`."""
        source = np.searchsorted(self.before, indices, side="right") - 1
        arrays: Batch = {}
        for k in np.unique(source):
            of_source = source == k
            for name, array in self.parts[k].batch(indices[of_source] - self.before[k]).items():
                arrays.setdefault(name, np.zeros((len(indices), *array.shape[1:]), array.dtype))[of_source] = array
        return arrays


@dataclass(frozen=True, slots=True, eq=False)
class MixedBatches(Batches):
    """Batches of :class:`MixedRows`. ``shares``: how many of each :data:`BLOCK` sequences are of each source."""

    shares: tuple[int, ...] = ()

    def indices_at(self, step: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the sequences of ``step``'s batch, int64 ``[batch]``."""
        assert isinstance(self.rows, MixedRows)
        before = self.rows.before
        blocks, places = np.divmod(self.position_at(step) + np.arange(self.batch, dtype=np.int64), BLOCK)
        indices = np.empty_like(places)
        for block in np.unique(blocks).tolist():
            in_block = np.flatnonzero(blocks == block)
            sources, earlier = _block(self.shares, self.seed, block)
            for k in np.unique(sources[places[in_block]]).tolist():
                of_source = in_block[sources[places[in_block]] == k]
                # Every block has the same share of a source, so the position in the source needs no count of earlier blocks.
                source_positions = block * self.shares[k] + earlier[places[of_source]]
                size = int(before[k + 1] - before[k])
                indices[of_source] = before[k] + in_epochs(size, mix(self.seed, k), source_positions)
        return indices


@lru_cache(maxsize=8)
def _block(shares: tuple[int, ...], seed: int, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return, for each place of a block, its source, and how many places before it are of that source."""
    edges = np.cumsum(shares)
    sources = np.searchsorted(edges, Permutation(BLOCK, mix(seed, block))(np.arange(BLOCK)), side="right")
    earlier = np.empty(BLOCK, np.int64)
    for k, share in enumerate(shares):
        earlier[sources == k] = np.arange(share)
    return sources, earlier


@dataclass(frozen=True, slots=True, eq=False)
class MixedDataset:
    """A :class:`~jaxpipe.train.data.Dataset` of several: ``parts`` by name, with ``shares`` of every :data:`BLOCK` sequences.
    All of what each holds out is held out."""

    parts: Mapping[str, TokenDataset]
    shares: tuple[int, ...]

    @classmethod
    def of(cls, parts: Mapping[str, TokenDataset], weights: Mapping[str, float]) -> MixedDataset:
        """Turn weights into shares. Raises DataError for a weight too small to get a share."""
        exact = np.array([weights[name] for name in parts])
        exact = exact / exact.sum() * BLOCK
        shares = np.floor(exact).astype(int)
        # The places that rounding down left over go to the sources that lost most by it.
        shares[np.argsort(shares - exact, kind="stable")[: BLOCK - shares.sum()]] += 1
        for name, share in zip(parts, shares, strict=True):
            if share == 0:
                raise DataError(
                    f"data.sources.{name}.weight={weights[name]:g} is less than 1/{BLOCK} of all weights; raise it, or leave "
                    "the source out"
                )
        return cls(parts, tuple(shares.tolist()))

    @property
    def source(self) -> str:
        return " + ".join(self.parts)

    @property
    def tokenizer(self) -> Tokenizer:
        return next(iter(self.parts.values())).tokenizer

    @property
    def has_chats(self) -> bool:
        """Whether one of them has chats that are packed whole."""
        return any(part.has_chats for part in self.parts.values())

    @property
    def fingerprint(self) -> str:
        described = " ".join(
            f"{part.fingerprint} {n}" for part, n in zip(self.parts.values(), self.shares, strict=True)
        )
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return one line: each source, and its share."""
        parts = zip(self.parts.items(), self.shares, strict=True)
        return "; ".join(f"{name} {share / BLOCK:.1%} of {part.describe()}" for (name, part), share in parts)

    def bytes_per_token(self) -> float | None:
        """See :class:`~jaxpipe.train.data.Dataset`."""
        sizes = [part.held_out_tokens or part.train_tokens for part in self.parts.values()]
        rates = [part.bytes_per_token() for part in self.parts.values()]
        text_bytes = [bytes_ * size for bytes_, size in zip(rates, sizes, strict=True) if bytes_ is not None]
        return sum(text_bytes) / sum(sizes) if len(text_bytes) == len(sizes) else None

    def for_model(self, model_inputs: Mapping[str, ArraySpec], seq_len: int) -> MixedDataset:
        """See :class:`~jaxpipe.train.data.Dataset`."""
        return replace(self, parts={name: part.for_model(model_inputs, seq_len) for name, part in self.parts.items()})

    def batches(self, seed: int, batch: int, seq_len: int, state: DataState | None = None) -> Batches:
        """See :class:`~jaxpipe.train.data.Dataset`."""
        rows = self._rows("train", seq_len)
        batches = MixedBatches(rows, seed, batch, seq_len, self.fingerprint, shares=self.shares)
        return batches.resumed(self.source, state)

    def held_out_batches(self, batch: int, seq_len: int, limit: int | None = None) -> tuple[Batch, ...]:
        """See :class:`~jaxpipe.train.data.Dataset`; of each source as many as it has."""
        rows = self._rows("held_out", seq_len)
        return padded_batches(rows, len(rows), batch, limit)

    def _rows(self, part: Literal["train", "held_out"], seq_len: int) -> MixedRows:
        rows = {name: each.windows(part, seq_len) for name, each in self.parts.items()}
        for name, source_rows in rows.items():
            if not len(source_rows):
                what = "to train on" if part == "train" else "held out"
                raise DataError(
                    f"data.sources.{name}: nothing {what} fills a sequence; use more text, or change data.holdout"
                )
        return MixedRows.of(list(rows.values()))
