"""The experiment against PyTorch on the same card: one block of the same GPT, forward and backward, whole and split."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from scripts.gpu_experiments.blocks import OPS, middle_block, seconds_of
from scripts.gpu_experiments.here import cannot_ask, lacks_module
from scripts.gpu_experiments.process import call_apart
from scripts.gpu_experiments.registry import Settings, experiment

_LIMIT_S = 120
_SAMPLE_S = 0.5


@experiment(
    "T9",
    version=1,
    question="is a block faster or slower than PyTorch's on the same card?",
    backs='README "Why"',
    paths=("jaxpipe/stage", "models/gpt.py", "models/attention.py", "scripts/torch_pipeline.py"),
    estimate_s=180,
    predicted={
        "F + B + W ÷ torch.compile, float32 sums": "0.93-1.02",
        "F + B + W ÷ torch's own split": "0.70-0.85",
    },
    want={"split_over_compiled": "<= 1.00", "split_over_torch_split": "<= 1.00"},
)
def block_against_torch(settings: Settings) -> dict[str, Any]:
    """Time a block in bfloat16 on noise: ours, PyTorch's, ours again, a process each. PyTorch's eager and compiled, gradients
    left in bfloat16 or added to float32 as ours are; its split by what its zero-bubble schedules call."""
    if missing := lacks_module("torch"):
        return cannot_ask(missing)
    rounds = [
        call_apart(function, settings, limit_s=_LIMIT_S, environment={})
        for function in (our_block, torch_block, our_block)
    ]
    before, torch, after = rounds
    if failed := [r for r in rounds if "failure" in r]:
        return {"ours": before, "torch": torch, "ours_again": after, "failed": len(failed)}
    ours = {op: (before["seconds"][op] + after["seconds"][op]) / 2 for op in OPS}
    split_s, fused_s = sum(ours[op] for op in "FBW"), ours["F"] + ours["BW"]
    theirs = torch["seconds"]
    return {
        "ours": before,
        "ours_again": after,
        "torch": torch,
        "split_over_compiled": split_s / theirs.get("compiled, float32 sums", theirs["eager, float32 sums"]),
        "fused_over_compiled": fused_s / theirs.get("compiled, float32 sums", theirs["eager, float32 sums"]),
        "split_over_torch_split": split_s / sum(theirs[f"eager {op}"] for op in "FIW"),
    }


def our_block(settings: Settings) -> dict[str, Any]:
    """Return the seconds of our functions, and the most bytes that they took."""
    import jax

    from jaxpipe.cost.seconds import arguments_of
    from jaxpipe.stage.functions import footprint

    stage = middle_block(settings, settings.hidden)
    sample_s = 0.0 if settings.tiny else _SAMPLE_S
    seconds = {}
    for op in OPS:
        function = stage.functions[op]
        seconds[op] = seconds_of(function, arguments_of(function, settings.vocab), settings, sample_s).median_s
    return {
        "seconds": seconds,
        "peak_bytes": {op: footprint(stage.functions[op]).peak_bytes for op in OPS},
        "residual_bytes": stage.residual_bytes,
        "version": jax.__version__,
    }


def torch_block(settings: Settings) -> dict[str, Any]:
    """Return the seconds of PyTorch's block by what is run of it, and its peak of memory."""
    import torch
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    from scripts.torch_pipeline import Block

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    sizes = {"d_model": settings.hidden, "num_heads": settings.hidden // settings.head}
    block = Block(sizes).to(device, torch.bfloat16)
    shape = (1, settings.sequence, settings.hidden)
    x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_(True)
    parameters = list(block.parameters())
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]

    def forward_and_backward(module: Callable[[Any], Any], add: bool) -> None:
        module(x).backward(dy)
        for p, total in zip(parameters, sums, strict=True):
            if add:
                total.add_(p.grad)
            p.grad = None
        x.grad = None

    modules: dict[str, Callable[[Any], Any]] = {"eager": block}
    if device.type == "cuda":  # a CPU's compiler takes minutes
        modules["compiled"] = torch.compile(block)
    runs: dict[str, Callable[[], Any]] = {}
    for name, module in modules.items():
        runs[f"{name} F"] = lambda module=module: module(x)  # type: ignore[misc]
        runs[f"{name}, bfloat16 gradients"] = lambda module=module: forward_and_backward(module, add=False)  # type: ignore[misc]
        runs[f"{name}, float32 sums"] = lambda module=module: forward_and_backward(module, add=True)  # type: ignore[misc]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = {name: _seconds(settings, run, wait) for name, run in runs.items()}
    peak = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        forward_and_backward(block, add=True)
        peak = torch.cuda.max_memory_allocated()
    seconds |= _split_seconds(settings, block, x, dy, wait, stage_backward_input, stage_backward_weight)
    return {"seconds": seconds, "peak_bytes": peak, "version": torch.__version__}


def _seconds(settings: Settings, run: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Return the seconds of a run, of many back to back."""
    run()  # compiles
    wait()
    began = time.perf_counter()
    run()
    wait()
    count = 1 if settings.tiny else max(1, round(_SAMPLE_S * 2 / (time.perf_counter() - began)))
    began = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return (time.perf_counter() - began) / count


def _split_seconds(
    settings: Settings, block: Any, x: Any, dy: Any, wait: Callable[[], Any], of_input: Any, of_weight: Any
) -> Mapping[str, float]:
    """Return the seconds of forward, input gradient and weight gradient by ``torch.distributed.pipelining``, each waited for: a
    step needs what the one before keeps, so they can't run back to back."""
    totals = dict.fromkeys(("F", "I", "W"), 0.0)
    steps = 1 if settings.tiny else 50
    for n in range(steps + 2):
        if n == 2:  # the first ones choose kernels
            totals = dict.fromkeys(totals, 0.0)
        marks = [_now(wait)]
        y = block(x)
        marks.append(_now(wait))
        _, groups = of_input([y], [dy], [x], block.parameters())
        marks.append(_now(wait))
        of_weight(block.parameters(), groups)
        marks.append(_now(wait))
        for p in block.parameters():
            p.grad = None
        x.grad = None
        for op, begin, end in zip(totals, marks, marks[1:], strict=False):
            totals[op] += end - begin
    return {f"eager {op}": total / steps for op, total in totals.items()}


def _now(wait: Callable[[], Any]) -> float:
    wait()
    return time.perf_counter()
