"""What goes on around the steps of a run: its directory, progress, saving, resuming, ending."""

from __future__ import annotations

from typing import Any

from jaxpipe.train import looked_up

_HOMES = {
    "progress": "LiveLine ProgressStream",
    "report": "TrainResult result_json result_text",
    "run_directory": "RunDirectory",
    "stop": "STOPPED EndingEarly Stop",
    "trackers": "Tracker TrackerFactory find_trackers",
    "watchdog": "Watchdog",
}
__all__ = sorted(" ".join(_HOMES.values()).split())


def __getattr__(name: str) -> Any:
    return looked_up(__name__, _HOMES, name)
