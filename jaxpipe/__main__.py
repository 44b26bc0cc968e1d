"""``python -m jaxpipe``: the command line."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until main listens
    from jaxpipe.cli import main

    sys.exit(main())
