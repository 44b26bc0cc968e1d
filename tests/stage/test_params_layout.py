"""Parameter buffers: packing, ties, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.axes import RankMesh
from jaxpipe.errors import StageError
from jaxpipe.stage.model.layer import Layer
from jaxpipe.stage.model.params import SMALL_BYTES, ParamLayout, stage_params
from jaxpipe.stage.model.plan import param_avals
from models.llama import Llama


def layer(name: str, tied: Any = None) -> Layer:
    return Layer(name, lambda k: {}, lambda p, x, c: x, tied=tied or {})


def arrays(tree: Any) -> Any:
    count = iter(range(1, 1 << 30))
    return jax.tree.map(
        lambda a: (np.arange(math.prod(a.shape)) + 1000 * next(count)).reshape(a.shape).astype(a.dtype), tree
    )


DTYPES = (jnp.float32, jnp.bfloat16, jnp.int32)
leaf_avals = st.builds(
    jax.ShapeDtypeStruct, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)
)  # fmt: skip
trees = st.dictionaries(
    st.sampled_from("abcd"),
    st.one_of(leaf_avals, st.dictionaries(st.sampled_from("xyz"), leaf_avals, min_size=1, max_size=3)),
    max_size=4,
)


@settings(max_examples=60)
@given(st.lists(trees, min_size=1, max_size=3), st.sampled_from([0, 16, SMALL_BYTES]))
def test_unpack_inverts_pack(stage: list[Any], small_bytes: int) -> None:
    params = {f"l{i}": arrays(tree) for i, tree in enumerate(stage)}
    layout = ParamLayout.build([layer(n) for n in params], params, small_bytes)
    buffers = layout.pack(params)
    assert [(b.shape, b.dtype) for b in buffers] == [(b.shape, b.dtype) for b in layout.buffers]
    back = layout.unpack(buffers)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    trained = [jnp.issubdtype(b.dtype, jnp.inexact) for b in layout.buffers]
    assert trained == sorted(trained, reverse=True)
    assert layout.num_trained == sum(trained)
    assert [a.dtype for a in layout.acc_avals()] == [np.dtype(np.float32)] * layout.num_trained


def test_small_leaves_share_buffers_and_large_ones_do_not() -> None:
    n = SMALL_BYTES // 4
    params = {
        "a": {"big": jax.ShapeDtypeStruct((n + 1,), jnp.float32), "small": jax.ShapeDtypeStruct((n,), jnp.float32)},
        "b": {"half": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "one": jax.ShapeDtypeStruct((), jnp.float32)},
        "c": {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)},
    }
    layout = ParamLayout.build([layer("a"), layer("b"), layer("c")], params)
    assert [(b.shape, b.dtype) for b in layout.buffers] == [
        ((n + 1,), jnp.float32),
        ((n + 1,), jnp.float32),
        ((6,), jnp.bfloat16),
        ((6,), jnp.float32),
    ]


def test_pack_takes_other_dtypes_and_works_under_jit() -> None:
    params = {"a": {"w": np.ones((2, 3), np.float16), "b": np.zeros(3, np.float16)}}
    layout = ParamLayout.build([layer("a")], params)
    grads = jax.tree.map(lambda a: a.astype(np.float32) * 3, params)
    buffers = jax.jit(layout.pack)(grads)
    assert [(b.shape, b.dtype) for b in buffers] == [((3,), jnp.float32), ((6,), jnp.float32)]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(layout.unpack)(buffers), grads)


def test_a_leaf_tied_within_the_stage_is_stored_once() -> None:
    params = {"e": {"table": np.arange(6.0).reshape(2, 3)}, "h": {"bias": np.ones(2)}}
    layers = [layer("e"), layer("h", {("out", "w"): ("e", ("table",))})]
    layout = ParamLayout.build(layers, stage_params(layers, params))
    buffers = layout.pack(params)
    assert sum(b.size for b in buffers) == 8
    assert layout.unpack(buffers)["h"].keys() == {"bias"}
    np.testing.assert_array_equal(layout.tree(layout.unpack_leaves(buffers))["h"]["out"]["w"], params["e"]["table"])
    with_copy = {**params, "h": {**params["h"], "out": {"w": params["e"]["table"]}}}
    assert ParamLayout.build(layers, with_copy) == layout


def test_a_leaf_tied_to_another_stage_is_copied() -> None:
    params = {"e": {"table": np.arange(6.0).reshape(2, 3)}, "h": {"bias": np.ones(2)}}
    layers = [layer("h", {("w",): ("e", ("table",))})]
    last_stage = stage_params(layers, params)
    np.testing.assert_array_equal(last_stage["h"]["w"], params["e"]["table"])
    assert params["h"].keys() == {"bias"}, "the model's own tree is not touched"
    layout = ParamLayout.build(layers, last_stage)
    assert layout.shared == {("h", ("w",)): ("e", ("table",))}
    assert stage_params(layers, last_stage) == last_stage, "copies already there are kept"


BAD = {
    "missing layer": ([layer("a")], {}, "layer 'a' has no parameters; have none"),
    "missing owner": ([layer("a", {("w",): ("z", ("t",))})], {"a": {}}, "ties w to z/t, which does not exist"),
    "missing owner leaf": (
        [layer("a", {("w",): ("b", ("t",))}), layer("b")],
        {"a": {}, "b": {}},
        "ties w to b/t, which does not exist or is itself tied",
    ),
    "repeated names": ([layer("a"), layer("a")], {"a": {}}, "layer names repeat: a, a"),
    "list in parameters": (
        [layer("a")],
        {"a": {"w": [np.ones(1)]}},
        r"parameter \['w'\]\[0\] \(ndarray\) is not an array in",
    ),
    "string in parameters": ([layer("a")], {"a": {"w": "no"}}, r"parameter \['w'\] \(str\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parameters_are_refused(case: str) -> None:
    layers, params, message = BAD[case]
    with pytest.raises(StageError, match=message):
        ParamLayout.build(layers, stage_params(layers, params))


def test_pack_refuses_other_shapes_and_missing_leaves() -> None:
    layout = ParamLayout.build([layer("a")], {"a": {"w": np.ones((2, 3))}})
    with pytest.raises(StageError, match=r"parameter a/w has shape \(3, 2\), the stage was built for \(2, 3\)"):
        layout.pack({"a": {"w": np.ones((3, 2))}})
    with pytest.raises(StageError, match="parameter a/w is missing"):
        layout.pack({"a": {}})


def test_parts_of_gradients_are_told_apart_by_axes_of_several_devices_alone() -> None:
    """A norm of queries makes a part of its gradient on each shard of tp; with experts over ep and one shard it does not."""
    model = Llama(vocab_size=32, d_model=16, num_layers=1, num_heads=4, qk_norm=True, seq_len=8)
    block, params = model.layers[1:2], param_avals(model)

    def kinds(mesh: RankMesh) -> set[str]:
        return set(ParamLayout.build(block, params, 0, mesh).kinds)

    assert kinds(RankMesh(dp=2, ep=2)) == {"same"}
    assert kinds(RankMesh(dp=2, ep=2, tp=2)) == {"same", "split", "partial"}
