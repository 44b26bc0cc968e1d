"""Read data of several arrays: pictures and their captions, say. Row i of each array belongs together.

The arrays come from a ``.npz`` file, of which a part is held out, or from a function ``module:function`` that gives train and
held-out arrays by name (``models.words:pairs``). Everything is held in memory. A model names the arrays it reads
(:attr:`~jaxpipe.stage.model.layer.Model.batch_spec`); others are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpipe.errors import ConfigError, DataError, ProgramError
from jaxpipe.runtime.batches import checked_batch
from jaxpipe.stage.model.reference import resolved
from jaxpipe.train.corpora.tokenizers import Tokenizer
from jaxpipe.train.data import (
    ArraySpec,
    Batch,
    Batches,
    DataState,
    check_kinds,
    check_weights,
    held_blocks,
    padded_batches,
    shown,
)

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
        if _kinds(self.train) != _kinds(self.held_out):
            raise DataError(
                f"data {self.source}: held-out arrays differ from those to train on in name, shape or dtype"
            )
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", _fingerprint(self))

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
        row = ", ".join(f"{name} {shown(kind)}" for name, kind in _kinds(self.train).items())
        train, held = len(ArrayRows(self.train)), len(ArrayRows(self.held_out))
        return f"{self.source}: {row}; {train:,} rows to train, {held:,} held out"

    def bytes_per_token(self) -> None:
        return None

    def for_model(self, model_inputs: Mapping[str, ArraySpec], seq_len: int) -> ArrayDataset:
        """Return only the arrays that a model reads, in its dtypes; see :class:`~jaxpipe.train.data.Dataset`."""
        check_kinds(self.source, model_inputs, _kinds(self.train))
        spec = {name: jax.ShapeDtypeStruct(*kind) for name, kind in model_inputs.items()}

        def cast(arrays: Arrays) -> Arrays:
            batch = checked_batch(arrays, spec, len(ArrayRows(arrays)))
            host_arrays = {name: np.asarray(array) for name, array in batch.items()}
            check_weights(self.source, host_arrays)
            return host_arrays

        try:
            return replace(self, train=cast(self.train), held_out=cast(self.held_out))
        except ProgramError as error:  # whole numbers out of range
            raise DataError(f"data {self.source}: {error}") from None

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


def _kinds(arrays: Arrays) -> dict[str, ArraySpec]:
    return {name: (array.shape[1:], array.dtype) for name, array in arrays.items()}


def _fingerprint(data: ArrayDataset) -> str:
    digest = hashlib.sha256(data.tokenizer.fingerprint.encode())
    for part in (data.train, data.held_out):
        for name, array in sorted(part.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]
