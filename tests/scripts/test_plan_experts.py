"""scripts/plan_experts.py: parameters of published models, and the committed numbers."""

from __future__ import annotations

import json

import pytest

from scripts import plan_experts

SAVED = json.loads(plan_experts.RESULT.read_text(encoding="utf-8"))


def test_the_committed_numbers_are_those_of_the_script() -> None:
    assert {"sizes": plan_experts.sizes(), "recorded": plan_experts.recorded()}.items() <= SAVED.items()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("mixtral-8x7b", 46_702_792_704), ("qwen3-30b-a3b", 30_532_122_624), ("deepseek-v3", 671_026_419_200)],
)
def test_parameters_are_those_of_the_published_files(name: str, parameters: int) -> None:
    model = plan_experts.MODELS[name]
    assert model.parameters(model.num_experts) == parameters
    assert model.parameters(model.top_k) == pytest.approx(plan_experts.PUBLISHED_B[name][1] * 1e9, rel=0.005)


def test_plans_are_those_counted_by_hand() -> None:
    """Latency and rounding are in the plans' exchanges alone; DeepSeek's attention has 0.06% other parameters there."""
    for plan, by_hand in zip(SAVED["plans"], SAVED["sizes"], strict=True):
        for key in ("parameters", "active_parameters"):
            assert plan[key] == pytest.approx(by_hand[key], rel=0.001)
        assert plan["exchange_ms"] == pytest.approx(by_hand["exchange_ms"], rel=0.1)
    mixtral = next(row for row in SAVED["plans"] if row["model"] == "mixtral-8x7b")
    p = plan_experts.planned("mixtral-8x7b")
    assert (p.num_params, p.active_params, round(p.mfu, 3)) == tuple(
        mixtral[key] for key in ("parameters", "active_parameters", "mfu")
    )


def test_exchanges_are_those_recorded() -> None:
    _, *exchanges = plan_experts.recorded()
    assert [row["ratio"] for row in exchanges] == pytest.approx([1, 1], abs=0.1)


def test_a_device_sends_inside_its_node_and_outside_at_once() -> None:
    tokens, copies, d_model = 1000, 4, 100
    sent = tokens * copies * d_model * 2
    inside = plan_experts.exchange_s(d_model, copies, 8, tokens)
    assert inside == pytest.approx(sent * 7 / 8 / 360e9)
    assert plan_experts.exchange_s(d_model, copies, 16, tokens) == pytest.approx(sent / 2 / 40e9)
