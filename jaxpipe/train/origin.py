"""What a checkpoint of a :class:`~jaxpipe.train.trainer.Trainer` says of its model, tokenizer and data, so that ``eval``,
``generate``, ``export`` and ``run.init_from`` find in it what they find in one of ``jaxpipe train``.

Models of jaxpipe know the function and the options that make them (:attr:`~jaxpipe.stage.model.layer.Model.target`); of any
other model the Trainer is told. Neither is believed: what the function makes must compute what is trained. Where it does not,
or nothing is known, the checkpoint names no model, and whoever reads it must.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpipe.errors import ConfigError, StageError
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.reference import resolve_model, source_of
from jaxpipe.train.checkpoints.stored import model_digest
from jaxpipe.train.corpora.tokenizers import IdTokenizer, Tokenizer, stored_tokenizer
from jaxpipe.train.data import Data
from jaxpipe.train.devices import number_settings
from jaxpipe.train.settings.sections import ModelConfig, names_function


def told_origin(model: Model, target: str, options: Mapping[str, Any]) -> ModelConfig:
    """What makes ``model``, as the user says.

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
    """What makes ``model``, as it says itself; None if it does not, or has been changed since."""
    if not model.target:
        return None
    try:
        same = _same(resolve_model(model.target, model.options), model)
    except (ConfigError, StageError):
        return None
    return ModelConfig(model.target, model.options) if same else None


def _same(one: Model, other: Model) -> bool:
    """Whether both evaluate to the same; rules of what is trained make no other model."""
    return model_digest(one, training=False) == model_digest(other, training=False)


def stored_meta(
    model: Model, origin: ModelConfig | None, tokenizer: Tokenizer | None, data: Data | None = None
) -> dict[str, Any]:
    """What ``meta`` holds of these, as ``jaxpipe train`` keeps it."""
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
    found = {"config": config, "tokenizer": stored_tokenizer(text), "saved_by": "Trainer"}
    found["jax_settings"] = number_settings()
    found["sources"] = {} if origin is None else {"model": source_of(origin.target)}
    return found if data is None else {**found, "data": {"fingerprint": data.dataset.fingerprint}}


def names_model(meta: Mapping[str, Any]) -> bool:
    """Whether a checkpoint says what makes its model."""
    config = meta.get("config")
    return isinstance(config, dict) and (meta.get("saved_by") != "Trainer" or "model" in config)
