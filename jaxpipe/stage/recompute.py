"""Recompute policies: what F may save for the backward pass.

A policy decides, per value of the forward pass, whether it may be kept. What may not be kept is computed again from what is,
once: in B if ``dx`` needs it, in W if only parameter gradients do. The decision is made on the traced graph, after
differentiation, so it needs no ``jax.checkpoint`` in the model (one inside a layer is honoured) and sees the whole stage.

=============  ==================================================================================================
``none``       save whatever the backward pass reads
``cheap``      recompute elementwise work, reductions and random masks (norms, activations, dropout, softmax);
               save results of matrix products, convolutions, gathers, sorts and loops
``dots``       save results of matrix products and convolutions, and inputs of layers, nothing else
``attention``  recompute attention scores and all of their size made from them (values a layer marks with
               ``checkpoint_name(x, "attn_scores")``, back to the product that makes them and on to the one that uses them)
``full``       save inputs of layers only
``fused``      save what a framework of hand-fused kernels saves (Megatron-LM with its own attention): inputs of layers,
               operands and results of matrix products, random masks, attention probabilities; 34 bsh + 5 abs² bytes for a
               16-bit GPT layer with dropout (Korthikanti et al. 2023). Nothing but elementwise work runs again
``flash``      ``fused`` without anything of the size of the attention scores: what flash attention leaves, 34 bsh
=============  ==================================================================================================

The layer inputs of a stage are its own ``x`` and the inexact values between its layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxpipe._jax_compat import Var, dtype_of, shape_of, sub_jaxprs, variables
from jaxpipe.errors import StageError
from jaxpipe.stage.split import Graph, Level, Saveable

ATTENTION_SCORES = "attn_scores"
"""The name by which a layer marks its attention scores."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
_EXPENSIVE = frozenset(
    {"gather", "scatter", "scatter-add", "sort", "top_k", "fft", "pallas_call", "custom_call", "ffi_call"}
)
_EXPENSIVE_PREFIXES = ("cum", "psum", "all_", "reduce_scatter", "ppermute", "scatter")


def _none(graph: Graph) -> Saveable:
    return lambda v: True


def _full(graph: Graph) -> Saveable:
    keep = frozenset(variables(graph.trace.layer_inputs))
    return keep.__contains__


def _dots(graph: Graph) -> Saveable:
    keep = frozenset(variables(graph.trace.layer_inputs))
    return lambda v: v in keep or _made_by(graph, v) in _PRODUCTS


def _cheap(graph: Graph) -> Saveable:
    keep = frozenset(variables(graph.trace.layer_inputs))

    def saveable(v: Var) -> bool:
        eqn = graph.eqns[graph.maker[v]]
        name = eqn.primitive.name
        costly = name in _PRODUCTS or name in _EXPENSIVE or name.startswith(_EXPENSIVE_PREFIXES)
        return v in keep or costly or any(True for _ in sub_jaxprs(eqn))

    return saveable


def _attention(graph: Graph) -> Saveable:
    region = _score_region(graph)
    return lambda v: v not in region


def _fused(graph: Graph) -> Saveable:
    keep = set(variables(graph.trace.layer_inputs))
    keep.update(a for name, a in graph.trace.named if name == ATTENTION_SCORES and isinstance(a, Var))
    for eqn, level in zip(graph.eqns, graph.eqn_level, strict=True):
        if level is Level.FORWARD and eqn.primitive.name in _PRODUCTS:
            keep.update(eqn.outvars)
            for operand in variables(eqn.invars):
                seen: Var | None = operand
                while seen is not None and seen not in keep:
                    keep.add(seen)
                    seen = graph.view_base(seen)
    return lambda v: v in keep or str(dtype_of(v)) == "bool"


def _flash(graph: Graph) -> Saveable:
    fused, region = _fused(graph), _score_region(graph)
    return lambda v: v not in region and fused(v)


def _score_region(graph: Graph) -> frozenset[Var]:
    """Values made from marked scores, up to but without the results of the next products, and the values the scores come from,
    back to the product that makes them and with it."""
    marked = [a for name, a in graph.trace.named if name == ATTENTION_SCORES and isinstance(a, Var)]
    region: set[Var] = set()
    stack = list(marked)
    while stack:
        v = stack.pop()
        if v in region or graph.of(v) is not Level.FORWARD:
            continue
        region.add(v)
        for i in graph.readers.get(v, ()):
            if graph.eqn_level[i] is Level.FORWARD and graph.eqns[i].primitive.name not in _PRODUCTS:
                stack.extend(graph.eqns[i].outvars)
    sizes = {math.prod(shape_of(v)) for v in marked}
    stack = list(marked)
    while stack:
        v = stack.pop()
        region.add(v)
        maker = graph.maker.get(v)
        if maker is not None and graph.eqns[maker].primitive.name not in _PRODUCTS:
            stack.extend(
                u for u in variables(graph.eqns[maker].invars) if math.prod(shape_of(u)) in sizes and u not in region
            )
    return frozenset(region)


def _made_by(graph: Graph, v: Var) -> str:
    return str(graph.eqns[graph.maker[v]].primitive.name)


POLICIES: Mapping[str, Callable[[Graph], Saveable]] = MappingProxyType(
    {
        "none": _none,
        "cheap": _cheap,
        "dots": _dots,
        "attention": _attention,
        "full": _full,
        "fused": _fused,
        "flash": _flash,
    }
)
"""Policies by name."""


def policy(name: str) -> Callable[[Graph], Saveable]:
    """The policy of this name.

    Raises:
        StageError: there is none.
    """
    if name not in POLICIES:
        raise StageError(f"recompute policy {name!r} does not exist; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
