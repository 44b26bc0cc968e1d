"""The rules of recompute policies: what F may save for the backward pass.

A policy decides, per value of the forward pass, whether it may be kept. What may not be kept is computed again from what is,
once: in B if ``dx`` needs it, in W if only parameter gradients do; what both need, B hands to W. The decision is made on the
traced graph, after differentiation, so it needs no ``jax.checkpoint`` in the model (one inside a layer is honoured) and sees
the whole stage.

=============  ==================================================================================================
``none``       recompute no product, reduction, mask or exchange; elementwise work where fewer bytes are then saved
               (``split/graph.py``)
``cheap``      recompute elementwise work, reductions and random masks (norms, activations, gates, dropout, softmax);
               save results of matrix products, convolutions, gathers, sorts and loops; of a product in float32 that is only
               read in bfloat16, the latter
``dots``       save results of matrix products, convolutions and collectives, and inputs of layers, nothing else
``attention``  recompute attention scores and all of their size made from them: from a product of two activations, through
               softmax, masks, dropout or whatever else works on them, to a product with another activation, found on the graph;
               and values that a layer marks with ``checkpoint_name(x, "attn_scores")``, back to the product that makes them and
               on to the one that uses them
``mlp``        recompute the hidden values of multi-layer perceptrons: results of products with parameters from which
               everything goes, elementwise, into products with parameters (so not the residual stream, which leaves the layer,
               and not q, k and v, which are multiplied with each other). Found on the graph: GELU and SwiGLU blocks, experts,
               low-rank projections.
``full``       save inputs of layers only; cuDNN's attention kernel, to the others a product whose results are kept, runs again
``experts``    save inputs of layers, what was exchanged all to all, and results of sorts and top-k: as ``full``, but nothing is
               sent to experts and back again, nor are they chosen again
``fused``      save what a framework of kernels fused by hand saves (Megatron-LM with its own attention): inputs of layers,
               operands and results of products, random masks, attention probabilities: 34 bsh + 5 abs² bytes for a 16-bit GPT
               layer with dropout (Korthikanti et al. 2023). Only elementwise work runs again. The papers' "no recomputation"
``flash``      ``fused+attention``: what such a framework with flash attention saves, 34 bsh
``gather``     gather over time again: with sequence parallelism inputs of products, of which each shard keeps its own part, as
               Megatron-LM does (Korthikanti et al. 2022), for one more all-gather a product in W
=============  ==================================================================================================

What is gathered over devices that divide positions, keys and values, is gathered again whatever the policy, so that activations
halve where positions are divided over twice as many devices; as in Transformer Engine.

Names joined by ``+`` recompute what any of them does; all but ``fused`` and ``flash`` save of what is left no more than they
need, as ``none`` does. The layer inputs of a stage are its own ``x`` and the inexact values between its layers. Where a part of
a policy changes nothing in a stage, the stage has a note that says so. A loop (``scan``) is one equation here: what its forward
pass saves per iteration is decided by a ``jax.checkpoint`` in its body, not by a policy; ``full`` runs the whole loop again.

Paper: ``pipeoffload.txt`` appendix C recomputes norms, GeLU and dropout masks, which leaves 20 of 34 bytes per token and
channel beside attention; ``cheap`` on the GPT layer leaves the same 20 (inputs of both norms 2 + 2, q, k and v 6, attention's
output 2, GeLU's input 8), and what attention keeps: 2 per score, none with ``cheap+attention`` or a fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from jaxpipe._jax_compat import JaxprEqn, Var, aval_bytes, dtype_of, shape_of, variables
from jaxpipe.axes import TIME
from jaxpipe.stage.jaxprs import EqnKind, has_body, is_attention_kernel, is_cheap, is_product, kind, reachable, row
from jaxpipe.stage.split.graph import Graph, Level, Saveable
from jaxpipe.stage.split.policies import POLICIES, ingredients

__all__ = ["ATTENTION_SCORES", "POLICIES", "policy"]

ATTENTION_SCORES = "attn_scores"
"""The name by which a layer marks its attention scores."""
ATTENTION_RESULTS = "attn_results"
"""The name by which a layer marks what its attention wants kept: what it gathers, and what a backward pass of its own reads.
Every policy but ``full`` may save it."""

_UNWORKED = frozenset({EqnKind.CAST, EqnKind.MOVE, EqnKind.RESHAPE, EqnKind.SAME, EqnKind.BARRIER})
"""Kinds of equations that change no number: a value between two products that only goes through these is no attention score."""


def _dots(graph: Graph) -> Saveable:
    # Inputs of layers are sums, which it would recompute: through them the whole stage would run again.
    keep = frozenset(variables(graph.trace.layer_inputs))

    def saveable(v: Var) -> bool:
        return v in keep or _made_by(graph, v) in (EqnKind.PRODUCT, EqnKind.EXCHANGE) or _is_narrowed_product(graph, v)

    return saveable


def _cheap(graph: Graph) -> Saveable:
    keep = frozenset(variables(graph.trace.layer_inputs))

    def saveable(v: Var) -> bool:
        return v in keep or not is_cheap(graph.eqns[graph.maker[v]]) or _is_narrowed_product(graph, v)

    return saveable


def _experts(graph: Graph) -> Saveable:
    keep = set(variables(graph.trace.layer_inputs))
    for eqn in graph.eqns:
        if row(eqn).exchange == "all-to-all" or eqn.primitive.name in ("sort", "top_k"):
            keep.update(eqn.outvars)
    return keep.__contains__


def _fused(graph: Graph) -> Saveable:
    keep = {*variables(graph.trace.layer_inputs), *_marked(graph)}
    for eqn, level in zip(graph.eqns, graph.eqn_level, strict=True):
        if level is Level.FORWARD and is_product(eqn):
            keep.update(eqn.outvars)
            # An operand that is a view is saved as what it is a view of.
            for operand in variables(eqn.invars):
                keep.update(_views(graph, operand))
    return lambda v: v in keep or dtype_of(v) == np.bool_ or _made_by(graph, v) is EqnKind.EXCHANGE


def _score_region(graph: Graph) -> frozenset[Var]:
    """Return values of the size of attention scores, marked or found; with marked ones, all that is made from them before the
    next products."""
    marked = _marked(graph)

    def onwards(v: Var) -> Iterator[Var]:
        for eqn in _readers(graph, v):
            if not is_product(eqn):
                yield from eqn.outvars

    region = reachable((v for v in marked if graph.of(v) is Level.FORWARD), onwards)
    sizes = {math.prod(shape_of(v)) for v in marked}

    def back(v: Var) -> Iterator[Var]:
        maker = graph.maker.get(v)
        if maker is not None and not is_product(graph.eqns[maker]):
            operands = variables(graph.eqns[maker].invars)
            yield from (u for u in operands if math.prod(shape_of(u)) in sizes and u not in region)

    return frozenset(region | reachable(marked, back) | _found_scores(graph))


def _marked(graph: Graph, mark: str = ATTENTION_SCORES) -> list[Var]:
    return list(variables(a for name, a in graph.trace.named if name == mark))


def _views(graph: Graph, v: Var) -> Iterator[Var]:
    """Yield a value and what it is a view of; only the last can be saved."""
    view: Var | None = v
    while view is not None:
        yield view
        view = graph.view_base(view)


def _gathered(graph: Graph, axes: Collection[str] = ()) -> frozenset[Var]:
    """Return the values that were gathered (over one of ``axes``), and the same numbers in other places, shapes or dtypes."""
    # In program order, so operands are classified before what moves them.
    gathered: set[Var] = set()
    for eqn in graph.eqns:
        operands = set(variables(eqn.invars))
        moves = kind(eqn) in _UNWORKED and bool(operands)
        gathers = row(eqn).exchange == "all-gather" and (not axes or not set(axes).isdisjoint(eqn.params["axis_name"]))
        if gathers or (moves and operands <= gathered):
            gathered.update(eqn.outvars)
    return frozenset(gathered)


def _found_scores(graph: Graph) -> set[Var]:
    """Find results of products of two activations that reach another such product with the size they have, worked on, and all
    of that size that is connected with them by anything but products."""
    # By structure, not by name: softmax may be a library's, a kernel's fallback, or written out with masks and biases.
    scores: set[Var] = set()
    for eqn, level in zip(graph.eqns, graph.eqn_level, strict=True):
        if level is Level.FORWARD and _is_of_activations(graph, eqn) and not scores.intersection(eqn.outvars):
            near, is_score = _same_size(graph, eqn.outvars[0])
            scores |= near if is_score else set()
    return scores


def _same_size(graph: Graph, start: Var) -> tuple[set[Var], bool]:
    """Return values of one size connected with a product's result by equations that are no products, loops or exchanges; and
    whether they are worked on and go to a product of two activations."""
    size = math.prod(shape_of(start))

    def connecting(v: Var) -> list[JaxprEqn]:
        makers = [graph.eqns[graph.maker[v]]] if v in graph.maker else []
        return [
            eqn
            for eqn in (*_readers(graph, v), *makers)
            if kind(eqn) not in (EqnKind.PRODUCT, EqnKind.EXCHANGE) and not has_body(eqn)
        ]

    def near(v: Var) -> Iterator[Var]:
        ends = variables(a for eqn in connecting(v) for a in (*eqn.invars, *eqn.outvars))
        return (u for u in ends if graph.of(u) is Level.FORWARD and math.prod(shape_of(u)) == size)

    region = reachable([start], near)
    used = any(_is_of_activations(graph, eqn) for v in region for eqn in _readers(graph, v))
    return region, used and any(_works(eqn) for v in region for eqn in connecting(v))


def _readers(graph: Graph, v: Var) -> list[JaxprEqn]:
    """Return the equations of the forward pass that read a value."""
    return [graph.eqns[i] for i in graph.readers.get(v, ()) if graph.eqn_level[i] is Level.FORWARD]


def _works(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than move or scale its operand."""
    # Scaling q·k by 1/√d, before or after the product, makes no score of a plain product chain.
    if eqn.primitive.name in ("mul", "div", "neg"):
        return sum(math.prod(shape_of(a)) > 1 for a in eqn.invars) > 1
    return kind(eqn) not in _UNWORKED


def _is_of_activations(graph: Graph, eqn: JaxprEqn) -> bool:
    """Whether the equation multiplies two values that depend on the microbatch."""
    return is_product(eqn) and all(graph.of(a) is Level.FORWARD for a in eqn.invars[:2])


def _hidden_values(graph: Graph) -> frozenset[Var]:
    """Return results of products with parameters from which everything goes into products with parameters, and what is made on
    the way there."""
    # The residual stream also lies between such products, but it leaves its layer: whatever reaches a layer's end is no hidden
    # value.
    leaving = {a for port, a in graph.trace.outputs if port.kind in ("y", "loss") and isinstance(a, Var)}
    leaving.update(variables(graph.trace.layer_inputs))
    hidden: set[Var] = set()
    for eqn, level in zip(graph.eqns, graph.eqn_level, strict=True):
        if level is Level.FORWARD and _is_projection(graph, eqn):
            hidden |= _reach(graph, eqn.outvars, leaving)
    return frozenset(hidden)


def _reach(graph: Graph, start: list[Var], leaving: set[Var]) -> set[Var]:
    """Return ``start`` and all made from it before the next products with parameters; nothing if it gets anywhere else."""

    def is_end(eqn: JaxprEqn) -> bool:
        return is_product(eqn) or bool(eqn.effects) or has_body(eqn)

    def onwards(v: Var) -> Iterator[Var]:
        on = () if v in leaving else _readers(graph, v)
        return (u for eqn in on if not is_end(eqn) for u in eqn.outvars)

    reach = reachable(start, onwards)
    ends = [eqn for v in reach for eqn in _readers(graph, v) if is_end(eqn)]
    stays = reach.isdisjoint(leaving) and all(_is_projection(graph, eqn) for eqn in ends)
    return reach if ends and stays else set()


def _is_projection(graph: Graph, eqn: JaxprEqn) -> bool:
    """Whether the equation multiplies with parameters, or functions of them."""
    return is_product(eqn) and any(graph.of(a) is Level.FIXED for a in eqn.invars[:2])


def _is_narrowed_product(graph: Graph, v: Var) -> bool:
    """Whether ``v`` is all that is read of a product computed in a wider type (``preferred_element_type``)."""
    i = graph.maker[v]
    if graph.eqns[i].primitive.name != "convert_element_type":
        return False
    (wide,) = graph.eqns[i].invars
    return (
        isinstance(wide, Var)
        and wide in graph.maker
        and _made_by(graph, wide) is EqnKind.PRODUCT
        and graph.readers[wide] == [i]
        and aval_bytes(v.aval) < aval_bytes(wide.aval)
    )


def _made_by(graph: Graph, v: Var) -> EqnKind:
    return kind(graph.eqns[graph.maker[v]])


def _all_but(again: frozenset[Var]) -> Saveable:
    return lambda v: v not in again


_RULES: Mapping[str, Callable[[Graph], Saveable]] = MappingProxyType(
    {
        "none": lambda graph: lambda v: True,
        "cheap": _cheap,
        "dots": _dots,
        "attention": lambda graph: _all_but(_score_region(graph)),
        "mlp": lambda graph: _all_but(_hidden_values(graph)),
        "full": lambda graph: frozenset(variables(graph.trace.layer_inputs)).__contains__,
        "experts": _experts,
        "fused": _fused,
        "flash": lambda graph: RecomputePolicy(("fused", "attention"))(graph),
        "gather": lambda graph: _all_but(_gathered(graph)),
    }
)
assert _RULES.keys() == POLICIES.keys()


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """A rule for what F may save in a graph: what each of ``parts`` allows."""

    parts: tuple[str, ...]

    def __call__(self, graph: Graph) -> Saveable:
        tests = [_RULES[part](graph) for part in self.parts]
        marked = [] if "full" in self.parts else _marked(graph, ATTENTION_RESULTS)
        saved = {v for mark in marked for v in _views(graph, mark)}
        again = _gathered(graph, TIME)
        return lambda v: v in saved or (v not in again and all(test(v) for test in tests))

    @property
    def exact(self) -> bool:
        """Whether F saves all that it may, though other values would follow from less."""
        return bool({"fused", "flash"} & set(self.parts))

    def alone(self, graph: Graph) -> Mapping[str, Saveable]:
        """Return the same part by part; for ``flash`` what it adds to ``fused``: nothing where a kernel keeps no scores."""
        added = "none" if any(map(is_attention_kernel, graph.eqns)) else "attention"
        parts = [added if part == "flash" else part for part in self.parts]
        return {part: RecomputePolicy((part,))(graph) for part in parts if part != "none"}


def policy(name: str) -> RecomputePolicy:
    """Return the policy of this name, or of several joined by ``+``.

    Raises:
        StageError: there is none.
    """
    return RecomputePolicy(ingredients(name))
