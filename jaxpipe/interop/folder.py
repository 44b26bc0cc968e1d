"""Read and write the files of a hub folder: ``config.json`` strictly, safetensors one tensor at a time, tokenizers as they are.

Nothing in a folder is believed before it is checked, and nothing in it is run. Reading is the package ``safetensors``'s.
Writing is not: its functions want all tensors of a file in memory at once (twice), while a file is a length, a header in JSON,
and the tensors one after another.
"""

from __future__ import annotations

import json
import math
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
from jaxpipe.files import check_local, no_constant, read_file, unique_keys

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
