"""Chats to text by the template of a tokenizer, and what of that text is an answer.

A template is a file of Jinja (``chat_template.jinja``) or ``chat_template`` in ``tokenizer_config.json``, beside the
``tokenizer.json``. It is rendered by ``jinja2``, sandboxed, in the environment that Hugging Face's documentation describes
("Chat templates", "Writing a chat template"), without ``strftime_now``: the same chat gives the same text on any day.
Answers are what stands in ``{% generation %}`` blocks; in templates without them, what a message of the role ``assistant`` adds
to the text, its prompt left out. Does not model: tools, pictures.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxpipe.errors import DataError
from jaxpipe.interop.folder import read_json
from jaxpipe.train.corpora.documents import BadRecordError, kind_of, package
from jaxpipe.wording import clipped

Messages = Sequence[Mapping[str, Any]]
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # no characters of any text (Unicode: noncharacters)
_ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """``source``: Jinja; ``path``: where it is from; ``tokens``: names that it may use, such as ``eos_token``."""

    source: str
    path: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the spans ``[start, stop)`` of its characters that are answers.

        Raises:
            BadRecordError: the template refuses it, or has no generation blocks and rewrites what it wrote before.
        """
        marked = self._text(messages, False)
        if _OPEN in marked:
            parts = re.split(f"[{_OPEN}{_CLOSE}]", marked)
            edges = list(itertools.accumulate(map(len, parts), initial=0))
            return "".join(parts), list(zip(edges[1::2], edges[2::2], strict=False))
        spans = []
        for k, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            before, after = self._text(messages[:k], True), self._text(messages[: k + 1], False)
            if not (after.startswith(before) and marked.startswith(after)):
                raise BadRecordError(
                    f"{self.path} writes message {k + 1} otherwise when others follow, so where answers stand is not known; "
                    "put {% generation %} … {% endgeneration %} around them in the template"
                )
            spans.append((len(before), len(after)))
        return marked, spans

    def _text(self, messages: Messages, prompt: bool) -> str:
        jinja2 = package("jinja2", Path(self.path))
        try:
            text: str = _compiled(self.source, self.path).render(
                messages=messages, add_generation_prompt=prompt, **self.tokens
            )
        except jinja2.TemplateError as error:
            raise BadRecordError(f"{self.path}: {' '.join(str(error).split())}") from None
        except (TypeError, ValueError, KeyError) as error:
            raise BadRecordError(f"{self.path}: {type(error).__name__}: {' '.join(str(error).split())}") from None
        return text


def messages_in(value: Any) -> Messages:
    """A chat, for :func:`~jaxpipe.train.corpora.documents.records`: messages with ``role`` and ``content``, one of an
    assistant."""
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise BadRecordError(f'the chat is {what}, expected messages such as [{{"role": "user", "content": …}}]')
    for number, message in enumerate(value, 1):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise BadRecordError(f"message {number} of the chat has no 'role' and 'content'")
    if all(message["role"] != _ASSISTANT for message in value):
        raise BadRecordError(f"no message of the chat has the role {_ASSISTANT!r}: there is no answer to learn")
    return value


def find_template(tokenizer: str, spec: str) -> ChatTemplate:
    """The template at the path ``spec``; ``auto``: beside the file of the tokenizer.

    Raises:
        DataError: there is none, or it can't be read.
        ConfigError: the settings beside it are no JSON.
    """
    folder = Path(tokenizer).parent
    config, own = folder / "tokenizer_config.json", Path(tokenizer).is_file()
    settings = read_json(config) if own and config.is_file() else {}
    path = folder / "chat_template.jinja" if spec == "auto" else Path(spec)
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if spec != "auto" or (own and path.is_file()):
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
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    given = {name: settings.get(name) for name in names}
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in given.items() if v}
    made = ChatTemplate(source, str(path), tokens)
    jinja2 = package("jinja2", path)
    try:
        _compiled(made.source, made.path)
    except jinja2.TemplateError as error:
        raise DataError(f"{path}: no Jinja template ({clipped(' '.join(str(error).split()), 160)})") from None
    return made


@lru_cache(maxsize=4)
def _compiled(source: str, path: str) -> Any:
    jinja2 = package("jinja2", Path(path))
    sandbox, loops = package("jinja2.sandbox", Path(path)), package("jinja2.ext", Path(path))

    class Generation(loops.Extension):  # type: ignore[name-defined,misc]
        """Marks what stands in ``{% generation %}`` blocks."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loops.loopcontrols]
    )
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)
