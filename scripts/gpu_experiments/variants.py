"""Experiments on other forms of one block's functions: weight gradients, attention and recomputation, braids, flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripts.gpu_experiments.blocks import OPS, middle_block, timed
from scripts.gpu_experiments.process import call_apart, with_flags
from scripts.gpu_experiments.registry import Settings, experiment
from scripts.hlo_schedule import float32_adds

_STAGES = ("jaxpipe/stage", "models/attention.py", "models/gpt.py", "models/llama.py")
_MODELS = {"gpt": "models.gpt:GPT", "llama": "models.llama:Llama"}
_LIMIT_S = 90
_CUBLAS = "--xla_gpu_enable_triton_gemm=false"


@experiment(
    "T6",
    version=1,
    question="what do float32 accumulators cost W, and what would two microbatches in one product save?",
    backs="MFU of W, its workspace",
    paths=_STAGES,
    estimate_s=90,
    predicted={"separate adds": "0 where products add in float32", "pair ÷ two": "0.90-0.92 of W"},
    want={"as is.gpt.separate_adds": "== 0", "as is.llama.separate_adds": "== 0", "as is.gpt.pair_over_two": "<= 0.97"},
)
def weight_gradients(settings: Settings) -> dict[str, Any]:
    """Time W of one microbatch and of two in one product, of GPT and Llama, with XLA's products and with cuBLAS's alone;
    count the kernels that only add into accumulators."""
    flags = {"as is": with_flags(), "cuBLAS": with_flags(_CUBLAS)}
    return {
        name: call_apart(_weight_gradients, settings, limit_s=_LIMIT_S, environment=environment)
        for name, environment in list(flags.items())[: 1 if settings.tiny else None]
    }


def _weight_gradients(settings: Settings) -> dict[str, Any]:
    return {name: _weight_gradient(settings, target) for name, target in _MODELS.items()}


def _weight_gradient(settings: Settings, target: str) -> dict[str, Any]:
    one, two = (
        middle_block(settings, settings.hidden, model=target, microbatch_size=size).functions["W"] for size in (1, 2)
    )
    compiled = one.jitted.lower(*one.avals_in).compile()
    one_s, two_s = timed(settings, one), timed(settings, two)
    return {
        "w_s": one_s,
        "pair_s": two_s,
        "pair_over_two": two_s / (2 * one_s),
        "separate_adds": len(float32_adds(compiled.as_text(), least=1 if settings.tiny else 10**6)),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


@experiment(
    "T13",
    version=1,
    question="which attention kernel is faster where, and what does recomputation buy?",
    backs="recompute policies, models/attention.py",
    paths=_STAGES,
    estimate_s=120,
    predicted={"cuDNN's B ÷ F": "2.2-2.6 of attention alone", "order of policies": "as planned"},
    want={"planned_order_of_policies": "== 1"},
)
def attention_and_recompute(settings: Settings) -> dict[str, Any]:
    """Time F, B and W with either attention kernel at several lengths, and under recompute policies, with residual bytes."""
    kernels = {}
    for sequence in (settings.sequence,) if settings.tiny else (2048, 8192, 16384):
        for kernel in ("xla",) if settings.tiny else ("xla", "cudnn"):
            if kernel == "xla" and sequence > 8192:  # its scores alone take more than a card
                continue
            stage = middle_block(replace(settings, sequence=sequence), settings.hidden, attention=kernel)
            kernels[f"{kernel} {sequence}"] = {op: timed(settings, stage.functions[op]) for op in "FB"}
    policies = {}
    for policy in ("none", "flash") if settings.tiny else ("none", "fused", "cheap", "flash", "full"):
        stage = middle_block(settings, settings.hidden, recompute=policy)
        seconds = {op: timed(settings, stage.functions[op]) for op in "FBW"}
        policies[policy] = {
            "seconds": seconds,
            "total_s": sum(seconds.values()),
            "flops": sum(stage.flops[op] for op in "FBW"),
            "residual_bytes": stage.residual_bytes,
        }
    measured = sorted(policies, key=lambda p: policies[p]["total_s"])
    planned = sorted(policies, key=lambda p: policies[p]["flops"])
    return {
        "kernels": kernels,
        "policies": policies,
        "measured_order": measured,
        "planned_order_of_policies": int(measured == planned),
    }


@experiment(
    "T10",
    version=1,
    question="does it cost anything to run F and BW in one executable?",
    backs="stp",
    paths=_STAGES,
    estimate_s=60,
    predicted={"braid ÷ apart": "0.99-1.01"},
    want={"braid_over_apart": "<= 1.005"},
)
def braids(settings: Settings) -> dict[str, Any]:
    """Time a braid of F and BW against both apart; compare their workspace."""
    from jaxpipe.stage.compiled.braid import braid
    from jaxpipe.stage.compiled.compile import BuildCache
    from jaxpipe.stage.functions import footprint

    stage = middle_block(settings, settings.hidden)
    apart = [stage.functions[op] for op in ("F", "BW")]
    braided = braid([(stage.stage, f) for f in apart], BuildCache())
    seconds = {f.op: timed(settings, f) for f in apart}
    braid_s = timed(settings, braided)
    return {
        "apart_s": seconds,
        "braid_s": braid_s,
        "braid_over_apart": braid_s / sum(seconds.values()),
        "temp_bytes": {"braid": footprint(braided).temp_bytes, **{f.op: footprint(f).temp_bytes for f in apart}},
    }


_FLAGS = {
    "as is": (),
    "no Triton products": (_CUBLAS,),
    "no cuBLASLt": ("--xla_gpu_enable_cublaslt=false",),
    "no command buffers": ("--xla_gpu_enable_command_buffer=",),
    "no autotuning": ("--xla_gpu_autotune_level=0",),
    "autotuning 4": ("--xla_gpu_autotune_level=4",),
    "cuDNN products": ("--xla_gpu_cudnn_gemm_fusion_level=2",),
    "latency-hiding scheduler": ("--xla_gpu_enable_latency_hiding_scheduler=true",),
    "deterministic": ("--xla_gpu_deterministic_ops=true",),
}


@experiment(
    "T14",
    version=1,
    question="does any flag of XLA make F, B, W or BW faster?",
    backs="defaults",
    paths=_STAGES,
    estimate_s=180,
    predicted={"no autotuning": "3-10% slower", "deterministic B": "3-8% slower", "others": "within 1%"},
    want={"best_over_as_is": ">= 0.98"},
)
def flags(settings: Settings) -> dict[str, Any]:
    """Time the functions under each set of flags, a process each; a gain of more than 2% would change a default."""
    numbers: dict[str, Any] = {
        name: call_apart(function_seconds, settings, limit_s=_LIMIT_S, environment=with_flags(*chosen))
        for name, chosen in list(_FLAGS.items())[: 1 if settings.tiny else None]
    }
    totals = {name: sum(x[op] for op in "FBW") for name, x in numbers.items() if "failure" not in x}
    return {**numbers, "total_s": totals, "best_over_as_is": min(totals.values()) / totals["as is"]}


def function_seconds(settings: Settings) -> dict[str, float]:
    """Return the seconds of each function of one block."""
    stage = middle_block(settings, settings.hidden)
    return {op: timed(settings, stage.functions[op]) for op in OPS}
