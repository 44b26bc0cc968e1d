"""The two uses of the CP-SAT model: improving a schedule a neighbourhood at a time, and solving a task to optimality.

**Neighbourhoods.** CP-SAT reorders what is in a window, what follows moves up. A window is a stretch of time on all ranks or
on some neighbours; with offload also a few microbatches over a longer stretch; all others keep their order.
:mod:`.formulation` says what moves. An answer becomes rows (:mod:`.actions`), is simulated with real costs and held to the
limits, so what the model leaves out costs at most a proposal. Plateaus are walked in ticks. Large-neighbourhood search in the
sense of Shaw (1998).

The objective alone is blind to progress that other neighbourhoods have to complete, so some of them ask for a preference among
equals, which costs time: those with offload, for without it that is worth nothing (`scripts/results/solver.md`).

**The exact model** solves a task to optimality, or as far as its time goes, and says what it has proved. Source: `optpipe.txt`
section 3 and appendix C, a MILP over order variables; here a CP-SAT model over intervals (OR-Tools), in whole ticks and units
(:mod:`~jaxpipe.search.budget`). Every answer is turned into rows (:mod:`.actions`), checked and simulated; what is reported is
what the simulator says. How the two correspond, and what was chosen where the paper's text can't be taken literally:

* E, O, R, W, C: ends of F, B, W; starts of O and L; literal ``away``; ``cost``. P, K, L, H: NoOverlap of a rank's compute
  lane and of host lanes. M, N: events of the memory constraint. One chunk, equal costs there; any chain on single ranks
  here.
* (3), (4): makespan is taken over all ranks from time 0; a span from the rank's first F, which starts as soon as it can.
* (5), (6): T_comm is the transfer of that boundary between those ranks; links queue where they can (:mod:`.formulation`).
* (7) excludes j' = j and c' = c, so literally two forwards of a rank, or F and B of a microbatch, may overlap, and (8)
  and the order of microbatches fix variables that no constraint reads. Read: all pairs of different actions.
* (9) adds the change Δ of an operation to what was there before it. For B and W that is the level after their end; the
  level while B runs, when what it reads has been loaded back, is never looked at. Here: every instant, as
  :file:`jaxpipe/README.md` has it.
* (10) to (13) leave out j' = j: that R follows the O of the same activation is nowhere. Nor is O after the end of its F
  (promised in section 3.3), nor B after the *end* of its R: (15) only has a start after R's start. All three hold here.
* (14) subtracts T_comm where the duration T is meant (E − T is the start).
* (15), (16): with N an R starts before an operation or after its end, never while it runs. Read as a side effect of
  asking only at operations; here an L starts at any time at which there is room.
* (18), (19) lack the big-M and the choice W, both use L, which orders reloads of one device, and O against R of two
  devices is missing. Read: the lanes of a PCIe group are one NoOverlap. The simulator serves such a lane first come first
  served, which rows can't change; then the model's value is a bound and the simulated one is reported.
* The order of microbatches: (1) has the same c on both sides, the last list of appendix C has any c', which would be one
  microbatch after the other. Read: (1). "Without affecting optimality" holds without offload: the k-th start of every
  (stage, op) can be given to microbatch k, since the first k consumers follow the first k producers. With offload it does
  not: what is away may come back last (a test has 3 ranks and 4 microbatches, 36 in order, 35 out of order). The order is
  kept, for it makes large problems solvable, and the result's ``every_order`` says whom the bound is for; the argument of that
  name drops it.

A hint that the model can express is an answer from the start. On a host with a lane per direction an answer may have no rows
(``strict`` in :mod:`.formulation`); then the strict model is solved for a schedule, and the bound stays that of the first.

Not modelled: braided slots; host copies on graphs of stages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.passes.braid import fused_backwards, unbraid, with_fused
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline, at_most
from jaxpipe.search.budget import COARSE, DETERMINISTIC_SECOND, LITE, WHOLE_RESERVOIRS, Budget, run
from jaxpipe.search.solve.actions import ActionTable, Starts, schedule_of, schedule_within_limits, starts_of
from jaxpipe.search.solve.formulation import Formulation, Window
from jaxpipe.search.solve.task import SolveTask

_PARTS = 200
_PREFERENCES = 0.3  # of neighbourhoods with offload have one
_BY_MICROBATCH = 0.2  # of those with offload
_LEAST_S = 0.02  # that a neighbourhood counts for
_PATIENCE = 8  # neighbourhoods without progress for each further second


@dataclass(frozen=True, slots=True)
class _Sizing:
    """``size``, ``smallest``, ``largest``: actions of a neighbourhood, at first, at least and at most. ``edge``: the part of
    them that is at the start, and as much at the end. ``seconds``: for one: at first, and after many that brought nothing. Not
    tuned further."""

    size: float
    smallest: float
    largest: float
    edge: float
    seconds: tuple[float, float]


_PLAIN = _Sizing(240.0, 50.0, 3000.0, 0.15, (2.0, 2.0))
_WITH_OFFLOAD = _Sizing(70.0, 40.0, 250.0, 0.2, (1.0, 6.0))


class NeighbourhoodSearch:
    """The search from ``start`` for ``task``.

    Raises:
        ScheduleError: the costs are for another number of stages or too uneven for a grid, or ``start`` is no valid schedule.
    """

    def __init__(self, task: SolveTask, start: Schedule, seed: int) -> None:
        self.task, start = task, unbraid(start)
        # a coarse grid, since answers are simulated anyway, and many small models are solved;
        # backwards stay as they are in ``start``: to choose BW's is for the exact model
        self.actions = ActionTable(task, start, _PARTS, fusing=False)
        self.random, self.seed = random.Random(seed), seed
        self.timeline = simulate(start, task.costs)
        self.sizing = _WITH_OFFLOAD if self.actions.copies else _PLAIN
        self.size = dict.fromkeys(("time", "ranks", "microbatches"), self.sizing.size)
        self.tried = self.stale = 0

    def run(self, budget: Budget, bound_s: float) -> Iterator[Schedule]:
        """Yield better and better schedules until the budget ends or ``bound_s`` is met; none if the start breaks a limit.

        Better: less of the objective (for ``lexicographic`` the makespan), or as much and less of the other of makespan and
        span.
        """
        starts = starts_of(self.actions, self.timeline)
        if starts is None or not self.task.fits(self.timeline):
            return
        now, best = self._ticks(starts), self.task.order(self.timeline.makespan, self.timeline.max_span)
        while budget.left > 0 and not at_most(best[0], bound_s):
            answer = self._propose(starts, budget)
            solved = None if answer is None else schedule_within_limits(self.actions, answer, "solved")
            proposal = None if solved is None else starts_of(self.actions, solved[1])
            self.stale += 1
            # equal ones are taken, too: plateaus are crossed that way
            if solved is None or proposal is None or (ticks := self._ticks(proposal)) > now:
                continue
            self.stale = 0 if ticks < now else self.stale
            starts, now = proposal, ticks
            times = self.task.order(solved[1].makespan, solved[1].max_span)
            if times < best:
                best = times
                yield solved[0]

    def _ticks(self, starts: Starts) -> tuple[float, float, int]:
        """Return the objective, the other time, and by what neighbourhoods make progress on plateaus: the sum of starts, or
        of ranks' ends."""
        begins, ends = self.actions.extent(starts)
        longest = max(b - a for a, b in zip(begins, ends, strict=True))
        return *self.task.order(max(ends) - min(begins), longest), sum(ends if self.actions.copies else starts)

    def _propose(self, starts: Starts, budget: Budget) -> Starts | None:
        self.tried += 1
        kind = self._kind()
        window = self._window(kind, starts)
        prefer = self._preference() if self.actions.copies and self.random.random() < _PREFERENCES else None
        model = Formulation(self.actions, starts, window, prefer=prefer)
        model.hint(starts)
        least_s, most_s = self.sizing.seconds
        spent_before = budget.spent
        parameters = budget.parameters(min(least_s + self.stale / _PATIENCE, most_s), self.seed + self.tried)
        solver, has_answer, done = run(model.cp, LITE, {} if self.actions.copies else WHOLE_RESERVOIRS, parameters)
        if budget.reproducible:  # what it did not need is there for others
            needed_s = solver.response_proto.deterministic_time / DETERMINISTIC_SECOND
            budget.spent = min(budget.spent, spent_before + max(_LEAST_S, needed_s))
        # larger where the search came to its end, smaller where it did not, most of all where it has nothing
        factor = 1.15 if done else 0.9 if has_answer else 0.75
        self.size[kind] = min(self.sizing.largest, max(self.sizing.smallest, self.size[kind] * factor))
        return model.answer(solver) if has_answer else None

    # Which neighbourhoods.

    def _preference(self) -> Mapping[str, int]:
        """Return what to prefer among equals: F late and B early hold less, anything else leads elsewhere."""
        pick = self.random.choice
        return {"F": pick((-1, 0, 1)), "B": pick((1, 2)), "W": pick((0, 1)), "away": pick((-2, 0, 2))}

    def _kind(self) -> str:
        if self.actions.copies and self.random.random() < _BY_MICROBATCH:
            return "microbatches"
        return "ranks" if self.actions.num_ranks > 4 and self.random.random() < 0.5 else "time"

    def _window(self, kind: str, starts: Starts) -> Window:
        """Choose about ``size`` actions in a row; often at the start or the end. With ``microbatches``, about as many over
        a longer stretch."""
        rng, p, actions = self.random, self.actions.num_ranks, self.actions
        ranks = range(p)
        if kind == "ranks":  # a quarter to a half of them, one beside the other
            count = rng.randint(max(2, p // 4), max(3, p // 2))
            first = rng.randint(0, p - count)
            ranks = range(first, first + count)
        times = sorted(starts[n] for rank in ranks for n in actions.lanes[rank])
        length = min(len(times), int(self.size[kind] * rng.uniform(0.7, 1.2)) * (4 if kind == "microbatches" else 1))
        last, place = len(times) - length, rng.random()
        at = 0 if place < self.sizing.edge else last if place < 2 * self.sizing.edge else rng.randint(0, last)
        begin = times[at]
        end = max(begin + 1, times[at + length] if at < last else times[-1] + 1)
        microbatches = self._sample_microbatches(starts, begin, end) if kind == "microbatches" else None
        return Window(begin, end, frozenset(ranks), microbatches)

    def _sample_microbatches(self, starts: Starts, begin: int, end: int) -> frozenset[int]:
        """Return a quarter of the microbatches that have a forward inside, neighbours or not."""
        placed = zip(self.actions.action, starts, strict=True)
        inside = sorted({a.microbatch for a, t in placed if a.op == "F" and begin <= t < end})
        count = max(1, len(inside) // 4)
        if not inside or self.random.random() < 0.5:
            return frozenset(self.random.sample(inside, min(count, len(inside))))
        first = self.random.randint(0, len(inside) - count)
        return frozenset(inside[first : first + count])


ExactStatus = Literal["optimal", "feasible", "infeasible", "unknown"]
_COARSE_SHARE = 0.6
"""The part of the time, where costs have no common step, for the first of two grids: ticks of 1/200 of a mean duration, then
1/20,000."""


@dataclass(frozen=True, slots=True)
class ExactResult:
    """Answer of the exact model to a task.

    ``value``: seconds of the simulated schedule, infinite without one. ``lower_bound``: seconds, infinite if no schedule keeps
    the limits; for every schedule if ``every_order``, else for those with microbatches in order (with offload, others may be
    shorter).
    """

    schedule: Schedule | None
    timeline: Timeline | None
    value: float
    lower_bound: float
    every_order: bool

    @property
    def status(self) -> ExactStatus:
        """``optimal``: the value is the bound; ``infeasible``: no schedule keeps the limits; ``unknown``: none was found."""
        if self.schedule is None:
            return "infeasible" if self.lower_bound == float("inf") else "unknown"
        return "optimal" if at_most(self.value, self.lower_bound) else "feasible"


def solve_exact(
    task: SolveTask,
    *,
    time_limit_s: float,
    seed: int = 0,
    workers: int = 2,
    hint: Schedule | None = None,
    lower_bound: float = 0.0,
    deterministic: bool = False,
    every_order: bool = False,
) -> ExactResult:
    """Return the best schedule of ``task``, microbatches in order unless ``every_order``, that CP-SAT finds in
    ``time_limit_s``.

    ``hint``: a schedule to start from; if it keeps the limits, the answer is no worse. Of a graph of stages it also says which
    actions there are. ``lower_bound``: seconds that are known to be needed. ``deterministic``: the limit counts deterministic
    time, and the same arguments give the same schedule.

    Raises:
        ScheduleError: there is no hint and the stages form no chain on single ranks, or the costs don't fit the task or the
            solver.
    """
    budget, order = Budget(time_limit_s, deterministic), None if task.placement.is_plain_chain else hint
    fine = ActionTable(task, order)
    nothing = ExactResult(None, None, float("inf"), lower_bound, every_order or not fine.copies)
    search = _ExactSearch(task, seed, workers, not every_order, hint, nothing)
    for actions in (fine,) if fine.ticks.exact else (ActionTable(task, order, COARSE), fine):
        part = Budget(budget.left * (1.0 if actions is fine else _COARSE_SHARE), deterministic)
        search.search_grid(actions, part)
        budget.spent += part.spent
        if search.result.status in ("optimal", "infeasible"):
            break
    return search.result


class _ExactSearch:
    """One :func:`solve_exact`, and what is known so far."""

    def __init__(
        self, task: SolveTask, seed: int, workers: int, ordered: bool, hint: Schedule | None, result: ExactResult
    ) -> None:
        self.task, self.seed, self.workers, self.ordered, self.hint = task, seed, workers, ordered, hint
        self.result = result

    def search_grid(self, actions: ActionTable, budget: Budget) -> None:
        """Search on one grid: for a bound, and if what that finds has no rows, for something that has."""
        ticks, starts = actions.ticks, self._starts(actions)
        lower, cost = ticks.at_least(self.result.lower_bound), None
        if starts is not None:
            cost = self._cost(actions, starts)
            # rounding may put a bound above the hint, and between them nothing would be left to find
            lower = min(lower, cost)
            self._keep_if_better(actions, starts)
        bound: float = lower
        if cost is None or cost > lower:
            has_answer, bound = self._solve(actions, budget, starts, lower, cost, strict=False)
            if has_answer and self.result.schedule is None:
                self._solve(actions, budget, starts, max(lower, round(bound)), cost, strict=True)
        bound_s = max(ticks.bound_s(bound, self.task.objective == "span"), self.result.lower_bound)
        self.result = replace(self.result, lower_bound=min(bound_s, self.result.value))

    def _starts(self, actions: ActionTable) -> Starts | None:
        """Return the times of the best schedule, at first the hint; None if there is none or the model can't express it: it
        is of another placement or size, breaks a limit, has braided slots or microbatches out of order, or offloads what
        may not leave."""
        task, schedule = self.task, self.result.schedule or self.hint
        size = task.placement.flows, task.num_microbatches
        if schedule is None or (schedule.placement.flows, schedule.num_microbatches) != size:
            return None
        choice = {(actions.action[b].stage, actions.action[b].microbatch) for b in actions.fusing}
        # fused backwards that gain nothing are B and W in the model, so they are timed as such
        timeline = simulate(with_fused(schedule, fused_backwards(schedule) & choice), task.costs)
        starts = starts_of(actions, timeline) if task.fits(timeline) else None
        if starts is not None and self.ordered:
            for alike in actions.alike.values():
                times = [starts[n] for n in alike if starts[n] >= 0]
                if times != sorted(times):
                    return None
        return starts

    def _cost(self, actions: ActionTable, starts: Starts) -> int:
        """Return the ticks of the objective of given times."""
        begins, ends = actions.extent(starts)
        if self.task.objective != "span":
            return max(ends)
        return max(end - begin for begin, end in zip(begins, ends, strict=True))

    def _solve(
        self, actions: ActionTable, budget: Budget, hint: Starts | None, lower: int, upper: int | None, strict: bool
    ) -> tuple[bool, float]:
        """Return whether CP-SAT found a solution, and its bound in ticks: infinite if there is nothing."""
        model = Formulation(actions, ordered=self.ordered, strict=strict, lower=lower, upper=upper)
        if hint is not None:
            model.hint(hint)
            model.cp.add_hint(model.cost, upper)
        spent, reservoirs = budget.spent, {} if actions.copies else WHOLE_RESERVOIRS
        several = {"num_workers": self.workers, "interleave_search": budget.reproducible and self.workers > 1}
        solver, has_answer, done = run(model.cp, reservoirs, budget.parameters(budget.left, self.seed), several)
        # parameters() took all that was left; what the solver did not need goes back
        budget.spent = spent + solver.response_proto.deterministic_time / DETERMINISTIC_SECOND
        if not has_answer:
            return False, float("inf") if done else lower
        self._keep_if_better(actions, model.answer(solver))
        return True, max(round(solver.best_objective_bound), lower)

    def _keep_if_better(self, actions: ActionTable, starts: Starts) -> None:
        """Keep the schedule of an answer if it keeps the limits and is better."""
        schedule, timeline = schedule_of(actions, starts, "cp-sat")
        value = self.task.seconds(timeline)
        if self.task.fits(timeline) and value < self.result.value:
            self.result = replace(self.result, schedule=schedule, timeline=timeline, value=value)
