"""One rank alone on one device: its whole program runs, in order, in the memory that was predicted, and its costs come out."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import ConfigError, RunError
from jaxpipe.program.ir import Free, Offload, Recv, Reload, Run, Send, Sync
from jaxpipe.rehearsal.rank import Rehearsal, StandIns, maker
from jaxpipe.rehearsal.report import RankReport, copy_reports, rehearsed_costs, slowdown
from jaxpipe.runtime.executor import Executor
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.transfer import message_numbers
from jaxpipe.schedule import (
    Action,
    Event,
    HostLink,
    Link,
    Placement,
    Schedule,
    circular,
    generate,
    simulate,
    v_shape,
)
from jaxpipe.stage.model.layer import Layer, Model
from tests.support.pipelines import some_schedule
from tests.support.schedule_strategies import random_schedule

pytestmark = pytest.mark.usefixtures("one_build")

P, M = 4, 6
MICROBATCH, WIDTH = 8, 16
SCHEDULES: Mapping[str, Callable[[], Schedule]] = {
    name: partial(generate, name, P, M)
    for name in ("1f1b", "zb-1p", "interleaved-1f1b", "v-zb", "v-min", "chimera", "po-h", "po-f", "ada-offload")
} | {
    "any": lambda: random_schedule(circular(P, 2), M, random.Random(5), offload=0.4, braid=0.2),
    "any-v": lambda: random_schedule(v_shape(P), M, random.Random(6), offload=0.4, braid=0.2),
}
"""One-to-one, circular, V and bidirectional placements; fused, split and braided; with O, L and S."""


@cache
def _model(num_stages: int, dropout: bool = False) -> Model:
    """Return a model of a layer a stage, the first of integers, all in between of one kind (compiled once); float32."""

    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (WIDTH, WIDTH), jnp.float32)}

    def first(params: Any, x: Any, context: Any) -> Any:
        return params["w"][context.data["tokens"]]

    def middle(params: Any, x: Any, context: Any) -> Any:
        h = jnp.tanh(x @ params["w"])
        return h if context.key is None else h * jax.random.bernoulli(context.key, 0.5, h.shape)

    def loss(params: Any, x: Any, context: Any) -> Any:
        return jnp.sum((x @ params["w"] - context.data["y"]) ** 2), jnp.full((), MICROBATCH, x.dtype)

    layers = (
        Layer("first", init, first, reads=("tokens",)),
        *(Layer(f"middle{k}", init, middle, kind="middle", uses_key=dropout) for k in range(num_stages - 2)),
        Layer("loss", init, loss, reads=("y",)),
    )
    spec = {
        "tokens": jax.ShapeDtypeStruct((MICROBATCH,), jnp.int32),
        "y": jax.ShapeDtypeStruct((MICROBATCH, WIDTH), jnp.float32),
    }
    return Model("chain", layers, lambda n: spec, 1, WIDTH)


@cache
def on_one_device(placement: Placement, dropout: bool = False) -> Pipeline:
    """Return a tiny model whose stages all sit on the first device, in any order."""
    n = placement.num_stages
    return Pipeline.build(
        _model(n, dropout),
        some_schedule(placement),
        microbatch_size=MICROBATCH,
        boundaries=[(s, s + 1) for s in range(n)],
        devices=[jax.devices()[0]] * placement.num_ranks,
        compute_dtype=jnp.float32,
    )


def pipeline(schedule: Schedule) -> Pipeline:
    return on_one_device(schedule.placement).with_schedule(schedule)


def rehearsed(schedule: Schedule, rank: int, **options: Any) -> RankReport:
    return Rehearsal(pipeline(schedule), rank, **options).run(steps=1, complete=False)


class Log(Executor):
    """An executor that remembers every instruction it ran."""

    ran: list[tuple[int, int]]

    def run(self, inputs: Any, *, record: bool = False, probe: Any = None) -> Any:
        self.ran = []

        def both(n: int, results: Sequence[Any]) -> None:
            self.ran.append(self.sequence[n])
            assert all(bool(jnp.isfinite(a).all()) for a in results if jnp.issubdtype(a.dtype, jnp.inexact))
            if probe is not None:
                probe(n, results)

        return super().run(inputs, record=record, probe=both)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=[pytest.mark.soak] if n in ("zb-1p", "interleaved-1f1b", "v-min", "po-h", "any-v") else []
        )
        for n in SCHEDULES
    ],
)
def test_every_rank_runs_its_whole_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = SCHEDULES[name]()
    logs: list[Log] = []

    def logging(*args: Any, **kwargs: Any) -> Log:
        logs.append(Log(*args, **kwargs))
        return logs[-1]

    monkeypatch.setattr("jaxpipe.runtime.pipeline.Executor", logging)
    for rank in range(P):
        report = rehearsed(schedule, rank)
        program = pipeline(schedule).programs[rank]
        visited = [(rank, k) for k, i in enumerate(program.instructions) if not isinstance(i, Free)]
        assert logs[-1].ran == visited
        assert report.num_instructions == len(visited)
        ran = [i.action for i in program.instructions if isinstance(i, Run | Offload | Reload | Sync)]
        assert [e.action for e in report.events] == ran
        assert [a for slot in ran for a in slot.actions] == list(schedule.actions(rank))
        assert report.memory.source == "live buffers"
        assert report.memory.exact
        assert report.memory.measured_bytes <= report.memory.predicted_bytes <= 1.05 * report.memory.measured_bytes
        actions = [a for a in ran if isinstance(a, Action)]
        assert report.timings.keys() == {(a.op, a.stage) for a in actions}
        assert all(1 <= t.count <= M for t in report.timings.values())
        copy_ops = {a.op for a in actions} & {"O", "L"}
        assert {c.lane for c in report.copies} == {{"O": "d2h", "L": "h2d"}[op] for op in copy_ops}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(60))
def test_every_rank_of_random_schedules_keeps_to_its_memory(seed: int) -> None:
    rng = random.Random(seed)
    placement = rng.choice([circular(P, 1), circular(P, 2), v_shape(P)])
    schedule = random_schedule(placement, rng.randint(1, M), rng, offload=rng.random(), braid=0.3 * rng.random())
    for rank in range(P):
        report = rehearsed(schedule, rank)
        assert [a for e in report.events for a in e.action.actions] == list(schedule.actions(rank))
        assert report.memory.measured_bytes <= report.memory.predicted_bytes <= 1.05 * report.memory.measured_bytes


def test_schedules_cover_all_ops() -> None:
    ops = {a.op for make in SCHEDULES.values() for r in range(P) for a in make().actions(r)}
    assert ops >= {"F", "B", "W", "BW", "O", "L", "S"}


def test_a_rank_compiles_its_own_stages_only() -> None:
    schedule = generate("zb-h1", 3, 2)
    called: list[int] = []

    def counted(stage: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            called.append(stage)
            return call(*arrays)

        return run

    pipe = pipeline(schedule)
    functions = {
        at: replace(f, functions={op: replace(g, call=counted(at[1], g.call)) for op, g in f.functions.items()})
        for at, f in pipe.functions.items()
    }
    Rehearsal(replace(pipe, functions=functions), 1).run(steps=1, complete=False)
    assert set(called) == {1}


def test_what_stays_on_the_rank_is_counted_and_held() -> None:
    schedule = generate("1f1b", 2, 2)
    bare = rehearsed(schedule, 0)
    home = pipeline(schedule).functions[(0, 0)].param_avals[0].sharding
    state = jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=home)
    full = rehearsed(schedule, 0, resident={"optimizer": [state, state]})
    assert full.memory.measured_bytes == bare.memory.measured_bytes + 8000
    assert full.memory.predicted_bytes == bare.memory.predicted_bytes + 8000
    assert full.memory.predicted.by_kind["optimizer"] == 8000


def test_ranks_get_keys_where_layers_draw_random_numbers() -> None:
    schedule = generate("1f1b", 3, 2)
    pipe = on_one_device(schedule.placement, dropout=True).with_schedule(schedule)
    report = Rehearsal(pipe, 1).run(steps=1, complete=False)
    assert report.memory.measured_bytes == report.memory.predicted_bytes


def test_nothing_stays_behind() -> None:
    schedule = generate("po-f", P, M)
    rehearsed(schedule, 1)
    before = len(jax.live_arrays())
    report = rehearsed(schedule, 1)
    assert len(jax.live_arrays()) == before, report


# -- stand-ins --------------------------------------------------------------------------------------------------------


def test_stand_ins_have_the_shapes_that_neighbours_send() -> None:
    schedule = generate("chimera", P, 4)
    pipe = pipeline(schedule)
    for program in pipe.programs:
        stand_ins = StandIns(program, pipe.programs)
        numbers = message_numbers(pipe.programs)
        for instruction in program.instructions:
            if isinstance(instruction, Recv):
                got = stand_ins.recv(numbers[(instruction.src, program.rank, instruction.action)])
                sender = pipe.stages[instruction.action.stage].functions[instruction.action.op]
                sender_avals = [
                    a for p, a in zip(sender.outputs, sender.avals_out, strict=True) if p.kind in ("y", "dx")
                ]
                assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in sender_avals]
                assert len(got) == len(instruction.outputs)
            elif isinstance(instruction, Send):
                stand_ins.send(numbers[(program.rank, instruction.dst, instruction.action)], instruction.dst, [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool"])
def test_made_values_are_valid(dtype: str) -> None:
    home = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    aval = jax.ShapeDtypeStruct((7, 3, 5), jnp.dtype(dtype), sharding=home)
    (a,) = maker((aval,), 0.5, 200)()
    (repeat,) = maker((aval,), 0.5, 200)()
    values = np.asarray(a.astype(jnp.float32))
    assert (a.shape, a.dtype) == (aval.shape, aval.dtype)
    assert np.array_equal(values, np.asarray(repeat.astype(jnp.float32)))
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        assert np.abs(values).max() <= 0.5
        assert abs(values.mean()) < 0.1
        assert 0.2 < values.std() < 0.4  # 0.5/√3 for a uniform one
    else:
        assert values.min() >= 0
        assert values.max() <= {"bool": 1, "int8": 127}.get(dtype, 199)
        assert len(np.unique(values)) > 1


def test_made_keys_are_keys() -> None:
    home = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    aval = jax.ShapeDtypeStruct((2,), jax.random.key(0).dtype, sharding=home)
    (keys,) = maker((aval,), 1.0)()
    assert jax.random.uniform(keys[1], (), jnp.float32).shape == ()


# -- costs ------------------------------------------------------------------------------------------------------------


def _with_seconds(report: RankReport, seconds: Mapping[str, float]) -> RankReport:
    """Return ``report`` as if every function had taken these seconds."""
    timings = {(op, s): replace(t, median_s=seconds[op]) for (op, s), t in report.timings.items()}
    return replace(report, timings=timings)


def test_costs_of_all_ranks_are_what_was_measured() -> None:
    schedule = generate("po-h", P, M)
    pipe = pipeline(schedule)
    seconds = {"F": 1.0, "B": 2.0, "W": 3.0, "O": 0.25, "L": 0.5, "S": 0.0}
    reports = [_with_seconds(rehearsed(schedule, r), seconds) for r in range(P)]
    timings = {("BW", s): replace(reports[0].step, median_s=4.0) for s in range(pipe.schedule.num_stages)}
    costs = rehearsed_costs(
        pipe,
        [replace(r, standalone=timings) for r in reports],
        link=Link(0.125),
        host=HostLink(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6, latency_s=1.0),
    )
    n = schedule.num_stages
    assert (costs.f_s, costs.b_s, costs.w_s, costs.bw_s) == ((1.0,) * n, (2.0,) * n, (3.0,) * n, (4.0,) * n)
    offload_stages = {a.stage for r in range(P) for a in schedule.actions(r) if a.op == "O"}
    assert offload_stages
    for s in range(n):
        by_link = 1.0 + costs.offloadable_bytes[s] / 1e6
        assert costs.offload_s[s] == (0.25 if s in offload_stages else by_link)
        assert costs.load_s[s] == (0.5 if s in offload_stages else by_link)
    assert dict(costs.temp_bytes).keys() == {"F", "B", "W", "BW"}
    assert costs.link == Link(0.125)
    assert costs.source == "rehearsed ranks 0, 1, 2, 3 of 4"
    work = M * 6.0 * n / P  # every rank has as many stages
    assert simulate(schedule, costs).makespan >= work


def test_other_stages_take_what_their_flops_take_at_the_measured_rate() -> None:
    schedule = generate("zb-h1", 3, 2)
    pipe = pipeline(schedule)
    report = _with_seconds(rehearsed(schedule, 1), {"F": 1.0, "B": 2.0, "W": 3.0})
    costs = rehearsed_costs(pipe, [report])
    flops = [s.flops for s in pipe.stages]
    for s in range(3):
        assert costs.f_s[s] == pytest.approx(max(1e-6, flops[s]["F"] / flops[1]["F"]))  # a look-up has no FLOPs
        assert costs.w_s[s] == pytest.approx(max(1e-6, 3 * flops[s]["W"] / flops[1]["W"]))
    assert "other stages from FLOPs" in costs.source


def test_every_function_is_timed_alone_too() -> None:
    schedule = generate("1f1b", 2, 2)
    report = Rehearsal(pipeline(schedule), 1).run(steps=1)
    assert report.timings.keys() == {("F", 1), ("BW", 1)}
    assert report.standalone.keys() == {(op, 1) for op in ("F", "B", "W", "BW")}
    assert all(t.median_s > 0 for t in report.standalone.values())


# -- overlap, by hand -------------------------------------------------------------------------------------------------


def _event(lane: str, action: str, start: float, end: float) -> Event:
    return Event(0, lane, Action(action[0], 0, int(action[1:])), start, end)  # type: ignore[arg-type]


def test_overlap_and_slowdown() -> None:
    schedule = generate("po-f", P, M)
    program = pipeline(schedule).programs[0]
    events = [
        _event("compute", "F0", 0, 1),
        _event("compute", "F1", 1, 2.2),
        _event("compute", "S1", 2.2, 2.5),  # waiting is no compute
        _event("compute", "F2", 2.5, 3.5),
        _event("d2h", "O0", 1, 2),
        _event("d2h", "O1", 2, 2.4),
        _event("h2d", "L0", 3.0, 4.0),
    ]
    out, back = copy_reports(program, [events, events])
    assert (out.count, back.count) == (2, 1)
    assert out.hidden == pytest.approx(1.2 / 1.4)
    assert back.hidden == pytest.approx(0.5)
    assert out.bytes == sum(
        sum(w) for i, w in zip(program.instructions, program.written_bytes, strict=True) if isinstance(i, Offload)
    )
    assert slowdown([events]) == pytest.approx(1.2)  # F1 against F0; F2 is half and half
    assert slowdown([[e for e in events if e.lane == "compute"]]) is None


# -- failures ---------------------------------------------------------------------------------------------------------


def _failing(pipe: Pipeline, rank: int, op: str, message: str, after: int = 0) -> Pipeline:
    """Return ``pipe`` where the ``after``-th call of an op on ``rank`` says that memory ran out."""
    calls = [0]

    def broken(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise jax.errors.JaxRuntimeError(message)
            return call(*arrays)

        return run

    functions = {
        at: replace(f, functions={**f.functions, op: replace(f.functions[op], call=broken(f.functions[op].call))})
        if at[0] == rank
        else f
        for at, f in pipe.functions.items()
    }
    return replace(pipe, functions=functions)


OOM = {
    "Out of memory while trying to allocate 1073741824 bytes.": "1.07 GB",
    "Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0": "2.15 GB",
    "Out of memory allocating 3221225472 bytes.": "3.22 GB",
    "Out of memory while trying to allocate 1.50MiB.": "1.57 MB",
}


@pytest.mark.parametrize("message", OOM)
def test_out_of_memory_names_the_instruction_and_what_it_wanted(message: str) -> None:
    schedule = generate("zb-h1", 3, 4)
    pipe = _failing(pipeline(schedule), 1, "W", f"RESOURCE_EXHAUSTED: {message}", after=1)
    with pytest.raises(RunError) as caught:
        Rehearsal(pipe, 1).run(steps=1, complete=False)
    text = str(caught.value)
    program = pipe.programs[1]
    at = [k for k, i in enumerate(program.instructions) if isinstance(i, Run) and i.action.op == "W"][1]
    assert text.startswith(
        f"rank 1: out of memory at instruction {at} of {len(program.instructions)}, W1.1 (stage 1, microbatch 1)"
    )
    assert f"wanted {OOM[message]} " in text
    assert "held" in text
    assert "\n" not in text


def test_a_function_too_large_to_run_alone_is_left_to_the_program() -> None:
    pipe = _failing(pipeline(generate("zb-h1", 3, 4)), 1, "BW", "RESOURCE_EXHAUSTED: no more")
    lines: list[str] = []
    report = Rehearsal(pipe, 1).run(steps=1, progress=lines.append)
    assert report.standalone.keys() == {("F", 1), ("B", 1), ("W", 1)}
    assert "rank 1: no memory for BW of stage 1 alone: not timed" in lines
    costs = rehearsed_costs(pipe, [report])
    assert costs.bw_s[1] > 0
    pipe = _failing(pipeline(generate("1f1b", 3, 4)), 1, "BW", "RESOURCE_EXHAUSTED: no more")
    with pytest.raises(RunError, match=r"BW1\.0 \(stage 1.*0\)"):
        Rehearsal(pipe, 1).run(steps=1)


def test_out_of_memory_that_says_no_size() -> None:
    pipe = _failing(pipeline(generate("zb-h1", 3, 4)), 0, "F", "RESOURCE_EXHAUSTED: no more")
    with pytest.raises(RunError, match=r"instruction 0 of .*F0\.0 .*wanted [0-9.]+ K?B \(its results take"):
        Rehearsal(pipe, 0).run(steps=1, complete=False)


def test_out_of_memory_in_a_later_step() -> None:
    """After the probed step: the action is known, the instruction is found."""
    pipe = _failing(pipeline(generate("zb-h1", 3, 4)), 1, "B", "RESOURCE_EXHAUSTED: no more", after=6)
    with pytest.raises(RunError, match=r"rank 1: out of memory at instruction \d+ of \d+, B1\.2 "):
        Rehearsal(pipe, 1).run(steps=2, complete=False)


def test_other_failures_stay_what_they_are() -> None:
    pipe = _failing(pipeline(generate("zb-h1", 3, 4)), 1, "B", "INTERNAL: a cable fell out")
    with pytest.raises(RunError, match=r"rank 1, action B1\.0 .*cable"):
        Rehearsal(pipe, 1).run(steps=1, complete=False)


def test_a_memory_limit_is_a_smaller_device() -> None:
    """Just enough runs; a byte less fails at the instruction that has the peak; too little for the parameters says so."""
    schedule = generate("1f1b", 3, 4)
    predicted = rehearsed(schedule, 0).memory.predicted
    assert rehearsed(schedule, 0, memory_limit_bytes=predicted.peak_bytes).memory.predicted == predicted
    with pytest.raises(
        RunError, match=rf"out of memory at instruction \d+ of \d+, {predicted.at} .* held of "
    ) as caught:
        rehearsed(schedule, 0, memory_limit_bytes=predicted.peak_bytes - 1)
    assert re.search(r"its workspace [0-9.]+ K?B", str(caught.value))
    with pytest.raises(RunError, match="before the first instruction"):
        rehearsed(schedule, 0, memory_limit_bytes=1000)


def test_no_such_rank_and_several_devices() -> None:
    schedule = generate("1f1b", 2, 2)
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"no rank {rank}.*0 to 1"):
            Rehearsal(pipeline(schedule), rank)
    spread = Pipeline.build(_model(2), schedule, microbatch_size=MICROBATCH, boundaries=[(0, 1), (1, 2)])
    with pytest.raises(ConfigError, match="devices of one rank"):
        Rehearsal(spread, 0)
