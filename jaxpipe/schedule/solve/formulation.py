"""The variables and constraints of time, as a CP-SAT model: one interval per action. Memory: :mod:`.model_memory`.

Per replica k and microbatch i there are starts of F, B and W and, where activations may leave, of O and L with a literal
``away[k, i]``. ``fused[k, i]`` (only where a full backward is shorter than B and W) gives B the length of BW and W the
length 0, at B's end. Everything of DESIGN.md section 4 holds; in particular a transfer occupies the directed pair of ranks
in issue order, which only binds where a transfer can take longer than the action that issues the next one: those pairs of
ranks get intervals of their own. Redundant constraints are added that exclude no best schedule: B at least a round trip after
F, starts confined by the ways before and behind, the time after each replica's last B as a bound on the objective. With
``ordered``, microbatches of a replica keep their order in every op (constraint (1) of `optpipe.txt`); without offload that
excludes nothing either (see :mod:`.model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

from jaxpipe.schedule.solve.instance import Instance

Key = tuple[str, int, int]
"""(op, replica, microbatch)."""


class Formulation:
    """The model of ``instance`` with times in [0, horizon]; ``cost`` is the makespan or the longest span in ticks."""

    def __init__(self, instance: Instance, ordered: bool, lower: int, upper: int | None) -> None:
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model.CpModel()
        self.instance, self.ordered = instance, ordered
        self.starts: dict[Key, Any] = {}
        self.ends: dict[Key, Any] = {}
        self.away: dict[tuple[int, int], Any] = {}
        self.fused: dict[tuple[int, int], Any] = {}
        self.sends: dict[Key, Any] = {}
        self.derived: list[tuple[Any, Any]] = []
        self.peaks: list[Any] = []
        self.lanes: dict[int, list[Any]] = {rank: [] for rank in range(instance.problem.num_ranks)}
        self.upper = upper
        self.replicas = [k for k in range(instance.problem.num_replicas) if len(instance.problem.microbatches(k))]
        self.spans = instance.task.objective == "span"
        self.first = instance.first_starts() if self.spans and ordered else None
        self.horizon = instance.horizon() if upper is None or (self.spans and self.first is None) else upper
        if self.spans and self.first is not None and upper is not None:
            self.horizon = upper + max(self.first)
        self.cost = self.cp.new_int_var(lower, self.horizon if upper is None else upper, "cost")
        self._domains()
        for k in self.replicas:
            for i in instance.problem.microbatches(k):
                self._actions(k, i)
        for k in self.replicas:
            self._dependencies(k)
            if ordered:
                self._order(k)
                self._host_order(k)
        self._host_lanes()
        self._links()
        self._objective()

    def seal(self) -> None:
        """One action at a time on every rank, when all that takes place there is known."""
        for lane in self.lanes.values():
            self.cp.add_no_overlap(lane)

    # When what may start.

    def _domains(self) -> None:
        """Per replica: earliest F of the first microbatch, latest end of the last B."""
        instance = self.instance
        self.heads, self.round_trips, self.tails = instance.heads(), instance.round_trips(), instance.tails()
        last: list[int] = []
        for k in range(instance.problem.num_replicas):
            end = self._deadline(k) - instance.rest(k)
            if not instance.is_first(k):
                end = min(end, last[k - 1] - instance.back(k - 1) - instance.up[k])
            last.append(end)
        self.last_back = last

    def _deadline(self, k: int) -> int:
        """When the rank of replica ``k`` must be done."""
        if self.first is None or self.upper is None:
            return self.horizon
        return self.first[self.instance.problem.rank[k]] + self.upper

    def _domain(self, op: str, k: int, i: int) -> tuple[int, int]:
        """Earliest and latest start of F, B or W."""
        if not self.ordered:
            return 0, self.horizon
        instance = self.instance
        all_of = instance.problem.microbatches(k)
        before, behind = all_of.index(i), len(all_of) - 1 - all_of.index(i)
        f, back, rest = instance.duration["F"][k], instance.back(k), instance.rest(k)
        early = self.heads[k] + before * f
        late = self.last_back[k] - behind * back - back
        if op == "F":
            return early, max(early, late - self.round_trips[k])
        early = max(early + self.round_trips[k], self.heads[k] + self.round_trips[k] + before * back)
        if op == "B":
            return early, max(early, late)
        early += back
        return early, max(early, self._deadline(k) - (behind + 1) * rest)

    # Actions.

    def _actions(self, k: int, i: int) -> None:
        cp, duration, rank = self.cp, self.instance.duration, self.instance.problem.rank[k]
        length: dict[str, Any] = {op: duration[op][k] for op in ("F", "B", "W")}
        if self.instance.may_fuse[k]:
            fused = self.fused[k, i] = cp.new_bool_var(f"fused{k}.{i}")
            length["B"] += (duration["BW"][k] - duration["B"][k]) * fused
            length["W"] *= 1 - fused
        for op in ("F", "B", "W"):
            start = self.starts[op, k, i] = cp.new_int_var(*self._domain(op, k, i), f"{op}{k}.{i}")
            end: Any = start + length[op]
            if not isinstance(length[op], int):
                self.derived.append((cp.new_int_var(0, self.horizon, f"end{op}{k}.{i}"), end))
                end = self.derived[-1][0]
            self.ends[op, k, i] = end
            self.lanes[rank].append(cp.new_interval_var(start, length[op], end, f"{op}{k}.{i}"))
        if self.instance.may_leave[k]:
            self.away[k, i] = cp.new_bool_var(f"away{k}.{i}")
            for op in ("O", "L"):
                start = self.starts[op, k, i] = cp.new_int_var(0, self.horizon, f"{op}{k}.{i}")
                self.ends[op, k, i] = start + duration[op][k]

    def _dependencies(self, k: int) -> None:
        cp, start, end, instance = self.cp, self.starts, self.ends, self.instance
        for i in instance.problem.microbatches(k):
            if instance.is_last(k):
                cp.add(start["B", k, i] >= end["F", k, i])
            else:
                cp.add(start["F", k + 1, i] >= self._arrival("F", k, i))
                cp.add(start["B", k, i] >= self._arrival("B", k + 1, i))
                cp.add(start["B", k, i] >= start["F", k, i] + self.round_trips[k])
            cp.add(start["W", k, i] >= end["B", k, i])
            if (k, i) in self.fused:
                cp.add(start["W", k, i] == end["B", k, i]).only_enforce_if(self.fused[k, i])
            if (k, i) in self.away:
                here = self.away[k, i]
                cp.add(start["O", k, i] >= end["F", k, i]).only_enforce_if(here)
                cp.add(start["L", k, i] >= end["O", k, i]).only_enforce_if(here)
                cp.add(start["B", k, i] >= end["L", k, i]).only_enforce_if(here)

    def _order(self, k: int) -> None:
        """F, B and W of microbatches in order; W where both are split."""
        cp, start, end = self.cp, self.starts, self.ends
        every = self.instance.problem.microbatches(k)
        for earlier, i in pairwise(every):
            for op in ("F", "B", "W"):
                follows = cp.add(start[op, k, i] >= end[op, k, earlier])
                if op == "W" and self.instance.may_fuse[k]:
                    follows.only_enforce_if([~self.fused[k, i], ~self.fused[k, earlier]])

    def _host_order(self, k: int) -> None:
        """O and L in order; those of a microbatch that stays stand idle where the one before has ended."""
        cp, start = self.cp, self.starts
        for op in ("O", "L") if self.instance.may_leave[k] else ():
            free: Any = 0
            for i in self.instance.problem.microbatches(k):
                cp.add(start[op, k, i] >= free)
                cp.add(start[op, k, i] == free).only_enforce_if(~self.away[k, i])
                free = start[op, k, i] + self.instance.duration[op][k] * self.away[k, i]

    def _host_lanes(self) -> None:
        lanes: dict[tuple[int, str], list[Any]] = {}
        for (k, i), here in self.away.items():
            for op in ("O", "L"):
                interval = self.cp.new_optional_fixed_size_interval_var(
                    self.starts[op, k, i], self.instance.duration[op][k], here, f"{op}{k}.{i}"
                )
                lanes.setdefault(self.instance.lane_of(k, op), []).append(interval)
        for lane in lanes.values():
            self.cp.add_no_overlap(lane)

    # Transfers between ranks.

    def _arrival(self, op: str, k: int, i: int) -> Any:
        """When what F or B of replica ``k`` makes is there."""
        moves = self._transfer_ticks(op, k)
        if not moves or not self._queues(op, k):
            return self.ends[op, k, i] + moves
        if (op, k, i) not in self.sends:
            self.sends[op, k, i] = self.cp.new_int_var(0, self.horizon, f"send{op}{k}.{i}")
            self.cp.add(self.sends[op, k, i] >= self.ends[op, k, i])
        return self.sends[op, k, i] + moves

    def _transfer_ticks(self, op: str, k: int) -> int:
        return self.instance.down[k] if op == "F" else self.instance.up[k]

    def _pairs(self) -> Iterator[tuple[tuple[int, int], str, int]]:
        """(ranks, op, replica) of everything that sends."""
        rank = self.instance.problem.rank
        for k in self.replicas:
            if not self.instance.is_last(k) and rank[k] != rank[k + 1]:
                yield (rank[k], rank[k + 1]), "F", k
                yield (rank[k + 1], rank[k]), "B", k + 1

    def _queues(self, op: str, k: int) -> bool:
        """Whether transfers on the pair of ranks that this op uses may have to wait for each other."""
        rank = self.instance.problem.rank
        pair = (rank[k], rank[k + 1] if op == "F" else rank[k - 1])
        users = [(o, q) for p, o, q in self._pairs() if p == pair]
        shortest = min(self.instance.back(q) if o == "B" else self.instance.duration["F"][q] for o, q in users)
        return max(self._transfer_ticks(o, q) for o, q in users) > shortest

    def _links(self) -> None:
        """Transfers of a pair of ranks that may queue go in the order in which they are issued."""
        kinds: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for pair, op, k in self._pairs():
            if (op, k, self.instance.problem.microbatches(k)[0]) in self.sends:
                kinds.setdefault(pair, []).append((op, k))
        for users in kinds.values():
            keys = [(op, k, i) for op, k in users for i in self.instance.problem.microbatches(k)]
            for a, b in combinations(keys, 2):
                if self.ordered and a[:2] == b[:2]:
                    if a[2] + self.instance.problem.placement.num_flows == b[2]:
                        self.cp.add(self.sends[b] >= self.sends[a] + self._transfer_ticks(*a[:2]))
                else:
                    before = self._precedes(a, b)
                    for x, y, which in ((a, b, before), (b, a, ~before)):
                        after = self.cp.add(self.sends[y] >= self.sends[x] + self._transfer_ticks(*x[:2]))
                        after.only_enforce_if(which)

    def _precedes(self, a: Key, b: Key) -> Any:
        """A literal: ``a`` ends before ``b`` starts, else the other way round."""
        before = self.cp.new_bool_var("")
        self.cp.add(self.ends[a] <= self.starts[b]).only_enforce_if(before)
        self.cp.add(self.ends[b] <= self.starts[a]).only_enforce_if(~before)
        return before

    # The objective.

    def _objective(self) -> None:
        cp, instance = self.cp, self.instance
        every = [(k, i) for k in self.replicas for i in instance.problem.microbatches(k)]
        ordered = self.ordered and not any(instance.may_fuse)
        latest = [(k, instance.problem.microbatches(k)[-1]) for k in self.replicas]
        begins = self._first_starts() if self.spans else [0] * instance.problem.num_ranks
        for k, i in latest if ordered else every:
            cp.add(self.cost >= self.ends["W", k, i] - begins[instance.problem.rank[k]])
        if self.ordered:
            for k, i in latest:
                if self.spans:
                    self._span_tails(k, i, begins)
                else:
                    cp.add(self.cost >= self.ends["B", k, i] + self.tails[k])

    def _span_tails(self, k: int, i: int, begins: list[Any]) -> None:
        """After the last B of replica ``k`` the way up: each rank on it ends no earlier."""
        way = 0
        for q in range(k, k - k % self.instance.num_stages - 1, -1):
            if q < k:
                way += self.instance.up[q + 1] + self.instance.back(q)
            rest = self.instance.rest(q)
            self.cp.add(self.cost >= self.ends["B", k, i] + way + rest - begins[self.instance.problem.rank[q]])

    def _first_starts(self) -> list[Any]:
        """Per rank, a time no later than its first action; where it is known, that action is held there."""
        cp, instance = self.cp, self.instance
        begins = []
        for rank in range(instance.problem.num_ranks):
            firsts: dict[int, int] = {}
            for k in instance.problem.replicas_of(rank):
                firsts.setdefault(k // instance.num_stages, k)
            mine = [k for k in firsts.values() if k in self.replicas]
            some = slice(0, 1 if self.ordered else None)
            starts = [self.starts["F", k, i] for k in mine for i in instance.problem.microbatches(k)[some]]
            if self.first is not None:
                cp.add(starts[0] == self.first[rank])
                begins.append(self.first[rank])
            else:
                begin = cp.new_int_var(0, self.horizon, f"first{rank}")
                for start in starts:
                    cp.add(begin <= start)
                begins.append(begin)
        return begins
