"""Change which actions a row has, and which of them share a slot: backwards split or fused as another schedule has them
(:func:`backwards_like`), ops of users inserted (:func:`insert`), two actions made one slot where that pays (:func:`braid`).

Fused and split backwards add the same terms, but XLA may round them differently (seen in float32 on CPU): two orders give
equal bits only if they split the same backwards. B becomes BW where it stands, so its result is later and W is done earlier;
BW becomes B and W side by side. A braid with such a change comes apart into its actions.

A user's op gets one action behind each action of another op, as early as what it waits for allows. The order of all other
actions stays. Where an inserted action waits for other ranks, it stands before the first slot of its row
that starts, if every action takes one second, no earlier than the last of what it waits for ends. So its place agrees with an
order in time, and no rank waits for it in vain.

**Braiding** makes one slot of two actions of different microbatches that stand side by side (`stp.txt` section 3). In a
braided slot the collectives of each action have the other's compute under them (:mod:`~jaxpipe.schedule.engine`); in return
the slot waits for what both wait for, and both results come when it ends. So a pair is braided only if

* it has less to wait for as one slot than as two: the local gain is positive;
* the whole schedule gets shorter, or takes as long and holds no more. All pairs are tried at once, and by halves where that
  fails;
* what its second action waits for is there when the first starts, in the schedule's simulated timeline. Then every dependency
  still leads from an earlier start to a later one, and no braid can deadlock.

F's are braided with backwards first. Then any two of F, B, BW and W, if need be: two F's hide each other's collectives, as in
the authors' warm-up, and a W those of a B. Both at once would make less of the first (up to 4% longer in a few families).

The last rule leaves out pairs that wait for each other only as long as none of them is a braid: in DualPipe-V and interleaved
1F1B every steady forward may share a slot with the BW beside it, and all of them together save what one alone loses. So every F
is also braided with the BW behind it, or before it, without that rule; what deadlocks is not taken. The shortest of what these
beginnings lead to is the result (p = 8, m = 32, collectives as long as F: DualPipe-V 142.5, by the rule 130.5, in pairs 122.0;
interleaved 1F1B 142.0, 135.0 and 114.5, which is combined 1F1B).

Stages on several ranks are left alone. The order of actions never changes. The second action's memory is taken with the
first's: a B before an F holds one chunk more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, pairwise, product
from operator import itemgetter

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile, HostLink
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.engine import AT_ONCE, run_graph, slot_lanes
from jaxpipe.schedule.ir import BW, Action, B, Braid, Row, Schedule, Slot, W, op_spec
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import TIME, Timeline, at_most, nine_digits

_CLEARLY = 1.1
_WORTH_S = 1e-3
"""A measurement may be wrong by this factor on a busy machine, and another instruction may cost the host this many seconds."""


def split_backwards(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with B and then W in place of each BW."""
    return with_fused(schedule, frozenset())


def backwards_like(schedule: Schedule, like: Schedule) -> Schedule:
    """Return ``schedule`` with each backward split or fused as it is in ``like``.

    Where that splits a BW of a stage behind a B whose W still waits, the W's of the stage go in the order of its B's: gradients
    are added in one order then, so that sums have the same bits.
    """
    changed = with_fused(schedule, fused_backwards(like))
    if changed.rows == schedule.rows:
        return schedule
    return replace(changed, rows=tuple(map(_in_order_of_backwards, changed.rows)))


def fused_backwards(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return the (stage, microbatch) of each BW."""
    return frozenset((a.stage, a.microbatch) for a in schedule.actions() if a.op == BW.name)


def fused_stages(schedule: Schedule) -> tuple[int, ...]:
    """Return the stages that have a BW."""
    return tuple(sorted({stage for stage, _ in fused_backwards(schedule)}))


def costly_backwards(schedule: Schedule, costs: CostProfile) -> tuple[int, ...]:
    """Return the stages whose BW takes clearly longer than B and then W do: by a tenth, and by a millisecond."""

    def is_costly(stage: int) -> bool:
        apart_s = costs.b_s[stage] + costs.w_s[stage]
        return costs.bw_s[stage] > max(_CLEARLY * apart_s, apart_s + _WORTH_S)

    return tuple(stage for stage in fused_stages(schedule) if is_costly(stage))


def with_fused_stages(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """Return ``schedule`` with B and then W in place of each BW of all other stages."""
    fused_stages = set(stages)
    return with_fused(schedule, frozenset((s, i) for s, i in fused_backwards(schedule) if s in fused_stages))


def with_fused(schedule: Schedule, fused: frozenset[tuple[int, int]]) -> Schedule:
    """Return ``schedule`` with the backwards of ``fused``, pairs of stage and microbatch, as BW and all others as B and W."""

    def changed(slot: Slot) -> tuple[Slot, ...]:
        parts = tuple(part for action in slot.actions for part in _parts(action, fused))
        return (slot,) if parts == slot.actions else parts

    return with_slots(schedule, changed)


def with_slots(schedule: Schedule, change: Callable[[Slot], Iterable[Slot]]) -> Schedule:
    """Return ``schedule`` with ``change(slot)`` in place of each slot."""
    return replace(schedule, rows=tuple(tuple(x for slot in row for x in change(slot)) for row in schedule.rows))


def slot_of(actions: Iterable[Action]) -> tuple[Slot, ...]:
    """Return the one slot of these actions: an action, a braid, or no slot where there are none."""
    held = tuple(actions)
    return held if len(held) < 2 else (Braid(held),)


def _in_order_of_backwards(row: Row) -> Row:
    """Return ``row`` with the W's of each stage, in the places where there are any, in the order of the stage's B's.

    The k-th W of a stage then stands behind its B, as at least k B's stand before it. W's in braids stay where they are.
    """
    waiting: dict[int, list[Action]] = {}
    for slot in row:
        if isinstance(slot, Action) and slot.op == B.name:
            waiting.setdefault(slot.stage, []).append(replace(slot, op=W.name))
    unbraided = {slot for slot in row if isinstance(slot, Action)}
    orders = {stage: iter(w for w in actions if w in unbraided) for stage, actions in waiting.items()}
    return tuple(
        next(orders[slot.stage], slot)
        if isinstance(slot, Action) and slot.op == W.name and slot.stage in orders
        else slot
        for slot in row
    )


def _parts(action: Action, fused: frozenset[tuple[int, int]]) -> Iterator[Action]:
    """Return what replaces an action: itself, nothing (W is part of a BW), or other parts of the backward."""
    if (action.stage, action.microbatch) in fused:
        ops: tuple[str, ...] = {B.name: (BW.name,), W.name: ()}.get(action.op, (action.op,))
    else:
        ops = {BW.name: (B.name, W.name)}.get(action.op, (action.op,))
    return (replace(action, op=op) for op in ops)


def insert(schedule: Schedule, op: str, *, after: str, stages: Iterable[int]) -> Schedule:
    """Return ``schedule`` with the op called ``op`` behind each action of the op ``after`` of ``stages``, in its row, for
    the same microbatch (for each group of a stage with a span, on each rank of a shared stage).

    Raises:
        ScheduleError: ``op`` is unknown, there is no such stage, it has no action ``after``, or the result is not valid: the
            action is there already, or nothing makes what it waits for.
    """
    name, chosen = op_spec(op).name, sorted(set(stages))
    added: list[list[tuple[Action, int]]] = []  # of each rank, with the place of what it follows
    for row in schedule.rows:
        behind = ((a, at) for at, x in enumerate(row) for a in x.actions if a.op == after and a.stage in chosen)
        added.append([(replace(a, op=name), at) for a, at in behind])
    if wrong := [s for s in chosen if s not in {a.stage for new in added for a, _ in new}]:
        ops = sorted({a.op for a in schedule.actions() if a.stage == wrong[0]})
        why = f"no {after} to stand behind, but {' '.join(ops)}" if ops else f"no place in 0..{schedule.num_stages - 1}"
        raise ScheduleError(f"insert {name}: stage {wrong[0]} has {why}")
    rows = tuple((*row, *(a for a, _ in new)) for row, new in zip(schedule.rows, added, strict=True))
    graph = build_graph(replace(schedule, rows=rows))
    first = [start + len(row) for start, row in zip(graph.row_start, schedule.rows, strict=True)]
    numbers = {start + k for start, new in zip(first, added, strict=True) for k in range(len(new))}
    seconds = [float(n not in numbers) for n in range(len(graph.slots))]
    run = run_graph(graph, seconds, [AT_ONCE] * len(graph.transfers), HostLink())
    if graph.unmet or graph.problems or run.blocked:
        check_schedule(graph.schedule)

    @cache
    def ended_s(n: int) -> float:
        """Return when slot ``n`` ends; one that is added starts and ends when the last of what it waits for does."""
        return (
            max((ended_s(graph.source(x)) for x in graph.waits[n]), default=0.0)
            if n in numbers
            else run.end_s[n] or 0.0
        )

    new_rows = []
    for row, start, new, n in zip(schedule.rows, graph.row_start, added, first, strict=True):
        slots: list[list[Slot]] = [[slot] for slot in row]
        for _, k in sorted((ended_s(n + k), k) for k in range(len(new))):
            action, at = new[k]
            later = (j for j in range(at + 1, len(row)) if (run.start_s[start + j] or 0.0) >= ended_s(n + k))
            slots[next(later, len(row)) - 1].append(action)
        new_rows.append(tuple(chain.from_iterable(slots)))
    schedule = replace(schedule, rows=tuple(new_rows))
    check_schedule(schedule)
    return schedule


_PARTS = 32  # of the candidates, the smallest part that is tried by itself
_FEW_PARTS = 4  # likewise where most of what is tried deadlocks
_OPS = ("F", "B", "BW", "W")
_ANY = frozenset(product(_OPS, _OPS))
_WITH_F = frozenset(ops for ops in _ANY if ops.count("F") == 1)
_BESIDE = (frozenset({("F", "BW")}), frozenset({("BW", "F")}))
"""Neighbours that are braided whether or not the second could start when the first does."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Slots ``at`` and ``at + 1`` of a rank, and the seconds that a braid of them saves."""

    rank: int
    at: int
    gain_s: float


def braid(schedule: Schedule, costs: CostProfile, *, memory_limit: float = float("inf")) -> Schedule:
    """Return ``schedule`` with adjacent F, B, BW or W of different microbatches braided where the cost model says that it pays.

    Braids that are there stay. ``memory_limit``: peak activations per rank that braiding may not exceed, in units of one rank's
    share of a microbatch (what the schedule needs already is always allowed). The makespan never grows.

    Raises:
        ScheduleError: the schedule is invalid, or the costs are for another number of stages.
    """
    check_schedule(schedule)
    search = _Search(schedule, costs, memory_limit)
    best = _by_rule(search)
    for ops in _BESIDE:
        paired = _Search(schedule, costs, memory_limit, search.timeline)
        paired.take(_candidates(paired, ops, startable=False), _FEW_PARTS)
        if paired.taken:
            best = min(best, _by_rule(paired), key=_Search.key)
    check_schedule(best.schedule)
    return best.schedule


def shortest_in_pairs(schedules: Sequence[Schedule], costs: CostProfile | None) -> Schedule:
    """Return the shortest of ``schedules``, each as it is and with every F braided with the BW behind it; the first of equals,
    as it is where no collective takes time."""
    if costs is None or not costs.has_collectives:
        return schedules[0]
    searches = [_Search(schedule, costs, float("inf")) for schedule in schedules]
    for search in searches:
        search.take(_candidates(search, _BESIDE[0], startable=False), 1)
    return min(searches, key=_Search.key).schedule


def unbraid(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with each braid taken apart into its actions, in their order. Always valid if ``schedule`` is."""
    return with_slots(schedule, lambda slot: slot.actions)


class _Search:
    """The best schedule so far, and the pairs that it braids. ``timeline``: of ``schedule``, if it is there already."""

    def __init__(
        self, schedule: Schedule, costs: CostProfile, memory_limit: float, timeline: Timeline | None = None
    ) -> None:
        self.plain = self.schedule = schedule
        self.costs = costs
        self.timeline = timeline or simulate(schedule, costs)
        self.limit = max(memory_limit, max(self.timeline.peak_activations, default=0.0))
        self.taken: list[_Pair] = []

    def key(self) -> tuple[float, float]:
        """Return what is minimised: makespan, then peak."""
        return nine_digits(self.timeline.makespan), nine_digits(max(self.timeline.peak_activations, default=0.0))

    def _better(self, timeline: Timeline) -> bool:
        """Return whether it is shorter within the limit, or as long and holds no more than the best so far."""
        peak, makespan, least_s = max(timeline.peak_activations), timeline.makespan, self.timeline.makespan
        if not at_most(least_s, makespan):
            return at_most(peak, self.limit)
        return makespan <= least_s and at_most(peak, max(self.timeline.peak_activations))

    def take(self, pairs: Sequence[_Pair], parts: int) -> None:
        """Braid all of ``pairs``, or those halves, quarters, … down to one of ``parts`` with which nothing takes longer."""
        self._take(pairs, max(1, len(pairs) // parts))

    def _take(self, pairs: Sequence[_Pair], least: int) -> None:
        if not pairs:
            return
        tried = _with_braids(self.plain, [*self.taken, *pairs])
        try:
            timeline = simulate(tried, self.costs)
        except ScheduleError:  # two braids wait for each other
            timeline = None
        if timeline is not None and self._better(timeline):
            self.schedule, self.timeline = tried, timeline
            self.taken += pairs
        elif len(pairs) > least:
            middle = len(pairs) // 2
            self._take(pairs[:middle], least)
            self._take(pairs[middle:], least)


def _by_rule(search: _Search) -> _Search:
    """Return the search that braids on in the best schedule of ``search``: what could start when its neighbour does."""
    for ops in (_WITH_F, _ANY):
        search = _Search(search.schedule, search.costs, search.limit, search.timeline)
        search.take(_candidates(search, ops, startable=True), _PARTS)
    return search


class _Times:
    """When the slots and transfers of a simulated schedule begin and end."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        self.graph = build_graph(schedule)
        lanes = {(e.rank, e.action, e.lane == "send"): e for e in timeline.events if e.lane != "tp"}
        self.times = {key: (e.start_s, e.end_s) for key, e in lanes.items()}

    def ended(self, number: int) -> float:
        """Return the end of the slot or transfer that a wait names by its number."""
        graph, source = self.graph, self.graph.source(number)
        end = self.times[graph.rank_of[source], graph.slots[source], False][1]
        if number == source:
            return end
        moved = graph.transfers[number - len(graph.slots)]
        return max(end, self.times.get((moved.src, moved.action, True), (0.0, 0.0))[1])

    def together(self, rank: int, at: int) -> bool:
        """Return whether slot ``at + 1`` of a rank has all that it waits for when slot ``at`` begins, and that takes time."""
        row, first = self.graph.schedule.rows[rank], self.graph.row_start[rank]
        begins, ends = self.times[rank, row[at], False]
        return ends > begins and all(at_most(self.ended(x), begins) for x in self.graph.waits[first + at + 1])


def _candidates(search: _Search, ops: Collection[tuple[str, str]], *, startable: bool) -> list[_Pair]:
    """Return, of every rank, the neighbours with these ops and without a slot in common that save most if braided, by place in
    the row. ``startable``: those alone whose second action could start when the first does."""
    schedule = search.plain
    times = _Times(schedule, search.timeline) if startable else None
    gain = cache(partial(_gain, search.costs))
    candidates: list[_Pair] = []
    for rank, row in enumerate(schedule.rows):
        able = [(at, (*x.actions, *y.actions)) for at, (x, y) in enumerate(pairwise(row)) if _may(x, y, ops)]
        able = [(at, held) for at, held in able if not any(schedule.placement.is_shared(a.stage) for a in held)]
        pairs = [_Pair(rank, at, gain(*((a.op, a.stage) for a in actions))) for at, actions in able]
        candidates += _apart([x for x in pairs if x.gain_s > 0 and (times is None or times.together(rank, x.at))])
    return sorted(candidates, key=lambda x: (x.at, x.rank))


def _gain(costs: CostProfile, *actions: tuple[str, int]) -> float:
    """Return the seconds that a braid of these actions saves; 0 where it is rounding."""
    sequential_s = sum(slot_lanes(costs, [x]).seconds for x in actions)
    saved = sequential_s - slot_lanes(costs, actions).seconds
    return saved if saved > TIME * sequential_s else 0.0


def _may(one: Slot, two: Slot, ops: Collection[tuple[str, str]]) -> bool:
    """Return whether two slots, not braided yet, are of different microbatches and have these ops."""
    if type(one) is not Action or type(two) is not Action or one.microbatch == two.microbatch:
        return False
    return (one.op, two.op) in ops


def _apart(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Return those of the pairs of a rank that save most and share no slot."""
    best, sooner, last = (
        (0.0, list[_Pair]()),
        (0.0, list[_Pair]()),
        -1,
    )  # of all up to the last pair, of those before it
    for pair in pairs:
        saved, chain = sooner if last + 1 == pair.at else best
        best, sooner, last = max(best, (saved + pair.gain_s, [*chain, pair]), key=itemgetter(0)), best, pair.at
    return best[1]


def _with_braids(schedule: Schedule, pairs: Sequence[_Pair]) -> Schedule:
    """Return ``schedule`` with these pairs braided."""
    begins = {(x.rank, x.at) for x in pairs}
    rows = (
        tuple(
            Braid((*slot.actions, *row[at + 1].actions)) if (rank, at) in begins else slot
            for at, slot in enumerate(row)
            if (rank, at - 1) not in begins
        )
        for rank, row in enumerate(schedule.rows)
    )
    return replace(schedule, rows=tuple(rows))
