"""`stp.txt` table 3 beside ``plan``: the committed numbers."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SAVED = ROOT / "scripts" / "results" / "plan-vlm.json"


def test_stps_gain_over_interleaved_1f1b_at_tp_8_is_within_3_points_of_the_papers() -> None:
    rows = json.loads(SAVED.read_text(encoding="utf-8"))["rows"]
    wide = [row for row in rows if row["tp"] == 8]
    assert len(wide) == 6
    for row in wide:
        paper, ours = row["gain_percent"]["stp over interleaved-1f1b"]
        assert abs(ours - paper) <= 3, row


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_what_scripts_import_of_ours_is_there(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    froms = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and str(x.module).startswith("jaxpipe")]
    names = [(str(x.module), alias.name) for x in froms for alias in x.names]
    unknown = [(room, name) for room, name in names if not hasattr(importlib.import_module(room), name)]
    assert [name for name in map(".".join, unknown) if importlib.util.find_spec(name) is None] == []
