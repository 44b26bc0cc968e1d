"""Keep account of a run's steps: pace, records, figures of its result, steps that changed nothing, slow processes, a trace.

Steps whose gradient was not finite, or whose weights were negative, count: too many in a row end a run (``run.max_skipped``).
Those whose batch has no target do not.

``run.profile_steps`` shows some steps as JAX's profiler sees them (XProf, Perfetto), beside our timeline of the last.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.cost.profile import with_measured_times
from jaxpipe.errors import NotFiniteError, short_message
from jaxpipe.runtime.recorder import seconds_by_op
from jaxpipe.schedule import CostProfile, Timeline, op_spec, simulate
from jaxpipe.schedule.passes import with_priced_reductions
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.devices import peak_bytes_in_use
from jaxpipe.train.metrics import MetricsLog
from jaxpipe.train.run.progress import LiveLine, ProgressStream
from jaxpipe.train.run.resume import Start
from jaxpipe.train.run.run_directory import RunDirectory, TrainResult
from jaxpipe.train.setup import Prepared, step_flops
from jaxpipe.train.state import Cause, StepMetrics
from jaxpipe.train.trainer import Trainer

OpSeconds = Mapping[tuple[str, int], float]
"""Mean seconds by (op, stage)."""
_SLOW = 1.05
"""Times the median of its peers."""
_SPREADS = 4.5
"""A process also stands out by so many median deviations of its peers, which are 3 σ of a normal distribution: where devices
share cores, all differ by more than 5%."""
_STEPS = 3
"""Recorded steps in a row."""
_LEAST_PEERS = 3
"""Fewer have no median: either of two may be the slow one."""


class SlowProcesses:
    """Tells in a line which process is slow, once until it is not, by what each measures of its own actions in recorded steps.

    A host that is throttled, shares its cores or has a bad link slows all others, which wait for it, and shows in no figure of
    a whole step. Its own actions show it: with several columns the processes of a row run the same ones on parts of the same
    batch; with fewer, each process is compared with what it measured of its stages when the run began, relative to how the
    others compare with theirs, which does not show who was slow from the start.

    Args:
        columns: of the grid of processes; those of a row run the same stages.
        costs: what each stage took when the run began.
        who: what messages call a process.
    """

    def __init__(self, columns: int, costs: CostProfile, who: Callable[[int], str]) -> None:
        self._columns, self._costs, self._who = columns, costs, who
        self._in_a_row: dict[int, int] = {}

    def observe(self, seconds: Sequence[OpSeconds]) -> list[str]:
        """Return a line for each process that has been slow for three recorded steps; ``seconds``: of the last one, by
        process."""
        lines = []
        relative = [self._relative(of_process) for of_process in seconds]
        for group in self._groups(len(seconds)):
            peers = [process for process in group if relative[process]]
            if len(peers) < _LEAST_PEERS:
                continue
            totals = [relative[process][""] for process in peers]
            median = statistics.median(totals)
            spread = statistics.median(abs(total - median) for total in totals)
            for process, total in zip(peers, totals, strict=True):
                is_slow = total > max(_SLOW * median, median + _SPREADS * spread)
                self._in_a_row[process] = self._in_a_row.get(process, 0) + 1 if is_slow else 0
                if self._in_a_row[process] == _STEPS:
                    lines.append(self._line(process, peers, relative))
        return lines

    def _groups(self, number: int) -> list[range]:
        """Return the processes that are compared with each other."""
        size = self._columns if self._columns >= _LEAST_PEERS else max(number, 1)
        return [range(first, first + size) for first in range(0, number, size)]

    def _relative(self, seconds: OpSeconds) -> dict[str, float]:
        """Return by op, and for all as "", the seconds over those of the costs."""
        measured: dict[str, float] = {}
        expected: dict[str, float] = {}
        for (op, stage), op_s in seconds.items():
            spec = op_spec(op)
            if spec.lane == "compute" and spec.cost and (cost_s := self._costs.seconds(spec.cost, stage)) > 0:
                for key in (op, ""):
                    measured[key], expected[key] = measured.get(key, 0.0) + op_s, expected.get(key, 0.0) + cost_s
        return {key: measured[key] / expected[key] for key in measured}

    def _line(self, process: int, peers: Sequence[int], relative: Sequence[Mapping[str, float]]) -> str:
        ratios = []
        for op in sorted(relative[process].keys() - {""}):
            median = statistics.median(relative[peer][op] for peer in peers if op in relative[peer])
            if relative[process][op] > _SLOW * median:
                ratios.append(f"{op} {relative[process][op] / median:.2f}")
        total = relative[process][""] / statistics.median(relative[peer][""] for peer in peers)
        group = (
            f"{len(peers)} columns"
            if self._columns >= _LEAST_PEERS
            else f"{len(peers)} processes, each over its timing"
        )
        return f"slow: {self._who(process)}: {', '.join(ratios) or f'all ops {total:.2f}'} times the median of {group}"


class Pace:
    """Seconds of training steps, waiting for their results included, evaluation and saving left out; the first, which compiles,
    only counts if it is alone."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self._seconds: list[float] = []
        self._lap = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the dispatch of a step."""
        self._seconds.append(0.0)
        with self.waiting():
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what is done for the last step that was dispatched."""
        began = time.perf_counter()
        yield
        if self._seconds:
            self._seconds[-1] += time.perf_counter() - began

    def lap(self) -> float:
        """Tokens a second since the last lap."""
        since, self._lap = max(self._lap, 1), len(self._seconds)
        return self._rate(self._seconds[since:] or self._seconds[-1:])

    @property
    def tokens_per_s(self) -> float:
        return self._rate(self._seconds[1:] or self._seconds)

    def _rate(self, seconds: list[float]) -> float:
        return self.tokens_per_step * len(seconds) / sum(seconds) if seconds else float("nan")


class Skipping:
    """``steps``: how many were skipped; ``row``: of them those up to the last step, none if that counted. ``empty``: how many
    had no target."""

    def __init__(self, config: TrainConfig, note: Callable[[str], None]) -> None:
        self._run, self._note, self._rate = config.run, note, f"optimizer.lr={config.optimizer.lr:g}"
        self.steps = self.row = self.empty = self._first = 0

    def judge(self, step: int, *, cause: Cause | None, finite: bool) -> None:
        """Count ``step``, or end the run by it. ``cause``: why its update was not applied, if so; ``finite``: whether all
        parameters are, after it.

        Raises:
            NotFiniteError: the run ends by it.
        """
        run = self._run
        if not finite:
            raise NotFiniteError(
                f"step {step} made parameters that are not finite: {self._rate} or optimizer.weight_decay is too high"
            )
        if cause == "no target":
            self.empty += 1
            if self.empty == 1:
                self._note(f"step {step}: no target in this batch; nothing is learnt of such steps")
            return
        if cause is None:
            if self.row > 1:
                self._note(f"step {step}: finite again; {self.row} steps were skipped")
            self.row = 0
            return
        self._first = self._first if self.row else step
        self.steps, self.row = self.steps + 1, self.row + 1
        if self.row == run.max_skipped:
            since = f"steps {self._first} to {step} were" if self.row > 1 else f"step {step} was"
            if cause == "negative weight":
                raise NotFiniteError(
                    f"{since} skipped (run.max_skipped={run.max_skipped}): the weights of the targets add up to less than zero"
                )
            raise NotFiniteError(
                f"{since} not finite (run.max_skipped={run.max_skipped}): {self._rate} may be too high, or the data hold ids "
                "that the model does not know"
            )
        if self.row == 1:
            why = "the gradient is not finite" if cause == "not finite" else "the weights add up to less than zero"
            self._note(f"step {step}: {why}; parameters were left as they are")


def expert_load(sums: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Return how a step's choices spread over experts, given the sums ``load`` and ``dropped`` by layer: those of the fullest
    expert over the mean, in the layer where that is largest; and the fraction of all for which there was no room."""
    loads = [load for load in sums.get("load", {}).values() if load.any()]
    if not loads:
        return {}
    dropped = sum(int(x.sum()) for x in sums.get("dropped", {}).values())
    fullest = max(float(load.max() / load.mean()) for load in loads)
    return {"load_fullest": fullest, "load_dropped": dropped / sum(int(load.sum()) for load in loads)}


class TraceWindow:
    """A trace of the steps from the first to the last of ``steps`` (None: of none) in ``folder``. What goes wrong is told by
    ``warn`` in a line, and the rest of the trace is left out."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, warn: Callable[[str], None]) -> None:
        self._first, self._last = steps or (0, -1)
        self.folder, self._warn, self._running = folder, warn, False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the dispatch of a step; the trace starts with the first one that is in the window."""
        if not self._first <= number <= self._last:
            yield
            return
        if not self._running:
            self._running = self._tried(lambda: jax.profiler.start_trace(self.folder))
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield

    def close(self) -> bool:
        """End the trace; whether there was one. Call it when the last step has run."""
        running, self._running = self._running, False
        return running and self._tried(jax.profiler.stop_trace)

    def _tried(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:
            self._first, self._last = 0, -1
            self._warn(
                f"warning: the trace of run.profile_steps can't be written: {short_message(error)}; the run goes on without"
            )
            return False
        return True


class StepLog:
    """The figures of a run's finished steps: writes a record of each, shows them on the live line, and sums them up at the end.

    Args:
        several_processes: whether the run has more than this one.
        peak_flops_per_s: of a device, for the MFU; None where it is not known.
    """

    records: MetricsLog

    def __init__(
        self,
        prepared: Prepared,
        trainer: Trainer,
        start: Start,
        out: ProgressStream,
        several_processes: bool,
        peak_flops_per_s: float | None,
    ) -> None:
        config = prepared.config
        run = config.run
        self._config, self._first_step, self._several = config, start.step, several_processes
        self._filled_before = 0  # bytes, before the first step
        self.adopt(trainer)
        self._filled_before = self.peak_measured() or 0
        self.line = LiveLine(run.steps, out, print_every=run.output.log_every, start=start.step)
        self.skipped = Skipping(config, self.line.note)
        self.pace = Pace(run.batch * config.data.seq_len)
        self.last_step = start.step  # with a record
        self._loss, self._grad_norm, self._rate = math.nan, math.nan, None
        self._eval_loss: float | None = None
        self._experts: dict[str, float] = {}
        self._mfu_per_rate: float | None = None  # of one token a second
        self._peers_over_own = 1.0  # the MFU with attention counted whole ÷ this one
        if peak_flops_per_s:
            flops, peers_flops = step_flops(prepared, trainer.pipeline.stages)
            self._mfu_per_rate = flops / self.pace.tokens_per_step / (peak_flops_per_s * config.pipeline.num_devices)
            self._peers_over_own = peers_flops / flops if flops else 1.0

    def adopt(self, trainer: Trainer) -> None:
        """Go on with the steps of ``trainer``; what was recorded before belongs to another schedule."""
        self._trainer = trainer
        self.predicted, self.memory = trainer.pipeline.predicted_timeline(), trainer.train_step.memory_report()
        owned = trainer.pipeline.ownership
        own_peaks = dict(zip(owned.ranks, self.memory.peak_bytes, strict=True))
        self._peak_bytes = int(
            max(owned.shared("peak bytes", own_peaks).values())
        )  # of the fullest rank of all processes
        self._bubbles: list[float] = []  # of recorded steps, as are the ratios
        self._ratios: list[float] = []
        self.timeline: Timeline | None = None  # of the last recorded step
        self._slow = SlowProcesses(owned.processes.columns, trainer.pipeline.costs, owned.processes.who)

    def write(
        self, step: int, metrics: StepMetrics, scalars: Mapping[str, Any], loss: float, cause: Cause | None
    ) -> None:
        """Write the record of ``step``. ``scalars``: of its metrics, on the host; ``loss``: NaN without a target; ``cause``:
        why nothing was applied."""
        weight = scalars["weight"]
        self._loss = self._loss if cause == "no target" else loss
        self._grad_norm, self._rate = float(scalars["grad_norm"]), scalars["learning_rate"]
        record: dict[str, Any] = {"loss": loss, **{name: scalars[name] for name in ("grad_norm", "learning_rate")}}
        record["tokens"] = int(weight) if math.isfinite(weight) else None
        record |= {
            "applied": cause is None,
            **({} if cause is None else {"cause": cause}),
            **{f"metrics/{name}": value for name, value in scalars["metrics"].items()},
            **{f"sums/{name}": of_layer for name, of_layer in scalars["sums"].items()},
        }
        self._experts = expert_load(scalars["sums"])
        record |= self._experts
        record["schedule"] = self._trainer.schedule.name
        if metrics.timeline is not None:
            self.timeline = metrics.timeline
            self._bubbles.append(metrics.timeline.bubble_rate)
            self._ratios.append(self._trainer.pipeline.replay_ratio(metrics.outputs))
            for line in self._slow.observe(metrics.outputs.process_seconds):
                self.line.note(f"step {step}: {line}")
            rate = self.pace.lap()
            record |= {
                "tokens_per_s": rate,
                "step_s": metrics.outputs.step_s,
                "bubble_measured": self._bubbles[-1],
                "replay_ratio": self._ratios[-1],
            }
            optional = {"mfu": self._mfu_per_rate and rate * self._mfu_per_rate, "peak_bytes": self.peak_measured()}
            optional["clock_error_s"] = metrics.outputs.clock_error_s if self._several else None
            record |= {name: value for name, value in optional.items() if value is not None}
        self.records.write(step, record)
        self.last_step = step

    def show(self, step: int) -> None:
        """Show how things stand after ``step``, which has begun; its own figures may follow with the next one."""
        self.line.update(
            step,
            loss=self._loss,
            tokens=self.pace.tokens_per_step,
            learning_rate=self._rate,
            grad_norm=self._grad_norm,
            mfu_per_rate=self._mfu_per_rate,
            bubble_predicted=self.predicted.bubble_rate,
            bubble_measured=self._bubbles[-1] if self._bubbles else None,
            peak_predicted=self._peak_bytes,
            peak_measured=self.peak_measured() if self.line.draws(step) else None,
            extra="  ".join(self._remarks()),
        )

    def write_evaluation(self, step: int, loss: float, means: Mapping[str, float]) -> None:
        """Write the held-out ``loss`` after ``step``, and what else the model reports."""
        self._eval_loss = loss
        self.records.write(step, {"eval_loss": loss, **{f"eval_metrics/{name}": x for name, x in means.items()}})
        metrics_text = "".join(f", {name} {x:.4f}" for name, x in means.items())
        self.line.note(f"step {step}  held-out loss {loss:.4f}{metrics_text}")
        self.line.restart_clock()

    def peak_measured(self) -> int | None:
        """Bytes of the fullest device; None where the backend does not count, or what came before the steps filled more:
        stages that were timed alone, with the results of many calls at once."""
        submeshes = (self._trainer.pipeline.submeshes[rank] for rank in self._trainer.pipeline.ownership.ranks)
        return peak_bytes_in_use((d for submesh in submeshes for d in submesh.devices.flat), self._filled_before)

    def _remarks(self) -> Iterator[str]:
        if self._experts:
            yield f"fullest expert {self._experts['load_fullest']:.2f} × mean"
        if fraction := self._experts.get("load_dropped"):
            yield f"{fraction:.2%} dropped"
        if self.skipped.steps:
            yield f"{self.skipped.steps} skipped"
        if self.skipped.empty:
            yield f"{self.skipped.empty} without a target"
        if remark := self._trainer.train_step.post_validation.remark:
            yield remark
        if self._config.run.replan.enabled:
            yield f"schedule {self._trainer.schedule.name}"

    def draw(self, folder: RunDirectory) -> None:
        """The last recorded step under what its own mean action times predict: one scale, also where devices share cores."""
        if self.timeline is None:
            folder.draw(self._trainer.schedule, [self.predicted])
            return
        costs = with_measured_times(self._trainer.pipeline.costs, seconds_by_op([self.timeline]))
        predicted = simulate(with_priced_reductions(self._trainer.schedule, costs), costs)
        folder.draw(self._trainer.schedule, [predicted, self.timeline])

    def result(
        self, folder: RunDirectory, step: int, stopped: bool, gains: tuple[float, float], started: float
    ) -> TrainResult:
        gain_predicted, gain_measured = gains
        return TrainResult(
            out_dir=folder.path,
            step=step,
            steps_run=step - self._first_step,
            stopped=stopped,
            loss=self._loss,
            eval_loss=folder.last_values(step).get("eval_loss") if self._eval_loss is None else self._eval_loss,
            tokens_per_s=self.pace.tokens_per_s,
            bubble_predicted=self.predicted.bubble_rate,
            bubble_measured=float(np.median(self._bubbles)) if self._bubbles else float("nan"),
            replay_ratio=float(np.median(self._ratios)) if self._ratios else float("nan"),
            peak_bytes=self._peak_bytes,
            skipped_steps=self.skipped.steps,
            empty_steps=self.skipped.empty,
            rollbacks=self._trainer.train_step.post_validation.rollbacks,
            seconds=time.perf_counter() - started,
            schedule=self._trainer.schedule.name,
            gain_predicted=gain_predicted,
            gain_measured=gain_measured,
            mfu=(mfu := self.pace.tokens_per_s * (self._mfu_per_rate or float("nan"))),
            peers_mfu=mfu * self._peers_over_own,
            peak_measured_bytes=self.peak_measured(),
        )
