"""Ops, braids, placements, cost profiles and timelines as values: what they refuse and what they compute."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    Action,
    Braid,
    CostProfile,
    Event,
    HostLink,
    Link,
    MemoryCurve,
    OpSpec,
    Placement,
    Timeline,
    Wait,
    bidirectional,
    chain,
    circular,
    explicit,
    one_to_one,
    op_spec,
    register_op,
    registered_ops,
    v_shape,
    wave,
    with_shared,
)
from tests.support.schedule_strategies import random_placements


def test_registering_twice_is_idempotent_and_renaming_is_refused() -> None:
    spec = op_spec("F")
    assert register_op(spec) is spec
    with pytest.raises(ScheduleError, match="'F' is already registered with another meaning"):
        register_op(OpSpec("F", "compute", (), "f_s"))


@pytest.mark.parametrize("name", ["", "f", "F2", "F-", "F.", "2F", "F B"])
def test_op_names_that_would_not_parse_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="upper-case letter"):
        register_op(OpSpec(name, "compute", (), "f_s"))


def test_lanes_and_senders() -> None:
    with pytest.raises(ScheduleError, match=r"'gpu'.*d2h, h2d"):
        register_op(OpSpec("Gpu", "gpu", (), "f_s"))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"'Mail'.*'next'"):
        register_op(OpSpec("Mail", "compute", (), "f_s", sends="next"))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"'Mail'.*'before'"):
        register_op(OpSpec("Mail", "compute", (Wait(("F",), "before"),), "f_s"))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"'Mail'.*'BW'.*\('BW',\)"):
        register_op(OpSpec("Mail", "compute", (Wait("BW", "self"),), "f_s"))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="only compute ops send"):
        register_op(OpSpec("Mail", "d2h", (), "f_s", sends="succ"))
    with pytest.raises(ScheduleError, match="op 'Mail' has no cost, so it only waits, on the compute lane"):
        register_op(OpSpec("Mail", "d2h", (), ""))
    for changes in ({"required": True}, {"sends": "succ"}, {"waits": (Wait(("F",), "pred"),)}):
        with pytest.raises(ScheduleError, match="op 'Mail' is per_step: it can't be required"):
            register_op(replace(OpSpec("Mail", "compute", (), "f_s", per_step=True), **changes))  # type: ignore[arg-type]
    assert {s.name for s in registered_ops()} >= {"F", "B", "W", "BW", "O", "L", "S", "R", "G"}
    assert "Mail" not in {s.name for s in registered_ops()}


def test_unknown_op_lists_the_known() -> None:
    with pytest.raises(ScheduleError, match=r"unknown op 'Q'; known: .*BW"):
        op_spec("Q")


def test_a_braid_of_one_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least two actions, got 1"):
        Braid((Action("F", 0, 0),))


@given(random_placements())
def test_any_placement_is_consistent(placement: Placement) -> None:
    assert len(placement.topological_order()) == placement.num_stages
    for rank in range(placement.num_ranks):
        assert placement.stages_of(rank)
        assert 0 <= placement.num_chunks <= placement.num_stages
    for s in range(placement.num_stages):
        assert all(s in placement.successors(a) for a in placement.predecessors(s))
        for i in range(placement.num_flows):
            assert all(s in placement.stages_of(r) for r in placement.ranks(s, i))


@pytest.mark.parametrize(
    ("placement", "homes"),
    [
        (one_to_one(3), [0, 1, 2]),
        (circular(2, 2), [0, 1, 0, 1]),
        (v_shape(3), [0, 1, 2, 2, 1, 0]),
        (wave(2, 3), [0, 1, 1, 0, 0, 1]),
        (explicit(2, [1, 0, 1]), [1, 0, 1]),
    ],
    ids=lambda x: getattr(x, "kind", ""),
)
def test_constructors(placement: Placement, homes: list[int]) -> None:
    assert [placement.ranks(s, 0) for s in range(placement.num_stages)] == [(r,) for r in homes]
    assert placement.is_chain


def test_bidirectional_and_shared() -> None:
    placement = bidirectional(3)
    assert [placement.ranks(s, 0) for s in range(3)] == [(0,), (1,), (2,)]
    assert [placement.ranks(s, 1) for s in range(3)] == [(2,), (1,), (0,)]
    assert placement.num_chunks == 1
    spread = with_shared(one_to_one(2), [1])
    assert spread.ranks(1, 0) == (0, 1)
    assert spread.num_chunks == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: one_to_one(0), "number of ranks is 0"),
        (lambda: circular(2, 0), "number of chunks is 0"),
        (lambda: explicit(2, [0, 0]), "ranks 1 run no stage"),
        (lambda: explicit(2, [0, 2]), r"stage 1 runs on rank 2, but ranks are 0\.\.1"),
        (lambda: explicit(2, [(0, 0), 1]), "names a rank twice"),
        (lambda: explicit(1, [()]), "runs on no rank"),
        (lambda: explicit(1, []), "there are no stages"),
        (lambda: explicit(1, [0, 0], [(0, 1), (1, 0)]), "form a cycle"),
        (lambda: explicit(1, [0, 0], [(0, 1), (0, 1)]), "an edge is given twice"),
        (lambda: explicit(1, [0, 0], [(0, 2)]), "edge 0->2 names a stage outside"),
        (lambda: Placement("x", 1, (((0,),), ((0,), (0,))), ()), "flow 1 has 2 stages, flow 0 has 1"),
        (lambda: with_shared(one_to_one(2), [2]), "shared stage 2 is outside"),
    ],
)
def test_placements_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ScheduleError, match=message):
        make()


def test_edges_default_to_a_chain() -> None:
    assert chain(3) == ((0, 1), (1, 2))
    assert explicit(1, [0, 0, 0]).edges == chain(3)
    assert not explicit(1, [0, 0, 0], [(0, 2), (1, 2)]).is_chain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1.0), "latency_s is -1.0"),
        (lambda: Link(math.nan), "latency_s is nan"),
        (lambda: Link(0.0, 0.0), "bytes_per_s is 0.0; want a positive number"),
        (lambda: HostLink(h2d_bytes_per_s=-2.0), "h2d_bytes_per_s is -2.0"),
        (lambda: HostLink(mode="half"), "mode is 'half'"),
        (lambda: CostProfile.uniform(0), "at least one stage"),
        (lambda: CostProfile.uniform(1, chunks=0), "at least one stage and one chunk"),
        (lambda: CostProfile.uniform(1, w_residual=1.5), "w_residual is 1.5"),
        (lambda: CostProfile.uniform(1, f=-1), r"f_s\[0\] is -1"),
        (lambda: CostProfile.uniform(1, f=math.nan), r"f_s\[0\] is nan"),
        (lambda: CostProfile.uniform(1, comm=math.inf), "latency_s is inf"),
        (lambda: CostProfile.uniform(1).values("nope"), "the cost profile has no 'nope'"),
    ],
)
def test_costs_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ScheduleError, match=message):
        make()


def test_uniform_costs_divide_a_ranks_share_by_its_chunks() -> None:
    costs = CostProfile.uniform(4, chunks=2, f=1, b=2, w=3, comm=0.5, w_residual=0.5, offload_time=4)
    assert (costs.f_s[0], costs.b_s[0], costs.w_s[0], costs.bw_s[0]) == (0.5, 1, 1.5, 2.5)
    assert (costs.residual_bytes[0], costs.w_residual_bytes[0]) == (0.5, 0.25)
    assert costs.offload_s[0] + costs.load_s[0] == 2
    assert costs.transfer_s(0, 1, 0) == 0.5
    assert costs.transfer_s(1, 1, 0) == 0


def test_host_times_follow_from_bytes_and_bandwidth() -> None:
    host = HostLink(d2h_bytes_per_s=2.0, h2d_bytes_per_s=4.0, latency_s=0.5)
    costs = CostProfile((1.0,), (1.0,), (1.0,), (2.0,), (8.0,), (0.0,), offloadable_bytes=(4.0,), host=host)
    assert (costs.offload_s, costs.load_s) == ((2.5,), (1.5,))


def test_definitions_of_a_timeline() -> None:
    """Rank 0 works 2 of [0, 4], rank 1 works 3 of [1, 4]; a send that ends at 9 counts for nothing."""
    events = (
        Event(0, "compute", Action("F", 0, 0), 0.0, 1.0),
        Event(0, "send", Action("F", 0, 0), 1.0, 9.0),
        Event(0, "compute", Action("BW", 0, 0), 3.0, 4.0),
        Event(1, "compute", Action("F", 1, 0), 1.0, 4.0),
    )
    curves = (MemoryCurve((0.0, 4.0), (5.0, 0.0)), MemoryCurve((), ()))
    timeline = Timeline("x", 2, events, curves, (1.0, 0.0), (10.0, 20.0))
    assert timeline.makespan == 4
    assert timeline.spans == (4, 3)
    assert timeline.compute_s == (2, 3)
    assert timeline.bubble_rate == 1 - 5 / 8
    assert timeline.span_bubble_rate == 1 - 5 / 8
    assert timeline.peak_bytes == (15, 20)
    assert Timeline("empty", 1, (), (curves[1],), (0.0,)).bubble_rate == 0
