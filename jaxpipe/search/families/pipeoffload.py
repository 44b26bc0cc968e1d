"""PipeOffload: GIS-H's building block repeated uniformly, with none, half (PO-H) or all (PO-F) of each rank's chunks offloaded.

Source: `pipeoffload.txt` sections 2, 3.2 and 4.2. Each microbatch comes v turns (of F, B, W) after the one before, where GIS
runs a group chunk by chunk. Its chunks are ⌈p/2⌉ turns apart on a rank, as in GIS-H (more where the costs need it), and one
turn more where two chunks would otherwise want the same turn, modulo v: the paper's "minor modifications to prevent
collisions".

What a chunk adds to the peak is then proportional to its lifespan: chunk c lives about (v − 1 − c)p + p turns. The longer-lived
half holds three quarters of the peak when v is large, so offloading it leaves a quarter.
O and L are placed by :mod:`~jaxpipe.schedule.passes.offload`, at no cost in time.

Differs from the paper: slots on the host lane follow the real costs, and what does not fit stays on the device (their code
stops there); gaps of the order are filled where that makes it shorter and leaves the peak (after offloading, if there is any)
as it is.
"""

from __future__ import annotations

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.passes.offload import offload
from jaxpipe.schedule.passes.plans import Plans
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import CodeRows, Problem
from jaxpipe.search.blocks.block import BuildingBlock, repeat
from jaxpipe.search.families.gis import interleaved_block, smallest_group
from jaxpipe.search.list_schedule.fillers import AS_GIVEN, GapFiller, Phases, Recipes, Rule, improved

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
    "po",
    "PipeOffload's order without offload: GIS-H's block, one microbatch after the other",
    "pipeoffload.txt §2, §3.2",
    placement=circular,
    picture={"ranks": 3, "microbatches": 4, "chunks": 2},
)
def pipeoffload(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """PipeOffload without offload, for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F2- F0b F1b F2b         B0b W0b F3- B1b B0- B2b W1b F3b B1- W0- B2- W2b B3b W1- W2- B3- W3b W3-
        rank 1 |    F0- F1- F2- F0b F1b F2b B0b W0b B1b B0- F3- B2b W1b W0- B1- F3b B2- W2b B3b W1- W2- B3- W3b W3-
        rank 2 |        F0- F1- F2- F0b B0b F1b B1b B0- F2b B2b W0b F3- B1- B2- W1b F3b B3b W0- W2b B3- W1- W2- W3b W3-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    return problem.schedule("po", improved(problem, [po_rows(problem)]).rows)


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
    return _offloaded("po-h", Problem.of(circular(ranks, chunks), microbatches, costs), costs, 0.5)


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
    return _offloaded("po-f", Problem.of(circular(ranks, chunks), microbatches, costs), costs, None)


def po_rows(problem: Problem) -> list[list[int]]:
    """Return the uniform order itself, each W right after its B and gaps left open: what offloads are placed on.

    ``problem``: on :func:`~jaxpipe.schedule.placement.circular`. Filling gaps makes activations live longer, which is free at
    the peak of this order but not at the peak that is left after offloading.
    """
    chunks = problem.num_replicas // problem.num_ranks
    return repeat(po_block(problem.num_ranks, chunks, shortest_distance(problem)), problem)


def po_block(ranks: int, chunks: int, distance: int | None = None) -> BuildingBlock:
    """Return the building block of one microbatch, whose chunks are ``distance`` turns apart or a few more (default: ⌈p/2⌉)."""
    turns = [0]
    while len(turns) < chunks:
        turn = turns[-1] + (smallest_group(ranks) if distance is None else distance)
        # two chunks of one residue would take the same turns of different microbatches
        while any((turn - other) % chunks == 0 for other in turns):
            turn += 1
        turns.append(turn)
    return interleaved_block(ranks, turns)


def shortest_distance(problem: Problem) -> int:
    """Return the fewest turns between the chunks of a microbatch for which F and B come round all ranks in time, with real
    costs.

    ⌈p/2⌉, or more (up to p) where F or B is so large a part of F + B + W that p of them take longer than that many turns of
    the busiest rank: then a shorter distance costs more time than 1F1B takes. Transfers are left out.
    """
    p = problem.num_ranks
    turn_s = [0.0] * p
    for r, f, b, w in zip(problem.rank, problem.f_s, problem.b_s, problem.w_s, strict=True):
        turn_s[r] += f + b + w
    distance = smallest_group(p)
    round_s = max(sum(problem.f_s), sum(problem.b_s)) * (1 - 1e-9)
    while distance < p and distance * max(turn_s) < round_s:
        distance += 1
    return distance


def _offloaded(name: str, problem: Problem, costs: CostProfile | None, fraction: float | None) -> Schedule:
    """PipeOffload's order offloaded, or the shortest of others whose peak is no higher once they are offloaded; ``po``'s is one
    of them, which counts where the host is so slow that nothing leaves."""
    costs = costs or CostProfile.uniform(problem.num_replicas, chunks=problem.placement.num_chunks)
    offloaded = offload(problem.schedule(name, po_rows(problem)), costs, fraction=fraction)
    plans = (Plans(problem.schedule(name, rows), costs, fraction) for rows in _shorter(problem))
    within_peak = (plan.free_within(max(offloaded.peak_after)) for plan in plans)
    return next((x for x in within_peak if x is not None), offloaded.schedule)


def _shorter(problem: Problem) -> list[CodeRows]:
    """Return orders with gaps filled that are shorter than PipeOffload's in makespan or longest span and longer in neither."""
    gap_filler, start = GapFiller(problem), po_rows(problem)
    anchor = gap_filler.retimer.draft(start)
    assert anchor is not None, "PipeOffload's order deadlocks"
    rows_by_key: dict[tuple[float, float, float], CodeRows] = {}
    for draft in (*gap_filler.drafts(start, anchor.peak, len(_RECIPES), _RECIPES), improved(problem, [start])):
        # as short with less memory is no reason to leave the paper's order
        if draft.no_worse_than(anchor) and draft.key()[:2] < anchor.key()[:2]:
            rows_by_key.setdefault(draft.key(), draft.rows)
    return [rows_by_key[key] for key in sorted(rows_by_key)[:_TRIES]]
