"""GPUs on a virtual clock: a pipeline's real executor, with functions and copies that only take time.

The device model is that of XLA's GPU client (openxla/xla ``local_device_state.h``, ``se_raw_buffer.cc``), as far as order and
waiting go:

* One compute stream a device, in order of dispatch; a function waits for its arguments too. At most 32 computations are in
  flight; the next dispatch blocks the host.
* Four copy streams a device, each in order, taken in turn array by array. Sends, offloads and loads of a device share them, so
  a copy whose source is not ready yet holds up what follows on its stream.
* What a copy writes on a device is allocated in the order of its compute stream: the copy starts no earlier than the compute
  that was dispatched there before it has run. Pinned host memory is there at once.
* An engine each for device to host, host to device, and each pair of neighbours, one array at a time, first ready first served.
"""

from __future__ import annotations

import json
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from jaxpipe.program.order import holds
from jaxpipe.runtime.executor import Executor, StepInputs, StepOutputs
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.recorder import DeviceClock
from jaxpipe.runtime.transfer import message_numbers
from jaxpipe.schedule import CostProfile, op_spec
from jaxpipe.stage.functions import AnyFunction, StageFunctions

IN_FLIGHT, STREAMS = 32, 4


@dataclass(frozen=True, slots=True)
class Card:
    """Times of a card (``scripts/results/gpu-h200.json``): seconds of F, B, W and of a copy,
    and by family steps of rank 1 of 4 alone with eight microbatches."""

    f_s: float
    b_s: float
    w_s: float
    copy_s: float
    step_s: Mapping[str, float]

    def costs(self, stages: int = 8, runs: int = 16) -> CostProfile:
        """Return costs by which rank 1's step without offload takes what was measured: alone functions were timed on ones."""
        scale = self.step_s["po"] / (runs * (self.f_s + self.b_s + self.w_s))
        costs = CostProfile.uniform(stages, f=scale * self.f_s, b=scale * self.b_s, w=scale * self.w_s)
        return replace(costs, offload_s=(self.copy_s,) * stages, load_s=(self.copy_s,) * stages)


def _cards() -> dict[int, Card]:
    path = Path(__file__).resolve().parents[2] / "scripts" / "results" / "gpu-h200.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    rate = report["copies"]["h2d"]["bytes_per_s"]
    return {
        size["hidden"]: Card(
            *(size["split"]["functions"][op]["median_s"] for op in "FBW"),
            size["k"]["offloadable_bytes"] / rate,
            {step["schedule"]: step["step"]["median_s"] for step in size["steps"]},
        )
        for size in report["sizes"]
    }


H200 = _cards()
"""Measurements of an H200, by hidden size."""


@dataclass(slots=True)
class VirtualArray:
    """An array that is ready at a time of the virtual clock."""

    ready_s: float
    nbytes: float
    gpus: VirtualGPUs = field(repr=False)

    def block_until_ready(self) -> VirtualArray:
        """Let the host wait."""
        self.gpus.now_s = max(self.gpus.now_s, self.ready_s)
        return self


class Engine:
    """Moves one array at a time. An array that is ready early goes before one that was dispatched earlier and waits."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []

    def move(self, earliest_s: float, seconds: float) -> float:
        """Return the end of a move that starts in the first gap that is long enough."""
        start_s = earliest_s
        for begin_s, end_s in self.busy:
            if begin_s - start_s >= seconds:
                break
            start_s = max(start_s, end_s)
        insort(self.busy, (start_s, start_s + seconds))
        return start_s + seconds


@dataclass(slots=True)
class Device:
    """Streams of one GPU, each with the time at which it is free."""

    compute_s: float = 0.0
    in_flight: deque[float] = field(default_factory=deque)
    streams_s: list[float] = field(default_factory=lambda: [0.0] * STREAMS)
    next_stream: int = 0
    to_host: Engine = field(default_factory=Engine)
    from_host: Engine = field(default_factory=Engine)
    links: dict[int, Engine] = field(default_factory=dict)


class VirtualGPUs(DeviceClock):
    """Devices of the ranks of ``pipeline``, on which its functions and copies take what ``costs`` say.

    Args:
        rank: the only one that runs; None: all. What it would receive has always been there.
        host_s: seconds of the host for each instruction.
        shared_streams: whether the sends, offloads and loads of a device share its four copy streams; else each array has a
            stream of its own.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        costs: CostProfile,
        *,
        rank: int | None = None,
        host_s: float = 5e-5,
        shared_streams: bool = True,
    ) -> None:
        super().__init__(loads_follow_compute=True)
        self.pipeline = pipeline if rank is None else pipeline.alone(rank, self)  # type: ignore[arg-type]
        self.costs, self.host_s, self.shared_streams = costs, host_s, shared_streams
        self.now_s = 0.0
        self._thread = threading.local()
        self.devices = [Device() for _ in range(pipeline.schedule.num_ranks)]
        self.action_of = {number: message for message, number in message_numbers(pipeline.programs).items()}
        self.messages: dict[int, Sequence[VirtualArray]] = {}
        self.moved_bytes = {at: float(f.offloadable_bytes) for at, f in pipeline.functions.items()}
        self.rank_functions = {at: self._timed(at[0], f) for at, f in pipeline.functions.items()}
        self.braids = {
            (rank, parts): replace(f, call=partial(self._compute, rank, f, sum(starmap(self._seconds, parts))))
            for (rank, parts), f in pipeline.braids.items()
        }

    def executor(self) -> Executor:
        """Return the executor of the pipeline's local programs, on these devices."""
        pipe = self.pipeline
        programs, timeline = pipe.local_programs, pipe.predicted_timeline()
        waits = {(k, at): o for k, program in enumerate(programs) for at, o in holds(program, timeline).items()}
        return Executor(
            programs,
            pipe.order,
            self.rank_functions,
            pipe.submeshes,
            self,  # type: ignore[arg-type]
            all_programs=pipe.programs,
            holds=waits,
            braids=self.braids,
            copies=self.copies,
            clock=self,
        )

    def run(self) -> StepOutputs:
        """Run one recorded step."""
        pipe, ready = self.pipeline, VirtualArray(0.0, 0.0, self)
        microbatches = range(pipe.schedule.num_microbatches)
        functions = pipe.functions
        inputs = StepInputs(
            params={at: [ready] * len(f.param_avals) for at, f in functions.items()},  # type: ignore[misc]
            acc={at: [ready] * len(f.acc_avals) for at, f in functions.items()},  # type: ignore[misc]
            data={at: [[ready] * 8 for _ in microbatches] for at in functions},  # type: ignore[misc]
            keys={rank: [ready for _ in microbatches] for rank, _ in functions},  # type: ignore[misc]
        )
        return self.executor().run(inputs, record=True)

    # -- the clock of the executor and its recorder ----------------------------------------------------------------------

    def now(self) -> float:
        return self.now_s

    def when_ready(self, arrays: Sequence[Any]) -> float:
        # A thread that waits for one array after another never reads an earlier time than before.
        self._thread.waited_s = max(getattr(self._thread, "waited_s", 0.0), *(array.ready_s for array in arrays))
        return float(self._thread.waited_s)

    # -- what the executor calls -----------------------------------------------------------------------------------------

    def _timed(self, rank: int, stage: StageFunctions) -> StageFunctions:
        functions = {
            op: replace(f, call=partial(self._compute, rank, f, self._seconds(op, stage.stage)))
            for op, f in stage.functions.items()
        }
        return replace(stage, functions=functions)

    def _seconds(self, op: str, stage: int) -> float:
        return self.costs.seconds(op_spec(op).cost, stage)

    def _compute(self, rank: int, function: AnyFunction, seconds: float, *arguments: Any) -> tuple[Any, ...]:
        device = self.devices[rank]
        self.now_s += self.host_s
        while device.in_flight and device.in_flight[0] <= self.now_s:
            device.in_flight.popleft()
        if len(device.in_flight) >= IN_FLIGHT:
            self.now_s = max(self.now_s, device.in_flight.popleft())
        device.compute_s = max(device.compute_s, self.now_s, *(a.ready_s for a in arguments)) + seconds
        device.in_flight.append(device.compute_s)
        results = [VirtualArray(device.compute_s, aval.size * aval.dtype.itemsize, self) for aval in function.avals_out]
        for result, argument in function.forwarded.items():
            results[result] = arguments[argument]
        return tuple(results)

    def _copy(
        self, rank: int, engine: Engine, seconds: float, home: int | None, arrays: Sequence[VirtualArray]
    ) -> list[VirtualArray]:
        """Copy ``arrays`` in ``seconds``, in proportion to their sizes, to the device of the rank ``home`` or to the host."""
        device = self.devices[rank]
        self.now_s += self.host_s
        total, copies = sum(array.nbytes for array in arrays), []
        for array in arrays:
            stream, device.next_stream = device.next_stream, (device.next_stream + 1) % STREAMS
            allocated_s = 0.0 if home is None else self.devices[home].compute_s
            stream_s = device.streams_s[stream] if self.shared_streams else 0.0
            earliest_s = max(self.now_s, array.ready_s, allocated_s, stream_s)
            device.streams_s[stream] = end_s = engine.move(earliest_s, seconds * array.nbytes / total)
            copies.append(VirtualArray(end_s, array.nbytes, self))
        return copies

    def copies(self, rank: int, stage: int, part: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return how O and L of a stage copy, or a part of them: for its share of the bytes."""
        device, costs, total = self.devices[rank], self.costs, self.moved_bytes[rank, stage] or 1

        def copy(
            engine: Engine, seconds: float, home: int | None, arrays: Sequence[VirtualArray]
        ) -> list[VirtualArray]:
            return self._copy(rank, engine, seconds * sum(a.nbytes for a in arrays) / total, home, arrays)

        return (
            partial(copy, device.to_host, costs.offload_s[stage], None),
            partial(copy, device.from_host, costs.load_s[stage], rank),
        )

    def send(self, message: int, dst: int, arrays: Sequence[VirtualArray]) -> None:
        """Copy to the device of another rank."""
        src, _, action = self.action_of[message]
        link = self.devices[src].links.setdefault(dst, Engine())
        seconds = self.costs.transfer_s(src, dst, action.stage)
        self.messages[message] = self._copy(src, link, seconds, dst, arrays)

    def recv(self, message: int) -> Sequence[VirtualArray]:
        """Return the arrays of a message. Those of ranks that do not run here have always been there."""
        if message in self.messages:
            return self.messages.pop(message)
        return [VirtualArray(0.0, 1.0, self)] * 8

    def clear(self) -> None:
        """Forget what was not received."""
        self.messages.clear()


class FewLeaves(VirtualGPUs):
    """The same, where the arrays of an offload or load lie in ``leaves`` buffers, as if F wrote them so."""

    def __init__(self, leaves: int, pipeline: Pipeline, costs: CostProfile, **options: Any) -> None:
        self.leaves = leaves
        super().__init__(pipeline, costs, **options)

    def copies(self, rank: int, stage: int, part: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def joined(copy: Callable[..., Any]) -> Callable[..., Any]:
            def moved(arrays: Sequence[VirtualArray]) -> list[VirtualArray]:
                ready_s, nbytes = max(a.ready_s for a in arrays), sum(a.nbytes for a in arrays)
                buffers = copy([VirtualArray(ready_s, nbytes / self.leaves, self)] * self.leaves)
                end_s = max(buffer.ready_s for buffer in buffers)
                return [VirtualArray(end_s, a.nbytes, self) for a in arrays]

            return moved

        offload, load = super().copies(rank, stage, part)
        return joined(offload), joined(load)
