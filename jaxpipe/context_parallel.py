"""Context parallelism (``stp.txt`` section 5.3): the positions of each sequence divided over the axis ``cp``.

    B batch   T time   H query heads   G key/value heads   R = H / G   K size of a head   c shards (``tp.cp``)   n = T / 2c

Everything in a transformer but attention works on one position at a time, so a shard just has fewer. Under a causal mask late
positions see more than early ones; so a sequence is cut into 2c chunks of n, and shard s has chunk s and chunk 2c−1−s, one
after the other (the *zigzag*, as in Megatron-LM): every shard has as many pairs of a query and a key that it sees as any other.
Batch arrays are laid out so on the host (:func:`laid_out`), once a step; layers ask where their positions lie
(:func:`own_positions`).

Not modelled: shards of unequal size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe._jax_compat import vary, varying_axes
from jaxpipe.axes import CP, RankMesh
from jaxpipe.errors import ConfigError, ProgramError, StageError

__all__ = [
    "gathered",
    "gathered_positions",
    "heads_for_times",
    "in_time_order",
    "joined_times",
    "laid_out",
    "masked",
    "own_heads",
    "own_positions",
    "own_times",
    "ring_attention",
    "shard_avals",
    "times_for_heads",
    "whole_times",
]


def _chunks(cp: int) -> list[int]:
    """Return the chunks of all shards, those of the first before those of the second."""
    return [chunk for s in range(cp) for chunk in (s, 2 * cp - 1 - s)]


# --- batch arrays -----------------------------------------------------------------------------------------------------------


def shard_avals(
    what: str, avals: Mapping[str, jax.ShapeDtypeStruct], over_time: Collection[str], tp: RankMesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the avals of a microbatch as :func:`laid_out` lays it out: [B·c, T/c, …] of those with a time axis, [B·c, …]
    of others.

    ``what`` names the model; ``over_time``: its arrays whose axis 1 is time.

    Raises:
        ConfigError: the model does not say which have one, or T does not divide into the chunks.
    """
    if tp.cp == 1:
        return dict(avals)
    if not over_time:
        raise ConfigError(
            f"model {what} does not say which of its batch arrays lie over time: use cp 1 (pipeline.cp=1)"
        )
    parts = 2 * tp.cp * (tp.size if tp.splits_time else 1)
    local_avals = {}
    for name, aval in avals.items():
        rows, *rest = aval.shape
        if name in over_time:
            if rest[0] % parts:
                split = " and sequence parallelism" if tp.splits_time else ""
                raise ConfigError(
                    f"model {what}: sequences of {rest[0]} positions do not divide over cp {tp.cp}, which takes 2 chunks a "
                    f"shard{split}; use a multiple of {parts} such as {-(-rest[0] // parts) * parts}"
                )
            rest[0] //= tp.cp
        local_avals[name] = jax.ShapeDtypeStruct((rows * tp.cp, *rest), aval.dtype)
    return local_avals


def laid_out(
    batch: Mapping[str, np.ndarray | jax.Array], over_time: Collection[str], mesh: RankMesh
) -> Mapping[str, np.ndarray | jax.Array]:
    """Lay out arrays [m, B, …] of m microbatches as the devices along dp and cp read them, one device's rows after
    another's: those of ``over_time`` are [m, B·c, T/c, …], each shard with its two chunks; every shard has all of the
    others, [m, B·c, …]."""
    dp, cp = mesh.dp, mesh.cp
    if cp == 1:
        return batch
    arrays_by_name = {}
    for name, array in batch.items():
        m, rows, *rest = array.shape
        if name in over_time:
            chunks = array.reshape(m, dp, rows // dp, 2 * cp, rest[0] // (2 * cp), *rest[1:])
            local = chunks[:, :, :, np.array(_chunks(cp))].reshape(m, dp, rows // dp, cp, rest[0] // cp, *rest[1:])
            arrays_by_name[name] = local.swapaxes(2, 3).reshape(m, rows * cp, rest[0] // cp, *rest[1:])
        else:
            each = array.reshape(m, dp, 1, rows // dp, *rest)
            arrays_by_name[name] = each.repeat(cp, axis=2).reshape(m, rows * cp, *rest)
    return arrays_by_name


def joined_times(shards: Sequence[np.ndarray]) -> np.ndarray:
    """Join the shards' parts along axis 1 on the host, in the order of time: the inverse of the zigzag."""
    if len(shards) == 1:
        return shards[0]
    parts = [part for shard in shards for part in np.split(shard, 2, 1)]
    return np.concatenate([parts[k] for k in np.argsort(_chunks(len(shards)))], 1)


def joined_shards(stacked: np.ndarray, whole_shape: Sequence[int], mesh: RankMesh) -> np.ndarray:
    """Join the parts that a rank's devices hold of an array.

    Args:
        stacked: the parts one after another on axis 0 (``tp`` innermost).
        whole_shape: the shape of the array. Its axis 0 is split over ``dp``, axis 1 over ``cp``, and over ``tp`` the axis by
            which the parts are smaller, if there is one.

    Raises:
        ProgramError: the shapes leave open which axis is split over ``tp``.
    """
    if stacked.shape == tuple(whole_shape):
        return stacked
    rows, times = whole_shape[0] // mesh.dp, [n // (mesh.cp if k == 1 else 1) for k, n in enumerate(whole_shape)][1:]
    parts = stacked.reshape(mesh.dp, mesh.cp, -1, rows, *stacked.shape[1:])
    shards = parts.shape[2]
    split = [k for k, (n, m) in enumerate(zip(times, stacked.shape[1:], strict=True), 1) if n == m * shards]
    if shards > 1 and len(split) != 1:
        raise ProgramError(
            f"the output of shape {tuple(whole_shape)} lies on {shards} tensor-parallel shards as {parts.shape[3:]} each; "
            "gather it in the layer before the loss"
        )
    joined = parts[:, :, 0] if shards == 1 else np.concatenate(list(np.moveaxis(parts, 2, 0)), axis=split[0] + 2)
    return np.concatenate([joined_times(list(sequences)) for sequences in joined])


# --- inside a shard ---------------------------------------------------------------------------------------------------------


def own_times(x: jax.Array, tp: RankMesh, axis: int) -> jax.Array:
    """Take this shard's positions, along ``axis``, from an array that is replicated over shards; all of them on one shard."""
    if tp.cp == 1:
        return x
    n = x.shape[axis] // (2 * tp.cp)
    s = lax.axis_index(CP)
    return jnp.concatenate([lax.dynamic_slice_in_dim(x, chunk * n, n, axis) for chunk in (s, 2 * tp.cp - 1 - s)], axis)


def own_positions(length: int, tp: RankMesh) -> jax.Array:
    """Return the index in its sequence of each of this shard's ``length`` positions: [length] int32."""
    return own_times(jnp.arange(length * tp.cp, dtype=jnp.int32), tp, 0)


def gathered(shard: jax.Array, tp: RankMesh) -> jax.Array:
    """All-gather the shards' parts along axis 1, one shard after another: their positions are :func:`gathered_positions`.

    Its gradient is summed over the shards and scattered."""
    full: jax.Array = lax.all_gather(shard, CP, axis=1, tiled=True)
    return full


def gathered_positions(length: int, tp: RankMesh) -> np.ndarray:
    """Return the index in its sequence of each of the ``length`` positions that :func:`gathered` returns: [length] int32."""
    n = length // (2 * tp.cp)
    return (np.array(_chunks(tp.cp), np.int32)[:, None] * n + np.arange(n, dtype=np.int32)).reshape(-1)


def in_time_order(joined: jax.Array, tp: RankMesh, axis: int = 1, *, back: bool = False) -> jax.Array:
    """Reorder ``axis`` from one shard after another to the order of time; or ``back`` from that order."""
    order = _chunks(tp.cp)
    parts = jnp.split(joined, len(order), axis)
    picked = order if back else [order.index(chunk) for chunk in range(len(order))]
    return jnp.concatenate([parts[k] for k in picked], axis)


def whole_times(shard: jax.Array, tp: RankMesh) -> jax.Array:
    """All-gather the shards' parts along axis 1, in the order of time."""
    return shard if tp.cp == 1 else in_time_order(gathered(shard, tp), tp)


def times_for_heads(shard: jax.Array, tp: RankMesh) -> jax.Array:
    """Exchange positions for heads by an all-to-all: [B, T/c, N, …] → [B, T, N/c, …], this shard's heads at all times, in
    order.

    Raises:
        StageError: N does not divide over the shards.
    """
    N = shard.shape[2]
    if N % tp.cp:
        raise StageError(
            f"attention: {N} key/value heads do not divide over cp {tp.cp} by cp_method=heads; use ring or gather"
        )
    joined = lax.all_to_all(shard, CP, split_axis=2, concat_axis=1, tiled=True)
    return in_time_order(joined, tp)


def heads_for_times(shard: jax.Array, tp: RankMesh) -> jax.Array:
    """Invert :func:`times_for_heads`."""
    local: jax.Array = lax.all_to_all(in_time_order(shard, tp, back=True), CP, split_axis=1, concat_axis=2, tiled=True)
    return local


def own_heads(x: jax.Array, tp: RankMesh, axis: int) -> jax.Array:
    """Take this shard's heads, along ``axis``, from an array that is replicated over shards."""
    num_heads = x.shape[axis] // tp.cp
    return lax.dynamic_slice_in_dim(x, lax.axis_index(CP) * num_heads, num_heads, axis)


# --- attention --------------------------------------------------------------------------------------------------------------

_MASKED = -1e30


def masked(
    scores: jax.Array,
    column: jax.Array,
    position: jax.Array | None = None,
    window: int | None = None,
    lengths: jax.Array | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """``scores`` [B, G, M, S] of queries and keys, those of keys that a query does not see so low that a softmax gives them
    nothing. ``column`` [S]: where keys lie in their sequence. ``position`` [M]: the same of queries, of which each sees what
    stands before it, itself, and with ``window`` only so many of them; None: all. ``lengths`` [B]: of the sequences; what
    comes after is padding. ``segments`` ([B, M], [B, S]): numbers of queries and keys, which must be the same."""

    def least(unseen: jax.Array) -> jax.Array:
        return jnp.where(unseen, _MASKED, 0.0).astype(scores.dtype)

    column = column[None, :]
    if position is not None:
        position = position[:, None]
        unseen = column > position
        unseen = unseen if window is None else unseen | (column <= position - window)
        scores += least(unseen)[None, None]
    if lengths is not None:
        scores += least(column >= lengths[:, None])[:, None, None]
    if segments is not None:
        rows, columns = segments
        scores += least(rows[:, :, None] != columns[:, None, :])[:, None]
    return scores


# --- attention by a ring ----------------------------------------------------------------------------------------------------

_Masks = tuple[jax.Array | None, jax.Array | None]
"""``lengths``, and ``segments`` of whole sequences."""
# The name of what the backward pass reads.
_KEPT = "attn_results"


@dataclass(frozen=True, slots=True)
class _Ring:
    """The static arguments of :func:`ring_attention`."""

    tp: RankMesh
    causal: bool
    window: int | None
    dropout: float

    def pairs(self, step: int) -> list[tuple[Any, Any]]:
        """Return which of this shard's two chunks of queries is multiplied with which of the two current chunks of keys:
        with a causal mask those of which any sees any, as many on each shard."""
        if not self.causal:
            return [(0, 0), (0, 1), (1, 0), (1, 1)]
        if step == 0:
            return [(0, 0), (1, 0), (1, 1)]
        # both of this shard's chunks see the first chunk of an earlier shard; its last chunk sees both of a later one's
        earlier = self.source(step) < lax.axis_index(CP)
        same = jnp.where(earlier, 0, 1)
        return [(1, 0), (same, same)]

    def source(self, step: int) -> jax.Array:
        """Return the shard whose keys and values are the current ones."""
        return (lax.axis_index(CP) - step) % self.tp.cp

    def chunk(self, shard: jax.Array, half: Any) -> jax.Array:
        """Return the position, in the order of time, of one of a shard's two chunks."""
        return jnp.where(jnp.asarray(half) == 0, shard, 2 * self.tp.cp - 1 - shard)

    def passed_on(self, x: jax.Array) -> jax.Array:
        """Receive the value of the previous shard in the ring."""
        received: jax.Array = lax.ppermute(x, CP, [(s, (s + 1) % self.tp.cp) for s in range(self.tp.cp)])
        return received


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tp: RankMesh,
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: jax.Array | None = None,
    segments: jax.Array | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Compute attention of this shard's ``q`` [B, T/c, H, K] over the keys and values [B, T/c, G, K] of all shards, which
    go round a ring (Liu et al., "Ring Attention", 2023): while a shard works on one pair, the next is on its way.

    Results of the chunks are merged by their largest score and sum of exponentials, in float32 or wider; the backward pass
    computes the scores again, with gradients of keys and values going round too. Nothing that grows with T² is kept, nor a
    whole sequence of anything. With a causal mask a shard computes 2c + 1 products of chunks of the 4c of all its queries and
    keys; what ``window`` or ``segments`` hide is computed. Arguments as in :func:`jaxpipe.models.attention.attention`.
    """
    if segments is not None:
        segments = whole_times(segments, tp)
    how = _Ring(tp, causal, window, dropout if key is not None else 0.0)
    B, T, G, K = k.shape
    chunk_rows = [x.reshape(B, 2, T // 2, G, K).transpose(0, 3, 1, 2, 4) for x in (k, v)]
    return _ring(how, _rows(q * (K**-0.5), G), jnp.stack(chunk_rows), (lengths, segments), key)


def _rows(q: jax.Array, G: int) -> jax.Array:
    """[B, T, H, K] → [B, G, 2, n·R, K]: by chunk, the queries that share a key/value head are rows of one product."""
    B, T, H, K = q.shape
    return q.reshape(B, 2, T // 2, G, H // G, K).transpose(0, 3, 1, 2, 4, 5).reshape(B, G, 2, T // 2 * H // G, K)


def _heads(rows: jax.Array, n: int) -> jax.Array:
    """Return the inverse of :func:`_rows`."""
    B, G, _, M, K = rows.shape
    return rows.reshape(B, G, 2, n, M // n, K).transpose(0, 2, 3, 1, 4, 5).reshape(B, 2 * n, M // n * G, K)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(how: _Ring, q: jax.Array, kv: jax.Array, masks: _Masks, key: jax.Array | None) -> jax.Array:
    """q [B, G, 2, n·R, K] (scaled), k and v [2, B, G, 2, n, K] → [B, 2n, H, K]."""
    return _ring_forward(how, q, kv, masks, key)[0]


def _ring_forward(
    how: _Ring, q: jax.Array, kv: jax.Array, masks: _Masks, key: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    keep = _kept(how, q, kv, key)
    axes = sorted(varying_axes(q))
    top = vary(jnp.full(q.shape[:-1], _MASKED, wide), axes)
    total, out = vary(jnp.zeros(q.shape[:-1], wide), axes), vary(jnp.zeros(q.shape, wide), axes)
    current_kv = kv
    for step in range(how.tp.cp):
        coming = how.passed_on(current_kv) if step + 1 < how.tp.cp else current_kv
        for i, j in how.pairs(step):
            k, v = (_at(x, j) for x in current_kv)
            scores = _scores(how, _at(q, i), k, step, i, j, masks)
            old = _at(top, i)
            new = jnp.maximum(old, scores.max(axis=-1))
            shrink, probs = jnp.exp(old - new), jnp.exp(scores - new[..., None])
            dropped = _dropped(how, probs, keep, step, i, j).astype(q.dtype)
            part = jnp.einsum("bgms,bgsk->bgmk", dropped, v, preferred_element_type=wide)
            top = _put(top, new, i)
            total = _put(total, _at(total, i) * shrink + probs.sum(axis=-1), i)
            out = _put(out, _at(out, i) * shrink[..., None] + part, i)
        current_kv = coming
    result = checkpoint_name(_heads((out / total[..., None]).astype(q.dtype), kv.shape[4]), _KEPT)
    return result, (q, kv, masks, key, result, checkpoint_name(top + jnp.log(total), _KEPT))


def _ring_backward(how: _Ring, saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    """Run :func:`_ring_gradients` under ``jax.checkpoint``, so that a stage's B computes the scores, which need no
    cotangent."""
    return jax.checkpoint(partial(_ring_gradients, how))(saved, cotangent)  # type: ignore[no-any-return]


def _ring_gradients(how: _Ring, saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    q, kv, masks, key, result, lse = saved
    wide = lse.dtype
    keep = _kept(how, q, kv, key)
    axes = sorted(varying_axes(q))
    cotangent, result = (_rows(x, kv.shape[2]) for x in (cotangent, result))
    weight = jnp.sum(cotangent.astype(wide) * result.astype(wide), axis=-1)
    dq = vary(jnp.zeros(q.shape, wide), axes)
    current_kv, arrived = kv, None
    for step in range(how.tp.cp):
        coming = how.passed_on(current_kv) if step + 1 < how.tp.cp else current_kv
        dk, dv = (vary(jnp.zeros(kv.shape[1:], wide), axes) for _ in range(2))
        for i, j in how.pairs(step):
            k, v = (_at(x, j) for x in current_kv)
            rows, dout = _at(q, i), _at(cotangent, i)
            probs = jnp.exp(_scores(how, rows, k, step, i, j, masks) - _at(lse, i)[..., None])
            dropped = _dropped(how, probs, keep, step, i, j).astype(q.dtype)
            dprobs = jnp.einsum("bgmk,bgsk->bgms", dout, v, preferred_element_type=wide)
            dscores = (probs * (_dropped(how, dprobs, keep, step, i, j) - _at(weight, i)[..., None])).astype(q.dtype)
            dq = _put(dq, _at(dq, i) + jnp.einsum("bgms,bgsk->bgmk", dscores, k, preferred_element_type=wide), i)
            dk = _put(dk, _at(dk, j) + jnp.einsum("bgms,bgmk->bgsk", dscores, rows, preferred_element_type=wide), j)
            dv = _put(dv, _at(dv, j) + jnp.einsum("bgms,bgmk->bgsk", dropped, dout, preferred_element_type=wide), j)
        dkv = jnp.stack([dk, dv])
        arrived = how.passed_on(
            dkv if arrived is None else dkv + arrived
        )  # with the keys that they are of, at last back home
        current_kv = coming
    assert arrived is not None
    return dq.astype(q.dtype), arrived.astype(kv.dtype), None, None


_ring.defvjp(_ring_forward, _ring_backward)


def _scores(how: _Ring, q: jax.Array, k: jax.Array, step: int, i: Any, j: Any, masks: _Masks) -> jax.Array:
    """Return masked scores [B, G, n·R, n] of two chunks, float32 or wider."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    lengths, segments = masks
    scores = jnp.einsum("bgmk,bgsk->bgms", q, k, preferred_element_type=wide)
    n, R = k.shape[2], q.shape[2] // k.shape[2]
    query_chunk, key_chunk = how.chunk(lax.axis_index(CP), i), how.chunk(how.source(step), j)
    position, column = query_chunk * n + jnp.arange(n * R) // R, key_chunk * n + jnp.arange(n)
    numbers = None
    if segments is not None:
        rows, columns = (lax.dynamic_slice_in_dim(segments, chunk * n, n, 1) for chunk in (query_chunk, key_chunk))
        numbers = jnp.repeat(rows, R, axis=1), columns
    return masked(scores, column, position if how.causal else None, how.window, lengths, numbers)


def _kept(how: _Ring, q: jax.Array, kv: jax.Array, key: jax.Array | None) -> jax.Array | None:
    """Return which probabilities of whole sequences dropout keeps, by chunk: [B, G, 2c, n·R, 2c, n]; None: all."""
    if key is None or how.dropout == 0:
        return None
    B, G, _, rows, _ = q.shape
    chunks, n = 2 * how.tp.cp, kv.shape[4]
    mask = jax.random.bernoulli(key, 1 - how.dropout, (B, G, chunks * rows, chunks * n))
    return mask.reshape(B, G, chunks, rows, chunks, n)


def _dropped(how: _Ring, probs: jax.Array, keep: jax.Array | None, step: int, i: Any, j: Any) -> jax.Array:
    """Apply dropout to ``probs`` of two chunks, or to their cotangents."""
    if keep is None:
        return probs
    query_chunk, key_chunk = how.chunk(lax.axis_index(CP), i), how.chunk(how.source(step), j)
    mask = lax.dynamic_index_in_dim(
        lax.dynamic_index_in_dim(keep, query_chunk, 2, keepdims=False), key_chunk, 3, keepdims=False
    )
    return jnp.where(mask, probs / (1 - how.dropout), jnp.zeros_like(probs))


def _at(x: jax.Array, half: Any) -> jax.Array:
    """Take one of the two chunks, axis 2."""
    return lax.dynamic_index_in_dim(x, half, 2, keepdims=False) if isinstance(half, jax.Array) else x[:, :, half]


def _put(x: jax.Array, value: jax.Array, half: Any) -> jax.Array:
    """Replace one of the two chunks of ``x``, axis 2."""
    new: jax.Array = lax.dynamic_update_index_in_dim(x, value, half, 2)
    return new
