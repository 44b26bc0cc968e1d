"""An nnx module cut into layers: :func:`layers_from_nnx`, and its weights in and out.

While its call is outlined, the blocks of a copy of the module have a subclass of their class whose ``__call__`` is a stub: so
attributes, ``isinstance`` and nnx's transformations see what they expect.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
from flax import nnx

from jaxpipe.errors import StageError
from jaxpipe.stage.identity import Same, value_key
from jaxpipe.stage.model.adapters import typed_key
from jaxpipe.stage.model.cut_module import CutModel, batch_types, check_leaves, cut_module
from jaxpipe.stage.model.layer import Params, Path
from jaxpipe.stage.model.nnx_modules import KeyPath, SplitModule, blueprint, joined, split_module
from jaxpipe.stage.model.outline import Stubs
from jaxpipe.stage.model.params import by_path
from jaxpipe.stage.model.wiring import Home

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
    """The model that trains ``module``: an nnx module, whose weights become the initial ones, or a function ``rngs -> module``.

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
    """The parameters of an nnx module as a nested dict with string keys."""
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
    """A :class:`~jaxpipe.stage.model.wiring.CuttableModule`."""

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
        self._calls: list[
            tuple[KeyPath, int]
        ] = []  # where a block's stub goes, and the number of the first block there
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
    """The modules in the list at ``place``, or the one that is there, by path."""
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
    """How many blocks are stacked on axis 0 of a module's parameters."""
    sizes = {split.leaves[path].get_value().shape[:1] for path in split.params}
    if len(sizes) != 1 or () in sizes:
        raise StageError(
            f"{split.label}: one module is a stack of blocks if axis 0 of all its parameters counts them; it is "
            f"{', '.join(sorted(str(*s) if s else 'missing' for s in sizes)) or 'missing'} here"
        )
    ((size,),) = sizes
    return int(size)


def _unstacked(split: SplitModule, index: int) -> SplitModule:
    """One block of a stack."""

    def part(variable: Any) -> Any:
        value = variable.get_value()
        return variable.replace(jax.ShapeDtypeStruct(value.shape[1:], value.dtype))

    leaves = {path: leaf if path in split.constants else part(leaf) for path, leaf in split.leaves.items()}
    constants = {path: value[index] for path, value in split.constants.items()}
    streams = {path: part(stream) if stream.get_value().shape else stream for path, stream in split.streams.items()}
    return replace(split, leaves=leaves, constants=constants, streams=streams)


def _stub_class(cls: type) -> type:
    """A class like ``cls`` whose call is a stub's: an instance's is in its attribute ``_STUB``, with the block's number."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        stubs, block = getattr(self, _STUB)
        return stubs(block, *args, **kwargs)

    return type(cls)(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


def _kind(split: SplitModule) -> Hashable:
    """Equal for blocks of which a call computes the same; for no other where that can't be hashed."""
    leaves = tuple((path, v and (v.get_value().shape, str(v.get_value().dtype))) for path, v in split.leaves.items())
    definitions = tuple(split.definitions[train] for train in (True, False))
    kind = definitions, leaves, value_key(dict(enumerate(split.constants.values())))
    try:
        hash(kind)
    except TypeError:
        return Same(split)
    return kind
