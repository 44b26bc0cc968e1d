"""Tensor-parallel layers, written per shard: what one device of the axis ``tp`` computes inside ``jax.shard_map``.

    B batch   T time   D width of the residual stream   V vocabulary   t shards (``tp.size``)

After Shoeybi et al., "Megatron-LM" (2019): a column-parallel product needs nothing summed going forward and its input's
gradient summed going back (their f), a row-parallel one the reverse (their g). Neither is spelled here as a pair of
functions. With varying-axis types on, JAX knows that a column product's input is the same on all shards and its kernel is not,
and sums the gradient itself; ``lax.psum`` passes its own gradient on as it is. With sequence parallelism (Korthikanti et al.,
2022) the residual stream is a part of the time axis on each shard, and the two sums become an all-gather and a
reduce-scatter. A block of two branches has two collectives going forward and two going back; with sequence parallelism, two
all-gathers and two reduce-scatters each way.

Shapes are given whole: a layer divides them by ``tp.size`` itself. On one shard every function here is the plain computation,
with the same equations, but that the embedding refuses ids outside of its words. The linear layers are Flax's own
``DenseGeneral`` with another product in it, so names, shapes and initial values of parameters are Flax's; an initial value is
always drawn on one shard, for the whole parameter.

Differs from Megatron-LM: with sequence parallelism the gathered input of a column product is kept for the backward pass, unless
the recompute policy ``gather`` says otherwise. Not modelled: pieces of one product overlapped with pieces of its own collective
(a collective is hidden under another microbatch's work). Of divided sequences (:mod:`jaxpipe.context_parallel`) T is a shard's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxpipe._jax_compat import vary
from jaxpipe.axes import ONE_SHARD, TP, RankMesh, TensorParallel
from jaxpipe.context_parallel import own_times
from jaxpipe.errors import ConfigError

__all__ = [
    "ONE_SHARD",
    "Dropout",
    "RankMesh",
    "TensorParallel",
    "VocabParallelEmbed",
    "add_branch",
    "check_shards",
    "column_parallel",
    "cross_entropy",
    "ids_as_before",
    "own_query_heads",
    "own_time",
    "partial_cross_entropy",
    "row_parallel",
    "rows_of",
    "shard_key",
    "sum_parts",
    "vocab_parallel_logits",
    "whole_time",
]

_NEVER = -1e30  # a logit


def check_shards(
    what: str,
    tp: RankMesh,
    sizes: Mapping[str, int],
    *,
    kv_heads: int | None = None,
    seq_len: int | None = None,
    allowed: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> None:
    """Refuse a number of shards that does not divide ``sizes`` (option of the model → its value).

    ``kv_heads`` must be a multiple or a divisor of the shards (see :func:`own_query_heads`); ``seq_len`` counts with sequence
    parallelism only. ``what`` names the model. ``allowed``: by option, the only values that the model could have instead.
    Raises ConfigError with the numbers of shards that divide all of it.
    """
    divided = dict(sizes)
    if seq_len is not None and tp.splits_time:
        divided["seq_len"] = seq_len

    for name, size in divided.items():
        if size % tp.size:
            raise ConfigError(
                f"{what}: {name} is {size}, which does not divide over tp {tp.size}; use tp of "
                f"{_sizes_that_divide(divided, kv_heads)}{_value_that_divides(name, size, tp.size, allowed.get(name))}"
            )
    if not _groups_divide(kv_heads, tp.size):
        raise ConfigError(
            f"{what}: num_kv_heads is {kv_heads}, neither a multiple nor a divisor of tp {tp.size}; use tp of "
            f"{_sizes_that_divide(divided, kv_heads)}"
        )


def _value_that_divides(name: str, size: int, shards: int, allowed: Sequence[int] | None) -> str:
    """Return the end of a message: another value of an option that the shards would divide, if there is one."""
    if allowed is None:
        return f", or make {name} a multiple of {shards} such as {-(-size // shards) * shards}"
    fits = [value for value in allowed if value % shards == 0]
    return f", or make {name} {min(fits, key=lambda value: abs(value - size))}" if fits else ""


def _groups_divide(kv_heads: int | None, t: int) -> bool:
    return kv_heads is None or kv_heads % t == 0 or t % kv_heads == 0


def _sizes_that_divide(sizes: Mapping[str, int], kv_heads: int | None) -> str:
    common = math.gcd(*sizes.values())
    return ", ".join(str(t) for t in range(1, common + 1) if common % t == 0 and _groups_divide(kv_heads, t))


# --- between the residual stream and the parallel products ---------------------------------------------------------------


def whole_time(x: jax.Array, tp: RankMesh) -> jax.Array:
    """Return the input of column-parallel products: ``x`` [B, T, …] for every shard, from [B, T/t, …] with sequence
    parallelism.

    Its gradient is summed over the shards (and scattered over time with sequence parallelism), once for all uses of the result.
    """
    if tp.size == 1:
        return x
    full: jax.Array = lax.all_gather(x, TP, axis=1, tiled=True) if tp.splits_time else vary(x, (TP,))
    return full


def sum_parts(part: jax.Array, tp: RankMesh, residual: jax.Array | None = None) -> jax.Array:
    """Sum the shards' ``part`` [B, T, …] onto the residual stream: whole, or [B, T/t, …].

    ``residual``, shaped as the result, is added: inside the all-reduce, as ``stp.txt`` equation 1 has it, and with sequence
    parallelism (where each shard has other rows of it) after the reduce-scatter. Either way its gradient is the result's
    own, as in equation 2, and needs no collective.

    Raises:
        ConfigError: T does not divide over the shards of sequence parallelism.
    """
    if tp.size == 1:
        return part if residual is None else residual + part
    if tp.splits_time:
        _check_time(part.shape[1], tp)
        scattered: jax.Array = lax.psum_scatter(part, TP, scatter_dimension=1, tiled=True)
        return scattered if residual is None else residual + scattered
    summed: jax.Array = lax.psum(part, TP) if residual is None else _sum_with_residual(part, residual)
    return summed


@jax.custom_vjp
def _sum_with_residual(part: jax.Array, residual: jax.Array) -> jax.Array:
    """Return AR(part + residual / t). By JAX's own rule the residual's gradient would be an all-reduce of 1/t of the
    result's."""
    summed: jax.Array = lax.psum(part + residual / lax.axis_size(TP), TP)
    return summed


def _sum_with_residual_forward(part: jax.Array, residual: jax.Array) -> tuple[jax.Array, None]:
    return _sum_with_residual(part, residual), None


def _sum_with_residual_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return vary(cotangent, (TP,)), cotangent


_sum_with_residual.defvjp(_sum_with_residual_forward, _sum_with_residual_backward)


def own_time(rows: jax.Array, tp: RankMesh, axis: int = 0) -> jax.Array:
    """Take this shard's part of the time axis from an array that is replicated over shards; all of it without sequence
    parallelism.

    A parameter read through this is ``"partial"`` with sequence parallelism. Raises ConfigError as :func:`sum_parts` does.
    """
    if not tp.splits_time:
        return rows
    _check_time(rows.shape[axis], tp)
    part = rows.shape[axis] // tp.size
    return lax.dynamic_slice_in_dim(rows, lax.axis_index(TP) * part, part, axis)


def _check_time(length: int, tp: RankMesh) -> None:
    if length % tp.size:
        raise ConfigError(
            f"{length} tokens do not divide over the {tp.size} shards of sequence parallelism; use "
            f"{max(length // tp.size, 1) * tp.size}, or another multiple of {tp.size}"
        )


# --- linear layers -------------------------------------------------------------------------------------------------------


def column_parallel(
    features: int | Sequence[int], tp: RankMesh, *, split: int = 0, input_is_whole: bool = False, **dense: Any
) -> nn.DenseGeneral:
    """Apply a linear layer whose outputs are divided: ``features`` (whole) are cut along their axis ``split``.

    Reads the residual stream, [B, T, D] or [B, T/t, D], and gives [B, T, …] with ``features[split] / t`` on that axis. Where
    several layers read one input, call :func:`whole_time` once and say ``input_is_whole``. The kernel lies split along axis
    ``number of contracted axes + split``, the bias along ``split``. ``dense``: further options of ``nn.DenseGeneral``.
    Raises ConfigError where ``features[split]`` does not divide.
    """
    local_features = [features] if isinstance(features, int) else list(features)
    check_shards(f"column-parallel layer {dense.get('name', '')}".rstrip(), tp, {"features": local_features[split]})
    local_features[split] //= tp.size
    if tp.size > 1 and not input_is_whole:
        dense["dot_general"] = partial(_column_product, tp)
    return nn.DenseGeneral(local_features[0] if isinstance(features, int) else tuple(local_features), **dense)


def row_parallel(
    features: int | Sequence[int], tp: RankMesh, *, residual: jax.Array | None = None, **dense: Any
) -> nn.DenseGeneral:
    """Apply a linear layer whose inputs are divided: shards hold other rows of the kernel, and their products are summed.

    Reads [B, T, …] with a contracted axis (``axis``) divided by t, and gives the residual stream, [B, T, D] or [B, T/t, D],
    with ``residual`` added where given (see :func:`sum_parts`). The bias is added once, after the sum: it is ``"partial"`` with
    sequence parallelism, and the same on all shards without.
    """
    if tp.size > 1 or residual is not None:
        dense["dot_general"] = partial(_row_product, tp, residual)
    return nn.DenseGeneral(features, **dense)


def _column_product(tp: RankMesh, x: jax.Array, kernel: jax.Array, *args: Any, **options: Any) -> jax.Array:
    return lax.dot_general(whole_time(x, tp), kernel, *args, **options)


def _row_product(
    tp: RankMesh, residual: jax.Array | None, x: jax.Array, kernel: jax.Array, *args: Any, **options: Any
) -> jax.Array:
    return sum_parts(lax.dot_general(x, kernel, *args, **options), tp, residual)


def own_query_heads(leaf: jax.Array, tp: RankMesh) -> jax.Array:
    """Take this shard's part of a grouped-query projection where there are more shards than key/value heads.

    ``leaf`` […, G, R + 2, K] (a kernel or bias), whole on each shard: for each key/value head its R query heads, its key, its
    value. t/G shards share a key/value head and divide its query heads: the result is […, 1, R·G/t + 2, K]. The leaf is
    ``"partial"``: each shard's gradient is zero where another shard reads. With G a multiple of t there is nothing to do: split
    the leaf along G. Raises ConfigError where t is no multiple of G, or does not divide R·G.
    """
    groups, heads = leaf.shape[-3], leaf.shape[-2] - 2
    check_shards("grouped-query attention", tp, {"num_heads": groups * heads}, kv_heads=groups)
    if tp.size < groups:
        raise ConfigError(
            f"{groups} key/value heads are not shared by {tp.size} shards; split the projection along them"
        )
    sharing = tp.size // groups
    local_heads = heads // sharing
    shard = lax.axis_index(TP)
    group = lax.dynamic_slice_in_dim(leaf, shard // sharing, 1, leaf.ndim - 3)
    queries = lax.dynamic_slice_in_dim(group, shard % sharing * local_heads, local_heads, leaf.ndim - 2)
    return jnp.concatenate([queries, group[..., -2:, :]], axis=-2)


# --- vocabulary ----------------------------------------------------------------------------------------------------------


_checks_ids = ContextVar("checks_ids", default=True)


@contextmanager
def ids_as_before() -> Iterator[None]:
    """Trace embeddings and cross entropy as versions up to 0.1.0 did, whose one shard took ids from −rows on, and those of rows
    past the words: only digests of their checkpoints are compared so."""
    token = _checks_ids.set(False)
    try:
        yield
    finally:
        _checks_ids.reset(token)


def _is_word(ids: jax.Array, words: int | None, rows: int) -> jax.Array:
    """Return whether ``ids`` are of the vocabulary: of its ``words``, or where that is None of all its ``rows``."""
    return (ids >= 0) & (ids < (rows if words is None or not _checks_ids.get() else words))


class VocabParallelEmbed(nn.Embed):  # type: ignore[misc]  # flax is not typed
    """``nn.Embed`` with the rows of its table divided: ``num_embeddings`` counts the rows of all shards, and t divides it.

    tokens [B, T] int32 → the residual stream, [B, T, D] or [B, T/t, D]. A token outside the vocabulary, negative or not below
    ``words`` (by default ``num_embeddings``), gives NaN on any number of shards. Raises ConfigError where ``num_embeddings``
    does not divide.
    """

    tp: RankMesh = ONE_SHARD
    words: int | None = None

    def setup(self) -> None:
        check_shards("embedding", self.tp, {"num_embeddings": self.num_embeddings})
        rows = self.num_embeddings // self.tp.size
        self.embedding = self.param("embedding", self.embedding_init, (rows, self.features), self.param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.tp.size == 1 and not _checks_ids.get():
            return super().__call__(tokens)  # type: ignore[no-any-return]
        (table,) = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
        if self.tp.size == 1:
            # A gather whose index is the tokens themselves: W reads them from the batch, where a masked index would be handed
            # from B to W. nn.Embed counts negative tokens from the end; here they are out of range and read NaN.
            words = self.num_embeddings if self.words is None else self.words
            index = tokens if words == self.num_embeddings else jnp.where(tokens < words, tokens, -1)
            rows: jax.Array = table.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
            return rows
        is_valid = _is_word(tokens, self.words, self.num_embeddings)
        return sum_parts(jnp.where(is_valid[..., None], _found(table, tokens, self.tp), jnp.nan), self.tp)


def rows_of(table: jax.Array, words: jax.Array, tp: RankMesh) -> jax.Array:
    """Look up the rows of ``table`` [V/t, D] for ``words`` [B, T], counted from the first of all shards → [B, T, D]; zeros
    for words that are none of V."""
    return sum_parts(_found(table, words, tp), tp)


def _found(table: jax.Array, words: jax.Array, tp: RankMesh) -> jax.Array:
    """Look up this shard's rows for ``words``; zeros for those of others."""
    local, is_local = _own_rows(words, table.shape[0], tp)
    # Past the end: reads 0, and its gradient is written nowhere.
    row = jnp.where(is_local, local, table.shape[0])
    return jnp.take(table, row, axis=0, mode="fill", fill_value=0)


def vocab_parallel_logits(
    x: jax.Array, kernel: jax.Array, tp: RankMesh, *, words: int | None = None, first: int = 0
) -> jax.Array:
    """Compute the logits of this shard's words: the residual stream ``x`` times ``kernel`` [V/t, D] → [B, T, V/t], never
    gathered.

    ``words``: how many there are, where V is more so that t divides it; by default V. Logits of the rows past them are so low
    that a softmax gives them nothing, in its gradient too: the rows are never learnt. ``first``: which word the first row of
    all shards is for.
    """
    logits = jnp.einsum("btd,vd->btv", whole_time(x, tp), kernel)
    rows = kernel.shape[0]
    if words is None or words >= first + rows * tp.size:
        return logits
    row = first + jnp.arange(rows) + (0 if tp.size == 1 else lax.axis_index(TP) * rows)
    never = jnp.where(row < words, 0, _NEVER).astype(logits.dtype)
    return logits + never[None, None]  # adding needs no residual


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(
    logits: jax.Array, targets: jax.Array, tp: RankMesh = ONE_SHARD, words: int | None = None
) -> jax.Array:
    """Compute −log softmax(logits)[target] for each token: logits [B, T, V/t], targets [B, T] int32 → [B, T], float32 or wider.

    Shards exchange the largest logit, the sum of exponentials and the target's logit of each token; the gradient needs no
    collective. The backward pass reads the logits in the compute dtype and one number a token. A target that is negative or not
    below ``words`` (by default V) gives NaN: data of a larger vocabulary shows at the first step.
    """
    return _cross_entropy_forward(logits, targets, tp, words)[0]


def _cross_entropy_forward(
    logits: jax.Array, targets: jax.Array, tp: RankMesh, words: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    lse = _log_sum_exp(wide, tp)
    valid = _is_word(targets, words, logits.shape[-1] * tp.size)
    local, is_local = (targets, valid) if tp.size == 1 else _own_rows(targets, logits.shape[-1], tp)
    return jnp.where(valid, lse - _picked(wide, local, is_local, tp), jnp.nan), (logits, targets, lse)


def _picked(wide: jax.Array, local: jax.Array, is_local: jax.Array, tp: RankMesh) -> jax.Array:
    """Return the target's logit, summed over shards; with one shard, any logit where the target is not ``is_local``."""
    index = jnp.where(is_local, local, 0)
    picked = jnp.take_along_axis(wide, index[:, :, None], axis=-1)[:, :, 0]
    return picked if tp.size == 1 else lax.psum(jnp.where(is_local, picked, 0), TP)


def _log_sum_exp(x: jax.Array, tp: RankMesh) -> jax.Array:
    """Compute log Σ exp over the whole vocabulary: ``x`` [B, T, V/t] → [B, T]."""
    if tp.size == 1:
        return jax.nn.logsumexp(x, axis=-1)
    largest = lax.pmax(jnp.max(x, axis=-1), TP)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.log(lax.psum(jnp.sum(jnp.exp(x - largest[:, :, None]), axis=-1), TP)) + largest


def _cross_entropy_backward(
    tp: RankMesh, words: int | None, residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    logits, _, _ = residuals
    probs, hit = _probs_and_hit(residuals, tp)
    return (((probs - hit.astype(probs.dtype)) * cotangent[:, :, None]).astype(logits.dtype), None)


def _probs_and_hit(residuals: tuple[jax.Array, ...], tp: RankMesh) -> tuple[jax.Array, jax.Array]:
    """Return the softmax [B, T, V/t], and where the target is."""
    logits, targets, lse = residuals
    probs = jnp.exp(logits.astype(lse.dtype) - lse[:, :, None])
    local, _ = _own_rows(targets, logits.shape[-1], tp)
    return probs, local[:, :, None] == jnp.arange(logits.shape[-1])[None, None, :]


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def partial_cross_entropy(
    logits: jax.Array, targets: jax.Array, tp: RankMesh = ONE_SHARD
) -> tuple[jax.Array, jax.Array]:
    """Return log Σ exp over logits [B, T, V/t], and the logit of ``targets`` [B, T], 0 where they are none of these V
    words: of parts of a vocabulary, cross entropy is log Σ exp of the ones less the sum of the others. Both [B, T], float32
    or wider."""
    return _partial_forward(logits, targets, tp)[0]


def _partial_forward(
    logits: jax.Array, targets: jax.Array, tp: RankMesh
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    lse = _log_sum_exp(wide, tp)
    local, is_local = _own_rows(targets, logits.shape[-1], tp)
    picked = _picked(wide, local, is_local, tp)
    return (lse, jnp.where(is_local, picked, 0) if tp.size == 1 else picked), (logits, targets, lse)


def _partial_backward(
    tp: RankMesh, residuals: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    probs, hit = _probs_and_hit(residuals, tp)
    of_lse, of_picked = (c[:, :, None] for c in cotangents)
    return ((probs * of_lse + jnp.where(hit, of_picked, 0)).astype(residuals[0].dtype), None)


partial_cross_entropy.defvjp(_partial_forward, _partial_backward)


def _own_rows(words: jax.Array, rows: int, tp: RankMesh) -> tuple[jax.Array, jax.Array]:
    """Return the index of ``words`` among this shard's ``rows`` rows of the vocabulary, and whether they are its own."""
    local = words if tp.size == 1 else words - lax.axis_index(TP) * rows
    return local, (local >= 0) & (local < rows)


# --- dropout -------------------------------------------------------------------------------------------------------------


def shard_key(key: jax.Array, tp: RankMesh) -> jax.Array:
    """Return a PRNG key of this shard's own, for arrays that are divided over the shards (attention probabilities of its
    heads)."""
    return key if tp.size == 1 else jax.random.fold_in(key, lax.axis_index(TP))


class Dropout(nn.Dropout):  # type: ignore[misc]  # flax is not typed
    """``nn.Dropout`` on the residual stream: one mask on all shards, or one for each shard's part of the time axis.

    Over ``cp`` each shard draws the mask of whole sequences and takes its positions' part: it is the undivided run's."""

    tp: RankMesh = ONE_SHARD

    def __call__(self, inputs: jax.Array, deterministic: bool | None = None, rng: jax.Array | None = None) -> jax.Array:
        quiet = nn.merge_param("deterministic", self.deterministic, deterministic)
        if self.tp.splits_time and not quiet and self.rate > 0:
            rng = shard_key(self.make_rng(self.rng_collection) if rng is None else rng, self.tp)
        if self.tp.cp > 1 and not quiet and self.rate > 0:
            B, T, *rest = inputs.shape
            rng = self.make_rng(self.rng_collection) if rng is None else rng
            keep = own_times(jax.random.bernoulli(rng, 1 - self.rate, (B, T * self.tp.cp, *rest)), self.tp, 1)
            return jnp.where(keep, inputs / (1 - self.rate), jnp.zeros_like(inputs))
        outputs: jax.Array = super().__call__(inputs, deterministic, rng)
        return outputs


def add_branch(
    x: jax.Array, branch: Callable[[jax.Array | None], jax.Array], dropout: Dropout, *, train: bool
) -> jax.Array:
    """Return the residual stream ``x`` plus dropout of ``branch(None)``; or ``branch(x)``, which adds its argument in its
    all-reduce.

    The second with ``tp.fused_residual``, unless dropout acts: it applies to the branch's sum, which must then be there first.
    """
    fused = dropout.tp.fused_residual and dropout.tp.size > 1 and not (train and dropout.rate > 0)
    return branch(x) if fused else x + dropout(branch(None), deterministic=not train)
