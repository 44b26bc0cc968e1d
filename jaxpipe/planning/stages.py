"""Trace and price the stages of a config without data, parameters or devices, each distinct kind once.

A :class:`StageCosts` belongs to one model, dtype, sequence length and number of shards. Stages whose layers are the same
functions, get the same shapes and keep the same residuals are one :class:`PlannedStage`. Only one layer of a long run of
equal ones is traced with its neighbours; each further layer costs what the second of two such layers adds to the first: a
model of 60 equal layers on 32 ranks costs five traces.

Stages are traced as one of the rank's devices runs them, on devices that need not exist, with cuDNN if they are GPUs: bytes,
work and collectives are read from its jaxprs.

A :class:`Compiler` returns exact workspace: that of functions compiled by XLA for a GPU that need not be there, or for this
machine's CPU. A stage of more than three equal layers is compiled with one and with two of them; the workspace of n is
taken to grow linearly (with unrolled layers it mostly stays). Autotuning is off, since it would have to run kernels: real
runs may choose algorithms with other workspace.

*Other sizes* (:func:`resized`). A trace with a prime number of sequences (:attr:`StageCosts.probe`) shows of each axis of
each array whether sequences lie along it: its length is a multiple of the prime then. So one trace gives the shapes, and with
them bytes and operations, for any number of sequences. Resized functions can be priced, not run.

*Measured times* (:class:`Stopwatch`), kept in a file and reused (FlexPipe, section 3, "profiling"). They are keyed by what was
run: the programs of F, B, W and BW, the devices and the version of JAX. Tensor-parallel collectives are subtracted, as the
target's links say what they take.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractDevice, Mesh

from jaxpipe._jax_compat import (
    Jaxpr,
    JaxprEqn,
    Var,
    aval_bytes,
    close_jaxpr,
    compile_only_devices,
    cudnn_assumed,
    fresh_var,
    scan_parts,
    sub_jaxprs,
)
from jaxpipe.axes import ONE_SHARD, BufferKind, RankMesh
from jaxpipe.context_parallel import shard_avals
from jaxpipe.cost.profile import StageSizes, measure_stages
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.files import write_atomically
from jaxpipe.mesh import AnyMesh, mesh_over, mesh_over_none
from jaxpipe.planning.roofline import Efficiency, KernelWalk, SizeView, Work
from jaxpipe.planning.targets import Target, device_text
from jaxpipe.stage.compiled.compile import BuildCache, build_stage_functions, held_bytes
from jaxpipe.stage.functions import StageFunction, StageFunctions, compiled_footprint, with_offload
from jaxpipe.stage.identity import function_key
from jaxpipe.stage.jaxprs import is_attention_kernel, is_exchange, is_ragged
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.params import ParamAval, compute_avals, expert_leaves
from jaxpipe.stage.model.plan import Cut, StageLinks, links_of
from jaxpipe.stage.model.vocabulary import VocabParallelModel
from jaxpipe.stage.split.policies import per_stage
from jaxpipe.train.assemble import Planner, spread_over, stage_planner
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.tokenizers import load_tokenizer
from jaxpipe.train.settings.sections import PipelineConfig
from jaxpipe.train.setup import build_model, with_mask
from jaxpipe.train.update.optimizer import optimizer_of

PROBE = 131071
"""Sequences in the traced microbatch, at most: a prime (2¹⁷ − 1), so that only axes along sequences are multiples of it."""


def resized(stage: StageFunctions, size: int, probe: int = PROBE) -> tuple[StageFunctions, SizeView] | None:
    """Resize a stage traced with ``probe`` sequences to ``size``, and return it with a view of its equations.

    The resized functions keep only exchanges and attention kernels, and their inputs and outputs as traced. Returns None
    where shapes are ambiguous: an axis is as long as no parameter's, neither short nor a multiple of ``probe``; an array
    has sequences along several axes; or loops and branches run over sequences.
    """
    layout = stage.layout
    shapes = *(x.shape for x in layout.slots), *(x.shape for x in (*layout.buffers, *stage.acc_avals))
    entering = (n for x in jax.tree.leaves(stage.x) for n in getattr(x, "shape", ()) if n % probe)
    view = _ProbeView((*(n for shape in shapes for n in shape), *entering), size, probe)
    view.check_shapes(f.jaxpr.jaxpr for f in stage.functions.values())
    functions = {op: view.function(f) for op, f in stage.functions.items()}
    forward = functions["F"]
    results = zip(forward.outputs, forward.jaxpr.jaxpr.outvars, strict=True)
    bytes_by_field = held_bytes({op: (f.inputs, f.jaxpr.jaxpr.invars) for op, f in functions.items()})
    boundary_bytes = sum(aval_bytes(a.aval) for port, a in results if port.kind == "y")
    sized = replace(stage, functions=functions, evaluation=forward, boundary_bytes=boundary_bytes, **bytes_by_field)
    return None if view.ambiguous else (sized, view)


class _ProbeView(SizeView):
    """Shows a stage traced with ``probe`` sequences as if it had ``size`` of them. ``ambiguous``: some shape did not show
    whether sequences lie along it. Functions of a stage share variables (residuals), so each variable is resized once."""

    def __init__(self, dimensions: Iterable[int], size: int, probe: int = PROBE) -> None:
        self.dimensions, self.size, self.probe = frozenset(dimensions), size, probe
        self.ambiguous = any(n and n % probe == 0 for n in self.dimensions)
        self.variables: dict[Var, Var] = {}
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def check_shapes(self, bodies: Iterable[Jaxpr]) -> None:
        """Set ``ambiguous`` if a shape does not show which axes hold sequences."""
        eqns = {id(eqn): eqn for body in bodies for eqn in body.eqns}
        for shape in {shape for eqn in eqns.values() for shape in _shapes(eqn)}:
            self.shape(shape)
        # a view shows equations of the outer body only: inside of loops and branches nothing may depend on the size
        inside = (n for eqn in eqns.values() for sub in sub_jaxprs(eqn) for n in _inside(sub))
        loops = (loop.length for loop in map(scan_parts, eqns.values()) if loop is not None)
        self.ambiguous = self.ambiguous or any(n >= self.probe // 2 for n in (*inside, *loops))

    def function(self, function: StageFunction) -> StageFunction:
        body = function.jaxpr.jaxpr
        eqns = [self.eqn(eqn) for eqn in body.eqns if is_exchange(eqn) or is_attention_kernel(eqn)]
        consts = zip(map(self.atom, body.constvars), function.jaxpr.consts, strict=True)
        invars, outvars = ([self.atom(a) for a in atoms] for atoms in (body.invars, body.outvars))
        closed = close_jaxpr(list(consts), invars, eqns, outvars)
        avals_in, avals_out = (tuple(map(self._aval, avals)) for avals in (function.avals_in, function.avals_out))
        return replace(function, jaxpr=closed, avals_in=avals_in, avals_out=avals_out)

    def eqn(self, eqn: JaxprEqn) -> JaxprEqn:
        operands, results = ([self.atom(a) for a in atoms] for atoms in (eqn.invars, eqn.outvars))
        resized_eqn: JaxprEqn = eqn.replace(invars=operands, outvars=results)
        return resized_eqn

    def atom(self, atom: Any) -> Any:
        if not isinstance(atom, Var) or not (shape := getattr(atom.aval, "shape", ())):
            return atom
        if atom not in self.variables:
            same = (new_shape := self.shape(shape)) == shape
            self.variables[atom] = atom if same else fresh_var(atom.aval.update(shape=new_shape))
        return self.variables[atom]

    def _aval(self, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(map(self._length, aval.shape)), aval.dtype, sharding=aval.sharding)

    def _length(self, n: int) -> int:
        return n // self.probe * self.size if n % self.probe == 0 else n

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an array that has this one with ``probe`` sequences."""
        if shape not in self.shapes:
            # a long axis that is no parameter's and no multiple may hold sequences all the same (probe − 1 behind a shift)
            along = [n for n in shape if n and n % self.probe == 0]
            others_known = all(n in along or n < self.probe // 2 or n in self.dimensions for n in shape)
            if len(along) > 1 or any(n % self.probe**2 == 0 for n in along) or not others_known:
                self.ambiguous = True
            self.shapes[shape] = tuple(map(self._length, shape))
        return self.shapes[shape]


def _shapes(eqn: JaxprEqn) -> Iterator[tuple[int, ...]]:
    return (getattr(a.aval, "shape", ()) for a in (*eqn.invars, *eqn.outvars))


def _inside(body: Jaxpr) -> Iterator[int]:
    """Yield the lengths of all axes in a body and its nested bodies, such as a scatter's update."""
    for eqn in body.eqns:
        yield from (n for shape in _shapes(eqn) for n in shape)
        for sub in sub_jaxprs(eqn):
            yield from _inside(sub)


@dataclass
class Stopwatch:
    """Times stages on ``devices`` and keeps the seconds in the file ``path``. ``measured`` and ``reused``: stages so far.

    Raises:
        ConfigError: the file is none of these.
    """

    devices: Sequence[jax.Device]
    path: Path
    progress: Callable[[str], None] = lambda text: None
    repeats: int = 3
    measured: int = 0
    reused: int = 0
    _known: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with suppress(FileNotFoundError):
            try:
                read = json.loads(self.path.read_text(encoding="utf-8"))
                self._known = {key: {op: float(x) for op, x in row.items()} for key, row in read["seconds"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{self.path}: no file of measured times ({error}); remove it") from None

    def mesh(self, shards: RankMesh) -> Mesh:
        """Return the first devices as the mesh of a rank.

        Raises:
            StageError: there are fewer.
        """
        need = shards.num_devices
        if need > len(self.devices):
            raise StageError(f"a rank of {need} devices can't be measured on {len(self.devices)}")
        return mesh_over(shards, self.devices[:need])

    def __call__(self, stage: StageFunctions, vocab_size: int) -> Mapping[str, float]:
        """Return the measured seconds by operation. ``vocab_size``: integers of a batch are below it."""
        device = self.devices[0]
        # the text of a jaxpr names variables in order, so equal programs of two processes have equal texts
        where = f"{jax.__version__} {device.platform} {device.device_kind} {stage.layout.mesh.num_devices}"
        programs = "\n".join(f"{op} {f.jaxpr}" for op, f in stage.functions.items())
        # keys of calls on ones had no vocabulary: a GPU multiplies ones in less time than other values
        key = hashlib.sha256(f"{where} {vocab_size}\n{programs}".encode()).hexdigest()[:24]
        if key in self._known:
            self.reused += 1
            return self._known[key]
        try:
            costs = measure_stages([stage], repeats=self.repeats, memory=False, vocab_size=vocab_size).costs()
        except jax.errors.JaxRuntimeError as error:
            raise StageError(f"a stage can't be measured here: {str(error).splitlines()[0][:120]}") from None
        fields = {"F": costs.f_s, "B": costs.b_s, "W": costs.w_s, "BW": costs.bw_s}
        self._known[key] = {op: row[0] for op, row in fields.items()}
        self.measured += 1
        self.progress(f"measured {self.measured} stages ({self.reused} times were there already)")
        # written after each stage: minutes of measuring survive Ctrl-C
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps({"format": "jaxpipe measured times 1", "seconds": self._known}))
        return self._known[key]


_OPTIONS = {"xla_gpu_autotune_level": "0"}
_TRACED_LAYERS = 1
"""Layers that a trace keeps of a long run of equal ones; each further layer adds what the second adds to the first."""


@dataclass(frozen=True)
class StageKey:
    """Names a stage to trace: its ``layers``, of which the first is the model's ``offset``-th, the avals ``x`` that enter, its
    ``links`` to other stages, recompute ``policy``, ``size`` (sequences in a microbatch), and the fraction of its residuals
    that offloads move."""

    layers: tuple[Layer, ...]
    offset: int
    x: Any
    links: StageLinks
    policy: str
    size: int
    offload_fraction: float

    @cached_property
    def kind(self) -> Hashable:
        """A key that is equal for stages that cost the same."""
        # without ``offset``: where in the model a layer stands changes its parameters' names and nothing that is priced
        layers = tuple(layer.code for layer in self.layers)
        return (layers, str(self.x), self.links.kind, self.policy, self.size, self.offload_fraction)

    def __str__(self) -> str:
        names = " to ".join(dict.fromkeys((self.layers[0].name, self.layers[-1].name)))
        return f"a stage of {names}, microbatches of {self.size}, recompute={self.policy}"


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A priced stage, as one of the rank's devices runs it. ``functions`` are those of the stage with long runs of equal layers
    cut short; all other fields are the whole stage's. ``work`` by operation; ``state_bytes``: master parameters and optimizer
    state by the kind of buffer, before ZeRO-1 divides them; ``temps``: workspace in bytes of the operations that were
    compiled."""

    key: StageKey
    functions: StageFunctions
    sizes: StageSizes
    work: Mapping[str, Work]
    state_bytes: Mapping[BufferKind, float]
    temps: Mapping[str, float] = field(default_factory=dict)

    @property
    def fuses_attention(self) -> bool:
        """Return whether the stage uses cuDNN's fused attention."""
        return any(map(is_attention_kernel, self.functions.functions["F"].jaxpr.jaxpr.eqns))

    @property
    def seconds(self) -> np.ndarray[Any, Any]:
        """Seconds of a forward, a split backward (B and W), and a fused backward (BW), at least: [3]."""
        work = (self.work.get(op, Work()) for op in ("F", "B", "W", "BW"))
        # rows that do not come cost ragged products nothing
        f, b, w, bw = (x.seconds - x.expert_s * self.is_ragged for x in work)
        return np.array([f, b + w, bw])

    @property
    def is_ragged(self) -> bool:
        """Return whether experts' products are over as many rows as there are."""
        return is_ragged(self.functions.functions["F"].jaxpr)

    @property
    def workspace(self) -> Mapping[str, float]:
        """Bytes of workspace by operation, estimated where the operation was not compiled."""
        return {**{op: w.workspace_bytes for op, w in self.work.items()}, **self.temps}


@dataclass(frozen=True, slots=True)
class _Trace:
    """A traced stage, the kernels of each of its functions, and bytes of master parameters and optimizer state."""

    functions: StageFunctions
    walks: Mapping[str, KernelWalk]
    state_bytes: Mapping[BufferKind, float]


@dataclass
class StageCosts:
    """Prices the stages of a model on ``target``, each distinct kind once.

    ``temp_of`` finds workspace by compiling; without it workspace is estimated. ``progress`` gets a line for each step that
    takes seconds. ``probes``, for a search over many microbatch sizes: one trace gives the prices of all where it can
    (:func:`resized`). ``seconds_of`` measures seconds on local devices, which then stand in place of the roofline's.
    """

    model: Model
    compute_dtype: Any
    target: Target
    efficiency: Efficiency
    shards: RankMesh
    optimizer: optax.GradientTransformation
    temp_of: Compiler | None = None
    progress: Callable[[str], None] = print
    cache: BuildCache = field(default_factory=BuildCache)
    probes: bool = False
    seconds_of: Stopwatch | None = None
    _base: StageCosts | None = None
    _stages_by_kind: dict[Hashable, PlannedStage] = field(default_factory=dict)
    _traces_by_kind: dict[Hashable, _Trace] = field(default_factory=dict)
    _keys_by_cut: dict[Hashable, list[StageKey]] = field(default_factory=dict)
    _increments: dict[Hashable, tuple[PlannedStage | None, PlannedStage | None]] = field(default_factory=dict)

    @cached_property
    def probe(self) -> int:
        """Return the sequences of a trace that tells all sizes: so many that numbers of choices of experts stay below 2³¹."""
        positions = max(math.prod(a.shape) for a in self.model.batch_spec(1).values())
        choices = max((k for _, k in self.experts), default=0) * positions * 3 // 2
        most = max(2, min(PROBE, 2**31 // max(choices, 1)))
        return next(n for n in range(most, 0, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))

    def is_for(self, pipe: PipelineConfig) -> bool:
        """Return whether these are costs of the shards of ``pipe``, and of vocabulary layers where it puts them."""
        same = pipe.mesh.one_replica.sizes == self.shards.sizes
        return same and isinstance(self.model, VocabParallelModel) == (pipe.vocabulary != "ends")

    def over(self, pipe: PipelineConfig) -> StageCosts:
        """Return the stage costs of the model with vocabulary layers where ``pipe`` puts them; traces and prices are shared."""
        model = spread_over(pipe, self.model)
        # cuts name layers by position, and parts of the vocabulary are layers too: only the keys of cuts start anew
        return self if model is self.model else replace(self, model=model, _base=self._base or self, _keys_by_cut={})

    @cached_property
    def mesh(self) -> AnyMesh:
        """The mesh of devices that hold each parameter once, for which stages are traced; it runs nothing unless times are
        measured."""
        if self.seconds_of is not None:
            return self.seconds_of.mesh(self.shards)
        if self.temp_of is not None and self.temp_of.mesh is not None:
            return self.temp_of.mesh
        device = AbstractDevice(self.target.description, None, "cpu" if self.target.chip is None else "gpu")
        return mesh_over_none(self.shards, device)

    @cached_property
    def avals(self) -> Mapping[str, Any]:
        """Shapes of the parameters in the compute dtype, by layer."""
        return compute_avals(self.model.layers, self.compute_dtype, self._master_dtype)

    @cached_property
    def experts(self) -> list[tuple[ParamAval, int]]:
        """Return the parameters that hold experts, with how many of these a position is sent to."""
        return expert_leaves(self.model.layers, self.avals)

    @cached_property
    def least_state_bytes(self) -> float:
        """Bytes of optimizer state for one parameter, in the layer that needs the fewest; 0 where no layer has parameters."""
        layers = [jax.tree.leaves(tree) for tree in self.avals.values()]
        return min(
            (self._optimizer_bytes(leaves) / sum(a.size for a in leaves) for leaves in layers if leaves), default=0.0
        )

    def _optimizer_bytes(self, leaves: Sequence[Any]) -> float:
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
        for traced in self._traced_sizes(size):
            # a user's layer may refuse so many sequences, which says nothing of the sizes that run
            with suppress(*[StageError] * (traced != size)):
                if priced_stages := self._stages(cut, recompute, size, traced, offload_fraction):
                    return priced_stages
        return ()

    def _traced_sizes(self, size: int) -> tuple[int, ...]:
        """Return the numbers of sequences whose traces may tell what ``size`` of them cost, the one that needs fewer traces
        first."""
        return (self.probe, size) if self.probes and self.seconds_of is None else (size,)

    def _stages(
        self, cut: Cut, recompute: str | Sequence[str], size: int, traced: int, offload_fraction: float
    ) -> tuple[PlannedStage, ...]:
        """Return stages priced from traces of ``traced`` sequences, or () if those traces do not tell of ``size``."""
        stages = list[PlannedStage]()
        # keys are kept, as making them traces each stage's predecessors for the shapes that enter it
        cut_key = tuple(cut), tuple(per_stage(recompute, len(cut))), traced, offload_fraction
        if cut_key not in self._keys_by_cut:
            self._keys_by_cut[cut_key] = list(self._stage_keys(*cut_key))
        for key in self._keys_by_cut[cut_key]:
            kind = key.kind, size
            if kind not in self._stages_by_kind and (priced_stage := self._extrapolated(key, size)) is not None:
                self._stages_by_kind[kind] = priced_stage
            if kind not in self._stages_by_kind:
                return ()
            stages.append(self._stages_by_kind[kind])
        return tuple(stages)

    def _stage_keys(
        self, cut: Cut, recompute: str | Sequence[str], traced: int, offload_fraction: float
    ) -> Iterator[StageKey]:
        """Yield the key of each stage in turn. A stage's inputs are what earlier stages return, so these are traced on the
        way; a caller that stops early saves the traces of the rest."""
        layers = [self.model.layers[a:b] for a, b in cut]
        leaving = list[tuple[Any, ...]]()
        for s, (links, policy) in enumerate(
            zip(links_of(layers, self.avals), per_stage(recompute, len(cut)), strict=True)
        ):
            yield (
                key := StageKey(layers[s], cut[s][0], links.entering(leaving), links, policy, traced, offload_fraction)
            )
            leaving.append(links.exits(self._traced(_shortened(key, *_traced_lengths(key))).functions.y))

    def run_increments(self, recompute: str, size: int) -> Mapping[Hashable, tuple[int, PlannedStage, PlannedStage]]:
        """Return how many equal layers each long run has, and two stages of ``size`` sequences, the second with one layer more,
        by the code of the run's layer: their difference is what a layer adds. Empty where every size is traced."""
        stages_by_code, cut = dict[Hashable, tuple[int, PlannedStage, PlannedStage]](), self._run_cut
        last = max((k for k, (a, b) in enumerate(cut) if b - a > 1), default=-1)
        for traced in self._traced_sizes(size) if self.probes and self.seconds_of is None else ():
            with suppress(*[StageError] * (traced != size)):
                for key in islice(self._stage_keys(cut, recompute, traced, 1.0), last + 1):
                    one, two = self._increment(key, 0, size) if _traced_lengths(key)[0] else (None, None)
                    if one is not None and two is not None:
                        stages_by_code[key.layers[0].code] = len(key.layers), one, two
            if stages_by_code:
                break
        return stages_by_code

    @cached_property
    def _run_cut(self) -> Cut:
        """Cut the model into long runs of equal layers and single layers; the first layer is a stage of its own."""
        layers, links = tuple(self.model.layers), links_of([self.model.layers], self.avals)[0]
        runs = _long_runs(StageKey(layers, 0, None, links, "none", 1, 1.0))
        # the model's first layer reads the batch and no activation: as the first of a run it would be another kind of stage
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
        # the budget of seconds may end at any compilation: the kind that most ranks run must not be the one left out
        for kind, _ in Counter((s.key.kind, s.key.size) for s in stages).most_common():
            stage = self._stages_by_kind[kind]
            for op in stage.work:
                if op in ops and op not in stage.temps and (temp := self.temp_of(self, stage.key, op)) is not None:
                    stage = replace(stage, temps={**stage.temps, op: temp})
            self._stages_by_kind[kind] = stage
        return tuple(self._stages_by_kind[s.key.kind, s.key.size] for s in stages)

    def functions_of(self, key: StageKey) -> StageFunctions:
        """Build the stage's functions on :attr:`mesh`; stages with equal layers share traces and compiled code."""
        cache = replace(self.cache, calls=replace(self.cache.calls, repeated=self._repeated))
        rows = key.size * self.shards.rows
        batch = shard_avals(self.model.name, self.model.batch_spec(rows), self.model.over_time, self.shards)
        with cudnn_assumed() if self.seconds_of is None else nullcontext():
            return build_stage_functions(
                key.layers, key.offset, self.avals, key.x, batch, self.mesh, 0, key.links, key.policy, self._master_dtype,
                cache, self.shards, evaluated=False,
            )  # fmt: skip

    @cached_property
    def _repeated(self) -> frozenset[Hashable]:
        """Return the functions that several layers share."""
        counts = Counter(function_key(layer.apply) for layer in self.model.layers)
        return frozenset(key for key, n in counts.items() if n > 1)

    def _extrapolated(self, key: StageKey, size: int) -> PlannedStage | None:
        """Extrapolate the stage from traces with few layers of each long run; None as for :meth:`_priced_at`."""
        runs, lengths = _traced_lengths(key)
        stage = self._priced_at(_shortened(key, runs, lengths), size)
        # costs are linear in the number of equal layers: each further one adds ``longer`` − ``base``
        for k, run in enumerate(runs):
            base, longer = self._increment(key, k, size)
            if stage is None or base is None or longer is None:
                return None
            stage = _extrapolate(stage, longer, base, len(run) - lengths[k])
        return None if stage is None else replace(stage, key=replace(key, size=size))

    def _increment(self, key: StageKey, k: int, size: int) -> tuple[PlannedStage | None, PlannedStage | None]:
        """Return two stages, the second with one layer more of the ``k``-th long run of ``key``. They hold the run alone, so
        that all stages with such layers share them; where the model has no such run by itself, they are cut from ``key``."""
        runs, lengths = _traced_lengths(key)
        code, ends = key.layers[runs[k][0]].code, self._base or self
        kind = (code, key.policy, key.offload_fraction, key.size, size)
        if kind not in self._increments:
            # ``ends``, the model with its vocabulary at the ends: its runs serve every way to spread the vocabulary
            for run_key in ends._stage_keys(ends._run_cut, key.policy, key.size, key.offload_fraction):
                if run_key.layers[0].code == code and _traced_lengths(run_key)[0]:
                    key, (runs, lengths), k = run_key, _traced_lengths(run_key), 0
                    break
            longer = [n + (i == k) for i, n in enumerate(lengths)]
            one, two = (self._priced_at(_shortened(key, runs, n), size) for n in (lengths, longer))
            self._increments[kind] = one, two
        return self._increments[kind]

    def _traced(self, key: StageKey) -> _Trace:
        if key.kind not in self._traces_by_kind:
            self.progress(f"tracing {key}")
            functions = self.functions_of(key)
            bodies = {op: f.jaxpr.jaxpr for op, f in functions.functions.items()}
            experts = functions.layout.expert_sizes(key.layers)
            walks = {op: KernelWalk(body, self.target, self.efficiency, experts) for op, body in bodies.items()}
            self._traces_by_kind[key.kind] = _Trace(functions, walks, self._state_bytes(functions))
        return self._traces_by_kind[key.kind]

    def _priced_at(self, key: StageKey, size: int) -> PlannedStage | None:
        """Price the stage of ``key`` with ``size`` sequences; None if it is a probe whose shapes are ambiguous."""
        trace = self._traced(key)
        sized = (trace.functions, SizeView()) if key.size == size else resized(trace.functions, size, key.size)
        if sized is None:
            return None
        functions = with_offload(sized[0], key.offload_fraction)
        work = {op: walk.at(sized[1]) for op, walk in trace.walks.items()}
        if self.seconds_of is not None:
            seconds = self.seconds_of(functions, self.model.vocab_size)
            work |= {op: replace(work[op], seconds=s) for op, s in seconds.items() if op in work}
        key = replace(key, size=size)
        return PlannedStage(key, functions, StageSizes.of(functions), work, trace.state_bytes)

    def _state_bytes(self, functions: StageFunctions) -> Mapping[BufferKind, float]:
        """Return the bytes of master parameters and optimizer state by the kind of buffer."""
        layout, state = functions.layout, dict[BufferKind, float]()
        trained = tuple(zip(layout.kinds, layout.acc_avals(self._master_dtype), layout.buffers, strict=False))
        for kind in dict.fromkeys(kind for kind, _, _ in trained):
            masters = sum(aval_bytes(a) for k, a, b in trained if k == kind and a.dtype != b.dtype)
            state[kind] = masters + self._optimizer_bytes([a for k, a, _ in trained if k == kind])
        return state


def _extrapolate(total: Any, longer: Any, base: Any, times: float) -> Any:
    """Add ``times`` the difference ``longer`` − ``base`` to ``total``, number by number. Other values stay ``total``'s."""
    if isinstance(total, int | float):
        return total + times * (longer - base)
    if isinstance(total, PlannedStage | StageSizes | Work):
        names = [f.name for f in fields(total) if f.name not in ("key", "functions")]
        return replace(
            total, **{x: _extrapolate(getattr(total, x), getattr(longer, x), getattr(base, x), times) for x in names}
        )
    if isinstance(total, Mapping):
        kinds = {**base, **total, **longer}
        return {k: _extrapolate(total.get(k, 0), longer.get(k, 0), base.get(k, 0), times) for k in kinds}
    return total


class Compiler:
    """Finds workspace by compiling: bytes on one of the rank's devices, as ``temp_of`` of :class:`StageCosts`.

    After ``budget_s`` seconds of compiling no compilation starts any more. When compiling ends, for this or another reason,
    ``notice`` gets it as one line, and workspace is estimated from then on. ``count``: functions compiled so far, in
    ``spent_s`` seconds.
    """

    def __init__(
        self, target: Target, notice: Callable[[str], None], budget_s: float = 60.0, shards: RankMesh = ONE_SHARD
    ) -> None:
        self.notice, self.budget_s, self.count, self.spent_s = notice, budget_s, 0, 0.0
        self.mesh: Mesh | None = None
        is_local = target.chip is None and target.name == "cpu" and not shards.divided
        self._options = {} if is_local else _OPTIONS
        devices: Sequence[jax.Device] | str = f"target {target.name} has no 'chip' numbers"
        if is_local:
            devices = jax.devices("cpu")[:1]
        elif target.chip is not None:
            devices = compile_only_devices(target.name, device_text(target), shards.num_devices)
        self.works = not isinstance(devices, str)
        if isinstance(devices, str):
            self._stop(devices)
        else:
            self.mesh = mesh_over(shards, devices)

    def _stop(self, reason: str) -> None:
        self.works = False
        self.notice(f"workspace is estimated from the jaxprs where it was not compiled: {reason}")

    def __call__(self, stage_costs: StageCosts, stage: StageKey, op: str) -> float | None:
        runs = _long_runs(stage)
        short = self._compiled(stage_costs, _shortened(stage, runs, [1] * len(runs)), op)
        if short is None or not runs:
            return short
        # unrolled layers mostly reuse each other's workspace, so a second layer may even lower XLA's figure: never subtract
        long = self._compiled(stage_costs, _shortened(stage, runs, [2] * len(runs)), op)
        return None if long is None else short + (max(map(len, runs)) - 1) * max(0.0, long - short)

    def _compiled(self, stage_costs: StageCosts, stage: StageKey, op: str) -> float | None:
        if not self.works:
            return None
        if self.spent_s > self.budget_s:
            self._stop(f"{self.budget_s:g} s were spent on compiling {self.count} functions; the rest is estimated")
            return None
        start, function = time.monotonic(), stage_costs.functions_of(stage).functions[op]
        if len(function.forwarded) == len(function.outputs):
            return 0.0  # every output is an input: there is nothing to run
        try:
            lowered = function.jitted.lower(*function.avals_in)
            temp = float(compiled_footprint(lowered.compile(compiler_options=self._options)).temp_bytes)
        except Exception as error:  # any compiler error: a prediction with an estimate is worth more than none
            self._stop(f"XLA says {str(error).splitlines()[0][:160]}")
            return None
        took = time.monotonic() - start
        self.count += 1
        self.spent_s += took
        stage_costs.progress(f"compiled {op} of {stage}: {temp / 1e6:,.1f} MB workspace, {took:.1f} s")
        return temp


def _long_runs(stage: StageKey, most: int = _TRACED_LAYERS + 1) -> list[list[int]]:
    """Return the positions of each run of more than ``most`` equal layers that each take one result."""
    runs = [list(run) for _, run in groupby(range(len(stage.layers)), key=lambda i: stage.layers[i].code)]
    long = [run for run in runs if len(run) > most]
    # whoever reads a dropped layer reads its one input instead; with a second input (a skip link) nothing stands in
    return long if all(len(stage.links.takes[i]) == 1 for run in long for i in run[1:]) else []


def _traced_lengths(stage: StageKey) -> tuple[list[list[int]], list[int]]:
    """Return the long runs of equal layers, and how many layers of each must be traced; no runs where costs are not linear
    in the number of layers."""
    # a fraction of the residuals is offloaded largest first, so a layer more changes which of the others are moved
    runs = _long_runs(stage) if stage.offload_fraction in (0, 1) else []
    return runs, [_TRACED_LAYERS] * len(runs)


def _shortened(stage: StageKey, runs: Sequence[Sequence[int]], lengths: Sequence[int]) -> StageKey:
    """Return the stage with only the first ``lengths[k]`` layers of the ``k``-th of ``runs``."""
    dropped = {i for run, n in zip(runs, lengths, strict=True) for i in run[n:]}
    layers = tuple(layer for i, layer in enumerate(stage.layers) if i not in dropped)
    return replace(stage, layers=layers, links=stage.links.without(dropped)) if dropped else stage


def stage_costs_of(
    config: TrainConfig, target: Target, efficiency: Efficiency, progress: Callable[[str], None], **options: Any
) -> StageCosts:
    """Return the stage costs of a config. Reads no data: the vocabulary is ``model.options.vocab_size`` or the tokenizer's.

    Raises:
        ConfigError, DataError: no such model, bad options, or no such tokenizer.
    """
    pipe, vocab_option = config.pipeline, config.model.options.get("vocab_size")
    vocab = vocab_option if isinstance(vocab_option, int) else load_tokenizer(config.data.tokenizer).vocab_size
    reading = config.data.reading
    config = with_mask(config, vocab, has_chats=reading.format == "chat" and reading.pack in ("auto", "whole"))
    model = spread_over(pipe, build_model(config, vocab))
    return StageCosts(
        model,
        jnp.dtype(config.run.dtype),
        target,
        efficiency,
        pipe.mesh.one_replica,
        optimizer_of(config, model),
        progress=progress,
        **options,
    )


def planner(config: TrainConfig, model: Model, layer_costs: dict[Any, Any] | None = None) -> Planner:
    """Return the planner that training cuts ``model`` with; it counts FLOPs where training would time layers, as nothing is
    run here. ``layer_costs``: a cache that planners may share."""
    pipe = config.pipeline
    counted = replace(pipe, cut="analytic") if pipe.cut == "measured" else pipe
    return stage_planner(counted, model, config.microbatch_size, flops_cache=layer_costs)
