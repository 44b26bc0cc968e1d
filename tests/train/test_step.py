"""One training step against a hand-written one on one device: optax over the unpipelined model's gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import CheckpointError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Schedule, bidirectional, generate
from jaxpipe.stage.model.layer import Layer, LayerContext, Model
from jaxpipe.stage.model.params import get_leaf
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.train.state import TrainState
from jaxpipe.train.step import TrainStep
from jaxpipe.train.update.optimizer import adamw, learning_rate
from models.gpt import GPT
from tests.support.parallel_cases import two_axes
from tests.support.pipelines import (
    MICROBATCH,
    SEQ,
    VOCAB,
    assert_same_arrays,
    parameters,
    pipeline_for,
    random_batch,
    tiny_model,
)
from tests.support.pipelines import some_schedule as forwards_then_backwards

pytestmark = pytest.mark.usefixtures("one_build")

STEPS = 3
ACTIVE, INACTIVE = 0.05, 100.0
ZB = generate("zb-h1", 2, 4)
BIDIRECTIONAL = forwards_then_backwards(bidirectional(2), 4)


def _adamw() -> optax.GradientTransformation:
    return adamw(learning_rate(1e-2, 2, 10, 0.1), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, mask=two_axes)


@cache
def _step(name: str, schedule: Schedule, clip_norm: float) -> TrainStep:
    return TrainStep(pipeline_for(name, schedule), _adamw(), clip_norm=clip_norm)


def _batches(count: int = STEPS) -> list[dict[str, np.ndarray]]:
    """Return batches of uneven weights: microbatches differ in their sums, and one of them is all zeros."""
    batches = [random_batch(4, seed) for seed in range(count)]
    for batch in batches:
        batch["weights"][2] = 0
        batch["weights"][0, 0] *= 3
    return batches


def _run(step: TrainStep, state: TrainState, batches: list[dict[str, np.ndarray]]) -> tuple[TrainState, list[Any]]:
    records = []
    for batch in batches:
        state, metrics = step(state, batch)
        records.append((float(metrics.loss), float(metrics.grad_norm), bool(metrics.applied), float(metrics.weight)))
    return state, records


@cache
def _loss_and_grads(name: str) -> Any:
    model = _gpt32() if name == "gpt32" else tiny_model(name)

    def loss(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        total, weight = apply_model(model, params, batch, train=False)
        return total / weight

    return jax.jit(jax.value_and_grad(loss))


def _by_hand(
    name: str, params: Any, clip_norm: float, batches: list[dict[str, np.ndarray]]
) -> tuple[Any, list[tuple[float, float]]]:
    """Return parameters after the batches, and (mean loss, gradient norm) of each: one device, whole batches, optax's own
    clipping."""
    tx = optax.chain(optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(), _adamw())

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    state, records = tx.init(params), []
    for batch in batches:
        full_batch = {k: jnp.asarray(v.reshape(-1, *v.shape[2:])) for k, v in batch.items()}
        value, grads = _loss_and_grads(name)(params, full_batch)
        params, state, norm = update(params, state, grads)
        records.append((float(value), float(norm)))
    return params, records


def _assert_close(got: Any, expected: Any, rtol: float, atol: float) -> None:
    got_leaves, got_tree = jax.tree.flatten(got)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    assert got_tree == expected_tree
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "schedule", "clip_norm"),
    [
        pytest.param("gpt", ZB, ACTIVE, marks=pytest.mark.soak),
        ("gpt-tied", ZB, ACTIVE),
        pytest.param("gpt-tied", ZB, INACTIVE, marks=pytest.mark.soak),
        pytest.param("gpt", generate("1f1b", 2, 4), 0.0, marks=pytest.mark.soak),
        ("gpt-tied", BIDIRECTIONAL, ACTIVE),
    ],
    ids=["untied-clipped", "tied-clipped", "tied-unclipped", "untied-no-clipping", "bidirectional-clipped"],
)
def test_equals_one_device_and_whole_batches(name: str, schedule: Schedule, clip_norm: float) -> None:
    batches, params = _batches(), parameters(name)
    expected, expected_records = _by_hand(name, params, clip_norm, batches)
    step = _step(name, schedule, clip_norm)
    state, records = _run(step, step.init(params), batches)
    np.testing.assert_allclose(
        [s[:2] for s in records], expected_records, rtol=1e-10
    )  # the norm is that of all ranks together
    assert [s[2] for s in records] == [True] * STEPS
    assert [s[3] for s in records] == [pytest.approx(b["weights"].sum()) for b in batches]
    if clip_norm:
        assert all((norm > clip_norm) == (clip_norm == ACTIVE) for _, norm in expected_records)
    _assert_close(step.by_layer(state)[0], expected, rtol=1e-8, atol=1e-11)
    assert state.step == STEPS


@pytest.mark.usefixtures("x64")
def test_clipping_by_the_norm_of_one_rank_would_be_seen() -> None:
    """The norm that clips is larger than that of any rank's own gradients."""
    batch = _batches(1)[0]
    step = _step("gpt", ZB, ACTIVE)
    pipe = step.pipeline
    _, metrics = step(step.init(parameters("gpt")), batch)
    _, grads = pipe.loss_and_grads(pipe.place(parameters("gpt")), batch)
    for stage in pipe.instances:
        rank_norm = optax.tree.norm({layer.name: grads[layer.name] for layer in pipe.layers(stage)})
        assert 0 < float(rank_norm) < 0.99 * float(metrics.grad_norm)


@pytest.mark.usefixtures("x64")
def test_tied_copies_and_replicas_stay_equal() -> None:
    step = _step("gpt-tied", BIDIRECTIONAL, ACTIVE)
    pipe = step.pipeline
    start = step.init(parameters("gpt-tied"))
    before = np.asarray(
        get_leaf(pipe.layout(0).unpack(start.compute[pipe.primary(0)]), ("embed", "tokens", "embedding"))
    )
    state, _ = _run(step, start, _batches())
    (tie,) = pipe.tied
    buffers = state.compute
    owner = get_leaf(pipe.layout(tie.owner_stage).unpack(buffers[pipe.primary(tie.owner_stage)]), tie.owner_path)
    assert np.abs(np.asarray(owner) - before).max() > 1e-4
    for stage, path in ((tie.owner_stage, tie.owner_path), (tie.copy_stage, tie.copy_path)):
        for rank in pipe.instances[stage]:
            leaf = get_leaf(pipe.layout(stage).unpack(buffers[(rank, stage)]), path)
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(owner))
    for stage, ranks in pipe.instances.items():
        assert len(ranks) == 2
        assert_same_arrays(buffers[(ranks[0], stage)], buffers[(ranks[1], stage)])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("poison", ["nan", "inf", "zero"])
def test_a_step_without_a_finite_gradient_changes_nothing(poison: str) -> None:
    """Also if nothing has weight. The next steps are those of a run that never saw the bad batch, bit for bit."""
    good = _batches(2)
    bad = _batches(1)[0]
    bad["weights"] = bad["weights"] * 0 if poison == "zero" else bad["weights"].copy()
    if poison != "zero":
        bad["weights"][1, 0, 0] = float(poison)
    step = _step("gpt-tied", ZB, ACTIVE)
    first, _ = step(step.init(parameters("gpt-tied")), good[0])
    expected_state = jax.device_get(step.by_layer(first))
    second, metrics = step(first, bad)
    assert not bool(metrics.applied)
    assert second.step == 2
    assert_same_arrays(jax.device_get(step.by_layer(second)), expected_state)
    assert all(not np.asarray(a).any() for buffers in second.acc.values() for a in buffers)
    after, records = _run(step, second, [good[1]])
    straight, expected = _run(step, step.init(parameters("gpt-tied")), good)
    assert records[-1] == expected[-1]
    assert_same_arrays(jax.device_get(step.by_layer(after)), jax.device_get(step.by_layer(straight)))


@pytest.mark.usefixtures("x64")
def test_a_state_by_layer_goes_on_where_it_stood_on_any_cut() -> None:
    batches = _batches()
    step = _step("gpt-tied", ZB, ACTIVE)
    straight, records = _run(step, step.init(parameters("gpt-tied")), batches)
    half, _ = _run(step, step.init(parameters("gpt-tied")), batches[:1])
    params, optimizer = jax.device_get(step.by_layer(half))
    restored, resumed = _run(step, step.init(params, optimizer, step=half.step), batches[1:])
    assert resumed == records[1:]
    assert restored.step == straight.step
    assert_same_arrays(jax.device_get(step.by_layer(restored)), jax.device_get(step.by_layer(straight)))
    other = _step("gpt-tied", generate("1f1b", 1, 4), ACTIVE)
    _, elsewhere = _run(other, other.init(params, optimizer, step=half.step), batches[1:])
    np.testing.assert_allclose([s[:2] for s in elsewhere], [s[:2] for s in records[1:]], rtol=1e-10)


@pytest.mark.usefixtures("x64")
def test_parameters_of_another_model_are_refused() -> None:
    step = _step("gpt", ZB, ACTIVE)
    params = dict(parameters("gpt"))
    with pytest.raises(CheckpointError, match="fit the model"):
        step.init({**params, "embed": jax.tree.map(lambda a: a[..., :-1], params["embed"])})
    del params["block_01"]
    with pytest.raises(CheckpointError, match="block_01"):
        step.init(params)
    with pytest.raises(CheckpointError, match="block_00"):
        step.init(parameters("gpt"), {"embed": {}})


@pytest.mark.usefixtures("x64")
def test_saving_and_stepping_compile_once() -> None:
    step = _step("gpt-tied", ZB, ACTIVE)
    state, _ = _run(step, step.init(parameters("gpt-tied")), _batches(1))
    step.by_layer(state)
    durations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: durations.append(event))
    state, _ = _run(step, state, _batches(1))
    step.by_layer(state)
    step.init(parameters("gpt-tied"))
    assert not [event for event in durations if "compile" in event]
    jax.jit(lambda x: x + 1)(1)
    assert [event for event in durations if "compile" in event], "compiling is noticed"


@pytest.mark.usefixtures("x64")
def test_the_learning_rate_counts_updates_and_not_steps() -> None:
    """A skipped step leaves the optimizer's count of its schedule where it was."""
    schedule = learning_rate(1e-2, 2, 10, 0.1)
    step = TrainStep(pipeline_for("gpt", ZB), _adamw(), learning_rate=schedule)
    state, rates = step.init(parameters("gpt")), []
    for k, batch in enumerate(_batches(3)):
        state, metrics = step(state, {**batch, "weights": batch["weights"] * (k != 1)})
        rates.append(float(metrics.learning_rate))  # type: ignore[arg-type]
    np.testing.assert_allclose(rates, [float(schedule(count)) for count in (0, 1, 1)], rtol=1e-6)


# -- float32 and mixed precision ------------------------------------------------------------------------------------------


@cache
def _gpt32() -> Model:
    return GPT(vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=2, seq_len=SEQ, mlp_ratio=2, tied=True)


@cache
def _step32(compute: str) -> TrainStep:
    pipe = Pipeline.build(_gpt32(), ZB, microbatch_size=MICROBATCH, boundaries=[(0, 2), (2, 5)], compute_dtype=compute)
    return TrainStep(pipe, _adamw(), clip_norm=ACTIVE)


@pytest.mark.soak
def test_float32_is_close_to_one_device() -> None:
    params = init_params(_gpt32(), 0)
    expected, expected_records = _by_hand("gpt32", params, ACTIVE, _batches())
    step = _step32("float32")
    state, records = _run(step, step.init(params), _batches())
    assert not any(state.master.values()), "nothing is kept twice"
    np.testing.assert_allclose([s[:2] for s in records], expected_records, rtol=1e-5)
    # AdamW divides by the gradient's size, so rounding of a gradient near zero shows in full: up to the learning rate
    _assert_close(step.by_layer(state)[0], expected, rtol=1e-4, atol=2e-4)


def test_bfloat16_computes_with_the_cast_of_float32_masters() -> None:
    params = init_params(_gpt32(), 0)
    step = _step32("bfloat16")
    pipe = step.pipeline
    state, records = _run(step, step.init(params), _batches())
    _, float32_records = _run(_step32("float32"), _step32("float32").init(params), _batches())
    assert records != float32_records
    np.testing.assert_allclose([s[0] for s in records], [s[0] for s in float32_records], rtol=2e-2)
    np.testing.assert_allclose([s[1] for s in records], [s[1] for s in float32_records], rtol=1e-1)
    for at, masters in state.master.items():
        indices = {
            slot.buffer for slot in pipe.layout(at[1]).slots if (slot.layer, slot.path) not in pipe.layout(at[1]).shared
        }
        computed = [state.compute[at][i] for i in sorted(indices)]
        for master, compute in zip(masters, computed, strict=True):
            assert (master.dtype, compute.dtype) == (jnp.float32, jnp.bfloat16)
            same = np.asarray(master.astype(jnp.bfloat16)) == np.asarray(compute)
            assert same.all() or at == pipe.primary(pipe.tied[0].copy_stage), "a tied copy has no master"
    params_out, optimizer = step.by_layer(state)
    (tie,) = pipe.tied
    owner = get_leaf(params_out, tie.owner_path)
    copy = get_leaf(pipe.layout(tie.copy_stage).unpack(state.compute[pipe.primary(tie.copy_stage)]), tie.copy_path)
    np.testing.assert_array_equal(np.asarray(owner.astype(jnp.bfloat16)), np.asarray(copy))
    assert np.asarray(owner.astype(jnp.bfloat16).astype(jnp.float32) != owner).any(), (
        "the master holds more than bfloat16"
    )
    floats = [a for a in jax.tree.leaves((params_out, optimizer)) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert {a.dtype.name for a in floats} == {"float32"}


def _linear() -> Model:
    """Return two linear layers and their sum as the loss: the gradient is as large as ``weights``, and no value between is
    larger."""

    def first(params: Any, x: Any, context: LayerContext) -> jax.Array:
        return context.data["weights"] @ params["w"]

    def second(params: Any, x: Any, context: LayerContext) -> jax.Array:
        return x @ params["w"]

    def loss(params: Any, x: Any, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x) * 1e-3, jnp.float32(1)

    def init(key: jax.Array) -> dict[str, Any]:
        return {"w": 0.1 * jax.random.normal(key, (SEQ, SEQ))}

    layers = (
        Layer("first", init, first, reads=("weights",)),
        Layer("second", init, second),
        Layer("loss", lambda key: {}, loss),
    )
    return Model("linear", layers, lambda n: {"weights": jax.ShapeDtypeStruct((n, SEQ), jnp.float32)}, 1, SEQ)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_norm_whose_square_is_too_large_for_float32_is_clipped_like_any_other(dp: int) -> None:
    model, clip_norm = _linear(), 1e-3
    pipe = Pipeline.build(model, ZB, microbatch_size=MICROBATCH, boundaries=[(0, 1), (1, 3)], dp=dp)
    step = TrainStep(pipe, optax.sgd(100.0), clip_norm=clip_norm)
    weights = 1 + np.random.default_rng(0).random((4, MICROBATCH, SEQ), np.float32)
    norms, ends = [], []
    for size in (1.0, 1e20, 1e30, 1e37):
        state, metrics = step(step.init(init_params(model, 0)), {"weights": weights * np.float32(size)})
        assert bool(metrics.applied), size
        norms.append(float(metrics.grad_norm) / size)
        ends.append(step.by_layer(state)[0])
    assert norms[0] > 2 * clip_norm
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)
    for end in ends[1:]:
        _assert_close(end, ends[0], rtol=1e-5, atol=1e-6)
    params = init_params(model, 0)
    state, metrics = step(step.init(params), {"weights": np.full_like(weights, np.inf)})
    assert not bool(metrics.applied)
    assert bool(metrics.finite)
    assert_same_arrays(jax.device_get(step.by_layer(state)[0]), jax.device_get(params))


# -- parameters that are not trained ----------------------------------------------------------------------------------


def _shifting_model() -> Model:
    """Return two linear layers that roll their input by an integer parameter, and a squared loss."""

    def init(key: jax.Array) -> dict[str, Any]:
        return {"w": 0.1 * jax.random.normal(key, (SEQ, SEQ)), "shift": jnp.int32(3)}

    def first(params: Any, x: Any, context: LayerContext) -> jax.Array:
        return jnp.roll(context.data["weights"] @ params["w"], params["shift"], axis=-1)

    def second(params: Any, x: Any, context: LayerContext) -> jax.Array:
        return jnp.roll(x @ params["w"], params["shift"], axis=-1)

    def loss(params: Any, x: Any, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        return jnp.sum((x - context.data["weights"]) ** 2), jnp.float32(x.size)

    layers = (
        Layer("first", init, first, reads=("weights",)),
        Layer("second", init, second),
        Layer("loss", lambda key: {}, loss, reads=("weights",)),
    )
    return Model("shifting", layers, lambda n: {"weights": jax.ShapeDtypeStruct((n, SEQ), jnp.float32)}, 1, SEQ)


def test_integer_parameters_stay() -> None:
    model = _shifting_model()
    pipe = Pipeline.build(model, ZB, microbatch_size=MICROBATCH, boundaries=[(0, 1), (1, 3)])
    step = TrainStep(pipe, _adamw(), clip_norm=1.0)
    weights = np.random.default_rng(0).random((4, MICROBATCH, SEQ), np.float32)
    state, losses = step.init(init_params(model, 0)), []
    for _ in range(STEPS):
        state, metrics = step(state, {"weights": weights})
        losses.append(float(metrics.loss))
    params, optimizer = step.by_layer(state)
    assert losses[-1] < losses[0]
    assert [int(params[name]["shift"]) for name in ("first", "second")] == [3, 3]
    assert params["first"]["shift"].dtype == jnp.int32
    restored = step.init(jax.device_get(params), jax.device_get(optimizer), step=state.step)
    assert_same_arrays(jax.device_get(step.by_layer(restored)), jax.device_get((params, optimizer)))


def test_a_recorded_step_gives_a_timeline_in_the_order_of_the_schedule() -> None:
    step = _step32("float32")
    _, metrics = step(step.init(init_params(_gpt32(), 0)), _batches(1)[0], record=True)
    assert metrics.timeline is not None
    for rank, row in enumerate(ZB.rows):
        events = [e for e in metrics.timeline.events if e.rank == rank and e.lane == "compute"]
        assert [e.action for e in sorted(events, key=lambda e: e.start_s)] == list(row)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(events))
    unrecorded = partial(step, record=False)
    assert unrecorded(step.init(init_params(_gpt32(), 0)), _batches(1)[0])[1].timeline is None
