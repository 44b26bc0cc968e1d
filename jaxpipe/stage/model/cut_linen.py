"""A linen module cut into layers: :func:`layers_from_linen`.

While its call is outlined, calls of its blocks are intercepted (``linen.intercept_methods``). What is intercepted is the block
as the module made it for this call; its layer calls a copy that belongs to no other module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
from flax import linen

from jaxpipe.errors import StageError
from jaxpipe.stage.identity import ById, value_key
from jaxpipe.stage.model.adapters import as_stage_error, linen_params, not_linen, streams, typed_key
from jaxpipe.stage.model.cut_module import CutModel, batch_types, check_leaves, cut_module
from jaxpipe.stage.model.cut_nnx import drawn
from jaxpipe.stage.model.layer import Params, Path, key_aval, mode_keyword
from jaxpipe.stage.model.outline import Home, Stubs
from jaxpipe.stage.model.params import by_path, nested


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
    """The model that trains ``module``, an instance of a linen module.

    ``blocks``: what its blocks are called in its parameters, or several such names: ``"Encoder_0/layer"`` means ``layer_0``,
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
        self._given = None if params is None else by_path(linen.meta.unbox(params))

        def init(key: jax.Array) -> dict[Path, Any]:
            return by_path(linen_params(self.label, module, key, data, self._mode(False)))

        self._program, types = jax.make_jaxpr(init, return_shape=True)(key_aval())
        self.leaves: Mapping[Path, jax.ShapeDtypeStruct] = types
        if self._given is not None:
            _check_params(self.label, self._given, types)
        self._sites: dict[Path, int] = {}
        self._first: list[int] = []  # by block, the first one of its stack
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
            if (
                context.method_name != "__call__" or block is None
            ):  # of nn.scan(Block), only Block's own call has this name
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
        if self._given is not None:
            return {path: self._given[path] for path in paths}
        values = drawn(self._program, list(self.leaves), paths, typed_key(key))
        assert values is not None, "there is a key"
        return values

    def _copy(self, block: int, module: Any) -> Any:
        """A block by itself."""
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
