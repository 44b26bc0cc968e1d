"""Optimal schedules: search under a memory limit with a proven lower bound. See README.md beside this file."""

from jaxpipe.search.solve.solver import solve
from jaxpipe.search.solve.task import OnProgress, Options, Progress, Solution, SolveTask

__all__ = ["OnProgress", "Options", "Progress", "Solution", "SolveTask", "solve"]
