"""The schedule cache: what a lookup may return, which files it survives, several writers."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    CostProfile,
    HostLink,
    Link,
    Placement,
    Schedule,
    check_schedule,
    circular,
    generate,
    one_to_one,
    simulate,
    v_shape,
    wave,
)
from jaxpipe.search.solve.cache import CrudeProblem, ScheduleCache, default_folder, entry_name
from jaxpipe.search.solve.solver import solve_cached
from jaxpipe.search.solve.task import Objective, Options, Solution, SolveTask
from tests.support.paths import ROOT
from tests.support.schedule_strategies import (
    gpipe_rows,
    one_f_one_b_rows,
    random_costs,
    random_placements,
    random_schedule,
)

UNIT = CostProfile.uniform(4)


def solved(task: SolveTask, schedule: Schedule, bound: float = 1.0, wall_s: float = 2.0) -> Solution:
    """Return the answer of a solver that found ``schedule``."""
    return Solution(task, schedule, simulate(schedule, task.costs), bound, wall_s)


def task_of(
    costs: CostProfile = UNIT,
    limit: float = math.inf,
    *,
    microbatches: int = 8,
    placement: Placement | None = None,
    offload: bool = False,
    objective: Objective = "makespan",
) -> SolveTask:
    placement = placement or one_to_one(costs.num_stages)
    return SolveTask(placement, microbatches, costs, limit, offload, objective)


class Notices(list[str]):
    def take(self) -> list[str]:
        notices = list(self)
        self.clear()
        return notices


@pytest.fixture
def notices() -> Notices:
    return Notices()


@pytest.fixture
def cache(tmp_path: Path, notices: Notices) -> ScheduleCache:
    return ScheduleCache(tmp_path / "cache", notices.append)


def signed(body: str) -> str:
    return f"jaxpipe cached schedule 3, sha256 {hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def contents(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text().partition("\n")[2])
    return body


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an entry as a buggy jaxpipe would have written it: with a checksum that matches."""
    data = contents(path)
    change(data)
    path.write_text(signed(json.dumps(data)))


def alike(one: SolveTask, other: SolveTask) -> bool:
    """Return whether the cache takes them for the same problem."""
    assert (CrudeProblem.of(one) == CrudeProblem.of(other)) == (entry_name(one) == entry_name(other))
    return CrudeProblem.of(one) == CrudeProblem.of(other)


# ---- the same problem ------------------------------------------------------------------------------------------------


def test_the_same_problem_gives_its_answer_and_bound(cache: ScheduleCache, notices: Notices) -> None:
    task, schedule = task_of(limit=4), one_f_one_b_rows(4, 8)
    path = cache.store(solved(task, schedule, bound=24.0), Options(time_limit_s=60))
    assert path is not None and path.parent == cache.folder
    hit = cache.lookup(task)
    assert hit is not None
    assert (hit.task, hit.schedule, hit.lower_bound, hit.status) == (task, schedule, 24.0, "feasible")
    assert hit.timeline == simulate(schedule, task.costs)
    assert hit.value == hit.timeline.makespan
    (entry,) = cache.entries()
    assert (entry.wall_s, entry.time_limit_s) == (2.0, 60)
    assert notices == []


def test_files_are_plain_text_with_the_problem_and_the_schedule(cache: ScheduleCache) -> None:
    schedule = one_f_one_b_rows(4, 8)
    path = cache.store(solved(task_of(), schedule))
    assert path is not None
    assert path.read_text().startswith("jaxpipe cached schedule 3, sha256 ")
    data = contents(path)
    assert data["task"]["costs"]["f_s"] == [1, 1, 1, 1]
    assert data["schedule"] == str(schedule)
    assert data["jaxpipe"]
    assert "p4-m8" in path.name
    assert [p.name for p in cache.folder.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"costs": replace(UNIT, w_s=(1, 1, 1, 1.0000001))},
        {"costs": replace(UNIT, param_bytes=(1.0,) * 4)},
        {"costs": replace(UNIT, f_s=tuple(3 * x for x in UNIT.f_s), source="x")},
        {"memory_limit": 8.01},
    ],
)
def test_a_bound_is_never_reused_when_any_number_differs(cache: ScheduleCache, change: dict[str, Any]) -> None:
    task = task_of(limit=8)
    cache.store(solved(task, one_f_one_b_rows(4, 8), bound=24.0))
    hit = cache.lookup(replace(task, **change))
    assert hit is not None and hit.lower_bound == 0


def test_a_bound_is_reused_for_equal_numbers_of_another_source(cache: ScheduleCache) -> None:
    integer_costs = replace(UNIT, f_s=(1, 1, 1, 1), source="measured")
    cache.store(solved(task_of(), one_f_one_b_rows(4, 8), bound=24.0))
    hit = cache.lookup(task_of(integer_costs))
    assert hit is not None and hit.lower_bound == 24.0


def test_proportional_costs_are_the_same_problem(cache: ScheduleCache) -> None:
    def profile(scale: float) -> CostProfile:
        return CostProfile.uniform(4, f=scale, b=1.5 * scale, w=0.5 * scale, comm=0.1 * scale)

    task, schedule = task_of(profile(1.0)), one_f_one_b_rows(4, 8)
    cache.store(solved(task, schedule, bound=24.0))
    hit = cache.lookup(task_of(profile(3e-3)))
    assert alike(task, task_of(profile(3e-3)))
    assert hit is not None and hit.lower_bound == 0
    assert hit.value == simulate(schedule, profile(3e-3)).makespan == pytest.approx(3e-3 * task_value(task, schedule))


def task_value(task: SolveTask, schedule: Schedule) -> float:
    return simulate(schedule, task.costs).makespan


def test_no_limit_and_one_that_never_binds_are_the_same(cache: ScheduleCache) -> None:
    cache.store(solved(task_of(limit=math.inf), one_f_one_b_rows(4, 8)))
    assert cache.lookup(task_of(limit=8)) is not None
    assert alike(task_of(limit=8), task_of())


@pytest.mark.parametrize(
    "other",
    [
        task_of(limit=4),
        task_of(objective="span"),
        task_of(objective="lexicographic"),
        task_of(offload=True),
        task_of(CostProfile.uniform(4, w=2)),
        task_of(CostProfile.uniform(4, comm=0.1)),
        task_of(CostProfile.uniform(4, w_residual=0.5)),
        task_of(replace(UNIT, memory_limit_bytes=(4.0, 8.0, 8.0, 8.0))),
        task_of(replace(UNIT, residual_bytes=(2.0, 1.0, 1.0, 1.0))),
    ],
)
def test_other_problems_of_the_same_sizes_are_near_not_the_same(cache: ScheduleCache, other: SolveTask) -> None:
    cache.store(solved(task_of(), one_f_one_b_rows(4, 8), bound=24.0))
    hit = cache.lookup(other)
    assert hit is not None
    assert not alike(other, task_of()) and hit.lower_bound == 0
    assert hit.value == (hit.timeline.max_span if other.objective == "span" else hit.timeline.makespan)


@pytest.mark.parametrize(
    "change",
    [
        {"offload_s": (0.5,) * 4},
        {"load_s": (0.5,) * 4},
        {"offloadable_bytes": (0.5,) * 4},
        {"host": HostLink(mode="shared")},
        {"host": HostLink(groups=((0, 1), (2, 3)))},
    ],
)
def test_the_host_link_counts_only_where_offload_is_allowed(change: dict[str, Any]) -> None:
    costs = replace(UNIT, **change)
    for offload in (False, True):
        assert alike(task_of(offload=offload), task_of(costs, offload=offload)) == (not offload)


# ---- the nearest problem ---------------------------------------------------------------------------------------------


def test_other_sizes_and_placements_are_no_candidates(cache: ScheduleCache, notices: Notices) -> None:
    cache.store(solved(task_of(), one_f_one_b_rows(4, 8)))
    assert cache.lookup(task_of(microbatches=9)) is None
    assert cache.lookup(task_of(CostProfile.uniform(5))) is None
    assert cache.lookup(task_of(CostProfile.uniform(8, chunks=2), placement=circular(4, 2))) is None
    reverse = replace(one_to_one(4), flows=(one_to_one(4).flows[0][::-1],))
    assert cache.lookup(task_of(placement=reverse)) is None
    assert notices == []


def test_a_placement_by_another_name_is_the_same(cache: ScheduleCache) -> None:
    costs = CostProfile.uniform(6, chunks=2)
    cache.store(solved(task_of(costs, placement=v_shape(3)), generate("v-half", ranks=3, microbatches=8)))
    hit = cache.lookup(task_of(costs, placement=wave(3, 2)))
    assert hit is not None
    assert hit.schedule.placement == wave(3, 2)


def test_the_nearest_is_chosen(cache: ScheduleCache) -> None:
    for w in (0.25, 1.0, 4.0):
        schedule = replace(one_f_one_b_rows(4, 8), name=f"w={w}")
        cache.store(solved(task_of(CostProfile.uniform(4, w=w)), schedule))
    for w, expected in ((0.2, 0.25), (0.4, 0.25), (0.9, 1.0), (1.5, 1.0), (3.0, 4.0), (50.0, 4.0)):
        hit = cache.lookup(task_of(CostProfile.uniform(4, w=w)))
        assert hit is not None and hit.schedule.name == f"w={expected}"


def test_what_exceeds_the_limit_is_passed_over_for_the_next(cache: ScheduleCache, notices: Notices) -> None:
    """GPipe holds 8 activations, 1F1B 4: the farther of the two is the one that may be used."""
    near, far = CostProfile.uniform(4, w=1.3), CostProfile.uniform(4, w=8)
    cache.store(solved(task_of(near), gpipe_rows(4, 8)))
    cache.store(solved(task_of(far), one_f_one_b_rows(4, 8)))
    hit = cache.lookup(task_of(limit=4))
    assert hit is not None and hit.schedule.name == "1f1b"
    assert cache.lookup(task_of(limit=3.9)) is None
    free = cache.lookup(task_of())
    assert free is not None and free.schedule.name == "gpipe"
    assert notices == []


def test_an_answer_that_no_longer_keeps_its_own_limit_is_passed_over(cache: ScheduleCache) -> None:
    """Limits are rounded: the same problem to the cache, a real limit just too low."""
    cache.store(solved(task_of(limit=4.0), one_f_one_b_rows(4, 8)))
    assert alike(task_of(limit=4.0), task_of(limit=3.99))
    assert cache.lookup(task_of(limit=3.99)) is None
    assert cache.lookup(task_of(limit=4.01)) is not None


@given(st.data())
def test_every_hit_is_valid_and_keeps_the_limits(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    placement = data.draw(random_placements())
    seed = data.draw(st.integers(0, 2**32 - 1))
    notices = Notices()
    cache = ScheduleCache(tmp_path_factory.mktemp("cache"), notices.append)
    profiles = random_costs(placement.num_stages, placement.num_ranks)
    limits = st.one_of(st.just(math.inf), st.integers(1, 16).map(lambda x: x / 4))
    tasks = []
    for k in range(3):
        offload = data.draw(st.booleans())
        schedule = random_schedule(placement, 4, random.Random(seed + k), offload=0.4 if offload else 0.0)
        task = SolveTask(placement, 4, data.draw(profiles), data.draw(limits), offload)
        tasks.append(task)
        assert cache.store(solved(task, schedule, bound=0.0)) is not None
    for task in (*tasks, replace(tasks[0], costs=data.draw(profiles), offload=False)):
        hit = cache.lookup(task)
        if hit is None:
            continue
        check_schedule(hit.schedule)
        assert hit.schedule.placement == placement
        assert hit.timeline == simulate(hit.schedule, task.costs)
        assert task.fits(hit.timeline)
        if not task.offload:
            assert all(a.op != "O" for r in range(placement.num_ranks) for a in hit.schedule.actions(r))
    assert notices == []
    assert all(cache.lookup(t) is not None for t in tasks if t.memory_limit == math.inf)


@given(st.data())
def test_distance_is_a_distance(data: st.DataObject) -> None:
    placement = data.draw(random_placements())
    profiles = random_costs(placement.num_stages, placement.num_ranks)
    one, two = (CrudeProblem.of(SolveTask(placement, 4, data.draw(profiles))) for _ in range(2))
    assert one.distance(one) == two.distance(two) == 0
    assert one.distance(two) == pytest.approx(two.distance(one))
    assert (one.distance(two) == 0) == (one == two)


@pytest.mark.parametrize("x", [0.0, 1e-300, 1e-9, 1e299])
def test_extreme_costs_are_problems_like_others(cache: ScheduleCache, x: float) -> None:
    for costs in (
        replace(UNIT, f_s=(x,) * 4, b_s=(x,) * 4, w_s=(x,) * 4, bw_s=(x,) * 4),
        replace(UNIT, f_s=(x, 1, 1, 1), residual_bytes=(x, 1, 1, 1)),
        replace(UNIT, residual_bytes=(x,) * 4, boundary_bytes=(1e299,) * 4, link=Link(0.0, 1e-200)),
    ):
        task = task_of(costs)
        crude = CrudeProblem.of(task)
        assert crude.distance(CrudeProblem.of(task_of())) < math.inf
    assert cache.lookup(task_of(replace(UNIT, f_s=(x,) * 4))) is None


def test_costs_for_other_stages_are_refused(cache: ScheduleCache) -> None:
    with pytest.raises(ScheduleError, match=r"5 stages.*4"):
        cache.lookup(task_of(CostProfile.uniform(5), placement=one_to_one(4)))


# ---- two answers to one problem --------------------------------------------------------------------------------------


def better_and_worse() -> tuple[Schedule, Schedule]:
    return generate("zb-h2", ranks=4, microbatches=8), gpipe_rows(4, 8)


@pytest.mark.parametrize("better_first", [True, False])
def test_the_better_answer_and_the_better_bound_stay(cache: ScheduleCache, better_first: bool) -> None:
    good, bad = better_and_worse()
    task = task_of()
    answers = [(solved(task, good, 20.0, wall_s=1.0), Options(5)), (solved(task, bad, 22.0, wall_s=3.0), Options(60))]
    for solution, options in answers if better_first else answers[::-1]:
        cache.store(solution, options)
    hit = cache.lookup(task)
    assert hit is not None
    assert (hit.schedule, hit.lower_bound) == (good, 22.0)
    (entry,) = cache.entries()
    assert (entry.value, entry.lower_bound) == (hit.value, 22.0)
    assert (entry.wall_s, entry.time_limit_s) == ((3.0, 60) if better_first else (1.0, 5)), "of the last solve"


def test_an_older_better_schedule_is_retimed_when_costs_have_drifted_a_little(cache: ScheduleCache) -> None:
    good, bad = better_and_worse()
    drifted = CostProfile.uniform(4, w=1.0001)
    cache.store(solved(task_of(), good, bound=24.0))
    cache.store(solved(task_of(drifted), bad, bound=23.0))
    assert len(cache.entries()) == 1
    hit = cache.lookup(task_of(drifted))
    assert hit is not None
    assert (hit.schedule, hit.value, hit.lower_bound) == (good, simulate(good, drifted).makespan, 23.0)
    old = cache.lookup(task_of())
    assert alike(task_of(), task_of(drifted)) and old is not None and old.lower_bound == 0


# ---- damage ----------------------------------------------------------------------------------------------------------


def check_ignored(cache: ScheduleCache, notices: Notices, path: Path, task: SolveTask) -> str:
    """A lookup does not use the file, says so on one line, and leaves it where it is."""
    before = path.lstat()  # reading changes only the time of access
    assert cache.lookup(task) is None
    (notice,) = notices.take()
    assert path.name in notice and "\n" not in notice and len(notice) < 700
    after = path.lstat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    return notice


@pytest.fixture
def entry(cache: ScheduleCache) -> Path:
    path = cache.store(solved(task_of(), one_f_one_b_rows(4, 8), bound=24.0))
    assert path is not None
    return path


@given(data=st.data())
def test_any_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    notices = Notices()
    cache = ScheduleCache(tmp_path_factory.mktemp("cache"), notices.append)
    path = cache.store(solved(task_of(), one_f_one_b_rows(4, 8)))
    assert path is not None
    content = path.read_bytes()
    where = data.draw(st.integers(0, len(content) - 1))
    damaged = {
        "cut": content[:where],
        "flip": content[:where] + bytes([content[where] ^ (1 << data.draw(st.integers(0, 7)))]) + content[where + 1 :],
        "doubled": content + content[where:],
        "zeros": content[:where] + bytes(len(content) - where),
    }
    path.write_bytes(damaged[data.draw(st.sampled_from(sorted(damaged)))])
    check_ignored(cache, notices, path, task_of())
    assert cache.entries() == ()


@pytest.mark.parametrize("prefix", ["schedule", "solved"])
def test_older_versions_are_neither_read_nor_told_of_but_cleared(
    cache: ScheduleCache, notices: Notices, entry: Path, prefix: str
) -> None:
    """Bounds from before latencies only delayed (``solved``) may be above what schedules take now."""
    older = entry.rename(entry.with_name(entry.name.replace("timed", prefix, 1)))
    if prefix == "schedule":
        older.write_text('{\n"format": "jaxpipe cached schedule 2",\n')
    assert cache.lookup(task_of()) is None and cache.entries() == ()
    assert cache.clear() == 1 and not older.exists()
    assert notices == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("[" * 100_000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_nonsense_behind_a_good_checksum_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Write entries as a buggy jaxpipe, or another version, would: fields of other kinds, or none, or no JSON."""
    notices = Notices()
    cache = ScheduleCache(tmp_path_factory.mktemp("cache"), notices.append)
    path = cache.store(solved(task_of(), one_f_one_b_rows(4, 8)))
    assert path is not None
    entry = contents(path)
    match data.draw(st.sampled_from(("another value", "missing", "no entry", "no checksum"))):
        case "another value":
            key = data.draw(st.sampled_from(("task", "schedule", "value", "peaks", "offloaded")))
            path.write_text(signed(json.dumps({**entry, key: data.draw(JSON_VALUES)})))
            # Another kind is refused; a number or a list is as good as the one that was there, and proves nothing.
            if (hit := cache.lookup(task_of())) is not None:
                assert hit.timeline == simulate(one_f_one_b_rows(4, 8), UNIT) and not notices
                return
            notices.clear()
        case "missing":
            del entry[data.draw(st.sampled_from(sorted(entry)))]
            path.write_text(signed(json.dumps(entry)))
        case "no entry":
            texts = st.sampled_from(("", "}", "[" * 100_000, '{"task": ' * 100_000, "\0", "NaN"))
            path.write_text(signed(data.draw(texts | JSON_VALUES.map(json.dumps))))
        case "no checksum":
            path.write_bytes(
                data.draw(st.binary(max_size=200) | st.just(path.read_bytes().replace(b"schedule 3", b"schedule 4", 1)))
            )
    check_ignored(cache, notices, path, task_of())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text.replace(" BW0.7", ""), "microbatch 7 on rank 0 is missing"),
        (lambda text: text.replace("schedule 1", "schedule 9"), "schedule"),
        (lambda text: str(one_f_one_b_rows(4, 7)), "microbatch"),
        (lambda text: str(one_f_one_b_rows(3, 8)), "one row per rank"),
    ],
)
def test_a_schedule_that_answers_no_such_problem_is_never_returned(
    cache: ScheduleCache, notices: Notices, entry: Path, change: Callable[[str], str], what: str
) -> None:
    rewrite(entry, lambda data: data.update(schedule=change(data["schedule"])))
    assert what in check_ignored(cache, notices, entry, task_of())


def test_a_bound_above_the_answer_is_not_believed(cache: ScheduleCache, notices: Notices, entry: Path) -> None:
    rewrite(entry, lambda data: data.update(lower_bound=1e6))
    hit = cache.lookup(task_of())
    assert hit is not None and hit.lower_bound == 0
    assert len(notices) == 1 and "bound" in notices[0]


def test_a_bound_that_a_family_is_below_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: Notices
) -> None:
    """An entry with a checksum that matches, a poor schedule, and a bound that calls it optimal."""
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path))
    task, options = task_of(CostProfile.uniform(3), microbatches=4), Options(time_limit_s=600, workers=1)
    poor = solved(task, gpipe_rows(3, 4))
    assert poor.value == 18
    path = ScheduleCache().store(replace(poor, lower_bound=18.0), options)
    assert path is not None
    solution = solve_cached([task], options, notice=notices.append)
    assert (solution.value, solution.lower_bound) == (14, 14)
    (notice,) = notices.take()
    assert "ignored a bound: it is 18, and family" in notice
    (entry,) = ScheduleCache().entries()
    assert (entry.value, entry.lower_bound) == (14, 14)  # nor does it live on beside a better answer
    second = solve_cached([task], options, notice=notices.append)
    assert (second.value, second.improvements[-1].source, notices) == (14, "cache", [])


def test_a_bound_that_others_can_write_is_not_believed(cache: ScheduleCache, notices: Notices, entry: Path) -> None:
    def bound() -> float:
        hit = cache.lookup(task_of())
        assert hit is not None
        return hit.lower_bound

    assert bound() == 24
    entry.chmod(0o666)
    assert bound() == 0
    assert "other users can write it" in notices.take()[0]
    entry.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(entry, 12345, -1)
        with_other_owner, _ = bound(), notices.take()
        assert with_other_owner == 0


def test_a_damaged_entry_does_not_hide_the_next(cache: ScheduleCache, notices: Notices, entry: Path) -> None:
    schedule = replace(one_f_one_b_rows(4, 8), name="other")
    cache.store(solved(task_of(CostProfile.uniform(4, w=2)), schedule))
    entry.write_bytes(entry.read_bytes()[:-9])
    hit = cache.lookup(task_of())
    assert hit is not None and hit.schedule == schedule
    assert len(notices) == 1
    assert [e.value for e in cache.entries()] == [simulate(schedule, CostProfile.uniform(4, w=2)).makespan]


def test_things_that_are_no_files(cache: ScheduleCache, notices: Notices, entry: Path) -> None:
    entry.unlink()
    entry.mkdir()
    assert "directory" in check_ignored(cache, notices, entry, task_of())
    assert cache.store(solved(task_of(), one_f_one_b_rows(4, 8))) is None
    assert [n for n in notices.take() if "can't keep" in n]
    entry.rmdir()
    os.mkfifo(entry)
    assert "pipe" in check_ignored(cache, notices, entry, task_of())
    entry.unlink()
    entry.symlink_to(entry.parent / "nowhere")
    assert cache.lookup(task_of()) is None
    entry.unlink()
    entry.symlink_to(entry.name)
    check_ignored(cache, notices, entry, task_of())


def test_an_answer_too_large_for_the_cache_is_not_kept(
    cache: ScheduleCache, notices: Notices, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpipe.search.solve.cache.MAX_BYTES", 9_000)
    schedule = replace(one_f_one_b_rows(4, 9), name="x" * 9_000)
    assert cache.store(solved(task_of(microbatches=9), schedule)) is None
    assert len(notices) == 1 and "bytes" in notices[0]
    assert [e.task.num_microbatches for e in cache.entries()] == [8]


def test_a_folder_that_can_not_be_is_a_notice(tmp_path: Path, notices: Notices) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        cache = ScheduleCache(folder, notices.append)
        assert cache.store(solved(task_of(), one_f_one_b_rows(4, 8))) is None
        assert len(notices.take()) == 1
        assert cache.lookup(task_of()) is None
        assert cache.clear() == 0
        assert all("file" in n and "\n" not in n for n in notices.take())
    assert (tmp_path / "file").read_text() == "mine"


def test_notices_are_warnings_of_the_logger_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ScheduleCache(tmp_path)
    path = cache.store(solved(task_of(), one_f_one_b_rows(4, 8)))
    assert path is not None and caplog.record_tuples == []
    path.write_text("")
    assert cache.lookup(task_of()) is None
    ((name, level, text),) = caplog.record_tuples
    assert (name, level) == ("jaxpipe", logging.WARNING) and path.name in text


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert ScheduleCache().folder == default_folder() == tmp_path / "a"
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", "")
    assert default_folder() == tmp_path / "b" / "jaxpipe" / "schedules"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == tmp_path / "c" / ".cache" / "jaxpipe" / "schedules"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == tmp_path / "c" / ".cache" / "jaxpipe" / "schedules"


def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder among temporary files that nobody else can enter."""

    def homeless() -> Path:
        raise RuntimeError

    for name in ("JAXPIPE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user_folder = tmp_path / f"jaxpipe-{os.getuid()}"
    assert default_folder() == user_folder / "jaxpipe" / "schedules" == default_folder()
    assert user_folder.stat().st_mode & 0o777 == 0o700
    user_folder.chmod(0o777)  # as if somebody had made it for us
    other = default_folder().parent.parent
    assert other.parent == tmp_path and other != user_folder
    assert other.stat().st_mode & 0o777 == 0o700
    user_folder.rmdir()
    user_folder.symlink_to(other)
    assert default_folder().parent.parent != user_folder


def age(path: Path, seconds: float) -> None:
    about = path.stat()
    os.utime(path, (about.st_atime, about.st_mtime - seconds))


def test_the_oldest_files_beyond_the_size_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ScheduleCache(tmp_path)
    for m in range(4, 10):
        path = cache.store(solved(task_of(microbatches=m), one_f_one_b_rows(4, m)))
        assert path is not None
        age(path, 1000 - m)
    monkeypatch.setattr("jaxpipe.search.solve.cache.MAX_BYTES", 3 * path.stat().st_size + 1_000)
    lost = tmp_path / f".{path.name}.abc_12.tmp"  # by a writer that was killed
    lost.write_text("half an entr")
    age(lost, 7200)
    cache.store(solved(task_of(microbatches=10), one_f_one_b_rows(4, 10)))
    assert [e.task.num_microbatches for e in cache.entries()] == [8, 9, 10]
    assert len(list(tmp_path.iterdir())) == 3


def test_clear_removes_entries_and_nothing_else(cache: ScheduleCache, notices: Notices, entry: Path) -> None:
    damaged = cache.store(solved(task_of(microbatches=9), one_f_one_b_rows(4, 9)))
    assert damaged is not None
    damaged.write_text("")
    foreign_names = ["notes.txt", "schedule.json", f"{entry.name}.bak", f"x{entry.name}", "..tmp"]
    for name in foreign_names:
        (cache.folder / name).write_text("mine")
    stale = cache.folder / f".{entry.name}.abc_12.tmp"
    stale.write_text("half an entr")
    assert cache.clear() == 3
    assert sorted(p.name for p in cache.folder.iterdir()) == sorted(foreign_names)
    assert cache.lookup(task_of()) is None
    assert notices == []


WRITER = """
import random, sys
from dataclasses import replace
from pathlib import Path
from jaxpipe.schedule import CostProfile, simulate
from jaxpipe.search.solve.cache import ScheduleCache
from jaxpipe.search.solve.task import Solution, SolveTask
from tests.support.schedule_strategies import one_to_one, random_schedule
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
notices = []
cache = ScheduleCache(folder, notices.append)
rng = random.Random(seed)
costs = CostProfile.uniform(3)
for k in range(40):
    m = 2 + k % 3
    task = SolveTask(one_to_one(3), m, costs)
    schedule = random_schedule(task.placement, m, rng)
    solution = Solution(task, schedule, simulate(schedule, costs), 1.0 + seed, 1.0)
    assert cache.store(solution) is not None
    assert cache.lookup(task) is not None
    if k == 20 and seed == 0:
        (folder / "unrelated").write_text("x")
print(notices)
"""


def test_files_of_concurrent_writers_are_whole(tmp_path: Path, notices: Notices) -> None:
    """Nor does any of them ever read half a file."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(seed)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    for writer in writers:
        out, err = writer.communicate()
        assert (writer.returncode, out) == (0, "[]\n"), err
    cache = ScheduleCache(tmp_path, notices.append)
    assert [e.task.num_microbatches for e in cache.entries()] == [2, 3, 4]
    assert all(cache.lookup(e.task) is not None for e in cache.entries())
    assert notices == []
    assert len(list(tmp_path.iterdir())) == 4, "three entries and the unrelated file"
