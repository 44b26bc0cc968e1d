"""Variants of ``config.json``: each key that matters with the values that files of the hub have, absent and null among them.

``golden/hub_configs.json.gz`` says what transformers makes of them (``scripts/hub_configs.py`` wrote it, with these functions).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = "<absent>"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LAYERS = 4
FULL, SLIDING = "full_attention", "sliding_attention"

_SHARED: Mapping[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
BASES: Mapping[str, Mapping[str, Any]] = {
    **{kind: {"model_type": kind, **_SHARED} for kind in ("llama", "mistral", "qwen2", "smollm3")},
    "qwen3": {"model_type": "qwen3", **_SHARED, "head_dim": 16},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 37,
        "n_embd": 32,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 24,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
}

_TABLES = (
    ABSENT, None, {}, {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 500000.0}, {"rope_theta": 500000}, YARN, {**YARN, "rope_theta": 10000.0},
    {**YARN, "rope_theta": 500000.0}, {**YARN, "factor": 2.0}, {**YARN, "original_max_position_embeddings": 16.0},
    {**YARN, "attention_factor": 1.0, "beta_fast": 16, "beta_slow": 2.0}, {**YARN, "beta_fast": None},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, {**YARN, "truncate": False}, {**YARN, "truncate": True},
    {**YARN, "partial_rotary_factor": 0.5}, {**YARN, "partial_rotary_factor": 1.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn"},
    {"rope_type": "linear", "factor": 4}, {"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0},
    {"type": "linear", "rope_type": "yarn", "factor": 2.0}, {"rope_type": "linear"}, LLAMA3,
    {**LLAMA3, "original_max_position_embeddings": 16}, {"rope_type": "llama3", "factor": 8.0}, {"rope_type": None},
    {"rope_type": "longrope", "factor": 2.0}, {FULL: YARN, SLIDING: YARN},
)  # fmt: skip
_LLAMAS: Mapping[str, tuple[Any, ...]] = {
    "vocab_size": (ABSENT, None, 37.0, 37.5, "37", True, 0),
    "hidden_size": (ABSENT, 32.0, 36, 30, 33, None),
    "intermediate_size": (ABSENT, 48.0, None),
    "num_hidden_layers": (ABSENT, 6, 4.0, 30),
    "num_attention_heads": (ABSENT, 8, 3, 4.0),
    "num_key_value_heads": (ABSENT, None, 1, 3, 2.0, 4),
    "head_dim": (ABSENT, None, 8, 16, 16.0, 7, 128),
    "hidden_act": (ABSENT, "gelu", "swish", None),
    "max_position_embeddings": (ABSENT, 64.0, 32),
    "rms_norm_eps": (ABSENT, 1e-6, 1, None, "1e-5"),
    "tie_word_embeddings": (ABSENT, True, None, 1),
    "rope_theta": (ABSENT, 500000.0, 1000000, None),
    "rope_scaling": _TABLES,
    "rope_parameters": _TABLES,
    "partial_rotary_factor": (1, 1.0, 0.5, None),
    "original_max_position_embeddings": (16, 32, None),
    "attention_bias": (True, False, None),
    "mlp_bias": (True, False, None),
    "sliding_window": (ABSENT, None, 7, 7.0, 4096),
    "use_sliding_window": (ABSENT, True, True, False),
    "max_window_layers": (ABSENT, 0, 1, 4, 28),
    "layer_types": (ABSENT, None, [FULL] * LAYERS, [SLIDING] * LAYERS, [FULL, SLIDING] * 2, [FULL]),
    "no_rope_layers": (ABSENT, None, [1] * LAYERS, [0] * LAYERS, [1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 1, 0, 1, 1]),
    "no_rope_layer_interval": (ABSENT, 1, 2, 4, 9),
}
_GPT2: Mapping[str, tuple[Any, ...]] = {
    "vocab_size": (ABSENT, 37.0, None),
    "n_embd": (ABSENT, 32.0, 30, None),
    "n_layer": (ABSENT, 2),
    "n_head": (ABSENT, 8, 5),
    "n_inner": (None, 128, 128.0, 64, 100),
    "n_positions": (ABSENT, 24.0),
    "activation_function": (ABSENT, "gelu", "gelu_pytorch_tanh", "relu", None),
    "layer_norm_epsilon": (ABSENT, 1e-6, 1),
    "tie_word_embeddings": (ABSENT, True, False),
    "scale_attn_weights": (True, False, None),
    "scale_attn_by_inverse_layer_idx": (True, False),
    "reorder_and_upcast_attn": (True, False),
    "add_cross_attention": (True, False),
    "hidden_size": (32, 64),
    "max_position_embeddings": (24, 48),
    "num_hidden_layers": (2, LAYERS),
}


def single_variants() -> Iterator[dict[str, Any]]:
    """Yield each value of each key, alone, and the two tables of rope that users add to one another."""
    for kind in BASES:
        for key, values in _values(kind).items():
            for value in values:
                yield _changed(kind, {key: value})
    for kind in ("llama", "qwen2", "qwen3", "mistral"):
        yield _changed(kind, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": YARN})
    for kind in ("qwen2", "qwen3", "smollm3"):
        for window in _LLAMAS["sliding_window"]:
            yield _changed(kind, {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0})


def random_variants(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield two to four keys at a time; those that have to do with each other more often."""
    rng = random.Random(seed)
    rope = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    )
    window = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "num_hidden_layers")
    for _ in range(count):
        kind = rng.choice(sorted(BASES))
        values = _values(kind)
        pool = rng.choice(([*values], [*rope], [*window, "no_rope_layers", "no_rope_layer_interval"]))
        pool = [*values] if kind == "gpt2" else pool
        keys = rng.sample(pool, min(rng.randint(2, 4), len(pool)))
        yield _changed(kind, {key: rng.choice(values[key]) for key in keys})


def _values(kind: str) -> Mapping[str, tuple[Any, ...]]:
    return _GPT2 if kind == "gpt2" else _LLAMAS


def _changed(kind: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**BASES[kind], **changes}.items() if value != ABSENT}
