"""Small changes of a finished order: W swapped with its neighbours, B and W fused where that is cheaper.

List scheduling decides W's place with what is known at that moment; random swaps mend some of what it missed (0.6% of the
span at p = 4, m = 16 and a limit of 2p with unequal F, B, W; nothing at m = 32 with the tries allowed there). Each try replays
the whole order, so it pays for small ones only. The random numbers are seeded: the same draft gives the same result.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from jaxpipe.schedule.problem import BW, B, W
from jaxpipe.schedule.retime import Draft, Retimer


def move_weight_gradients(retimer: Retimer, draft: Draft, limit: float, tries: int) -> Draft:
    """``draft``, or one with a shorter makespan or span, and neither longer, by ``tries`` swaps of a W and an F or B.

    Never over the limit; the peak may rise up to it.
    """
    rng = random.Random(0)
    kind = retimer.problem.num_replicas * retimer.problem.num_microbatches
    rows = [list(row) for row in draft.rows]
    best = draft
    for _ in range(tries):
        row = rng.choice(rows)
        at = _swappable([code // kind for code in row], rng)
        if at is None:
            continue
        row[at], row[at + 1] = row[at + 1], row[at]
        tried = retimer.draft(rows)
        if tried is None or tried.peak > limit or _longer(tried, best):
            row[at], row[at + 1] = row[at + 1], row[at]
        else:
            best = tried
    if not _longer(draft, best):
        return draft
    return Draft(rows, best.makespan, best.span, best.peak)


def fuse_backwards(retimer: Retimer, draft: Draft, limit: float) -> Draft:
    """``draft`` with one BW for each B whose W directly follows it, on those ranks where that makes it no longer.

    Only where a fused backward costs less than both. It puts the cotangent off until W's end, and keeps the whole activation
    as long, so it is taken rank by rank, never over ``limit``.
    """
    problem = retimer.problem
    kind = problem.num_replicas * problem.num_microbatches
    best = draft
    for rank, row in enumerate(draft.rows):
        stages = problem.replicas_of(rank)
        if all(problem.bw_s[k] >= problem.b_s[k] + problem.w_s[k] for k in stages):
            continue
        fused: list[int] = []
        for code in row:
            if fused and fused[-1] // kind == B and code == fused[-1] + (W - B) * kind:
                fused[-1] += (BW - B) * kind
            else:
                fused.append(code)
        tried = retimer.draft([fused if r == rank else other for r, other in enumerate(best.rows)])
        if tried is not None and tried.peak <= limit and not _longer(tried, best):
            best = tried
    return best


def _longer(one: Draft, other: Draft) -> bool:
    most = 1 + 1e-9
    return one.makespan > other.makespan * most or one.span > other.span * most


def _swappable(ops: Sequence[int], rng: random.Random) -> int | None:
    """A random position where a W and another op stand side by side, and W does not need that op; None if there is none."""
    waiting = 0  # microbatches whose B is done and W is not, before each position
    places = []
    for k, (op, after) in enumerate(pairwise(ops)):
        if op != after and (op == W or (after == W and waiting > 0)):
            places.append(k)
        waiting += (op == B) - (op == W)
    return rng.choice(places) if places else None
