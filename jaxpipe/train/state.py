"""Hold what a training step takes and gives: its state, before and after the update, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jaxpipe.errors import RunError
from jaxpipe.runtime.executor import StepOutputs
from jaxpipe.schedule import Timeline
from jaxpipe.stage.model.layer import Params
from jaxpipe.train.update.scalars import Combined
from jaxpipe.train.update.stage_update import Reduced, StageUpdate

Instance = tuple[int, int]
Buffers = list[jax.Array]


class Commit(Protocol):
    """The rest of an update that was made ahead (:class:`jaxpipe.train.update.post_validation.LateUpdate`)."""

    @property
    def open(self) -> bool: ...

    @property
    def used(self) -> bool: ...

    def accumulators(self, rank: int, /) -> Mapping[Instance, Buffers]: ...

    def settled(self) -> TrainState: ...


@dataclass(frozen=True, slots=True, repr=False)
class TrainState:
    """Everything that a step changes. ``compute`` and ``acc`` by (rank, stage): parameters, as they are computed with, and
    accumulators, all zeros between steps. ``master`` by (primary rank, stage): of the parameters that are computed with in a
    narrower dtype, those that are updated, with ZeRO-1 as buckets (:mod:`jaxpipe.train.update.stage_update`). ``optimizer``: by
    stage, the state of its layers. ``fixed``: the parameters that are not trained, by layer, on the host and in full precision.

    A state is consumed by the step that takes it (its buffers are donated). ``late``: what is left of the last step's update,
    if that was made ahead (:mod:`jaxpipe.train.update.post_validation`); then ``acc`` is not there, and :meth:`committed` is
    it all.
    """

    step: int
    master: Mapping[Instance, Buffers]
    compute: Mapping[Instance, Buffers]
    acc: Mapping[Instance, Buffers]
    optimizer: Mapping[int, Any]
    fixed: Mapping[str, Params]
    late: Commit | None = None

    def __repr__(self) -> str:
        return f"<TrainState after step {self.step}, {len(self.optimizer)} stages>"

    @property
    def used(self) -> bool:
        """Whether a step has taken this state."""
        if self.late is not None:
            return self.late.used
        return any(a.is_deleted() for buffers in self.acc.values() for a in buffers)

    @property
    def whole(self) -> bool:
        """Whether all that a checkpoint holds of it has been computed, and no step's update has taken any of it."""
        leaves = jax.tree.leaves((self.compute, self.master, self.optimizer))
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        return self.late is None and all(not a.is_deleted() and a.is_ready() for a in arrays)  # type: ignore[attr-defined]

    def require_unused(self) -> None:
        """Raises RunError if a step has taken this state."""
        if self.used:
            raise RunError(
                f"the state after step {self.step} is used up: a TrainState is consumed by the step that takes it; keep the "
                "new one"
            )

    def committed(self) -> TrainState:
        """Return the same state, all of it: parameters, masters and optimizer state after the step. Waits for the step if it
        must."""
        return self if self.late is None else self.late.settled()


@dataclass(frozen=True, slots=True)
class Updated:
    """Whether all parameters are finite after an update, and its learning rate, if the step knows it."""

    finite: jax.Array
    learning_rate: jax.Array | None


Cause = Literal["not finite", "no target", "negative weight"]
"""Why a step changed nothing: its gradient was not finite (or too small a factor of it was wanted), no target of its batch
counts, or the weights of its targets add up to less than zero."""


def cause_of(applied: Any, loss: Any, grad_norm: Any, weight: Any) -> Cause | None:
    """Return why a step with these scalars was not ``applied``; None if it was."""
    if applied:
        return None
    if weight < 0:
        return "negative weight"
    return "no target" if weight == 0 and np.isfinite(loss) and np.isfinite(grad_norm) else "not finite"


@dataclass(frozen=True, slots=True)
class StepMetrics(Combined):
    """The results of a step: its scalars, whether all parameters are ``finite`` after it, and the ``learning_rate``, if the
    step knows it. These two are ``updated()``, and wait for an update that was made ahead. ``timeline``: measured, on recorded
    steps, in process 0. ``outputs`` has the host-side timings (and no accumulators). ``side_results``: gives ``side_sums`` by
    layer."""

    updated: Callable[[], Updated]
    timeline: Timeline | None
    outputs: StepOutputs
    side_results: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]

    @property
    def sums(self) -> dict[str, dict[str, np.ndarray]]:
        """Return by name and layer what layers return beside ``y``, summed over the step, or its peaks. Waits for it."""
        return self.side_results(jax.device_get(self.side_sums))

    @property
    def finite(self) -> jax.Array:
        return self.updated().finite

    @property
    def cause(self) -> Cause | None:
        """Why nothing was ``applied``; None if it was. Waits for the step."""
        scalars = jax.device_get((self.applied, self.loss, self.grad_norm, self.weight))
        return cause_of(*scalars)

    @property
    def learning_rate(self) -> jax.Array | None:
        return self.updated().learning_rate


@dataclass(frozen=True, slots=True)
class Unapplied:
    """A step before its update. By stage: ``params``, the parameter buffers that the update reads, ``reduced`` gradients, and
    ``updates``; ``compute``: the buffers that get new ones; ``acc``: accumulators that are zero. The rest as in
    :class:`TrainState`. ``combined``: the scalars of the whole step; ``extra``: arguments of the optimizer's update;
    ``untrained``: by instance, the buffers that layers change after a step."""

    step: int
    params: dict[int, Buffers]
    master: dict[Instance, Buffers]
    optimizer: dict[int, Any]
    reduced: dict[int, Reduced]
    compute: dict[Instance, Buffers]
    acc: dict[Instance, Buffers]
    fixed: Mapping[str, Any]
    combined: Combined
    extra: Mapping[str, Any]
    updates: Mapping[int, StageUpdate]
    untrained: Mapping[Instance, Buffers]

    def state(self) -> TrainState:
        """Return the state that the step leaves, once all is updated."""
        return TrainState(self.step, self.master, self.compute, self.acc, self.optimizer, self.fixed)
