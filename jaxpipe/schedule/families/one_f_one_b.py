"""The textbook's fixed orders on one stage a rank, GPipe, 1F1B, eager 1F1B, ZB-H1 and ZB-H2; and combined 1F1B on several.

GPipe: all forwards, then all backwards. 1F1B, eager 1F1B: after a warm-up of forwards, one forward and one backward in turn.

Sources: 1F1B is Fan et al. 2021 (DAPPLE) and Narayanan et al. 2021 (Megatron-LM, section 2.2.1, "PipeDream-Flush").
Eager 1F1B is Zhuang et al. 2023, "On Optimizing the Communication of Model Parallelism"; `controllable-memory.txt` §2.1 and
figure 1b show it as 1F1B's building block with wider offsets between forwards. The two differ only in the depth of the
warm-up.

GPipe is Huang et al. 2019, figure 2c. The paper's figure runs the backwards last microbatch first; here they run in the order
of the forwards (as PyTorch's ``ScheduleGPipe`` does), so that every family accumulates gradients in one order.

ZB-H1 and ZB-H2 are 1F1B with the backward split, weight gradients postponed by a fixed number of microbatches per rank.

Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), sections 2.1-2.2; `controllable-memory.txt` appendix G draws both.
Both are fixed orders that look at no costs; :mod:`~jaxpipe.search.families.within_limit` orders by real costs. Rank r runs
k_r forwards before its first B, then B, W, F in turn, where W lags B by d_r microbatches and k_r + d_r is the same on all
ranks: H1 has k_r = p − r, d_r = r; H2 has k_r = 2(p − r) − 1, d_r = 2r. The paper's table gives H1's bubble as
(p − 1)(F + B − W) and H2's as (p − 1)(F + B − 2W) per span; the forms below also cover a W that is longer than F, and H2's
makespan, which includes the staggered start.

Combined 1F1B is interleaved 1F1B whose steady forwards share a slot with the backward beside them, so that the collectives of
experts or of tensor parallelism hide under the other's compute. Source: Megatron-core's option
``--overlap-moe-expert-parallel-comm`` with virtual stages (arXiv 2603.07685). A braid's results come when it ends, so one more
chunk is in flight than in interleaved 1F1B. Without it pairs wait for each other (p = 8, m = 32, v = 2, collectives of F and of
B as long as F: 130.0, with it 114.5). Megatron asks for m divisible by p; here the first microbatches of the next multiple are
left out, which breaks no wait.
"""

from __future__ import annotations

from itertools import chain, zip_longest

from jaxpipe.schedule.families.family import family, in_order
from jaxpipe.schedule.ir import Action, Row, Schedule
from jaxpipe.schedule.passes.braid import slot_of
from jaxpipe.schedule.placement import circular


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


@family(
    "combined-1f1b",
    "interleaved 1F1B with each steady F braided with the BW beside it, so that collectives hide (--chunks, default 2)",
    "Megatron-core (combined 1F1B, expert-parallel overlap); Narayanan et al. 2021 §2.2.2",
    placement=circular,
    sees_collectives=True,
    peak_activations=lambda p, m, v: min((v + 1) * p, v * m) / v if m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (m + (p - 1) / v) * (f + b + w) if m % p == 0 else None,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def combined_one_f_one_b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Combined 1F1B for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F1b F2-         F3+BW0b---- F2b+BW1b--- F3b+BW0---- BW1----     BW2b--- BW3b--- BW2---- BW3----
        rank 1 |    F0- F1- F0b F1b+BW0b--- F2+BW1b---- F3+BW0----- F2b+BW1---- F3b+BW2b--- BW3b--- BW2---- BW3----

    (``b`` marks the second chunk of a rank.) With m a multiple of p, equal stages, no transfer time and no collectives the
    makespan is interleaved 1F1B's, m(F + B + W) + (p − 1)(F + B + W)/v; a rank holds at most (v + 1)p chunks of activations,
    one more than there, 1/v of its share each. It pays with collectives, which the braids hide. One chunk gives eager 1F1B
    with its pairs braided.

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    rows = tuple(_combined_row(ranks, microbatches, chunks, rank) for rank in range(ranks))
    return Schedule("combined-1f1b", circular(ranks, chunks), microbatches, rows)


def _combined_row(ranks: int, microbatches: int, chunks: int, rank: int) -> Row:
    """Return forwards of the warm-up, then each forward with the next backward, then the remaining backwards. Groups of p
    microbatches go through a rank's chunks, forwards from the first chunk to the last, backwards from the last to the first.
    """
    first = -(-microbatches // ranks) * ranks - microbatches
    places = range(-first, microbatches)  # those below 0 do not exist
    groups = [places[k : k + ranks] for k in range(0, len(places), ranks)]
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action("F", stage, i) for group in groups for stage in stages for i in group]
    backwards = [Action("BW", stage, i) for group in groups for stage in reversed(stages) for i in group]
    lead = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1
    pairs = chain(zip(forwards[:lead]), zip_longest(forwards[lead:], backwards))
    return tuple(slot for pair in pairs for slot in slot_of(a for a in pair if a is not None and a.microbatch >= 0))


@family(
    "zb-h1",
    "B and W split, W fills bubbles: a third of 1F1B's bubble if F = B = W, at its memory",
    "Qi et al. 2023 (Zero Bubble) §2.1",
    peak_activations=lambda p, m, v: min(p, m),
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 1) * (b + max(0.0, f - w)) if m >= p else None,
    picture={"ranks": 4, "microbatches": 6},
)
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 for any ``ranks`` p >= 1 and ``microbatches`` m >= 1::

        rank 0 |F0 F1 F2 F3          B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
        rank 1 |   F0 F1 F2       B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
        rank 2 |      F0 F1    B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
        rank 3 |         F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5

    Every rank holds at most min(p, m) activations, 1F1B's peak. With m >= p, equal stages and no transfer time the makespan
    is m(F + B + W) + (p − 1)(B + max(0, F − W)).

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    return in_order("zb-h1", microbatches, h1_rows(ranks, microbatches))


@family(
    "zb-h2",
    "ZB-H1 with a deeper warm-up: no bubble within spans if F = B = W; at most 2p-1 activations",
    "Qi et al. 2023 (Zero Bubble) §2.2",
    peak_activations=lambda p, m, v: min(2 * p - 1, m),
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 1) * max(f, f + b - 2 * w) if m >= 2 * p - 1 else None,
    picture={"ranks": 4, "microbatches": 8},
)
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2 for any ``ranks`` p >= 1 and ``microbatches`` m >= 1::

        rank 0 |F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7
        rank 1 |   F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7
        rank 2 |      F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7
        rank 3 |         F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7

    Every rank holds at most min(2p − 1, m) activations. With m >= 2p − 1, equal stages and no transfer time the longest span
    is m(F + B + W) + (p − 1) max(0, F + B − 2W), without a bubble when F = B = W, and the makespan
    m(F + B + W) + (p − 1) max(F, F + B − 2W).

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    return in_order("zb-h2", microbatches, h2_rows(ranks, microbatches))


def h1_rows(ranks: int, microbatches: int) -> list[list[str]]:
    """Op names of ZB-H1, per rank."""
    return [split_row(ranks - r, r, microbatches) for r in range(ranks)]


def h2_rows(ranks: int, microbatches: int) -> list[list[str]]:
    """Op names of ZB-H2, per rank."""
    return [split_row(2 * (ranks - r) - 1, 2 * r, microbatches) for r in range(ranks)]


def split_row(lead: int, lag: int, m: int) -> list[str]:
    """Return ``lead`` forwards; then B, W (``lag`` microbatches behind) and F in turn; then the remaining W."""
    lead, lag = min(lead, m), min(lag, m)
    turns = (["B"] + ["W"] * (i >= lag) + ["F"] * (lead + i < m) for i in range(m))
    return ["F"] * lead + [op for turn in turns for op in turn] + ["W"] * lag
