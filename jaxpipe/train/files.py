"""Reading files that users name."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


def read_file(path: Path) -> bytes:
    """The content of ``path``.

    Raises:
        OSError: as ``Path.read_bytes``; also for pipes, sockets and devices, which may never end.
    """
    if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "a pipe, socket or device; copy it to a file first", str(path))
    return path.read_bytes()
