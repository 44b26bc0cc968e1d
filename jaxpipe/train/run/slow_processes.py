"""Which process of a run is slow, by what each measures of its own actions in recorded steps.

A host that is throttled, shares its cores or has a bad link slows all others, which wait for it, and shows in no figure of a
whole step. Its own actions show it: with several columns the processes of a row run the same ones on parts of the same batch;
with fewer, each process is compared with what it measured of its stages when the run began, relative to how the others compare
with theirs, which does not show who was slow from the start.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from jaxpipe.schedule import CostProfile, op_spec

OpSeconds = Mapping[tuple[str, int], float]
"""Mean seconds by (op, stage)."""
_SLOW = 1.05
"""Times the median of its peers."""
_SPREADS = 4.5
"""A process also stands out by so many median deviations of its peers, which are 3 σ of a normal distribution: where devices
share cores, all differ by more than 5%."""
_STEPS = 3
"""Recorded steps in a row."""
_LEAST_PEERS = 3
"""Fewer have no median: either of two may be the slow one."""


class SlowProcesses:
    """Tells in a line which process is slow, once until it is not.

    Args:
        columns: of the grid of processes; those of a row run the same stages.
        costs: what each stage took when the run began.
        who: what messages call a process.
    """

    def __init__(self, columns: int, costs: CostProfile, who: Callable[[int], str]) -> None:
        self._columns, self._costs, self._who = columns, costs, who
        self._in_a_row: dict[int, int] = {}

    def observe(self, seconds: Sequence[OpSeconds]) -> list[str]:
        """Return a line for each process that has been slow for three recorded steps; ``seconds``: of the last one, by
        process."""
        lines = []
        relative = [self._relative(of_process) for of_process in seconds]
        for group in self._groups(len(seconds)):
            peers = [process for process in group if relative[process]]
            if len(peers) < _LEAST_PEERS:
                continue
            totals = [relative[process][""] for process in peers]
            median = statistics.median(totals)
            spread = statistics.median(abs(total - median) for total in totals)
            for process, total in zip(peers, totals, strict=True):
                is_slow = total > max(_SLOW * median, median + _SPREADS * spread)
                self._in_a_row[process] = self._in_a_row.get(process, 0) + 1 if is_slow else 0
                if self._in_a_row[process] == _STEPS:
                    lines.append(self._line(process, peers, relative))
        return lines

    def _groups(self, number: int) -> list[range]:
        """Return the processes that are compared with each other."""
        size = self._columns if self._columns >= _LEAST_PEERS else max(number, 1)
        return [range(first, first + size) for first in range(0, number, size)]

    def _relative(self, seconds: OpSeconds) -> dict[str, float]:
        """Return by op, and for all as "", the seconds over those of the costs."""
        measured: dict[str, float] = {}
        expected: dict[str, float] = {}
        for (op, stage), op_s in seconds.items():
            spec = op_spec(op)
            if spec.lane == "compute" and spec.cost and (cost_s := self._costs.seconds(spec.cost, stage)) > 0:
                for key in (op, ""):
                    measured[key], expected[key] = measured.get(key, 0.0) + op_s, expected.get(key, 0.0) + cost_s
        return {key: measured[key] / expected[key] for key in measured}

    def _line(self, process: int, peers: Sequence[int], relative: Sequence[Mapping[str, float]]) -> str:
        ratios = []
        for op in sorted(relative[process].keys() - {""}):
            median = statistics.median(relative[peer][op] for peer in peers if op in relative[peer])
            if relative[process][op] > _SLOW * median:
                ratios.append(f"{op} {relative[process][op] / median:.2f}")
        total = relative[process][""] / statistics.median(relative[peer][""] for peer in peers)
        group = (
            f"{len(peers)} columns"
            if self._columns >= _LEAST_PEERS
            else f"{len(peers)} processes, each over its timing"
        )
        return f"slow: {self._who(process)}: {', '.join(ratios) or f'all ops {total:.2f}'} times the median of {group}"
