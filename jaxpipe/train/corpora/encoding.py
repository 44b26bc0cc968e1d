"""Encode documents as token ids, a piece of a source at a time: each document with its end, chats with what of them is an
answer.

:class:`Encoder` does so for training and for token stores. It can be sent to other processes, and gives the same ids there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.train.corpora.chat import ChatTemplate, chat_in, find_template
from jaxpipe.train.corpora.content import RECORD_FORMS, Form, read_text
from jaxpipe.train.corpora.documents import BadRecordError, SourcePiece, in_groups, records, text_in
from jaxpipe.train.corpora.tokenizers import Ids, Tokenizer, id_dtype
from jaxpipe.train.settings.sections import ReadingConfig

T = TypeVar("T")
_SLICE = 1 << 20  # characters tokenised in one go
_SAMPLE = 1 << 14  # characters of a piece that are turned back into text


Reading = ReadingConfig
"""How files become documents."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The documents of a piece as ids, one after another.

    ``lengths`` int64: tokens of each. ``answers`` uint8, of chats: 1 where a token is one of an answer. ``files``: of documents
    that are a file each. ``problems``: files that can't be used, and why. ``sizes`` int64, where ids do not tell: bytes of the
    text that each document was. ``loss``: how text comes back changed, if it does.
    """

    ids: Ids
    lengths: npt.NDArray[np.int64]
    answers: npt.NDArray[np.uint8] | None = None
    files: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    sizes: npt.NDArray[np.int64] | None = None
    loss: str = ""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns pieces of sources into ids.

    ``field``: of records. ``bos``, ``eos``: the ids before and after each document, if there are some. ``template``: of chats.
    ``unended``: what ends documents was looked for, and not found.
    """

    tokenizer: Tokenizer
    field: str
    eos: int | None
    template: ChatTemplate | None = None
    bos: int | None = None
    unended: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, reading: Reading) -> Encoder:
        """Make the encoder of a tokenizer for files read so. Raises DataError for an end that the tokenizer does not have, or a
        chat template that is not there."""
        chat = reading.format == "chat"
        template = find_template(tokenizer.name, reading.chat_template, reading.chat_date) if chat else None
        bos, eos = ends_of(tokenizer, reading)
        field = ("messages" if chat else "text") if reading.field == "auto" else reading.field
        return cls(tokenizer, field, eos, template, bos, unended=reading.eos == "auto" and eos is None and not chat)

    def encode(self, piece: SourcePiece) -> Encoded:
        """Return the documents of a piece that have a token.

        Raises:
            DataError: a record is no document.
        """
        if piece.form not in RECORD_FORMS:
            return self._files(piece.files, piece.form)
        if self.template is None:
            return self._texts(piece)
        render = self.template.render
        read = _naming(lambda *chat: self._chat(*render(*chat_in(*chat))))
        chats = list(records(piece, self.field, read, beside="tools"))
        joined = self._joined([(ids, 0) for ids, _ in chats])
        none = np.zeros(0 if self.eos is None else 1, np.uint8)
        answers = [
            part
            for ids, answer in chats
            if len(ids)
            for part in (np.zeros(len(self._begin(ids)), np.uint8), answer, none)
        ]
        return Encoded(joined.ids, joined.lengths, np.concatenate([none[:0], *answers]))

    def _texts(self, piece: SourcePiece) -> Encoded:
        """Encode records of text."""
        texts = (text for text in records(piece, self.field, text_in) if text)
        documents: list[tuple[Ids, int]] = []
        loss = ""
        for group in in_groups(texts, len, _SLICE):
            try:
                documents += zip(self.tokenizer.encode_all(group), map(_num_bytes, group), strict=True)
            except DataError:
                # A batch of texts fails as one. Reading the piece again, record by record, names the one that is at fault.
                for _ in records(piece, self.field, _naming(lambda value: self.tokenizer.encode(text_in(value)))):
                    pass  # the record that can't be encoded is named
                raise
            loss = loss or self._loss(group)
        return self._joined(documents, loss=loss)

    def _loss(self, texts: Sequence[str]) -> str:
        """Describe how the first of ``texts`` come back changed from their tokens, if they do."""
        ends = itertools.accumulate(map(len, texts))
        few = [text[:_SAMPLE] for text, end in zip(texts, ends, strict=True) if end - len(text) < _SAMPLE]
        loss = next((loss for text in few if (loss := self.tokenizer.loss_of(text))), "")
        return loss and f"tokenizer {self.tokenizer.name}: text does not survive it: {loss}"

    def _files(self, paths: Iterable[Path], form: Form) -> Encoded:
        encoded, problems, loss = [], [], ""
        for path in paths:
            try:
                text = self._text(path, form)
                encoded.append((path, (self.tokenizer.encode(text), _num_bytes(text))))
                loss = loss or self._loss([text])
            except DataError as error:
                problem = str(error).removeprefix("data ")
                problems.append(problem if problem.startswith(str(path)) else f"{path}: {problem}")
        files = tuple(path for path, (ids, _) in encoded if len(ids))
        return self._joined([document for _, document in encoded], files, problems, loss)

    def _text(self, path: Path, form: Form) -> str:
        if self.template is not None:
            raise DataError(f"data {path}: chats are read from JSON or Parquet, and this is neither")
        return read_text(path, form)

    def _begin(self, ids: Ids) -> Ids:
        """Return what stands before a document: nothing where its text says it already, as that of a chat template does."""
        return np.array(
            [] if self.bos is None or ids[0] == self.bos else [self.bos], id_dtype(self.tokenizer.vocab_size)
        )

    def _joined(
        self,
        documents: Iterable[tuple[Ids, int]],
        files: tuple[Path, ...] = (),
        problems: Sequence[str] = (),
        loss: str = "",
    ) -> Encoded:
        """Lay documents end to end. ``documents``: the ids of each, and how many bytes its text was."""
        dtype = id_dtype(self.tokenizer.vocab_size)
        end = np.array([] if self.eos is None else [self.eos], dtype)
        framed = [((self._begin(ids), ids, end), size) for ids, size in documents if len(ids)]
        lengths = np.array([sum(map(len, parts)) for parts, _ in framed], np.int64)
        ids = np.concatenate([end[:0], *itertools.chain.from_iterable(parts for parts, _ in framed)])
        sizes = np.array([size for _, size in framed], np.int64) if self.sizes else None
        return Encoded(ids.astype(dtype, copy=False), lengths, None, files, tuple(problems), sizes, loss)

    @property
    def sizes(self) -> bool:
        """Whether the bytes of each text are counted: not where ids tell them, nor of chats, whose answers alone count."""
        return self.tokenizer.content is not None and self.template is None

    def describe(self) -> str:
        """Describe how documents begin and end; empty where nothing stands there."""
        tokenizer, marks = self.tokenizer, []
        if self.bos is not None:
            marks.append(f"begin with {tokenizer.name_of(self.bos)}")
        if self.eos is not None:
            place = f" ({tokenizer.eos_from})" if tokenizer.eos_from and self.eos == tokenizer.eos else ""
            marks.append(f"end with {tokenizer.name_of(self.eos)}{place}")
        return f"documents {' and '.join(marks)}" if marks else ""

    def remark(self, documents: int) -> str:
        """Return what a user may not expect of so many documents; empty if there is nothing."""
        return "documents run together: data.eos names their end, or none" if self.unended and documents > 1 else ""

    def _chat(self, text: str, spans: list[tuple[int, int]]) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """Return the ids of a chat, and which of them begin in an answer."""
        ids, starts = self.tokenizer.encode_with_places(text)
        # Spans are sorted and disjoint: an odd number of edges lies at or before a place exactly where it is inside one. A
        # token counts by where it begins; one that straddles the start of an answer began in the prompt and is not learnt.
        edges = np.array(spans, np.int64).reshape(-1)
        return ids, (np.searchsorted(edges, starts, side="right") % 2).astype(np.uint8)


def ends_of(tokenizer: Tokenizer, reading: Reading) -> tuple[int | None, int | None]:
    """Return the ids that begin and end documents. Where nothing else is said, chats begin and end as their template says.

    Raises:
        DataError: the tokenizer has no such id or token.
    """
    chat, settings = reading.format == "chat", {"bos": reading.bos, "eos": reading.eos}
    ids = {key: None if chat and text == "auto" else marker(tokenizer, key, text) for key, text in settings.items()}
    return ids["bos"], ids["eos"]


def marker(tokenizer: Tokenizer, key: str, setting: str) -> int | None:
    """Return the id that begins (``key`` "bos") or ends documents ("eos"). ``setting``: ``auto``, the tokenizer's own;
    ``none``; an id; or a token of the tokenizer.

    Raises:
        DataError: it has no such id or token.
    """
    if setting in ("auto", "none"):
        return (tokenizer.bos if key == "bos" else tokenizer.eos) if setting == "auto" else None
    number = int(setting) if re.fullmatch("[0-9]{1,9}", setting) else tokenizer.id_of(setting)
    if number is None or number >= tokenizer.vocab_size:
        raise DataError(
            f"data.{key}={setting}: tokenizer {tokenizer.name} has no such token; use one of its, auto or none"
        )
    return number


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _naming(read: Callable[..., T]) -> Callable[..., T]:
    """Wrap ``read`` for :func:`records`, which names the record that a DataError is about."""

    def named(*values: Any) -> T:
        try:
            return read(*values)
        except DataError as error:
            raise BadRecordError(str(error)) from None

    return named
