"""Memory reports, rehearsals, profiles and flags where a rank has several devices."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpipe.axes import RankMesh
from jaxpipe.cli.flags import Parser, add_parallel_flags, with_parallel_flags
from jaxpipe.cost import with_measured_times
from jaxpipe.errors import ConfigError
from jaxpipe.rehearsal.rank import rehearse
from jaxpipe.runtime.memory_probe import measured_peaks
from jaxpipe.schedule import CostProfile, HostLink, simulate
from jaxpipe.schedule.engine import slot_lanes
from jaxpipe.train.devices import find_devices
from jaxpipe.train.setup import prepare
from jaxpipe.train.step import TrainStep
from tests.support.parallel_cases import Case, batches, optimizer, params_for, pipeline
from tests.support.train_runs import config, write_text

SHARDED = Case("gpt-tied", 2, 2, 2, sequence=True, dtype="bfloat16")


@pytest.mark.parametrize("zero1", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_the_memory_of_a_step_is_as_predicted(zero1: bool) -> None:
    pipe = pipeline(SHARDED)
    step = TrainStep(pipe, optimizer(), zero1=zero1)
    state = step.init(params_for(SHARDED))
    measured = measured_peaks(
        pipe, state.compute, batches(1)[0], acc=state.acc, resident=(state.master, state.optimizer)
    )
    assert step.memory_report(workspace=False).live_peak_bytes == measured.live_peak_bytes


def test_zero_divides_masters_and_optimizer_state() -> None:
    replicated, divided = (
        TrainStep(pipeline(SHARDED), optimizer(), zero1=zero1).memory_report(workspace=False) for zero1 in (False, True)
    )
    for a, b in zip(replicated.ranks, divided.ranks, strict=True):
        for kind in ("masters", "optimizer"):
            padding = 64 * 4 * 3  # an element of each leaf, and the step counts
            assert b.peaks[kind] <= a.peaks[kind] / 2 + padding  # type: ignore[index]


def test_a_rank_of_four_devices_is_rehearsed(tmp_path: Path) -> None:
    sizes = ["pipeline.tp=2", "pipeline.dp=2", "pipeline.zero1=true"]
    settings = config(write_text(tmp_path / "text.txt"), tmp_path / "run", *sizes)
    prepared = prepare(settings)
    rehearsal = rehearse(prepared, find_devices(4), [1], lambda text: None, steps=1)
    (report,) = rehearsal.reports
    assert report.device == "4 × cpu"
    assert report.memory.ratio == 1
    (measured,) = report.collectives.values()
    assert rehearsal.costs.f_comm_s[1] == measured.median_s
    assert rehearsal.costs.f_s[1] == max(0.0, report.timings["F", 1].median_s - measured.median_s)


def test_a_rank_is_rehearsed_in_the_order_that_the_link_asks_for(tmp_path: Path) -> None:
    """Each load stands right before its backward where copies seem to take no time, which a training would not run."""
    sizes = ["pipeline.schedule=po-h", "pipeline.chunks=2", "pipeline.microbatches=8", "model.options.num_layers=4"]
    prepared = prepare(config(write_text(tmp_path / "text.txt"), tmp_path / "run", *sizes, "run.batch=8"))
    lines: list[str] = []
    link = HostLink(latency_s=0.02)
    rehearsal = rehearse(prepared, find_devices(1), [0], lines.append, steps=1, host=link)
    costs = replace(rehearsal.costs, host=link, offload_s=(), load_s=())
    assert "timing a stage for the order of copies" in lines
    assert simulate(rehearsal.schedule, costs).makespan < simulate(prepared.schedule, costs).makespan


def test_costs_of_a_run_are_compute_beside_the_collectives() -> None:
    """An action that ran alone waited for its collectives; simulated alone it takes what was measured."""
    costs = replace(CostProfile.uniform(2, b=2.0), f_comm_s=(0.5, 0.25), b_comm_s=(0.5, 0.25))
    seconds = {("F", 0): 2.0, ("B", 1): 3.0, ("W", 0): 1.5, ("BW", 0): 4.0}
    measured = with_measured_times(costs, seconds)
    assert (measured.f_comm_s, measured.b_comm_s) == (costs.f_comm_s, costs.b_comm_s)
    assert (measured.f_s, measured.b_s) == ((1.5, 1.0), (2.0, 2.75))
    for (op, stage), expected in seconds.items():
        assert slot_lanes(measured, [(op, stage)]).seconds == pytest.approx(expected)


# -- flags ----------------------------------------------------------------------------------------------------------------


def _parsed(*argv: str) -> Any:
    parser = Parser(prog="x", description="")
    parser.add_argument("overrides", nargs="*")
    add_parallel_flags(parser)
    args: argparse.Namespace = parser.parse(argv)
    return with_parallel_flags(args, args.overrides)


def test_flags_are_short_for_settings() -> None:
    assert _parsed() == []
    assert _parsed("run.steps=3", "--pp", "2", "--tp", "4", "--dp", "1") == [
        "pipeline.ranks=2", "pipeline.tp=4", "pipeline.dp=1", "run.steps=3",
    ]  # fmt: skip
    assert _parsed("pipeline.tp=4", "--tp", "4") == ["pipeline.tp=4", "pipeline.tp=4"]
    with pytest.raises(ConfigError, match=r"--tp 4.*'pipeline.tp=2'"):
        _parsed("--tp", "4", "pipeline.tp=2")


@pytest.mark.parametrize(("need", "tp", "says"), [(16, 2, "4×2×1, 2×2×2, 1×2×4, 8×1×1"), (9, 3, "8×1×1, 4×1×2")])
def test_too_many_devices_name_factorings_that_fit(need: int, tp: int, says: str) -> None:
    assert len(jax.devices()) == 8
    with pytest.raises(ConfigError, match=rf"{need} devices are needed and JAX sees 8 .*: {says}") as caught:
        find_devices(need, mesh=RankMesh(tp=tp))
    assert "\n" not in str(caught.value)
