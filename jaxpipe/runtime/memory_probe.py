"""Measures what a step really holds in memory: live bytes of every device at every instruction boundary.

A probed step waits after each instruction, so that nothing is under way when bytes are counted. Two counts are taken:

* *live arrays*: buffers that some array of this process still shows, each counted once however many arrays share it. Exact,
  on every backend, but blind to the workspace inside a function. Compare it with
  :attr:`~jaxpipe.cost.memory.RankMemory.live_bytes`.
* *the allocator's statistics*, where the backend has them (GPUs): bytes in use at each boundary, and its own peak, which
  includes workspace. The peak can't be reset, so it says something about this step only if the step raised it.

Arrays that were alive before the step and are not among its inputs are left out of the first count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.runtime.assembly import Buffers
from jaxpipe.runtime.batches import Batch, Instance
from jaxpipe.runtime.executor import Executor, StepInputs, StepOutputs
from jaxpipe.runtime.pipeline import Pipeline

Look = Callable[[int, Sequence[int]], None]
Statistics = Callable[[jax.Device], tuple[int, int]]
HOST_KINDS = frozenset({"pinned_host", "unpinned_host"})


@dataclass(frozen=True, slots=True)
class RankMeasured:
    """Measured bytes of one rank, on the fullest of its devices.

    ``live_bytes``: of live arrays in device memory, per instruction that was dispatched (of any rank: see
    :attr:`Executor.sequence`); ``host_bytes``: the same in host memory kinds. ``in_use_bytes``: what the device's allocator
    says at the same moments, minus what it held before the step beside the step's inputs; empty if it keeps no statistics.
    ``allocator_peak_bytes``: the allocator's own peak, less the same; None if unknown, or if the step did not raise it.
    """

    rank: int
    live_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    in_use_bytes: tuple[int, ...] = ()
    allocator_peak_bytes: int | None = None

    @property
    def live_peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def host_peak_bytes(self) -> int:
        return max(self.host_bytes, default=0)


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Measured memory of every rank whose devices this process owns, and what the probed step returned."""

    ranks: tuple[RankMeasured, ...]
    outputs: StepOutputs

    @property
    def live_peak_bytes(self) -> tuple[int, ...]:
        return tuple(r.live_peak_bytes for r in self.ranks)


def measured_peaks(
    pipeline: Pipeline,
    params: Mapping[Instance, Buffers],
    batch: Batch,
    key: jax.Array | None = None,
    *,
    acc: Mapping[Instance, Buffers] | None = None,
    resident: Any = (),
) -> MeasuredMemory:
    """Run one step of ``pipeline`` and count bytes after each instruction.

    Args:
        params, batch, key: as for :meth:`Pipeline.run`.
        acc: accumulators, donated; fresh zeros by default.
        resident: a pytree of other arrays that belong to the run (masters, optimizer state).

    Raises:
        ProgramError: ranks are other processes'.
        RunError: an instruction failed.
    """
    pipeline.ownership.refuse_divided("measured_peaks")
    acc = acc if acc is not None else {at: pipeline.zeros(at) for at in pipeline.own_instances}
    inputs = pipeline.step_inputs(params, acc, batch, key)
    del acc
    devices = [list(mesh.devices.flat) for mesh in pipeline.submeshes]
    return probe_step(pipeline.executor, inputs, devices, resident=resident)


def probe_step(
    executor: Executor,
    inputs: StepInputs,
    devices: Sequence[Sequence[jax.Device]],
    *,
    resident: Any = (),
    statistics: Statistics | None = None,
    look: Look | None = None,
) -> MeasuredMemory:
    """Run one step and count bytes after each instruction. ``devices``: those of each rank of this process. ``statistics``:
    (bytes in use, peak) of a device's allocator; by default what JAX reports. ``look(n, held)`` is told after the ``n``-th
    instruction what each rank holds: what the allocator says, or else the live bytes; what it raises ends the step.

    Raises:
        RunError: an instruction failed.
    """
    read = statistics if statistics is not None else allocator_statistics
    # By identity: a buffer that a foreign array shares with one of ours is ours.
    ours = {id(a) for a in jax.tree.leaves((inputs.params, inputs.acc, inputs.data, inputs.keys, resident))}
    counter = _Counter()
    # The list keeps them alive to the end: an address that was freed and used again would be taken for foreign.
    foreign_arrays = [a for a in jax.live_arrays() if id(a) not in ours]
    foreign = {at for a in foreign_arrays for at, _ in counter.buffers(a)} - {
        at for a in jax.live_arrays() if id(a) in ours for at, _ in counter.buffers(a)
    }
    flat = [d for group in devices for d in group]
    before = {d: read(d) for d in flat}
    aside = {d: n - _on_device(counter.count(foreign), d) for d, (n, _) in before.items()}
    live: list[list[int]] = [[] for _ in devices]
    host: list[list[int]] = [[] for _ in devices]
    used: list[list[int]] = [[] for _ in devices]

    def probe(n: int, results: Sequence[jax.Array]) -> None:
        jax.block_until_ready(results)
        held = counter.count(foreign)
        for r, group in enumerate(devices):
            live[r].append(max(_on_device(held, d) for d in group))
            host[r].append(max(held.get((d.id, True), 0) for d in group))
            if before[group[0]][1]:
                used[r].append(max(read(d)[0] - aside[d] for d in group))
        if look is not None:
            look(n, [(u or a)[-1] for u, a in zip(used, live, strict=True)])

    outputs = executor.run(inputs, probe=probe)
    outputs.wait()
    ranks = []
    for r, group in enumerate(devices):
        peaks = [(before[d][1], read(d)[1], aside[d]) for d in group]
        raised = [now - foreign_bytes for was, now, foreign_bytes in peaks if now > was]
        top = max(raised) if len(raised) == len(peaks) else None
        ranks.append(RankMeasured(r, tuple(live[r]), tuple(host[r]), tuple(used[r]), top))
    return MeasuredMemory(tuple(ranks), outputs)


class _Counter:
    """Finds the buffers of live arrays, where each is and how large, once per array."""

    def __init__(self) -> None:
        # With a weak reference, as an id is used again once its array is gone.
        self._buffers: dict[int, tuple[weakref.ref[Any], tuple[tuple[tuple[int, bool, int], int], ...]]] = {}

    def buffers(self, array: jax.Array) -> tuple[tuple[tuple[int, bool, int], int], ...]:
        """Return ((device, in host memory, address), bytes) of each shard."""
        cached = self._buffers.get(id(array))
        if cached is not None and cached[0]() is array:
            return cached[1]
        on_host = array.sharding.memory_kind in HOST_KINDS
        if len(array.sharding.device_set) == 1:
            device: jax.Device = next(iter(array.sharding.device_set))
            shards: tuple[Any, ...] = (((device.id, on_host, array.unsafe_buffer_pointer()), array.nbytes),)
        else:
            shards = tuple(
                ((shard.device.id, on_host, shard.data.unsafe_buffer_pointer()), shard.data.nbytes)
                for shard in array.addressable_shards
            )
        self._buffers[id(array)] = (weakref.ref(array), shards)
        return shards

    def count(self, foreign: set[tuple[int, bool, int]]) -> dict[tuple[int, bool], int]:
        """Return the bytes by (device, in host memory) of all live buffers but ``foreign``."""
        size_of: dict[tuple[int, bool, int], int] = {}
        for array in jax.live_arrays():
            if not array.is_deleted():
                size_of.update(self.buffers(array))
        total: dict[tuple[int, bool], int] = {}
        for (device, on_host, address), n in size_of.items():
            if (device, on_host, address) not in foreign:
                total[(device, on_host)] = total.get((device, on_host), 0) + n
        return total


def _on_device(held: Mapping[tuple[int, bool], int], device: jax.Device) -> int:
    return held.get((device.id, False), 0)


def allocator_statistics(device: jax.Device) -> tuple[int, int]:
    """Return the bytes in use and the peak of the device's allocator; zeros if it keeps no statistics."""
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_in_use", 0)), int(stats.get("peak_bytes_in_use", 0))
