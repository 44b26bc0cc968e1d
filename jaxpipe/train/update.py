"""The optimizer's update of one stage, on the devices of its rank: each layer's parameters by an optax transformation.

Without ZeRO-1 every device updates its ``tp`` shard of every leaf. With it a device updates its chunks
(:mod:`jaxpipe.train.shards`) and the new parameters are gathered, in the dtype that is computed with; masters, where they are
kept beside, stay in chunks. Either way the transformation sees pieces of leaves, so it must treat each element by itself, as
AdamW, SGD and Lion do; :func:`check_elementwise` refuses others (Adafactor, LAMB, norms), which would compute something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe._jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, shape_of
from jaxpipe.errors import ConfigError
from jaxpipe.train.reduction import gathered, gradient_tree, on_rank, own_buckets, spec_of
from jaxpipe.train.shards import StageShards

Buffers = Sequence[jax.Array]


def compile_update(
    shards: StageShards,
    tx: optax.GradientTransformation,
    acc_avals: Sequence[jax.ShapeDtypeStruct],
    states: Mapping[str, Any],
    cast_to: Any | None,
) -> Any:
    """``update(params, masters, grads, states, scale, ok) -> (params, masters, states, acc)``, compiled when it first runs.

    ``params``: the buffers that are computed with; empty where they do not matter (:func:`takes_params`). ``masters``: in a
    wider dtype, where ``cast_to`` is that of ``params``; else empty, and ``params`` are updated themselves. ``grads``: as
    :class:`~jaxpipe.train.reduction.GradientReduction` gives them. ``states``: by layer (here: their shapes). ``scale``: factor
    of the gradients; ``ok``: whether to change anything. ``acc``: accumulators at zero, in place of ``grads``; empty with
    ZeRO-1. What is replaced is donated.
    """
    buffers, casts = shards.buffer_specs, cast_to is not None
    buckets = [shards.bucket_spec(i) for i in shards.bucketed]
    acc = [spec_of(a) for a in acc_avals]
    state_specs = shards.state_specs(tx, states)
    if shards.chunked:
        masters, grads, zeros = (buckets if casts else []), buckets, []
    else:
        masters, grads, zeros = (buffers if casts else []), acc, acc
    params = buffers if takes_params(shards, casts) else []
    function = partial(_chunked if shards.chunked else _whole, shards, tx, cast_to)
    return on_rank(
        function,
        shards.mesh,
        (params, masters, grads, state_specs, P(), P()),
        (buffers, masters, state_specs, zeros),
        donate=(0, 1, 3) if shards.chunked else (0, 1, 2, 3),
    )


def takes_params(shards: StageShards, casts: bool) -> bool:
    """Whether the update reads the parameters that are computed with: not where it makes them anew of whole masters."""
    return shards.chunked or not casts


def _whole(
    shards: StageShards,
    tx: optax.GradientTransformation,
    cast_to: Any | None,
    params: Buffers,
    masters: Buffers,
    grads: Buffers,
    states: Mapping[str, Any],
    scale: jax.Array,
    ok: jax.Array,
) -> Any:
    layout = shards.layout
    old = layout.unpack_leaves(masters if cast_to is not None else params)
    new, new_states = _updated(tx, shards.tree(old), gradient_tree(shards, grads), states, scale, ok)
    packed = layout.pack_leaves(shards.leaves(new, old))
    zeros = [jnp.zeros_like(a) for a in grads]
    if cast_to is None:
        return packed, [], new_states, zeros
    return [_cast(b, cast_to) for b in packed], packed, new_states, zeros


def _chunked(
    shards: StageShards,
    tx: optax.GradientTransformation,
    cast_to: Any | None,
    params: Buffers,
    masters: Buffers,
    grads: Buffers,
    states: Mapping[str, Any],
    scale: jax.Array,
    ok: jax.Array,
) -> Any:
    old = shards.chunks(masters if cast_to is not None else own_buckets(shards, params))
    new, new_states = _updated(tx, old, shards.chunks(grads), states, scale, ok)
    buckets = shards.buckets(new)
    sent = buckets if cast_to is None else [_cast(b, cast_to) for b in buckets]
    return gathered(shards, sent, params), buckets if cast_to is not None else [], new_states, []


def _updated(
    tx: optax.GradientTransformation,
    params: Mapping[str, Any],
    grads: Mapping[str, Any],
    states: Mapping[str, Any],
    scale: jax.Array,
    ok: jax.Array,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """New parameters and states by layer, or the old ones where not ``ok``."""
    new_params, new_states = {}, {}
    for name, leaves in params.items():
        scaled = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grads[name], leaves)
        updates, new_state = tx.update(scaled, states[name], leaves)
        fresh = optax.apply_updates(leaves, updates)
        new_params[name] = jax.tree.map(partial(jnp.where, ok), fresh, leaves)
        new_states[name] = jax.tree.map(partial(jnp.where, ok), new_state, states[name])
    return new_params, new_states


def _cast(buffer: jax.Array, dtype: Any) -> jax.Array:
    return buffer.astype(dtype) if jnp.issubdtype(buffer.dtype, jnp.floating) else buffer


# -- which transformations may see pieces ---------------------------------------------------------------------------------

_MIXING = ("reduce", "cum", "arg", "sort", "dot_general", "conv", "random", "threefry", "iota", "fft", "top_k", "rev")


def check_elementwise(tx: optax.GradientTransformation) -> None:
    """Refuse a transformation in which one element's update depends on another's, or on where it is.

    Raises:
        ConfigError: it does; names the operation.
    """
    probe = {"matrix": jnp.zeros((3, 5)), "vector": jnp.zeros(7)}
    state = jax.eval_shape(tx.init, probe)
    closed = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(probe, state, probe)
    for eqn in _equations(closed.jaxpr):
        read = {shape for v in eqn.invars if (shape := shape_of(v))}
        made = {shape for v in eqn.outvars if (shape := shape_of(v))}
        mixes = eqn.primitive.name.startswith(_MIXING) and (read or made)
        if mixes or (read and made != read):
            raise ConfigError(
                f"the optimizer uses {eqn.primitive.name} across a parameter's elements, and with zero1 or tp above 1 a device "
                "sees only a piece of each: use one that treats elements alone (AdamW, SGD, Lion), or zero1=false and tp=1"
            )


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations, those of called functions in place of the calls."""
    for eqn in jaxpr.eqns:
        inner = [v for v in eqn.params.values() if isinstance(v, ClosedJaxpr)]
        if inner:
            for closed in inner:
                yield from _equations(closed.jaxpr)
        else:
            yield eqn
