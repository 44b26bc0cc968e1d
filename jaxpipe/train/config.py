"""Read the config of a training run: five sections of settings, from a TOML or JSON file plus ``section.key=value`` overrides.

Only ``train/`` and the command line see a :class:`TrainConfig`; lower rooms take plain arguments. A config never looks at the
file system or the machine, so that one stored in a checkpoint loads anywhere: whether a path exists is for
:mod:`jaxpipe.train.corpora.corpus` to say. :func:`load_config` alone reads a schedule file, whose sizes are those of the run
where nothing is said of them. Zero switches off ``eval_every``, ``checkpoint_every`` and ``clip_norm``. Retired settings, in
files or in checkpoints, are replaced by those that took their place (:func:`modernize`).
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, Literal, get_type_hints

from jaxpipe.axes import WITHIN, within_problem
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule import read_schedule
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.schedule.files import SUFFIXES
from jaxpipe.text import aligned, divisors_of, nearest_divisors
from jaxpipe.train.schedule_source import joint_problem, rules_of, towers_of
from jaxpipe.train.settings import typed
from jaxpipe.train.settings.sections import (
    DEVICE_KEYS,
    DataConfig,
    PipelineConfig,
    RunConfig,
    Sections,
    TraverseConfig,
    names_function,
)
from jaxpipe.train.settings.typed import Collected


@dataclass(frozen=True, slots=True)
class _RetiredPipeline(PipelineConfig):
    """The section ``pipeline`` with what is ``braid = "adjacent"`` today."""

    braid_adjacent: bool = False


@dataclass(frozen=True, slots=True)
class _RetiredRun(RunConfig):
    """The section ``run`` with what is one of the ``trackers``, or ``max_skipped = 1``, today."""

    tensorboard: bool = False
    on_nonfinite: Literal["skip", "abort"] = "skip"


@dataclass(frozen=True, slots=True)
class Accepted(Sections):
    """All settings that a config may have."""

    pipeline: _RetiredPipeline = field(default_factory=_RetiredPipeline)
    run: _RetiredRun = field(default_factory=_RetiredRun)


def modernize(values: MutableMapping[str, Any]) -> None:
    """Replace retired settings among ``values``, by dotted key, by those that took their place. Nothing else need be valid."""
    # Values may be wrong here (they are checked later, with all others), so each is compared with what it may be.
    trackers = values.get("run.output.trackers", ("jsonl",))
    if values.pop("run.tensorboard", False) is True and isinstance(trackers, (list, tuple)):
        values["run.output.trackers"] = tuple(dict.fromkeys(map(str, (*trackers, "tensorboard"))))
    if values.pop("run.on_nonfinite", "skip") == "abort":
        values["run.max_skipped"] = 1
    if values.pop("pipeline.braid_adjacent", False) is True and values.get("pipeline.passes.braid", True) is True:
        values["pipeline.passes.braid"] = "adjacent"


@dataclass(frozen=True, slots=True)
class TrainConfig(Sections):
    """A whole run. Construction checks every value and their combinations.

    ``given_keys``: the dotted keys that a file, an override or a stored config gave; None where Python made the sections.

    Raises:
        ConfigError: one line with all problems, joined by ``"; "``.
    """

    given_keys: frozenset[str] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        parsed = Collected(Sections)
        parsed.add_table(self.to_dict(), "")
        parsed.problems += broken_rules(self, parsed.bad_keys)
        parsed.refuse()

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], place: str = "config") -> TrainConfig:
        """Return the config of sections and keys as :meth:`to_dict` gives them; absent keys keep their defaults."""
        return _config(mapping, place)

    def says(self, key: str) -> bool:
        """Whether ``key`` was set, be it to the default. Of sections that Python made, what differs from the default counts as
        said."""
        if self.given_keys is None:
            return bool(attrgetter(key)(self) != attrgetter(key)(Sections()))
        return key in self.given_keys

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return sections and keys as plain values that JSON can hold."""
        return {name: typed.plain(getattr(self, name)) for name in _SECTIONS}

    def by_key(self) -> dict[str, Any]:
        """Return settings as plain values by dotted key."""
        return dict(typed.leaves_of(Sections, self.to_dict()))

    def to_toml(self) -> str:
        """Return TOML text; :func:`load_config` reads it back to an equal config."""
        return typed.to_toml(self.to_dict())

    def to_json(self) -> str:
        """Return JSON text; :func:`load_config` reads it back to an equal config."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def override(self, overrides: Sequence[str]) -> TrainConfig:
        """Return this config with ``section.key=value`` overrides applied in order; the last one of a key wins."""
        return _config(self.to_dict(), "", overrides, self.given_keys)

    def changed(self, values: Mapping[str, Any]) -> TrainConfig:
        """Return this config with these values by dotted key."""
        parsed = Collected(Sections)
        parsed.values |= {key: attrgetter(key)(self) for key in typed.leaf_hints(Sections)}
        for key, value in values.items():
            parsed.add(key, value, "")
        keys = {typed.full_key(Sections, key) for key in values}
        return _checked(parsed, None if self.given_keys is None else self.given_keys | keys)

    @property
    def microbatch_size(self) -> int:
        """Sequences in a microbatch, over all data-parallel devices of a rank: consecutive rows of a step's batch. Which
        sequences a step sees depends on ``run.batch`` alone, not on how the batch is divided."""
        return self.run.batch // self.pipeline.microbatches

    def filling(self, num_devices: int) -> TrainConfig:
        """Return this config with all of ``num_devices`` in use, by data parallelism (``--dp auto``). ``run.batch`` stays, and
        with it what a step learns from. Where there are fewer devices than for ``pipeline.dp``, there are more microbatches, so
        that no device sees more sequences at once.

        Raises:
            ConfigError: the devices, or the batch, do not divide so; names numbers of devices that do.
        """
        pipe, batch = self.pipeline, self.run.batch
        each = pipe.num_devices // pipe.dp

        def microbatches_of(dp: int) -> int | None:
            if dp % pipe.ep:
                return None
            if batch % dp or dp >= pipe.dp:
                return pipe.microbatches if batch % (pipe.microbatches * dp) == 0 else None
            return min(m for m in divisors_of(batch // dp) if m * dp >= pipe.microbatches * pipe.dp)

        dp, left = divmod(num_devices, each)
        microbatches = microbatches_of(dp) if dp and not left else None
        if microbatches is None:
            sizes = [d for d in divisors_of(batch) if microbatches_of(d) is not None]
            near = sorted(sorted(sizes, key=lambda d: abs(d - num_devices / each))[:2])
            use = " or ".join(f"{d * each} (dp {d})" for d in near)
            experts = f", or ep {pipe.ep} does not" if pipe.ep > 1 else ""
            raise ConfigError(
                f"--dp auto: {num_devices} devices are dp {num_devices / each:g} for {pipe.ranks} ranks × {each // pipe.ranks} "
                f"devices, and run.batch={batch} in {pipe.microbatches} microbatches does not divide so{experts}: use {use} "
                "devices"
            )
        return self.changed({"pipeline.dp": dp, "pipeline.microbatches": microbatches})

    def describe(self) -> str:
        """List all settings, one a line, aligned; those that differ from the default are marked ``*``."""
        default = TrainConfig().to_dict()
        rows = [
            (section if i == 0 else "", "*" if value != default[section][key] else " ", key, _show(value))
            for section, leaves in self.to_dict().items()
            for i, (key, value) in enumerate(leaves.items())
        ]
        return "\n".join(aligned(rows, left=range(4)))


def explain_settings() -> str:
    """List all settings by section: key, what it may be, its default, and what it is for."""
    default, lines = typed.plain(TrainConfig()), []
    docs, hints = typed.leaf_docs(Sections), typed.leaf_hints(Sections)
    for key, text in docs.items():
        section, *path = key.split(".")
        text = text.replace("``", "")
        indent = " " * 4 * len(path)
        if key in hints:
            value = reduce(getitem, path, default[section])
            lines.append(f"{indent[4:]}{path[-1]} = {_show(value)}   ({typed.describe_hint(hints[key])})")
            lines += textwrap.wrap(text, 120, initial_indent=indent, subsequent_indent=indent)
        else:
            lines += ["", f"[{key}]  {text}"] if not path else [f"{path[-1]}   (a table)", f"{indent}{text}"]
    return "\n".join(lines[1:])


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the config of a ``.toml`` or ``.json`` file (defaults without one), with overrides applied.

    Raises:
        ConfigError: the file can't be read, or any value is wrong: one line with all problems. Also when a path has characters
            that this system's file names can't have.
    """
    mapping = {} if path is None else typed.read_mapping(Path(path))
    config = _config(mapping, str(path), overrides, read_sizes=_file_sizes)
    for key in ("data.path", "data.tokenizer", "pipeline.schedule", "run.out_dir", "run.init_from"):
        name = attrgetter(key)(config)
        try:
            os.fsencode(name or "")
        except UnicodeEncodeError:
            advice = f"file names here are {sys.getfilesystemencoding()}: set PYTHONUTF8=1, or use other characters"
            raise ConfigError(f"{key} is {name!r}, and {advice}") from None
    return config


def known_settings(stored: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return the settings of a stored config, which another version may have written, that there are today, by section; and the
    dotted keys of the others. Values are not checked."""
    hints, values = typed.leaf_hints(Accepted), dict(typed.leaves_of(Accepted, stored))
    current = {key: value for key, value in values.items() if key in hints}
    modernize(current)
    # A config without pack was written before there was a choice: its run goes on with the windows it began with.
    if "data.reading.mask" in current and "data.reading.pack" not in current:
        current["data.reading.pack"] = "windows"
    nested: dict[str, Any] = {}
    for key, value in current.items():
        *path, leaf = key.split(".")
        reduce(lambda table, name: table.setdefault(name, {}), path, nested)[leaf] = value
    return nested, tuple(sorted(values.keys() - hints.keys()))


_SECTIONS: Mapping[str, Any] = get_type_hints(Sections)


def _config(
    mapping: Mapping[str, Any],
    place: str,
    overrides: Sequence[str] = (),
    explicit: frozenset[str] | None = frozenset(),
    read_sizes: Callable[[str], Mapping[str, int]] | None = None,
) -> TrainConfig:
    """Return the config of sections and keys found at ``place``, after overrides. ``explicit``: the keys that somebody gave,
    where ``mapping`` is of a config, which has all of them; None where that is not known. ``read_sizes``: of a schedule file.

    Raises:
        ConfigError: one line with all problems, each with its place.
    """
    parsed = Collected(Accepted)
    parsed.add_table(mapping, place)
    if place:
        explicit = frozenset(parsed.values)
    for override in overrides:
        parsed.add_override(override)
    modernize(parsed.values)
    if "pipeline.schedule" in parsed.overridden:
        schedule = parsed.values.get("pipeline.schedule")
        # A file's rules for another schedule than the one that the command line asks for would be refused as unused.
        for name in {"traverse", "towers"} - {schedule}:
            for key in [k for k in parsed.values if k.startswith(f"pipeline.{name}") and k not in parsed.overridden]:
                del parsed.values[key]
    if explicit is not None:
        explicit = (explicit | parsed.overridden) & parsed.values.keys()
        sizes = _sizes_of(parsed.values, read_sizes)
        parsed.values |= {key: size for key, size in sizes.items() if key not in explicit | parsed.bad_keys}
    return _checked(parsed, explicit)


def _sizes_of(values: Mapping[str, Any], read: Callable[[str], Mapping[str, int]] | None) -> dict[str, int]:
    """Return the sizes that ``pipeline.schedule`` has by itself: those of a file, as ``read`` finds them, and the usual chunks
    of a family."""
    schedule = values.get("pipeline.schedule", PipelineConfig().schedule)
    if schedule in FAMILIES:
        return {"pipeline.chunks": FAMILIES[schedule].default_chunks}
    sizes = read(schedule) if read is not None and schedule.endswith(SUFFIXES) else {}
    return {f"pipeline.{name}": size for name, size in sizes.items()}


def _file_sizes(path: str) -> dict[str, int]:
    """Return ranks, microbatches and chunks of a schedule file; none where it can't be read, which is reported when it is to
    run."""
    try:
        schedule = read_schedule(path)
    except ScheduleError:
        return {}
    sizes = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    return sizes | ({"chunks": schedule.num_chunks} if schedule.placement.is_chain else {})


def _checked(parsed: Collected, explicit: frozenset[str] | None) -> TrainConfig:
    """Return the config of parsed settings. ``explicit``: the keys that somebody gave.

    Raises:
        ConfigError: one line with all problems.
    """
    sections = parsed.build(Sections)
    parsed.problems += broken_rules(sections, parsed.bad_keys)
    parsed.refuse()
    # __init__ would check every value a second time: each was checked as it was parsed, and the rules just now.
    config = object.__new__(TrainConfig)
    for name in _SECTIONS:
        object.__setattr__(config, name, getattr(sections, name))
    object.__setattr__(config, "given_keys", explicit)
    return config


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_show(x)}" for key, x in value.items()) or "-"
    if isinstance(value, list):
        return ",".join(map(_show, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# -- rules: what values must satisfy together ------------------------------------------------------------------------------
# A rule yields a message that names the numbers and what would work; it is left out when one of its values is already wrong.
# Only names are compared with the families: what a family says about sizes in detail, it says when it generates.

_MOST_PAIRS = 500_000  # of stages and microbatches in a schedule
_Rule = Callable[[Sections], Iterator[str]]
# In the order of definition, which is the order in which users see the messages.
_RULES: list[tuple[frozenset[str], _Rule]] = []


def _about(*keys: str) -> Callable[[_Rule], _Rule]:
    """Register a rule on the values of these keys."""

    def register(rule: _Rule) -> _Rule:
        _RULES.append((frozenset(keys), rule))
        return rule

    return register


def broken_rules(config: Sections, bad_keys: set[str]) -> list[str]:
    """Return messages about combinations of values, leaving out those that involve a key in ``bad_keys``."""
    return [message for keys, rule in _RULES if not keys & bad_keys for message in rule(config)]


@_about("run.batch", "pipeline.microbatches", "pipeline.dp")
def _batch(config: Sections) -> Iterator[str]:
    """The batch divides into microbatches, and each of these over dp; otherwise names numbers near by that would."""
    batch, microbatches, dp = config.run.batch, config.pipeline.microbatches, config.pipeline.dp
    step = microbatches * dp
    if batch % step == 0:
        return
    below = batch // step * step
    ways = ["run.batch=" + " or ".join(str(x) for x in (below, below + step) if x > 0)]
    if batch % dp == 0:
        ways.append("pipeline.microbatches=" + nearest_divisors(batch // dp, microbatches))
    if batch % microbatches == 0:
        ways.append("pipeline.dp=" + nearest_divisors(batch // microbatches, dp))
    parts = f"pipeline.microbatches={microbatches}" + (f" × pipeline.dp={dp}" if dp > 1 else "")
    yield f"run.batch={batch} is not divisible by {parts}: use {', or '.join(ways)}"


@_about(*(f"pipeline.{axis}" for pair in WITHIN.items() for axis in pair))
def _axes_within(config: Sections) -> Iterator[str]:
    """An axis has as many devices as divide those of the axis that it is within."""
    for axis, other in WITHIN.items():
        size, other_size = (getattr(config.pipeline, name) for name in (axis, other))
        if other_size % size:
            yield within_problem(axis, size, other_size, "pipeline.")


@_about("pipeline.sharding.sequence_parallel", "data.seq_len", "pipeline.tp")
def _sequence(config: Sections) -> Iterator[str]:
    """Each tp shard holds an equal part of the time axis where sequence parallelism is on."""
    length, tp = config.data.seq_len, config.pipeline.tp
    if config.pipeline.sharding.sequence_parallel and length % tp:
        below = length // tp * tp
        lengths = " or ".join(str(x) for x in (below, below + tp) if x > 0)
        yield (
            f"pipeline.sequence_parallel=true splits data.seq_len={length} over pipeline.tp={tp}, which does not divide it: "
            f"use data.seq_len={lengths}, or pipeline.tp={nearest_divisors(length, tp)}"
        )


@_about("data.holdout", "run.eval_every")
def _holdout(config: Sections) -> Iterator[str]:
    if config.data.holdout == 0 and config.run.eval_every > 0:
        message = f"data.holdout=0 leaves nothing for run.eval_every={config.run.eval_every}"
        yield f"{message}: set data.holdout=0.05 or run.eval_every=0"


_STAGES = ("pipeline.ranks", "pipeline.chunks", "pipeline.schedule")


@_about("pipeline.cut", *_STAGES)
def _cut(config: Sections) -> Iterator[str]:
    cut, stages = config.pipeline.cut, _stages(config.pipeline)
    if isinstance(cut, tuple) and stages and len(cut) != stages - 1:
        sizes = f"{_sizes(config.pipeline)} make {stages} stages, which need {stages - 1}"
        yield f"pipeline.cut has {len(cut)} layers at which a stage starts, but {sizes}"


@_about("pipeline.recompute", *_STAGES)
def _recompute(config: Sections) -> Iterator[str]:
    policies, stages = config.pipeline.recompute, _stages(config.pipeline)
    if isinstance(policies, tuple) and stages and len(policies) != stages:
        counts = f"{_sizes(config.pipeline)} make {stages} stages: list {stages}, or give one for all"
        yield f"pipeline.recompute lists {len(policies)} policies, but {counts}"


def _stages(pipeline: PipelineConfig) -> int:
    """Return how many stages the schedule has, by its name; 0 for those that say so only when they are there."""
    # A file or a function would have to be opened or called for it, and a rule looks at nothing but the config.
    return pipeline.ranks * pipeline.chunks if pipeline.schedule in (*FAMILIES, "traverse") else 0


def _sizes(pipeline: PipelineConfig) -> str:
    return f"pipeline.ranks={pipeline.ranks} times pipeline.chunks={pipeline.chunks}"


@_about("pipeline.ranks", "pipeline.chunks", "pipeline.microbatches")
def _pairs(config: Sections) -> Iterator[str]:
    """A schedule of these sizes can be made in seconds."""
    pipe = config.pipeline
    stages = pipe.ranks * pipe.chunks
    if stages * pipe.microbatches > _MOST_PAIRS:
        # Refused here, before a family spends minutes.
        most = _MOST_PAIRS // stages
        use = f"use at most {most} microbatches" if most else "use fewer ranks or chunks"
        sizes = f"{_sizes(pipe)} times pipeline.microbatches={pipe.microbatches}"
        yield f"{sizes} is more than {_MOST_PAIRS} stages times microbatches: {use}"


@_about("pipeline.schedule", "pipeline.chunks")
def _chunks(config: Sections) -> Iterator[str]:
    """The family takes so many chunks; schedule files and the generators' finer rules are checked when they are read."""
    family, chunks = FAMILIES.get(config.pipeline.schedule), config.pipeline.chunks
    if family is not None and "chunks" not in family.options and chunks != family.default_chunks:
        default = family.default_chunks
        shape = f"pipeline.schedule={family.name} has {default} chunk(s) a rank, got pipeline.chunks={chunks}"
        yield f"{shape}: set pipeline.chunks={default} or a schedule that takes chunks ({_taking('chunks')})"


@_about("pipeline.schedule", "pipeline.memory_limit")
def _memory(config: Sections) -> Iterator[str]:
    family = FAMILIES.get(config.pipeline.schedule)
    if family is not None and "memory_limit" not in family.options and config.pipeline.memory_limit is not None:
        use = f"leave it out or use {_taking('memory_limit')}"
        yield f"pipeline.schedule={family.name} takes no pipeline.memory_limit: {use}"


def _taking(option: str) -> str:
    return ", ".join(family.name for family in FAMILIES.values() if option in family.options)


_TRAVERSE = tuple(f"pipeline.traverse.{leaf.name}" for leaf in fields(TraverseConfig))


@_about(*_TRAVERSE)
def _traverse(config: Sections) -> Iterator[str]:
    try:
        rules_of(config.pipeline.traverse)
    except ScheduleError as error:
        yield f"[traverse]: {error}"


@_about("pipeline.schedule", *_TRAVERSE)
def _unused_traverse(config: Sections) -> Iterator[str]:
    name = config.pipeline.schedule
    if name != "traverse" and config.pipeline.traverse != TraverseConfig():
        yield f"[traverse] is given, and pipeline.schedule is {name!r}: set that to 'traverse', or leave the section out"


@_about("pipeline.towers", "pipeline.microbatches", *_STAGES)
def _towers(config: Sections) -> Iterator[str]:
    pipe = config.pipeline
    if pipe.schedule != "towers":
        if pipe.towers:
            problem = f"pipeline.towers are given, and pipeline.schedule is {pipe.schedule!r}"
            yield f"{problem}: set that to 'towers', or leave them out"
        return
    try:
        placement, _ = towers_of(pipe.towers)
    except (ConfigError, ScheduleError) as error:
        yield f"pipeline.towers: {error}"
        return
    if pipe.chunks != 1:
        yield f"pipeline.chunks is {pipe.chunks}; towers have chunks of their own, as in pipeline.towers.NAME.chunks=2"
    if placement.num_ranks != pipe.ranks:
        yield f"pipeline.towers have {placement.num_ranks} ranks, and pipeline.ranks is {pipe.ranks}: make them equal"
    if placement.num_stages * pipe.microbatches > _MOST_PAIRS:
        sizes = f"{placement.num_stages} stages of towers × pipeline.microbatches={pipe.microbatches}"
        yield f"{sizes} is more than {_MOST_PAIRS}: use fewer microbatches or chunks"


@_about(
    "pipeline.vocabulary",
    "pipeline.schedule",
    "pipeline.memory_limit",
    "pipeline.recompute",
    "pipeline.tp",
    "pipeline.cp",
)
def _vocabulary(config: Sections) -> Iterator[str]:
    """Only some settings go with vocabulary layers that are spread."""
    pipe = config.pipeline
    if pipe.vocabulary == "ends":
        return
    setting = f"pipeline.vocabulary={pipe.vocabulary}"
    if pipe.schedule not in (*FAMILIES, "traverse"):
        yield f"{setting} with pipeline.schedule={pipe.schedule!r}: vocabulary layers are spread over the orders of families"
    if problem := joint_problem(pipe):
        yield problem
    if pipe.memory_limit is not None:
        yield f"{setting} takes no pipeline.memory_limit: leave it out, or set pipeline.vocabulary=ends"
    if isinstance(pipe.recompute, tuple):
        yield f"{setting} takes one pipeline.recompute policy for all stages, not a list"
    if pipe.sharding.sequence_parallel and pipe.tp > 1:
        yield f"{setting} is not there with pipeline.sequence_parallel=true: set one of them otherwise"
    if pipe.cp > 1:
        yield f"{setting} is not there with pipeline.cp={pipe.cp}: set one of them otherwise"
    if config.run.replan.enabled:
        yield f"{setting} is not there with replan.enabled=true: set one of them otherwise"


@_about("run.machine.devices", *DEVICE_KEYS)
def _devices(config: Sections) -> Iterator[str]:
    devices, pipe = config.run.machine.devices, config.pipeline
    need = pipe.num_devices
    if 0 < devices < need:
        sizes = {key: attrgetter(key)(config) for key in DEVICE_KEYS}
        product = " × ".join(f"{key}={n}" for key, n in sizes.items() if n > 1)
        product = f"the {need} of {product}" if need > pipe.ranks else f"pipeline.ranks={need}"
        yield f"run.devices={devices} is fewer than {product}: use at least {need}, or 0 for as many as needed"


@_about("data.tokenizer", "data.path", "data.sources", "data.target")
def _ids(config: Sections) -> Iterator[str]:
    """``ids:N`` has no text to read."""
    data = config.data
    if not data.tokenizer.startswith("ids:") or data.target is not None:
        return
    paths = {f"data.sources.{name}.path": source.path for name, source in data.sources.items()}
    for key, path in (paths or {"data.path": data.path}).items():
        if not (path.endswith((".npy", ".npz")) or names_function(path)):
            yield f"data.tokenizer={data.tokenizer} is for arrays of ids (.npy, .npz), but {key}={path} is text"


@_about("data.options", "data.path", "data.target")
def _made_data(config: Sections) -> Iterator[str]:
    """Only a function takes options."""
    data = config.data
    if data.options and not names_function(data.path) and data.target is None:
        needs = "data.options are for a function, data.target=module:function or data.path=module:function"
        yield f"{needs}, and data.path is {data.path!r}: leave them out"


@_about("data.sources", "data.path", "data.target")
def _one_origin(config: Sections) -> Iterator[str]:
    """Data come from one place."""
    data = config.data
    # Sections that Python made do not record what was given, so what equals the default counts as not given.
    keys = [key for key in ("path", "sources", "target") if getattr(data, key) != getattr(DataConfig(), key)]
    if len(keys) > 1:
        yield f"{' and '.join(f'data.{key}' for key in keys)} are given: data come from one of them; leave the others out"


@_about("model.options", "data.seq_len")
def _seq_len(config: Sections) -> Iterator[str]:
    """Models get their sequence length from the data."""
    model_len, data_len = config.model.options.get("seq_len"), config.data.seq_len
    if model_len not in (None, data_len):
        yield f"model.options.seq_len={model_len} differs from data.seq_len={data_len}: leave model.options.seq_len out"


@_about("run.output.profile_steps", "run.steps")
def _profiled(config: Sections) -> Iterator[str]:
    first, last = config.run.output.profile_steps or (1, 1)
    if not first <= last <= config.run.steps:
        setting = f"run.profile_steps=[{first}, {last}] with run.steps={config.run.steps}"
        yield f"{setting}: give the first and the last step to trace, such as [20, 25]"


@_about("run.replan.enabled", "run.steps", "run.output.log_every")
def _recorded(config: Sections) -> Iterator[str]:
    """The solver is given what a recorded step measured; the first step compiles."""
    steps, interval = config.run.steps, config.run.output.log_every
    # Step 1 compiles, so the first step whose times count is 2, or the first recorded one after it.
    if config.run.replan.enabled and max(2, interval) >= steps:
        message = (
            f"replan.enabled=true needs a recorded step after the first and before the last, and run.steps={steps}"
        )
        less = f", or run.log_every={max(1, steps // 4)}" if steps > 2 else ""
        yield f"{message} with run.log_every={interval} has none: use more steps{less}"
