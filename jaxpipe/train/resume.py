"""Where a run starts: at step 0 with fresh parameters, or at a checkpoint that this config may go on from.

A run may go on over another number of ranks, schedule, chunk count or batch size. The model and the data must be the
same: another model in the same directory is refused, with the settings that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxpipe.errors import CheckpointError, JaxpipeError
from jaxpipe.stage.layer import Model, Params
from jaxpipe.stage.params import trained_params
from jaxpipe.stage.reference import apply_model
from jaxpipe.train.checkpoint import CheckpointStore, read_manifest
from jaxpipe.train.checkpoint_format import Manifest
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.data import Batches, DataState
from jaxpipe.train.optimizer_state import fitted, state_leaves
from jaxpipe.train.setup import Prepared, build_model, optimizer_of, stored_params
from jaxpipe.train.tokenizers import load_tokenizer

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Start:
    """``step`` steps are done. ``params`` and ``optimizer`` by layer, on the host; None means fresh ones."""

    step: int
    batches: Batches
    params: Mapping[str, Params] | None = None
    optimizer: Mapping[str, Any] | None = None


def choose(config: TrainConfig, store: CheckpointStore, note: Note) -> Manifest | None:
    """The checkpoint to go on from, None to start anew. ``note`` gets a warning for each damaged one passed over.

    Raises:
        CheckpointError: what ``run.resume`` asks for can't be had.
    """
    if config.run.resume == "never":
        if store.steps():
            raise CheckpointError(
                f"{store.directory} holds checkpoints up to step {store.latest()}, and run.resume=never would overwrite them; "
                "choose another run.out_dir, or delete that folder"
            )
        return None
    intact = store.latest_intact()
    if intact.step is not None:
        for warning in intact.warnings:
            note(f"warning: {warning}")
        return read_manifest(store.path(intact.step))
    if intact.warnings:
        raise CheckpointError(
            f"{store.directory}: no checkpoint is intact ({'; '.join(intact.warnings)}); choose another run.out_dir"
        )
    if config.run.resume == "must":
        raise CheckpointError(f"{store.directory}: no checkpoint to resume from; run.resume=auto starts anew")
    return None


def start_of(prepared: Prepared, origin: Manifest | None, store: CheckpointStore) -> Start:
    """Read what the run starts from. Nothing is compiled, and nothing changes on disk.

    Raises:
        CheckpointError: the checkpoint is of another model.
        DataError: it is of other data, or the data are too small.
    """
    config, dataset = prepared.config, prepared.dataset
    data = (config.data.seed, config.run.batch, config.data.seq_len)
    if origin is None:
        return Start(0, dataset.batches(*data))
    folder = store.path(origin.step)
    if not {"config", "data"} <= origin.meta.keys():
        raise CheckpointError(f"{folder} was not written by jaxpipe train; choose another run.out_dir")
    _check_model(prepared, origin, str(folder))
    batches = dataset.batches(*data, DataState.from_dict(origin.meta["data"]))
    params = stored_params(prepared.model)
    loaded = store.load(origin.step, like={"params": params})
    trained = trained_params(prepared.model.layers, params)
    leaves = state_leaves(jax.eval_shape(optimizer_of(config).init, trained), trained)
    fitted(leaves, list(trained), loaded.optimizer)  # raises here, and not when everything has been compiled
    return Start(origin.step, batches, loaded.params, loaded.optimizer)


def _check_model(prepared: Prepared, origin: Manifest, folder: str) -> None:
    """Refuse a checkpoint whose model computes something else, even where shapes agree (another number of heads, say)."""
    now = prepared.config
    then = TrainConfig.from_dict(origin.meta["config"], place=folder)
    changes = _changes(then, now)
    if changes and not _same_function(then, prepared.model):
        raise CheckpointError(
            f"run.out_dir={now.run.out_dir} holds a checkpoint (step {origin.step}) of another model: {', '.join(changes)}; "
            "restore it, or choose another run.out_dir"
        )


def _changes(then: TrainConfig, now: TrainConfig) -> list[str]:
    """Settings of the model that differ, as ``model.options.d_model is 32, was 16``."""
    old, new = (
        {"model.target": c.model.target, **{f"model.options.{k}": v for k, v in c.model.options.items()}}
        for c in (then, now)
    )
    old["data.tokenizer"], new["data.tokenizer"] = then.data.tokenizer, now.data.tokenizer
    return [
        f"{key} is {new.get(key, 'not set')}, was {old.get(key, 'not set')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _same_function(then: TrainConfig, model: Model) -> bool:
    """Whether the old config's model evaluates to the same program (an option may just spell out its default)."""
    try:
        old = build_model(then, load_tokenizer(then.data.tokenizer).vocab_size)
    except JaxpipeError:
        return False
    return _program(old) == _program(model)


def _program(model: Model) -> str:
    forward = partial(apply_model, model, train=False)
    return str(jax.make_jaxpr(lambda params, batch: forward(params, batch))(stored_params(model), model.batch_spec(1)))
