"""The commit that a result was measured at."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit_id() -> str:
    """The short hash of this checkout's HEAD, or ``unknown`` without git."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
