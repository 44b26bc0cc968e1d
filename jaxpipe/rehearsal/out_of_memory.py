"""When a rehearsal runs out of memory: at which instruction, and what did it want?

A :class:`Watch` follows a probed step (:func:`~jaxpipe.runtime.memory_probe.probe_step`) and enforces a limit smaller than the
device, if the user set one; :func:`out_of_memory` makes one line of what an allocator, or the watch, raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxpipe.errors import RunError
from jaxpipe.program.ir import Free, Instruction, Offload, Program, Recv, Reload, Run, Send, Sync
from jaxpipe.schedule import Action
from jaxpipe.stage.compiled.footprint import device_bytes, footprint
from jaxpipe.stage.functions import Braids, StageFunctions, function_of
from jaxpipe.text import format_bytes

ADVICE = "use a smaller microbatch, more ranks, recomputation, offload, or a schedule with a lower peak"


class LimitError(Exception):
    """More than the limit that the user set."""


class Watch:
    """Follows where a probed step of one rank is. ``at``: the instruction being run (None: the first has not begun);
    ``held``: bytes when it began, or a little earlier (what the instruction before it dropped still counts).

    Args:
        program: of the rank.
        functions: of its stages.
        limit: bytes; None for the device's own.
        braids: those that the program runs as one function.
    """

    def __init__(
        self,
        program: Program,
        functions: Mapping[tuple[int, int], StageFunctions],
        limit: float | None,
        braids: Braids = MappingProxyType({}),
    ) -> None:
        self._program, self._functions, self._braids, self._limit = program, functions, braids, limit
        self._visited = [k for k, i in enumerate(program.instructions) if not isinstance(i, Free)]
        self.at: int | None = None
        self.held = 0

    def begin(self, placed_bytes: int) -> None:
        """The step starts with ``placed_bytes`` on the device.

        Raises:
            LimitError: that is more than the limit.
        """
        self.held = placed_bytes
        if self._limit is not None and placed_bytes > self._limit:
            raise LimitError
        self.at = self._visited[0] if self._visited else None

    def __call__(self, n: int, held: Sequence[int]) -> None:
        """The ``n``-th instruction has its results, and ``held[0]`` bytes are on the device.

        Raises:
            LimitError: with the instruction's workspace that is more than the limit.
        """
        results, workspace = self.needs(self._visited[n])
        if self._limit is not None and held[0] + workspace > self._limit:
            self.held = held[0] - results
            raise LimitError
        self.held = held[0]
        if n + 1 < len(self._visited):
            self.at = self._visited[n + 1]

    def needs(self, at: int) -> tuple[int, int]:
        """Device bytes that instruction ``at`` of the program allocates: for results, and for workspace while it runs."""
        instruction = self._program.instructions[at]
        match instruction:
            case Run():
                function = function_of(self._program.rank, instruction.parts, self._functions, self._braids)
                results = sum(
                    device_bytes(aval)
                    for k, (port, aval) in enumerate(zip(function.outputs, function.avals_out, strict=True))
                    if port.kind != "acc" and k not in function.forwarded
                )
                return results, footprint(function).temp_bytes
            case Recv() | Reload():
                return sum(self._program.written_bytes[at]), 0
            case _:
                return 0, 0


def out_of_memory(
    error: Exception, watch: Watch, program: Program, placed_bytes: int, limit: float | None
) -> RunError | None:
    """One line about an error that says memory ran out; None if it says something else.

    ``placed_bytes``: what is on the device before the first instruction, for an error that comes before it. ``limit``: the
    user's, or the device's, if known.
    """
    broke_limit = isinstance(error, LimitError) or isinstance(error.__cause__, LimitError)
    if not broke_limit and "RESOURCE_EXHAUSTED" not in str(error):
        return None
    request_bytes = _bytes_in(str(error))
    at = _blamed(program, watch.at, error.action if isinstance(error, RunError) else "")
    of = "" if limit is None else f" of {format_bytes(limit)}"
    if at is None:
        request = f"; an allocation of {format_bytes(request_bytes)} failed" if request_bytes else ""
        return RunError(
            f"rank {program.rank}: out of memory before the first instruction: parameters, accumulators, optimizer state and "
            f"data take {format_bytes(placed_bytes)}{of}{request}; {ADVICE}"
        )
    instruction = program.instructions[at]
    results, workspace = watch.needs(at)
    return RunError(
        f"rank {program.rank}: out of memory at instruction {at} of {len(program.instructions)}, {_name(instruction)}, which "
        f"wanted {format_bytes(request_bytes or results + workspace)} (its results take {format_bytes(results)}, its workspace "
        f"{format_bytes(workspace)}) with {format_bytes(watch.held)} held{of}; {ADVICE}",
        _action(instruction),
    )


def _blamed(program: Program, at: int | None, action: str) -> int | None:
    """The instruction to blame: the one being dispatched, unless an earlier one's failure came to light later."""
    if not action or (at is not None and _action(program.instructions[at]) == action):
        return at
    ran = (
        k for k, i in enumerate(program.instructions) if isinstance(i, Run | Offload | Reload) and _action(i) == action
    )
    return next(ran, at)


def _action(instruction: Instruction) -> str:
    return "" if isinstance(instruction, Free) else str(instruction.action)


def _name(instruction: Instruction) -> str:
    match instruction:
        case Recv(action, src=src):
            return f"receiving {action} from rank {src}"
        case Send(action, dst=dst):
            return f"sending {action} to rank {dst}"
        case Free():
            return "a free"
        case Run(Action() as action) | Offload(action) | Reload(action) | Sync(action):
            return f"{action} (stage {action.stage}, microbatch {action.microbatch})"
        case Run(braid):
            return f"braid {braid}"


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "bytes": 1}


def _bytes_in(text: str) -> int:
    """The bytes that XLA says it could not allocate; 0 if it does not say."""
    match = re.search(r"allocat\w*(?: request)?(?: for)?:? ([0-9.]+) ?(bytes|[KMGT]iB|B)?\b", text)
    return int(float(match[1].rstrip(".")) * _UNITS[match[2] or ""]) if match else 0
