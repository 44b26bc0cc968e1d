"""Next-token cross entropy as the last layer of a language model.

    B batch   T time   V vocabulary

The loss of a microbatch is a pair of sums, so that a step's loss Σ loss_sum / Σ weight_sum does not depend on how the batch is
cut into microbatches. Cross entropy is computed in float32 (float64 for float64 logits); its backward reads the logits in
the compute dtype and one number a token, so no [B, T, V] array is held in float32. On tensor-parallel shards each has the
logits of V/t words, and the sums are the same on all of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.stage.model.layer import Layer, LayerContext, Params
from jaxpipe.tensor_parallel import cross_entropy

from .vocabulary import loss_words, no_params, no_shards


def loss_layer(vocab_size: int) -> Layer:
    """Make the layer that reads ``targets`` [B, T] int32 and ``weights`` [B, T] float32, gets logits [B, T, V/t] and returns
    ``(Σ weight · cross entropy, Σ weight)``. A target outside of ``vocab_size`` makes them NaN; those of positions with weight
    0 are not looked at. V may be more: rows of padding are no words."""
    reads, apply = ("targets", "weights"), partial(_apply, vocab_size)
    return Layer("loss", no_params, apply, reads, kind="loss", shards=no_shards, words=loss_words())


def _apply(vocab_size: int, params: Params, x: Any, context: LayerContext) -> tuple[jax.Array, jax.Array]:
    losses = cross_entropy(x, context.data["targets"], context.tp, vocab_size)
    weights = context.data["weights"].astype(losses.dtype)
    # ``where``, as 0 · NaN is NaN: what stands at positions without weight is not looked at.
    return jnp.sum(jnp.where(weights != 0, weights * losses, 0)), jnp.sum(weights)
