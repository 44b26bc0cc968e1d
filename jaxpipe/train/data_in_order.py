"""Give a script its data: what :func:`jaxpipe.data` returns, :meth:`jaxpipe.Trainer.step` takes and checkpoints remember."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe.train.data import Batch, Dataset, Stream


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

    def batch_at(self, step: int) -> Batch:
        """Return the batch of ``step``, arrays ``[batch, …]`` by name, as :meth:`jaxpipe.Trainer.step` takes them. Epochs
        follow one another, each in an order of its own; the same step gives the same batch in any process.

        Raises:
            DataError: a file that holds the data has become shorter.
        """
        return self.stream.batch_at(step)

    def held_out(self, batch: int | None = None, limit: int | None = None) -> Sequence[Batch]:
        """Return all batches of ``batch`` sequences (by default as many as a step's) that are never trained on, or ``limit`` of
        them, spread evenly. What is missing in the last one has weight 0.

        Raises:
            DataError: nothing is held out.
        """
        return self.dataset.held_out_batches(batch or self.batch, self.seq_len, limit)
