"""Describe what jaxpipe reads in a ``config.json``, with the keys of ``golden/hub_configs.json.gz``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.interop.hub import open_hub
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from tests.support.paths import GOLDEN


def golden_configs() -> dict[str, Any]:
    return json.loads(gzip.decompress((GOLDEN / "hub_configs.json.gz").read_bytes()))


def meaning(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Raises ConfigError where jaxpipe refuses the file; it is written into ``folder``."""
    (folder / "config.json").write_text(json.dumps(config))
    hub = open_hub(folder)
    hub.exchange.tensors({"seq_len": 8, **hub.options})
    return _gpt(hub.options) if config["model_type"] == "gpt2" else _llama(hub.options)


def _gpt(options: Mapping[str, Any]) -> dict[str, Any]:
    c = GPTConfig(seq_len=8, **options)
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.d_model,
        "num_layers": c.num_layers,
        "num_heads": c.num_heads,
        "positions": c.positions,
        "mlp_width": c.mlp_width,
        "activation": {"tanh": ("gelu_new", "gelu_pytorch_tanh"), "exact": ("gelu",)}[c.gelu],
        "norm_eps": c.norm_eps,
        "tied": c.tied,
        "scaled": [True, False, False],
        "cross": False,
    }


def _llama(options: Mapping[str, Any]) -> dict[str, Any]:
    scaling = options.get("rope_scaling")
    rope: dict[str, Any] = {"kind": "default", "theta": options["rope_theta"], "partial": 1}
    if scaling is not None:
        rope |= {name: value for name, value in scaling.items() if name != "original_seq_len"}
        if scaling["kind"] != "linear":
            rope |= {"original": scaling["original_seq_len"], "odd": [True, None, None]}
    c = LlamaConfig(seq_len=8, **{k: v for k, v in options.items() if k != "rope_scaling"})
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.d_model,
        "num_layers": c.num_layers,
        "num_heads": c.num_heads,
        "kv_heads": c.kv_heads,
        "positions": c.positions,
        "mlp_width": c.mlp_width,
        "activation": "silu",
        "norm_eps": c.norm_eps,
        "tied": c.tied,
        "head_dim": c.head_size,
        "biases": [c.qkv_bias, c.out_bias, c.mlp_bias],
        "qk_norm": c.qk_norm,
        "windows": [c.window] * c.num_layers,
        "rotary": [not c.rope_every or i % c.rope_every != 0 for i in range(1, c.num_layers + 1)],
        "rope": rope,
    }


def problem(record: Mapping[str, Any], folder: Path) -> str:
    """Return what is wrong with the reading of a recorded file; empty if it is read as transformers does, or refused in a
    line that names a key of it. What transformers can't use must be refused."""
    try:
        ours = meaning(record["config"], folder)
    except ConfigError as error:
        text = str(error)
        names_key = any(name in text for name in _names(record["config"]))
        return "" if names_key and "\n" not in text else f"no key is named: {text}"
    if "error" in record:
        return f"is read, and transformers refuses it: {record['error']}"
    recorded = record["meaning"]
    wrong = [k for k in ours if not (recorded[k] in ours[k] if isinstance(ours[k], tuple) else recorded[k] == ours[k])]
    return "; ".join(f"{k} is {ours[k]}, want {recorded[k]}" for k in wrong)


def _names(config: Mapping[str, Any]) -> set[str]:
    """Return keys of a file and of its tables; absent ones too, whose default may not fit."""
    tables = [value for value in config.values() if isinstance(value, dict)]
    defaults = {
        "head_dim",
        "num_key_value_heads",
        "no_rope_layer_interval",
        "max_window_layers",
        "factor",
        "sliding_window",
    }
    return {*config, *(name for table in tables for name in table)} | defaults
