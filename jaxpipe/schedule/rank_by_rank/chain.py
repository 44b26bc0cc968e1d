"""A chain in steps, and the times of one of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxpipe.schedule.bounds.few_ranks import FewRanks
from jaxpipe.schedule.bounds.host_steps import HostSteps


@dataclass(frozen=True, slots=True)
class Rank:
    """``alone``: its copies, trip and room. ``down``: steps from F's start on the rank before to the earliest here; ``up``:
    from B's start here to the earliest on the rank before."""

    alone: HostSteps
    down: int = 0
    up: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """``by_span``: each rank's own span counts, else what has passed since the start. ``step_s``: seconds."""

    ranks: Sequence[Rank]
    by_span: bool
    step_s: float

    @property
    def count(self) -> int:
        return self.ranks[0].alone.count

    def crossings(self, rank: int) -> int:
        """Bit j: an F on ``rank`` that goes straight down meets, on some rank, the B of one that started j + 1 steps before it
        and comes straight back."""
        return sum(1 << (x.alone.trip - 1) for x in self.ranks[rank:])


@dataclass(frozen=True, slots=True)
class Times:
    """The steps in which one rank starts F, B and W of each microbatch, and O and L of those that it parks."""

    forward: Sequence[int]
    backward: Sequence[int]
    weight: Sequence[int]
    out: Mapping[int, int]
    back: Mapping[int, int]

    @classmethod
    def of(
        cls,
        forward: Mapping[int, int],
        backward: Mapping[int, int],
        weight: Mapping[int, int],
        out: Mapping[int, int],
        back: Mapping[int, int],
    ) -> Times:
        """From steps by microbatch."""
        every = range(len(forward))
        f, b, w = ([x[i] for i in every] for x in (forward, backward, weight))
        return cls(f, b, w, out, back)

    def starts(self) -> Iterator[tuple[str, int, int]]:
        """Op, microbatch, step."""
        for op, times in (("F", self.forward), ("B", self.backward), ("W", self.weight)):
            yield from ((op, i, at) for i, at in enumerate(times))
        for op, copies in (("O", self.out), ("L", self.back)):
            yield from ((op, i, at) for i, at in copies.items())

    @property
    def first(self) -> int:
        return min(self.forward)

    @property
    def end(self) -> int:
        return max(self.weight) + 1


def chain_of(few: FewRanks) -> Chain | None:
    """A task in steps, rounded down where they are not whole; None where there are no steps of one length, or one rank."""
    every = range(len(few.stays))
    if not few.offload or few.rank_of != list(every) or len(every) < 2:
        return None
    ranks = [x for x in map(few.host_steps, every) if x is not None]
    if len(ranks) < len(every) or len({step for _, step, _ in ranks}) > 1:
        return None
    step = ranks[0][1]
    chain = [Rank(ranks[0][0])]
    for s, (above, below) in enumerate(pairwise(ranks)):
        down = 1 + few.ticks.of(few.flow.hop(s, s + 1, s)) // step
        chain.append(Rank(below[0], down, above[0].trip - below[0].trip - down))
    return Chain(chain, few.span, few.flow.forward[0]) if all(x.up > 0 for x in chain[1:]) else None
