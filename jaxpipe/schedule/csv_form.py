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
from collections.abc import Callable, Iterator

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.files import located
from jaxpipe.schedule.infer import schedule_of
from jaxpipe.schedule.ir import Action, Braid, Schedule, Slot
from jaxpipe.text import truncate

LETTERS = {"F": "F", "I": "B", "W": "W", "B": "BW"}
_TO_LETTER = {op: letter for letter, op in LETTERS.items()}
_ACTION = re.compile(r"(0|[1-9][0-9]{0,17})([FIWB])(0|[1-9][0-9]{0,17})")
_BRAID = re.compile(r"\((.*)\)OVERLAP_F_B")
_TRAFFIC = re.compile(r"[0-9]{1,18}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,18}")


def format_csv(schedule: Schedule) -> str:
    """Return ``schedule`` as CSV.

    Raises:
        ScheduleError: it holds something that the format can't say.
    """
    placement = schedule.placement
    if not placement.is_chain or placement.has_spans or placement.detached:
        raise ScheduleError(
            "CSV can't say that stages are not a chain, or have spans, or are detached; write .sched or .json"
        )
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
    """Return the schedule that the CSV ``text`` describes. ``notice``: told in one line what was left out.

    Raises:
        ScheduleParseError: naming ``path``, row and cell, or why no placement fits.
    """
    traffic: Counter[str] = Counter()
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [tuple(_slots(cells, f"{path}: line {reader.line_num}", traffic)) for cells in reader]
    except csv.Error as error:
        raise ScheduleParseError(f"{path}: line {reader.line_num}: not CSV: {error}") from None
    schedule = located(path, schedule_of, name, rows)
    if traffic and notice is not None:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(traffic.items()))
        notice(f"{path}: {traffic.total()} cells left out that only communicate ({kinds}); transfers are implied")
    return schedule


def _slots(cells: list[str], where: str, traffic: Counter[str]) -> Iterator[Slot]:
    """Yield the slots of a row; counts in ``traffic`` the cells that only communicate, by kind."""
    for column, cell in enumerate(map(str.strip, cells), start=1):
        if communicates := _TRAFFIC.fullmatch(cell):
            traffic[communicates[1]] += 1
        elif cell:
            braid = _BRAID.fullmatch(cell)
            parts = [_ACTION.fullmatch(part.strip()) for part in (braid[1].split(";") if braid else [cell])]
            actions = tuple(Action(LETTERS[x[2]], int(x[1]), int(x[3])) for x in parts if x)
            if len(actions) < len(parts) or (braid and len(actions) < 2):
                raise ScheduleParseError(
                    f"{where}, cell {column}: {truncate(cell, 40)!r} is not an action; write stage, F, I, W or B, microbatch, "
                    "for example 0F1, or two of them as one slot, (0F1;1B0)OVERLAP_F_B (PyTorch's format)"
                )
            yield Braid(actions) if braid else actions[0]
