"""Tiny folders of the Hugging Face hub for tests, made without transformers: random tensors under the names that it gives them.

The logits of ``golden/hub_logits.json`` are of transformers, for these folders (``scripts/hub_golden.py`` wrote them)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

V, D, H, L, F = 37, 32, 4, 3, 48
BOTH: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": V,
        "n_embd": D,
        "n_layer": 2,
        "n_head": H,
        "n_positions": 24,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "llama2": {**BOTH, "model_type": "llama", "num_key_value_heads": H},
    "llama31": {**BOTH, "model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama32": {**BOTH, "model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-biases": {
        **BOTH,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "qwen2": {**BOTH, "model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": {**BOTH, "model_type": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-6, "use_sliding_window": False},
    "qwen3-yarn": {**BOTH, "model_type": "qwen3", "head_dim": 16, "use_sliding_window": False, "rope_scaling": YARN},
    "mistral": {**BOTH, "model_type": "mistral", "sliding_window": 7},
    "mistral-nemo": {**BOTH, "model_type": "mistral", "head_dim": 12, "sliding_window": None},
    "smollm2": {**BOTH, "model_type": "llama", "rope_theta": 100000.0, "tie_word_embeddings": True},
    "smollm3": {
        **BOTH,
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "use_sliding_window": False,
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**BOTH, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**BOTH, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "qwen2-moe": {
        **BOTH,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": False,
    },
    "qwen3-moe": {
        **BOTH,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "qwen3-moe-dense": {
        **BOTH,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
}
"""Mixtures of experts: transformers' logits are in no golden file, ``tests/support/hub_experts.py`` computes them."""
TOKENS = np.random.default_rng(1).integers(0, V, (2, 24)).astype(np.int32)


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes as transformers saves them."""
    if config["model_type"] == "gpt2":
        d, shape_of = config["n_embd"], {"wte.weight": (config["vocab_size"], config["n_embd"])}
        shape_of["wpe.weight"] = (config["n_positions"], d)
        for i in range(config["n_layer"]):
            for name, shape in {
                "ln_1.weight": (d,),
                "ln_1.bias": (d,),
                "attn.c_attn.weight": (d, 3 * d),
                "attn.c_attn.bias": (3 * d,),
                "attn.c_proj.weight": (d, d),
                "attn.c_proj.bias": (d,),
                "ln_2.weight": (d,),
                "ln_2.bias": (d,),
                "mlp.c_fc.weight": (d, 4 * d),
                "mlp.c_fc.bias": (4 * d,),
                "mlp.c_proj.weight": (4 * d, d),
                "mlp.c_proj.bias": (d,),
            }.items():
                shape_of[f"h.{i}.{name}"] = shape
        return {f"transformer.{name}": s for name, s in {**shape_of, "ln_f.weight": (d,), "ln_f.bias": (d,)}.items()}
    kind, d, f = config["model_type"], config["hidden_size"], config["intermediate_size"]
    k = config.get("head_dim") or d // config["num_attention_heads"]
    q, g = config["num_attention_heads"] * k, config["num_key_value_heads"] * k
    bias = config.get("attention_bias", False)
    llama: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, (rows, columns) in {"q": (q, d), "k": (g, d), "v": (g, d), "o": (d, q)}.items():
            llama[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
            if bias or (kind in ("qwen2", "qwen2_moe") and name != "o"):
                llama[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        if has_experts(config, i):
            llama |= {f"{at}{name}": shape for name, shape in _experts(config).items()}
        else:
            # The order of names is that in which the golden logits' numbers were drawn.
            for name, shape in _swiglu(f"{at}mlp", d, f).items():
                llama[name] = shape
                if config.get("mlp_bias"):
                    llama[name.replace("weight", "bias")] = shape[:1]
        if kind in ("qwen3", "qwen3_moe"):
            llama |= {f"{at}self_attn.{name}_norm.weight": (k,) for name in "qk"}
        if kind == "olmoe":
            llama |= {f"{at}self_attn.q_norm.weight": (q,), f"{at}self_attn.k_norm.weight": (g,)}
        llama |= {f"{at}{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
    llama["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        llama["lm_head.weight"] = (config["vocab_size"], d)
    return llama


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer of this number has experts."""
    if config["model_type"] not in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"):
        return False
    return layer not in config.get("mlp_only_layers", ()) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _experts(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    kind, d, shared = config["model_type"], config["hidden_size"], config.get("shared_expert_intermediate_size")
    count = config.get("num_local_experts", config.get("num_experts"))
    assert count is not None
    at, f = (
        "block_sparse_moe" if kind == "mixtral" else "mlp",
        config.get("moe_intermediate_size", config["intermediate_size"]),
    )
    names: dict[str, tuple[int, ...]] = {f"{at}.gate.weight": (count, d)}
    for e in range(count):
        if kind == "mixtral":
            names |= {f"{at}.experts.{e}.{w}.weight": (d, f) if w == "w2" else (f, d) for w in ("w1", "w2", "w3")}
        else:
            names |= _swiglu(f"{at}.experts.{e}", d, f)
    if shared is not None:
        names |= {**_swiglu(f"{at}.shared_expert", d, shared), f"{at}.shared_expert_gate.weight": (1, d)}
    return names


def _swiglu(at: str, d: int, f: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.{name}_proj.weight": (d, f) if name == "down" else (f, d) for name in ("gate", "up", "down")}


def tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 numbers: matrices N(0, 0.2), norms around 1, biases around 0; all bfloat16 numbers, too."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes(config).items():
        array = rng.normal(0, 0.2 if len(shape) > 1 else 0.3, shape)
        array += len(shape) == 1 and name.endswith("weight")
        arrays[name] = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    return arrays


def write_folder(folder: Path, kind: str, *, shards: int = 1, dtype: Any = np.float32, **changes: Any) -> Path:
    """Write a folder of a kind of :data:`KINDS` or :data:`EXPERTS`, its config with ``changes`` (None: without the key)."""
    folder.mkdir(parents=True)
    standard = (KINDS | EXPERTS)[kind]
    config = {key: value for key, value in {**standard, **changes}.items() if value is not None or key.endswith("_id")}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: array.astype(dtype) for name, array in tensors(standard).items()}
    if shards == 1:
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, size = list(arrays), math.ceil(len(arrays) / shards)
    places = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: arrays[name] for name in names[n * size : (n + 1) * size]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
