"""The stages of a config, traced without data, parameters or devices, each distinct kind once.

A :class:`Workbench` belongs to one model, dtype and sequence length. Stages whose layers are the same functions, get the same
shapes and keep the same residuals are one :class:`PlannedStage`; a model of 60 equal layers on 32 ranks costs three traces.

With tensor parallelism stages are traced as one of the rank's devices runs them, on devices that need not exist: bytes, work
and collectives are read from its jaxprs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxpipe._jax_compat import aval_bytes
from jaxpipe.mesh import AXES, AnyMesh, TensorParallel, pipeline_submeshes
from jaxpipe.planning.roofline import Efficiency, Work, work_of
from jaxpipe.planning.targets import Target
from jaxpipe.stage.compiled.compile import BuildCache, build_stage_functions
from jaxpipe.stage.compiled.footprint import total_device_bytes
from jaxpipe.stage.compiled.offloadable import with_offload
from jaxpipe.stage.functions import Port, StageFunctions
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.links import StageLinks, links_of
from jaxpipe.stage.model.params import compute_avals
from jaxpipe.stage.model.plan import Cut, StagePlan, analytic_layer_costs, plan_stages
from jaxpipe.stage.split.policies import per_stage
from jaxpipe.stage.weave.units import Collective, collectives
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.setup import build_model
from jaxpipe.train.tokenizers import load_tokenizer

OPS = ("F", "B", "W", "BW")


@dataclass(frozen=True, slots=True)
class Sharding:
    """``tp`` shards of each rank, and whether the residual stream is split over them too; ``dp`` such groups, and whether
    they divide optimizer state and update (ZeRO-1)."""

    tp: int = 1
    sequence_parallel: bool = False
    dp: int = 1
    zero1: bool = False
    fused_residual: bool = False

    @property
    def tensor(self) -> TensorParallel:
        """How layers divide their work."""
        return TensorParallel(self.tp, self.sequence_parallel, self.fused_residual)

    @classmethod
    def of(cls, config: TrainConfig) -> Sharding:
        """As ``[pipeline]`` says."""
        pipe = config.pipeline
        return cls(pipe.tp, pipe.sequence_parallel, pipe.dp, pipe.zero1, pipe.fused_residual)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Costs of a stage on one of the rank's ``tp`` devices, and how they were got.

    Bytes: ``residual w_residual cotangent boundary`` a microbatch as in :class:`~jaxpipe.schedule.costs.CostProfile`;
    ``offloadable`` of the residuals; ``parameters gradients optimizer`` for good. ``num_params``: of all devices together.
    ``work`` and ``collectives`` by operation. ``passing``: by operation, of boundaries it reads or makes that are no residual;
    ``temp``: workspace.
    """

    key: StageKey
    functions: StageFunctions
    residual: float
    w_residual: float
    cotangent: float
    offloadable: float
    boundary: float
    parameters: float
    gradients: float
    optimizer: float
    num_params: int
    work: Mapping[str, Work]
    collectives: Mapping[str, tuple[Collective, ...]]
    passing: Mapping[str, float]
    temp: Mapping[str, float]


class TempOf(Protocol):
    """Workspace of one function of a stage in bytes, by compiling it, or None where it must be estimated. ``mesh``: where
    stages are traced (a jaxpr is bound to the kind of its devices), or None for the host's CPU."""

    @property
    def mesh(self) -> Mesh | None: ...

    def __call__(self, bench: Workbench, stage: StageKey, op: str) -> float | None: ...


@dataclass(frozen=True, slots=True)
class StageKey:
    """What a stage is built from: layers, the first one's index in the model, what enters, its links to others, its recompute
    policy, sequences in a microbatch, and the fraction of its residuals that offloads move."""

    layers: tuple[Layer, ...]
    offset: int
    x: Any
    links: StageLinks
    policy: str
    size: int
    offload_fraction: float = 1.0

    @property
    def kind(self) -> Hashable:
        """Equal for stages that cost the same."""
        layers = tuple(layer.code for layer in self.layers)
        return (layers, str(self.x), self.links.kind, self.policy, self.size, self.offload_fraction)

    def __str__(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        names = first if len(self.layers) == 1 else f"{first} to {last}"
        return f"a stage of {names}, microbatches of {self.size}, recompute={self.policy}"


@dataclass(slots=True)
class Workbench:
    """Makes planned stages, each distinct kind once. ``temp_of``: workspace by compiling, estimated without it; ``progress``
    is told what takes time."""

    model: Model
    compute_dtype: Any
    target: Target
    efficiency: Efficiency
    sharding: Sharding
    temp_of: TempOf | None = None
    progress: Callable[[str], None] = print
    cache: BuildCache = field(default_factory=BuildCache)
    _mesh: AnyMesh | None = None
    _avals: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[Hashable, PlannedStage] = field(default_factory=dict)
    _temps: dict[Hashable, dict[str, float]] = field(default_factory=dict)
    _layer_costs: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def mesh(self) -> AnyMesh:
        """The ``tp`` devices of a rank: where traces are made. Nothing runs on them."""
        if self._mesh is None and self.temp_of is not None:
            self._mesh = self.temp_of.mesh
        if self._mesh is None and self.sharding.tp > 1:
            self._mesh = AbstractMesh((1, self.sharding.tp), AXES)
        if self._mesh is None:
            self._mesh = pipeline_submeshes(1, devices=jax.devices("cpu")[:1])[0]
        return self._mesh

    @property
    def avals(self) -> Mapping[str, Any]:
        """Shapes of the parameters in the compute dtype, by layer."""
        if not self._avals:
            self._avals = compute_avals(self.model.layers, self.compute_dtype, self._master_dtype)
        return self._avals

    @property
    def _master_dtype(self) -> Any:
        return jnp.float64 if self.compute_dtype == jnp.float64 else jnp.float32

    def plan(self, config: TrainConfig, num_stages: int) -> StagePlan:
        """How layers become ``num_stages`` stages: ``pipeline.cut`` where it fits, else by FLOPs."""
        cut, size = config.pipeline.cut, microbatch_size(config)
        if size not in self._layer_costs:
            self._layer_costs[size] = analytic_layer_costs(self.model, size)
        costs = self._layer_costs[size]
        if isinstance(cut, tuple) and len(cut) + 1 == num_stages:
            return plan_stages(self.model, boundaries=cut, costs=costs, costs_from="analytic")
        return plan_stages(self.model, num_stages, costs=costs, costs_from="analytic")

    def stages(
        self, cut: Cut, recompute: str | Sequence[str], size: int, offload_fraction: float = 1.0
    ) -> tuple[PlannedStage, ...]:
        """The stages of a cut for microbatches of ``size`` sequences, in order.

        Raises:
            StageError: a stage can't be traced or split, or no such policy.
        """
        policies = per_stage(recompute, len(cut))
        made: list[PlannedStage] = []
        layers = [self.model.layers[start:stop] for start, stop in cut]
        leaving: list[tuple[Any, ...]] = []
        for s, links in enumerate(links_of(layers, self.avals)):
            key = StageKey(layers[s], cut[s][0], links.entering(leaving), links, policies[s], size, offload_fraction)
            if key.kind not in self._known:
                self.progress(f"tracing {key}")
                self._known[key.kind] = self._make(key)
            made.append(self._known[key.kind])
            leaving.append(links.exits(made[-1].functions.y))
        return tuple(made)

    def compiled(self, stages: Sequence[PlannedStage], ops: Iterable[str]) -> tuple[PlannedStage, ...]:
        """The stages with workspace from compiling ``ops``, the commonest stages first, and from what was compiled before;
        unchanged where nothing compiles."""
        if self.temp_of is None:
            return tuple(stages)
        counts = Counter(s.key.kind for s in stages)
        one = {s.key.kind: s for s in stages}
        wanted = [op for op in OPS if op in set(ops)]
        for kind, _ in counts.most_common():
            temps = self._temps.setdefault(kind, {})
            for op in wanted:
                if op not in temps and (found := self.temp_of(self, one[kind].key, op)) is not None:
                    temps[op] = found
        return tuple(replace(s, temp={**s.temp, **self._temps[s.key.kind]}) for s in stages)

    def functions_of(self, key: StageKey) -> StageFunctions:
        """Stage functions on :attr:`mesh`; traces and compiled code are shared."""
        return build_stage_functions(
            key.layers,
            key.offset,
            self.avals,
            key.x,
            self.model.batch_spec(key.size),
            self.mesh,
            0,
            key.links,
            key.policy,
            self._master_dtype,
            self.cache,
            self.sharding.tensor,
        )

    def _make(self, key: StageKey) -> PlannedStage:
        functions = with_offload(self.functions_of(key), key.offload_fraction)
        jaxprs = {op: functions.functions[op].jaxpr for op in OPS}
        work = {op: work_of(jaxpr, self.target, self.efficiency) for op, jaxpr in jaxprs.items()}
        held = {op: _ports(functions, op) for op in ("B", "W")}
        kept = {p for ports in held.values() for p in ports if p.kind in ("x", "res")}
        layout = functions.layout
        acc = layout.acc_avals(self._master_dtype)
        grads = float(sum(aval_bytes(a) for a in acc))
        master = float(sum(aval_bytes(a) for a, b in zip(acc, layout.buffers, strict=False) if a.dtype != b.dtype))
        floats = (s for s in layout.slots if jnp.issubdtype(s.dtype, jnp.inexact))
        return PlannedStage(
            key=key,
            functions=functions,
            residual=functions.residual_bytes,
            w_residual=functions.w_residual_bytes,
            cotangent=functions.cotangent_bytes,
            offloadable=functions.offloadable_bytes,
            boundary=functions.boundary_bytes,
            parameters=functions.param_bytes,
            gradients=grads,
            optimizer=(2 * grads + master) / (self.sharding.dp if self.sharding.zero1 else 1),
            num_params=sum(math.prod(s.whole_shape(layout.shards)) for s in floats),
            work=work,
            collectives={op: collectives(jaxpr) for op, jaxpr in jaxprs.items()},
            passing={op: total_device_bytes(_passing(functions, op, kept)) for op in OPS},
            temp={op: w.workspace_bytes for op, w in work.items()},
        )


def workbench(
    config: TrainConfig,
    target: Target,
    efficiency: Efficiency,
    sharding: Sharding,
    progress: Callable[[str], None],
    **others: Any,
) -> Workbench:
    """The workbench of a config. Reads no data: the vocabulary is ``model.options.vocab_size`` or the tokenizer's.

    Raises:
        ConfigError, DataError: no such model, bad options, or no such tokenizer.
    """
    given = config.model.options.get("vocab_size")
    vocab = given if isinstance(given, int) else load_tokenizer(config.data.tokenizer).vocab_size
    model = build_model(config, vocab)
    return Workbench(model, jnp.dtype(config.run.dtype), target, efficiency, sharding, progress=progress, **others)


def microbatch_size(config: TrainConfig) -> int:
    """Sequences of a microbatch that one data-parallel device computes."""
    return config.run.batch // config.pipeline.microbatches // config.pipeline.dp


def _ports(functions: StageFunctions, op: str) -> dict[Port, Any]:
    f = functions.functions[op]
    return dict(zip(f.inputs, f.avals_in, strict=True))


def _passing(functions: StageFunctions, op: str, kept: set[Port]) -> list[jax.ShapeDtypeStruct]:
    """Boundaries that are there while ``op`` runs: x where no backward pass reads it, dy unless it is handed to W, y, dx."""
    f = functions.functions[op]
    handed = {k for n, k in f.forwarded.items() if f.outputs[n].kind == "wres"}
    read = [
        a
        for k, (p, a) in enumerate(zip(f.inputs, f.avals_in, strict=True))
        if (p.kind == "dy" and k not in handed) or (p.kind == "x" and p not in kept)
    ]
    return read + [a for p, a in zip(f.outputs, f.avals_out, strict=True) if p.kind in ("y", "dx")]
