"""Text that messages share: the nearest known name, bytes, seconds, counts. Imports nothing of ours."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence


def nearest(word: str, words: Iterable[str], alike: float = 0.5) -> str:
    """Return the known word most like ``word``; empty if none is ``alike`` (difflib's ratio, 1: the same)."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=alike)), "")


def closest(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """Return ``; did you mean 'x'?`` for the known word most like ``word``, or ``otherwise``."""
    near = nearest(word, words)
    return f"; did you mean {near!r}?" if near else otherwise


def arrows(edges: Iterable[tuple[int, int]]) -> str:
    """Format edges between stages, such as ``0->2 1->2``."""
    return " ".join(f"{a}->{b}" for a, b in sorted(edges)) or "none"


def divisors_of(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending."""
    return sorted({d for k in range(1, math.isqrt(number) + 1) if number % k == 0 for d in (k, number // k)})


def nearest_divisors(number: int, target: int) -> str:
    """Return the two divisors of ``number`` nearest to ``target``, such as ``4 or 8``."""
    nearest = sorted(divisors_of(number), key=lambda d: abs(d - target))[:2]
    return " or ".join(map(str, sorted(nearest)))


def truncate(text: str, most: int) -> str:
    """Return ``text``, or its first ``most`` - 1 characters and …."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def format_bytes(num_bytes: float, *, binary: bool = False) -> str:
    """Format bytes, such as ``1.07 GB``: three significant digits, decimal units as the sizes of devices are given in; ``1
    GiB`` if ``binary``."""
    value, unit = float(num_bytes), ""
    for unit in ("", "K", "M", "G", "T", "P"):
        if abs(value) < 999.5 or unit == "P":
            break
        value /= 1024 if binary else 1000
    return f"{value:.3g} {unit}{'i' * (binary and unit != '')}B"


def format_seconds(seconds: float) -> str:
    """Format seconds, such as ``850 µs``, ``12.5 ms``, ``3.2 s``, ``4m05s``, ``2h03m``, ``3d04h``; ``?`` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        for scale, unit in ((1e-6, "µs"), (1e-3, "ms")):
            if 0 < seconds < 999.5 * scale:
                return f"{seconds / scale:.3g} {unit}"
        return f"{seconds:.3g} s"
    rounded = round(seconds)
    for big, small, units in ((60, 1, "ms"), (3600, 60, "hm"), (86400, 3600, "dh")):
        if rounded < big * (24 if units == "hm" else 60) or units == "dh":
            return f"{rounded // big}{units[0]}{rounded % big // small:02d}{units[1]}"
    raise AssertionError


def format_count(count: float) -> str:
    """Format a count, such as ``950``, ``12.3k``, ``4.56M``: three significant digits."""
    value = float(count)
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError


def mfu_text(mfu: float, peers_mfu: float) -> str:
    """Return the MFU in words; also by the formula of peers, where that says something else."""
    differs = f"{mfu:.1%}" != f"{peers_mfu:.1%}"
    return (
        f"MFU {mfu:.1%}"
        + differs * f" ({peers_mfu:.1%} with attention counted whole, as Megatron-LM and torchtitan do)"
    )


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return lines of cells as wide as the widest of their column, two blanks between; those of the columns ``left`` to the
    left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
