"""scripts/gpu_truth.py: what is done is not done again, what is killed costs itself alone; all experiments at toy size."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import gpu_truth, results_table
from scripts.gpu_experiments import correctness, here, planned, processes
from scripts.gpu_experiments.blocks import block_flops
from scripts.gpu_experiments.process import WITHOUT_ORTOOLS, ForkServer
from scripts.gpu_experiments.registry import RANKING, Experiment, all_experiments, checks_of, digest_of
from tests.support import gpu_experiments
from tests.support.gpu_experiments import absent, composed, crash, fake, hang, quick
from tests.support.paths import ROOT

CARD = "nvidia-h100-80gb-hbm3"
ALLOCATORS = {"predicted_over_measured_peak"}
"""Numbers that a CPU, whose allocator counts nothing, does not have."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test's own; the card is measured without JAX."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_truth, "measure_card", gpu_experiments.measure_card)
    monkeypatch.setattr(gpu_truth, "ForkServer", lambda environment: None)


def result(name: str, folder: str = ".gpu-truth/tiny") -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(folder, f"{name}.json").read_text(encoding="utf-8"))
    return values


def tiny(experiments: Sequence[Experiment], *arguments: str) -> int:
    return gpu_truth.main(["--tiny", *arguments], experiments)


def test_a_result_tells_what_was_asked_expected_and_measured(tmp_path: Path) -> None:
    assert tiny([fake("A", quick)], "--out", "results") == 0
    measured = result("A", "results/tiny")
    assert measured == result("A")
    assert json.loads(Path("results/truth-tiny.json").read_text(encoding="utf-8")) == [measured]
    assert measured["numbers"]["ceilings"] == gpu_experiments.CEILINGS
    assert measured["checks"] == [
        {"name": "ratio", "value": 0.5, "want": "<= 0.6", "ok": True},
        {"name": "deep.seconds", "value": "NaN", "want": "== 0", "ok": None},
    ]
    assert measured["predicted"] == {"ratio": "0.5"}
    assert measured["digest"] == digest_of(["tests/support/paths.py"])
    assert {"commit", "flags", "command", "clocks", "driver", "seconds", "started"} <= measured.keys()
    predicted = json.loads(Path(".gpu-truth/tiny/A.predicted").read_text(encoding="utf-8"))
    assert predicted["status"] == "running" and "numbers" not in predicted


def test_what_crashes_or_hangs_costs_itself_alone(capsys: pytest.CaptureFixture[str]) -> None:
    experiments = [fake("A", crash), fake("B", hang, 1), fake("C", absent), fake("D", quick)]
    assert tiny(experiments) == 1
    failed = result("A")
    assert failed["status"] == "failed"
    assert str(-signal.SIGABRT) in failed["note"] and "about to fall" in failed["said"]
    assert result("B")["note"] == "took more than 2 s" and "waiting" in result("B")["said"]
    assert result("C")["status"] == "skipped" and result("C")["note"] == "torch is missing"
    assert result("D")["status"] == "done"
    capsys.readouterr()
    assert tiny(experiments) == 0
    assert "nothing to measure" in capsys.readouterr().out


def test_a_killed_runner_keeps_what_was_finished() -> None:
    code = "import sys; from tests.support import gpu_experiments; sys.exit(gpu_experiments.main())"
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    log = Path(".gpu-truth/tiny/B.log")
    deadline = time.monotonic() + 60
    while not (Path(".gpu-truth/tiny/A.json").exists() and log.exists() and log.read_text(encoding="utf-8")):
        assert time.monotonic() < deadline and runner.poll() is None
        time.sleep(0.05)
    runner.kill()
    runner.wait()
    assert result("A")["status"] == "done"
    assert not Path(".gpu-truth/tiny/B.json").exists()
    begun = result("A")["started"]
    assert tiny([fake("A", quick), fake("B", quick)]) == 0
    assert result("A")["started"] == begun and result("B")["status"] == "done"


def test_order_of_what_is_missing() -> None:
    never, changed, elsewhere, done = (fake(name, quick) for name in "ABCD")
    store = gpu_truth.ResultStore([Path("kept")])
    for experiment, card, version in [(changed, CARD, 0), (elsewhere, "NVIDIA H200", 1), (done, CARD, 1)]:
        store.write(
            {"id": experiment.id, "version": version, "digest": experiment.digest, "card": card, "status": "done"}
            | {"started": "2026-11-27T00:00:00"}
        )
    experiments = [done, elsewhere, changed, never]
    again = gpu_truth.ResultStore([Path("kept")])
    assert again.pending(experiments, CARD, set(), again=False) == [never, changed, elsewhere]
    assert len(again.pending(experiments, CARD, set(), again=True)) == 4


def test_a_failure_keeps_the_last_measurement() -> None:
    assert tiny([fake("A", quick)]) == 0
    assert tiny([replace(fake("A", crash), version=2)]) == 1
    assert result("A")["last"]["numbers"]["ratio"] == 0.5


def test_a_budget_too_small_begins_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny([fake("A", quick)], "--budget", "21") == 0
    assert "not begun" in capsys.readouterr().out
    assert not Path(".gpu-truth/tiny/A.json").exists()


def test_merge_takes_the_newest() -> None:
    assert tiny([fake("A", quick)], "--out", "one") == 0
    files = ["one/truth-tiny.json"]
    Path(".gpu-truth").rename("elsewhere")
    assert gpu_truth.main(["--merge", *files, "--out", "two"], []) == 0
    assert result("A", "two/tiny") == result("A", "one/tiny")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--only", "T99"], "T99"),
        (["--budget", "soon"], "'soon'"),
        (["--budget", "-3"], "'-3'"),
        (["--out", "file"], "file can't be written"),
        (["--merge", "broken.json"], "broken.json is no JSON"),
        (["--merge", "other.json"], "other.json is no result"),
        (["--merge", "absent.json"], "absent.json can't be read"),
        (["--sideways"], "--sideways"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("", encoding="utf-8")
    Path("broken.json").write_text("{", encoding="utf-8")
    Path("other.json").write_text('[{"id": "T1"}]', encoding="utf-8")
    assert tiny([fake("A", quick)], *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert expected in err


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_truth, "card_name", lambda: None)
    assert gpu_truth.main(["--out", "results"], [fake("A", quick)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no GPU" in err and "--tiny" in err


def test_checks_by_path_and_range() -> None:
    numbers = {"a": {"b": 1.01}, "c": 3}
    wants = {"a.b": "0.98 to 1.02", "a": "<= 1", "c": "== 3", "absent": ">= 1"}
    assert [c["ok"] for c in checks_of(wants, numbers)] == [True, None, True, None]


def test_every_experiment_names_paths_that_exist() -> None:
    for experiment in all_experiments():
        assert all((ROOT / path).exists() for path in experiment.paths), experiment.id
        assert experiment.predicted and experiment.question.endswith("?")


def test_model_flops_by_formula() -> None:
    hidden, sequence = 4096, 4096
    whole, causal = (block_flops(hidden, sequence, name) for name in ("whole, 3 x", "causal, 3.5 x"))
    total = sum(whole[op] for op in "FBW")
    assert (
        total == 72 * sequence * hidden**2 + 12 * sequence**2 * hidden
    )  # Narayanan et al. 2021, without the vocabulary
    assert whole["F"] - causal["F"] == 2 * sequence**2 * hidden
    assert causal["B"] - 24 * sequence * hidden**2 == 2.5 * 2 * sequence**2 * hidden


def test_cuts_without_ortools_are_those_with_it() -> None:
    """Random networks: the source's side of the smallest minimum cut."""
    from ortools.graph.python import max_flow

    spec = importlib.util.spec_from_file_location("cuts", WITHOUT_ORTOOLS / "ortools/graph/python/max_flow.py")
    assert spec is not None and spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    rng = random.Random(0)
    for _ in range(100):
        nodes = rng.randint(2, 12)
        arcs = [(rng.randrange(nodes), rng.randrange(nodes), rng.randint(0, 5)) for _ in range(rng.randint(1, 40))]
        arcs = [(0, nodes - 1, 1), *((a, b, c) for a, b, c in arcs if a != b)]
        sides = []
        for network in (own.SimpleMaxFlow(), max_flow.SimpleMaxFlow()):
            network.add_arcs_with_capacity(*map(np.array, zip(*arcs, strict=True)))
            assert network.solve(0, nodes - 1) == network.OPTIMAL
            sides.append(sorted(network.get_source_side_min_cut()))
        assert sides[0] == sides[1]


def test_experiments_are_ranked_and_fit_into_half_an_hour() -> None:
    experiments = all_experiments()
    assert [e.id for e in experiments] == RANKING
    first = experiments[: RANKING.index("T7") + 1]
    assert sum(e.estimate_s for e in first) <= 22 * 60
    assert all(e.estimate_s <= 180 for e in experiments)


def test_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert here.lacks_module("json") == "" and "no_such_module" in here.lacks_module("no_such_module")
    assert here.lacks_program(sys.executable) == "" and "no-such-program" in here.lacks_program("no-such-program")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "GPU" in here.lacks_gpu()
    monkeypatch.delenv("JAX_PLATFORMS")
    assert here.lacks_gpu() == ""
    assert here.cannot_ask("why")["note"] == "cannot be asked here: why"


def test_ranks_bits_and_flags_compared() -> None:
    assert planned.kendall([1, 2, 3], [10, 20, 30]) == 1
    assert planned.kendall([1, 2, 3], [30, 20, 10]) == -1
    assert planned.kendall([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
    assert processes.differing({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == 2
    flags = "--a=1 --xla_gpu_dump_autotune_results_to=x.txt --xla_gpu_load_autotune_results_from=x.txt --b"
    assert correctness.without_autotuning(flags) == "--a=1 --b"


def test_no_experiment_needs_ortools_or_git() -> None:
    code = (
        "import sys; from scripts.gpu_experiments.registry import all_experiments, digest_of; all_experiments();"
        "assert not {'ortools', 'jax', 'torch', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


@pytest.fixture
def without_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.gpu_experiments.card import measure_card

    monkeypatch.setattr(gpu_truth, "measure_card", measure_card)
    monkeypatch.setattr(gpu_truth, "ForkServer", ForkServer)


def test_every_experiment_runs_at_toy_size(
    without_fakes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Found before OR-Tools, which the machine of a card has not.
    monkeypatch.setenv("PYTHONPATH", str(WITHOUT_ORTOOLS))
    experiments = all_experiments()
    assert tiny(experiments, "--budget", "3000") == 0, capsys.readouterr().out
    for experiment in experiments:
        measured = result(experiment.id)
        assert measured["status"] in ("done", "skipped"), experiment.id
        if measured["status"] == "done":
            # Toy sizes leave out sizes and schedules, but no number that is wanted of them.
            names = {check["name"].rpartition(".")[2] for check in measured["checks"]} - ALLOCATORS
            assert names == {c["name"].rpartition(".")[2] for c in measured["checks"] if c["value"] is not None}
    capsys.readouterr()
    assert tiny(experiments) == 0
    assert "nothing to measure" in capsys.readouterr().out


def test_tables_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = json.loads((ROOT / "scripts/results/gpu-h200.json").read_text(encoding="utf-8"))
    lines = results_table.gpu_table([history]).splitlines()
    for head in (k for k, line in enumerate(lines) if line.startswith("|---")):
        assert lines[head - 1].count("|") == lines[head].count("|") == lines[head + 1].count("|")
    many = replace(fake("T18", composed), want={})
    assert tiny([fake("A", quick), fake("B", crash), many], "--out", "gpu") == 1
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    table = results_table.truth_table()
    assert "| tiny | A: what does A do? | ratio | 0.5 | <= 0.6 | yes |" in table
    assert "failed" in table
    assert "T18: what does T18 do? | measured, nothing wanted |" in table
    assert "| 64 of them, zb-h1, recompute full | 1200 | 400 | 25.0% |" in table
    assert "| measured: theirs | 1602 | 719 | – |" in table
