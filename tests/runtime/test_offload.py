"""Offload on devices: any schedule with O, L and S computes the bits of the same schedule without, keeps the memory that its
program says, and leaves nothing behind.

The schedules come from every family and from the solver, their offloads from the families themselves and from the offload pass.
"""

from __future__ import annotations

import gc
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.cost import with_offloadable_bytes
from jaxpipe.errors import ProgramError, ScheduleError, StageError
from jaxpipe.program.ir import host_bytes
from jaxpipe.program.lower import lower
from jaxpipe.program.order import holds
from jaxpipe.runtime import executor, transfer
from jaxpipe.runtime.executor import StepOutputs
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.transfer import OffloadOptions
from jaxpipe.schedule import (
    FAMILIES,
    Action,
    CostProfile,
    HostLink,
    Schedule,
    check_schedule,
    circular,
    generate,
    one_to_one,
    simulate,
)
from jaxpipe.schedule.passes import offload as with_offloads
from jaxpipe.schedule.passes.offload import without_offloads
from jaxpipe.search.best import bounds_within
from jaxpipe.search.solve.offload_list import offload_candidates
from jaxpipe.search.solve.task import SolveTask
from jaxpipe.stage.functions import TINY, leaves_that_may_leave, with_offload
from tests.support.pipelines import assert_same_arrays, compiled, parameters, pipeline_for, random_batch, sized
from tests.support.schedule_strategies import random_schedule

pytestmark = pytest.mark.usefixtures("x64", "one_build")

NAMES = ("gpt", "llama")


def _run(pipe: Pipeline, name: str, seed: int = 0, *, record: bool = False) -> StepOutputs:
    acc = {at: pipe.zeros(at) for at in pipe.own_instances}
    return pipe.run(
        pipe.place(parameters(name)), acc, random_batch(pipe.schedule.num_microbatches, seed), record=record
    )


def _ops(schedule: Schedule) -> Counter[str]:
    return Counter(a.op for rank in range(schedule.num_ranks) for a in schedule.actions(rank))


def _po_f(m: int = 4) -> Schedule:
    return generate("po-f", 2, m)


# -- which leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_leaves_go_first_and_no_more_than_needed(name: str) -> None:
    for stage in compiled(name, circular(2, 1)).stages:
        sizes = leaves_that_may_leave(stage)
        assert set(stage.offloaded) == set(sizes) and stage.offloadable_bytes == sum(sizes.values())
        entering = {
            p: a for op in "BW" for p, a in zip(stage.functions[op].inputs, stage.functions[op].avals_in, strict=True)
        }
        saved = stage.residual_bytes - sum(a.size * a.dtype.itemsize for p, a in entering.items() if p.kind == "x")
        assert 0.9 * saved < stage.offloadable_bytes <= saved
        before: set[int] = set()
        for fraction in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
            chosen = with_offload(stage, fraction)
            leaf_bytes = [sizes[i] for i in chosen.offloaded]
            assert chosen.offloadable_bytes == sum(leaf_bytes) >= fraction * sum(sizes.values())
            assert not leaf_bytes or sum(leaf_bytes) - min(leaf_bytes) < fraction * sum(sizes.values())
            assert before <= set(chosen.offloaded), "a larger fraction moves the same leaves, and more"
            before = set(chosen.offloaded)
            stay = [n for i, n in sizes.items() if i not in before]
            assert max(stay, default=0) <= min(leaf_bytes, default=10**9)


def test_only_what_the_backward_reads_may_leave() -> None:
    stage = compiled("gpt", circular(2, 1)).stages[0]
    read = {p.index for op in ("B", "W") for p in stage.functions[op].inputs if p.kind == "res"}
    assert set(leaves_that_may_leave(stage)) <= read
    forwarding = replace(stage.functions["F"], forwarded=dict.fromkeys(range(len(stage.functions["F"].outputs)), 0))
    assert not leaves_that_may_leave(replace(stage, functions={**stage.functions, "F": forwarding}))


def test_tiny_leaves_stay() -> None:
    stage = compiled("gpt", circular(2, 1)).stages[0]
    f = stage.functions["F"]
    at, port = next((k, p) for k, p in enumerate(f.outputs) if p.kind == "res")
    wide = jax.ShapeDtypeStruct(
        (f.avals_out[at].shape[0], TINY * 10**6), np.dtype("float64"), sharding=f.avals_out[at].sharding
    )
    avals = (*f.avals_out[:at], wide, *f.avals_out[at + 1 :])
    grown = replace(stage, functions={**stage.functions, "F": replace(f, avals_out=avals)})
    assert with_offload(grown).offloaded == (port.index,)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_is_a_fraction(fraction: float) -> None:
    pipe = compiled("gpt", circular(2, 1))
    with pytest.raises(StageError, match="want a number between 0 and 1"):
        with_offload(pipe.stages[0], fraction)
    with pytest.raises(StageError, match="want a number between 0 and 1"):
        pipe.with_offload(OffloadOptions(fraction))


# -- programs and memory ---------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), m=st.integers(1, 5), fraction=st.sampled_from([0.0, 0.3, 1.0]))
def test_programs_move_what_the_stage_chose(seed: int, m: int, fraction: float) -> None:
    schedule = random_schedule(circular(2, 2), m, random.Random(seed), offload=0.5)
    with jax.enable_x64(True):
        stages = [with_offload(s, fraction) for s in compiled("gpt", circular(2, 2)).stages]
        programs = lower(schedule, stages)
    for program in programs:
        for instruction, written in zip(program.instructions, program.written_bytes, strict=True):
            if type(instruction).__name__ in ("Offload", "Reload"):
                stage = stages[instruction.action.stage]  # type: ignore[union-attr]
                assert sum(written) == stage.offloadable_bytes and len(written) == len(stage.offloaded)
        assert host_bytes([program]) == _host_peak(schedule, program.rank, stages)
    assert host_bytes(programs) == sum(_host_peak(schedule, r, stages) for r in range(2))


def _host_peak(schedule: Schedule, rank: int, stages: Any) -> int:
    """Return the most bytes on the host by the row alone: O takes, L gives back."""
    live = peak = 0
    for a in schedule.actions(rank):
        live += {"O": 1, "L": -1}.get(a.op, 0) * stages[a.stage].offloadable_bytes
        peak = max(peak, live)
    return peak


def test_offload_lowers_what_a_rank_holds_as_the_simulator_says() -> None:
    """One rank, copies that take no time: the program's peak falls by what the simulated peak falls by."""
    pipe = compiled("gpt", circular(1, 2))
    resident = _text("F0.0 F0.1 F0.2 F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2 BW0.0 BW0.1 BW0.2")
    offloaded = _text("F0.0 O0.0 F0.1 O0.1 F0.2 O0.2 F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2 L0.0 BW0.0 L0.1 BW0.1 L0.2 BW0.2")
    for fraction in (0.0, 0.4, 1.0):
        partial = pipe.with_offload(OffloadOptions(fraction))
        reports = [partial.with_schedule(s).memory_report(workspace=False) for s in (resident, offloaded)]
        peaks = [report.ranks[0].live_peak_bytes for report in reports]
        curves = [max(simulate(s, partial.costs).memory[0].bytes) for s in (resident, offloaded)]
        stage = partial.stages[0]
        assert partial.costs.offloadable_bytes == tuple(float(s.offloadable_bytes) for s in partial.stages)
        assert (peaks[0] - peaks[1] > 0) is (fraction > 0)
        assert peaks[0] - peaks[1] >= curves[0] - curves[1] - stage.boundary_bytes * 3
        assert peaks[0] - peaks[1] <= 3 * stage.offloadable_bytes


def _text(row: str) -> Schedule:
    from jaxpipe.schedule import parse_schedule

    head = "# jaxpipe schedule 1\nname: s\nmicrobatches: 3\nplacement: circular ranks=1 chunks=2\nedges: chain\n"
    schedule = parse_schedule(f"{head}rank 0: {row}\n")
    check_schedule(schedule)
    return schedule


def test_seconds_of_a_copy_follow_the_bytes() -> None:
    link = HostLink(d2h_bytes_per_s=4.0, h2d_bytes_per_s=8.0)
    costs = CostProfile(
        (1.0,) * 2, (1.0,) * 2, (1.0,) * 2, (2.0,) * 2, (8.0,) * 2, (4.0,) * 2, (0.0,) * 2, (8.0, 0.0), host=link
    )
    assert (costs.offload_s, costs.load_s) == ((2.0, 0.0), (1.0, 0.0))
    changed = with_offloadable_bytes(replace(costs, offload_s=(3.0, 0.0)), (4.0, 4.0))
    assert changed.offloadable_bytes == (4.0, 4.0)
    assert changed.offload_s == (1.5, 1.0), "in proportion, or as the link says"
    assert changed.load_s == (0.5, 0.5)


# -- bits ------------------------------------------------------------------------------------------------------------


_USUAL = ("gis", "po", "po-h", "po-f", "ada-offload")
_OTHERS = ("1f1b", "interleaved-1f1b", "zb-h1", "v-min", "v-zb", "chimera")
_BY_DEFAULT = {(2, "gpt", False), (2, "llama", True), (4, "gpt", True)}
_LONG = {("gis", 4), ("ada-offload", 4), ("chimera", 2), ("interleaved-1f1b", 2)}


def _families() -> list[Any]:
    """Return all families at p = 1..4 on both models; by default those that offload or may, p = 2 on one and 4 on the
    other, and some others."""
    return [
        pytest.param(model, name, p, id=f"{name}-p{p}-{model}", marks=[] if usual else [pytest.mark.soak])
        for p in (1, 2, 3, 4)
        for name in FAMILIES
        for model in NAMES
        for usual in [name in _USUAL + _OTHERS and (p, model, name in _USUAL) in _BY_DEFAULT and (name, p) not in _LONG]
    ]


@pytest.mark.parametrize(("model", "family", "p"), _families())
def test_a_family_with_offload_has_the_bits_of_the_family_without(model: str, family: str, p: int) -> None:
    _check_bits(model, _offloaded(family, p, 2 * p))


@cache
def _offloaded(family: str, p: int, m: int) -> Schedule:
    """Return a family's schedule with the offloads that it has, those of the pass, or everywhere if the pass finds none."""
    try:
        bare = generate(family, p, m)
    except ScheduleError as error:
        assert p < 4, error
        pytest.skip(str(error))
    if _ops(bare)["O"]:
        return bare
    for time in (0.3, 0.01):
        costs = CostProfile.uniform(bare.num_stages, chunks=bare.placement.num_chunks, offload_time=time)
        schedule = with_offloads(bare, costs).schedule
        if _ops(schedule)["O"]:
            return schedule
    return _all_offloaded(bare)


def _all_offloaded(bare: Schedule) -> Schedule:
    """Every F is followed by O, and every B or BW preceded by L."""

    def around(slot: Any) -> Iterator[Any]:
        (a,) = slot.actions
        if a.op in ("B", "BW"):
            yield Action("L", a.stage, a.microbatch)
        yield slot
        if a.op == "F":
            yield Action("O", a.stage, a.microbatch)

    schedule = replace(bare, rows=tuple(tuple(x for slot in row for x in around(slot)) for row in bare.rows))
    check_schedule(schedule)
    return schedule


def _check_bits(model: str, schedule: Schedule) -> None:
    model = sized(model, schedule)
    pipe = pipeline_for(model, schedule)
    out = _run(pipe, model)
    expected = _run(pipe.with_schedule(without_offloads(schedule)), model)
    assert_same_arrays(dict(out.acc), dict(expected.acc))
    assert_same_arrays(list(out.losses), list(expected.losses))


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize(("p", "ops"), [(2, "OL"), pytest.param(3, "OLS", marks=pytest.mark.soak), (4, "OLS")])
def test_answers_of_the_solver_have_the_bits_of_the_order_without_offload(model: str, p: int, ops: str) -> None:
    costs = replace(CostProfile.uniform(p, offload_time=3.0), host=HostLink(mode="shared"))
    task = SolveTask(one_to_one(p), 2 * p, costs, 2.0, offload=True, objective="span")
    _, bound = bounds_within(task.placement, task.num_microbatches, costs, 2.0, offload=True)
    *_, schedule = offload_candidates(task, bound, lambda: False, most=20)
    assert set(ops) <= set(_ops(schedule))
    _check_bits(model, schedule)


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([0.0, 0.2, 0.6, 0.9]), st.booleans())
def test_random_schedules_with_part_of_the_residuals_moved(seed: int, m: int, fraction: float, in_parts: bool) -> None:
    with jax.enable_x64(True):
        schedule = random_schedule(circular(2, 2), m, random.Random(seed), offload=0.5)
        pipe = pipeline_for("gpt", schedule).with_offload(OffloadOptions(fraction, in_parts=in_parts))
        out, expected = _run(pipe, "gpt"), _run(pipe.with_schedule(without_offloads(schedule)), "gpt")
        assert_same_arrays(dict(out.acc), dict(expected.acc))
        assert_same_arrays(list(out.losses), list(expected.losses))


def test_a_copy_compiles_nothing_and_returns_to_the_same_place() -> None:
    pipe = pipeline_for("gpt", _po_f())
    _run(pipe.with_schedule(without_offloads(pipe.schedule)), "gpt")
    jitted = [f.jitted for s in pipe.stages for f in s.functions.values()]
    before = [f._cache_size() for f in jitted]
    _run(pipe, "gpt")
    assert [f._cache_size() for f in jitted] == before


# -- live arrays -----------------------------------------------------------------------------------------------------


def _live_bytes() -> Mapping[str, int]:
    gc.collect()
    kinds: Counter[str] = Counter()
    for array in jax.live_arrays():
        kinds[str(array.sharding.memory_kind)] += array.nbytes
    return kinds


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.soak)])
def test_steps_keep_live_bytes_constant(model: str, steps: int) -> None:
    schedule = _po_f()
    pipe = pipeline_for(model, schedule)
    params, batch = pipe.place(parameters(model)), random_batch(4)
    acc: Any = {at: pipe.zeros(at) for at in pipe.own_instances}
    live = set()
    for step in range(steps):
        out = pipe.run(params, acc, batch)
        acc = {at: list(buffers) for at, buffers in out.acc.items()}
        if step >= 2 and (step % 10 == 0 or step == steps - 1):
            out.wait()
            live.add(tuple(sorted(_live_bytes().items())))
    assert len(live) == 1, live
    assert transfer.PINNED_HOST not in dict(*live)


def test_residuals_are_on_the_host_between_o_and_l(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every F, what live arrays hold on the host is what the programs say."""
    schedule = _text("F0.0 O0.0 F0.1 O0.1 F0.2 F1.0 BW1.0 L0.0 BW0.0 F1.1 BW1.1 L0.1 BW0.1 F1.2 BW1.2 BW0.2")
    pipe = compiled("gpt", circular(1, 2)).with_schedule(schedule)
    stage_bytes = pipe.stages[0].offloadable_bytes
    host_bytes: list[int] = []
    function = pipe.functions[(0, 1)].functions["F"]

    def watching(*arrays: Any) -> Any:
        jax.block_until_ready(arrays)
        host_bytes.append(_live_bytes().get(transfer.PINNED_HOST, 0))
        return function.call(*arrays)

    stage = pipe.functions[(0, 1)]
    watched = replace(stage, functions={**stage.functions, "F": replace(function, call=watching)})
    _run(replace(pipe, functions={**pipe.functions, (0, 1): watched}).with_costs(pipe.costs), "gpt")
    assert host_bytes == [2 * stage_bytes, stage_bytes, 0]


# -- the host --------------------------------------------------------------------------------------------------------


def test_a_budget_below_the_minimum_names_the_minimum() -> None:
    pipe = pipeline_for("gpt", _po_f())
    minimum = host_bytes(pipe.programs)
    pipe.with_offload(OffloadOptions(host_memory_bytes=minimum))
    with pytest.raises(ProgramError, match=r"offload\.host_memory_gb=") as caught:
        pipe.with_offload(OffloadOptions(host_memory_bytes=minimum - 1))
    (enough,) = re.findall(r"at least ([\d.e-]+)", str(caught.value))
    (fraction,) = re.findall(r"offload\.fraction below ([\d.e-]+)", str(caught.value))
    pipe.with_offload(OffloadOptions(host_memory_bytes=float(enough) * 1e9))
    assert 0 < float(fraction) <= 1
    pipe.with_offload(OffloadOptions(0.0, host_memory_bytes=1))
    with pytest.raises(ProgramError, match=r"host_memory_gb"):
        pipe.with_schedule(without_offloads(_po_f())).with_offload(OffloadOptions(host_memory_bytes=1)).with_schedule(
            _po_f()
        )


def test_without_a_budget_the_machine_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline_for("gpt", _po_f())
    room, what = transfer.available_host_bytes("cpu")
    assert room > 0 and what
    monkeypatch.setattr(transfer, "_available_memory", lambda: 1000.0)
    with pytest.raises(ProgramError, match="the memory available on this machine allows 1e-06 GB: set offload"):
        pipe.with_offload(OffloadOptions())
    pipe.with_schedule(without_offloads(_po_f()))


def test_the_pool_of_pinned_memory_limits_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_available_memory", lambda: 1e15)
    monkeypatch.setattr(transfer, "_number", lambda name, otherwise=float("inf"): otherwise)
    monkeypatch.delenv(transfer.GPU_POOL_VARIABLE, raising=False)
    assert transfer.available_host_bytes("gpu")[0] == 64e9
    monkeypatch.setenv(transfer.GPU_POOL_VARIABLE, "1e-5")
    assert transfer.available_host_bytes("cuda")[0] == 64e9, "garbage is ignored"
    monkeypatch.setenv(transfer.GPU_POOL_VARIABLE, "200")
    assert transfer.available_host_bytes("gpu")[0] == 200e9
    assert transfer.available_host_bytes("cpu")[0] == 1e15
    room, reason = transfer.available_host_bytes("gpu", 10**4)
    assert room == 1e11 and reason.endswith("shared by 10000 processes"), (
        "processes share a host's memory; the pool is of each"
    )
    programs = pipeline_for("gpt", _po_f()).programs
    monkeypatch.setenv(transfer.GPU_POOL_VARIABLE, "0.00001")
    with pytest.raises(ProgramError, match="set the environment variable to at least"):
        transfer.check_host_memory(programs, OffloadOptions(), "gpu")


# -- backends without pinned memory ----------------------------------------------------------------------------------


def test_without_pinned_memory_offload_is_refused_or_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = _po_f()
    pipe = pipeline_for("gpt", without_offloads(schedule))
    expected = _run(pipe, "gpt")
    monkeypatch.setattr(transfer, "PINNED_HOST", "nowhere")
    with pytest.raises(ProgramError, match=r"'nowhere'.*--offload-fallback"):
        pipe.with_schedule(schedule)
    slow = pipe.with_offload(OffloadOptions(fallback=True)).with_schedule(schedule)
    for record in (False, True):
        out = _run(slow, "gpt", record=record)
        assert_same_arrays(dict(out.acc), dict(expected.acc))
        assert_same_arrays(list(out.losses), list(expected.losses))
    assert Counter(e.action.actions[0].op for e in out.events) == _ops(schedule)
    assert all(e.start_s <= e.end_s for e in out.events)
    assert slow.replay_ratio(out) > 0


def test_the_fallback_frees_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sharding = compiled("gpt", circular(1, 2)).stages[0].functions["F"].avals_out[0].sharding
    monkeypatch.setattr(transfer, "PINNED_HOST", "nowhere")
    assert sharding is not None
    to_host, to_device = transfer.host_copies(sharding, fallback=True)
    array = jax.device_put(np.arange(64.0).reshape(2, 32), sharding)
    (copy,) = to_host([array])
    assert isinstance(copy, np.ndarray) and copy.base is None, "a view would keep the device buffer"
    array.delete()
    (back,) = to_device([copy])
    assert back.sharding == sharding
    np.testing.assert_array_equal(np.asarray(back), np.arange(64.0).reshape(2, 32))


# -- records ---------------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_a_record_has_every_copy_on_its_lane(seed: int) -> None:
    with jax.enable_x64(True):
        schedule = random_schedule(circular(2, 2), 3, random.Random(seed), offload=0.6)
        pipe = pipeline_for("gpt", schedule)
        out = _run(pipe, "gpt", record=True)
    at = {(e.rank, e.action): e for e in out.events}
    for (rank, action), event in at.items():
        (a,) = action.actions
        assert event.lane == {"O": "d2h", "L": "h2d"}.get(a.op, "compute")
        producer = {"O": "F", "L": "O"}.get(a.op)
        if producer is not None:
            before = at[(rank, type(a)(producer, a.stage, a.microbatch))]
            assert before.end_s <= event.start_s
    for lane in ("compute", "d2h", "h2d"):
        for rank in range(2):
            row = [e for e in out.events if (e.rank, e.lane) == (rank, lane)]
            assert all(a.end_s <= b.start_s for a, b in pairwise(row))


def test_nothing_to_move_still_runs_and_is_recorded() -> None:
    schedule = _po_f()
    pipe = pipeline_for("gpt", schedule).with_offload(OffloadOptions(0.0))
    assert host_bytes(pipe.programs) == 0
    out = _run(pipe, "gpt", record=True)
    expected = _run(pipeline_for("gpt", schedule), "gpt")
    assert_same_arrays(dict(out.acc), dict(expected.acc))
    for rank in range(schedule.num_ranks):
        assert [e.action for e in out.events if e.rank == rank] == list(schedule.actions(rank))


# -- running ahead ---------------------------------------------------------------------------------------------------


def test_what_the_prediction_starts_after_an_offload_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """O takes a quarter of an F: it ends while the next F runs, so the one after waits for it, unless it is back by then."""
    pipe = compiled("gpt", circular(1, 2))
    schedule = _text("F0.0 O0.0 F0.1 O0.1 F0.2 F1.0 BW1.0 L0.0 BW0.0 F1.1 BW1.1 L0.1 BW0.1 F1.2 BW1.2 BW0.2")
    costs = CostProfile.uniform(2, chunks=2, f=2.0, b=2.0, w=2.0, offload_time=2.0)
    assert costs.offload_s[0] < costs.f_s[0]
    waited: list[int] = []

    def counting(arrays: Any) -> Any:
        waited.append(len(arrays))
        return transfer.wait_for_copies(arrays)

    monkeypatch.setattr(executor, "wait_for_copies", counting)
    ahead = pipe.with_schedule(schedule, replace(costs, offload_s=(0.0, 0.0), load_s=(0.0, 0.0)))
    expected = _run(ahead, "gpt")
    assert not waited
    with_waits = pipe.with_schedule(schedule, costs)
    (waits,) = (holds(p, simulate(schedule, costs)) for p in with_waits.programs)
    names = {str(with_waits.programs[0].instructions[k].action): [str(a) for a, _ in ends] for k, ends in waits.items()}  # type: ignore[union-attr]
    assert names == {"F0.2": ["O0.0"], "F1.0": ["O0.1"]}
    for record in (False, True):
        waited.clear()
        out = _run(with_waits, "gpt", record=record)
        assert waited == [len(with_waits.stages[0].offloaded)] * 2
        assert_same_arrays(dict(out.acc), dict(expected.acc))
    assert [e.action for e in out.events] == list(schedule.actions(0))


@given(seed=st.integers(0, 2**32), time=st.sampled_from([0.0, 0.2, 1.0, 5.0]))
def test_holds_wait_for_what_is_on_the_host_and_in_time_order(seed: int, time: float) -> None:
    schedule = random_schedule(circular(2, 2), 4, random.Random(seed), offload=0.6)
    costs = CostProfile.uniform(4, chunks=2, offload_time=time)
    timeline = simulate(schedule, costs)
    with jax.enable_x64(True):
        programs = lower(schedule, compiled("gpt", circular(2, 2)).stages)
    for program in programs:
        at = {e.action: e for e in timeline.events if e.rank == program.rank and e.lane != "send"}
        waits, earlier = holds(program, timeline), set()
        on_host: set[int] = set()
        for k, instruction in enumerate(program.instructions):
            for action, slots in waits.get(k, ()):
                assert set(slots) <= on_host and action not in earlier
                assert at[action].end_s <= at[instruction.action].start_s  # type: ignore[union-attr]
                earlier.add(action)
            on_host |= set(instruction.outputs) if type(instruction).__name__ == "Offload" else set()  # type: ignore[union-attr]
            on_host -= set(instruction.inputs) if type(instruction).__name__ == "Reload" else set()  # type: ignore[union-attr]
        assert time > 0 or not waits
