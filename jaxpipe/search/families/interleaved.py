"""Known orders of several chunks a rank, improved with real costs: interleaved 1F1B, looped pipelines, Chimera, Hanayo,
DualPipe-V; GIS; PipeOffload and AdaOffload, whose offloads :mod:`~jaxpipe.schedule.passes.offload` places.

**Interleaved 1F1B**: each rank runs v chunks, stages dealt round-robin, so the pipeline fills v times faster.

Source: Narayanan et al. 2021 (Megatron-LM, section 2.2.2); `controllable-memory.txt` appendix H, figure 15a (the official,
non-uniform repeat). Microbatches go through in groups of p: a rank runs a group on its first chunk, then on its second, …

Megatron asks for m divisible by p. Here any m works: the schedule is that of the next multiple of p with the missing
microbatches left out. Leaving out whole microbatches keeps every dependency satisfied, so it can't deadlock and is never slower
than the full multiple. Which to leave out is tried with real costs: the start of the first group, or one or more of every group
(shorter groups bring the first backwards forward; 0.7% on average and up to 4.5% in 120 random problems, where the end of the
last group never won).

With less memory: the same bubble with p − 1 chunks less.
Source: `controllable-memory.txt` appendix I, figure 16c ("a variation of interleaved 1F1B with the same bubble rate but lower
memory"). The figure is lost in the text that this was made from; the block here is reconstructed from that sentence and may
differ from the drawn one. Time goes in turns of three cells, F then BW. F of chunk c runs in turn cp of rank 0 and moves on
one cell per rank, so it comes round just before the next chunk's turn. BW of the last chunk follows its F on the last rank
at once and comes up two cells per rank, that is, one turn per rank later and one cell earlier within the turn, as F moves:
F keeps the first cell of a rank's turns, BW the other two, and nothing ever meets. Chunks of B are p turns apart as well.

A rank holds vp chunks at most, p shares, where interleaved 1F1B holds (v + 1)p − 1 chunks. Less is not possible at this
makespan: with one chunk less every schedule is 3 cells longer (:func:`~jaxpipe.search.bounds.lower_bound`; a test).

**Looped pipelines** have stages dealt round-robin over the ranks, microbatches sent round the loop breadth-first or
depth-first. Source: Lamy-Poirier 2023 ("Breadth-first pipeline parallelism", arXiv 2211.05953), section 4; depth-first is his
name for the interleaving of Narayanan et al. 2021. Breadth-first sends all microbatches through a chunk before the next chunk
starts: every activation is kept, but a chunk's parameters are needed in one go (good with sharded parameters), its gradients
are complete early, and any m works without groups. Depth-first prefers the microbatch that is furthest.

**Chimera and Hanayo** are made of basic units: p microbatches that fill all ranks without a gap, one unit after another.

Li & Hoefler 2021 (section 3, "direct concatenation") draw a unit on a grid where F and BW of a chunk take one column each.
Microbatches of a chain start 2 columns apart, and a unit starts 2pv columns after the one before, exactly when its columns
are free. That holds for two chains of even length in opposite directions (Chimera) and for one chain that runs down and up v
times (Hanayo); with odd p two chains do meet in a column, and the grid then gives only the order. By column, everything that
an action waits for comes before it, so the order runs at any size. Units may be short.

Where BW takes longer than F a gap stays between units; it is closed as far as
:func:`~jaxpipe.search.list_schedule.fillers.improve_order` finds a way. Forward doubling (pairs of microbatches) is not made.

Chimera (Li & Hoefler 2021, arXiv 2107.06925, section 3): even microbatches go down the ranks, odd ones up, so every rank holds
two stages and the parameters are held twice: the replicas' gradients are summed at the end of the step (not in the schedule).
The paper asks for even p and m. Any p works here; with odd p the two directions meet in the same columns of the grid and
wait for each other. With odd m the direction down has one microbatch more.

Hanayo (Liu et al. 2023, SC '23): one pipeline that runs down the ranks and up again, wave after wave; Chimera's gain without
its second copy. v chunks per rank make v/2 waves. The paper takes even v; odd v works too (the last chunk ends on the last
rank; v = 1 is 1F1B). Where a wave turns, both stages are on one rank and nothing is sent.

**DualPipe-V**: DualPipe cut in half. Forwards and backwards of the two legs of a V meet on every rank in overlapping pairs.

Source: DeepSeek-AI 2024 (DualPipe, DeepSeek-V3 technical report section 3.2.1) and Liu et al. 2025, "cut-in-half", as
published with DualPipe. A rank runs eight phases; the fourth repeats F of one leg beside BW of the other. Here the two of such
a pair are plain neighbours, F first; running them as one overlapped slot is braiding, another matter. Backwards are split
into B and W only where W fills a gap: while the V fills and at the end of the cool-down.

DualPipe-V asks for m >= 2p. Here any m works: a smaller m takes the order for 2p microbatches and leaves out the first, or
the last, 2p − m of them. Leaving out whole microbatches keeps every dependency satisfied.

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

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count, islice, pairwise, zip_longest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.passes.braid import shortest_in_pairs
from jaxpipe.schedule.passes.offload import Plans, offload, peak_of
from jaxpipe.schedule.placement import bidirectional, circular, v_shape, wave
from jaxpipe.schedule.problem import BW, OPS, B, CodeRows, F, Problem, W
from jaxpipe.schedule.simulate import simulate
from jaxpipe.search.blocks.block import BuildingBlock, repeat
from jaxpipe.search.list_schedule.fillers import AS_GIVEN, GapFiller, Phases, Recipes, Rule, improve_order
from jaxpipe.search.list_schedule.policies import full_limit
from jaxpipe.search.retime import SLACK, Draft, Retimer, best_of, peaks


@family(
    "interleaved-1f1b",
    "1F1B over v chunks per rank (--chunks, default 2): the bubble divided by v, more activations",
    "Narayanan et al. 2021 (Megatron-LM) §2.2.2; controllable-memory.txt appendix H",
    placement=circular,
    peak_activations=lambda p, m, v: min((v + 1) * p - 1, v * m) / v if m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (m + (p - 1) / v) * (f + b + w) if m % p == 0 else None,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def interleaved_one_f_one_b(
    ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None
) -> Schedule:
    """Interleaved 1F1B for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F1b F2-     BW0b--- F3- BW1b--- F2b BW0---- F3b BW1----     BW2b---     BW3b--- BW2---- BW3----
        rank 1 |    F0- F1- F0b BW0b--- F1b BW1b--- F2- BW0---- F3- BW1---- F2b BW2b--- F3b BW3b--- BW2---- BW3----

    (``b`` marks the second chunk of a rank.) With m a multiple of p, equal stages and no transfer time the makespan is
    m(F + B + W) + (p − 1)(F + B + W)/v; a rank holds at most (v + 1)p − 1 chunks of activations, 1/v of its share each.
    One chunk gives eager 1F1B. ``costs`` (one entry per stage, p·v) only decide how a remainder of m is spread.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    orders = [[_row(problem, r, chunks, places) for r in range(ranks)] for places in slots(microbatches, ranks, chunks)]
    # the first is the published order: what replaces it may lose nowhere, so that closed forms stay upper bounds
    first, *drafts = map(Retimer(problem).draft, orders)
    best = best_of(drafts, anchor=first)
    assert best is not None
    return problem.schedule("interleaved-1f1b", best.rows)


def low_memory_block(ranks: int, chunks: int) -> BuildingBlock:
    """Return the block of one microbatch; groups of p, one turn apart within a group."""
    return interleaved_block(ranks, range(0, chunks * ranks, ranks), group=ranks, fused=True)


@family(
    "interleaved-low-memory",
    "interleaved 1F1B's bubble at 1F1B's memory, v chunks per rank (--chunks, default 2)",
    "Controllable Memory (Qi, Wan et al. 2024) appendix I, figure 16c (reconstructed)",
    placement=circular,
    peak_activations=lambda p, m, v: min(p, m) if m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (m + (p - 1) / v) * (f + b + w) if m % p == 0 else None,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def interleaved_low_memory(
    ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None
) -> Schedule:
    """Interleaved 1F1B with less memory for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F1b         BW0b--- F2- BW1b--- F3- BW0---- F2b BW1---- F3b BW2b---     BW3b--- BW2---- BW3----
        rank 1 |    F0- F1- F0b BW0b--- F1b BW1b--- F2- BW0---- F3- BW1---- F2b BW2b--- F3b BW3b--- BW2---- BW3----

    (``b`` marks the second chunk of a rank.) With m a multiple of p, equal stages and no transfer time the makespan is
    m(F + B + W) + (p − 1)(F + B + W)/v, that of interleaved 1F1B, and a rank holds min(vp, vm) chunks, 1/v of its share each.
    Otherwise whole microbatches are left out of the next multiple of p; which, and small changes of order, is decided with the
    real ``costs`` (one entry per stage, p·v).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    block = low_memory_block(ranks, chunks)
    orders = [repeat(block, problem, places) for places in slots(microbatches, ranks, chunks)]
    return problem.schedule("interleaved-low-memory", improve_order(problem, orders).rows)


def slots(m: int, p: int, v: int) -> Iterator[list[int]]:
    """Yield ways to number the places of whole groups of p with m microbatches; −1 where there is none. One chunk: one way."""
    groups, missing = -(-m // p), -m % p
    ways: list[Sequence[int]] = [range(missing)]
    if missing and groups > 1 and v > 1:
        # the last places of every group, one more of the first groups or of the last
        turns = [divmod(k, groups) for k in range(missing)]
        ways.append([group * p + p - 1 - turn for turn, group in turns])
        ways.append([(groups - 1 - group) * p + p - 1 - turn for turn, group in turns])
    for empty in ways:
        numbers = count()
        # one numbering for all ranks: a place that is empty on one must be empty on all
        yield [-1 if place in empty else next(numbers) for place in range(groups * p)]


def _row(problem: Problem, rank: int, v: int, places: list[int]) -> list[int]:
    """Forwards group by group, chunk by chunk; backwards in the same order over mirrored chunks."""
    p = problem.num_ranks
    units = [(chunk, i) for k in range(0, len(places), p) for chunk in range(v) for i in places[k : k + p]]
    # Megatron's warm-up: two forwards for each rank below, and all chunks but the last of a group
    lead = min(2 * (p - rank - 1) + (v - 1) * p, len(units))
    turns = [(F, *unit) for unit in units[:lead]]
    for forward, backward in zip_longest(units[lead:], units):
        turns += [(F, *forward)] if forward else []
        # B meets the chunks from the last to the first
        turns.append((BW, v - 1 - backward[0], backward[1]))
    return [problem.code(op, chunk * p + rank, i) for op, chunk, i in turns if i >= 0]


@family(
    "looped-bfs",
    "all microbatches through a chunk before the next (--chunks, default 2): GPipe's bubble divided by v",
    "Lamy-Poirier 2023 §4 (breadth-first pipeline parallelism)",
    placement=circular,
    peak_activations=lambda p, m, v: m,
    makespan=lambda p, m, v, f, b, w: (m + (p - 1 + (v - 1) * max(0, p - m)) / v) * (f + b + w),
    picture={"ranks": 2, "microbatches": 3, "chunks": 2},
)
def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Breadth-first looped pipeline for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F2- F0b F1b F2b             BW0b--- BW1b--- BW2b--- BW0---- BW1---- BW2----
        rank 1 |    F0- F1- F2- F0b F1b F2b BW0b--- BW1b--- BW2b--- BW0---- BW1---- BW2----

    With equal stages and no transfer time the makespan is m(F + B + W) + (p − 1 + (v − 1) max(0, p − m))(F + B + W)/v: a loop
    waits for the first microbatch to come round when m < p. All m activations are held. One chunk gives GPipe.

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        # all of a chunk before the next one, both ways: a chunk's parameters are needed in one go
        row = [Action("F", stage, i) for stage in stages for i in range(microbatches)]
        row += [Action("BW", stage, i) for stage in reversed(stages) for i in range(microbatches)]
        rows.append(tuple(row))
    return Schedule("looped-bfs", circular(ranks, chunks), microbatches, tuple(rows))


@family(
    "looped-dfs",
    "the furthest microbatch first, with real costs (--chunks, default 2); at least interleaved-1f1b",
    "Lamy-Poirier 2023 §4 (depth-first); Narayanan et al. 2021 §2.2.2",
    placement=circular,
    picture={"ranks": 2, "microbatches": 3, "chunks": 2},
)
def looped_dfs(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """Depth-first looped pipeline for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F2- F1b     BW0b--- F2b     BW0---- BW1b---     BW2b--- BW1---- BW2----
        rank 1 |    F0- F1- F0b BW0b--- F2- F1b BW0---- BW1b--- F2b BW2b--- BW1---- BW2----

    It differs from ``interleaved-1f1b`` in that no groups of p are fixed: with the real ``costs`` (one entry per stage, p·v), a
    rank fills its waits with what is ready later in its row, as far as the memory of interleaved 1F1B goes; the best such order
    that is no worse than interleaved 1F1B in makespan, span and peak is taken.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    interleaved_rows = problem.codes(interleaved_one_f_one_b(ranks, microbatches, chunks, costs))
    return problem.schedule("looped-dfs", improve_order(problem, [interleaved_rows]).rows)


@family(
    "chimera",
    "two pipelines in opposite directions: half of 1F1B's bubble at m = p, parameters held twice",
    "Li & Hoefler 2021 (Chimera) §3; controllable-memory.txt §2.2",
    placement=bidirectional,
    peak_activations=lambda p, m, v: min(p, m) if p % 2 == 0 and (m < p or m % p == 0) else None,
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 2) * max(f, b + w) if p % 2 == 0 and m == p else None,
)
def chimera(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """Chimera for any ``ranks`` p and ``microbatches`` m >= 1; ``costs`` has one entry per stage (p stages)::

        rank 0 |F0- F2-     F1b BW1b--- F3b BW3b---     BW0----         BW2----
        rank 1 |    F0- F1b F2- F3b     BW1b--- BW0---- BW3b--- BW2----
        rank 2 |    F1- F0b F3- F2b     BW0b--- BW1---- BW2b--- BW3----
        rank 3 |F1- F3-     F0b BW0b--- F2b BW2b---     BW1----         BW3----

    (``b`` marks the later of a rank's two stages; even microbatches go down.) With even p, equal stages and no transfer time,
    m = p idles (p − 2) max(F, B + W), as in Li & Hoefler's table 2. A rank holds between p/2 + 1 and p activations: 1F1B's
    peak, spread more evenly.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(bidirectional(ranks), microbatches, costs)
    return problem.schedule("chimera", units_in_a_row(problem).rows)


@family(
    "hanayo",
    "waves down and up the ranks (--chunks: two a wave): 1F1B's memory, the bubble divided by v",
    "Liu et al. 2023 (Hanayo)",
    placement=wave,
    peak_activations=lambda p, m, v: min(p, m) if m < p or m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (
        m * (f + b + w) + (p - 1) * 2 / v * max(f, b + w) if v % 2 == 0 and m == p else None
    ),
    picture={"ranks": 3, "microbatches": 3},
)
def hanayo(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """Hanayo for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank (v/2 waves), all >= 1::

        rank 0 |F0- F1- F2-         F0b BW0b--- F1b BW1b--- F2b BW2b---         BW0----         BW1----         BW2----
        rank 1 |    F0- F1-     F0b F2- F1b     BW0b--- F2b BW1b---     BW0---- BW2b--- BW1----         BW2----
        rank 2 |        F0- F0b F1- F1b F2- F2b         BW0b--- BW0---- BW1b--- BW1---- BW2b--- BW2----

    With even v, equal stages and no transfer time, m = p idles (p − 1)(2/v) max(F, B + W): for W waves and B + W = 2F a bubble
    of (2p − 2)/(3pW + 2p − 2). A rank holds at most min(p, m) activations, as in 1F1B. ``costs``: one entry per stage (p·v).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(wave(ranks, chunks), microbatches, costs)
    return problem.schedule("hanayo", units_in_a_row(problem).rows)


def units_in_a_row(problem: Problem) -> Draft:
    """Basic units with the costs of ``problem``: for each way to size them, the best order that dominates theirs; the best
    of all. At most p activations are held on a rank."""
    best = best_of(improve_order(problem, [unit_rows(problem, sizes)]) for sizes in unit_sizes(problem))
    assert best is not None
    return best


def unit_sizes(problem: Problem) -> list[tuple[int, ...]]:
    """Return ways to cut m into units of at most p microbatches: all full but the first, all but the last, or all about
    equal."""
    p, m = problem.num_ranks, problem.num_microbatches
    units, full = -(-m // p), (p,) * (m // p)
    if m % p == 0:
        return [full]
    about_equal = tuple(m // units + (k >= units - m % units) for k in range(units))
    return sorted({(m % p, *full), (*full, m % p), about_equal})


def unit_rows(problem: Problem, sizes: Sequence[int]) -> list[list[int]]:
    """Each rank's F and BW in the order of their columns, with units of ``sizes`` microbatches."""
    stages, flows, p = problem.placement.num_stages, problem.placement.num_flows, problem.num_ranks
    period = 2 * p * problem.placement.num_chunks
    # columns: a microbatch of a flow enters every second one
    starts = [unit * period + 2 * (k // flows) for unit, size in enumerate(sizes) for k in range(size)]
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
    for replica, rank in enumerate(problem.rank):
        stage = replica % stages
        for i in problem.microbatches(replica):
            rows[rank].append((starts[i] + stage, i, problem.code(F, replica, i)))
            rows[rank].append((starts[i] + 2 * stages - 1 - stage, i, problem.code(BW, replica, i)))
    # two actions meet in a column only with odd p and two flows; the smaller microbatch then goes first on every rank
    return [[code for _, _, code in sorted(row)] for row in rows]


@family(
    "dualpipe-v",
    "two legs of a V meet in pairs of F and BW that can overlap; W splits off only to fill gaps",
    "DeepSeek-AI 2024 (DualPipe), 2025 (DualPipeV)",
    placement=v_shape,
    sees_collectives=True,
    peak_activations=lambda p, m, v: p + 0.5 if p > 1 and m >= 2 * p else None,
    makespan=lambda p, m, v, f, b, w: (
        m * (f + b + w) + (p - 1) * (f + b - w) / 2 if m >= 2 * p and w <= b <= f <= b + w else None
    ),
    picture={"ranks": 2, "microbatches": 4},
)
def dualpipe_v(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """DualPipe-V for any ``ranks`` p and ``microbatches`` m >= 1; ``costs`` has one entry per stage (2p stages)::

        rank 0 |F0- F1- F2- F0b B0b W0b F1b F3- BW1b--- F2b BW0---- BW2b--- F3b     BW1---- BW3b--- B2- W2- B3- W3-
        rank 1 |    F0- F0b F1- F1b F2- BW0b--- F2b BW0---- F3- BW1b--- F3b BW1---- BW2b--- BW2---- B3b B3- W3b W3-

    With m >= 2p, equal stages, no transfer time and W <= B <= F <= B + W it idles (p − 1)(F + B − W)/2 in shares of a rank and,
    for p > 1, holds p + 1/2 activations. Published: (PP/2 − 1)(F&B + B − 3W) with PP = 2p stages and B the full backward,
    here (p − 1)(F + 2B − W)/2. That counts a pair as one action whose results leave at its end, and is exact for braided
    pairs with F = B (tested). The published PP + 1 chunks of activations are the same.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(v_shape(ranks), microbatches, costs)
    # with fewer than 2p microbatches the order of 2p lacks its first or its last ones; costs say which
    skips = sorted({0, max(0, 2 * ranks - microbatches)})
    orders = ([_dualpipe_row(problem, rank, skipped) for rank in range(ranks)] for skipped in skips)
    plain = best_of(map(Retimer(problem).draft, orders))
    assert plain is not None, "the phases of all ranks fit together"
    best = improve_order(problem, [plain.rows])
    return shortest_in_pairs([problem.schedule("dualpipe-v", rows) for rows in (best.rows, plain.rows)], costs)


def _dualpipe_row(problem: Problem, rank: int, skipped: int) -> list[int]:
    """Return the codes of one rank; of at least 2p microbatches the first ``skipped`` are left out, and those beyond m.

    The phases name ops and legs: 0 runs down the V, 1 up. W is the one put off longest.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    # the phases of all ranks fit together from 2p microbatches on; with fewer, some of these are left out below
    below, main = p - 1 - rank, max(m, 2 * p) - 2 * p + rank + 1
    phases = [
        *["F0"] * (2 * below),
        *["F0", "F1"] * (rank + 1),
        *["B1", "W", "F1"] * below,
        *["F0", "BW1", "F1", "BW0"] * main,
        *["BW1", "F1", "BW0"] * below,
        *[f"{'B' if k > rank else 'BW'}{1 - k % 2}" for k in range(2 * (rank + 1))],
        *["W", "B0"] * below,
        *["W"] * (rank + 1),
    ]
    numbers: defaultdict[tuple[bool, int], Iterator[int]] = defaultdict(lambda: count(-skipped))
    put_off: deque[tuple[int, int]] = deque()
    row = []
    for name in phases:
        op = OPS.index(name.rstrip("01"))
        if op == W:
            # first put off, first done, so that gradients of a stage add up in the order of their B's
            leg, microbatch = put_off.popleft()
        else:
            leg = int(name[-1])
            microbatch = next(numbers[op == F, leg])
        if op == B:
            put_off.append((leg, microbatch))
        # codes of microbatches that do not exist are left out as wholes, which breaks no wait
        if 0 <= microbatch < m:
            row.append(problem.code(op, problem.replicas_of(rank)[leg], microbatch))
    return row


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


def interleaved_block(ranks: int, turns: Sequence[int], *, group: int = 0, fused: bool = False) -> BuildingBlock:
    """Return the building block of a microbatch whose chunk c runs F in turn ``turns[c]`` of rank 0, and B of the last chunk as
    soon as it can; B of the other chunks follow at the same distances. A turn is three cells: F, B, W.

    ``group``: microbatches in a group, one turn apart, groups coming every group × v turns; 0: microbatches v turns apart.
    ``fused``: a turn is F and BW, and ranks start 1 cell after each other, which needs chunks p turns apart.

    With B and W apart ranks start 1 or 2 cells after each other, so that both F and B come round before the next chunk's
    turn. This needs chunks at least ⌈p/2⌉ turns apart.
    """
    p, v = ranks, len(turns)
    # the closest pair of chunks decides how late ranks may start and still have F round in time
    distance = min((b - a for a, b in pairwise(turns)), default=p)
    late = 0 if fused else min(p - 1, 3 * distance - p)
    cells = [r + min(r, late) for r in range(p)]
    forward = [3 * turn + cell for turn in turns for cell in cells]
    back = [3 * (turns[-1] + turn + p - 1 - r) + cells[r] + 1 for turn in reversed(turns) for r in range(p)]
    return BuildingBlock(
        circular(p, v),
        interval=3 if group else 3 * v,
        forward=(tuple(forward),),
        backward=(tuple(back),),
        weight=() if fused else (tuple(cell + 1 for cell in back),),
        group=group,
        group_interval=3 * v * group,
    )


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
