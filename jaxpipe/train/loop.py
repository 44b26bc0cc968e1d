"""The training loop: steps, live line, evaluation, metrics, checkpoints, resume, and the ways in which a run may end.

The host runs one step ahead of the devices. Every ``log_every`` steps one step is recorded, from idle devices to idle
devices; it gives the measured bubble and the ratio of the step to a replay of its own durations. What a config, its data or
a checkpoint can have wrong is found before anything is compiled, and before anything on disk changes.

A run ends at its last step; by a signal, after saving; by devices that fail or hang; by gradients or parameters that are not
finite (``run.max_skipped``); by data that are gone; or where its last checkpoint can't be saved. Nothing
else ends it: what can't be shown, drawn or written down beside checkpoints costs a line. A step whose gradient is not finite
changes nothing, and no checkpoint is saved before a finite one follows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TextIO

import jax
import numpy as np

from jaxpipe.errors import DataError, JaxpipeError, JudgedError, NotFiniteError, RunError, short_message
from jaxpipe.plot import plot_timelines
from jaxpipe.runtime.connections import Position, ProcessStatus
from jaxpipe.runtime.executor import place_of
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.schedule.files import from_json, to_json
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.devices import cpu_settings, keep_heap, memory_advice, of_device
from jaxpipe.train.import_export import completed
from jaxpipe.train.metrics import MetricsLog, TrackerFactory, find_trackers
from jaxpipe.train.replan import Offer, Replanner
from jaxpipe.train.run import resume
from jaxpipe.train.run.agreement import agree_on_batch, agree_on_data, agree_on_devices, agree_on_model, devices_of
from jaxpipe.train.run.compiling import use_compile_cache
from jaxpipe.train.run.ending import EndingEarly, Stop, Watchdog
from jaxpipe.train.run.progress import ProgressStream
from jaxpipe.train.run.resume import RunCheckpoints, Start, go_on
from jaxpipe.train.run.run_directory import RunDirectory, TrainResult
from jaxpipe.train.run.step_log import StepLog, TraceWindow
from jaxpipe.train.setup import Prepared, compile_setup, held_out_microbatches, prepare
from jaxpipe.train.state import StepMetrics, TrainState, cause_of
from jaxpipe.train.trainer import Trainer

__all__ = ["TrainResult", "train"]

_ENDED = 1 << 30  # behind all actions of a step
_SCALARS = ("loss", "grad_norm", "learning_rate", "applied", "weight", "finite", "metrics", "sums", "stop", "switch")
"""The metrics of a step that its record is made of."""


def train(
    config: TrainConfig,
    stream: TextIO | ProgressStream | None = None,
    *,
    own_process: bool = False,
    processes: Processes | None = None,
    peak_flops_per_s: Callable[[str, str], float | None] = lambda device_kind, dtype: None,
) -> TrainResult:
    """Run ``config`` to its last step, or until a signal. Progress goes to ``stream`` (standard output by default).
    ``own_process``: nothing else is done in this process, so settings may be made that hold for all of it. ``processes``: of
    the run, which have agreed on their settings and started JAX; by default there is this one. ``peak_flops_per_s``: of a
    device kind and a dtype, as far as it is known, for the MFU.

    Call :func:`jaxpipe.train.devices.request_devices` first, before JAX looks for devices.

    Raises:
        JaxpipeError: the config, data, checkpoint or schedule is wrong, an instruction failed, steps were not finite, or the
            last checkpoint could not be written. Checkpoints written before stay.
    """
    processes = processes or SingleProcess()
    agree_on_devices(processes, config.pipeline)
    started = time.perf_counter()
    out = stream if isinstance(stream, ProgressStream) else ProgressStream(sys.stdout if stream is None else stream)
    # Only process 0 speaks: all would say the same.
    if processes.mine:
        out = ProgressStream(None)
    with RunDirectory(config.run, processes) as folder:

        def ended(how: str, code: int) -> None:
            folder.__exit__()
            processes.end(how, code)

        # Until the first step nothing is there to save, so a signal may end the process at once; from then on ``Stop``
        # lets the step end and saves.
        with EndingEarly(ended):
            origin = resume.choose(config.run, folder.store, out.print)
            if origin is None and folder.began_before:
                out.print(f"a run began in {folder.path} and no checkpoint of it is finished: starts at step 0")
            if origin is not None and origin.step >= config.run.steps:
                out.print(
                    f"nothing to do: {folder.path} is at step {origin.step} of run.steps={config.run.steps}; raise run.steps, "
                    "or choose another run.out_dir"
                )
                last = folder.last_values(origin.step)
                return TrainResult.finished(folder.path, origin.step, last, time.perf_counter() - started)
            if origin is not None:
                folder.check_metrics()
            config = completed(config, None if origin is None else origin.meta)
            devices = devices_of(config.pipeline, config.run.machine.platform, processes)
            if remark := use_compile_cache(config.run.machine.compile_cache, processes.mine):
                out.print(f"warning: {remark}")
            trackers = find_trackers(config.run.output.trackers)
            if out.isatty():
                out.print("reading the data")
            prepared = prepare(config, processes, None if origin is None else origin.meta)
            agree_on_data(processes, prepared.dataset.fingerprint)
            agree_on_model(processes, config.model.target, lambda: prepared.program)
            start = resume.start_of(prepared, origin, folder.store, out.print)
            held_out = held_out_microbatches(prepared)
            agree_on_batch(processes, "the held-out batches", held_out)
            if own_process and devices[0].platform == "cpu":
                out.print(cpu_settings(keep_heap()))
            trainer = compile_setup(
                prepared, devices, out.print, fused=start.fused, processes=processes, decay=start.decay
            )
            out.print(f"built in {time.perf_counter() - started:.1f} s")
        with folder.store, Stop() as stop:
            peak = peak_flops_per_s(devices[0].device_kind, config.run.dtype)
            return TrainingLoop(prepared, trainer, start, held_out, folder, out, stop, processes, trackers, peak).run(
                started
            )


class TrainingLoop:
    """The steps of a run in one process, from its first to its last: what follows what, and in which ways it may end.

    :class:`~jaxpipe.train.run.step_log.StepLog` has the figures, :class:`~jaxpipe.train.run.resume.RunCheckpoints` the saves.
    """

    def __init__(
        self,
        prepared: Prepared,
        trainer: Trainer,
        start: Start,
        held_out: Mapping[str, np.ndarray],
        folder: RunDirectory,
        out: ProgressStream,
        stop: Stop,
        processes: Processes,
        trackers: Mapping[str, TrackerFactory],
        peak_flops_per_s: float | None,
    ) -> None:
        self.prepared, self.start, self.held_out, self.folder, self.stop = prepared, start, held_out, folder, stop
        self.config, self.trainer = prepared.config, trainer
        self.processes, self.trackers = processes, trackers
        run = self.config.run
        self.trainer.program = prepared.program  # traced now, and not at the first checkpoint
        self.figures = StepLog(prepared, trainer, start, out, processes.number > 1, peak_flops_per_s)
        self.line = self.figures.line
        self.checkpoints = RunCheckpoints(
            prepared,
            start,
            folder.store,
            processes,
            lambda: self.figures.records.sync(),
            lambda step: self._due(run.checkpoint_every, step),
            self.line.note,
        )
        self.replanner = Replanner(self.config, self.pipe, self.line.note, start.step)
        self.offer: Offer | None = None  # which the other processes have not heard of yet
        self.switching = False  # whether all have heard that one of them has an offer
        self.agreed_stop = ""  # the signal that all have heard of
        self.pending: tuple[int, StepMetrics] | None = None  # dispatched, not yet in the log
        self.step = self.begun = start.step  # the last one dispatched, and the last one that was begun
        self.before: TrainState | None = None  # the state that the step under way began with
        self.evaluating = False
        status = ProcessStatus(self._place, lambda: go_on(folder.store.latest()), self._whole_step, self._rescue)
        processes.set_status(status)
        self.watchdog = Watchdog(run.machine.watchdog_s, self._explain, processes.time_out)
        traces = folder.path / "profile"
        traces = traces / f"process{processes.mine}" if processes.number > 1 else traces
        self.window = TraceWindow(run.output.profile_steps, traces, self.line.note)

    def run(self, started: float) -> TrainResult:
        run = self.config.run
        if self.start.resumed:
            for moved in self.folder.store.discard_after(self.start.step):
                self.line.note(moved)
            self.line.note(f"resumed from step {self.start.step} ({self.folder.store.path(self.start.step)})")
        with self._less_important("settings and plan"):
            self.folder.write_plan(self.config, self.prepared.plan, self.trainer.schedule)
            self.folder.keep_tokenizer(self.prepared.dataset.tokenizer, self.prepared.config)
        first = self.start.step if self.start.resumed else None
        evaluated = first is not None and self.folder.was_evaluated(first)
        self.processes.barrier("metrics")  # all have read what process 0 goes on with
        path = None if self.processes.mine else self.folder.metrics
        starts = {
            name: partial(make, self.folder.path, self.config.to_dict(), first) for name, make in self.trackers.items()
        }
        records = MetricsLog(path, warn=self.line.note, resume_step=first, trackers=starts)
        with records as self.figures.records, self.watchdog:
            try:
                self._steps(self._first_state(), evaluated)
            except (NotFiniteError, JudgedError) as error:
                raise type(error)(f"{error}; {self.checkpoints.advice('change that and ')}") from error
            except Exception as error:
                if not (isinstance(error, RunError) or of_device(error)):
                    raise
                raise self._failed(error) from error
            finally:
                self.window.close()
                self.line.close()
                self.replanner.close()
        if self.stopped:
            self.line.note(
                f"stopped by {self.stopping} after step {self.step} of {run.steps}; the checkpoint is saved, run the "
                "same command again to go on"
            )
        with self._less_important("pictures"):
            self.figures.draw(self.folder)
        return self.figures.result(self.folder, self.step, self.stopped, self.replanner.gains, started)

    @property
    def pipe(self) -> Pipeline:
        return self.trainer.pipeline

    @property
    def stopping(self) -> str:
        """The signal by which the run stops after this step, or empty; several processes all say so after the same step."""
        return self.agreed_stop if self.processes.number > 1 else self.stop.requested

    @property
    def stopped(self) -> bool:
        return bool(self.stopping) and self.step < self.config.run.steps

    # -- steps --------------------------------------------------------------------------------------------------------

    def _first_state(self) -> TrainState:
        start = self.start
        if start.params is None:
            return self.trainer.init()
        return self.trainer.train_step.init(start.params, start.optimizer, step=start.step)

    def _steps(self, state: TrainState, evaluated: bool) -> None:
        run, first = self.config.run, self.start.step
        if self.start.resumed and self._due(run.eval_every, first) and not evaluated:
            self._evaluate(state)  # a signal came between the step and its evaluation
        while state.step < run.steps and not self.stopping:
            self._replan(state)
            record = (state.step + 1) % run.output.log_every == 0 or self._is_traced(state.step + 1)
            try:
                batch = self.start.batches.batch_at(state.step, self.trainer.own_rows(record))
            except DataError as error:
                self._finish(state)
                raise DataError(f"after step {state.step}, which is saved: {error}") from None
            state = self._advance(state, batch, record)
            if self._due(run.eval_every, state.step) and not self.stopping:
                self._evaluate(state)
            if self.checkpoints.due(state.step):
                self._save(state)
        self._finish(state)

    def _replan(self, state: TrainState) -> None:
        """Go on with a better schedule, if one was found: in several processes once all have heard that there is one. What was
        recorded before belongs to the old one."""
        if self.offer is None:
            self.offer = self.replanner.poll()
        if not (self.switching if self.processes.number > 1 else self.offer):
            return
        # Nothing of the old order may be under way: its records belong to it, and an update ahead is its own
        # pipeline's.
        self._settle()
        state.committed()
        self.switching = False
        message = self.processes.broadcast("switch", to_json(self.offer) if self.offer else None)
        offer = from_json(Offer, message, "offer")
        self.offer = None
        if (pipe := self.replanner.adopt(self.step, offer)) is None:
            return
        self.trainer = self.trainer.with_pipeline(pipe)
        self.figures.adopt(self.trainer)
        with self._less_important("the schedule"):
            self.folder.write_schedule(pipe.schedule)

    def _due(self, interval: int, step: int) -> bool:
        return interval > 0 and (step % interval == 0 or step == self.config.run.steps)

    def _is_traced(self, step: int) -> bool:
        """Return whether a trace ends with ``step``, also where this process could not begin it: all record the same steps."""
        return (self.config.run.output.profile_steps or (0, 0))[1] == step

    def _advance(self, state: TrainState, batch: Mapping[str, np.ndarray], record: bool) -> TrainState:
        """One more step; its scalars are waited for when the next one is under way."""
        began, run = time.perf_counter(), self.config.run
        stop, switch = bool(self.stop.requested), self.offer is not None
        self.begun, self.before = state.step + 1, state
        with self.watchdog.watch(self.begun):
            # A recorded step is measured from idle devices to idle devices: what ran still would count as this step's.
            if record:
                self._settle()
                state = self.before = state.committed()
                with self.figures.pace.waiting():
                    jax.block_until_ready((dict(state.master), dict(state.compute)))
            with self.window.step(state.step + 1), self.figures.pace.step():
                state, metrics = self.trainer.step(state, batch, record=record, stop=stop, switch=switch)
        self._settle()
        self.pending = (state.step, metrics)
        self.step = state.step
        self.watchdog.took(time.perf_counter() - began)
        # Scalars are read one step late so that the host runs ahead, except where it waits anyway: after a recorded
        # step, before an evaluation or a save, and after the first step, which compiled for so long that nothing
        # overlaps.
        compiled = state.step == self.start.step + 1
        waits = any(self._due(interval, state.step) for interval in (run.eval_every, run.checkpoint_every))
        if record or compiled or waits or state.step == run.steps:
            self._settle()
        self.figures.show(state.step)
        if self._is_traced(state.step):
            self._keep_trace()
        return state

    def _keep_trace(self) -> None:
        """End the profiler's trace, and put the timeline of its last step beside it."""
        if not self.window.close():
            return
        self.line.note(f"the trace of run.profile_steps is in {self.window.folder}")
        if self.figures.timeline is not None:
            with self._less_important("the timeline beside the trace"):
                for name in ("timeline.html", "timeline.trace.json"):
                    plot_timelines(
                        [self.figures.timeline], self.window.folder / name, title=f"step {self.step}", units="si"
                    )
        self.line.restart_clock()

    def _settle(self) -> None:
        """Wait for the pending step's scalars, write its record, and judge it.

        Raises:
            NotFiniteError, JudgedError: the run is not to go on from it.
        """
        if self.pending is None:
            return
        step, metrics = self.pending
        with self.watchdog.watch(step), self.figures.pace.waiting():
            scalars = jax.device_get({name: getattr(metrics, name) for name in _SCALARS})
        self.pending = None
        if scalars["stop"]:
            self.agreed_stop = self.stop.requested or "a signal to another process"
        self.switching = self.switching or bool(scalars["switch"])
        cause = cause_of(*(scalars[name] for name in ("applied", "loss", "grad_norm", "weight")))
        loss = float("nan") if cause == "no target" else float(scalars["loss"])
        self.checkpoints.observe(step, loss, counts=cause != "no target")
        self.figures.write(step, metrics, scalars, loss, cause)
        if metrics.timeline is not None:
            self.replanner.observe(step, metrics.timeline, metrics.outputs.step_s)
        self.figures.skipped.judge(step, cause=cause, finite=bool(scalars["finite"]))
        for layer in self.pipe.model.layers:
            sums = {name: of_layer[layer.name] for name, of_layer in scalars["sums"].items() if layer.name in of_layer}
            if layer.judge is not None and (reason := layer.judge(sums)):
                raise JudgedError(f"step {step}: layer {layer.name}: {reason}")

    def _evaluate(self, state: TrainState) -> None:
        self._settle()
        self.evaluating, self.before = True, state
        with self.watchdog.watch(state.step, self.config.run.output.eval_batches * self.pipe.schedule.num_ranks):
            means = self.trainer.evaluate(state, self.held_out)
        self.evaluating = False
        loss = means.pop("loss")
        del means["weight"]
        self.checkpoints.observe_evaluation(state.step, loss)
        self.figures.write_evaluation(state.step, loss, means)

    def _save(self, state: TrainState) -> None:
        """Start to save, unless the last step was skipped."""
        self._settle()
        skipped = self.figures.skipped.row > 0
        self.checkpoints.save(self.trainer, state, skipped=skipped)
        if not skipped:
            self.line.restart_clock()

    def _finish(self, state: TrainState) -> None:
        """Bring the last step to the disk. Raises CheckpointError if it can't be saved."""
        self._settle()
        self.checkpoints.finish(self.trainer, state, skipped=self.figures.skipped.row > 0)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> RunError:
        """Return what went wrong, and what is left. An error of a device may turn up only where a later step needs its
        result."""
        what = str(error) if isinstance(error, RunError) else f"a device failed: {short_message(error)}"
        try:
            if self.pending is not None:
                with self.watchdog.watch(self.pending[0]):
                    self.pending[1].outputs.wait()
        except RunError as first:
            what = str(first)
        # The record of the last step that did finish is still wanted; that settling fails too is told already.
        with suppress(Exception):
            self._settle()
        advice = memory_advice(error, lambda: self.figures.memory)
        return RunError(f"after step {self.figures.last_step}: {what}{advice}; {self.checkpoints.advice()}")

    def _place(self) -> Position:
        """Return how far this process has come. Called in another thread, while the one that runs steps waits."""
        executor = self.pipe.executor
        if self.evaluating:
            return self.step, _ENDED + 1, "its evaluation has not"
        pending = self.pending
        before = [] if pending is None else [(pending[0], pending[1].outputs.tokens)]
        for step, tokens in [*before, (self.begun, executor.dispatched)]:
            if at := executor.unfinished(tokens):
                events = sorted((e for e in self.figures.predicted.events if e.lane != "send"), key=lambda e: e.start_s)
                order = [(e.rank, a) for e in events for a in (e.action, *e.action.actions)]
                return (
                    step,
                    order.index(at) if at in order else 0,
                    f"{place_of(*at)} of step {step} has not run",
                )
        waits = "its update has not run" if before or self.begun > self.step else "the next step has not begun"
        return self.begun, _ENDED, waits

    def _explain(self) -> str:
        """Say where this process stands, and what to do. Called in another thread, as :meth:`_place`; what can be saved is."""
        words, step = self._place()[2], self._whole_step()
        with suppress(JaxpipeError):
            if step >= 0:
                self._rescue(step)
        return f"{words}; {go_on(self.folder.store.latest())}"

    def _whole_step(self) -> int:
        """Return the last finished step, if all its arrays are here and no checkpoint is newer, or -1. Called as
        :meth:`_place`. The update of the step under way consumes them: they are here in evaluations and steps that are
        recorded, which wait."""
        state, newest = self.before, self.folder.store.latest() or 0
        finished = (
            state and self.figures.last_step == state.step > newest and not self.figures.skipped.row and state.whole
        )
        return self.figures.last_step if finished else -1

    def _rescue(self, step: int) -> None:
        """Save ``step``, the last finished one, from another thread, in all processes. Raises CheckpointError."""
        self.checkpoints.put(self.trainer, replace(self.before, acc={}), prune=False)  # type: ignore[arg-type, type-var]  # of the next step
        self.folder.store.wait()

    @contextmanager
    def _less_important(self, what: str) -> Iterator[None]:
        """A failure in the block is told, and the run goes on: its checkpoints are what counts."""
        try:
            yield
        except Exception as error:
            self.line.note(f"warning: {what} can't be written: {short_message(error)}; the run goes on without")
