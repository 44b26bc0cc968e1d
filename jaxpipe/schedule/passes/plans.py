"""Plans for all ranks of a schedule: which residents leave, how low the peak gets, and what it costs in time.

:class:`Plans` is what the pass (:mod:`~jaxpipe.schedule.passes.offload`) and families that offload stand on. It knows the lives
of one simulated schedule, the residents that may leave, and which ranks share a host lane; it makes plans
(:mod:`~jaxpipe.schedule.passes.host_lane`), puts them into the rows, and simulates what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.ir import Action, Schedule, Slot
from jaxpipe.schedule.passes.host_lane import LanePlan, Move, View
from jaxpipe.schedule.passes.residency import GRID, RankLife, Resident, rank_lives
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline

_SLACK = 1 + 1e-9
_HALVINGS = 7
_RESERVES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
_FASTER = (1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 10.0, 100.0, 1e6)


class Plans:
    """One schedule without offloads: ``before`` is its timeline, ``lives`` its ranks', ``candidates`` what may leave, per rank.

    ``lanes``: the ranks that share a host lane. ``fraction`` and ``stages`` as for
    :func:`~jaxpipe.schedule.passes.offload.offload`.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: CostProfile,
        fraction: float | None = None,
        stages: Iterable[int] | None = None,
    ) -> None:
        self.schedule, self.costs = schedule, costs
        self.before = before = simulate(schedule, costs)
        self.lives = rank_lives(schedule, before, costs)
        wanted = None if stages is None else frozenset(stages)
        self.candidates = [_candidates(life, fraction, wanted) for life in self.lives]
        groups: dict[int, list[int]] = {}
        for rank, group in host_groups(costs.host, schedule.num_ranks).items():
            groups.setdefault(group, []).append(rank)
        grouped = {r for ranks in groups.values() for r in ranks}
        self.lanes = [*groups.values(), *([r] for r in range(schedule.num_ranks) if r not in grouped)]

    # Plans.

    def plan(self, ranks: Iterable[int], targets: Iterable[float], stretch: float) -> list[Move]:
        """O and L of one lane. ``targets``: level per rank above which it pays to offload."""
        lives = [self.lives[r] for r in ranks]
        views = [View(x, self.candidates[x.rank], t, list(x.level)) for x, t in zip(lives, targets, strict=True)]
        return LanePlan(views, self.costs.host.mode == "shared", stretch).run()

    def lowest(self, stretch: float) -> list[Move]:
        """The plan with the lowest peak that was found, for every lane."""
        return [move for ranks in self.lanes for move in self._lowest(ranks, stretch)[0]]

    def _lowest(self, ranks: Sequence[int], stretch: float, enough: float = 0.0) -> tuple[list[Move], float]:
        """A plan and its peak. Halves the range of levels to aim at; ranks of a group aim at the same part of their ranges.

        Stops early at a peak that is ``enough``.
        """
        tops = [self.lives[r].peak() for r in ranks]
        floors = [max((x.size for x in self.candidates[r]), default=0) for r in ranks]
        widest = max(top - floor for floor, top in zip(floors, tops, strict=True))
        finest = min((x.size for r in ranks for x in self.candidates[r]), default=GRID) / 2
        best: tuple[list[float], int] = [float(max(tops)), *map(float, tops)], 0
        found: list[Move] = []
        low, high = 0.0, 1.0
        aim = 0.0
        for _ in range(_HALVINGS):
            targets = [floor + aim * (top - floor) for floor, top in zip(floors, tops, strict=True)]
            moves = self.plan(ranks, targets, stretch)
            reached = [float(self._reached(r, moves)) for r in ranks]
            score = [max(reached), *reached], len(moves)
            if score < best:
                best, found = score, moves
            if best[0][0] <= enough:
                break
            if all(x <= t for x, t in zip(reached, targets, strict=True)):
                high = aim
            else:
                low = aim
            if (high - low) * widest < finest:
                break
            aim = (low + high) / 2
        return found, best[0][0]

    def _reached(self, rank: int, moves: Iterable[Move]) -> int:
        return self.lives[rank].peak(m.change for m in moves if m.rank == rank)

    # Schedules.

    def free(self, plan: Callable[[float], list[Move]]) -> tuple[Schedule, Timeline]:
        """The schedule of ``plan(stretch)`` that takes no longer than before: in PCIe groups, maybe planned with reserve."""
        for stretch in _RESERVES if any(len(ranks) > 1 for ranks in self.lanes) else _RESERVES[:1]:
            schedule = self.embed(plan(stretch))
            after = simulate(schedule, self.costs)
            if self._no_slower(after):
                return schedule, after
        return self.schedule, self.before

    def free_within(self, limit: float, *, sparing: bool = False) -> Schedule | None:
        """The schedule offloaded at no cost in time, if every rank's peak gets down to ``limit`` so.

        ``sparing``: with few offloads rather than all that fit.
        """
        top = limit * GRID
        moves: list[Move] = []
        for ranks in self.lanes:
            found = self.plan(ranks, [top] * len(ranks), 1.0) if sparing else []
            if not sparing or max(self._reached(r, found) for r in ranks) > top * _SLACK:
                found, peak = self._lowest(ranks, 1.0, enough=top)
                if peak > top * _SLACK:
                    return None
            moves += found
        schedule = self.embed(moves)
        after = simulate(schedule, self.costs)
        return schedule if self._no_slower(after) and peak_of(after) <= limit * _SLACK else None

    def aimed(self, limit: float, stretch: float) -> list[Move]:
        """For every lane, the plan that offloads just what stands above ``limit``."""
        return [m for ranks in self.lanes for m in self.plan(ranks, [limit * GRID] * len(ranks), stretch)]

    def delayed(self, limit: float) -> tuple[Schedule, Timeline] | None:
        """The shortest schedule found that meets the limit: planned for a host link faster than it is, so that B's wait."""
        best: tuple[Schedule, Timeline] | None = None
        failed, met = 1.0, 0.0
        for step in range(len(_FASTER) + _HALVINGS):
            faster = _FASTER[step] if not met and step < len(_FASTER) else (failed + met) / 2
            found = self._late(limit, faster)
            if found is not None:
                met = faster
                best = found if best is None or found[1].makespan < best[1].makespan else best
            elif met:
                failed = faster
            elif step >= len(_FASTER):
                return None
            else:
                failed = faster
        return best

    def _late(self, limit: float, faster: float) -> tuple[Schedule, Timeline] | None:
        best: tuple[Schedule, Timeline] | None = None
        for target in (limit, 0.0):
            schedule = self.embed(self.aimed(target, 1 / faster))
            after = simulate(schedule, self.costs)
            if peak_of(after) <= limit * _SLACK and (best is None or after.makespan < best[1].makespan):
                best = schedule, after
        return best

    def _no_slower(self, after: Timeline) -> bool:
        return (
            after.makespan <= self.before.makespan * _SLACK
            and after.max_span <= self.before.max_span * _SLACK
            and peak_of(after) <= peak_of(self.before) * _SLACK
        )

    def embed(self, moves: Iterable[Move]) -> Schedule:
        rows: list[list[tuple[int, int, Slot]]] = [
            [(j + 1, -1, s) for j, s in enumerate(row)] for row in self.schedule.rows
        ]
        for n, move in enumerate(moves):
            x = move.resident
            rows[move.rank].append((move.position, n, Action(move.op, x.stage, x.microbatch)))
        return replace(
            self.schedule,
            rows=tuple(tuple(slot for *_, slot in sorted(row, key=lambda entry: entry[:2])) for row in rows),
        )


def peak_of(timeline: Timeline) -> float:
    """The highest peak of activations over all ranks."""
    return max(timeline.peak_activations)


def _candidates(life: RankLife, fraction: float | None, stages: frozenset[int] | None) -> tuple[Resident, ...]:
    """What may leave: residents of the stages of longest mean lifespan, as many as the fraction allows."""
    by_stage: dict[int, list[Resident]] = {}
    for x in life.residents:
        if x.size > 0 and (stages is None or x.stage in stages):
            by_stage.setdefault(x.stage, []).append(x)
    if fraction is None:
        return tuple(x for held in by_stage.values() for x in held)
    budget = math.floor(fraction * len(life.residents) + 1e-9)
    chosen: list[Resident] = []
    for held in sorted(by_stage.values(), key=lambda held: -sum(x.life_s for x in held) / len(held)):
        take = min(len(held), budget - len(chosen))
        chosen += [x for n, x in enumerate(held) if (n + 1) * take // len(held) > n * take // len(held)]
    return tuple(chosen)
