"""All schedule families through the same properties, closed forms, reference numbers, and the docstring pictures.

What is expected of a family is read off its :class:`~jaxpipe.schedule.Family` value, so that a new one is tested without a
change here. ``PROMISED`` only adds what some promise beyond their closed form.
"""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    FAMILIES,
    Action,
    CostProfile,
    Schedule,
    Timeline,
    check_schedule,
    families,
    family,
    generate,
    parse_schedule,
    simulate,
    v_shape,
)
from jaxpipe.schedule.families.family import TABLE, register_modules
from jaxpipe.schedule.text import draw
from jaxpipe.search.bounds import lower_bound

Options = dict[str, float]
CASES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in sorted({1, 2, p - 1, p, p + 1, 2 * p, 2 * p + 3} - {0})]
FEW_CASES = [(1, 2), (2, 1), (3, 2), (4, 4), (4, 9), (3, 4)]
"""Fewer microbatches than ranks, as many, one more, and many."""
PROMISED: dict[str, Callable[[int, int, int], float]] = {
    "interleaved-1f1b": lambda p, m, v: min((v + 1) * p - 1, m * v) / v,
    "interleaved-low-memory": lambda p, m, v: min(p, m),
    "looped-dfs": lambda p, m, v: min((v + 1) * p - 1, m * v) / v,
    "zb-1p": lambda p, m, v: p,
    "zb-2p": lambda p, m, v: 2 * p,
    "zb-two-thirds": lambda p, m, v: min(p, m, p // 3 * 2 + 2),
    "v-min": lambda p, m, v: min(p / 3 + 1.5, m),
    "v-half": lambda p, m, v: min((p + 3) / 2, m),
    "v-zb": lambda p, m, v: min(p, m),
    "1f1b-v": lambda p, m, v: min(2 * p / 3 + 1, m),
    "gis": lambda p, m, v: min(p, m),
    "gis-g": lambda p, m, v: min(p, m),
    "gis-h": lambda p, m, v: min((v - 1) * -(-p // 2) + p, m * v) / v,
    "po": lambda p, m, v: min((v - 1) * (-(-p // 2) + 1) + p, m * v) / v,
    "po-h": lambda p, m, v: min((v // 2) * (-(-p // 2) + 1) + p, m * v) / v,
    "po-f": lambda p, m, v: 1 / v,
    "chimera": lambda p, m, v: min(p, m),
    "hanayo": lambda p, m, v: min(p, m),
    "dualpipe-v": lambda p, m, v: min(p + 0.5, m),
    "stp": lambda p, m, v: min((3 * p + 1) / 2, m),
    "stp-memory": lambda p, m, v: min(p + 1, m),
    "stp-offload": lambda p, m, v: min((3 * p + 1) / 2, m),
    "stp-published": lambda p, m, v: min(max(3 * p + 1, 4 * p - 1) / 2, m),
}
"""(p, m, v) -> activations that no rank holds more of, at any sizes and costs: more than what the closed form says."""


def most_activations(name: str, p: int, m: int, options: Options) -> float:
    """Return the peak that the family promises: its memory limit, that in ``PROMISED`` or of its closed form, and m at most."""
    if "memory_limit" in options:
        return min(options["memory_limit"], m)
    promise = PROMISED.get(name, FAMILIES[name].peak_activations)
    bound = promise(p, m, int(options.get("chunks", FAMILIES[name].default_chunks))) if promise else None
    return m if bound is None else bound


PROFILES = [
    {"f": 1.0, "b": 1.0, "w": 1.0},
    {"f": 18.5, "b": 18.1, "w": 9.3, "comm": 1.85},
    {"f": 1.0, "b": 2.0, "w": 3.0, "comm": 0.1, "w_residual": 0.25},
]


def uniform(schedule: Schedule, **costs: float) -> CostProfile:
    return CostProfile.uniform(schedule.num_stages, chunks=schedule.num_chunks, **costs)


def run(name: str, p: int, m: int, chunks: int | None = None, limit: float | None = None, **costs: float) -> Timeline:
    v = chunks or FAMILIES[name].default_chunks
    profile = CostProfile.uniform(p * v, chunks=v, **costs)
    return simulate(generate(name, p, m, chunks=chunks, costs=profile, memory_limit=limit), profile)


def each_case() -> Iterator[object]:
    """Yield every family with a few values of each option that it takes."""
    values = {"chunks": (1, 2, 3), "memory_limit": (1, 2.5)}
    for name in FAMILIES:
        option_sets = [{option: value} for option in FAMILIES[name].options for value in values.get(option, ())]
        for options in option_sets or [{}]:
            yield pytest.param(name, options, id=f"{name}-{options}" if options else name)


def generate_feasible(name: str, p: int, m: int, costs: CostProfile, options: Options) -> tuple[Schedule, Options]:
    """Return the schedule and its options; where the limit is below what the family needs, with the one that its refusal
    names."""
    try:
        return generate(name, p, m, costs=costs, **options), options  # type: ignore[arg-type]
    except ScheduleError as error:
        enough = re.search(r"memory limit of \S+ is below the \S+ .*; use (\S+) or more", str(error))
        assert enough and "memory_limit" in options, error
    final_options = {**options, "memory_limit": float(enough[1])}
    return generate(name, p, m, costs=costs, **final_options), final_options  # type: ignore[arg-type]


def soaked(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.soak)


@pytest.mark.parametrize(("name", "options"), list(each_case()))
@pytest.mark.parametrize("cases", [FEW_CASES, soaked(CASES)], ids=["few", "all"])
def test_properties(name: str, options: Options, cases: list[tuple[int, int]]) -> None:
    """Each of the few by one of the profiles in turn, all by all."""
    turns = zip(cases, itertools.cycle(PROFILES)) if cases is FEW_CASES else itertools.product(cases, PROFILES)
    for (p, m), costs in turns:
        v = int(options.get("chunks", FAMILIES[name].default_chunks))
        profile = CostProfile.uniform(p * v, chunks=v, **costs)
        schedule, final_options = generate_feasible(name, p, m, profile, options)
        check_schedule(schedule)
        assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, p, m)
        assert schedule.placement == FAMILIES[name].placement(p, v)
        assert parse_schedule(str(schedule)) == schedule
        timeline = simulate(schedule, profile)
        assert max(timeline.peak_activations) <= most_activations(name, p, m, final_options) + 1e-9
        assert timeline.makespan >= lower_bound(schedule.placement, m, profile) * (1 - 1e-9)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize(
    ("fbw", "cases"),
    [
        ((1, 1, 1), FEW_CASES),
        ((2, 3, 4), FEW_CASES),
        *(
            pytest.param(fbw, CASES, marks=pytest.mark.soak)
            for fbw in [(1, 1, 1), (2, 3, 4), (3, 5, 2), (18.5, 18.1, 9.3)]
        ),
    ],
)
def test_closed_forms(name: str, fbw: tuple[float, float, float], cases: list[tuple[int, int]]) -> None:
    family = FAMILIES[name]
    if family.peak_activations is None and family.makespan is None:
        return
    f, b, w = fbw
    for p, m in cases:
        for chunks in (1, 2, 3) if "chunks" in family.options else (family.default_chunks,):
            timeline = run(name, p, m, chunks=chunks, f=f, b=b, w=w)
            if family.peak_activations and (peak := family.peak_activations(p, m, chunks)) is not None:
                assert max(timeline.peak_activations) == pytest.approx(peak)
            if family.makespan and (makespan := family.makespan(p, m, chunks, f, b, w)) is not None:
                assert timeline.makespan == pytest.approx(makespan)


def test_a_limit_that_is_no_limit() -> None:
    for name in FAMILIES:
        if "memory_limit" in FAMILIES[name].options:
            check_schedule(generate(name, 3, 4, memory_limit=1e9))


def test_1f1b_peaks_rank_by_rank() -> None:
    for p, m in CASES:
        assert run("1f1b", p, m).peak_activations == pytest.approx([min(p - r, m) for r in range(p)])
        eager = run("eager-1f1b", p, m).peak_activations
        assert eager == pytest.approx([min(2 * (p - r) - 1, m) for r in range(p)])


@pytest.mark.parametrize("fbw", [(1, 1, 1), (3, 2, 2), (4, 5, 1)])
def test_zb_h2_span(fbw: tuple[float, float, float]) -> None:
    f, b, w = fbw
    for p, m in [(1, 1), (2, 3), (4, 7), (8, 15), (8, 40)]:
        span = m * (f + b + w) + (p - 1) * max(0, f + b - 2 * w)
        assert run("zb-h2", p, m, f=f, b=b, w=w).max_span == pytest.approx(span)


# FACTS.md: p = 8, m = 16, F = B = W = 2 (a rank's share), no transfer time: makespan, longest span, peak
REFERENCE = {
    "gpipe": (None, 138, 138, 16),
    "1f1b": (None, 138, 138, 8),
    "interleaved-1f1b": (2, 117, 117, 11.5),
    "zb-h1": (None, 110, 110, 8),
    "zb-1p": (None, 110, 110, 8),
    "zb-h2": (None, 110, 96, 15),
    "zb-2p": (None, 110, 96, 16),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_no_worse_than_the_papers_own_code(name: str) -> None:
    chunks, makespan, span, peak = REFERENCE[name]
    timeline = run(name, 8, 16, chunks=chunks, f=2, b=2, w=2)
    assert timeline.makespan <= makespan + 1e-9
    assert timeline.max_span <= span + 1e-9
    assert max(timeline.peak_activations) <= peak


# controllable-memory.txt table 4, ZB-1P: p, m, per-chunk costs of table 5 (a rank's share is twice that), comm, bubble in %
TABLE_4 = [
    (16, 16, (12.96, 13.22, 9.76), 1.34, 31.7),
    (16, 32, (12.96, 13.22, 9.76), 1.34, 20.1),
    (24, 24, (9.30, 9.47, 7.19), 0.89, 31.5),
    (24, 48, (9.30, 9.47, 7.19), 0.89, 19.8),
    (32, 32, (6.72, 6.89, 5.06), 0.577, 32.1),
]


@pytest.mark.parametrize(("p", "m", "chunk", "comm", "percent"), TABLE_4)
def test_zb_1p_of_table_4(p: int, m: int, chunk: tuple[float, float, float], comm: float, percent: float) -> None:
    f, b, w = (2 * x for x in chunk)
    timeline = run("zb-1p", p, m, f=f, b=b, w=w, comm=comm)
    assert 100 * timeline.span_bubble_rate <= percent + 0.3


def test_eager_hides_transfers() -> None:
    slow = {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.3}
    for p, m in [(2, 8), (4, 16), (8, 32)]:
        assert run("eager-1f1b", p, m, **slow).makespan < run("1f1b", p, m, **slow).makespan


def test_interleaved_with_a_remainder() -> None:
    """Any m: every microbatch's order is that of the next multiple of p, so never slower than it; one chunk is eager."""
    for p, m, v in [(4, 5, 2), (4, 6, 3), (3, 7, 2), (8, 9, 4), (8, 3, 2)]:
        full = -(-m // p) * p
        assert run("interleaved-1f1b", p, m, chunks=v).makespan <= run("interleaved-1f1b", p, full, chunks=v).makespan
    assert generate("interleaved-1f1b", 4, 9, chunks=1).rows == generate("eager-1f1b", 4, 9).rows


def test_gradient_accumulation_order_is_the_same_everywhere() -> None:
    """Every family runs the W (or BW) of a stage in microbatch order, so that gradients add up in one order."""
    for name in FAMILIES:
        schedule = generate(name, 4, 9)
        for rank in range(4):
            for stage in schedule.placement.stages_of(rank):
                last = [a.microbatch for a in schedule.actions(rank) if a.stage == stage and a.op in ("W", "BW")]
                assert last == [i for i in range(9) if rank in schedule.placement.ranks(stage, i)], name


def test_generation_is_repeatable() -> None:
    for name in FAMILIES:
        assert generate(name, 4, 10) == FAMILIES[name].function(4, 10), name


# --- errors ---------------------------------------------------------------------------------------------------------------

BAD = [
    ("1f1b", {"ranks": 0, "microbatches": 4}, "ranks is 0; want a whole number of at least 1"),
    ("1f1b", {"ranks": 4, "microbatches": -1}, "microbatches is -1"),
    ("gpipe", {"ranks": 2.5, "microbatches": 4}, "ranks is 2.5"),
    ("gpipe", {"ranks": True, "microbatches": 4}, "ranks is True"),
    ("interleaved-1f1b", {"ranks": 4, "microbatches": 4, "chunks": 0}, "chunks is 0"),
    ("1f1b", {"ranks": 4, "microbatches": 4, "chunks": 2}, ", hanayo, interleaved-1f1b, "),
    (
        "zb-1p",
        {"ranks": 4, "microbatches": 4, "memory_limit": 3},
        "families that take memory_limit: ",
    ),
    ("zb", {"ranks": 4, "microbatches": 4, "memory_limit": 0.5}, "use 1 or more"),
    ("zb", {"ranks": 4, "microbatches": 4, "memory_limit": float("nan")}, "memory limit of nan"),
    ("zb", {"ranks": 4, "microbatches": 4, "objective": "peak"}, "unknown objective 'peak'; there are makespan, span"),
    ("1fb1", {"ranks": 4, "microbatches": 4}, "did you mean '1f1b'"),
    (
        "zb",
        {"ranks": 4, "microbatches": 4, "costs": CostProfile.uniform(3)},
        "for 3 stages, zb on 4 ranks with 1 per rank has 4",
    ),
    (
        "interleaved-1f1b",
        {"ranks": 4, "microbatches": 4, "costs": CostProfile.uniform(4)},
        "the costs are for 4 stages, interleaved-1f1b on 4 ranks with 2 per rank has 8",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD)
def test_bad_requests(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        generate(name, **arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_functions_check_sizes_themselves(name: str) -> None:
    with pytest.raises(ScheduleError, match="ranks is 0; want"):
        FAMILIES[name].function(0, 4)


# --- docstrings and pictures ----------------------------------------------------------------------------------------------


def figures(picture: list[str]) -> tuple[int, list[int]]:
    """Return the columns of a picture and how many actions each of its ranks runs."""
    return max(map(len, picture)), [len(re.findall(r"[A-Z]+[0-9]", line)) for line in picture]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_docstring_draws_the_family(name: str) -> None:
    """The picture of a family that weighs costs is as long as its schedule; of several such orders either may be found. One
    that is a row of another's table has no picture."""
    family = FAMILIES[name]
    docstring = inspect.getdoc(family.function) or ""
    assert "Raises" in docstring
    assert family.description
    if family.picture:
        schedule = family.function(**family.picture)
        v = schedule.num_chunks
        picture = draw(simulate(schedule, uniform(schedule, f=v, b=v, w=v))).splitlines()
        drawn = re.findall(r"rank +\d+ \|.*", docstring)
        assert (figures(drawn) == figures(picture)) if "costs" in family.options else (drawn == picture)
    assert "\n" not in family.description
    assert family.source


def test_picture_marks_chunks_lengths_and_gaps() -> None:
    costs = CostProfile.uniform(4, chunks=2, f=2, b=2, w=2)
    picture = draw(simulate(generate("interleaved-1f1b", 2, 2), costs))
    expected = """\
        rank 0 |F0- F1- F0b F1b     BW0b--- BW1b--- BW0---- BW1----
        rank 1 |    F0- F1- F0b BW0b--- F1b BW1b--- BW0---- BW1----"""
    assert picture.split() == textwrap.dedent(expected).split()
    with pytest.raises(ScheduleError, match="above 0"):
        draw(simulate(generate("1f1b", 1, 1), CostProfile.uniform(1)), unit_s=0)


def test_import_needs_neither_jax_nor_numpy() -> None:
    code = "import sys, jaxpipe.schedule.families; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_hold_actions_only() -> None:
    for name in FAMILIES:
        if FAMILIES[name].sees_collectives:
            continue  # these make braids
        assert all(isinstance(slot, Action) for row in generate(name, 3, 4).rows for slot in row)


@pytest.fixture
def table() -> Iterator[None]:
    """Remove what the test registers after it."""
    before = TABLE.copy()
    yield
    TABLE.clear()
    TABLE.update(before)


def test_readme_example_is_a_family(table: None) -> None:
    """The worked example of schedule/README.md runs as printed; the page keeps to its 60 lines."""
    page = (Path(families.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 60
    exec(page.split("```python\n")[1].split("```")[0], {"__name__": "lockstep"})
    family = FAMILIES["lockstep"]
    schedule = family.function(3, 5)
    check_schedule(schedule)
    timeline = simulate(schedule, uniform(schedule, f=1, b=2, w=3))
    assert family.makespan is not None
    assert timeline.makespan == family.makespan(3, 5, 1, 1, 2, 3)
    assert set(timeline.peak_activations) == {1}


# --- what a decorated function becomes -------------------------------------------------------------------------------------


def test_a_decorated_function_is_a_checked_family(table: None) -> None:
    """Options and chunks come from the signature; sizes and costs are checked at every call; the rest stays as it was."""

    @family("mine-v", "a V", "a test", placement=v_shape, sees_collectives=True)
    def mine(ranks: int, microbatches: int, costs: CostProfile | None = None, group: int | None = None) -> Schedule:
        """Doc."""
        return families.v_zb(ranks, microbatches, costs)  # type: ignore[attr-defined, no-any-return]

    registered = FAMILIES["mine-v"]
    assert (registered.function, registered.options, registered.default_chunks) == (mine, ("costs", "group"), 2)
    assert (registered.placement(3, 2), registered.sees_collectives) == (v_shape(3), True)
    assert (mine.__doc__, mine.__name__, list(inspect.signature(mine).parameters)[:2]) == (
        "Doc.",
        "mine",
        ["ranks", "microbatches"],
    )
    assert mine(2, microbatches=3).rows == generate("v-zb", 2, 3).rows
    for call, message in [
        (lambda: mine(0, True), "mine-v: ranks is 0; want .*; mine-v: microbatches is True"),
        (lambda: mine(2, 3, group=1.5), "mine-v: group is 1.5"),  # type: ignore[arg-type]
        (
            lambda: mine(2, 3, CostProfile.uniform(2)),
            "the costs are for 2 stages, mine-v on 2 ranks with 2 per rank has 4",
        ),
    ]:
        with pytest.raises(ScheduleError, match=message):
            call()


def test_a_file_of_the_folder_is_found(table: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decorated functions and plain values, with no list that names them."""
    (tmp_path / "found_here.py").write_text(
        "from jaxpipe.schedule.families.family import Family, family, in_order\n"
        "@family('found-1', 'one', 'a test')\n"
        "def found(ranks, microbatches):\n    return in_order('found-1', microbatches, [['F', 'BW'] * microbatches] * ranks)\n"
        "FOUND = Family('found-2', found, 'two', 'a test')\n"
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    assert register_modules(families.__name__) >= {"found-1", "found-2", "gpipe"}
    del sys.modules["jaxpipe.schedule.families.found_here"]
    assert list(FAMILIES) == sorted(FAMILIES)
    assert generate("found-2", 2, 3).rows == generate("found-1", 2, 3).rows
