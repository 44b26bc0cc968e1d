"""Tracing stages: what crosses boundaries, keys, evaluation, sharing, FLOP counts, dumps, and errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import dump
from jaxpipe.axes import RankMesh
from jaxpipe.errors import StageError
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compiled.compile import BuildCache, build_all, build_stage_functions
from jaxpipe.stage.functions import Port, StageFunctions
from jaxpipe.stage.jaxprs import RANDOM_WORD, TRANSCENDENTAL, jaxpr_flops
from jaxpipe.stage.model.layer import Layer
from jaxpipe.stage.model.plan import links_of
from jaxpipe.stage.split.trace import layer_key
from tests.support import toy_stages as toy

CARRIES = [
    [toy.embedding(), toy.with_carry(), toy.carry_step("s0")],
    [toy.carry_step("s1")],
    [toy.end_carry(), toy.head(), toy.loss()],
]


def build(cut: Any, **kwargs: Any) -> tuple[tuple[StageFunctions, ...], Any]:
    params = toy.init_params(list(itertools.chain(*cut)))
    return build_all(cut, params, toy.batch_avals(), pipeline_submeshes(1) * len(cut), **kwargs), params


def test_integers_and_statics_cross_the_boundary_without_gradients() -> None:
    functions, _ = build(CARRIES)
    first, second, last = functions
    assert {k: v for k, v in first.y.items() if not hasattr(v, "shape")} == {"n": 3, "s": "relu"}
    assert second.y["n"] == 4
    h, ids, pos = (sorted(first.y).index(k) - (k == "pos") for k in ("h", "ids", "pos"))
    assert [first.y_avals[i].dtype for i in (h, ids, pos)] == [jnp.float32, jnp.int32, jnp.float32]
    assert {p.index for p in second.functions["B"].outputs if p.kind == "dx"} == {h, pos}
    assert Port("x", ids) in second.functions["F"].inputs
    assert [p for p in second.functions["F"].outputs if p.kind == "y"] == [Port("y", h), Port("y", pos), Port("y", ids)]
    assert second.x_avals == first.y_avals
    assert second.functions["F"].forwarded, "what passes through unchanged is not copied"
    assert not any(p.kind in ("x", "dx") for f in first.functions.values() for p in (*f.inputs, *f.outputs))
    assert not any(p.kind in ("y", "dy") for f in last.functions.values() for p in (*f.inputs, *f.outputs))


def test_batch_arrays_are_only_what_the_stage_reads() -> None:
    functions, _ = build(CARRIES)
    assert [f.data_names for f in functions] == [("tokens",), (), ("labels",)]


def test_random_keys_do_not_depend_on_the_cut() -> None:
    layers = [toy.embedding(), toy.dropout_mlp("d"), toy.dropout_mlp("e"), toy.head(), toy.loss()]
    params = toy.init_params(layers)
    batch = toy.make_batch()
    losses = []
    for at in (1, 2, 3):
        cut = [layers[:at], layers[at:]]
        functions, _ = build(cut)
        assert [f.uses_key for f in functions] == [at > 1, at < 3]
        runner = toy.Runner(functions, cut, params, compiled=False)
        losses.append(float(runner.microbatch(batch)[0]))
    assert losses[0] == losses[1] == losses[2]
    np.testing.assert_allclose(losses[0], toy.reference(layers, params, batch)[0], rtol=1e-6)
    other = toy.Runner(functions, cut, params, compiled=False).microbatch(batch, key=toy.KEY + 1)[0]
    assert other != losses[0]


def test_layer_key_folds_in_the_index() -> None:
    keys = [jax.random.key_data(layer_key(toy.KEY, i)) for i in range(3)]
    assert len({tuple(np.asarray(k)) for k in keys}) == 3
    expected = jax.random.fold_in(jax.random.wrap_key_data(toy.KEY), 2)
    np.testing.assert_array_equal(keys[2], jax.random.key_data(expected))


def test_evaluation_takes_no_key_and_saves_nothing() -> None:
    layers = [toy.embedding(), toy.dropout_mlp("d"), toy.head(), toy.loss()]
    cut = [layers[:2], layers[2:]]
    functions, params = build(cut)
    for f in functions:
        e = f.evaluation
        assert {p.kind for p in e.inputs} <= {"param", "x", "data"}
        assert {p.kind for p in e.outputs} <= {"y", "loss"}
    runner = toy.Runner(functions, cut, params, compiled=False)
    batch = toy.make_batch()
    np.testing.assert_allclose(runner.evaluate(batch), toy.reference(layers, params, batch, train=False), rtol=1e-5)


def test_stages_of_the_same_functions_are_traced_once() -> None:
    calls = []
    inner = toy.mlp("a")

    def apply(p: Any, x: Any, c: Any) -> Any:
        calls.append(p)
        return inner.apply(p, x, c)

    layer = Layer("a", inner.init, apply)
    b, c = replace(layer, name="b"), replace(layer, name="c", kind="another")
    cut = [[toy.embedding(), toy.mlp("z")], [layer], [b], [c], [toy.head(), toy.loss()]]
    functions, params = build(cut, cache=BuildCache())
    assert len(calls) == 2, "for training and for evaluation"
    assert functions[1].functions["F"].jitted is functions[3].functions["F"].jitted
    assert functions[1].layout.slots[0].layer == "a"
    assert functions[3].layout.slots[0].layer == "c"
    runner = toy.Runner(functions, cut, params, compiled=False)
    calls.clear()
    batch = toy.make_batch()
    loss, _ = runner.microbatch(batch)
    assert not calls, "running traces nothing"
    np.testing.assert_allclose(loss, toy.reference(list(itertools.chain(*cut)), params, batch)[0], rtol=1e-5)


def closed_over(name: str, table: Any, by: float = 1.0, hook: Any = None) -> Layer:
    """Return a layer whose constants are in its closure, and whose parameter is the same whatever they are."""

    def apply(p: Any, x: Any, c: Any) -> Any:
        if hook is not None:
            jax.debug.callback(hook, x)
        return jnp.tanh(x * p["w"][None, None, :] * by) + table[None, None, :]

    return Layer(name, lambda k: {"w": toy.normal(k, toy.D)}, apply, kind="block")


TABLE = np.linspace(0.0, 1.0, toy.D, dtype=np.float32)


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (closed_over("b", TABLE.copy()), True),
        (closed_over("b", TABLE, by=-0.5), False),
        (closed_over("b", np.where(TABLE == 0, np.float32(-0.0), TABLE)), False),
        (closed_over("b", TABLE + np.float32(1e-7)), False),
        (closed_over("b", TABLE, hook=lambda x: None), False),
    ],
    ids=["equal constant", "another factor", "minus zero", "a last bit", "a callback"],
)
def test_stages_share_what_computes_the_same_whatever_its_kind(other: Layer, shared: bool) -> None:
    cut = [[toy.embedding()], [closed_over("a", TABLE)], [other], [toy.head(), toy.loss()]]
    functions, params = build(cut, cache=BuildCache())
    assert (functions[1].functions["F"].jitted is functions[2].functions["F"].jitted) == shared
    loss, _ = toy.Runner(functions, cut, params, compiled=False).microbatch(toy.make_batch())
    expected = toy.reference(list(itertools.chain(*cut)), params, toy.make_batch())[0]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_integer_parameters_get_no_accumulator() -> None:
    def apply(p: Any, x: Any, c: Any) -> Any:
        return x[:, :, p["order"]] * p["scale"][None, None, :]

    shuffle = Layer(
        "shuffle", lambda k: {"order": jnp.arange(toy.D)[::-1], "scale": jnp.full((toy.D,), 2.0)}, apply
    )  # fmt: skip
    cut = [[toy.embedding(), shuffle], [toy.head(), toy.loss()]]
    functions, _ = build(cut)
    assert [a.dtype for a in functions[0].param_avals] == [np.float32, np.float32, np.int32]
    assert len(functions[0].acc_avals) == 2
    args = [a for a in functions[0].functions["W"].inputs if a.kind == "acc"]
    assert args == [Port("acc", 0), Port("acc", 1)]


def test_closed_over_arrays_are_constants_of_the_functions() -> None:
    table = jnp.linspace(0.0, 1.0, toy.D)
    layer = Layer("shift", lambda k: {}, lambda p, x, c: x * jnp.sin(table)[None, None, :])
    cut = [[toy.embedding(), layer], [toy.head(), toy.loss()]]
    functions, params = build(cut)
    batch = toy.make_batch()
    loss, _ = toy.Runner(functions, cut, params, compiled=False).microbatch(batch)
    np.testing.assert_allclose(loss, toy.reference(list(itertools.chain(*cut)), params, batch)[0], rtol=1e-5)


def _raises(p: Any, x: Any, c: Any) -> Any:
    return x @ jnp.ones((3, 3))


def _prints_in_order(p: Any, x: Any, c: Any) -> Any:
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


def stateless(apply: Any, name: str = "odd", reads: tuple[str, ...] = ()) -> Layer:
    return Layer(name, lambda k: {}, apply, reads=reads)


BAD = {
    "failing layer": (
        [[toy.embedding(), stateless(_raises)], [toy.loss()]],
        r"layer 'odd' \(stage 0\) can't be traced: TypeError: .*dot",
    ),
    "missing batch array": (
        [[stateless(lambda p, x, c: c.data["masks"], reads=("masks",))], [toy.loss()]],
        r"layer 'odd' \(stage 0\) reads 'masks'; the batch has 'tokens', 'labels', 'unread'",
    ),
    "loss without weight": (
        [[toy.embedding()], [stateless(lambda p, x, c: x.sum())]],
        r"the loss layer 'odd' .no layer takes it. returns .*; want \(loss_sum, weight_sum\), two float scalars",
    ),
    "loss not summed": (
        [[toy.embedding()], [stateless(lambda p, x, c: (x.sum(-1), jnp.float32(1)))]],
        r"loss_sum of the loss layer 'odd' has shape \(4, 6\); want a scalar: sum it over the microbatch",
    ),
    "empty stage": ([[toy.embedding()], [], [toy.loss()]], "stage 1 has no layers; cut the model into fewer stages"),
    "ordered print": (
        [[toy.embedding(), stateless(_prints_in_order)], [toy.loss()]],
        r"stage 0: debug_.* at .*test_trace.py.* in layer 'odd' has ordered effects",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_layers_are_named(case: str) -> None:
    cut, message = BAD[case]
    with pytest.raises(StageError, match=message):
        build(cut)


def test_batch_must_divide_over_data_parallel_shards() -> None:
    layers = [toy.embedding(), toy.head(), toy.loss()]
    with pytest.raises(StageError, match=r"'tokens'.*\(3, 6\).*3.*0.*2"):
        build_all([layers], toy.init_params(layers), toy.batch_avals(3), pipeline_submeshes(1, RankMesh(dp=2)))


def test_lengths_of_arguments_must_agree() -> None:
    layers = [toy.embedding(), toy.loss()]
    with pytest.raises(StageError, match="2 stages, 1 meshes"):
        build_all([layers[:1], layers[1:]], toy.init_params(layers), toy.batch_avals(), pipeline_submeshes(1))


def test_unordered_effects_stay_in_the_forward_pass(capfd: pytest.CaptureFixture[str]) -> None:
    def apply(p: Any, x: Any, c: Any) -> Any:
        jax.debug.print("sum is {:.1f}", x.sum() * 0)
        return x

    cut = [[toy.embedding(), stateless(apply)], [toy.head(), toy.loss()]]
    functions, params = build(cut)
    toy.Runner(functions, cut, params, compiled=False).microbatch(toy.make_batch())
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum is 0.0") == 1


def test_flops_follow_bodies_and_scan_lengths() -> None:
    def fn(x: Any, w: Any, image: Any, kernel: Any) -> Any:
        h = jax.lax.scan(lambda c, _: (jax.nn.relu(c @ w), None), x, None, length=5)[0]
        h = jax.lax.cond(h.sum() > 0, lambda h: h @ w @ w, lambda h: h @ w, h)
        return h, jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", feature_group_count=2)

    jaxpr = jax.make_jaxpr(jax.jit(fn))(
        jnp.ones((3, 4)), jnp.ones((4, 4)), jnp.ones((2, 6, 8, 8)), jnp.ones((10, 3, 3, 3))
    )
    conv = 2 * (2 * 10 * 8 * 8) * (3 * 3 * 3)
    assert jaxpr_flops(jaxpr) == 7 * 2 * 3 * 4 * 4 + conv
    flops = jaxpr_flops(jax.make_jaxpr(lambda x: jnp.tanh(x).sum() + 1.0)(jnp.ones((3, 4))), elementwise=True)
    assert flops == TRANSCENDENTAL * 12 + 12 + 1, "the sum counts its operands"


def test_elementwise_flops_count_what_is_dear() -> None:
    def count(fn: Any, *args: Any) -> int:
        return jaxpr_flops(jax.make_jaxpr(fn)(*args), elementwise=True)

    x, n = jnp.ones((3, 4)), jnp.ones((3, 4), jnp.int32)
    assert count(lambda x: x * 2.0, x) == 12
    assert count(lambda x: x / 3.0, x) == 12 * TRANSCENDENTAL
    assert count(lambda n: jax.lax.div(n, n), n) == 12, "integer division is no iteration"
    assert count(lambda x: x**3, x) == 12 * 2
    assert count(lambda x: jax.lax.integer_pow(x, -2), x) == 12 * (1 + TRANSCENDENTAL)
    assert count(lambda x: x.T.reshape(-1)[None], x) == 0, "moving data is free"
    assert count(lambda k: jax.random.bits(k, (3, 4)), jax.random.key(0)) == 12 * RANDOM_WORD
    assert count(lambda x: x @ x.T, x) == 2 * 3 * 3 * 4


def test_dumps_are_numbered_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [toy.embedding(), toy.head(), toy.loss()]
    monkeypatch.delenv(dump.VARIABLE, raising=False)
    assert dump.dump("trace", "x", "text") is None
    monkeypatch.setenv(dump.VARIABLE, str(tmp_path / "d"))
    params = toy.init_params(layers)
    links = links_of([layers], params)[0]
    build_stage_functions(layers, 0, params, None, toy.batch_avals(), pipeline_submeshes(1)[0], 0, links)
    names = sorted(p.name for p in (tmp_path / "d").iterdir())
    assert [n[:4] for n in names] == [f"{i:04d}" for i in range(len(names))]
    assert {n[5:] for n in names} >= {f"jaxpr-stage0-{op}.txt" for op in ("F", "B", "W", "BW", "E")}
    path = dump.dump("odd name", "a/b", lambda: "late")
    assert path is not None
    assert (path.name, path.read_text()) == (f"{len(names):04d}-odd_name-a_b.txt", "late\n")
    dump.own_folder(3)
    path = dump.dump("of a process", "x", "text")
    assert path is not None and path.parent == tmp_path / "d" / "process-3"
