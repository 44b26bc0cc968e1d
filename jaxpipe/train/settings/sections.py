"""Define the five sections of a training config, and all of them together, unchecked.

The annotations say what each value must satisfy, :mod:`jaxpipe.train.config` what several must together; what ``#:`` says
above a setting ``jaxpipe train --help-config`` prints.

A setting is a value or a table of what belongs to one matter, which who does not care for the matter need not read. The name of
the table may be left out, or that of its section: ``run.keep_last`` and ``output.keep_last`` are ``run.output.keep_last``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, Literal

from jaxpipe.axes import AXES, WITHIN, RankMesh
from jaxpipe.files import not_url
from jaxpipe.schedule.families import FAMILIES, VOCABULARY_FAMILIES
from jaxpipe.stage.split.policies import POLICIES
from jaxpipe.text import nearest
from jaxpipe.train.corpora.documents import SUFFIXES
from jaxpipe.train.settings.typed import Section, in_float32, not_empty, positive, within

_SCHEDULE_FILES = (".sched", ".json", ".csv")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


DEVICE_KEYS = ("pipeline.ranks", *(f"pipeline.{axis}" for axis in AXES if axis not in WITHIN))
"""The settings whose product is the number of devices."""
AXIS_FLAGS = ", ".join(f"--{axis}" for axis in AXES)


def names_function(text: str) -> bool:
    """Whether ``text`` is ``module:function``."""
    return _FUNCTION.fullmatch(text) is not None


def _is_target(text: str) -> str:
    return "" if names_function(text) else "expected module:function such as models.gpt:GPT"


def _is_suffix(text: str) -> str:
    return "" if text.startswith(".") else "expected suffixes that start with a dot, such as .txt"


def _is_schedule(text: str) -> str:
    # Listed at each call: plug-ins register families after this module is imported.
    names = (*FAMILIES, "traverse", "towers")
    if text in VOCABULARY_FAMILIES:
        return "which pipeline.vocabulary makes: set that to 'spread', and pipeline.schedule to '1f1b' or another"
    if text in names or text.endswith(_SCHEDULE_FILES) or names_function(text):
        return ""
    otherwise = f"known: {', '.join(names)}, module:function, or a file ({' '.join(_SCHEDULE_FILES)})"
    return f"which is no schedule: {_advice(text, names, otherwise)}"


def _is_policy(text: str) -> str:
    unknown = [part for part in text.split("+") if part.strip() not in POLICIES]
    otherwise = f"known: {', '.join(POLICIES)}, or several joined by +"
    return f"and {unknown[0]!r} is no policy: {_advice(unknown[0], POLICIES, otherwise)}" if unknown else ""


def _advice(word: str, names: Iterable[str], otherwise: str) -> str:
    near = nearest(word, names)
    return f"did you mean {near!r}?" if near else otherwise


def _rises(cut: tuple[int | str, ...]) -> str:
    layers = [0, *(layer for layer in cut if isinstance(layer, int))]
    rises = all(a < b for a, b in itertools.pairwise(layers))
    return "" if rises else "stages start at increasing layers above 0, such as [2, 4, 6]"


_Count = Annotated[int, within(1)]
_Whole = Annotated[int, within(0)]  # from zero
_Name = Annotated[str, not_empty]
_Path = Annotated[str, not_empty, not_url]
_Policy = Annotated[str, _is_policy]
_Positive = Annotated[float, positive]
# A float32 nearer to 1 is 1, and a moment that decays by 1 never forgets.
_Beta = Annotated[float, within(0, 1 - 2**-24)]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model."""

    #: ``module:function`` that makes the model.
    target: Annotated[str, _is_target] = "models.gpt:GPT"
    #: Keyword arguments of that function.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One of several data sources."""

    #: A source, in the forms of ``data.path``.
    path: _Path
    #: Weight of the source: its share of the sequences relative to the other sources.
    weight: _Positive = 1.0


@dataclass(frozen=True, slots=True)
class ReadingConfig:
    """Reading of files as documents, and packing of documents into sequences."""

    #: Content of the files. ``auto``: each record of JSON or Parquet, or else each file, is a document of text; a file with
    #: the suffix of text that begins with a record is refused. ``text``: the same, but JSON is read as records only under
    #: ``.jsonl`` and ``.ndjson``, and as text under other names, as tables are. ``chat``: records with messages of a ``role``
    #: and a ``content``; the loss counts answers only.
    format: Literal["auto", "text", "chat"] = "auto"
    #: Chat template that renders messages as text: a path, or ``auto``: the one beside the tokenizer.
    chat_template: _Path = "auto"
    #: Date that a template's ``strftime_now`` returns, such as ``2026-01-01``. ``auto``: the template's own date, or
    #: ``2026-01-01`` if it has none.
    chat_date: _Name = "auto"
    #: Key of a record's text or messages; ``auto``: ``text``, or ``messages``.
    field: _Name = "auto"
    #: Token at the end of each document: a token, an id, ``none``, or ``auto``, the tokenizer's own, which the files beside it
    #: name (``byte``: 0 after a record, nothing after a file of text; chats end as their template says).
    eos: _Name = "auto"
    #: Token at the beginning of each document: a token, an id, ``none``, or ``auto``: the token that the files of the
    #: tokenizer put there, if they do. Chats begin as their template says, and runs go on as they began.
    bos: _Name = "auto"
    #: Attention mask: a token attends to earlier tokens of its sequence (``causal``), or only to those of its own document,
    #: where positions start again (``document``). ``auto``: ``document`` for whole chats if the model supports it, else
    #: ``causal``.
    mask: Literal["auto", "causal", "document"] = "auto"
    #: Packing of documents into sequences: ``whole`` documents together, the rest of a sequence left empty (longer chats are
    #: cut at their end, longer text continues in another piece), or ``concat``: end to end, cut wherever a sequence is full.
    #: ``auto``: ``whole`` for chats, ``concat`` for text. ``windows``: ``concat`` as in earlier versions, which also used
    #: sequences without an answer.
    pack: Literal["auto", "whole", "concat", "windows"] = "auto"
    #: Selection of ``holdout``: blocks spread over the corpus, or whole files (of records whole documents).
    split: Literal["blocks", "files"] = "blocks"
    #: Suffixes of the files that are read in a folder.
    suffixes: tuple[Annotated[str, _is_suffix], ...] = SUFFIXES
    #: Seed of the order of sequences.
    seed: Annotated[int, within(0, 2**63 - 1)] = 0


@dataclass(frozen=True, slots=True)
class DataConfig(Section):
    """Training data: ``path``, or several ``sources``, or batches that ``target`` makes."""

    #: A file of text, JSON lines or a list of records (plain, gzip or zstd) or Parquet, a folder of these, a token store
    #: (``jaxpipe data build``), a ``.npy``/``.npz`` array of ids, or ``stdlib`` (sources of the Python standard library); for
    #: models that read other arrays, a ``.npz`` of them by name, or ``module:function``, which makes them and is called with
    #: ``options``.
    path: _Path = "stdlib"
    #: ``byte``, a ``tokenizer.json``, or ``ids:N`` (a vocabulary of N, no text).
    tokenizer: _Path = "byte"
    #: Tokens per sequence.
    seq_len: _Count = 128
    #: Fraction of the data held out for evaluation.
    holdout: Annotated[float, within(0, 0.5)] = 0.05
    #: Keyword arguments of the function that ``path`` or ``target`` names.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: In place of ``path``: tables by name of a ``path`` and a ``weight`` each, which are mixed.
    sources: Mapping[str, SourceConfig] = field(default_factory=dict)
    #: In place of ``path``: ``module:function``, which is called with ``options`` and makes batches.
    target: Annotated[str, _is_target] | None = None
    reading: ReadingConfig = field(default_factory=ReadingConfig)


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    """Sharding of tensors over the devices of a rank."""

    #: Attention across the cp devices that share a sequence: all-gather keys and values (``gather``), exchange positions for
    #: heads by all-to-all (``heads``, as DeepSpeed Ulysses), or pass keys and values around a ring (``ring``).
    cp_method: Literal["gather", "heads", "ring"] = "gather"
    #: Megatron's sequence parallelism: between tensor-parallel layers each of the tp devices holds a part of the time axis. No
    #: effect without tp.
    sequence_parallel: bool = False
    #: Add a branch's residual before the all-reduce at the branch's end. No effect without tp.
    fused_residual: bool = False
    #: ZeRO-1: divide optimizer state and update over dp. No effect without dp.
    zero1: bool = False
    #: Sum of gradients over the devices of a rank: in their order, for the same bits on any number of processes (``ordered``),
    #: or as XLA's collectives add, whose bits depend on that (``fast``).
    reduction: Literal["ordered", "fast"] = "ordered"


@dataclass(frozen=True, slots=True)
class PassesConfig:
    """Passes applied to a schedule before it runs."""

    #: Run each braided slot of a schedule as one function, which overlaps its actions; false runs them one after another, with
    #: the same bits; ``adjacent`` also braids neighbouring actions where the cost model predicts a gain.
    braid: bool | Literal["adjacent"] = True
    #: Split fused backwards (BW) and move their W into bubbles, within the memory limit (without a limit: at an unchanged
    #: peak).
    separate_gradients: bool = False
    #: Run B and then W in place of BW: ``always`` (if the memory limit allows it), ``never``, or on stages where that was
    #: measured to be clearly faster (``auto``; checkpoints record these stages, as rounding differs).
    split_backwards: Literal["auto", "never", "always"] = "auto"
    #: Begin a step before the last one's gradient norm is known to be finite and below ``clip_norm``: always (``on``), or
    #: after ten steps whose norms were (``auto``). The bits stay the same.
    post_validation: Literal["off", "on", "auto"] = "off"


@dataclass(frozen=True, slots=True)
class TraverseConfig:
    """Rules of ``pipeline.schedule = "traverse"``, as :class:`jaxpipe.schedule.Traversal` has them."""

    #: Placement of stages on ranks, ``pipeline.chunks`` stages per rank.
    placement: Literal["one-to-one", "circular", "v", "wave", "bidirectional"] = "one-to-one"
    #: Type of action that runs first when both are ready.
    first: Literal["forward", "backward", "interleaved"] = "backward"
    #: Order of ready forwards: the earliest stage first (``breadth``) or the latest (``depth``); ``breadth:4``: four in a row
    #: of a stage, then the next stage.
    forward: str = "breadth"
    #: Order of ready backwards, in the same forms.
    backward: str = "breadth"
    #: Limit on the microbatches that a rank holds between F and BW, counted for each stage: one number, or one per rank.
    in_flight: int | tuple[int, ...] | None = None
    #: Limit on the microbatches that a stage holds between F and BW: one number, or one per stage.
    in_flight_per_stage: int | tuple[int, ...] | None = None
    #: Numbers of forwards and backwards that alternate under ``first = "interleaved"``.
    units: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Offloading, for schedules with O and L (po-h, po-f, ada-offload, files)."""

    #: Fraction of the offloadable residual bytes that O moves to the host, largest arrays first.
    fraction: Annotated[float, within(0, 1)] = 1.0
    #: Host memory in gigabytes (10⁹ bytes) that the offloads of one process may use, checked before the run; none: the memory
    #: that is available.
    host_memory_gb: _Positive | None = None
    #: Offload to ordinary host arrays, which is slow, if the devices have no pinned host memory.
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class PipelineConfig(Section):
    """Devices, schedule and division of the model into stages."""

    #: Pipeline ranks p; each has ``dp * cp * tp`` devices.
    ranks: Annotated[int, within(1, 4096)] = 4
    #: Tensor parallelism: devices that share a rank's layers.
    tp: Annotated[int, within(1, 65536)] = 1
    #: Context parallelism: devices that share each sequence's positions.
    cp: Annotated[int, within(1, 65536)] = 1
    #: Data parallelism: devices that share each microbatch's sequences.
    dp: Annotated[int, within(1, 65536)] = 1
    #: Expert parallelism: devices of those of ``dp`` among which the experts of a layer are divided.
    ep: Annotated[int, within(1, 65536)] = 1
    #: Microbatches m per step.
    microbatches: _Count = 8
    #: Stages v per rank; by default the family's number.
    chunks: Annotated[int, within(1, 1024)] = 1
    #: The name of a family, a schedule file (``.sched`` ``.json`` ``.csv``; its ranks, microbatches and chunks are used unless
    #: they are set), ``traverse`` (by the table of that name), ``towers``, or ``module:function``, which returns a schedule.
    schedule: Annotated[str, _is_schedule] = "1f1b"
    #: Placement of embedding and head: on the first and last stage (``ends``), or divided by words over all ranks (vocabulary
    #: parallelism; for chains of layers that support it, such as GPT and Llama), which balances time and memory. ``spread``:
    #: one microbatch more in flight; ``spread-2``: two more, with less compute and traffic; ``joint`` (with ``1f1b``): all
    #: ranks compute a microbatch's loss at the same time.
    vocabulary: Literal["ends", "spread", "spread-2", "joint"] = "ends"
    #: Limit on live activations per rank, in units of its share of one microbatch (1F1B needs p); none: no limit.
    memory_limit: _Positive | None = None
    #: Operations that are recomputed in the backward pass: a policy, such as ``cheap`` or ``cheap+attention``, or a list with
    #: one per stage.
    recompute: _Policy | tuple[_Policy, ...] = "none"
    #: Division of layers into stages: balanced by ``analytic`` or ``measured`` costs, or a list of the layers (indices or
    #: names) at which the second and later stages start.
    cut: Literal["analytic", "measured"] | Annotated[tuple[int | str, ...], _rises] = "analytic"
    #: For ``schedule = "towers"``: the branches of the model by name, in the order of their layers, each with ``ranks``,
    #: ``chunks``, ``placement`` and ``rules`` of its own; ``join``: the one on whose last rank the loss runs (the last).
    towers: Mapping[str, Any] = field(default_factory=dict)
    traverse: TraverseConfig = field(default_factory=TraverseConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    @property
    def num_devices(self) -> int:
        """The devices of all ranks."""
        return math.prod(getattr(self, key.removeprefix("pipeline.")) for key in DEVICE_KEYS)

    @property
    def mesh(self) -> RankMesh:
        """The devices of each rank by axis, and how layers divide their work over them."""
        sizes: dict[str, Any] = {axis: getattr(self, axis) for axis in AXES}
        how = self.sharding
        return RankMesh(
            **sizes, sequence=how.sequence_parallel, fused_residual=how.fused_residual, cp_method=how.cp_method
        )


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Learning rate schedule, and options of single optimizers."""

    #: Decay of the learning rate after ``warmup_steps``: cosine, linear, none (``constant``), or linear over the last
    #: ``decay_fraction`` of the steps (``wsd``: warmup, stable, decay).
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    #: Final learning rate as a fraction of ``lr``.
    min_lr_ratio: Annotated[float, within(0, 1)] = 0.1
    #: For ``schedule = "wsd"``: fraction of the steps in which the learning rate decays.
    decay_fraction: Annotated[float, positive, within(0, 1)] = 0.2
    #: AdamW and Lion: decay rates of the moment estimates.
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    #: AdamW: added to the denominator.
    eps: Annotated[float, positive, in_float32] = 1e-8
    #: Muon: momentum of the gradients.
    momentum: _Beta = 0.95


@dataclass(frozen=True, slots=True)
class OptimizerConfig(Section):
    """The optimizer."""

    #: AdamW; Lion, which needs an ``lr`` 3 to 10 times smaller and a ``weight_decay`` larger by the same factor; or Muon for
    #: matrices, with ``momentum``, and AdamW for the rest.
    name: Literal["adamw", "lion", "muon"] = "adamw"
    #: Peak learning rate.
    lr: Annotated[float, positive, in_float32] = 1e-3
    #: Linear warm-up steps until ``lr`` is reached (capped at ``run.steps``).
    warmup_steps: _Whole = 20
    #: Decoupled weight decay of matrices and embeddings: each step subtracts ``lr * weight_decay * parameter``. Biases and
    #: scales of norms, recognised by their names, are not decayed.
    weight_decay: Annotated[float, within(0, inf), in_float32] = 0.1
    #: Gradient clipping: the largest global norm, over all ranks (0: no clipping).
    clip_norm: Annotated[float, within(0, inf), in_float32] = 1.0
    options: OptimizerOptions = field(default_factory=OptimizerOptions)


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Logging, evaluation and retention of checkpoints."""

    #: Steps between recorded steps, which print a progress line.
    log_every: _Count = 10
    #: Experiment trackers that log every step's metrics: ``jsonl`` (always), ``tensorboard``, ``wandb``, ``trackio``,
    #: or one that a package adds.
    trackers: tuple[_Name, ...] = ("jsonl",)
    #: First and last step that JAX's profiler traces into ``profile/`` in ``out_dir``, with jaxpipe's timeline of the last
    #: one.
    profile_steps: tuple[_Count, _Count] | None = None
    #: Batches per evaluation.
    eval_batches: _Count = 8
    #: Number of newest checkpoints to keep.
    keep_last: _Count = 2
    #: Number of checkpoints with the lowest evaluation loss to keep.
    keep_best: _Whole = 1


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """Hardware and caches."""

    #: Devices to run on.
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    #: Devices to emulate on a CPU (0: as many as the pipeline needs).
    devices: _Whole = 0
    #: Processes that share a rank, each with an equal part of its devices, of dp first (0: one, or where there are more
    #: processes than ranks, as many as there are for each rank).
    columns: _Whole = 0
    #: Fraction of a GPU's memory that JAX gives itself; none: what ``XLA_CLIENT_MEM_FRACTION`` says, or else JAX's own 0.75.
    memory_fraction: Annotated[float, positive, within(0, 1)] | None = None
    #: On GPUs: only operations that add in one order (``--xla_gpu_deterministic_ops=true``, slower), and each start chooses
    #: kernels as ``autotuning.txt`` in ``out_dir`` says, which process 0 writes; others begin with a copy of it and keep what
    #: else they chose. Without it a start may give other bits.
    deterministic: bool = False
    #: Transport of messages between processes: ``tagged`` (TCP and host memory), or ``nccl`` between GPUs, which has not been
    #: run on GPUs yet.
    transport: Literal["tagged", "nccl"] = "tagged"
    #: Cache of compiled programs for the next start: ``auto``, a folder that only you can write, or ``off``.
    compile_cache: _Path = "auto"
    #: Seconds after which a step that also takes over 20 times the median ends the run as hung (0: never).
    watchdog_s: Annotated[float, within(0, inf)] = 60.0


@dataclass(frozen=True, slots=True)
class ReplanConfig:
    """Search for a better schedule while training; off unless ``enabled``."""

    #: Search for better schedules while training.
    enabled: bool = False
    #: Predicted fraction of the makespan that a schedule must save to be adopted.
    min_gain: Annotated[float, within(0, 1)] = 0.01
    #: Time limit of the solver, which runs in a separate process, in seconds.
    time_limit_s: Annotated[float, positive, within(0, 86400)] = 60.0
    #: Worker processes of the solver.
    workers: Annotated[int, within(1, 1024)] = 1
    #: Change of one function's measured seconds, as a fraction of its stage's, that starts the solver again.
    drift: _Positive = 0.1
    #: Memory limit of new schedules, in units of ``pipeline.memory_limit``; none: that limit, or the peak of the initial
    #: schedule if there is none.
    memory_limit: _Positive | None = None
    #: Run B and W separately from the first step on, so that new schedules may move W; false keeps fused backwards, and the
    #: bits of a run without re-planning.
    split: bool = True


@dataclass(frozen=True, slots=True)
class RunConfig(Section):
    """Length, output, checkpoints and failure handling of a run."""

    #: Total number of training steps.
    steps: _Count = 200
    #: Sequences per step, over all microbatches.
    batch: _Count = 32
    #: Seed of initial parameters and dropout.
    seed: _Whole = 0
    #: Dtype of compute; master parameters are float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    #: Steps between evaluations (0: none).
    eval_every: _Whole = 50
    #: Folder of checkpoints, metrics and pictures.
    out_dir: _Path = "runs/default"
    #: Initial parameters of a new run: a run, a checkpoint, or a folder of the Hugging Face hub (``PATH``, or ``PATH:STEP``).
    #: Its model and tokenizer are used unless the config sets them.
    init_from: _Path | None = None
    #: Accept parameters of ``init_from`` although the model's computation has changed since they were saved.
    init_other_model: bool = False
    #: Steps between checkpoints (0: only the last).
    checkpoint_every: _Whole = 50
    #: Resume from the checkpoint in ``out_dir`` if there is one (``auto``), never, or fail if there is none (``must``).
    resume: Literal["auto", "never", "must"] = "auto"
    #: Consecutive steps with non-finite gradients that end the run (1: the first; 0: never). Such a step changes nothing.
    max_skipped: _Whole = 5
    output: OutputConfig = field(default_factory=OutputConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    replan: ReplanConfig = field(default_factory=ReplanConfig)


@dataclass(frozen=True, slots=True)
class Sections(Section):
    """The settings of a run, as they were given."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
