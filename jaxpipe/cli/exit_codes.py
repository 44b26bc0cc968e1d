"""With which code a verb ends. Errors bring their own (:attr:`jaxpipe.errors.JaxpipeError.exit_code`)."""

from __future__ import annotations

from collections.abc import Mapping

from jaxpipe.train.stop import STOPPED as STOPPED

INTERRUPTED = 130
READER_GONE = 141  # what a shell shows of a tool that SIGPIPE ended

EXIT_CODES: Mapping[int, str] = {
    0: "finished",
    2: "an error was reported: a mistake in what was asked for, or a device or step that failed or hung",
    3: "a checkpoint is unusable, or the last one could not be saved",
    4: "gradients or parameters were not finite",
    STOPPED: "stopped by a signal, what was done is saved; the same command goes on",
    INTERRUPTED: "interrupted by Ctrl-C before the first step, or by a second signal while stopping",
    READER_GONE: "the reader of the output ended first, as | head does",
}
"""All there are. Documented in README.md, and by ``jaxpipe train --help``."""
