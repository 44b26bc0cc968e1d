"""``--tp-comm``, ``--tp-collectives``, ``--braid`` and ``--reduction`` of the schedule verbs: what they report is the
simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.cli import main
from jaxpipe.schedule import CostProfile, generate, read_schedule, simulate, write_costs
from jaxpipe.schedule.passes import braid, with_reductions

SIZES = ("--ranks", "2", "--microbatches", "6")
TP = ("--cost", "1,1.2,0.8", "--tp-comm", "0.4", "--tp-collectives", "4")
COSTS = CostProfile.uniform(4, chunks=2, f=1, b=1.2, w=0.8, tp_comm=0.4, tp_collectives=4)


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code = main([*argv, "--json"])
    out, _ = capsys.readouterr()
    assert code == 0
    return json.loads(out)


def test_schedule_reports_exposed_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("v-zb", "stp"):
        record = run_json(capsys, "schedule", name, *SIZES, *TP)
        timeline = simulate(generate(name, 2, 6, costs=COSTS), COSTS)
        assert record["makespan"] == timeline.makespan
        assert record["tp_exposed_s"] == list(timeline.tp_exposed_s)
        assert record["bubble_rate"] == timeline.bubble_rate
    assert run_json(capsys, "schedule", "v-zb", *SIZES)["tp_exposed_s"] == []
    apart = replace(COSTS, b_comm_s=(0.35,) * 4)
    makespan = simulate(generate("stp", 2, 6, costs=apart), apart).makespan
    assert run_json(capsys, "schedule", "stp", *SIZES, *TP, "--tp-comm", "0.4,0.7")["makespan"] == makespan
    assert main(["schedule", "stp", *SIZES, "--tp-comm", "1,2,3"]) == 2
    assert "'1,2,3' has 3 values; want one, or two as F,B" in capsys.readouterr().err
    assert main(["schedule", "stp", *SIZES, *TP]) == 0
    assert "comm exposed" in capsys.readouterr().out


def test_braid_of_every_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schedule = generate("v-zb", 2, 6, costs=COSTS)
    expected = simulate(braid(schedule, COSTS), COSTS).makespan
    assert expected < simulate(schedule, COSTS).makespan
    file = tmp_path / "plain.sched"
    assert (
        run_json(capsys, "schedule", "v-zb", *SIZES, *TP, "--braid", "-o", str(tmp_path / "braided.sched"))["makespan"]
        == expected
    )
    file.write_text(str(schedule), encoding="utf-8")
    assert run_json(capsys, "simulate", str(file), *TP, "--braid")["makespan"] == expected
    assert run_json(capsys, "simulate", str(tmp_path / "braided.sched"), *TP)["makespan"] == expected
    assert read_schedule(tmp_path / "braided.sched") == braid(schedule, COSTS)
    rows = {row["name"]: row for row in run_json(capsys, "compare", *SIZES, *TP, "--braid")["schedules"]}
    assert rows["v-zb"]["makespan"] == expected
    best = run_json(capsys, "best", *SIZES, *TP, "--braid", "--chunks", "2")
    assert best["makespan"] <= min(row["makespan"] for row in rows.values() if row.get("chunks") == 2) + 1e-9


def test_best_weighs_the_collectives_of_a_cost_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without ``--braid``: families that braid are asked with what the profile says, and win."""
    costs, path = CostProfile.uniform(4, chunks=2, tp_comm=(0.8, 1.2), tp_collectives=8), str(tmp_path / "costs.json")
    write_costs(costs, Path(path))
    best = run_json(capsys, "best", *SIZES, "--costs", path)
    rows = {
        name: simulate(generate(name, 2, 6, costs=costs), costs).makespan for name in ("combined-1f1b", "dualpipe-v")
    }
    assert best["makespan"] <= min(rows.values())
    assert best["makespan"] < simulate(generate("v-zb", 2, 6, costs=costs), costs).makespan * 0.9
    assert sum(best["tp_exposed_s"]) > 0


def test_solve_braids_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("solve", *SIZES, *TP, "--placement", "v", "--time-limit", "1", "--no-cache", "--workers", "1")
    plain, braided = run_json(capsys, *argv), run_json(capsys, *argv, "--braid")
    assert plain["value"] == pytest.approx(plain["makespan"])
    assert len(plain["tp_exposed_s"]) == 2
    assert braided["makespan"] <= braided["value"] * (1 + 1e-9)


def test_pictures_show_collectives(tmp_path: Path) -> None:
    path = tmp_path / "stp.svg"
    assert main(["schedule", "stp", *SIZES, *TP, "-o", str(path), "-o", str(tmp_path / "stp.html")]) == 0
    assert "collectives" in path.read_text(encoding="utf-8")
    assert "collectives" in (tmp_path / "stp.html").read_text(encoding="utf-8")


def test_flags_contradict_a_cost_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_costs(COSTS, tmp_path / "costs.json")
    argv = ["schedule", "stp", *SIZES, "--costs", str(tmp_path / "costs.json")]
    assert run_json(capsys, *argv)["tp_exposed_s"] == list(
        simulate(generate("stp", 2, 6, costs=COSTS), COSTS).tp_exposed_s
    )
    assert main([*argv, "--tp-comm", "1"]) == 2
    assert "--costs FILE and --tp-comm contradict each other" in capsys.readouterr().err


def test_reductions_and_gathers_of_every_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    costs = CostProfile.uniform(4, chunks=2, reduction=(1.5, 0.5))
    schedule = with_reductions(generate("v-zb", 2, 6, costs=costs), gather=True)
    expected, path = simulate(schedule, costs).makespan, str(tmp_path / "r.sched")
    assert run_json(capsys, "schedule", "v-zb", *SIZES, "--reduction", "1.5,0.5", "-o", path)["makespan"] == expected
    assert read_schedule(path).rows == schedule.rows
    assert run_json(capsys, "simulate", path, "--reduction", "1.5,0.5")["makespan"] == expected
    rows = run_json(capsys, "compare", path, *SIZES, "--reduction", "1.5,0.5")["schedules"]
    assert [row["makespan"] for row in rows if row["name"] == "v-zb"] == [expected] * 2
    free, best = (run_json(capsys, "best", *SIZES, "--max-chunks", "2", *x) for x in ((), ("--reduction", "1.5,0.5")))
    assert free["makespan"] < best["makespan"] <= min(row["makespan"] for row in rows if "makespan" in row)
    offload = ("--reduction", "1.5,0", "--offload-time", "0.5", "--offload", "0.5")
    assert run_json(capsys, "schedule", "1f1b", *SIZES, *offload)["makespan"] == 7 * 3 + 1.5
    assert main(["schedule", "v-zb", *SIZES, "--reduction", "1"]) == 2
    assert "'1' has 1 value; want two as R,G" in capsys.readouterr().err
