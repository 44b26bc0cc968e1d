"""Check what the values of a training config must satisfy together; what each must alone, their annotations in :mod:`.sections`
say.

A rule yields a message that names the numbers and what would work; it is left out when one of its values is already wrong. Only
names are compared with the schedule families: what a family says about sizes in detail, it says when it generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.text import divisors_of
from jaxpipe.train.schedule_source import joint_problem, rules_of, towers_of
from jaxpipe.train.settings.sections import DataConfig, PipelineConfig, Sections, TraverseConfig, names_function

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
        ways.append("pipeline.microbatches=" + _nearest_divisors(batch // dp, microbatches))
    if batch % microbatches == 0:
        ways.append("pipeline.dp=" + _nearest_divisors(batch // microbatches, dp))
    parts = f"pipeline.microbatches={microbatches}" + (f" × pipeline.dp={dp}" if dp > 1 else "")
    yield f"run.batch={batch} is not divisible by {parts}: use {', or '.join(ways)}"


def _nearest_divisors(number: int, target: int) -> str:
    """Return the two divisors of ``number`` nearest to ``target``, such as ``4 or 8``."""
    nearest = sorted(divisors_of(number), key=lambda d: abs(d - target))[:2]
    return " or ".join(map(str, sorted(nearest)))


@_about("pipeline.sharding.sequence_parallel", "data.seq_len", "pipeline.tp")
def _sequence(config: Sections) -> Iterator[str]:
    """Each tp shard holds an equal part of the time axis where sequence parallelism is on."""
    length, tp = config.data.seq_len, config.pipeline.tp
    if config.pipeline.sharding.sequence_parallel and length % tp:
        below = length // tp * tp
        lengths = " or ".join(str(x) for x in (below, below + tp) if x > 0)
        yield (
            f"pipeline.sequence_parallel=true splits data.seq_len={length} over pipeline.tp={tp}, which does not divide it: "
            f"use data.seq_len={lengths}, or pipeline.tp={_nearest_divisors(length, tp)}"
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


@_about("run.machine.devices", "pipeline.ranks", "pipeline.dp", "pipeline.cp", "pipeline.tp")
def _devices(config: Sections) -> Iterator[str]:
    devices, pipe = config.run.machine.devices, config.pipeline
    need = pipe.num_devices
    if 0 < devices < need:
        cp = f" × pipeline.cp={pipe.cp}" if pipe.cp > 1 else ""
        product = f"the {need} of pipeline.ranks={pipe.ranks} × pipeline.dp={pipe.dp}{cp} × pipeline.tp={pipe.tp}"
        fewer = f"run.devices={devices} is fewer than {product if need > pipe.ranks else f'pipeline.ranks={need}'}"
        yield f"{fewer}: use at least {need}, or 0 for as many as needed"


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
