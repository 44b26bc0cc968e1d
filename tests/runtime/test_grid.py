"""Data parallelism over several processes: grids of rows and columns compute the bits of one process."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.axes import ONE_SHARD, RankMesh
from jaxpipe.errors import LOST, AgreedError, RunError
from jaxpipe.runtime.processes import grid_columns
from jaxpipe.train.checkpoint import CheckpointStore, read_manifest
from jaxpipe.train.checkpoints.leaves import Fragment
from jaxpipe.train.config import load_config
from tests.runtime.test_divided import assert_same_bits, assert_same_run, launch, run
from tests.support import train_runs
from tests.support.checkpoint_cases import assert_same
from tests.support.forks import start_python
from tests.support.processes import free_port
from tests.support.train_runs import config, settings, write_text
from tests.train.test_graph_runs import TOWERS

ZERO = {
    "ranks": 2, "schedule": "zb-1p", "dp": 2, "zero1": True, "dtype": "bfloat16", "dropout": 0.1, "tied": False,
}  # fmt: skip
PLAIN = {"ranks": 2, "schedule": "1f1b", "dp": 2}
V_SHAPED = {"ranks": 2, "schedule": "v-half", "dp": 2, "dropout": 0.1}
OFFLOADED = {"ranks": 2, "schedule": "po-f", "dp": 2, "tp": 2, "zero1": True}
TENSOR = {"ranks": 2, "schedule": "stp", "tp": 2, "dropout": 0.1}
CONTEXT = {"ranks": 2, "schedule": "zb-1p", "cp": 2}
EXPERTS = {"ranks": 2, "layers": 2, "schedule": "zb-1p", "dp": 2, "ep": 2, "dropout": 0.1, "zero1": True}
MANY: list[dict[str, Any]] = [
    {"ranks": 2, "dp": 4, "size": 4, "schedule": "1f1b", "dropout": 0.1},
    {"ranks": 2, "dp": 4, "size": 4, "schedule": "v-zb", "dtype": "bfloat16"},
    {"ranks": 2, "dp": 4, "size": 4, "schedule": "po-f", "zero1": True},
    {"ranks": 2, "dp": 4, "size": 4, "schedule": "v-half", "dropout": 0.1, "dtype": "bfloat16"},
    {"ranks": 2, "dp": 2, "schedule": "stp", "tp": 2},
    {"ranks": 4, "dp": 2, "layers": 8, "schedule": "zb-1p", "zero1": True, "dropout": 0.1},
    {"ranks": 4, "dp": 2, "layers": 8, "schedule": "v-zb", "zero1": True, "dtype": "bfloat16"},
]

WIDE: list[dict[str, Any]] = [
    {"ranks": 2, "dp": 4, "size": 4, "schedule": "1f1b", "two_losses": True, "dropout": 0.1},
    {"ranks": 4, "dp": 2, "schedule": "zb-1p", "zero1": True, "two_losses": True, "dropout": 0.1},
    {"ranks": 2, "dp": 4, "size": 4, "schedule": "stp", "tp": 2},
    {"ranks": 4, "dp": 2, "layers": 8, "schedule": "stp", "tp": 2, "zero1": True, "dtype": "bfloat16"},
]


def in_columns(cases: list[dict[str, Any]], columns: int) -> list[dict[str, Any]]:
    return [{**case, "columns": columns} for case in cases]


def test_dp_over_two_processes_has_the_bits_of_one(tmp_path: Path) -> None:
    assert_same_bits(in_columns([{**ZERO, "saved": str(tmp_path)}, PLAIN], 2), 2)
    one, two = (CheckpointStore(tmp_path / number).load() for number in ("1", "2"))
    assert_same((two.params, two.optimizer), (one.params, one.optimizer))
    assert_equal_shares(tmp_path / "2", 2)


@pytest.mark.soak
@pytest.mark.parametrize("options", [{"zero1": True, "dtype": "bfloat16"}, {"dp": 2, "tp": 2, "zero1": True}, {}])
def test_any_grid_goes_on_from_the_checkpoint_of_any_other(tmp_path: Path, options: dict[str, Any]) -> None:
    case = {"ranks": 2, "schedule": "1f1b", "dp": 4, "size": 4, **options}
    grids = [(1, 1), (2, 2), (4, 2), (2, 1), (1, 1)]
    (single,) = run(1, [{**case, "folder": str(tmp_path / "one")}] * len(grids))
    for number, columns in grids:
        several = {**case, "folder": str(tmp_path / "several"), **({"columns": columns} if columns > 1 else {})}
        ((digests, *_), *_) = run(number, [several])
        if columns > 1:
            assert_equal_shares(tmp_path / "several", columns)
    assert digests == single[-1]


@pytest.mark.soak
def test_a_run_killed_on_any_grid_goes_on_on_another(tmp_path: Path) -> None:
    rng, text, parts = random.Random(0), write_text(tmp_path / "text"), tmp_path / "parts"
    overrides = [
        "pipeline.schedule=zb-1p", "pipeline.dp=2", "pipeline.sharding.zero1=true", "run.dtype=bfloat16", "run.steps=60",
        "run.checkpoint_every=1", "run.eval_every=0", "run.log_every=7", "run.machine.platform=cpu",
    ]  # fmt: skip
    for _ in range(6):
        number, columns = rng.choice([(2, 2), (4, 2), (2, 1)])
        least = newest_step(parts)
        child = launch(number, [*settings(text, parts, *overrides), f"run.machine.columns={columns}"])
        while newest_step(parts) < least + 2 and child.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.6))
        pids = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        assert len(pids) == number, child.communicate()
        os.kill(int(rng.choice(pids)), signal.SIGKILL)
        child.communicate()
        assert child.returncode == LOST
    train_runs.run(config(text, parts, *overrides))
    train_runs.run(config(text, tmp_path / "whole", *overrides))
    assert_same_run(tmp_path / "whole", parts, 60)


def newest_step(out_dir: Path) -> int:
    return max((int(path.name) for path in (out_dir / "checkpoints").glob("[0-9]" * 8)), default=0)


def assert_equal_shares(directory: Path, columns: int) -> None:
    """Require that the columns of each row have written as many bytes of arrays of the newest checkpoint."""
    sizes = Counter[int]()
    for leaf in (leaf for leaves in read_manifest(directory).leaves.values() for leaf in leaves):
        for piece in leaf.pieces:
            assert piece.part is not None
            sizes[piece.part] += math.prod(leaf.stored_shape(piece)) * leaf.numpy_dtype.itemsize
    rows = [[sizes[part] for part in range(first, first + columns)] for first in range(0, len(sizes), columns)]
    assert all(max(row) <= 1.01 * min(row) for row in rows), rows


@pytest.mark.soak
def test_more_schedules_with_dp_over_two_processes_have_the_bits_of_one() -> None:
    assert_same_bits(in_columns([V_SHAPED, OFFLOADED, {**V_SHAPED, "schedule": "stp", "tp": 2}], 2), 2)


def test_tp_over_two_processes_has_the_bits_of_one() -> None:
    assert_same_bits(in_columns([TENSOR], 2), 2)


def test_experts_over_two_processes_have_the_bits_of_one() -> None:
    assert_same_bits(in_columns([EXPERTS], 2), 2)


@pytest.mark.soak
@pytest.mark.parametrize(("number", "columns"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_experts_on_any_grid_have_the_bits_of_one_process(number: int, columns: int) -> None:
    wide = {**EXPERTS, "dp": 4, "size": 4, "dtype": "bfloat16"}
    cases = [{**wide, "schedule": "v-zb", "layers": 4}, {**wide, "ep": 4, "zero1": False}]
    cases += [{**EXPERTS, "schedule": "stp", "layers": 4, "tp": 2}] if columns < 4 else []
    assert_same_bits([{**case, "columns": columns} for case in cases], number)


@pytest.mark.soak
def test_cp_over_two_processes_has_the_bits_of_one() -> None:
    assert_same_bits(in_columns([CONTEXT, {**CONTEXT, "zero1": True, "dp": 2}], 2), 2)


@pytest.mark.soak
def test_one_process_a_device_has_the_bits_of_one() -> None:
    assert_same_bits(in_columns([{**TENSOR, "dp": 2, "zero1": True}], 4), 4)


@pytest.mark.soak
@pytest.mark.parametrize(("number", "columns"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["many", "wide"])
def test_any_grid_has_the_bits_of_one_process(number: int, columns: int, kind: str) -> None:
    """``wide``: with more devices than this process has, two losses and tp of stp."""
    fitting = [case for case in (WIDE if kind == "wide" else MANY) if number // columns <= case["ranks"]]
    cases = [case for case in fitting if case["dp"] * (case.get("tp", 1) if kind == "wide" else 1) % columns == 0]
    assert_same_bits([{**case, "columns": columns} for case in cases], number)


@pytest.mark.soak
def test_towers_in_columns_train_what_one_process_does(tmp_path: Path) -> None:
    file = tmp_path / "towers.toml"
    file.write_text(TOWERS, encoding="utf-8")
    overrides = ["pipeline.dp=2", "pipeline.zero1=true", "run.steps=2"]
    several = [f"run.out_dir={tmp_path / 'parts'}", "run.machine.columns=2", "run.platform=cpu"]
    child = launch(2, ["--config", str(file), *overrides, *several])
    _, err = child.communicate()
    assert child.returncode == 0, err
    train_runs.run(load_config(file, [*overrides, f"run.out_dir={tmp_path / 'whole'}"]))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("one", "other", "overrides"),
    [
        ("F0.1", "F1.0", ["pipeline.tp=2"]),
        ("R1.0", "R0.0", ["pipeline.dp=2", "pipeline.sharding.reduction=fast", "model.options.tied=false"]),
    ],
)
def test_collectives_in_two_orders_hang_and_are_named(
    one: str, other: str, overrides: list[str], tmp_path: Path
) -> None:
    """Process 1 exchanges a psum of two ranks by hand, once both have agreed on their orders."""
    arguments = settings(
        write_text(tmp_path / "text"), tmp_path / "run", *overrides, "pipeline.microbatches=2", "run.batch=4", "run.steps=9",
        "run.checkpoint_every=1", "run.eval_every=0", "run.machine.columns=2", "run.watchdog_s=1", "run.platform=cpu",
    )  # fmt: skip
    code = (
        "import sys; from jaxpipe.cli import main; from tests.support import divided_run; "
        f"divided_run.wait_for_dispatches(); sys.argv.pop(1) == '1' and divided_run.put_behind({one!r}, {other!r}); "
        "sys.exit(main())"
    )
    group = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"]
    children = [start_python(code, str(process), "train", *group, str(process), *arguments) for process in range(2)]
    try:
        errors = [child.communicate(timeout=300)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [RunError.exit_code] * 2
    line = r"jaxpipe: process \d \(host \S+\) failed: step \d has not ended after .*: rank \d, action \w+\.\d \("
    assert all(re.match(line, error.splitlines()[-1]) for error in errors), errors


@pytest.mark.soak
def test_steps_that_begin_early_on_a_grid_have_the_bits_of_one_process() -> None:
    cases = [{**case, "ahead": True} for case in (ZERO, PLAIN, V_SHAPED, EXPERTS)]
    assert_same_bits(in_columns(cases, 2), 2, 4)


def test_grids_are_as_wide_as_they_must_be_or_as_asked() -> None:
    meshes = [RankMesh(dp=dp, cp=cp, tp=tp) for dp in range(1, 5) for cp in (1, 2) for tp in (1, 2, 4)]
    for number, ranks, mesh, columns in product(range(1, 9), range(1, 5), meshes, range(5)):
        try:
            actual = grid_columns(number, ranks, mesh, columns)
        except AgreedError:
            continue
        assert number % actual == 0 and number // actual <= ranks
        assert mesh.column(actual).num_devices * actual == mesh.num_devices
        assert number == 1 or columns in (0, actual)
    assert grid_columns(6, 3, RankMesh(dp=4)) == 2
    assert grid_columns(4, 8, ONE_SHARD) == 1
    assert grid_columns(2, 4, RankMesh(dp=4), 2) == 2
    assert grid_columns(16, 2, RankMesh(dp=2, tp=4)) == 8


@pytest.mark.parametrize(
    ("number", "ranks", "dp", "columns", "words"),
    [
        (7, 3, 2, 0, "start 6,"),
        (4, 2, 3, 0, "start 2 or 6,"),
        (3, 3, 2, 2, "no multiple of the 2 columns"),
        (9, 4, 1, 0, "9 processes for 4 pipeline ranks: .* start 4,"),
    ],
)
def test_processes_that_make_no_grid_are_refused(number: int, ranks: int, dp: int, columns: int, words: str) -> None:
    with pytest.raises(AgreedError, match=words):
        grid_columns(number, ranks, RankMesh(dp=dp), columns)


def test_a_part_of_a_fragment_is_a_part_of_its_elements() -> None:
    elements = np.arange(100)
    ranges = ((3, 10), (20, 21), (50, 73))
    fragment = Fragment(np.concatenate([elements[a:b] for a, b in ranges]), ranges, (100,))
    for n in range(1, 40):
        parts = [fragment.part(k, n) for k in range(n)]
        for part in parts:
            values = [elements[a:b] for a, b in part.ranges]
            assert part.values.tolist() == (np.concatenate(values).tolist() if values else [])
        assert [x for part in parts for x in part.values.tolist()] == fragment.values.tolist()
