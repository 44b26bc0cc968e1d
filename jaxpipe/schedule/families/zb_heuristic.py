"""The zero-bubble heuristic: orders F, B and W by real costs under a memory limit (``zb``, ``zb-1p``, ``zb-2p``).

Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 3.1; `controllable-memory.txt` calls the heuristic at 1F1B's
memory ZB-1P and at twice that ZB-2P. Many drafts are made and the best is kept, by makespan, then longest rank span, then
peak memory: list schedules over a grid of policies (:mod:`~jaxpipe.schedule.families.list_scheduler`), and the fixed orders
split 1F1B, ZB-H1 and ZB-H2 where they fit. So at a limit of p the result is never slower than ZB-H1, nor than 1F1B if a fused
BW takes B + W (a cheaper BW is not considered). The best of a small problem is polished
(:mod:`~jaxpipe.schedule.families.polish`).

For limits below p some policies set the warm-up depth by the round trip of a microbatch (`controllable-memory.txt`, appendix I
reaches 2p/3 with a building block instead). At unit costs and limits p/4 to p the longest span equals or beats the best that
CP-SAT found in FACTS.md's table (a test). How many drafts are made depends on sizes only, never on a clock.
Not modelled: workspace of a running function, and ``cotangent_bytes``, which B adds while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import isnan

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import Family, in_order, require_sizes
from jaxpipe.schedule.families.list_scheduler import Chain, Draft, list_schedule, replay
from jaxpipe.schedule.families.policies import policies
from jaxpipe.schedule.families.polish import move_weight_gradients
from jaxpipe.schedule.families.zb_h import h1_rows, h2_rows
from jaxpipe.schedule.ir import Schedule

_POLICIES_AT_ANY_SIZE, _MORE_POLICIES = 12, 28
_ACTIONS_FOR_MORE = 10_000
_SMALL, _SWAPS = 400, 200


def zero_bubble(
    ranks: int, microbatches: int, costs: CostProfile | None = None, memory_limit: float | None = None
) -> Schedule:
    """The heuristic under ``memory_limit`` (default p, 1F1B's peak), in units of one rank's share of one microbatch.

    Works for any ``ranks`` p >= 1, ``microbatches`` m >= 1 and limit >= 1. Here with a limit of 2, half of 1F1B's::

        rank 0 |F0 F1                B0 W0 F2 B1 W1 F3             B2 W2 F4 B3 W3 F5             B4 W4 B5 W5
        rank 1 |   F0 F1          B0 W0 B1 W1 F2       F3       B2 W2 B3 W3 F4       F5       B4 W4 B5 W5
        rank 2 |      F0 F1    B0 W0 B1 W1       F2       F3 B2 W2 B3 W3       F4       F5 B4 W4 B5 W5
        rank 3 |         F0 B0 F1 B1 W0 W1          F2 B2 W2 F3 B3 W3             F4 B4 W4 F5 B5 W5

    ``costs``: one stage per rank; default F = B = W. A rank whose w-residuals are smaller than its residuals gets more
    forwards under the same limit.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, ``costs`` is for another number of stages, or the limit is
            below what one microbatch needs.
    """
    return _zero_bubble("zb", ranks, microbatches, costs, memory_limit)


def zb_1p(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """The heuristic at 1F1B's memory, p activations::

        rank 0 |F0 F1 F2 F3          B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
        rank 1 |   F0 F1 F2       B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
        rank 2 |      F0 F1    B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
        rank 3 |         F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5

    Raises:
        ScheduleError: as :func:`zero_bubble`.
    """
    return _zero_bubble("zb-1p", ranks, microbatches, costs, None)


def zb_2p(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """The heuristic at twice 1F1B's memory, 2p activations::

        rank 0 |F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7
        rank 1 |   F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7
        rank 2 |      F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7
        rank 3 |         F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7

    Raises:
        ScheduleError: as :func:`zero_bubble`.
    """
    require_sizes("zb-2p", ranks=ranks, microbatches=microbatches)
    return _zero_bubble("zb-2p", ranks, microbatches, costs, 2 * ranks)


def _zero_bubble(name: str, ranks: int, m: int, costs: CostProfile | None, limit: float | None) -> Schedule:
    require_sizes(name, ranks=ranks, microbatches=m)
    if costs is None:
        costs = CostProfile.uniform(ranks)
    if costs.num_stages != ranks:
        raise ScheduleError(f"{name}: costs are for {costs.num_stages} stages; {ranks} ranks need {ranks}, one each")
    c = Chain.of(costs, m, ranks if limit is None else limit)
    need = max(c.held)
    if limit is not None and (isnan(limit) or limit < need):
        raise ScheduleError(
            f"{name}: a memory limit of {limit:g} is below the {need:g} of one microbatch; use {need:g} or more"
        )
    return in_order(name, m, best_draft(c).rows)


def best_draft(c: Chain) -> Draft:
    """The best of all drafts, polished if small; stops early at one whose makespan and span can't be beaten."""
    makespan, span = c.least_makespan_and_span()
    best: Draft | None = None
    for draft in _drafts(c):
        if best is None or draft.rank_key < best.rank_key:
            best = draft
        if best.makespan <= makespan * (1 + 1e-9) and best.span <= span * (1 + 1e-9):
            return best
    assert best is not None
    return move_weight_gradients(c, best, _SWAPS) if 3 * c.num_ranks * c.num_microbatches <= _SMALL else best


def _drafts(c: Chain) -> Iterator[Draft]:
    """Drafts within the limit; the first always exists."""
    p, m = c.num_ranks, c.num_microbatches
    in_flight = c.fit([p - r for r in range(p)])
    yield _kept(replay(c, tuple(_split_1f1b(k, m) for k in in_flight)))
    for rows in (h1_rows(p, m), h2_rows(p, m)):
        draft = replay(c, tuple(rows))
        if draft is not None:
            yield draft
    count = _POLICIES_AT_ANY_SIZE + min(_MORE_POLICIES, _ACTIONS_FOR_MORE // (3 * p * m))
    for policy in islice(policies(c), count):
        draft = list_schedule(c, policy)
        if draft is not None:
            yield draft


def _kept(draft: Draft | None) -> Draft:
    assert draft is not None, "split 1F1B at a fitted depth is within the limit"
    return draft


def _split_1f1b(in_flight: int, m: int) -> list[str]:
    lead = min(in_flight, m)
    return ["F"] * lead + ["B", "W", "F"] * (m - lead) + ["B", "W"] * lead


ZB_1P = Family(
    name="zb-1p",
    function=zb_1p,
    description="the zero-bubble heuristic with real costs, at 1F1B's memory (limit p)",
    source="Qi et al. 2023 (Zero Bubble) §3.1; controllable-memory.txt §4",
    options=("costs",),
    picture={"ranks": 4, "microbatches": 6},
)
ZB_2P = Family(
    name="zb-2p",
    function=zb_2p,
    description="the zero-bubble heuristic with real costs, at twice 1F1B's memory (limit 2p)",
    source="Qi et al. 2023 (Zero Bubble) §3.1; controllable-memory.txt §4",
    options=("costs",),
    picture={"ranks": 4, "microbatches": 8},
)
ZB = Family(
    name="zb",
    function=zero_bubble,
    description="the zero-bubble heuristic with real costs under any --memory-limit >= 1 (default p)",
    source="Qi et al. 2023 (Zero Bubble) §3.1; controllable-memory.txt appendix I for limits below p",
    options=("costs", "memory_limit"),
    picture={"ranks": 4, "microbatches": 6, "memory_limit": 2},
)
