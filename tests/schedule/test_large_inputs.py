"""Large and odd inputs: work grows with the input and not with its square, and nothing overflows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from jaxpipe.cli import main
from jaxpipe.errors import ScheduleParseError
from jaxpipe.plot import plot_timelines
from jaxpipe.plot.pareto import Point, plot_pareto
from jaxpipe.schedule import (
    CostProfile,
    Placement,
    Schedule,
    check_schedule,
    circular,
    explicit,
    find_problems,
    one_f_one_b,
    one_to_one,
    parse_schedule,
    simulate,
    write_schedule,
    write_timeline,
)
from jaxpipe.schedule.ir import Action
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.bounds import lower_bound, rank_lower_bounds

# Work, counted in bytecodes.


def bytecodes(work: Callable[[], object]) -> int:
    """Return how many bytecodes ``work`` executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def one_microbatch(placement: Placement) -> Schedule:
    """Down all stages and back."""
    stages = range(placement.num_stages)
    down, up = [Action("F", s, 0) for s in stages], [Action("BW", s, 0) for s in reversed(stages)]
    rows = tuple(
        tuple(a for a in (*down, *up) if a.stage in placement.stages_of(r)) for r in range(placement.num_ranks)
    )
    return Schedule("x", placement, 1, rows)


def ask_everything(placement: Placement) -> None:
    for stage in range(placement.num_stages):
        placement.predecessors(stage), placement.successors(stage), placement.num_chunks
    for rank in range(placement.num_ranks):
        placement.stages_of(rank)


PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "one rank": lambda n: explicit(1, [0] * n),
    "a rank a stage": one_to_one,
    "few ranks": lambda n: circular(4, n // 4),
}
WORK: dict[str, Callable[[Placement, Schedule], object]] = {
    "neighbours": lambda placement, _: ask_everything(placement),
    "check": lambda _, schedule: check_schedule(schedule),
    "simulate": lambda placement, schedule: simulate(schedule, CostProfile.uniform(placement.num_stages)),
    "bounds": lambda placement, _: rank_lower_bounds(placement, 1, CostProfile.uniform(placement.num_stages)),
    "replicas": lambda placement, _: list(map(Problem.of(placement, 1).replicas_of, range(placement.num_ranks))),
}


def work_of(kind: str, work: str, stages: int) -> int:
    placement = PLACEMENTS[kind](stages)
    schedule = one_microbatch(placement)
    return bytecodes(lambda: WORK[work](placement, schedule))


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_work_grows_with_the_stages(kind: str, work: str) -> None:
    """reliability.md D16: a valid chain of 20,000 stages took minutes, since each question went over all stages."""
    assert work_of(kind, work, 160) < 2.5 * work_of(kind, work, 80)


def test_bounds_through_others_are_what_the_proof_says() -> None:
    """The bound of rank 0 that comes from the last rank, by hand: there, m times F and B, and back."""
    costs = CostProfile((1, 1, 5), (1, 1, 5), (1, 1, 0), (2, 2, 5), (1, 1, 1), (1, 1, 1))
    assert rank_lower_bounds(one_to_one(3), 4, costs) == (2 + 4 * 10 + 1 + 1 + 1, 1 + 4 * 10 + 1 + 1, 40)
    assert lower_bound(one_to_one(3), 4, costs) == 45


def test_a_checker_that_has_found_enough_stops() -> None:
    """D16: a million microbatches and one action were three million strings."""
    text = "# jaxpipe schedule 1\nname: x\nmicrobatches: 1000000\nplacement: one-to-one ranks=1\nrank 0: F0.0\n"
    problems = find_problems(parse_schedule(text))
    assert problems[0] == "F of stage 0, microbatch 1 on rank 0 is missing"
    assert problems[-1] == "1000 actions are missing or done twice, and no more was looked for"
    assert len(problems) == 1001


def test_a_placement_of_more_stages_than_actions_is_refused_before_it_is_made() -> None:
    """D16: 36 kB said 800,000 stages."""
    rows = "".join(f"rank {r}: F{r}.0\n" for r in range(20))
    text = f"# jaxpipe schedule 1\nname: x\nmicrobatches: 1\nplacement: circular ranks=20 chunks=40000\n{rows}"
    with pytest.raises(ScheduleParseError, match=r"4.*800000 stages.*20 actions"):
        parse_schedule(text, "x.sched")


# Odd values.


@pytest.mark.parametrize("size", [5e-324, 1e-320, 1e-300, 1e299])
def test_any_size_of_residuals_can_be_simulated(size: float) -> None:
    """D15: 1e-320 bytes overflowed."""
    costs = replace(CostProfile.uniform(2), residual_bytes=(size, 1e-320), w_residual_bytes=(size, 0.0))
    timeline = simulate(one_f_one_b(2, 3), costs)
    assert timeline.peak_activations == (2, 1)
    assert max(timeline.memory[0].bytes) == pytest.approx(2 * size, abs=1e-300)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html", ".trace.json"])
def test_names_and_titles_that_are_no_text_are_drawn(tmp_path: Path, suffix: str) -> None:
    """D15: half of a surrogate pair, as of a file name that is not UTF-8, ended in UnicodeEncodeError."""
    timeline = replace(simulate(one_f_one_b(2, 2), CostProfile.uniform(2)), name="a\ud800", source="c\udfff")
    plot_timelines([timeline], tmp_path / f"x{suffix}", title="b\udcff")
    assert (tmp_path / f"x{suffix}").stat().st_size > 1000
    if suffix != ".trace.json":
        plot_pareto([Point("a\ud800 $x_$.sched", 1, 0.5)], tmp_path / f"p{suffix}", title="b\udcff")
        assert (tmp_path / f"p{suffix}").stat().st_size > 1000


def test_the_command_line_takes_such_names_and_titles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    schedule = replace(one_f_one_b(2, 2), name="a\ud800")
    write_schedule(schedule, "\udcff.sched")
    write_timeline(simulate(schedule, CostProfile.uniform(2)), "t.timeline.json")
    outputs = [x for suffix in ("sched", "json", "csv", "svg", "html", "trace.json") for x in ("-o", f"out.{suffix}")]
    for argv in (
        ["simulate", "\udcff.sched", *outputs],
        ["simulate", "\udcff.sched", "--json"],
        [
            "plot",
            "\udcff.sched",
            "t.timeline.json",
            "--title",
            "\udcff",
            "-o",
            "b.svg",
            "-o",
            "b.html",
            "-o",
            "b.trace.json",
        ],
        ["compare", "\udcff.sched", "--plot", "front.html"],
    ):
        assert main(argv) == 0, argv
        assert capsys.readouterr().err == ""


def test_null_bytes_and_pipes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.sched")
    os.mkfifo("pipe.json")
    for argv, words in (
        (["simulate", "a\0.sched"], "does not exist"),
        (["schedule", "1f1b", "-o", "a\0.svg"], "a path can't hold a null byte"),
        (["simulate", "pipe.sched"], "'pipe.sched' is not a regular file"),
        (["plot", "pipe.json", "-o", "x.svg"], "'pipe.json' is not a regular file"),
        (["schedule", "1f1b", "--costs", "pipe.json"], "'pipe.json' is not a regular file"),
    ):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert words in err
