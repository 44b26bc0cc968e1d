"""STP: forwards braided with backwards of other microbatches, so that tensor-parallel collectives hide, on a V placement.

Source: `stp.txt` sections 3 and 4, appendices A and B, and the authors' published code. ``stp`` begins with the
throughput-efficient warm-up, ``stp-memory`` with the memory-efficient one, ``stp-offload`` offloads chunk 0 (section 4.4),
``stp-published`` is the order that the authors' code makes. The rows are made in
:mod:`~jaxpipe.schedule.families.stp_rows`; ``scripts/paper_stp.py`` has the closed forms of Table 1. What the paper fixes by
hand is tried here and simulated with the given costs: how many forwards go ahead, how many weight gradients are put off, how
many last backwards are split, whether forwards of the warm-up run in pairs; one choice after the other.

The published order puts off r weight gradients on rank r. That makes it shorter than what keeps to 3p + 1 chunks (p = 8,
m = 32, F = B = W = 1: 199 against 205), and holds 4p - 1 on the last rank. Allowed as much, ``stp`` is no longer than that.

Not modelled: transfers between ranks that compute waits for, as in the authors' runtime (section 5.2); here they overlap it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.stp_rows import Shape, stp_rows
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.passes.offload import offload
from jaxpipe.schedule.passes.plans import figures
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.tolerance import MEMORY, Objective, at_most, order_key

_FACTS: dict[str, Any] = {"placement": v_shape, "sees_collectives": True, "picture": {"ranks": 2, "microbatches": 4}}


@family(
    "stp",
    "V placement, F braided with B so that tensor-parallel collectives hide: fast, 1.5 times 1F1B's memory",
    "Qi et al. 2025 (stp.txt) §4.2, appendix A",
    **_FACTS,
)
def stp(
    ranks: int,
    microbatches: int,
    costs: CostProfile | None = None,
    memory_limit: float | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """STP with the throughput-efficient warm-up, for any ``ranks`` p and ``microbatches`` m >= 1::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) ``costs``: one entry per stage, 2p stages, with ``tp_comm_s`` where TP collectives
    take time. ``memory_limit``: peak activations of a rank, in units of its share of a microbatch, which is two chunks. The
    default is 3p + 1 chunks: the paper's 3p between slots, and one more while a braid runs, whose F takes memory before its B
    gives any back. ``objective``: what is minimised first, the makespan or the longest rank span.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, the costs are for another number of stages, or no order tried
            keeps the memory limit (on equal stages one of p + 1 is kept).
    """
    limit = (3 * ranks + 1) / 2 if memory_limit is None else memory_limit
    schedule, peak = _best("stp", ranks, microbatches, costs, limit, objective)
    if memory_limit is not None and not at_most(peak, memory_limit):
        raise ScheduleError(
            f"stp: a memory limit of {memory_limit:g} is below the {peak:g} it needs; use {peak:g} or more"
        )
    return schedule


@family(
    "stp-memory",
    "STP with fewer forwards ahead: about 1F1B's memory, a slower start",
    "Qi et al. 2025 (stp.txt) §4.2, appendices A and B",
    **_FACTS,
)
def stp_memory(
    ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
) -> Schedule:
    """STP with the memory-efficient warm-up (Figure 12d), for any ``ranks`` p and ``microbatches`` m >= 1::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) On equal stages no rank holds more than 2p + 2 chunks of activations, one of them
    only while a braid runs; ranks wait longer before the steady phase. ``costs``, ``objective``: as :func:`stp`.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _best("stp-memory", ranks, microbatches, costs, ranks + 1, objective)[0]


@family(
    "stp-offload",
    "STP with the first chunk of each rank offloaded to the host as far as its link allows",
    "Qi et al. 2025 (stp.txt) §4.4",
    **_FACTS,
)
def stp_offload(
    ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
) -> Schedule:
    """:func:`stp` with chunk 0 offloaded to the host (section 4.4), for any ``ranks`` p and ``microbatches`` m >= 1::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) Chunk 1 lives too short to leave. The paper moves a part α of every activation, so
    small in the warm-up that the copy takes less than F (T_o < T_F); here whole activations leave, as many as the host lane has
    time for without delaying any action, the longest lived first. ``costs``: as :func:`stp`, with ``offload_s``, ``load_s``;
    ``objective`` as there.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    profile = costs or CostProfile.uniform(2 * ranks, chunks=2)
    wholes = (stp(ranks, microbatches, profile, objective=o) for o in dict.fromkeys(("makespan", objective)))
    offloaded = [offload(full, profile, stages=range(ranks)).schedule for full in wholes]
    best = min(offloaded, key=lambda schedule: order_key(objective, *figures(simulate(schedule, profile))))
    return replace(best, name="stp-offload")


@family(
    "stp-published",
    "STP in the order of its authors' code: the fastest, up to twice 1F1B's memory on the last rank",
    "Qi et al. 2025 (stp.txt), published code",
    peak_activations=lambda p, m, v: max(3 * p + 1, 4 * p - 1) / 2 if m >= 3 * p - 1 else None,
    makespan=lambda p, m, v, f, b, w: (
        m * (f + b + w) + (p - 1) * (f + b - 1.5 * w) if m >= 3 * p - 1 and b >= f >= w else None
    ),
    **_FACTS,
)
def stp_published(ranks: int, microbatches: int) -> Schedule:
    """The order of the authors' published code, for any ``ranks`` p and ``microbatches`` m >= 1; it looks at no costs::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b BW2---- W2b     BW3---- W3b
        rank 1 |    F0- F0b F1- F1b F2+F3-- F2b+BW0b--- BW0----     F3b+B1b BW1---- B2b BW2---- B3b+W1b BW3---- W2b W3b

    (``b`` marks the second chunk of a rank.) The counts of their code hold from m = 3p - 1 on; with fewer microbatches these
    are the rows for 3p - 1 without the last ones. In a stage W's run here in order of microbatch, as everywhere in jaxpipe:
    where theirs runs BW while older W's wait, B is braided with the oldest of them. Makespan and peak are the same.

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    rows = stp_rows(ranks, microbatches, _published(ranks))
    return Schedule("stp-published", v_shape(ranks), microbatches, rows)


def _published(ranks: int) -> Shape:
    return Shape(ahead=ranks, split=ranks - 1)


def _best(
    name: str, ranks: int, microbatches: int, costs: CostProfile | None, limit: float, objective: Objective
) -> tuple[Schedule, float]:
    """Return the best of the shapes tried that hold at most ``limit`` activations, if none does the one that holds least;
    its peak.

    On equal stages ``ahead`` forwards ahead hold 2p + 1 + ``ahead`` chunks, and as many as the limit allows are tried first.
    """
    profile = costs or CostProfile.uniform(2 * ranks, chunks=2)

    def made(shape: Shape) -> Schedule:
        return Schedule(name, v_shape(ranks), microbatches, stp_rows(ranks, microbatches, shape))

    @cache
    def reached(shape: Shape) -> tuple[float, float, float]:
        return figures(simulate(made(shape), profile))

    def key(goal: Objective, shape: Shape) -> tuple[float, ...]:
        """Return what is minimised: the peak above the limit, makespan and longest span (the goal first), peak."""
        return max(reached(shape)[-1], limit * (1 + MEMORY)), *order_key(goal, *reached(shape))

    # the limit is in activations of two chunks each
    most = max(1, int(min(ranks, 2 * limit * (1 + MEMORY) - 2 * ranks - 1)))
    ahead = sorted({most, (most + 1) // 2, 1}, reverse=True)
    splits = sorted({0, 1, ranks // 2, ranks - 1})
    firsts = (False, True) if microbatches < 2 * ranks - 1 + most else (False,)  # True matters where some are left out
    best = Shape(most, split=0, paired=any(profile.tp_comm_s))
    # one choice after another; some again, since later ones change what is best
    tried: list[tuple[str, Sequence[int]]] = [("first", firsts), ("split", splits), ("ahead", ahead), ("first", firsts)]
    tried += [("hasty", [ranks // 2]), ("paired", [False]), ("split", splits)]
    for goal in dict.fromkeys(("makespan", objective)):  # span after makespan, so that it is never the longer
        for what, values in tried:
            changes: list[dict[str, Any]] = [{what: value} for value in values]
            best = min([best, *(replace(best, **other) for other in changes)], key=partial(key, goal))
        best = min(best, _published(ranks), key=partial(key, goal))
    return made(best), reached(best)[-1]
