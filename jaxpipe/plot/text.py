"""A timeline as lines of text, one a rank, for terminals and docstrings; only where it fits.

Time runs to the right in equal steps; ``F3`` is the F of microbatch 3 on the rank's first chunk, ``F3b`` on its second, a dot
an idle step. Only the compute lane is drawn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jaxpipe.plot.cells import chunk_numbers, origin

if TYPE_CHECKING:
    from jaxpipe.schedule.timeline import Event, Timeline

_MOST_STEPS = 400
_MOST_RANKS = 16


def text_picture(timeline: Timeline, max_width: int = 160) -> str | None:
    """The picture, or None if it would be wider than ``max_width`` or have more than 16 lines."""
    events = [e for e in timeline.events if e.lane == "compute" and e.end_s > e.start_s]
    if not events or timeline.num_ranks > _MOST_RANKS:
        return None
    begin = origin(timeline)
    step = _step([t - begin for e in events for t in (e.start_s, e.end_s)])
    if step is None:
        return None
    chunks = chunk_numbers(timeline)
    boxes = [
        (e.rank, round((e.start_s - begin) / step), round((e.end_s - begin) / step), _label(e, chunks)) for e in events
    ]
    width = max(math.ceil((len(label) + 1) / max(1, end - start)) for _, start, end, label in boxes)
    steps = max(end for _, _, end, _ in boxes)
    head = len(f"rank {timeline.num_ranks - 1}") + 2
    if head + steps * width > max_width:
        return None
    rows = [list((".".ljust(width)) * steps) for _ in range(timeline.num_ranks)]
    for rank, start, end, label in boxes:
        rows[rank][start * width : end * width] = label.ljust((end - start) * width)
    return "\n".join(f"{f'rank {r}':<{head}}{''.join(row).rstrip()}" for r, row in enumerate(rows))


def _label(event: Event, chunks: dict[tuple[int, int], int]) -> str:
    def one(op: str, stage: int, microbatch: int) -> str:
        chunk = chunks[event.rank, stage]
        return f"{op}{microbatch}" + ("" if chunk == 0 else chr(ord("a") + min(chunk, 25)))

    return "+".join(one(a.op, a.stage, a.microbatch) for a in event.action.actions)


def _step(times: list[float]) -> float | None:
    """The longest step of which all ``times`` are multiples, or None if there would be too many steps."""
    longest = max(times)
    tolerance = longest * 1e-9
    step = 0.0
    for time in times:
        a, b = time, step
        while b > tolerance:
            a, b = b, math.fmod(a, b)
            if a - b < tolerance:
                b = 0.0
        step = a
        if step > 0 and longest / step > _MOST_STEPS:
            return None
    return step if step > tolerance else None
