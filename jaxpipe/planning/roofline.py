"""Seconds of a stage function from its jaxpr: a roofline per kernel, with stated efficiencies.

The jaxpr is cut into kernels as XLA roughly does on a GPU. Matrix products, convolutions, gathers, scatters, sorts and loops
are kernels of their own; so are collectives, but their seconds are counted elsewhere (:mod:`jaxpipe.stage.weave.units`).
Reductions read through the elementwise work that feeds them. Elementwise work costs nothing by itself: where its result must
exist in memory (it leaves the function, or a product reads it), one kernel reads what the chain started from and writes the
result. Reshapes and barriers cost nothing. A product of 16-bit floats that returns float32 adds in place (cuBLAS's beta = 1)
where it is added to something. A kernel takes
``max(operations / (peak · matmul efficiency), bytes / (memory bandwidth · bandwidth efficiency)) + launch`` seconds.

The same walk gives an estimate of workspace: values that exist in memory and neither enter nor leave, at their most. It stands
in where the function can't be compiled for the target. Beside XLA's own, of GPT and Llama layers for A100 and H100, one to
three a stage: B within 2%; W exact, or twice too much where an embedding is in it; BW from 24% too little to 80% too much; F
from half (Llama) to the same, and 0.8 GB too much where the loss is in it.

Differs from what runs: XLA may fuse more or less, keeps what repeats in L2, and reorders; attention on the plain XLA path moves
its scores through memory, as here, which cuDNN's kernel does not. ``while`` counts one iteration.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from jaxpipe._jax_compat import JaxprEqn, Var, aval_bytes, dtype_of, scan_parts, shape_of, sub_jaxprs, variables
from jaxpipe.planning.targets import Target
from jaxpipe.stage.jaxprs import EqnKind, eqn_flops, has_body, is_exchange, kind, multiplies_experts, reachable, row

_OWN = frozenset({EqnKind.PRODUCT, EqnKind.CUSTOM, EqnKind.KERNEL, EqnKind.WINDOW, EqnKind.EXCHANGE})
_FREE = frozenset({EqnKind.RESHAPE, EqnKind.SAME, EqnKind.BARRIER})


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the target's rates that are reached, the time to launch a kernel, and how evenly experts are chosen.

    ``matmul``: of the dense peak, None for what the target reaches (``Target.matmul_efficiency``); ``bandwidth`` 0.8 of the
    memory's; ``link`` 0.8 of NVLink or network; ``host`` 0.85 of PCIe. ``memory``: part of the device's memory that arrays may
    fill (context, libraries and fragmentation take the rest); for a GPU the verbs put in its place what JAX would give itself
    there (``run.memory_fraction``). ``imbalance``: rows that the device with the most receives for its experts ÷ the mean.
    """

    matmul: float | None = None
    bandwidth: float = 0.8
    link: float = 0.8
    host: float = 0.85
    memory: float = 0.92
    kernel_s: float = 3e-6
    imbalance: float = 1.0

    def matmul_of(self, target: Target) -> float:
        """Return the part of the dense peak of ``target`` that matrix products reach."""
        return target.matmul_efficiency if self.matmul is None else self.matmul


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a function: ``flops`` of matrix products, ``moved_bytes`` through device memory, ``kernels``, ``seconds`` on
    the target, ``workspace_bytes`` (estimated). ``expert_flops``, ``expert_s``: the part that products of experts take, on all
    rows that their buffers have room for."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    seconds: float = 0.0
    kernels: int = 0
    workspace_bytes: float = 0.0
    expert_flops: float = 0.0
    expert_s: float = 0.0


class SizeView:
    """A view of a jaxpr that changes nothing; subclasses show it with other sizes."""

    def atom(self, atom: Any) -> Any:
        """Return a variable or literal as this view shows it."""
        return atom

    def eqn(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation as this view shows it."""
        return eqn


def work_of(jaxpr: Any, target: Target, efficiency: Efficiency) -> Work:
    """Return the work of a ``Jaxpr`` or ``ClosedJaxpr`` whose calls are inlined (bodies of loops and branches are followed)."""
    return KernelWalk(getattr(jaxpr, "jaxpr", jaxpr), target, efficiency).at(SizeView())


class _Kernel(NamedTuple):
    """A kernel that runs ``times`` times at these ``rates``: operations and bytes a second. It does the operations of
    ``product``, if there is one, and moves ``results``, ``sources`` and what it picks of the ``table``. ``step``: where
    elementwise work stands in its body. ``launch``: False if it runs in an earlier kernel, which has read the sources.
    ``of_experts``: the product's."""

    rates: tuple[float, float]
    results: tuple[Var, ...]
    sources: frozenset[Var]
    times: int = 1
    product: JaxprEqn | None = None
    table: Var | None = None
    step: int | None = None
    launch: bool = True
    of_experts: bool = False


class _Sizes:
    """Entries and bytes of arrays in a view."""

    def __init__(self, view: SizeView) -> None:
        self.view = view
        self.known: dict[Var, tuple[int, int]] = {}

    def of(self, v: Var) -> tuple[int, int]:
        if v not in self.known:
            atom = self.view.atom(v)
            self.known[v] = math.prod(shape_of(atom)), aval_bytes(atom.aval) if _sized(v) else 0
        return self.known[v]

    def bytes(self, arrays: Iterable[Var]) -> int:
        return sum(self.of(v)[1] for v in arrays)


class KernelWalk:
    """One pass over the equations of one body; :meth:`at` gives its work in any view. ``kernels``: one after another;
    ``launched``: what stands where in the body, with what it reads; ``inside``: workspace of the bodies of loops. ``experts``:
    as :func:`~jaxpipe.stage.jaxprs.multiplies_experts` takes them."""

    def __init__(
        self, body: Any, target: Target, efficiency: Efficiency, experts: Collection[tuple[int, int]] = ()
    ) -> None:
        self.body, self.target, self.efficiency, self.experts = body, target, efficiency, experts
        self.kernels: list[_Kernel] = []
        self.inside = 0.0
        self.own = {id(eqn) for eqn in body.eqns if kind(eqn) in _OWN or has_body(eqn)}
        self.maker: dict[Var, JaxprEqn] = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        self.sums = {id(product): eqn for eqn in body.eqns if (product := self._added_product(eqn)) is not None}
        self.outside = {self.base(v) for v in (*body.invars, *body.constvars, *variables(body.outvars))}
        self.stored = self._stored()
        self.launched: list[tuple[JaxprEqn, frozenset[Var]]] = []
        self._changes: dict[frozenset[int], list[tuple[int, Var]]] = {}
        self._run()

    def at(self, view: SizeView) -> Work:
        """Return the work of the body in a view."""
        sizes = _Sizes(view)
        kernels = self._fused(sizes)

        def counts(k: _Kernel) -> tuple[float, float]:
            picked = 0 if k.table is None else min(sizes.bytes(k.results), sizes.bytes((k.table,)))
            flops = 0 if k.product is None else eqn_flops(view.eqn(k.product))
            return flops, picked + sizes.bytes(k.results) + sizes.bytes(k.sources)

        rows = [(k.times, self.efficiency.kernel_s * k.launch, *k.rates, *counts(k)) for k in kernels]
        times, launch_s, flops_per_s, bytes_per_s, flops, moved = np.reshape(np.array(rows, float), (-1, 6)).T
        seconds = times * (np.maximum(flops / flops_per_s, moved / bytes_per_s) + launch_s)
        joined = frozenset(k.step for k in kernels if k.step is not None and not k.launch)
        live = accumulate(sign * sizes.of(v)[1] for sign, v in self._workspace(joined))
        total_flops, total_moved, total_s = (float(x.sum()) for x in (times * flops, times * moved, seconds))
        launches = sum(k.times for k in kernels if k.launch)
        of_experts = np.array([k.of_experts for k in kernels], bool)
        expert_flops, expert_s = (float(x[of_experts].sum()) for x in (times * flops, seconds))
        workspace_bytes = max(self.inside, *map(float, live), 0.0)
        return Work(total_flops, total_moved, total_s, launches, workspace_bytes, expert_flops, expert_s)

    def _fused(self, sizes: _Sizes) -> list[_Kernel]:
        """Return the kernels, of which those that read the same sources write their results together."""
        fused, first = list[_Kernel](), set[tuple[frozenset[Var], int]]()
        for kernel in self.kernels:
            if kernel.step is not None and kernel.sources:
                # equal sources alone do not make one kernel: XLA joins results of one shape
                key = kernel.sources, max(sizes.of(v)[0] for v in (*kernel.results, *kernel.sources))
                fused.append(kernel._replace(sources=frozenset(), launch=False) if key in first else kernel)
                first.add(key)
            else:
                fused.append(kernel)
        return fused

    def base(self, v: Var) -> Var:
        """Return the value of which ``v`` is a reshape, or a copy behind a barrier."""
        while (eqn := self.maker.get(v)) is not None and kind(eqn) in _FREE:
            operand = eqn.invars[eqn.outvars.index(v)]
            if not isinstance(operand, Var):
                break
            v = operand
        return v

    def _added_product(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Return the product that adds its result in place of ``eqn``; None where ``eqn`` is no such sum."""
        if eqn.primitive.name != "add" or dtype_of(eqn.outvars[0]) != np.float32:
            return None
        term = self.maker.get(self.base(eqn.invars[1])) if isinstance(eqn.invars[1], Var) else None
        while term is not None and term.primitive.name == "transpose":
            term = next((self.maker.get(self.base(v)) for v in variables(term.invars)), None)
        is_narrow = (
            term is not None and term.primitive.name == "dot_general" and _dtype(term) in ("bfloat16", "float16")
        )
        return term if is_narrow else None

    def _stored(self) -> set[Var]:
        """Return the values that are stored in memory."""
        # what a product, a collective or a loop reads must exist; elementwise work would be fused into any other reader
        stored = set(self.outside)
        for eqn in self.body.eqns:
            if (id(eqn) in self.own or _reduces(eqn)) and id(eqn) not in self.sums:
                stored.update(eqn.outvars)
            if id(eqn) in self.own:
                stored.update(self.base(v) for v in variables(eqn.invars))
        return stored

    def _run(self) -> None:
        added = set(map(id, self.sums.values()))
        for eqn in self.body.eqns:
            if kind(eqn) in _FREE or id(eqn) in added:
                continue
            if id(eqn) in self.own:
                self._own_kernel(eqn)
            elif _reduces(eqn) or any(v in self.stored for v in eqn.outvars):
                self._kernel(eqn, self._sources(eqn), step=len(self.launched))

    def _own_kernel(self, eqn: JaxprEqn) -> None:
        scan, plain = scan_parts(eqn), SizeView()
        bodies = [KernelWalk(b, self.target, self.efficiency, self.experts) for b in sub_jaxprs(eqn)]
        sources = {self.base(v) for v in variables(eqn.invars)}
        if bodies:
            # a branch costs what its longest arm does; ``while`` has its condition first, and one iteration of its body
            is_branch = eqn.primitive.name == "cond"
            chosen = max(bodies, key=lambda walk: walk.at(plain).seconds) if is_branch else bodies[-1]
            times = scan.length if scan is not None else 1
            self.kernels += [k._replace(times=times * k.times, step=None) for k in chosen._fused(_Sizes(plain))]
            self.inside = max(self.inside, chosen.at(plain).workspace_bytes)
            self._note(eqn, sources)
        elif is_exchange(eqn):
            self._note(eqn, sources)
        elif row(eqn).picks:  # of what it reads, only what it picks
            table = self.base(next(variables(eqn.invars)))
            self._kernel(eqn, sources - {table}, table=table)
            self._note(eqn, {table})
        elif (add := self.sums.get(id(eqn))) is not None:
            sources |= {self.base(v) for v in variables(add.invars[:1])}
            self._kernel(eqn.replace(outvars=add.outvars), sources, product=eqn)
        else:
            self._kernel(eqn, sources, product=eqn)

    def _kernel(self, eqn: JaxprEqn, sources: Iterable[Var], **facts: Any) -> None:
        e, t = self.efficiency, self.target
        rates = t.peak_flops_per_s(_dtype(eqn)) * e.matmul_of(t), t.memory_bytes_per_s * e.bandwidth
        of_experts = "product" in facts and multiplies_experts(facts["product"], self.experts)
        self.kernels.append(_Kernel(rates, tuple(eqn.outvars), frozenset(sources), of_experts=of_experts, **facts))
        self._note(eqn, sources)

    def _note(self, eqn: JaxprEqn, sources: Iterable[Var]) -> None:
        self.launched.append((eqn, frozenset(sources)))

    def _sources(self, eqn: JaxprEqn) -> frozenset[Var]:
        """Return the stored values that the chain of elementwise work before ``eqn`` reads."""

        def made_of(v: Var) -> Iterable[Var]:
            return () if is_source(v) else map(self.base, variables(self.maker[v].invars))

        def is_source(v: Var) -> bool:
            return v in self.stored or v not in self.maker

        return frozenset(filter(is_source, reachable(map(self.base, variables(eqn.invars)), made_of)))

    def _workspace(self, joined: frozenset[int]) -> list[tuple[int, Var]]:
        """Return allocations (1) and frees (-1) of values that are made and read inside, in the order of :meth:`_order`.
        ``joined``: steps that run in earlier kernels and read nothing themselves.

        A result may take the place of an operand that is read for the last time, except in kernels of their own.
        """
        if joined in self._changes:
            return self._changes[joined]
        launched = [(eqn, frozenset[Var]() if k in joined else read) for k, (eqn, read) in enumerate(self.launched)]
        born_at: dict[Var, int] = {}
        last: dict[Var, tuple[int, int]] = {}
        for now, k in enumerate(self._order(launched)):
            eqn, sources = launched[k]
            for v in eqn.outvars:
                born_at.setdefault(v, now)
            for v in sources:
                last[v] = (now, 2 if id(eqn) in self.own else 0)
        # within a step: 0 frees operands of elementwise work, 1 allocates results, 2 frees operands of other kernels
        changes: list[tuple[int, int, int, Var]] = []
        for v, born in born_at.items():
            if v not in self.outside and v in last:
                changes += [(born, 1, 1, v), (*max((born, 2), last[v]), -1, v)]
        self._changes[joined] = [(sign, v) for _, _, sign, v in sorted(changes, key=lambda x: x[:3])]
        return self._changes[joined]

    def _order(self, launched: Sequence[tuple[JaxprEqn, frozenset[Var]]]) -> list[int]:
        """Return the order of kernels: that of the program, but a value that is only read later is computed right before its
        first reader (as a backward pass recomputes), and elementwise results for the caller right after their operands (as
        accumulated gradients)."""
        made_by: dict[Var, int] = {}
        for k, (eqn, _) in enumerate(launched):
            for v in eqn.outvars:
                made_by.setdefault(v, k)
        result = [id(eqn) not in self.own and all(v in self.outside for v in eqn.outvars) for eqn, _ in launched]
        when = list(range(len(launched)))
        needed_at: dict[int, int] = {}
        # from the last kernel to the first, so that a reader has its place before its sources look for it
        for k in range(len(launched) - 1, -1, -1):
            eqn, sources = launched[k]
            if not result[k] and k in needed_at and not any(v in self.outside for v in eqn.outvars):
                when[k] = needed_at[k]
            if not result[k]:
                for source in {made_by[v] for v in sources if v in made_by}:
                    needed_at[source] = min(needed_at.get(source, when[k]), when[k])
        for k, (_, sources) in enumerate(launched):
            if result[k]:
                when[k] = max((when[made_by[v]] for v in sources if v in made_by), default=0)
        return sorted(range(len(launched)), key=lambda k: (when[k], k))


def _reduces(eqn: JaxprEqn) -> bool:
    return kind(eqn) in (EqnKind.REDUCTION, EqnKind.CUMULATIVE)


def _sized(v: Any) -> bool:
    return hasattr(getattr(v, "aval", None), "dtype") and hasattr(v.aval, "shape")


def _dtype(eqn: JaxprEqn) -> str:
    """Return the dtype whose peak counts: the widest of the operands."""
    names = [_name(dtype_of(v)) for v in variables(eqn.invars[:2])]
    return next((wide for wide in ("float64", "float32") if wide in names), names[0] if names else "float32")


@cache
def _name(dtype: Any) -> str:
    return str(dtype)
