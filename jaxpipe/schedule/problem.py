"""A scheduling problem with its numbers laid out flat, for generators that look at many orders.

A generator that tries hundreds of orders can't afford an object per action. Here an action is one whole number, its code,
and everything about it is an entry of a table. Codes count *replicas*: flow k's copy of stage s is replica
``k * num_stages + s``, so that bidirectional pipelines are two plain chains; with one flow a replica is a stage.

    code = (op * num_replicas + replica) * num_microbatches + microbatch        op: F 0, B 1, W 2, BW 3

Works for placements whose stages form a chain and run on one rank each. Times of an order: :mod:`~jaxpipe.search.retime`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.clock import Feed, Tables
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.engine import collectives_exposed
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.memory import rank_share
from jaxpipe.schedule.placement import Placement

OPS = ("F", "B", "W", "BW")
F, B, W, BW = range(4)
CodeRows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Problem:
    """A placement, a number of microbatches and real costs; one tuple entry a replica.

    ``rank``: where it runs. ``f_s b_s w_s bw_s``: seconds. ``down_s``: seconds until its activation has reached the next
    replica, ``up_s``: its cotangent the one before (0 on the same rank, or where there is none); ``down_occupied_s``,
    ``up_occupied_s``: those of them in which the pair of ranks starts no other transfer. ``held``: memory from F's start
    to B's end, ``kept``: from B's end to W's end, in units of one rank's share of one microbatch.
    """

    placement: Placement
    num_microbatches: int
    rank: tuple[int, ...]
    f_s: tuple[float, ...]
    b_s: tuple[float, ...]
    w_s: tuple[float, ...]
    bw_s: tuple[float, ...]
    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    down_occupied_s: tuple[float, ...]
    up_occupied_s: tuple[float, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int, costs: CostProfile | None = None) -> Problem:
        """Return the problem of ``placement`` with ``costs`` (default: F = B = W = 1 for one rank's share, no transfer time).

        collectives become part of the actions: generators order plain actions, where none is hidden.

        Raises:
            ScheduleError: the stages are no plain chain, or the costs are for another number of stages.
        """
        if costs is None:
            costs = CostProfile.uniform(placement.num_stages, chunks=placement.num_chunks)
        # before anything is read off the costs: f_s and the rest would lack the collectives
        costs = collectives_exposed(costs)
        n = placement.num_stages
        costs.require_stages(n, "the placement")
        if not placement.is_plain_chain:
            raise ScheduleError(
                f"placement {placement.kind!r} is not a chain of stages on one rank each; 'traverse' orders any placement"
            )
        rank = tuple(group[0] for flow in placement.flows for group in flow)
        stages = [s for _ in placement.flows for s in range(n)]
        share = shares(placement, costs)

        def units(num_bytes: Sequence[float]) -> tuple[float, ...]:
            # costs without bytes for a share leave nothing to count: such a replica takes no room
            return tuple(num_bytes[s] / x if x > 0 else 0.0 for s, x in zip(stages, share, strict=True))

        def transfers(seconds: Callable[[int, int, int], float], step: int) -> tuple[float, ...]:
            return tuple(
                # a boundary has the number of the stage before it, whichever way it is crossed
                seconds(rank[k], rank[k + step], min(s, s + step)) if 0 <= s + step < n else 0.0
                for k, s in enumerate(stages)
            )

        f_s, b_s, w_s, bw_s = (
            tuple(seconds[s] for s in stages) for seconds in (costs.f_s, costs.b_s, costs.w_s, costs.bw_s)
        )
        return cls(
            placement,
            num_microbatches,
            rank,
            f_s,
            b_s,
            w_s,
            bw_s,
            down_s=transfers(costs.transfer_s, +1),
            up_s=transfers(costs.transfer_s, -1),
            down_occupied_s=transfers(costs.occupied_s, +1),
            up_occupied_s=transfers(costs.occupied_s, -1),
            held=units(costs.residual_bytes),
            kept=units(costs.w_residual_bytes),
        )

    def without_transfers(self) -> Problem:
        """Return the same problem where every result is everywhere at once."""
        nothing = (0.0,) * self.num_replicas
        return replace(self, down_s=nothing, up_s=nothing, down_occupied_s=nothing, up_occupied_s=nothing)

    @cached_property
    def reserved(self) -> tuple[float, ...]:
        """Return, per replica, what an F takes so that no B ever has to wait for memory: the larger of ``held`` and
        ``kept``."""
        return tuple(map(max, self.held, self.kept))

    @cached_property
    def round_trips(self) -> tuple[float, ...]:
        """Return, per replica of a chain in one direction, least seconds from F's start to B's end."""
        trips, way = [], 0.0
        for k in reversed(range(self.num_replicas)):
            way += self.f_s[k] + self.b_s[k]
            trips.append(way)
            # for k = 0 this reads another replica's transfer, but no trip uses it any more
            way += self.up_s[k] + self.down_s[k - 1]
        return tuple(reversed(trips))

    @cached_property
    def tables(self) -> Tables:
        """Build what the clock looks up, in the order of codes; F takes ``reserved``. B and BW are ready under the code of
        the B, and W under none: a W may run once its B has."""
        n, m, stages = self.num_replicas, self.num_microbatches, self.placement.num_stages
        feeds: list[tuple[Feed, ...]] = [()] * (4 * n)
        links: dict[tuple[int, int], int] = {}

        def feed(kind: int, target: int, seconds: float = 0.0, occupied_s: float = 0.0) -> None:
            src, dst = self.rank[kind % n], self.rank[target % n]
            link = -1 if src == dst else links.setdefault((src, dst), len(links))
            feeds[kind] = (Feed(dst, link, seconds, occupied_s, ((target - kind) * m,)),)

        for k in range(n):
            if k % stages < stages - 1:
                feed(F * n + k, F * n + k + 1, self.down_s[k], self.down_occupied_s[k])
            else:
                feed(F * n + k, B * n + k)
            if k % stages:
                # whichever of the two an order holds makes the stage before ready under the code of its B
                for op in (B, BW):
                    feed(op * n + k, B * n + k - 1, self.up_s[k], self.up_occupied_s[k])
        # B gives back what F took beyond what its W still needs, so the sum over F, B and W is 0
        back = (k - r for k, r in zip(self.kept, self.reserved, strict=True))
        return Tables(
            num_ranks=self.num_ranks,
            num_microbatches=m,
            ranks=[(r,) for r in self.rank] * 4,
            seconds=[*self.f_s, *self.b_s, *self.w_s, *self.bw_s],
            change=[*self.reserved, *back, *(-k for k in self.kept), *(-r for r in self.reserved)],
            feeds=feeds,
            needs=[*(int(k % stages > 0) for k in range(n)), *([1] * n), *([0] * n), *([0] * n)],
            num_links=len(links),
        )

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_replicas(self) -> int:
        return len(self.rank)

    def code(self, op: int, replica: int, microbatch: int) -> int:
        """Return the code of an action."""
        return (op * len(self.rank) + replica) * self.num_microbatches + microbatch

    def decode(self, code: int) -> tuple[int, int, int]:
        """Return (op, replica, microbatch) of a code."""
        where, microbatch = divmod(code, self.num_microbatches)
        op, replica = divmod(where, len(self.rank))
        return op, replica, microbatch

    def microbatches(self, replica: int) -> range:
        """Return the microbatches that a replica runs: those of its flow."""
        flow = replica // self.placement.num_stages
        return range(flow, self.num_microbatches, self.placement.num_flows)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return the replicas on ``rank``, ascending."""
        stages, mine = self.placement.num_stages, self.placement.stages_of(rank)
        flows = range(self.placement.num_flows)
        return tuple(k for flow in flows for s in mine if self.rank[k := flow * stages + s] == rank)

    def schedule(self, name: str, rows: CodeRows) -> Schedule:
        """Return the schedule whose rank r issues the actions ``rows[r]``."""
        n, m, stages = len(self.rank), self.num_microbatches, self.placement.num_stages
        names = [(OPS[where // n], where % n % stages) for where in range(len(OPS) * n)]
        return Schedule(
            name, self.placement, m, tuple(tuple(Action(*names[c // m], c % m) for c in row) for row in rows)
        )

    def codes(self, schedule: Schedule) -> list[list[int]]:
        """Return the rows of a schedule of this problem as codes. Offloads (O, L, S) are left out.

        Raises:
            ScheduleError: it has braided slots or ops other than F, B, W, BW, O, L and S.
        """
        stages, flows = self.placement.num_stages, self.placement.num_flows
        ops = {op: k for k, op in enumerate(OPS)}
        rows = []
        for r, row in enumerate(schedule.rows):
            codes = []
            for slot in row:
                if not isinstance(slot, Action) or slot.op not in (*ops, "O", "L", "S"):
                    raise ScheduleError(
                        f"{schedule.name}: rank {r} has {slot}; only plain F, B, W, BW, O, L and S can be re-timed"
                    )
                if slot.op in ops:
                    replica = slot.microbatch % flows * stages + slot.stage
                    codes.append(self.code(ops[slot.op], replica, slot.microbatch))
            rows.append(codes)
        return rows


def shares(placement: Placement, costs: CostProfile) -> tuple[float, ...]:
    """Return, per replica, its rank's share of one microbatch of its flow, in bytes of residuals; for stages on single
    ranks."""
    share = cache(partial(rank_share, placement, costs))
    return tuple(share(r, k) for k, flow in enumerate(placement.flows) for r, *_ in flow)
