"""Define the exit codes of verbs, and the line that a user reads about an error. Errors carry their code
(:attr:`jaxpipe.errors.JaxpipeError.exit_code`)."""

from __future__ import annotations

from collections.abc import Mapping

from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.interrupts import INTERRUPTED as INTERRUPTED
from jaxpipe.runtime.connections import LOST as LOST
from jaxpipe.text import truncate
from jaxpipe.train.run.ending import STOPPED as STOPPED

READER_GONE = 141
"""The exit code that a shell shows of a tool that SIGPIPE ended (128 + 13)."""

EXIT_CODES: Mapping[int, str] = {
    0: "finished",
    2: "usage or configuration error",
    3: "a checkpoint is unusable, or the last one could not be saved",
    4: "gradients or parameters were not finite",
    5: "a device or a step failed, or hung",
    LOST: "another process of the run was lost",
    STOPPED: "stopped by a signal, what was done is saved; the same command goes on",
    INTERRUPTED: "interrupted by Ctrl-C: any verb, training before its first step or by a second signal while stopping",
    READER_GONE: "output closed early by its reader, as by | head (SIGPIPE)",
}
"""All exit codes, as README.md and ``jaxpipe train --help`` document them. If one process of several fails, the others end with
its code."""
_LONGEST_LINE = 600
_MOST_PROBLEMS = 20


def explained(error: BaseException) -> tuple[str, int] | None:
    """Return the line and the exit code for an error that ended a verb; None for an error of jaxpipe itself."""
    match error:
        case KeyboardInterrupt():
            return "interrupted", INTERRUPTED
        case JaxpipeError():
            return _one_line(error), error.exit_code
        case UnicodeDecodeError():
            return f"a file is not UTF-8 text ({error})", 2
        case OSError():
            return f"{f'{error.filename!r}: ' if error.filename else ''}{error.strerror or error}", 2
        case MemoryError():
            return "out of memory; ask for smaller sizes", 2
    return None


def _one_line(error: JaxpipeError) -> str:
    """Return the message on one line: excerpts over several lines are joined, and a long list of problems is cut."""
    # a schedule's first problem may have caused the others, so it stands for all; a config's are separate mistakes, which
    # a user wants to mend in one go
    text = " ".join(str(error).split())
    problems: tuple[str, ...] = getattr(error, "problems", ())
    if len(text) <= _LONGEST_LINE or len(problems) <= 1:
        return truncate(text, _LONGEST_LINE)
    shown_problems = problems[: _MOST_PROBLEMS if isinstance(error, ConfigError) else 1]
    rest = len(problems) - len(shown_problems)
    remainder = f" (and {rest} more problem{'s' * (rest > 1)})" if rest else ""
    return "; ".join(truncate(" ".join(problem.split()), _LONGEST_LINE) for problem in shown_problems) + remainder
