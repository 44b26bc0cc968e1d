"""A trained model as a folder of the Hugging Face hub, which ``transformers``, vLLM and lm-eval open as it is.

One layer of the checkpoint is read at a time, and one tensor written at a time; the optimizer's state is not read.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.interop.folder import CONFIG, Planned, read_json, write_json, write_tensors
from jaxpipe.interop.table import Tensor, hugging_face_of, rows_by_leaf
from jaxpipe.interop.tokenizer import FILES, TOKENIZER, write_byte_tokenizer, write_tokenizer_config
from jaxpipe.stage.model.layer import Params
from jaxpipe.stage.model.params import by_path, get_leaf
from jaxpipe.train import checkpoint_format as form
from jaxpipe.train.checkpoint_load import StepName, find, reading
from jaxpipe.train.checkpoint_manifest import Manifest
from jaxpipe.train.checkpoint_tree import build, differences
from jaxpipe.train.evaluate import Described, described
from jaxpipe.train.stored import stored_params

_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists; give -o a folder that does not")
    temporary = out.absolute().with_name(f".{out.name}.tmp-{secrets.randbelow(10**9)}")

    def write(folder: Path) -> Exported:
        shutil.rmtree(temporary, ignore_errors=True)  # of a try before
        found = described(folder, model)
        temporary.mkdir(parents=True)
        return _write(folder, found, temporary, out, dtype, shard_bytes)

    try:
        made = reading(partial(find, run, step), write)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error.strerror or error}; choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def _write(folder: Path, found: Described, to: Path, out: Path, dtype: str, shard_bytes: int) -> Exported:
    config, manifest = found.config, found.manifest
    exchange = hugging_face_of(config.model.target)
    options = {"vocab_size": found.tokenizer.vocab_size, "seq_len": config.data.seq_len, **config.model.options}
    made = exchange.config(options)
    want = stored_params(found.model)
    if problems := differences(manifest.layers["params"], manifest.leaves["params"], want):
        raise ConfigError(f"checkpoint {folder} does not fit its model: {problems[0]}")
    shapes = {(layer, path): tuple(aval.shape) for layer, tree in want.items() for path, aval in by_path(tree).items()}
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
    parameters = sum(sum(leaf.size for leaf in by_path(tree).values()) for tree in want.values())
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


def _write_tokenizer(folder: Path, found: Described, to: Path) -> Mapping[str, int | None]:
    """The files that the model came with, or else what its ``data.tokenizer`` is; and the ids of its special tokens."""
    came_with = _came_with(folder)
    if came_with is not None:
        for name in FILES:
            if (came_with / name).is_file():
                shutil.copyfile(came_with / name, to / name)
    imported = found.manifest.meta.get("imported")
    ids = dict.fromkeys(_IDS) | ({name: imported.get(name) for name in _IDS} if isinstance(imported, dict) else {})
    if (to / "generation_config.json").is_file():
        said = read_json(to / "generation_config.json")
        ids |= {name: said[name] for name in _IDS if ids[name] is None and said.get(name) is not None}
    length = found.config.data.seq_len
    spec = found.config.data.tokenizer
    if came_with is None and spec == "byte":
        write_byte_tokenizer(to, length)
        ids |= {"bos_token_id": 0, "eos_token_id": 0}
    elif came_with is None and spec.endswith(".json"):
        shutil.copyfile(spec, to / "tokenizer.json")
        end, number = _end_of(read_json(to / "tokenizer.json"))
        write_tokenizer_config(to, length, end)
        ids |= {"bos_token_id": number, "eos_token_id": number}
    return ids


def _came_with(folder: Path) -> Path | None:
    """The folder of tokenizer files in the run that a checkpoint is in."""
    places: Sequence[Path] = (folder / TOKENIZER, folder.parent.parent / TOKENIZER)
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)


def _end_of(tokenizer: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """The token that ends a text, and its id, by its usual names."""
    added = {token.get("content"): token.get("id") for token in tokenizer.get("added_tokens") or ()}
    return next(((name, added[name]) for name in _END_TOKENS if name in added), (None, None))
