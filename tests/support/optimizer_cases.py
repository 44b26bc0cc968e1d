"""A model small enough to train with fifty optimizers, whole on one device and over ranks: five layers, matrices and vectors,
one leaf with a buffer of its own, work that two tensor-parallel shards can divide. All is float64: callers are under ``x64``.

Legend: V vocabulary, D width, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.axes import TP
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.model.layer import Layer, LayerContext, LeafRule, Model, with_leaf_rules
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.train.state import StepMetrics
from jaxpipe.train.step import TrainStep

V, D, H, WIDE, ROWS, MICROBATCHES = 11, 8, 24, 1100, 4, 4
LAYERS = ("embed", "wide", "narrow", "head", "loss")


def _summed(y: jax.Array, context: LayerContext) -> jax.Array:
    return jax.lax.psum(y, TP) if context.tp.size > 1 else y


def _wide(name: str) -> Layer:
    """Return a matrix too large to share a buffer, used both ways."""

    def apply(p: Any, x: jax.Array, context: LayerContext) -> jax.Array:
        return x + _summed(jnp.tanh(x @ p["up"]) @ p["up"].T, context) / WIDE**0.5 + p["bias"][None]

    def init(key: jax.Array) -> Any:
        return {"up": jax.random.normal(key, (D, WIDE)) / 3, "bias": jnp.full(D, 0.1)}

    return Layer(name, init, apply, shards=lambda tp: {("up",): 1})


def _narrow(name: str) -> Layer:
    def init(key: jax.Array) -> Any:
        up, down = jax.random.split(key)
        return {"mlp": {"up": jax.random.normal(up, (D, H)) / 3, "down": jax.random.normal(down, (H, D)) / 5}}

    def apply(p: Any, x: jax.Array, context: LayerContext) -> jax.Array:
        return x + _summed(jnp.tanh(x @ p["mlp"]["up"]) @ p["mlp"]["down"], context)

    return Layer(name, init, apply, shards=lambda tp: {("mlp", "up"): 1, ("mlp", "down"): 0})


def model() -> Model:
    def loss(p: Any, x: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        picked = jnp.take_along_axis(jax.nn.log_softmax(x), context.data["targets"][:, None], axis=-1)
        return -picked.sum(), jnp.float32(x.shape[0])

    layers = (
        Layer(
            "embed",
            lambda key: {"table": jax.random.normal(key, (V, D))},
            lambda p, x, c: p["table"][c.data["tokens"]],
            reads=("tokens",),
            shards=lambda tp: {},
        ),
        _wide("wide"),
        _narrow("narrow"),
        Layer(
            "head",
            lambda key: {"kernel": jax.random.normal(key, (D, V)) / 3},
            lambda p, x, c: x @ p["kernel"],
            shards=lambda tp: {},
        ),
        Layer("loss", lambda key: {}, loss, reads=("targets",), shards=lambda tp: {}),
    )
    return Model(
        "toy", layers, lambda n: {k: jax.ShapeDtypeStruct((n,), jnp.int32) for k in ("tokens", "targets")}, V, 1
    )


@cache
def pipeline(dp: int = 1, tp: int = 1, trainable: LeafRule | None = None) -> Pipeline:
    """Two ranks: embed and wide, then the rest."""
    return Pipeline.build(
        model() if trainable is None else with_leaf_rules(model(), trainable=trainable),
        generate("zb-h1", 2, MICROBATCHES),
        microbatch_size=ROWS,
        boundaries=[(0, 2), (2, 5)],
        compute_dtype=jnp.float64,
        dp=dp,
        tp=tp,
    )


@cache
def params() -> Mapping[str, Any]:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model(), 0))


@cache
def batches() -> tuple[Mapping[str, np.ndarray], ...]:
    rng = np.random.default_rng(0)
    return tuple(
        {k: rng.integers(0, V, (MICROBATCHES, ROWS)).astype(np.int32) for k in ("tokens", "targets")} for _ in range(3)
    )


@cache
def _loss_and_grads() -> Any:
    def mean(p: Any, batch: Any) -> jax.Array:
        total, weight = apply_model(model(), p, {k: v.reshape(-1) for k, v in batch.items()}, train=False)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))


def on_one_device(optimizer: Any, **extra: Any) -> Any:
    """Return parameters after a step with each batch: optax on the whole tree."""
    parameters = inspect.signature(optimizer.update).parameters
    takes_any = isinstance(optimizer, optax.GradientTransformationExtraArgs) and "extra_args" in parameters

    @jax.jit
    def update(grads: Any, state: Any, p: Any, extra: Any) -> Any:
        extra_args = {name: value for name, value in extra.items() if takes_any or name in parameters}
        updates, state = optimizer.update(grads, state, p, **extra_args)
        return optax.apply_updates(p, updates), state

    p = jax.tree.map(jnp.asarray, dict(params()))
    state = jax.jit(optimizer.init)(p)
    for batch in batches():
        value, grads = _loss_and_grads()(p, dict(batch))
        p, state = update(grads, state, p, {"value": value, **extra})
    return p


def over_ranks(step: TrainStep, **extra: Any) -> tuple[Any, Any, StepMetrics]:
    """Return parameters and optimizer state by layer after the same steps over the pipeline, and the last metrics."""
    state = step.init(params())
    for batch in batches():
        state, metrics = step(state, batch, extra=extra)
    return *step.by_layer(state), metrics
