"""One rank's real program alone on its device: does it fit, and how long does each action take? See README.md."""

from jaxpipe.rehearsal.rank import Rehearsal, Rehearsed, rehearse, rehearsed_json, rehearsed_text
from jaxpipe.rehearsal.report import RankReport, rehearsed_costs

__all__ = ["RankReport", "Rehearsal", "Rehearsed", "rehearse", "rehearsed_costs", "rehearsed_json", "rehearsed_text"]
