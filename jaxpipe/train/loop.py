"""The training loop: steps, live line, evaluation, metrics, checkpoints, resume, and a clean stop on Ctrl-C or SIGTERM.

The host runs one step ahead of the devices. Every ``log_every`` steps one step is recorded, which gives the measured bubble
and the ratio of the step to a replay of its own durations. A run directory holds ``config.toml``, ``metrics.jsonl``,
``checkpoints/``, ``pictures/`` and the plan and schedule it ran.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import jax
import numpy as np

from jaxpipe import __version__
from jaxpipe.errors import CheckpointError, ConfigError, DataError
from jaxpipe.plot import plot_timelines
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Timeline, write_schedule
from jaxpipe.stage.reference import init_params
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.data import Batches, DataState
from jaxpipe.train.devices import find_devices
from jaxpipe.train.metrics import LiveLine, MetricsLog, format_bytes
from jaxpipe.train.setup import Setup, build
from jaxpipe.train.step import StepMetrics, TrainState

PICTURES = ("timeline.svg", "timeline.png", "timeline.html", "timeline.trace.json")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended. ``stopped``: a signal ended it before its last step. ``replay_ratio``: median over recorded
    steps of step time ÷ replay of the same order. ``bubble_measured`` likewise; both NaN if no step was recorded."""

    out_dir: Path
    step: int
    stopped: bool
    loss: float
    eval_loss: float | None
    tokens_per_s: float
    bubble_predicted: float
    bubble_measured: float
    replay_ratio: float
    peak_bytes: int
    skipped_steps: int
    seconds: float


def train(config: TrainConfig, stream: TextIO = sys.stdout) -> TrainResult:
    """Run ``config`` to its last step, or until a signal. Progress goes to ``stream``.

    Call :func:`jaxpipe.train.devices.request_devices` first, before JAX looks for devices.

    Raises:
        JaxpipeError: the config, data, checkpoint or schedule is wrong, or an instruction failed.
    """
    started = time.perf_counter()
    out_dir = _make_out_dir(config)
    store = CheckpointStore(
        out_dir / "checkpoints", keep_last=config.run.keep_last, keep_best=config.run.keep_best > 0
    )
    resume = _resume_step(config, store, stream)
    devices, remark = find_devices(config.pipeline.ranks, config.run.platform)
    if remark:
        print(remark, file=stream, flush=True)
    setup = build(config, devices, lambda text: print(text, file=stream, flush=True))
    print(f"built in {time.perf_counter() - started:.1f} s", file=stream, flush=True)
    _write_plan(out_dir, setup)
    with store, _Stop() as stop:
        return _Loop(setup, store, out_dir, stream, stop, started).run(resume)


class _Stop:
    """Turns the first SIGINT or SIGTERM into a request to stop at the next step; a second one acts as usual."""

    def __init__(self) -> None:
        self.requested = ""
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


class _Loop:
    """One process's part of a run, from its first step to its last."""

    def __init__(
        self, setup: Setup, store: CheckpointStore, out_dir: Path, stream: TextIO, stop: _Stop, started: float
    ) -> None:
        self.setup, self.store, self.out_dir, self.stream, self.stop = setup, store, out_dir, stream, stop
        self.config = setup.config
        self.pipe: Pipeline = setup.pipeline
        self.started = started
        self.predicted = self.pipe.predicted_timeline()
        self.peak_bytes = max(self.pipe.peak_bytes)
        self.measured: list[tuple[float, float]] = []  # (bubble, replay ratio) of recorded steps
        self.last_timeline: Timeline | None = None
        self.eval_loss: float | None = None
        self.eval_batches = _eval_batches(setup)
        self.loss = float("nan")
        self.skipped = 0

    def run(self, resume: int | None) -> TrainResult:
        run = self.config.run
        state, batches = self._first_state(resume)
        first = state.step
        line = LiveLine(run.steps, self.stream, every=run.log_every, start=first)
        board = self.out_dir / "tensorboard" if run.tensorboard else None
        saved = first if resume is not None else -1
        train_s, done = 0.0, 0
        with MetricsLog(
            self.out_dir / "metrics.jsonl", resume_step=first if resume is not None else None, tensorboard_dir=board
        ) as log:
            pending: tuple[int, StepMetrics] | None = None
            while state.step < run.steps and not self.stop.requested:
                began = time.perf_counter()
                step = state.step
                state, metrics = self._step(state, batches, record=(step + 1) % run.log_every == 0)
                if pending is not None:
                    self._finish(*pending, log)
                pending = (step + 1, metrics)
                if metrics.timeline is not None or step + 1 == run.steps:
                    self._finish(*pending, log)
                    pending = None
                train_s += time.perf_counter() - began
                done += 1
                self._show(line, state.step)
                if run.eval_every and (state.step % run.eval_every == 0 or state.step == run.steps):
                    self._evaluate(line, state, log)
                if run.checkpoint_every and state.step % run.checkpoint_every == 0:
                    self._save(state, batches)
                    saved = state.step
            if pending is not None:
                self._finish(*pending, log)
        line.close()
        if saved != state.step:
            self._save(state, batches)
        self.store.wait()
        if self.stop.requested:
            self._note(
                f"stopped by {self.stop.requested} after step {state.step}; checkpoint saved, run again with "
                "run.resume=auto to go on"
            )
        self._draw()
        return self._result(state, done, train_s)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _first_state(self, resume: int | None) -> tuple[TrainState, Batches]:
        run, data = self.config.run, self.config.data
        dataset, model = self.setup.dataset, self.setup.model
        if resume is None:
            return self.setup.step.init(init_params(model, run.seed)), dataset.batches(data.seed, run.batch, data.seq_len)
        fresh = self.setup.step.init(init_params(model, run.seed))
        params, optimizer = self.setup.step.by_layer(fresh)
        checkpoint = self.store.load(resume, like={"params": params, "optimizer": optimizer})
        position = DataState.from_dict(checkpoint.meta["data"])
        batches = dataset.batches(data.seed, run.batch, data.seq_len, position)
        self.store.discard_after(resume)
        self._note(f"resumed from step {resume} ({checkpoint.path})")
        return self.setup.step.init(checkpoint.params, checkpoint.optimizer, step=resume), batches

    def _step(self, state: TrainState, batches: Batches, *, record: bool) -> tuple[TrainState, StepMetrics]:
        m = self.config.pipeline.microbatches
        batch = {k: v.reshape(m, -1, *v.shape[1:]) for k, v in batches.batch_at(state.step).items()}
        key = jax.random.fold_in(jax.random.key(self.config.run.seed), state.step)
        return self.setup.step(state, batch, key, record=record)

    def _finish(self, step: int, metrics: StepMetrics, log: MetricsLog) -> None:
        """Wait for a step's scalars and write its record."""
        self.loss = float(metrics.loss)
        applied = bool(metrics.applied)
        self.skipped += not applied
        record: dict[str, Any] = {
            "loss": self.loss,
            "grad_norm": float(metrics.grad_norm),
            "tokens": int(metrics.weight),
            "applied": applied,
        }
        if metrics.timeline is not None:
            ratio = self.pipe.replay_ratio(metrics.outputs)
            bubble = metrics.timeline.bubble_rate
            self.measured.append((bubble, ratio))
            self.last_timeline = metrics.timeline
            record |= {"bubble_measured": bubble, "replay_ratio": ratio, "step_s": metrics.outputs.step_s}
        if not applied:
            self._note(f"step {step}: the gradient is not finite; parameters were left as they are")
        log.write(step, record)

    def _show(self, line: LiveLine, step: int) -> None:
        run = self.config.run
        bubble = self.measured[-1][0] if self.measured else None
        line.update(
            step,
            loss=self.loss,
            tokens=run.batch * self.config.data.seq_len,
            bubble_predicted=self.predicted.bubble_rate,
            bubble_measured=bubble,
            peak_bytes=self.peak_bytes,
        )

    def _evaluate(self, line: LiveLine, state: TrainState, log: MetricsLog) -> None:
        loss_sum, weight = self.pipe.evaluate(state.compute, self.eval_batches)
        self.eval_loss = loss_sum / weight
        line.note(f"step {state.step}  held-out loss {self.eval_loss:.4f}")
        log.write(state.step, {"eval_loss": self.eval_loss})

    def _save(self, state: TrainState, batches: Batches) -> None:
        params, optimizer = self.setup.step.by_layer(state)
        meta = {
            "data": batches.state_at(state.step).to_dict(),
            "config": self.config.to_dict(),
            "schedule": self.pipe.schedule.name,
            "jaxpipe": __version__,
        }
        self.store.save(state.step, params, optimizer, meta, eval_loss=self.eval_loss)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        folder = self.out_dir / "pictures"
        folder.mkdir(exist_ok=True)
        timelines = [self.predicted] if self.last_timeline is None else [self.predicted, self.last_timeline]
        title = f"{self.pipe.schedule.name}, {self.pipe.schedule.num_ranks} ranks, {self.pipe.schedule.num_microbatches} microbatches"
        for name in PICTURES:
            plot_timelines(timelines, folder / name, title=title)

    def _result(self, state: TrainState, done: int, train_s: float) -> TrainResult:
        tokens = done * self.config.run.batch * self.config.data.seq_len
        bubbles, ratios = zip(*self.measured, strict=True) if self.measured else ((float("nan"),), (float("nan"),))
        return TrainResult(
            out_dir=self.out_dir,
            step=state.step,
            stopped=bool(self.stop.requested),
            loss=self.loss,
            eval_loss=self.eval_loss,
            tokens_per_s=tokens / train_s if train_s else 0.0,
            bubble_predicted=self.predicted.bubble_rate,
            bubble_measured=float(np.median(bubbles)),
            replay_ratio=float(np.median(ratios)),
            peak_bytes=self.peak_bytes,
            skipped_steps=self.skipped,
            seconds=time.perf_counter() - self.started,
        )

    def _note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


def _make_out_dir(config: TrainConfig) -> Path:
    out_dir = Path(config.run.out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.out_dir={out_dir}: can't be made ({error.strerror}); choose another folder") from None
    return out_dir


def _resume_step(config: TrainConfig, store: CheckpointStore, stream: TextIO) -> int | None:
    """The step to go on from, None to start anew."""
    resume = config.run.resume
    if resume == "never":
        if store.steps():
            raise CheckpointError(
                f"{store.directory} already holds checkpoints (up to step {store.latest()}) and run.resume=never would overwrite "
                "them; choose another run.out_dir, or delete that folder"
            )
        return None
    intact = store.latest_intact()
    for warning in intact.warnings:
        print(f"warning: {warning}", file=stream, flush=True)
    if intact.step is None:
        if resume == "must" or intact.warnings:
            why = "; ".join(intact.warnings) or "there is none"
            raise CheckpointError(
                f"{store.directory}: no checkpoint to resume from ({why}); train with run.resume=auto in another run.out_dir to start anew"
            )
        return None
    return intact.step


def _write_plan(out_dir: Path, setup: Setup) -> None:
    (out_dir / "config.toml").write_text(setup.config.to_toml(), encoding="utf-8")
    (out_dir / "plan.json").write_text(setup.plan.to_json(), encoding="utf-8")
    write_schedule(setup.pipeline.schedule, out_dir / "schedule.sched")


def _eval_batches(setup: Setup) -> Mapping[str, np.ndarray]:
    """Held-out microbatches ``[count, microbatch size, sequence]``, the same at every evaluation."""
    config = setup.config
    if not config.run.eval_every:
        return {}
    size = setup.pipeline.microbatch_size
    batches = setup.dataset.held_out_batches(size, config.data.seq_len, config.run.eval_batches * config.pipeline.microbatches)
    return {name: np.stack([b[name] for b in batches]) for name in batches[0]}
