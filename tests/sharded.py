"""A model run on emulated shards of a ``dp × tp`` mesh, without a pipeline: loss, gradients, and the jaxprs of its layers.

Parameters enter as in a stage (:mod:`jaxpipe.stage.trace`): cast to varying over ``dp``, and over ``tp`` where each shard makes a
part of the gradient. What the pipeline does after its last microbatch, one sum of each gradient over ``dp`` (and over ``tp`` for
``"partial"`` ones), is done at the end here too, so that results compare with those of one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe._jax_compat import Jaxpr, sub_jaxprs, vary
from jaxpipe.mesh import DP, TP, TensorParallel, pipeline_submeshes
from jaxpipe.stage.layer import Layer, LayerContext, Model, Params, Path, Shard
from jaxpipe.stage.reference import with_tied_leaves

COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "permute",
    "all_to_all": "all-to-all",
}
"""Collective primitives, by what they are called on a GPU."""


def mesh_of(tp: TensorParallel, dp: int = 1) -> Mesh:
    return pipeline_submeshes(1, dp=dp, tp=tp.size)[0]


def shard_tree(layer: Layer, params: Params, tp: TensorParallel) -> Any:
    """How each leaf of ``params`` (tied ones included) lies: a tree of axis, ``"partial"`` or ``"same"``.

    Asserts that every path named by ``layer.shards`` exists.
    """
    assert layer.shards is not None
    kinds = dict(layer.shards(tp))
    made = jax.tree_util.tree_map_with_path(lambda path, _: kinds.pop(path_of(path), "same"), params)
    assert not kinds, f"layer {layer.name} has no parameters {kinds}"
    return made


def path_of(path: Any) -> Path:
    return tuple(str(key.key) for key in path)


def shard_trees(model: Model, params: Mapping[str, Params], tp: TensorParallel) -> dict[str, Any]:
    """:func:`shard_tree` of each layer's own leaves; asserts that a tied leaf lies as its owner's does."""
    whole = {layer.name: shard_tree(layer, with_tied_leaves(layer, params), tp) for layer in model.layers}
    for layer in model.layers:
        for path, (owner, owner_path) in layer.tied.items():
            assert _at(whole[layer.name], path) == _at(whole[owner], owner_path)
    return {
        name: jax.tree_util.tree_map_with_path(lambda path, _, name=name: _at(whole[name], path_of(path)), params[name])
        for name in whole
    }


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def spec_of(kind: Shard | str) -> P:
    return P(*[None] * kind, TP) if isinstance(kind, int) else P()


def entered(leaf: jax.Array, kind: Shard | str) -> jax.Array:
    """A parameter as a stage's functions get it."""
    return vary(leaf, (DP, TP) if kind == "partial" else (DP,))


def loss_and_grads(
    model: Model,
    params: Mapping[str, Params],
    batch: Mapping[str, jax.Array],
    tp: TensorParallel,
    *,
    dp: int = 1,
    key: jax.Array | None = None,
    train: bool = True,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """``((loss_sum, weight_sum), gradients)`` with whole shapes, computed on ``dp × tp`` devices."""
    kinds = shard_trees(model, params, tp)
    specs = jax.tree.map(spec_of, kinds)

    def per_shard(params: Any, batch: Any) -> Any:
        params = jax.tree.map(entered, params, kinds)
        (loss, weight), pull = jax.vjp(lambda p: apply_shard(model, p, batch, tp, key, train), params)
        (grads,) = pull((jnp.ones_like(loss), jnp.zeros_like(weight)))
        summed = jax.tree.map(lambda g, kind: jax.lax.psum(g, (DP, TP) if kind == "partial" else DP), grads, kinds)
        return (jax.lax.psum(loss, DP), jax.lax.psum(weight, DP)), summed

    run = jax.shard_map(per_shard, mesh=mesh_of(tp, dp), in_specs=(specs, P(DP)), out_specs=(P(), specs))
    result: tuple[tuple[jax.Array, jax.Array], Any] = jax.jit(run)(dict(params), dict(batch))
    return result


def apply_shard(
    model: Model,
    params: Mapping[str, Params],
    batch: Mapping[str, jax.Array],
    tp: TensorParallel,
    key: jax.Array | None,
    train: bool,
    layers: int | None = None,
) -> Any:
    """The model's layers (or the first few) on one shard, inside ``shard_map``."""
    x: Any = None
    for index, layer in enumerate(model.layers[:layers]):
        own = jax.random.fold_in(key, index) if key is not None and layer.uses_key and train else None
        context = LayerContext({name: batch[name] for name in layer.reads}, own, train, tp)
        x = layer.apply(with_tied_leaves(layer, params), x, context)
    return x


# --- jaxprs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What one layer computes on a shard: jaxprs of its forward pass and of its pullback (to parameters and input)."""

    forward: Jaxpr
    backward: Jaxpr


def trace_layer(
    model: Model, index: int, params: Mapping[str, Params], batch: Mapping[str, Any], tp: TensorParallel, train: bool = True
) -> LayerTrace:
    """Layer ``index`` of the model traced on one shard, without dropout; the layers before it say what it reads."""
    kinds = {
        layer.name: shard_tree(layer, with_tied_leaves(layer, params), tp) for layer in model.layers
    }
    full = {layer.name: with_tied_leaves(layer, params) for layer in model.layers}
    specs = jax.tree.map(spec_of, kinds)
    layer, made = model.layers[index], []

    def per_shard(params: Any, batch: Any) -> jax.Array:
        params = jax.tree.map(entered, params, kinds)
        x = apply_shard(model, params, batch, tp, None, train, layers=index)
        context = LayerContext({name: batch[name] for name in layer.reads}, None, train, tp)

        def run(own: Params, x: Any) -> Any:
            return layer.apply(own, x, context)

        y, pull = jax.vjp(run, params[layer.name], x)
        forward, backward = jax.make_jaxpr(run)(params[layer.name], x), jax.make_jaxpr(pull)(y)
        made.append(LayerTrace(forward.jaxpr, backward.jaxpr))
        return jnp.zeros(())

    untied = {name: _without_ties(model, name, tree) for name, tree in full.items()}
    del untied
    traced = jax.shard_map(per_shard, mesh=mesh_of(tp), in_specs=(specs, P(DP)), out_specs=P())
    jax.eval_shape(traced, full, dict(batch))
    return made[0]
