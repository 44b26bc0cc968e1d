"""Mixtures of experts on shards: a router that chooses, rows sent to the devices that hold the experts, results sent back.

    N tokens of this shard   k choices a token   D width   E experts   s shards along ``axes``   e = E / s experts of a shard
    C rows in a bucket   R = rows of all buckets

Written per shard, for ``jax.shard_map``; an expert is whole on one device. A token's choice becomes a row of a bucket of C
rows: ``padded`` has a bucket for each expert, and products are batched over experts; ``ragged`` has one for each shard, and
there products over rows in groups by expert, of as many rows as came. Buckets are exchanged whole, so shapes are static:
choices for which a bucket has no room, the last tokens first, are dropped and counted, and add exactly nothing to their token.
Without a limit there is room for all.

Rows move by gathers alone, forwards and backwards (rules of their own below): a scatter-add adds in another order each time
(pytorch/torchtitan#1974). Nothing of N·k·E elements is kept: experts are counted by comparison. What the backward pass keeps of
a dispatch is two arrays of indices.

After Lepikhin et al., "GShard" (2020) for capacities; DeepSeek-AI, "DeepSeek-V2" and "-V3" (2024) for groups and a bias that
only chooses. ``lax.ragged_dot`` is dense on CPUs and, in JAX 0.10, on NVIDIA GPUs: there the kernels for Hopper that JAX ships
take its place. Not modelled: one copy of a token for all its experts on a device, exchanges of as many rows as there are
(``lax.ragged_all_to_all`` does not run on CPUs), an expert that is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe._jax_compat import hopper_kernels, hopper_ragged_dot, vary, varying_axes
from jaxpipe.axes import DATA
from jaxpipe.errors import ConfigError

SCORES = ("softmax", "sigmoid")
PRODUCTS = ("padded", "ragged")


class Choice(NamedTuple):
    """A router's choice. ``probs`` [N, E]: scores of all experts, float32 or wider; ``experts`` [N, k] int32; ``weights`` [N,
    k]: what each result counts for."""

    probs: jax.Array
    experts: jax.Array
    weights: jax.Array


def route(
    x: jax.Array,
    router: jax.Array,
    top_k: int,
    *,
    score: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
) -> Choice:
    """Choose ``top_k`` experts for each token of ``x`` [N, D] by its product with ``router`` [D, E], in float32 or wider.

    ``score``: one of :data:`SCORES`. ``bias`` [E] is added to choose, and to nothing else. With several ``groups`` of experts
    one after another, only those of ``top_groups`` are chosen among: of the groups with the largest sums of their
    ``group_best`` best (2 in DeepSeek-V3, 1 in V2). ``renormalise``: a token's weights are divided by their sum; then they are
    multiplied by ``scale``. Of equal scores the expert of the lowest number is chosen.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.matmul(x.astype(wide), router.astype(wide), precision=lax.Precision.HIGHEST)
    probs = jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)
    ranks = lax.stop_gradient(probs)
    if bias is not None:
        ranks = ranks + lax.stop_gradient(bias).astype(wide)[None]
    if groups > 1:
        by_group = ranks.reshape(len(ranks), groups, -1)
        best = jnp.sum(lax.top_k(by_group, group_best)[0], axis=-1)  # [N, groups]
        chosen_groups = lax.top_k(best, top_groups)[1]
        is_open = jnp.any(chosen_groups[:, :, None] == jnp.arange(groups)[None, None], axis=1)
        ranks = jnp.where(is_open[:, :, None], by_group, -jnp.inf).reshape(ranks.shape)
    experts = lax.top_k(ranks, top_k)[1].astype(jnp.int32)
    weights = _pick(probs, experts)
    if renormalise:
        # All sigmoids may be 0 in float32.
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-20)
    return Choice(probs, experts, weights * scale)


@jax.custom_vjp
def _pick(probs: jax.Array, experts: jax.Array) -> jax.Array:
    """``probs`` [N, E] of ``experts`` [N, k]."""
    return jnp.take_along_axis(probs, experts, axis=1, mode="clip")


def _pick_forward(probs: jax.Array, experts: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return _pick(probs, experts), (experts, probs.shape[1])


def _pick_backward(residuals: tuple[jax.Array, int], cotangent: jax.Array) -> tuple[jax.Array, None]:
    experts, count = residuals
    numbers = jnp.arange(count, dtype=experts.dtype)[None]
    choices = range(experts.shape[1])
    # One [N, E] array a choice, which XLA adds up in one loop: no [N, k, E], and no scatter.
    return sum(jnp.where(experts[:, j, None] == numbers, cotangent[:, j, None], 0) for j in choices), None  # type: ignore[return-value]


_pick.defvjp(_pick_forward, _pick_backward)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The places of rows that were sent to experts. ``counts`` [E] int32: choices of this shard by expert, and ``dropped`` [E]:
    those without room.

    ``choice`` [R]: the choice (token · k + which) in each row of the buckets, N·k in an empty one. ``slots`` [N, k]: the row of
    each choice, R of a dropped one. ``sizes`` [e]: with ragged products how many of the received rows belong to each expert of
    this shard, in order. ``sources``, ``places`` [R]: the received row that each of these was, and the reverse; None: they came
    in order.
    """

    axes: tuple[str, ...]
    counts: jax.Array
    dropped: jax.Array
    choice: jax.Array
    slots: jax.Array
    sizes: jax.Array | None = None
    sources: jax.Array | None = None
    places: jax.Array | None = None


def dispatch(
    x: jax.Array,
    experts: jax.Array,
    num_experts: int,
    *,
    axes: Sequence[str] = (),
    products: str = "padded",
    capacity: float | None = None,
) -> tuple[jax.Array, Dispatch]:
    """Send tokens ``x`` [N, D] to their ``experts`` [N, k]; return the rows that this shard's experts received, and where all
    are.

    ``axes``: of the mesh, along which E experts are divided, each of several devices; none: all are here. ``products``: one of
    :data:`PRODUCTS`; rows are [e, s·C, D] or [s·C, D]. ``capacity``: for how many rows a bucket has room, in means: of N·k/E
    for an expert (padded) or N·k/s for a shard (ragged); None: for all there could be.
    """
    N, k = experts.shape
    shards = math.prod(lax.axis_size(axis) for axis in axes)
    buckets = num_experts if products == "padded" else shards
    # A token chooses an expert once, so of k experts it has at most those of the bucket.
    most = N * min(k, num_experts // buckets)
    room = most if capacity is None else min(most, math.ceil(capacity * N * k / buckets - 1e-9))
    rows = buckets * room
    flat = experts.reshape(-1)
    pairs = jnp.arange(N * k, dtype=jnp.int32)
    _, order = lax.sort((flat, pairs), num_keys=1, is_stable=True)  # choices by expert, then by token
    numbers = jnp.arange(num_experts, dtype=flat.dtype)
    counts = jnp.sum(flat[:, None] == numbers[None], axis=0, dtype=jnp.int32)
    by_bucket = counts.reshape(buckets, -1)
    ends = jnp.cumsum(by_bucket, axis=1)
    starts = jnp.cumsum(ends[:, -1]) - ends[:, -1]  # [buckets], in `order`
    fitting = jnp.diff(jnp.minimum(ends, room), axis=1, prepend=0)

    column = jnp.arange(room, dtype=jnp.int32)[None]
    position = jnp.where(column < ends[:, -1:], starts[:, None] + column, N * k).reshape(-1)
    choice = _rows(order, position, N * k)
    bucket = flat // (num_experts // buckets)
    column_of = _inverse(order, N * k) - starts[bucket]
    slots = jnp.where(column_of < room, bucket * room + column_of, rows).reshape(N, k)
    places = Dispatch(tuple(axes), counts, counts - fitting.reshape(-1), choice, slots)

    sent = _spread(x, choice // k, slots).reshape(buckets, room, -1)
    received = _exchange(sent, axes)
    if products == "padded":
        return _by_expert(received, shards), places
    return _grouped(received, _exchange(fitting, axes), places)


def _grouped(received: jax.Array, sizes: jax.Array, dispatched: Dispatch) -> tuple[jax.Array, Dispatch]:
    """Order ``received`` [s, C, D], of which each shard sent ``sizes`` [s, e], by expert; what is empty comes last."""
    shards, room, _ = received.shape
    total = jnp.sum(sizes, axis=0)
    rows = received.reshape(shards * room, -1)
    if shards == 1:
        return rows, replace(dispatched, sizes=total)
    column = jnp.arange(room, dtype=jnp.int32)
    ends = jnp.cumsum(sizes, axis=1)  # [s, e]
    expert = jnp.sum(column[None, :, None] >= ends[:, None, :], axis=-1)  # [s, C], e of an empty row
    # The first row of an expert, the rows that earlier shards sent it, less the column at which its own begin.
    first = (jnp.cumsum(total) - total)[None] + jnp.cumsum(sizes, axis=0) - sizes - (ends - sizes)
    place = jnp.take_along_axis(first, jnp.minimum(expert, sizes.shape[1] - 1), axis=1, mode="clip") + column[None]
    places = jnp.where(expert < sizes.shape[1], place, shards * room).reshape(-1)
    sources = _inverse(places, shards * room)
    return _spread(rows, sources, places[:, None]), replace(dispatched, sizes=total, sources=sources, places=places)


def product(rows: jax.Array, kernels: jax.Array, dispatched: Dispatch) -> jax.Array:
    """Multiply each row that an expert received with its kernel: ``kernels`` [e, D, …] → [e, s·C, …] or [s·C, …].

    Raises:
        ConfigError: ragged products are for a GPU whose kernels can't do these.
    """
    if dispatched.sizes is None:
        return lax.dot_general(rows, kernels, (((2,), (1,)), ((0,), (0,))))
    flat = kernels.reshape(*kernels.shape[:2], -1)
    return _ragged_product(rows, flat, dispatched.sizes).reshape(-1, *kernels.shape[2:])


def combine(rows: jax.Array, weights: jax.Array, dispatched: Dispatch) -> jax.Array:
    """Send the experts' results ``rows`` (as :func:`dispatch` gave theirs) back, and add up each token's with its ``weights``
    [N, k] → [N, D]."""
    shards = math.prod(lax.axis_size(axis) for axis in dispatched.axes)
    width = rows.shape[-1]
    if dispatched.sizes is None:
        returned = _by_expert(rows, shards, back=True)
    elif dispatched.sources is None:
        returned = rows
    else:
        assert dispatched.places is not None
        returned = _spread(rows, dispatched.places, dispatched.sources[:, None])
    buckets = len(dispatched.counts) if dispatched.sizes is None else shards
    results = _exchange(returned.reshape(buckets, -1, width), dispatched.axes).reshape(-1, width)
    return _weighted(results, weights, dispatched.choice, dispatched.slots)


def _exchange(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Send part i of axis 0 to shard i, and receive as much of each."""
    # An axis of one device is not named: its result would vary over that axis, and gradients be summed over it.
    return lax.all_to_all(x, tuple(axes), 0, 0, tiled=True) if axes else x


def _by_expert(x: jax.Array, shards: int, back: bool = False) -> jax.Array:
    """[s·e, C, D], shard after shard → [e, s·C, D]; or ``back``."""
    if shards == 1:
        return x
    width = x.shape[-1]
    if back:
        parts = x.reshape(len(x), shards, -1, width).transpose(1, 0, 2, 3)
        return parts.reshape(shards * len(x), -1, width)
    experts = len(x) // shards
    return x.reshape(shards, experts, -1, width).transpose(1, 0, 2, 3).reshape(experts, -1, width)


# --- balance: each the same for any cut of the batch into microbatches and shards ----------------------------------------


def sequence_balance(choice: Choice, rows: int, axes: Sequence[str] = ()) -> tuple[jax.Array, jax.Array]:
    """Return the balance loss by sequence as a sum over tokens, and their number.

    A sequence's is E/k · Σ over experts of the fraction of its choices times the mean share of its scores (1 where both are
    even), as in DeepSeek-V3; the fractions carry no gradient. ``rows``: how many sequences, of which shards along ``axes`` have
    other parts. Every position counts. Means over a microbatch (Switch, GShard) are not offered: their product changes with
    the cut.
    """
    num_experts, k = choice.probs.shape[1], choice.experts.shape[1]
    shares = _shares(choice)
    numbers = jnp.arange(num_experts, dtype=choice.experts.dtype)[None]
    # One [N, E] comparison a choice: no one-hot of N·k·E.
    is_chosen = sum((choice.experts[:, j, None] == numbers).astype(shares.dtype) for j in range(k))
    sums = jnp.stack([is_chosen, shares]).reshape(2, rows, -1, num_experts).sum(2)
    counts, totals = lax.psum(sums, tuple(axes)) if axes else sums  # [rows, E]
    length = len(shares) // rows * math.prod(lax.axis_size(axis) for axis in axes)
    balance = num_experts / (k * length**2) * jnp.sum(counts * totals)
    tokens = len(shares) * _copies(axes)
    return balance * (tokens / rows), jnp.asarray(tokens, shares.dtype)


def batch_balance(choice: Choice, fractions: jax.Array, axes: Sequence[str] = ()) -> tuple[jax.Array, jax.Array]:
    """Return the balance loss by the batch before as a sum over tokens, and their number: E · Σ over experts of ``fractions``
    [E], those of that batch's choices (:func:`fractions_of`), times the share of the scores. It is linear in tokens. ``axes``:
    as for :func:`sequence_balance`."""
    shares, fractions = _shares(choice), lax.stop_gradient(fractions)
    total = len(fractions) * jnp.sum(shares @ fractions.astype(shares.dtype))
    return over_data_shard(total, axes), jnp.asarray(len(shares) * _copies(axes), shares.dtype)


def _shares(choice: Choice) -> jax.Array:
    return choice.probs / jnp.maximum(jnp.sum(choice.probs, axis=-1, keepdims=True), 1e-20)


def over_data_shard(
    x: jax.Array, axes: Sequence[str], combine: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lax.psum
) -> jax.Array:
    """Combine what those shards along ``axes`` have that count as one of the data: under sequence parallelism they have other
    positions of the same rows."""
    same = tuple(axis for axis in axes if axis not in DATA)
    return combine(x, same) if same else x


def _copies(axes: Sequence[str]) -> int:
    """Return how many shards along ``axes`` count as one of the data: those return the sums of all of them."""
    return math.prod(lax.axis_size(axis) for axis in axes if axis not in DATA)


def fractions_of(load: jax.Array) -> jax.Array:
    """Return the fraction of a step's choices that went to each expert: ``load`` [E] int32."""
    return load.astype(jnp.float32) / jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)


def balanced_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """Return the bias of the choice [E] after a step whose choices by expert were ``load``: ``rate`` more where these are below
    their mean, ``rate`` less where they are above; its mean is 0 (Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024)."""
    # In integers: a float32 mean of large counts would be off.
    mean, rest = jnp.divmod(jnp.sum(load), len(load))
    moved = bias + rate * (jnp.sign(mean - load) + ((load == mean) & (rest > 0))).astype(bias.dtype)
    return moved - jnp.mean(moved)


# --- rows that move by gathers both ways ---------------------------------------------------------------------------------


def _rows(x: jax.Array, index: jax.Array, fill: int = 0) -> jax.Array:
    """Return ``x[index]``, ``fill`` where there is no such row."""
    return x.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def _inverse(places: jax.Array, none: int) -> jax.Array:
    """Return at ``places[i]`` the number i; ``none`` where none is i's. Places past the end are nobody's, others differ."""
    numbers = jnp.arange(len(places), dtype=places.dtype)
    return jnp.full_like(places, none).at[places].set(numbers, mode="drop", unique_indices=True)


@jax.custom_vjp
def _spread(x: jax.Array, source: jax.Array, slots: jax.Array) -> jax.Array:
    """Return the rows ``x[source]`` [R, D] of x [N, D], zeros where ``source`` is N. ``slots`` [N, k]: where each row's copies
    are, R of those that are nowhere."""
    return _rows(x, source)


def _spread_forward(x: jax.Array, source: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _spread(x, source, slots), slots


def _spread_backward(slots: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    copies = _rows(cotangent, slots)  # [N, k, D]
    return (copies[:, 0] if slots.shape[1] == 1 else jnp.sum(copies, axis=1)), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _weighted(rows: jax.Array, weights: jax.Array, choice: jax.Array, slots: jax.Array) -> jax.Array:
    """Return Σ over k of ``weights`` [N, k] · the rows [R, D] at ``slots`` [N, k]; ``choice`` [R] is the reverse of those."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    terms = weights.astype(wide)[:, :, None] * _rows(rows, slots).astype(wide)
    return jnp.sum(terms, axis=1).astype(rows.dtype)


def _weighted_forward(
    rows: jax.Array, weights: jax.Array, choice: jax.Array, slots: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _weighted(rows, weights, choice, slots), (rows, weights, choice, slots)


def _weighted_backward(
    residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    rows, weights, choice, slots = residuals
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    ct = cotangent.astype(wide)
    of_weights = jnp.sum(ct[:, None] * _rows(rows, slots).astype(wide), axis=-1).astype(weights.dtype)
    weight = _rows(weights.reshape(-1), choice).astype(wide)  # [R], 0 of an empty row
    of_rows = weight[:, None] * _rows(cotangent, choice // slots.shape[1]).astype(wide)
    return of_rows.astype(rows.dtype), of_weights, None, None


_weighted.defvjp(_weighted_forward, _weighted_backward)


# --- products in groups --------------------------------------------------------------------------------------------------


def _ragged_product(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return rows [R, D] times kernels [e, D, F], the first ``sizes[0]`` rows with the first, and so on; zeros past the
    groups."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform not in ("gpu", "cuda"):
        return lax.ragged_dot(rows, kernels, sizes)
    D, F = kernels.shape[1:]
    is_hopper = any(name in device.device_kind for name in ("H100", "H200", "H800", "H20")) and hopper_kernels()
    if not is_hopper or rows.dtype != jnp.bfloat16 or D % 128 or F % 128:
        raise ConfigError(
            f"products=ragged has kernels for bfloat16 and widths that are multiples of 128 on Hopper GPUs, not for "
            f"{rows.dtype.name} [{D}, {F}] on a {device.device_kind}; use products=padded"
        )
    # The rule sums nothing over axes along which kernels are the same.
    return _hopper_product(rows, vary(kernels, sorted(varying_axes(rows))), sizes)


@jax.custom_vjp
def _hopper_product(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    return hopper_ragged_dot(rows, kernels, sizes, (1, 1))


def _hopper_forward(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _hopper_product(rows, kernels, sizes), (rows, kernels, sizes)


def _hopper_backward(residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, sizes = residuals
    of_rows = hopper_ragged_dot(cotangent, kernels, sizes, (1, 2))
    return of_rows, hopper_ragged_dot(rows, cotangent, sizes, (0, 0)), None


_hopper_product.defvjp(_hopper_forward, _hopper_backward)
