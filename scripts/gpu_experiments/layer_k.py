"""k, the round trip of a layer's activations to the host and back ÷ its compute: whether offloading is free.

Source: `pipeoffload.txt` section 1, equation 1. Its formula is lost in the text we have; this is derived anew from what the
paper cites. One transformer layer on b sequences of s tokens, hidden size h (b cancels):

* Kept for the backward pass, in bytes (Korthikanti et al. 2023, 16-bit values, attention scores not stored): 34 bsh. The paper
  recomputes both LayerNorms (their outputs, 2 + 2), GeLU (its output, 8) and the dropout masks (1 + 1), so 20 bsh are left:
  the "40% less" of its appendix C.
* Compute, forward and backward (Narayanan et al. 2021): 72 bsh² + 12 bs²h floating-point operations.
* The round trip copies all of it out and in again, one after the other on one lane.

So k = 20 (1/D2H + 1/H2D) C / (72 h + 12 s), with D2H, H2D bytes per second and C operations per second; with D2H = H2D = H,
k = 10 C / (3 H (6h + s)). It falls as hidden size or sequence grows. Checked against the paper on A100-like numbers (C at 60%
of 312 TFLOP/s; two devices share one PCIe 4.0 x16 link, 16 GB/s each and direction): k = 1 is crossed at h ≈ 6 200 for
s = 2k and at s ≈ 14k for h = 4k, and k < 1 for h ≥ 8k, or for s ≥ 16k
with h ≥ 4k.

Not modelled: grouped-query attention, gated or sparse MLPs (fewer or more bytes per operation); for those, measure a
profile and use :func:`jaxpipe.schedule.costs.k_of`.
"""

from __future__ import annotations

from jaxpipe.errors import ScheduleError

BYTES_PER_TOKEN_AND_CHANNEL = 20.0
"""Activations of a layer in bytes per token and hidden channel, LayerNorm, GeLU and dropout recomputed (34 without that)."""


def k_of_layer(
    hidden: int,
    sequence: int,
    *,
    flops_per_s: float,
    d2h_bytes_per_s: float,
    h2d_bytes_per_s: float | None = None,
    residual_bytes: float = BYTES_PER_TOKEN_AND_CHANNEL,
) -> float:
    """Equation 1: round trip ÷ (F + B + W) of one transformer layer; at most 1 means that all of it can be hidden.

    ``hidden`` channels, ``sequence`` tokens. ``flops_per_s``: operations per second that the device reaches.
    ``d2h_bytes_per_s`` ``h2d_bytes_per_s``: what one device gets of the host link in each direction (default: the same).
    ``residual_bytes``: kept per token and channel.

    Raises:
        ScheduleError: a number is not positive.
    """
    back = d2h_bytes_per_s if h2d_bytes_per_s is None else h2d_bytes_per_s
    numbers = {
        "hidden": hidden,
        "sequence": sequence,
        "flops_per_s": flops_per_s,
        "d2h_bytes_per_s": d2h_bytes_per_s,
        "h2d_bytes_per_s": back,
        "residual_bytes": residual_bytes,
    }
    problems = [f"k: {name} is {value}; want a number above 0" for name, value in numbers.items() if not value > 0]
    if problems:
        raise ScheduleError("; ".join(problems), problems)
    round_trip_s = residual_bytes * (1 / d2h_bytes_per_s + 1 / back)
    compute_s = (72 * hidden + 12 * sequence) / flops_per_s
    return round_trip_s / compute_s
