"""The one reduction of a step's gradients inside a rank: what its devices accumulated, summed.

Within a step every device adds up its own microbatch shards (``compiled/compile.py``), so F, B and W hold no reduction
over ``dp`` or ``cp``. Afterwards each accumulator is summed once, over both, and over ``tp`` too where shards made parts of a
gradient (``partial`` buffers); split parameters stay split. The result lies as the parameters do. Small leaves share a buffer
already (:mod:`jaxpipe.stage.model.params`), so a stage needs few collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpipe.mesh import AXES, DATA, spec_of
from jaxpipe.stage.functions import StageFunctions

Reduction = Callable[[list[jax.Array]], list[jax.Array]]


def reduction(mesh: Mesh, stage: StageFunctions) -> Reduction:
    """Make a function from the accumulators of a stage on ``mesh`` to its gradients, placed like its parameters.

    On one device, and generally where there is nothing to add up, the accumulators are the gradients.
    """
    axes = [reduced_axes(mesh, kind) for kind in stage.layout.kinds[: stage.layout.num_trained]]
    if not any(axes):
        return lambda acc: acc

    def reduce(acc: list[Any]) -> list[Any]:
        return [jax.lax.psum(a, over) if over else a for a, over in zip(acc, axes, strict=True)]

    reduce.__name__ = reduce.__qualname__ = f"reduce_stage{stage.stage}"
    into = [spec_of(a) for a in stage.acc_avals]
    reduce_stage: Reduction = on_rank(
        reduce, mesh, (into,), [spec_of(a) for a in stage.param_avals[: stage.layout.num_trained]]
    )
    return reduce_stage


def reduced_axes(mesh: Mesh, kind: str) -> tuple[str, ...]:
    """Return the axes of more than one device over which the gradients of a parameter buffer of this kind are summed."""
    return tuple(a for a in (AXES if kind == "partial" else DATA) if mesh.shape[a] > 1)


def on_rank(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
) -> Any:
    """Compile ``function`` of local arrays over the devices of a rank; with one device just compile it."""
    if mesh.size == 1:
        return jax.jit(function, donate_argnums=donate)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)
