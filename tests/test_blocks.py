"""Building blocks: collisions, equation 1 against the simulator, repeat in groups, reordering within memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, check_schedule, generate, simulate
from jaxpipe.schedule.blocks import BuildingBlock, repeat
from jaxpipe.schedule.blocks.v_ends import VEnds
from jaxpipe.schedule.blocks.v_shape import VOffsets, searched
from jaxpipe.schedule.families.v_blocks import one_f_one_b_v_block, v_half_block, v_min_block
from jaxpipe.schedule.list_schedule.fillers import AS_GIVEN, DOMINATING, RECIPES, Finisher, Phases, Rule
from jaxpipe.schedule.placement import circular, one_to_one, v_shape
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Retimer


def uneven(p: int, seed: int) -> CostProfile:
    rng = random.Random(seed)
    costs = CostProfile.uniform(2 * p, chunks=2, comm=rng.choice([0, 0.1, 0.4]))
    f, b, w = (tuple(rng.uniform(0.2, 2) for _ in range(2 * p)) for _ in range(3))
    return replace(costs, f_s=f, b_s=b, w_s=w, bw_s=tuple(x + y for x, y in zip(b, w, strict=True)))


def test_v_min_prints_as_the_paper_draws_it() -> None:
    assert str(v_min_block(4)) == "\n".join(
        [
            "rank 0 |F······fb·w····B·W",
            "rank 1 |·F····f··bw···B··W",
            "rank 2 |··F··f····b·wB·W··",
            "rank 3 |···Ff······bBwW···",
        ]
    )


def test_collisions_name_rank_passes_and_cell() -> None:
    block = replace(v_min_block(4), interval=5)
    assert block.collisions()
    with pytest.raises(ScheduleError, match=r"cannot repeat every 5 cells: rank \d: .* meet at cell \d modulo 5"):
        block.require_no_collision()
    for p in range(1, 40):
        for make in (v_min_block, v_half_block, one_f_one_b_v_block):
            assert not make(p).collisions()


def test_cells_against_the_data_flow_are_refused() -> None:
    with pytest.raises(ScheduleError, match="starts before F0 has ended"):
        BuildingBlock(one_to_one(2), 6, ((0, 0),), ((5, 3),), ((6, 4),))
    with pytest.raises(ScheduleError, match="forward needs 2 cells"):
        BuildingBlock(one_to_one(2), 6, ((0,),), ((5, 3),), ((6, 4),))


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
        assert all(x <= y + 1e-9 for x, y in zip(block.steady_peaks(), block.predicted_peaks(), strict=True))
        assert all(x <= y + 1e-9 for x, y in zip(peaks, block.steady_peaks(), strict=True))
        assert max(peaks) == max(block.steady_peaks())


def test_memory_of_the_v_family() -> None:
    """Appendix F's blocks in chunks: V-Half p + 2 for even p; both tend to the fractions of 1F1B's 2p in Table 1."""
    assert [max(v_half_block(p).steady_peaks()) for p in (4, 6, 8, 16, 32)] == [6, 8, 10, 18, 34]
    for make, share in ((v_min_block, 1 / 3), (v_half_block, 1 / 2), (one_f_one_b_v_block, 2 / 3)):
        for p in (30, 31, 32, 33):
            assert abs(max(make(p).predicted_peaks()) / (2 * p) - share) < 0.08


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
    assert len(two.lifespans()) == 2
    problem = Problem.of(one.placement, 5)
    rows = repeat(two, problem)
    assert sorted(map(len, rows)) == [15, 15]


@pytest.mark.parametrize("seed", range(12))
def test_reordering_keeps_rows_valid_and_within_memory(seed: int) -> None:
    rng = random.Random(seed)
    p, m = rng.choice([2, 3, 5, 6]), rng.choice([1, 3, 7, 12])
    blocks = [v_min_block(p), v_half_block(p), one_f_one_b_v_block(p)]
    problem = Problem.of(v_shape(p), m, uneven(p, seed))
    finisher = Finisher(problem)
    for block in blocks:
        rows = repeat(block, problem)
        before = finisher.squeezed(rows)
        assert before is not None
        for view, rule in (*RECIPES, *DOMINATING, ("real", Phases(Rule(backlog=1), AS_GIVEN, Rule()))):
            after = finisher.squeezed(finisher.filled(rows, before.peak, rule, view))
            assert after is not None and after.peak <= before.peak + 1e-9
            check_schedule(problem.schedule("reordered", after.rows))
        best = finisher.best(rows, before.peak, 12)
        assert best is not None and best.makespan <= before.makespan + 1e-9


def test_the_search_contains_the_named_blocks_and_no_collision() -> None:
    """FACTS.md: V-ZB's (4, 2) was outside of the authors' search."""
    found = list(searched(4, 8))
    assert {(4, 2), (2, 1), (1, 1)} <= {offsets.pairs[0] for offsets in found if len(set(offsets.pairs)) == 1}
    assert all(not offsets.block().collisions() for offsets in found[::17])
    assert VOffsets((0, 1, 2, 3), ()).block().placement.num_ranks == 1


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_steady_peaks_without_making_the_block(p: int) -> None:
    rng = random.Random(p)
    weights = [rng.choice([0.3, 0.5, 1.0]) for _ in range(2 * p)]
    for offsets in list(searched(p, p + 4))[::37]:
        assert offsets.steady_peaks(weights) == pytest.approx(offsets.block().steady_peaks(weights), rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (3, 3), (4, 2), (4, 4), (4, 6), (4, 16), (5, 9)])
def test_ends_by_rule_are_whole_schedules_within_the_limit(p: int, m: int) -> None:
    """Whatever the block and the limit in chunks: nothing lost or doubled, inputs before use, memory as asked for."""
    costs = CostProfile.uniform(2 * p, chunks=2, f=2, b=2, w=2)
    problem = Problem.of(v_shape(p), m, costs)
    ends, found = VEnds(problem), 0
    for limit in (p, 2 * p):
        for offsets in list(searched(p, 2 * p))[::23]:
            for rows in ends.orders(offsets.block(), limit):
                found += 1
                schedule = problem.schedule("ends", rows)
                check_schedule(schedule)
                assert max(simulate(schedule, costs).peak_activations) <= limit / 2
    assert found or p == 1


def test_ends_by_rule_are_no_longer_than_the_repeated_block() -> None:
    problem = Problem.of(v_shape(4), 16, CostProfile.uniform(8, chunks=2, f=2, b=2, w=2))
    ends, retimer = VEnds(problem), Retimer(problem)
    compared = 0
    for offsets in list(searched(4, 8))[::11]:
        repeated = retimer.draft(repeat(offsets.block(), problem))
        for rows in ends.orders(offsets.block(), 8):
            laid = retimer.draft(rows)
            assert repeated is not None and laid is not None
            assert laid.makespan <= repeated.makespan
            compared += 1
    assert compared > 20


def test_few_microbatches_have_an_order_with_weight_gradients_put_off() -> None:
    """m = p leaves memory over. W put off once ran twice for one microbatch."""
    p = m = 16
    problem = Problem.of(v_shape(p), m, CostProfile.uniform(2 * p, chunks=2, f=2, b=2, w=2))
    block = VOffsets((0, 1, 2, 3), ((5, 1),) * 4 + ((3, 1),) * 11).block()
    drafts = [Retimer(problem).draft(rows) for rows in VEnds(problem).orders(block, 26)]
    assert [(d.span, d.makespan, d.peak) for d in drafts if d] == [(116, 117, 13), (113, 117, 13)]
