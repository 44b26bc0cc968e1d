"""Where data comes from: documents, tokenizers, token stores, mixtures, arrays, and the order of the sequences."""

from __future__ import annotations

from typing import Any

from jaxpipe.train import looked_up

_HOMES = {
    "arrays": "ArrayDataset",
    "corpus": "Corpus load_corpus",
    "encoding": "Reading",
    "mixture": "MixedDataset",
    "ngram": "baselines bits_per_byte",
    "own_data": "OwnDataset",
    "store": "Store",
    "store_build": "build_store",
    "tokenizers": "Tokenizer load_tokenizer",
}
__all__ = sorted(" ".join(_HOMES.values()).split())


def __getattr__(name: str) -> Any:
    return looked_up(__name__, _HOMES, name)
