"""Compare what recompute policies save and cost on the stages at hand.

Everything is read off traced programs: nothing is compiled or run, so stages of any size can be compared on any machine. FLOPs
count elementwise work too (:mod:`jaxpipe.stage.jaxprs`), or ``cheap`` would seem to cost nothing.

Bytes saved count between F and B: what a schedule holds once per microbatch in flight. What W waits for (the operands of its
matrix products) is the same under every policy that recomputes no product for W, so a schedule that delays W much gains less.
Not modelled: workspace inside B, which holds what it recomputes for one layer at a time
(:func:`~jaxpipe.stage.functions.footprint`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe.axes import ONE_SHARD, RankMesh
from jaxpipe.stage.compiled.compile import BuildCache, build_all
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.jaxprs import jaxpr_flops
from jaxpipe.stage.model.layer import Layer, Params
from jaxpipe.stage.split.policies import STANDARD


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """One policy on one stage, per device and microbatch.

    ``residual_bytes``, ``w_residual_bytes``, ``cotangent_bytes`` as in :class:`~jaxpipe.stage.functions.StageFunctions`.
    ``saved_bytes``: residual bytes fewer than with ``none``. ``flops``: of F, B, W and BW, elementwise operations counted.
    ``added_flops``: of F, B and W together, beyond ``none``; ``added_fraction``: of their sum with ``none``.
    """

    policy: str
    residual_bytes: int
    w_residual_bytes: int
    cotangent_bytes: int
    saved_bytes: int
    flops: Mapping[str, int]
    added_flops: int
    added_fraction: float

    @property
    def saved_fraction(self) -> float:
        """Return the fraction of the residual bytes of ``none`` that this policy saves."""
        return self.saved_bytes / max(1, self.saved_bytes + self.residual_bytes)


def compare_policies(
    stages: Sequence[Sequence[Layer]],
    param_avals: Mapping[str, Params],
    data_avals: Mapping[str, jax.ShapeDtypeStruct],
    meshes: Sequence[Mesh],
    policies: Sequence[str] = STANDARD,
    acc_dtype: Any = jnp.float32,
    tp: RankMesh = ONE_SHARD,
) -> tuple[tuple[PolicyCost, ...], ...]:
    """Cost each of ``policies``, in their order, on each stage of a chain. Arguments as for
    :func:`~jaxpipe.stage.compiled.compile.build_all`; each stage is traced once.

    Raises:
        StageError: as ``build_all``; a policy does not exist.
    """
    cache = BuildCache()

    def built(name: str) -> tuple[StageFunctions, ...]:
        return build_all(stages, param_avals, data_avals, meshes, name, acc_dtype, cache, tp)

    base = built("none")
    rows = {name: built(name) for name in dict.fromkeys(policies)}
    return tuple(
        tuple(_cost(name, rows[name][s], base[s]) for name in dict.fromkeys(policies)) for s in range(len(stages))
    )


def _cost(name: str, stage: StageFunctions, base: StageFunctions) -> PolicyCost:
    flops, plain = (
        {op: jaxpr_flops(f.functions[op].jaxpr, elementwise=True) for op in ("F", "B", "W", "BW")}
        for f in (stage, base)
    )
    total, before = (sum(f[op] for op in ("F", "B", "W")) for f in (flops, plain))
    return PolicyCost(
        name,
        stage.residual_bytes,
        stage.w_residual_bytes,
        stage.cotangent_bytes,
        base.residual_bytes - stage.residual_bytes,
        MappingProxyType(flops),
        total - before,
        (total - before) / max(1, before),
    )


def policy_table(costs: Sequence[PolicyCost]) -> str:
    """Format the policies of one stage, a line each: MiB held from F to B and from B to W, bytes saved and FLOPs added in
    percent."""
    mib = 1 << 20
    lines = [f"{'policy':<22}{'F to B, MiB':>13}{'saved':>9}{'B to W, MiB':>13}{'FLOPs added':>13}"]
    lines += [
        f"{c.policy:<22}{c.residual_bytes / mib:>13.3f}{c.saved_fraction:>9.1%}{c.w_residual_bytes / mib:>13.3f}"
        f"{c.added_fraction:>13.2%}"
        for c in costs
    ]
    return "\n".join(lines)


def policy_tables(stages: Sequence[Sequence[PolicyCost]]) -> str:
    """Format the table of each stage under a heading, equal stages together."""
    alike: dict[str, list[int]] = {}
    for s, costs in enumerate(stages):
        alike.setdefault(policy_table(costs), []).append(s)
    return "\n".join(f"recomputing on {_stages(which)}, per microbatch:\n{table}" for table, which in alike.items())


def _stages(which: Sequence[int]) -> str:
    return f"stage{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"


def remarks(stages: Sequence[StageFunctions]) -> tuple[str, ...]:
    """List the notes on a model's stages, each once with the stages that have it."""
    where: dict[str, list[int]] = {}
    for s, stage in enumerate(stages):
        for note in stage.notes:
            where.setdefault(note, []).append(s)
    return tuple(f"{_stages(which)}: {note}" for note, which in where.items())
