"""One rank alone under a memory limit: how long must its work take?

All other ranks are replaced by the least time between this rank's own actions of one microbatch, so every figure here is a
relaxation, and below every schedule that keeps to the limit. Four arguments; the best of them counts:

* windows (:func:`_windows`): appendix E.2 of `controllable-memory.txt` for uneven costs, transfers and any chunks per rank;
* memory × time (:func:`_areas`): activations stay at least their round trip, and the limit bounds their sum at any time;
* release by release (:func:`releases`): one chunk per rank, the j-th forward waits for what it needs to be given back;
* memory × time with activations that may leave for host memory (:mod:`~jaxpipe.schedule.bounds.lane`).

``own``: from the start of the rank's first action to the end of its last. ``through``: to the end of its last B, after which
the same microbatch still has its way up. Activations are counted from F's start to B's end (``held``) and from B's end to
W's end (``kept``), in units of one rank's share of a microbatch. Not modelled: workspace; several ranks on one host lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf

from jaxpipe.schedule.bounds.lane import with_whole_trips
from jaxpipe.schedule.bounds.resident import Confined, Resident
from jaxpipe.schedule.tolerance import MEMORY, at_most, how_many


def confine(stays: Sequence[Resident], limit: float, offload: bool) -> Confined:
    """Bounds of one rank that does ``stays`` (stages of a flow ascending) and never holds more than ``limit``; infinite if
    that can't be."""
    work = Confined(sum(x.count * (x.f_s + x.back_s) for x in stays), sum(x.count * (x.f_s + x.b_s) for x in stays))
    if limit == inf or not stays:
        return work
    if not at_most(_least_room(stays, offload), limit):
        return Confined(inf, inf)
    bound = work.or_longer(_windows(stays, limit, work, offload)).or_longer(_areas(stays, limit, work.own, offload))
    if len(stays) == 1 and not offload:
        bound = bound.or_longer(after_releases(stays[0], releases(stays[0], limit)))
    return bound


def _least_room(stays: Sequence[Resident], offload: bool) -> float:
    """Memory without which nothing can run: when a microbatch turns on this rank, all its stages here are held.

    With offload, only the stage that runs. What is held for no time at all does not count.
    """
    if offload:
        return max((x.held for x in stays if x.f_s + x.b_s > 0), default=0.0)
    turning = {x.flow: x.trip_s + x.b_s for x in stays}  # of each flow's last stage
    return max(sum(x.held for x in stays if x.flow == k) if s > 0 else 0.0 for k, s in turning.items())


def _most(items: Sequence[tuple[float, float, int]], room: float) -> float:
    """At most so much value fits: ``items`` are (value, size, count). Exact for equal sizes, else the last one is cut."""
    total = 0.0
    equal = len({size for _, size, _ in items}) == 1
    for value, size, count in sorted(items, key=lambda x: x[0] / x[1] if x[1] > 0 else inf, reverse=True):
        fits = count if size <= 0 else min(count, room / size * (1 + MEMORY))
        if equal and size > 0:
            fits = floor(fits + MEMORY)
        if fits > 0:
            total += fits * value
            room -= fits * size
    return total


def _windows(stays: Sequence[Resident], limit: float, work: Confined, offload: bool) -> Confined:
    """Windows in which the limit leaves too little to do.

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
    arrival = min(x.out_s for x in stays)
    room = limit
    if offload:
        slowest = min((x.d2h_s / x.leaves for x in stays if x.leaves > 0), default=inf)
        room = inf if slowest <= 0 else limit + _moved_out(stays, arrival, slowest)
    warm = max(0.0, arrival - _most([(x.f_s, x.held, x.count) for x in stays], room))
    after = [sum(x.count * t for x, t in zip(stays, back, strict=True)) for back in _backs(stays)]
    bound = Confined(work.own + warm, work.through + warm).or_longer(Confined(arrival + after[0], arrival + after[1]))
    pending = max(x.w_s + _most([(y.w_s, y.kept, y.count) for y in stays], max(0.0, limit - x.held)) for x in stays)
    bound = bound.or_longer(Confined(0.0, work.own + warm - pending))
    if offload:
        return bound
    if at_most(sum(x.count * x.held for x in stays), limit):
        warm = 0.0
    ends = [_cool_down(stays, limit, k) for k in sorted({x.flow for x in stays})]
    own, through = (min(end[k] for end in ends) + work.own + warm for k in (0, 1))
    return bound.or_longer(Confined(own, through))


def _moved_out(stays: Sequence[Resident], seconds: float, slowest: float) -> float:
    """The most that leaves in the first ``seconds`` of a rank. ``slowest``: least seconds a unit."""
    if len(stays) > 1:
        return seconds / slowest
    (x,) = stays
    return floor(max(0.0, seconds - x.f_s) / x.d2h_s * (1 + MEMORY) + MEMORY) * x.leaves


def _backs(stays: Sequence[Resident]) -> tuple[list[float], list[float]]:
    return [x.back_s for x in stays], [x.b_s for x in stays]


def _cool_down(stays: Sequence[Resident], limit: float, flow: int) -> tuple[float, float]:
    """If the last F is of ``flow``: seconds from its start to the end (own, through) less the work that remains then."""
    mine = [x for x in stays if x.flow == flow]
    first, last = mine[0], mine[-1]
    remaining = last.f_s + sum(x.back_s for x in mine)
    room = limit - sum(x.held for x in mine)
    others = [(x.back_s, x.held, x.count) for x in stays] + [(x.w_s, x.kept, x.count) for x in stays]
    remaining += _most(others, max(0.0, room))
    way = first.out_s - last.in_s
    return way + first.back_s - remaining, way + first.b_s - remaining


def _areas(stays: Sequence[Resident], limit: float, work: float, offload: bool) -> Confined:
    """Memory × time (Little's law): what all microbatches need is at most the limit × the time.

    From the start, memory fills no faster than F's run; before the end, whatever is held still needs W, or B and W, so it
    empties no faster than those run: both leave area unused. Up to the last B's end, only what then waits for its W, at most
    the limit, lacks W's share. With offload, every round trip on the host lane saves at most ``saved`` and takes lane time.
    """
    full = _reachable(stays, limit, offload)
    if full <= 0:
        return Confined(0.0, 0.0)
    area = sum(x.count * x.area() for x in stays)
    fill, fill_s = _unused(full, [(max(x.held, x.kept), x.f_s) for x in stays])
    drain, drain_s = _unused(full, [(x.held, x.back_s) for x in stays] + [(x.kept, x.w_s) for x in stays])
    ends = fill + drain if fill_s + drain_s <= work else max(fill, drain)
    if offload:
        return Confined(_with_lane(stays, area, ends, full, limit), 0.0)
    before_last_b = area + fill - full * max(x.w_s for x in stays)
    return Confined((area + ends) / full, before_last_b / full)


def _reachable(stays: Sequence[Resident], limit: float, offload: bool) -> float:
    """The most that can really be held: a multiple of the size if all sizes are equal; never more than everything. An
    activation of which a part leaves holds the rest meanwhile."""
    limit = min(limit, sum(x.count * max(x.held, x.kept) for x in stays))
    sizes = {size for x in stays for size in (x.held, x.kept) if size > 0}
    if offload:
        sizes |= {x.held - x.leaves for x in stays if x.leaves > 0 and not at_most(x.held, x.leaves)}
    if len(sizes) == 1:
        (size,) = sizes
        return how_many(size, limit) * size
    return limit


def _unused(full: float, kinds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(area, seconds) below ``full`` while memory grows from nothing, one action at a time; ``kinds``: (size, seconds)."""
    kinds = [(size, s) for size, s in kinds if size > 0]
    if not kinds or any(s <= 0 for _, s in kinds):
        return 0.0, 0.0
    largest = max(size for size, _ in kinds)
    if len({size for size, _ in kinds}) == 1:
        s = min(s for _, s in kinds)
        steps = max(0, ceil(full / largest - MEMORY) - 1)
        return sum(full - k * largest for k in range(1, steps + 1)) * s, steps * s
    rate = max(size / s for size, s in kinds)
    missing = max(0.0, full - largest)
    return missing * missing / rate / 2, missing / rate


def _with_lane(stays: Sequence[Resident], area: float, ends: float, full: float, limit: float) -> float:
    """Least T with area + ends − (what T seconds of the host lane can save) ≤ full × T: offloads that save most go first.

    On a rank with one stage a whole number of microbatches leaves, and the lane is not always busy
    (:mod:`~jaxpipe.schedule.bounds.lane`).
    """
    if len(stays) == 1:
        return with_whole_trips(stays[0], area + ends, full, limit)
    time = (area + ends) / full
    best = sorted((x for x in stays if x.saved() > 0), key=lambda x: x.together_s / x.saved())
    needed, lane = area + ends, 0.0
    for x in best:
        saved, seconds = x.count * x.saved(), x.count * x.together_s
        # within this kind the need falls linearly while the lane's time grows; find where lane time = needed / full
        if (needed - saved) / full > lane + seconds:
            needed, lane = needed - saved, lane + seconds
            time = needed / full
            continue
        share = (needed / full - lane) / (seconds + saved / full) if seconds + saved / full > 0 else 0.0
        return max(0.0, lane + max(0.0, share) * seconds)
    return max(time, lane)


def releases(x: Resident, limit: float) -> list[float]:
    """Least start of the j-th F of a rank with one chunk, counted from its first.

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


def _released(x: Resident, starts: Sequence[float], j: int, excess: float, idle: float) -> float:
    """Least time by which j F's ran and ``excess`` units were given back, over all numbers b of B's that ended.

    More B's need fewer W's: the first two terms rise with b, the third falls, and the fourth (W's not rounded) does one of
    both, so the best b is where the larger of those that rise meets the larger of those that fall.
    """
    kept = min(x.kept, x.held)
    freed = x.held - kept

    def terms(b: int) -> tuple[float, float]:
        need = max(0.0, excess - freed * b)
        up = starts[b - 1] + x.trip_s + x.b_s
        if need <= MEMORY:
            w, down = 0.0, 0.0
        elif kept <= 0 or not at_most(w := need / kept, b):
            return up, inf
        else:
            down = starts[max(0, ceil(w - MEMORY) - 1)] + x.trip_s + x.back_s
        busy = j * x.f_s + b * x.b_s + w * x.w_s + idle
        rises = freed * x.w_s <= kept * x.b_s
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
    return min(at, max(terms(low - 1))) if low > 1 else at


def after_releases(x: Resident, starts: Sequence[float]) -> Confined:
    """From the j-th F on, the F's j, j + 1, … have their B's start no earlier than a trip later, one after the other."""
    own = through = 0.0
    for j, start in enumerate(starts):
        left = x.count - j
        own = max(own, start + x.trip_s + left * x.back_s)
        through = max(through, start + x.trip_s + left * x.b_s)
    return Confined(own, through)
