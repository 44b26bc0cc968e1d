"""Embedding and head divided by words over the ranks: losses, gradients, updates and checkpoints of the unsplit model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe import Trainer
from jaxpipe.errors import ConfigError, ProgramError
from jaxpipe.planning.predict import predict
from jaxpipe.planning.roofline import Efficiency
from jaxpipe.planning.stages import stage_costs_of
from jaxpipe.planning.targets import find_target
from jaxpipe.stage.model.layer import LayerContext, Model
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.stage.model.vocabulary import spread
from jaxpipe.train.config import TrainConfig
from models.gpt import GPT
from models.llama import Llama

WORDS = 37  # no multiple of ranks × tp


def widest() -> str:
    """Return the widest dtype that JAX computes in here: float64 under the fixture ``x64``."""
    return str(jax.dtypes.canonicalize_dtype(np.float64))


def tiny(make: Any = GPT, **options: Any) -> Model:
    common = {"vocab_size": WORDS, "d_model": 16, "num_layers": 2, "num_heads": 2, "seq_len": 6, "dtype": widest()}
    model: Model = make(**{**common, **options})
    return model


def batch_of(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (rows, 6)
    words = {name: rng.integers(0, WORDS, shape).astype(np.int32) for name in ("tokens", "targets")}
    return {**words, "weights": (rng.random(shape) > 0.3).astype(np.float32)}


def trainer_of(model: Model, vocabulary: Any, **options: Any) -> Trainer:
    settings = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "microbatch_size": 2, "dtype": widest(), **options}
    return Trainer(model, optimizer=optax.adamw(1e-2), vocabulary=vocabulary, clip_norm=1.0, **settings)


def unsplit(model: Model, params: Any, batch: dict[str, np.ndarray]) -> tuple[Any, Any]:
    def mean(params: Any) -> Any:
        loss, weight = apply_model(model, params, batch, train=False)
        return loss / weight

    loss_and_grads: tuple[Any, Any] = jax.jit(jax.value_and_grad(mean))(params)
    return loss_and_grads


def check_gradients(model: Model, trainer: Trainer) -> tuple[Any, Any]:
    params, batch = init_params(model, 0), batch_of(8)
    expected, grads = unsplit(model, params, batch)
    pipeline = trainer.pipeline.with_reductions({})
    loss, pipeline_grads = pipeline.loss_and_grads(
        pipeline.place(params), {k: v.reshape(4, 2, 6) for k, v in batch.items()}
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    assert jax.tree.structure(pipeline_grads) == jax.tree.structure(grads)
    for ours, theirs in zip(jax.tree.leaves(pipeline_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    return loss, pipeline_grads


@pytest.mark.usefixtures("x64")
def test_loss_and_gradients_in_any_order() -> None:
    """Loss and gradients are those of the unsplit model, and have the same bits in another order."""
    model = tiny()
    trainer = trainer_of(model, "spread")
    assert trainer.schedule.name == "vocab-1f1b"
    with pytest.raises(ProgramError, match=r"none of which has all logits: predict from a checkpoint"):
        trainer.pipeline.predict({}, batch_of(8))
    loss, grads = check_gradients(model, trainer)
    other = trainer.with_schedule("gpipe")
    assert other.schedule.name == "vocab-gpipe" and other.schedule.rows != trainer.schedule.rows
    with pytest.raises(ProgramError, match="stages"):
        trainer.with_schedule("v-half")
    reordered = check_gradients(model, other)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), reordered, (loss, grads)))


def test_joint_layers_take_the_order_of_any_family_with_two_barriers() -> None:
    model = tiny(dtype="float32")
    trainer = trainer_of(model, "joint", dtype="float32")
    assert [trainer.with_schedule(name).schedule.name for name in ("zb-h1", "vocab-1f1b-2", "vocab-1f1b-joint")] == [
        "vocab-zb-h1-2",
        "vocab-1f1b-2",
        "vocab-1f1b-joint",
    ]
    with pytest.raises(ProgramError, match="has the edges"):
        trainer.with_schedule("vocab-1f1b")
    with pytest.raises(ConfigError, match=r"vocabulary=joint.*schedule=1f1b.*'gpipe'"):
        trainer_of(model, "joint", schedule="gpipe", dtype="float32")


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("make", [GPT, Llama])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("vocabulary", "options"),
    [
        ("spread", {"ranks": 2, "tp": 2}),
        ("spread-2", {"ranks": 2, "tp": 2, "dp": 2}),
        ("spread", {"ranks": 4, "dp": 2}),
        ("spread-2", {"ranks": 3}),
        ("joint", {"ranks": 4}),
        ("spread", {"ranks": 2, "schedule": "v-half", "chunks": 2}),
        ("spread-2", {"ranks": 2, "schedule": "interleaved-1f1b", "chunks": 2, "recompute": "full"}),
        ("spread", {"ranks": 1}),
    ],
)
def test_loss_and_gradients(make: Any, tied: bool, vocabulary: str, options: dict[str, Any]) -> None:
    layers = {"num_layers": 4} if options["ranks"] * options.get("chunks", 1) > 3 else {}
    model = tiny(make, tied=tied, **layers)
    trainer = trainer_of(model, vocabulary, **options)
    result = check_gradients(model, trainer)
    if vocabulary == "joint":
        other = check_gradients(model, trainer.with_schedule("zb-h1"))
        assert jax.tree.all(jax.tree.map(np.array_equal, result, other))


def test_the_look_up_has_the_bits_of_one_table() -> None:
    """Also of zeros below zero, and NaN where a token is no word; and a rank may have no word at all."""
    model = tiny(Llama, dtype="float32", vocab_size=5)
    params = init_params(model, 0)
    params["embed"]["tokens"]["embedding"] = params["embed"]["tokens"]["embedding"].at[3, 2].set(-0.0)
    divided = spread(model, 4)
    parts = divided.divided(params)
    tokens = np.array([[0, 1, 2, 3, 4, 99]], np.int32)

    def apply(layer: Any, x: Any) -> Any:
        return layer.apply(parts[layer.name], x, LayerContext(dict.fromkeys(layer.reads, tokens)))

    *lookups, embedding_sum = divided.layers[:5]
    rows = apply(embedding_sum, tuple(apply(layer, None) for layer in lookups))
    embed = model.layers[0]
    expected = embed.apply(params["embed"], None, LayerContext({"tokens": tokens}))
    assert np.asarray(rows).tobytes() == np.asarray(expected).tobytes()
    assert np.isnan(rows[0, 5]).all()
    assert [parts[f"embed@{k}"]["tokens"]["embedding"].shape for k in range(4)] == [(2, 16)] * 4
    rejoined = divided.joined(parts)
    assert jax.tree.all(jax.tree.map(np.array_equal, rejoined, params))


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("tied", [True, False])
def test_checkpoints_are_of_the_whole_model(tied: bool, tmp_path: Path) -> None:
    """Steps are those of the model with its vocabulary at the ends, and a run goes on on other ranks or spread otherwise."""
    model, batch = tiny(tied=tied), batch_of(8)
    ends, spread_out, other = (
        trainer_of(model, "ends"),
        trainer_of(model, "spread", ema=0.9),
        trainer_of(model, "spread-2", ranks=3, dp=2, zero1=True, ema=0.9),
    )
    state, reference = spread_out.init(), ends.init()
    for _ in range(2):
        state, metrics = spread_out.step(state, batch)
        reference, expected = ends.step(reference, batch)
        np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-12)
        np.testing.assert_allclose(metrics.grad_norm, expected.grad_norm, rtol=1e-12)
    np.testing.assert_allclose(
        spread_out.evaluate(state, batch)["loss"], ends.evaluate(reference, batch)["loss"], rtol=1e-12
    )
    spread_out.save(state, tmp_path)
    restored = other.restore(tmp_path)
    for ema in (False, True):
        same = jax.tree.map(np.array_equal, other.params(restored, ema=ema), spread_out.params(state, ema=ema))
        assert jax.tree.all(same)
    assert set(other.params(restored)) == {layer.name for layer in model.layers}
    state, metrics = spread_out.step(state, batch)
    restored, expected = other.step(restored, batch)
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-12)
    for a, b in zip(*(jax.tree.leaves(t.params(s)) for t, s in ((spread_out, state), (other, restored))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
def test_a_detached_layer_hands_no_gradient_back() -> None:
    """One of a user's own: what is behind it stays as it is, from whatever stage it takes."""
    model = tiny(tied=False)
    layers = [replace(layer, detached=layer.name == "block_01") for layer in model.layers]
    trainer = trainer_of(replace(model, layers=tuple(layers)), "ends")
    pipeline, batch = trainer.pipeline, {k: v.reshape(4, 2, 6) for k, v in batch_of(8).items()}
    _, grads_by_layer = pipeline.loss_and_grads(pipeline.place(init_params(model, 0)), batch)
    size = {
        name: sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(grads)) for name, grads in grads_by_layer.items()
    }
    assert size["embed"] == size["block_00"] == 0
    assert size["block_01"] > 0


@pytest.mark.soak
def test_memory_is_balanced_at_256k_words() -> None:
    """Predicted, of the fullest rank over the leanest, of a 5.2B GPT on 8 A100."""
    large = {"d_model": 3072, "num_layers": 32, "num_heads": 24, "vocab_size": 2**18, "tied": False}
    config = TrainConfig().override(
        [f"model.options.{name}={str(value).lower()}" for name, value in large.items()]
        + ["data.seq_len=2048", "data.tokenizer=ids:262144", "data.path=x.npy", "run.batch=128", "run.dtype=bfloat16"]
        + ["pipeline.ranks=8", "pipeline.microbatches=128", "pipeline.schedule=v-half", "pipeline.chunks=2"]
        + ["pipeline.recompute=fused"]
    )
    target = find_target("a100")
    bench = stage_costs_of(config, target, Efficiency(), lambda text: None)
    ratio_and_speed = {}
    for vocabulary in ("ends", "spread"):
        layout = config.override([f"pipeline.vocabulary={vocabulary}"])
        prediction = predict(layout, bench.over(layout.pipeline), 80e9)
        peaks = [memory.peak_bytes for memory in prediction.memory]
        ratio_and_speed[vocabulary] = max(peaks) / min(peaks), prediction.tokens_per_s
    assert ratio_and_speed["spread"][0] <= 1.1
    assert ratio_and_speed["ends"][0] >= 2
    assert ratio_and_speed["spread"][1] > 1.5 * ratio_and_speed["ends"][1]


REFUSED = [
    ("pipeline.schedule=towers", "pipeline.schedule='towers'"),
    ("pipeline.schedule=vocab-1f1b", "which pipeline.vocabulary makes: set that to 'spread'"),
    ("pipeline.memory_limit=2", "takes no pipeline.memory_limit"),
    ("pipeline.recompute=none,full", "takes one pipeline.recompute policy for all stages"),
    ("replan.enabled=true", "is not there with replan.enabled=true"),
    ("pipeline.cp=2", "is not there with pipeline.cp=2"),
    ("pipeline.vocabulary=middle", "expected one of 'ends', 'spread', 'spread-2', 'joint'"),
]


@pytest.mark.parametrize(("override", "words"), REFUSED)
def test_what_does_not_go_with_it_is_one_line(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig().override(["pipeline.vocabulary=spread", "run.steps=50", override])
    assert words in str(error.value)


def test_models_and_orders_that_can_not_be_spread() -> None:
    joint = ["pipeline.vocabulary=joint", "pipeline.schedule=gpipe"]
    with pytest.raises(ConfigError, match=r"goes with .*schedule=1f1b, not 'gpipe'"):
        TrainConfig().override(joint)
    split = ["pipeline.vocabulary=spread", "pipeline.tp=2", "pipeline.sequence_parallel=true"]
    with pytest.raises(ConfigError, match=r"is not there with .*sequence_parallel=true"):
        TrainConfig().override(split)
    model = tiny()
    plain = replace(model, layers=(replace(model.layers[0], words=None), *model.layers[1:]))
    with pytest.raises(ConfigError, match=r"\(Layer.words\)"):
        spread(plain, 2)
