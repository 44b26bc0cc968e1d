"""A model run on emulated shards of a ``dp × cp × tp`` mesh, without a pipeline: loss, gradients, and the jaxprs of its layers.

Parameters enter as in a stage (``split/trace.py``): cast to varying over ``dp``, and over ``tp`` where each shard makes
a part of the gradient. What the pipeline does after its last microbatch, one sum of each gradient over ``dp`` (and over ``tp``
for ``"partial"`` ones), is done at the end here too, so that results compare with those of one device.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe._jax_compat import Jaxpr, sub_jaxprs, vary
from jaxpipe.axes import AXES, DATA, TP, RankMesh, rank_mesh
from jaxpipe.context_parallel import laid_out
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params, Path, Shard
from jaxpipe.stage.model.params import with_tied_leaves

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

QUICK = {"xla_backend_optimization_level": 0}
"""Compile in two thirds of the time; the programs are small."""


def mesh_of(tp: RankMesh, dp: int = 1) -> Mesh:
    return pipeline_submeshes(1, rank_mesh(tp, dp=dp))[0]


def shard_tree(layer: Layer, params: Params, tp: RankMesh) -> Any:
    """Return how each leaf of ``params`` (tied ones included) lies: a tree of axis, ``"partial"`` or ``"same"``.

    Asserts that every path named by ``layer.shards`` exists.
    """
    assert layer.shards is not None
    kinds = dict(layer.shards(tp))
    kinds_tree = jax.tree_util.tree_map_with_path(lambda path, _: kinds.pop(path_of(path), "same"), params)
    assert not kinds, f"layer {layer.name} has no parameters {kinds}"
    return kinds_tree


def path_of(path: Any) -> Path:
    return tuple(str(key.key) for key in path)


def shard_trees(model: Model, params: Mapping[str, Params], tp: RankMesh) -> dict[str, Any]:
    """Return :func:`shard_tree` of each layer's own leaves; asserts that a tied leaf lies as its owner's does."""
    trees = {layer.name: shard_tree(layer, with_tied_leaves(layer, params), tp) for layer in model.layers}
    for layer in model.layers:
        for path, (owner, owner_path) in layer.tied.items():
            assert _at(trees[layer.name], path) == _at(trees[owner], owner_path)
    return {
        name: jax.tree_util.tree_map_with_path(lambda path, _, name=name: _at(trees[name], path_of(path)), params[name])
        for name in trees
    }


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def spec_of(kind: Shard | str) -> P:
    return P(*[None] * kind, TP) if isinstance(kind, int) else P()


def entered(leaf: jax.Array, kind: Shard | str) -> jax.Array:
    """Return a parameter as a stage's functions get it."""
    return vary(leaf, tuple(AXES) if kind == "partial" else DATA)


def loss_and_grads(
    model: Model,
    params: Mapping[str, Params],
    batch: Mapping[str, jax.Array],
    tp: RankMesh,
    dp: int = 1,
    key: jax.Array | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Return ``((loss_sum, weight_sum), gradients)`` with whole shapes, computed on ``dp × cp × tp`` devices."""
    one = laid_out({name: array[None] for name, array in batch.items()}, model.over_time, rank_mesh(tp, dp=dp))
    lying = {name: array[0] for name, array in one.items()}
    result: tuple[tuple[jax.Array, jax.Array], Any] = step(model, params, tp, dp)(dict(params), lying, key)
    return result


def step(
    model: Model, params: Mapping[str, Params], tp: RankMesh, dp: int = 1, train: bool = True
) -> Callable[..., Any]:
    """Return the compiled function ``(params, batch, key) -> ((loss_sum, weight_sum), gradients)``."""
    kinds = shard_trees(model, params, tp)
    specs = jax.tree.map(spec_of if tp.size > 1 else lambda _: P(), kinds)

    def per_shard(params: Any, batch: Any, key: Any) -> Any:
        params = jax.tree.map(entered, params, kinds)
        (loss, weight), pull = jax.vjp(lambda p: apply_shard(model, p, batch, tp, key, train), params)
        (grads,) = pull((jnp.ones_like(loss), jnp.zeros_like(weight)))
        summed = jax.tree.map(lambda g, kind: jax.lax.psum(g, tuple(AXES) if kind == "partial" else DATA), grads, kinds)
        return (jax.lax.psum(loss, DATA), jax.lax.psum(weight, DATA)), summed

    run = jax.shard_map(per_shard, mesh=mesh_of(tp, dp), in_specs=(specs, P(DATA), P()), out_specs=(P(), specs))
    return jax.jit(run, compiler_options=QUICK)


def apply_shard(
    model: Model,
    params: Mapping[str, Params],
    batch: Mapping[str, jax.Array],
    tp: RankMesh,
    key: jax.Array | None,
    train: bool,
) -> Any:
    """Apply the whole model on one shard, inside ``shard_map``."""
    x: Any = None
    for index, layer in enumerate(model.layers):
        layer_key = jax.random.fold_in(key, index) if key is not None and layer.uses_key and train else None
        context = LayerContext({name: batch[name] for name in layer.reads}, layer_key, train, tp)
        x = layer.apply(with_tied_leaves(layer, params), x, context)
    return x


# --- jaxprs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """The computation of one layer on a shard: jaxprs of its forward pass and of its pullback (to parameters and input)."""

    forward: Jaxpr
    backward: Jaxpr


def trace_layers(
    model: Model, params: Mapping[str, Params], batch: Mapping[str, Any], tp: RankMesh
) -> dict[str, LayerTrace]:
    """Trace every layer of the model on one shard, without dropout, and return the traces by name."""
    kinds = shard_trees(model, params, tp)
    traces: dict[str, LayerTrace] = {}

    def per_shard(params: Any, batch: Any) -> jax.Array:
        params = jax.tree.map(entered, params, kinds)
        x: Any = None
        for layer in model.layers:
            context = LayerContext({name: batch[name] for name in layer.reads}, None, False, tp)
            run = functools.partial(lambda layer, context, p, x: layer.apply(p, x, context), layer, context)
            layer_params = with_tied_leaves(layer, params)
            forward = jax.make_jaxpr(run)(layer_params, x)
            y, pull = jax.vjp(run, layer_params, x)
            traces[layer.name] = LayerTrace(forward.jaxpr, jax.make_jaxpr(pull)(y).jaxpr)
            x = y
        return jnp.zeros(())

    specs = jax.tree.map(spec_of, kinds)
    traced = jax.shard_map(per_shard, mesh=mesh_of(tp), in_specs=(specs, P(DATA)), out_specs=P())
    jax.eval_shape(traced, dict(params), dict(batch))
    return traces


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield every equation, those of bodies too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in sub_jaxprs(eqn):
            yield from equations(body)


def collectives(jaxpr: Jaxpr) -> Counter[tuple[str, str]]:
    """Return how many collectives of each kind over each axis: ``{("all-reduce", "tp"): 2}``."""
    counts: Counter[tuple[str, str]] = Counter()
    for eqn in equations(jaxpr):
        if eqn.primitive.name in COLLECTIVES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            for axis in axes if isinstance(axes, tuple) else (axes,):
                counts[COLLECTIVES[eqn.primitive.name], axis] += 1
    return counts


def shapes_in(jaxpr: Jaxpr) -> set[tuple[int, ...]]:
    """Return the shapes of every value that the equations make."""
    return {tuple(v.aval.shape) for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "shape")}
