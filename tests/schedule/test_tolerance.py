"""Rounding is forgiven, and nothing that is larger."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule.timeline import at_most, close, how_many, nine_digits

POSITIVE = st.floats(1e-9, 1e12)


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=200), st.integers(0, 99))
def test_the_order_of_a_sum_does_not_matter(terms: list[float], seed: int) -> None:
    a, b = sum(terms), sum(random.Random(seed).sample(terms, len(terms)))
    assert close(a, b) and at_most(a, b) and at_most(b, a)


@given(POSITIVE)
def test_a_millionth_matters(x: float) -> None:
    larger = x * (1 + 1e-6)
    assert not close(x, larger) and not at_most(larger, x) and at_most(x, larger)
    assert nine_digits(x) != nine_digits(larger)


@given(st.integers(1, 10_000), POSITIVE)
def test_what_fits_a_whole_number_of_times(count: int, size: float) -> None:
    assert how_many(size, count * size) == count
    assert how_many(size, (count - 1e-3) * size) == count - 1


def test_nothing_and_no_limit() -> None:
    assert close(0.0, 0.0) and not close(0.0, 1e-300)
    assert at_most(0.0, 0.0) and not at_most(1e-300, 0.0) and at_most(math.inf, math.inf) and not at_most(math.inf, 1.0)
