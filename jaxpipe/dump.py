"""Numbered artefact dumps: every step of the compilation as a text file.

``JAXPIPE_DUMP=dir`` makes each call of :func:`dump` write ``dir/NNNN-kind-name.txt``: traces, F/B/W jaxprs, schedules before
and after each pass, programs, timelines. Numbers follow the order of the calls; a folder with files from an earlier run goes on
after the highest number there. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

VARIABLE = "JAXPIPE_DUMP"


def enabled() -> bool:
    """Return whether dumps are written (callers may skip building an expensive text)."""
    return bool(os.environ.get(VARIABLE))


def own_folder(process: int) -> None:
    """Write dumps of process ``process`` into a folder of its own from now on."""
    if enabled():
        os.environ[VARIABLE] = str(Path(os.environ[VARIABLE]) / f"process-{process}")


def dump(kind: str, name: str, text: str | Callable[[], str]) -> Path | None:
    """Write ``text`` (or what it returns) as the next numbered file; returns its path, or None when dumps are off.

    Raises:
        OSError: the folder named by ``JAXPIPE_DUMP`` can't be written.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    body = text if isinstance(text, str) else text()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{kind}-{name}")
    # Other processes may write to the folder at the same time; "x" fails where one has taken the number.
    while True:
        path = root / f"{_next_number(root):04d}-{stem}.txt"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(body if body.endswith("\n") else body + "\n")
        except FileExistsError:
            continue
        return path


def _next_number(root: Path) -> int:
    numbers = [int(m[1]) for p in root.iterdir() if (m := re.match(r"(\d{4,})-", p.name))]
    return max(numbers, default=-1) + 1
