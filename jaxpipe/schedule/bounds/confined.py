"""Stopgap."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any

@dataclass(frozen=True, slots=True)
class Confined:
    own: float
    through: float

def confine(ways: Any, visits: Any, m: int, costs: Any, limits: Any, offload: bool) -> list[Confined]:
    return [
        Confined(
            sum(v.count * (v.flow.forward[v.stage] + v.flow.backward[v.stage]) for v in vs),
            sum(v.count * (v.flow.forward[v.stage] + v.flow.passed[v.stage]) for v in vs),
        )
        for vs in visits
    ]
