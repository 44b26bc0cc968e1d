"""Cutting the backward pass: gradients, arithmetic, bytes, and what may be saved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.axes import RankMesh
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.jaxprs import jaxpr_flops
from jaxpipe.stage.model.layer import Layer
from tests.support import toy_stages as toy

Cut = list[list[Layer]]


def plain() -> Cut:
    return [[toy.embedding(), toy.mlp("a")], [toy.mlp("b"), toy.mlp("c")], [toy.head(), toy.loss()]]


def transformer() -> Cut:
    return [
        [toy.embedding(), toy.attention("a0"), toy.mlp("m0")],
        [toy.attention("a1"), toy.mlp("m1")],
        [toy.attention("a2"), toy.mlp("m2"), toy.head(), toy.loss()],
    ]


CUTS = {
    "mlp": plain,
    "transformer": transformer,
    "one stage": lambda: [list(itertools.chain(*plain()))],
    "tied in one stage": lambda: [[toy.embedding(), toy.mlp("a"), toy.head(tied_to="embed"), toy.loss()]],
    "tied across stages": lambda: [
        [toy.embedding(), toy.mlp("a")],
        [toy.mlp("b"), toy.head(tied_to="embed"), toy.loss()],
    ],
    "embedding alone": lambda: [[toy.embedding()], [toy.mlp("a"), toy.head()], [toy.loss()]],
    "scan": lambda: [[toy.embedding(), toy.scanned("s")], [toy.scanned("t"), toy.head(), toy.loss()]],
    "dropout": lambda: [[toy.embedding(), toy.dropout_mlp("d")], [toy.dropout_mlp("e"), toy.head(), toy.loss()]],
    "carries": lambda: [
        [toy.embedding(), toy.with_carry(), toy.carry_step("s0")],
        [toy.carry_step("s1")],
        [toy.carry_step("s2"), toy.end_carry(), toy.head(), toy.loss()],
    ],
    "nested loops": lambda: [[toy.embedding(), toy.nested_loops("s")], [toy.nested_loops("t"), toy.head(), toy.loss()]],
    "branch": lambda: [[toy.embedding(), toy.branched("b")], [toy.branched("c"), toy.head(), toy.loss()]],
    "checkpoint": lambda: [
        [toy.embedding(), toy.checkpointed("a")],
        [toy.checkpointed("b"), toy.head(), toy.loss()],
    ],
}


def build(cut: Cut, dtype: Any = None, dp: int = 1, **kwargs: Any) -> tuple[tuple[StageFunctions, ...], dict[str, Any]]:
    """Return functions of all stages, on one submesh: interpreting them then compiles each small operation once."""
    params = toy.init_params(list(itertools.chain(*cut)), dtype)
    meshes = pipeline_submeshes(1, RankMesh(dp=dp)) * len(cut)
    return build_all(cut, params, toy.batch_avals(), meshes, **kwargs), params


@pytest.mark.parametrize("name", CUTS)
def test_gradients_equal_value_and_grad(name: str, x64: None) -> None:
    cut = CUTS[name]()
    functions, params = build(cut, jnp.float64)
    batches = [toy.make_batch(i) for i in range(2)]
    layers = list(itertools.chain(*cut))
    gradient = jax.jit(jax.value_and_grad(lambda p, b: toy.reference(layers, p, b), has_aux=True))
    expected_loss, expected = 0.0, None
    for batch in batches:
        (loss, _), grads = gradient(params, batch)
        expected_loss += loss
        expected = grads if expected is None else jax.tree.map(np.add, expected, grads)
    for fused in (False, True):
        runner = toy.Runner(functions, cut, params, compiled=False)
        loss = sum(runner.microbatch(b, fused=fused)[0] for b in batches)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
        toy.assert_trees_close(runner.gradients(), expected, rtol=1e-10, atol=1e-12)


def test_compiled_functions_give_the_same_gradients() -> None:
    cut = [[toy.embedding(), toy.attention("a")], [toy.dropout_mlp("d"), toy.head(), toy.loss()]]
    params = toy.init_params(list(itertools.chain(*cut)))
    functions = build_all(cut, params, toy.batch_avals(), pipeline_submeshes(2))
    batch = toy.make_batch()
    runners = [toy.Runner(functions, cut, params, compiled=compiled) for compiled in (True, False)]
    losses = [runner.microbatch(batch) for runner in runners]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    toy.assert_trees_close(runners[0].gradients(), runners[1].gradients(), rtol=1e-4, atol=1e-4)
    fused = toy.Runner(functions, cut, params)
    fused.microbatch(batch, fused=True)
    toy.assert_trees_close(fused.gradients(), runners[0].gradients(), rtol=1e-4, atol=1e-4)
    for f in functions:
        assert f.functions["W"].donated, "accumulators are donated"


def test_bfloat16_parameters_accumulate_in_float32(x64: None) -> None:
    cut = [[toy.embedding(), toy.dropout_mlp("d"), toy.head(), toy.loss()]]
    functions, params = build(cut, jnp.bfloat16)
    assert {a.dtype for f in functions for a in f.acc_avals} == {np.dtype(np.float32)}
    runner = toy.Runner(functions, cut, params, compiled=False)
    batch = toy.make_batch()
    loss, _ = runner.microbatch(batch)
    assert loss.dtype == np.float32
    exact = jax.tree.map(lambda a: a.astype(jnp.float64), params)
    _, expected = toy.loss_and_grads(cut[0], exact, batch)
    toy.assert_trees_close(runner.gradients(), expected, rtol=0.1, atol=0.15)


@pytest.mark.parametrize("name", ["transformer", "one stage", "tied in one stage", "scan", "dropout"])
def test_flops_of_the_parts_do_not_exceed_the_fused_pass(name: str) -> None:
    cut = CUTS[name]()
    functions, params = build(cut)
    layers = list(itertools.chain(*cut))
    fused = jax.make_jaxpr(jax.value_and_grad(lambda p: toy.reference(layers, p, toy.make_batch())[0]))(params)
    parts = sum(f.flops[op] for f in functions for op in ("F", "B", "W"))
    assert parts <= 1.02 * jaxpr_flops(fused)
    for f in functions:
        assert f.flops["BW"] == f.flops["B"] + f.flops["W"]


def test_first_stage_divides_its_backward_pass_like_the_others() -> None:
    blocks = [[toy.attention(f"a{i}"), toy.mlp(f"m{i}")] for i in range(2)]
    functions, _ = build([[toy.embedding(), *blocks[0]], blocks[1], [toy.loss()]])
    assert functions[0].flops == functions[1].flops


def test_a_scan_over_layers_is_divided_like_layers_written_out() -> None:
    functions, _ = build(CUTS["scan"]())
    for f in functions:
        head = 2 * toy.B * toy.T * toy.D * toy.V if f.stage == 1 else 0
        loops = 2 * 3 * 2 * toy.B * toy.T * toy.D**2
        assert [f.flops[op] - head for op in "FBW"] == [loops] * 3
        assert not f.notes


def test_a_branch_is_not_divided_and_noted() -> None:
    functions, _ = build(CUTS["branch"]())
    assert len(functions[1].notes) == 1
    assert "cond at" in functions[1].notes[0]
    assert functions[1].flops["B"] > functions[1].flops["W"]


def _depends(closed: Any, sources: Sequence[int]) -> list[bool]:
    """Return which results of a flat jaxpr depend on the inputs at these positions."""
    reached = {closed.jaxpr.invars[k] for k in sources}
    for eqn in closed.jaxpr.eqns:
        if any(v in reached for v in eqn.invars if not hasattr(v, "val")):
            reached.update(eqn.outvars)
    return [not hasattr(v, "val") and v in reached for v in closed.jaxpr.outvars]


@pytest.mark.parametrize(
    "name",
    ["tied in one stage", "scan", "branch", "dropout", "checkpoint"]
    + [pytest.param(name, marks=pytest.mark.soak) for name in ("transformer", "nested loops", "carries")],
)
def test_no_residual_is_a_function_of_parameters_alone(name: str) -> None:
    cut = CUTS[name]()
    functions, params = build(cut)
    runner = toy.Runner(functions, cut, params, compiled=False)
    runner.microbatch(toy.make_batch())
    first = runner.values
    runner.microbatch(toy.make_batch(1), key=toy.KEY + 1)
    for f, before, after in zip(functions, first, runner.values, strict=True):
        forward = f.functions["F"]
        inputs = [k for k, p in enumerate(forward.inputs) if p.kind in ("x", "data", "key")]
        depends = _depends(forward.jaxpr, inputs)
        for port, dependent in zip(forward.outputs, depends, strict=True):
            if port.kind == "res":
                assert dependent
                constant = np.array_equal(before[port], after[port])
                assert not constant or before[port].dtype == bool, (
                    f"stage {f.stage}: {port} {before[port].shape} is constant"
                )


def test_residuals_are_not_stored_twice() -> None:
    functions, params = build(transformer())
    runner = toy.Runner(functions, transformer(), params, compiled=False)
    runner.microbatch(toy.make_batch())
    for values in runner.values:
        saved = [np.asarray(v) for p, v in values.items() if p.kind in ("res", "x")]
        for a, b in itertools.combinations(saved, 2):
            assert not (a.size > 1 and a.size == b.size and np.array_equal(a.ravel(), b.ravel()))


@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_what_w_waits_for_is_counted(name: str) -> None:
    for f in build(CUTS[name]())[0]:
        inputs = [a for p, a in _ports(f, "W") if p.kind in ("x", "res", "wres")]
        assert f.w_residual_bytes == sum(a.size * a.dtype.itemsize for a in inputs) > 0


def test_b_frees_what_attention_kept() -> None:
    for f in build(transformer(), recompute="fused")[0]:
        assert f.w_residual_bytes < f.residual_bytes


def test_norm_and_bias_gradients_leave_b_as_vectors() -> None:
    """The operands of a block's weight products and one buffer of vectors wait for W, and nothing else."""
    functions, _ = build([[toy.embedding()], [toy.attention("a"), toy.mlp("m")], [toy.head(), toy.loss()]])
    wide = [a.shape for p, a in _ports(functions[1], "W") if p.kind in ("x", "res", "wres") and len(a.shape) > 1]
    tokens = toy.B * toy.T
    sizes = sorted(int(np.prod(shape)) // tokens for shape in wide)
    inputs, cotangents = [toy.D, toy.D, toy.D, 4 * toy.D], [toy.D] * 3 + [toy.D] + [4 * toy.D] + [toy.D]
    assert sizes == sorted(inputs + cotangents)
    vectors = [a for p, a in _ports(functions[1], "W") if p.kind == "wres" and len(a.shape) == 1]
    assert len(vectors) == 1


def _ports(f: StageFunctions, op: str) -> list[tuple[Any, Any]]:
    return list(zip(f.functions[op].inputs, f.functions[op].avals_in, strict=True))


def test_data_parallel_shards_never_communicate() -> None:
    cut = [[toy.embedding(), toy.scanned("s")], [toy.mlp("m"), toy.head(), toy.loss()]]
    params = toy.init_params(list(itertools.chain(*cut)))
    functions = build_all(cut, params, toy.batch_avals(), pipeline_submeshes(2, RankMesh(dp=2)))
    for f in functions:
        for op, function in f.functions.items():
            text = str(function.jaxpr)
            assert not any(word in text for word in ("psum", "all_gather", "ppermute", "all_to_all")), (f.stage, op)
    runner = toy.Runner(functions, cut, params)
    batch = toy.make_batch()
    loss, weight = runner.microbatch(batch)
    layers = list(itertools.chain(*cut))
    (expected_loss, expected_weight), expected = toy.loss_and_grads(layers, params, batch)
    np.testing.assert_allclose((loss, weight), (expected_loss, expected_weight), rtol=1e-5)
    toy.assert_trees_close(runner.gradients(), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=10)
@given(st.data())
def test_random_graphs(data: st.DataObject) -> None:
    """Layers that apply random operations to random earlier values: gradients and types of the cut functions."""
    _check_random_graph(data)


@pytest.mark.soak
@settings(max_examples=200)
@given(st.data())
def test_200_random_graphs(data: st.DataObject) -> None:
    _check_random_graph(data)


def _check_random_graph(data: st.DataObject) -> None:
    layers = [toy.embedding(), *(_random_layer(data.draw, f"r{i}") for i in range(3)), toy.head(), toy.loss()]
    at = data.draw(st.integers(1, 4))
    cut = [layers[:at], layers[at:]]
    with jax.enable_x64(True):
        policy = data.draw(st.sampled_from(["none", "cheap", "dots", "full", "fused", "cheap+attention+mlp"]))
        functions, params = build(cut, jnp.float64, recompute=policy)
        batch = toy.make_batch()
        expected_loss, expected = jax.value_and_grad(lambda p: toy.reference(layers, p, batch)[0])(params)
        for fused in (False, True):
            runner = toy.Runner(functions, cut, params, compiled=False)
            np.testing.assert_allclose(runner.microbatch(batch, fused=fused)[0], expected_loss, rtol=1e-10)
            toy.assert_trees_close(runner.gradients(), expected, rtol=1e-9, atol=1e-10)


OPERATIONS = {
    "add": lambda a, b, w: a + b,
    "mul": lambda a, b, w: a * b,
    "tanh": lambda a, b, w: jnp.tanh(a),
    "matmul": lambda a, b, w: a @ w["m"] * 0.5,
    "scale": lambda a, b, w: a * w["v"][None, None, :],
    "bias": lambda a, b, w: a + w["v"][None, None, :],
    "mean": lambda a, b, w: a - a.mean(-1, keepdims=True),
    "stop": lambda a, b, w: a + jax.lax.stop_gradient(jnp.sin(b)),
    "turn": lambda a, b, w: a.transpose(0, 2, 1).reshape(a.shape[0], -1, a.shape[2]) + b,
    "scores": lambda a, b, w: jnp.tanh(a @ b.transpose(0, 2, 1)) @ b * 0.1,
}


def _random_layer(draw: Any, name: str) -> Layer:
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5
        )
    )

    def init(key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        return {"m": toy.normal(a, toy.D, toy.D), "v": toy.normal(b, toy.D)}

    def apply(p: Any, x: Any, c: Any) -> Any:
        values = [x]
        for op, i, j in steps:
            values.append(OPERATIONS[op](values[i % len(values)], values[j % len(values)], p))
        return values[-1]

    return Layer(name, init, apply)
