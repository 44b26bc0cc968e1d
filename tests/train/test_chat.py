"""Chats: the tokenizer's template, loss on answers only, in memory as in a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.errors import DataError
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.chat import ChatTemplate
from jaxpipe.train.corpora.corpus import load_corpus
from jaxpipe.train.corpora.documents import BadRecordError
from jaxpipe.train.corpora.encoding import Reading
from jaxpipe.train.corpora.store_build import build_store
from jaxpipe.train.corpora.tokenizers import ByteTokenizer, HFTokenizer
from jaxpipe.train.data import TokenDataset
from jaxpipe.train.setup import load_dataset

pytest.importorskip("jinja2")
BYTES = ByteTokenizer()
CHATML = """{{ bos_token or '' }}{% for m in messages %}
<|im_start|>{{ m['role'] }}
{{ m['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }};{% endgeneration %}
{% else %}Q: {{ m.content }}
{% endif %}{% endfor %}"""
CHAT = [
    {"role": "user", "content": "Grüß dich"},
    {"role": "assistant", "content": "Hallo, süß"},
    {"role": "user", "content": "More?"},
    {"role": "assistant", "content": " No "},
]


def answers(template: str, messages: Any = CHAT, **tokens: str) -> tuple[str, list[str]]:
    text, spans = ChatTemplate(template, "t.jinja", tokens).render(messages)
    return text, [text[a:b] for a, b in spans]


def test_what_of_a_chat_is_an_answer() -> None:
    text, found = answers(CHATML, bos_token="<s>")
    assert text.startswith("<s><|im_start|>user\nGrüß dich<|im_end|>\n<|im_start|>assistant\nHallo")
    assert found == ["Hallo, süß<|im_end|>\n", "No<|im_end|>\n"]
    text, found = answers(MARKED)
    assert text == "Q: Grüß dich\nA: Hallo, süß;Q: More?\nA:  No ;" and found == ["Hallo, süß;", " No ;"]
    rewriting = "{% for m in messages %}{{ m.content if loop.last else m.content[:2] }}|{% endfor %}"
    with pytest.raises(BadRecordError, match="writes message 2 otherwise when others follow"):
        answers(rewriting)
    with pytest.raises(BadRecordError, match="no system here"):
        answers("{{ raise_exception('no system here') }}")
    with pytest.raises(BadRecordError, match=r"unsafe|not safe"):
        answers("{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "t.jinja").write_text(CHATML)
    chats = [CHAT, CHAT[:2], CHAT[2:]] * 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return tmp_path / "a.jsonl"


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_only_answers_count(path: Path, mask: Any) -> None:
    reading = Reading(format="chat", chat_template=str(path.parent / "t.jinja"))
    corpus = load_corpus(path, BYTES, reading)
    store = load_corpus(build_store([path], path.parent / "store", BYTES, reading, workers=1).folder, BYTES)
    for name in ("ids", "edges", "answers"):
        np.testing.assert_array_equal(getattr(store, name), getattr(corpus, name))
    data = TokenDataset.split(store, BYTES, 0.0, mask=mask)
    rows = data.windows("train", 16)
    batch = rows.batch(np.arange(len(rows)))
    counted = bytes(batch["targets"][batch["weights"] > 0].tolist()).decode()
    assert counted == "Hallo, süß<|im_end|>\nNo<|im_end|>\nHallo, süß<|im_end|>\nNo<|im_end|>\n" * 20
    assert len(corpus.edges) == 61 and data.bytes_per_token() is None
    config = TrainConfig().override(
        [f"data.path={path}", "data.format=chat", f"data.chat_template={path.parent}/t.jinja", f"data.mask={mask}"]
    )
    other = TokenDataset.split(load_corpus(path, BYTES, Reading(field="messages", format="chat", eos="0",
        chat_template=reading.chat_template)), BYTES)  # fmt: skip
    assert load_dataset(config).fingerprint != other.fingerprint
    assert (other.corpus.ids == 0).sum() == 60 and not other.corpus.answers[other.corpus.ids == 0].any()  # type: ignore[index]


def test_a_tokenizer_brings_its_template(tmp_path: Path, path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["Hallo"], trainer)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HFTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="has no chat template beside it"):
        load_corpus(path, tokenizer, Reading(format="chat"))
    settings = {"chat_template": CHATML, "bos_token": {"content": "<|im_end|>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    corpus = load_corpus(path, tokenizer, Reading(format="chat"))
    first = slice(*corpus.edges[:2])
    assert corpus.answers is not None
    ids, kept = corpus.ids[first], corpus.answers[first] > 0
    assert tokenizer.decode(ids) == answers(CHATML, bos_token="<|im_end|>")[0]
    assert tokenizer.decode(ids[kept]) == "Hallo, süß<|im_end|>\nNo<|im_end|>\n"
    assert tokenizer.id_of("<|im_end|>") in ids[kept] and ids[0] == tokenizer.id_of("<|im_end|>")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": "hi"}, "the chat is a string, expected messages such as"),
        ({"messages": []}, "the chat is an empty list"),
        ({"messages": [{"role": "user"}]}, "message 1 of the chat has no 'role' and 'content'"),
        ({"messages": CHAT[:1]}, "no message of the chat has the role 'assistant'"),
        ({"text": "x"}, "no field 'messages' (it has text); set data.field"),
    ],
)
def test_a_bad_chat_is_named(path: Path, record: Any, expected: str) -> None:
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps(record))
    reading = Reading(format="chat", chat_template=str(path.parent / "t.jinja"))
    with pytest.raises(DataError) as caught:
        load_corpus(path, BYTES, reading)
    assert f"data {path}, line 2: {expected}" in str(caught.value)
    (path.parent / "t.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="no Jinja template"):
        load_corpus(path, BYTES, reading)
