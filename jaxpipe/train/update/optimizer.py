"""What a run's optimizer is made of: AdamW or Lion (Muon has a file of its own), the rate of each step, averaged parameters.

Clipping is not here: the norm is global over all ranks, and :mod:`jaxpipe.train.step` takes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.errors import ConfigError


def learning_rate(
    lr: float,
    warmup_steps: int,
    steps: int,
    min_lr_ratio: float,
    schedule: str = "cosine",
    decay_fraction: float = 0.2,
) -> optax.Schedule:
    """0 → ``lr`` over ``warmup_steps`` (the first step already moves), then to ``lr · min_lr_ratio`` at ``steps`` by a
    ``cosine`` or a line (``linear``), or not at all (``constant``). ``wsd``: constant, then a line over the last
    ``decay_fraction`` of all steps (Hu et al., "MiniCPM", 2024)."""
    rest = max(1, steps - warmup_steps)
    last = min(rest, max(1, round(decay_fraction * steps)))
    after: list[optax.Schedule] = {
        "cosine": [optax.cosine_decay_schedule(lr, rest, alpha=min_lr_ratio)],
        "linear": [optax.linear_schedule(lr, lr * min_lr_ratio, rest)],
        "constant": [optax.constant_schedule(lr)],
        "wsd": [optax.constant_schedule(lr), optax.linear_schedule(lr, lr * min_lr_ratio, last)],
    }[schedule]
    bounds = [steps - last] if len(after) > 1 else []
    if warmup_steps:
        after = [optax.linear_schedule(lr / warmup_steps, lr, max(1, warmup_steps - 1)), *after]
        bounds = [warmup_steps, *bounds]
    return optax.join_schedules(after, bounds) if bounds else after[0]


Mask = Callable[[Any], Any]
"""From a tree of parameters to the tree of whether each decays (:func:`jaxpipe.train.update.decay.decay_mask`)."""


def adamw(
    schedule: optax.Schedule, *, betas: tuple[float, float], eps: float, weight_decay: float, mask: Mask
) -> optax.GradientTransformation:
    """AdamW, with weight decay where ``mask`` says."""
    return optax.adamw(schedule, b1=betas[0], b2=betas[1], eps=eps, weight_decay=weight_decay, mask=mask)


def lion(
    schedule: optax.Schedule, *, betas: tuple[float, float], weight_decay: float, mask: Mask
) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023), with weight decay where ``mask`` says."""
    return optax.lion(schedule, b1=betas[0], b2=betas[1], weight_decay=weight_decay, mask=mask)


def functions_of(optimizer: Any, extra: Collection[str] = ()) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """``init`` of an optimizer, and its ``update``, which gets those of the ``extra`` arguments that it takes.

    Raises:
        ConfigError: one of these is missing, or an extra argument but ``value`` is not taken.
    """
    init, update = getattr(optimizer, "init", None), getattr(optimizer, "update", None)
    if not (callable(init) and callable(update)):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__} without init and update; want an optax transformation, such as "
            "optax.adamw(1e-3)"
        )
    parameters = inspect.signature(update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = {name for name in extra if takes_any or name in parameters}
    if unknown := set(extra) - taken - {"value"}:
        raise ConfigError(f"the optimizer's update takes no argument {min(unknown)!r}; leave it out of extra=")
    return init, lambda grads, state, params, **given: update(
        grads, state, params, **{name: value for name, value in given.items() if name in taken}
    )


# -- averaged parameters ---------------------------------------------------------------------------------------------------


class EmaState(NamedTuple):
    """``inner``: of the optimizer. ``ema``: averaged parameters."""

    inner: Any
    ema: Any


def with_ema(optimizer: Any, decay: float) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` with an exponential moving average of the parameters in its state: they themselves at first, then after
    each update ``decay · average + (1 - decay) · new``.

    Raises:
        ConfigError: ``decay`` is not between 0 and 1.
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"the decay of averaged parameters is {decay}; want 0 <= decay < 1, such as 0.999")
    start, _ = functions_of(optimizer)

    def init(params: Any) -> EmaState:
        return EmaState(start(params), params)

    def update(grads: Any, state: EmaState, params: Any, **extra: Any) -> tuple[Any, EmaState]:
        updates, inner = functions_of(optimizer, extra)[1](grads, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, state.ema, new)
        return updates, EmaState(inner, ema)

    return optax.GradientTransformationExtraArgs(init, update)


def ema_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The averaged parameters by layer, of optimizer state by layer (:meth:`TrainStep.by_layer`): those that are trained.

    Raises:
        ConfigError: the optimizer keeps none.
    """
    averaged = {}
    for name, state in optimizer.items():
        found = _nodes(state, lambda node: isinstance(node, EmaState))
        if not found:
            raise ConfigError(
                f"the optimizer state of layer {name} holds no averaged parameters; make it with with_ema"
            )
        averaged[name] = found[0].ema[name]
    return averaged


# -- the learning rate -----------------------------------------------------------------------------------------------------


def learning_rate_of(state: Any) -> jax.Array | None:
    """The hyperparameter ``learning_rate`` that ``optax.inject_hyperparams`` keeps in an optimizer's state; None where there
    is not exactly one."""
    found = [n.hyperparams["learning_rate"] for n in _nodes(state, _injects) if "learning_rate" in n.hyperparams]
    return found[0] if len(found) == 1 else None


class LearningRate:
    """The learning rate of each step, as a device scalar: what was given, a number or a schedule of the count in the
    optimizer's ``state``, or else what :func:`learning_rate_of` finds there.

    Raises:
        ConfigError: something else was given; or a schedule, and the state keeps no count of a schedule.
    """

    def __init__(self, given: float | optax.Schedule | None, state: Any) -> None:
        self._schedule = jax.jit(given) if callable(given) else None
        if not (
            given is None or callable(given) or isinstance(given, float | int | np.number | np.ndarray | jax.Array)
        ):
            raise ConfigError(f"learning_rate is {given!r}; want a number, or a schedule of the step")
        self._number = None if given is None or callable(given) else jnp.asarray(given, jnp.float32)
        if callable(given) and not _nodes(state, _counts):
            raise ConfigError(
                "learning_rate is a schedule, and the optimizer's state counts for none; give the optimizer the schedule too, "
                "or leave learning_rate out"
            )

    def before(self, state: Any) -> jax.Array | None:
        """The rate of the update that ``state`` goes into, where it was given."""
        if self._schedule is None:
            return self._number
        rate: jax.Array = self._schedule(_nodes(state, _counts)[0].count)
        return rate

    def after(self, state: Any) -> jax.Array | None:
        """The rate of the update that ``state`` comes from, where the state tells; not one of its arrays."""
        rate = learning_rate_of(state)
        return None if rate is None else jnp.copy(rate)


def _injects(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), Mapping)


def _counts(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _nodes(state: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """The nodes of a pytree that are wanted, not looking into them."""
    return [node for node in jax.tree.leaves(state, is_leaf=wanted) if wanted(node)]
