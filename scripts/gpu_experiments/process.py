"""Calls a function in a process of its own: allocator peaks never fall, flags differ, a crash or a hang costs one call.

    python -m scripts.gpu_experiments.process MODULE:FUNCTION REQUEST.json ANSWER.json

The function takes :class:`~scripts.gpu_experiments.registry.Settings` and the request's arguments, and returns plain values.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpipe.train.devices import request_devices
from scripts.gpu_experiments.registry import Settings

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_ORTOOLS = ROOT / "scripts" / "gpu_experiments" / "without_ortools"
"""A folder with the part of OR-Tools that splitting a stage needs, for machines that have none."""
_SAID = 2000
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to: its ``answer``, or why there is none (``failure``) and the end of what the process said."""

    answer: Any
    failure: str
    said: str


def call_in_process(
    function: Callable[..., Any],
    settings: Settings,
    *arguments: Any,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Outcome:
    """Call ``function(settings, *arguments)`` in a new process, which is killed, with all that it started, after ``limit_s``
    seconds. ``log``: keeps what it says, also where this process is killed too."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        request.write_text(json.dumps([settings.as_json(), arguments]), encoding="utf-8")
        log = log or Path(folder, "log")
        name = f"{function.__module__}:{function.__qualname__}"
        folders = [str(ROOT), *([] if importlib.util.find_spec("ortools") else [str(WITHOUT_ORTOOLS)])]
        path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, name, str(request), str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said = log.read_text(encoding="utf-8", errors="replace")[-_SAID:]
        if code == 0 and answer.exists():
            return Outcome(json.loads(answer.read_text(encoding="utf-8")), "", said)
        failure = f"took more than {limit_s:.0f} s" if code is None else f"ended with exit code {code}"
        return Outcome(None, failure, said)


def main() -> None:
    # An orphan would hold the card's memory while the next call wants it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    request_devices(1)
    name, request, answer = sys.argv[1:]
    module, _, function = name.partition(":")
    settings, arguments = json.loads(Path(request).read_text(encoding="utf-8"))
    called = getattr(importlib.import_module(module), function)
    returned = called(Settings.from_json(settings), *arguments)
    # NaN and infinities are no JSON; as words they stay readable.
    plain = json.loads(json.dumps(returned), parse_constant=str)
    Path(answer).write_text(json.dumps(plain), encoding="utf-8")


if __name__ == "__main__":
    main()
