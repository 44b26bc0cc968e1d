"""Surround the steps of a run: its directory, progress, saving, resuming, ending."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    ending="STOPPED EndingEarly Stop Watchdog",
    progress="LiveLine ProgressStream",
    run_directory="RunDirectory TrainResult result_json result_text",
)
