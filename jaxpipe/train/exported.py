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
from jaxpipe.interop import tokenizer as hub
from jaxpipe.interop.folder import CONFIG, DTYPES, Planned, new_folder, write_json, write_tensors
from jaxpipe.interop.table import Tensor, hugging_face_of, leaf_shapes, rows_by_leaf
from jaxpipe.stage.model.layer import Model, Params
from jaxpipe.stage.model.params import get_leaf
from jaxpipe.train.checkpoints.contents import Manifest, build_trees, list_differences, read_arrays, verify_files
from jaxpipe.train.checkpoints.directory import StepName, find, reading
from jaxpipe.train.checkpoints.stored import stored_params
from jaxpipe.train.evaluate import Trained, described
from jaxpipe.train.origin import known_origin
from jaxpipe.train.tokenizer_files import places_of, special_ids, training_form, write_tokenizer_files


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that :func:`export_hub` has written. ``files``: of tensors. ``remark``: what is to be told of the model."""

    path: Path
    step: int
    parameters: int
    files: tuple[Path, ...]
    remark: str = ""


def export_hub(
    run: Path,
    out: Path,
    *,
    step: StepName = None,
    model: str | Model | None = None,
    tokenizer: str | None = None,
    other_model: bool = False,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
) -> Exported:
    """Write the model of a run, or of one checkpoint, into the new folder ``out``. ``step``, ``model``, ``tokenizer``,
    ``other_model``: as in :func:`jaxpipe.train.evaluate.load_trained`. ``dtype``: a key of
    :data:`jaxpipe.interop.folder.DTYPES`. ``shard_bytes``: the most of a file.

    Raises:
        CheckpointError: there is no intact checkpoint, or it does not fit its model.
        ConfigError: ``out`` exists, ``dtype`` is none of those, or transformers has no such model; nothing is left behind.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; want {', '.join(DTYPES)}")
    if isinstance(model, Model) and known_origin(model) is None:
        raise ConfigError(
            f"{model.name} does not say what makes it, and the file of that says how it lies in folders of the hub; give "
            "model='module:function'"
        )
    with new_folder(out) as made:

        def write(folder: Path) -> Exported:
            shutil.rmtree(made)  # of a try before
            made.mkdir()
            manifest, trained = described(folder, model, tokenizer=tokenizer, other_model=other_model)
            return _write(folder, manifest, trained, made, out, dtype, shard_bytes)

        return reading(partial(find, run, step), write)


def _write(
    folder: Path, manifest: Manifest, found: Trained, to: Path, out: Path, dtype: str, shard_bytes: int
) -> Exported:
    config = found.config
    exchange = hugging_face_of(config.model.target)
    options = {"vocab_size": found.tokenizer.vocab_size, "seq_len": config.data.seq_len, **config.model.options}
    made = exchange.config(options)
    want = stored_params(found.model)
    if problems := list_differences(manifest.layers["params"], manifest.leaves["params"], want):
        raise ConfigError(f"checkpoint {folder} does not fit its model: {problems[0]}")
    shapes = leaf_shapes(want)
    table = exchange.tensors(options)
    rows_by_leaf(table, shapes)
    verify_files(folder, ("params",))
    layers = _Layers(folder, manifest)
    tensors = [Planned(row.name, row.shape(shapes[row.leaf]), partial(layers.tensor, row)) for row in table]
    files = write_tensors(to, tensors, dtype, shard_bytes)
    positions = made.get("max_position_embeddings", made.get("n_positions", config.data.seq_len))
    ids = _write_tokenizer(folder, manifest, found, to, positions)
    write_json(to / CONFIG, {**made, "torch_dtype": dtype, "use_cache": True, "initializer_range": 0.02, **ids})
    if not (to / hub.GENERATION).is_file():
        write_json(to / hub.GENERATION, {name: ids[name] for name in hub.SPECIAL_IDS if ids[name] is not None})
    parameters = sum(map(math.prod, shapes.values()))
    return Exported(out, manifest.step, parameters, tuple(out / file.name for file in files), found.remark)


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
        arrays = read_arrays(self._folder, "params", leaves, partial=True)
        params: Params = build_trees([layer], leaves, arrays)[layer]
        return params


def _write_tokenizer(folder: Path, manifest: Manifest, found: Trained, to: Path, positions: int) -> Mapping[str, Any]:
    """Write the files that the run has kept, or else those that it would keep if it began now; returns the ids of the special
    tokens. ``positions``: the most tokens that the model takes."""
    tokenizer, data = found.tokenizer, found.config.data
    kept = folder.parent.parent / hub.TOKENIZER  # of the run that the checkpoint is in
    if data.tokenizer == "byte":
        hub.write_byte_tokenizer(to, positions)
        hub.copy_files(kept, to, [hub.TEMPLATE])
    run = manifest.meta["config"].get("run")
    init_from = run.get("init_from") if isinstance(run, dict) else None
    template, ends = (None, []) if "imported" in manifest.meta else training_form(data, tokenizer, found.began_in)
    template = None if (kept / hub.TEMPLATE).is_file() else template
    places = [kept, *places_of(data, init_from if isinstance(init_from, str) else None, found.began_in)]
    write_tokenizer_files(to, tokenizer, places, template, ends)
    if tokenizer.content is not None and not (to / hub.SETTINGS).is_file():
        end = next(iter(ends), tokenizer.eos)
        hub.write_tokenizer_config(to, positions, None if end is None else tokenizer.decode([end]))
    return special_ids(to, tokenizer) | ({"bos_token_id": 0, "eos_token_id": 0} if data.tokenizer == "byte" else {})
