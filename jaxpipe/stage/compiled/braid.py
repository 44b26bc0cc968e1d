"""Compiles braided slots: functions of several (op, stage) of one rank as one.

Source: ``stp.txt`` section 3. The parts compute independent things, so their equations are woven (``weave/weaver.py``),
and each collective of one part finds compute of another to hide behind. What the parts share is passed once: the parameters of
a stage, and its accumulators, to which the parts add one after another, in the order of the slot. Only these additions are kept
in order; all that leads up to them is woven. So the results are those of separate calls, bit for bit.

A call takes the arguments of all parts, and one scalar tells that it has run. Not modelled: parts that read what another part
of the slot makes (an invalid schedule), and parts on different submeshes.

:func:`collectives_alone` makes what braids hide a function of its own, to be timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpipe import dump
from jaxpipe._jax_compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Var,
    close_jaxpr,
    dtype_of,
    eval_jaxpr,
    fresh_var,
    shape_of,
    variables,
)
from jaxpipe.mesh import device_sharded
from jaxpipe.stage.compiled.compile import BuildCache, compiled, jit_per_shard
from jaxpipe.stage.functions import SHARED, BraidedFunction, Parts, Port, StageFunction, StageFunctions
from jaxpipe.stage.jaxprs import Dataflow, called, reachable
from jaxpipe.stage.weave.units import collectives
from jaxpipe.stage.weave.weaver import weave


def build_braids(
    braids: Iterable[tuple[int, Parts]], functions: Mapping[tuple[int, int], StageFunctions], cache: BuildCache
) -> dict[tuple[int, Parts], BraidedFunction]:
    """Make the braided functions of ``braids`` (rank, parts). They compile when they first run, once for all whose parts share
    compiled code (``cache``)."""
    return {
        (rank, parts): braid([(s, functions[(rank, s)].functions[op]) for op, s in parts], cache)
        for rank, parts in braids
    }


def braid(parts: Sequence[tuple[int, StageFunction]], cache: BuildCache) -> BraidedFunction:
    """Make one function of several ``(stage, function)`` that live on one submesh, in the order of the slot."""
    assert len(parts) > 1, "a braid has at least two parts"
    names: Parts = tuple((f.op, stage) for stage, f in parts)
    stages = [stage for stage, _ in parts]
    # Which stages are the same matters, not which they are: those share parameters and accumulators.
    key = ("braid", tuple(f.jitted for _, f in parts), tuple(stages.index(s) for s in stages))
    function: BraidedFunction | None = cache.jitted.get(key)
    if function is None:
        mesh = mesh_of([f for _, f in parts])
        function = cache.jitted[key] = _compiled(names, _Composition(parts, mesh), mesh)
    return replace(function, parts=names)


def _compiled(names: Parts, composition: _Composition, mesh: Mesh) -> BraidedFunction:
    name = "_with_".join(f"{op}_stage{stage}" for op, stage in names)
    dump.dump("jaxpr", f"braid-{name}", lambda: str(composition.closed))
    dump.dump("weave", f"braid-{name}", lambda: str(composition.woven))
    (input_parts, inputs, avals_in), (output_parts, outputs, avals_out) = (
        tuple(zip(*ends, strict=True)) or ((), (), ()) for ends in (composition.inputs, composition.outputs)
    )

    def jit(donated: tuple[int, ...], results: Sequence[int]) -> Any:
        return jit_per_shard(composition.closed, avals_in, avals_out, results, mesh, donated, name)

    return BraidedFunction(
        inputs,
        outputs,
        avals_in,
        avals_out,
        *compiled(composition.closed, inputs, outputs, jit),
        parts=names,
        input_parts=input_parts,
        output_parts=output_parts,
        collectives=composition.woven.collectives,
    )


def mesh_of(functions: Sequence[StageFunction]) -> Mesh:
    """Return the submesh on which functions run."""
    meshes = {a.sharding.mesh for f in functions for a in f.avals_out if isinstance(a.sharding, NamedSharding)}
    assert len(meshes) == 1, "the parts of a braid live on one submesh"
    (mesh,) = meshes
    assert isinstance(mesh, Mesh)
    return mesh


class _Composition:
    """Weaves the parts, with shared arguments unified and accumulators handed from part to part.

    ``inputs``, ``outputs``: (part, port, aval) of each argument and result of ``closed``. ``woven``: what was put under what.
    """

    def __init__(self, parts: Sequence[tuple[int, StageFunction]], mesh: Mesh) -> None:
        self.parts = parts
        self.inputs: list[tuple[int, Port, jax.ShapeDtypeStruct]] = []
        self.outputs: list[tuple[int, Port, jax.ShapeDtypeStruct]] = []
        self._invars: dict[tuple[int, Port], Var] = {}
        self._env: dict[Var, Atom] = {}
        self._sums: dict[tuple[int, Port], Atom] = {}
        heads = self._heads()
        self.woven = weave([h.closed for h in heads], mesh.shape)
        woven = self.woven.jaxpr
        woven_atoms = self._bind(heads, woven)
        eqns = [eqn.replace(invars=[called(self._env, a) for a in eqn.invars]) for eqn in woven.jaxpr.eqns]
        results: list[dict[Port, Atom]] = []
        for k, (head, atoms) in enumerate(zip(heads, woven_atoms, strict=True)):
            results.append(self._finish(k, head, [called(self._env, a) for a in atoms], eqns))
        outvars = self._results(results)
        consts = list(zip(woven.jaxpr.constvars, woven.consts, strict=True))
        self.closed = close_jaxpr(consts, list(self._invars.values()), eqns, outvars)

    def _heads(self) -> list[_Head]:
        """Return what is woven of each part: everything but additions to accumulators that an earlier part adds to."""
        # Woven, a second part's addition would read the accumulator as it was before the first: so it is left out, and follows.
        heads, adding = [], set()
        for stage, f in self.parts:
            adds = any(p.kind == "acc" for p in f.outputs)
            heads.append(_without_additions(f) if adds and stage in adding else _Head(f.jaxpr, f.inputs, f.outputs))
            if adds:
                adding.add(stage)
        return heads

    def _bind(self, heads: Sequence[_Head], woven: ClosedJaxpr) -> list[list[Atom]]:
        """Unify the arguments of the parts; returns each part's results in ``woven``."""
        invars, outvars = iter(woven.jaxpr.invars), iter(woven.jaxpr.outvars)
        for k, (head, (stage, f)) in enumerate(zip(heads, self.parts, strict=True)):
            avals = dict(zip(f.inputs, f.avals_in, strict=True))
            for port in head.inputs:
                var = next(invars)
                key = self._key(k, stage, port)
                if key not in self._invars:
                    self._invars[key] = var
                    self.inputs.append((k, port, avals[port]))
                self._env[var] = self._invars[key]
        return [[next(outvars) for _ in head.closed.jaxpr.outvars] for head in heads]

    @staticmethod
    def _key(part: int, stage: int, port: Port) -> tuple[int, Port]:
        """Return the key of an argument: shared ones are named by stage, others by part."""
        return (stage, port) if port.kind in SHARED else (-1 - part, port)

    def _finish(self, k: int, head: _Head, atoms: Sequence[Atom], eqns: list[JaxprEqn]) -> dict[Port, Atom]:
        """Return the results of a part by port, after appending to ``eqns`` the additions that were left out of the weave."""
        stage, _ = self.parts[k]
        atom_of = dict(zip(head.outputs, atoms, strict=False))
        local = dict(zip(head.crossing, atoms[len(head.outputs) :], strict=True))
        local.update((var, self._sums[(stage, port)]) for port, var in head.sums)
        for eqn in head.additions:
            invars = [local[a] if isinstance(a, Var) else a for a in eqn.invars]
            outvars = [fresh_var(v.aval) for v in eqn.outvars]
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
            local.update(zip(eqn.outvars, outvars, strict=True))
        atom_of.update((port, local[var]) for port, var in head.added)
        self._sums.update(((stage, port), atom) for port, atom in atom_of.items() if port.kind == "acc")
        return atom_of

    def _results(self, results: Sequence[Mapping[Port, Atom]]) -> list[Atom]:
        """Return the results of all parts in order; of accumulators only the last sum, of tokens the last."""
        # Each intermediate sum is donated to the next addition, so nobody else may see it.
        last = {(stage, port): k for k, (stage, f) in enumerate(self.parts) for port in f.outputs if port.kind == "acc"}
        outvars = []
        for k, (stage, f) in enumerate(self.parts):
            for n, (port, aval) in enumerate(zip(f.outputs, f.avals_out, strict=True)):
                if last.get((stage, port), k) != k or (port.kind == "token" and k < len(self.parts) - 1):
                    continue
                self.outputs.append((k, port, aval))
                source = f.inputs[f.forwarded[n]] if n in f.forwarded else None
                outvars.append(results[k][port] if source is None else self._invars[self._key(k, stage, source)])
        return outvars


@dataclass(frozen=True, slots=True)
class _Head:
    """The part of a function that is woven: ``closed`` takes ``inputs`` and returns ``outputs``, then ``crossing``.

    ``additions``: equations that follow, which add to what the accumulators ``sums`` hold by then, and make ``added``.
    """

    closed: ClosedJaxpr
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    crossing: tuple[Var, ...] = ()
    sums: tuple[tuple[Port, Var], ...] = ()
    additions: tuple[JaxprEqn, ...] = ()
    added: tuple[tuple[Port, Var], ...] = ()


def _without_additions(function: StageFunction) -> _Head:
    """Return a part without the equations that depend on its accumulators, and those."""
    jaxpr = function.jaxpr.jaxpr
    arguments = list(zip(function.inputs, jaxpr.invars, strict=True))
    results = list(zip(function.outputs, jaxpr.outvars, strict=True))
    sums = tuple((p, v) for p, v in arguments if p.kind == "acc")
    flow = Dataflow(jaxpr.eqns)
    adding = reachable((i for _, v in sums for i in flow.readers.get(v, ())), flow.outputs)
    additions = [jaxpr.eqns[i] for i in sorted(adding)]
    head = [eqn for i, eqn in enumerate(jaxpr.eqns) if i not in adding]
    after = {*(v for _, v in sums), *(v for eqn in additions for v in eqn.outvars)}
    crossing = tuple(dict.fromkeys(v for eqn in additions for v in variables(eqn.invars) if v not in after))
    late = {p for p, a in results if isinstance(a, Var) and a in after}
    results_of_head = [(p, a) for p, a in results if p not in late]
    inputs = [(p, v) for p, v in arguments if p.kind != "acc"]
    consts = list(zip(jaxpr.constvars, function.jaxpr.consts, strict=True))
    return _Head(
        close_jaxpr(consts, [v for _, v in inputs], head, [*(a for _, a in results_of_head), *crossing]),
        tuple(p for p, _ in inputs),
        tuple(p for p, _ in results_of_head),
        crossing,
        sums,
        tuple(additions),
        tuple((p, a) for p, a in results if isinstance(a, Var) and p in late),
    )


def collectives_alone(function: StageFunction) -> tuple[Callable[..., Any], list[jax.Array]] | None:
    """Return a jitted function of nothing but the collectives of ``function``, and arrays for it; None if it has none.

    Same shapes, same devices, one after another, nothing beside them: T_AR of `stp.txt` section 4.3, what braids hide.
    """
    eqns = [function.jaxpr.jaxpr.eqns[c.eqn] for c in collectives(function.jaxpr)]
    if not eqns:
        return None
    mesh = mesh_of([function])
    home = device_sharded(mesh, mesh.axis_names)

    def run(*shards: Any) -> list[Any]:
        results: list[Any] = []
        for eqn, shard in zip(eqns, shards, strict=True):
            if results:  # one after another
                shard, results[-1] = jax.lax.optimization_barrier((shard, results[-1]))
            one = close_jaxpr([], list(variables(eqn.invars[:1])), [eqn], eqn.outvars)
            results += eval_jaxpr(one.jaxpr, one.consts, shard)
        return results

    mapped = jax.shard_map(run, mesh=mesh, in_specs=home.spec, out_specs=home.spec, check_vma=False)
    shapes = [shape_of(eqn.invars[0]) for eqn in eqns]
    rng = np.random.default_rng(0)
    arrays = [
        jax.device_put(rng.uniform(size=(mesh.size * shape[0], *shape[1:])).astype(dtype_of(eqn.invars[0])), home)
        for eqn, shape in zip(eqns, shapes, strict=True)
    ]
    return jax.jit(mapped), arrays
