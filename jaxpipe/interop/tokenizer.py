"""Tokenizers of the hub: which files make one, and the byte vocabulary as such files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxpipe.interop.folder import CONFIG, read_json, write_json

TOKENIZER = "tokenizer"
"""The folder in a run that keeps the files of :data:`FILES` that the model came with."""
JSON, SETTINGS, TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
FILES = (
    JSON, SETTINGS, TOKENS_MAP, "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", TEMPLATE, GENERATION,
)  # fmt: skip
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]


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
