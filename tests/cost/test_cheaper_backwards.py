"""B and then W in place of BW where that was measured to take less time: which stages, and that a run keeps its bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.cli import main
from jaxpipe.cost import Timing, profile, seconds
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import (
    CostProfile,
    check_schedule,
    generate,
    read_costs,
    read_schedule,
    simulate,
    write_schedule,
)
from jaxpipe.schedule.passes.braid import costly_backwards, fused_stages, split_backwards, with_fused_stages
from jaxpipe.stage.functions import StageFunction
from jaxpipe.train.assemble import ScheduleDraft, final_order
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.config import load_config
from jaxpipe.train.schedule_source import relative_costs, source_of
from jaxpipe.train.settings.sections import PassesConfig, PipelineConfig
from jaxpipe.train.trainer import Trainer
from models.gpt import GPT
from tests.support.train_runs import config, copy_run, final, run, settings, write_text

pytestmark = pytest.mark.usefixtures("one_build")

AUTO = "pipeline.split_backwards=auto"
SHORT = ("run.steps=6", "run.eval_every=0", "optimizer.min_lr_ratio=1")  # the rate must not depend on the last step


def _costs(*bw_ms: float) -> CostProfile:
    """Return stages of 10 ms for B and 10 ms for W."""
    n = len(bw_ms)
    return replace(CostProfile.uniform(n, f=0.01, b=0.01, w=0.01), bw_s=tuple(x / 1e3 for x in bw_ms))


def test_only_what_is_clearly_cheaper_is_split() -> None:
    schedule = generate("1f1b", 4, 8)
    assert fused_stages(schedule) == (0, 1, 2, 3)
    assert costly_backwards(schedule, _costs(20, 21.9, 22.1, 30)) == (2, 3)
    tiny = replace(_costs(20, 20, 20, 20), b_s=(1e-4,) * 4, w_s=(1e-4,) * 4, bw_s=(1.1e-3, 1.3e-3, 5e-3, 2e-4))
    assert costly_backwards(schedule, tiny) == (1, 2)
    assert costly_backwards(generate("zb-h1", 4, 8), _costs(99, 99, 99, 99)) == ()


@pytest.mark.parametrize("family", ["1f1b", "gpipe", "interleaved-1f1b", "chimera"])
def test_splitting_some_stages_keeps_the_rest(family: str) -> None:
    schedule = generate(family, 2, 4)
    stages = fused_stages(schedule)
    assert with_fused_stages(schedule, stages) == schedule
    assert with_fused_stages(schedule, ()) == split_backwards(schedule)
    partly_split = with_fused_stages(schedule, stages[:1])
    check_schedule(partly_split)
    assert fused_stages(partly_split) == stages[:1]


def test_one_f_one_b_gets_no_longer() -> None:
    schedule, costs = generate("1f1b", 4, 8), _costs(25, 25, 25, 25)
    split = with_fused_stages(schedule, set(fused_stages(schedule)).difference(costly_backwards(schedule, costs)))
    assert simulate(split, costs).makespan < simulate(schedule, costs).makespan


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what a BW is measured to take, by stage, in ms; B and W take 10 ms each."""
    real = Pipeline.measure_costs

    def tell(*bw_ms: float) -> None:
        def measure(pipe: Pipeline, **options: Any) -> CostProfile:
            costs = _costs(*bw_ms)
            return replace(real(pipe, **options), f_s=costs.f_s, b_s=costs.b_s, w_s=costs.w_s, bw_s=costs.bw_s)

        monkeypatch.setattr(Pipeline, "measure_costs", measure)

    return tell


@pytest.fixture
def timed_ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A clock by which F, B and W take 10 ms and BW 22.5 ms, and half of that where a floating input is constant. Gives the ops
    that were timed; ``copy`` stands for copies and collectives."""
    ops: list[str] = []

    def share(arrays: Any) -> float:
        values = [np.asarray(a).ravel()[:1000] for a in arrays if jnp.issubdtype(a.dtype, jnp.inexact) and a.size > 1]
        return 0.5 if any(len(np.unique(v)) <= v.size / 2 for v in values) else 1.0

    def call_timer(function: StageFunction, inputs: list[jax.Array]) -> Callable[[int], float]:
        ops.append(function.op)
        sample_s = share(inputs) * (0.0225 if function.op == "BW" else 0.01)
        return lambda count: sample_s

    def timed(call: Callable[[], Any], *_: Any) -> Timing:
        ops.append("copy")
        return Timing.of([share(jax.tree.leaves(call())) * 0.01])

    monkeypatch.setattr(seconds, "call_timer", call_timer)
    monkeypatch.setattr(seconds, "timed", timed)
    monkeypatch.setattr(profile, "timed", timed)
    return ops


def test_nothing_is_timed_on_constants(text: Path, tmp_path: Path, timed_ops: list[str]) -> None:
    """They draw less power: BW or B and W, the cut, and the place of copies would be chosen by what they take."""
    _, printed = run(config(text, tmp_path / "run", AUTO, "pipeline.cut=measured", *SHORT, "run.steps=1"))
    assert _fused(tmp_path / "run") == () and printed.count("11.1% less time") == 1, printed
    overrides = settings(text, tmp_path / "none")
    assert main(["profile", *overrides, "--repeats", "1", "-o", str(tmp_path / "costs.json")]) == 0
    (tmp_path / "run.toml").write_text(load_config(None, overrides).to_toml(), encoding="utf-8")
    assert main(["rehearse", str(tmp_path / "run.toml"), "--rank", "0", "--steps", "1"]) == 0
    offloading = Trainer(
        GPT(vocab_size=17, d_model=16, num_layers=4, num_heads=2, seq_len=8, mlp_ratio=2),
        optimizer=optax.sgd(1e-2),
        microbatch_size=2,
        schedule="po-h",
        ranks=2,
        microbatches=4,
    ).measured(1)
    for costs in (read_costs(tmp_path / "costs.json"), offloading.pipeline.costs):
        assert {*costs.f_s, *costs.b_s, *costs.w_s} == {0.01}
    assert {*timed_ops} == {"F", "B", "W", "BW", "copy"}


def _fused(folder: Path) -> tuple[int, ...]:
    return fused_stages(read_schedule(folder / "schedule.sched"))


def test_a_resumed_run_keeps_what_was_chosen(text: Path, tmp_path: Path, measured: Callable[..., None]) -> None:
    measured(30, 20)
    straight = config(text, tmp_path / "straight", AUTO, *SHORT)
    _, printed = run(straight)
    assert "stage 0: B and then W in place of BW: 33.3% less time" in printed
    assert _fused(tmp_path / "straight") == (1,)

    run(config(text, tmp_path / "first", AUTO, *SHORT, "run.steps=3", "run.checkpoint_every=3"))
    measured(20, 30)  # another time of the day
    _, printed = run(config(text, copy_run(tmp_path / "first", tmp_path / "then"), AUTO, *SHORT))
    assert "stage 0: B and then W in place of BW: as in the run so far" in printed
    assert _fused(tmp_path / "then") == (1,)
    jax.tree.map(np.testing.assert_array_equal, final(tmp_path / "then", 6)[0], final(tmp_path / "straight", 6)[0])

    other = config(text, copy_run(tmp_path / "first", tmp_path / "other"), AUTO, *SHORT, "pipeline.cut=[1]")
    run(other)
    assert _fused(tmp_path / "other") == (0,), "of other stages nothing is known yet"


def test_a_checkpoint_from_before_keeps_bw(text: Path, tmp_path: Path, measured: Callable[..., None]) -> None:
    measured(30, 30)
    run(config(text, tmp_path / "run", *SHORT, "run.steps=5"))
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load(5).meta["backwards"]["fused"] == [0, 1]
    run(config(text, tmp_path / "run", AUTO, *SHORT))
    assert _fused(tmp_path / "run") == (0, 1)


def test_always() -> None:
    schedule, costs = generate("1f1b", 2, 4), _costs(20, 20)
    for setting, expected in (("always", ()), ("auto", (0, 1)), ("never", (0, 1))):
        passes = PassesConfig(split_backwards=setting)  # type: ignore[arg-type]
        pipe = PipelineConfig(ranks=2, microbatches=4, passes=passes)
        assert (
            fused_stages(
                final_order(pipe, ScheduleDraft(schedule, source_of(pipe), relative_costs((1.0, 1.0))), costs, print)
            )
            == expected
        )


def test_the_memory_limit_comes_first(text: Path, tmp_path: Path, measured: Callable[..., None]) -> None:
    measured(30, 30)
    write_schedule(generate("1f1b", 2, 4), tmp_path / "mine.sched")
    limit = (f"pipeline.schedule={tmp_path / 'mine.sched'}", "pipeline.memory_limit=2", "pipeline.recompute=cheap")
    run(config(text, tmp_path / "run", AUTO, *limit, *SHORT, "run.steps=2"))
    assert _fused(tmp_path / "run") == (0, 1), "W would keep more than F saved"
