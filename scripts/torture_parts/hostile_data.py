"""R10: data files made to harm. Nothing in them runs, and the answer is data or one line."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torture_parts.trial import Bench, Case, FailedError, Trial


def files(bench: Bench) -> Iterator[Case]:
    """R10."""
    for kind, name, make in _FILES:
        yield Case(kind, partial(_read, name=name, make=make))
    for _ in range(bench.count(300, 20)):
        yield Case("damaged array file", _mutated)


class _Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def _npy(header: str, body: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """An array file with any header."""
    text = header.encode("latin1") + b"\n"
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + body


def _header(descr: str = "'<i4'", shape: str = "(9,)", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}"


def _zip(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return content.getvalue()


def _pickled(mark: Path) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([_Bomb(mark)], dtype=object), allow_pickle=True)
    return content.getvalue()


def _of(content: bytes) -> Callable[[Path, Path], None]:
    return lambda path, mark: path.write_bytes(content) and None


_FILES: tuple[tuple[str, str, Callable[[Path, Path], Any]], ...] = (
    ("pickle", "a.npy", lambda path, mark: path.write_bytes(_pickled(mark))),
    ("pickle", "a.npz", lambda path, mark: path.write_bytes(_zip({"ids.npy": _pickled(mark)}))),
    ("pickle", "a.npy", lambda path, mark: path.write_bytes(pickle.dumps(_Bomb(mark)))),
    ("pickle", "a.npz", lambda path, mark: path.write_bytes(pickle.dumps(_Bomb(mark)))),
    ("pickle", "a.txt", lambda path, mark: path.write_bytes(pickle.dumps(_Bomb(mark), protocol=0))),
    ("code in a header", "a.npy", lambda path, mark: path.write_bytes(_npy(f"__import__('os').mkdir({str(mark)!r})"))),
    (
        "code in a header",
        "a.npy",
        lambda path, mark: path.write_bytes(_npy(_header(shape=f"(__import__('os').mkdir({str(mark)!r}),)"))),
    ),
    *(
        ("odd header", "a.npy", _of(_npy(header, bytes(100), version)))
        for version in ((1, 0), (2, 0), (3, 0), (9, 9))
        for header in (
            *(
                _header(shape=shape)
                for shape in ("(10**15,)", f"({10**15},)", "(-1,)", "(2**63,)", f"({2**63},)", "()", "(0,)", "9")
            ),
            *(_header(shape=shape) for shape in ("(1,)*40", "(3, 3)", "(1.5,)", "('9',)", "(True,)", "[9]", "(" * 300)),
            *(
                _header(descr)
                for descr in (
                    "'O'",
                    "'V999999999'",
                    "'<U99999999'",
                    "[('a', 'O')]",
                    "'<i999'",
                    "'object'",
                    "None",
                    "'|S0'",
                )
            ),
            *(
                _header(descr)
                for descr in ("'<M8'", "'<c16'", "'|b1'", "'<f2'", "'<u8'", "'>i2'", "(('<i4', (2**31,)))")
            ),
            *("", "{}", "{'descr': '<i4'}", "x" * 60_000, "{" * 900, _header(fortran="'yes'"), _header() + "\0\0"),
        )
    ),
    (
        "bomb",
        "a.npz",
        _of(_zip({"ids.npy": _npy(_header(shape=f"({10**8},)"), bytes(4 * 10**8))}, zipfile.ZIP_DEFLATED)),
    ),
    ("bomb", "a.npz", _of(_zip({"ids.npy": _npy(_header(shape=f"({10**15},)"), bytes(10**6))}, zipfile.ZIP_DEFLATED))),
    ("path in an archive", "a.npz", _of(_zip({"../../evil.npy": _npy(_header(), bytes(36)), "/abs.npy": b""}))),
    ("archive in an archive", "a.npz", _of(_zip({"ids.npy": _zip({"ids.npy": b"x"})}))),
    ("many members", "a.npz", _of(_zip({f"{k}.npy": b"" for k in range(5000)}))),
    ("member that is no array", "a.npz", _of(_zip({"ids": b"hello"}))),
    (
        "folder that holds itself",
        "d",
        lambda path, mark: (path.mkdir(), (path / "d").symlink_to(path), (path / "a.txt").write_text("x")),
    ),
    (
        "file in the place of a folder",
        "d",
        lambda path, mark: (path.mkdir(), (path / "a.txt").mkdir(), (path / "b.txt").symlink_to("b.txt")),
    ),
    (
        "folder of pipes",
        "d",
        lambda path, mark: (path.mkdir(), os.mkfifo(path / "a.txt"), (path / "b.txt").symlink_to("/dev/zero")),
    ),
    (
        "names that are not UTF-8",
        "d",
        lambda path, mark: (path.mkdir(), Path(os.fsdecode(os.fsencode(path) + b"/\xff.txt")).write_text("x" * 500)),
    ),
    ("long name", "d" * 200, _of(b"x" * 500)),
    ("one long line", "a.txt", _of(b"x" * 10**7)),
)


def _read(trial: Trial, name: str, make: Callable[[Path, Path], Any]) -> None:
    """Read data as ``jaxpipe train`` does before it compiles."""
    path, mark = trial.folder / name, trial.folder / "mark"
    make(path, mark)
    _load(path)
    if mark.exists():
        raise FailedError(f"code in {name} was run")


def _mutated(trial: Trial) -> None:
    rng, content = trial.rng, io.BytesIO()
    kind = rng.choice(("npy", "npz"))
    (np.save if kind == "npy" else np.savez)(content, np.arange(500, dtype=rng.choice(("u1", "<i4", ">i8"))) % 200)
    damaged = bytearray(content.getvalue())
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(min(len(damaged), rng.choice((150, len(damaged)))))] = rng.randrange(256)
    path = trial.folder / f"a.{kind}"
    path.write_bytes(damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))])
    _load(path)


def _load(path: Path) -> None:
    from jaxpipe.errors import JaxpipeError
    from jaxpipe.train.config import load_config
    from jaxpipe.train.corpora.datasets import load_dataset

    try:
        dataset = load_dataset(load_config(None, [f"data.path={path}", "data.seq_len=8"]))
        dataset.batches(0, 4, 8).batch_at(3)
        dataset.describe()
    except JaxpipeError as error:
        if "\n" in str(error):
            raise FailedError(f"not one line: {error}") from error
    except OSError as error:
        if not error.filename:  # the command line says which file, if the error does
            raise FailedError(f"{error} does not name its file") from error
