"""Steps whose gradient was not finite: they are skipped, and too many end a run (``run.max_skipped``)."""

from __future__ import annotations

from collections.abc import Callable

from jaxpipe.errors import NotFiniteError
from jaxpipe.train.config import TrainConfig


class Skipping:
    """``steps``: how many were skipped; ``row``: of them those up to the last step, none if that counted."""

    def __init__(self, config: TrainConfig, note: Callable[[str], None]) -> None:
        self._run, self._note, self._rate = config.run, note, f"optimizer.lr={config.optimizer.lr:g}"
        self.steps = self.row = self._first = 0

    def judge(self, step: int, *, applied: bool, finite: bool) -> None:
        """What ``step`` means for the run: whether its update was ``applied``, and all parameters are ``finite`` after it.

        Raises:
            NotFiniteError: the run ends by it.
        """
        run = self._run
        if not finite:
            raise NotFiniteError(
                f"step {step} made parameters that are not finite: {self._rate} or optimizer.weight_decay is too high"
            )
        if applied:
            if self.row > 1:
                self._note(f"step {step}: finite again; {self.row} steps were skipped")
            self.row = 0
            return
        self._first = self._first if self.row else step
        self.steps, self.row = self.steps + 1, self.row + 1
        if self.row == run.max_skipped:
            since = f"steps {self._first} to {step} were" if self.row > 1 else f"step {step} was"
            raise NotFiniteError(
                f"{since} not finite (run.max_skipped={run.max_skipped}): {self._rate} may be too high, or the data hold ids "
                "that the model does not know"
            )
        if self.row == 1:
            self._note(f"step {step}: the gradient is not finite; parameters were left as they are")
