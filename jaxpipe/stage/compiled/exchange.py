"""The collectives of a stage function alone: same shapes, same devices, one after another, nothing beside them.

For measuring T_AR of `stp.txt` section 4.3 (:mod:`jaxpipe.cost`): what schedules with braids hide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpipe._jax_compat import close_jaxpr, dtype_of, eval_jaxpr, shape_of, variables
from jaxpipe.mesh import AXES, device_sharded
from jaxpipe.stage.compiled.braid import mesh_of
from jaxpipe.stage.functions import StageFunction
from jaxpipe.stage.weave.units import collectives


def collectives_alone(function: StageFunction) -> tuple[Callable[..., Any], list[jax.Array]] | None:
    """A jitted function of nothing but the collectives of ``function``, and arrays for it; None if it has none."""
    eqns = [function.jaxpr.jaxpr.eqns[c.eqn] for c in collectives(function.jaxpr)]
    if not eqns:
        return None
    mesh = mesh_of([function])
    home = device_sharded(mesh, AXES)

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
