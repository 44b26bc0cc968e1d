"""What a schedule family is: a named rule that turns sizes (and costs) into a :class:`~jaxpipe.schedule.ir.Schedule`.

A family file defines one public function and one :class:`Family` value; ``registry.py`` lists the values. This module also
holds what the files share: size checks with one wording, and :func:`in_order`, which numbers the microbatches of a row that
is given as op names only. Closed forms assume equal stages, no transfer time and one rank's share F, B, W of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.placement import Placement, one_to_one


@dataclass(frozen=True, slots=True)
class Family:
    """A named generator of schedules.

    ``name``: as on the command line. ``function``: ``function(ranks, microbatches, **options) -> Schedule``.
    ``description``: one line for a listing. ``source``: paper, section and authors.
    ``options``: keyword arguments of ``function`` beyond the sizes, among ``chunks``, ``memory_limit``, ``group``, ``costs``,
    ``objective``.
    ``placement``: ``placement(ranks, chunks)``. ``default_chunks``: chunks per rank when none are asked for.
    ``peak_activations``: ``(p, m, v) -> peak`` over all ranks, in units of one rank's share of a microbatch.
    ``makespan``: ``(p, m, v, f, b, w) -> seconds``. Either is None, or returns None, where no closed form is known.
    ``sees_collectives``: whether ``function`` weighs TP collectives itself; others get costs with them as part of the actions.
    ``picture``: arguments of ``function`` for the picture in its docstring, where F = B = W = 1 for each chunk.
    """

    name: str
    function: Callable[..., Schedule]
    description: str
    source: str
    options: tuple[str, ...] = ()
    placement: Callable[[int, int], Placement] = lambda ranks, chunks: one_to_one(ranks)
    default_chunks: int = 1
    peak_activations: Callable[[int, int, int], float | None] | None = None
    makespan: Callable[[int, int, int, float, float, float], float | None] | None = None
    sees_collectives: bool = False
    picture: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({"ranks": 4, "microbatches": 4}))


def require_sizes(family: str, **sizes: object) -> None:
    """Check that every size is a whole number of at least 1.

    Raises:
        ScheduleError: names the family and every size that is not.
    """
    problems = [
        f"{family}: {name} is {size!r}; want a whole number of at least 1"
        for name, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]
    if problems:
        raise ScheduleError("; ".join(problems), problems)


def in_order(name: str, microbatches: int, rows: Sequence[Iterable[str]]) -> Schedule:
    """The one-chunk schedule whose rank r issues the ops ``rows[r]``, each op taking the microbatches 0, 1, 2, … in turn."""
    return Schedule(name, one_to_one(len(rows)), microbatches, tuple(_numbered(r, row) for r, row in enumerate(rows)))


def _numbered(rank: int, ops: Iterable[str]) -> tuple[Action, ...]:
    count: dict[str, int] = {}
    row = []
    for op in ops:
        microbatch = count.get(op, 0)
        count[op] = microbatch + 1
        row.append(Action(op, rank, microbatch))
    return tuple(row)
