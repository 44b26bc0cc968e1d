"""When a run saves: at its checkpoint steps, and again after a save that failed.

A save that fails ends nothing. It is tried again at the next step, then after 1, 2, 4, … more steps: every try copies the
arrays to the host, so a disk that stays full costs few copies, and one that is full for n steps puts at most about 2n at risk.
While steps are being skipped, saves wait for one that counts.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint import CheckpointStore


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
        """Whether to save after ``step``. Looks at the save under way, and does not wait for it."""
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
