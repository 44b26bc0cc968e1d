"""Lowering: programs are checked, tight in slots, and every corruption is caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import ProgramError
from jaxpipe.program.ir import (
    Free,
    Offload,
    Program,
    Recv,
    Reload,
    Run,
    Send,
    Sync,
    check_programs,
    drops,
    reads,
    writes,
)
from jaxpipe.program.lower import lower
from jaxpipe.program.order import TAGGED, Crossing, holds, issue_order, messages_arrived
from jaxpipe.runtime.transfer import message_numbers
from jaxpipe.schedule import (
    CostProfile,
    Traversal,
    circular,
    explicit,
    generate,
    one_to_one,
    register_op,
    simulate,
    traverse,
    with_shared,
    with_span,
)
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.ir import F as F_SPEC
from tests.support.bare_stages import bare_stages
from tests.support.pipelines import compiled, some_schedule
from tests.support.schedule_strategies import random_schedule

pytestmark = pytest.mark.usefixtures("x64")


def _programs(name: str = "zb-h1") -> list[Program]:
    pipe = compiled("gpt", circular(2, 1))
    return list(lower(generate(name, 2, 4), pipe.stages))


def _at(program: Program, kind: type, n: int = 0) -> int:
    return [k for k, i in enumerate(program.instructions) if isinstance(i, kind)][n]


def _edit(program: Program, k: int, *new: Any) -> Program:
    instructions = (*program.instructions[:k], *new, *program.instructions[k + 1 :])
    written = tuple(tuple(0 for _ in writes(i)) for i in instructions)
    return replace(program, instructions=instructions, written_bytes=written)


def test_runs_follow_the_rows() -> None:
    schedule = generate("zb-h1", 2, 4)
    for rank, program in enumerate(_programs()):
        runs = [i.action for i in program.instructions if isinstance(i, Run)]
        assert runs == list(schedule.actions(rank))


def test_programs_print_slots_and_values() -> None:
    text = str(_programs()[0])
    assert text.startswith("program of rank 0: ")
    assert (
        "Run F0.0 (" in text and "Send F0.0 to rank 1" in text and "Recv B1.0 from rank 1" in text and "Free (" in text
    )


@given(seed=st.integers(0, 2**32), m=st.integers(1, 6), which=st.integers(0, 1))
def test_random_schedules_lower_to_tight_programs(seed: int, m: int, which: int) -> None:
    import jax

    placement = [circular(2, 2), circular(3, 1)][which]
    schedule = random_schedule(placement, m, random.Random(seed), offload=0.3, braid=0.3)
    with jax.enable_x64(True):
        programs = lower(schedule, compiled("gpt", placement).stages)
    for program in programs:
        live, most = {slot for _, slot in program.bound}, len(program.bound)
        last_read = {s: k for k, i in enumerate(program.instructions) for s in reads(i)}
        for k, instruction in enumerate(program.instructions):
            live |= set(writes(instruction))
            most = max(most, len(live))
            live -= set(drops(instruction))
            if isinstance(instruction, Free):  # nothing outlives its last reader: the read is in the instruction before
                before = program.instructions[k - 1]
                assert set(instruction.slots) <= set(reads(before)) | set(writes(before))
                assert all(last_read.get(s, 0) >= 0 for s in instruction.slots)
        assert program.num_slots == most, "slots are reused"
    timeline = simulate(schedule, CostProfile.uniform(placement.num_stages))
    _check_order(programs, issue_order(programs, timeline))


@pytest.mark.parametrize("family", ["1f1b", "v-zb", "chimera", "stp"])
def test_outlines_tell_what_programs_of_other_processes_do(family: str) -> None:
    schedule = generate(family, 4, 8)
    stages, timeline = bare_stages(schedule.placement), simulate(schedule, CostProfile.uniform(schedule.num_stages))
    crossing = Crossing((0, 0, 1, 2), timeline, TAGGED, 1)
    reduced = range(schedule.num_stages)
    programs = lower(schedule, stages, crossing=crossing, reduced=reduced)
    own = {2}
    outlines = lower(schedule, stages, crossing=crossing, ranks=own, reduced=reduced)
    assert all(
        str(program).count("  Reduce R") == len(schedule.placement.stages_of(program.rank)) for program in outlines
    )
    assert [p.rank for p in outlines] == [0, 1, 2, 3]
    assert outlines[2] == programs[2]
    assert message_numbers(outlines) == message_numbers(programs)
    arrived = [messages_arrived(each) for each in (programs, outlines)]
    of_own = [{at: messages for at, messages in each.items() if at[0] in own} for each in arrived]
    assert of_own[0] == of_own[1] != {}
    for rank in {0, 1, 3}:
        steps = [i for i in programs[rank].instructions if not isinstance(i, Free)]
        assert list(map(_names, outlines[rank].instructions)) == list(map(_names, steps))
        losses = [sorted(v for v, _ in each[rank].results if v.kind == "loss") for each in (programs, outlines)]
        assert losses[0] == losses[1]
        for outlined, step in zip(outlines[rank].instructions, steps, strict=True):
            if isinstance(step, (Send, Recv)) and own & {rank, step.dst if isinstance(step, Send) else step.src}:
                assert isinstance(outlined, (Send, Recv))
                assert outlined.avals == step.avals
    for local in ([0, 1], [3]):
        orders = [issue_order([each[rank] for rank in local], timeline) for each in (programs, outlines)]
        ran = [
            [each[local[k]].instructions[at] for k, at in order]
            for order, each in zip(orders, (programs, outlines), strict=True)
        ]
        assert [_names(i) for i in ran[0] if not isinstance(i, Free)] == list(map(_names, ran[1]))


def _names(instruction: Any) -> str:
    return str(instruction).partition("(")[0].strip()


def _check_order(programs: Any, order: Any) -> None:
    positions = [0] * len(programs)
    sends = set()
    for k, at in order:
        assert at == positions[k], "each program in its own order"
        positions[k] += 1
        instruction = programs[k].instructions[at]
        if isinstance(instruction, Send):
            sends.add((programs[k].rank, instruction.action))
        if isinstance(instruction, Recv):
            assert (instruction.src, instruction.action) in sends, "a receive comes after its send"
    assert positions == [len(p.instructions) for p in programs]


def test_issue_order_follows_simulated_time() -> None:
    programs = _programs()
    timeline = simulate(generate("zb-h1", 2, 4), CostProfile.uniform(2, f=1, b=2, w=1))
    start = {(e.rank, e.action): e.start_s for e in timeline.events}
    runs = [
        (programs[k].rank, programs[k].instructions[at].action)  # type: ignore[union-attr]
        for k, at in issue_order(programs, timeline)
        if isinstance(programs[k].instructions[at], Run)
    ]
    times = [start[run] for run in runs]
    assert times == sorted(times)


def test_a_load_that_may_hold_up_the_host_is_issued_when_it_is_due() -> None:
    """Issued with the run before it, its wait for an offload held up all that other ranks had to run until then."""
    costs = CostProfile.uniform(8, f=3, b=4, w=3, offload_time=1.5)
    schedule = generate("po-f", 4, 8, costs=costs)
    programs, timeline = lower(schedule, bare_stages(schedule.placement)), simulate(schedule, costs)
    start = {(e.rank, e.action): e.start_s for e in timeline.events}
    waits = {(k, at) for k, program in enumerate(programs) for at in holds(program, timeline)}
    times = [
        start[programs[k].rank, action]
        for k, at in issue_order(programs, timeline)
        if isinstance(i := programs[k].instructions[at], Run) or (k, at) in waits
        for action in [i.action]
    ]
    assert times == sorted(times)


def test_two_ranks_that_wait_for_one_action_both_get_its_message() -> None:
    placement = explicit(4, [3, 0, 1, 2], edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
    schedule = traverse(placement, 3, Traversal("backward"))
    programs = lower(schedule, bare_stages(placement))
    _check_order(programs, issue_order(programs, simulate(schedule, CostProfile.uniform(4, f=0, b=0, w=0))))


def test_one_process_of_several_issues_its_own_ranks() -> None:
    programs = _programs()
    order = issue_order(programs[1:], simulate(generate("zb-h1", 2, 4), CostProfile.uniform(2)))
    assert [at for _, at in order] == list(range(len(programs[1].instructions)))


def test_predicted_memory_counts_what_is_held() -> None:
    pipe = compiled("gpt", circular(2, 1))
    reports = [pipe.with_schedule(generate("gpipe", 2, m)).memory_report(workspace=False) for m in (1, 8)]
    stage = pipe.stages[0]
    peak_bytes = [report.ranks[0].live_peak_bytes for report in reports]
    per_microbatch = (peak_bytes[1] - peak_bytes[0]) / 7
    data = 8 * 4 * 2  # tokens int32 of one microbatch
    assert stage.residual_bytes <= per_microbatch <= stage.residual_bytes * 1.05 + data
    assert peak_bytes[0] > 2 * stage.param_bytes, "parameters and accumulators count"


def _swap(kind: type, n: int, make: Callable[[Any], tuple[Any, ...]]) -> Callable[[Program], Program]:
    """Replace the n-th instruction of a kind by what ``make`` makes of it."""

    def edit(program: Program) -> Program:
        k = _at(program, kind, n)
        return _edit(program, k, *make(program.instructions[k]))

    return edit


MUTANTS = {
    "leak": (_swap(Free, 0, lambda i: ()), "which is full|still full at the end"),
    "early free": (_swap(Run, 2, lambda i: (Free(i.inputs[-1:]), i)), "which is empty"),
    "slot out of range": (_swap(Free, 0, lambda i: (Free((10**6,)),)), r"outside 0\.\."),
    "lost send": (_swap(Send, 0, lambda i: ()), "does not send them"),
    "send twice": (_swap(Send, 0, lambda i: (i, i)), "2 times"),
    "filled while full": (_swap(Run, 0, lambda i: (i, i)), "which is full"),
    "freed twice": (_swap(Free, 0, lambda i: (i, i)), "is empty"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_checker_catches(mutant: str) -> None:
    programs = _programs()
    check_programs(programs)
    make, message = MUTANTS[mutant]
    with pytest.raises(ProgramError, match=message):
        check_programs([make(programs[0]), programs[1]])


HOST_MUTANTS: dict[str, tuple[type, Callable[[Any], tuple[Any, ...]], str]] = {
    "computes on the host": (
        Offload,
        lambda i: (i, Run(Action("B", 0, 0), i.outputs, ())),
        r"Run B0\.0 .* on the host",
    ),
    "sends from the host": (Offload, lambda i: (i, Send(i.action, i.outputs, (), 0)), r"Send .* on the host"),
    "offloads from the host": (
        Offload,
        lambda i: (i, Offload(i.action, i.outputs, i.inputs)),
        r"Offload .* on the host",
    ),
    "loads from the device": (Offload, lambda i: (Reload(i.action, i.inputs, i.outputs),), r"Reload .* on the device"),
    "waits for the device": (Offload, lambda i: (Sync(i.action, i.inputs), i), r"Sync .* on the device"),
}


@pytest.mark.parametrize("mutant", HOST_MUTANTS)
def test_checker_knows_where_arrays_are(mutant: str) -> None:
    programs = list(lower(generate("po-f", 2, 4), compiled("gpt", circular(2, 2)).stages))
    check_programs(programs)
    kind, make, message = HOST_MUTANTS[mutant]
    with pytest.raises(ProgramError, match=message):  # rank 1: the first stage keeps nothing
        check_programs([programs[0], _swap(kind, 0, make)(programs[1])])


def test_lost_receive_is_caught() -> None:
    programs = _programs()
    with pytest.raises(ProgramError, match="does not receive them"):
        check_programs([programs[0], _edit(programs[1], _at(programs[1], Recv))])


def test_refuses_what_does_not_fit() -> None:
    stages = compiled("gpt", circular(2, 1)).stages
    with pytest.raises(ProgramError, match=r"4 stages.*2"):
        lower(generate("1f1b", 4, 4), stages)
    with pytest.raises(ProgramError, match="stage 1 is spread over ranks 0, 1"):
        lower(_forward_and_backward(with_shared(one_to_one(2), [1])), stages)
    with pytest.raises(ProgramError, match="has span 2 for stage 1, whose layers have span 1 "):
        lower(traverse(with_span(one_to_one(2), {1: 2}), 2, Traversal("forward")), stages)
    with pytest.raises(ProgramError, match="edges 1->0 between stages; the model's, by what its layers take, are 0->1"):
        lower(some_schedule(explicit(2, [0, 1], edges=[(1, 0)])), stages)


def test_refuses_an_op_that_no_stage_has() -> None:
    register_op(replace(F_SPEC, name="Gather", required=False, sends="none", memory=()))
    placement = one_to_one(2)
    plain = some_schedule(placement)
    rows = ((*plain.rows[0], Action("Gather", 0, 0)), plain.rows[1])
    with pytest.raises(ProgramError, match=r"0.*Gather0\.0.*0.*'Gather'"):
        lower(replace(plain, rows=rows), compiled("gpt", circular(2, 1)).stages)


def _forward_and_backward(placement: Any) -> Schedule:
    actions = (Action("F", 0, 0), Action("F", 1, 0), Action("BW", 1, 0), Action("BW", 0, 0))
    rows = tuple(
        tuple(a for a in actions if rank in placement.ranks(a.stage, 0)) for rank in range(placement.num_ranks)
    )
    return Schedule("shared", placement, 1, rows)
