"""Layers may return losses of their own, sums and peaks, and change leaves by them after a step: exact under any cut."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.axes import RankMesh
from jaxpipe.errors import JudgedError, StageError
from jaxpipe.experts import Choice, route, sequence_balance
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Schedule, bidirectional, generate
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params, With, with_leaf_rules
from jaxpipe.stage.model.reference import apply_model, init_params, last_readers, run_layers
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.metrics import read_metrics
from jaxpipe.train.step import TrainStep
from models.moe import MoE
from tests.support.pipelines import assert_same_arrays, some_schedule
from tests.support.train_runs import config, run, write_text

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
        choice = Choice(shares.reshape(-1, E), chosen.reshape(-1, TOP), jnp.ones(()))
        loss = sequence_balance(choice, len(x))
        y = jnp.tanh(x + (shares * is_chosen) @ p["out"])
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
    again = step.by_layer(step.init(updated))[0]
    assert_same_arrays([again[name] for name in returned], [updated[name] for name in returned])
    # An evaluation knows nothing of it, and chooses by the new bias.
    whole: Any = {n: a.reshape(-1, T) for n, a in batch_for(case).items()}
    total, weight = apply_model(model(), updated, whole, train=False)
    assert "balance" not in step.pipeline.eval_reported.metrics
    np.testing.assert_allclose(step.pipeline.evaluate(state.compute, batch_for(case)), (total, weight), rtol=1e-14)


def test_balance_by_sequence_is_the_formula_of_each_sequence(x64: None) -> None:
    rng = np.random.default_rng(0)
    x, router = rng.normal(size=(3 * T, D)), rng.normal(size=(D, E))

    def loss(router: Any) -> tuple[Any, tuple[Any, Choice]]:
        choice = route(jnp.asarray(x), router, TOP, score="sigmoid")
        total, tokens = sequence_balance(choice, 3)
        return total, (tokens, choice)

    (total, (tokens, choice)), gradient = jax.value_and_grad(loss, has_aux=True)(router)
    expected = 0.0
    for scores, experts in zip(choice.probs.reshape(3, T, E), choice.experts.reshape(3, -1), strict=True):
        shares = (scores / scores.sum(-1, keepdims=True)).mean(0)
        expected += T * E * (np.bincount(experts, minlength=E) / (T * TOP) * shares).sum()
    np.testing.assert_allclose([total, tokens], [expected, 3 * T], rtol=1e-14)
    assert np.linalg.norm(gradient) > 0.1  # a balance loss without a gradient would show in no value


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


def test_balance_by_counts_follows_from_the_whole_batch_on_a_mesh(x64: None) -> None:
    """Counts, the bias of the choice and the fractions that the next step's loss takes are those of one device, to the bit."""
    experts = MoE(
        d_model=8, num_heads=2, num_layers=2, num_experts=E, expert_size=8, vocab_size=16, seq_len=T, dtype="float64",
        balance="batch", balance_weight=ALPHA, router_bias=True, bias_rate=1e-4,
    )  # fmt: skip
    mesh, readers = RankMesh(dp=2, ep=2, cp=2), last_readers(experts, experts.losses)
    pipe = Pipeline.build(
        experts, generate("zb-h1", 2, 2), microbatch_size=ROWS // 2, compute_dtype=jnp.float64, tp=mesh
    )

    @jax.jit
    def sides(params: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        returned: dict[int, With] = {}
        run_layers(experts, readers, readers, {}, params, batch, extra=returned)
        return {f"block_0{i}": (returned[i + 1].losses["balance"], returned[i + 1].sums["load"]) for i in range(2)}

    step = TrainStep(pipe, optax.sgd(1.0))
    state = step.init(init_params(experts, 0))
    for seed in range(2):
        ids = np.random.default_rng(seed).integers(0, 16, (2, ROWS // 2, T)).astype(np.int32)
        batch = {"tokens": ids, "targets": ids, "weights": np.ones(ids.shape, np.float32)}
        before = jax.device_get(step.by_layer(state)[0])
        expected = jax.device_get(sides(before, {name: a.reshape(-1, T) for name, a in batch.items()}))
        state, metrics = step(state, batch)
        after = jax.device_get(step.by_layer(state)[0])
        pairs = [pair for pair, _ in expected.values()]
        np.testing.assert_allclose(metrics.metrics["balance"], sum(a for a, _ in pairs) / (2 * ROWS * T), rtol=1e-12)
        for name, (_, load) in expected.items():
            np.testing.assert_array_equal(metrics.sums["load"][name], load)
            assert load.sum() == 2 * ROWS * T and len(set(load)) > 1
            np.testing.assert_array_equal(after[name]["router_fractions"], np.float32(load) / np.float32(load.sum()))
            bias = before[name]["router_bias"] + 1e-4 * np.sign(load.mean() - load)
            np.testing.assert_allclose(after[name]["router_bias"], bias - bias.mean(), rtol=1e-12)


def test_rules_of_a_trainer_leave_what_a_step_changes(x64: None) -> None:
    ruled = with_leaf_rules(
        model(), trainable=lambda layer, path: layer != "embed", float32=lambda layer, path: path == ("out",)
    )
    gates = ruled.layers[1]
    assert gates.trains(("out",)) and not gates.trains(("bias",)) and gates.stays_float32(("bias",))
    wrong = replace(model(), layers=tuple(replace(layer, trainable=None) for layer in model().layers))
    pipe = Pipeline.build(wrong, generate("1f1b", 1, 1), microbatch_size=ROWS, compute_dtype=jnp.float64)
    with pytest.raises(StageError, match=r"after_step of layer 'gates0' changes bias.* not trained.* float64"):
        TrainStep(pipe, optax.sgd(1.0))


def test_a_run_tells_the_load_of_experts_and_ends_where_they_may_drop_nothing(tmp_path: Path) -> None:
    """The capacity in its last line does hold."""
    text = write_text(tmp_path / "text")

    def settings(name: str, capacity: float) -> TrainConfig:
        whole = config(
            text, tmp_path / name, "pipeline.microbatches=2", "run.steps=1", "run.log_every=1", "run.eval_every=1"
        )
        options = {"d_model": 8, "num_heads": 2, "num_layers": 1, "num_experts": 4, "expert_size": 8, "on_drop": "stop"}
        model = replace(whole.model, target="models.moe:MoE", options={**options, "capacity": capacity})
        return replace(whole, model=model)

    words = r"step 1: layer block_00: \d+ of 128 choices .* expert \d dropped .*capacity is 1.0, and ([\d.]+) would"
    with pytest.raises(JudgedError, match=words) as ended:
        run(settings("tight", 1.0))
    assert ended.value.exit_code == 7
    (record,) = read_metrics(tmp_path / "tight/metrics.jsonl")
    assert 0 < record["load_dropped"] == sum(record["sums/dropped"]["block_00"]) / 128
    (capacity,) = re.findall(words, str(ended.value))
    _, printed = run(settings("wide", float(capacity)))
    record, evaluation = read_metrics(tmp_path / "wide/metrics.jsonl")
    load = record["sums/load"]["block_00"]
    assert sum(load) == 2 * record["tokens"] == 128 and record["load_fullest"] == max(load) / 32
    assert record["load_dropped"] == 0 and record["sums/fullest"]["block_00"]
    assert f"fullest expert {max(load) / 32:.2f} × mean" in printed and "dropped" not in printed
    # The balance loss is a metric of training alone, and no part of the loss that is told.
    assert record["metrics/balance"] >= 1 and not any("balance" in key for key in evaluation)
    assert abs(record["loss"] - evaluation["eval_loss"]) < 0.2
