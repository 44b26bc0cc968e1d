"""Stage functions for so many sequences in a microbatch, from a trace with another number.

A trace with :data:`PROBE` sequences, a prime, tells of each axis of each array whether sequences lie along it: its length is
a multiple of that then. So one trace tells the shapes, and with them bytes and operations, for any number. What comes of it
can't be run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax

from jaxpipe._jax_compat import Atom, Jaxpr, JaxprEqn, Literal, Var, aval_bytes, close_jaxpr, fresh_var, sub_jaxprs
from jaxpipe.stage.compiled.compile import held_bytes
from jaxpipe.stage.functions import StageFunction, StageFunctions

PROBE = 131071


def resized(stage: StageFunctions, size: int) -> StageFunctions | None:
    """A stage traced with :data:`PROBE` sequences as it is with ``size``; what enters and leaves stays as it was. None where
    that can't be told: of an axis as long as no parameter's, neither short nor a multiple of :data:`PROBE`, of an array with
    sequences along several, and of loops and branches over them."""
    layout = stage.layout
    shapes = *(x.shape for x in layout.slots), *(x.shape for x in (*layout.buffers, *stage.acc_avals))
    known = (n for shape in shapes for n in shape)
    resizing = _Resizing(known, size)
    functions = {op: resizing.function(f) for op, f in stage.functions.items()}
    if resizing.unsure:
        return None
    forward = functions["F"]
    left = zip(forward.outputs, forward.jaxpr.jaxpr.outvars, strict=True)
    held = held_bytes({op: (f.inputs, f.jaxpr.jaxpr.invars) for op, f in functions.items()})
    boundary_bytes = sum(aval_bytes(a.aval) for port, a in left if port.kind == "y")
    return replace(stage, functions=functions, evaluation=forward, boundary_bytes=boundary_bytes, **held)


class _Resizing:
    """Variables and equations that functions share are resized once. ``unsure``: some shape did not tell."""

    def __init__(self, known: Iterable[int], size: int) -> None:
        self.known, self.size = frozenset(known), size
        self.unsure = any(n and n % PROBE == 0 for n in self.known)
        self.variables: dict[Var, Var] = {}
        self.eqns: dict[int, JaxprEqn] = {}
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def function(self, function: StageFunction) -> StageFunction:
        body, eqns = function.jaxpr.jaxpr, [self._eqn(eqn) for eqn in function.jaxpr.jaxpr.eqns]
        consts = zip(map(self._atom, body.constvars), function.jaxpr.consts, strict=True)
        invars, outvars = ([self._atom(a) for a in atoms] for atoms in (body.invars, body.outvars))
        closed = close_jaxpr(list(consts), invars, eqns, outvars)
        avals_in, avals_out = (tuple(map(self._aval, avals)) for avals in (function.avals_in, function.avals_out))
        return replace(function, jaxpr=closed, avals_in=avals_in, avals_out=avals_out)

    def _eqn(self, eqn: JaxprEqn) -> JaxprEqn:
        if id(eqn) not in self.eqns:
            for body in sub_jaxprs(eqn):
                self._only_short(body)
            operands, results = ([self._atom(a) for a in atoms] for atoms in (eqn.invars, eqn.outvars))
            self.eqns[id(eqn)] = eqn.replace(invars=operands, outvars=results)
        return self.eqns[id(eqn)]

    def _only_short(self, body: Jaxpr) -> None:
        """Of what adds up two numbers for a scatter, say: no sequences in there."""
        for eqn in body.eqns:
            for sub in sub_jaxprs(eqn):
                self._only_short(sub)
        shapes = [getattr(a.aval, "shape", ()) for eqn in body.eqns for a in (*eqn.invars, *eqn.outvars)]
        self.unsure = self.unsure or any(n >= PROBE // 2 for shape in shapes for n in shape)

    def _atom(self, atom: Atom) -> Any:
        if isinstance(atom, Literal) or not (shape := getattr(atom.aval, "shape", ())):
            return atom
        if atom not in self.variables:
            same = (found := self._shape(shape)) == shape
            self.variables[atom] = atom if same else fresh_var(atom.aval.update(shape=found))
        return self.variables[atom]

    def _aval(self, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(map(self._length, aval.shape)), aval.dtype, sharding=aval.sharding)

    def _length(self, n: int) -> int:
        return n // PROBE * self.size if n % PROBE == 0 else n

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape not in self.shapes:
            along = [n for n in shape if n and n % PROBE == 0]
            others_known = all(n in along or n < PROBE // 2 or n in self.known for n in shape)
            if len(along) > 1 or any(n % PROBE**2 == 0 for n in along) or not others_known:
                self.unsure = True
            self.shapes[shape] = tuple(map(self._length, shape))
        return self.shapes[shape]
