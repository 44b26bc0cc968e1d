"""Every W directly behind its B: what a schedule holds for its W's becomes as little as it can be.

What W needs can't leave for the host (`pipeoffload.txt` offloads what F keeps), so an order that puts its W's off, as
zero-bubble orders do to fill waits, stays as high as they pile up. `pipeoffload.txt` section 3.1 runs each W right after its B,
to keep its strategies simple. The result can take longer: W's then stand before B's that other ranks wait for.
"""

from __future__ import annotations

from dataclasses import replace

from jaxpipe.schedule.ir import Action, Schedule, Slot


def prompt_weights(schedule: Schedule) -> Schedule:
    """``schedule`` with each W behind the slot that holds its B. W's in braids, and fused BW, stay where they are.

    W waits for nothing but its B, on the same rank, so a valid schedule stays valid.
    """
    return replace(schedule, rows=tuple(tuple(_prompt(row)) for row in schedule.rows))


def _prompt(row: tuple[Slot, ...]) -> list[Slot]:
    alone = {s for s in row if type(s) is Action and s.op == "W"}
    moved: list[Slot] = []
    for slot in row:
        if slot in alone:
            continue
        moved.append(slot)
        behind = (Action("W", a.stage, a.microbatch) for a in slot.actions if a.op == "B")
        moved += (w for w in behind if w in alone)
    return moved
