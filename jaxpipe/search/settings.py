"""Which families with which parameters are worth a try for given sizes, costs and memory limit.

A :class:`Task` says what is wanted, a :class:`Setting` is a family with its parameters; :func:`settings_of` lists a family's
settings for a task. It reads the family's options only, so a new family is explored without a change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families import FAMILIES, Family
from jaxpipe.schedule.placement import Placement, one_to_one
from jaxpipe.schedule.tolerance import Objective, close, how_many

Costs = CostProfile | Callable[[Placement], CostProfile] | None

CHUNKS = (1, 2, 3, 4, 6, 8)
"""Chunks per rank that are tried when costs don't fix the number of stages."""
LIMITS = (1 / 2, 2 / 3, 3 / 4, 1.0, 1.5, 2.0)
"""Memory limits that are tried beside the one asked for, in units of p."""
_MOST_PAIRS = 16_384  # pairs of stage and microbatch up to which more chunks than the family's own are tried


@dataclass(frozen=True, slots=True)
class Setting:
    """A family and its parameters. ``memory_limit`` is what the family is told, at most the task's.

    ``offload``: whether the offload pass brings the schedule below the task's limit.
    """

    family: str
    chunks: int
    group: int | None = None
    memory_limit: float | None = None
    offload: bool = False

    def __str__(self) -> str:
        chunks = self.chunks if "chunks" in FAMILIES[self.family].options else None
        flags = {"chunks": chunks, "group": self.group, "memory-limit": self.memory_limit}
        flags_text = "".join(f" --{flag} {value:g}" for flag, value in flags.items() if value is not None)
        return self.family + flags_text + (" and the offload pass" if self.offload else "")


@dataclass(frozen=True, slots=True)
class Task:
    """A request for a schedule.

    ``costs``: a profile, which fixes the number of stages; a function from placement to profile, which leaves it free; or
    None for unit costs. ``memory_limit``: peak activations allowed on a rank, in units of its share of one microbatch.
    ``chunks``, ``group``: for the families that take them; free if None. ``max_chunks``: the most per rank of any family.
    ``offload``: whether schedules may copy activations to the host; by default they may if the costs say that it takes time (a
    host link that takes none would hide it all). ``separate``, ``braid``: whether these passes go over every schedule.
    """

    ranks: int
    microbatches: int
    costs: Costs = None
    memory_limit: float = float("inf")
    chunks: int | None = None
    group: int | None = None
    offload: bool | None = None
    objective: Objective = "makespan"
    braid: bool = False
    max_chunks: int | None = None
    separate: bool = False

    def costs_for(self, placement: Placement) -> CostProfile:
        """Return the profile for schedules of ``placement``.

        Raises:
            ScheduleError: the task's profile has another number of stages.
        """
        if self.costs is None:
            return CostProfile.on(placement)
        if not isinstance(self.costs, CostProfile):
            return self.costs(placement)
        self.costs.require_stages(placement.num_stages, f"this with {placement.num_chunks} per rank")
        return self.costs

    def may_offload(self, costs: CostProfile) -> bool:
        """Return whether schedules may use the host's memory."""
        return any(costs.offload_s) or any(costs.load_s) if self.offload is None else self.offload


def settings_of(family: Family, task: Task) -> Iterator[Setting]:
    """Yield every setting of ``family`` worth a try for ``task``, the offload pass apart."""
    for chunks in _chunks(family, task):
        for group in _groups(task) if "group" in family.options else (None,):
            for limit in _limits(task, chunks) if "memory_limit" in family.options else (None,):
                yield Setting(family.name, chunks, group, limit)


def _chunks(family: Family, task: Task) -> Iterable[int]:
    p, m, v = task.ranks, task.microbatches, family.default_chunks
    if isinstance(task.costs, CostProfile):
        stages = task.costs.num_stages
        candidates = {v, stages // p} if "chunks" in family.options else {v}
        return [x for x in sorted(candidates) if x >= 1 and _stages(family, p, x) == stages]
    most = task.max_chunks or max(*CHUNKS, v)
    if "chunks" not in family.options:
        return (v,) if v <= most else ()
    if task.chunks is not None:
        return (task.chunks,)
    # many chunks of many microbatches take long to search
    return [x for x in sorted({*CHUNKS, v, most}) if x <= most and (x == v or p * m * x <= _MOST_PAIRS)]


def _stages(family: Family, ranks: int, chunks: int) -> int | None:
    """Return the number of stages of the placement, or None where the family has none of these sizes."""
    try:
        return family.placement(ranks, chunks).num_stages
    except ScheduleError:
        return None


def _groups(task: Task) -> Iterable[int]:
    """Return groups from half the ranks (`pipeoffload.txt` section 3.2: from p/2 to p) to twice as many; the peak rises
    with them."""
    p = task.ranks
    return [*range((p + 1) // 2, p + 1), *sorted({p + p // 2, 2 * p} - {p})] if task.group is None else (task.group,)


def _limits(task: Task, chunks: int) -> Iterable[float | None]:
    """Return the task's limit first; then whole chunks just below it and :data:`LIMITS`: a search with less room may find
    more, and one with more room leaves something to offload."""
    limit = task.memory_limit
    costs = task.costs if isinstance(task.costs, CostProfile) else task.costs_for(one_to_one(task.ranks))
    candidates = [x * task.ranks for x in LIMITS if x * task.ranks < limit or task.may_offload(costs)]
    if limit < float("inf"):
        chunks_below = how_many(1 / chunks, limit)
        candidates += [x / chunks for x in (chunks_below, chunks_below - 1) if x > 0]
    tried = [x for x in sorted(set(candidates), reverse=True) if not close(x, limit)]
    return [None if limit == float("inf") else limit, *tried]
