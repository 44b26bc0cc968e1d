"""Chats: the tokenizer's template, loss on answers only, in memory as in a store."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.errors import DataError
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.corpus import load_corpus
from jaxpipe.train.corpora.datasets import load_dataset
from jaxpipe.train.corpora.documents import BadRecordError
from jaxpipe.train.corpora.encoding import ChatTemplate, Reading, chat_in
from jaxpipe.train.corpora.store import build_store
from jaxpipe.train.corpora.tokenizers import ByteTokenizer, HFTokenizer
from jaxpipe.train.data import TokenDataset
from tests.support.chats import TEMPLATES, TOKENS, chat

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
    text, answer_texts = answers(CHATML, bos_token="<s>")
    assert text.startswith("<s><|im_start|>user\nGrüß dich<|im_end|>\n<|im_start|>assistant\nHallo")
    assert answer_texts == ["Hallo, süß<|im_end|>\n", "No<|im_end|>\n"]
    text, answer_texts = answers(MARKED)
    assert text == "Q: Grüß dich\nA: Hallo, süß;Q: More?\nA:  No ;" and answer_texts == ["Hallo, süß;", " No ;"]
    rewriting = "{% for m in messages %}{{ m.content if loop.last else m.content[:2] }}|{% endfor %}"
    with pytest.raises(BadRecordError, match="1 otherwise"):
        answers(rewriting)
    with pytest.raises(BadRecordError, match="no system here"):
        answers("{{ raise_exception('no system here') }}")
    with pytest.raises(BadRecordError, match=r"unsafe|not safe"):
        answers("{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}")


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_answer_is_found_in_the_text_whatever_the_chat_holds(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], "t.jinja", TOKENS)
    for seed in range(40):
        rng = random.Random(seed)
        messages, contents = chat(rng, rng.randint(1, 4), hostile=seed % 2 == 1)
        text, spans = template.render(*chat_in(messages))
        answer_texts = [text[a:b] for a, b in spans]
        assert len(answer_texts) == len(contents)
        for answer, content in zip(answer_texts, contents, strict=True):
            written = content if content in text else content.split("</think>")[-1].lstrip("\n")
            assert written in answer and answer.count("«") <= 1 and "«u" not in answer and "<|im_start|>u" not in answer
        assert all(text.count(content) <= 1 for content in contents)


def test_reasoning_that_is_stripped_and_prompts_that_think() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA"},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "reasoning_content": "so",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "B", "reasoning_content": "oh"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "C"},
    ]
    template = ChatTemplate(TEMPLATES["thinking stripped"], "t.jinja")
    text, spans = template.render(*chat_in(messages))
    assert [text[a:b] for a, b in spans] == [
        "A<|im_end|>\n",
        '\n<tool_call>\n{"name": "f", "arguments": {"x": null}}\n</tool_call><|im_end|>\n',
        "B<|im_end|>\n",
        "<think>\n\n</think>\n\nC<|im_end|>\n",
    ]
    assert "hm" not in text and "so" not in text and "oh" not in text
    assert answers(TEMPLATES["think prompt"], messages[:2])[1] == ["\n\nA</s>"]
    prompted = TEMPLATES["think prompt"].replace("m.content.split('</think>')[-1]", "m.content")
    assert answers(prompted, messages[:2])[1] == ["hm\n</think>\n\nA</s>"]  # the prompt has begun to think
    assert answers(prompted, [messages[0], {"role": "assistant", "content": "<b>A"}])[1] == ["<b>A</s>"]
    for source in ("{% for m in messages %}{{ m.content * 2 if loop.last else m.content[:1] }}{% endfor %}",
                   "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}"):  # fmt: skip
        with pytest.raises(BadRecordError, match=r"writes message . otherwise"):
            answers(source, messages[:3])


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_no_text_is_taken_for_a_mark(template: str) -> None:
    content = "b \ufdd1 c \ufdd0 \ue000\ue001"
    messages = [{"role": "user", "content": "\ufdd0 x \ue000"}, {"role": "assistant", "content": content}]
    text, answer_texts = answers(template, messages)
    assert "\ufdd0 x \ue000" in text and answer_texts == [content + ("<|im_end|>\n" if template is CHATML else ";")]
    bare = "{% for m in messages %}{{ m.content }}{% if loop.last %}</s>{% endif %}{% endfor %}"
    forged = [*CHAT[:2], {"role": "user", "content": "</s>x"}, {"role": "assistant", "content": "No"}]
    assert answers(bare, forged)[1] == ["Hallo, süß", "No</s>"]
    asking = bare.replace("loop.last", "loop.last and m.role == 'assistant'")
    assert answers(asking, forged)[1] == ["Hallo, süß", "No</s>"]
    nested = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    with pytest.raises(BadRecordError, match="nests generation blocks"):
        answers(nested)
    with pytest.raises(BadRecordError, match="nests generation blocks"):
        answers("{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}")


def test_parts_of_a_message() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}]
    with pytest.raises(BadRecordError, match="writes the list of parts of message 1 as it is"):
        answers(CHATML, chat)
    stripping = TEMPLATES["think prompt"].replace("m.content.split('</think>')[-1]", "m.content[-1].text")
    assert answers(stripping.replace("{{ m.content }}", "{{ m.content | map(attribute='text') | join }}"), chat)[1] == [
        "Hi</s>"
    ]


def test_dates_and_tools() -> None:
    assert answers(TEMPLATES["strftime_now"], CHAT[:2])[0].startswith("Today is 01 January 2026\n")
    assert answers(TEMPLATES["guarded date"], CHAT[:2])[0].startswith("26 Jul 2024")
    dated = {name: ChatTemplate(TEMPLATES[name], "t", date="2025-03-02") for name in ("guarded date", "chatml")}
    assert dated["guarded date"].render(CHAT)[0].startswith("02")
    assert dated["guarded date"].identity != ChatTemplate(TEMPLATES["guarded date"], "t").identity
    assert dated["chatml"].identity == ChatTemplate(TEMPLATES["chatml"], "t").identity
    tools = [{"name": "f", "default": None}]
    texts = [
        ChatTemplate(TEMPLATES["tools"], "t").render(*chat_in(CHAT, value))[0] for value in (tools, json.dumps(tools))
    ]
    assert texts[0] == texts[1] and texts[0].startswith('<tools>[\n {\n  "name": "f",\n  "default": null')
    assert "<tools>" not in answers(TEMPLATES["tools"])[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "t.jinja").write_text(CHATML)
    chats = [CHAT, CHAT[:2], CHAT[2:]] * 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return tmp_path / "a.jsonl"


@pytest.mark.parametrize("pack", ["concat", "windows"])
@pytest.mark.parametrize("mask", ["causal", "document"])
def test_only_answers_count(path: Path, mask: Any, pack: Any) -> None:
    reading = Reading(format="chat", chat_template=str(path.parent / "t.jinja"))
    corpus = load_corpus(path, BYTES, reading)
    store = load_corpus(build_store([path], path.parent / "store", BYTES, reading, workers=1).folder, BYTES)
    for name in ("ids", "edges", "answers"):
        np.testing.assert_array_equal(getattr(store, name), getattr(corpus, name))
    data = TokenDataset.split(store, BYTES, 0.0, mask=mask, pack=pack)
    rows = data.windows("train", 16)
    batch = rows.batch(np.arange(len(rows)))
    answers_text = bytes(batch["targets"][batch["weights"] > 0].tolist()).decode()
    assert answers_text == "Hallo, süß<|im_end|>\nNo<|im_end|>\nHallo, süß<|im_end|>\nNo<|im_end|>\n" * 20
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
    ids, in_answer = corpus.ids[first], corpus.answers[first] > 0
    assert tokenizer.decode(ids) == answers(CHATML, bos_token="<|im_end|>")[0]
    assert tokenizer.decode(ids[in_answer]) == "Hallo, süß<|im_end|>\nNo<|im_end|>\n"
    assert tokenizer.id_of("<|im_end|>") in ids[in_answer] and ids[0] == tokenizer.id_of("<|im_end|>")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": "hi"}, "the chat is a string, expected messages such as"),
        ({"messages": []}, "the chat is an empty list"),
        ({"messages": [{"role": "user"}]}, "message 1 of the chat has no 'role' and 'content'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1 of the chat has null for its content"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": 3}]},
            "message 2 of the chat has a number for its content",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": "x\ud800"}]},
            "the document is no text: half of a surrogate",
        ),
        ({"messages": CHAT, "tools": 3}, "the chat's tools are a number, expected a list"),
        ({"messages": CHAT, "tools": "[3"}, "the chat's tools are no JSON"),
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
    (path.parent / "t.jinja").write_text(CHATML)
    with pytest.raises(DataError, match=r"data.chat_date.*'2026-1'"):
        load_corpus(path, BYTES, Reading(format="chat", chat_template=reading.chat_template, chat_date="2026-1"))


def test_chats_of_parquet_are_those_of_jsonl(tmp_path: Path) -> None:
    """Arrow gives every message every field."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = [{"function": {"name": "f", "arguments": '{"x": null}'}}]
    called = [CHAT[0], {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "1"}, CHAT[1]]
    chats = [
        {"messages": CHAT, "tools": None},
        {"messages": called, "tools": [{"name": "f"}]},
        {"messages": CHAT, "tools": [{"x": 1}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    parquet.write_table(arrow.Table.from_pylist(chats), tmp_path / "a.parquet")
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}" \
               "{{ m.tool_calls | length }}{% endif %} {{ m.content }}.{% endfor %}"  # fmt: skip
    (tmp_path / "t.jinja").write_text(template)
    reading = Reading(format="chat", chat_template=str(tmp_path / "t.jinja"))
    jsonl, rows = (load_corpus(tmp_path / name, BYTES, reading) for name in ("a.jsonl", "a.parquet"))
    assert bytes(jsonl.ids) == bytes(rows.ids) and jsonl.fingerprint == rows.fingerprint
    assert bytes(rows.ids).count(b'"tools"') == 0 and bytes(rows.ids).count(b"null") == 2
