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
    beside the accumulators once they are reduced. ``divided``: over dp (ZeRO-1)."""

    params: Sequence[jax.ShapeDtypeStruct]
    master: Sequence[jax.ShapeDtypeStruct]
    made: Sequence[jax.ShapeDtypeStruct]
    acc: Sequence[jax.ShapeDtypeStruct]
    optimizer: Any
    grads: Sequence[jax.ShapeDtypeStruct] = ()
    divided: bool = False

    @property
    def master_bytes(self) -> int:
        return total_device_bytes(self.master)

    @property
    def optimizer_bytes(self) -> int:
        return sum(device_bytes(leaf) for leaf in jax.tree.leaves(self.optimizer))


def step_memory(
    pipeline: Pipeline, states: Mapping[int, StageState], updates: Mapping[int, Footprint], *, workspace: bool = True
) -> MemoryReport:
    """The memory of a step, per rank: of the pipeline's instructions or of the update, whichever is more.

    Args:
        states: by stage, what its update takes.
        updates: by stage, the compiled update.
        workspace: count temporaries.
    """
    resident: dict[int, dict[Kind, int]] = {}
    for s, ranks in pipeline.instances.items():
        for r in ranks:
            resident.setdefault(r, {"masters": 0, "optimizer": 0, "code": 0})
        primary = resident[ranks[0]]
        primary["masters"] += states[s].master_bytes
        primary["optimizer"] += states[s].optimizer_bytes
        primary["code"] += updates[s].code_bytes if workspace else 0
    # O's bytes leave when the copy ends: the bound for a run that does not stop after each instruction
    report = pipeline.memory_report(resident=resident, workspace=workspace, timed_copies=True)
    larger = tuple(_larger(r, _update(pipeline, r, resident[r.rank], states, updates, workspace)) for r in report.ranks)
    return replace(report, ranks=larger)


def _update(
    pipeline: Pipeline,
    before: RankMemory,
    resident: Mapping[Kind, int],
    states: Mapping[int, StageState],
    updates: Mapping[int, Footprint],
    workspace: bool,
) -> dict[Kind, int]:
    """Bytes by kind on a rank while its stages are updated."""
    rank = before.rank
    here = [s for s, ranks in pipeline.instances.items() if rank in ranks]
    shared = [s for s in here if len(pipeline.instances[s]) > 1]
    held: dict[Kind, int] = {k: n for k, n in resident.items() if n}
    for kind in ("parameters", "gradients", "losses"):
        held[kind] = before.peaks.get(kind, 0)
    held["code"] = before.peaks.get("code", 0)
    acc = {s: total_device_bytes(states[s].acc) for s in here}
    sums = sum(acc[s] for s in shared) + max((acc[s] for s in shared if pipeline.primary(s)[0] == rank), default=0)
    primaries = [s for s in here if pipeline.primary(s)[0] == rank]
    held["gradients"] += sums + sum(total_device_bytes(states[s].grads) for s in primaries)
    held["parameters"] += sum(  # new buffers beside the old
        total_device_bytes(states[s].made if s in primaries else _trained(pipeline, (rank, s))) for s in here
    )
    held["communication"] = _tied_bytes(pipeline, rank)
    if workspace:
        held["temporaries"] = max((_workspace(updates[s], states[s]) for s in here), default=0)
    return {k: n for k, n in held.items() if n}


def _trained(pipeline: Pipeline, instance: tuple[int, int]) -> Sequence[jax.ShapeDtypeStruct]:
    functions = pipeline.functions[instance]
    return functions.param_avals[: functions.layout.num_trained]


def _tied_bytes(pipeline: Pipeline, rank: int) -> int:
    """Leaves that are carried between this rank and others, so that tied copies stay equal: gradients, then values."""
    sizes = {}
    for tie in pipeline.tied:
        layout = pipeline.layout(tie.owner_stage)
        slot = next(slot for slot in layout.slots if (slot.layer, *slot.path) == tie.owner_path)
        sizes[tie] = slot.size * pipeline.master_dtype.itemsize if layout.trains(slot) else 0
    ends = [(pipeline.primary(s)[0], n) for tie, n in sizes.items() for s in (tie.owner_stage, tie.copy_stage)]
    return sum(n for home, n in ends if home == rank)


def _workspace(update: Footprint, state: StageState) -> int:
    """What an update allocates beside new parameter buffers: XLA's temporaries, and what it does not write in place."""
    donated = state.master_bytes + state.optimizer_bytes + total_device_bytes(state.params)
    if not state.divided:
        donated += total_device_bytes(state.acc)
    return update.temp_bytes + max(0, donated - update.alias_bytes)


def _larger(rank: RankMemory, update: Mapping[Kind, int]) -> RankMemory:
    total = sum(update.values())
    peaks: dict[Kind, int] = {k: max(rank.peaks.get(k, 0), update.get(k, 0)) for k in {**rank.peaks, **update}}
    if total <= rank.peak_bytes:
        return replace(rank, peaks=peaks)
    return replace(rank, peak_bytes=total, at="the update", by_kind=dict(update), peaks=peaks)
