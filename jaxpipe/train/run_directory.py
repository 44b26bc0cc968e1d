"""The directory of one run.

It holds ``config.toml``, ``plan.json``, ``schedule.sched``, ``metrics.jsonl``, ``checkpoints/`` and ``pictures/``. Nothing is
made or changed in it before the run is known to be able to start. One process trains in it at a time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self

from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.plot import plot_timelines
from jaxpipe.schedule import Schedule, Timeline, write_schedule
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.config import RunConfig
from jaxpipe.train.metrics import read_metrics
from jaxpipe.train.setup import Setup

CONTENT = ("config.toml", "plan.json", "schedule.sched", "metrics.jsonl", "checkpoints", "pictures", "tensorboard")
"""What a run makes; anything else in its directory is the user's."""
PICTURES = ("timeline.svg", "timeline.png", "timeline.html", "timeline.trace.json")


class RunDirectory:
    """Use as a context: it is locked from the start if it exists, else from :meth:`make` on.

    Raises:
        ConfigError: the path is no directory or can't be made, or another process trains in it.
    """

    def __init__(self, run: RunConfig) -> None:
        self.path = Path(run.out_dir)
        self.store = CheckpointStore(self.path / "checkpoints", keep_last=run.keep_last, keep_best=run.keep_best)
        self._lock: int | None = None
        self._check()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def __enter__(self) -> Self:
        if self.path.is_dir():
            self._take()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def make(self) -> None:
        """Make the directory, if it is not there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.out_dir={self.path}: can't be made ({error.strerror}); choose another") from None
        self._take()

    def write_plan(self, setup: Setup) -> None:
        """What the run is about to do, for people and tools."""
        (self.path / "config.toml").write_text(setup.config.to_toml(), encoding="utf-8")
        (self.path / "plan.json").write_text(setup.plan.to_json(), encoding="utf-8")
        self.write_schedule(setup.pipeline.schedule)

    def write_schedule(self, schedule: Schedule) -> None:
        """Keep the schedule that runs."""
        write_schedule(schedule, self.path / "schedule.sched")

    def draw(self, schedule: Schedule, timelines: list[Timeline]) -> None:
        """Pictures of the timelines, one over the other, in every form there is."""
        folder = self.path / "pictures"
        folder.mkdir(exist_ok=True)
        title = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
        for name in PICTURES:
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

    def _take(self) -> None:
        """Lock the directory; file systems without locks go without."""
        if self._lock is not None:
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.out_dir={self.path}: another process is training in it; wait for it, or choose another directory"
            ) from None
        except OSError:
            pass


def remove_run(path: Path) -> None:
    """Delete what a run made in ``path``, and nothing else."""
    for name in CONTENT:
        part = path / name
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)
