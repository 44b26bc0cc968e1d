"""A checkpoint knows nothing of ranks and devices: saved under one (pp, tp, dp, schedule, ZeRO-1), loaded under any other, the
parameters and the optimizer state are the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint import CheckpointStore, load_params
from jaxpipe.train.step import TrainStep
from tests.support.checkpoint_cases import assert_same, save_in_columns, seen_in_column
from tests.support.parallel_cases import Case, optimizer, params_for, pipeline

pytestmark = pytest.mark.usefixtures("one_build")

MESHES = [
    Case("gpt-tied", 1, 1, 1, "1f1b", dtype="bfloat16"),
    Case("gpt-tied", 2, 2, 2, "v-zb", sequence=True, zero1=True, dtype="bfloat16"),
    Case("gpt-tied", 1, 1, 3, "1f1b", zero1=True, dtype="float32"),
    Case("gpt-tied", 4, 2, 1, "zb-h1", dtype="float32"),
    Case("gpt-tied", 1, 8, 1, "1f1b", sequence=True, dtype="float32"),
    Case("gpt-tied", 1, 2, 4, "gpipe", zero1=True, dtype="float32"),
    Case("gpt-tied", 2, 1, 4, "interleaved-1f1b", zero1=True, dtype="bfloat16"),
    Case("gpt-tied", 2, 4, 1, "v-half", dtype="bfloat16"),
]
QUICK = [(1, 2), (2, 1), (0, 1), (1, 0), (2, 3), (3, 2)]
PAIRS = [
    pytest.param(a, b, marks=() if (a, b) in QUICK else pytest.mark.soak, id=f"{MESHES[a]} to {MESHES[b]}")
    for a, b in itertools.product(range(len(MESHES)), repeat=2)
]


@cache
def _step(mesh: int) -> TrainStep:
    case = MESHES[mesh]
    # 24 rows are divisible by 3 and 4 data-parallel devices
    return TrainStep(pipeline(case, rows=24), optimizer(), zero1=case.zero1)


@cache
def _full_state() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return parameters and optimizer state by layer, every element another number (but for counts, of which each layer has
    the same); float32, as masters are."""
    rng = np.random.default_rng(0)

    def filled(leaf: Any) -> np.ndarray:
        array: np.ndarray = rng.standard_normal(leaf.shape) if leaf.dtype != np.int32 else np.array(42)
        return array.astype(leaf.dtype)

    params = jax.tree.map(filled, dict(params_for(MESHES[2])))
    return params, {name: jax.tree.map(filled, optimizer().init({name: tree})) for name, tree in params.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def _saved(folder: Path, mesh: int) -> CheckpointStore:
    """Return the checkpoint that a run on this mesh saves, written once."""
    store = CheckpointStore(folder / str(mesh))
    if not store.steps():
        step = _step(mesh)
        params, state = step.by_layer(step.init(*_full_state(), step=7))
        store.save(7, params, state, {}, wait=True)
    return store


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_saved_under_one_mesh_and_resumed_under_another(saved: int, resumed: int, folder: Path) -> None:
    params, state = _full_state()
    loaded = _saved(folder, saved).load(like={"params": params, "optimizer": state})
    step = _step(resumed)
    resumed_state = step.init(loaded.params, loaded.optimizer, step=loaded.step)
    assert resumed_state.step == 7
    got_params, got_state = jax.device_get(step.by_layer(resumed_state))
    assert_same(got_params, dict(params))
    assert_same({name: got_state[name] for name in state}, dict(state))


def test_columns_save_their_chunks_and_nothing_is_gathered(folder: Path) -> None:
    step, (params, optimizer_state) = _step(1), _full_state()
    state = step.init(params, optimizer_state, step=7)
    trees = []
    for column in range(2):
        master, moments = seen_in_column((state.master, state.optimizer), column, 2)
        own_params, own_state = step.by_layer(replace(state, master=master, optimizer=moments))
        trees.append({"params": own_params, "optimizer": own_state})
    sizes = save_in_columns(folder / "columns" / "00000007", 7, trees)
    assert max(sizes) < 1.02 * min(sizes)
    loaded = CheckpointStore(folder / "columns").load(like={"params": params, "optimizer": optimizer_state})
    assert_same((loaded.params, loaded.optimizer), (dict(params), dict(optimizer_state)))


def test_one_device_loads_what_a_mesh_saved(folder: Path) -> None:
    _saved(folder, 1).close()
    assert_same(load_params(folder / "1", like=_full_state()[0]), dict(_full_state()[0]))


def test_state_of_another_optimizer_is_refused_in_one_line() -> None:
    params, state = _full_state()
    halved = {
        name: jax.tree.map(lambda a: a[..., : max(1, a.shape[-1] // 2)] if a.ndim else a, tree)
        for name, tree in state.items()
    }
    for other_state in (halved, {name: tree[:1] for name, tree in state.items()}):
        with pytest.raises(CheckpointError, match=r"optimizer state of layer \w+ has") as caught:
            _step(1).init(params, other_state)
        assert "\n" not in str(caught.value)
