"""Documents to token ids, a piece of a source at a time: each document with its end, chats with what of them is an answer.

:class:`Encoder` does so for training and for token stores. It can be sent to other processes, and gives the same ids there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.train.corpora.chat import ChatTemplate, chat_in, find_template
from jaxpipe.train.corpora.documents import Piece, holds_records, in_groups, read_document, records, text_in
from jaxpipe.train.corpora.tokenizers import Ids, Tokenizer, id_dtype
from jaxpipe.train.settings.sections import ReadingConfig

_SLICE = 1 << 20  # characters tokenised in one go


Reading = ReadingConfig
"""How files become documents."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Documents, one after another. ``lengths`` int64: tokens of each. ``answers`` uint8, of chats: 1 where a token is one of
    an answer. ``files``: of documents that are a file each. ``problems``: files that can't be used, and why."""

    ids: Ids
    lengths: npt.NDArray[np.int64]
    answers: npt.NDArray[np.uint8] | None = None
    files: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoder:
    """``field``: of records. ``eos``: the id after each document, if there is one. ``template``: of chats."""

    tokenizer: Tokenizer
    field: str
    eos: int | None
    template: ChatTemplate | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, reading: Reading) -> Encoder:
        """Raises DataError for an end that the tokenizer does not have, or a chat template that is not there."""
        chat = reading.format == "chat"
        template = find_template(tokenizer.name, reading.chat_template, reading.chat_date) if chat else None
        eos = None if chat and reading.eos == "auto" else end_of(tokenizer, reading.eos)
        field = ("messages" if chat else "text") if reading.field == "auto" else reading.field
        return cls(tokenizer, field, eos, template)

    def encode(self, piece: Piece) -> Encoded:
        """The documents of a piece that have a token.

        Raises:
            DataError: a record is no document.
        """
        if not holds_records(piece.files[0]):
            return self._files(piece.files)
        if self.template is None:
            texts = (text for text in records(piece, self.field, text_in) if text)
            return self._joined(
                [ids for some in in_groups(texts, len, _SLICE) for ids in self.tokenizer.encode_all(some)]
            )
        render = self.template.render
        chats = records(piece, self.field, lambda *chat: render(*chat_in(*chat)), beside="tools")
        made = [self._chat(*chat) for chat in chats]
        whole = self._joined([ids for ids, _ in made])
        none = np.zeros(0 if self.eos is None else 1, np.uint8)
        answers = [part for ids, answer in made if len(ids) for part in (answer, none)]
        return Encoded(whole.ids, whole.lengths, np.concatenate([none[:0], *answers]))

    def _files(self, paths: Iterable[Path]) -> Encoded:
        found, problems = [], []
        for path in paths:
            try:
                found.append((path, self._file(path)))
            except DataError as error:
                problems.append(str(error).removeprefix("data "))
        whole = self._joined([ids for _, ids in found])
        files = tuple(path for path, ids in found if len(ids))
        return Encoded(whole.ids, whole.lengths, None, files, tuple(problems))

    def _file(self, path: Path) -> Ids:
        if self.template is not None:
            raise DataError(f"data {path}: chats are read from JSONL or Parquet, and this is neither")
        text = read_document(path)
        try:
            return self.tokenizer.encode(text)
        except DataError as error:
            raise DataError(f"data {path}: {error}") from None

    def _joined(self, documents: list[Ids]) -> Encoded:
        dtype = id_dtype(self.tokenizer.vocab_size)
        kept = [ids for ids in documents if len(ids)]
        end = np.array([] if self.eos is None else [self.eos], dtype)
        parts = [part for ids in kept for part in (ids, end)] if len(end) else kept
        lengths = np.array([len(ids) + len(end) for ids in kept], np.int64)
        return Encoded(np.concatenate([end[:0], *parts]).astype(dtype, copy=False), lengths)

    def _chat(self, text: str, spans: list[tuple[int, int]]) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """Ids of a chat, and which of them begin in an answer."""
        ids, starts = self.tokenizer.encode_with_places(text)
        edges = np.array(spans, np.int64).reshape(-1)
        return ids, (np.searchsorted(edges, starts, side="right") % 2).astype(np.uint8)


def end_of(tokenizer: Tokenizer, eos: str) -> int | None:
    """The id that ends documents: ``auto``, the tokenizer's own; ``none``; an id; or a token of the tokenizer.

    Raises:
        DataError: it has no such id or token.
    """
    if eos in ("auto", "none"):
        return tokenizer.eos if eos == "auto" else None
    found = int(eos) if re.fullmatch("[0-9]{1,9}", eos) else tokenizer.id_of(eos)
    if found is None or found >= tokenizer.vocab_size:
        raise DataError(f"data.eos={eos}: tokenizer {tokenizer.name} has no such token; use one of its, auto or none")
    return found
