"""An nnx module taken apart: its structure in both modes, its parameters, constants and random streams by path.

``nnx.Param`` leaves (of any subclass) are parameters. Arrays and variables of other kinds are constants: computed once, so that
every stage has the same bits, and read but not changed by a call. Nor are Python attributes; of an object whose class is not
Python's own it is only told whether it is the same. Each call starts from a fresh module. Variables of kind
``nnx.Intermediate`` may be written: what they hold is dropped. Random streams are refilled for each call.

A module that does not exist yet is built while JAX traces: parameters take no memory, and what does not depend on the random
key is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxpipe._jax_compat import ClosedJaxpr, eval_jaxpr, is_key_dtype, only_results
from jaxpipe.errors import StageError
from jaxpipe.stage.identity import value_key
from jaxpipe.stage.inline import flatten
from jaxpipe.stage.leaves import array_leaves, fill
from jaxpipe.stage.model.layer import Params, key_aval, mode_keyword
from jaxpipe.stage.model.params import nested, required_leaf
from jaxpipe.stage.split.loops import handed_on

KeyPath = tuple[Any, ...]
"""Where a leaf lies in a module: attribute names, positions in lists, keys of dicts."""

_STATE = (nnx.Variable, nnx.Pytree, jax.Array, np.ndarray)
"""What a module's state tells of, and its attributes therefore not."""


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
        constants = {path: _filled(self.leaves[path], value) for path, value in self.constants.items()}
        return nnx.merge(self.definitions[True], nnx.from_flat_state({**self.leaves, **constants, **self.streams}))

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
            StageError: a parameter is missing; the call changes a parameter, a constant or an attribute.
        """
        param_leaves = {path: required_leaf(params, tuple(map(str, path)), self.label) for path in self.params}
        leaves = {path: jnp.asarray(leaf) for path, leaf in param_leaves.items()} | dict(self.constants)

        def run(values: Mapping[KeyPath, Any], arguments: Any, key: jax.Array | None) -> tuple[Any, dict[KeyPath, Any]]:
            module = nnx.merge(self.definitions[train], nnx.from_flat_state(self._filled(values, key)))
            _unshare(module)
            prepare(module)
            before = _attributes(module)
            y = module(*arguments[0], **arguments[1])
            _declare_arrays(module)
            left = dict(nnx.to_flat_state(nnx.state(module)))
            self._refuse_changed_attributes(before, _attributes(module), left)
            return y, {path: _value(leaf) for path, leaf in left.items()}

        # Arrays of NumPy, lists and dicts could be changed in place: a call gets its own.
        y, left = run({path: _unshared(value) for path, value in leaves.items()}, (args, kwargs), key)
        traced: dict[KeyPath, Any] = {}
        for path, value in leaves.items():
            if left[path] is value:
                continue
            if _may_be_traced(value, left[path]):
                traced[path] = value
            elif value_key(left[path]) != value_key(value):
                self._refuse_change(path)
        if not traced:
            return y

        def left_behind(values: list[Any], arrays: list[Any], key: jax.Array | None) -> list[Any]:
            values_by_path = {path: _unshared(value) for path, value in leaves.items() if path not in traced}
            _, left = run(
                {**values_by_path, **dict(zip(traced, values, strict=True))}, fill((args, kwargs), arrays), key
            )
            return [left[path] for path in traced]

        # Or handed back as another tracer, by a transformation of nnx: the jaxpr tells.
        closed = jax.make_jaxpr(left_behind)(list(traced.values()), array_leaves((args, kwargs)), key)
        flat = flatten(closed.jaxpr, closed.consts)
        paths = [path for path, value in traced.items() for _ in jax.tree.leaves(value)]
        for path, entered, result in zip(paths, flat.invars, handed_on(flat.eqns, flat.outvars), strict=False):
            if result is not entered:
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

    def _refuse_changed_attributes(
        self, before: Mapping[KeyPath, Any], after: Mapping[KeyPath, Any], left: Mapping[KeyPath, Any]
    ) -> None:
        """Raise StageError if a call has changed, made or removed an attribute; ``left``: variables and arrays after it."""
        variables = {**self.leaves, **self.streams}
        changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
        changed += [p for p, leaf in left.items() if p not in variables and not isinstance(leaf, nnx.Intermediate)]
        changed += [path for path in self.leaves if path not in left]
        if changed:
            raise StageError(
                f"{self.label} changes its attribute {joined(changed[0])} in a call, and a compiled stage does not run Python "
                "again; set it where the module is built, keep what is computed in local variables, or sow it"
            )

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
    if isinstance(source, linen.Module):
        raise StageError(
            f"{label}: {type(source).__name__} is a linen module, not an nnx module; use from_linen or layers_from_linen"
        )
    if not callable(source):
        raise StageError(
            f"{label}: {type(source).__name__} is no nnx module, nor a function of nnx.Rngs that builds one, such as "
            "lambda rngs: Block(64, rngs=rngs)"
        )
    builds: list[tuple[SplitModule, tuple[KeyPath, ...]]] = []

    def build(key: jax.Array) -> list[Any]:
        built = source(nnx.Rngs(key), **options)
        if not isinstance(built, nnx.Module):
            raise StageError(f"{label}: its function returns {type(built).__name__}; want an nnx module")
        _declare_arrays(built)
        split, params = split_module(f"{label}: nnx module {type(built).__name__}", built)
        traced = {path: v for path, v in split.constants.items() if isinstance(v, jax.core.Tracer)}
        values = {**params, **traced}
        builds.append((split, tuple(values)))
        return list(values.values())

    program = jax.make_jaxpr(build)(key_aval())
    module, paths = builds[-1]

    def draw(key: jax.Array | None, chosen: Sequence[KeyPath]) -> dict[KeyPath, jax.Array]:
        values_by_path = drawn(program, paths, chosen, key)
        if values_by_path is None:
            raise StageError(
                f"{module.label} draws its constant {joined(chosen[0])} at random, and would draw another in each layer; make "
                "it an nnx.Param, or give a module that is built already"
            )
        return values_by_path

    traced = [path for path in paths if path in module.constants]
    constants = {**module.constants, **{path: draw(None, [path])[path] for path in traced}}
    return Blueprint(replace(module, constants=constants), draw)


def drawn(
    program: ClosedJaxpr, paths: Sequence[KeyPath], chosen: Sequence[KeyPath], key: jax.Array | None
) -> dict[KeyPath, jax.Array] | None:
    """The values at ``chosen``, of those at ``paths`` that ``program`` makes of a key, and no others; None where they depend on
    the key and there is none."""
    part, (takes_key,) = only_results(program, map(paths.index, chosen))
    if takes_key and key is None:
        return None
    results = eval_jaxpr(part.jaxpr, part.consts, *([key] if takes_key else []))
    arrays = map(jnp.asarray, results)  # scalars that are written in the jaxpr come as arrays of NumPy
    return dict(zip(sorted(chosen, key=paths.index), arrays, strict=True))


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


def joined(path: KeyPath) -> str:
    """A path in words."""
    return "/".join(map(str, path))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _fixed(leaf: Any) -> Any:
    """The value of a constant, which nobody else can change in place."""
    value = _value(leaf)
    if isinstance(value, np.ndarray):
        return jnp.array(value) if isinstance(leaf, nnx.Variable) else value.copy()
    return value


def _may_be_traced(value: Any, left: Any) -> bool:
    """Whether ``left``, of arrays, may be what a transformation of nnx made of ``value``, numbers or arrays alike."""
    numbers = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    alike: bool = jax.tree.structure(left) == jax.tree.structure(value)  # type: ignore[operator]
    return (
        alike
        and all(isinstance(leaf, numbers) for leaf in jax.tree.leaves(value))
        and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(left))
    )


def _unshared(value: Any) -> Any:
    """A copy of what could be changed in place; other values as they are."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple, set):
        return type(value)(map(_unshared, value))
    if type(value) is dict:
        return {name: _unshared(v) for name, v in value.items()}
    return value


def _unshare(module: nnx.Module) -> None:
    """Give a module lists, dicts and sets of its own; merged, it has those of its definition."""
    for _, node, name, value in list(_own(module)):
        if type(value) in (list, tuple, set, dict):
            object.__setattr__(node, name, _unshared(value))


def _own(module: nnx.Module) -> Iterator[tuple[KeyPath, Any, str, Any]]:
    """The attributes of a module and of those in it: the path of the one that has it, this, name and value."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            yield from ((path, node, name, value) for name, value in vars(node).items())


def _attributes(module: nnx.Module) -> dict[KeyPath, Hashable]:
    """A key of each Python value among the attributes of a module and of those in it, by path."""
    return {
        (*path, name): _python_key(value)
        for path, _, name, value in _own(module)
        if not name.startswith("_pytree__") and not isinstance(value, _STATE)
    }


def _python_key(value: Any) -> Hashable:
    """A key of a value without the arrays, variables and modules in it."""
    if isinstance(value, _STATE):
        return None
    if isinstance(value, Mapping):
        return tuple((value_key(k), _python_key(v)) for k, v in value.items())
    if jax.tree_util.all_leaves([value]):
        return value_key(value)
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda v: v is not value)
    return structure, tuple(map(_python_key, leaves))


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
    for _, node, name, value in list(_own(module)):
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
