"""`stp.txt` table 3 beside ``plan``: the committed numbers."""

from __future__ import annotations

import json

from tests.support.paths import ROOT

SAVED = ROOT / "scripts" / "results" / "plan-vlm.json"


def test_stps_gain_over_interleaved_1f1b_at_tp_8_is_within_3_points_of_the_papers() -> None:
    rows = json.loads(SAVED.read_text(encoding="utf-8"))["rows"]
    wide = [row for row in rows if row["tp"] == 8]
    assert len(wide) == 6
    for row in wide:
        paper, ours = row["gain_percent"]["stp over interleaved-1f1b"]
        assert abs(ours - paper) <= 3, row
