"""The directory of one run, and what the run reports at its end, as text and as JSON.

It holds ``config.toml``, ``plan.json``, ``schedule.sched``, ``metrics.jsonl``, ``checkpoints/`` and ``pictures/``. One process
trains in it at a time, and holds it from before anything is compiled; but for being made, it is not changed before the run is
known to be able to start. What people and other programs put there is never overwritten.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from jaxpipe.cost.profile import StageMeasurements
from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.files import write_atomically
from jaxpipe.interop.folder import TOKENIZER
from jaxpipe.plot import plot_timelines
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.schedule import CostProfile, Schedule, Timeline, write_schedule
from jaxpipe.schedule.files import to_costs
from jaxpipe.stage.model.plan import StagePlan
from jaxpipe.text import aligned, format_bytes, format_count, format_seconds, mfu_text
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.checkpoints.folders import lock_folder
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.ngram import Score
from jaxpipe.train.corpora.tokenizers import Tokenizer
from jaxpipe.train.import_export import places_of, training_form, write_tokenizer_files
from jaxpipe.train.metrics import format_gain, plain, read_metrics
from jaxpipe.train.settings.sections import RunConfig

_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended. ``steps_run``: by this process; 0 if the run was finished before. ``stopped``: a signal ended it before
    its last step. ``tokens_per_s``: in training steps, without the first (it compiles), evaluation and saving.
    ``bubble_measured`` and ``replay_ratio`` (step time ÷ replay of the same order with its own durations): medians over
    recorded steps, NaN if there was none. ``peak_bytes``: of the fullest rank's device, as predicted
    (:meth:`~jaxpipe.train.step.TrainStep.memory_report`); ``peak_measured_bytes``: of the fullest device, None where the
    backend does not count, or the device was fuller before the first step, when stages were timed alone. ``mfu``, and
    ``peers_mfu`` with attention counted whole: NaN where the device's peak is not known. ``schedule``: the one that ran at the
    end, to which predictions and medians belong; ``gain_predicted`` and ``gain_measured``: the fraction of the time that it
    saves over the one before, where re-planning changed it, else NaN. ``rollbacks``: steps that post-validation dropped and did
    again. ``empty_steps``: steps without a target."""

    out_dir: Path
    step: int
    steps_run: int
    stopped: bool
    loss: float
    eval_loss: float | None
    tokens_per_s: float
    bubble_predicted: float
    bubble_measured: float
    replay_ratio: float
    peak_bytes: int
    skipped_steps: int
    seconds: float
    schedule: str = ""
    gain_predicted: float = _NAN
    gain_measured: float = _NAN
    mfu: float = _NAN
    peers_mfu: float = _NAN
    peak_measured_bytes: int | None = None
    rollbacks: int = 0
    empty_steps: int = 0

    @classmethod
    def finished(cls, out_dir: Path, step: int, metrics: Mapping[str, float], seconds: float) -> TrainResult:
        """Make the result of a run that had nothing left to do; ``metrics``: its last values."""
        loss, eval_loss = metrics.get("loss", _NAN), metrics.get("eval_loss")
        return cls(out_dir, step, 0, False, loss, eval_loss, _NAN, _NAN, _NAN, _NAN, 0, 0, seconds)


def result_json(result: TrainResult) -> dict[str, Any]:
    """Return the fields of a result; numbers that do not exist are None."""
    fields: dict[str, Any] = plain({**asdict(result), "out_dir": str(result.out_dir)})
    return fields


def result_text(result: TrainResult) -> str:
    """Return a few lines: where the run stands, how fast it was, and where to look."""
    held_out = "" if result.eval_loss is None else f", held-out loss {result.eval_loss:.4f}"
    lines = [f"{'stopped' if result.stopped else 'done'} at step {result.step}: loss {result.loss:.4f}{held_out}"]
    if result.steps_run:
        mfu = "" if math.isnan(result.mfu) else f", {mfu_text(result.mfu, result.peers_mfu)}"
        lines[0] += f", {format_count(result.tokens_per_s)} tok/s{mfu}, {format_seconds(result.seconds)} in all"
        lines.append(f"bubble {result.bubble_predicted:.1%} predicted")
        if not math.isnan(result.bubble_measured):
            lines[1] += (
                f", {result.bubble_measured:.1%} measured; step ÷ replay of its own durations {result.replay_ratio:.3f}"
            )
        lines[1] += f"; peak {format_bytes(result.peak_bytes, binary=True)} a rank predicted"
        if result.peak_measured_bytes is not None:
            lines[1] += f", {format_bytes(result.peak_measured_bytes, binary=True)} measured"
    if not math.isnan(result.gain_predicted):
        gains = {"predicted": result.gain_predicted, "measured": result.gain_measured}
        gain_texts = [f"{format_gain(gain)} {how}" for how, gain in gains.items() if not math.isnan(gain)]
        lines.append(f"schedule {result.schedule} takes {', '.join(gain_texts)} than the one before")
    if result.skipped_steps:
        plural = "s" if result.skipped_steps > 1 else ""
        lines.append(f"{result.skipped_steps} step{plural} had a gradient that was not finite and changed nothing")
    if result.empty_steps:
        plural = "s" if result.empty_steps > 1 else ""
        lines.append(f"{result.empty_steps} step{plural} had no target and changed nothing")
    if result.rollbacks:
        lines.append(f"{result.rollbacks} of the steps that began early began again (pipeline.post_validation)")
    lines.append(f"checkpoints, metrics.jsonl and pictures are in {result.out_dir}")
    return "\n".join(lines)


def score_table(scores: Mapping[str, Score], loss_unit: str) -> str:
    """Held-out losses, aligned: in ``loss_unit`` and in bits a byte; and what else a model reports."""
    rows = [("", loss_unit, "bits/byte", "")]
    for name, score in scores.items():
        bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        reported = "  ".join(f"{metric} {value:.4f}" for metric, value in score.metrics.items())
        rows.append((name, f"{score.loss:.4f}", bits, reported))
    return "\n".join(aligned(rows, left=(0, 3)))


def scores_json(scores: Mapping[str, Score]) -> dict[str, dict[str, Any]]:
    """Held-out losses; None for a number that is not finite or does not exist."""
    return {
        name: {
            "loss": plain(x.loss),
            "bits_per_byte": plain(x.bits_per_byte),
            **({"metrics": {metric: plain(value) for metric, value in x.metrics.items()}} if x.metrics else {}),
        }
        for name, x in scores.items()
    }


def cost_table(costs: CostProfile) -> str:
    """Milliseconds and bytes of each stage, aligned."""
    rows: list[tuple[str, ...]] = [
        ("stage", "F ms", "B ms", "W ms", "BW ms", "residual", "held for W", "boundary", "params")
    ]
    for s in range(costs.num_stages):
        times = (costs.f_s[s], costs.b_s[s], costs.w_s[s], costs.bw_s[s])
        sizes = (costs.residual_bytes[s], costs.w_residual_bytes[s], costs.boundary_bytes[s], costs.param_bytes[s])
        rows.append((str(s), *(f"{1e3 * t:.2f}" for t in times), *(format_bytes(x, binary=True) for x in sizes)))
    return "\n".join([*aligned(rows), f"({costs.source})"])


def measurement_table(measured: StageMeasurements) -> str:
    """Per stage and function: median milliseconds with their spread, XLA's workspace, arguments and results; collectives over
    tp, where there are any; then bytes per stage and the host link."""
    rows: list[tuple[str, ...]] = [("stage", "op", "ms", "spread", "workspace", "arguments", "results")]
    for (op, s), timing in sorted(measured.timings.items(), key=lambda item: item[0][1]):
        f = measured.footprints.get((op, s))
        sizes = () if f is None else (f.temp_bytes, f.argument_bytes, f.output_bytes)
        cells = [format_bytes(x, binary=True) for x in sizes] or [""] * 3
        rows.append((str(s), op, f"{1e3 * timing.median_s:.3f}", f"{timing.spread:.0%}", *cells))
    lines = aligned(rows, left=(1,))
    for s, collective in sorted(measured.collectives.items()):
        took = f"{1e3 * collective.median_s:.3f} ms alone, spread {collective.spread:.0%}"
        lines.append(f"{s:>5}  collectives in F (those in B by their bytes): {took}")
    host = "host link: not measured" if measured.host is None else str(measured.host)
    return "\n".join([*lines, "", cost_table(measured.costs()), host])


def measurement_json(measured: StageMeasurements) -> dict[str, Any]:
    """Return all that was measured: the cost profile, quartiles and memory of each function, the points of the host link."""
    fields: dict[str, Any] = plain(
        {
            "costs": to_costs(measured.costs()),
            "functions": [
                {
                    "stage": s,
                    "op": op,
                    "timing": asdict(timing),
                    "memory": asdict(measured.footprints[(op, s)]) if (op, s) in measured.footprints else None,
                }
                for (op, s), timing in measured.timings.items()
            ],
            "tp_collectives": [
                {"stage": s, "timing": asdict(collective)} for s, collective in sorted(measured.collectives.items())
            ],
            "host_link": asdict(measured.host) if measured.host is not None else None,
        }
    )
    return fields


CONTENT = ("config.toml", "plan.json", "schedule.sched", "metrics.jsonl", "pictures", TOKENIZER)
"""Names that a run writes beside ``checkpoints``, ``profile`` and what trackers write, and would overwrite."""
PICTURES = ("timeline.svg", "timeline.png", "timeline.html", "timeline.trace.json")
_MARK = "# Written by jaxpipe train: the settings of the run in this directory."
"""The first line of ``config.toml``."""


class RunDirectory:
    """Use as a context: it is made and locked from the start, and removed at the end if nothing was put into it. Of several
    ``processes`` the first one does that, and writes; the others read.

    Raises:
        ConfigError: the path is no directory, can't be made or written, holds files that are no run's, or another process
            trains in it.
    """

    def __init__(self, run: RunConfig, processes: Processes | None = None) -> None:
        self.path = Path(run.out_dir)
        processes = processes or SingleProcess()
        self._writes = processes.mine == 0
        self.store = CheckpointStore(
            self.path / "checkpoints",
            keep_last=run.output.keep_last,
            keep_best=run.output.keep_best,
            processes=processes,
        )
        self._lock = ExitStack()
        self._made: list[Path] = []

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def __enter__(self) -> Self:
        if not self._writes:
            return self
        self._check()
        try:
            self._make()
            self._take()
            self._probe()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # not empty, mostly
            for folder in reversed(self._made):
                folder.rmdir()
        self._lock.close()

    def write_plan(self, config: TrainConfig, plan: StagePlan, schedule: Schedule) -> None:
        """Write what the run is about to do, for people and tools.

        Raises:
            ScheduleError: a file can't be written.
        """
        if not self._writes:
            return
        write_atomically(self.path / "config.toml", f"{_MARK}\n{config.to_toml()}")
        write_atomically(self.path / "plan.json", plan.to_json())
        self.write_schedule(schedule)

    def write_schedule(self, schedule: Schedule) -> None:
        """Keep the schedule that runs. Raises ScheduleError, as :meth:`write_plan`."""
        if self._writes:
            write_schedule(schedule, self.path / "schedule.sched")

    def keep_tokenizer(self, tokenizer: Tokenizer, config: TrainConfig) -> None:
        """Keep the files of its tokenizer, and the chat template that is trained: the run may go to another machine."""
        if self._writes:
            folder = self.path.absolute() / TOKENIZER
            places = [folder, *places_of(config.data, config.run.init_from)]
            write_tokenizer_files(folder, tokenizer, places, *training_form(config.data, tokenizer))

    def draw(self, schedule: Schedule, timelines: list[Timeline]) -> None:
        """Pictures of the timelines, one over the other, in every form there is."""
        if not self._writes:
            return
        folder = self.path / "pictures"
        folder.mkdir(exist_ok=True)
        title = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
        for name in PICTURES:
            (folder / name).unlink(missing_ok=True)  # it may be a link to something else
            plot_timelines(timelines, folder / name, title=title, units="si")

    def check_metrics(self) -> None:
        """Raise DataError if the metrics of an earlier run can't be read: they are to be gone on with."""
        for _ in read_metrics(self.metrics):
            pass

    def last_values(self, step: int) -> dict[str, float]:
        """Return the newest value of every number in the metrics up to ``step``; empty if there are no readable metrics."""
        values: dict[str, float] = {}
        with suppress(JaxpipeError, OSError):
            for record in read_metrics(self.metrics):
                if record["step"] <= step:
                    values.update({k: float(v) for k, v in record.items() if isinstance(v, (int, float))})
        return values

    def was_evaluated(self, step: int) -> bool:
        """Return whether the metrics hold an evaluation of ``step``."""
        return any(record["step"] == step and "eval_loss" in record for record in read_metrics(self.metrics))

    def _check(self) -> None:
        nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise ConfigError(f"run.out_dir={self.path}: {nearest} is a file; choose another directory")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"run.out_dir={self.path}: no permission to write in {nearest}; choose another directory")
        files = [name for name in CONTENT if os.path.lexists(self.path / name)]
        if files and not self.store.steps() and not self.began_before:
            raise ConfigError(
                f"run.out_dir={self.path}: {', '.join(files)} there is no run's of jaxpipe's and would be overwritten; "
                "choose another directory, or move it away"
            )

    @property
    def began_before(self) -> bool:
        """Whether a run wrote its settings here."""
        with suppress(OSError), (self.path / "config.toml").open("rb") as file:
            return file.readline().startswith(_MARK.encode())
        return False

    def _make(self) -> None:
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                self._made.append(folder)
        except OSError as error:
            raise ConfigError(f"run.out_dir={self.path}: can't be made ({error.strerror}); choose another") from None

    def _take(self) -> None:
        """Lock the directory."""
        try:
            self._lock.enter_context(lock_folder(self.path, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            raise ConfigError(
                f"run.out_dir={self.path}: another process is training in it; wait for it, or choose another directory"
            ) from None

    def _probe(self) -> None:
        """Make a file where checkpoints will be, and remove it."""
        folder = self.store.directory if os.path.lexists(self.store.directory) else self.path
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(4096))
        except OSError as error:
            raise ConfigError(
                f"run.out_dir={self.path}: checkpoints can't be written in {folder} ({error.strerror}); mend that, or choose "
                "another directory"
            ) from None
