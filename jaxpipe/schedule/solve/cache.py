"""The schedule cache: solved problems in a folder, and the nearest of them re-timed for a new one.

Source: `optpipe.txt` section 4.2; :class:`CrudeProblem` says which problems are alike. The paper starts the
solver from the most similar schedule; here the caller is told how similar it is, and what it is worth under the real costs, so
that it may also take it as the answer (:func:`~jaxpipe.schedule.solve.solver.solve_cached`). Nothing read from the folder is
believed: every schedule is checked and simulated. A bound can't be checked so; it is given only from files that this user alone
writes, and never above what a schedule takes.

One JSON file a problem, moved into place whole: readers need no lock. Writers take turns by locking the folder, where the file
system can, so that the better of two answers stays. Trouble with the folder or a file is a notice, never an exception: a cache
may be lost at any time. A file::

    {
    "format": "jaxpipe cached schedule 2",
    "sha256": "…",       of every byte after this line
    "entry": {…},        the task, and what its solve found and spent
    "schedule": {…}      read only when needed: a lookup reads many entries and uses one
    }

Alike are the *crude schedules* of the paper: "we discretize the estimated parameters for computation,
communication, and memory into proportional values". The paper gives no steps and no distance; chosen here: times are divided
by the mean F+B+W of a stage and rounded to steps of 5% (finer than 0.1% of a stage's time counts as nothing); memory limits
are rounded to a quarter of a chunk; the distance is the mean number of steps, summed over what is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from jaxpipe import __version__
from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.files import no_constant, user_cache, write_atomically
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.json_form import from_json, from_schedule, to_json, to_schedule
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.task import Options, Solution, SolveTask, count_offloads, gap_of
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import at_most, nine_digits

STEP = 0.05
"""Two times are a step apart when they differ by this fraction; two ratios when they differ by this much."""
_NEGLIGIBLE = 1e-3  # of the mean F+B+W: far below it all times are alike, far above it steps are proportional
_LARGEST = 1e12
_LIMITS_A_CHUNK = 4  # steps of the memory limit in a chunk; not tuned
_OTHERWISE = 20.0  # steps that another objective, host link or permission to offload counts: more than a factor 2


@dataclass(frozen=True, slots=True)
class CrudeProblem:
    """A problem in proportional values. Two problems are the same to the cache when these are equal.

    ``variant``: what either is equal or not: the objective, whether and how much may be offloaded, how host lanes are shared.
    ``levels``: for each kind of cost, whole steps, one entry a stage, transfer or rank.
    """

    variant: tuple[str, ...]
    levels: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, task: SolveTask) -> CrudeProblem:
        """The crude form of ``task``. Raises ScheduleError if its costs are for another number of stages."""
        costs, placement = task.costs, task.placement
        if costs.num_stages != placement.num_stages:
            raise ScheduleError(
                f"the costs are for {costs.num_stages} stages and the placement has {placement.num_stages}; "
                "give one entry per stage"
            )
        scale_s = _scale_s(costs)
        times = {"f": costs.f_s, "b": costs.b_s, "w": costs.w_s, "bw": costs.bw_s, "comm": _transfers_s(task)}
        if task.offload:
            times |= {"offload": costs.offload_s, "load": costs.load_s}
        levels = {name: tuple(_level(x / scale_s) for x in seconds) for name, seconds in times.items()}
        mean_bytes = sum(costs.residual_bytes) / costs.num_stages or 1.0
        levels["residual"] = tuple(_level(x / mean_bytes) for x in costs.residual_bytes)
        levels["w_residual"] = _ratios(costs.w_residual_bytes, costs.residual_bytes)
        if task.offload:
            levels["offloadable"] = _ratios(costs.offloadable_bytes, costs.residual_bytes)
        levels["limit"] = _limits(task)
        host = f"{costs.host.mode} {sorted(costs.host.groups)}" if task.offload else "none"
        offload = f"offload {task.offload} {task.offloads_in_flight}"
        return cls((task.objective, offload, f"host {host}"), levels)

    def distance(self, other: CrudeProblem) -> float:
        """Steps apart: the mean over stages, transfers or ranks of each kind, summed. 0 exactly for equal problems.

        Raises:
            ValueError: the problems are for placements of different sizes.
        """
        steps = _OTHERWISE * sum(a != b for a, b in zip(self.variant, other.variant, strict=True))
        for name, mine in self.levels.items():
            theirs = other.levels.get(name)
            if theirs is None or not mine:
                continue
            apart = _limit_steps if name == "limit" else _steps
            steps += sum(apart(a, b) for a, b in zip(mine, theirs, strict=True)) / len(mine)
        return steps

    def digest(self) -> str:
        """Equal for equal crude problems."""
        return _digest([self.variant, self.levels])


def problem_stem(task: SolveTask) -> str:
    """How the names of all files begin whose schedules fit this problem: same ranks, flows, edges and microbatches."""
    form = to_json(task.placement)
    shape = _digest([form["ranks"], form["flows"], form["edges"]])
    return f"schedule-p{task.placement.num_ranks}-m{task.num_microbatches}-{shape}-"


def _digest(data: object) -> str:
    """Of the canonical JSON of ``data``; 20 hexadecimal digits."""
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _scale_s(costs: CostProfile) -> float:
    """The mean F+B+W of a stage; of BW where those take no time; 1 where nothing does."""
    n = costs.num_stages
    return (sum(costs.f_s) + sum(costs.b_s) + sum(costs.w_s)) / n or sum(costs.bw_s) / n or 1.0


def _level(x: float) -> int:
    return round(math.log1p(min(x, _LARGEST) / _NEGLIGIBLE) / STEP)


def _ratios(part: Sequence[float], whole: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(min(a / b, _LARGEST) / STEP) if b > 0 else 0 for a, b in zip(part, whole, strict=True))


def _transfers_s(task: SolveTask) -> tuple[float, ...]:
    """Seconds of the slowest transfer along each edge of each flow, downwards (activation) and upwards (cotangent)."""
    costs, found = task.costs, []
    for flow in task.placement.flows:
        for a, b in task.placement.edges:
            pairs = [(x, y) for x in flow[a] for y in flow[b]]
            found.append(max(costs.transfer_s(x, y, a) for x, y in pairs))
            found.append(max(costs.transfer_s(y, x, a) for x, y in pairs))
    return tuple(found)


def _limits(task: SolveTask) -> tuple[int, ...]:
    """Per rank, in quarters of a chunk. A limit above all microbatches is none."""
    a_share = _LIMITS_A_CHUNK * task.placement.num_chunks
    return tuple(round(min(max(0.0, x), task.num_microbatches) * a_share) for x in task.limits())


def _steps(a: int, b: int) -> float:
    return abs(a - b)


def _limit_steps(a: int, b: int) -> float:
    return abs(math.log((1 + a) / (1 + b))) / STEP


VARIABLE = "JAXPIPE_CACHE_DIR"
VERSION = 2
MAX_ENTRIES = 2_000
MAX_BYTES = 64 << 20
"""Of all entries together; also bounds what a lookup reads. 250 schedules of 32 ranks and 256 microbatches."""
MAX_ENTRY_BYTES = 16 << 20
_NAME = re.compile(r"schedule-p\d+-m\d+-[0-9a-f]{20}-[0-9a-f]{20}\.json")
_TEMPORARY = re.compile(rf"\.{_NAME.pattern}\.[A-Za-z0-9_]+\.tmp")
_FILE = re.compile(rb'\{\n"format": "jaxpipe cached schedule (\d{1,9})",\n(?:"sha256": "([0-9a-f]{64})",\n)?(.*)', re.S)
_BODY = re.compile(r'"entry": (.*),\n"schedule": (.*)\n\}\n')
_STALE_S = 3600.0  # a temporary file this old has lost its writer
_TRIES = 5
_LOCK_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A solved problem.

    ``value``, ``lower_bound``: seconds of the task's objective. ``peaks``: live activations per rank, in units of its share of
    one microbatch. ``offloaded``: number of offloads. ``wall_s``: seconds the solve took; ``time_limit_s``: what it was given,
    if known. ``stored``: when, in UTC, to the second. ``jaxpipe``: the version that proved the bound.
    """

    task: SolveTask
    value: float
    lower_bound: float
    peaks: tuple[float, ...]
    offloaded: int
    wall_s: float
    time_limit_s: float | None
    stored: str
    jaxpipe: str

    @property
    def name(self) -> str:
        """The file's name: the problem in proportional values, so that one file holds one of them."""
        return f"{problem_stem(self.task)}{CrudeProblem.of(self.task).digest()}.json"

    @property
    def gap(self) -> float | None:
        """How far ``value`` may be from the optimum, as a fraction of the bound; None without a bound."""
        return gap_of(self.value, self.lower_bound) if self.lower_bound > 0 else None

    def proves(self, task: SolveTask) -> bool:
        """Whether the bound is for ``task``: every number is equal, under this version of jaxpipe."""
        return self.jaxpipe == __version__ and _unnamed(self.task) == _unnamed(task)


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A schedule that is valid and keeps the limits for the task that was looked up.

    ``timeline``, ``value``: simulated under the task's costs; seconds of the task's objective. ``exact``: it was stored for
    the same problem in proportional values, with the same limits, objective and permission to offload; else it is the nearest,
    ``distance`` steps away. ``lower_bound``: proven for the task, known only if every number of the two problems is equal.
    ``wall_s``: seconds that the solve took; ``time_limit_s``: what it was allowed, if known.
    """

    schedule: Schedule
    timeline: Timeline
    value: float
    exact: bool
    distance: float
    lower_bound: float | None
    wall_s: float
    time_limit_s: float | None


class ScheduleCache:
    """Solved problems in ``folder`` (default: :func:`default_folder`). ``notice`` gets one line for whatever is ignored
    (default: a warning of the logger ``jaxpipe``). Beyond ``max_entries`` or ``max_bytes`` the oldest are dropped."""

    def __init__(
        self,
        folder: Path | None = None,
        notice: Callable[[str], None] | None = None,
        *,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self._notice = notice or logging.getLogger("jaxpipe").warning
        self._max_entries, self._max_bytes = max_entries, max_bytes

    def store(self, solution: Solution, options: Options | None = None) -> Path | None:
        """Keep a solution; returns its file, or None (after a notice) if it can't be written.

        Of two answers to one problem the better stays. If the older was to slightly other costs, it is re-timed under the
        new ones first, and the entry is about those from then on; a bound stays only with the numbers it was proven for.
        """
        try:
            new = CacheEntry(
                task=solution.task,
                value=solution.value,
                lower_bound=solution.lower_bound,
                peaks=tuple(solution.timeline.peak_activations),
                offloaded=count_offloads(solution.schedule),
                wall_s=solution.wall_s,
                time_limit_s=None if options is None else options.time_limit_s,
                stored=datetime.now(UTC).isoformat(timespec="seconds"),
                jaxpipe=__version__,
            )
            path = self.folder / new.name
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):
                text = _format(*self._merged(path, new, solution.schedule))
                if len(text) > MAX_ENTRY_BYTES:
                    raise ScheduleError(f"it takes {len(text)} bytes, an entry may take {MAX_ENTRY_BYTES}")
                write_atomically(path, text)
                self._drop_oldest(path)
        except (OSError, ValueError, ScheduleError) as error:
            self.tell(f"can't keep a schedule in {self.folder}", error)
            return None
        return path

    def lookup(self, task: SolveTask) -> CacheHit | None:
        """The schedule of the same problem or else the nearest one that is valid and within the limits of ``task``.

        Of others than the same problem, those that seem to keep the limits come first; a handful are tried.

        Raises:
            ScheduleError: the task's costs are for another number of stages than its placement has.
        """
        crude = CrudeProblem.of(task)
        hits = (self._retimed(*found, task, crude) for found in islice(self._candidates(task, crude), _TRIES))
        return next((hit for hit in hits if hit is not None), None)

    def entries(self) -> tuple[CacheEntry, ...]:
        """All entries that can be read, by size, placement and limit."""
        found = [read[0] for path in self._paths() if (read := self._read(path)) is not None]
        sizes = ((e.task.placement.num_ranks, e.task.num_microbatches, e.task.placement.kind) for e in found)
        limits = (min(e.task.limits()) for e in found)
        return tuple(e for *_, e in sorted(zip(sizes, limits, (e.name for e in found), found, strict=True)))

    def clear(self) -> int:
        """Remove all entries, readable or not, and nothing else in the folder; returns how many. What can't be removed is
        told in a notice."""
        removed = 0
        for path in self._paths():
            try:
                path.unlink()
                removed += 1
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    self.tell(f"can't remove {path}", error)
        self._drop_stale()
        return removed

    def _candidates(self, task: SolveTask, crude: CrudeProblem) -> Iterator[tuple[Path, CacheEntry, str]]:
        """The entry of the same problem, then the others whose schedules fit the placement, the most promising first."""
        stem, limits, ranked = problem_stem(task), task.limits(), []
        own = self.folder / f"{stem}{crude.digest()}.json"
        if (same := self._read(own)) is not None:
            yield own, *same
        for path in self._paths(stem):
            read = self._read(path) if path != own else None
            if read is None or (read[0].offloaded and not task.offload):
                continue
            too_high = any(not at_most(a, x) for a, x in zip(read[0].peaks, limits, strict=True))
            ranked.append((too_high, crude.distance(CrudeProblem.of(read[0].task)), path.name, (path, *read)))
        yield from (found for *_, found in sorted(ranked, key=lambda x: x[:3]))

    def _retimed(
        self, path: Path, entry: CacheEntry, text: str, task: SolveTask, crude: CrudeProblem
    ) -> CacheHit | None:
        """What an entry is worth for ``task``; None if it is not valid (with a notice) or does not keep the limits."""
        try:
            schedule = replace(_schedule(text), placement=task.placement)  # which may go by another name
            check_schedule(schedule)
            timeline = simulate(schedule, task.costs)
        except ScheduleError as error:
            self.tell(f"ignored {path}", error)
            return None
        if not task.fits(timeline) or (count_offloads(schedule) and not task.offload):
            return None
        value, bound = task.seconds(timeline), entry.lower_bound if entry.proves(task) else None
        if bound is not None and (doubt := _doubt(path, bound, value)):
            self.tell(f"ignored the bound in {path}", doubt)
            bound = None
        distance = crude.distance(theirs := CrudeProblem.of(entry.task))
        return CacheHit(schedule, timeline, value, theirs == crude, distance, bound, entry.wall_s, entry.time_limit_s)

    def _merged(self, path: Path, new: CacheEntry, schedule: Schedule) -> tuple[CacheEntry, Schedule]:
        """What the file should hold: the better schedule and, of equal problems, the better bound and the longer effort."""
        read, task = self._read(path), new.task
        hit = self._retimed(path, *read, task, CrudeProblem.of(task)) if read is not None else None
        if hit is None:
            return new, schedule
        peaks, offloaded = tuple(hit.timeline.peak_activations), count_offloads(hit.schedule)
        if _merit(hit.value, peaks, offloaded) <= _merit(new.value, new.peaks, new.offloaded):
            new, schedule = replace(new, value=hit.value, peaks=peaks, offloaded=offloaded), hit.schedule
        if hit.lower_bound is None or not at_most(hit.lower_bound, new.value):
            return new, schedule
        limits_s = [x for x in (new.time_limit_s, hit.time_limit_s) if x is not None]
        return replace(
            new,
            lower_bound=max(new.lower_bound, hit.lower_bound),
            wall_s=max(new.wall_s, hit.wall_s),
            time_limit_s=max(limits_s, default=None),
        ), schedule

    def _read(self, path: Path) -> tuple[CacheEntry, str] | None:
        """An entry and its schedule's JSON, or None: silently if there is no such file, with a notice if it can't be used."""
        try:
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):
                raise ScheduleParseError("not a file")
            if about.st_size > MAX_ENTRY_BYTES:
                raise ScheduleParseError(f"{about.st_size} bytes are too many for a cached schedule")
            read = _parse(path.read_bytes())
            if not path.name.startswith(problem_stem(read[0].task)):
                raise ScheduleParseError("it is for another placement than its name says")
            return read
        except FileNotFoundError:  # never stored, or removed by another process meanwhile
            return None
        except (OSError, ScheduleError) as error:
            self.tell(f"ignored {path}", error)
            return None

    def _paths(self, stem: str = "") -> list[Path]:
        """Files whose names are those of entries and begin with ``stem``."""
        try:
            names = [x for x in os.listdir(self.folder) if x.startswith(stem) and _NAME.fullmatch(x)]  # noqa: PTH208
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self.tell(f"can't read {self.folder}", error)
            return []
        return [self.folder / name for name in sorted(names)]

    def _drop_oldest(self, keep: Path) -> None:
        """Remove the oldest entries beyond the allowed number and size, but not ``keep``."""
        found, total = [], 0
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                found.append((path != keep, -about.st_mtime_ns, path, about.st_size))
        for count, (other, _, path, size) in enumerate(sorted(found), start=1):
            total += size
            if other and (count > self._max_entries or total > self._max_bytes):
                with contextlib.suppress(OSError):
                    path.unlink()
        self._drop_stale()

    def _drop_stale(self) -> None:
        """Remove what writers that were killed have left."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if _TEMPORARY.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _STALE_S:
                    path.unlink()

    def tell(self, what: str, why: object) -> None:
        """Give a notice."""
        reason = why.strerror if isinstance(why, OSError) and why.strerror else str(why)
        self._notice(f"schedule cache: {what}: {' '.join(reason.split())[:300]}")


def default_folder() -> Path:
    """``$JAXPIPE_CACHE_DIR``, else ``schedules`` in the folder of :func:`~jaxpipe.files.user_cache`."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else user_cache() / "schedules"


def _unnamed(task: SolveTask) -> SolveTask:
    """The task without the names that its placement and costs go by."""
    return replace(task, placement=replace(task.placement, kind=""), costs=replace(task.costs, source=""))


def _merit(value: float, peaks: Sequence[float], offloaded: int) -> tuple[float, float, int]:
    """The smaller, the better."""
    return nine_digits(value), nine_digits(max(peaks, default=0.0)), offloaded


def _format(entry: CacheEntry, schedule: Schedule) -> str:
    """The text of a file. Raises ValueError if a number is not finite."""
    parts = [json.dumps(x, allow_nan=False) for x in (to_json(entry), to_schedule(schedule))]
    body = f'"entry": {parts[0]},\n"schedule": {parts[1]}\n}}\n'
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return f'{{\n"format": "jaxpipe cached schedule {VERSION}",\n"sha256": "{checksum}",\n{body}'


def _parse(data: bytes) -> tuple[CacheEntry, str]:
    """The entry in a file's bytes, and its schedule's JSON.

    Raises:
        ScheduleParseError: another format or version, a checksum that does not match, or contents that make no sense.
    """
    file = _FILE.fullmatch(data)
    if file is None:
        raise ScheduleParseError("not a cached schedule")
    if int(file[1]) != VERSION:
        raise ScheduleParseError(f"version {int(file[1])} of the format; this jaxpipe reads {VERSION}")
    if file[2] is None or hashlib.sha256(file[3]).hexdigest().encode() != file[2]:
        raise ScheduleParseError("damaged: the checksum does not match")
    try:
        body = _BODY.fullmatch(file[3].decode())
        if body is None:
            raise ValueError("want an entry and a schedule, a line each")
        entry = from_json(CacheEntry, json.loads(body[1], parse_constant=no_constant), "entry")
        figures = (entry.value, entry.lower_bound, *entry.peaks, entry.wall_s, entry.time_limit_s or 0.0)
        if not all(map(math.isfinite, figures)) or len(entry.peaks) != entry.task.placement.num_ranks:
            raise ValueError("value, bound, peaks or times are not finite, or for another number of ranks")
        datetime.fromisoformat(entry.stored)
        CrudeProblem.of(entry.task)
    except (ScheduleError, ValueError, ArithmeticError, RecursionError) as error:
        raise ScheduleParseError(f"not what jaxpipe writes: {' '.join(str(error).split())[:200]}") from None
    return entry, body[2]


def _schedule(text: str) -> Schedule:
    """The schedule, not checked. Raises ScheduleParseError if it can't be read."""
    try:
        return from_schedule(json.loads(text, parse_constant=no_constant))
    except (ValueError, RecursionError) as error:
        raise ScheduleParseError(f"the schedule is not JSON: {error}") from None


def _doubt(path: Path, bound: float, value: float) -> str:
    """Why a bound read from a file is not believed; empty if it is. ``value``: what the file's schedule takes."""
    if not at_most(bound, value):
        return f"it is {bound:g}, and the schedule takes {value:g}"
    try:
        about = path.stat()
    except OSError as error:
        return str(error.strerror)
    ours = not hasattr(os, "geteuid") or about.st_uid in (os.geteuid(), 0)
    return "" if ours and not about.st_mode & stat.S_IWOTH else "other users can write it"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Without one where the system has none, or when its holder keeps it too long (stopped, say):
    files stay whole then, but the worse of two answers stored at once may stay."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
        os.close(handle)
