"""Schedules for tests of their file formats: a small one as text, random ones, and the op ``Sync_x``."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxpipe.schedule import OpSpec, Schedule, Wait, register_op
from tests.support.schedule_strategies import random_valid_schedules

SMALL = """\
# jaxpipe schedule 1
name: 1f1b
microbatches: 2
placement: one-to-one ranks=2
edges: chain
rank 0: F0.0 F0.1 BW0.0 BW0.1
rank 1: F1.0 BW1.0 F1.1 BW1.1
"""
"""The text of :func:`~tests.support.schedule_strategies.one_f_one_b_rows` of 2 and 2."""

register_op(
    OpSpec(
        "Sync_x",
        "compute",
        (Wait(("F",), "self"), Wait(("Sync_x",), "pred", optional=True)),
        "f_s",
        description="test op",
    )
)


def schedules(**options: bool) -> st.SearchStrategy[Schedule]:
    """Draw a schedule with copies to the host and braided slots."""
    return random_valid_schedules(offload=True, braids=True, **options)
