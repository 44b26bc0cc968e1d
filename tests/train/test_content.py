"""The content of data files decides how they are read, whatever they are called; folders lose no file without a word; a
store whose source has changed is no longer the store of it; URLs are refused at every door."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import lzma
import os
import pickle
import shutil
import sqlite3
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.interop.folder import new_folder
from jaxpipe.train.checkpoint import CheckpointStore, load_params
from jaxpipe.train.config import load_config
from jaxpipe.train.corpora import documents
from jaxpipe.train.corpora.corpus import Corpus, load_corpus
from jaxpipe.train.corpora.datasets import load_dataset
from jaxpipe.train.corpora.encoding import Reading
from jaxpipe.train.corpora.store import build_store
from jaxpipe.train.corpora.tokenizers import ByteTokenizer, IdTokenizer

BYTES = ByteTokenizer()
MARK = b"\xef\xbb\xbf"


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def packed(content: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(content)
    if "zstd" in how:
        skipped = b"\x50\x2a\x4d\x18\4\0\0\0abcd" if how == "pzstd" else b""
        return skipped + bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(content))
    return content


def texts(corpus: Corpus) -> list[str]:
    """Return the documents, without the 0 at the end of each."""
    spans = zip(corpus.edges[:-1], corpus.edges[1:], strict=True)
    return [bytes(corpus.ids[start:stop]).removesuffix(b"\0").decode() for start, stop in spans]


DOCUMENTS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=20), min_size=1
)
NAMES = [
    "a.jsonl",
    "a.JSON",
    "a.ndjson",
    "a.jsonlines",
    "a.ldjson",
    "a",
    "a.data",
    "part-0001",
    "a.jsonl.gz",
    "a.json.zst",
    "a.gz",
]


@given(
    DOCUMENTS,
    st.sampled_from(NAMES),
    st.sampled_from(["", "gzip", "zstd", "pzstd"]),
    st.sampled_from(["lines", "list", "indented list"]),
    st.sampled_from([b"", MARK, b"\n \n\n", MARK + b"\r\n"]),
    st.booleans(),
    st.integers(1, 200),
)
def test_records_are_read_under_any_name(
    contents: list[str], name: str, packing: str, form: str, before: bytes, ascii_only: bool, piece_bytes: int
) -> None:
    rows = [{"n": [{}], "text": text} for text in contents]
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    text = (
        "\r\n".join(lines)
        if form == "lines"
        else json.dumps(rows, indent=2 if "ind" in form else None, ensure_ascii=ascii_only)
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", piece_bytes)
        path = Path(folder, name)
        path.write_bytes(packed(before + text.encode(), packing))
        assert texts(load_corpus(path, BYTES)) == contents
        store = build_store([path], Path(folder, "store"), BYTES, Reading()).folder
        assert texts(load_corpus(store, BYTES)) == contents


RECORDS = b'{"text": "one"}\n{"text": "two"}\n'
LINE = "set data.format"


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst", "a.py", "a.TXT", "a.txt.gz"])
@pytest.mark.parametrize(
    "content", [RECORDS, MARK + RECORDS, b"\n\n{}\ntext", b'[{"text": "x"}]', b'{"a": 1} {"b": 2}']
)
def test_text_that_begins_with_a_record_wants_a_word(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(packed(content, "gzip" if name.endswith(".gz") else ""))
    assert "begins with a record of JSON; call it .jsonl" in refusal(load_corpus, path, BYTES)
    assert "data.format=text" in refusal(build_store, [path], tmp_path / "s", BYTES, Reading())
    assert bytes(load_corpus(path, BYTES, Reading(format="text")).ids) == content
    (tmp_path / "z.txt").write_text("text")
    corpus = load_corpus(tmp_path, BYTES, Reading(suffixes=(".txt", ".md", ".rst", ".py", ".txt.gz")))
    assert texts(corpus) == ["text"] and f"{name}: it begins with a record" in corpus.describe()


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1))
def test_other_text_is_its_bytes(text: str) -> None:
    """Under names of text and none; ORC and RIFF begin words, too."""
    for begin in ("", "ORC", "RIFF", "PAR1", "GIF89a", "{", "[1, 2]\n", "{'a': 1}"):
        content = f"{begin}{text}".encode()
        if begin in ("", "{") and text.lstrip("\ufeff \t\r\n\x0b\f")[:1] in ("{", "[", '"', "}"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for name in ("a.txt", "a"):
                path = Path(folder, name)
                path.write_bytes(content)
                assert bytes(load_corpus(path, BYTES).ids) == content


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def _sqlite() -> bytes:
    base = sqlite3.connect(":memory:")
    base.execute("create table texts (text)")
    return base.serialize()


CONTAINERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "zip": (lambda: zipped(a=RECORDS), "a zip archive; unpack"),
    "xz": (lambda: lzma.compress(RECORDS), "by xz; unpack"),
    "tar": (lambda: b"a.jsonl".ljust(257, b"\0") + b"ustar\x0000" + bytes(300), "a tar archive; unpack"),
    "pickle": (lambda: pickle.dumps({"text": "x"}), "a pickle of Python's; save"),
    "sqlite": (_sqlite, "an SQLite database; export"),
    "pdf": (lambda: b"%PDF-1.7\n%\xe2\xe3\n", "a PDF; extract"),
    "png": (lambda: b"\x89PNG\r\n\x1a\n\0\0", "a picture (PNG); save"),
    "safetensors": (lambda: (2).to_bytes(8, "little") + b'{"a": 1}', "tensors of a model (safetensors)"),
    "arrow": (lambda: b"ARROW1\0\0" + bytes(9), "an Arrow file; convert it to Parquet"),
    "arrow stream": (lambda: b"\xff\xff\xff\xff\x10\0\0\0", "a stream of Arrow's; convert it to Parquet"),
    "lfs": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "utf-16": (lambda: "text".encode("utf-16"), "text in UTF-16; save"),
    "utf-16 records": (lambda: '{"text": "a"}'.encode("utf-16-be"), "binary, not text"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_is_no_text_is_refused_under_any_name(tmp_path: Path, kind: str) -> None:
    make, expected = CONTAINERS[kind]
    for name in ("a", "a.txt", "a.bin", "a.json", "a.jsonl", "a.csv", "b.txt.gz", "b.jsonl.gz"):
        if kind == "utf-16 records" and ".json" in name:
            continue  # the first line is told
        path = tmp_path / name
        path.write_bytes(gzip.compress(make()) if name.endswith(".gz") else make())
        for how in (Reading(), Reading(format="text")):
            assert expected in refusal(load_corpus, path, BYTES, how), (name, how)
        assert expected in refusal(build_store, [path], tmp_path / f"s-{name}", BYTES, Reading())


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.tsv.gz", "a.feather"])
def test_tables_are_refused_until_they_are_called_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"text,label\nx,1\n") if name.endswith(".gz") else b"text,label\nx,1\n")
    assert "; convert it to Parquet or to JSON lines, or data.format=text" in refusal(load_corpus, path, BYTES)
    assert bytes(load_corpus(path, BYTES, Reading(format="text")).ids) == b"text,label\nx,1\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b'{\n "text": "a"\n}\n', "its first line is no record; write one record a line (jq -c"),
        ("a", b'{\n "text": "a"\n}\n', "it begins as JSON, and its first line is no record"),
        ("a.txt", b'[\n {"text": "a"}]', "it begins as JSON"),
        ("a.json", b"[1]", "record 1: a number, expected an object"),
        ("a.json", b'[{"text": "a"}', "record 1: not JSON (Expecting , or ] at character 14)"),
        ("a.json", b'[{"text": "a"}] []', "record 1: not JSON (more after the end of the list at character 16)"),
        ("a.json", b'[{"text": "a"}, {"txt": "b"}]', "record 2: no field 'text' (it has txt)"),
        ("a.json", b'[{"text": "\xff"}]', "not UTF-8 (byte 0xff"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.txt", b'{"a":' * 100_000, "begins"),
        ("a", RECORDS + b"text\n", "line 3: not JSON"),
        ("a.json", b"[]", "made no tokens"),
    ],
)  # fmt: skip
def test_json_that_is_no_records_is_refused(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert expected in refusal(load_corpus, path, BYTES)


def test_arrays_and_parquet_are_read_under_any_name(tmp_path: Path) -> None:
    ids = np.arange(500) % 200
    for name in ("ids", "ids.txt", "ids.data"):
        for save in (np.save, np.savez):
            with (tmp_path / name).open("wb") as file:
                save(file, ids)
            np.testing.assert_array_equal(load_corpus(tmp_path / name, IdTokenizer(200)).ids, ids)
    with (tmp_path / "pictures").open("wb") as file:
        np.savez(file, tokens=ids.reshape(50, 10), weights=np.ones((50, 10)))
    assert load_dataset(load_config(None, [f"data.path={tmp_path}/pictures"])).describe().startswith(str(tmp_path))
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("rows", "rows.txt", "rows.json.gz"):
        parquet.write_table(arrow.table({"text": ["one", "two"]}), tmp_path / name)
        assert texts(load_corpus(tmp_path / name, BYTES)) == ["one", "two"]


CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def test_chats_are_read_under_any_name_and_in_mixtures(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    how = Reading(format="chat", chat_template=str(tmp_path / "t.jinja"))
    for name in ("a.jsonl", "a.json", "a", "a.txt"):
        (tmp_path / name).write_bytes(CHAT)
        assert texts(load_corpus(tmp_path / name, BYTES, how)) == ["user:a;assistant:b;"]
    (tmp_path / "list.json").write_text(json.dumps([json.loads(CHAT)] * 2))
    assert texts(load_corpus(tmp_path / "list.json", BYTES, how)) == ["user:a;assistant:b;"] * 2
    assert "chats are read from JSON or Parquet" in refusal(load_corpus, tmp_path / "t.jinja", BYTES, how)
    (tmp_path / "c.csv").write_text("text\nx\n")
    (tmp_path / "n.ndjson").write_bytes(b'{"text": "abcd"}\n' * 40)
    mixed = [f"data.sources.x.path={tmp_path}/n.ndjson", "data.seq_len=8"]
    assert "40 documents, 200 tokens" in load_dataset(load_config(None, mixed)).describe()
    assert "a table" in refusal(load_dataset, load_config(None, [*mixed, f"data.sources.y.path={tmp_path}/c.csv"]))


def test_the_command_takes_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, build = tmp_path / "a.txt", ["data", "build", str(tmp_path / "a.txt"), "--workers", "1", "-o"]
    source.write_bytes(RECORDS)
    assert main([*build, str(tmp_path / "s")]) == 2
    assert "a.txt: it begins with a record of JSON" in capsys.readouterr().err
    assert main([*build, str(tmp_path / "t"), "--format", "text"]) == 0
    assert f"1 documents, {len(RECORDS) + 1} tokens" in capsys.readouterr().out
    assert main([*build, str(tmp_path / "u"), "--format", "text", "--chat"]) == 2
    assert "--chat or --format text, not both" in capsys.readouterr().err


def test_a_packed_file_that_is_no_text_is_not_unpacked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(bytes(1 << 24)))
    content = importlib.import_module("jaxpipe.train.corpora.documents")
    unpacked, blocks = [], content.blocks
    monkeypatch.setattr(content, "blocks", lambda path: (unpacked.append(len(b)) or b for b in blocks(path)))
    assert "binary, not text" in refusal(load_corpus, tmp_path / "a.txt.gz", BYTES)
    assert len(unpacked) == 1


# Folders

PARTS = st.sampled_from(["a", "B", "part1", ".hidden", "z"])
FILES = st.sampled_from(["a.txt", "B.TXT", "c.Jsonl", "d.ndjson", "e.json.gz", "f", ".g.txt", "é.txt"])
TREES = st.lists(st.tuples(st.lists(PARTS, max_size=2), FILES), min_size=1, max_size=8)


@given(TREES, st.lists(st.tuples(TREES.map(lambda tree: tree[0][0]), st.integers(0, 30)), max_size=4))
def test_a_folder_loses_no_file_without_a_word(
    tree: list[tuple[list[str], str]], links: list[tuple[list[str], int]]
) -> None:
    """Each file that is no hidden one is a document once, or is counted; by whatever links it is reached."""
    with tempfile.TemporaryDirectory() as scratch:
        root, other = Path(scratch, "root"), Path(scratch, "other")
        root.mkdir()
        for number, (parts, name) in enumerate(tree):
            for base in (root, other):
                path = Path(base, *parts, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                text = f"{base.name} {number}"
                path.write_text(json.dumps({"text": text}) if "son" in name.lower() else text)
        folders = [
            root,
            other,
            *(p for base in (root, other) for p in sorted(base.rglob("*"))),
            Path(scratch, "nothing"),
        ]
        for parts, which in links:
            place = Path(root, *parts, f"link{which}")
            if place.parent.is_dir() and not os.path.lexists(place):
                place.symlink_to(folders[which % len(folders)])
        notes: list[str] = []
        try:
            paths = documents.files_at(root, Reading().suffixes, notes.append)
        except DataError as error:
            paths, notes = (), [str(error)]
        hidden = lambda path: any(part.startswith(".") for part in path.relative_to(scratch).parts)  # noqa: E731
        assert not any(map(hidden, paths))
        real = [os.path.realpath(path) for path in paths]
        assert len(set(real)) == len(real), "twice"
        ends = (".txt", ".jsonl")
        visible = {str(p) for p in root.rglob("*") if p.is_file() and not p.is_symlink() and not hidden(p)}
        assert {p for p in visible if p.lower().endswith(ends)} <= set(real)
        assert all(str(path) in real for path in paths if not any(p.is_symlink() for p in [path, *path.parents]))
        assert list(paths) == sorted(paths, key=lambda p: p.relative_to(root).parts)
        num_other = sum(not p.lower().endswith(ends) for p in visible)
        dangling = [p for p in root.rglob("*") if p.is_symlink() and not p.exists() and not hidden(p)]
        if num_other or dangling:
            (note,) = notes
            count = int(note.partition("left out: ")[2].split()[0])
            assert count >= num_other + len(dangling)


def test_the_folder_of_the_report(tmp_path: Path) -> None:
    """outside.md F2: five of six files were left out without a word."""
    root = tmp_path / "corpus"
    root.mkdir()
    for name in ("a.jsonl", "B.JSONL", "d.ndjson", "f.json"):
        (root / name).write_text(json.dumps({"text": name[0]}))
    (root / "e.json.gz").write_bytes(gzip.compress(b'{"text": "e"}'))
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "c.jsonl").write_text('{"text": "c"}')
    (root / "part1").symlink_to(tmp_path / "disk")
    (root / "part2").symlink_to(tmp_path / "not mounted")
    (tmp_path / "disk" / "up").symlink_to(root)
    corpus = load_corpus(root, BYTES)
    assert texts(corpus) == ["B", "a", "c"]
    line = "left out: 4 files (.ndjson, .json.gz, .json, a link to nothing; first: d.ndjson)"
    assert corpus.remarks == (f"data {root}: {line}",)
    notes: list[str] = []
    build_store([root], tmp_path / "store", BYTES, Reading(), note=notes.append)
    assert notes[0] == line


def test_a_file_is_read_once_under_its_own_name(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    for name in ("z/one.txt", "two.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "a").symlink_to("z")
    (root / "b").symlink_to(root)
    (root / "c.txt").symlink_to("two.txt")
    (root / "d").symlink_to(tmp_path)
    corpus = load_corpus(root, BYTES)
    assert corpus.names == ("two.txt", "z/one.txt")
    assert "2 files (reached twice, a link to a folder above; first: c.txt)" in corpus.remarks[0]


def test_a_folder_that_can_not_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("closed"):  # chmod would not stop root
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "closed: can't be read (Permission denied)" in refusal(load_corpus, tmp_path, BYTES)


# Sources of stores


@given(
    st.binary(min_size=1, max_size=50).filter(lambda text: 0 not in text),
    st.integers(0, 10**6),
    st.integers(1, 255),
    st.booleans(),
)
def test_a_store_knows_the_content_of_its_sources(text: bytes, place: int, flip: int, keep_times: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, store, notes = Path(folder, "a.txt"), Path(folder, "store"), list[str]()
        path.write_bytes(b"text " + text)
        build_store([path], store, BYTES, Reading())
        os.utime(path, (1, 1))  # another time alone is no change
        build_store([path], store, BYTES, Reading(), note=notes.append)
        assert notes == [f"{store} is built already"]
        copy = Path(folder, "copy")
        shutil.copyfile(path, copy)  # as rsync and mv do: another file, the same content
        copy.replace(path)
        build_store([path], store, BYTES, Reading())
        changed, at = bytearray(path.read_bytes()), 5 + place % len(text)
        changed[at] ^= flip if flip != changed[at] else flip ^ 255
        path.write_bytes(changed)
        if keep_times:
            os.utime(path, (1, 1))
        if bytes(changed) != b"text " + text:
            assert "a.txt is not what it was" in refusal(build_store, [path], store, BYTES, Reading())
        path.unlink()
        assert bytes(load_corpus(store, BYTES).ids) == b"text " + text + b"\0"  # a store needs no source


def test_stores_and_journals_of_changed_sources(tmp_path: Path) -> None:
    path, store = tmp_path / "a.jsonl", tmp_path / "store"
    path.write_bytes(RECORDS)
    current = build_store([path], store, BYTES, Reading())
    older = type(current)(
        store, {key: value for key, value in current.spec.items() if key != "contents"}, current.parts
    )
    (store / "store.json").write_text(older.to_json())
    notes: list[str] = []
    build_store([path], store, BYTES, Reading(), note=notes.append)
    assert "has no checksums of its sources" in notes[0]
    assert texts(load_corpus(store, BYTES)) == ["one", "two"]
    (tmp_path / "bad.jsonl").write_text("{")
    sources = [path, tmp_path / "bad.jsonl"]
    assert "line 1: not JSON" in refusal(build_store, sources, tmp_path / "begun", BYTES, Reading())
    times = path.stat()
    path.write_bytes(RECORDS.replace(b"one", b"two"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "unfinished store of other sources" in refusal(build_store, sources, tmp_path / "begun", BYTES, Reading())


def test_a_source_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    tokenize = ByteTokenizer.encode

    def encode(self: ByteTokenizer, text: str) -> Any:
        path.write_text("texu")
        return tokenize(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    assert "changed while the store was built" in refusal(build_store, [path], tmp_path / "s", BYTES, Reading())
    assert not (tmp_path / "s" / "store.json").exists()


# URLs

URLS = [
    "hf://org/data",
    "s3://b/x",
    "gs:/b",
    "GS://b/a.jsonl",
    "https://e.org/a.json",
    "file:///tmp/x",
    "abfss://c@a/x",
    " s3://b",
]


@pytest.mark.parametrize("url", URLS)
def test_urls_are_refused_at_every_door(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    settings = [
        "data.path",
        "data.tokenizer",
        "data.chat_template",
        "data.sources.x.path",
        "run.out_dir",
        "run.init_from",
    ]
    doors = [
        *(["train", "--print-config", f"{key}={url}"] for key in settings),
        *(["train", f"{key}={url}"] for key in settings),
        ["data", "build", url, "-o", "S"],
        ["data", "build", "a.txt", "-o", url],
        ["data", "build", "a.txt", "-o", "S", "--tokenizer", url],
        ["data", "check", url],
        ["eval", url],
        ["generate", url, "--prompt", "x"],
        ["export", url, "-o", "OUT"],
        ["import", url, "-o", "OUT"],
        ["launch", "local", "-n", "1", "--logs", url, "--", "train"],
    ]
    for door in doors:
        assert main(door) == 2, door
        err = capsys.readouterr().err
        assert "a URL; jaxpipe reads and writes local files only" in err and err.count("\n") == 1, (door, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]
    assert "a URL" in refusal(load_corpus, url, BYTES)
    assert "a URL" in refusal(CheckpointStore, url)  # of Trainer.save and load
    assert "a URL" in refusal(load_params, url)
    assert "a URL" in refusal(new_folder(Path(url)).__enter__)  # of import -o and export -o
    (tmp_path / "s3:x").write_text("text")  # a colon alone makes no URL
    assert texts(load_corpus("s3:x", BYTES)) == ["text"]


def test_names_on_the_hub_get_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for door in (
        ["train", "run.init_from=Qwen/Qwen3-0.6B"],
        ["import", "Qwen/Qwen3-0.6B", "-o", "RUN"],
        ["data", "build", "a.txt", "-o", "S", "--tokenizer", "Qwen/Qwen3-0.6B"],
    ):
        assert main(door) in (2, 3)
        assert "hf download Qwen/Qwen3-0.6B --local-dir DIR" in capsys.readouterr().err
    assert main(["train", "data.path=allenai/c4"]) == 2
    assert "hf download allenai/c4 --repo-type dataset" in capsys.readouterr().err
