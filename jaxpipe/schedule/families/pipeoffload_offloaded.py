"""PO-H and PO-F: PipeOffload with half, or all, of each rank's chunks offloaded to the host.

Source: `pipeoffload.txt` sections 2, 3.2 and 4.2. The order is that of :mod:`~jaxpipe.schedule.families.pipeoffload`; O and L
are placed by :mod:`~jaxpipe.schedule.passes.offload`, at no cost in time. The chunks that leave are those of the longest
lifespan, so half of the transfers take away up to three quarters of the peak.

Differs from the paper: slots on the host lane follow the real costs, and what does not fit stays on the device (their code
stops there); gaps of the order are filled where that makes it shorter and leaves the peak after offloading as it is.
"""

from __future__ import annotations

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.pipeoffload import po_rows
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.fillers import AS_GIVEN, Finisher, Phases, Recipes, Rule, shortness
from jaxpipe.schedule.passes.offload import offload
from jaxpipe.schedule.passes.plans import Plans
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import CodeRows, Problem

_RECIPES: Recipes = (  # W soon after its B: what a W needs stays on the device
    ("real", Rule(lazy=False, w_gap=0.0)),
    ("real", Rule(lazy=False, backward=False, w_gap=0.0)),
    ("real", Rule(lazy=False, forward=False, w_gap=0.0)),
    ("real", Rule(lazy=False)),
    ("real", Rule(lazy=False, backward=False)),
    ("real", Phases(AS_GIVEN, AS_GIVEN, Rule(forward=False, backward=False, w_gap=0.0, backlog=1))),
)
_TRIES = 4


@family(
    "po-h",
    "PipeOffload with the longest-lived half of the chunks offloaded",
    "pipeoffload.txt §2, §3.2, §4.2",
    placement=circular,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def pipeoffload_half(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """PO-H: the longest-lived half of each rank's chunks is offloaded; any ``ranks``, ``microbatches``, ``chunks`` >= 1::

        rank 0 |F0- F1- F0b         B0b W0b F1b B0- W0- F2- B1b W1b F2b B1- W1- F3- B2b W2b F3b B2- W2- B3b W3b B3- W3-
        rank 1 |    F0- F1- F0b B0b W0b B0- W0- F1b B1b W1b F2- B1- W1- F2b B2b W2b F3- B2- W2- F3b B3b W3b B3- W3-

    Of an odd number of chunks, every other microbatch of the middle one leaves. ``costs``: seconds of O and L, and whether
    the host lane is shared (default: no time at all).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _offloaded("po-h", ranks, microbatches, chunks, costs, 0.5)


@family(
    "po-f",
    "PipeOffload with every chunk offloaded that the host lane can take",
    "pipeoffload.txt §2, §3.2, §4.2",
    placement=circular,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def pipeoffload_full(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """PO-F: every chunk is offloaded where its lifespan and the host lane allow it; sizes as :func:`pipeoffload_half`::

        rank 0 |F0- F1- F0b         B0b W0b F1b B0- W0- F2- B1b W1b F2b B1- W1- F3- B2b W2b F3b B2- W2- B3b W3b B3- W3-
        rank 1 |    F0- F1- F0b B0b W0b B0- W0- F1b B1b W1b F2- B1- W1- F2b B2b W2b F3- B2- W2- F3b B3b W3b B3- W3-

    The peak does not grow with the number of ranks while the round trip takes at most half of F + B + W.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _offloaded("po-f", ranks, microbatches, chunks, costs, None)


def _offloaded(
    name: str, ranks: int, microbatches: int, chunks: int, costs: CostProfile | None, fraction: float | None
) -> Schedule:
    """PipeOffload's order offloaded, or a shorter one whose peak is no higher once it is offloaded."""
    placement = circular(ranks, chunks)
    if costs is None:
        costs = CostProfile.uniform(placement.num_stages, chunks=chunks)
    problem = Problem.of(placement, microbatches, costs)
    base = problem.schedule(name, po_rows(problem))
    offloaded = offload(base, costs, fraction=fraction)
    for rows in _shorter(problem):
        found = Plans(problem.schedule(name, rows), costs, fraction).free_within(max(offloaded.peak_after))
        if found is not None:
            return found
    return offloaded.schedule


def _shorter(problem: Problem) -> list[CodeRows]:
    """Orders with gaps filled that are shorter than PipeOffload's in makespan or longest span and longer in neither."""
    finisher, start = Finisher(problem), po_rows(problem)
    anchor = finisher.squeezed(start)
    assert anchor is not None, "PipeOffload's order deadlocks"
    found: dict[tuple[float, float, float], CodeRows] = {}
    for draft in finisher.drafts(start, anchor.peak, len(_RECIPES), _RECIPES):
        if draft.no_worse_than(anchor) and shortness(draft)[:2] < shortness(anchor)[:2]:
            found.setdefault(shortness(draft), draft.rows)
    return [found[key] for key in sorted(found)[:_TRIES]]
