"""The order of a run whose ranks are tensor parallel: made for stages whose collectives are known.

A schedule is chosen before any stage is traced (:func:`jaxpipe.train.assemble.build_schedule`), so without collectives. Once
the stages are there, their T_AR is (:func:`jaxpipe.profile.analytic_profile`), and the order is made again for it: the families
of `stp.txt` choose their warm-up by it, others leave room for what F and B wait. With ``braid_adjacent`` the braid pass
follows. All of it depends on shapes only, so a resumed run gets the same order.
"""

from __future__ import annotations

import math

from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import FAMILIES, CostProfile, Schedule, generate
from jaxpipe.schedule.passes import braid
from jaxpipe.train.config import PipelineConfig


def with_collectives(pipe: PipelineConfig, pipeline: Pipeline) -> Pipeline:
    """``pipeline`` in the order that its tensor-parallel collectives call for; itself without such.

    Raises:
        ScheduleError: the family can't keep to ``pipe.memory_limit``.
    """
    schedule = order_for(pipe, pipeline.schedule, pipeline.costs)
    return pipeline if schedule == pipeline.schedule else pipeline.with_schedule(schedule)


def order_for(pipe: PipelineConfig, schedule: Schedule, costs: CostProfile) -> Schedule:
    """The schedule of ``pipe`` for stages of these costs, where ``schedule`` was chosen without their collectives.

    Raises:
        ScheduleError: as :func:`with_collectives`.
    """
    if not any(costs.tp_comm_s):
        return schedule
    if pipe.schedule in FAMILIES:
        chunks = pipe.chunks if "chunks" in FAMILIES[pipe.schedule].options else None
        schedule = generate(
            pipe.schedule,
            pipe.ranks,
            pipe.microbatches,
            chunks=chunks,
            costs=_times(costs),
            memory_limit=pipe.memory_limit,
        )
    if pipe.braid and pipe.braid_adjacent:
        schedule = braid(schedule, costs, memory_limit=math.inf if pipe.memory_limit is None else pipe.memory_limit)
    return schedule


def _times(costs: CostProfile) -> CostProfile:
    """The seconds of ``costs``; every stage holds as much, as where a schedule is chosen first."""
    ones = (1.0,) * costs.num_stages
    return CostProfile(
        f_s=costs.f_s,
        b_s=costs.b_s,
        w_s=costs.w_s,
        bw_s=costs.bw_s,
        residual_bytes=ones,
        w_residual_bytes=ones,
        tp_comm_s=costs.tp_comm_s,
        tp_collectives=costs.tp_collectives,
        source=costs.source,
    )
