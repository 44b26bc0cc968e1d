"""GPT and Llama on tensor-parallel shards: loss and every gradient against one device, collectives counted in jaxprs.

Also that on one shard both models are what they are without tensor parallelism: their blocks are written here a second time,
with Flax alone, and must trace to the same equations.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jaxpipe.axes import ONE_SHARD, TP, RankMesh
from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.layer import LayerContext, Model
from jaxpipe.stage.model.params import with_tied_leaves
from jaxpipe.stage.model.reference import apply_model, init_params
from models.attention import attention as attend
from models.gpt import GPT
from models.llama import Llama, rotate
from tests.support.sharded import (
    QUICK,
    collectives,
    loss_and_grads,
    mesh_of,
    shapes_in,
    shard_trees,
    step,
    trace_layers,
)

FACTORIES = {"gpt": GPT, "llama": Llama}
SMALL = {"vocab_size": 32, "d_model": 16, "num_layers": 1, "num_heads": 8, "seq_len": 8, "dtype": "float64"}
"""Options of the models; float64 ones need the fixture ``x64``."""
Options = tuple[tuple[str, Any], ...]


def options(**kwargs: Any) -> Options:
    return tuple(kwargs.items())


@functools.cache
def make(kind: str, extra: Options = ()) -> Model:
    return FACTORIES[kind](**{**SMALL, **dict(extra)})


def random_params(model: Model, seed: int = 0) -> Any:
    """Return parameters of order one, so that every term of the forward shows in the result, biases and scales too."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 0.5, a.shape), a.dtype), shapes)


def random_batch(model: Model, size: int = 2, seed: int = 0) -> dict[str, jax.Array]:
    """Return a batch of uneven weights: zeros here and there, the first row almost empty."""
    rng = np.random.default_rng(seed)
    shape = (size, model.seq_len)
    weights = rng.random(shape) * (rng.random(shape) > 0.3)
    weights[0, 1:] = 0
    return {
        "tokens": jnp.asarray(rng.integers(0, model.vocab_size, shape), jnp.int32),
        "targets": jnp.asarray(rng.integers(0, model.vocab_size, shape), jnp.int32),
        "weights": jnp.asarray(weights, jnp.float32),
    }


def on_one_device(model: Model, params: Any, batch: Any) -> Any:
    run = jax.value_and_grad(lambda p, b: apply_model(model, p, b), has_aux=True)
    return jax.jit(run, compiler_options=QUICK)(params, batch)


@functools.cache
def reference_result(kind: str, extra: Options) -> Any:
    model = make(kind, extra)
    (loss, weight), grads = on_one_device(model, random_params(model), random_batch(model))
    return (loss, weight), grads


def close(ours: Any, theirs: Any, tolerance: float) -> None:
    def compare(path: Any, a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(compare, ours, theirs)


# --- loss and gradients --------------------------------------------------------------------------------------------------

GROUPED = options(num_kv_heads=2, qkv_bias=True, tied=True)
BIASES = options(qkv_bias=True, out_bias=True, mlp_bias=True)
HUB = (*BIASES, *options(vocab_size=29, vocab_multiple=4, num_kv_heads=2, head_dim=4, qk_norm=True))
CASES: list[tuple[str, Options, RankMesh, int]] = [
    ("gpt", (), RankMesh(tp=2), 1),
    ("gpt", options(tied=False), RankMesh(tp=4, sequence=True), 2),
    ("llama", options(num_kv_heads=4, qkv_bias=True), RankMesh(tp=4, fused_residual=True), 1),
    ("llama", GROUPED, RankMesh(tp=4), 2),
    ("llama", GROUPED, RankMesh(tp=8, sequence=True, fused_residual=True), 1),
    ("llama", HUB, RankMesh(tp=4, sequence=True), 2),
    ("llama", options(num_kv_heads=2, qk_norm=True, joint_qk_norm=True), RankMesh(tp=2), 1),
]
ALL = [
    (kind, extra, RankMesh(tp=size, sequence=flags[0], fused_residual=flags[1]), dp)
    for (kind, extra), size, flags in itertools.product(
        [
            *[("gpt", options(tied=tied, num_layers=2)) for tied in (True, False)],
            *[
                ("llama", options(num_kv_heads=G, qkv_bias=bias, tied=tied, num_layers=2))
                for G, bias, tied in [(1, True, False), (2, False, True), (4, True, True), (8, False, False)]
            ],
        ],
        (2, 4, 8),
        itertools.product((False, True), repeat=2),
    )
    for dp in (1, 2)
    if size * dp <= 8
]


@pytest.mark.parametrize(
    ("kind", "extra", "tp", "dp"),
    [pytest.param(*x, marks=[pytest.mark.soak] * (x in (CASES[1], CASES[3], CASES[4]))) for x in CASES],
)
@pytest.mark.usefixtures("x64")
def test_loss_and_gradients_are_those_of_one_device(kind: str, extra: Options, tp: RankMesh, dp: int) -> None:
    model = make(kind, extra)
    result = loss_and_grads(model, random_params(model), random_batch(model), tp, dp=dp)
    close(result, reference_result(kind, extra), 1e-9)
    assert not np.any(np.asarray(result[1]["embed"]["tokens"]["embedding"])[model.vocab_size :])  # rows of padding


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "extra", "tp", "dp"), ALL)
@pytest.mark.usefixtures("x64")
def test_loss_and_gradients_of_every_combination(kind: str, extra: Options, tp: RankMesh, dp: int) -> None:
    test_loss_and_gradients_are_those_of_one_device(kind, extra, tp, dp)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "extra", "tp"),
    [
        ("gpt", options(dtype="float32"), RankMesh(tp=4, sequence=True)),
        pytest.param(
            "llama", (*GROUPED, ("dtype", "float32")), RankMesh(tp=4, fused_residual=True), marks=pytest.mark.soak
        ),
    ],
)
def test_float32(kind: str, extra: Options, tp: RankMesh) -> None:
    model = make(kind, extra)
    params, batch = jax.jit(lambda: init_params(model, 0))(), random_batch(model)
    close(loss_and_grads(model, params, batch, tp), on_one_device(model, params, batch), 1e-5)


@st.composite
def sized_models(draw: st.DrawFn) -> tuple[Model, RankMesh, int]:
    """Draw a small model of odd sizes and shards that divide it."""
    t = draw(st.sampled_from([2, 3, 4]))
    dp = draw(st.sampled_from([1, 2]))
    tp = RankMesh(tp=t, sequence=draw(st.booleans()), fused_residual=draw(st.booleans()))
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4, 6) if g % t == 0 or t % g == 0]))
    heads = draw(st.sampled_from([h for h in range(t, 4 * t + 1, t) if h % groups == 0] or [groups * t]))
    sizes = {
        "num_heads": heads,
        "d_model": heads * draw(st.sampled_from([2, 4])),
        "vocab_size": t * draw(st.integers(1, 9)),
        "seq_len": t * draw(st.integers(1, 3)),
        "tied": draw(st.booleans()),
        "dtype": "float64",
    }
    if draw(st.booleans()):
        mlp = t * draw(st.integers(1, 7))
        bias = draw(st.booleans())
        return Llama(num_layers=1, num_kv_heads=groups, mlp_size=mlp, qkv_bias=bias, **sizes), tp, dp
    return GPT(num_layers=1, **sizes), tp, dp


def check_sized(case: tuple[Model, RankMesh, int]) -> None:
    model, tp, dp = case
    params, batch = random_params(model), random_batch(model)
    close(loss_and_grads(model, params, batch, tp, dp=dp), on_one_device(model, params, batch), 1e-9)


@hypothesis.settings(max_examples=2)
@hypothesis.given(sized_models())
@pytest.mark.usefixtures("x64")
def test_any_sizes_that_divide(case: tuple[Model, RankMesh, int]) -> None:
    check_sized(case)


@pytest.mark.soak
@hypothesis.settings(max_examples=40)
@hypothesis.given(sized_models())
@pytest.mark.usefixtures("x64")
def test_many_sizes_that_divide(case: tuple[Model, RankMesh, int]) -> None:
    check_sized(case)


def test_positions_count_from_the_first_token_on_every_part_of_time() -> None:
    """Also where the sequence is shorter than the model's."""
    tp = RankMesh(tp=2, sequence=True)
    embed = make("gpt", options(dtype="float32")).layers[0]
    params, tokens = embed.init(jax.random.key(0)), jnp.arange(12, dtype=jnp.int32).reshape(2, 6)

    def run(params: Any, tokens: Any, shards: RankMesh = tp) -> Any:
        return embed.apply(params, None, LayerContext({"tokens": tokens}, None, False, shards))

    specs = ({"tokens": {"embedding": P(TP)}, "positions": P()}, P())
    ours = jax.jit(jax.shard_map(run, mesh=mesh_of(tp), in_specs=specs, out_specs=P(None, TP)))(params, tokens)
    np.testing.assert_allclose(ours, run(params, tokens, ONE_SHARD), rtol=1e-6)


# --- collectives ---------------------------------------------------------------------------------------------------------

# V, T and the width of the MLP are primes times 4, and appear in no other size
COUNTED = options(vocab_size=4 * 29, seq_len=4 * 5, num_heads=4, d_model=32, dtype="float32")


COUNTS = [
    ("gpt", (), False),
    ("gpt", options(tied=False), True),
    ("llama", (), True),
    ("llama", options(num_kv_heads=2), False),
]
"""Models, and whether the residual is fused; the soak has each with the other, too."""


@pytest.mark.parametrize(
    ("kind", "extra", "fused"),
    [*COUNTS, *(pytest.param(*model, not fused, marks=pytest.mark.soak) for *model, fused in COUNTS)],
)
def test_two_collectives_a_block_each_way(kind: str, extra: Options, fused: bool) -> None:
    model = make(kind, COUNTED + extra)
    params, batch = random_params(model), random_batch(model)
    for tp in (RankMesh(tp=4, fused_residual=fused), RankMesh(tp=4, sequence=True, fused_residual=fused)):
        kinds = ("all-gather", "reduce-scatter") if tp.splits_time else ("all-reduce", "all-reduce")
        branches = {(name, TP): 2 for name in kinds}
        traces = trace_layers(model, params, batch, tp)
        counts = {name: [collectives(trace.forward), collectives(trace.backward)] for name, trace in traces.items()}
        assert counts == {
            "embed": [{(kinds[1], TP): 1}, {(kinds[0], TP): 1} if tp.splits_time else {}],
            "block_00": [branches, branches],
            "head": [{(kinds[0], TP): 1} if tp.splits_time else {}, {(kinds[1], TP): 1}],
            "loss": [{("all-reduce", TP): 3}, {}],
        }


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_nothing_as_wide_as_the_vocabulary(kind: str) -> None:
    model = make(kind, COUNTED)
    params, batch = random_params(model), random_batch(model)
    for tp in (RankMesh(tp=4), RankMesh(tp=4, sequence=True)):
        traces = trace_layers(model, params, batch, tp).values()
        shapes = [shape for trace in traces for shape in shapes_in(trace.forward) | shapes_in(trace.backward)]
        sizes = {n for shape in shapes for n in shape}
        assert 29 in sizes and 4 * 29 not in sizes


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_sequence_parallelism_leaves_a_part_of_time_on_the_residual_stream(kind: str) -> None:
    model = make(kind, COUNTED)
    tp = RankMesh(tp=4, sequence=True)
    params, batch = random_params(model), random_batch(model)
    traces = trace_layers(model, params, batch, tp)
    for name in ("embed", "block_00"):
        (out,) = traces[name].forward.outvars
        assert out.aval.shape == (2, 5, 32)


# --- dropout -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "extra", "tp"),
    [
        ("gpt", options(dropout=0.2), RankMesh(tp=4, sequence=True)),
        ("llama", (*GROUPED, ("dropout", 0.2)), RankMesh(tp=4, fused_residual=True)),
    ],
)
@pytest.mark.usefixtures("x64")
def test_gradients_under_dropout_are_those_of_the_masks_drawn(kind: str, extra: Options, tp: RankMesh) -> None:
    """Central differences along a random direction: masks that differed between F and B, or shards, would show."""
    model = make(kind, extra)
    params, batch, key = random_params(model), random_batch(model), jax.random.key(1)
    direction = random_params(model, seed=2)
    run = step(model, params, tp)
    (loss, _), grads = run(params, batch, key)
    h = 1e-5
    ends = []
    for sign in (1, -1):
        shifted_params = jax.tree.map(lambda p, d, sign=sign: p + sign * h * d, params, direction)
        ends.append(float(run(shifted_params, batch, key)[0][0]))
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), grads, direction)))
    np.testing.assert_allclose((ends[0] - ends[1]) / (2 * h), slope, rtol=1e-6)
    assert float(loss) != float(run(params, batch, jax.random.key(2))[0][0])


# --- one shard -----------------------------------------------------------------------------------------------------------


def _dense(features: Any, name: str, std: float = 0.02, **kwargs: Any) -> nn.DenseGeneral:
    return nn.DenseGeneral(features, kernel_init=nn.initializers.normal(std), name=name, **kwargs)


class PlainGPTBlock(nn.Module):
    """GPT-2's block of d 16 and 4 heads in a model of 1 layer, dropout 0.1."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        std = 0.02 / 2**0.5

        def attention(x: jax.Array) -> jax.Array:
            qkv = _dense((3, 4, 4), "qkv")(x)
            q, k, v = (qkv[:, :, i] for i in range(3))
            key = self.make_rng("dropout") if train else None
            heads = attend(q, k, v, dropout=0.1, key=key)
            return _dense(16, "out", std, axis=(-2, -1))(heads)

        def mlp(x: jax.Array) -> jax.Array:
            return _dense(16, "down", std)(nn.gelu(_dense(64, "up")(x), approximate=True))

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)

        x = x + nn.Dropout(0.1)(attention(norm("norm_attn")(x)), deterministic=not train)
        return x + nn.Dropout(0.1)(mlp(norm("norm_mlp")(x)), deterministic=not train)


class PlainLlamaBlock(nn.Module):
    """Qwen2's block of d 16, 4 query heads and 2 key/value heads in a model of 1 layer, dropout 0.1."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        std = 0.02 / 2**0.5

        def attention(x: jax.Array) -> jax.Array:
            qkv = _dense((2, 4, 4), "qkv")(x)
            q = qkv[:, :, :, :2].reshape(*x.shape[:2], 4, 4)
            k, v = qkv[:, :, :, 2], qkv[:, :, :, 3]
            key = self.make_rng("dropout") if train else None
            heads = attend(rotate(q, 10000.0), rotate(k, 10000.0), v, dropout=0.1, key=key)
            return _dense(16, "out", std, axis=(-2, -1), use_bias=False)(heads)

        def mlp(x: jax.Array) -> jax.Array:
            gate_up = _dense((2, 64), "gate_up", use_bias=False)(x)
            return _dense(16, "down", std, use_bias=False)(nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1])

        def norm(name: str) -> nn.RMSNorm:
            return nn.RMSNorm(epsilon=1e-5, name=name)

        x = x + nn.Dropout(0.1)(attention(norm("norm_attn")(x)), deterministic=not train)
        return x + nn.Dropout(0.1)(mlp(norm("norm_mlp")(x)), deterministic=not train)


@pytest.mark.parametrize(
    ("kind", "extra", "plain"),
    [
        ("gpt", (), PlainGPTBlock()),
        ("llama", options(num_kv_heads=2, qkv_bias=True, mlp_size=64), PlainLlamaBlock()),
    ],
)
def test_one_shard_traces_to_the_equations_of_plain_flax(kind: str, extra: Options, plain: nn.Module) -> None:
    model = make(kind, options(num_heads=4, dropout=0.1, dtype="float32") + extra)
    layer, x, key = model.layers[1], jnp.ones((2, 8, 16)), jax.random.key(0)
    params = layer.init(key)
    flax_params = jax.jit(plain.init, static_argnums=2)(key, x, False)[
        "params"
    ]  # compiled, as the layer's init is: same rounding
    jax.tree.map(np.testing.assert_array_equal, params, flax_params)

    def ours(params: Any, x: Any, train: bool) -> Any:
        return layer.apply(params, x, LayerContext({}, key, train))

    def flax(params: Any, x: Any, train: bool) -> Any:
        return plain.apply({"params": params}, x, train, rngs={"dropout": key})

    for train in (True, False):
        forward = [str(jax.make_jaxpr(functools.partial(fn, train=train))(params, x)) for fn in (ours, flax)]
        back = [
            str(jax.make_jaxpr(jax.grad(lambda p, x, fn=fn, train=train: fn(p, x, train).sum(), (0, 1)))(params, x))
            for fn in (ours, flax)
        ]
        for one, other in (forward, back):
            assert re.sub("0x[0-9a-f]+", "", one) == re.sub("0x[0-9a-f]+", "", other)


# --- how parameters lie, and refusals ------------------------------------------------------------------------------------


def lying(model: Model, tp: RankMesh) -> Mapping[str, Any]:
    params = jax.eval_shape(lambda: init_params(model, 0))
    return {
        f"{layer}/{'/'.join(str(k.key) for k in path)}": kind
        for layer, tree in shard_trees(model, params, tp).items()
        for path, kind in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.usefixtures("x64")
def test_how_parameters_lie() -> None:
    gpt = lying(make("gpt"), RankMesh(tp=4))
    assert {name for name, kind in gpt.items() if kind == "same"} == {
        "embed/positions",
        *(f"block_00/norm_{branch}/{leaf}" for branch in ("attn", "mlp") for leaf in ("scale", "bias")),
        *("block_00/out/bias", "block_00/down/bias", "head/norm/scale", "head/norm/bias"),
    }
    assert "partial" not in gpt.values()
    sequence = lying(make("gpt"), RankMesh(tp=4, sequence=True))
    assert sequence == {name: "partial" if kind == "same" else kind for name, kind in gpt.items()}
    assert lying(make("gpt"), RankMesh(tp=1, sequence=True))["head/norm/scale"] == "same"
    for groups, kinds in ((8, (1, 0)), (4, (1, 0)), (2, ("partial", "partial"))):
        model = make("llama", options(num_kv_heads=groups, qkv_bias=True))
        llama = lying(model, RankMesh(tp=4))
        assert (llama["block_00/qkv/kernel"], llama["block_00/qkv/bias"]) == kinds
        assert llama["block_00/gate_up/kernel"] == 2 and llama["block_00/norm_mlp/scale"] == "same"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kind", "sizes", "tp", "message"),
    [
        ("gpt", {"num_heads": 2}, RankMesh(tp=4), r"^GPT: num_heads is 2, .* tp of 1, 2, or make num_heads 4$"),
        ("gpt", {"num_heads": 2, "d_model": 16}, RankMesh(tp=3), r"^GPT: num_heads is 2, .* over tp 3; use tp of 1, 2$"),
        ("gpt", {"vocab_size": 50257, "d_model": 32}, RankMesh(tp=2), r"vocab_size is 50257, .* such as 50258$"),
        ("gpt", {"seq_len": 10}, RankMesh(tp=4, sequence=True), r"seq_len is 10, .* use tp of 1, 2, or"),
        ("llama", {"mlp_size": 36}, RankMesh(tp=8), r"^Llama: mlp_size is 36, .* use tp of 1, 2, 4, or"),
        ("llama", {"num_heads": 24, "num_kv_heads": 6, "d_model": 48, "mlp_size": 48, "vocab_size": 48}, RankMesh(tp=4),
         r"num_kv_heads is 6, neither a multiple nor a divisor of tp 4; use tp of 1, 2, 3, 6, 12, 24$"),
    ],
)  # fmt: skip
def test_refusals_name_the_shards_that_would_work(kind: str, sizes: dict[str, Any], tp: RankMesh, message: str) -> None:
    """Blocks too, but for the vocabulary, which they know nothing of."""
    model = FACTORIES[kind](**{**SMALL, **sizes})
    for layer in model.layers[:-1]:
        assert layer.shards is not None
        assert layer.shards(ONE_SHARD) is not None
        if message.startswith("vocab_size") and layer.name.startswith("block"):
            assert layer.shards(tp) is not None
            continue
        with pytest.raises(ConfigError, match=message):
            layer.shards(tp)


@pytest.mark.usefixtures("x64")
def test_a_tied_head_is_split_as_the_embedding_is() -> None:
    for kind in FACTORIES:
        model = make(kind, options(tied=True))
        params = jax.eval_shape(lambda model=model: init_params(model, 0))
        head = model.layers[-2]
        assert head.shards is not None
        assert "kernel" in with_tied_leaves(head, params)
        for tp in (RankMesh(tp=4), RankMesh(tp=4, sequence=True)):
            assert head.shards(tp)[("kernel",)] == shard_trees(model, params, tp)["embed"]["tokens"]["embedding"] == 0
