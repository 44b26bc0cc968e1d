"""Decide by its first bytes which form the content of a data file has.

A name decides only what content can't. JSON lines are read under any name but one that says text, compressed or not, whatever
the name says of that; Parquet and arrays are read under any name; an archive is never read as text; and a file that is called
text and begins with a record is refused until ``data.format`` says what it is.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, cast

from jaxpipe.errors import DataError
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
    with reading(path):
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
    """Return why a file is not read as one document until somebody says that it is; empty if it is."""
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
    with reading(path), path.open("rb") as file:
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
    with suppress(OSError), path.open("rb") as file:  # who reads it then tells of the error
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
def reading(path: Path) -> Iterator[None]:
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
