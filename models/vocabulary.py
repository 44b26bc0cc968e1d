"""Divide embedding, head and loss of a language model by words (:class:`~jaxpipe.stage.model.layer.VocabSplit`).

    B batch   T time   D width of the residual stream   V words of a part   p parts   t tensor-parallel shards

A part of the embedding returns its rows and which tokens are its words; a part of the head log Σ exp of its logits, the
target's logit, and whether the target is its word. From these the loss is exact: log Σ exp over parts less the sum of the
targets' logits. With one barrier a part also returns its share of the gradient, ready but for the scale that only the loss
knows: the mean of its rows by its own softmax, and the target's row. They travel as whole numbers of the same bits, since
nothing has a gradient by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.stage.model.layer import Layer, LayerContext, Params, Path, Shard, VocabSplit
from jaxpipe.tensor_parallel import RankMesh, partial_cross_entropy, rows_of, sum_parts, vocab_parallel_logits


def embedding_words(path: Path, count: int, rest: Layer) -> VocabSplit:
    """Divide a layer that looks up ``tokens`` in the rows at ``path``, of which ``count`` are of words; ``rest`` takes the rows
    found for them [B, T, D]."""
    merged = replace(rest, apply=partial(_put_together, rest.apply))
    return VocabSplit(path, partial(_bound, partial(_look_up, count), path), lambda barriers: merged, ("tokens",))


def head_words(path: Path, count: int, rest: Layer) -> VocabSplit:
    """Divide a head that multiplies the output of ``rest`` with the rows at ``path``, of which ``count`` are of words."""
    return VocabSplit(path, partial(_bound, partial(_predict, count), path), lambda barriers: rest, ("targets",))


def loss_words() -> VocabSplit:
    """Divide weighted and summed cross entropy."""
    layers = {
        barriers: Layer("loss", no_params, partial(_merge, barriers), ("weights",), kind="loss", shards=no_shards)
        for barriers in (1, 2)
    }
    return VocabSplit((), _bound, layers.__getitem__)


def _bound(
    apply: Callable[..., Any], path: Path, first: int, barriers: int
) -> Callable[[Params, Any, LayerContext], Any]:
    return partial(apply, path, first, barriers)


def _leaf(params: Params, path: Path) -> jax.Array:
    subtree: Any = params
    for key in path:
        subtree = subtree[key]
    return subtree


def _look_up(
    count: int, path: Path, first: int, barriers: int, params: Params, x: None, context: LayerContext
) -> tuple[jax.Array, jax.Array]:
    """(rows [B, T, D], zero where the token has none in the part; whether it is a word of the part [B, T])"""
    table = _leaf(params, path)
    local = context.data["tokens"] - first
    return rows_of(table, local, context.tp), _is_own(local, table, context.tp, count - first)


def _is_own(local: jax.Array, table: jax.Array, tp: RankMesh, words: int) -> jax.Array:
    """Return whether the words, counted from the part's first, are among its own. ``words``: how many there are from that
    one on."""
    return (local >= 0) & (local < min(table.shape[0] * tp.size, words))


def _put_together(apply: Callable[..., Any], params: Params, parts: Any, context: LayerContext) -> Any:
    """Select for each token the row of the part that has its word; NaN if no part has it."""
    # Selected, not summed: the rows are then to the bit those of one table, and an id outside of all parts shows.
    x = jnp.full_like(parts[0][0], jnp.nan)
    for rows, is_local in parts:
        x = jnp.where(is_local[:, :, None], rows, x)
    return apply(params, x, context)


def _predict(
    count: int, path: Path, first: int, barriers: int, params: Params, x: tuple[jax.Array], context: LayerContext
) -> tuple[jax.Array, ...]:
    """x (one array [B, T, D]) → (log Σ exp, target's logit, whether it is there), each [B, T]; with one barrier also (mean row,
    target's row), [B, T, D] as whole numbers"""
    kernel, tp = _leaf(params, path), context.tp
    local = context.data["targets"] - first
    logits = vocab_parallel_logits(x[0], kernel, tp, words=count, first=first)  # [B, T, V/t]
    lse, picked = partial_cross_entropy(logits, local, tp)
    results = lse, picked, _is_own(local, kernel, tp, count - first)
    if barriers == 2:
        return results
    probs = jnp.exp(logits.astype(lse.dtype) - lse[:, :, None]).astype(logits.dtype)
    mean = sum_parts(jnp.einsum("btv,vd->btd", probs, kernel), tp)
    return *results, _sealed(mean), _sealed(rows_of(kernel, local, tp))


def _merge(barriers: int, params: Params, parts: Any, context: LayerContext) -> tuple[jax.Array, jax.Array]:
    """(Σ weight · cross entropy, Σ weight)"""
    x, *parts = parts if barriers == 1 else (None, *parts)
    of_parts = jnp.stack([part[0] for part in parts])  # [p, B, T]
    lse = jax.nn.logsumexp(of_parts, axis=0)
    losses = lse - sum(part[1] for part in parts)
    # A target that is no part's word has no logit: NaN, unless its position has no weight.
    is_word = sum(part[2].astype(jnp.int32) for part in parts) > 0
    weights = context.data["weights"].astype(losses.dtype)
    total = jnp.sum(jnp.where(weights != 0, weights * jnp.where(is_word, losses, jnp.nan), 0))
    if x is not None:
        # exp(lse of the part − lse of all) turns the part's own softmax into its share of the whole.
        scales = lax.stop_gradient(jnp.exp(of_parts - lse[None]))
        gradient = jnp.zeros(x.shape, losses.dtype)
        for scale, part in zip(scales, parts, strict=True):
            mean, row = (lax.bitcast_convert_type(sent, x.dtype).astype(losses.dtype) for sent in part[3:])
            gradient = gradient + (scale[:, :, None] * mean - row)
        by_x = (gradient * weights[:, :, None]).astype(x.dtype)
        total = total + _nothing_but_gradient(x, by_x).astype(total.dtype)
    return total, jnp.sum(weights)


@jax.custom_vjp
def _nothing_but_gradient(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return 0, whose gradient with respect to ``x`` is ``gradient``."""
    return jnp.zeros((), x.dtype)


_nothing_but_gradient.defvjp(
    lambda x, gradient: (jnp.zeros((), x.dtype), gradient), lambda gradient, cotangent: (gradient * cotangent, None)
)


def _sealed(x: jax.Array) -> jax.Array:
    """Return the bits of floating-point numbers as integers, which nothing differentiates."""
    return lax.bitcast_convert_type(lax.stop_gradient(x), _BITS[x.dtype.itemsize])


_BITS = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def no_params(key: jax.Array) -> Params:
    return {}


def no_shards(tp: RankMesh) -> Mapping[Path, Shard]:
    return {}
