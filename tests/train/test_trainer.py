"""The Python door: ``jaxpipe.Trainer`` trains what one device would, says what the loss layer reports, saves and restores."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxpipe
from jaxpipe import Layer, Model, Trainer
from jaxpipe.errors import CheckpointError, ConfigError, ProgramError, RunError, ScheduleError
from jaxpipe.schedule import Traversal, generate, one_to_one, traverse, write_schedule
from jaxpipe.stage.model.layer import LayerContext
from jaxpipe.stage.model.plan import plan_stages
from jaxpipe.stage.model.reference import apply_model, init_params, model_output
from jaxpipe.train.state import StepMetrics, TrainState
from models.gpt import GPT
from tests.support.metrics import metrics_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_build")

V, T, B, M = 11, 6, 2, 4
RATE = optax.linear_schedule(1e-2, 0.0, 10)


@cache
def gpt() -> Model:
    """Return a tiny GPT whose loss layer also counts right answers, and the square of its logits by another weight."""
    model = GPT(vocab_size=V, d_model=8, num_layers=2, num_heads=2, seq_len=T, mlp_ratio=2, tied=False)
    inner = model.layers[-1]

    def loss(params: Any, x: jax.Array, context: LayerContext) -> Any:
        right = jnp.where(jnp.argmax(x, -1) == context.data["targets"], context.data["weights"], 0)
        squares = jnp.sum(jnp.square(x.astype(jnp.float32))), x.size
        return *inner.apply(params, x, context), {"accuracy": jnp.sum(right), "logit_square": squares}

    return replace(model, layers=(*model.layers[:-1], replace(inner, apply=loss)))


def batch_at(step: int, microbatches: int = M) -> dict[str, np.ndarray]:
    """Return flat arrays ``[microbatches · B, T]``, with uneven weights."""
    rng = np.random.default_rng(step)
    shape = (microbatches * B, T)
    return {
        "tokens": rng.integers(0, V, shape).astype(np.int32),
        "targets": rng.integers(0, V, shape).astype(np.int32),
        "weights": (rng.random(shape) < 0.7).astype(np.float32),
    }


def trainer_of(**options: Any) -> Trainer:
    sizes: dict[str, Any] = {"schedule": "zb-h1", "ranks": 2, "microbatches": M, "microbatch_size": B}
    return Trainer(gpt(), **{"optimizer": optax.adamw(1e-2), **sizes, **options})


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return trainer_of(optimizer=optax.adamw(RATE), clip_norm=1.0, ema=0.5, learning_rate=RATE)


def one_device(steps: int, clip: float = 1.0, decay: float = 0.5) -> tuple[Any, Any, list[float]]:
    """Take the same steps on one device; return parameters, their moving average and losses."""
    model, tx = gpt(), optax.chain(optax.clip_by_global_norm(clip), optax.adamw(RATE))
    params: Any = init_params(model, 0)
    average, state, losses = params, tx.init(params), []

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        total, weight = apply_model(model, params, batch)
        return total / weight

    @jax.jit
    def stepped(params: Any, state: Any, average: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params), loss

    for step in range(steps):
        params, state, average, loss = stepped(params, state, average, batch_at(step))
        losses.append(float(loss))
    return params, average, losses


def run(trainer: Trainer, state: TrainState, steps: int) -> tuple[TrainState, list[StepMetrics]]:
    metrics_by_step = []
    while len(metrics_by_step) < steps:
        state, metrics = trainer.step(state, batch_at(state.step))
        metrics_by_step.append(metrics)
    return state, metrics_by_step


def assert_close(got: Any, expected: Any, **tolerance: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, expected)


# -- batches in which nothing counts --------------------------------------------------------------------------------------


def test_a_step_that_changes_nothing_says_why(trainer: Trainer) -> None:
    """A batch without a target, and one of negative weights, were taken for gradients that are not finite."""
    state = trainer.init()
    before = jax.device_get(trainer.params(state))
    causes = {"no target": 0.0, "negative weight": -1.0, "not finite": np.inf}
    for cause, weight in causes.items():
        batch = batch_at(0)
        batch["weights"] = np.full_like(batch["weights"], weight)
        state, metrics = trainer.step(state, batch)
        assert (metrics.cause, bool(metrics.applied)) == (cause, False)
        assert float(metrics.loss) == 0 if cause == "no target" else np.isnan(float(metrics.loss))
        assert_close(trainer.params(state), before, rtol=0)
        if cause == "negative weight":
            evaluation = trainer.evaluate(state, batch)
            assert np.isnan(evaluation["loss"]) and evaluation["weight"] < 0
    mixed = batch_at(0)
    mixed["weights"][:B] = 0  # a microbatch without a target
    state, metrics = trainer.step(state, mixed)
    assert metrics.cause is None and bool(metrics.applied)
    empty = {name: array[:0] for name, array in batch_at(0).items()}
    for call in (trainer.evaluate, trainer.predict, trainer.step):
        with pytest.raises(ProgramError, match=r"batch\['tokens'\] has (no rows|shape \(0, 6\))"):
            call(state, empty)


# -- the package ----------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_no_jax() -> None:
    code = "import sys, jaxpipe; dir(jaxpipe); assert not {'jax', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match=r"'jaxpipe'.*'Trainr'"):
        _ = jaxpipe.Trainr
    assert {"Trainer", "Layer", "Model", "__version__"} <= set(dir(jaxpipe))


def test_a_script_needs_no_word_about_devices() -> None:
    """The trainer asks for emulated devices itself, where JAX has not looked for any yet; else it says how."""
    code = (
        "import os, optax, jax\nfrom jaxpipe import Trainer\nfrom models.gpt import GPT\n"
        "if os.fork():  # this one has not looked yet\n    os.wait()\nelse:\n    jax.devices()\n"
        "t = Trainer(GPT(d_model=8, num_layers=2, num_heads=2, seq_len=4), optimizer=optax.sgd(0.1), ranks=3,\n"
        "            microbatches=2, microbatch_size=1)\nprint(len(jax.devices()) >= 3)"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    both = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert both.stdout == "True\n"
    assert "ConfigError: 3 devices are needed and JAX sees 1 (cpu)" in both.stderr


# -- training -------------------------------------------------------------------------------------------------------------


def test_it_trains_what_one_device_would(trainer: Trainer) -> None:
    params, average, losses = one_device(3)
    state, metrics = run(trainer, trainer.init(), 3)
    assert_close([float(m.loss) for m in metrics], losses, rtol=1e-5)
    assert_close(trainer.params(state), params, rtol=1e-4, atol=1e-5)  # Adam divides rounding by rounding in places
    assert_close(trainer.params(state, ema=True), average, rtol=1e-4, atol=1e-5)
    assert [round(float(m.learning_rate), 6) for m in metrics] == [0.01, 0.009, 0.008]


def test_flat_batches_and_batches_of_microbatches_are_the_same(trainer: Trainer) -> None:
    flat = batch_at(0)
    deep = {name: array.reshape(M, B, T) for name, array in flat.items()}
    losses = [float(trainer.step(trainer.init(), batch)[1].loss) for batch in (flat, deep, jax.device_put(flat))]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("name", ["tokens", "weights"])
def test_a_batch_that_does_not_fit_is_refused(trainer: Trainer, name: str) -> None:
    batch, state = batch_at(0), trainer.init()
    with pytest.raises(ProgramError, match=rf"batch\['{name}'\] is no array: "):
        trainer.step(state, {**batch, name: [[1], [2, 3]]})
    with pytest.raises(ProgramError, match="the batch is a tuple; want a dict of arrays: tokens, targets, weights"):
        trainer.step(state, tuple(batch.values()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the state is a dict; want what init, restore or step returned"):
        trainer.step(batch, batch)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match=rf"batch\['{name}'\] has shape \(7, 6\); want \(8, 6\) or \(4, 2, 6\)"):
        trainer.step(state, {**batch, name: batch[name][:7]})
    with pytest.raises(ProgramError, match=f"the batch has no '{name}'; the model reads tokens, targets, weights"):
        trainer.step(state, {k: v for k, v in batch.items() if k != name})
    with pytest.raises(ProgramError, match=r"\(microbatches.*2, 6\).*\(microbatches, 2, 6\)"):
        trainer.evaluate(state, {**batch, "tokens": batch["tokens"][:, :5]})


def test_a_state_that_a_step_took_is_told(trainer: Trainer, tmp_path: Path) -> None:
    used = trainer.init()
    trainer.step(used, batch_at(0))
    uses: list[Callable[[], Any]] = [
        lambda: trainer.step(used, batch_at(0)),
        lambda: trainer.evaluate(used, batch_at(0)),
        lambda: trainer.predict(used, batch_at(0)),
        lambda: trainer.params(used),
        lambda: trainer.save(used, tmp_path),
    ]
    for use in uses:
        with pytest.raises(RunError, match="the state after step 0 is used up"):
            use()


def test_metrics_of_the_loss_layer(trainer: Trainer) -> None:
    state = trainer.init()
    params, batch = init_params(gpt(), 0), batch_at(3, microbatches=6)
    metric_sums = jax.jit(partial(metrics_of, gpt()))
    expected = {name: float(a / b) for name, (a, b) in metric_sums(params, batch).items()}
    evaluation = trainer.evaluate(state, batch)
    assert evaluation.keys() == {"loss", "accuracy", "logit_square", "weight"}
    assert evaluation.pop("weight") == batch["weights"].sum()
    assert_close(evaluation, expected, rtol=1e-5)
    _, metrics = trainer.step(state, batch_at(0))
    expected = {name: a / b for name, (a, b) in metric_sums(params, batch_at(0)).items()}
    assert_close({"loss": metrics.loss, **metrics.metrics}, expected, rtol=1e-5)


def test_metrics_do_not_change_the_gradient() -> None:
    model = GPT(vocab_size=V, d_model=8, num_layers=2, num_heads=2, seq_len=T, mlp_ratio=2, tied=False)
    plain = Trainer(model, optimizer=optax.adamw(1e-2), schedule="zb-h1", ranks=2, microbatches=M, microbatch_size=B)
    with_metrics = trainer_of()
    for a, b in zip(*(jax.tree.leaves(t.params(run(t, t.init(), 2)[0])) for t in (plain, with_metrics)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_prediction_is_what_the_layer_before_the_loss_returns(trainer: Trainer) -> None:
    state, batch = trainer.init(), batch_at(0, microbatches=3)
    expected = jax.jit(partial(model_output, gpt()))(init_params(gpt(), 0), batch)
    assert_close(trainer.predict(state, {"tokens": batch["tokens"]}), expected, rtol=1e-5, atol=1e-6)
    assert_close(trainer.predict(state, batch), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ProgramError, match="the batch has no 'tokens'"):
        trainer.predict(state, {"targets": batch["targets"]})
    next_state, _ = trainer.step(state, batch_at(0))
    assert not np.allclose(trainer.predict(next_state, batch, ema=True), trainer.predict(next_state, batch))


@pytest.mark.parametrize(
    "options",
    [{"tp": 2, "dp": 2}, pytest.param({"tp": 2, "dp": 2, "ranks": 1, "schedule": "1f1b"}, marks=pytest.mark.soak)],
    ids=str,
)
def test_prediction_from_several_devices_a_rank(options: Mapping[str, Any]) -> None:
    model = GPT(vocab_size=12, d_model=8, num_layers=2, num_heads=2, seq_len=T, mlp_ratio=2)
    sizes: dict[str, Any] = {"schedule": "zb-h1", "ranks": 2, "microbatches": 2, "microbatch_size": B}
    trainer = Trainer(model, optimizer=optax.sgd(0.1), **{**sizes, **options})
    tokens = batch_at(0, microbatches=2)["tokens"]
    expected = jax.jit(partial(model_output, model))(init_params(model, 0), {"tokens": tokens})
    assert_close(trainer.predict(trainer.init(), {"tokens": tokens}), expected, rtol=1e-5, atol=1e-6)


def test_extra_arguments_reach_the_optimizer() -> None:
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    trainer = trainer_of(optimizer=optax.chain(optax.sgd(0.0), plateau))
    state, _ = run(trainer, trainer.init(), 4)
    _, optimizer = trainer.train_step.by_layer(state)
    assert {float(leaf[1].scale) for leaf in optimizer.values()} < {1.0, 0.5, 0.25}

    def scaled(updates: Any, state: Any, params: Any = None, *, factor: Any, **_: Any) -> Any:
        return jax.tree.map(lambda g: -factor * g, updates), state

    by_factor = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)
    other = trainer_of(optimizer=by_factor, update_arguments={"factor": 1.0})
    before = jax.device_get(other.params(other.init()))
    state, _ = other.step(other.init(), batch_at(0), factor=0.0)
    assert_close(other.params(state), before)
    state, _ = other.step(state, batch_at(0))
    differ = jax.tree.map(lambda a, b: not np.array_equal(a, b), other.params(state), before)
    assert any(jax.tree.leaves(differ))
    with pytest.raises(ConfigError, match="'factor'"):
        trainer_of(optimizer=by_factor)


# -- schedules, cuts, words -----------------------------------------------------------------------------------------------


def test_a_schedule_by_name_value_or_file(tmp_path: Path) -> None:
    write_schedule(generate("zb-h1", 2, M), tmp_path / "mine.sched")
    options: list[dict[str, Any]] = [
        {"schedule": "zb-h1", "ranks": 2, "microbatches": M},
        {"schedule": generate("zb-h1", 2, M)},
        {"schedule": tmp_path / "mine.sched"},
        {"schedule": str(tmp_path / "mine.sched"), "ranks": 2},
    ]
    trainers = [Trainer(gpt(), optimizer=optax.sgd(0.1), microbatch_size=B, **kwargs) for kwargs in options]
    assert len({t.schedule.rows for t in trainers}) == 1


def test_a_function_makes_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_orders.py").write_text(
        "from jaxpipe.schedule import Traversal, one_to_one, traverse\n"
        "def limited(ranks, microbatches, costs):\n"
        "    return traverse(one_to_one(ranks), microbatches, Traversal('backward', in_flight=2), costs)\n"
        "def smaller():\n"
        "    return limited(1, 2, None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trainer = trainer_of(schedule="own_orders:limited")
    limited = traverse(one_to_one(2), M, Traversal("backward", in_flight=2))
    assert trainer.schedule.rows == limited.rows
    assert trainer_of(schedule="1f1b").with_schedule("own_orders:limited").schedule.rows == limited.rows
    for schedule, sizes, words in (
        ("own_orders:limited", {"ranks": None}, "schedule 'own_orders:limited' fits any sizes: say ranks=…"),
        ("own_orders:smaller", {}, "own_orders:smaller has 1 ranks"),
        ("own_orders:none", {}, "own_orders has no function or class 'none'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            trainer_of(schedule=schedule, **sizes)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"schedule": "zb-h2", "ranks": None}, ConfigError, "schedule 'zb-h2' fits any sizes: say ranks=…"),
        ({"schedule": "zb-h11"}, ScheduleError, "unknown schedule family 'zb-h11'; did you mean 'zb-h1'"),
        ({"schedule": generate("1f1b", 2, 3)}, ConfigError, "schedule '1f1b': microbatches=4, it has 3; leave these"),
        ({"schedule": "none.sched"}, ScheduleError, "can't read none.sched"),
        ({"schedule": "1f1b", "memory_limit": 1.0}, ScheduleError, "1f1b takes no memory limit"),
        ({"schedule": generate("1f1b", 2, M), "memory_limit": 1.0}, ScheduleError, "more than the memory limit of 1"),
        ({"cut": ["nowhere"]}, Exception, "no layer 'nowhere' to start a stage at"),
        ({"recompute": "some"}, Exception, "recompute policy 'some' does not exist"),
        ({"tp": 3, "ranks": 1}, ConfigError, "tp"),
        ({"dp": 3}, ProgramError, "a microbatch of 2 sequences does not divide over dp 3"),
        ({"ranks": 40}, Exception, "40"),
        ({"optimizer": lambda g: g}, ConfigError, "optimizer"),
        ({"clip_norm": -1.0}, ConfigError, "clip_norm is -1"),
        ({"ema": 1.5}, ConfigError, "the decay of averaged parameters is 1.5; want 0 <= decay < 1"),
        ({"microbatch_size": 0}, ConfigError, "microbatch_size is 0; want a whole number from 1"),
        ({"ranks": 2.5}, ConfigError, "ranks is 2.5; want a whole number from 1"),
        ({"microbatches": True}, ConfigError, "microbatches is True"),
        ({"chunks": 0}, ConfigError, "chunks is 0"),
        ({"dp": 0}, ConfigError, "dp is 0"),
        ({"seed": "a"}, ConfigError, "seed is 'a'; want a whole number from 0"),
        ({"keep_last": 0}, ConfigError, "keep_last is 0"),
        ({"keep_best": -1}, ConfigError, "keep_best is -1"),
        ({"dtype": "int32"}, ConfigError, "dtype is int32; use float32"),
        ({"dtype": "float16"}, ConfigError, "dtype is float16, which needs loss scaling"),
        ({"dtype": "float64"}, ConfigError, "dtype is float64, which JAX computes in float32 unless x64 is enabled"),
        ({"dtype": "float8_e4m3fn"}, ConfigError, "dtype is float8_e4m3fn; use"),
        ({"dtype": "12__0y"}, ConfigError, "dtype is '12__0y', which is no dtype"),
        ({"dtype": "fp32"}, ConfigError, "dtype is 'fp32', which is no dtype"),
        ({"platform": "tpu"}, ConfigError, "platform is 'tpu'; want 'auto', 'cpu' or 'gpu'"),
        ({"learning_rate": "x"}, ConfigError, "learning_rate is 'x'; want a number, or a schedule"),
        ({"devices": [1, 2]}, ConfigError, "devices[0] is a int"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_can_not_be_is_refused_in_one_line(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        trainer_of(**arguments)
    assert isinstance(caught.value, jaxpipe.errors.JaxpipeError)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "division",
    [pytest.param({"dp": 2}, marks=pytest.mark.soak), {"cp": 2}, {"dp": 2, "zero1": True}, {"tp": 2}],
    ids=lambda x: "-".join(x),
)
def test_loss_and_grads_of_a_trainer_on_several_devices_a_rank(division: dict[str, Any]) -> None:
    """The reductions of the train step donate the accumulators: "Array has been deleted" with dp and cp."""
    options = {
        "vocab_size": 8,
        "d_model": 8,
        "num_layers": 2,
        "num_heads": 2,
        "seq_len": 8,
        "mlp_ratio": 2,
        "tied": False,
    }
    model, shape, rng = GPT(**options), (2, 2, 8), np.random.default_rng(0)
    batch: dict[str, Any] = {name: rng.integers(0, 8, shape).astype(np.int32) for name in ("tokens", "targets")}
    batch["weights"] = (rng.random(shape) < 0.7).astype(np.float32)
    sizes: dict[str, Any] = {"ranks": 2, "microbatches": 2, "microbatch_size": 2}
    pipeline = Trainer(model, optimizer=optax.sgd(0.1), **sizes, **division).pipeline
    params = init_params(model, 0)
    for _ in range(2):  # the first call has taken nothing from the pipeline
        loss, grads = pipeline.loss_and_grads(pipeline.place(params), batch)

    def mean_loss(params: Any) -> jax.Array:
        total, weight = apply_model(model, params, {name: a.reshape(4, 8) for name, a in batch.items()})
        return total / weight

    expected, expected_grads = jax.jit(jax.value_and_grad(mean_loss))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)


def test_a_module_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"jaxpipe\.Model.*jaxpipe\.layers_from_nnx"):
        Trainer(linen.Dense(3), optimizer=optax.sgd(0.1), microbatch_size=1)  # type: ignore[arg-type]


def test_a_policy_that_does_nothing_warns() -> None:
    with pytest.warns(UserWarning, match="recompute.*attention"):
        trainer_of(recompute=["none", "attention"], cut=["head"])


def test_another_order_of_the_same_stages(trainer: Trainer) -> None:
    other = trainer.with_schedule("1f1b")
    assert (other.schedule.name, trainer.schedule.name) == ("1f1b", "zb-h1")
    states = [run(t, t.init(), 2)[0] for t in (trainer, other)]
    params, other_params = (t.params(s) for t, s in zip((trainer, other), states, strict=True))
    assert_close(
        params, other_params, rtol=1e-5, atol=1e-6
    )  # Adam divides rounding by rounding: 4e-7 of a step of 1e-2
    mixed, _ = other.step(trainer.init(), batch_at(0))
    assert mixed.step == 1
    with pytest.raises(ProgramError, match="places stages differently"):
        trainer.with_schedule("v-zb")


def test_cuts_by_name_and_by_plan() -> None:
    by_name = trainer_of(cut=["block_01"])
    by_plan = trainer_of(cut=plan_stages(gpt(), boundaries=[2]))
    assert by_name.pipeline.boundaries == by_plan.pipeline.boundaries == ((0, 2), (2, 5))
    assert by_name.plan == replace(by_plan.plan, layer_costs=by_name.plan.layer_costs, stages=by_name.plan.stages,
                                   costs_from=by_name.plan.costs_from)  # fmt: skip


def test_a_trainer_prints_a_summary(trainer: Trainer) -> None:
    lines = str(trainer).splitlines()
    assert len(lines) <= 6
    text = " ".join(lines)
    assert repr(trainer) == "<Trainer of gpt by zb-h1 on 2 ranks>"
    assert repr(trainer.init()) == "<TrainState after step 0, 2 stages>"
    assert repr(trainer.pipeline) == (
        "<Pipeline of gpt: 5 layers in 2 stages on 2 ranks, schedule zb-h1, 4 microbatches of 2>"
    )
    for word in ("gpt", "5 layers", "zb-h1", "2 ranks", "4 microbatches of 2", "cpu", "float32"):
        assert word in text, word


def test_timelines_predicted_and_measured(trainer: Trainer) -> None:
    fresh = trainer.with_schedule(trainer.schedule)
    assert fresh.timeline.source == fresh.pipeline.predicted_timeline().source
    _, metrics = fresh.step(fresh.init(), batch_at(0), record=True)
    assert metrics.timeline is not None
    assert fresh.timeline == metrics.timeline


# -- checkpoints ----------------------------------------------------------------------------------------------------------


def test_a_restored_run_goes_on_in_the_same_bits(trainer: Trainer, tmp_path: Path) -> None:
    straight, _ = run(trainer, trainer.init(), 4)
    expected = jax.device_get(trainer.train_step.by_layer(straight))
    with trainer_of(optimizer=optax.adamw(RATE), clip_norm=1.0, ema=0.5) as first:
        state = first.restore(tmp_path / "run", default=first.init)
        state, _ = run(first, state, 2)
        first.save(state, extra={"seen": [1, 2], "name": "a", "table": {"x": np.arange(3)}}, eval_loss=2.5)
    second = trainer_of(optimizer=optax.adamw(RATE), clip_norm=1.0, ema=0.5, schedule="1f1b", ranks=4)
    state = second.restore(tmp_path / "run")
    assert state.step == 2
    assert (second.extra["seen"], second.extra["name"]) == ([1, 2], "a")
    np.testing.assert_array_equal(second.extra["table"]["x"], np.arange(3))
    assert second.restore(tmp_path / "other", default=second.init).step == 0
    assert second.extra == {}, "what another run kept is not this one's"
    back = trainer.restore(tmp_path / "run", step="best")
    state, _ = run(trainer, back, 2)
    restored = jax.device_get(trainer.train_step.by_layer(state))
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def test_restoring_says_what_is_wrong(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"default=trainer\.init"):
        trainer.restore(tmp_path / "none")
    with pytest.raises(CheckpointError, match="give a directory"):
        trainer_of().save(trainer.init())
    with pytest.raises(ConfigError, match=r"extra\['loader'\]"):
        trainer.save(trainer.init(), tmp_path / "run", extra={"loader": object()})
    with pytest.raises(ConfigError, match="extra is a list; want a dict"):
        trainer.save(trainer.init(), tmp_path / "run", extra=[1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="eval_loss"):
        trainer.save(trainer.init(), tmp_path / "run", eval_loss={"loss": 1.0})  # type: ignore[arg-type]
    trainer.save(trainer.init(), tmp_path / "run")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        trainer.restore(tmp_path / "run", step=7)
    with pytest.raises(CheckpointError, match="optimizer"):
        trainer_of(optimizer=optax.sgd(0.1, momentum=0.9)).restore(tmp_path / "run")


def _scaled(by: float) -> Model:
    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (T, T))}

    def first(p: Any, x: Any, c: LayerContext) -> Any:
        return c.data["x"] @ p["w"]

    def loss(p: Any, x: Any, c: LayerContext) -> Any:
        return by * jnp.sum(x * x), jnp.float32(x.size)

    layers = (Layer("first", init, first, reads=("x",)), Layer("second", init, lambda p, x, c: x @ p["w"]),
              Layer("loss", lambda key: {}, loss))  # fmt: skip
    return Model("scaled", layers, lambda n: {"x": jax.ShapeDtypeStruct((n, T), jnp.float32)}, 1, T)


def test_a_checkpoint_of_a_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    def of(by: float) -> Trainer:
        return Trainer(
            _scaled(by), optimizer=optax.sgd(0.1), schedule="1f1b", ranks=2, microbatches=2, microbatch_size=1
        )

    one = of(1.0)
    one.save(one.init(), tmp_path / "run")
    assert of(1.0).restore(tmp_path / "run").step == 0
    with pytest.raises(CheckpointError, match="of another model"):
        of(2.0).restore(tmp_path / "run")
    assert of(2.0).restore(tmp_path / "run", same_model=False).step == 0
