"""The executor runs exactly the schedule, leaks nothing, and says where it failed."""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.axes import RankMesh
from jaxpipe.errors import CheckpointError, ConfigError, ProgramError, RunError
from jaxpipe.mesh import batch_sharded, pipeline_submeshes
from jaxpipe.program.order import issue_order
from jaxpipe.runtime import transfer
from jaxpipe.runtime.executor import Executor, StepInputs, StepOutputs
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.recorder import seconds_by_op
from jaxpipe.schedule import CostProfile, circular, generate, one_to_one, op_spec, simulate
from jaxpipe.schedule.passes.offload import without_offloads
from jaxpipe.stage.model.layer import Layer, Model
from tests.support.pipelines import compiled, parameters, pipeline_for, random_batch
from tests.support.schedule_strategies import random_schedule

pytestmark = pytest.mark.usefixtures("x64")


def _run(pipe: Pipeline, *, record: bool = False) -> StepOutputs:
    batch = random_batch(pipe.schedule.num_microbatches)
    acc = {at: pipe.zeros(at) for at in pipe.own_instances}
    return pipe.run(pipe.place(parameters("gpt")), acc, batch, record=record)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), m=st.integers(1, 5))
def test_the_trace_executed_is_the_schedule(seed: int, m: int) -> None:
    with jax.enable_x64(True):
        schedule = random_schedule(circular(2, 2), m, random.Random(seed), offload=0.3, braid=0.2)
        pipe = replace(compiled("gpt", circular(2, 2)), braid=False).with_schedule(
            schedule
        )  # braids: test_runtime_braids
        out = _run(pipe, record=True)
    for rank in range(schedule.num_ranks):
        executed = [e.action for e in out.events if e.rank == rank]
        assert executed == list(schedule.actions(rank))
        for e in out.events:
            assert e.lane == op_spec(e.action.op).lane  # type: ignore[union-attr]
            assert 0 <= e.start_s <= e.end_s <= out.step_s
    timeline = pipe.measured_timeline(out)
    assert timeline.source == "measured"
    assert [e.action for e in timeline.events if e.rank == 1] == list(schedule.rows[1])
    resident_peaks = simulate(without_offloads(schedule), pipe.costs).peak_activations  # the order alone decides it
    assert all(a <= b * (1 + 1e-9) for a, b in zip(timeline.peak_activations, resident_peaks, strict=True))
    if schedule == without_offloads(schedule):
        assert timeline.peak_activations == pytest.approx(resident_peaks)
    assert pipe.replay_ratio(out) > 0


def test_measured_times_come_back_as_costs() -> None:
    pipe = pipeline_for("gpt", generate("zb-h1", 2, 4))
    out = _run(pipe, record=True)
    seconds = seconds_by_op([pipe.measured_timeline(out)])
    assert set(seconds) == {(op, s) for op in "FBW" for s in range(2)}
    assert all(x > 0 for x in seconds.values())


def test_steps_leave_nothing_behind() -> None:
    pipe = pipeline_for("gpt", generate("zb-h1", 2, 4))
    params, batch = pipe.place(parameters("gpt")), random_batch(4)
    acc: Any = {at: pipe.zeros(at) for at in pipe.own_instances}
    counts = []
    for _ in range(6):
        out = pipe.run(params, acc, batch)
        acc = {at: list(buffers) for at, buffers in out.acc.items()}
        jax.block_until_ready((acc, out.losses))
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert len(set(counts[1:])) == 1, counts


def test_the_order_of_dispatch_does_not_matter() -> None:
    pipe = pipeline_for("gpt", generate("zb-h1", 2, 4))
    out = _run(pipe)
    skewed = CostProfile.uniform(2, f=5, b=1, w=9)
    other = _run(pipe.with_costs(skewed))
    for a, b in zip(jax.tree.leaves(out.acc), jax.tree.leaves(other.acc), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_ranks_of_two_processes_meet_through_a_transport() -> None:
    """Each executor has one rank; the transport is all that joins them."""
    pipe = pipeline_for("gpt", generate("gpipe", 2, 2))
    single = _run(pipe)
    timeline = simulate(pipe.schedule, pipe.costs)
    shared = _Switchboard(pipe)
    executors = [
        Executor([p], issue_order([p], timeline), pipe.functions, pipe.submeshes, shared, all_programs=pipe.programs)
        for p in pipe.programs
    ]
    batch = random_batch(2)
    inputs = pipe.step_inputs(pipe.place(parameters("gpt")), {at: pipe.zeros(at) for at in pipe.own_instances}, batch)
    results: dict[int, StepOutputs] = {}

    def work(rank: int) -> None:
        with jax.enable_x64(True):
            rank_inputs = StepInputs(
                {k: v for k, v in inputs.params.items() if k[0] == rank},
                {k: v for k, v in inputs.acc.items() if k[0] == rank},
                inputs.data,
                inputs.keys,
            )
            results[rank] = executors[rank].run(rank_inputs)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for rank in range(2):
        for a, b in zip(results[rank].acc[(rank, rank)], single.acc[(rank, rank)], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


class _Switchboard:
    """A transport whose receive waits for the send of another thread."""

    def __init__(self, pipe: Pipeline) -> None:
        self.shardings = [batch_sharded(m) for m in pipe.submeshes]
        self._mail: dict[int, Any] = {}
        self._ready = threading.Condition()

    def send(self, message: int, dst: int, arrays: Any) -> None:
        with self._ready:
            self._mail[message] = jax.device_put(list(arrays), self.shardings[dst])
            self._ready.notify_all()

    def recv(self, message: int) -> Any:
        with self._ready:
            self._ready.wait_for(lambda: message in self._mail)
            return self._mail.pop(message)

    def clear(self) -> None:
        self._mail.clear()


# -- failures --------------------------------------------------------------------------------------------------------


def _with_failing(pipe: Pipeline, op: str, stage: int) -> Pipeline:
    """Return ``pipe`` whose function of (op, stage) raises when called."""

    def fail(*_: Any) -> Any:
        raise ValueError("boom\nwith a second line")

    rank = pipe.primary(stage)[0]
    stage_functions = pipe.functions[(rank, stage)]
    broken = {**stage_functions.functions, op: replace(stage_functions.functions[op], call=fail)}
    functions = {**pipe.functions, (rank, stage): replace(stage_functions, functions=broken)}
    return replace(pipe, functions=functions).with_costs(pipe.costs)


@pytest.mark.parametrize(("op", "stage"), [("F", 0), ("F", 1), ("B", 1), ("W", 0)])
@pytest.mark.parametrize("record", [False, True])
def test_a_failure_names_rank_action_and_stage(op: str, stage: int, record: bool) -> None:
    pipe = pipeline_for("gpt", generate("zb-h1", 2, 4))
    with pytest.raises(
        RunError, match=rf"rank {stage}, action {op}{stage}\.0 \(stage {stage}, microbatch 0\) failed: boom with"
    ):
        _run(_with_failing(pipe, op, stage), record=record)
    _run(pipe)  # the pipeline that it came from still works


def _explode(x: Any) -> Any:
    raise RuntimeError("exploded in the callback")


@pytest.mark.parametrize("record", [False, True])
def test_an_asynchronous_failure_is_named_too(record: bool) -> None:
    def init(key: jax.Array) -> Any:
        return {"w": jnp.ones((8, 8))}

    def fine(params: Any, x: Any, context: Any) -> Any:
        return (context.data["x"] if x is None else x) @ params["w"]

    def bad(params: Any, x: Any, context: Any) -> Any:
        bomb = jax.pure_callback(_explode, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(x[0, 0]))
        return x @ params["w"] + jax.lax.stop_gradient(bomb)

    def loss(params: Any, x: Any, context: Any) -> Any:
        return jnp.sum(x), jnp.ones(())

    layers = (
        Layer("first", init, fine, reads=("x",)),
        Layer("second", init, bad),
        Layer("loss", lambda key: {}, loss),
    )
    spec = {"x": jax.ShapeDtypeStruct((4, 8), np.dtype("float64"))}
    model = Model("toy", layers, lambda n: spec, 1, 8)
    pipe = Pipeline.build(
        model, generate("1f1b", 2, 2), microbatch_size=4, boundaries=[(0, 1), (1, 3)], compute_dtype=jnp.float64
    )
    params = pipe.place({"first": {"w": np.ones((8, 8))}, "second": {"w": np.ones((8, 8))}, "loss": {}})
    batch = {"x": np.ones((2, 4, 8))}
    with pytest.raises(RunError, match=r"1.*F1\.0 \(stage 1.*0\) failed: .*exploded"):
        out = pipe.run(params, {at: pipe.zeros(at) for at in pipe.own_instances}, batch, record=record)
        out.wait()


def test_batches_must_fit() -> None:
    pipe = pipeline_for("gpt", generate("1f1b", 2, 4))
    params, acc = pipe.place(parameters("gpt")), {at: pipe.zeros(at) for at in pipe.own_instances}
    batch = random_batch(4)
    with pytest.raises(ProgramError, match="the batch has no 'targets'"):
        pipe.run(params, acc, {k: v for k, v in batch.items() if k != "targets"})
    with pytest.raises(ProgramError, match=r"batch\['tokens'\].*\(3, 2, 8\).*\(4, 2, 8\)"):
        pipe.run(params, acc, {k: v[:3] for k, v in batch.items()})
    with pytest.raises(ProgramError, match=r"batch\['tokens'\].*\(4, 2, 8\)"):
        pipe.run(params, acc, {k: v.tolist() for k, v in batch.items()})
    with pytest.raises(ProgramError, match=r"batch\['tokens'\].*float64.*int32"):
        pipe.evaluate(params, {k: v.astype(np.float64) for k, v in batch.items()})
    with pytest.raises(ProgramError, match=r"batch\['tokens'\].*8589934592.*int32.*-2147483648"):
        pipe.evaluate(params, batch | {"tokens": np.full((4, 2, 8), 2**33)})  # JAX would keep the lower 32 bits
    with pytest.raises(ProgramError, match=r"batch\['weights'\].*complex64.*float32"):
        pipe.evaluate(params, batch | {"weights": batch["weights"].astype(np.complex64)})


@pytest.mark.parametrize("dtypes", [("int64", "float64"), ("uint8", "float16"), ("int16", "bool"), ("uint64", "int8")])
def test_numbers_of_other_dtypes_that_fit_are_the_same_numbers(dtypes: tuple[str, str]) -> None:
    pipe = pipeline_for("gpt", generate("1f1b", 2, 4))
    params = pipe.place(parameters("gpt"))
    batch = random_batch(4) | {"weights": np.ones((4, 2, 8), np.float32)}
    cast = {k: v.astype(dtypes[v.dtype.kind == "f"]) for k, v in batch.items()}
    assert pipe.evaluate(params, cast) == pipe.evaluate(params, batch)


def test_parameters_must_be_placed_and_keys_be_keys() -> None:
    pipe = pipeline_for("gpt", generate("1f1b", 2, 4), dropout=0.1)
    params, batch = parameters("gpt"), random_batch(4)
    for run in (pipe.loss_and_grads, pipe.evaluate):
        with pytest.raises(ProgramError, match=r"pipeline.place\(params\)"):
            run(params, batch)
    with pytest.raises(ProgramError, match=r"jax.random.key\(seed\)"):
        pipe.loss_and_grads(pipe.place(params), batch, 7)
    wrong: dict[str, Any] = {
        "rbg": jax.random.key(0, impl="rbg"),
        "keys of shape": jax.random.split(jax.random.key(0)),
        "raw data int32": np.zeros(4, np.int32),
    }
    for words, key in wrong.items():
        with pytest.raises(
            ProgramError, match=rf"the PRNG key is of {words}.*; make one with jax.random.key\(seed, impl="
        ):
            pipe.loss_and_grads(pipe.place(params), batch, key)
    losses = [
        pipe.loss_and_grads(pipe.place(params), batch, key)[0] for key in (jax.random.key(3), jax.random.PRNGKey(3))
    ]
    assert losses[0] == losses[1]


def test_parameters_must_fit() -> None:
    pipe = pipeline_for("gpt", generate("1f1b", 2, 4))
    params = dict(parameters("gpt"))
    with pytest.raises(CheckpointError, match="do not fit the model"):
        pipe.place({k: v for k, v in params.items() if k != "head"})


def test_a_schedule_for_another_placement_is_refused() -> None:
    pipe = pipeline_for("gpt", generate("1f1b", 2, 4))
    with pytest.raises(ProgramError, match="build a new pipeline"):
        pipe.with_schedule(generate("interleaved-1f1b", 2, 4, chunks=2))


def test_offload_needs_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = compiled("gpt", circular(2, 1))
    schedule = random_schedule(one_to_one(2), 2, random.Random(0), offload=1.0)
    monkeypatch.setattr(transfer, "PINNED_HOST", "nowhere")
    with pytest.raises(ProgramError, match="have no 'nowhere' memory"):
        pipe.with_schedule(schedule)


def test_submeshes_take_consecutive_devices() -> None:
    meshes = pipeline_submeshes(2, RankMesh(dp=2, tp=2))
    ids = [[d.id for d in m.devices.flat] for m in meshes]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert meshes[0].axis_names == ("dp", "ep", "cp", "tp") and meshes[0].devices.shape == (2, 1, 1, 2)
    with pytest.raises(ConfigError, match=r"16 devices.*8"):
        pipeline_submeshes(4, RankMesh(dp=2, tp=2))
    with pytest.raises(ConfigError, match="dp is 0"):
        pipeline_submeshes(1, RankMesh(dp=0))
