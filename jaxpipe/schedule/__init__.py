"""When: schedules as plain values, their checker, simulator and generators. Imports neither JAX nor NumPy.

Families are loaded when first asked for; everything else is light and imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpipe.schedule.bounds import lower_bound, rank_lower_bounds, span_lower_bound
from jaxpipe.schedule.check import check_schedule, find_problems
from jaxpipe.schedule.costs import CostProfile, HostLink, Link
from jaxpipe.schedule.deps import DependencyGraph, Transfer, build_graph
from jaxpipe.schedule.files import (
    read_costs,
    read_schedule,
    read_timeline,
    write_costs,
    write_schedule,
    write_timeline,
)
from jaxpipe.schedule.ir import (
    Action,
    Braid,
    MemoryEffect,
    OpSpec,
    Schedule,
    Slot,
    Wait,
    op_spec,
    register_op,
    registered_ops,
)
from jaxpipe.schedule.placement import (
    Placement,
    bidirectional,
    chain,
    circular,
    explicit,
    one_to_one,
    v_shape,
    wave,
    with_shared,
)
from jaxpipe.schedule.simulate import replay, simulate
from jaxpipe.schedule.text import parse_schedule
from jaxpipe.schedule.timeline import Event, MemoryCurve, Timeline

if TYPE_CHECKING:
    from jaxpipe.schedule.explore import best_schedule
    from jaxpipe.schedule.families import (
        FAMILIES,
        Family,
        eager_one_f_one_b,
        generate,
        gpipe,
        interleaved_one_f_one_b,
        one_f_one_b,
        register_family,
        zb_h1,
        zb_h2,
        zero_bubble,
    )

_FROM_FAMILIES = (
    "FAMILIES",
    "Family",
    "eager_one_f_one_b",
    "generate",
    "gpipe",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "register_family",
    "zb_h1",
    "zb_h2",
    "zero_bubble",
)


def __getattr__(name: str) -> Any:
    if name == "best_schedule":
        from jaxpipe.schedule import explore

        return explore.best_schedule
    if name not in _FROM_FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxpipe.schedule import families

    return getattr(families, name)


__all__ = [
    "FAMILIES",
    "Action",
    "Braid",
    "CostProfile",
    "DependencyGraph",
    "Event",
    "Family",
    "HostLink",
    "Link",
    "MemoryCurve",
    "MemoryEffect",
    "OpSpec",
    "Placement",
    "Schedule",
    "Slot",
    "Timeline",
    "Transfer",
    "Wait",
    "best_schedule",
    "bidirectional",
    "build_graph",
    "chain",
    "check_schedule",
    "circular",
    "eager_one_f_one_b",
    "explicit",
    "find_problems",
    "generate",
    "gpipe",
    "interleaved_one_f_one_b",
    "lower_bound",
    "one_f_one_b",
    "one_to_one",
    "op_spec",
    "parse_schedule",
    "rank_lower_bounds",
    "read_costs",
    "read_schedule",
    "read_timeline",
    "register_family",
    "register_op",
    "registered_ops",
    "replay",
    "simulate",
    "span_lower_bound",
    "v_shape",
    "wave",
    "with_shared",
    "write_costs",
    "write_schedule",
    "write_timeline",
    "zb_h1",
    "zb_h2",
    "zero_bubble",
]
