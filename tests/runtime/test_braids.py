"""Braided slots as one function: bit-equal to separate calls, one instruction, one event, and bytes as predicted.

The random schedules run on a chain of one matrix product a layer, since every braid that a schedule holds is compiled; a GPT
and the layers of test_sharded_stages.py (on dp × tp submeshes) run chosen ones.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpipe.axes import RankMesh
from jaxpipe.cost.profile import with_measured_times
from jaxpipe.errors import RunError, ScheduleError
from jaxpipe.program.ir import Free, Program, Recv, Reduce, Run, Send
from jaxpipe.program.lower import braided_slots, lower
from jaxpipe.rehearsal.rank import Rehearsal
from jaxpipe.runtime.assembly import reduction
from jaxpipe.runtime.executor import StepOutputs, place_of
from jaxpipe.runtime.memory_probe import measured_peaks
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.recorder import seconds_by_op
from jaxpipe.runtime.transfer import message_homes, message_numbers
from jaxpipe.schedule import (
    Schedule,
    bidirectional,
    circular,
    generate,
    one_to_one,
    op_spec,
    parse_schedule,
    v_shape,
)
from jaxpipe.schedule.passes import with_reductions
from jaxpipe.stage.compiled.braid import braid
from jaxpipe.stage.functions import Port
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.reference import init_params
from tests.stage.test_sharded_stages import toy_model
from tests.support.pipelines import assert_same_arrays, compiled, parameters, pipeline_for, random_batch, some_schedule
from tests.support.schedule_strategies import random_schedule

pytestmark = pytest.mark.usefixtures("x64")

WIDTH, MICROBATCH = 3, 2
PLACEMENTS = {
    "one": one_to_one(2),
    "four": one_to_one(4),
    "interleaved": circular(2, 2),
    "v": v_shape(2),
    "both ways": bidirectional(2),
    "alone": circular(1, 3),
}


# -- a chain of tiny layers ----------------------------------------------------------------------------------------------


@cache
def chain_model(num_stages: int) -> Model:
    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (WIDTH, WIDTH)), "b": jax.random.normal(key, (WIDTH,))}

    def layer(params: Any, x: Any, context: Any) -> Any:
        x = context.data["x"] if x is None else x
        return jnp.tanh(x @ params["w"] + params["b"][None])

    def loss(params: Any, x: Any, context: Any) -> Any:
        return jnp.sum((x - context.data["y"]) ** 2), jnp.full((), MICROBATCH, x.dtype)

    layers = (
        Layer("layer0", init, layer, reads=("x",), kind="first"),
        *(Layer(f"layer{k}", init, layer, kind="middle") for k in range(1, num_stages)),
        Layer("loss", lambda key: {}, loss, reads=("y",)),
    )
    spec = {k: jax.ShapeDtypeStruct((MICROBATCH, WIDTH), np.dtype("float64")) for k in "xy"}
    return Model("chain", layers, lambda n: spec, 1, WIDTH)


@cache
def built(where: str) -> Pipeline:
    placement = PLACEMENTS[where]
    n = placement.num_stages
    return Pipeline.build(
        chain_model(n),
        some_schedule(placement, 2),
        microbatch_size=MICROBATCH,
        boundaries=[(s, s + 1) for s in range(n - 1)] + [(n - 1, n + 1)],
        compute_dtype=jnp.float64,
    )


_WOVEN: dict[str, Pipeline] = {}
"""The pipeline for each placement that knows the braids compiled so far."""


def both(where: str, schedule: Schedule) -> tuple[Pipeline, Pipeline]:
    """Return pipelines that run ``schedule`` with braids as one function, and as separate calls."""
    plain = built(where)
    _WOVEN[where] = _WOVEN.get(where, plain).with_schedule(schedule)
    return _WOVEN[where], separate(plain).with_schedule(schedule)


def separate(pipe: Pipeline) -> Pipeline:
    return replace(pipe, braid=False, braids={}).with_schedule(pipe.schedule)


def chain_batch(microbatches: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(microbatches, MICROBATCH, WIDTH)) for k in "xy"}


def run(pipe: Pipeline, params: Any, batch: Mapping[str, np.ndarray], *, record: bool = False) -> StepOutputs:
    return pipe.run(pipe.place(params), {at: pipe.zeros(at) for at in pipe.own_instances}, batch, record=record)


def assert_bit_equal(got: StepOutputs, expected: StepOutputs) -> None:
    assert_same_arrays(dict(got.acc), dict(expected.acc))
    assert_same_arrays(list(got.losses), list(expected.losses))


# -- random schedules ----------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Schedule]:
    where = draw(st.sampled_from(sorted(PLACEMENTS)))
    placement = PLACEMENTS[where]
    m = draw(st.integers(1, 3)) * placement.num_flows
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    return where, random_schedule(placement, m, rng, offload=draw(st.sampled_from([0.0, 0.4])), braid=0.5)


def check_case(case: tuple[str, Schedule]) -> None:
    where, schedule = case
    woven, plain = both(where, schedule)
    params, batch = init_params(woven.model, 0), chain_batch(schedule.num_microbatches)
    out = run(woven, params, batch, record=True)
    assert_bit_equal(out, run(plain, params, batch))
    assert_trace_is_the_schedule(woven, out)
    report = woven.memory_report(workspace=False, curves=True)
    measured = measured_peaks(woven, woven.place(params), batch)
    for predicted, actual in zip(report.ranks, measured.ranks, strict=True):
        assert predicted.live_bytes == actual.live_bytes
        assert predicted.host_bytes == actual.host_bytes
    if not any(report.host_peak_bytes):
        simulated = woven.predicted_timeline().peak_bytes
        assert all(r <= s for r, s in zip(report.peak_bytes, simulated, strict=True)), "the simulator's peak is a bound"


def assert_trace_is_the_schedule(pipe: Pipeline, out: StepOutputs) -> None:
    """Compare slot for slot; a braid with a sync in it is several."""
    for rank, row in enumerate(pipe.schedule.rows):
        expected = [a for slot in row for a in ([slot] if is_one_call(slot) else slot.actions)]
        assert [e.action for e in out.events if e.rank == rank] == expected
        assert [a for r, a, _ in out.tokens if r == rank] == [a for a in expected if computes(a)]
    timeline = pipe.measured_timeline(out)
    for rank, row in enumerate(pipe.schedule.rows):
        assert [e.action for e in timeline.events if e.rank == rank] == list(row)
    assert pipe.replay_ratio(out) > 0


def is_one_call(slot: Any) -> bool:
    return not any(op_spec(a.op).is_sync for a in slot.actions)


def computes(slot: Any) -> bool:
    return is_one_call(slot) and all(op_spec(a.op).lane == "compute" for a in slot.actions)


@settings(max_examples=6)
@given(case=cases())
def test_braided_is_bit_equal_to_separate_calls(case: tuple[str, Schedule]) -> None:
    with jax.enable_x64(True):
        check_case(case)


@pytest.mark.soak
@settings(max_examples=150)
@given(case=cases())
def test_150_random_braided_schedules(case: tuple[str, Schedule]) -> None:
    with jax.enable_x64(True):
        check_case(case)


# -- chosen braids: text files, a GPT, submeshes ---------------------------------------------------------------------------

ONE_RANK = """\
# jaxpipe schedule 1
name: braided
microbatches: 4
placement: circular ranks=1 chunks=2
edges: chain
rank 0: F0.0 F1.0 F0.1+BW1.0 F1.1+B0.0 F0.2+W0.0 F1.2+B1.1 F0.3+W1.1+B0.1 F1.3 BW1.2+BW1.3 W0.1+B0.2 W0.2+BW0.3
"""
"""F with W, B and BW of its own stage and of the other, three parts, and parts that add to the same accumulators."""

TWO_RANKS = """\
# jaxpipe schedule 1
name: braided
microbatches: 4
placement: one-to-one ranks=2
edges: chain
rank 0: F0.0 F0.1 F0.2+B0.0 F0.3+BW0.1 W0.0+B0.2 W0.2+BW0.3
rank 1: F1.0 F1.1+B1.0 F1.2+BW1.1 F1.3+W1.0+B1.2 BW1.3+W1.2
"""


def test_all_pairs_of_operations_in_a_schedule_from_a_file() -> None:
    schedule = parse_schedule(ONE_RANK)
    model = chain_model(2)
    pipe = Pipeline.build(
        model, schedule, microbatch_size=MICROBATCH, boundaries=[(0, 1), (1, 3)], compute_dtype=jnp.float64
    )
    check_whole(pipe, init_params(model, 0), chain_batch(4))
    assert set(pipe.braids) == set(braided_slots(schedule, pipe.stages))
    assert len(pipe.braids) == 8


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_a_gpt_with_a_schedule_from_a_file(recompute: str) -> None:
    pipe = pipeline_for("gpt", parse_schedule(TWO_RANKS), recompute)
    check_whole(pipe, parameters("gpt"), random_batch(4))
    assert all(r.peaks["temporaries"] > 0 for r in pipe.memory_report().ranks), "braids have workspace too"


def check_whole(pipe: Pipeline, params: Any, batch: Mapping[str, np.ndarray]) -> None:
    out = run(pipe, params, batch, record=True)
    assert_bit_equal(out, run(separate(pipe), params, batch))
    assert_trace_is_the_schedule(pipe, out)
    assert measured_peaks(pipe, pipe.place(params), batch).live_peak_bytes == pipe.peak_bytes


@pytest.mark.usefixtures("users_compiler")
def test_a_braid_with_dropout_draws_what_separate_calls_draw() -> None:
    head = TWO_RANKS.split("rank 0")[0].replace("microbatches: 4", "microbatches: 2")
    schedule = parse_schedule(head + "rank 0: F0.0 F0.1 BW0.0+BW0.1\nrank 1: F1.0 F1.1+BW1.0 BW1.1\n")
    build = compiled.__wrapped__  # what other modules compiled is not as users do
    pipe = build("gpt", circular(2, 1), dropout=0.1).with_schedule(schedule)
    params, batch = pipe.place(parameters("gpt")), random_batch(2)
    got, expected = (p.loss_and_grads(params, batch, jax.random.key(1)) for p in (pipe, separate(pipe)))
    assert_same_arrays(got, expected)


@pytest.mark.parametrize(
    ("dp", "tp"),
    [
        (2, RankMesh(tp=2, sequence=True)),
        pytest.param(2, RankMesh(tp=2), marks=pytest.mark.soak),
        pytest.param(1, RankMesh(tp=4, sequence=True), marks=pytest.mark.soak),
        pytest.param(4, RankMesh(tp=1), marks=pytest.mark.soak),
    ],
)
def test_braids_on_submeshes(dp: int, tp: RankMesh) -> None:
    """Values that cross stages are split over dp alone, or with sequence parallelism over tp too."""
    model = toy_model()
    pipe = Pipeline.build(
        model,
        parse_schedule(TWO_RANKS),
        microbatch_size=4,
        boundaries=[(0, 2), (2, 5)],
        dp=dp,
        tp=tp,
        compute_dtype=jnp.float64,
    )
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, 13, (4, 4, 8)).astype(np.int32) for k in ("tokens", "targets")}
    batch["weights"] = (rng.random((4, 4, 8)) < 0.6).astype(np.float32)
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model, 0))
    check_whole(pipe, params, batch)
    homes = message_homes(pipe.programs, pipe.submeshes, message_numbers(pipe.programs))
    assert {home.spec for where in homes.values() for home in where} == {P(("dp", "tp") if tp.splits_time else "dp")}
    assert {home.mesh for where in homes.values() for home in where} == set(pipe.submeshes)
    if tp.size > 1:
        assert any(c.covered for b in pipe.braids.values() for c in b.collectives), (
            "something computes under a collective"
        )


def test_a_braid_is_one_instruction_between_its_messages() -> None:
    pipe = pipeline_for("gpt", parse_schedule(TWO_RANKS))
    for program, row in zip(pipe.programs, pipe.schedule.rows, strict=True):
        instructions = program.instructions
        assert [i.action for i in instructions if isinstance(i, Run)] == list(row)
        ran = {slot: k for k, i in enumerate(instructions) if isinstance(i, Run) for slot in i.action.actions}
        for k, i in enumerate(instructions):
            if isinstance(i, Recv):
                step = 1 if i.action.op == "F" else -1
                readers = [
                    at
                    for a, at in ran.items()
                    if (a.stage, a.microbatch) == (i.action.stage + step, i.action.microbatch)
                ]
                assert k < min(at for at in readers if at > k)
            elif isinstance(i, Send):
                assert k > ran[i.action]


def test_what_parts_share_is_passed_once() -> None:
    stage = pipeline_for("gpt", parse_schedule(ONE_RANK)).stages[0]
    f, w, bw = (stage.functions[op] for op in ("F", "W", "BW"))
    cache = pipeline_for("gpt", parse_schedule(ONE_RANK)).cache
    three = braid([(0, w), (0, f), (0, bw)], cache)
    params = {p for g in (f, w, bw) for p in g.inputs if p.kind == "param"}
    sums = {p for p in w.outputs if p.kind == "acc"}
    assert sorted(p for p in three.inputs if p.kind == "param") == sorted(params)
    for ports in (three.inputs, three.outputs):
        assert sorted(p for p in ports if p.kind == "acc") == sorted(sums)
    assert sorted(three.inputs[k] for k in three.donated) == sorted(sums)
    assert [k for p, k in zip(three.outputs, three.output_parts, strict=True) if p.kind == "acc"] == [2] * len(sums)
    assert three.outputs.count(Port("token")) == 1
    unshared = braid([(0, w), (1, f), (2, bw)], cache)
    assert len(unshared.inputs) == len(w.inputs) + len(f.inputs) + len(bw.inputs)
    assert str(three).startswith("W0+F0+BW0: (")


def test_stages_alike_share_compiled_braids() -> None:
    rows = (
        "F0.0 F0.1 F3.0 B3.0 F3.1+W3.0 B3.1 W3.1 B0.0 B0.1+W0.0 W0.1",
        "F1.0 F2.0 F1.1 B2.0 F2.1+B1.0 B2.1+W1.0 B1.1+W2.0 W1.1+W2.1",
    )
    text = "# jaxpipe schedule 1\nname: x\nmicrobatches: 2\nplacement: v ranks=2\nedges: chain\n"
    schedule = parse_schedule(text + "".join(f"rank {r}: {row}\n" for r, row in enumerate(rows)))
    pipe, _ = both("v", schedule)
    assert pipe.braids[(1, (("B", 2), ("W", 1)))].jitted is pipe.braids[(1, (("B", 1), ("W", 2)))].jitted
    assert pipe.braids[(1, (("F", 2), ("B", 1)))].jitted is not pipe.braids[(1, (("B", 2), ("W", 1)))].jitted
    assert pipe.braids[(1, (("B", 2), ("W", 1)))].name == "B2+W1"


def test_lowering_without_braided_functions_makes_separate_calls() -> None:
    schedule = parse_schedule(ONE_RANK)
    pipe = pipeline_for("gpt", schedule)
    assert len(braided_slots(schedule, pipe.stages)) == 8
    (program,) = lower(schedule, pipe.stages)
    assert [i.action for i in program.instructions if isinstance(i, Run)] == list(schedule.actions(0))


def test_a_braid_with_a_sync_runs_as_separate_calls() -> None:
    row = "F0.0 O0.0 F0.1+S0.0 L0.0 BW0.0+F0.2 BW0.1+BW0.2"
    head = "# jaxpipe schedule 1\nname: x\nmicrobatches: 3\nplacement: circular ranks=1 chunks=1\nedges: chain\n"
    schedule = parse_schedule(f"{head}rank 0: {row}\n")
    model = chain_model(1)
    pipe = Pipeline.build(model, schedule, microbatch_size=MICROBATCH, boundaries=[(0, 2)], compute_dtype=jnp.float64)
    assert [parts for _, parts in pipe.braids] == [(("BW", 0), ("F", 0)), (("BW", 0), ("BW", 0))]
    params, batch = init_params(model, 0), chain_batch(3)
    out = run(pipe, params, batch, record=True)
    assert " ".join(str(e.action) for e in out.events) == row.replace("F0.1+S0.0", "F0.1 S0.0")
    assert_bit_equal(out, run(separate(pipe), params, batch))


HEAD = "# jaxpipe schedule 1\nname: bad\nmicrobatches: 2\nplacement: one-to-one ranks=2\nedges: chain\n"
REFUSED = {
    "F0.0+B0.0 F0.1 W0.0 BW0.1": r"braid F0\.0\+B0\.0 on rank 0: one of its actions waits for another",
    "F0.0 F0.1+O0.0 L0.0 BW0.0 BW0.1": r"braid F0\.1\+O0\.0 on rank 0 holds O, which does not run on the compute lane",
    "F0.0 F0.1+BW1.0 BW0.0 BW0.1": r"BW1\.0 is on rank 0, but the placement runs stage 1 .* on rank 1",
    "F0.0 F0.1+F0.7 BW0.0 BW0.1": r"F0\.7 on rank 0 is out of range",
    "F0.0 F0.1+BW0.0": "stage 0, microbatch 1 on rank 0 is missing",
}


@pytest.mark.parametrize("row", REFUSED)
def test_bad_braids_are_refused(row: str) -> None:
    schedule = parse_schedule(f"{HEAD}rank 0: {row}\nrank 1: F1.0 F1.1 BW1.0 BW1.1\n")
    with pytest.raises(ScheduleError, match=REFUSED[row]):
        both("one", schedule)


@pytest.mark.parametrize("record", [False, True])
def test_a_failure_names_the_braid(record: bool) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("boom")

    pipe = pipeline_for("gpt", parse_schedule(TWO_RANKS))
    at = (0, (("F", 0), ("B", 0)))
    broken = replace(pipe, braids={**pipe.braids, at: replace(pipe.braids[at], call=fail)}).with_costs(pipe.costs)
    message = r"rank 0, braid F0\.2\+B0\.0 \(stage 0 microbatch 2, stage 0 microbatch 0\) failed: boom"
    with pytest.raises(RunError, match=message) as caught:
        run(broken, parameters("gpt"), random_batch(4), record=record)
    assert caught.value.action == "F0.2+B0.0"


# -- reductions ----------------------------------------------------------------------------------------------------------


def reduced_pipeline(schedule: Schedule) -> Pipeline:
    return Pipeline.build(
        chain_model(4),
        schedule,
        microbatch_size=MICROBATCH,
        boundaries=[(0, 1), (1, 2), (2, 3), (3, 5)],
        compute_dtype=jnp.float64,
        dp=2,
    )


def test_gradients_are_reduced_in_the_tail_of_the_pipeline() -> None:
    pipe = reduced_pipeline(generate("v-zb", 2, 4))
    sums = {(r, s): reduction(pipe.submeshes[r], pipe.functions[(r, s)]) for r, s in pipe.own_instances}
    early = pipe.with_reductions(sums)
    params, batch = init_params(pipe.model, 0), chain_batch(4)
    expected = run(pipe, params, batch)
    for record in (False, True):
        out = run(early, params, batch, record=record)
        assert_bit_equal(out, expected)
        assert set(out.reduced) == set(pipe.own_instances) and not expected.reduced
        assert_reductions_are_recorded(early, out) if record else None
        for at, grads in out.reduced.items():
            assert_same_arrays(list(grads), sums[at](list(expected.acc[at])))
    kinds, sequence = early.executor.instruction_kinds, early.executor.sequence
    for rank, program in enumerate(early.programs):
        placed = {at for kind, (r, at) in zip(kinds, sequence, strict=True) if kind == "reduce" and r == rank}
        assert placed == {k for k, i in enumerate(program.instructions) if isinstance(i, Reduce)}
        assert {_last_addition(program, at) for at in placed} == {f"W{s}.3" for r, s in sums if r == rank}
    assert "run" in kinds[kinds.index("reduce") :], "others still work when the first stage is done"
    assert "  Reduce R1.0 (" in str(early.programs[1])


def assert_reductions_are_recorded(pipe: Pipeline, out: StepOutputs) -> None:
    """Each is an event of its own behind the last W of its stage, takes time on the lane of no other, and is in the picture."""
    timeline = pipe.measured_timeline(out)
    reductions = {(e.rank, str(e.action)): e for e in timeline.events if e.lane == "net"}
    assert set(reductions) == {(r, f"R{s}.0") for r, s in pipe.own_instances}
    for (rank, _), event in reductions.items():
        others = [e for e in timeline.of(rank, "compute") if event.action.actions[0].stage == e.action.actions[0].stage]
        assert event.start_s >= max(e.end_s for e in others)
    assert pipe.replay_ratio(out) >= 1 - 1e-9
    costs = with_measured_times(pipe.costs, seconds_by_op([timeline]))
    assert not costs.net_overlaps
    for (_, action), event in reductions.items():
        assert costs.reduce_s[int(action[1])] == event.end_s - event.start_s


def _last_addition(program: Program, at: int) -> str:
    """Return the run before a reduction, right behind which that stands."""
    before = [i for i in program.instructions[:at] if not isinstance(i, Send | Free)]
    return str(before[-1].action)


def test_a_reduction_stands_where_the_schedule_has_it() -> None:
    text = str(with_reductions(generate("v-zb", 2, 4)))
    assert "W3.3 R3.0 B0.3 W0.2 W0.3" in text
    moved = reduced_pipeline(parse_schedule(text.replace("W3.3 R3.0 B0.3 W0.2 W0.3", "W3.3 B0.3 W0.2 R3.0 W0.3")))
    (at,) = [k for k, i in enumerate(moved.programs[0].instructions) if str(i).startswith("Reduce R3.0")]
    assert _last_addition(moved.programs[0], at) == "W0.2"


@pytest.mark.parametrize("beside", [False, True])
def test_a_failing_reduction_is_named(beside: bool) -> None:
    def fail(acc: list[jax.Array]) -> list[jax.Array]:
        raise ValueError("boom")

    pipe = reduced_pipeline(generate("v-zb", 2, 4)).with_reductions({(1, 1): fail})
    with pytest.raises(RunError, match=r"rank 1, action R1\.0 \(stage 1, reduce .*\) failed: boom"):
        run(in_a_lane(pipe) if beside else pipe, init_params(pipe.model, 0), chain_batch(4))


def in_a_lane(pipe: Pipeline) -> Pipeline:
    """Return the same pipeline, whose reductions overlap compute."""
    return replace(pipe, costs=replace(pipe.costs, net_overlaps=True))


def test_compute_goes_on_beside_a_reduction_in_a_lane_of_its_own() -> None:
    """The reduction of one stage waits here until the others have been dispatched, and is named as what a step waits for."""
    pipe = reduced_pipeline(generate("v-zb", 2, 4))
    sums = {(r, s): reduction(pipe.submeshes[r], pipe.functions[(r, s)]) for r, s in pipe.own_instances}
    params, batch, go_on = init_params(pipe.model, 0), chain_batch(4), threading.Event()
    expected = run(pipe.with_reductions(sums), params, batch)

    def late(acc: list[jax.Array]) -> list[jax.Array]:
        assert go_on.wait(60)
        time.sleep(0.05)
        return sums[0, 3](acc)

    overlapped = in_a_lane(pipe.with_reductions({**sums, (0, 3): late}))
    assert overlapped.executor.instruction_kinds.count("reduce") == 4
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(jax.enable_x64(True)(partial(run, overlapped, params, batch, record=True)))
        while "reduce" not in (waits_for := _first_unfinished(overlapped)) or len(overlapped.executor.dispatched) < 52:
            assert waits_for and (not future.done() or future.result())
            time.sleep(0.01)
        go_on.set()
        out = future.result()
    assert_bit_equal(out, expected)
    for at, grads in out.reduced.items():
        assert_same_arrays(list(grads), list(expected.reduced[at]))
    timeline = overlapped.measured_timeline(out)
    (slow,) = [e for e in timeline.events if str(e.action) == "R3.0"]
    beside = [str(e.action) for e in timeline.of(0, "compute") if slow.start_s <= e.start_s and e.end_s <= slow.end_s]
    assert {"B0.3", "W0.2", "W0.3"} <= {*beside}
    assert overlapped.replay_ratio(out) >= 1 - 1e-9


def _first_unfinished(pipe: Pipeline) -> str:
    at = pipe.executor.unfinished(pipe.executor.dispatched)
    return "" if at is None else place_of(*at)


# -- rehearsal -----------------------------------------------------------------------------------------------------------


def test_a_rank_with_braids_is_rehearsed() -> None:
    model = chain_model(2)
    pipe = Pipeline.build(
        model,
        parse_schedule(TWO_RANKS),
        microbatch_size=MICROBATCH,
        boundaries=[(0, 1), (1, 3)],
        devices=[jax.devices()[0]] * 2,
        compute_dtype=jnp.float64,
    )
    report = Rehearsal(pipe, 0).run(steps=2)
    assert [e.action for e in report.events] == list(pipe.schedule.rows[0])
    assert report.memory.measured_bytes == report.memory.predicted_bytes
    assert set(report.timings) == {("F", 0)}, "the time of a braid is not that of its parts"
    assert {op for op, _ in report.standalone} == {"F", "B", "W", "BW"}
    with pytest.raises(RunError, match=r"out of memory at instruction \d+ of \d+, braid F0\.3\+BW0\.1, which wanted"):
        peak = pipe.peak_bytes[0]
        Rehearsal(pipe, 0, memory_limit_bytes=peak - 1).run(steps=1)
