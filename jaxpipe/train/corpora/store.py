"""Read token stores: corpora tokenised once, larger than memory, checked before they are trained on.

A store is a folder with ``ids.bin`` (token ids, little-endian, of the smallest unsigned type that holds the vocabulary),
``edges.bin`` (int64: where each document starts, and the end), where ids do not tell it ``sizes.bin`` (int64: bytes of the text
of each document), for chats ``answers.bin`` (uint8, :class:`~jaxpipe.train.corpora.encoding.Encoded`), what came with the
tokenizer (``tokenizer.json`` and the files beside it, the template of chats), and ``store.json``, written last: how it was
made, and the SHA-256 of each piece. All files are memory-mapped. :mod:`jaxpipe.train.corpora.store_build` makes stores.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from jaxpipe.errors import DataError
from jaxpipe.files import check_local
from jaxpipe.train.corpora.tokenizers import id_dtype

FORMAT = 2
READ = (1, FORMAT)
"""Stores of format 1 have no sizes."""
MANIFEST, JOURNAL = "store.json", "building.jsonl"
IDS, EDGES, ANSWERS, SIZES = "ids.bin", "edges.bin", "answers.bin", "sizes.bin"
_CHECKED_BYTES = 1 << 30  # of larger stores 64 pieces are looked at, spread evenly
_CHECKED_PIECES = 64


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """What one piece of a store holds: how many documents and tokens, and the SHA-256 of its ids, its documents' lengths as
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
