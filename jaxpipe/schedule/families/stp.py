"""STP: forwards braided with backwards of other microbatches, so that tensor-parallel collectives hide, on a V placement.

Source: `stp.txt` sections 3 and 4, appendices A and B. ``stp`` begins with the throughput-efficient warm-up, ``stp-memory``
with the memory-efficient one, ``stp-offload`` offloads chunk 0 (section 4.4). The rows are made in
:mod:`~jaxpipe.schedule.families.stp_rows`, closed forms are in :mod:`~jaxpipe.schedule.families.stp_theory`. What the paper
fixes by hand is tried here and simulated with the given costs: how many forwards go ahead, how many weight gradients are put
off, how many last backwards are split, whether forwards of the warm-up run in pairs; one choice after the other.

Not modelled: transfers between ranks that compute waits for, as in the authors' runtime (section 5.2); here they overlap it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) ``costs``: one entry per stage, 2p stages, with ``tp_comm_s`` where TP collectives
    take time. On equal stages no rank holds more than 3p + 1 chunks of activations: the paper's 3p between slots, and one more
    while a braid runs, whose F takes memory before its B gives any back.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _best("stp", ranks, microbatches, costs, 3 * ranks + 1, sorted({ranks, (ranks + 1) // 2, 1}, reverse=True))


def stp_memory(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """STP with the memory-efficient warm-up (Figure 12d), for any ``ranks`` p and ``microbatches`` m >= 1::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) On equal stages no rank holds more than 2p + 2 chunks of activations, one of them
    only while a braid runs; ranks wait longer before the steady phase. ``costs``: as :func:`stp`.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _best("stp-memory", ranks, microbatches, costs, 2 * ranks + 2, [1])


def stp_offload(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """:func:`stp` with chunk 0 offloaded to the host (section 4.4), for any ``ranks`` p and ``microbatches`` m >= 1::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) Chunk 1 lives too short to leave. The paper moves a part α of every activation, so
    small in the warm-up that the copy takes less than F (T_o < T_F); here whole activations leave, as many as the host lane has
    time for without delaying any action, the longest lived first. ``costs``: as :func:`stp`, with ``offload_s``, ``load_s``.

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
    """The fastest of the shapes tried that hold at most ``chunks`` chunks; if none does, the one that holds least."""
    costs = _costs(name, ranks, microbatches, costs)
    trial = _Trial(name, ranks, microbatches, costs, chunks / 2)
    best = Shape(ahead[0], split=0, paired=any(costs.tp_comm_s))
    for others in _steps(ranks, ahead, few=microbatches < 2 * ranks - 1 + ahead[0]):
        best = min([best, *others(best)], key=trial.key)
    return trial.schedule(best)


def _steps(ranks: int, ahead: list[int], *, few: bool) -> list[Callable[[Shape], list[Shape]]]:
    """One after the other, what is tried beside the best shape so far. ``few``: microbatches have to be left out."""
    splits = sorted({0, 1, ranks // 2, ranks - 1})
    return [
        lambda best: [replace(best, first=True)] if few else [],
        lambda best: [replace(best, split=n) for n in splits],
        lambda best: [replace(best, ahead=n) for n in ahead],
        lambda best: [replace(best, first=first) for first in (False, True)] if few else [],
        lambda best: [replace(best, hasty=ranks // 2)],
        lambda best: [replace(best, paired=False)],
        lambda best: [replace(best, split=n) for n in splits],
    ]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Shapes made and simulated, each once. ``limit``: activations per rank, in units of its share of one microbatch."""

    name: str
    ranks: int
    microbatches: int
    costs: CostProfile
    limit: float
    known: dict[Shape, tuple[float, ...]] = field(default_factory=dict)

    def schedule(self, shape: Shape) -> Schedule:
        return Schedule(
            self.name, v_shape(self.ranks), self.microbatches, stp_rows(self.ranks, self.microbatches, shape)
        )

    def key(self, shape: Shape) -> tuple[float, ...]:
        """What is minimised: the peak above the limit, makespan, longest span, peak."""
        if shape not in self.known:
            timeline = simulate(self.schedule(shape), self.costs)
            peak = max(timeline.peak_activations)
            times = map(nine_digits, (timeline.makespan, timeline.max_span, peak))
            self.known[shape] = (max(peak, self.limit * (1 + _ROUNDING)), *times)
        return self.known[shape]


STP = Family(
    name="stp",
    function=stp,
    description="V placement, F braided with B so that tensor-parallel collectives hide: fast, 1.5 times 1F1B's memory",
    source="Qi et al. 2025 (stp.txt) §4.2, appendix A",
    options=("costs",),
    placement=lambda ranks, chunks: v_shape(ranks),
    default_chunks=2,
    sees_collectives=True,
    picture={"ranks": 2, "microbatches": 4},
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
    picture={"ranks": 2, "microbatches": 4},
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
    picture={"ranks": 2, "microbatches": 4},
)
