"""Vocabulary layers spread over the ranks: orders, closed forms, and 40 steps measured on 8 A100."""

from __future__ import annotations

import csv
import inspect
import math
import random
from dataclasses import replace

import pytest

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule import (
    VOCABULARY_FAMILIES,
    Action,
    CostProfile,
    Link,
    Schedule,
    bidirectional,
    check_schedule,
    find_problems,
    generate,
    one_to_one,
    parse_schedule,
    simulate,
    v_shape,
    with_vocabulary,
)
from jaxpipe.schedule.families.one_f_one_b import gpipe, zb_h1
from jaxpipe.schedule.families.vocabulary import spread_vocabulary
from jaxpipe.schedule.files import from_placement, to_placement
from jaxpipe.schedule.text import draw
from jaxpipe.search.bounds import lower_bound, rank_lower_bounds
from tests.support.paths import GOLDEN

SIZES = [(1, 1), (1, 2), (2, 1), (3, 2), (4, 4), (4, 11), (5, 6)]
BARRIERS = {"vocab-1f1b": 1, "vocab-1f1b-2": 2}


def costs_of(name: str, p: int, head: tuple[float, float], **share: float) -> CostProfile:
    family = VOCABULARY_FAMILIES[name]
    return CostProfile.on(family.placement(p, family.default_chunks), head=head, **share)


@pytest.mark.parametrize("name", sorted(VOCABULARY_FAMILIES))
def test_any_sizes_and_costs(name: str) -> None:
    for p, m in SIZES:
        for share in ({}, {"f": 18.5, "b": 18.1, "w": 9.3, "comm": 1.85}, {"f": 0.0, "comm": 1.0}):
            costs = costs_of(name, p, (0.7, 0.4), **share)
            schedule = generate(name, p, m, costs=costs)
            check_schedule(schedule)
            family = VOCABULARY_FAMILIES[name]
            assert schedule.placement == family.placement(p, family.default_chunks)
            assert (schedule.name, schedule.num_chunks) == (name, family.default_chunks)
            assert parse_schedule(str(schedule)) == schedule
            timeline = simulate(schedule, costs)
            assert timeline.makespan >= lower_bound(schedule.placement, m, costs) * (1 - 1e-9)
            bounds = rank_lower_bounds(schedule.placement, m, costs)
            assert all(timeline.makespan >= bound * (1 - 1e-9) for bound in bounds)


@pytest.mark.parametrize("name", sorted(BARRIERS))
def test_closed_forms(name: str) -> None:
    """Parts of the head cost no more than what they compute, whatever that is, and a microbatch a barrier."""
    rng = random.Random(0)
    for p in (1, 2, 3, 5, 8, 16):
        for m in (2, p + 1, 2 * p, 2 * p + 3):
            f, b, w, s, t = 1.0, rng.uniform(1, 2), rng.uniform(0.25, 1.25), rng.uniform(0, 2), rng.uniform(0, 2)
            costs = costs_of(name, p, (s, t), f=f, b=b, w=w)
            timeline = simulate(generate(name, p, m, costs=costs), costs)
            assert timeline.makespan == pytest.approx(m * (f + b + w + s + t) + (p - 1) * (f + b + w))
            peaks = [min(p - r + BARRIERS[name], m) for r in range(p)]
            assert timeline.peak_activations == pytest.approx(peaks)


def test_joint() -> None:
    for p in range(1, 10):
        for m in (2 * p, 2 * p + 3):
            costs = costs_of("vocab-1f1b-joint", p, (0.3, 0.6), f=1, b=1.2, w=0.8)
            timeline = simulate(generate("vocab-1f1b-joint", p, m), costs)
            assert timeline.makespan == pytest.approx(3.9 * m + 3 * (p - 1))
            assert max(timeline.peak_activations) <= math.ceil(1.5 * p)


@pytest.mark.parametrize("p", [2, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_v_half_holds_one_more_and_its_bubble_does_not_grow(p: int) -> None:
    def idle(name: str, m: int) -> tuple[float, float]:
        head = (0.5, 0.5) if name.startswith("vocab") else (0.0, 0.0)
        placement = with_vocabulary(v_shape(p), barriers=1) if any(head) else v_shape(p)
        costs = CostProfile.on(placement, head=head)
        timeline = simulate(generate(name, p, m, costs=costs), costs)
        return timeline.makespan - m * (3 + sum(head)), max(timeline.peak_activations)

    (plain, peak), few, many = idle("v-half", 4 * p), idle("vocab-v-half", 2 * p), idle("vocab-v-half", 4 * p)
    assert few == pytest.approx(many)
    assert many[0] <= plain + 3
    assert many[1] == pytest.approx(peak + 1)


@pytest.mark.parametrize("name", sorted(BARRIERS))
def test_messages_wait_for_nobody(name: str) -> None:
    """Messages of a tenth of a forward cost less than those of 1F1B."""
    costs = costs_of(name, 8, (0.2, 0.3), comm=0.1)
    timeline = simulate(generate(name, 8, 32, costs=costs), costs)
    plain = CostProfile.uniform(8, comm=0.1)
    assert timeline.makespan - 32 * 0.5 <= simulate(generate("1f1b", 8, 32), plain).makespan


def test_any_order_of_a_chain_takes_the_passes() -> None:
    """GPipe too, and one that splits backwards; the parts cost what they compute."""
    for make in (gpipe, zb_h1):
        placement = with_vocabulary(one_to_one(4), barriers=2)
        costs = CostProfile.on(placement, head=(0.3, 0.5))
        schedule = spread_vocabulary("mine", lambda m, stage_costs, make=make: make(4, m), placement, 12, costs)  # type: ignore[misc]
        check_schedule(schedule)
        plain = CostProfile.uniform(4)
        assert simulate(schedule, costs).makespan <= simulate(make(4, 12), plain).makespan + 12 * 0.8 + 6
    with pytest.raises(ScheduleError, match=r"stp has .*\+.*; vocabulary layers are spread over orders of F, B, W, BW"):
        placement = with_vocabulary(v_shape(2), barriers=1)
        spread_vocabulary(
            "x",
            lambda m, chain_costs: generate(
                "stp", 2, m, costs=replace(chain_costs, f_comm_s=(0.5,) * 4, b_comm_s=(0.5,) * 4)
            ),
            placement,
            4,
            None,
        )
    with pytest.raises(ScheduleError, match="bidirectional is no chain of one flow"):
        with_vocabulary(bidirectional(2), barriers=1)


def test_detached_stages() -> None:
    """A detached stage's backward is nobody's business but its own; it needs one all the same."""
    placement = with_vocabulary(one_to_one(1), barriers=1)
    assert placement.detached == (2,)
    assert (placement.successors(1), placement.returning(1)) == ((2, 3), (3,))
    assert from_placement(to_placement(placement)) == placement
    order = ["F0", "F1", "F2", "F3", "BW3", "BW1", "BW2", "BW0"]
    row = tuple(Action(name[:-1], int(name[-1]), 0) for name in order)
    schedule = Schedule("x", placement, 1, (row,))
    check_schedule(schedule)
    attached = replace(schedule, placement=replace(placement, detached=()))
    assert find_problems(attached) == ["BW1.0 stands before BW2.0, which it waits for, on rank 0 (slots 5 and 6)"]
    assert find_problems(replace(schedule, rows=(row[:-2] + row[-1:],))) != []
    with pytest.raises(ScheduleParseError, match=r"6: .*detached.*7.*0\.\.3"):
        parse_schedule(str(schedule).replace("detached: 2", "detached: 7"))
    with pytest.raises(ScheduleError, match=r"4 stages.*2 ranks"):
        replace(placement, num_ranks=2, flows=(((0,), (1,), (0,), (0,)),))


@pytest.mark.parametrize("name", sorted(VOCABULARY_FAMILIES))
def test_docstring_draws_the_family(name: str) -> None:
    family = VOCABULARY_FAMILIES[name]
    schedule = family.function(**family.picture)
    v = schedule.num_chunks
    picture = draw(simulate(schedule, CostProfile.on(schedule.placement, head=(1, 1), f=v, b=v, w=v)))
    assert picture in inspect.getdoc(family.function).replace("\n    ", "\n")  # type: ignore[union-attr]


# --- 40 steps of a 4B GPT on 8 A100, m = 128: the artifact of arXiv 2411.05288, artifact/exp_one_host.csv ----------------

_FILE = GOLDEN / "vocabulary_a100.csv"
MEASURED = list(csv.DictReader(_FILE.read_text(encoding="utf-8").splitlines()))
METHODS = {  # the schedule, how near, and what it holds
    "base": ("1f1b", 0.02, 8),
    "redis": ("1f1b", 0.02, 8),
    "vocab-2": ("vocab-1f1b", 0.02, 9),
    "vocab-1": ("vocab-1f1b-2", 0.02, 10),
    "interlaced": ("vocab-1f1b-joint", 0.04, 12),
}
MEGABYTES = {"2048": 909.1125, "4096": 1818.225}
"""Megabytes of a microbatch's activations on a rank."""


def soaked_but_first(k: int) -> object:
    row = MEASURED[k]
    marks = [] if k < len(METHODS) else [pytest.mark.soak]
    return pytest.param(row, id=f"{row['method']}-{row['sequence']}-{row['words']}", marks=marks)


@pytest.mark.parametrize("row", [soaked_but_first(k) for k in range(len(MEASURED))])
def test_measured_steps(row: dict[str, str]) -> None:
    """Per-rank times as measured; S + T, one number there, is a third S: one of the head's three products."""
    assert len(MEASURED) == 40
    name, near, activations = METHODS[row["method"]]
    p = 8

    def column(key: str) -> tuple[float, ...]:
        return tuple(float(x) / 1e3 for x in row[key].split())

    f, bw = column("f_ms"), column("bw_ms")
    one, none, link = (1.0,) * p, (0.0,) * p, Link(float(row["transfer_ms"] or 0) / 1e3)
    if name != "1f1b":
        head = column("head_ms")
        f = (*column("embed_f_ms"), *f, *(x / 3 for x in head), 0.0)
        bw = (*column("embed_b_ms"), *bw, *(2 * x / 3 for x in head), 0.0)
        one, none = (*none, *one, *none, 0.0), (0.0,) * len(f)
    costs = CostProfile(f_s=f, b_s=none, w_s=bw, bw_s=bw, residual_bytes=one, w_residual_bytes=one, link=link)
    timeline = simulate(generate(name, p, 128, costs=costs), costs)
    assert timeline.makespan * 1e3 == pytest.approx(float(row["step_ms"]), rel=near)
    assert max(timeline.peak_activations) == activations
    assert float(row["activation_mb"]) == pytest.approx(activations * MEGABYTES[row["sequence"]], rel=1e-3)
