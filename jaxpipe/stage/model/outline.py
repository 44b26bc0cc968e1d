"""The outline of a module's call: what goes into each of its blocks, what comes out, and what is computed around them.

The call is traced with each block replaced by a stub (:class:`Stubs`), which puts one equation into the jaxpr, of a primitive
that takes the block's arguments and gives its results. Calls that hold blocks (``jit``, ``checkpoint``) are inlined; a ``scan``
over a stack of blocks, whose body does nothing but call the block, becomes one entry of several blocks. What remains are
equations between the blocks: which of them a value needs is exact, and any part of them can be computed alone
(:meth:`Outline.evaluate`).

:class:`Wiring` says what each block receives, and where that comes from. It is read off outlines of the call in training and
evaluation, and with parameters in bfloat16 if it works so: in float32 a cast to float32 leaves no trace, and a block would seem
to receive what the one before it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from jaxpipe._jax_compat import (
    Atom,
    ClosedJaxpr,
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
    only_results,
    scan_parts,
    sub_jaxprs,
    variables,
)
from jaxpipe.errors import StageError
from jaxpipe.stage.identity import value_key
from jaxpipe.stage.jaxprs import array_leaves, called, fill, is_array, reachable
from jaxpipe.stage.model.layer import Params, Path, key_aval
from jaxpipe.stage.model.params import nested

_BLOCK = Primitive("jaxpipe_block")
"""A call of a block. ``stubs`` stands in for it, ``block`` is its number, ``avals`` are the types of its results."""
_BLOCK.multiple_results = True
_BLOCK.def_abstract_eval(lambda *arguments, stubs, block, avals: list(avals))

Wire = tuple[str, int, int]
"""An array that layers may exchange: ``("in", block, position)`` among the arguments of a block, ``("out", …)`` its results."""

Results = Callable[[int, Any], Any]
"""A function from a block and its ``(args, kwargs)`` to what it returns, arrays as ``ShapeDtypeStruct``."""


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
        """Return the results that are there, by wire."""
        last = self.first + self.count - 1
        return {("out", last, j): v for j, v in enumerate(self.leaving) if v is not None}


class Stubs:
    """Stands in for the blocks of a module while its call is traced. ``results_by_wire``: the results that are known already.
    ``arguments``: those of the call of each block."""

    def __init__(self, label: str, results: Results, results_by_wire: Mapping[Wire, Any]) -> None:
        self.label = label
        self.results = results
        self.results_by_wire = results_by_wire
        self.arguments: dict[int, Any] = {}

    def __call__(self, block: int, *args: Any, **kwargs: Any) -> Any:
        """Return stand-ins for what the block returns."""
        arguments = (args, kwargs)
        arrays = array_leaves(arguments)
        if any(is_key_dtype(leaf.dtype) for leaf in arrays):
            raise StageError(
                f"{self.label}: block {block} receives random keys as an argument; let it draw from streams of its own, or "
                "write the layers by hand"
            )
        self.arguments[block] = fill(arguments, [type_of(leaf) for leaf in arrays])
        results = self.results(block, arguments)
        # Results that are known keep their exact types: a weak type gives way to other dtypes in what follows.
        zeros = [jnp.zeros(v.shape, v.dtype) for v in array_leaves(results)]
        avals = tuple(jax.typeof(self.results_by_wire.get(("out", block, j), zero)) for j, zero in enumerate(zeros))
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
    """A traced call without its blocks. ``invars``: of the call. ``output``: what it returns, arrays as atoms. ``lost``: values
    that a scan over blocks collects, and that blocks by themselves do not make. ``wires``: what goes into the first block of
    each entry, and what comes out of the last."""

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
        """Return the arrays that the call returns."""
        return [leaf for leaf in jax.tree.leaves(self.output) if isinstance(leaf, Var | Literal)]

    def returned(self, values: Sequence[Any]) -> Any:
        """Rebuild what the call returns from the values of :attr:`results`."""
        rest = iter(values)
        return jax.tree.map(lambda leaf: next(rest) if isinstance(leaf, Var | Literal) else leaf, self.output)

    def needed(self, targets: Iterable[Atom], sources: Iterable[Var] = ()) -> tuple[list[int], set[Var]]:
        """Return the equations that ``targets`` depend on, in order, and the variables they start from: inputs, or
        ``sources``."""
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
    """Trace the outline of ``call``, the module's with ``stubs`` for its blocks, which takes ``inputs`` (arrays, or types of
    arrays) as a list.

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
        # Inlined, as a block inside ``jit`` or ``checkpoint`` is one of the module's; a custom derivative may not be opened.
        elif call is not None and not eqn.primitive.name.startswith("custom"):
            results = self.take(*call, dict(zip(call[0].invars, invars, strict=True)))
            env.update(zip(eqn.outvars, results, strict=True))
        elif scan is not None:
            self._loop(eqn, scan, invars, env)
        else:
            self.stubs.refuse(min(_blocks_in(eqn)), f"is called inside {eqn.primitive.name}")

    def _call(self, eqn: JaxprEqn, invars: Sequence[Atom], env: dict[Var, Atom]) -> None:
        """Record a call of one block."""
        block = eqn.params["block"]
        if eqn.params["stubs"] is not self.stubs:
            self.stubs.refuse(block, "is called by a function that keeps an earlier trace (nn.jit)")
        if block in self.entries:
            self.stubs.refuse(block, "is called more than once")
        leaving = tuple(_renamed(env, v) for v in eqn.outvars)
        self.entries[block] = Entry(block, 1, tuple(invars), leaving, {}, self.stubs.arguments[block], len(self.eqns))

    def _loop(self, eqn: JaxprEqn, scan: ScanParts, invars: Sequence[Atom], env: dict[Var, Atom]) -> None:
        """Record a scan over a stack of blocks: an entry of as many blocks as it has iterations."""
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
        # Written out, iteration k + 1 receives what k returned in a carry, and in a constant what all receive. Anything else
        # (a carry that the body computes, a slice of an array) has no place outside the loop.
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
                # A carry or a slice that the loop hands on unchanged.
                env[v] = operand[end]
            else:
                self.lost.add(_renamed(env, v))
        self.entries[entry.first] = replace(
            entry, count=scan.length, entering=tuple(entering), leaving=tuple(leaving), flow=flow, at=len(self.eqns)
        )


def type_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an array, or of a type of one; a scalar written in Python gives way to other dtypes, which is kept."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))


def _is_key(atom: Atom) -> bool:
    return hasattr(atom.aval, "dtype") and is_key_dtype(atom.aval.dtype)


def _renamed(env: dict[Var, Atom], var: Var) -> Var:
    new = fresh_var(var.aval)
    env[var] = new
    return new


def _blocks_in(eqn: JaxprEqn) -> set[int]:
    """Return the blocks that are called inside an equation."""
    blocks: set[int] = set()
    for body in sub_jaxprs(eqn):
        for inner in body.eqns:
            blocks |= {inner.params["block"]} if inner.primitive is _BLOCK else _blocks_in(inner)
    return blocks


Home = tuple[Path, int | None]
"""The place of a leaf in the module's own parameters: its path, and its index on axis 0 if blocks are stacked there."""


class CuttableModule(Protocol):
    """A module whose blocks can be left out of its call. ``leaves``: types of all its parameters by path. ``names``: what its
    blocks are called. ``homes``: by block, where its parameters, by their paths in it, lie in the module."""

    label: str
    leaves: Mapping[Path, jax.ShapeDtypeStruct]

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def homes(self) -> Sequence[Mapping[Path, Home]]: ...

    def run(self, leaves: Mapping[Path, Any], data: Sequence[Any], key: jax.Array, train: bool, stubs: Stubs) -> Any:
        """Call the module on batch arrays, with stubs for its blocks."""

    def call(self, block: int, params: Params, arguments: Any, key: jax.Array | None, train: bool) -> Any:
        """Call a block on ``(args, kwargs)``."""

    def alike(self, block: int) -> Hashable:
        """Return a key that is equal for blocks of which :meth:`call` computes the same."""

    def draw(self, key: jax.Array, paths: Sequence[Path]) -> Mapping[Path, jax.Array]:
        """Draw the initial values of these parameters."""


Mode = tuple[bool, Any]
"""Whether a call trains, and the dtype of its parameters (None: as declared)."""

TRAIN: Mode = (True, None)


class Tracing:
    """Traces outlines of a module's call at whatever shapes, and what its blocks return."""

    def __init__(self, module: CuttableModule, reads: tuple[str, ...]) -> None:
        self.module = module
        self.reads = reads
        self._probed: dict[Hashable, tuple[Any, bool]] = {}
        self._outlines: dict[Hashable, Outline] = {}

    def outlines(self, data: Sequence[jax.ShapeDtypeStruct]) -> dict[Mode, Outline]:
        """Trace the outlines for a batch of these types, by mode.

        Raises:
            StageError: the call can't be traced, or does not treat blocks as blocks.
        """
        by_mode: dict[Mode, Outline] = {}
        for mode in (TRAIN, (False, None), (True, jnp.bfloat16)):
            try:
                by_mode[mode] = self.outline(self.leaves(mode[1]), data, mode)
            except StageError:
                raise
            # A module that refuses bfloat16 is cut by its float32 outlines alone.
            except Exception as error:
                if mode[1] is None:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise StageError(
                        f"{self.module.label} can't be traced: {type(error).__name__}: {reason}"
                    ) from error
        return by_mode

    def leaves(self, dtype: Any) -> Mapping[Path, jax.ShapeDtypeStruct]:
        """Return the types of the parameters, floating-point ones in ``dtype``."""
        if dtype is None:
            return self.module.leaves
        cast = {path: jnp.issubdtype(v.dtype, jnp.floating) for path, v in self.module.leaves.items()}
        return {p: jax.ShapeDtypeStruct(v.shape, dtype if cast[p] else v.dtype) for p, v in self.module.leaves.items()}

    def outline(
        self,
        leaves: Mapping[Path, Any],
        data: Sequence[Any],
        mode: Mode,
        key: Any = None,
        block_results: Mapping[Wire, Any] | None = None,
    ) -> Outline:
        """Trace the outline with inputs ``leaves`` (in order), ``data``, the key. ``block_results``: those that are known."""
        stubs = Stubs(self.module.label, lambda block, args: self.probe(block, args, mode)[0], block_results or {})

        def call(arrays: list[Any]) -> Any:
            leaf_arrays = dict(zip(leaves, arrays, strict=False))
            return self.module.run(leaf_arrays, arrays[len(leaf_arrays) : -1], arrays[-1], mode[0], stubs)

        return trace_outline(stubs, call, [*leaves.values(), *data, key_aval() if key is None else key])

    def from_data(self, data: Sequence[Any], train: bool) -> Outline:
        """Return the outline for values that depend on the batch alone; traced once for arrays of these types."""
        key = (train, tuple(map(jax.typeof, data)))
        if key not in self._outlines:
            self._outlines[key] = self.outline(self.module.leaves, data, (train, None))
        return self._outlines[key]

    def probe(self, block: int, arguments: Any, mode: Mode) -> tuple[Any, bool]:
        """Return what a block returns for arguments of these types, and whether it draws random numbers."""
        shapes = [type_of(leaf) for leaf in array_leaves(arguments)]
        types = tuple((v.shape, str(v.dtype), v.weak_type) for v in shapes)
        signature = (self.module.alike(block), structure_key(arguments), types, mode)
        if signature not in self._probed:
            leaves = self.leaves(mode[1])
            params = {path: _part_type(leaves[home], at) for path, (home, at) in self.module.homes[block].items()}
            results: list[Any] = []

            def traced(params: Params, arrays: list[Any], key: jax.Array) -> list[Any]:
                results.append(self.module.call(block, params, fill(arguments, arrays), key, mode[0]))
                return array_leaves(results[-1])

            closed, out = jax.make_jaxpr(traced, return_shape=True)(nested(params), shapes, key_aval())
            used = only_results(closed, range(len(out)))[1]
            self._probed[signature] = (fill(results[-1], out), used[-1])
        return self._probed[signature]


class Wiring:
    """The source of each argument of each block, read off the outlines in all modes.

    ``sources``: the wire of each argument, by block and position. ``computed``: the wires that a layer before an entry must
    compute. ``free``: wires that depend on the batch alone.
    """

    def __init__(self, module: CuttableModule, outlines: Mapping[Mode, Outline]) -> None:
        self.module = module
        self.outlines = outlines
        self.sources: dict[tuple[int, int], Wire] = {}
        self.computed: dict[int, list[Wire]] = {}
        self.free: set[Wire] = set()
        self._check_entries()
        wire_of: dict[Mode, dict[Var, Wire]] = {mode: {} for mode in outlines}
        for c, entry in enumerate(outlines[TRAIN].entries):
            self.computed[c] = []
            for i in range(len(entry.entering)):
                self._connect(c, i, wire_of)
            for mode, outline in outlines.items():
                wire_of[mode] |= {var: wire for wire, var in outline.entries[c].results.items()}

    def _connect(self, c: int, i: int, wire_of: Mapping[Mode, dict[Var, Wire]]) -> None:
        """Find where argument ``i`` of entry ``c`` comes from."""
        entry = self.outlines[TRAIN].entries[c]
        atoms = {mode: outline.entries[c].entering[i] for mode, outline in self.outlines.items()}
        aliases = {wire_of[mode].get(a) if isinstance(a, Var) else None for mode, a in atoms.items()}
        wire: Wire = ("in", entry.first, i)
        # An earlier wire only where all modes agree: in one of them two values may be the same by chance (no dropout, no cast).
        (source,) = aliases if len(aliases) == 1 else (None,)
        if source is None:
            source = wire
            for mode, atom in atoms.items():
                if isinstance(atom, Var):
                    wire_of[mode].setdefault(atom, wire)
            if all(self._is_free(mode, atom) for mode, atom in atoms.items()):
                self.free.add(wire)
            else:
                self.computed[c].append(wire)
        self.sources[(entry.first, i)] = source
        for k in range(entry.first + 1, entry.first + entry.count):
            self.sources[(k, i)] = ("out", k - 1, entry.flow[i]) if i in entry.flow else source

    def _is_free(self, mode: Mode, atom: Atom) -> bool:
        """Whether a value depends on batch arrays alone."""
        outline = self.outlines[mode]
        params = len(self.module.leaves)
        _, starts = outline.needed([atom])
        return starts <= set(outline.invars[params:-1])

    def _check_entries(self) -> None:
        train, *other_modes = (
            [(e.first, e.count, len(e.entering), len(e.leaving), dict(e.flow)) for e in outline.entries]
            for outline in self.outlines.values()
        )
        called = [k for first, count, *_ in train for k in range(first, first + count)]
        if any(entries != train for entries in other_modes):
            what = "calls its blocks otherwise in evaluation, or in bfloat16, than in training"
        elif missing := [k for k in range(len(self.module.names)) if k not in called]:
            what = f"does not call block {missing[0]} ({self.module.names[missing[0]]})"
        elif len(called) > len(self.module.names):
            what = f"calls {len(called)} blocks and has {len(self.module.names)}"
        else:
            return
        raise StageError(f"{self.module.label} {what}; write the layers by hand")


AnyPath = TypeVar("AnyPath", bound=tuple[Any, ...])


def initial_values(
    program: ClosedJaxpr, paths: Sequence[AnyPath], chosen: Sequence[AnyPath], key: jax.Array | None
) -> dict[AnyPath, jax.Array] | None:
    """Compute the values at ``chosen``, of those at ``paths`` that ``program`` makes of a key, and no others; None where they
    depend on the key and there is none."""
    # A layer draws its own parameters only: a model too large for one device is never drawn whole.
    part, (takes_key,) = only_results(program, map(paths.index, chosen))
    if takes_key and key is None:
        return None
    results = eval_jaxpr(part.jaxpr, part.consts, *([key] if takes_key else []))
    # Scalars that are written in the jaxpr come as arrays of NumPy.
    arrays = map(jnp.asarray, results)
    return dict(zip(sorted(chosen, key=paths.index), arrays, strict=True))


def structure_key(arguments: Any) -> Hashable:
    """Return a key of the structure of a call's arguments and of what among them is no array."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(None if is_array(leaf) else value_key(leaf) for leaf in leaves)


def _part_type(leaf: jax.ShapeDtypeStruct, index: int | None) -> jax.ShapeDtypeStruct:
    return leaf if index is None else jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
