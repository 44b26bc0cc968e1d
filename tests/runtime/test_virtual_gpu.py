"""Recorded steps on GPUs of a virtual clock: what was measured on a card, and what the recorder makes of known durations.

Costs and steps are those of an H200 (scripts/results/gpu-h200.json; rank 1 of 4 alone, m=8, two stages a rank).
F, B and W are scaled so that a step without offload takes what was measured: alone they were timed on ones.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.recorder import DeviceClock, Recorder, measured_timeline, replay_ratio
from jaxpipe.runtime.transfer import OffloadOptions
from jaxpipe.schedule import Action, CostProfile, Schedule, generate, op_spec, simulate
from models.gpt import GPT
from tests.support.virtual_gpu import H200, VirtualGPUs

RANKS, M = 4, 8
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "po-h": ("po-h", {}),
    "po-f": ("po-f", {}),
    "ada-offload": ("ada-offload", {"chunks": 2, "memory_limit": 2.0}),
    "with syncs": ("ada-offload", {"chunks": 2, "memory_limit": 1.25}),
}


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return pipeline_of(generate("po", RANKS, M))


def pipeline_of(schedule: Schedule) -> Pipeline:
    return Pipeline.build(
        GPT(vocab_size=17, d_model=16, num_layers=schedule.num_stages, num_heads=2, seq_len=8, mlp_ratio=2),
        schedule,
        microbatch_size=2,
        compute_dtype=jnp.float32,
        recompute="flash",
        offload=OffloadOptions(fallback=True, in_parts=True),
    )


def step_s(pipe: Pipeline, schedule: Schedule, costs: CostProfile) -> float:
    """Return the seconds of a step of rank 1 alone."""
    return VirtualGPUs(pipe.with_schedule(schedule, costs), costs, rank=1, shared_streams=False).run().step_s


@pytest.mark.parametrize("hidden", H200)
def test_steps_take_what_they_took_on_a_card(pipe: Pipeline, hidden: int) -> None:
    costs = H200[hidden].costs()
    assert step_s(pipe, generate("po", RANKS, M), costs) == pytest.approx(H200[hidden].step_s["po"], rel=0.01)
    for family in ("po-h", "po-f"):
        order_of_free_copies = generate(family, RANKS, M)
        assert step_s(pipe, order_of_free_copies, costs) == pytest.approx(H200[hidden].step_s[family], rel=0.1)


@pytest.mark.parametrize("hidden", H200)
def test_an_order_that_knows_the_link_hides_its_copies(pipe: Pipeline, hidden: int) -> None:
    costs = H200[hidden].costs()
    for family in ("po-h", "po-f"):
        order = generate(family, RANKS, M, costs=costs)
        assert step_s(pipe, order, costs) <= 1.13 * H200[hidden].step_s["po"] < 0.95 * H200[hidden].step_s[family]
        in_pipeline_s = VirtualGPUs(pipe.with_schedule(order, costs), costs).run().step_s
        assert in_pipeline_s <= 1.015 * simulate(order, costs).makespan


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hidden", H200)
def test_recorded_durations_are_those_of_functions_and_copies(pipe: Pipeline, hidden: int, family: str) -> None:
    """A load is given no wait for its memory, a backward none for its load."""
    costs = H200[hidden].costs()
    name, options = FAMILIES[family]
    schedule = generate(name, RANKS, M, costs=costs, **options)
    running = pipe.with_schedule(schedule, costs)
    outputs = VirtualGPUs(running, costs, shared_streams=False, host_s=1e-6).run()
    durations: dict[str, list[float]] = defaultdict(list)
    for event in outputs.events:
        durations[event.action.actions[0].op].append(event.end_s - event.start_s)
    assert set(durations) == {"F", "B", "W", "O", "L", *["S"] * (family == "with syncs")}
    assert not any(durations["S"])
    fields = {"F": costs.f_s, "B": costs.b_s, "W": costs.w_s, "O": costs.offload_s, "L": costs.load_s}
    for op, seconds in fields.items():
        assert durations[op] == pytest.approx([seconds[0]] * len(durations[op]), rel=0.01), op
    timeline = measured_timeline(schedule, costs, outputs.events)
    assert replay_ratio(schedule, timeline, outputs.step_s) == pytest.approx(1, abs=0.01)
    # A backward that has to wait for its load begins when those arrays are there that it reads: the prediction lets it wait for
    # all of them.
    sooner = 0.05 if family == "with syncs" else 0.01
    assert 1 - sooner <= outputs.step_s / simulate(schedule, costs).makespan <= 1.01


class Clock(DeviceClock):
    """Shows ``now_s``, and arrays that say when they are ready."""

    now_s = 0.0

    def __init__(self) -> None:
        super().__init__(loads_follow_compute=True)
        self._thread = threading.local()

    def now(self) -> float:
        return self.now_s

    def when_ready(self, arrays: Sequence[Any]) -> float:
        self._thread.waited_s = max(getattr(self._thread, "waited_s", 0.0), *(array.ready_s for array in arrays))
        return float(self._thread.waited_s)


def test_a_part_of_a_load_follows_its_part_of_the_offload() -> None:
    """Parts of a load that began before the whole offload had ended were given the rest of their time."""
    clock = Clock()
    done = [("F", 0, 1), ("O", 0, 3), ("O", 2, 9), ("L", 4, 6), ("L", 5, 11), ("B", 11, 12)]
    with Recorder(1, clock) as recorder:
        for op, dispatched_s, ready_s in done:
            clock.now_s = dispatched_s
            array = SimpleNamespace(ready_s=ready_s, block_until_ready=None)
            recorder.dispatched(0, op_spec(op).lane, Action(op, 0, 0), [array], dispatched_s)
    spans = {event.action.op: (event.start_s, event.end_s) for event in recorder.events()}
    assert spans == {"F": (0, 1), "O": (1, 9), "L": (11 - 2 - 2, 11), "B": (11, 12)}


@pytest.mark.parametrize("ranks, m", [(2, 7), (4, 9)])
def test_a_step_takes_what_a_replay_of_its_durations_does(ranks: int, m: int) -> None:
    """No rank waits for another's copies: not for the host, which waits for their memory, nor for what nobody reads yet."""
    uniform = CostProfile.uniform(2 * ranks, f=2.9e-3, b=3.6e-3, w=3e-3)
    pipes: dict[Any, Pipeline] = {}
    for k, (name, options) in product([0.3, 1, 3], [*FAMILIES.values(), ("stp-offload", {})]):
        copies_s = (k / 2 * (uniform.f_s[0] + uniform.b_s[0] + uniform.w_s[0]),) * 2 * ranks
        costs = replace(uniform, offload_s=copies_s, load_s=copies_s)
        schedule = generate(name, ranks, m, costs=costs, **options)
        flows = schedule.placement.flows
        pipes[flows] = pipes.get(flows) or pipeline_of(schedule)
        running = pipes[flows].with_schedule(schedule, costs)
        outputs = VirtualGPUs(running, costs, shared_streams=False, host_s=1e-6).run()
        timeline = measured_timeline(schedule, costs, outputs.events)
        assert replay_ratio(schedule, timeline, outputs.step_s) == pytest.approx(1, abs=0.01), (name, k)


def test_recorded_durations_of_braids_are_those_of_their_parts() -> None:
    costs = H200[4096].costs()
    schedule = generate("stp-offload", RANKS, M, costs=costs)
    pipe = pipeline_of(schedule)
    outputs = VirtualGPUs(pipe, costs, shared_streams=False, host_s=1e-6).run()
    assert {len(event.action.actions) for event in outputs.events} == {1, 2}
    for event in outputs.events:
        seconds = sum(costs.seconds(op_spec(a.op).cost, a.stage) for a in event.action.actions)
        assert event.end_s - event.start_s == pytest.approx(seconds, rel=0.01), event.action
    timeline = measured_timeline(schedule, costs, outputs.events)
    assert replay_ratio(schedule, timeline, outputs.step_s) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("hidden", H200)
def test_copies_in_parts_do_not_hold_up_what_shares_their_streams(pipe: Pipeline, hidden: int) -> None:
    """A send behind a whole copy of 11 ms waited for it: a step of the pipeline took up to a fifth longer."""
    costs = H200[hidden].costs()
    order = generate("po-f", RANKS, M, costs=costs)
    whole = pipe.with_offload(OffloadOptions(fallback=True))

    def step_s(pipe: Pipeline, *, shared: bool) -> float:
        return VirtualGPUs(pipe.with_schedule(order, costs), costs, shared_streams=shared).run().step_s

    alone_s = step_s(whole, shared=False)
    assert step_s(pipe, shared=False) == pytest.approx(alone_s, rel=5e-3)
    assert step_s(pipe, shared=True) <= 1.01 * alone_s < 0.99 * step_s(whole, shared=True)
