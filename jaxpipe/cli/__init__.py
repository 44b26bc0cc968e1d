"""The command line: ``jaxpipe VERB …`` and ``python -m jaxpipe VERB …``.

:func:`main` finds the verb in :mod:`jaxpipe.cli.registry`, imports only that verb's module, and turns every error a user may
cause into one line on stderr. Exit codes: 0 done, 2 an error was reported, 130 interrupted. Results go to stdout.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from jaxpipe.errors import JaxpipeError

__all__ = ["main"]

_LONGEST_LINE = 600


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb with the given arguments (``sys.argv`` by default) and return the exit code.

    Never raises for what a user can cause: prints ``jaxpipe: `` and one line to stderr and returns 2 (130 if interrupted).
    """
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that can't show '·' gets '?'
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:  # None when the caller closed it
            sys.stdout.flush()
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except JaxpipeError as error:
        return _fail(_one_line(error))
    except BrokenPipeError:
        _drop_stdout()
        return _fail("the program reading this output stopped before it was all written")
    except UnicodeDecodeError as error:
        return _fail(f"a file is not UTF-8 text ({error})")
    except OSError as error:
        where = f"{error.filename!r}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except MemoryError:
        return _fail("out of memory; ask for smaller sizes")
    return code


def _dispatch(argv: list[str]) -> int:
    from jaxpipe.cli import registry

    return registry.run(argv)


def _one_line(error: JaxpipeError) -> str:
    """The message on one line: excerpts over several lines are joined, long lists of problems cut."""
    text = " ".join(str(error).split())
    problems: tuple[str, ...] = getattr(error, "problems", ())
    if len(text) > _LONGEST_LINE and len(problems) > 1:
        first = " ".join(problems[0].split())
        rest = len(problems) - 1
        text = f"{first} (and {rest} more problem{'s' if rest > 1 else ''})"
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 2].rstrip() + " …"


def _fail(message: str, code: int = 2) -> int:
    with contextlib.suppress(OSError):
        print(f"jaxpipe: {message}", file=sys.stderr, flush=True)
    return code


def _drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
