"""scripts/bench_gpu.py: the whole of it at toy sizes on a CPU, what it refuses, and the README's table of its results."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_gpu, results_table


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script asks XLA for devices through the environment; it is put back."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])


@cache
def tiny(out: Path) -> dict[str, Any]:
    assert bench_gpu.main(["--tiny", "--out", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.fixture
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny(tmp_path_factory.getbasetemp() / "gpu-tiny.json")


def test_everything_is_measured(report: dict[str, Any]) -> None:
    assert report["device"] == "cpu"
    assert report["commit"]
    assert {"python", "jax", "jaxlib", "platform"} <= report["versions"].keys()
    assert report["copies"]["d2h"]["bytes_per_s"] > 0
    assert report["copies"]["h2d_share_of_link"] > 0
    (size,) = report["sizes"]
    functions = size["split"]["functions"]
    assert functions.keys() == {"F", "B", "W", "BW"}
    for f in functions.values():
        assert f["median_s"] > 0
        assert f["flops"] >= f["model_flops"] > 0  # recomputation does more
        assert f["mfu"] > 0
    total = sum(functions[op]["median_s"] for op in "FBW")
    assert size["split"]["split_over_fused"] == pytest.approx(
        total / (functions["F"]["median_s"] + functions["BW"]["median_s"])
    )
    # B and W together do what the fused backward does
    assert functions["B"]["flops"] + functions["W"]["flops"] == functions["BW"]["flops"]
    assert all(x > 0 for x in size["slowdown"].values())
    assert size["k"]["measured"] == pytest.approx(size["k"]["round_trip_s"] / total)
    assert size["k"]["formula_own_bytes"] / size["k"]["formula"] == pytest.approx(
        size["k"]["bytes_per_token_and_channel"] / 20
    )


def test_offload_off_and_on(report: dict[str, Any]) -> None:
    steps = {s["schedule"]: s for s in report["sizes"][0]["steps"]}
    assert steps.keys() == {"po", "po-h", "po-f"}
    peaks = [steps[name]["measured_peak_bytes"] for name in ("po-f", "po")]
    assert peaks[0] < peaks[1]
    assert steps["po"]["copies"] == []
    assert steps["po"]["step_over_no_offload"] == 1
    for name in ("po-h", "po-f"):
        assert {c["lane"] for c in steps[name]["copies"]} == {"d2h", "h2d"}
        assert 1 <= steps[name]["predicted_over_measured"] <= 1.05
        assert steps[name]["host_us"] > 0


def test_table(report: dict[str, Any]) -> None:
    lines = results_table.gpu_table([report]).splitlines()
    rows = [line for line in lines if line.startswith("| cpu")]
    assert len(rows) == 1 + 3
    for head in (k for k, line in enumerate(lines) if line.startswith("|---")):
        width = lines[head].count("|")
        assert lines[head - 1].count("|") == lines[head + 1].count("|") == width


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no GPU" in err and "--tiny" in err
