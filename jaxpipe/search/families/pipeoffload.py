"""Interleaved orders that hold less: GIS by smaller groups; PipeOffload and AdaOffload, whose offloads
:mod:`~jaxpipe.schedule.passes.offload` places.

**Generalized interleaved schedules** (GIS): interleaved 1F1B with B and W apart, a shorter warm-up, and groups of any size.

Source: `pipeoffload.txt` section 3 (GIS, G(T), GIS-H), figures 5 and 6. A rank's time is cut into turns of F, B, W. The
microbatches of a *group* go through a rank's chunks in turn, as in interleaved 1F1B; the smaller the group, the sooner its B
follow its F and the less a rank holds. Rank r runs (v − 1)g + p − r F before its first B, so rank 0 holds (v − 1)g + p chunks
of activations, 1/v of its share each. A group needs ⌈p/2⌉ microbatches: with fewer, F and B have not come round all ranks
when the next chunk of the group is due, and every round waits. That is counted with F = B = W; where B alone takes more than
half of F + B + W, rounds wait in groups of ⌈p/2⌉ too, and a larger group is faster.

The paper runs each W right after its B and leaves the gaps. Here gaps are filled with real costs, at no more memory, and the
result is kept if it is no worse than the paper's order in makespan, longest span and peak at once. With F = B = W that
halves GIS's idle time of p − 1 F and p − 1 B of a chunk.

The authors leave the last group short when m is not a multiple of it. Here the first or the second may be short instead, or
all groups smaller and even; real costs decide.

**PipeOffload**: GIS-H's building block repeated uniformly, with none, half (PO-H) or all (PO-F) of each rank's chunks
offloaded.

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

**AdaOffload**: PipeOffload with as many F before the first B as memory allows once activations leave for the host.

Source: `optpipe.txt` section 4.1.3 and appendix D (algorithm 1). The listing there contradicts itself (the loop breaks before
its body; F waits for the whole stage before it; the end of an F is used before it is set). The reading taken here:

1. *Fill*. Where a rank waits, F's from later in PipeOffload's order move up, more of them or fewer. F's in the fill phase are
   not held back until their predecessor's O has ended, as the listing has it: an order can't say that. Instead a fill that
   needs more memory than the limit, with O and L in place, is not taken.
2. *Then PipeOffload's rules*: its order, B and W apart ("allow overlap between B and W"): W's fill later waits, with at most
   some number of them outstanding, since what W needs does not leave.
3. *Tight memory or a slow host*: the shortest of microbatches at longer intervals, down to one at a time, with F moved up once
   the B's have begun (an H200's link, k = 2.4, limit of 2 for 4 ranks: 14% less than without), and the plain order with B's
   that wait for their L, or with F's that wait for an O: the listing's tolerance T of delays, as much as is needed.

The first two are made, re-timed with the real costs, and tried from the shortest on; the first within the limit on every rank
is taken. Their O and L cost no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.passes.offload import Plans, offload, peak_of
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import CodeRows, Problem
from jaxpipe.schedule.simulate import simulate
from jaxpipe.search.blocks.block import BuildingBlock, interleaved_block, repeat
from jaxpipe.search.list_schedule.fillers import AS_GIVEN, GapFiller, Phases, Recipes, Rule, improve_order
from jaxpipe.search.list_schedule.policies import full_limit
from jaxpipe.search.retime import SLACK, Draft, peaks


@family(
    "gis",
    "interleaved 1F1B with B and W apart and a shorter warm-up (--chunks, default 2): 1F1B's memory",
    "pipeoffload.txt §3.1",
    placement=circular,
    peak_activations=lambda p, m, v: min(p, m),
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 1) * f / v if m % p == 0 and f == b == w else None,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def gis(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """GIS: groups of p microbatches, for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F1b     B0b W0b F2- B1b W1b F3- B0- W0- F2b B1- W1- F3b B2b W2b B3b B2- B3- W3b W2- W3-
        rank 1 |    F0- F1- F0b B0b F1b B1b B0- W0b F2- B1- W1b F3- W0- F2b B2b W1- F3b B3b B2- B3- W2b W3b W2- W3-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _in_groups("gis", Problem.of(circular(ranks, chunks), microbatches, costs), ranks)


@family(
    "gis-g",
    "GIS in groups of p/2 to p microbatches (--group): the smaller, the less memory and the longer the warm-up",
    "pipeoffload.txt §3.2, G(T)",
    placement=circular,
    picture={"ranks": 4, "microbatches": 3, "chunks": 2, "group": 3},
)
def gis_g(
    ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None, group: int | None = None
) -> Schedule:
    """G(T): groups of ``group`` microbatches (default p), from ⌈p/2⌉ to p::

        rank 0 |F0- F1- F2-     F0b F1b F2b                 B0b W0b B1b W1b B2b B0- B1- W2b B2- W0- W1- W2-
        rank 1 |    F0- F1- F2-     F0b F1b F2b         B0b W0b B1b W1b B2b B0- B1- W2b B2- W0- W1- W2-
        rank 2 |        F0- F1- F2-     F0b F1b F2b B0b W0b B1b W1b B2b B0- B1- W2b B2- W0- W1- W2-
        rank 3 |            F0- F1- F2-     F0b B0b F1b B1b F2b B2b B0- B1- W0b B2- W1b W2b W0- W1- W2-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, ``group`` is outside its range, or the costs are for
            another number of stages.
    """
    g = ranks if group is None else group
    least = smallest_group(ranks)
    if not least <= g <= ranks:
        raise ScheduleError(f"gis-g: a group of {g} does not suit {ranks} ranks; use a group from {least} to {ranks}")
    return _in_groups("gis-g", Problem.of(circular(ranks, chunks), microbatches, costs), g)


@family(
    "gis-h",
    "GIS in groups of p/2, the smallest: towards half of 1F1B's memory with more chunks",
    "pipeoffload.txt §3.2, GIS-H",
    placement=circular,
    peak_activations=lambda p, m, v: min((v - 1) * smallest_group(p) + p, v * m) / v if m >= p else None,
    picture={"ranks": 3, "microbatches": 4, "chunks": 2},
)
def gis_h(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """GIS-H: the smallest groups, ⌈p/2⌉ microbatches::

        rank 0 |F0- F1- F2- F0b F1b             B0b W0b F3- B1b W1b F2b B0- W0- F3b B1- W1- B2b W2b B3b B2- W3b B3- W2- W3-
        rank 1 |    F0- F1- F2- F0b F1b     B0b W0b B1b B0- F3- W1b W0- F2b B1- W1- F3b B2b W2b B3b B2- W3b B3- W2- W3-
        rank 2 |        F0- F1- F2- F0b B0b F1b B1b B0- W0b W1b F3- B1- W0- F2b B2b W1- F3b B3b B2- W2b B3- W3b W2- W3-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _in_groups("gis-h", Problem.of(circular(ranks, chunks), microbatches, costs), smallest_group(ranks))


def smallest_group(ranks: int) -> int:
    """Return the fewest microbatches that may go through a chunk in turn: ⌈p/2⌉.

    From F of a chunk to F of the next are 3g cells on rank 0, and as many from B to B. These 6g must hold a trip of F and one
    of B through the ranks: p − 1 steps of 3 cells, one F step and one B step, and the last F and B. So 6g >= 3p − 1.
    """
    return -(-ranks // 2)


def group_block(ranks: int, chunks: int, group: int) -> BuildingBlock:
    """Return the building block of G(T): a group runs all its microbatches through one chunk, then through the next."""
    return interleaved_block(ranks, range(0, chunks * group, group), group=group)


def _in_groups(name: str, problem: Problem, group: int) -> Schedule:
    return problem.schedule(name, improve_order(problem, [*_orders(problem, group)]).rows)


def _orders(problem: Problem, group: int) -> Iterator[CodeRows]:
    """Yield the paper's order; where its last group is short, also those with the first or second short, or all smaller."""
    p, m, chunks = problem.num_ranks, problem.num_microbatches, problem.placement.num_chunks
    block, missing = group_block(p, chunks, group), -m % group
    yield repeat(block, problem)
    if missing:
        for first in (0, group) if m > 2 * group else (0,):
            yield repeat(block, problem, [*range(first), *[-1] * missing, *range(first, m)])
        # as many groups, all about equally small
        even = -(-m // -(-m // group))
        if smallest_group(p) <= even < group:
            yield repeat(group_block(p, chunks, even), problem)


_RECIPES: Recipes = (  # W soon after its B: what a W needs stays on the device
    ("real", Rule(lazy=False, w_gap=0.0)),
    ("real", Rule(lazy=False, backward=False, w_gap=0.0)),
    ("real", Rule(lazy=False, forward=False, w_gap=0.0)),
    ("real", Rule(lazy=False)),
    ("real", Rule(lazy=False, backward=False)),
    ("real", Phases(AS_GIVEN, AS_GIVEN, Rule(forward=False, backward=False, w_gap=0.0, backlog=1))),
)
_TRIES = 4
_MOST_OVER_PO = 1.03  # what a link fast enough for the copies should cost, at most


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
    return problem.schedule("po", improve_order(problem, [po_rows(problem)]).rows)


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

    Where the number of chunks is odd, every other microbatch of the middle one leaves. ``costs``: seconds of O and L, and
    whether the host lane is shared (default: no time at all). With a lane for each direction and m >= 4p, the peak
    rises by up to two stages' activations where the order would otherwise take more than 3% longer than ``po``'s.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _offload_order("po-h", Problem.of(circular(ranks, chunks), microbatches, costs), costs, 0.5)


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
    return _offload_order("po-f", Problem.of(circular(ranks, chunks), microbatches, costs), costs, None)


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


def _offload_order(name: str, problem: Problem, costs: CostProfile | None, fraction: float | None) -> Schedule:
    """PipeOffload's order offloaded, or the shortest of others whose peak is no higher once they are offloaded; ``po``'s is one
    of them, which counts where the host is so slow that nothing leaves. Where ``po-h`` of m >= 4p would take
    more than 3% longer than ``po``, it is the lowest peak of orders that do not."""
    costs = costs or CostProfile.uniform(problem.num_replicas, chunks=problem.placement.num_chunks)
    start = po_rows(problem)
    po = improve_order(problem, [start])
    offloaded = offload(problem.schedule(name, start), costs, fraction=fraction)
    orders, peak = _shorter_orders(problem, start, po), max(offloaded.peak_after)
    # Each is offloaded at no cost in time.
    plans = (Plans(problem.schedule(name, rows), costs, fraction) for rows in orders)
    within = (plan.free_within(peak) for plan in plans)
    schedule = next((order for order in within if order is not None), offloaded.schedule)
    # PO-F promises memory first. The lowest peak is the paper's claim, in its setting: copies of no time or one shared lane.
    # With fewer microbatches the ramps cost more than 3% at any peak.
    is_paper_setting = fraction is None or costs.host.mode == "shared" or not any(costs.offload_s)
    if is_paper_setting or problem.num_microbatches < 4 * problem.num_ranks:
        return schedule
    enough_s = _MOST_OVER_PO * simulate(problem.schedule(name, po.rows), costs).makespan
    if simulate(schedule, costs).makespan <= enough_s:
        return schedule
    # p=8, m=32: 1.06 times as long as po with 2.5 stages' activations, 1.03 with 3 (po holds 6.5). In 45 problems of p 4 to 8
    # all 20 recipes gave peaks lower by 2.8% on average and took 1.6 times as long.
    filled = {draft.key(): draft.rows for draft in GapFiller(problem).drafts(start, po.peak, 8)}
    plans = (Plans(problem.schedule(name, rows), costs, fraction) for rows in (po.rows, *orders, *filled.values()))
    free = [plan.free(plan.lowest) for plan in plans if plan.before.makespan <= enough_s]
    return min(free, key=lambda offloaded: (peak_of(offloaded[1]), offloaded[1].makespan))[0]


def _shorter_orders(problem: Problem, start: CodeRows, po: Draft) -> list[CodeRows]:
    """Return orders with gaps filled that are shorter than PipeOffload's in makespan or longest span and longer in neither.

    ``start``: PipeOffload's uniform order; ``po``: the family's, improved from it."""
    gap_filler = GapFiller(problem)
    anchor = gap_filler.retimer.draft(start)
    assert anchor is not None, "PipeOffload's order deadlocks"
    rows_by_key: dict[tuple[float, float, float], CodeRows] = {}
    for draft in (*gap_filler.drafts(start, anchor.peak, len(_RECIPES), _RECIPES), po):
        # as short with less memory is no reason to leave the paper's order
        if draft.no_worse_than(anchor) and draft.key()[:2] < anchor.key()[:2]:
            rows_by_key.setdefault(draft.key(), draft.rows)
    return [rows_by_key[key] for key in sorted(rows_by_key)[:_TRIES]]


_RULES = [Rule(backward=False, w_gap=0.0, lazy=most > 0, backlog=most) for most in (0, 1, 2, 4, 8, float("inf"))]
_FILLS: Recipes = [("real", rule) for rule in _RULES]
_ONLY_W: Recipes = [("real", replace(rule, forward=False)) for rule in _RULES]
_STEADY_FILLS = [  # and the part of PipeOffload's memory that they may hold
    (Phases(AS_GIVEN, rule, rule), part) for rule in _RULES[1::-1] for part in (1.0, 0.75, 0.5)
]
_INTERVALS = (1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, float("inf"))
_MOST_PLANNED = 16
_SMALL = 20_000
"""Actions: of more, fewer orders at longer intervals are tried, and none that waits for copies."""
_gap_filler = lru_cache(maxsize=4)(GapFiller)
"""Fillers are kept, as they do not depend on the memory limit and a search asks for many limits."""


@family(
    "ada-offload",
    "PipeOffload with the densest fill phase that a memory limit allows (--memory-limit, default p)",
    "optpipe.txt §4.1.3, appendix D",
    placement=circular,
    picture={"ranks": 3, "microbatches": 5, "memory_limit": 2},
)
def ada_offload(
    ranks: int, microbatches: int, chunks: int = 1, costs: CostProfile | None = None, memory_limit: float | None = None
) -> Schedule:
    """AdaOffload under ``memory_limit`` (default p, 1F1B's peak), in units of one rank's share of one microbatch::

        rank 0 |F0 F1 F2       B0 W0 F3 B1 W1 F4 B2 W2 B3 W3    B4 W4
        rank 1 |   F0 F1 F2 B0 W0 B1 W1 F3 B2 W2 F4 B3 W3    B4 W4
        rank 2 |      F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 F4 B4 W3 W4

    ``costs``: seconds of O and L, and whether the host lane is shared (default: no time at all).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, the costs are for another number of stages, or nothing
            fits the limit; names one that works.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    limit = full_limit(problem) if memory_limit is None else memory_limit
    if not limit > 0:
        raise ScheduleError(f"ada-offload: memory limit of {limit:g}; want activations per rank, above 0")
    costs = costs or CostProfile.uniform(problem.num_replicas, chunks=chunks)
    plain, without_residuals = po_rows(problem), replace(problem, held=(0.0,) * problem.num_replicas)

    def may_fit(rows: CodeRows) -> bool:
        """Return whether an order fits where all that may leave is away as soon as it is made."""
        return max(peaks(without_residuals, rows), default=0.0) <= limit * SLACK

    def plans(rows: CodeRows) -> Plans:
        return Plans(problem.schedule("ada-offload", rows), costs)

    rows_by_key = {draft.key(): draft.rows for draft in _dense_orders(problem, plain)}
    # shortest first, and only those that could fit: planning offloads is what takes long
    fitting = filter(may_fit, (rows_by_key[key] for key in sorted(rows_by_key)))
    for rows in islice(fitting, _MOST_PLANNED):
        if (schedule := plans(rows).free_within(limit, sparing=True)) is not None:
            return schedule
    shortest, best = float("inf"), None
    for draft in _sparse_orders(problem, plain, limit, may_fit):
        if draft.makespan < shortest and (schedule := plans(draft.rows).free_within(limit, sparing=True)) is not None:
            shortest, best = draft.makespan, schedule
    if sum(map(len, plain)) <= _SMALL:
        waiting = plans(plain)
        for answer in (waiting.delayed(limit), waiting.paged(limit)):
            if answer is not None and answer[1].makespan < shortest:
                best, shortest = answer[0], answer[1].makespan
    if best is not None:
        return best
    # the leanest order, one microbatch at a time, says which limit would do
    leanest = plans(_at_intervals(problem)[-1])
    raise ScheduleError(
        f"ada-offload: no order of {microbatches} microbatches on {ranks} ranks was found within a memory limit of {limit:g}; "
        f"use {peak_of(leanest.free(leanest.lowest)[1]):g} or more"
    )


def _at_intervals(problem: Problem) -> list[CodeRows]:
    """Return PipeOffload's order with microbatches at ever longer intervals; in the last one ends before the next begins."""
    block = po_block(problem.num_ranks, problem.placement.num_chunks)
    alone = max(map(max, block.weight)) + 1
    intervals = sorted({round(min(block.interval * x, alone)) for x in _INTERVALS})
    return [repeat(replace(block, interval=interval), problem) for interval in intervals]


def _sparse_orders(
    problem: Problem, plain: CodeRows, limit: float, may_fit: Callable[[CodeRows], bool]
) -> Iterator[Draft]:
    """Yield orders of :func:`_at_intervals`, as they are and with the steady phase filled; ends two intervals after the first
    that could fit without any offload."""
    gap_filler, in_flight, after = _gap_filler(problem), max(peaks(problem, plain)), 0
    fills = _STEADY_FILLS if sum(map(len, plain)) <= _SMALL else _STEADY_FILLS[:1]
    for rows in _at_intervals(problem):
        orders = [rows, *(gap_filler.fill(rows, in_flight * part, rule) for rule, part in fills)]
        drafts = [draft for draft in map(gap_filler.retimer.draft, orders) if draft is not None]
        yield from sorted((draft for draft in drafts if may_fit(draft.rows)), key=Draft.key)
        after += drafts[0].peak <= limit * SLACK
        if after == 2:
            return


def _dense_orders(problem: Problem, plain: CodeRows) -> Iterator[Draft]:
    """Yield PipeOffload's order, and the same with waits filled: more F in flight, more or fewer W outstanding."""
    gap_filler = _gap_filler(problem)
    draft = gap_filler.retimer.draft(plain)
    assert draft is not None, "PipeOffload's order deadlocks"
    yield draft
    for fill, recipes in ((1.0, _ONLY_W), (1.0, _FILLS), (1.5, _FILLS), (2.0, _FILLS)):
        yield from gap_filler.drafts(plain, draft.peak * fill, len(recipes), recipes)
