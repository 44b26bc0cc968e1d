"""scripts/bench_overlap.py: all of it at toy sizes on a CPU, the reading of schedules, and the real check where wheels are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_overlap
from scripts.hlo_schedule import count_products, overlaps

SCHEDULE = """HloModule jit_run, is_scheduled=true

%fused_dot (p: bf16[8,8], q: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %q = bf16[8,8]{1,0} parameter(1)
  ROOT %dot = bf16[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_add (p.1: bf16[8,8]) -> bf16[8,8] {
  ROOT %add = bf16[8,8]{1,0} add(%p.1, %p.1)
}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %all-reduce-start.1 = bf16[8,8]{1,0} all-reduce-start(%x), channel_id=1, to_apply=%sum
  %gemm = bf16[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%fused_dot
  %wrapped_add = bf16[8,8]{1,0} fusion(%x), kind=kLoop, calls=%fused_add
  %all-reduce-done.1 = bf16[8,8]{1,0} all-reduce-done(%all-reduce-start.1)
  %reduce-scatter-start = ((bf16[8,8]{1,0}), bf16[2,8]{1,0}) async-start(%gemm), calls=%wrapped_reduce-scatter
  %add.2 = bf16[8,8]{1,0} fusion(%x), kind=kLoop, calls=%fused_add
  %reduce-scatter-done = bf16[2,8]{1,0} async-done(%reduce-scatter-start)
  %all-gather-start = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%reduce-scatter-done), \
backend_config={"collective_backend_config":{"is_sync":true}}
  %all-gather-done = bf16[8,8]{1,0} all-gather-done(%all-gather-start)
  ROOT %call = bf16[8,8]{1,0} custom-call(%all-gather-done, %gemm), custom_call_target="__cublas$gemm"
}
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script asks XLA for devices through the environment; it is put back."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ[name])


def test_schedules_are_read() -> None:
    collectives = overlaps(SCHEDULE)
    assert [(o.kind, o.products, o.other_kernels, o.is_sync, o.covered) for o in collectives] == [
        ("all-reduce", 1, 1, False, True),
        ("reduce-scatter", 0, 1, False, False),
        ("all-gather", 0, 0, True, False),
    ]
    assert {o.whole_bytes for o in collectives} == {8 * 8 * 2}
    assert count_products(SCHEDULE) == 2


def test_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "overlap.json"
    arguments = ["--tiny", "--tp", "2", "--variant", "llama-sequence", "--program", "F+BW", "--program", "F+BW woven"]
    assert bench_overlap.main([*arguments, "--out", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out) == report
    assert report["device"] == "cpu"
    assert report["command"].endswith(f"--out {out}")
    assert report["commit"] and report["versions"].keys() == {"python", "jax", "jaxlib"}
    plain, woven, _ = report["cases"]
    assert plain["collectives"] == woven["collectives"] == woven["written"] == len(woven["planned"]) == 16
    assert plain["covered"] == 0  # a CPU runs collectives in line
    assert all(case["temp_bytes"] > 0 and case["compile_s"] > 0 for case in report["cases"])


def test_without_wheels_it_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpipe._jax_compat.compile_only_devices", lambda *_: "the CUDA plugin is not installed")
    assert bench_overlap.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "bench_overlap: the CUDA plugin is not installed; or try --tiny\n"


@pytest.mark.parametrize(
    ("variant", "collectives"), [("llama-full", 10), ("gpt-ring", 20), ("experts", 8), ("experts-ragged", 8)]
)
def test_compiled_for_h100_all_collectives_have_products_under_them(variant: str, collectives: int) -> None:
    devices = bench_overlap.target_devices("h100", 4, tiny=False)
    if isinstance(devices, str):
        pytest.skip(f"{devices}; needs the wheels that scripts/bench_overlap.py names")
    stage, mesh = bench_overlap.middle_stage(bench_overlap.VARIANTS[variant], bench_overlap.Size(), devices)
    case = bench_overlap.measure(stage, ("F", "BW"), True, mesh, cublas=False, gpu=True)
    assert (case["covered"], case["collectives"]) == (collectives, collectives)


def test_woven_programs_whose_collectives_were_merged_are_failures() -> None:
    cases = [{"program": program, "written": 8, "collectives": n} for program in ("F+BW", "F+BW woven") for n in (7, 8)]
    assert bench_overlap.merged(cases) == [{"program": "F+BW woven", "written": 8, "collectives": 7}]


def test_results_in_the_repository() -> None:
    """The README's numbers of compiled programs come from this file."""
    path = Path(bench_overlap.__file__).parent / "results" / "overlap-h100.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    for name, shards in (("overlap-tp8-h100", (8, 1)), ("overlap-tp4-cp2-h100", (4, 2))):
        eight = json.loads(path.with_stem(name).read_text(encoding="utf-8"))
        assert (eight["tp"], eight["cp"]) == shards
        assert not bench_overlap.merged(eight["cases"])
        assert all(c["covered"] >= c["collectives"] - 1 for c in eight["cases"] if c["program"] == "F+BW woven")
        exposed_s = {(c["variant"], c["program"]): c["xla"]["exposed_s"] for c in eight["cases"] if c["cublas"]}
        assert all(exposed_s[v, "F+BW woven"] < exposed_s[v, "F+BW"] / 2 for v, _ in exposed_s)
    ring = json.loads(path.with_stem("overlap-ring-h100").read_text(encoding="utf-8"))
    assert {case["covered"] - case["collectives"] for case in ring["cases"]} == {0}
    experts = json.loads(path.with_stem("overlap-experts-h100").read_text(encoding="utf-8"))["cases"]
    assert {(c["covered"], c["collectives"]) for c in experts if "+" in c["program"] and "woven" in c["program"]} == {
        (8, 8)
    }
    assert {(c["covered"], c["collectives"]) for c in experts if c["program"] == "BW woven"} == {(4, 4)}
    for case in report["cases"]:
        if case["program"] == "F+BW woven":
            gathers_first = "sequence" in case["variant"]  # F and B both begin with one
            assert case["covered"] >= case["collectives"] - gathers_first
            assert case["covered"] >= 8
