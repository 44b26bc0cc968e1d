"""Train on batches that a function of the user makes: ``data.target = "module:function"``.

The function is called with ``data.options`` and with what it takes of ``seed``, ``batch`` (sequences a step), ``seq_len``,
``vocab_size``, ``step`` and ``held_out``. One that takes ``step`` returns that step's batch, arrays ``[batch, …]`` by name; a
resumed run calls it from the step where it stopped. One that does not returns an iterator of such batches; a resumed run passes
over those that it has had. When there are several processes, each calls it and must get the same. With ``held_out=True`` it
gives what evaluation looks at; one that has no such argument needs ``run.eval_every=0``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxpipe.errors import ConfigError, DataError, ProgramError
from jaxpipe.runtime.batches import checked_batch
from jaxpipe.stage.model.reference import resolved
from jaxpipe.train.corpora.tokenizers import Tokenizer
from jaxpipe.train.data import ArraySpec, Batch, DataState, check_weights

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

    def batch_at(self, step: int) -> Batch:
        """Return the batch of ``step``.

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
        spec = {name: jax.ShapeDtypeStruct(*kind) for name, kind in self.data.model_inputs.items()}
        try:
            if not isinstance(item, Mapping):
                raise ProgramError(f"it is a {type(item).__name__}; want a dict of arrays: {', '.join(spec)}")
            arrays = {name: jax.device_get(array) for name, array in checked_batch(item, spec, self.batch).items()}
        except ProgramError as error:
            raise DataError(f"data {self.data.source}: the batch of step {step}: {error}") from None
        check_weights(f"{self.data.source}: the batch of step {step}", arrays)
        return arrays

    def state_at(self, step: int) -> DataState:
        """Return what a checkpoint keeps when ``step`` steps are done."""
        return DataState(step, step * self.batch, self.seed, self.seq_len, self.data.fingerprint)
