"""Vocabulary layers divided by words over all ranks of a pipeline: where their passes stand in a schedule.

Source: Yeung et al. 2024, "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv 2411.05288); `flexpipe.txt`
sections 2.2 and 7.1 places the layers so. Part r of embedding and head is on rank r
(:func:`~jaxpipe.schedule.placement.with_vocabulary`), and a part is a stage: F of a head's part is the paper's S (its logits,
their largest and sum; with one barrier its share of the gradient too), BW its T; the loss, on the rank of the last layer,
merges the parts. A *barrier* is what the loss waits for, and with two what the last layer's backward waits for; no rank stands
still for it.

The paper draws orders for 1F1B by a walk over the ranks, and V-Half's by a rule of its own. Here any order of forwards and
backwards is taken, and for 1F1B as much time and memory comes out:

1. One microbatch more in flight for each barrier: of an order of m + k microbatches the last k lose their forwards and the
   first k their backwards, so that a backward comes k microbatches after the forward that it followed.
2. A *cut* at a time is, on each rank, all that started before it; what an action waits for is in a cut with it. So the same
   work put at a cut on every rank moves all that is outside by as much, and nobody waits: m times T of the one microbatch and
   S of the next, one transfer after the end of each forward of the last layer, cost m(S + T) seconds and no more.
3. Look-ups of the embedding stand at the cut one microbatch ahead of their use, their backwards at the end of the first
   layer's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import FAMILIES, family
from jaxpipe.schedule.families.one_f_one_b import one_f_one_b
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.placement import Placement, one_to_one, v_shape, with_vocabulary
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline

_ROUNDING, _LEAST = 1e-9, 1e-6
_SOURCE = "Yeung et al. 2024 (arXiv 2411.05288)"
_OPS = ("F", "B", "W", "BW")


def spread_vocabulary(
    name: str,
    base: Callable[[int, CostProfile], Schedule],
    placement: Placement,
    microbatches: int,
    costs: CostProfile | None,
) -> Schedule:
    """Return the schedule called ``name`` for ``placement`` (of :func:`~jaxpipe.schedule.placement.with_vocabulary`) in the
    order of ``base(microbatches, costs)``, which is asked for as many more as there are barriers, with the costs of its own
    stages.

    ``costs``: of all stages of ``placement``; None: F = B = W. Holds as many microbatches more as there are barriers, and takes
    ``base``'s makespan + m(S + T), where backwards take no less time than forwards.

    Raises:
        ScheduleError: as ``base``; or it offloads, or braids.
    """
    extra = 1 if placement.detached else 2
    trunk_costs = _never_nothing((costs or CostProfile.on(placement)).of_stages(placement.trunk))
    (end,) = placement.flows[0][-1]
    sent_s = max(trunk_costs.transfer_s(end, r, trunk_costs.num_stages - 1) for r in range(placement.num_ranks))
    # each barrier puts a backward off by one microbatch, so the base runs ahead by as many
    chain = _later(base(microbatches + extra, trunk_costs), microbatches, extra)
    return replace(_with_passes(chain, simulate(chain, trunk_costs), placement, extra == 1, sent_s), name=name)


def _never_nothing(costs: CostProfile) -> CostProfile:
    """Return ``costs`` without actions of no time, which could not be told apart."""
    least = _LEAST * (max(*costs.f_s, *costs.bw_s, *costs.b_s, *costs.w_s) or 1.0)
    times = {field: tuple(max(x, least) for x in costs.values(field)) for field in ("f_s", "b_s", "w_s", "bw_s")}
    return replace(costs, **times)  # type: ignore[arg-type]


def _later(longer: Schedule, microbatches: int, by: int) -> Schedule:
    """Return ``longer`` with each backward ``by`` microbatches after the forward that it followed."""
    rows = []
    for row in longer.rows:
        plain = [slot for slot in row if isinstance(slot, Action) and slot.op in _OPS]
        if strange := next((slot for slot in row if not isinstance(slot, Action) or slot.op not in _OPS), None):
            raise ScheduleError(
                f"{longer.name} has {strange}; vocabulary layers are spread over orders of {', '.join(_OPS)} alone"
            )
        moved = (a if a.op == "F" else replace(a, microbatch=a.microbatch - by) for a in plain)
        rows.append(tuple(a for a in moved if 0 <= a.microbatch < microbatches))
    return replace(longer, num_microbatches=microbatches, rows=tuple(rows))


def _with_passes(
    chain: Schedule, timeline: Timeline, placement: Placement, one_barrier: bool, sent_s: float
) -> Schedule:
    """Return ``chain``, which runs as ``timeline`` says, with the passes of the vocabulary layers at their cuts.
    ``sent_s``: how long it takes to send them what they need."""
    p, m, trunk = placement.num_ranks, chain.num_microbatches, placement.trunk
    events = [[*timeline.of(rank, "compute")] for rank in range(p)]
    when = {(a.op, a.stage, a.microbatch): e for row in events for e in row for a in e.action.actions}
    first, last, heads, loss = 0, chain.num_stages - 1, trunk.stop, placement.num_stages - 1
    enter, leave = ([when["F", s, i] for i in range(m)] for s in (first, last))
    back = {s: [when.get(("B", s, i)) or when["BW", s, i] for i in range(m)] for s in (first, last)}
    # (time of the cut, microbatch, order of what is at one cut, op, stage of part 0); the loss is on one rank
    passes: list[tuple[float, int, int, str, int]] = []
    for i in range(m):
        latest = back[last][i].start_s  # the loss comes before it, and with two barriers T
        after = leave[i + 1].end_s if i + 1 < m else latest
        computed = min(leave[i].end_s + sent_s, latest)
        merged = min(max(after, computed), latest)
        ready_s = after + sent_s
        if i + 1 == m:
            ready_s = back[last][i].end_s if one_barrier else back[last][max(i - 1, 0)].start_s
        ready_s = max(ready_s, merged) if one_barrier else min(max(ready_s, computed), latest)
        merged = min(merged, ready_s)
        passes += [(computed, i, 0, "F", heads), (ready_s, i, 2, "BW", heads)]
        passes += [(merged, i, 1, op, loss) for op in ("F", "BW")]
        passes += [(enter[i - 1].start_s if i else 0.0, i, 0, "F", 0), (back[first][i].end_s + sent_s, i, 2, "BW", 0)]
    # of one cut and microbatch: S, then the loss, then T
    passes.sort(key=lambda x: x[:3])
    # a cut at the very start of an action goes before it
    rounding = _ROUNDING * timeline.makespan
    rows = []
    for rank, row in enumerate(events):
        starts = [e.start_s for e in row]
        put: list[list[Action]] = [[] for _ in range(len(row) + 1)]
        for time, i, _, op, stage in passes:
            if stage != loss or placement.flows[0][loss] == (rank,):
                at = stage if stage == loss else stage + rank
                put[bisect_left(starts, time - rounding)].append(Action(op, at, i))
        trunk_actions = [replace(a, stage=trunk.start + a.stage) for e in row for a in e.action.actions]
        rows.append(tuple(a for k, actions in enumerate(put) for a in (*actions, *trunk_actions[k : k + 1])))
    return Schedule(chain.name, placement, m, tuple(rows))


def _spread(barriers: int, base: Callable[..., Placement] = one_to_one) -> Callable[[int], Placement]:
    return lambda ranks: with_vocabulary(base(ranks), barriers=barriers)


def _facts(barriers: int, base: Callable[..., Placement] = one_to_one, microbatches: int = 3) -> dict[str, Any]:
    """Return what the families here are registered with. ``microbatches``: of the picture."""
    picture = {"ranks": 2, "microbatches": microbatches}
    return {"placement": _spread(barriers, base), "vocabulary": True, "picture": picture}


def _over_one_f_one_b(name: str, barriers: int, ranks: int, m: int, costs: CostProfile | None) -> Schedule:
    return spread_vocabulary(name, lambda m, trunk_costs: one_f_one_b(ranks, m), _spread(barriers)(ranks), m, costs)


@family(
    "vocab-1f1b",
    "1F1B with embedding and head spread over all ranks, one barrier: p+1 activations",
    f"{_SOURCE}, algorithm 2",
    **_facts(1),
    peak_activations=lambda p, m, v: min(p + 1, m),
    makespan=lambda p, m, v, f, b, w: (m + p - 1) * (f + b + w),
)
def vocab_one_f_one_b(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """1F1B with spread vocabulary layers and one barrier, for any p >= 1 and m >= 1 (``b`` marks a rank's part of the head)::

        rank 0 |F0-- F1-- F0b- F2-- BW0b F1b-           BW0------ BW1b F2b-      BW1------ BW2b BW2------
        rank 1 |     F0-- F0b- F1-- BW0b F1b- BW0------ F2-- BW1b F2b- BW1------ BW2------ BW2b

    Rank r holds min(p − r + 1, m) activations. With equal stages, no transfer time and m >= 2, the makespan is
    m(F + B + W + S + T) + (p − 1)(F + B + W).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    return _over_one_f_one_b("vocab-1f1b", 1, ranks, microbatches, costs)


@family(
    "vocab-1f1b-2",
    "vocab-1f1b with two barriers: less computed and sent, p+2 activations",
    f"{_SOURCE}, algorithm 1",
    **_facts(2),
    peak_activations=lambda p, m, v: min(p + 2, m),
    makespan=lambda p, m, v, f, b, w: (m + p - 1) * (f + b + w),
)
def vocab_one_f_one_b_2(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """1F1B with spread vocabulary layers and two barriers, for any p >= 1 and m >= 1 (``b`` marks a rank's part of the head)::

        rank 0 |F0-- F1-- F0b- F2-- BW0b F1b-      BW1b F2b-           BW2b BW0------ BW1------ BW2------
        rank 1 |     F0-- F0b- F1-- BW0b F1b- F2-- BW1b F2b- BW0------ BW2b BW1------ BW2------

    Rank r holds min(p − r + 2, m) activations. With equal stages, no transfer time and m >= 2, the makespan is
    m(F + B + W + S + T) + (p − 1)(F + B + W).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    return _over_one_f_one_b("vocab-1f1b-2", 2, ranks, microbatches, costs)


@family(
    "vocab-v-half",
    "V-Half with embedding and head spread over all ranks, one barrier: one activation more",
    f"{_SOURCE}, section 5; Controllable Memory (Qi, Wan et al. 2024) §3.2",
    **_facts(1, v_shape, 2),
)
def vocab_v_half(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """V-Half with spread vocabulary layers and one barrier, for any p >= 1 and m >= 1 (``c`` marks a rank's part of the head)::

        rank 0 |F0-- F1--      F0b- F0c-      F1b- BW0c F1c- B0b- W0b- B1b- BW1c B0-- W1b- B1-- W0-- W1--
        rank 1 |     F0-- F0b- F1-- F0c- F1b-      BW0c F1c-      B0b- B0-- BW1c B1b- B1-- W0b- W0-- W1b- W1--

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    return spread_vocabulary(
        "vocab-v-half",
        lambda m, trunk_costs: FAMILIES["v-half"].function(ranks, m, trunk_costs),
        _spread(1, v_shape)(ranks),
        microbatches,
        costs,
    )


@family(
    "vocab-1f1b-joint",
    "1F1B with embedding and head spread over all ranks, which compute a microbatch's loss together: 1.5p activations",
    f"{_SOURCE}, the interlaced pipeline that it compares with",
    **_facts(2),
)
def vocab_one_f_one_b_joint(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """1F1B where all ranks run S and T of a microbatch side by side, its backward right behind, for any p >= 1 and m >= 1
    (``b`` marks a rank's part of the head)::

        rank 0 |F0--      F0b- BW0b F1--           F1b- BW1b F2-- BW0------ F2b- BW2b BW1------ BW2------
        rank 1 |     F0-- F0b- BW0b BW0------ F1-- F1b- BW1b BW1------ F2-- F2b- BW2b BW2------

    Between two of these a rank runs one forward and one backward; every second rank, from the last, the backward first. So
    forwards cross two ranks between them and backwards one, and rank 0 holds at most ⌈1.5p⌉ activations.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    p, m, placement = ranks, microbatches, _spread(2)(ranks)
    rows = []
    for rank in range(p):
        trunk, head, behind = p + rank, 2 * p + rank, p - 1 - rank
        actions: list[tuple[int, int, Action]] = []  # between which two, order there
        for i in range(m):
            enters = i - 1 - behind // 2
            actions += [
                (enters, 5 - behind % 2, Action("F", trunk, i)),
                (i + behind, 4 + behind % 2, Action("BW", trunk, i)),
            ]
            actions += [(i, 0, Action("F", head, i)), (i, 2, Action("BW", head, i))]
            actions += [(i, 1, Action(op, 3 * p, i)) for op in ("F", "BW") if rank == p - 1]
            actions += [(i - 1 - (p - 1) // 2, 3, Action("F", rank, i)), (i + p - 1, 6, Action("BW", rank, i))]
        rows.append(tuple(a for _, _, a in sorted(actions, key=lambda x: x[:2])))
    return Schedule("vocab-1f1b-joint", placement, m, tuple(rows))
