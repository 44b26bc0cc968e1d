"""A model on its ranks with an order, ready to run: a schedule lowered, its executor linked.

:class:`Pipeline` is what training, evaluation and tests talk to::

    pipeline = Pipeline.build(model, schedule, microbatch_size=4)
    params = pipeline.place(init_params(model, seed=0))
    loss, grads = pipeline.loss_and_grads(params, batch)

Parameters go in and gradients come out by layer name. What is compiled is the :class:`~jaxpipe.runtime.assembly.Assembly`;
another order, other costs or reductions make another pipeline over it, and cost little: it is simulated when a timeline is
first asked for, and linked when it first runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import dump
from jaxpipe.cost.memory import Kind, MemoryReport, account, batch_bytes
from jaxpipe.cost.profile import (
    StageMeasurements,
    at_ranks_share,
    measure_host_link,
    measure_stages,
    with_missing_ops,
    with_offloadable_bytes,
)
from jaxpipe.errors import ProgramError
from jaxpipe.mesh import replicated
from jaxpipe.program.ir import Free, Offload, Program
from jaxpipe.program.lower import braided_slots, issued_order, lower
from jaxpipe.program.order import Crossing, holds, issue_order
from jaxpipe.program.traffic import WRITTEN_KINDS
from jaxpipe.runtime.assembly import ALLOCATOR_BYTES, Assembly, AssemblyOptions, Buffers, reduction
from jaxpipe.runtime.batches import THREEFRY, Batch, Instance, place_keys
from jaxpipe.runtime.executor import Executor, Holds, Late, Reductions, StepInputs, StepOutputs
from jaxpipe.runtime.grid import function_in_process
from jaxpipe.runtime.processes import Processes
from jaxpipe.runtime.recorder import lengths_by_op, measured_timeline, replay_ratio
from jaxpipe.runtime.transfer import OffloadOptions, Transport, check_host_memory, host_copies
from jaxpipe.schedule import CostProfile, Event, HostLink, Schedule, Timeline, op_spec, simulate
from jaxpipe.schedule.text import parse_slot
from jaxpipe.stage.compiled.braid import build_braids
from jaxpipe.stage.functions import Braids, footprint, with_offload
from jaxpipe.stage.model.layer import Model, Params
from jaxpipe.stage.model.params import get_leaf, with_leaf

_EARLY = 1
"""How many runs before its turn a receive from another process is posted: one lets the transfer overlap that run, at the memory
of one message."""


@dataclass(frozen=True, repr=False)
class Pipeline(Assembly):
    """An assembly with an order: see the module. Make with :meth:`build`, or by :meth:`over` from an assembly; the fields are
    read-only.

    ``programs``: the schedule, lowered (those of other processes' ranks may be outlines: :func:`~jaxpipe.program.lower.lower`),
    of which ``local_programs`` run here, over ``transport`` (None: between devices of this process, and of others);
    ``costs``: what the order of dispatch and the predicted timeline are based on;
    ``braids``: those that run as one function; ``reductions``: the functions of R, by (rank, stage); the R of a stage that is
    not among them is left out of a run.
    """

    schedule: Schedule
    programs: tuple[Program, ...]
    local_programs: tuple[Program, ...]
    costs: CostProfile
    braids: Braids
    reductions: Reductions
    transport: Transport | None = None

    def __repr__(self) -> str:
        schedule, layers = self.schedule, len(self.model.layers)
        return (
            f"<Pipeline of {self.model.name}: {layers} layers in {len(self.boundaries)} stages on "
            f"{self.mesh.after(f'{schedule.num_ranks} ranks')}, schedule {schedule.name}, {schedule.num_microbatches} "
            f"microbatches of {self.microbatch_size}>"
        )

    @classmethod
    def build(
        cls,
        model: Model,
        schedule: Schedule,
        *,
        microbatch_size: int,
        costs: CostProfile | None = None,
        **options: Unpack[AssemblyOptions],
    ) -> Pipeline:
        """Trace and split the stages, and lower the schedule.

        Args:
            model: layers in order, the loss last.
            schedule: one rank a stage (several flows are allowed), stages in a chain.
            microbatch_size: sequences in a microbatch, over all ``dp`` shards of a rank.
            costs: for the dispatch order and the prediction; FLOP counts by default.
            options: those of :meth:`Assembly.of <jaxpipe.runtime.assembly.Assembly.of>`.

        Raises:
            ScheduleError, StageError, ProgramError, ConfigError: what is wrong, and what would work. Schedules that offload
                need pinned host memory, or ``offload.fallback``, and room for what they keep on the host.
        """
        assembly = Assembly.of(model, schedule.placement, microbatch_size=microbatch_size, **options)
        return cls.over(assembly, schedule, costs)

    @classmethod
    def over(
        cls,
        assembly: Assembly,
        schedule: Schedule,
        costs: CostProfile | None = None,
        reductions: Reductions = MappingProxyType({}),
    ) -> Pipeline:
        """Make a pipeline of ``schedule`` over compiled stages. Compiles nothing: a function that no schedule has used yet is
        compiled when it first runs.

        Raises:
            ScheduleError, ProgramError: as :meth:`build`; the schedule places its stages elsewhere.
            AgreedError: that in one of several processes; in all of them.
        """
        owned = assembly.ownership
        pipeline = owned.processes.run_on_all("pipeline", lambda: cls._over(assembly, schedule, costs, reductions))
        owned.agree_on_programs(pipeline.programs, pipeline._issued, pipeline._message_shapes())
        return pipeline

    @classmethod
    def _over(
        cls, assembly: Assembly, schedule: Schedule, costs: CostProfile | None, reductions: Reductions
    ) -> Pipeline:
        """Build like :meth:`over`, whatever other processes do."""
        if schedule.placement.flows != assembly.placement.flows:
            raise ProgramError(
                f"schedule {schedule.name!r} places stages differently from how they were compiled; build a new pipeline for it"
            )
        assembly = assembly.with_ops(schedule)
        slots = braided_slots(schedule, assembly.stages) if assembly.braid else ()
        braids = build_braids(slots, assembly.joint_functions, assembly.cache)
        views = assembly.function_views
        braids = {at: function_in_process(f, views[at[0]]) if views[at[0]].spans else f for at, f in braids.items()}
        dump.dump("schedule", schedule.name, str(schedule))
        costs = _known_costs(assembly, assembly.flop_costs if costs is None else costs)
        owned, crossing, timeline = assembly.ownership, None, None
        if owned.divided or assembly.copies_in_parts:
            timeline = _simulated(schedule, costs)
        if timeline is not None and owned.divided:
            crossing = Crossing(owned.process_of, timeline, owned.lanes, _EARLY)
        parts_by, own_ranks = timeline if assembly.copies_in_parts else None, owned.ranks if owned.divided else None
        reduced = [s for _, s in reduced_instances(assembly)]
        programs = lower(schedule, assembly.stages, braids, crossing, parts_by, own_ranks, reduced)
        platform = str(assembly.submeshes[0].devices.flat[0].platform)
        local_programs = [programs[rank] for rank in owned.ranks]
        check_host_memory(local_programs, assembly.offload, platform, owned.processes.on_this_host)
        # Made here only to raise now, and not in the first step, where devices have no pinned host memory.
        if _offloads(programs):
            for mesh in assembly.submeshes:
                host_copies(replicated(mesh), fallback=assembly.offload.fallback)
        stages = {f.name: getattr(assembly, f.name) for f in fields(Assembly)}
        return cls(
            **stages,
            schedule=schedule,
            programs=programs,
            local_programs=tuple(local_programs),
            costs=costs,
            braids=braids,
            reductions=reductions,
        )

    def alone(self, rank: int, transport: Transport) -> Pipeline:
        """Return the same pipeline, running one rank's program here: ``transport`` carries its messages. Compiles nothing."""
        return replace(self, local_programs=(self.programs[rank],), transport=transport)

    def with_costs(self, costs: CostProfile) -> Pipeline:
        """Return the same pipeline, dispatching in the order and predicting the times that ``costs`` give. Compiles nothing."""
        # The order of messages between processes follows the costs, and so do copies in parts: the programs are lowered anew.
        if self.ownership.divided or self.copies_in_parts:
            return self.over(self, self.schedule, costs, self.reductions)
        return replace(self, costs=_known_costs(self, costs))

    def with_reductions(self, reductions: Reductions) -> Pipeline:
        """Return the same pipeline, adding up gradients by these functions of the accumulators of (rank, stage), each of
        :attr:`reduced`: what they return is in :attr:`StepOutputs.reduced`. Compiles nothing."""
        return replace(self, reductions=reductions)

    def with_schedule(self, schedule: Schedule, costs: CostProfile | None = None) -> Pipeline:
        """Return a pipeline of another order over the same stages on the same ranks, and other costs if given; see
        :meth:`over`."""
        return self.over(self, schedule, self.costs if costs is None else costs, self.reductions)

    def with_offload(self, offload: OffloadOptions) -> Pipeline:
        """Return the same stages and order, moving another part of the residuals or moving it elsewhere. Compiles nothing.

        Raises:
            StageError, ProgramError: the fraction is outside 0..1, or this machine can't do it.
        """
        functions = {at: with_offload(f, offload.fraction) for at, f in self.functions.items()}
        other = replace(self, functions=functions, offload=offload)
        moved = tuple(float(f.offloadable_bytes) for f in other.stages)
        return other.with_schedule(self.schedule, with_offloadable_bytes(self.costs, moved))

    @cached_property
    def issued(self) -> Schedule:
        """The schedule as programs follow it: with R of each of :attr:`reduced`."""
        return issued_order(self.schedule, self.stages, [s for _, s in self.reduced])

    @property
    def reduced(self) -> tuple[Instance, ...]:
        """Return the (rank, stage) whose gradients programs add up: see :func:`reduced_instances`."""
        return reduced_instances(self)

    @cached_property
    def order(self) -> tuple[tuple[int, int], ...]:
        """(rank, instruction) in the order of dispatch."""
        return self._own_dispatch[0]

    @cached_property
    def _own_dispatch(self) -> tuple[tuple[tuple[int, int], ...], Holds]:
        return self._dispatch(self.local_programs)

    def _dispatch(self, programs: Sequence[Program]) -> tuple[tuple[tuple[int, int], ...], Holds]:
        """Return in which order a thread issues ``programs``, and the offloads that it waits for."""
        waits_of = enumerate(holds(program, self._predicted) for program in programs)
        waits = {(k, at): offloads for k, waits_at in waits_of for at, offloads in sorted(waits_at.items())}
        return issue_order(programs, self._predicted), waits

    def _issued(self, programs: Sequence[Program]) -> Any:
        """Return the same without the frees, which outlines of programs do not have."""
        order, waits = self._dispatch(programs)
        runs = [[not isinstance(i, Free) for i in p.instructions] for p in programs]
        numbers = [list(accumulate(row)) for row in runs]
        return [(k, numbers[k][at]) for k, at in order if runs[k][at]], waits

    def _message_shapes(self) -> list[Any]:
        """Return the shapes of what may travel, by op and stage."""
        used = {(a.stage, a.op) for a in self.schedule.actions() if a.op in self.stages[a.stage].functions}
        functions = [(at, self.stages[at[0]].functions[at[1]]) for at in sorted(used)]
        return [
            (
                at,
                [
                    (a.shape, str(a.dtype))
                    for port, a in zip(f.outputs, f.avals_out, strict=True)
                    if port.kind in WRITTEN_KINDS
                ],
            )
            for at, f in functions
        ]

    @cached_property
    def executor(self) -> Executor:
        return Executor(
            self.local_programs,
            self.order,
            self.functions,
            self.submeshes,
            self.transport or self.ownership.transport(self.programs),
            all_programs=self.programs,
            offload_fallback=self.offload.fallback,
            holds=self._own_dispatch[1],
            braids=self.braids,
            reductions=self.reductions,
            beside_compute=self.costs.net_overlaps,
        )

    # -- running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        params: Mapping[Instance, Buffers],
        acc: Mapping[Instance, Buffers],
        batch: Batch,
        key: jax.Array | None = None,
        *,
        record: bool = False,
        late: Late | None = None,
    ) -> StepOutputs:
        """Run one pass over ``batch`` (arrays ``[microbatches, microbatch size, …]`` by name): gradients are added to ``acc``,
        which is donated. ``key``: this step's PRNG key, needed if a layer draws random numbers. ``record``: all processes
        start together, and process 0 gets the events of all. ``late``: gives accumulators in place of ``acc``.

        Raises:
            RunError: an instruction failed.
            StepDropped: ``late`` says so.
            ProgramError: the batch does not fit.
        """
        inputs, processes = self.step_inputs(params, acc, batch, key), self.ownership.processes
        if not record:
            return self.executor.run(inputs, late=late)
        clock = processes.clock()
        return _with_all_events(self.executor.run(inputs, record=True), processes, clock)

    def step_inputs(
        self,
        params: Mapping[Instance, Buffers],
        acc: Mapping[Instance, Buffers],
        batch: Batch,
        key: jax.Array | None = None,
    ) -> StepInputs:
        """Make what :class:`~jaxpipe.runtime.executor.Executor` takes, with the batch and the keys on the ranks that read
        them."""
        microbatches = self.schedule.num_microbatches
        data = self.placed_data(params, batch, microbatches)
        keys = place_keys(key, microbatches, self._own_functions, self.function_views, self.row_shards)
        return StepInputs(params, acc, data, keys)

    def own_rows(self, microbatches: int) -> np.ndarray | None:
        """Return which sequences of a batch this process needs; None for all: where it reads them, or the weights of all, by
        which several losses are weighed."""
        sequences = np.arange(self.rows_here.start, self.rows_here.stop)
        if len(sequences) == self.microbatch_size or len(self.model.losses) > 1:
            return None
        return (np.arange(microbatches)[:, None] * self.microbatch_size + sequences).reshape(-1)

    def loss_and_grads(
        self, params: Mapping[Instance, Buffers], batch: Batch, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, Params]]:
        """Return the mean loss and its gradient by layer name (tied copies added to their owner), for tests and small uses. The
        gradient is that of what a step minimises: with losses that layers have beside it.

        Raises:
            ProgramError: stages are other processes'.
        """
        self.ownership.refuse_divided("loss_and_grads")
        out = self._unreduced.run(params, {at: self.zeros(at) for at in self.own_instances}, batch, key)
        sums = [sum(float(jnp.sum(x)) for x in port) for port in zip(*out.losses, strict=True)]
        loss_sum, weight = self.reported.loss(sums)
        acc = self.sum_replicas({at: self._sums[at](list(buffers)) for at, buffers in out.acc.items()})
        stage_gradients: dict[int, dict[str, Params]] = {}
        grads: dict[str, Params] = {}
        for s, f in enumerate(self.stages):
            untrained = (np.zeros(b.shape, b.dtype) for b in f.param_avals[f.layout.num_trained :])
            buffers = [*jax.device_get(acc[self.primary(s)]), *untrained]
            stage_gradients[s] = f.layout.unpack(buffers)
            grads |= f.layout.unpack(buffers, copies=False)
        for tie in self.tied:
            extra = get_leaf(stage_gradients[tie.copy_stage], tie.copy_path)
            grads = with_leaf(grads, tie.owner_path, get_leaf(grads, tie.owner_path) + extra)
        # A loss without weight divides by zero; what is not finite is the caller's to see.
        with np.errstate(all="ignore"):
            mean = jax.tree.map(lambda g: jnp.asarray(g / weight, jnp.result_type(g.dtype, 1.0)), grads)
        return jnp.asarray(loss_sum / weight), self.model.joined(mean)

    @cached_property
    def _unreduced(self) -> Pipeline:
        """The same pipeline without reductions, which donate the accumulators and, with ZeRO-1, return chunks."""
        return self.with_reductions({}) if self.reductions else self

    @cached_property
    def _sums(self) -> Mapping[Instance, Any]:
        return {(r, s): reduction(self.submeshes[r], f) for (r, s), f in self._own_functions.items()}

    # -- predictions and measurements ---------------------------------------------------------------------------------

    def predicted_timeline(self) -> Timeline:
        """The schedule simulated with :attr:`costs`, on emulated devices at the share of the cores that busy ranks have; static
        bytes hold the batch too."""
        return self._predicted

    @cached_property
    def _predicted(self) -> Timeline:
        return _simulated(self.schedule, self._costs_with_batch())

    def measured_timeline(self, outputs: StepOutputs) -> Timeline:
        """The timeline of a recorded step."""
        return measured_timeline(self.issued, self._costs_with_batch(), outputs.events)

    def _costs_with_batch(self) -> CostProfile:
        """:attr:`costs`, where what is placed once a step or stays until its end (batch arrays, keys, losses, a scalar per
        action) counts as static bytes."""
        if not self.costs.boundary_buffers:
            return self.costs
        m = self.schedule.num_microbatches
        batch = [float(batch_bytes(s, self.programs, m)) for s in self.stages]
        static = tuple(a + b for a, b in zip(self.costs.optimizer_bytes, batch, strict=True))
        return replace(self.costs, optimizer_bytes=static)

    def replay_ratio(self, outputs: StepOutputs) -> float:
        """Wall time of a recorded step ÷ replay of its order with its own durations (:mod:`jaxpipe.runtime.recorder`)."""
        timeline, overlaps = self.measured_timeline(outputs), self.costs.net_overlaps
        return replay_ratio(self.issued, timeline, outputs.step_s, net_overlaps=overlaps)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per rank, the most bytes a step holds: parameters, accumulators, data and activations (no workspace)."""
        return self.memory_report(workspace=False).peak_bytes

    def memory_report(
        self,
        resident: Mapping[int, Mapping[Kind, int]] | None = None,
        *,
        workspace: bool = True,
        timeline: Timeline | None = None,
        curves: bool = False,
        reductions: Mapping[Instance, tuple[int, int]] = MappingProxyType({}),
    ) -> MemoryReport:
        """Predicted memory of a device of each rank that runs here, by kind (:mod:`jaxpipe.cost.memory`).

        Args:
            resident: by rank, bytes that stay through a step beside parameters, accumulators and data.
            workspace: count XLA's temporaries too; compiles the functions that the programs run, unless they are already.
            timeline: offloaded bytes leave when the copy ends in it, not when it is issued.
            curves: keep what is held after each instruction.
            reductions: what those of :attr:`reductions` take, as :func:`~jaxpipe.cost.memory.account` has it.
        """
        return account(
            self.local_programs,
            self.order,
            self.functions,
            num_microbatches=self.schedule.num_microbatches,
            resident=resident,
            timeline=timeline,
            footprint_of=footprint if workspace else None,
            align=ALLOCATOR_BYTES.get(self.submeshes[0].devices.flat[0].platform, 1),
            curves=curves,
            braids=self.braids,
            all_programs=self.programs,
            reductions=reductions,
        )

    def measure_costs(self, *, repeats: int = 5) -> CostProfile:
        """Run every stage function and time it (BW only if the schedule has one), on emulated devices while all ranks are
        busy; time the link to the host, if the schedule uses it. Every process times its own stages, all at once, and all
        get the same profile."""
        fused = any(op_spec(a.op).parts for a in self.schedule.actions())
        owned, stages = self.ownership, [f for f in self.stages if self.primary(f.stage)[0] in self.ownership.ranks]
        if owned.divided:
            for function in (f for x in stages for op, f in x.functions.items() if fused or not op_spec(op).parts):
                footprint(function)
            # All compile before anyone measures: a compiler next door takes cores away from emulated devices.
            owned.processes.barrier("timing")
        measured = measure_stages(
            stages,
            repeats=repeats,
            fused=fused,
            vocab_size=self.model.vocab_size,
            in_step=self.function_processes > 1,
        )
        if owned.divided:
            measured = StageMeasurements.from_json(self.stages, owned.shared("timings", measured.as_json()))
        costs = measured.costs()
        if not _offloads(self.programs):
            return costs
        return replace(costs, host=self._host_link(repeats), offload_s=(), load_s=())

    def _host_link(self, repeats: int) -> HostLink:
        """Measure the host link in process 0; ranks that share lanes as each finds its own."""
        owned = self.ownership
        devices = [self.submeshes[rank].devices.flat[0] for rank in owned.ranks]
        measured = measure_host_link(devices, repeats=repeats)
        link = HostLink() if measured is None else measured.host_link()
        local_groups = [[owned.ranks[position] for position in group] for group in link.groups]
        links = owned.shared("host link", {owned.processes.mine: [asdict(replace(link, groups=())), local_groups]})
        first_column = [found for process, found in sorted(links.items()) if process % owned.processes.columns == 0]
        groups = tuple(tuple(group) for _, process_groups in first_column for group in process_groups)
        return HostLink(**{**links[0][0], "groups": groups})

    def warm_up(self) -> None:
        """Compile everything before the first step: every function runs once, and every link carries a message."""
        batch = {
            name: np.ones((self.schedule.num_microbatches, *aval.shape), aval.dtype)
            for name, aval in self.model.batch_spec(self.microbatch_size).items()
        }
        acc = {at: self.zeros(at) for at in self.own_instances}
        params = {
            at: [jax.device_put(jnp.zeros(a.shape, a.dtype), a.sharding) for a in self.functions[at].param_avals]
            for at in self.own_instances
        }
        # Waits, as the accumulators that the step was given may be donated to what follows.
        self.run(params, acc, batch, jax.random.key(0, impl=THREEFRY)).wait()


def _with_all_events(outputs: StepOutputs, processes: Processes, clock: tuple[float, float]) -> StepOutputs:
    """Add to a recorded step the events of all other processes, in process 0; elsewhere return it as it is. ``clock``: from
    :meth:`~jaxpipe.runtime.processes.Processes.clock`, before the step."""
    if processes.number == 1:
        return outputs
    ahead, error = clock
    began = outputs.stamps[0] + ahead
    # The ranks of one column are all ranks; what another has of them is the same order on other devices.
    events = [] if processes.column else outputs.events
    local_events = [(e.rank, e.lane, str(e.action), began + e.start_s, began + e.end_s) for e in events]
    seconds = [(*at, sum(lengths_s) / len(lengths_s)) for at, lengths_s in lengths_by_op([outputs.events]).items()]
    parts = processes.gather("events", (began, began + outputs.step_s, error, local_events, seconds))
    if not parts:
        return outputs
    starts, ends, errors, events_of, seconds_of = zip(*parts, strict=True)
    first = min(starts)
    events = [Event(r, lane, parse_slot(a), start - first, end - first) for r, lane, a, start, end in chain(*events_of)]
    return replace(
        outputs,
        events=tuple(events),
        step_s=max(ends) - first,
        clock_error_s=max(errors),
        process_seconds=[{(op, stage): op_s for op, stage, op_s in each} for each in seconds_of],
    )


def reduced_instances(assembly: Assembly) -> tuple[Instance, ...]:
    """Return the (rank, stage) whose gradients are added up over several devices within the pipeline. Not those of stages on
    several ranks and of tied leaves: there other ranks' gradients are added first, after it."""
    tied = {s for tie in assembly.tied for s in (tie.owner_stage, tie.copy_stage)}
    return tuple(
        (ranks[0], s)
        for s, ranks in assembly.instances.items()
        if len(ranks) == 1 and s not in tied and assembly.rank_views[ranks[0]].rank.size > 1
    )


def _known_costs(assembly: Assembly, costs: CostProfile) -> CostProfile:
    """Return ``costs`` with what ``assembly`` knows beside them. Reductions overlap compute where a process has one CPU of each
    rank: its functions are then programs of one device, and XLA orders those that one thread dispatches. Other devices run all
    that they are given one after another."""
    alone = all(mesh.size == 1 and mesh.devices.flat[0].platform == "cpu" for mesh in assembly.submeshes)
    overlaps = alone and assembly.function_processes == 1
    return replace(with_missing_ops(costs, assembly.stages), net_overlaps=overlaps)


def _simulated(schedule: Schedule, costs: CostProfile) -> Timeline:
    """Simulate the timeline that the order of dispatch follows, and that of messages between processes. Bytes that stay change
    no time."""
    return simulate(schedule, at_ranks_share(costs, schedule))


def _offloads(programs: Sequence[Program]) -> bool:
    return any(isinstance(i, Offload) for program in programs for i in program.instructions)
