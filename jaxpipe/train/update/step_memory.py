"""Predicted memory of a whole training step: the pipeline with the optimizer's state beside it, or the update after it.

The update of a stage works in place on masters, accumulators and optimizer state; with a smaller compute dtype the new
compute copies are made while the old ones are still there. Replicas of a stage (bidirectional placements) add their
accumulators up before it, and get the new parameters while they hold the old; tied leaves travel between their ranks. The
update's peak counts all of that as if it happened at once, so it is an upper bound; the pipeline's is exact
(:mod:`jaxpipe.cost.memory`). Not modelled: the optimizer's norm, and what the last step's metrics still hold (a scalar
per action).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpipe.cost.memory import Kind, MemoryReport, RankMemory
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.stage.compiled.footprint import Footprint, device_bytes, total_device_bytes


@dataclass(frozen=True, slots=True)
class StageState:
    """What the update of one stage takes, as shapes on the stage's primary rank. ``params``: parameter buffers that it reads
    and replaces; ``master``: masters, and ``made``, the parameter buffers that it makes of them; ``grads``: what gradients take
    beside the accumulators once they are reduced. ``divided``: over dp (ZeRO-1). ``twice``: of ``params``, those that are there
    old and new from an update ahead to its commit."""

    params: Sequence[jax.ShapeDtypeStruct]
    master: Sequence[jax.ShapeDtypeStruct]
    made: Sequence[jax.ShapeDtypeStruct]
    acc: Sequence[jax.ShapeDtypeStruct]
    optimizer: Any
    grads: Sequence[jax.ShapeDtypeStruct] = ()
    divided: bool = False
    twice: Sequence[jax.ShapeDtypeStruct] = ()

    @property
    def master_bytes(self) -> int:
        return total_device_bytes(self.master)

    @property
    def optimizer_bytes(self) -> int:
        return sum(device_bytes(leaf) for leaf in jax.tree.leaves(self.optimizer))

    def workspace_bytes(self, update: Footprint) -> int:
        """What the update allocates beside new parameter buffers: XLA's temporaries, and what it does not write in place."""
        donated = self.master_bytes + self.optimizer_bytes + total_device_bytes(self.params)
        return update.temp_bytes + max(
            0, donated + total_device_bytes([] if self.divided else self.acc) - update.alias_bytes
        )


def step_memory(
    pipeline: Pipeline, states: Mapping[int, StageState], updates: Mapping[int, Footprint] | None
) -> MemoryReport:
    """The memory of a step, per rank: of the pipeline's instructions or of the update, whichever is more.

    Args:
        states: by stage, what its update takes.
        updates: by stage, the compiled update; None to count no temporaries.
    """
    resident: dict[int, dict[Kind, int]] = {r.rank: {} for r in pipeline.local_programs}
    for rank, held in resident.items():
        held |= {kind: total_device_bytes(avals) for kind, avals in resident_avals(pipeline, states, rank).items()}
        rank_stages = [s for s in states if pipeline.primary(s)[0] == rank]
        held["code"] = sum(updates[s].code_bytes for s in rank_stages) if updates else 0
    # O's bytes leave when the copy ends: the bound for a run that does not stop after each instruction
    report = pipeline.memory_report(resident, workspace=updates is not None, timeline=pipeline.predicted_timeline())
    ranks = []
    for before in report.ranks:
        held = {**resident[before.rank], **_update(pipeline, before, states)}
        held_stages = (s for s, ranks in pipeline.instances.items() if before.rank in ranks)
        held["temporaries"] = max((states[s].workspace_bytes(updates[s]) for s in held_stages if updates), default=0)
        ranks.append(_larger(before, {k: n for k, n in held.items() if n}))
    return replace(report, ranks=tuple(ranks))


def resident_avals(
    pipeline: Pipeline, states: Mapping[int, StageState], rank: int
) -> dict[Kind, list[jax.ShapeDtypeStruct]]:
    """Shapes of what a training step keeps on ``rank`` beside its compute parameters and accumulators."""
    rank_states = [states[s] for s in states if pipeline.primary(s)[0] == rank]
    return {
        "masters": [a for state in rank_states for a in (*state.master, *state.twice)],
        "optimizer": [a for state in rank_states for a in jax.tree.leaves(state.optimizer)],
    }


def _update(pipeline: Pipeline, before: RankMemory, states: Mapping[int, StageState]) -> dict[Kind, int]:
    """Bytes by kind on a rank while its stages are updated, without what the optimizer keeps."""
    held: dict[Kind, int] = {kind: before.peaks.get(kind, 0) for kind in ("parameters", "gradients", "losses", "code")}
    sent = 0
    for s, ranks in pipeline.instances.items():
        if before.rank not in ranks:
            continue
        acc, trained = total_device_bytes(states[s].acc), pipeline.functions[before.rank, s]
        held["gradients"] += acc if len(ranks) > 1 else 0  # of all replicas, to be added up
        if ranks[0] == before.rank:
            sent = max(sent, acc if len(ranks) > 1 else 0)
            held["gradients"] += total_device_bytes(states[s].grads)
            held["parameters"] += total_device_bytes(states[s].made)  # new buffers beside the old
        else:
            held["parameters"] += total_device_bytes(trained.param_avals[: trained.layout.num_trained])
    held["gradients"] += sent
    held["communication"] = _tied_bytes(pipeline, before.rank)
    return held


def _tied_bytes(pipeline: Pipeline, rank: int) -> int:
    """Leaves that are carried between this rank and others, so that tied copies stay equal: gradients, then values."""
    total = 0
    for tie in pipeline.tied:
        layout = pipeline.layout(tie.owner_stage)
        slot = next(slot for slot in layout.slots if (slot.layer, *slot.path) == tie.owner_path)
        ends = sum(pipeline.primary(s)[0] == rank for s in (tie.owner_stage, tie.copy_stage))
        total += ends * slot.size * pipeline.master_dtype.itemsize if layout.trains(slot) else 0
    return total


def _larger(rank: RankMemory, update: Mapping[Kind, int]) -> RankMemory:
    total = sum(update.values())
    peaks: dict[Kind, int] = {k: max(rank.peaks.get(k, 0), update.get(k, 0)) for k in {**rank.peaks, **update}}
    if total <= rank.peak_bytes:
        return replace(rank, peaks=peaks)
    return replace(rank, peak_bytes=total, at="the update", by_kind=dict(update), peaks=peaks)
