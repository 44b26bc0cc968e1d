"""The schedule verbs of the command line: results, files, and one clear line with exit code 2 for every mistake."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.cli import main
from jaxpipe.schedule import (
    FAMILIES,
    VOCABULARY_FAMILIES,
    CostProfile,
    check_schedule,
    generate,
    one_f_one_b,
    read_schedule,
    simulate,
    write_costs,
    write_schedule,
    write_timeline,
)
from jaxpipe.schedule.memory import offloaded_share
from jaxpipe.search.bounds import lower_bound, span_lower_bound

KEYS = [
    "name",
    "ranks",
    "microbatches",
    "chunks",
    "makespan",
    "max_span",
    "bubble_rate",
    "span_bubble_rate",
    "peak_activations",
    "lower_bound",
    "span_lower_bound",
    "offloaded_share",
    "memory_limit",
    "group",
    "family_limit",
    "tp_exposed_s",
    "rank_shares",
    "free_copies",
    "file",
]


def without_progress(err: str) -> str:
    """Return stderr without the lines in which ``best``, once it has taken a second, says what it tries."""
    return re.sub(r"^ +\d+\.\d s  family \d+ of \d+, .*\n", "", err, flags=re.MULTILINE)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a verb that must succeed; returns stdout."""

    def run(*argv: object) -> str:
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert (code, without_progress(err)) == (0, "")
        return out

    return run


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a verb that must fail in the one way allowed; returns the message."""

    def run(*argv: object) -> str:
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        err = without_progress(err)
        assert code == 2
        assert out == ""
        assert err.startswith("jaxpipe: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert "Traceback" not in err
        return err.removeprefix("jaxpipe: ").strip()

    return run


# ---- results ---------------------------------------------------------------------------------------------------------


def test_overview_lists_every_verb(cli: Callable[..., str]) -> None:
    text = cli("--help")
    for verb in ("schedules", "schedule", "simulate", "compare", "best", "plot"):
        assert f"\n  {verb} " in text


def test_version(cli: Callable[..., str]) -> None:
    assert cli("--version").startswith("jaxpipe 0.")


@pytest.mark.parametrize("verb", ["schedules", "schedule", "simulate", "compare", "best", "plot", "solve", "tune"])
def test_every_verb_explains_itself(cli: Callable[..., str], verb: str) -> None:
    """Without names of our own code, which a rename leaves behind."""
    text = cli(verb, "--help")
    assert f"usage: jaxpipe {verb}" in text
    assert not re.search(r"\b[a-z]+_[a-z_]+\b", text)


def test_schedules_lists_families_with_descriptions(cli: Callable[..., str]) -> None:
    lines = cli("schedules").splitlines()
    names = [*FAMILIES, *VOCABULARY_FAMILIES]
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 3 for line in lines)
    assert [s["name"] for s in json.loads(cli("schedules", "--json"))["schedules"]] == names


@pytest.mark.parametrize("name", list(FAMILIES))
def test_json_of_every_family_is_the_simulation(cli: Callable[..., str], name: str) -> None:
    flags = ("--ranks", 3, "--microbatches", 6, "--cost", "1,2,0.5", "--comm", 0.25, "--offload-time", 0.5)
    record = json.loads(cli("schedule", name, *flags, "--json"))
    assert list(record) == KEYS
    chunks = FAMILIES[name].default_chunks
    costs = CostProfile.uniform(3 * chunks, chunks=chunks, f=1, b=2, w=0.5, comm=0.25, offload_time=0.5)
    options = FAMILIES[name].options
    schedule = generate(name, ranks=3, microbatches=6, costs=costs if "costs" in options else None)
    timeline = simulate(schedule, costs)
    offloaded = offloaded_share(schedule, costs)
    assert record == {
        "name": name,
        "ranks": 3,
        "microbatches": 6,
        "chunks": chunks,
        "makespan": timeline.makespan,
        "max_span": timeline.max_span,
        "bubble_rate": timeline.bubble_rate,
        "span_bubble_rate": timeline.span_bubble_rate,
        "peak_activations": list(timeline.peak_activations),
        "lower_bound": lower_bound(schedule.placement, 6, costs, offload=offloaded > 0),
        "span_lower_bound": span_lower_bound(schedule.placement, 6, costs, offload=offloaded > 0),
        "offloaded_share": offloaded,
        "memory_limit": None,
        "group": None,
        "family_limit": None,
        "tp_exposed_s": [],
        "rank_shares": [1, 1, 1],
        "free_copies": False,
        "file": None,
    }


def test_costs_are_a_rank_share_whatever_the_chunks(cli: Callable[..., str]) -> None:
    """FACTS.md: p=8, m=16, F=B=W=2: 1F1B 138, interleaved with two chunks 117, peaks 8 and 11.5."""
    sizes = ("--ranks", 8, "--microbatches", 16, "--cost", "2,2,2", "--json")
    plain = json.loads(cli("schedule", "1f1b", *sizes))
    interleaved = json.loads(cli("schedule", "interleaved-1f1b", "--chunks", 2, *sizes))
    assert (plain["makespan"], max(plain["peak_activations"])) == (138, 8)
    assert (interleaved["makespan"], max(interleaved["peak_activations"])) == (117, 11.5)
    assert plain["bubble_rate"] == pytest.approx(0.304, abs=5e-4)


def test_w_residual_lowers_the_peak_of_split_schedules(cli: Callable[..., str]) -> None:
    def peak(*extra: object) -> float:  # of the last rank, whose W lag B the most
        record: dict[str, Any] = json.loads(cli("schedule", "zb-h1", "--ranks", 4, "--json", *extra))
        peaks: list[float] = record["peak_activations"]
        return peaks[-1]

    assert [peak("--w-residual", 0), peak("--w-residual", 0.5), peak()] == [1, 2.5, 4]


def test_summary_for_people_with_picture(cli: Callable[..., str]) -> None:
    text = cli("schedule", "1f1b", "--ranks", 2, "--microbatches", 3)
    assert "1f1b: 2 ranks, 3 microbatches, 1 chunk per rank" in text
    assert "makespan           12" in text
    assert "rank 1 |   F0 BW0-- F1 BW1-- F2 BW2--" in text


def test_where_no_picture_fits_a_line_says_how_to_draw_it(cli: Callable[..., str]) -> None:
    many = ("--ranks", 16, "--microbatches", 40, "--comm", 0.1)
    for flags in (("--microbatches", 200), ("--ranks", 17), many, ("--cost", "1,1,1e-6")):
        text = cli("schedule", "zb-h1", *flags)
        assert "rank 0 |" not in text
        assert "-o x.svg draws it" in text


def test_any_costs_have_a_picture_with_rounded_times(cli: Callable[..., str]) -> None:
    """Also those of the README's first example, which have no common unit that fits."""
    for flags in (("zb-1p", "--cost", "1,1.1,0.9", "--comm", 0.1), ("1f1b", "--cost", "1,1.41421356,1.7320508")):
        text = cli("schedule", *flags)
        rows = re.findall(r"^rank \d \|(.*)$", text, re.MULTILINE)
        assert len(rows) == 4
        assert max(map(len, rows)) < 160
        for row in rows:
            names = [cell.rstrip("-") for cell in row.split()]
            assert sorted(names) == sorted({f"{op}{i}" for op in {x[:-1] for x in names} for i in range(8)})
        assert re.search(r"times rounded to multiples of 0\.\d+", text)
    assert "rounded" not in cli("schedule", "1f1b")


def test_unequal_shares_are_named(cli: Callable[..., str], tmp_path: Path) -> None:
    """users.md 3.8: three stages on two ranks count activations in two units."""
    rows = "rank 0: F0.0 F1.0 F0.1 F1.1 BW1.0 BW0.0 BW1.1 BW0.1\nrank 1: F2.0 F2.1 BW2.0 BW2.1\n"
    (tmp_path / "uneven.sched").write_text(rows)
    text = cli("simulate", tmp_path / "uneven.sched")
    assert "peak activations   2 (by rank: 2 2)\n" in text
    assert "each rank counts in its own share of a microbatch: 1 0.5\n" in text
    assert json.loads(cli("simulate", tmp_path / "uneven.sched", "--json"))["rank_shares"] == [1, 0.5]
    assert "own share" not in cli("schedule", "1f1b")


def test_offload_of_any_family_with_its_report(cli: Callable[..., str], fails: Callable[..., str]) -> None:
    plain = json.loads(cli("schedule", "1f1b", "--json"))
    offloaded = json.loads(cli("schedule", "1f1b", "--offload", 1, "--offload-time", 1, "--json"))
    assert offloaded["makespan"] == plain["makespan"]
    assert max(offloaded["peak_activations"]) < max(plain["peak_activations"])
    assert 0 < offloaded["offloaded_share"] < 1
    text = cli("schedule", "1f1b", "--offload", 0.5, "--offload-time", 1, "--host-link", "shared")
    assert "offloaded, k = 0.333" in text.splitlines()[0]
    assert "of all activations" in text
    assert "want a number at least 0 and at most 1" in fails("schedule", "1f1b", "--offload", 1.5)


def test_compare_is_an_aligned_table_the_fastest_first(cli: Callable[..., str]) -> None:
    lines = cli("compare", "--ranks", 4, "--microbatches", 8).splitlines()
    rows = [line for line in lines if line.split()[0] in FAMILIES and "not possible" not in line]
    assert {line.split()[0] for line in lines[1:] if line.split()[0] in FAMILIES} == set(FAMILIES)
    column = lines[0].index("makespan") + len("makespan")
    assert all(line[column - 1] != " " and line[column] == " " for line in [lines[0], *rows])
    makespans = [float(line[:column].split()[-1]) for line in rows]
    assert makespans == sorted(makespans)
    assert sum(line.endswith("*") for line in rows) >= 1


def test_compare_json_marks_what_is_not_possible(cli: Callable[..., str]) -> None:
    entries = json.loads(cli("compare", "--memory-limit", 4, "--json"))["schedules"]
    by_name = {e["name"]: e for e in entries}
    assert set(by_name) == set(FAMILIES)
    assert list(by_name["1f1b"]) == KEYS
    assert by_name["gpipe"] == {
        "name": "gpipe",
        "error": "gpipe holds 8 activations on rank 0, above --memory-limit 4",
        "reason": "needs 8 activations, limit 4",
    }
    assert max(by_name["zb"]["peak_activations"]) <= 4
    assert by_name["zb"]["memory_limit"] == 4
    table = cli("compare", "--memory-limit", 4)
    assert re.search(r"^gpipe +not possible: needs 8 activations, limit 4$", table, re.MULTILINE)


def test_compare_gives_chunks_to_those_that_take_them(cli: Callable[..., str]) -> None:
    entries = json.loads(cli("compare", "--chunks", 3, "--ranks", 2, "--json"))["schedules"]
    assert {e["name"]: e["chunks"] for e in entries if "error" not in e} == {
        n: 3 if "chunks" in f.options else f.default_chunks
        for n, f in FAMILIES.items()
        if not any(e["name"] == n and "error" in e for e in entries)
    }


def test_compare_explores_parameters(cli: Callable[..., str]) -> None:
    sizes = ("--ranks", 4, "--microbatches", 8, "--memory-limit", 5, "--json")
    plain = {e["name"]: e for e in json.loads(cli("compare", *sizes))["schedules"]}
    explored = {e["name"]: e for e in json.loads(cli("compare", "--explore", *sizes))["schedules"]}
    assert "error" in plain["interleaved-1f1b"]
    assert explored["interleaved-1f1b"]["chunks"] > 2
    for name, entry in plain.items():
        if "error" not in entry and not entry["offloaded_share"]:
            assert explored[name]["makespan"] <= entry["makespan"] + 1e-9, name


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_compare_draws_the_front(cli: Callable[..., str], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"front{suffix}"
    assert f"wrote {path}" in cli("compare", "--plot", path, "--memory-limit", 4)
    assert path.stat().st_size > 5000
    if suffix != ".png":
        assert all(name in path.read_text() for name in ("1f1b", "zb-h1", "limit 4"))


@pytest.mark.parametrize("limit", [1, 2.5, pytest.param(100, marks=pytest.mark.soak)])
def test_best_is_no_worse_than_any_row_of_compare(cli: Callable[..., str], tmp_path: Path, limit: float) -> None:
    sizes = ("--ranks", 3, "--microbatches", 5, "--memory-limit", limit, "--comm", 0.1, "--json")
    best = json.loads(cli("best", *sizes, "-o", tmp_path / "best.sched"))
    assert max(best["peak_activations"]) <= limit * (1 + 1e-9)
    rows = [e for e in json.loads(cli("compare", *sizes))["schedules"] if "error" not in e]
    assert all(best["makespan"] <= e["makespan"] + 1e-9 for e in rows if not e["offloaded_share"])
    assert best["makespan"] >= best["lower_bound"] * (1 - 1e-9)
    check_schedule(read_schedule(tmp_path / "best.sched"))


def test_best_says_family_parameters_and_bound(cli: Callable[..., str]) -> None:
    text = cli("best", "--ranks", 4, "--microbatches", 6, "--memory-limit", 3)
    assert text.startswith("best: ")
    for word in (
        "--memory-limit 3" if "best: zb " in text else "best: ",
        "makespan",
        "longest rank span",
        "lower bound",
    ):
        assert word in text
    span = json.loads(cli("best", "--ranks", 4, "--microbatches", 8, "--objective", "span", "--json"))
    assert span["max_span"] <= json.loads(cli("schedule", "zb-2p", "--json"))["max_span"]


def test_best_with_a_cost_file_keeps_its_stages(cli: Callable[..., str], tmp_path: Path) -> None:
    write_costs(CostProfile.uniform(8, chunks=2, b=2, w=0.5), tmp_path / "costs.json")
    argv = ("--ranks", 4, "--costs", tmp_path / "costs.json", "--json")
    assert json.loads(cli("best", *argv))["chunks"] == 2
    assert json.loads(cli("best", "--ranks", 8, "--costs", tmp_path / "costs.json", "--json"))["chunks"] == 1


def test_best_when_nothing_fits(fails: Callable[..., str]) -> None:
    message = fails("best", "--ranks", 2, "--microbatches", 4, "--memory-limit", 0.5)
    assert message == (
        "no schedule of 2 ranks and 4 microbatches keeps a memory limit of 0.5; the smallest found to work is 1"
    )


def test_cost_file_is_used_per_stage(cli: Callable[..., str], tmp_path: Path) -> None:
    costs = CostProfile(
        (1e-3, 2e-3), (1e-3, 1e-3), (1e-3, 1e-3), (2e-3, 2e-3), (1e6, 1e6), (5e5, 5e5), source="measured"
    )
    write_costs(costs, tmp_path / "costs.json")
    argv = ("schedule", "1f1b", "--ranks", 2, "--microbatches", 4, "--costs", tmp_path / "costs.json")
    expected = simulate(one_f_one_b(2, 4), costs)
    assert json.loads(cli(*argv, "--json"))["makespan"] == expected.makespan
    assert f"makespan           {expected.makespan * 1e3:.4g} ms" in cli(*argv)
    assert "peak memory        2 MB" in cli(*argv)
    entries = json.loads(cli("compare", "--ranks", 2, "--costs", tmp_path / "costs.json", "--json"))["schedules"]
    fixed = {
        n for n, f in FAMILIES.items() if "chunks" not in f.options and f.placement(2, f.default_chunks).num_stages > 2
    }
    assert {e["name"] for e in entries if "error" in e} >= fixed
    assert {e["chunks"] for e in entries if "error" not in e} == {1}


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".sched", ".json", ".csv"])
def test_written_schedules_simulate_to_the_same(cli: Callable[..., str], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"zb-h2{suffix}"
    summary = json.loads(cli("schedule", "zb-h2", "--ranks", 3, "-o", path, "--json"))
    check_schedule(read_schedule(path))
    assert json.loads(cli("simulate", path, "--ranks", 3, "--microbatches", 8, "--chunks", 1, "--json")) == summary


def test_all_outputs_at_once(cli: Callable[..., str], tmp_path: Path) -> None:
    paths = [tmp_path / f"s{suffix}" for suffix in (".sched", ".json", ".csv", ".svg", ".png", ".html", ".trace.json")]
    text = cli("schedule", "1f1b", "--ranks", 2, "--microbatches", 2, *(x for p in paths for x in ("-o", p)))
    assert all(f"wrote {p}" in text for p in paths)
    first = [p.read_bytes()[:9] for p in paths]
    assert first[0] == b"# jaxpipe"
    assert b"\x89PNG" in first[4]
    assert "traceEvents" in json.loads(paths[6].read_text())


def test_simulate_draws_too(cli: Callable[..., str], tmp_path: Path) -> None:
    write_schedule(one_f_one_b(2, 2), tmp_path / "a.sched")
    cli("simulate", tmp_path / "a.sched", "-o", tmp_path / "a.svg", "-o", tmp_path / "b.csv")
    assert "makespan 9" in (tmp_path / "a.svg").read_text()
    assert read_schedule(tmp_path / "b.csv").rows == one_f_one_b(2, 2).rows


def test_simulate_several_steps(cli: Callable[..., str], fails: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "a.sched"
    cli("schedule", "zb-2p", "--microbatches", 9, "--w-residual", 0.4, "-o", path)
    flags = ("simulate", path, "--w-residual", 0.4, "--steps", 3, "--update", 0.5)
    assert "27.5 from step to step, 30.5 if ranks waited" in cli(*flags, "--post-validation", "-o", tmp_path / "a.svg")
    assert "makespan 85" in (tmp_path / "a.svg").read_text()
    assert "30.5 from step to step\n" in cli(*flags)
    summary = json.loads(cli(*flags, "--json"))
    assert (summary["period"], summary["makespan"], summary["steps"], summary["post_validation"]) == (
        30.5,
        30,
        3,
        False,
    )
    assert "number with --steps" in fails("simulate", path, "--update", 1)


def test_plot_predicted_over_measured(cli: Callable[..., str], tmp_path: Path) -> None:
    from dataclasses import replace

    schedule = one_f_one_b(2, 2)
    costs = CostProfile.uniform(2, f=1e-3, b=1e-3, w=1e-3)
    write_schedule(schedule, tmp_path / "a.sched")
    write_costs(costs, tmp_path / "costs.json")
    for name in ("run.timeline.json", "run.json"):
        write_timeline(replace(simulate(schedule, costs), source="measured"), tmp_path / name)
        argv = (tmp_path / "a.sched", tmp_path / name, "--costs", tmp_path / "costs.json")
        cli("plot", *argv, "-o", tmp_path / "p.svg", "-o", tmp_path / "p.trace.json", "--title", "both")
        text = (tmp_path / "p.svg").read_text()
        assert "1f1b, simulated — makespan 9 ms" in text
        assert "1f1b, measured — makespan 9 ms" in text
        assert json.loads((tmp_path / "p.trace.json").read_text())["otherData"]["title"] == "both"


# ---- bad input: flags ------------------------------------------------------------------------------------------------

BAD_FLAGS: dict[str, tuple[str, str]] = {
    "no verb": ("", "no verb given"),
    "unknown verb": ("shedule", "did you mean 'schedule'?"),
    "flag before the verb": ("--json schedule", "unknown verb '--json'"),
    "no family": ("schedule", "required: NAME"),
    "unknown family": ("schedule 1f1", "unknown schedule '1f1'; did you mean '1f1b'?"),
    "family in capitals": ("schedule ZB-H1", "known: 1f1b"),
    "unknown flag": ("schedule 1f1b --rank 4", "unknown flag '--rank'; did you mean '--ranks'?"),
    "misspelt flag with value": ("schedule 1f1b --microbatch=4", "did you mean '--microbatches'?"),
    "misspelt flag before what is missing": ("schedule --jsn", "did you mean '--json'?"),
    "unknown short flag": ("compare -x", "unknown flag '-x'"),
    "stray argument": ("schedule 1f1b gpipe", "unexpected argument 'gpipe'"),
    "no value": ("schedule 1f1b --ranks", "expected one argument"),
    "zero ranks": ("schedule 1f1b --ranks 0", "0 ranks can't be; want 1 to 4096"),
    "negative ranks": ("schedule 1f1b --ranks -2", "-2 ranks can't be"),
    "too many ranks": ("schedule 1f1b --ranks 5000", "want 1 to 4096"),
    "absurdly many ranks": ("compare --ranks 99999999999999999999999999", "want 1 to 4096"),
    "fractional ranks": ("schedule 1f1b --ranks 2.5", "'2.5' is not a whole number"),
    "ranks in words": ("compare --ranks four", "'four' is not a whole number"),
    "zero microbatches": ("schedule 1f1b --microbatches 0", "0 microbatches can't be"),
    "too many microbatches": ("compare --microbatches 2000000", "want 1 to 1000000"),
    "zero chunks": ("schedule interleaved-1f1b --chunks 0", "0 chunks can't be"),
    "too large altogether": ("schedule gpipe --ranks 4096 --microbatches 1000", "for example --microbatches 488"),
    "chunks where there are none": ("schedule 1f1b --chunks 2", "1f1b takes no --chunks"),
    "two costs": ("schedule 1f1b --cost 1,2", "'1,2' has 2 values; want three as F,B,W"),
    "four costs": ("schedule 1f1b --cost 1,2,3,4", "has 4 values"),
    "cost in words": ("schedule 1f1b --cost 1,x,1", "cost of B 'x' is not a number"),
    "empty cost": ("schedule 1f1b --cost 1,,1", "cost of B '' is not a number"),
    "negative cost": ("schedule 1f1b --cost -1,1,1", "cost of F is -1; want a number at least 0"),
    "negative later cost": ("compare --cost 1,1,-2", "cost of W is -2"),
    "nan cost": ("schedule 1f1b --cost 1,nan,1", "cost of B is nan"),
    "infinite cost": ("schedule 1f1b --cost inf,1,1", "cost of F is inf"),
    "costs all zero": ("schedule 1f1b --cost 0,0,0", "all three costs are 0"),
    "negative comm": ("schedule 1f1b --comm -0.5", "time of a transfer is -0.5"),
    "nan comm": ("compare --comm nan", "time of a transfer is nan"),
    "w-residual above one": ("schedule zb-h1 --w-residual 1.5", "want a number at least 0 and at most 1"),
    "negative w-residual": ("schedule zb-h1 --w-residual -0.1", "fraction is -0.1"),
    "zero memory limit": ("schedule zb --memory-limit 0", "limit is 0; want a number above 0"),
    "nan memory limit": ("schedule zb --memory-limit nan", "limit is nan"),
    "memory limit below one microbatch": ("schedule zb --memory-limit 0.5", "use 1 or more"),
    "memory limit that a fixed order breaks": ("schedule 1f1b --memory-limit 3", "holds 4 activations on rank 0"),
    "costs and cost": ("schedule 1f1b --costs x.json --cost 1,1,1", "--costs FILE and --cost contradict"),
    "costs and comm": ("compare --costs x.json --comm 1", "--costs FILE and --comm contradict"),
    "missing costs file": ("schedule 1f1b --costs no-such.json", "'no-such.json' does not exist"),
    "simulate nothing": ("simulate", "required: FILE"),
    "plot without output": ("plot a.sched", "required: -o"),
    "output without suffix": ("schedule 1f1b -o picture", "unknown suffix ''"),
    "output with unknown suffix": ("schedule 1f1b -o a.pgn", "unknown suffix '.pgn'; did you mean '.png'?"),
    "output into a missing folder": ("schedule 1f1b -o nowhere/a.svg", "there is no directory 'nowhere'"),
    "output given twice": ("schedule 1f1b -o a.svg -o a.svg", "given twice"),
    "plot of compare without suffix": ("compare --plot front", "--plot 'front': unknown suffix ''"),
    "plot of compare as a schedule": ("compare --plot front.sched", "use one of .svg .png .html"),
    "group of zero": ("schedule 1f1b --group 0", "0 group can't be"),
    "group where there is none": ("schedule 1f1b --group 2", "1f1b takes no --group"),
    "negative offload time": ("compare --offload-time -1", "offload time is -1"),
    "unknown host link": ("compare --host-link half", "invalid choice: 'half'"),
    "offload time and costs": ("best --costs x.json --offload-time 1", "--costs FILE and --offload-time contradict"),
    "unknown objective": ("best --objective bubble", "invalid choice: 'bubble'"),
    "best of too much": ("best --ranks 4096 --microbatches 1000", "for example --microbatches 488"),
    "plot to a schedule suffix": ("plot a.sched -o b.csv", "unknown suffix '.csv'"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    line, expected = BAD_FLAGS[case]
    assert expected in fails(*line.split())
    assert list(tmp_path.iterdir()) == []


# ---- bad input: files ------------------------------------------------------------------------------------------------

GOOD = """# jaxpipe schedule 1
name: small
microbatches: 2
placement: one-to-one ranks=2
edges: chain
rank 0: F0.0 F0.1 BW0.0 BW0.1
rank 1: F1.0 BW1.0 F1.1 BW1.1
"""

BAD_FILES: dict[str, tuple[str, str | bytes, str]] = {
    "empty text": ("a.sched", "", "jaxpipe schedule 1"),
    "empty JSON": ("a.json", "", "not JSON"),
    "empty CSV": ("a.csv", "", "a.csv"),
    "not text": ("a.sched", b"\x80\x81\xff", "UTF-8"),
    "unknown suffix": ("a.txt", GOOD, ".sched, .json, .csv"),
    "truncated JSON": ("a.json", '{"format": "jaxpipe schedule 1", "rows": [[', "truncated"),
    "JSON of something else": ("a.json", "[1, 2]", "a.json"),
    "trailing junk in an action": ("a.sched", GOOD.replace("F0.1 ", "F0.1junk "), "F0.1junk"),
    "unknown op": ("a.sched", GOOD.replace("F0.1 ", "Q0.1 "), "Q"),
    "duplicate rank line": ("a.sched", GOOD + "rank 1: F1.0\n", "rank 1"),
    "unknown key": ("a.sched", GOOD.replace("edges:", "edgse:"), "edgse"),
    "missing rank line": ("a.sched", GOOD.replace("rank 1: F1.0 BW1.0 F1.1 BW1.1\n", ""), "2 ranks but there are 1"),
    "missing action": ("a.sched", GOOD.replace(" F1.1", ""), "F of stage 1, microbatch 1 on rank 1 is missing"),
    "duplicate action": ("a.sched", GOOD.replace("F0.1 ", "F0.1 F0.1 "), "F0.1"),
    "backward both split and not": ("a.sched", GOOD.replace("BW1.1", "BW1.1 B1.1 W1.1"), "performed 2 times"),
    "action on the wrong rank": ("a.sched", GOOD.replace("rank 0: F0.0", "rank 0: F1.0 F0.0"), "F1.0"),
    "stage out of range": ("a.sched", GOOD.replace("F1.1", "F7.1"), "F7.1"),
    "microbatch out of range": ("a.sched", GOOD.replace("F1.1", "F1.9"), "F1.9"),
    "backward before its forward": ("a.sched", GOOD.replace("F1.1 BW1.1", "BW1.1 F1.1"), "stands before"),
    "ranks wait in a circle": (
        "a.sched",
        GOOD.replace("F0.0 F0.1 BW0.0 BW0.1", "F0.0 BW0.0 F0.1 BW0.1").replace("F1.0 BW1.0 F1.1", "F1.0 F1.1 BW1.0"),
        "F0.1",
    ),
    "junk in CSV": ("a.csv", "0F0,0F1junk,0B0,0B1\n1F0,1B0,1F1,1B1\n", "0F1junk"),
    "unknown letter in CSV": ("a.csv", "0F0,0Z0\n", "0Z0"),
    "incomplete CSV": ("a.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "missing"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_schedule_files(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name, content, expected = BAD_FILES[case]
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = fails("simulate", name)
    assert expected in message
    assert name in message
    assert expected in fails("plot", name, "-o", "a.svg")
    assert not Path("a.svg").exists()


def test_the_good_file_is_good(cli: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.sched").write_text(GOOD)
    assert json.loads(cli("simulate", tmp_path / "a.sched", "--json"))["makespan"] == 9


@pytest.mark.parametrize(
    ("verb", "expected"), [(("simulate",), "is a directory"), (("plot", "-o", "x.svg"), "is a directory")]
)
def test_directory_instead_of_file(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in fails(*verb, tmp_path)


@pytest.mark.parametrize("verb", [("simulate",), ("plot", "-o", "x.svg")])
def test_missing_file(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'no.sched' does not exist" in fails(*verb, "no.sched")
    assert "'jaxpipe schedule zb-h1 -o zb-h1.sched' makes a file" in fails(*verb, "zb-h1")


@pytest.mark.parametrize(("flag", "value"), [("ranks", 3), ("microbatches", 3), ("chunks", 2)])
def test_flags_that_contradict_the_file(fails: Callable[..., str], tmp_path: Path, flag: str, value: int) -> None:
    (tmp_path / "a.sched").write_text(GOOD)
    assert f"--{flag} {value} contradicts" in fails("simulate", tmp_path / "a.sched", f"--{flag}", value)


def test_memory_limit_below_the_file(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.sched").write_text(GOOD)
    assert "small holds 2 activations on rank 0" in fails("simulate", tmp_path / "a.sched", "--memory-limit", 1)


def test_costs_for_another_number_of_stages(fails: Callable[..., str], tmp_path: Path) -> None:
    write_costs(CostProfile.uniform(3), tmp_path / "c.json")
    message = fails("schedule", "interleaved-1f1b", "--ranks", 2, "--costs", tmp_path / "c.json")
    assert "costs of 3 stages, but interleaved-1f1b with 2 ranks and 2 chunks per rank has 4 stages" in message


def test_a_schedule_is_not_a_cost_profile(fails: Callable[..., str], tmp_path: Path) -> None:
    write_schedule(one_f_one_b(2, 2), tmp_path / "s.json")
    assert "jaxpipe costs 1" in fails("schedule", "1f1b", "--costs", tmp_path / "s.json")


def test_output_to_a_directory(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "d.svg").mkdir()
    assert "is a directory; name a file in it" in fails("schedule", "1f1b", "-o", tmp_path / "d.svg")


def test_output_that_cannot_be_written(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", "a.html")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert fails("schedule", "1f1b", "-o", tmp_path / "a.html") == "'a.html': Permission denied"


def test_too_many_files_in_one_picture(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.sched").write_text(GOOD)
    assert "at most 8" in fails("plot", *[tmp_path / "a.sched"] * 9, "-o", tmp_path / "x.svg")


def test_unit_costs_beside_a_measurement(fails: Callable[..., str], tmp_path: Path) -> None:
    from dataclasses import replace

    (tmp_path / "a.sched").write_text(GOOD)
    run = replace(simulate(one_f_one_b(2, 2), CostProfile.uniform(2)), source="measured")
    write_timeline(run, tmp_path / "run.timeline.json")
    message = fails("plot", tmp_path / "a.sched", tmp_path / "run.timeline.json", "-o", tmp_path / "x.svg")
    assert "give --costs FILE" in message


def test_a_trace_is_not_read_back(fails: Callable[..., str], cli: Callable[..., str], tmp_path: Path) -> None:
    cli("schedule", "1f1b", "-o", tmp_path / "a.trace.json")
    assert "is a trace" in fails("plot", tmp_path / "a.trace.json", "-o", tmp_path / "x.svg")


# ---- process life ----------------------------------------------------------------------------------------------------


def test_interrupt_exits_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxpipe.cli.flags.print_json", interrupt)
    assert main(["compare", "--ranks", "2", "--microbatches", "2", "--json"]) == 130
    assert capsys.readouterr() == ("", "jaxpipe: interrupted\n")


def test_out_of_memory_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("jaxpipe.cli.flags.print_json", exhaust)
    assert main(["compare", "--json"]) == 2
    assert capsys.readouterr().err == "jaxpipe: out of memory; ask for smaller sizes\n"


def test_terminal_without_unicode_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["--help"]) == 0
    assert raw.getvalue().startswith(b"usage: jaxpipe VERB ?")


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)


def test_reader_that_stops_early_is_no_traceback() -> None:
    result = _run(f"set -o pipefail; {sys.executable} -m jaxpipe compare --json | true")
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") <= 1


def test_full_disk_is_one_line() -> None:
    result = _run(f"{sys.executable} -m jaxpipe schedules > /dev/full")
    assert (result.returncode, result.stderr) == (2, "jaxpipe: No space left on device\n")


def test_schedule_verbs_never_import_jax(tmp_path: Path) -> None:
    code = f"""
import sys
from jaxpipe.cli import main
assert main(["schedule", "--help"]) == 0
heavy = {{"jax", "jaxlib", "flax", "numpy", "matplotlib", "jaxpipe.schedule"}} & set(sys.modules)
assert not heavy, heavy
out = {str(tmp_path / "a")!r}
assert main(["schedule", "1f1b", "-o", out + ".sched", "-o", out + ".svg", "-o", out + ".html"]) == 0
assert main(["compare", "--ranks", "2", "--microbatches", "4"]) == 0
assert main(["simulate", out + ".sched"]) == main(["plot", out + ".sched", "-o", out + ".png"]) == 0
heavy = {{"jax", "jaxlib", "flax", "ortools"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_module_entry_point_returns_the_exit_code() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "jaxpipe", "schedule", "nope"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("jaxpipe: unknown schedule 'nope'")
