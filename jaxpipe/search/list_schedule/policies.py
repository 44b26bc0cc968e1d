"""The policies that are tried, as data, most useful first, and the drafts they lead to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from jaxpipe.schedule.clock import NEVER
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.list_schedule.choosers import Policy, by_turn, run
from jaxpipe.search.retime import Draft

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


def chain_drafts(problem: Problem, limit: float) -> Iterator[Draft]:
    """Return, for one chunk per rank, the draft of each policy under ``limit`` (units of one rank's share of one microbatch).

    Fewer policies above 11,000 actions, down to ten: each costs time that grows with the actions.
    """
    most = 10 + _ACTIONS // (3 * problem.num_ranks * problem.num_microbatches)
    return filter(None, (run(problem, partial(by_turn, policy), limit) for policy in ONE_CHUNK[:most]))
