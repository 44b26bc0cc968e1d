"""Give training batches in a fixed order, and held-out batches that never change.

A :class:`Dataset` is a corpus of tokens (:class:`TokenDataset`: train and held-out spans that share no token) or several arrays
(:class:`~jaxpipe.train.corpora.datasets.ArrayDataset`). :class:`Batches` numbers the train sequences and gives the batch of any
step directly: epoch e visits them in the order of a permutation chosen by (seed, e), and step k holds the sequences ``[k·batch,
(k+1)·batch)`` of that endless order. So the position of a run is one integer, and a run resumed on another number of ranks,
schedule or chunk count sees the same data in the same order.

A window is ``seq_len + 1`` tokens, the targets being the tokens shifted by one; windows of an epoch overlap by that one token
only. Up to ``seq_len`` tokens at the end of each span are left out where documents have neither end nor mask; else what is left
is a window too, filled up with weight 0, and every token is seen once an epoch. With a document mask, windows say which
document each token is of, and no document's first token is a target.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import ConfigError, DataError
from jaxpipe.train.corpora.corpus import Corpus, Numbers, PackedRows, check_extent
from jaxpipe.train.corpora.tokenizers import Ids, Tokenizer
from jaxpipe.train.settings.typed import decode, within

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def mix(*values: int) -> int:
    """Return 64 well-mixed bits of some integers, each taken modulo 2^64; the order of the values counts.

    The finaliser of SplitMix64 mixes them (Steele, Lea and Flood, 2014).
    """
    state = 0
    for value in values:
        state = (state ^ (value & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = int(_mix64(np.array([state], dtype=np.uint64))[0])
    return state


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """The permutation of ``range(n)`` that ``key`` selects; call it with an array of indices.

    It needs no list, and is the same on every machine and NumPy version: a balanced Feistel network over pairs of h-bit halves
    permutes ``range(4^h)``, the smallest such range that holds n; values of n and above are sent through again until they fall
    below it (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Fewer than four passes on
    average. Good enough to shuffle training data; not a cipher.
    """

    def __init__(self, n: int, key: int) -> None:
        assert n > 0
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._round_keys = np.array([mix(key, i) for i in range(_ROUNDS)], dtype=np.uint64)

    def __call__(self, indices: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the images of ``indices`` (any integers in ``range(n)``), int64, same shape."""
        values = self._pass(np.asarray(indices).astype(np.uint64))
        outside = values >= self.n
        while outside.any():
            values[outside] = self._pass(values[outside])
            outside = values >= self.n
        return values.astype(np.int64)

    def _pass(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, low_bits = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & low_bits
        for key in self._round_keys:
            left, right = right, left ^ (_mix64(right + key) & low_bits)
        return (left << half) | right


Batch = dict[str, npt.NDArray[Any]]
"""Arrays by name, sequences along axis 0. Of text: ``tokens``, ``targets`` int32 and ``weights`` float32, [batch, seq_len];
with a document mask ``segments`` int32, [batch, seq_len]: equal for tokens of one document."""
ArraySpec = tuple[tuple[int, ...], Any]
"""Shape, without the axis of sequences, and dtype of an array."""
Mask = Literal["auto", "causal", "document"]
Pack = Literal["auto", "whole", "concat", "windows"]
Span = tuple[int, int]  # [start, stop) of token positions

_MOST_SEQUENCES = 1 << 60
_MAX_BLOCKS = 64
_MIN_BLOCK_TOKENS = 4096
_CHUNK = 1024  # windows looked at in one go


@dataclass(frozen=True, slots=True)
class DataState:
    """The place of a run in its data, for checkpoints: ``position`` sequences were consumed when ``step`` steps were done."""

    step: Annotated[int, within(0, _MOST_SEQUENCES - 1)]
    position: Annotated[int, within(0, _MOST_SEQUENCES - 1)]
    seed: int
    seq_len: int
    fingerprint: str

    def to_dict(self) -> dict[str, int | str]:
        """Return plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> DataState:
        """Restore what :meth:`to_dict` returned.

        Raises:
            DataError: keys are missing, unknown, or of the wrong type.
        """
        try:
            return decode(cls, mapping)
        except ConfigError as error:
            raise DataError(f"data state: {error}; the checkpoint is damaged or older") from None


class DataRows(Protocol):
    """Sequences of a dataset at one sequence length, by number."""

    def __len__(self) -> int: ...

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Return the sequences with these numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The windows of some spans of ``ids`` at one sequence length, span after span. ``answers``: of chats, which ids count as
    targets. ``documents``: for a document mask, where each starts. ``numbers``: of the windows that count, if not all do."""

    ids: Ids
    seq_len: int
    edges: npt.NDArray[np.int64]  # [spans, 2]: first token, one past the last
    before: npt.NDArray[np.int64]  # windows in earlier spans; one entry more than there are spans
    answers: npt.NDArray[np.uint8] | None = None
    documents: npt.NDArray[np.int64] | None = None
    numbers: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, ids: Ids, spans: tuple[Span, ...], seq_len: int, *, partial: bool = False) -> Windows:
        """Cut spans into windows. ``partial``: what is left at the end of a span is a window too."""
        counts = [(stop - start - 1 + (seq_len - 1 if partial else 0)) // seq_len for start, stop in spans]
        before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(ids, seq_len, np.array(spans, dtype=np.int64).reshape(-1, 2), before)

    def __len__(self) -> int:
        return int(self.before[-1]) if self.numbers is None else len(self.numbers)

    def with_targets(self) -> Windows:
        """Return those of these windows in which there is a target."""
        chunks = (np.arange(at, min(at + _CHUNK, len(self))) for at in range(0, len(self), _CHUNK))
        kept_chunks = [chunk[self.batch(chunk)["weights"].any(1)] for chunk in chunks]
        return replace(self, numbers=np.concatenate([np.zeros(0, np.int64), *kept_chunks]))

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Return windows as ``tokens``, ``targets`` and ``weights``: ones, but zeros beyond the end of a span, for what is no
        answer, and with a document mask for the first token of a document.

        Raises:
            DataError: the file that holds the ids has become shorter.
        """
        check_extent(self.ids)
        indices = indices if self.numbers is None else self.numbers[indices]
        span = np.searchsorted(self.before, indices, side="right") - 1
        start, stop = self.edges[span].T[..., None]
        positions = start + (indices - self.before[span])[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        real = positions < stop
        # Beyond the end of a span lies the other part, or the end of the file: zeros stand there.
        positions = np.minimum(positions, stop - 1)
        window = np.where(real, self.ids[positions], 0).astype(np.int32)
        counts = real[:, 1:] if self.answers is None else real[:, 1:] & (self.answers[positions[:, 1:]] > 0)
        arrays: Batch = {"tokens": window[:, :-1].copy(), "targets": window[:, 1:].copy()}
        if self.documents is not None:
            document = np.searchsorted(self.documents, positions, side="right")
            counts = counts & (document[:, 1:] == document[:, :-1])
            # Counted from the first document in the window: equal windows give equal arrays wherever they stand in the corpus.
            arrays["segments"] = (document - document[:, :1]).astype(np.int32)[:, :-1]
        return {**arrays, "weights": counts.astype(np.float32)}


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Train batches at a fixed seed, batch size and sequence length; see :meth:`Dataset.batches`."""

    rows: DataRows
    seed: int
    batch: int
    seq_len: int
    fingerprint: str
    origin: tuple[int, int] = (0, 0)  # (step, position) from which steps are counted

    def position_at(self, step: int) -> int:
        """Return the number of sequences consumed before ``step``."""
        first_step, first_position = self.origin
        assert step >= first_step
        return first_position + (step - first_step) * self.batch

    def positions_at(self, step: int, rows: Numbers | None = None) -> Numbers:
        """Return the positions, in the endless order, of the sequences of ``step``'s batch, or of its ``rows``."""
        return self.position_at(step) + (np.arange(self.batch, dtype=np.int64) if rows is None else rows)

    def indices_at(self, step: int, rows: Numbers | None = None) -> Numbers:
        """Return the numbers of the sequences of ``step``'s batch, int64 ``[batch]``, or of its ``rows``."""
        return in_epochs(len(self.rows), self.seed, self.positions_at(step, rows))

    def batch_at(self, step: int, rows: Numbers | None = None) -> Batch:
        """Return the batch of ``step``, arrays ``[batch, …]``, or its ``rows``: only these are read.

        Raises:
            DataError: a file that holds the data has become shorter.
        """
        return self.rows.batch(self.indices_at(step, rows))

    def state_at(self, step: int) -> DataState:
        """Return what a checkpoint keeps when ``step`` steps are done."""
        return DataState(step, self.position_at(step), self.seed, self.seq_len, self.fingerprint)

    def resumed(self, source: str, state: DataState | None) -> Batches:
        """Return these batches from where ``state`` (of a checkpoint) stands.

        Raises:
            DataError: it is of other data, seed or sequence length.
        """
        if state is None:
            return self
        pairs = {"seed": (state.seed, self.seed), "seq_len": (state.seq_len, self.seq_len)}
        problems = [
            f"data.{k}={now} where the checkpoint has {then}" for k, (then, now) in pairs.items() if then != now
        ]
        if state.fingerprint != self.fingerprint:
            problems.append(
                "the data, tokenizer or holdout differ from the checkpoint's, or data.pack or data.mask does"
            )
        if problems:
            advice = "resuming would repeat or skip text; restore the settings, or start anew in another run.out_dir"
            raise DataError(f"data {source}: {'; '.join(problems)}: {advice}")
        return replace(self, origin=(state.step, state.position))


class Stream(Protocol):
    """Batches in a fixed order, such as :class:`Batches`."""

    def batch_at(self, step: int, rows: Numbers | None = None) -> Batch:
        """See :meth:`Batches.batch_at`; one that can't give ``rows`` apart returns all."""

    def state_at(self, step: int) -> DataState:
        """See :meth:`Batches.state_at`."""


class Dataset(Protocol):
    """Data split in two: what is trained on, and what is held out.

    ``source`` names it in messages; ``fingerprint`` changes when its content or its division does. ``tokenizer``: of its
    tokens.
    """

    @property
    def source(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def fingerprint(self) -> str: ...

    def describe(self) -> str:
        """Return one line: what it is, and how it is split."""

    def bytes_per_token(self) -> float | None:
        """Return the bytes of text behind one target, or None where there are none."""

    def for_model(self, model_inputs: Mapping[str, ArraySpec], seq_len: int) -> Dataset:
        """Return this dataset as a model reads it: the arrays ``model_inputs``.

        Raises:
            DataError: it lacks an array, or has one of another shape or kind of numbers.
        """

    def batches(self, seed: int, batch: int, seq_len: int, state: DataState | None = None) -> Stream:
        """Return train batches of ``batch`` sequences of ``seq_len`` tokens, in the order that ``seed`` selects.

        With ``state`` (from a checkpoint) they go on where it stands, also if ``batch`` is another than then.

        Raises:
            DataError: an epoch is smaller than one batch, or ``state`` is of other data, seed or sequence length.
        """

    def held_out_batches(self, batch: int, seq_len: int, limit: int | None = None) -> tuple[Batch, ...]:
        """Return held-out batches, the same ones each time, arrays as those of :meth:`Batches.batch_at`; with ``limit``, at
        most so many, spread evenly. What is missing in the last batch is padded with weight 0.

        Raises:
            DataError: nothing is held out.
        """


def in_epochs(n: int, seed: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return which of ``n`` sequences stand at these positions, where each epoch visits all of them in an order of its own."""
    epochs, within = np.divmod(positions, n)
    indices = np.empty_like(within)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        indices[in_epoch] = _epoch_order(n, seed, epoch)(within[in_epoch])
    return indices


@lru_cache(maxsize=64)
def _epoch_order(n: int, seed: int, epoch: int) -> Permutation:
    return Permutation(n, mix(seed, epoch))


@dataclass(frozen=True, slots=True, eq=False)
class TokenDataset:
    """A corpus in two parts. ``train`` and ``held_out`` are spans of token positions, sorted, disjoint, covering all.
    ``by_document``: tokens see their own document only; with the mask ``auto`` the model decides that (:meth:`for_model`).
    ``seq_len``: for which :meth:`describe` counts the packed rows, or 0. ``rows``: those that were made, by part and
    length."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: tuple[Span, ...]
    held_out: tuple[Span, ...]
    by_document: bool = False
    mask: Mask = "causal"
    pack: Pack = "concat"
    seq_len: int = 0
    rows: dict[tuple[str, int], Windows | PackedRows] = field(default_factory=dict)

    @classmethod
    def split(
        cls,
        corpus: Corpus,
        tokenizer: Tokenizer,
        holdout: float = 0.05,
        by: Literal["blocks", "files"] = "blocks",
        mask: Mask = "causal",
        pack: Pack = "auto",
    ) -> TokenDataset:
        """Keep the fraction ``holdout`` of the tokens for evaluation.

        ``blocks``: the corpus is cut into up to 64 equal blocks, and the end of each is kept, of whole documents from and up to
        the nearest ends of documents. ``files``: whole documents are kept until there are enough, in the order of a hash
        of their names, or in one of their numbers. ``pack``: ``whole`` documents in a row, or all of them laid end to end and
        cut (``concat``; ``windows``: what is without a target is a sequence, too); ``auto``: chats are whole.

        Raises:
            DataError: nothing would be left on one side.
        """
        assert 0 <= holdout < 1
        if pack == "auto":
            pack = "concat" if corpus.answers is None else "whole"
        whole_files = by == "files" and holdout > 0
        blocks = held_blocks(len(corpus.ids), holdout, _MIN_BLOCK_TOKENS)
        if pack == "whole":
            blocks = _whole_documents(blocks, corpus.edges)
        held_out = _held_files(corpus, holdout) if whole_files else blocks
        train = complement(held_out, len(corpus.ids))
        if not train or (holdout and not held_out):
            what = f"{len(corpus.edges) - 1} documents" if pack == "whole" else f"{len(corpus.ids)} tokens"
            raise DataError(f"data {corpus.source}: {what} are too few to keep {holdout:g} for evaluation")
        return cls(corpus, tokenizer, train, held_out, mask == "document", mask, pack)

    @property
    def fingerprint(self) -> str:
        """See :class:`Dataset`."""
        # Each clause is added only where it differs from what versions before it did, so that their checkpoints still fit.
        described = f"{self.corpus.fingerprint} {self.tokenizer.fingerprint} {self.train}"
        if self.by_document:
            described += " by document"
        if self.pack == "whole":
            described += " whole"
        elif self.pack == "concat" and self.corpus.answers is not None:
            described += " with targets"
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    @property
    def has_chats(self) -> bool:
        """Whether it has chats that are packed whole."""
        return self.pack == "whole" and self.corpus.answers is not None

    @property
    def source(self) -> str:
        return self.corpus.source

    @property
    def train_tokens(self) -> int:
        return sum(stop - start for start, stop in self.train)

    @property
    def held_out_tokens(self) -> int:
        return sum(stop - start for start, stop in self.held_out)

    def describe(self) -> str:
        """Return one line: the corpus, how it is split, and how chats, or documents that stay whole, become sequences."""
        text = f"{self.corpus.describe()}; {self.train_tokens:,} to train, {self.held_out_tokens:,} held out"
        if not self.seq_len or (self.pack != "whole" and self.corpus.answers is None):
            return text
        rows = self.windows("train", self.seq_len)
        if isinstance(rows, PackedRows):
            masked = self.by_document or self.mask != "auto" or not self.has_chats
            remark = "" if masked else "; the model has no mask for documents: a chat sees those before it in its row"
            return f"{text}; {rows.describe()}{remark}"
        empty = "" if rows.numbers is None else f", {int(rows.before[-1]) - len(rows):,} without an answer left out"
        return f"{text}; chats end to end in {len(rows):,} windows of {self.seq_len}{empty}"

    def pieces(self, part: Literal["train", "held_out"]) -> Iterator[Ids]:
        """Yield the ids of each span of one part (views, no copies)."""
        for start, stop in getattr(self, part):
            yield self.corpus.ids[start:stop]

    def bytes_per_token(self) -> float | None:
        """Return the bytes of text behind one held-out target token (train tokens without held-out ones), for bits per byte;
        None if ids have no text, or only answers count, or the text was not counted. What begins and ends documents has none.
        """
        if self.corpus.answers is not None:
            return None
        spans = [(start + 1, stop) for start, stop in self.held_out or self.train]
        counts = [self.corpus.bytes_in(*span, self.tokenizer) for span in spans]
        text_bytes = [count for count in counts if count is not None]
        targets = sum(max(stop - start, 0) for start, stop in spans)
        if self.by_document:  # the first token of a document is none
            targets -= int(np.diff(np.searchsorted(self.corpus.edges[:-1], spans)).sum())
        return sum(text_bytes) / targets if len(text_bytes) == len(counts) and targets > 0 else None

    def for_model(self, model_inputs: Mapping[str, ArraySpec], seq_len: int) -> TokenDataset:
        """Return this dataset as a model reads it, see :class:`Dataset`; tokens fit only models that read nothing else. With
        the mask ``auto`` tokens see their own document only where the model reads ``segments``."""
        dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
        by_document = "segments" in model_inputs if self.mask == "auto" else self.by_document
        if by_document:
            dtypes["segments"] = np.int32
            if "segments" not in model_inputs:
                raise DataError(
                    f"data {self.source}: data.mask=document, and the model reads no 'segments'; use data.mask=causal, or a "
                    "model that takes the option mask"
                )
        check_specs(self.source, model_inputs, {name: ((seq_len,), dtype) for name, dtype in dtypes.items()})
        return replace(self, by_document=by_document, seq_len=seq_len, rows={})

    def windows(self, part: Literal["train", "held_out"], seq_len: int) -> Windows | PackedRows:
        """Return the sequences of one part, made once for each length."""
        if (part, seq_len) not in self.rows:
            self.rows[part, seq_len] = self._windows(part, seq_len)
        return self.rows[part, seq_len]

    def _windows(self, part: Literal["train", "held_out"], seq_len: int) -> Windows | PackedRows:
        corpus = self.corpus
        if self.pack == "whole":
            return PackedRows.of(corpus, getattr(self, part), seq_len, by_document=self.by_document)
        # Rests are left out where documents have neither end nor mask, as before there were ends: how many windows there
        # are decides their order, so the bits of a run.
        partial = part == "held_out" or self.by_document or corpus.eos is not None or corpus.answers is not None
        rows = Windows.of(corpus.ids, getattr(self, part), seq_len, partial=partial)
        rows = replace(rows, answers=corpus.answers, documents=corpus.edges[:-1] if self.by_document else None)
        return rows.with_targets() if self.pack == "concat" and corpus.answers is not None else rows

    def batches(self, seed: int, batch: int, seq_len: int, state: DataState | None = None) -> Batches:
        """See :class:`Dataset`."""
        rows = self.windows("train", seq_len)
        if len(rows) < batch:
            raise DataError(self._too_small(len(rows), batch, seq_len))
        return Batches(rows, seed, batch, seq_len, self.fingerprint).resumed(self.source, state)

    def _too_small(self, num_rows: int, batch: int, seq_len: int) -> str:
        if self.pack == "whole":
            packed = PackedRows.of(self.corpus, self.train, seq_len, by_document=False)
            advice = f"or run.batch={num_rows}" if num_rows else "or raise data.seq_len"
            return f"data {self.corpus.source}: {packed.describe()}, fewer than one batch of {batch}: use more data, {advice}"
        longest = bisect.bisect_left(range(1, seq_len), True, key=lambda n: len(self.windows("train", n)) < batch)
        options = ([f"run.batch={num_rows}"] if num_rows else []) + ([f"data.seq_len={longest}"] if longest else [])
        advice = " or ".join(["use more text", *options])
        what = f"{self.train_tokens} tokens to train on make {num_rows} sequences of {seq_len}, fewer than one batch of {batch}"
        return f"data {self.corpus.source}: {what}: {advice}"

    def held_out_batches(self, batch: int, seq_len: int, limit: int | None = None) -> tuple[Batch, ...]:
        """Return held-out batches, the same ones each time, arrays as those of :meth:`Batches.batch_at`.

        All of them together cover every held-out target once: windows at the end of a span and the last batch are padded with
        weight 0. With ``limit``, at most so many batches, of windows spread evenly.

        Raises:
            DataError: there is no held-out token to predict.
        """
        rows = self.windows("held_out", seq_len)
        if not len(rows):
            raise DataError(
                f"data {self.corpus.source}: {self.held_out_tokens} tokens held out, none to predict: raise data.holdout"
                f"{' or data.seq_len' if self.pack == 'whole' else ''}"
            )
        return padded_batches(rows, len(rows), batch, limit)


def padded_batches(rows: DataRows, count: int, batch: int, limit: int | None) -> tuple[Batch, ...]:
    """Return the first ``count`` rows in batches, the last one filled with rows of zeros; with ``limit``, rows for at most so
    many batches, spread evenly."""
    indices = np.arange(count)
    if limit is not None and limit * batch < count:
        indices = np.linspace(0, count - 1, limit * batch).astype(np.int64)
    batches = (rows.batch(indices[i : i + batch]) for i in range(0, len(indices), batch))
    return tuple(
        {k: np.pad(x, [(0, batch - len(x)), *[(0, 0)] * (x.ndim - 1)]) for k, x in each.items()} for each in batches
    )


def check_weights(where: str, batch: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise DataError where the array ``weights`` has a negative number: its row."""
    weights = batch.get("weights")
    if weights is None or not np.issubdtype(weights.dtype, np.floating) or not (weights < 0).any():
        return
    row = int(np.flatnonzero((weights < 0).reshape(len(weights), -1).any(1))[0])
    low = float(weights[row].min())
    raise DataError(f"data {where}: 'weights' has {low:g} in row {row}; give targets that do not count the weight 0")


def check_specs(source: str, model_inputs: Mapping[str, ArraySpec], arrays: Mapping[str, ArraySpec]) -> None:
    """Raise DataError where the arrays that a dataset has are not those that a model reads: one is missing, has another shape,
    or whole numbers in place of real ones."""
    for name, expected in model_inputs.items():
        if name not in arrays:
            raise DataError(
                f"data {source}: has {', '.join(arrays)}, and the model reads {name!r} {show_spec(expected)}"
            )
        got = arrays[name]
        alike = any(all(np.issubdtype(x[1], kind) for x in (got, expected)) for kind in (np.floating, np.integer))
        if got[0] != expected[0] or not alike:
            advice = f"; set data.seq_len={got[0][0]}" if alike and len(got[0]) == len(expected[0]) == 1 else ""
            raise DataError(
                f"data {source}: {name!r} is {show_spec(got)} a sequence, and the model reads {show_spec(expected)}{advice}"
            )


def show_spec(kind: ArraySpec) -> str:
    """Show an array without its rows, such as ``int32[128]``."""
    return f"{np.dtype(kind[1])}{list(kind[0])}"


def held_blocks(n: int, holdout: float, least: int) -> tuple[Span, ...]:
    """Return the last ``holdout`` of each of up to 64 equal blocks of ``range(n)``, ``least`` or more each where there are so
    many."""
    # Held-out blocks are spread, since neighbouring documents are alike; each is large enough that windows cut at its ends are
    # few.
    blocks = min(_MAX_BLOCKS, max(1, int(n * holdout) // least))
    edges = [n * i // blocks for i in range(blocks + 1)]
    spans = ((stop - int((stop - start) * holdout), stop) for start, stop in itertools.pairwise(edges))
    return tuple((start, stop) for start, stop in spans if start < stop)


def _whole_documents(spans: tuple[Span, ...], edges: npt.NDArray[np.int64]) -> tuple[Span, ...]:
    """Move the ends of ``spans`` to the nearest of ``edges``; return the last document where that leaves nothing of them."""
    middles = (edges[:-1] + edges[1:]) / 2
    nearest = ((int(edges[np.searchsorted(middles, at)]) for at in span) for span in spans)
    moved = tuple((start, stop) for start, stop in nearest if start < stop)
    last = (int(edges[-2]), int(edges[-1]))
    return moved or ((last,) if spans and len(edges) > 2 else ())


def _held_files(corpus: Corpus, holdout: float) -> tuple[Span, ...]:
    """Return whole documents in the order of a hash of their names (of their numbers where they have none) until they hold
    ``holdout`` of the tokens; neighbours merged.

    A document that would bring the total above 1.1 times the target is passed over; if all would, the smallest is kept.
    """
    sizes, names = np.diff(corpus.edges), corpus.names
    if len(sizes) < 2:
        raise DataError(f"data {corpus.source}: one document can't be split by files; set data.split=blocks")
    target, total = len(corpus.ids) * holdout, 0
    chosen: list[int] = []
    order: Sequence[int] | npt.NDArray[np.int64] = Permutation(len(sizes), 0)(np.arange(len(sizes)))
    if names is not None:
        # A hash of the name alone: a file that is added to the folder does not shuffle the others.
        hashed = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names]
        order = sorted(range(len(sizes)), key=hashed.__getitem__)
    for k in order:
        if total >= target:
            break
        if total + sizes[k] <= 1.1 * target:
            chosen.append(int(k))
            total += int(sizes[k])
    chosen = chosen or [int(sizes.argmin())]
    spans: list[Span] = []
    for k in sorted(chosen):
        start, stop = int(corpus.edges[k]), int(corpus.edges[k + 1])
        follows = bool(spans) and spans[-1][1] == start
        spans.append((spans.pop()[0] if follows else start, stop))
    return tuple(spans)


def complement(spans: tuple[Span, ...], n: int) -> tuple[Span, ...]:
    """Return the spans of ``range(n)`` that ``spans`` (sorted, disjoint) leave."""
    edges = [0, *(edge for span in spans for edge in span), n]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Batches of a dataset in a fixed order, made by :func:`jaxpipe.data`. ``settings``: as section ``data`` of a config holds
    them. ``dataset``: what was read, split in two."""

    settings: Mapping[str, Any]
    dataset: Dataset
    batch: int
    seq_len: int
    stream: Stream = field(repr=False)

    def __str__(self) -> str:
        return self.dataset.describe()

    @property
    def vocab_size(self) -> int:
        """The number of different ids that the tokenizer makes."""
        return self.dataset.tokenizer.vocab_size

    def batch_at(self, step: int, rows: Numbers | None = None) -> Batch:
        """Return the batch of ``step``, arrays ``[batch, …]`` by name, as :meth:`jaxpipe.Trainer.step` takes them. Epochs
        follow one another, each in an order of its own; the same step gives the same batch in any process. ``rows``
        (:meth:`jaxpipe.Trainer.own_rows`): only these, but of a user's function all.

        Raises:
            DataError: a file that holds the data has become shorter.
        """
        return self.stream.batch_at(step, rows)

    def held_out(self, batch: int | None = None, limit: int | None = None) -> Sequence[Batch]:
        """Return all batches of ``batch`` sequences (by default as many as a step's) that are never trained on, or ``limit`` of
        them, spread evenly. What is missing in the last one has weight 0.

        Raises:
            DataError: nothing is held out.
        """
        return self.dataset.held_out_batches(batch or self.batch, self.seq_len, limit)
