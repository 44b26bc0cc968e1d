"""Joins *when* and *what*: schedules and stage functions become one instruction list per rank."""

from jaxpipe.program.ir import Program, check_programs
from jaxpipe.program.lower import lower
from jaxpipe.program.order import Crossing, check_transfers, issue_order

__all__ = ["Crossing", "Program", "check_programs", "check_transfers", "issue_order", "lower"]
