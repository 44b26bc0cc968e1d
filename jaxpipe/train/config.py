"""What a training run is told: five small sections, from a TOML or JSON file plus ``section.key=value`` overrides.

Only ``train/`` and the command line see a :class:`TrainConfig`; lower rooms take plain arguments. A config never looks at
the file system or the machine, so that one stored in a checkpoint loads anywhere: whether a path exists is for
:mod:`jaxpipe.train.corpus` to say, whether a schedule name is known for :mod:`jaxpipe.schedule`. Zero switches a periodic
thing off (``eval_every``, ``checkpoint_every``, ``clip_norm``).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jaxpipe.errors import ConfigError
from jaxpipe.train import settings
from jaxpipe.train.settings import Collected, Problem


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``target``: ``module:function`` that makes the model. ``options``: its keyword arguments."""

    target: str = "models.gpt:GPT"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """``path``: a text file, a directory, a ``.npy``/``.npz`` array of ids, or ``stdlib`` (sources of the Python standard
    library). ``tokenizer``: ``byte``, a ``tokenizer.json``, or ``ids:N`` (arrays with a vocabulary of N and no text).
    ``seq_len``: tokens a sequence. ``holdout``: fraction kept for evaluation. ``split``: how it is chosen, as ``blocks``
    spread over the corpus or whole ``files``. ``suffixes``: files read in a directory. ``seed``: order of the sequences.
    """

    path: str = "stdlib"
    tokenizer: str = "byte"
    seq_len: int = 128
    holdout: float = 0.05
    split: Literal["blocks", "files"] = "blocks"
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """``ranks`` p, ``microbatches`` m, ``chunks`` v. ``schedule``: the name of a family, or a schedule file (``.sched``
    ``.json`` ``.csv``). ``memory_limit``: live activations a rank may hold, in units of its share of one microbatch
    (1F1B needs p), or none. ``recompute``: policy on what F may save. ``cut``: how layers become stages: ``analytic`` or
    ``measured`` costs, or the layers (indices or names) at which the second and later stages start.
    """

    ranks: int = 4
    microbatches: int = 8
    chunks: int = 1
    schedule: str = "1f1b"
    memory_limit: float | None = None
    recompute: str = "none"
    cut: Literal["analytic", "measured"] | tuple[int | str, ...] = "analytic"


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW. ``lr`` is reached after ``warmup_steps`` and falls by a cosine to ``min_lr_ratio`` of it at the last step.
    ``clip_norm``: largest global gradient norm, over all ranks (0: no clipping).
    """

    lr: float = 1e-3
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class RunConfig:
    """``batch``: sequences a step, over all microbatches. ``seed``: initial parameters and dropout. ``dtype``: of the compute;
    master parameters are float32. ``keep_last``, ``keep_best``: checkpoints kept by age and by evaluation loss.
    ``resume``: continue from ``out_dir`` if it holds a checkpoint (``auto``), ``never``, or ``must``. ``platform`` and
    ``devices``: what to run on, and how many devices to emulate on a CPU (0: as many as ranks).
    """

    steps: int = 200
    batch: int = 32
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    eval_every: int = 50
    eval_batches: int = 8
    out_dir: str = "runs/default"
    checkpoint_every: int = 50
    keep_last: int = 2
    keep_best: int = 1
    resume: Literal["auto", "never", "must"] = "auto"
    log_every: int = 10
    tensorboard: bool = False
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 0


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A whole run. Construction checks every value and their combinations.

    Raises:
        ConfigError: one line with all problems, joined by ``"; "``.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        found = Collected()
        settings.collect_mapping(TrainConfig, settings.to_mapping(self), "", found)
        _raise_if([*found.problems, *_broken_rules(self, found.bad_keys)])

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], place: str = "config") -> TrainConfig:
        """The config of sections and keys as :meth:`to_dict` gives them; absent keys keep their defaults."""
        found = Collected()
        settings.collect_mapping(cls, mapping, place, found)
        return _finish(found)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections and keys as plain values that JSON can hold."""
        return settings.to_mapping(self)

    def to_toml(self) -> str:
        """TOML text; :func:`load_config` reads it back to an equal config."""
        return settings.to_toml(self.to_dict())

    def to_json(self) -> str:
        """JSON text; :func:`load_config` reads it back to an equal config."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def override(self, overrides: Sequence[str]) -> TrainConfig:
        """This config with ``section.key=value`` overrides applied in order; the last one of a key wins."""
        found = Collected()
        settings.collect_mapping(TrainConfig, self.to_dict(), "", found)
        return _finish(found, overrides)

    def describe(self) -> str:
        """All settings, one a line, aligned; those that differ from the default are marked ``*``."""
        default = TrainConfig().to_dict()
        rows = [
            (section if i == 0 else "", "*" if value != default[section][key] else " ", key, _show(value))
            for section, leaves in self.to_dict().items()
            for i, (key, value) in enumerate(leaves.items())
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{s:<{widths[0]}} {mark} {key:<{widths[2]}}  {value}" for s, mark, key, value in rows)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a ``.toml`` or ``.json`` file (defaults without one), with overrides applied.

    Raises:
        ConfigError: the file can't be read, or any value is wrong: one line with all problems.
    """
    found = Collected()
    if path is not None:
        settings.collect_mapping(TrainConfig, settings.read_mapping(Path(path)), str(path), found)
    return _finish(found, overrides)


_SECTIONS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "pipeline": PipelineConfig,
    "optimizer": OptimizerConfig,
    "run": RunConfig,
}


def _finish(found: Collected, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of the collected values, after overrides; raises with all problems, each with its place."""
    for override in overrides:
        settings.collect_override(TrainConfig, override, found)
    given: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for key, value in found.values.items():
        section, _, leaf = key.partition(".")
        given[section][leaf] = value
    unchecked = object.__new__(
        TrainConfig
    )  # the rules run even after misfits, so that everything wrong is told at once
    for name, section_type in _SECTIONS.items():
        object.__setattr__(unchecked, name, section_type(**given[name]))
    broken = [
        replace(problem, place=found.places.get(problem.keys[0], "")) if len(problem.keys) == 1 else problem
        for problem in _broken_rules(unchecked, found.bad_keys)
    ]
    _raise_if([*found.problems, *broken])
    return replace(unchecked)


def _raise_if(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError("; ".join(" ".join(str(problem).split()) for problem in problems))


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_show(x)}" for key, x in value.items()) or "-"
    if isinstance(value, list):
        return ",".join(map(_show, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# The rules. Those of one value come first; those of several are left out when one of their values is already wrong.


def _broken_rules(config: TrainConfig, bad_keys: set[str]) -> list[Problem]:
    """Problems of values and of their combinations, leaving out what involves a key in ``bad_keys``."""
    values = {f"{section}.{key}": x for section, leaves in config.to_dict().items() for key, x in leaves.items()}
    good = {key: value for key, value in values.items() if key not in bad_keys}
    problems = [Problem(message, (key,)) for key, message in _range_rules(good)]
    bad_keys = bad_keys.union(*(problem.keys for problem in problems))
    for keys, rule in _COMBINATIONS.items():
        if not bad_keys.intersection(keys) and (message := rule(config)):
            problems.append(Problem(message, keys))
    return problems


_AT_LEAST: Mapping[str, int] = {
    "data.seq_len": 1, "data.holdout": 0, "data.seed": 0,
    "pipeline.ranks": 1, "pipeline.microbatches": 1, "pipeline.chunks": 1,
    "optimizer.warmup_steps": 0, "optimizer.weight_decay": 0, "optimizer.clip_norm": 0, "optimizer.min_lr_ratio": 0,
    "run.steps": 1, "run.batch": 1, "run.seed": 0, "run.eval_every": 0, "run.eval_batches": 1, "run.checkpoint_every": 0,
    "run.keep_last": 1, "run.keep_best": 0, "run.log_every": 1, "run.devices": 0,
}  # fmt: skip
_AT_MOST: Mapping[str, float] = {
    "data.holdout": 0.5, "data.seed": 2**63 - 1, "optimizer.min_lr_ratio": 1, "run.seed": 2**31 - 1
}  # fmt: skip
_POSITIVE = ("optimizer.lr", "optimizer.eps", "pipeline.memory_limit")
_NOT_EMPTY = ("data.path", "data.tokenizer", "pipeline.schedule", "pipeline.recompute", "run.out_dir")


def _range_rules(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, message) of each value that is outside its range."""
    for key, value in values.items():
        low, high = _AT_LEAST.get(key), _AT_MOST.get(key)
        if low is not None and value < low:
            yield key, f"{key} is {value}, must be at least {low}"
        elif high is not None and value > high:
            yield key, f"{key} is {value}, must be at most {high}"
        elif key in _POSITIVE and value is not None and value <= 0:
            yield key, f"{key} is {value}, must be greater than 0"
        elif key in _NOT_EMPTY and not value.strip():
            yield key, f"{key} is empty"
    yield from _form_rules(values)


def _form_rules(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    target = values.get("model.target", "m:f")
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", target):
        yield "model.target", f"model.target is {target!r}, expected module:function such as models.gpt:GPT"
    for i, beta in enumerate(values.get("optimizer.betas", ())):
        if not 0 <= beta < 1:
            yield "optimizer.betas", f"optimizer.betas[{i}] is {beta}, must be at least 0 and less than 1"
    for suffix in values.get("data.suffixes", ()):
        if not suffix.startswith("."):
            yield (
                "data.suffixes",
                f"data.suffixes has {suffix!r}, expected suffixes that start with a dot, such as .txt",
            )
    cut = values.get("pipeline.cut", "")
    layers = [layer for layer in cut if isinstance(layer, int)]
    if any(a >= b for a, b in itertools.pairwise([0, *layers])):
        yield "pipeline.cut", f"pipeline.cut is {cut}, stages start at increasing layers above 0, such as [2, 4, 6]"


def _batch_rule(config: TrainConfig) -> str:
    """The batch divides into microbatches; otherwise names numbers near by that would."""
    batch, microbatches = config.run.batch, config.pipeline.microbatches
    if batch % microbatches == 0:
        return ""
    below = batch // microbatches * microbatches
    batches = " or ".join(str(x) for x in (below, below + microbatches) if x > 0)
    divisors = {d for k in range(1, math.isqrt(batch) + 1) if batch % k == 0 for d in (k, batch // k)}
    nearest = sorted(sorted(divisors, key=lambda d: abs(d - microbatches))[:2])
    counts = " or ".join(map(str, nearest))
    message = f"run.batch={batch} is not divisible by pipeline.microbatches={microbatches}"
    return f"{message}: use run.batch={batches}, or pipeline.microbatches={counts}"


def _warmup_rule(config: TrainConfig) -> str:
    warmup, steps = config.optimizer.warmup_steps, config.run.steps
    advice = f"use at most {steps} (a tenth, {max(1, steps // 10)}, is usual)"
    return f"optimizer.warmup_steps={warmup} is more than run.steps={steps}: {advice}" if warmup > steps else ""


def _holdout_rule(config: TrainConfig) -> str:
    if config.data.holdout > 0 or config.run.eval_every == 0:
        return ""
    message = f"data.holdout=0 leaves nothing for run.eval_every={config.run.eval_every}"
    return f"{message}: set data.holdout=0.05 or run.eval_every=0"


def _cut_rule(config: TrainConfig) -> str:
    pipeline = config.pipeline
    stages = pipeline.ranks * pipeline.chunks
    if isinstance(pipeline.cut, str) or len(pipeline.cut) == stages - 1:
        return ""
    made = f"pipeline.ranks={pipeline.ranks} times pipeline.chunks={pipeline.chunks} make {stages} stages"
    return f"pipeline.cut has {len(pipeline.cut)} layers at which a stage starts, but {made}, which need {stages - 1}"


def _seq_len_rule(config: TrainConfig) -> str:
    """Models get their sequence length from the data."""
    given, wanted = config.model.options.get("seq_len"), config.data.seq_len
    if given in (None, wanted):
        return ""
    return f"model.options.seq_len={given} differs from data.seq_len={wanted}: leave model.options.seq_len out"


_ONE_CHUNK = frozenset({"1f1b", "eager-1f1b", "gpipe", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb"})


def _chunks_rule(config: TrainConfig) -> str:
    """Chunks against what the family's name promises; the generators check the rest."""
    name, chunks = config.pipeline.schedule, config.pipeline.chunks
    if name.startswith("interleaved") and chunks < 2:
        return f"pipeline.schedule={name} needs pipeline.chunks of at least 2, got {chunks}"
    if name in _ONE_CHUNK and chunks > 1:
        advice = "set pipeline.chunks=1 or pipeline.schedule=interleaved-1f1b"
        return f"pipeline.schedule={name} has one chunk a rank, got pipeline.chunks={chunks}: {advice}"
    return ""


def _ids_rule(config: TrainConfig) -> str:
    """``ids:N`` has no text to read."""
    data = config.data
    if not data.tokenizer.startswith("ids:") or data.path.endswith((".npy", ".npz")):
        return ""
    return f"data.tokenizer={data.tokenizer} is for arrays of ids (.npy, .npz), but data.path={data.path} is text"


_COMBINATIONS: Mapping[tuple[str, ...], Callable[[TrainConfig], str]] = {
    ("run.batch", "pipeline.microbatches"): _batch_rule,
    ("optimizer.warmup_steps", "run.steps"): _warmup_rule,
    ("data.holdout", "run.eval_every"): _holdout_rule,
    ("pipeline.cut", "pipeline.ranks", "pipeline.chunks"): _cut_rule,
    ("pipeline.schedule", "pipeline.chunks"): _chunks_rule,
    ("data.tokenizer", "data.path"): _ids_rule,
    ("model.options", "data.seq_len"): _seq_len_rule,
}
