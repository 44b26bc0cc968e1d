"""Ranks divided between processes: the bits of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_processes import free_port

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("mean loss", "norm", "held out")
"""What every process knows."""


def run(number: int, cases: list[dict[str, Any]]) -> list[list[dict[str, str]]]:
    """What each of ``number`` processes finds in each case."""
    port = free_port()
    children = [
        subprocess.Popen(
            [sys.executable, "tests/divided_run.py", *map(str, (port, number, mine)), json.dumps(cases)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mine in range(number)
    ]
    said = [child.communicate(timeout=600) for child in children]
    assert [child.returncode for child in children] == [0] * number, said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def assert_same_bits(number: int, cases: list[dict[str, Any]]) -> None:
    (whole,), parts = run(1, cases), run(number, cases)
    for k, case in enumerate(cases):
        layers: dict[str, str] = {}
        for found in (part[k] for part in parts):
            assert {name: found.pop(name) for name in SHARED} == {name: whole[k][name] for name in SHARED}, case
            assert not layers.keys() & found.keys(), "a layer is one process's"
            layers |= found
        assert layers == {name: digest for name, digest in whole[k].items() if name not in SHARED}, case


def test_two_processes_train_what_one_does() -> None:
    """A V of four stages: rank 0 has both ends; tied embeddings, dropout, bfloat16, ZeRO-1 over dp 2, clipping."""
    case = {"schedule": "v-zb", "ranks": 2, "dp": 2, "zero1": True, "dtype": "bfloat16", "dropout": 0.2}
    assert_same_bits(2, [case])


SCHEDULES: list[dict[str, Any]] = [
    *({"schedule": name, "ranks": 4, "tied": False} for name in ("1f1b", "zb-2p", "gis", "v-half", "po-f", "zb-1p")),
    {"schedule": "interleaved-1f1b", "ranks": 4, "chunks": 2, "layers": 6},
    {"schedule": "stp", "ranks": 4, "tp": 2, "layers": 6},
    {"schedule": "1f1b", "ranks": 4, "dp": 2, "dropout": 0.1, "recompute": "full"},
]


@pytest.mark.soak
@pytest.mark.parametrize("number", [2, 4])
def test_schedules_in_several_processes(number: int) -> None:
    assert_same_bits(number, SCHEDULES)


@pytest.mark.soak
def test_any_number_goes_on_from_the_checkpoint_of_any_other(tmp_path: Path) -> None:
    case = {"schedule": "v-zb", "ranks": 3, "dp": 2, "zero1": True, "dtype": "bfloat16"}
    one, several = ({**case, "folder": str(tmp_path / name)} for name in ("one", "several"))
    whole = run(1, [one] * 3)[0][-1]
    for number in (1, 3, 2):
        found = run(number, [several])
    assert {name: digest for (part,) in found for name, digest in part.items()} == whole
