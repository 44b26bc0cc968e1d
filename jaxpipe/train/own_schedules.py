"""Schedules that are no family's: by the rules of ``[traverse]``, or made by a function that the config names."""

from __future__ import annotations

from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedule import CostProfile, Schedule, check_schedule, traverse, with_span
from jaxpipe.schedule.placement import placement_named
from jaxpipe.stage.model.reference import resolved
from jaxpipe.train.rules import rules_of
from jaxpipe.train.sections import PipelineConfig, TraverseConfig


def traversed(pipe: PipelineConfig, settings: TraverseConfig, costs: CostProfile, span: int = 1) -> Schedule:
    """The schedule of ``[traverse]``, chosen by the stages' relative costs. ``span``: of the last stage.

    Raises:
        ScheduleError: the placement has another number of chunks, or nothing can go on under the limits.
    """
    placement = placement_named(settings.placement, pipe.ranks, pipe.chunks)
    placement = with_span(placement, {placement.num_stages - 1: span})
    return traverse(placement, pipe.microbatches, rules_of(settings), costs)


def made_by_function(name: str, pipe: PipelineConfig, costs: CostProfile) -> Schedule:
    """What the function ``module:function`` makes of those of ``ranks``, ``microbatches``, ``chunks``, ``costs`` that it takes.

    Raises:
        ConfigError: there is no such function, it fails, or gives no schedule.
        ScheduleError: the schedule breaks a rule; names the function.
    """
    sizes = {"ranks": pipe.ranks, "microbatches": pipe.microbatches, "chunks": pipe.chunks, "costs": costs}
    schedule = resolved("schedule", name, {}, sizes)
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"schedule {name} returned a {type(schedule).__name__}; want a jaxpipe.schedule.Schedule")
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}", error.problems) from None
    return schedule
