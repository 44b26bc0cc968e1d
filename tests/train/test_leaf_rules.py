"""Parameters that are not trained, and parameters that stay float32: what they save, and that nothing else changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import CheckpointError, ConfigError, StageError
from jaxpipe.runtime.memory_probe import measured_peaks
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.model.layer import Layer, LayerContext, LeafRule, Model, Path, with_leaf_rules
from jaxpipe.stage.model.params import get_leaf
from jaxpipe.stage.model.reference import init_params
from jaxpipe.train.state import TrainState
from jaxpipe.train.step import TrainStep
from models.gpt import GPT
from tests.support import optimizer_cases as cases
from tests.support.optimizer_cases import batches, on_one_device, over_ranks, params
from tests.support.pipelines import MICROBATCH, SEQ, VOCAB, assert_same_arrays, random_batch

pytestmark = pytest.mark.usefixtures("one_build")


def late(layer: str, path: Path) -> bool:
    """Nothing of the first stage, and half of a layer of the second."""
    return layer == "head" or path == ("mlp", "down")


def early(layer: str, path: Path) -> bool:
    """Nothing of the second stage, and half of the first's."""
    return layer == "embed" or path == ("bias",)


def half(layer: str, path: Path) -> bool:
    """Return whether the leaf is trained: some leaves of shards and of buckets are."""
    return path[-1] in ("up", "kernel")


def split_by(rule: LeafRule, tree: Any) -> tuple[list[Any], list[Any]]:
    """Return leaves by layer that are trained, and those that are not."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    trained = [rule(keys[0].key, tuple(k.key for k in keys[1:])) for keys, _ in flat]
    return [v for (_, v), t in zip(flat, trained, strict=True) if t], [
        v for (_, v), t in zip(flat, trained, strict=True) if not t
    ]


# -- not trained -----------------------------------------------------------------------------------------------------------

RULES = [late, pytest.param(early, marks=pytest.mark.soak)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_what_is_trained_keep_every_bit(rule: LeafRule) -> None:
    full, partial = cases.pipeline(), cases.pipeline(trainable=rule)
    expected_loss, expected = full.loss_and_grads(full.place(params()), batches()[0])
    loss, got = partial.loss_and_grads(partial.place(params()), batches()[0])
    assert float(loss) == float(expected_loss)
    trained, frozen = split_by(rule, got)
    assert_same_arrays(trained, split_by(rule, expected)[0])
    assert not any(np.asarray(v).any() for v in frozen)
    assert sum(a.size for s in partial.stages for a in s.acc_avals) == sum(v.size for v in trained), (
        "nothing is kept for them"
    )
    assert sum(s.flops["W"] for s in partial.stages) < sum(s.flops["W"] for s in full.stages)
    bare = partial.stages[0 if rule is late else 1]
    assert [str(p) for p in bare.functions["W"].outputs] == ["token0"]
    if rule is late:
        assert bare.flops["B"] == bare.residual_bytes == 0, "nothing before it wants a gradient either"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_trained_stays_and_the_rest_goes_on_as_on_one_device(rule: LeafRule) -> None:
    step = TrainStep(cases.pipeline(trainable=rule), optax.adamw(1e-2, weight_decay=0.1))
    got, optimizer, metrics = over_ranks(step)
    labels = jax.tree_util.tree_map_with_path(lambda k, _: rule(k[0].key, tuple(x.key for x in k[1:])), dict(params()))
    expected = on_one_device(
        optax.partition({True: optax.adamw(1e-2, weight_decay=0.1), False: optax.set_to_zero()}, labels)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9)
    trained, frozen = split_by(rule, got)
    assert_same_arrays(frozen, split_by(rule, dict(params()))[1])
    moments = [leaf for leaf in jax.tree.leaves(optimizer) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in trained)
    assert bool(metrics.finite)


@pytest.mark.usefixtures("x64")
def test_shards_and_buckets_of_what_is_trained() -> None:
    step = TrainStep(cases.pipeline(2, 2, half), optax.adam(1e-2), zero1=True)
    got, optimizer, _ = over_ranks(step)
    labels = jax.tree_util.tree_map_with_path(lambda k, _: half(k[0].key, tuple(x.key for x in k[1:])), dict(params()))
    expected = on_one_device(optax.partition({True: optax.adam(1e-2), False: optax.set_to_zero()}, labels))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-8, atol=1e-11)
    restored = step.by_layer(step.init(jax.device_get(got), jax.device_get(optimizer), step=3))
    assert_same_arrays(jax.device_get(restored), jax.device_get((got, optimizer)))


# -- with bfloat16, a tied leaf that is not trained, and leaves that stay float32 -----------------------------------------


def not_embedded(layer: str, path: Path) -> bool:
    return layer != "embed" or path[0] != "tokens"


def norms(layer: str, path: Path) -> bool:
    return any("norm" in name for name in path)


@cache
def tied_gpt() -> Model:
    model = GPT(vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=2, seq_len=SEQ, mlp_ratio=2, tied=True)
    return with_leaf_rules(model, trainable=not_embedded, float32=norms)


@cache
def mixed(ranks: int = 2) -> TrainStep:
    pipe = Pipeline.build(
        tied_gpt(), generate("zb-h1", ranks, 4), microbatch_size=MICROBATCH, compute_dtype=jnp.bfloat16
    )
    return TrainStep(pipe, optax.adamw(1e-2), clip_norm=0.1)


def steps(step: TrainStep, state: TrainState, seeds: range) -> TrainState:
    for seed in seeds:
        state, metrics = step(state, random_batch(4, seed))
        assert bool(metrics.applied)
    return state


def test_masters_only_for_what_is_trained_and_narrow() -> None:
    step, start = mixed(), init_params(tied_gpt(), 0)
    pipe, state = step.pipeline, steps(mixed(), mixed().init(start), range(3))
    masters = step.by_layer(state)[0]
    assert {a.dtype for a in jax.tree.leaves(masters)} == {np.dtype(np.float32)}
    table = ("embed", "tokens", "embedding")
    np.testing.assert_array_equal(get_leaf(masters, table), get_leaf(start, table))
    assert np.asarray(get_leaf(start, table).astype(jnp.bfloat16) != get_leaf(start, table)).any(), (
        "no float32 number is lost"
    )
    for stage in range(2):
        layout, buffers = pipe.layout(stage), state.compute[pipe.primary(stage)]
        stage_leaves = layout.unpack(buffers)
        for slot in layout.slots:
            copy = (slot.layer, slot.path) in layout.shared
            at = (slot.layer, *slot.path)
            computed, master = get_leaf(stage_leaves, at), None if copy else get_leaf(masters, at)
            assert slot.dtype == (jnp.float32 if norms(slot.layer, slot.path) else jnp.bfloat16)
            assert layout.trains(slot) == (at != table and not copy), "a tied copy is as its owner"
            if norms(slot.layer, slot.path):
                np.testing.assert_array_equal(np.asarray(computed), np.asarray(master))
                assert np.asarray(computed.astype(jnp.bfloat16) != computed).any()
    narrow = [layout.buffers[i] for layout in map(pipe.layout, range(2)) for i in range(layout.num_trained)]
    master_elements = sum(a.size for buffers in state.master.values() for a in buffers)
    assert master_elements == sum(b.size for b in narrow if b.dtype == jnp.bfloat16)


def test_a_resumed_run_is_the_one_that_was_not_stopped_on_any_cut() -> None:
    step = mixed()
    state = steps(step, step.init(init_params(tied_gpt(), 0)), range(1))
    stored = jax.device_get(step.by_layer(state))
    straight = jax.device_get(step.by_layer(steps(step, state, range(1, 3))))
    assert_same_arrays(jax.device_get(step.by_layer(steps(step, step.init(*stored, step=1), range(1, 3)))), straight)
    single = mixed(1)
    assert_same_arrays(jax.device_get(single.by_layer(single.init(*stored, step=1))), stored)
    everything = TrainStep(other_rules(), optax.adamw(1e-2))
    with pytest.raises(CheckpointError, match="layer embed has no 0/mu/embed/tokens/embedding"):
        everything.init(*stored)


@cache
def other_rules() -> Pipeline:
    model = with_leaf_rules(tied_gpt(), trainable=lambda layer, path: (layer, path) != ("head", ("norm", "scale")))
    return Pipeline.build(model, generate("1f1b", 1, 4), microbatch_size=MICROBATCH, compute_dtype=jnp.bfloat16)


def test_predicted_memory_is_what_is_held() -> None:
    step = mixed()
    state = step.init(init_params(tied_gpt(), 0))
    resident = (state.master, state.optimizer)
    measured = measured_peaks(step.pipeline, state.compute, random_batch(4), acc=state.acc, resident=resident)
    assert step.memory_report(workspace=False).live_peak_bytes == measured.live_peak_bytes


def test_a_layer_gets_its_float32_leaf_as_it_is() -> None:
    dtypes: dict[str, Any] = {}

    def apply(p: Any, x: Any, context: LayerContext) -> jax.Array:
        dtypes.update({name: leaf.dtype.name for name, leaf in p.items()})
        return (context.data["weights"].astype(p["w"].dtype) @ p["w"]) * p["gate"].astype(p["w"].dtype)[None]

    def loss(p: Any, x: Any, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x.astype(jnp.float32) ** 2), jnp.float32(x.size)

    layers = (
        Layer(
            "gated", lambda key: {"w": jnp.ones((SEQ, 4)) / 3, "gate": jnp.full(4, 1 / 3)}, apply, reads=("weights",)
        ),
        Layer("loss", lambda key: {}, loss),
    )
    model = Model("gated", layers, lambda n: {"weights": jax.ShapeDtypeStruct((n, SEQ), jnp.float32)}, 1, SEQ)
    model = with_leaf_rules(model, float32=lambda layer, path: path == ("gate",))
    pipe = Pipeline.build(model, generate("1f1b", 1, 2), microbatch_size=2, compute_dtype=jnp.bfloat16)
    assert dtypes == {"w": "bfloat16", "gate": "float32"}
    _, grads = pipe.loss_and_grads(pipe.place(init_params(model, 0)), {"weights": np.ones((2, 2, SEQ), np.float32)})
    assert grads["gated"]["gate"].dtype == jnp.float32


# -- rules that say nothing -----------------------------------------------------------------------------------------------


def test_rules_that_pick_nothing_are_refused() -> None:
    model = cases.model()
    for rules, message in (
        ({"trainable": lambda layer, path: False}, "trainable picks none of the 6 parameters of model toy"),
        ({"trainable": lambda layer, path: True}, "trainable picks every one of the 6 parameters"),
        (
            {"float32": lambda layer, path: path == ("router",)},
            r"float32 picks none .* such as \('embed', \('table',\)\)",
        ),
    ):
        with pytest.raises(StageError, match=message):
            with_leaf_rules(model, **rules)  # type: ignore[arg-type]


@pytest.mark.usefixtures("x64")
def test_a_model_with_nothing_to_train_is_refused() -> None:
    frozen = [Layer(**{**_fields(layer), "trainable": lambda path: False}) for layer in cases.model().layers]
    model = Model("toy", tuple(frozen), cases.model().batch_spec, cases.V, 1)
    pipe = Pipeline.build(model, generate("1f1b", 1, 2), microbatch_size=2, compute_dtype=jnp.float64)
    with pytest.raises(ConfigError, match="model toy has nothing to train: no parameter of it is trainable"):
        TrainStep(pipe, optax.sgd(0.1))


def _fields(layer: Layer) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("name", "init", "apply", "reads", "shards")}


def test_layers_of_equal_rules_are_one_kind() -> None:
    """Layers of the same functions are planned and timed once, with rules too."""
    model = GPT(vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=2, seq_len=SEQ)
    a, b = model.layers[1:3]
    assert a.code == b.code
    a, b = with_leaf_rules(model, float32=norms).layers[1:3]
    assert a.code == b.code != model.layers[1].code
    a, b = with_leaf_rules(model, trainable=lambda layer, path: layer != model.layers[1].name).layers[1:3]
    assert a.code != b.code
