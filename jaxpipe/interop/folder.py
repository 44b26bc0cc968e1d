"""Open a folder of the hub that fits a model of ours, checked whole by headers and tables, then read one parameter at a time;
and read and write its files: ``config.json`` strictly, safetensors one tensor at a time, tokenizers as they are.

Nothing in a folder is believed before it is checked, and nothing in it is run. Reading is the package ``safetensors``'s.
Writing is not: its functions want all tensors of a file in memory at once (twice), while a file is a length, a header in JSON,
and the tensors one after another.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.files import check_local, hub_advice, no_constant, read_file, unique_keys
from jaxpipe.interop.table import TARGETS, HuggingFace, Leaf, Tensor, hugging_face_of, leaf_shapes, rows_by_leaf
from jaxpipe.stage.model.layer import Params
from jaxpipe.stage.model.params import nested
from jaxpipe.stage.model.reference import ours

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_READ = frozenset(_STORED.values())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError if the file holds none."""
    try:
        document = json.loads(read_file(path), object_pairs_hook=unique_keys, parse_constant=no_constant)
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}; give a folder of the Hugging Face hub") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; give a folder of the Hugging Face hub") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {' '.join(str(error).split())[:120]}; download it again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}, not an object; download it again")
    return document


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, by its header; ``dtype`` as safetensors names it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(folder: Path, optional: Collection[str] = ()) -> tuple[dict[str, Stored], list[str]]:
    """Find the tensors of a folder by name, by their headers alone; and those of the names ``optional`` that only the index
    has.

    Raises:
        ConfigError: there are none, a file is missing or damaged, or the index says otherwise.
    """
    weight_map: dict[str, str] | None = None
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(x, str) for x in weight_map.values())
        ):
            raise ConfigError(f"{folder / INDEX} has no weight_map of tensors and files; download it again")
        required = {file for name, file in weight_map.items() if name not in optional}
        files = sorted(required | {file for file in weight_map.values() if (folder / Path(file).name).is_file()})
    else:
        files = [WEIGHTS]
        if not (folder / WEIGHTS).is_file():
            foreign = sorted(path.name for path in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.gguf"))
            advice = f"it has {foreign[0]}; save the model again with safe_serialization" if foreign else "download it"
            raise ConfigError(f"{folder} has neither {WEIGHTS} nor {INDEX}: {advice}")
    tensors: dict[str, Stored] = {}
    for name in files:
        # a downloaded index must not make us open files elsewhere (../../x)
        if Path(name).name != name:
            raise ConfigError(f"{folder / INDEX} names the file {name!r} outside of its folder; download it again")
        with opened(folder / name) as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                if key in tensors:
                    raise ConfigError(
                        f"{folder}: {key} is in {tensors[key].file.name} and in {name}; download it again"
                    )
                part = file.get_slice(key)
                tensors[key] = Stored(folder / name, key, tuple(part.get_shape()), str(part.get_dtype()))
    stale = [key for key, name in (weight_map or {}).items() if key not in tensors or tensors[key].file.name != name]
    for key in stale:
        if key not in optional or key in tensors:
            raise ConfigError(f"{folder / INDEX} names a file for {key} that does not contain it; download it again")
    return tensors, stale


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside ``out`` that is renamed to ``out`` at the end of the block; a failure leaves nothing behind.

    Raises:
        ConfigError: ``out`` holds something, or can't be written.
    """
    check_local(out, "the folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists; give -o a folder that does not")
    # beside ``out`` and so on its file system, where a rename is atomic: nobody ever sees half a folder
    temporary = out.absolute().with_name(f".{out.name}.tmp-{secrets.randbelow(10**9)}")
    missing = [folder for folder in temporary.parents if not folder.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error.strerror or error}; choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # not empty, mostly
            for folder in missing:
                folder.rmdir()


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises ConfigError if it can't be read, or is none."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConfigError(f"{path} is missing; download the folder again")
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} is no whole safetensors file: {' '.join(str(error).split())[:120]}; download it again"
        ) from None


def read_tensor(file: Any, stored: Stored) -> np.ndarray:
    """Read a tensor as float32 from its opened file.

    Raises:
        ConfigError: it is not finite everywhere.
    """
    array: np.ndarray = file.get_tensor(stored.name).astype(np.float32, copy=False)
    # NaN is both the least and the largest, so two reductions find it without a mask as large as the tensor
    if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
        raise ConfigError(f"{stored.file}: {stored.name} is not finite everywhere; the model is broken")
    return array


def check_dtype(stored: Stored) -> None:
    """Check a tensor's dtype. Raises ConfigError unless its numbers are plain floats."""
    if stored.dtype not in _READ:
        raise ConfigError(
            f"{stored.file}: {stored.name} is {stored.dtype}; want {', '.join(sorted(_READ))}: use the model as it was before "
            "it was quantised"
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to write. ``make()`` returns it, so that only one is in memory at a time."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_tensors(folder: Path, tensors: Sequence[Planned], dtype: str, shard_bytes: int) -> list[Path]:
    """Write ``tensors`` in order, one in memory at a time, into files of at most ``shard_bytes`` (or of one tensor), with an
    index if there are several. Returns the files. Raises OSError."""
    size = np.dtype(DTYPES[dtype]).itemsize
    shards: list[list[Planned]] = [[]]
    used = 0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * size
        if shards[-1] and used + nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += nbytes
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, dtype, size)
    if count > 1:
        total = sum(math.prod(tensor.shape) * size for tensor in tensors)
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
    return [folder / name for name in names]


def _write_file(path: Path, tensors: Iterable[Planned], dtype: str, size: int) -> None:
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * size
        header[tensor.name] = {"dtype": _STORED[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    # blanks bring the tensors to a multiple of 8 bytes, which readers that map the file rely on
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            array = _narrowed(tensor.name, tensor.make(), dtype)
            assert array.shape == tensor.shape, (tensor.name, array.shape, tensor.shape)
            file.write(array.reshape(-1).view(np.uint8).data)


def _narrowed(name: str, wide: np.ndarray, dtype: str) -> np.ndarray:
    """Cast to ``dtype``. Raises ConfigError where a number is too large for it: it would be written as infinity."""
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(wide, dtype=DTYPES[dtype])
    if np.isinf(array).any() and not np.isinf(wide).any():
        raise ConfigError(
            f"{name} has values up to {np.abs(wide).max():.3g}, too large for {dtype}; use float32 or bfloat16"
        )
    return array


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented as the hub's files are."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


TOKENIZER = "tokenizer"
"""The folder in a run that keeps the files of :data:`FILES` that the model came with."""
JSON, SETTINGS, TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
FILES = (
    JSON, SETTINGS, TOKENS_MAP, "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", TEMPLATE, GENERATION,
)  # fmt: skip
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that stand for themselves in GPT-2's vocabulary (printable Latin-1); others are moved to 256 and above, in order."""


def copy_files(source: Path, to: Path, names: Iterable[str] = FILES) -> None:
    """Copy those of ``names`` that the folder ``source`` has; ``to`` is made if there is any. Without a
    ``generation_config.json`` one is made of the special ids in ``config.json``, as transformers does. Raises OSError."""
    for name in names:
        if (source / name).is_file():
            to.mkdir(exist_ok=True)
            shutil.copyfile(source / name, to / name)
        elif name == GENERATION and (source / CONFIG).is_file():
            config = read_json(source / CONFIG)
            if ids := {key: config[key] for key in SPECIAL_IDS if config.get(key) is not None}:
                to.mkdir(exist_ok=True)
                write_json(to / GENERATION, {"_from_model_config": True, **ids})


def write_byte_tokenizer(folder: Path, positions: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` whose ids are bytes: byte-pair encoding without merges, over the
    characters by which GPT-2's stands for bytes. Byte 0 is the token that begins and ends a text."""
    # the order of GPT-2's table, so that any reader of byte-level tokenizers decodes these ids as the bytes they are
    characters = [chr(byte) for byte in range(256)]
    for n, byte in enumerate(b for b in range(256) if b not in _PLAIN):
        characters[byte] = chr(256 + n)
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(characters)},
        "merges": [],
    }
    body: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": model,
    }
    body |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    write_json(folder / JSON, body)
    write_tokenizer_config(folder, positions, characters[0])


def write_tokenizer_config(folder: Path, positions: int, end: str | None) -> None:
    """Write ``tokenizer_config.json``. ``positions``: the most tokens that the model takes. ``end``: the token that ends a
    text, and begins one, if there is one."""
    ends = {} if end is None else {"bos_token": end, "eos_token": end}
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / SETTINGS, {**plain, "model_max_length": positions, **ends})


_ROWS = 4096  # of two tensors that are compared


@dataclass(frozen=True, slots=True)
class Hub:
    """An opened folder of the hub: its ``config.json``, the model of ours that reads it (``module:function``), and that model's
    options but for ``seq_len``."""

    folder: Path
    config: Mapping[str, Any]
    target: str
    exchange: HuggingFace
    options: Mapping[str, Any]


def is_hub(folder: Path) -> bool:
    """Return whether the folder looks like one of the hub: it has a ``config.json``."""
    return (folder / CONFIG).is_file()


def open_hub(folder: Path, target: str | None = None) -> Hub:
    """Open the folder by its config alone. ``target``: the model that reads it; by default the one of its ``model_type``.

    Raises:
        ConfigError: there is no such folder, or no model of ours does what it says.
    """
    check_local(folder, "the folder")
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder; give one of the Hugging Face hub, with config.json and model.safetensors"
            f"{hub_advice(folder)}"
        )
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"{folder / CONFIG}: the weights are quantised (quantization_config); use the unquantised model"
        )
    if target is None and (not isinstance(kind, str) or kind not in TARGETS):
        model_types = ", ".join(sorted(TARGETS))
        raise ConfigError(
            f"{folder / CONFIG}: model_type is {kind!r}; known are {model_types}: name a model of yours with --model"
        )
    # ours: a folder ``models`` in the user's working directory must not stand in for the one of this package
    target = target or ours(TARGETS[str(kind)]) or TARGETS[str(kind)]
    exchange = hugging_face_of(target)
    try:
        options = exchange.options(config)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return Hub(folder, config, target, exchange, options)


@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of a model, in the files of a folder. ``leaves``: the tensors that make each leaf. ``remarks``: what
    the files have that is not read, and does no harm."""

    leaves: Mapping[Leaf, list[tuple[Tensor, Stored]]]
    shapes: Mapping[Leaf, tuple[int, ...]]
    layers: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def read(self, layer: str) -> Params:
        """Read one layer's parameters as float32.

        Raises:
            ConfigError: a file can't be read, or holds numbers that are not finite.
        """
        layer_leaves = {leaf: rows for leaf, rows in self.leaves.items() if leaf[0] == layer}
        return nested({leaf[1]: self._leaf(leaf, rows) for leaf, rows in layer_leaves.items()})

    def _leaf(self, leaf: Leaf, rows: list[tuple[Tensor, Stored]]) -> np.ndarray:
        shape = self.shapes[leaf]
        # a leaf of several tensors is filled part by part; zeros remain only where its table says ``padded``
        array = np.zeros(shape, np.float32) if rows[0][0].part is not None else None
        for row, stored in rows:
            with opened(stored.file) as file:
                piece = row.to_ours(read_tensor(file, stored), shape)
            if array is None:
                return np.ascontiguousarray(piece)
            array[row.index()] = piece
        assert array is not None
        return array


def weights_of(hub: Hub, options: Mapping[str, Any], avals: Mapping[str, Any]) -> Weights:
    """Find the tensor of each parameter of a model with these ``options``. ``avals``: the parameters' shapes, by layer.

    Raises:
        ConfigError: a tensor is missing, has no place, or is of another shape or no float.
    """
    shapes = leaf_shapes(avals)
    rows = rows_by_leaf(hub.exchange.tensors(options), shapes)
    tied = hub.exchange.tied(options)
    files, stale = stored_tensors(hub.folder, tied)
    files = {name: tensor for name, tensor in files.items() if not re.search(hub.exchange.ignored, name)}
    stored = {_full(hub.exchange, name): tensor for name, tensor in files.items()}
    names = {row.name for leaf_rows in rows.values() for row in leaf_rows}
    remarks = [f"{hub.folder / INDEX} lists {name}, which no file has; {tied[name]} is in its place" for name in stale]
    # names by headers alone: a folder of another model is refused before gigabytes are read
    if lost := sorted(names - stored.keys()):
        wrapper = _wrapper(lost, files, hub.exchange.prefix)
        raise ConfigError(f"{hub.folder} has no tensor {lost[0]}{_more(lost)}; {wrapper or 'download it again'}")
    for name in sorted(tied.keys() & stored.keys()):
        _check_equal(stored[name], stored[tied[name]])
        remarks.append(f"{hub.folder}: {name} is {tied[name]} again (tie_word_embeddings), and is not read")
    if odd := sorted(stored.keys() - names - tied.keys()):
        raise ConfigError(
            f"{hub.folder} has the tensor {odd[0]}{_more(odd)}, for which {hub.target} has no place; name a model that has"
        )
    for leaf, leaf_rows in rows.items():
        for row in leaf_rows:
            tensor, shape = stored[row.name], row.shape(shapes[leaf])
            check_dtype(tensor)
            if tensor.shape != shape:
                raise ConfigError(
                    f"{tensor.file}: {row.name} is of shape {list(tensor.shape)}, and the model wants {list(shape)}: "
                    "config.json, or an option that was set, is of another model"
                )
    leaves = {leaf: [(row, stored[row.name]) for row in leaf_rows] for leaf, leaf_rows in rows.items()}
    return Weights(leaves, shapes, tuple(avals), tuple(remarks))


def _check_equal(head: Stored, words: Stored) -> None:
    """Compare the tensor of a head with that of the embedding that it is tied to.

    Raises:
        ConfigError: they differ, so that one of them and ``tie_word_embeddings`` are of another model.
    """
    same = head.shape == words.shape
    with opened(head.file) as one, opened(words.file) as other:
        slices = one.get_slice(head.name), other.get_slice(words.name)
        rows = head.shape[0] if same else 0
        for start in range(0, rows, _ROWS):
            stop = min(start + _ROWS, rows)
            same = same and np.array_equal(*(part[start:stop].astype(np.float32) for part in slices))
    if not same:
        raise ConfigError(
            f"{head.file}: {head.name} is not {words.name}, and config.json has tie_word_embeddings true; set it to false if "
            "the head is one of its own, or take the tensor away"
        )


def _wrapper(lost: Collection[str], files: Collection[str], model_prefix: str) -> str:
    """Return advice where ``files`` hold the ``lost`` tensors under names with a wrapper's prefix, or without the model's;
    empty otherwise. ``model_prefix``: a prefix that files may leave out."""
    bare = {name.removeprefix(model_prefix) for name in lost}
    for name in files:
        ends = [name[dot.end() :] for dot in re.finditer(r"\.", name)]
        if end := next((end for end in ends if end in bare), ""):
            prefix = name.removesuffix(end).removesuffix(model_prefix)
            return f"it has {name}: save the model that is inside of the wrapper {prefix!r}"
        if full_name := next((full for full in lost if full.endswith(f".{name}")), ""):
            return f"it has {name}, without {full_name.removesuffix(name)!r}: save the model together with its head"
    return ""


def _full(exchange: HuggingFace, name: str) -> str:
    """Return a tensor's name with the prefix that files may leave out."""
    prefixed = not exchange.prefix or name.startswith((exchange.prefix, "lm_head."))
    return name if prefixed else exchange.prefix + name


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
