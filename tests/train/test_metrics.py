"""The metrics file through crashes and resumes, TensorBoard when asked for, the live line, and formatted numbers."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import resource
import signal
import sys
import tracemalloc
import types
from collections.abc import Mapping
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import ConfigError, DataError, JaxpipeError
from jaxpipe.text import format_bytes, format_count, format_seconds
from jaxpipe.train import metrics
from jaxpipe.train.metrics import MetricsLog, find_trackers, read_metrics
from jaxpipe.train.run.progress import LiveLine, ProgressStream


def refusal(kind: type[JaxpipeError], call: Any, *args: Any, **kwargs: Any) -> str:
    """Return the message of the error that ``call`` raises; always one line."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def write(path: Path, steps: range, **kwargs: Any) -> None:
    with MetricsLog(path, warn=pytest.fail, **kwargs) as log:
        for step in steps:
            log.write(step, {"loss": 1 / step})


# The file


def test_records_are_on_disk_as_soon_as_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsLog(path, warn=pytest.fail) as log:
        log.write(1, {"loss": 2.5, "kind": "train"})
        assert path.read_text() == '{"step": 1, "loss": 2.5, "kind": "train"}\n'


def test_values_of_many_types_become_json(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    values = {
        "numpy": np.float32(0.5),
        "integer": np.int64(3),
        "array": np.array([1.0, np.nan]),
        "bad": math.inf,
        "none": None,
        "flag": True,
        "list": (1, 2.5),
    }
    with MetricsLog(path, warn=pytest.fail) as log:
        log.write(np.int64(7), values)
    assert list(read_metrics(path)) == [
        {
            "step": 7,
            "numpy": 0.5,
            "integer": 3,
            "array": [1.0, None],
            "bad": None,
            "none": None,
            "flag": True,
            "list": [1, 2.5],
        }
    ]


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 80))
def test_resuming_after_a_crash_leaves_each_step_once(saved: int, reached: int, torn: int) -> None:
    """A run checkpoints at ``saved``, dies while writing a line after ``reached``, and is resumed."""
    import tempfile

    saved = min(saved, reached)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.jsonl")
        write(path, range(1, reached + 1))
        line = json.dumps({"step": reached + 1, "loss": 1.0})
        path.write_text(path.read_text() + line[:torn])
        write(path, range(saved + 1, 20), resume_step=saved)
        assert [record["step"] for record in read_metrics(path)] == list(range(1, 20))
        assert sorted(Path(folder).iterdir()) == [path]


def test_without_resuming_the_file_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 5))
    write(path, range(1, 3))
    assert len(list(read_metrics(path))) == 2
    assert list(read_metrics(tmp_path / "absent.jsonl")) == []


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"loss": 3}', '{"step": "3"}', ""])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    message = refusal(DataError, MetricsLog, path, warn=pytest.fail, resume_step=3)
    assert f"metrics {path}: line 2 is not a record of a step" in message
    assert path.read_text().count("\n") == 2, "it is left as it was"


def test_a_place_that_can_not_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    with MetricsLog(tmp_path / "file" / "m.jsonl", warn=warnings.append) as log:
        log.write(1, {"loss": 1.0})
        log.sync()
    (line,) = warnings
    assert line.startswith(f"warning: metrics ({tmp_path / 'file' / 'm.jsonl'}) can't be written: ")
    assert line.endswith("; training goes on, records are missing")


def test_a_disk_that_fills_up_and_is_freed_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the line that does not fit is left out, whole."""
    path, warnings = tmp_path / "m.jsonl", list[str]()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with MetricsLog(path, warn=warnings.append) as log:
            log.write(1, {"loss": 1.0})
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
            log.write(2, {"loss": 2.0})
            log.write(3, {"loss": 3.0})
            assert [r["step"] for r in read_metrics(path)] == [1]
            assert path.read_bytes().endswith(b"\n")
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            log.write(4, {"loss": 4.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [r["step"] for r in read_metrics(path)] == [1, 4]
    assert len(warnings) == 1


def test_resuming_holds_one_record_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    padding = "x" * 500
    path.write_text("".join(json.dumps({"step": n, "pad": padding}) + "\n" for n in range(1, 20_001)))
    tracemalloc.start()
    try:
        MetricsLog(path, warn=pytest.fail, resume_step=15_000).close()
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "the file has 10 MB"
    finally:
        tracemalloc.stop()
    assert sum(1 for _ in read_metrics(path)) == 15_000


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    for name in ("mine", "also-mine"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "m.jsonl").symlink_to(tmp_path / "mine")
    (tmp_path / "m.jsonl.new").symlink_to(tmp_path / "also-mine")
    write(tmp_path / "m.jsonl", range(1, 3))
    assert {(tmp_path / name).read_text() for name in ("mine", "also-mine")} == {"precious"}
    assert not (tmp_path / "m.jsonl").is_symlink()
    assert len(list(read_metrics(tmp_path / "m.jsonl"))) == 2


def test_what_is_read_is_json_without_extensions(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    assert "line 1 is not a record" in refusal(DataError, list, read_metrics(tmp_path / "m.jsonl"))


# Trackers


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_without_its_package_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "tensorboardX" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, package, None)
    message = refusal(ConfigError, find_trackers, [name])
    assert f"names {name}, which needs the package {package}: pip install {package}, or leave it out" in message


def test_an_unknown_tracker_is_refused() -> None:
    message = refusal(ConfigError, find_trackers, ["jsonl", "mlflow"])
    assert "names 'mlflow'; there are jsonl, tensorboard, wandb, trackio" in message


class Library(types.ModuleType):
    """Stands for tensorboardX, wandb and trackio; ``calls``: of what it was told."""

    def __init__(self) -> None:
        super().__init__("library")
        self.calls: list[Any] = []

    def SummaryWriter(self, logdir: str, purge_step: int | None = None) -> Library:  # noqa: N802 - as tensorboardX calls it
        self.calls.append(("open", logdir, purge_step))
        return self

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.calls.append((tag, value, global_step))

    def init(self, **kwargs: Any) -> Library:
        self.calls.append(kwargs)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((values, step))

    def close(self) -> None:
        self.calls.append("closed")

    finish = close


def tracked(name: str, folder: Path, resume_step: int | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what a tracker's library is told of one record."""
    library = Library()
    monkeypatch.setitem(sys.modules, "tensorboardX" if name == "tensorboard" else name, library)
    trackers = {k: partial(make, folder, {"run": {}}, resume_step) for k, make in find_trackers([name]).items()}
    with MetricsLog(folder / "m.jsonl", warn=pytest.fail, resume_step=resume_step, trackers=trackers) as log:
        log.write(5, {"loss": 0.5, "kind": "train", "bad": math.nan})
    return library.calls


def test_tensorboard_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tracked("tensorboard", tmp_path, 4, monkeypatch)
    assert calls == [("open", str(tmp_path / "tensorboard"), 5), ("loss", 0.5, 5), "closed"]


def test_wandb_goes_on_with_the_run_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    first, resumed, anew = (tracked("wandb", tmp_path, step, monkeypatch) for step in (None, 4, None))
    assert first[1:] == [({"loss": 0.5}, 5), "closed"]
    assert (first[0]["project"], first[0]["name"], first[0]["config"]) == ("mine", tmp_path.name, {"run": {}})
    assert first[0]["id"] == resumed[0]["id"] != anew[0]["id"]


def test_trackio_goes_on_or_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume_modes = [tracked("trackio", tmp_path, step, monkeypatch)[0]["resume"] for step in (None, 4)]
    assert resume_modes == ["never", "allow"]


@pytest.mark.parametrize("fails", ["init", "log", "close"])
def test_a_tracker_that_fails_costs_a_line(fails: str, tmp_path: Path) -> None:
    class Mine:
        def __init__(self) -> None:
            self.maybe("init")

        def maybe(self, at: str) -> None:
            if at == fails:
                raise RuntimeError("no net\nto be had")

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.maybe("log")

        def close(self) -> None:
            self.maybe("close")

    warnings: list[str] = []
    with MetricsLog(tmp_path / "m.jsonl", warn=warnings.append, trackers={"mine": Mine}) as log:
        for step in (1, 2):
            log.write(step, {"loss": 1.0})
    assert len(warnings) == 1 and warnings[0].startswith("warning: tracker mine failed: no net")
    assert len(list(read_metrics(tmp_path / "m.jsonl"))) == 2


def test_a_package_brings_its_own_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "builtins:dict", metrics.GROUP)
    monkeypatch.setattr(metrics, "entry_points", lambda group: [point] if group == metrics.GROUP else [])
    assert find_trackers(["mine"]) == {"mine": dict}


# The live line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_line(stream: io.StringIO, steps: int = 20, seconds: float = 2.0, **kwargs: Any) -> None:
    clock = Clock()
    line = LiveLine(steps, ProgressStream(stream), print_every=5, clock=clock)
    clock.now += 60  # the first step compiles
    for step in range(1, steps + 1):
        clock.now += seconds
        line.update(step, loss=3.0 - step / 10, tokens=4096, **kwargs)
        if step == 7:
            line.note("saved")
    line.close()


def test_without_a_terminal_a_plain_line_every_n_steps() -> None:
    stream = io.StringIO()
    run_line(stream, bubble_predicted=0.3043, bubble_measured=0.31, peak_predicted=3 * 2**20, extra="x")
    assert stream.getvalue().splitlines() == [
        "step 5/20  loss 2.5000  2.05k tok/s  bubble 30.4% predicted → 31.0% measured  peak 3 MiB predicted  x  30 s left",
        "saved",
        "step 10/20  loss 2.0000  2.05k tok/s  bubble 30.4% predicted → 31.0% measured  peak 3 MiB predicted  x  20 s left",
        "step 15/20  loss 1.5000  2.05k tok/s  bubble 30.4% predicted → 31.0% measured  peak 3 MiB predicted  x  10 s left",
        "step 20/20  loss 1.0000  2.05k tok/s  bubble 30.4% predicted → 31.0% measured  peak 3 MiB predicted  x",
    ]


def test_what_is_known_of_rates_and_memory_is_shown() -> None:
    stream = io.StringIO()
    metrics = {"learning_rate": 1e-3, "grad_norm": 0.51234, "mfu_per_rate": 1e-4}
    run_line(stream, steps=1, **metrics, peak_predicted=3 * 2**20, peak_measured=2.5 * 2**20)
    assert stream.getvalue() == (
        "step 1/1  loss 2.9000  lr 0.001  grad norm 0.512  66.1 tok/s  MFU 0.7%  peak 3 MiB predicted → 2.5 MiB measured\n"
    )


def _screen(text: str) -> list[str]:
    """Return what a terminal shows after ``text``: carriage returns overwrite."""
    lines = []
    for row in text.split("\n"):
        cells: list[str] = []
        for part in row.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


def test_on_a_terminal_one_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    run_line(stream, bubble_predicted=0.3, peak_predicted=5e9)
    lines = _screen(stream.getvalue())
    assert lines[0] == "saved"
    assert lines[1].startswith("step 20/20  loss 1.0000")
    assert lines[2:] == [""]
    assert stream.getvalue().count("\r") >= 20
    assert max(map(len, lines)) <= 59


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    run_line(stream)
    assert "\r" not in stream.getvalue()


class Dying(io.StringIO):
    """Takes two writes."""

    left = 2

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        return super().write(text)


def test_a_stream_that_dies_is_told_once_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Dying()
    run_line(stream)
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 5/20", "saved"]
    assert capsys.readouterr() == ("", "jaxpipe: the output can't be written (Broken pipe); going on without it\n")


@pytest.mark.parametrize("end", ["closed", "none"])
def test_a_stream_that_was_closed_before(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    stream.close()
    out = ProgressStream(stream if end == "closed" else None)
    out.print("a line")
    assert (out.isatty(), out.lost != "") == (False, True)


def test_a_loss_that_is_not_finite_is_shown() -> None:
    stream = io.StringIO()
    LiveLine(1, ProgressStream(stream), clock=Clock()).update(1, loss=math.nan, tokens=8)
    assert "loss nan" in stream.getvalue()


# Formats


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5 MiB"),
        (2**34, "16 GiB"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes, binary=True) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (999_500, "1 MB"), (80e9, "80 GB")])
def test_decimal_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (8.5e-4, "850 µs"),
        (0.0125, "12.5 ms"),
        (3.21, "3.21 s"),
        (59.96, "1m00s"),
        (245, "4m05s"),
        (3599.7, "1h00m"),
        (7380, "2h03m"),
        (3 * 86400 + 4 * 3600, "3d04h"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (950, "950"), (12345, "12.3k"), (999_600, "1M"), (4.56e6, "4.56M")]
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text
