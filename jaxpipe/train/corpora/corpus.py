"""Load token ids from JSONL, Parquet, text, a directory of these, a token store, or an array of ids, and pack documents.

:func:`load_corpus` returns a :class:`Corpus`: one stream of ids with the documents it is made of. Files are read in sorted
order, so the stream is the same on every machine that has the same files. Files of documents are tokenised at each start and
held in memory; token stores (:mod:`jaxpipe.train.corpora.store`) and arrays in ``.npy`` files are memory-mapped and may be
larger than memory. Does not model: downloads, several processes that read different parts.

:class:`PackedRows` are whole documents in rows of one length, so that no answer is seen without its question. Documents are
placed longest first, each into the fullest row that has room for it (best fit decreasing), in the order that they have in the
corpus where they are of one length. Documents of one length are placed together, so that the time depends on how many lengths
there are (M. Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021, pack histograms too). Which rows
there are depends on the corpus and the length of a row alone. Does not model: another packing in each epoch.
"""

from __future__ import annotations

import bisect
import hashlib
import mmap
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.train.corpora.documents import RECORD_FORMS, Form, files_at, files_under, form_of, pieces, with_forms
from jaxpipe.train.corpora.encoding import Encoder, Reading, marker
from jaxpipe.train.corpora.store import ANSWERS, EDGES, IDS, SIZES, Store, digest, is_store
from jaxpipe.train.corpora.tokenizers import ByteTokenizer, Ids, Tokenizer, check_ids, id_dtype

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_CHUNK = 1 << 24  # ids looked at in one go
_HASH_WHOLE_BYTES = 1 << 26  # larger arrays are fingerprinted by samples


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """One stream of token ids, and where its documents begin.

    ``ids``: 1-D, unsigned, all below the tokeniser's vocabulary size; may be a memory map. ``edges``: int64 [documents + 1],
    where each document starts, and the end. ``names``: of documents that are a file each; others have none. ``skipped``: files
    of a directory that could not be used, with the reason. ``fingerprint``: changes when ids do. ``answers``: of chats, uint8,
    1 where an id belongs to an answer. ``bos``, ``eos``: the ids that begin and end a document, if some do. ``sizes``: int64
    [documents], bytes of the text that each was, where they were counted. ``marks``: how documents begin and end, for people;
    ``remarks``: what they may not expect, in lines.
    """

    source: str
    ids: Ids
    edges: npt.NDArray[np.int64]
    names: tuple[str, ...] | None
    skipped: tuple[str, ...]
    fingerprint: str
    answers: npt.NDArray[np.uint8] | None = None
    eos: int | None = None
    bos: int | None = None
    sizes: npt.NDArray[np.int64] | None = None
    marks: str = ""
    remarks: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line: source, documents, tokens, how documents begin and end, files skipped."""
        skipped = f", {len(self.skipped)} files skipped (first: {self.skipped[0]})" if self.skipped else ""
        marks = self.marks and f", {self.marks}"
        return f"{self.source}: {len(self.edges) - 1:,} documents, {len(self.ids):,} tokens{marks}{skipped}"

    def bytes_in(self, start: int, stop: int, tokenizer: Tokenizer) -> float | None:
        """Return how many bytes of text the ids ``[start, stop)`` stand for, or None where that is not known. A document of
        which some ids are elsewhere is divided as the lengths of its tokens are."""
        lengths = tokenizer.lengths
        if lengths is None or (self.sizes is None and not tokenizer.keeps_bytes):
            return None
        lengths = lengths.copy()
        # What begins and ends a document was put there by us: no byte of the text is behind it.
        lengths[[end for end in (self.bos, self.eos) if end is not None]] = 0

        def token_bytes(start: int, stop: int) -> int:
            spans = ((a, min(a + _CHUNK, stop)) for a in range(start, stop, _CHUNK))
            return sum(int(lengths[self.ids[a:b]].sum()) for a, b in spans)

        if self.sizes is None or start >= stop:
            return token_bytes(start, stop)
        # Whole documents have a counted size. The span may cut its first and its last one; from those two the share of what
        # lies outside is taken off again, so that adjacent spans add up to the size of what they cover.
        first = int(np.searchsorted(self.edges, start, "right")) - 1
        last = int(np.searchsorted(self.edges, stop, "left"))
        total = float(self.sizes[first:last].sum())
        cuts = {first: [(int(self.edges[first]), start)]}
        cuts.setdefault(last - 1, []).append((stop, int(self.edges[last])))
        for document, spans in cuts.items():
            if outside := sum(token_bytes(*span) for span in spans):
                document_bytes = token_bytes(int(self.edges[document]), int(self.edges[document + 1]))
                total -= float(self.sizes[document]) * outside / document_bytes
        return total


def load_corpus(path: str | Path, tokenizer: Tokenizer, reading: Reading | None = None) -> Corpus:
    """Return the corpus at ``path``: ``"stdlib"``, a token store, a ``.npy`` or ``.npz`` array of ids, a file of documents, or
    a directory of such files. Files of text, byte by byte, get no end of document unless ``reading`` names one.

    Raises:
        ConfigError: the path is a URL.
        DataError: nothing there, unreadable, binary, empty, of the wrong shape or dtype, a record that is no document, or ids
            that the tokeniser does not have.
    """
    how = reading or Reading()
    if path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return _from_files("stdlib", root, [(file, "text") for file in stdlib_files(root)], tokenizer, how)
    path, left_out = Path(path), list[str]()
    if path.is_dir() and is_store(path):
        return _from_store(path, tokenizer, how)
    files = with_forms(files_at(path, how.suffixes, left_out.append), how.format)
    if not path.is_dir() and files[0][1] in ("npy", "npz"):
        return _from_array(path, _read_array(path, files[0][1]), tokenizer)
    corpus = _from_files(str(path), path if path.is_dir() else None, files, tokenizer, how)
    return replace(corpus, remarks=(*corpus.remarks, *(f"data {path}: {line}" for line in left_out)))


def stdlib_files(root: Path) -> tuple[Path, ...]:
    """Return the ``.py`` files of the standard library at ``root``, sorted, without its tests and installed packages."""
    files, _ = files_under(root, (".py",), without=_NOT_STDLIB, links=False)
    if not files:
        raise DataError(f"data stdlib: no .py files below {root}; give data.path a text file or directory instead")
    return files


def _from_files(
    source: str, root: Path | None, files: Sequence[tuple[Path, Form]], tokenizer: Tokenizer, how: Reading
) -> Corpus:
    """Tokenise files. ``root``: the directory they are in, if they are of one; then files that can't be used are skipped and
    reported, unless none can, and empty ones silently."""
    encoder = Encoder.of(tokenizer, how)
    of_records = any(form in RECORD_FORMS for _, form in files)
    # Byte 0 may stand in a text, so between files of text it marks nothing; in records it ends a document.
    if isinstance(tokenizer, ByteTokenizer) and how.eos == "auto" and not of_records:
        encoder = replace(encoder, eos=None)
    encoded = [encoder.encode(piece) for piece in pieces(files)]
    problems = [problem for each in encoded for problem in each.problems]
    if problems and root is None:
        raise DataError(f"data {problems[0]}")
    skipped = tuple(problem for problem in problems if not problem.endswith("the file is empty"))
    if len(problems) == len(files):
        why = f"; the first: {skipped[0]}" if skipped else " (all are empty)"
        raise DataError(f"data {source}: none of its {len(files)} files can be used{why}")
    edges = np.cumsum(np.concatenate([[0], *(each.lengths for each in encoded)]), dtype=np.int64)
    if not edges[-1]:
        raise DataError(f"data {source}: the tokenizer {tokenizer.name} made no tokens of it")
    ids = np.concatenate([each.ids for each in encoded])
    paths = [path for each in encoded for path in each.files]
    names = tuple(path.name if root is None else path.relative_to(root).as_posix() for path in paths)
    marked = [each.answers for each in encoded if each.answers is not None]
    answers = np.concatenate(marked) if marked else None
    # Where a record begins and which of it is an answer decides what is learnt, so that counts; of files of text ids alone do.
    fingerprint = digest(ids, np.diff(edges), answers)[:16] if of_records else fingerprint_ids(ids)
    counted = [each.sizes for each in encoded if each.sizes is not None]
    sizes = np.concatenate(counted) if counted else None
    loss = next((each.loss for each in encoded if each.loss), "")
    remarks = tuple(filter(None, (encoder.remark(len(edges) - 1), loss)))
    file_names = None if of_records else names
    ends = encoder.eos, encoder.bos
    return Corpus(
        source, ids, edges, file_names, skipped, fingerprint, answers, *ends, sizes, encoder.describe(), remarks
    )


def _from_store(path: Path, tokenizer: Tokenizer, reading: Reading) -> Corpus:
    store = Store.read(path)
    tokenizer.check_store(path, store.spec["tokenizer"])
    store.check(every_piece=False)
    maps = store.maps()
    bos, eos = store.spec.get("bos"), store.spec["eos"]
    for key, setting, stored in (("bos", reading.bos, bos), ("eos", reading.eos, eos)):
        if setting != "auto" and marker(tokenizer, key, setting) != stored:
            has = "none" if stored is None else tokenizer.name_of(stored)
            raise DataError(
                f"data {path}: built with data.{key}={has}, and data.{key} is {setting}; leave it out, or build anew"
            )
    answers, sizes = maps.get(ANSWERS), maps.get(SIZES)
    marks, remarks = Encoder(tokenizer, "", eos, None, bos).describe(), []
    if sizes is None and answers is None and tokenizer.content is not None and not tokenizer.keeps_bytes:
        remarks = [f"data {path}: built by an older version, which did not count bytes of text: no bits per byte"]
    return Corpus(
        str(path), maps[IDS], maps[EDGES], None, (), store.fingerprint, answers, eos, bos, sizes, marks, tuple(remarks)
    )


def read_named_arrays(path: str | Path) -> dict[str, npt.NDArray[Any]] | None:
    """Return the arrays of a ``.npz`` file that are no token ids: several, none of them called ``ids``. None of anything else.

    Raises:
        DataError: a ``.npz`` file that can't be read.
    """
    path = Path(path)
    if not path.is_file() or form_of(path) != "npz":
        return None
    with _reading(path, "npz"), path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        if len(archive.files) < 2 or "ids" in archive.files:
            return None
        return {name: archive[name] for name in archive.files}


def _read_array(path: Path, form: Form) -> Ids:
    """Return the array of ids in a ``.npy`` (memory-mapped) or ``.npz`` file (its only array, or the one called ``ids``)."""
    with _reading(path, form):
        if form == "npy":
            return np.lib.format.open_memmap(path, mode="r")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            names = archive.files
            if "ids" not in names and len(names) != 1:
                raise DataError(
                    f"data {path}: holds the arrays {', '.join(names) or '(none)'}; name the token ids 'ids'"
                )
            return np.asarray(archive["ids" if "ids" in names else names[0]])


@contextmanager
def _reading(path: Path, form: Form) -> Iterator[None]:
    """Raise DataError for whatever is wrong with an array file that is read in the block."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"data {path}: can't be read ({error.strerror or error})") from None
    except Exception as error:  # of NumPy's, zipfile's and zlib's readers, and of Python's tokenizer for the header
        raise DataError(f"data {path}: not a readable .{form} array ({' '.join(str(error).split())[:120]})") from None


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
    return Corpus(str(path), ids, np.array([0, len(ids)]), (path.name,), (), fingerprint_ids(ids))


def check_extent(ids: Ids) -> None:
    """Check that a mapped file still holds its ids: reading beyond its end would kill the process (SIGBUS).

    Raises:
        DataError: it has become shorter.
    """
    if not isinstance(ids, np.memmap) or not isinstance(ids.base, mmap.mmap):
        return
    # ``base`` asks the file that was opened: its name may be another file's by now.
    end, size = ids.offset + ids.nbytes, ids.base.size()
    if size < end:
        raise DataError(
            f"data {ids.filename}: the file was cut to {size} bytes while it was in use, and its ids need {end}; restore it"
        )


def _check_vocabulary(path: Path, ids: Ids, tokenizer: Tokenizer) -> None:
    try:
        for start in range(0, len(ids), _CHUNK):
            check_ids(ids[start : start + _CHUNK], tokenizer, start)
    except DataError as error:
        advice = "set data.tokenizer to the one that made them, or to ids:N with their vocabulary size"
        raise DataError(f"data {path}: {error}: {advice}") from None


def fingerprint_ids(ids: Ids) -> str:
    """Return a short hash of the ids' values (not of their dtype). Above 2^24 ids, of their number and 257 evenly spread
    samples."""
    digest = hashlib.sha256(str(len(ids)).encode())
    is_small = len(ids) * 4 <= _HASH_WHOLE_BYTES
    starts = range(0, len(ids), _CHUNK) if is_small else np.linspace(0, len(ids) - (1 << 14), 257, dtype=np.int64)
    length = _CHUNK if is_small else 1 << 14
    for start in starts:
        digest.update(np.ascontiguousarray(ids[int(start) : int(start) + length], dtype="<u4").data)
    return digest.hexdigest()[:16]


Numbers = npt.NDArray[np.int64]
_ANSWERS_AT_ONCE = 1 << 22  # answers counted in one go


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows of whole documents, each up to ``seq_len + 1`` tokens, the last of which is a target only.

    ``first``, ``sizes``: the tokens of each document. ``members``: numbers of documents, row after row; those of row k begin at
    ``before[k]``. ``too_long``: documents that are longer than a row; ``without_target``: those that are in no row, since no
    token of them is one to learn."""

    ids: Ids
    seq_len: int
    answers: npt.NDArray[np.uint8] | None
    by_document: bool
    first: Numbers
    sizes: Numbers
    members: Numbers
    before: Numbers
    too_long: int
    without_target: int

    @classmethod
    def of(cls, corpus: Corpus, spans: tuple[tuple[int, int], ...], seq_len: int, *, by_document: bool) -> PackedRows:
        """Pack the documents of ``spans``, which begin and end where documents do. Chats that are too long are cut at their
        end; text goes on in further pieces, each beginning with the token that ended the one before."""
        edges, room = corpus.edges, seq_len + 1
        inside = [slice(*np.searchsorted(edges, span)) for span in spans]
        first = np.concatenate([edges[:-1][part] for part in inside]) if inside else np.zeros(0, np.int64)
        sizes = np.concatenate([np.diff(edges)[part] for part in inside]) if inside else first
        too_long = int((sizes > room).sum())
        if corpus.answers is None:
            # A piece begins with the token that the one before it ended with: a row has one token more than targets, so no
            # target is lost at a cut and none is learnt twice.
            pieces = np.maximum(-(-(sizes - 1) // seq_len), 1)
            at = ranges(pieces) * seq_len
            first, sizes = np.repeat(first, pieces) + at, np.repeat(sizes, pieces) - at
        sizes = np.minimum(sizes, room)
        targets = sizes - 1 if corpus.answers is None else _answers_in(corpus.answers, first + 1, first + sizes)
        learnt = targets > 0
        members, before = pack(sizes[learnt], room)
        return cls(
            corpus.ids, seq_len, corpus.answers, by_document, first[learnt], sizes[learnt], members, before,
            too_long, int((~learnt).sum()),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.before) - 1

    def describe(self) -> str:
        """Describe how full the rows are, and which documents are cut or left out."""
        room, what = self.seq_len + 1, "documents" if self.answers is None else "chats"
        filled = self.sizes.sum() / (room * len(self)) if len(self) else 0.0
        parts = [f"whole {what} in {len(self):,} rows of {self.seq_len}, {filled:.0%} filled"]
        if self.too_long:
            parts.append(f"{self.too_long:,} longer ones {'in pieces' if self.answers is None else 'cut at their end'}")
        if self.without_target:
            parts.append(
                f"{self.without_target:,} without {'a target' if self.answers is None else 'an answer'} left out"
            )
        return ", ".join(parts)

    def batch(self, indices: Numbers) -> dict[str, npt.NDArray[Any]]:
        """Return rows as :meth:`~jaxpipe.train.data.Windows.batch` does; no document's first token is a target.

        Raises:
            DataError: the file that holds the ids has become shorter.
        """
        check_extent(self.ids)
        room = self.seq_len + 1
        counts = self.before[indices + 1] - self.before[indices]
        members = self.members[np.repeat(self.before[indices], counts) + ranges(counts)]
        sizes = self.sizes[members]
        ends = np.cumsum(sizes)
        row_ends = np.concatenate([[0], np.cumsum(counts)])
        filled = np.concatenate([[0], ends])[row_ends]  # tokens of earlier rows
        rows = np.repeat(np.arange(len(indices)), counts)
        inside = ranges(sizes)
        places = np.repeat(rows * room + ends - sizes - filled[rows], sizes) + inside
        positions = np.repeat(self.first[members], sizes) + inside
        window, document, learnt = np.zeros((3, len(indices) * room), np.int32)
        window[places] = self.ids[positions]
        document[:] = np.repeat(counts, room)  # what fills a row up is a document of its own
        document[places] = np.repeat(ranges(counts), sizes)
        learnt[places] = (inside > 0) & (True if self.answers is None else self.answers[positions] > 0)
        window, document, learnt = (array.reshape(-1, room) for array in (window, document, learnt))
        arrays = {"tokens": window[:, :-1].copy(), "targets": window[:, 1:].copy()}
        if self.by_document:
            arrays["segments"] = document[:, :-1].copy()
        return {**arrays, "weights": learnt[:, 1:].astype(np.float32)}


def ranges(counts: Numbers) -> Numbers:
    """Return ``0 … counts[0] - 1``, ``0 … counts[1] - 1`` and so on, one after another."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def pack(sizes: Numbers, room: int) -> tuple[Numbers, Numbers]:
    """Decide which of some documents of these sizes, ``room`` at most, share a row of that size: their numbers, row after row,
    and where each row begins among them, with the end."""
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), np.int64)  # of the documents in this order
    # Rows that are equally full are interchangeable, so ranges of them are kept in place of single rows: a million chats of a
    # few thousand lengths take thousands of steps, not millions.
    spare: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # ranges of rows by what is free in them
    rooms: list[int] = []  # the keys of that, sorted
    count = done = 0
    distinct, numbers = np.unique(sizes, return_counts=True)
    for size, left in zip(distinct[::-1].tolist(), numbers[::-1].tolist(), strict=True):
        while left:
            at = bisect.bisect_left(rooms, size)
            if at < len(rooms):
                free = rooms[at]
                start, stop = spare[free].pop()
                if not spare[free]:
                    del rooms[at]
            else:
                free, start, stop = room, count, count + -(-left // (room // size))
                count = stop
            each = free // size
            num_placed = min(left, each * (stop - start))
            row_of[done : done + num_placed] = start + np.arange(num_placed) // each
            # The range splits in three: rows that got ``each`` documents, one that got the rest, and those that got none.
            full, rest = divmod(num_placed, each)
            end = start + full
            for low, high, now in (
                (start, end, free - each * size),
                (end, end + (rest > 0), free - rest * size),
                (end + (rest > 0), stop, free),
            ):
                if low < high:
                    if not spare[now]:
                        bisect.insort(rooms, now)
                    spare[now].append((low, high))
            done, left = done + num_placed, left - num_placed
    members = order[np.argsort(row_of, kind="stable")]
    return members, np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))]).astype(np.int64)


def _answers_in(answers: npt.NDArray[np.uint8], starts: Numbers, stops: Numbers) -> Numbers:
    """Count the ids of answers in each of these ranges, which are sorted."""
    counts = np.zeros(len(starts), np.int64)
    k = 0
    while k < len(starts):
        low = int(starts[k])
        end = max(int(np.searchsorted(stops, low + _ANSWERS_AT_ONCE, side="right")), k + 1)
        sums = np.concatenate([[0], np.cumsum(answers[low : int(stops[end - 1])] > 0)])
        counts[k:end] = sums[stops[k:end] - low] - sums[starts[k:end] - low]
        k = end
    return counts
