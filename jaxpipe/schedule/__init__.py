"""This package says when: schedules as plain values, their checker, simulator and generators. It imports neither JAX nor NumPy.

What finds when is :mod:`jaxpipe.search`. Its public names are names of this package too, found when they are first asked for,
as families are; everything else is light and imported here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxpipe.schedule import plugins
from jaxpipe.schedule.check import check_schedule, find_problems
from jaxpipe.schedule.costs import CostProfile, HostLink, Link
from jaxpipe.schedule.deps import DependencyGraph, Transfer, build_graph
from jaxpipe.schedule.files import read_costs, read_schedule, read_timeline, write_costs, write_schedule, write_timeline
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
    towers,
    v_shape,
    wave,
    with_shared,
    with_span,
    with_vocabulary,
)
from jaxpipe.schedule.rules import Traversal, traverse
from jaxpipe.schedule.simulate import StepsTimeline, replay, simulate, simulate_steps
from jaxpipe.schedule.text import parse_schedule
from jaxpipe.schedule.timeline import Event, MemoryCurve, Timeline

if TYPE_CHECKING:
    from jaxpipe.schedule.families import FAMILIES, VOCABULARY_FAMILIES, Family, generate, register_family
    from jaxpipe.schedule.families.family import family
    from jaxpipe.schedule.families.one_f_one_b import eager_one_f_one_b, gpipe, one_f_one_b, zb_h1, zb_h2

__all__ = ["Action", "Braid", "MemoryEffect", "OpSpec", "Schedule", "Slot", "Wait"]
__all__ += ["op_spec", "register_op", "registered_ops"]
__all__ += ["Placement", "bidirectional", "chain", "circular", "explicit", "one_to_one"]
__all__ += ["towers", "v_shape", "wave", "with_shared", "with_span", "with_vocabulary"]
__all__ += ["CostProfile", "DependencyGraph", "HostLink", "Link", "Transfer", "build_graph"]
__all__ += ["check_schedule", "find_problems", "parse_schedule"]
__all__ += ["read_costs", "read_schedule", "read_timeline", "write_costs", "write_schedule", "write_timeline"]
__all__ += ["Event", "MemoryCurve", "StepsTimeline", "Timeline", "replay", "simulate", "simulate_steps"]
__all__ += ["Traversal", "traverse"]
__all__ += ["FAMILIES", "VOCABULARY_FAMILIES", "Family", "family", "generate", "register_family"]
__all__ += ["eager_one_f_one_b", "gpipe", "one_f_one_b", "zb_h1", "zb_h2"]

_SEARCH = (
    "best_schedule",
    "interleaved_one_f_one_b",
    "lower_bound",
    "rank_lower_bounds",
    "span_lower_bound",
    "zero_bubble",
)
"""Names of :mod:`jaxpipe.search` that are found here, too."""
__all__ += _SEARCH


def __getattr__(name: str) -> Any:
    """Import a name of ``__all__`` that is not imported above."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(plugins.SEARCH if name in _SEARCH else f"{__name__}.families"), name)
