"""Tokenisers, corpora, the split, the order of the data, and one clear line for each kind of unusable input."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from jaxpipe.errors import DataError
from jaxpipe.train.corpora.corpus import Corpus, fingerprint_ids, load_corpus
from jaxpipe.train.corpora.encoding import Reading
from jaxpipe.train.corpora.tokenizers import ByteTokenizer, HFTokenizer, IdTokenizer, Tokenizer, load_tokenizer
from jaxpipe.train.data import DataState, Permutation, TokenDataset, Windows, mix

BYTES = ByteTokenizer()
WORDS = ["[UNK]", "the", "cat", "sat", "on", "mat", "."]


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the message of the DataError that ``call`` raises; always one line."""
    with pytest.raises(DataError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message and "\n" not in message and message == message.strip()
    return message


def numbered(n: int, documents: tuple[int, ...] = ()) -> Corpus:
    """Return the ids 0 … n-1, so that an id is its position; documents of the given sizes."""
    ids = np.arange(n, dtype=np.int32)
    edges = np.cumsum([0, *(documents or (n,))])
    names = tuple(f"d{i}" for i in range(len(edges) - 1))
    return Corpus("numbers", ids, edges, names, (), fingerprint_ids(ids))


def dataset(n: int, holdout: float = 0.1, **kwargs: Any) -> TokenDataset:
    return TokenDataset.split(numbered(n), IdTokenizer(max(n, 1)), holdout, **kwargs)


@pytest.fixture(scope="module")
def words_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


def test_data_needs_no_jax() -> None:
    """Cutting and counting text, and reading a config, must not wait for JAX to start."""
    modules = (
        "config",
        "data",
        "metrics",
        *(f"corpora.{x}" for x in ("tokenizers", "corpus", "ngram")),
    )
    imports = "; ".join(f"import jaxpipe.train.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"{imports}; import sys; assert 'jax' not in sys.modules"], check=True)


# Tokenisers


@given(st.binary(max_size=200))
def test_any_bytes_survive_the_byte_tokeniser(content: bytes) -> None:
    text = content.decode("utf-8", "surrogateescape")
    ids = BYTES.encode(text)
    assert ids.tolist() == list(content)
    assert ids.dtype == np.uint8
    assert BYTES.decode(ids) == text


def test_a_hugging_face_tokeniser_encodes_and_decodes(words_json: Path) -> None:
    tokenizer = load_tokenizer(str(words_json))
    ids = tokenizer.encode("the cat sat on the mat . dog")
    assert ids.tolist() == [1, 2, 3, 4, 1, 5, 6, 0]
    assert tokenizer.vocab_size == len(WORDS)
    assert tokenizer.decode(ids[:3]) == "the cat sat"
    assert tokenizer.fingerprint == HFTokenizer(words_json).fingerprint != BYTES.fingerprint


def test_ids_without_text() -> None:
    tokenizer = load_tokenizer("ids:50257")
    assert (tokenizer.vocab_size, tokenizer.decode([5, 50256])) == (50257, "5 50256")
    assert "no text to encode" in refusal(tokenizer.encode, "x")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("bytes", "use byte, ids:N, or the path of a tokenizer.json"),
        ("ids:0", "write ids:N"),
        ("ids:many", "write ids:N"),
        ("absent/tokenizer.json", "can't be read (No such file or directory)"),
    ],
)
def test_unknown_tokenisers_are_refused(spec: str, expected: str) -> None:
    assert expected in refusal(load_tokenizer, spec)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe", b'{"model": {"type": "Nope"}}'])
def test_files_that_are_no_tokeniser_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert f"tokenizer {path}: not a Hugging Face tokenizer.json" in refusal(load_tokenizer, str(path))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, words_json: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not there
    assert "pip install tokenizers" in refusal(HFTokenizer, words_json)


@pytest.mark.parametrize("ids", [[-1], [3, 256]])
def test_ids_outside_the_vocabulary_do_not_decode(ids: list[int]) -> None:
    assert "not in the vocabulary of tokenizer byte (0 to 255)" in refusal(BYTES.decode, ids)


# Corpora


def test_a_text_file_is_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xc3\xa9 \xff")  # the last byte is not UTF-8
    corpus = load_corpus(path, BYTES)
    assert bytes(corpus.ids.tolist()) == b"caf\xc3\xa9 \xff"
    assert (corpus.names, corpus.edges.tolist()) == (("a.txt",), [0, 7])


def test_a_directory_is_its_files_in_sorted_order(tmp_path: Path) -> None:
    for name, text in {
        "b.txt": "BB",
        "a/z.txt": "AZ",
        "a/c.md": "AC",
        "a.txt": "A",
        "n.log": "NO",
        ".h/h.txt": "NO",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = load_corpus(tmp_path, BYTES)
    assert corpus.names == ("a/c.md", "a/z.txt", "a.txt", "b.txt")
    assert bytes(corpus.ids.tolist()) == b"ACAZABB"
    assert bytes(load_corpus(tmp_path, BYTES, Reading(suffixes=(".log",))).ids.tolist()) == b"NO"


def test_unusable_files_of_a_directory_are_reported(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"x\0y")
    (tmp_path / "empty.txt").write_text("")
    corpus = load_corpus(tmp_path, BYTES)
    assert bytes(corpus.ids.tolist()) == b"good"
    assert len(corpus.skipped) == 1
    assert "bad.txt: binary, not text (a zero byte at 1)" in corpus.skipped[0]
    assert "1 files skipped" in corpus.describe()


def test_files_that_can_not_be_read_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "closed.txt").write_text("closed")
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "closed.txt":  # chmod would not stop root
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert "closed.txt: can't be read (Permission denied)" in load_corpus(tmp_path, BYTES).skipped[0]
    assert "can't be read (Permission denied)" in refusal(load_corpus, tmp_path / "closed.txt", BYTES)


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus("stdlib", BYTES)


def test_the_standard_library_is_megabytes_of_sorted_sources(stdlib: Corpus) -> None:
    names = list(stdlib.names or ())
    assert len(stdlib.ids) > 5_000_000
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not any({"site-packages", "test", "tests"}.intersection(name.split("/")) for name in names)
    at = names.index("os.py")
    source = Path(sysconfig.get_path("stdlib"), "os.py").read_bytes()
    assert stdlib.ids[slice(*stdlib.edges[at : at + 2])].tobytes() == source


def test_the_standard_library_splits_and_batches(stdlib: Corpus) -> None:
    data = TokenDataset.split(stdlib, BYTES)
    assert data.held_out_tokens / len(stdlib.ids) == pytest.approx(0.05, rel=0.01)
    batch = data.batches(seed=0, batch=4, seq_len=128).batch_at(10_000)
    assert BYTES.decode(batch["tokens"][0])[1:] == BYTES.decode(batch["targets"][0])[:-1]
    assert data.bytes_per_token() == 1.0


@pytest.mark.parametrize("dtype", ["uint8", "uint16", ">u4", "int64"])
def test_arrays_of_ids_load_from_npy_and_npz(tmp_path: Path, dtype: str) -> None:
    ids = np.arange(100).astype(dtype)
    np.save(tmp_path / "a.npy", ids)
    np.savez(tmp_path / "a.npz", ids)
    np.savez(tmp_path / "b.npz", ids=ids, other=ids[:3])
    corpora = [load_corpus(tmp_path / name, IdTokenizer(100)) for name in ("a.npy", "a.npz", "b.npz")]
    assert isinstance(corpora[0].ids, np.memmap)
    for corpus in corpora:
        assert corpus.ids.tolist() == list(range(100))
        assert corpus.fingerprint == corpora[0].fingerprint, "the dtype plays no part"
        batch = TokenDataset.split(corpus, IdTokenizer(100)).batches(0, 2, 8).batch_at(0)
        assert batch["tokens"].dtype == np.int32


def test_the_fingerprint_of_a_large_array_depends_on_length_and_content() -> None:
    ids = np.zeros((1 << 24) + 5, dtype=np.uint8)
    first = fingerprint_ids(ids)
    assert fingerprint_ids(ids[:-1]) != first
    ids[-1] = 1
    assert fingerprint_ids(ids) != first


# Unusable input

Maker = Callable[[Path], Any]


def _saved(array: Any) -> Maker:
    return lambda path: np.save(path, array)


def _headed(header: str) -> Maker:
    """Return a ``.npy`` file with any text for its header."""
    return lambda path: path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())


def _write(path: Path, save: Callable[[Any, Any], None], array: Any) -> None:
    with path.open("wb") as file:
        save(file, array)


BAD_INPUT: dict[str, tuple[str, Maker, str]] = {
    "nothing there": ("absent.txt", lambda path: None, "no such file or directory"),
    "empty file": ("a.txt", lambda path: path.write_text(""), "the file is empty"),
    "binary file": ("a.txt", lambda path: path.write_bytes(b"\x7fELF\0\1"), "binary, not text (a zero byte at 4)"),
    "empty directory": ("d", lambda path: path.mkdir(), "no files ending in .txt .md .rst .py .jsonl"),
    "garbage as npy": ("a.npy", lambda path: path.write_bytes(b"garbage"), "not a readable .npy array"),
    "empty npy": ("a.npy", lambda path: path.write_bytes(b""), "not a readable .npy array"),
    "pickled npy": (
        "a.npy",
        lambda path: np.save(path, np.array([{}]), allow_pickle=True),
        "not a readable .npy array",
    ),
    "header that does not end": ("a.npy", _headed("{'shape': ((("), "not a readable .npy array"),
    "negative size": ("a.npy", _headed("{'descr': '<i4', 'fortran_order': False, 'shape': (-1,)}"), "not a readable"),
    "size beyond 64 bits": (
        "a.npy",
        _headed(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({2**70},)}}"),
        "not a readable .npy array",
    ),
    "npz called npy": ("a.npy", lambda path: _write(path, np.savez, [1]), "not a readable .npy array"),
    "npy called npz": ("a.npz", lambda path: _write(path, np.save, [1]), "not a readable .npz array"),
    "text as npz": ("a.npz", lambda path: path.write_text("hello"), "not a readable .npz array"),
    "two-dimensional": ("a.npy", _saved(np.zeros((3, 4), np.int32)), "its shape is 3x4, expected 1-D"),
    "one number": ("a.npy", _saved(np.int32(3)), "its shape is a single number, expected 1-D"),
    "float ids": ("a.npy", _saved(np.zeros(9)), "its dtype is float64, expected integer token ids"),
    "truth values": ("a.npy", _saved(np.zeros(9, bool)), "its dtype is bool, expected integer"),
    "empty array": ("a.npy", _saved(np.zeros(0, np.int32)), "the array is empty"),
    "id above the vocabulary": (
        "a.npy",
        _saved(np.array([1, 300, 2])),
        "id 300 at position 1 is not in the vocabulary",
    ),
    "id just above": ("a.npy", _saved(np.array([255, 256])), "id 256 at position 1 is not in the vocabulary"),
    "negative id": ("a.npy", _saved(np.array([1, 2, -1])), "id -1 at position 2 is not in the vocabulary"),
    "several arrays": (
        "a.npz",
        lambda path: np.savez(path, a=[1], b=[2]),
        "holds the arrays a, b; name the token ids 'ids'",
    ),
    "no arrays": ("a.npz", lambda path: np.savez(path), "holds the arrays (none)"),
    "pipe": ("a.txt", os.mkfifo, "a pipe, socket or device"),
    "pipe called npy": ("a.npy", os.mkfifo, "a pipe, socket or device"),
    "device": ("a.txt", lambda path: path.symlink_to("/dev/zero"), "a pipe, socket or device"),
}


@pytest.mark.parametrize("kind", BAD_INPUT)
def test_unusable_input_is_one_clear_line_that_names_the_path(tmp_path: Path, kind: str) -> None:
    name, make, expected = BAD_INPUT[kind]
    path = tmp_path / name
    make(path)
    message = refusal(load_corpus, path, BYTES)
    assert message.startswith(f"data {path}: ")
    assert expected in message


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_truncated_and_damaged_arrays_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    ids = np.arange(5000) % 256
    np.save(path, ids) if kind == "npy" else np.savez_compressed(path, ids)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert f"not a readable .{kind} array" in refusal(load_corpus, path, BYTES)
    if kind == "npz":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
        assert "not a readable .npz array" in refusal(load_corpus, path, BYTES)


def test_a_directory_without_a_usable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\0")
    (tmp_path / "b.txt").write_bytes(b"")
    message = refusal(load_corpus, tmp_path, BYTES)
    assert "none of its 2 files can be used; the first:" in message
    (tmp_path / "a.txt").unlink()
    assert "(all are empty)" in refusal(load_corpus, tmp_path, BYTES)


def test_suffixes_are_no_patterns(tmp_path: Path) -> None:
    (tmp_path / "a.[x]").write_text("text")
    assert load_corpus(tmp_path, BYTES, Reading(suffixes=(".[x]",))).names == ("a.[x]",)
    assert "no files ending in .**" in refusal(load_corpus, tmp_path, BYTES, Reading(suffixes=(".**",)))


def test_text_that_is_not_utf8_is_refused_where_it_matters(tmp_path: Path, words_json: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"the \xff cat")
    assert "not valid UTF-8 (byte 0xff at character 4)" in refusal(load_corpus, path, HFTokenizer(words_json))


def test_a_python_installation_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "no .py files below" in refusal(load_corpus, "stdlib", BYTES)


# The permutation


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_the_permutation_is_one(n: int, key: int) -> None:
    assert sorted(Permutation(n, key)(np.arange(n)).tolist()) == list(range(n))


@given(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.data())
def test_the_permutation_has_random_access(n: int, key: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    order = Permutation(n, key)
    permuted = order(indices)
    assert ((permuted >= 0) & (permuted < n)).all()
    assert permuted.tolist() == [int(order(indices[i : i + 1])[0]) for i in range(len(indices))]


def test_the_permutation_stays_the_same_for_ever() -> None:
    """Checkpoints of older versions count on it."""
    assert Permutation(10, mix(0, 0))(np.arange(10)).tolist() == [9, 8, 5, 3, 1, 2, 4, 6, 0, 7]
    assert mix(1, 2) == 13608149317741381227


def test_the_permutation_looks_random() -> None:
    """Over many keys, each index goes everywhere about equally often, and neighbours are torn apart."""
    n, keys = 13, 4000
    counts = np.zeros((n, n))
    neighbours = 0
    for key in range(keys):
        image = Permutation(n, mix(key))(np.arange(n))
        counts[np.arange(n), image] += 1
        neighbours += int((np.diff(image) == 1).sum())
    expected = keys / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi_square - freedom) < 6 * math.sqrt(2 * freedom)
    assert neighbours / keys == pytest.approx((n - 1) / n, rel=0.15)


# The split


@given(st.integers(30, 40_000), st.floats(0.01, 0.5))
def test_blocks_cover_all_tokens_once_and_keep_about_the_fraction(n: int, holdout: float) -> None:
    if int(n * holdout) == 0:
        assert "too few" in refusal(dataset, n, holdout)
        return
    data = dataset(n, holdout)
    positions = np.concatenate([*data.pieces("train"), *data.pieces("held_out")])
    assert sorted(positions.tolist()) == list(range(n))
    assert abs(data.held_out_tokens - n * holdout) <= len(data.held_out)


@given(st.lists(st.integers(1, 300), min_size=2, max_size=40), st.floats(0.01, 0.5))
def test_files_are_held_out_whole(sizes: list[int], holdout: float) -> None:
    corpus = numbered(sum(sizes), tuple(sizes))
    data = TokenDataset.split(corpus, IdTokenizer(sum(sizes)), holdout, by="files")
    held_out = set(np.concatenate(list(data.pieces("held_out"))).tolist())
    for edges in itertools.pairwise(corpus.edges):
        inside = [position in held_out for position in range(*edges)]
        assert all(inside) or not any(inside)
    assert held_out and data.train_tokens
    assert len(held_out) <= max(1.1 * holdout * sum(sizes), min(sizes))


def test_one_file_does_not_split_by_files() -> None:
    assert "set data.split=blocks" in refusal(dataset, 1000, by="files")


@given(st.integers(200, 20_000), st.integers(1, 30), st.integers(0, 2**63 - 1))
def test_no_train_window_touches_held_out_tokens(n: int, seq_len: int, seed: int) -> None:
    data = dataset(n)
    held_out = np.concatenate(list(data.pieces("held_out")))
    rows = data.batches(seed, 1, seq_len).rows
    windows = rows.batch(np.arange(len(rows)))
    assert not np.isin(np.concatenate([windows["tokens"], windows["targets"]]), held_out).any()
    assert len(rows) == sum((stop - start - 1) // seq_len for start, stop in data.train)


def test_the_split_does_not_depend_on_the_sequence_length_or_seed() -> None:
    data = dataset(5000)
    assert data.batches(0, 2, 16).fingerprint == data.batches(1, 4, 32).fingerprint == data.fingerprint


# The order


@given(st.integers(60, 3000), st.integers(1, 12), st.integers(1, 7), st.integers(0, 2**63 - 1))
def test_an_epoch_visits_every_window_once_and_epochs_differ(n: int, seq_len: int, batch: int, seed: int) -> None:
    data = dataset(n)
    if len(Windows.of(data.corpus.ids, data.train, seq_len)) < batch:
        return
    batches = data.batches(seed, batch, seq_len)
    size = len(batches.rows)
    steps = -(-2 * size // batch)
    order = np.concatenate([batches.indices_at(step) for step in range(steps)])
    assert sorted(order[:size].tolist()) == sorted(order[size : 2 * size].tolist()) == list(range(size))
    if size > 10:
        assert order[:size].tolist() != order[size : 2 * size].tolist() != list(range(size))


@given(st.integers(200, 5000), st.integers(1, 20), st.integers(1, 8), st.integers(0, 10**9))
def test_a_batch_is_windows_of_the_text(n: int, seq_len: int, batch: int, step: int) -> None:
    data = dataset(n)
    batches = data.batches(3, min(batch, 4), seq_len)
    got = batches.batch_at(step)
    possible = [a for start, stop in data.train for a in range(start, stop - seq_len, seq_len)]
    starts = np.array(possible)[batches.indices_at(step)]
    reference = np.array([range(start, start + seq_len) for start in starts.tolist()])
    assert (got["tokens"] == reference).all()
    assert (got["targets"] == reference + 1).all()
    assert (got["weights"] == 1).all()
    assert {k: (v.dtype.name, v.shape) for k, v in got.items()} == {
        "tokens": ("int32", reference.shape),
        "targets": ("int32", reference.shape),
        "weights": ("float32", reference.shape),
    }


def _stream(batches: Any, start: int, stop: int) -> list[int]:
    return [index for step in range(start, stop) for index in batches.indices_at(step).tolist()]


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**63 - 1))
def test_resuming_goes_on_where_the_run_stopped(step: int, batch: int, other: int, seed: int) -> None:
    data = dataset(400)
    straight = data.batches(seed, batch, 8)
    state = DataState.from_dict(json.loads(json.dumps(straight.state_at(step).to_dict())))
    resumed = data.batches(seed, batch, 8, state)
    assert _stream(resumed, step, step + 12) == _stream(straight, step, step + 12)
    regrouped = data.batches(seed, other, 8, state)
    count = min(batch, other) * 12
    assert _stream(regrouped, step, step + 12)[:count] == _stream(straight, step, step + 12)[:count]
    assert regrouped.state_at(step + 3).position == step * batch + 3 * other


def test_other_seeds_give_another_order() -> None:
    data = dataset(5000)
    assert _stream(data.batches(0, 4, 8), 0, 9) != _stream(data.batches(1, 4, 8), 0, 9)
    assert _stream(data.batches(1, 4, 8), 0, 9) == _stream(data.batches(1, 4, 8), 0, 9)


def test_a_state_of_other_data_is_refused() -> None:
    data = dataset(5000)
    state = data.batches(1, 4, 8).state_at(7)
    assert "data.seed=2 where the checkpoint has 1" in refusal(data.batches, 2, 4, 8, state)
    assert "data.seq_len=16 where the checkpoint has 8" in refusal(data.batches, 1, 4, 16, state)
    for other in (dataset(5001), dataset(5000, 0.2), TokenDataset.split(numbered(5000), IdTokenizer(6000), 0.1)):
        assert "the data, tokenizer or holdout differ" in refusal(other.batches, 1, 4, 8, state)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"step": -1},
            {"step": 1.0},
            {"position": "3"},
            {"fingerprint": 3},
            {"extra": 1},
            {"seed": None},
            {"step": True},
        ),
        *({"position": 10**30}, {"position": 1 << 60}, {"step": 10**30}),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    good = dataset(5000).batches(1, 4, 8).state_at(7).to_dict()
    assert next(iter(change)) in refusal(DataState.from_dict, {**good, **change})
    good.pop("position")
    assert "position" in refusal(DataState.from_dict, good)


# Too small


def test_too_little_text_names_numbers_that_would_work() -> None:
    data = dataset(100)
    message = refusal(data.batches, 0, 8, 64)
    assert "90 tokens to train on make 1 sequences of 64, fewer than one batch of 8" in message
    assert message.endswith("use more text or run.batch=1 or data.seq_len=11")
    data.batches(0, 1, 64)
    data.batches(0, 8, 11)
    assert "use more text or data.seq_len=89" in refusal(data.batches, 0, 1, 90)
    assert refusal(dataset(2, 0.0).batches, 0, 8, 4).endswith("fewer than one batch of 8: use more text")
    longest = "use more text or data.seq_len=44"
    assert refusal(data.batches, 0, 2, 2**31 - 1).endswith(longest), "not every length is tried"


def test_nothing_to_hold_out_is_refused() -> None:
    assert "too few to keep 0.1" in refusal(dataset, 5)
    assert "raise data.holdout" in refusal(dataset(15).held_out_batches, 2, 8)
    assert "raise data.holdout" in refusal(dataset(500, 0.0).held_out_batches, 2, 8)


# Held-out batches


@given(st.integers(100, 20_000), st.integers(1, 40), st.integers(1, 9))
def test_held_out_batches_cover_every_target_once(n: int, seq_len: int, batch: int) -> None:
    data = dataset(n)
    batches = data.held_out_batches(batch, seq_len)
    batch_targets = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
    targets = np.concatenate([piece[1:] for piece in data.pieces("held_out")])
    assert sorted(batch_targets.tolist()) == sorted(targets.tolist())
    for b in batches:
        assert b["tokens"].shape == b["targets"].shape == b["weights"].shape == (batch, seq_len)
        assert (b["targets"] == b["tokens"] + 1)[b["weights"] > 0].all()


def test_limited_held_out_batches_are_full_fixed_and_spread() -> None:
    data = dataset(20_000)
    few = data.held_out_batches(4, 16, limit=3)
    repeat = data.held_out_batches(4, 16, limit=3)
    assert len(few) == 3
    assert all((a["tokens"] == b["tokens"]).all() for a, b in zip(few, repeat, strict=True))
    starts = np.concatenate([b["tokens"][:, 0] for b in few])
    assert len(set(starts.tolist())) == 12
    assert starts.min() == data.held_out[0][0]
    assert starts.max() > data.held_out[-1][0]
    assert len(data.held_out_batches(4, 16, limit=10**6)) == len(data.held_out_batches(4, 16))


# Bits per byte


def test_bytes_per_token_counts_held_out_text(words_json: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat . " * 40)
    tokenizer: Tokenizer = HFTokenizer(words_json)
    data = TokenDataset.split(load_corpus(path, tokenizer), tokenizer, 0.25)
    assert data.corpus.bytes_in(0, len(data.corpus.ids), tokenizer) == len("the cat sat on the mat . " * 40)
    assert data.bytes_per_token() == pytest.approx(25 / 7, rel=5e-3)  # of whole sentences, from the middle of one
    assert dataset(500).bytes_per_token() is None


def test_describe_counts_documents_and_tokens() -> None:
    data = TokenDataset.split(numbered(5000, (2000, 3000)), IdTokenizer(5000), 0.1)
    assert data.describe() == "numbers: 2 documents, 5,000 tokens; 4,500 to train, 500 held out"
