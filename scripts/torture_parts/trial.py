"""The machinery of every part: cases and their trials, verbs called in this process, and training runs in children.

A case gets a random generator of its own, seeded by the torture's seed, the part and the case's number, so that any one of them
can be run again alone. Verbs are called through ``jaxpipe.cli.main``, as the command line does. Runs that are to be killed are
children of a process that has imported everything and started no thread: a fork costs no import.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Protocol

DOCUMENTED = frozenset({0, 2, 3, 4, 75, 130})
"""Exit codes of a verb whose output nobody closes."""
CPU_LIMIT_S, WALL_LIMIT_S = 10.0, 120.0
"""A call that takes longer hangs. Seconds of the processor count, as the machine may be busy; the other limit is for waits."""
CHILD_LIMIT_S = 600.0


class FailedError(Exception):
    """A case failed; the text says how, and with which input."""


class SkippedError(Exception):
    """This can't be tried here; the text says why."""


class _HangError(BaseException):
    """Nothing of the package catches it."""


@dataclass(slots=True)
class Trial:
    """One run of a case. ``tried``: how often what was tried, by kind. ``measured``: values by name."""

    rng: random.Random
    folder: Path
    tried: Counter[str] = field(default_factory=Counter)
    measured: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """``kind`` is counted once, unless ``run`` counts by itself. Raises FailedError or SkippedError."""

    kind: str
    run: Callable[[Trial], None]


class Bench:
    """A scratch folder, and how much of everything is wanted."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        self.lock = threading.RLock()

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def make(self, name: str) -> Path:
        """A folder in the scratch folder, perhaps there already."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    @cached_property
    def forks(self) -> ForkServerContext:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["jaxpipe.train.loop", "jaxpipe.cli.train_verbs", "orbax.checkpoint", "models.gpt"]
        )
        return context

    @cached_property
    def text(self) -> Path:
        """62 kB of words."""
        words = ["the", "cat", "sat", "on", "a", "mat", "and", "that", "dog", "ran", "to", "its", "old", "red", "barn"]
        rng = random.Random(0)
        lines = (" ".join(rng.choices(words, k=8)) for _ in range(2000))
        path = self.folder / "text.txt"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a verb: its exit code and output."""

    code: int
    out: str
    err: str


def ask(arguments: Sequence[str]) -> Answer:
    """Call a verb in this process, in the main thread, and hold it to what is documented: an exit code, and unless it is 0 one
    line that begins with ``jaxpipe: ``, the last of stderr.

    Raises:
        FailedError: anything else; an exception that passes ``main``; a hang.
    """
    from jaxpipe.cli import main

    out, err = io.StringIO(), io.StringIO()
    what = shown(arguments)
    try:
        with _limit(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except _HangError:
        raise FailedError(f"hangs: {what}") from None
    except Exception as error:
        raise FailedError(f"{type(error).__name__} ({' '.join(str(error).split())[:160]}): {what}") from error
    answer = Answer(code, out.getvalue(), err.getvalue())
    check_told(answer, what)
    return answer


def check_told(answer: Answer, what: str) -> None:
    """Raise FailedError unless the exit code is documented and an error is one line."""
    lines = answer.err.strip("\n").split("\n")
    messages = [line for line in lines if line.startswith("jaxpipe: ")]
    if answer.code not in DOCUMENTED:
        raise FailedError(f"exit code {answer.code}: {what}")
    if "Traceback (most recent call last)" in answer.err:
        raise FailedError(f"a traceback on stderr: {what}: {answer.err[answer.err.index('Traceback') :][:3000]}")
    if answer.code and (len(messages) != 1 or lines[-1] != messages[0]):
        raise FailedError(
            f"exit code {answer.code} and {len(messages)} lines, not one at the end: {what}: {answer.err[-600:]}"
        )


def shown(arguments: Sequence[str]) -> str:
    """Return the arguments as Python reads them, in ASCII, not too long."""
    text = ascii(list(arguments))
    return text if len(text) <= 700 else f"{text[:600]} … {text[-60:]}"


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _HangError

    before = {number: signal.signal(number, ring) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _copy(pipe: Path, log: Path) -> None:
    with pipe.open("rb", buffering=0) as source, log.open("ab", buffering=0) as target:
        while chunk := source.read(65536):
            target.write(chunk)


class Waiting(Protocol):
    """A run that is under way."""

    @property
    def output(self) -> str: ...

    def until(self, met: Callable[[], bool]) -> bool:
        """Wait until ``met()``; False if the run ended before."""


class Child:
    """``jaxpipe ARGUMENTS`` in a process of its own, its output in the file ``log``.

    ``file_bytes``: no file may become larger. ``user``: runs as this user, if we are root.
    """

    def __init__(
        self, bench: Bench, arguments: Sequence[str], log: Path, *, file_bytes: int = 0, user: int | None = None
    ) -> None:
        self.arguments, self.log = arguments, log
        log.write_bytes(b"")
        self._copier: threading.Thread | None = None
        if file_bytes:  # the limit is on what the verb writes, not on what it prints
            pipe = log.with_suffix(".pipe")
            os.mkfifo(pipe)
            self._copier = threading.Thread(target=_copy, args=(pipe, log), daemon=True)
            self._copier.start()
            log = pipe
        with bench.lock:  # the server is started by the first
            self.process = bench.forks.Process(
                target=_verb, args=(list(arguments), str(log), dict(os.environ), file_bytes, user), daemon=True
            )
            self.process.start()

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, met: Callable[[], bool]) -> bool:
        """Wait until ``met()``; False if the process ended before."""
        deadline = time.monotonic() + CHILD_LIMIT_S
        while self.process.is_alive() and time.monotonic() < deadline:
            if met():
                return True
            time.sleep(0.0005)
        return False

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            assert self.process.pid is not None
            os.kill(self.process.pid, number)

    def end(self) -> int:
        """Its exit code; minus the signal's number if one ended it.

        Raises:
            FailedError: it does not end.
        """
        self.process.join(CHILD_LIMIT_S)
        if self.process.is_alive():
            self.send(signal.SIGKILL)
            self.process.join()
            raise FailedError(f"does not end: {shown(self.arguments)}")
        if self._copier is not None:
            self._copier.join(CHILD_LIMIT_S)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def answer(self) -> Answer:
        """Wait, and hold it to what is documented, as :func:`ask`. What it printed is all taken for stderr."""
        answer = Answer(self.end(), "", self.output)
        check_told(answer, shown(self.arguments))
        return answer


def _verb(arguments: list[str], log: str, environment: Mapping[str, str], file_bytes: int, user: int | None) -> None:
    """Run one verb in the child process, and end it."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", errors="backslashreplace") for n in (1, 2))
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    if user is not None and os.getuid() == 0:
        os.setresuid(user, user, user)
    from jaxpipe.cli import main
    from jaxpipe.train.run import run_directory

    run_directory.PICTURES = run_directory.PICTURES[:1]  # drawing is not what is tried, and takes longest
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
