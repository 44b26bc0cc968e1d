"""The directory of one run.

It holds ``config.toml``, ``plan.json``, ``schedule.sched``, ``metrics.jsonl``, ``checkpoints/`` and ``pictures/``. One process
trains in it at a time, and holds it from before anything is compiled; but for being made, it is not changed before the run is
known to be able to start. What people and other programs put there is never overwritten.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.files import write_atomically
from jaxpipe.interop.tokenizer import TOKENIZER
from jaxpipe.plot import plot_timelines
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.schedule import Schedule, Timeline, write_schedule
from jaxpipe.stage.model.plan import StagePlan
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.checkpoints.directory import lock_folder
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.tokenizers import Tokenizer
from jaxpipe.train.metrics import read_metrics
from jaxpipe.train.settings.sections import RunConfig
from jaxpipe.train.tokenizer_files import places_of, training_form, write_tokenizer_files

CONTENT = ("config.toml", "plan.json", "schedule.sched", "metrics.jsonl", "pictures", TOKENIZER)
"""What a run writes beside ``checkpoints``, ``profile`` and what trackers write, and would overwrite."""
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
        """What the run is about to do, for people and tools.

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
        """The newest value of every number in the metrics up to ``step``; empty if there are no readable metrics."""
        values: dict[str, float] = {}
        with suppress(JaxpipeError, OSError):
            for record in read_metrics(self.metrics):
                if record["step"] <= step:
                    values.update({k: float(v) for k, v in record.items() if isinstance(v, (int, float))})
        return values

    def was_evaluated(self, step: int) -> bool:
        """Whether the metrics hold an evaluation of ``step``."""
        return any(record["step"] == step and "eval_loss" in record for record in read_metrics(self.metrics))

    def _check(self) -> None:
        there = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise ConfigError(f"run.out_dir={self.path}: {there} is a file; choose another directory")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"run.out_dir={self.path}: no permission to write in {there}; choose another directory")
        others = [name for name in CONTENT if os.path.lexists(self.path / name)]
        if others and not self.store.steps() and not self.began_before:
            raise ConfigError(
                f"run.out_dir={self.path}: {', '.join(others)} there is no run's of jaxpipe's and would be overwritten; "
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
