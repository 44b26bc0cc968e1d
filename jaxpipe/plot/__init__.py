"""Draw timelines: Gantt charts with memory curves, an HTML viewer, a Perfetto trace; and schedules beside each other.

One function, :func:`plot_timelines`, chooses the form by the suffix of the file it writes. Simulated and measured timelines
are drawn alike, one over the other on a common time axis. Nothing here knows an op by name: colours and descriptions come
from the :class:`~jaxpipe.schedule.ir.OpSpec`. matplotlib and numpy are imported when the first figure is drawn, not before.
(:mod:`jaxpipe.schedule.text` draws small timelines as text.)
"""

from __future__ import annotations

from jaxpipe.plot.pareto import Point, plot_pareto
from jaxpipe.plot.write import SUFFIXES, check_suffix, plot_timelines

__all__ = ["SUFFIXES", "Point", "check_suffix", "plot_pareto", "plot_timelines"]
