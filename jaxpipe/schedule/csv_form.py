"""PyTorch's CSV: one row per rank, cells ``0F1 0I1 0W1 0B1`` (stage, letter, microbatch).

Their F, I, W, B are our F, B, W, BW, and ``(0F1;1B0)OVERLAP_F_B`` is a braid. Both formats of ``torch.distributed.pipelining``
are read: in ``compute_comms``, which ``_dump_csv`` writes by default, cells such as ``0SEND_F0`` and ``1UNSHARD`` say what the
runtime sends, gathers and reduces; they are left out, since transfers follow from the placement here. The format holds
neither placement nor name: reading infers them (:mod:`~jaxpipe.schedule.infer`). Empty cells (idle slots) are skipped.
Written is ``compute_only``; what would not be read back is refused: offloading, user ops, stages that are not a chain.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule.infer import schedule_of
from jaxpipe.schedule.ir import Action, Braid, Row, Schedule, Slot
from jaxpipe.wording import clipped

LETTERS = {"F": "F", "I": "B", "W": "W", "B": "BW"}
_TO_LETTER = {op: letter for letter, op in LETTERS.items()}
_ACTION = re.compile(r"(0|[1-9][0-9]{0,17})([FIWB])(0|[1-9][0-9]{0,17})")
_BRAID = re.compile(r"\((.*)\)OVERLAP_F_B")
_TRAFFIC = re.compile(r"[0-9]{1,18}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,18}")


def format_csv(schedule: Schedule) -> str:
    """``schedule`` as CSV.

    Raises:
        ScheduleError: it holds something that the format can't say.
    """
    if not schedule.placement.is_chain:
        raise ScheduleError("CSV can't say that stages are not a chain; write .sched or .json")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, row in enumerate(schedule.rows):
        writer.writerow([_cell(slot, rank) for slot in row])
    return text.getvalue()


def _cell(slot: Slot, rank: int) -> str:
    if any(a.op not in _TO_LETTER for a in slot.actions):
        raise ScheduleError(
            f"CSV in PyTorch's format can't hold {slot} (rank {rank}), only F, B, W and BW; write .sched or .json"
        )
    cells = [f"{a.stage}{_TO_LETTER[a.op]}{a.microbatch}" for a in slot.actions]
    return cells[0] if isinstance(slot, Action) else f"({';'.join(cells)})OVERLAP_F_B"


def parse_csv(text: str, name: str, path: str = "<csv>", notice: Callable[[str], None] | None = None) -> Schedule:
    """The schedule that the CSV ``text`` describes. ``notice``: told in one line what was left out.

    Raises:
        ScheduleParseError: naming ``path``, row and cell, or why no placement fits.
    """
    reader = _Reader(path)
    rows = reader.rows(text)
    try:
        schedule = schedule_of(name, rows)
    except ScheduleError as error:
        raise ScheduleParseError(f"{path}: {error}", error.problems) from None
    if reader.traffic and notice is not None:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(reader.traffic.items()))
        notice(
            f"{path}: {reader.traffic.total()} cells left out that only communicate ({kinds}); transfers are implied"
        )
    return schedule


class _Reader:
    """Reads cells; counts those that only communicate, by kind."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.traffic: Counter[str] = Counter()

    def rows(self, text: str) -> tuple[Row, ...]:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        rows: list[Row] = []
        try:
            rows.extend(tuple(self._slots(cells, reader.line_num)) for cells in reader)
        except csv.Error as error:
            raise ScheduleParseError(f"{self.path}: line {reader.line_num}: not CSV: {error}") from None
        return tuple(rows)

    def _slots(self, cells: list[str], line: int) -> list[Slot]:
        row: list[Slot] = []
        for column, cell in enumerate(cells, start=1):
            text = cell.strip()
            traffic, braid = _TRAFFIC.fullmatch(text), _BRAID.fullmatch(text)
            if traffic is not None:
                self.traffic[traffic[1]] += 1
            elif text:
                actions = [_action(part) for part in (braid[1].split(";") if braid else [text])]
                found = tuple(a for a in actions if a is not None)
                if len(found) < len(actions) or (braid is not None and len(found) < 2):
                    raise ScheduleParseError(f"{self.path}: line {line}, cell {column}: {_refusal(cell)}")
                row.append(Braid(found) if braid else found[0])
        return row


def _action(text: str) -> Action | None:
    match = _ACTION.fullmatch(text.strip())
    return Action(LETTERS[match[2]], int(match[1]), int(match[3])) if match else None


def _refusal(cell: str) -> str:
    return (
        f"{clipped(cell, 40)!r} is not an action; write stage, F, I, W or B, microbatch, for example 0F1, or two of them "
        "as one slot, (0F1;1B0)OVERLAP_F_B (PyTorch's format)"
    )
