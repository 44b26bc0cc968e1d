"""A trained model as a folder of the Hugging Face hub, which ``transformers``, vLLM and lm-eval open as it is.

One layer of the checkpoint is read at a time, and one tensor written at a time; the optimizer's state is not read.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.interop.folder import CONFIG, Planned, new_folder, read_json, write_json, write_tensors
from jaxpipe.interop.table import Tensor, hugging_face_of, leaf_shapes, rows_by_leaf
from jaxpipe.interop.tokenizer import JSON, TOKENIZER, copy_files, write_byte_tokenizer, write_tokenizer_config
from jaxpipe.stage.model.layer import Params
from jaxpipe.stage.model.params import get_leaf
from jaxpipe.train.checkpoints import format as form
from jaxpipe.train.checkpoints.load import StepName, find, reading
from jaxpipe.train.checkpoints.manifest import Manifest
from jaxpipe.train.checkpoints.stored import stored_params
from jaxpipe.train.checkpoints.tree import build, differences
from jaxpipe.train.evaluate import Trained, described

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that :func:`export_hub` has written. ``files``: of tensors."""

    path: Path
    step: int
    parameters: int
    files: tuple[Path, ...]


def export_hub(
    run: Path,
    out: Path,
    *,
    step: StepName = None,
    model: str | None = None,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
) -> Exported:
    """Write the model of a run, or of one checkpoint, into the new folder ``out``. ``step``, ``model``: as in
    :func:`jaxpipe.train.evaluate.load_trained`. ``dtype``: a key of :data:`jaxpipe.interop.folder.DTYPES`. ``shard_bytes``: the
    most of a file.

    Raises:
        CheckpointError: there is no intact checkpoint, or it does not fit its model.
        ConfigError: ``out`` exists, or transformers has no such model; nothing is left behind.
    """
    with new_folder(out) as made:

        def write(folder: Path) -> Exported:
            shutil.rmtree(made)  # of a try before
            made.mkdir()
            return _write(folder, *described(folder, model), made, out, dtype, shard_bytes)

        return reading(partial(find, run, step), write)


def _write(
    folder: Path, manifest: Manifest, found: Trained, to: Path, out: Path, dtype: str, shard_bytes: int
) -> Exported:
    config = found.config
    exchange = hugging_face_of(config.model.target)
    options = {"vocab_size": found.tokenizer.vocab_size, "seq_len": config.data.seq_len, **config.model.options}
    made = exchange.config(options)
    want = stored_params(found.model)
    if problems := differences(manifest.layers["params"], manifest.leaves["params"], want):
        raise ConfigError(f"checkpoint {folder} does not fit its model: {problems[0]}")
    shapes = leaf_shapes(want)
    table = exchange.tensors(options)
    rows_by_leaf(table, shapes)
    form.verify(folder, ("params",))
    layers = _Layers(folder, manifest)
    tensors = [Planned(row.name, row.shape(shapes[row.leaf]), partial(layers.tensor, row)) for row in table]
    files = write_tensors(to, tensors, dtype, shard_bytes)
    ids = _write_tokenizer(folder, found, to)
    write_json(to / CONFIG, {**made, "torch_dtype": dtype, "use_cache": True, "initializer_range": 0.02, **ids})
    if not (to / "generation_config.json").is_file():
        write_json(to / "generation_config.json", {name: ids[name] for name in _IDS if ids[name] is not None})
    parameters = sum(map(math.prod, shapes.values()))
    return Exported(out, manifest.step, parameters, tuple(out / file.name for file in files))


class _Layers:
    """The layers of a checkpoint, the last one that was asked for in memory."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._leaves = folder, manifest.leaves["params"]
        self._name, self._params = "", dict[str, Any]()

    def tensor(self, row: Tensor) -> Any:
        if row.layer != self._name:
            self._params = {}  # before the next is read
            self._name, self._params = row.layer, self._read(row.layer)
        return row.to_theirs(get_leaf(self._params, row.path))

    def _read(self, layer: str) -> Params:
        leaves = [leaf for leaf in self._leaves if leaf.layer == layer]
        arrays = form.read_arrays(self._folder, "params", leaves, some=True)
        params: Params = build([layer], leaves, arrays)[layer]
        return params


def _write_tokenizer(folder: Path, found: Trained, to: Path) -> Mapping[str, Any]:
    """The files that the model came with, or those of its ``data.tokenizer``; and the ids of its special tokens."""
    tokenizer, spec, length = found.tokenizer, found.config.data.tokenizer, found.config.data.seq_len
    ids: dict[str, Any] = dict.fromkeys(_IDS)
    if spec == "byte":
        write_byte_tokenizer(to, length)
        return ids | {"bos_token_id": 0, "eos_token_id": 0}
    if tokenizer.content is None:
        return ids
    (to / JSON).write_text(tokenizer.content, encoding="utf-8")
    kept = folder.parent.parent / TOKENIZER  # of the run that the checkpoint is in
    for place in (kept, Path(spec).parent):
        same = (place / JSON).is_file() and (place / JSON).read_bytes() == tokenizer.content.encode()
        if same and (place / "tokenizer_config.json").is_file():
            copy_files(place, to)
            break
    else:
        write_tokenizer_config(to, length, None if tokenizer.eos is None else tokenizer.decode([tokenizer.eos]))
    said = read_json(to / "tokenizer_config.json")
    for name in _IDS:
        token = said.get(name.removesuffix("_id"))
        token = token.get("content") if isinstance(token, dict) else token
        ids[name] = tokenizer.id_of(token) if isinstance(token, str) else None
    if (to / "generation_config.json").is_file():
        said = read_json(to / "generation_config.json")
        ids |= {name: said[name] for name in _IDS if said.get(name) is not None}
    return ids
