"""What a training config must satisfy beyond types: ranges of single values, and combinations of several.

A rule gives an empty string or a message that names the numbers and what would work. Rules of one value come first; those
of several are left out when one of their values is already wrong. Only names are compared with the schedule families: what
a family says about sizes in detail, it says when it generates.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule import Traversal
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.stage.split.policies import POLICIES
from jaxpipe.train import settings
from jaxpipe.train.sections import PipelineConfig, Sections, TraverseConfig
from jaxpipe.train.settings import Problem
from jaxpipe.train.towers import towers_of
from jaxpipe.wording import nearest


def broken_rules(config: Sections, bad_keys: set[str]) -> list[Problem]:
    """Problems of values and of their combinations, leaving out what involves a key in ``bad_keys``."""
    values = {
        f"{section}.{key}": x for section, leaves in settings.to_mapping(config).items() for key, x in leaves.items()
    }
    good = {key: value for key, value in values.items() if key not in bad_keys}
    problems = [Problem(message, (key,)) for key, message in _range_rules(good)]
    bad_keys = bad_keys.union(*(problem.keys for problem in problems))
    for keys, rule in _COMBINATIONS.items():
        if not bad_keys.intersection(keys) and (message := rule(config)):
            problems.append(Problem(message, keys))
    return problems


_AT_LEAST: Mapping[str, int] = {
    "data.seq_len": 1, "data.holdout": 0, "data.seed": 0,
    "pipeline.ranks": 1, "pipeline.tp": 1, "pipeline.dp": 1, "pipeline.microbatches": 1, "pipeline.chunks": 1,
    "optimizer.warmup_steps": 0, "optimizer.weight_decay": 0, "optimizer.clip_norm": 0, "optimizer.min_lr_ratio": 0,
    "run.steps": 1, "run.batch": 1, "run.seed": 0, "run.eval_every": 0, "run.eval_batches": 1, "run.checkpoint_every": 0,
    "run.keep_last": 1, "run.keep_best": 0, "run.log_every": 1, "run.devices": 0,
    "run.max_skipped": 0, "run.watchdog_s": 0,
    "replan.min_gain": 0, "replan.workers": 1, "offload.fraction": 0,
}  # fmt: skip
_AT_MOST: Mapping[str, float] = {
    "data.holdout": 0.5, "data.seed": 2**63 - 1, "optimizer.min_lr_ratio": 1,
    "pipeline.ranks": 4096, "pipeline.tp": 65536, "pipeline.dp": 65536, "pipeline.chunks": 1024,
    "replan.min_gain": 1, "replan.time_limit_s": 86400, "replan.workers": 1024, "offload.fraction": 1,
}  # fmt: skip
_MOST = 2**31 - 1  # of other integers: JAX counts steps and positions in 32 bits
_MOST_PAIRS = 500_000  # of stages and microbatches in a schedule
_POSITIVE = (
    "optimizer.lr", "optimizer.eps", "pipeline.memory_limit", "replan.time_limit_s", "replan.drift", "replan.memory_limit",
    "offload.host_memory_gb",
)  # fmt: skip
_FLOAT32 = ("optimizer.lr", "optimizer.eps", "optimizer.weight_decay", "optimizer.clip_norm")
_FLOAT32_LEAST, _FLOAT32_MOST = 1.2e-38, 3.4e38
_SCHEDULE_FILES = (".sched", ".json", ".csv")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NOT_EMPTY = ("data.path", "data.tokenizer", "run.out_dir")


def names_function(text: str) -> bool:
    """Whether ``text`` is ``module:function``."""
    return _FUNCTION.fullmatch(text) is not None


def _range_rules(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, message) of each value that is outside its range."""
    for key, value in values.items():
        low, high = _AT_LEAST.get(key), _AT_MOST.get(key, _MOST if type(value) is int else None)
        if low is not None and value < low:
            yield key, f"{key} is {value}, must be at least {low}"
        elif high is not None and value > high:
            yield key, f"{key} is {value}, must be at most {high}"
        elif key in _POSITIVE and value is not None and value <= 0:
            yield key, f"{key} is {value}, must be greater than 0"
        elif key in _FLOAT32 and value != 0 and not _FLOAT32_LEAST <= value <= _FLOAT32_MOST:
            yield key, f"{key} is {value}, which float32 does not hold: use {_FLOAT32_LEAST:g} to {_FLOAT32_MOST:g}"
        elif key in _NOT_EMPTY and not value.strip():
            yield key, f"{key} is empty"
    yield from _form_rules(values)


def _form_rules(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    target = values.get("model.target", "m:f")
    if not names_function(target):
        yield "model.target", f"model.target is {target!r}, expected module:function such as models.gpt:GPT"
    for i, beta in enumerate(values.get("optimizer.betas", ())):
        if not 0 <= beta < 1 - 2**-25:  # what is nearer to 1 is 1 in float32
            yield "optimizer.betas", f"optimizer.betas[{i}] is {beta}, must be at least 0 and less than 1 in float32"
    for suffix in values.get("data.suffixes", ()):
        if not suffix.startswith("."):
            yield (
                "data.suffixes",
                f"data.suffixes has {suffix!r}, expected suffixes that start with a dot, such as .txt",
            )
    schedule = values.get("pipeline.schedule", "1f1b")
    names = (*FAMILIES, "traverse", "towers")
    if schedule not in names and not (schedule.endswith(_SCHEDULE_FILES) or names_function(schedule)):
        known = f"known: {', '.join(names)}, module:function, or a file ({' '.join(_SCHEDULE_FILES)})"
        advice = _advice(schedule, names, known)
        yield "pipeline.schedule", f"pipeline.schedule is {schedule!r}, which is no schedule: {advice}"
    yield from _policy_rules(values.get("pipeline.recompute", "none"))
    cut = values.get("pipeline.cut", "")
    layers = [layer for layer in cut if isinstance(layer, int)]
    if any(a >= b for a, b in itertools.pairwise([0, *layers])):
        yield "pipeline.cut", f"pipeline.cut is {cut}, stages start at increasing layers above 0, such as [2, 4, 6]"


def _policy_rules(recompute: str | Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in [recompute] if isinstance(recompute, str) else recompute:
        for part in name.split("+"):
            if part.strip() not in POLICIES:
                advice = _advice(part, POLICIES, f"known: {', '.join(POLICIES)}, or several joined by +")
                yield "pipeline.recompute", f"pipeline.recompute has {part!r}, which is no policy: {advice}"


def _advice(word: str, known: Iterable[str], otherwise: str) -> str:
    near = nearest(word, known)
    return f"did you mean {near!r}?" if near else otherwise


def _batch_rule(config: Sections) -> str:
    """The batch divides into microbatches, and each of these over dp; otherwise names numbers near by that would."""
    batch, microbatches, dp = config.run.batch, config.pipeline.microbatches, config.pipeline.dp
    step = microbatches * dp
    if batch % step == 0:
        return ""
    below = batch // step * step
    ways = ["run.batch=" + " or ".join(str(x) for x in (below, below + step) if x > 0)]
    if batch % dp == 0:
        ways.append("pipeline.microbatches=" + _nearest_divisors(batch // dp, microbatches))
    if batch % microbatches == 0:
        ways.append("pipeline.dp=" + _nearest_divisors(batch // microbatches, dp))
    parts = f"pipeline.microbatches={microbatches}" + (f" × pipeline.dp={dp}" if dp > 1 else "")
    return f"run.batch={batch} is not divisible by {parts}: use {', or '.join(ways)}"


def _nearest_divisors(number: int, wanted: int) -> str:
    """The two divisors of ``number`` nearest to ``wanted``, as ``4 or 8``."""
    divisors = {d for k in range(1, math.isqrt(number) + 1) if number % k == 0 for d in (k, number // k)}
    return " or ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:2])))


def _sequence_rule(config: Sections) -> str:
    """With sequence parallelism each tp shard holds an equal part of the time axis."""
    length, tp = config.data.seq_len, config.pipeline.tp
    if not config.pipeline.sequence_parallel or length % tp == 0:
        return ""
    below = length // tp * tp
    lengths = " or ".join(str(x) for x in (below, below + tp) if x > 0)
    return (
        f"pipeline.sequence_parallel=true splits data.seq_len={length} over pipeline.tp={tp}, which does not divide it: use "
        f"data.seq_len={lengths}, or pipeline.tp={_nearest_divisors(length, tp)}"
    )


def _warmup_rule(config: Sections) -> str:
    warmup, steps = config.optimizer.warmup_steps, config.run.steps
    advice = f"use at most {steps} (a tenth, {max(1, steps // 10)}, is usual)"
    return f"optimizer.warmup_steps={warmup} is more than run.steps={steps}: {advice}" if warmup > steps else ""


def _holdout_rule(config: Sections) -> str:
    if config.data.holdout > 0 or config.run.eval_every == 0:
        return ""
    message = f"data.holdout=0 leaves nothing for run.eval_every={config.run.eval_every}"
    return f"{message}: set data.holdout=0.05 or run.eval_every=0"


def _cut_rule(config: Sections) -> str:
    pipeline = config.pipeline
    stages = pipeline.ranks * pipeline.chunks
    if isinstance(pipeline.cut, str) or len(pipeline.cut) == stages - 1 or not _makes_chain(pipeline):
        return ""
    made = f"pipeline.ranks={pipeline.ranks} times pipeline.chunks={pipeline.chunks} make {stages} stages"
    return f"pipeline.cut has {len(pipeline.cut)} layers at which a stage starts, but {made}, which need {stages - 1}"


def _makes_chain(pipeline: PipelineConfig) -> bool:
    """Whether the schedule, by its name, has ``chunks`` stages a rank; others say how many only when they are there."""
    return pipeline.schedule in FAMILIES or pipeline.schedule == "traverse"


def _recompute_rule(config: Sections) -> str:
    pipeline = config.pipeline
    stages = pipeline.ranks * pipeline.chunks
    if isinstance(pipeline.recompute, str) or len(pipeline.recompute) == stages or not _makes_chain(pipeline):
        return ""
    made = f"pipeline.ranks={pipeline.ranks} times pipeline.chunks={pipeline.chunks} make {stages} stages"
    return (
        f"pipeline.recompute lists {len(pipeline.recompute)} policies, but {made}: list {stages}, or give one for all"
    )


def _seq_len_rule(config: Sections) -> str:
    """Models get their sequence length from the data."""
    given, wanted = config.model.options.get("seq_len"), config.data.seq_len
    if given in (None, wanted):
        return ""
    return f"model.options.seq_len={given} differs from data.seq_len={wanted}: leave model.options.seq_len out"


def _chunks_rule(config: Sections) -> str:
    """Chunks against what the family takes; schedule files and the generators' finer rules are checked when they are read."""
    family, chunks = FAMILIES.get(config.pipeline.schedule), config.pipeline.chunks
    if family is None or "chunks" in family.options or chunks == family.default_chunks:
        return ""
    others = ", ".join(f.name for f in FAMILIES.values() if "chunks" in f.options)
    shape = f"pipeline.schedule={family.name} has {family.default_chunks} chunk(s) a rank, got pipeline.chunks={chunks}"
    return f"{shape}: set pipeline.chunks={family.default_chunks} or a schedule that takes chunks ({others})"


def _memory_rule(config: Sections) -> str:
    family, limit = FAMILIES.get(config.pipeline.schedule), config.pipeline.memory_limit
    if family is None or limit is None or "memory_limit" in family.options:
        return ""
    others = ", ".join(f.name for f in FAMILIES.values() if "memory_limit" in f.options)
    return f"pipeline.schedule={family.name} takes no pipeline.memory_limit: leave it out or use {others}"


def rules_of(settings: TraverseConfig) -> Traversal:
    """The rules that the settings describe.

    Raises:
        ScheduleError: a value is none of the rules'.
    """
    return Traversal(
        settings.first,
        forward=settings.forward,
        backward=settings.backward,
        in_flight=settings.in_flight,
        in_flight_per_stage=settings.in_flight_per_stage,
        units=settings.units,
    )


def _unused_traverse_rule(config: Sections) -> str:
    name = config.pipeline.schedule
    if name == "traverse" or config.traverse == TraverseConfig():
        return ""
    return f"[traverse] is given, and pipeline.schedule is {name!r}: set that to 'traverse', or leave the section out"


def _traverse_rule(config: Sections) -> str:
    try:
        rules_of(config.traverse)
    except ScheduleError as error:
        return f"[traverse]: {error}"
    return ""


def _towers_rule(config: Sections) -> str:
    pipe = config.pipeline
    if pipe.schedule != "towers":
        given = "pipeline.towers are given, and pipeline.schedule is"
        return f"{given} {pipe.schedule!r}: set that to 'towers', or leave them out" if pipe.towers else ""
    try:
        placement, _ = towers_of(pipe.towers)
    except (ConfigError, ScheduleError) as error:
        return f"pipeline.towers: {error}"
    if pipe.chunks != 1:
        return f"pipeline.chunks is {pipe.chunks}; towers have chunks of their own, as in pipeline.towers.NAME.chunks=2"
    if placement.num_ranks != pipe.ranks:
        return f"pipeline.towers have {placement.num_ranks} ranks, and pipeline.ranks is {pipe.ranks}: make them equal"
    if placement.num_stages * pipe.microbatches > _MOST_PAIRS:
        sizes = f"{placement.num_stages} stages of towers × pipeline.microbatches={pipe.microbatches}"
        return f"{sizes} is more than {_MOST_PAIRS}: use fewer microbatches or chunks"
    return ""


def _pairs_rule(config: Sections) -> str:
    """A schedule of these sizes can be made in seconds."""
    pipe = config.pipeline
    stages = pipe.ranks * pipe.chunks
    if stages * pipe.microbatches <= _MOST_PAIRS:
        return ""
    sizes = f"pipeline.ranks={pipe.ranks} × pipeline.chunks={pipe.chunks} × pipeline.microbatches={pipe.microbatches}"
    most = f"use at most {_MOST_PAIRS // stages} microbatches" if stages <= _MOST_PAIRS else "use fewer ranks or chunks"
    return f"{sizes} is more than {_MOST_PAIRS} stages times microbatches: {most}"


def _devices_rule(config: Sections) -> str:
    devices, pipe = config.run.devices, config.pipeline
    if devices == 0 or devices >= pipe.num_devices:
        return ""
    if pipe.num_devices == pipe.ranks:
        return (
            f"run.devices={devices} is fewer than pipeline.ranks={pipe.ranks}: use at least {pipe.ranks}, or 0 for as many as "
            "needed"
        )
    return (
        f"run.devices={devices} is fewer than the {pipe.num_devices} of pipeline.ranks={pipe.ranks} × pipeline.dp={pipe.dp} × "
        f"pipeline.tp={pipe.tp}: use at least {pipe.num_devices}, or 0 for as many as needed"
    )


def _ids_rule(config: Sections) -> str:
    """``ids:N`` has no text to read."""
    data = config.data
    if not data.tokenizer.startswith("ids:") or data.path.endswith((".npy", ".npz")) or names_function(data.path):
        return ""
    return f"data.tokenizer={data.tokenizer} is for arrays of ids (.npy, .npz), but data.path={data.path} is text"


def _made_data_rule(config: Sections) -> str:
    """Only a function takes options."""
    data = config.data
    if not data.options or names_function(data.path):
        return ""
    return f"data.options are for a function, data.path=module:function, and data.path is {data.path!r}: leave them out"


def _recorded_rule(config: Sections) -> str:
    """The solver is given what a recorded step measured; the first step compiles."""
    steps, every = config.run.steps, config.run.log_every
    if not config.replan.enabled or max(2, every) < steps:
        return ""
    message = f"replan.enabled=true needs a recorded step after the first and before the last, and run.steps={steps}"
    return f"{message} with run.log_every={every} has none: use more steps" + (
        f", or run.log_every={max(1, steps // 4)}" if steps > 2 else ""
    )


_TRAVERSE = tuple(f"traverse.{leaf.name}" for leaf in fields(TraverseConfig))
_COMBINATIONS: Mapping[tuple[str, ...], Callable[[Sections], str]] = {
    ("run.batch", "pipeline.microbatches", "pipeline.dp"): _batch_rule,
    ("pipeline.sequence_parallel", "data.seq_len", "pipeline.tp"): _sequence_rule,
    ("optimizer.warmup_steps", "run.steps"): _warmup_rule,
    ("data.holdout", "run.eval_every"): _holdout_rule,
    ("pipeline.cut", "pipeline.ranks", "pipeline.chunks", "pipeline.schedule"): _cut_rule,
    ("pipeline.recompute", "pipeline.ranks", "pipeline.chunks", "pipeline.schedule"): _recompute_rule,
    ("pipeline.ranks", "pipeline.chunks", "pipeline.microbatches"): _pairs_rule,
    ("pipeline.schedule", "pipeline.chunks"): _chunks_rule,
    ("pipeline.schedule", "pipeline.memory_limit"): _memory_rule,
    _TRAVERSE: _traverse_rule,
    ("pipeline.schedule", *_TRAVERSE): _unused_traverse_rule,
    (
        "pipeline.schedule",
        "pipeline.towers",
        "pipeline.ranks",
        "pipeline.chunks",
        "pipeline.microbatches",
    ): _towers_rule,
    ("run.devices", "pipeline.ranks", "pipeline.dp", "pipeline.tp"): _devices_rule,
    ("data.tokenizer", "data.path"): _ids_rule,
    ("data.options", "data.path"): _made_data_rule,
    ("model.options", "data.seq_len"): _seq_len_rule,
    ("replan.enabled", "run.steps", "run.log_every"): _recorded_rule,
}
