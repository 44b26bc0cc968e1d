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

A ``tokenizer.json`` is read for what turns text into ids, and nothing of how somebody once called it (:class:`TokenizerJson`).
Whoever saved the file may have left ``truncation``, ``padding`` or a BPE model's ``dropout`` in it. They are settings of a call
and not of the vocabulary, so they are switched off, by writing ``null`` in their place and leaving every other character: two
files that differ in nothing else then have the same text, and a file without the three keeps its own.

The package ``tokenizers`` is Rust. It panics on some files, and ends or stalls the process on a few: what may do that is first
tried in a child process (:func:`check_survives`).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.files import check_local, hub_advice, read_file
from jaxpipe.interop.folder import CONFIG, GENERATION, JSON, SETTINGS, TOKENS_MAP, read_json
from jaxpipe.text import truncate
from jaxpipe.train.corpora.documents import after_blanks, package

_PROBE_S = 30.0
_LONGEST_WORD = 5000  # characters of a WordPiece word: one of 10,000 takes 20 s, and one of 20,000 four times that
_MOST_GROWTH = 64  # times that replacements in a normalizer may make a text longer before it is tried in a child
_PROBE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_str(sys.stdin.buffer.read().decode())
for text in ("", "a", "Hello world, na\\u00efve caf\\u00e9 \\u65e5\\u672c\\u8a9e \\U0001f642 e\\u0301\\n\\t 0123456789 ~" * 20):
    try:
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
    except BaseException:
        pass
"""


@dataclass(frozen=True, slots=True)
class TokenizerJson:
    """The parts of a ``tokenizer.json``. ``used``: the text that the package reads. ``ignored``: what was switched off, for
    people. ``body``: the whole file."""

    used: str
    ignored: tuple[str, ...]
    body: Mapping[str, Any]

    @classmethod
    def of(cls, content: str) -> Self:
        """Read the text of a file. Raises ValueError or RecursionError unless ``content`` is a JSON object, of a model that
        long words do not stall."""
        body = json.loads(content)
        if not isinstance(body, dict):
            raise ValueError("not a JSON object")
        model = body.get("model")
        model = model if isinstance(model, dict) else {}
        word = model.get("max_input_chars_per_word")
        if isinstance(word, int) and word > _LONGEST_WORD:
            raise ValueError(f"max_input_chars_per_word={word} may stall on a long word; 100 is usual")
        keys = [key for key in ("truncation", "padding") if body.get(key)]
        dropout = model.get("dropout")
        ignored, places = [], []
        for key, start, stop in _values(content, after_blanks(content, 0)) if keys or dropout else ():
            if key in keys:
                places.append((start, stop))
            elif dropout and key == "model":
                places += [(a, b) for inner, a, b in _values(content, start) if inner == "dropout"]
        if "truncation" in keys:
            limit = body["truncation"].get("max_length") if isinstance(body["truncation"], dict) else "?"
            ignored.append(f"truncation ({limit})")
        if "padding" in keys:
            ignored.append("padding")
        if dropout:
            ignored.append(f"dropout ({dropout})")
        used = content
        # Backwards, so that the places still to be written keep theirs.
        for start, stop in reversed(places):
            used = f"{used[:start]}null{used[stop:]}"
        return cls(used, tuple(ignored), body)

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids of the special tokens that the post-processor puts before a text."""
        ids: list[int] = []
        try:
            for step in _parts(self.body.get("post_processor"), "processors"):
                if step.get("type") in ("BertProcessing", "RobertaProcessing"):
                    ids.append(step["cls"][1])
                elif step.get("type") == "TemplateProcessing":
                    for piece in itertools.takewhile(lambda x: "SpecialToken" in x, step["single"]):
                        ids += step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        except (KeyError, TypeError, IndexError):
            # A template names tokens that the file does not explain; the package reads it all the same.
            return ()
        return tuple(ids)

    @property
    def is_byte_level(self) -> bool:
        """Whether characters of tokens are bytes of the text."""
        return any(x.get("type") == "ByteLevel" for x in _parts(self.body.get("pre_tokenizer"), "pretokenizers"))

    def keeps_bytes(self, alphabet: Collection[str]) -> bool:
        """Whether the tokens hold each byte of a text as one character of ``alphabet``: byte-level byte-pair encoding that
        changes and drops nothing."""
        model, steps = self.body.get("model") or {}, _parts(self.body.get("pre_tokenizer"), "pretokenizers")
        if self.body.get("normalizer") is not None or not steps or not isinstance(model.get("vocab"), dict):
            return False
        *splits, last = steps
        keep = all(x.get("type") in ("Split", "Digits") and x.get("behavior") != "Removed" for x in splits)
        by_byte = last.get("type") == "ByteLevel" and not last.get("add_prefix_space", True)
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        # An added token that strips takes the blanks around it into itself, and they do not come back.
        strip = any(token.get("lstrip") or token.get("rstrip") for token in self.body.get("added_tokens") or ())
        return keep and by_byte and not affixes and not strip and set(alphabet) <= model["vocab"].keys()

    @property
    def may_kill(self) -> bool:
        """Whether it has parts of which some are known to end or stall the process: a table of characters in the form of
        SentencePiece, merges under a prefix, replacements that multiply a text."""
        steps, model = _parts(self.body.get("normalizer"), "normalizers"), self.body.get("model")
        if isinstance(model, dict) and model.get("continuing_subword_prefix") and model.get("merges"):
            return True
        grows = [len(x["content"]) for x in steps if x.get("type") == "Replace" and isinstance(x.get("content"), str)]
        return any(x.get("type") == "Precompiled" for x in steps) or math.prod(max(n, 1) for n in grows) > _MOST_GROWTH


def _parts(step: Any, name: str) -> list[dict[str, Any]]:
    """Return a step of the pipeline, or the steps of a sequence of them, which it lists under ``name``."""
    if not isinstance(step, dict):
        return []
    if step.get("type") != "Sequence":
        return [step]
    inner = step.get(name)
    return [part for each in inner for part in _parts(each, name)] if isinstance(inner, list) else []


def _values(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Yield key, start and stop of each value of the JSON object at ``at``, in a text that is known to be JSON."""
    read = json.JSONDecoder().raw_decode
    at = after_blanks(text, at + 1)
    while text[at] != "}":
        key, at = read(text, at)
        start = after_blanks(text, after_blanks(text, at) + 1)
        _, stop = read(text, start)
        yield key, start, stop
        at = after_blanks(text, stop)
        at = after_blanks(text, at + 1) if text[at] == "," else at


@lru_cache(maxsize=8)
def check_survives(used: str) -> None:
    """Read the tokenizer and encode a few texts in a child process.

    Raises:
        DataError: the child was killed, or has not ended in time.
    """
    try:
        command = [sys.executable, "-P", "-c", _PROBE]
        child = subprocess.run(command, input=used.encode(), capture_output=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"the package tokenizers had not encoded 1,000 characters after {_PROBE_S:g} s") from None
    if child.returncode < 0:
        raise DataError(f"it ends the process that reads it, by signal {-child.returncode}")


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
