"""Experiments on memory: the accounting against the allocator, byte by byte, and at the edge of the card."""

from __future__ import annotations

from typing import Any

from scripts.gpu_experiments.blocks import pipeline
from scripts.gpu_experiments.process import call_apart
from scripts.gpu_experiments.registry import PROGRAM_PATHS, Settings, experiment

_LIMIT_S = 100
_FRACTION = {"XLA_CLIENT_MEM_FRACTION": ".95", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}


@experiment(
    "T7",
    version=1,
    question="is memory right to the byte, and what happens at the edge?",
    backs="plan, U4; the out-of-memory line",
    paths=PROGRAM_PATHS,
    estimate_s=120,
    predicted={"predicted ÷ measured": "0.99-1.02", "share that JAX takes": "0.75"},
    want={
        "accounting.predicted_over_measured": "0.99 to 1.01",
        "edge.below_ran": "== 1",
        "edge.above_named_instruction": "== 1",
    },
)
def memory_to_the_byte(settings: Settings) -> dict[str, Any]:
    """Compare predicted and measured bytes per instruction; run what just fits, and what just does not; try other allocators.
    Each in a process, as a peak never falls."""
    calls: dict[str, Any] = {"accounting": (accounting, {}), "edge": (edge, _FRACTION)}
    if not settings.tiny:
        calls["accounting, cuda_async"] = accounting, {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
    return {
        name: call_apart(function, settings, limit_s=_LIMIT_S, environment=environment)
        for name, (function, environment) in calls.items()
    }


def accounting(settings: Settings) -> dict[str, Any]:
    """Return predicted and measured bytes after each instruction of one rank, and where they first differ."""
    import jax

    from jaxpipe.rehearsal.rank import Rehearsal
    from jaxpipe.runtime.memory_probe import probe_step
    from jaxpipe.schedule import generate

    pipe = pipeline(settings, settings.hidden, generate("1f1b", settings.ranks, settings.microbatches))
    rehearsal = Rehearsal(pipe, 1)
    inputs, resident = rehearsal.place()
    predicted = rehearsal.pipeline.memory_report(curves=True).ranks[0]
    measured = probe_step(rehearsal.pipeline.executor, inputs, [rehearsal.devices], resident=resident).ranks[0]
    names = [str(i) for _, i in rehearsal.pipeline.executor.sequence]
    rows = list(zip(names, predicted.live_bytes, measured.in_use_bytes or measured.live_bytes, strict=True))
    stats = jax.devices()[0].memory_stats() or {}
    report = rehearsal.run(steps=settings.steps, complete=False)
    limit = stats.get("bytes_limit")
    return {
        "predicted_over_measured": report.memory.ratio,
        "source": report.memory.source,
        "first_divergence": next(([name[:200], p, m] for name, p, m in rows if p != m), None),
        "largest_difference_bytes": max((m - p for _, p, m in rows), key=abs),
        "curve": [[p, m] for _, p, m in rows],
        "bytes_limit": limit,
        "step_s": report.step.median_s,
    }


def edge(settings: Settings) -> dict[str, Any]:
    """Run the most microbatches of GPipe, which holds all of them, that are predicted to fit into 0.97 of the limit; then as
    many as are predicted to pass 1.03 of it, which must name the instruction that failed."""
    import jax

    from jaxpipe.errors import RunError
    from jaxpipe.rehearsal.rank import Rehearsal
    from jaxpipe.schedule import generate

    stats = jax.devices()[0].memory_stats() or {}
    base = pipeline(settings, settings.hidden, generate("gpipe", settings.ranks, 1))

    def rehearsal(microbatches: int, limit: float | None) -> Any:
        pipe = base.with_schedule(generate("gpipe", settings.ranks, microbatches))
        return Rehearsal(pipe, 1, memory_limit_bytes=limit)

    one, nine = (rehearsal(m, None).predicted().peak_bytes for m in (1, 9))
    # A CPU has no limit of its own: so much is five microbatches.
    limit = stats.get("bytes_limit") or (one + nine) / 2
    each = (nine - one) / 8
    below = max(1, int((0.97 * limit - one) / each) + 1)
    above = int((1.03 * limit - one) / each) + 2
    own_limit = None if "bytes_limit" in stats else limit
    numbers: dict[str, Any] = {"bytes_limit": limit, "microbatches": [below, above], "below_ran": 0}
    try:
        report = rehearsal(below, own_limit).run(steps=1, complete=False)
        numbers |= {"below_ran": 1, "below_predicted_over_measured": report.memory.ratio}
    except RunError as error:
        numbers["below_said"] = str(error)
    try:
        rehearsal(above, own_limit).run(steps=1, complete=False)
        numbers |= {"above_named_instruction": 0, "above_said": "it ran"}
    except RunError as error:
        numbers |= {"above_named_instruction": int("at instruction" in str(error)), "above_said": str(error)}
    return numbers
