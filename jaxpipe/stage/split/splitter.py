"""Cut a traced stage into F, B and W by dataflow.

Equations that no cotangent reaches are F. Of the others, those that ``dx`` depends on are B and the rest W; the values that
cross are the w-residuals. No equation of F runs again in B or W, except

* what depends on parameters and constants alone (casts, transposed weights, masks, folded keys): recomputed where it is needed,
  so that no residual holds a parameter or a function of parameters;
* views (reshape, broadcast, widening cast) of a value that is kept anyway: cheaper to redo than to keep;
* elementwise work whose operands take fewer bytes than what it makes (``split/residuals.py``);
* what a recompute policy forbids to save (``split/recompute.py``), recomputed once, in B if B needs it and in W if only
  W does.

Then :mod:`jaxpipe.stage.split.crossing` moves cheap equations from W to B where fewer bytes cross (reductions to bias and scale
gradients). A
``scan`` is divided like layers written out (``split/loops.py``); ``cond``, ``while`` and nested scans that yield both
``dx`` and parameter gradients go whole to B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np

from jaxpipe._jax_compat import Atom, JaxprEqn, Literal, Var, source_line, variables
from jaxpipe.stage.dataflow import called, reachable
from jaxpipe.stage.functions import Port
from jaxpipe.stage.split.crossing import cheapest_moves
from jaxpipe.stage.split.delay import delayed
from jaxpipe.stage.split.graph import Graph, Level, Part, Saveable
from jaxpipe.stage.split.loops import Loop, divide, is_mixed
from jaxpipe.stage.split.policies import FINDS
from jaxpipe.stage.split.recompute import Policy
from jaxpipe.stage.split.residuals import leanest
from jaxpipe.stage.split.trace import StageTrace


@dataclass(frozen=True, slots=True)
class Split:
    """The parts by operation name. ``notes``: remarks on what could not be divided."""

    parts: Mapping[str, Part]
    notes: tuple[str, ...] = ()


def split(trace: StageTrace, policy: Policy | None = None) -> Split:
    """F, B, W and BW of a traced stage. By default F may save anything."""
    graph = _divide_loops(Graph(trace))
    trace = graph.trace
    results = dict(trace.outputs)
    ys = [(p, a) for p, a in trace.outputs if p.kind in ("y", "loss")]
    dx = [(p, a) for p, a in trace.outputs if p.kind == "dx"]
    acc = [(p, a) for p, a in trace.outputs if p.kind == "acc"]

    effectful = [i for i, eqn in enumerate(graph.eqns) if eqn.effects]
    everything = graph.needed(results.values(), lambda i: True).union(effectful)
    backward = {i for i in everything if graph.eqn_level[i] is Level.BACKWARD}
    targets = [a for _, a in (*dx, *acc)]
    may_save = policy(graph) if policy is not None else (lambda v: True)
    if policy is None or not policy.exact:
        may_save = leanest(graph, _read(graph, backward, targets), may_save)
    saved, again = _save(graph, backward, targets, may_save)
    idle = _idle_parts(graph, backward, targets, policy) if policy is not None else ()
    backward |= again

    roots: list[Atom] = [a for _, a in dx] if dx else list(trace.roots)
    effects_b = [v for i in effectful if i in backward for v in variables(graph.eqns[i].invars)]
    b = graph.needed([*roots, *effects_b], backward.__contains__) | (backward & set(effectful))
    w = backward - b
    free = _free_for_w(graph, again)
    order = sorted(backward)
    b |= cheapest_moves(graph, w, free, {order[k] for k in graph.early([graph.eqns[i] for i in order])})
    w = backward - b
    crossing, redo = _crossing(graph, b, w, [a for _, a in acc], free)

    res = {v: Port("res", k) for k, v in enumerate(saved)}
    wres = {v: Port("wres", k) for k, v in enumerate(crossing)}
    saved_ports = [(p, v) for v, p in res.items()]
    crossing_ports = [(p, v) for v, p in wres.items()]
    forward_eqns = {i for i in effectful if graph.eqn_level[i] is not Level.BACKWARD}
    token: list[tuple[Port, Atom]] = [(Port("token"), _zero())]

    def is_forward(i: int) -> bool:
        return graph.eqn_level[i] is not Level.BACKWARD

    effects = backward & set(effectful)
    parts = {
        "F": _part(graph, [*ys, *saved_ports, *token], is_forward, {}, forward_eqns),
        "B": delayed(_part(graph, [*dx, *crossing_ports, *token], b.__contains__, res, effects), graph),
        "W": _part(graph, [*acc, *token], (w | redo).__contains__, {**res, **wres}),
        "BW": delayed(_part(graph, [*dx, *acc, *token], backward.__contains__, res, effects), graph),
    }
    return Split(parts, (*_notes(graph, b, roots, acc), *idle))


def _divide_loops(graph: Graph) -> Graph:
    """The trace with each backward scan that B and W share cut in two; several rounds, as one cut may free another loop."""
    trace = graph.trace
    outputs = [a for _, a in trace.outputs]
    roots = [a for p, a in trace.outputs if p.kind == "dx"] or list(trace.roots)
    live = graph.needed(outputs, lambda i: True)
    b = graph.needed(roots, lambda i: graph.eqn_level[i] is Level.BACKWARD)
    for_b = {v for i in b for v in variables(graph.eqns[i].invars)}.union(variables(roots))
    used = {v for i in live for v in variables(graph.eqns[i].invars)}.union(variables(outputs))
    eqns: list[JaxprEqn] = []
    recomputed: set[int] = set()
    names: dict[Var, Atom] = {}
    for i, eqn in enumerate(graph.eqns):
        eqn = eqn.replace(invars=[called(names, a) for a in eqn.invars])
        loop = Loop.of(eqn) if i in b else None
        halves = divide(loop, for_b.__contains__, (used - for_b).__contains__) if loop is not None else None
        if halves is not None:
            names.update(halves[1])
        for new in halves[0] if halves is not None else [eqn]:
            if i in trace.recomputed:
                recomputed.add(len(eqns))
            eqns.append(new)
    if not names:
        return graph
    divided = dataclasses.replace(
        trace,
        eqns=tuple(eqns),
        recomputed=frozenset(recomputed),
        outputs=tuple((p, called(names, a)) for p, a in trace.outputs),
        roots=tuple(called(names, a) for a in trace.roots),
        layer_inputs=tuple(called(names, a) for a in trace.layer_inputs),
        layer_cotangents=tuple((layer, called(names, a)) for layer, a in trace.layer_cotangents),
        named=tuple((name, called(names, a)) for name, a in trace.named),
    )
    return _divide_loops(Graph(divided))


def _read(graph: Graph, backward: set[int], targets: Sequence[Atom]) -> list[Var]:
    """Return the values that the backward equations read, and those of ``targets`` that they might not make."""
    read = [v for i in sorted(backward, reverse=True) for v in variables(graph.eqns[i].invars)]
    return read + list(variables(targets))


def _save(graph: Graph, backward: set[int], targets: Sequence[Atom], may_save: Saveable) -> tuple[list[Var], set[int]]:
    """Return what F saves for the backward equations, and the forward equations that run again instead."""

    def forward(atoms: Iterable[Atom]) -> Iterator[Var]:
        return (v for v in variables(atoms) if graph.of(v) is Level.FORWARD)

    @cache
    def kept(v: Var) -> bool:
        return bool(graph.eqns[graph.maker[v]].effects) or (graph.view_base(v) is None and may_save(v))

    def operands(v: Var) -> Iterable[Var]:
        return () if v not in graph.maker or kept(v) else forward(graph.eqns[graph.maker[v]].invars)

    read = reachable(forward(_read(graph, backward, targets)), operands)
    values = [v for v in graph.maker if v in read]  # x, data and keys have their own ports
    return list(filter(kept, values)), {graph.maker[v] for v in values if not kept(v)}


def _idle_parts(graph: Graph, backward: set[int], targets: Sequence[Atom], policy: Policy) -> tuple[str, ...]:
    """Remarks on parts of a policy under which F saves all that it would save without."""
    everything, _ = _save(graph, backward, targets, Policy(("none",))(graph))
    if not everything:
        return ()
    loops = {graph.eqns[graph.maker[v]].primitive.name for v in everything} & {"scan", "while"}
    hint = " (a loop is one equation to it: use jax.checkpoint in its body, or full)" if loops else ""
    return tuple(
        f"recompute={name} finds {FINDS.get(name, 'nothing')} and recomputes nothing{hint}"
        for name, may_save in policy.alone(graph).items()
        if _save(graph, backward, targets, may_save)[0] == everything
    )


def _free_for_w(graph: Graph, again: set[int]) -> Callable[[Var], bool]:
    """Whether W has a value at no cost in memory: fixed values, batch arrays, keys, accumulators."""
    kinds = {"param", "data", "key", "acc"}

    def free(v: Var) -> bool:
        kind = graph.port_kind(v)
        return kind in kinds if kind else graph.of(v) is Level.FIXED or v is graph.trace.seed

    return free


def _crossing(
    graph: Graph, b: set[int], w: set[int], targets: Sequence[Atom], free: Callable[[Var], bool]
) -> tuple[list[Var], set[int]]:
    """Values that B hands to W, and views that W makes again from them."""

    def missing(vs: Iterable[Var]) -> Iterator[Var]:
        return (v for v in vs if not free(v) and graph.maker.get(v) not in w)

    def bases(v: Var) -> Iterator[Var]:
        base = graph.view_base(v) if graph.maker.get(v) in b else None
        return missing([] if base is None else [base])

    read = [v for i in sorted(w) for v in variables(graph.eqns[i].invars)] + list(variables(targets))
    reached = reachable(missing(read), bases)
    values = [v for v in graph.maker if v in reached and graph.maker[v] in b]
    cotangents = [v for v in graph.trace.inputs if v in reached and graph.port_kind(v) == "dy"]
    redo = {graph.maker[v] for v in values if graph.is_view(v)}
    return cotangents + [v for v in values if not graph.is_view(v)], redo


def _part(
    graph: Graph,
    outputs: Sequence[tuple[Port, Atom]],
    mine: Callable[[int], bool],
    crossing_ports: Mapping[Var, Port],
    always: Iterable[int] = (),
) -> Part:
    """The part that computes ``outputs`` from ``given`` ports, inputs of the stage and fixed values."""
    ports = {**graph.trace.inputs, **crossing_ports}

    def among(i: int) -> bool:
        return mine(i) or graph.eqn_level[i] is Level.FIXED

    roots = [a for _, a in outputs] + [a for i in always for a in graph.eqns[i].invars]
    chosen = sorted(
        graph.needed([a for a in roots if not isinstance(a, Var) or a not in crossing_ports], among) | set(always)
    )
    eqns = tuple(graph.eqns[i] for i in chosen)
    computed = {v for eqn in eqns for v in eqn.outvars}
    read = {v for eqn in eqns for v in variables(eqn.invars)} | set(variables(a for _, a in outputs))
    invars = sorted((v for v in read - computed if v in ports), key=lambda v: _port_order(ports[v]))
    unknown = [v for v in read - computed if v not in ports and v not in graph.trace.consts]
    layer_inputs = {graph.trace.offset, graph.trace.seed}
    assert all(v in layer_inputs for v in unknown), "a part reads a value that no port carries"
    return Part(
        tuple(ports[v] for v in invars),
        tuple(invars),
        tuple(p for p, _ in outputs),
        tuple(a for _, a in outputs),
        eqns,
    )


_KINDS = ("param", "x", "data", "key", "res", "wres", "dy", "acc")


def _port_order(port: Port) -> tuple[int, int]:
    return _KINDS.index(port.kind), port.index


def _zero() -> Literal:
    return Literal(np.float32(0), jax.core.ShapedArray((), np.dtype(np.float32)))


def _notes(graph: Graph, b: set[int], roots: Sequence[Atom], acc: Sequence[tuple[Port, Atom]]) -> tuple[str, ...]:
    """Remarks on loops and branches in B that also make what only W reads."""
    only_w = graph.needed([a for _, a in acc], lambda i: i not in b)
    for_b = {v for i in b for v in variables(graph.eqns[i].invars)}.union(variables(roots))
    for_w = {v for i in only_w for v in variables(graph.eqns[i].invars)} - for_b
    return tuple(
        dict.fromkeys(
            f"{eqn.primitive.name} at {source_line(eqn)} computes dx and parameter gradients together: it is in B whole"
            for eqn in (graph.eqns[i] for i in sorted(b))
            if is_mixed(eqn, for_b.__contains__, for_w.__contains__)
        )
    )
