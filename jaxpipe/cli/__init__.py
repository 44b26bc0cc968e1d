"""The command line: ``jaxpipe VERB …`` and ``python -m jaxpipe VERB …``.

:func:`main` finds the verb in :mod:`jaxpipe.cli.registry`, imports only that verb's module, and turns every error a user may
cause into one line on stderr. Results go to stdout. Exit codes are in :mod:`jaxpipe.cli.exit_codes`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from jaxpipe.interrupts import Interrupts

__all__ = ["main"]


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
        from jaxpipe.cli.exit_codes import explained

        if (explanation := explained(error)) is None:
            raise
        return _fail(*explanation)


def _lost_output(error: OSError) -> int:
    """Return the exit code when stdout fails: a closed pipe is no error, a full disk is."""
    from jaxpipe.cli.exit_codes import READER_GONE
    from jaxpipe.train.run.progress import silence

    silence(sys.stdout)
    return READER_GONE if isinstance(error, BrokenPipeError) else _fail(f"standard output: {error.strerror or error}")


def _fail(message: str, code: int = 2) -> int:
    with contextlib.suppress(OSError):
        print(f"jaxpipe: {message}", file=sys.stderr, flush=True)
    return code
