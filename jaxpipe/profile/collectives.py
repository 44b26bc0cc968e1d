"""Tensor-parallel collectives of a stage function, timed alone: the T_AR that schedules with braids hide.

The collectives are those of the function's own jaxpr, of the same shapes on the same devices, one after another with nothing
beside them. What a function takes without them is its own time less theirs, as long as nothing in it hides them, which holds
for F and B (`stp.txt` section 4.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpipe._jax_compat import close_jaxpr, dtype_of, eval_jaxpr, shape_of
from jaxpipe.mesh import DP, TP, device_sharded
from jaxpipe.profile.timing import Timing
from jaxpipe.stage.functions import StageFunction
from jaxpipe.stage.units import collectives


def time_collectives(function: StageFunction, repeats: int, warm_up: int = 1) -> Timing | None:
    """Seconds of all collectives over ``tp`` of one call of ``function``; None if it has none."""
    made = _alone(function)
    if made is None:
        return None
    run, arrays = made

    def sample() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        return time.perf_counter() - start

    for _ in range(1 + warm_up):
        sample()
    return Timing.of([sample() for _ in range(repeats)])


def _alone(function: StageFunction) -> tuple[Callable[..., Any], list[jax.Array]] | None:
    """A jitted function of nothing but the collectives, and arrays for it."""
    eqns = [function.jaxpr.jaxpr.eqns[c.eqn] for c in collectives(function.jaxpr)]
    if not eqns:
        return None
    mesh = _mesh(function)
    home = device_sharded(mesh, (DP, TP))

    def run(*shards: Any) -> list[Any]:
        results: list[Any] = []
        for eqn, shard in zip(eqns, shards, strict=True):
            if results:  # one after another
                shard, results[-1] = jax.lax.optimization_barrier((shard, results[-1]))
            one = close_jaxpr([], eqn.invars[:1], [eqn], eqn.outvars)
            results += eval_jaxpr(one.jaxpr, one.consts, shard)
        return results

    mapped = jax.shard_map(run, mesh=mesh, in_specs=home.spec, out_specs=home.spec, check_vma=False)
    shapes = [shape_of(eqn.invars[0]) for eqn in eqns]
    arrays = [
        jax.device_put(np.zeros((mesh.size * shape[0], *shape[1:]), jnp.dtype(dtype_of(eqn.invars[0]))), home)
        for eqn, shape in zip(eqns, shapes, strict=True)
    ]
    return jax.jit(mapped), arrays


def _mesh(function: StageFunction) -> Mesh:
    home = (*function.avals_in, *function.avals_out)[0].sharding
    assert isinstance(home, NamedSharding) and isinstance(home.mesh, Mesh), "stage functions know their devices"
    return home.mesh
