"""Choose the form of a picture by the file's suffix, and write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpipe.errors import ConfigError
from jaxpipe.plot.figure import Units, printable, units_of

if TYPE_CHECKING:
    from jaxpipe.schedule.timeline import Timeline

SUFFIXES = (".svg", ".png", ".html", ".trace.json", ".json")
"""What :func:`plot_timelines` can write. ``.trace.json`` and ``.json`` are both the Perfetto (Chrome) trace."""


def check_suffix(path: str | Path) -> str:
    """Return the entry of :data:`SUFFIXES` that ``path`` ends with.

    Raises:
        ConfigError: none of them does.
    """
    # .trace.json comes before .json in SUFFIXES, so the longer one is found
    name = Path(path).name.lower()
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return suffix
    raise ConfigError(f"can't draw to {str(path)!r}: its suffix is not one of {' '.join(SUFFIXES)}")


def plot_timelines(
    timelines: Sequence[Timeline],
    path: str | Path,
    *,
    title: str | None = None,
    units: Units | None = None,
) -> None:
    """Draw ``timelines``, the first on top, to ``path``: ``.svg``, ``.png``, ``.html``, ``.trace.json`` or ``.json``.

    The usual call passes the predicted timeline and then the measured one. Each is shifted to begin at 0, so both share one
    time axis. ``title``: heading of the picture; the timelines' names by default. ``units``: what the numbers in the
    timelines mean, ``"si"`` for seconds and bytes or ``"plain"`` for unit costs and activations; by default ``"si"`` when any
    timeline is measured.

    Raises:
        ConfigError: no timelines or events, an unknown suffix, or no matplotlib for a figure.
        OSError: the file can't be written.
    """
    suffix = check_suffix(path)
    if not timelines or not any(t.events for t in timelines):
        raise ConfigError(f"nothing to draw to {str(path)!r}: there are no events in the timelines given")
    chosen = units or units_of(timelines)
    timelines = [replace(t, name=printable(t.name), source=printable(t.source)) for t in timelines]
    heading = printable(title) if title is not None else " · ".join(dict.fromkeys(t.name for t in timelines))
    if suffix == ".html":
        from jaxpipe.plot.viewer import viewer_page

        Path(path).write_text(viewer_page(timelines, heading, chosen), encoding="utf-8")
    elif suffix in (".json", ".trace.json"):
        from jaxpipe.plot.trace import trace_text

        Path(path).write_text(trace_text(timelines, heading, chosen), encoding="utf-8")
    else:
        from jaxpipe.plot.figure import save_figure

        save_figure(timelines, Path(path), suffix[1:], heading, chosen)
