"""`jaxpipe plan`'s step times beside public measurements of other systems on H100s, with no GPU present.

python scripts/plan_public.py            # a table on stdout, progress on stderr
python scripts/plan_public.py --write    # into scripts/results/plan-public.json, too

Rows are ``public_measurements.csv``: what a system published, a GPU's tokens/s or TFLOP/s (attention counted whole). One number
a system is fitted, the part of the H100's bfloat16 peak that products reach, on the row whose note begins with ``calibration``;
the other rows of the system are predicted with it. Per system, over all rows and over those of pipelines (pp > 1) of whole
sequences: the median of |predicted ÷ measured − 1| of what is held out, and Spearman's rank correlation of TFLOP/s (tokens/s of
different models would only rank the models by their size).

Sources: (a) NVIDIA/NeMo, docs/source/performance/performance_summary.md, commit 070a0bb; (b) NVIDIA-NeMo/Megatron-Bridge,
docs/performance-summary.md, commit 00b7660; (c) pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, commit 31a17bf
(96 GB cards of 2.4 TB/s at 500 W); (d) huggingface.co/nanotron/old_bench, metrics of each run, 2024-07, read second-hand.

What the comparison assumes: (a), (b), (c) multiply in FP8, of which plan knows nothing: the fitted part takes it in, for
attention too, which runs in bfloat16 there. Divided sequences (cp) exchange heads where key/value heads divide, else gather
keys and values, for which there is no fused kernel here. Recomputation, where not printed, is that of attention alone
(``flash``). Sharded parameters (c, and the 8B row of b) are ZeRO-1 here. Gradients of a stage are summed behind its last W,
between compute, where these systems sum them under the backward pass: rows with dp over many nodes and few microbatches come
out too slow. Kernels start in 3 µs, where eager PyTorch needs more: small ones of (d) come out too fast. Nemotron's activation
is GPT's. Left out: Nemotron-340B (grouped queries with an MLP without a gate) and mixtures of experts, which no model here is;
runs of 128 GPUs that shard over the network alone. (d) prints no sizes: those of TinyLlama are taken, so only its order says
something.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxpipe.planning.predict import Prediction, predict  # noqa: E402
from jaxpipe.planning.roofline import Efficiency  # noqa: E402
from jaxpipe.planning.stages import stage_costs_of  # noqa: E402
from jaxpipe.planning.targets import TARGETS, Target  # noqa: E402
from jaxpipe.train.config import TrainConfig  # noqa: E402
from scripts.provenance import commit_id  # noqa: E402
from scripts.results_table import public_table  # noqa: E402

TABLE = ROOT / "scripts" / "public_measurements.csv"
RESULT = ROOT / "scripts" / "results" / "plan-public.json"
Row = dict[str, Any]


def _gpt(d_model: int, num_layers: int, vocab_size: int) -> tuple[str, dict[str, Any]]:
    sizes = {"d_model": d_model, "num_layers": num_layers, "num_heads": d_model // 128, "vocab_size": vocab_size}
    return "models.gpt:GPT", {**sizes, "tied": False, "attention": "cudnn"}


def _llama(
    d_model: int, num_layers: int, mlp_size: int, vocab_size: int, kv_heads: int | None = None, heads: int | None = None
) -> tuple[str, dict[str, Any]]:
    sizes = {"d_model": d_model, "num_layers": num_layers, "num_heads": heads or d_model // 128, "mlp_size": mlp_size}
    return "models.llama:Llama", {
        **sizes,
        "num_kv_heads": kv_heads or sizes["num_heads"],
        "vocab_size": vocab_size,
        "attention": "auto",
    }


MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt3-5b": _gpt(4096, 24, 51200),
    "gpt3-20b": _gpt(6144, 44, 51200),
    "gpt3-175b": _gpt(12288, 96, 51200),
    "nemotron-8b": _gpt(4096, 32, 256000),
    "nemotron-22b": _gpt(6144, 40, 256000),
    "llama2-7b": _llama(4096, 32, 11008, 32000),
    "llama2-13b": _llama(5120, 40, 13824, 32000),
    "llama2-70b": _llama(8192, 80, 28672, 32000, 8),
    "llama3-8b": _llama(4096, 32, 14336, 128256, 8),
    "llama3-70b": _llama(8192, 80, 28672, 128256, 8),
    "llama3-405b": _llama(16384, 126, 53248, 128256, 8),
    "llama-1b": _llama(2048, 22, 5632, 32000, 4, 32),
}


def read_table() -> list[Row]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [{k: int(v) if v.isdigit() else v for k, v in row.items()} for row in csv.DictReader(file)]


def config_of(row: Row) -> TrainConfig:
    """Return the run of a row. Blocks are divided evenly over the stages, the first ones take what is left over."""
    target, options = MODELS[row["model"]]
    layers, stages = options["num_layers"], row["pp"] * row["vp"]
    blocks = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    cut = [1 + sum(blocks[:stage]) for stage in range(1, stages)]
    kv_heads = options.get("num_kv_heads", options["num_heads"])
    cp_method = "gather" if kv_heads % (row["tp"] * row["cp"]) else "heads"
    return TrainConfig.from_dict(
        {
            "model": {"target": target, "options": options},
            "data": {"path": "none.npy", "tokenizer": f"ids:{options['vocab_size']}", "seq_len": row["seq"]},
            "pipeline": {
                "ranks": row["pp"],
                **{axis: row[axis] for axis in ("dp", "tp", "cp")},
                "chunks": row["vp"],
                "microbatches": row["gbs"] // (row["dp"] * row["mbs"]),
                "schedule": "1f1b" if row["vp"] == 1 else "interleaved-1f1b",
                "recompute": row["recompute"],
                "cut": cut or "analytic",
                "sharding": {"sequence_parallel": row["tp"] > 1, "zero1": row["dp"] > 1, "cp_method": cp_method},
            },
            "run": {"batch": row["gbs"], "dtype": "bfloat16"},
        }
    )


def card_of(row: Row) -> Target:
    h100 = TARGETS["h100"]
    return replace(h100, memory_bytes=103e9, memory_bytes_per_s=2.4e12) if row["source"] == "c" else h100


def predicted(row: Row, matmul: float) -> dict[str, float]:
    """Return tokens/s and TFLOP/s of a GPU by plan, where products reach ``matmul`` of the peak."""
    config = config_of(row)
    costs = stage_costs_of(config, card_of(row), Efficiency(matmul=matmul), lambda text: None)
    prediction: Prediction = predict(config, costs, costs.target.memory_bytes)
    tflops = prediction.peers_flops / (prediction.step_s * prediction.devices * 1e12)
    return {"tokens/s": prediction.tokens_per_s_per_device, "TFLOP/s": tflops}


def fitted(row: Row) -> float:
    """Return the part of the peak with which the prediction is the measurement, within 0.1%."""
    low, high = 0.05, 4.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(row, middle)[row["unit"]] < row["measured"] else (low, middle)
    return (low * high) ** 0.5


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < w for v in values) + (sum(v == w for v in values) + 1) / 2 for w in values]

    return statistics.correlation(ranks(x), ranks(y))


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a system's rows with predictions, and what the held-out ones say."""
    (calibration,) = (row for row in rows if row["note"].startswith("calibration"))
    matmul = fitted(calibration)
    for row in rows:
        prediction = predicted(row, matmul)
        row["predicted"] = round(prediction[row["unit"]], 1)
        row["ratio"] = round(row["predicted"] / row["measured"], 3)
        row["predicted_tflops"] = round(prediction["TFLOP/s"], 1)
        print(f"{row['system']} {row['model']} {row['ratio']}", file=sys.stderr, flush=True)
    pipelines = [row for row in rows if row["pp"] > 1 and row["cp"] == 1]
    return {
        "system": calibration["system"],
        "part_of_bfloat16_peak": round(matmul, 3),
        "all": _summary(rows, calibration),
        "pipelines": _summary(pipelines, calibration),
        "rows": list(rows),
    }


def _summary(rows: Sequence[Row], calibration: Row) -> dict[str, Any] | None:
    """Return what held-out rows say; None where there are none."""
    errors = [abs(row["ratio"] - 1) for row in rows if row is not calibration]
    if not errors:
        return None
    tflops = [row["predicted_tflops"] for row in rows]
    correlation = rank_correlation([x / row["ratio"] for x, row in zip(tflops, rows, strict=True)], tflops)
    figures = {"median_error": statistics.median(errors), "largest_error": max(errors), "rank_correlation": correlation}
    return {"held_out_rows": len(errors), **{name: round(value, 3) for name, value in figures.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--system", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    start, rows = time.monotonic(), read_table()
    names = list(dict.fromkeys(row["system"] for row in rows))
    systems = [compare([r for r in rows if r["system"] == name]) for name in arguments.system or names]
    document = {
        "command": "python scripts/plan_public.py --write",
        "commit": commit_id(),
        "seconds": round(time.monotonic() - start, 1),
        "systems": systems,
    }
    if arguments.write:
        RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(public_table(document)))


if __name__ == "__main__":
    main()
