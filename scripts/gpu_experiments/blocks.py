"""Makes the blocks that experiments time, their arguments and their model FLOPs.

Model FLOPs have several formulas, which differ by a tenth: attention counted whole or only what a causal mask leaves, its
backward 2 or 2.5 times its forward (cuDNN's recomputes the scores). Published numbers of Megatron and torchtitan count it
whole, backward twice: ``whole, 3 x``. Products outside attention are the same in all.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from scripts.gpu_experiments.registry import Settings

BLOCKS_A_RANK = 2
OPS = ("F", "B", "W", "BW")
FORMULAS: Mapping[str, tuple[float, float]] = {
    "whole, 3 x": (1.0, 2.0),
    "causal, 3 x": (0.5, 2.0),
    "causal, 3.5 x": (0.5, 2.5),
}
"""The share of the scores that counts, and attention's backward ÷ its forward."""
PEERS = "whole, 3 x"


def block_flops(hidden: int, sequence: int, formula: str = PEERS) -> dict[str, float]:
    """Return the model FLOPs of F, B and W of one GPT block on one sequence, recomputation not counted."""
    share, backward = FORMULAS[formula]
    products = 24 * sequence * hidden**2
    attention = 4 * sequence**2 * hidden * share
    return {
        "F": products + attention,
        "B": products + backward * attention,
        "W": products,
        "BW": 2 * products + backward * attention,
    }


def pipeline(
    settings: Settings,
    hidden: int,
    schedule: Any,
    *,
    model: str = "models.gpt:GPT",
    recompute: str = "flash",
    microbatch_size: int = 1,
    dtype: str = "bfloat16",
    blocks_a_rank: int = BLOCKS_A_RANK,
    shards: int = 1,
    **options: Any,
) -> Any:
    """Build a pipeline of equal ranks of ``blocks_a_rank`` blocks, all on the first device, or divided over the first
    ``shards``; nothing is compiled yet. ``options``: of the model."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.axes import RankMesh
    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.stage.model.reference import resolve_model

    blocks = blocks_a_rank * schedule.num_ranks
    built = resolve_model(
        model,
        {
            "vocab_size": settings.vocab, "d_model": hidden, "num_layers": blocks, "num_heads": hidden // settings.head,
            "seq_len": settings.sequence, "tied": False, **options,
        },
    )  # fmt: skip
    each = blocks // schedule.num_stages
    # The embedding stands before the blocks, the head and the loss after them.
    cuts = [0, *range(1 + each, 1 + blocks, each), len(built.layers)]
    return Pipeline.build(
        built,
        schedule,
        microbatch_size=microbatch_size,
        boundaries=list(pairwise(cuts)),
        devices=jax.devices()[:shards] * schedule.num_ranks,
        tp=RankMesh(tp=shards),
        compute_dtype=jnp.dtype(dtype),
        recompute=recompute,
    )


def middle_block(settings: Settings, hidden: int, **options: Any) -> Any:
    """Return the stage of one block between others."""
    from jaxpipe.schedule import generate

    return pipeline(settings, hidden, generate("po", 2, 2), **options).stages[1]


def seconds_of(function: Any, inputs: list[Any], settings: Settings, sample_s: float) -> Any:
    """Time calls of ``function`` on ``inputs``, back to back, in samples of ``sample_s`` seconds: a ``Timing``."""
    from jaxpipe.cost.seconds import Timing, call_timer

    sample = call_timer(function, inputs)
    sample(1)
    calls = max(1, round(sample_s / sample(1)))
    # Long samples are few: a card's minutes are.
    repeats = min(settings.repeats, max(1, round(1.5 / max(sample_s, 1e-3))))
    return Timing.of([sample(calls) for _ in range(repeats)])


def timed(settings: Settings, function: Any) -> float:
    """Return the seconds of a call on random values, in samples of half a second."""
    from jaxpipe.cost.seconds import arguments_of

    inputs = arguments_of(function, settings.vocab)
    timing = seconds_of(function, inputs, settings, 0.0 if settings.tiny else 0.5)
    del inputs
    gc.collect()
    return timing.median_s


def ones_of(function: Any, settings: Settings) -> list[Any]:
    """Return arguments of ones; integers are random all the same."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.cost.seconds import arguments_of

    return [
        jax.device_put(jnp.ones(a.shape, a.dtype), a.sharding) if jnp.issubdtype(a.dtype, jnp.floating) else a
        for a in arguments_of(function, settings.vocab)
    ]


def real_arguments(stage: Any, settings: Settings) -> dict[str, list[Any]]:
    """Return the arguments of F, B, W and BW as in training: weights and embedded tokens are normal with deviation 0.02, norms'
    scales are 1, cotangents 1e-4; residuals are what F and B make of them."""
    values: dict[tuple[str, int], Any] = {}
    arguments: dict[str, list[Any]] = {}
    for n, op in enumerate(op for op in OPS if op in stage.functions):
        function = stage.functions[op]
        for k, (port, aval) in enumerate(zip(function.inputs, function.avals_in, strict=True)):
            if (port.kind, port.index) not in values:
                values[port.kind, port.index] = _realistic(port.kind, aval, 100 * n + k)
        arguments[op] = [values[port.kind, port.index] for port in function.inputs]
        # Accumulators are donated: each function gets its own.
        results = function.call(*_own_accumulators(function, arguments[op]))
        values |= {
            (port.kind, port.index): x
            for port, x in zip(function.outputs, results, strict=True)
            if port.kind in ("res", "wres")
        }
    return {op: _own_accumulators(stage.functions[op], inputs) for op, inputs in arguments.items()}


def _own_accumulators(function: Any, inputs: Sequence[Any]) -> list[Any]:
    return [x + 0 if port.kind == "acc" else x for port, x in zip(function.inputs, inputs, strict=True)]


def _realistic(kind: str, aval: Any, seed: int) -> Any:
    import jax
    import jax.numpy as jnp

    from jaxpipe.cost.seconds import random_array

    if not jnp.issubdtype(aval.dtype, jnp.floating) or kind not in ("param", "x", "dy"):
        return random_array(aval, 1e-4)
    if kind == "param" and len(aval.shape) == 1:
        return jax.device_put(jnp.ones(aval.shape, aval.dtype), aval.sharding)
    scale = 1e-4 if kind == "dy" else 0.02
    values = jax.random.normal(jax.random.key(seed), aval.shape, jnp.float32) * scale
    return jax.device_put(values.astype(aval.dtype), aval.sharding)


def step_seconds(pipe: Any, inputs: Any, steps: int) -> tuple[list[float], Any]:
    """Return the wall seconds of ``steps`` steps after one that compiles, and inputs for the next."""
    import jax

    walls: list[float] = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        out = pipe.executor.run(inputs)
        out.wait()
        jax.block_until_ready((dict(out.acc), list(out.losses)))
        walls.append(time.perf_counter() - began)
        inputs = replace(inputs, acc=out.acc)
    return walls[1:], inputs


def host_link(settings: Settings) -> Any:
    """Measure the link to pinned host memory and back; None where there is none."""
    import jax

    from jaxpipe.cost import measure_host_link
    from jaxpipe.cost.profile import CPU_SIZES

    sizes = CPU_SIZES[:2] if settings.tiny else None
    return measure_host_link([jax.devices()[0]], repeats=settings.repeats, sizes=sizes)


def measured_costs(pipe: Any, seconds: Mapping[str, float], link: Any) -> Any:
    """Return a cost profile of equal stages: measured seconds by op, and the measured link."""
    stages = pipe.schedule.num_stages
    costs = replace(pipe.costs, **{f"{op.lower()}_s": (x,) * stages for op, x in seconds.items()}, source="measured")
    return costs if link is None else replace(costs, host=link.host_link(), offload_s=(), load_s=())


def median_ratio(samples: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of samples taken in turn, each ÷ its other."""
    return statistics.median(a / b for a, b in zip(samples, others, strict=True))
