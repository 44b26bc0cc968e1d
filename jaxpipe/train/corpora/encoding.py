"""Encode documents as token ids, a piece of a source at a time: each with its end, chats with what of them is an answer.

:class:`Encoder` does so for training and for token stores. It can be sent to other processes, and gives the same ids there.

Chats are rendered as text by the template of a tokenizer (:class:`ChatTemplate`). A template is a file of Jinja
(``chat_template.jinja``) or ``chat_template`` in ``tokenizer_config.json``, beside the ``tokenizer.json``. It is rendered by
``jinja2``, sandboxed, in the environment that Hugging Face's documentation describes ("Chat templates", "Writing a chat
template"). ``strftime_now`` returns a fixed date: the same chat gives the same text on any day. Answers are what stands in ``{%
generation %}`` blocks; in templates without them, what a message of the role ``assistant`` adds to the text, its prompt left
out. Templates that write an earlier message otherwise once others follow (reasoning that is stripped) are rendered with a mark
in place of a message's content, which shows where the message ends in the final text. Does not model: pictures.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.interop.folder import read_json
from jaxpipe.text import truncate
from jaxpipe.train.corpora.documents import (
    RECORD_FORMS,
    BadRecordError,
    Form,
    SourcePiece,
    in_groups,
    kind_of,
    package,
    read_text,
    records,
    text_in,
    without_nulls,
)
from jaxpipe.train.corpora.tokenizers import Ids, Tokenizer, id_dtype
from jaxpipe.train.settings.sections import ReadingConfig

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any] | None
DATE = "2026-01-01"
"""The day that ``strftime_now`` returns unless a template has a date of its own, or ``data.chat_date`` says another."""
_ASSISTANT = "assistant"
_MARKS = "jaxpipe_marks"  # the variable by which generation blocks get the characters to put around them
_NO_DATE = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template of chats, with what it may use.

    ``source``: Jinja; ``path``: the file it was read from; ``tokens``: names that it may use, such as ``eos_token``; ``date``:
    what ``strftime_now`` returns, as ``YYYY-MM-DD``. With ``auto`` it is :data:`DATE`, and templates that ask whether there is
    a ``strftime_now`` have none, and use their own date.
    """

    source: str
    path: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    date: str = field(default="auto", repr=False)

    @property
    def identity(self) -> str:
        """A text that is equal for templates that write equal texts."""
        return repr(self) if self.date == "auto" or "strftime_now" not in self.source else f"{self!r} {self.date}"

    def render(self, messages: Messages, tools: Tools = None) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat, and the spans ``[start, stop)`` of its characters that are answers, in their order.

        Raises:
            BadRecordError: the template refuses it, or it is not known where in the text an answer stands.
        """
        chat = _Chat(self, messages, tools)
        if chat.template.has_blocks and (spans := chat.blocks()):
            return chat.text, spans
        spans = [chat.answer(k) for k, message in enumerate(messages) if message["role"] == _ASSISTANT]
        # Spans that overlap would learn a prompt as an answer: better no training than training on the wrong words.
        for before, after in itertools.pairwise(spans):
            if after[0] < before[1]:
                raise chat.unknown(len(messages) - 1)
        return chat.text, spans


class _Chat:
    """One chat rendered by a template: its ``text``, and what rendering it otherwise shows about it."""

    def __init__(self, template: ChatTemplate, messages: Messages, tools: Tools) -> None:
        self.path, self.messages, self.tools = template.path, messages, tools
        self.template = _compile(template.source, template.path)
        self.names: dict[str, Any] = {**template.tokens}
        if template.date != "auto" or not _NO_DATE.search(template.source):
            date = DATE if template.date == "auto" else template.date
            self.names["strftime_now"] = datetime.strptime(date, "%Y-%m-%d").strftime
        self.text = text_in(self.rendered(messages))
        for number, message in enumerate(messages, 1):
            if isinstance(message.get("content"), list) and str(message["content"]) in self.text:
                raise BadRecordError(
                    f"{self.path} writes the list of parts of message {number} as it is; give a string"
                )

    def rendered(self, messages: Messages, *, prompt: bool = False, marks: str = "") -> str:
        """Render messages. ``marks``: the two characters around each generation block."""
        names = {**self.names, _MARKS: marks, "tools": self.tools, "documents": None}
        try:
            text: str = self.template.jinja.render(messages=messages, add_generation_prompt=prompt, **names)
        except package("jinja2", Path(self.path)).TemplateError as error:
            raise BadRecordError(f"{self.path}: {truncate(' '.join(str(error).split()), 300)}") from None
        except Exception as error:  # whatever expressions of the template raise
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise BadRecordError(f"{self.path}: {truncate(why, 300)}") from None
        return text

    def unknown(self, k: int) -> BadRecordError:
        """Return the error for an answer, message ``k``, whose place in the text can't be found."""
        return BadRecordError(
            f"{self.path} writes message {k + 1} otherwise when others follow, so where answers stand is not known; "
            "put {% generation %} … {% endgeneration %} around them in the template"
        )

    def blocks(self) -> list[tuple[int, int]]:
        """Return what stands in generation blocks. Two characters that the chat's text does not have are put around them."""
        present = set(self.text)
        free = (character for character in map(chr, range(0xE000, 0x110000)) if character not in present)
        marks = "".join(itertools.islice(free, 2))
        # Characters of private use: filters that trim or change case leave them alone.
        parts = re.split(f"([{marks}])", self.rendered(self.messages, marks=marks)) if len(marks) == 2 else [""]
        if "".join(parts[::2]) != self.text or "".join(parts[1::2]) != marks * (len(parts) // 4):
            raise BadRecordError(
                f"{self.path} nests generation blocks, or changes what they gave; write them out at once"
            )
        edges = list(itertools.accumulate(map(len, parts[::2]), initial=0))
        return list(zip(edges[1::2], edges[2::2], strict=False))

    def answer(self, k: int) -> tuple[int, int]:
        """Return the span of message ``k`` in the text, without the prompt for it."""
        # The plain case: chats cut off before and after the message are prefixes of the whole text. Rendering once more with a
        # mark in the message that follows guards against content that happens to read like this message's end.
        before, after = self.rendered(self.messages[:k], prompt=True), self.rendered(self.messages[: k + 1])
        if after.startswith(before) and self.text.startswith(after) and self._followed(k).startswith(after):
            return len(before), len(after)
        plain = self.rendered(self.messages[:k])
        first = self._end(k - 1)[0] if k else 0
        stop, head = self._end(k)
        if not before.startswith(plain) or len(head) < first or not self.text.startswith(head[:first]):
            raise self.unknown(k)
        prompt = before[len(plain) :]
        if not self.text.startswith(prompt, first):  # a prompt that begins to think, and an answer that has not thought
            prompt = _common_start(prompt, head[first:])
        if not self.text.startswith(prompt, first) or first + len(prompt) > stop:
            raise self.unknown(k)
        return first + len(prompt), stop

    def _followed(self, k: int) -> str:
        """Render the chat with a mark in place of the content that follows message ``k``, which could read like the message's
        end."""
        following = [_with_content(m, self._mark()) for m in self.messages[k + 1 : k + 2]]
        return self.rendered([*self.messages[: k + 1], *following, *self.messages[k + 2 :]]) if following else self.text

    def _mark(self, *texts: str) -> str:
        """Return digits that the chat does not hold, nor are among ``texts``."""
        return _mark_not_in(" ".join((self.text, repr(self.messages), repr(self.tools), *texts)))

    def _end(self, k: int) -> tuple[int, str]:
        """Return the place in the text where message ``k`` ends, and what stands before a mark in place of its content.

        What follows the mark, and is not how the message ends when it is the last one, is of later messages. The next one is
        marked too, so that its content is not taken for such an end.
        """
        mark = self._mark()
        next_mark = self._mark(mark)
        marked = [*self.messages[:k], _with_content(self.messages[k], mark), *self.messages[k + 1 :]]
        followed = [*marked[: k + 1], *(_with_content(m, next_mark) for m in marked[k + 1 : k + 2]), *marked[k + 2 :]]
        texts = [self.rendered(messages).split(mark) for messages in (marked, marked[: k + 1], followed)]
        if any(len(parts) != 2 for parts in texts):
            raise self.unknown(k)
        (head, rest), (_, last), (_, next_rest) = texts
        ending = _common_start(last, next_rest.split(next_mark)[0])
        if not rest.startswith(ending) or not self.text.endswith(rest[len(ending) :]):
            raise self.unknown(k)
        return len(self.text) - len(rest) + len(ending), head


def _common_start(a: str, b: str) -> str:
    """Return the longest text with which both begin."""
    return "".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _mark_not_in(text: str) -> str:
    """Return digits that ``text`` does not hold: no template trims them or changes their case. The first one does not come
    again, so text beside them makes no second occurrence that overlaps the first."""
    marks = ("7" + f"{number:08o}".replace("7", "8") for number in itertools.count())
    return next(mark for mark in marks if mark not in text)


def _with_content(message: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return a message with another text; of a list of parts, in the last one that has a text."""
    parts = message.get("content")
    if isinstance(parts, list):
        texts = [at for at, part in enumerate(parts) if isinstance(part, dict) and "text" in part]
        if texts:
            return {
                **message,
                "content": [*parts[: texts[-1]], {**parts[texts[-1]], "text": content}, *parts[texts[-1] + 1 :]],
            }
    return {**message, "content": content}


def chat_in(value: Any, tools: Any = None) -> tuple[Messages, Tools]:
    """Return ``value`` as a chat, for :func:`~jaxpipe.train.corpora.documents.records`: messages with ``role`` and ``content``,
    one of an assistant, and the tools that it may call (a list, or a string of JSON). Keys that are null count as absent."""
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise BadRecordError(f'the chat is {what}, expected messages such as [{{"role": "user", "content": …}}]')
    messages = without_nulls(value, but="arguments")
    for number, message in enumerate(messages, 1):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise BadRecordError(f"message {number} of the chat has no 'role' and 'content'")
        if "content" not in message and not message.get("tool_calls"):
            null = "content" in value[number - 1]
            what = "has null for its content, and no tool_calls" if null else "has no 'role' and 'content'"
            raise BadRecordError(f"message {number} of the chat {what}")
        if not isinstance(message.get("content", ""), str | list):
            raise BadRecordError(f"message {number} of the chat has {kind_of(message['content'])} for its content")
    if all(message["role"] != _ASSISTANT for message in messages):
        raise BadRecordError(f"no message of the chat has the role {_ASSISTANT!r}: there is no answer to learn")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise BadRecordError(f"the chat's tools are no JSON ({error})") from None
    if not isinstance(tools, list | None):
        raise BadRecordError(f"the chat's tools are {kind_of(tools)}, expected a list")
    return messages, tools


def find_template(tokenizer: str, spec: str, date: str = "auto") -> ChatTemplate:
    """Return the template at the path ``spec``; ``auto``: beside the file of the tokenizer. ``date``: see
    :class:`ChatTemplate`.

    Raises:
        DataError: there is none, or it can't be read; or the date is none.
        ConfigError: the settings beside it are no JSON.
    """
    folder = Path(tokenizer).parent
    config, has_file = folder / "tokenizer_config.json", Path(tokenizer).is_file()
    settings = read_json(config) if has_file and config.is_file() else {}
    path = folder / "chat_template.jinja" if spec == "auto" else Path(spec)
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if spec != "auto" or (has_file and path.is_file()):
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.chat_template {path}: can't be read ({error})") from None
    else:
        path = config
    if not isinstance(source, str):
        raise DataError(
            f"tokenizer {tokenizer} has no chat template beside it (chat_template.jinja, or tokenizer_config.json with "
            "chat_template); set data.chat_template to the path of one"
        )
    if date != "auto":
        try:
            datetime.strptime(date, "%Y-%m-%d")
        except ValueError:
            raise DataError(
                f"data.chat_date is {truncate(date, 40)!r}, expected auto or a date such as {DATE}"
            ) from None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special_tokens = {name: settings.get(name) for name in names}
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in special_tokens.items() if v}
    template = ChatTemplate(source, str(path), tokens, date)
    jinja2 = package("jinja2", path)
    try:
        _compile(template.source, template.path)
    except jinja2.TemplateError as error:
        raise DataError(f"{path}: no Jinja template ({truncate(' '.join(str(error).split()), 160)})") from None
    return template


@dataclass(frozen=True, slots=True)
class _JinjaTemplate:
    """A compiled template. ``jinja``: what renders; ``has_blocks``: whether there are generation blocks in it."""

    jinja: Any
    has_blocks: bool


@lru_cache(maxsize=4)
def _compile(source: str, path: str) -> _JinjaTemplate:
    jinja2 = package("jinja2", Path(path))
    sandbox, loops = package("jinja2.sandbox", Path(path)), package("jinja2.ext", Path(path))

    blocks: list[int] = []

    class Generation(loops.Extension):  # type: ignore[name-defined,misc]
        """Marks what stands in ``{% generation %}`` blocks."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            blocks.append(line)
            marking = self.call_method("_mark", [jinja2.nodes.ContextReference()])
            return jinja2.nodes.CallBlock(marking, [], [], body).set_lineno(line)

        def _mark(self, context: Any, caller: Any) -> str:
            marks = context.get(_MARKS)
            return f"{marks[:1]}{caller()}{marks[1:]}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loops.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    return _JinjaTemplate(environment.from_string(source), bool(blocks))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


T = TypeVar("T")
_SLICE = 1 << 20  # characters tokenised in one go
_SAMPLE = 1 << 14  # characters of a piece that are turned back into text


Reading = ReadingConfig
"""How files become documents."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The documents of a piece as ids, one after another.

    ``lengths`` int64: tokens of each. ``answers`` uint8, of chats: 1 where a token is one of an answer. ``files``: of documents
    that are a file each. ``problems``: files that can't be used, and why. ``sizes`` int64, where ids do not give it: bytes of
    the text that each document was. ``loss``: how text comes back changed, if it does.
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
        """Whether the bytes of each text are counted: not where ids give them, nor of chats, whose answers alone count."""
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
