"""Infer a schedule's placement and its number of microbatches from its rows alone.

For files that hold no more than rows: PyTorch's CSV, ``rank N:`` lines without a header, JSON with ``rows`` only. Stages are
taken for a chain; a stage runs where its actions stand, for one flow of microbatches or two.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.ir import Row, Schedule
from jaxpipe.schedule.placement import CONSTRUCTORS, Placement, chain

MAX_STAGES = 1_000_000

Homes = dict[int, dict[int, set[int]]]
"""stage -> microbatch -> ranks that run it."""


def schedule_of(name: str, rows: Sequence[Row]) -> Schedule:
    """Return the schedule called ``name`` with these rows. Raises as :func:`infer_placement`."""
    return Schedule(name, infer_placement(rows), infer_microbatches(rows), tuple(rows))


def infer_microbatches(rows: Sequence[Row]) -> int:
    """One more than the highest microbatch; 0 without actions."""
    return 1 + max((a.microbatch for row in rows for slot in row for a in slot.actions), default=-1)


def infer_placement(rows: Sequence[Row]) -> Placement:
    """Return the simplest placement in which every action of rank r stands in ``rows[r]``.

    Raises:
        ScheduleError: there is no action, stage numbers have gaps, or a stage moves between ranks in no pattern that a
            placement can say.
    """
    homes: Homes = {}
    for rank, row in enumerate(rows):
        for slot in row:
            for action in slot.actions:
                homes.setdefault(action.stage, {}).setdefault(action.microbatch, set()).add(rank)
    if not homes:
        raise ScheduleError("the rows hold no action; write one row per rank")
    num_ranks, num_stages = len(rows), len(homes)
    if max(homes) >= num_stages:
        gap = next(s for s in range(num_stages) if s not in homes)
        raise ScheduleError(
            f"stage {gap} runs nowhere, but stage {max(homes)} exists; number stages from 0 without gaps"
        )
    # one flow of microbatches, or two that alternate (bidirectional)
    flows = _flows(homes, 1) or _flows(homes, 2)
    if flows is None:
        stage = next(s for s in range(num_stages) if _flows({0: homes[s]}, 1) is None)
        ranks = sorted(set().union(*homes[stage].values()))
        raise ScheduleError(
            f"stage {stage} runs on ranks {', '.join(map(str, ranks))}, changing from microbatch to microbatch: "
            "no placement fits; is an action in the wrong row?"
        )
    chunks, rest = divmod(num_stages, num_ranks)
    # the first placement by name that fits; kinds are tried in the order of the table
    for names, make in CONSTRUCTORS.values() if not rest and num_stages <= MAX_STAGES else ():
        placement = make(num_ranks, chunks) if "chunks" in names else make(num_ranks)
        if placement.flows == flows:
            return placement
    return Placement("explicit", num_ranks, flows, chain(num_stages))


def _flows(homes: Homes, num_flows: int) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    """Groups per flow and stage, if every stage stays with one group per flow."""
    groups_of = [
        [{tuple(sorted(ranks)) for i, ranks in homes[s].items() if i % num_flows == k} for s in range(len(homes))]
        for k in range(num_flows)
    ]
    if any(len(groups) != 1 for flow in groups_of for groups in flow):
        return None
    return tuple(tuple(groups.pop() for groups in flow) for flow in groups_of)
