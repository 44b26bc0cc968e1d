"""Softmax attention through one function: causal or full, sliding windows, padding, documents, by XLA or by cuDNN's fused
kernel.

    B batch   T time   H query heads   G key/value heads   R = H / G query heads a key/value head   K size of a head

``kernel="cudnn"`` is ``jax.nn.dot_product_attention``'s: F keeps q, k, v, its output and a float32 a query and head, nothing
that grows with T². Its backward pass may add in another order each time (openxla/xla#14125): runs give the same bits again with
``run.deterministic=true`` (``XLA_FLAGS=--xla_gpu_deterministic_ops=true``), or by ``xla``.

``kernel="xla"`` is written here: the XLA form of ``jax.nn`` keeps several T×T arrays, some in float32, and gives other bits.
Here every T×T value that the backward reads is an output of ``checkpoint_name(…, "attn_scores")``, and can be computed again
from q, k and the dropout key, which the backward reads anyway. A policy that drops what has this name therefore keeps nothing
that grows with T². The softmax is computed in float32 (float64 for float64 inputs); its backward reads the probabilities in the
compute dtype, so in bfloat16 nothing T×T is held in float32. Masks are added, not selected: adding needs no residual.

Where sequences are divided (:mod:`jaxpipe.context_parallel`), ``gather`` and ``heads`` are here, ``ring`` is there. With
``gather`` a shard's queries see the keys and values of all shards, gathered by one collective, by this file's kernel: the T×T
values are [T/c, T], and the backward pass gathers keys and values again. With ``heads`` one
all-to-all gives each shard some heads at all times, for either kernel, and another gives their results back. Dropout draws
whole masks, of which a shard takes its part.

Not modelled: masks of other shapes, windows that see ahead, caches for generation, dropout and documents by cuDNN (``jax.nn``
does not offer them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.context_parallel import (
    gathered,
    gathered_positions,
    heads_for_times,
    in_time_order,
    masked,
    own_heads,
    own_positions,
    own_times,
    ring_attention,
    times_for_heads,
    whole_times,
)
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.tensor_parallel import ONE_SHARD, RankMesh

SCORES = "attn_scores"
"""Name of every T×T value that the backward may read."""

KEPT = "attn_results"
"""Name of what a policy that saves operands of products should save instead of what is gathered of it."""

KERNELS = ("auto", "xla", "cudnn")
MASKS = ("causal", "document")
"""Say what a position of a language model sees: all that stands before it, or of that only its own document."""


def check_attention(what: str, kernel: str, dropout: float = 0.0, mask: str = "causal") -> None:
    """Raise ConfigError where the model ``what`` can't have the options ``attention`` and ``mask``."""
    if mask not in MASKS:
        raise ConfigError(f"{what}: mask is {mask!r}; use {' or '.join(MASKS)}")
    if kernel == "cudnn" and mask == "document":
        raise ConfigError(f"{what}: attention is 'cudnn', which can't tell documents apart; use attention=auto or xla")
    if kernel not in KERNELS:
        raise ConfigError(f"{what}: attention is {kernel!r}; use {', '.join(KERNELS[:-1])} or {KERNELS[-1]}")
    if kernel == "cudnn" and dropout > 0:
        raise ConfigError(
            f"{what}: attention is 'cudnn', which can't drop probabilities, and dropout {dropout}; use attention=auto or xla, "
            "or dropout=0"
        )


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kernel: str = "xla",
    causal: bool = True,
    window: int | None = None,
    lengths: jax.Array | None = None,
    segments: jax.Array | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
    tp: RankMesh = ONE_SHARD,
) -> jax.Array:
    """Compute attention of ``q`` [B, T, H, K] over ``k``, ``v`` [B, T, G, K]; returns [B, T, H, K] in the dtype of ``q``.

    Query head h reads key/value head h // R. Position t sees 0..t with ``causal``, of them the last ``window``, itself
    included; all without. ``lengths`` [B] int32, at least 1: what comes after is padding, which nobody sees and for which the
    result means nothing. ``segments`` [B, T] int32: a position sees those only that have its number. ``dropout`` applies to the
    probabilities, and only when ``key`` is given. ``kernel``: one of :data:`KERNELS`; ``auto`` is cuDNN's on an NVIDIA GPU
    where it takes these shapes and dtypes, without dropout and segments. Where no stage is traced for a rank's devices
    ``cudnn`` is as ``auto``: layers are weighed in float32 before they are cut, and what was trained on GPUs may be evaluated
    without. ``tp``: over how many shards, and how, sequences are divided; T is then a shard's, that of ``segments`` too.

    Raises:
        StageError: cuDNN was asked for and can't, or heads do not divide over the shards that exchange them.
    """
    assert causal or window is None, "a window without causal=True"
    if tp.cp > 1 and tp.cp_method != "heads" and kernel == "cudnn":
        instead = "use cp_method=heads, or attention=auto or xla"
        raise StageError(f"attention=cudnn can't do cp_method={tp.cp_method}; {instead}")
    if tp.cp > 1 and tp.cp_method == "ring":
        return ring_attention(
            q, k, v, tp, causal=causal, window=window, lengths=lengths, segments=segments, dropout=dropout, key=key
        )
    visible = _Seen(causal, window, lengths, None if segments is None else (segments, segments), dropout=dropout)
    B, T, H, _ = q.shape
    # Drawn for whole sequences, of which a shard takes its part: the mask does not depend on how sequences are divided.
    if key is not None and dropout > 0:
        G, length = k.shape[2], T * tp.cp
        visible = replace(visible, keep=jax.random.bernoulli(key, 1 - dropout, (B, G, length * H // G, length)))
    if tp.cp == 1:
        return _by_kernel(q, k, v, kernel, visible)
    if tp.cp_method == "heads":
        return _by_heads(q, k, v, kernel, visible, tp)
    return _by_gathering(q, k, v, visible, tp)


_Pair = tuple[jax.Array, jax.Array]
"""Two arrays: for the queries and for the keys."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The mask of keys for each query, as in :func:`attention`. ``places``: where both lie in their sequences, if not one after
    another; ``keep`` [B, G, T·R, S]: the probabilities that are not dropped; None: all."""

    causal: bool
    window: int | None
    lengths: jax.Array | None
    segments: _Pair | None
    places: _Pair | None = None
    dropout: float = 0.0
    keep: jax.Array | None = None


def _by_kernel(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, visible: _Seen) -> jax.Array:
    """Compute attention of whole sequences with the chosen kernel."""
    # ``auto`` falls back on whatever cuDNN refuses; ``cudnn`` too where no devices are known yet, as when layers are weighed.
    if kernel != "xla":
        try:
            return _by_cudnn(q, k, v, visible)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            if kernel == "cudnn" and jax.sharding.get_abstract_mesh().abstract_device is not None:
                raise StageError(
                    f"attention=cudnn can't do this: {' '.join(str(error).split()).rstrip('.')}; use attention=auto or xla"
                ) from error
    return _by_xla(q, k, v, visible)


def _by_heads(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, visible: _Seen, tp: RankMesh) -> jax.Array:
    B, T, H, K = q.shape
    G = k.shape[2]
    grouped_qkv = [q.reshape(B, T, G, H // G, K), k[:, :, :, None], v[:, :, :, None]]
    qkv = times_for_heads(jnp.concatenate(grouped_qkv, axis=3), tp)  # [B, T·c, G/c, R + 2, K]
    if visible.segments is not None:
        visible = replace(visible, segments=(whole_times(visible.segments[0], tp),) * 2)
    if visible.keep is not None:
        visible = replace(visible, keep=own_heads(visible.keep, tp, 1))
    q = qkv[:, :, :, :-2].reshape(B, T * tp.cp, H // tp.cp, K)
    return heads_for_times(_by_kernel(q, qkv[:, :, :, -2], qkv[:, :, :, -1], kernel, visible), tp)


def _by_gathering(q: jax.Array, k: jax.Array, v: jax.Array, visible: _Seen, tp: RankMesh) -> jax.Array:
    B, T, H, _ = q.shape
    G, length = k.shape[2], T * tp.cp
    # One collective for both; named before it is gathered, so that policies keep a shard's part and gather again.
    kv = gathered(checkpoint_name(jnp.concatenate([k, v], axis=2), KEPT), tp)  # [B, T·c, 2G, K], shard after shard
    visible = replace(visible, places=(own_positions(T, tp), jnp.asarray(gathered_positions(length, tp))))
    if visible.segments is not None:
        visible = replace(visible, segments=(visible.segments[0], gathered(visible.segments[1], tp)))
    if visible.keep is not None:
        rows = own_times(visible.keep.reshape(B, G, length, H // G, length), tp, 2)
        visible = replace(visible, keep=in_time_order(rows, tp, 4, back=True).reshape(B, G, T * H // G, length))
    return _by_xla(q, kv[:, :, :G], kv[:, :, G:], visible)


def places(segments: jax.Array) -> jax.Array:
    """Return positions [B, T] int32 that start from 0 again where a segment of ``segments`` [B, T] starts."""
    # The running maximum of the places where a segment starts is the start of each position's own segment.
    position = jnp.arange(segments.shape[1], dtype=jnp.int32)[None, :]
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    return position - jax.lax.cummax(jnp.where(segments == before, 0, position), axis=1)


def _by_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, visible: _Seen) -> jax.Array:
    """Compute attention by cuDNN. Raises what JAX raises, and NotImplementedError for what JAX does not check before it
    compiles."""
    if visible.segments is not None:
        raise NotImplementedError("it can't tell documents apart")
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if platform not in ("gpu", "cuda"):
        raise NotImplementedError(f"it needs an NVIDIA GPU, and this is a {platform}")
    capability = getattr(jax.devices()[0], "compute_capability", "8.0")
    if float(capability) < 8:
        raise NotImplementedError(f"it needs a GPU of compute capability 8.0, and this one has {capability}")
    if visible.dropout > 0:
        raise NotImplementedError("it can't drop probabilities")
    attended: jax.Array = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=visible.causal,
        # Given for queries too: one of padding that sees nothing would divide by zero.
        query_seq_lengths=visible.lengths,
        key_value_seq_lengths=visible.lengths,
        local_window_size=None if visible.window is None else (visible.window - 1, 0),
        implementation="cudnn",
    )
    return attended


def _by_xla(q: jax.Array, k: jax.Array, v: jax.Array, visible: _Seen) -> jax.Array:
    B, T, H, K = q.shape
    G = k.shape[2]
    R = H // G
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # [B, G, T, K]
    # Queries are scaled, not scores: T·K multiplications in place of T², and no T² value to keep.
    scores = checkpoint_name(jnp.einsum("bgmk,bgsk->bgms", _rows(q * (K**-0.5), G), k), SCORES)
    probs = _softmax(scores, (visible.lengths, visible.segments, visible.places), visible.causal, visible.window)
    if visible.keep is not None:
        keep = checkpoint_name(visible.keep, SCORES)
        probs = checkpoint_name(jax.lax.select(keep, probs / (1 - visible.dropout), jnp.zeros_like(probs)), SCORES)
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


_Masks = tuple[jax.Array | None, _Pair | None, _Pair | None]
"""``lengths``, ``segments`` and ``places`` of :class:`_Seen`."""


# A derivative of its own: JAX's would keep the float32 scores as well, this one reads the probabilities alone.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _softmax(scores: jax.Array, masks: _Masks, causal: bool, window: int | None) -> jax.Array:
    """Softmax over the last axis of ``scores`` [B, G, T·R, S], same dtype out. Row m is of query m // R."""
    lengths, segments, places = masks
    wide = jnp.promote_types(scores.dtype, jnp.float32)
    rows, S = scores.shape[-2:]
    R = rows // (S if places is None else len(places[0]))
    column = jnp.arange(S) if places is None else places[1]
    position = None
    if causal:
        position = jnp.arange(rows) // R if places is None else jnp.repeat(places[0], R)
    numbers = None if segments is None else (jnp.repeat(segments[0], R, axis=1), segments[1])
    masked_scores = masked(scores.astype(wide), column, position, window, lengths, numbers)
    return jax.nn.softmax(masked_scores, axis=-1).astype(scores.dtype)


def _softmax_forward(scores: jax.Array, masks: _Masks, causal: bool, window: int | None) -> tuple[jax.Array, jax.Array]:
    probs = checkpoint_name(_softmax(scores, masks, causal, window), SCORES)
    return probs, probs


def _softmax_backward(causal: bool, window: int | None, probs: jax.Array, cotangent: jax.Array) -> tuple[Any, None]:
    wide = jnp.promote_types(probs.dtype, jnp.float32)
    p, g = probs.astype(wide), cotangent.astype(wide)
    return (p * (g - jnp.sum(p * g, axis=-1, keepdims=True))).astype(probs.dtype), None


_softmax.defvjp(_softmax_forward, _softmax_backward)
