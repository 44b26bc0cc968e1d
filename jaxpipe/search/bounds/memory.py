"""One rank alone under a memory limit: how long must its work take?

All other ranks are replaced by the least time between this rank's own actions of one microbatch, so every figure here is a
relaxation, and below every schedule that keeps to the limit. Four arguments; the best of them counts:

* windows (:func:`_windows`): appendix E.2 of `controllable-memory.txt` for uneven costs, transfers and any chunks per rank;
* memory × time (:func:`_areas`): activations stay at least their round trip, and the limit bounds their sum at any time;
* release by release (:func:`releases`): one chunk per rank, the j-th forward waits for what it needs to be given back;
* memory × time with activations that may leave for host memory (:func:`with_whole_trips`).

``own``: from the start of the rank's first action to the end of its last. ``through``: to the end of its last B, after which
the same microbatch still has its way up. Activations are counted from F's start to B's end (``held``) and from B's end to
W's end (``kept``), in units of one rank's share of a microbatch. Not modelled: workspace; several ranks on one host lane.

Records of a rank's work and memory for the microbatches of one stage, and of bounds on a rank's time.

Chunks of one microbatch that a rank holds at the same time: few microbatches may do so, so they take turns.

A rank runs the stages s_1 < … < s_c < … of a chain. From F of s_c to B of s_c a microbatch holds what s_1 … s_c left on the
rank: their F's come before, their B's after. So no more than q = ⌊limit / that⌋ microbatches may be on the way from s_c and
back, and the (j + q)-th F of s_c starts a whole way after the j-th. Memory × time does not see this: with room for three
activations and two chunks, half of the third can't be used, whatever the average is.

One rank, one chunk, and its host lane: how many microbatches may leave, and when the lane must idle.

Beside memory × time (:func:`_areas`), which takes every unit of the limit as fit for any use, this
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

Microbatches that meet: why a chain with one stage per rank can't run every microbatch at its least round trip.

Take the ranks from e down to the last, and let at most K microbatches be between F's start and their release on rank e (the
limit allows no more). All microbatches are alike, so let the j-th F, B and W of each rank be those of microbatch j; then F of
j + K starts after the release of j, and the microbatches j, j + K, j + 2K, … are one *lane*: down, up, down again.

Two lanes A and B meet again and again: while one goes down the other comes up. Say they meet at cut x if on x ranks the F of
the one runs before the B of the other, on the ranks below after it. Both leave the meeting no earlier than both reached it
(at the cut each waits for the other's action on the same rank). Let them meet at x and next at y. In between the one runs
up the x ranks, is released, and runs down y ranks; the other runs down to the last rank and up to the cut y. The time is at
least the longer of both, and the two together pass each rank once each way: with unit costs and n ranks they take
x + y + 1 and 2n − x − y, so n + 1 at least, where the mean is n + ½. So a lane's cycle is 2n + 2, not the round trip's 2n + 1.

The least time over all sequences of cuts is found by dynamic programming. Start: F's of the first two start as
:func:`~jaxpipe.search.bounds.memory.releases` says. End: the last two must come home, and with them every later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from jaxpipe.schedule.timeline import MEMORY, TIME, at_most, how_many


@dataclass(frozen=True, slots=True)
class StageWork:
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


def confine(stages: Sequence[StageWork], limit: float, offload: bool) -> Confined:
    """Return bounds of one rank that does ``stages`` (of a flow, ascending) and never holds more than ``limit``;
    infinite if that can't be."""
    work = Confined(sum(x.count * (x.f_s + x.back_s) for x in stages), sum(x.count * (x.f_s + x.b_s) for x in stages))
    if limit == inf or not stages:
        return work
    if not at_most(_least_room(stages, offload), limit):
        return Confined(inf, inf)
    bound = work.or_longer(_windows(stages, limit, work, offload)).or_longer(_areas(stages, limit, work.own, offload))
    # with several chunks it is open which of them gives memory back next
    if len(stages) == 1 and not offload:
        x = stages[0]
        bound = bound.or_longer(after_releases(releases(x, limit), x.trip_s, x.back_s, x.b_s))
    return bound


def _least_room(stages: Sequence[StageWork], offload: bool) -> float:
    """Return the memory without which nothing can run: when a microbatch turns on this rank, all its stages here are held.

    With offload, only the stage that runs. What is held for no time at all does not count.
    """
    if offload:
        return max((x.held for x in stages if x.f_s + x.b_s > 0), default=0.0)
    turning = {x.flow: x.trip_s + x.b_s for x in stages}  # of each flow's last stage
    return max(sum(x.held for x in stages if x.flow == k) if s > 0 else 0.0 for k, s in turning.items())


def _most(items: Sequence[tuple[float, float, int]], room: float) -> float:
    """Return an upper bound on the value that fits in ``room``: ``items`` are (value, size, count). Exact for equal sizes,
    else the last one is cut."""
    total = 0.0
    equal = len({size for _, size, _ in items}) == 1
    for value, size, count in sorted(items, key=lambda x: x[0] / x[1] if x[1] > 0 else inf, reverse=True):
        fits = count if size <= 0 else min(count, room / size * (1 + MEMORY))
        # of one size whole ones fit; of several the last is cut: the knapsack's relaxation
        if equal and size > 0:
            fits = floor(fits + MEMORY)
        if fits > 0:
            total += fits * value
            room -= fits * size
    return total


def _windows(stages: Sequence[StageWork], limit: float, work: Confined, offload: bool) -> Confined:
    """Bound a rank by windows in which the limit leaves too little to do.

    Warm-up: a B starts at least ``out_s`` after the microbatch's first F here, hence after the rank's first action. In that
    time only F's run, and nothing is given back, so what they take fits in the limit. So the rank idles for at least
    ``least out_s − most F time that fits``. With offload, what the lane can move out in that time makes room; on a rank with
    one stage that is a whole number of microbatches, none before the first F has ended.

    Up to the last B: when it starts, its own activation is held and what waits for W fits in the rest; other work is done.

    Cool-down: let F of microbatch i be the last F here, starting at t. It is the last stage that i has here, so i holds all
    its stages here; the rest that is held fits in what is left, and only it still needs B and W. So ``remaining`` work is
    bounded and the rest was done before t, and so was the idle time of the warm-up if not all F fit before the first B. From
    t, i must come back to its first stage here.
    """
    # no B comes before that: until then the rank has F's alone, as many as the limit allows
    arrival = min(x.out_s for x in stages)
    room = limit
    if offload:
        slowest = min((x.d2h_s / x.leaves for x in stages if x.leaves > 0), default=inf)
        room = inf if slowest <= 0 else limit + _moved_out(stages, arrival, slowest)
    warm = max(0.0, arrival - _most([(x.f_s, x.held, x.count) for x in stages], room))
    after = Confined(arrival + sum(x.count * x.back_s for x in stages), arrival + sum(x.count * x.b_s for x in stages))
    bound = Confined(work.own + warm, work.through + warm).or_longer(after)
    pending = max(x.w_s + _most([(y.w_s, y.kept, y.count) for y in stages], max(0.0, limit - x.held)) for x in stages)
    bound = bound.or_longer(Confined(0.0, work.own + warm - pending))
    if offload:
        return bound
    # all F's may run before the first B, so the last of them need not come after an idle warm-up
    if at_most(sum(x.count * x.held for x in stages), limit):
        warm = 0.0
    ends = [_cool_down(stages, limit, k) for k in sorted({x.flow for x in stages})]
    span, through = (min(end[k] for end in ends) + work.own + warm for k in (0, 1))
    return bound.or_longer(Confined(span, through))


def _moved_out(stages: Sequence[StageWork], seconds: float, slowest: float) -> float:
    """Return the most that leaves in the first ``seconds`` of a rank. ``slowest``: least seconds a unit."""
    if len(stages) > 1:
        return seconds / slowest
    (x,) = stages
    return floor(max(0.0, seconds - x.f_s) / x.d2h_s * (1 + MEMORY) + MEMORY) * x.leaves


def _cool_down(stages: Sequence[StageWork], limit: float, flow: int) -> tuple[float, float]:
    """Return, if the last F is of ``flow``, the seconds from its start to the end (own, through) less the work that remains
    then."""
    mine = [x for x in stages if x.flow == flow]
    first, last = mine[0], mine[-1]
    remaining = last.f_s + sum(x.back_s for x in mine)
    room = limit - sum(x.held for x in mine)
    backwards = [(x.back_s, x.held, x.count) for x in stages] + [(x.w_s, x.kept, x.count) for x in stages]
    remaining += _most(backwards, max(0.0, room))
    way = first.out_s - last.in_s
    return way + first.back_s - remaining, way + first.b_s - remaining


def _areas(stages: Sequence[StageWork], limit: float, work: float, offload: bool) -> Confined:
    """Bound a rank by memory × time (Little's law): what all microbatches need is at most the limit × the time.

    From the start, memory fills no faster than F's run; before the end, whatever is held still needs W, or B and W, so it
    empties no faster than those run: both leave area unused. Up to the last B's end, only what then waits for its W, at most
    the limit, lacks W's share. With offload, every round trip on the host lane saves at most ``saved`` and takes lane time.
    """
    full = _reachable(stages, limit, offload)
    if full <= 0:
        return Confined(0.0, 0.0)
    area = sum(x.count * x.area() for x in stages)
    fill, fill_s = _unused(full, [(max(x.held, x.kept), x.f_s) for x in stages])
    drain, drain_s = _unused(full, [(x.held, x.back_s) for x in stages] + [(x.kept, x.w_s) for x in stages])
    # where the two ends may overlap, only the larger is sure
    ends = fill + drain if fill_s + drain_s <= work else max(fill, drain)
    if offload:
        return Confined(_with_lane(stages, area, ends, full, limit), 0.0)
    before_last_b = area + fill - full * max(x.w_s for x in stages)
    return Confined((area + ends) / full, before_last_b / full)


def _reachable(stages: Sequence[StageWork], limit: float, offload: bool) -> float:
    """Return the most that can really be held: a multiple of the size if all sizes are equal; never more than everything. An
    activation of which a part leaves holds the rest meanwhile."""
    limit = min(limit, sum(x.count * max(x.held, x.kept) for x in stages))
    sizes = {size for x in stages for size in (x.held, x.kept) if size > 0}
    if offload:
        sizes |= {x.held - x.leaves for x in stages if x.leaves > 0 and not at_most(x.held, x.leaves)}
    # of one size only whole ones are held: the rest of the limit is never used
    if len(sizes) == 1:
        (size,) = sizes
        return how_many(size, limit) * size
    return limit


def _unused(full: float, kinds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (area, seconds) below ``full`` while memory grows from nothing, one action at a time; ``kinds``: (size,
    seconds)."""
    kinds = [(size, s) for size, s in kinds if size > 0]
    if not kinds or any(s <= 0 for _, s in kinds):
        return 0.0, 0.0
    largest = max(size for size, _ in kinds)
    if len({size for size, _ in kinds}) == 1:
        s = min(s for _, s in kinds)
        steps = max(0, ceil(full / largest - MEMORY) - 1)
        return sum(full - k * largest for k in range(1, steps + 1)) * s, steps * s
    # no level rises faster than the steepest kind: a triangle below ``full``
    rate = max(size / s for size, s in kinds)
    missing = max(0.0, full - largest)
    return missing * missing / rate / 2, missing / rate


def _with_lane(stages: Sequence[StageWork], area: float, ends: float, full: float, limit: float) -> float:
    """Return the least T with area + ends − (what T seconds of the host lane can save) ≤ full × T: offloads that save most
    go first.

    On a rank with one stage a whole number of microbatches leaves, and the lane is not always busy
    (:func:`with_whole_trips`).
    """
    if len(stages) == 1:
        return with_whole_trips(stages[0], area + ends, full, limit)
    time = (area + ends) / full
    best = sorted((x for x in stages if x.saved() > 0), key=lambda x: x.together_s / x.saved())
    demand, lane = area + ends, 0.0
    for x in best:
        saved, seconds = x.count * x.saved(), x.count * x.together_s
        # within this kind the need falls linearly while the lane's time grows; find where lane time = demand / full
        if (demand - saved) / full > lane + seconds:
            demand, lane = demand - saved, lane + seconds
            time = demand / full
            continue
        share = (demand / full - lane) / (seconds + saved / full) if seconds + saved / full > 0 else 0.0
        return max(0.0, lane + max(0.0, share) * seconds)
    return max(time, lane)


def releases(x: StageWork, limit: float) -> list[float]:
    """Return the least start of the j-th F of a rank with one chunk, counted from its first.

    Order the F's by start. When the j-th (from 0) has started, ``(j + 1) held − (held − kept) b − kept w`` units are there if b
    B's and w W's have ended (w ≤ b), so some (b, w) with that within the limit have. Among b microbatches whose B has ended one
    has an F no earlier than the (b−1)-th; so t ≥ start(b − 1) + trip + B, and likewise for w with W. And the rank did j F's, b
    B's and w W's and idled through the warm-up (:func:`_windows`).
    """
    most = min(x.count, how_many(x.held, limit)) if x.held > 0 else x.count
    idle = max(0.0, x.trip_s - most * x.f_s)
    starts = [0.0]
    for j in range(1, x.count):
        earliest = starts[-1] + x.f_s
        excess = (j + 1) * x.held - limit
        if excess > MEMORY * x.held and at_most(x.held, limit):  # else all of it takes no time
            earliest = max(earliest, _released(x, starts, j, excess, idle))
        starts.append(earliest)
    return starts


def _released(x: StageWork, starts: Sequence[float], j: int, excess: float, idle: float) -> float:
    """Return the least time by which j F's ran and ``excess`` units were given back, over all numbers b of B's that ended.

    More B's need fewer W's: the first two terms rise with b, the third falls, and the fourth (W's not rounded) does one of
    both, so the best b is where the larger of those that rise meets the larger of those that fall.
    """
    residue = min(x.kept, x.held)
    freed = x.held - residue

    def terms(b: int) -> tuple[float, float]:
        need = max(0.0, excess - freed * b)
        up = starts[b - 1] + x.trip_s + x.b_s
        if need <= MEMORY:
            w, down = 0.0, 0.0
        elif residue <= 0 or not at_most(w := need / residue, b):
            return up, inf
        else:
            down = starts[max(0, ceil(w - MEMORY) - 1)] + x.trip_s + x.back_s
        busy = j * x.f_s + b * x.b_s + w * x.w_s + idle
        rises = freed * x.w_s <= residue * x.b_s
        return (max(up, busy), down) if rises or w == 0 else (up, max(down, busy))

    low = max(1, ceil(excess / x.held - MEMORY))
    high = max(low, min(j, ceil(excess / freed))) if freed > MEMORY * x.held else low
    while low < high:
        middle = (low + high) // 2
        up, down = terms(middle)
        if up >= down:
            high = middle
        else:
            low = middle + 1
    at = max(terms(low))
    # b is whole: the best is at the crossing or one before
    return min(at, max(terms(low - 1))) if low > 1 else at


def after_releases(starts: Sequence[float], trip_s: float, back_s: float, b_s: float) -> Confined:
    """Bound a rank's work from each of its F's on, the last of which is no earlier than ``starts[-1]``: those from the j-th on
    have their backwards start no earlier than a trip later, one after the other."""
    ends = ([start + trip_s + (len(starts) - j) * s for j, start in enumerate(starts)] for s in (back_s, b_s))
    return Confined(*map(max, ends))


def chunk_turns(stages: Sequence[StageWork], limit: float) -> Confined:
    """Return bounds of one rank that does ``stages`` (of one flow, ascending), from what its chunks hold together."""
    bound = Confined(0.0, 0.0)
    if len({x.flow for x in stages}) > 1:
        return bound
    for c in range(1, len(stages)):
        bound = bound.or_longer(_turns(stages[: c + 1], limit))
    return bound


def _turns(stages: Sequence[StageWork], limit: float) -> Confined:
    """Bound a rank where the last of ``stages`` takes turns.

    Order its F's by start. When the j-th (from 0) starts, at most q − 1 of those before it are still on their way; so of
    j + 1 − q that are not, one has an F no earlier than the (j − q)-th, and a way lies between. A way ends when the first of
    the held is given back: at B's end, or, if only W gives anything back, when W or the next stage's B has run too. What is
    left to do from the j-th F on: after a trip, the backwards of its microbatch and of all later ones, of this stage and those
    before it.
    """
    last, before = stages[-1], stages[-2]
    held = sum(x.held for x in stages)
    lanes = how_many(held, limit) if held > 0 else last.count
    if not 1 <= lanes < last.count:
        return Confined(0.0, 0.0)
    w_frees_all = at_most(last.held, last.kept)
    # where B gives nothing back, room comes with W or with the next stage's B, whichever is sooner
    way = last.trip_s + last.b_s + (min(last.w_s, before.b_s) if w_frees_all else 0.0)
    starts = [0.0]
    for j in range(1, last.count):
        starts.append(max(starts[-1] + last.f_s, starts[j - lanes] + way if j >= lanes else 0.0))
    arrivals = [last.in_s + start for start in starts]
    return after_releases(arrivals, last.trip_s, sum(x.back_s for x in stages), sum(x.b_s for x in stages))


def with_whole_trips(x: StageWork, area: float, full: float, limit: float) -> float:
    """Return the least T over all numbers that leave: the more leave, the less of ``area`` is needed of ``full`` × T, the
    longer the lane takes."""
    # a schedule may choose how many leave, so the least over all numbers bounds it
    crowded_s, saved = _crowded_seconds(x, limit), x.saved()
    return min(max(x.lane(n), crowded_s(n), (area - n * saved) / full) for n in range(x.count + 1))


def _crowded_seconds(x: StageWork, limit: float) -> Callable[[int], float]:
    """Return the least seconds of a rank by the number of microbatches that leave, from this module's argument about one rank
    and its host lane; 0 where nothing can be said."""
    fit = how_many(x.held, limit) if x.held > 0 else 0
    copies_s = x.d2h_s + x.h2d_s
    # what gives an activation back: B, and W where that keeps all of it
    last_s = x.back_s if at_most(x.held, x.kept) else x.b_s
    ratio = min((gap / copy for gap, copy in ((x.f_s, x.d2h_s), (last_s, x.h2d_s)) if copy > 0), default=0.0)
    one_lane = x.together_s >= copies_s
    share = min(0.5, ratio / (1 + ratio)) if one_lane and fit >= 2 else 0.0

    def seconds(away: int) -> float:
        if away <= 0 or share <= 0:
            return 0.0
        # T' ≥ copies + share × (idle − (fit − 2) T')
        idle_s = (x.count - away) * (x.trip_s + last_s - copies_s) - x.f_s - fit * x.back_s
        lane_s = away * copies_s
        return x.f_s + x.back_s + max(lane_s, (lane_s + share * idle_s) / (1 + share * (fit - 2)))

    return seconds


_CHOICES = 4
"""How many distances between the two lanes, and how many last microbatches, are tried at most."""


@dataclass(frozen=True, slots=True)
class ChainTimes:
    """A chain from rank e down: seconds per rank of F, B, transfers down and up to the next rank."""

    f_s: Sequence[float]
    b_s: Sequence[float]
    down_s: Sequence[float]
    up_s: Sequence[float]


def meet(run: ChainTimes, top: StageWork, limit: float, starts: Sequence[float]) -> Confined:
    """Return the least time of rank e's work when no more than ``limit`` may be held there; ``starts``: least start of its
    j-th F."""
    m = top.count
    lanes = how_many(top.held, limit) if top.held > 0 else m
    bound = Confined(0.0, 0.0)
    if not 2 <= lanes < m:
        return bound
    # where B gives nothing back, what a lane holds is released by W
    legs = _Legs(run, release_s=top.w_s if at_most(top.held, top.kept) else 0.0)
    # each pair of lanes is a bound by itself, so some of them suffice
    step = -(-lanes // _CHOICES)
    for distance in range(1, lanes, step):
        for last in range(m - 1, max(m - 1 - lanes, lanes), -step):
            bound = bound.or_longer(_pair(legs, top, starts, lanes, distance, last))
    return bound


class _Legs:
    """Times of the ways to and from a cut, and between meetings. Transfers over the cut itself are left out."""

    def __init__(self, run: ChainTimes, release_s: float) -> None:
        n = len(run.f_s)
        self.cuts = range(n + 1)
        # ranks above the cut: from rank e's F start to the cut, from the cut to rank e's B end; below: the same to the turn
        self.down_to = _sums(run.f_s, run.down_s)
        self.up_from = _sums(run.b_s, run.up_s)
        self.to_turn = _sums(run.f_s[::-1], run.down_s[::-1])[::-1]
        self.from_turn = _sums(run.b_s[::-1], run.up_s[::-1])[::-1]
        self.down, self.up = self.down_to[n], self.up_from[n]
        # the cut from which on the way over the top is the longer, by the cut of the meeting before
        self.over = [(self.up_from[x] + release_s, self.to_turn[x]) for x in self.cuts]
        self.turns = [
            next((y for y in self.cuts if a + self.down_to[y] >= b + self.from_turn[y]), n + 1) for a, b in self.over
        ]

    def earlier(self, after: Sequence[float]) -> list[float]:
        """Return the least time that follows the meeting before, given the one that follows a meeting at each cut.

        It is min over y of max(over the top to y, around the turn to y) + after[y]. The former grows with y and the latter
        falls, so one running minimum from each side does it.
        """
        low, high = [inf], [inf]
        for t, way in zip(after, self.from_turn, strict=True):
            low.append(min(low[-1], way + t))
        for t, way in zip(reversed(after), reversed(self.down_to), strict=True):
            high.append(min(high[-1], way + t))
        high.reverse()
        return [min(b + low[y], a + high[y]) for (a, b), y in zip(self.over, self.turns, strict=True)]


def _sums(seconds: Sequence[float], hops: Sequence[float]) -> list[float]:
    """Return prefix sums; ``[k]``: the first k of ``seconds`` with the transfers between them."""
    sums = [0.0]
    for k, s in enumerate(seconds):
        sums.append(sums[-1] + s + (hops[k - 1] if k else 0.0))
    return sums


def _pair(legs: _Legs, top: StageWork, starts: Sequence[float], lanes: int, distance: int, last: int) -> Confined:
    """Bound the lanes of ``last`` and of ``last − distance``, from their last meeting back to any of their first."""
    m = top.count
    span, through = [0.0] * len(legs.cuts), [0.0] * len(legs.cuts)
    i, k = last - distance, last
    for x in legs.cuts:
        home = legs.to_turn[x] + legs.up - top.b_s  # until B of k starts on rank e
        other = legs.up_from[x] - (top.b_s if x else 0.0)
        span[x] = max(home + (m - k) * top.back_s, other + (m - i - (x == 0)) * top.back_s)
        through[x] = max(home + (m - k) * top.b_s, other + (m - i - (x == 0)) * top.b_s)
    bound = Confined(0.0, 0.0)
    while i >= 0:
        if i < 2 * lanes:
            begin = [max(starts[i] + legs.down + legs.from_turn[x], starts[k] + legs.down_to[x]) for x in legs.cuts]
            bound = bound.or_longer(Confined(_plus(begin, span), _plus(begin, through)))
        cycles = (i - 2 * lanes) // lanes
        # near the start one meeting at a time, since each may be the first
        if cycles < 1:
            span, through = legs.earlier(span), legs.earlier(through)
            i, k = k - lanes, i
            continue
        before = [legs.earlier(legs.earlier(after)) for after in (span, through)]
        # a cycle that adds the same at every cut does so up to the start
        if all(_steady(old, new) for old, new in zip((span, through), before, strict=True)):
            span, through = (_repeat(old, new, cycles) for old, new in zip((span, through), before, strict=True))
        else:
            span, through = before
            cycles = 1
        i, k = i - cycles * lanes, k - cycles * lanes
    return bound


def _plus(begin: Sequence[float], after: Sequence[float]) -> float:
    return min(map(float.__add__, begin, after))


def _steady(old: Sequence[float], new: Sequence[float]) -> bool:
    added = list(map(float.__sub__, new, old))
    return max(added) - min(added) <= TIME * max(new)


def _repeat(old: Sequence[float], new: Sequence[float], cycles: int) -> list[float]:
    """Return ``old`` after so many cycles: what one cycle adds everywhere, each further one adds at least."""
    added = min(map(float.__sub__, new, old))
    return [t + cycles * added for t in old]
