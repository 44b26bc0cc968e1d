"""One rank, one chunk, and its host lane: how many microbatches may leave, and when the lane must idle.

Beside memory × time (:mod:`~jaxpipe.schedule.bounds.memory`), which takes every unit of the limit as fit for any use, this
counts whole activations. Let c of them fit (c ≥ 2), let the lane be one for both ways, and call *resident* the R microbatches
that never leave; the others *leave*. All are held from F's start to O's end or (residents) to the end of what gives them back,
and from L's start to that same end: B, or W where W keeps all of it. While r residents are held, c − r others fit:

* r = c: nothing else is held, so nothing is copied; the lane idles.
* r = c − 1, an interval I with x seconds of copies, of k O's and l L's at least in part: no two that leave are ever held at
  once. So while one of them runs F, B (or W where it keeps all), only that one is held, and it is not copied: the lane idles.
  Of the k, all but one were not held when I began, so they run F in I: idle ≥ (k − 1) F. Of the l, all but one are not held
  when I ends: idle ≥ (l − 1) B, or B + W. With ρ = min(F / O, B / L), idle ≥ ρ (x − O − L) and x = |I| − idle. Hence
  idle ≥ s (|I| − O − L), s = ρ / (1 + ρ). Take s ≤ ½, which is no more.

Each such interval begins with the start of a resident, or at the end of an interval with r = c that began so: there are at
most R. Leave out the first F and the last B and W of the rank, when the lane idles anyway: T' = T − F − B − W is left. In the
first F at most one is held, in the last part at most c. A resident is held for its trip and B (and W), ``stay``; so
R stay − F − c (B + W) ≤ (c − 2) T' + (seconds with r = c − 1) + 2 (seconds with r = c), and what exceeds (c − 2) T', less
R (O + L), idles the lane for s times that at least (2 s ≤ 1 pays for r = c). With m − R leaving,

    T ≥ (m − R)(O + L) + F + B + W + s (R (stay − O − L) − F − c (B + W) − (c − 2) T')

which bounds T, as it stands on the right with a minus sign only.
"""

from __future__ import annotations

from jaxpipe.schedule.bounds.resident import Resident
from jaxpipe.schedule.tolerance import at_most, how_many


def with_whole_trips(x: Resident, area: float, full: float, limit: float) -> float:
    """Least T over all numbers that leave: the more leave, the less of ``area`` is needed of ``full`` × T, the longer the lane
    takes."""
    crowd = _Crowd(x, limit)
    saved = x.saved()
    return min(max(x.lane(n), crowd.seconds(n), (area - n * saved) / full) for n in range(x.count + 1))


class _Crowd:
    """The argument of this module for one rank."""

    def __init__(self, x: Resident, limit: float) -> None:
        self.x = x
        self.fit = how_many(x.held, limit) if x.held > 0 else 0
        self.copies = x.d2h_s + x.h2d_s
        # what gives an activation back: B, and W where that keeps all of it
        last_s = x.back_s if at_most(x.held, x.kept) else x.b_s
        self.stay_s = x.trip_s + last_s
        gaps = [gap / copy for gap, copy in ((x.f_s, x.d2h_s), (last_s, x.h2d_s)) if copy > 0]
        ratio = min(gaps, default=0.0)
        one_lane = x.together_s >= self.copies
        self.share = min(0.5, ratio / (1 + ratio)) if one_lane and self.fit >= 2 else 0.0

    def seconds(self, away: int) -> float:
        """Least seconds of the rank if so many leave; 0 where nothing can be said."""
        x = self.x
        if away <= 0 or self.share <= 0:
            return 0.0
        stay = x.count - away
        ends = x.f_s + x.back_s
        # T' ≥ copies + share × (idle − (fit − 2) T')
        idle = stay * (self.stay_s - self.copies) - x.f_s - self.fit * x.back_s
        copies = away * self.copies
        return ends + max(copies, (copies + self.share * idle) / (1 + self.share * (self.fit - 2)))
