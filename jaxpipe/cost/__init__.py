"""Seconds and bytes of each stage function → :class:`~jaxpipe.schedule.costs.CostProfile`; see README.md."""

from jaxpipe.cost.analytic import DEFAULT_FLOPS_PER_S, analytic_profile
from jaxpipe.cost.collectives import time_collectives
from jaxpipe.cost.host_link import HostLinkMeasurement, measure_host_link
from jaxpipe.cost.measured import (
    StageMeasurements,
    measure_stages,
    measured_layer_costs,
    time_function,
    with_measured_times,
)
from jaxpipe.cost.memory import with_memory, with_offloadable_bytes
from jaxpipe.cost.timing import Timing

__all__ = [
    "DEFAULT_FLOPS_PER_S",
    "HostLinkMeasurement",
    "StageMeasurements",
    "Timing",
    "analytic_profile",
    "measure_host_link",
    "measure_stages",
    "measured_layer_costs",
    "time_collectives",
    "time_function",
    "with_measured_times",
    "with_memory",
    "with_offloadable_bytes",
]
