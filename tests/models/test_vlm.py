"""The vision-language model: gradients in uneven stages and on shards, what stands where, frozen eyes, the paper's sizes.

The picture is 4 × 8 in patches of 2, so 8 patches and 2 features; a text is 8 tokens, the first 2 stand for the picture.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe import Trainer
from jaxpipe.axes import RankMesh
from jaxpipe.cli import main
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import CostProfile, generate
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.plan import plan_stages
from jaxpipe.stage.model.reference import apply_model, init_params, model_output
from jaxpipe.train.config import load_config
from jaxpipe.train.setup import build_model
from models.vlm import VLM
from tests.support.paths import ROOT
from tests.support.sharded import QUICK, loss_and_grads

PLANS = ROOT / "scripts" / "plans"
SMALL: dict[str, Any] = {
    "vocab_size": 16, "d_model": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 8, "mlp_size": 24,
    "image_height": 4, "image_width": 8, "patch": 2, "vit_size": 8, "vit_layers": 1, "vit_heads": 2, "dtype": "float64",
}  # fmt: skip


@functools.cache
def tiny(freeze_vit: bool = False) -> Model:
    return VLM(**SMALL, freeze_vit=freeze_vit)


def random_params(model: Model) -> Any:
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    return jax.tree.map(lambda a: np.asarray(rng.normal(0, 0.4, a.shape), a.dtype), shapes)


def random_batch(*leading: int) -> dict[str, np.ndarray]:
    """Return a batch whose picture stands at the first two positions of each text; one more comes where no feature is left."""
    rng = np.random.default_rng(1)
    shape = (*leading, 8)
    tokens = rng.integers(1, 16, shape)
    tokens[..., [0, 1, 5]] = 0
    return {
        "images": rng.integers(0, 256, (*leading, 4, 8, 1)).astype(np.uint8),
        "tokens": tokens.astype(np.int32),
        "targets": rng.integers(0, 16, shape).astype(np.int32),
        "weights": (rng.random(shape) * (rng.random(shape) > 0.3)).astype(np.float32),
    }


def on_one_device(model: Model, params: Any, batch: Mapping[str, Any]) -> Any:
    run = jax.value_and_grad(lambda p, b: apply_model(model, p, b), has_aux=True)
    return jax.jit(run, compiler_options=QUICK)(params, batch)


def close(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10, atol=1e-10), ours, theirs)


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        pytest.param(("1f1b",), 4, marks=pytest.mark.soak),
        (("v-zb",), 2),
        pytest.param(("v-zb", "stp"), 2, marks=pytest.mark.soak),
    ],
)
@pytest.mark.usefixtures("x64")
def test_gradients_of_uneven_stages_are_those_of_the_whole_model(names: tuple[str, ...], ranks: int) -> None:
    model, m = tiny(), 8
    params, batch = random_params(model), random_batch(m, 2)
    full_batch = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}
    (loss, weight), grads = on_one_device(model, params, full_batch)
    costs = CostProfile.uniform(4, chunks=4 // ranks, f=1, b=1.1, w=0.9, tp_comm=0.2, tp_collectives=4)
    schedules = [generate(name, ranks, m, costs=costs) for name in names]
    pipe = Pipeline.build(
        model,
        schedules[0],
        microbatch_size=2,
        boundaries=plan_stages(
            model, boundaries=("embed", "block_01", "head")
        ),  # the whole vision transformer, then the language model in uneven parts
        compute_dtype=jnp.float64,
    )
    for schedule in schedules:
        run = pipe.with_schedule(schedule)
        got, grads_by_layer = run.loss_and_grads(run.place(params), batch)
        np.testing.assert_allclose(np.asarray(got), loss / weight, rtol=1e-10)
        close({name: dict(grads_by_layer[name]) for name in params}, jax.tree.map(lambda g: g / weight, grads))


@pytest.mark.parametrize(
    ("tp", "dp"),
    [
        (RankMesh(tp=2), 2),
        pytest.param(RankMesh(tp=2, sequence=True), 1, marks=pytest.mark.soak),
        pytest.param(RankMesh(tp=4, sequence=False, fused_residual=True), 1, marks=pytest.mark.soak),
    ],
)
@pytest.mark.usefixtures("x64")
def test_loss_and_gradients_on_shards_are_those_of_one_device(tp: RankMesh, dp: int) -> None:
    model = VLM(**{**SMALL, "vit_heads": 4})
    params, batch = random_params(model), {k: jnp.asarray(v) for k, v in random_batch(2).items()}
    close(loss_and_grads(model, params, batch, tp, dp), on_one_device(model, params, batch))


@pytest.mark.usefixtures("x64")
def test_features_stand_where_the_text_says_and_only_there() -> None:
    model = tiny()
    params, batch = random_params(model), random_batch(1)

    def inputs(batch: Mapping[str, Any]) -> np.ndarray:
        *first, _, _, _, _ = model.layers
        cut = Model("cut", (*first, model.layers[-1]), model.batch_spec, 16, 8)
        return np.asarray(model_output(cut, params, batch))

    features = inputs(batch)
    other = inputs(batch | {"images": 255 - batch["images"]})
    changed = (features != other).any(axis=-1)[0]
    assert changed.tolist() == [True, True, *[False] * 6]  # position 5 has no feature left
    words = np.asarray(params["embed"]["tokens"]["embedding"])
    np.testing.assert_array_equal(features[0, 2:], words[batch["tokens"][0, 2:]])
    token_order = batch["tokens"][:, [2, 3, 0, 4, 1, 6, 7, 6]]
    np.testing.assert_array_equal(inputs(batch | {"tokens": token_order})[0, [2, 4]], features[0, :2])


@pytest.mark.usefixtures("x64")
def test_frozen_eyes_are_not_trained_and_the_merger_is() -> None:
    frozen = {layer.name for layer in tiny(freeze_vit=True).layers if layer.frozen}
    assert frozen == {"patches", "vit_00"}
    assert not any(layer.frozen for layer in tiny().layers)


@pytest.mark.usefixtures("x64")
def test_a_frozen_vit_has_no_w_and_no_optimizer_bytes() -> None:
    """On a rank of its own: it saves nothing, what stands for its B and W computes nothing, and it does not change."""
    model = tiny(freeze_vit=True)
    trainer = Trainer(
        model, optimizer=optax.adam(1e-2), ranks=2, microbatches=2, microbatch_size=2, cut=["merger"], schedule="zb-h1",
        dtype="float64",
    )  # fmt: skip
    eyes = trainer.pipeline.stages[0]
    assert all(not f.jaxpr.eqns and not f.inputs for op, f in eyes.functions.items() if op != "F")
    assert eyes.acc_avals == () and eyes.residual_bytes == eyes.w_residual_bytes == 0
    state = trainer.init(params := random_params(model))
    _, optimizer = trainer.train_step.by_layer(state)
    assert not any(x.ndim for name in ("patches", "vit_00") for x in jax.tree.leaves(optimizer[name]))
    ranks = trainer.train_step.memory_report(workspace=False).ranks
    assert [ranks[0].peaks.get(kind, 0) for kind in ("gradients", "residuals")] == [0, 0]
    assert ranks[0].peaks["optimizer"] <= 4 < ranks[1].peaks["optimizer"]  # a count of steps
    batch = random_batch(4)
    (loss, weight), grads = on_one_device(model, params, batch)
    assert float(jnp.abs(grads["patches"]["positions"]).max()) > 0  # it would learn
    state, metrics = trainer.step(state, batch)
    np.testing.assert_allclose(float(metrics.loss), loss / weight, rtol=1e-10)
    after = trainer.params(state)
    jax.tree.map(
        np.testing.assert_array_equal, *({n: dict(p[n]) for n in ("patches", "vit_00")} for p in (after, params))
    )
    assert not np.array_equal(after["merger"]["up"]["kernel"], params["merger"]["up"]["kernel"])


def pictures(seq_len: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return data for a config: rows to train on and held-out ones."""
    rows = random_batch(18)
    return {name: x[:10] for name, x in rows.items()}, {name: x[10:] for name, x in rows.items()}


def test_it_trains_and_evaluates_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures and text of a function, uneven stages; held-out loss over the pipeline and on one device, of whole batches."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])
    options = [f"model.options.{k}={v}" for k, v in SMALL.items() if k not in ("dtype", "vocab_size")]
    options.append("model.options.num_layers=1")
    short = ["run.steps=3", "run.eval_every=3", "run.checkpoint_every=3", "optimizer.warmup_steps=1", "run.batch=8"]
    data = ["data.path=tests.models.test_vlm:pictures", "data.seq_len=8"]
    pipe = ["pipeline.schedule=1f1b", "pipeline.chunks=1", 'pipeline.cut=["embed"]', "pipeline.microbatches=4"]
    out = tmp_path / "run"
    config = PLANS.parent / "vlm.toml"
    arguments = [*options, *data, *pipe, *short, f"run.out_dir={out}", "--json"]
    assert main(["train", "--config", str(config), *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main(["eval", str(out), "--data", "tests.models.test_vlm:pictures", "--batch", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()  # the second batch of 5 ends in two rows of weight 0
    assert "nats/token" in lines[-2] and f" {result['eval_loss']:.4f} " in lines[-1]


@pytest.mark.parametrize(("file", "billions"), [("vlm-14.9b", 14.9), ("vlm-28.8b", 28.8), ("vlm-30.3b", 30.3)])
def test_the_papers_models_have_the_papers_sizes(file: str, billions: float) -> None:
    config = load_config(PLANS / f"{file}.toml")
    model = build_model(config, 152064)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert abs(count / 1e9 / billions - 1) < 0.02
    assert config.pipeline.cut[0] == "embed"  # the whole vision transformer is the first stage


@pytest.mark.usefixtures("x64")
def test_bad_sizes_are_one_line() -> None:
    for sizes, message in (
        ({"image_height": 6}, "make image_height and image_width multiples of 2 · patch = 4"),
        ({"vit_heads": 3}, "use one of"),
        ({"num_heads": 3}, "Llama: num_heads is 3"),
        ({"eyes": 2}, "has no option 'eyes'"),
    ):
        with pytest.raises(ConfigError) as caught:
            VLM(**{**SMALL, **sizes})
        assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises((ConfigError, StageError), match="does not divide over tp 4"):
        tiny().layers[1].shards(RankMesh(tp=4))  # type: ignore[misc]
