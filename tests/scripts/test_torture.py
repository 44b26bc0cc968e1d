"""``scripts/torture.py``: a few cases of what needs no other process, what a failure looks like, and (soak) a little of all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.support.paths import ROOT


@pytest.fixture
def torture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import torture

    return torture


@pytest.mark.parametrize(
    ("part", "most"),
    [
        ("R3", 2),
        ("R4", 12),
        ("R5", 12),
        ("R8", 12),
        ("R10", 3),
        ("R18", 12),
        ("R19", 12),
        ("R20", 12),
        ("R23", 12),
        ("R24b", 6),
        ("R25", 8),
    ],
)
def test_a_few_cases(torture: ModuleType, part: str, most: int) -> None:
    report = torture.torture([part], quick=True, most=most)["parts"][part]
    assert report["failures"] == []
    assert sum(report["tried"].values()) >= most


def test_a_failure_is_told_with_the_way_to_see_it_again(
    torture: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse: Callable[[object], list[str]] = lambda schedule: ["made up"]  # noqa: E731
    monkeypatch.setattr("torture_parts.referee.problems", refuse)
    assert torture.main(["--only", "R4,R5", "--case", "3", "--seed", "9", "--quick"]) == 1
    (failure,) = json.loads(capsys.readouterr().out)["parts"]["R4"]["failures"]
    assert failure["what"].startswith("the second opinion refuses what is valid (made up)")
    assert failure["again"] == "python scripts/torture.py --only R4 --case 3 --seed 9 --quick"
    monkeypatch.undo()
    assert torture.main(["--only", "R4", "--case", "3", "--seed", "9", "--quick"]) == 0


@pytest.mark.soak
def test_a_little_of_everything(torture: ModuleType) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "torture.py"), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert {part: counts["failed"] for part, counts in json.loads(run.stdout)["parts"].items()} == dict.fromkeys(
        torture.PARTS, 0
    )
