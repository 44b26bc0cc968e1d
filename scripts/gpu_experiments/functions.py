"""Experiments on one block's functions alone: what the card does today, F, B, W and BW's real speed, attention, braids."""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import asdict
from typing import Any

from scripts.gpu_experiments.blocks import (
    FORMULAS,
    OPS,
    PEERS,
    block_flops,
    middle_block,
    ones_of,
    real_arguments,
    seconds_of,
)
from scripts.gpu_experiments.registry import Settings, experiment

_STAGES = ("jaxpipe/stage", "jaxpipe/cost", "models/attention.py", "models/gpt.py")


@experiment(
    "T0",
    version=1,
    question="what does this card do today, and what does the compile cache save?",
    backs="all",
    paths=_STAGES,
    estimate_s=60,
    predicted={"noise product": "798 TFLOP/s short, 650-720 sustained", "cached compile": "0.15-0.25 of cold"},
    want={"cached_over_cold": "<= 0.25"},
)
def card_today(settings: Settings) -> dict[str, Any]:
    """Compile one block's functions, then again from JAX's cache of compiled programs."""
    import jax

    seconds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        # Set before anything is compiled: JAX opens its cache at the first program.
        jax.config.update("jax_compilation_cache_dir", folder)
        for _ in ("cold", "cached"):
            functions = middle_block(settings, settings.hidden).functions
            seconds.append({op: _compile_seconds(functions[op]) for op in OPS})
            jax.clear_caches()
    cold, cached = seconds
    return {
        "cold_s": cold,
        "cached_s": cached,
        "cached_over_cold": sum(cached.values()) / sum(cold.values()),
        "sustained_over_short": settings.ceilings["noise_300_flops_per_s"] / settings.ceilings["noise_10_flops_per_s"],
        "noise_over_zeros": settings.ceilings["noise_10_flops_per_s"] / settings.ceilings["zeros_10_flops_per_s"],
    }


def _compile_seconds(function: Any) -> float:
    traced = function.jitted.lower(*function.avals_in)
    began = time.perf_counter()
    traced.compile()
    return time.perf_counter() - began


@experiment(
    "T1",
    version=1,
    question="what is F, B, W, BW's real speed, by data and by length of the sample?",
    backs="README's table of GPUs; F + B + W ÷ F + BW",
    paths=_STAGES,
    estimate_s=120,
    predicted={
        "ones ÷ noise": "noise 8-14% slower",
        "2 s ÷ 50 ms": "another 3-8% slower",
        "split ÷ fused": "1.00-1.01",
    },
    want={"4096.split_over_fused": "<= 1.03", "8192.split_over_fused": "<= 1.03"},
)
def speed_of_functions(settings: Settings) -> dict[str, Any]:
    """Time one block's functions on ones, noise and values as in training, in samples of 50 ms to 2 s."""
    return {name: _speeds(settings, hidden) for name, hidden in settings.sizes.items()}


def _speeds(settings: Settings, hidden: int) -> dict[str, Any]:
    from jaxpipe.cost.seconds import arguments_of
    from jaxpipe.stage.functions import footprint

    stage = middle_block(settings, hidden)
    real = real_arguments(stage, settings)
    makers = {
        "ones": lambda op: ones_of(stage.functions[op], settings),
        "noise": lambda op: arguments_of(stage.functions[op], settings.vocab),
        "real": lambda op: real[op],
    }
    rows = []
    for op in OPS:
        for data, make in makers.items():
            inputs = make(op)
            for sample_s in settings.sample_s:
                timing = seconds_of(stage.functions[op], inputs, settings, sample_s)
                rows.append({"op": op, "data": data, "sample_s": sample_s, **asdict(timing)})
            del inputs
            gc.collect()
    sustained = {
        row["op"]: row["median_s"] for row in rows if (row["data"], row["sample_s"]) == ("noise", settings.sample_s[-1])
    }
    short = {
        row["op"]: row["median_s"] for row in rows if (row["data"], row["sample_s"]) == ("ones", settings.sample_s[0])
    }
    total_s = sum(sustained[op] for op in "FBW")
    return {
        "hidden": hidden,
        "timings": rows,
        "sustained_noise_s": sustained,
        "split_over_fused": total_s / (sustained["F"] + sustained["BW"]),
        "short_ones_over_sustained_noise": {op: short[op] / sustained[op] for op in OPS},
        "flops_per_s": {name: _rates(hidden, settings, sustained, name) for name in FORMULAS},
        "share_of_noise_product": {
            op: rate / settings.ceilings["noise_300_flops_per_s"]
            for op, rate in _rates(hidden, settings, sustained, PEERS).items()
        },
        "mfu": {name: mfu(_rates(hidden, settings, sustained, name)["FBW"]) for name in FORMULAS},
        "temp_bytes": {op: footprint(stage.functions[op]).temp_bytes for op in OPS},
    }


def _rates(hidden: int, settings: Settings, seconds: dict[str, float], formula: str) -> dict[str, float]:
    """Return the model FLOP/s of each function, and of F, B and W together (``FBW``)."""
    flops = block_flops(hidden, settings.sequence, formula)
    together = sum(flops[op] for op in "FBW") / sum(seconds[op] for op in "FBW")
    return {**{op: flops[op] / seconds[op] for op in OPS}, "FBW": together}


def mfu(flops_per_s: float) -> float | None:
    """Return the share of the device's dense bfloat16 peak; None for one whose figures are not known."""
    import jax

    from jaxpipe.planning.targets import peak_of

    peak = peak_of(jax.devices()[0].device_kind, "bfloat16")
    return flops_per_s / peak if peak else None
