"""When things happen around one neighbourhood of a schedule with offload: times, variables, what may leave; see
:mod:`.offload_neighbourhood_model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpipe.schedule.solve.formulation import Key
from jaxpipe.schedule.solve.instance import Instance
from jaxpipe.schedule.solve.rows import Starts

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OffloadNeighbourhood:
    """What starts in ``begin <= t < end`` (ticks) on ``ranks`` is free; with ``microbatches``, only those are."""

    begin: int
    end: int
    ranks: frozenset[int]
    microbatches: frozenset[int] | None = None

    def frees(self, rank: int, i: int) -> bool:
        return rank in self.ranks and (self.microbatches is None or i in self.microbatches)


class NeighbourhoodTimes:
    """``at``: variables of what starts inside. ``shift``: per rank, by how much what is late moves. ``toggles``: whether an
    activation leaves, where that is free."""

    def __init__(self, instance: Instance, starts: Starts, neighbourhood: OffloadNeighbourhood) -> None:
        from ortools.sat.python import cp_model

        self.instance, self.starts, self.neighbourhood = instance, starts, neighbourhood
        self.cp: Any = cp_model.CpModel()
        self.begin, self.end = neighbourhood.begin, neighbourhood.end
        self.now = {key: t for key, t in starts.start.items() if self._real(key)}
        self.longest = max((self.length(key) for key in self.now), default=0)
        self.inside = {key for key, t in self.now.items() if self.begin <= t < self.end}
        self.late = {key for key, t in self.now.items() if t >= self.end}
        self.by_kind = self._kinds()
        self.toggles: dict[Pair, Any] = {pair: self.cp.new_bool_var("") for pair in self._toggles()}
        self.added = {(op, *pair) for pair in self.toggles if pair not in starts.away for op in "OL"}
        self.shift = self._shifts()
        latest = self.end + self.longest
        self.at: dict[Key, Any] = {
            key: self.cp.new_int_var(self.begin, latest, "") for key in sorted(self.inside | self.added)
        }

    def _shifts(self) -> dict[int, Any]:
        """Per rank, by how much its late piece moves."""
        rank = self.instance.problem.rank
        moving = {rank[k] for _, k, _ in self.late}
        room = self.end - self.begin
        return {r: self.cp.new_int_var(0, room if r in moving else 0, "") for r in range(max(rank) + 1)}

    def _real(self, key: Key) -> bool:
        if key[0] in "OL":
            return key[1:] in self.starts.away
        return not (key[0] == "W" and key[1:] in self.starts.fused)

    def length(self, key: Key) -> int:
        op, k, i = key
        if op == "B" and (k, i) in self.starts.fused:
            op = "BW"
        return self.instance.duration[op][k]

    def _kinds(self) -> dict[tuple[str, int], list[Key]]:
        """Per op and replica what there is of it, by microbatch."""
        kinds: dict[tuple[str, int], list[Key]] = {}
        for key in sorted(self.now):
            kinds.setdefault(key[:2], []).append(key)
        return kinds

    def _free(self, key: Key) -> bool:
        return self.neighbourhood.frees(self.instance.problem.rank[key[1]], key[2])

    def _toggles(self) -> list[Pair]:
        """Activations that may leave or stay: their O and L are both inside, or could be."""
        found = []
        for k, may in enumerate(self.instance.may_leave):
            if not may or self.instance.problem.rank[k] not in self.neighbourhood.ranks:
                continue
            copies = self.instance.duration["O"][k] + self.instance.duration["L"][k]
            for i in self.instance.problem.microbatches(k):
                if not self._free(("O", k, i)):
                    continue
                if (k, i) in self.starts.away:
                    if ("O", k, i) in self.inside and ("L", k, i) in self.inside:
                        found.append((k, i))
                elif self._room(k, i, copies):
                    found.append((k, i))
        return found

    def _room(self, k: int, i: int, copies: int) -> bool:
        """Whether O and L of an activation that stays could take place inside, in order with those outside."""
        ready = max(self.begin, self.now["F", k, i] + self.length(("F", k, i)))
        if ready + copies > min(self.end, self.now["B", k, i]) + self.longest or self.now["B", k, i] < self.begin:
            return False
        loads = self.by_kind.get(("L", k), ())
        return not any(self.now[key] < self.begin if key[2] > i else key in self.late for key in loads)

    def at_of(self, key: Key) -> Any:
        """When an action starts: a variable, a number, or a number less the shift."""
        if key in self.at:
            return self.at[key]
        return self.now[key] - self._shift(key) if key in self.late else self.now[key]

    def _shift(self, key: Key) -> Any:
        return self.shift[self.instance.problem.rank[key[1]]]

    def end_of(self, key: Key) -> Any:
        if key[0] == "W" and key[1:] in self.starts.fused:
            key = ("B", *key[1:])
        return self.at_of(key) + self.length(key)
