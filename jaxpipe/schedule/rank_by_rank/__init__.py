"""Schedules with offload, one rank after the other: for chains with one stage a rank whose F, B and W all take a step.

    for begun in begun_rank_by_rank(few_ranks, bound, value, budget, seed):  # FewRanks of ../bounds/few_ranks.py
        ...                                                                  # what starts where and when, better and better

Where the host link is the bottleneck, the best schedules let few microbatches *stay* on the devices, each for the shortest
trip, and *park* the others on the host for the time of several trips; those that stay overtake them. List schedules are first
come, first served, and keep what stays as long as what is parked.

Here rank 0, which has the longest trips and so the least room, comes first: ``first_rank.py`` schedules it alone, with as much
on the host as can be (:mod:`~jaxpipe.schedule.bounds.host_steps`). What stays goes straight down all ranks and straight back,
and no two meet. That leaves each parked microbatch a wide window on the next rank, where trips are shorter and more may stay:
``next_rank.py`` says which, and ``parked.py`` what the others do. ``search.py`` tries this at random; ``chain.py``: a task in
steps.
"""

from jaxpipe.schedule.rank_by_rank.search import begun_rank_by_rank

__all__ = ["begun_rank_by_rank"]
