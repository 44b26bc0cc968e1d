"""Schedules with offload, one rank after the other: for chains with one stage a rank whose F, B and W all take a step.

    for begun in begun_rank_by_rank(few_ranks, bound, value, budget, seed):  # FewRanks of ../bounds/few_ranks.py
        ...                                                                  # what starts where and when, better and better

Where the host link is the bottleneck, the best schedules let few microbatches *stay* on the devices, each for the shortest
trip, and *park* the others on the host for the time of several trips; those that stay overtake them. List schedules are first
come, first served, and keep what stays as long as what is parked.

Here rank 0, which has the longest trips and so the least room, comes first: ``first_rank.py`` schedules it alone, with as much
on the host as can be (:mod:`~jaxpipe.schedule.bounds.host_steps`). That leaves each microbatch a window on the next rank, wide
if it is parked; ``next_rank.py`` schedules that rank within the windows and leaves as much of them as it can to the one after
it, where trips are shorter. ``search.py`` tries this at random, from the best beginnings again; ``chain.py``: a task in steps.
"""

from jaxpipe.schedule.rank_by_rank.search import begun_rank_by_rank

__all__ = ["begun_rank_by_rank"]
