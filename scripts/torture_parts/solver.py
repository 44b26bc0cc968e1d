"""R25: solves are no worse than the families they know, and simulator, bounds and passes mean one thing by a link and a limit.

The second opinion on links is a fixed point: every action starts as early as its row and its inputs allow, every transfer as
early as its producer and the one before it on its pair of ranks, whose bytes must have left; a latency comes on top.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torture_parts.trial import Bench, Case, FailedError, Trial

FIRST = ("gis", "gis-h", "zb-h1", "po-f", "po-h", "ada-offload")
_ANY = (
    "1f1b",
    "gpipe",
    "zb-h1",
    "interleaved-1f1b",
    "chimera",
    "v-half",
    "hanayo",
    "gis",
    "po",
    "looped-bfs",
    "dualpipe-v",
)
_CLOSE = 1e-9


def cases(bench: Bench) -> Iterator[Case]:
    for _ in range(bench.count(1200, 60)):
        yield Case("links", _links)
    for _ in range(bench.count(800, 40)):
        yield Case("tight limits", _limit)
    for _ in range(bench.count(30, 1)):
        yield Case("solves", _solve)


def _schedule(rng: random.Random, names: tuple[str, ...], most: int) -> tuple[Any, Any]:
    """Return a schedule of a family at random sizes, and random costs of its stages."""
    from jaxpipe.errors import JaxpipeError
    from jaxpipe.schedule import FAMILIES, CostProfile, HostLink, Link, generate

    while True:
        name, p, m, chunks = rng.choice(names), rng.randint(1, most), rng.randint(1, 3 * most), rng.randint(1, 3)
        try:
            schedule = generate(name, p, m, chunks if "chunks" in FAMILIES[name].options else None)
        except JaxpipeError:
            continue
        n = schedule.num_stages

        def row(least: float, most: float, n: int = n) -> tuple[float, ...]:
            return tuple(rng.choice((least, most, rng.uniform(least, most))) for _ in range(n))

        f, b, w = row(0.5, 2), row(0.5, 2), row(0.0, 2)
        links = [(r, t) for r in range(p) for t in range(p) if r != t and rng.random() < 0.3]
        return schedule, CostProfile(
            f, b, w, tuple(x + y for x, y in zip(b, w, strict=True)), (1.0,) * n, (rng.choice((0.3, 1.0)),) * n,
            boundary_bytes=row(0, 4), offload_s=row(0.2, 3), load_s=row(0.2, 3),
            link=Link(rng.choice((0.0, 0.3, 5.0)), rng.choice((1.0, 2.0, float("inf")))),
            links=tuple((pair, Link(rng.choice((0.0, 2.0)), rng.choice((0.5, 3.0)))) for pair in links),
            host=HostLink(mode=rng.choice(("shared", "duplex"))),
        )  # fmt: skip


def _links(trial: Trial) -> None:
    """Simulator against the fixed point; the retimer agrees, and no bound is above it."""
    from jaxpipe.schedule import simulate
    from jaxpipe.schedule.problem import Problem
    from jaxpipe.search.bounds import lower_bound
    from jaxpipe.search.retime import Retimer

    schedule, costs = _schedule(trial.rng, _ANY, 5)
    makespan, slow = simulate(schedule, costs).makespan, fixed_point(schedule, costs)
    if abs(makespan - slow) > _CLOSE * slow:
        raise FailedError(f"{schedule.name}: simulated {makespan!r}, fixed point {slow!r}\n{schedule}\n{costs}")
    bound = lower_bound(schedule.placement, schedule.num_microbatches, costs)
    if bound > makespan * (1 + _CLOSE):
        raise FailedError(f"{schedule.name}: bound {bound!r} above {makespan!r}\n{costs}")
    problem = Problem.of(schedule.placement, schedule.num_microbatches, costs)
    retimed = Retimer(problem).draft(problem.codes(schedule))
    if retimed is None or abs(retimed.makespan - makespan) > _CLOSE * makespan:
        raise FailedError(f"{schedule.name}: retimed {retimed}, simulated {makespan!r}\n{costs}")


def fixed_point(schedule: Any, costs: Any) -> float:
    """Return the makespan, by sweeps over all actions until no time changes."""
    placement, n = schedule.placement, schedule.num_stages
    rank = {(s, i): placement.ranks(s, i)[0] for s in range(n) for i in range(schedule.num_microbatches)}
    backward = {(a.stage, a.microbatch): a.op for a in schedule.actions() if a.op in ("B", "BW")}
    end: dict[Any, float] = {}
    sent: dict[tuple[int, int], list[tuple[Any, int]]] = {}  # by pair: what moves, in issue order, and its boundary
    for r, row in enumerate(schedule.rows):
        for a in row:
            neighbour = a.stage + 1 if a.op == "F" else a.stage - 1
            if a.op != "W" and 0 <= neighbour < n and rank[neighbour, a.microbatch] != r:
                sent.setdefault((r, rank[neighbour, a.microbatch]), []).append((a, min(a.stage, neighbour)))
    links, seconds = dict(costs.links), {"F": costs.f_s, "B": costs.b_s, "W": costs.w_s, "BW": costs.bw_s}
    arrives: dict[Any, float] = {}
    while True:
        before = dict(end)
        for pair, moved in sent.items():
            link, free = links.get(pair, costs.link), 0.0
            for a, boundary in moved:
                begin = max(free, end.get(a, 0.0))
                free = begin + costs.boundary_bytes[boundary] / link.bytes_per_s
                arrives[a] = free + link.latency_s
        for row in schedule.rows:
            now = 0.0
            for a in row:
                i, s = a.microbatch, a.stage
                inputs = [type(a)("F", s, i)] if a.op != "F" else []
                inputs += [type(a)("F", s - 1, i)] if a.op == "F" and s else []
                inputs += [type(a)(backward[s + 1, i], s + 1, i)] if a.op in ("B", "BW") and s + 1 < n else []
                inputs += [type(a)("B", s, i)] if a.op == "W" else []
                ready = (arrives[x] if rank[x.stage, i] != rank[s, i] else end.get(x, 0.0) for x in inputs)
                now = end[a] = max([now, *ready]) + seconds[a.op][s]
        if end == before:
            return max(end.values())


def _limit(trial: Trial) -> None:
    """The offload pass under a limit: valid, never above what it says it meets, and back to what it was without offloads."""
    from jaxpipe.schedule import check_schedule, simulate
    from jaxpipe.schedule.passes import offload
    from jaxpipe.schedule.passes.offload import without_offloads

    schedule, costs = _schedule(trial.rng, (*_ANY, "po-f"), 4)
    limit = trial.rng.uniform(0.4, 1.0) * max(simulate(schedule, costs).peak_activations)
    moved = offload(schedule, costs, memory_limit=limit)
    check_schedule(moved.schedule)
    peak = max(simulate(moved.schedule, costs).peak_activations)
    if moved.limit_met is not (peak <= limit * (1 + _CLOSE)):
        raise FailedError(f"{schedule.name}: limit {limit!r}, peak {peak!r}, said {moved.limit_met}\n{costs}")
    if not moved.limit_met:
        trial.tried["limit not met"] += 1
    if sorted(map(str, without_offloads(moved.schedule).actions())) != sorted(
        map(str, without_offloads(schedule).actions())
    ):
        raise FailedError(f"{schedule.name}: other actions after the pass\n{costs}")
    trial.tried["tight limits"] += 1


def _solve(trial: Trial) -> None:
    """No worse than each of six families on each placement, alone or through the offload pass."""
    from jaxpipe.errors import JaxpipeError
    from jaxpipe.search.solve import Options
    from jaxpipe.search.solve.solver import solve_any

    tasks = random_tasks(trial.rng)
    best, who = best_family(tasks)
    try:
        value = solve_any(tasks, Options(3.0, workers=1)).value
    except JaxpipeError:
        value = float("inf")
    if value > best * (1 + _CLOSE):
        raise FailedError(f"solved in {value!r}, {who} takes {best!r}: {tasks}")


def random_tasks(rng: random.Random, most: int = 8) -> list[Any]:
    """One offload task of at most so many ranks, on five placements."""
    from jaxpipe.schedule import CostProfile
    from jaxpipe.schedule.placement import circular, one_to_one, v_shape
    from jaxpipe.search.solve import SolveTask

    p = rng.randint(3, most)
    m, limit, comm = rng.randint(2, 4 * p), rng.uniform(0.25, 1) * p, rng.choice((0.0, 0.05, 0.3))
    f, b, w = rng.choice(
        ((1, 1, 1), (25.92, 26.44, 19.52), (rng.uniform(0.8, 1.2), rng.uniform(0.8, 1.6), rng.uniform(0.5, 1.1)))
    )
    k, mode, spread, seed = (
        rng.uniform(0.5, 2),
        rng.choice(("shared", "duplex")),
        rng.choice((0, 0.02, 0.3)),
        rng.random(),
    )
    tasks = []
    for placement in (one_to_one(p), circular(p, 1), v_shape(p), circular(p, 2), circular(p, 3)):
        costs = CostProfile.uniform(
            placement.num_stages, chunks=placement.num_chunks, f=f, b=b, w=w, comm=comm * f, offload_time=k * (f + b + w),
            host_mode=mode,
        )  # fmt: skip
        uneven = random.Random(seed)
        rows = [
            tuple(x * (1 + spread * uneven.uniform(-1, 1)) for x in row) for row in (costs.f_s, costs.b_s, costs.w_s)
        ]
        bw_s = tuple(x + y for x, y in zip(*rows[1:], strict=True))
        costs = replace(costs, f_s=rows[0], b_s=rows[1], w_s=rows[2], bw_s=bw_s)
        tasks.append(SolveTask(placement, m, costs, limit, offload=True))
    return tasks


def best_family(tasks: list[Any]) -> tuple[float, str]:
    """Seconds of the best of :data:`FIRST`, as it is and through the offload pass, and which it is."""
    from jaxpipe.errors import JaxpipeError
    from jaxpipe.schedule import FAMILIES, generate
    from jaxpipe.schedule.passes import offload

    best = float("inf"), "no family"
    for task in tasks:
        placement, limit = task.placement, task.memory_limit
        for family in (FAMILIES[name] for name in FIRST):
            try:
                if family.placement(placement.num_ranks, placement.num_chunks) != placement:
                    continue
                family_limit = limit if "memory_limit" in family.options else None
                chunks = placement.num_chunks if "chunks" in family.options else None
                generated = generate(
                    family.name, placement.num_ranks, task.num_microbatches, chunks, task.costs, family_limit
                )
            except JaxpipeError:
                continue
            moved = offload(generated, task.costs).schedule, offload(generated, task.costs, memory_limit=limit).schedule
            for schedule in (generated, *moved):
                if (timeline := task.timeline_of(schedule)) is not None:
                    best = min(
                        best, (task.seconds(timeline), f"{family.name} on {placement.kind} {placement.num_chunks}")
                    )
    return best
