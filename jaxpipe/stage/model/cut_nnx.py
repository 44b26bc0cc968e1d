"""Takes nnx modules apart (:func:`split_module`) and cuts them into layers (:func:`layers_from_nnx`); their weights in and out.

A module is split into its structure in both modes, its parameters, constants and random streams by path. ``nnx.Param`` leaves
(of any subclass) are parameters. Arrays and variables of other kinds are constants: computed once, so that every stage has the
same bits, and read but not changed by a call. Nor are Python attributes; an object whose class is not Python's own is only
checked to be the same. Each call starts from a fresh module. Variables of kind ``nnx.Intermediate`` may be written: what they
hold is dropped. Random streams are refilled for each call. A module that does not exist yet is built while JAX traces:
parameters take no memory, and what does not depend on the random key is computed once.

While a module's call is outlined, the blocks of a copy of it have a subclass of their class whose ``__call__`` is a stub: so
attributes, ``isinstance`` and nnx's transformations see what they expect.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxpipe._jax_compat import is_key_dtype
from jaxpipe.errors import StageError
from jaxpipe.stage.identity import ById, value_key
from jaxpipe.stage.jaxprs import array_leaves, fill, flatten
from jaxpipe.stage.model.cut_module import CutModel, batch_types, check_leaves, cut_module
from jaxpipe.stage.model.layer import Params, Path, key_aval, mode_keyword, typed_key
from jaxpipe.stage.model.outline import Home, Stubs, initial_values
from jaxpipe.stage.model.params import by_path, nested, required_leaf
from jaxpipe.stage.split.loops import handed_on

KeyPath = tuple[Any, ...]
"""The place of a leaf in a module: attribute names, positions in lists, keys of dicts."""

_STATE = (nnx.Variable, nnx.Pytree, jax.Array, np.ndarray)
"""Types of attributes that belong to a module's state, and are left out where its Python attributes are compared."""


@dataclass(frozen=True, slots=True)
class SplitModule:
    """A module taken apart.

    Attributes:
        definitions: the structure by whether it trains.
        leaves: by path an empty variable (None: a bare array) of the parameters and constants.
        constants: values of the latter.
        streams: empty variables of the random streams.
        rewritten: parameters that a call may assign to, as ``nnx.WeightNorm`` does with what it normalises: the result is the
            same whether or not it is kept, and it is not.
        mode: keywords that tell the module whether it trains.
    """

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
        """Make a nested dict with string keys of leaves by path."""
        words = [tuple(map(str, path)) for path in values]
        if len(set(words)) < len(words):
            twice = next(path for path in words if words.count(path) > 1)
            raise StageError(f"{self.label} has two parameters that are both called {joined(twice)}; rename one")
        return nested(dict(zip(words, values.values(), strict=True)))

    def skeleton(self) -> nnx.Module:
        """Build the module, in training mode, with types of arrays in place of parameters and random streams."""
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
        """Call the module and return its result. ``params``: as :meth:`nested` makes them. ``prepare``: called with the module
        before.

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

        # A transformation of nnx hands an unchanged value back as another tracer, so identity does not tell; the jaxpr does.
        closed = jax.make_jaxpr(left_behind)(list(traced.values()), array_leaves((args, kwargs)), key)
        flat = flatten(closed.jaxpr, closed.consts)
        paths = [path for path, value in traced.items() for _ in jax.tree.leaves(value)]
        for path, entered, result in zip(paths, flat.invars, handed_on(flat.eqns, flat.outvars), strict=False):
            if result is not entered:
                self._refuse_change(path)
        return y

    def _filled(self, values: Mapping[KeyPath, Any], key: jax.Array | None) -> dict[KeyPath, Any]:
        """Fill the variables of a call, by path."""
        # Streams need some key; evaluation mode draws nothing from it.
        base = jax.random.key(0) if key is None else key
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
    """Take ``source`` apart: a module, whose parameters are those it has, whatever the key; or a function of ``nnx.Rngs`` (and
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
        values_by_path = initial_values(program, paths, chosen, key)
        if values_by_path is None:
            raise StageError(
                f"{module.label} draws its constant {joined(chosen[0])} at random, and would draw another in each layer; make "
                "it an nnx.Param, or give a module that is built already"
            )
        return values_by_path

    traced = [path for path in paths if path in module.constants]
    constants = {**module.constants, **{path: draw(None, [path])[path] for path in traced}}
    return Blueprint(replace(module, constants=constants), draw)


def split_module(label: str, module: nnx.Module) -> tuple[SplitModule, dict[KeyPath, Any]]:
    """Return the structure of a module, which is not changed, and the values of its parameters by path."""
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
    # Modes are attributes of submodules, so each mode is a structure of its own; switching the user's module would change it.
    definitions = {}
    for train in (True, False):
        copy = nnx.merge(graph, state)
        copy.train() if train else copy.eval()
        definitions[train] = nnx.graphdef(copy)
    _refuse_traced(label, definitions[True])
    mode = mode_keyword(module.__call__)
    return SplitModule(label, definitions, leaves, constants, streams, _normalised(module), mode), values


def joined(path: KeyPath) -> str:
    """Format a path."""
    return "/".join(map(str, path))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _fixed(leaf: Any) -> Any:
    """Return the value of a constant as one that nobody else can change in place."""
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
    """Copy what could be changed in place; return other values as they are."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple, set):
        return type(value)(map(_unshared, value))
    if type(value) is dict:
        return {name: _unshared(v) for name, v in value.items()}
    return value


def _unshare(module: nnx.Module) -> None:
    """Give a module separate lists, dicts and sets; merged, it shares those of its definition."""
    for _, node, name, value in list(_own(module)):
        if type(value) in (list, tuple, set, dict):
            object.__setattr__(node, name, _unshared(value))


def _own(module: nnx.Module) -> Iterator[tuple[KeyPath, Any, str, Any]]:
    """Yield the attributes of a module and of those in it: the path of the one that has it, this, name and value."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            yield from ((path, node, name, value) for name, value in vars(node).items())


def _attributes(module: nnx.Module) -> dict[KeyPath, Hashable]:
    """Return a key of each Python value among the attributes of a module and of those in it, by path."""
    return {
        (*path, name): _python_key(value)
        for path, _, name, value in _own(module)
        if not name.startswith("_pytree__") and not isinstance(value, _STATE)
    }


def _python_key(value: Any) -> Hashable:
    """Return a key of a value without the arrays, variables and modules in it."""
    if isinstance(value, _STATE):
        return None
    if isinstance(value, Mapping):
        return tuple((value_key(k), _python_key(v)) for k, v in value.items())
    if jax.tree_util.all_leaves([value]):
        return value_key(value)
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda v: v is not value)
    return structure, tuple(map(_python_key, leaves))


def _emptied(leaf: Any) -> Any:
    """Return a variable that holds the shape and dtype of its value, None for a bare array."""
    if not isinstance(leaf, nnx.Variable):
        return None
    value = leaf.get_value()
    return leaf.replace(jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "dtype") else None)


def _filled(empty: Any, value: Any) -> Any:
    return value if empty is None else empty.replace(value)


def _stream_value(stream: Any, key: jax.Array) -> jax.Array:
    """Return the key of a stream (or of each of its parts, where modules are stacked), or its counters at zero."""
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
    """Return the parameters of what ``nnx.WeightNorm`` normalises."""
    wrapped = {path for path, node in nnx.iter_graph(module) if isinstance(node, nnx.WeightNorm)}
    params = (path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param)))
    return frozenset(path for path in params if any(path[: len(w)] == w for w in wrapped))


_STUB = "_jaxpipe_stub"


def layers_from_nnx(
    module: Any,
    blocks: str | Sequence[str] = "layers",
    *,
    batch: Mapping[str, Any],
    reads: Sequence[str],
    loss: Callable[[Any, Mapping[str, jax.Array]], Any],
    name: str = "",
) -> CutModel:
    """Make the model that trains ``module``: an nnx module, whose weights become the initial ones, or a function ``rngs ->
    module``.

    ``blocks``: path of the attribute that holds the blocks, or several: a list or ``nnx.Sequential`` of modules, or one module
    whose parameters are stacked on axis 0 and that the call scans over. ``batch``: an example microbatch, arrays or their types
    by name. ``reads``: names of those that the module is called with, in order; it may take ``train``, ``training`` or
    ``deterministic`` besides. ``loss(output, batch) -> (loss_sum, weight_sum)``, optionally with a dict of metrics. Layers are
    called ``embed``, ``block_00`` …, ``head`` and ``loss`` (:mod:`jaxpipe.stage.model.cut_module`)::

        model = layers_from_nnx(gpt, "layers", batch={"tokens": tokens, "targets": targets}, reads=("tokens",), loss=loss)
        params = model.by_layer(module_params(gpt))          # what model.layers[i].init gives, too
        update_module(gpt, model.whole(trained))

    Raises:
        StageError: there are no such blocks; the call does not treat them as blocks, or changes its state; says what was found.
    """
    paths = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    cut = _NnxCut(module, paths)
    return cut_module(cut, name=name or cut.kind, batch=batch_types(cut.label, batch, reads), reads=reads, loss=loss)


def module_params(module: Any) -> Params:
    """Return the parameters of an nnx module as a nested dict with string keys."""
    split, values = split_module(f"nnx module {type(module).__name__}", module)
    return split.nested(values)


def update_module(module: Any, params: Params) -> None:
    """Set the parameters of an nnx module to those in a nested dict with string keys; others stay.

    Raises:
        StageError: the module has no such parameter, or one of another shape; nothing is set then.
    """
    variables = {_words(path): variable for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    values = by_path(params)
    shapes = {path: variable.get_value().shape for path, variable in variables.items()}
    advice = "give what module_params gives, or a part of it"
    check_leaves(f"nnx module {type(module).__name__}", values, shapes, advice)
    for path, value in values.items():
        variables[path].set_value(jax.numpy.asarray(value))


class _NnxCut:
    """A :class:`~jaxpipe.stage.model.outline.CuttableModule`."""

    def __init__(self, source: Any, paths: Sequence[str]) -> None:
        self._whole = blueprint("layers_from_nnx", source)
        self.label = self._whole.module.label
        self.kind = self.label.rpartition(" ")[2]
        skeleton = self._whole.module.skeleton()
        variables = dict(nnx.to_flat_state(nnx.state(skeleton, nnx.Param)))
        self.leaves: Mapping[Path, jax.ShapeDtypeStruct] = {
            _words(path): variable.get_value() for path, variable in variables.items()
        }
        self._paths = {_words(path): path for path in variables}
        home = {id(node): _words(path) for path, node in nnx.iter_graph(skeleton) if isinstance(node, nnx.Param)}
        blocks = [(path, block) for place in paths for path, block in _blocks(self.label, skeleton, place)]
        # Where a block's stub goes, and the number of the first block there.
        self._calls: list[tuple[KeyPath, int]] = []
        self.names: list[str] = []
        self._splits: list[SplitModule] = []
        self.homes: list[Mapping[Path, Home]] = []
        for path, block in blocks:
            self._calls.append((path, len(self.names)))
            label = f"{self.label}: block {joined(path)}, nnx module {type(block).__name__}"
            split, _ = split_module(label, block)
            at = {p: home[id(v)] for p, v in nnx.iter_graph(block) if isinstance(v, nnx.Param)}
            stacked = path in [tuple(place.split(".")) for place in paths]
            for index in range(_stack_size(split)) if stacked else (None,):
                self.names.append(joined(path) if index is None else f"{joined(path)}[{index}]")
                self._splits.append(split if index is None else _unstacked(split, index))
                self.homes.append({_words(p): (at[p], index) for p in split.params})
        # On the skeleton, which is ours; once for each object, as one module may stand at several places.
        for block in {id(block): block for _, block in blocks}.values():
            object.__setattr__(block, "__class__", _stub_class(type(block)))
        self._outlined, _ = split_module(self.label, skeleton)
        self._kinds = list(map(_kind, self._splits))

    def run(self, leaves: Mapping[Path, Any], data: Sequence[Any], key: jax.Array, train: bool, stubs: Stubs) -> Any:
        def prepare(module: Any) -> None:
            for path, first in self._calls:
                setattr(_at(module, path), _STUB, (stubs, first))

        params = self._outlined.nested({self._paths[path]: leaf for path, leaf in leaves.items()})
        return self._outlined.call(params, tuple(data), self._outlined.mode(train), typed_key(key), train, prepare)

    def call(self, block: int, params: Params, arguments: Any, key: jax.Array | None, train: bool) -> Any:
        args, kwargs = arguments
        return self._splits[block].call(params, args, kwargs, None if key is None else typed_key(key), train)

    def alike(self, block: int) -> Hashable:
        return self._kinds[block]

    def draw(self, key: jax.Array, paths: Sequence[Path]) -> Mapping[Path, jax.Array]:
        values = self._whole.draw(typed_key(key), [self._paths[path] for path in paths])
        return {path: values[self._paths[path]] for path in paths}


def _words(path: KeyPath) -> Path:
    return tuple(map(str, path))


def _at(module: Any, path: KeyPath) -> Any:
    node = module
    for part in path:
        node = node[part] if isinstance(part, int) or not hasattr(node, part) else getattr(node, part)
    return node


def _blocks(label: str, module: Any, place: str) -> list[tuple[KeyPath, nnx.Module]]:
    """Return the modules in the list at ``place``, or the one that is there, by path."""
    node, path = module, cast(KeyPath, ())
    for part in place.split("."):
        names = sorted(n for n, v in vars(node).items() if isinstance(v, nnx.Pytree) and not n.startswith("_"))
        if part not in names:
            raise StageError(
                f"{label} has no blocks at {place!r}; its attributes there are {', '.join(names) or 'none'}"
            )
        node, path = getattr(node, part), (*path, part)
    if isinstance(node, nnx.Sequential):
        node, path = node.layers, (*path, "layers")
    if isinstance(node, nnx.Module) and not isinstance(node, nnx.List):
        return [(path, node)]
    blocks = [((*path, k), block) for k, block in enumerate(node) if isinstance(block, nnx.Module)]
    if not blocks:
        raise StageError(f"{label} has no modules in its list {place!r}")
    return blocks


def _stack_size(split: SplitModule) -> int:
    """Return how many blocks are stacked on axis 0 of a module's parameters."""
    sizes = {split.leaves[path].get_value().shape[:1] for path in split.params}
    if len(sizes) != 1 or () in sizes:
        raise StageError(
            f"{split.label}: one module is a stack of blocks if axis 0 of all its parameters counts them; it is "
            f"{', '.join(sorted(str(*s) if s else 'missing' for s in sizes)) or 'missing'} here"
        )
    ((size,),) = sizes
    return int(size)


def _unstacked(split: SplitModule, index: int) -> SplitModule:
    """Return one block of a stack."""

    def part(variable: Any) -> Any:
        value = variable.get_value()
        return variable.replace(jax.ShapeDtypeStruct(value.shape[1:], value.dtype))

    leaves = {path: leaf if path in split.constants else part(leaf) for path, leaf in split.leaves.items()}
    constants = {path: value[index] for path, value in split.constants.items()}
    streams = {path: part(stream) if stream.get_value().shape else stream for path, stream in split.streams.items()}
    return replace(split, leaves=leaves, constants=constants, streams=streams)


def _stub_class(cls: type) -> type:
    """Make a class like ``cls`` whose call is a stub's: an instance's is in its attribute ``_STUB``, with the block's
    number."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        stubs, block = getattr(self, _STUB)
        return stubs(block, *args, **kwargs)

    return type(cls)(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


def _kind(split: SplitModule) -> Hashable:
    """Return a key that is equal for blocks of which a call computes the same; for no other block where that can't be
    hashed."""
    leaves = tuple((path, v and (v.get_value().shape, str(v.get_value().dtype))) for path, v in split.leaves.items())
    definitions = tuple(split.definitions[train] for train in (True, False))
    kind = definitions, leaves, value_key(dict(enumerate(split.constants.values())))
    try:
        hash(kind)
    except TypeError:
        return ById(split)
    return kind
