"""Run one rank's real program alone on its device (or dp × tp devices): does it fit, and how long does each action take?

A :class:`Rehearsal` takes a pipeline whose ranks all sit on one device (so nothing but this rank's functions is ever compiled),
gives the rank's program to the real executor, and puts stand-ins in place of neighbours (:class:`StandIns`).
Kernels, buffers, copies to the host and dispatch are the real ones; waiting for neighbours is what is missing, so the step
time is the rank's own work. :func:`rehearsed_costs` turns reports of some or all ranks into a cost profile, and the simulator
turns that into the step time of the whole cluster.

*Memory.* On a CPU, bytes of live buffers at every instruction, results there and nothing dropped yet; workspace does not
show. On a GPU, the peak that the device's allocator reports, workspace included; it never falls in a process, so ranks are
best rehearsed from the smallest to the largest, and a peak that an earlier one hides is replaced by the most seen between
instructions, and marked as inexact.

*Time.* Steps without the recorder give the step time and the host's cost, steps with it the time of each action: medians over
all microbatches and steps, the first step discarded. With several devices a rank (dp × tp) memory is that of the device that
holds most, and collectives over ``tp`` are real. Not modelled: contention of several ranks for one host link, and reductions
of gradients.

*Stand-ins.* Shapes and dtypes are the real ones, values are pseudo-random (a hash of the position), finite, and small enough
that a few layers leave them finite: power draw and speed of a GPU depend on its data, so zeros would flatter it. Everything
is made on the device by one compiled function a kind, so that neither the host link nor the peak of memory notices.

*Several ranks* (:func:`rehearse`). The pipeline is the one that training would build, except that every rank sits on the same
devices; so the memory limit, recompute policy, offload and re-planning of the config are in the program that is rehearsed.
What a training step keeps on a rank beside the program (master parameters where the compute dtype is smaller, optimizer
state) is there too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._jax_compat import is_key_dtype
from jaxpipe.cost.memory import Kind, RankMemory
from jaxpipe.cost.profile import StageMeasurements, measure_stages
from jaxpipe.cost.seconds import ACTIVATION, COTANGENT, PARAMETER, Timing, medians
from jaxpipe.errors import ConfigError, RunError
from jaxpipe.program.ir import Program, Recv, Run
from jaxpipe.rehearsal.report import (
    MemoryCheck,
    RankReport,
    Watch,
    copy_reports,
    costs_from,
    out_of_memory,
    rehearsed_costs,
    slowdown,
)
from jaxpipe.runtime.assembly import ALLOCATOR_BYTES
from jaxpipe.runtime.batches import THREEFRY, place_keys
from jaxpipe.runtime.executor import StepInputs, StepOutputs
from jaxpipe.runtime.memory_probe import RankMeasured, probe_step
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.recorder import lengths_by_op
from jaxpipe.runtime.transfer import check_host_memory, message_numbers
from jaxpipe.schedule import CostProfile, Event, HostLink, Link, Schedule, Timeline, op_spec, simulate
from jaxpipe.schedule.files import to_costs
from jaxpipe.stage.functions import StageFunctions, device_bytes, footprint, function_of
from jaxpipe.text import format_bytes
from jaxpipe.train.assemble import Progress, order_for_link
from jaxpipe.train.devices import limit_bytes
from jaxpipe.train.setup import Prepared, compile_pipeline, offload_options, step_over
from jaxpipe.train.step import resident_avals


class StandIns:
    """Replaces the transport of a rank without neighbours: a receive makes arrays of the message's shapes, a send is dropped.

    Args:
        program: of the rank that is rehearsed.
        all_programs: of all ranks.
    """

    def __init__(self, program: Program, all_programs: Sequence[Program]) -> None:
        numbers = message_numbers(all_programs)
        self._make: dict[int, Callable[[], list[jax.Array]]] = {}
        for instruction in program.instructions:
            if isinstance(instruction, Recv):
                # gradients are much smaller than activations, and at their own scale a few layers leave them finite
                scale = COTANGENT if op_spec(instruction.action.op).sends == "pred" else ACTIVATION
                number = numbers[(instruction.src, program.rank, instruction.action)]
                self._make[number] = maker(instruction.avals, scale)

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        """Drop the arrays."""

    def recv(self, message: int) -> Sequence[jax.Array]:
        return self._make[message]()

    def clear(self, begun: Sequence[int] = ()) -> None:
        """Do nothing, as no message is kept."""


@cache
def maker(avals: tuple[jax.ShapeDtypeStruct, ...], scale: float, limit: int = 2) -> Callable[[], list[jax.Array]]:
    """Return a function that makes arrays of these shapes on the devices of their shardings: floats within ``±scale``, integers
    from 0 to ``limit − 1``, booleans, PRNG keys. Equal arguments share one compiled function."""
    return jax.jit(lambda: [_values(a, scale, limit) for a in avals], out_shardings=[a.sharding for a in avals])


def _values(aval: jax.ShapeDtypeStruct, scale: float, limit: int) -> jax.Array:
    if is_key_dtype(aval.dtype):
        keys: jax.Array = jax.random.split(jax.random.key(0), aval.shape)
        return keys
    # a hash of the position (Knuth's multiplier, and two rounds of shifts), fused into the one kernel that writes the array
    bits = jax.lax.iota(jnp.uint32, aval.size) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)).reshape(aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        unit = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - jnp.float32(1.0)
        values = unit * jnp.float32(scale)
    else:
        largest = 1 if aval.dtype == np.bool_ else min(int(np.iinfo(aval.dtype).max), 2**31 - 1)
        values = bits % jnp.uint32(min(limit, largest + 1))
    array: jax.Array = values.astype(aval.dtype)
    return array


def batches(stage: StageFunctions, microbatches: int, vocab_size: int) -> list[list[jax.Array]]:
    """Return, per microbatch, the batch arrays that ``stage`` reads: integers below ``vocab_size``, floats within ±1."""
    read = stage.data_avals
    if not read:
        return []
    unread = next(iter(read.values()))  # an array that no function reads is never bound: any will do
    avals = tuple(read.get(k, unread) for k in range(len(stage.data_names)))
    return [maker(avals, ACTIVATION, vocab_size)() for _ in range(microbatches)]


def stand_in_inputs(
    pipeline: Pipeline, functions: Mapping[tuple[int, int], StageFunctions], vocab_size: int
) -> StepInputs:
    """Make what a step of ``functions``, by rank and stage, takes of outside: parameters, accumulators, batches of integers
    below ``vocab_size``, and keys where layers draw random numbers."""
    m = pipeline.schedule.num_microbatches
    params, acc, data = {}, {}, {}
    for at, f in functions.items():
        params[at] = maker(f.param_avals, PARAMETER)() if f.param_avals else []
        acc[at] = pipeline.zeros(at)
        if values := batches(f, m, vocab_size):
            data[at] = values
    keys = place_keys(jax.random.key(0, impl=THREEFRY), m, functions, pipeline.function_views, pipeline.row_shards)
    jax.block_until_ready((params, acc, data, keys))
    return StepInputs(params, acc, data, keys)


def costs_alone(pipeline: Pipeline, measurements: StageMeasurements, host: HostLink | None) -> CostProfile:
    """Return the costs that follow from times of functions alone; see :func:`~jaxpipe.rehearsal.report.costs_from`."""
    seconds, collectives = medians(measurements.timings), medians(measurements.collectives)
    return costs_from(pipeline, seconds, collectives, source="functions alone", host=host)


class Rehearsal:
    """Holds the program of one rank, ready to run without its neighbours.

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
        """Peak bytes by the accounting, which compiles nothing here and so leaves out workspace."""
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
        report = progress if progress is not None else lambda text: None
        report(f"rank {self.rank}: compiling")
        used = dict.fromkeys(i.parts for i in self.program.instructions if isinstance(i, Run))
        compiled = [footprint(function_of(self.rank, x, self.functions, self.pipeline.braids)) for x in used]
        footprints = {
            parts[0]: xla_footprint for parts, xla_footprint in zip(used, compiled, strict=True) if len(parts) == 1
        }
        watch = Watch(self.program, self.functions, self._limit, self.pipeline.braids)
        # functions alone come first: their times decide the order of dispatch that the timed steps then use
        if complete:
            report(f"rank {self.rank}: each function alone")
        functions = [f for _, f in sorted(self.functions.items())] if complete else []
        measurements = measure_stages(
            functions,
            repeats=steps,
            memory=False,
            too_large=lambda text: report(f"rank {self.rank}: {text}"),
            vocab_size=self._vocab,
        )
        executor = self._timed(measurements).executor
        report(f"rank {self.rank}: {steps} steps, {steps} recorded")
        # arrays of the measurements that only a cycle keeps alive would count as memory of the step
        gc.collect()
        before = self.device.memory_stats() or {}
        host: list[float] = []
        walls: list[float] = []
        events: list[Sequence[Event]] = []
        try:
            watch.begin(self._placed_bytes())
            inputs, resident = self.place()
            probed = probe_step(executor, inputs, [self.devices], resident=resident, look=watch)
            out = _finished(probed.outputs)
            # unrecorded steps first: the recorder reads the clock around each action, which the step time must not hold
            for n in range(2 * steps):
                # a step donates its accumulators, so the next one must begin with those that it returned
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
        # the next rank is rehearsed on this device: free its memory before the report, which lives on, is made
        del out, inputs, resident, probed
        timings = {at: Timing.of(lengths) for at, lengths in lengths_by_op(events).items()}
        return RankReport(
            rank=self.rank,
            num_ranks=self.pipeline.schedule.num_ranks,
            schedule=self.pipeline.schedule.name,
            stages=tuple(sorted(s for _, s in self.functions)),
            num_instructions=len(executor.sequence),
            device=f"{len(self.devices)} × " * (len(self.devices) > 1) + self.device.device_kind,
            timings=timings,
            standalone=measurements.timings,
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
        """Return the pipeline in the order that the times of its functions alone give, if there are any."""
        if not measurements.timings:
            return self.pipeline
        return self.pipeline.with_costs(costs_alone(self.pipeline, measurements, self._host))

    def place(self) -> tuple[StepInputs, Any]:
        """Place the inputs of a step on the device, and what else a training step keeps there."""
        inputs = stand_in_inputs(self.pipeline, self.functions, self._vocab)
        resident = [maker(tuple(avals), PARAMETER)() for avals in self._resident.values() if avals]
        jax.block_until_ready(resident)
        return inputs, resident

    def _memory(self, measured: RankMeasured, events: Sequence[Event], before: Mapping[str, int]) -> MemoryCheck:
        """Compare predicted and measured memory. An allocator counts workspace, and a buffer on its way to the host until the
        copy has ended; the recorded times say when that was. ``before``: its statistics before anything was placed."""
        if not before:
            predicted = self.predicted()
            return MemoryCheck(
                predicted, predicted.live_peak_bytes, measured.live_peak_bytes, "live buffers", exact=True
            )
        predicted = self.predicted(timeline=replace(self.pipeline.predicted_timeline(), events=tuple(events)))
        # an allocator's peak never falls: only one above that of before was made by this rank
        peak = self.device.memory_stats()["peak_bytes_in_use"]
        exact = peak > before["peak_bytes_in_use"]
        most = peak - before["bytes_in_use"] if exact else max(measured.in_use_bytes)
        return MemoryCheck(predicted, predicted.peak_bytes, most, "memory statistics", exact=exact)

    def _explained(self, error: Exception, watch: Watch) -> RunError | None:
        """Return an error that means that memory ran out as one line; None for any other error."""
        limit = self._limit if self._limit is not None else limit_bytes(self.device)
        return out_of_memory(error, watch, self.program, self._placed_bytes(), limit)

    def _placed_bytes(self) -> int:
        """Return the bytes on the device before the first instruction: parameters, accumulators, optimizer state, batch."""
        kinds: tuple[Kind, ...] = ("parameters", "gradients", "masters", "optimizer", "data")
        placed = self.predicted(footprints=False).peaks
        return sum(placed.get(k, 0) for k in kinds)


def _finished(out: StepOutputs) -> StepOutputs:
    out.wait()
    jax.block_until_ready((dict(out.acc), list(out.losses)))
    return out


_NO_LIMIT_GB = 1e9


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """The result of a rehearsal: ``reports`` of some ranks; the ``schedule`` that they ran; ``costs`` that follow from them;
    ``timeline``, a whole step simulated with these costs."""

    reports: tuple[RankReport, ...]
    schedule: Schedule
    costs: CostProfile
    timeline: Timeline


def rehearse(
    prepared: Prepared,
    devices: Sequence[jax.Device],
    ranks: Sequence[int],
    progress: Progress,
    *,
    steps: int = 5,
    optimizer: bool = True,
    memory_limit_bytes: float | None = None,
    link: Link | None = None,
    host: HostLink | None = None,
) -> Rehearsed:
    """Rehearse ``ranks`` of the config's pipeline, each on ``devices`` (dp × tp), the one that needs least memory first (an
    allocator's peak never falls).

    Args:
        steps: timed steps of each.
        optimizer: keep masters and optimizer state on the device, as a training step does.
        memory_limit_bytes: of a smaller device than the real one.
        link: between ranks, for the prediction; free by default.
        host: the link to the host as measured.

    Raises:
        ConfigError, ScheduleError, StageError, ProgramError: what is wrong, and what would work; no such rank; the host has no
            room for what a rank offloads.
        RunError: an instruction failed, or memory ran out.
    """
    config = prepared.config
    # the host's room is checked below, a rank at a time: only one rank's offloads are on this host at once
    roomy = config.changed({"offload.host_memory_gb": _NO_LIMIT_GB})
    everywhere = list(devices) * prepared.schedule.num_ranks
    pipeline = compile_pipeline(replace(prepared, config=roomy), everywhere, progress)
    if host is not None and pipeline.schedule.offloads:
        pipeline = _ordered_for_link(pipeline, prepared, ranks, host, progress)
    step, rehearsals = step_over(config, pipeline), []
    for rank in ranks:
        check_host_memory([pipeline.programs[rank]], offload_options(config.pipeline.offload), devices[0].platform)
        rehearsal = Rehearsal(
            pipeline,
            rank,
            vocab_size=prepared.dataset.tokenizer.vocab_size,
            resident=resident_avals(step.pipeline, step.states, rank) if optimizer else None,
            memory_limit_bytes=memory_limit_bytes,
            host=host,
        )
        rehearsals.append(rehearsal)
    # an allocator's peak never falls, so a rank that needs more must not run before one that needs less
    reports = [r.run(steps=steps, progress=progress) for r in sorted(rehearsals, key=lambda r: r.predicted_peak_bytes)]
    reports.sort(key=lambda r: r.rank)
    costs = step.with_state(rehearsed_costs(pipeline, reports, link=link, host=host))
    return Rehearsed(tuple(reports), pipeline.schedule, costs, simulate(pipeline.schedule, costs))


def _ordered_for_link(
    pipeline: Pipeline, prepared: Prepared, ranks: Collection[int], host: HostLink, progress: Progress
) -> Pipeline:
    """Return ``pipeline`` with O and L where a training would put them, by seconds of one stage of the first of ``ranks``; what
    other stages take follows from their FLOPs, so that nothing else is compiled."""
    progress("timing a stage for the order of copies")
    stage = min((f for (rank, _), f in pipeline.functions.items() if rank == min(ranks)), key=lambda f: f.stage)
    measured = measure_stages([stage], repeats=1, memory=False, vocab_size=prepared.dataset.tokenizer.vocab_size)
    costs = costs_alone(pipeline, measured, host)
    order = order_for_link(prepared.config.pipeline, prepared.draft, pipeline.schedule, costs)
    return pipeline.with_schedule(order)


def rehearsed_json(rehearsed: Rehearsed) -> dict[str, Any]:
    """Return the reports, the costs and the predicted step as plain values for JSON."""
    timeline, complete = rehearsed.timeline, _complete(rehearsed)
    return {
        "ranks": [_rank_json(r) for r in rehearsed.reports],
        "predicted_step_s": timeline.makespan if complete else None,
        "predicted_bubble_rate": timeline.bubble_rate if complete else None,
        "costs": to_costs(rehearsed.costs),
    }


def _rank_json(r: RankReport) -> dict[str, Any]:
    def functions(timings: Mapping[tuple[str, int], Timing]) -> list[dict[str, Any]]:
        return [{"op": op, "stage": s, **asdict(t)} for (op, s), t in sorted(timings.items(), key=lambda x: x[0][::-1])]

    predicted = r.memory.predicted
    return {
        "rank": r.rank,
        "num_ranks": r.num_ranks,
        "schedule": r.schedule,
        "stages": list(r.stages),
        "device": r.device,
        "instructions": r.num_instructions,
        "step": asdict(r.step),
        "host_us": r.host_us,
        "functions": functions(r.timings),
        "functions_alone": functions(r.standalone),
        "memory": {
            "predicted_bytes": r.memory.predicted_bytes,
            "measured_bytes": r.memory.measured_bytes,
            "predicted_over_measured": r.memory.ratio,
            "source": r.memory.source,
            "exact": r.memory.exact,
            "at": predicted.at,
            "by_kind": dict(predicted.by_kind),
        },
        "copies": [{**asdict(c), "bytes_per_s": c.bytes_per_s} for c in r.copies],
        "slowdown_while_copying": r.slowdown,
        "workspace": [
            {"op": op, "stage": s, "temp_bytes": f.temp_bytes} for (op, s), f in sorted(r.footprints.items())
        ],
    }


def rehearsed_text(rehearsed: Rehearsed) -> str:
    """Format a block per rank, then the step of the whole cluster if all ranks were rehearsed."""
    blocks = [_rank_text(r) for r in rehearsed.reports]
    if _complete(rehearsed):
        t = rehearsed.timeline
        span = max(r.step.median_s for r in rehearsed.reports)
        blocks.append(
            f"all ranks: predicted step {t.makespan * 1e3:.2f} ms without the optimizer's update, bubble "
            f"{t.bubble_rate:.1%}; the busiest rank alone takes {span * 1e3:.2f} ms"
        )
    return "\n\n".join(blocks)


def _complete(rehearsed: Rehearsed) -> bool:
    return len(rehearsed.reports) == rehearsed.reports[0].num_ranks


def _rank_text(r: RankReport) -> str:
    stages = ", ".join(map(str, r.stages))
    m = r.memory
    kinds = ", ".join(
        f"{kind} {format_bytes(n, binary=True)}" for kind, n in sorted(m.predicted.by_kind.items(), key=lambda x: -x[1])
    )
    lines = [
        f"rank {r.rank} of {r.num_ranks} (stage{'s' * (len(r.stages) > 1)} {stages}), schedule {r.schedule}, "
        f"{r.num_instructions} instructions on {'' if '×' in r.device else 'one '}{r.device}",
        f"  memory  predicted {format_bytes(m.predicted_bytes, binary=True)}, measured {'' if m.exact else 'at least '}"
        f"{format_bytes(m.measured_bytes, binary=True)} ({m.source}): predicted ÷ measured {m.ratio:.3f}",
        f"          with workspace {format_bytes(m.predicted.peak_bytes, binary=True)}, at {m.predicted.at}: {kinds}",
        f"  step    {r.step} without waiting for other ranks; {r.host_us:.0f} µs of the host per instruction",
        "  op  stage        ms  spread  samples  alone ms",
    ]
    for op, s in sorted({*r.timings, *r.standalone}, key=lambda at: at[::-1]):
        t, alone_timing = r.timings.get((op, s)), r.standalone.get((op, s))
        cells = (
            f"{t.median_s * 1e3:>8.3f}  {t.spread:>6.0%}  {t.count:>7}" if t is not None else f"{'-':>8}{'-':>8}{0:>9}"
        )
        lines.append(
            f"  {op:<2}  {s:>5}  {cells}"
            + (f"  {alone_timing.median_s * 1e3:>8.3f}" if alone_timing is not None else "")
        )
    lines += [
        f"  {'out' if c.lane == 'd2h' else 'in':<3} {c.count} copies of {format_bytes(c.bytes / c.count, binary=True)}, "
        f"{c.bytes_per_s / 1e9:.2f} GB/s, {c.hidden:.0%} of their time under compute"
        for c in r.copies
    ]
    if r.slowdown is not None:
        lines.append(f"  compute takes {r.slowdown:.3f} × as long while copies run")
    return "\n".join(lines)
