"""Flax modules as layers: pure ``init`` and ``apply`` over plain nested dicts with string keys.

:func:`from_linen` takes a linen module, :func:`from_nnx` an nnx module or a function that builds one. A module is called as
``module(x, *data, **mode)``: ``x`` is what the layer before returned (left out in the first layer), ``data`` the batch arrays
in the order of ``reads``, and ``mode`` the keyword ``train``, ``training`` or ``deterministic`` if the module's ``__call__``
has one. Flax's own machinery runs only while JAX traces; a compiled stage sees nothing of it.

Not supported, and refused by the layer's name: state that a call changes (batch statistics, caches). Every microbatch would
need its own copy of it, in an order that the schedule decides. Nor may the call of an nnx module change a Python attribute: it
runs while JAX traces, not each time. State that calls only read is taken from nnx modules as constants.

:func:`layers_from_linen` cuts one linen module into layers (:mod:`jaxpipe.stage.model.cut_module`). While its call is outlined,
calls of its blocks are intercepted (``linen.intercept_methods``). What is intercepted is the block as the module made it for
this call; its layer calls a copy that belongs to no other module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import flax.errors
import jax
import jax.numpy as jnp
from flax import linen

from jaxpipe.axes import RankMesh
from jaxpipe.errors import StageError
from jaxpipe.stage.identity import ById, value_key
from jaxpipe.stage.model.cut_module import CutModel, batch_types, check_leaves, cut_module
from jaxpipe.stage.model.layer import Layer, LayerContext, Params, Path, Shard, key_aval, mode_keyword, typed_key
from jaxpipe.stage.model.outline import Home, Stubs, initial_values
from jaxpipe.stage.model.params import by_path, find_leaf, nested

if TYPE_CHECKING:
    from jaxpipe.stage.model.cut_nnx import SplitModule


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
    shards: Callable[[RankMesh], Mapping[Path, Shard]] | None = None,
) -> Layer:
    """Make a layer of the linen module ``module``.

    ``example``: the positional arguments of a call, arrays as ``ShapeDtypeStruct``, from which ``init`` learns shapes (any
    batch size will do). ``uses_key``: the module draws random numbers in training, from the streams named ``rngs``. ``tied``:
    leaves that belong to another layer; they are taken out of what ``init`` makes. Layers made by ``dataclasses.replace(layer,
    name=…)`` from one adapter share its functions, and so JAX's caches. ``shards``: as in :class:`Layer`; such a module has a
    field ``tp: RankMesh = ONE_SHARD``, and on several shards it is called with its own shard of each parameter and ``tp``
    set (where sequences alone are divided, too; the shapes that it declares are then those of a shard).

    Raises StageError for what is no instance of a linen module, and from ``init`` or ``apply`` for collections other than
    ``params`` and for whatever Flax refuses.
    """
    if what := not_linen(module):
        raise StageError(
            f"layer {name!r} got {what}; from_linen wants an instance of a linen module, such as Block(width=64)"
        )
    label = f"layer {name!r}: linen module {type(module).__name__}"
    ties = dict(tied or {})
    mode = mode_keyword(module.__call__)

    def init(key: jax.Array) -> Params:
        return _without(linen_params(label, module, key, example, mode(False)), ties, label)

    def apply(params: Params, x: Any, context: LayerContext) -> Any:
        arguments = _arguments(x, context, reads)
        keys = streams(context.key, rngs) if context.train and uses_key else {}
        with as_stage_error(label):
            shard = module.clone(tp=context.tp) if shards is not None and context.tp.divided else module
            return shard.apply({"params": params}, *arguments, rngs=keys, **mode(context.train))

    return Layer(name, jax.jit(init), apply, tuple(reads), uses_key, ties, kind, shards)


def from_nnx(
    name: str,
    module: Any,
    *,
    reads: Sequence[str] = (),
    uses_key: bool | None = None,
    tied: Mapping[Path, tuple[str, Path]] | None = None,
    kind: str = "",
    shards: Callable[[RankMesh], Mapping[Path, Shard]] | None = None,
) -> Layer:
    """Make a layer of ``module``: a function ``rngs -> nnx module``, or such a module, whose weights ``init`` then gives
    whatever its key.

    The module is taken apart once, here (``model/cut_nnx.py``); a function's without allocating its parameters.
    ``nnx.Param`` leaves become the parameters, at string keys (an index into a list becomes its digits); arrays and variables
    of other kinds become constants; random streams held by the module are refilled from the context's key. ``uses_key``: None
    means yes if the module holds a random stream. Dropout and the like are switched by nnx's own train and eval modes.
    ``shards``: as in :class:`Layer`; ``module`` is then a function ``(rngs, tp=ONE_SHARD)``, called again with ``tp`` set where
    there are several shards: what it builds is one shard's module, with the same parameters in a shard's shapes.

    Raises StageError for a module that can't be taken apart, and from ``apply`` when a call assigns to a parameter or changes
    other state or an attribute.
    """
    # Takes as long to import as linen, and most models are of linen.
    from flax import nnx

    from jaxpipe.stage.model.cut_nnx import blueprint

    label = f"layer {name!r}"
    plan = blueprint(label, module)
    ties = dict(tied or {})
    split = plan.module
    draws = bool(split.streams) if uses_key is None else uses_key
    # For its error: two parameters may share a name once keys are strings.
    split.nested(dict.fromkeys(split.params))
    if shards is not None and isinstance(module, nnx.Module):
        raise StageError(
            f"{label} has shards=, which takes a function (rngs, tp=ONE_SHARD) that builds a shard's module"
        )
    divided: dict[RankMesh, SplitModule] = {}

    def init(key: jax.Array) -> Params:
        return _without(split.nested(plan.draw(typed_key(key), split.params)), ties, split.label)

    def apply(params: Params, x: Any, context: LayerContext) -> Any:
        key = typed_key(context.key) if context.train and draws and context.key is not None else None
        if context.train and split.streams and key is None:
            raise StageError(
                f"{split.label} holds random streams and got no key; make its layer with uses_key=True "
                "and give a key in training"
            )
        shard = split
        if shards is not None and context.tp.divided:
            shard = divided.get(context.tp) or blueprint(label, module, tp=context.tp).module
            divided[context.tp] = shard
        return shard.call(params, _arguments(x, context, reads), shard.mode(context.train), key, context.train)

    # A module's own weights are constants; jitted, they would be copied into the program.
    initialize = init if isinstance(module, nnx.Module) else jax.jit(init)
    return Layer(name, initialize, apply, tuple(reads), draws, ties, kind, shards)


def _arguments(x: Any, context: LayerContext, reads: Sequence[str]) -> tuple[Any, ...]:
    return (() if x is None else (x,)) + tuple(context.data[name] for name in reads)


@contextmanager
def as_stage_error(label: str) -> Iterator[None]:
    """Raise what linen refuses as StageError, in one line."""
    try:
        yield
    except flax.errors.InvalidRngError as error:
        raise StageError(
            f"{label} draws random numbers and got no key; make its layer with uses_key=True and give a key in training "
            f"({_first_line(error)})"
        ) from error
    except flax.errors.FlaxError as error:
        raise StageError(f"{label}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def streams(key: jax.Array | None, names: Sequence[str]) -> dict[str, jax.Array]:
    """Return a key for each named stream. The only stream gets the key itself."""
    if key is None:
        return {}
    if len(names) == 1:
        return {names[0]: key}
    return {name: jax.random.fold_in(key, index) for index, name in enumerate(names)}


def _zeros(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def not_linen(module: Any) -> str:
    """Describe what is no instance of a linen module; "" for what is one."""
    if isinstance(module, linen.Module):
        return ""
    return f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"


def linen_params(label: str, module: Any, key: jax.Array, arguments: Sequence[Any], mode: Mapping[str, bool]) -> Params:
    """Return the parameters that a linen module makes for a call with these arguments, zeros in place of types of arrays."""
    with as_stage_error(label):
        variables = module.init(key, *jax.tree.map(_zeros, tuple(arguments)), **mode)
    kinds = [c for c in variables if c != "params"]
    if kinds:
        raise StageError(
            f"{label} keeps state beside its parameters ({', '.join(kinds)}), which microbatches in flight would overwrite; "
            "use a layer without it (LayerNorm or RMSNorm in place of BatchNorm)"
        )
    params: Params = linen.meta.unbox(dict(variables.get("params", {})))
    return params


def _without(params: Params, ties: Collection[Path], label: str) -> Params:
    """Return ``params`` without the tied leaves, nor the dicts that this leaves empty."""
    for path in ties:
        if find_leaf(params, path) is None:
            raise StageError(f"{label} has no parameter at the tied path {'/'.join(path)}; it has {', '.join(params)}")
    return nested({path: leaf for path, leaf in by_path(params).items() if path not in ties}) if ties else params


def layers_from_linen(
    module: Any,
    blocks: str | Sequence[str],
    *,
    batch: Mapping[str, Any],
    reads: Sequence[str],
    loss: Callable[[Any, Mapping[str, jax.Array]], Any],
    params: Params | None = None,
    rngs: Sequence[str] = ("dropout",),
    name: str = "",
) -> CutModel:
    """Make the model that trains ``module``, an instance of a linen module.

    ``blocks``: the name of its blocks in its parameters, or several such names: ``"Encoder_0/layer"`` means ``layer_0``,
    ``layer_1`` … in ``Encoder_0``, or ``layer`` if that is what an ``nn.scan`` over a stack is called (parameters stacked on
    axis 0). ``params``: its ``variables["params"]``, which become the initial values. ``rngs``: the streams that it draws from
    in training. Other arguments and the layers' names as for ``layers_from_nnx``; weights go in and
    out by :meth:`CutModel.by_layer` and :meth:`CutModel.whole`.

    Raises:
        StageError: there are no such blocks; the call does not treat them as blocks, or keeps state; says what was found.
    """
    if what := not_linen(module):
        raise StageError(f"layers_from_linen wants an instance of a linen module, such as GPT(width=64), not {what}")
    example = batch_types("layers_from_linen", batch, reads)
    places = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    cut = _LinenCut(module, places, [example[n] for n in reads], params, tuple(rngs))
    return cut_module(cut, name=name or type(module).__name__, batch=example, reads=reads, loss=loss)


class _LinenCut:
    """A :class:`~jaxpipe.stage.model.outline.CuttableModule`. ``_copies``: by block and mode, the block as the call made it."""

    def __init__(
        self,
        module: Any,
        places: Sequence[str],
        data: Sequence[jax.ShapeDtypeStruct],
        params: Params | None,
        rngs: tuple[str, ...],
    ) -> None:
        self.label = f"layers_from_linen: linen module {type(module).__name__}"
        self._module = module
        self._mode = mode_keyword(module.__call__)
        self._rngs = rngs
        self._copies: dict[tuple[int, bool], Any] = {}
        self._initial = None if params is None else by_path(linen.meta.unbox(params))

        def init(key: jax.Array) -> dict[Path, Any]:
            return by_path(linen_params(self.label, module, key, data, self._mode(False)))

        self._program, types = jax.make_jaxpr(init, return_shape=True)(key_aval())
        self.leaves: Mapping[Path, jax.ShapeDtypeStruct] = types
        if self._initial is not None:
            _check_params(self.label, self._initial, types)
        self._sites: dict[Path, int] = {}
        # Blocks of a stack are one module in linen: the copy that is kept is that of the first.
        self._first: list[int] = []
        self.homes: list[Mapping[Path, Home]] = []
        self.names: list[str] = []
        for place in places:
            for site, count in _sites(self.label, types, place):
                self._sites[site] = first = len(self.names)
                inside = {path[len(site) :]: path for path in types if path[: len(site)] == site}
                for index in range(count) if count else (None,):
                    self._first.append(first)
                    self.homes.append({path: (home, index) for path, home in inside.items()})
                    self.names.append("/".join(site) if index is None else f"{'/'.join(site)}[{index}]")

    def run(self, leaves: Mapping[Path, Any], data: Sequence[Any], key: jax.Array, train: bool, stubs: Stubs) -> Any:
        def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            block = self._sites.get(tuple(context.module.path))
            # The lifted class of nn.scan(Block) is at the same path, but only Block's own call has this name.
            if context.method_name != "__call__" or block is None:
                return call(*args, **kwargs)
            if (block, train) not in self._copies:
                self._copies[(block, train)] = self._copy(block, context.module)
            return stubs(block, *args, **kwargs)

        keys = streams(typed_key(key), self._rngs) if train else {}
        with linen.intercept_methods(intercept), as_stage_error(self.label):
            return self._module.apply({"params": nested(leaves)}, *data, rngs=keys, **self._mode(train))

    def call(self, block: int, params: Params, arguments: Any, key: jax.Array | None, train: bool) -> Any:
        args, kwargs = arguments
        keys = streams(typed_key(key), self._rngs) if train and key is not None else {}
        with as_stage_error(f"{self.label}: block {self.names[block]}"):
            return self._copies[(self._first[block], train)].apply({"params": params}, *args, rngs=keys, **kwargs)

    def alike(self, block: int) -> Hashable:
        copies = [self._copies.get((self._first[block], train)) for train in (True, False)]
        return tuple((ById(type(m)), value_key(_fields(m))) for m in copies if m is not None)

    def draw(self, key: jax.Array, paths: Sequence[Path]) -> Mapping[Path, jax.Array]:
        if self._initial is not None:
            return {path: self._initial[path] for path in paths}
        values = initial_values(self._program, list(self.leaves), paths, typed_key(key))
        assert values is not None, "there is a key"
        return values

    def _copy(self, block: int, module: Any) -> Any:
        """Clone a block, so that it belongs to no other module."""
        for name, value in _fields(module).items():
            for leaf in jax.tree.leaves(value, is_leaf=lambda v: isinstance(v, linen.Module)):
                if isinstance(leaf, jax.core.Tracer) or (isinstance(leaf, linen.Module) and leaf.scope is not None):
                    raise StageError(
                        f"{self.label}: block {self.names[block]} is made with {name}={type(leaf).__name__}, which belongs to "
                        "the rest of the module; pass it as an argument of the call, or write the layers by hand"
                    )
        return module.clone(parent=None, name=None)


def _fields(module: Any) -> dict[str, Any]:
    return {f.name: getattr(module, f.name) for f in fields(module) if f.name not in ("parent", "name")}


def _check_params(label: str, params: Mapping[Path, Any], types: Mapping[Path, jax.ShapeDtypeStruct]) -> None:
    """Raise StageError unless ``params`` are the parameters of the module, in their shapes."""
    if params.keys() != types.keys() and {path[0] for path in params if path} == {"params"}:
        raise StageError(f'{label}: params= holds {{"params": …}}; give what is in it, variables["params"]')
    check_leaves(
        label, params, {path: leaf.shape for path, leaf in types.items()}, 'give its variables["params"] as params='
    )
    for path in types:
        if path not in params:
            raise StageError(f'{label}: params= lacks {"/".join(path)}; give all of its variables["params"]')


def _sites(label: str, leaves: Mapping[Path, jax.ShapeDtypeStruct], place: str) -> list[tuple[Path, int]]:
    """Find where the blocks called ``place`` lie in the parameters, in order; and how many a stack holds (0: it is one
    block)."""
    *parent, name = place.split("/")
    above = tuple(parent)
    names = list(
        dict.fromkeys(path[len(above)] for path in leaves if path[: len(above)] == above and len(path) > len(above))
    )
    if name in names:
        site = (*above, name)
        sizes = {leaf.shape[:1] for path, leaf in leaves.items() if path[: len(site)] == site}
        if len(sizes) == 1 and () not in sizes:
            ((count,),) = sizes
            return [(site, int(count))]
        raise StageError(f"{label}: {place!r} is no stack of blocks: axis 0 of its parameters does not count them all")
    numbered = sorted(
        (int(match[1]), child) for child in names if (match := re.fullmatch(rf"{re.escape(name)}_?(\d+)", child))
    )
    if not numbered:
        raise StageError(f"{label} has no blocks {place!r}; its parameters there are {', '.join(names) or 'none'}")
    return [((*above, child), 0) for _, child in numbered]
