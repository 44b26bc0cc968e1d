"""Pack whole documents into rows of one length, so that no answer is seen without its question.

Documents are placed longest first, each into the fullest row that has room for it (best fit decreasing), in the order that they
have in the corpus where they are of one length. Documents of one length are placed together, so that the time depends on how
many lengths there are (M. Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021, pack histograms too).
Which rows there are depends on the corpus and the length of a row alone. Does not model: another packing in each epoch.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpipe.train.corpora.corpus import Corpus, check_extent
from jaxpipe.train.corpora.tokenizers import Ids

Numbers = npt.NDArray[np.int64]
_CHUNK = 1 << 22  # answers counted in one go


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
        end = max(int(np.searchsorted(stops, low + _CHUNK, side="right")), k + 1)
        sums = np.concatenate([[0], np.cumsum(answers[low : int(stops[end - 1])] > 0)])
        counts[k:end] = sums[stops[k:end] - low] - sums[starts[k:end] - low]
        k = end
    return counts
