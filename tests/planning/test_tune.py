"""The tuner: its answer is that of the whole grid, every number can be recomputed, and what it writes is what plan predicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from jaxpipe.cli import main
from jaxpipe.errors import ConfigError
from jaxpipe.planning import tune as tuning
from jaxpipe.planning.predict import predict
from jaxpipe.planning.roofline import Efficiency
from jaxpipe.planning.space import Space
from jaxpipe.planning.stages import PROBE, StageCosts, Stopwatch, _ProbeView, planner, stage_costs_of
from jaxpipe.planning.targets import TARGETS
from jaxpipe.planning.tune import tune
from jaxpipe.train.config import TrainConfig, load_config
from tests.support.paths import ROOT

A800 = TARGETS["a800"]
_CHEAP = "pipeline.recompute=cheap"
FEW = ("pipeline.schedule=1f1b,interleaved-1f1b,gpipe,zb-h1,v-zb,chimera,po-h",)


def small() -> TrainConfig:
    options = {"vocab_size": 512, "d_model": 64, "num_layers": 6, "num_heads": 4, "tied": False}
    return TrainConfig.from_dict(
        {
            "model": {"target": "models.gpt:GPT", "options": options},
            "data": {"path": "none.npy", "tokenizer": "ids:512", "seq_len": 128},
            "run": {"batch": 32, "dtype": "bfloat16"},
        }
    )


@pytest.fixture(scope="module")
def stage_costs() -> StageCosts:
    """Traces are shared by all tests."""
    return stage_costs_of(small(), A800, Efficiency(), lambda text: None, probes=True)


@pytest.mark.parametrize("limit", [4.4e6, pytest.param(80e9, marks=pytest.mark.soak)])
def test_the_answer_is_that_of_the_whole_grid(limit: float, stage_costs: StageCosts) -> None:
    only = (*FEW, *(f"pipeline.{x}" for x in ("tp=1", "recompute=none,full", "microbatches=2,8", "vocabulary=ends")))
    space = Space.of(small(), 8, only)
    pruned, full = tune(space, stage_costs, limit), tune(space, stage_costs, limit, prune=False)
    assert pruned.best is not None and full.best is not None
    assert pruned.best.step_s == full.best.step_s
    assert pruned.best.fits and pruned.best.devices == 8
    simulated = [t for t in full.trials if t.step_s is not None]
    assert len([t for t in pruned.trials if t.step_s is not None]) < len(simulated)
    assert not any(t.status in ("slower", "not reached") for t in full.trials)
    for t in simulated[:: len(simulated) // 6]:  # what plan predicts, but for traces in two sizes
        if not t.offloaded:
            p = predict(space.config(t.settings), replace(stage_costs, probes=False), limit)
            assert (p.step_s, p.tokens_per_s) == pytest.approx((t.step_s, t.tokens_per_s), rel=1e-3)
            assert [m.peak_bytes for m in p.memory] == pytest.approx(t.peak_bytes, rel=1e-2)
            assert t.bound_s is not None and t.bound_s <= p.step_s * (1 + 1e-9)
    orders = {json.dumps({**layout, **order.settings}) for layout in space.layouts() for order in space.orders(layout)}
    extra = [t for t in full.trials if t.offloaded or "pipeline.separate_gradients" in t.settings]
    assert sum(t.candidates for t in full.trials) - len(extra) == len(orders)


def test_no_step_is_shorter_than_its_bound(stage_costs: StageCosts) -> None:
    """Bounds by work, by placement and with separated gradients hold on every axis that traces differ by."""
    only = (
        "ranks=2",
        "tp=1,2",
        "vocabulary=ends,spread",
        "recompute=none,full",
        "microbatches=4",
        "schedule=1f1b,v-zb",
    )
    space = Space.of(small(), 4, [f"pipeline.{x}" for x in only])
    pruned, full = tune(space, stage_costs, 80e9), tune(space, stage_costs, 80e9, prune=False)
    assert pruned.best is not None and full.best is not None and pruned.best.step_s == full.best.step_s
    reached = [t for t in full.trials if t.step_s is not None and t.bound_s is not None]
    assert len(reached) > 20 and any("pipeline.separate_gradients" in t.settings for t in reached)
    assert not [t for t in reached if (t.bound_s or 0.0) > (t.step_s or 0.0) * (1 + 1e-9)]


def test_a_second_process_finds_what_one_does(stage_costs: StageCosts, tmp_path: Path) -> None:
    """It takes the layouts of two shards; the process is a new one, since JAX has threads in this one."""
    only = [
        f"pipeline.{x}" for x in ("dp=1", "vocabulary=ends", "recompute=none", "microbatches=4", "schedule=1f1b,v-zb")
    ]
    (tmp_path / "small.toml").write_text(small().to_toml())
    flags = ["--devices", "4", "--target", "a800", "--json", "all.json", *(f"--only={x}" for x in only)]
    command = [sys.executable, "-m", "jaxpipe", "tune", "small.toml", *flags]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    document = json.loads((tmp_path / "all.json").read_text())
    single = tune(Space.of(small(), 4, only), stage_costs, document["limit_bytes"])
    assert single.best is not None and document["best"]["step_s"] == single.best.step_s
    assert sum(t["candidates"] for t in document["tried"]) == sum(t.candidates for t in single.trials)
    assert {t["settings"]["pipeline.tp"] for t in document["tried"]} == {1, 2, 4}


def test_no_order_needs_less_than_its_placement(stage_costs: StageCosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout has vocabulary-parallel layers, whose first backward waits for one more forward for each barrier."""
    least_by_placement, least_bytes, simulate = dict[Any, float](), tuning._least_bytes, tuning._LayoutSearch._simulate
    above = list[float]()

    def least(placement: Any, costs: Any, forwards: int) -> float:
        least_by_placement[id(costs), placement] = least_bytes(placement, costs, forwards)
        return least_by_placement[id(costs), placement]

    def simulated(self: Any, node: Any, *args: Any) -> Any:
        candidate = simulate(self, node, *args)
        above.append(max(candidate.peak_bytes) / least_by_placement[id(node.costs), node.placement])
        return candidate

    monkeypatch.setattr(tuning, "_least_bytes", least)
    monkeypatch.setattr(tuning._LayoutSearch, "_simulate", simulated)
    only = ("ranks=2", "tp=1", "vocabulary=spread,spread-2", "recompute=none", "microbatches=1,4")
    tune(Space.of(small(), 2, [f"pipeline.{x}" for x in only]), stage_costs, 80e9, prune=False)
    assert len(above) > 20 and 1 - 1e-9 < min(above) < 1.05


def test_what_is_left_out_is_tried_if_asked_for(stage_costs: StageCosts) -> None:
    """Recomputation that saves little, and under spread vocabulary layers all but a few families."""
    layout = ("ranks=2", "tp=1", "dp=1", "microbatches=4", "vocabulary=spread")
    only = [f"pipeline.{x}" for x in (*layout, "recompute=none,cheap", "schedule=1f1b")]
    few = Space.of(small(), 2, [x for x in only if "schedule" not in x])
    names = {order.settings["pipeline.schedule"] for layout in few.layouts() for order in few.orders(layout)}
    assert "v-zb" in names and not names & {"gpipe", "traverse"}
    for override, name in (("pipeline.schedule=gpipe", "gpipe"), ("traverse.placement=v", "traverse")):
        space = Space.of(small(), 2, [*only[:-1], override])
        assert {o.settings["pipeline.schedule"] for x in space.layouts() for o in space.orders(x)} == {name}
    both, cheap_only = (
        tune(Space.of(small(), 2, [*only[:-2], x, only[-1]]), stage_costs, 80e9) for x in (only[-2], _CHEAP)
    )
    assert both.best is not None and cheap_only.best is not None
    assert (both.best.config.pipeline.recompute, cheap_only.best.config.pipeline.recompute) == ("none", "cheap")


def test_what_is_written_is_what_plan_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(small().to_toml())
    only = [f"--only=pipeline.{x}" for x in ("schedule=1f1b", "vocabulary=ends,spread", "tp=1", "recompute=none")]
    flags = ["small.toml", "--target", "a800", "--memory-limit-gb", "0.006"]
    assert main(["tune", *flags, "--devices", "4", *only, "-o", "best.toml", "--json", "all.json"]) == 0
    output = capsys.readouterr().out
    document = json.loads(Path("all.json").read_text())
    best = document["best"]
    assert load_config("best.toml").to_dict()["run"] == small().to_dict()["run"]
    assert load_config("best.toml").pipeline.num_devices == 4
    assert main(["plan", "best.toml", *flags[1:], "--compile-seconds", "0", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits"] and planned["step_s"] == best["step_s"]
    assert f"{best['tokens_per_s']:,.0f} tokens/s" in output
    assert min(t["step_s"] for t in document["tried"] if t["status"] == "fits") == pytest.approx(
        best["step_s"], rel=1e-3
    )


def test_times_are_measured_once(tmp_path: Path) -> None:
    config = small().override(["model.options.num_layers=2", "data.seq_len=32", "run.batch=8"])
    only = ("ranks=2", "microbatches=4", "recompute=none", "vocabulary=ends", "schedule=1f1b,zb-h1")
    space = Space.of(config, 2, [f"pipeline.{x}" for x in only])
    results, watches = [], []
    for _ in range(2):
        watches.append(Stopwatch(jax.devices(), tmp_path / "times.json", repeats=1))
        how = stage_costs_of(space.base, TARGETS["cpu"], Efficiency(), lambda text: None, seconds_of=watches[-1])
        results.append(tune(space, how, 1e12))
    first, second = watches
    assert (first.measured, second.measured, second.reused) == (2, 0, 2)
    assert results[0].best is not None and results[1].best is not None
    assert results[0].best.step_s == results[1].best.step_s
    seconds = json.loads((tmp_path / "times.json").read_text())["seconds"].values()
    assert set(results[0].best.costs.f_s) == {row["F"] for row in seconds}


def test_time_ends_the_search_with_the_best_so_far(stage_costs: StageCosts) -> None:
    result = tune(Space.of(small(), 8, FEW), stage_costs, 80e9, time_limit_s=1e-9)
    assert (result.best, result.stopped) == (None, "out of time")


def test_ctrl_c_ends_the_search_with_the_best_so_far(stage_costs: StageCosts) -> None:
    notes: list[str] = []

    def interrupt(text: str) -> None:
        notes.append(text)
        if "best so far" in text:
            raise KeyboardInterrupt

    only = [f"pipeline.{x}" for x in ("schedule=1f1b,gpipe", "tp=1", "recompute=none", "vocabulary=ends")]
    result = tune(Space.of(small(), 8, only), stage_costs, 80e9, interrupt, progress_s=0.0)
    assert result.best is not None and result.stopped == "interrupted"
    assert any(t.status == "not reached" for t in result.trials)


@pytest.mark.parametrize(
    ("only", "says"),
    [
        ("pipeline.pp=2", "'pipeline.pp' is not an axis of the search"),
        ("pipeline.tp=3", "pipeline.tp=3 is not among the values to try: 1, 2, 4, 8"),
        ("pipeline.schedule=1f1b,zb-h", "pipeline.schedule=zb-h is not among the values to try: 1f1b, "),
        ("pipeline.tp", "write it as section.key=value"),
    ],
)
def test_wrong_axes_are_one_line(only: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Space.of(small(), 8, [only])


def test_nothing_that_fits_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--devices", "2", "--memory-limit-gb", "1e-6", "--only", "pipeline.schedule=1f1b"]) == 2
    assert "nothing tried fits in 1e-06 GB a device" in capsys.readouterr().err


def test_layers_that_do_other_work_with_few_sequences_are_searched_again() -> None:
    notes: list[str] = []
    stage_costs = stage_costs_of(small(), A800, Efficiency(), lambda text: None, probes=True)
    blocks = {layer.apply for layer in stage_costs.model.layers if layer.name.startswith("block")}
    (block,) = blocks

    def longer(params: Any, x: Any, context: Any) -> Any:
        for _ in range(5 if x.shape[0] > 4 else 1):
            x = block(params, x, context)
        return x

    layers = [replace(x, apply=longer) if x.apply in blocks else x for x in stage_costs.model.layers]
    stage_costs.model = replace(stage_costs.model, layers=tuple(layers))
    only = [
        f"pipeline.{x}" for x in ("ranks=2", "vocabulary=ends", "recompute=none", "microbatches=8,16", "schedule=1f1b")
    ]
    space = Space.of(small(), 2, only)
    result, exact = tune(space, stage_costs, 80e9, notes.append), tune(space, replace(stage_costs, probes=False), 80e9)
    assert [text for text in notes if "searching again" in text] and result.best is not None and exact.best is not None
    assert result.best.step_s == exact.best.step_s
    assert min(t.step_s for t in result.trials if t.step_s is not None) == pytest.approx(result.best.step_s)


@pytest.mark.parametrize(
    ("shards", "recompute"),
    [
        pytest.param(shards, recompute, marks=() if i == k else pytest.mark.soak)
        for i, shards in enumerate(("tp=1", "tp=2", "cp=2"))
        for k, recompute in enumerate(("none", "cheap", "full"))
    ],
)
def test_one_trace_tells_what_a_trace_of_each_size_does(shards: str, recompute: str) -> None:
    cut_in_two = ["model.options.num_layers=2", "pipeline.ranks=2"]
    config = small().override([*cut_in_two, f"pipeline.{shards}", f"pipeline.recompute={recompute}"])
    quick = stage_costs_of(config, A800, Efficiency(), lambda text: None, probes=True)
    cut = planner(config, quick.model)(2).cut
    for size in (2, 4):
        full = stage_costs_of(config, A800, Efficiency(), lambda text: None)
        for derived, real in zip(quick.stages(cut, recompute, size), full.stages(cut, recompute, size), strict=True):
            assert derived.functions.functions["F"].jaxpr is not real.functions.functions["F"].jaxpr
            assert derived.sizes == real.sizes
            assert derived.work.keys() == real.work.keys()
            for op, work in derived.work.items():
                derived_numbers = (work.flops, work.moved_bytes, work.seconds, work.kernels, work.workspace_bytes)
                other = real.work[op]
                traced_numbers = (other.flops, other.moved_bytes, other.seconds, other.kernels, other.workspace_bytes)
                assert derived_numbers == pytest.approx(traced_numbers, rel=1e-9)
    assert {kind[4] for kind in quick._traces_by_kind} == {PROBE}  # no size was traced by itself


def test_shapes_that_do_not_tell_of_sequences_are_traced() -> None:
    """An axis with one entry more than there are sequences is no multiple of them."""
    for shape in ((PROBE + 1, 7), (PROBE - 1,), (PROBE, 2 * PROBE), (PROBE**2,), (7, PROBE // 2)):
        probe_view = _ProbeView((), 2)
        probe_view.shape(shape)
        assert probe_view.ambiguous, shape
    probe_view = _ProbeView((100_000,), 2)
    assert probe_view.shape((5 * PROBE, 100_000, 12)) == (10, 100_000, 12) and not probe_view.ambiguous


def test_one_trace_tells_of_experts_whose_choices_can_be_numbered() -> None:
    """More than 43,690 sequences of 4096 positions have 2³¹ rows, of 8 choices each and half as many again."""
    config = load_config(ROOT / "scripts" / "plans" / "qwen3-30b-a3b.toml", ["model.options.num_layers=1"])
    quick, full = (
        stage_costs_of(config, A800, Efficiency(), lambda text: None, probes=probes) for probes in (True, False)
    )
    assert quick.probe == 43_669
    cut = planner(config, quick.model)(1).cut
    (derived,), (real,) = (costs.stages(cut, "none", 2) for costs in (quick, full))
    assert {kind[4] for kind in quick._traces_by_kind} == {quick.probe}
    assert derived.sizes == real.sizes
    assert derived.work["F"].expert_flops == real.work["F"].expert_flops > 0
    assert derived.work["W"].seconds == pytest.approx(real.work["W"].seconds, rel=1e-9)


def test_experts_are_tried_over_devices_that_share_rows() -> None:
    options = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 4, "expert_size": 64, "num_experts": 6}
    config = small().override(["model.target=models.moe:MoE", *(f"model.options.{k}={x}" for k, x in options.items())])
    kept = (
        "tp=1",
        "cp=1",
        "recompute=none",
        "vocabulary=ends",
        "microbatches=4",
        "schedule=1f1b,combined-1f1b",
    )
    space = Space.of(config, 4, [f"pipeline.{x}" for x in kept])
    # of 4 devices 1 or 2 divide 6 experts, and ep divides dp
    layouts = [(x["pipeline.ranks"], x["pipeline.dp"], x["pipeline.ep"]) for x in space.layouts()]
    assert layouts == [(1, 4, 1), (1, 4, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1)]
    # on one rank braids are tried where they have exchanges to hide
    assert [len(space.orders(layout)) for layout in space.layouts()] == [1, 2, 2, 2, 2]
    one_rank = Space.of(config, 2, [f"pipeline.{x}" for x in (*kept, "ranks=1")])
    costs = stage_costs_of(one_rank.base, A800, Efficiency(), lambda text: None, probes=True)
    pruned, full = (tune(one_rank, costs, 80e9, prune=prune) for prune in (True, False))
    assert pruned.best is not None and full.best is not None
    assert pruned.best.step_s == full.best.step_s
    simulated = [t for t in full.trials if t.step_s is not None]
    assert all(t.bound_s is not None and t.bound_s <= (t.step_s or 0) for t in simulated)
    whole, divided = (next(t for t in simulated if t.settings["pipeline.ep"] == ep) for ep in (1, 2))
    assert divided.peak_bytes[0] < whole.peak_bytes[0]


def test_forwards_first_are_tried_where_they_are_asked_for() -> None:
    only = [
        "pipeline.schedule=traverse",
        "traverse.first=forward",
        "pipeline.recompute=none",
        "pipeline.vocabulary=ends",
    ]
    forwards_first, usual = Space.of(small(), 2, only), Space.of(small(), 2, [only[0], *only[2:]])
    firsts = [
        {o.settings.get("traverse.first") for x in space.layouts() if x["pipeline.ranks"] > 1 for o in space.orders(x)}
        for space in (forwards_first, usual)
    ]
    assert firsts == [{"forward"}, {"backward", "interleaved"}]


@pytest.mark.parametrize(
    ("only", "key"),
    [
        (["traverse.first=sideways"], "traverse.first=sideways is not among the values to try: "),
        (["pipeline.schedule=1f1b", "traverse.first=forward"], "traverse.first=forward"),
        (["pipeline.microbatches=32", "pipeline.dp=2"], "no layout of 2 devices"),
    ],
)
def test_nothing_to_try_says_why(only: list[str], key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(small().to_toml())
    narrowed = [x for text in only for x in ("--only", text)]
    assert main(["tune", str(config), "--devices", "2", *narrowed]) == 2
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adafactor", "lion"])
def test_no_more_optimizer_state_is_taken_for_granted_than_there_is(name: str) -> None:
    """A layout is left out by it before any trace: a rule of AdamW's would discard what fits with less state."""
    optimizers = {
        "adamw": optax.adamw(1e-3), "sgd": optax.sgd(1e-3), "muon": optax.contrib.muon(1e-3),
        "adafactor": optax.adafactor(1e-3), "lion": optax.lion(1e-3),
    }  # fmt: skip
    stage_costs = replace(
        stage_costs_of(small(), A800, Efficiency(), lambda text: None, probes=True), optimizer=optimizers[name]
    )
    leaves = jax.tree.leaves(dict(stage_costs.avals))
    masters = [jax.ShapeDtypeStruct(a.shape, jax.numpy.float32) for a in leaves]
    state = jax.tree.leaves(jax.eval_shape(stage_costs.optimizer.init, masters))
    floats = [a for a in state if jax.numpy.issubdtype(a.dtype, jax.numpy.inexact)]
    count = sum(a.size for a in leaves)
    assert stage_costs.least_state_bytes * count <= sum(a.size * a.dtype.itemsize for a in floats) * (1 + 1e-12)
    assert stage_costs.least_state_bytes == {"adamw": 8, "sgd": 0, "lion": 4}.get(name, stage_costs.least_state_bytes)
