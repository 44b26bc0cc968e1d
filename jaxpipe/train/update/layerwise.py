"""An optax transformation of a whole model, taken apart by layer, and its state by layer.

A rank holds the parameters of a few layers, and its update must be what one device with all of them would compute. So the
transformation is traced once on the tree ``{layer: leaves}`` of the whole model (shapes only), and a stage runs those equations
of the trace that its own layers' updates and states depend on. Masks and labels by layer name, fixed trees of them, noise
that is drawn per leaf: all come out as on one device, because it is one device's program.

What can't be taken apart is refused: where a layer's update depends on another layer's gradients, parameters or state (a norm
of everything, a test whether all is finite), or where state that belongs to no layer depends on any. Dataflow looks into
branches and scans: a result of ``cond`` or ``scan`` depends on what its own values come from, not on all that the others read.
JAX can take these apart, and no ``while``: each of its results depends on everything that it reads.

State is stored by layer. A node of it is *like the parameters* if it is a dict with a key for each layer; what is under a
layer's key belongs to that layer, as does what depends on it. Leaves that belong to no layer (counts, rates) each layer has,
and all compute alike. The state of some layers has their keys only, as if the transformation had been given no others.

With ``tp`` above 1 or ZeRO-1 a device holds a piece of a parameter, and the transformation sees only that
(:func:`check_pieces`). Both programs, of whole leaves and of pieces, are traced and walked side by side. Every value is the
*same* in both (counts, rates, parameters that are not divided), *uniform* (one number in each element) or a *piece*; equations
on pieces must be the same in both and treat each element by itself, on operands that are divided alike. Anything else is
refused: Adafactor's factors where it makes any (from 128 rows on), norms, noise, sorting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    dtype_of,
    eval_jaxpr,
    is_key_dtype,
    only_results,
    scan_parts,
    shape_of,
    source_functions,
    source_line,
)
from jaxpipe.errors import CheckpointError, ConfigError, JaxpipeError
from jaxpipe.stage.identity import array_key, value_key
from jaxpipe.stage.jaxprs import EqnKind, flatten, row
from jaxpipe.stage.model.layer import Path
from jaxpipe.stage.model.params import Place, key_name, named_leaves
from jaxpipe.train.update.optimizer import functions_of


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources that a value depends on: ``mask``, a bit for each kind; ``origin``, where several came together first."""

    mask: int = 0
    origin: JaxprEqn | None = None


NOTHING = Sources()


def sources(jaxpr: Jaxpr, input_sources: Sequence[Sources]) -> list[Sources]:
    """Return the sources of each result, from those of the inputs (constants have none)."""
    sources_of: dict[Var, Sources] = dict(zip(jaxpr.invars, input_sources, strict=True))

    def read(atom: Atom) -> Sources:
        return NOTHING if isinstance(atom, Literal) else sources_of.get(atom, NOTHING)

    for eqn in jaxpr.eqns:
        sources_of.update(zip(eqn.outvars, _through(eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _through(eqn: JaxprEqn, operand_sources: Sequence[Sources]) -> list[Sources]:
    if eqn.primitive.name == "cond":
        predicate, *operands = operand_sources
        branches = [sources(b.jaxpr, operands) for b in eqn.params["branches"]]
        return [_joined(eqn, [predicate, *results]) for results in zip(*branches, strict=True)]
    scan = scan_parts(eqn)
    if scan is None:
        return [_joined(eqn, operand_sources)] * len(eqn.outvars)
    consts, carry = (
        operand_sources[: scan.num_consts],
        list(operand_sources[scan.num_consts : scan.num_consts + scan.num_carry]),
    )
    # What one iteration mixes into the carry, the next one reads: to the fixed point. Masks only grow, so it is
    # reached.
    while True:
        results = sources(scan.body, [*consts, *carry, *operand_sources[scan.num_consts + scan.num_carry :]])
        again = [_joined(eqn, pair) for pair in zip(carry, results[: scan.num_carry], strict=True)]
        if [c.mask for c in again] == [c.mask for c in carry]:
            return [*carry, *results[scan.num_carry :]]
        carry = again


def _joined(eqn: JaxprEqn, sources_to_join: Iterable[Sources]) -> Sources:
    mask, origin = 0, None
    for source in sources_to_join:
        mask |= source.mask
        origin = origin or source.origin
    return Sources(mask, origin or (eqn if mask & (mask - 1) else None))


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """An array of the state. ``names``: its path. ``layer``: the one that it belongs to; None: each layer has it. ``param``: in
    the layer, the path of the parameter in whose place it stands, if it does."""

    names: Path
    layer: str | None
    param: Path | None
    aval: jax.ShapeDtypeStruct

    def __str__(self) -> str:
        return "/".join(self.names)


def state_leaves(state: Any, params: Mapping[str, Any]) -> list[StateLeaf]:
    """Yield the leaves of a state (shapes), in order. ``params``: what it is the state of."""
    paths = {name: {names for names, _ in named_leaves(tree)} for name, tree in params.items()}

    def walk(node: Any, names: Path, layer: str | None, inside: Path) -> Iterator[StateLeaf]:
        if isinstance(node, jax.ShapeDtypeStruct):
            starts = (inside[:n] for n in range(len(inside), -1, -1))
            param = next((p for p in starts if p in paths[layer]), None) if layer is not None else None
            yield StateLeaf(names, layer, param, node)
            return
        by_layer = layer is None and _is_like(node, params)
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
        for name, child in ((key_name(keys[0]), child) for keys, child in children):
            within = inside if layer is None else (*inside, name)
            yield from walk(child, (*names, name), name if by_layer else layer, () if by_layer else within)

    return list(walk(state, (), None, ()))


def of_layers(state: Any, layers: Collection[str], all_layers: Collection[str], owners: Sequence[str | None]) -> Any:
    """Return the part of a state, whose leaves are numbers, that belongs to ``layers``. ``all_layers``: of the model;
    ``owners``: by number, the layer that the leaf belongs to."""

    def stays(number: int) -> bool:
        return owners[number] is None or owners[number] in layers

    def walk(node: Any) -> Any:
        if isinstance(node, int):
            return node if stays(node) else None
        if _is_like(node, all_layers):
            return {
                k: walk(child) for k, child in node.items() if k in layers or any(map(stays, jax.tree.leaves(child)))
            }
        children, structure = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
        return jax.tree.unflatten(structure, map(walk, children))

    return walk(state)


def fitted(leaves: Sequence[StateLeaf], layers: Sequence[str], states: Mapping[str, Any]) -> list[Any]:
    """Return the values of the state's leaves of ``layers``, out of ``states`` by layer (also plain dicts and lists).

    States that jaxpipe 0.1.0 stored had no layer's name in their paths; they fit as well.

    Raises:
        CheckpointError: they are of another optimizer or model.
    """
    if missing := [layer for layer in layers if layer not in states]:
        raise CheckpointError(f"no optimizer state for layer {min(missing)}; there is one for {', '.join(states)}")
    leaves_by_layer = {layer: dict(named_leaves(states[layer])) for layer in layers}
    values = []
    for leaf in leaves:
        candidates = [
            _value_of(layer, leaves_by_layer[layer], leaf)
            for layer in ([leaf.layer] if leaf.layer is not None else layers)
        ]
        if not all(
            np.allclose(np.asarray(candidates[0]), np.asarray(a), rtol=1e-5, equal_nan=True) for a in candidates[1:]
        ):
            raise _misfit(layers[0], f"has another {leaf} than other layers")
        values.append(candidates[0])
    for layer, rest in leaves_by_layer.items():
        if rest:
            raise _misfit(layer, f"has {'/'.join(min(rest))}, which the optimizer does not")
    return values


def _value_of(layer: str, leaves: dict[Path, Any], leaf: StateLeaf) -> Any:
    """Return the value of a leaf, taken out of what a layer has."""
    names, aval = leaf.names, leaf.aval
    unnamed = (names[:k] + names[k + 1 :] for k, name in enumerate(names) if name == layer)
    matching_path = next((path for path in (names, *unnamed) if path in leaves), None)
    if matching_path is None:
        raise _misfit(layer, f"has no {leaf}")
    value = leaves.pop(matching_path)
    value = value if hasattr(value, "dtype") else np.asarray(value, aval.dtype)
    if tuple(value.shape) != tuple(aval.shape) or value.dtype != aval.dtype:
        wants = f"{value.dtype}{list(value.shape)}, the optimizer wants {aval.dtype}{list(aval.shape)}"
        raise _misfit(layer, f"has {leaf} as {wants}")
    return value


def _misfit(layer: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer state of layer {layer} {what}; go on with the optimizer that it was made by, or start with a fresh one"
    )


def _is_like(node: Any, layers: Collection[str]) -> bool:
    return isinstance(node, dict) and len(node) == len(layers) and all(name in node for name in layers)


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
        # Typed PRNG keys have no place in checkpoints: the traced program takes and gives their words. Which leaves
        # were keys is known once ``init`` is traced, so ``started`` fills this list, None for other leaves, before
        # ``updated`` reads it.
        impls: list[Any] = []

        def started(params: Any) -> Any:
            state = jax.tree.map(jnp.asarray, init(params))
            impls[:] = [jax.random.key_impl(a) if is_key_dtype(a.dtype) else None for a in jax.tree.leaves(state)]
            return _words(state)

        def updated(grads: Any, state: Any, params: Any, extra: Mapping[str, Any]) -> Any:
            updates, new = update(grads, _keys(state, impls), params, **extra)
            return updates, _words(jax.tree.map(jnp.asarray, new))

        # Grads have the avals of params; state and params enter the update in this order, which ``part`` counts on.
        start, first_state = _traced("init", started, axes, params)
        step, (updates, after) = _traced("update", updated, axes, params, first_state, params, arguments)
        _check_same("updates", params, updates, dtypes=False)
        _check_same("state", first_state, after, dtypes=True)
        leaves = _owned(params, len(jax.tree.leaves(arguments)), state_leaves(first_state, params), start, step)
        numbers = jax.tree.unflatten(jax.tree.structure(first_state), range(len(leaves)))
        return cls(params, arguments, numbers, leaves, start, step)

    def part(self, layers: Collection[str]) -> OptimizerPart:
        """Return what some layers need."""
        numbers = of_layers(self.numbers, layers, self.params, [leaf.layer for leaf in self.leaves])
        chosen = jax.tree.leaves(numbers)
        mine = [k for k, (layer, _) in enumerate(places_of(self.params)) if layer in layers]
        # The update's inputs lie flat as n gradients, m leaves of state, n parameters, then the extra arguments; its
        # results as n updates and m leaves of state. So gradients and state have the same numbers among inputs as
        # updates and state among results.
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
        """Return the state of fresh parameters of these layers. No array of it is one of the parameters. Traceable."""
        # Copied: an optimizer that keeps the parameters themselves (averages) would otherwise share a buffer that the
        # next step donates.
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
    """Return what makes these results of these inputs, all that they depend on."""
    # ``inputs`` stay in the signature though no equation reads them; any other input that is read would be another
    # layer's, which `_owned` has refused before.
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
    # Calls (jit, custom rules) are inlined: a call as one equation would tie all its results to all its operands, and
    # so mix layers that it keeps apart.
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
    """Return the inverse of :func:`_words`."""
    leaves, structure = jax.tree.flatten(state)
    typed = [
        a if impl is None else jax.random.wrap_key_data(a, impl=impl) for a, impl in zip(leaves, impls, strict=True)
    ]
    return jax.tree.unflatten(structure, typed)


# -- which layer a value belongs to ------------------------------------------------------------------------------------------


def places_of(params: Tree) -> list[Place]:
    """Return the layer and the path there of each leaf, in order."""
    return [(names[0], names[1:]) for names, _ in named_leaves(params)]


def _owned(
    params: Tree, num_extra: int, leaves: Sequence[StateLeaf], start: ClosedJaxpr, update: ClosedJaxpr
) -> tuple[StateLeaf, ...]:
    """Return the leaves of the state with the layers that they belong to.

    Raises:
        ConfigError: layers are mixed.
    """
    names = list(params)
    bits = {name: Sources(1 << k) for k, name in enumerate(names)}
    mine = [layer for layer, _ in places_of(params)]
    layer_sources = [bits[name] for name in mine]
    # One bit a layer; a value that belongs to none has no bit and may be read by all. A leaf of state found to depend
    # on a layer gets that layer's bit, which may reach further leaves at the next update: hence the loop. It ends, as
    # each round but the last gives a layer to one leaf at least and none ever loses it.
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
    """Return the function that made the transformation which an equation belongs to, and where it is."""
    if eqn is None:
        return "its state", ""
    # Innermost frame first. optax's transformations are closures: the part of a qualified name before ``.<locals>.`` is
    # the public function that a user has written down, the rest a helper that nobody knows.
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


Division = Mapping[Place, Hashable]
"""A value for each parameter that is divided: equal for those of one shape that are divided alike."""

_SAME, _UNIFORM, _DIFFERENT = "same", "uniform", "different"
_ELEMENTWISE = frozenset({EqnKind.ELEMENTWISE, EqnKind.CAST, EqnKind.SAME})


def check_pieces(undivided: LayerwiseOptimizer, local: LayerwiseOptimizer, division: Division) -> None:
    """Refuse a transformation of which devices that hold pieces would compute something else.

    Args:
        undivided: traced on whole parameters.
        local: traced on what a device holds of each.
        division: the parameters that are divided.

    Raises:
        ConfigError: names the operation.
    """
    params = [division.get(at, _SAME) for at in places_of(undivided.params)]
    state = [_SAME if at is None else division[at] for at in divided_like(undivided, local, division)]
    extra = [_SAME] * len(jax.tree.leaves(undivided.extra))
    _check(undivided.start, local.start, params, state)
    _check(undivided.update, local.update, [*params, *state, *params, *extra], [*params, *state])


def divided_like(
    undivided: LayerwiseOptimizer, local: LayerwiseOptimizer, division: Division
) -> tuple[Place | None, ...]:
    """Return for each leaf of the state the parameter that it is divided like, or None; arguments as of
    :func:`check_pieces`."""
    leaves = zip(jax.tree.leaves(undivided.params), jax.tree.leaves(local.params), strict=True)
    shapes = {at: (a.shape, b.shape) for at, (a, b) in zip(places_of(undivided.params), leaves, strict=True)}

    def like(leaf: StateLeaf, piece: StateLeaf) -> Place | None:
        at = (leaf.layer or "", leaf.param or ())
        return at if at in division and (leaf.aval.shape, piece.aval.shape) == shapes[at] else None

    return tuple(like(a, b) for a, b in zip(undivided.leaves, local.leaves, strict=True))


def _check(
    undivided: ClosedJaxpr, local: ClosedJaxpr, input_kinds: Sequence[Hashable], result_kinds: Sequence[Hashable]
) -> None:
    """Compare two programs whose inputs are of ``input_kinds``, and whose results must be of ``result_kinds``."""
    undivided, local = (only_results(x, range(len(x.out_avals)), range(len(x.in_avals)))[0] for x in (undivided, local))
    pair = _ProgramPair(undivided, local, input_kinds)
    for a, b, kind, result_kind in zip(
        undivided.jaxpr.outvars, local.jaxpr.outvars, pair.results(), result_kinds, strict=True
    ):
        number = kind == _UNIFORM or (kind == _SAME and not shape_of(a))
        if kind != result_kind and not (number and (result_kind != _SAME or shape_of(a) == shape_of(b))):
            _refuse(pair.maker.get(a) if isinstance(a, Var) else None)


class _ProgramPair:
    """A jaxpr of whole values and the same of pieces. ``kinds``: of the first one's variables; ``twin``: what stands for them
    in the second. A number that is only spread over a shape counts as the number."""

    def __init__(self, undivided: ClosedJaxpr, local: ClosedJaxpr, input_kinds: Sequence[Hashable]) -> None:
        self.undivided, self.local = undivided, local
        self.kinds: dict[Var, Hashable] = dict(zip(undivided.jaxpr.invars, input_kinds, strict=True))
        self.twin: dict[Var, Atom] = dict(zip(undivided.jaxpr.invars, local.jaxpr.invars, strict=True))
        self.maker = {v: eqn for eqn in undivided.jaxpr.eqns for v in eqn.outvars}
        self._spread: dict[Var, Atom] = {}
        for (v, c), (w, d) in zip(_consts(undivided), _consts(local), strict=False):
            if array_key(c) == array_key(d):
                self.kinds[v], self.twin[v] = _SAME, w

    def results(self) -> list[Hashable]:
        """Return the kinds of the results, which must be those of the second program."""
        eqns = [self._without_spreading(p.jaxpr.eqns) for p in (self.undivided, self.local)]
        for a, b in zip(*eqns, strict=False):
            alike = a.primitive is b.primitive and len(a.invars) == len(b.invars)
            if not alike or not all(map(self._stands_for, a.invars, b.invars)):
                _refuse(a)
            self.kinds.update(zip(a.outvars, self._through(a, b), strict=True))
            self.twin.update(zip(a.outvars, b.outvars, strict=True))
        if len(eqns[0]) != len(eqns[1]):
            _refuse(max(eqns, key=len)[min(map(len, eqns))])
        outvars = zip(self.undivided.jaxpr.outvars, self.local.jaxpr.outvars, strict=True)
        return [self._kind(a) if self._stands_for(a, b) else _DIFFERENT for a, b in outvars]

    def _without_spreading(self, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        remaining = []
        for eqn in eqns:
            if eqn.primitive.name == "broadcast_in_dim" and not shape_of(eqn.invars[0]):
                self._spread[eqn.outvars[0]] = self._number(eqn.invars[0])
            else:
                remaining.append(eqn)
        return remaining

    def _number(self, atom: Atom) -> Atom:
        return self._spread.get(atom, atom) if isinstance(atom, Var) else atom

    def _kind(self, atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return _UNIFORM
        return _UNIFORM if atom in self._spread else self.kinds.get(atom, _DIFFERENT)

    def _stands_for(self, undivided: Atom, local: Atom) -> bool:
        a, b = self._number(undivided), self._number(local)
        if isinstance(a, Literal) or isinstance(b, Literal):
            return isinstance(a, Literal) and isinstance(b, Literal) and value_key(a.val) == value_key(b.val)
        return self.twin.get(a) is b

    def _through(self, a: JaxprEqn, b: JaxprEqn) -> list[Hashable]:
        """Return the kinds of an equation's results."""
        kinds = [self._kind(atom) for atom in a.invars]
        pieces = set(kinds) - {_SAME, _UNIFORM}
        if a.primitive.name == "cond" and kinds[0] in (_SAME, _UNIFORM):
            pairs = zip(a.params["branches"], b.params["branches"], strict=True)
            branches = [_ProgramPair(*pair, kinds[1:]).results() for pair in pairs]
            return [_either(a, each) for each in zip(*branches, strict=True)]
        if value_key(a.params) != value_key(b.params):
            _refuse(a)
        if not pieces and _shapes(a) == _shapes(b):
            return [_SAME] * len(a.outvars)
        all_divided = all(kind != _SAME or not shape_of(atom) for kind, atom in zip(kinds, a.invars, strict=True))
        if row(a).kind not in _ELEMENTWISE or not all_divided or len(pieces) > 1:
            _refuse(a)
        return [pieces.pop() if pieces else _UNIFORM]


def _consts(closed: ClosedJaxpr) -> list[tuple[Var, Any]]:
    return list(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def _shapes(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    return [shape_of(a) for a in (*eqn.invars, *eqn.outvars)]


def _either(eqn: JaxprEqn, kinds: Sequence[Hashable]) -> Hashable:
    """Return the kind of a branch's result."""
    several = set(kinds)
    if len(several) > 1:
        several.discard(_UNIFORM)
    if len(several) > 1 or _DIFFERENT in several:
        _refuse(eqn)
    return several.pop()


def _refuse(eqn: JaxprEqn | None) -> NoReturn:
    function, place = blamed(eqn)
    what = "makes its state" if eqn is None else f"uses {eqn.primitive.name}"
    raise ConfigError(
        f"the optimizer's {function}{place} {what} across a parameter's elements, and with zero1 or tp above 1 a device sees "
        "only a piece of each: use one that treats elements alone (AdamW, SGD, Lion), or zero1=false and tp=1"
    )
