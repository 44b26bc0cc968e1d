"""Steps that changed nothing. Those whose gradient was not finite, or whose weights were negative, count: too many in a row
end a run (``run.max_skipped``). Those whose batch has no target do not."""

from __future__ import annotations

from collections.abc import Callable

from jaxpipe.errors import NotFiniteError
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.state import Cause


class Skipping:
    """``steps``: how many were skipped; ``row``: of them those up to the last step, none if that counted. ``empty``: how many
    had no target."""

    def __init__(self, config: TrainConfig, note: Callable[[str], None]) -> None:
        self._run, self._note, self._rate = config.run, note, f"optimizer.lr={config.optimizer.lr:g}"
        self.steps = self.row = self.empty = self._first = 0

    def judge(self, step: int, *, cause: Cause | None, finite: bool) -> None:
        """What ``step`` means for the run: why its update was not applied, if so, and whether all parameters are ``finite``
        after it.

        Raises:
            NotFiniteError: the run ends by it.
        """
        run = self._run
        if not finite:
            raise NotFiniteError(
                f"step {step} made parameters that are not finite: {self._rate} or optimizer.weight_decay is too high"
            )
        if cause == "no target":
            self.empty += 1
            if self.empty == 1:
                self._note(f"step {step}: no target in this batch; nothing is learnt of such steps")
            return
        if cause is None:
            if self.row > 1:
                self._note(f"step {step}: finite again; {self.row} steps were skipped")
            self.row = 0
            return
        self._first = self._first if self.row else step
        self.steps, self.row = self.steps + 1, self.row + 1
        if self.row == run.max_skipped:
            since = f"steps {self._first} to {step} were" if self.row > 1 else f"step {step} was"
            if cause == "negative weight":
                raise NotFiniteError(
                    f"{since} skipped (run.max_skipped={run.max_skipped}): the weights of the targets add up to less than zero"
                )
            raise NotFiniteError(
                f"{since} not finite (run.max_skipped={run.max_skipped}): {self._rate} may be too high, or the data hold ids "
                "that the model does not know"
            )
        if self.row == 1:
            why = "the gradient is not finite" if cause == "not finite" else "the weights add up to less than zero"
            self._note(f"step {step}: {why}; parameters were left as they are")
