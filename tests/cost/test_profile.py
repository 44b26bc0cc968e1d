"""Costs of stages: timings with their spread, every byte, the host link fitted; JSON that the schedule verbs read."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe import cost
from jaxpipe.axes import RankMesh
from jaxpipe.cli import main
from jaxpipe.cost import (
    HostLinkMeasurement,
    Timing,
    measure_host_link,
    measure_stages,
    time_collectives,
    time_function,
)
from jaxpipe.cost.profile import Fit, fit
from jaxpipe.cost.seconds import random_array, time_at_once
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import CostProfile, Link, circular, generate, read_costs, simulate
from jaxpipe.stage.functions import StageFunction, footprint, total_device_bytes
from models.llama import Llama
from tests.support.pipelines import compiled
from tests.support.schedule_strategies import random_schedule
from tests.support.train_runs import settings, write_text

# -- tensor parallelism -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_collectives_are_timed_apart_and_taken_out_of_f_and_b() -> None:
    """Their own time as T_AR: what the simulator counts for an action alone is what was measured of it."""
    model = Llama(vocab_size=16, d_model=16, num_layers=2, num_heads=2, seq_len=8, mlp_size=24, dtype="float64")
    pipe = Pipeline.build(
        model, generate("zb-h1", 2, 2), microbatch_size=2, boundaries=[(0, 2), (2, len(model.layers))],
        compute_dtype=jnp.float64, tp=RankMesh(tp=2),
    )  # fmt: skip
    measured = measure_stages(pipe.stages, repeats=3, memory=False)
    assert measured.collectives.keys() == {0, 1}
    costs = measured.costs()
    assert costs.f_comm_s == tuple(measured.collectives[s].median_s for s in range(2))
    assert costs.collectives == (3, 4)  # embedding, two of the block; two of the block, two of the cross entropy
    for s in range(2):
        both = costs.f_s[s] + costs.f_comm_s[s]
        assert both == pytest.approx(max(measured.timings["F", s].median_s, costs.f_comm_s[s]))
    analytic = cost.analytic_profile(pipe.stages)
    assert all(x > 0 for x in (*analytic.f_comm_s, *analytic.b_comm_s))
    assert time_collectives(pipe.stages[0].functions["W"], 1) is None
    assert not measure_stages(_pipe().stages, repeats=1, memory=False).collectives


# -- timings ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
def test_timing_is_median_and_quartiles(samples: list[float]) -> None:
    t = Timing.of(samples)
    assert t.median_s == pytest.approx(statistics.median(samples))
    assert min(samples) - 1e-9 <= t.low_s <= t.median_s + 1e-9
    assert t.median_s - 1e-9 <= t.high_s <= max(samples) + 1e-9
    assert (t.low_s, t.high_s) == pytest.approx((np.quantile(samples, 0.25), np.quantile(samples, 0.75)))
    assert t.count == len(samples)
    assert t.spread >= -1e-9


def test_timing_in_words() -> None:
    assert str(Timing(0.0012, 0.0011, 0.0014, 5)) == "1.200 ms ±12%"
    assert Timing.of([0.0, 0.0]).spread == 0


@cache
def _pipe() -> Pipeline:
    with jax.enable_x64(True):
        return compiled("gpt", circular(2, 1))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", ["F", "W"])
def test_calls_are_counted(op: str) -> None:
    """One call compiles, then the warm-up, then samples of so many calls; the accumulator goes round."""
    function = _pipe().stages[0].functions[op]
    calls: list[Any] = []

    def counting(*arrays: Any) -> Any:
        calls.append(arrays)
        return function.call(*arrays)

    t = time_function(replace(function, call=counting), 3, 2, calls=4)
    assert len(calls) == 1 + 2 + 3 * 4
    assert t.count == 3
    assert t.median_s > 0
    calls.clear()
    time_function(replace(function, call=counting), 3, 0)
    assert len(calls) == 1 + 3  # a CPU gets one call a sample


class Result:
    """A result that notes when it is waited for."""

    def __init__(self, waits: list[int], number: int) -> None:
        self.waits, self.number = waits, number

    def block_until_ready(self) -> Result:
        self.waits.append(self.number)
        return self


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("times", "in_flight"), [(0, 2), (5, 5), (1000, 30)])
def test_few_calls_are_in_flight_where_results_are_large(
    monkeypatch: pytest.MonkeyPatch, times: int, in_flight: int
) -> None:
    """At least two, so that one is dispatched under the other."""
    function = _pipe().stages[0].functions["F"]
    waits: list[int] = []
    numbers = itertools.count()
    monkeypatch.setattr("jaxpipe.cost.seconds._MOST_BYTES", times * total_device_bytes(function.avals_out))

    def call(*_: Any) -> Any:
        number = next(numbers)
        return tuple(Result(waits, number) for _ in function.outputs)

    time_function(replace(function, call=call), 1, 0, calls=40)
    # The call that compiles is number 0; the sample waits for the oldest call in flight, then for the last one.
    assert waits[len(function.outputs) :][: 41 - in_flight] == list(range(1, 42 - in_flight))


@pytest.mark.usefixtures("x64")
def test_everything_is_timed_on_random_values() -> None:
    """Constant inputs draw less power: a GPU is faster on them, and not equally for all functions."""
    constant, calls = list[str](), collections.Counter[str]()

    def watched(op: str, function: StageFunction) -> StageFunction:
        def call(*arrays: Any) -> Any:
            calls[op] += 1
            for port, array in zip(function.inputs, map(np.asarray, arrays), strict=True):
                if array.dtype.kind == "f" and array.size > 1 and len(np.unique(array)) < min(array.size, 1000) / 2:
                    constant.append(f"{op} {port}")
            return function.call(*arrays)

        return replace(function, call=call)

    stages = [
        replace(stage, functions={op: watched(op, f) for op, f in stage.functions.items()}) for stage in _pipe().stages
    ]
    measure_stages(stages, repeats=2, memory=False, vocab_size=17)
    assert calls.keys() == {"F", "B", "W", "BW"} and not constant


@given(st.lists(st.integers(1, 40), max_size=3), st.sampled_from(["float32", "bfloat16", "int32", "uint8", "bool"]))
def test_random_arrays_differ_and_stay_in_range(shape: list[int], dtype: str) -> None:
    aval = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    array = random_array(aval, 0.5, 300)
    assert (array.shape, array.dtype) == (aval.shape, aval.dtype)
    values = np.asarray(array).astype(np.float64)
    if dtype in ("float32", "bfloat16"):
        assert np.all(abs(values) <= 0.5) and (values.size < 2 or np.ptp(values) > 0)
    else:
        assert np.all((values >= 0) & (values < 300))


@pytest.mark.usefixtures("x64")
def test_emulated_ranks_are_timed_while_the_others_are_busy() -> None:
    """A thread a rank; nobody rests before all have their samples, and one that fails is not waited for."""
    ranks = [[stage.functions[op] for op in ("F", "W")] for stage in _pipe().stages]
    threads: dict[int, set[int]] = {0: set(), 1: set()}

    def watched(function: StageFunction, rank: int) -> StageFunction:
        def call(*arrays: Any) -> Any:
            threads[rank].add(get_ident())
            return function.call(*arrays)

        return replace(function, call=call)

    timings = time_at_once([[watched(f, r) for f in functions] for r, functions in enumerate(ranks)], 3, 1)
    assert [[t.count for t in rank_timings] for rank_timings in timings] == [[3, 3], [3, 3]]
    assert all(t.median_s > 0 for rank_timings in timings for t in rank_timings)
    main = get_ident()
    assert all(len(thread_ids - {main}) == 1 for thread_ids in threads.values())
    assert threads[0] & threads[1] == {main}, "where they are compiled"

    def fail(*_: Any) -> Any:
        if get_ident() != main:
            raise RuntimeError("no memory")
        return ranks[0][0].call(*_)

    with pytest.raises(RuntimeError, match="no memory"):
        time_at_once([[replace(ranks[0][0], call=fail)], ranks[1]], 3)


def test_cores_of_ranks_that_wait_are_used_by_those_that_are_busy() -> None:
    """Together the ranks take what all work takes on cores that are never idle, and no less than each alone."""
    schedule, costs = generate("1f1b", 4, 8), CostProfile.uniform(4)
    unshared = simulate(schedule, costs)
    assert cost.at_ranks_share(costs, schedule) == costs
    for crowding in (2.0, 4.0):
        shared = cost.at_ranks_share(replace(costs, crowding=crowding), schedule)
        assert simulate(schedule, shared).makespan == pytest.approx(unshared.makespan * (1 - unshared.bubble_rate))
        assert shared.residual_bytes == costs.residual_bytes
    barely = cost.at_ranks_share(replace(costs, crowding=1.1), schedule)
    assert simulate(schedule, barely).makespan == pytest.approx(unshared.makespan / 1.1)


@pytest.mark.usefixtures("x64")
def test_every_function_has_time_and_memory() -> None:
    stages = _pipe().stages
    measured = measure_stages(stages, repeats=2)
    keys = {(op, s) for s in range(2) for op in ("F", "B", "W", "BW")}
    assert measured.timings.keys() == measured.footprints.keys() == keys
    costs = measured.costs(Link(1e-6, 1e9))
    for op, row in (("F", costs.f_s), ("B", costs.b_s), ("W", costs.w_s), ("BW", costs.bw_s)):
        assert row == tuple(measured.timings[(op, s)].median_s for s in range(2))
        for s in range(2):
            memory = footprint(stages[s].functions[op])
            assert measured.footprints[(op, s)] == memory
            assert dict(costs.temp_bytes)[op][s] >= memory.temp_bytes
    assert costs.offloadable_bytes == tuple(float(s.offloadable_bytes) for s in stages)
    assert costs.residual_bytes == tuple(float(s.residual_bytes) for s in stages)
    assert costs.link == Link(1e-6, 1e9)
    assert costs.source == "measured, median of 2"


@pytest.mark.usefixtures("x64")
def test_without_memory_nothing_is_asked_of_the_compiler() -> None:
    measured = measure_stages(_pipe().stages, repeats=1, memory=False)
    assert measured.footprints == {}
    temps = dict(measured.costs().temp_bytes)
    with_footprint = replace(measured, footprints={("F", 0): footprint(_pipe().stages[0].functions["F"])})
    assert temps["BW"][1] < dict(with_footprint.costs().temp_bytes)["BW"][1]


@pytest.mark.usefixtures("x64")
def test_a_pipeline_measures_the_host_link_if_it_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_devices: list[Any] = []
    link = _link(d2h=2e6, h2d=1e6, latency_s=0.5)
    monkeypatch.setattr(
        "jaxpipe.runtime.pipeline.measure_host_link", lambda devices, **_: measured_devices.append(devices) or link
    )
    pipe = compiled("gpt", circular(2, 2))
    assert pipe.with_schedule(generate("interleaved-1f1b", 2, 2)).measure_costs(repeats=1).offload_s == (0.0,) * 4
    assert not measured_devices
    row = random_schedule(circular(2, 2), 2, random.Random(1), offload=1.0)
    costs = pipe.with_schedule(row).measure_costs(repeats=1)
    assert len(measured_devices) == 1
    assert costs.offload_s == tuple(0.5 + n / 2e6 for n in costs.offloadable_bytes)
    assert costs.load_s == tuple(0.5 + n / 1e6 for n in costs.offloadable_bytes)


@pytest.mark.usefixtures("x64")
def test_equal_layers_are_timed_once() -> None:
    model = _pipe().model
    seconds = cost.measured_layer_costs(model, 2, repeats=1)
    assert len(seconds) == len(model.layers)
    assert min(seconds) > 0
    codes = [layer.code for layer in model.layers]
    assert len(set(seconds)) == len(set(codes))


def test_jaxpipe_cost_is_the_way_in() -> None:
    for name in (
        "analytic_profile",
        "measure_stages",
        "measured_layer_costs",
        "with_measured_times",
    ):
        assert callable(getattr(cost, name))


# -- the host link ----------------------------------------------------------------------------------------------------


@given(
    latency_s=st.floats(0, 1e-2),
    rate=st.floats(1e6, 1e12),
    sizes=st.lists(st.integers(2**12, 2**30), min_size=2, max_size=6, unique=True),
)
def test_fit_finds_a_line(latency_s: float, rate: float, sizes: list[int]) -> None:
    points = [(n, latency_s + n / rate) for n in sizes]
    line = fit(points)
    for n, seconds in points:
        assert line.latency_s + n / line.bytes_per_s == pytest.approx(seconds, rel=1e-3, abs=1e-8)
    assert line.points == tuple(points)


@pytest.mark.parametrize(
    "points", [[(100, 1.0)], [(100, 1.0), (200, 0.5)], [(100, 0.1), (200, 0.4)], [(100, 1.0), (200, 1.0)]]
)
def test_fit_of_what_is_no_line_stays_physical(points: list[tuple[int, float]]) -> None:
    line = fit(points)
    assert line.latency_s >= 0
    assert 0 < line.bytes_per_s < float("inf")


def _link(
    *,
    d2h: float = 1e9,
    h2d: float = 2e9,
    latency_s: float = 1e-5,
    both_slowdown: float = 1.0,
    pairs: tuple[tuple[tuple[int, int], float], ...] = (),
    platform: str = "gpu",
) -> HostLinkMeasurement:
    return HostLinkMeasurement(
        Fit(latency_s, d2h, ()), Fit(latency_s / 2, h2d, ()), 1e9, both_slowdown, pairs, platform
    )


def test_what_shares_a_lane() -> None:
    """Two copies at once that take as long as one are independent; those that take twice as long take turns (by hand)."""
    single = _link().host_link()
    assert (single.d2h_bytes_per_s, single.h2d_bytes_per_s, single.latency_s) == (1e9, 2e9, 1e-5)
    assert (single.mode, single.groups) == ("duplex", ())
    assert _link(both_slowdown=1.9).host_link().mode == "shared"
    assert _link(both_slowdown=1.1).host_link().mode == "duplex"
    pairs = (((0, 1), 1.95), ((2, 3), 1.05))
    assert _link(pairs=pairs).host_link().groups == ((0, 1),)
    assert _link(pairs=pairs, both_slowdown=2.0, platform="cpu").host_link().groups == ()
    assert _link(pairs=pairs, both_slowdown=2.0, platform="cpu").host_link().mode == "duplex"


def test_host_link_of_two_devices() -> None:
    link = measure_host_link(jax.devices()[:2], sizes=(1 << 12, 1 << 16), repeats=2, warm_up=1)
    assert link is not None
    assert link.platform == "cpu"
    assert [n for n, _ in link.d2h.points] == [1 << 12, 1 << 16]
    assert all(seconds > 0 for _, seconds in (*link.d2h.points, *link.h2d.points))
    assert link.both_bytes_per_s > 0
    assert [pair for pair, _ in link.pairs] == [(0, 1)]
    assert "GB/s" in str(link) and "devices 0 and 1" in str(link)
    single = measure_host_link([jax.devices()[0]] * 4, sizes=(1 << 12, 1 << 16), repeats=1)
    assert single is not None
    assert single.pairs == ()  # one device is no pair


def test_a_backend_without_pinned_memory_has_no_host_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpipe.cost.profile.PINNED_HOST", "nowhere")
    assert measure_host_link(jax.devices()[:1]) is None


# -- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_verb_writes_costs_and_details(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    costs_file, details_file = tmp_path / "costs.json", tmp_path / "details.json"
    code, out, err = cli(
        "profile",
        *settings(text, tmp_path / "run"),
        "--repeats",
        2,
        "--warm-up",
        0,
        "-o",
        costs_file,
        "--details",
        details_file,
    )
    assert (code, err) == (0, "")
    for words in ("W ms", "workspace", "spread", "host link: out "):
        assert words in out
    assert "FLOPs added" in out and "cheap+attention+mlp" in out, "what each recompute policy would save"
    costs = read_costs(costs_file)
    details = json.loads(details_file.read_text(encoding="utf-8"))
    assert details["costs"]["f_s"] == list(costs.f_s)
    assert len(details["functions"]) == 4 * costs.num_stages
    assert all(f["timing"]["count"] == 2 and f["memory"]["output_bytes"] > 0 for f in details["functions"])
    host = details["host_link"]
    assert costs.host.d2h_bytes_per_s == pytest.approx(host["d2h"]["bytes_per_s"])
    assert all(x > 0 for x in (*costs.offload_s, *costs.load_s))
    code, out, _ = cli("schedule", "po-h", "--ranks", 1, "--microbatches", 4, "--costs", costs_file, "--json")
    assert code == 0
    assert json.loads(out)["makespan"] > 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--warm-up -1", "0 to"),
        ("--details details.txt", ".json"),
        ("--details none/details.json", "--details 'none/details.json': there is no directory"),
    ],
)
def test_mistakes(
    flags: str,
    expected: str,
    cli: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("profile", *flags.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
