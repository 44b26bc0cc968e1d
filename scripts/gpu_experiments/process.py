"""Calls a function in a process of its own: allocator peaks never fall, flags differ, a crash or a hang costs one call.

    python -m scripts.gpu_experiments.process MODULE:FUNCTION REQUEST.json ANSWER.json
    python -m scripts.gpu_experiments.process --serve    # fork a process for each line of standard input

The function takes :class:`~scripts.gpu_experiments.registry.Settings` and the request's arguments, and returns plain values.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jaxpipe.files import write_atomically
from jaxpipe.train.devices import request_devices
from scripts.gpu_experiments.registry import ROOT, Settings

WITHOUT_ORTOOLS = ROOT / "scripts" / "gpu_experiments" / "without_ortools"
"""A folder with the part of OR-Tools that splitting a stage needs, for machines that have none."""
_IMPORTED_ONCE = (
    "jaxpipe.rehearsal.rank", "jaxpipe.stage.compiled.compile", "jaxpipe.train.loop", "models.gpt", "models.llama",
    "matplotlib.backends.backend_agg", "orbax.checkpoint",
)  # fmt: skip
_MOST_OUTPUT = 2000
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the ``answer`` of a call, or why there is none (``failure``) and the end of the process's ``output``."""

    answer: Any
    failure: str
    output: str


def call_in_process(
    function: Callable[..., Any],
    settings: Settings,
    *arguments: Any,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    server: ForkServer | None = None,
) -> Outcome:
    """Call ``function(settings, *arguments)`` in a new process, which is killed, with all that it started, after ``limit_s``
    seconds. ``log``: keeps what it says, also where this process is killed too. ``server``: makes the process."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        request.write_text(json.dumps([settings.as_json(), arguments]), encoding="utf-8")
        log = log or Path(folder, "log")
        name = f"{function.__module__}:{function.__qualname__}"
        if server is not None:
            code = server.call([name, str(request), str(answer)], dict(environment or {}), log, limit_s)
        else:
            code = _call([name, str(request), str(answer)], dict(environment or {}), log, limit_s)
        output = log.read_text(encoding="utf-8", errors="replace")[-_MOST_OUTPUT:]
        if code == 0 and answer.exists():
            return Outcome(json.loads(answer.read_text(encoding="utf-8")), "", output)
        failure = f"took more than {limit_s:.0f} s" if code is None else f"ended with exit code {code}"
        return Outcome(None, failure, output)


def call_apart(
    function: Callable[..., Any], settings: Settings, *arguments: Any, limit_s: float, environment: Mapping[str, str]
) -> Any:
    """Call a part of an experiment in a process of its own, with these variables; here at toy sizes, where they tell nothing.
    Returns its answer, or why there is none."""
    if settings.tiny:
        return function(settings, *arguments)
    outcome = call_in_process(function, settings, *arguments, limit_s=limit_s, environment=environment)
    return outcome.answer if not outcome.failure else {"failure": outcome.failure, "said": outcome.output}


def call_together(
    function: Callable[..., Any], settings: Settings, *arguments: Any, number: int, environment: Mapping[str, str]
) -> list[Any]:
    """Call ``function(settings, *arguments, k)`` in ``number`` processes at once, the kth with its number; this one must not
    have begun to use a device. Returns their answers. The limit is that of the experiment."""
    with ProcessPoolExecutor(
        number, get_context("fork"), initializer=os.environ.update, initargs=(dict(environment),)
    ) as pool:
        calls = [pool.submit(function, settings, *arguments, k) for k in range(number)]
        return [call.result() for call in calls]


def with_flags(*flags: str) -> dict[str, str]:
    """Return the environment with more flags of XLA."""
    return {"XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()}


def _call(command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float) -> int | None:
    """Return the exit code of a new Python that runs ``command``; None if it was killed after ``limit_s`` seconds."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_with_paths(environment),
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _with_paths(environment: Mapping[str, str]) -> dict[str, str]:
    folders = [str(ROOT), *([] if importlib.util.find_spec("ortools") else [str(WITHOUT_ORTOOLS)])]
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **environment}


class ForkServer:
    """A process that has imported JAX, and forks one for each call: toy sizes take less time than importing. Only for CPUs,
    as what JAX reads when it is imported is the same for all calls."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--serve"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_with_paths(environment),
            text=True,
        )

    def call(self, command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float) -> int | None:
        """Return like :func:`_call`."""
        pid, code = (Path(command[-1] + end) for end in (".pid", ".code"))
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, environment, str(log.resolve()), str(pid), str(code)]) + "\n")
        self._process.stdin.flush()
        ends = time.monotonic() + limit_s
        while not code.exists():
            if time.monotonic() > ends and pid.exists():
                os.killpg(int(pid.read_text()), signal.SIGKILL)
                return None
            if self._process.poll() is not None:
                return self._process.returncode
            time.sleep(0.02)
        return int(code.read_text())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    """Fork twice for each line: a process that waits for the one that runs the call, and writes its exit code."""
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    from tests.support import small_programs

    small_programs.collect_seldom()
    small_programs.share_context()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    for line in sys.stdin:
        command, environment, log, pid_file, code_file = json.loads(line)
        if os.fork():
            continue
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if pid := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            write_atomically(Path(code_file), str(code))
            os._exit(0)
        os.setsid()
        write_atomically(Path(pid_file), str(os.getpid()))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        code = 1
        try:
            main(*command)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def _die_with_parent() -> None:
    # An orphan would hold the card's memory while the next call wants it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def main(name: str, request: str, answer: str) -> None:
    """Call the function and write its answer."""
    _die_with_parent()
    request_devices(1)
    module, _, function = name.partition(":")
    settings, arguments = json.loads(Path(request).read_text(encoding="utf-8"))
    called = getattr(importlib.import_module(module), function)
    returned = called(Settings.from_json(settings), *arguments)
    # NaN and infinities are no JSON; as words they stay readable.
    plain = json.loads(json.dumps(returned), parse_constant=str)
    Path(answer).write_text(json.dumps(plain), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        _die_with_parent()
        _serve()
    else:
        main(*sys.argv[1:])
