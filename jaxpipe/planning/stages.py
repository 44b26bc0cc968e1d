"""The stages of a config, traced without data, parameters or devices, each distinct kind once.

A :class:`Workbench` belongs to one model, dtype and sequence length. Stages whose layers are of the same kinds, get the same
shapes and keep the same residuals are one :class:`PlannedStage`; a model of 60 equal layers on 32 ranks costs three traces.

Tensor parallelism is counted, not traced (the layers have no TP yet): arrays of the shape that crosses stage boundaries
(the residual stream, inputs of column-parallel products) are whole on every shard unless ``sequence_parallel``; all others,
the parameters and the work divide by ``tp``; a transformer layer all-reduces its boundary twice in F and twice in B (Shoeybi et
al. 2019).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe._jax_compat import aval_bytes
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.planning.roofline import Efficiency, Work, work_of
from jaxpipe.planning.targets import Target
from jaxpipe.stage.compile import BuildCache, build_stage_functions
from jaxpipe.stage.functions import Port, StageFunctions
from jaxpipe.stage.layer import Layer, Model
from jaxpipe.stage.offloadable import with_offload
from jaxpipe.stage.plan import Cut, StagePlan, analytic_layer_costs, param_avals, plan_stages
from jaxpipe.stage.policies import per_stage
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

    @classmethod
    def of(cls, config: TrainConfig) -> Sharding:
        """As ``[pipeline]`` says."""
        pipe = config.pipeline
        return cls(pipe.tp, pipe.sequence_parallel, pipe.dp, pipe.zero1)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Costs of a stage on one of the rank's ``tp`` devices, and how they were got.

    Bytes: ``residual w_residual cotangent boundary`` a microbatch as in :class:`~jaxpipe.schedule.costs.CostProfile`;
    ``offloadable`` of the residuals; ``parameters gradients optimizer`` for good. ``work``: by operation, on the whole rank.
    ``streams``: layers that all-reduce under TP. ``passing``: by
    operation, of boundaries it reads or makes that are no residual; ``temp``: workspace.
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
    streams: int
    work: Mapping[str, Work]
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
    """What a stage is built from: layers, the first one's index in the model, what enters, whether it is the last, its
    recompute policy, sequences in a microbatch, and the fraction of its residuals that offloads move."""

    layers: tuple[Layer, ...]
    offset: int
    x: Any
    last: bool
    policy: str
    size: int
    offload_fraction: float = 1.0

    @property
    def kind(self) -> Hashable:
        """Equal for stages that cost the same."""
        layers = tuple((layer.kind or layer.name, tuple(sorted(layer.tied.items()))) for layer in self.layers)
        return (layers, str(self.x), self.last, self.policy, self.size, self.offload_fraction)

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
    _mesh: Mesh | None = None
    _avals: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[Hashable, PlannedStage] = field(default_factory=dict)
    _temps: dict[Hashable, dict[str, float]] = field(default_factory=dict)
    _layer_costs: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """One device: where traces are made. Nothing runs on it."""
        if self._mesh is None and self.temp_of is not None:
            self._mesh = self.temp_of.mesh
        if self._mesh is None:
            self._mesh = pipeline_submeshes(1, devices=jax.devices("cpu")[:1])[0]
        return self._mesh

    @property
    def avals(self) -> Mapping[str, Any]:
        """Shapes of the parameters in the compute dtype, by layer."""
        if not self._avals:

            def cast(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
                floating = jnp.issubdtype(a.dtype, jnp.floating)
                return jax.ShapeDtypeStruct(a.shape, self.compute_dtype if floating else a.dtype)

            self._avals = jax.tree.map(cast, param_avals(self.model))
        return self._avals

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
        for (start, stop), policy in zip(cut, policies, strict=True):
            x = made[-1].functions.y if made else None
            key = StageKey(
                self.model.layers[start:stop], start, x, stop == len(self.model.layers), policy, size, offload_fraction
            )
            if key.kind not in self._known:
                self.progress(f"tracing {key}")
                self._known[key.kind] = self._make(key)
            made.append(self._known[key.kind])
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
                    temps[op] = found / self.sharding.tp
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
            key.last,
            key.policy,
            jnp.float64 if self.compute_dtype == jnp.float64 else jnp.float32,
            self.cache,
        )

    def _make(self, key: StageKey) -> PlannedStage:
        functions = with_offload(self.functions_of(key), key.offload_fraction)
        layers, x = key.layers, key.x
        work = {op: work_of(functions.functions[op].jaxpr, self.target, self.efficiency) for op in OPS}
        temp = {op: w.workspace_bytes for op, w in work.items()}
        tp, stream = self.sharding.tp, _stream_shapes(functions, x)
        whole = 1 if not self.sharding.sequence_parallel else 1 / tp

        def shard(ports: Mapping[Port, Any]) -> float:
            return sum(aval_bytes(a) * (whole if tuple(a.shape) in stream else 1 / tp) for a in ports.values())

        held = {op: _ports(functions, op) for op in ("F", "B", "W", "BW")}
        kept = {p: a for op in ("B", "W") for p, a in held[op].items() if p.kind in ("x", "res")}
        for_w = {p: a for p, a in held["W"].items() if p.kind in ("x", "res", "wres")}
        moved = {p: a for p, a in kept.items() if p.kind == "res" and p.index in functions.offloaded}
        layout = functions.layout
        params = float(sum(aval_bytes(b) for b in layout.buffers))
        acc = layout.acc_avals(jnp.float64 if self.compute_dtype == jnp.float64 else jnp.float32)
        grads = float(sum(aval_bytes(a) for a in acc))
        master = 0.0 if acc and all(a.dtype == self.compute_dtype for a in acc) else grads
        return PlannedStage(
            key=key,
            functions=functions,
            residual=shard(kept),
            w_residual=shard(for_w),
            cotangent=shard({p: a for p, a in for_w.items() if p.kind == "wres"}),
            offloadable=shard(moved),
            boundary=functions.boundary_bytes * whole,
            parameters=params / tp,
            gradients=grads / tp,
            optimizer=(2 * grads + master) / tp / (self.sharding.dp if self.sharding.zero1 else 1),
            num_params=sum(a.size for a in acc),
            streams=sum(_keeps_stream(layer, self.avals) for layer in layers),
            work=work,
            passing={op: shard(_passing(functions, op, kept)) for op in OPS},
            temp={op: n / tp for op, n in temp.items()},
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


def _passing(functions: StageFunctions, op: str, kept: Mapping[Port, Any]) -> dict[Port, Any]:
    """Boundaries that are there while ``op`` runs: x where no backward pass reads it, dy unless it is handed to W, y, dx."""
    f = functions.functions[op]
    handed = {k for n, k in f.forwarded.items() if f.outputs[n].kind == "wres"}
    read = {
        p: a
        for k, (p, a) in enumerate(zip(f.inputs, f.avals_in, strict=True))
        if (p.kind == "dy" and k not in handed) or (p.kind == "x" and p not in kept)
    }
    made = {p: a for p, a in zip(f.outputs, f.avals_out, strict=True) if p.kind in ("y", "dx")}
    return read | made


def _stream_shapes(functions: StageFunctions, x: Any) -> set[tuple[int, ...]]:
    leaves = [a for a in jax.tree.leaves((x, functions.y)) if hasattr(a, "shape")]
    return {tuple(a.shape) for a in leaves if len(a.shape) > 2}


def _keeps_stream(layer: Layer, avals: Mapping[str, Any]) -> bool:
    """Whether the layer is a block with two branches onto the residual stream: it has products, and reads no data."""
    big = [a for a in jax.tree.leaves(avals[layer.name]) if len(a.shape) >= 2]
    return len(big) >= 3 and not layer.reads
