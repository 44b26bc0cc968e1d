"""Fillers that look at a known order from its end: time runs backwards, and what can be later is.

Read backwards an order is an order: F of a stage follows F of the next one, the last F its B, B that of the stage before and
its own W. So a rank takes the next action of its row from the end if that is ready; otherwise the first of those that come
after it (earlier in the row) that is ready and that memory leaves room for. What :mod:`~jaxpipe.search.list_schedule.fillers`
does for the warm-up this does for the cool-down: forwards a wait there is filled too late, since what would fill it follows F's
that could have run before.

Memory: backwards W takes what is kept, B the rest of what is held, and F gives it back. What takes moves up only if the row
stays within the limit all the way. So the result holds at most the limit, or what the given order holds if that is more, and it
never gets stuck. Each replica keeps its order of microbatches.

Source: schedules of projects are justified to the right and then to the left, which shortens them (Wiest 1964; Valls,
Ballestín and Quintanilla 2005); list scheduling in both directions, and memory, are ours. Not modelled: BW.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxpipe.schedule.clock import Choose, Clock, Feed, Tables
from jaxpipe.schedule.problem import B, CodeRows, Problem, W
from jaxpipe.search.retime import SLACK

GAPS = ((1.0, 1.0), (0.5, 0.5), (1.0, 0.5))
"""How long a wait must be for an F or B to fill it, and for a W: × its seconds. Tried one after the other."""


def backward_tables(problem: Problem) -> Tables:
    """Build what the clock looks up where time runs backwards, each feed the other way round; codes are those of
    ``problem``, without BW."""
    forwards, n, m = problem.tables, problem.num_replicas, problem.num_microbatches
    sent = [(kind, kind + x.gaps[0] // m, x) for kind in range(W * n) for x in forwards.feeds[kind]]
    sent += [(B * n + k, W * n + k, Feed(problem.rank[k], -1, 0.0, 0.0, ())) for k in range(n)]
    feeds: list[tuple[Feed, ...]] = [()] * (3 * n)
    needs = [0] * (3 * n)
    for source, kind, feed in sent:
        feeds[kind] = (feed._replace(rank=problem.rank[source % n], gaps=((source - kind) * m,)),)
        needs[source] += 1
    rest = (held - residue for held, residue in zip(problem.held, problem.kept, strict=True))
    return replace(
        forwards,
        ranks=forwards.ranks[: 3 * n],
        seconds=forwards.seconds[: 3 * n],
        change=[*(-held for held in problem.held), *rest, *problem.kept],
        feeds=feeds,
        needs=needs,
    )


def filled_from_the_end(problem: Problem, rows: CodeRows, limit: float) -> Iterator[list[list[int]]]:
    """Yield ``rows`` (complete, free of deadlock, without BW) with waits filled from the end within ``limit`` (units of a
    rank's share), in each of the ways of :data:`GAPS`."""
    tables = backward_tables(problem)
    reversed_rows = [[*reversed(row)] for row in rows]
    for pull_gap, w_gap in GAPS:
        clock = Clock(tables)
        gaps = [w_gap if kind >= W * problem.num_replicas else pull_gap for kind in range(3 * problem.num_replicas)]
        clock.run(_filling(clock, reversed_rows, limit * SLACK, gaps))
        yield [[*reversed(row)] for row in clock.rows]


def _filling(clock: Clock, rows: CodeRows, room: float, gaps: list[float]) -> Choose:
    """Return the chooser that fills ``rows``, an order read backwards."""
    m, change = clock.tables.num_microbatches, clock.tables.change
    ready, memory, tiny = clock.ready, clock.memory, clock.tiny
    least = [gap * seconds - tiny for gap, seconds in zip(gaps, clock.tables.seconds, strict=True)]
    place = {code: k for row in rows for k, code in enumerate(row)}
    profiles: list[list[float]] = []  # memory once an action has started
    queues: list[dict[int, list[int]]] = [{} for _ in rows]  # by kind, the last is next
    for row, queue in zip(rows, queues, strict=True):
        live, profile = 0.0, []
        for code in row:
            live += change[code // m]
            profile.append(live)
        profiles.append(profile)
        for code in reversed(row):
            queue.setdefault(code // m, []).append(code)
    head, done = [0] * len(rows), set[int]()

    def filler(r: int, now: float, gap: float) -> int:
        """Return the code to run while the head of the row is ``gap`` seconds away."""
        best, at = -1, len(rows[r])
        for kind, queue in queues[r].items():
            if not queue or gap < least[kind] or place[queue[-1]] >= at or ready[queue[-1]] > now + tiny:
                continue
            free = room - change[kind]
            if change[kind] > 0 and max(memory[r], *profiles[r][head[r] : place[queue[-1]]]) > free:
                continue
            best, at = queue[-1], place[queue[-1]]
        return best

    def choose(r: int, now: float) -> int:
        row, at = rows[r], head[r]
        while at < len(row) and row[at] in done:
            at += 1
        head[r] = at
        if at == len(row):
            return -1
        code, gap = row[at], ready[row[at]] - now
        if gap > tiny and (code := filler(r, now, gap)) < 0:
            return -1
        done.add(code)
        queues[r][code // m].pop()
        for k in range(at, place[code]):
            profiles[r][k] += change[code // m]
        return code

    return choose
