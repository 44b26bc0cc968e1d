"""CLIP uncut: its loss by hand, what a group is, padding, shards, evaluation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.axes import RankMesh
from jaxpipe.errors import ConfigError, ProgramError, ScheduleError, StageError
from jaxpipe.program.ir import Send
from jaxpipe.runtime.memory_probe import measured_peaks
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import (
    Action,
    CostProfile,
    Placement,
    Schedule,
    Traversal,
    check_schedule,
    circular,
    explicit,
    ir,
    one_to_one,
    towers,
    traverse,
    with_span,
)
from jaxpipe.schedule.passes import separate_gradients
from jaxpipe.stage import instructions
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.reference import apply_model, init_params, model_output
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.tokenizers import ByteTokenizer
from jaxpipe.train.evaluate import Trained, generate, held_out_score
from models.clip import CLIP
from models.words import pairs
from tests.support.metrics import metrics_of
from tests.support.sharded import QUICK

SMALL: dict[str, Any] = {
    "vocab_size": 16, "seq_len": 4, "image_height": 4, "image_width": 8, "patch": 2, "image_size": 8, "image_layers": 1,
    "image_heads": 2, "text_size": 12, "text_layers": 1, "text_heads": 2, "embed_size": 6, "dtype": "float64",
}  # fmt: skip


@functools.cache
def tiny() -> Model:
    return CLIP(**SMALL)


def random_params(model: Model) -> Any:
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    return jax.tree.map(lambda a: np.asarray(rng.normal(0, 0.5, a.shape), a.dtype), shapes)


def random_batch(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "images": rng.integers(0, 256, (n, 4, 8)).astype(np.uint8),
        "tokens": rng.integers(0, 16, (n, 4)).astype(np.int32),
        "weights": np.ones(n, np.float32),
    }


@functools.cache
def _computed() -> Any:
    """Return loss and weight of tiny pairs, metrics, gradients, and what the loss takes: one program a batch size."""

    def run(params: Any, batch: Mapping[str, Any]) -> Any:
        (loss, weight), grads = jax.value_and_grad(lambda p: apply_model(tiny(), p, batch), has_aux=True)(params)
        return loss, weight, grads, metrics_of(tiny(), params, batch)["retrieval"], model_output(tiny(), params, batch)

    return jax.jit(run, compiler_options=QUICK)


@pytest.mark.usefixtures("x64")
def test_the_loss_is_the_mean_of_two_cross_entropies() -> None:
    params = random_params(tiny())
    loss, weight, _, retrieval, (image, text) = jax.device_get(_computed()(params, random_batch(6)))
    np.testing.assert_allclose(np.linalg.norm(image, axis=1), 1, rtol=1e-9)
    scores = np.exp(float(params["loss"]["log_scale"])) * image @ text.T
    by_hand = 0.0
    for i in range(6):
        for row in (scores[i], scores[:, i]):
            by_hand += (np.log(np.exp(row).sum()) - scores[i, i]) / 2
    np.testing.assert_allclose([loss, weight], [by_hand, 6], rtol=1e-9)
    assert retrieval[0] == sum(scores[i].argmax() == i for i in range(6)) and retrieval[1] == 6


@pytest.mark.usefixtures("x64")
def test_groups_of_pairs_are_other_losses_and_the_temperature_learns() -> None:
    params, batch = random_params(tiny()), random_batch(6)
    joint = _computed()(params, batch)[2]
    halves = [_computed()(params, {k: v[i : i + 3] for k, v in batch.items()})[2] for i in (0, 3)]
    separate = jax.tree.map(jnp.add, *halves)
    for tree in (joint, separate):
        assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(tree))
    differ = jax.tree.map(lambda a, b: not np.allclose(a, b, rtol=1e-3), joint, separate)
    assert all(jax.tree.leaves(differ))
    hot = params | {"loss": {"log_scale": jnp.float64(9).astype(params["loss"]["log_scale"].dtype)}}
    assert float(_computed()(hot, batch)[2]["loss"]["log_scale"]) == 0  # at its bound


@pytest.mark.usefixtures("x64")
def test_a_pair_of_weight_zero_is_nobodys_negative() -> None:
    params, batch = random_params(tiny()), random_batch(3)
    padded = {k: np.concatenate([v, np.zeros((3, *v.shape[1:]), v.dtype)]) for k, v in batch.items()}
    expected, got = (_computed()(params, b)[:4] for b in (batch, padded))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), got, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_towers_on_ranks_of_their_own_have_the_gradients_of_the_whole_model(tp: int) -> None:
    model, params, m = tiny(), random_params(tiny()), 2
    rows = tuple(tuple(Action(op, s, i) for op in ("F", "BW") for i in range(m)) for s in range(3))
    schedule = Schedule("two towers", explicit(3, [0, 1, 2], [(0, 2), (1, 2)]), m, rows)
    text, loss = ([layer.name for layer in model.layers].index(name) for name in ("text_embed", "loss"))
    pipe = Pipeline.build(
        model,
        schedule,
        microbatch_size=3,
        boundaries=[(0, text), (text, loss), (loss, len(model.layers))],
        compute_dtype=jnp.float64,
        tp=RankMesh(tp=tp),
    )
    flat = random_batch(6)
    batch = {name: array.reshape(m, 3, *array.shape[1:]) for name, array in flat.items()}
    got, grads = pipe.loss_and_grads(pipe.place(params), batch)
    parts = [_computed()(params, {name: array[i] for name, array in batch.items()}) for i in range(m)]
    np.testing.assert_allclose(np.asarray(got), sum(float(part[0]) for part in parts) / 6, rtol=1e-10)
    expected = jax.tree.map(lambda a, b: (a + b) / 6, *(part[2] for part in parts))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10, atol=1e-10),
        {name: dict(grads[name]) for name in params},
        expected,
    )


def tower_placement(group: int) -> Placement:
    """Return a placement: the picture tower in four stages on two ranks, the text tower in two on two, the loss on the
    second."""
    return with_span(towers({"image": circular(2, 2), "text": one_to_one(2)}, join=("image",)), {6: group})


def one_f_one_b(placement: Placement, m: int) -> Schedule:
    rules = {range(r, r + 1): Traversal("backward", in_flight_per_stage=m) for r in range(4)}
    return traverse(placement, m, rules)


def mixed(placement: Placement, m: int) -> Schedule:
    """Return a schedule interleaved on one tower, with gradients separated on both."""
    costs = CostProfile.uniform(placement.num_stages)
    rules = {
        range(2): Traversal("interleaved", forward="breadth:2", backward="depth:2"),
        range(2, 4): Traversal("backward", in_flight_per_stage=m),
    }
    return separate_gradients(traverse(placement, m, rules, costs), costs)


@functools.cache
def grouped(group: int, dp: int, order: Any, m: int = 4) -> tuple[Pipeline, Any, Any]:
    """Return a pipeline, a batch of it, and its parameters."""
    model = in_groups(group)
    schedule = order(tower_placement(group), m)
    check_schedule(schedule)
    pipe = Pipeline.build(model, schedule, microbatch_size=2 * dp, compute_dtype=jnp.float64, dp=dp)
    return pipe, microbatches(m, dp), random_params(model)


def in_groups(group: int) -> Model:
    return CLIP(**{**SMALL, "image_layers": 2, "group": group})


def microbatches(m: int, dp: int) -> dict[str, np.ndarray]:
    return {name: x.reshape(m, 2 * dp, *x.shape[1:]) for name, x in random_batch(m * 2 * dp).items()}


def unsplit(model: Model, dp: int, batch: Mapping[str, Any], params: Any) -> tuple[float, Any]:
    """Return mean loss and gradients of the whole model, each dp shard with groups of its own."""
    rows = {}
    for name, x in batch.items():
        parts = x.reshape(-1, model.span, dp, 2, *x.shape[2:]).swapaxes(1, 2)
        rows[name] = parts.reshape(-1, 2 * model.span, *x.shape[2:])

    @functools.partial(jax.jit, compiler_options=QUICK)
    def mean(params: Any) -> Any:
        def loss(p: Any) -> Any:
            total, weight = jax.vmap(lambda part: apply_model(model, p, part))(rows)
            return total.sum() / weight.sum()

        return jax.value_and_grad(loss)(params)

    return mean(params)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("group", "dp"),
    [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.soak) for sizes in ((1, 1), (2, 1), (4, 1), (1, 2), (4, 2)))],
)
def test_a_loss_over_several_microbatches_has_the_gradients_of_the_whole_model(group: int, dp: int) -> None:
    pipe, batch, params = grouped(group, dp, one_f_one_b)
    got = pipe.loss_and_grads(placed := pipe.place(params), batch)
    loss, grads = unsplit(pipe.model, dp, batch, params)
    np.testing.assert_allclose(np.asarray(got[0]), loss, rtol=1e-10)
    assert float(grads["loss"]["log_scale"]) != 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10, atol=1e-10),
        {name: dict(got[1][name]) for name in params},
        grads,
    )
    total, weight = pipe.evaluate(placed, batch)
    np.testing.assert_allclose(total / weight, loss, rtol=1e-10)
    images, texts = pipe.predict(placed, batch)
    assert images.shape == texts.shape == (8 * dp, 6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_groups_of_one_and_of_all_are_other_losses(dp: int) -> None:
    params = random_params(in_groups(1))
    one, all_pairs = (unsplit(in_groups(group), dp, microbatches(4, dp), params)[1] for group in (1, 4))
    differ = jax.tree.map(lambda a, b: not np.allclose(a, b, rtol=1e-3), one, all_pairs)
    assert all(jax.tree.leaves(differ))


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
def test_orders_of_towers_have_the_same_bits_and_the_predicted_memory() -> None:
    first, batch, params = grouped(2, 1, one_f_one_b)
    separate = separate_gradients(first.schedule, CostProfile.uniform(7))
    results = []
    for schedule in (separate, mixed(first.placement, 4)):
        pipe = first.with_schedule(schedule)
        placed = pipe.place(params)
        results.append(pipe.loss_and_grads(placed, batch))
        measured = measured_peaks(pipe, placed, batch, None)
        for predicted, got in zip(pipe.memory_report(workspace=False, curves=True).ranks, measured.ranks, strict=True):
            assert predicted.live_bytes == got.live_bytes
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(results))


def test_towers_exchange_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x64: None) -> None:
    """The worked example of ``stage/GUIDE.md``: each end has the other's rows, of all of dp; gradients are the same."""
    monkeypatch.setattr(ir, "_REGISTRY", ir._REGISTRY.copy())
    monkeypatch.setattr(instructions, "_BUILDS", instructions._BUILDS.copy())
    page = (Path(instructions.__file__).parent / "GUIDE.md").read_text(encoding="utf-8")
    (tmp_path / "outside_exchange.py").write_text(page.split("```python\n")[2].split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    exchanging = __import__("outside_exchange").exchanging
    monkeypatch.delitem(sys.modules, "outside_exchange")
    dp = 2
    plain, batch, params = grouped(2, dp, one_f_one_b)
    pipe = plain.with_schedule(exchanging(plain.schedule))
    placed = pipe.place(params)
    out = pipe.run(placed, {at: pipe.zeros(at) for at in pipe.own_instances}, batch)
    assert {*out.user} == {"found"} and {*out.user["found"]} == {(s, i) for s in (3, 5) for i in range(4)}
    for i in range(4):
        image, text = model_output(pipe.model, params, {name: x[i] for name, x in batch.items()})
        for stage, scores in ((3, image @ text.T), (5, text @ image.T)):
            assert out.user["found"][stage, i] == (scores.argmax(1) == np.arange(2 * dp)).sum()
    results = [p.loss_and_grads(placed, batch) for p in (plain, pipe)]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(results))
    measured = measured_peaks(pipe, placed, batch, None)
    for predicted, got in zip(pipe.memory_report(workspace=False, curves=True).ranks, measured.ranks, strict=True):
        assert predicted.live_bytes == got.live_bytes
    sends = [x for x in pipe.programs[1].instructions if isinstance(x, Send) and x.action.op == "Share"]
    assert [x.dst for x in sends] == [3] * 4


def test_the_span_is_the_models() -> None:
    model = CLIP(**{**SMALL, "dtype": "float32", "image_layers": 2, "group": 2})
    build = functools.partial(Pipeline.build, microbatch_size=2)
    with pytest.raises(ProgramError, match=r"1.*6.*2 .*with_span") as caught:
        build(model, one_f_one_b(tower_placement(1), 4))
    assert "\n" not in str(caught.value)
    with pytest.raises(ScheduleError, match=r"6 runs.*2 microbatches.*3"):
        build(model, one_f_one_b(tower_placement(2), 3))
    with pytest.raises(StageError, match="loss has span 0"):
        replace(model, layers=(*model.layers[:-1], replace(model.layers[-1], span=0)))
    with pytest.raises(StageError, match=r"image_head.*2"):
        replace(model, layers=tuple(replace(x, span=2) if x.name == "image_head" else x for x in model.layers))
    with pytest.raises(ConfigError, match="group"):
        CLIP(**{**SMALL, "group": 0})


def test_held_out_scores_tell_retrieval_and_padding_changes_nothing() -> None:
    model = CLIP(**{**SMALL, "dtype": "float32"})
    trained = Trained(TrainConfig(), model, random_params(model), ByteTokenizer(), 3)
    batch = random_batch(6)
    padded = {k: np.concatenate([v, np.zeros((2, *v.shape[1:]), v.dtype)]) for k, v in batch.items()}
    score, padded_score = (held_out_score(trained, [b], None) for b in (batch, padded))
    assert score.bits_per_byte is None and set(score.metrics) == {"retrieval"}
    np.testing.assert_allclose(score.loss, padded_score.loss, rtol=1e-5)
    assert score.metrics == padded_score.metrics


def test_it_makes_no_text() -> None:
    model = CLIP(**{**SMALL, "dtype": "float32"})
    trained = Trained(TrainConfig(), model, random_params(model), ByteTokenizer(), 3)
    with pytest.raises(StageError) as caught:
        generate(trained, "a", 3)
    assert str(caught.value).startswith("generate: clip is no language model: ") and "\n" not in str(caught.value)


def test_bad_sizes_are_one_line() -> None:
    for sizes, message in (
        ({"image_width": 6}, "multiples of 2 · patch = 4"),
        ({"text_heads": 5}, "use one of"),
        ({"tower": 2}, "has no option 'tower'"),
    ):
        with pytest.raises(ConfigError) as caught:
            CLIP(**{**SMALL, "dtype": "float32", **sizes})
        assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="use sequence_parallel=false"):
        tiny().layers[-1].shards(RankMesh(tp=2, sequence=True))  # type: ignore[misc]


@pytest.mark.soak
def test_held_out_words_are_found_again() -> None:
    """The settings of ``scripts/clip.toml``: about a minute."""
    model = CLIP(image_size=64, text_size=64, embed_size=64)
    train, held_out = pairs()
    params = init_params(model, 0)
    rate = optax.warmup_cosine_decay_schedule(0, 2e-3, 50, 200, 1e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))

    @jax.jit
    def step(params: Any, state: Any, batch: Mapping[str, Any]) -> Any:
        def mean(p: Any) -> Any:
            loss, weight = apply_model(model, p, batch)
            return loss / weight

        updates, state = tx.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    state, rng = tx.init(params), np.random.default_rng(0)
    for _ in range(200):
        rows = rng.integers(0, len(train["images"]), 128)
        params, state = step(params, state, {name: array[rows] for name, array in train.items()})
    total, weight = jax.jit(functools.partial(metrics_of, model))(params, held_out)["retrieval"]
    assert total / weight > 0.9
