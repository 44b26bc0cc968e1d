"""Batches of the user's own: ``data.target = "module:function"``.

The function is called with ``data.options`` and with what it takes of ``seed``, ``batch`` (sequences a step), ``seq_len``,
``vocab_size``, ``step`` and ``held_out``. One that takes ``step`` returns that step's batch, arrays ``[batch, …]`` by name; a
resumed run calls it from the step where it stopped. One that does not returns an iterator of such batches; a resumed run passes
over those that it has had. Of several processes each calls it, and must get the same. With ``held_out=True`` it gives what
evaluation looks at; one that has no such argument needs ``run.eval_every=0``.
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
from jaxpipe.train.data import Batch, DataState, Kind, check_weights

_HELD_OUT = 8  # batches, where nobody says how many


@dataclass(frozen=True, slots=True)
class OwnDataset:
    """A :class:`~jaxpipe.train.data.Dataset` made by the function ``source``. ``wanted``: what the model reads."""

    source: str
    options: Mapping[str, Any]
    tokenizer: Tokenizer
    wanted: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Of the function's name and options: what it gives, nobody knows."""
        said = json.dumps([self.source, self.tokenizer.fingerprint, self.options], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """One line."""
        return f"{self.source}: batches of your own"

    def bytes_per_token(self) -> None:
        return None

    def for_model(self, wanted: Mapping[str, Kind], seq_len: int) -> OwnDataset:
        """See :class:`~jaxpipe.train.data.Dataset`; batches are compared with it when they come."""
        return replace(self, wanted=wanted)

    def batches(self, seed: int, batch: int, seq_len: int, state: DataState | None = None) -> OwnBatches:
        """See :class:`~jaxpipe.train.data.Dataset`.

        Raises:
            DataError: ``state`` is of another function, or, of an iterator, of another batch size.
            ConfigError: there is no such function, or it fails.
        """
        made, step = OwnBatches(self, seed, batch, seq_len, {}), 0 if state is None else state.step
        found = made.given(step)
        if not isinstance(found, Mapping):
            made.reading.update(iterator=itertools.islice(found, step, None), step=step)
        if state is None:
            return made
        if (state.fingerprint, state.seed, state.seq_len) != (self.fingerprint, seed, seq_len):
            raise DataError(
                f"data {self.source}: the checkpoint is of another function, options, data.seed or data.seq_len; restore them, "
                "or start anew in another run.out_dir"
            )
        if not isinstance(found, Mapping) and state.position != state.step * batch:
            raise DataError(
                f"data {self.source}: an iterator goes on with the batch size that it began with, and run.batch={batch} is "
                "another; restore it, or let the function take step"
            )
        return made

    def held_out_batches(self, batch: int, seq_len: int, limit: int | None = None) -> tuple[Batch, ...]:
        """See :class:`~jaxpipe.train.data.Dataset`."""
        own = OwnBatches(replace(self, options={**self.options, "held_out": True}), 0, batch, seq_len, {})
        try:
            found = own.given(0)
        except ConfigError as error:
            raise ConfigError(f"{error} (asked for held-out batches; run.eval_every=0 asks for none)") from None
        if isinstance(found, Mapping):
            return tuple(own.batch_at(step) for step in range(limit or _HELD_OUT))
        made = tuple(own.checked(each, step) for step, each in enumerate(itertools.islice(found, limit)))
        if not made:
            raise DataError(f"data {self.source}: gave no held-out batch; set run.eval_every=0 if there are none")
        return made


@dataclass(frozen=True, slots=True, eq=False)
class OwnBatches:
    """As :class:`~jaxpipe.train.data.Batches`. ``reading``: the iterator, and the step that it comes to next."""

    data: OwnDataset
    seed: int
    batch: int
    seq_len: int
    reading: dict[str, Any]

    def given(self, step: int) -> Mapping[str, Any] | Iterator[Any]:
        """What the function returns."""
        data = self.data
        offered = {"seed": self.seed, "batch": self.batch, "seq_len": self.seq_len, "held_out": False, "step": step}
        found = resolved("data", data.source, data.options, {**offered, "vocab_size": data.tokenizer.vocab_size})
        if not isinstance(found, Mapping) and not hasattr(found, "__iter__"):
            raise ConfigError(
                f"data {data.source} returned a {type(found).__name__}; want an iterator of batches, or, of a function that "
                "takes step, a dict of arrays"
            )
        return found if isinstance(found, Mapping) else iter(found)

    def batch_at(self, step: int) -> Batch:
        """As :meth:`~jaxpipe.train.data.Batches.batch_at`.

        Raises:
            ConfigError: the function fails.
            DataError: an iterator ends or fails, or a batch is not what the model reads.
        """
        if self.reading.get("step") != step:
            found = self.given(step)
            if isinstance(found, Mapping):
                return self.checked(found, step)
            self.reading.update(iterator=itertools.islice(found, step, None))
        try:
            made = next(self.reading["iterator"])
        except StopIteration:
            raise DataError(
                f"data {self.data.source}: ended before step {step}; set run.steps to what it has"
            ) from None
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(f"data {self.data.source}: failed at step {step}: {why}") from error
        self.reading["step"] = step + 1
        return self.checked(made, step)

    def checked(self, made: Any, step: int) -> Batch:
        """The arrays that the model reads, in its dtypes."""
        spec = {name: jax.ShapeDtypeStruct(*kind) for name, kind in self.data.wanted.items()}
        try:
            if not isinstance(made, Mapping):
                raise ProgramError(f"it is a {type(made).__name__}; want a dict of arrays: {', '.join(spec)}")
            found = {name: jax.device_get(array) for name, array in checked_batch(made, spec, self.batch).items()}
        except ProgramError as error:
            raise DataError(f"data {self.data.source}: the batch of step {step}: {error}") from None
        check_weights(f"{self.data.source}: the batch of step {step}", found)
        return found

    def state_at(self, step: int) -> DataState:
        """As :meth:`~jaxpipe.train.data.Batches.state_at`."""
        return DataState(step, step * self.batch, self.seed, self.seq_len, self.data.fingerprint)
