"""When things happened, simulated or measured: one type for both, and the definitions every report uses.

The simulator and the runtime's recorder produce a :class:`Timeline`; plots, bubbles and comparisons read it and can't tell
the two apart. Definitions are those of :file:`jaxpipe/README.md`.

Times and memory are compared up to rounding, by one rule everywhere (:func:`at_most`). *Times* are sums of durations in double
precision: 10⁶ terms in another order differ by 10⁻¹⁰ of the sum at most, and no cost is measured to better than 10⁻⁴. *Memory*
is sums and differences of sizes against a limit that people type with a few digits (0.3 for three tenths): the same 10⁻⁹ of
the limit lies far above rounding and far below the least activation of any schedule here. Both are relative, so units don't
matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import floor
from typing import Literal

from jaxpipe.schedule.ir import Slot


@dataclass(frozen=True, slots=True)
class Event:
    """A slot on a lane of a rank. ``lane``: ``compute``, ``tp`` (tensor-parallel collectives inside a compute slot), ``d2h``,
    ``h2d``, ``net`` (reductions and gathers over dp), or ``send`` (a transfer to another rank)."""

    rank: int
    lane: str
    action: Slot
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """A step function: from ``times_s[k]`` on, ``bytes[k]`` are live. Several changes at one instant are merged."""

    times_s: tuple[float, ...]
    bytes: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.bytes, default=0.0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events in order of start per rank, and a memory curve per rank.

    ``memory[r]``: live residuals, w-residuals and workspace on rank r, in bytes (or activation units when the costs have no
    bytes). ``static_bytes[r]``: parameters and optimizer state. ``peak_activations[r]``: peak of live activations in units of
    rank r's own share of one microbatch, so ranks with unequal shares count in unequal units. ``tp_exposed_s[r]``: seconds in
    which compute of rank r waits for a TP collective, inside its compute events; empty where nothing is known of collectives.
    ``source``: ``simulated`` or ``measured``.
    """

    name: str
    num_ranks: int
    events: tuple[Event, ...]
    memory: tuple[MemoryCurve, ...]
    peak_activations: tuple[float, ...]
    static_bytes: tuple[float, ...] = ()
    source: str = "simulated"
    tp_exposed_s: tuple[float, ...] = ()

    def of(self, rank: int, lane: str | None = None) -> Iterator[Event]:
        """Return events of one rank (and one lane), in order."""
        return (e for e in self.events if e.rank == rank and (lane is None or e.lane == lane))

    def _extent(self) -> tuple[list[float], list[float]]:
        first = [float("inf")] * self.num_ranks
        last = [float("-inf")] * self.num_ranks
        for e in self.events:
            # a transfer belongs to no rank's span: the rank may be done while it is on its way
            if e.lane != "send":
                rank = e.rank
                if e.start_s < first[rank]:
                    first[rank] = e.start_s
                if e.end_s > last[rank]:
                    last[rank] = e.end_s
        return first, last

    @property
    def makespan(self) -> float:
        """Return the last end minus the first start over all ranks."""
        first, last = self._extent()
        return max(0.0, max(last, default=0.0) - min(first, default=0.0))

    @property
    def spans(self) -> tuple[float, ...]:
        """Return, per rank, last end minus first start."""
        first, last = self._extent()
        return tuple(max(0.0, b - a) for a, b in zip(first, last, strict=True))

    @property
    def max_span(self) -> float:
        return max(self.spans, default=0.0)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Return, per rank, seconds spent on the compute lane, waits for collectives left out: those count as bubble."""
        # waits inside compute events count as bubble, so they come off here
        total = [-x for x in self.tp_exposed_s] or [0.0] * self.num_ranks
        for e in self.events:
            if e.lane == "compute":
                total[e.rank] += e.end_s - e.start_s
        return tuple(total)

    @property
    def tp_exposed_rate(self) -> float:
        """Σ_r tp_exposed_r / (p · makespan): the part of the bubble that collectives make."""
        total = self.num_ranks * self.makespan
        return sum(self.tp_exposed_s) / total if total > 0 else 0.0

    @property
    def bubble_rate(self) -> float:
        """1 − Σ_r compute_r / (p · makespan)."""
        return _idle_share(sum(self.compute_s), self.num_ranks * self.makespan)

    @property
    def span_bubble_rate(self) -> float:
        """1 − Σ_r compute_r / (p · max_r span[r]): what counts when the update need not wait for the slowest rank."""
        return _idle_share(sum(self.compute_s), self.num_ranks * self.max_span)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Return, per rank, static bytes plus the peak of the memory curve."""
        static = self.static_bytes or (0.0,) * self.num_ranks
        return tuple(s + m.peak for s, m in zip(static, self.memory, strict=True))


def _idle_share(busy: float, total: float) -> float:
    return max(0.0, 1.0 - busy / total) if total > 0 else 0.0


def chunks_in(events: Iterable[Event]) -> dict[tuple[int, int], int]:
    """Return (rank, stage) → which chunk of that rank the stage is among those in ``events``, by ascending stage."""
    stages: dict[int, set[int]] = {}
    for event in events:
        stages.setdefault(event.rank, set()).update(a.stage for a in event.action.actions)
    return {(rank, stage): k for rank, held in stages.items() for k, stage in enumerate(sorted(held))}


Objective = Literal["makespan", "span"]

TIME = 1e-9
"""Two orders of the same work may differ by this part of their time."""
MEMORY = 1e-9
"""A level may lie above its limit by this part of it and still keep it."""


def close(a: float, b: float) -> bool:
    """Return whether two times are the same up to rounding."""
    # the first part is for infinities, whose difference is no number
    return a == b or abs(a - b) <= TIME * max(abs(a), abs(b))


def at_most(x: float, most: float) -> bool:
    """Return whether ``x`` is no more than ``most``: a level and its limit, or a time and a bound (both ≥ 0)."""
    return x <= most * (1 + MEMORY)


def how_many(size: float, limit: float) -> int:
    """Return how many of ``size`` (> 0) fit into a finite ``limit``."""
    return floor(limit / size * (1 + MEMORY))


def nine_digits(x: float) -> float:
    """Return ``x`` as it is compared: equal but for rounding is equal. For sorting, where :func:`close` is not transitive."""
    return float(f"{x:.9g}")


def order_key(objective: Objective, makespan: float, span: float, peak: float) -> tuple[float, float, float]:
    """Return what is minimised: the objective, the other of makespan and span, the peak."""
    first, second = (makespan, span) if objective == "makespan" else (span, makespan)
    return nine_digits(first), nine_digits(second), nine_digits(peak)
