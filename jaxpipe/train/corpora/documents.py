"""Documents in files: one a line of JSONL (plain, ``.gz``, ``.zst``), one a row of Parquet, one a file of text.

The one reader for training and for token stores. Files are cut into pieces (:func:`pieces`) in a way that depends on nothing
else, so that any number of processes reads the same documents in the same order: a piece is some megabytes of lines, a row
group, or some files of text. Parquet is read by ``pyarrow``, ``.zst`` by ``zstandard``, imported when such a file is read.
Does not model: downloads, Arrow files, archives.
"""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxpipe.errors import DataError
from jaxpipe.wording import clipped

T = TypeVar("T")
RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""How the names of files of many documents end."""
SUFFIXES = (".txt", ".md", ".rst", ".py", *RECORDS)
"""How the names of files end that are read in a directory."""
PIECE_BYTES = 1 << 23
_BLOCK = 1 << 20
_ROWS = 1024  # of Parquet, held at a time


class BadRecordError(ValueError):
    """A record is no document. Its text says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some documents, one after another. ``files``: one, or several files of text. Of a ``.jsonl`` file those lines that begin
    in bytes ``[start, stop)``; of a compressed one ``content``, its lines after the first ``start``; of a Parquet file row
    group ``start``."""

    files: tuple[Path, ...]
    start: int = 0
    stop: int = 0
    content: bytes | None = None


def holds_records(path: Path) -> bool:
    """Whether a file holds many documents, by its name.

    Raises:
        DataError: it is JSONL in a form that can't be read.
    """
    name = path.name.lower()
    if ".jsonl." in name and not name.endswith(RECORDS):
        raise DataError(f"data {path}: JSONL is read plain, as .jsonl.gz or as .jsonl.zst; convert or rename it")
    return name.endswith(RECORDS)


def files_at(path: Path, suffixes: Sequence[str]) -> tuple[Path, ...]:
    """The file at ``path``, or those of a folder, sorted.

    Raises:
        DataError: nothing is there, or in the folder nothing with these suffixes.
    """
    if not path.exists():
        raise DataError(f"data {path}: no such file or directory (data.path may also be stdlib)")
    if path.is_dir():
        found = files_under(path, suffixes)
        if not found:
            raise DataError(f"data {path}: no files ending in {' '.join(suffixes)} below it; set data.suffixes")
        return found
    if not path.is_file():
        raise DataError(f"data {path}: a pipe, socket or device; copy it to a file first")
    return (path,)


def files_under(root: Path, suffixes: Iterable[str], without: Collection[str] = ()) -> tuple[Path, ...]:
    """Files below ``root`` with one of ``suffixes``, sorted by their parts, without hidden ones and folders of these names."""
    ends, found = tuple(suffixes), []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in without]
        found += [Path(folder, name) for name in names if name.endswith(ends) and not name.startswith(".")]
    return tuple(sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).parts))


def read_document(path: Path) -> str:
    """A file of text, in which bytes that are no UTF-8 are lone surrogates.

    Raises:
        DataError: it can't be read, is empty or binary.
    """
    with _reading(path):
        content = path.read_bytes()
    if not content:
        raise DataError(f"data {path}: the file is empty")
    zero = content.find(b"\0")
    if zero >= 0:
        raise DataError(f"data {path}: binary, not text (a zero byte at {zero}); arrays of ids end in .npy or .npz")
    return content.decode("utf-8", "surrogateescape")


def pieces(files: Iterable[Path]) -> Iterator[Piece]:
    """The pieces of these files, in their order.

    Raises:
        DataError: a file can't be read, or what reads it is not installed.
    """
    for is_records, group in itertools.groupby(files, holds_records):
        if is_records:
            for path in group:
                yield from _pieces_of(path)
            continue
        for texts in in_groups(group, _size, PIECE_BYTES):
            yield Piece(tuple(texts))


def in_groups(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Consecutive items together: each group ends with the item that brings its size to ``least``, the last as it comes."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= least:
            yield group
            group, total = [], 0
    if group:
        yield group


def records(piece: Piece, field: str, read: Callable[..., T], beside: str = "") -> Iterator[T]:
    """What ``read`` makes of the ``field`` of each record of a piece, and of the field ``beside`` it, which may be missing; it
    raises BadRecordError for what is no document.

    Raises:
        DataError: a line or row that is no document; says which, and what is wrong with it.
    """
    (path,) = piece.files
    of_rows = _is_parquet(path)
    values: Iterator[Any] = _rows(path, piece.start, field, beside) if of_rows else _lines(path, piece)
    for number, value in enumerate(values, 1):
        try:
            if of_rows:
                made = read(*value)
            elif value.isspace():
                continue
            else:
                record = json.loads(value.decode("utf-8"))
                made = read(_field(record, field), *([record.get(beside)] if beside else []))
        except (ValueError, RecursionError) as error:
            before = piece.start if piece.content is not None else _before(path, piece.start)
            place = f"{path}, {'row' if of_rows else 'line'} {before + number}"
            raise DataError(f"data {place}: {_wrong(error)}") from None
        yield made


def text_in(value: Any) -> str:
    """A document of text, for :func:`records`."""
    if not isinstance(value, str):
        raise BadRecordError(f"the document is {kind_of(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecordError(f"the document is no text: half of a surrogate pair at character {error.start}") from None
    return value


def without_nulls(value: Any, but: str = "") -> Any:
    """``value`` without the keys of its objects that are null; what is under the key ``but`` stays as it is."""
    if isinstance(value, dict):
        return {k: x if k == but else without_nulls(x, but) for k, x in value.items() if x is not None}
    return [without_nulls(x, but) for x in value] if isinstance(value, list) else value


def kind_of(value: Any) -> str:
    """What a JSON value is, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def package(name: str, path: Path) -> Any:
    """The optional package that reads ``path``.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        missing = name.partition(".")[0]
        raise DataError(f"data {path} needs the package {missing!r}: pip install {missing}") from None


def _field(record: Any, field: str) -> Any:
    if not isinstance(record, dict):
        raise BadRecordError(f'{kind_of(record)}, expected an object such as {{"{field}": …}}')
    if field not in record:
        has = clipped(", ".join(record), 100)
        raise BadRecordError(f"no field {field!r}{f' (it has {has})' if has else ''}; set data.field")
    return record[field]


def _wrong(error: Exception) -> str:
    if isinstance(error, BadRecordError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start})"
    why = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"not JSON ({clipped(why, 120)})"


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(".parquet")


def _size(path: Path) -> int:
    with _reading(path):
        return path.stat().st_size


def _pieces_of(path: Path) -> Iterator[Piece]:
    """Of a file of records."""
    if _is_parquet(path):
        with _reading(path):
            groups = _parquet(path).num_row_groups
        yield from (Piece((path,), group) for group in range(groups))
    elif path.name.lower().endswith(".jsonl"):
        size = _size(path)
        yield from (Piece((path,), at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES))
    else:
        held, lines = bytearray(), 0
        for block in _blocks(path):
            held += block
            while (end := held.find(b"\n", PIECE_BYTES - 1) + 1) > 0:
                yield Piece((path,), lines, content=bytes(held[:end]))
                lines += held.count(b"\n", 0, end)
                del held[:end]
        if held:
            yield Piece((path,), lines, content=bytes(held))


def _blocks(path: Path) -> Iterator[bytes]:
    """What a compressed file holds."""
    with _reading(path), path.open("rb") as file:
        if path.name.lower().endswith(".gz"):
            with gzip.open(file) as unpacked:
                while block := unpacked.read(_BLOCK):
                    yield block
            return
        zstandard = package("zstandard", path)
        frame, ended = zstandard.ZstdDecompressor().decompressobj(), True
        while packed := file.read(_BLOCK // 8):
            while packed:
                if block := frame.decompress(packed):
                    yield block
                packed, ended = frame.unused_data, frame.eof
                if ended:
                    frame = zstandard.ZstdDecompressor().decompressobj()
        if not ended:
            raise EOFError("its end is missing")


def _lines(path: Path, piece: Piece) -> Iterator[bytes]:
    """The lines of a piece of JSONL."""
    if piece.content is not None:
        yield from io.BytesIO(piece.content)
        return
    with _reading(path), path.open("rb") as file:
        at = piece.start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # the rest of a line that begins before
        while at < piece.stop and (line := file.readline()):
            at += len(line)
            yield line


def _before(path: Path, position: int) -> int:
    """How many lines begin before a byte of a file, or rows before a row group."""
    if _is_parquet(path):
        metadata = _parquet(path).metadata
        return sum(metadata.row_group(k).num_rows for k in range(position))
    with path.open("rb") as file:
        at = found = 0
        while at < position:
            at, found = at + len(file.readline()), found + 1
    return found


def _rows(path: Path, group: int, field: str, beside: str) -> Iterator[list[Any]]:
    """Of each row the ``field``, and the one ``beside`` it if that is named. Arrow gives every object all fields, and those
    that it does not have are null."""
    with _reading(path):
        file = _parquet(path)
        there = file.schema_arrow.names
        if field not in there:
            has = clipped(", ".join(there), 100)
            raise DataError(f"data {path}: no column {field!r} (it has {has}); set data.field")
        names = [field, *([beside] if beside else [])]
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[n for n in names if n in there]):
            for row in batch.to_pylist():
                yield [without_nulls(row.get(name)) for name in names]


def _parquet(path: Path) -> Any:
    return package("pyarrow.parquet", path).ParquetFile(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises DataError for what is wrong with a file that is read in the block."""
    try:
        yield
    except (DataError, BadRecordError, MemoryError):
        raise
    except OSError as error:
        if error.strerror:
            raise DataError(f"data {path}: can't be read ({error.strerror})") from None
        raise DataError(f"data {path}: damaged ({' '.join(str(error).split())})") from None
    except Exception as error:  # of gzip, zlib, zstandard and pyarrow
        raise DataError(f"data {path}: damaged ({clipped(' '.join(str(error).split()), 160)})") from None
