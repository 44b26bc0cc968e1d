"""Braided slots as one function: bit-equal to separate calls, one instruction, one event, and bytes as predicted.

The random schedules run on a chain of one matrix product a layer, since every braid that a schedule holds is compiled; a GPT and
the layers of test_sharded_stages.py (on dp × tp submeshes) run chosen ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import RunError, ScheduleError
from jaxpipe.mesh import TensorParallel
from jaxpipe.program.ir import Recv, Run, Send
from jaxpipe.program.lower import braided_slots, lower
from jaxpipe.runtime.executor import StepOutputs
from jaxpipe.runtime.memory_probe import measured_peaks
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.reduction import reduction
from jaxpipe.schedule import (
    Action,
    Braid,
    Placement,
    Schedule,
    bidirectional,
    circular,
    generate,
    one_to_one,
    op_spec,
    parse_schedule,
    v_shape,
)
from jaxpipe.stage.braid import braid
from jaxpipe.stage.functions import Port
from jaxpipe.stage.layer import Layer, Model
from jaxpipe.stage.reference import init_params
from tests.pipelines import assert_same_arrays, parameters, pipeline_for, random_batch, some_schedule
from tests.schedule_strategies import random_schedule
from tests.test_sharded_stages import toy_model

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
"""By placement, the pipeline that knows the braids compiled so far."""


def both(where: str, schedule: Schedule) -> tuple[Pipeline, Pipeline]:
    """Pipelines that run ``schedule`` with braids as one function, and as separate calls."""
    plain = built(where)
    _WOVEN[where] = _WOVEN.get(where, plain).with_schedule(schedule)
    return _WOVEN[where], separate(plain).with_schedule(schedule)


def separate(pipe: Pipeline) -> Pipeline:
    return replace(pipe, braid=False, braids={}).with_schedule(pipe.schedule)


def chain_batch(microbatches: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(microbatches, MICROBATCH, WIDTH)) for k in "xy"}


def run(pipe: Pipeline, params: Any, batch: Mapping[str, np.ndarray], *, record: bool = False) -> StepOutputs:
    return pipe.run(pipe.place(params), {at: pipe.zeros(at) for at in pipe.all_instances}, batch, record=record)


def assert_bit_equal(got: StepOutputs, want: StepOutputs) -> None:
    assert_same_arrays(dict(got.acc), dict(want.acc))
    assert_same_arrays(list(got.losses), list(want.losses))


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
    for predicted, seen in zip(report.ranks, measured.ranks, strict=True):
        assert predicted.live_bytes == seen.live_bytes
        assert predicted.host_bytes == seen.host_bytes
    if not any(report.host_peak_bytes):
        simulated = woven.predicted_timeline().peak_bytes
        assert all(r <= s for r, s in zip(report.peak_bytes, simulated, strict=True)), "the simulator's peak is a bound"


def assert_trace_is_the_schedule(pipe: Pipeline, out: StepOutputs) -> None:
    """Slot for slot; a braid with a sync in it is several."""
    for rank, row in enumerate(pipe.schedule.rows):
        want = [a for slot in row for a in ([slot] if whole(slot) else slot.actions)]
        assert [e.action for e in out.events if e.rank == rank] == want
        assert [a for r, a, _ in out.tokens if r == rank] == [a for a in want if computes(a)]
    timeline = pipe.measured_timeline(out)
    for rank, row in enumerate(pipe.schedule.rows):
        assert [e.action for e in timeline.events if e.rank == rank] == list(row)
    assert pipe.replay_ratio(out) > 0.5


def whole(slot: Any) -> bool:
    return not any(op_spec(a.op).is_sync for a in slot.actions)


def computes(slot: Any) -> bool:
    return whole(slot) and all(op_spec(a.op).lane == "compute" for a in slot.actions)


@settings(max_examples=15)
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
