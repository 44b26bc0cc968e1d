"""Trace the stages of a config without data, parameters or devices, each distinct kind once.

A :class:`Workbench` belongs to one model, dtype, sequence length and number of shards. Stages whose layers are the same
functions, get the same shapes and keep the same residuals are one :class:`PlannedStage`. Of a long run of equal layers one is
traced with its neighbours; each further one costs what the second of two such layers alone adds to the first: a model of 60
equal layers on 32 ranks costs five traces.

Stages are traced as one of the rank's devices runs them, on devices that need not exist, with cuDNN if they are GPUs: bytes,
work and collectives are read from its jaxprs.

A :class:`Compiler` returns exact workspace: that of functions compiled by XLA for a GPU that need not be there, or for this
machine's CPU. A stage of more than three equal layers is compiled with one and with two of them; the workspace of n is
taken to grow linearly (with unrolled layers it mostly stays). Autotuning is off, since it would have to run kernels: real
runs may choose algorithms with other workspace.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby, islice, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from jaxpipe._jax_compat import aval_bytes, compile_only_devices, cudnn_assumed
from jaxpipe.context_parallel import shard_avals
from jaxpipe.cost.profile import Exchanges, StageSizes
from jaxpipe.errors import StageError
from jaxpipe.mesh import AXES, AnyMesh, TensorParallel
from jaxpipe.planning.measured import Stopwatch
from jaxpipe.planning.resized import PROBE, resized
from jaxpipe.planning.roofline import Efficiency, View, Walk, Work
from jaxpipe.planning.targets import Target, device_text
from jaxpipe.stage.compiled.compile import BuildCache, build_stage_functions
from jaxpipe.stage.compiled.footprint import compiled_footprint
from jaxpipe.stage.compiled.offloadable import with_offload
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.identity import function_key
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.links import StageLinks, links_of
from jaxpipe.stage.model.params import compute_avals
from jaxpipe.stage.model.plan import Cut
from jaxpipe.stage.primitives import is_attention_kernel
from jaxpipe.stage.split.policies import per_stage
from jaxpipe.train.assemble import Planner, shards_of, spread_over, stage_planner
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.tokenizers import load_tokenizer
from jaxpipe.train.settings.sections import PipelineConfig
from jaxpipe.train.setup import build_model, microbatch_size, optimizer_of, with_mask

_OPTIONS = {"xla_gpu_autotune_level": "0"}
_KEPT = 1  # layers of a long run that a trace has: each further one adds what the second adds to the first


@dataclass(frozen=True)
class StageKey:
    """The key under which a stage is traced once: layers, the first one's index in the model, what enters, its links to
    others, its recompute policy, sequences in a microbatch, and the fraction of its residuals that offloads move."""

    layers: tuple[Layer, ...]
    offset: int
    x: Any
    links: StageLinks
    policy: str
    size: int
    offload_fraction: float

    @cached_property
    def kind(self) -> Hashable:
        """Equal for stages that cost the same."""
        layers = tuple(layer.code for layer in self.layers)
        return (layers, str(self.x), self.links.kind, self.policy, self.size, self.offload_fraction)

    def __str__(self) -> str:
        names = " to ".join(dict.fromkeys((self.layers[0].name, self.layers[-1].name)))
        return f"a stage of {names}, microbatches of {self.size}, recompute={self.policy}"


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage on one of the rank's ``cp × tp`` devices. ``functions``: of the stage with long runs of equal layers cut
    short; all other fields are the whole stage's. ``work`` by operation; ``state_bytes``: master parameters and optimizer
    state, undivided; ``temps``: workspace in bytes by operation, of those that were compiled."""

    key: StageKey
    functions: StageFunctions
    sizes: StageSizes
    work: Mapping[str, Work]
    state_bytes: float
    temps: Mapping[str, float] = field(default_factory=dict)

    @property
    def fuses_attention(self) -> bool:
        """Return whether the stage uses cuDNN's fused attention."""
        return any(map(is_attention_kernel, self.functions.functions["F"].jaxpr.jaxpr.eqns))

    @property
    def seconds(self) -> np.ndarray[Any, Any]:
        """Seconds of a forward, a split backward (B and W), and a fused backward (BW): [3]."""
        f, b, w, bw = (self.work[op].seconds if op in self.work else 0.0 for op in ("F", "B", "W", "BW"))
        return np.array([f, b + w, bw])

    @property
    def workspace(self) -> Mapping[str, float]:
        """Bytes of workspace by operation, estimated where the operation was not compiled."""
        return {**{op: w.workspace_bytes for op, w in self.work.items()}, **self.temps}


@dataclass
class Workbench:
    """Makes planned stages, each distinct kind once. ``temp_of``: workspace by compiling, estimated without it; ``progress``
    is told what takes time. ``sizes``: for a quick look at many sizes, two numbers of sequences from which any other follows,
    kernel by kernel and array by array where their kernels are the same; one trace tells both where it can
    (:mod:`jaxpipe.planning.resized`), else each is traced. ``seconds_of``: seconds
    measured on devices that are here, in place of the roofline's."""

    model: Model
    compute_dtype: Any
    target: Target
    efficiency: Efficiency
    tp: TensorParallel
    optimizer: optax.GradientTransformation
    temp_of: Compiler | None = None
    progress: Callable[[str], None] = print
    cache: BuildCache = field(default_factory=BuildCache)
    sizes: tuple[int, int] | None = None
    seconds_of: Stopwatch | None = None
    _stored: Workbench | None = None
    _known: dict[Hashable, PlannedStage] = field(default_factory=dict)
    _traced: dict[Hashable, StageFunctions] = field(default_factory=dict)
    _priced: dict[Hashable, tuple[PlannedStage, ...]] = field(default_factory=dict)
    _cuts: dict[Hashable, list[list[StageKey]]] = field(default_factory=dict)
    _steps: dict[Hashable, tuple[PlannedStage | None, PlannedStage | None]] = field(default_factory=dict)

    def over(self, pipe: PipelineConfig) -> Workbench:
        """Return the workbench of the model with vocabulary layers where ``pipe`` puts them; what is known already is
        shared."""
        model = spread_over(pipe, self.model)
        return self if model is self.model else replace(self, model=model, _stored=self._stored or self, _cuts={})

    @cached_property
    def mesh(self) -> AnyMesh:
        """The ``cp × tp`` devices of a rank: where traces are made. Nothing runs on them, unless times are measured."""
        if self.seconds_of is not None:
            return self.seconds_of.mesh(self.tp)
        if self.temp_of is not None and self.temp_of.mesh is not None:
            return self.temp_of.mesh
        device = AbstractDevice(self.target.name, None, "cpu" if self.target.chip is None else "gpu")
        return AbstractMesh((1, self.tp.cp, self.tp.size), AXES, abstract_device=device)

    @cached_property
    def avals(self) -> Mapping[str, Any]:
        """Shapes of the parameters in the compute dtype, by layer."""
        return compute_avals(self.model.layers, self.compute_dtype, self._master_dtype)

    @cached_property
    def least_state_bytes(self) -> float:
        """Bytes of optimizer state for one parameter, in the layer that needs the fewest; 0 where no layer has parameters."""
        layers = [jax.tree.leaves(tree) for tree in self.avals.values()]
        return min((self._moments(leaves) / sum(a.size for a in leaves) for leaves in layers if leaves), default=0.0)

    def _moments(self, leaves: Sequence[Any]) -> float:
        """Bytes of optimizer state of these parameters, without counts of steps, which take a few."""
        masters = [jax.ShapeDtypeStruct(a.shape, jnp.promote_types(self._master_dtype, a.dtype)) for a in leaves]
        state = jax.tree.leaves(jax.eval_shape(self.optimizer.init, masters))
        return sum(aval_bytes(a) for a in state if jnp.issubdtype(a.dtype, jnp.inexact))

    @property
    def _master_dtype(self) -> Any:
        return jnp.float64 if self.compute_dtype == jnp.float64 else jnp.float32

    def stages(
        self, cut: Cut, recompute: str | Sequence[str], size: int, offload_fraction: float = 1.0
    ) -> tuple[PlannedStage, ...]:
        """Return the stages of a cut for microbatches of ``size`` sequences, in order.

        Raises:
            StageError: a stage can't be traced or split, or no such policy.
        """
        for traced in self._ways(size, offload_fraction):
            with suppress(*([StageError] if traced == (PROBE,) else [])):  # layers may refuse so many sequences
                if priced_stages := self._stages(cut, recompute, size, traced, offload_fraction):
                    return priced_stages
        return self._stages(cut, recompute, size, (size,), offload_fraction)

    def _ways(self, size: int, offload_fraction: float = 1.0) -> Iterator[tuple[int, ...]]:
        """Yield the tuples of sizes from whose traces ``size`` can be computed, the fewest traces first."""
        if self.sizes is not None:
            if self.seconds_of is None and offload_fraction in (0, 1):
                yield (PROBE,)
            yield (size,) if size in self.sizes else self.sizes

    def _stages(
        self, cut: Cut, recompute: str | Sequence[str], size: int, traced: tuple[int, ...], offload_fraction: float
    ) -> tuple[PlannedStage, ...]:
        """Return stages priced from traces at the sizes ``traced``, or () if those traces use different kernels."""
        stages = list[PlannedStage]()
        cut_key = tuple(cut), tuple(per_stage(recompute, len(cut))), traced, offload_fraction
        if cut_key not in self._cuts:
            self._cuts[cut_key] = list(self._keys(*cut_key))
        for keys in self._cuts[cut_key]:
            kind = keys[0].kind if self.sizes is None else (keys[0].kind, traced, size)
            if kind not in self._known and (grown := self._grown(keys, size)) is not None:
                self._known[kind] = grown
            if kind not in self._known:
                return ()
            stages.append(self._known[kind])
        return tuple(stages)

    def _keys(
        self, cut: Cut, recompute: str | Sequence[str], traced: tuple[int, ...], offload_fraction: float
    ) -> Iterator[list[StageKey]]:
        """Yield each stage's keys, one for each size; the stages before it are traced for that."""
        layers = [self.model.layers[a:b] for a, b in cut]
        leaving = [list[tuple[Any, ...]]() for _ in traced]
        for s, (links, policy) in enumerate(
            zip(links_of(layers, self.avals), per_stage(recompute, len(cut)), strict=True)
        ):
            keys = [
                StageKey(layers[s], cut[s][0], links.entering(leaving_avals), links, policy, n, offload_fraction)
                for n, leaving_avals in zip(traced, leaving, strict=True)
            ]
            yield keys
            for key, leaving_avals in zip(keys, leaving, strict=True):
                leaving_avals.append(links.exits(self._traced_once(_cut_to(key, *self._short(key))).y))

    def further(self, recompute: str, size: int) -> Mapping[Hashable, tuple[int, PlannedStage, PlannedStage]]:
        """Return, by the code of each long run of equal layers, their number and two stages of ``size`` sequences, the
        second with one layer more: their difference is what a layer adds. Empty where every size is traced."""
        stages_by_code, cut = dict[Hashable, tuple[int, PlannedStage, PlannedStage]](), self._apart
        last = max((k for k, (a, b) in enumerate(cut) if b - a > 1), default=-1)
        for traced in self._ways(size) if self.seconds_of is None else ():
            with suppress(*([StageError] if traced == (PROBE,) else [])):
                for keys in islice(self._keys(cut, recompute, traced, 1.0), last + 1):
                    one, two = self._step(keys, 0, size) if self._short(keys[0])[0] else (None, None)
                    if one is not None and two is not None:
                        stages_by_code[keys[0].layers[0].code] = len(keys[0].layers), one, two
            if stages_by_code:
                break
        return stages_by_code

    @cached_property
    def _apart(self) -> Cut:
        """Cut the model into long runs of equal layers and single layers; the first layer is a stage of its own."""
        layers, links = tuple(self.model.layers), links_of([self.model.layers], self.avals)[0]
        runs = _long_runs(StageKey(layers, 0, None, links, "none", 1, 1.0))
        until = {max(run[0], 1): run[-1] + 1 for run in runs}
        starts, at = list[int](), 0
        while at < len(layers):
            starts.append(at)
            at = until.get(at, at + 1)
        return tuple(pairwise((*starts, len(layers))))

    def compiled(self, stages: Sequence[PlannedStage], ops: Collection[str]) -> tuple[PlannedStage, ...]:
        """Return the stages with workspace from compiling ``ops``, the commonest stages first, or from earlier compilations;
        unchanged where nothing compiles."""
        if self.temp_of is None:
            return tuple(stages)
        for kind, _ in Counter(s.key.kind for s in stages).most_common():
            stage = self._known[kind]
            for op in stage.work:
                if op in ops and op not in stage.temps and (temp := self.temp_of(self, stage.key, op)) is not None:
                    stage = replace(stage, temps={**stage.temps, op: temp})
            self._known[kind] = stage
        return tuple(self._known[s.key.kind] for s in stages)

    def functions_of(self, key: StageKey) -> StageFunctions:
        """Stage functions on :attr:`mesh`; traces and compiled code are shared."""
        cache = replace(self.cache, calls=replace(self.cache.calls, repeated=self._repeated))
        batch = shard_avals(self.model.name, self.model.batch_spec(key.size), self.model.over_time, self.tp)
        with cudnn_assumed() if self.seconds_of is None else nullcontext():
            return build_stage_functions(
                key.layers, key.offset, self.avals, key.x, batch, self.mesh, 0, key.links, key.policy, self._master_dtype,
                cache, self.tp, evaluated=False,
            )  # fmt: skip

    @cached_property
    def _repeated(self) -> frozenset[Hashable]:
        """Return the functions that several layers share."""
        counts = Counter(function_key(layer.apply) for layer in self.model.layers)
        return frozenset(key for key, n in counts.items() if n > 1)

    def _grown(self, keys: Sequence[StageKey], size: int) -> PlannedStage | None:
        """Extrapolate the stage from traces with few layers in each long run of equal layers; None as for :meth:`_make`."""
        runs, short_lengths = self._short(keys[0])
        grown_stage = self._make([_cut_to(key, runs, short_lengths) for key in keys], size)
        # costs are linear in the number of equal layers: each further one adds ``longer`` − ``base``
        for k, run in enumerate(runs):
            base, longer = self._step(keys, k, size)
            if grown_stage is None or base is None or longer is None:
                return None
            grown_stage = _plus(grown_stage, longer, base, len(run) - short_lengths[k])
        return None if grown_stage is None else replace(grown_stage, key=replace(keys[0], size=size))

    def _step(self, keys: Sequence[StageKey], k: int, size: int) -> tuple[PlannedStage | None, PlannedStage | None]:
        """Return two stages, of which the second has one layer more of the ``k``-th long run: of the run alone, the same
        for all stages that have such layers; those of ``keys`` themselves if there is none."""
        runs, short = self._short(keys[0])
        code, sizes, bench = keys[0].layers[runs[k][0]].code, tuple(x.size for x in keys), self._stored or self
        kind = (code, keys[0].policy, keys[0].offload_fraction, sizes, size)
        if kind not in self._steps:
            for run_keys in bench._keys(bench._apart, keys[0].policy, sizes, keys[0].offload_fraction):
                if run_keys[0].layers[0].code == code and bench._short(run_keys[0])[0]:
                    keys, (runs, short), k = run_keys, bench._short(run_keys[0]), 0
                    break
            longer = [n + (i == k) for i, n in enumerate(short)]
            one, two = (self._make([_cut_to(key, runs, n) for key in keys], size) for n in (short, longer))
            self._steps[kind] = one, two
        return self._steps[kind]

    def _short(self, stage: StageKey) -> tuple[list[list[int]], list[int]]:
        """Return the long runs, and how many layers of each must be traced. Where a part of the residuals is offloaded, the
        largest go, which is not linear in their number."""
        runs = _long_runs(stage) if stage.offload_fraction in (0, 1) else []
        return runs, [_KEPT] * len(runs)

    def _make(self, keys: Sequence[StageKey], size: int) -> PlannedStage | None:
        """Price the stage from traces of all ``keys``, which differ in size; each kind is traced once. None if the traces
        use different kernels."""
        priced_stages = [stage for key in keys for stage in self._priced_once(key)]
        if len(priced_stages) < 2:
            return priced_stages[0] if priced_stages else None
        # bytes and work are linear in the number of sequences, so two sizes give all others
        one, two = priced_stages
        share = (size - one.key.size) / (two.key.size - one.key.size)
        work = {op: x.towards(two.work[op], share) for op, x in one.work.items()}
        exchanges = {op: _towards(x, two.sizes.exchanges[op], share) for op, x in one.sizes.exchanges.items()}
        work_by_op = {op: x for op, x in work.items() if x is not None}
        if len(work_by_op) < len(work) or None in exchanges.values():
            return None
        sizes = replace(_plus(one.sizes, two.sizes, one.sizes, share), exchanges=exchanges)
        return replace(one, sizes=sizes, work=work_by_op)

    def _traced_once(self, key: StageKey) -> StageFunctions:
        if key.kind not in self._traced:
            self.progress(f"tracing {key}")
            self._traced[key.kind] = self.functions_of(key)
        return self._traced[key.kind]

    def _priced_once(self, key: StageKey) -> tuple[PlannedStage, ...]:
        """Trace and price the stage; a probe gives one stage for each of :attr:`sizes`, or none if its shapes are ambiguous."""
        if key.kind not in self._priced:
            stage, sizes = self._traced_once(key), self.sizes if key.size == PROBE else None
            stages = [(stage, View())] if sizes is None else resized(stage, sizes)
            views, state_bytes = [view for _, view in stages], self._state_bytes(stage)
            bodies = {op: f.jaxpr.jaxpr for op, f in stage.functions.items()}
            walks = {op: Walk(body, self.target, self.efficiency, views) for op, body in bodies.items() if stages}
            self._priced[key.kind] = tuple(
                self._planned(replace(key, size=n), f, {op: x.seen(view) for op, x in walks.items()}, state_bytes)
                for (f, view), n in zip(stages, sizes or (key.size,), strict=False)
            )
        return self._priced[key.kind]

    def _planned(
        self, key: StageKey, functions: StageFunctions, work: dict[str, Work], state_bytes: float
    ) -> PlannedStage:
        functions = with_offload(functions, key.offload_fraction)
        if self.seconds_of is not None:
            work |= {op: replace(work[op], seconds=s) for op, s in self.seconds_of(functions).items() if op in work}
        return PlannedStage(key, functions, StageSizes.of(functions), work, state_bytes)

    def _state_bytes(self, functions: StageFunctions) -> float:
        """Return the bytes of master parameters and optimizer state."""
        acc = functions.layout.acc_avals(self._master_dtype)
        masters = [a for a, b in zip(acc, functions.layout.buffers, strict=False) if a.dtype != b.dtype]
        return sum(map(aval_bytes, masters)) + self._moments(acc)


def _towards(one: Exchanges, two: Exchanges, share: float) -> Exchanges | None:
    """Interpolate the array sizes of collectives, ``share`` of the way from ``one`` to ``two``; None if the collectives
    differ."""
    if [(name, among, n) for (name, _, among), n in one.items()] != [
        (name, among, n) for (name, _, among), n in two.items()
    ]:
        return None
    sizes = ((a + share * (b - a)) for (_, a, _), (_, b, _) in zip(one, two, strict=True))
    return {(name, size, among): n for ((name, _, among), n), size in zip(one.items(), sizes, strict=True)}


def _plus(total: Any, longer: Any, base: Any, times: float) -> Any:
    """Add ``times`` the difference ``longer`` − ``base`` to ``total``, number by number; other values are those of
    ``total``."""
    if isinstance(total, int | float):
        return total + times * (longer - base)
    if isinstance(total, PlannedStage | StageSizes | Work):
        names = [f.name for f in fields(total) if f.name not in ("key", "functions", "parts", "levels")]
        return replace(
            total, **{x: _plus(getattr(total, x), getattr(longer, x), getattr(base, x), times) for x in names}
        )
    if isinstance(total, Mapping):
        kinds = {**base, **total, **longer}
        return {k: _plus(total.get(k, 0), longer.get(k, 0), base.get(k, 0), times) for k in kinds}
    return total


class Compiler:
    """``temp_of`` of a :class:`Workbench`: workspace in bytes of one of the rank's ``cp × tp`` devices.

    ``notice`` is told once why no more is compiled, if so; from then on workspace is estimated. ``budget_s``: no compilation
    starts after as many seconds of it. ``count``: functions compiled, in ``spent_s`` seconds.
    """

    def __init__(
        self, target: Target, notice: Callable[[str], None], budget_s: float = 60.0, tp: int = 1, cp: int = 1
    ) -> None:
        self.notice, self.budget_s, self.count, self.spent_s = notice, budget_s, 0, 0.0
        self.mesh: Mesh | None = None
        is_local = target.chip is None and target.name == "cpu" and tp * cp == 1
        self._options = {} if is_local else _OPTIONS
        devices: Sequence[jax.Device] | str = f"target {target.name} has no 'chip' numbers"
        if is_local:
            devices = jax.devices("cpu")[:1]
        elif target.chip is not None:
            devices = compile_only_devices(target.name, device_text(target), tp * cp)
        self.works = not isinstance(devices, str)
        if isinstance(devices, str):
            self._stop(devices)
        else:
            self.mesh = Mesh(np.array(devices, dtype=object).reshape(1, cp, tp), AXES)

    def _stop(self, reason: str) -> None:
        self.works = False
        self.notice(f"workspace is estimated from the jaxprs where it was not compiled: {reason}")

    def __call__(self, bench: Workbench, stage: StageKey, op: str) -> float | None:
        runs = _long_runs(stage)
        short = self._compiled(bench, _cut_to(stage, runs, [1] * len(runs)), op)
        if short is None or not runs:
            return short
        long = self._compiled(bench, _cut_to(stage, runs, [2] * len(runs)), op)
        return None if long is None else short + (max(map(len, runs)) - 1) * max(0.0, long - short)

    def _compiled(self, bench: Workbench, stage: StageKey, op: str) -> float | None:
        if not self.works:
            return None
        if self.spent_s > self.budget_s:
            self._stop(f"{self.budget_s:g} s were spent on compiling {self.count} functions; the rest is estimated")
            return None
        start, function = time.monotonic(), bench.functions_of(stage).functions[op]
        if len(function.forwarded) == len(function.outputs):
            return 0.0
        try:
            lowered = function.jitted.lower(*function.avals_in)
            temp = float(compiled_footprint(lowered.compile(compiler_options=self._options)).temp_bytes)
        except Exception as error:
            self._stop(f"XLA says {str(error).splitlines()[0][:160]}")
            return None
        took = time.monotonic() - start
        self.count += 1
        self.spent_s += took
        bench.progress(f"compiled {op} of {stage}: {temp / 1e6:,.1f} MB workspace, {took:.1f} s")
        return temp


def _long_runs(stage: StageKey, most: int = _KEPT + 1) -> list[list[int]]:
    """Return the positions of each run of more than ``most`` equal layers that each take one result."""
    runs = [list(run) for _, run in groupby(range(len(stage.layers)), key=lambda i: stage.layers[i].code)]
    long = [run for run in runs if len(run) > most]
    return long if all(len(stage.links.takes[i]) == 1 for run in long for i in run[1:]) else []


def _cut_to(stage: StageKey, runs: Sequence[Sequence[int]], lengths: Sequence[int]) -> StageKey:
    """Return the stage with so many layers of each of ``runs``."""
    dropped = {i for run, n in zip(runs, lengths, strict=True) for i in run[n:]}
    layers = tuple(layer for i, layer in enumerate(stage.layers) if i not in dropped)
    return replace(stage, layers=layers, links=stage.links.without(dropped)) if dropped else stage


def workbench(
    config: TrainConfig, target: Target, efficiency: Efficiency, progress: Callable[[str], None], **options: Any
) -> Workbench:
    """Return the workbench of a config. Reads no data: the vocabulary is ``model.options.vocab_size`` or the tokenizer's.

    Raises:
        ConfigError, DataError: no such model, bad options, or no such tokenizer.
    """
    pipe, vocab_option = config.pipeline, config.model.options.get("vocab_size")
    vocab = vocab_option if isinstance(vocab_option, int) else load_tokenizer(config.data.tokenizer).vocab_size
    reading = config.data.reading
    config = with_mask(config, vocab, has_chats=reading.format == "chat" and reading.pack in ("auto", "whole"))
    model = spread_over(pipe, build_model(config, vocab))
    return Workbench(
        model,
        jnp.dtype(config.run.dtype),
        target,
        efficiency,
        shards_of(pipe),
        optimizer_of(config, model),
        progress=progress,
        **options,
    )


def planner(config: TrainConfig, model: Model, known: dict[Any, Any] | None = None) -> Planner:
    """Return the planner that training cuts ``model`` with; it counts FLOPs where training would time layers. ``known``: costs
    of layers, shared with other planners."""
    pipe = config.pipeline
    counted = replace(pipe, cut="analytic") if pipe.cut == "measured" else pipe
    return stage_planner(counted, model, microbatch_size(config), flops_cache=known)
