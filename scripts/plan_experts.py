"""Sizes and exchanges of three mixtures of experts, counted by hand, by ``jaxpipe plan``, and as published and recorded.

python scripts/plan_experts.py            # tables on stdout (about a minute of tracing)
python scripts/plan_experts.py --write    # into scripts/results/plan-experts.json, too

The count by hand is from what each model's paper or ``config.json`` says; it shares no code with ``jaxpipe``, whose plans of
the files in ``scripts/plans/`` are checked against it. DeepSeek-V3's latent attention (MLA), which no model here has, is
counted by hand; its plan file has grouped queries of as many parameters in its place. Its layer for the prediction of a second
token is left out, as the published 671 billion do.

Each token of a layer is sent to ``top_k`` experts and comes back (dispatch, combine), F and B alike. Of what a device sends,
the part for devices of its node goes over NVLink, at the same time the rest over the network; a link moves 80% of what its data
sheet says, products run at half the peak of an H100.

Recorded runs (the exchanges in a step are those that are not hidden; compute is what is left of a step):

* (a) NVIDIA-NeMo/Megatron-Bridge, docs/training/communication-overlap.md, 2026-05-18: Qwen3-30B-A3B, 16 H100s in two nodes,
  EP 16, no pipeline, 64 microbatches of one sequence of 4096 a GPU (the recipe ``qwen3_30b_a3b``, H100, BF16, v1), routing
  balanced by force, without CUDA graphs and fused permutation: seconds of a step without and with hidden exchanges. ``plan``'s
  are those of ``1f1b`` and of ``combined-1f1b``, which hides what it can at no cost to the products beside.
* (b) pytorch/torchtitan issue 3434, 2026-06: the 16B model of its ``deepseek_v3``, 64 experts, 6 a token, 26 layers of them, on
  2 and 4 nodes of 8 H100s with RoCE, EP 16 and 32, four sequences of 4096 a GPU (the config's default; it fits the printed
  tokens/s and spans): seconds of the exchanges in a step, with balanced routing and with that of the real router. Their
  ratio is the imbalance to plan with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxpipe.planning.predict import Prediction, predict  # noqa: E402
from jaxpipe.planning.roofline import Efficiency  # noqa: E402
from jaxpipe.planning.stages import stage_costs_of  # noqa: E402
from jaxpipe.planning.targets import TARGETS  # noqa: E402
from jaxpipe.train.config import load_config  # noqa: E402
from scripts.provenance import commit_id  # noqa: E402
from scripts.results_table import experts_table  # noqa: E402

RESULT = ROOT / "scripts" / "results" / "plan-experts.json"
PEAK_FLOPS_PER_S, PRODUCTS = 989e12, 0.5
NVLINK_BYTES_PER_S, NETWORK_BYTES_PER_S, LINKS, NODE = 450e9, 50e9, 0.8, 8
TOKENS, ITEM_BYTES = 4096, 2
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention without biases. ``normed``: RMSNorm of queries and keys, a head at a time."""

    heads: int
    kv_heads: int
    head_dim: int
    normed: bool = False

    def parameters(self, d_model: int) -> int:
        projections = d_model * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return projections + 2 * self.head_dim * self.normed

    @property
    def score_size(self) -> int:
        """Numbers that a pair of positions multiplies: queries by keys, probabilities by values."""
        return 2 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's MLA: queries through ``query_rank`` numbers, keys and values through ``kv_rank``; of a head's query and key
    ``rotary`` numbers are rotated and ``plain`` not, and all heads share the rotated part of the key."""

    heads: int
    query_rank: int
    kv_rank: int
    rotary: int
    plain: int
    value: int

    def parameters(self, d_model: int) -> int:
        queries = d_model * self.query_rank + self.query_rank * self.heads * (self.plain + self.rotary)
        keys = d_model * (self.kv_rank + self.rotary) + self.kv_rank * self.heads * (self.plain + self.value)
        norms = self.query_rank + self.kv_rank
        return queries + keys + norms + self.heads * self.value * d_model

    @property
    def score_size(self) -> int:
        return self.heads * (self.plain + self.rotary + self.value)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes of a decoder with experts: untied words, RMSNorms, SwiGLU MLPs of three matrices. The first ``dense_layers``
    have an MLP of ``dense_size``; the others ``num_experts`` of ``expert_size``, of which a token gets ``top_k``, and a shared
    one of ``shared_size``. ``choice_bias``: of each expert, for choosing alone."""

    d_model: int
    num_layers: int
    attention: Attention | LatentAttention
    expert_size: int
    num_experts: int
    top_k: int
    vocab_size: int
    shared_size: int = 0
    dense_layers: int = 0
    dense_size: int = 0
    choice_bias: bool = False

    def mlp(self, size: int) -> int:
        return 3 * self.d_model * size

    def layer_parameters(self, experts: int) -> int:
        """Parameters of a layer with experts, of which ``experts`` count."""
        router = self.num_experts * (self.d_model + self.choice_bias)
        return self._beside_mlp + router + self.mlp(self.shared_size) + experts * self.mlp(self.expert_size)

    @property
    def _beside_mlp(self) -> int:
        return self.attention.parameters(self.d_model) + 2 * self.d_model

    def parameters(self, experts: int) -> int:
        """Parameters of the model, of which ``experts`` of each layer count: all, or those that a token gets."""
        dense = self.dense_layers * (self._beside_mlp + self.mlp(self.dense_size))
        words = 2 * self.vocab_size * self.d_model + self.d_model
        return dense + (self.num_layers - self.dense_layers) * self.layer_parameters(experts) + words

    def forward_s(self, tokens: int = TOKENS, sequence: int = TOKENS) -> float:
        """Seconds of the products of a layer's F: scores of half of all pairs, as a causal mask leaves."""
        flops = 2 * self.layer_parameters(self.top_k) + 2 * self.attention.score_size * sequence / 2
        return tokens * flops / (PRODUCTS * PEAK_FLOPS_PER_S)

    def worst_rows(self, ep: int, tokens: int = TOKENS) -> int:
        """Rows that a device receives if all tokens of all devices want as many of its experts as they may."""
        return ep * tokens * min(self.top_k, self.num_experts // ep)


def exchange_s(d_model: int, copies: int, ep: int, tokens: int = TOKENS) -> float:
    """Seconds in which each of ``ep`` devices sends ``copies`` of each of its tokens, evenly to all of them."""
    sent_bytes, inside = tokens * copies * d_model * ITEM_BYTES, min(ep, NODE)
    return max(
        sent_bytes * (inside - 1) / ep / (NVLINK_BYTES_PER_S * LINKS),
        sent_bytes * (ep - inside) / ep / (NETWORK_BYTES_PER_S * LINKS),
    )


MODELS: Mapping[str, Mixture] = {
    "mixtral-8x7b": Mixture(4096, 32, Attention(32, 8, 128), 14336, 8, 2, 32000),
    "qwen3-30b-a3b": Mixture(2048, 48, Attention(32, 4, 128, normed=True), 768, 128, 8, 151936),
    "deepseek-v3": Mixture(
        7168, 61, LatentAttention(128, 1536, 512, 64, 128, 128), 2048, 256, 8, 129280,
        shared_size=2048, dense_layers=3, dense_size=18432, choice_bias=True,
    ),
}  # fmt: skip
PUBLISHED_B: Mapping[str, tuple[float, float]] = {
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.35),
    "deepseek-v3": (671, 37.6),
}
"""Billions of parameters: all, and those that a token meets, words included. Qwen prints 3.3 of the latter and DeepSeek 37."""
TITAN_16B = {"d_model": 2048, "top_k": 6, "layers": 26, "tokens": 4 * 4096}


def sizes() -> list[Row]:
    """Return parameters of each model beside those published, and exchanges of a layer and microbatch of 4096 tokens."""
    rows = []
    for name, model in MODELS.items():
        total_b, active_b = (model.parameters(n) / 1e9 for n in (model.num_experts, model.top_k))
        published_b, published_active_b = PUBLISHED_B[name]
        both_ways_s = 2 * exchange_s(model.d_model, model.top_k, 8)
        rows.append(
            {
                "model": name,
                "parameters": model.parameters(model.num_experts),
                "active_parameters": model.parameters(model.top_k),
                "ratio": round(total_b / published_b, 5),
                "active_ratio": round(active_b / published_active_b, 5),
                "expert_parameters": model.mlp(model.expert_size),
                "forward_ms": round(1e3 * model.forward_s(), 3),
                "exchange_ms": round(1e3 * both_ways_s, 3),
                "exchange_share": round(both_ways_s / model.forward_s(), 3),
                "mean_rows": TOKENS * model.top_k,
                "worst_rows": {str(ep): model.worst_rows(ep) for ep in (8, 64) if model.num_experts % ep == 0},
            }
        )
    return rows


def planned(name: str, *overrides: str) -> Prediction:
    """Predict a plan file on H100s, without compiling."""
    config, h100 = load_config(ROOT / "scripts" / "plans" / f"{name}.toml", overrides), TARGETS["h100"]
    return predict(config, stage_costs_of(config, h100, Efficiency(), lambda text: None), h100.memory_bytes)


EP_8 = (
    "pipeline.ranks=1", "pipeline.dp=8", "pipeline.ep=8", "pipeline.microbatches=1", "run.batch=8", "pipeline.schedule=1f1b",
    "pipeline.recompute=flash", "model.options.capacity=1.0",
)  # fmt: skip
"""A microbatch of 4096 tokens a device, experts over the devices of one node; B exchanges as much as F."""
RECORDED = ("pipeline.recompute=flash", "model.options.capacity=1.0")


def plans() -> list[Row]:
    """Return what ``jaxpipe plan`` says of each file; exchanges of a layer are those of F."""
    rows = []
    for name, model in MODELS.items():
        p, in_node = planned(name), planned(name, *EP_8)
        assert p.experts is not None
        exchange_ms = 1e3 * sum(in_node.costs.f_comm_s) / (model.num_layers - model.dense_layers)
        rows.append(
            {
                "model": name, "parameters": p.num_params, "active_parameters": p.active_params,
                "exchange_ms": round(exchange_ms, 3), "devices": p.devices, "schedule": p.schedule.name,
                "step_s": round(p.step_s, 2), "mfu": round(p.mfu, 3), "peak_gb": round(p.worst.peak_bytes / 1e9, 1),
                "worst_rows": round(p.experts.worst), "worst_gb": round(p.experts.worst * p.experts.row_bytes / 1e9, 2),
            }
        )  # fmt: skip
    return rows


def planned_run() -> Row:
    """Return the recorded run (a) as ``plan`` predicts it."""
    plain, hiding = (planned("qwen3-30b-a3b", *RECORDED, f"pipeline.schedule={x}") for x in ("1f1b", "combined-1f1b"))
    steps = {"plan_step_s": plain.step_s, "plan_step_with_hiding_s": hiding.step_s}
    return {key: round(x, 2) for key, x in steps.items()}


def recorded() -> list[Row]:
    """Return recorded runs, and what the same arithmetic gives for them."""
    qwen, microbatches = MODELS["qwen3-30b-a3b"], 64
    layers = qwen.num_layers * microbatches
    exchanged_s = 4 * layers * exchange_s(qwen.d_model, qwen.top_k, 16)
    words_s = microbatches * TOKENS * 2 * qwen.vocab_size * qwen.d_model / (PRODUCTS * PEAK_FLOPS_PER_S)
    compute_s = 3 * (layers * qwen.forward_s() + words_s)
    step_s, hidden_step_s = 41.25, 31.31
    rows: list[Row] = [
        {
            "source": "a", "run": "Qwen3-30B-A3B, 16 H100, EP 16", "step_s": step_s, "step_with_hiding_s": hidden_step_s,
            "exchange_s": round(exchanged_s, 2), "compute_s_at_half_peak": round(compute_s, 2),
            "rest_of_step_s": round(step_s - exchanged_s, 2),
            "hidden_share": round((step_s - hidden_step_s) / exchanged_s, 3),
        }
    ]  # fmt: skip
    titan = TITAN_16B
    for ep, balanced_ms, real_ms in ((16, 477.6, 982.2), (32, 773.8, 3139.8)):
        one_s = exchange_s(titan["d_model"], titan["top_k"], ep, titan["tokens"])
        ours_ms = 1e3 * 4 * titan["layers"] * one_s
        rows.append(
            {
                "source": "b", "run": f"torchtitan deepseek_v3 16B, EP {ep}", "balanced_ms": balanced_ms, "real_ms": real_ms,
                "ours_ms": round(ours_ms, 1), "ratio": round(ours_ms / balanced_ms, 3),
                "imbalance": round(real_ms / balanced_ms, 2),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    document = {
        "command": "python scripts/plan_experts.py --write",
        "commit": commit_id(),
        "sizes": sizes(),
        "plans": plans(),
        "recorded": recorded(),
        "planned_run": planned_run(),
    }
    if arguments.write:
        RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(experts_table(document)))


if __name__ == "__main__":
    main()
