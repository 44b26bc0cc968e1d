"""GPipe: all forwards, then all backwards.

Source: Huang et al. 2019, "GPipe", figure 2c. The paper's figure runs the backwards last microbatch first; here they run in
the order of the forwards (as PyTorch's ``ScheduleGPipe`` does), so that every family accumulates gradients in one order.
Time and memory are the same.
"""

from __future__ import annotations

from jaxpipe.schedule.families.family import family, in_order
from jaxpipe.schedule.ir import Schedule


@family(
    "gpipe",
    "all forwards, then all backwards: simplest, holds every microbatch",
    "Huang et al. 2019 (GPipe), figure 2c",
    peak_activations=lambda p, m, v: m,
    makespan=lambda p, m, v, f, b, w: (m + p - 1) * (f + b + w),
)
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """GPipe for any ``ranks`` p >= 1 and ``microbatches`` m >= 1::

        rank 0 |F0 F1 F2 F3                            BW0-- BW1-- BW2-- BW3--
        rank 1 |   F0 F1 F2 F3                   BW0-- BW1-- BW2-- BW3--
        rank 2 |      F0 F1 F2 F3          BW0-- BW1-- BW2-- BW3--
        rank 3 |         F0 F1 F2 F3 BW0-- BW1-- BW2-- BW3--

    Every rank holds all m activations at the turn. With equal stages and no transfer time the makespan is
    (m + p − 1)(F + B + W).

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    return in_order("gpipe", microbatches, [["F"] * microbatches + ["BW"] * microbatches] * ranks)
