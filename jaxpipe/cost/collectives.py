"""Tensor-parallel collectives of a stage function, timed alone.

What a function takes without them is its own time less theirs, as long as nothing in it hides them, which holds for F and B
(`stp.txt` section 4.3).
"""

from __future__ import annotations

import time

import jax

from jaxpipe.cost.timing import Timing
from jaxpipe.stage.compiled.exchange import collectives_alone
from jaxpipe.stage.functions import StageFunction


def time_collectives(function: StageFunction, repeats: int, warm_up: int = 1) -> Timing | None:
    """Seconds of all collectives over ``tp`` of one call of ``function``; None if it has none."""
    made = collectives_alone(function)
    if made is None:
        return None
    run, arrays = made

    def sample() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        return time.perf_counter() - start

    for _ in range(1 + warm_up):
        sample()
    return Timing.of([sample() for _ in range(repeats)])
