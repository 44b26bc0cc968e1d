"""``config.json`` in thousands of variants: read as transformers reads them, or refused in a line that names a key."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.interop.hub import open_hub
from tests.support.hub_configs import BASES, YARN, random_variants, single_variants
from tests.support.hub_meanings import golden_configs, meaning, problem


@cache
def golden() -> dict[str, Any]:
    return golden_configs()


def test_the_recorded_variants_are_those_that_are_made() -> None:
    assert [record["config"] for record in golden()["single"]] == list(single_variants())
    assert [record["config"] for record in golden()["random"]][:50] == list(random_variants(50))
    assert len(golden()["single"]) > 60 and len(golden()["random"]) == 2000


@pytest.mark.parametrize("kind", BASES)
def test_each_key_means_what_it_means_to_transformers(kind: str, tmp_path: Path) -> None:
    records = [record for record in golden()["single"] if record["config"]["model_type"] == kind]
    problems = {str(record["config"]): message for record in records if (message := problem(record, tmp_path))}
    assert records and not problems


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.soak)])
def test_keys_together_mean_what_they_mean_to_transformers(count: int, tmp_path: Path) -> None:
    records = golden()["random"][:count]
    problems = {str(record["config"]): message for record in records if (message := problem(record, tmp_path))}
    assert not problems


DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("qwen3", {"rope_parameters": DEFAULT, "rope_scaling": YARN}, {"rope": {"kind": "yarn", "factor": 4.0}}),
        ("mistral", {}, {"windows": [4096] * 4}),
        ("mistral", {"sliding_window": None}, {"windows": [None] * 4}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, {"windows": [4096] * 4}),
        ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 32.0}}, {"rope": {"original": 32}}),
        ("llama", {"hidden_size": 32.0, "num_hidden_layers": 4.0}, {"d_model": 32, "num_layers": 4}),
    ],
)
def test_what_was_read_otherwise(kind: str, changes: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    meanings = meaning({**BASES[kind], **changes}, tmp_path)
    for key, value in expected.items():
        full_value = {**meanings[key], **value} if isinstance(value, dict) else value
        assert meanings[key] == full_value


@pytest.mark.parametrize(
    ("kind", "changes", "names"),
    [
        ("llama", {"rope_theta": 1e6, "rope_scaling": {**YARN, "rope_theta": 5e5}}, ("rope_theta", "rope_scaling.rope_theta")),
        ("llama", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, ("rope_parameters.partial_rotary_factor",)),
        ("qwen3", {"rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 2.0}}, ("rope_parameters", "rope_scaling")),
        ("qwen3", {"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}}, ("rope_parameters", "rope_scaling")),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, ("use_sliding_window",)),
        ("llama", {"hidden_size": 32.5}, ("hidden_size", "32.5")),
        ("gpt2", {"hidden_size": 64}, ("n_embd", "hidden_size", "64")),
    ],
)  # fmt: skip
def test_two_keys_that_differ_are_both_named(kind: str, changes: Any, names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        meaning({**BASES[kind], **changes}, tmp_path)
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value)


def test_a_base_in_a_table_that_rope_scaling_replaces_is_named(tmp_path: Path) -> None:
    """transformers 5 forgets it, and takes 10,000."""
    config = {key: value for key, value in BASES["llama"].items() if key != "rope_theta"}
    tables = {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN}
    with pytest.raises(ConfigError, match=r"rope_parameters.rope_theta is 500000.0"):
        meaning({**config, **tables}, tmp_path)
    assert meaning({**config, **tables, "rope_parameters": {"rope_theta": 1e4}}, tmp_path)["rope"]["kind"] == "yarn"


def test_an_absent_head_size_is_that_of_the_class(tmp_path: Path) -> None:
    """Qwen3's is 128, whatever the width."""
    config = {key: value for key, value in BASES["qwen3"].items() if key != "head_dim"}
    assert meaning(config, tmp_path)["head_dim"] == 128
    assert "head_dim" not in open_hub(_folder(tmp_path / "qwen2", "qwen2")).options


def _folder(folder: Path, kind: str) -> Path:
    folder.mkdir()
    meaning(BASES[kind], folder)
    return folder
