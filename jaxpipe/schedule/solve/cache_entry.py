"""One file of the schedule cache: a solved problem as plain JSON, one key a line, behind a checksum.

::

    {
    "format": "jaxpipe cached schedule 1",
    "sha256": "…",          of every byte after this line
    "problem": {…},         sizes, placement, limits, and the problem in proportional values
    "answer": {…},          value, bound, peaks, what was spent, when
    "costs": {…},           of the problem, for people
    "schedule": {…}
    }

The two large lines are parsed only when needed: a lookup reads many entries and uses one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from jaxpipe import __version__
from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule import json_form
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.solve.cache_key import CrudeProblem, exact_digest, problem_stem
from jaxpipe.schedule.solve.task import Options, Solution, SolveTask, count_offloads, gap_of
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import nine_digits

VERSION = 1
_HEAD = re.compile(rb'\{\n"format": "jaxpipe cached schedule (\d{1,9})",\n')
_CHECKSUM = re.compile(rb'"sha256": "([0-9a-f]{64})",\n')
_KEYS = ("problem", "answer", "costs", "schedule")

Merit = tuple[float, float, int]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A solved problem.

    ``limits``: activations allowed per rank, in units of its share of one microbatch. ``exact``: digest of every number of
    the problem. ``value`` and ``lower_bound``: seconds of the objective, under the costs of this problem.
    ``peaks``: live activations per rank. ``offloaded``: number of offloads. ``wall_s``: seconds the solve took;
    ``time_limit_s``: what it was given, if known. ``stored``: when, in UTC.
    """

    placement: Placement
    num_microbatches: int
    limits: tuple[float, ...]
    objective: str
    offload: bool
    crude: CrudeProblem
    exact: str
    value: float
    lower_bound: float
    peaks: tuple[float, ...]
    offloaded: int
    wall_s: float
    time_limit_s: float | None
    stored: datetime
    jaxpipe: str
    costs_json: str
    schedule_json: str

    @classmethod
    def of(cls, solution: Solution, options: Options | None = None) -> CacheEntry:
        """The entry of a solution. Raises ScheduleError if its costs are for another number of stages."""
        task = solution.task
        return cls(
            placement=task.placement,
            num_microbatches=task.num_microbatches,
            limits=task.limits(),
            objective=task.objective,
            offload=task.offload,
            crude=CrudeProblem.of(task),
            exact=exact_digest(task),
            value=solution.value,
            lower_bound=solution.lower_bound,
            peaks=solution.timeline.peak_activations,
            offloaded=count_offloads(solution.schedule),
            wall_s=solution.wall_s,
            time_limit_s=options.time_limit_s if options is not None else None,
            stored=datetime.now(UTC).replace(microsecond=0),
            jaxpipe=__version__,
            costs_json=_dumps(json_form.to_costs(task.costs)),
            schedule_json=_dumps(json_form.to_schedule(solution.schedule)),
        )

    @property
    def name(self) -> str:
        """The file's name: the problem in proportional values, so that one file holds one of them."""
        return f"{problem_stem(self.placement, self.num_microbatches)}{self.crude.digest()}.json"

    @property
    def memory_limit(self) -> float:
        """The tightest limit of a rank."""
        return min(self.limits)

    @property
    def gap(self) -> float | None:
        """How far ``value`` may be from the optimum, as a fraction of the bound; None without a bound."""
        return gap_of(self.value, self.lower_bound) if self.lower_bound > 0 else None

    @property
    def merit(self) -> Merit:
        """The smaller, the better: value, highest peak, offloads."""
        return _merit(self.value, self.peaks, self.offloaded)

    def schedule(self) -> Schedule:
        """The schedule, not checked. Raises ScheduleParseError if it can't be read."""
        try:
            return json_form.from_schedule(json.loads(self.schedule_json, parse_constant=_refuse))
        except (ValueError, RecursionError) as error:
            raise ScheduleParseError(f"the schedule is not JSON: {error}") from None


def merit(task: SolveTask, schedule: Schedule, timeline: Timeline) -> Merit:
    """The merit that an entry with this answer would have."""
    return _merit(task.seconds(timeline), timeline.peak_activations, count_offloads(schedule))


def _merit(value: float, peaks: tuple[float, ...], offloaded: int) -> Merit:
    return nine_digits(value), nine_digits(max(peaks, default=0.0)), offloaded


# As a file.


def format_entry(entry: CacheEntry) -> str:
    """The text of the entry's file. Raises ValueError if a number is not finite."""
    problem = {
        "microbatches": entry.num_microbatches,
        "placement": json_form.to_placement(entry.placement),
        "limits": ["inf" if x == math.inf else x for x in entry.limits],
        "objective": entry.objective,
        "offload": entry.offload,
        "crude": entry.crude.to_json(),
        "exact": entry.exact,
    }
    names = ("value", "lower_bound", "peaks", "offloaded", "wall_s", "time_limit_s", "jaxpipe")
    answer = {name: getattr(entry, name) for name in names} | {"stored": entry.stored.isoformat()}
    lines = (_dumps(problem), _dumps(answer), entry.costs_json, entry.schedule_json)
    body = ",\n".join(f'"{key}": {line}' for key, line in zip(_KEYS, lines, strict=True)) + "\n}\n"
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return f'{{\n"format": "jaxpipe cached schedule {VERSION}",\n"sha256": "{checksum}",\n{body}'


def parse_entry(data: bytes) -> CacheEntry:
    """The entry in a file's bytes.

    Raises:
        ScheduleParseError: another format or version, a checksum that does not match, or contents that make no sense.
    """
    head = _HEAD.match(data)
    if head is None:
        raise ScheduleParseError("not a cached schedule")
    if int(head[1]) != VERSION:
        raise ScheduleParseError(f"version {int(head[1])} of the format; this jaxpipe reads {VERSION}")
    checksum = _CHECKSUM.match(data, head.end())
    if checksum is None or hashlib.sha256(data[checksum.end() :]).hexdigest().encode() != checksum[1]:
        raise ScheduleParseError("damaged: the checksum does not match")
    try:
        return _parse_body(data[checksum.end() :].decode())
    except (
        ScheduleError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as error:
        text = " ".join(str(error).split())[:200]
        raise ScheduleParseError(f"not what jaxpipe writes: {type(error).__name__}: {text}") from None


def _parse_body(body: str) -> CacheEntry:
    lines = body.split("\n")
    if len(lines) != len(_KEYS) + 2 or lines[-2:] != ["}", ""]:
        raise ValueError(f"{len(lines)} lines after the checksum")
    texts = [_value(key, line) for key, line in zip(_KEYS, lines, strict=False)]
    problem, answer = (json.loads(text, parse_constant=_refuse) for text in texts[:2])
    placement = json_form.from_placement(problem["placement"])
    entry = CacheEntry(
        placement=placement,
        num_microbatches=int(problem["microbatches"]),
        limits=tuple(math.inf if x == "inf" else _finite(x) for x in problem["limits"]),
        objective=str(problem["objective"]),
        offload=bool(problem["offload"]),
        crude=CrudeProblem.from_json(problem["crude"]),
        exact=str(problem["exact"]),
        value=_finite(answer["value"]),
        lower_bound=_finite(answer["lower_bound"]),
        peaks=tuple(_finite(x) for x in answer["peaks"]),
        offloaded=int(answer["offloaded"]),
        wall_s=_finite(answer["wall_s"]),
        time_limit_s=None if answer["time_limit_s"] is None else _finite(answer["time_limit_s"]),
        stored=datetime.fromisoformat(answer["stored"]),
        jaxpipe=str(answer["jaxpipe"]),
        costs_json=texts[2],
        schedule_json=texts[3],
    )
    if not len(entry.limits) == len(entry.peaks) == placement.num_ranks:
        raise ValueError("limits or peaks are for another number of ranks")
    return entry


def _value(key: str, line: str) -> str:
    start = f'"{key}": '
    if not line.startswith(start):
        raise ValueError(f"no key {key!r} where it should be")
    return line[len(start) :].removesuffix(",")


def _finite(data: Any) -> float:
    value = float(data)
    if not math.isfinite(value):
        raise ValueError(f"{data!r} is not a finite number")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _dumps(data: object) -> str:
    return json.dumps(data, allow_nan=False)
