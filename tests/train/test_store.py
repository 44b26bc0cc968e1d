"""Documents of JSONL, Parquet and text, and token stores: same ids from all, same bytes always, one line for what is wrong."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.cli import main
from jaxpipe.errors import DataError
from jaxpipe.train.corpora import documents
from jaxpipe.train.corpora.corpus import load_corpus
from jaxpipe.train.corpora.documents import files_at, pieces, with_forms
from jaxpipe.train.corpora.encoding import Encoder, Reading
from jaxpipe.train.corpora.store import EDGES, IDS, JOURNAL, MANIFEST, Store, build_store
from jaxpipe.train.corpora.tokenizers import ByteTokenizer
from jaxpipe.train.data import TokenDataset

BYTES = ByteTokenizer()
TEXTS = ["Grüße", "", "two\nlines", "x" * 70, "{not: json}", "end"]
KEPT = b"".join(text.encode() + b"\0" for text in TEXTS if text)


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DataError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)


def lines(texts: list[str] = TEXTS) -> bytes:
    return b"".join(
        json.dumps({"n": n, "text": text}, ensure_ascii=n % 2 == 0).encode() + b"\n" for n, text in enumerate(texts)
    )


def write(path: Path, content: bytes) -> Path:
    """Compressed as the name says; Parquet in two row groups."""
    name = path.name
    if name.endswith(".gz"):
        content = gzip.compress(content)
    elif name.endswith(".zst"):
        content = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    elif name.endswith(".parquet"):
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(
            arrow.Table.from_pylist([json.loads(x) for x in content.splitlines()]), path, row_group_size=4
        )
        return path
    path.write_bytes(content)
    return path


KINDS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]


@pytest.mark.parametrize("name", KINDS)
def test_records_are_documents_with_an_end_whatever_holds_them(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, lines())
    corpus = load_corpus(path, BYTES)
    assert corpus.ids.tobytes() == KEPT and len(list(pieces(with_forms([path])))) > 1
    ends = np.flatnonzero(corpus.ids == 0) + 1
    np.testing.assert_array_equal(corpus.edges, [0, *ends])
    assert load_corpus(path, BYTES, Reading(eos="10")).ids.tobytes() == KEPT.replace(b"\0", b"\n")
    assert load_corpus(path, BYTES, Reading(eos="none")).ids.tobytes() == KEPT.replace(b"\0", b"")
    assert b"text" not in load_corpus(path.parent, BYTES).ids.tobytes()  # in a folder too


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_pieces_of_any_size_hold_each_line_once(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", size)
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert (
            load_corpus(write(tmp_path / name, lines()[:-1]), BYTES).ids.tobytes() == KEPT
        )  # the last line has no end


BAD = {
    "not JSON": (b'{"text": "a"\n', "line 8: not JSON (Expecting ',' delimiter at character 13)"),
    "no object": (b"[1]\n", 'line 8: a list, expected an object such as {"text": …}'),
    "no field": (b'{"txt": "a"}\n', "line 8: no field 'text' (it has txt); set data.field"),
    "no text": (b'{"text": null}\n', "line 8: the document is null, expected a string"),
    "not UTF-8": (b'{"text": "\xff"}\n', "line 8: not UTF-8 (byte 0xff at 10)"),
    "half a character": (
        b'{"text": "a\\ud800"}\n',
        "line 8: the document is no text: half of a surrogate pair at character 1",
    ),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", KINDS[:3])
def test_a_bad_line_is_named(tmp_path: Path, name: str, kind: str) -> None:
    line, expected = BAD[kind]
    path = write(tmp_path / name, lines() + b"\n" + line + lines())
    assert refusal(load_corpus, path, BYTES) == f"data {path}, {expected}"


def test_files_that_can_not_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KINDS[1:]:
        path = write(tmp_path / name, lines())
        path.write_bytes(path.read_bytes()[:-9])
        assert "damaged" in refusal(load_corpus, path, BYTES), name
    path = write(tmp_path / "b.parquet", b'{"x": 1}\n{"x": 2}\n')
    assert "no column 'text' (it has x); set data.field" in refusal(load_corpus, path, BYTES)
    assert "row 1: the document is a number" in refusal(load_corpus, path, BYTES, Reading(field="x"))
    assert "by bzip2; unpack" in refusal(load_corpus, write(tmp_path / "a.jsonl.bz2", bz2.compress(lines())), BYTES)
    assert "data.eos=<eos>: tokenizer byte has no such token" in refusal(load_corpus, path, BYTES, Reading(eos="<eos>"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "needs the package 'zstandard': pip install zstandard" in refusal(
        load_corpus, tmp_path / "a.jsonl.zst", BYTES
    )


def test_a_tokenizer_ends_documents_with_its_own_token(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>", "<sep>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    from jaxpipe.train.corpora.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "a.jsonl", lines(["a b", "b", "a"]))
    assert load_corpus(path, tokenizer).ids.tolist() == [0, 1, 3, 1, 3, 0, 3]
    assert load_corpus(path, tokenizer, Reading(eos="<sep>")).ids.tolist() == [0, 1, 4, 1, 4, 0, 4]
    (tmp_path / "a.txt").write_text("a b")
    assert load_corpus(tmp_path / "a.txt", tokenizer).ids.tolist() == [0, 1, 3]
    store = build_store([path], tmp_path / "store", tokenizer, Reading())
    copy = load_tokenizer(str(store.folder / "tokenizer.json"))
    assert load_corpus(store.folder, copy).ids.tolist() == [0, 1, 3, 1, 3, 0, 3]
    assert f"set data.tokenizer={store.folder / 'tokenizer.json'}" in refusal(load_corpus, store.folder, BYTES)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl.gz"):
        write(folder / name, lines() * 3)
    for k in range(5):
        (folder / f"c{k}.txt").write_text(f"text {k} " * 6)
    (folder / "d.txt").write_bytes(b"\0")
    return [folder, write(tmp_path / "e.jsonl", lines())]


def test_a_store_holds_what_its_sources_do_with_any_number_of_processes(tmp_path: Path, sources: list[Path]) -> None:
    notes: list[str] = []
    stores = [
        build_store(sources, tmp_path / f"store{n}", BYTES, Reading(), workers=n, note=notes.append) for n in (1, 2)
    ]
    assert content(stores[0].folder) == content(stores[1].folder)
    assert set(content(stores[0].folder)) == {IDS, EDGES, MANIFEST}
    assert len([note for note in notes if "d.txt: binary" in note]) == 2
    encoder = Encoder.of(BYTES, Reading())
    paths = [p for root in sources for p in files_at(root, Reading().suffixes)]
    expected = np.concatenate([encoder.encode(piece).ids for piece in pieces(with_forms(paths))])
    corpus = load_corpus(stores[0].folder, BYTES)
    np.testing.assert_array_equal(corpus.ids, expected)
    assert corpus.ids.tobytes().count(KEPT) == 7 and len(corpus.edges) - 1 == 7 * 5 + 5 == stores[0].documents
    assert [bytes(corpus.ids[stop - 1 : stop]) for stop in corpus.edges[1:]] == [b"\0"] * 40
    data = TokenDataset.split(corpus, BYTES, 0.2, "files")
    assert data.held_out_tokens and "40 documents" in data.describe()
    build_store(sources, stores[0].folder, BYTES, Reading(), note=notes.append)
    assert notes[-1].endswith("is built already")
    assert "a store of other eos" in refusal(build_store, sources, stores[0].folder, BYTES, Reading(eos="none"))
    assert "holds other files" in refusal(build_store, sources, tmp_path, BYTES, Reading())


class _KilledError(Exception):
    pass


def test_a_build_killed_anywhere_gives_the_same_bytes(
    tmp_path: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(build_store(sources, tmp_path / "whole", BYTES, Reading()).folder)
    folder, encode = tmp_path / "killed", Encoder.encode
    for attempt in range(3, 60):
        allowance = iter(range(attempt % 4))

        def killed(self: Encoder, piece: documents.Piece, allowance: Iterator[int] = allowance) -> Any:
            if next(allowance, None) is None:
                raise _KilledError
            return encode(self, piece)

        monkeypatch.setattr(Encoder, "encode", killed)
        try:
            build_store(sources, folder, BYTES, Reading())
            break
        except _KilledError:
            with (folder / [IDS, EDGES, JOURNAL][attempt % 3]).open("ab") as file:
                file.write(b"half a pie")  # written, and not told of
            assert "not finished" in refusal(load_corpus, folder, BYTES)
    assert content(folder) == expected


@pytest.mark.soak
def test_a_build_killed_by_the_system_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", lines(["some text " * 2000] * 3000))
    command = [sys.executable, "-m", "jaxpipe", "data", "build", str(source), "--workers", "2", "-o"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True)
    for delay in (0.5, 0.8, 1.1, 1.4):
        with subprocess.Popen([*command, str(tmp_path / "killed")], start_new_session=True) as process:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
    subprocess.run([*command, str(tmp_path / "killed")], check=True)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_an_unfinished_build_of_other_sources_is_left_alone(tmp_path: Path, sources: list[Path]) -> None:
    bad = write(tmp_path / "z.jsonl", b"{")
    assert "z.jsonl, line 1: not JSON" in refusal(build_store, [*sources, bad], tmp_path / "s", BYTES, Reading())
    assert "an unfinished store of other sources" in refusal(build_store, sources, tmp_path / "s", BYTES, Reading())
    damaged = bytearray((tmp_path / "s" / IDS).read_bytes())
    damaged[5] ^= 1
    (tmp_path / "s" / IDS).write_bytes(damaged)
    assert "piece 1 of" in refusal(build_store, [*sources, bad], tmp_path / "s", BYTES, Reading())


def test_a_damaged_store_is_refused_by_name(tmp_path: Path, sources: list[Path]) -> None:
    folder = build_store(sources, tmp_path / "store", BYTES, Reading()).folder
    assert Store.read(folder).parts
    for path in sorted(folder.iterdir()):
        original = path.read_bytes()
        for content in (
            original[:-1],
            original + b"x",
            b"",
            original[:9] + bytes([original[9] ^ 1]) + original[10:],
            None,
        ):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            message = (
                refusal(load_corpus, folder, BYTES) if path.name != MANIFEST or content is not None else "s, store"
            )
            assert message.startswith(f"data {folder}") or path.name == MANIFEST, message
        path.write_bytes(original)
    load_corpus(folder, BYTES)


def test_the_command_builds_checks_and_refuses(
    tmp_path: Path, sources: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "store")
    build = ["data", "build", *map(str, sources), "-o", store, "--workers", "1"]
    assert main([*build, "--json"]) == 0
    store_report = json.loads(capsys.readouterr().out)["stores"][0]
    assert store_report["documents"] == 40 and main(["data", "check", store]) == 0
    assert "40 documents" in capsys.readouterr().out
    os.truncate(Path(store, IDS), 7)
    assert main(["data", "check", store]) == 2 and f"{store}/ids.bin: 7 bytes" in capsys.readouterr().err
    assert main(["data", "build", store]) == 2 and "-o STORE" in capsys.readouterr().err
    assert main(["data", "biuld", store]) == 2 and "did you mean 'build'" in capsys.readouterr().err
