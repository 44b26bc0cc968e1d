"""Optimal schedules: search under a memory limit with a proven lower bound. See README.md beside this file."""

from jaxpipe.schedule.solve.solver import solve
from jaxpipe.schedule.solve.task import OnProgress, Options, Progress, Solution, SolveTask

__all__ = ["OnProgress", "Options", "Progress", "Solution", "SolveTask", "solve"]
