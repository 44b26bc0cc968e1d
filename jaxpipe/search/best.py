"""Find the best schedule of all families and their parameters under a memory limit: what ``jaxpipe best`` and ``compare`` ask.

Every :class:`Setting` that a task allows is generated and simulated. Settings are taken from the
cheap families to the expensive ones. Left out without loss: one whose placement has a lower bound no better than what was
found, one that a closed form says is above the limit, and larger groups than one that was. What needs too much memory goes
through the offload pass, if the costs say how long that takes. No clock decides anything: the same task, the same schedule.

Not explored: mixtures of families, placements that no family uses, more than eight chunks per rank unless asked for. Chunks
cost time only where transfers do: without ``max_chunks`` and with free transfers, most chunks win.

A :class:`Task` says what is wanted, a :class:`Setting` is a family with its parameters; :func:`settings_of` lists a family's
settings for a task. It reads the family's options only, so a new family is explored without a change here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from jaxpipe.errors import JaxpipeError, ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families import FAMILIES, Family, generate
from jaxpipe.schedule.families.family import cheap_first
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.memory import UNPRICED, offloaded_share
from jaxpipe.schedule.passes import braid as braid_pass
from jaxpipe.schedule.passes import offload as offload_pass
from jaxpipe.schedule.passes import separate_gradients, with_priced_reductions
from jaxpipe.schedule.placement import Placement, one_to_one
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import MEMORY, Objective, Timeline, at_most, close, how_many, nine_digits, order_key
from jaxpipe.search.bounds import lower_bounds
from jaxpipe.search.budget import OutOfTimeError

Costs = CostProfile | Callable[[Placement], CostProfile] | None

CHUNKS = (1, 2, 3, 4, 6, 8)
"""Chunks per rank that are tried when costs don't fix the number of stages."""
LIMITS = (1 / 2, 2 / 3, 3 / 4, 1.0, 1.5, 2.0)
"""Memory limits that are tried beside the one asked for, in units of p."""
_MOST_PAIRS = 16_384  # pairs of stage and microbatch up to which more chunks than the family's own are tried


@dataclass(frozen=True, slots=True)
class Setting:
    """A family and its parameters. ``memory_limit`` is what the family is told, at most the task's.

    ``offload``: whether the offload pass brings the schedule below the task's limit.
    """

    family: str
    chunks: int
    group: int | None = None
    memory_limit: float | None = None
    offload: bool = False

    def __str__(self) -> str:
        chunks = self.chunks if "chunks" in FAMILIES[self.family].options else None
        flags = {"chunks": chunks, "group": self.group, "memory-limit": self.memory_limit}
        flags_text = "".join(f" --{flag} {value:g}" for flag, value in flags.items() if value is not None)
        return self.family + flags_text + (" and the offload pass" if self.offload else "")


@dataclass(frozen=True, slots=True)
class Task:
    """A request for a schedule.

    ``costs``: a profile, which fixes the number of stages; a function from placement to profile, which leaves it free; or
    None for unit costs. ``memory_limit``: peak activations allowed on a rank, in units of its share of one microbatch.
    ``chunks``, ``group``: for the families that take them; free if None. ``max_chunks``: the most per rank of any family.
    ``offload``: whether schedules may copy activations to the host; by default they may if the costs say that it takes time (a
    host link that takes none would hide it all). ``separate``, ``braid``: whether these passes go over every schedule.
    """

    ranks: int
    microbatches: int
    costs: Costs = None
    memory_limit: float = float("inf")
    chunks: int | None = None
    group: int | None = None
    offload: bool | None = None
    objective: Objective = "makespan"
    braid: bool = False
    max_chunks: int | None = None
    separate: bool = False

    def costs_for(self, placement: Placement) -> CostProfile:
        """Return the profile for schedules of ``placement``.

        Raises:
            ScheduleError: the task's profile has another number of stages.
        """
        if self.costs is None:
            return CostProfile.on(placement)
        if not isinstance(self.costs, CostProfile):
            return self.costs(placement)
        self.costs.require_stages(placement.num_stages, f"this with {placement.num_chunks} per rank")
        return self.costs

    def may_offload(self, costs: CostProfile) -> bool:
        """Return whether schedules may use the host's memory."""
        return any(costs.offload_s) or any(costs.load_s) if self.offload is None else self.offload


def settings_of(family: Family, task: Task) -> Iterator[Setting]:
    """Yield every setting of ``family`` worth a try for ``task``, the offload pass apart."""
    for chunks in _chunks(family, task):
        for group in _groups(task) if "group" in family.options else (None,):
            for limit in _limits(task, chunks) if "memory_limit" in family.options else (None,):
                yield Setting(family.name, chunks, group, limit)


def _chunks(family: Family, task: Task) -> Iterable[int]:
    p, m, v = task.ranks, task.microbatches, family.default_chunks
    if isinstance(task.costs, CostProfile):
        stages = task.costs.num_stages
        candidates = {v, stages // p} if "chunks" in family.options else {v}
        placements = {x: placement_of(family, p, x) for x in sorted(candidates) if x >= 1}
        return [x for x, placement in placements.items() if placement and placement.num_stages == stages]
    most = task.max_chunks or max(*CHUNKS, v)
    if "chunks" not in family.options:
        return (v,) if v <= most else ()
    if task.chunks is not None:
        return (task.chunks,)
    # many chunks of many microbatches take long to search
    return [x for x in sorted({*CHUNKS, v, most}) if x <= most and (x == v or p * m * x <= _MOST_PAIRS)]


def placement_of(family: Family, ranks: int, chunks: int) -> Placement | None:
    """Return the family's placement, or None where it has none of these sizes."""
    with contextlib.suppress(JaxpipeError):
        return family.placement(ranks, chunks)
    return None


def _groups(task: Task) -> Iterable[int]:
    """Return groups from half the ranks (`pipeoffload.txt` section 3.2: from p/2 to p) to twice as many; the peak rises
    with them."""
    p = task.ranks
    return [*range((p + 1) // 2, p + 1), *sorted({p + p // 2, 2 * p} - {p})] if task.group is None else (task.group,)


def _limits(task: Task, chunks: int) -> Iterable[float | None]:
    """Return the task's limit first; then whole chunks just below it and :data:`LIMITS`: a search with less room may find
    more, and one with more room leaves something to offload."""
    limit = task.memory_limit
    costs = task.costs if isinstance(task.costs, CostProfile) else task.costs_for(one_to_one(task.ranks))
    candidates = [x * task.ranks for x in LIMITS if x * task.ranks < limit or task.may_offload(costs)]
    if limit < float("inf"):
        chunks_below = how_many(1 / chunks, limit)
        candidates += [x / chunks for x in (chunks_below, chunks_below - 1) if x > 0]
    tried = [x for x in sorted(set(candidates), reverse=True) if not close(x, limit)]
    return [None if limit == float("inf") else limit, *tried]


_FAST, _NEAR, _WAITING = 8, 8, 4  # schedules of one family that the offload pass is tried on, at most


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting's schedule, simulated, with R and G where the costs price them. Bounds are those of its placement under the
    task's memory limit."""

    setting: Setting
    schedule: Schedule
    costs: CostProfile
    timeline: Timeline
    makespan: float
    span: float
    peak: float

    @classmethod
    def of(cls, setting: Setting, schedule: Schedule, costs: CostProfile) -> Candidate:
        timeline = simulate(with_priced_reductions(schedule, costs), costs)
        times = timeline.makespan, timeline.max_span
        return cls(setting, schedule, costs, timeline, *times, max(timeline.peak_activations))

    def key(self, objective: Objective) -> tuple[float, float, float]:
        """Return what candidates are compared by: the smaller, the better."""
        return order_key(objective, self.makespan, self.span, self.peak)


def make(setting: Setting, task: Task) -> Candidate:
    """Generate and simulate one setting. Its peak may be above the task's limit.

    Raises:
        ScheduleError: the sizes or costs don't suit the family.
    """
    costs = task.costs_for(FAMILIES[setting.family].placement(task.ranks, setting.chunks))
    sizes = task.ranks, task.microbatches, setting.chunks
    schedule = generate(setting.family, *sizes, costs, setting.memory_limit, setting.group, task.objective)
    if task.separate and at_most(max(simulate(schedule, costs).peak_activations), task.memory_limit):
        schedule = separate_gradients(schedule, costs, memory_limit=task.memory_limit)
    if task.braid:
        schedule = braid_pass(schedule, costs, memory_limit=task.memory_limit)
    return Candidate.of(setting, schedule, costs)


OnTrial = Callable[[Setting, Candidate | None], object]
"""Called with each setting before it is tried, and the best candidate so far."""


NO_TIME = "out of time before anything was found: raise the time limit"


@dataclass(slots=True)
class SettingSearch:
    """The best candidate so far, and what was learned on the way. ``on_better`` is told of each that beats all before.
    ``beat``: seconds of makespan or span, as the task's objective says, that a candidate must be below to be worth the offload
    pass."""

    task: Task
    on_better: Callable[[Candidate], object] = lambda candidate: None
    on_trial: OnTrial = lambda setting, best: None
    best: Candidate | None = None
    reasons: list[str] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    refused: set[object] = field(default_factory=set)
    bounds: dict[Placement, tuple[float, float]] = field(default_factory=dict)
    beat: float = float("inf")

    def run(self, families: Iterable[Family]) -> Candidate | None:
        """Try all settings of all families; then what needs too much memory, the fastest first, through the offload pass."""
        for family in families:
            for setting in settings_of(family, self.task):
                if not self._is_hopeless(setting):
                    self._try(setting)
        self._offload()
        return self.best

    def run_once(self, families: Iterable[Family], placement: Placement) -> None:
        """Try each family with its own defaults on ``placement``, through the offload pass where it needs too much memory."""
        for family in families:
            limit = self.task.memory_limit if "memory_limit" in family.options else None
            self._try(Setting(family.name, max(1, placement.num_chunks), None, limit))
            self._offload()
            self.too_large.clear()

    def _offload(self) -> None:
        """Try first offloads that cost no time: of the fastest schedules, then of those nearest to the limit. Then, where these
        came nearest to it, offloads that backward passes wait for."""
        reached: dict[int, tuple[float, Candidate]] = {}
        near = self._promising_candidates(lambda c: (nine_digits(c.peak), *self._key(c)), _NEAR)
        for candidate in (*self._promising_candidates(self._key, _FAST), *near):
            if id(candidate) not in reached and self._is_promising(candidate):
                reached[id(candidate)] = self._pass(candidate), candidate
        for _, candidate in sorted(reached.values(), key=lambda x: (nine_digits(x[0]), self._key(x[1])))[:_WAITING]:
            if self._is_promising(candidate):
                self._pass(candidate, self.task.memory_limit)

    def _pass(self, candidate: Candidate, limit: float | None = None) -> float:
        """Return the peak after the offload pass over a candidate, which is kept where it then fits."""
        setting = replace(candidate.setting, offload=True)
        self.on_trial(setting, self.best)
        done = offload_pass(candidate.schedule, candidate.costs, memory_limit=limit)
        if at_most(peak := max(done.peak_after), self.task.memory_limit):
            self._keep(Candidate.of(setting, done.schedule, candidate.costs))
        return peak

    def _promising_candidates(self, order: Callable[[Candidate], tuple[float, ...]], most: int) -> list[Candidate]:
        """Return distinct candidates that need too much memory and are faster than the best so far."""
        by_rows: dict[object, Candidate] = {}
        for candidate in sorted(filter(self._is_promising, self.too_large), key=order):
            by_rows.setdefault(candidate.schedule.rows, candidate)
        return list(by_rows.values())[:most]

    def _is_promising(self, candidate: Candidate) -> bool:
        """Return whether the candidate is faster than the best so far; no offload makes it faster than it is."""
        key = self._key(candidate)[:2]
        return key[0] < self.beat and (self.best is None or key < self._key(self.best)[:2])

    def _key(self, candidate: Candidate) -> tuple[float, float, float]:
        return candidate.key(self.task.objective)

    def _try(self, setting: Setting) -> None:
        self.on_trial(setting, self.best)
        try:
            candidate = make(setting, self.task)
        except ScheduleError as error:
            self.reasons.append(str(error))
            return
        may_offload = self.task.may_offload(candidate.costs)
        if not may_offload and offloaded_share(candidate.schedule, candidate.costs) > 0:
            self.reasons.append(f"{setting.family} {UNPRICED}")
            self.refused.add(setting.family)
        elif not self._is_too_large(setting, candidate.peak):
            self._keep(candidate)
        elif may_offload:
            self.too_large.append(candidate)
        else:
            # larger groups hold no less, and come later
            self.refused.add(replace(setting, group=None))

    def _is_too_large(self, setting: Setting, peak: float) -> bool:
        """Return whether a peak is above the limit, which is then a reason."""
        if at_most(peak, self.task.memory_limit):
            return False
        self.reasons.append(f"{setting.family} needs {peak:g} activations, limit {self.task.memory_limit:g}")
        return True

    def _least_peak(self, setting: Setting, costs: CostProfile) -> float:
        """Return a lower bound on the setting's peak: its family's closed form, which is for the family's own group, where
        nothing may be offloaded."""
        peak_of = FAMILIES[setting.family].peak_activations
        unlike = setting.group is not None or self.task.may_offload(costs) or len(set(costs.residual_bytes)) > 1
        if peak_of is None or unlike:
            return 0.0
        return peak_of(self.task.ranks, self.task.microbatches, setting.chunks) or 0.0

    def _keep(self, candidate: Candidate) -> None:
        if self.best is None or self._key(candidate) < self._key(self.best):
            self.best = candidate
            self.on_better(candidate)

    def _is_hopeless(self, setting: Setting) -> bool:
        """Return whether the family offloads and must not, a smaller group of it needs too much memory already, or no
        schedule of the setting's placement is shorter than the best so far."""
        task = self.task
        if not self.refused.isdisjoint((setting.family, replace(setting, group=None))):
            return True
        try:
            placement = FAMILIES[setting.family].placement(task.ranks, setting.chunks)
            costs = task.costs_for(placement)
            if self._is_too_large(setting, self._least_peak(setting, costs)):
                return True
            if self.best is None:
                return False
            if placement not in self.bounds:
                sizes, offload = (placement, task.microbatches, costs, task.memory_limit), task.may_offload(costs)
                self.bounds[placement] = bounds_within(*sizes, offload=offload)
        except ScheduleError:
            return False  # generating it says why
        # a bound no shorter than the best so far: nothing of this placement can win
        return order_key(task.objective, *self.bounds[placement], 0.0)[:2] >= self._key(self.best)[:2]


def bounds_within(
    placement: Placement, microbatches: int, costs: CostProfile, memory_limit: float | None, *, offload: bool
) -> tuple[float, float]:
    """Return lower bounds on makespan and span of any schedule of ``placement`` that keeps the limit (None or inf: no limit).

    Raises:
        ScheduleError: the costs are for another number of stages.
    """
    # schedules above the limit by rounding count as within it, so the bound must hold for them
    limit = None if memory_limit is None else memory_limit * (1 + MEMORY)
    return lower_bounds(placement, microbatches, costs, memory_limit=limit, offload=offload)


def best_of_family(family: Family, task: Task) -> Candidate:
    """Return the best setting of one family.

    Raises:
        ScheduleError: none of its settings works; says why the first one doesn't.
    """
    search = SettingSearch(task)
    if (best := search.run([family])) is not None:
        return best
    why = f"{family.name} has no placement with as many stages as the costs"
    if task.max_chunks is not None and family.default_chunks > task.max_chunks:
        why = f"{family.name} has {family.default_chunks} chunks per rank, more than the {task.max_chunks} allowed"
    reasons = search.reasons or [why]
    raise ScheduleError(reasons[0], reasons)


def best_schedule(
    ranks: int,
    microbatches: int,
    costs: Costs = None,
    memory_limit: float = float("inf"),
    *,
    chunks: int | None = None,
    group: int | None = None,
    offload: bool | None = None,
    objective: Objective = "makespan",
    families: Iterable[str] | None = None,
) -> Candidate:
    """Return the best feasible schedule of all families and their parameters; arguments as in :class:`Task`.

    ``families``: names to choose among; all by default. ``objective``: ``makespan``, or ``span`` (longest rank span, what
    counts when the optimizer step does not wait for the slowest rank).

    Raises:
        ScheduleError: no schedule keeps the limit; says the smallest limit that works.
    """
    return best_for(Task(ranks, microbatches, costs, memory_limit, chunks, group, offload, objective), families)


def best_for(
    task: Task, families: Iterable[str] | None = None, on_trial: OnTrial = lambda setting, best: None
) -> Candidate:
    """Run :func:`best_schedule` of a task; ``on_trial`` is told what is tried. The best so far where OutOfTimeError is raised
    meanwhile.

    Raises:
        ScheduleError: as :func:`best_schedule`, or there was no time to find anything.
    """
    chosen = cheap_first(FAMILIES[name] for name in FAMILIES if families is None or name in families)
    search = SettingSearch(task, on_trial=on_trial)
    try:
        search.run(chosen)
        if search.best is None:
            raise ScheduleError(_nothing(chosen, task))
    except OutOfTimeError:
        if search.best is None:
            raise ScheduleError(NO_TIME) from None
    return search.best


def _nothing(families: Iterable[Family], task: Task) -> str:
    """Explain why nothing keeps the limit, with the smallest limit that does."""
    candidates = []
    # families that take a limit give their leanest order under the least one
    for setting in chain.from_iterable(settings_of(family, replace(task, memory_limit=1.0)) for family in families):
        with contextlib.suppress(ScheduleError):
            candidate = make(setting, task)
            if task.may_offload(candidate.costs) or not offloaded_share(candidate.schedule, candidate.costs):
                candidates.append(candidate)
    if not candidates:
        return f"no family makes a schedule of {task.ranks} ranks and {task.microbatches} microbatches with these costs"
    peaks = [c.peak for c in candidates]
    lowest = {c.setting.chunks: c for c in sorted(candidates, key=lambda c: -c.peak)}
    peaks += [max(offload_pass(c.schedule, c.costs).peak_after) for c in lowest.values() if task.may_offload(c.costs)]
    return (
        f"no schedule of {task.ranks} ranks and {task.microbatches} microbatches keeps a memory limit of "
        f"{task.memory_limit:g}; the smallest found to work is {min(peaks):g}"
    )
