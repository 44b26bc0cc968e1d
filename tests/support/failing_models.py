"""The tiny GPT, going wrong in the microbatch that holds token 81 (``Q`` in text): its loss hangs, is NaN, or can't be had."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.stage.model.layer import LayerContext, Model
from models.gpt import GPT

TOKEN = 81
_HANGING = "JAXPIPE_TEST_HANGING"
"""The file that is made when something begins to hang, where the environment names one."""


def hangs(**options: Any) -> Model:
    """Its loss never ends."""

    def wait(hit: jax.Array, loss: jax.Array) -> jax.Array:
        begin = jnp.int32(0)
        if _HANGING in os.environ:
            begin = jax.pure_callback(_note_if, jax.ShapeDtypeStruct((), jnp.int32), hit)
        rounds = jax.lax.while_loop(lambda n: n >= 0, lambda n: jnp.where(hit, n, -1), jnp.where(hit, begin, 0))
        return loss + (rounds + 1)

    return _with_loss(GPT(**options), wait)


def not_finite(**options: Any) -> Model:
    """Its loss is NaN."""
    return _with_loss(GPT(**options), lambda hit, loss: jnp.where(hit, jnp.nan, loss))


def weightless(**options: Any) -> Model:
    """Its weight is infinite."""
    return _with_loss(GPT(**options), lambda hit, loss: loss, lambda hit, weight: jnp.where(hit, jnp.inf, weight))


def breaks(**options: Any) -> Model:
    """Its loss raises on the host."""

    def check(hit: jax.Array, loss: jax.Array) -> jax.Array:
        return loss + jax.pure_callback(_raise_if, jax.ShapeDtypeStruct((), loss.dtype), hit)

    return _with_loss(GPT(**options), check)


def _note_if(hit: Any) -> Any:
    if hit:
        Path(os.environ[_HANGING]).touch()
    return np.int32(0)


def _raise_if(hit: Any) -> Any:
    if hit:
        raise ValueError("the sensor is on fire")
    return jnp.float32(0)


def _with_loss(
    model: Model,
    change: Callable[[jax.Array, jax.Array], jax.Array],
    weigh: Callable[[jax.Array, jax.Array], jax.Array] = lambda hit, weight: weight,
) -> Model:
    *layers, loss = model.layers

    def apply(params: Any, x: Any, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        loss_sum, weight_sum = loss.apply(params, x, context)
        hit = jnp.any(context.data["targets"] == TOKEN)
        return change(hit, loss_sum), weigh(hit, weight_sum)

    return replace(model, layers=(*layers, replace(loss, apply=apply)))
