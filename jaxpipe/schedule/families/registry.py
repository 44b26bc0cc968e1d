"""Find the families of this folder, and make a schedule by name (:func:`generate`).

To add a family to jaxpipe: write its file beside this one, a function under :func:`~jaxpipe.schedule.families.family.family`
(or a :class:`Family` value). From outside: the same in a module that is imported, or an entry point
(:mod:`~jaxpipe.schedule.plugins`).
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, get_args

from jaxpipe.errors import JaxpipeError, ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import (
    FAMILIES,
    SIZES,
    TABLE,
    VOCABULARY_FAMILIES,
    Family,
    register_family,
    require_sizes,
    require_stages,
)
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.lanes import collectives_exposed
from jaxpipe.schedule.tolerance import Objective
from jaxpipe.text import closest


def register_modules(package: str) -> frozenset[str]:
    """Import every module of ``package``, which registers the families that it holds; return the names of all families."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__, f"{package}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, Family):
                register_family(value)
    return frozenset(TABLE)


assert __package__
register_modules(__package__)


def is_shipped(family: Family) -> bool:
    """Return whether a family is jaxpipe's own: what it makes is checked by tests, not each time."""
    return getattr(family.function, "__module__", "").startswith("jaxpipe.")


def family_named(name: str) -> Family:
    """Return the family called ``name``.

    Raises:
        ScheduleError: no such family; suggests the nearest name.
    """
    family = FAMILIES.get(name) or VOCABULARY_FAMILIES.get(name)
    if family is None:
        names = (*FAMILIES, *VOCABULARY_FAMILIES)
        raise ScheduleError(
            f"unknown schedule family {name!r}{closest(str(name), names, '.')} Known: {' '.join(names)}"
        )
    return family


def generate(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: CostProfile | None = None,
    memory_limit: float | None = None,
    group: int | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """Return the schedule of the family ``name`` at these sizes.

    ``chunks``: stages per rank, for families that take it. ``costs``: one entry per stage (ranks × chunks); families of fixed
    order ignore them; those that make no braids get them with TP collectives exposed. ``memory_limit``: peak activations per
    rank in units of one rank's share of a microbatch, for families that take it. ``group``: microbatches that run in turn
    through one chunk, for families that take it. ``objective``: what families that choose minimise first, the makespan or the
    longest rank span (what counts where the optimizer step does not wait for the slowest rank); the others have nothing to
    choose and ignore it, as they do costs.

    Raises:
        ScheduleError: unknown family or objective, a size it doesn't work for, an option it doesn't take, costs for another
            number of stages, or (families from outside) no valid schedule of these sizes.
    """
    family = family_named(name)
    explicit_options = {"chunks": chunks, "memory_limit": memory_limit, "group": group}
    options: dict[str, Any] = {option: value for option, value in explicit_options.items() if value is not None}
    require_sizes(name, ranks=ranks, microbatches=microbatches, **{k: options[k] for k in SIZES if k in options})
    # the one number of chunks that a family has may be said aloud: configs and the CLI pass it for every family
    if "chunks" not in family.options and chunks == family.default_chunks:
        options.pop("chunks", None)
    for option, value in options.items():
        if option not in family.options:
            has = f"has {family.default_chunks} chunk(s) per rank" if option == "chunks" else f"takes no {option}"
            takers = ", ".join(f.name for f in FAMILIES.values() if option in f.options) or "none"
            raise ScheduleError(f"{name} {has.replace('_', ' ')}, got {value:g}; families that take {option}: {takers}")
    if costs is not None:
        require_stages(family, ranks, chunks, costs)
        if "costs" in family.options:
            options["costs"] = costs if family.sees_collectives else collectives_exposed(costs)
    if objective not in get_args(Objective):
        raise ScheduleError(f"unknown objective {objective!r}; there are {', '.join(get_args(Objective))}")
    if "objective" in family.options:
        options["objective"] = objective
    if is_shipped(family):
        return family.function(ranks, microbatches, **options)
    return _made_outside(family, ranks, microbatches, chunks, options)


def _made_outside(
    family: Family, ranks: int, microbatches: int, chunks: int | None, options: Mapping[str, Any]
) -> Schedule:
    """Return what a custom family makes: a valid schedule of its placement, or a line that says why not."""
    placement = family.placement(ranks, chunks or family.default_chunks)
    try:
        schedule = family.function(ranks, microbatches, **options)
    # its own words about its input go to whoever asked, as they are
    except JaxpipeError:
        raise
    except Exception as error:
        raise ScheduleError(f"{family.name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{family.name} makes a {type(schedule).__name__}; want a Schedule")
    # kind is a name for people, so it may differ; what runs where and what feeds what may not
    made_on = schedule.placement
    if (made_on.flows, made_on.edges, schedule.num_microbatches) != (placement.flows, placement.edges, microbatches):
        raise ScheduleError(
            f"{family.name} makes {made_on.num_stages} stages on {made_on.num_ranks} ranks ({made_on.kind}), "
            f"{schedule.num_microbatches} microbatches; its placement says {placement.num_stages} on {placement.num_ranks} "
            f"({placement.kind}), and {microbatches} were asked"
        )
    check_schedule(schedule)
    return schedule


def cheap_first(families: Iterable[Family]) -> list[Family]:
    """Sort fixed orders before those that search, those that search under a limit last."""
    return sorted(families, key=lambda f: (("memory_limit" in f.options), ("costs" in f.options)))
