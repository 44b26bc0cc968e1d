"""``compare``, ``best`` and ``solve``: files beside families, nothing free without a word, two bounds by name."""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.cli import main, search_verbs
from jaxpipe.schedule import FAMILIES, CostProfile, generate, one_f_one_b, write_costs, write_schedule

OFFLOADING = {"po-h", "po-f", "stp-offload"}
"""Families that offload whatever the costs are."""
UNPRICED = "offloads, and the costs don't say how long that takes: give --offload-time, or offload_s and load_s"


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run a verb in ``tmp_path``; return its exit code, stdout and stderr, without lines of progress."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search_verbs, "_PROGRESS_S", float("inf"))

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([str(a) for a in argv])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def document(run: Callable[..., tuple[int, str, str]]) -> Callable[..., dict[str, Any]]:
    """Run a verb that must succeed and return what it prints with ``--json``."""

    def call(*argv: object) -> dict[str, Any]:
        code, out, err = run(*argv, "--json")
        assert (code, err) == (0, "")
        printed: dict[str, Any] = json.loads(out)
        return printed

    return call


Run = Callable[..., tuple[int, str, str]]
Document = Callable[..., dict[str, Any]]

# Offload is never free without a word.


def test_compare_refuses_offloads_without_a_time(document: Document) -> None:
    for flags in ([], ["--explore", "--ranks", "2", "--microbatches", "4"]):
        rows = {row["name"]: row for row in document("compare", *flags)["schedules"]}
        refused = {name for name, row in rows.items() if row.get("reason") == UNPRICED}
        assert refused == OFFLOADING if not flags else refused  # explored, po-h has settings that don't offload
        assert not any(row["offloaded_share"] for row in rows.values() if "error" not in row)


@pytest.mark.parametrize("name", sorted(OFFLOADING))
def test_one_answer_everywhere(run: Run, name: str) -> None:
    write_schedule(generate(name, 4, 8, costs=None), f"{name}.sched")
    costs = CostProfile.uniform(8, chunks=2)
    write_costs(costs, "costs.json")
    for argv in (
        ("schedule", name, "-o", "a.svg"),
        ("schedule", name, "--costs", "costs.json"),
        ("simulate", f"{name}.sched", "-o", "a.svg"),
        ("plot", f"{name}.sched", "-o", "a.svg"),
    ):
        assert run(*argv) == (2, "", f"jaxpipe: {name} {UNPRICED}\n")
    assert not Path("a.svg").exists()
    code, out, _ = run("compare", f"{name}.sched")
    assert code == 0
    assert re.search(rf"^{name}.sched +not possible: {UNPRICED}$", out, re.MULTILINE)
    assert run("schedule", "1f1b", "--offload", 1)[0] == 2


def test_a_time_of_nothing_is_an_answer_and_is_said(run: Run, document: Document) -> None:
    record = document("schedule", "po-f", "--offload-time", 0, "-o", "po-f.sched")
    assert record["free_copies"]
    _, out, _ = run("simulate", "po-f.sched", "--offload-time", 0, "-o", "a.svg")
    assert "of all activations; copies to the host take no time" in out
    assert "copies to the host take no time" in Path("a.svg").read_text()
    assert run("plot", "po-f.sched", "--offload-time", 0, "-o", "b.svg", "--title", "mine")[0] == 0
    assert "mine · copies to the host take no time" in Path("b.svg").read_text()
    assert (
        document("compare", "--offload-time", 0)["notes"][-1]
        == "copies to the host take no time here, as the costs say"
    )
    assert not document("schedule", "po-f", "--offload-time", 0.5)["free_copies"]
    assert not document("schedule", "1f1b", "--offload-time", 0)["free_copies"]


# Files beside families.


def test_files_stand_in_the_table_the_picture_and_the_choice(run: Run, document: Document) -> None:
    schedule = generate("zb-2p", 3, 5)
    write_schedule(schedule, "mine.json")
    write_schedule(one_f_one_b(3, 5), "other.sched")
    sizes = ("--comm", 0.1)
    rows = document("compare", "mine.json", "other.sched", *sizes, "--plot", "front.html")["schedules"]
    files = {row["file"]: row for row in rows if row.get("file")}
    assert set(files) == {"mine.json", "other.sched"}
    family = next(row for row in rows if row["name"] == "zb-2p" and row.get("file") is None)
    assert files["mine.json"]["name"] == "zb-2p"
    assert (files["mine.json"]["ranks"], files["mine.json"]["microbatches"]) == (3, 5)
    assert files["mine.json"]["peak_activations"] == family["peak_activations"]
    assert all(name in Path("front.html").read_text() for name in ("mine.json", "other.sched", "zb-h1"))
    table = run("compare", "mine.json", "other.sched", *sizes)[1]
    assert re.search(r"^mine\.json  .*\d", table, re.MULTILINE)
    best = document("best", "other.sched", *sizes)
    assert best["file"] is None
    assert best["setting"] != "other.sched"


def test_a_file_can_be_best(run: Run, document: Document) -> None:
    """Three stages on two ranks: no family has such a placement."""
    Path("mine.sched").write_text(
        "rank 0: F0.0 F1.0 F0.1 F1.1 BW1.0 BW0.0 BW1.1 BW0.1\nrank 1: F2.0 BW2.0 F2.1 BW2.1\n"
    )
    write_costs(CostProfile.uniform(3), "costs.json")
    best = document("best", "mine.sched", "--costs", "costs.json", "-o", "out.sched")
    assert (best["file"], best["setting"], best["name"]) == ("mine.sched", "mine.sched", "mine")
    assert best["makespan"] == document("simulate", "out.sched", "--costs", "costs.json")["makespan"]
    assert run("best", "mine.sched", "--costs", "costs.json")[1].startswith("best: mine.sched\nmine: 2 ranks")


def test_files_must_agree(run: Run) -> None:
    write_schedule(one_f_one_b(2, 4), "a.sched")
    write_schedule(one_f_one_b(2, 5), "b.sched")
    write_schedule(one_f_one_b(3, 4), "c.sched")
    Path("bad.sched").write_text("rank 0: F0.0\n")
    for verb in ("compare", "best"):
        for argv, words in (
            (("a.sched", "b.sched"), "a.sched has 4 microbatches and b.sched has 5; compare schedules of one size"),
            (("a.sched", "c.sched"), "a.sched has 2 ranks and c.sched has 3"),
            (("a.sched", "--ranks", 3), "--ranks 3 contradicts a.sched, which has 2 ranks"),
            (("a.sched", "a.sched"), "'a.sched' is given twice"),
            (("no.sched",), "'no.sched' does not exist"),
            (("bad.sched",), "B of stage 0, microbatch 0 on rank 0 is missing"),
        ):
            code, out, err = run(verb, *argv)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert words in err


def test_a_file_above_the_limit_is_not_chosen(run: Run, document: Document) -> None:
    write_schedule(generate("gpipe", 2, 4), "g.sched")
    rows = document("compare", "g.sched", "--memory-limit", 2)["schedules"]
    row = next(r for r in rows if r.get("file") == "g.sched")
    assert row["reason"] == "needs 4 activations, limit 2"
    code, out, err = run("best", "g.sched", "--memory-limit", 2, "--json")
    assert code == 0
    assert err == "g.sched: not possible: gpipe holds 4 activations on rank 0, above --memory-limit 2\n"
    assert json.loads(out)["file"] is None


# An offload that stands later than it need.


def test_a_late_offload_is_a_warning(run: Run) -> None:
    """users.md 3.6: O0 behind F1 starts at 2, not at 1."""
    Path("late.sched").write_text("rank 0: F0.0 F0.1 O0.0 F0.2 L0.0 BW0.0 BW0.1 BW0.2\n")
    Path("early.sched").write_text("rank 0: F0.0 O0.0 F0.1 F0.2 L0.0 BW0.0 BW0.1 BW0.2\n")
    warning = (
        "warning: late: O0.0 on rank 0 follows F0.1 and waits for its end; "
        "directly after F0.0 the makespan would be 13, not 14\n"
    )
    for argv in (("simulate", "late.sched"), ("compare", "late.sched"), ("best", "late.sched")):
        code, _, err = run(*argv, "--offload-time", 6)
        assert (code, err) == (0, warning), argv
    assert run("simulate", "early.sched", "--offload-time", 6)[2] == ""
    assert run("simulate", "late.sched", "--offload-time", 0.1)[2] == "", "nothing to gain"


# Chunks are not free.


def test_without_a_price_or_a_limit_few_chunks_are_tried_and_it_is_said(run: Run, document: Document) -> None:
    sizes = ("--ranks", 2, "--microbatches", 4)
    note = (
        "chunks cost nothing here: at most 4 a rank are tried; --comm prices them, --layers or --max-chunks limits them"
    )
    explored = document("compare", *sizes, "--explore")
    assert explored["notes"] == [note]
    assert max(row["chunks"] for row in explored["schedules"] if "error" not in row) == 4
    best = document("best", *sizes)
    assert (best["chunks"] <= 4, best["notes"]) == (True, [note])
    assert note in run("best", *sizes)[1]
    assert document("compare", *sizes)["notes"] == [note.replace(": at most 4 a rank are tried", "")]
    for flags in (("--comm", 0.1), ("--max-chunks", 8), ("--layers", 16), ("--chunks", 2)):
        assert document("compare", *sizes, *flags)["notes"] == []


@pytest.mark.parametrize(
    ("flags", "most"),
    [(["--max-chunks", "1"], 1), (["--layers", "7"], 3), (["--layers", "12", "--max-chunks", "5"], 5)],
)
def test_chunks_keep_the_limit(document: Document, flags: list[str], most: int) -> None:
    sizes = ("--ranks", 2, "--microbatches", 4)
    for extra in ([], ["--explore"]):
        rows = document("compare", *sizes, *flags, *extra)["schedules"]
        chunks = {row["name"]: row["chunks"] for row in rows if "error" not in row}
        assert max(chunks.values()) == (most if extra else min(most, 2))
        refused = {
            row["name"] for row in rows if f"chunks per rank, more than the {most} allowed" in row.get("reason", "")
        }
        assert ("v-zb" in refused) == (most == 1)
    assert document("best", *sizes, *flags)["chunks"] <= most


def test_solve_tries_no_placement_above_the_limit(run: Run) -> None:
    sizes = ("--ranks", 2, "--microbatches", 2, "--no-cache", "--time-limit", 1e-9, "--json")
    for flags, most in (((), 4), (("--max-chunks", 2), 2), (("--layers", 3), 1), (("--comm", 0.1), 8)):
        code, out, _ = run("solve", *sizes, *flags)
        facts = json.loads(out)
        assert (code, max(x["chunks"] for x in facts["placements"])) == (0, most)
        assert bool(facts["notes"]) == (not flags)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("compare --layers 3", "--layers 3 can't be spread over 4 ranks"),
        ("best --chunks 3 --max-chunks 2", "--chunks 3 contradicts --max-chunks, which allows 2 per rank"),
        ("compare --chunks 3 --layers 8", "--chunks 3 contradicts --layers, which allows 2 per rank"),
        ("solve --placement v --max-chunks 1", "no requested placement has at most 1 chunk(s) per rank"),
        ("solve --layers 0", "0 layers can't be"),
    ],
)
def test_contradicting_limits(run: Run, argv: str, words: str) -> None:
    code, out, err = run(*argv.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


# best says what it tries.


def test_best_shows_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_verbs, "_PROGRESS_S", 0.0)
    assert main(["best", "--ranks", "2", "--microbatches", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) > 5
    assert re.fullmatch(
        rf" +\d+\.\d s  family 1 of {len(FAMILIES)}, 0 settings tried, now 1f1b; nothing found yet", lines[0]
    )
    assert re.fullmatch(
        r" +\d+\.\d s  family \d+ of \d+, .* now [^;]+; best so far combined-1f1b --chunks \d, \d+(\.\d+)?", lines[-1]
    )
    json.loads(out)


def test_best_ends_in_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends with the best so far, or with a line. Time is up at the fifth setting."""
    calls = itertools.count(1)

    class Watched(search_verbs._Progress):
        def __call__(self, *args: Any) -> None:
            super().__call__(*args)
            if next(calls) == 5:
                signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(search_verbs, "_Progress", Watched)
    sizes = ["best", "--ranks", "4", "--microbatches", "8"]
    assert main([*sizes, "--time-limit", "3600", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert any("out of time after 3600 s" in note for note in report["notes"]) and report["makespan"] > 0
    assert next(calls) == 6
    assert main([*sizes, "--time-limit", "3600", "--json"]) == 0
    assert "out of time" not in capsys.readouterr().out
    assert main([*sizes, "--time-limit", "1e-6"]) == 2
    assert capsys.readouterr() == ("", "jaxpipe: out of time before anything was found: raise the time limit\n")
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


# solve names both bounds.


def test_solve_names_the_bound_of_all_placements_and_of_the_one_found(run: Run) -> None:
    """users.md 3.4: optimal in its placement, while another placement's bound is lower. Time for the first answers only."""
    argv = ("solve", "--ranks", 2, "--microbatches", 3, "--memory-limit", 1, "--comm", 0.3, "--max-chunks", 2)
    code, out, _ = run(*argv, "--no-cache", "--time-limit", 1e-9, "--json")
    facts = json.loads(out)
    assert (code, facts["placement"], facts["status"]) == (0, "one-to-one", "feasible")
    assert facts["lower_bound"] < facts["placement_bound"] == pytest.approx(facts["value"])
    assert (facts["optimal_in_placement"], facts["placement_gap"]) == (True, 0)
    assert facts["gap"] > 0
    _, out, _ = run(*argv, "--no-cache", "--time-limit", 1e-9)
    number = len(facts["placements"])
    assert f"lower bound {facts['lower_bound']:.6g} of all {number} placements tried, gap {facts['gap']:.2%}" in out
    assert re.search(r"feasible after \d+\.\d s; optimal in its placement \(one-to-one\)", out)
    assert "lower bound        16.8 of its placement within 1 activations (makespan is 0.0% above)" in out


def test_a_search_whose_time_is_up_starts_no_worker(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set-up for thousands of ranks may take longer than the limit; the search does not overrun it further."""
    monkeypatch.setattr("jaxpipe.search.solve.jobs.WorkerPool", lambda *_: pytest.fail("a worker was started"))
    code, out, _ = run("solve", "--ranks", 64, "--microbatches", 1, "--time-limit", 1e-9, "--no-cache", "--json")
    assert (code, json.loads(out)["status"]) == (0, "feasible")
