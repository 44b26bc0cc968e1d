"""This package finds when: it searches for orders of actions, and proves how far they may be from the best. See README.md.

Nothing imports it but the verbs that search, reports, and re-planning while training, when they run; :mod:`jaxpipe.schedule`
reaches it by name.
"""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    best="best_schedule",
    bounds="lower_bound rank_lower_bounds span_lower_bound",
    solve="Options Progress Solution SolveTask solve",
    **{"families.interleaved": "interleaved_one_f_one_b", "families.within_limit": "zero_bubble"},
)
