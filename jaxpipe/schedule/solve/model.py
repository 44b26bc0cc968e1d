"""The exact model: solves a task to optimality, or as far as its time goes, and says what it has proved.

Source: `optpipe.txt` section 3 and appendix C, a MILP over order variables; here a CP-SAT model over intervals (OR-Tools), in
whole ticks and units (:mod:`.ticks`). Every answer is turned into rows (:mod:`.rows`), checked and simulated; what is reported
is what the simulator says. How the two correspond, and what was chosen where the paper's text can't be taken literally:

* E, O, R, W, C: ends of F, B, W; starts of O and L; literal ``away``; ``cost``. P, K, L, H: NoOverlap of a rank's compute
  lane and of host lanes. M, N: events of the memory constraint. One chunk, equal costs there; any chain on single ranks
  here.
* (3), (4): makespan is taken over all ranks from time 0; a span from the rank's first F, which starts as soon as it can.
* (5), (6): T_comm is the transfer of that boundary between those ranks; links queue where they can (:mod:`.formulation`).
* (7) excludes j' = j and c' = c, so literally two forwards of a rank, or F and B of a microbatch, may overlap, and (8)
  and the order of microbatches fix variables that no constraint reads. Read: all pairs of different actions.
* (9) adds the change Δ of an operation to what was there before it. For B and W that is the level after their end; the
  level while B runs, when what it reads has been loaded back, is never looked at. Here: every instant, DESIGN.md section
  4.
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

Not modelled: braided slots, user ops, stages on several ranks, DAGs.
"""

from __future__ import annotations

import time
from dataclasses import replace

from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.solve.instance import Instance
from jaxpipe.schedule.solve.phases import ExactResult, Search
from jaxpipe.schedule.solve.task import SolveTask
from jaxpipe.schedule.solve.ticks import COARSE

__all__ = ["ExactResult", "solve_exact"]

_COARSE_SHARE = 0.6
"""Of the time, where costs have no common step: first ticks of 1/200 of a mean duration, then 1/20,000."""


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
    """The best schedule of ``task``, microbatches in order unless ``every_order``, that CP-SAT finds in ``time_limit_s``.

    ``hint``: a schedule to start from; if it keeps the limits, the answer is no worse. ``lower_bound``: seconds that are known
    to be needed. ``deterministic``: the limit counts deterministic time, and the same arguments give the same schedule.

    Raises:
        ScheduleError: the stages don't form a chain on single ranks, or the costs don't fit the task or the solver.
    """
    began = time.perf_counter()
    instance, coarse = Instance.of(task), Instance.of(task, COARSE)

    def search(grid: Instance, limit: float, start: Schedule | None, bound: float) -> ExactResult:
        return Search(grid, limit, seed, workers, deterministic, every_order, began).run(start, bound)

    if instance.ticks.exact:
        return search(instance, time_limit_s, hint, lower_bound)
    first = search(coarse, time_limit_s * _COARSE_SHARE, hint, lower_bound)
    if first.status in ("optimal", "infeasible"):
        return first
    left = time_limit_s * (1 - _COARSE_SHARE)
    if not deterministic:
        left = max(left, time_limit_s - (time.perf_counter() - began))
    second = search(instance, left, first.schedule or hint, first.lower_bound)
    earlier = min(first.first_feasible_s, second.first_feasible_s)
    return replace(second if second.value <= first.value else first, first_feasible_s=earlier)
