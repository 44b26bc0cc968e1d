"""Compute the logits of mixtures of experts from folders of the hub, in NumPy and float64, tensor by tensor.

Written after the modelling code of transformers 5 (``models/mixtral``, ``olmoe``, ``qwen2_moe``, ``qwen3_moe``): nothing of
ours is used, and each expert sees every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.hub_folders import has_experts

Array = np.ndarray[Any, Any]


def logits(config: Mapping[str, Any], tensors: Mapping[str, Array], tokens: Array) -> Array:
    """Return logits [B, T, V] of ``tokens`` [B, T]."""
    weights = {name: array.astype(np.float64) for name, array in tensors.items()}
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        layer = {name.removeprefix(at): array for name, array in weights.items() if name.startswith(at)}
        x = x + _attention(config, layer, _norm(x, layer["input_layernorm.weight"], config))
        h = _norm(x, layer["post_attention_layernorm.weight"], config)
        x = x + (_mixture(config, layer, h) if has_experts(config, i) else _swiglu(h, *_three(layer, "mlp")))
    return _norm(x, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T


def _norm(x: Array, scale: Array, config: Mapping[str, Any]) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale


def _three(
    layer: Mapping[str, Array], at: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> list[Array]:
    return [layer[f"{at}.{name}.weight"] for name in names]


def _swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def _attention(config: Mapping[str, Any], layer: Mapping[str, Array], x: Array) -> Array:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    time = x.shape[1]

    def projected(name: str, count: int) -> Array:
        y = x @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", 0.0)
        scale = layer.get(f"self_attn.{name}_norm.weight")
        if scale is not None and scale.size == count * size:
            return _norm(y, scale, config).reshape(*y.shape[:2], count, size)
        y = y.reshape(*y.shape[:2], count, size)
        return y if scale is None else _norm(y, scale, config)

    def turned(y: Array) -> Array:
        angle = np.outer(np.arange(time), config["rope_theta"] ** (-np.arange(0, size, 2) / size))
        cos, sin = (f(np.concatenate([angle, angle], -1))[None, :, None] for f in (np.cos, np.sin))
        one, two = np.split(y, 2, -1)
        return y * cos + np.concatenate([-two, one], -1) * sin

    q, k, v = turned(projected("q", heads)), turned(projected("k", groups)), projected("v", groups)
    k, v = (np.repeat(y, heads // groups, axis=2) for y in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(size)
    scores = np.where(np.tril(np.ones((time, time), bool)), scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    joined = np.einsum("bhts,bshk->bthk", probs, v).reshape(*x.shape[:2], -1)
    return joined @ layer["self_attn.o_proj.weight"].T + layer.get("self_attn.o_proj.bias", 0.0)


def _mixture(config: Mapping[str, Any], layer: Mapping[str, Array], x: Array) -> Array:
    is_mixtral, chosen_count = config["model_type"] == "mixtral", config["num_experts_per_tok"]
    at = "block_sparse_moe" if is_mixtral else "mlp"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    scores = x @ layer[f"{at}.gate.weight"].T
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    chosen = np.argsort(-probs, axis=-1, kind="stable")[..., :chosen_count]
    shares = np.zeros_like(probs)
    np.put_along_axis(shares, chosen, np.take_along_axis(probs, chosen, -1), -1)
    if config.get("norm_topk_prob", is_mixtral):
        shares /= shares.sum(-1, keepdims=True)
    y = sum(
        shares[..., e, None] * _swiglu(x, *_three(layer, f"{at}.experts.{e}", names)) for e in range(probs.shape[-1])
    )
    if "mlp.shared_expert_gate.weight" in layer:
        gate = 1 / (1 + np.exp(-(x @ layer["mlp.shared_expert_gate.weight"].T)))
        y = y + gate * _swiglu(x, *_three(layer, "mlp.shared_expert"))
    return np.asarray(y)
