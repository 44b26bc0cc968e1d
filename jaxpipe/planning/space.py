"""The search space of the tuner: axes of settings, and the orders in which a layout's ranks may run; and suggested changes.

Source: FlexPipe (`flexpipe.txt`) section 6 and 7.1: a grid over (pp, dp, microbatch size) in powers of two, placements and
traversal priorities, intervals of p for circular placements only, units of 1, forwards first only if asked for. Beyond it:
tensor and context parallelism, recomputation, the schedule families, and limits on microbatches in flight. Vocabulary layers
that are spread as Yeung et al. do (:mod:`~jaxpipe.schedule.families.vocabulary`) go with few families, :data:`SPREAD`.

**Suggestions** are changes of one config that would make it fit, each predicted in full, the fastest (tokens per second and
device) first. Single changes: another schedule family, the offload pass over the config's own schedule (just enough to fit,
then as much as is free), another recompute policy, everywhere or on the ranks that don't fit, half the microbatch, twice the
ranks. If none of them fits, pairs: a schedule of little memory with a policy, with a smaller microbatch, with both. Peaks are
compared in bytes, since ranks differ in what they hold beside activations. Schedules of families come with the config's own
sizes, so an override is all it takes; the offload pass gives a schedule file. Not tried: the solver (``jaxpipe solve`` with
``jaxpipe plan --costs-out``), a policy for each stage, uneven cuts.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, cast

from jaxpipe.axes import AXES
from jaxpipe.errors import ConfigError, JaxpipeError, ScheduleError
from jaxpipe.planning.predict import Prediction
from jaxpipe.schedule import FAMILIES, CostProfile, Placement, Schedule
from jaxpipe.schedule.families import VOCABULARY_FAMILIES, Family
from jaxpipe.schedule.families.family import cheap_first
from jaxpipe.schedule.memory import static_bytes
from jaxpipe.schedule.passes import offload
from jaxpipe.schedule.placement import one_to_one, placement_named, with_vocabulary
from jaxpipe.schedule.timeline import nine_digits
from jaxpipe.stage.split.policies import STANDARD, per_stage
from jaxpipe.text import closest, divisors_of
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.schedule_source import barriers
from jaxpipe.train.settings.sections import DEVICE_KEYS, TraverseConfig

Settings = Mapping[str, Any]
"""Values by dotted key, as overrides of a config give them."""

LEAST_POSITIONS = 1024
"""Positions of a sequence that a device must have for cp to be tried; a user may ask for fewer with ``--only``."""
RECOMPUTE = ("none", "cheap", "full")
VOCABULARY = ("ends", "spread", "spread-2", "joint")
CHUNKS = (2,)
"""Chunks a rank of families and placements that take any number of them."""
SPREAD = frozenset(("1f1b", "zb-h1", "interleaved-1f1b", "gis", "gis-h", "v-half", "v-zb", "dualpipe-v"))
"""Families tried under spread vocabulary layers; others, and traversal rules, only if a user asks for them."""
SEARCHES = frozenset({"v-adaptive", "ada-offload"})
"""Families that search, and take many seconds at large sizes: left out there."""
MOST_PAIRS = 256
"""Ranks × microbatches up to which they are tried."""
_TRAVERSED = ("one-to-one", "circular", "v", "wave", "bidirectional")


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting, and the values that are tried for it."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """The settings that make a schedule of a layout, and its placement."""

    settings: Settings
    placement: Placement


@dataclass(frozen=True, slots=True)
class Space:
    """Holds all candidates of a search. ``base``: the config, with the settings that axes set at their defaults. ``only``: the
    texts of the values that an order may have, by key."""

    base: TrainConfig
    devices: int
    axes: tuple[Axis, ...]
    only: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, config: TrainConfig, devices: int, only: Sequence[str] = ()) -> Space:
        """Build the space around ``config``. ``only``: ``key=value,value`` narrows an axis, or the orders, to these values, as
        texts.

        Raises:
            ConfigError: no such axis, no such value, or it leaves nothing.
        """
        pipe = config.pipeline
        if pipe.towers:
            raise ConfigError("pipeline.towers fixes the ranks and order of each branch, which leaves nothing to tune")
        recompute = (pipe.recompute,) if isinstance(pipe.recompute, str) else ()
        batch = config.run.batch
        values_by_key: dict[str, tuple[Any, ...]] = {key: tuple(divisors_of(devices)) for key in DEVICE_KEYS}
        all_values = dict(values_by_key)
        values_by_key["pipeline.cp"] = tuple(
            n for n in all_values["pipeline.cp"] if n == 1 or config.data.seq_len >= n * LEAST_POSITIONS
        )
        if experts := config.model.options.get("num_experts"):
            values_by_key["pipeline.ep"] = tuple(n for n in divisors_of(devices) if experts % n == 0)
        values_by_key["pipeline.microbatches"] = tuple(m for m in divisors_of(batch) if (batch // m).bit_count() == 1)
        values_by_key["pipeline.vocabulary"] = VOCABULARY
        values_by_key["pipeline.recompute"] = tuple(dict.fromkeys((*RECOMPUTE, *recompute)))
        narrowed = _read(only)
        of_orders = {key for order in _orders(2, True, "ends") for key in order.settings}
        for key, texts in narrowed.items():
            value_by_text: Mapping[str, Any] = {}
            if key in values_by_key:
                value_by_text = {str(value): value for value in all_values.get(key, values_by_key[key])}
            elif key in of_orders:
                orders = (order for ranks in values_by_key["pipeline.ranks"] for order in _orders(ranks, True, "ends"))
                value_by_text = dict.fromkeys(shown(order.settings.get(key)) for order in orders)
            else:
                keys = sorted({*values_by_key, *of_orders})
                raise ConfigError(f"{key!r} is not an axis of the search{closest(key, keys)}; axes: {', '.join(keys)}")
            if unknown := [text for text in texts if text not in value_by_text]:
                raise ConfigError(f"{key}={unknown[0]} is not among the values to try: {', '.join(value_by_text)}")
            if key in values_by_key:
                values_by_key[key] = tuple(value_by_text[text] for text in texts)
        base_pipeline = replace(
            pipe, **cast("Any", dict.fromkeys(("ranks", *AXES), 1)), microbatches=1, vocabulary="ends", chunks=1,
            schedule="1f1b", memory_limit=None, recompute="none", cut="analytic",
            passes=replace(pipe.passes, separate_gradients=False), traverse=TraverseConfig(),
        )  # fmt: skip
        base = replace(config, pipeline=base_pipeline).changed({"run.devices": 0})
        rest = {key: texts for key, texts in narrowed.items() if key not in values_by_key}
        space = cls(base, devices, tuple(Axis(key, values) for key, values in values_by_key.items()), rest)
        if not any(space.orders(layout) for layout in space.layouts()):
            problem = f"has {' '.join(only)}" if next(space.layouts(), None) else f"divides run.batch={batch}"
            raise ConfigError(f"nothing could be tried: no layout of {devices} devices {problem}")
        return space

    def layouts(self) -> Iterator[Settings]:
        """Yield every combination of the axes that uses all devices and divides the batch; vocabulary layers are spread
        over several ranks only, without context parallelism."""
        for values in itertools.product(*(axis.values for axis in self.axes)):
            layout = dict(zip((axis.key for axis in self.axes), values, strict=True))
            parts = layout["pipeline.microbatches"] * layout["pipeline.dp"]
            spread = layout["pipeline.vocabulary"] != "ends"
            if spread and (layout["pipeline.ranks"] == 1 or layout["pipeline.cp"] > 1):
                continue
            if layout["pipeline.dp"] % layout.get("pipeline.ep", 1):
                continue
            if math.prod(layout[key] for key in DEVICE_KEYS) == self.devices and self.base.run.batch % parts == 0:
                yield layout

    def orders(self, layout: Settings) -> tuple[OrderSettings, ...]:
        """Return the orders of a layout. A single rank has one order, and with experts over devices that which braids."""
        # traversals that do all forwards first need memory for all microbatches, as GPipe does: only if asked for by name
        ranks, microbatches = layout["pipeline.ranks"], layout["pipeline.microbatches"]
        orders = _orders(ranks, ranks * microbatches <= MOST_PAIRS, layout["pipeline.vocabulary"])
        named = any(key.startswith(("pipeline.schedule", "traverse.")) for key in self.only)
        if ranks == 1 and layout.get("pipeline.ep", 1) > 1:  # exchanges of one microbatch beside products of another
            orders += tuple(o for o in _families(1, True) if o.settings["pipeline.schedule"] == "combined-1f1b")
        if layout["pipeline.vocabulary"] != "ends" and not named:
            orders = tuple(o for o in orders if o.settings["pipeline.schedule"] in SPREAD)
        texts_by_key = {"traverse.first": ("backward", "interleaved", "None"), **self.only}.items()
        return tuple(o for o in orders if all(shown(o.settings.get(key)) in texts for key, texts in texts_by_key))

    def config(self, settings: Settings) -> TrainConfig:
        """Return the config with these settings.

        Raises:
            ConfigError: they contradict each other or the config.
        """
        return self.base.changed(settings)


Status = Literal["fits", "too large", "same", "refused", "slower", "not reached"]


@dataclass(frozen=True, slots=True)
class TuneTrial:
    """The result of one candidate, or of ``candidates`` that share ``settings`` and were rejected for one ``reason``.

    ``status``: it ``fits``; is ``too large``; makes the ``same`` schedule as another; is ``refused`` (sizes don't suit it);
    can't be but ``slower`` than the best by ``bound_s``; or was ``not reached`` in time. ``bound_s``: no schedule of the
    placement takes a step in less. ``peak_bytes``: by rank. ``offloaded``: the offload pass went over the schedule.
    """

    settings: Settings
    status: Status
    candidates: int = 1
    bound_s: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: tuple[int, ...] = ()
    offloaded: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of a search. ``best``: the fastest of all that fit, or None; no setting makes its ``schedule`` if ``to_file``
    (the offload pass made it), so it needs a file. ``trials`` in the order they were made. ``stopped``: why the search ended
    early, or an empty string."""

    best: Prediction | None
    to_file: bool
    trials: tuple[TuneTrial, ...]
    seconds: float
    stopped: str = ""

    @property
    def leading(self) -> tuple[TuneTrial, ...]:
        """Candidates that fit, the fastest first."""
        return tuple(sorted((t for t in self.trials if t.status == "fits"), key=trial_key))


def trial_key(trial: TuneTrial) -> tuple[float, int]:
    """Return the sort key of a candidate; smaller is better."""
    return nine_digits(trial.step_s or 0.0), max(trial.peak_bytes)


def shown(value: Any) -> str:
    """Format a value of a setting as an override writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@lru_cache(maxsize=64)
def _orders(ranks: int, small: bool, vocabulary: str) -> tuple[OrderSettings, ...]:
    """Return the orders of all families, the cheap ones first, and then the grid of traversal rules."""
    if ranks == 1:
        return (OrderSettings({"pipeline.schedule": "1f1b"}, one_to_one(1)),)
    orders = (*_families(ranks, small), *_traversals(ranks))
    return tuple(placed for order in orders if (placed := _with_vocabulary(order, vocabulary)) is not None)


def _with_vocabulary(order: OrderSettings, vocabulary: str) -> OrderSettings | None:
    """Return the order on its placement with vocabulary layers placed so; None if there is no such placement."""
    if vocabulary == "ends":
        return order
    # only a chain of one flow can have its vocabulary spread (placement.with_vocabulary)
    if "pipeline.memory_limit" in order.settings or order.placement.num_flows > 1:
        return None
    if vocabulary != "joint":
        return replace(order, placement=_spread(order.placement, barriers(vocabulary)))
    joint = VOCABULARY_FAMILIES["vocab-1f1b-joint"].placement(order.placement.num_ranks, 1)
    return replace(order, placement=joint) if order.settings["pipeline.schedule"] == "1f1b" else None


@lru_cache(maxsize=64)
def _spread(placement: Placement, barriers: int) -> Placement:
    return with_vocabulary(placement, barriers=barriers)


def _families(ranks: int, small: bool) -> Iterator[OrderSettings]:
    for family in cheap_first(FAMILIES.values()):
        if family.name in SEARCHES and not small:
            continue
        limits = (None, ranks, ranks / 2) if "memory_limit" in family.options else (None,)
        for chunks, limit in itertools.product(_chunks(family), limits):
            try:
                placement = family.placement(ranks, chunks)
            except ScheduleError:  # none of these sizes
                continue
            settings: dict[str, Any] = {"pipeline.schedule": family.name, "pipeline.chunks": chunks}
            yield OrderSettings(settings | ({} if limit is None else {"pipeline.memory_limit": limit}), placement)


def _chunks(family: Family) -> tuple[int, ...]:
    takes = "chunks" in family.options
    return tuple(dict.fromkeys((family.default_chunks, *CHUNKS))) if takes else (family.default_chunks,)


def _traversals(ranks: int) -> Iterator[OrderSettings]:
    for kind in _TRAVERSED:
        for chunks in CHUNKS if kind in ("circular", "wave") else (None,):
            placement = placement_named(kind, ranks, chunks)
            stage_orders = ["breadth"] if kind == "one-to-one" else ["breadth", "depth"]
            if kind == "circular":
                stage_orders += [f"breadth:{ranks}", f"depth:{ranks}"]
            for forward, backward, first, in_flight in itertools.product(
                stage_orders, stage_orders, ("backward", "interleaved", "forward"), (None, ranks * placement.num_chunks)
            ):
                settings = {
                    "pipeline.schedule": "traverse",
                    "pipeline.chunks": placement.num_chunks,
                    "traverse.placement": kind,
                    "traverse.first": first,
                    "traverse.forward": forward,
                    "traverse.backward": backward,
                }
                yield OrderSettings(
                    settings | ({} if in_flight is None else {"traverse.in_flight": in_flight}), placement
                )


def _read(only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse ``key=value,value`` into values by key."""
    texts_by_key = {}
    for text in only:
        key, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise ConfigError(f"--only {text!r}: write it as section.key=value or section.key=value,value")
        texts_by_key[key.strip()] = tuple(value.strip() for value in values.split(","))
    return texts_by_key


# -- suggestions ---------------------------------------------------------------------------------------------------------

Transform = Callable[[Schedule, CostProfile], Schedule]
Predict = Callable[[TrainConfig, Transform | None], Prediction]

_LEAN = ("v-min", "v-half", "po-h", "po-f", "gis-h")
"""Families of little memory, the ones that pairs are made of; tried first."""
_MOST_NAMED = 16  # stages up to which policies of single stages are spelled out


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change and what it would give. ``overrides``: ``section.key=value``. ``schedule``: to be written to a file that
    ``pipeline.schedule`` names, or None."""

    change: str
    overrides: tuple[str, ...]
    prediction: Prediction
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True)
class Suggestions:
    """``fitting``: by tokens per second and device. ``smallest``: of everything tried, what needs least. ``tried``: how many;
    ``left_out``: how many there was no time for."""

    fitting: tuple[Suggestion, ...]
    smallest: Suggestion
    tried: int
    left_out: int


def suggest(
    current: Prediction, predict: Predict, progress: Callable[[str], None], budget_s: float = 60.0
) -> Suggestions:
    """Try changes to the config of ``current``. ``budget_s``: processor seconds after which
    no trial starts."""
    start = time.process_time()
    tried: list[Suggestion] = []
    left_out = 0

    def trials(changes: Iterator[_Change]) -> None:
        nonlocal left_out
        for change in changes:
            if time.process_time() - start > budget_s:
                left_out += 1
                continue
            suggestion = _suggestion_of(current, change, predict)
            if suggestion is not None:
                progress(
                    f"{suggestion.change}: {suggestion.prediction.worst.peak_bytes / 1e9:.1f} GB, "
                    f"{suggestion.prediction.tokens_per_s:,.0f} tokens/s"
                )
                tried.append(suggestion)

    # a pair of changes is dearer to predict and to take than one: only where no single change fits
    trials(_single(current))
    if not any(s.prediction.fits for s in tried) and not current.fits:
        trials(_pairs(current))
    itself = Suggestion("no change", (), current)
    fitting = sorted((s for s in tried if s.prediction.fits), key=lambda s: -s.prediction.tokens_per_s_per_device)
    smallest = min([itself, *tried], key=lambda s: s.prediction.worst.peak_bytes)
    return Suggestions(tuple(fitting), smallest, len(tried), left_out)


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    overrides: tuple[str, ...] = ()
    transform: Transform | None = None


def _suggestion_of(current: Prediction, change: _Change, predict: Predict) -> Suggestion | None:
    """Predict a change; None if the change can't be made."""
    try:
        config = current.config.override(change.overrides)
        prediction = predict(config, change.transform)
    except JaxpipeError:
        return None
    if prediction.schedule.rows == current.schedule.rows and not change.overrides:
        return None
    schedule = prediction.schedule if change.transform is not None else None
    return Suggestion(change.name, change.overrides, prediction, schedule)


def _single(current: Prediction) -> Iterator[_Change]:
    config, units = current.config, _room(current)
    yield from _recompute(config)
    yield from _recompute_where_tight(current)
    yield from itertools.chain(_offloads(units), _smaller(config), _more_ranks(config))
    small = config.pipeline.ranks * config.pipeline.microbatches <= MOST_PAIRS
    rest = [name for name in FAMILIES if name not in _LEAN and (small or name not in SEARCHES)]
    yield from (_family(config, name, units) for name in (*_LEAN, *rest) if name != config.pipeline.schedule)


def _pairs(current: Prediction) -> Iterator[_Change]:
    config, units = current.config, _room(current)
    policies = [*_recompute(config)]
    leaner = [*_smaller(config), *_more_ranks(config)]
    families = [_family(config, name, units) for name in _LEAN]
    for combination in itertools.chain(
        itertools.product(families, policies),
        itertools.product(policies, leaner),
        itertools.product(families, leaner),
        itertools.product(families, policies, leaner),
    ):
        yield _joined(combination)


def _joined(changes: Sequence[_Change]) -> _Change:
    """Join changes into one; of two values for one key the later counts."""
    by_key = {o.partition("=")[0]: o for change in changes for o in change.overrides}
    return _Change(" + ".join(change.name for change in changes), tuple(by_key.values()))


def _recompute(config: TrainConfig) -> Iterator[_Change]:
    for name in STANDARD:
        if name != config.pipeline.recompute:
            yield _Change(f"recompute {name}", (f"pipeline.recompute={name}",))


def _recompute_where_tight(current: Prediction) -> Iterator[_Change]:
    """Yield recompute policies on the stages of ranks that don't fit; other stages keep theirs."""
    placement, pipe = current.schedule.placement, current.config.pipeline
    tight = [m.rank for m in current.memory if m.peak_bytes > current.limit_bytes]
    stages = {s for rank in tight for s in placement.stages_of(rank)}
    if not tight or len(stages) == placement.num_stages or placement.num_stages > _MOST_NAMED:
        return
    now = per_stage(pipe.recompute, placement.num_stages)
    for name in STANDARD:
        policies = [name if s in stages else policy for s, policy in enumerate(now)]
        if tuple(policies) != now:
            where = "rank" if len(tight) == 1 else "ranks"
            label = f"recompute {name} on {where} {', '.join(map(str, tight))}"
            yield _Change(label, (f"pipeline.recompute={','.join(policies)}",))


def _smaller(config: TrainConfig) -> Iterator[_Change]:
    size, m = config.run.batch // config.pipeline.microbatches, config.pipeline.microbatches
    if size % 2 == 0:
        yield _Change(f"microbatches of {size // 2}", (f"pipeline.microbatches={2 * m}",))


def _more_ranks(config: TrainConfig) -> Iterator[_Change]:
    ranks = 2 * config.pipeline.ranks
    devices = () if config.run.machine.devices == 0 else ("run.devices=0",)
    yield _Change(f"{ranks} ranks", (f"pipeline.ranks={ranks}", *_cut_freed(config), *devices))


def _family(config: TrainConfig, name: str, units: float) -> _Change:
    """Return the change to a family, with its own number of chunks; one that keeps a limit gets what there is room for, in
    whole chunks, up to p."""
    family, pipe = FAMILIES[name], config.pipeline
    overrides = [f"pipeline.schedule={name}"]
    if family.default_chunks != pipe.chunks:
        overrides += [f"pipeline.chunks={family.default_chunks}", *_cut_freed(config)]
    if "memory_limit" in family.options and pipe.memory_limit is None:
        room = math.floor(units * family.default_chunks) / family.default_chunks if units < math.inf else pipe.ranks
        overrides.append(f"pipeline.memory_limit={min(room, pipe.ranks) if room >= 1 else pipe.ranks:g}")
    return _Change(f"schedule {name}", tuple(overrides))


def _cut_freed(config: TrainConfig) -> tuple[str, ...]:
    """Return an override that cuts by costs where the config lists stages by hand, as their number changes."""
    return ("pipeline.cut=analytic",) if isinstance(config.pipeline.cut, tuple) else ()


def _offloads(units: float) -> Iterator[_Change]:
    def free(schedule: Schedule, costs: CostProfile) -> Schedule:
        return offload(schedule, costs).schedule

    def within(schedule: Schedule, costs: CostProfile) -> Schedule:
        return offload(schedule, costs, memory_limit=units).schedule

    if 0 < units < math.inf:
        yield _Change(f"offload to {units:.2f} activations", (), within)
    yield _Change("all offload that is free", (), free)


def _room(current: Prediction) -> float:
    return limit_in_activations(current.schedule.placement, current.costs, current.limit_bytes)


def limit_in_activations(placement: Placement, costs: CostProfile, limit_bytes: float) -> float:
    """Return the memory limit in units of a rank's share of one microbatch, on the rank where it is tightest."""
    # the most of any op's workspace is set aside: whichever op runs at the peak, the limit then holds
    rooms = []
    for rank, static in enumerate(static_bytes(placement, costs)):
        stages = placement.stages_of(rank)
        workspace = max((values[s] for _, values in costs.temp_bytes for s in stages), default=0.0)
        if share := sum(costs.residual_bytes[s] for s in stages):
            rooms.append((limit_bytes - static - workspace) / share)
    return min(rooms, default=math.inf)
