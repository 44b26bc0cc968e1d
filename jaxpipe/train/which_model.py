"""Which model a checkpoint is of, asked at every door through which one comes in: eval, generate, export, ``run.init_from``,
resuming, and :meth:`jaxpipe.Trainer.restore`; and what a checkpoint of a ``Trainer`` says of its model, tokenizer and data.

What decides is what the model computes (:func:`jaxpipe.train.checkpoints.stored.likeness`), never its name. A checkpoint is
data: of the functions that it names, only those that come with jaxpipe are imported.

Models of jaxpipe know the function and the options that make them (:attr:`~jaxpipe.stage.model.layer.Model.target`); of any
other model the Trainer is told. Neither is believed: what the function makes must compute what is trained. Where it does not,
or nothing is known, the checkpoint names no model, and whoever reads it must.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpipe.errors import CheckpointError, ConfigError, StageError
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.reference import offered, resolve_model, source_of
from jaxpipe.train.checkpoints.stored import Likeness, likeness, model_digest
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.tokenizers import IdTokenizer, Tokenizer, stored_tokenizer
from jaxpipe.train.data import Data
from jaxpipe.train.devices import number_settings
from jaxpipe.train.settings.sections import ModelConfig, names_function

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
