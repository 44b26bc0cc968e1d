"""Models whose layers form a graph, through what a user calls: configs, the command line and ``Trainer``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe import Trainer
from jaxpipe.cli import main
from jaxpipe.schedule import (
    FAMILIES,
    CostProfile,
    Traversal,
    check_schedule,
    circular,
    generate,
    ir,
    one_to_one,
    plugins,
    simulate,
    traverse,
)
from jaxpipe.schedule import towers as towers_of
from jaxpipe.stage import instructions
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.reference import init_params
from jaxpipe.train.assemble import with_edges
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.run import run_directory
from tests.support.graph_models import dense, ladder, model_of, rows, source, squares, towers
from tests.support.metrics import metrics_of
from tests.support.pipelines import assert_same_arrays
from tests.support.train_runs import deterministic, final, run

pytestmark = pytest.mark.usefixtures("one_build")

TOWERS = """
[model]
target = "tests.support.graph_models:towers"
[data]
path = "tests.support.graph_models:data"
seq_len = 8
[pipeline]
ranks = 3
microbatches = 4
schedule = "towers"
[pipeline.towers]
a = { ranks = 2, rules = "backward in-flight=2,1" }
b = { ranks = 1, chunks = 2, rules = "interleaved forward=breadth:2 backward=depth:2" }
[optimizer]
warmup_steps = 1
min_lr_ratio = 1
[run]
steps = 4
batch = 8
eval_every = 2
eval_batches = 2
checkpoint_every = 2
log_every = 2
"""
LADDER = ("pipeline.schedule=1f1b", "pipeline.ranks=4", "model.target=tests.support.graph_models:ladder")
CODE = ("--model", "tests.support.graph_models:towers", "--data", "tests.support.graph_models:data")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "towers.toml"
    path.write_text(TOWERS, encoding="utf-8")
    return path


def config(file: Path, out: str, *overrides: str) -> TrainConfig:
    return load_config(file, [f"run.out_dir={file.parent / out}", *overrides])


def cli(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def assert_same_end(one: Path, other: Path, step: int) -> None:
    (*arrays, data, loss), (*expected, expected_data, expected_loss) = final(one, step), final(other, step)
    assert_same_arrays(arrays, expected)
    assert (data, loss) == (expected_data, expected_loss)


# -- through a config ------------------------------------------------------------------------------------------------------


def test_towers_trained_resumed_evaluated_rehearsed_and_planned(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps on five ranks in a row, then two more with each tower on its own: what four steps of either give."""
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "PICTURES", ("timeline.svg",))
        straight, output = run(config(file, "whole"))
    assert "5 stages for schedule towers" in output and (straight.out_dir / "pictures" / "timeline.svg").exists()
    row = ("pipeline.schedule=1f1b", "pipeline.cut=[2,4,5,7]", "pipeline.ranks=5")
    run(config(file, "parts", "run.steps=2", *row))
    run(config(file, "parts"))
    assert_same_end(file.parent / "parts", straight.out_dir, 4)
    code, out, err = cli(capsys, "eval", straight.out_dir, *CODE)
    assert code == 0 and f"{straight.eval_loss:.4f}" in out, err
    code, out, err = cli(capsys, "rehearse", file, "--all-ranks", "--steps", 1, "--no-host-link")
    assert code == 0 and out.count("predicted ÷ measured 1.000") == 3, err
    code, out, err = cli(capsys, "plan", file)
    assert code == 0 and "towers on 3 ranks" in out, err


def test_a_loss_over_two_microbatches_trained_evaluated_rehearsed_and_planned(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers are those over one microbatch if rows do not count for each other."""
    towers = ("pipeline.towers.a.rules=backward", "run.steps=2")
    one = run(config(file, "one", *towers, "model.options.drops=false"))[0]
    two = run(config(file, "two", *towers, "model.target=tests.support.graph_models:grouped"))[0]
    np.testing.assert_allclose((two.loss, two.eval_loss), (one.loss, one.eval_loss), rtol=1e-6)
    overrides = (*towers[:1], "model.target=tests.support.graph_models:grouped")
    code, out, err = cli(capsys, "rehearse", file, *overrides, "--all-ranks", "--steps", 1, "--no-host-link")
    assert code == 0 and out.count("predicted ÷ measured 1.000") == 3, err
    code, out, err = cli(capsys, "plan", file, *overrides)
    assert code == 0 and "towers on 3 ranks" in out, err


def test_towers_that_exchange_trained_rehearsed_and_planned(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The ops of ``stage/GUIDE.md`` in a schedule file, by ``--import``: each rank alone gets values of the other's op."""
    monkeypatch.setattr(ir, "_REGISTRY", ir._REGISTRY.copy())
    monkeypatch.setattr(instructions, "_BUILDS", instructions._BUILDS.copy())
    monkeypatch.setattr(plugins, "_imported", {})
    page = (Path(instructions.__file__).parent / "GUIDE.md").read_text(encoding="utf-8")
    example = page.split("```python\n")[2].split("```")[0].replace("{3: 5, 5: 3}", "{1: 3, 3: 1}")
    (file.parent / "outside_exchange.py").write_text(example)
    monkeypatch.syspath_prepend(file.parent)
    exchanging = __import__("outside_exchange").exchanging
    request.addfinalizer(partial(sys.modules.pop, "outside_exchange"))
    placement = towers_of({"a": one_to_one(2), "b": circular(1, 2)}, join=("b",))
    schedule = exchanging(traverse(placement, 4, Traversal("backward", in_flight_per_stage=4)))
    (file.parent / "exchange.sched").write_text(str(schedule))
    arguments = ("--import", "outside_exchange", f"pipeline.schedule={file.parent / 'exchange.sched'}")
    code, _, err = cli(
        capsys, "train", "--config", file, *arguments, "run.steps=2", f"run.out_dir={file.parent / 'run'}"
    )
    assert code == 0, err
    code, out, err = cli(capsys, "rehearse", file, *arguments, "--all-ranks", "--steps", 1, "--no-host-link")
    assert code == 0 and out.count("predicted ÷ measured 1.000") == 3 and out.count("Meet") == 2, err
    code, out, err = cli(capsys, "plan", file, *arguments)
    assert code == 0 and "on 3 ranks" in out and "but Meet, an op of your own, takes no time" in out, err


def test_a_graph_with_frozen_layers_a_tie_and_two_losses(file: Path) -> None:
    """Over dp 2 with ZeRO-1, resumed in another order; both losses are reported."""
    overrides = (*LADDER, "pipeline.dp=2", "pipeline.zero1=true")
    run(config(file, "whole", *overrides))
    run(config(file, "parts", *overrides, "run.steps=2"))
    run(config(file, "parts", *overrides, "pipeline.schedule=zb-h1"))
    assert_same_end(file.parent / "whole", file.parent / "parts", 4)
    assert any("aux" in name for record in deterministic(file.parent / "whole") for name in record)
    params = final(file.parent / "whole", 4)[0]
    fresh = init_params(ladder(), 0)
    np.testing.assert_array_equal(params["a1"]["w"], fresh["a1"]["w"])
    assert (params["a3"]["w"] != fresh["a3"]["w"]).any()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.towers.a.ranks=3"], "pipeline.towers have 4 ranks, and pipeline.ranks is 3: make them equal"),
        (["pipeline.chunks=2"], "towers have chunks of their own, as in pipeline.towers.NAME.chunks=2"),
        (["pipeline.towers.a=3"], "pipeline.towers: a: a tower is 3; want a table"),
        (["pipeline.towers.a.ranks=x"], 'a.ranks is "x", expected an integer'),
        (["pipeline.towers.a.rules=x"], "a: traversal: the type that goes first is 'x'"),
        (["pipeline.towers.a.color=x"], "unknown key a.color: there are ranks, rules, chunks, placement"),
        (["pipeline.towers.join=c"], "join names 'c'; want some of a, b"),
        (["pipeline.towers.join=[1]"], "join is [1]; want the tower on whose last rank the loss runs, one of a, b"),
        (
            ["pipeline.towers.b.chunks=4096", "pipeline.towers.b.ranks=2"],
            "2 ranks × 4096 chunks are 8192 stages; use at most 4096",
        ),
        (["pipeline.cut=[2,3,4,5]"], "and the cut, by what its layers take, 0->1 1->2 2->4 3->4: start stages where"),
        (["pipeline.towers.b.chunks=4096", "pipeline.microbatches=128", "run.batch=128"], "is more than 500000"),
        (["pipeline.towers={}"], "there is no tower: add one line for each"),
        (["pipeline.schedule=1f1b", "pipeline.towers.a.ranks=2"], "pipeline.schedule is '1f1b': set that to 'towers'"),
        (["pipeline.towers.a.placement=bidirectional"], "'a' has 2 flows; a tower has one"),
        (["pipeline.towers.b.chunks=8"], "11 stages of 8 layers; every stage needs a layer, so use 1 to 8"),
        (["pipeline.cut=[2,4,5]"], "pipeline.cut makes 4 stages, and towers has 5"),
        (["pipeline.towers.b.rules=backward in-flight=1"], "in-flight=1 leaves it no room: raise it to at least 3"),
        (
            ["model.target=tests.support.graph_models:ladder"],
            "families of schedules, such as 1f1b, take layers of any graph",
        ),
        (
            ["model.target=tests.support.graph_models:grouped", "pipeline.schedule=1f1b"],
            "the loss takes 2 microbatches at once, and the stages of '1f1b' one",
        ),
        (
            ["model.target=tests.support.graph_models:grouped", "pipeline.microbatches=1"],
            "stage 4 runs once per 2 microbatches, and 1 is no multiple",
        ),
        (["pipeline.schedule=chimera"], "has 2 flows, which chains of stages can have"),
        (
            ["pipeline.towers.a.rules=backward", 'pipeline.towers.join=["a", "b"]'],
            "stage 4 is spread over ranks 1, 2; the runtime runs one rank a stage",
        ),
    ],
)
def test_bad_towers_are_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    code, _, err = cli(capsys, "train", "--config", file, f"run.out_dir={file.parent / 'run'}", *overrides)
    assert code == 2 and message in err and err.count("\n") == 1 and err.startswith("jaxpipe: ")


def test_a_config_with_towers_reads_back_and_forgets_them_with_their_schedule(file: Path) -> None:
    loaded = load_config(file)
    copy = file.with_name("again.toml")
    copy.write_text(loaded.to_toml(), encoding="utf-8")
    assert load_config(copy) == loaded and loaded.pipeline.towers["a"]["ranks"] == 2
    assert load_config(file, ["pipeline.schedule=1f1b"]).pipeline.towers == {}


# -- bad models ------------------------------------------------------------------------------------------------------------

BAD = {
    "unknown": (lambda: (source("a", "a", 3), dense("b", takes=("x",))), "layer b takes 'x'; layers before it are a"),
    "later": (lambda: (source("a", "a", 3), dense("b", takes=("loss",))), "layer b takes 'loss', which comes after it"),
    "cycle": (lambda: (source("a", "a", 3), dense("b", takes=("b",))), "layer b takes its own result"),
    "shapes": (
        lambda: (source("a", "a", 3), source("b", "b", 5), wide("c"), dense("d", takes=("b", "c"))),
        "layer 'd' can't be traced: TypeError: add got incompatible shapes",
    ),
    "nothing": (
        lambda: (source("a", "a", 3), source("b", "b", 5)),
        "the loss layer 'b' (no layer takes it) returns an array",
    ),
}


def wide(name: str) -> Any:
    layer = dense(name, False)
    return replace(layer, apply=lambda p, x, c: jnp.concatenate([x, x], -1))


def bad(vocab_size: int = 0, seq_len: int = 0, kind: str = "") -> Model:
    takes = ("a",) if kind == "nothing" else None
    return model_of(*BAD[kind][0](), squares("loss", "u", takes=takes))


@pytest.mark.parametrize("kind", BAD)
def test_bad_graphs_are_one_line(file: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    model = ("model.target=tests.train.test_graph_runs:bad", f"model.options.kind={kind}", "pipeline.schedule=1f1b")
    code, _, err = cli(
        capsys, "train", "--config", file, f"run.out_dir={file.parent / 'run'}", *model, "pipeline.ranks=2"
    )
    assert code == 2 and BAD[kind][1] in err and err.count("\n") == 1, err


# -- through a Trainer -----------------------------------------------------------------------------------------------------


def whole_gradient(model: Model) -> Any:
    """Return ``(loss, gradients)`` of parameters and a whole batch, one program."""

    def loss(p: Any, batch: Any) -> Any:
        metrics = metrics_of(model, p, batch)
        heads = [metrics[model.layers[k].name] for k in model.losses]
        return sum(total / weight for total, weight in heads)

    return jax.jit(jax.value_and_grad(loss))


def unsplit_step(model: Model, gradient: Any, params: Any, batch: Any, rate: float) -> tuple[Any, Any]:
    """Take one step of plain gradient descent on the sum of a whole batch's losses."""

    value, grads = gradient(params, batch)
    frozen = {layer.name for layer in model.layers if layer.frozen}
    return value, {
        name: jax.tree.map(lambda a, g, n=name: a if n in frozen else a - rate * g, p, grads[name])
        for name, p in params.items()
    }


@pytest.mark.parametrize("make", [pytest.param(towers, marks=pytest.mark.soak), ladder])
def test_a_trainer_steps_as_the_unsplit_model(make: Any, x64: None) -> None:
    """Two losses, dp 2, ZeRO-1: three steps; then the same stages in other orders."""
    model = make(drops=False)
    trainer = Trainer(
        model,
        optimizer=optax.sgd(0.3),
        microbatch_size=2,
        ranks=2,
        microbatches=2,
        chunks=2,
        schedule="interleaved-1f1b",
        dtype="float64",
        dp=2,
        zero1=True,
    )
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model, 0))
    state, gradient = trainer.init(params), whole_gradient(model)
    for k in range(3):
        batch = rows(4, k)
        state, metrics = trainer.step(state, batch)
        expected, params = unsplit_step(model, gradient, params, batch, 0.3)
        np.testing.assert_allclose(float(metrics.loss), expected, rtol=1e-10)
        trainer = trainer.with_schedule(("looped-bfs", "looped-dfs", "interleaved-1f1b")[k])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), dict(trainer.params(state)), params)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_of_any_family_is_one_for_any_graph(name: str) -> None:
    """The orders agree for the same stages with edges left out and skip edges added."""
    schedule = generate(name, 4, 8)
    if schedule.placement.num_flows > 1:
        return
    n = schedule.num_stages
    chain = [(s, s + 1) for s in range(n - 1)]
    for edges in (chain[1:], [*chain, (0, n - 1)], [(s, n - 1) for s in range(n - 1)], []):
        other = with_edges(schedule, tuple(sorted({*edges})))
        check_schedule(other)
        assert (
            simulate(other, costs := CostProfile.uniform(n, chunks=n // 4)).makespan
            <= simulate(schedule, costs).makespan
        )
