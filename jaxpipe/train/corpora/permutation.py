"""Permute ``range(n)`` by a seed, with random access: no list, the same on every machine and NumPy version.

A balanced Feistel network over pairs of h-bit halves permutes ``range(4^h)``, the smallest such range that holds n; values of n
and above are sent through again until they fall below it (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). Fewer than four passes on average. Mixing is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Good
enough to shuffle training data; not a cipher.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def mix(*values: int) -> int:
    """Return 64 well-mixed bits of some integers, each taken modulo 2^64; the order of the values counts."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = int(_mix64(np.array([state], dtype=np.uint64))[0])
    return state


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """The permutation of ``range(n)`` that ``key`` selects; call it with an array of indices."""

    def __init__(self, n: int, key: int) -> None:
        assert n > 0
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._round_keys = np.array([mix(key, i) for i in range(_ROUNDS)], dtype=np.uint64)

    def __call__(self, indices: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the images of ``indices`` (any integers in ``range(n)``), int64, same shape."""
        values = self._pass(np.asarray(indices).astype(np.uint64))
        outside = values >= self.n
        while outside.any():
            values[outside] = self._pass(values[outside])
            outside = values >= self.n
        return values.astype(np.int64)

    def _pass(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, low_bits = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & low_bits
        for key in self._round_keys:
            left, right = right, left ^ (_mix64(right + key) & low_bits)
        return (left << half) | right
