"""Read documents from files: one a line of JSON or an element of a list of JSON (plain, gzip, zstd), one a row of Parquet, one
a file of text.

Training and token stores read by this module alone. Files are cut into pieces (:func:`pieces`) in a way that depends on nothing
else, so that any number of processes reads the same documents in the same order: a piece is some megabytes of lines, a row
group, or some files of text. Parquet is read by ``pyarrow``, zstd by ``zstandard``, imported when such a file is read. Does not
model: downloads, Arrow files, archives.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxpipe.errors import DataError
from jaxpipe.files import check_local, hub_advice
from jaxpipe.text import truncate
from jaxpipe.train.corpora.content import (
    RECORD_FORMS,
    TEXT_SUFFIXES,
    UTF8_MARK,
    Form,
    blocks,
    form_of,
    is_compressed,
    plain_name,
    reading,
)  # fmt: skip
from jaxpipe.train.corpora.content import (
    package as package,
)

T = TypeVar("T")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""How the names of files end that are read in a directory."""
PIECE_BYTES = 1 << 23
_ROWS = 1024  # of Parquet, held at a time
_BLANKS = re.compile("[ \\t\\n\\r]*")
_PLACES = {"lines": "line", "list": "record", "rows": "row"}
_MOST_REASONS = 4  # in the line on files that are left out


class BadRecordError(ValueError):
    """A record is no document. The text says why."""


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """Some documents of the source files, one after another: what one process tokenises at a time.

    ``files``: one, or several files of text. In a file of lines the piece is the lines that begin in bytes ``[start, stop)``;
    in a compressed one or a list it is ``content``, whose lines follow the first ``start``; in Parquet it is row group
    ``start``.
    """

    files: tuple[Path, ...]
    form: Form = "text"
    start: int = 0
    stop: int = 0
    content: bytes | None = None


def files_at(path: Path, suffixes: Sequence[str], note: Callable[[str], None] = lambda line: None) -> tuple[Path, ...]:
    """Return the file at ``path``, or those of a folder, sorted. ``note`` is called with one line on what is left out of a
    folder.

    Raises:
        ConfigError: the path is a URL.
        DataError: nothing is there, or in the folder nothing with these suffixes.
    """
    check_local(path, "data")
    if not path.exists():
        advice = hub_advice(path, "dataset")
        raise DataError(f"data {path}: no such file or directory (data.path may also be stdlib){advice}")
    if path.is_dir():
        files, left_out = files_under(path, suffixes)
        line = _counted(left_out)
        if not files:
            why = line and f" ({line})"
            raise DataError(f"data {path}: no files ending in {' '.join(suffixes)} below it; set data.suffixes{why}")
        if line:
            note(line)
        return files
    if not path.is_file():
        raise DataError(f"data {path}: a pipe, socket or device; copy it to a file first")
    return (path,)


def files_under(
    root: Path, suffixes: Iterable[str], without: Collection[str] = (), *, links: bool = True
) -> tuple[tuple[Path, ...], Mapping[Path, str]]:
    """Return files below ``root`` with one of ``suffixes`` in any case, sorted by their parts, and, likewise relative to
    ``root``, why others are left out. Hidden files and folders, and folders called as ``without`` says, are not looked at.

    With ``links``, links to folders are followed. A file that is reached several ways counts once: by its own path, if that is
    below ``root``, else by the first of its paths.

    Raises:
        DataError: a folder below can't be read.
    """
    ends = tuple(suffix.lower() for suffix in suffixes)
    by_real_path: dict[str, Path] = {}
    left_out: dict[Path, str] = {}
    folders, linked_files, done = [root], [], set[str]()
    while folders:
        linked_folders: list[Path] = []
        for start in folders:
            real_start = os.path.realpath(start)
            # Such a link would bring in all that lies beside the data, and lead back here.
            if Path(real_start) in Path(os.path.realpath(root)).parents:
                left_out[start] = "a link to a folder above"
                continue
            for folder, inner, names in os.walk(start, onerror=_refuse_folder):
                real = str(Path(real_start, os.path.relpath(folder, start)))
                if real in done:
                    inner.clear()
                    continue
                inner[:] = [name for name in inner if not name.startswith(".") and name not in without]
                done.add(real)
                linked_folders += [path for name in inner if (path := Path(folder, name)).is_symlink()]
                for path in (Path(folder, name) for name in names if not name.startswith(".")):
                    if path.is_symlink():
                        linked_files.append(path)
                    elif why := _why_left_out(path, ends):
                        left_out[path] = why
                    else:
                        by_real_path[str(Path(real, path.name))] = path
        folders = sorted(linked_folders) if links else []
    # Files come before links to files: a file is named by its own path wherever the walk comes by it, in whatever order the
    # system lists a folder.
    for path in sorted(linked_files):
        real = os.path.realpath(path)
        if why := "reached twice" if real in by_real_path else _why_left_out(path, ends):
            left_out[path] = why
        else:
            by_real_path[real] = path
    in_order = sorted(left_out, key=lambda path: path.relative_to(root).parts)
    files = sorted(by_real_path.values(), key=lambda path: path.relative_to(root).parts)
    return tuple(files), {path.relative_to(root): left_out[path] for path in in_order}


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"data {error.filename}: can't be read ({error.strerror})")


def _why_left_out(path: Path, ends: tuple[str, ...]) -> str:
    """Return why a file of a folder is no data: its suffix, or what it is; empty if it is data."""
    if not path.exists():
        return "a link to nothing"
    if not path.is_file():
        return "a pipe, socket or device"
    name = path.name.lower()
    if name.endswith(ends):
        return ""
    suffixes = Path(plain_name(path)).suffix, name.removeprefix(plain_name(path))
    return "".join(suffixes) or "no suffix"


def _counted(left_out: Mapping[Path, str]) -> str:
    """Return one line on the files of a folder that are left out; empty if there are none."""
    if not left_out:
        return ""
    reasons = [reason for reason, _ in Counter(left_out.values()).most_common()]
    listed = ", ".join(truncate(ascii(r)[1:-1], 40) for r in reasons[:_MOST_REASONS]) + ", …" * (
        len(reasons) > _MOST_REASONS
    )
    first = truncate(ascii(str(next(iter(left_out))))[1:-1], 100)
    return f"left out: {len(left_out):,} file{'s' * (len(left_out) > 1)} ({listed}; first: {first})"


def formed(files: Iterable[Path], format: str = "auto") -> list[tuple[Path, Form]]:
    """Return files with the form of each, see :func:`~jaxpipe.train.corpora.content.form_of`."""
    return [(path, form_of(path, format)) for path in files]


def pieces(files: Iterable[tuple[Path, Form]]) -> Iterator[SourcePiece]:
    """Yield the pieces of these files, in their order.

    Raises:
        DataError: a file can't be read, or what reads it is not installed.
    """
    for is_records, group in itertools.groupby(files, lambda file: file[1] in RECORD_FORMS):
        if is_records:
            for path, form in group:
                yield from _pieces_of(path, form)
            continue
        texts = list(group)
        for paths in in_groups([path for path, _ in texts], _size, PIECE_BYTES):
            yield SourcePiece(tuple(paths), texts[0][1])


def in_groups(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield consecutive items together: each group ends with the item that brings its size to ``least``, but the last."""
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


def records(piece: SourcePiece, field: str, read: Callable[..., T], beside: str = "") -> Iterator[T]:
    """Yield what ``read`` makes of the ``field`` of each record of a piece, and of the field ``beside`` it, which may be
    missing. ``read`` raises BadRecordError for what is no document.

    Raises:
        DataError: a line or row that is no document; says which, and what is wrong with it.
    """
    (path,) = piece.files
    of_rows = piece.form == "rows"
    values: Iterator[Any] = _rows(path, piece.start, field, beside) if of_rows else _lines(path, piece)
    for number, value in enumerate(values, 1):
        try:
            if of_rows:
                document = read(*value)
            else:
                line = value.removeprefix(UTF8_MARK) if number == 1 and not piece.start else value
                if not line or line.isspace():
                    continue
                record = json.loads(line.decode("utf-8"))
                document = read(_field(record, field), *([record.get(beside)] if beside else []))
        except (ValueError, RecursionError) as error:
            before = piece.start if piece.content is not None else _before(path, piece)
            place = f"{path}, {_PLACES[piece.form]} {before + number}"
            raise DataError(f"data {place}: {_wrong(error)}") from None
        yield document


def text_in(value: Any) -> str:
    """Return ``value`` as a document of text, for :func:`records`."""
    if not isinstance(value, str):
        raise BadRecordError(f"the document is {kind_of(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecordError(f"the document is no text: half of a surrogate pair at character {error.start}") from None
    return value


def without_nulls(value: Any, but: str = "") -> Any:
    """Return ``value`` without the keys of its objects that are null; what is under the key ``but`` stays as it is."""
    if isinstance(value, dict):
        return {k: x if k == but else without_nulls(x, but) for k, x in value.items() if x is not None}
    return [without_nulls(x, but) for x in value] if isinstance(value, list) else value


def kind_of(value: Any) -> str:
    """Name what a JSON value is, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"of type {type(value).__name__}")


def _field(record: Any, field: str) -> Any:
    if not isinstance(record, dict):
        raise BadRecordError(f'{kind_of(record)}, expected an object such as {{"{field}": …}}')
    if field not in record:
        has = truncate(", ".join(record), 100)
        raise BadRecordError(f"no field {field!r}{f' (it has {has})' if has else ''}; set data.field")
    return record[field]


def _wrong(error: Exception) -> str:
    if isinstance(error, BadRecordError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start})"
    why = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"not JSON ({truncate(why, 120)})"


def _size(path: Path) -> int:
    with reading(path):
        return path.stat().st_size


def _pieces_of(path: Path, form: Form) -> Iterator[SourcePiece]:
    """Yield the pieces of a file of records."""
    if form == "rows":
        with reading(path):
            groups = _parquet(path).num_row_groups
        yield from (SourcePiece((path,), form, group) for group in range(groups))
    elif form == "list":
        count = 0
        for chunk in in_groups(_listed(path), len, PIECE_BYTES):
            yield SourcePiece((path,), form, count, content=b"".join(chunk))
            count += len(chunk)
    elif not is_compressed(path):
        size = _size(path)
        yield from (SourcePiece((path,), form, at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES))
    else:
        # A compressed file can't be entered in its middle, so its pieces carry their bytes. They end with a line: cutting by
        # size alone would tear a record, and where the blocks end must not matter.
        held, lines = bytearray(), 0
        for block in blocks(path):
            held += block
            while (end := held.find(b"\n", PIECE_BYTES - 1) + 1) > 0:
                yield SourcePiece((path,), form, lines, content=bytes(held[:end]))
                lines += held.count(b"\n", 0, end)
                del held[:end]
        if held:
            yield SourcePiece((path,), form, lines, content=bytes(held))


def _listed(path: Path) -> Iterator[bytes]:
    """Yield the records in a list of JSON, each as a line."""
    decoder, number = json.JSONDecoder(), 0
    try:
        text = b"".join(blocks(path)).removeprefix(UTF8_MARK).decode("utf-8")
        at = _after_blanks(text, _after_blanks(text, 0) + 1)
        while not text.startswith("]", at):
            number += 1
            record, at = decoder.raw_decode(text, at)
            # Written anew on one line, so that a piece of a list reads like a piece of JSON lines.
            yield json.dumps(record).encode() + b"\n"
            at = _after_blanks(text, at)
            if text.startswith(",", at):
                at = _after_blanks(text, at + 1)
            elif not text.startswith("]", at):
                raise json.JSONDecodeError("Expecting , or ]", text, at)
        if (end := _after_blanks(text, at + 1)) < len(text):
            raise json.JSONDecodeError("more after the end of the list", text, end)
    except (ValueError, RecursionError) as error:
        raise DataError(f"data {path}, record {number}: {_wrong(error)}") from None


def _after_blanks(text: str, at: int) -> int:
    """Return the first place from ``at`` on where JSON has no blank."""
    blank = _BLANKS.match(text, at)
    assert blank is not None
    return blank.end()


def _lines(path: Path, piece: SourcePiece) -> Iterator[bytes]:
    """Yield the lines of a piece of JSONL."""
    if piece.content is not None:
        yield from io.BytesIO(piece.content)
        return
    with reading(path), path.open("rb") as file:
        at = piece.start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # the rest of a line that begins before
        while at < piece.stop and (line := file.readline()):
            at += len(line)
            yield line


def _before(path: Path, piece: SourcePiece) -> int:
    """Count the lines or rows of a file that are before a piece."""
    position = piece.start
    if piece.form == "rows":
        metadata = _parquet(path).metadata
        return sum(metadata.row_group(k).num_rows for k in range(position))
    with path.open("rb") as file:
        at = count = 0
        while at < position:
            at, count = at + len(file.readline()), count + 1
    return count


def _rows(path: Path, group: int, field: str, beside: str) -> Iterator[list[Any]]:
    """Yield the ``field`` of each row, and the one ``beside`` it if that is named.

    Arrow gives every object all fields, and those that it does not have are null: they are taken out, so that a chat reads as
    in JSON.
    """
    with reading(path):
        file = _parquet(path)
        fields = file.schema_arrow.names
        if field not in fields:
            has = truncate(", ".join(fields), 100)
            raise DataError(f"data {path}: no column {field!r} (it has {has}); set data.field")
        names = [field, *([beside] if beside else [])]
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[n for n in names if n in fields]):
            for row in batch.to_pylist():
                yield [without_nulls(row.get(name)) for name in names]


def _parquet(path: Path) -> Any:
    return package("pyarrow.parquet", path).ParquetFile(path)
