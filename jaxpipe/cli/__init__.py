"""The command line: ``jaxpipe VERB …`` and ``python -m jaxpipe VERB …``.

:func:`main` finds the verb in :mod:`jaxpipe.cli.registry`, imports only that verb's module, and turns every error a user may
cause into one line on stderr. Results go to stdout. Exit codes are in :mod:`jaxpipe.errors`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from jaxpipe.errors import INTERRUPTED, READER_GONE, ConfigError, JaxpipeError
from jaxpipe.interrupts import Interrupts
from jaxpipe.text import truncate

__all__ = ["main"]

_LONGEST_LINE = 600
_MOST_PROBLEMS = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb with the given arguments and return the exit code. Without arguments it runs those of the command
    (``sys.argv``), which has the process to itself: Ctrl-C ends it (:mod:`jaxpipe.interrupts`).

    Never raises for what a user can cause: prints ``jaxpipe: `` and one line to stderr and returns the error's exit code.
    """
    if argv is not None:
        return _run(list(argv))
    # before anything slow is imported: from here on one Ctrl-C ends the process with one line, wherever it is
    interrupts = Interrupts()
    try:
        interrupts.listen()
        code = _run(sys.argv[1:], interrupts)
        interrupts.close(code)
    finally:
        if interrupts.heard:
            interrupts.finish()
    return code


def _run(argv: list[str], interrupts: Interrupts | None = None) -> int:
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that can't show '·' gets '?'
    code = _answer(argv, interrupts)
    # a full disk or a closed pipe may show only now, as output is buffered; at the interpreter's exit it would be a traceback
    try:
        if sys.stdout is not None:  # None when the caller closed it
            sys.stdout.flush()
    except OSError as error:
        code = _lost_output(error)
    return code


def _answer(argv: list[str], interrupts: Interrupts | None) -> int:
    """Run one verb and return its exit code."""
    try:
        # inside, so that an import that fails or is interrupted is answered like any other error
        from jaxpipe.cli import registry

        return registry.run(argv)
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except BaseException as error:
        if interrupts is not None and interrupts.heard:
            interrupts.finish()  # whatever became of the KeyboardInterrupt on its way here
        if isinstance(error, BrokenPipeError):
            return _lost_output(error)
        if (explanation := explained(error)) is None:
            raise
        return _fail(*explanation)


def _lost_output(error: OSError) -> int:
    """Return the exit code when stdout fails: a closed pipe is no error, a full disk is."""
    from jaxpipe.train.run.progress import silence

    silence(sys.stdout)
    return READER_GONE if isinstance(error, BrokenPipeError) else _fail(f"standard output: {error.strerror or error}")


def _fail(message: str, code: int = 2) -> int:
    with contextlib.suppress(OSError):
        print(f"jaxpipe: {message}", file=sys.stderr, flush=True)
    return code


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
