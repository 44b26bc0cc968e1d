"""Layers may return losses of their own, sums and peaks, and change leaves by them after a step: exact under any cut."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Schedule, bidirectional, generate
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params, With
from jaxpipe.stage.model.reference import apply_model, init_params, last_readers, run_layers
from jaxpipe.train.step import TrainStep
from tests.support.pipelines import assert_same_arrays, some_schedule

T, D, E, TOP, VOCAB = 4, 6, 4, 2, 7
ALPHA, RATE = 0.3, 0.125
ROWS = 8


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return 0.5 * jax.random.normal(key, shape)


def routed(name: str) -> Layer:
    """Return a layer of gates with the balance loss by sequence, counts, and a bias of the choice that no gradient trains."""

    def init(key: jax.Array) -> Params:
        a, b = jax.random.split(key)
        return {"router": 3 * _normal(a, D, E), "out": _normal(b, E, D), "bias": jnp.zeros(E)}

    def apply(p: Params, x: Any, c: LayerContext) -> With:
        shares = jax.nn.softmax(x @ p["router"])  # [B, T, E]
        _, chosen = jax.lax.top_k(shares + p["bias"][None, None], TOP)
        is_chosen = (chosen[..., None] == jnp.arange(E)[None, None, None]).any(-2)  # [B, T, E]
        counts = is_chosen.sum((0, 1), dtype=jnp.int32)
        fractions = is_chosen.mean(1) / TOP
        balance = E * (jax.lax.stop_gradient(fractions) * shares.mean(1)).sum(-1)  # [B]
        rows, times = shares.shape[:2]
        y = jnp.tanh(x + (shares * is_chosen) @ p["out"])
        loss = (times * balance.sum(), jnp.asarray(rows * times, shares.dtype))
        return With(y, {"balance": loss}, {"load": counts, "mass": shares.sum((0, 1))}, {"fullest": counts})

    def after_step(leaves: Params, sums: Mapping[str, jax.Array]) -> Params:
        load = sums["load"].astype(leaves["bias"].dtype)
        bias = leaves["bias"] + RATE * jnp.sign(load.mean() - load)
        return {"bias": bias - bias.mean()}

    return Layer(
        name, init, apply, trainable=lambda path: path != ("bias",), float32=lambda path: path == ("bias",),
        losses={"balance": ALPHA}, after_step=after_step,
    )  # fmt: skip


def model() -> Model:
    def embed(p: Params, x: Any, c: LayerContext) -> Any:
        return p["table"][c.data["tokens"]]

    def loss(p: Params, x: Any, c: LayerContext) -> Any:
        logits = jax.nn.log_softmax(x @ p["head"])
        weights = c.data["weights"].astype(logits.dtype)
        return -(
            weights[..., None] * logits * (jnp.arange(VOCAB)[None, None] == c.data["tokens"][..., None])
        ).sum(), weights.sum()

    layers = (
        Layer("embed", lambda key: {"table": _normal(key, VOCAB, D)}, embed, ("tokens",)),
        *(routed(f"gates{i}") for i in range(3)),
        Layer("loss", lambda key: {"head": _normal(key, D, VOCAB)}, loss, ("tokens", "weights")),
    )

    def spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
        kinds = {"tokens": np.int32, "weights": np.float32}
        return {name: jax.ShapeDtypeStruct((size, T), kind) for name, kind in kinds.items()}

    return Model("gates", layers, spec, VOCAB, T)


def batch_of(microbatches: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.integers(0, VOCAB, (ROWS, T)), np.arange(ROWS)[:, None])  # rows differ
    weights = (rng.random((ROWS, T)) < 0.7).astype(np.float32)
    arrays = {"tokens": tokens.astype(np.int32), "weights": weights}
    return {name: array.reshape(microbatches, -1, T) for name, array in arrays.items()}


CASES: dict[str, tuple[Schedule, int, dict[str, Any]]] = {
    "one stage": (generate("1f1b", 1, 1), 1, {}),
    "dp, recompute": (generate("zb-h1", 2, 4), 2, {"recompute": "full"}),
    "braids": (generate("stp", 2, 4), 1, {"recompute": "full"}),
    "replicas": (some_schedule(bidirectional(2), 8), 1, {}),
}


@cache
def pipeline(case: str) -> Pipeline:
    schedule, dp, options = CASES[case]
    size = ROWS // schedule.num_microbatches
    return Pipeline.build(model(), schedule, microbatch_size=size, compute_dtype=jnp.float64, dp=dp, **options)


def batch_for(case: str, seed: int = 0) -> dict[str, np.ndarray]:
    return batch_of(CASES[case][0].num_microbatches, seed)


@pytest.fixture
def params(x64: None) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model(), 0))


@pytest.fixture
def reference(params: dict[str, Params]) -> Any:
    """Return what is minimised, its gradient, and what each layer of gates returned, for all rows at once."""
    whole = {name: array[0] for name, array in batch_of(1).items()}

    readers = last_readers(model(), model().losses)

    @jax.jit
    def objective(params: Any) -> Any:
        returned: dict[int, With] = {}
        run_layers(model(), readers, readers, {}, params, whole, train=True, extra=returned)
        total, weight = apply_model(model(), params, whole)
        return total / weight, {f"gates{i}": returned[i + 1] for i in range(3)}

    (value, returned), gradient = jax.value_and_grad(objective, has_aux=True, allow_int=True)(params)
    return value, gradient, jax.device_get(returned)


def new_bias(load: Any) -> Any:
    bias = RATE * np.sign(np.mean(load) - load)
    return bias - bias.mean()


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_whole_batch(case: str, params: dict[str, Params], reference: Any) -> None:
    value, gradient, returned = reference
    step = TrainStep(pipeline(case), optax.sgd(1.0))
    state, metrics = step(step.init(params), batch_for(case))
    # The log has the model's loss, and the other one beside it: what is minimised is their sum.
    balance = metrics.metrics["balance"]
    np.testing.assert_allclose(metrics.loss + ALPHA * balance, value, rtol=1e-14)
    pairs = [side.losses["balance"] for side in returned.values()]
    np.testing.assert_allclose(balance, sum(a for a, _ in pairs) / sum(b for _, b in pairs), rtol=1e-14)
    # Counts are exact, of each layer, once for each position, whatever is recomputed.
    assert metrics.sums.keys() == {"load", "mass", "fullest"}
    for name, side in returned.items():
        load = metrics.sums["load"][name]
        assert load.dtype == np.int32 and load.sum() == TOP * ROWS * T
        np.testing.assert_array_equal(load, side.sums["load"])
        np.testing.assert_allclose(metrics.sums["mass"][name], side.sums["mass"], rtol=1e-14)
        assert (metrics.sums["fullest"][name] <= load).all() and metrics.sums["fullest"][name].any()
    updated = jax.device_get(step.by_layer(state)[0])
    for name, leaves in params.items():
        for key, leaf in leaves.items():
            if key == "bias":
                expected = new_bias(returned[name].sums["load"])
                assert expected.any()
            else:
                expected = leaf - gradient[name][key]
            np.testing.assert_allclose(updated[name][key], expected, atol=1e-14)
    # An evaluation knows nothing of it, and chooses by the new bias.
    whole: Any = {n: a.reshape(-1, T) for n, a in batch_for(case).items()}
    total, weight = apply_model(model(), updated, whole, train=False)
    assert "balance" not in step.pipeline.eval_reported.metrics
    np.testing.assert_allclose(step.pipeline.evaluate(state.compute, batch_for(case)), (total, weight), rtol=1e-14)


def test_a_skipped_step_changes_no_leaf_also_where_updates_are_ahead(params: dict[str, Params]) -> None:
    ends = []
    for mode in ("off", "on"):
        step = TrainStep(pipeline("dp, recompute"), optax.adam(0.1), clip_norm=1e3, post_validation=mode)
        state = step.init(params)
        for seed in range(4):
            batch = batch_for("dp, recompute", seed)
            batch["weights"] += np.nan if seed == 2 else 0
            before = jax.device_get(step.by_layer(state)[0])
            state, metrics = step(state, batch)
            after = jax.device_get(step.by_layer(state)[0])
            assert bool(metrics.applied) == (seed != 2)
            changed = [not np.array_equal(before["gates1"][key], after["gates1"][key]) for key in ("bias", "router")]
            assert changed == [seed != 2] * 2
        ends.append(jax.device_get(step.by_layer(state)))
    assert_same_arrays(*ends)
