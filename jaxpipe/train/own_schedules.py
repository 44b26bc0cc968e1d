"""Schedules that are no family's: by rules of their own, of towers, or made by a function that the config names.

``pipeline.schedule = "towers"``: the branches of a model on ranks of their own, each in an order by rules of its own, and the
loss, which takes the results of them all (FlexPipe, `flexpipe.txt` section 7.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule import CostProfile, Placement, Schedule, Traversal, check_schedule, traverse, with_span
from jaxpipe.schedule.placement import placement_named, towers
from jaxpipe.train.settings.sections import PipelineConfig, TraverseConfig
from jaxpipe.train.settings.typed import decode, within

_JOIN = "join"
_MOST = 4096


@dataclass(frozen=True, slots=True)
class Tower:
    """``ranks`` of its own, with ``chunks`` each, by default as many as ``placement`` has; ``rules`` as ``Traversal.parse``."""

    ranks: Annotated[int, within(1, _MOST)]
    rules: str
    chunks: Annotated[int, within(1, _MOST)] | None = None
    placement: str | None = None

    def placed(self) -> Placement:
        """Raises ConfigError or ScheduleError where there is none."""
        if (stages := self.ranks * (self.chunks or 1)) > _MOST:
            raise ConfigError(f"{self.ranks} ranks × {self.chunks} chunks are {stages} stages; use at most {_MOST}")
        usual = "one-to-one" if self.chunks in (None, 1) else "circular"
        return placement_named(self.placement or usual, self.ranks, self.chunks)


def rules_of(settings: TraverseConfig) -> Traversal:
    """The rules that the settings describe.

    Raises:
        ScheduleError: a value is none of the rules'.
    """
    return Traversal(**{f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "placement"})


def traversed(pipe: PipelineConfig, costs: CostProfile, span: int = 1) -> Schedule:
    """The schedule of ``pipeline.traverse``, chosen by the stages' relative costs. ``span``: of the last stage.

    Raises:
        ScheduleError: the placement has another number of chunks, or nothing can go on under the limits.
    """
    placement = placement_named(pipe.traverse.placement, pipe.ranks, pipe.chunks)
    placement = with_span(placement, {placement.num_stages - 1: span})
    return traverse(placement, pipe.microbatches, rules_of(pipe.traverse), costs)


def towers_of(settings: Mapping[str, Any]) -> tuple[Placement, dict[int | tuple[int, ...] | range, Traversal]]:
    """The placement of ``pipeline.towers``, and the rules of each tower's ranks.

    Raises:
        ConfigError: a tower lacks a setting, has one that there is not, or a value is none that would work.
        ScheduleError: the towers can't be joined so.
    """
    names = [name for name in settings if name != _JOIN]
    if not names:
        raise ConfigError('there is no tower: add one line for each, such as image = {ranks = 2, rules = "backward"}')
    parts: dict[str, Placement] = {}
    rules: dict[int | tuple[int, ...] | range, Traversal] = {}
    first = 0
    for name in names:
        if not isinstance(settings[name], Mapping):
            like = '{ranks = 2, rules = "backward"}'
            raise ConfigError(f"{name}: a tower is {settings[name]!r}; want a table, such as {like}")
        tower = decode(Tower, settings[name], f"{name}.")
        try:
            parts[name], rule = tower.placed(), Traversal.parse(tower.rules)
        except (ConfigError, ScheduleError) as error:
            raise ConfigError(f"{name}: {error}") from None
        rules[range(first, first := first + parts[name].num_ranks)] = rule
    join = settings.get(_JOIN, names[-1])
    join = join if isinstance(join, list) else [join]
    if not all(isinstance(name, str) for name in join):
        raise ConfigError(f"join is {join}; want the tower on whose last rank the loss runs, one of {', '.join(names)}")
    return towers(parts, join), rules


def made_by_function(name: str, pipe: PipelineConfig, costs: CostProfile) -> Schedule:
    """What the function ``module:function`` makes of those of ``ranks``, ``microbatches``, ``chunks``, ``costs`` that it takes.

    Raises:
        ConfigError: there is no such function, it fails, or gives no schedule.
        ScheduleError: the schedule breaks a rule; names the function.
    """
    from jaxpipe.stage.model.reference import resolved  # imports JAX, which no config needs

    sizes = {"ranks": pipe.ranks, "microbatches": pipe.microbatches, "chunks": pipe.chunks, "costs": costs}
    schedule = resolved("schedule", name, {}, sizes)
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"schedule {name} returned a {type(schedule).__name__}; want a jaxpipe.schedule.Schedule")
    check_schedule(schedule, name)
    return schedule
