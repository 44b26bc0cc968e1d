"""Rehearses the ranks of a config on one device, and turns their reports into text and JSON.

The pipeline is the one that training would build, except that every rank sits on the same devices; so the memory limit,
recompute policy, offload and re-planning of the config are in the program that is rehearsed. What a training step keeps on a
rank beside the program (master parameters where the compute dtype is smaller, optimizer state) is there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from jaxpipe.cost import Timing
from jaxpipe.rehearsal.rank import Rehearsal
from jaxpipe.rehearsal.report import RankReport, rehearsed_costs
from jaxpipe.runtime.offload import check_host_memory
from jaxpipe.schedule import CostProfile, HostLink, Link, Timeline, simulate
from jaxpipe.schedule.json_form import to_costs
from jaxpipe.text import format_bytes
from jaxpipe.train.assemble import Progress
from jaxpipe.train.setup import Prepared, compile_pipeline, offload_options, step_over
from jaxpipe.train.step import resident_avals

_NO_LIMIT_GB = 1e9


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Reports of some ranks, in order; ``costs`` that follow from them; ``timeline``: a whole step simulated with these."""

    reports: tuple[RankReport, ...]
    costs: CostProfile
    timeline: Timeline


def rehearse(
    prepared: Prepared,
    devices: Sequence[jax.Device],
    ranks: Sequence[int],
    progress: Progress,
    *,
    steps: int = 5,
    optimizer: bool = True,
    memory_limit_bytes: float | None = None,
    link: Link | None = None,
    host: HostLink | None = None,
) -> Rehearsed:
    """Rehearse ``ranks`` of the config's pipeline, each on ``devices`` (dp × tp), the one that needs least memory first (an
    allocator's peak never falls).

    Args:
        steps: timed steps of each.
        optimizer: keep masters and optimizer state on the device, as a training step does.
        memory_limit_bytes: of a smaller device than the real one.
        link: between ranks, for the prediction; free by default.
        host: the link to the host as measured.

    Raises:
        ConfigError, ScheduleError, StageError, ProgramError: what is wrong, and what would work; no such rank; the host has no
            room for what a rank offloads.
        RunError: an instruction failed, or memory ran out.
    """
    config = prepared.config
    roomy = config.changed({"offload.host_memory_gb": _NO_LIMIT_GB})  # below, a rank at a time
    everywhere = list(devices) * prepared.schedule.num_ranks
    pipeline = compile_pipeline(replace(prepared, config=roomy), everywhere, progress)
    step, rehearsals = step_over(config, pipeline), []
    for rank in ranks:
        check_host_memory([pipeline.programs[rank]], offload_options(config), devices[0].platform)
        rehearsal = Rehearsal(
            pipeline,
            rank,
            vocab_size=prepared.dataset.tokenizer.vocab_size,
            resident=resident_avals(step.pipeline, step.states, rank) if optimizer else None,
            memory_limit_bytes=memory_limit_bytes,
            host=host,
        )
        rehearsals.append(rehearsal)
    reports = [r.run(steps=steps, progress=progress) for r in sorted(rehearsals, key=lambda r: r.predicted_peak_bytes)]
    reports.sort(key=lambda r: r.rank)
    costs = step.with_state(rehearsed_costs(pipeline, reports, link=link, host=host))
    return Rehearsed(tuple(reports), costs, simulate(pipeline.schedule, costs))


def rehearsed_json(done: Rehearsed) -> dict[str, Any]:
    """All of it, as JSON can hold it."""
    return {
        "ranks": [_rank_json(r) for r in done.reports],
        "predicted_step_s": done.timeline.makespan if _complete(done) else None,
        "predicted_bubble_rate": done.timeline.bubble_rate if _complete(done) else None,
        "costs": to_costs(done.costs),
    }


def _rank_json(r: RankReport) -> dict[str, Any]:
    def functions(timings: Mapping[tuple[str, int], Timing]) -> list[dict[str, Any]]:
        return [{"op": op, "stage": s, **asdict(t)} for (op, s), t in sorted(timings.items(), key=lambda x: x[0][::-1])]

    predicted = r.memory.predicted
    return {
        "rank": r.rank,
        "num_ranks": r.num_ranks,
        "schedule": r.schedule,
        "stages": list(r.stages),
        "device": r.device,
        "instructions": r.num_instructions,
        "step": asdict(r.step),
        "host_us": r.host_us,
        "functions": functions(r.timings),
        "functions_alone": functions(r.alone),
        "memory": {
            "predicted_bytes": r.memory.predicted_bytes,
            "measured_bytes": r.memory.measured_bytes,
            "predicted_over_measured": r.memory.ratio,
            "source": r.memory.source,
            "exact": r.memory.exact,
            "at": predicted.at,
            "by_kind": dict(predicted.by_kind),
        },
        "copies": [{**asdict(c), "bytes_per_s": c.bytes_per_s} for c in r.copies],
        "slowdown_while_copying": r.slowdown,
        "workspace": [
            {"op": op, "stage": s, "temp_bytes": f.temp_bytes} for (op, s), f in sorted(r.footprints.items())
        ],
    }


def rehearsed_text(done: Rehearsed) -> str:
    """A block per rank, then the step of the whole cluster if all ranks were rehearsed."""
    blocks = [_rank_text(r) for r in done.reports]
    if _complete(done):
        t = done.timeline
        span = max(r.step.median_s for r in done.reports)
        blocks.append(
            f"all ranks: predicted step {t.makespan * 1e3:.2f} ms without the optimizer's update, bubble "
            f"{t.bubble_rate:.1%}; the busiest rank alone takes {span * 1e3:.2f} ms"
        )
    return "\n\n".join(blocks)


def _complete(done: Rehearsed) -> bool:
    return len(done.reports) == done.reports[0].num_ranks


def _rank_text(r: RankReport) -> str:
    stages = ", ".join(map(str, r.stages))
    m = r.memory
    kinds = ", ".join(
        f"{kind} {format_bytes(n, binary=True)}" for kind, n in sorted(m.predicted.by_kind.items(), key=lambda x: -x[1])
    )
    lines = [
        f"rank {r.rank} of {r.num_ranks} (stage{'s' * (len(r.stages) > 1)} {stages}), schedule {r.schedule}, "
        f"{r.num_instructions} instructions on {'' if '×' in r.device else 'one '}{r.device}",
        f"  memory  predicted {format_bytes(m.predicted_bytes, binary=True)}, measured {'' if m.exact else 'at least '}"
        f"{format_bytes(m.measured_bytes, binary=True)} ({m.source}): predicted ÷ measured {m.ratio:.3f}",
        f"          with workspace {format_bytes(m.predicted.peak_bytes, binary=True)}, at {m.predicted.at}: {kinds}",
        f"  step    {r.step} without waiting for other ranks; {r.host_us:.0f} µs of the host per instruction",
        "  op  stage        ms  spread  samples  alone ms",
    ]
    for op, s in sorted({*r.timings, *r.alone}, key=lambda at: at[::-1]):
        t, alone_timing = r.timings.get((op, s)), r.alone.get((op, s))
        cells = (
            f"{t.median_s * 1e3:>8.3f}  {t.spread:>6.0%}  {t.count:>7}" if t is not None else f"{'-':>8}{'-':>8}{0:>9}"
        )
        lines.append(
            f"  {op:<2}  {s:>5}  {cells}"
            + (f"  {alone_timing.median_s * 1e3:>8.3f}" if alone_timing is not None else "")
        )
    lines += [
        f"  {'out' if c.lane == 'd2h' else 'in':<3} {c.count} copies of {format_bytes(c.bytes / c.count, binary=True)}, "
        f"{c.bytes_per_s / 1e9:.2f} GB/s, {c.hidden:.0%} of their time under compute"
        for c in r.copies
    ]
    if r.slowdown is not None:
        lines.append(f"  compute takes {r.slowdown:.3f} × as long while copies run")
    return "\n".join(lines)
