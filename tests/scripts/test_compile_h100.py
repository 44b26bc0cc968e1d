"""scripts/compile_h100.py: what counts as a copy, and what the README's table says; toy sizes are for the soak."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from scripts import compile_h100
from scripts.hlo_schedule import Kernel, Move, custom_calls, float32_adds, kernels, moves

PROGRAM = """HloModule jit_BW

%turned (p: bf16[8,4,2]) -> bf16[4,8,2] {
  %p = bf16[8,4,2]{2,1,0} parameter(0)
  ROOT %t = bf16[4,8,2]{2,1,0} transpose(%p), dimensions={1,0,2}
}

%computed (q: bf16[8,4,2]) -> bf16[4,8,2] {
  %q = bf16[8,4,2]{2,1,0} parameter(0)
  %n = bf16[8,4,2]{2,1,0} negate(%q)
  ROOT %u = bf16[4,8,2]{2,1,0} transpose(%n), dimensions={1,0,2}
}

%of_one (r: bf16[1,32,2]) -> bf16[32,1,2] {
  %r = bf16[1,32,2]{2,1,0} parameter(0)
  ROOT %v = bf16[32,1,2]{2,1,0} transpose(%r), dimensions={1,0,2}
}

ENTRY %main (x: bf16[8,4,2]) -> bf16[8,4,2] {
  %x = bf16[8,4,2]{2,1,0} parameter(0)
  %a = bf16[4,8,2]{2,1,0} fusion(%x), kind=kLoop, calls=%turned
  %b = bf16[4,8,2]{2,1,0} fusion(%x), kind=kLoop, calls=%computed
  %y = bf16[1,32,2]{2,1,0} bitcast(%x)
  %c = bf16[32,1,2]{2,1,0} fusion(%y), kind=kLoop, calls=%of_one
  %d = bf16[8,4,2]{2,1,0} copy(%x)
  %e = bf16[8,4,2]{1,2,0} copy(%x)
  %f = bf16[2,2]{0,1} copy(%small)
  ROOT %call = bf16[8,4,2]{2,1,0} custom-call(%d, %a), custom_call_target="__cudnn$fmhaSoftmax"
}
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script asks XLA for devices through the environment; it is put back."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ[name])


def test_copies_are_told_by_the_order_of_axes_in_memory() -> None:
    assert moves(PROGRAM, 64) == [
        Move("a", "transposing"),
        Move("b", "fused"),
        Move("c", "copies"),
        Move("d", "copies"),
        Move("e", "transposing"),
    ]
    assert custom_calls(PROGRAM) == ["__cudnn$fmhaSoftmax"]


SUMS = """HloModule jit_W

%summed (p: f32[8,4], q: bf16[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = bf16[8,4]{1,0} parameter(1)
  %c = f32[8,4]{1,0} convert(%q)
  ROOT %s = f32[8,4]{1,0} add(%p, %c)
}

ENTRY %main (acc: f32[8,4], small: f32[4], x: bf16[8,4]) -> f32[8,4] {
  %acc = f32[8,4]{1,0} parameter(0)
  %small = f32[4]{0} parameter(1)
  %x = bf16[8,4]{1,0} parameter(2)
  %gemm = (f32[8,4]{1,0}, s8[32]{0}) custom-call(%x, %x, %acc), custom_call_target="__cublas$gemm"
  %fused = f32[8,4]{1,0} fusion(%acc, %x), kind=kLoop, calls=%summed
  %bias = f32[4]{0} add(%small, %small)
  ROOT %whole = f32[8,4]{1,0} add(%fused, %acc)
}
"""


def test_sums_that_no_product_makes_are_counted() -> None:
    assert float32_adds(SUMS, 32) == ["fused", "whole"]
    assert float32_adds(SUMS, 4) == ["fused", "bias", "whole"]


SLICED = """HloModule jit_F

%halved (p: bf16[8,4]) -> bf16[8,2] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %s = bf16[8,2]{1,0} slice(%p), slice={[0:8], [0:2]}
}

ENTRY %main (x: bf16[8,4]) -> bf16[8,2] {
  %x = bf16[8,4]{1,0} parameter(0)
  ROOT %half = bf16[8,2]{1,0} fusion(%x), kind=kLoop, calls=%halved
}
"""


def test_bytes_are_those_that_kernels_read_and_write() -> None:
    assert kernels(SLICED) == [Kernel("half", 2 * 8 * 2 * 2)]
    gemm, fused, bias, whole = kernels(SUMS)
    assert gemm == Kernel("gemm", 64 + 2 * 128)  # its operand once, its scratch not
    assert [k.moved_bytes for k in (fused, bias, whole)] == [2 * 128 + 64, 2 * 16, 3 * 128]


def test_without_wheels_it_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpipe._jax_compat.compile_only_devices", lambda *_: "the CUDA plugin is not installed")
    assert compile_h100.main([]) == 2
    assert capsys.readouterr() == ("", "compile_h100: the CUDA plugin is not installed; or try --tiny\n")


@pytest.mark.soak
def test_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert compile_h100.main(["--tiny", "--model", "gpt", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text(encoding="utf-8"))
    assert [case["form"] for case in report["cases"]] == ["xla", "as written"]
    assert all(case["functions"]["BW"]["products"] == 48 for case in report["cases"])


def test_results_in_the_repository() -> None:
    """The README's numbers of programs compiled for an H100 come from this file."""
    path = Path(compile_h100.__file__).parent / "results" / "h100-compile.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    cases = {(case["form"], case["model"]): case for case in report["cases"]}
    for model in ("gpt", "llama"):
        before, now, cudnn = (cases[form, model] for form in ("before", "xla", "cudnn"))
        assert cudnn["residual_bytes"] < now["residual_bytes"] < 0.6 * before["residual_bytes"]
        assert all(case["functions"]["BW"]["transposing"] == 0 for case in (now, cudnn))
        assert cudnn["functions"]["F"]["kernels"]["__cudnn$fmhaSoftmax"] == report["size"]["L"]
        assert cudnn["functions"]["B"]["kernels"]["__cudnn$fmhaSoftmaxBackward"] == report["size"]["L"]
        assert now["functions"]["BW"]["products"] == before["functions"]["BW"]["products"]
