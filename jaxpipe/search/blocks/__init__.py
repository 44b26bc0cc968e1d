"""Schedules from building blocks: block → collision check → repeat → squeeze → fill (`controllable-memory.txt` section 2).

    block = BuildingBlock.of_chain(v_shape(4), 6, forward=[1] * 7, turn=1, backward=[1] * 7)
    assert not block.collisions()                       # it can be repeated; block.steady_peaks() is what it then holds
    problem = Problem.of(block.placement, 8, costs)     # real, uneven costs
    rows = repeat(block, problem)                       # the order; uniform or in groups
    gap_filler = GapFiller(problem)                     # of list_schedule/fillers.py
    draft = gap_filler.retimer.draft(rows)              # makespan, span, peak
    draft = gap_filler.best(rows, limit, tries=40)      # waits filled by many recipes, the best kept
    drafts = gap_filler.improve_until_stable(rows, limit)   # from its end, too, while that makes it better

Reading order: ``block.py``, blocks, how they are repeated and reordered on the grid, those on the V placement that the
adaptive search looks at, and their warm-up and cool-down by rule; ``mirrored.py`` searches blocks of a V of several
microbatches, in cells of real proportions.
"""

from jaxpipe.search.blocks.block import BuildingBlock, repeat, with_weight_gradients

__all__ = ["BuildingBlock", "repeat", "with_weight_gradients"]
