"""Post-validation changes no bit: states and metrics against the same steps without, clipped and not finite ones among them."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import ConfigError, RunError
from jaxpipe.schedule import CostProfile, generate
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.config import load_config
from jaxpipe.train.state import TrainState
from jaxpipe.train.step import TrainStep
from jaxpipe.train.trainer import Trainer
from jaxpipe.train.update.optimizer import Muon, learning_rate, lion, matrices_of, with_ema
from jaxpipe.train.update.post_validation import CLEAN_STEPS, LateUpdate, PostValidation
from tests.support.parallel_cases import Case, batches, model_for, optimizer, params_for, pipeline, two_axes
from tests.support.pipelines import assert_same_arrays
from tests.support.train_runs import STEPS, config, deterministic, final, run, settings, write_text
from tests.train.test_graph_runs import TOWERS

SMALL = Case("gpt-tied", 2, 1, 1, family="zb-2p", dtype="bfloat16", one_block=True)
Told = tuple[float, float, bool, bool]


def host_state(state: TrainState) -> Any:
    return jax.device_get((dict(state.master), dict(state.optimizer), dict(state.compute)))


def numbers_of(metrics: Any) -> Told:
    return float(metrics.loss), float(metrics.grad_norm), bool(metrics.applied), bool(metrics.finite)


def same_bits(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def batches_with_nan(count: int) -> list[dict[str, np.ndarray]]:
    """Return batches of which one gives a gradient that is not finite."""
    data = batches(count)
    data[count // 2]["weights"][0, 0, 0] = np.nan
    return data


def steps_without(
    step: Callable[..., TrainStep], params: Any, data: Sequence[Any]
) -> tuple[float, list[Any], list[Told], Any]:
    """Return a norm that some of the steps exceed, and all that is after each step that clips by it."""
    norms = []
    plain = step(clip_norm=0.0)
    state = plain.init(params)
    for batch in data[: len(data) // 2]:
        state, metrics = plain(state, batch)
        norms.append(float(metrics.grad_norm))
    clip_norm = sorted(norms)[(len(norms) - 1) // 2]
    clipping = step(clip_norm=clip_norm)
    state, states, records = clipping.init(params), [], []
    for batch in data:
        state, metrics = clipping(state, batch)
        states.append(host_state(state))
        records.append(numbers_of(metrics))
    return clip_norm, states, records, jax.device_get(clipping.by_layer(state))


def check_every_bit(
    step: Callable[..., TrainStep], params: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> TrainStep:
    """Compare the steps of ``step(clip_norm=…, post_validation=…)`` with and without post-validation."""
    data = batches_with_nan(count)
    clip_norm, states, records, end = steps_without(step, params, data)
    committed = []
    settled = LateUpdate.settled

    def watch(late: LateUpdate) -> TrainState:
        first, state = late._settled is None, settled(late)
        committed.extend([host_state(state)] if first else [])
        return state

    monkeypatch.setattr(LateUpdate, "settled", watch)
    ahead = step(clip_norm=clip_norm, post_validation="on")
    state, metrics = ahead.init(params), []
    for batch in data:
        state, step_metrics = ahead(state, batch)
        metrics.append(step_metrics)
    same_bits(jax.device_get(ahead.by_layer(state)), end)
    same_bits([numbers_of(m) for m in metrics], records)
    same_bits(committed, states)
    clipped = sum(norm > clip_norm for _, norm, *_ in records)
    assert count / 6 < clipped < 2 * count / 3
    assert ahead.post_validation.rollbacks == clipped + 1
    return ahead


CASES = [
    Case(name, 2, 1, dp, family=family, dtype=dtype, zero1=zero1)
    for name, family, dtype, (dp, zero1) in itertools.product(
        ("gpt-tied", "gpt"),
        ("1f1b", "zb-2p", "v-zb"),
        ("float32", "bfloat16"),
        ((1, False), (2, False), (2, True)),
    )
]
QUICK = Case("gpt", 2, 1, 1, family="zb-2p", dtype="float32", one_block=True)


def step_of(case: Case, **overrides: Any) -> Callable[..., TrainStep]:
    step_options = {"zero1": case.zero1, **overrides}
    make_optimizer = step_options.pop("optimizer", optimizer)
    return lambda **options: TrainStep(pipeline(case), make_optimizer(), **step_options, **options)


@pytest.fixture
def same_programs(request: pytest.FixtureRequest) -> None:
    """Compile from here on so that parts and the whole have the same bits, which a test's quick compilation may not."""
    pipeline(QUICK).warm_up()
    request.getfixturevalue("users_compiler")


@pytest.mark.usefixtures("same_programs")
def test_every_bit_is_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_bit(step_of(QUICK), params_for(QUICK), 8, monkeypatch)


@pytest.mark.soak
@pytest.mark.usefixtures("users_compiler")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_bit_of_thirty_steps_is_as_without(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_bit(step_of(case), params_for(case), 30, monkeypatch)


def _muon(case: Case) -> Any:
    return Muon(learning_rate(1e-2, 2, 10, 0.1), matrices_of(model_for(case)), optimizer(), 0.9, 0.1)


def _lion(case: Case) -> Any:
    return lion(learning_rate(1e-3, 2, 10, 0.1), betas=(0.9, 0.99), weight_decay=0.1, mask=two_axes)


def _plateau(case: Case) -> Any:
    """Looks at the loss of every step."""
    return optax.chain(optimizer(), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))


def _injected(case: Case) -> Any:
    return optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 20))


def _two(**options: Any) -> Case:
    return Case(**{"name": "gpt-tied", "pp": 2, "tp": 1, "dp": 1, "family": "zb-2p", "dtype": "bfloat16", **options})


COMBINATIONS: Mapping[str, tuple[Case, Callable[[Case], Any]]] = {
    "tp": (_two(tp=2, sequence=True), lambda case: optimizer()),
    "tp, dp, ZeRO-1": (_two(tp=2, dp=2, zero1=True, dtype="float32"), lambda case: optimizer()),
    "cp": (_two(cp=2, cp_method="ring"), lambda case: optimizer()),
    "offload": (_two(family="po-h"), lambda case: optimizer()),
    "braids": (_two(family="stp", tp=2), lambda case: optimizer()),
    "replicas": (_two(family="chimera", name="gpt"), lambda case: optimizer()),
    "Muon": (_two(dtype="float32"), _muon),
    "Muon, ZeRO-1": (_two(dp=2, zero1=True), _muon),
    "Lion": (_two(dtype="float32"), _lion),
    "averaged parameters": (_two(dtype="float32"), lambda case: with_ema(optimizer(), 0.9)),
    "the loss in the optimizer": (_two(dtype="float32"), _plateau),
    "the rate in the state": (_two(), _injected),
}


@pytest.mark.soak
@pytest.mark.usefixtures("users_compiler")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_bit_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, make_optimizer = COMBINATIONS[name]
    check_every_bit(step_of(case, optimizer=lambda: make_optimizer(case)), params_for(case), 12, monkeypatch)


@pytest.mark.soak
@pytest.mark.usefixtures("users_compiler")
def test_every_bit_where_another_order_is_taken_on_the_way() -> None:
    ends = []
    for mode in ("off", "on"):
        step = TrainStep(pipeline(SMALL), optimizer(), clip_norm=1e3, post_validation=mode)
        state, other = step.init(params_for(SMALL)), step.pipeline.with_schedule(generate("zb-h1", 2, 4))
        for k, batch in enumerate(batches(12)):
            step = step.with_pipeline(other) if k == 7 else step
            state, _ = step(state, batch)
        ends.append((jax.device_get(step.by_layer(state)), step.post_validation.mode, step.post_validation.rollbacks))
    same_bits(ends[0][0], ends[1][0])
    assert ends[1][1:] == ("on", 0)


# -- what others see --------------------------------------------------------------------------------------------------------


@cache
def small(post_validation: str) -> TrainStep:
    return TrainStep(pipeline(SMALL), optimizer(), clip_norm=1e-3, post_validation=post_validation)  # clips every step


@cache
def small_states(count: int = 3) -> tuple[Any, ...]:
    """Return the state by layer after each step."""
    step, state, states = small("off"), small("off").init(params_for(SMALL)), []
    for batch in batches(count):
        state, _ = step(state, batch)
        states.append(jax.device_get(step.by_layer(state)))
    return tuple(states)


def test_whoever_looks_sees_what_is_committed() -> None:
    """A checkpoint, an evaluation, a metric and a recorded step each have the last update settled; then training goes on."""
    trainer = Trainer.over(small("on"))
    data, states = batches(3), small_states()
    before = trainer.train_step.post_validation.rollbacks
    state, metrics = trainer.step(trainer.init(params_for(SMALL)), data[0])
    assert state.late is not None and not state.acc
    assert bool(metrics.finite) and metrics.learning_rate is None
    same_bits(jax.device_get(trainer.train_step.by_layer(state)), states[0])
    loss = trainer.evaluate(state, data[2])["loss"]
    assert loss == Trainer.over(small("off")).evaluate(small("off").init(*states[0]), data[2])["loss"]
    second, metrics = trainer.step(state, data[1], record=True)
    assert metrics.timeline is not None
    assert len(metrics.outputs.tokens) == sum(map(len, trainer.schedule.rows))
    with pytest.raises(RunError, match="is used up"):
        trainer.step(state, data[1])
    other = trainer.with_schedule(generate("zb-h1", 2, trainer.schedule.num_microbatches))
    same_bits(jax.device_get(trainer.train_step.by_layer(second)), states[1])
    last, _ = other.step(second, data[2])
    got, expected = jax.device_get(other.train_step.by_layer(last)), states[2]
    assert jax.tree.structure(got) == jax.tree.structure(expected)  # another order adds gradients otherwise
    assert trainer.train_step.post_validation.rollbacks == before + 3


def test_forwards_run_before_it_is_asked_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = small("on"), small("on").init(params_for(SMALL))
    data = batches(2)
    monkeypatch.setattr(step.post_validation, "steps_to_compare", 0)
    state, first = step(state, data[0])
    late = state.late
    assert late is not None
    new_step = step.with_pipeline(step.pipeline.with_schedule(step.pipeline.schedule))
    requests, accumulators = [], LateUpdate.accumulators

    def watch(late: LateUpdate, rank: int) -> Any:
        requests.append((rank, [str(action) for _, action, _ in new_step.pipeline.executor.dispatched]))
        return accumulators(late, rank)

    monkeypatch.setattr(LateUpdate, "accumulators", watch)
    state, metrics = new_step(state, data[1])
    ((rank, dispatched),) = requests  # and was told that the step is dropped
    assert rank == 1 and {"F0.0", "F0.1", "F1.0"} <= {*dispatched} and all(x[0] == "F" for x in dispatched)
    assert bool(first.finite) and bool(metrics.applied)
    same_bits(jax.device_get(new_step.by_layer(state)), small_states()[1])
    old_params = weakref.ref(late.settled().compute[0, 0][0])
    del late
    gc.collect()
    assert old_params() is None and bool(first.applied)  # metrics that are kept keep no parameters


def test_forwards_do_not_wait_for_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank's gradients are late: the first one's forwards of the next step are through before the norm is known."""
    case = Case("gpt", 2, 1, 1, family="v-zb", dtype="float32", one_block=True)
    step = TrainStep(pipeline(case), optimizer(), post_validation="on")
    step = step.with_pipeline(step.pipeline.with_costs(CostProfile.uniform(4, f=1, b=1, w=1)))
    monkeypatch.setattr(step.post_validation, "steps_to_compare", 0)
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x))
    square = jax.device_put(jnp.ones((600, 600)), step.pipeline.submeshes[1].devices.flat[0])
    busy(square).block_until_ready()
    reduced, accumulators = TrainStep._reduced, LateUpdate.accumulators
    waits = []

    def late(step: TrainStep, stage: int, *arguments: Any) -> Any:
        if step.pipeline.primary(stage)[0] == 1:
            busy(square)
        return reduced(step, stage, *arguments)

    def watch(update: LateUpdate, rank: int) -> Any:
        if not waits:
            tokens = [token for r, action, token in step.pipeline.executor.dispatched if (r, action.stage) == (0, 0)]
            jax.block_until_ready(tokens)
            waits.append((len(tokens), update._unapplied.combined.applied.is_ready()))  # type: ignore[attr-defined]
        return accumulators(update, rank)

    state, data = step.init(params_for(case)), batches(4)
    for batch in data[:2]:  # which compile
        state, _ = step(state, batch)
    jax.block_until_ready(dict(state.compute))
    monkeypatch.setattr(TrainStep, "_reduced", late)
    state, _ = step(state, data[2])
    monkeypatch.setattr(LateUpdate, "accumulators", watch)
    step(state, data[3])
    assert waits == [(3, False)]


def test_auto_begins_after_clean_steps_and_ends_with_a_failure() -> None:
    policy = PostValidation("auto")
    ahead = [policy.goes_ahead(partial(bool, k != 3)) for k in range(CLEAN_STEPS + 8)]
    assert ahead.index(True) == 4 + CLEAN_STEPS and all(ahead[ahead.index(True) :])
    policy.failed()
    assert [policy.goes_ahead(partial(bool, True)) for _ in range(CLEAN_STEPS)] == [False] * CLEAN_STEPS
    assert policy.goes_ahead(partial(bool, True))
    assert policy.rollbacks == 1
    assert not PostValidation("off").rollbacks and PostValidation("on").goes_ahead(bool)


@pytest.mark.soak
def test_auto_changes_no_bit_and_fails_once_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are clean but for one that is not finite, before and after which the update goes ahead."""
    data = batches_with_nan(30)
    ends = []
    for mode in ("off", "auto"):
        step = TrainStep(pipeline(SMALL), optimizer(), clip_norm=1e3, post_validation=mode)
        state, ahead = step.init(params_for(SMALL)), []
        for batch in data:
            state, _ = step(state, batch)
            ahead.append(state.late is not None)
        ends.append(jax.device_get(step.by_layer(state)))
        assert step.post_validation.rollbacks == (mode == "auto")
    same_bits(*ends)
    assert ahead == [False] * 10 + [True] * 6 + [False] * 10 + [True] * 4


# -- memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [SMALL, QUICK, pytest.param(CASES[-1], marks=pytest.mark.soak)], ids=str)
def test_memory(case: Case) -> None:
    """Between two steps bfloat16 takes no byte more, float32 its parameters again; and that is what is predicted."""
    dtype, zero1 = case.dtype, case.zero1
    live, predicted = {}, {}
    for mode in ("off", "on"):
        step = TrainStep(pipeline(case), optimizer(), clip_norm=1.0, zero1=zero1, post_validation=mode)
        state, metrics = step(step.init(params_for(case)), batches(1)[0])
        jax.block_until_ready((metrics.loss, dict(state.compute)))
        arrays = jax.tree.leaves((dict(state.master), dict(state.compute), dict(state.acc), dict(state.optimizer)))
        if state.late is not None:
            unapplied = state.late._unapplied  # type: ignore[attr-defined]
            arrays += jax.tree.leaves(([x.grads for x in unapplied.reduced.values()], unapplied.params, unapplied.acc))
            arrays += jax.tree.leaves([x.acc for x in unapplied.reduced.values()])
        live_arrays = {id(a): a for a in arrays if not a.is_deleted()}
        live[mode] = sum(s.data.nbytes for a in live_arrays.values() for s in a.addressable_shards)
        predicted[mode] = step.memory_report(workspace=False)
    twice = sum(a.size * 4 for s in step.states.values() for a in s.twice)
    total = sum(a.size * a.dtype.itemsize for s in step.states.values() for a in (*s.params, *s.new_params))
    assert twice == (total if dtype == "float32" else 0)
    assert live["on"] - live["off"] <= twice if zero1 else live["on"] - live["off"] == twice
    for with_it, without_it in zip(predicted["on"].ranks, predicted["off"].ranks, strict=True):
        at = [s for s, ranks in step.pipeline.instances.items() if ranks[0] == with_it.rank]
        copy_bytes = sum(a.size * 4 for s in at for a in step.states[s].twice)
        assert 0 <= with_it.peak_bytes - without_it.peak_bytes <= copy_bytes
        assert with_it.peaks.get("masters", 0) - without_it.peaks.get("masters", 0) == copy_bytes


# -- refusals -------------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"post_validation.*'maybe'"):
        TrainStep(pipeline(SMALL), optimizer(), post_validation="maybe")
    with pytest.raises(ConfigError, match=r"pipeline\.post_validation"):
        load_config(None, ["pipeline.post_validation=maybe"])


# -- runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


KILLED = """
import os, signal, sys
from jaxpipe.cli import main
from jaxpipe.train.update import post_validation
accumulators = post_validation.LateUpdate.accumulators
def killed(late, rank):
    if late._unapplied.step == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return accumulators(late, rank)
post_validation.LateUpdate.accumulators = killed
post_validation.COMPARED_STEPS = 0
main(sys.argv[1:])
"""


def assert_same_run(out_dir: Path, other: Path) -> None:
    assert_same_arrays(final(out_dir)[:-2], final(other)[:-2])
    assert deterministic(out_dir) == deterministic(other)


@pytest.mark.parametrize("steps", [6, pytest.param(STEPS, marks=pytest.mark.soak)])
def test_a_run_is_the_same_and_tells_how_often_it_began_again(text: Path, tmp_path: Path, steps: int) -> None:
    """Every step is clipped: a norm that none exceeds would leave it to the compiler whether others are."""
    clip = ("optimizer.clip_norm=1e-2", f"run.steps={steps}", "run.log_every=3")
    result, printed = run(config(text, tmp_path / "on", *clip, "pipeline.post_validation=on"))
    assert result.rollbacks == steps
    assert f"  {steps} rollbacks" in printed
    if steps == STEPS:
        plain, _ = run(config(text, tmp_path / "off", *clip))
        assert plain.rollbacks == 0
        assert_same_run(tmp_path / "on", tmp_path / "off")


@pytest.mark.soak
def test_killed_among_the_forwards_of_the_next_step(text: Path, tmp_path: Path) -> None:
    run(config(text, tmp_path / "off", "optimizer.clip_norm=1.3"))
    on = settings(text, tmp_path / "on", "optimizer.clip_norm=1.3", "pipeline.post_validation=on")
    child = subprocess.run([sys.executable, "-c", KILLED, "train", *on], capture_output=True, text=True, env=os.environ)
    assert child.returncode == -signal.SIGKILL, child.stderr
    last_step = CheckpointStore(tmp_path / "on" / "checkpoints").latest_intact().step
    result, printed = run(load_config(None, on))
    assert (
        last_step in (5, 10) and f"resumed from step {last_step}" in printed and result.steps_run == STEPS - last_step
    )
    assert_same_run(tmp_path / "on", tmp_path / "off")


@pytest.mark.soak
def test_towers(tmp_path: Path) -> None:
    file = tmp_path / "towers.toml"
    file.write_text(TOWERS, encoding="utf-8")
    rollbacks = {}
    for mode in ("off", "on"):
        where = [f"run.out_dir={tmp_path / mode}", f"pipeline.post_validation={mode}"]
        rollbacks[mode] = run(load_config(file, [*where, f"run.steps={STEPS}", "optimizer.clip_norm=0.5"]))[0].rollbacks
    assert_same_run(tmp_path / "on", tmp_path / "off")
    norms = [r["grad_norm"] for r in deterministic(tmp_path / "on") if "grad_norm" in r]
    assert rollbacks == {"off": 0, "on": sum(norm > 0.5 for norm in norms)}
