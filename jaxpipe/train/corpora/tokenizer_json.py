"""Read a ``tokenizer.json`` as jaxpipe uses it: what turns text into ids, and nothing of how somebody once called it.

Whoever saved the file may have left ``truncation``, ``padding`` or a BPE model's ``dropout`` in it. They are settings of a call
and not of the vocabulary, so they are switched off, by writing ``null`` in their place and leaving every other character: two
files that differ in nothing else then have the same text, and a file without the three keeps its own.

The package ``tokenizers`` is Rust. It panics on some files, and ends or stalls the process on a few: what may do that is first
tried in a child process (:func:`check_survives`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from jaxpipe.errors import DataError

_BLANKS = re.compile(r"[ \t\n\r]*")
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
        for key, start, stop in _values(content, _blank(content, 0)) if keys or dropout else ():
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


def _blank(text: str, at: int) -> int:
    """Return the place after the blanks at ``at``."""
    match = _BLANKS.match(text, at)
    assert match is not None
    return match.end()


def _values(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Yield key, start and stop of each value of the JSON object at ``at``, in a text that is known to be JSON."""
    read = json.JSONDecoder().raw_decode
    at = _blank(text, at + 1)
    while text[at] != "}":
        key, at = read(text, at)
        start = _blank(text, _blank(text, at) + 1)
        _, stop = read(text, start)
        yield key, start, stop
        at = _blank(text, stop)
        at = _blank(text, at + 1) if text[at] == "," else at


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
