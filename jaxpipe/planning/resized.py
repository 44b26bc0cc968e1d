"""Stage functions for other numbers of sequences in a microbatch, from a trace with another number.

A trace with :data:`PROBE` sequences, a prime, tells of each axis of each array whether sequences lie along it: its length is
a multiple of that then. So one trace tells the shapes, and with them bytes and operations, for any number. What comes of it
can't be run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpipe._jax_compat import Jaxpr, JaxprEqn, Var, aval_bytes, close_jaxpr, fresh_var, scan_parts, sub_jaxprs
from jaxpipe.planning.roofline import View
from jaxpipe.stage.compiled.compile import held_bytes
from jaxpipe.stage.functions import StageFunction, StageFunctions
from jaxpipe.stage.primitives import is_attention_kernel, is_exchange

PROBE = 131071


def resized(stage: StageFunctions, sizes: Sequence[int]) -> Sequence[tuple[StageFunctions, View]]:
    """Resize a stage traced with :data:`PROBE` sequences to each of ``sizes``, and return it with a view of its equations.

    The resized functions keep only exchanges and attention kernels, and their inputs and outputs as traced. Empty where shapes
    are ambiguous: an axis is as long as no parameter's, neither short nor a multiple of :data:`PROBE`; an array has sequences
    along several axes; or loops and branches run over sequences.
    """
    layout = stage.layout
    shapes = *(x.shape for x in layout.slots), *(x.shape for x in (*layout.buffers, *stage.acc_avals))
    dimensions = frozenset(n for shape in shapes for n in shape)
    views = [_Resizing(dimensions, size) for size in sizes]
    views[0].look_at(f.jaxpr.jaxpr for f in stage.functions.values())
    resized_stages = [(_sized(stage, view), view) for view in views]
    return [] if any(view.unsure for view in views) else resized_stages


def _sized(stage: StageFunctions, view: _Resizing) -> StageFunctions:
    functions = {op: view.function(f) for op, f in stage.functions.items()}
    forward = functions["F"]
    results = zip(forward.outputs, forward.jaxpr.jaxpr.outvars, strict=True)
    bytes_by_field = held_bytes({op: (f.inputs, f.jaxpr.jaxpr.invars) for op, f in functions.items()})
    boundary_bytes = sum(aval_bytes(a.aval) for port, a in results if port.kind == "y")
    return replace(stage, functions=functions, evaluation=forward, boundary_bytes=boundary_bytes, **bytes_by_field)


class _Resizing(View):
    """Resize equations; variables that functions share are resized once. ``unsure``: some shape was ambiguous."""

    def __init__(self, dimensions: Iterable[int], size: int) -> None:
        self.dimensions, self.size = frozenset(dimensions), size
        self.unsure = any(n and n % PROBE == 0 for n in self.dimensions)
        self.variables: dict[Var, Var] = {}
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def look_at(self, bodies: Iterable[Jaxpr]) -> None:
        """Set ``unsure`` if a shape does not show which axes hold sequences."""
        eqns = {id(eqn): eqn for body in bodies for eqn in body.eqns}
        for shape in {shape for eqn in eqns.values() for shape in _shapes(eqn)}:
            self.shape(shape)
        inside = (n for eqn in eqns.values() for sub in sub_jaxprs(eqn) for n in _inside(sub))
        loops = (loop.length for loop in map(scan_parts, eqns.values()) if loop is not None)
        self.unsure = self.unsure or any(n >= PROBE // 2 for n in (*inside, *loops))

    def function(self, function: StageFunction) -> StageFunction:
        body = function.jaxpr.jaxpr
        eqns = [self.eqn(eqn) for eqn in body.eqns if is_exchange(eqn) or is_attention_kernel(eqn)]
        consts = zip(map(self.atom, body.constvars), function.jaxpr.consts, strict=True)
        invars, outvars = ([self.atom(a) for a in atoms] for atoms in (body.invars, body.outvars))
        closed = close_jaxpr(list(consts), invars, eqns, outvars)
        avals_in, avals_out = (tuple(map(self._aval, avals)) for avals in (function.avals_in, function.avals_out))
        return replace(function, jaxpr=closed, avals_in=avals_in, avals_out=avals_out)

    def eqn(self, eqn: JaxprEqn) -> JaxprEqn:
        operands, results = ([self.atom(a) for a in atoms] for atoms in (eqn.invars, eqn.outvars))
        resized_eqn: JaxprEqn = eqn.replace(invars=operands, outvars=results)
        return resized_eqn

    def atom(self, atom: Any) -> Any:
        if not isinstance(atom, Var) or not (shape := getattr(atom.aval, "shape", ())):
            return atom
        if atom not in self.variables:
            same = (new_shape := self.shape(shape)) == shape
            self.variables[atom] = atom if same else fresh_var(atom.aval.update(shape=new_shape))
        return self.variables[atom]

    def _aval(self, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(map(self._length, aval.shape)), aval.dtype, sharding=aval.sharding)

    def _length(self, n: int) -> int:
        return n // PROBE * self.size if n % PROBE == 0 else n

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an array that has this one with :data:`PROBE` sequences."""
        if shape not in self.shapes:
            along = [n for n in shape if n and n % PROBE == 0]
            others_known = all(n in along or n < PROBE // 2 or n in self.dimensions for n in shape)
            if len(along) > 1 or any(n % PROBE**2 == 0 for n in along) or not others_known:
                self.unsure = True
            self.shapes[shape] = tuple(map(self._length, shape))
        return self.shapes[shape]


def _shapes(eqn: JaxprEqn) -> Iterator[tuple[int, ...]]:
    return (getattr(a.aval, "shape", ()) for a in (*eqn.invars, *eqn.outvars))


def _inside(body: Jaxpr) -> Iterator[int]:
    """Yield the lengths of all axes in a body and its nested bodies, such as a scatter's update."""
    for eqn in body.eqns:
        yield from (n for shape in _shapes(eqn) for n in shape)
        for sub in sub_jaxprs(eqn):
            yield from _inside(sub)
