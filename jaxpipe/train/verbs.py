"""Call ``jaxpipe import``, ``export``, ``eval`` and ``generate``, and the data of ``jaxpipe train``, from Python.

They work on what :meth:`jaxpipe.Trainer.save` writes as on runs of ``jaxpipe train``. :file:`GUIDE.md` beside this file has a
script that uses each.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.interop.hub import is_hub
from jaxpipe.stage.model.layer import Model, Params
from jaxpipe.train.checkpoints.folders import StepName, split_step
from jaxpipe.train.checkpoints.which_model import known_origin
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.datasets import load_dataset
from jaxpipe.train.data import Data
from jaxpipe.train.evaluate import Trained, held_out_score, load_data, load_trained
from jaxpipe.train.import_export import Exported, Imported, export_hub, import_hub, initial_params
from jaxpipe.train.setup import read_by

_GIGABYTE = 10**9


def data(
    path: str | Path | None = None,
    *,
    batch: int,
    seq_len: int = 128,
    model: Model | None = None,
    **settings: Any,
) -> Data:
    """Return the data in ``path`` as batches for :meth:`jaxpipe.Trainer.step`: text, JSON lines, Parquet, chats, token stores,
    arrays.

    Args:
        path: as ``data.path`` of a config; left out where ``sources`` or ``target`` is given.
        batch: sequences a step, ``microbatches · microbatch_size``.
        seq_len: tokens a sequence.
        model: that is to read the batches; what it reads is checked, and arrays get its dtypes.
        settings: the other settings of section ``data`` (``jaxpipe train --help-config``): ``tokenizer``, ``holdout``,
            ``sources={"name": {"path": …, "weight": …}}``, ``target``, ``options``, and of ``data.reading`` ``format``,
            ``field``, ``eos``, ``mask``, ``split``, ``seed`` and others.

    Raises:
        ConfigError: a setting is unknown or wrong.
        DataError: the data can't be read, are fewer than a batch, or lack what ``model`` reads.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ConfigError(f"batch is {batch!r}; want how many sequences a step takes, from 1")
    section = {**({} if path is None else {"path": str(path)}), "seq_len": seq_len, **settings}
    if "tokenizer" in section:
        section["tokenizer"] = str(section["tokenizer"])
    config = TrainConfig.from_dict({"data": section}, "jaxpipe.data")
    dataset = load_dataset(config)
    if model is not None:
        dataset = read_by(model, dataset, seq_len)
    stream = dataset.batches(config.data.reading.seed, batch, seq_len)
    return Data(config.to_dict()["data"], dataset, batch, seq_len, stream)


def load_params(path: str | Path, model: Model, *, other_model: bool = False) -> Mapping[str, Params]:
    """Return the parameters in a run, a checkpoint or a folder of the Hugging Face hub, by layer, for ``jaxpipe.Trainer.init``.
    ``path`` may end in ``:STEP`` or ``:best``.

    Args:
        model: that they are for. Of a folder of the hub it must be one that says what makes it (``Model.target``).
        other_model: take them although the model computes something else than the checkpoint's.

    Raises:
        CheckpointError: there is no intact checkpoint, or it is of another model.
        ConfigError: the folder is not whole, or not of this model.
    """
    folder, step = split_step(str(path))
    if not is_hub(folder):
        return _loaded(folder, step, model, None, None, other_model).params
    if (origin := known_origin(model)) is None:
        raise ConfigError(f"{path} is a folder of the hub, and {model.name} does not say what makes it (Model.target)")
    stored = {"target": origin.target, "options": origin.options}
    begun = {"model": stored, "data": {"seq_len": max(model.seq_len, 1)}, "run": {"init_from": str(path)}}
    return initial_params(TrainConfig.from_dict(begun), model)


def import_folder(
    folder: str | Path, run: str | Path, *, model: str | None = None, seq_len: int | None = None
) -> Imported:
    """Make the run directory ``run``, at step 0, of a folder of the Hugging Face hub: config.json, safetensors, and mostly a
    tokenizer. :func:`load_params` reads its parameters for a Trainer.

    Args:
        model: ``module:function`` that reads it; by default the one of its ``model_type``.
        seq_len: tokens a sequence; by default the model's, at most 1024.

    Raises:
        ConfigError: the folder is not whole or fits no model, or ``run`` exists; nothing is left behind.
    """
    return import_hub(Path(folder), Path(run), target=model, seq_len=seq_len)


def export(
    run: str | Path,
    folder: str | Path,
    *,
    step: StepName = None,
    model: str | Model | None = None,
    tokenizer: str | Path | None = None,
    other_model: bool = False,
    dtype: str = "float32",
    shard_gigabytes: float = 5.0,
) -> Exported:
    """Write the model of a run, a folder of checkpoints or one checkpoint into the new ``folder`` as transformers, vLLM and
    lm-eval open it.

    Args:
        step: the newest by default; ``"best"``: of the lowest evaluation loss.
        model: ``module:function`` that makes the model, where the checkpoint names none or one that is not of jaxpipe; or the
            model.
        tokenizer: ``byte`` or a ``tokenizer.json``, where the checkpoint has none.
        other_model: go on although the model computes something else than when it was saved.
        dtype: of the numbers: float32, bfloat16 or float16.
        shard_gigabytes: the most that a file holds, in 10⁹ bytes.

    Raises:
        CheckpointError: there is no intact checkpoint, or it does not fit its model.
        ConfigError: an argument is wrong, ``folder`` exists, or transformers has no such model; nothing is left behind.
    """
    if not shard_gigabytes > 0:
        raise ConfigError(f"shard_gigabytes is {shard_gigabytes}; want more than 0, such as 5")
    shard_bytes = int(shard_gigabytes * _GIGABYTE)
    text = None if tokenizer is None else str(tokenizer)
    which: dict[str, Any] = {"step": step, "model": model, "tokenizer": text, "other_model": other_model}
    exported = export_hub(Path(run), Path(folder), **which, dtype=dtype, shard_bytes=shard_bytes)
    if exported.remark:
        warnings.warn(exported.remark, stacklevel=2)
    return exported


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    other_data: bool = False,
    batch: int = 16,
    batches: int | None = None,
    step: StepName = None,
    model: str | Model | None = None,
    tokenizer: str | Path | None = None,
    other_model: bool = False,
    devices: int | None = None,
) -> dict[str, float]:
    """Return the mean ``loss`` of a checkpoint over held-out data (in the model's unit, mostly nats a token), the metrics of
    its loss layer, and ``bits_per_byte`` where the tokens are of text.

    Args:
        data: as ``data.path``; by default what the run was trained on, where the checkpoint says.
        other_data: evaluate although the data are other than the model was trained on.
        batch, batches: sequences at a time, and at most so many times; all that is held out by default.
        step, model, tokenizer, other_model: as in :func:`export`.
        devices: how many to put the layers on; by default as few as hold them.

    Raises:
        CheckpointError, ConfigError, DataError: what is wrong, and what would work.
    """
    trained = _loaded(run, step, model, tokenizer, devices, other_model)
    dataset, _ = load_data(trained, other=other_data, path=None if data is None else str(data))
    held_out = dataset.held_out_batches(batch, trained.config.data.seq_len, batches)
    score = held_out_score(trained, held_out, dataset.bytes_per_token())
    scores = {"loss": score.loss, **score.metrics}
    return scores if score.bits_per_byte is None else {**scores, "bits_per_byte": score.bits_per_byte}


def generate(
    run: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    step: StepName = None,
    model: str | Model | None = None,
    tokenizer: str | Path | None = None,
    other_model: bool = False,
    devices: int | None = None,
) -> str:
    """Return the text that the language model of a checkpoint continues ``prompt`` with.

    Args:
        tokens: how many to add.
        temperature: 0 takes the likeliest token each time.
        top_k: sample among the k likeliest tokens only; 0: among all.
        seed: same seed, same text.
        step, model, tokenizer, other_model, devices: as in :func:`evaluate`.

    Raises:
        CheckpointError, ConfigError, DataError: what is wrong, and what would work.
        StageError: the model is none of language.
    """
    from jaxpipe.train.evaluate import generate  # this function has its name

    trained = _loaded(run, step, model, tokenizer, devices, other_model)
    return "".join(generate(trained, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed))


def _loaded(
    run: str | Path,
    step: StepName,
    model: str | Model | None,
    tokenizer: str | Path | None,
    devices: int | None,
    other_model: bool,
) -> Trained:
    """Return what :func:`load_trained` gives; what is to be said of it becomes a warning."""
    text = None if tokenizer is None else str(tokenizer)
    trained = load_trained(run, step=step, model=model, tokenizer=text, devices=devices, other_model=other_model)
    if trained.remark:
        warnings.warn(trained.remark, stacklevel=3)
    return trained
