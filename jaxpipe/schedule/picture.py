"""A timeline as text: one line per rank, one column per unit of time.

For docstrings, terminals and tests; :mod:`jaxpipe.plot` draws the real pictures. A cell holds op and microbatch (``F0``); an
action longer than one column goes on in dashes, and the second, third, … chunk of a rank is marked ``b``, ``c``, …::

    rank 0 |F0 F1 F2 F3 BW0-- …
    rank 1 |   F0 F1 BW0-- F2 …

Host lanes, transfers to other ranks and what takes no time are left out. Times that are no multiple of the unit are rounded
to a column.
"""

from __future__ import annotations

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.timeline import Event, Timeline, chunks_in


def draw(timeline: Timeline, unit_s: float = 1.0) -> str:
    """Return the compute lanes of ``timeline`` as text, ``unit_s`` seconds a column.

    Raises:
        ScheduleError: ``unit_s`` is not positive.
    """
    if not unit_s > 0:
        raise ScheduleError(f"unit_s is {unit_s}; want seconds per column, above 0")
    shown = [_shown(timeline, rank) for rank in range(timeline.num_ranks)]
    chunk_of = chunks_in(event for row in shown for event in row)
    cells = [[(round(e.start_s / unit_s), round(e.end_s / unit_s), _label(e, chunk_of)) for e in row] for row in shown]
    width = max((-(-(len(label) + 1) // max(1, b - a)) for row in cells for a, b, label in row), default=1)
    margin = len(f"rank {timeline.num_ranks - 1}")
    return "\n".join(f"{f'rank {r}':<{margin}} |{_line(row, width)}" for r, row in enumerate(cells))


def _line(row: list[tuple[int, int, str]], width: int) -> str:
    line = ""
    for start, end, label in row:
        room = max(1, end - start) * width - 1
        line = f"{line:<{start * width}}{label:-<{room}} "
    return line.rstrip()


def _shown(timeline: Timeline, rank: int) -> list[Event]:
    """Return the events that take time on the compute lane."""
    return [e for e in timeline.of(rank, "compute") if e.end_s > e.start_s]


def _label(event: Event, chunk_of: dict[tuple[int, int], int]) -> str:
    chunks = [(a, chunk_of[event.rank, a.stage]) for a in event.action.actions]
    return "+".join(f"{a.op}{a.microbatch}{chr(ord('a') + chunk) if chunk else ''}" for a, chunk in chunks)
