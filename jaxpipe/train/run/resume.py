"""When a run saves, and where the next one starts: at step 0 with fresh parameters, or at a checkpoint that its config may
go on from.

A run may go on over another number of ranks, schedule, chunk count or batch size. The model and the data must be the
same: another model in the same directory is refused, with the settings that differ. Whether it is another is decided by what
it computes: every save keeps a digest of the traced model, so nothing that a checkpoint names is imported. Other settings may
change, and are named where they change what is learnt.

A run saves at its checkpoint steps, and again after a save that failed, which ends nothing. It is tried again at the next step,
then after 1, 2, 4, … more steps: every try copies the arrays to the host, so a disk that stays full costs few copies, and one
that is full for n steps puts at most about 2n at risk. While steps are being skipped, saves wait for one that counts.

No checkpoint gives way to one that was made while the loss was above that of the run's first step: something has gone wrong
then, and what is needed is an older one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxpipe.errors import CheckpointError, ConfigError, DataError
from jaxpipe.runtime.processes import Processes
from jaxpipe.schedule import Schedule
from jaxpipe.schedule.passes.braid import fused_stages
from jaxpipe.stage.model.layer import Params
from jaxpipe.stage.model.plan import Cut
from jaxpipe.stage.model.reference import ours
from jaxpipe.train.checkpoint import CheckpointStore, newest, read_manifest, undamaged
from jaxpipe.train.checkpoints import which_model
from jaxpipe.train.checkpoints.contents import Manifest
from jaxpipe.train.config import TrainConfig, known_settings
from jaxpipe.train.corpora.tokenizers import stored_tokenizer
from jaxpipe.train.data import DataState, Stream
from jaxpipe.train.import_export import initial_params
from jaxpipe.train.settings.sections import RunConfig, Sections
from jaxpipe.train.settings.typed import leaves_of
from jaxpipe.train.setup import Prepared
from jaxpipe.train.state import TrainState
from jaxpipe.train.trainer import Trainer
from jaxpipe.train.update.optimizer import DECAY_RULES, DecayRule, optimizer_of, rate_of

Note = Callable[[str], None]

_WHERE = ("pipeline.", "run.replan.", "data.")
"""Settings of where a run computes; those of the data are compared by the data's fingerprint."""
RATE = (
    "run.steps", "optimizer.lr", "optimizer.warmup_steps", "optimizer.options.schedule", "optimizer.options.min_lr_ratio",
    "optimizer.options.decay_fraction",
)  # fmt: skip
"""Settings of the learning rate."""
_HOW_OFTEN = (
    "run.steps", "run.eval_every", "run.checkpoint_every", "run.out_dir", "run.resume", "run.max_skipped", "run.output.",
    "run.machine.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Start:
    """``step`` steps are done. ``params`` and ``optimizer`` by layer, on the host; None means fresh ones. ``resumed``: they are
    of the run's own checkpoint. ``first_loss``: of the run's first step, if it is known. ``fused``: the stages that run BW, if
    that was chosen before for the same stages. ``decay``: what has decided so far which parameters decay."""

    step: int
    batches: Stream
    params: Mapping[str, Params] | None = None
    optimizer: Mapping[str, Any] | None = None
    first_loss: float | None = None
    fused: tuple[int, ...] | None = None
    resumed: bool = False
    decay: DecayRule = "role"


def choose(run: RunConfig, store: CheckpointStore, note: Note) -> Manifest | None:
    """Return the checkpoint to go on from, None to start anew. ``note`` gets a warning for each damaged one passed over.

    Raises:
        CheckpointError: what ``run.resume`` asks for can't be had, or a newer checkpoint can't be read now.
    """
    if run.resume == "never":
        if store.steps():
            raise CheckpointError(
                f"{store.directory} holds checkpoints up to step {store.latest()}, and run.resume=never would overwrite them; "
                "choose another run.out_dir, or delete that folder"
            )
        return None
    # At the end of a run nothing is loaded, so nothing but this would look at the files.
    step = newest(store, _warning(note), by_manifest=(store.latest() or 0) < run.steps)
    if step is None and run.resume == "must":
        raise CheckpointError(f"{store.directory}: no checkpoint to resume from; run.resume=auto starts anew")
    return None if step is None else read_manifest(store.path(step))


def start_of(prepared: Prepared, origin: Manifest | None, store: CheckpointStore, note: Note) -> Start:
    """Read what the run starts from. Nothing is compiled, and nothing changes on disk. ``note`` is told what is other than in
    the run so far, and of a checkpoint that is passed over for an older one because its arrays are damaged.

    Raises:
        CheckpointError: the checkpoint is of another model, or was not written by jaxpipe train.
        DataError: it is of other data, or the data are too small.
    """
    if origin is None:
        params = None
        if prepared.config.run.init_from:
            layers = _own_layers(prepared, store.processes)
            params = initial_params(prepared.config, prepared.model, layers, note, store.processes)
            note(f"begins with the parameters in {prepared.config.run.init_from}")
        return Start(0, _batches(prepared, None), params)

    def read(step: int) -> Start:
        return _resumed(prepared, read_manifest(store.path(step)), store, note)

    return undamaged(store, origin.step, read, _warning(note))


def _warning(note: Note) -> Note:
    return lambda line: note(f"warning: {line}")


def _resumed(prepared: Prepared, origin: Manifest, store: CheckpointStore, note: Note) -> Start:
    folder = store.path(origin.step)
    meta = origin.meta
    imported = origin.step == 0 and "imported" in meta  # of no data yet, and without an optimizer's state
    parts = ("config", *(["data"] if not imported else []))
    if "saved_by" in meta or not all(isinstance(meta.get(part), dict) for part in parts):
        raise CheckpointError(f"{folder} was not written by jaxpipe train; choose another run.out_dir")
    remarks = _compare(prepared, origin)
    try:
        state = None if imported else DataState.from_dict(meta["data"])
    except DataError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if state is not None and state.step != origin.step:
        raise CheckpointError(f"{folder}: its data state is of step {state.step}; choose another run.out_dir")
    batches = _batches(prepared, state)
    mine = _own_layers(prepared, store.processes)
    optimizer = None if imported else optimizer_of(prepared.config, prepared.model.stored)
    loaded = which_model.load_state(store, origin.step, prepared.model, optimizer, layers=mine)
    if remark := moved_rate(meta["config"], prepared.config, _updates_done(loaded.optimizer, origin.step)):
        remarks.append(remark)
    for remark in remarks:
        note(remark)
    first = meta.get("first_loss")
    first = first if isinstance(first, float) else None
    state_of_optimizer = None if imported else loaded.optimizer
    fused = None if imported else _fused(meta, prepared.plan.cut)
    decay: DecayRule = "role" if imported else _decay_rule(meta, folder)
    return Start(origin.step, batches, loaded.params, state_of_optimizer, first, fused, resumed=True, decay=decay)


def _updates_done(optimizer: Mapping[str, Any], step: int) -> int:
    """Return how many updates optimizer state has counted: one for each step that was not skipped."""
    # optax counts updates in scalars of integers; skipped steps leave them as they were, so they may be behind the step
    # number.
    counts = [
        int(leaf) for leaf in jax.tree.leaves(optimizer) if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    return max(counts, default=step)


def moved_rate(stored: Mapping[str, Any], config: TrainConfig, updates: int) -> str:
    """Return a remark on the learning rate of the next step, where it is not what the settings so far would have made it; empty
    where it is, or where these can't be read. ``updates``: that have been made."""
    then = known_settings(stored)[0]
    changes = {key: change for key, change in _changes(then, config).items() if key in RATE}
    if not changes:
        return ""
    leaves = _leaves(then)
    try:
        before = TrainConfig().changed({key: leaves[key] for key in RATE if key in leaves})
    except ConfigError:
        return ""
    old, new = (float(rate_of(each.optimizer, each.run.steps)(updates)) for each in (before, config))
    if math.isclose(old, new, rel_tol=1e-6):
        return ""
    listed = ", ".join(f"{key} {a} → {b}" for key, (a, b) in changes.items())
    falls = config.optimizer.options.schedule != "constant"
    advice = " (optimizer.schedule=constant and optimizer.lr set a rate that stays)" if falls else ""
    return f"{listed}: learning rate goes on at {new:.4g}, was to be {old:.4g}{advice}"


def _decay_rule(meta: Mapping[str, Any], folder: Path) -> DecayRule:
    """Return what the run's weight decay has gone by; the number of axes in a checkpoint from before that was kept."""
    rule = meta.get("decay", "axes")
    if rule not in DECAY_RULES:
        raise CheckpointError(
            f"{folder}: weight decay went by {rule!r:.40}, which this version does not know; use the one that wrote it"
        )
    return cast("DecayRule", rule)


def _own_layers(prepared: Prepared, processes: Processes) -> set[str] | None:
    """Return the layers whose parameters are placed in this process; None for all."""
    if processes.number == 1:
        return None
    placement, cut = prepared.schedule.placement, prepared.plan.cut
    ranks = processes.ranks(prepared.schedule.num_ranks)[processes.mine]
    stages = [cut[stage] for rank in ranks for stage in placement.stages_of(rank)]
    layers = (layer for start, stop in stages for layer in prepared.model.layers[start:stop])
    return which_model.placed_layers(prepared.model, layers)


def backwards_of(schedule: Schedule, cut: Cut) -> dict[str, Any]:
    """Return what a checkpoint keeps of how backwards run: the stages, and which of them have a BW."""
    return {"cut": [list(stage) for stage in cut], "fused": list(fused_stages(schedule))}


def _fused(meta: Mapping[str, Any], cut: Cut) -> tuple[int, ...] | None:
    """Return the stages that ran BW, out of :func:`backwards_of`; every one in a checkpoint from before it was kept."""
    match meta.get("backwards"):
        case None:
            return tuple(range(len(cut)))
        case {"cut": list(then), "fused": list(fused)} if then == [list(stage) for stage in cut]:
            return tuple(stage for stage in range(len(cut)) if stage in fused)
        case _:
            return None


def _batches(prepared: Prepared, state: DataState | None) -> Stream:
    config, dataset = prepared.config, prepared.dataset
    try:
        return dataset.batches(config.data.reading.seed, config.run.batch, config.data.seq_len, state)
    except DataError as error:
        if state is None or state.fingerprint == dataset.fingerprint or not dataset.tokenizer.ignored:
            raise
        ignored = f"the {dataset.tokenizer.ignored} of {dataset.tokenizer.name}"
        raise DataError(f"{error}; older versions obeyed {ignored}, which this one ignores") from None


def _compare(prepared: Prepared, origin: Manifest) -> list[str]:
    """Refuse a checkpoint whose model computes something else, even where shapes agree (another number of heads, say). What has
    changed otherwise, a line for each kind."""
    then, unknown = known_settings(origin.meta["config"])
    changes = _changes(then, prepared.config)
    stored_tokenizer = origin.meta.get("tokenizer")
    if (
        isinstance(stored_tokenizer, dict)
        and stored_tokenizer.get("fingerprint") == prepared.dataset.tokenizer.fingerprint
    ):
        changes.pop("data.tokenizer", None)  # the same one under another path
    model = {key: change for key, change in changes.items() if key.startswith("model.") or key == "data.tokenizer"}
    like = which_model.likeness(origin.meta, prepared.program)
    then_in, now_in = which_model.stored_source(origin.meta, "model"), prepared.provenance["sources"]["model"]
    if then_in is not None and then_in.get("home") != now_in["home"]:
        model["model.target"] = (str(then_in.get("file")), now_in["file"])  # one name, and another module
    if model and (like is which_model.Likeness.OTHER or like is which_model.Likeness.UNKNOWN):
        listed = ", ".join(f"{key} is {new}, was {old:.60}" for key, (old, new) in model.items())
        raise CheckpointError(
            f"run.out_dir={prepared.config.run.out_dir} holds a checkpoint (step {origin.step}) of another model: {listed}; "
            "restore it, or choose another run.out_dir"
        )
    target, step = prepared.config.model.target, origin.step
    settings = which_model.changed_settings(origin.meta)
    named = [
        f"{key} {old:.60} → {new}"
        for key, (old, new) in changes.items()
        if key in model or not key.startswith((*_WHERE, *_HOW_OFTEN))
    ]
    dp = changes.get("pipeline.dp", ())
    remarks = {
        f"warning: {target} {like.value} when step {step} was saved": like is which_model.Likeness.OTHER
        or (like is which_model.Likeness.TRAINS_OTHERWISE and not model),
        f"warning: {which_model.not_compared(origin.meta, target, f'step {step}')}": like
        is which_model.Likeness.UNKNOWN,
        f"warning: JAX's settings are other than at step {step}: {settings}": bool(settings),
        f"resuming with changes: {', '.join(named)}": bool(named),
        f"resuming with pipeline.dp {' → '.join(dp)}: gradients are sums of other parts, so bits are not those of one dp": bool(
            dp
        ),
        f"settings of step {step} that this version does not know are ignored: {', '.join(unknown)}": bool(unknown),
    }
    return [remark for remark, applies in remarks.items() if applies]


def _changes(then: Mapping[str, Mapping[str, Any]], now: TrainConfig) -> dict[str, tuple[str, str]]:
    """Return settings that differ by dotted key, as (then, now). What ``then`` leaves out is at its default."""
    # An older version's config lacks settings that came later; their defaults are what it did then.
    default = _leaves(TrainConfig().to_dict())
    old, new = default | _leaves(then), default | _leaves(now.to_dict())
    pairs = {key: (old.get(key, "not set"), new.get(key, "not set")) for key in sorted(old.keys() | new.keys())}
    return {key: (str(a), str(b)) for key, (a, b) in pairs.items() if a != b and not _is_alias(key, a, b)}


def _is_alias(key: str, then: Any, now: Any) -> bool:
    """Return whether both name one of the models that come with jaxpipe: ``models.gpt:GPT`` is ``jaxpipe.models.gpt:GPT``. That
    the module is the same is compared apart."""
    return key == "model.target" and isinstance(then, str) and ours(then) is not None and ours(then) == ours(now)


def _leaves(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return settings by dotted key, options of the model one by one."""
    leaves = dict(leaves_of(Sections, config))
    options = leaves.pop("model.options", None)
    if not isinstance(options, Mapping):
        return leaves
    return leaves | {f"model.options.{key}": value for key, value in options.items()}


class Saving:
    """Saves into ``store``.

    Args:
        regular: whether a step is one to save at.
        saved: the step that the run starts from, if it is in the store, else -1.
        warn: told, in a line, of each save that failed.
    """

    def __init__(
        self, store: CheckpointStore, regular: Callable[[int], bool], saved: int, warn: Callable[[str], None]
    ) -> None:
        self._store, self._regular, self._warn = store, regular, warn
        self._saved = saved  # or being saved
        self._again: int | None = None  # the step to try again at
        self._failures = 0  # in a row

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``. Looks at the save under way, and does not wait for it."""
        if error := self._store.poll():
            self._failed(error, step)
        return self._regular(step) or (self._again is not None and step >= self._again)

    def put_off(self, step: int) -> None:
        """``step`` was skipped: ask after the next one."""
        self._again = step + 1

    def save(self, step: int, put: Callable[[], None]) -> None:
        """Start to save by ``put``, which waits for the save before this one."""
        if self._again is None:
            self._failures = 0
        self._again = None
        try:
            put()
            self._saved = step
        except CheckpointError as error:
            self._failed(error, step)

    def finish(self, step: int, put: Callable[[], None]) -> None:
        """Bring ``step`` to the disk, by ``put`` where that is not under way.

        Raises:
            CheckpointError: it can't be saved, tried for a last time.
        """
        try:
            if self._saved == step:
                self._store.wait()
                return
        except CheckpointError as error:
            self._warn(f"warning: {error}; trying for the last time")
        put()
        self._store.wait()

    def _failed(self, error: CheckpointError, step: int) -> None:
        """Told after ``step``."""
        wait = (2**self._failures) // 2
        self._saved, self._again, self._failures = -1, step + wait, self._failures + 1
        self._warn(f"warning: {error}; trying again" + (f" after step {self._again}" if wait else ""))


def go_on(step: int | None, first: str = "") -> str:
    """Advice after a failure; ``step``: of the newest checkpoint."""
    if step is None:
        return "no checkpoint was saved before: the same command starts at step 0"
    return f"{first}run the same command again to go on from step {step}"


class RunCheckpoints:
    """The checkpoints of a run under way: saves states, and says which one to go on from after a failure.

    Args:
        sync_log: brings the metrics to the disk.
        regular: whether a step is one to save at.
        note: told, in a line, of each save that failed.
    """

    def __init__(
        self,
        prepared: Prepared,
        start: Start,
        store: CheckpointStore,
        processes: Processes,
        sync_log: Callable[[], None],
        regular: Callable[[int], bool],
        note: Callable[[str], None],
    ) -> None:
        self.store, self._prepared, self._start, self._processes = store, prepared, start, processes
        self._sync_log = sync_log
        saved = start.step if start.resumed else None
        self._saving = Saving(store, regular, -1 if saved is None else saved, note)
        self._first_loss, self._loss = start.first_loss, math.nan
        self._evaluated: tuple[int, float] | None = None
        self._last_good: int | None = None  # the newest checkpoint after which no loss above the first one followed
        self._unconfirmed = saved  # the newest checkpoint, until a step after it shows that

    def observe(self, step: int, loss: float, counts: bool) -> None:
        """Take note of the loss of ``step``; ``counts``: it had a target."""
        if counts:
            self._loss = loss
        if not math.isfinite(loss):
            return
        if self._first_loss is None:
            self._first_loss = loss
        # A step after the save has to be seen: the loss of the saved step itself is of the parameters before its
        # update.
        if self._unconfirmed is not None and self._unconfirmed < step and not self._is_worse:
            self._last_good, self._unconfirmed = self._unconfirmed, None

    def observe_evaluation(self, step: int, loss: float) -> None:
        """Take note of the held-out loss after ``step``, which a checkpoint of that step keeps."""
        self._evaluated = step, loss

    @property
    def _is_worse(self) -> bool:
        """Whether the last step's loss is above that of the first one."""
        return self._first_loss is not None and self._loss > self._first_loss

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``."""
        return self._saving.due(step)

    def save(self, trainer: Trainer, state: TrainState, *, skipped: bool) -> None:
        """Start to save ``state``, unless its step was ``skipped``: then after the next one that was not."""
        if skipped:
            self._saving.put_off(state.step)
            return
        # The last good checkpoint stays though newer ones crowd it out, until the run has reached its end.
        is_last = state.step == self._prepared.config.run.steps
        spare = () if self._last_good is None or is_last else (self._last_good,)
        self._saving.save(state.step, partial(self.put, trainer, state, prune=not self._is_worse, spare=spare))
        self._unconfirmed = state.step

    def finish(self, trainer: Trainer, state: TrainState, *, skipped: bool) -> None:
        """Bring the last step to the disk. In a row of ``skipped`` steps nothing gives way to it.

        Raises:
            CheckpointError: it can't be saved.
        """
        try:
            prune = not (skipped or self._is_worse)
            self._saving.finish(state.step, partial(self.put, trainer, state, prune=prune))
        except CheckpointError as error:
            raise CheckpointError(f"after step {state.step}: {error}; {self.advice()}") from error

    def put(self, trainer: Trainer, state: TrainState, *, prune: bool, spare: Collection[int] = ()) -> None:
        """Start to save. The metrics up to here are on the disk first: a run that goes on from it finds them all. ``prune``:
        delete what need not be kept, but ``spare``."""
        self._sync_log()
        params, optimizer, meta = trainer.contents(state)
        meta |= {"data": self._start.batches.state_at(state.step).to_dict(), "config": self._prepared.config.to_dict()}
        meta["tokenizer"] = stored_tokenizer(self._prepared.dataset.tokenizer)
        meta |= {"first_loss": self._first_loss, "began_in": str(Path.cwd()), "decay": self._start.decay}
        meta |= self._prepared.provenance
        meta["backwards"] = backwards_of(trainer.schedule, trainer.pipeline.boundaries)
        step, loss = self._evaluated or (-1, math.nan)
        eval_loss = loss if step == state.step else None
        self.store.save(state.step, params, optimizer, meta, eval_loss, prune=prune, spare=spare)

    def advice(self, first: str = "") -> str:
        """Return what to do next, and ``first`` before that. Waits for the save under way."""
        step = None
        if self._processes.number > 1:  # this one may have failed alone
            return go_on(self.store.latest(), first)
        with suppress(CheckpointError):
            self.store.close()
        with suppress(CheckpointError):
            step = self.store.latest_intact().step
        doubtful = first and step is not None and self._last_good in self.store.steps() and step != self._last_good
        again = f"; if that fails, too, move away its checkpoints after step {self._last_good}" if doubtful else ""
        return go_on(step, first) + again
