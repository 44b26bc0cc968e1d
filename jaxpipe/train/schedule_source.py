"""Decode ``pipeline.schedule`` once: into stages to cut the model into, and a function from their costs to an order.

A family's name, ``traverse`` (rules), ``towers``, ``module:function``, a schedule file, a schedule by value: :func:`source_of`
makes one :class:`ScheduleSource` of any of them, and nothing after it asks which it was. Vocabulary-parallel layers wrap the
source of the transformer stages between them. Importing this imports no JAX, as the checks of a config need it.

``pipeline.schedule = "towers"``: the branches of a model on ranks of their own, each in an order by rules of its own, and the
loss, which takes the results of them all (FlexPipe, `flexpipe.txt` section 7.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule import (
    FAMILIES,
    CostProfile,
    Link,
    Placement,
    Schedule,
    Traversal,
    check_schedule,
    find_problems,
    generate,
    read_schedule,
    traverse,
    with_span,
)
from jaxpipe.schedule.families import family_named
from jaxpipe.schedule.families.vocabulary import spread_vocabulary
from jaxpipe.schedule.files import SUFFIXES
from jaxpipe.schedule.placement import Edges, placement_named, towers, with_vocabulary
from jaxpipe.schedule.rules import Rules
from jaxpipe.train.settings.sections import PipelineConfig, TraverseConfig
from jaxpipe.train.settings.typed import decode, within

_TRANSFER = 0.1
"""The fraction of a stage's forward that an order of vocabulary-parallel layers leaves for a transfer."""

_JOIN = "join"
_MOST = 4096


@dataclass(frozen=True, slots=True)
class ScheduleSource:
    """A way to a schedule. ``order``: from the costs of ``num_stages`` stages to the schedule. ``edges``: between the stages
    that the model is to be cut into, None for those that follow from the cut. ``takes_costs``: whether measured costs may ask
    ``order`` again, which then chooses by them; ``keeps_limit``: whether it keeps to a memory limit under them."""

    num_stages: int
    order: Callable[[CostProfile], Schedule]
    edges: Edges | None = None
    takes_costs: bool = False
    keeps_limit: bool = False


def source_of(pipe: PipelineConfig, span: int = 1, schedule: Schedule | None = None) -> ScheduleSource:
    """Decode the schedule setting of ``pipe``. ``span``: how many microbatches the loss takes at once. ``schedule``: what
    another process has read or chosen already, or the setting itself where that has no name.

    Raises:
        ScheduleError: the family refuses that span, or what was read breaks a rule. ``order`` raises it where the family
            refuses the sizes, nothing can go on under the rules, or what a function made breaks a rule.
        ConfigError: what was read is for other sizes. ``order`` raises it for what a function made.
    """
    if is_schedule_file(pipe.schedule) or not pipe.schedule:
        return _fixed_source(schedule or _require_sizes(pipe, read_checked(pipe.schedule)))
    if pipe.schedule != "towers":
        return _chain_source(pipe, span) if pipe.vocabulary == "ends" else _vocabulary_source(pipe)
    return _towers_source(pipe, span)


def _fixed_source(schedule: Schedule) -> ScheduleSource:
    """Wrap a schedule that exists: no costs change it."""
    return ScheduleSource(schedule.num_stages, lambda costs: schedule, edges_to_cut(schedule.placement))


def edges_to_cut(placement: Placement) -> Edges | None:
    """Return the edges that a cut has to make. A chain takes stages of any graph, as its order has each stage after all before
    it; then the edges follow from the cut."""
    return None if placement.is_chain else placement.edges


def relative_costs(forward: Sequence[float]) -> CostProfile:
    """Return costs proportional to each stage's forward, B and W as long as F: what an order is chosen with before anything
    runs."""
    # Never zero: an order by durations of zero would leave the place of such a stage to chance.
    f = tuple(max(x, 1e-9 * max(forward)) for x in forward)
    ones = tuple(1.0 for _ in f)
    twice = tuple(2 * x for x in f)
    return CostProfile(
        f_s=f, b_s=f, w_s=f, bw_s=twice, residual_bytes=ones, w_residual_bytes=ones, source="relative FLOPs"
    )


def is_schedule_file(schedule: str) -> bool:
    """Return whether ``schedule`` is the path of a file, and no family's name."""
    return Path(schedule).suffix in SUFFIXES


def read_checked(path: str | Path) -> Schedule:
    """Return the schedule in a file.

    Raises:
        ScheduleError: it can't be read, or breaks a rule; names the file.
    """
    schedule = read_schedule(path)
    if problems := [f"{path}: {problem}" for problem in find_problems(schedule)]:
        raise ScheduleError("; ".join(problems), problems)
    return schedule


def barriers(vocabulary: str) -> int:
    """Return how many barriers a step of vocabulary-parallel layers has, by the setting."""
    return 1 if vocabulary == "spread" else 2


def joint_problem(pipe: PipelineConfig) -> str:
    """Return what is wrong with joint vocabulary layers, which have one order: another schedule would be without effect."""
    if pipe.vocabulary != "joint" or pipe.schedule in ("1f1b", "vocab-1f1b-joint"):
        return ""
    return f"pipeline.vocabulary=joint goes with pipeline.schedule=1f1b, not {pipe.schedule!r}: use spread"


def _chain_source(pipe: PipelineConfig, span: int = 1) -> ScheduleSource:
    """Decode what cuts the model into a chain: rules, a function, or a family."""
    num_stages = len(pipe.cut) + 1 if isinstance(pipe.cut, tuple) else pipe.ranks * pipe.chunks
    if pipe.schedule == "traverse":
        return ScheduleSource(num_stages, partial(_order_by_rules, pipe, span))
    if ":" in pipe.schedule:
        return ScheduleSource(num_stages, partial(_order_of_function, pipe))
    if span > 1:
        raise ScheduleError(
            f"the loss takes {span} microbatches at once, and the stages of {pipe.schedule!r} one: set pipeline.schedule to "
            "'towers' or 'traverse'"
        )
    family = FAMILIES.get(pipe.schedule)
    takes_costs = family is not None and "costs" in family.options
    return ScheduleSource(num_stages, partial(_order_of_family, pipe), None, takes_costs, family is not None)


def _vocabulary_source(pipe: PipelineConfig) -> ScheduleSource:
    """Wrap the source of the transformer stages: its order with the passes of vocabulary-parallel layers."""
    if problem := joint_problem(pipe):
        raise ConfigError(problem)
    if pipe.vocabulary == "joint":
        return _fixed_source(generate("vocab-1f1b-joint", pipe.ranks, pipe.microbatches))
    if pipe.schedule == "traverse":
        chain = placement_named(pipe.traverse.placement, pipe.ranks, pipe.chunks)
    else:
        chain = family_named(pipe.schedule).placement(pipe.ranks, pipe.chunks)
    placement = with_vocabulary(chain, barriers=barriers(pipe.vocabulary))
    return ScheduleSource(placement.num_stages, partial(_order_around_trunk, pipe, placement), edges_to_cut(placement))


def _towers_source(pipe: PipelineConfig, span: int) -> ScheduleSource:
    placement, rules = towers_of(pipe.towers)
    placement = with_span(placement, {placement.num_stages - 1: span})
    order = partial(_order_of_towers, placement, pipe.microbatches, rules)
    return ScheduleSource(placement.num_stages, order, placement.edges)


def _order_of_family(pipe: PipelineConfig, costs: CostProfile) -> Schedule:
    family = FAMILIES.get(pipe.schedule)
    chunks = pipe.chunks if family is not None and "chunks" in family.options else None
    return generate(pipe.schedule, pipe.ranks, pipe.microbatches, chunks, costs, pipe.memory_limit)


def _order_by_rules(pipe: PipelineConfig, span: int, costs: CostProfile) -> Schedule:
    """Return the schedule of ``pipeline.traverse``. ``span``: of the last stage."""
    placement = placement_named(pipe.traverse.placement, pipe.ranks, pipe.chunks)
    placement = with_span(placement, {placement.num_stages - 1: span})
    return traverse(placement, pipe.microbatches, rules_of(pipe.traverse), costs)


def _order_of_towers(placement: Placement, microbatches: int, rules: Rules, costs: CostProfile) -> Schedule:
    return replace(traverse(placement, microbatches, rules, costs), name="towers")


def _order_of_function(pipe: PipelineConfig, costs: CostProfile) -> Schedule:
    return _require_sizes(pipe, made_by_function(pipe.schedule, pipe, costs))


def _order_around_trunk(pipe: PipelineConfig, placement: Placement, costs: CostProfile) -> Schedule:
    """Return the order of the transformer stages with the passes of the vocabulary-parallel layers that ``placement`` has."""

    def trunk_order(microbatches: int, costs: CostProfile) -> Schedule:
        return _chain_source(replace(pipe, microbatches=microbatches, memory_limit=None)).order(costs)

    mean_f_s = sum(costs.f_s[s] for s in placement.trunk) / len(placement.trunk)
    costs = replace(costs, link=Link(_TRANSFER * mean_f_s))
    name = f"vocab-{pipe.schedule}" + ("-2" if barriers(pipe.vocabulary) == 2 else "")
    return spread_vocabulary(name, trunk_order, placement, pipe.microbatches, costs)


def _require_sizes(pipe: PipelineConfig, schedule: Schedule) -> Schedule:
    """Return ``schedule``. Raises ConfigError if it is for other sizes than those of ``pipe``."""
    sizes = [
        ("ranks", schedule.num_ranks, pipe.ranks),
        ("microbatches", schedule.num_microbatches, pipe.microbatches),
    ]
    if schedule.placement.is_chain:
        sizes.append(("chunks", schedule.num_chunks, pipe.chunks))
    for what, size, setting in sizes:
        if size != setting:
            raise ConfigError(f"{pipe.schedule} has {size} {what}, and pipeline.{what} is {setting}: make them equal")
    return schedule


# -- rules, towers, functions ----------------------------------------------------------------------------------------------


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
    """Return the rules that the settings describe.

    Raises:
        ScheduleError: a value is none of the rules'.
    """
    return Traversal(**{f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "placement"})


def towers_of(settings: Mapping[str, Any]) -> tuple[Placement, Rules]:
    """Return the placement of ``pipeline.towers``, and the rules of each tower's ranks.

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
    """Return what the function ``module:function`` makes of those of ``ranks``, ``microbatches``, ``chunks``, ``costs`` that it
    takes.

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
