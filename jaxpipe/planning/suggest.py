"""Changes of a config that would make it fit, each predicted in full, the fastest (tokens per second and device) first.

Single changes: another schedule family, the offload pass over the config's own schedule (just enough to fit, then as much as is
free), another recompute policy, everywhere or on the ranks that
don't fit, half the microbatch, twice the ranks. If none of them fits, pairs: a schedule of little memory
with a policy, with a smaller microbatch, with both. Peaks are compared in bytes, since ranks differ in what they hold beside
activations. Schedules of families come with the config's own sizes, so an override is all it takes; the offload pass gives a
schedule file.

Not tried: the solver (``jaxpipe solve`` with ``jaxpipe plan --costs-out``), a policy for each stage, uneven cuts.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxpipe.errors import JaxpipeError
from jaxpipe.planning.predict import Prediction
from jaxpipe.planning.space import MOST_PAIRS, SEARCHES
from jaxpipe.schedule import FAMILIES, CostProfile, Placement, Schedule
from jaxpipe.schedule.memory import static_bytes
from jaxpipe.schedule.passes import offload
from jaxpipe.stage.split.policies import STANDARD, per_stage
from jaxpipe.train.config import TrainConfig

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
