"""Layers as jitted functions, so that JAX traces, differentiates and transposes each once, however many layers have it.

A model's layers are mostly one function. What JAX finds of a jitted function for arguments of some shapes and types it keeps;
flattening (:mod:`jaxpipe.stage.inline`) puts the equations where the calls are, in the order in which they would be without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import jit

from jaxpipe._jax_compat import varying_axes
from jaxpipe.stage.identity import function_key, value_key
from jaxpipe.stage.leaves import array_leaves, fill, is_array
from jaxpipe.stage.model.layer import Layer, LayerContext, Params
from jaxpipe.stage.model.reference import calling


@dataclass(slots=True)
class Calls:
    """Jitted functions of layers by what decides their traces, with the pytrees that they return. ``repeated``: keys of the
    functions that are worth it; the others are called as they are. None: all are."""

    known: dict[Hashable, tuple[Callable[..., list[Any]], list[Any]]] = field(default_factory=dict)
    repeated: Collection[Hashable] | None = None

    def __call__(self, layer: Layer, params: Params, x: Any, context: LayerContext, where: str) -> Any:
        """Call ``layer`` and return its result.

        Raises:
            StageError: as :func:`~jaxpipe.stage.model.reference.calling`.
        """
        if self.repeated is not None and function_key(layer.apply) not in self.repeated:
            return calling(layer, params, x, context, where)
        arguments = (params, x, dict(context.data), context.key)
        leaves, structure = jax.tree.flatten(arguments)
        types = tuple((v.shape, v.dtype, varying_axes(v)) if is_array(v) else value_key(v) for v in leaves)
        kind = (function_key(layer.apply), structure, types, context.train, context.tp)
        if kind not in self.known:
            skeleton: list[Any] = []
            still = fill(arguments, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in array_leaves(arguments)])

            def arrays_of(arrays: list[Any]) -> list[Any]:
                params, x, data, key = fill(still, arrays)
                y = calling(layer, params, x, LayerContext(data, key, context.train, context.tp), where)
                outputs = array_leaves(y)
                skeleton[:] = [fill(y, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in outputs])]
                return outputs

            self.known[kind] = jit(arrays_of), skeleton
        jitted, returned = self.known[kind]
        arrays = jitted(array_leaves(arguments))
        return fill(returned[0], arrays)
