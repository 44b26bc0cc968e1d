"""The policies that are tried, as data, most useful first, and the drafts they lead to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from jaxpipe.schedule.list_schedule.choosers import Policy, by_turn, run
from jaxpipe.schedule.list_schedule.clock import NEVER
from jaxpipe.schedule.list_schedule.weights import WeightFilling, balanced, order_of
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Draft

_ACTIONS = 100_000
ONE_CHUNK = (
    # round trips, turn, w_gap, balance, f_gap
    Policy(2, "backward", 1, True),
    Policy(3, "backward", 0.5, True, 0.5),
    Policy(2.1, "alternate", 1, True),
    Policy(1, "backward", 1, False),
    Policy(1.75, "alternate", 0.5, False),
    Policy(2.75, "alternate", 0.5, True),
    Policy(2.5, "alternate", 0, False),
    Policy(1.3, "alternate", 0.5, True),
    Policy(3, "backward", 0.5, True),
    Policy(1.5, "forward", 1, True),
    Policy(1.75, "forward", 0.5, True),
    Policy(1.3, "alternate", 1, False),
    Policy(NEVER, "backward", 0, False, 0.5),
    Policy(2.5, "alternate", 0.5, False),
    Policy(2, "alternate", 1, False),
    Policy(2.5, "backward", 0.5, False),
    Policy(3, "alternate", 0, False),
    Policy(1, "backward", 1, False, 0.5),
    Policy(0.75, "backward", 1, False, 0.5),
)
"""Found by greedy selection among 250 combinations (without no. 12's neighbour at 2 round trips, which trades the span for the
makespan on golden rows): first for no golden row of the paper's heuristic worse than before, then on 250 random chains (even,
jittered, one heavy stage, arbitrary; transfers 0-0.3 F; limits p/4-2p; p 3-16); each improves most on those before it. Mean
makespan 0.08% below that of the 41 policies used before, which had 16 ways to choose depths; selected on 100 of the chains
and judged on the other 150, 0.03% below; the other way round 0.02% above. With 12 rows: 0.07-0.11% above."""

CHUNKS = (
    # round trips, turn, w_gap, balance, f_gap, backward, costs
    Policy(NEVER, "alternate", 0.5, True, 0, "late", "no transfers"),
    Policy(1.15, "forward", 0.5, True, 0, "late", "no transfers"),
    Policy(2, "forward", 0.5, True, 0, "late", "no transfers"),
    Policy(1, "forward", 1, False, 0, "late", "real"),
    Policy(NEVER, "alternate", 0.5, True, 0, "early", "real"),
    Policy(1.3, "forward", 1, True, 0, "early", "equal"),
    Policy(0.8, "backward", 0.5, True, 0, "early", "no transfers"),
    Policy(2.5, "forward", 1, True, 0, "early", "equal"),
    Policy(1.75, "forward", 0.5, True, 0, "early", "real"),
    Policy(1.5, "forward", 0.5, True, 0, "early", "no transfers"),
)
"""Found by greedy selection on 60 random problems (V, circular, wave; p 3-8; costs even, from Table 5 of
`controllable-memory.txt`, random; transfers 0-0.2 F; limits 0.4p-1.3p): each improves most on those before it; together within
0.3% of all 648 that were tried."""


def chain_drafts(problem: Problem, limit: float) -> Iterator[Draft]:
    """Return, for one chunk per rank, the draft of each policy under ``limit`` (units of one rank's share of one microbatch).

    Fewer policies above 11,000 actions, down to ten: each costs time that grows with the actions.
    """
    most = 10 + _ACTIONS // (3 * problem.num_ranks * problem.num_microbatches)
    return filter(None, (run(problem, partial(by_turn, policy), limit) for policy in ONE_CHUNK[:most]))


def chunk_drafts(problem: Problem, limit: float, policies: Sequence[Policy] = CHUNKS) -> list[Draft]:
    """Return, for any one-flow chain, per policy its draft, and the one with W laid anew; none if one microbatch does not
    fit."""
    quick, one = problem.without_transfers(), (1.0,) * problem.num_replicas
    views = {"real": problem, "no transfers": quick, "equal": replace(quick, f_s=one, b_s=one, w_s=one)}
    filling = WeightFilling(problem, limit)
    drafts: list[Draft | None] = []
    for policy in policies:
        listed = run(views[policy.costs], partial(by_turn, policy), limit)
        if listed is not None:
            filled = balanced(filling, order_of(problem, listed.rows, filling.retimer))
            drafts += [filling.retimer.draft(listed.rows), filling.draft(filled.rows) if filled else None]
    return list(filter(None, drafts))
