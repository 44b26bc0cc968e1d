"""The optimizer's update of one stage, on the devices of its rank.

Without ZeRO-1 every device updates its ``tp`` shard of every leaf. With it a device updates its chunks
(:mod:`jaxpipe.train.shards`) and the new parameters are gathered, in the dtype that is computed with; masters, where they are
kept beside, stay in chunks. Either way the transformation may see pieces of leaves (:mod:`jaxpipe.train.pieces`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe.mesh import TP
from jaxpipe.train.layerwise import OptimizerPart
from jaxpipe.train.reduction import gathered, gradient_tree, on_rank, own_bucket, spec_of
from jaxpipe.train.shards import StageShards

Buffers = Sequence[jax.Array]


def compile_update(
    shards: StageShards, part: OptimizerPart, acc_avals: Sequence[jax.ShapeDtypeStruct], state_specs: Any
) -> Any:
    """``update(params, masters, grads, state, scale, ok, extra) -> (params, masters, state, acc, finite)``, compiled when it
    first runs.

    ``params``: the buffers that :func:`taken` names, then all of :attr:`StageShards.updated`. ``masters``: of
    :attr:`StageShards.mastered`. ``grads``: as :class:`~jaxpipe.train.reduction.GradientReduction` gives them. ``state``: of
    the layers in ``part``. ``scale``: ``[2]``, factors of the gradients, one after the other; ``ok``: whether to change
    anything; ``extra``: arguments of the transformation by name. ``acc``: accumulators at zero, in place of ``grads``; empty
    with ZeRO-1. ``finite``: whether all new parameters are. What is replaced is donated.
    """
    buckets = [shards.bucket_spec(i) for i in shards.updated]
    acc = [spec_of(a) for a in acc_avals]
    masters = [(shards.bucket_spec if shards.chunked else shards.buffer_spec)(i) for i in shards.mastered]
    return on_rank(
        partial(_chunked if shards.chunked else _whole, shards, part),
        shards.mesh,
        (
            [shards.buffer_spec(i) for i in taken(shards)],
            masters,
            buckets if shards.chunked else acc,
            state_specs,
            *[P()] * 3,
        ),
        ([shards.buffer_spec(i) for i in shards.updated], masters, state_specs, [] if shards.chunked else acc, P()),
        donate=(0, 1, 3) if shards.chunked else (0, 1, 2, 3),
    )


def taken(shards: StageShards) -> tuple[int, ...]:
    """The parameter buffers that the update reads: not those that it makes anew of whole masters."""
    return shards.updated if shards.chunked else tuple(i for i in shards.updated if i not in shards.mastered)


def _whole(
    shards: StageShards,
    part: OptimizerPart,
    params: Buffers,
    masters: Buffers,
    grads: Buffers,
    state: Any,
    scale: jax.Array,
    ok: jax.Array,
    extra: Mapping[str, Any],
) -> Any:
    layout, old = shards.layout, _leaves(shards, params, masters)
    new, new_state = _updated(part, shards.tree(old), gradient_tree(shards, grads), state, scale, ok, extra)
    packed = dict(zip(shards.updated, layout.pack_leaves(shards.leaves(new, old)), strict=True))
    computed = [b.astype(layout.buffers[i].dtype) for i, b in packed.items()]
    zeros = [jnp.zeros_like(a) for a in grads]
    return computed, [packed[i] for i in shards.mastered], new_state, zeros, _all_finite(shards, computed)


def _chunked(
    shards: StageShards,
    part: OptimizerPart,
    params: Buffers,
    masters: Buffers,
    grads: Buffers,
    state: Any,
    scale: jax.Array,
    ok: jax.Array,
    extra: Mapping[str, Any],
) -> Any:
    old = _own_chunks(shards, params, masters)
    new, new_state = _updated(part, old, shards.chunks(grads), state, scale, ok, extra)
    buckets = dict(zip(shards.updated, shards.buckets(new), strict=True))
    sent = [b.astype(shards.layout.buffers[i].dtype) for i, b in buckets.items()]
    computed = gathered(shards, sent, params)
    return computed, [buckets[i] for i in shards.mastered], new_state, [], _all_finite(shards, computed)


def fresh_state(shards: StageShards, part: OptimizerPart, params: Buffers, masters: Buffers) -> Any:
    """The optimizer's state of fresh parameters, given as to the update."""
    if shards.chunked:
        return part.init(_own_chunks(shards, params, masters))
    return part.init(shards.tree(_leaves(shards, params, masters)))


def _leaves(shards: StageShards, params: Buffers, masters: Buffers) -> list[Any]:
    """Local leaves in slot order, None for those of buffers that are not updated."""
    given = {**dict(zip(taken(shards), params, strict=True)), **dict(zip(shards.mastered, masters, strict=True))}
    return shards.layout.unpack_leaves([given.get(i) for i in range(len(shards.layout.buffers))])


def _own_chunks(shards: StageShards, params: Buffers, masters: Buffers) -> dict[str, Any]:
    """This device's chunks, by layer."""
    beside = dict(zip(shards.mastered, masters, strict=True))
    given = zip(shards.updated, params, strict=True)
    return shards.chunks([beside[i] if i in beside else own_bucket(shards, b, i) for i, b in given])


def _updated(
    part: OptimizerPart,
    params: Mapping[str, Any],
    grads: Mapping[str, Any],
    state: Any,
    scale: jax.Array,
    ok: jax.Array,
    extra: Mapping[str, Any],
) -> tuple[Any, Any]:
    """New parameters by layer and new state, or the old ones where not ``ok``."""
    scaled = jax.tree.map(lambda g, p: (g * scale[0] * scale[1]).astype(p.dtype), grads, params)
    updates, new_state = part.update(scaled, state, params, extra)
    fresh = optax.apply_updates(params, updates)
    keep = partial(jnp.where, ok)
    return jax.tree.map(keep, fresh, params), jax.tree.map(keep, new_state, state)


def _all_finite(shards: StageShards, buffers: Buffers) -> jax.Array:
    """Whether every number in the buffers is finite, on all devices of the rank: ZeRO-1 leaves the same on those of dp."""
    bad = sum((jnp.sum(~jnp.isfinite(b)) for b in buffers), start=jnp.zeros((), jnp.int32))
    return (jax.lax.psum(bad, TP) if shards.tp > 1 else bad) == 0
