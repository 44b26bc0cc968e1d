"""What goes on around the steps of a run: its directory, progress, saving, resuming, ending."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    progress="LiveLine ProgressStream",
    report="TrainResult result_json result_text",
    run_directory="RunDirectory",
    stop="STOPPED EndingEarly Stop",
    trackers="Tracker TrackerFactory find_trackers",
    watchdog="Watchdog",
)
