"""Compiles a model once: its stages are cut, split, and placed on the devices of their ranks.

An :class:`Assembly` knows where stages are (the placement) and nothing of their order; a
:class:`~jaxpipe.runtime.pipeline.Pipeline` is an assembly with one. Each stage lives on one rank, or on one per flow of a
bidirectional placement (replicas: the first is the primary, which owns the update). It places parameters, by layer name, and
evaluates: that needs no schedule.

It also has the one :func:`reduction` of a step's gradients inside a rank. Within a step every device adds up its own
microbatch shards (``compiled/compile.py``), so F, B and W hold no reduction over ``dp`` or ``cp``. Afterwards each accumulator
is summed once, over both, and over ``tp`` too where shards made parts of a gradient (``partial`` buffers); split parameters
stay split. The result lies as the parameters do. Small leaves share a buffer already (:mod:`jaxpipe.stage.model.params`), so a
stage needs few collectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpipe.axes import DATA, ONE_SHARD, RankMesh, rank_mesh
from jaxpipe.context_parallel import joined_shards, laid_out, shard_avals
from jaxpipe.cost.profile import analytic_profile
from jaxpipe.errors import CheckpointError, ConfigError, ProgramError, StageError
from jaxpipe.mesh import part_of, pipeline_submeshes, replicated, spanning_options, spec_of, with_several
from jaxpipe.runtime.batches import (
    Batch,
    Instance,
    check_microbatch,
    check_placed,
    checked_batch,
    place_data,
    rows_of,
)
from jaxpipe.runtime.grid import (
    RankView,
    aval_on,
    function_in_process,
    place,
    stage_in_process,
    sum_over,
)
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.runtime.transfer import OFFLOAD_ALL, OffloadOptions, Ownership
from jaxpipe.schedule import CostProfile, Placement, Schedule
from jaxpipe.stage.compiled.compile import BuildCache, build_all, build_output
from jaxpipe.stage.compiled.recompute_report import PolicyCost, compare_policies, remarks
from jaxpipe.stage.functions import Port, Reported, SideResult, StageFunction, StageFunctions, with_offload
from jaxpipe.stage.instructions import with_instructions
from jaxpipe.stage.jaxprs import array_leaves, fill
from jaxpipe.stage.model.layer import Layer, Model, Params, Path, check_dtype, taken_by
from jaxpipe.stage.model.params import ParamLayout, compute_avals, stage_params, undivided_axes
from jaxpipe.stage.model.plan import (
    Cut,
    StagePlan,
    analytic_layer_costs,
    checked_cut,
    cut,
    layer_loss_factor,
    loss_factor,
)
from jaxpipe.stage.model.reference import model_output, read_by, weights_of
from jaxpipe.stage.split.policies import STANDARD

Buffers = list[jax.Array]


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter leaf used by two stages: ``copy_path`` in ``copy_stage``'s parameters repeats ``owner_path`` in
    ``owner_stage``'s. Paths begin with the layer name."""

    owner_stage: int
    owner_path: Path
    copy_stage: int
    copy_path: Path


ALLOCATOR_BYTES = {"gpu": 256, "cuda": 256, "rocm": 256}
"""To what the allocator of a platform rounds every buffer up; elsewhere bytes are those of the arrays."""


class AssemblyOptions(TypedDict, total=False):
    """Options of :meth:`Assembly.of` beside the model, its stages' places and the size of a microbatch."""

    boundaries: Sequence[tuple[int, int]] | StagePlan | None
    devices: Sequence[jax.Device] | None
    compute_dtype: Any
    recompute: str | Sequence[str]
    offload: OffloadOptions
    dp: int
    tp: RankMesh | int
    braid: bool
    processes: Processes | None
    transport: str


@dataclass(frozen=True, repr=False)
class Assembly:
    """Compiled stages on the devices of their ranks (see the module). Make with :meth:`of`; the fields are read-only.

    ``boundaries[stage]``: first and one-past-last layer; ``functions[(rank, stage)]``; ``offload``: what O and L move, and
    where to; ``braid``: whether braided slots run as one function; ``ownership``: which ranks are this process's (all are
    traced, these run). ``mesh``: the devices of every rank by axis, and how layers divide their work over them;
    ``submeshes``: of each rank those in this process's column (:mod:`jaxpipe.runtime.grid`), whose arrays are here;
    ``rank_views``, ``function_views``: these seen with all devices of the rank, and with those on which functions run, which
    see their part of a microbatch; ``joint_functions``: as they run there.
    """

    model: Model
    placement: Placement
    boundaries: Cut
    submeshes: tuple[jax.sharding.Mesh, ...]
    rank_views: tuple[RankView, ...]
    function_views: tuple[RankView, ...]
    functions: Mapping[Instance, StageFunctions]
    joint_functions: Mapping[Instance, StageFunctions]
    microbatch_size: int
    compute_dtype: Any
    master_dtype: Any
    offload: OffloadOptions
    mesh: RankMesh
    braid: bool
    cache: BuildCache
    ownership: Ownership

    @property
    def dp(self) -> int:
        """Return how many devices of a rank share a microbatch's rows."""
        return self.mesh.dp

    @property
    def tp(self) -> RankMesh:
        """Return :attr:`mesh`, as layers call it."""
        return self.mesh

    @property
    def function_part(self) -> RankMesh:
        """Return the devices of every rank on which a function runs, by axis."""
        return self.mesh.function_part(self.ownership.processes.columns)

    @property
    def function_processes(self) -> int:
        """Return how many processes run a function together: consecutive columns."""
        return self.function_part.num_devices // self.mesh.column(self.ownership.processes.columns).num_devices

    @property
    def row_shards(self) -> range | None:
        """Return which of the parts of a microbatch's rows are here; None where they are not divided."""
        own, part = self.function_part.rows, self.ownership.processes.column // self.function_processes
        return range(part * own, (part + 1) * own) if self.mesh.rows > 1 else None

    @property
    def rows_here(self) -> range:
        """Return which sequences of a microbatch the stages here read."""
        size, shards = self.microbatch_size // self.mesh.rows, self.row_shards or range(self.mesh.rows)
        reads = any(f.data_names for f in self._own_functions.values())
        return range(shards.start * size, shards.stop * size) if reads else range(0)

    @property
    def copies_in_parts(self) -> bool:
        """Return whether O and L are issued in parts: what devices copy shares a few streams there."""
        asked = self.offload.in_parts
        return self.submeshes[0].devices.flat[0].platform in ALLOCATOR_BYTES if asked is None else asked

    @staticmethod
    def of(
        model: Model,
        placement: Placement,
        *,
        microbatch_size: int,
        boundaries: Sequence[tuple[int, int]] | StagePlan | None = None,
        devices: Sequence[jax.Device] | None = None,
        compute_dtype: Any = jnp.float32,
        recompute: str | Sequence[str] = "none",
        offload: OffloadOptions = OFFLOAD_ALL,
        dp: int = 1,
        tp: RankMesh | int = ONE_SHARD,
        braid: bool = True,
        processes: Processes | None = None,
        transport: str = "tagged",
    ) -> Assembly:
        """Trace and split the stages; each function is compiled when it first runs.

        Args:
            model: layers in order, the loss last.
            placement: of stages on ranks, with the edges that follow from the cut (several flows of a chain are allowed).
            microbatch_size: sequences in a microbatch, over all ``dp`` shards of a rank.
            boundaries: per stage, first and one-past-last layer: all layers in order, each once. Or a plan of this model; or
                None for stages balanced by FLOPs.
            devices: of the first rank, of the second …, ``tp`` innermost; the first of ``jax.devices()`` by default.
            compute_dtype: of parameters and activations: float32, bfloat16, or under x64 float64; master parameters are float32
                (float64 if this is).
            recompute: policy by name (:mod:`jaxpipe.stage.split.recompute`), or one a stage.
            offload: how much of a stage's residuals O and L move, and what the host has for them.
            tp: the devices of each rank by axis, and how layers divide their work over them (an int: so many along ``tp``,
                without options).
            dp: along ``dp``, where ``tp`` does not say.
            braid: run each braided slot as one woven function; if not, as separate calls, with bit-equal results.
            processes: of the run, between which the ranks are divided, and dp where they form columns; by default there is
                this one.
            transport: between them: ``tagged``, or on GPUs ``nccl`` (:class:`~jaxpipe.runtime.transfer.Ownership`).

        Raises:
            StageError, ProgramError, ConfigError: what is wrong, and what would work.
        """
        mesh = rank_mesh(tp, dp=dp)
        check_microbatch(microbatch_size, mesh.dp)
        if idle_axes := undivided_axes(model.layers, mesh):
            raise ConfigError(f"{mesh}: no layer of {model.name} is divided along {idle_axes[0]}; use {idle_axes[0]} 1")
        compute = check_dtype("dtype", compute_dtype)
        boundaries = _cut(model, placement, boundaries, microbatch_size // mesh.dp)
        processes = SingleProcess() if processes is None else processes
        processes.arrange(placement.num_ranks, mesh, processes.columns)
        part, column = mesh.function_part(processes.columns), mesh.column(processes.columns)
        spec = model.batch_spec(microbatch_size * part.rows // mesh.rows)
        data_avals = shard_avals(model.name, spec, model.over_time, part)
        rank_meshes = pipeline_submeshes(placement.num_ranks, mesh, devices=devices)
        submeshes = tuple(part_of(m, column, processes.column) for m in rank_meshes)
        number = processes.column // (part.num_devices // column.num_devices)
        rank_views = tuple(map(RankView, rank_meshes, submeshes))
        function_views = tuple(map(RankView, (part_of(m, part, number) for m in rank_meshes), submeshes))
        ownership = Ownership(submeshes, processes, transport)
        layers = [model.layers[a:b] for a, b in boundaries]
        instances = _instances(placement)
        ownership.link((ranks[0], other) for ranks in instances.values() for other in ranks[1:])
        master = jnp.dtype(jnp.float64) if compute == jnp.float64 else jnp.dtype(jnp.float32)
        functions: dict[Instance, StageFunctions] = {}
        # One cache for all flows: replicas of a stage have the same functions, traced once and placed on other devices.
        cache = BuildCache()
        for flow in range(max(len(r) for r in instances.values())):
            ranks = [instances[s][min(flow, len(instances[s]) - 1)] for s in range(len(layers))]
            built = build_all(
                layers,
                param_avals=compute_avals(model.layers, compute, master),
                data_avals=data_avals,
                meshes=[function_views[r].rank for r in ranks],
                recompute=recompute,
                acc_dtype=master,
                tp=part,
                cache=cache,
                first=model.first,
            )
            chosen = [with_offload(f, offload.fraction) for f in built]
            functions.update({(r, s): f for s, (r, f) in enumerate(zip(ranks, chosen, strict=True))})
        return Assembly(
            model,
            placement,
            boundaries,
            submeshes,
            rank_views,
            function_views,
            {(r, s): stage_in_process(f, function_views[r]) for (r, s), f in functions.items()},
            functions,
            microbatch_size,
            compute,
            master,
            offload,
            mesh,
            braid,
            cache,
            ownership,
        )

    # -- stages -------------------------------------------------------------------------------------------------------

    @cached_property
    def instances(self) -> Mapping[int, tuple[int, ...]]:
        """Return the ranks that run each stage, the primary first."""
        return _instances(self.placement)

    @cached_property
    def tied(self) -> tuple[Tie, ...]:
        home = {name: f.stage for f in self.stages for name in f.layout.layers}
        return tuple(
            Tie(home[owner], (owner, *owner_path), f.stage, (layer, *path))
            for f in self.stages
            for (layer, path), (owner, owner_path) in f.layout.shared.items()
        )

    def with_ops(self, schedule: Schedule) -> Assembly:
        """Add the functions of ``schedule``'s instructions that are not F, B, W or BW and that a function is registered for
        (:mod:`jaxpipe.stage.instructions`).

        Raises:
            StageError: one can't be built.
        """
        used: dict[int, dict[str, None]] = {}
        for action in schedule.actions():
            used.setdefault(action.stage, {})[action.op] = None
        functions = {
            (r, s): with_instructions(f, used.get(s, ()), self.submeshes[r]) for (r, s), f in self.functions.items()
        }
        if all(f is self.functions[at] for at, f in functions.items()):
            return self
        # A function sees whole arrays of its rank: of those in one column it would count, or norm, other rows than of all.
        if self.ownership.processes.columns > 1:
            raise StageError(
                "functions of instructions take whole arrays of a rank, and here several processes have its devices; start one "
                "process for them (srun --ntasks-per-node=1, torchrun --nproc-per-node=1; run.machine.columns=1)"
            )
        return replace(self, functions=functions, joint_functions=functions)

    @cached_property
    def flop_costs(self) -> CostProfile:
        """Return costs as far as they are known before anything runs."""
        return analytic_profile(self.stages)

    @cached_property
    def stages(self) -> tuple[StageFunctions, ...]:
        """Return the functions of each stage on its primary rank."""
        return tuple(self.functions[self.primary(s)] for s in range(len(self.boundaries)))

    @property
    def own_instances(self) -> tuple[Instance, ...]:
        """Return every (rank, stage) whose rank is this process's."""
        return tuple((r, s) for s, ranks in self.instances.items() for r in ranks if r in self.ownership.ranks)

    @cached_property
    def _own_functions(self) -> Mapping[Instance, StageFunctions]:
        return {at: f for at, f in self.functions.items() if at[0] in self.ownership.ranks}

    def primary(self, stage: int) -> Instance:
        """Return (rank, stage) of the instance that owns the update."""
        return self.instances[stage][0], stage

    def layout(self, stage: int) -> ParamLayout:
        return self.functions[self.primary(stage)].layout

    def layers(self, stage: int) -> tuple[Layer, ...]:
        a, b = self.boundaries[stage]
        return self.model.layers[a:b]

    @property
    def _data_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        spec = self.model.batch_spec(self.microbatch_size * self.function_part.rows // self.mesh.rows)
        return shard_avals(self.model.name, spec, self.model.over_time, self.function_part)

    def compare_policies(self, policies: Sequence[str] = STANDARD) -> tuple[tuple[PolicyCost, ...], ...]:
        """Compare what each recompute policy would save and cost, by stage (``compiled/recompute_report.py``). Runs nothing."""
        stages = range(len(self.boundaries))
        return compare_policies(
            [self.layers(s) for s in stages],
            compute_avals(self.model.layers, self.compute_dtype, self.master_dtype),
            self._data_avals,
            [self.function_views[self.primary(s)[0]].rank for s in stages],
            policies,
            self.master_dtype,
            self.function_part,
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks about the stages: policies that recompute nothing, loops that are not divided between B and W."""
        return remarks(self.stages)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def place(self, params: Mapping[str, Params]) -> dict[Instance, Buffers]:
        """Place parameters, by layer name, as buffers on every rank that needs them, in the dtypes that are computed with.

        Raises:
            CheckpointError: a layer or leaf is missing, or a shape differs from the model's.
        """
        placed, params = {}, self.model.divided(params)
        for rank, stage in self.own_instances:
            buffers = self.packed(stage, params)
            avals, view = self.functions[rank, stage].param_avals, self.function_views[rank]
            placed[(rank, stage)] = view.narrow(place(buffers, [NamedSharding(view.rank, spec_of(a)) for a in avals]))
        return placed

    def packed(self, stage: int, params: Mapping[str, Params], dtype: Any = None) -> Buffers:
        """Pack the buffers of a stage's parameters, out of the whole model's by layer name, floats in ``dtype`` or as they are
        computed with.

        Raises:
            CheckpointError: as :meth:`place`.
        """
        layout = self.layout(stage)
        try:
            return layout.pack(layout.cast(stage_params(self.layers(stage), params), dtype))
        except StageError as error:
            raise CheckpointError(f"these parameters do not fit the model: {error}") from None

    def zeros(self, instance: Instance) -> Buffers:
        """Make gradient accumulators for one (rank, stage)."""
        return [jax.device_put(np.zeros(a.shape, a.dtype), a.sharding) for a in self.functions[instance].acc_avals]

    def placed_data(
        self, params: Mapping[Instance, Buffers], batch: Batch, microbatches: int
    ) -> dict[Instance, list[list[jax.Array]]]:
        """Place what each (rank, stage) reads of ``batch``, by microbatch, on its devices.

        Raises:
            ProgramError: the batch does not fit, or ``params`` are not buffers by (rank, stage).
        """
        check_placed(params, self._own_functions)
        spec = self.model.batch_spec(self.microbatch_size)
        own = len(self.rows_here) if len(self.model.losses) == 1 else None
        batch = rows_of(self._with_factors(checked_batch(batch, spec, microbatches, own)), self.rows_here)
        batch = laid_out(batch, self.model.over_time, self.function_part)
        return place_data(batch, self._own_functions, self.function_views)

    def sum_replicas(self, gradients: Mapping[Instance, Sequence[jax.Array]]) -> dict[Instance, Buffers]:
        """Add the gradients of a stage's replicas, reduced or not, to its primary's, and return all, the replicas' at zero."""
        acc = {at: list(buffers) for at, buffers in gradients.items()}
        # Every process walks all stages in the same order: a move must be called in both of its processes.
        for s, ranks in self.instances.items():
            first = (ranks[0], s)
            for other in ranks[1:]:
                moved = self.ownership.move(acc.get((other, s), ()), other, ranks[0], self.functions[first].acc_avals)
                if first in acc:
                    acc[first] = [a + b for a, b in zip(acc[first], moved, strict=True)]
                if (other, s) in acc:
                    acc[(other, s)] = [jnp.zeros_like(a) for a in acc[(other, s)]]
        return acc

    def copy_to_replicas(self, buffers: dict[Instance, Buffers]) -> None:
        """Copy a stage's trained parameters from its primary to its replicas, in place."""
        for s, ranks in self.instances.items():
            for other in ranks[1:]:
                n, avals = self.layout(s).num_trained, self.functions[(other, s)].param_avals
                trained = buffers.get((ranks[0], s), [])[:n]
                # The next step donates them, whether they have gone or not.
                if self.ownership.in_different_processes(ranks[0], other):
                    trained = [jnp.copy(a) for a in trained]
                new = self.ownership.move(trained, ranks[0], other, avals[:n])
                if (other, s) in buffers:
                    buffers[(other, s)] = [*new, *buffers[(other, s)][n:]]

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, params: Mapping[Instance, Buffers], batch: Batch) -> tuple[float, float]:
        """Return loss sum and weight sum over ``batch`` (leading axis: microbatches), forward only, without dropout; several
        losses are combined as in :func:`~jaxpipe.stage.model.reference.combined`."""
        sums = self.evaluate_sums(params, batch)
        loss_sum, weight = self.eval_reported.loss(sums)
        return float(loss_sum), float(weight)

    def evaluate_sums(self, params: Mapping[Instance, Buffers], batch: Batch) -> list[float]:
        """Evaluate like :meth:`evaluate`, and return the sums of all ``loss`` ports of all stages: those of
        ``eval_metrics`` too."""
        runs_of_stages = self._forward(params, batch, [f.evaluation for f in self.stages], self.model.span)
        runs = [{at: x for at, x in results.items() if at[2].kind == "loss"} for results in runs_of_stages]
        parts: dict[int, list[list[list[float]]]] = {}
        for at in sorted(runs[0]):
            parts.setdefault(at[0], []).append([np.asarray(run[at]).reshape(-1).tolist() for run in runs])
        # Summed as Python floats, microbatch by microbatch in the order of the devices: float32 would lose digits over many of
        # them, and another order would give other ones.
        columns_of = sorted(self.ownership.shared_by_column("losses", parts).items())
        # Devices along axes that divide no data have the same losses; those axes are the innermost.
        cut = self.mesh.cut(self.ownership.processes.columns)
        copies = math.prod(parts for axis, parts in cut.items() if axis not in DATA)
        ports = [port for _, columns in columns_of for port in zip(*columns[::copies], strict=True)]
        return [sum(x for run in zip(*port, strict=True) for column in run for x in column) for port in ports]

    @cached_property
    def reported(self) -> Reported:
        """Return the positions of what a step reports among the ``loss`` ports of all stages."""
        return self._reported(False)

    @cached_property
    def eval_reported(self) -> Reported:
        """Return the positions of what an evaluation reports, like :attr:`reported`."""
        return self._reported(True)

    def _reported(self, evaluation: bool) -> Reported:
        heads: list[tuple[int, int]] = []
        named: dict[str, tuple[int, int]] = {}
        first = 0
        sides: dict[str, dict[str, SideResult]] = {}
        several = len(self.model.losses) > 1
        for s, f in enumerate(self.stages):
            for side in () if evaluation else f.sides:
                at = sides.setdefault(side.name, {})
                if self.layers(s)[side.layer].name in at or (
                    side.name in self.model.layer_losses and side.kind != "loss"
                ):
                    raise StageError(
                        f"layer {self.layers(s)[side.layer].name!r} returns two results {side.name!r}; rename one"
                    )
                at[self.layers(s)[side.layer].name] = side._replace(port=first + side.port)
            loss_ports = [(first + 2 * k, first + 2 * k + 1) for k in range(len(f.links.losses))]
            names = [self.layers(s)[k].name for k in f.links.losses]
            ports_of = {n: at for n, at in zip(names, loss_ports, strict=True) if several and n != "loss"}
            metrics = f.eval_metrics if evaluation else f.metrics
            ports_of |= {name: (first + a, first + b) for name, (a, b) in metrics.items()}
            if twice := ports_of.keys() & named.keys():
                raise StageError(f"two losses report a metric {min(twice)!r}; give one another name")
            named |= ports_of
            heads += loss_ports
            first += sum(p.kind == "loss" for p in (f.evaluation if evaluation else f.functions["F"]).outputs)
        if sides and self.model.span > 1:
            raise StageError(f"a layer returns {min(sides)!r} beside y; not with a loss of span {self.model.span}")
        factors = {} if evaluation else self.model.layer_losses
        if twice := named.keys() & factors.keys():
            raise StageError(f"two losses report a metric {min(twice)!r}; give one another name")
        return Reported(tuple(heads), named, sides, factors)

    def predict(self, params: Mapping[Instance, Buffers], batch: Batch) -> Any:
        """Return the output of the layer before the loss for ``batch`` (leading axis: microbatches; what only the loss
        reads may be left out), without dropout: a pytree of NumPy arrays ``[microbatches · microbatch size, …]``, in every
        process, which all call it.

        Raises:
            ProgramError: vocabulary layers are spread; the batch lacks what a layer before the loss reads; the output's shape
                does not tell how it is divided over tensor-parallel shards.
        """
        if self.model.stored is not self.model:
            raise ProgramError(
                "the head's words are divided over ranks, none of which has all logits: predict from a checkpoint (jaxpipe "
                "eval, generate), or with vocabulary='ends'"
            )
        reads = read_by(self.model, taken_by(self.model.layers)[-1])
        if missing := [name for name in reads if name not in batch]:
            raise ProgramError(f"the batch has no {missing[0]!r}; the layers before the loss read {', '.join(reads)}")
        function, tree, output_avals = self._output
        count = len(next(iter(batch.values())))
        # The loss is not run, but its data must have the right shapes to be placed.
        unread = {
            n: np.zeros((count, *a.shape), a.dtype) for n, a in self.model.batch_spec(self.microbatch_size).items()
        }
        functions = [*(f.evaluation for f in self.stages[:-1]), function]
        runs = self._forward(params, {**unread, **batch}, functions, 1)
        last = len(functions) - 1
        rank = self.primary(last)[0]
        self.ownership.link((rank, leader) for leader in self.ownership.leaders)
        view = self.rank_views[rank]
        join_columns = jax.jit(lambda arrays: arrays, out_shardings=replicated(view.rank))
        avals: Sequence[Any] = function.avals_out
        if view.spans:
            avals = [jax.ShapeDtypeStruct(aval_on(view.rank, a).shape, a.dtype) for a in avals]

        def in_every_process(run: Mapping[tuple[int, int, Port], jax.Array]) -> Sequence[jax.Array]:
            arrays = [run[at] for port in function.outputs if (at := (last, 0, port)) in run]
            if arrays and view.spans:
                arrays = view.narrow(join_columns(view.widen(arrays, [spec_of(a) for a in function.avals_out])))
            return self.ownership.spread(arrays, rank, avals)

        outputs = zip(*map(in_every_process, runs), strict=True)
        leaves = [
            np.concatenate([joined_shards(np.asarray(part), a.shape, self.mesh) for part in parts])
            for parts, a in zip(outputs, output_avals, strict=True)
        ]
        return fill(tree, leaves)

    @cached_property
    def _output(self) -> tuple[StageFunction, Any, Sequence[jax.ShapeDtypeStruct]]:
        """Return the last stage's function without the loss, what it returns as a pytree, and the global shapes of its
        arrays."""
        last = len(self.boundaries) - 1
        spec = self.model.batch_spec(self.microbatch_size)
        params = compute_avals(self.model.layers, self.compute_dtype, self.master_dtype)
        output_avals = jax.eval_shape(lambda p, b: array_leaves(model_output(self.model, p, b)), params, spec)
        at, part = self.primary(last), self.function_part
        view, joint = self.function_views[at[0]], self.joint_functions[at]
        function, tree = build_output(self.layers(last), joint, view.rank, self._data_avals, part)
        return function_in_process(function, view) if view.spans else function, tree, output_avals

    def _forward(
        self, params: Mapping[Instance, Buffers], batch: Batch, functions: Sequence[StageFunction], span: int
    ) -> Iterator[Mapping[tuple[int, int, Port], jax.Array]]:
        """Yield what ``functions``, one a stage, return for each ``span`` microbatches (those that the last takes at once),
        by stage, the microbatch's number among these, and port.

        Raises:
            ProgramError: the microbatches are no multiple of ``span``.
        """
        count = len(next(iter(batch.values())))
        if count % span:
            raise ProgramError(f"the loss takes {span} microbatches at once; {count} are no multiple of that")
        data, groups, depth = self.placed_data(params, batch, count), count // span, len(functions)
        results_of_group: dict[int, dict[tuple[int, int, Port], jax.Array]] = {}
        last_reader = {source: s for s in range(depth) for source in self.functions[self.primary(s)].x_from}
        # Stage s of a group in turn with the stage before it of the next group, as in a pipeline: a device runs what it is
        # given in that order, and one with two stages would else wait for a whole pass before it begins the next.
        for group, s in sorted(itertools.product(range(groups), range(depth)), key=lambda at: (sum(at), at)):
            results_of, at = results_of_group.setdefault(group, {}), self.primary(s)
            f, function = self.functions[at], functions[s]
            wide = min(f.links.span, span)
            for first in range(0, span, wide):
                members = range(first, first + wide)
                x = self._entering(s, [(t, k, Port("y", leaf)) for k in members for t, leaf in f.x_from], results_of)
                if at not in self._own_functions:
                    continue
                read = [array for k in members for array in data[at][group * span + k]] if at in data else []
                arguments = {"param": params[at], "x": x, "data": read}
                results = function.call(*(arguments[port.kind][port.index] for port in function.inputs))
                results_of |= {(s, first, port): result for port, result in zip(function.outputs, results, strict=True)}
            for k, source in itertools.product(range(span), f.x_from):
                if last_reader[source] == s:
                    results_of.pop((source[0], k, Port("y", source[1])), None)
            if s == depth - 1:
                yield results_of_group.pop(group)

    def _entering(
        self,
        stage: int,
        sources: Sequence[tuple[int, int, Port]],
        results_of: Mapping[tuple[int, int, Port], jax.Array],
    ) -> Sequence[jax.Array]:
        """Return the arrays that a stage reads out of ``results_of`` other stages, on its devices; empty if its rank is
        elsewhere."""
        to = self.primary(stage)
        source_ranks = [self.primary(t)[0] for t, _, _ in sources]
        avals = self.functions[to].x_avals[: len(sources)]
        array_at: dict[int, jax.Array] = {}
        # One move for each rank that arrays come from, in an order that is the same in all processes.
        for src in dict.fromkeys(source_ranks):
            places = [n for n, rank in enumerate(source_ranks) if rank == src]
            arrays = [results_of[sources[n]] for n in places if sources[n] in results_of]
            array_at |= zip(places, self.ownership.move(arrays, src, to[0], [avals[n] for n in places]), strict=False)
        return [array_at[n] for n in sorted(array_at)]

    def _with_factors(self, batch: Batch) -> Batch:
        """Add to ``batch`` what the gradient of each loss is multiplied by, where there are several: the first one's weight in
        all microbatches over its own (0 without weight), times the factor of a loss that layers have."""
        others = self.model.layer_losses
        if len(self.model.losses) == 1 and not others:
            return batch
        # A microbatch's backward needs the weights of all microbatches, long before those have run. They follow from the batch
        # alone, so the host computes them beforehand.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            totals = [float(w) for w in self._weights({name: np.asarray(x) for name, x in batch.items()})]
        shape = (len(next(iter(batch.values()))), self.microbatch_size)
        factors = [totals[0] / w if w > 0 else 0.0 for w in totals]
        names = [loss_factor(self.model.layers[k]) for k in self.model.losses]
        factors = [f * own for f, own in zip(factors, [*[1.0] * len(names), *others.values()], strict=True)]
        names += map(layer_loss_factor, others)
        return {**batch, **{n: np.full(shape, f, self.master_dtype) for n, f in zip(names, factors, strict=True)}}

    @cached_property
    def _weights(self) -> Any:
        """Return a function from a batch to the weight of each loss in it."""
        params = compute_avals(self.model.layers, self.compute_dtype, self.master_dtype)
        one = weights_of(self.model, params, self.model.batch_spec(self.microbatch_size))
        return jax.jit(lambda batch: [jnp.sum(w) for w in jax.vmap(one)(batch)])


def _cut(
    model: Model, placement: Placement, ranges: Sequence[tuple[int, int]] | StagePlan | None, device_batch: int
) -> Cut:
    """Return the first and one-past-last layer of each stage.

    Raises:
        ProgramError: there are more or fewer than the placement has stages.
        StageError: they are no cut of this model.
    """
    stages = placement.num_stages
    if ranges is None:
        return cut(model.layers, stages, analytic_layer_costs(model, device_batch), placement.edges)
    if isinstance(ranges, StagePlan):
        planned = [name for stage in ranges.stages for name in stage.layers]
        if planned != [layer.name for layer in model.layers]:
            raise StageError(
                f"the stage plan is of another model ({ranges.model}): its layers are {', '.join(planned)}"
            )
        ranges = ranges.cut
    if len(ranges) != stages:
        raise ProgramError(f"the placement has {stages} stages, the cut has {len(ranges)}: cut the model into {stages}")
    return checked_cut(model.layers, ranges)


def _instances(placement: Placement) -> dict[int, tuple[int, ...]]:
    flows = range(placement.num_flows)
    return {
        s: tuple(dict.fromkeys(r for i in flows for r in placement.ranks(s, i))) for s in range(placement.num_stages)
    }


Reduction = Callable[[list[jax.Array]], list[jax.Array]]


def reduction(mesh: Mesh, stage: StageFunctions) -> Reduction:
    """Make a function from the accumulators of a stage on ``mesh`` to its gradients, placed like its parameters.

    On one device, and generally where there is nothing to add up, the accumulators are the gradients.
    """
    axes = [with_several(mesh, stage.layout.axes(k).summed) for k in range(stage.layout.num_trained)]
    if not any(axes):
        return lambda acc: acc

    def reduce(acc: list[Any]) -> list[Any]:
        return [sum_over(a, over, mesh) for a, over in zip(acc, axes, strict=True)]

    reduce.__name__ = reduce.__qualname__ = f"reduce_stage{stage.stage}"
    into = [spec_of(a) for a in stage.acc_avals]
    reduce_stage: Reduction = on_rank(
        reduce, mesh, (into,), [spec_of(a) for a in stage.param_avals[: stage.layout.num_trained]]
    )
    return reduce_stage


def on_rank(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
) -> Any:
    """Compile ``function`` of local arrays over the devices of a rank; with one device just compile it."""
    if mesh.size == 1:
        return jax.jit(function, donate_argnums=donate)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate, compiler_options=spanning_options(mesh) or None)
