"""Recompute policies: the same gradients, fewer bytes, and nothing expensive done twice that need not be.

Interpreted equation by equation, gradients are those of ``none`` bit for bit: a policy moves arithmetic, it does not reorder
any. Compiled, XLA fuses what is recomputed differently from what was saved, so there they are compared to 1e-12 (float64).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe._jax_compat import Var
from jaxpipe.errors import StageError
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compiled.compile import BuildCache, build_all, build_stage_functions
from jaxpipe.stage.compiled.recompute_report import remarks
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.model.adapters import from_nnx
from jaxpipe.stage.model.layer import Layer, LayerContext, Model
from jaxpipe.stage.model.plan import links_of
from jaxpipe.stage.model.reference import init_params
from jaxpipe.stage.split.policies import POLICIES
from models.gpt import GPT
from models.llama import Llama
from tests.support import toy_stages as toy

CUT = [
    [toy.embedding(), toy.attention("a"), toy.dropout_mlp("d")],
    [toy.attention("b"), toy.mlp("m"), toy.head(), toy.loss()],
]
VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type")
MIDDLE = [[toy.embedding()], [toy.attention("a"), toy.mlp("m")], [toy.loss()]]


@cache
def builds() -> BuildCache:
    """A cut is traced once for all policies."""
    return BuildCache()


def build(cut: Any, recompute: str, dtype: Any = jnp.float32) -> tuple[tuple[StageFunctions, ...], Any]:
    params = toy.init_params(list(itertools.chain(*cut)), dtype)
    return build_all(
        cut, params, toy.batch_avals(), pipeline_submeshes(1) * len(cut), recompute, cache=builds()
    ), params


def saved_shapes(f: StageFunctions) -> list[tuple[int, ...]]:
    forward = f.functions["F"]
    return [a.shape for p, a in zip(forward.outputs, forward.avals_out, strict=True) if p.kind == "res"]


@pytest.fixture(scope="module")
def middle() -> dict[str, StageFunctions]:
    return {name: build(MIDDLE, name)[0][1] for name in POLICIES}


ALWAYS = ("none", "cheap", "flash", "full")


@pytest.mark.parametrize(
    "name",
    [*(n if n in ALWAYS else pytest.param(n, marks=pytest.mark.soak) for n in POLICIES), "cheap+attention+mlp"],
)
def test_gradients_are_those_of_the_uncut_model(name: str, x64: None) -> None:
    functions, params = build(CUT, name, jnp.float64)
    layers = list(itertools.chain(*CUT))
    batch = toy.make_batch()
    (expected_loss, _), expected = toy.loss_and_grads(layers, params, batch)
    for fused in (False, True):
        runner = toy.Runner(functions, CUT, params, compiled=False)
        np.testing.assert_allclose(runner.microbatch(batch, fused=fused)[0], expected_loss, rtol=1e-12)
        toy.assert_trees_close(runner.gradients(), expected, rtol=1e-10, atol=1e-12)


def test_policies_in_order_of_what_they_save(middle: dict[str, StageFunctions]) -> None:
    saved = {name: f.residual_bytes for name, f in middle.items()}
    assert saved["full"] < saved["dots"] <= saved["cheap"] <= saved["none"] < saved["fused"]
    assert saved["attention"] < saved["none"]
    assert saved["attention"] <= saved["flash"] < saved["fused"]


def test_full_saves_inputs_of_layers_only(middle: dict[str, StageFunctions]) -> None:
    assert saved_shapes(middle["full"]) == [(toy.B, toy.T, toy.D)]
    assert middle["full"].residual_bytes == 2 * 4 * toy.B * toy.T * toy.D


def test_products_run_twice_only_where_the_policy_says(middle: dict[str, StageFunctions]) -> None:
    none = middle["none"].flops
    scores = 2 * toy.B * toy.H * toy.T * toy.T * (toy.D // toy.H)
    for name in ("cheap", "dots"):
        assert middle[name].flops == none
    assert middle["attention"].flops == {**none, "B": none["B"] + scores, "BW": none["BW"] + scores}
    added_flops = middle["full"].flops["BW"] - none["BW"]
    last_products = 2 * 2 * toy.B * toy.T * 4 * toy.D * toy.D - 2 * toy.B * toy.T * 4 * toy.D * toy.D
    projection = 2 * toy.B * toy.T * toy.D * toy.D
    assert added_flops == none["F"] - last_products - projection, "results nothing reads are not recomputed"
    for name, f in middle.items():
        assert f.flops["F"] == none["F"], name
        assert f.flops["BW"] == f.flops["B"] + f.flops["W"], name


def test_mlp_recomputes_the_first_product_and_what_follows_in_b(middle: dict[str, StageFunctions]) -> None:
    none, mlp = middle["none"], middle["mlp"]
    up = 2 * toy.B * toy.T * toy.D * 4 * toy.D
    assert mlp.flops == {**none.flops, "B": none.flops["B"] + up, "BW": none.flops["BW"] + up}
    assert (toy.B, toy.T, 4 * toy.D) in saved_shapes(none)
    assert (toy.B, toy.T, 4 * toy.D) not in saved_shapes(mlp)
    assert (toy.B, toy.H, toy.T, toy.T) in saved_shapes(mlp), "attention is saved as ever"


def test_mlp_finds_hidden_values_only() -> None:
    """A product whose result leaves the layer, or is multiplied with another activation, is no hidden value."""

    def gated(p: Any, x: Any, c: LayerContext) -> Any:
        a, b = x @ p["a"], x @ p["b"]
        return x + (jax.nn.silu(a) * b) @ p["out"]

    def leaving(p: Any, x: Any, c: LayerContext) -> Any:
        a = jnp.tanh(x @ p["a"])
        return x + jnp.tanh(a @ p["out"]) + a.sum()

    def mixed(p: Any, x: Any, c: LayerContext) -> Any:
        a, b = x @ p["a"], x @ p["b"]
        return x + jnp.tanh(jnp.einsum("btf,bsf->bts", a, b) @ b) @ p["out"]

    def init(key: jax.Array) -> Any:
        return {n: toy.normal(key, toy.D, 3 * toy.D) for n in "ab"} | {"out": toy.normal(key, 3 * toy.D, toy.D)}

    wide = (toy.B, toy.T, 3 * toy.D)
    for apply, wide_values in ((gated, 0), (leaving, 1), (mixed, 2)):
        cut = [[toy.embedding()], [Layer("l", init, apply)], [toy.head(), toy.loss()]]
        assert saved_shapes(build(cut, "mlp")[0][1]).count(wide) >= wide_values, apply
        assert wide_values or wide not in saved_shapes(build(cut, "mlp")[0][1])


def test_joined_policies_recompute_what_each_does(middle: dict[str, StageFunctions]) -> None:
    both = build(MIDDLE, " mlp+attention ")[0][1]
    none = middle["none"].flops
    added_flops = sum(middle[name].flops["BW"] - none["BW"] for name in ("attention", "mlp"))
    assert both.flops["BW"] == none["BW"] + added_flops
    wide, scores = (toy.B, toy.T, 4 * toy.D), (toy.B, toy.H, toy.T, toy.T)
    assert not {wide, scores} & set(saved_shapes(both))


@pytest.mark.parametrize("name", [*POLICIES, "cheap+attention+mlp"])
def test_b_and_w_share_no_work(name: str, middle: dict[str, StageFunctions]) -> None:
    """An equation of the trace is in F, B and W under its own variables: what B computes, W is handed or does not need."""
    f = middle[name] if name in middle else build(MIDDLE, name)[0][1]
    b, w = (f.functions[op].jaxpr.jaxpr for op in "BW")
    made_b = {v for eqn in b.eqns for v in eqn.outvars}
    derived = {
        v for p, v in zip(f.functions["W"].inputs, w.invars, strict=True) if p.kind in ("x", "res", "wres", "data")
    }
    for eqn in w.eqns:  # what of W depends on the microbatch
        if any(isinstance(a, Var) and a in derived for a in eqn.invars):
            derived.update(eqn.outvars)
            assert not made_b & set(eqn.outvars) or eqn.primitive.name in VIEWS, f"{eqn.primitive.name} is done twice"
    for eqn in b.eqns:
        if eqn.primitive.name in ("dot_general", "tanh", "exp"):
            assert not set(eqn.outvars) & {v for e in w.eqns for v in e.outvars}


def test_w_waits_for_the_same_bytes_under_every_policy(middle: dict[str, StageFunctions]) -> None:
    """Operands of W's products; which of them B made and which F saved differs."""
    products = 2 * 4 * toy.B * toy.T * (toy.D + 4 * toy.D)  # in and out of both MLP products
    cut = [[toy.embedding()], [checkpointed_attention("a"), toy.mlp("m")], [toy.head(), toy.loss()]]
    functions = {**middle, "jax.checkpoint": build(cut, "none")[0][1]}
    for name, f in functions.items():
        assert f.w_residual_bytes == pytest.approx(middle["none"].w_residual_bytes, rel=0.02), name
        assert f.w_residual_bytes > products


def checkpointed_attention(name: str) -> Layer:
    inner = toy.attention(name)
    return Layer(
        name,
        inner.init,
        lambda p, x, c: jax.checkpoint(lambda p, x: inner.apply(p, x, c))(p, x),
        kind="checkpointed_attention",
    )


def test_attention_saves_nothing_of_the_size_of_scores(middle: dict[str, StageFunctions]) -> None:
    scores = (toy.B, toy.H, toy.T, toy.T)
    assert scores in saved_shapes(middle["none"])
    assert scores not in saved_shapes(middle["attention"])
    assert (toy.B, toy.T, 4 * toy.D) in saved_shapes(middle["attention"]), "the rest is saved as ever"


def test_cheap_recomputes_dropout_from_the_key() -> None:
    functions, _ = build([[toy.embedding()], [toy.dropout_mlp("d")], [toy.head(), toy.loss()]], "cheap")
    assert bool not in {a.dtype for a in functions[1].functions["F"].avals_out}
    assert "key" in {p.kind for p in functions[1].functions["B"].inputs}
    functions, _ = build([[toy.embedding()], [toy.dropout_mlp("d")], [toy.head(), toy.loss()]], "none")
    assert np.dtype(bool) in {a.dtype for a in functions[1].functions["F"].avals_out}
    assert "key" not in {p.kind for p in functions[1].functions["B"].inputs}


def test_checkpoint_inside_a_layer_is_honoured() -> None:
    cut = [[toy.embedding()], [toy.checkpointed("a")], [toy.head(), toy.loss()]]
    f = build(cut, "none")[0][1]
    assert not saved_shapes(f), "the checkpointed layer saves its input, which is x"
    up = 2 * toy.B * toy.T * toy.D * 4 * toy.D
    assert f.flops["B"] == f.flops["F"] + up, "the first product again; the second's result is not read"
    assert f.flops["W"] == f.flops["F"]


@pytest.mark.parametrize("name", ["cheap", "dots"])
def test_products_are_saved_in_the_type_they_are_read_in(name: str) -> None:
    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        up = jnp.einsum("btd,df->btf", x, p["up"], preferred_element_type=jnp.float32).astype(x.dtype)
        return x + jax.nn.gelu(up) @ p["down"]

    def init(key: jax.Array) -> Any:
        wide = 4 * toy.D
        return {"up": toy.normal(key, toy.D, wide), "down": toy.normal(key, wide, toy.D)}

    cut = [[toy.embedding()], [Layer("l", init, apply)], [toy.head(), toy.loss()]]
    forward = build(cut, name, jnp.bfloat16)[0][1].functions["F"]
    saved = [(a.shape, a.dtype) for p, a in zip(forward.outputs, forward.avals_out, strict=True) if p.kind == "res"]
    assert saved == [((toy.B, toy.T, 4 * toy.D), jnp.bfloat16)]


class NnxMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(toy.D, 4 * toy.D, rngs=rngs)
        self.down = nnx.Linear(4 * toy.D, toy.D, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.dropout(nnx.gelu(self.up(x))))


def test_nnx_modules_recompute_as_other_layers_do() -> None:
    cut = [[toy.embedding()], [from_nnx("n", NnxMLP)], [toy.head(), toy.loss()]]
    results, wide = [], (toy.B, toy.T, 4 * toy.D)
    for name in ("none", "cheap", "cheap+mlp"):
        functions, params = build(cut, name)
        runner = toy.Runner(functions, cut, params, compiled=False)
        results.append((runner.microbatch(toy.make_batch()), runner.gradients()))
        count = saved_shapes(functions[1]).count(wide)
        assert count == {"none": 2, "cheap": 1, "cheap+mlp": 0}[name], "GELU's argument; and the mask"
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


CUSTOM = [
    [toy.embedding(), toy.scanned("s"), toy.checkpointed("c")],
    [toy.dropout_mlp("d"), toy.nested_loops("n"), toy.branched("r"), toy.head(), toy.loss()],
]


@pytest.mark.parametrize(
    "name", ["cheap", *(pytest.param(name, marks=pytest.mark.soak) for name in ("mlp", "cheap+attention+mlp", "full"))]
)
def test_loops_branches_and_checkpoints_keep_their_gradients(name: str, x64: None) -> None:
    functions, params = build(CUSTOM, name, jnp.float64)
    layers = list(itertools.chain(*CUSTOM))
    batch = toy.make_batch()
    (expected_loss, _), expected = toy.loss_and_grads(layers, params, batch)
    runner = toy.Runner(functions, CUSTOM, params, compiled=False)
    np.testing.assert_allclose(runner.microbatch(batch)[0], expected_loss, rtol=1e-12)
    toy.assert_trees_close(runner.gradients(), expected, rtol=1e-10, atol=1e-12)


SOME: Sequence[str | Sequence[str]] = ("flash", "cheap+attention+mlp", ("full", "cheap"))


@pytest.mark.parametrize(
    ("name", "dropout", "policies"),
    [
        ("gpt", 0.3, SOME),
        *(
            pytest.param(*case, (*SOME, "cheap", "attention", "mlp", "full"), marks=pytest.mark.soak)
            for case in (("gpt", 0.3), ("llama", 0.0))
        ),
    ],
)
def test_interpreted_gradients_are_bit_equal_to_those_without_recomputation(
    name: str, dropout: float, policies: Sequence[str | Sequence[str]]
) -> None:
    """Dropout masks are drawn again from the same key."""
    model = tiny(name, dropout)
    stages = [model.layers[:2], model.layers[2:]]
    params = init_params(model, 0)
    rng = np.random.default_rng(0)
    batch = {n: rng.integers(0, 17, (2, 8)).astype(np.int32) for n in ("tokens", "targets")}
    batch["weights"] = np.ones((2, 8), np.float32)
    cache = BuildCache()
    results = {}
    for policy in ("none", *policies):
        built = build_all(stages, params, model.batch_spec(2), pipeline_submeshes(1) * 2, policy, cache=cache)
        runner = toy.Runner(built, stages, params, compiled=False)
        results[policy] = (runner.microbatch(batch), runner.gradients())
    expected = jax.tree.leaves(results["none"])
    for policy, got in results.items():
        for a, b in zip(jax.tree.leaves(got), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(policy))


def test_what_f_leaves_alive_is_what_is_counted() -> None:
    """Device bytes that remain when F's result has been handed on, by live arrays."""
    model = tiny("gpt", 0.3)
    params = init_params(model, 0)
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
    links = links_of([model.layers[:1], model.layers[1:2], model.layers[2:]], params)[1]
    for policy in ("none", "cheap+attention"):
        f = build_stage_functions(
            model.layers[1:2], 1, params, x, model.batch_spec(2), pipeline_submeshes(1)[0], 1, links, policy
        )
        forward = f.functions["F"]
        args = [jax.device_put(np.ones(a.shape, a.dtype), a.sharding) for a in forward.avals_in]
        before = {id(a) for a in jax.live_arrays()}
        residuals = [v for p, v in zip(forward.outputs, forward.call(*args), strict=True) if p.kind == "res"]
        live = sum(a.nbytes for a in jax.live_arrays() if id(a) not in before)
        reads_x = any(p.kind == "x" for op in ("B", "W") for p in f.functions[op].inputs)
        assert live + reads_x * 4 * 2 * 8 * 16 == f.residual_bytes
        del residuals, args


def tiny(name: str, dropout: float) -> Model:
    common: dict[str, Any] = {"vocab_size": 17, "d_model": 16, "num_layers": 2, "num_heads": 2, "seq_len": 8}
    return GPT(**common, dropout=dropout, tied=False) if name == "gpt" else Llama(**common, num_kv_heads=1, mlp_size=24)


# Recomputation waits for the cotangent of its layer.

DEEP = [[toy.embedding()], [toy.mlp("a"), toy.mlp("b"), toy.mlp("c")], [toy.head(), toy.loss()]]


@pytest.mark.parametrize("op", ["B", "BW"])
def test_a_layer_is_recomputed_when_its_cotangent_is_there(op: str) -> None:
    stage = build(DEEP, "full")[0][1]
    eqns = stage.functions[op].jaxpr.jaxpr.eqns
    gates = [k for k, eqn in enumerate(eqns) if eqn.primitive.name == "optimization_barrier"]
    assert len(gates) == 2, "the last layer's cotangent is there from the start"
    ups = [k for k, eqn in enumerate(eqns) if eqn.primitive.name == "tanh"]  # one a layer: GELU's
    assert len(ups) == 3
    assert ups[0] < gates[0] < ups[1] < gates[1] < ups[2]
    function = stage.functions[op]
    late = {v for p, v in zip(function.inputs, function.jaxpr.jaxpr.invars, strict=True) if p.kind == "dy"}
    for k, eqn in enumerate(eqns):
        if any(isinstance(a, Var) and a in late for a in eqn.invars):
            late.update(eqn.outvars)
        assert k not in ups[1:] or set(eqn.outvars) <= late, "it depends on the cotangent"


def test_nothing_waits_where_nothing_is_recomputed() -> None:
    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        return x @ p["w"]

    linear = [Layer(name, lambda k: {"w": toy.normal(k, toy.D, toy.D)}, apply) for name in "abc"]
    for op, f in build([DEEP[0], linear, DEEP[2]], "none")[0][1].functions.items():
        assert "optimization_barrier" not in str(f.jaxpr), op


def test_checkpoints_inside_layers_wait_too() -> None:
    cut = [[toy.embedding()], [toy.checkpointed("a"), toy.checkpointed("b")], [toy.head(), toy.loss()]]
    eqns = build(cut, "none")[0][1].functions["BW"].jaxpr.jaxpr.eqns
    (gate,) = [k for k, eqn in enumerate(eqns) if eqn.primitive.name == "optimization_barrier"]
    ups = [k for k, eqn in enumerate(eqns) if eqn.primitive.name == "tanh"]
    assert len(ups) == 2
    assert ups[0] < gate < ups[1]


def test_policies_may_differ_between_stages() -> None:
    params = toy.init_params(list(itertools.chain(*MIDDLE)))
    meshes = pipeline_submeshes(1) * 3
    functions = build_all(MIDDLE, params, toy.batch_avals(), meshes, ["none", "full", "none"])
    assert len(saved_shapes(functions[1])) == 1
    with pytest.raises(StageError, match=r"2 recompute.*3 stages.*3"):
        build_all(MIDDLE, params, toy.batch_avals(), meshes, ["none", "full"])


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(
        StageError, match="'some' does not exist; choose one of none, cheap, dots, attention, mlp, full, experts, fused"
    ):
        build(MIDDLE, "some")


# Attention scores are found where no layer names them, and what finds nothing says so.


class Attention(nnx.Module):
    """Self-attention around ``attend(module, q, k, v)`` of arrays [B, T, H, K]."""

    def __init__(self, rngs: nnx.Rngs, attend: Any) -> None:
        self.qkv = nnx.LinearGeneral(toy.D, (3, toy.H, toy.D // toy.H), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((toy.H, toy.D // toy.H), toy.D, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.attend = attend

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        return x + self.out(self.attend(self, q, k, v))


def of_jax(m: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def of_flax_with_dropout(m: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    still = m.dropout.deterministic
    key = None if still else m.dropout.rngs()
    options = {"dropout_rng": key, "dropout_rate": 0.2, "deterministic": still, "broadcast_dropout": False}
    return nnx.dot_product_attention(q, k, v, **options)  # type: ignore[no-any-return]


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bthk,bshk->bhts", q, k)


def combined(scores: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhts,bshk->bthk", scores, v)


def by_hand_with_dropout(m: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return combined(m.dropout(jax.nn.softmax(scores(q, k) / 2)), v)


def of_squares(m: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return combined(jax.nn.relu(scores(q, k)) ** 2, v)


def decaying(m: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return combined(scores(q, k) * jnp.tril(jnp.ones((1, 1, toy.T, toy.T))), v)


def linear(m: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bthk,bhkl->bthl", q, jnp.einsum("bthk,bthl->bhkl", k, v) * 0.5)


def attending(attend: Any) -> Any:
    return [[toy.embedding()], [from_nnx("a", lambda rngs: Attention(rngs, attend))], [toy.head(), toy.loss()]]


def of_size_of_scores(f: StageFunctions) -> int:
    """Return the bytes saved of arrays [B, H, T, T], in any order of axes, and with axes of one."""
    forward = f.functions["F"]
    saved = [a for p, a in zip(forward.outputs, forward.avals_out, strict=True) if p.kind == "res"]
    sizes = sorted((toy.B, toy.H, toy.T, toy.T))
    return sum(a.size * a.dtype.itemsize for a in saved if sorted(n for n in a.shape if n > 1) == sizes)


@pytest.mark.parametrize("attend", [of_jax, of_flax_with_dropout, by_hand_with_dropout, of_squares, decaying])
def test_scores_are_found_by_what_is_done_with_them(attend: Any) -> None:
    cut = attending(attend)
    none = build(cut, "none")[0][1]
    score_bytes = of_size_of_scores(none)
    assert score_bytes >= 4 * toy.B * toy.H * toy.T * toy.T
    product = 2 * toy.B * toy.H * toy.T * toy.T * (toy.D // toy.H)
    results = []
    for name in ("none", "attention", "flash", "cheap+attention"):
        functions, params = build(cut, name)
        runner = toy.Runner(functions, cut, params, compiled=False)
        results.append((runner.microbatch(toy.make_batch()), runner.gradients()))
        stage = functions[1]
        if name != "none":
            assert of_size_of_scores(stage) == 0 and not stage.notes
            assert stage.flops["BW"] == none.flops["BW"] + product, "q kᵀ again, and nothing else"
        if name == "attention":
            rows = 4 * toy.B * toy.H * toy.T  # maxima and sums, from which probabilities are made again
            assert stage.residual_bytes <= none.residual_bytes - score_bytes + 2 * rows
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


def test_a_state_of_linear_attention_is_no_score() -> None:
    none, attention = (build(attending(linear), name)[0][1] for name in ("none", "attention"))
    assert attention.flops == none.flops and attention.residual_bytes == none.residual_bytes
    assert attention.notes == ("recompute=attention finds no attention scores and recomputes nothing",)


def test_a_policy_that_recomputes_nothing_says_where() -> None:
    cut = [[toy.embedding(), toy.mlp("m")], [toy.attention("a")], [toy.scanned("s")], [toy.head(), toy.loss()]]
    built, _ = build(cut, "flash+mlp")
    idle = "recompute={} finds no {} and recomputes nothing".format
    loop = " (a loop is one equation to it: use jax.checkpoint in its body, or full)"
    attention, mlp = idle("attention", "attention scores"), idle("mlp", "hidden values")
    assert remarks(built) == (
        f"stages 0, 3: {attention}",
        f"stages 1, 3: {mlp}",
        f"stage 2: {mlp}{loop}",
        f"stage 2: {attention}{loop}",
    )
    assert not remarks(build(cut, "none")[0]) and not remarks(build(cut, "full")[0])
