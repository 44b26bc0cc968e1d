"""scripts/plan_public.py: runs of the table, its ranks, and the committed predictions."""

from __future__ import annotations

import json

import pytest

from scripts import plan_public

SAVED = json.loads(plan_public.RESULT.read_text(encoding="utf-8"))


def test_each_row_is_a_run_on_as_many_gpus_as_it_says() -> None:
    for row in plan_public.read_table():
        config = plan_public.config_of(row)
        assert config.pipeline.num_devices == row["gpus"], row
        assert config.pipeline.microbatches * row["dp"] * row["mbs"] == row["gbs"], row


def test_predictions_are_those_of_the_table() -> None:
    ours = "predicted", "ratio", "predicted_tflops"
    rows = [{k: v for k, v in row.items() if k not in ours} for s in SAVED["systems"] for row in s["rows"]]
    assert rows == plan_public.read_table()


def test_pipelines_of_nemo_are_predicted_from_one_of_them() -> None:
    (nemo,) = (s for s in SAVED["systems"] if s["system"].startswith("nemo"))
    assert nemo["pipelines"]["held_out_rows"] == 4
    assert nemo["pipelines"]["median_error"] <= 0.1


@pytest.mark.parametrize(("y", "correlation"), [([1, 5, 9, 9], 0.95), ([4, 3, 2, 1], -1), ([1, 2, 3, 4], 1)])
def test_rank_correlation(y: list[float], correlation: float) -> None:
    assert plan_public.rank_correlation([10, 20, 30, 40], y) == pytest.approx(correlation, abs=0.005)
