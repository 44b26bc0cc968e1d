"""Small files of the package ``tokenizers``, a kind each: what makes ids, and what somebody's use of them left there."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
models, trainers, decoders = tokenizers.models, tokenizers.trainers, tokenizers.decoders
pre_tokenizers, normalizers = tokenizers.pre_tokenizers, tokenizers.normalizers

Body = dict[str, Any]
TRUNCATION = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 3, "pad_type_id": 0,
    "pad_token": "<pad>",
}  # fmt: skip
_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
_TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then 3 more.",
    "Grüße aus Köln! naïve café",
    "日本語 🙂",
] * 3


def _trained(backend: Any, trainer: Any) -> Body:
    backend.train_from_iterator(_TEXTS, trainer)
    body: Body = json.loads(backend.to_str())
    return body


def _byte_level(**settings: Any) -> Body:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=_SPECIAL, show_progress=False
    )
    return _trained(backend, trainer) | settings


def _sentence_piece() -> Body:
    """Return byte-pair encoding with bytes for what is unknown, as Llama 2's."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    return _trained(
        backend, trainers.BpeTrainer(vocab_size=330, limit_alphabet=30, special_tokens=special, show_progress=False)
    )


def _lossy() -> Body:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(
        backend, trainers.BpeTrainer(vocab_size=80, limit_alphabet=30, special_tokens=_SPECIAL, show_progress=False)
    )


def _word_piece() -> Body:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    backend.decoder = decoders.WordPiece()
    return _trained(backend, trainers.WordPieceTrainer(vocab_size=120, special_tokens=_SPECIAL, show_progress=False))


def _word_level() -> Body:
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(backend, trainers.WordLevelTrainer(special_tokens=_SPECIAL, show_progress=False))


def _unigram() -> Body:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _trained(
        backend,
        trainers.UnigramTrainer(vocab_size=100, unk_token="<unk>", special_tokens=_SPECIAL, show_progress=False),
    )


def template(body: Mapping[str, Any], token: str = "<s>") -> Body:
    """Return ``body`` whose post-processor begins a text with ``token``."""
    number = next(each["id"] for each in body["added_tokens"] if each["content"] == token)
    steps = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {
        **body,
        "post_processor": {"type": "TemplateProcessing", "single": steps, "pair": [], "special_tokens": special},
    }


def with_dropout(body: Mapping[str, Any], share: float = 0.4) -> Body:
    """Return ``body``, a byte-pair encoding, that leaves out merges by chance."""
    return {**body, "model": {**body["model"], "dropout": share}}


@cache
def kinds() -> Mapping[str, Body]:
    """Return twelve files by name."""
    plain, pieces, unigram = _byte_level(), _sentence_piece(), _unigram()
    return {
        "byte-level": plain,
        "byte fallback": pieces,
        "lossy": _lossy(),
        "WordPiece": _word_piece(),
        "WordLevel": _word_level(),
        "Unigram": unigram,
        "truncation": {**plain, "truncation": TRUNCATION},
        "padding": {**pieces, "padding": PADDING},
        "dropout": with_dropout(plain),
        "post-processor": template(pieces),
        "normalizer": {**plain, "normalizer": {"type": "NFC"}},
        "all": template({**with_dropout(pieces), "truncation": TRUNCATION, "padding": PADDING}),
    }


def switched_off(body: Mapping[str, Any]) -> Any:
    """Return the package's own tokenizer of ``body``, by its own switches."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(body))
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    if isinstance(backend.model, models.BPE):
        backend.model.dropout = None
    return backend


def without(body: Mapping[str, Any]) -> Body:
    """Return ``body`` without truncation, padding and dropout."""
    plain = copy.deepcopy(dict(body)) | {"truncation": None, "padding": None}
    if "dropout" in plain["model"]:
        plain["model"]["dropout"] = None
    return plain
