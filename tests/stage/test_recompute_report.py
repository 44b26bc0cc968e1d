"""Policies save and cost what the papers say on layers of real size (traced only), and the cheapest that fits is chosen.

Legend: b batch, s sequence, h width. "bsh" is bytes per token and channel, the unit of the papers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpipe.errors import StageError
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compiled.recompute_report import PolicyCost, compare_policies, policy_table, policy_tables
from jaxpipe.stage.split.policies import STANDARD
from models.gpt import GPT
from models.llama import Llama
from tests.support import toy_stages as toy
from tests.support.paths import ROOT

S = H = 4096


sys.path.insert(0, str(ROOT / "scripts"))
from policy_table import layer_costs, table  # noqa: E402


def layer(kind: Any, **options: Any) -> Mapping[str, PolicyCost]:
    return layer_costs(
        kind(
            vocab_size=64,
            d_model=H,
            num_heads=32,
            seq_len=S,
            num_layers=1,
            dtype="bfloat16",
            attention="xla",
            **options,
        )
    )


@pytest.fixture(scope="module")
def gpt() -> Mapping[str, PolicyCost]:
    return layer(GPT)


@pytest.fixture(scope="module")
def dropped() -> Mapping[str, PolicyCost]:
    return layer(GPT, dropout=0.1)


@pytest.fixture(scope="module")
def llama() -> Mapping[str, PolicyCost]:
    return layer(Llama)


def test_none_keeps_no_more_than_kernels_fused_by_hand(
    gpt: Mapping[str, PolicyCost], dropped: Mapping[str, PolicyCost], llama: Mapping[str, PolicyCost]
) -> None:
    """And runs as many operations up to a thousandth: elementwise work again on both sides."""
    for costs in (gpt, dropped, llama):
        assert costs["none"].residual_bytes < costs["fused"].residual_bytes
        assert costs["attention"].residual_bytes < costs["flash"].residual_bytes
        assert abs(costs["fused"].added_fraction) < 0.001


def test_cheap_gives_up_masks(gpt: Mapping[str, PolicyCost], dropped: Mapping[str, PolicyCost]) -> None:
    for costs, least in ((gpt, 0), (dropped, 0.25)):
        assert costs["cheap"].saved_fraction > least
        assert 0 < costs["cheap"].added_fraction <= 0.02


def test_cheap_against_kernels_fused_by_hand(gpt: Mapping[str, PolicyCost], dropped: Mapping[str, PolicyCost]) -> None:
    """Attention keeps no scores: 34 bsh with dropout is what the papers call no recomputation, 20 what they get."""
    assert dropped["flash"].residual_bytes == pytest.approx(34 * S * H, rel=1e-3)
    for costs in (gpt, dropped):
        plain, cheap = costs["flash"], costs["cheap+attention"]
        assert cheap.residual_bytes == pytest.approx(20 * S * H, rel=1e-3)
        assert cheap.residual_bytes <= 0.65 * plain.residual_bytes
        added = (cheap.added_flops - plain.added_flops) / sum(plain.flops[op] for op in "FBW")
        assert 0 < added <= 0.02


def test_splitting_adds_no_flops(gpt: Mapping[str, PolicyCost], llama: Mapping[str, PolicyCost]) -> None:
    for costs in (gpt, llama):
        for c in costs.values():
            assert c.flops["B"] + c.flops["W"] <= 1.02 * c.flops["BW"], c.policy
            assert c.flops["F"] <= costs["none"].flops["F"], "derivatives that are not saved are not computed"


def test_mlp_gives_up_its_hidden_values(gpt: Mapping[str, PolicyCost], llama: Mapping[str, PolicyCost]) -> None:
    assert gpt["cheap+attention+mlp"].residual_bytes == pytest.approx(12 * S * H, rel=1e-3), "20 less 2 · 4h"
    f = 10944  # Llama's MLP width at h 4096
    hidden = llama["cheap+attention"].residual_bytes - llama["cheap+attention+mlp"].residual_bytes
    assert hidden == 2 * S * 2 * f, "gate and up"
    up = 2 * S * H * 2 * f
    extra = llama["cheap+attention+mlp"].added_flops - llama["cheap+attention"].added_flops
    assert extra == pytest.approx(up, rel=1e-3)


def test_what_waits_for_w_is_the_operands_of_its_products(gpt: Mapping[str, PolicyCost]) -> None:
    """qkv 2 + 6, out 2 + 2, up 2 + 8, down 8 + 2 = 32 bsh under every policy."""
    for c in gpt.values():
        assert c.w_residual_bytes == pytest.approx(32 * S * H, rel=1e-3), c.policy


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_small_layers_too(name: str) -> None:
    model = {"gpt": GPT, "llama": Llama}[name](vocab_size=64, d_model=128, num_heads=4, seq_len=128, num_layers=1)
    costs = layer_costs(model)
    assert costs["none"].residual_bytes < costs["fused"].residual_bytes
    assert costs["cheap"].saved_bytes > 0 and costs["cheap"].added_fraction <= 0.02
    assert costs["full"].residual_bytes == 4 * 128 * 128


def test_tables_show_equal_stages_once() -> None:
    stages = [[toy.embedding()], [toy.mlp("a")], [toy.mlp("b")], [toy.head(), toy.loss()]]
    params = toy.init_params([layer for stage in stages for layer in stage])
    costs = compare_policies(stages, params, toy.batch_avals(), pipeline_submeshes(1) * 4, ("none", "cheap", "cheap"))
    assert [[c.policy for c in row] for row in costs] == [["none", "cheap"]] * 4
    assert costs[1] == costs[2]
    text = policy_tables(costs)
    assert "stages 1, 2, per microbatch:\n" + policy_table(costs[1]) in text
    assert text.count("policy ") == 3
    assert costs[1][1].saved_bytes == costs[1][0].residual_bytes - costs[1][1].residual_bytes
    assert jnp.isfinite(costs[0][1].added_fraction)
    assert set(STANDARD) >= {"none", "cheap", "attention", "mlp", "full"}


def test_unknown_policies_are_refused() -> None:
    stages = [[toy.embedding(), toy.head(), toy.loss()]]
    with pytest.raises(StageError, match="recompute policy 'x' does not exist"):
        compare_policies(stages, toy.init_params(stages[0]), toy.batch_avals(), pipeline_submeshes(1), ("cheap+x",))


def test_the_page_shows_what_the_script_prints() -> None:
    """Up to what versions of JAX trace differently."""
    page = (ROOT / "jaxpipe" / "stage" / "GUIDE.md").read_text(encoding="utf-8")
    head, _, *rows = table().splitlines()
    page_rows = page.partition(head)[2].splitlines()[2 : 2 + len(rows)]
    for got, expected in zip(page_rows, rows, strict=True):
        assert got.split("|")[1] == expected.split("|")[1]
        numbers = [
            [float(x) for x in re.findall(r"[0-9.]+", row.partition("|")[2].partition("|")[2])]
            for row in (got, expected)
        ]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.15, abs=0.05)
