"""One rank's real program alone on its device (or dp × tp devices): does it fit, and how long does each action take?

A :class:`Rehearsal` takes a pipeline whose ranks all sit on one device (so nothing but this rank's functions is ever compiled),
gives the rank's program to the real executor, and puts stand-ins in place of neighbours (:mod:`jaxpipe.rehearsal.stand_ins`).
Kernels, buffers, copies to the host and dispatch are the real ones; waiting for neighbours is what is missing, so the step
time is the rank's own work. :func:`rehearsed_costs` turns reports of some or all ranks into a cost profile, and the simulator
turns that into the step time of the whole cluster.

*Memory.* On a CPU, bytes of live buffers at every instruction, results there and nothing dropped yet; workspace does not
show. On a GPU, the peak that the device's allocator reports, workspace included; it never falls in a process, so ranks are
best rehearsed from the smallest to the largest, and a peak that an earlier one hides is replaced by the most seen between
instructions, and marked as inexact.

*Time.* Steps without the recorder give the step time and the host's cost, steps with it the time of each action: medians over
all microbatches and steps, the first step discarded. With several devices a rank (dp × tp) memory is that of the device that
holds most, and collectives over ``tp`` are real. Not modelled: contention of several ranks for one host link, and the reduction
of gradients after the pipeline.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpipe.cost import StageMeasurements, Timing, measure_stages
from jaxpipe.cost.memory import Kind, RankMemory
from jaxpipe.cost.seconds import medians
from jaxpipe.errors import ConfigError, RunError
from jaxpipe.mesh import replicated
from jaxpipe.program.ir import Program, Run
from jaxpipe.rehearsal.out_of_memory import Watch, out_of_memory
from jaxpipe.rehearsal.report import MemoryCheck, RankReport, copy_reports, costs_from, slowdown
from jaxpipe.rehearsal.stand_ins import PARAMETER, StandIns, batches, maker
from jaxpipe.runtime.batches import THREEFRY, microbatch_keys
from jaxpipe.runtime.executor import StepInputs, StepOutputs
from jaxpipe.runtime.memory_probe import RankMeasured, probe_step
from jaxpipe.runtime.pipeline import ALLOCATOR_BYTES, Pipeline
from jaxpipe.runtime.recorder import lengths_by_op
from jaxpipe.schedule import Event, HostLink, Timeline
from jaxpipe.stage.compiled.footprint import device_bytes, footprint
from jaxpipe.stage.functions import function_of


class Rehearsal:
    """One rank, ready to run.

    Args:
        pipeline: built with the same devices for every rank: one, or dp × tp.
        rank: the one to rehearse.
        vocab_size: integers of the stand-in batch are below it.
        resident: arrays that a training step keeps on the rank beside what its functions use (master parameters, optimizer
            state), by the kind the accounting gives them.
        memory_limit_bytes: a smaller device than the real one: an instruction that needs more than this raises.
        host: the link to the host as measured. The runtime holds back what waits for an offload's memory, by these times.

    Raises:
        ConfigError: no such rank, or ranks on different devices.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rank: int,
        *,
        vocab_size: int | None = None,
        resident: Mapping[Kind, Sequence[jax.ShapeDtypeStruct]] | None = None,
        memory_limit_bytes: float | None = None,
        host: HostLink | None = None,
    ) -> None:
        self.rank = rank
        ranks = pipeline.schedule.num_ranks
        if not 0 <= rank < ranks:
            raise ConfigError(
                f"there is no rank {rank}: schedule {pipeline.schedule.name!r} has ranks 0 to {ranks - 1}"
            )
        places = {tuple(mesh.devices.flat) for mesh in pipeline.submeshes}
        if len(places) != 1:
            raise ConfigError(
                f"a rehearsal runs on the devices of one rank, and this pipeline's ranks are on {len(places)} groups of them: "
                "build it with the same devices for every rank"
            )
        (self.devices,) = places
        self.device = self.devices[0]  # whose allocator is asked
        self.program: Program = pipeline.programs[rank]
        self.pipeline = pipeline.alone(rank, StandIns(self.program, pipeline.programs))
        self.functions = {at: f for at, f in pipeline.functions.items() if at[0] == rank}
        self._vocab = vocab_size if vocab_size is not None else pipeline.model.vocab_size
        self._resident = dict(resident or {})
        self._limit = memory_limit_bytes
        self._host = host

    @property
    def predicted_peak_bytes(self) -> int:
        """The accounting's peak, without compiling anything and so without workspace."""
        return self.predicted(footprints=False).peak_bytes

    def predicted(self, *, footprints: bool = True, timeline: Timeline | None = None) -> RankMemory:
        """Account for the memory of this rank's program. ``timeline``: when its copies to the host end."""
        align = ALLOCATOR_BYTES.get(self.device.platform, 1)
        resident = {kind: sum(device_bytes(a, align) for a in avals) for kind, avals in self._resident.items()}
        return self.pipeline.memory_report({self.rank: resident}, workspace=footprints, timeline=timeline).ranks[0]

    def run(
        self, *, steps: int = 5, complete: bool = True, progress: Callable[[str], None] | None = None
    ) -> RankReport:
        """Run ``steps`` timed steps without and with the recorder, after one that compiles and watches the memory.

        Args:
            steps: at least 1.
            complete: first time every function of the rank's stages alone: those that its program does not call too, so that
                the costs serve other schedules; and the order of dispatch follows from measured times, as in training.
            progress: called with a line per phase.

        Raises:
            RunError: an instruction failed; out of memory, it says which one and what it wanted.
        """
        tell = progress if progress is not None else lambda text: None
        tell(f"rank {self.rank}: compiling")
        used = dict.fromkeys(i.parts for i in self.program.instructions if isinstance(i, Run))
        compiled = [footprint(function_of(self.rank, x, self.functions, self.pipeline.braids)) for x in used]
        footprints = {
            parts[0]: xla_footprint for parts, xla_footprint in zip(used, compiled, strict=True) if len(parts) == 1
        }
        watch = Watch(self.program, self.functions, self._limit, self.pipeline.braids)
        if complete:
            tell(f"rank {self.rank}: each function alone")
        mine = [f for _, f in sorted(self.functions.items())] if complete else []
        measurements = measure_stages(
            mine,
            repeats=steps,
            memory=False,
            too_large=lambda text: tell(f"rank {self.rank}: {text}"),
            vocab_size=self._vocab,
        )
        executor = self._timed(measurements).executor
        tell(f"rank {self.rank}: {steps} steps, {steps} recorded")
        gc.collect()
        before = self.device.memory_stats() or {}
        host: list[float] = []
        walls: list[float] = []
        events: list[Sequence[Event]] = []
        try:
            watch.begin(self._placed_bytes())
            inputs, resident = self._placed()
            probed = probe_step(executor, inputs, [self.devices], resident=resident, look=watch)
            out = _finished(probed.outputs)
            for n in range(2 * steps):
                inputs = replace(inputs, acc=out.acc)
                began = time.perf_counter()
                out = _finished(executor.run(inputs, record=n >= steps))
                if n < steps:
                    walls.append(time.perf_counter() - began)
                    host += out.instruction_s
                else:
                    events.append(out.events)
        except Exception as error:
            explained = self._explained(error, watch)
            if explained is None:
                raise
            raise explained from error
        memory = self._memory(probed.ranks[0], events[-1], before)
        del out, inputs, resident, probed
        timings = {at: Timing.of(lengths) for at, lengths in lengths_by_op(events).items()}
        return RankReport(
            rank=self.rank,
            num_ranks=self.pipeline.schedule.num_ranks,
            schedule=self.pipeline.schedule.name,
            stages=tuple(sorted(s for _, s in self.functions)),
            num_instructions=len(executor.sequence),
            device=self.device.device_kind
            if len(self.devices) == 1
            else f"{len(self.devices)} × {self.device.device_kind}",
            timings=timings,
            alone=measurements.timings,
            collectives=measurements.collectives,
            step=Timing.of(walls),
            host_us=statistics.median(host) * 1e6,
            memory=memory,
            copies=copy_reports(self.program, events),
            slowdown=slowdown(events),
            footprints=footprints,
            events=tuple(events[-1]),
        )

    def _timed(self, measurements: StageMeasurements) -> Pipeline:
        """The pipeline in the order that the times of its functions alone give, where there are any."""
        if not measurements.timings:
            return self.pipeline
        seconds, collectives = medians(measurements.timings), medians(measurements.collectives)
        costs = costs_from(self.pipeline, seconds, collectives, source="functions alone", host=self._host)
        return self.pipeline.with_costs(costs)

    def _placed(self) -> tuple[StepInputs, Any]:
        """Place the inputs of a step on the device, and what else a training step keeps there."""
        m = self.pipeline.schedule.num_microbatches
        params, acc, data = {}, {}, {}
        for at, f in self.functions.items():
            params[at] = maker(f.param_avals, PARAMETER)() if f.param_avals else []
            acc[at] = self.pipeline.zeros(at)
            if values := batches(f, m, self._vocab):
                data[at] = values
        keys: dict[int, Sequence[jax.Array]] = {}
        if any(f.uses_key for f in self.functions.values()):
            home = self.pipeline.submeshes[self.rank]
            keys[self.rank] = jax.device_put(microbatch_keys(jax.random.key(0, impl=THREEFRY), m), replicated(home))
        resident = [maker(tuple(avals), PARAMETER)() for avals in self._resident.values() if avals]
        inputs = StepInputs(params, acc, data, keys)
        jax.block_until_ready((params, acc, data, keys, resident))
        return inputs, resident

    def _memory(self, measured: RankMeasured, events: Sequence[Event], before: Mapping[str, int]) -> MemoryCheck:
        """Prediction and measurement. An allocator counts workspace, and a buffer on its way to the host until the copy has
        ended; the recorded times say when that was. ``before``: its statistics before anything was placed."""
        if not before:
            predicted = self.predicted()
            return MemoryCheck(
                predicted, predicted.live_peak_bytes, measured.live_peak_bytes, "live buffers", exact=True
            )
        predicted = self.predicted(timeline=replace(self.pipeline.predicted_timeline(), events=tuple(events)))
        peak = self.device.memory_stats()["peak_bytes_in_use"]
        exact = peak > before["peak_bytes_in_use"]
        most = peak - before["bytes_in_use"] if exact else max(measured.in_use_bytes)
        return MemoryCheck(predicted, predicted.peak_bytes, most, "memory statistics", exact=exact)

    def _explained(self, error: Exception, watch: Watch) -> RunError | None:
        """An error that means that memory ran out, as one line; None for any other."""
        stats = self.device.memory_stats() or {}
        limit = self._limit if self._limit is not None else stats.get("bytes_limit")
        return out_of_memory(error, watch, self.program, self._placed_bytes(), limit)

    def _placed_bytes(self) -> int:
        """Parameters, accumulators, batch and what else stays: on the device before the first instruction."""
        kinds: tuple[Kind, ...] = ("parameters", "gradients", "masters", "optimizer", "data")
        placed = self.predicted(footprints=False).peaks
        return sum(placed.get(k, 0) for k in kinds)


def _finished(out: StepOutputs) -> StepOutputs:
    out.wait()
    jax.block_until_ready((dict(out.acc), list(out.losses)))
    return out
