"""Families that weigh costs or search. Their modules register them when this package is imported.

They are found as those of fixed order are, in ``jaxpipe.schedule.FAMILIES`` and by ``jaxpipe.schedule.generate``.
"""

from jaxpipe.lazy import exported
from jaxpipe.schedule.families.family import register_modules

__all__, __getattr__ = exported(
    __name__,
    interleaved="interleaved_one_f_one_b",
    within_limit="v_adaptive v_half v_min v_zb zero_bubble",
)

register_modules(__name__)
