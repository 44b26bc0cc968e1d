"""scripts/bench_overlap_reduction.py: its step times by closed form, and the committed ones."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from jaxpipe.schedule import ir
from jaxpipe.schedule.timeline import at_most
from scripts import bench_overlap_reduction as bench

SAVED = json.loads(bench.RESULT.read_text(encoding="utf-8"))["rows"]


@pytest.fixture(autouse=True)
def bucket_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir, "_REGISTRY", dict(ir._REGISTRY))
    bench.register_buckets()


def test_step_times_of_one_stage_a_rank_by_closed_form() -> None:
    run = bench.RUNS[1]
    row, f = bench.measured(run, "1f1b"), run.function_s
    reduce_s, gather_s = row["reduce_s"], row["gather_s"]
    pipeline_s = (run.microbatches + run.pp - 1) * 3 * f
    assert row["pipeline_s"] == pytest.approx(pipeline_s)
    whole_s = pipeline_s + reduce_s + gather_s
    assert [row[f"{x}_s"] for x in ("after", "today", "own_lane", "validated")] == pytest.approx([whole_s] * 4)
    # the last BW, of rank 0, hides seven eighths of its own length, and the first F all but an eighth of it
    exposed_s = max(reduce_s / 8, reduce_s - 7 / 8 * 2 * f) + max(gather_s / 8, gather_s - 7 / 8 * f)
    assert row["buckets_s"] == pytest.approx(pipeline_s + exposed_s)


@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "v-zb"])
def test_committed_rows_are_what_the_script_says(family: str) -> None:
    (saved,) = (
        row for row in SAVED if (row["run"], row["microbatches"], row["family"]) == (bench.RUNS[1].name, 16, family)
    )
    assert bench.measured(bench.RUNS[1], family) == pytest.approx(saved)
    seconds = [saved[f"{x}_s"] for x in ("pipeline", "buckets", "own_lane", "today", "after")]
    assert all(at_most(a, b) for a, b in pairwise(seconds))
