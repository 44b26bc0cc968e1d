"""An nnx module taken apart: its structure in both modes, its parameters, constants and random streams by path.

``nnx.Param`` leaves (of any subclass) are parameters. Arrays and variables of other kinds are constants: computed once, so that
every stage has the same bits, and read but not changed by a call. Variables of kind ``nnx.Intermediate`` may be written: what
they hold is dropped. Random streams are refilled for each call.

A module that does not exist yet is built while JAX traces: parameters take no memory, and what does not depend on the random
key is computed once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe._jax_compat import eval_jaxpr, is_key_dtype, only_results
from jaxpipe.errors import StageError
from jaxpipe.stage.inline import flatten
from jaxpipe.stage.layer import Params
from jaxpipe.stage.loops import handed_on
from jaxpipe.stage.params import nested
from jaxpipe.stage.trace import array_leaves, fill

KeyPath = tuple[Any, ...]
"""Where a leaf lies in a module: attribute names, positions in lists, keys of dicts."""


@dataclass(frozen=True, slots=True)
class SplitModule:
    """``definitions``: the structure by whether it trains. ``leaves``: by path an empty variable (None: a bare array) of the
    parameters and constants; ``constants``: values of the latter. ``streams``: empty variables of the random streams.
    ``rewritten``: parameters that a call may assign to, as ``nnx.WeightNorm`` does with what it normalises: the result is the
    same whether or not it is kept, and it is not. ``mode``: keywords that tell the module whether it trains."""

    label: str
    definitions: Mapping[bool, Any]
    leaves: Mapping[KeyPath, Any]
    constants: Mapping[KeyPath, Any]
    streams: Mapping[KeyPath, Any]
    rewritten: frozenset[KeyPath]
    mode: Callable[[bool], dict[str, bool]]

    @property
    def params(self) -> tuple[KeyPath, ...]:
        return tuple(path for path in self.leaves if path not in self.constants)

    def nested(self, values: Mapping[KeyPath, Any]) -> Params:
        """A nested dict with string keys of leaves by path."""
        words = [tuple(map(str, path)) for path in values]
        if len(set(words)) < len(words):
            twice = next(path for path in words if words.count(path) > 1)
            raise StageError(f"{self.label} has two parameters that are both called {joined(twice)}; rename one")
        return nested(dict(zip(words, values.values(), strict=True)))

    def skeleton(self) -> nnx.Module:
        """The module, in training mode, with types of arrays in place of parameters and random streams."""
        leaves = {
            path: _filled(leaf, self.constants[path]) if path in self.constants else leaf
            for path, leaf in self.leaves.items()
        }
        return nnx.merge(self.definitions[True], nnx.from_flat_state({**leaves, **self.streams}))

    def call(
        self,
        params: Params,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: jax.Array | None,
        train: bool,
        prepare: Callable[[Any], None] = lambda module: None,
    ) -> Any:
        """What the module returns. ``params``: as :meth:`nested` makes them. ``prepare``: what is done to it before.

        Raises:
            StageError: a parameter is missing; the call changes a parameter or a constant.
        """
        given = {path: self._at(params, path) for path in self.params} | dict(self.constants)
        left: dict[KeyPath, Any] = {}

        def run(values: Mapping[KeyPath, Any], arguments: Any, key: jax.Array | None) -> Any:
            module = nnx.merge(self.definitions[train], nnx.from_flat_state(self._filled(values, key)))
            prepare(module)
            y = module(*arguments[0], **arguments[1])
            left.update((path, _value(leaf)) for path, leaf in nnx.to_flat_state(nnx.state(module)))
            return y

        y = run(given, (args, kwargs), key)
        moved = [path for path, value in given.items() if left[path] is not value]
        if not moved:
            return y

        def left_behind(values: list[Any], arrays: list[Any], key: jax.Array | None) -> list[Any]:
            run(dict(zip(given, values, strict=True)), fill((args, kwargs), arrays), key)
            return [left[path] for path in moved]

        # Or handed back as another tracer, by a transformation of nnx: the jaxpr tells.
        closed = jax.make_jaxpr(left_behind)(list(given.values()), array_leaves((args, kwargs)), key)
        flat = flatten(closed.jaxpr, closed.consts)
        entered = dict(zip(given, flat.invars, strict=False))
        for path, value in zip(moved, handed_on(flat.eqns, flat.outvars), strict=True):
            if value is not entered[path]:
                self._refuse_change(path)
        return y

    def _filled(self, values: Mapping[KeyPath, Any], key: jax.Array | None) -> dict[KeyPath, Any]:
        """The variables of a call by path."""
        base = jax.random.key(0) if key is None else key  # evaluation mode draws nothing
        streams = {
            path: _filled(stream, _stream_value(stream, jax.random.fold_in(base, index)))
            for index, (path, stream) in enumerate(self.streams.items())
        }
        return {**{path: _filled(self.leaves[path], value) for path, value in values.items()}, **streams}

    def _refuse_change(self, path: KeyPath) -> None:
        """Raise StageError unless a call may change what is at ``path``."""
        if path in self.rewritten or isinstance(self.leaves[path], nnx.Intermediate):
            return
        if path not in self.constants:
            raise StageError(f"{self.label} assigns to its parameter {joined(path)} in a call; only the optimizer may")
        kind = "array" if self.leaves[path] is None else type(self.leaves[path]).__name__
        raise StageError(
            f"{self.label} changes its state {joined(path)} ({kind}) in a call, which microbatches in flight would overwrite; "
            "use a layer without it (LayerNorm or RMSNorm in place of BatchNorm, no cache in training)"
        )

    def _at(self, params: Params, path: KeyPath) -> Any:
        node: Any = params
        for part in path:
            if not isinstance(node, Mapping) or str(part) not in node:
                raise StageError(f"{self.label} has no parameter {joined(path)} in what it was given")
            node = node[str(part)]
        return node


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A module, and the values of its parameters: ``draw(key, paths)`` gives those at ``paths``, and computes no others."""

    module: SplitModule
    draw: Callable[[jax.Array, Sequence[KeyPath]], dict[KeyPath, jax.Array]]


def blueprint(label: str, source: Any, **options: Any) -> Blueprint:
    """``source``: a module, whose parameters are those it has, whatever the key; or a function of ``nnx.Rngs`` (and
    ``options``) that builds one.

    Raises:
        StageError: it is neither, or returns something else; a constant is drawn at random.
    """
    if isinstance(source, nnx.Module):
        module, values = split_module(f"{label}: nnx module {type(source).__name__}", source)
        return Blueprint(module, lambda key, paths: {path: values[path] for path in paths})
    if not callable(source):
        raise StageError(
            f"{label}: {type(source).__name__} is no nnx module, nor a function of nnx.Rngs that builds one, such as "
            "lambda rngs: Block(64, rngs=rngs)"
        )
    made: list[tuple[SplitModule, tuple[KeyPath, ...]]] = []

    def build(key: jax.Array) -> list[Any]:
        built = source(nnx.Rngs(key), **options)
        if not isinstance(built, nnx.Module):
            raise StageError(f"{label}: its function returns {type(built).__name__}; want an nnx module")
        _declare_arrays(built)
        split, params = split_module(f"{label}: nnx module {type(built).__name__}", built)
        traced = {path: v for path, v in split.constants.items() if isinstance(v, jax.core.Tracer)}
        values = {**params, **traced}
        made.append((split, tuple(values)))
        return list(values.values())

    program = jax.make_jaxpr(build)(jax.eval_shape(lambda: jax.random.key(0)))
    module, paths = made[-1]

    def draw(key: jax.Array | None, chosen: Sequence[KeyPath]) -> dict[KeyPath, jax.Array]:
        part, (takes_key,) = only_results(program, [paths.index(path) for path in chosen])
        if takes_key and key is None:
            raise StageError(
                f"{module.label} draws its constant {joined(chosen[0])} at random, and would draw another in each layer; make "
                "it an nnx.Param, or give a module that is built already"
            )
        found = eval_jaxpr(part.jaxpr, part.consts, *([key] if takes_key else []))
        made = dict(zip(sorted(chosen, key=paths.index), found, strict=True))
        return {path: made[path] for path in chosen}

    traced = [path for path in paths if path in module.constants]
    constants = {**module.constants, **{path: draw(None, [path])[path] for path in traced}}
    return Blueprint(replace(module, constants=constants), draw)


def split_module(label: str, module: nnx.Module) -> tuple[SplitModule, dict[KeyPath, Any]]:
    """The structure of a module, which is not changed, and the values of its parameters by path."""
    leaves, values, streams, constants = {}, {}, {}, {}
    graph, state = nnx.split(module)
    for path, leaf in nnx.to_flat_state(state):
        if isinstance(leaf, nnx.RngState):
            streams[path] = _emptied(leaf)
            continue
        leaves[path] = _emptied(leaf)
        if isinstance(leaf, nnx.Param):
            values[path] = _value(leaf)
        else:
            constants[path] = _fixed(leaf)
    definitions = {}
    for train in (True, False):
        copy = nnx.merge(graph, state)
        copy.train() if train else copy.eval()
        definitions[train] = nnx.graphdef(copy)
    _refuse_traced(label, definitions[True])
    mode = mode_keyword(module.__call__)
    return SplitModule(label, definitions, leaves, constants, streams, _normalised(module), mode), values


def mode_keyword(call: Callable[..., Any]) -> Callable[[bool], dict[str, bool]]:
    """How to tell ``call`` whether it trains: a function from ``train`` to keyword arguments."""
    names = inspect.signature(call).parameters
    for name, sign in (("train", True), ("training", True), ("deterministic", False)):
        if name in names:
            return lambda train: {name: train is sign}
    return lambda train: {}


def typed_key(key: jax.Array) -> jax.Array:
    """``key`` as a typed PRNG key; raw ``uint32`` keys are wrapped."""
    return key if is_key_dtype(key.dtype) else jax.random.wrap_key_data(key)


def joined(path: KeyPath) -> str:
    """A path in words."""
    return "/".join(map(str, path))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _fixed(leaf: Any) -> Any:
    """The value of a constant, such that nobody can change it in place."""
    value = _value(leaf)
    if not isinstance(value, np.ndarray):
        return value
    if isinstance(leaf, nnx.Variable):
        return jnp.asarray(value)
    value = value.copy()
    value.flags.writeable = False
    return value


def _emptied(leaf: Any) -> Any:
    """A variable that holds the shape and dtype of its value, None for a bare array."""
    if not isinstance(leaf, nnx.Variable):
        return None
    value = leaf.get_value()
    return leaf.replace(jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "dtype") else None)


def _filled(empty: Any, value: Any) -> Any:
    return value if empty is None else empty.replace(value)


def _stream_value(stream: Any, key: jax.Array) -> jax.Array:
    """The key of a stream (or of each of its parts, where modules are stacked), or its counters at zero."""
    aval = stream.get_value()
    if not is_key_dtype(aval.dtype):
        return jnp.zeros(aval.shape, aval.dtype)
    return jax.random.split(key, aval.shape) if aval.shape else key


def _declare_arrays(module: nnx.Module) -> None:
    """Make nnx treat arrays among the attributes as data while JAX traces, as it does when it does not."""
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.core.Tracer):
                    setattr(node, name, nnx.data(value))


def _refuse_traced(label: str, definition: Any) -> None:
    for name, attribute in definition.attributes:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(getattr(attribute, "value", None))):
            raise StageError(f"{label} keeps arrays in its attribute {name!r} unseen by nnx; wrap it in nnx.data(…)")


def _normalised(module: nnx.Module) -> frozenset[KeyPath]:
    """Parameters of what ``nnx.WeightNorm`` normalises."""
    wrapped = {path for path, node in nnx.iter_graph(module) if isinstance(node, nnx.WeightNorm)}
    params = (path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param)))
    return frozenset(path for path in params if any(path[: len(w)] == w for w in wrapped))
