"""Divides ``scan`` equations, so that a loop over layers is cut into F, B and W like layers written out.

Two rewrites of a flat list of equations, both exact:

* :func:`hoist_fixed` takes results that do not depend on the microbatch out of a scan. Differentiating a loop over stacked
  weights makes the forward scan return the weights (or casts and products of them) as stacked residuals; those that merely hand
  an operand on become that operand, the others a scan of their own over parameters, recomputed where needed.
  A ``cond`` returns the weights of its branches too (where another branch leaves them unset): they become the operand.
* :func:`divide` cuts a backward scan, which yields the cotangent of its input and the gradients of its weights, into one that
  only walks the cotangent chain and stacks what the gradients need of each iteration, and one that makes the gradients.

Not divided: a scan whose body holds another mixed loop, ``cond`` and ``while``; they go whole to B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    ScanParts,
    Var,
    close_jaxpr,
    dtype_of,
    eval_jaxpr,
    fresh_var,
    pruned,
    scan_parts,
    shape_of,
    sub_jaxprs,
    variables,
    with_outer_names,
)
from jaxpipe.stage.jaxprs import Dataflow, called, flatten, has_body, reachable

Operand = tuple[Var, Atom]
"""A variable of a loop body and what the loop feeds it."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A scan taken apart. ``consts``, ``carries`` and ``xs`` pair body variables with operands; ``carry_outs`` and ``ys`` pair
    body results with the scan's results."""

    eqn: JaxprEqn
    parts: ScanParts
    consts: tuple[Operand, ...]
    carries: tuple[Operand, ...]
    xs: tuple[Operand, ...]
    carry_outs: tuple[tuple[Atom, Var], ...]
    ys: tuple[tuple[Atom, Var], ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Loop | None:
        """Return the loop of a scan equation with a flattened body, None for other equations."""
        parts = scan_parts(eqn)
        if parts is None or parts.body_consts:
            return None
        ins = tuple(zip(parts.body.invars, eqn.invars, strict=True))
        outs = tuple(zip(parts.body.outvars, eqn.outvars, strict=True))
        c, k = parts.num_consts, parts.num_carry
        return cls(eqn, parts, ins[:c], ins[c : c + k], ins[c + k :], outs[:k], outs[k:])

    def needed(self, is_read: Callable[[Var], bool]) -> tuple[set[int], set[int]]:
        """Return the body equations and carry positions on which those results of the scan depend that are read, over all
        iterations."""
        # A carry leads back from where an iteration reads it to where the one before made it, so one walk covers all
        # iterations.
        flow = Dataflow(self.parts.body.eqns)
        again = {v: out for (v, _), (out, _) in zip(self.carries, self.carry_outs, strict=True)}

        def near(v: Var) -> Iterable[Var]:
            operands = flow.eqns[flow.maker[v]].invars if v in flow.maker else ()
            return variables([*operands, *([again[v]] if v in again else ())])

        reached = reachable(variables(a for a, v in (*self.carry_outs, *self.ys) if is_read(v)), near)
        ends = zip(self.carries, self.carry_outs, strict=True)
        carries = {j for j, ((v, _), (_, end)) in enumerate(ends) if v in reached or is_read(end)}
        return {flow.maker[v] for v in reached if v in flow.maker}, carries

    def loop_over(
        self,
        eqns: Iterable[int],
        carries: Sequence[int],
        ys: Sequence[tuple[Atom, Atom]],
        more_xs: Sequence[Operand] = (),
    ) -> tuple[list[JaxprEqn], dict[Var, Atom]]:
        """Build a scan of these body equations with these carries. ``ys``: body result and the variable that names it stacked.

        Returns the new equations and what each result of the old scan is now called.
        """
        chosen = [self.parts.body.eqns[i] for i in sorted(eqns)]
        outs = [self.carry_outs[j] for j in carries]
        read = set(variables([*(a for eqn in chosen for a in eqn.invars), *(a for a, _ in (*outs, *ys))]))
        consts = [(v, a) for v, a in self.consts if v in read]
        xs = [(v, a) for v, a in (*self.xs, *more_xs) if v in read]
        ins = [self.carries[j] for j in carries]
        body = close_jaxpr((), [v for v, _ in (*consts, *ins, *xs)], chosen, [a for a, _ in (*outs, *ys)])
        traced = _trace_scan(body, len(consts), len(ins), [a for _, a in xs], self.parts)
        results = [a for _, a in (*outs, *ys)]
        return _splice(traced, self.eqn, [a for _, a in (*consts, *ins, *xs)], results)


def hoist_fixed(
    eqns: Sequence[JaxprEqn], recomputed: frozenset[int], is_fixed: Callable[[Var], bool]
) -> tuple[list[JaxprEqn], frozenset[int], dict[Var, Atom]]:
    """Take fixed results of scans out of them.

    Args:
        eqns: a flat program. recomputed: positions marked by :func:`jaxpipe.stage.jaxprs.flatten`.
        is_fixed: whether a free variable depends on parameters and constants only.

    Returns the new equations, the marked positions among them, and substitutions to apply to the program's results.
    """
    fixed: dict[Var, bool] = {}
    names: dict[Var, Atom] = {}
    result: list[JaxprEqn] = []
    marked: set[int] = set()

    def fixed_atom(a: Atom) -> bool:
        return isinstance(a, Literal) or (fixed[a] if a in fixed else is_fixed(a))

    for i, eqn in enumerate(eqns):
        eqn = eqn.replace(invars=[called(names, a) for a in eqn.invars])
        loop = Loop.of(eqn)
        replacements: list[JaxprEqn] = [eqn]
        renamed: dict[Var, Atom] = {}
        # A loop that is fixed as a whole needs no cutting: it is recomputed where it is read.
        if loop is not None and not eqn.effects and not all(fixed_atom(a) for a in eqn.invars):
            replacements, renamed = _without_fixed(loop, fixed_atom)
        names.update(renamed)
        names.update(_handed_on(eqn))
        for new in replacements:
            level = all(fixed_atom(a) for a in new.invars) and not new.effects
            fixed.update(dict.fromkeys(new.outvars, level))
            if i in recomputed:
                marked.add(len(result))
            result.append(new)
    return result, frozenset(marked), names


def _without_fixed(loop: Loop, is_fixed: Callable[[Atom], bool]) -> tuple[list[JaxprEqn], dict[Var, Atom]]:
    """Divide the loop into one that makes what is fixed and one that makes the rest; return them, and what it hands on."""
    eqn, names = loop.eqn, _handed_through(loop, {})

    def only(is_read: Callable[[Var], bool]) -> list[JaxprEqn]:
        used = [is_read(v) for v in eqn.outvars]
        return [pruned(eqn, used)] if any(used) else []

    # Fixed is a result whose own slice of the loop reads fixed operands only; pruning finds that slice.
    stacked = [v for a, v in loop.ys if v not in names and isinstance(a, Var)]
    fixed = {v for v in stacked if all(is_fixed(a) for part in only({v}.__contains__) for a in part.invars)}
    if not fixed and not names:
        return [eqn], {}
    return only(fixed.__contains__) + only(lambda v: v not in fixed and v not in names), names


def handed_on(eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> list[Atom]:
    """Return ``results`` of a flat program, each as the value that it is: loops and branches that hand an operand on unchanged,
    on whatever level, are seen through."""
    names: dict[Var, Atom] = {}
    for eqn in eqns:
        renamed = _handed_on(eqn)
        loop = Loop.of(eqn)
        if loop is not None:
            ends = [a for a, _ in (*loop.carry_outs, *loop.ys)]
            inner = handed_on(loop.parts.body.eqns, ends)
            renamed = _handed_through(loop, {a: b for a, b in zip(ends, inner, strict=True) if isinstance(a, Var)})
        names.update((v, called(names, a)) for v, a in renamed.items())
    return [called(names, a) for a in results]


def _handed_through(loop: Loop, names: Mapping[Var, Atom]) -> dict[Var, Atom]:
    """Find results of a loop that are its operands: slices stacked again in their order, carries that no iteration changes.
    ``names``: what body values are, where that is known."""
    xs: dict[Atom, Atom] = dict(loop.xs)
    operand_of = {v: xs[b] for a, v in loop.ys if isinstance(b := called(names, a), Var) and b in xs}
    ends = zip(loop.carry_outs, loop.carries, strict=True)
    return operand_of | {v: start for (a, v), (k, start) in ends if called(names, a) is k}


def _handed_on(eqn: JaxprEqn) -> dict[Var, Atom]:
    """Find results of a branch equation that each branch takes from the same operand or leaves unset, and that operand."""
    if eqn.primitive.name != "cond":
        return {}
    branches = list(sub_jaxprs(eqn))
    names: dict[Var, Atom] = {}
    for k, v in enumerate(eqn.outvars):
        ends = [(body.invars, body.outvars[k]) for body in branches if not _is_unset(body, body.outvars[k])]
        sources = {entering.index(out) if out in entering else -1 for entering, out in ends}
        if len(sources) == 1 and -1 not in sources:
            # The first operand selects the branch.
            names[v] = eqn.invars[1 + sources.pop()]
    return names


def _is_unset(body: Jaxpr, atom: Atom) -> bool:
    """Whether a value is a broadcast of uninitialised memory."""
    # Differentiating a ``cond`` fills the residuals of the branches not taken with it.
    for eqn in body.eqns:
        if atom in eqn.outvars:
            if eqn.primitive.name.startswith("empty"):
                return True
            return eqn.primitive.name in ("broadcast_in_dim", "broadcast") and _is_unset(body, eqn.invars[0])
    return False


def divide(
    loop: Loop, for_b: Callable[[Var], bool], for_w: Callable[[Var], bool]
) -> tuple[list[JaxprEqn], dict[Var, Atom]] | None:
    """Divide a scan in two: one for the results that B needs, one for those that only W reads.

    None where it can't be divided or nothing is left for the second. Returns the new equations and what each result of the old
    scan is now called.
    """
    eqns = loop.parts.body.eqns
    (eqns_b, carries_b), (eqns_w, carries_w) = loop.needed(for_b), loop.needed(for_w)
    eqns_w, carries_w = eqns_w - eqns_b, carries_w - carries_b
    ys_w = [(a, v) for a, v in loop.ys if for_w(v)]
    results_w = [*(loop.carry_outs[j][0] for j in carries_w), *(a for a, _ in ys_w)]
    read_w = {v for i in eqns_w for v in variables(eqns[i].invars)}
    # A nested loop of B whose results W reads would have to run in both, or be cut itself: then the whole stays in B.
    if not eqns_w or any(has_body(eqns[i]) and not read_w.isdisjoint(eqns[i].outvars) for i in eqns_b):
        return None
    # What depends on constants alone is the same in every iteration: run again rather than stacked once an iteration.
    again = _from_consts(loop, eqns_b)
    made_b = [*(loop.carries[j][0] for j in sorted(carries_b)), *(v for i in sorted(eqns_b) for v in eqns[i].outvars)]
    crossing, redo = _crossing(loop, read_w.union(variables(results_w)), made_b, again)
    # Placeholders until the first loop is traced and names what it stacks.
    stacked = {v: fresh_var(v.aval) for v in crossing}
    ys_b = [(a, v) for a, v in loop.ys if for_b(v)]
    first, names = loop.loop_over(eqns_b, sorted(carries_b), [*ys_b, *stacked.items()])
    feed = [(v, called(names, s)) for v, s in stacked.items()]
    second, more_names = loop.loop_over(eqns_w | redo, sorted(carries_w), ys_w, feed)
    return first + second, {**names, **more_names}


def is_mixed(eqn: JaxprEqn, for_b: Callable[[Var], bool], for_w: Callable[[Var], bool]) -> bool:
    """Whether a loop or branch computes something for W's results that it would not compute for B's."""
    if not has_body(eqn) or not any(for_w(v) for v in eqn.outvars):
        return False
    loop = Loop.of(eqn)
    if loop is None:
        return True
    return not loop.needed(for_w)[0] <= loop.needed(for_b)[0]


def _crossing(loop: Loop, read: Iterable[Var], made_b: Iterable[Var], again: set[int]) -> tuple[list[Var], set[int]]:
    """Return the body values that the first loop must stack for the second, which reads ``read``, and equations over constants
    that both run."""
    eqns = loop.parts.body.eqns
    maker = {v: i for i in again for v in eqns[i].outvars}

    def near(v: Var) -> Iterable[Var]:
        return variables(eqns[maker[v]].invars) if v in maker else ()

    reached = reachable(read, near)
    return [v for v in made_b if v in reached and v not in maker], {maker[v] for v in reached if v in maker}


def _from_consts(loop: Loop, eqns: set[int]) -> set[int]:
    """Return those of the body equations that depend on the loop's constants only."""
    positions: set[int] = set()
    fixed = {v for v, _ in loop.consts}
    for i in sorted(eqns):
        eqn = loop.parts.body.eqns[i]
        if all(v in fixed for v in variables(eqn.invars)) and not eqn.effects:
            positions.add(i)
            fixed.update(eqn.outvars)
    return positions


def _trace_scan(body: ClosedJaxpr, consts: int, carries: int, xs: Sequence[Atom], parts: ScanParts) -> ClosedJaxpr:
    """Trace the jaxpr of ``lax.scan`` over ``body``, whose inputs are constants, carries and slices of ``xs``."""
    # Traced through JAX rather than assembled: the parameters of a scan equation change between versions of JAX.

    def scan(*operands: Any) -> Any:
        fixed, start, stacked = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

        def step(carry: tuple[Any, ...], slices: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            out = [jnp.asarray(v) for v in eval_jaxpr(body.jaxpr, body.consts, *fixed, *carry, *slices)]
            return tuple(out[:carries]), tuple(out[carries:])

        ends, ys = jax.lax.scan(step, start, stacked, length=parts.length, reverse=parts.reverse, unroll=parts.unroll)
        return (*ends, *ys)

    arguments = [*body.jaxpr.invars[: consts + carries], *xs]
    return jax.make_jaxpr(scan)(*(jax.ShapeDtypeStruct(shape_of(a), dtype_of(a)) for a in arguments))


def _splice(
    traced: ClosedJaxpr, outer: JaxprEqn, operands: Sequence[Atom], results: Sequence[Atom]
) -> tuple[list[JaxprEqn], dict[Var, Atom]]:
    """Return the traced equations on these operands, and what each of ``results`` is called among them."""
    flat = flatten(traced.jaxpr, traced.consts)
    assert not flat.consts, "a loop body closes over nothing"
    names: dict[Var, Atom] = dict(zip(flat.invars, operands, strict=True))
    eqns = [with_outer_names(e, outer, [called(names, a) for a in e.invars], e.outvars) for e in flat.eqns]
    return eqns, {v: called(names, a) for v, a in zip(results, flat.outvars, strict=True) if isinstance(v, Var)}
