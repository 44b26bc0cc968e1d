"""The best schedule of all families and parameters: no worse than any, within the limit, and honest about what it took."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import FAMILIES, CostProfile, Placement, check_schedule, generate, simulate
from jaxpipe.schedule.memory import offloaded_share
from jaxpipe.search.best import Setting, Task, best_of_family, best_schedule, make, settings_of
from tests.support.paths import GOLDEN

UNEVEN = CostProfile(
    f_s=(1, 2, 1, 1, 2, 1, 1, 1),
    b_s=(2, 1, 1, 2, 2, 1, 1, 1),
    w_s=(1, 0, 1, 1, 2, 1, 1, 3),
    bw_s=(3, 1, 2, 3, 4, 2, 2, 4),
    residual_bytes=(2, 1, 1, 1, 1, 1, 1, 2),
    w_residual_bytes=(1, 1, 0.5, 1, 1, 1, 1, 1),
    source="uneven",
)


def slow_host(placement: Placement) -> CostProfile:
    """Return unit costs; copying a share to the host and back takes as long as F."""
    return CostProfile.uniform(placement.num_stages, chunks=placement.num_chunks, offload_time=1.0)


@pytest.mark.parametrize("limit", [2.5, *(pytest.param(x, marks=pytest.mark.soak) for x in (1, 4, float("inf")))])
def test_no_worse_than_any_family(limit: float) -> None:
    best = best_schedule(4, 8, memory_limit=limit)
    assert best.peak <= limit * (1 + 1e-9)
    check_schedule(best.schedule)
    assert simulate(best.schedule, best.costs).makespan == best.makespan
    for name, family in FAMILIES.items():
        v = family.default_chunks
        costs = CostProfile.uniform(family.placement(4, v).num_stages, chunks=v)
        memory_limit = limit if "memory_limit" in family.options and limit < float("inf") else None
        try:
            timeline = simulate(generate(name, 4, 8, memory_limit=memory_limit), costs)
        except ScheduleError:
            continue
        if max(timeline.peak_activations) <= limit and not any(e.lane == "d2h" for e in timeline.events):
            assert best.makespan <= timeline.makespan * (1 + 1e-9), name


def authors(ranks: int, microbatches: int) -> list[tuple[float, float, float, float, float]]:
    """Return (peak, makespan, span, comm, chunks) of the papers' own code; F = B = W = 2 for a rank's share."""
    golden = GOLDEN
    gis = json.loads((golden / "authors_gis.json").read_text())
    rows = [dict(zip(gis["columns"], row, strict=True)) for row in gis["rows"]]
    results = [
        (r["peak"], r["makespan"], r["span"], r["comm"], r["v"])
        for r in rows
        if (r["p"], r["m"], r["f"], r["b"], r["w"], r["v"]) == (ranks, microbatches, 1, 1, 1, 2)
    ]
    zb = json.loads((golden / "authors_zb.json").read_text())
    results += [
        (peak, makespan, span, comm, 1)
        for _, p, m, costs, comm, _, makespan, span, peak in zb
        if (p, m, costs) == (ranks, microbatches, [2, 2, 2])
    ]
    v = json.loads((golden / "authors_v.json").read_text())["cells"]
    results += [
        (peak, makespan, span, comm, 2)
        for _, p, m, costs, comm, _, makespan, span, peak in v
        if (p, m, costs) == (ranks, microbatches, "unit")
    ]
    return results


@pytest.mark.parametrize(
    ("p", "m", "stride"), [(4, 4, 5), *(pytest.param(4, m, 1, marks=pytest.mark.soak) for m in (4, 8))]
)
def test_no_worse_than_the_papers_own_code_at_any_limit(p: int, m: int, stride: int) -> None:
    """The default tries every fifth limit."""
    rows = authors(p, m)
    for comm in sorted({row[3] for row in rows}):
        at_comm = [row for row in rows if row[3] == comm]

        def costs(placement: Placement, comm: float = comm) -> CostProfile:
            v = placement.num_chunks
            return CostProfile.uniform(placement.num_stages, chunks=v, f=2, b=2, w=2, comm=comm)

        for limit in sorted({row[0] for row in at_comm})[::stride]:
            fitting = [row for row in at_comm if row[0] <= limit]
            best = best_schedule(p, m, costs, limit, chunks=2)
            assert best.makespan <= min(row[1] for row in fitting) * (1 + 1e-9), (comm, limit)


def test_more_memory_is_never_slower() -> None:
    makespans = [best_schedule(2, 4, memory_limit=x).makespan for x in (1, 1.5, 2, 4)]
    assert makespans == sorted(makespans, reverse=True)


def test_span_as_the_objective() -> None:
    by_span = best_schedule(3, 5, memory_limit=6, objective="span")
    assert by_span.span <= best_schedule(3, 5, memory_limit=6).span
    assert by_span.span <= simulate(generate("zb-2p", 3, 5), CostProfile.uniform(3)).max_span


def test_a_profile_fixes_the_stages() -> None:
    for p in (4, 8):
        best = best_schedule(p, 6, UNEVEN, memory_limit=p)
        assert best.schedule.num_stages == 8
        assert best.setting.chunks == 8 // p
        assert best.costs is UNEVEN
    with pytest.raises(ScheduleError, match="3 ranks"):
        best_schedule(3, 6, UNEVEN)


def test_given_chunks_and_group_are_kept() -> None:
    for family in FAMILIES.values():
        task = Task(4, 8, chunks=3, group=3)
        for setting in settings_of(family, task):
            assert setting.chunks == (3 if "chunks" in family.options else family.default_chunks)
            assert setting.group == (3 if "group" in family.options else None)


def test_the_host_is_used_only_where_its_cost_is_known() -> None:
    plain, low = best_schedule(2, 4, memory_limit=1), best_schedule(2, 4, slow_host, memory_limit=1)
    assert offloaded_share(plain.schedule, plain.costs) == 0
    assert offloaded_share(low.schedule, low.costs) > 0
    assert low.peak <= 1
    assert low.makespan < plain.makespan
    assert best_schedule(2, 4, slow_host, memory_limit=1, offload=False).makespan == plain.makespan


def test_nothing_fits() -> None:
    with pytest.raises(ScheduleError, match=r"keeps a memory limit of 0.9; the smallest found to work is 1$"):
        best_schedule(2, 3, memory_limit=0.9)
    few = ("1f1b", "interleaved-1f1b", "po-h")
    with pytest.raises(ScheduleError, match=r"limit of 0.01; the smallest found to work is 0.\d+$") as caught:
        best_schedule(2, 3, slow_host, memory_limit=0.01, families=few)
    least = float(str(caught.value).split()[-1])
    assert best_schedule(2, 3, slow_host, memory_limit=least * (1 + 1e-3), families=few).peak <= least * (1 + 1e-3)


def test_settings_name_what_to_type() -> None:
    assert str(Setting("zb", 1, memory_limit=2.5)) == "zb --memory-limit 2.5"
    assert str(Setting("interleaved-1f1b", 4)) == "interleaved-1f1b --chunks 4"
    assert str(Setting("1f1b", 1, offload=True)) == "1f1b and the offload pass"
    best = best_of_family(FAMILIES["interleaved-1f1b"], Task(4, 8, memory_limit=5))
    assert make(best.setting, Task(4, 8)).schedule == best.schedule
    with pytest.raises(ScheduleError, match=r"8 activations.*5"):
        best_of_family(FAMILIES["gpipe"], Task(4, 8, memory_limit=5))


def test_the_same_task_gives_the_same_schedule(generated_once: Callable[[], object]) -> None:
    one = best_schedule(2, 3, slow_host, 1.5).schedule
    generated_once()
    assert one == best_schedule(2, 3, slow_host, 1.5).schedule
