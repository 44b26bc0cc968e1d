"""Checkpoints: what is loaded is what was saved, or an error says what is wrong and what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint import CheckpointStore, find, load_params, read_manifest
from jaxpipe.train.checkpoints.contents import SUMS
from jaxpipe.train.checkpoints.leaves import build_trees, take_snapshot
from tests.support.checkpoint_cases import (
    META,
    assert_same,
    make_optimizer,
    make_params,
    one_line,
    save_losses,
)

# What is loaded is what was saved.


def test_round_trip_with_structure(store: CheckpointStore) -> None:
    params = make_params()
    optimizer = make_optimizer(params)
    store.save(3, params, optimizer, META, eval_loss=2.5, wait=True)
    loaded = store.load(like={"params": params, "optimizer": optimizer})
    assert_same(loaded.params, params)
    assert_same(loaded.optimizer, optimizer)
    assert loaded.meta == META
    assert (loaded.step, loaded.eval_loss, loaded.path) == (3, 2.5, store.path(3))
    assert isinstance(loaded.params["embed"]["table"], jax.Array)  # placed where the leaf of `like` is


def test_round_trip_without_structure(store: CheckpointStore) -> None:
    params = make_params()
    store.save(3, params, make_optimizer(params), {}, wait=True)
    loaded = store.load(3)
    assert_same(loaded.params, params)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(loaded.params))
    assert loaded.optimizer["embed"][0]["mu"].keys() == {"table"}  # a named tuple comes back as a dictionary


def test_unusual_leaves(store: CheckpointStore) -> None:
    params = {
        "": {"a.b": np.ones(2), "a": {"b": np.zeros(2)}, "": np.ones((), np.bool_)},
        "integers": {3: np.uint8(9), 4: np.zeros(1)},
        "whole": np.asarray(np.arange(6).reshape(2, 3).T),  # not contiguous
        "empty": {"none": None, "zero": np.zeros((0, 3), ml_dtypes.bfloat16)},
        "numbers": [1, 2.5, True, 2**60],
        "small": {"f8": np.ones(3, ml_dtypes.float8_e4m3fn), "f16": np.full(2, np.nan, np.float16)},
    }
    store.save(0, params, {"count": 5}, {}, wait=True)
    assert_same(store.load(like={"params": params}).params, params)
    loaded = store.load()
    assert loaded.optimizer == {"count": 5}
    assert loaded.params["numbers"] == [1, 2.5, True, 2**60]
    assert [type(number) for number in loaded.params["numbers"]] == [int, float, bool, int]
    assert loaded.params["integers"][3] == 9


def test_nothing_to_store(store: CheckpointStore) -> None:
    store.save(0, {}, {}, {}, wait=True)
    loaded = store.load(like={"params": {}, "optimizer": {}})
    assert (loaded.params, loaded.optimizer) == ({}, {})


@given(
    st.dictionaries(
        st.text(max_size=5), st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=3), max_size=3
    )
)
def test_any_names_round_trip(names: dict[str, dict[str, int]]) -> None:
    """Whatever layers and keys are called, they stay apart in Orbax and come back."""
    params = {layer: {key: np.zeros(size) for key, size in pytree.items()} for layer, pytree in names.items()}
    snapshot = take_snapshot("params", params)
    assert len({leaf.storage_keys for leaf in snapshot.leaves}) == len(snapshot.leaves)
    assert_same(build_trees(snapshot.layers, snapshot.leaves, snapshot.arrays), params)


def test_extra_trees(store: CheckpointStore) -> None:
    params = make_params()
    extra = {"ema": make_params(1.0)["h.0"], "counts": {"tokens": np.int64(12)}}
    store.save(1, params, make_optimizer(params), {}, wait=True)
    store.save(2, params, make_optimizer(params), {}, extra=extra, wait=True)
    assert_same(store.load(2, like={"extra": extra}).extra, extra)
    assert_same(store.load(2).extra, extra)
    assert store.load(1).extra == {}
    assert_same(load_params(store.directory), params)
    with pytest.raises(CheckpointError, match="does not fit: extra: it has the layer ema, the model does not") as info:
        store.load(2, like={"extra": {"counts": extra["counts"]}})
    one_line(info)
    with pytest.raises(CheckpointError, match="does not fit: extra: it has no layer ema") as info:
        store.load(1, like={"extra": extra})
    one_line(info)


def test_save_copies_before_it_returns(store: CheckpointStore) -> None:
    array = np.zeros(1000)
    donated = jnp.zeros(1000)
    store.save(1, {"a": array, "b": donated}, {}, {})
    array[:] = 1.0
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated).block_until_ready()
    loaded = store.load(1)
    assert not loaded.params["a"].any()
    assert not loaded.params["b"].any()


def test_same_values_from_sharded_arrays(store: CheckpointStore) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    split = NamedSharding(mesh, PartitionSpec(None, "tp"))
    value = np.arange(32, dtype=np.float32).reshape(4, 8)
    params = {"h.0": {"w": jax.device_put(value, split)}}
    store.save(0, params, {}, {}, wait=True)
    assert store.load(like={"params": params}).params["h.0"]["w"].sharding == split
    loaded = store.load(sharding={"h.0": jax.devices()[5]}).params["h.0"]["w"]
    assert loaded.devices() == {jax.devices()[5]}
    np.testing.assert_array_equal(loaded, value)


def test_abstract_like(store: CheckpointStore) -> None:
    params = make_params()
    store.save(0, params, {}, {}, wait=True)
    abstract = jax.eval_shape(lambda: params)
    loaded = store.load(like={"params": abstract}, sharding=jax.devices()[2]).params
    assert_same(loaded, params)
    assert loaded["embed"]["table"].devices() == {jax.devices()[2]}


def test_parameters_alone(saved: Path) -> None:
    for path in (saved, saved / "00000020"):
        params = load_params(path)
        assert_same(params, make_params(20))
        assert {device for leaf in jax.tree.leaves(params) for device in leaf.devices()} == {jax.devices()[0]}
    older = load_params(saved, jax.devices()[3], step=10, like=make_params())
    assert_same(older, make_params(10))
    assert older["embed"]["table"].devices() == {jax.devices()[3]}


def test_ways_to_name_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run" / "checkpoints")
    shutil.copytree(saved / "00000010", tmp_path / "exported")
    assert find(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "00000020"
    assert find(tmp_path / "run", 10) == find(tmp_path / "run" / "checkpoints" / "00000010")
    assert_same(load_params(tmp_path / "exported"), make_params(10))
    with CheckpointStore(tmp_path / "losses") as store:
        save_losses(store, {1: 0.5, 2: 0.7})
    assert find(tmp_path / "losses", "best").name == "00000001"
    assert read_manifest(tmp_path / "losses", "best").eval_loss == 0.5
    with pytest.raises(CheckpointError, match="has an evaluation loss; name a step"):
        find(saved, "best")


def test_manifest_describes_the_parameters(saved: Path) -> None:
    manifest = read_manifest(saved)
    shapes = {leaf.name: (leaf.shape, leaf.dtype) for leaf in manifest.leaves["params"]}
    assert shapes["h.0/attention/q/k"] == ((3, 4), "float32")
    assert shapes["embed/table"] == ((3, 4), "bfloat16")
    assert manifest.layers["params"] == ("embed", "h.0", "dropout")
    assert (manifest.step, manifest.meta) == (20, META)


def test_checksums_are_those_of_sha256sum(saved: Path) -> None:
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("no sha256sum here")
    subprocess.run([tool, "-c", "--status", SUMS], cwd=saved / "00000020", check=True)


def test_a_global_mesh_changes_nothing(store: CheckpointStore) -> None:
    params = make_params()
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "tp"))):
        store.save(1, params, {}, {}, wait=True)
        assert_same(store.load(like={"params": params}).params, params)


def test_64_bit_needs_x64(store: CheckpointStore) -> None:
    store.save(1, {"a": np.ones(2)}, {}, {}, wait=True)
    assert store.load().params["a"].dtype == np.float64
    with pytest.raises(CheckpointError, match="JAX_ENABLE_X64") as info:
        load_params(store.directory)
    one_line(info)
    with jax.enable_x64(True):
        assert load_params(store.directory)["a"].dtype == jnp.float64


# Which checkpoints are kept.


def test_keeps_last_and_best(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: None, 5: 1.5, 6: 1.5}
    with CheckpointStore(tmp_path, keep_last=2) as store:
        save_losses(store, losses)
        assert store.steps() == (2, 5, 6)
        assert (store.latest(), store.best()) == (6, 2)
        store.save(7, {"a": np.float32(7)}, {}, {}, eval_loss=0.5, wait=True)
        assert store.steps() == (6, 7)
        assert store.best() == 7
        assert {path.name for path in tmp_path.iterdir()} == {"00000006", "00000007"}


def test_keeps_last_only(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=1, keep_best=False) as store:
        save_losses(store, {1: 0.1, 2: 5.0})
        assert store.steps() == (2,)
        assert store.best() == 2
    with CheckpointStore(tmp_path) as store:
        save_losses(store, {3: None})
    assert CheckpointStore(tmp_path).best() == 2


def test_keeps_several_of_the_best(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=1, keep_best=3) as store:
        save_losses(store, {1: 4.0, 2: 1.0, 3: 3.0, 4: float("inf"), 5: 2.0, 6: None, 7: 2.0})
        assert store.steps() == (2, 5, 7)
        save_losses(store, {8: 9.0})
        assert store.steps() == (2, 5, 7, 8)
    with pytest.raises(CheckpointError, match="keep_best is -1"):
        CheckpointStore(tmp_path, keep_best=-1)


def test_saving_without_pruning_keeps_everything(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=1, keep_best=0) as store:
        for step in (1, 2, 3):
            store.save(step, {}, {}, {}, prune=False)
        store.wait()
        assert store.steps() == (1, 2, 3)
        store.save(4, {}, {}, {}, wait=True)
        assert store.steps() == (4,)


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(1, {"a": np.float32(1)}, {}, {})
    store.save(1, {"a": np.float32(2)}, {}, {"final": True}, wait=True)
    assert store.steps() == (1,)
    assert store.load().params["a"] == 2
    assert store.load().meta == {"final": True}


def test_going_back_is_deliberate(store: CheckpointStore) -> None:
    save_losses(store, {10: None, 20: None, 30: None})
    with pytest.raises(CheckpointError, match=r"15.*\(30\).*discard_after") as info:
        store.save(15, {}, {}, {})
    one_line(info)
    lines = store.discard_after(10)
    assert lines == tuple(
        f"the checkpoint of step {step} was set aside as {store.path(step)}.superseded" for step in (20, 30)
    )
    save_losses(store, {15: None, 20: None})
    assert store.steps() == (10, 15, 20)
    (note,) = store.discard_after(15)
    assert note.endswith("/00000020.superseded-1")
    assert load_params(f"{store.path(30)}.superseded")["a"] == 30  # nothing is lost


def test_reading_makes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert (store.steps(), store.latest(), store.best(), store.latest_intact().step) == ((), None, None, None)
    assert not store.directory.exists()


def test_leftovers_are_ignored_and_removed(store: CheckpointStore) -> None:
    for name in ("00000099.tmp-123", "00000098.tmp-removed"):
        (store.directory / name / "params").mkdir(parents=True)
    assert store.latest() is None
    save_losses(store, {1: None})
    assert [path.name for path in store.directory.iterdir()] == ["00000001"]


# Other things that go wrong, each in one line.


def test_nothing_there(store: CheckpointStore, tmp_path: Path, saved: Path) -> None:
    for call in (store.load, lambda: load_params(store.directory), lambda: read_manifest(store.directory / "00000003")):
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* it does not exist") as info:
            call()
        one_line(info)
    with pytest.raises(CheckpointError, match="it is empty"):
        load_params(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15 in .* steps 10, 20"):
        CheckpointStore(saved).load(15)
    with pytest.raises(CheckpointError, match="steps 10, 20"):
        load_params(saved / "00000015")
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="can't be read"):
        load_params(tmp_path / "file")


def change(path: str, params: dict[str, Any]) -> dict[str, Any]:
    match path:
        case "layer missing":
            del params["embed"]
        case "layer added":
            params["h.1"] = {}
        case "shape":
            params["embed"]["table"] = jnp.zeros((5, 4), jnp.bfloat16)
        case "dtype":
            params["embed"]["table"] = jnp.zeros((3, 4), jnp.float16)
        case "leaf missing":
            del params["h.0"]["attention"]["b"]
        case "leaf added":
            params["h.0"]["attention"]["bias"] = jnp.zeros(3)
    return params


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("layer missing", "it has the layer embed, the model does not"),
        ("layer added", "it has no layer h.1"),
        ("shape", r"embed/table has shape \(3, 4\), the model wants \(5, 4\)"),
        ("dtype", "embed/table has dtype bfloat16, the model wants float16"),
        ("leaf missing", "it has h.0/attention/b, the model does not"),
        ("leaf added", "it has no h.0/attention/bias"),
    ],
)
def test_another_model(saved: Path, what: str, message: str) -> None:
    template = change(what, make_params())
    with pytest.raises(CheckpointError, match=f"does not fit: params: {message}; use the model") as info:
        CheckpointStore(saved).load(like={"params": template})
    one_line(info)
    with pytest.raises(CheckpointError, match=message):
        load_params(saved, like=template)


def test_a_very_different_model_is_summarised(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\(and 8 more\)") as info:
        CheckpointStore(saved).load(like={"params": {f"layer{i}": {} for i in range(9)}})
    assert len(one_line(info)) < 700


def test_another_optimizer(saved: Path) -> None:
    params = make_params()
    template = {layer: optax.sgd(0.1, momentum=0.9).init(tree) for layer, tree in params.items()}
    with pytest.raises(CheckpointError, match="does not fit: optimizer") as info:
        CheckpointStore(saved).load(like={"params": params, "optimizer": template})
    one_line(info)


@pytest.mark.parametrize(
    ("params", "meta", "message"),
    [
        ({"a": {"name": "text"}}, {}, "a/name is a str, not an array of numbers"),
        ({"a": np.array([object()])}, {}, "a is a ndarray, not an array"),
        ({"a": {(1, 2): np.ones(1)}}, {}, "keys must be strings or integers"),
        ({"a": {1: np.ones(1), "1": np.ones(1)}}, {}, "use keys of one type"),
        ({"a": jax.random.key(0)}, {}, "key_data"),
        ({}, {"path": Path()}, "meta can't be stored as JSON"),
        ({}, {"lr": float("nan")}, "meta can't be stored as JSON: .*; convert it to finite numbers"),
    ],
)
def test_what_can_not_be_stored(
    store: CheckpointStore, params: dict[str, Any], meta: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as info:
        store.save(1, params, {}, meta, wait=True)
    one_line(info)
    assert store.steps() == ()


def test_wrong_settings(tmp_path: Path, store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="keep_last is 0"):
        CheckpointStore(tmp_path, keep_last=0)
    with pytest.raises(CheckpointError, match="steps count from 0"):
        store.save(-1, {}, {}, {})
