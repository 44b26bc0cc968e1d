"""What a checkpoint holds of a model: the shapes of its parameters, a digest of what it computes; and the way back."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxpipe.errors import CheckpointError, JaxpipeError, StageError, short_message
from jaxpipe.stage.identity import program_digest
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.params import trained_params
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.tensor_parallel import ids_as_before
from jaxpipe.train.checkpoint import Checkpoint, CheckpointStore
from jaxpipe.train.checkpoints.contents import DamagedCheckpointError
from jaxpipe.train.update.layerwise import fitted, state_leaves

_Read = TypeVar("_Read")


def stored_params(model: Model, master: Any = jnp.float32) -> dict[str, Any]:
    """Return shapes and dtypes of a model's parameters in a checkpoint: floats are those of masters, whatever the model
    creates."""

    def stored(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, master if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)

    return jax.tree.map(stored, jax.eval_shape(partial(init_params, model), 0))  # type: ignore[no-any-return]


class Likeness(Enum):
    """What a model here does, compared with the model of a checkpoint when that was saved."""

    SAME = "computes the same as"
    TRAINS_OTHERWISE = "has another gradient, or does something else in training, than"
    OTHER = "computes something else than"
    UNKNOWN = "can't be compared with"


def model_digest(model: Model, *, training: bool = True) -> dict[str, str]:
    """Return what a checkpoint keeps as ``meta["program"]`` to know its model again: digests, constants by value, of what
    evaluation computes and of loss and gradient in ``training``; that of evaluation with callbacks by name, by which
    checkpoints from before there were others compare; and the versions of JAX and Python, as digests of others can't be
    compared.

    Raises:
        StageError: the model's code fails.
    """
    model = model.stored
    try:
        with ids_as_before():  # that ids are checked is no other model
            return _digests(model, training)
    except JaxpipeError:
        raise
    except Exception as error:
        raise StageError(
            f"model {model.name} can't be traced: {type(error).__name__}: {short_message(error)}"
        ) from error


def _digests(model: Model, training: bool) -> dict[str, str]:
    params, batch = stored_params(model), model.batch_spec(1)
    forward = jax.make_jaxpr(lambda params, batch: apply_model(model, params, batch, train=False))(params, batch)
    digests = {
        "jax": jax.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "sha256": program_digest(forward, by_name=True),
        "evaluation": program_digest(forward),
    }
    if training:

        def loss_and_gradient(params: Any, batch: Any, key: Any) -> Any:
            loss = partial(apply_model, model, batch=batch, key=key, train=True)
            return jax.value_and_grad(loss, has_aux=True, allow_int=True)(params)

        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        digests["training"] = program_digest(jax.make_jaxpr(loss_and_gradient)(params, batch, key))
    return digests


def likeness(meta: Mapping[str, Any], now: Mapping[str, str]) -> Likeness:
    """Return what the model of the checkpoint with this ``meta`` is to the model with the digest ``now``: the one comparison,
    which every door makes. A digest without training does not say whether a model trains otherwise."""
    # Other versions of JAX print another jaxpr for the same model, so their digests say nothing.
    stored = meta.get("program")
    if not isinstance(stored, dict) or stored.get("jax") != now["jax"]:
        return Likeness.UNKNOWN
    by_content = "evaluation" in stored and (
        stored.get("python") == now["python"] or stored["evaluation"] == now["evaluation"]
    )
    key = "evaluation" if by_content else "sha256"
    if stored.get(key) != now[key]:
        return Likeness.OTHER
    trains_alike = not {"training"} <= stored.keys() & now.keys() or stored["training"] == now["training"]
    return Likeness.SAME if trains_alike else Likeness.TRAINS_OTHERWISE


def placed_layers(layers: Iterable[Layer]) -> set[str]:
    """Return layers whose parameters are placed where ``layers`` are: they, and the owners of what is tied there."""
    return {name for layer in layers for name in (layer.name, *(owner for owner, _ in layer.tied.values()))}


def load_state(
    store: CheckpointStore,
    step: int,
    model: Model,
    optimizer: Any,
    master: Any = jnp.float32,
    layers: Collection[str] | None = None,
) -> Checkpoint:
    """Return the checkpoint of ``step``, checked against the model and the optimizer (None: it has no state of one), before
    anything is placed or compiled. ``layers``: only these are read, and of the optimizer's state only theirs is checked.

    Raises:
        CheckpointError: it is damaged (DamagedCheckpointError), or of another model or optimizer.
    """
    model, params = model.stored, stored_params(model, master)
    loaded = store.load(step, like={"params": params}, layers=layers)
    if optimizer is None:
        return loaded
    trained = trained_params(model.layers, params)
    leaves = state_leaves(jax.eval_shape(optimizer.init, trained), trained)
    mine = [layer for layer in trained if layers is None or layer in layers]
    if mine:
        fitted([leaf for leaf in leaves if leaf.layer in (None, *mine)], mine, loaded.optimizer)
    return loaded


def newest(store: CheckpointStore, warn: Callable[[str], None], before: int | None = None) -> int | None:
    """Return the newest intact step, of those below ``before``; None if there is no checkpoint. ``warn`` is told of each
    damaged one passed over.

    Raises:
        CheckpointError: none is intact, or a newer one can't be read now.
    """
    intact = store.latest_intact(before)
    if intact.step is None and intact.warnings:
        raise CheckpointError(
            f"{store.directory}: no checkpoint is intact ({'; '.join(intact.warnings)}); choose another directory"
        )
    for warning in intact.warnings:
        warn(warning)
    return intact.step


def undamaged(store: CheckpointStore, step: int, read: Callable[[int], _Read], warn: Callable[[str], None]) -> _Read:
    """``read(step)``; where the files of a checkpoint match their checksums and its arrays are damaged all the same, that of
    the newest intact one below its step, of which ``warn`` is told.

    Raises:
        CheckpointError: as ``read``; DamagedCheckpointError where there is no older one.
    """
    while True:
        try:
            return read(step)
        except DamagedCheckpointError as error:
            before = newest(store, warn, step)
            if before is None:
                raise
            warn(f"passed over step {step}: {error.__cause__ or error}")
            step = before
