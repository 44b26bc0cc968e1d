"""CP-SAT's model of one neighbourhood of a schedule with offload: what is free moves, memory is exact by time.

Unlike in :mod:`.neighbourhoods`, order alone does not keep memory here: an O that ends gives room whatever stands around it. So
the model has times for everything: fixed for what starts before the neighbourhood, variables inside, ``time - shift`` for what
starts after it: one rigid piece a rank, which moves as far as the neighbourhood and the others' pieces let it. Actions inside
that are not free keep their order, not their times. An activation whose O and L are, or would be, inside may leave or stay; so
what is held when a late piece begins is what was held before, and only what of it overlaps with the neighbourhood's last
actions needs a look. Microbatches of a stage keep their order in each op but O.

Not modelled: links that are busy, workspace, lanes per direction as rows see them (:mod:`.model_memory`); a proposal that
fails for these is dropped by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from jaxpipe.schedule.solve.cp_sat import LITE, run
from jaxpipe.schedule.solve.formulation import Key
from jaxpipe.schedule.solve.instance import Instance
from jaxpipe.schedule.solve.offload_neighbourhood_memory import add_memory
from jaxpipe.schedule.solve.offload_neighbourhood_times import NeighbourhoodTimes, OffloadNeighbourhood, Pair
from jaxpipe.schedule.solve.rows import Starts

TieBreak = Mapping[str, int]
"""Weights of starts (F, B, W) and of what is ``away``; of equally good answers, that with the least sum is sought."""


class OffloadNeighbourhoodModel(NeighbourhoodTimes):
    """Variables and constraints of one neighbourhood around ``starts``."""

    def __init__(
        self, instance: Instance, starts: Starts, neighbourhood: OffloadNeighbourhood, tie_break: TieBreak | None = None
    ) -> None:
        super().__init__(instance, starts, neighbourhood)
        self.tie_break = tie_break
        self.spent = 0.0  # deterministic time of the solve
        self.slack: dict[Pair, int] = {}
        self._lanes()
        self._waits()
        for (first, second), slack in self.slack.items():
            self.cp.add(self.shift[second] <= self.shift[first] + slack)
        self._orders()
        add_memory(self)
        self._objective()

    def _add(self, constraint: Any, *keys: Key) -> None:
        """A constraint that holds if all of ``keys`` take place."""
        literals = {key[1:]: self.toggles[key[1:]] for key in keys if key[0] in "OL" and key[1:] in self.toggles}
        made = self.cp.add(constraint)
        if literals:
            made.only_enforce_if(list(literals.values()))

    # Time.

    def _lanes(self) -> None:
        lanes: dict[tuple[int, str], list[Key]] = {}
        rank = self.instance.problem.rank
        for key in [*self.now, *sorted(self.added)]:
            lane = self.instance.lane_of(key[1], key[0]) if key[0] in "OL" else (rank[key[1]], "compute")
            lanes.setdefault(lane, []).append(key)
        for keys in lanes.values():
            self._lane([key for key in keys if key in self.now], [key for key in keys if key in self.added])

    def _lane(self, keys: list[Key], added: list[Key]) -> None:
        """One at a time: what is before, then what is inside, then what is late."""
        keys.sort(key=lambda key: (self.now[key], self.now[key] + self.length(key), "FBWOL".index(key[0]), key))
        before = [key for key in keys if self.now[key] < self.begin]
        late = [key for key in keys if key in self.late]
        known = [key for key in keys if key in self.inside]
        middle = known + added
        firsts = list({self.instance.problem.rank[key[1]]: key for key in reversed(late)}.values())
        floor = max((self.now[key] + self.length(key) for key in before), default=0)
        for key in middle:
            if floor > self.begin:
                self._add(self.at[key] >= floor, key)
            for first in firsts:
                self._add(self.end_of(key) <= self.at_of(first), key)
            self._add(self.at[key] <= self.end - self._shift(key), key)
        for first in firsts:
            self._add(self.at_of(first) >= floor)
        for one, two in pairwise(late):
            self._slack(one, two, self.length(one))
        for one, two in pairwise([key for key in known if not self._free(key)]):
            self._add(self.at[two] >= self.end_of(one))
        if any(self._free(key) for key in middle) and len(middle) > 1:
            self.cp.add_no_overlap([self._interval(key) for key in middle])

    def _slack(self, one: Key, two: Key, lag: int) -> None:
        """``two`` starts ``lag`` or more after ``one``, both late: how much more its rank may move."""
        pair = self.instance.problem.rank[one[1]], self.instance.problem.rank[two[1]]
        if pair[0] != pair[1]:
            slack = self.now[two] - self.now[one] - lag
            self.slack[pair] = min(slack, self.slack.get(pair, slack))

    def _interval(self, key: Key) -> Any:
        if key[0] in "OL" and key[1:] in self.toggles:
            return self.cp.new_optional_fixed_size_interval_var(
                self.at[key], self.length(key), self.toggles[key[1:]], ""
            )
        return self.cp.new_fixed_size_interval_var(self.at[key], self.length(key), "")

    def _waits(self) -> None:
        """Every wait that touches the neighbourhood, or leads from before it to after it."""
        for one, two, lag in self._edges():
            if one in self.late and two in self.late:
                self._slack(one, two, lag)
            elif one in self.at or two in self.at or two in self.late:
                self._add(self.at_of(two) >= self.at_of(one) + lag, one, two)

    def _edges(self) -> Iterator[tuple[Key, Key, int]]:
        """(action, action that waits for it, ticks from start to start)."""
        instance = self.instance
        away = self.starts.away | set(self.toggles)
        for op, k, i in [key for key in self.now if key[0] in "FB"]:
            size = self.length((op, k, i))
            if op == "F":
                yield ("F", k, i), ("B", k, i), size
                if not instance.is_last(k):
                    yield ("F", k, i), ("F", k + 1, i), size + instance.down[k]
                if (k, i) in away:
                    yield ("F", k, i), ("O", k, i), size
                    yield ("O", k, i), ("L", k, i), instance.duration["O"][k]
                    yield ("L", k, i), ("B", k, i), instance.duration["L"][k]
                continue
            if not instance.is_first(k):
                yield ("B", k, i), ("B", k - 1, i), size + instance.up[k]
            if (k, i) not in self.starts.fused:
                yield ("B", k, i), ("W", k, i), size

    def _orders(self) -> None:
        """Microbatches of a replica in order, but for O: at the start, what is needed last leaves first. O of what stays
        stands at the neighbourhood's begin, L where that of the microbatch before ends."""
        moving: dict[tuple[str, int], list[Key]] = {}
        for key in sorted(self.at):
            if key[0] != "O":
                moving.setdefault(key[:2], []).append(key)
        self.idle: dict[Key, Key | None] = {}
        for pair, here in self.toggles.items():
            self.idle["O", *pair] = None
            self.cp.add(self.at["O", *pair] == self.begin).only_enforce_if(~here)
        for keys in moving.values():
            free: Any = self.begin
            last: Key | None = None
            for key in keys:
                self.cp.add(self.at[key] >= free)
                size: Any = self.length(key)
                if key[0] == "L" and key[1:] in self.toggles:
                    here = self.toggles[key[1:]]
                    self.cp.add(self.at[key] == free).only_enforce_if(~here)
                    size = size * here
                    self.idle[key] = last
                free, last = self.at[key] + size, key

    # What is sought.

    def _objective(self) -> None:
        """The earliest end or the shortest longest span; then the smallest sum of ranks' ends; then what ``tie_break`` says."""
        cp, ranks = self.cp, range(self.instance.problem.num_ranks)
        total, weight = self._preferred()
        latest = max(t + self.length(key) for key, t in self.now.items()) + self.longest + self.end - self.begin
        longest = cp.new_int_var(0, latest, "")
        ends = [self._rank(rank, longest, latest) for rank in ranks]
        cp.minimize((longest * len(ranks) * (latest + 1) + sum(ends)) * weight + total)

    def _preferred(self) -> tuple[Any, int]:
        """What is minimised among equals, and a number that is more than all that it can differ by."""
        if self.tie_break is None:
            return 0, 1
        total: Any = 0
        spread = 1
        room = self.end + self.longest - self.begin
        for key, at in self.at.items():
            if key[0] in "FBW":
                total += self.tie_break[key[0]] * (at - self.begin)
                spread += abs(self.tie_break[key[0]]) * room
        for here in self.toggles.values():
            total += self.tie_break["away"] * here
            spread += abs(self.tie_break["away"])
        return total, spread

    def _rank(self, rank: int, longest: Any, latest: int) -> Any:
        """When a rank ends; what counts of it is no longer than ``longest``."""
        mine = [
            key
            for k in self.instance.problem.replicas_of(rank)
            for op in "FBW"
            for key in self.by_kind.get((op, k), ())
        ]
        if not mine:
            return 0
        first = min(mine, key=lambda key: self.now[key])
        last = max(mine, key=lambda key: (self.now[key], self.length(key)))
        moving = [key for key in mine if key in self.at]
        end = self.cp.new_int_var(0, latest, "")
        for key in moving if last in self.at else [last]:
            self.cp.add(end >= self.end_of(key))
        begin: Any = 0
        if self.instance.task.objective == "span":
            begin = self.at_of(first)
            if first in self.at:
                begin = self.cp.new_int_var(self.begin, self.end, "")
                for key in moving:
                    self.cp.add(begin <= self.at[key])
        self.cp.add(longest >= end - begin)
        return end

    def solve(self, parameters: dict[str, Any]) -> tuple[Starts | None, bool]:
        """Proposed times, None if nothing was found; and whether the neighbourhood was searched to its end."""
        self._hint()
        solver, found, done = run(self.cp, LITE, parameters)
        self.spent = solver.response_proto.deterministic_time
        if not found:
            return None, done
        staying = {pair for pair, here in self.toggles.items() if not solver.value(here)}
        away = (self.starts.away | set(self.toggles)) - staying
        start = {key: solver.value(self.at_of(key)) for key in (*self.now, *self.at)}
        start = {key: t for key, t in start.items() if key[0] not in "OL" or key[1:] in away}
        return Starts(start, away, self.starts.fused), done

    def _hint(self) -> None:
        """Everything where it is."""
        hints: dict[Key, int] = {}
        for key in sorted(self.at):
            if key in self.now:
                hints[key] = self.now[key]
            else:
                before = self.idle[key]
                taken = self.length(before) if before is not None and before in self.now else 0
                hints[key] = self.begin if before is None else hints[before] + taken
            self.cp.add_hint(self.at[key], hints[key])
        for pair, here in self.toggles.items():
            self.cp.add_hint(here, pair in self.starts.away)
        for shift in self.shift.values():
            self.cp.add_hint(shift, 0)
