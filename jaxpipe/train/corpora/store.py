"""Build and read token stores: corpora tokenised once, larger than memory, checked before they are trained on.

A store is a folder with ``ids.bin`` (token ids, little-endian, of the smallest unsigned type that holds the vocabulary),
``edges.bin`` (int64: where each document starts, and the end), where ids do not give it ``sizes.bin`` (int64: bytes of the text
of each document), for chats ``answers.bin`` (uint8, :class:`~jaxpipe.train.corpora.encoding.Encoded`), what came with the
tokenizer (``tokenizer.json`` and the files beside it, the template of chats), and ``store.json``, written last: how it was
made, and the SHA-256 of each piece. All files are memory-mapped.

:func:`build_store` makes the same bytes with any number of processes. Sources are cut into pieces that depend on the files
alone; processes tokenise pieces, each into a file of its own, and this one appends them in their order. After each piece a line
goes to ``building.jsonl``. A build that was killed is taken up by the same command: what stands behind the last whole line is
cut off. A few pieces a process are held at a time.

Whether a source is still the one that a store is of is decided by the SHA-256 of all its bytes, not by its time or size: tools
that copy keep times, and others set them without a change. That reads each source once more, at 1.2 GB a second of CPU time.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.files import check_local, write_atomically
from jaxpipe.interop.folder import FILES, JSON, TEMPLATE, copy_files
from jaxpipe.interrupts import starting_children
from jaxpipe.text import format_bytes
from jaxpipe.train.corpora.documents import PIECE_BYTES, SourcePiece, files_at, pieces, read_errors, with_forms
from jaxpipe.train.corpora.encoding import Encoder, Reading
from jaxpipe.train.corpora.tokenizers import Tokenizer, id_dtype, load_tokenizer

FORMAT = 2
READ = (1, FORMAT)
"""Stores of format 1 have no sizes."""
MANIFEST, JOURNAL = "store.json", "building.jsonl"
IDS, EDGES, ANSWERS, SIZES = "ids.bin", "edges.bin", "answers.bin", "sizes.bin"
_CHECKED_BYTES = 1 << 30  # of larger stores 64 pieces are looked at, spread evenly
_CHECKED_PIECES = 64


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Describes one piece of a store: how many documents and tokens it has, the SHA-256 of its ids, its documents' lengths as
    int64, and its answers; and that of its sizes."""

    documents: int
    tokens: int
    sha256: str
    sizes_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """The content of ``store.json``. ``spec``: how the store was made; ``parts``: its pieces."""

    folder: Path
    spec: Mapping[str, Any]
    parts: tuple[StoredPiece, ...]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read ``store.json``.

        Raises:
            ConfigError: the folder is a URL.
            DataError: it is missing or damaged, or the store is not finished.
        """
        check_local(folder, "store")
        path = folder / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(
                f"data {folder}: a token store that is not finished; run its 'jaxpipe data build' again"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data {path}: can't be read ({error}); {_REBUILD}") from None
        try:
            spec = json.loads(text)
            sha256 = spec.pop("sha256")
            # The text must come out the same to the byte: a manifest that somebody edited fails here even if it parses.
            if _signed(spec) != text or not isinstance(sha256, str):
                raise ValueError
            if (kind := spec.pop("format")) not in READ:
                raise DataError(f"data {path}: of format {kind}, and this jaxpipe reads {FORMAT}; build the store anew")
            return cls(folder, spec, tuple(StoredPiece(*part) for part in spec.pop("parts")))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"data {path}: damaged; {_REBUILD}") from None

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """A hash that changes when a token, a document's length or an answer does."""
        return hashlib.sha256(" ".join(part.sha256 for part in self.parts).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the text of ``store.json``; equal stores have equal texts."""
        parts = [astuple(part) for part in self.parts]
        return _signed({"format": FORMAT, **self.spec, "parts": parts})

    def arrays(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Return dtype and length of the array in each file."""
        layout = {IDS: (id_dtype(self.spec["vocab_size"]).newbyteorder("<"), self.tokens)}
        layout[EDGES] = (np.dtype("<i8"), self.documents + 1)
        if self.spec.get("sizes"):
            layout[SIZES] = (np.dtype("<i8"), self.documents)
        return layout | ({ANSWERS: (np.dtype("u1"), self.tokens)} if self.spec["documents_are"] == "chat" else {})

    def maps(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays, memory-mapped.

        Raises:
            DataError: a file is missing, or has not the size that it must have.
        """
        maps: dict[str, npt.NDArray[Any]] = {}
        for name, (dtype, count) in self.arrays().items():
            path = self.folder / name
            try:
                size = path.stat().st_size
                if size == dtype.itemsize * count:
                    maps[name] = np.memmap(path, dtype, "r")
            except OSError as error:
                raise DataError(f"data {path}: can't be read ({error.strerror}); {_REBUILD}") from None
            if name not in maps:
                raise DataError(f"data {path}: {size} bytes, and it must have {dtype.itemsize * count}; {_REBUILD}")
        return maps

    def check(self, *, every_piece: bool) -> None:
        """Compare checksums: of every piece, or, unless ``every_piece``, of some of a store above 1 GiB.

        Raises:
            DataError: a file is damaged or missing; names it.
        """
        maps = self.maps()
        edges = maps[EDGES]
        at = [0, *itertools.accumulate(part.tokens for part in self.parts)]
        first = [0, *itertools.accumulate(part.documents for part in self.parts)]
        count = len(self.parts)
        few = not every_piece and maps[IDS].nbytes > _CHECKED_BYTES and count > _CHECKED_PIECES
        for k in np.linspace(0, count - 1, _CHECKED_PIECES).astype(int).tolist() if few else range(count):
            lengths = np.diff(edges[first[k] : first[k + 1] + 1])
            answers = maps[ANSWERS][at[k] : at[k + 1]] if ANSWERS in maps else None
            sizes = maps[SIZES][first[k] : first[k + 1]] if SIZES in maps else None
            ids_digest = digest(maps[IDS][at[k] : at[k + 1]], lengths, answers)
            if (ids_digest, sizes_digest(sizes)) != (self.parts[k].sha256, self.parts[k].sizes_sha256):
                where = f"piece {k + 1} of {count} (documents {first[k] + 1:,} to {first[k + 1]:,})"
                raise DataError(f"data {self.folder}: {where} is damaged: its checksum differs; {_REBUILD}")
        # Checksums are of lengths, differences of edges, so a shift of all edges shows in none of them.
        if edges[0] != 0 or edges[-1] != self.tokens:
            raise DataError(f"data {self.folder / EDGES}: damaged: its first or last number is wrong; {_REBUILD}")

    def check_tokenizer(self) -> None:
        """Raise DataError unless the ``tokenizer.json`` in the folder, if there is one, makes the ids of the store."""
        if (path := self.folder / JSON).is_file():
            load_tokenizer(str(path)).check_store(self.folder, self.spec["tokenizer"])


_REBUILD = "restore it, or delete the folder and run 'jaxpipe data build' again"


def is_store(path: Path) -> bool:
    """Whether a folder is a token store, or one that is not finished."""
    return any((path / name).is_file() for name in (MANIFEST, JOURNAL, IDS))


def digest(ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], answers: npt.NDArray[np.uint8] | None) -> str:
    """Return the checksum of a piece."""
    hashed = hashlib.sha256()
    for array in (ids, lengths, answers):
        if array is not None:
            hashed.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return hashed.hexdigest()


def sizes_digest(sizes: npt.NDArray[np.int64] | None) -> str:
    """Return the checksum of the sizes of a piece: one of its own, so that a store is the same data with them as without."""
    return "" if sizes is None else hashlib.sha256(np.ascontiguousarray(sizes, "<i8").data).hexdigest()


def _signed(spec: Mapping[str, Any]) -> str:
    """Return JSON with its own checksum."""
    plain = json.dumps(spec, ensure_ascii=True, sort_keys=True)
    return json.dumps({**spec, "sha256": hashlib.sha256(plain.encode()).hexdigest()}, sort_keys=True) + "\n"


_PIECES = ".pieces-"
_OURS = (IDS, EDGES, ANSWERS, SIZES, JOURNAL, *FILES)
_AHEAD = 2  # pieces a process may be ahead
_NOTE_S = 5.0
_LONG_BYTES = 4 << 30  # of sources, whose checksums take seconds


def build_store(
    sources: Sequence[Path],
    folder: Path,
    tokenizer: Tokenizer,
    reading: Reading,
    *,
    workers: int = 1,
    note: Callable[[str], None] = lambda line: None,
) -> Store:
    """Tokenise ``sources``, files and folders, into a store at ``folder``, or go on with what was begun there. ``note`` is
    called with lines on progress, and on files that can't be used.

    Raises:
        ConfigError: a path is a URL.
        DataError: a source can't be read or has changed, a record is no document, no document has a token, or the folder
            can't be written or holds something else.
    """
    encoder = Encoder.of(tokenizer, reading)
    check_local(folder, "store")
    rooted = [(root, path) for root in sources for path in files_at(root, reading.suffixes, note)]
    files = [path for _, path in rooted]
    named = tuple(
        f"{root}: " for root, path in rooted if root == path
    )  # these are to be read, not only to be looked at
    try:
        names = [str(Path(root.name, path.relative_to(root))) for root, path in rooted]
        before = [_state(path) for path in files]
        spec = _spec(encoder, names, files, note)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).is_file():
            store = _check_same(Store.read(folder), spec, tokenizer, note)
            note(f"{folder} is built already")
            return store
        with ExitStack() as opened:
            journal = opened.enter_context(_journal(folder))
            parts = _resume(folder, journal, spec)
            if parts:
                note(f"going on after {len(parts)} pieces")
            arrays = Store(folder, spec, ()).arrays()
            outputs = {name: opened.enter_context((folder / name).open("r+b", buffering=0)) for name in arrays}
            for output in outputs.values():
                output.seek(0, os.SEEK_END)
            rest = itertools.islice(pieces(with_forms(files, reading.format)), len(parts), None)
            tokens, noted_s = sum(part.tokens for part in parts), time.monotonic()
            pieces_at = Path(opened.enter_context(TemporaryDirectory(dir=folder, prefix=_PIECES)))
            for line in filter(None, (*tokenizer.remarks, encoder.describe())):
                note(line)
            loss = ""
            for done in opened.enter_context(closing(_encoded(encoder, workers, pieces_at, rest))):
                for problem in done.problems:
                    if problem.startswith(named) and not problem.endswith("the file is empty"):
                        raise DataError(f"data {problem}")
                    note(f"left out: {problem}")
                if done.loss and not loss:
                    note(loss := done.loss)
                _append(done, tokens, outputs, journal)
                parts.append(done.part)
                tokens += done.part.tokens
                if time.monotonic() - noted_s > _NOTE_S:
                    noted_s = time.monotonic()
                    note(f"{len(parts)} pieces, {tokens:,} tokens")
            for output in outputs.values():
                os.fsync(output.fileno())
        # Checksums in ``spec`` were taken before the first piece was read; a source written to since would make a store that
        # claims to be of another content.
        for path, state in zip(files, before, strict=True):
            if _state(path) != state:
                raise DataError(f"data {path}: changed while the store was built; delete {folder} and build it again")
        store = Store(folder, spec, tuple(parts))
        if not store.tokens:
            raise DataError(f"data {', '.join(map(str, sources))}: no document has a token")
        if remark := encoder.remark(store.documents):
            note(remark)
        _keep_tokenizer(folder, encoder)
        write_atomically(folder / MANIFEST, store.to_json())
        (folder / JOURNAL).unlink()
    except OSError as error:
        raise DataError(f"data {folder}: can't be written ({error.strerror or error})") from None
    return store


def _keep_tokenizer(folder: Path, encoder: Encoder) -> None:
    """Keep all that came with the tokenizer, and the template of chats: runs of the store name the ``tokenizer.json`` in it."""
    tokenizer, came_from = encoder.tokenizer, Path(encoder.tokenizer.name).parent
    if tokenizer.content is not None:
        (folder / JSON).write_bytes(tokenizer.content.encode())
        if came_from.resolve() != folder.resolve():
            copy_files(came_from, folder, [name for name in FILES if name != JSON])
    if encoder.template is not None:
        (folder / TEMPLATE).write_text(encoder.template.source, encoding="utf-8")


def _state(path: Path) -> tuple[int, ...]:
    """Return what changes about a file when its content does, on a machine whose clock is not set back."""
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _spec(encoder: Encoder, names: Sequence[str], files: Sequence[Path], note: Callable[[str], None]) -> dict[str, Any]:
    """Return what the bytes of a store depend on."""
    template = encoder.template
    sizes = [path.stat().st_size for path in files]
    if sum(sizes) > _LONG_BYTES:
        note(f"reading the checksums of {len(files)} sources ({format_bytes(sum(sizes))})")
    return {
        "tokenizer": encoder.tokenizer.identity,
        "vocab_size": encoder.tokenizer.vocab_size,
        "eos": encoder.eos,
        "bos": encoder.bos,
        "sizes": encoder.sizes,
        "field": encoder.field,
        "documents_are": "chat" if template else "text",
        "template": None if template is None else hashlib.sha256(template.identity.encode()).hexdigest()[:16],
        "piece_bytes": PIECE_BYTES,
        "sources": [[name, size] for name, size in zip(names, sizes, strict=True)],
        "contents": [_content_digest(path) for path in files],
    }


def _content_digest(path: Path) -> str:
    with read_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _check_same(store: Store, spec: Mapping[str, Any], tokenizer: Tokenizer, note: Callable[[str], None]) -> Store:
    """Return the store, or raise DataError where it was made otherwise, or of other content."""
    tokenizer.check_store(store.folder, store.spec["tokenizer"])
    if "contents" not in store.spec:
        note(f"{store.folder} has no checksums of its sources, which an older jaxpipe did not keep: sizes are compared")
        spec = {key: value for key, value in spec.items() if key != "contents"}
    for key, value in spec.items():
        if key == "contents" and (changed := _first_change(store.spec[key], value, spec["sources"])):
            raise DataError(
                f"data {store.folder}: {changed} is not what it was when the store was built of it; name another folder, or "
                "delete this one"
            )
        if key != "sizes" and store.spec.get(key) != value:  # stores of format 1 have none
            raise DataError(
                f"data {store.folder}: holds a store of other {key}; name another folder, or delete this one"
            )
    return store


def _first_change(stored: object, contents: Sequence[str], sources: Sequence[Sequence[Any]]) -> str:
    """Return the name of the first source with another checksum; empty if there is none."""
    pairs = zip(stored, contents, sources, strict=False) if isinstance(stored, list) else ()
    return next((str(name) for old, new, (name, _) in pairs if old != new), "")


def _journal(folder: Path) -> BinaryIO:
    """Open the journal and lock it."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(_PIECES)}
    foreign = sorted(names - set(_OURS))
    if foreign:
        raise DataError(f"data {folder}: holds other files, such as {foreign[0]}; name a new folder for the store")
    journal = (folder / JOURNAL).open("a+b")
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        journal.close()
        raise DataError(f"data {folder}: another process is building this store") from None
    return journal


def _resume(folder: Path, journal: BinaryIO, spec: Mapping[str, Any]) -> list[StoredPiece]:
    """Return the pieces that are done, and cut each file to exactly their bytes.

    Raises:
        DataError: they are of other sources or settings, or damaged.
    """
    header = json.dumps(spec).encode() + b"\n"
    journal.seek(0)
    lines = [line for line in journal.readlines() if line.endswith(b"\n")]
    if lines and lines[0] != header:
        raise DataError(
            f"data {folder}: holds an unfinished store of other sources or settings; name another folder, or delete this one"
        )
    # A killed build may have written data whose line is missing, never a line whose data is missing: the line goes last. So
    # lines say how long each file must be, and what lies beyond is cut off.
    parts = [StoredPiece(int(d), int(t), *sums) for d, t, *sums in (line.decode().split() for line in lines[1:])]
    if not lines:
        lines = [header]
        journal.truncate(0)
        journal.write(header)
        journal.flush()
    journal.truncate(sum(map(len, lines)))
    for left in folder.glob(f"{_PIECES}*"):
        shutil.rmtree(left)
    store = Store(folder, spec, tuple(parts))
    for name, (dtype, count) in store.arrays().items():
        with (folder / name).open("ab") as file:
            file.truncate(dtype.itemsize * count if parts else 0)
    if parts:
        store.check(every_piece=True)
    else:
        (folder / EDGES).write_bytes(bytes(8))
    return parts


@dataclass(frozen=True, slots=True)
class _EncodedPiece:
    """A piece that is encoded in ``file``: its ids, then its answers. ``lengths``, ``sizes``: of its documents."""

    part: StoredPiece
    lengths: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64] | None
    problems: tuple[str, ...]
    loss: str
    file: Path


def _encode(encoder: Encoder, piece: SourcePiece, file: Path) -> _EncodedPiece:
    encoded = encoder.encode(piece)
    with file.open("wb") as output:
        for array in (encoded.ids, encoded.answers):
            if array is not None:
                output.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    sums = digest(encoded.ids, encoded.lengths, encoded.answers), sizes_digest(encoded.sizes)
    part = StoredPiece(len(encoded.lengths), len(encoded.ids), *sums)
    return _EncodedPiece(part, encoded.lengths, encoded.sizes, encoded.problems, encoded.loss, file)


def _append(done: _EncodedPiece, tokens: int, outputs: Mapping[str, BinaryIO], journal: BinaryIO) -> None:
    """Write a piece behind the ``tokens`` that there are."""
    edges = (tokens + np.cumsum(done.lengths)).astype("<i8")
    outputs[EDGES].write(edges.data)
    if done.sizes is not None:
        outputs[SIZES].write(done.sizes.astype("<i8").data)
    at, size = 0, done.file.stat().st_size
    answers = done.part.tokens if ANSWERS in outputs else 0
    with done.file.open("rb") as file:
        for name, stop in ((IDS, size - answers), (ANSWERS, size)):
            while at < stop:
                at += os.sendfile(outputs[name].fileno(), file.fileno(), at, stop - at)
    # All arrays are with the system before the line of the journal is, which declares them complete.
    done.file.unlink()
    outputs[EDGES].flush()
    journal.write(f"{' '.join(map(str, astuple(done.part)))}\n".encode())
    journal.flush()


def _encoded(
    encoder: Encoder, workers: int, folder: Path, source_pieces: Iterable[SourcePiece]
) -> Generator[_EncodedPiece]:
    """Yield the pieces in their order, encoded by processes, or by this one."""
    numbered = ((piece, folder / str(k)) for k, piece in enumerate(source_pieces))
    if workers == 1:
        yield from (_encode(encoder, *each) for each in numbered)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (encoder,))
    waiting: deque[tuple[Path, Future[_EncodedPiece]]] = deque()
    source = Path()
    try:
        for piece, file in numbered:
            with starting_children():  # by the first pieces
                waiting.append((piece.files[0], pool.submit(_encode_in_worker, piece, file)))
            if len(waiting) > _AHEAD * workers:
                source, done = waiting.popleft()
                yield done.result()
        while waiting:
            source, done = waiting.popleft()
            yield done.result()
    except BrokenProcessPool:
        raise DataError(
            f"data {source}: a process that tokenised it, or what follows, was killed: for want of memory perhaps (--workers "
            f"says how many there are), or by the tokenizer {encoder.tokenizer.name}; the same command goes on"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder


def _start_worker(encoder: Encoder) -> None:
    """Prepare a process of the pool, which ends with the one that started it."""
    global _encoder
    _encoder = encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(piece: SourcePiece, file: Path) -> _EncodedPiece:
    return _encode(_encoder, piece, file)
