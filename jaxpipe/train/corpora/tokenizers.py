"""Tokenisers: text to token ids and back.

:class:`ByteTokenizer` (one id a byte), :class:`HFTokenizer` (a ``tokenizer.json`` read by Hugging Face's ``tokenizers``
package, imported only when asked for) and :class:`IdTokenizer` (a vocabulary size for arrays that come as ids, no text).
Text travels as ``str`` in which bytes that are not UTF-8 are lone surrogates (PEP 383, ``surrogateescape``), so that any
file survives a round trip through bytes. Special tokens are not added: the text is the text. What ends a document is ``eos``.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.files import read_file
from jaxpipe.train.corpora.documents import package

Ids = npt.NDArray[Any]  # 1-D, integer
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>")
"""Tokens that end a document, as models of the hub have them: a ``tokenizer.json`` does not say which one does."""


class Tokenizer(ABC):
    """``vocab_size``: ids are in ``range(vocab_size)``. ``fingerprint``: equal for tokenisers that give equal ids. ``eos``: the
    id that ends a document, if one does. ``content``: the text of its ``tokenizer.json``; None where ``name`` says all."""

    name: str
    vocab_size: int
    fingerprint: str
    eos: int | None = None
    content: str | None = None

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Ids of ``text``, 1-D, of the smallest unsigned dtype that holds the vocabulary."""

    def encode_all(self, texts: Sequence[str]) -> Sequence[Ids]:
        """:meth:`encode` of each."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def encode_with_places(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Ids of ``text``, and the character that each begins at."""

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, if there is one."""
        return None

    def has_token(self) -> npt.NDArray[np.bool_]:
        """Whether each id below ``vocab_size`` stands for a token: vocabularies of the hub have gaps."""
        return np.ones(self.vocab_size, np.bool_)

    @abstractmethod
    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text of ``ids``; ids that are not in the vocabulary raise DataError."""

    @abstractmethod
    def num_bytes(self, ids: Sequence[int] | Ids) -> int | None:
        """Bytes of text that ``ids`` stand for (bits per byte needs it), or None where ids have no text."""


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned dtype that holds ids below ``vocab_size``."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


class ByteTokenizer(Tokenizer):
    """One id a byte: UTF-8, with ``surrogateescape`` for bytes that are not. ``decode(encode(t)) == t`` for text read so.
    Byte 0 ends a document."""

    name = "byte"
    vocab_size = 256
    fingerprint = "byte"
    eos = 0

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)

    def encode_with_places(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        sizes = [len(character.encode("utf-8", "surrogateescape")) for character in text]
        return self.encode(text), np.repeat(np.arange(len(text)), sizes)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return _checked(ids, self).astype(np.uint8).tobytes().decode("utf-8", "surrogateescape")

    def num_bytes(self, ids: Sequence[int] | Ids) -> int:
        return len(ids)


class IdTokenizer(Tokenizer):
    """A vocabulary of ``vocab_size`` ids without text, for arrays tokenised elsewhere. Decodes to the ids in digits."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.name = self.fingerprint = f"ids:{vocab_size}"

    def encode(self, text: str) -> Ids:
        raise DataError(
            f"tokenizer {self.name} has no text to encode: give data.tokenizer the tokenizer.json of these ids"
        )

    def encode_with_places(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        return self.encode(text), np.zeros(0, np.int64)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return " ".join(map(str, _checked(ids, self).tolist()))

    def num_bytes(self, ids: Sequence[int] | Ids) -> None:
        return None


class HFTokenizer(Tokenizer):
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``: the file at ``path``, or the ``content`` that it had.

    Raises:
        DataError: the package is not installed, or the file is missing or not a tokeniser.
    """

    def __init__(self, path: str | Path, content: str | None = None) -> None:
        path = Path(path)
        backend = package("tokenizers", path).Tokenizer
        try:
            self.content = read_file(path).decode("utf-8") if content is None else content
        except OSError as error:
            raise DataError(f"tokenizer {path}: can't be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise DataError(f"tokenizer {path}: not a Hugging Face tokenizer.json (not UTF-8)") from None
        try:
            self._backend = backend.from_str(self.content)
        except Exception as error:  # the package raises plain Exception
            reason = " ".join(str(error).split())[:160]
            raise DataError(f"tokenizer {path}: not a Hugging Face tokenizer.json ({reason})") from None
        self.name = str(path)
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        if self.vocab_size == 0:
            raise DataError(f"tokenizer {path}: its vocabulary is empty")
        self.fingerprint = "hf:" + hashlib.sha256(self.content.encode()).hexdigest()[:16]
        self.eos = next((found for name in _ENDS if (found := self.id_of(name)) is not None), None)

    def encode(self, text: str) -> Ids:
        return self._ids(self._encoded(text))

    def encode_all(self, texts: Sequence[str]) -> Sequence[Ids]:
        try:
            made = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            return [self.encode(text) for text in texts]
        return [self._ids(encoding) for encoding in made]

    def encode_with_places(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        encoding = self._encoded(text)
        return self._ids(encoding), np.array([start for start, _ in encoding.offsets], np.int64)

    def id_of(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def has_token(self) -> npt.NDArray[np.bool_]:
        ids = list(self._backend.get_vocab(with_added_tokens=True).values())
        return np.isin(np.arange(self.vocab_size), ids)

    def _encoded(self, text: str) -> Any:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates: bytes that were not UTF-8
            raise DataError(
                f"tokenizer {self.name}: the text is not valid UTF-8 ({_surrogate_place(text, error)})"
            ) from None

    def _ids(self, encoding: Any) -> Ids:
        return np.asarray(encoding.ids, dtype=id_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        text: str = self._backend.decode(_checked(ids, self).tolist(), skip_special_tokens=False)
        return text

    def num_bytes(self, ids: Sequence[int] | Ids) -> int:
        return len(self.decode(ids).encode("utf-8"))


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokeniser that ``spec`` names: ``byte``, ``ids:N``, or the path of a ``tokenizer.json``.

    Raises:
        DataError: no such tokeniser, or its file is bad.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec.startswith("ids:"):
        if not re.fullmatch(r"ids:[1-9]\d{0,8}", spec):
            raise DataError(f"tokenizer {spec!r}: write ids:N with the vocabulary size N, such as ids:50257")
        return IdTokenizer(int(spec[4:]))
    if not spec.endswith(".json") and not Path(spec).is_file():
        raise DataError(f"tokenizer {spec!r}: use byte, ids:N, or the path of a tokenizer.json")
    return HFTokenizer(spec)


def stored_tokenizer(tokenizer: Tokenizer) -> dict[str, str]:
    """What a checkpoint keeps of it: JSON that :func:`kept_tokenizer` makes the same tokeniser of."""
    named = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
    return named if tokenizer.content is None else {**named, "json": tokenizer.content}


def kept_tokenizer(stored: object, spec: str) -> Tokenizer:
    """The tokeniser that a checkpoint keeps; of an older one, the one that ``spec`` names, as :func:`load_tokenizer`."""
    content = stored.get("json") if isinstance(stored, dict) else None
    return HFTokenizer(spec, content) if isinstance(content, str) else load_tokenizer(spec)


def check_ids(ids: Ids, tokenizer: Tokenizer, first: int = 0) -> None:
    """Raise DataError if one of the ids, which stand from position ``first`` on, is not in the vocabulary."""
    bad = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
    if bad.size:
        place = f"id {ids[bad[0]]} at position {first + bad[0]}"
        raise DataError(
            f"{place} is not in the vocabulary of tokenizer {tokenizer.name} (0 to {tokenizer.vocab_size - 1})"
        )


def _checked(ids: Sequence[int] | Ids, tokenizer: Tokenizer) -> Ids:
    """``ids`` as an array, all in the vocabulary."""
    array = np.asarray(ids, dtype=np.int64)
    check_ids(array, tokenizer)
    return array


def _surrogate_place(text: str, error: Exception) -> str:
    at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    return str(error) if at is None else f"byte 0x{ord(text[at]) & 0xFF:02x} at character {at}"
