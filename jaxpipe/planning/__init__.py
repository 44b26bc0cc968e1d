"""Predict whether a training config fits on machines that are not here, and how fast it runs there.

Read the README beside this file for the order of the modules.
"""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    predict="Prediction",
    roofline="Efficiency Work work_of",
    space="Space Suggestion Suggestions TuneResult TuneTrial",
    stages="StageCosts Stopwatch stage_costs_of",
    targets="TARGETS Chip Target find_target",
)
