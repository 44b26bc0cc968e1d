"""R19: data files and folders of any content and name. Each document is read once, as it is, or one line says why not."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from torture_parts.trial import Bench, Case, FailedError, Trial

_RECORD_NAMES = (
    "a.jsonl",
    "a.JSONL",
    "a.json",
    "a.ndjson",
    "a.jsonlines",
    "a",
    "part-0",
    "a.data",
    "a.json.gz",
    "a.jsonl.zst",
)
_TEXT_NAMES = ("a.txt", "a.MD", "a.rst", "a.py", "a.txt.gz")
_TABLE_NAMES = ("a.csv", "a.tsv", "a.CSV.gz")
_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_CHARACTERS = (*"abc {}[]\"'\\,:\n\r\t", "\u2028", "\ufeff", "é", "語", "😀", "\x7f", "\x0b")
_STARTS = (
    b"PK\x03\x04\x14", b"\xfd7zXZ\0", b"BZh91AY&SY", b"\x80\x04\x95", b"SQLite format 3\0", b"%PDF-1.4",
    b"\x89PNG\r\n\x1a\n\0", b"ARROW1\0\0", b"\xff\xff\xff\xff\x08\0", b"FEA1\0", b"\x89HDF\r\n\x1a\n",
    b"version https://git-lfs.github.com/spec/v1\n",
    b"\xff\xfet\0", b"Rar!\x1a\x07\0", b"7z\xbc\xaf\x27\x1c", b"\0\0\0\0", b"Obj\x01\0",
    b"PAR1\0", b"ORC\0", b"\x1f\x8b\x08\0\0",
)  # fmt: skip
"""How content begins that is no text and that nothing here reads."""


def files(bench: Bench) -> Iterator[Case]:
    """R19."""
    tries = (("records", 700, _records), ("text and tables", 500, _texts), ("no text", 300, _containers))
    for kind, count, run in (*tries, ("folder", 400, _folder), ("source of a store", 100, _source)):
        for _ in range(bench.count(count, 5)):
            yield Case(kind, run)


def _text(rng: random.Random) -> str:
    return "x" + "".join(rng.choices(_CHARACTERS, k=rng.randint(0, 30)))


def _packed(rng: random.Random, content: bytes) -> bytes:
    how = rng.randrange(4)
    if how == 0:
        import zstandard

        return zstandard.ZstdCompressor().compress(content)
    return gzip.compress(content) if how == 1 else content


def _documents(path: Path, **reading: str) -> list[bytes] | str:
    """Read the documents as training and as stores do, and return them or the error line, which must agree."""
    from jaxpipe.errors import JaxpipeError
    from jaxpipe.train.corpora.corpus import load_corpus
    from jaxpipe.train.corpora.encoding import Reading
    from jaxpipe.train.corpora.store import build_store
    from jaxpipe.train.corpora.tokenizers import ByteTokenizer

    tokenizer, how = ByteTokenizer(), Reading(eos="0", **reading)
    store = path.with_name(f"store-{len(list(path.parent.iterdir()))}")
    doors: Sequence[Callable[[], Path]] = (lambda: path, lambda: build_store([path], store, tokenizer, how).folder)
    answers: list[list[bytes] | str] = []
    for door in doors:
        try:
            corpus = load_corpus(door(), tokenizer, how)
            spans = zip(corpus.edges[:-1], corpus.edges[1:], strict=True)
            answers.append([corpus.ids[start:stop].tobytes().removesuffix(b"\0") for start, stop in spans])
        except JaxpipeError as error:
            if "\n" in str(error):
                raise FailedError(f"not one line: {error}") from error
            answers.append(str(error))
    if type(answers[0]) is not type(answers[1]) or (isinstance(answers[0], list) and answers[0] != answers[1]):
        raise FailedError(f"training reads {answers[0]!r}, a store {answers[1]!r}, of {path.name}")
    return answers[0]


def _expect(path: Path, expected: list[bytes] | None, **reading: str) -> None:
    """Raise unless the file is read as the documents ``expected``, or refused if that is None."""
    actual = _documents(path, **reading)
    if not isinstance(actual, str) if expected is None else actual != expected:
        raise FailedError(f"{path.name} of {path.read_bytes()[:300]!r} is {actual!r}, not {expected!r}")


def _records(trial: Trial) -> None:
    rng = trial.rng
    texts = [_text(rng) for _ in range(rng.randint(1, 5))]
    rows = [{"n": rng.choice((1, "{", None)), "text": text} for text in texts]
    ascii_only = rng.random() < 0.5
    if rng.random() < 0.6:
        content = rng.choice(("\n", "\r\n", "\n\n")).join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    else:
        content = json.dumps(rows, ensure_ascii=ascii_only, indent=rng.choice((None, 1)))
    content = rng.choice(("", "\ufeff", "\n", " \r\n\n")) + content + rng.choice(("", "\n"))
    path = trial.folder / rng.choice(_RECORD_NAMES)
    damage = rng.random() < 0.3
    data = content.encode()
    expected: list[bytes] | None = [text.encode() for text in texts]
    if damage:  # something that is no record, which no line of the answer may hide
        data, expected = data.rstrip() + rng.choice((b"x", b'{"text": ', b"\n7", b'\n{"txt": "a"}', b"\n\xff")), None
    path.write_bytes(_packed(rng, data))
    _expect(path, expected)


def _texts(trial: Trial) -> None:
    """Text under names of text is its bytes unless it begins with a record; a table never is; both are with a word."""
    rng = trial.rng
    content = _text(rng).encode()
    name = rng.choice((*_TEXT_NAMES, *_TABLE_NAMES, "a"))
    record = rng.random() < 0.4
    if record:
        content = (
            rng.choice((b"", b"\n ", b"\xef\xbb\xbf")) + b'{"text": "a"}' + rng.choice((b"", b"\n", b" ")) + content
        )
    path = trial.folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    _expect(path, None if record or name in _TABLE_NAMES else [content])
    _expect(path, [content], format="text")


def _containers(trial: Trial) -> None:
    rng = trial.rng
    content = rng.choice(_STARTS) + rng.randbytes(rng.randint(0, 600))
    path = trial.folder / rng.choice((*_RECORD_NAMES, *_TEXT_NAMES, *_TABLE_NAMES, "a.bin"))
    path.write_bytes(gzip.compress(content) if rng.random() < 0.3 else content)
    _expect(path, None, **({"format": "text"} if rng.random() < 0.3 else {}))


def _folder(trial: Trial) -> None:
    """A tree with links of all kinds: each file of data once, and others counted."""
    from jaxpipe.errors import DataError
    from jaxpipe.train.corpora.documents import files_at

    rng = trial.rng
    root, _ = roots = trial.folder / "root", trial.folder / "beside"
    folders = list(roots)
    for each in roots:
        each.mkdir()
    for _ in range(rng.randint(0, 5)):
        folders.append(rng.choice(folders) / f"{rng.choice('aBz.')}{len(folders)}")
        folders[-1].mkdir()
    for number in range(rng.randint(1, 8)):
        suffix = rng.choice((".txt", ".TXT", ".jsonl", ".Jsonl", ".ndjson", ".json.gz", ""))
        name = f"{rng.choice(('f', 'Z', '.f'))}{number}{suffix}"
        (rng.choice(folders) / name).write_text(str(number))
    things = [*folders, *(path for base in roots for path in base.rglob("*")), trial.folder / "gone", trial.folder]
    for number in range(rng.randint(0, 5)):
        place = rng.choice(folders) / f"l{number}{rng.choice(('', '.txt'))}"
        place.symlink_to(rng.choice((rng.choice(things), os.path.relpath(rng.choice(things), place.parent))))
    notes: list[str] = []
    try:
        paths = files_at(root, _SUFFIXES, notes.append)
    except DataError as error:
        paths, notes = (), [str(error)]
    reached = _reached(root)
    data = {real for real, names in reached.items() if any(name.lower().endswith(_SUFFIXES) for name in names)}
    reals = [os.path.realpath(path) for path in paths]
    if set(reals) != data or len(reals) != len(data):
        raise FailedError(f"{sorted(reals)} are read, and there are {sorted(data)}")
    if list(paths) != sorted(paths, key=lambda path: path.relative_to(root).parts):
        raise FailedError(f"not in order: {paths}")
    if (num_missing := len(reached) - len(data)) and not any("left out: " in note for note in notes):
        raise FailedError(f"{num_missing} files are left out without a word")


def _reached(root: Path) -> dict[str, set[str]]:
    """Names of every file below ``root`` that is not hidden, by real path; links to folders above lead nowhere."""
    reached: dict[str, set[str]] = {}
    visited: set[str] = set()
    top = Path(os.path.realpath(root))

    def visit(folder: str) -> None:
        if folder in visited or Path(folder) in top.parents:
            return
        visited.add(folder)
        for name in os.listdir(folder):  # noqa: PTH208
            path = os.path.realpath(os.path.join(folder, name))  # noqa: PTH118
            if name.startswith("."):
                continue
            if os.path.isdir(path):  # noqa: PTH112
                visit(path)
            elif os.path.isfile(path):  # noqa: PTH113
                reached.setdefault(path, set()).add(name)

    visit(str(top))
    return reached


def _source(trial: Trial) -> None:
    """A store is of its sources' content, whatever happens to their times."""
    from jaxpipe.errors import DataError
    from jaxpipe.train.corpora.encoding import Reading
    from jaxpipe.train.corpora.store import build_store
    from jaxpipe.train.corpora.tokenizers import ByteTokenizer

    rng = trial.rng
    path, store = trial.folder / "a.txt", trial.folder / "store"
    path.write_bytes(np.array(rng.choices(range(97, 123), k=rng.randint(1, 5000)), np.uint8).tobytes())
    build_store([path], store, ByteTokenizer(), Reading())
    about, content = path.stat(), bytearray(path.read_bytes())
    change = rng.random() < 0.6
    if change:
        content[rng.randrange(len(content))] ^= 32
    (trial.folder / "new").write_bytes(content)
    (trial.folder / "new").replace(path)
    if rng.random() < 0.7:
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    try:
        build_store([path], store, ByteTokenizer(), Reading())
        refused = False
    except DataError:
        refused = True
    if refused is not change:
        raise FailedError(f"changed: {change}, refused: {refused}")
