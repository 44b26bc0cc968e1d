"""Tabulate what each recompute policy saves and costs on one layer of real size: the table of jaxpipe/stage/GUIDE.md.

    python scripts/policy_table.py [--hidden 4096 --seq 4096 --dropout 0.1]

Traced only: nothing is compiled or run, no device of that size is needed. Bytes are per token and channel ("bsh", the unit of
the papers), in bfloat16, microbatch 1; FLOPs count elementwise work (jaxpipe/stage/jaxprs.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from jax.sharding import AbstractDevice

from jaxpipe._jax_compat import cudnn_assumed
from jaxpipe.axes import ONE_SHARD
from jaxpipe.mesh import mesh_over_none
from jaxpipe.stage.compiled.recompute_report import PolicyCost, compare_policies
from jaxpipe.stage.model.layer import Model
from models.gpt import GPT
from models.llama import Llama


def layer_costs(model: Model) -> Mapping[str, PolicyCost]:
    """Costs by policy of the model's first block on a GPU, microbatch 1."""
    stages = [model.layers[:1], model.layers[1:2], model.layers[2:]]
    params = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    mesh = mesh_over_none(ONE_SHARD, AbstractDevice("h100", None, "gpu"))
    with cudnn_assumed():
        _, middle, _ = compare_policies(stages, params, model.batch_spec(1), [mesh] * 3)
    return {c.policy: c for c in middle}


def table(hidden: int = 4096, seq: int = 4096, dropout: float = 0.1) -> str:
    """Markdown: for each layer and policy, bsh from F to B, bsh from B to W, and percent of FLOPs added."""
    common = {"vocab_size": 64, "d_model": hidden, "num_heads": max(1, hidden // 128), "seq_len": seq, "num_layers": 1}
    common |= {"dtype": "bfloat16", "attention": "xla"}
    layers = {
        "GPT": layer_costs(GPT(**common)),
        f"GPT, dropout {dropout:g}": layer_costs(GPT(**common, dropout=dropout)),
        "GPT, cuDNN": layer_costs(GPT(**common | {"attention": "cudnn"})),
        "Llama": layer_costs(Llama(**common)),
        "Llama, cuDNN": layer_costs(Llama(**common | {"attention": "cudnn"})),
    }
    unit = hidden * seq
    policies = layers["GPT"]
    lines = [f"| layer | {' | '.join(f'`{policy}`' for policy in policies)} |", "|---|" + "---|" * len(policies)]
    for name, costs in layers.items():
        cells = [
            f"{c.residual_bytes / unit:.3g} · {c.w_residual_bytes / unit:.3g} · {100 * c.added_fraction:.3g}"
            for c in costs.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    print(table(args.hidden, args.seq, args.dropout))


if __name__ == "__main__":
    main()
