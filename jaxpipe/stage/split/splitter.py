"""Cuts a traced stage into F, B and W by dataflow.

Equations that no cotangent reaches are F. Of the others, those that ``dx`` depends on are B and the rest W; the values that
cross are the w-residuals. No equation of F runs again in B or W, except

* what depends on parameters and constants alone (casts, transposed weights, masks, folded keys): recomputed where it is needed,
  so that no residual holds a parameter or a function of parameters;
* views (reshape, broadcast, widening cast) of a value that is kept anyway: cheaper to redo than to keep;
* elementwise work whose operands take fewer bytes than what it makes (``split/graph.py``);
* what a recompute policy forbids to save (``split/recompute.py``), recomputed once, in B if B needs it and in W if only
  W does.

Then :mod:`jaxpipe.stage.split.graph` moves cheap equations from W to B where fewer bytes cross (reductions to bias and scale
gradients). A ``scan`` is divided like layers written out (``split/loops.py``); ``cond``, ``while`` and nested scans that yield
both ``dx`` and parameter gradients go whole to B.

:func:`delayed` reorders B and BW so that one layer at a time is worked on. What a backward program computes from residuals
alone could all run at its start, and XLA's scheduler does let it: compiled for H100, the workspace of BW of 1, 2 and 4 GPT
layers under ``full`` was 78, 162 and 286 bytes per token and channel, where ``none`` takes 38. So the equations that depend on
no cotangent are grouped by the layer whose backward pass needs them, moved behind the cotangent that enters it, and made to
depend on it through an ``optimization_barrier`` (as ``jax.checkpoint`` does when it is lowered; inlining the ones of the model
drops theirs). The arithmetic stays the same.

The scheduler also leaves products of weight gradients to the end, and what they read is held until then. So each such barrier
takes along the accumulators to which later layers have added all they add: the workspace of BW of 8 Llama layers under ``none``
with cuDNN's attention went from 2,178 to 415 MB (hidden 4096, 2048 tokens), and no longer grows with the layers.

A group made only of views (reshape, broadcast, widening cast) is left where it is; so is the group of the stage's last layer,
whose cotangent is there from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np

from jaxpipe._jax_compat import (
    Atom,
    JaxprEqn,
    Literal,
    Var,
    barrier,
    dtype_of,
    fresh_var,
    is_key_dtype,
    source_line,
    variables,
)
from jaxpipe.stage.functions import Port
from jaxpipe.stage.jaxprs import called, reachable
from jaxpipe.stage.split.graph import Graph, Level, Saveable, StagePart, cheapest_moves, leanest
from jaxpipe.stage.split.loops import Loop, divide, is_mixed
from jaxpipe.stage.split.policies import FINDS
from jaxpipe.stage.split.recompute import RecomputePolicy
from jaxpipe.stage.split.trace import StageTrace, layer_of

_NEVER = -1
"""Group of what nothing needs yet; any layer comes before it."""


def delayed(part: StagePart, graph: Graph) -> StagePart:
    """Return ``part``, a B or BW cut from ``graph``, with recomputation moved behind cotangents."""
    cotangents: dict[int, list[Var]] = {}
    for layer, a in graph.trace.layer_cotangents:
        cotangents.setdefault(layer, []).extend(variables([a]))
    outputs = {v for eqn in part.eqns for v in eqn.outvars}
    waiting: dict[int, list[int]] = {}
    for k, g in sorted(_groups(part, graph).items()):
        if cotangents.get(g) and outputs.issuperset(cotangents[g]):
            waiting.setdefault(g, []).append(k)
    views = {k for k, eqn in enumerate(part.eqns) if all(map(graph.is_view, eqn.outvars))}
    waiting = {g: ks for g, ks in waiting.items() if not views.issuperset(ks)}
    # Where a group can't be placed, the part stays as it is: slower at worst, never wrong.
    order = _Reordering(part, waiting, cotangents, graph)
    eqns = order.run() if waiting else None
    if eqns is None:
        return part
    return replace(part, eqns=tuple(eqns), outvars=tuple(called(order.names, a) for a in part.outvars))


def _groups(part: StagePart, graph: Graph) -> dict[int, int]:
    """Return the last layer that needs each early equation; absent where that is not known."""
    unknown = 1 << 30
    early = {k for k in graph.early(part.eqns) if not all(map(graph.is_fixed, part.eqns[k].outvars))}
    need: dict[Var, int] = {}
    group: dict[int, int] = {}
    results = set(variables(part.outvars))
    # From the end, as an equation's layer follows from its readers'. The last layer counts: the backward pass comes to it
    # first.
    for k in reversed(range(len(part.eqns))):
        eqn = part.eqns[k]
        layer = layer_of(eqn)
        layer_of_eqn = unknown if layer is None else layer
        if k in early:
            layers = [layer_of_eqn] if not results.isdisjoint(eqn.outvars) else []
            layer_of_eqn = max((*layers, *(need.get(v, _NEVER) for v in eqn.outvars)), default=unknown)
            group[k] = layer_of_eqn
        for v in variables(eqn.invars):
            need[v] = max(need.get(v, _NEVER), layer_of_eqn)
    return {k: g for k, g in group.items() if g != unknown}


class _Reordering:
    """Puts equations in a new order. ``waiting``: positions of each group's equations, until it is placed; ``sums``: new values
    of accumulators, until a barrier takes them; ``names``: the variables of values behind a barrier."""

    def __init__(
        self, part: StagePart, waiting: dict[int, list[int]], cotangents: Mapping[int, Sequence[Var]], graph: Graph
    ) -> None:
        self.part, self.waiting, self.cotangents, self.graph = part, waiting, cotangents, graph
        self.group_of = {v: g for g, ks in waiting.items() for k in ks for v in part.eqns[k].outvars}
        self.sums = [
            a for p, a in zip(part.outputs, part.outvars, strict=True) if p.kind == "acc" and isinstance(a, Var)
        ]
        self.layers = [layer_of(eqn) for eqn in part.eqns]
        self.maker = {v: k for k, eqn in enumerate(part.eqns) for v in eqn.outvars}
        self.early: set[int] = set()
        self.out: list[JaxprEqn] = []
        self.done: set[Var] = {*part.invars}
        self.names: dict[Var, Var] = {}

    def run(self) -> list[JaxprEqn] | None:
        """Return the equations in the new order; None where a group is needed before its cotangents are there."""
        delayed = {k for ks in self.waiting.values() for k in ks}
        for k, eqn in enumerate(self.part.eqns):
            if k in delayed or k in self.early:
                continue
            if not self._ready(eqn.invars):
                return None
            self._emit(eqn, self.names)
        # Groups that nothing else waited for come last, in the order in which the backward pass walks the layers.
        return self.out if all(self._placed(g) for g in sorted(self.waiting, reverse=True)) else None

    def _ready(self, atoms: Iterable[Atom]) -> bool:
        """Whether the delayed groups that these values belong to have been, or now can be, placed."""
        return all(self._placed(self.group_of[v]) for v in variables(atoms) if v in self.group_of)

    def _placed(self, g: int) -> bool:
        eqns = [self.part.eqns[k] for k in self.waiting.pop(g, ())]
        if not eqns:
            return True
        outputs = {v for eqn in eqns for v in eqn.outvars}
        reads = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in outputs and self._held(v))
        ends = self.cotangents[g]
        if not self._ready(reads) or not self._brought(eqns) or not self.done.issuperset(ends):
            return False
        # Behind the barrier: what the group reads, so that it can't run earlier; the cotangents, so that the layer's own
        # backward does not overtake it; and finished accumulators, so that their products are not left to the end.
        named = [*ends, *self._summed(g)]
        operands = [*reads, *(self.names.get(v, v) for v in named)]
        results = [fresh_var(v.aval) for v in operands]
        self.out.append(barrier(operands, results))
        behind = dict(zip(reads, results, strict=False))
        self.names.update(zip(named, results[len(reads) :], strict=True))
        for eqn in eqns:
            self._emit(eqn, behind)
        return True

    def _brought(self, eqns: Sequence[JaxprEqn]) -> bool:
        """Emit what these equations of one group read that is in none and stands further back: a group's equations may stand
        between others, which use their results one after another."""
        read = [v for eqn in eqns for v in variables(eqn.invars)]
        missing = reachable(read, self._missing) - self.done
        behind = sorted({self.maker[v] for v in missing if v in self.maker and v not in self.group_of})
        if not self._ready(v for k in behind for v in variables(self.part.eqns[k].invars)):
            return False
        self.early.update(behind)
        for k in behind:
            self._emit(self.part.eqns[k], self.names)
        return True

    def _summed(self, g: int) -> list[Var]:
        """Return the accumulators that need nothing of layer ``g`` and those before it, after emitting what they still need."""
        finished_sums = []
        for v in self.sums:
            missing = reachable([v], self._missing) - self.done
            eqns = sorted({self.maker[u] for u in missing if u in self.maker})
            layers = [self.layers[k] for k in eqns]
            if (
                v in self.maker
                and not any(n is not None and n <= g for n in layers)
                and missing.isdisjoint(self.group_of)
            ):
                finished_sums.append(v)
                self.early.update(eqns)
                for k in eqns:
                    self._emit(self.part.eqns[k], self.names)
        self.sums = [v for v in self.sums if v not in finished_sums]
        return finished_sums

    def _missing(self, v: Var) -> Iterable[Var]:
        return variables(self.part.eqns[self.maker[v]].invars) if v in self.maker and v not in self.done else ()

    def _held(self, v: Var) -> bool:
        # Fixed values stay outside the barrier, but keys: random bits drawn from them are part of what a group recomputes.
        return not self.graph.is_fixed(v) or is_key_dtype(dtype_of(v))

    def _emit(self, eqn: JaxprEqn, names: Mapping[Var, Var]) -> None:
        self.out.append(eqn.replace(invars=[called(names, a) for a in eqn.invars]))
        self.done.update(eqn.outvars)


@dataclass(frozen=True, slots=True)
class Split:
    """The parts by operation name. ``notes``: remarks on what could not be divided."""

    parts: Mapping[str, StagePart]
    notes: tuple[str, ...] = ()


def split(trace: StageTrace, policy: RecomputePolicy | None = None) -> Split:
    """Cut F, B, W and BW of a traced stage. By default F may save anything."""
    graph = _divide_loops(Graph(trace))
    trace = graph.trace
    results = dict(trace.outputs)
    ys = [(p, a) for p, a in trace.outputs if p.kind in ("y", "loss")]
    dx = [(p, a) for p, a in trace.outputs if p.kind == "dx"]
    acc = [(p, a) for p, a in trace.outputs if p.kind == "acc"]

    # Equations with effects (callbacks) run exactly once, needed or not.
    effectful = [i for i, eqn in enumerate(graph.eqns) if eqn.effects]
    everything = graph.needed(results.values(), lambda i: True).union(effectful)
    backward = {i for i in everything if graph.eqn_level[i] is Level.BACKWARD}
    targets = [a for _, a in (*dx, *acc)]
    may_save = policy(graph) if policy is not None else (lambda v: True)
    # First the cut F|B: what F saves decides which of its equations are backward ones too.
    if policy is None or not policy.exact:
        may_save = leanest(graph, _read(graph, backward, targets), may_save)
    saved, again = _save(graph, backward, targets, may_save)
    idle = _idle_parts(graph, backward, targets, policy) if policy is not None else ()
    backward |= again

    # Then B: what dx needs. A first stage has no dx; without roots of its own its B would be empty, and all work would be in W.
    roots: list[Atom] = [a for _, a in dx] if dx else list(trace.roots)
    effects_b = [v for i in effectful if i in backward for v in variables(graph.eqns[i].invars)]
    b = graph.needed([*roots, *effects_b], backward.__contains__) | (backward & set(effectful))
    w = backward - b
    # Last the cut B|W. Recomputed equations that depend on no cotangent may move whatever they cost: they are F's, not W's.
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
    """Cut each backward scan that B and W share in two; in several rounds, as one cut may free another loop."""
    trace = graph.trace
    outputs = [a for _, a in trace.outputs]
    roots = [a for p, a in trace.outputs if p.kind == "dx"] or list(trace.roots)
    live = graph.needed(outputs, lambda i: True)
    b = graph.needed(roots, lambda i: graph.eqn_level[i] is Level.BACKWARD)
    for_b = {v for i in b for v in variables(graph.eqns[i].invars)}.union(variables(roots))
    used = {v for i in live for v in variables(graph.eqns[i].invars)}.union(variables(outputs))
    # Results of a scan that was cut have new variables, so everything behind it, and every field of the trace, is renamed.
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

    # An equation with effects must not run twice, whatever a policy says of its results.
    @cache
    def kept(v: Var) -> bool:
        return bool(graph.eqns[graph.maker[v]].effects) or (graph.view_base(v) is None and may_save(v))

    def operands(v: Var) -> Iterable[Var]:
        return () if v not in graph.maker or kept(v) else forward(graph.eqns[graph.maker[v]].invars)

    read = reachable(forward(_read(graph, backward, targets)), operands)
    # Only what equations make: x, data and keys come back through ports of their own.
    values = [v for v in graph.maker if v in read]
    return list(filter(kept, values)), {graph.maker[v] for v in values if not kept(v)}


def _idle_parts(graph: Graph, backward: set[int], targets: Sequence[Atom], policy: RecomputePolicy) -> tuple[str, ...]:
    """Write remarks on parts of a policy under which F saves all that it would save without."""
    everything, _ = _save(graph, backward, targets, RecomputePolicy(("none",))(graph))
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
    """Return a test whether W has a value at no cost in memory: fixed values, batch arrays, keys, accumulators."""
    kinds = {"param", "data", "key", "acc"}

    def free(v: Var) -> bool:
        kind = graph.port_kind(v)
        return kind in kinds if kind else graph.of(v) is Level.FIXED or v is graph.trace.seed

    return free


def _crossing(
    graph: Graph, b: set[int], w: set[int], targets: Sequence[Atom], free: Callable[[Var], bool]
) -> tuple[list[Var], set[int]]:
    """Return the values that B hands to W, and the equations of views that W makes again from them."""

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
) -> StagePart:
    """Make the part that computes ``outputs`` from ``crossing_ports``, inputs of the stage and fixed values, of the equations
    that are ``mine`` and the fixed ones, which any part may repeat."""
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
    # In the order of the ports, as a set has none: equal parts must have equal signatures to be compiled once.
    invars = sorted((v for v in read - computed if v in ports), key=lambda v: _port_order(ports[v]))
    unknown = [v for v in read - computed if v not in ports and v not in graph.trace.consts]
    layer_inputs = {graph.trace.offset, graph.trace.seed}
    assert all(v in layer_inputs for v in unknown), "a part reads a value that no port carries"
    return StagePart(
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
    """Write remarks on loops and branches in B that also make what only W reads."""
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
