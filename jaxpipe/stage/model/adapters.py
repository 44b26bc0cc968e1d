"""Flax modules as layers: pure ``init`` and ``apply`` over plain nested dicts with string keys.

:func:`from_linen` takes a linen module, :func:`from_nnx` an nnx module or a function that builds one. A module is called as
``module(x, *data, **mode)``: ``x`` is what the layer before returned (left out in the first layer), ``data`` the batch arrays
in the order of ``reads``, and ``mode`` the keyword ``train``, ``training`` or ``deterministic`` if the module's ``__call__``
has one. Flax's own machinery runs only while JAX traces; a compiled stage sees nothing of it.

Not supported, and refused by the layer's name: state that a call changes (batch statistics, caches). Every microbatch would
need its own copy of it, in an order that the schedule decides. Nor may the call of an nnx module change a Python attribute: it
runs while JAX traces, not each time. State that calls only read is taken from nnx modules as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import flax.errors
import jax
import jax.numpy as jnp
from flax import linen

from jaxpipe._jax_compat import is_key_dtype
from jaxpipe.errors import StageError
from jaxpipe.mesh import TensorParallel
from jaxpipe.stage.model.layer import Layer, LayerContext, Params, Path, Shard, mode_keyword
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
    shards: Callable[[TensorParallel], Mapping[Path, Shard]] | None = None,
) -> Layer:
    """A layer from the linen module ``module``.

    ``example``: the positional arguments of a call, arrays as ``ShapeDtypeStruct``, from which ``init`` learns shapes (any
    batch size will do). ``uses_key``: the module draws random numbers in training, from the streams named ``rngs``. ``tied``:
    leaves that belong to another layer; they are taken out of what ``init`` makes. Layers made by ``dataclasses.replace(layer,
    name=…)`` from one adapter share its functions, and so JAX's caches. ``shards``: as in :class:`Layer`; such a module has a
    field ``tp: TensorParallel = ONE_SHARD``, and on several shards it is called with its own shard of each parameter and ``tp``
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
    shards: Callable[[TensorParallel], Mapping[Path, Shard]] | None = None,
) -> Layer:
    """A layer from ``module``: a function ``rngs -> nnx module``, or such a module, whose weights ``init`` then gives whatever
    its key.

    The module is taken apart once, here (``model/nnx_modules.py``); a function's without allocating its parameters.
    ``nnx.Param`` leaves become the parameters, at string keys (an index into a list becomes its digits); arrays and variables
    of other kinds become constants; random streams held by the module are refilled from the context's key. ``uses_key``: None
    means yes if the module holds a random stream. Dropout and the like are switched by nnx's own train and eval modes.
    ``shards``: as in :class:`Layer`; ``module`` is then a function ``(rngs, tp=ONE_SHARD)``, called again with ``tp`` set where
    there are several shards: what it builds is one shard's module, with the same parameters in a shard's shapes.

    Raises StageError for a module that can't be taken apart, and from ``apply`` when a call assigns to a parameter or changes
    other state or an attribute.
    """
    from flax import nnx  # imports as long as linen, and most models are of linen

    from jaxpipe.stage.model.cut_nnx import blueprint

    label = f"layer {name!r}"
    plan = blueprint(label, module)
    ties = dict(tied or {})
    split = plan.module
    draws = bool(split.streams) if uses_key is None else uses_key
    split.nested(dict.fromkeys(split.params))  # raises where two share a name
    if shards is not None and isinstance(module, nnx.Module):
        raise StageError(
            f"{label} has shards=, which takes a function (rngs, tp=ONE_SHARD) that builds a shard's module"
        )
    divided: dict[TensorParallel, SplitModule] = {}

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

    initialize = init if isinstance(module, nnx.Module) else jax.jit(init)
    return Layer(name, initialize, apply, tuple(reads), draws, ties, kind, shards)


def typed_key(key: jax.Array) -> jax.Array:
    """``key`` as a typed PRNG key; raw ``uint32`` keys are wrapped."""
    return key if is_key_dtype(key.dtype) else jax.random.wrap_key_data(key)


def _arguments(x: Any, context: LayerContext, reads: Sequence[str]) -> tuple[Any, ...]:
    return (() if x is None else (x,)) + tuple(context.data[name] for name in reads)


@contextmanager
def as_stage_error(label: str) -> Iterator[None]:
    """Raises what linen refuses as StageError, in one line."""
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
    """A key for each named stream. The only stream gets the key itself."""
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
    """The parameters that a linen module makes for a call with these arguments, zeros in place of types of arrays."""
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
    """``params`` without the tied leaves, nor the dicts that this leaves empty."""
    for path in ties:
        if find_leaf(params, path) is None:
            raise StageError(f"{label} has no parameter at the tied path {'/'.join(path)}; it has {', '.join(params)}")
    return nested({path: leaf for path, leaf in by_path(params).items() if path not in ties}) if ties else params
