"""Where token ids come from: a text file, a directory, the sources of the standard library, or an array of ids.

:func:`load_corpus` gives a :class:`Corpus`: one stream of ids with the documents it is made of. Files are read in sorted
order, so the stream is the same on every machine that has the same files. Text is tokenised at each start and held in
memory; arrays in ``.npy`` files are memory-mapped and may be larger than memory. Does not model: downloads, several
processes that read different parts, document separators (documents follow each other directly).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.train.tokenizers import Ids, Tokenizer, check_ids, id_dtype

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_CHUNK = 1 << 24  # ids looked at in one go
_HASH_WHOLE_BYTES = 1 << 26  # larger arrays are fingerprinted by samples


@dataclass(frozen=True, slots=True)
class Document:
    """A named part of the stream: ids ``[start, stop)``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """``ids``: 1-D, unsigned, all below the tokeniser's vocabulary size; may be a memory map. ``documents`` cover it in
    order. ``skipped``: files of a directory that could not be used, with the reason. ``fingerprint``: changes when ids do.
    """

    source: str
    ids: Ids
    documents: tuple[Document, ...]
    skipped: tuple[str, ...]
    fingerprint: str

    def describe(self) -> str:
        """One line: source, documents, tokens, files skipped."""
        skipped = f", {len(self.skipped)} files skipped (first: {self.skipped[0]})" if self.skipped else ""
        return f"{self.source}: {len(self.documents)} documents, {len(self.ids):,} tokens{skipped}"


def load_corpus(path: str | Path, tokenizer: Tokenizer, suffixes: Sequence[str] = TEXT_SUFFIXES) -> Corpus:
    """The corpus at ``path``: ``"stdlib"``, a directory, a ``.npy`` or ``.npz`` array of ids, or a text file.

    Raises:
        DataError: nothing there, unreadable, binary, empty, of the wrong shape or dtype, or with ids that the tokeniser
            does not have.
    """
    if path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return _from_files("stdlib", root, stdlib_files(root), tokenizer)
    path = Path(path)
    if not path.exists():
        raise DataError(f"data {path}: no such file or directory (data.path may also be stdlib)")
    if path.is_dir():
        found = _files_under(path, suffixes)
        if not found:
            raise DataError(f"data {path}: no files ending in {' '.join(suffixes)} below it; set data.suffixes")
        return _from_files(str(path), path, found, tokenizer)
    if not path.is_file():
        raise DataError(f"data {path}: a pipe, socket or device; copy it to a file first")
    if path.suffix in (".npy", ".npz"):
        return _from_array(path, _read_array(path), tokenizer)
    return _joined(str(path), [(path.name, _encode(path, tokenizer))], (), tokenizer)


def stdlib_files(root: Path) -> tuple[Path, ...]:
    """The ``.py`` files of the standard library at ``root``, sorted by path, without its tests and installed packages."""
    files = _files_under(root, (".py",), without=_NOT_STDLIB)
    if not files:
        raise DataError(f"data stdlib: no .py files below {root}; give data.path a text file or directory instead")
    return files


def _files_under(root: Path, suffixes: Iterable[str], without: Collection[str] = ()) -> tuple[Path, ...]:
    """Files below ``root`` with one of ``suffixes``, sorted by their parts, without hidden ones and folders of these names."""
    ends, found = tuple(suffixes), []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in without]
        found += [Path(folder, name) for name in names if name.endswith(ends) and not name.startswith(".")]
    return tuple(sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).parts))


def _encode(path: Path, tokenizer: Tokenizer) -> Ids:
    """Ids of one text file; raises DataError with the reason that it is unusable."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"data {path}: can't be read ({error.strerror})") from None
    if not content:
        raise DataError(f"data {path}: the file is empty")
    zero = content.find(b"\0")
    if zero >= 0:
        raise DataError(f"data {path}: binary, not text (a zero byte at {zero}); arrays of ids end in .npy or .npz")
    try:
        return tokenizer.encode(content.decode("utf-8", "surrogateescape"))
    except DataError as error:
        raise DataError(f"data {path}: {error}") from None


def _from_files(source: str, root: Path, files: Sequence[Path], tokenizer: Tokenizer) -> Corpus:
    """Files that can't be used are skipped and reported, unless none can. Empty files are skipped silently."""
    pieces, skipped = [], []
    for file in files:
        try:
            pieces.append((file.relative_to(root).as_posix(), _encode(file, tokenizer)))
        except DataError as error:
            if "is empty" not in str(error):
                skipped.append(str(error).removeprefix("data "))
    if not pieces:
        why = f"; the first: {skipped[0]}" if skipped else " (all are empty)"
        raise DataError(f"data {source}: none of its {len(files)} files can be used{why}")
    return _joined(source, pieces, tuple(skipped), tokenizer)


def _joined(source: str, pieces: Sequence[tuple[str, Ids]], skipped: tuple[str, ...], tokenizer: Tokenizer) -> Corpus:
    ids = np.concatenate([ids for _, ids in pieces])
    if not len(ids):
        raise DataError(f"data {source}: the tokenizer {tokenizer.name} made no tokens of it")
    stops = np.cumsum([len(ids) for _, ids in pieces]).tolist()
    names = [name for name, _ in pieces]
    documents = tuple(Document(n, a, b) for n, a, b in zip(names, [0, *stops[:-1]], stops, strict=True))
    return Corpus(source, ids, documents, skipped, fingerprint_ids(ids))


def several_arrays(path: str | Path) -> dict[str, npt.NDArray[Any]] | None:
    """The arrays of a ``.npz`` file that are no token ids: several, none of them called ``ids``. None of anything else.

    Raises:
        DataError: a ``.npz`` file that can't be read.
    """
    path = Path(path)
    if path.suffix != ".npz" or not path.is_file():
        return None
    with _reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        if len(archive.files) < 2 or "ids" in archive.files:
            return None
        return {name: archive[name] for name in archive.files}


def _read_array(path: Path) -> Ids:
    """The array of ids in a ``.npy`` (memory-mapped) or ``.npz`` file (its only array, or the one called ``ids``)."""
    with _reading(path):
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            names = archive.files
            if "ids" not in names and len(names) != 1:
                raise DataError(
                    f"data {path}: holds the arrays {', '.join(names) or '(none)'}; name the token ids 'ids'"
                )
            return np.asarray(archive["ids" if "ids" in names else names[0]])


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises DataError for whatever is wrong with an array file that is read in the block."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"data {path}: can't be read ({error.strerror or error})") from None
    except Exception as error:  # of NumPy's, zipfile's and zlib's readers, and of Python's tokenizer for the header
        raise DataError(
            f"data {path}: not a readable {path.suffix} array ({' '.join(str(error).split())[:120]})"
        ) from None


def _from_array(path: Path, ids: Ids, tokenizer: Tokenizer) -> Corpus:
    if ids.ndim != 1:
        shape = "x".join(map(str, ids.shape)) or "a single number"
        raise DataError(f"data {path}: its shape is {shape}, expected 1-D token ids; save array.reshape(-1)")
    if not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"data {path}: its dtype is {ids.dtype}, expected integer token ids such as uint16")
    if not len(ids):
        raise DataError(f"data {path}: the array is empty")
    _check_vocabulary(path, ids, tokenizer)
    if not isinstance(ids, np.memmap):
        ids = ids.astype(id_dtype(tokenizer.vocab_size), copy=False)
    return Corpus(str(path), ids, (Document(path.name, 0, len(ids)),), (), fingerprint_ids(ids))


def check_extent(ids: Ids) -> None:
    """Look whether a mapped file still holds its ids: reading beyond its end would kill the process (SIGBUS).

    Raises:
        DataError: it has become shorter.
    """
    if not isinstance(ids, np.memmap) or not isinstance(ids.base, mmap.mmap):
        return
    needed, there = ids.offset + ids.nbytes, ids.base.size()  # of the file that was opened, whatever its name is now
    if there < needed:
        raise DataError(
            f"data {ids.filename}: the file was cut to {there} bytes while it was in use, and its ids need {needed}; restore it"
        )


def _check_vocabulary(path: Path, ids: Ids, tokenizer: Tokenizer) -> None:
    try:
        for start in range(0, len(ids), _CHUNK):
            check_ids(ids[start : start + _CHUNK], tokenizer, start)
    except DataError as error:
        advice = "set data.tokenizer to the one that made them, or to ids:N with their vocabulary size"
        raise DataError(f"data {path}: {error}: {advice}") from None


def fingerprint_ids(ids: Ids) -> str:
    """A short hash of the ids' values (not of their dtype). Above 2^24 ids, of their number and 257 evenly spread samples."""
    digest = hashlib.sha256(str(len(ids)).encode())
    whole = len(ids) * 4 <= _HASH_WHOLE_BYTES
    starts = range(0, len(ids), _CHUNK) if whole else np.linspace(0, len(ids) - (1 << 14), 257, dtype=np.int64)
    length = _CHUNK if whole else 1 << 14
    for start in starts:
        digest.update(np.ascontiguousarray(ids[int(start) : int(start) + length], dtype="<u4").data)
    return digest.hexdigest()[:16]
