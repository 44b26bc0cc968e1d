"""Lets products take in what is added to them: weight gradients their accumulators, fused projections their biases.

A gradient computed in bfloat16 is a product, perhaps reshaped and transposed, then a cast to the accumulator's float32 and the
sum. Left so, XLA rounds the product to memory, and a kernel of its own reads it, casts it and adds. A product that returns
float32 (``preferred_element_type``) is what cuBLAS can add in place (beta = 1), whatever the shape of the leaf; and the
gradient of a microbatch is rounded once less. Compiled for H100, the workspace of W of one GPT block (hidden 4096) fell from
134 to 34 MB, of one Llama block from 213 to 34 MB.

Where several products make one gradient (a leaf that a stage uses more than once), each is added to the accumulator for itself.

Left as they are: products with another reader, which may count on the rounding; those that a loop stacks, for the stack would
take twice the bytes; gradients of leaves that share a buffer (they are small); all of float32 compute, bit for bit.

A bias of several axes (heads and their size) is added to its product as a vector. Left so, XLA's GPU backend writes it out, as
large as the product, which reads it: at hidden 4096 and 4096 tokens 201 of the 2,081 MB that F of a GPT block moves. cuBLAS
adds a vector as it writes the product.

A biased product that is scaled right after, as Flax's attention does with its queries, is kept apart from its scale: XLA's GPU
backend scales the product alone, not the bias (openxla/xla#46110; in code for H100, jax 0.10.2: alpha 0.088, epilogue BIAS).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._jax_compat import Atom, JaxprEqn, Var, barrier, dtype_of, fresh_var, shape_of, variables
from jaxpipe.stage.jaxprs import Dataflow, EqnKind, kind

_WIDE = np.dtype(np.float32)
_NARROW = (np.dtype(jnp.bfloat16), np.dtype(np.float16))


def add_in_products(
    eqns: Sequence[JaxprEqn], recomputed: frozenset[int], sums: Iterable[Atom], read_elsewhere: Container[Var]
) -> tuple[list[JaxprEqn], frozenset[int]]:
    """Return a flat program whose products of 16-bit floats return float32 where only a sum reads them.

    Args:
        eqns: the program; ``recomputed``: positions marked by :func:`jaxpipe.stage.jaxprs.flatten`.
        sums: the new values of accumulators.
        read_elsewhere: values that something other than an equation reads, or that have a name.
    """
    rewriting = _Rewriting(eqns, read_elsewhere)
    for total in variables(sums):
        rewriting.try_sum(total)
    return _replaced(eqns, recomputed, rewriting.replacements)


def add_vectors(eqns: Sequence[JaxprEqn], recomputed: frozenset[int]) -> tuple[list[JaxprEqn], frozenset[int]]:
    """Return a flat program that adds biases of several axes to products as vectors where only slices read the sum: those of
    projections that are one product. ``recomputed``: as for :func:`add_in_products`."""
    flow = Dataflow(eqns)
    products = {v for eqn in eqns if eqn.primitive.name == "dot_general" for v in eqn.outvars}
    biased = (
        i for i, e in enumerate(eqns) if e.primitive.name == "add" and not products.isdisjoint(variables(e.invars[:1]))
    )
    sliced = (i for i in biased if all(eqns[k].primitive.name == "slice" for k in flow.outputs(i)))
    vectors = {i: _with_vector(eqns[i]) for i in sliced}
    return _replaced(eqns, recomputed, vectors)


def keep_biases_scaled(eqns: Sequence[JaxprEqn], recomputed: frozenset[int]) -> tuple[list[JaxprEqn], frozenset[int]]:
    """Return a flat program with a barrier between the sum of a product and a bias, and a scalar that the sum is multiplied
    with or divided by. ``recomputed``: as for :func:`add_in_products`."""
    flow = Dataflow(eqns)

    def sees(i: int, is_sought: Callable[[JaxprEqn], bool], near: Callable[[int], Iterable[int]]) -> bool:
        """Return whether an equation next to ``i``, or past some that only move elements, is one that is sought."""
        return any(is_sought(eqns[k]) or (_moves(eqns[k]) and sees(k, is_sought, near)) for k in near(i))

    guarded = {
        i: eqn
        for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "add"
        and any(_is_repeated(a, flow) for a in eqn.invars)
        and sees(i, _is_scaling, flow.outputs)
        and sees(i, lambda e: e.primitive.name == "dot_general", flow.inputs)
    }
    sums = {i: eqn.replace(outvars=[fresh_var(eqn.outvars[0].aval)]) for i, eqn in guarded.items()}
    return _replaced(eqns, recomputed, {i: [e, barrier(e.outvars, eqns[i].outvars)] for i, e in sums.items()})


def _moves(eqn: JaxprEqn) -> bool:
    return kind(eqn) in (EqnKind.RESHAPE, EqnKind.CAST, EqnKind.SAME) or eqn.primitive.name == "transpose"


def _is_repeated(atom: Atom, flow: Dataflow) -> bool:
    """Return whether an operand has the same numbers for all tokens: an axis of one element, or a broadcast."""
    maker = flow.maker.get(atom) if isinstance(atom, Var) else None
    return 1 in shape_of(atom) or (maker is not None and flow.eqns[maker].primitive.name == "broadcast_in_dim")


def _is_scaling(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("mul", "div") and any(math.prod(shape_of(a)) == 1 for a in eqn.invars)


def _with_vector(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Return the equations that add a bias as a vector; the equation itself where it adds something else."""
    total, bias = map(shape_of, eqn.invars)
    rows = next((axis for axis, size in enumerate(bias) if size != 1), len(bias))
    if len(bias) - rows < 2 or bias[rows:] != total[rows:]:
        return [eqn]
    flat = [_traced(partial(jnp.reshape, shape=(*shape_of(a)[:rows], math.prod(bias[rows:]))), a) for a in eqn.invars]
    add = eqn.replace(invars=[e.outvars[0] for e in flat], outvars=[fresh_var(flat[0].outvars[0].aval)])
    shaped = _traced(partial(jnp.reshape, shape=total), add.outvars[0]).replace(outvars=eqn.outvars)
    return [e.replace(source_info=eqn.source_info) for e in (*flat, add, shaped)]


def _replaced(
    eqns: Sequence[JaxprEqn], recomputed: frozenset[int], replacements: Mapping[int, Sequence[JaxprEqn]]
) -> tuple[list[JaxprEqn], frozenset[int]]:
    """Return the program with other equations in the places of some, and the marks of what is recomputed."""
    changed: list[JaxprEqn] = []
    marked: set[int] = set()
    for i, eqn in enumerate(eqns):
        for new in replacements.get(i, [eqn]):
            if i in recomputed:
                marked.add(len(changed))
            changed.append(new)
    return changed, frozenset(marked)


class _Rewriting:
    """``replacements``: the equations in place of one, by its position. ``sum_eqns``: those of the sum at hand."""

    def __init__(self, eqns: Sequence[JaxprEqn], read_elsewhere: Container[Var]) -> None:
        self.flow, self.read_elsewhere = Dataflow(eqns), read_elsewhere
        self.replacements: dict[int, list[JaxprEqn]] = {}
        self.sum_eqns: dict[int, list[JaxprEqn]] = {}

    def try_sum(self, total: Var) -> None:
        """Rewrite what is added to an accumulator to make ``total``, unless no product would return another dtype."""
        at = self.flow.maker.get(total)
        if at is None or dtype_of(total) != _WIDE or self.flow.eqns[at].primitive.name != "add":
            return
        add = self.flow.eqns[at]
        accumulator, gradient = add.invars
        self.sum_eqns = {at: []}
        terms = self._terms(gradient, at)
        # Without a product to gain by, the sum keeps its order: float32 compute must not change a bit.
        if not any(_is_widened(eqn) for eqns in self.sum_eqns.values() for eqn in eqns):
            return
        # One after another, not first among themselves: each sum has a product for an operand, which cuBLAS takes in.
        for k, term in enumerate(terms, 1):
            partial_sum = total if k == len(terms) else fresh_var(total.aval)
            self.sum_eqns[at].append(add.replace(invars=[accumulator, term], outvars=[partial_sum]))
            accumulator = partial_sum
        self.replacements |= self.sum_eqns

    def _terms(self, atom: Atom, reader: int) -> list[Atom]:
        """Return float32 values whose sum is ``atom``, which equation ``reader`` reads, and note the equations that make
        them."""
        i = self.flow.maker.get(atom) if isinstance(atom, Var) and atom not in self.read_elsewhere else None
        if i is not None and sum(1 for _ in self.flow.outputs(i)) == 1:
            eqn = self.flow.eqns[i]
            # Only past a cast from 16 bits: another cast (of float64, say) changes the numbers below it.
            is_cast = kind(eqn) is EqnKind.CAST and dtype_of(eqn.invars[0]) in _NARROW and dtype_of(atom) == _WIDE
            if is_cast or eqn.primitive.name == "add_any":
                self.sum_eqns[i] = []
                return [term for operand in eqn.invars for term in self._terms(operand, i)]
            if kind(eqn) is EqnKind.RESHAPE or eqn.primitive.name == "transpose":
                self.sum_eqns[i] = []
                return [self._emit(i, eqn, [term]) for term in self._terms(eqn.invars[0], i)]
            if eqn.primitive.name == "dot_general" and all(dtype_of(a) in _NARROW for a in (*eqn.invars, atom)):
                self.sum_eqns[i] = []
                widened = eqn.replace(params=eqn.params | {"preferred_element_type": _WIDE})
                return [self._emit(i, widened, eqn.invars)]
        # Whatever else makes it (a scatter, a loop, a product that another reads) is cast as before, only earlier: right
        # where it is read.
        return [atom if dtype_of(atom) == _WIDE else self._emit(reader, _cast(atom), [atom])]

    def _emit(self, i: int, eqn: JaxprEqn, operands: Sequence[Atom]) -> Var:
        """Put ``eqn`` on these operands, with a float32 result, in the place of equation ``i``."""
        result = fresh_var(eqn.outvars[0].aval.update(dtype=_WIDE))
        self.sum_eqns[i].append(eqn.replace(invars=list(operands), outvars=[result]))
        return result


def _is_widened(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general" and dtype_of(eqn.invars[0]) in _NARROW


def _cast(atom: Atom) -> JaxprEqn:
    return _traced(partial(jax.lax.convert_element_type, new_dtype=_WIDE), atom)


def _traced(function: Callable[[jax.Array], jax.Array], atom: Atom) -> JaxprEqn:
    """Return the one equation by which ``function`` computes its result from ``atom``."""
    aval = jax.ShapeDtypeStruct(shape_of(atom), dtype_of(atom))
    eqns: list[JaxprEqn] = [e.replace(invars=[atom]) for e in jax.make_jaxpr(function)(aval).jaxpr.eqns]
    return eqns[0]
