"""Give a run other data than one stream of tokens: arrays, mixtures of several sources, and batches that a function makes.

**Arrays** are several by name, pictures and their captions, say; row i of each belongs together. They come from a ``.npz``
file, of which a part is held out, or from a function ``module:function`` that gives train and held-out arrays by name
(``models.words:pairs``). Everything is held in memory. A model names the arrays it reads
(:attr:`~jaxpipe.stage.model.layer.Model.batch_spec`); others are left alone.

**Mixtures** take sources with weights, in an order that is a function of (seed, position) alone. Of every 4,096 sequences each
source gives as many as its weight says, rounded; which places are its own is a permutation chosen by (seed, block). Within a
source sequences follow its own epochs: each is seen once before any is seen again. So a run goes on exactly where it stopped,
whatever its ranks and batch size (:class:`~jaxpipe.train.data.Batches`). Does not model: weights that change during a run.

**Batches of a user's function**: ``data.target = "module:function"``. The function is called with ``data.options`` and with
what it takes of ``seed``, ``batch`` (sequences a step), ``seq_len``, ``vocab_size``, ``step`` and ``held_out``. One that takes
``step`` returns that step's batch, arrays ``[batch, …]`` by name; a resumed run calls it from the step where it stopped. One
that does not returns an iterator of such batches; a resumed run passes over those that it has had. When there are several
processes, each calls it and must get the same. With ``held_out=True`` it gives what evaluation looks at; one that has no such
argument needs ``run.eval_every=0``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt

from jaxpipe.errors import ConfigError, DataError, ProgramError
from jaxpipe.runtime.batches import checked_batch
from jaxpipe.stage.model.reference import resolved
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.corpus import Numbers, PackedRows, load_corpus, read_named_arrays
from jaxpipe.train.corpora.store import is_store
from jaxpipe.train.corpora.tokenizers import Tokenizer, load_tokenizer
from jaxpipe.train.data import (
    ArraySpec,
    Batch,
    Batches,
    Dataset,
    DataState,
    Permutation,
    TokenDataset,
    Windows,
    check_specs,
    check_weights,
    held_blocks,
    in_epochs,
    mix,
    padded_batches,
    show_spec,
)
from jaxpipe.train.settings.sections import DataConfig, names_function

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows:
    """Rows of arrays as :class:`~jaxpipe.train.data.DataRows`."""

    arrays: Arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Return these rows."""
        return {name: array[indices] for name, array in self.arrays.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ArrayDataset:
    """A :class:`~jaxpipe.train.data.Dataset` of arrays ``[n, …]``; ``held_out`` may have no rows."""

    source: str
    tokenizer: Tokenizer
    train: Arrays
    held_out: Arrays
    fingerprint: str = field(default="")

    def __post_init__(self) -> None:
        """Raises DataError unless both parts have the same arrays, in each of them as many rows."""
        for part, arrays in (("train", self.train), ("held-out", self.held_out)):
            rows = {name: array.shape[0] if array.ndim else -1 for name, array in arrays.items()}
            if len(set(rows.values())) > 1 or -1 in rows.values() or not rows:
                listed = ", ".join(f"{name} {n}" for name, n in rows.items()) or "none"
                raise DataError(f"data {self.source}: {part} arrays need as many rows each, of axis 0; rows: {listed}")
        if _array_specs(self.train) != _array_specs(self.held_out):
            raise DataError(
                f"data {self.source}: held-out arrays differ from those to train on in name, shape or dtype"
            )
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", _arrays_fingerprint(self))

    @classmethod
    def split(cls, source: str, tokenizer: Tokenizer, arrays: Arrays, holdout: float) -> ArrayDataset:
        """Keep the fraction ``holdout`` of the rows for evaluation: the end of each of up to 64 equal blocks.

        Raises:
            DataError: nothing would be left on one side, or arrays have different numbers of rows.
        """
        unsplit = cls(source, tokenizer, arrays, arrays)
        n = len(ArrayRows(arrays))
        held = held_blocks(n, holdout, 1)
        out = np.zeros(n, dtype=bool)
        for start, stop in held:
            out[start:stop] = True
        if out.all() or (holdout and not out.any()):
            raise DataError(f"data {source}: {n} rows are too few to keep {holdout:g} for evaluation")
        train, rest = (ArrayRows(arrays).batch(np.flatnonzero(rows)) for rows in (~out, out))
        return replace(unsplit, train=train, held_out=rest, fingerprint="")

    def describe(self) -> str:
        """Return one line: the arrays of a row, and how many rows there are."""
        row = ", ".join(f"{name} {show_spec(spec)}" for name, spec in _array_specs(self.train).items())
        train, held = len(ArrayRows(self.train)), len(ArrayRows(self.held_out))
        return f"{self.source}: {row}; {train:,} rows to train, {held:,} held out"

    def bytes_per_token(self) -> None:
        return None

    def for_model(self, model_inputs: Mapping[str, ArraySpec], seq_len: int) -> ArrayDataset:
        """Return only the arrays that a model reads, in its dtypes; see :class:`~jaxpipe.train.data.Dataset`."""
        check_specs(self.source, model_inputs, _array_specs(self.train))
        train, held_out = (
            _checked_arrays(self.source, arrays, model_inputs, len(ArrayRows(arrays)))
            for arrays in (self.train, self.held_out)
        )
        return replace(self, train=train, held_out=held_out)

    def batches(self, seed: int, batch: int, seq_len: int, state: DataState | None = None) -> Batches:
        """See :class:`~jaxpipe.train.data.Dataset`; rows are as long as they are."""
        rows = ArrayRows(self.train)
        if len(rows) < batch:
            raise DataError(
                f"data {self.source}: {len(rows)} rows to train on, fewer than one batch; set run.batch={len(rows)}"
            )
        return Batches(rows, seed, batch, seq_len, self.fingerprint).resumed(self.source, state)

    def held_out_batches(self, batch: int, seq_len: int, limit: int | None = None) -> tuple[Batch, ...]:
        """See :class:`~jaxpipe.train.data.Dataset`. Without an array ``weights`` nothing can be padded, and the last rows that
        fill no batch are left out."""
        rows = ArrayRows(self.held_out)
        count = len(rows) if "weights" in rows.arrays else len(rows) // batch * batch
        if not count:
            raise DataError(
                f"data {self.source}: {len(rows)} rows held out, too few for a batch of {batch}: hold out more"
            )
        return padded_batches(rows, count, batch, limit)


def dataset_from_function(
    name: str, options: Mapping[str, Any], tokenizer: Tokenizer, seq_len: int, holdout: float
) -> ArrayDataset:
    """Return the arrays of the function ``module:function``, which is called with ``options`` and what it takes of ``seq_len``
    and ``vocab_size``. It returns train and held-out arrays, or one mapping, which is split.

    Raises:
        ConfigError: there is no such function, or it fails, or gives something else.
        DataError: arrays have different numbers of rows.
    """
    result = resolved("data", name, options, {"seq_len": seq_len, "vocab_size": tokenizer.vocab_size})
    parts = (result,) if isinstance(result, Mapping) else result
    if not isinstance(parts, tuple) or len(parts) not in (1, 2) or not all(isinstance(part, Mapping) for part in parts):
        kind = type(result).__name__
        raise ConfigError(f"data {name} returned a {kind}; want a dict of arrays, or two: to train on, and held out")
    named_arrays = [{str(key): np.asarray(array) for key, array in part.items()} for part in parts]
    if len(named_arrays) == 1:
        return ArrayDataset.split(name, tokenizer, named_arrays[0], holdout)
    return ArrayDataset(name, tokenizer, named_arrays[0], named_arrays[1])


def _checked_arrays(where: str, arrays: Mapping[str, Any], model_inputs: Mapping[str, ArraySpec], rows: int) -> Batch:
    """Return the arrays that a model reads, in its dtypes, ``rows`` of them.

    Raises:
        DataError: one is missing, has another shape, or numbers that its dtype can't hold; or a weight is negative.
    """
    specs = {name: jax.ShapeDtypeStruct(*spec) for name, spec in model_inputs.items()}
    try:
        batch = {name: jax.device_get(array) for name, array in checked_batch(arrays, specs, rows).items()}
    except ProgramError as error:
        raise DataError(f"data {where}: {error}") from None
    check_weights(where, batch)
    return batch


def _array_specs(arrays: Arrays) -> dict[str, ArraySpec]:
    return {name: (array.shape[1:], array.dtype) for name, array in arrays.items()}


def _arrays_fingerprint(data: ArrayDataset) -> str:
    digest = hashlib.sha256(data.tokenizer.fingerprint.encode())
    for part in (data.train, data.held_out):
        for name, array in sorted(part.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


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
        for k in np.unique(source) if len(source) else [0]:  # of no sequences, too, the arrays have names
            of_source = source == k
            for name, array in self.parts[k].batch(indices[of_source] - self.before[k]).items():
                arrays.setdefault(name, np.zeros((len(indices), *array.shape[1:]), array.dtype))[of_source] = array
        return arrays


@dataclass(frozen=True, slots=True, eq=False)
class MixedBatches(Batches):
    """Batches of :class:`MixedRows`. ``shares``: how many of each :data:`BLOCK` sequences are of each source."""

    shares: tuple[int, ...] = ()

    def indices_at(self, step: int, rows: Numbers | None = None) -> Numbers:
        """See :class:`~jaxpipe.train.data.Batches`."""
        assert isinstance(self.rows, MixedRows)
        before = self.rows.before
        blocks, places = np.divmod(self.positions_at(step, rows), BLOCK)
        indices = np.empty_like(places)
        for block in np.unique(blocks).tolist():
            in_block = np.flatnonzero(blocks == block)
            sources, earlier = _block_order(self.shares, self.seed, block)
            for k in np.unique(sources[places[in_block]]).tolist():
                of_source = in_block[sources[places[in_block]] == k]
                # Every block has the same share of a source, so the position in the source needs no count of earlier blocks.
                source_positions = block * self.shares[k] + earlier[places[of_source]]
                size = int(before[k + 1] - before[k])
                # The source's number is in the seed: without it two sources of one size would be shuffled alike.
                indices[of_source] = before[k] + in_epochs(size, mix(self.seed, k), source_positions)
        return indices


@lru_cache(maxsize=8)
def _block_order(shares: tuple[int, ...], seed: int, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
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


_HELD_OUT = 8
"""Held-out batches of a function that takes ``step``, where no limit is set: it could give any number."""


@dataclass(frozen=True, slots=True)
class UserDataset:
    """A :class:`~jaxpipe.train.data.Dataset` made by the function ``source``. ``model_inputs``: what the model reads."""

    source: str
    options: Mapping[str, Any]
    tokenizer: Tokenizer
    model_inputs: Mapping[str, ArraySpec] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A hash of the function's name and options: what it will give can't be known before it gives it."""
        described = json.dumps([self.source, self.tokenizer.fingerprint, self.options], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return one line."""
        return f"{self.source}: batches of your own"

    def bytes_per_token(self) -> None:
        return None

    def for_model(self, model_inputs: Mapping[str, ArraySpec], seq_len: int) -> UserDataset:
        """See :class:`~jaxpipe.train.data.Dataset`; batches are compared with it when they come."""
        return replace(self, model_inputs=model_inputs)

    def batches(self, seed: int, batch: int, seq_len: int, state: DataState | None = None) -> UserBatches:
        """See :class:`~jaxpipe.train.data.Dataset`.

        Raises:
            DataError: ``state`` is of another function, or, of an iterator, of another batch size.
            ConfigError: there is no such function, or it fails.
        """
        batches, step = UserBatches(self, seed, batch, seq_len, {}), 0 if state is None else state.step
        result = batches.call(step)
        if not isinstance(result, Mapping):
            batches.reading.update(iterator=itertools.islice(result, step, None), step=step)
        if state is None:
            return batches
        if (state.fingerprint, state.seed, state.seq_len) != (self.fingerprint, seed, seq_len):
            raise DataError(
                f"data {self.source}: the checkpoint is of another function, options, data.seed or data.seq_len; restore them, "
                "or start anew in another run.out_dir"
            )
        # An iterator is counted in batches: with another batch size its step k begins at other sequences.
        if not isinstance(result, Mapping) and state.position != state.step * batch:
            raise DataError(
                f"data {self.source}: an iterator goes on with the batch size that it began with, and run.batch={batch} is "
                "another; restore it, or let the function take step"
            )
        return batches

    def held_out_batches(self, batch: int, seq_len: int, limit: int | None = None) -> tuple[Batch, ...]:
        """See :class:`~jaxpipe.train.data.Dataset`."""
        stream = UserBatches(replace(self, options={**self.options, "held_out": True}), 0, batch, seq_len, {})
        try:
            result = stream.call(0)
        except ConfigError as error:
            raise ConfigError(f"{error} (asked for held-out batches; run.eval_every=0 asks for none)") from None
        if isinstance(result, Mapping):
            return tuple(stream.batch_at(step) for step in range(limit or _HELD_OUT))
        batches = tuple(stream.checked(each, step) for step, each in enumerate(itertools.islice(result, limit)))
        if not batches:
            raise DataError(f"data {self.source}: gave no held-out batch; set run.eval_every=0 if there are none")
        return batches


@dataclass(frozen=True, slots=True, eq=False)
class UserBatches:
    """Batches of a user's function, used like :class:`~jaxpipe.train.data.Batches`. ``reading``: the iterator, and the step
    that it comes to next."""

    data: UserDataset
    seed: int
    batch: int
    seq_len: int
    reading: dict[str, Any]

    def call(self, step: int) -> Mapping[str, Any] | Iterator[Any]:
        """Call the function, and return what it does."""
        data = self.data
        offered = {"seed": self.seed, "batch": self.batch, "seq_len": self.seq_len, "held_out": False, "step": step}
        result = resolved("data", data.source, data.options, {**offered, "vocab_size": data.tokenizer.vocab_size})
        if not isinstance(result, Mapping) and not hasattr(result, "__iter__"):
            raise ConfigError(
                f"data {data.source} returned a {type(result).__name__}; want an iterator of batches, or, of a function that "
                "takes step, a dict of arrays"
            )
        return result if isinstance(result, Mapping) else iter(result)

    def batch_at(self, step: int, rows: Numbers | None = None) -> Batch:
        """Return the batch of ``step``, whole whatever ``rows`` are needed: that is what the function makes.

        Raises:
            ConfigError: the function fails.
            DataError: an iterator ends or fails, or a batch is not what the model reads.
        """
        # An iterator can't go back. Another step than the next one (a resume, or a script that asks twice) begins it anew and
        # passes over what comes before.
        if self.reading.get("step") != step:
            result = self.call(step)
            if isinstance(result, Mapping):
                return self.checked(result, step)
            self.reading.update(iterator=itertools.islice(result, step, None))
        try:
            item = next(self.reading["iterator"])
        except StopIteration:
            raise DataError(
                f"data {self.data.source}: ended before step {step}; set run.steps to what it has"
            ) from None
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(f"data {self.data.source}: failed at step {step}: {why}") from error
        self.reading["step"] = step + 1
        return self.checked(item, step)

    def checked(self, item: Any, step: int) -> Batch:
        """Return the arrays that the model reads, in its dtypes."""
        inputs, where = self.data.model_inputs, f"{self.data.source}: the batch of step {step}"
        if not isinstance(item, Mapping):
            raise DataError(f"data {where}: it is a {type(item).__name__}; want a dict of arrays: {', '.join(inputs)}")
        return _checked_arrays(where, item, inputs, self.batch)

    def state_at(self, step: int) -> DataState:
        """Return what a checkpoint keeps when ``step`` steps are done."""
        return DataState(step, step * self.batch, self.seed, self.seq_len, self.data.fingerprint)


def data_remarks(dataset: Dataset) -> Iterator[str]:
    """Yield what a user may not expect of the tokenizer and the documents, in lines."""
    parts = dataset.parts.values() if isinstance(dataset, MixedDataset) else [dataset]
    corpora = [part.corpus for part in parts if isinstance(part, TokenDataset)]
    yield from dict.fromkeys([*dataset.tokenizer.remarks, *(line for corpus in corpora for line in corpus.remarks)])


def load_dataset(config: TrainConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Return the data of ``config``, tokenised and split. ``tokenizer``: in place of the one that the config names.

    Raises:
        ConfigError: it is of a function that does not exist, or fails.
        DataError: it can't be read or is too small.
    """
    data = config.data
    tokenizer = tokenizer or load_tokenizer(data.tokenizer)
    if data.target is not None:
        return UserDataset(data.target, data.options, tokenizer)
    if data.sources:
        parts = {name: _tokens_at(data, source.path, tokenizer) for name, source in data.sources.items()}
        return MixedDataset.of(parts, {name: source.weight for name, source in data.sources.items()})
    if names_function(data.path):
        return dataset_from_function(data.path, data.options, tokenizer, data.seq_len, data.holdout)
    if (arrays := read_named_arrays(data.path)) is not None:
        return ArrayDataset.split(data.path, tokenizer, arrays, data.holdout)
    return _tokens_at(data, data.path, tokenizer)


def _tokens_at(data: DataConfig, path: str, tokenizer: Tokenizer) -> TokenDataset:
    corpus = load_corpus(path, tokenizer, data.reading)
    if corpus.answers is None and Path(path).is_dir() and is_store(Path(path)):
        tokenizer = tokenizer.with_ends(corpus.bos, corpus.eos)
    reading = data.reading
    return TokenDataset.split(corpus, tokenizer, data.holdout, reading.split, reading.mask, reading.pack)
