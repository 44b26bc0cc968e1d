"""Turns seconds and bytes of each stage function into a :class:`~jaxpipe.schedule.costs.CostProfile`; see README.md."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    profile="DEFAULT_FLOPS_PER_S HostLinkMeasurement StageMeasurements analytic_profile at_ranks_share cost_profile "
    "measure_host_link measure_stages with_measured_times with_missing_ops with_offloadable_bytes",
    seconds="Timing measured_layer_costs time_collectives time_function",
)
