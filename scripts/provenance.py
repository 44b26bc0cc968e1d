"""Record the commit and the machine of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def commit_id(folder: Path = Path(__file__).parent) -> str:
    """Return the short hash of the HEAD of the checkout that holds ``folder``, or ``unknown`` without git."""
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


def describe_machine(cores: int | None = None) -> str:
    """Return the processor and its cores, such as ``AMD EPYC (family 25, model 17), x86_64, 2 cores``.

    ``cores``: how many of them were used, if not all. Virtual machines may hide the processor's name; family and model of
    Linux's ``/proc/cpuinfo`` tell processors apart all the same.
    """
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = fields.get("model name") or platform.processor()
    if name and "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    total = os.cpu_count()
    used = f"{total} cores" if cores is None else f"{cores} of {total} cores"
    return ", ".join(part for part in (name, platform.machine(), used) if part)
