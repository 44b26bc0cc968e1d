"""What the tensor-parallel collectives of a stage function take, run alone: T_AR of `stp.txt` section 4.3, measured.

The collectives of the function's jaxpr are run one after another on arrays of their shapes, on the devices of the rank, with
nothing between them. Under compute that can run beside them they take less of a step than that, and that part of the link's
time which a busy device slows down is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpipe._jax_compat import Jaxpr, JaxprEqn, sub_jaxprs
from jaxpipe.mesh import DP, TP, device_sharded
from jaxpipe.profile.timing import Timing
from jaxpipe.stage.functions import StageFunction

COLLECTIVES = frozenset({"psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute"})
_CALLS = 10
"""Of one sample on an accelerator: the collectives of a stage take little against the ends of a sample."""


def tp_collectives(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The collectives over ``tp`` that a per-shard jaxpr runs, in order; those in a loop as often as it turns."""
    return list(_found(jaxpr))


def _found(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if eqn.primitive.name in COLLECTIVES and TP in (axes if isinstance(axes, tuple) else (axes,)):
            yield eqn
        for inner in sub_jaxprs(eqn):
            for _ in range(int(eqn.params.get("length", 1))):
                yield from _found(inner)


def time_collectives(function: StageFunction, repeats: int) -> tuple[int, Timing | None]:
    """How many collectives over ``tp`` the function has, and what a call of them all takes; None where it has none."""
    equations = tp_collectives(function.jaxpr.jaxpr)
    if not equations:
        return 0, None
    sharding = function.avals_in[0].sharding
    assert isinstance(sharding, NamedSharding), "stage functions know their mesh"
    run, arrays = _alone(equations, sharding.mesh)
    calls = 1 if sharding.mesh.devices.flat[0].platform == "cpu" else _CALLS

    def sample() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            out = run(*arrays)
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / calls

    sample()  # compiles
    return len(equations), Timing.of([sample() for _ in range(repeats)])


def _alone(equations: Sequence[JaxprEqn], mesh: Mesh) -> tuple[Any, list[jax.Array]]:
    """A compiled function of the equations, each after the one before, and its arguments: equal shapes share one."""
    keys = [tuple((tuple(v.aval.shape), np.dtype(v.aval.dtype)) for v in eqn.invars) for eqn in equations]  # type: ignore[attr-defined]
    shapes = list(dict.fromkeys(shape for key in keys for shape in key))
    home = device_sharded(mesh, (DP, TP))

    def run(*arrays: Any) -> Any:
        given = dict(zip(shapes, (a[0] for a in arrays), strict=True))
        last: Any = ()
        for eqn, key in zip(equations, keys, strict=True):
            args, last = jax.lax.optimization_barrier(([given[shape] for shape in key], last))
            last = eqn.primitive.bind(*args, **eqn.params)
        return jax.tree.map(lambda a: a.ravel()[:1], last)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=home.spec, out_specs=home.spec, check_vma=False)
    arrays = [
        jax.device_put(np.ones((mesh.size, *shape), dtype), home) for shape, dtype in shapes
    ]  # a device's own each
    return jax.jit(mapped), arrays
