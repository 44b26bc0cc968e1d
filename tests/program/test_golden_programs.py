"""Programs of written schedules are those that lowering made before it was made faster: to the last slot, place and wait.

``tests/golden/programs.json`` holds random schedules (offloads, syncs, braids) and some families' with SHA-256 digests.
"""

from __future__ import annotations

import hashlib
import json

import pytest

from jaxpipe.program.lower import lower
from jaxpipe.program.order import NATIVE, STRICT, TAGGED, Crossing, holds, issue_order
from jaxpipe.schedule import CostProfile, parse_schedule, simulate
from tests.support.bare_stages import bare_stages
from tests.support.paths import ROOT

CASES = json.loads((ROOT / "tests" / "golden" / "programs.json").read_text(encoding="utf-8"))


def digests(text: str) -> list[str]:
    """Return a digest of programs, order of issue and waits, for one process and by the lanes between two ranks of each."""
    schedule = parse_schedule(text)
    stages, ranks = bare_stages(schedule.placement), range(schedule.num_ranks)
    costs = CostProfile.uniform(schedule.num_stages, chunks=schedule.num_chunks, f=3, comm=0.3, offload_time=0.5)
    timeline = simulate(schedule, costs)
    crossings = [
        None,
        Crossing(tuple(ranks), timeline, TAGGED, 1),
        Crossing(tuple(ranks), timeline, NATIVE, 2),
        Crossing(tuple(rank // 2 for rank in ranks), timeline, STRICT, 0),
    ]
    results = []
    for crossing in crossings:
        programs = lower(schedule, stages, crossing=crossing)
        orders = issue_order(programs[: crossing.process_of.count(0) if crossing else None], timeline)
        waits = [sorted((k, str(w)) for k, w in holds(p, timeline).items()) for p in programs]
        written = [(p.bound_bytes, p.written_bytes) for p in programs]
        content = "\n".join([*map(str, programs), repr(orders), repr(waits), repr(written)])
        results.append(hashlib.sha256(content.encode()).hexdigest()[:16])
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["schedule"].splitlines()[1].partition(" ")[2])
def test_programs_are_those_of_before(case: dict[str, list[str]]) -> None:
    assert digests(str(case["schedule"])) == case["digests"]
