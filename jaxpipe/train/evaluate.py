"""Evaluation and generation from a checkpoint, without any pipeline: the model's layers one after another, on one device or,
where that does not hold them, consecutive layers on each of several.

This is what an evaluator does who gets a checkpoint and the model's name: nothing here knows of ranks, stages or schedules. On
several devices the cut is by bytes of parameters alone. Calls are dispatched and nothing is waited for, so that several batches
are on their way at once, each on another device.

A checkpoint is data: of what it names, only models that come with jaxpipe are imported and called. Any other model must be
named by whoever evaluates it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import CheckpointError, ConfigError, DataError, StageError
from jaxpipe.interop.folder import TOKENIZER
from jaxpipe.stage.jaxprs import is_array
from jaxpipe.stage.model.layer import Model, Params, taken_by
from jaxpipe.stage.model.plan import cut
from jaxpipe.stage.model.reference import init_params, last_readers, logits, named_metrics, run_layers
from jaxpipe.train.checkpoints.contents import Manifest, read_manifest_of
from jaxpipe.train.checkpoints.folders import StepName, find, load_group, reading
from jaxpipe.train.checkpoints.which_model import check_model, importable, names_model, placed_layers, stored_params
from jaxpipe.train.config import TrainConfig, known_settings
from jaxpipe.train.corpora import ngram
from jaxpipe.train.corpora.datasets import load_dataset
from jaxpipe.train.corpora.encoding import ends_of
from jaxpipe.train.corpora.tokenizers import IdTokenizer, Tokenizer, checkpoint_tokenizer, load_tokenizer
from jaxpipe.train.data import Batch, Dataset
from jaxpipe.train.devices import limit_bytes, request_memory
from jaxpipe.train.settings.sections import ModelConfig, names_function
from jaxpipe.train.setup import build_model, check_tokens, read_by

_SHARE = 0.8
"""The fraction of a device's memory that parameters may take."""


def devices_for(model: Model, count: int | None = None) -> tuple[jax.Device, ...]:
    """``count`` devices of this process; by default as few as hold the parameters, or all (one where a device's memory is not
    known, as on CPUs).

    Raises:
        ConfigError: there are fewer.
    """
    local = jax.local_devices()
    if count is not None:
        if count > len(local):
            raise ConfigError(f"--devices {count}: JAX sees {len(local)} here; use at most that many")
        return tuple(local[:count])
    room = limit_bytes(local[0])
    sizes = _bytes_of(model)
    for n in range(1, len(local) if room else 1):
        if max(sum(sizes[i] for i in part) for part in _parts(model, n)) <= _SHARE * (room or 0):
            return tuple(local[:n])
    return tuple(local if room else local[:1])


def placement_over(model: Model, devices: Sequence[jax.Device]) -> dict[str, jax.Device]:
    """Return the device of each layer, by name."""
    parts = zip(_parts(model, len(devices)), devices, strict=False)
    return {model.layers[i].name: device for part, device in parts for i in part}


def results_over(
    model: Model, params: Mapping[str, Params], devices: Sequence[jax.Device], layers: Sequence[int]
) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return a function of a batch: what the layers at ``layers`` return in evaluation mode. ``params``: as
    :func:`placement_over` of ``devices`` places them; of tied leaves a device gets a copy."""
    readers = last_readers(model, layers)
    calls: list[tuple[Callable[..., Any], Mapping[str, Params], jax.Device]] = []
    for part, device in zip(_parts(model, len(devices)), devices, strict=False):
        part_params = {
            name: jax.device_put(params[name], device) for name in placed_layers(model, (model.layers[i] for i in part))
        }
        calls.append(
            (jax.jit(partial(_run, model, readers, part, part.stop == len(model.layers))), part_params, device)
        )

    def run(batch: Mapping[str, Any]) -> list[Any]:
        results: dict[int, Any] = {}
        for call, part_params, device in calls:
            results = call(jax.device_put(results, device), part_params, jax.device_put(dict(batch), device))
        return [results[i] for i in layers]

    return run


def _run(
    model: Model, readers: Mapping[int, int], part: range, last: bool, results: Any, params: Any, batch: Any
) -> Any:
    outputs = run_layers(model, readers, part, results, params, batch)
    if not last and not all(map(is_array, jax.tree.leaves(outputs))):
        raise StageError(f"{model.name}: a layer returns values that are no arrays; use one device")
    return outputs


def _parts(model: Model, count: int) -> Iterator[range]:
    sizes = [1 + size for size in _bytes_of(model)]
    return (range(*part) for part in cut(model.layers, min(count, len(sizes)), sizes))


def _bytes_of(model: Model) -> list[int]:
    """Return the bytes of each layer's parameters, as a checkpoint has them."""
    stored = stored_params(model)
    return [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored[layer.name])) for layer in model.layers]


_FLAGS = ("--model ", "--other-model")


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, its layers on ``devices`` in turn. ``config``: its model, data and ``run.memory_fraction`` are those of
    the run, the rest are defaults. ``step``: of the checkpoint. ``fingerprint``: of the data that it was trained on; empty if
    not known. ``ignored``: settings of the run that this version does not know. ``began_in``: the run's working directory, if
    known. ``remark``: what is to be told of the model; empty: nothing. ``meta``: of the checkpoint."""

    config: TrainConfig
    model: Model
    params: Mapping[str, Params]
    tokenizer: Tokenizer
    step: int
    fingerprint: str = ""
    ignored: tuple[str, ...] = ()
    began_in: str = ""
    devices: tuple[jax.Device, ...] = ()  # JAX's first one
    remark: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    def results(self, layers: Sequence[int]) -> Callable[[Mapping[str, Any]], list[Any]]:
        """Return a function of a batch: what the layers at ``layers`` return."""
        return results_over(self.model, self.params, self.devices or jax.local_devices()[:1], layers)


def load_trained(
    path: str | os.PathLike[str],
    *,
    step: StepName = None,
    model: str | Model | None = None,
    tokenizer: str | None = None,
    devices: int | None = None,
    other_model: bool = False,
) -> Trained:
    """Return the model of a run directory, a ``checkpoints`` folder, or one checkpoint; the newest step unless one is named
    ("best": the lowest evaluation loss). Parameters are the float32 master ones, whatever the run computed in.

    ``model``: ``module:function`` that makes the model, in place of the one that the checkpoint names; or the model.
    ``tokenizer``: as ``data.tokenizer``, where the checkpoint has none. ``devices``: how many to put its layers on, by default
    as few as hold them. ``other_model``: go on although the model computes something else than when it was saved.

    Raises:
        CheckpointError: there is no intact checkpoint, or it does not fit its model, or is of another one.
        ConfigError: the model can't be made (its module is not importable here), or is one that must be named by ``model``; the
            checkpoint has another tokenizer; or there are fewer devices.
    """
    read = partial(_trained, named=model, tokenizer=tokenizer, count=devices, other_model=other_model)
    return reading(partial(find, path, step), read)


def load_data(trained: Trained, *, other: bool = False, path: str | None = None) -> tuple[Dataset, bool | None]:
    """Return the data of a trained model's config, and whether they are other data than it was trained on (None: the checkpoint
    does not say which those were). ``path``: in place of the config's ``data.path``.

    Raises:
        ConfigError: they are of a function outside of the package models, which must be named by ``path``.
        DataError: they can't be read, or they are and ``other`` does not allow it.
    """
    data = trained.config.data
    stored = data.target or data.path
    if path is None and not trained.fingerprint and not other:
        raise DataError(
            f"the checkpoint of step {trained.step} does not say what data it was trained on: name data to evaluate on with "
            "--data PATH"
        )
    if path is None and names_function(stored):
        function = importable(trained.meta, "data", stored, f"step {trained.step}", "--data ")
        data = replace(data, path=function) if data.target is None else replace(data, target=function)
    elif path is not None and path != data.target:
        data = replace(data, path=path, sources={}, target=None)
    elif (first_path := Path(trained.began_in, data.path)).exists() and not Path(data.path).exists():
        data = replace(data, path=str(first_path))  # the run has the path as it was from there
    config = replace(trained.config, data=data)
    try:
        dataset = read_by(trained.model, load_dataset(config, trained.tokenizer), config.data.seq_len)
    except DataError as error:
        if path is not None or data.sources or names_function(stored) or stored == "stdlib" or Path(stored).exists():
            raise
        raise DataError(f"{error}; say where they are with --data PATH, or name other data (--other-data)") from None
    differ = dataset.fingerprint != trained.fingerprint if trained.fingerprint else None
    if differ and not other:
        raise DataError(
            f"data {dataset.source}: not the data that step {trained.step} was trained on (or its holdout or tokenizer "
            "differ), so what is held out here may have been learnt; restore them, or evaluate all the same with --other-data"
        )
    return dataset, differ


def described(
    folder: Path,
    named: str | Model | None = None,
    *,
    tokenizer: str | None = None,
    other_model: bool = False,
    advice: tuple[str, str] = _FLAGS,
) -> tuple[Manifest, Trained]:
    """Return what one checkpoint says of itself, and its model (the one ``named`` or else the one that it names) without
    parameters; raises as :func:`load_trained`. ``advice``: what names a model, and what takes another one."""
    manifest = read_manifest_of(folder)
    config, ignored = _config(manifest.meta, folder)
    # JAX looks for devices when the model is made, if it has not before.
    request_memory(config.run.machine.memory_fraction)
    copy = folder.parent.parent / TOKENIZER / "tokenizer.json"
    stored_tokenizer = checkpoint_tokenizer(
        manifest.meta.get("tokenizer"), str(copy) if copy.is_file() else config.data.tokenizer
    )
    text = stored_tokenizer
    if tokenizer is not None:
        text = _named_tokenizer(tokenizer, stored_tokenizer, folder)
        config = replace(config, data=replace(config.data, tokenizer=tokenizer))
    config = replace(config, model=_named_model(config.model, named, manifest.meta, folder, advice[0]))
    if isinstance(named, Model):
        check_tokens(named, text.vocab_size, config.data.seq_len)
    model = named if isinstance(named, Model) else build_model(config, text.vocab_size)
    data = manifest.meta.get("data")
    fingerprint = str(data.get("fingerprint") or "") if isinstance(data, dict) else ""
    began_in = str(manifest.meta.get("began_in") or "")
    target = named.name if isinstance(named, Model) else config.model.target
    remark = check_model(manifest.meta, model, target, folder, advice[1], allow_other=other_model)
    trained = Trained(config, model, {}, text, manifest.step, fingerprint, ignored, began_in)
    return manifest, replace(trained, remark=remark, meta=manifest.meta)


def _named_model(
    stored: ModelConfig, named: str | Model | None, meta: Mapping[str, Any], folder: Path, advice: str
) -> ModelConfig:
    """Return what makes the model: ``named``, or else what the checkpoint names, if that comes with jaxpipe."""
    if isinstance(named, Model):
        return ModelConfig(named.target, named.options) if named.target else stored
    if named is not None:
        return replace(stored, target=named)
    if not names_model(meta):
        raise ConfigError(
            f"{folder} was saved by a Trainer that does not know what makes its model: name it with {advice}"
            "module:function, or train with Trainer(target=…)"
        )
    return replace(stored, target=importable(meta, "model", stored.target, folder, advice))


def _named_tokenizer(spec: str, stored: Tokenizer, folder: Path) -> Tokenizer:
    """Return the tokeniser that is given for a checkpoint that has ids only, or the same one again."""
    named = load_tokenizer(spec)
    if isinstance(stored, IdTokenizer) or named.fingerprint == stored.fingerprint:
        return named
    raise ConfigError(f"{folder} was trained with another tokenizer, {stored.name}, than {spec}; leave --tokenizer out")


def _trained(
    folder: Path, named: str | Model | None, tokenizer: str | None, count: int | None, other_model: bool
) -> Trained:
    manifest, trained = described(folder, named, tokenizer=tokenizer, other_model=other_model)
    devices = devices_for(trained.model, count)
    like = {"params": stored_params(trained.model)}
    params = load_group(folder, "params", manifest, like, placement_over(trained.model, devices))
    return replace(trained, params=params, devices=devices)


def _config(meta: Mapping[str, Any], folder: Path) -> tuple[TrainConfig, tuple[str, ...]]:
    """Return model, data and memory fraction of a stored config, and the settings that this version does not know."""
    stored = meta.get("config")
    if not isinstance(stored, dict):
        raise CheckpointError(f"{folder} does not say which model it is of; it was not written by jaxpipe")
    settings, unknown = known_settings(stored)
    fraction = settings.get("run", {}).get("machine", {}).get("memory_fraction")
    sections = {name: settings[name] for name in ("model", "data") if name in settings}
    try:
        return TrainConfig.from_dict(sections | {"run": {"machine": {"memory_fraction": fraction}}}), unknown
    except ConfigError as error:
        raise CheckpointError(f"{folder}: its config can't be used: {error}") from error


def held_out_score(trained: Trained, batches: Sequence[Batch], bytes_per_token: float | None) -> ngram.Score:
    """Over ``batches``: mean loss (in the model's ``loss_unit``), bits per byte, and the model's own metrics."""
    run = trained.results(trained.model.losses)
    sums: dict[str, Any] = {}
    under_way: deque[list[Any]] = deque()
    for n, batch in enumerate(batches, 1):
        under_way.append(run(batch))
        # As many batches under way as devices, so that each has one to work on; more would only fill memory.
        while len(under_way) > (len(trained.devices) if n < len(batches) else 0):
            metrics = named_metrics(trained.model, jax.device_get(under_way.popleft()))
            sums = {name: np.add(np.asarray(pair, np.float64), sums.get(name, 0)) for name, pair in metrics.items()}
    means = {name: float(total / weight) for name, (total, weight) in sums.items()}
    loss = means.pop("loss")
    return ngram.Score(loss, ngram.bits_per_byte(loss, bytes_per_token), means)


def generate(
    trained: Trained,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[str]:
    """Return the prompt's continuation, a piece of text per token (pieces may be empty until a character is complete). The
    prompt begins as the documents that were trained on.

    Args:
        tokens: how many to add.
        temperature: 0 takes the likeliest token each time.
        top_k: sample among the k likeliest tokens only; 0: among all.
        seed: same seed, same text.

    Raises:
        ConfigError: a value is out of range.
        StageError: the model is none of language.
        DataError: the prompt can't be tokenised.
    """
    _check_language(trained.model)
    if tokens < 1 or temperature < 0 or not 0 <= top_k <= trained.model.vocab_size:
        raise ConfigError(
            f"generate: tokens={tokens}, temperature={temperature:g}, top_k={top_k}; want tokens >= 1, temperature >= 0 and "
            f"top_k from 0 to {trained.model.vocab_size}"
        )
    tokenizer = trained.tokenizer
    if isinstance(tokenizer, IdTokenizer):
        raise DataError(
            f"the checkpoint of step {trained.step} keeps no tokenizer, ids alone ({tokenizer.name}): name the one that its "
            "tokens are of with --tokenizer"
        )
    ids = [int(i) for i in tokenizer.encode(prompt)]
    bos, _ = ends_of(tokenizer, trained.config.data.reading)
    if bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    if not ids:
        ids = [tokenizer.eos or 0]  # as behind the end of a document
    return _continue(trained, ids, tokens, temperature, top_k, seed)


def _check_language(model: Model) -> None:
    """Raises StageError unless the model makes logits of tokens alone."""
    tokens = jax.ShapeDtypeStruct((1, model.seq_len), jnp.int32)
    try:
        params = jax.eval_shape(partial(init_params, model), 0)
        output = jax.eval_shape(partial(logits, model), params, tokens)
    except StageError as error:
        raise StageError(f"generate: {model.name} is no language model: {error}") from None
    shape: tuple[int, ...] = getattr(output, "shape", ())
    if shape[:2] != (1, model.seq_len) or len(shape) != 3 or shape[2] < model.vocab_size:
        expected_shape = (1, model.seq_len, model.vocab_size)
        raise StageError(f"generate: {model.name} is no language model: its output is not of shape {expected_shape}")


def printable(text: str) -> str:
    """``text`` with bytes that are no UTF-8 (lone surrogates) shown as replacement characters."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _continue(
    trained: Trained, ids: list[int], tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[str]:
    length = trained.model.seq_len
    run, pick = trained.results(taken_by(trained.model.layers)[-1]), jax.jit(partial(_pick, top_k=top_k))
    key, has_token = jax.random.key(seed), trained.tokenizer.has_token()
    start = len(ids)
    shown = ""
    for n in range(tokens):
        window = np.zeros((1, length), np.int32)
        recent = ids[-length:]
        window[0, : len(recent)] = recent
        (scores,) = run({"tokens": window})
        drawn = pick(scores, has_token, len(recent) - 1, jax.random.fold_in(key, n), jnp.float32(temperature))
        ids.append(int(drawn))
        text = printable(trained.tokenizer.decode(ids[start:]))
        stable = text.rstrip("\ufffd") if n + 1 < tokens else text
        yield stable[len(shown) :]
        shown = stable if len(stable) > len(shown) else shown


def _pick(
    logits: jax.Array, has_token: jax.Array, last: jax.Array, key: jax.Array, temperature: jax.Array, *, top_k: int
) -> jax.Array:
    """Draw the next token id, by the logits ``logits`` [1, T, V], after position ``last``. Rows past the tokenizer's
    vocabulary, and ids for which ``has_token`` is false, are never drawn: a model of the hub has more of them than tokens."""
    scores = logits[0, last].astype(jnp.float32)
    scores = jnp.where(jnp.pad(has_token, (0, len(scores) - len(has_token))), scores, -jnp.inf)
    if top_k:
        threshold = jax.lax.top_k(scores, top_k)[0][-1]
        scores = jnp.where(scores < threshold, -jnp.inf, scores)
    sampled = jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, sampled, jnp.argmax(scores))
