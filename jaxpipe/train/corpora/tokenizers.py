"""Tokenise text: ids and back.

:class:`ByteTokenizer` (one id a byte), :class:`HFTokenizer` (a ``tokenizer.json`` read by Hugging Face's ``tokenizers``
package, imported only when asked for) and :class:`IdTokenizer` (a vocabulary size for arrays that come as ids, no text). Text
travels as ``str`` in which bytes that are not UTF-8 are lone surrogates (PEP 383, ``surrogateescape``), so that any file
survives a round trip through bytes. Special tokens are not added: the text is the text. What ends a document is ``eos``, and
what begins one ``bos``.

The token that ends documents (``data.eos=auto``) is named by the files beside a ``tokenizer.json``: ``eos_token`` of
``tokenizer_config.json`` or ``special_tokens_map.json``, then ``eos_token_id`` of ``generation_config.json`` or ``config.json``
(of a list, whose ids all end an answer, the first), then by the names in :data:`_ENDS`. The one that begins them
(``data.bos=auto``) is ``bos_token`` where ``add_bos_token`` is true, none where it is false; without that setting, what the
post-processor puts there.
"""

from __future__ import annotations

import copy
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.files import check_local, hub_advice, read_file
from jaxpipe.interop.folder import CONFIG, read_json
from jaxpipe.interop.tokenizer import GENERATION, SETTINGS, TOKENS_MAP
from jaxpipe.interop.tokenizer import JSON as JSON
from jaxpipe.text import truncate
from jaxpipe.train.corpora.documents import package
from jaxpipe.train.corpora.tokenizer_json import TokenizerJson, check_survives

Ids = npt.NDArray[Any]  # 1-D, integer
_OLD_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>")
_ENDS = (*_OLD_ENDS, "<｜end▁of▁sentence｜>")
"""Tokens that end a document, as models of the hub have them, for a ``tokenizer.json`` that stands alone. Versions that
recorded no end in their checkpoints knew the old ones only."""
# Above 2^20 ids so many to a token are a mistake in the file, for which arrays of that length would be made.
_SPARSE = 16


class Tokenizer(ABC):
    """Turns text into ids and back.

    ``vocab_size``: ids are in ``range(vocab_size)``. ``fingerprint``: its name in runs. ``identity``: equal for tokenisers that
    give equal ids; its name in stores. ``bos``, ``eos``: the ids that begin and end a document, if some do; ``eos_from``: the
    file that names the latter. ``content``: the text of its ``tokenizer.json``; None where ``name`` says all. ``remarks``: what
    a user may not expect of it, in lines; ``ignored``: settings in its file that are. ``lengths``: about how many bytes of text
    each id stands for; None where ids have no text. ``keeps_bytes``: they are exact.
    """

    name: str
    vocab_size: int
    fingerprint: str
    identity: str
    bos: int | None = None
    eos: int | None = None
    eos_from: str = ""
    content: str | None = None
    remarks: tuple[str, ...] = ()
    ignored: str = ""
    lengths: npt.NDArray[np.int64] | None = None
    keeps_bytes: bool = False

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Return the ids of ``text``, 1-D, of the smallest unsigned dtype that holds the vocabulary."""

    def encode_all(self, texts: Sequence[str]) -> Sequence[Ids]:
        """Return what :meth:`encode` makes of each text."""
        return [self.encode(text) for text in texts]

    def name_of(self, number: int) -> str:
        """Name an id for people."""
        return str(number)

    @abstractmethod
    def encode_with_places(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Return the ids of ``text``, and the character that each begins at."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name, if there is one."""
        return None

    def has_token(self) -> npt.NDArray[np.bool_]:
        """Whether each id below ``vocab_size`` stands for a token: vocabularies of the hub have gaps."""
        return np.ones(self.vocab_size, np.bool_)

    @abstractmethod
    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of ``ids``; ids that are not in the vocabulary raise DataError."""

    def num_bytes(self, ids: Sequence[int] | Ids) -> int | None:
        """Return the bytes of text that ``ids`` stand for (bits per byte needs it), or None where ids do not tell."""
        return None if self.lengths is None or not self.keeps_bytes else int(self.lengths[np.asarray(ids)].sum())

    def with_ends(self, bos: int | None, eos: int | None) -> Self:
        """Return this tokenizer with these ids at the beginning and the end of documents."""
        same = copy.copy(self)
        same.bos, same.eos = bos, eos
        return same

    def check_store(self, folder: Path, store_identity: str) -> None:
        """Raise DataError unless this tokenizer makes the ids of the store at ``folder``, made by one of ``store_identity``."""
        if store_identity != self.identity:
            store_json = folder / JSON
            advice = f"set data.tokenizer={store_json if store_json.is_file() else store_identity}"
            raise DataError(
                f"data {folder}: tokenised by {store_identity}, and data.tokenizer is {self.name}: {advice}"
            )

    def loss_of(self, text: str) -> str:
        """Describe how a text comes back changed from its tokens; empty if it comes back as it was."""
        return ""


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds ids below ``vocab_size``."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


class ByteTokenizer(Tokenizer):
    """One id a byte: UTF-8, with ``surrogateescape`` for bytes that are not. ``decode(encode(t)) == t`` for text read so.
    Byte 0 ends a document."""

    name = "byte"
    vocab_size = 256
    fingerprint = identity = "byte"
    eos = 0
    lengths = np.ones(256, np.int64)
    keeps_bytes = True

    def name_of(self, number: int) -> str:
        return f"byte {number}"

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)

    def encode_with_places(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        sizes = [len(character.encode("utf-8", "surrogateescape")) for character in text]
        return self.encode(text), np.repeat(np.arange(len(text)), sizes)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return _checked(ids, self).astype(np.uint8).tobytes().decode("utf-8", "surrogateescape")


class IdTokenizer(Tokenizer):
    """A vocabulary of ``vocab_size`` ids without text, for arrays tokenised elsewhere. Decodes to the ids in digits."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.name = self.fingerprint = self.identity = f"ids:{vocab_size}"

    def encode(self, text: str) -> Ids:
        raise DataError(
            f"tokenizer {self.name} has no text to encode: give data.tokenizer the tokenizer.json of these ids"
        )

    def encode_with_places(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        return self.encode(text), np.zeros(0, np.int64)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return " ".join(map(str, _checked(ids, self).tolist()))


class HFTokenizer(Tokenizer):
    """A ``tokenizer.json`` of Hugging Face's ``tokenizers``: the file at ``path``, or the ``content`` that it had. Truncation,
    padding and dropout are off.

    Raises:
        DataError: the package is not installed, or the file is missing, not a tokeniser, or one that kills the process.
        ConfigError: a file beside it is no JSON.
    """

    def __init__(self, path: str | Path, content: str | None = None) -> None:
        path = Path(path)
        package("tokenizers", path)
        try:
            self.content = read_file(path).decode("utf-8") if content is None else content
        except OSError as error:
            raise DataError(f"tokenizer {path}: can't be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise DataError(f"tokenizer {path}: not a Hugging Face tokenizer.json (not UTF-8)") from None
        self.name = str(path)
        file = self._load()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size == 0:
            raise DataError(f"tokenizer {path}: its vocabulary is empty")
        if self.vocab_size > max(1 << 20, _SPARSE * len(vocabulary)):
            raise DataError(
                f"tokenizer {path}: {len(vocabulary)} tokens with ids up to {self.vocab_size - 1}; give them ids without gaps"
            )
        self.identity = _digest(file.used)
        self.fingerprint = self.identity
        alphabet = package("tokenizers.pre_tokenizers", path).ByteLevel.alphabet()
        self.keeps_bytes = file.keeps_bytes(alphabet)
        self.lengths = self._lengths(vocabulary, file.is_byte_level)
        self.eos, self.eos_from = self._end_token(path.parent)
        self.bos, several = self._begin_token(path.parent, file.prefix)
        self.ignored = " and ".join(filter(None, [", ".join(file.ignored[:-1]), *file.ignored[-1:]]))
        lines = {
            f"tokenizer {path}: {self.ignored} {'is' if len(file.ignored) == 1 else 'are'} ignored": bool(file.ignored),
            f"tokenizer {path}: begins a text with {len(file.prefix)} tokens, and none is added: data.bos names one": several,
        }
        self.remarks = tuple(line for line, applies in lines.items() if applies)

    def _load(self) -> TokenizerJson:
        """Make the backend from the content."""
        assert self.content is not None
        with self._refusing("not a Hugging Face tokenizer.json"):
            file = TokenizerJson.of(self.content)
            # A panic can be caught here, a kill of the process can't: such files go through a child first.
            if file.may_kill:
                check_survives(file.used)
            self._backend = package("tokenizers", Path(self.name)).Tokenizer.from_str(file.used)
        return file

    # The backend is Rust and may not survive a pickle; worker processes load it anew from the content.
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_backend"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Raise DataError for whatever the package raises: Exception itself, and PanicException, which is none."""
        try:
            yield
        # A Rust panic arrives as a BaseException of its own, so everything but these three is taken for one.
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            reason = truncate(" ".join(str(error).split()), 160)
            raise DataError(f"tokenizer {self.name}: {what} ({reason}); use another, or mend the file") from None

    def encode(self, text: str) -> Ids:
        return self._ids(self._encoded(text))

    def encode_all(self, texts: Sequence[str]) -> Sequence[Ids]:
        try:
            with self._refusing("can't encode"):
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except DataError:
            # One text may be at fault: encoding them one by one names it.
            return [self.encode(text) for text in texts]
        return [self._ids(encoding) for encoding in encodings]

    def encode_with_places(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        encoding = self._encoded(text)
        return self._ids(encoding), np.array([start for start, _ in encoding.offsets], np.int64)

    def id_of(self, token: str) -> int | None:
        try:
            number: int | None = self._backend.token_to_id(token)
        except (UnicodeEncodeError, TypeError):  # half a surrogate pair
            return None
        return number

    def name_of(self, number: int) -> str:
        token: str | None = self._backend.id_to_token(number)
        return str(number) if token is None else repr(token)

    def has_token(self) -> npt.NDArray[np.bool_]:
        ids = list(self._backend.get_vocab(with_added_tokens=True).values())
        return np.isin(np.arange(self.vocab_size), ids)

    def _encoded(self, text: str) -> Any:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # lone surrogates: bytes that were not UTF-8
            raise DataError(
                f"tokenizer {self.name}: the text is not valid UTF-8 ({_surrogate_place(text, error)})"
            ) from None
        with self._refusing(f"can't encode {truncate(text, 40)!r}"):
            return self._backend.encode(text, add_special_tokens=False)

    def _ids(self, encoding: Any) -> Ids:
        return np.asarray(encoding.ids, dtype=id_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        numbers = _checked(ids, self).tolist()
        with self._refusing("can't decode"):
            text: str = self._backend.decode(numbers, skip_special_tokens=False)
        return text

    def loss_of(self, text: str) -> str:
        if self.keeps_bytes:
            return ""
        try:
            encoding = self._encoded(text)
        except DataError:  # half a word, where the whole one can be encoded
            return ""
        try:
            back = self.decode(encoding.ids)
        except DataError as error:
            return str(error)
        at = next((k for k, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
        if at == len(text) == len(back):
            return ""
        # Characters that no token covers are dropped ones; blanks between words lie in no token either and are no loss.
        covered = np.zeros(len(text), bool)
        for start, stop in encoding.offsets:
            covered[start:stop] = True
        dropped = [text[k] for k in np.flatnonzero(~covered) if not text[k].isspace()]
        near = slice(max(at - 8, 0), at + 16)
        change = f"{text[near]!r} comes back as {back[near]!r}"
        return (
            f"{change}, and {len(dropped)} of {len(text)} characters are dropped, such as {dropped[0]!r}"
            if dropped
            else change
        )

    def _lengths(self, vocabulary: Mapping[str, int], is_byte_level: bool) -> npt.NDArray[np.int64]:
        lengths = np.zeros(self.vocab_size, np.int64)
        added = set(self._backend.get_added_tokens_decoder())
        for token, number in vocabulary.items():
            if is_byte_level and number not in added:
                lengths[number] = len(token)
            elif token.startswith("<0x") and len(token) == 6:
                lengths[number] = 1
            else:
                lengths[number] = len(token.replace("▁", " ").removeprefix("##").encode())
        return lengths

    def _end_token(self, folder: Path) -> tuple[int | None, str]:
        """Return the token that ends documents, and where it is named."""
        for name in (SETTINGS, TOKENS_MAP):
            if (number := self._special(folder / name, "eos_token")) is not None:
                return number, name
        for name in (GENERATION, CONFIG):
            setting = _settings(folder / name).get("eos_token_id")
            for number in setting if isinstance(setting, list) else [setting]:
                if (
                    type(number) is int
                    and 0 <= number < self.vocab_size
                    and self._backend.id_to_token(number) is not None
                ):
                    return number, name
        return self._end_by_name(_ENDS), "by its name"

    def _end_by_name(self, names: Sequence[str]) -> int | None:
        return next((number for name in names if (number := self.id_of(name)) is not None), None)

    def _begin_token(self, folder: Path, prefix: Sequence[int]) -> tuple[int | None, bool]:
        """Return the token that begins documents, and whether several would."""
        setting = _settings(folder / SETTINGS).get("add_bos_token")
        if isinstance(setting, bool):
            return (self._special(folder / SETTINGS, "bos_token") if setting else None), False
        return (prefix[0] if len(prefix) == 1 and 0 <= prefix[0] < self.vocab_size else None), len(prefix) > 1

    def _special(self, path: Path, key: str) -> int | None:
        token = _settings(path).get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return self.id_of(token) if isinstance(token, str) else None

    def check_store(self, folder: Path, store_identity: str) -> None:
        if self.ignored and self.content is not None and store_identity == _digest(self.content):
            raise DataError(
                f"data {folder}: built by an older version, which obeyed the {self.ignored} of its tokenizer.json, so that its "
                "ids are not those of the text; delete it and run 'jaxpipe data build' again"
            )
        super().check_store(folder, store_identity)

    def recorded(self, stored: Mapping[str, Any]) -> Self:
        """Return this tokenizer with the ends that a checkpoint recorded: a run goes on as it began. Checkpoints from before
        they were recorded knew the old names alone, no beginnings, and a tokenizer by its whole file."""
        same = copy.copy(self)
        assert self.content is not None
        if stored.get("fingerprint") == _digest(self.content):
            same.fingerprint = _digest(self.content)
        if "eos" not in stored:
            same.bos, same.eos, same.eos_from = None, self._end_by_name(_OLD_ENDS), "as the run began"
        elif (ends := [stored.get(key) for key in ("bos", "eos")]) != [self.bos, self.eos]:
            valid = [end if type(end) is int and 0 <= end < self.vocab_size else None for end in ends]
            same.bos, same.eos, same.eos_from = *valid, "as the run began"
        return same


def _settings(path: Path) -> dict[str, Any]:
    """Read a file beside a tokenizer; empty where there is none."""
    return read_json(path) if path.is_file() else {}


def _digest(content: str) -> str:
    return "hf:" + hashlib.sha256(content.encode()).hexdigest()[:16]


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokeniser that ``spec`` names: ``byte``, ``ids:N``, or the path of a ``tokenizer.json``.

    Raises:
        DataError: no such tokeniser, or its file is bad.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec.startswith("ids:"):
        if not re.fullmatch(r"ids:[1-9]\d{0,8}", spec):
            raise DataError(f"tokenizer {spec!r}: write ids:N with the vocabulary size N, such as ids:50257")
        return IdTokenizer(int(spec[4:]))
    check_local(spec, "tokenizer")
    if not spec.endswith(".json") and not Path(spec).is_file():
        raise DataError(f"tokenizer {spec!r}: use byte, ids:N, or the path of a tokenizer.json{hub_advice(spec)}")
    return HFTokenizer(spec)


def stored_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a checkpoint keeps of it: JSON of which :func:`checkpoint_tokenizer` makes the same tokeniser."""
    named = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
    if tokenizer.content is None:
        return named
    return {**named, "bos": tokenizer.bos, "eos": tokenizer.eos, "json": tokenizer.content}


def checkpoint_tokenizer(stored: object, spec: str) -> Tokenizer:
    """Return the tokeniser that a checkpoint keeps; of an older one, the one that ``spec`` names, as :func:`load_tokenizer`
    does."""
    content = stored.get("json") if isinstance(stored, dict) else None
    tokenizer = HFTokenizer(spec, content) if isinstance(content, str) else load_tokenizer(spec)
    return (
        tokenizer.recorded(stored if isinstance(stored, dict) else {})
        if isinstance(tokenizer, HFTokenizer)
        else tokenizer
    )


def continued_tokenizer(stored: object, spec: str) -> Tokenizer:
    """Return the tokenizer that ``spec`` names, for a run that goes on: with the ends that its checkpoint recorded, if it is
    the same tokenizer."""
    tokenizer = load_tokenizer(spec)
    if isinstance(tokenizer, HFTokenizer) and isinstance(stored, dict):
        same = tokenizer.recorded(stored)
        return same if stored.get("fingerprint") in (tokenizer.identity, same.fingerprint) else tokenizer
    return tokenizer


def check_ids(ids: Ids, tokenizer: Tokenizer, first: int = 0) -> None:
    """Raise DataError if one of the ids, which stand from position ``first`` on, is not in the vocabulary."""
    bad = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
    if bad.size:
        place = f"id {ids[bad[0]]} at position {first + bad[0]}"
        raise DataError(
            f"{place} is not in the vocabulary of tokenizer {tokenizer.name} (0 to {tokenizer.vocab_size - 1})"
        )


def _checked(ids: Sequence[int] | Ids, tokenizer: Tokenizer) -> Ids:
    """Return ``ids`` as an array, all in the vocabulary."""
    array = np.asarray(ids, dtype=np.int64)
    check_ids(array, tokenizer)
    return array


def _surrogate_place(text: str, error: Exception) -> str:
    at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    return str(error) if at is None else f"byte 0x{ord(text[at]) & 0xFF:02x} at character {at}"
