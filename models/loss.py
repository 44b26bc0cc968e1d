"""Next-token cross entropy as the last layer of a language model.

    B batch   T time   V vocabulary

The loss of a microbatch is a pair of sums, so that a step's loss Σ loss_sum / Σ weight_sum does not depend on how the batch is
cut into microbatches. Cross entropy is computed in float32 (float64 for float64 logits); its backward reads the logits in
the compute dtype and one number a token, so no [B, T, V] array is held in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.stage.layer import Layer, LayerContext, Params


def loss_layer(name: str = "loss") -> Layer:
    """The layer that reads ``targets`` [B, T] int32 and ``weights`` [B, T] float32, gets logits [B, T, V] and returns
    ``(Σ weight · cross entropy, Σ weight)``. Targets of positions with weight 0 are not looked at."""
    return Layer(name, _no_params, _apply, reads=("targets", "weights"), kind="loss")


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """−log softmax(logits)[target] for each token: logits [B, T, V], targets [B, T] int32 → [B, T], float32 or wider.

    A target outside 0..V−1 gives NaN: data of a larger vocabulary shows at the first step.
    """
    return _forward(logits, targets)[0]


def _forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    lse = jax.nn.logsumexp(wide, axis=-1)
    valid = (targets >= 0) & (targets < logits.shape[-1])
    index = jnp.where(valid, targets, 0)
    picked = jnp.take_along_axis(wide, index[:, :, None], axis=-1)[:, :, 0]
    return jnp.where(valid, lse - picked, jnp.nan), (logits, targets, lse)


def _backward(residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, lse = residuals
    probs = jnp.exp(logits.astype(lse.dtype) - lse[:, :, None])
    hit = targets[:, :, None] == jnp.arange(logits.shape[-1])[None, None, :]
    return (((probs - hit) * cotangent[:, :, None]).astype(logits.dtype), None)


cross_entropy.defvjp(_forward, _backward)


def _apply(params: Params, x: Any, context: LayerContext) -> tuple[jax.Array, jax.Array]:
    losses = cross_entropy(x, context.data["targets"])
    weights = context.data["weights"].astype(losses.dtype)
    return jnp.sum(jnp.where(weights != 0, weights * losses, 0)), jnp.sum(weights)


def _no_params(key: jax.Array) -> Params:
    return {}
