"""Which process is called slow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from jaxpipe.schedule import CostProfile
from jaxpipe.train.run.step_log import OpSeconds, SlowProcesses

STAGES = 4
COSTS = CostProfile.uniform(STAGES, f=2e-3, b=3e-3, w=1e-3)
OPS = {"F": 2e-3, "B": 3e-3, "W": 1e-3}


def steps(
    rows: int, columns: int, seed: int, noise: float = 0.03, slow: dict[int, float] | None = None
) -> Iterator[Sequence[OpSeconds]]:
    """Yield the seconds of recorded steps by process, which differ from those of the others by up to ``noise``, each process by
    half of that throughout. ``slow``: times by which processes are slower."""
    rng = random.Random(seed)
    of_process = [rng.uniform(-noise / 2, noise / 2) for _ in range(rows * columns)]
    while True:
        yield [
            {
                (op, stage): op_s * (1 + bias + rng.uniform(-noise / 2, noise / 2)) * (slow or {}).get(process, 1.0)
                for op, op_s in OPS.items()
                for stage in range(process // columns, STAGES, rows)
            }
            for process, bias in enumerate(of_process)
        ]


def lines_of(rows: int, columns: int, number: int, seed: int = 0, **how: object) -> list[list[str]]:
    slow = SlowProcesses(columns, COSTS, lambda process: f"process {process} (host node-{process})")
    return [slow.observe(seconds) for _, seconds in zip(range(number), steps(rows, columns, seed, **how), strict=False)]  # type: ignore[arg-type]


GRIDS = [(2, 16), (4, 1), (4, 3), (4, 2), (1, 3)]


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_nobody_is_slow_for_noise(rows: int, columns: int) -> None:
    for seed in range(20):
        assert lines_of(rows, columns, 30, seed) == [[]] * 30


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
@pytest.mark.parametrize("times", [1.3, 1.12])
def test_a_slow_process_is_named_once_in_the_third_step(rows: int, columns: int, times: float) -> None:
    process = rows * columns - 2
    lines = lines_of(rows, columns, 6, slow={process: times})
    assert [len(of_step) for of_step in lines] == [0, 0, 1, 0, 0, 0]
    ((line,),) = (of_step for of_step in lines if of_step)
    name, _, ratios = line.partition(")")
    assert name == f"slow: process {process} (host node-{process}"
    group = f"{columns} columns" if columns > 2 else f"{rows * columns} processes, each over its timing"
    assert ratios.endswith(f" times the median of {group}")
    said = {op: float(number) for op, number in (each.split() for each in ratios.split(" times")[0][2:].split(", "))}
    assert said.keys() == OPS.keys() and all(abs(number - times) < 0.06 for number in said.values())


def test_who_recovers_may_be_named_again() -> None:
    slow = SlowProcesses(8, COSTS, str)
    fast, late = steps(1, 8, 0), steps(1, 8, 0, slow={5: 1.2})
    counts = [len(slow.observe(next(late if step % 4 else fast))) for step in range(8)]
    assert counts == [0, 0, 0, 1, 0, 0, 0, 1]
    assert slow.observe([]) == SlowProcesses(1, COSTS, str).observe([]) == []
    assert SlowProcesses(1, COSTS, str).observe([{}, {}, {}]) == []


def test_two_processes_have_no_median() -> None:
    assert lines_of(2, 1, 4, slow={1: 2.0}) + lines_of(1, 2, 4, slow={1: 2.0}) == [[]] * 8


def test_devices_that_share_cores_all_differ() -> None:
    assert lines_of(1, 8, 20, noise=0.4) == [[]] * 20
