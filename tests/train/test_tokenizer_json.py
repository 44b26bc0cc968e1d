"""Tokenizers of the package ``tokenizers``: their ids whatever the file was saved with, how documents begin and end, bytes."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.errors import DataError
from jaxpipe.models.gpt import GPT
from jaxpipe.stage.model.reference import init_params
from jaxpipe.train import evaluate
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.corpora import tokenizers
from jaxpipe.train.corpora.corpus import Corpus, load_corpus
from jaxpipe.train.corpora.datasets import data_remarks, load_dataset
from jaxpipe.train.corpora.encoding import Encoder, Reading
from jaxpipe.train.corpora.store import MANIFEST, SIZES, Store, _signed, build_store
from jaxpipe.train.corpora.tokenizers import (
    ByteTokenizer,
    HFTokenizer,
    _digest,
    checkpoint_tokenizer,
    continued_tokenizer,
    stored_tokenizer,
)
from jaxpipe.train.data import TokenDataset
from jaxpipe.train.run import resume
from tests.support.tokenizer_kinds import (
    PADDING,
    TRUNCATION,
    Body,
    kinds,
    switched_off,
    template,
    with_dropout,
    without,
)
from tests.support.train_runs import config, run

pytestmark = pytest.mark.usefixtures("one_build")

BARE = Reading(bos="none", eos="none")
ALPHABET = [
    "The ",
    "quick",
    " brown",
    "fox",
    "é",
    "日本",
    "🙂",
    "e\u0301",
    "\n",
    "  ",
    "\t",
    "3",
    "x" * 30,
    "</s>",
    "▁",
    "##",
]


def write(folder: Path, body: Mapping[str, Any], name: str = "tokenizer.json", **format_: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(body, **{"ensure_ascii": False, **format_}), encoding="utf-8")
    return path


def write_texts(folder: Path, texts: Sequence[str], name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def texts_of(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(1, 30))) for _ in range(count)]


def refusal(call: Callable[..., Any], *values: Any, **kwargs: Any) -> str:
    with pytest.raises(DataError) as caught:
        call(*values, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Ids


@pytest.mark.parametrize("name", kinds())
def test_ids_are_the_packages_with_everything_switched_off(tmp_path: Path, name: str) -> None:
    body, texts = kinds()[name], texts_of(7, 200)
    tokenizer = HFTokenizer(write(tmp_path, body))
    source = write_texts(tmp_path, texts)
    backend = switched_off(body)
    ids = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    documents = [each for each in ids if each]
    store = build_store([source], tmp_path / "store", tokenizer, BARE)
    for corpus in (load_corpus(source, tokenizer, BARE), load_corpus(store.folder, tokenizer, BARE)):
        np.testing.assert_array_equal(corpus.ids, np.concatenate(documents))
        np.testing.assert_array_equal(np.diff(corpus.edges), [len(each) for each in documents])
    single = [tokenizer.encode(text).tolist() for text in texts[:20]]
    assert single == ids[:20]


switches = st.fixed_dictionaries(
    {
        "truncation": st.sampled_from([None, TRUNCATION, {**TRUNCATION, "max_length": 0}, {**TRUNCATION, "stride": 5}]),
        "padding": st.sampled_from([None, PADDING, {**PADDING, "strategy": {"Fixed": 1_000_000_000}}]),
    }
)


@settings(max_examples=40)
@given(switches, st.sampled_from([None, 0.3, 1.0]), st.sampled_from([None, 1, 2]), st.permutations(range(4)))
def test_files_that_differ_in_their_use_are_one_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, use: Body, dropout: float | None, indent: int | None, order: list[int]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    body = {**kinds()["byte-level"], **use}
    keys = list(body)
    body = {key: body[key] for key in [*(keys[k] for k in order), *keys[4:]]}
    body = with_dropout(body, dropout) if dropout else body
    body["added_tokens"] = [
        *body["added_tokens"],
        {**body["added_tokens"][0], "id": 320, "content": '"padding": {"dropout": 2'},
    ]
    plain = HFTokenizer(write(folder, without(body), "plain.json", indent=indent))
    tokenizer = HFTokenizer(path := write(folder, body, "t.json", indent=indent))
    assert tokenizer.identity == tokenizer.fingerprint == plain.fingerprint
    assert tokenizer.content == path.read_text(encoding="utf-8")
    ignored = {"truncation": use["truncation"], "padding": use["padding"], "dropout": dropout}
    remarks = "".join(tokenizer.remarks)
    assert [name for name in ignored if name in remarks] == [name for name, value in ignored.items() if value]
    text = "The quick brown fox jumps over the lazy dog"
    np.testing.assert_array_equal(tokenizer.encode(text), plain.encode(text))


def test_every_door_says_what_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, kinds()["all"])
    source = write_texts(tmp_path, texts_of(0, 400))
    line = f"tokenizer {path}: truncation (5), padding and dropout (0.4) are ignored"
    assert (
        main(["data", "build", str(source), "-o", str(tmp_path / "s"), "--tokenizer", str(path), "--workers", "1"]) == 0
    )
    assert line in capsys.readouterr().err.splitlines()
    config = load_config(None, [f"data.path={source}", f"data.tokenizer={path}"])
    assert next(data_remarks(load_dataset(config))) == line
    assert (tmp_path / "s" / "tokenizer.json").read_bytes() == path.read_bytes()


# Stores of older versions


def as_older(store: Store, tokenizer: HFTokenizer) -> None:
    """Make ``store.json`` what an older version wrote, whose name of a tokenizer was that of its whole file."""
    spec = {key: value for key, value in store.spec.items() if key not in ("bos", "sizes")}
    assert tokenizer.content is not None
    spec["tokenizer"] = tokenizer.recorded({"fingerprint": whole_file(tokenizer)}).fingerprint
    parts = [[part.documents, part.tokens, part.sha256] for part in store.parts]
    (store.folder / MANIFEST).write_text(_signed({"format": 1, **spec, "parts": parts}))
    (store.folder / SIZES).unlink(missing_ok=True)


def whole_file(tokenizer: HFTokenizer) -> str:
    assert tokenizer.content is not None
    return _digest(tokenizer.content)


@pytest.mark.parametrize("name", kinds())
def test_a_store_that_was_built_short_is_refused_and_others_stay_valid(tmp_path: Path, name: str) -> None:
    tokenizer = HFTokenizer(write(tmp_path, kinds()[name]))
    source = write_texts(tmp_path, texts_of(1, 30))
    store = build_store([source], tmp_path / "store", tokenizer, Reading(bos="none"))
    ids = np.array(load_corpus(store.folder, tokenizer).ids)
    as_older(store, tokenizer)
    if name in ("truncation", "padding", "dropout", "all"):
        for call in (
            load_corpus,
            lambda folder, tokenizer: build_store([source], folder, tokenizer, Reading(bos="none")),
        ):
            assert "built by an older version, which obeyed the" in refusal(call, store.folder, tokenizer)
        assert main(["data", "check", str(store.folder)]) == 2
        return
    assert main(["data", "check", str(store.folder)]) == 0
    corpus = load_corpus(store.folder, tokenizer)
    np.testing.assert_array_equal(corpus.ids, ids)
    assert corpus.bos is None and (corpus.fingerprint == store.fingerprint)
    counts = name in ("byte-level",)  # ids tell the bytes
    assert (corpus.bytes_in(0, len(ids), tokenizer) is not None) == counts
    assert any("no bits per byte" in remark for remark in corpus.remarks) != counts
    build_store([source], store.folder, tokenizer, Reading(bos="none"))  # is built already


def test_the_sizes_of_a_store_are_checked(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, kinds()["WordPiece"]))
    store = build_store([write_texts(tmp_path, texts_of(1, 30))], tmp_path / "store", tokenizer, BARE)
    content = bytearray((store.folder / SIZES).read_bytes())
    content[0] ^= 1
    (store.folder / SIZES).write_bytes(content)
    assert "piece 1 of 1" in refusal(load_corpus, store.folder, tokenizer)


# How documents begin and end

WORDS = ["[UNK]", "<END>", "<|endoftext|>", "<|im_end|>", "<s>", "<｜end▁of▁sentence｜>", "a", "b"]


def write_words(folder: Path, words: Sequence[str] = WORDS, beside: Mapping[str, Any] | None = None) -> Path:
    body = {**kinds()["WordLevel"], "post_processor": None}
    body["model"] = {"type": "WordLevel", "vocab": {word: k for k, word in enumerate(words)}, "unk_token": "[UNK]"}
    special_words = [word for word in words if not word.isalpha()]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    body["added_tokens"] = [{"id": words.index(word), "content": word, **plain} for word in special_words]
    for name, content in (beside or {}).items():
        write(folder, content, name)
    return write(folder, body)


SETTINGS, GENERATION, CONFIG = "tokenizer_config.json", "generation_config.json", "config.json"
END, TEXT_END, CHAT_END, BEGIN, DEEPSEEK = 1, 2, 3, 4, 5


@pytest.mark.parametrize(
    ("beside", "end", "place"),
    [
        ({}, TEXT_END, "by its name"),
        ({SETTINGS: {"eos_token": "<END>"}, GENERATION: {"eos_token_id": CHAT_END}}, END, SETTINGS),
        ({SETTINGS: {"eos_token": {"content": "<END>", "lstrip": False}}}, END, SETTINGS),
        ({"special_tokens_map.json": {"eos_token": {"content": "<END>"}}}, END, "special_tokens_map.json"),
        ({SETTINGS: {"eos_token": None}, GENERATION: {"eos_token_id": [CHAT_END, TEXT_END]}}, CHAT_END, GENERATION),
        ({SETTINGS: {"eos_token": "<none of it>"}, GENERATION: {"eos_token_id": 3}}, CHAT_END, GENERATION),
        ({GENERATION: {"eos_token_id": [99, -1, True, None, 1]}}, END, GENERATION),
        ({CONFIG: {"eos_token_id": END}}, END, CONFIG),
        ({CONFIG: {"eos_token_id": END}, GENERATION: {"eos_token_id": CHAT_END}}, CHAT_END, GENERATION),
        ({CONFIG: {"eos_token_id": 99}}, TEXT_END, "by its name"),
    ],
)
def test_the_files_beside_a_tokenizer_say_what_ends_documents(
    tmp_path: Path, beside: Mapping[str, Any], end: int, place: str
) -> None:
    tokenizer = HFTokenizer(write_words(tmp_path, beside=beside))
    corpus = load_corpus(write_texts(tmp_path, ["a b", "b"]), tokenizer)
    assert corpus.ids.tolist() == [6, 7, end, 7, end]
    assert f"documents end with {WORDS[end]!r} ({place})" in corpus.describe() and not corpus.remarks
    store = build_store([tmp_path / "a.jsonl"], tmp_path / "store", tokenizer, Reading())
    copied = HFTokenizer(store.folder / "tokenizer.json")
    assert copied.eos == end and load_corpus(store.folder, copied).ids.tolist() == corpus.ids.tolist()


def test_deepseeks_end_is_known_and_documents_without_one_are_told(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write_words(tmp_path, ["[UNK]", WORDS[DEEPSEEK], "a", "b"]))
    assert load_corpus(write_texts(tmp_path, ["a b", "b"]), tokenizer).ids.tolist() == [2, 3, 1, 3, 1]
    tokenizer = HFTokenizer(write_words(tmp_path, ["[UNK]", "<END>", "a", "b"]))
    line = "documents run together: data.eos names their end, or none"
    notes: list[str] = []
    build_store([tmp_path / "a.jsonl"], tmp_path / "store", tokenizer, Reading(), note=notes.append)
    assert line in notes
    for texts, reading, remarks in (
        (["a b", "b"], Reading(), (line,)),
        (["a b"], Reading(), ()),
        (["a b", "b"], Reading(eos="none"), ()),
        (["a b", "b"], Reading(eos="<END>"), ()),
    ):
        assert load_corpus(write_texts(tmp_path, texts), tokenizer, reading).remarks == remarks


@pytest.mark.parametrize(
    ("settings", "post", "begin"),
    [
        ({}, False, None),
        ({"bos_token": "<s>"}, False, None),
        ({"bos_token": "<s>", "add_bos_token": True}, False, BEGIN),
        ({"bos_token": {"content": "<s>"}, "add_bos_token": True}, False, BEGIN),
        ({"bos_token": "<s>", "add_bos_token": False}, True, None),
        ({}, True, BEGIN),
        ({"add_bos_token": None}, True, BEGIN),
    ],
)
def test_documents_begin_as_the_files_of_the_tokenizer_say(
    tmp_path: Path, settings: Mapping[str, Any], post: bool, begin: int | None
) -> None:
    path = write_words(tmp_path, beside={SETTINGS: {"eos_token": "<END>", **settings}})
    if post:
        write(tmp_path, template(json.loads(path.read_text(encoding="utf-8"))))
    tokenizer = HFTokenizer(path)
    before = [] if begin is None else [begin]
    source = write_texts(tmp_path, ["a b", "<s> b"])  # the second says it itself
    corpus = load_corpus(source, tokenizer)
    assert corpus.ids.tolist() == [*before, 6, 7, END, BEGIN, 7, END]
    assert corpus.edges.tolist() == [0, 3 + len(before), 6 + len(before)]
    assert ("documents begin with '<s>' and end with '<END>'" in corpus.describe()) == (begin is not None)
    assert load_corpus(source, tokenizer, Reading(bos="none")).ids.tolist() == [6, 7, END, BEGIN, 7, END]
    assert load_corpus(source, tokenizer, Reading(bos="[UNK]")).ids.tolist() == [0, 6, 7, END, 0, BEGIN, 7, END]
    store = build_store([source], tmp_path / "store", tokenizer, Reading())
    assert load_corpus(store.folder, tokenizer).ids.tolist() == corpus.ids.tolist()
    if begin is not None:
        assert "data.bos='<s>'" in refusal(load_corpus, store.folder, tokenizer, Reading(bos="none"))
    assert "data.eos is none" in refusal(load_corpus, store.folder, tokenizer, Reading(eos="none"))
    assert "data.bos=<x>" in refusal(load_corpus, source, tokenizer, Reading(bos="<x>"))
    assert "a store of other bos" in refusal(build_store, [source], store.folder, tokenizer, Reading(bos="[UNK]"))


def test_several_tokens_at_the_beginning_are_told(tmp_path: Path) -> None:
    path = write_words(tmp_path)
    body = template(json.loads(path.read_text(encoding="utf-8")))
    body["post_processor"]["single"].insert(0, body["post_processor"]["single"][0])
    tokenizer = HFTokenizer(write(tmp_path, body))
    assert tokenizer.bos is None and "data.bos names one" in tokenizer.remarks[0]


@pytest.mark.parametrize("bos", ["auto", "<s>"])
def test_chats_begin_once(tmp_path: Path, bos: str) -> None:
    pytest.importorskip("jinja2")
    written = "{{ bos_token }} " if bos == "auto" else ""
    text = written + "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"
    settings = {"bos_token": "<s>", "add_bos_token": True, "chat_template": text}
    tokenizer = HFTokenizer(write_words(tmp_path, beside={SETTINGS: settings}))
    chat = [{"role": "assistant", "content": "a b"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    corpus = load_corpus(tmp_path / "chat.jsonl", tokenizer, Reading(format="chat", bos=bos))
    assert corpus.ids.tolist() == [BEGIN, 6, 7]
    assert corpus.answers is not None and corpus.answers.tolist() == [0, 1, 1]


def test_a_run_goes_on_with_the_ends_that_it_began_with(tmp_path: Path) -> None:
    """Also one of an older version, which knew names alone."""
    path = write_words(tmp_path)
    began = stored_tokenizer(HFTokenizer(path))
    settings = {SETTINGS: {"eos_token": "<END>", "bos_token": "<s>", "add_bos_token": True}}
    now = HFTokenizer(write_words(tmp_path, beside=settings))
    assert (now.bos, now.eos) == (BEGIN, END)
    older = {key: value for key, value in began.items() if key not in ("bos", "eos")}
    for stored in (began, older):
        for tokenizer in (checkpoint_tokenizer(stored, str(path)), continued_tokenizer(stored, str(path))):
            assert (tokenizer.bos, tokenizer.eos) == (None, TEXT_END)
    record = stored_tokenizer(now)
    (tmp_path / SETTINGS).unlink()
    assert (checkpoint_tokenizer(record, str(path)).bos, continued_tokenizer(record, str(path)).eos) == (BEGIN, END)
    other = continued_tokenizer({**record, "fingerprint": "hf:0"}, str(path))  # the file has changed
    assert (other.bos, other.eos) == (None, TEXT_END)
    damaged = checkpoint_tokenizer({**record, "bos": -3, "eos": "x"}, str(path))
    assert (damaged.bos, damaged.eos) == (None, None)


def test_a_run_on_arrays_goes_on_under_the_old_name_of_its_tokenizer(tmp_path: Path) -> None:
    """Truncation changed nothing of its ids."""
    path = write(tmp_path, kinds()["truncation"])
    np.save(tmp_path / "ids.npy", np.arange(5000) % 250)
    tokenizer = HFTokenizer(path)
    settings = load_config(None, [f"data.path={tmp_path / 'ids.npy'}", f"data.tokenizer={path}"])
    older = {"name": str(path), "fingerprint": whole_file(tokenizer), "json": tokenizer.content}
    tokenizers = [continued_tokenizer(older, str(path)), checkpoint_tokenizer(older, str(path))]
    assert [each.fingerprint for each in tokenizers] == [older["fingerprint"]] * 2
    corpus = load_corpus(settings.data.path, tokenizer)
    fingerprint = TokenDataset.split(corpus, tokenizers[0]).fingerprint
    state = load_dataset(settings).batches(0, 1, 8).state_at(0)
    prepared = SimpleNamespace(config=settings, dataset=load_dataset(settings))
    with pytest.raises(DataError, match=r"older versions obeyed the truncation \(5\)"):
        resume._batches(prepared, replace(state, fingerprint="of other tokens"))  # type: ignore[arg-type]
    assert load_dataset(settings, tokenizers[1]).fingerprint == fingerprint != load_dataset(settings).fingerprint


def test_prompts_begin_as_documents_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {SETTINGS: {"eos_token": "<END>", "bos_token": "<s>", "add_bos_token": True}}
    tokenizer = HFTokenizer(write_words(tmp_path, beside=settings))
    model = GPT(vocab_size=8, seq_len=8, d_model=8, num_layers=1, num_heads=1)
    trained = evaluate.Trained(TrainConfig(), model, init_params(model, 0), tokenizer, 0)
    prompts: list[list[int]] = []
    monkeypatch.setattr(evaluate, "_continue", lambda _, ids, *rest: prompts.append(ids) or iter(()))
    for prompt in ("a b", "<s> a", ""):
        evaluate.generate(trained, prompt, 1)
    trained = replace(trained, tokenizer=tokenizer.with_ends(None, END))
    for prompt in ("a b", ""):
        evaluate.generate(trained, prompt, 1)
    assert prompts == [[BEGIN, 6, 7], [BEGIN, 6], [BEGIN], [6, 7], [END]]


# Bytes


def held_out_bytes(corpus: Corpus, data: TokenDataset, texts: Sequence[str]) -> int:
    documents = range(len(texts))
    spans = data.held_out
    inside = [k for k in documents if any(a <= corpus.edges[k] and corpus.edges[k + 1] <= b for a, b in spans)]
    return sum(len(texts[k].encode()) for k in inside)


@pytest.mark.parametrize("name", kinds())
def test_bytes_are_those_of_the_text_that_was_read(tmp_path: Path, name: str) -> None:
    tokenizer = HFTokenizer(write(tmp_path, kinds()[name]))
    texts = [text for text in texts_of(3, 150) if len(tokenizer.encode(text))]
    source = write_texts(tmp_path, texts)
    store = build_store([source], tmp_path / "store", tokenizer, Reading())
    for corpus in (load_corpus(source, tokenizer), load_corpus(store.folder, tokenizer)):
        total = sum(len(text.encode()) for text in texts)
        assert corpus.bytes_in(0, len(corpus.ids), tokenizer) == pytest.approx(total, abs=1e-6)
        rng = random.Random(0)
        cuts = sorted({0, len(corpus.ids), *rng.sample(range(len(corpus.ids)), 20)})
        parts = [corpus.bytes_in(a, b, tokenizer) for a, b in itertools.pairwise(cuts)]
        assert sum(parts) == pytest.approx(total, rel=1e-9) and min(parts) >= 0
        data = TokenDataset.split(corpus, tokenizer, 0.3, "files")
        targets = sum(stop - start - 1 for start, stop in data.held_out)
        first = sum(corpus.bytes_in(start, start + 1, tokenizer) for start, _ in data.held_out)
        bytes_per_token = data.bytes_per_token()
        assert bytes_per_token is not None
        assert bytes_per_token * targets + first == pytest.approx(held_out_bytes(corpus, data, texts), rel=1e-9)


def test_a_cut_document_is_divided_as_its_tokens_are(tmp_path: Path) -> None:
    """One file of text, whose second half has other characters than its first."""
    text = "The quick brown fox. " * 300 + "日本🙂 " * 700
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for name in ("byte-level", "normalizer", "byte fallback"):
        tokenizer = HFTokenizer(write(tmp_path, kinds()[name]))
        corpus = load_corpus(tmp_path / "a.txt", tokenizer)
        ids, places = tokenizer.encode_with_places(text)
        half = len(ids) // 2
        num_bytes = corpus.bytes_in(0, half, tokenizer)
        assert num_bytes == pytest.approx(len(text[: places[half]].encode()), rel=2e-3), name


def test_a_document_mask_has_no_first_tokens_among_its_targets(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write_words(tmp_path, beside={SETTINGS: {"bos_token": "<s>", "add_bos_token": True}}))
    corpus = load_corpus(write_texts(tmp_path, ["a b"] * 100), tokenizer)  # <s> a b <|endoftext|>
    data = TokenDataset.split(corpus, tokenizer, 0, mask="document")
    assert data.bytes_per_token() == pytest.approx(1.0) and load_corpus(tmp_path / "a.jsonl", tokenizer).bos == BEGIN


def test_arrays_count_bytes_only_where_ids_tell_them(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(200) % 60 + 10)
    for name, expected in (("byte-level", True), ("byte fallback", False), ("lossy", False), ("normalizer", False)):
        tokenizer = HFTokenizer(write(tmp_path, kinds()[name]))
        data = TokenDataset.split(load_corpus(tmp_path / "ids.npy", tokenizer), tokenizer, 0)
        assert (data.bytes_per_token() is not None) == expected, name


def test_text_that_does_not_survive_is_told_once(tmp_path: Path) -> None:
    texts = ["naïve café", "the dog"] * 3
    for name, dropped in (("lossy", True), ("WordLevel", False), ("byte-level", None), ("byte fallback", None)):
        tokenizer = HFTokenizer(write(tmp_path, kinds()[name]))
        source = write_texts(tmp_path, ["zigzag Q", *texts])
        remarks = load_corpus(source, tokenizer).remarks
        assert len(remarks) == (dropped is not None), name
        assert ("characters are dropped" in "".join(remarks)) == bool(dropped)
        notes: list[str] = []
        build_store([source], tmp_path / name.replace(" ", "-"), tokenizer, Reading(), note=notes.append)
        assert [line for line in notes if "does not survive" in line] == list(remarks)
        (tmp_path / "a.txt").write_text("zigzag Q naïve", encoding="utf-8")
        assert len(load_corpus(tmp_path / "a.txt", tokenizer).remarks) == (dropped is not None)


# Files that can't encode


def model(kind: str, vocab: Any, **fields: Any) -> Body:
    plain = {"WordPiece": {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}}.get(kind, {})
    unknown = {"unk_id": 0, "byte_fallback": False} if kind == "Unigram" else {"unk_token": "[UNK]"}
    return {
        **without(kinds()["WordLevel"]),
        "model": {"type": kind, "vocab": vocab, **unknown, **plain, **fields},
        "added_tokens": [],
    }


def merges(vocab: Sequence[str], *pairs: str, **fields: Any) -> Body:
    body = without(kinds()["byte-level"])
    body["model"] |= {
        "vocab": {word: k for k, word in enumerate(vocab)},
        "merges": [pair.split() for pair in pairs],
        **fields,
    }
    return {**body, "pre_tokenizer": None, "added_tokens": []}


def byte_level(**parts: Any) -> Body:
    return {**without(kinds()["byte-level"]), **parts}


def charsmap(content: str) -> Body:
    return byte_level(normalizer={"type": "Precompiled", "precompiled_charsmap": content})


def replacing(pattern: Mapping[str, str], content: str) -> Body:
    return {"type": "Replace", "pattern": pattern, "content": content}


BAD: Mapping[str, Body] = {
    "WordLevel without its unknown": model("WordLevel", {"dog": 0}),
    "WordPiece without its unknown": model("WordPiece", {"dog": 0}),
    "BPE without its unknown": merges("ab", unk_token="[UNK]"),
    "Unigram without one": model("Unigram", [["dog", -1.0]], unk_id=None),
    "unknown out of range": model("Unigram", [["dog", -1.0]], unk_id=7),
    "prefix longer than a token": merges(["a", "b", "ab"], "a b", continuing_subword_prefix="######"),
    "prefix inside a character": merges(["a", "é", "aé"], "a é", continuing_subword_prefix="x"),
    "merge out of nothing": merges(["a", "b"], "a b"),
    "charsmap that asks for everything": charsmap("//////////8="),
    "charsmap of nothing": charsmap(""),
    "charsmap too short": charsmap("AAA="),
    "charsmap without a trie": charsmap("AAAAAHg="),
    "charsmap in no base64": charsmap("!!!"),
    "regex of no sense": byte_level(normalizer=replacing({"Regex": "("}, "")),
    "regex without end": byte_level(normalizer=replacing({"Regex": "(x+x+)+y"}, "z")),
    "regex of nothing": byte_level(normalizer=replacing({"Regex": ""}, "z")),
    "text that grows": byte_level(
        normalizer={"type": "Sequence", "normalizers": [replacing({"Regex": "."}, "z" * 100)] * 5}
    ),
    "pieces of no length": byte_level(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "nothing before": byte_level(normalizer={"type": "Prepend", "prepend": ""}),
    "ids far apart": model("WordLevel", {"[UNK]": 0, "x": 3_000_000_000}),
    "ids at the end": model("WordLevel", {"[UNK]": 0, "x": 4_294_967_295}),
    "words without end": model("WordPiece", {"[UNK]": 0, "x": 1}, max_input_chars_per_word=10**9),
    "no vocabulary": model("WordLevel", {}),
    "dropout of 2 and no model": {**byte_level(), "model": {"type": "BPE", "dropout": 2.0}},
    "another version": byte_level(version="9"),
    "a list": [],  # type: ignore[dict-item]
    "half a surrogate pair": model("WordLevel", {"[UNK]": 0, "\ud800": 1}),
    "model of another kind": model("WordLevel", [["a", 1.0]]),
}


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide a probe that runs out of time sooner; what it found is forgotten afterwards."""
    probe = tokenizers.check_survives  # which the test may replace
    monkeypatch.setattr(tokenizers, "_PROBE_S", 3.0)
    yield
    probe.cache_clear()


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.usefixtures("quick_probe")
def test_a_tokenizer_that_can_not_encode_gets_one_line(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, BAD[kind], ensure_ascii=True)
    source = write_texts(tmp_path, ["", "x" * 60 + " Qß dog"])
    command = ["data", "build", str(source), "-o", str(tmp_path / "store"), "--tokenizer", str(path), "--workers", "1"]
    assert main(command) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxpipe: ") and str(path) in line
    if "can't encode" in line:
        assert f"{source}, line 2:" in line


@pytest.mark.usefixtures("quick_probe")
def test_what_ends_a_child_is_refused_and_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, BAD["prefix inside a character"])
    assert "ends the process" in refusal(HFTokenizer, path)
    checks: list[str] = []
    monkeypatch.setattr("jaxpipe.train.corpora.tokenizers.check_survives", checks.append)
    for body in kinds().values():
        HFTokenizer(write(tmp_path, body))
    assert not checks  # none of the usual kinds costs a process


def test_a_process_that_tokenises_names_the_record_too(tmp_path: Path) -> None:
    """A panic is no Exception, and can't be sent between processes."""
    path = write(tmp_path, BAD["regex of nothing"])
    source = write_texts(tmp_path, ["", "dog"])
    message = refusal(build_store, [source], tmp_path / "store", HFTokenizer(path), Reading(), workers=2)
    assert f"{source}, line 2: tokenizer {path}: can't encode 'dog'" in message


class Deadly(ByteTokenizer):
    """Ends its process."""

    def encode_all(self, texts: Sequence[str]) -> Sequence[Any]:
        os._exit(9)


def test_a_process_that_dies_is_told_with_its_file(tmp_path: Path) -> None:
    source = write_texts(tmp_path, ["dog"])
    message = refusal(build_store, [source], tmp_path / "store", Deadly(), Reading(), workers=2)
    assert f"data {source}: a process" in message and "the tokenizer byte" in message


def test_chats_and_files_name_what_can_not_be_encoded(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"
    write(tmp_path, {"chat_template": text}, SETTINGS)
    tokenizer = HFTokenizer(write(tmp_path, BAD["WordLevel without its unknown"]))
    chats = [[{"role": "assistant", "content": content}] for content in ("dog", "cat")]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    message = refusal(load_corpus, tmp_path / "chat.jsonl", tokenizer, Reading(format="chat"))
    assert f"chat.jsonl, line 2: tokenizer {tokenizer.name}: can't encode" in message
    (tmp_path / "a.txt").write_text("cat")
    assert f"data {tmp_path / 'a.txt'}: tokenizer {tokenizer.name}: can't" in refusal(
        load_corpus, tmp_path / "a.txt", tokenizer
    )


def test_ids_that_can_not_be_decoded_are_a_line(tmp_path: Path) -> None:
    strip = {"type": "Strip", "content": "e", "start": 10**6, "stop": 10**6}
    tokenizer = HFTokenizer(write(tmp_path, {**kinds()["normalizer"], "decoder": strip}))
    assert "can't decode" in refusal(tokenizer.decode, tokenizer.encode("zeq"))
    corpus = load_corpus(write_texts(tmp_path, ["zeq"]), tokenizer)
    assert len(corpus.ids) and "can't decode" in corpus.remarks[0]


def test_an_encoder_makes_the_same_in_another_process(tmp_path: Path) -> None:
    """The encoder goes there by pickle."""
    for body in kinds().values():
        encoder = Encoder.of(HFTokenizer(write(tmp_path, body)), Reading())
        copy = pickle.loads(pickle.dumps(encoder))
        text = "The quick brown fox, naïve café 日本"
        np.testing.assert_array_equal(copy.tokenizer.encode(text), encoder.tokenizer.encode(text))
        assert copy.tokenizer.identity == encoder.tokenizer.identity and copy.eos == encoder.eos


def test_resume_and_eval_take_the_ends_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file beside the tokenizer says another end now: the run goes on, on the same tokens."""
    path = write_words(tmp_path, ["[UNK]", "<END>", "a", "b"])
    source = write_texts(tmp_path, ["a b a b", "b"] * 60)
    overrides = (
        f"data.tokenizer={path}", "pipeline.ranks=1", "run.checkpoint_every=1", "run.eval_every=0", "data.seq_len=8",
        "model.options.num_layers=1", "pipeline.microbatches=1", "run.batch=2",
    )  # fmt: skip
    _, printed = run(config(source, tmp_path / "run", *overrides, "run.steps=1"))
    assert "documents run together" in printed
    write(tmp_path, {"eos_token": "<END>"}, SETTINGS)
    _, printed = run(config(source, tmp_path / "run", *overrides, "run.steps=2"))
    assert "resumed from step 1" in printed and "documents run together" in printed
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert "documents run together" in capsys.readouterr().err
    assert "end with '<END>'" in load_dataset(config(source, tmp_path / "new", *overrides)).describe()
