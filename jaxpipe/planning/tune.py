"""Find the best layout and schedule of a training config on so many devices by searching a
:class:`~jaxpipe.planning.space.Space`.

Source: FlexPipe (`flexpipe.txt`) section 6, a grid search. Here the grid is walked by lower bounds, the least first, and what
can't be shorter than the best found is left out, so the answer is that of the whole grid:

1. A *layout* (devices, microbatches, recomputation, vocabulary) begins with the work of its layers, divided evenly, as traces
   of one device tell it. Where what stays in memory needs too much, it ends here.
2. A layout whose turn comes is priced, with each number of stages that orders have, from traces that tell all microbatch
   sizes. Each placement of its stages gets the lower bound of all schedules there, plus the seconds of the update.
3. A placement whose turn comes gets all its orders, families and rules, simulated under real costs. Of the :data:`LEADERS`
   fastest that fit gradients are separated, where that could be the best, and the fastest that does not fit goes through the
   offload pass.

The best is predicted from exact traces then; where they tell another time, the search begins again with such ones alone.

Two processes may search: a fork takes the layouts that divide layers over shards, which share few traces with others. Each
knows the time of the best that the other has found.

Not tried: the solver (``jaxpipe solve``), uneven cuts by hand, a policy for each stage, sequence parallelism and ZeRO-1 other
than as the config has them.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxpipe._jax_compat import backends_initialized
from jaxpipe.axes import AXES, ROWS, exchanging
from jaxpipe.errors import JaxpipeError
from jaxpipe.interrupts import starting_children
from jaxpipe.planning.predict import Prediction, PricedPlan, pipeline_s, predict, price_plan, reduced_in_time
from jaxpipe.planning.space import (
    OrderSettings,
    Settings,
    Space,
    Status,
    TuneResult,
    TuneTrial,
    limit_in_activations,
    trial_key,
)
from jaxpipe.planning.stages import StageCosts, planner
from jaxpipe.schedule import CostProfile, Placement, Schedule, simulate
from jaxpipe.schedule.ir import W
from jaxpipe.schedule.memory import least_peaks, offloaded_share, static_bytes
from jaxpipe.schedule.passes import offload
from jaxpipe.schedule.placement import Edges, one_to_one, with_vocabulary
from jaxpipe.schedule.timeline import TIME, nine_digits
from jaxpipe.search.bounds import lower_bound, span_lower_bound
from jaxpipe.stage.compiled.compile import BuildCache
from jaxpipe.stage.model.plan import StagePlan
from jaxpipe.train.assemble import Planner, ScheduleDraft, choose, planned_order
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.schedule_source import barriers
from jaxpipe.train.settings.sections import TraverseConfig

LEADERS = 3
"""Orders of a placement whose gradients are separated: the fastest that fit with whole backwards."""
MIN_SAVED = 0.1
"""Fraction of equal layers' residuals that a recompute policy must save to be tried beside none."""
PROBE_TOLERANCE = 0.01
"""Fraction of a step by which a trace of its size may differ from a resized one before the search begins again without."""

_ONE_DEVICE_A_ROW: dict[str, Any] = {axis: 1 for axis in AXES if axis not in ROWS}
_REPLY_S = 0.5
"""Seconds that the second process has after an interrupt to send its results."""


def tune(
    space: Space,
    stage_costs: StageCosts,
    limit_bytes: float,
    progress: Callable[[str], None] = lambda text: None,
    time_limit_s: float = float("inf"),
    *,
    prune: bool = True,
    progress_s: float = 1.0,
    fork: bool = False,
) -> TuneResult:
    """Find the fastest candidate of ``space`` that needs at most ``limit_bytes`` on each device.

    ``stage_costs`` are those of the space's base; candidates on other shards get their own, which share its model. No trial
    starts after ``time_limit_s``. ``prune``: False simulates every candidate (to check the search). ``progress`` gets a line
    every ``progress_s`` seconds. ``fork``: a second process may help, where there is another core, and as long as JAX has not
    looked for devices: it has threads then, and can't be forked. Not where stages are timed: two processes would disturb each
    other. Ctrl-C ends the search with the best so far.
    """
    usual = gc.get_threshold()
    # traces are many objects that stay: looking through them for garbage takes a tenth of the time
    gc.set_threshold(100 * usual[0], *usual[1:])
    try:
        search = _LayoutSearch(space, stage_costs, limit_bytes, progress, time_limit_s, prune, progress_s)
        able = sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and not backends_initialized()
        search.fork = fork and prune and able
        tuned = search.run()
        if search.probe_was_wrong and not tuned.stopped:
            progress("layers do other work with other microbatch sizes: searching again, with a trace of each size")
            exact, left_s = replace(stage_costs, probes=False), time_limit_s - tuned.seconds
            tuned = _LayoutSearch(space, exact, limit_bytes, progress, left_s, prune, progress_s).run()
        return tuned
    finally:
        gc.set_threshold(*usual)


class _OutOfTimeError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Node:
    """Candidates that share a layout, with its ``config``, and a number of stages; where ``priced_plan`` is set, also their
    placement. ``update_s``: lower bound of the update's seconds. ``sharded``: the node's bound counts work that shards do not
    divide."""

    layout: Settings
    orders: tuple[OrderSettings, ...]
    config: TrainConfig
    priced_plan: PricedPlan | None = None
    update_s: float = 0.0
    sharded: bool = False

    @property
    def placement(self) -> Placement:
        return self.orders[0].placement

    @property
    def costs(self) -> CostProfile:
        assert self.priced_plan is not None
        return self.priced_plan.costs

    @property
    def settings(self) -> Settings:
        if self.priced_plan is None:
            return {**self.layout, "stages": self.placement.num_stages}
        return {**self.layout, "placement": self.placement.kind, "pipeline.chunks": self.placement.num_chunks}

    @property
    def size(self) -> int:
        """Number of candidates, each order once."""
        return len(self.orders)


@dataclass
class _LayoutSearch:
    space: Space
    stage_costs: StageCosts
    limit_bytes: float
    progress: Callable[[str], None]
    time_limit_s: float
    prune: bool
    progress_s: float
    trials: list[TuneTrial] = field(default_factory=list)
    best: TuneTrial | None = None
    probe_was_wrong: bool = False
    fork: bool = False
    shared: Any = None
    helper: Any = None
    interrupted: bool = False
    _offloaded_schedules: dict[int, Schedule] = field(default_factory=dict)
    _stage_costs_by_shards: dict[Any, StageCosts] = field(default_factory=dict)
    _planners: dict[Any, Planner] = field(default_factory=dict)
    _layer_costs: dict[Any, Any] = field(default_factory=dict)
    _drafts: dict[Any, ScheduleDraft] = field(default_factory=dict)
    _work: dict[Any, np.ndarray[Any, Any]] = field(default_factory=dict)
    _residual_bytes_by_size: dict[tuple[str, int], float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _last_progress_s: float = field(default_factory=time.monotonic)
    _simulated: int = 0

    def run(self) -> TuneResult:
        parts: tuple[list[Settings], ...] = ([], [])
        for layout in self.space.layouts():
            divided = any(layout.get(f"pipeline.{axis}", 1) > 1 for axis in exchanging())
            parts[self.fork and divided].append(layout)
        # before anything is traced: a fork is safe only while JAX has no threads
        connection = self._fork_search(parts[1]) if all(parts) else None
        stopped = self._search(parts[0])
        if connection is not None and not stopped:
            self._prediction()  # while the helper searches: this may be the best of all, and its traces are kept
        stopped = self._receive_results(connection, parts[1]) or stopped
        trial, best = self._prediction()
        spent_s = time.monotonic() - self._began
        return TuneResult(best, trial is not None and trial.offloaded, tuple(self.trials), spent_s, stopped)

    def _fork_search(self, layouts: Sequence[Settings]) -> Connection:
        """Start a process that searches these layouts; it sends its results over the connection."""
        context = multiprocessing.get_context("fork")
        self.shared, (receiver, sender) = context.Value("d", math.inf), context.Pipe(duplex=False)

        def run_helper() -> None:
            signal.set_wakeup_fd(-1)  # which is the parent's
            signal.signal(signal.SIGINT, self._interrupt)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            receiver.close()
            self.progress = lambda text: None
            stopped = self._search(layouts)
            with suppress(BrokenPipeError):  # nobody waits for it any more
                sender.send((stopped, [(trial, self._offloaded_schedules.get(id(trial))) for trial in self.trials]))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of NumPy's products
            self.helper = context.Process(target=run_helper, daemon=True)
            with starting_children():
                self.helper.start()
        sender.close()
        return receiver

    def _interrupt(self, *_: object) -> None:
        """Handle SIGINT in the other process: stop at the next trial and send the results."""
        self.interrupted = True

    def _receive_results(self, connection: Connection | None, layouts: Sequence[Settings]) -> str:
        """Receive the other process's results for these layouts and return why it stopped; search them here if it is gone."""
        try:
            if self.interrupted and connection is not None:
                os.kill(self.helper.pid, signal.SIGINT)  # a terminal sends Ctrl-C to both, kill -INT to this one only
                if not connection.poll(_REPLY_S):
                    return "interrupted"
            stopped, results = connection.recv() if connection is not None else (self._search(layouts), [])
        except EOFError:  # it has ended
            return self._search(layouts)
        except KeyboardInterrupt:
            return "interrupted"
        for trial, moved in results:
            self.trials.append(trial)
            if moved is not None:
                self._offloaded_schedules[id(trial)] = moved
        return str(stopped)

    def _search(self, layouts: Iterable[Settings]) -> str:
        """Search these layouts and return why the search stopped early, or an empty string."""
        heap: list[tuple[float, int, _Node]] = []
        numbers = itertools.count()  # breaks ties, as nodes have no order
        stopped = ""
        try:
            for layout in layouts:
                self._check_time()
                for bound, node in self._expand_layout(layout):
                    heapq.heappush(heap, (bound, next(numbers), node))
            # best first: the heap's least bound holds for all that is left, so if it can't beat the best nothing can
            while heap and not self._cannot_win(heap[0][0]):
                self._check_time()
                bound, _, node = heapq.heappop(heap)
                if node.priced_plan is not None:
                    self._try_all(node, bound)
                    continue
                for placement_bound, placed in self._expand(node):
                    heapq.heappush(heap, (max(bound, placement_bound), next(numbers), placed))
        except (_OutOfTimeError, KeyboardInterrupt) as error:
            self.interrupted = isinstance(error, KeyboardInterrupt)
            stopped = "interrupted" if self.interrupted else "out of time"
        for bound, _, node in sorted(heap):
            slower = self._cannot_win(bound)
            reason = "no schedule there takes a step in less than bound_s" if slower else stopped
            self._reject(node.settings, "slower" if slower else "not reached", node.size, bound_s=bound, reason=reason)
        return stopped

    # -- from layouts to placements ------------------------------------------------------------------------------------

    def _expand_layout(self, layout: Settings) -> Iterator[tuple[float, _Node]]:
        """Yield the layout with each number of stages for which parameters and optimizer state fit, and a lower bound of
        the step time; record why the others can't be."""
        by_stages: dict[int, list[OrderSettings]] = {}
        for order in (all_orders := self.space.orders(layout)):
            by_stages.setdefault(order.placement.num_stages, []).append(order)
        try:
            config = self.space.config(layout)
        except JaxpipeError as error:
            self._refuse(layout, len(all_orders), error)
            return
        for orders in by_stages.values():
            node = _Node(layout, tuple(orders), config)
            try:
                plan = self._planner(config)(node.placement.num_stages)
                static = min(self._least_static(layout, plan, placement) for placement in {o.placement for o in orders})
                if static > self.limit_bytes:
                    self._too_large(node, static)
                elif (least_s := self._least_s(config)) is None:
                    reason = f"recompute={config.pipeline.recompute} saves too little of a layer"
                    self._reject(node.settings, "slower", node.size, reason=reason)
                else:
                    # the update at least reads and writes each static byte
                    rate = self.stage_costs.target.memory_bytes_per_s * self.stage_costs.efficiency.bandwidth
                    yield least_s + 2 * static / rate, replace(node, update_s=2 * static / rate)
            except JaxpipeError as error:
                self._refuse(node.settings, node.size, error)

    def _least_s(self, config: TrainConfig) -> float | None:
        """Return a lower bound of the pipeline's seconds, its work divided evenly; None where recomputation saves too little.

        Dividing all work by the number of devices gives a bound, as tensor and context parallelism divide products and
        arrays by at most their shards, and launches of kernels not at all.
        """
        pipe = config.pipeline
        size, policy = config.microbatch_size // pipe.dp, str(pipe.recompute)
        beside = any(axis.key == "pipeline.recompute" and "none" in axis.values for axis in self.space.axes)
        if (
            policy != "none"
            and beside
            and self._residual_bytes(policy, size) > self._residual_bytes("none", size) * (1 - MIN_SAVED) > 0
        ):
            return None
        return float(pipe.microbatches * _least_seconds(self._work_of(config)) / (pipe.num_devices // pipe.dp))

    def _work_of(self, config: TrainConfig) -> np.ndarray[Any, Any]:
        """Sum the seconds of all stages (:attr:`~jaxpipe.planning.stages.PlannedStage.seconds`) for one microbatch of a
        replica, without tensor and context parallelism. With the vocabulary at the ends all layers are priced as one stage,
        which is a bound: cutting splits kernels and makes none shorter."""
        pipe, ends = config.pipeline, config.pipeline.vocabulary == "ends"
        size, devices = config.microbatch_size // pipe.dp, pipe.num_devices // pipe.dp
        unsharded = replace(pipe, ranks=1 if ends else devices, **_ONE_DEVICE_A_ROW, schedule="1f1b", chunks=1)
        key = unsharded.ranks, pipe.vocabulary, size, str(pipe.recompute), pipe.ep
        if key not in self._work:
            other = replace(config, pipeline=replace(unsharded, traverse=TraverseConfig()))
            stage_costs, stages = self._stage_costs_for(other), 1
            if not ends:
                stages = with_vocabulary(one_to_one(devices), barriers=barriers(pipe.vocabulary)).num_stages
            cut = self._planner(other)(stages).cut
            priced_stages = () if not stage_costs.probes else stage_costs.stages(cut, str(pipe.recompute), size)
            self._work[key] = sum((x.seconds for x in priced_stages), np.zeros(3))
        return self._work[key]

    def _sharded_s(self, node: _Node) -> float:
        """Tighten :meth:`_least_s`: shards do not divide all work of a layer, so layers behind an equal one count at their
        cost on so many shards, which takes few traces."""
        config, pipe = node.config, node.config.pipeline
        size, policy, shards = config.microbatch_size // pipe.dp, str(pipe.recompute), pipe.mesh.one_row.num_devices
        ends = replace(pipe, vocabulary="ends")
        alone = replace(ends, **_ONE_DEVICE_A_ROW)
        unsharded, sharded = (
            self._stage_costs_for(replace(config, pipeline=x)).run_increments(policy, size) for x in (alone, ends)
        )
        rest, further_s = self._work_of(config), 0.0
        for run in unsharded.keys() & sharded.keys():
            (layers, *one), (_, *many) = unsharded[run], sharded[run]
            # the first layers of a stage have other neighbours, so no increment bounds their cost
            further = max(0, layers - 2 * node.placement.num_stages)
            rest = rest - further * (one[1].seconds - one[0].seconds)
            further_s += further * _least_seconds(many[1].seconds - many[0].seconds)
        return pipe.microbatches * (further_s + _least_seconds(rest) / shards) / pipe.ranks

    def _residual_bytes(self, recompute: str, size: int) -> float:
        """Return the bytes that all equal layers of the model keep for the backward pass of one microbatch."""
        if (recompute, size) not in self._residual_bytes_by_size:
            steps = self.stage_costs.run_increments(recompute, size).values()
            run_bytes = (n * (two.sizes.residual_bytes - one.sizes.residual_bytes) for n, one, two in steps)
            self._residual_bytes_by_size[recompute, size] = sum(run_bytes)
        return self._residual_bytes_by_size[recompute, size]

    def _expand(self, node: _Node) -> Iterator[tuple[float, _Node]]:
        """Yield the node with a tighter bound if its ranks have several shards; the next time priced, one node a placement with
        its bound."""
        try:
            # two steps, as the first needs few traces and often sends the node so far back that the second is never made
            if not node.sharded and node.config.pipeline.mesh.divided:
                yield self._sharded_s(node) + node.update_s, replace(node, sharded=True)
                return
            config, stage_costs = node.config, self._stage_costs_for(node.config)
            plan = self._planner(config)(node.placement.num_stages)
            priced_plan = price_plan(config, stage_costs, plan, self.limit_bytes)
        except JaxpipeError as error:
            self._refuse(node.settings, node.size, error)
            return
        by_placement: dict[Placement, list[OrderSettings]] = {}
        for order in node.orders:
            by_placement.setdefault(order.placement, []).append(order)
        for placement, orders in by_placement.items():
            ahead = 0 if config.pipeline.vocabulary in ("ends", "joint") else barriers(config.pipeline.vocabulary)
            least = _least_bytes(placement, priced_plan.costs, min(ahead + 1, config.pipeline.microbatches))
            update_s, _ = priced_plan.update_s(
                config, stage_costs, placement, static_bytes(placement, priced_plan.costs)
            )
            placed_node = replace(node, orders=tuple(orders), priced_plan=priced_plan, update_s=update_s)
            if least > self.limit_bytes:
                self._too_large(placed_node, least)
                continue
            bound = lower_bound if config.pipeline.passes.post_validation == "off" else span_lower_bound
            # behind the last W of all comes the reduction of its stage
            last_s = min(priced_plan.costs.reduce_s) if placement.num_flows == 1 else 0.0
            yield bound(placement, config.pipeline.microbatches, priced_plan.costs) + last_s + update_s, placed_node

    def _refuse(self, settings: Settings, candidates: int, error: JaxpipeError) -> None:
        self._reject(settings, "refused", candidates, reason=" ".join(str(error).split()))

    def _too_large(self, node: _Node, least: float) -> None:
        reason = f"parameters, optimizer state and one backward pass need at least {least / 1e9:.1f} GB"
        self._reject(node.settings, "too large", node.size, reason=reason)

    def _least_static(self, layout: Settings, plan: StagePlan, placement: Placement) -> float:
        """Return a lower bound of the fullest rank's static bytes, from its number of parameters."""
        if any(layer.frozen or layer.trainable is not None for layer in self.stage_costs.model.layers):
            return 0.0
        base, ep = self.space.base, layout.get("pipeline.ep", 1)
        parts_of_params = layout["pipeline.tp"] * ep
        # bytes a parameter in the compute dtype and in its master copy, which float32 compute does not need
        computed, masters = (2, 4) if base.run.dtype == "bfloat16" else (4, 0)
        parts = layout["pipeline.dp"] if base.pipeline.sharding.zero1 else 1
        # 4: the float32 gradient accumulator, which ZeRO-1 does not divide
        each = computed + 4 + (masters + self.stage_costs.least_state_bytes) / parts
        ranks = (placement.stages_of(r) for r in range(placement.num_ranks))
        return float(max(sum(plan.stages[s].num_params for s in mine) for mine in ranks) * each / parts_of_params)

    # -- orders of a placement -----------------------------------------------------------------------------------------

    def _try_all(self, node: _Node, bound: float) -> None:
        """Try every order of the placement; then separate weight gradients of the leaders, and offload the fastest that is
        too large."""
        simulated: list[tuple[TuneTrial, OrderSettings, Schedule]] = []
        trial_by_rows: dict[object, TuneTrial] = {}
        for k, order in enumerate(node.orders):
            settings = {**node.layout, **order.settings}
            try:
                self._check_time()
                schedule = self._schedule(node, settings, order, bound)
            except (_OutOfTimeError, KeyboardInterrupt):
                self._reject(node.settings, "not reached", len(node.orders) - k, bound_s=bound)
                raise
            if schedule is None:
                continue
            # different rules may give the same rows: simulate these once
            if (twin := trial_by_rows.get(schedule.rows)) is not None:
                same = replace(twin, settings=settings, status="same", reason=f"as {_settings_text(twin.settings)}")
                self.trials.append(same)
                continue
            trial_by_rows[schedule.rows] = trial = self._simulate(node, settings, schedule, bound)
            simulated.append((trial, order, schedule))
        simulated.sort(key=lambda x: nine_digits(x[0].step_s or 0.0))
        # separated gradients fill bubbles, of which a single rank has none
        fused = [x for x in simulated if x[0].status == "fits" and not _splits(x[2])]
        for _, order, draft in fused[:LEADERS] if node.placement.num_ranks > 1 else ():
            self._check_time()
            settings = {**node.layout, **order.settings, "pipeline.separate_gradients": True}
            least = max(bound, self._separated_s(node, draft))
            if self._cannot_win(least):
                reason = "wherever gradients of weights are computed, no step in this order takes less than bound_s"
                self._reject(settings, "slower", bound_s=least, reason=reason)
            elif (schedule := self._schedule(node, settings, order, least)) is not None:
                self._simulate(node, settings, schedule, least)
        ends = node.layout["pipeline.vocabulary"] == "ends"  # else no file can hold the schedule
        large = (x for x in simulated if x[0].status == "too large" and not offloaded_share(x[2], node.costs))
        for trial, order, schedule in itertools.islice(large, int(ends)):
            self._check_time()
            self._offload(node, {**node.layout, **order.settings}, schedule, trial, bound)

    def _separated_s(self, node: _Node, schedule: Schedule) -> float:
        """Return a lower bound of the step with separated weight gradients: nothing but gradients of weights changes its
        place on a rank, so it takes no less without these; and no rank takes less than all its work, from where it
        starts."""
        if self.space.base.pipeline.passes.post_validation != "off":
            return 0.0
        costs, m = node.costs, schedule.num_microbatches
        # the order of F and B with free W, and each B as short as either form allows
        passed = tuple(map(min, costs.b_s, costs.bw_s))
        none = (0.0,) * costs.num_stages
        timeline = simulate(schedule, replace(costs, b_s=passed, bw_s=passed, w_s=none))
        least_s = [f + min(bw, b + w) for f, b, w, bw in zip(costs.f_s, costs.b_s, costs.w_s, costs.bw_s, strict=True)]
        p = node.placement
        ranks = (
            min(e.start_s for e in timeline.of(r, "compute"))
            + sum(m / p.num_flows * least_s[s] for s in p.stages_of(r))
            for r in range(p.num_ranks)
        )
        return max(timeline.makespan, *ranks) + node.update_s

    def _offload(self, node: _Node, settings: Settings, schedule: Schedule, trial: TuneTrial, bound: float) -> None:
        units = limit_in_activations(node.placement, node.costs, self.limit_bytes)
        if self._cannot_win(trial.step_s or 0.0):
            reason = "offload makes no schedule faster, and as it is this is slower than the best"
            self._reject(settings, "slower", bound_s=trial.step_s, offloaded=True, reason=reason)
        elif units > 0:
            moved = offload(schedule, node.costs, memory_limit=units).schedule
            self._simulate(node, settings, moved, bound, offloaded=True)

    def _schedule(self, node: _Node, settings: Settings, order: OrderSettings, bound: float) -> Schedule | None:
        """Return the final schedule of a candidate; if there is none, record the reason and return None."""
        assert node.priced_plan is not None
        plan = node.priced_plan.plan
        costs = [s.cost for s in plan.stages]
        try:
            config = self.space.config(settings)
            pipe = config.pipeline
            # an order depends on how stages' costs compare, not on how large they are, so microbatch sizes share drafts
            relative = tuple(x / (max(costs) or 1) for x in costs)
            key = (tuple(order.settings.items()), pipe.ranks, pipe.microbatches, pipe.vocabulary, relative)
            if key not in self._drafts:
                model = self._stage_costs_for(config).model
                self._drafts[key], _ = choose(pipe, model, self._planner(config))
            return planned_order(pipe, self._drafts[key], node.costs)
        except JaxpipeError as error:
            self._reject(settings, "refused", bound_s=bound, reason=" ".join(str(error).split()))
            return None

    def _simulate(
        self, node: _Node, settings: Settings, schedule: Schedule, bound: float, offloaded: bool = False
    ) -> TuneTrial:
        static = static_bytes(node.placement, node.costs)
        if node.layout["pipeline.vocabulary"] != "ends":  # else the offload pass may make them fit
            least = tuple(map(round, map(sum, zip(static, least_peaks(schedule, node.costs), strict=True))))
            if max(least) > self.limit_bytes:
                self.trials.append(trial := TuneTrial(settings, "too large", bound_s=bound, peak_bytes=least))
                return trial
        timeline = simulate(reduced_in_time(schedule, node.costs), node.costs)
        self._simulated += 1
        step_s = pipeline_s(timeline, self.space.base.pipeline) + node.update_s
        peaks = tuple(round(n + curve.peak) for n, curve in zip(static, timeline.memory, strict=True))
        base = self.space.base
        trial = TuneTrial(
            settings, "fits" if max(peaks) <= self.limit_bytes else "too large", 1, bound, step_s,
            base.run.batch * base.data.seq_len / step_s, peaks, offloaded,
        )  # fmt: skip
        self.trials.append(trial)
        if trial.status == "fits" and (self.best is None or trial_key(trial) < trial_key(self.best)):
            self.best = trial
            if self.shared is not None:
                with self.shared.get_lock():
                    self.shared.value = min(self.shared.value, step_s)
        if offloaded:
            self._offloaded_schedules[id(trial)] = schedule
        return trial

    # -- small things --------------------------------------------------------------------------------------------------

    def _reject(self, settings: Settings, status: Status, candidates: int = 1, **facts: Any) -> None:
        self.trials.append(TuneTrial(settings, status, candidates, **facts))

    def _cannot_win(self, bound_s: float) -> bool:
        best = math.inf if self.best is None else self.best.step_s or 0.0
        return self.prune and bound_s >= (best if self.shared is None else min(best, self.shared.value)) * (1 - TIME)

    def _check_time(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        now = time.monotonic()
        if now - self._began > self.time_limit_s:
            raise _OutOfTimeError
        if now - self._last_progress_s >= self.progress_s:
            self._last_progress_s = now
            best = "nothing that fits yet"
            if self.best is not None:
                best = f"best so far {self.best.tokens_per_s:,.0f} tokens/s ({_settings_text(self.best.settings)})"
            self.progress(f"{now - self._began:7.1f} s  {self._simulated} schedules simulated; {best}")

    def _stage_costs_for(self, config: TrainConfig) -> StageCosts:
        """Return the stage costs for the config's shards and for its model, with vocabulary layers where the config puts them.
        Stage costs of the same shards share traces."""
        pipe, shards = config.pipeline, config.pipeline.mesh.one_replica
        spread = (pipe.ranks, pipe.vocabulary) if pipe.vocabulary != "ends" else None
        if spread is None and shards == self.stage_costs.shards:
            return self.stage_costs
        if (shards, spread) not in self._stage_costs_by_shards:
            if spread is not None:
                alike = self._stage_costs_for(replace(config, pipeline=replace(pipe, vocabulary="ends")))
                self._stage_costs_by_shards[(shards, spread)] = alike.over(pipe)
            else:
                self._stage_costs_by_shards[(shards, spread)] = replace(
                    self.stage_costs,
                    shards=shards,
                    cache=BuildCache(),
                    _stages_by_kind={},
                    _traces_by_kind={},
                    _keys_by_cut={},
                    _increments={},
                )
        return self._stage_costs_by_shards[(shards, spread)]

    def _planner(self, config: TrainConfig) -> Planner:
        """Return a cached planner that cuts the model as training does; FLOPs grow with the microbatch, so any size gives
        the same cut."""
        model = self._stage_costs_for(config).model
        if id(model) not in self._planners:
            plan, plans = planner(config, model, self._layer_costs), dict[Any, StagePlan]()

            def once(num_stages: int, edges: Edges | None = None) -> StagePlan:
                if (num_stages, edges) not in plans:
                    plans[(num_stages, edges)] = plan(num_stages, edges)
                return plans[(num_stages, edges)]

            self._planners[id(model)] = once
        return self._planners[id(model)]

    def _prediction(self) -> tuple[TuneTrial, Prediction] | tuple[None, None]:
        """Return the fastest candidate that also fits when predicted as ``plan`` does, and that prediction."""
        self.probe_was_wrong = False
        for trial in sorted((t for t in self.trials if t.status == "fits"), key=trial_key):
            config = self.space.config(trial.settings)
            stage_costs, moved = (
                replace(self._stage_costs_for(config), probes=False),
                self._offloaded_schedules.get(id(trial)),
            )
            transform = None if moved is None else lambda *_, schedule=moved: schedule
            prediction = predict(config, stage_costs, self.limit_bytes, transform, planned=self._planner(config))
            simulated_s = trial.step_s or 0.0
            self.probe_was_wrong |= abs(prediction.step_s - simulated_s) > PROBE_TOLERANCE * simulated_s
            if prediction.fits:
                return trial, prediction
        return None, None


def _least_seconds(seconds: np.ndarray[Any, Any]) -> float:
    """Return the least seconds of a forward and a backward, split or fused."""
    return float(seconds[0] + seconds[1:].min())


def _splits(schedule: Schedule) -> bool:
    """Return whether the schedule separates weight gradients already."""
    return any(a.op == W.name for a in schedule.actions())


def _least_bytes(placement: Placement, costs: CostProfile, forwards: int) -> float:
    """Return a lower bound of the fullest rank's bytes in any schedule: static bytes, and one backward pass, split or not, of
    one microbatch. Where the vocabulary is spread over ranks, ``forwards`` microbatches (one more than there are barriers)
    have passed all stages of a rank before the first backward of its last stage."""
    temp = dict(costs.temp_bytes)
    none = (0.0,) * costs.num_stages
    b, w, bw = (temp.get(op, none) for op in ("B", "W", "BW"))
    res, wres = costs.residual_bytes, costs.w_residual_bytes
    least = [min(res[s] + bw[s], max(res[s] + b[s], wres[s] + w[s])) for s in range(costs.num_stages)]

    def beside(stages: Collection[int]) -> float:
        trunk = [s for s in stages if forwards > 1 and s in placement.trunk]
        first = forwards * sum(res[s] for s in trunk) + min(bw[trunk[-1]], b[trunk[-1]]) if trunk else 0.0
        return max([first, *(least[s] for s in stages)])

    static = static_bytes(placement, costs)
    return max(n + beside(placement.stages_of(r)) for r, n in enumerate(static))


def _settings_text(settings: Settings) -> str:
    """Format the settings in one line, without those at their defaults."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
