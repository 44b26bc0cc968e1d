"""Post-validation: a step is updated before it is known whether its gradient is to be clipped, or finite at all.

Sources: Qi et al. 2023 (zero bubble) section 4, `optpipe.txt` section 3.2. There an update that turns out wrong is undone by
arithmetic, which is not exact. Here nothing has to be undone (*late commit*): at first only the parameters that are computed
with are made anew, as if the norm were small, and the next step's forwards begin with them. Masters, optimizer state and
gradients stay as they are until the norm of the whole gradient is known, at the latest before a rank's first backward. If the
guess was right, the same arithmetic then changes the rest; if not, the forwards are dropped, the step is updated as any other,
and the next one begins anew. So every bit is as without post-validation. What a rank must know at first, mean loss and sum of
weights, comes from the ranks of the loss long before its last gradient.

The update's arithmetic is done twice, and parameters that are their own masters are there twice until the commit. That a part
of the update compiles to the bits of the whole is nothing that XLA promises: the first :data:`COMPARED_STEPS` that are made
ahead are made whole, too, and if a bit differs there is no post-validation from then on.

Several processes decide alike, each for its own ranks: all get the guess and later the scalars of the whole step,
and the same comparison of the same numbers says everywhere whether to commit or to drop. A dropped step ends in each process at
another place of its order; the executor sees that no message stays without its other end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.errors import ConfigError
from jaxpipe.runtime.executor import StepDropped
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.train.state import Buffers, Instance, TrainState, Unapplied, Updated

MODES = ("off", "on", "auto")
CLEAN_STEPS = 10
"""So many steps in a row must have been neither clipped nor skipped before ``auto`` guesses that the next one is not."""

COMPARED_STEPS = 3
"""So many times the parameters made ahead are compared with those of the whole update, before the next step begins."""


def last_rank(pipeline: Pipeline) -> int:
    """Return the rank that ends a step last, as it is predicted: there the programs that combine the scalars of all wait for
    nobody. A device runs programs in the order of their dispatch, so on another rank they would hold up the next step's
    forwards until the last gradient is there."""
    compute = (e for e in pipeline.predicted_timeline().events if e.lane == "compute")
    return max(compute, key=lambda e: (e.end_s, e.rank)).rank


class PostValidation:
    """When a step is updated ahead: never (``off``), always (``on``), or after :data:`CLEAN_STEPS` (``auto``). ``rollbacks``:
    how often that was in vain. ``steps_to_compare``: how many are to be compared yet; one that differed makes ``mode`` ``off``.

    Raises:
        ConfigError: there is no such mode.
    """

    def __init__(self, mode: str, processes: Processes | None = None) -> None:
        if mode not in MODES:
            raise ConfigError(f"post_validation is {mode!r}; want one of {', '.join(MODES)}")
        self.mode, self.rollbacks = mode, 0
        self.steps_to_compare = COMPARED_STEPS
        self._processes = SingleProcess() if processes is None else processes
        self._clean = 0
        self._unread: deque[Callable[[], bool]] = deque()

    def goes_ahead(self, is_valid: Callable[[], bool]) -> bool:
        """Return whether to update ahead the step that may be if ``is_valid``, which waits. Waits for the step before, which
        runs still, at most."""
        if self.mode == "on":
            return True
        self._unread.append(is_valid)
        while len(self._unread) > 1:
            self._clean = self._clean + 1 if self._unread.popleft()() else 0
        return self._clean >= CLEAN_STEPS

    def record_comparison(self, same: bool) -> None:
        """Parameters of this process made ahead are the ``same`` as those of the whole update in every bit, or not. All
        processes call it after the same step."""
        self.steps_to_compare -= 1
        if not self._processes.broadcast("same bits", all(self._processes.gather("same bits", same))):
            self.mode = "off"

    @property
    def remark(self) -> str:
        """A few words on how early updates went, empty where all were kept."""
        if self.mode == "off" and self.steps_to_compare < COMPARED_STEPS:
            return "no post-validation: bits differ"
        return f"{self.rollbacks} rollback{'s' * (self.rollbacks > 1)}" if self.rollbacks else ""

    def failed(self) -> None:
        """An update ahead was in vain."""
        self.rollbacks += 1
        self._clean = 0
        self._unread.clear()


class LateResult:
    """The result of an update that was made ahead, once it is complete; whoever keeps it keeps no state."""

    def __init__(self, late: LateUpdate) -> None:
        self._late: LateUpdate | None = late
        self._updated: Updated

    def settle(self, updated: Updated) -> None:
        self._late, self._updated = None, updated

    def __call__(self) -> Updated:
        """Waits as :meth:`LateUpdate.settled`."""
        if self._late is not None:
            self._late.settled()
        return self._updated


class LateUpdate:
    """The rest of an update whose parameters were made ahead, so that the next step could begin.

    Args:
        unapplied: what is to be committed, with the new parameters in ``compute``.
        early_results: by stage, the last three arguments of the early update.
        is_valid: whether they were right; waits until that is known.
        updated: what is known of it; ``rate`` finds the learning rate in the new optimizer state, if that is unknown.
        anew: the whole update, if they were wrong.
        policy: is told if they were.
    """

    def __init__(
        self,
        unapplied: Unapplied,
        early_results: Mapping[int, tuple[Any, ...]],
        is_valid: Callable[[], bool],
        updated: Updated,
        rate: Callable[[Mapping[int, Any]], jax.Array | None],
        anew: Callable[[Unapplied], Updated],
        policy: PostValidation,
    ) -> None:
        self._unapplied, self._early_results, self._validate, self._updated = (
            unapplied,
            dict(early_results),
            is_valid,
            updated,
        )
        self._rate, self._anew, self._policy = rate, anew, policy
        self._valid: bool | None = None
        self._settled: TrainState | None = None
        self._begun = False
        self.result = LateResult(self)

    @property
    def open(self) -> bool:
        """Whether the next step may begin before anything is committed."""
        return self._settled is None and not self._begun and not self._policy.steps_to_compare

    @property
    def used(self) -> bool:
        """Whether a step has taken the state that this is part of."""
        return self._begun or (self._settled is not None and self._settled.used)

    def accumulators(self, rank: int) -> dict[Instance, Buffers]:
        """Commit the stages of a rank and return its accumulators. Waits until the update is known to be valid.

        Raises:
            StepDropped: it is not.
        """
        if not self._is_valid():
            raise StepDropped
        # From here on buffers of the old state are donated, so the state counts as taken even if a later rank fails.
        self._begun = True
        for at in [at for at in self._unapplied.master if at[0] == rank and at[1] in self._early_results]:
            self._commit(at)
        return {at: buffers for at, buffers in self._unapplied.acc.items() if at[0] == rank}

    def settled(self) -> TrainState:
        """Return the state after the step, all of it. Waits as :meth:`accumulators`."""
        if self._settled is None:
            # While comparing, the whole update runs although the early one was right: that XLA compiles a part to the
            # bits of the whole is tried, not promised.
            if self._is_valid() and not self._policy.steps_to_compare:
                for at in [at for at in self._unapplied.master if at[1] in self._early_results]:
                    self._commit(at)
            else:
                ahead = {at: list(buffers) for at, buffers in self._unapplied.compute.items()}
                self._updated = self._anew(self._unapplied)
                if self._is_valid():
                    self._policy.record_comparison(_agree(ahead, self._unapplied.compute))
            self._settled = self._unapplied.state()
            self._unapplied.params.clear()
            self._unapplied.reduced.clear()
            self.result.settle(self._updated)
        return self._settled

    def _is_valid(self) -> bool:
        if self._valid is None:
            self._valid = self._validate()
            if not self._valid:
                self._policy.failed()
        return self._valid

    def _commit(self, at: Instance) -> None:
        unapplied, stage = self._unapplied, at[1]
        update, grads = unapplied.updates[stage], unapplied.reduced.pop(stage).grads
        old = unapplied.params.pop(stage), unapplied.master[at], grads, unapplied.optimizer[stage]
        unapplied.master[at], unapplied.optimizer[stage], zeros = update.commit(*old, *self._early_results.pop(stage))
        del old, grads  # what was not donated is gone before the accumulators come
        unapplied.acc[at] = zeros or update.zeros()
        if self._updated.learning_rate is None:
            self._updated = replace(self._updated, learning_rate=self._rate(unapplied.optimizer))


def _agree(old: Mapping[Instance, Buffers], new: Mapping[Instance, Buffers]) -> bool:
    """Return whether buffers that have been replaced have the same bits as before."""
    pairs = [(a, b) for at, buffers in old.items() for a, b in zip(buffers, new[at], strict=True)]
    same = [_same_bits(a, b) for a, b in pairs if a is not b and not a.is_deleted()]
    return all(same)


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    unsigned = f"uint{8 * a.dtype.itemsize}"
    return jnp.all(jax.lax.bitcast_convert_type(a, unsigned) == jax.lax.bitcast_convert_type(b, unsigned))
