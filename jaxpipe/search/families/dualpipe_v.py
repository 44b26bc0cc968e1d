"""DualPipe-V: DualPipe cut in half. Forwards and backwards of the two legs of a V meet on every rank in overlapping pairs.

Source: DeepSeek-AI 2024 (DualPipe, DeepSeek-V3 technical report section 3.2.1) and Liu et al. 2025, "cut-in-half", as
published with DualPipe. A rank runs eight phases; the fourth repeats F of one leg beside BW of the other. Here the two of such
a pair are plain neighbours, F first; running them as one overlapped slot is braiding, another matter. Backwards are split
into B and W only where W fills a gap: while the V fills and at the end of the cool-down.

DualPipe-V asks for m >= 2p. Here any m works: a smaller m takes the order for 2p microbatches and leaves out the first, or
the last, 2p − m of them. Leaving out whole microbatches keeps every dependency satisfied.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import count

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import OPS, B, F, Problem, W
from jaxpipe.search.list_schedule.fillers import improved
from jaxpipe.search.retime import Retimer, best_of


@family(
    "dualpipe-v",
    "two legs of a V meet in pairs of F and BW that can overlap; W splits off only to fill gaps",
    "DeepSeek-AI 2024 (DualPipe), 2025 (DualPipeV)",
    placement=v_shape,
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
    retimer = Retimer(problem)
    # with fewer than 2p microbatches the order of 2p lacks its first or its last ones; costs say which
    missing = max(0, 2 * ranks - microbatches)
    plain = best_of(
        retimer.draft([_row(problem, rank, skipped) for rank in range(ranks)]) for skipped in sorted({0, missing})
    )
    assert plain is not None, "the phases of all ranks fit together"
    return problem.schedule("dualpipe-v", improved(problem, [plain.rows]).rows)


def _row(problem: Problem, rank: int, skipped: int) -> list[int]:
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
