"""Turns a recorded step into a measured :class:`Timeline`, and how far it is from a replay of its own durations.

``measured ÷ replay`` is the robust runtime statistic: the wall time of the step over the makespan of the same order with the
same measured durations and no communication. It shows what the runtime loses to dispatch, transfers and waiting; noise in
the durations themselves cancels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from jaxpipe.runtime.executor import StepOutputs
from jaxpipe.runtime.processes import Processes
from jaxpipe.schedule import CostProfile, Event, Schedule, Slot, Timeline, build_graph, replay
from jaxpipe.schedule.memory import memory_curves, static_bytes
from jaxpipe.schedule.text import parse_slot


def gathered(outputs: StepOutputs, processes: Processes, clock: tuple[float, float]) -> StepOutputs:
    """A recorded step with the events of all processes, in process 0; elsewhere it stays as it is. ``clock``: from
    :meth:`~jaxpipe.runtime.processes.Processes.clock`, before the step."""
    if processes.number == 1:
        return outputs
    ahead, error = clock
    began = outputs.stamps[0] + ahead
    local_events = [(e.rank, e.lane, str(e.action), began + e.start_s, began + e.end_s) for e in outputs.events]
    parts = processes.gather("events", (began, began + outputs.step_s, error, local_events))
    if not parts:
        return outputs
    starts, ends, errors, events_of = zip(*parts, strict=True)
    first = min(starts)
    events = [Event(r, lane, parse_slot(a), start - first, end - first) for r, lane, a, start, end in chain(*events_of)]
    return replace(outputs, events=tuple(events), step_s=max(ends) - first, clock_error_s=max(errors))


def measured_timeline(schedule: Schedule, costs: CostProfile, events: Sequence[Event]) -> Timeline:
    """The timeline of recorded ``events`` (one per slot of the schedule); memory from the bytes in ``costs``.

    Braided slots that ran as several calls become one event from the first start to the last end.
    """
    merged = _slot_events(schedule, events)
    graph = build_graph(schedule)
    where = [merged[(graph.rank_of[n], slot)] for n, slot in enumerate(graph.slots)]
    memory, peaks = memory_curves(graph, costs, [e.start_s for e in where], [e.end_s for e in where])
    return Timeline(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        events=tuple(merged[(rank, slot)] for rank in range(schedule.num_ranks) for slot in schedule.rows[rank]),
        memory=memory,
        peak_activations=peaks,
        static_bytes=static_bytes(schedule.placement, costs),
        source="measured",
    )


def replay_ratio(schedule: Schedule, timeline: Timeline, step_s: float) -> float:
    """``step_s`` ÷ makespan of the same order with ``timeline``'s durations and no communication."""
    durations: dict[tuple[int, Slot], float] = {(e.rank, e.action): e.end_s - e.start_s for e in timeline.events}
    return step_s / replay(schedule, durations).makespan


def seconds_by_op(timelines: Sequence[Timeline]) -> dict[tuple[str, int], float]:
    """Mean seconds of each (op, stage) over all microbatches of some measured timelines."""
    return {at: sum(lengths_s) / len(lengths_s) for at, lengths_s in lengths_by_op(t.events for t in timelines).items()}


def lengths_by_op(steps: Iterable[Iterable[Event]]) -> dict[tuple[str, int], list[float]]:
    """Seconds of each (op, stage) in all microbatches of some recorded steps. What ran in a braid does not count: its time is
    not its own."""
    lengths_s: dict[tuple[str, int], list[float]] = {}
    for event in chain.from_iterable(steps):
        if len(event.action.actions) == 1:
            (action,) = event.action.actions
            lengths_s.setdefault((action.op, action.stage), []).append(event.end_s - event.start_s)
    return lengths_s


def _slot_events(schedule: Schedule, events: Sequence[Event]) -> dict[tuple[int, Slot], Event]:
    event_of = {(e.rank, e.action): e for e in events}
    merged: dict[tuple[int, Slot], Event] = {}
    for rank, row in enumerate(schedule.rows):
        for slot in row:
            slot_event = event_of.get((rank, slot))
            parts = [slot_event] if slot_event is not None else [event_of[(rank, action)] for action in slot.actions]
            merged[(rank, slot)] = Event(
                rank, parts[0].lane, slot, min(e.start_s for e in parts), max(e.end_s for e in parts)
            )
    return merged
