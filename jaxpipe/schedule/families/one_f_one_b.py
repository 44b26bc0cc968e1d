"""GPipe: all forwards, then all backwards. 1F1B, eager 1F1B: after a warm-up of forwards, one forward and one backward in turn.

Sources: 1F1B is Fan et al. 2021 (DAPPLE) and Narayanan et al. 2021 (Megatron-LM, section 2.2.1, "PipeDream-Flush").
Eager 1F1B is Zhuang et al. 2023, "On Optimizing the Communication of Model Parallelism"; `controllable-memory.txt` §2.1 and
figure 1b show it as 1F1B's building block with wider offsets between forwards. The two differ only in the depth of the
warm-up.

GPipe is Huang et al. 2019, figure 2c. The paper's figure runs the backwards last microbatch first; here they run in the order
of the forwards (as PyTorch's ``ScheduleGPipe`` does), so that every family accumulates gradients in one order.
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


@family(
    "1f1b",
    "one forward, one backward in turn: GPipe's time, at most p activations",
    "Fan et al. 2021 (DAPPLE); Narayanan et al. 2021 (Megatron-LM) §2.2.1",
    peak_activations=lambda p, m, v: min(p, m),
    makespan=lambda p, m, v, f, b, w: (m + p - 1) * (f + b + w),
)
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B for any ``ranks`` p >= 1 and ``microbatches`` m >= 1::

        rank 0 |F0 F1 F2 F3                   BW0--    BW1--    BW2--    BW3--
        rank 1 |   F0 F1 F2             BW0-- F3 BW1--    BW2--    BW3--
        rank 2 |      F0 F1       BW0-- F2 BW1-- F3 BW2--    BW3--
        rank 3 |         F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3--

    Rank r holds at most min(p − r, m) activations. With equal stages and no transfer time the makespan is GPipe's,
    (m + p − 1)(F + B + W).

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    return in_order("1f1b", microbatches, [fused_row(ranks - r, microbatches) for r in range(ranks)])


@family(
    "eager-1f1b",
    "1F1B with a deeper warm-up, so that transfers hide under compute; at most 2p-1 activations",
    "Zhuang et al. 2023; controllable-memory.txt §2.1, figure 1b",
    peak_activations=lambda p, m, v: min(2 * p - 1, m),
    makespan=lambda p, m, v, f, b, w: (m + p - 1) * (f + b + w),
    picture={"ranks": 4, "microbatches": 6},
)
def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, for any ``ranks`` p >= 1 and ``microbatches`` m >= 1::

        rank 0 |F0 F1 F2 F3 F4 F5             BW0--    BW1--    BW2--    BW3--    BW4--    BW5--
        rank 1 |   F0 F1 F2 F3 F4       BW0-- F5 BW1--    BW2--    BW3--    BW4--    BW5--
        rank 2 |      F0 F1 F2    BW0-- F3 BW1-- F4 BW2-- F5 BW3--    BW4--    BW5--
        rank 3 |         F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- F4 BW4-- F5 BW5--

    Rank r holds at most min(2(p − r) − 1, m) activations: one more in flight per rank below it than 1F1B, so that a transfer
    each way hides under compute. Without transfer time the makespan is 1F1B's.

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    return in_order("eager-1f1b", microbatches, [fused_row(2 * (ranks - r) - 1, microbatches) for r in range(ranks)])


def fused_row(in_flight: int, microbatches: int) -> list[str]:
    """Return ``in_flight`` forwards, then a backward and a forward in turn, then the remaining backwards."""
    lead = min(in_flight, microbatches)
    return ["F"] * lead + ["BW", "F"] * (microbatches - lead) + ["BW"] * lead
