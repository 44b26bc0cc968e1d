"""The training loop: steps, live line, evaluation, metrics, checkpoints, resume, and a clean stop on Ctrl-C or SIGTERM.

The host runs one step ahead of the devices. Every ``log_every`` steps one step is recorded, from idle devices to idle
devices; it gives the measured bubble and the ratio of the step to a replay of its own durations. What a config, its data or
a checkpoint can have wrong is found before anything is compiled, and before anything on disk changes.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, TextIO

import jax
import numpy as np

from jaxpipe import __version__
from jaxpipe.errors import JaxpipeError, RunError
from jaxpipe.profile import with_measured_times
from jaxpipe.runtime.measured import seconds_by_op
from jaxpipe.schedule import Timeline, simulate
from jaxpipe.stage.reference import init_params
from jaxpipe.train import resume
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.devices import find_devices, gist
from jaxpipe.train.metrics import LiveLine, MetricsLog, require_tensorboard
from jaxpipe.train.replan import Replanner
from jaxpipe.train.report import TrainResult
from jaxpipe.train.resume import Start
from jaxpipe.train.run_directory import RunDirectory
from jaxpipe.train.setup import Prepared, Setup, compile_setup, microbatch_size, prepare
from jaxpipe.train.step import StepMetrics, TrainState
from jaxpipe.train.stop import Stop

__all__ = ["TrainResult", "train"]


def train(config: TrainConfig, stream: TextIO | None = None) -> TrainResult:
    """Run ``config`` to its last step, or until a signal. Progress goes to ``stream`` (standard output by default).

    Call :func:`jaxpipe.train.devices.request_devices` first, before JAX looks for devices.

    Raises:
        JaxpipeError: the config, data, checkpoint or schedule is wrong, an instruction failed, or a checkpoint could not be
            written. Checkpoints written before stay.
    """
    started = time.perf_counter()
    stream = sys.stdout if stream is None else stream

    def note(text: str) -> None:
        print(text, file=stream, flush=True)

    with RunDirectory(config.run) as folder:
        origin = resume.choose(config, folder.store, note)
        if origin is not None and origin.step >= config.run.steps:
            note(
                f"nothing to do: {folder.path} is at step {origin.step} of run.steps={config.run.steps}; raise run.steps, or "
                "choose another run.out_dir"
            )
            last = folder.last_values(origin.step)
            return TrainResult.finished(folder.path, origin.step, last, time.perf_counter() - started)
        if origin is not None:
            folder.check_metrics()
        devices, remark = find_devices(config.pipeline.num_devices, config.run.platform, tp=config.pipeline.tp)
        if config.run.tensorboard:
            require_tensorboard()
        if stream.isatty():
            note(f"reading {config.data.path}")
        prepared = prepare(config)
        start = resume.start_of(prepared, origin, folder.store, note)
        held_out = held_out_microbatches(prepared)
        if remark:
            note(remark)
        setup = compile_setup(prepared, devices, note)
        note(f"built in {time.perf_counter() - started:.1f} s")
        folder.make()
        folder.write_plan(setup)
        with folder.store, Stop() as stop:
            return _Run(setup, start, held_out, folder, stream, stop).run(started)


def held_out_microbatches(prepared: Prepared) -> Mapping[str, np.ndarray]:
    """What every evaluation of a run looks at: arrays ``[count, microbatch size, sequence]``; empty if there is none.

    Raises:
        DataError: nothing is held out.
    """
    config, m = prepared.config, prepared.config.pipeline.microbatches
    if not config.run.eval_every:
        return {}
    limit = config.run.eval_batches * m
    batches = prepared.dataset.held_out_batches(microbatch_size(config), config.data.seq_len, limit)
    return {name: np.stack([b[name] for b in batches]) for name in batches[0]}


class _Run:
    """One process's part of a run, from its first step to its last."""

    log: MetricsLog

    def __init__(
        self,
        setup: Setup,
        start: Start,
        held_out: Mapping[str, np.ndarray],
        folder: RunDirectory,
        stream: TextIO,
        stop: Stop,
    ) -> None:
        self.setup, self.start, self.held_out, self.folder, self.stop = setup, start, held_out, folder, stop
        self.config, self.pipe, self.train_step = setup.config, setup.pipeline, setup.step
        run = self.config.run
        self.predicted, self.memory = self.pipe.predicted_timeline(), self.train_step.memory_report()
        self.line = LiveLine(run.steps, stream, every=run.log_every, start=start.step)
        enabled = self.config.replan.enabled
        self.replanner = Replanner(self.config, self.pipe, self.line.note, start.step) if enabled else None
        self.pending: tuple[int, StepMetrics] | None = None  # dispatched, not yet in the log
        self.step = self.logged = start.step
        self.saved = start.step if start.params is not None else -1
        self.evaluated: tuple[int, float] | None = None
        self.loss, self.skipped = float("nan"), 0
        self.bubbles: list[float] = []  # of recorded steps, as are the ratios
        self.ratios: list[float] = []
        self.timeline: Timeline | None = None  # of the last recorded step
        self.pace = _Pace(run.batch * self.config.data.seq_len)

    def run(self, started: float) -> TrainResult:
        run, resumed = self.config.run, self.start.params is not None
        if resumed:
            for moved in self.folder.store.discard_after(self.start.step):
                self.line.note(moved)
            self.line.note(f"resumed from step {self.start.step} ({self.folder.store.path(self.start.step)})")
        board = self.folder.path / "tensorboard" if run.tensorboard else None
        first = self.start.step if resumed else None
        with MetricsLog(self.folder.metrics, resume_step=first, tensorboard_dir=board) as self.log:
            try:
                self._steps(self._first_state())
            except (RunError, jax.errors.JaxRuntimeError) as error:
                raise self._failed(error) from error
            finally:
                self.line.close()
                if self.replanner is not None:
                    self.replanner.close()
        if self.stopped:
            self.line.note(
                f"stopped by {self.stop.requested} after step {self.step} of {run.steps}; the checkpoint is saved, run the "
                "same command again to go on"
            )
        self._draw()
        return self._result(started)

    @property
    def stopped(self) -> bool:
        return bool(self.stop.requested) and self.step < self.config.run.steps

    # -- steps --------------------------------------------------------------------------------------------------------

    def _first_state(self) -> TrainState:
        start = self.start
        params = init_params(self.setup.model, self.config.run.seed) if start.params is None else start.params
        return self.train_step.init(params, start.optimizer, step=start.step)

    def _steps(self, state: TrainState) -> None:
        run, first = self.config.run, self.start.step
        if self.saved == first and self._due(run.eval_every, first) and not self.folder.was_evaluated(first):
            self._evaluate(state)  # a signal came between the step and its evaluation
        while state.step < run.steps and not self.stop.requested:
            self._replan()
            state = self._advance(state)
            if self._due(run.eval_every, state.step) and not self.stop.requested:
                self._evaluate(state)
            if self._due(run.checkpoint_every, state.step):
                self._save(state)
        self._settle()
        if self.saved != state.step:
            self._save(state)
        self.folder.store.wait()

    def _replan(self) -> None:
        """Go on with a better schedule, if one was found. What was recorded before belongs to the old one."""
        if self.replanner is None or (pipe := self.replanner.poll(self.step)) is None:
            return
        self._settle()
        self.pipe, self.train_step = pipe, self.train_step.with_pipeline(pipe)
        self.predicted, self.timeline, self.bubbles, self.ratios = pipe.predicted_timeline(), None, [], []
        self.memory = self.train_step.memory_report()
        self.folder.write_schedule(pipe.schedule)

    def _due(self, every: int, step: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.config.run.steps)

    def _advance(self, state: TrainState) -> TrainState:
        """One more step; its scalars are waited for when the next one is under way."""
        began = time.perf_counter()
        m = self.config.pipeline.microbatches
        batch = {k: v.reshape(m, -1, *v.shape[1:]) for k, v in self.start.batches.batch_at(state.step).items()}
        key = jax.random.fold_in(jax.random.key(self.config.run.seed), state.step)
        record = (state.step + 1) % self.config.run.log_every == 0
        if record:  # what runs still would count as this step's
            self._settle()
            jax.block_until_ready((dict(state.master), dict(state.compute)))
        state, metrics = self.train_step(state, batch, key, record=record)
        self._settle()
        self.pending = (state.step, metrics)
        self.step = state.step
        self.pace.add(time.perf_counter() - began)
        compiled = state.step == self.start.step + 1  # the first step took so long that nothing overlaps anyway
        if record or compiled or state.step == self.config.run.steps:
            self._settle()
        self.line.update(
            state.step,
            loss=self.loss,
            tokens=self.pace.tokens_per_step,
            bubble_predicted=self.predicted.bubble_rate,
            bubble_measured=self.bubbles[-1] if self.bubbles else None,
            peak_bytes=max(self.memory.peak_bytes),
            extra="" if self.replanner is None else f"schedule {self.pipe.schedule.name}",
        )
        return state

    def _settle(self) -> None:
        """Wait for the pending step's scalars and write its record."""
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        loss, norm, applied, weight = jax.device_get((metrics.loss, metrics.grad_norm, metrics.applied, metrics.weight))
        self.loss = float(loss)
        record: dict[str, Any] = {"loss": self.loss, "grad_norm": norm, "tokens": int(weight), "applied": bool(applied)}
        record["schedule"] = self.pipe.schedule.name
        if metrics.timeline is not None:
            self.timeline = metrics.timeline
            self.bubbles.append(metrics.timeline.bubble_rate)
            self.ratios.append(self.pipe.replay_ratio(metrics.outputs))
            record |= {
                "tokens_per_s": self.pace.lap(),
                "step_s": metrics.outputs.step_s,
                "bubble_measured": self.bubbles[-1],
                "replay_ratio": self.ratios[-1],
            }
            if self.replanner is not None:
                self.replanner.observe(step, metrics.timeline, metrics.outputs.step_s)
        if not applied:
            self.skipped += 1
            self.line.note(f"step {step}: the gradient is not finite; parameters were left as they are")
        self.log.write(step, record)
        self.logged = step

    def _evaluate(self, state: TrainState) -> None:
        self._settle()
        loss_sum, weight = self.pipe.evaluate(state.compute, self.held_out)
        loss = loss_sum / weight
        self.evaluated = (state.step, loss)
        self.log.write(state.step, {"eval_loss": loss})
        self.line.note(f"step {state.step}  held-out loss {loss:.4f}")
        self.line.restart_clock()

    def _save(self, state: TrainState) -> None:
        """Start to save. The metrics up to here are written first: a run that goes on from here finds them all."""
        self._settle()
        params, optimizer = self.train_step.by_layer(state)
        meta = {
            "data": self.start.batches.state_at(state.step).to_dict(),
            "config": self.config.to_dict(),
            "program": self.program,
            "schedule": self.pipe.schedule.name,
            "jaxpipe": __version__,
        }
        step, loss = self.evaluated or (-1, None)
        self.folder.store.save(state.step, params, optimizer, meta, eval_loss=loss if step == state.step else None)
        self.saved = state.step
        self.line.restart_clock()

    @cached_property
    def program(self) -> dict[str, str]:
        """What checkpoints keep to know their model again."""
        return resume.model_digest(self.setup.model)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> RunError:
        """What went wrong, and what is left. An error of a device may turn up only when its result is waited for."""
        what = str(error) if isinstance(error, RunError) else f"a device failed: {gist(error)}"
        with suppress(JaxpipeError, jax.errors.JaxRuntimeError):
            self._settle()
        with suppress(JaxpipeError):
            self.folder.store.close()
        step = self.folder.store.latest()
        left = (
            "no checkpoint was saved before"
            if step is None
            else f"run the same command again to go on from step {step}"
        )
        return RunError(f"after step {self.logged}: {what}; {left}")

    def _draw(self) -> None:
        """The last recorded step under what its own mean action times predict: one scale, also where devices share cores."""
        if self.timeline is None:
            self.folder.draw(self.pipe.schedule, [self.predicted])
            return
        costs = with_measured_times(self.pipe.costs, seconds_by_op([self.timeline]))
        self.folder.draw(self.pipe.schedule, [simulate(self.pipe.schedule, costs), self.timeline])

    def _result(self, started: float) -> TrainResult:
        gains = (math.nan, math.nan) if self.replanner is None else self.replanner.gains
        return TrainResult(
            out_dir=self.folder.path,
            step=self.step,
            steps_run=self.step - self.start.step,
            stopped=self.stopped,
            loss=self.loss,
            eval_loss=self.evaluated[1] if self.evaluated else self.folder.last_values(self.step).get("eval_loss"),
            tokens_per_s=self.pace.tokens_per_s,
            bubble_predicted=self.predicted.bubble_rate,
            bubble_measured=float(np.median(self.bubbles)) if self.bubbles else float("nan"),
            replay_ratio=float(np.median(self.ratios)) if self.ratios else float("nan"),
            peak_bytes=max(self.memory.peak_bytes),
            skipped_steps=self.skipped,
            seconds=time.perf_counter() - started,
            schedule=self.pipe.schedule.name,
            gain_predicted=gains[0],
            gain_measured=gains[1],
        )


class _Pace:
    """Seconds of training steps, evaluation and saving left out; the first, which compiles, only counts if it is alone."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self._seconds: list[float] = []
        self._lap = 0

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def lap(self) -> float:
        """Tokens a second since the last lap."""
        since, self._lap = max(self._lap, 1), len(self._seconds)
        return self._rate(self._seconds[since:] or self._seconds[-1:])

    @property
    def tokens_per_s(self) -> float:
        return self._rate(self._seconds[1:] or self._seconds)

    def _rate(self, seconds: list[float]) -> float:
        return self.tokens_per_step * len(seconds) / sum(seconds) if seconds else float("nan")
