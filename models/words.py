"""Make pairs of a picture and a text on the fly and offline: words drawn with a font of matplotlib's, caption = the word.

The words are those of the sources of Python's standard library, of 3 to 8 lower-case letters: about 6,000. They are the same
on machines with the same Python and matplotlib. Held-out words are in no train pair.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.errors import DataError

Arrays = Mapping[str, np.ndarray[Any, Any]]

_WORD = re.compile(r"(?<![A-Za-z_.])[a-z]{3,8}(?![A-Za-z_(.])")
_END = ord("\n")
_MOST = 4096
_MOST_BYTES = 2**33
IMAGE = 0
"""The token id of a position that stands for a part of the picture; no text has it."""


def pairs(
    *, seq_len: int = 8, height: int = 12, width: int = 48, font: str = "DejaVuSansMono", copies: int = 1,
    held_out: int = 256, seed: int = 0,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """Return training and held-out pairs for ``models.clip``: ``images`` [n, height, width] uint8 (0: paper), ``tokens``
    [n, seq_len] int32 (bytes of the word, then zeros), ``weights`` [n] float32 ones. ``copies``: pictures of each train word,
    shifted at random. Words that are longer than ``seq_len``, or too wide, are left out.

    Raises:
        DataError: an option is no size, too few words are left, or there is no such font.
    """
    _check(seq_len=seq_len, height=height, width=width, copies=copies, held_out=held_out, seed=seed)

    def captioned(chosen: Sequence[str]) -> np.ndarray[Any, Any]:
        return np.array([[*word.encode(), *[0] * (seq_len - len(word))] for word in chosen], dtype=np.int32)

    def arrays(chosen: Sequence[str], images: np.ndarray[Any, Any]) -> Arrays:
        return {"images": images, "tokens": captioned(chosen), "weights": np.ones(len(chosen), np.float32)}

    train, held_out_words = _divided(_words(seq_len), held_out, seed)
    return _drawn_and(arrays, train * copies, held_out_words, (height, width), font, seed)


def transcripts(
    *, seq_len: int = 16, height: int = 12, width: int = 48, patch: int = 6, font: str = "DejaVuSansMono", copies: int = 1,
    held_out: int = 256, seed: int = 0,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """Return pictures to transcribe for ``models.vlm``: ``images`` [n, height, width, 1] uint8; ``tokens`` [n, seq_len]
    int32: as many 0 (:data:`IMAGE`) as the picture has squares of 2 × 2 patches, the word, a line's end, zeros; ``targets``
    [n, seq_len]: the tokens shifted by one; ``weights`` [n, seq_len] float32: 1 where the target is of the word or its end.

    Raises:
        DataError: as :func:`pairs`; or the picture does not divide into squares, or leaves no room for a word.
    """
    _check(seq_len=seq_len, height=height, width=width, patch=patch, copies=copies, held_out=held_out, seed=seed)
    square = 2 * patch
    if height % square or width % square:
        raise DataError(f"a picture of {height} × {width} does not divide into squares of 2 × 2 patches of {patch}")
    slots = height // square * (width // square)
    room = seq_len - slots
    if room < 3:
        raise DataError(
            f"data.seq_len={seq_len} leaves {room} positions beside the {slots} of a picture; use {slots + 8}"
        )

    def arrays(chosen: Sequence[str], images: np.ndarray[Any, Any]) -> Arrays:
        ids = np.zeros((len(chosen), seq_len + 1), np.int32)
        weights = np.zeros((len(chosen), seq_len), np.float32)
        for row, word in enumerate(chosen):
            ids[row, slots : slots + len(word) + 1] = [*word.encode(), _END]
            weights[row, slots - 1 : slots + len(word)] = 1
        return {"images": images[..., None], "tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}

    train, held_out_words = _divided(_words(room), held_out, seed)
    return _drawn_and(arrays, train * copies, held_out_words, (height, width), font, seed)


def _check(**options: int) -> None:
    for name, value in options.items():
        least = 0 if name == "seed" else 1
        if type(value) is not int or not least <= value <= _MOST:
            key = "data.seq_len" if name == "seq_len" else f"data.options.{name}"
            raise DataError(f"{key} is {value!r}; want a whole number from {least} to {_MOST}")


def _words(longest: int) -> list[str]:
    """Return the words of the standard library's sources, those in most files first."""
    count: dict[str, int] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for word in set(_WORD.findall(path.read_text(encoding="utf-8", errors="replace"))):
            count[word] = count.get(word, 0) + 1
    return [w for w in sorted(count, key=lambda w: (-count[w], w)) if len(w) <= longest]


def _divided(words: Sequence[str], held_out: int, seed: int) -> tuple[list[str], list[str]]:
    if not 0 < held_out <= len(words) // 2:
        raise DataError(f"data.options.held_out={held_out} of {len(words)} words; use 1 to {len(words) // 2}")
    order = np.random.default_rng(seed).permutation(len(words))
    return [words[i] for i in order[held_out:]], [words[i] for i in order[:held_out]]


def _drawn_and(
    arrays: Any, train: Sequence[str], held_out_words: Sequence[str], shape: tuple[int, int], font: str, seed: int
) -> tuple[Arrays, Arrays]:
    if len(train) * shape[0] * shape[1] > _MOST_BYTES:
        raise DataError(
            f"{len(train)} pictures of {shape[0]} × {shape[1]} do not fit into memory; use smaller ones, or fewer copies"
        )
    splits = []
    for part, words in enumerate((train, held_out_words)):
        images = _drawn(words, shape, font, np.random.default_rng([seed, part]))
        fits = images.any(axis=(1, 2))
        if not fits.any():
            raise DataError(f"no word fits into {shape[0]} × {shape[1]} pixels; use larger pictures")
        splits.append(arrays([w for w, fit in zip(words, fits, strict=True) if fit], images[fits]))
    return splits[0], splits[1]


def _drawn(words: Sequence[str], shape: tuple[int, int], font: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw ``words``, their baseline 3 pixels above the lower edge; the first copy of a word starts at the left edge,
    others up to 3 pixels further right. Empty where a word does not fit."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    fonts = {path.stem: path for path in Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf")}
    if font not in fonts:
        font_names = ", ".join(sorted(name for name in fonts if name.startswith("DejaVu")))
        raise DataError(f"data.options.font={font!r} is no font of matplotlib's; use one such as {font_names}")
    face = FT2Font(str(fonts[font]))
    face.set_size(10, 72)
    height, width = shape
    images = np.zeros((len(words), height, width), np.uint8)
    drawn_words: set[str] = set()
    for image, word in zip(images, words, strict=True):
        face.set_text(word, 0.0)
        face.draw_glyphs_to_bitmap(antialiased=True)
        # Without the border above and below.
        ink = np.asarray(face.get_image())[1:-1]
        indent = int(rng.integers(0, 4)) if word in drawn_words else 0
        drawn_words.add(word)
        bottom = height - 3 + -(-face.get_descent() // 64)
        top, right = bottom - ink.shape[0], indent + ink.shape[1]
        if top >= 0 and bottom <= height and right <= width:
            image[top:bottom, indent:right] = ink
    return images
