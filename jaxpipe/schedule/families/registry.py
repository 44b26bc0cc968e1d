"""The table of schedule families, and :func:`generate`, which makes a schedule by name.

To add a family to jaxpipe: write its file beside this one (a function and a :class:`Family` value) and list the value here.
From outside: :func:`register_family`, or an entry point (:mod:`~jaxpipe.schedule.plugins`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxpipe.errors import JaxpipeError, ScheduleError
from jaxpipe.schedule import plugins
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.ada_offload import ADA_OFFLOAD
from jaxpipe.schedule.families.chimera import CHIMERA
from jaxpipe.schedule.families.dualpipe_v import DUALPIPE_V
from jaxpipe.schedule.families.family import Family, require_sizes
from jaxpipe.schedule.families.gis import GIS, GIS_G, GIS_H
from jaxpipe.schedule.families.gpipe import GPIPE
from jaxpipe.schedule.families.hanayo import HANAYO
from jaxpipe.schedule.families.interleaved import INTERLEAVED_ONE_F_ONE_B
from jaxpipe.schedule.families.interleaved_low_memory import INTERLEAVED_LOW_MEMORY
from jaxpipe.schedule.families.looped import LOOPED_BFS, LOOPED_DFS
from jaxpipe.schedule.families.one_f_one_b import EAGER_ONE_F_ONE_B, ONE_F_ONE_B
from jaxpipe.schedule.families.pipeoffload import PO
from jaxpipe.schedule.families.pipeoffload_offloaded import PO_F, PO_H
from jaxpipe.schedule.families.stp import STP, STP_MEMORY, STP_OFFLOAD
from jaxpipe.schedule.families.v_adaptive import V_ADAPTIVE
from jaxpipe.schedule.families.v_blocks import ONE_F_ONE_B_V, V_HALF, V_MIN
from jaxpipe.schedule.families.v_zb import V_ZB
from jaxpipe.schedule.families.zb_h import ZB_H1, ZB_H2
from jaxpipe.schedule.families.zb_heuristic import ZB, ZB_1P, ZB_2P
from jaxpipe.schedule.families.zb_two_thirds import ZB_TWO_THIRDS
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.lanes import collectives_exposed
from jaxpipe.schedule.placement import Placement
from jaxpipe.wording import closest

_TABLE: dict[str, Family] = {
    family.name: family
    for family in (
        GPIPE,
        ONE_F_ONE_B,
        EAGER_ONE_F_ONE_B,
        INTERLEAVED_ONE_F_ONE_B,
        INTERLEAVED_LOW_MEMORY,
        LOOPED_BFS,
        LOOPED_DFS,
        ZB_H1,
        ZB_H2,
        ZB_1P,
        ZB_2P,
        ZB,
        ZB_TWO_THIRDS,
        V_MIN,
        V_HALF,
        V_ZB,
        V_ADAPTIVE,
        ONE_F_ONE_B_V,
        GIS,
        GIS_G,
        GIS_H,
        PO,
        PO_H,
        PO_F,
        ADA_OFFLOAD,
        CHIMERA,
        HANAYO,
        DUALPIPE_V,
        STP,
        STP_MEMORY,
        STP_OFFLOAD,
    )
}
_OURS = frozenset(_TABLE)
_OPTIONS = ("chunks", "memory_limit", "group", "costs")
_NAME = re.compile(r"[^\W_][\w+-]*")


def load_installed() -> None:
    plugins.load_installed("jaxpipe.families", Family, register_family)


class _Families(Mapping[str, Family]):
    """The table, read only. Listing it, or looking for a name it lacks, first loads what installed packages add."""

    def __getitem__(self, name: str) -> Family:
        if name not in _TABLE and _NAME.fullmatch(name):  # not the name of a file
            load_installed()
        return _TABLE[name]

    def __iter__(self) -> Iterator[str]:
        load_installed()
        return iter(tuple(_TABLE))

    def __len__(self) -> int:
        load_installed()
        return len(_TABLE)


FAMILIES: Mapping[str, Family] = _Families()
"""All families by name: those listed here, of installed packages, and registered ones."""


def register_family(family: Family) -> Family:
    """Add ``family`` to :data:`FAMILIES`, where every verb and :func:`generate` find it; idempotent for an equal one.

    Raises:
        ScheduleError: its name is taken or can't be typed as one, or it has an option that nothing would give it.
    """
    if not _NAME.fullmatch(family.name):
        raise ScheduleError(
            f"family name {family.name!r}: use letters, digits, '-', '_' and '+', a letter or digit first"
        )
    if unknown := [option for option in family.options if option not in _OPTIONS]:
        raise ScheduleError(f"family {family.name!r} has the option {unknown[0]!r}; options are {', '.join(_OPTIONS)}")
    if _TABLE.setdefault(family.name, family) != family:
        raise ScheduleError(f"there is a family {family.name!r} already; choose another name")
    return family


def family_named(name: str) -> Family:
    """The family called ``name``.

    Raises:
        ScheduleError: no such family; suggests the nearest name.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise ScheduleError(
            f"unknown schedule family {name!r}{closest(str(name), FAMILIES, '.')} Known: {' '.join(FAMILIES)}"
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
) -> Schedule:
    """The schedule of the family ``name`` at these sizes.

    ``chunks``: stages per rank, for families that take it. ``costs``: one entry per stage (ranks × chunks); families of fixed
    order ignore them; those that make no braids get them with TP collectives exposed. ``memory_limit``: peak activations per
    rank in units of one rank's share of a microbatch, for families that take it. ``group``: microbatches that run in turn
    through one chunk, for families that take it.

    Raises:
        ScheduleError: unknown family, a size it doesn't work for, an option it doesn't take, costs for another number of
            stages, or (families from outside) no valid schedule of these sizes.
    """
    family = family_named(name)
    require_sizes(name, ranks=ranks, microbatches=microbatches)
    options: dict[str, Any] = {}
    if chunks is not None:
        require_sizes(name, chunks=chunks)
        if "chunks" in family.options:
            options["chunks"] = chunks
        elif chunks != family.default_chunks:
            takers = _taking("chunks")
            raise ScheduleError(
                f"{name} has {family.default_chunks} chunk(s) per rank, got {chunks}; families that take chunks: {takers}"
            )
    if memory_limit is not None:
        if "memory_limit" not in family.options:
            takers = _taking("memory_limit")
            raise ScheduleError(f"{name} takes no memory limit, got {memory_limit:g}; families that do: {takers}")
        options["memory_limit"] = memory_limit
    if group is not None:
        require_sizes(name, group=group)
        if "group" not in family.options:
            raise ScheduleError(f"{name} takes no group, got {group}; families that do: {_taking('group') or 'none'}")
        options["group"] = group
    if costs is not None:
        _match(family, ranks, chunks, costs)
        if "costs" in family.options:
            options["costs"] = costs if family.sees_collectives else collectives_exposed(costs)
    if name in _OURS:
        return family.function(ranks, microbatches, **options)
    return _made_outside(family, ranks, microbatches, family.placement(ranks, chunks or family.default_chunks), options)


def _made_outside(
    family: Family, ranks: int, microbatches: int, placement: Placement, options: Mapping[str, Any]
) -> Schedule:
    """What a family that is not ours makes: a valid schedule of ``placement``, or a line that says why not."""
    try:
        made = family.function(ranks, microbatches, **options)
    except JaxpipeError:
        raise
    except Exception as error:
        raise ScheduleError(f"{family.name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(made, Schedule):
        raise ScheduleError(f"{family.name} makes a {type(made).__name__}; want a Schedule")
    made_on = made.placement
    if (made_on.flows, made_on.edges, made.num_microbatches) != (placement.flows, placement.edges, microbatches):
        raise ScheduleError(
            f"{family.name} makes {made_on.num_stages} stages on {made_on.num_ranks} ranks ({made_on.kind}), "
            f"{made.num_microbatches} microbatches; its placement says {placement.num_stages} on {placement.num_ranks} "
            f"({placement.kind}), and {microbatches} were asked"
        )
    check_schedule(made)
    return made


def _match(family: Family, ranks: int, chunks: int | None, costs: CostProfile) -> None:
    stages = family.placement(ranks, family.default_chunks if chunks is None else chunks).num_stages
    if costs.num_stages != stages:
        raise ScheduleError(
            f"{family.name}: the costs are for {costs.num_stages} stages; {ranks} ranks need {stages}, "
            f"{stages // ranks} per rank"
        )


def _taking(option: str) -> str:
    return ", ".join(f.name for f in FAMILIES.values() if option in f.options)
