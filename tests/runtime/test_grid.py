"""Data parallelism over several processes: grids of rows and columns compute the bits of one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from jaxpipe.errors import AgreedError
from jaxpipe.runtime.processes import grid_columns
from tests.runtime.test_divided import assert_same_bits

ZERO = {"ranks": 2, "schedule": "zb-1p", "dp": 2, "zero1": True, "dtype": "bfloat16", "dropout": 0.1}
PLAIN = {"ranks": 2, "schedule": "1f1b", "dp": 2}
V_SHAPED = {"ranks": 2, "schedule": "v-half", "dp": 2, "dropout": 0.1}
OFFLOADED = {"ranks": 2, "schedule": "po-f", "dp": 2, "tp": 2, "zero1": True}
WIDE = {"ranks": 2, "schedule": "1f1b", "dp": 4, "size": 4, "dtype": "bfloat16"}


def in_columns(cases: list[dict[str, Any]], columns: int) -> list[dict[str, Any]]:
    return [{**case, "columns": columns} for case in cases]


def test_dp_over_two_processes_has_the_bits_of_one() -> None:
    assert_same_bits(in_columns([ZERO, PLAIN], 2), 2)


@pytest.mark.soak
def test_more_schedules_with_dp_over_two_processes_have_the_bits_of_one() -> None:
    assert_same_bits(in_columns([V_SHAPED, OFFLOADED, {**V_SHAPED, "schedule": "stp", "tp": 2}], 2), 2)


@pytest.mark.soak
def test_pipeline_and_dp_over_four_processes_have_the_bits_of_one() -> None:
    assert_same_bits(in_columns([ZERO, PLAIN, V_SHAPED], 2), 4)


@pytest.mark.soak
def test_dp_over_four_processes_has_the_bits_of_one() -> None:
    assert_same_bits(in_columns([WIDE, {**WIDE, "zero1": True, "dropout": 0.1}], 4), 4)


def test_grids_are_as_wide_as_they_must_be_or_as_asked() -> None:
    for number, ranks, dp in product(range(1, 9), range(1, 5), range(1, 9)):
        for columns in range(9):
            try:
                actual = grid_columns(number, ranks, dp, columns)
            except AgreedError:
                continue
            assert number % actual == 0
            assert dp % actual == 0
            assert number == 1 or columns in (0, actual)
    assert grid_columns(6, 3, 4) == 2
    assert grid_columns(4, 8, 1) == 1
    assert grid_columns(2, 4, 4, 2) == 2


@pytest.mark.parametrize(
    ("number", "ranks", "dp", "columns", "words"),
    [
        (7, 3, 2, 0, "start 6, or at most 3"),
        (4, 2, 3, 0, "multiple of 2"),
        (3, 3, 2, 2, "no multiple of the 2 columns"),
    ],
)
def test_processes_that_make_no_grid_are_refused(number: int, ranks: int, dp: int, columns: int, words: str) -> None:
    with pytest.raises(AgreedError, match=words):
        grid_columns(number, ranks, dp, columns)
