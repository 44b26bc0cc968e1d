"""STP: forwards braided with backwards of other microbatches, so that tensor-parallel collectives hide, on a V placement.

Source: `stp.txt` sections 3 and 4, appendices A and B. ``stp`` begins with the throughput-efficient warm-up, ``stp-memory`` with
the memory-efficient one, ``stp-offload`` offloads chunk 0 (section 4.4). The rows: :mod:`~jaxpipe.schedule.families.stp_rows`;
closed forms: :mod:`~jaxpipe.schedule.families.stp_theory`. What the paper fixes by hand is tried here and simulated with the given
costs: how many forwards go ahead, how many weight gradients are put off, whether forwards of the warm-up run in pairs.

Not modelled: pipeline transfers that are not overlapped, as in the authors' runtime (section 5.2); here they overlap compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import Family, require_sizes
from jaxpipe.schedule.families.stp_rows import Shape, stp_rows
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.passes.offload import offload
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.retime import nine_digits
from jaxpipe.schedule.simulate import simulate

_ROUNDING = 1e-9


def stp(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """STP with the throughput-efficient warm-up, for any ``ranks`` p and ``microbatches`` m >= 1::

        PICTURE

    (``b`` marks the second chunk of a rank.) ``costs``: one entry per stage, 2p stages, with ``tp_comm_s`` where TP collectives
    take time. On equal stages no rank holds more than 3p + 1 chunks of activations: the paper's 3p between slots, and one more
    while a braid runs, whose F takes memory before its B gives any back.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _best("stp", ranks, microbatches, costs, 3 * ranks + 1, sorted({ranks, (ranks + 1) // 2, 1}))


def stp_memory(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """STP with the memory-efficient warm-up (Figure 12d), for any ``ranks`` p and ``microbatches`` m >= 1::

        PICTURE

    (``b`` marks the second chunk of a rank.) On equal stages no rank holds more than 2p + 2 chunks of activations, one of them
    only while a braid runs; ranks wait longer before the steady phase. ``costs``: as :func:`stp`.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _best("stp-memory", ranks, microbatches, costs, 2 * ranks + 2, [1])


def stp_offload(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """:func:`stp` with chunk 0 offloaded to the host (section 4.4), for any ``ranks`` p and ``microbatches`` m >= 1::

        PICTURE

    (``b`` marks the second chunk of a rank.) Chunk 1 lives too short to leave. The paper moves a part α of every activation, so
    small in the warm-up that the copy takes less than F (T_o < T_F); here whole activations leave, as many as the host lane
    has time for without delaying any action, the longest lived first. ``costs``: as :func:`stp`, with ``offload_s`` and ``load_s``.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    costs = _costs("stp-offload", ranks, microbatches, costs)
    whole = stp(ranks, microbatches, costs)
    return replace(offload(whole, costs, stages=range(ranks)).schedule, name="stp-offload")


def _costs(name: str, ranks: int, microbatches: int, costs: CostProfile | None) -> CostProfile:
    require_sizes(name, ranks=ranks, microbatches=microbatches)
    if costs is None:
        return CostProfile.uniform(2 * ranks, chunks=2)
    if costs.num_stages != 2 * ranks:
        raise ScheduleError(
            f"{name}: the costs are for {costs.num_stages} stages; {ranks} ranks need {2 * ranks}, two per rank"
        )
    return costs


def _best(
    name: str, ranks: int, microbatches: int, costs: CostProfile | None, chunks: int, ahead: list[int]
) -> Schedule:
    """The fastest of all shapes that hold at most ``chunks`` chunks; if none does, of those that hold least."""
    costs = _costs(name, ranks, microbatches, costs)
    found: tuple[tuple[float, float, float, float], Schedule] | None = None
    for shape in _shapes(ranks, microbatches, ahead, any(costs.tp_comm_s)):
        schedule = Schedule(name, v_shape(ranks), microbatches, stp_rows(ranks, microbatches, shape))
        timeline = simulate(schedule, costs)
        peak = max(timeline.peak_activations)
        key = (max(peak, chunks / 2 + _ROUNDING), *map(nine_digits, (timeline.makespan, timeline.max_span, peak)))
        if found is None or key < found[0]:
            found = key, schedule
    assert found is not None, "there is always a shape"
    return found[1]


def _shapes(ranks: int, microbatches: int, ahead: list[int], collectives: bool) -> Iterator[Shape]:
    for forwards in ahead:
        missing = microbatches < 2 * ranks - 1 + forwards
        for split in sorted({0, ranks // 2, ranks}) if ranks > 1 else (0,):
            for paired in (True, False) if collectives and forwards > 1 else (False,):
                for first in (False, True) if missing else (False,):
                    yield Shape(forwards, split, paired, first)


STP = Family(
    name="stp",
    function=stp,
    description="V placement, F braided with B so that tensor-parallel collectives hide: fast, 1.5 times 1F1B's memory",
    source="Qi et al. 2025 (stp.txt) §4.2, appendix A",
    options=("costs",),
    placement=lambda ranks, chunks: v_shape(ranks),
    default_chunks=2,
    sees_collectives=True,
    picture={"ranks": 2, "microbatches": 6},
)
STP_MEMORY = Family(
    name="stp-memory",
    function=stp_memory,
    description="STP with fewer forwards ahead: about 1F1B's memory, a slower start",
    source="Qi et al. 2025 (stp.txt) §4.2, appendices A and B",
    options=("costs",),
    placement=lambda ranks, chunks: v_shape(ranks),
    default_chunks=2,
    sees_collectives=True,
    picture={"ranks": 2, "microbatches": 6},
)
STP_OFFLOAD = Family(
    name="stp-offload",
    function=stp_offload,
    description="STP with the first chunk of each rank offloaded to the host as far as its link allows",
    source="Qi et al. 2025 (stp.txt) §4.4",
    options=("costs",),
    placement=lambda ranks, chunks: v_shape(ranks),
    default_chunks=2,
    sees_collectives=True,
    picture={"ranks": 2, "microbatches": 6},
)
