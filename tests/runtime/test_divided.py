"""Ranks divided between processes: the bits of one process."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.runtime.processes import SingleProcess
from jaxpipe.schedule import CostProfile, generate, write_schedule
from jaxpipe.schedule.passes.braid import split_backwards
from jaxpipe.schedule.placement import one_to_one
from jaxpipe.search.solve import Options, SolveTask, solve
from jaxpipe.train.config import load_config
from jaxpipe.train.metrics import read_metrics
from tests.runtime.test_processes import free_port
from tests.support import divided_run, hub_folders, train_runs
from tests.support.forks import start_python
from tests.support.paths import ROOT
from tests.support.train_runs import config, deterministic, final, settings, write_text
from tests.train.test_replan import serial

SHARED = ("mean loss", "norm", "held out")
"""Names of the digests that every process has."""


def run(number: int, cases: list[dict[str, Any]]) -> list[list[dict[str, str]]]:
    """Return the digests that each of ``number`` processes has in each case; one process is this one, where it has as many
    devices as they need."""
    most = max(math.prod(case.get(axis, 1) for axis in ("ranks", "dp", "cp", "tp")) for case in cases)
    if number == 1 and most <= jax.device_count():
        return [[divided_run.steps(SingleProcess(), **case) for case in cases]]
    port = free_port()
    code = "import json, sys; from tests.support import divided_run; divided_run.main(*map(json.loads, sys.argv[1:]))"
    children = [start_python(code, *map(str, (port, number, process)), json.dumps(cases)) for process in range(number)]
    try:
        outputs = [child.communicate() for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * number, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def assert_same_bits(
    cases: list[dict[str, Any]], *numbers: int, extra_cases: Sequence[dict[str, Any]] = ()
) -> list[list[dict[str, str]]]:
    """Require that any number of processes has the bits of one. Returns the digests of each of the last number of processes
    in ``extra_cases``."""
    (single,), several = run(1, cases), [run(number, [*cases, *extra_cases]) for number in numbers]
    for (k, case), parts in product(enumerate(cases), several):
        layers: dict[str, str] = {}
        single[k].pop("costs", "")
        assert len({part[k].pop("costs") for part in parts}) == 1, "one profile for all"
        for digests in (part[k] for part in parts):
            assert {name: digests.pop(name) for name in SHARED} == {name: single[k][name] for name in SHARED}, case
            twice = layers.keys() & digests.keys()
            assert not twice or case.get("columns"), "a layer is one process's"
            assert {name: layers[name] for name in twice} == {name: digests[name] for name in twice}, case
            layers |= digests
        assert layers == {name: digest for name, digest in single[k].items() if name not in SHARED}, case
    return [part[len(cases) :] for part in parts]


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    """A V of four stages: rank 0 has both ends; tied embeddings, dropout, bfloat16, ZeRO-1 over dp 2, clipping; by costs
    that each process measures of its own stages. Then steps that begin early, some in vain, and a run of which every step is
    recorded: a schedule that one process can't build is left, the next one adopted, and taken back."""
    case = {"schedule": "v-zb", "ranks": 2, "layers": 2, "dp": 2, "zero1": True, "dtype": "bfloat16", "dropout": 0.2}
    write_schedule(serial(split_backwards(generate("gpipe", 2, 4))), tmp_path / "serial.sched")
    text = write_text(tmp_path / "text")
    run_overrides = (
        f"pipeline.schedule={tmp_path / 'serial.sched'}",
        "pipeline.recompute=fused",
        "run.log_every=1",
        "run.steps=12",
    )
    overrides = [
        *settings(text, tmp_path / "parts", *run_overrides),
        "replan.enabled=true",
        "replan.min_gain=0",
        "replan.memory_limit=4",
        "run.platform=cpu",
    ]
    replanned = {"overrides": overrides, "finds": ["gpipe", "zb-h1"]}
    cases = [{**case, "measured": True}, {"schedule": "v-zb", "ranks": 2, "layers": 1, "ahead": True}]
    ((first,), (second,)) = assert_same_bits(cases, 2, extra_cases=[replanned])
    assert not second["printed"]
    for line in (
        "step 2: re-planning: looking for a better schedule (up to 1m00s, 4 activations)",
        "step 5: schedule serial (makespan ",
        "step 9: schedule solved-1 -> serial again: it was 100.0% more measured",
    ):
        assert f"\n{line}" in first["printed"]
    slow = re.findall(
        r"\nstep (\d+): slow: process (\d) \(host \S+\): .* times the median of 2 processes", first["printed"]
    )
    assert slow[:2] == [("3", "0"), ("3", "1")]
    assert re.search(r"refused: process 1 \(host \S+\): there is no room\n", first["printed"])
    train_runs.run(config(text, tmp_path / "whole", *run_overrides))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 12)
    records = [record for record in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "loss" in record]
    assert [record["schedule"] for record in records] == ["serial"] * 5 + ["solved-1"] * 4 + ["serial"] * 3
    assert all(0 < record["bubble_measured"] < 1 and record["replay_ratio"] > 0 for record in records)
    assert all(record["clock_error_s"] > 0 for record in records)
    assert (tmp_path / "parts" / "pictures" / "timeline.svg").exists()


ZERO1 = {"dp": 2, "zero1": True, "dtype": "bfloat16", "dropout": 0.2}
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "1f1b", "dp": 2, "dropout": 0.1, "recompute": "full"},
    {"schedule": "1f1b", "tied": False, **ZERO1},
    {"schedule": "zb-1p", "dtype": "bfloat16"},
    {"schedule": "zb-2p", "tied": False, "dropout": 0.1},
    {"schedule": "v-zb", "layers": 6, **ZERO1},
    {"schedule": "v-half", "layers": 6, "tied": False},
    {"schedule": "interleaved-1f1b", "chunks": 2, "layers": 6, "dropout": 0.1},
    {"schedule": "gis", "layers": 6, "tied": False, "dtype": "bfloat16"},
    {"schedule": "po-f", "layers": 6, "tied": False},
    {"schedule": "stp", "tp": 2, "layers": 6},
    {"schedule": "1f1b", "cp": 2, "zero1": True, "dropout": 0.1},
    {"schedule": "chimera", "dp": 2, "zero1": True, "dtype": "bfloat16", "dropout": 0.1},
]


def solved() -> str:
    """Return the text of what the solver answers."""
    task = SolveTask(one_to_one(4), 4, CostProfile.uniform(4, f=3, b=4, w=2), 3.0)
    return str(solve(task, Options(time_limit_s=2, reproducible=True)).schedule)


@pytest.mark.soak
def test_schedules_in_several_processes() -> None:
    cases = [*SCHEDULES, {"schedule": solved(), "tied": False}]
    assert_same_bits([{"ranks": 4, "measured": k % 2 == 0, **case} for k, case in enumerate(cases)], 2, 4)


@pytest.mark.soak
@pytest.mark.parametrize("ahead", [False, True])
def test_device_put_between_two_processes(ahead: bool) -> None:
    """``run.transport = "nccl"``, over TCP: both sides' calls are matched by their order."""
    assert_same_bits([{"ranks": 4, **case, "transport": "nccl", "ahead": ahead} for case in SCHEDULES], 2)


@pytest.mark.soak
def test_steps_that_begin_early_in_four_processes() -> None:
    assert_same_bits([{"ranks": 4, **case, "ahead": True} for case in SCHEDULES], 4)


@pytest.mark.soak
def test_any_number_goes_on_from_the_checkpoint_of_any_other(tmp_path: Path) -> None:
    case = {"schedule": "v-zb", "ranks": 4, "layers": 6, **ZERO1}
    one, several = ({**case, "folder": str(tmp_path / name)} for name in ("one", "several"))
    single = run(1, [one] * 3)[0][-1]
    for number in (1, 4, 2):
        digests = run(number, [several])
    assert {name: digest for (part,) in digests for name, digest in part.items()} == single


# -- runs -----------------------------------------------------------------------------------------------------------------


def launch(number: int, arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "jaxpipe", "launch", "local", "-n", str(number), "--", "train", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_same_run(one: Path, other: Path, step: int) -> None:
    metrics = [[{**record, "schedule": ""} for record in deterministic(folder)] for folder in (one, other)]
    assert metrics[0] == metrics[1]
    (first, *rest), (second, *other_leaves) = (jax.tree.flatten(final(folder, step)) for folder in (one, other))
    assert rest == other_leaves
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.usefixtures("one_build")
def test_a_run_goes_on_in_another_number_of_processes(tmp_path: Path) -> None:
    """Two processes, the launcher's, then this one: metrics, evaluations and the last checkpoint of a run in one."""
    text = write_text(tmp_path / "text")
    short = ("run.eval_every=2", "run.checkpoint_every=2", "run.log_every=2", "model.options.num_layers=1")
    overrides = ("pipeline.schedule=zb-1p", *short)
    train_runs.run(config(text, tmp_path / "whole", *overrides, "run.steps=4"))
    overrides = (*overrides, "pipeline.post_validation=on")
    child = launch(2, [*settings(text, tmp_path / "parts", *overrides, "run.steps=2"), "run.platform=cpu"])
    out, err = child.communicate()
    assert child.returncode == 0, err
    assert not err and out.count("step 2  held-out loss") == 1, "process 0 alone tells"
    train_runs.run(config(text, tmp_path / "parts", *overrides, "run.steps=4"))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 4)


@pytest.mark.soak
@pytest.mark.parametrize("pipe", ["pipeline.schedule=v-zb pipeline.chunks=2", "pipeline.tp=2"])
def test_processes_begin_with_a_folder_of_the_hub(pipe: str, tmp_path: Path) -> None:
    """Each with its own layers, tied ones too; the vocabulary is one that tp does not divide."""
    folder = hub_folders.write_folder(tmp_path / "given", "qwen2")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, hub_folders.V, 4000).astype(np.uint16))
    overrides = [
        f"run.init_from={folder}", "data.tokenizer=ids:37", f"data.path={tmp_path / 'ids.npy'}", "data.seq_len=24",
        "model.options.vocab_multiple=2", "pipeline.ranks=2", "pipeline.microbatches=2", "pipeline.split_backwards=never",
        "run.batch=4", "run.steps=3", "run.log_every=1", "run.eval_every=3", "run.platform=cpu", "optimizer.warmup_steps=1",
        *pipe.split(),
    ]  # fmt: skip
    train_runs.run(load_config(None, [*overrides, f"run.out_dir={tmp_path / 'whole'}"]))
    child = launch(2, [*overrides, f"run.out_dir={tmp_path / 'parts'}"])
    _, err = child.communicate()
    assert child.returncode == 0, err
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 3)


@pytest.mark.soak
@pytest.mark.parametrize("number", [2, 4])
def test_a_signal_to_any_process_stops_all_after_the_same_step(number: int, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    overrides = (
        "pipeline.ranks=4",
        "model.options.num_layers=4",
        "run.log_every=1",
        "run.eval_every=0",
        "run.steps=30",
    )
    train_runs.run(config(text, tmp_path / "whole", *overrides))
    arguments = [*settings(text, tmp_path / "parts", *overrides), "run.platform=cpu"]
    child = launch(number, arguments)
    train_runs.read_until(child, "step 3")
    ours = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(ours[-1]), signal.SIGTERM)
    child.communicate()
    assert child.returncode == 75
    second_run = launch(2, arguments)
    assert second_run.communicate() and second_run.returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 30)


@pytest.mark.soak
@pytest.mark.parametrize("number", [2, 4])
def test_replanning_in_several_processes_changes_no_bit(number: int, tmp_path: Path) -> None:
    """The real solver replaces an order that any other beats."""
    write_schedule(serial(split_backwards(generate("gpipe", 4, 8))), tmp_path / "serial.sched")
    text = write_text(tmp_path / "text")
    overrides = (
        "pipeline.ranks=4",
        "pipeline.microbatches=8",
        "model.options.num_layers=8",
        "pipeline.recompute=fused",
    )
    overrides = (*overrides, f"pipeline.schedule={tmp_path / 'serial.sched'}", "run.log_every=2", "run.steps=60")
    train_runs.run(config(text, tmp_path / "whole", *overrides))
    replan = ("replan.enabled=true", "replan.min_gain=0.01", "replan.memory_limit=8", "replan.time_limit_s=2")
    child = launch(number, [*settings(text, tmp_path / "parts", *overrides, *replan), "run.platform=cpu"])
    out, err = child.communicate()
    assert child.returncode == 0, err
    assert not err
    assert re.search(r"\nstep \d+: schedule serial \(makespan .* -> solved-1 \(", out)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 60)
    assert {r["schedule"] for r in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "loss" in r} > {"serial"}
