"""Define a schedule family, a named rule that turns sizes (and costs) into a :class:`~jaxpipe.schedule.ir.Schedule`; find
those of this folder, and make a schedule by name (:func:`generate`).

A family is a function under :func:`family`, which checks what it is given, reads its options off its signature and puts it
into the table :data:`FAMILIES`. The files of this folder are found there; one from outside registers when it
is imported. This module also holds what the files share: size checks with one wording, and :func:`in_order`, which numbers
the microbatches of a row that is given as op names only. Closed forms assume equal stages, no transfer time and one rank's
share F, B, W of a microbatch.

To add a family to jaxpipe: write its file beside this one, a function under :func:`family`
(or a :class:`Family` value). From outside: the same in a module that is imported, or an entry point
(:mod:`~jaxpipe.schedule.plugins`).
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from itertools import count
from types import MappingProxyType
from typing import Any, ParamSpec, get_args

from jaxpipe.errors import JaxpipeError, ScheduleError
from jaxpipe.schedule import plugins
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.engine import collectives_exposed
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.placement import Placement, one_to_one
from jaxpipe.schedule.timeline import Objective
from jaxpipe.text import closest

OPTIONS = ("chunks", "memory_limit", "group", "costs", "objective")
"""A family's function may take these arguments beyond ``ranks`` and ``microbatches``; :func:`generate` hands it on."""
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
    ``sees_collectives``: whether ``function`` weighs collectives itself; others get costs with them as part of the actions.
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
"""All registered families by name; :data:`FAMILIES` and :data:`VOCABULARY_FAMILIES` are views of it."""


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


def register_modules(package: str) -> frozenset[str]:
    """Import every module of ``package``, which registers the families that it holds; return the names of all families."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__, f"{package}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, Family):
                register_family(value)
    return frozenset(TABLE)


assert __package__
register_modules(__package__)


def is_shipped(family: Family) -> bool:
    """Return whether a family is jaxpipe's own: what it makes is checked by tests, not each time."""
    return getattr(family.function, "__module__", "").startswith("jaxpipe.")


def family_named(name: str) -> Family:
    """Return the family called ``name``.

    Raises:
        ScheduleError: no such family; suggests the nearest name.
    """
    family = FAMILIES.get(name) or VOCABULARY_FAMILIES.get(name)
    if family is None:
        names = (*FAMILIES, *VOCABULARY_FAMILIES)
        raise ScheduleError(
            f"unknown schedule family {name!r}{closest(str(name), names, '.')} Known: {' '.join(names)}"
        )
    return family


def generate(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: CostProfile | None = None,
    memory_limit: float | None = None,
    group: int | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """Return the schedule of the family ``name`` at these sizes.

    ``chunks``: stages per rank, for families that take it. ``costs``: one entry per stage (ranks × chunks); families of fixed
    order ignore them; those that make no braids get them with collectives exposed. ``memory_limit``: peak activations per
    rank in units of one rank's share of a microbatch, for families that take it. ``group``: microbatches that run in turn
    through one chunk, for families that take it. ``objective``: what families that choose minimise first, the makespan or the
    longest rank span (what counts where the optimizer step does not wait for the slowest rank); the others have nothing to
    choose and ignore it, as they do costs.

    Raises:
        ScheduleError: unknown family or objective, a size it doesn't work for, an option it doesn't take, costs for another
            number of stages, or (families from outside) no valid schedule of these sizes.
    """
    family = family_named(name)
    explicit_options = {"chunks": chunks, "memory_limit": memory_limit, "group": group}
    options: dict[str, Any] = {option: value for option, value in explicit_options.items() if value is not None}
    require_sizes(name, ranks=ranks, microbatches=microbatches, **{k: options[k] for k in SIZES if k in options})
    # the one number of chunks that a family has may be said aloud: configs and the CLI pass it for every family
    if "chunks" not in family.options and chunks == family.default_chunks:
        options.pop("chunks", None)
    for option, value in options.items():
        if option not in family.options:
            has = f"has {family.default_chunks} chunk(s) per rank" if option == "chunks" else f"takes no {option}"
            takers = ", ".join(f.name for f in FAMILIES.values() if option in f.options) or "none"
            raise ScheduleError(f"{name} {has.replace('_', ' ')}, got {value:g}; families that take {option}: {takers}")
    if costs is not None:
        require_stages(family, ranks, chunks, costs)
        if "costs" in family.options:
            options["costs"] = costs if family.sees_collectives else collectives_exposed(costs)
    if objective not in get_args(Objective):
        raise ScheduleError(f"unknown objective {objective!r}; there are {', '.join(get_args(Objective))}")
    if "objective" in family.options:
        options["objective"] = objective
    if is_shipped(family):
        return family.function(ranks, microbatches, **options)
    return _made_outside(family, ranks, microbatches, chunks, options)


def _made_outside(
    family: Family, ranks: int, microbatches: int, chunks: int | None, options: Mapping[str, Any]
) -> Schedule:
    """Return what a custom family makes: a valid schedule of its placement, or a line that says why not."""
    placement = family.placement(ranks, chunks or family.default_chunks)
    try:
        schedule = family.function(ranks, microbatches, **options)
    # its own words about its input go to whoever asked, as they are
    except JaxpipeError:
        raise
    except Exception as error:
        raise ScheduleError(f"{family.name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{family.name} makes a {type(schedule).__name__}; want a Schedule")
    # kind is a name for people, so it may differ; what runs where and what feeds what may not
    made_on = schedule.placement
    if (made_on.flows, made_on.edges, schedule.num_microbatches) != (placement.flows, placement.edges, microbatches):
        raise ScheduleError(
            f"{family.name} makes {made_on.num_stages} stages on {made_on.num_ranks} ranks ({made_on.kind}), "
            f"{schedule.num_microbatches} microbatches; its placement says {placement.num_stages} on {placement.num_ranks} "
            f"({placement.kind}), and {microbatches} were asked"
        )
    check_schedule(schedule)
    return schedule


def cheap_first(families: Iterable[Family]) -> list[Family]:
    """Sort fixed orders before those that search, those that search under a limit last."""
    return sorted(families, key=lambda f: (("memory_limit" in f.options), ("costs" in f.options)))
