"""Exceptions a user may see. Internal invariants use ``assert`` instead.

Tree::

    JaxpipeError                 every error of ours; the CLI prints it on one line and exits with its ``exit_code``, 2
    ├── ConfigError              a config file, override or flag is wrong (has ``.problems``)
    │   └── AgreedError          the processes of a run don't fit together; all raise it, with the same words
    ├── ScheduleError            a schedule, placement, cost profile or schedule file breaks a rule (has ``.problems``)
    │   └── ScheduleParseError   the text, JSON or CSV form can't be read
    ├── StageError               a layer or a model can't be cut, traced or split
    ├── ProgramError             a schedule can't be lowered onto these stages and this mesh
    ├── RunError                 an instruction failed at run time; names rank, action and stage; exit code 5
    │   ├── NotFiniteError       a run whose gradients or parameters are no longer finite; exit code 4
    │   └── JudgedError          a layer ended the run (``Layer.judge``); exit code 7
    ├── DataError                training data can't be read or is too small
    └── CheckpointError          a checkpoint is missing, damaged or does not fit the model; exit code 3

Every message says what is wrong, where, and what to do about it. The exit codes of all verbs are here too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxpipe.text import truncate

LOST = 6
"""Exit code of processes that end because another one was lost. Of one that fails the others take over line and code."""
STOPPED = 75
INTERRUPTED = 130
READER_GONE = 141
"""The exit code that a shell shows of a tool that SIGPIPE ended (128 + 13)."""

EXIT_CODES: Mapping[int, str] = {
    0: "finished",
    2: "usage or configuration error",
    3: "a checkpoint is unusable, or the last one could not be saved",
    4: "gradients or parameters were not finite",
    5: "a device or a step failed, or hung",
    LOST: "another process of the run was lost",
    7: "a layer ended the run, such as experts that were to drop nothing (on_drop=stop)",
    STOPPED: "stopped by a signal, what was done is saved; the same command goes on",
    INTERRUPTED: "interrupted by Ctrl-C: any verb, training before its first step or by a second signal while stopping",
    READER_GONE: "output closed early by its reader, as by | head (SIGPIPE)",
}
"""All exit codes, as README.md and ``jaxpipe train --help`` document them. If one process of several fails, the others end with
its code."""


class JaxpipeError(Exception):
    """Base of all errors that jaxpipe raises for a user to read. ``exit_code``: with which the command line ends."""

    exit_code: ClassVar[int] = 2


class _ProblemsError(JaxpipeError):
    """``problems`` holds every problem found, one string each; the message joins them."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems) or (message,)


class ConfigError(_ProblemsError):
    """A configuration file, override or command-line flag is wrong."""


class AgreedError(ConfigError):
    """The processes of a run do not fit together, or can't do what is asked. All of them raise it, with the same words."""


class ScheduleError(_ProblemsError):
    """A schedule, placement or cost profile breaks a rule."""


class ScheduleParseError(ScheduleError):
    """The text, JSON or CSV form of a schedule, placement or cost profile can't be read."""


class StageError(JaxpipeError):
    """A layer or model can't be cut into stages, traced, or split into F, B and W."""


class ProgramError(JaxpipeError):
    """A schedule can't be lowered onto the given stages and mesh."""


class RunError(JaxpipeError):
    """An instruction failed at run time. The message names rank, action and stage; ``action`` is its printed form, if one
    is to blame."""

    exit_code: ClassVar[int] = 5

    def __init__(self, message: str, action: str = "") -> None:
        super().__init__(message)
        self.action = action


class NotFiniteError(RunError):
    """A run ended because its gradients or parameters are not finite. What was saved before is intact."""

    exit_code: ClassVar[int] = 4


class JudgedError(RunError):
    """A run ended because one of its layers found the sums of a step unfit. What was saved before is intact."""

    exit_code: ClassVar[int] = 7


class DataError(JaxpipeError):
    """Training data can't be read, or is too small for the request."""


class CheckpointError(JaxpipeError):
    """A checkpoint is missing, damaged, or does not fit the model that wants it; or none could be written."""

    exit_code: ClassVar[int] = 3


_ON_THE_WAY = re.compile(r"(Error (dispatching computation|while transferring): )+")


def short_message(error: BaseException) -> str:
    """Return the cause that an error of XLA's or of a callback gives, on one line of at most 250 characters.

    Of a message that holds Python tracebacks, what the innermost exception says; of a long one the first and the last line, as
    a stack or a memory map may stand in between. What XLA puts before the cause once for each computation between it and where
    it is noticed is left out.
    """
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "Traceback (most recent call last)" in str(error):
        last_frame = max((k for k, line in enumerate(lines) if line[0].isspace()), default=-1)
        lines = lines[last_frame + 1 :] or lines[-1:]
    lines = [_ON_THE_WAY.sub("", line) for line in lines]
    text = " ".join(" ".join(lines).split())
    if len(text) <= 250 or len(lines) == 1:
        return truncate(text, 250)
    return f"{truncate(lines[0], 130)} … {truncate(lines[-1].strip(), 117)}"
