"""Stages on several devices: dp × tp submeshes, parameters split or whole on the shards, gradients summed once after a step.

The layers here are the smallest that have every kind of parameter; models are in test_parallel_training.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe.axes import ONE_SHARD, TP, RankMesh
from jaxpipe.errors import ConfigError, ProgramError, StageError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.model.adapters import from_nnx
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params, Path, Shard
from jaxpipe.stage.model.reference import apply_model, init_params

V, D, F, T = 13, 8, 24, 8


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return 0.3 * jax.random.normal(key, shape)


def _scattered(x: jax.Array, tp: RankMesh) -> jax.Array:
    if tp.size == 1:
        return x
    if tp.sequence:
        return jax.lax.psum_scatter(x, TP, scatter_dimension=1, tiled=True)
    return jax.lax.psum(x, TP)


def _gathered(x: jax.Array, tp: RankMesh) -> jax.Array:
    return jax.lax.all_gather(x, TP, axis=1, tiled=True) if tp.splits_time else x


def embed() -> Layer:
    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        h = p["table"][c.data["tokens"]]  # split along D, then made whole
        if c.tp.size == 1:
            return h
        full_width = jnp.zeros((*h.shape[:2], D), h.dtype)
        at = jax.lax.axis_index(TP) * h.shape[2]
        return _scattered(jax.lax.dynamic_update_slice_in_dim(_varying(full_width), h, at, axis=2), c.tp)

    return Layer(
        "embed", lambda k: {"table": _normal(k, V, D)}, apply, reads=("tokens",), shards=lambda tp: {("table",): 1}
    )


def _varying(x: jax.Array) -> jax.Array:
    return x + 0.0 * jax.lax.axis_index(TP).astype(x.dtype)


def mlp(name: str) -> Layer:
    def init(key: jax.Array) -> Params:
        a, b, c = jax.random.split(key, 3)
        return {"scale": 1 + _normal(a, D), "up": _normal(b, D, F), "down": _normal(c, F, D), "bias": _normal(a, D)}

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        h = _gathered(x * p["scale"][None, None, :], c.tp)
        return x + _scattered(jnp.tanh(h @ p["up"]) @ p["down"], c.tp) + p["bias"][None, None, :]

    def shards(tp: RankMesh) -> Mapping[Path, Shard]:
        replicated: dict[Path, Shard] = {("scale",): "partial", ("bias",): "partial"} if tp.sequence else {}
        return {("up",): 1, ("down",): 0, **replicated}

    return Layer(name, init, apply, kind="mlp", shards=shards)


def head(*, sums: bool = True) -> Layer:
    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        return _gathered(x, c.tp) @ p["kernel"]

    return Layer("head", lambda k: {"kernel": _normal(k, D, V)}, apply, shards=_partial_with_sequence)


def _partial_with_sequence(tp: RankMesh) -> Mapping[Path, Shard]:
    return {}


def loss() -> Layer:
    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        if c.tp.splits_time:  # every shard has the whole sequence, and types can't know that they are alike
            x = jax.lax.psum(x, TP) / c.tp.size
        log = jax.nn.log_softmax(x)
        picked = jnp.take_along_axis(log, c.data["targets"][:, :, None], axis=-1)[:, :, 0]
        weights = c.data["weights"].astype(x.dtype)
        return -jnp.sum(weights * picked), jnp.sum(weights)

    return Layer("loss", lambda k: {}, apply, reads=("targets", "weights"), shards=lambda tp: {})


def _batch_spec(size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
    ids = jax.ShapeDtypeStruct((size, T), jnp.int32)
    return {"tokens": ids, "targets": ids, "weights": jax.ShapeDtypeStruct((size, T), jnp.float32)}


def toy_model() -> Model:
    return Model("toy", (embed(), mlp("a"), mlp("b"), head(), loss()), _batch_spec, V, T)


def _batch(m: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, V, (m, size, T)).astype(np.int32),
        "targets": rng.integers(0, V, (m, size, T)).astype(np.int32),
        "weights": (rng.random((m, size, T)) < 0.6).astype(np.float32),
    }


def _reference(model: Model, params: Any, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
    flat = {name: a.reshape(-1, T) for name, a in batch.items()}

    def mean(params: Any) -> Any:
        total, weight = apply_model(model, params, flat)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))(params)  # type: ignore[no-any-return]


def _pipeline(model: Model, pp: int, dp: int, tp: RankMesh | int, size: int = 4, recompute: str = "none") -> Pipeline:
    cut = {1: [(0, 5)], 2: [(0, 2), (2, 5)], 4: [(0, 1), (1, 2), (2, 3), (3, 5)]}[pp]
    schedule = generate("zb-h1", ranks=pp, microbatches=4)
    return Pipeline.build(
        model,
        schedule,
        microbatch_size=size,
        boundaries=cut,
        dp=dp,
        tp=tp,
        compute_dtype=jnp.float64,
        recompute=recompute,
    )


_SOAK = pytest.mark.soak
"""The mark of shapes that only repeat others."""


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("pp", "dp", "tp"),
    [
        (2, 2, 2),
        pytest.param(2, 1, 4, marks=_SOAK),
        pytest.param(2, 4, 1, marks=_SOAK),
        pytest.param(1, 2, 4, marks=_SOAK),
    ],
)
def test_gradients_of_sharded_stages(pp: int, dp: int, tp: int, sequence: bool, x64: None) -> None:
    model = toy_model()
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model, 0))
    batch = _batch(4, 4)
    pipe = _pipeline(model, pp, dp, RankMesh(tp=tp, sequence=sequence))
    loss_value, grads = pipe.loss_and_grads(pipe.place(params), batch)
    expected_loss, expected = _reference(model, params, batch)
    np.testing.assert_allclose(loss_value, expected_loss, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grads, expected)
    total, weight = pipe.evaluate(pipe.place(params), batch)
    np.testing.assert_allclose(total / weight, expected_loss, rtol=1e-12)


class NnxMLP(nnx.Module):
    """The layer ``mlp`` written with nnx: a shard's module has a part of the hidden units."""

    def __init__(self, rngs: nnx.Rngs, tp: RankMesh = ONE_SHARD) -> None:
        self.tp = tp
        self.up = nnx.Linear(D, F // tp.size, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(F // tp.size, D, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + _scattered(self.down(jnp.tanh(self.up(_gathered(x, self.tp)))), self.tp)


def test_nnx_modules_are_divided_too(x64: None) -> None:
    block = from_nnx("nnx", NnxMLP, shards=lambda tp: {("up", "kernel"): 1, ("down", "kernel"): 0})
    model = Model("toy", (embed(), block, mlp("b"), head(), loss()), _batch_spec, V, T)
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model, 0))
    batch = _batch(4, 4)
    pipe = _pipeline(model, 1, 1, RankMesh(tp=2))
    _, grads = pipe.loss_and_grads(pipe.place(params), batch)
    _, expected = _reference(model, params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grads, expected)
    with pytest.raises(StageError, match=r"'nnx'.*shards="):
        from_nnx("nnx", NnxMLP(nnx.Rngs(0)), shards=lambda tp: {})


def _recurrent(p: Params, x: Any, c: LayerContext) -> Any:
    """A loop whose state starts from zeros."""

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(x + h @ p["w"])
        return h, h

    ys = jax.lax.scan(step, jnp.zeros((len(x), D), x.dtype), x.transpose(1, 0, 2))[1]
    return ys.transpose(1, 0, 2)


def _centred(axis: str | None) -> Any:
    """Subtracts the mean over the batch, all shards of it if ``axis`` names them."""

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        mean = x.mean(0, keepdims=True)
        return (x - (mean if axis is None else jax.lax.pmean(mean, axis))) @ p["w"]

    return apply


@pytest.mark.parametrize(("ours", "plain"), [(_recurrent, _recurrent), (_centred("dp"), _centred(None))])
def test_loops_from_zeros_and_exchanges_over_dp(ours: Any, plain: Any, x64: None) -> None:
    """Gradients are those of the losses of all shards together, also where layers make shards of a batch exchange something."""

    def model(apply: Any) -> Model:
        block = Layer("block", lambda k: {"w": _normal(k, D, D)}, apply)
        return Model("toy", (embed(), block, mlp("b"), head(), loss()), _batch_spec, V, T)

    params = jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model(plain), 0))
    batch = _batch(4, 4)
    pipe = _pipeline(model(ours), 1, 2, 1)
    _, grads = pipe.loss_and_grads(pipe.place(params), batch)

    def mean(params: Any) -> Any:
        parts = [apply_model(model(plain), params, {n: v[i] for n, v in batch.items()}) for i in range(4)]
        return sum(a for a, _ in parts) / sum(b for _, b in parts)

    expected = jax.jit(jax.grad(mean))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grads, expected)


@pytest.mark.parametrize("recompute", ["full", "cheap+gather", "flash+gather"])
def test_recomputing_on_shards_changes_no_gradient(recompute: str, x64: None) -> None:
    model = toy_model()
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model, 0))
    batch = _batch(4, 4)
    pipe = _pipeline(model, 1, 2, RankMesh(tp=4, sequence=True), recompute=recompute)
    _, grads = pipe.loss_and_grads(pipe.place(params), batch)
    _, expected = _reference(model, params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grads, expected)


@pytest.mark.parametrize("sequence", [False, True])
def test_functions_hold_no_collective_over_dp(sequence: bool, x64: None) -> None:
    pipe = _pipeline(toy_model(), 2, 2, RankMesh(tp=2, sequence=sequence))
    for stage in pipe.stages:
        for function in stage.functions.values():
            for eqn in function.jaxpr.jaxpr.eqns:
                axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
                assert "dp" not in axes, f"{function.op} of stage {stage.stage}: {eqn}"


def test_parameters_go_to_the_shards_and_back(x64: None) -> None:
    model = toy_model()
    params = init_params(model, 0)
    pipe = _pipeline(model, 2, 2, RankMesh(tp=2, sequence=True))
    assert _pipeline(model, 2, 1, 2).tp == RankMesh(tp=2)
    placed = pipe.place(params)
    back: dict[str, Any] = {}
    for s in pipe.instances:
        back.update(pipe.layout(s).unpack(placed[pipe.primary(s)]))
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_what_can_not_be_divided_says_what_would_work(x64: None) -> None:
    model = toy_model()
    with pytest.raises(ConfigError, match=r"embed.*table.*8 on axis 1.*tp 3"):
        _pipeline(model, 2, 1, RankMesh(tp=3))
    with pytest.raises(
        ProgramError, match=r"microbatch of 6 .* dp 4; use a microbatch size of 4 or 8, or dp 1 or 2 or 3 or 6"
    ):
        _pipeline(model, 2, 4, RankMesh(tp=1), size=6)
    plain = Layer("plain", lambda k: {"w": _normal(k, D)}, lambda p, x, c: x * p["w"][None, None, :])
    layers = (embed(), plain, mlp("b"), head(), loss())
    with pytest.raises(StageError, match="'plain'"):
        _pipeline(Model("toy", layers, _batch_spec, V, T), 2, 1, RankMesh(tp=2))
