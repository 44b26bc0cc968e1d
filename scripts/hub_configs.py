"""Write ``tests/golden/hub_configs.json.gz``: what transformers makes of the variants of ``tests/support/hub_configs.py``.

python -m scripts.hub_configs    # in an environment with transformers; torch is not needed

The meaning of a file is the attributes of the config that ``AutoConfig.from_pretrained`` returns, and what the modelling code
of its class (read in transformers 5.24) does with them: which layers have a window, biases, rotary positions. A variant has
``error`` where transformers refuses it, or its modelling code can't use it; ``floats`` says that transformers wants whole
numbers where the file has 32.0, and ``meaning`` is then that of whole numbers.

Version 5.24 takes a Mistral that has ``layer_types`` for a Ministral, which then fails without ``head_dim``; here it has that
of Mistral.
"""

from __future__ import annotations

import gzip
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from tests.support.hub_configs import random_variants, single_variants

TO = Path("tests/golden/hub_configs.json.gz")
COUNT = 2000
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")


def meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the meaning of a config file. Raises where it can't be used."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        config_object = AutoConfig.from_pretrained(folder)
    return _gpt2(config_object) if config_object.model_type == "gpt2" else _llama(config_object)


def _gpt2(c: Any) -> dict[str, Any]:
    assert c.n_embd % c.n_head == 0, "n_head"
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.n_embd,
        "num_layers": c.n_layer,
        "num_heads": c.n_head,
        "positions": c.n_positions,
        "mlp_width": 4 * c.n_embd if c.n_inner is None else c.n_inner,
        "activation": c.activation_function,
        "norm_eps": c.layer_norm_epsilon,
        "tied": c.tie_word_embeddings,
        "scaled": [c.scale_attn_weights, c.scale_attn_by_inverse_layer_idx, c.reorder_and_upcast_attn],
        "cross": c.add_cross_attention,
    }


def _llama(c: Any) -> dict[str, Any]:
    kind, count = c.model_type, c.num_hidden_layers
    head_dim = getattr(c, "head_dim", c.hidden_size // c.num_attention_heads)
    if kind == "ministral" and head_dim is None:
        head_dim = c.hidden_size // c.num_attention_heads
    assert head_dim is not None and head_dim % 2 == 0, "head_dim"
    assert c.num_attention_heads % c.num_key_value_heads == 0, "num_key_value_heads"
    assert c.vocab_size > 0, "vocab_size"
    biased = kind == "qwen2" or (kind not in ("mistral", "ministral") and c.attention_bias)
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.hidden_size,
        "num_layers": count,
        "num_heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "positions": c.max_position_embeddings,
        "mlp_width": c.intermediate_size,
        "activation": {"swish": "silu"}.get(c.hidden_act, c.hidden_act),
        "norm_eps": c.rms_norm_eps,
        "tied": c.tie_word_embeddings,
        "head_dim": head_dim,
        "biases": [biased, biased and kind != "qwen2", kind in ("llama", "smollm3") and c.mlp_bias],
        "qk_norm": kind == "qwen3",
        "windows": _windows(c),
        "rotary": [bool(x) for x in c.no_rope_layers[:count]] if kind == "smollm3" else [True] * count,
        "rope": _rope(c),
    }


def _windows(c: Any) -> list[int | None]:
    """Return the attention windows by layer."""
    count = c.num_hidden_layers
    if c.model_type == "llama":
        return [None] * count
    if c.model_type == "mistral":  # looks at no layer_types
        return [c.sliding_window] * count
    window = c.sliding_window if c.model_type == "ministral" or c.use_sliding_window else None
    assert "sliding_attention" not in c.layer_types or c.sliding_window is not None, (
        "layer_types without a sliding_window"
    )
    return [window if each == "sliding_attention" else None for each in c.layer_types]


def _rope(c: Any) -> dict[str, Any]:
    c.standardize_rope_params()  # as the modelling code does first
    table = c.rope_parameters
    kind = table["rope_type"]
    assert isinstance(kind, str) and isinstance(table["rope_theta"], float | int), "rope"
    rope = {"kind": kind, "theta": table["rope_theta"], "partial": table.get("partial_rotary_factor") or 1}
    for name in _NEEDED.get(kind, ()):
        assert isinstance(table[name], float | int), name
    if kind in ("linear", "llama3", "yarn"):
        rope |= {name: table[name] for name in _NUMBERS if table.get(name) is not None}
    if kind in ("llama3", "yarn"):
        rope["original"] = table["original_max_position_embeddings"]
        assert isinstance(rope["original"], float | int), "original_max_position_embeddings"
        rope["odd"] = [table.get("truncate", True), table.get("mscale"), table.get("mscale_all_dim")]
    return rope


def _whole(config: Any) -> Any:
    """Replace floats that are whole numbers by integers, but for the base and the numbers of rope."""
    return {k: int(v) if type(v) is float and v.is_integer() and k != "rope_theta" else v for k, v in config.items()}


def recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of the golden file."""
    try:
        return {"config": config, "meaning": meaning(config)}
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[-160:]
    try:
        return {"config": config, "floats": text, "meaning": meaning(_whole(config))}
    except Exception:
        return {"config": config, "error": text}


def main() -> None:
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    records = {
        name: list(map(recorded, variants))
        for name, variants in (("single", single_variants()), ("random", random_variants(COUNT)))
    }
    golden = {"transformers": transformers.__version__, **records}
    TO.write_bytes(gzip.compress(json.dumps(golden, separators=(",", ":")).encode(), 9, mtime=0))
    for name, variants in records.items():
        print(
            name,
            len(variants),
            "errors",
            sum("error" in each for each in variants),
            "floats",
            sum("floats" in each for each in variants),
        )


if __name__ == "__main__":
    main()
