"""The schedule cache: solved problems in a folder, and the nearest of them re-timed for a new one.

Source: `optpipe.txt` section 4.2; :mod:`~jaxpipe.schedule.solve.cache_key` says which problems are alike. The paper starts the
solver from the most similar schedule; here the caller is told how similar it is, and what it is worth under the real costs, so
that it may also take it as the answer. Nothing read from the folder is believed: every schedule is checked and simulated. A
bound can't be checked so; it is given only from files that this user alone writes, and never above what a schedule takes.

One JSON file a problem (:mod:`~jaxpipe.schedule.solve.cache_entry`), moved into place whole: readers need no lock. Writers
take turns by locking the folder, where the file system can, so that the better of two answers stays. Trouble with the folder
or a file is a notice, never an exception: a cache may be lost at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.files import user_cache, write_atomically
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.cache_entry import CacheEntry, format_entry, merit, parse_entry
from jaxpipe.schedule.solve.cache_key import CrudeProblem, exact_digest, problem_stem
from jaxpipe.schedule.solve.task import Options, Solution, SolveTask, count_offloads
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import at_most

VARIABLE = "JAXPIPE_CACHE_DIR"
MAX_ENTRIES = 2_000
MAX_BYTES = 64 << 20
"""Of all entries together; also bounds what a lookup reads. 250 schedules of 32 ranks and 256 microbatches."""
MAX_ENTRY_BYTES = 16 << 20
_ENTRY = re.compile(r"schedule-p\d+-m\d+-[0-9a-f]{20}-[0-9a-f]{20}\.json")
_TEMPORARY = re.compile(rf"\.{_ENTRY.pattern}\.[A-Za-z0-9_]+\.tmp")
_STALE_S = 3600.0  # a temporary file this old has lost its writer
_TRIES = 5
_LOCK_WAIT_S = 5.0


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
        self._max_entries = max_entries
        self._max_bytes = max_bytes

    def store(self, solution: Solution, options: Options | None = None) -> Path | None:
        """Keep a solution; returns its file, or None (after a notice) if it can't be written.

        Of two answers to one problem the better stays. If the older was to slightly other costs, it is re-timed under the
        new ones first, and the entry is about those from then on; a bound stays only with the numbers it was proven for.
        """
        try:
            entry = CacheEntry.of(solution, options)
            path = self.folder / entry.name
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):
                text = format_entry(self._merged(path, entry, solution.task))
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
        for path, entry in islice(self._candidates(task, crude), _TRIES):
            hit = self._retimed(path, entry, task, crude)
            if hit is not None:
                return hit
        return None

    def entries(self) -> tuple[CacheEntry, ...]:
        """All entries that can be read, by size, placement and limit."""
        found = [entry for path in self._paths() if (entry := self._read(path)) is not None]
        found.sort(key=lambda e: (e.placement.num_ranks, e.num_microbatches, e.placement.kind, e.memory_limit, e.name))
        return tuple(found)

    def clear(self) -> int:
        """Remove all entries, readable or not, and nothing else in the folder; returns how many. What can't be removed is
        told in a notice."""
        removed = 0
        for path in self._paths():
            try:
                path.unlink()
                removed += 1
            except FileNotFoundError:
                pass
            except OSError as error:
                self.tell(f"can't remove {path}", error)
        self._drop_stale()
        return removed

    def _candidates(self, task: SolveTask, crude: CrudeProblem) -> Iterator[tuple[Path, CacheEntry]]:
        """The entry of the same problem, then the others whose schedules fit the placement, the most promising first."""
        stem = problem_stem(task.placement, task.num_microbatches)
        own = self.folder / f"{stem}{crude.digest()}.json"
        same = self._read(own)
        if same is not None:
            yield own, same
        limits = task.limits()
        ranked = []
        for path in self._paths(stem):
            entry = self._read(path) if path != own else None
            if entry is None or (entry.offloaded and not task.offload):
                continue
            try:
                distance = crude.distance(entry.crude)
                too_high = any(not at_most(a, x) for a, x in zip(entry.peaks, limits, strict=True))
            except ValueError:
                self.tell(f"ignored {path}", "it is for another placement than its name says")
                continue
            ranked.append(((too_high, distance, path.name), path, entry))
        yield from ((path, entry) for _, path, entry in sorted(ranked, key=lambda x: x[0]))

    def _retimed(self, path: Path, entry: CacheEntry, task: SolveTask, crude: CrudeProblem) -> CacheHit | None:
        """What an entry is worth for ``task``; None if it is not valid (with a notice) or does not keep the limits."""
        try:
            schedule = _placed(entry.schedule(), task)
            check_schedule(schedule)
            timeline = simulate(schedule, task.costs)
        except ScheduleError as error:
            self.tell(f"ignored {path}", error)
            return None
        if not task.fits(timeline) or (count_offloads(schedule) and not task.offload):
            return None
        value = task.seconds(timeline)
        bound = entry.lower_bound if entry.exact == exact_digest(task) else None
        if bound is not None and (doubt := _doubt(path, bound, value)):
            self.tell(f"ignored the bound in {path}", doubt)
            bound = None
        same = entry.crude == crude
        distance = 0.0 if same else crude.distance(entry.crude)
        return CacheHit(schedule, timeline, value, same, distance, bound, entry.wall_s, entry.time_limit_s)

    def _merged(self, path: Path, new: CacheEntry, task: SolveTask) -> CacheEntry:
        """What the file should hold: the better schedule and, of equal problems, the better bound and the longer effort."""
        old = self._read(path)
        hit = self._retimed(path, old, task, new.crude) if old is not None else None
        if old is None or hit is None:
            return new
        if merit(task, hit.schedule, hit.timeline) <= new.merit:
            new = replace(
                new,
                value=hit.value,
                peaks=hit.timeline.peak_activations,
                offloaded=count_offloads(hit.schedule),
                schedule_json=old.schedule_json,
            )
        if hit.lower_bound is None or not at_most(hit.lower_bound, new.value):
            return new
        limits_s = [x for x in (new.time_limit_s, old.time_limit_s) if x is not None]
        return replace(
            new,
            lower_bound=max(new.lower_bound, hit.lower_bound),
            wall_s=max(new.wall_s, old.wall_s),
            time_limit_s=max(limits_s, default=None),
        )

    def _read(self, path: Path) -> CacheEntry | None:
        """An entry, or None: silently if there is no such file, with a notice if it can't be used."""
        try:
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):
                raise ScheduleParseError("not a file")
            if about.st_size > MAX_ENTRY_BYTES:
                raise ScheduleParseError(f"{about.st_size} bytes are too many for a cached schedule")
            return parse_entry(path.read_bytes())
        except FileNotFoundError:  # never stored, or removed by another process meanwhile
            return None
        except (OSError, ScheduleParseError) as error:
            self.tell(f"ignored {path}", error)
            return None

    def _paths(self, stem: str = "") -> list[Path]:
        """Files whose names are those of entries and begin with ``stem``."""
        try:
            names = [x for x in os.listdir(self.folder) if x.startswith(stem) and _ENTRY.fullmatch(x)]  # noqa: PTH208
        except FileNotFoundError:
            return []
        except OSError as error:
            self.tell(f"can't read {self.folder}", error)
            return []
        return [self.folder / name for name in sorted(names)]

    def _drop_oldest(self, keep: Path) -> None:
        """Remove the oldest entries beyond the allowed number and size, but not ``keep``."""
        found = []
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                found.append((path != keep, -about.st_mtime_ns, path, about.st_size))
        total = 0
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


def _placed(schedule: Schedule, task: SolveTask) -> Schedule:
    """``schedule`` on the task's placement, which may go by another name.

    Raises:
        ScheduleError: it is for another placement or number of microbatches.
    """
    mine, theirs = schedule.placement, task.placement
    sizes = (schedule.num_microbatches, mine.num_ranks, mine.flows, mine.edges)
    if sizes != (task.num_microbatches, theirs.num_ranks, theirs.flows, theirs.edges):
        raise ScheduleError("it is for another placement than its name says")
    return replace(schedule, placement=theirs)


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
        with contextlib.suppress(OSError):
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.01)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
        os.close(handle)
