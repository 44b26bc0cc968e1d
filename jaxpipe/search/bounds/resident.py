"""Records of a rank's work and memory for the microbatches of one stage, and of bounds on a rank's time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """Work and memory of a rank for each of ``count`` microbatches of one stage and flow.

    ``f_s``, ``b_s`` (up to the cotangent), ``back_s`` (B and W, or a cheaper BW); ``trip_s``: least time from F's start to
    B's. ``in_s``, ``out_s``: when F and B can start, counted from F of the flow's first stage on this rank. ``leaves``: units
    that may be offloaded, in ``d2h_s``, and back in ``h2d_s``; ``together_s``: lane time of both.
    """

    flow: int
    count: int
    f_s: float
    b_s: float
    back_s: float
    trip_s: float
    in_s: float
    out_s: float
    held: float
    kept: float
    leaves: float = 0.0
    d2h_s: float = 0.0
    h2d_s: float = 0.0
    together_s: float = 0.0

    @property
    def w_s(self) -> float:
        return self.back_s - self.b_s

    def area(self) -> float:
        """Return the least memory × time of one microbatch that stays: held to B's end, kept to W's. With BW, at least as
        much."""
        return self.held * (self.trip_s + self.b_s) + min(self.held, self.kept) * self.w_s

    def lane(self, away: int) -> float:
        """Return the least seconds of a rank that sends ``away`` of these out and back: its first F must end before the
        first O, and after the last L the B and W of that microbatch follow. With one lane a direction, that of L's waits
        for the first O and that of O's ends before the last L."""
        if away <= 0:
            return 0.0
        out, back = self.d2h_s, self.h2d_s
        one_lane = self.together_s >= out + back
        copies = away * (out + back) if one_lane else max(away * out + back, out + away * back)
        return self.f_s + copies + self.back_s

    def saved(self) -> float:
        """Return the most memory × time that one offload saves: away from the end of O to the start of L, which ends before
        B starts."""
        return self.leaves * max(0.0, self.trip_s - self.f_s - self.d2h_s - self.h2d_s)


@dataclass(frozen=True, slots=True)
class Confined:
    """Least seconds of a rank's whole work, and of the part up to the end of its last B."""

    own: float
    through: float

    def or_longer(self, other: Confined) -> Confined:
        return Confined(max(self.own, other.own), max(self.through, other.through))
