"""Experiments on predictions: whether plan ranks configurations right, what 64 GPUs would do, composed of rehearsed ranks."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from scripts.gpu_experiments.blocks import middle_block, pipeline, timed
from scripts.gpu_experiments.here import cannot_ask
from scripts.gpu_experiments.registry import PROGRAM_PATHS, Settings, experiment

_PLANNED_PATHS = (*PROGRAM_PATHS, "jaxpipe/planning", "models/llama.py")
GPT, LLAMA = "models.gpt:GPT", "models.llama:Llama"
_PLANNED = (
    (GPT, 1, "flash"), (GPT, 1, "full"), (GPT, 2, "flash"), (GPT, 4, "full"), (LLAMA, 1, "flash"), (LLAMA, 2, "full")
)  # fmt: skip
"""Model, sequences of a microbatch, recompute policy."""


def target_here() -> Any | None:
    """Return the target that describes this device; of a CPU the nominal one; None for a GPU that no target describes."""
    import jax

    from jaxpipe.planning.targets import TARGETS

    device = jax.devices()[0]
    if device.platform == "cpu":
        return TARGETS["cpu"]
    return next((t for t in TARGETS.values() if t.description == device.device_kind), None)


@experiment(
    "T17",
    version=1,
    question="does plan rank configurations as they run?",
    backs="plan, tune",
    paths=_PLANNED_PATHS,
    estimate_s=120,
    predicted={"roofline ÷ measured": "0.85-0.95", "Kendall": "1.0"},
    want={"kendall": ">= 1", "largest_error": "<= 0.10"},
)
def plan_and_measured(settings: Settings) -> dict[str, Any]:
    """Predict F, B and W of one block under six configurations of a rank by the roofline of this card, then measure them:
    seconds a sequence, Kendall's rank correlation, the largest error."""
    if (target := target_here()) is None:
        return cannot_ask("no target of plan describes this device")
    configurations = _PLANNED[:2] if settings.tiny else _PLANNED
    predicted_s = [planned_seconds(settings, target, *c) for c in configurations]
    measured_s = []
    for model, size, recompute in configurations:
        stage = middle_block(settings, settings.hidden, model=model, microbatch_size=size, recompute=recompute)
        measured_s.append(sum(timed(settings, stage.functions[op]) for op in "FBW") / size)
        del stage
        gc.collect()
    ratios = [p / m for p, m in zip(predicted_s, measured_s, strict=True)]
    return {
        "target": target.name,
        "configurations": [" ".join(map(str, c)) for c in configurations],
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "predicted_over_measured": ratios,
        "kendall": kendall(predicted_s, measured_s),
        "largest_error": max(abs(r - 1) for r in ratios),
    }


def prediction(config: Any, target: Any) -> Any:
    """Return what ``jaxpipe plan`` predicts of ``config`` on ``target``."""
    from jaxpipe.planning.predict import predict
    from jaxpipe.planning.roofline import Efficiency
    from jaxpipe.planning.stages import stage_costs_of

    return predict(config, stage_costs_of(config, target, Efficiency(), lambda text: None), target.memory_bytes)


def planned_seconds(settings: Settings, target: Any, model: str, size: int, recompute: str) -> float:
    """Return the seconds of F, B and W of a middle block on one sequence, as ``jaxpipe plan`` predicts them."""
    from jaxpipe.train.config import load_config

    options = {
        "vocab_size": settings.vocab, "d_model": settings.hidden, "num_layers": 4,
        "num_heads": settings.hidden // settings.head, "tied": "false",
    }  # fmt: skip
    overrides = {
        "model.target": model,
        **{f"model.options.{name}": value for name, value in options.items()},
        "data.tokenizer": f"ids:{settings.vocab}",
        "data.path": "none.npy",
        "data.seq_len": settings.sequence,
        "pipeline.ranks": 2,
        "pipeline.chunks": 2,
        "pipeline.microbatches": 2,
        "pipeline.schedule": "po",
        "pipeline.recompute": recompute,
        "pipeline.cut": [2, 3, 4],
        "run.batch": 2 * size,
        "run.dtype": "bfloat16",
    }
    costs = prediction(load_config(None, [f"{name}={value}" for name, value in overrides.items()]), target).costs
    return sum(row[1] for row in (costs.f_s, costs.b_s, costs.w_s)) / size


def kendall(first: list[float], second: list[float]) -> float:
    """Return Kendall's rank correlation: 1 where both put all pairs in the same order, −1 where in the opposite one."""
    signs = [
        ((a > b) - (a < b)) * ((c > d) - (c < d)) for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2)
    ]
    return sum(signs) / len(signs)


@dataclass(frozen=True, slots=True)
class Layout:
    """A Llama over ``ranks`` × ``dp`` GPUs; a step of ``sequences`` sequences in all. ``recompute``: what 80 GB allow."""

    hidden: int
    blocks: int
    kv_heads: int
    mlp: int
    ranks: int
    dp: int
    recompute: str = "flash"
    sequences: int = 128
    sequence: int = 8192
    vocab: int = 128256

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of its pipeline."""
        return replace(settings, sizes={"": self.hidden}, sequence=self.sequence, vocab=self.vocab, ranks=self.ranks)


_LAYOUTS = {
    "Llama 8B, pp 8, dp 8": Layout(4096, 32, 8, 14336, ranks=8, dp=8),
    "Llama 70B, pp 16, dp 4": Layout(8192, 80, 8, 28672, ranks=16, dp=4, recompute="full"),
}
_TINY_LAYOUT = {"tiny": Layout(32, 2, 1, 64, ranks=2, dp=2, sequences=8, sequence=16, vocab=64)}
_PEER = {
    "what": "Megatron-Bridge 25.11, docs/performance-summary.md: Llama3 70B, 64 H100, TP 4, PP 8, VP 5, FP8, sequence 8192, "
    "128 sequences a step (published as 719 TFLOP/s, which counts half of the attention)",
    "tokens_per_s_per_gpu": 1602,
}


@experiment(
    "T18",
    version=1,
    question="what would 64 such GPUs do, composed of the kinds of ranks rehearsed on one?",
    backs="COMPASS 6",
    paths=_PLANNED_PATHS,
    estimate_s=180,
    predicted={
        "Llama 70B in bfloat16": "380-450 TFLOP/s a GPU; Megatron-Bridge's row in FP8 is 771 by the same formula"
    },
    want={},
)
def many_composed(settings: Settings) -> dict[str, Any]:
    """Rehearse the first, a middle and the last rank of each layout; simulate the whole step with their seconds and the links
    of the target, and add the reduction of gradients. A prediction; attention counts whole, three times, on both sides."""
    if (target := target_here()) is None:
        return cannot_ask("no target of plan describes this device")
    layouts = _TINY_LAYOUT if settings.tiny else _LAYOUTS
    rows = {name: _composed(settings, layout, target) for name, layout in layouts.items()}
    *_, of_same_model = rows.values()
    peer_rate = _PEER["tokens_per_s_per_gpu"] * of_same_model["flops_per_token"]
    return rows if settings.tiny else {"peer": {**_PEER, "flops_per_s_per_gpu": peer_rate}, **rows}


def _composed(settings: Settings, layout: Layout, target: Any) -> dict[str, Any]:
    from jaxpipe.cost.profile import StageSizes
    from jaxpipe.planning.predict import link_of, reduction_s
    from jaxpipe.planning.roofline import Efficiency
    from jaxpipe.rehearsal.rank import Rehearsal
    from jaxpipe.rehearsal.report import rehearsed_costs
    from jaxpipe.schedule import generate, simulate
    from jaxpipe.stage.jaxprs import PEERS
    from jaxpipe.stage.model.plan import analytic_layer_costs
    from jaxpipe.train.settings.sections import PipelineConfig

    pipe = pipeline(
        layout.settings(settings),
        layout.hidden,
        generate("zb-h1", layout.ranks, 1),
        model=LLAMA,
        recompute=layout.recompute,
        blocks_a_rank=layout.blocks // layout.ranks,
        num_kv_heads=layout.kv_heads,
        mlp_size=layout.mlp,
    )
    # One microbatch times all functions. An allocator's peak never falls: the rank that needs most comes last.
    kinds = [Rehearsal(pipe, rank) for rank in dict.fromkeys((0, layout.ranks // 2, layout.ranks - 1))]
    reports = [r.run(steps=settings.steps, complete=False) for r in sorted(kinds, key=lambda r: r.predicted_peak_bytes)]
    efficiency, ways = Efficiency(), PipelineConfig(ranks=layout.ranks, dp=layout.dp)
    # Ranks' neighbours in data parallelism share a node, so messages between ranks cross the network.
    costs = rehearsed_costs(pipe, reports, link=link_of(target, efficiency))
    microbatches = layout.sequences // layout.dp
    timeline = simulate(generate("zb-h1", layout.ranks, microbatches, costs=costs), costs)
    reduced_s = max(reduction_s(StageSizes.of(stage), target, efficiency, ways) for stage in pipe.stages)
    step_s = timeline.makespan + reduced_s
    flops_per_token = 3 * sum(analytic_layer_costs(pipe.model.stored, 1, attention=PEERS)) / layout.sequence
    tokens_per_s = layout.sequences * layout.sequence / step_s / (layout.ranks * layout.dp)
    return {
        "schedule": "zb-h1",
        "recompute": layout.recompute,
        "microbatches": microbatches,
        "rank_step_s": {str(r.rank): r.step.median_s for r in reports},
        "seconds": {f"{op}{stage}": t.median_s for r in reports for (op, stage), t in r.timings.items()},
        "measured_peak_bytes": {str(r.rank): r.memory.measured_bytes for r in reports},
        "predicted_peak_bytes": max(timeline.peak_bytes),
        "bubble": timeline.bubble_rate,
        "reduction_s": reduced_s,
        "step_s": step_s,
        "flops_per_token": flops_per_token,
        "tokens_per_s_per_gpu": tokens_per_s,
        "flops_per_s_per_gpu": tokens_per_s * flops_per_token,
    }
