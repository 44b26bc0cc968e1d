"""Read documents from files: one a line of JSON or an element of a list of JSON (plain, gzip, zstd), a row of Parquet, a file
of text.

The first bytes of a file decide which form it has (:func:`form_of`); its name decides only what content can't. JSON lines are
read under any name but one that says text, compressed or not, whatever the name says of that; Parquet and arrays are read under
any name; an archive is never read as text; and a file that is called text and begins with a record is refused until
``data.format`` says what it is.

Training and token stores read by this module alone. Files are cut into pieces (:func:`pieces`) in a way that depends on nothing
else, so that any number of processes reads the same documents in the same order: a piece is some megabytes of lines, a row
group, or some files of text. Parquet is read by ``pyarrow``, zstd by ``zstandard``, imported when such a file is read. Does not
model: downloads, Arrow files, archives.
"""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, TypeVar, cast

from jaxpipe.errors import DataError
from jaxpipe.files import check_local, hub_advice
from jaxpipe.text import truncate

Form: TypeAlias = Literal["text", "raw", "lines", "list", "rows", "npy", "npz"]
"""``text``: a file that is one document, or can't be read; ``raw``: one that ``data.format`` calls text, so JSON is text too;
``lines``: a record a line of JSON; ``list``: records in a list of JSON; ``rows``: a record a row of Parquet; ``npy``, ``npz``:
arrays."""
RECORD_FORMS: tuple[Form, ...] = ("lines", "list", "rows")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
"""How names end that say that a file is text."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
_LINES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson")
_GZIP, _ZSTD, _PARQUET, _NUMPY, _ZIP = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"\x93NUMPY", b"PK\x03\x04"
UTF8_MARK = b"\xef\xbb\xbf"
_UNPACK, _TO_PARQUET = "unpack it first", "convert it to Parquet or to JSON lines"
_PICTURES = "save pictures as an array in a .npz"
_CONTAINERS: tuple[tuple[bytes, str, str], ...] = (
    (_ZIP, "a zip archive", _UNPACK),
    (b"PK\x05\x06", "an empty zip archive", "name the files themselves"),
    (b"\xfd7zXZ\0", "compressed by xz", "unpack it first (unxz)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "unpack it first (unlz4)"),
    (_GZIP, "compressed by gzip", "unpack it first (gunzip)"),
    (_ZSTD, "compressed by zstd", "unpack it first (unzstd)"),
    (_PARQUET, "Parquet", "unpack it first"),
    (_NUMPY, "an array of NumPy's", "give it as data.path, by itself and unpacked"),
    (b"PARE", "encrypted Parquet", "decrypt it first"),
    (b"ARROW1", "an Arrow file", _TO_PARQUET),
    (b"\xff\xff\xff\xff", "a stream of Arrow's", _TO_PARQUET),
    (b"FEA1", "a Feather file", _TO_PARQUET),
    (b"ORC", "an ORC file", _TO_PARQUET),
    (b"Obj\x01", "an Avro file", _TO_PARQUET),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "save its token ids as .npy, or its text as JSON lines"),
    (b"SQLite format 3\0", "an SQLite database", "export its text as JSON lines"),
    (b"%PDF-", "a PDF", "extract its text first (pdftotext)"),
    (b"{\\rtf", "rich text (RTF)", "save it as plain text"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a file of an office program", "save it as plain text"),
    (b"\x89PNG\r\n\x1a\n", "a picture (PNG)", _PICTURES),
    (b"\xff\xd8\xff", "a picture (JPEG)", _PICTURES),
    (b"GIF87a", "a picture (GIF)", _PICTURES),
    (b"GIF89a", "a picture (GIF)", _PICTURES),
    (b"RIFF", "sound or a picture (RIFF)", "save it as an array in a .npz"),
    (b"version https://git-lfs.github.com/", "a pointer of Git LFS in place of the file", "fetch it (git lfs pull)"),
    (b"\xff\xfe", "text in UTF-16", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"\xfe\xff", "text in UTF-16", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    *((b"BZh%d1AY&SY" % size, "compressed by bzip2", "unpack it first (bunzip2)") for size in range(1, 10)),
    *(
        (b"\x80" + bytes([protocol]), "a pickle of Python's", "save it as .npy or JSON lines")
        for protocol in range(2, 6)
    ),
)
"""First bytes, what they say that a file is, and what to do."""
_TABLES = {".csv": "comma-separated", ".tsv": "tab-separated", ".arrow": "Arrow", ".feather": "Feather"}
_BLOCK = 1 << 20
_LIST = re.compile(rb"\[\s*[{\]]")
_JSON = re.compile(rb'(\[\s*)?\{\s*"')
_ONE_A_LINE = "write one record a line (jq -c .; of a list: jq -c '.[]')"
_AS_TEXT = "data.format=text (data build: --format text) reads it as it is"
T = TypeVar("T")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""How the names of files end that are read in a directory."""
PIECE_BYTES = 1 << 23
_ROWS = 1024  # of Parquet, held at a time
_BLANKS = re.compile("[ \\t\\n\\r]*")
_PLACES = {"lines": "line", "list": "record", "rows": "row"}
_MOST_REASONS = 4  # in the line on files that are left out


def form_of(path: Path, format: str = "auto") -> Form:
    """Return the form of a file. ``format``: ``data.format``.

    Raises:
        DataError: its name says that it holds records, and it holds something else.
    """
    name, start = plain_name(path), _start(path)
    for suffix, form in ((".npy", "npy"), (".npz", "npz"), (".parquet", "rows")):
        if path.name.lower().endswith(suffix):
            return cast(Form, form)
    # Text may begin with PAR1; Parquet ends with it, too.
    if start.startswith(_PARQUET) and _end(path) == _PARQUET:
        return "rows"
    if start.startswith(_NUMPY):
        return "npy"
    if start.startswith(_ZIP) and _has_arrays(path):
        return "npz"
    if name.endswith(_LINES) or (name.endswith(".json") and format != "text"):
        return _form_of_records(path, name)
    if format == "text":
        return "raw"
    if format != "chat" and name.endswith((*TEXT_SUFFIXES, *_TABLES)):
        return "text"
    line = _first_line(path)
    return "list" if _LIST.match(line) else "lines" if _begins_with_record(line) else "text"


def _form_of_records(path: Path, name: str) -> Form:
    """Return the form of a file whose name says that it holds records of JSON."""
    line = _first_line(path)
    if wrong := _container(next(blocks(path), b"")):
        raise DataError(f"data {path}: {wrong}")
    if _LIST.match(line) or (name.endswith(".json") and line.startswith(b"[")):
        return "list"
    if name.endswith(".json") and line and not _begins_with_record(line):
        raise DataError(f"data {path}: its first line is no record; {_ONE_A_LINE}, or {_AS_TEXT}")
    return "lines"


def read_text(path: Path, form: Form) -> str:
    """Read a file that is one document, of the form ``text`` or ``raw``; bytes that are no UTF-8 become lone surrogates.

    Raises:
        DataError: it can't be read, is empty or binary, or, unless ``raw``, a table or JSON.
    """
    with read_errors(path):
        content = path.read_bytes()
    if _compression(content):
        content = b"".join(_to_a_zero(blocks(path)))
    if not content:
        raise DataError(f"data {path}: the file is empty")
    wrong, zero = _container(content), content.find(b"\0")
    if not wrong and zero >= 0:
        wrong = f"binary, not text (a zero byte at {zero}); arrays of ids end in .npy or .npz"
    if wrong := wrong or ("" if form == "raw" else _not_text(plain_name(path), content)):
        raise DataError(f"data {path}: {wrong}")
    return content.decode("utf-8", "surrogateescape")


def _to_a_zero(unpacked: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the blocks up to one with a zero byte: that is no text, and may go on for gigabytes."""
    for block in unpacked:
        yield block
        if b"\0" in block:
            return


def _not_text(name: str, content: bytes) -> str:
    """Return why a file is not read as one document unless ``data.format`` demands it; empty if it is."""
    for suffix, kind in _TABLES.items():
        if name.endswith(suffix):
            return f"a table ({kind}); {_TO_PARQUET}, or {_AS_TEXT}"
    start = content[:_BLOCK].removeprefix(UTF8_MARK).lstrip()
    if start[:1] not in (b"{", b"["):
        return ""
    if _begins_with_record(content.removeprefix(UTF8_MARK).lstrip().partition(b"\n")[0]):
        return f"it begins with a record of JSON; call it .jsonl to read records, or {_AS_TEXT}"
    if _JSON.match(start) and not name.endswith(".py"):  # in Python a table of names may begin a file
        return f"it begins as JSON, and its first line is no record; {_ONE_A_LINE}, or {_AS_TEXT}"
    return ""


def _container(content: bytes) -> str:
    """Return what content is that is no text by its first bytes, and what to do; empty if nothing is known of it."""
    for start, kind, advice in _CONTAINERS:
        # Text may begin with ORC or RIFF; with letters alone a zero byte has to follow soon.
        if content.startswith(start) and (not start.isalnum() or b"\0" in content[:512]):
            return f"{kind}; {advice}"
    if content[257:262] == b"ustar":
        return f"a tar archive; {_UNPACK}"
    if content[8:10] == b'{"' and int.from_bytes(content[:8], "little") < 1 << 27:
        return "tensors of a model (safetensors); run.init_from takes their folder"
    return ""


def is_compressed(path: Path) -> bool:
    return _compression(_start(path)) != ""


def _compression(content: bytes) -> str:
    """Return ``gzip`` or ``zstd``, by the first bytes; empty for what is compressed by neither."""
    # pzstd begins its files with a frame that zstd skips.
    skipped = content[1:4] == b"\x2a\x4d\x18" and content[0] >> 4 == 5
    return "gzip" if content.startswith(_GZIP) else "zstd" if content.startswith(_ZSTD) or skipped else ""


def blocks(path: Path) -> Iterator[bytes]:
    """Yield what a file holds, unpacked, some of it at a time.

    Raises:
        DataError: it can't be read, or is damaged.
    """
    with read_errors(path), path.open("rb") as file:
        kind = _compression(file.read(4))
        file.seek(0)
        if kind == "zstd":
            yield from _unpacked_zstd(file, package("zstandard", path))
            return
        with gzip.open(file) if kind == "gzip" else nullcontext(file) as plain:
            while block := plain.read(_BLOCK):
                yield block


def _unpacked_zstd(file: BinaryIO, zstandard: Any) -> Iterator[bytes]:
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


def plain_name(path: Path) -> str:
    """Return the name in lower case, without what it says of compression."""
    name = path.name.lower()
    return next((name.removesuffix(suffix) for suffix in _COMPRESSED if name.endswith(suffix)), name)


def _start(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:  # the reader that follows reports it
        return file.read(512)
    return b""


def _end(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return file.read()
    return b""


def _has_arrays(path: Path) -> bool:
    """Whether a zip archive holds arrays of NumPy's, and so is a .npz."""
    with suppress(Exception), zipfile.ZipFile(path) as archive:  # zipfile raises of many kinds
        return any(name.endswith(".npy") for name in archive.namelist())
    return False


def _first_line(path: Path) -> bytes:
    """Return the first line that is not blank, without blanks before it; at most a block of what begins neither an object nor a
    list."""
    held = bytearray()
    for block in blocks(path):
        if not held:
            block = block.removeprefix(UTF8_MARK).lstrip()
        held += block
        # A record may be longer than a block, so what begins one is read to the end of its line.
        if held and (held[0] not in b"{[" or b"\n" in block):
            break
    line, _, rest = bytes(held).partition(b"\n")
    return line if line.strip() != b"[" else line + rest.lstrip()[:1]  # of a list its first element begins, too


def _begins_with_record(line: bytes) -> bool:
    """Whether an object of JSON, or a list of objects, stands at the beginning of a line."""
    try:
        value, _ = json.JSONDecoder().raw_decode(line.decode("utf-8", "replace"))
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):  # numbers of thousands of digits, lists in lists a thousand deep
        return True
    return isinstance(value, dict) or (isinstance(value, list) and value != [] and isinstance(value[0], dict))


def package(name: str, path: Path) -> Any:
    """Import the optional package that reads ``path``.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        missing = name.partition(".")[0]
        raise DataError(f"data {path}: needs the package {missing!r}: pip install {missing}") from None


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Raise DataError for what is wrong with a file that is read in the block."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except OSError as error:
        if error.strerror:
            raise DataError(f"data {path}: can't be read ({error.strerror})") from None
        raise DataError(f"data {path}: damaged ({' '.join(str(error).split())})") from None
    except Exception as error:  # of gzip, zlib, zstandard and pyarrow
        raise DataError(f"data {path}: damaged ({truncate(' '.join(str(error).split()), 160)})") from None


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


def with_forms(files: Iterable[Path], format: str = "auto") -> list[tuple[Path, Form]]:
    """Return files with the form of each, see :func:`~jaxpipe.train.corpora.documents.form_of`."""
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
    with read_errors(path):
        return path.stat().st_size


def _pieces_of(path: Path, form: Form) -> Iterator[SourcePiece]:
    """Yield the pieces of a file of records."""
    if form == "rows":
        with read_errors(path):
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
        at = after_blanks(text, after_blanks(text, 0) + 1)
        while not text.startswith("]", at):
            number += 1
            record, at = decoder.raw_decode(text, at)
            # Written anew on one line, so that a piece of a list reads like a piece of JSON lines.
            yield json.dumps(record).encode() + b"\n"
            at = after_blanks(text, at)
            if text.startswith(",", at):
                at = after_blanks(text, at + 1)
            elif not text.startswith("]", at):
                raise json.JSONDecodeError("Expecting , or ]", text, at)
        if (end := after_blanks(text, at + 1)) < len(text):
            raise json.JSONDecodeError("more after the end of the list", text, end)
    except (ValueError, RecursionError) as error:
        raise DataError(f"data {path}, record {number}: {_wrong(error)}") from None


def after_blanks(text: str, at: int) -> int:
    """Return the first place from ``at`` on where JSON has no blank."""
    blank = _BLANKS.match(text, at)
    assert blank is not None
    return blank.end()


def _lines(path: Path, piece: SourcePiece) -> Iterator[bytes]:
    """Yield the lines of a piece of JSONL."""
    if piece.content is not None:
        yield from io.BytesIO(piece.content)
        return
    with read_errors(path), path.open("rb") as file:
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
    with read_errors(path):
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
