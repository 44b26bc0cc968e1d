"""Known orders of several chunks a rank, improved with real costs: interleaved 1F1B, looped pipelines, Chimera, Hanayo,
DualPipe-V. Those that save memory by smaller groups and by offloading are in :mod:`~jaxpipe.search.families.pipeoffload`.

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
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import count, zip_longest

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.passes.braid import shortest_in_pairs
from jaxpipe.schedule.placement import bidirectional, circular, v_shape, wave
from jaxpipe.schedule.problem import BW, OPS, B, F, Problem, W
from jaxpipe.search.blocks.block import BuildingBlock, interleaved_block, repeat
from jaxpipe.search.list_schedule.fillers import improve_order
from jaxpipe.search.retime import Retimer, best_of


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
    return _units_in_a_row("chimera", Problem.of(bidirectional(ranks), microbatches, costs))


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
    return _units_in_a_row("hanayo", Problem.of(wave(ranks, chunks), microbatches, costs))


def _units_in_a_row(name: str, problem: Problem) -> Schedule:
    """Return basic units with the costs of ``problem``: for each way to size them, the best order that dominates theirs; the
    best of all. At most p activations are held on a rank."""
    best = best_of(improve_order(problem, [unit_rows(problem, sizes)]) for sizes in unit_sizes(problem))
    assert best is not None
    return problem.schedule(name, best.rows)


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
