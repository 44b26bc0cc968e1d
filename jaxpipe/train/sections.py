"""The eight sections of a training config, and all of them together, unchecked. The annotations say what each value must
satisfy, :mod:`.rules` what several must together."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, Literal

from jaxpipe.schedule.families import FAMILIES
from jaxpipe.stage.split.policies import POLICIES
from jaxpipe.train.documents import SUFFIXES
from jaxpipe.train.settings import in_float32, not_empty, positive, within
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
_Policy = Annotated[str, _is_policy]
_Positive = Annotated[float, positive]
_Beta = Annotated[float, within(0, 1 - 2**-24)]  # what is nearer to 1 is 1 in float32


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``target``: ``module:function`` that makes the model. ``options``: its keyword arguments."""

    target: Annotated[str, _is_target] = "models.gpt:GPT"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One of several sources. ``path``: as ``data.path``. ``weight``: its share of the sequences, against the rest."""

    path: _Name
    weight: _Positive = 1.0


@dataclass(frozen=True, slots=True)
class DataConfig:
    """``path``: a file of text, JSONL (``.jsonl``, ``.jsonl.gz``, ``.jsonl.zst``) or Parquet, a folder of these, a token store
    (``jaxpipe data build``), a ``.npy``/``.npz`` array of ids, or ``stdlib`` (sources of the Python standard library); for
    models that read other arrays, a ``.npz`` of them by name, or ``module:function``, which makes them and is called with
    ``options`` (:mod:`jaxpipe.train.arrays`). ``tokenizer``: ``byte``, a ``tokenizer.json``, or ``ids:N`` (a vocabulary of N,
    no text). ``format``: what records of JSONL and Parquet hold: ``text``, or ``chat``, messages with a ``role`` and a
    ``content``, which ``chat_template`` (a path; ``auto``: the one beside the tokenizer) makes text of, and of which only
    answers count (:mod:`jaxpipe.train.chat`). ``field``: where a record has it; ``auto``: ``text``, or ``messages``. ``eos``:
    what ends each document: a token, an id, ``none``, or ``auto``, the tokenizer's own (``byte``: 0 after a record, nothing
    after a file of text; chats end as their template says). ``mask``: ``causal``: a token sees what stands before it in its
    sequence; ``document``: what of that is of its own document, and positions start again with each. ``seq_len``: tokens a
    sequence. ``holdout``: fraction kept for evaluation. ``split``: how it is chosen, as ``blocks`` spread over the corpus or
    whole ``files``, of records whole documents. ``suffixes``: files read in a directory. ``seed``: order of the sequences.

    In place of ``path``: ``sources``, tables by name of a ``path`` and a ``weight`` each, which are mixed
    (:mod:`jaxpipe.train.mixture`); or ``target``, ``module:function``, which is called with ``options`` and makes batches
    (:mod:`jaxpipe.train.own_data`).
    """

    path: _Name = "stdlib"
    tokenizer: _Name = "byte"
    format: Literal["text", "chat"] = "text"
    chat_template: _Name = "auto"
    field: _Name = "auto"
    eos: _Name = "auto"
    mask: Literal["causal", "document"] = "causal"
    seq_len: _Count = 128
    holdout: Annotated[float, within(0, 0.5)] = 0.05
    split: Literal["blocks", "files"] = "blocks"
    suffixes: tuple[Annotated[str, _is_suffix], ...] = SUFFIXES
    seed: Annotated[int, within(0, 2**63 - 1)] = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, SourceConfig] = dataclasses.field(default_factory=dict)
    target: Annotated[str, _is_target] | None = None


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """``ranks`` p, ``microbatches`` m, ``chunks`` v. ``tp``, ``dp``: devices of each rank that share its layers, and that share
    each microbatch's sequences. ``schedule``: the name of a family, a schedule file (``.sched`` ``.json`` ``.csv``),
    ``traverse`` (by the section of that name), ``towers``, or ``module:function``, which makes a schedule. ``towers``: the
    branches of the model by name, in the order of their layers, each with ``ranks``, ``chunks``, ``placement`` and ``rules``
    of its own; ``join``: the one on whose last rank the loss runs, by default the last.
    ``memory_limit``: live activations a rank may hold, in units of its share of one microbatch (1F1B needs p), or none.
    ``recompute``: what runs again in the backward pass (:mod:`jaxpipe.stage.split.policies`): one policy, such as ``cheap`` or
    ``cheap+attention``, or a list with one a stage. ``cut``: how layers become stages: ``analytic`` or ``measured`` costs, or
    the layers (indices or names) at which the second and later stages start.

    ``sequence_parallel``: between the parallel products each of the tp devices holds a part of the time axis.
    ``fused_residual``: a branch's residual is added before the all-reduce that ends it. ``zero1``: optimizer state and update
    are divided over dp. With one device there is nothing to divide, and these three change nothing. ``braid``: braided slots
    of a schedule run as one function each; false runs their actions one after another, with the same bits. ``braid_adjacent``:
    braid two actions that stand side by side, too, where the cost model says that it pays. ``separate_gradients``: split full
    backwards and put their W's into bubbles, within the memory limit (an unchanged peak without one). ``split_backwards``:
    run B and then W in place of BW ``always`` (if the memory limit allows it), ``never``, or on the stages where they were
    measured to take clearly less time (``auto``; checkpoints keep which, as the bits of the two differ).
    """

    ranks: Annotated[int, within(1, 4096)] = 4
    tp: Annotated[int, within(1, 65536)] = 1
    dp: Annotated[int, within(1, 65536)] = 1
    microbatches: _Count = 8
    chunks: Annotated[int, within(1, 1024)] = 1
    schedule: Annotated[str, _is_schedule] = "1f1b"
    memory_limit: _Positive | None = None
    recompute: _Policy | tuple[_Policy, ...] = "none"
    cut: Literal["analytic", "measured"] | Annotated[tuple[int | str, ...], _rises] = "analytic"
    sequence_parallel: bool = False
    fused_residual: bool = False
    zero1: bool = False
    braid: bool = True
    braid_adjacent: bool = False
    separate_gradients: bool = False
    split_backwards: Literal["auto", "never", "always"] = "auto"
    towers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """``ranks · dp · tp``."""
        return self.ranks * self.dp * self.tp


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """For schedules with O and L (po-h, po-f, ada-offload, files). ``fraction``: of the residual bytes that may leave, what O
    moves to the host, largest leaves first. ``host_memory_gb``: gigabytes (10⁹ bytes) that the offloads of one process may
    hold, checked before the run; by default what the machine has available. ``fallback``: offload to ordinary host arrays,
    slowly, where the devices have no pinned host memory.
    """

    fraction: Annotated[float, within(0, 1)] = 1.0
    host_memory_gb: _Positive | None = None
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """``lr`` is reached after ``warmup_steps`` (at most all steps) and then falls to ``min_lr_ratio`` of it at the last step:
    along a ``cosine`` or a line (``linear``), not at all (``constant``), or along a line over the last ``decay_fraction`` of
    the steps (``wsd``).

    ``name``: ``adamw``; ``lion``, which wants an ``lr`` 3 to 10 times smaller and a ``weight_decay`` as much larger; ``muon``
    (:mod:`jaxpipe.train.muon`) for matrices, with ``momentum``, and AdamW for the rest. ``betas``: of AdamW and Lion; ``eps``:
    of AdamW. ``clip_norm``: largest global gradient norm, over all ranks (0: no clipping).
    """

    name: Literal["adamw", "lion", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    lr: Annotated[float, positive, in_float32] = 1e-3
    warmup_steps: _Whole = 20
    min_lr_ratio: Annotated[float, within(0, 1)] = 0.1
    weight_decay: Annotated[float, within(0, inf), in_float32] = 0.1
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: Annotated[float, positive, in_float32] = 1e-8
    clip_norm: Annotated[float, within(0, inf), in_float32] = 1.0
    decay_fraction: Annotated[float, positive, within(0, 1)] = 0.2
    momentum: _Beta = 0.95


@dataclass(frozen=True, slots=True)
class RunConfig:
    """``batch``: sequences a step, over all microbatches. ``seed``: initial parameters and dropout. ``dtype``: of the compute;
    master parameters are float32. ``keep_last``, ``keep_best``: checkpoints kept by age and by evaluation loss.
    ``resume``: continue from ``out_dir`` if it holds a checkpoint (``auto``), ``never``, or ``must``. ``init_from``: a run, a
    checkpoint, or a folder of the Hugging Face hub (``PATH``, or ``PATH:STEP``) whose parameters a new run begins with; its
    model and tokenizer are the run's where the config says nothing of them. ``platform`` and
    ``devices``: what to run on, and how many devices to emulate on a CPU (0: as many as ranks × dp × tp).

    ``on_nonfinite``: what a gradient with NaN or infinity does: ``skip`` leaves parameters as they are, and ends the run after
    ``max_skipped`` such steps in a row (0: never); ``abort`` ends it at once. ``watchdog_s``: a step that takes longer than
    this, and than 20 times the median, ends the run as hung (0: none does). ``compile_cache``: where compiled programs are kept
    for the next start: ``auto``, a folder that is yours alone, or ``off`` (:mod:`jaxpipe.train.compile_cache`). ``transport``:
    of messages between processes: ``tagged`` (TCP and host memory), or between GPUs ``nccl`` (:mod:`jaxpipe.runtime.native`,
    which nobody has run on GPUs yet).

    ``trackers``: what is told the numbers of each step: ``jsonl`` (always), ``tensorboard``, ``wandb``, ``trackio``, or one
    that a package adds (:mod:`jaxpipe.train.trackers`); ``tensorboard=true`` adds that one. ``profile_steps``: the first and
    the last step of which JAX's profiler writes a trace, beside our timeline of the last, into ``profile/`` in ``out_dir``.
    """

    steps: _Count = 200
    batch: _Count = 32
    seed: _Whole = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    eval_every: _Whole = 50
    eval_batches: _Count = 8
    out_dir: _Name = "runs/default"
    init_from: _Name | None = None
    checkpoint_every: _Whole = 50
    keep_last: _Count = 2
    keep_best: _Whole = 1
    resume: Literal["auto", "never", "must"] = "auto"
    log_every: _Count = 10
    tensorboard: bool = False
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    devices: _Whole = 0
    on_nonfinite: Literal["skip", "abort"] = "skip"
    max_skipped: _Whole = 5
    watchdog_s: Annotated[float, within(0, inf)] = 60.0
    compile_cache: _Name = "auto"
    trackers: tuple[_Name, ...] = ("jsonl",)
    profile_steps: tuple[_Count, _Count] | None = None
    transport: Literal["tagged", "nccl"] = "tagged"


@dataclass(frozen=True, slots=True)
class ReplanConfig:
    """Looking for a better schedule while training (:mod:`jaxpipe.train.replan`); off unless ``enabled``.

    ``min_gain``: predicted fraction of the makespan that a schedule must save to be adopted. ``time_limit_s`` and ``workers``:
    of the solver, in a process of its own. ``drift``: change of one function's measured seconds, as a fraction of a stage's,
    at which the solver is asked again. ``memory_limit``: as ``pipeline.memory_limit``; by default that one, or else what the
    schedule that the run starts with needs. ``split``: run B and W apart from the first step on, so that schedules may move
    W; false keeps fused backwards fused, and the bits of a run without re-planning.
    """

    enabled: bool = False
    min_gain: Annotated[float, within(0, 1)] = 0.01
    time_limit_s: Annotated[float, positive, within(0, 86400)] = 60.0
    workers: Annotated[int, within(1, 1024)] = 1
    drift: _Positive = 0.1
    memory_limit: _Positive | None = None
    split: bool = True


@dataclass(frozen=True, slots=True)
class TraverseConfig:
    """Rules of ``pipeline.schedule = "traverse"``, as :class:`jaxpipe.schedule.Traversal` has them. ``placement``: which ranks
    run which stages, ``pipeline.chunks`` a rank. ``in_flight`` is one number or one a rank, ``in_flight_per_stage`` one
    number or one a stage.
    """

    placement: Literal["one-to-one", "circular", "v", "wave", "bidirectional"] = "one-to-one"
    first: Literal["forward", "backward", "interleaved"] = "backward"
    forward: str = "breadth"
    backward: str = "breadth"
    in_flight: int | tuple[int, ...] | None = None
    in_flight_per_stage: int | tuple[int, ...] | None = None
    units: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Sections:
    """The settings of a run, as they were given."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    replan: ReplanConfig = field(default_factory=ReplanConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    traverse: TraverseConfig = field(default_factory=TraverseConfig)
