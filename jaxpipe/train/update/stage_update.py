"""The optimizer's update of one stage, on the devices of its rank.

Without ZeRO-1 every device updates its ``tp`` shard of every leaf. With it a device updates its chunks
(:mod:`jaxpipe.train.update.shards`) and the new parameters are gathered, in the dtype that is computed with; masters, where
they are kept beside, stay in chunks. Either way the transformation may see pieces of leaves
(:mod:`jaxpipe.train.update.pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe.mesh import TP, spec_of
from jaxpipe.runtime.reduction import on_rank
from jaxpipe.train.update.layerwise import OptimizerPart
from jaxpipe.train.update.reduction import gathered, gradient_tree, own_bucket
from jaxpipe.train.update.shards import StageShards

Buffers = Sequence[jax.Array]


@dataclass(frozen=True, slots=True)
class StageUpdate:
    """``whole``: see :func:`compile_update`; ``ahead``: of the same arguments only ``params`` and ``finite``, and nothing is
    donated; ``commit``: the other three, and all but parameters and buckets is donated. ``zeros()``: accumulators."""

    whole: Any
    ahead: Any
    commit: Any
    zeros: Callable[[], list[jax.Array]]


def compile_update(
    shards: StageShards, part: OptimizerPart, acc_avals: Sequence[jax.ShapeDtypeStruct], state_specs: Any
) -> StageUpdate:
    """``update(params, masters, grads, state, scale, ok, extra) -> (params, masters, state, acc, finite)``, whole and in two
    halves, compiled when they first run.

    ``params``: the buffers that :func:`taken` names, then all of :attr:`StageShards.updated`. ``masters``: of
    :attr:`StageShards.mastered`. ``grads``: as :class:`~jaxpipe.train.update.reduction.GradientReduction` gives them.
    ``state``: of the layers in ``part``. ``scale``: ``[2]``, factors of the gradients, one after the other; ``ok``: whether
    to change anything; ``extra``: arguments of the transformation by name. ``acc``: accumulators at zero, in place of
    ``grads``; empty with ZeRO-1. ``finite``: whether all new parameters are. What is replaced is donated.
    """
    buckets = [shards.bucket_spec(i) for i in shards.updated]
    acc = [spec_of(a) for a in acc_avals]
    masters = [(shards.bucket_spec if shards.chunked else shards.buffer_spec)(i) for i in shards.mastered]
    update = partial(_update, shards, part)
    input_specs = (
        [shards.buffer_spec(i) for i in taken(shards)],
        masters,
        buckets if shards.chunked else acc,
        state_specs,
    )
    output_specs = (
        [shards.buffer_spec(i) for i in shards.updated],
        masters,
        state_specs,
        [] if shards.chunked else acc,
        P(),
    )
    in_place = (1, 3) if shards.chunked else (1, 2, 3)

    def made_of(results: slice, donate: tuple[int, ...]) -> Any:
        return on_rank(
            lambda *old: update(*old)[results],
            shards.mesh,
            (*input_specs, *[P()] * 3),
            output_specs[results],
            donate=donate,
        )

    return StageUpdate(
        whole=made_of(slice(None), (0, *in_place)),
        ahead=made_of(slice(0, None, 4), ()),
        commit=made_of(slice(1, 4), in_place),
        zeros=lambda: [jnp.zeros(a.shape, a.dtype, device=a.sharding) for a in acc_avals],
    )


def taken(shards: StageShards) -> tuple[int, ...]:
    """The parameter buffers that the update reads: not those that it makes anew of whole masters."""
    return shards.updated if shards.chunked else tuple(i for i in shards.updated if i not in shards.mastered)


def _update(
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
    """What :func:`compile_update` compiles, on one device; parameters and state stay the old ones where not ``ok``."""
    old = _held(shards, params, masters)
    gradients = shards.chunks(grads) if shards.chunked else gradient_tree(shards, grads)
    scaled = jax.tree.map(lambda g, p: (g * scale[0] * scale[1]).astype(p.dtype), gradients, old)
    updates, new_state = part.update(scaled, state, old, extra)
    keep = partial(jnp.where, ok)
    new = jax.tree.map(keep, optax.apply_updates(old, updates), old)
    if shards.chunked:
        new_buffers = shards.buckets(new)
    else:
        new_buffers = shards.layout.pack_leaves(shards.leaves(new, _leaves(shards, params, masters)))
    packed = dict(zip(shards.updated, new_buffers, strict=True))
    computed = [b.astype(shards.layout.buffers[i].dtype) for i, b in packed.items()]
    computed = gathered(shards, computed) if shards.chunked else computed
    zeros = [] if shards.chunked else [jnp.zeros_like(a) for a in grads]
    new_masters = [packed[i] for i in shards.mastered]
    return computed, new_masters, jax.tree.map(keep, new_state, state), zeros, _all_finite(shards, computed)


def fresh_state(shards: StageShards, part: OptimizerPart, params: Buffers, masters: Buffers) -> Any:
    """The optimizer's state of fresh parameters, given as to the update."""
    return part.init(_held(shards, params, masters))


def _held(shards: StageShards, params: Buffers, masters: Buffers) -> dict[str, Any]:
    """What this device updates, by layer: its leaves, or with ZeRO-1 its chunks."""
    if not shards.chunked:
        return shards.tree(_leaves(shards, params, masters))
    beside = dict(zip(shards.mastered, masters, strict=True))
    params_by_buffer = zip(shards.updated, params, strict=True)
    return shards.chunks([beside[i] if i in beside else own_bucket(shards, b, i) for i, b in params_by_buffer])


def _leaves(shards: StageShards, params: Buffers, masters: Buffers) -> list[Any]:
    """Local leaves in slot order, None for those of buffers that are not updated."""
    buffer_of = {**dict(zip(taken(shards), params, strict=True)), **dict(zip(shards.mastered, masters, strict=True))}
    return shards.layout.unpack_leaves([buffer_of.get(i) for i in range(len(shards.layout.buffers))])


def _all_finite(shards: StageShards, buffers: Buffers) -> jax.Array:
    """Whether every number in the buffers is finite, on all devices of the rank: ZeRO-1 leaves the same on those of dp."""
    bad = sum((jnp.sum(~jnp.isfinite(b)) for b in buffers), start=jnp.zeros((), jnp.int32))
    return (jax.lax.psum(bad, TP) if shards.tp > 1 else bad) == 0
