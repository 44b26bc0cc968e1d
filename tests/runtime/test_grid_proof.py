"""Every family on every grid of processes: agreed on before the run, and played to its end with the collectives of its rows.

A grid needs no proof of its own: each of its columns is a run of one process a row, which is proved, and the members of a row
do the same in the same order, which is agreed on. So what is played here is the whole grid, which the checker never sees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.axes import RankMesh
from jaxpipe.errors import AgreedError, ScheduleError
from jaxpipe.program.ir import Free, Instruction, Program, Recv, Reduce, Run, Send, writes
from jaxpipe.program.lower import lower
from jaxpipe.program.order import NATIVE, TAGGED, Crossing, Lanes, issue_order
from jaxpipe.runtime.processes import Processes, divided
from jaxpipe.runtime.transfer import agree_on_programs
from jaxpipe.schedule import FAMILIES, CostProfile, Schedule, generate, simulate
from tests.support.bare_stages import bare_stages
from tests.support.processes import run_in_threads
from tests.support.rendezvous import left_over
from tests.support.schedule_strategies import random_valid_schedules

GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]
"""Rows and columns."""
DP = 4
SIZES = [(2, 6), (4, 8), (3, 7), (8, 16), (6, 24)]
"""Ranks and microbatches."""
OFTEN = ("1f1b", "v-zb", "v-half", "po-f", "stp", "chimera")
"""Families that the short version plays on all grids; the others on one."""
RULES: list[tuple[Lanes, tuple[str, ...]]] = [(TAGGED, ("blocks",)), (NATIVE, NATIVE)]
"""The rules for which programs are lowered, and those by which they are played."""


@cache
def generated(name: str, ranks: int, microbatches: int) -> Schedule | None:
    try:
        return generate(name, ranks, microbatches)
    except ScheduleError:
        return None


@cache
def crossing_of(schedule: Schedule, rows: int, lanes: Lanes = TAGGED, slow_rank: int = -1) -> Crossing:
    """Return which messages cross between so many rows. ``slow_rank``: takes 1.3 times as long for all it does."""
    costs = CostProfile.uniform(schedule.num_stages, chunks=schedule.num_chunks, f=1.0, b=1.1, w=0.9, comm=0.05)
    if slow_rank >= 0:
        slow = [schedule.placement.ranks(s, 0)[0] == slow_rank for s in range(schedule.num_stages)]
        f_s, b_s, w_s = (
            tuple(x * (1.3 if is_slow else 1.0) for x, is_slow in zip(seconds, slow, strict=True))
            for seconds in (costs.f_s, costs.b_s, costs.w_s)
        )
        costs = replace(costs, f_s=f_s, b_s=b_s, w_s=w_s)
    process_of = [row for row, ranks in enumerate(divided(schedule.num_ranks, rows)) for _ in ranks]
    return Crossing(tuple(process_of), simulate(schedule, costs), lanes, 1)


@cache
def lowered(schedule: Schedule, crossing: Crossing, ranks: range | None = None) -> tuple[Program, ...]:
    """Return the programs that a process with ``ranks`` makes of a schedule, or all, with the reduction of each stage; lowering
    proves that they end."""
    reduced = range(schedule.num_stages)
    return lower(schedule, bare_stages(schedule.placement), crossing=crossing, ranks=ranks, reduced=reduced)


@pytest.mark.parametrize("sizes", [SIZES[:1], pytest.param(SIZES, marks=pytest.mark.soak)], ids=["short", "all"])
@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_every_family_ends_on_every_grid(rows: int, columns: int, sizes: Sequence[tuple[int, int]]) -> None:
    is_short = len(sizes) == 1
    families = OFTEN if is_short and (rows, columns) != (2, 2) else FAMILIES
    sizes = SIZES[1:2] if is_short and rows > 2 else sizes
    of_sizes = (generated(name, p, m) for name, (p, m) in product(families, sizes) if p >= rows)
    schedules = [schedule for schedule in of_sizes if schedule is not None]
    assert {schedule.name for schedule in schedules} >= {*OFTEN}

    def agree(processes: Processes) -> None:
        for schedule in schedules:
            processes.arrange(schedule.num_ranks, RankMesh(dp=DP), columns)
            ranks, crossing = processes.ranks(schedule.num_ranks), crossing_of(schedule, rows)
            programs = lowered(schedule, crossing, ranks[processes.mine] if processes.number > 1 else None)
            agree_on_programs(
                processes, programs, lambda own, of=crossing: dispatched(own, issue_order(own, of.timeline))
            )

    assert run_in_threads(rows * columns, agree) == [None] * (rows * columns)
    for schedule, (lanes, rules), runs_join in product(schedules, RULES, (False, True)):
        crossing = crossing_of(schedule, rows, lanes)
        programs = lowered(schedule, crossing)
        orders = {at: issued(programs, crossing, at[0]) for at in product(range(rows), range(columns))}
        assert left_on_grid(programs, crossing, orders, rules, runs_join) == [], (schedule.name, rules, runs_join)


def dispatched(programs: Sequence[Program], order: Sequence[tuple[int, int]]) -> list[tuple[int, str, str]]:
    """Return what a thread dispatches of ``programs``, without the frees, which outlines do not have."""
    in_order = [(k, programs[k].instructions[at]) for k, at in order]
    return [(k, type(i).__name__, str(i.action)) for k, i in in_order if not isinstance(i, Free)]


# -- a grid, played ---------------------------------------------------------------------------------------------------

Issued = list[tuple[int, int]]
"""(rank, instruction) in the order in which a process dispatches them."""


def issued(programs: Sequence[Program], crossing: Crossing, row: int) -> Issued:
    """Return what a process of a row dispatches."""
    local_programs = [p for p in programs if crossing.process_of[p.rank] == row]
    return [(local_programs[k].rank, at) for k, at in issue_order(local_programs, crossing.timeline)]


def with_instructions(program: Program, instructions: Sequence[Instruction]) -> Program:
    written = tuple((0,) * len(writes(i)) for i in instructions)
    return replace(program, instructions=tuple(instructions), written_bytes=written)


def left_on_grid(
    programs: Sequence[Program],
    crossing: Crossing,
    orders: dict[tuple[int, int], Issued],
    rules: Sequence[str],
    runs_join: bool,
) -> list[str]:
    """Play a grid, and return what never ends. ``orders``: by row and column. ``runs_join``: whether every function is a
    collective of its row (tp or cp over columns), as reductions are."""
    ranks, columns = len(programs), 1 + max(column for _, column in orders)
    played: list[Program] = []
    joint: dict[tuple[int, int], tuple[Any, int]] = {}
    for column, program in product(range(columns), programs):
        first = column * ranks
        instructions: list[Instruction] = []
        for at, i in enumerate(program.instructions):
            if columns > 1 and (isinstance(i, Reduce) or (runs_join and isinstance(i, Run))):
                joint[first + program.rank, at] = ((program.rank, str(i.action)), columns)
            if isinstance(i, Send):
                i = replace(i, dst=first + i.dst)
            elif isinstance(i, Recv):
                i = replace(i, src=first + i.src)
            instructions.append(i)
        played.append(with_instructions(replace(program, rank=first + program.rank), instructions))
    process_of = [row * columns + column for column in range(columns) for row in crossing.process_of]
    in_order = {
        row * columns + column: [(column * ranks + rank, at) for rank, at in order]
        for (row, column), order in orders.items()
    }
    return left_over(played, process_of, rules, in_order, joint)


def test_a_member_that_reduces_in_another_order_would_wait_for_ever() -> None:
    """The player sees what agreement prevents: reductions of two ranks exchanged, and one that a single column has."""
    schedule = generate("1f1b", 2, 6)
    crossing = crossing_of(schedule, 1)
    programs = lowered(schedule, crossing)
    order = issued(programs, crossing, 0)
    last = [k for k, (rank, at) in enumerate(order) if isinstance(programs[rank].instructions[at], Reduce)]
    exchanged = [*order]
    exchanged[last[0]], exchanged[last[1]] = order[last[1]], order[last[0]]
    without = [pair for k, pair in enumerate(order) if k != last[0]]
    for other in (exchanged, without):
        orders = {(0, 0): order, (0, 1): other}
        assert left_on_grid(programs, crossing, orders, ("blocks",), False)
        assert left_on_grid(programs, crossing, {**orders, (0, 1): order}, ("blocks",), False) == []


# -- mutants ----------------------------------------------------------------------------------------------------------


@given(
    schedule=random_valid_schedules(braids=True, single_rank_stages=True),
    grid=st.sampled_from([grid for grid in GRIDS if grid[1] > 1]),
    kind=st.sampled_from(["order", "timeline", "instructions", "one column only"]),
    data=st.data(),
)
def test_a_column_that_does_other_things_is_refused_by_name(
    schedule: Schedule, grid: tuple[int, int], kind: str, data: st.DataObject
) -> None:
    """A member of a row dispatches in another order, by another timeline, two instructions exchanged, or without one."""
    rows, columns = grid if grid[0] <= schedule.num_ranks else (1, grid[1])
    crossing = crossing_of(schedule, rows)
    culprit = data.draw(st.sampled_from([k for k in range(rows * columns) if k % columns]))
    mine = divided(schedule.num_ranks, rows)[culprit // columns]
    slow_rank, at, rank = (data.draw(st.integers(0, n)) for n in (schedule.num_ranks - 1, 10**6, len(mine) - 1))

    def agree(processes: Processes) -> None:
        processes.arrange(schedule.num_ranks, RankMesh(dp=DP), columns)
        is_culprit = processes.mine == culprit
        own_crossing = crossing_of(schedule, rows, TAGGED, slow_rank) if is_culprit and kind == "timeline" else crossing
        ranks = processes.ranks(schedule.num_ranks)[processes.mine]
        programs = lowered(schedule, own_crossing, ranks if processes.number > 1 else None)
        if is_culprit and kind in ("instructions", "one column only"):
            programs = changed(programs, mine[rank], kind, at)
        exchanges = is_culprit and kind == "order"

        def dispatch(own: Sequence[Program]) -> Any:
            order = dispatched(own, issue_order(own, own_crossing.timeline))
            return exchanged(order, at) if exchanges else order

        agree_on_programs(processes, programs, dispatch)

    errors = run_in_threads(rows * columns, agree)
    if kind == "timeline" and same_order(schedule, crossing, crossing_of(schedule, rows, TAGGED, slow_rank), mine):
        assert errors == [None] * len(errors)
        return
    (message,) = {str(error) for error in errors if isinstance(error, AgreedError)}
    assert len(errors) == rows * columns and None not in errors
    assert re.match(rf"process {culprit} .*(issues what rank|has other programs|has programs=)", message), message


def exchanged(items: Sequence[Any], at: int) -> list[Any]:
    """Return ``items`` with two neighbours exchanged, which differ."""
    differing = [k for k in range(len(items) - 1) if items[k] != items[k + 1]]
    k = differing[at % len(differing)]
    return [*items[:k], items[k + 1], items[k], *items[k + 2 :]]


def changed(programs: tuple[Program, ...], rank: int, kind: str, at: int) -> tuple[Program, ...]:
    instructions = [*programs[rank].instructions]
    if kind == "instructions":
        instructions = exchanged(instructions, at)
    else:
        runs = [k for k, i in enumerate(instructions) if isinstance(i, Run | Reduce)]
        del instructions[runs[at % len(runs)]]
    return (*programs[:rank], with_instructions(programs[rank], instructions), *programs[rank + 1 :])


def same_order(schedule: Schedule, one: Crossing, other: Crossing, ranks: range) -> bool:
    """Return whether a process with ``ranks`` has the same programs and issues them alike by either timeline."""
    programs = [lowered(schedule, crossing, ranks) for crossing in (one, other)]
    if programs[0] != programs[1]:
        return False
    own = [programs[0][rank] for rank in ranks]
    return issue_order(own, one.timeline) == issue_order(own, other.timeline)
