"""The scripts in ``scripts/examples/`` run as a user runs them, on emulated devices, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

EXAMPLES = ROOT / "scripts" / "examples"
OUTPUTS = {
    "own_family": r"rank 3 .*at most 2 activations\nloss ([\d.]+), with 1f1b \1\n",
    "own_layers": r"stages: left_in, .*mean squared error",
    "search_order": r"best family .*solver: .* below\).*wrote",
    "train_and_go_on": r"2 ranks, zb-h1: step 20, .*1 rank, 1f1b: step 40, .*held out: [\d.]+\n",
}
"""The output of each example, as a pattern over all lines."""


def test_every_example_has_a_row() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == OUTPUTS.keys()


@pytest.mark.parametrize("name", OUTPUTS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    # a user's JAX, not the strict one of the tests, which refuses to promote ranks and dtypes
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(tmp_path / "out")]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(OUTPUTS[name], ran.stdout, re.DOTALL), ran.stdout
    if name == "search_order":
        assert (tmp_path / "out" / "best.sched").is_file()
        assert (tmp_path / "out" / "best.html").is_file()
