"""The outline of a module's call: what goes into each of its blocks, what comes out, and what is computed around them.

The call is traced with each block replaced by a stub (:class:`Stubs`), which puts one equation into the jaxpr, of a primitive
that takes the block's arguments and gives its results. Calls that hold blocks (``jit``, ``checkpoint``) are inlined; a ``scan``
over a stack of blocks, whose body does nothing but call the block, becomes one entry of several blocks. What remains are
equations between the blocks: which of them a value needs is exact, and any part of them can be computed alone
(:meth:`Outline.evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from jaxpipe._jax_compat import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    ScanParts,
    Var,
    called_jaxpr,
    close_jaxpr,
    eval_jaxpr,
    fresh_var,
    is_key_dtype,
    scan_parts,
    sub_jaxprs,
    variables,
)
from jaxpipe.errors import StageError
from jaxpipe.stage.dataflow import called, reachable
from jaxpipe.stage.leaves import array_leaves, fill

_BLOCK = Primitive("jaxpipe_block")
"""A call of a block. ``stubs`` stands in for it, ``block`` is its number, ``avals`` are the types of its results."""
_BLOCK.multiple_results = True
_BLOCK.def_abstract_eval(lambda *arguments, stubs, block, avals: list(avals))

Wire = tuple[str, int, int]
"""An array that layers may exchange: ``("in", block, position)`` among the arguments of a block, ``("out", …)`` its results."""

Results = Callable[[int, Any], Any]
"""What a block returns for ``(args, kwargs)``, arrays as ``ShapeDtypeStruct``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A call of ``count`` blocks, one after another, from block ``first``.

    ``entering``: the arrays among the arguments of the first. ``leaving``: the arrays among the results of the last; None where
    the scan drops one. ``flow``: of an array among the arguments, by position, which result of the block before it is (others
    are the same for all blocks). ``arguments``: pytree of positional and keyword arguments, arrays as ``ShapeDtypeStruct``;
    ``at``: how many equations stand before it.
    """

    first: int
    count: int
    entering: tuple[Atom, ...]
    leaving: tuple[Var | None, ...]
    flow: Mapping[int, int]
    arguments: Any
    at: int

    @property
    def results(self) -> dict[Wire, Var]:
        """The results that are there."""
        last = self.first + self.count - 1
        return {("out", last, j): v for j, v in enumerate(self.leaving) if v is not None}


class Stubs:
    """Stands in for the blocks of a module while its call is traced. ``results_by_wire``: what is known of their results.
    ``arguments``: by block, what it was called with."""

    def __init__(self, label: str, results: Results, results_by_wire: Mapping[Wire, Any]) -> None:
        self.label = label
        self.results = results
        self.given = results_by_wire
        self.arguments: dict[int, Any] = {}

    def __call__(self, block: int, *args: Any, **kwargs: Any) -> Any:
        """Stand-ins for what the block returns."""
        arguments = (args, kwargs)
        arrays = array_leaves(arguments)
        if any(is_key_dtype(leaf.dtype) for leaf in arrays):
            raise StageError(
                f"{self.label}: block {block} receives random keys as an argument; let it draw from streams of its own, or "
                "write the layers by hand"
            )
        self.arguments[block] = fill(arguments, [type_of(leaf) for leaf in arrays])
        results = self.results(block, arguments)
        zeros = [jnp.zeros(v.shape, v.dtype) for v in array_leaves(results)]
        avals = tuple(jax.typeof(self.given.get(("out", block, j), zero)) for j, zero in enumerate(zeros))
        return fill(results, _BLOCK.bind(*map(jnp.asarray, arrays), stubs=self, block=block, avals=avals))

    def refuse(self, block: int, what: str) -> NoReturn:
        raise StageError(
            f"{self.label}: block {block} {what}; blocks are called once each, one after another or in a scan over a stack of "
            "them. Write the layers by hand where they are not"
        )


def _vmapped(*_: Any, stubs: Stubs, block: int, avals: Any) -> NoReturn:
    stubs.refuse(block, "is called inside vmap")


batching.primitive_batchers[_BLOCK] = _vmapped


@dataclass(frozen=True, slots=True)
class Outline:
    """``invars``: of the traced call. ``output``: what it returns, arrays as atoms. ``lost``: values that a scan over blocks
    collects, and that blocks by themselves do not make. ``wires``: what goes into the first block of each entry, and what comes
    out of the last."""

    label: str
    invars: tuple[Var, ...]
    consts: Mapping[Var, Any]
    eqns: tuple[JaxprEqn, ...]
    entries: tuple[Entry, ...]
    output: Any
    lost: frozenset[Var]
    wires: Mapping[Wire, Atom]

    @property
    def results(self) -> list[Atom]:
        """The arrays that the call returns."""
        return [leaf for leaf in jax.tree.leaves(self.output) if isinstance(leaf, Var | Literal)]

    def returned(self, values: Sequence[Any]) -> Any:
        """What the call returns, from the values of :attr:`results`."""
        rest = iter(values)
        return jax.tree.map(lambda leaf: next(rest) if isinstance(leaf, Var | Literal) else leaf, self.output)

    def needed(self, targets: Iterable[Atom], sources: Iterable[Var] = ()) -> tuple[list[int], set[Var]]:
        """The equations that ``targets`` depend on, in order, and the variables they start from: inputs, or ``sources``."""
        maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        computed = maker.keys() - set(sources)
        reached = reachable(
            variables(targets), lambda v: variables(self.eqns[maker[v]].invars) if v in computed else ()
        )
        starts = reached - computed
        if starts & self.lost:
            raise StageError(
                f"{self.label}: what its scan collects from the blocks is used afterwards; carry it from block to block, or "
                "list the blocks instead of scanning over them"
            )
        return sorted({maker[v] for v in reached & computed}), starts.difference(self.consts)

    def evaluate(self, targets: Sequence[Atom], values: Mapping[Var, Any]) -> list[Any]:
        """Compute ``targets`` from the ``values`` of variables.

        Raises:
            StageError: they depend on others.
        """
        eqns, starts = self.needed(targets, values)
        if not starts <= values.keys():
            raise StageError(f"{self.label} computes with other parameters for a batch of other shapes")
        program = close_jaxpr(list(self.consts.items()), list(values), [self.eqns[i] for i in eqns], targets)
        return [jnp.asarray(v) for v in eval_jaxpr(program.jaxpr, program.consts, *values.values())]

    def draws_before(self, eqns: Iterable[int], entry: int) -> bool:
        """Whether one of these equations stands before an entry and makes random numbers."""
        early = (self.eqns[i] for i in eqns if i < self.entries[entry].at)
        return any(any(map(_is_key, e.invars)) and not all(map(_is_key, e.outvars)) for e in early)


def trace_outline(stubs: Stubs, call: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> Outline:
    """The outline of ``call``, the module's with ``stubs`` for its blocks, which takes ``inputs`` (arrays, or types of arrays)
    as a list.

    Raises:
        StageError: a block is called twice, or within something that is no plain call nor a plain loop.
    """
    returned: list[Any] = []

    def traced(arrays: list[Any]) -> list[Any]:
        returned.append(call(arrays))
        return array_leaves(returned[-1])

    lifting, closed = _Lifting(stubs), jax.make_jaxpr(traced)(list(inputs))
    output = fill(returned[-1], lifting.take(closed.jaxpr, closed.consts, {}))
    invars, eqns, entries = tuple(closed.jaxpr.invars), tuple(lifting.eqns), tuple(lifting.entries.values())
    wires: dict[Wire, Atom] = {}
    for e in entries:
        wires |= {("in", e.first, i): atom for i, atom in enumerate(e.entering)} | e.results
    return Outline(stubs.label, invars, lifting.consts, eqns, entries, output, frozenset(lifting.lost), wires)


@dataclass(slots=True)
class _Lifting:
    """Gathers the equations around the blocks, and the blocks' entries by number, in the order of their calls."""

    stubs: Stubs
    consts: dict[Var, Any] = field(default_factory=dict)
    eqns: list[JaxprEqn] = field(default_factory=list)
    entries: dict[int, Entry] = field(default_factory=dict)
    lost: set[Var] = field(default_factory=set)

    def take(self, jaxpr: Jaxpr, consts: Sequence[Any], env: dict[Var, Atom]) -> list[Atom]:
        """Take up a program, whose inputs are called as ``env`` says; returns what its results are called."""
        for v, c in zip(jaxpr.constvars, consts, strict=True):
            self.consts[_renamed(env, v)] = c
        for eqn in jaxpr.eqns:
            self.add(eqn, env)
        return [called(env, a) for a in jaxpr.outvars]

    def add(self, eqn: JaxprEqn, env: dict[Var, Atom]) -> None:
        invars = [called(env, a) for a in eqn.invars]
        call, scan = called_jaxpr(eqn), scan_parts(eqn)
        if eqn.primitive is _BLOCK:
            self._call(eqn, invars, env)
        elif not _blocks_in(eqn):
            self.eqns.append(eqn.replace(invars=invars, outvars=[_renamed(env, v) for v in eqn.outvars]))
        elif call is not None and not eqn.primitive.name.startswith("custom"):
            results = self.take(*call, dict(zip(call[0].invars, invars, strict=True)))
            env.update(zip(eqn.outvars, results, strict=True))
        elif scan is not None:
            self._loop(eqn, scan, invars, env)
        else:
            self.stubs.refuse(min(_blocks_in(eqn)), f"is called inside {eqn.primitive.name}")

    def _call(self, eqn: JaxprEqn, invars: Sequence[Atom], env: dict[Var, Atom]) -> None:
        """A call of one block."""
        block = eqn.params["block"]
        if eqn.params["stubs"] is not self.stubs:
            self.stubs.refuse(block, "is called by a function that keeps an earlier trace (nn.jit)")
        if block in self.entries:
            self.stubs.refuse(block, "is called more than once")
        leaving = tuple(_renamed(env, v) for v in eqn.outvars)
        self.entries[block] = Entry(block, 1, tuple(invars), leaving, {}, self.stubs.arguments[block], len(self.eqns))

    def _loop(self, eqn: JaxprEqn, scan: ScanParts, invars: Sequence[Atom], env: dict[Var, Atom]) -> None:
        """A scan over a stack of blocks: an entry of as many blocks as it has iterations."""
        inner = _Lifting(self.stubs)
        ends = inner.take(scan.body, scan.body_consts, {})
        (entry, *other_entries) = inner.entries.values()
        if other_entries or entry.count > 1 or scan.reverse:
            self.stubs.refuse(
                entry.first, "is called with others in one scan" if other_entries else "is called in an unusual scan"
            )
        self.consts.update(inner.consts)
        operand: dict[Var, Atom] = dict(zip(scan.body.invars, invars, strict=True))
        carries = scan.body.invars[scan.num_consts : scan.num_consts + scan.num_carry]
        xs = set(scan.body.invars[scan.num_consts + scan.num_carry :])
        result = {v: j for j, v in enumerate(entry.leaving)}
        end_of = dict(zip(carries, ends, strict=False))
        flow: dict[int, int] = {}
        entering: list[Atom] = []
        for i, a in enumerate(entry.entering):
            if isinstance(a, Var):
                end = end_of.get(a, a)
                if isinstance(end, Var) and end in result:
                    flow[i] = result[end]
                elif end is not a or a in xs or (a not in operand and a not in self.consts):
                    self.stubs.refuse(entry.first, "is given something else than its scan carries from block to block")
                a = operand.get(a, a)
            entering.append(a)
        leaving: list[Var | None] = [None] * len(entry.leaving)
        for k, (v, end) in enumerate(zip(eqn.outvars, ends, strict=True)):
            if k < scan.num_carry and isinstance(end, Var) and end in result:
                leaving[result[end]] = _renamed(env, v)
            elif isinstance(end, Var) and (end is carries[k] if k < scan.num_carry else end in xs):
                env[v] = operand[end]  # handed on unchanged
            else:
                self.lost.add(_renamed(env, v))
        self.entries[entry.first] = replace(
            entry, count=scan.length, entering=tuple(entering), leaving=tuple(leaving), flow=flow, at=len(self.eqns)
        )


def type_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of an array, or of a type of one; a scalar written in Python gives way to other dtypes, which is kept."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))


def _is_key(atom: Atom) -> bool:
    return hasattr(atom.aval, "dtype") and is_key_dtype(atom.aval.dtype)


def _renamed(env: dict[Var, Atom], var: Var) -> Var:
    new = fresh_var(var.aval)
    env[var] = new
    return new


def _blocks_in(eqn: JaxprEqn) -> set[int]:
    """Blocks that are called inside an equation."""
    blocks: set[int] = set()
    for body in sub_jaxprs(eqn):
        for inner in body.eqns:
            blocks |= {inner.params["block"]} if inner.primitive is _BLOCK else _blocks_in(inner)
    return blocks
