"""The order of a run whose ranks are tensor parallel: made for stages whose collectives are known.

A schedule is chosen before any stage is traced (:func:`jaxpipe.train.setup.build_schedule`), so without collectives. Once the
stages are there, their T_AR is (:func:`jaxpipe.profile.analytic_profile`), and the order is made again for it: the families of
`stp.txt` choose their warm-up by it, others leave room for what F and B wait. With ``pipeline.braid_adjacent`` the braid pass
follows. All of it depends on shapes only, so a resumed run gets the same order.
"""

from __future__ import annotations

import math

from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import FAMILIES, generate
from jaxpipe.schedule.passes import braid
from jaxpipe.train.config import TrainConfig


def with_collectives(config: TrainConfig, pipeline: Pipeline) -> Pipeline:
    """``pipeline`` in the order that its tensor-parallel collectives call for; itself without such.

    Raises:
        ScheduleError: the family can't keep to ``pipeline.memory_limit``.
    """
    pipe, costs = config.pipeline, pipeline.costs
    if not any(costs.tp_comm_s):
        return pipeline
    schedule, limit = pipeline.schedule, pipe.memory_limit
    if pipe.schedule in FAMILIES:
        chunks = pipe.chunks if "chunks" in FAMILIES[pipe.schedule].options else None
        schedule = generate(
            pipe.schedule, pipe.ranks, pipe.microbatches, chunks=chunks, costs=costs, memory_limit=limit
        )
    if pipe.braid and pipe.braid_adjacent:
        schedule = braid(schedule, costs, memory_limit=math.inf if limit is None else limit)
    return pipeline if schedule == pipeline.schedule else pipeline.with_schedule(schedule)
