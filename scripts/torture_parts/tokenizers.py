"""R18: tokenizer files. Their ids are the package's with everything switched off; damaged ones get one line."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from torture_parts.trial import Bench, Case, FailedError, Trial, ask

Body = dict[str, Any]
_CHARACTERS = ["a", "b", "c", "d", "e", "1", " ", ".", "é", "ß", "日", "🙂", "\u0301", "\n", "▁", "#"]
_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
_NORMALIZERS: Sequence[Body | None] = (
    None,
    None,
    {"type": "NFC"},
    {"type": "NFKC"},
    {"type": "Lowercase"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "StripAccents"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
)
_SPLITS: Sequence[Body | None] = (
    None,
    {"type": "Whitespace"},
    {"type": "WhitespaceSplit"},
    {"type": "BertPreTokenizer"},
    {"type": "Digits", "individual_digits": True},
    {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "Split", "pattern": {"Regex": r"\s+|\w+"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
    _METASPACE,
)
_NAMES = [
    "BPE", "Unigram", "WordLevel", "WordPiece", "ByteLevel", "Sequence", "Fuse", "Strip", "Replace", "Precompiled", "Split",
]  # fmt: skip
_ODD: Sequence[Any] = (
    *(None, True, 0, -1, 1, 2**31, 2**32 - 1, 2**64, 1e308, -0.5, [], {}, [None], ["a", "b"]),
    *("", "\0", "a", "é", "<unk>", "x" * 3000, *_NAMES),
)


def files(bench: Bench) -> Iterator[Case]:
    """R18."""
    for _ in range(bench.count(1000, 20)):
        yield Case("ids of a file", _ids)
    for _ in range(bench.count(1000, 20)):
        yield Case("damaged file", _damaged)


@cache
def _alphabet() -> tuple[str, ...]:
    from tokenizers import pre_tokenizers

    return tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))


def _vocabulary(rng: random.Random, characters: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Tokens and the merges that make them."""
    tokens, merges = dict.fromkeys([*_SPECIAL, *characters]), []
    for _ in range(rng.randint(0, 40)):
        pair = rng.choices([token for token in tokens if token not in _SPECIAL], k=2)
        if "".join(pair) not in tokens and len("".join(pair)) < 12:
            tokens["".join(pair)] = None
            merges.append(" ".join(pair))
    return {token: number for number, token in enumerate(tokens)}, merges


def _body(rng: random.Random) -> Body:
    """A file that the package reads, of a random kind, with random settings of its use."""
    kind = rng.choice(["byte-level", "BPE", "BPE", "Unigram", "WordLevel", "WordPiece"])
    byte_level = kind == "byte-level"
    characters = _alphabet() if byte_level else [c for c in _CHARACTERS if c not in " \n" and rng.random() < 0.8]
    vocabulary, merges = _vocabulary(rng, characters)
    fallback = kind in ("BPE", "Unigram") and rng.random() < 0.5
    if fallback:
        vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    model: Body = {"type": "BPE" if byte_level else kind, "vocab": vocabulary, "unk_token": "<unk>"}
    if model["type"] == "BPE":
        pairs = [pair for pair in merges if len(pair.split(" ")) == 2]
        model |= {"merges": pairs, "byte_fallback": fallback, "fuse_unk": rng.random() < 0.5}
        model["unk_token"] = rng.choice([None, "<unk>"])
        model["dropout"] = rng.choice([None, None, 0.0, 0.5])
    elif kind == "Unigram":
        model = {
            "type": kind,
            "unk_id": 0,
            "byte_fallback": fallback,
            "vocab": [[t, -rng.random() * 9] for t in vocabulary],
        }
    elif kind == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": rng.choice([5, 100])}
        model["vocab"] |= {f"##{c}": len(vocabulary) + k for k, c in enumerate(characters)}
    plain = {"single_word": False, "lstrip": rng.random() < 0.1, "rstrip": rng.random() < 0.1, "normalized": False}
    added = [{"id": k, "content": token, **plain, "special": True} for k, token in enumerate(_SPECIAL)]
    by_byte = {
        "type": "ByteLevel",
        "add_prefix_space": rng.random() < 0.3,
        "trim_offsets": True,
        "use_regex": rng.random() < 0.7,
    }
    steps = [step for step in rng.choices(_SPLITS, k=rng.randint(0, 2)) if step] + [by_byte] * byte_level
    normalizer = rng.choices(_NORMALIZERS, k=rng.randint(1, 2))
    post = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    limit = {
        "direction": rng.choice(["Left", "Right"]),
        "max_length": rng.choice([0, 1, 7]),
        "strategy": "LongestFirst",
    }
    length = rng.choice(["BatchLongest", {"Fixed": rng.choice([0, 9, 2**30])}])
    padding = {"strategy": length, "direction": "Right", "pad_to_multiple_of": rng.choice([None, 8]), "pad_id": 3}
    return {
        "version": "1.0",
        "truncation": rng.choice([None, {**limit, "stride": rng.choice([0, 9])}]),
        "padding": rng.choice([None, {**padding, "pad_type_id": 0, "pad_token": "<pad>"}]),
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [step for step in normalizer if step]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if steps else None,
        "post_processor": rng.choice(
            [None, {"type": "TemplateProcessing", "single": post, "pair": [], "special_tokens": special}]
        ),
        "decoder": {**by_byte, "use_regex": True} if byte_level else None,
        "model": model,
    }


def _texts(rng: random.Random) -> list[str]:
    return ["".join(rng.choices([*_CHARACTERS, " ", "</s>"], k=rng.randint(1, 60))) for _ in range(rng.randint(1, 12))]


def _write(folder: Path, body: Any, texts: Sequence[str], rng: random.Random) -> tuple[Path, Path]:
    path, source = folder / "tokenizer.json", folder / "a.jsonl"
    form = rng.choice([{}, {"indent": 2}, {"separators": (",", ":")}])
    path.write_text(json.dumps(body, ensure_ascii=rng.random() < 0.5, **form), encoding="utf-8")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path, source


def _ids(trial: Trial) -> None:
    """One file, its documents and their bytes, by the data of a run and by a store."""
    from jaxpipe.errors import DataError
    from jaxpipe.train.corpora.corpus import load_corpus
    from jaxpipe.train.corpora.encoding import Reading
    from jaxpipe.train.corpora.store import build_store
    from jaxpipe.train.corpora.tokenizers import load_tokenizer

    body, texts = _body(trial.rng), _texts(trial.rng)
    path, source = _write(trial.folder, body, texts, trial.rng)
    try:
        backend = _switched_off(body)
        encodings = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise FailedError(f"the package refuses what was to be valid ({error}): {path.read_text()[:2000]}") from error
    documents = [ids for ids in encodings if ids]
    size = sum(len(text.encode()) for text, ids in zip(texts, encodings, strict=True) if ids)
    tokenizer, reading = load_tokenizer(str(path)), Reading(bos="none", eos="none")
    if not documents:
        try:
            load_corpus(source, tokenizer, reading)
        except DataError:
            return
        raise FailedError("no token, and no word of it")
    store = build_store([source], trial.folder / "store", tokenizer, reading)
    for place in (source, store.folder):
        corpus = load_corpus(place, tokenizer, reading)
        if corpus.ids.tolist() != [number for ids in documents for number in ids]:
            raise FailedError(f"other ids from {place.name}: {body}; {texts}")
        cut = trial.rng.randrange(len(corpus.ids) + 1)
        parts = [corpus.bytes_in(0, cut, tokenizer), corpus.bytes_in(cut, len(corpus.ids), tokenizer)]
        if not np.isclose(sum(part or 0.0 for part in parts), size):
            raise FailedError(f"{parts} bytes from {place.name} for {size}: {body}; {texts}")
    plain = copy.deepcopy(body) | {"truncation": None, "padding": None}
    if plain["model"].get("dropout"):
        plain["model"]["dropout"] = None
    form = random.Random(0)
    names = []
    for each in (body, plain):
        form.seed(0)
        names.append(load_tokenizer(str(_write(trial.folder, each, texts, form)[0])).identity)
    if names[0] != names[1]:
        raise FailedError(f"two names of one tokenizer: {body}")


def _switched_off(body: Body) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(json.dumps(body))
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    if body["model"]["type"] == "BPE":
        backend.model.dropout = None
    return backend


def _damaged(trial: Trial) -> None:
    """A file of which one to three values are other ones."""
    rng = trial.rng
    body = _body(rng)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(_places(body)))
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(_ODD))
    path, source = _write(trial.folder, body, ["", *_texts(rng)], rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ask(
            [
                "data",
                "build",
                str(source),
                "-o",
                str(trial.folder / "store"),
                "--tokenizer",
                str(path),
                "--workers",
                "1",
            ]
        )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return paths to values in a file; of a long list or table only a few."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys[:24]:
        yield value, key
        yield from _places(value[key])
