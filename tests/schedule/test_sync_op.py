"""S: compute waits for an offload to end. Times, memory, forms, pictures, and the same on devices."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpipe.errors import ProgramError, ScheduleError
from jaxpipe.program.ir import Sync
from jaxpipe.program.lower import lower
from jaxpipe.schedule import (
    CostProfile,
    Schedule,
    Wait,
    check_schedule,
    one_to_one,
    parse_schedule,
    register_op,
    replay,
    simulate,
)
from jaxpipe.schedule.costs import HostLink
from jaxpipe.schedule.files import format_csv, from_schedule, to_schedule
from jaxpipe.schedule.ir import OpSpec
from jaxpipe.schedule.passes import offload
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.text import draw
from tests.support.pipelines import (
    assert_same_arrays,
    compiled,
    parameters,
    pipeline_for,
    random_batch,
    run_sequentially,
)

ROW = "F0.0 O0.0 S0.0 F0.1 O0.1 L0.0 S0.1 BW0.0 L0.1 BW0.1"


def rows(*lines: str, m: int = 2) -> Schedule:
    text = f"# jaxpipe schedule 1\nname: s\nmicrobatches: {m}\nplacement: one-to-one ranks={len(lines)}\nedges: chain\n"
    return parse_schedule(text + "".join(f"rank {r}: {line}\n" for r, line in enumerate(lines)))


def costs(ranks: int = 1) -> CostProfile:
    """F = B = W = 1 s, O and L 3 s each, one lane."""
    each = (3.0,) * ranks
    one = (1.0,) * ranks
    return CostProfile(
        one, one, one, (2.0,) * ranks, one, one, offload_s=each, load_s=each, host=HostLink(mode="shared")
    )


def test_f_starts_when_the_offload_has_ended() -> None:
    schedule = rows(ROW)
    check_schedule(schedule)
    timeline = simulate(schedule, costs())
    start = {str(e.action): e.start_s for e in timeline.events}
    assert start["S0.0"] == 4 and start["F0.1"] == 4
    assert start["O0.1"] == 5 and start["L0.0"] == 8 and start["S0.1"] == 8 and start["BW0.0"] == 11
    assert start["L0.1"] == 13 and timeline.makespan == 18
    assert timeline.peak_activations == (1.0,)
    assert sum(timeline.compute_s) == 6


def test_s_keeps_a_limit_that_order_alone_can_not() -> None:
    row = "F0.0 O0.0 S0.0 F0.1 BW0.1 L0.0 BW0.0"
    with_sync, free = simulate(rows(row), costs()), simulate(rows(row.replace("S0.0 ", "")), costs())
    assert with_sync.peak_activations == (1.0,) and free.peak_activations == (2.0,)
    assert with_sync.makespan == free.makespan + 3


def test_replay_needs_no_duration_for_s() -> None:
    schedule = rows(ROW)
    events = simulate(schedule, costs()).events
    durations = {(e.rank, e.action): e.end_s - e.start_s for e in events}
    replayed = replay(schedule, {k: v for k, v in durations.items() if str(k[1]) not in ("S0.0", "S0.1")})
    assert replayed.makespan == replay(schedule, durations).makespan
    assert replay(schedule, durations, costs()).makespan == 18


def test_forms_and_passes() -> None:
    schedule = rows(ROW)
    assert parse_schedule(str(schedule)) == schedule
    assert from_schedule(to_schedule(schedule)) == schedule
    with pytest.raises(ScheduleError, match=r"can't hold O0\.0"):
        format_csv(schedule)
    assert "F0 " in draw(simulate(schedule, costs()))
    bare = Problem.of(one_to_one(1), 2).codes(schedule)
    assert len(bare[0]) == 4
    assert "S0" not in str(offload(schedule, costs(), memory_limit=2).schedule)


def test_runtime_waits_and_computes_the_same() -> None:
    schedule = rows(
        "F0.0 O0.0 S0.0 F0.1 O0.1 S0.1 F0.2 L0.0 BW0.0 L0.1 BW0.1 BW0.2",
        "F1.0 O1.0 F1.1 S1.0 L1.0 BW1.0 B1.1 W1.1 F1.2 BW1.2",
        m=3,
    )
    check_schedule(schedule)
    import jax

    with jax.enable_x64(True):
        pipe = pipeline_for("gpt", schedule)
        batch = random_batch(3)
        params = pipe.place(parameters("gpt"))
        out = pipe.run(params, {at: pipe.zeros(at) for at in pipe.own_instances}, batch, record=True)
        acc, losses = run_sequentially(pipe, schedule, params, batch)
        assert_same_arrays(dict(out.acc), acc)
        assert_same_arrays(list(out.losses), losses)
    assert [str(e.action) for e in out.events if e.rank == 0] == [str(a) for a in schedule.actions(0)]
    assert pipe.measured_timeline(out).makespan > 0 and pipe.replay_ratio(out) > 0
    assert np.isfinite(pipe.replay_ratio(out))
    syncs = [i for p in pipe.programs for i in p.instructions if isinstance(i, Sync)]
    assert len(syncs) == 3 and str(syncs[0]).startswith("Sync S0.0 (")


def test_a_sync_for_something_else_is_not_lowered() -> None:
    import jax

    register_op(OpSpec("Pause", "compute", (Wait(("F",), "self"),), ""))
    schedule = rows("F0.0 Pause0.0 BW0.0", "F1.0 BW1.0", m=1)
    simulate(schedule, CostProfile.uniform(2))
    with (
        jax.enable_x64(True),
        pytest.raises(ProgramError, match=r"Pause0\.0"),
    ):
        lower(schedule, compiled("gpt", one_to_one(2)).stages)
