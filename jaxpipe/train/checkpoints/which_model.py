"""Which model a checkpoint is of, asked at every door through which one comes in: eval, generate, export, ``run.init_from``,
resuming, and :meth:`jaxpipe.Trainer.restore`; and what a checkpoint of a ``Trainer`` says of its model, tokenizer and data.

What decides is what the model computes (:func:`likeness`), never its name. A checkpoint is
data: of the functions that it names, only those that come with jaxpipe are imported.

Models of jaxpipe know the function and the options that make them (:attr:`~jaxpipe.stage.model.layer.Model.target`); of any
other model the Trainer is told. Neither is believed: what the function makes must compute what is trained. Where it does not,
or nothing is known, the checkpoint names no model, and whoever reads it must.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.errors import CheckpointError, ConfigError, JaxpipeError, StageError, short_message
from jaxpipe.stage.identity import program_digest
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.params import trained_params
from jaxpipe.stage.model.reference import apply_model, init_params, offered, resolve_model, source_of
from jaxpipe.tensor_parallel import ids_as_before
from jaxpipe.train.checkpoint import Checkpoint, CheckpointStore
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.tokenizers import IdTokenizer, Tokenizer, stored_tokenizer
from jaxpipe.train.data import Data
from jaxpipe.train.devices import number_settings
from jaxpipe.train.settings.sections import ModelConfig, names_function
from jaxpipe.train.update.layerwise import fitted, state_leaves


def stored_params(model: Model, master: Any = jnp.float32) -> dict[str, Any]:
    """Return shapes and dtypes of a model's parameters in a checkpoint: floats are those of masters, whatever the model
    creates."""

    def stored(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, master if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)

    return jax.tree.map(stored, jax.eval_shape(partial(init_params, model), 0))  # type: ignore[no-any-return]


class Likeness(Enum):
    """Says how a model here compares with the model of a checkpoint when that was saved."""

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


def placed_layers(model: Model, layers: Iterable[Layer]) -> set[str]:
    """Return the stored layers whose parameters are placed where ``layers`` of ``model`` are: they, and the owners of what is
    tied there."""
    names = {name for layer in layers for name in (layer.name, *(owner for owner, _ in layer.tied.values()))}
    return set(map(model.stored_layer, names))


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


Meta = Mapping[str, Any]


def provenance(config: TrainConfig) -> dict[str, Any]:
    """Return what a checkpoint keeps beside the digest of its model: the files of the functions that ``config`` names, and the
    JAX settings that change numbers."""
    named = {"model": config.model.target, "data": config.data.target or config.data.path}
    sources = {part: source_of(name) for part, name in named.items() if names_function(name)}
    return {"sources": sources, "jax_settings": number_settings()}


def stored_source(meta: Meta, part: str) -> Mapping[str, Any] | None:
    """Return the file of the function that makes the ``model`` or the ``data`` of a checkpoint; None in one that does not
    say."""
    sources = meta.get("sources")
    source = sources.get(part) if isinstance(sources, dict) else None
    return source if isinstance(source, dict) else None


def importable(meta: Meta, part: str, name: str, where: object, advice: str) -> str:
    """Return the function ``name`` that a checkpoint says to make its ``model`` or its ``data``, as it may be imported.
    ``advice``: how a user names one that may not.

    Raises:
        ConfigError: it does not come with jaxpipe.
    """
    source = stored_source(meta, part)
    target = offered(name, source)
    if target is None:
        file = f" ({source['file']!r})" if source is not None and source.get("file") else ""
        raise ConfigError(
            f"{where} is of the {part} {name}, code outside of the package models{file}: if you trust it, name it yourself "
            f"with {advice}{name}"
        )
    return target


def check_model(meta: Meta, model: Model, target: str, where: object, advice: str, *, allow_other: bool = False) -> str:
    """Compare the model that ``target`` makes of a checkpoint's own options with the checkpoint's. ``target`` may be a model's
    name, where no function is known. ``advice``: how to go on all the same, which ``allow_other`` does. Returns what is to be
    told, or nothing.

    Raises:
        CheckpointError: it is another one.
    """
    try:
        like = likeness(meta, model_digest(model, training=False))
    except StageError as error:
        raise CheckpointError(f"{where} does not fit {target}: {error}") from error
    then, now = stored_source(meta, "model"), source_of(target) if names_function(target) else None
    moved = (
        "" if then is None or now is None or then.get("home") == now["home"] else f" (its code was {then.get('file')})"
    )
    if like is Likeness.OTHER or (like is Likeness.UNKNOWN and moved):
        message = f"{where} is of another model: {target} computes something else than when it was saved{moved}"
        if changed := changed_settings(meta):
            message += f", and JAX's settings have changed ({changed})"
        if allow_other:
            return message
        raise CheckpointError(
            f"{message}; restore that code, name the model that it is of, or go on all the same with {advice}"
        )
    return not_compared(meta, target, where) if like is Likeness.UNKNOWN else ""


def changed_settings(meta: Meta) -> str:
    """Return the JAX settings that change numbers and are not as when the checkpoint was saved; empty if it does not say."""
    then, now = meta.get("jax_settings"), number_settings()
    if not isinstance(then, dict):
        return ""
    keys = sorted(key for key in {*then, *now} if then.get(key) != now.get(key))
    return ", ".join(f"{key} {then.get(key, 'not set')} → {now.get(key, 'not set')}" for key in keys)


def not_compared(meta: Meta, target: str, where: object) -> str:
    """Return a remark on a checkpoint whose digest can't be compared."""
    program = meta.get("program")
    version = program.get("jax") if isinstance(program, dict) else None
    why = f"its digest is of JAX {version!s:.20}" if version else "it has no digest of its model"
    return f"{where}: {why}, so it can't be told whether {target} computes what it did then"


def checked_origin(model: Model, target: str, options: Mapping[str, Any]) -> ModelConfig:
    """Return what makes ``model``, as the user says.

    Raises:
        ConfigError: it makes another model, or can't be imported elsewhere.
    """
    if not names_function(target):
        raise ConfigError(f"target is {target!r}; want module:function, such as my_models:small")
    if target.startswith("__main__:"):
        raise ConfigError(
            f"target is {target}: the script itself can't be imported later; put the function into a module"
        )
    offered = {"vocab_size": model.vocab_size, "seq_len": model.seq_len}
    if not _same(resolve_model(target, options, offered), model):
        raise ConfigError(
            f"target {target} with the options {dict(options)} makes a model that computes something else than the one "
            "that is trained; give the function and options that made it"
        )
    return ModelConfig(target, dict(options))


def known_origin(model: Model) -> ModelConfig | None:
    """Return what makes ``model``, as it says itself; None if it does not, or has been changed since."""
    if not model.target:
        return None
    try:
        same = _same(resolve_model(model.target, model.options), model)
    except (ConfigError, StageError):
        return None
    return ModelConfig(model.target, model.options) if same else None


def _same(one: Model, other: Model) -> bool:
    """Return whether both evaluate to the same; rules of what is trained make no other model."""
    return model_digest(one, training=False) == model_digest(other, training=False)


def stored_meta(
    model: Model, origin: ModelConfig | None, tokenizer: Tokenizer | None, data: Data | None = None
) -> dict[str, Any]:
    """Return what ``meta`` holds of these, as ``jaxpipe train`` keeps it."""
    text = tokenizer or (data.dataset.tokenizer if data is not None else IdTokenizer(max(model.vocab_size, 1)))
    if 0 < model.vocab_size < text.vocab_size:
        raise ConfigError(
            f"tokenizer {text.name} makes {text.vocab_size} different ids, and {model.name} has {model.vocab_size}"
        )
    reading = {"mask": "document"} if "segments" in model.batch_spec(1) else {}
    unknown = {"path": "tokens.npy", "reading": reading}
    settings: dict[str, Any] = unknown if data is None else dict(data.settings)
    settings |= {"tokenizer": text.name, "seq_len": max(model.seq_len, 1)}
    config: dict[str, Any] = {"data": settings}
    if origin is not None:  # the length is a setting of the data
        length = ("seq_len", model.seq_len)
        options = {name: value for name, value in origin.options.items() if (name, value) != length}
        config["model"] = {"target": origin.target, "options": options}
    meta = {"config": config, "tokenizer": stored_tokenizer(text), "saved_by": "Trainer"}
    meta["jax_settings"] = number_settings()
    meta["sources"] = {} if origin is None else {"model": source_of(origin.target)}
    return meta if data is None else {**meta, "data": {"fingerprint": data.dataset.fingerprint}}


def names_model(meta: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint says what makes its model."""
    config = meta.get("config")
    return isinstance(config, dict) and (meta.get("saved_by") != "Trainer" or "model" in config)
