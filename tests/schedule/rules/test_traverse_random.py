"""Random placements × rules × limits × costs: a valid schedule within its limits, or one line; the same rows twice."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    Action,
    CostProfile,
    Link,
    Placement,
    Schedule,
    Traversal,
    bidirectional,
    chain,
    check_schedule,
    circular,
    one_to_one,
    simulate,
    traverse,
    v_shape,
    wave,
)
from jaxpipe.schedule.rules import Check, Choose, Rules, View


def random_placement(rng: random.Random) -> Placement:
    """Return a placement: chains of every kind, DAGs with several sources and sinks, stages on overlapping groups of ranks,
    one flow or two."""
    p = rng.randint(1, 4)
    v = rng.randint(1, 3 if p < 4 else 2)
    base = rng.choice(
        [one_to_one(p), circular(p, v), wave(p, v), v_shape(p), bidirectional(p), _two_flows(rng, p), _anywhere(rng, p)]
    )
    flows, edges = base.flows, base.edges
    if rng.random() < 0.4:
        shared = {
            s: tuple(rng.sample(range(p), rng.randint(1, p))) for s in range(base.num_stages) if rng.random() < 0.3
        }
        flows = tuple(
            tuple(tuple(dict.fromkeys(flow[s] + shared.get(s, ()))) for s in range(len(flow))) for flow in flows
        )
    if rng.random() < 0.5:
        order = rng.sample(range(base.num_stages), base.num_stages) if rng.random() < 0.5 else range(base.num_stages)
        edges = tuple(
            (order[a], order[b])
            for a in range(base.num_stages)
            for b in range(a + 1, base.num_stages)
            if rng.random() < (0.6 if b == a + 1 else 0.15)
        )
    return Placement("random", p, flows, edges)


def _two_flows(rng: random.Random, p: int) -> Placement:
    stages = rng.randint(p, p + 3)
    flows = tuple(tuple((r,) for r in _covering(rng, p, stages)) for _ in range(rng.randint(2, 3)))
    return Placement("flows", p, flows, chain(stages))


def _anywhere(rng: random.Random, p: int) -> Placement:
    stages = rng.randint(p, p + 4)
    return Placement("anywhere", p, (tuple((r,) for r in _covering(rng, p, stages)),), chain(stages))


def _covering(rng: random.Random, p: int, stages: int) -> list[int]:
    ranks = [*range(p), *(rng.randrange(p) for _ in range(stages - p))]
    rng.shuffle(ranks)
    return ranks


def replicas_on(placement: Placement, rank: int) -> int:
    return sum(rank in group for flow in placement.flows for group in flow)


def random_costs(rng: random.Random, n: int) -> CostProfile | None:
    if rng.random() < 0.4:
        return None

    def each(choices: list[float]) -> tuple[float, ...]:
        return tuple(rng.choice(choices) for _ in range(n))

    times = [0.0, 0.5, 1.0, 1.0, 2.0, 3.0] if rng.random() < 0.3 else [0.5, 1.0, 1.25, 2.0]
    return CostProfile(
        f_s=each(times), b_s=each(times), w_s=each(times), bw_s=each(times), residual_bytes=(1.0,) * n,
        w_residual_bytes=(1.0,) * n, boundary_bytes=each([0.0, 1.0]), link=Link(rng.choice([0.0, 0.25, 1.0]), 4.0),
        f_comm_s=each([0.0, 0.25]) if rng.random() < 0.2 else (),
        b_comm_s=each([0.0, 0.25]) if rng.random() < 0.2 else (),
    )  # fmt: skip


def random_rule(rng: random.Random, placement: Placement, ranks: list[int], functions: bool) -> Traversal:
    def order() -> str:
        return rng.choice(["breadth", "depth"]) + rng.choice(["", "", f":{rng.randint(1, 5)}"])

    def limit(least: int) -> int:
        return max(1, least + rng.randint(-1 if rng.random() < 0.3 else 0, 4))

    kind = rng.randrange(3)
    least = [replicas_on(placement, rank) for rank in ranks]
    in_flight = None if kind == 0 else limit(max(least)) if kind == 1 else tuple(map(limit, least))
    per_stage = rng.choice(
        [None, None, rng.randint(1, 4), tuple(rng.randint(1, 4) for _ in range(placement.num_stages))]
    )
    salt = rng.random()
    checks: list[Check] = []
    choose: Choose | None = None
    if functions:
        if rng.random() < 0.6:
            checks.append(_moody(salt))
        if rng.random() < 0.6:
            choose = _anyhow(salt)
    return Traversal(
        rng.choice(["forward", "backward", "interleaved"]), forward=order(), backward=order(), in_flight=in_flight,
        in_flight_per_stage=per_stage, units=(rng.randint(1, 3), rng.randint(1, 3)), checks=checks, choose=choose,
    )  # fmt: skip


def _moody(salt: float) -> Check:
    def moody(view: View, action: Action) -> bool:
        """Vetoes now and then, by what is done; a schedule may come of it or not."""
        return random.Random(f"{salt} {action} {view.done('F', action.stage)} {view.in_flight()}").random() < 0.7

    return moody


def _anyhow(salt: float) -> Choose:
    def anyhow(view: View, ready: tuple[Action, ...]) -> Action | None:
        """Return any of the actions, sometimes none."""
        rng = random.Random(f"{salt} {view.rank} {len(view.row)}")
        return rng.choice([*ready, *ready, None])

    return anyhow


def random_rules(rng: random.Random, placement: Placement, functions: bool) -> Rules:
    ranks = list(range(placement.num_ranks))
    if len(ranks) == 1 or rng.random() < 0.6:
        return random_rule(rng, placement, ranks, functions)
    rng.shuffle(ranks)
    cut = rng.randint(1, len(ranks) - 1)
    return {tuple(part): random_rule(rng, placement, part, functions) for part in (ranks[:cut], ranks[cut:])}


def limits_of(rules: Rules, placement: Placement) -> list[tuple[int | None, list[int | None]]]:
    """Return per rank what it may hold: in all, and of each stage."""

    def each(limit: int | Sequence[int] | None, count: int) -> list[int | None]:
        return list(limit) if isinstance(limit, Sequence) else [limit] * count

    groups = rules if isinstance(rules, Mapping) else {tuple(range(placement.num_ranks)): rules}
    limits = {}
    for ranks, rule in groups.items():
        assert isinstance(ranks, tuple)
        by_stage = each(rule.in_flight_per_stage, placement.num_stages)
        limits.update(
            {rank: (limit, by_stage) for rank, limit in zip(ranks, each(rule.in_flight, len(ranks)), strict=True)}
        )
    return [limits[rank] for rank in range(placement.num_ranks)]


def require_limits(schedule: Schedule, rules: Rules) -> None:
    """Check the limits by the rows alone, so whatever the times are."""
    flows = schedule.placement.num_flows
    for rank, (limit, per_stage) in enumerate(limits_of(rules, schedule.placement)):
        live: dict[tuple[int, int], int] = {}
        for action in schedule.actions(rank):
            key = (action.stage, action.microbatch % flows)
            live[key] = live.get(key, 0) + {"F": 1, "BW": -1}[action.op]
            stage_limit = per_stage[action.stage]
            assert stage_limit is None or live[key] <= stage_limit, (rank, action)
            assert limit is None or sum(live.values()) <= limit, (rank, action)


def require_peaks(schedule: Schedule, rules: Rules, costs: CostProfile | None) -> None:
    """Check the peaks in simulated memory, with stages of one byte each."""
    if costs is None or schedule.placement.num_flows > 1:
        costs = CostProfile.uniform(schedule.num_stages)
    timeline = simulate(schedule, costs)
    for rank, (limit, _) in enumerate(limits_of(rules, schedule.placement)):
        peak = timeline.memory[rank].peak
        assert limit is None or peak <= limit + 1e-9, (rank, peak, limit)


def one_case(seed: int) -> str:
    """Raises AssertionError for what must not be; otherwise what came of it."""
    rng = random.Random(seed)
    placement = random_placement(rng)
    microbatches, functions = rng.randint(1, 7), rng.random() < 0.25
    rules, costs = random_rules(rng, placement, functions), random_costs(rng, placement.num_stages)

    def run_rules() -> Schedule | str:
        try:
            return traverse(placement, microbatches, rules, costs)
        except ScheduleError as error:
            return str(error)

    result = run_rules()
    assert result == run_rules()
    if isinstance(result, str):
        assert "\n" not in result and "rank" in result and "microbatch" in result, result
        limits = [limit for limit, _ in limits_of(rules, placement)]
        roomy = all(limit is None or limit >= replicas_on(placement, rank) for rank, limit in enumerate(limits))
        assert functions or not roomy, f"limits of at least a rank's stages never dead-lock: {result}"
        return "refused"
    check_schedule(result)
    require_limits(result, rules)
    require_peaks(result, rules, costs)
    return "made"


@pytest.mark.parametrize("start", range(0, 120, 40))
def test_random_rules_make_a_valid_schedule_or_one_line(start: int) -> None:
    outcomes = [one_case(seed) for seed in range(start, start + 40)]
    assert outcomes.count("made") > 25


@pytest.mark.soak
def test_two_thousand_random_rules() -> None:
    outcomes = [one_case(seed) for seed in range(2000)]
    assert outcomes.count("made") > 1400
    assert outcomes.count("refused") > 50
