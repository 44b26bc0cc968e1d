"""Softmax attention, causal or full, on the plain XLA path, with T×T values named for recompute policies.

    B batch   T time   H query heads   G key/value heads   R = H / G query heads a key/value head   K size of a head

Every T×T value that the backward reads is an output of ``checkpoint_name(…, "attn_scores")``, and can be computed again from
q, k and the dropout key, which the backward reads anyway. A policy that drops what has this name therefore keeps nothing that
grows with T². The softmax is computed in float32 (float64 for float64 inputs); its backward reads the probabilities in the
compute dtype, so in bfloat16 nothing T×T is held in float32. The causal mask is added, not selected: adding needs no residual.

Not modelled: padding masks, sliding windows, caches for generation, fused attention kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

SCORES = "attn_scores"
"""Name of every T×T value that the backward may read."""

_MASKED = -1e30


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, dropout: float = 0.0, key: jax.Array | None = None
) -> jax.Array:
    """Attention of ``q`` [B, T, H, K] over ``k``, ``v`` [B, T, G, K]; returns [B, T, H, K] in the dtype of ``q``.

    Query head h reads key/value head h // R. ``dropout`` applies to the probabilities, and only when ``key`` is given.
    """
    return _attention(_causal_softmax, q, k, v, dropout, key)


def full_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, dropout: float = 0.0, key: jax.Array | None = None
) -> jax.Array:
    """:func:`causal_attention` without its mask: each position sees all, as in an encoder."""
    return _attention(_full_softmax, q, k, v, dropout, key)


def _attention(
    softmax: Callable[[jax.Array], jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout: float,
    key: jax.Array | None,
) -> jax.Array:
    B, T, H, K = q.shape
    G = k.shape[2]
    R = H // G
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # [B, G, T, K]
    scores = checkpoint_name(jnp.einsum("bgmk,bgsk->bgms", _rows(q * (K**-0.5), G), k), SCORES)
    probs = softmax(scores)
    if key is not None and dropout > 0:
        keep = checkpoint_name(jax.random.bernoulli(key, 1 - dropout, probs.shape), SCORES)
        probs = checkpoint_name(jax.lax.select(keep, probs / (1 - dropout), jnp.zeros_like(probs)), SCORES)
    out = jnp.einsum("bgms,bgsk->bgmk", probs, v)
    if R == 1:
        return out.transpose(0, 2, 1, 3)
    return out.reshape(B, G, T, R, K).transpose(0, 2, 1, 3, 4).reshape(B, T, H, K)


def _rows(q: jax.Array, G: int) -> jax.Array:
    """[B, T, H, K] → [B, G, T·R, K]: the queries that share a key/value head are rows of one product.

    One query a head needs no axis R: on GPUs XLA reads a plain transpose as the product's operand, and copies others.
    """
    B, T, H, K = q.shape
    if H == G:
        return q.transpose(0, 2, 1, 3)
    return q.reshape(B, T, G, H // G, K).transpose(0, 2, 1, 3, 4).reshape(B, G, T * H // G, K)


@jax.custom_vjp
def _causal_softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last axis of ``scores`` [B, G, T·R, T], same dtype out. Row m is position t = m // R, sees 0..t."""
    wide = jnp.promote_types(scores.dtype, jnp.float32)
    rows, T = scores.shape[-2:]
    future = jnp.arange(T)[None, :] > (jnp.arange(rows) // (rows // T))[:, None]
    bias = jnp.where(future, _MASKED, 0.0).astype(wide)
    return jax.nn.softmax(scores.astype(wide) + bias[None, None], axis=-1).astype(scores.dtype)


def _softmax_forward(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    probs = checkpoint_name(_causal_softmax(scores), SCORES)
    return probs, probs


def _softmax_backward(probs: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    wide = jnp.promote_types(probs.dtype, jnp.float32)
    p, g = probs.astype(wide), cotangent.astype(wide)
    return ((p * (g - jnp.sum(p * g, axis=-1, keepdims=True))).astype(probs.dtype),)


_causal_softmax.defvjp(_softmax_forward, _softmax_backward)


@jax.custom_vjp
def _full_softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last axis of ``scores``, same dtype out."""
    wide = jnp.promote_types(scores.dtype, jnp.float32)
    return jax.nn.softmax(scores.astype(wide), axis=-1).astype(scores.dtype)


def _full_softmax_forward(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    probs = checkpoint_name(_full_softmax(scores), SCORES)
    return probs, probs


_full_softmax.defvjp(_full_softmax_forward, _softmax_backward)
