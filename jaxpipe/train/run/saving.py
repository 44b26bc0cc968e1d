"""When a run saves, and which of its checkpoints it trusts.

A run saves at its checkpoint steps, and again after a save that failed, which ends nothing. It is tried again at the next step,
then after 1, 2, 4, … more steps: every try copies the arrays to the host, so a disk that stays full costs few copies, and one
that is full for n steps puts at most about 2n at risk. While steps are being skipped, saves wait for one that counts.

No checkpoint gives way to one that was made while the loss was above that of the run's first step: something has gone wrong
then, and what is needed is an older one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from jaxpipe.errors import CheckpointError
from jaxpipe.runtime.processes import Processes
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.corpora.tokenizers import stored_tokenizer
from jaxpipe.train.run import resume
from jaxpipe.train.run.resume import Start
from jaxpipe.train.setup import Prepared
from jaxpipe.train.state import TrainState
from jaxpipe.train.trainer import Trainer


class Saving:
    """Saves into ``store``.

    Args:
        regular: whether a step is one to save at.
        saved: the step that the run starts from, if it is in the store, else -1.
        warn: told, in a line, of each save that failed.
    """

    def __init__(
        self, store: CheckpointStore, regular: Callable[[int], bool], saved: int, warn: Callable[[str], None]
    ) -> None:
        self._store, self._regular, self._warn = store, regular, warn
        self._saved = saved  # or being saved
        self._again: int | None = None  # the step to try again at
        self._failures = 0  # in a row

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``. Looks at the save under way, and does not wait for it."""
        if error := self._store.poll():
            self._failed(error, step)
        return self._regular(step) or (self._again is not None and step >= self._again)

    def put_off(self, step: int) -> None:
        """``step`` was skipped: ask after the next one."""
        self._again = step + 1

    def save(self, step: int, put: Callable[[], None]) -> None:
        """Start to save by ``put``, which waits for the save before this one."""
        if self._again is None:
            self._failures = 0
        self._again = None
        try:
            put()
            self._saved = step
        except CheckpointError as error:
            self._failed(error, step)

    def finish(self, step: int, put: Callable[[], None]) -> None:
        """Bring ``step`` to the disk, by ``put`` where that is not under way.

        Raises:
            CheckpointError: it can't be saved, tried for a last time.
        """
        try:
            if self._saved == step:
                self._store.wait()
                return
        except CheckpointError as error:
            self._warn(f"warning: {error}; trying for the last time")
        put()
        self._store.wait()

    def _failed(self, error: CheckpointError, step: int) -> None:
        """Told after ``step``."""
        wait = (2**self._failures) // 2
        self._saved, self._again, self._failures = -1, step + wait, self._failures + 1
        self._warn(f"warning: {error}; trying again" + (f" after step {self._again}" if wait else ""))


def go_on(step: int | None, first: str = "") -> str:
    """Advice after a failure; ``step``: of the newest checkpoint."""
    if step is None:
        return "no checkpoint was saved before: the same command starts at step 0"
    return f"{first}run the same command again to go on from step {step}"


class RunCheckpoints:
    """The checkpoints of a run under way: saves states, and says which one to go on from after a failure.

    Args:
        sync_log: brings the metrics to the disk.
        regular: whether a step is one to save at.
        note: told, in a line, of each save that failed.
    """

    def __init__(
        self,
        prepared: Prepared,
        start: Start,
        store: CheckpointStore,
        processes: Processes,
        sync_log: Callable[[], None],
        regular: Callable[[int], bool],
        note: Callable[[str], None],
    ) -> None:
        self.store, self._prepared, self._start, self._processes = store, prepared, start, processes
        self._sync_log = sync_log
        saved = start.step if start.resumed else None
        self._saving = Saving(store, regular, -1 if saved is None else saved, note)
        self._first_loss, self._loss = start.first_loss, math.nan
        self._evaluated: tuple[int, float] | None = None
        self._last_good: int | None = None  # the newest checkpoint after which no loss above the first one followed
        self._unconfirmed = saved  # the newest checkpoint, until a step after it shows that

    def observe(self, step: int, loss: float, counts: bool) -> None:
        """Take note of the loss of ``step``; ``counts``: it had a target."""
        if counts:
            self._loss = loss
        if not math.isfinite(loss):
            return
        if self._first_loss is None:
            self._first_loss = loss
        # A step after the save has to be seen: the loss of the saved step itself is of the parameters before its
        # update.
        if self._unconfirmed is not None and self._unconfirmed < step and not self._is_worse:
            self._last_good, self._unconfirmed = self._unconfirmed, None

    def observe_evaluation(self, step: int, loss: float) -> None:
        """Take note of the held-out loss after ``step``, which a checkpoint of that step keeps."""
        self._evaluated = step, loss

    @property
    def _is_worse(self) -> bool:
        """Whether the last step's loss is above that of the first one."""
        return self._first_loss is not None and self._loss > self._first_loss

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``."""
        return self._saving.due(step)

    def save(self, trainer: Trainer, state: TrainState, *, skipped: bool) -> None:
        """Start to save ``state``, unless its step was ``skipped``: then after the next one that was not."""
        if skipped:
            self._saving.put_off(state.step)
            return
        # The last good checkpoint stays though newer ones crowd it out, until the run has reached its end.
        is_last = state.step == self._prepared.config.run.steps
        spare = () if self._last_good is None or is_last else (self._last_good,)
        self._saving.save(state.step, partial(self.put, trainer, state, prune=not self._is_worse, spare=spare))
        self._unconfirmed = state.step

    def finish(self, trainer: Trainer, state: TrainState, *, skipped: bool) -> None:
        """Bring the last step to the disk. In a row of ``skipped`` steps nothing gives way to it.

        Raises:
            CheckpointError: it can't be saved.
        """
        try:
            prune = not (skipped or self._is_worse)
            self._saving.finish(state.step, partial(self.put, trainer, state, prune=prune))
        except CheckpointError as error:
            raise CheckpointError(f"after step {state.step}: {error}; {self.advice()}") from error

    def put(self, trainer: Trainer, state: TrainState, *, prune: bool, spare: Collection[int] = ()) -> None:
        """Start to save. The metrics up to here are on the disk first: a run that goes on from it finds them all. ``prune``:
        delete what need not be kept, but ``spare``."""
        self._sync_log()
        params, optimizer, meta = trainer.contents(state)
        meta |= {"data": self._start.batches.state_at(state.step).to_dict(), "config": self._prepared.config.to_dict()}
        meta["tokenizer"] = stored_tokenizer(self._prepared.dataset.tokenizer)
        meta |= {"first_loss": self._first_loss, "began_in": str(Path.cwd()), "decay": self._start.decay}
        meta |= self._prepared.provenance
        meta["backwards"] = resume.backwards_of(trainer.schedule, trainer.pipeline.boundaries)
        step, loss = self._evaluated or (-1, math.nan)
        eval_loss = loss if step == state.step else None
        self.store.save(state.step, params, optimizer, meta, eval_loss, prune=prune, spare=spare)

    def advice(self, first: str = "") -> str:
        """Return what to do next, and ``first`` before that. Waits for the save under way."""
        step = None
        if self._processes.number > 1:  # this one may have failed alone
            return go_on(self.store.latest(), first)
        with suppress(CheckpointError):
            self.store.close()
        with suppress(CheckpointError):
            step = self.store.latest_intact().step
        doubtful = first and step is not None and self._last_good in self.store.steps() and step != self._last_good
        again = f"; if that fails, too, move away its checkpoints after step {self._last_good}" if doubtful else ""
        return go_on(step, first) + again
