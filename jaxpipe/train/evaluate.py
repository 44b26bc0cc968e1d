"""Evaluation and generation from a checkpoint, without any pipeline: one device, the model's layers one after another.

This is what an evaluator does who gets a checkpoint and the model's name: nothing here knows of ranks, stages or schedules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import CheckpointError, ConfigError
from jaxpipe.stage.layer import Model, Params
from jaxpipe.stage.reference import apply_model, logits
from jaxpipe.train import ngram
from jaxpipe.train.checkpoint import find, load_params, read_manifest
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.data import Batch
from jaxpipe.train.setup import build_model, stored_params
from jaxpipe.train.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model on one device. ``step``: of the checkpoint."""

    config: TrainConfig
    model: Model
    params: Mapping[str, Params]
    tokenizer: Tokenizer
    step: int


def load_trained(path: str | os.PathLike[str], *, step: int | Literal["best"] | None = None) -> Trained:
    """The model of a run directory, a ``checkpoints`` folder, or one checkpoint; the newest step unless one is named
    ("best": the lowest evaluation loss). Parameters are the float32 master ones, whatever the run computed in.

    Raises:
        CheckpointError: there is no intact checkpoint, or it does not fit its model.
        ConfigError: the model can't be made (its module is not importable here).
    """
    folder = find(path, step)
    manifest = read_manifest(folder)
    if "config" not in manifest.meta:
        raise CheckpointError(f"{folder} does not say which model it is of; it was not written by jaxpipe train")
    config = TrainConfig.from_dict(manifest.meta["config"], place=str(folder))
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = build_model(config, tokenizer.vocab_size)
    params = load_params(folder, jax.devices()[0], like=stored_params(model))
    return Trained(config, model, params, tokenizer, manifest.step)


def held_out_score(trained: Trained, batches: Sequence[Batch], bytes_per_token: float | None) -> ngram.Score:
    """Mean loss over ``batches`` (nats a token) and bits per byte."""
    run = jax.jit(lambda params, batch: apply_model(trained.model, params, batch, train=False))
    loss = weight = 0.0
    for batch in batches:
        loss_sum, weight_sum = run(trained.params, batch)
        loss, weight = loss + float(loss_sum), weight + float(weight_sum)
    return ngram.Score(loss / weight, ngram.bits_per_byte(loss / weight, bytes_per_token))


def generate(
    trained: Trained,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[str]:
    """The prompt's continuation, a piece of text per token (pieces may be empty until a character is complete).

    Args:
        tokens: how many to add.
        temperature: 0 takes the likeliest token each time.
        top_k: sample among the k likeliest tokens only; 0: among all.
        seed: same seed, same text.

    Raises:
        ConfigError: a value is out of range.
        DataError: the prompt can't be tokenised.
    """
    if tokens < 1 or temperature < 0 or not 0 <= top_k <= trained.model.vocab_size:
        raise ConfigError(
            f"generate: tokens={tokens}, temperature={temperature:g}, top_k={top_k}; want tokens >= 1, temperature >= 0 and "
            f"top_k from 0 to {trained.model.vocab_size}"
        )
    ids = [int(i) for i in trained.tokenizer.encode(prompt)] or [0]
    return _continue(trained, ids, tokens, temperature, top_k, seed)


def printable(text: str) -> str:
    """``text`` with bytes that are no UTF-8 (lone surrogates) shown as replacement characters."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _continue(
    trained: Trained, ids: list[int], tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[str]:
    length = trained.model.seq_len
    pick = jax.jit(partial(_pick, trained.model, top_k=top_k))
    key = jax.random.key(seed)
    start = len(ids)
    shown = ""
    for n in range(tokens):
        window = np.zeros((1, length), np.int32)
        recent = ids[-length:]
        window[0, : len(recent)] = recent
        ids.append(
            int(pick(trained.params, window, len(recent) - 1, jax.random.fold_in(key, n), jnp.float32(temperature)))
        )
        text = printable(trained.tokenizer.decode(ids[start:]))
        stable = text.rstrip("\ufffd") if n + 1 < tokens else text
        yield stable[len(shown) :]
        shown = stable if len(stable) > len(shown) else shown


def _pick(
    model: Model, params: Any, window: jax.Array, last: jax.Array, key: jax.Array, temperature: jax.Array, *, top_k: int
) -> jax.Array:
    """The next token id after position ``last`` of ``window`` [1, T]."""
    scores = logits(model, params, window)[0, last].astype(jnp.float32)
    if top_k:
        threshold = jax.lax.top_k(scores, top_k)[0][-1]
        scores = jnp.where(scores < threshold, -jnp.inf, scores)
    sampled = jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, sampled, jnp.argmax(scores))
