"""Improving an order a neighbourhood at a time: CP-SAT reorders what starts in a stretch of time, the rest keeps its order.

What starts before the neighbourhood is fixed. What starts after it moves as one piece, earlier by a shift that CP-SAT
maximises; what is inside is free on the chosen ranks, and keeps its order (not its times) on the others. Memory is exact:
orders outside don't change, so each rank's level at the edges is known. A proposal is re-timed by the caller with real costs,
so rounding here costs at most a good proposal, never validity. Large-neighbourhood search in the sense of Shaw (1998).

The shift alone is blind to progress that other neighbourhoods have to complete; with ``pull_early``, of equal shifts the
smallest sum of starts is taken, which costs time, so not every time. Not modelled: offload (rows with O, L or S are not
touched), links that are busy, workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

from jaxpipe.schedule.problem import BW, B, CodeRows, F, Problem, W
from jaxpipe.schedule.retime import Retimer
from jaxpipe.schedule.solve.cp_sat import LITE, WHOLE_RESERVOIRS, run
from jaxpipe.schedule.solve.ticks import common_step
from jaxpipe.schedule.tolerance import MEMORY

_TICKS, _FINEST = 128, 1024  # per mean action
_UNITS = 1 << 20  # per rank's share of a microbatch


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What starts in ``begin <= t < end`` (ticks) on ``ranks`` is free."""

    begin: float
    end: float
    ranks: frozenset[int]


class TickedProblem:
    """A problem in whole ticks, for the neighbourhoods of any of its orders.

    ``limits``: activations allowed per rank, in units of its share of one microbatch.
    """

    def __init__(self, problem: Problem, limits: Sequence[float]) -> None:
        self.problem = problem
        tick = _tick([x for x in (*problem.f_s, *problem.b_s, *problem.w_s) if x > 0])

        def whole(seconds: Sequence[float]) -> tuple[float, ...]:
            return tuple(float(round(x / tick)) for x in seconds)

        self.in_ticks = replace(
            problem,
            f_s=whole(problem.f_s),
            b_s=whole(problem.b_s),
            w_s=whole(problem.w_s),
            bw_s=whole(problem.bw_s),
            down_s=whole(problem.down_s),
            up_s=whole(problem.up_s),
        )
        self.retimer = Retimer(self.in_ticks)
        actions = (*self.in_ticks.f_s, *self.in_ticks.b_s, *self.in_ticks.w_s, *self.in_ticks.bw_s)
        # until an action's result is there, at most
        self.longest = max(actions) + max(*self.in_ticks.down_s, *self.in_ticks.up_s)
        self.size = [int(x) for name in ("f_s", "b_s", "w_s", "bw_s") for x in getattr(self.in_ticks, name)]
        most = problem.num_microbatches + 1.0
        self.limits = [int(min(x, most) * _UNITS * (1 + MEMORY)) for x in limits]
        held, kept = ([-int(-x * _UNITS // 1) for x in sizes] for sizes in (problem.held, problem.kept))
        given = [k - h for h, k in zip(held, kept, strict=True)]
        self.change = [*held, *given, *(-k for k in kept), *(-h for h in held)]


def _tick(busy: Sequence[float]) -> float:
    """A step that all are multiples of, if it is not too small a part of the mean; else a small part of the mean."""
    if not busy:
        return 1.0
    mean = sum(busy) / len(busy)
    step = common_step(busy)
    return step if step is not None and mean / step <= _FINEST else mean / _TICKS


class NeighbourhoodModel:
    """CP-SAT's variables for one neighbourhood; ``solve`` proposes rows."""

    def __init__(
        self,
        ticked: TickedProblem,
        rows: CodeRows,
        starts: Sequence[float],
        neighbourhood: Neighbourhood,
        *,
        by_span: bool,
        pull_early: bool,
    ) -> None:
        from ortools.sat.python import cp_model

        self.ticked, self.starts, self.neighbourhood = ticked, starts, neighbourhood
        self.by_span, self.pull_early = by_span, pull_early
        self.m = ticked.problem.num_microbatches
        self.model: Any = cp_model.CpModel()
        self.begin, self.end = int(neighbourhood.begin), int(neighbourhood.end)
        self.rows = [self._split(row) for row in rows]
        self.inside = {code for _, middle, _ in self.rows for code in middle}
        self.after = {code for _, _, late in self.rows for code in late}
        longest = max((self._size(code) for code in self.inside), default=0)
        self.latest = self.end + longest
        self.shift: Any = self.model.new_int_var(0, max(0, self.end - self.begin), "shift")
        self.at = {code: self.model.new_int_var(self.begin, self.latest, "") for code in self.inside}
        self._lanes()
        self._waits()
        self._memory()
        self._objective()

    def _split(self, row: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        parts: tuple[list[int], list[int], list[int]] = ([], [], [])
        for code in row:
            t = self.starts[code]
            parts[0 if t < self.begin else 1 if t < self.end else 2].append(code)
        return parts

    def _size(self, code: int) -> int:
        return self.ticked.size[code // self.m]

    def _start(self, code: int) -> int:
        return int(self.starts[code])

    def _change(self, code: int) -> int:
        """Units taken (at the start of an F) or given back (at the end of the others)."""
        return self.ticked.change[code // self.m]

    def _begins(self, code: int) -> Any:
        """When an action begins: a variable, a number, or a number less the shift."""
        if code in self.at:
            return self.at[code]
        start = self._start(code)
        return start - self.shift if code in self.after else start

    def _lanes(self) -> None:
        model, size = self.model, self._size
        for rank, (before, middle, late) in enumerate(self.rows):
            floor = self._start(before[-1]) + size(before[-1]) if before else 0
            if middle and floor > self.begin:
                for code in middle:
                    model.add(self.at[code] >= floor)
            if late:
                first = self._begins(late[0])
                model.add(first >= floor)
                for code in middle:
                    model.add(self.at[code] + size(code) <= first)
            if rank in self.neighbourhood.ranks and len(middle) > 1:
                model.add_no_overlap([model.new_fixed_size_interval_var(self.at[c], size(c), "") for c in middle])
            else:
                for one, two in pairwise(middle):
                    model.add(self.at[two] >= self.at[one] + size(one))

    def _waits(self) -> None:
        """Every wait that touches the neighbourhood, or leads from before it to after it."""
        inside, after = self.inside, self.after
        for before, middle, _ in self.rows:
            for code in (*self._reaching(before), *middle):
                for then, lag in self._followers(code):
                    if code in inside or then in inside or then in after:
                        self.model.add(self._begins(then) >= self._begins(code) + lag)
        last: dict[tuple[int, int], int] = {}
        for rank in self.neighbourhood.ranks:
            for code in self.rows[rank][1]:  # the microbatches of a stage keep their order in each op
                kind = code // self.ticked.problem.num_microbatches
                key = rank, kind
                if key in last:
                    self.model.add(self.at[code] >= self.at[last[key]] + self._size(last[key]))
                last[key] = code

    def _reaching(self, before: Sequence[int]) -> list[int]:
        """Those before the neighbourhood whose results may come after its begin; for all others nothing inside has to wait."""
        last = self.begin - self.ticked.longest
        return list(takewhile(lambda code: self.starts[code] > last, reversed(before)))

    def _followers(self, code: int) -> list[tuple[int, int]]:
        """(action, ticks after the start of ``code``) that wait for ``code`` and are in the order."""
        problem = self.ticked.in_ticks
        op, k, i = problem.decode(code)
        stages = problem.placement.num_stages
        size = self._size(code)
        found = []
        if op == F and k % stages < stages - 1:
            found.append((problem.code(F, k + 1, i), size + int(problem.down_s[k])))
        elif op == F:
            found += [(problem.code(back, k, i), size) for back in (B, BW)]
        if op in (B, BW) and k % stages:
            found += [(problem.code(back, k - 1, i), size + int(problem.up_s[k])) for back in (B, BW)]
        if op == B:
            found.append((problem.code(W, k, i), size))
        return [x for x in found if x[0] in self.inside or x[0] in self.after or self._known(x[0])]

    def _known(self, code: int) -> bool:
        return self.starts[code] != float("inf")

    def _memory(self) -> None:
        problem, m = self.ticked.problem, self.ticked.problem.num_microbatches
        n = problem.num_replicas
        for rank in self.neighbourhood.ranks:
            before, middle, _ = self.rows[rank]
            limit = self.ticked.limits[rank]
            if not any(code < n * m for code in middle):
                continue
            level = sum(self._change(code) for code in before)
            times, changes = [], []
            for code in middle:
                change = self._change(code)
                if change:
                    at = self.at[code] if change > 0 else self.at[code] + self._size(code)
                    times.append(at)
                    changes.append(change)
            if level:
                times.append(self.begin)
                changes.append(level)
            # an action that started before the neighbourhood may give back inside it; taken as given back at its end
            for code in before[-1:]:
                change = self._change(code)
                over = self._start(code) + self._size(code)
                if change < 0 and over > self.begin:
                    times += [self.begin, over]
                    changes += [-change, change]
            self.model.add_reservoir_constraint(times, changes, -limit - level, limit)

    def _objective(self) -> None:
        model = self.model
        total = sum(self.at.values()) if self.pull_early else 0
        weight = len(self.at) * (self.latest - self.begin + 1) + 1 if self.pull_early else 1
        ends = [self.at[code] + self._size(code) for code in self.inside]
        if not self.by_span:
            if self.after:
                model.maximize(self.shift * weight - total)
                return
            last = model.new_int_var(0, self.latest + 1_000_000, "")
            model.add_max_equality(last, ends)
            model.minimize(last * weight + total)
            return
        longest = model.new_int_var(0, 1 << 40, "")
        for before, middle, late in self.rows:
            first = self._start(before[0]) if before else None
            if first is None and middle:
                first = model.new_int_var(self.begin, self.latest, "")
                for code in middle:
                    model.add(first <= self.at[code])
            if first is None:
                continue  # the whole row moves: its span stays
            if late:
                model.add(longest >= self._start(late[-1]) + self._size(late[-1]) - self.shift - first)
            else:
                for code in middle:
                    model.add(longest >= self.at[code] + self._size(code) - first)
                if not middle:
                    model.add(longest >= self._start(before[-1]) + self._size(before[-1]) - first)
        model.minimize(longest * weight + total - self.shift)

    def solve(self, budget: dict[str, Any]) -> tuple[list[list[int]] | None, bool]:
        """Proposed rows, None if nothing was found; and whether the neighbourhood was searched to its end."""
        for code, at in self.at.items():
            self.model.add_hint(at, self._start(code))
        self.model.add_hint(self.shift, 0)
        solver, found, done = run(self.model, LITE, WHOLE_RESERVOIRS, budget)
        if not found:
            return None, done
        rows = []
        for before, middle, late in self.rows:
            placed = sorted(middle, key=lambda code: (solver.value(self.at[code]), code))
            rows.append([*before, *placed, *late])
        return rows, done
