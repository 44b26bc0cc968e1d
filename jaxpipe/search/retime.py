"""When the actions of an order happen, and how much memory it holds: the simulator's answer, fast, for generators.

A :class:`Retimer` starts every action as early as its row, its producer and the links allow (``jaxpipe/README.md``), so it is
also the *squeeze* of `controllable-memory.txt` section 2: the order stays, the redundant gaps go. About half a microsecond an
action. It equals :func:`~jaxpipe.schedule.simulate.simulate` without O and L (a test). Memory of an order does not depend
on times, since a rank takes and gives back only where its own actions start and end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxpipe.schedule.clock import NEVER, Feed
from jaxpipe.schedule.problem import BW, B, CodeRows, Problem
from jaxpipe.schedule.timeline import Objective, order_key


@dataclass(frozen=True, slots=True)
class Extents:
    """Per rank, when its first action starts and its last one ends."""

    first_s: tuple[float, ...]
    last_s: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(self.last_s) - min(self.first_s)

    @property
    def span(self) -> float:
        """Return the longest rank span."""
        return max(last - first for first, last in zip(self.first_s, self.last_s, strict=True))


@dataclass(frozen=True, slots=True)
class Times(Extents):
    """``start_s[code]`` of every action that ran (inf for the rest).

    ``deadlocked``: some action never ran; the other figures then cover only what did.
    """

    start_s: list[float]
    deadlocked: bool


@dataclass(frozen=True, slots=True)
class Draft:
    """An order with what it takes: seconds until the last end, longest rank span, peak memory units over all ranks."""

    rows: CodeRows
    makespan: float
    span: float
    peak: float

    def no_worse_than(self, other: Draft, objective: Objective = "makespan") -> bool:
        """Return whether neither makespan nor span nor peak is larger (up to rounding); for ``span`` the makespan may be."""
        return (
            (objective == "span" or self.makespan <= other.makespan * SLACK)
            and self.span <= other.span * SLACK
            and self.peak <= other.peak * SLACK
        )

    def key(self, objective: Objective = "makespan") -> tuple[float, float, float]:
        """Return what is minimised, of this draft."""
        return order_key(objective, self.makespan, self.span, self.peak)


SLACK = 1 + 1e-9


class Retimer:
    """The tables of one problem, made once; call :meth:`times` for each order."""

    def __init__(self, problem: Problem) -> None:
        self.problem, tables = problem, problem.tables
        n, m = problem.num_replicas, problem.num_microbatches
        # per (op, replica): seconds; where its readiness stands; the code it makes ready, on which rank, over which link
        self._seconds, self._num_links = tables.seconds, tables.num_links
        # a BW may start when its B could
        self._slot = [0] * (3 * n) + [(B - BW) * n * m] * n
        feeds = [fed[0] if fed else Feed(-1, -1, 0.0, 0.0, (0,)) for fed in tables.feeds]
        self._after = [x.gaps[0] - slot if x.gaps[0] else 0 for x, slot in zip(feeds, self._slot, strict=True)]
        self._to = [x.rank if x.link >= 0 else -1 for x in feeds]
        self._link, self._link_s = [x.link for x in feeds], [x.seconds for x in feeds]
        self._occupied_s = [x.occupied_s for x in feeds]
        self._ready = [NEVER if needs else 0.0 for needs in tables.needs[: 3 * n] for _ in range(m)]

    def times(self, rows: CodeRows) -> Times:
        """Return every action of ``rows`` at its earliest.

        W is taken to stand after its B in the row; the checker is who looks.
        """
        m, p = self.problem.num_microbatches, self.problem.num_ranks
        seconds, slot, after, to = self._seconds, self._slot, self._after, self._to
        link, link_s, occupied_s = self._link, self._link_s, self._occupied_s
        ready = self._ready.copy()
        start = [NEVER] * (4 * self.problem.num_replicas * m)
        link_free = [0.0] * self._num_links
        position, free, first = [0] * p, [0.0] * p, [0.0] * p
        waits_for = [-1] * p
        # rank 0 on top: others wait for it
        stack = list(range(p - 1, -1, -1))
        while stack:
            r = stack.pop()
            row, at, now = rows[r], position[r], free[r]
            length = len(row)
            while at < length:
                code = row[at]
                kind = code // m
                code_ready = code + slot[kind]
                arrival = ready[code_ready]
                if arrival > now:
                    # not made yet: whoever makes it wakes this rank
                    if arrival == NEVER:
                        waits_for[r] = code_ready
                        break
                    now = arrival
                if not at:
                    first[r] = now
                start[code] = now
                now += seconds[kind]
                at += 1
                gap = after[kind]
                if gap:
                    rank = to[kind]
                    consumer = code_ready + gap
                    # what stays on this rank is there at once
                    if rank < 0:
                        ready[consumer] = now
                    else:
                        # a link takes transfers in the order in which they are made, one at a time
                        lane = link[kind]
                        sent = link_free[lane]
                        if sent < now:
                            sent = now
                        link_free[lane], ready[consumer] = sent + occupied_s[kind], sent + link_s[kind]
                        if waits_for[rank] == consumer:
                            waits_for[rank] = -1
                            stack.append(rank)
            position[r], free[r] = at, now
        # a row that has not come to its end waits for what never comes
        deadlocked = any(at < len(row) for at, row in zip(position, rows, strict=True))
        return Times(tuple(first), tuple(free), start, deadlocked)

    def draft(self, rows: CodeRows) -> Draft | None:
        """Return ``rows`` with its times and peak; None if it deadlocks."""
        times = self.times(rows)
        if times.deadlocked:
            return None
        return Draft(rows, times.makespan, times.span, max(peaks(self.problem, rows), default=0.0))


def peaks(problem: Problem, rows: CodeRows) -> tuple[float, ...]:
    """Return, per rank, the peak of live activations of an order, in units of one rank's share of one microbatch."""
    m, n = problem.num_microbatches, problem.num_replicas
    held, w_held = problem.held, problem.kept
    at_start = [*held, *([0.0] * (3 * n))]
    # what the end of an action adds: a B leaves w-residuals, which may be more than it gives back
    left = [
        *([0.0] * n),
        *(k - h for h, k in zip(held, w_held, strict=True)),
        *(-k for k in w_held),
        *(-h for h in held),
    ]
    rank_peaks = []
    for row in rows:
        live = peak = 0.0
        for code in row:
            kind = code // m
            live += at_start[kind]
            if live > peak:
                peak = live
            live += left[kind]
            if live > peak:
                peak = live
        rank_peaks.append(peak)
    return tuple(rank_peaks)


def within(drafts: Iterable[Draft | None], limit: float) -> Iterator[Draft]:
    """Return those that hold at most ``limit`` (units of a rank's share)."""
    return (draft for draft in drafts if draft is not None and draft.peak <= limit * SLACK)


def best_of(
    drafts: Iterable[Draft | None], anchor: Draft | None = None, objective: Objective = "makespan"
) -> Draft | None:
    """Return the first of the drafts by :meth:`Draft.key`, among those :meth:`no worse <Draft.no_worse_than>` than ``anchor``.

    An anchor is a known answer: with one, the result is at least as good in makespan *and* in span *and* in peak, where
    choosing by makespan alone would trade one for another.
    """
    best = anchor
    for draft in drafts:
        if draft is None or (anchor is not None and not draft.no_worse_than(anchor, objective)):
            continue
        if best is None or draft.key(objective) < best.key(objective):
            best = draft
    return best
