"""Messages between processes: one order for all, receives where it wants them, and the proof that nobody waits for ever.

Every verdict of the checker is compared with :func:`tests.support.rendezvous.left_over`, which plays the programs.
"""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxpipe.errors import ProgramError, RunError, ScheduleError
from jaxpipe.program import order
from jaxpipe.program.ir import Free, Instruction, Program, Recv, Run, Send, Value, message_of, writes
from jaxpipe.program.lower import lower
from jaxpipe.program.order import NATIVE, STRICT, TAGGED, Crossing, Lanes, check_transfers, issue_order
from jaxpipe.runtime.executor import Executor, StepInputs, StepOutputs
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.processes import Processes, ProcessGroup
from jaxpipe.runtime.transfer import LocalTransport, agree_on_programs, message_homes, message_numbers
from jaxpipe.schedule import (
    FAMILIES,
    Action,
    CostProfile,
    Event,
    Schedule,
    Timeline,
    Traversal,
    circular,
    generate,
    one_to_one,
    parse_schedule,
    simulate,
    traverse,
    with_span,
)
from jaxpipe.schedule.passes import with_reductions
from jaxpipe.schedule.text import parse_slot
from tests.support import rendezvous
from tests.support.bare_stages import bare_stages
from tests.support.pipelines import parameters, pipeline_for, random_batch, sized
from tests.support.processes import run_in_threads
from tests.support.rendezvous import Meeting, left_over
from tests.support.schedule_strategies import random_schedule, random_valid_schedules

SIZES = [(2, 6), (4, 8), (3, 7), (8, 16), (6, 24)]
RULES: tuple[Lanes, ...] = (TAGGED, ("directed",), ("pair",), ("four",), ("device",), NATIVE, STRICT)
OFTEN = ("v-zb", "po-f", "chimera")


def _orders(programs: Sequence[Program], crossing: Crossing) -> dict[int, list[tuple[int, int]]]:
    orders = {}
    for process in set(crossing.process_of):
        local_programs = [p for p in programs if crossing.process_of[p.rank] == process]
        orders[process] = [(local_programs[k].rank, at) for k, at in issue_order(local_programs, crossing.timeline)]
    return orders


def _left_over(programs: Sequence[Program], crossing: Crossing) -> list[str]:
    return left_over(programs, crossing.process_of, crossing.lanes, _orders(programs, crossing))


def _early(programs: Sequence[Program]) -> int:
    place_of_send = {message_of(p.rank, i): i.place for p in programs for i in p.instructions if isinstance(i, Send)}
    return sum(
        i.place < place_of_send[message_of(p.rank, i)] for p in programs for i in p.instructions if isinstance(i, Recv)
    )


# -- every family ----------------------------------------------------------------------------------------------------


@cache
def _generated(name: str, p: int, m: int) -> Schedule:
    try:
        return generate(name, p, m)
    except ScheduleError as error:
        pytest.skip(str(error))


def _cases() -> Iterator[object]:
    for name in FAMILIES:
        for p, m in SIZES:
            soak = (p, m) != (2, 6) and not ((p, m) == (4, 8) and name in OFTEN)
            yield pytest.param(name, p, m, id=f"{name}-p{p}-m{m}", marks=[pytest.mark.soak] * soak)


@pytest.mark.parametrize(("name", "p", "m"), list(_cases()))
def test_no_family_deadlocks(name: str, p: int, m: int) -> None:
    schedule = _generated(name, p, m)
    stages = bare_stages(schedule.placement)
    for uneven in (False, True):
        ops = {"f": 3.0, "b": 0.0, "w": 0.0} if uneven else {}
        costs = CostProfile.uniform(schedule.num_stages, chunks=schedule.num_chunks, **ops)
        crossing = Crossing(tuple(r // (1 + uneven) for r in range(p)), simulate(schedule, costs))
        programs = lower(schedule, stages, crossing=crossing)
        assert _early(programs) == 0
        for lanes in RULES:
            lanes_crossing = replace(crossing, lanes=lanes)
            check_transfers(programs, lanes_crossing)
            assert _left_over(programs, lanes_crossing) == []
        for lanes in (TAGGED, ("pair",), ("four",), NATIVE):
            lanes_crossing = replace(crossing, lanes=lanes, early=1)
            programs = lower(schedule, stages, crossing=lanes_crossing)
            assert _left_over(programs, lanes_crossing) == []
            crossings = sum(isinstance(i, Recv) and i.place >= 0 for q in programs for i in q.instructions)
            assert _early(programs) == crossings if lanes == TAGGED else _early(programs) > 0 or not crossings or uneven


def test_groups_of_microbatches_do_not_deadlock() -> None:
    schedule = traverse(with_span(one_to_one(3), {2: 2}), 8, Traversal("backward", in_flight_per_stage=4))
    for early in (0, 1):
        timeline = simulate(schedule, CostProfile.uniform(3))
        crossing = Crossing((0, 1, 2), timeline, STRICT if early == 0 else NATIVE, early)
        programs = lower(schedule, bare_stages(schedule.placement), crossing=crossing)
        assert _left_over(programs, crossing) == []


@given(schedule=random_valid_schedules(offload=True, braids=True, single_rank_stages=True), data=st.data())
def test_random_schedules_do_not_deadlock(schedule: Schedule, data: st.DataObject) -> None:
    crossing, stages = _draw_crossing(schedule, data)
    with _in_flight(data):
        programs = lower(schedule, stages, crossing=crossing)
        assert _left_over(programs, crossing) == []
        if crossing.early == 0:  # dispatched in the order of other costs, it is free of deadlock too
            costs = CostProfile.uniform(schedule.num_stages, chunks=schedule.num_chunks, f=1, b=3, w=0.1)
            check_transfers(programs, replace(crossing, timeline=simulate(schedule, costs), lanes=STRICT))


@given(schedule=random_valid_schedules(braids=True, single_rank_stages=True), data=st.data())
def test_the_checker_refuses_what_deadlocks_and_nothing_else(schedule: Schedule, data: st.DataObject) -> None:
    crossing, stages = _draw_crossing(schedule, data)
    programs = list(lower(schedule, stages))  # as in one process
    if data.draw(st.booleans()):
        programs = list(lower(schedule, stages, crossing=replace(crossing, lanes=TAGGED)))
        rng = random.Random(data.draw(st.integers(0, 2**32)))
        programs = [_shuffled(p, rng) for p in programs]
    with _in_flight(data):
        blocked = _left_over(programs, crossing)
        try:
            check_transfers(programs, crossing)
        except ProgramError as error:
            assert blocked, str(error)
            assert "waits to" in str(error)
        else:
            assert blocked == []


@contextmanager
def _in_flight(data: st.DataObject) -> Iterator[None]:
    """Let fewer computations be in flight, as if JAX did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "IN_FLIGHT", count := data.draw(st.sampled_from([1, 2, 32])))
        patch.setattr(rendezvous, "IN_FLIGHT", count)
        yield


def _draw_crossing(schedule: Schedule, data: st.DataObject) -> tuple[Crossing, Any]:
    p, n = schedule.num_ranks, schedule.num_stages
    process_of = tuple(data.draw(st.integers(0, p - 1)) for _ in range(p))
    if any(
        len({process_of[schedule.placement.ranks(s, i)[0]] for i in range(schedule.placement.num_flows)}) > 1
        for s in range(n)
    ):
        process_of = (0,) * p
    assume(schedule.placement.num_flows == 1 or schedule.placement.is_chain)  # others are not lowered
    seconds = [data.draw(st.sampled_from([0.0, 1.0, 2.5])) for _ in range(3)]
    costs = CostProfile.uniform(n, chunks=schedule.num_chunks, f=seconds[0], b=seconds[1], w=seconds[2])
    lanes = data.draw(st.sampled_from([*RULES, ("gate", "directed")]))
    crossing = Crossing(process_of, simulate(schedule, costs), lanes, data.draw(st.integers(0, 2)))
    return crossing, bare_stages(schedule.placement)


def _shuffled(program: Program, rng: random.Random) -> Program:
    """Return the program with some neighbouring transfers to and from other processes exchanged, at the same places."""
    instructions = list(program.instructions)
    at = [k for k, i in enumerate(instructions) if isinstance(i, Send | Recv) and i.place >= 0]
    for a, b in pairwise(at):
        if b == a + 1 and rng.random() < 0.3:
            _exchange(instructions, a, b)
    written = tuple(tuple(0 for _ in writes(i)) for i in instructions)
    return replace(program, instructions=tuple(instructions), written_bytes=written)


def _exchange(instructions: list[Instruction], a: int, b: int) -> None:
    one, other = instructions[a], instructions[b]
    assert isinstance(one, Send | Recv) and isinstance(other, Send | Recv)
    instructions[a], instructions[b] = replace(other, place=one.place), replace(one, place=other.place)


# -- mutants, in words -----------------------------------------------------------------------------------------------


def _written(*rows: str) -> tuple[list[Program], Timeline]:
    """A program a row: ``F0.0`` runs, and ``F0.0!`` reads all that was received before; ``>F0.0@1`` sends to rank 1, and
    ``<F1.0@1`` receives from it."""
    programs, events = [], []
    for rank, row in enumerate(rows):
        instructions: list[Instruction] = []
        full = [0]  # holds what is made and sent
        for word in row.split():
            name, _, peer = word.strip("<>!").partition("@")
            action = parse_slot(name)
            assert isinstance(action, Action)
            if word[0] == ">":
                instructions.append(Send(action, (0,), (), int(peer)))
            elif word[0] == "<":
                full.append(len(full))
                instructions.append(Recv(action, (), (full[-1],), int(peer)))
            else:
                events.append(Event(rank, "compute", action, len(instructions), len(instructions) + 1.0))
                instructions.append(Run(action, tuple(full) if word[-1] == "!" else (0,), (0,)))
        instructions.append(Free(tuple(full)))
        written = tuple(tuple(0 for _ in writes(i)) for i in instructions)
        programs.append(Program(rank, tuple(instructions), 9, ((Value("acc", 0, 0, 0), 0),), (), (0,), written))
    return programs, Timeline("written", len(rows), tuple(events), (), ())


MUTANTS: dict[str, tuple[tuple[str, ...], tuple[int, ...], set[str], str]] = {
    # programs, the process of each, the lanes on which they deadlock, and in what words
    "both send first": (
        ("F0.0 >F0.0@1 <F1.0@1", "F1.0 >F1.0@0 <F0.0@0"),
        (0, 1),
        {"pair", "fifo"},
        "rank 0 waits to send F0.0 to rank 1, which waits to send F1.0 to rank 0",
    ),
    "both receive first": (
        ("<B1.0@1 F0.0! >F0.0@1", "<F0.0@0 F1.0! B1.0 >B1.0@0"),
        (0, 1),
        {"tagged", "directed", "pair", "four", "fifo"},
        "rank 0 waits to receive B1.0 from rank 1, which waits to receive F0.0 from rank 0",
    ),
    "received in another order": (
        ("F0.0 >F0.0@1 F0.1 >F0.1@1", "<F0.1@0 <F0.0@0 F1.1"),
        (0, 1),
        {"directed", "pair", "four", "fifo"},
        "rank 0 waits to send F0.0 to rank 1, which waits to receive F0.1 from rank 0",
    ),
    "three in a ring": (
        ("F0.0 >F0.0@1 <F2.0@2", "F1.0 >F1.0@2 <F0.0@0", "F2.0 >F2.0@0 <F1.0@1"),
        (0, 1, 2),
        {"fifo"},
        "rank 0 waits to send F0.0 to rank 1, which waits to send F1.0 to rank 2, which waits to send F2.0 to rank 0",
    ),
    "through two ranks of a process": (
        ("F0.0 >F0.0@2 <F2.0@2", "F1.0", "F2.0 >F2.0@0 <F0.0@0", "F3.0"),
        (0, 0, 1, 1),
        {"pair", "fifo"},
        "rank 0 waits to send F0.0 to rank 2, which waits to send F2.0 to rank 0",
    ),
    "between ranks of two processes": (
        ("F0.0 >F0.0@2", "<F3.0@3 F1.0", "<F0.0@0 F2.0", "F3.0 >F3.0@1"),
        (0, 0, 1, 1),
        {"pair", "fifo"},
        "rank 0 waits to send F0.0 to rank 2, in whose process rank 3 waits to send F3.0 to rank 1",
    ),
    "the fifth waits on the first one's stream": (
        (
            "<B1.0@1 F0.0 >F0.0@2 F0.1 >F0.1@2 F0.2 >F0.2@2 F0.3 >F0.3@1 B0.0!",
            "<F0.3@0 F1.3! B1.0 >B1.0@0",
            "<F0.0@0 <F0.1@0 <F0.2@0 F2.2!",
        ),
        (0, 1, 2),
        {"four", "pair", "fifo"},
        "rank 0 waits to receive B1.0 from rank 1, which waits to receive F0.3 from rank 0",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("rule", ["tagged", "directed", "pair", "four", "fifo"])
def test_mutants_are_refused_with_the_circle(mutant: str, rule: Any) -> None:
    rows, process_of, deadlocks_on, words = MUTANTS[mutant]
    programs, timeline = _written(*rows)
    crossing = Crossing(process_of, timeline, () if rule == "tagged" else (rule,))
    assert bool(_left_over(programs, crossing)) is (rule in deadlocks_on)
    if rule in deadlocks_on:
        with pytest.raises(ProgramError, match="can wait for each other for ever") as raised:
            check_transfers(programs, crossing)
        assert f"(lanes: {rule}): {words}; start them in one order" in str(raised.value)
    else:
        check_transfers(programs, crossing)


def test_a_schedule_as_lowered_for_one_process() -> None:
    schedule = generate("1f1b", 4, 8)
    stages = bare_stages(schedule.placement)
    crossing = Crossing((0, 1, 2, 3), simulate(schedule, CostProfile.uniform(4)), TAGGED)
    programs = lower(schedule, stages)
    check_transfers(programs, crossing)
    words = r"rank 0 waits to send F0\.\d to rank 1, which waits to send BW1\.\d to rank 0"
    with pytest.raises(ProgramError, match=words):
        check_transfers(programs, replace(crossing, lanes=("pair",)))
    assert lower(schedule, stages, crossing=replace(crossing, process_of=(0, 0, 0, 0))) == programs, "nothing crosses"


def test_lost_messages_and_other_shapes_are_refused() -> None:
    schedule = generate("1f1b", 2, 2)
    crossing = Crossing((0, 1), simulate(schedule, CostProfile.uniform(2)))
    first, second = lower(schedule, bare_stages(schedule.placement), crossing=crossing)
    at = next(k for k, i in enumerate(second.instructions) if isinstance(i, Recv))
    received = second.instructions[at]
    assert isinstance(received, Recv)
    other = replace(received, avals=(jax.ShapeDtypeStruct((3,), "float32"),))
    edits: list[tuple[tuple[Instruction, ...], str]] = [
        ((), r"rank 0 sends 1 arrays of F0\.0 float32\[2\] to rank 1, which does not receive them"),
        ((other,), r"rank 1 receives 1 arrays of F0\.0 float32\[3\] from rank 0, which does not send them"),
    ]
    for new, words in edits:
        instructions = (*second.instructions[:at], *new, *second.instructions[at + 1 :])
        edited = replace(
            second, instructions=instructions, written_bytes=tuple((0,) * len(writes(i)) for i in instructions)
        )
        with pytest.raises(ProgramError, match=words):
            check_transfers([first, edited], crossing)


# -- threads as processes, through the runtime -----------------------------------------------------------------------


class _Rendezvous:
    """The transport of one process: both ends of a message from process to process block until the other comes."""

    def __init__(
        self, process: int, crossing: Crossing, numbers: Any, mail: LocalTransport, meeting: Meeting, sleeps_s: float
    ) -> None:
        self._message = {n: m for m, n in numbers.items()}
        self._process, self._crossing, self._mail, self._meeting = process, crossing, mail, meeting
        self._rng, self._sleeps_s = random.Random(process), sleeps_s

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        self._mail.send(message, dst, arrays)
        self._meet(message)

    def recv(self, message: int) -> Sequence[jax.Array]:
        self._meet(message)
        return self._mail.recv(message)

    def clear(self, begun: Sequence[int] = ()) -> None:
        pass

    def _meet(self, message: int) -> None:
        if self._crossing.crosses(self._message[message]):
            time.sleep(self._rng.uniform(0, self._sleeps_s))
            self._meeting.meet(self._process, self._message[message])


Found = dict[int, StepOutputs | Exception]


def _run_apart(
    name: str, pipe: Pipeline, programs: Sequence[Program], crossing: Crossing, sleeps_s: float = 0.0
) -> Found:
    """Run one step with a thread a process; each sleeps for a random time before each message."""
    numbers = message_numbers(programs)
    mail, processes = LocalTransport(message_homes(programs, pipe.submeshes, numbers)), sorted(set(crossing.process_of))
    meeting = Meeting(len(processes))
    inputs = pipe.step_inputs(
        pipe.place(parameters(name)),
        {at: pipe.zeros(at) for at in pipe.own_instances},
        random_batch(pipe.schedule.num_microbatches),
    )
    outcomes: Found = {}

    def work(process: int) -> None:
        local_programs = [p for p in programs if crossing.process_of[p.rank] == process]
        ranks = {p.rank for p in local_programs}
        local_inputs = [{k: v for k, v in of.items() if k[0] in ranks} for of in (inputs.params, inputs.acc)]
        transport = _Rendezvous(process, crossing, numbers, mail, meeting, sleeps_s)
        order = issue_order(local_programs, crossing.timeline)
        executor = Executor(
            local_programs, order, pipe.functions, pipe.submeshes, transport, all_programs=programs, braids=pipe.braids
        )
        try:
            with jax.enable_x64(True):
                outcomes[process] = executor.run(StepInputs(local_inputs[0], local_inputs[1], inputs.data, inputs.keys))
        except Exception as error:
            outcomes[process] = error
        finally:
            meeting.end()

    threads = [threading.Thread(target=work, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _assert_same_bits(
    name: str, pipe: Pipeline, programs: Sequence[Program], crossing: Crossing, sleeps_s: float = 0.0
) -> None:
    outcomes = _run_apart(name, pipe, programs, crossing, sleeps_s)
    zeros = {at: pipe.zeros(at) for at in pipe.own_instances}
    single = pipe.run(pipe.place(parameters(name)), zeros, random_batch(pipe.schedule.num_microbatches))
    for process, out in outcomes.items():
        assert isinstance(out, StepOutputs), out
        for at, buffers in out.acc.items():
            assert crossing.process_of[at[0]] == process
            for a, b in zip(buffers, single.acc[at], strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("family", "p", "m", "each"),
    [
        *[("zb-h1", 2, 4, 1), ("v-zb", 2, 4, 1)],
        *(
            pytest.param(family, 4, 8, each, marks=pytest.mark.soak)
            for family in ("1f1b", "gis", "v-zb", "po-f", "stp", "interleaved-1f1b")
            for each in (1, 2)
        ),
    ],
)
def test_processes_that_meet_for_each_message_get_the_same_bits(family: str, p: int, m: int, each: int) -> None:
    """And what was lowered for one process deadlocks there, as the checker says."""
    schedule = generate(family, p, m)
    name = sized("gpt", schedule)
    pipe = pipeline_for(name, schedule)
    crossing = Crossing(tuple(rank // each for rank in range(p)), pipe.predicted_timeline())
    programs = lower(schedule, pipe.stages, pipe.braids, crossing)
    _assert_same_bits(name, pipe, programs, crossing)
    with pytest.raises(ProgramError, match="can wait for each other for ever"):
        check_transfers(pipe.programs, crossing)
    stuck = _run_apart(name, pipe, pipe.programs, crossing)
    assert all(isinstance(out, RunError) and "wait for each other" in str(out) for out in stuck.values()), stuck


@pytest.mark.soak
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", range(100))
def test_random_schedules_on_three_processes_that_sleep(seed: int) -> None:
    rng = random.Random(seed)
    placement = circular(3, 2 if seed % 2 else 1)
    schedule = random_schedule(placement, rng.randint(1, 6), rng, offload=0.2, braid=0.3)
    name = sized("gpt", schedule)
    pipe = pipeline_for(name, schedule)
    costs = CostProfile.uniform(placement.num_stages, f=rng.random(), b=rng.random(), w=rng.random())
    crossing = Crossing((0, 1, 2), simulate(schedule, costs))
    _assert_same_bits(name, pipe, lower(schedule, pipe.stages, pipe.braids, crossing), crossing, 0.01)


# -- at scale --------------------------------------------------------------------------------------------------------


class _Counted(tuple[Event, ...]):
    """Events that count how many of them are looked at."""

    visits = 0

    def __iter__(self) -> Iterator[Event]:
        self.visits += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        result = super().__getitem__(at)
        self.visits += len(result) if isinstance(at, slice) else 1
        return result


def test_work_for_an_action_does_not_grow_with_ranks() -> None:
    work = []
    for p in (4, 16):
        schedule = generate("1f1b", p, 4 * p)
        timeline = simulate(schedule, CostProfile.uniform(p, comm=0.1))
        events = _Counted(timeline.events)
        counts: Counter[str] = Counter()
        crossing, stages = (
            Crossing(tuple(range(p)), replace(timeline, events=events), TAGGED, 1),
            bare_stages(schedule.placement),
        )
        sys.setprofile(lambda _, kind, __, counts=counts: counts.update([kind]))
        try:
            lower(schedule, stages, crossing=crossing)
        finally:
            sys.setprofile(None)
        num_actions = sum(map(len, schedule.rows))
        work.append((events.visits / len(events), (counts["call"] + counts["c_call"]) / num_actions))
    (few_visits, few_calls), (many_visits, many_calls) = work
    assert many_visits <= 1.1 * few_visits
    assert many_calls <= 1.15 * few_calls


# -- agreement before the first step ----------------------------------------------------------------------------------


def _agreement(monkeypatch: pytest.MonkeyPatch, follower: dict[str, Any]) -> set[str]:
    """Let two processes that share the ranks of a V agree on what they issue; return what they say. ``follower``: how process 1
    differs: in the ``costs`` of its first stage, in where its ``rows`` reduce, in its ``programs``, or in its ``order``."""
    schedule = generate("v-zb", 2, 4)
    reduced = str(with_reductions(schedule))
    costs = CostProfile.uniform(4, chunks=2, comm=0.1)
    monkeypatch.setattr(ProcessGroup, "ranks", lambda self, count: (range(count),) * self.number)

    def agree(processes: Processes) -> None:
        change = follower if processes.mine else {}
        own_costs = replace(costs, f_s=(change.get("costs", 1.0) * costs.f_s[0], *costs.f_s[1:]))
        timeline = simulate(schedule, own_costs)
        issued = parse_schedule(reduced.replace(*change.get("rows", ("", ""))))
        crossing = Crossing((0, 0), timeline, TAGGED, 1)
        programs = lower(issued, bare_stages(schedule.placement), crossing=crossing, reduced=range(4))
        edit_programs, edit_order = change.get("programs", tuple), change.get("order", tuple)
        agree_on_programs(processes, edit_programs(programs), lambda local: edit_order(issue_order(local, timeline)))

    return {str(error) for error in run_in_threads(2, agree)}


def test_members_of_a_row_issue_their_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _agreement(monkeypatch, {}) == {"None"}
    for follower in ({"costs": 1.3}, {"order": _with_two_exchanged}):
        (message,) = _agreement(monkeypatch, follower)
        assert re.match(r"process 1 .*issues what rank 0 to 1 runs in another order than process 0", message), message
    (message,) = _agreement(monkeypatch, {"rows": ("W3.3 R3.0 B0.3", "W3.3 B0.3 R3.0")})
    assert re.match(r"process 1 .*has programs=", message), message
    (message,) = _agreement(monkeypatch, {"programs": _without_last_instruction})
    assert re.match(r"process 1 .*has programs=|process 1 .*has other programs than process 0", message), message


def test_members_of_a_row_reduce_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroup, "ranks", lambda self, count: (range(2), range(2, count), range(2)))

    def agree(processes: Processes) -> None:
        processes.require_equal_in_rows("ranks", 4, processes.ranks(4)[processes.mine][0])
        stages_reduced = [[0, 0]] if processes.mine == 2 else [[0, 0], [1, 1]]
        processes.require_equal_in_rows("reductions", 4, stages_reduced)

    (message,) = {str(error) for error in run_in_threads(3, agree)}
    assert re.match(r"process 2 .*has other reductions than process 0", message), message


def _with_two_exchanged(pairs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (pairs[0], pairs[2], pairs[1], *pairs[3:])


def _without_last_instruction(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    return (replace(programs[0], instructions=programs[0].instructions[:-1]), *programs[1:])
