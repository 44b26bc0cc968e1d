"""Where *when* and *what* meet: schedules and stage functions become one instruction list per rank."""

from jaxpipe.program.check import check_programs
from jaxpipe.program.deadlock import Crossing, check_transfers
from jaxpipe.program.ir import Program
from jaxpipe.program.lower import lower
from jaxpipe.program.order import issue_order

__all__ = ["Crossing", "Program", "check_programs", "check_transfers", "issue_order", "lower"]
