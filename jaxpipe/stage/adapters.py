"""Flax modules as layers: pure ``init`` and ``apply`` over plain nested dicts with string keys.

:func:`from_linen` takes a linen module, :func:`from_nnx` a factory of nnx modules. A module is called as
``module(x, *data, **mode)``: ``x`` is what the layer before returned (left out in the first layer), ``data`` the batch arrays
in the order of ``reads``, and ``mode`` the keyword ``train``, ``training`` or ``deterministic`` if the module's ``__call__``
has one. Flax's own machinery runs only while JAX traces; a compiled stage sees nothing of it.

Not supported, and refused: state that a call changes (batch statistics, caches). Every microbatch would need its own copy
of it, in an order that the schedule decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxpipe.errors import StageError
from jaxpipe.mesh import TensorParallel
from jaxpipe.stage.layer import Layer, LayerContext, Params, Path, Shard


def from_linen(
    name: str,
    module: Any,
    *,
    example: Sequence[Any] = (),
    reads: Sequence[str] = (),
    uses_key: bool = False,
    rngs: Sequence[str] = ("dropout",),
    tied: Mapping[Path, tuple[str, Path]] | None = None,
    kind: str = "",
    shards: Callable[[TensorParallel], Mapping[Path, Shard]] | None = None,
) -> Layer:
    """A layer from the linen module ``module``.

    ``example``: the positional arguments of a call, arrays as ``ShapeDtypeStruct``, from which ``init`` learns shapes (any
    batch size will do). ``uses_key``: the module draws random numbers in training, from the streams named ``rngs``. ``tied``:
    leaves that belong to another layer; they are taken out of what ``init`` makes. Layers made by ``dataclasses.replace(layer,
    name=…)`` from one adapter share its functions, and so JAX's caches. ``shards``: as in :class:`Layer`; such a module has a
    field ``tp: TensorParallel = ONE_SHARD``, and on several shards it is called with its own shard of each parameter and ``tp``
    set (the shapes that it declares are then those of a shard).

    Raises StageError, from ``init`` or ``apply``, for collections other than ``params`` and for whatever Flax refuses.
    """
    label = f"linen module {type(module).__name__}"
    ties = dict(tied or {})
    mode = _mode_keyword(module.__call__)

    def init(key: jax.Array) -> Params:
        arguments = jax.tree.map(_zeros, tuple(example))
        try:
            variables = module.init(key, *arguments, **mode(False))
        except flax.errors.FlaxError as error:
            raise StageError(f"{label}: {_first_line(error)}") from error
        _refuse_state(label, [c for c in variables if c != "params"])
        params: Params = linen.meta.unbox(dict(variables.get("params", {})))
        for path in ties:
            params = _without(params, path, label)
        return params

    def apply(params: Params, x: Any, context: LayerContext) -> Any:
        arguments = _arguments(x, context, reads)
        keys = _streams(context.key, rngs) if context.train and uses_key else {}
        try:
            shard = module if context.tp.size == 1 else module.clone(tp=context.tp)
            return shard.apply({"params": params}, *arguments, rngs=keys, **mode(context.train))
        except flax.errors.InvalidRngError as error:
            raise StageError(
                f"{label} draws random numbers and got no key; make its layer with uses_key=True "
                f"and give a key in training ({_first_line(error)})"
            ) from error
        except flax.errors.FlaxError as error:
            raise StageError(f"{label}: {_first_line(error)}") from error

    return Layer(name, jax.jit(init), apply, tuple(reads), uses_key, ties, kind, shards)


def from_nnx(
    name: str,
    module_factory: Callable[[nnx.Rngs], Any],
    *,
    reads: Sequence[str] = (),
    uses_key: bool | None = None,
    tied: Mapping[Path, tuple[str, Path]] | None = None,
    kind: str = "",
) -> Layer:
    """A layer from ``module_factory(rngs)``, which builds an nnx module.

    The module is split once, here and without allocating: ``nnx.Param`` leaves become the parameters, at string keys (an
    index into a list becomes its digits); random streams held by the module are refilled from the context's key. ``uses_key``:
    None means yes if the module holds a random stream. Dropout and the like are switched by nnx's own train and eval modes.

    Raises StageError for variables of other kinds, and from ``apply`` when a call assigns to a parameter.
    """
    split = _SplitModule.of(module_factory)
    ties = dict(tied or {})
    draws = bool(split.streams) if uses_key is None else uses_key

    def init(key: jax.Array) -> Params:
        state = nnx.state(module_factory(nnx.Rngs(_typed_key(key))), nnx.Param)
        params = _nested({path: variable.get_value() for path, variable in nnx.to_flat_state(state)}, split.label)
        for path in ties:
            params = _without(params, path, split.label)
        return params

    def apply(params: Params, x: Any, context: LayerContext) -> Any:
        return split.call(params, _arguments(x, context, reads), context, draws)

    return Layer(name, jax.jit(init), apply, tuple(reads), draws, ties, kind)


class _SplitModule:
    """An nnx module's structure in both modes, its parameters and its random streams by path; no arrays."""

    __slots__ = ("definitions", "label", "params", "streams")

    def __init__(self, label: str, definitions: Mapping[bool, Any], params: Any, streams: Any) -> None:
        self.label = label
        self.definitions = definitions
        self.params = params
        self.streams = streams

    @classmethod
    def of(cls, module_factory: Callable[[nnx.Rngs], Any]) -> _SplitModule:
        module = nnx.eval_shape(lambda: module_factory(nnx.Rngs(0)))
        label = f"nnx module {type(module).__name__}"
        _, params, streams, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
        _refuse_state(label, sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(rest)}))
        _nested(dict(nnx.to_flat_state(params)), label)
        module.train()
        definitions = {True: nnx.graphdef(module)}
        module.eval()
        definitions[False] = nnx.graphdef(module)
        return cls(label, definitions, dict(nnx.to_flat_state(params)), dict(nnx.to_flat_state(streams)))

    def call(self, params: Params, arguments: tuple[Any, ...], context: LayerContext, draws: bool) -> Any:
        key = context.key if context.train and draws else None
        if context.train and self.streams and key is None:
            raise StageError(
                f"{self.label} holds random streams and got no key; make its layer with uses_key=True "
                "and give a key in training"
            )
        given = {path: _at(params, path, self.label) for path in self.params}
        leaves = {path: variable.replace(given[path]) for path, variable in self.params.items()}
        module = nnx.merge(
            self.definitions[context.train], nnx.from_flat_state(leaves), nnx.from_flat_state(self._filled(key))
        )
        y = module(*arguments, **_mode_keyword(module.__call__)(context.train))
        after = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
        changed = [path for path, value in given.items() if after[path].get_value() is not value]
        if changed:
            where = "/".join(map(str, changed[0]))
            raise StageError(f"{self.label} assigns to its parameter {where} in a call; only the optimizer may")
        return y

    def _filled(self, key: jax.Array | None) -> dict[tuple[Any, ...], Any]:
        """The random streams' variables: a key of its own for each stream, counters at zero."""
        base = jax.random.key(0) if key is None else _typed_key(key)  # evaluation mode draws nothing
        filled = {}
        for index, (path, variable) in enumerate(self.streams.items()):
            is_key = issubclass(type(variable), nnx.RngKey)
            filled[path] = variable.replace(jax.random.fold_in(base, index) if is_key else jnp.zeros((), jnp.uint32))
        return filled


def _mode_keyword(call: Callable[..., Any]) -> Callable[[bool], dict[str, bool]]:
    """How to tell ``call`` whether it trains: a function from ``train`` to keyword arguments."""
    names = inspect.signature(call).parameters
    for name, sign in (("train", True), ("training", True), ("deterministic", False)):
        if name in names:
            return lambda train: {name: train is sign}
    return lambda train: {}


def _arguments(x: Any, context: LayerContext, reads: Sequence[str]) -> tuple[Any, ...]:
    return (() if x is None else (x,)) + tuple(context.data[name] for name in reads)


def _streams(key: jax.Array | None, names: Sequence[str]) -> dict[str, jax.Array]:
    """A key for each named stream. The only stream gets the key itself."""
    if key is None:
        return {}
    if len(names) == 1:
        return {names[0]: key}
    return {name: jax.random.fold_in(key, index) for index, name in enumerate(names)}


def _typed_key(key: jax.Array) -> jax.Array:
    """``key`` as a typed PRNG key; raw ``uint32`` keys are wrapped."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def _zeros(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _refuse_state(label: str, kinds: Sequence[str]) -> None:
    if kinds:
        raise StageError(
            f"{label} keeps state beside its parameters ({', '.join(kinds)}), which microbatches in flight would overwrite; "
            "use a layer without it (LayerNorm or RMSNorm in place of BatchNorm)"
        )


def _nested(flat: Mapping[tuple[Any, ...], Any], label: str) -> Params:
    """A nested dict with string keys from leaves by path."""
    tree: Params = {}
    for path, leaf in flat.items():
        *inner, last = map(str, path)
        node = tree
        for part in inner:
            node = node.setdefault(part, {})
        if last in node:
            raise StageError(f"{label} has two parameters that are both called {'/'.join(map(str, path))}; rename one")
        node[last] = leaf
    return tree


def _at(params: Params, path: tuple[Any, ...], label: str) -> Any:
    node: Any = params
    for part in path:
        if not isinstance(node, Mapping) or str(part) not in node:
            raise StageError(f"{label} has no parameter {'/'.join(map(str, path))} in what it was given")
        node = node[str(part)]
    return node


def _without(params: Params, path: Path, label: str) -> Params:
    """``params`` without the leaf at ``path``, nor the dicts that this leaves empty."""
    head, *rest = path
    if head not in params:
        raise StageError(f"{label} has no parameter at the tied path {'/'.join(path)}; it has {', '.join(params)}")
    kept = {key: value for key, value in params.items() if key != head}
    below = _without(params[head], tuple(rest), label) if rest else {}
    return {**kept, head: below} if below else kept


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
