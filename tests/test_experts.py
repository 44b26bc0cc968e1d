"""Experts over shards of an axis of the test's own: results, gradients, counts and drops against every expert on every
token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import ConfigError
from jaxpipe.experts import combine, dispatch, product, route

N, D, F = 12, 5, 3
"""Tokens of all shards, width, hidden width."""


def operands(num_experts: int, tokens: int = N, **columns: float) -> dict[str, Any]:
    """Return random parameters and tokens; ``columns``: what is added to the logits of expert ``e0``, ``e1`` and so on."""
    rng = np.random.default_rng(0)
    shapes = {"x": (tokens, D), "router": (D, num_experts), "up": (num_experts, D, 2, F), "down": (num_experts, F, D)}
    arrays = {name: rng.normal(0, 1, shape) for name, shape in shapes.items()}
    arrays["x"][:, 0] = 1
    for name, added in columns.items():
        arrays["router"][0, int(name[1:])] += added
    return {name: jnp.asarray(a) for name, a in arrays.items()}


def gated(h: Any) -> Any:
    return jax.nn.silu(h[..., 0, :]) * h[..., 1, :]


def mixture(p: dict[str, Any], top_k: int, axes: tuple[str, ...] = (), **options: Any) -> Any:
    """Return the results [N, D] of tokens, and counts and drops by expert."""
    choice = route(p["x"], p["router"], top_k)
    rows, places = dispatch(p["x"], choice.experts, p["router"].shape[1], axes=axes, **options)
    rows = product(gated(product(rows, p["up"], places)), p["down"], places)
    return combine(rows, choice.weights, places), places.counts, places.dropped


def by_every_expert(p: dict[str, Any], top_k: int, is_dropped: Any = None) -> Any:
    """Compute all experts on all tokens; choices that ``is_dropped`` [N, k] marks count nothing."""
    choice = route(p["x"], p["router"], top_k)
    results = jnp.einsum("nef,efd->ned", gated(jnp.einsum("nd,edgf->negf", p["x"], p["up"])), p["down"])
    weights = choice.weights if is_dropped is None else jnp.where(is_dropped, 0, choice.weights)
    share = jnp.sum(jax.nn.one_hot(choice.experts, p["router"].shape[1]) * weights[:, :, None], axis=1)
    return jnp.einsum("ne,ned->nd", share, results)


def on_shards(p: dict[str, Any], top_k: int, shape: tuple[int, ...], **options: Any) -> Any:
    """Return the loss, the results, gradients, counts and drops of all shards, experts divided over the axes of ``shape``."""
    axes = tuple("uv"[: len(shape)])
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    specs = {name: P() if name == "router" else P(axes) for name in p}

    def loss(p: dict[str, Any]) -> Any:
        y, counts, dropped = mixture(p, top_k, axes, **options)
        return jax.lax.psum(jnp.sum(jnp.sin(y)), axes), (y, counts[None], dropped[None])

    run = jax.shard_map(loss, mesh=mesh, in_specs=(specs,), out_specs=(P(), P(axes)))
    return jax.jit(jax.value_and_grad(run, has_aux=True))(p)


def assert_equal(results: Any, p: dict[str, Any], top_k: int, is_dropped: Any = None) -> None:
    (_, (y, counts, _)), grads = results

    def loss(p: dict[str, Any]) -> Any:
        y = by_every_expert(p, top_k, is_dropped)
        return jnp.sum(jnp.sin(y)), y

    (_, expected), expected_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(p)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    assert np.all(np.isfinite(expected))
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], rtol=1e-11, atol=1e-12, err_msg=name)
    chosen = np.asarray(route(p["x"], p["router"], top_k).experts)
    np.testing.assert_array_equal(np.sum(counts, axis=0), np.bincount(chosen.reshape(-1), minlength=counts.shape[1]))


@pytest.mark.parametrize("products", ["padded", "ragged"])
@pytest.mark.parametrize(
    ("shape", "num_experts", "top_k", "columns"),
    [
        ((4,), 8, 2, {}),
        ((2, 2), 8, 3, {"e0": 30.0, "e5": -30.0}),
        ((4,), 4, 4, {}),
        ((1,), 4, 1, {"e2": 30.0}),
        ((4, 2), 8, 2, {}),
    ],
    ids=["four", "hot-and-empty-over-two-axes", "all-chosen", "one-shard", "one-token-a-shard"],
)
def test_every_expert_on_every_token_gives_the_same(
    shape: tuple[int, ...], num_experts: int, top_k: int, columns: dict[str, float], products: str, x64: None
) -> None:
    p = operands(num_experts, tokens=8 if shape == (4, 2) else N, **columns)
    results = on_shards(p, top_k, shape, products=products)
    assert_equal(results, p, top_k)
    assert not np.any(results[0][1][2])


def positions(experts: np.ndarray, buckets: int, num_experts: int) -> np.ndarray:
    """Return the place of each choice of ``experts`` [n, k] in the bucket of its shard: experts in order, tokens in order."""
    place = np.zeros(experts.shape, int)
    per_bucket = num_experts // buckets
    order = sorted(np.ndindex(*experts.shape), key=lambda at: (experts[at], at))
    filled = dict.fromkeys(range(buckets), 0)
    for at in order:
        bucket = int(experts[at]) // per_bucket
        place[at] = filled[bucket]
        filled[bucket] += 1
    return place


@pytest.mark.parametrize(("products", "capacity", "room"), [("padded", 1.0, 1), ("ragged", 1.0, 2)])
def test_choices_without_room_count_nothing_and_are_counted(
    products: str, capacity: float, room: int, x64: None
) -> None:
    p, shards, top_k, num_experts = operands(8, e1=1.5, e2=1.0), 4, 2, 8
    experts = np.asarray(route(p["x"], p["router"], top_k).experts).reshape(shards, -1, top_k)
    buckets = num_experts if products == "padded" else shards
    is_dropped = np.stack([positions(chosen, buckets, num_experts) for chosen in experts]) >= room
    results = on_shards(p, top_k, (shards,), products=products, capacity=capacity)
    assert_equal(results, p, top_k, jnp.asarray(is_dropped.reshape(N, top_k)))
    lost = [
        np.bincount(chosen[drops], minlength=num_experts) for chosen, drops in zip(experts, is_dropped, strict=True)
    ]
    np.testing.assert_array_equal(results[0][1][2], lost)
    assert np.sum(lost) > 4
    all_lost = is_dropped.all(axis=-1).reshape(N)
    assert all_lost.any() and not np.any(np.asarray(results[0][1][0])[all_lost])


def chosen_by_loops(scores: np.ndarray, bias: np.ndarray, groups: int, kept: int, best: int, top_k: int) -> list[int]:
    """Choose experts for one token as DeepSeek-V3 says it."""
    by_group = (scores + bias).reshape(groups, -1)
    totals = [sum(sorted(group, reverse=True)[:best]) for group in by_group]
    open_groups = sorted(range(groups), key=lambda g: -totals[g])[:kept]
    size = by_group.shape[1]
    candidates = [e for e in range(len(scores)) if e // size in open_groups]
    return sorted(candidates, key=lambda e: -(scores + bias)[e])[:top_k]


@pytest.mark.parametrize(("score", "best"), [("sigmoid", 2), ("softmax", 1)])
def test_groups_and_a_bias_choose_and_do_not_weigh(score: str, best: int, x64: None) -> None:
    p = operands(8)
    bias = np.random.default_rng(1).normal(0, 0.3, 8)
    options: dict[str, Any] = {"groups": 4, "top_groups": 2, "group_best": best, "scale": 2.5}
    choice = route(p["x"], p["router"], 3, score=score, bias=jnp.asarray(bias), **options)
    logits = np.asarray(p["x"] @ p["router"])
    scores = 1 / (1 + np.exp(-logits))
    if score == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = [chosen_by_loops(s, bias, 4, 2, best, 3) for s in scores]
    np.testing.assert_array_equal(choice.experts, expected)
    picked = np.take_along_axis(scores, np.asarray(expected), 1)
    np.testing.assert_allclose(choice.weights, 2.5 * picked / picked.sum(-1, keepdims=True), rtol=1e-12)
    plain = route(p["x"], p["router"], 3, score=score, renormalise=False)
    np.testing.assert_allclose(plain.weights, -np.sort(-scores, axis=-1)[:, :3], rtol=1e-12)


def test_equal_scores_go_to_the_lowest_numbers() -> None:
    choice = route(jnp.ones((2, 3), jnp.bfloat16), jnp.zeros((3, 5)), 2)
    np.testing.assert_array_equal(choice.experts, [[0, 1], [0, 1]])
    assert choice.weights.dtype == jnp.float32


def primitives(jaxpr: Any) -> set[str]:
    names = set()
    for eqn in jaxpr.eqns:
        bodies = [b for v in eqn.params.values() for b in (v if isinstance(v, tuple | list) else (v,))]
        jaxprs = [getattr(b, "jaxpr", b) for b in bodies if hasattr(getattr(b, "jaxpr", b), "eqns")]
        names |= {eqn.primitive.name}.union(*(primitives(j) for j in jaxprs))
    return names


@pytest.mark.parametrize("products", ["padded", "ragged"])
def test_no_gradient_is_scattered(products: str) -> None:
    p = {name: a.astype(jnp.float32) for name, a in operands(8).items()}
    one = functools.partial(mixture, top_k=2, products=products)
    grads = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(one(p)[0])))(p)
    assert not {name for name in primitives(grads.jaxpr) if "scatter" in name and name != "scatter"}


def test_hopper_gpus_have_kernels_of_their_own() -> None:
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((4,), ("u",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    shapes = {"x": (64, 128), "router": (128, 8), "up": (8, 128, 2, 256), "down": (8, 256, 128)}

    def gradients(dtype: Any) -> list[str]:
        def loss(p: dict[str, Any]) -> Any:
            y, _, _ = mixture(p, 2, ("u",), products="ragged", capacity=2.0)
            return jax.lax.psum(jnp.sum(y.astype(jnp.float32)), "u")

        specs = {name: P() if name == "router" else P("u") for name in shapes}
        run = jax.shard_map(loss, mesh=mesh, in_specs=(specs,), out_specs=P())
        p = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
        return str(jax.make_jaxpr(jax.grad(run))(p)).split()

    words = gradients(jnp.bfloat16)
    assert sum(word.startswith("hopper_ragged_dot") for word in words) == 6
    assert not any(word.startswith("ragged_dot_general") for word in words)
    with pytest.raises(ConfigError, match=r"multiples of 128 on Hopper.*float32 \[128, 512\].*H100.*products=padded"):
        gradients(jnp.float32)
