"""The verb ``cache``: lists and clears the schedule cache."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpipe.cli.outputs import print_json
from jaxpipe.errors import ConfigError
from jaxpipe.plot.units import number
from jaxpipe.schedule.solve.cache import VARIABLE, CacheEntry, ScheduleCache, default_folder, entry_name
from jaxpipe.schedule.solve.task import gap_of
from jaxpipe.text import aligned, closest

ACTIONS = ("ls", "clear")
_TOLD = ("value", "lower_bound", "offloaded", "wall_s", "time_limit_s", "stored", "jaxpipe")


def run_cache(arguments: argparse.Namespace) -> int:
    """List or clear; 2 if an entry could not be removed.

    Raises:
        ConfigError: another action, or a folder that is not there or can't be read.
    """

    if arguments.action not in ACTIONS:
        raise ConfigError(
            f"cache {arguments.action!r}{closest(arguments.action, ACTIONS)}; want one of: {', '.join(ACTIONS)}"
        )
    notices: list[str] = []
    cache = ScheduleCache(_folder(arguments.dir), notices.append)
    if arguments.action == "ls":
        _list(cache, arguments.json)
    else:
        _clear(cache, arguments.json)
    for notice in notices:
        print(f"jaxpipe: {notice}", file=sys.stderr)
    return 2 if notices and arguments.action == "clear" else 0


def _folder(directory: str | None) -> Path | None:
    """Return the folder ``--dir``, which must exist, or the default, which need not exist."""

    folder = default_folder() if directory is None else Path(directory)
    if directory == "":
        raise ConfigError("--dir is empty; name the cache's folder")
    if directory is not None and not folder.exists():
        raise ConfigError(f"--dir {directory!r}: there is no such folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; name the cache's with --dir or {VARIABLE}")
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{str(folder)!r} can't be read: permission denied")
    return folder


def _list(cache: ScheduleCache, as_json: bool) -> None:
    entries = cache.entries()
    if as_json:
        print_json({"folder": str(cache.folder), "entries": [_record(e) for e in entries]})
    elif not entries:
        print(f"no schedules in {cache.folder}")
    else:
        _print_table(entries)
        print(f"{_counted(len(entries))} in {cache.folder}")


def _record(entry: CacheEntry) -> dict[str, Any]:
    task, limit = entry.task, min(entry.task.limits())
    return {
        "file": entry_name(task),
        "ranks": task.placement.num_ranks,
        "microbatches": task.num_microbatches,
        "chunks": task.placement.num_chunks,
        "placement": task.placement.kind,
        "memory_limit": None if limit == float("inf") else limit,
        "offload": task.offload,
        "objective": task.objective,
        **{name: getattr(entry, name) for name in _TOLD},
        "gap": gap_of(entry.value, entry.lower_bound) if entry.lower_bound > 0 else None,
    }


def _print_table(entries: Sequence[CacheEntry]) -> None:
    """Print one line an entry; ``value`` and ``bound`` in the unit of the costs, ``stored`` in UTC."""
    heads = ("ranks", "microbatches", "chunks", "placement", "limit", "offload", "objective", "value", "bound", "gap")
    rows = [(*heads, "stored (UTC)")]
    for record in map(_record, entries):
        limit, gap = record["memory_limit"], record["gap"]
        rows.append(
            (
                *(str(record[key]) for key in ("ranks", "microbatches", "chunks")),
                " ".join(record["placement"].split()),
                "none" if limit is None else number(limit),
                "yes" if record["offload"] else "no",
                record["objective"],
                number(record["value"]),
                number(record["lower_bound"]),
                "-" if gap is None else f"{gap:.1%}",
                record["stored"][:16].replace("T", " "),
            )
        )
    print("\n".join(aligned(rows)))


def _clear(cache: ScheduleCache, as_json: bool) -> None:
    removed = cache.clear()
    if as_json:
        print_json({"folder": str(cache.folder), "removed": removed})
    else:
        print(f"removed {_counted(removed)} from {cache.folder}")


def _counted(count: int) -> str:
    return f"{count} schedule{'s' * (count != 1)}"
