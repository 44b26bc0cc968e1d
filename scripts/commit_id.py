"""The commit that a result was measured at."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit_id(folder: Path = Path(__file__).parent) -> str:
    """The short hash of the HEAD of the checkout that holds ``folder``, or ``unknown`` without git."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
