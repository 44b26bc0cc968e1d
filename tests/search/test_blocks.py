"""Building blocks: collisions, equation 1 against the simulator, repeat in groups, reordering within memory."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from jaxpipe.schedule import CostProfile, check_schedule, generate, simulate
from jaxpipe.schedule.placement import circular, one_to_one, v_shape
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.blocks import BuildingBlock, repeat
from jaxpipe.search.blocks.block import cells_with_ends, rows_of, search_blocks
from jaxpipe.search.families.within_limit import one_f_one_b_v_block, v_half_block, v_min_block
from jaxpipe.search.list_schedule.fillers import AS_GIVEN, DOMINATING, RECIPES, GapFiller, Phases, Rule
from jaxpipe.search.retime import Retimer


def rows_with_ends(block: BuildingBlock, problem: Problem) -> list[list[int]] | None:
    cells = cells_with_ends(block, problem)
    return None if cells is None else rows_of(problem, cells)


def uneven(p: int, seed: int) -> CostProfile:
    rng = random.Random(seed)
    costs = CostProfile.uniform(2 * p, chunks=2, comm=rng.choice([0, 0.1, 0.4]))
    f, b, w = (tuple(rng.uniform(0.2, 2) for _ in range(2 * p)) for _ in range(3))
    return replace(costs, f_s=f, b_s=b, w_s=w, bw_s=tuple(x + y for x, y in zip(b, w, strict=True)))


def test_v_min_is_as_the_paper_draws_it() -> None:
    block = v_min_block(4)
    assert block.forward == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert block.backward == ((15, 14, 13, 12, 11, 10, 9, 8),)
    assert block.weight == ((17, 17, 15, 14, 13, 12, 10, 10),)


def test_collisions_name_rank_and_cell() -> None:
    block = replace(v_min_block(4), interval=5)
    assert block.collisions()
    assert all(0 <= rank < 4 and 0 <= cell < 5 for rank, cell in block.collisions())
    assert BuildingBlock(one_to_one(1), 2, ((0,),), ((1,),), ((2,),)).collisions() == [(0, 0)]
    for p in range(1, 40):
        for make in (v_min_block, v_half_block, one_f_one_b_v_block):
            assert not make(p).collisions()


def equation_1(block: BuildingBlock) -> list[int]:
    """Return per rank Σ ⌈lifespan / T⌉ over its stages: what no repeat exceeds on the grid."""
    peaks = [0] * block.placement.num_ranks
    for j, (first, last) in enumerate(zip(block.forward, block.ends, strict=True)):
        for s, (f, end) in enumerate(zip(first, last, strict=True)):
            peaks[block.rank(s, j)] -= (f - end - 1) // block.interval
    return peaks


@pytest.mark.parametrize("make", [v_min_block, v_half_block, one_f_one_b_v_block])
def test_equation_1_bounds_the_simulated_peak(make) -> None:  # type: ignore[no-untyped-def]
    for p in (1, 2, 3, 4, 5, 6, 8, 9):
        block = make(p)
        problem = Problem.of(block.placement, 4 * p)
        schedule = problem.schedule("repeated", repeat(block, problem))
        check_schedule(schedule)
        peaks = [
            2 * x for x in simulate(schedule, CostProfile.uniform(2 * p, chunks=2, f=2, b=2, w=2)).peak_activations
        ]
        assert all(x <= y + 1e-9 for x, y in zip(block.steady_peaks(), equation_1(block), strict=True))
        assert all(x <= y + 1e-9 for x, y in zip(peaks, block.steady_peaks(), strict=True))
        assert max(peaks) == max(block.steady_peaks())


def test_memory_of_the_v_family() -> None:
    """Appendix F's blocks in chunks: V-Half p + 2 for even p; both tend to the fractions of 1F1B's 2p in Table 1."""
    assert [max(v_half_block(p).steady_peaks()) for p in (4, 6, 8, 16, 32)] == [6, 8, 10, 18, 34]
    for make, share in ((v_min_block, 1 / 3), (v_half_block, 1 / 2), (one_f_one_b_v_block, 2 / 3)):
        for p in (30, 31, 32, 33):
            assert abs(max(equation_1(make(p))) / (2 * p) - share) < 0.08


def test_repeat_in_groups_is_interleaved_1f1b() -> None:
    """Appendix H: groups of p, 3 cells apart, chunks 3p cells after one another: the official order, squeezed equal."""
    p, v, m = 4, 2, 8
    stages = p * v
    forward = tuple(s % p + s // p * 3 * p for s in range(stages))
    turn = forward[-1] + 1
    backward = tuple(turn + 2 * (p - 1 - s % p) + (v - 1 - s // p) * 3 * p for s in range(stages))
    block = BuildingBlock(circular(p, v), 3, (forward,), (backward,), group=p, group_interval=3 * p * v)
    problem = Problem.of(block.placement, m, CostProfile.uniform(stages, chunks=v, f=v, b=v, w=v))
    draft = Retimer(problem).draft(repeat(block, problem))
    official = Retimer(problem).draft(problem.codes(generate("interleaved-1f1b", p, m, chunks=v)))
    assert draft is not None and official is not None
    assert draft.makespan == official.makespan


def test_several_microbatches_in_a_block() -> None:
    """Appendix I: two microbatches a block; microbatch i is i % 2 of its block."""
    p = 2
    one = BuildingBlock.of_chain(one_to_one(p), 6, forward=[1], turn=1, backward=[1])
    two = BuildingBlock(
        one.placement,
        6,
        (one.forward[0], tuple(c + 3 for c in one.forward[0])),
        (one.backward[0], tuple(c + 3 for c in one.backward[0])),
        (tuple(c + 2 for c in one.backward[0]), tuple(c + 5 for c in one.backward[0])),
    )
    problem = Problem.of(one.placement, 5)
    rows = repeat(two, problem)
    assert sorted(map(len, rows)) == [15, 15]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.soak] * (seed in (0, 5, 9, 11))) for seed in range(12)]
)  # the others are smaller
def test_reordering_keeps_rows_valid_and_within_memory(seed: int) -> None:
    rng = random.Random(seed)
    p, m = rng.choice([2, 3, 5, 6]), rng.choice([1, 3, 7, 12])
    blocks = [v_min_block(p), v_half_block(p), one_f_one_b_v_block(p)]
    problem = Problem.of(v_shape(p), m, uneven(p, seed))
    gap_filler = GapFiller(problem)
    for block in blocks:
        rows = repeat(block, problem)
        before = gap_filler.retimer.draft(rows)
        assert before is not None
        for view, rule in (*RECIPES, *DOMINATING, ("real", Phases(Rule(backlog=1), AS_GIVEN, Rule()))):
            after = gap_filler.retimer.draft(gap_filler.fill(rows, before.peak, rule, view))
            assert after is not None and after.peak <= before.peak + 1e-9
            check_schedule(problem.schedule("reordered", after.rows))
        best = gap_filler.best(rows, before.peak, 12)
        assert best is not None and best.makespan <= before.makespan + 1e-9


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_the_search_lists_blocks_without_collision_longest_lives_first(p: int) -> None:
    blocks = list(search_blocks(p, p + 4))
    assert len({block.forward + block.backward for block in blocks}) == len(blocks)
    assert not any(block.collisions() for block in blocks[::7])
    on_rank_0 = [-(b.backward[0][0] - b.forward[0][0] + b.backward[0][-1] - b.forward[0][-1]) for b in blocks]
    assert on_rank_0 == sorted(on_rank_0)
    for block in (v_min_block(p), v_half_block(p)):
        if max(block.steady_peaks()) <= p + 4 and p > 2:
            offsets = [b - a for a, b in pairwise(block.forward[0][:p])]
            assert offsets in [[b - a for a, b in pairwise(other.forward[0][:p])] for other in blocks]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (3, 3), (4, 2), (4, 4), (4, 6), (4, 16), (5, 9)])
def test_ends_by_rule_are_whole_schedules(p: int, m: int) -> None:
    """Whatever the block: nothing lost or doubled, inputs before use, and no more memory than the block where m is large."""
    costs = CostProfile.uniform(2 * p, chunks=2, f=2, b=2, w=2)
    problem = Problem.of(v_shape(p), m, costs)
    count = 0
    for block in list(search_blocks(p, 2 * p))[::23]:
        rows = rows_with_ends(block, problem)
        draft = None if rows is None else Retimer(problem).draft(rows)
        if draft is not None:
            count += 1
            check_schedule(problem.schedule("ends", draft.rows))
    assert count


def test_ends_by_rule_are_no_longer_than_the_repeated_block() -> None:
    problem = Problem.of(v_shape(4), 16, CostProfile.uniform(8, chunks=2, f=2, b=2, w=2))
    retimer, compared = Retimer(problem), 0
    for block in list(search_blocks(4, 8))[::5]:
        repeated, rows = retimer.draft(repeat(block, problem)), rows_with_ends(block, problem)
        by_rule = None if rows is None else retimer.draft(rows)
        if repeated is not None and by_rule is not None and by_rule.peak <= repeated.peak:
            assert by_rule.makespan <= repeated.makespan
            compared += 1
    assert compared > 20
