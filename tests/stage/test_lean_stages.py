"""Functions of a stage copy no operands of weight products, and keep nothing that follows from less."""

from __future__ import annotations

import itertools
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage import jaxprs
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.compiled.cpu import OPTIONS, for_cpu
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.jaxprs import jaxpr_flops
from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import Layer, LayerContext, Model
from jaxpipe.stage.split.graph import Graph
from models.gpt import GPT
from models.llama import Llama
from tests.support import toy_stages as toy

CUT = [[toy.embedding()], [toy.mlp("a"), toy.mlp("b"), toy.mlp("c")], [toy.head(), toy.loss()]]


def middle() -> StageFunctions:
    params = toy.init_params(list(itertools.chain(*CUT)))
    return build_all(CUT, params, toy.batch_avals(), pipeline_submeshes(1) * 3)[1]


def arrays_like(avals: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jax.device_put(rng.standard_normal(a.shape).astype(a.dtype), a.sharding) for a in avals]


def test_weight_gradients_are_those_of_products_over_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, but for rounding: flattening batch and time changes no sum, though on some CPUs its order."""
    flat = middle()
    monkeypatch.setattr(jaxprs, "_of_matrices", lambda eqn: None)
    plain = middle()
    for op in ("W", "BW"):
        assert "dimension_numbers=(([0, 1], [0, 1]), ([], []))" in str(plain.functions[op].jaxpr)
        assert "dimension_numbers=(([0, 1], [0, 1]), ([], []))" not in str(flat.functions[op].jaxpr)
        results = [f.functions[op].call(*arrays_like(f.functions[op].avals_in)) for f in (flat, plain)]
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *results)


@pytest.mark.parametrize("op", ["W", "BW"])
def test_no_operand_of_a_weight_gradient_is_copied(op: str) -> None:
    """XLA's CPU backend would copy operands transposed, each with all that leads to it fused into the copy. Parameters
    and their gradients it may transpose."""
    function = middle().functions[op]
    text = function.jitted.lower(*function.avals_in).compile().as_text()
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|transpose)\(", text)
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in copied]
    assert all(size < toy.B * toy.T * toy.D or size % (toy.B * toy.T) for size in sizes)


def test_products_in_other_axes_stay_as_they_are() -> None:
    def products(a: Any, b: Any) -> Any:
        return (
            jnp.einsum("btd,bte->de", a, b),
            jnp.einsum("btd,bte->bde", a, b),
            jnp.einsum("btd,bse->tdse", a, b),
            jnp.einsum("btd,etd->be", a, b),
            jnp.einsum("btd,bte->", a, b),
        )

    avals = [jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)] * 2
    closed = jax.make_jaxpr(products)(*avals)
    flat = jaxprs.flatten(closed.jaxpr, closed.consts).close()
    operands = [jnp.arange(24.0).reshape(2, 3, 4), jnp.ones((2, 3, 4))]
    for got, expected in zip(jax.core.eval_jaxpr(flat.jaxpr, flat.consts, *operands), products(*operands), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    dims = [eqn.params["dimension_numbers"] for eqn in flat.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert dims.count((((0,), (0,)), ((), ()))) >= 2, "over batch and time, and over batch alone"
    assert any(batch for _, (batch, _) in dims)


TORCH = {
    "gpt": (8_404_992, 13),
    "gpt, dropout": (15_736_832, 19),
    "llama": (11_022_336, 17),
    "llama, 2 key/value heads": (10_498_048, 17),
}
"""Bytes and arrays that PyTorch's autograd keeps of a block besides parameters: torch 2.13.0+cpu, width 256, 4 heads, MLP 1024
(SwiGLU: 704), 256 tokens, batch 2, float32, ``nn.LayerNorm`` or ``nn.RMSNorm``, one q, k, v projection (Llama: three), rotation
as x · cos + turned(x) · sin, ``scaled_dot_product_attention(is_causal=True)`` (its scores are not kept; ours are), tanh GELU.
Distinct storages seen by ``torch.autograd.graph.saved_tensors_hooks`` in one forward pass."""

_SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": 256, "num_heads": 4, "seq_len": 256, "num_layers": 1}
BLOCKS = {
    "gpt": lambda: GPT(**_SIZES),
    "gpt, dropout": lambda: GPT(**_SIZES, dropout=0.1),
    "llama": lambda: Llama(**_SIZES),
    "llama, 2 key/value heads": lambda: Llama(**_SIZES, num_kv_heads=2),
}


def block_of(model: Model, recompute: str = "none") -> StageFunctions:
    stages = [model.layers[:1], model.layers[1:2], model.layers[2:]]
    params = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    return build_all(stages, params, model.batch_spec(2), pipeline_submeshes(1) * 3, recompute)[1]


def kept_arrays(f: StageFunctions) -> int:
    """Return what F saves, and the stage's input if the backward pass reads it."""
    reads_x = any(p.kind == "x" for op in ("B", "W") for p in f.functions[op].inputs)
    return sum(p.kind == "res" for p in f.functions["F"].outputs) + reads_x


@pytest.mark.parametrize("name", TORCH)
def test_a_block_keeps_no_more_than_autograd_in_pytorch(name: str) -> None:
    block = block_of(BLOCKS[name]())
    most_bytes, most_arrays = TORCH[name]
    assert block.residual_bytes <= most_bytes
    assert kept_arrays(block) <= (most_arrays if "dropout" in name else 13)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_keeping_less_costs_less_than_a_percent(name: str) -> None:
    """FLOPs of F, B and W, elementwise work counted, against forward and backward pass in one."""
    model = BLOCKS[name]()
    block = block_of(model)
    parts = sum(jaxpr_flops(block.functions[op].jaxpr, elementwise=True) for op in "FBW")
    layer = model.layers[1]
    params = jax.eval_shape(layer.init, jax.random.key(0))
    context = LayerContext({}, None, True)

    def fused(params: Any, acc: Any, x: Any, dy: Any) -> Any:
        y, pullback = jax.vjp(lambda p, x: layer.apply(p, x, context), params, x)
        dparams, dx = pullback(dy)
        return y, dx, jax.tree.map(jnp.add, acc, dparams)

    x = jax.ShapeDtypeStruct((2, 256, 256), jnp.float32)
    fused_flops = jaxpr_flops(jax.make_jaxpr(fused)(params, params, x, x), elementwise=True)
    assert parts <= 1.01 * fused_flops


class OfAUser(nn.Module):
    """Norms, gates and activations as they come; ``h`` is read by two products."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        h = nn.LayerNorm()(x)
        gate, up = nn.Dense(4 * 64)(h), nn.Dense(4 * 64)(h)
        wide = nn.Dropout(0.1, deterministic=not train)(nn.swish(gate) * nn.gelu(up) + jnp.exp(-(gate**2)))
        return x + nn.Dense(64)(wide)


def test_layers_of_a_user_keep_arguments_and_statistics() -> None:
    size = jax.ShapeDtypeStruct((1, 16, 64), jnp.float32)

    def embed(params: Any, x: Any, context: LayerContext) -> Any:
        return params["table"][context.data["tokens"]]

    layers = [
        Layer("embed", lambda key: {"table": jnp.zeros((8, 64))}, embed, reads=("tokens",)),
        from_linen("user", OfAUser(), example=(size,), uses_key=True),
        Layer("loss", lambda key: {}, lambda p, x, c: ((x**2).sum(), jnp.float32(1))),
    ]
    params = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in layers}
    data = {"tokens": jax.ShapeDtypeStruct((64, 16), jnp.int32)}
    block = build_all([[layer] for layer in layers], params, data, pipeline_submeshes(1) * 3)[1]
    tokens = 64 * 16
    arguments, statistics, mask = 4 * tokens * (64 + 2 * 256), 4 * tokens * 2, tokens * 256
    assert block.residual_bytes == arguments + statistics + mask
    assert kept_arrays(block) == 6


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 256, 24), (0, 1)), ((3, 100, 7, 5), (1,)), ((2, 3, 100, 7), (0, 2)), ((197, 5), (0,)), ((3, 20_001), (1,)),
     ((4, 40, 9), (0, 1, 2)), ((5,), (0,)), ((0, 5), (0,))],
)  # fmt: skip
def test_reductions_in_parts_are_reductions(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Nowhere further from float64 than XLA's tree of windows may be, which adds 32 numbers at a time."""
    x = np.random.default_rng(0).random(shape, np.float32)
    reductions = [jnp.sum, jnp.max, jnp.min] if x.size else [jnp.sum]
    for reduction in reductions:
        closed = jax.make_jaxpr(lambda x, f=reduction: f(x, axes))(x)
        parts = for_cpu(closed)
        run = jax.jit(partial(jax.core.eval_jaxpr, parts.jaxpr, parts.consts), compiler_options=dict(OPTIONS))
        expected = getattr(np, reduction.__name__)(x.astype(np.float64), axes)
        np.testing.assert_allclose(run(x)[0], expected, rtol=4e-7 if reduction is jnp.sum else 0)


def test_reductions_of_a_stage_are_no_windows() -> None:
    """Which is how XLA's CPU backend makes them by itself, several times slower."""
    block = block_of(BLOCKS["gpt"]())
    for op in ("F", "B", "W"):
        function = block.functions[op]
        assert "reduce-window" not in function.jitted.lower(*function.avals_in).compile().as_text()


def test_what_a_product_and_others_read_is_made_once() -> None:
    def reads_twice(a: Any, b: Any) -> Any:
        h = jnp.tanh(a) + 1
        return h.reshape(6, 4) @ b, h * 2, jnp.sin(a)

    a, b = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    once = for_cpu(jax.make_jaxpr(reads_twice)(a, b))
    assert [eqn.primitive.name for eqn in once.jaxpr.eqns].count("optimization_barrier") == 1
    got = jax.core.eval_jaxpr(once.jaxpr, once.consts, a, b)
    jax.tree.map(np.testing.assert_array_equal, tuple(got), reads_twice(a, b))


@pytest.mark.parametrize("turn", [False, True])
def test_products_of_weights_are_the_same_however_they_are_computed(turn: bool) -> None:
    def products(a: Any, b: Any, w: Any) -> Any:
        over = (((0,), (0,)), ((), ()))
        wide, narrow = (a, b) if turn else (b, a)
        return jax.lax.dot_general(wide, narrow, over), jnp.einsum("bd,ed->be", a, w)

    rng = np.random.default_rng(0)
    operands = [rng.integers(-4, 4, shape).astype(np.float32) for shape in ((256, 48), (256, 16), (8, 48))]
    closed = for_cpu(jax.make_jaxpr(products)(*operands))
    jax.tree.map(
        np.testing.assert_array_equal,
        tuple(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *operands)),
        products(*operands),
    )
    shapes = [eqn.invars[0].aval.shape for eqn in closed.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert shapes[0] == (256, 16), "the narrow one on the left"


def test_weight_gradients_are_summed_before_the_next_layer_begins() -> None:
    """Else XLA's scheduler for GPUs leaves their products, and what those read, to the end of BW."""
    model = GPT(**_SIZES | {"num_layers": 2})
    stages = [model.layers[:1], model.layers[1:3], model.layers[3:]]
    params = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    bw = build_all(stages, params, model.batch_spec(2), pipeline_submeshes(1) * 3)[1].functions["BW"]
    (barrier,) = [eqn for eqn in bw.jaxpr.jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    results = set(bw.jaxpr.jaxpr.outvars[1:-1])  # between dx and the token
    assert len(results.intersection(barrier.outvars)) == 4, "the matrices of the last layer"


def test_what_is_computed_again_may_read_what_stands_behind_its_first_use() -> None:
    """Its equations are moved to where the first result is used; the numbers 0, 1, … are made further back."""

    @jax.custom_vjp
    def wave(x: Any) -> Any:
        return jnp.sin(x)

    def gradient(x: Any, cotangent: Any) -> Any:
        first = cotangent * jnp.cos(x)
        return first + cotangent * jnp.sin(x + jnp.arange(x.shape[1], dtype=x.dtype)[None])

    wave.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (jax.checkpoint(gradient)(x, cotangent),))
    layers = [
        Layer("scale", lambda key: {"by": jnp.ones(4)}, lambda p, x, c: c.data["x"] * p["by"][None], reads=("x",)),
        *(Layer(name, lambda key: {}, lambda p, x, c: wave(x)) for name in ("one", "two")),
        Layer("loss", lambda key: {}, lambda p, x, c: ((x**2).sum(), jnp.float32(1))),
    ]
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    params = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in layers}
    (stage,) = build_all([layers], params, {"x": x}, pipeline_submeshes(1), "full")
    data = jnp.arange(8.0).reshape(2, 4)
    arrays = {"param": [jnp.ones(4)], "data": [data], "acc": [jnp.zeros(4)]}
    values = {}
    for op in ("F", "BW"):
        function = stage.functions[op]
        results = function.call(*(values[p] if p in values else arrays[p.kind][p.index] for p in function.inputs))
        values |= dict(zip(function.outputs, results, strict=True))
    expected = jax.grad(lambda by: (wave(wave(data * by[None])) ** 2).sum())(jnp.ones(4))
    np.testing.assert_allclose(results[0], expected, rtol=1e-5)


def gated(p: dict[str, Any], x: Any, reads: str) -> Any:
    y = jnp.einsum("btd,dnf->btnf", x, p["w"])
    gate, up = y[:, :, 0], y[:, :, 1]
    if reads == "one":
        return x + jnp.tanh(gate + up) @ p["down"]
    return x + (jax.nn.silu(gate) * (up @ p["v"] if reads == "a product" else up)) @ p["down"]


@pytest.mark.parametrize(("reads", "are_views"), [("both", True), ("one", False), ("a product", False)])
def test_slices_that_are_all_kept_are_kept_as_what_they_are_of(
    reads: str, are_views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else F copies them out of their product to keep them."""
    width = 4096  # large: small arrays are fewest, whatever they copy
    shapes = {"w": (toy.D, 2, width), "v": (width, width), "down": (width, toy.D)}
    layer = Layer("gated", lambda key: {n: jnp.zeros(s) for n, s in shapes.items()}, lambda p, x, c: gated(p, x, reads))
    stages = [[toy.embedding()], [layer], [toy.head(), toy.loss()]]
    params = toy.init_params(list(itertools.chain(*stages)))

    def functions() -> StageFunctions:
        return build_all(stages, params, toy.batch_avals(), pipeline_submeshes(1) * 3)[1]

    now = functions()
    monkeypatch.setattr(Graph, "_parts", lambda graph, whole: [])
    before = functions()
    assert now.residual_bytes == before.residual_bytes
    kept = [[a.shape for p, a in zip(f["F"].outputs, f["F"].avals_out, strict=True) if p.kind == "res"]
            for f in (now.functions, before.functions)]  # fmt: skip
    if are_views:
        assert sorted(kept[0]) == [(toy.B, toy.T, 2, width)]
        assert kept[1] == [(toy.B, toy.T, 1, width)] * 2
    else:
        assert kept[0] == kept[1]
