"""An optax transformation of a whole model, taken apart by layer.

A rank holds the parameters of a few layers, and its update must be what one device with all of them would compute. So the
transformation is traced once on the tree ``{layer: leaves}`` of the whole model (shapes only), and a stage runs those equations
of the trace that its own layers' updates and states depend on. Masks and labels by layer name, fixed trees of them, noise
that is drawn per leaf: all come out as on one device, because it is one device's program.

What can't be taken apart is refused: where a layer's update depends on another layer's gradients, parameters or state (a norm
of everything, a test whether all is finite), or where state that belongs to no layer depends on any.

State is stored by layer: of the whole state, a layer has the leaves that stand in its place in trees like the parameters' (or
that depend on it), and those that belong to no layer (counts, rates), which each has and all compute alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._jax_compat import (
    ClosedJaxpr,
    JaxprEqn,
    dtype_of,
    eval_jaxpr,
    is_key_dtype,
    only_results,
    source_functions,
    source_line,
)
from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.stage.inline import flatten
from jaxpipe.stage.model.params import Place, named_leaves
from jaxpipe.train.update.dataflow import NOTHING, Sources, sources
from jaxpipe.train.update.optimizer import functions_of
from jaxpipe.train.update.optimizer_state import StateLeaf, of_layers, state_leaves

Tree = Mapping[str, Any]

_INSTEAD = {
    "clip_by_global_norm": "leave it out and give the training step clip_norm=, which takes the norm over all ranks",
    "apply_if_finite": "leave it out: a step whose gradient is not finite changes nothing anyway (run.max_skipped)",
    "skip_not_finite": "leave it out: a step whose gradient is not finite changes nothing anyway (run.max_skipped)",
}
_TREES = (
    "; the trees it gets are {layer: leaves} of the parameters that are trained, and a fixed tree of labels or a mask must "
    "have their structure: a function of the tree, such as lambda tree: {k: labels[k] for k in tree}, always has"
)


@dataclass(frozen=True, slots=True)
class LayerwiseOptimizer:
    """Make one with :meth:`trace`. ``params``: shapes of what is trained, by layer; ``extra``: of extra arguments. ``leaves``:
    of the state, in order; ``numbers``: the state with their numbers in their places. ``start``, ``update``: all equations."""

    params: Tree
    extra: Mapping[str, jax.ShapeDtypeStruct]
    numbers: Any
    leaves: tuple[StateLeaf, ...]
    start: ClosedJaxpr
    update: ClosedJaxpr

    @classmethod
    def trace(
        cls,
        optimizer: Any,
        params: Tree,
        extra: Mapping[str, jax.ShapeDtypeStruct] | None = None,
        axes: Sequence[tuple[str, int]] = (),
    ) -> LayerwiseOptimizer:
        """Trace ``optimizer``: anything with ``init(params)`` and ``update(grads, state, params, **extra)``. ``axes``: names
        and sizes of mesh axes that it may name in collectives.

        Raises:
            ConfigError: it is no optimizer, fails on these trees, or mixes layers.
        """
        arguments = dict(extra or {})
        init, update = functions_of(optimizer, arguments)
        impls: list[Any] = []  # of the typed PRNG keys in the state, known once it is traced; None for other leaves

        def started(params: Any) -> Any:
            state = jax.tree.map(jnp.asarray, init(params))
            impls[:] = [jax.random.key_impl(a) if is_key_dtype(a.dtype) else None for a in jax.tree.leaves(state)]
            return _words(state)

        def updated(grads: Any, state: Any, params: Any, extra: Mapping[str, Any]) -> Any:
            updates, new = update(grads, _keys(state, impls), params, **extra)
            return updates, _words(jax.tree.map(jnp.asarray, new))

        start, first_state = _traced("init", started, axes, params)
        step, (updates, after) = _traced("update", updated, axes, params, first_state, params, arguments)
        _check_same("updates", params, updates, dtypes=False)
        _check_same("state", first_state, after, dtypes=True)
        leaves = _owned(params, len(jax.tree.leaves(arguments)), state_leaves(first_state, params), start, step)
        numbers = jax.tree.unflatten(jax.tree.structure(first_state), range(len(leaves)))
        return cls(params, arguments, numbers, leaves, start, step)

    def part(self, layers: Collection[str]) -> OptimizerPart:
        """What some layers need."""
        numbers = of_layers(self.numbers, layers, self.params, [leaf.layer for leaf in self.leaves])
        chosen = jax.tree.leaves(numbers)
        mine = [k for k, (layer, _) in enumerate(places_of(self.params)) if layer in layers]
        n, m = len(jax.tree.leaves(self.params)), len(self.leaves)
        grads_and_state = [*mine, *(n + k for k in chosen)]
        shared_inputs = [*(n + m + k for k in mine), *range(2 * n + m, len(self.update.in_avals))]
        start = _part(self.start, mine, chosen)
        update = _part(self.update, [*grads_and_state, *shared_inputs], grads_and_state)
        return OptimizerPart(jax.tree.structure(numbers), tuple(chosen), start, update)


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """The programs of some layers. ``structure``: the pytree of their state, as ``optimizer.init`` makes it of these alone;
    ``numbers``: of its leaves, among those of the whole state."""

    structure: Any
    numbers: tuple[int, ...]
    start_program: ClosedJaxpr
    update_program: ClosedJaxpr

    def init(self, params: Tree) -> Any:
        """The state of fresh parameters of these layers. No array of it is one of the parameters. Traceable."""
        leaves = eval_jaxpr(self.start_program.jaxpr, self.start_program.consts, *jax.tree.leaves(params))
        return jax.tree.unflatten(self.structure, [jnp.copy(a) for a in leaves])

    def update(self, grads: Tree, state: Any, params: Tree, extra: Mapping[str, Any]) -> tuple[Any, Any]:
        """Updates and new state. Traceable."""
        program, structure = self.update_program, jax.tree.structure(params)
        count = len(jax.tree.leaves(params))
        leaves = [leaf for tree in (grads, state, params) for leaf in jax.tree.leaves(tree)]
        extra_leaves = zip(jax.tree.leaves(dict(extra)), program.jaxpr.invars[len(leaves) :], strict=True)
        results = eval_jaxpr(
            program.jaxpr, program.consts, *leaves, *(jnp.asarray(a, dtype_of(v)) for a, v in extra_leaves)
        )
        return jax.tree.unflatten(structure, results[:count]), jax.tree.unflatten(self.structure, results[count:])


def _part(closed: ClosedJaxpr, inputs: Sequence[int], results: Sequence[int]) -> ClosedJaxpr:
    """What makes these results of these inputs, all that they depend on."""
    part, is_read = only_results(closed, results, inputs)
    assert [k for k, yes in enumerate(is_read) if yes] == inputs, "an input is read that is not given"
    return part


def _traced(
    what: str, function: Callable[..., Any], axes: Sequence[tuple[str, int]], *shapes: Any
) -> tuple[ClosedJaxpr, Any]:
    try:
        closed, results = jax.make_jaxpr(function, axis_env=axes, return_shape=True)(*shapes)
    except JaxpipeError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        short = reason if len(reason) <= 300 else f"{reason[:300]} …"
        advice = "; arguments that it needs go into Trainer(update_arguments=…)" if "argument" in reason else ""
        advice = _TREES if any(word in reason for word in ("tree", "structure", "Dict key")) else advice
        raise ConfigError(f"the optimizer's {what} fails: {type(error).__name__}: {short}{advice}") from error
    flat = flatten(closed.jaxpr, closed.consts, at_calls=True)
    for eqn in flat.eqns:
        if eqn.effects:
            raise ConfigError(
                f"the optimizer's {what} has a side effect ({eqn.primitive.name} at {source_line(eqn)}), which would happen on "
                "some devices and not on others; remove it"
            )
    return flat.close(), results


def _check_same(what: str, before: Any, after: Any, *, dtypes: bool) -> None:
    """Refuse updates that are not like the parameters, and state that an update changes in kind."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    if structures[0] != structures[1]:
        raise ConfigError(
            f"the optimizer's update returns {what} of another structure than it was given; return the same"
        )
    for (keys, a), b in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            raise ConfigError(
                f"the optimizer's update turns {what}{jax.tree_util.keystr(keys)} from {a.dtype}{list(a.shape)} into "
                f"{b.dtype}{list(b.shape)}; keep shape and dtype"
            )


def _words(state: Any) -> Any:
    """State with typed PRNG keys as their words, which can be stored."""
    return jax.tree.map(lambda a: jax.random.key_data(a) if is_key_dtype(a.dtype) else a, state)


def _keys(state: Any, impls: Sequence[Any]) -> Any:
    """The inverse of :func:`_words`."""
    leaves, structure = jax.tree.flatten(state)
    typed = [
        a if impl is None else jax.random.wrap_key_data(a, impl=impl) for a, impl in zip(leaves, impls, strict=True)
    ]
    return jax.tree.unflatten(structure, typed)


# -- which layer a value belongs to ------------------------------------------------------------------------------------------


def places_of(params: Tree) -> list[Place]:
    """The layer and the path there of each leaf, in order."""
    return [(names[0], names[1:]) for names, _ in named_leaves(params)]


def _owned(
    params: Tree, num_extra: int, leaves: Sequence[StateLeaf], start: ClosedJaxpr, update: ClosedJaxpr
) -> tuple[StateLeaf, ...]:
    """The leaves of the state with the layers that they belong to.

    Raises:
        ConfigError: layers are mixed.
    """
    names = list(params)
    bits = {name: Sources(1 << k) for k, name in enumerate(names)}
    mine = [layer for layer, _ in places_of(params)]
    layer_sources = [bits[name] for name in mine]
    start_sources = sources(start.jaxpr, layer_sources)
    while True:  # until no leaf is found to depend on a layer through another one
        held = [NOTHING if leaf.layer is None else bits[leaf.layer] for leaf in leaves]
        results = sources(update.jaxpr, [*layer_sources, *held, *layer_sources, *[NOTHING] * num_extra])
        updates, after = results[: len(layer_sources)], results[len(layer_sources) :]
        sources_of_leaf = [
            Sources(a.mask | b.mask, a.origin or b.origin) for a, b in zip(start_sources, after, strict=True)
        ]
        for name, update_sources in zip(mine, updates, strict=True):
            _check_apart(names, name, update_sources)
        for leaf, leaf_sources in zip(leaves, sources_of_leaf, strict=True):
            _check_apart(names, leaf.layer, leaf_sources)
        new = [
            replace(leaf, layer=names[f.mask.bit_length() - 1]) if leaf.layer is None and f.mask else leaf
            for leaf, f in zip(leaves, sources_of_leaf, strict=True)
        ]
        if new == list(leaves):
            return tuple(new)
        leaves = new


def _check_apart(names: Sequence[str], layer: str | None, leaf_sources: Sources) -> None:
    """Refuse what depends on several layers, or on another than its own."""
    mixed = [name for k, name in enumerate(names) if leaf_sources.mask >> k & 1]
    if layer is not None and layer not in mixed:
        mixed = [layer, *mixed] if mixed else []
    if len(mixed) <= 1:
        return
    rest = f" and {len(mixed) - 2} more" if len(mixed) > 2 else ""
    function, place = blamed(leaf_sources.origin)
    advice = _INSTEAD.get(function, "use one that treats each layer by itself")
    raise ConfigError(
        f"the optimizer mixes layers: {function}{place} makes one value of {mixed[0]} and {mixed[1]}{rest}, which may lie on "
        f"different devices; {advice}"
    )


def blamed(eqn: JaxprEqn | None) -> tuple[str, str]:
    """The function that made the transformation which an equation belongs to, and where it is."""
    if eqn is None:
        return "its state", ""
    frames = [
        (name.split(".<locals>.")[0], name, place.split("site-packages/")[-1]) for name, place in source_functions(eqn)
    ]
    for maker, _, _ in frames:
        if maker in _INSTEAD:
            return maker, ""
    for maker, name, place in frames:
        if maker != name:
            return maker, f" ({place})"
    return eqn.primitive.name, f" ({frames[0][2]})" if frames else ""
