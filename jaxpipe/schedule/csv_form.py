"""PyTorch's compute-only CSV: one row per rank, cells ``0F1 0I1 0W1 0B1`` (stage, letter, microbatch).

Their F, I, W, B are our F, B, W, BW. The format holds neither placement nor name: reading infers which rank runs which
stage, for one flow of microbatches or two, and takes the stages for a chain. Writing refuses what would not be read back:
offloading, braids, user ops, stages that are not a chain. Empty cells (idle slots) are skipped on reading.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule.ir import Action, Row, Schedule, Slot
from jaxpipe.schedule.placement import Placement, bidirectional, chain, circular, one_to_one, v_shape, wave
from jaxpipe.schedule.text import MAX_STAGES

LETTERS = {"F": "F", "I": "B", "W": "W", "B": "BW"}
_TO_LETTER = {op: letter for letter, op in LETTERS.items()}
_CELL = re.compile(r"(0|[1-9][0-9]{0,17})([A-Z])(0|[1-9][0-9]{0,17})")

Homes = dict[int, dict[int, set[int]]]
"""stage -> microbatch -> ranks that run it."""


def format_csv(schedule: Schedule) -> str:
    """``schedule`` as CSV.

    Raises:
        ScheduleError: it holds something that the format can't say.
    """
    if not schedule.placement.is_chain:
        raise ScheduleError("CSV can't say that stages are not a chain; write .sched or .json")
    for rank, row in enumerate(schedule.rows):
        for slot in row:
            if not isinstance(slot, Action) or slot.op not in _TO_LETTER:
                raise ScheduleError(
                    f"CSV in PyTorch's compute-only format can't hold {slot} (rank {rank}), only F, B, W and BW; "
                    "write .sched or .json"
                )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in schedule.rows:
        writer.writerow([f"{a.stage}{_TO_LETTER[a.op]}{a.microbatch}" for slot in row for a in slot.actions])
    return text.getvalue()


def parse_csv(text: str, name: str, path: str = "<csv>") -> Schedule:
    """The schedule that the CSV ``text`` describes.

    Raises:
        ScheduleParseError: naming ``path``, row and cell, or why no placement fits.
    """
    rows = _rows(text, path)
    homes: Homes = {}
    for rank, row in enumerate(rows):
        for slot in row:
            for action in slot.actions:
                homes.setdefault(action.stage, {}).setdefault(action.microbatch, set()).add(rank)
    if not homes:
        raise ScheduleParseError(f"{path}: the file holds no action; write one row per rank, cells such as 0F1")
    try:
        placement = infer_placement(homes, len(rows))
    except ScheduleError as error:
        raise ScheduleParseError(f"{path}: {error}", error.problems) from None
    num_microbatches = 1 + max(i for by_microbatch in homes.values() for i in by_microbatch)
    return Schedule(name, placement, num_microbatches, rows)


def infer_placement(homes: Homes, num_ranks: int) -> Placement:
    """The simplest placement in which every stage runs where ``homes`` says.

    Raises:
        ScheduleError: stage numbers have gaps, or a stage moves between ranks in no pattern that a placement can say.
    """
    num_stages = len(homes)
    gap = next((s for s in range(num_stages) if s not in homes), None)
    if gap is not None:
        raise ScheduleError(
            f"stage {gap} runs nowhere, but stage {max(homes)} exists; number stages from 0 without gaps"
        )
    flows = _flows(homes, 1) or _flows(homes, 2)
    if flows is None:
        stage = next(s for s in range(num_stages) if _flows({0: homes[s]}, 1) is None)
        ranks = sorted(set().union(*homes[stage].values()))
        raise ScheduleError(
            f"stage {stage} runs on ranks {', '.join(map(str, ranks))}, changing from microbatch to microbatch: "
            "no placement fits; is an action in the wrong row?"
        )
    edges = chain(num_stages)
    for known in _candidates(num_ranks, num_stages):
        if known.flows == flows and known.edges == edges:
            return known
    return Placement("explicit", num_ranks, flows, edges)


def _flows(homes: Homes, num_flows: int) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    """Groups per flow and stage, if every stage stays with one group per flow."""
    flows = []
    for k in range(num_flows):
        flow = []
        for stage in range(len(homes)):
            groups = {tuple(sorted(ranks)) for i, ranks in homes[stage].items() if i % num_flows == k}
            if len(groups) != 1:
                return None
            flow.append(groups.pop())
        flows.append(tuple(flow))
    return tuple(flows)


def _candidates(num_ranks: int, num_stages: int) -> list[Placement]:
    chunks, rest = divmod(num_stages, num_ranks)
    if rest or num_stages > MAX_STAGES:
        return []
    makers: list[Callable[[], Placement]] = []
    if chunks == 1:
        makers += [lambda: one_to_one(num_ranks), lambda: bidirectional(num_ranks)]
    makers.append(lambda: circular(num_ranks, chunks))
    if chunks == 2:
        makers.append(lambda: v_shape(num_ranks))
    makers.append(lambda: wave(num_ranks, chunks))
    return [make() for make in makers]


def _rows(text: str, path: str) -> tuple[Row, ...]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        rows.extend(tuple(_cells(cells, path, reader.line_num)) for cells in reader)
    except csv.Error as error:
        raise ScheduleParseError(f"{path}: line {reader.line_num}: not CSV: {error}") from None
    return tuple(rows)


def _cells(cells: list[str], path: str, line: int) -> list[Slot]:
    row: list[Slot] = []
    for column, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        match = _CELL.fullmatch(cell.strip())
        if match is None or match.group(2) not in LETTERS:
            shown = cell if len(cell) <= 40 else cell[:39] + "…"
            raise ScheduleParseError(
                f"{path}: line {line}, cell {column}: {shown!r} is not an action; write stage, F, I, W or B, microbatch, "
                "for example 0F1 (PyTorch's compute-only format)"
            )
        row.append(Action(LETTERS[match.group(2)], int(match.group(1)), int(match.group(3))))
    return row
