"""Tensor-parallel layers one by one: each against the same computation on one device, and against Flax's own layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jaxpipe._jax_compat import vary
from jaxpipe.axes import TP, RankMesh
from jaxpipe.errors import ConfigError
from jaxpipe.tensor_parallel import (
    ONE_SHARD,
    Dropout,
    TensorParallel,
    VocabParallelEmbed,
    add_branch,
    check_shards,
    column_parallel,
    cross_entropy,
    own_query_heads,
    own_time,
    row_parallel,
    shard_key,
    sum_parts,
    vocab_parallel_logits,
    whole_time,
)
from tests.support.sharded import collectives, equations, mesh_of, shapes_in

B, T, D, F, V = 2, 8, 6, 16, 24
PLAIN, SEQUENCE = RankMesh(tp=4), RankMesh(tp=4, sequence=True)
BOTH = pytest.mark.parametrize("tp", [PLAIN, SEQUENCE], ids=["plain", "sequence"])


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def words(*shape: int, low: int = 0, high: int = V) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(low, high, shape), jnp.int32)


def on_shards(tp: RankMesh, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(fn, mesh=mesh_of(tp), in_specs=in_specs, out_specs=out_specs))


def traced(tp: RankMesh, fn: Callable[..., Any], in_specs: Any, *args: Any) -> Any:
    """Return the jaxpr of ``fn`` on one shard."""
    jaxprs = []

    def body(*shards: Any) -> jax.Array:
        jaxprs.append(jax.make_jaxpr(fn)(*shards))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(body, mesh=mesh_of(tp), in_specs=in_specs, out_specs=P()), *args)
    return jaxprs[0].jaxpr


def stream(tp: RankMesh) -> P:
    """Return how the residual stream [B, T, D] lies."""
    return P(None, TP) if tp.splits_time else P()


# --- the linear pair -----------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A branch of one column- and one row-parallel layer, both with biases."""

    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def branch(residual: jax.Array | None) -> jax.Array:
            wide = column_parallel(F, self.tp, name="up", bias_init=nn.initializers.normal(1))(x)
            down = row_parallel(D, self.tp, residual=residual, name="down", bias_init=nn.initializers.normal(1))
            return down(jnp.tanh(wide))

        return add_branch(x, branch, Dropout(0.0, tp=self.tp), train=True)


PAIR_SPECS = {"up": {"kernel": P(None, TP), "bias": P(TP)}, "down": {"kernel": P(TP), "bias": P()}}


@BOTH
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("x64")
def test_a_column_and_a_row_parallel_layer_make_a_branch(tp: RankMesh, fused: bool) -> None:
    tp = RankMesh(tp=tp.size, sequence=tp.sequence, fused_residual=fused)
    x, cotangent = normal(B, T, D), normal(B, T, D, seed=1)
    params = jax.tree.map(lambda a: a.astype(jnp.float64), Pair().init(jax.random.key(0), x)["params"])

    def run(shards: RankMesh, params: Any, x: Any, cotangent: Any) -> Any:
        y, pull = jax.vjp(lambda p, x: Pair(shards).apply({"params": p}, x), params, x)
        return y, pull(cotangent)

    def per_shard(params: Any, x: Any, cotangent: Any) -> Any:
        bias = params["down"]["bias"]
        params["down"]["bias"] = vary(bias, (TP,)) if tp.splits_time else bias
        y, (grads, dx) = run(tp, params, x, cotangent)
        if tp.splits_time:
            grads["down"]["bias"] = jax.lax.psum(grads["down"]["bias"], TP)
        return y, (grads, dx)

    specs = (PAIR_SPECS, stream(tp), stream(tp))
    ours = on_shards(tp, per_shard, specs, (stream(tp), (PAIR_SPECS, stream(tp))))(params, x, cotangent)
    expected = jax.jit(lambda *args: run(ONE_SHARD, *args))(params, x, cotangent)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), ours, expected)


@BOTH
def test_one_collective_a_product_each_way_and_none_for_a_fused_residual(tp: RankMesh) -> None:
    x = jnp.ones((B, T, D))
    params = Pair().init(jax.random.key(0), x)["params"]
    one = ["all-gather", "reduce-scatter"] if tp.splits_time else ["all-reduce"]
    for fused in (False, True):
        sharding = RankMesh(tp=tp.size, sequence=tp.sequence, fused_residual=fused)

        def forward(params: Any, x: Any, shards: RankMesh = sharding) -> Any:
            return Pair(shards).apply({"params": params}, x)

        def both(params: Any, x: Any, forward: Any = forward) -> Any:
            y, pull = jax.vjp(forward, params, x)
            return pull(y)

        specs = (PAIR_SPECS, stream(tp))
        assert collectives(traced(sharding, forward, specs, params, x)) == {(kind, TP): 1 for kind in one}
        # a bias added to each shard's rows of time is cast by whoever keeps gradients apart; here its gradient is summed
        bias = {("all-reduce", TP): 1} if tp.splits_time else {}
        assert collectives(traced(sharding, both, specs, params, x)) == {**{(kind, TP): 2 for kind in one}, **bias}


def test_several_layers_that_read_one_whole_input_cost_one_collective_going_back() -> None:
    x, kernel = jnp.ones((B, T, D)), jnp.ones((D, F))

    def both(kernel: Any, x: Any) -> Any:
        def forward(x: Any) -> Any:
            h = whole_time(x, PLAIN)
            layers = [column_parallel(F, PLAIN, input_is_whole=True, use_bias=False) for _ in range(3)]
            return sum(layer.apply({"params": {"kernel": kernel}}, h) for layer in layers)

        y, pull = jax.vjp(forward, x)
        return pull(y)

    assert collectives(traced(PLAIN, both, (P(None, TP), P()), kernel, x)) == {("all-reduce", TP): 1}


@pytest.mark.usefixtures("x64")
def test_the_fused_residual_has_the_gradient_of_equation_2() -> None:
    """AR(part + x/t): x's gradient is the result's own; by JAX's rule for the same sum it would cost an all-reduce."""
    part, x, cotangent = normal(4, B, T, D), normal(B, T, D, seed=1), normal(B, T, D, seed=2)

    def run(part: Any, x: Any, cotangent: Any) -> Any:
        y, pull = jax.vjp(lambda part, x: sum_parts(part[0], PLAIN, x), part, x)
        return y, pull(cotangent)

    specs = (P(TP), P(), P())
    y, (dpart, dx) = on_shards(PLAIN, run, specs, (P(), (P(TP), P())))(part, x, cotangent)
    np.testing.assert_allclose(y, part.sum(0) + x, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(dx, cotangent)
    np.testing.assert_array_equal(dpart, np.broadcast_to(cotangent, dpart.shape))
    assert collectives(traced(PLAIN, run, specs, part, x, cotangent)) == {("all-reduce", TP): 1}


def test_rows_of_time() -> None:
    rows = normal(T, 3)
    split = on_shards(SEQUENCE, lambda r: own_time(r, SEQUENCE), P(), P(TP))(rows)
    np.testing.assert_array_equal(split, rows)
    assert own_time(rows, PLAIN) is rows
    for fn in (lambda r: own_time(r, SEQUENCE), lambda r: sum_parts(vary(r[None], (TP,)), SEQUENCE)):
        with pytest.raises(ConfigError, match=r"6 tokens.*4 shards.*use 4.*4"):
            traced(SEQUENCE, fn, P(), jnp.ones((6, 3)))


# --- grouped-query heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "groups", "repeats"), [(8, 2, 4), (4, 1, 4), (4, 2, 6), (2, 1, 2)])
def test_shards_that_share_a_key_value_head_divide_its_queries(shards: int, groups: int, repeats: int) -> None:
    tp = RankMesh(tp=shards)
    leaf = jnp.arange(3 * groups * (repeats + 2) * 5.0).reshape(3, groups, repeats + 2, 5)
    head_shards = on_shards(tp, lambda leaf: own_query_heads(leaf, tp)[None], P(), P(TP))(leaf)
    queries_per_shard = repeats * groups // shards
    assert head_shards.shape == (shards, 3, 1, queries_per_shard + 2, 5)
    queries = (
        head_shards[:, :, 0, :queries_per_shard].transpose(1, 0, 2, 3).reshape(3, groups * repeats, 5)
    )  # shard after shard
    np.testing.assert_array_equal(queries, leaf[:, :, :repeats].reshape(3, groups * repeats, 5))
    for shard in range(shards):
        np.testing.assert_array_equal(
            head_shards[shard, :, 0, queries_per_shard:], leaf[:, shard * groups // shards, repeats:]
        )

    def gradient(leaf: Any) -> Any:
        _, pull = jax.vjp(lambda leaf: own_query_heads(leaf, tp), vary(leaf, (TP,)))
        (g,) = pull(jnp.ones_like(own_query_heads(vary(leaf, (TP,)), tp)))
        return jax.lax.psum(g, TP)

    reads = on_shards(tp, gradient, P(), P())(leaf)  # how many shards read each value
    np.testing.assert_array_equal(reads[:, :, :repeats], 1)
    np.testing.assert_array_equal(reads[:, :, repeats:], shards // groups)


# --- vocabulary ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.usefixtures("x64")
def test_vocabulary_from_embedding_to_loss(tp: RankMesh) -> None:
    """Embedding, head and cross entropy in a row, one table for both, values and gradients; no array of V anywhere."""
    table, tokens, targets = normal(V, D), words(B, T), words(B, T).at[0, 3].set(0).at[1, 1].set(V - 1)
    weights = normal(B, T, seed=3)

    def run(shards: RankMesh, table: Any, tokens: Any) -> Any:
        def losses(table: Any) -> Any:
            embed = VocabParallelEmbed(V, D, tp=shards)
            x = embed.apply({"params": {"embedding": table}}, tokens)
            return jnp.sum(weights * cross_entropy(3 * vocab_parallel_logits(x, table, shards), targets, shards))

        return jax.value_and_grad(losses)(table)

    ours = on_shards(tp, lambda *args: run(tp, *args), (P(TP), P()), (P(), P(TP)))(table, tokens)
    expected = jax.jit(lambda *args: run(ONE_SHARD, *args))(table, tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), ours, expected)
    jaxpr = traced(tp, lambda *args: run(tp, *args), (P(TP), P()), table, tokens)
    assert V // tp.size in {n for shape in shapes_in(jaxpr) for n in shape}
    assert V not in {n for shape in shapes_in(jaxpr) for n in shape}


@BOTH
def test_words_outside_the_vocabulary_show_as_nan(tp: RankMesh) -> None:
    tokens = jnp.asarray([[0, V - 1, V, -1] * 2], jnp.int32)
    embed = VocabParallelEmbed(V, D, tp=tp)
    x = on_shards(tp, lambda t, w: embed.apply({"params": {"embedding": t}}, w), (P(TP), P()), stream(tp))(
        normal(V, D), tokens
    )
    bad = np.asarray([[False, False, True, True] * 2])
    np.testing.assert_array_equal(np.isnan(x).all(-1), bad)
    np.testing.assert_array_equal(np.isnan(x).any(-1), bad)
    loss = on_shards(tp, lambda x: cross_entropy(x, tokens, tp), P(None, None, TP), P())(jnp.zeros((1, 8, V)))
    np.testing.assert_array_equal(np.isnan(loss), bad)
    np.testing.assert_allclose(loss[~bad], np.log(V), rtol=1e-6)


def test_cross_entropy_of_extreme_logits() -> None:
    """Large ones do not overflow; −inf (a banned word) is a word of probability zero, on every shard or none."""
    logits = jnp.zeros((1, 3, V)).at[0, 0, 5].set(1e30).at[0, 1, 1:].set(-jnp.inf).at[0, 2].set(-jnp.inf)
    targets = jnp.asarray([[5, 0, 2]], jnp.int32)
    loss = on_shards(PLAIN, lambda x: cross_entropy(x, targets, PLAIN), P(None, None, TP), P())(logits)
    np.testing.assert_array_equal(loss, cross_entropy(logits, targets))
    np.testing.assert_array_equal(loss[0, :2], 0)


def test_cross_entropy_keeps_nothing_wide_and_sums_nothing_going_back() -> None:
    logits, targets = jnp.zeros((B, T, V), jnp.bfloat16), words(B, T)
    residuals = []

    def forward(logits: Any) -> Any:
        loss, pull = jax.vjp(lambda x: cross_entropy(x, targets, PLAIN), logits)
        residuals.extend(jax.tree.leaves(pull))
        return loss

    def back(logits: Any) -> Any:
        loss, pull = jax.vjp(lambda x: cross_entropy(x, targets, PLAIN), logits)
        return jax.make_jaxpr(pull)(loss).jaxpr

    traced(PLAIN, forward, P(None, None, TP), logits)
    assert not [v for v in residuals if v.dtype == jnp.float32 and v.shape[-1] == V // 4]
    gradients = []
    traced(PLAIN, lambda x: (gradients.append(back(x)), 0)[1], P(None, None, TP), logits)
    assert collectives(gradients[0]) == {}


# --- dropout -------------------------------------------------------------------------------------------------------------


def test_the_residual_stream_has_one_mask_or_one_a_part_of_time() -> None:
    x, key = jnp.ones((4, T, 64)), jax.random.key(0)

    def run(x: jax.Array, shards: RankMesh) -> jax.Array:
        result: jax.Array = Dropout(0.25, tp=shards).apply({}, x, deterministic=False, rngs={"dropout": key})
        return result

    on_all = on_shards(PLAIN, lambda x: run(x, PLAIN), P(), P())(x)  # P(): the types know it is the same on all shards
    unsharded = nn.Dropout(0.25).apply({}, x, deterministic=False, rngs={"dropout": key})
    np.testing.assert_array_equal(on_all, unsharded)
    split = np.asarray(on_shards(SEQUENCE, lambda x: run(x, SEQUENCE), P(None, TP), P(None, TP))(x))
    parts = np.split(split, 4, axis=1)
    assert all((a != b).any() for i, a in enumerate(parts) for b in parts[:i])
    assert abs((split == 0).mean() - 0.25) < 0.03
    quiet = Dropout(0.25, tp=SEQUENCE).apply({}, x, deterministic=True)
    np.testing.assert_array_equal(quiet, x)


def test_a_shard_draws_its_own_numbers_for_its_own_heads() -> None:
    def draw(_: Any) -> jax.Array:
        return jax.random.bits(shard_key(jax.random.key(0), PLAIN), (1,))

    assert len(set(np.asarray(on_shards(PLAIN, draw, P(), P(TP))(0)).tolist())) == 4
    key = jax.random.key(0)
    assert shard_key(key, ONE_SHARD) is key


def test_dropout_acts_on_the_sum_of_a_branch_so_nothing_is_fused_under_it() -> None:
    fused = RankMesh(tp=4, fused_residual=True)
    residuals: list[Any] = []

    def branch(residual: Any) -> jax.Array:
        residuals.append(residual)
        return jnp.ones(3)

    class Adds(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return add_branch(x, branch, Dropout(0.5, tp=fused), train=train)

    x = jnp.ones(3)
    Adds().apply({}, x, True, rngs={"dropout": jax.random.key(0)})
    Adds().apply({}, x, False)
    assert residuals[0] is None and residuals[1] is x


# --- one shard -----------------------------------------------------------------------------------------------------------


def program(fn: Callable[..., Any], *args: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*args)))


@pytest.mark.parametrize(
    ("ours", "flax"),
    [
        (column_parallel(F, ONE_SHARD), nn.DenseGeneral(F)),
        (column_parallel((3, 2, 4), ONE_SHARD, split=1, use_bias=False), nn.DenseGeneral((3, 2, 4), use_bias=False)),
        (row_parallel(F, ONE_SHARD, axis=(-2, -1)), nn.DenseGeneral(F, axis=(-2, -1))),
    ],
)
def test_linear_layers_on_one_shard_are_those_of_flax(ours: nn.Module, flax: nn.Module) -> None:
    x = jnp.ones((B, T, D))
    params = flax.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, params, ours.init(jax.random.key(0), x))
    assert program(ours.apply, params, x) == program(flax.apply, params, x)


def test_embedding_and_dropout_on_one_shard_are_those_of_flax() -> None:
    tokens, key = words(B, T), jax.random.key(0)
    ours, flax = VocabParallelEmbed(V, D), nn.Embed(V, D)
    params = flax.init(key, tokens)
    jax.tree.map(np.testing.assert_array_equal, params, ours.init(key, tokens))
    np.testing.assert_array_equal(ours.apply(params, tokens), flax.apply(params, tokens))
    assert np.isnan(ours.apply(params, jnp.asarray([-1, -V, V]))).all()  # Flax counts negative ones from the end
    x = jnp.ones((B, T, D))
    runs = [
        program(lambda x, m=m: m(0.3, deterministic=False).apply({}, x, rngs={"dropout": key}), x)
        for m in (Dropout, nn.Dropout)
    ]
    assert runs[0] == runs[1]


def test_what_does_nothing_on_one_shard_traces_to_nothing() -> None:
    x = jnp.ones((B, T, D))
    jaxpr = jax.make_jaxpr(lambda x: sum_parts(own_time(whole_time(x, ONE_SHARD), ONE_SHARD), ONE_SHARD))(x).jaxpr
    assert not list(equations(jaxpr))


# --- refusals ------------------------------------------------------------------------------------------------------------


def test_what_shards_must_divide() -> None:
    sizes = {"num_heads": 12, "mlp_size": 48, "vocab_size": 60}
    check_shards("M", RankMesh(tp=6), sizes)
    check_shards("M", RankMesh(tp=4), sizes, seq_len=6)  # counts with sequence parallelism only
    for tp, options, message in [
        (RankMesh(tp=8), {}, r"M: num_heads is 12, .* over tp 8; use tp of 1, 2, 3, 4, 6, 12, or .* of 8 such as 16"),
        (RankMesh(tp=4, sequence=True), {"seq_len": 6}, r"seq_len is 6, .* use tp of 1, 2, 3, 6, or"),
        (RankMesh(tp=6), {"kv_heads": 4}, r"num_kv_heads is 4, neither .* of tp 6; use tp of 1, 2, 4, 12$"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message) as caught:
            check_shards("M", tp, sizes, **options)
        assert "\n" not in str(caught.value)


def test_layers_refuse_what_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"column-parallel layer up: features is 6, .* use tp of 1, 2, 3, 6, or"):
        column_parallel((3, 6), PLAIN, split=1, name="up")
    with pytest.raises(ConfigError, match=r"num_embeddings.*10.*1, 2, 5, 10"):
        VocabParallelEmbed(10, D, tp=PLAIN).init(jax.random.key(0), words(B, T))
    with pytest.raises(ConfigError, match=r"num_heads.*6.*1, 2, 6"):
        own_query_heads(jnp.ones((D, 2, 5, 4)), PLAIN)
    with pytest.raises(ConfigError, match=r"8 key/value.*4 shards"):
        own_query_heads(jnp.ones((D, 8, 3, 4)), PLAIN)


def test_layers_written_for_the_earlier_name_still_work() -> None:
    assert TensorParallel(2, True, cp=2) == TensorParallel(size=2, sequence=True, cp=2)
    assert TensorParallel(2, True, cp=2) == RankMesh(tp=2, sequence=True, cp=2)
    assert TensorParallel(size=2).size == 2
