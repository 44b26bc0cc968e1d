"""What a training run is told: seven small sections, from a TOML or JSON file plus ``section.key=value`` overrides.

Only ``train/`` and the command line see a :class:`TrainConfig`; lower rooms take plain arguments. A config never looks at
the file system or the machine, so that one stored in a checkpoint loads anywhere: whether a path exists is for
:mod:`jaxpipe.train.corpus` to say. Zero switches off ``eval_every``, ``checkpoint_every`` and ``clip_norm``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jaxpipe.errors import ConfigError
from jaxpipe.train import settings
from jaxpipe.train.rules import broken_rules
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
    """``ranks`` p, ``microbatches`` m, ``chunks`` v. ``tp``, ``dp``: devices of each rank that share its layers, and that share
    each microbatch's sequences. ``schedule``: the name of a family, or a schedule file (``.sched`` ``.json`` ``.csv``).
    ``memory_limit``: live activations a rank may hold, in units of its share of one microbatch (1F1B needs p), or none.
    ``recompute``: what runs again in the backward pass (:mod:`jaxpipe.stage.policies`): one policy, such as ``cheap`` or
    ``cheap+attention``, or a list with one a stage. ``cut``: how layers become stages: ``analytic`` or ``measured`` costs, or
    the layers (indices or names) at which the second and later stages start.

    ``sequence_parallel``: between the parallel products each of the tp devices holds a part of the time axis.
    ``fused_residual``: a branch's residual is added before the all-reduce that ends it. ``zero1``: optimizer state and update
    are divided over dp. With one device there is nothing to divide, and these three change nothing. ``braid``: braided slots
    of a schedule run as one function each; false runs their actions one after another, with the same bits. ``braid_adjacent``:
    braid two actions that stand side by side, too, where the cost model says that it pays.
    """

    ranks: int = 4
    tp: int = 1
    dp: int = 1
    microbatches: int = 8
    chunks: int = 1
    schedule: str = "1f1b"
    memory_limit: float | None = None
    recompute: str | tuple[str, ...] = "none"
    cut: Literal["analytic", "measured"] | tuple[int | str, ...] = "analytic"
    sequence_parallel: bool = False
    fused_residual: bool = False
    zero1: bool = False
    braid: bool = True
    braid_adjacent: bool = False

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

    fraction: float = 1.0
    host_memory_gb: float | None = None
    fallback: bool = False


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
    ``devices``: what to run on, and how many devices to emulate on a CPU (0: as many as ranks × dp × tp).

    ``on_nonfinite``: what a gradient with NaN or infinity does: ``skip`` leaves parameters as they are, and ends the run after
    ``max_skipped`` such steps in a row (0: never); ``abort`` ends it at once. ``watchdog_s``: a step that takes longer than
    this, and than 20 times the median, ends the run as hung (0: none does).
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
    on_nonfinite: Literal["skip", "abort"] = "skip"
    max_skipped: int = 5
    watchdog_s: float = 60.0


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
    min_gain: float = 0.01
    time_limit_s: float = 60.0
    workers: int = 1
    drift: float = 0.1
    memory_limit: float | None = None
    split: bool = True


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
    replan: ReplanConfig = field(default_factory=ReplanConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    def __post_init__(self) -> None:
        found = Collected()
        settings.collect_mapping(TrainConfig, settings.to_mapping(self), "", found)
        _raise_if([*found.problems, *broken_rules(self, found.bad_keys)])

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
        ConfigError: the file can't be read, or any value is wrong: one line with all problems. Also when a path has characters
            that this system's file names can't have.
    """
    found = Collected()
    if path is not None:
        settings.collect_mapping(TrainConfig, settings.read_mapping(Path(path)), str(path), found)
    config = _finish(found, overrides)
    _raise_if([Problem(message, ()) for message in _unspellable(config)])
    return config


def _unspellable(config: TrainConfig) -> Iterator[str]:
    """Paths that file names can't spell in this process: with an ASCII locale, what is not ASCII."""
    paths = {
        "data.path": config.data.path,
        "data.tokenizer": config.data.tokenizer,
        "pipeline.schedule": config.pipeline.schedule,
        "run.out_dir": config.run.out_dir,
    }
    for key, path in paths.items():
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            yield f"{key} is {path!r}, and file names here are {encoding}: set PYTHONUTF8=1, or use other characters"


def known_settings(stored: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """The settings of a stored config, which another version may have written, that there are today, by section; and the
    dotted keys of the others. Values are not checked."""
    hints = settings.leaf_hints(TrainConfig)
    sections = {name: leaves for name, leaves in stored.items() if isinstance(leaves, Mapping)}
    known = {
        name: {key: value for key, value in leaves.items() if f"{name}.{key}" in hints}
        for name, leaves in sections.items()
    }
    other = [f"{name}.{key}" for name, leaves in sections.items() for key in leaves if f"{name}.{key}" not in hints]
    return known, tuple(sorted([*other, *(stored.keys() - sections.keys())]))


_SECTIONS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "pipeline": PipelineConfig,
    "optimizer": OptimizerConfig,
    "run": RunConfig,
    "replan": ReplanConfig,
    "offload": OffloadConfig,
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
        for problem in broken_rules(unchecked, found.bad_keys)
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
