"""The schedule cache: solved problems in a folder, and the nearest of them re-timed for a new one.

Source: `optpipe.txt` section 4.2. The paper starts the solver from the most similar schedule; here a lookup also says what that
is worth under the real costs and what is proven, so that the caller may take it as the answer
(:func:`~jaxpipe.search.solve.solver.solve_cached`). Nothing read from the folder is believed: every schedule is checked and
simulated. A bound can't be checked so; it is given only from files that no other user can write, only for the very numbers it
was proven for, and never above what the schedule takes.

One file a problem: a line with the format and the checksum of the rest, then a :class:`CacheEntry` as JSON. Files are moved
into place whole, so readers need no lock and writers have none: of two answers stored at once the worse may stay. Trouble with
the folder or a file is a notice, never an exception: a cache may be lost at any time.

Alike are the *crude schedules* of the paper: "we discretize the estimated parameters for computation, communication, and memory
into proportional values". The paper gives no steps and no distance; :class:`CrudeProblem` has those chosen here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from jaxpipe import __version__
from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.files import no_constant, read_file, user_cache, write_atomically
from jaxpipe.schedule.files import from_json, to_json
from jaxpipe.schedule.text import parse_schedule
from jaxpipe.schedule.timeline import at_most, nine_digits
from jaxpipe.search.solve.task import Options, Progress, Solution, SolveTask

STEP = 0.01  # two values are a step apart when they differ by this fraction
_NEGLIGIBLE = 0.01  # of the mean: far below it all values are alike, far above it steps are proportional
_LARGEST = 1e12
_OTHERWISE = 100.0  # steps that another objective, host link or permission to offload counts: more than a factor 2

VARIABLE = "JAXPIPE_CACHE_DIR"
# Of all files together; also bounds what a lookup reads. 500 schedules of 32 ranks and 256 microbatches.
MAX_BYTES = 64 << 20
_FORMAT = "jaxpipe cached schedule 3"
# Of an entry, of one of an older format (``solved-…``, ``schedule-…``: never read), and of what killed writers have left.
_NAME = re.compile(r"\.?(timed|solved|schedule)-p\d+-m\d+(-[0-9a-f]{20}){2}\.json(\.\w+\.tmp)?")
_TRIES = 5
_PREFIX = "timed"
"""How names of entries begin. Another one whenever a schedule may come to be shorter than a bound that was proven before:
those named ``solved-…`` are from when latencies occupied links."""


@dataclass(frozen=True, slots=True)
class CrudeProblem:
    """A problem in proportional values. Two problems are the same to the cache when these are equal.

    ``how``: what either is equal or not: the objective, whether and how much may be offloaded, how host lanes are shared.
    ``levels``: for each kind of cost, one entry a stage, transfer or rank: the logarithm in whole steps. Times are relative to
    the mean F+B+W of a stage, bytes to its mean residual; memory limits are in microbatches, of which all is no limit.
    """

    how: str
    levels: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, task: SolveTask) -> CrudeProblem:
        """Return the crude form of ``task``. Raises ScheduleError if its costs are for another number of stages."""
        costs, placement, n = task.costs, task.placement, task.placement.num_stages
        costs.require_stages(n, "the placement")
        second = (sum(costs.f_s) + sum(costs.b_s) + sum(costs.w_s)) / n or sum(costs.bw_s) / n or 1.0
        byte = sum(costs.residual_bytes) / n or 1.0
        units = dict.fromkeys(("f_s", "b_s", "w_s", "bw_s"), second)
        units |= {"residual_bytes": byte, "w_residual_bytes": byte}
        how: str = task.objective
        if task.offload:
            units |= {"offload_s": second, "load_s": second, "offloadable_bytes": byte}
            how += f" offload {task.offloads_in_flight} host {costs.host.mode} {sorted(costs.host.groups)}"
        levels = {name: tuple(_level(x / unit) for x in costs.values(name)) for name, unit in units.items()}
        hops = [(x, y, a) for flow in placement.flows for a, b in placement.edges for x, y in product(flow[a], flow[b])]
        levels["down"] = tuple(_level(costs.transfer_s(x, y, a) / second) for x, y, a in hops)
        levels["up"] = tuple(_level(costs.transfer_s(y, x, a) / second) for x, y, a in hops)
        levels["occupied"] = tuple(
            _level(costs.occupied_s(*pair, a) / second) for x, y, a in hops for pair in ((x, y), (y, x))
        )
        levels["limit"] = tuple(_level(min(x, task.num_microbatches)) for x in task.limits())
        return cls(how, levels)

    def distance(self, other: CrudeProblem) -> float:
        """Return how many steps two problems are apart: the mean over stages, transfers or ranks of each kind, summed. 0
        exactly for equal problems.

        Raises:
            ValueError: the problems are for placements of different sizes.
        """
        steps = _OTHERWISE * (self.how != other.how)
        for name, mine in self.levels.items():
            pairs = zip(mine, other.levels.get(name, mine), strict=True)
            steps += sum(abs(a - b) for a, b in pairs) / max(1, len(mine))
        return steps


def _level(x: float) -> int:
    return round(math.log1p(min(max(0.0, x), _LARGEST) / _NEGLIGIBLE) / STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A solved problem.

    ``schedule``: in text form. ``value``, ``lower_bound``: seconds of the task's objective. ``peaks``: live activations per
    rank, in units of its share of one microbatch. ``offloaded``: number of offloads. ``wall_s``: seconds the last solve took;
    ``time_limit_s``: what it was given, if known. ``stored``: when, in UTC, to the second. ``jaxpipe``: the version that proved
    the bound.
    """

    task: SolveTask
    schedule: str
    value: float
    lower_bound: float
    peaks: tuple[float, ...]
    offloaded: int
    wall_s: float
    time_limit_s: float | None
    stored: str
    jaxpipe: str


class ScheduleCache:
    """Solved problems in ``folder`` (default: :func:`default_folder`). ``notice`` gets one line for whatever is ignored
    (default: a warning of the logger ``jaxpipe``). Beyond ``MAX_BYTES`` the oldest are dropped."""

    def __init__(self, folder: Path | None = None, notice: Callable[[str], None] | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self._notice = notice or logging.getLogger("jaxpipe").warning

    def store(self, solution: Solution, options: Options | None = None) -> Path | None:
        """Keep a solution; returns its file, or None (after a notice) if it can't be written.

        Of two answers to one problem the better stays. If the older was to slightly other costs, it is re-timed under the
        new ones first, and the entry is about those from then on; a bound stays only with the numbers it was proven for.
        """
        with self._noticing(f"can't keep a schedule in {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            path, best = self.folder / entry_name(solution.task), solution
            for old in self._hits([path], solution.task):
                best = _merge(old, solution)
            entry = CacheEntry(
                task=best.task,
                schedule=str(best.schedule),
                value=best.value,
                lower_bound=best.lower_bound,
                peaks=tuple(best.timeline.peak_activations),
                offloaded=best.offloaded,
                wall_s=solution.wall_s,
                time_limit_s=None if options is None else options.time_limit_s,
                stored=datetime.now(UTC).isoformat(timespec="seconds"),
                jaxpipe=__version__,
            )
            body = json.dumps(to_json(entry), allow_nan=False)
            if len(body) > MAX_BYTES:
                raise ScheduleError(f"it takes {len(body)} bytes, the cache may take {MAX_BYTES}")
            write_atomically(path, f"{_head(body)}\n{body}")
            self._drop_oldest()
            return path
        return None

    def lookup(self, task: SolveTask) -> Solution | None:
        """Return the schedule of the same problem or else of the nearest that is valid and within the limits of ``task``,
        simulated under its costs. ``lower_bound``: proven for ``task``; 0 unless every number of the two problems is equal.

        Those that seem to keep the limits come first; a handful are tried.

        Raises:
            ScheduleError: the task's costs are for another number of stages than its placement has.
        """
        return next(self._hits(self._paths(_stem(task)), task), None)

    def entries(self) -> tuple[CacheEntry, ...]:
        """Return all entries that can be read, by size and limit."""
        entries = [entry for path in self._paths(f"{_PREFIX}-") if (entry := self._read(path)) is not None]
        entries.sort(key=lambda e: (e.task.placement.num_ranks, e.task.num_microbatches, min(e.task.limits())))
        return tuple(entries)

    def clear(self) -> int:
        """Remove all entries, readable or not, also of older formats, and what killed writers have left, and nothing else in
        the folder; returns how many files. What can't be removed is told in a notice."""
        return sum(map(self._remove, self._paths()))

    def _hits(self, paths: Iterable[Path], task: SolveTask) -> Iterator[Solution]:
        """Return the hits of all entries for ``task``, the most promising first."""
        crude, limits, ranked = CrudeProblem.of(task), task.limits(), []
        for path in paths:
            if (entry := self._read(path)) is not None:
                too_high = not all(map(at_most, entry.peaks, limits))
                ranked.append((too_high, crude.distance(CrudeProblem.of(entry.task)), path, entry))
        for *_, path, entry in sorted(ranked, key=lambda x: x[:3])[:_TRIES]:
            if (hit := self._retimed(path, entry, task)) is not None:
                yield hit

    def _retimed(self, path: Path, entry: CacheEntry, task: SolveTask) -> Solution | None:
        """Retime an entry for ``task``; None if it is not valid (with a notice) or does not keep the limits."""
        with self._noticing(f"ignored {path}"):
            schedule = parse_schedule(entry.schedule)
            # the placement may go by another name
            schedule = replace(schedule, placement=task.placement, num_microbatches=task.num_microbatches)
            timeline = task.timeline_of(schedule)
            if timeline is None:
                return None
            # another version may have proved by rules that were wrong, and a bound can't be checked
            proves = entry.jaxpipe == __version__ and _without_names(entry.task) == _without_names(task)
            value, bound = task.seconds(timeline), entry.lower_bound if proves else 0.0
            if not at_most(bound, value):
                self.tell(f"ignored the bound in {path}", f"it is {bound:g}, and the schedule takes {value:g}")
                bound = 0.0
            return Solution(task, schedule, timeline, bound, 0.0, (Progress(0.0, value, bound, "cache"),))
        return None

    def _read(self, path: Path) -> CacheEntry | None:
        """Return an entry, or None: silently if there is no such file, with a notice if it can't be used."""
        with self._noticing(f"ignored {path}"):
            about = path.stat()
            if about.st_size > MAX_BYTES:
                raise ScheduleParseError(f"{about.st_size} bytes are too many for a cached schedule")
            head, _, body = read_file(path).decode(errors="replace").partition("\n")
            # before any JSON is read: a file that was cut short may still parse
            if head != _head(body):
                raise ScheduleParseError("damaged, or not a cached schedule")
            entry = from_json(CacheEntry, json.loads(body, parse_constant=no_constant), "entry")
            if not math.isfinite(entry.value + entry.lower_bound + entry.wall_s) or path.name != entry_name(entry.task):
                raise ScheduleParseError("not finite, or for another problem than its name says")
            if about.st_uid not in (os.geteuid(), 0) or about.st_mode & stat.S_IWOTH:
                self.tell(f"ignored the bound in {path}", "other users can write it")
                entry = replace(entry, lower_bound=0.0)
            return entry
        return None

    def _paths(self, stem: str = "") -> list[Path]:
        """List this cache's files whose names begin with ``stem``."""
        with self._noticing(f"can't read {self.folder}"):
            return sorted(x for x in self.folder.iterdir() if x.name.startswith(stem) and _NAME.fullmatch(x.name))
        return []

    def _drop_oldest(self) -> None:
        """Remove the oldest files beyond the allowed size."""
        with self._noticing(f"can't look through {self.folder}"):  # ends where another process removes a file meanwhile
            total = 0
            for path in sorted(self._paths(), key=lambda x: x.lstat().st_mtime_ns, reverse=True):
                total += path.lstat().st_size
                if total > MAX_BYTES:
                    self._remove(path)

    def _remove(self, path: Path) -> bool:
        with self._noticing(f"can't remove {path}"):
            path.unlink()
            return True
        return False

    @contextmanager
    def _noticing(self, what: str) -> Iterator[None]:
        """Turn trouble in the block into a notice; none if a file is not there: never stored, or removed by another process."""
        try:
            yield
        except FileNotFoundError:
            pass
        except (OSError, ValueError, ArithmeticError, RecursionError, ScheduleError) as error:
            self.tell(what, error)

    def tell(self, what: str, why: object) -> None:
        """Give a notice."""
        reason = why.strerror if isinstance(why, OSError) and why.strerror else str(why)
        self._notice(f"schedule cache: {what}: {' '.join(reason.split())[:300]}")


def default_folder() -> Path:
    """Return ``$JAXPIPE_CACHE_DIR``, else ``schedules`` in the folder of :func:`~jaxpipe.files.user_cache`."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else user_cache() / "schedules"


def _without_names(task: SolveTask) -> SolveTask:
    """Return the task without the names that its placement and costs go by."""
    return replace(task, placement=replace(task.placement, kind=""), costs=replace(task.costs, source=""))


def _merge(old: Solution, new: Solution) -> Solution:
    """Return the better schedule of two answers to one problem, the newer of equals, with the better bound."""
    better = min(new, old, key=lambda x: nine_digits(x.value))
    bounds = (x.lower_bound for x in (old, new) if at_most(x.lower_bound, better.value))
    return replace(better, lower_bound=max(bounds, default=0.0))


def _stem(task: SolveTask) -> str:
    """Return how the names of all files begin whose schedules fit this problem: same placement and microbatches."""
    shape = _digest(to_json(replace(task.placement, kind="")))
    return f"{_PREFIX}-p{task.placement.num_ranks}-m{task.num_microbatches}-{shape}-"


def entry_name(task: SolveTask) -> str:
    """Return the file's name: the problem in proportional values, so that one file holds one of them."""
    return f"{_stem(task)}{_digest(to_json(CrudeProblem.of(task)))}.json"


def _digest(data: object) -> str:
    """Hash the canonical JSON of ``data``; 20 hexadecimal digits."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:20]


def _head(body: str) -> str:
    """Return the first line of a file."""
    return f"{_FORMAT}, sha256 {hashlib.sha256(body.encode()).hexdigest()}"
