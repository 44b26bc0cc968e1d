"""The five sections of a training config, and all of them together, unchecked. The annotations say what each value must
satisfy, :mod:`.rules` what several must together; what ``#:`` says above a setting ``jaxpipe train --help-config``
prints.

A setting is a value or a table of what belongs to one matter, which who does not care for the matter need not read. The name
of the table may be left out, or that of its section: ``run.keep_last`` and ``output.keep_last`` are
``run.output.keep_last``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, Literal

from jaxpipe.files import not_url
from jaxpipe.schedule.families import FAMILIES, VOCABULARY_FAMILIES
from jaxpipe.stage.split.policies import POLICIES
from jaxpipe.train.corpora.documents import SUFFIXES
from jaxpipe.train.settings.typed import Section, in_float32, not_empty, positive, within
from jaxpipe.wording import nearest

_SCHEDULE_FILES = (".sched", ".json", ".csv")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def names_function(text: str) -> bool:
    """Whether ``text`` is ``module:function``."""
    return _FUNCTION.fullmatch(text) is not None


def _is_target(text: str) -> str:
    return "" if names_function(text) else "expected module:function such as models.gpt:GPT"


def _is_suffix(text: str) -> str:
    return "" if text.startswith(".") else "expected suffixes that start with a dot, such as .txt"


def _is_schedule(text: str) -> str:
    names = (*FAMILIES, "traverse", "towers")
    if text in VOCABULARY_FAMILIES:
        return "which pipeline.vocabulary makes: set that to 'spread', and pipeline.schedule to '1f1b' or another"
    if text in names or text.endswith(_SCHEDULE_FILES) or names_function(text):
        return ""
    known = f"known: {', '.join(names)}, module:function, or a file ({' '.join(_SCHEDULE_FILES)})"
    return f"which is no schedule: {_advice(text, names, known)}"


def _is_policy(text: str) -> str:
    unknown = [part for part in text.split("+") if part.strip() not in POLICIES]
    known = f"known: {', '.join(POLICIES)}, or several joined by +"
    return f"and {unknown[0]!r} is no policy: {_advice(unknown[0], POLICIES, known)}" if unknown else ""


def _advice(word: str, known: Iterable[str], otherwise: str) -> str:
    near = nearest(word, known)
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
_Beta = Annotated[float, within(0, 1 - 2**-24)]  # what is nearer to 1 is 1 in float32


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is trained."""

    #: ``module:function`` that makes the model.
    target: Annotated[str, _is_target] = "models.gpt:GPT"
    #: Its keyword arguments.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One of several sources."""

    #: As ``data.path``.
    path: _Path
    #: Its share of the sequences, against the rest.
    weight: _Positive = 1.0


@dataclass(frozen=True, slots=True)
class ReadingConfig:
    """How files become documents, and documents sequences."""

    #: What files hold. ``auto``: text, each record of JSON or Parquet or each other file a document; refused where a file that
    #: is called text begins with a record. ``text``: the same, but JSON is a record under ``.jsonl`` and ``.ndjson`` alone, and
    #: under other names text, as is a table. ``chat``: records with messages of a ``role`` and a ``content``; answers count.
    format: Literal["auto", "text", "chat"] = "auto"
    #: What makes text of messages: a path, or ``auto``: the one beside the tokenizer.
    chat_template: _Path = "auto"
    #: The day that a template's ``strftime_now`` tells, as ``2026-01-01``; ``auto``: that of the template, or if it has none
    #: this one.
    chat_date: _Name = "auto"
    #: Where a record has its text or messages; ``auto``: ``text``, or ``messages``.
    field: _Name = "auto"
    #: What ends each document: a token, an id, ``none``, or ``auto``, the tokenizer's own, which the files beside it name
    #: (``byte``: 0 after a record, nothing after a file of text; chats end as their template says).
    eos: _Name = "auto"
    #: What begins each document: a token, an id, ``none``, or ``auto``: the token that the files of the tokenizer put there,
    #: if they do. Chats begin as their template says, and runs go on as they began.
    bos: _Name = "auto"
    #: What a token sees: what stands before it in its sequence, or what of that is of its own document; positions start again
    #: with each document then. ``auto``: ``document`` for whole chats if the model can, else ``causal``.
    mask: Literal["auto", "causal", "document"] = "auto"
    #: How documents become sequences: ``whole`` ones packed together, the rest of a sequence left empty (longer chats are cut
    #: at their end, text goes on in another piece), or ``concat``, end to end, cut wherever a sequence is full. ``auto``: chats
    #: are whole, text is not. ``windows``: ``concat`` as it was once, when what is without an answer was a sequence too.
    pack: Literal["auto", "whole", "concat", "windows"] = "auto"
    #: How ``holdout`` is chosen: as blocks spread over the corpus, or whole files (of records whole documents).
    split: Literal["blocks", "files"] = "blocks"
    #: Files read in a folder.
    suffixes: tuple[Annotated[str, _is_suffix], ...] = SUFFIXES
    #: Order of the sequences.
    seed: Annotated[int, within(0, 2**63 - 1)] = 0


@dataclass(frozen=True, slots=True)
class DataConfig(Section):
    """What it is trained on: ``path``, or several ``sources``, or batches that ``target`` makes."""

    #: A file of text, JSON lines or a list of records (plain, gzip or zstd) or Parquet, a folder of these, a token store
    #: (``jaxpipe data build``), a ``.npy``/``.npz`` array of ids, or ``stdlib`` (sources of the Python standard library); for
    #: models that read other arrays, a ``.npz`` of them by name, or ``module:function``, which makes them and is called with
    #: ``options``.
    path: _Path = "stdlib"
    #: ``byte``, a ``tokenizer.json``, or ``ids:N`` (a vocabulary of N, no text).
    tokenizer: _Path = "byte"
    #: Tokens a sequence.
    seq_len: _Count = 128
    #: Fraction kept for evaluation.
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
    """What the devices of a rank divide beside the layers' products, where it has several."""

    #: How attention is computed where cp devices share positions: by keys and values gathered from all, by exchanging times
    #: for heads, or by keys and values that go round a ring.
    cp_method: Literal["gather", "heads", "ring"] = "gather"
    #: Between the parallel products each of the tp devices holds a part of the time axis. Without tp it changes nothing.
    sequence_parallel: bool = False
    #: A branch's residual is added before the all-reduce that ends it. Without tp it changes nothing.
    fused_residual: bool = False
    #: Optimizer state and update are divided over dp. Without dp it changes nothing.
    zero1: bool = False


@dataclass(frozen=True, slots=True)
class PassesConfig:
    """What is made of a schedule before it runs, and how it runs."""

    #: Braided slots of a schedule run as one function each; false runs their actions one after another, with the same bits;
    #: ``adjacent`` braids two actions that stand side by side, too, where the cost model says that it pays.
    braid: bool | Literal["adjacent"] = True
    #: Split full backwards and put their W's into bubbles, within the memory limit (an unchanged peak without one).
    separate_gradients: bool = False
    #: Run B and then W in place of BW always (if the memory limit allows it), never, or on the stages where they were measured
    #: to take clearly less time (``auto``; checkpoints keep which, as the bits of the two differ).
    split_backwards: Literal["auto", "never", "always"] = "auto"
    #: Begin a step before it is known whether the last one's gradient was finite and short enough: always, or after ten steps
    #: that were so (``auto``). The same bits.
    post_validation: Literal["off", "on", "auto"] = "off"


@dataclass(frozen=True, slots=True)
class TraverseConfig:
    """Rules of ``pipeline.schedule = "traverse"``, as :class:`jaxpipe.schedule.Traversal` has them."""

    #: Which ranks run which stages, ``pipeline.chunks`` a rank.
    placement: Literal["one-to-one", "circular", "v", "wave", "bidirectional"] = "one-to-one"
    #: The type of action that goes first where both could.
    first: Literal["forward", "backward", "interleaved"] = "backward"
    #: Whose forward goes first: the earliest stage's (``breadth``) or the latest's (``depth``); ``breadth:4``: four in a row of
    #: a stage, then the next one.
    forward: str = "breadth"
    #: Order of backwards, likewise.
    backward: str = "breadth"
    #: Microbatches a rank may hold between F and BW, each stage counts: one number or one a rank.
    in_flight: int | tuple[int, ...] | None = None
    #: The same of a stage: one number or one a stage.
    in_flight_per_stage: int | tuple[int, ...] | None = None
    #: Forwards and backwards in turn, of ``first = "interleaved"``.
    units: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """For schedules with O and L (po-h, po-f, ada-offload, files)."""

    #: Of the residual bytes that may leave, what O moves to the host, largest leaves first.
    fraction: Annotated[float, within(0, 1)] = 1.0
    #: Gigabytes (10⁹ bytes) that the offloads of one process may hold, checked before the run; none: what the machine has
    #: available.
    host_memory_gb: _Positive | None = None
    #: Offload to ordinary host arrays, slowly, where the devices have no pinned host memory.
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class PipelineConfig(Section):
    """Which devices run what, in which order."""

    #: Pipeline ranks p; each is ``dp * cp * tp`` devices.
    ranks: Annotated[int, within(1, 4096)] = 4
    #: Devices that share a rank's layers.
    tp: Annotated[int, within(1, 65536)] = 1
    #: Devices that share each sequence's positions.
    cp: Annotated[int, within(1, 65536)] = 1
    #: Devices that share each microbatch's sequences.
    dp: Annotated[int, within(1, 65536)] = 1
    #: Microbatches m a step.
    microbatches: _Count = 8
    #: Stages v a rank; by default what the family has.
    chunks: Annotated[int, within(1, 1024)] = 1
    #: The name of a family, a schedule file (``.sched`` ``.json`` ``.csv``), whose ranks, microbatches and chunks are the run's
    #: where nothing is said of them, ``traverse`` (by the table of that name), ``towers``, or ``module:function``, which makes
    #: a schedule.
    schedule: Annotated[str, _is_schedule] = "1f1b"
    #: Where embedding and head are: on the first and last stage, or divided by words over all ranks (of chains of layers that
    #: say how, as GPT and Llama do), which balances time and memory. ``spread``: one microbatch more in flight; ``spread-2``:
    #: two, and less computed and sent; ``joint`` (of ``1f1b``): all ranks compute a microbatch's loss side by side.
    vocabulary: Literal["ends", "spread", "spread-2", "joint"] = "ends"
    #: Live activations a rank may hold, in units of its share of one microbatch (1F1B needs p); none: no limit.
    memory_limit: _Positive | None = None
    #: What runs again in the backward pass: a policy, such as ``cheap`` or ``cheap+attention``, or a list with one a stage.
    recompute: _Policy | tuple[_Policy, ...] = "none"
    #: How layers become stages: by ``analytic`` or ``measured`` costs, or the layers (indices or names) at which the second and
    #: later stages start.
    cut: Literal["analytic", "measured"] | Annotated[tuple[int | str, ...], _rises] = "analytic"
    #: Of ``schedule = "towers"``: the branches of the model by name, in the order of their layers, each with ``ranks``,
    #: ``chunks``, ``placement`` and ``rules`` of its own; ``join``: the one on whose last rank the loss runs (the last).
    towers: Mapping[str, Any] = field(default_factory=dict)
    traverse: TraverseConfig = field(default_factory=TraverseConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    @property
    def num_devices(self) -> int:
        """``ranks · dp · cp · tp``."""
        return self.ranks * self.rank_devices

    @property
    def rank_devices(self) -> int:
        """``dp · cp · tp``."""
        return self.dp * self.cp * self.tp


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """How the learning rate falls, and numbers of single optimizers."""

    #: How the rate falls after ``warmup_steps``: along a cosine or a line, not at all, or along a line over the last
    #: ``decay_fraction`` of the steps (``wsd``).
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    #: What is left of the rate at the last step.
    min_lr_ratio: Annotated[float, within(0, 1)] = 0.1
    #: Of ``schedule = "wsd"``: the part of the steps in which the rate falls.
    decay_fraction: Annotated[float, positive, within(0, 1)] = 0.2
    #: Of AdamW and Lion.
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    #: Of AdamW.
    eps: Annotated[float, positive, in_float32] = 1e-8
    #: Of Muon.
    momentum: _Beta = 0.95


@dataclass(frozen=True, slots=True)
class OptimizerConfig(Section):
    """How parameters follow gradients."""

    #: AdamW; Lion, which wants an ``lr`` 3 to 10 times smaller and a ``weight_decay`` as much larger; Muon for matrices, with
    #: ``momentum``, and AdamW for the rest.
    name: Literal["adamw", "lion", "muon"] = "adamw"
    #: The highest learning rate.
    lr: Annotated[float, positive, in_float32] = 1e-3
    #: Steps until it is reached, at most all.
    warmup_steps: _Whole = 20
    #: Decoupled weight decay: a step takes ``lr * weight_decay`` times a parameter off it, of matrices and embeddings; biases
    #: and scales of norms, told by their names, are left.
    weight_decay: Annotated[float, within(0, inf), in_float32] = 0.1
    #: Largest global gradient norm, over all ranks (0: no clipping).
    clip_norm: Annotated[float, within(0, inf), in_float32] = 1.0
    options: OptimizerOptions = field(default_factory=OptimizerOptions)


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """What a run says of itself, and what of it stays."""

    #: Steps between lines on the screen.
    log_every: _Count = 10
    #: What is told the numbers of each step: ``jsonl`` (always), ``tensorboard``, ``wandb``, ``trackio``, or one that a package
    #: adds.
    trackers: tuple[_Name, ...] = ("jsonl",)
    #: The first and the last step of which JAX's profiler writes a trace, beside our timeline of the last, into ``profile/`` in
    #: ``out_dir``.
    profile_steps: tuple[_Count, _Count] | None = None
    #: Batches of an evaluation.
    eval_batches: _Count = 8
    #: Checkpoints kept by age.
    keep_last: _Count = 2
    #: Checkpoints kept by evaluation loss.
    keep_best: _Whole = 1


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """What a run finds on the machine."""

    #: What to run on.
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    #: How many devices to emulate on a CPU (0: as many as the pipeline has).
    devices: _Whole = 0
    #: Of messages between processes: ``tagged`` (TCP and host memory), or between GPUs ``nccl``, which nobody has run on GPUs
    #: yet.
    transport: Literal["tagged", "nccl"] = "tagged"
    #: Where compiled programs are kept for the next start: ``auto``, a folder that is yours alone, or ``off``.
    compile_cache: _Path = "auto"
    #: A step that takes longer than this, and than 20 times the median, ends the run as hung (0: none does).
    watchdog_s: Annotated[float, within(0, inf)] = 60.0


@dataclass(frozen=True, slots=True)
class ReplanConfig:
    """Looking for a better schedule while training; off unless ``enabled``."""

    #: Whether to look.
    enabled: bool = False
    #: Predicted fraction of the makespan that a schedule must save to be adopted.
    min_gain: Annotated[float, within(0, 1)] = 0.01
    #: Seconds of the solver, in a process of its own.
    time_limit_s: Annotated[float, positive, within(0, 86400)] = 60.0
    #: Its worker processes.
    workers: Annotated[int, within(1, 1024)] = 1
    #: Change of one function's measured seconds, as a fraction of a stage's, at which the solver is asked again.
    drift: _Positive = 0.1
    #: As ``pipeline.memory_limit``; none: that one, or else what the schedule that the run starts with needs.
    memory_limit: _Positive | None = None
    #: Run B and W apart from the first step on, so that schedules may move W; false keeps fused backwards fused, and the bits
    #: of a run without re-planning.
    split: bool = True


@dataclass(frozen=True, slots=True)
class RunConfig(Section):
    """How long, where to, and what to do when something goes wrong."""

    #: Steps in all.
    steps: _Count = 200
    #: Sequences a step, over all microbatches.
    batch: _Count = 32
    #: Initial parameters and dropout.
    seed: _Whole = 0
    #: Of the compute; master parameters are float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    #: Steps between evaluations (0: none).
    eval_every: _Whole = 50
    #: Where checkpoints, metrics and pictures go.
    out_dir: _Path = "runs/default"
    #: A run, a checkpoint, or a folder of the Hugging Face hub (``PATH``, or ``PATH:STEP``) whose parameters a new run begins
    #: with; its model and tokenizer are the run's where the config says nothing of them.
    init_from: _Path | None = None
    #: Begin with the parameters of ``init_from`` although its model computes something else than when they were saved.
    init_other_model: bool = False
    #: Steps between checkpoints (0: only the last).
    checkpoint_every: _Whole = 50
    #: Continue from ``out_dir`` if it holds a checkpoint (``auto``), never, or fail without one.
    resume: Literal["auto", "never", "must"] = "auto"
    #: A step whose gradient holds NaN or infinity leaves parameters as they are; so many in a row end the run (1: the first
    #: does; 0: none).
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
