"""Define a schedule family: a named rule that turns sizes (and costs) into a :class:`~jaxpipe.schedule.ir.Schedule`.

A family is a function under :func:`family`, which checks what it is given, reads its options off its signature and puts it
into the table :data:`FAMILIES`. The files of this folder are found there by ``registry.py``; one from outside registers when it
is imported. This module also holds what the files share: size checks with one wording, and :func:`in_order`, which numbers
the microbatches of a row that is given as op names only. Closed forms assume equal stages, no transfer time and one rank's
share F, B, W of a microbatch.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from types import MappingProxyType
from typing import Any, ParamSpec

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import plugins
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.placement import Placement, one_to_one

OPTIONS = ("chunks", "memory_limit", "group", "costs", "objective")
"""What a family's function may take beyond ``ranks`` and ``microbatches``; :func:`~.registry.generate` hands it on."""
SIZES = ("ranks", "microbatches", "chunks", "group")
_NAME = re.compile(r"[^\W_][\w+-]*")
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True, slots=True)
class Family:
    """A named generator of schedules.

    ``name``: as on the command line. ``function``: ``function(ranks, microbatches, **options) -> Schedule``.
    ``description``: one line for a listing. ``source``: paper, section and authors.
    ``options``: keyword arguments of ``function`` beyond the sizes, among :data:`OPTIONS`.
    ``placement``: ``placement(ranks, chunks)``. ``default_chunks``: chunks per rank when none are asked for.
    ``peak_activations``: ``(p, m, v) -> peak`` over all ranks, in units of one rank's share of a microbatch.
    ``makespan``: ``(p, m, v, f, b, w) -> seconds``. Either is None, or returns None, where no closed form is known.
    ``sees_collectives``: whether ``function`` weighs TP collectives itself; others get costs with them as part of the actions.
    ``vocabulary``: whether it has the passes of spread vocabulary layers too; then it is one of :data:`VOCABULARY_FAMILIES`.
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
    vocabulary: bool = False
    picture: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({"ranks": 4, "microbatches": 4}))


TABLE: dict[str, Family] = {}
"""What :data:`FAMILIES` and :data:`VOCABULARY_FAMILIES` show."""


def _load_others() -> None:
    plugins.load_search()
    plugins.load_installed("jaxpipe.families", Family, register_family)


@dataclass(frozen=True, slots=True, eq=False)
class _Families(Mapping[str, Family]):
    """View of the table: the families with or without passes of vocabulary layers, read only, by name. Listing them, or
    looking for a name that the table lacks, first loads the families that search, and what installed packages add."""

    vocabulary: bool

    def __getitem__(self, name: str) -> Family:
        if name not in TABLE and _NAME.fullmatch(name):  # not the name of a file
            _load_others()
        if (entry := TABLE[name]).vocabulary != self.vocabulary:
            raise KeyError(name)
        return entry

    def __iter__(self) -> Iterator[str]:
        _load_others()
        return iter(sorted(name for name, family in TABLE.items() if family.vocabulary == self.vocabulary))

    def __len__(self) -> int:
        return sum(1 for _ in self)


FAMILIES: Mapping[str, Family] = _Families(vocabulary=False)
"""All families of a chain of stages by name: of fixed order, those that search, of installed packages, and registered ones."""
VOCABULARY_FAMILIES: Mapping[str, Family] = _Families(vocabulary=True)
"""Those that spread vocabulary layers over the ranks, more work and more stages: they don't compare with the others."""


def register_family(family: Family) -> Family:
    """Add ``family`` to :data:`FAMILIES`, where every verb and ``generate`` find it; idempotent for an equal one.

    Raises:
        ScheduleError: its name is taken or can't be typed as one, or it has an option that nothing would give it.
    """
    if not _NAME.fullmatch(family.name):
        raise ScheduleError(
            f"family name {family.name!r}: use letters, digits, '-', '_' and '+', a letter or digit first"
        )
    if unknown := [option for option in family.options if option not in OPTIONS]:
        raise ScheduleError(f"family {family.name!r} has the option {unknown[0]!r}; options are {', '.join(OPTIONS)}")
    if TABLE.setdefault(family.name, family) != family:
        raise ScheduleError(f"there is a family {family.name!r} already; choose another name")
    return family


def family(
    name: str, description: str, source: str, *, placement: Callable[..., Placement] = one_to_one, **facts: Any
) -> Callable[[Callable[_Arguments, Schedule]], Callable[_Arguments, Schedule]]:
    """Register a function ``(ranks, microbatches, **options) -> Schedule`` as a :class:`Family` with the options it takes.

    ``placement``: of (ranks, chunks) where the function takes ``chunks``, else of ranks alone. ``facts``: further fields.
    The function stays what it was, but first checks its sizes, and that its costs are for as many stages as its placement has.

    Raises:
        ScheduleError: as :func:`register_family`.
    """

    def registered(function: Callable[_Arguments, Schedule]) -> Callable[_Arguments, Schedule]:
        signature = inspect.signature(function)
        defaults = {k: parameter.default for k, parameter in signature.parameters.items()}
        _, _, *options = defaults
        takes_chunks = "chunks" in options

        @wraps(function)
        def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Schedule:
            arguments = signature.bind(*args, **kwargs).arguments
            # what stands at its default needs no check
            require_sizes(name, **{k: x for k, x in arguments.items() if k in SIZES and x is not defaults[k]})
            if arguments.get("costs") is not None:
                require_stages(registration, arguments["ranks"], arguments.get("chunks"), arguments["costs"])
            return function(*args, **kwargs)

        registration = register_family(
            Family(
                name,
                checked,
                description,
                source,
                options=tuple(options),
                placement=placement if takes_chunks else lambda ranks, chunks: placement(ranks),
                default_chunks=defaults["chunks"] if takes_chunks else placement(2).num_chunks,
                **facts,
            )
        )
        return checked

    return registered


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


def require_stages(family: Family, ranks: int, chunks: int | None, costs: CostProfile) -> None:
    """Check that ``costs`` are for as many stages as the family's placement has.

    Raises:
        ScheduleError: they are not; names both numbers.
    """
    chunks = family.default_chunks if chunks is None else chunks
    stages = family.placement(ranks, chunks).num_stages
    costs.require_stages(stages, f"{family.name} on {ranks} ranks with {chunks} per rank")


def in_order(name: str, microbatches: int, rows: Sequence[Iterable[str]]) -> Schedule:
    """Return the one-chunk schedule whose rank r issues the ops ``rows[r]``, each op taking the microbatches 0, 1, 2, … in
    turn."""

    def numbered(rank: int, ops: Iterable[str]) -> tuple[Action, ...]:
        numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        return tuple(Action(op, rank, next(numbers[op])) for op in ops)

    return Schedule(name, one_to_one(len(rows)), microbatches, tuple(numbered(r, row) for r, row in enumerate(rows)))
