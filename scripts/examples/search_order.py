"""Search the best order for costs and a memory limit, compare it with the families, write it and draw it.

No model, no device, no JAX. ``python search_order.py [DIRECTORY]`` writes ``best.sched``, which ``Trainer(schedule=…)``,
``pipeline.schedule`` and every schedule verb read, and ``best.html``, a picture with zoom. What to change: the costs
(``read_costs("costs.json")`` of ``jaxpipe profile`` or ``plan --costs-out``), the placement, the limit.
"""

import sys
from pathlib import Path

from jaxpipe.plot import plot_timelines
from jaxpipe.schedule import CostProfile, v_shape, write_schedule
from jaxpipe.search import best_schedule, lower_bound
from jaxpipe.search.solve import Options, SolveTask, solve

RANKS, MICROBATCHES, LIMIT = 4, 8, 3.0


def search(directory: Path, seconds: float) -> None:
    placement = v_shape(RANKS)  # two chunks a rank, down the ranks and back up
    costs = CostProfile.on(placement, f=1.0, b=1.1, w=0.9, comm=0.05)  # of a rank's share of a microbatch

    best_family = best_schedule(RANKS, MICROBATCHES, costs, memory_limit=LIMIT)
    timeline = best_family.timeline
    print(f"best family {best_family.setting}: {timeline.makespan:.3f}, bubble {timeline.bubble_rate:.1%}")

    task = SolveTask(placement, MICROBATCHES, costs, memory_limit=LIMIT)
    solution = solve(task, Options(time_limit_s=seconds, workers=1))
    print(
        f"solver: {solution.value:.3f}, no order is shorter than {solution.lower_bound:.3f} ({solution.gap:.1%} below)"
    )
    print(f"without a limit none is shorter than {lower_bound(placement, MICROBATCHES, costs):.3f}")

    directory.mkdir(parents=True, exist_ok=True)
    write_schedule(solution.schedule, directory / "best.sched")
    plot_timelines([solution.timeline, timeline], directory / "best.html", title="solver above best family")
    print(f"wrote {directory / 'best.sched'} and {directory / 'best.html'}")


if __name__ == "__main__":  # worker processes of the solver import this file
    search(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/search_order"), seconds=5.0)
