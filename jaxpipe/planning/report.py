"""Format predictions, suggestions and tuning results as text and as plain values for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from jaxpipe.cost.memory import Kind, RankMemory
from jaxpipe.planning.predict import ExpertRows, Prediction
from jaxpipe.planning.roofline import Efficiency
from jaxpipe.planning.space import Space, Suggestion, Suggestions, TuneResult, TuneTrial, shown
from jaxpipe.planning.stages import StageCosts
from jaxpipe.planning.targets import target_json
from jaxpipe.text import aligned, format_bytes, format_seconds, mfu_text

_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "residuals", "boundaries", "temporaries")
_SHOWN = 8
_WORTH_SAYING = 0.005
"""The smallest gain in step time, as a fraction, that is worth a mention."""


def assumptions(p: Prediction, e: Efficiency, workspace: str) -> tuple[str, ...]:
    """List the assumptions behind the numbers, one line each."""
    dtype, target, pipe = p.config.run.dtype, p.target, p.config.pipeline
    master = "float32 master parameters, " if dtype != "float32" else ""
    tp = ""
    if pipe.tp > 1:
        how = (
            "split over the shards (sequence parallel)"
            if pipe.sharding.sequence_parallel
            else "whole on each of the shards"
        )
        tp = f"; tp={pipe.tp}: residual stream {how}"
    if pipe.cp > 1:
        tp += f"; cp={pipe.cp}: positions of each sequence divided, attention by {pipe.sharding.cp_method}"
    if pipe.dp > 1:
        tp += (
            f"; dp={pipe.dp}" + f" (ep={pipe.ep})" * (pipe.ep > 1) + ", gradients of a stage reduced behind its last W"
        )
        tp += ", ZeRO-1" * pipe.sharding.zero1
    attention = f"softmax(q kᵀ) v on the plain XLA path; recompute={_policies(p)} decides which scores are kept"
    if pipe.cp > 1 and pipe.sharding.cp_method == "ring":
        attention = "block by block on the plain XLA path; the backward pass computes scores again"
    if p.fused_attention:
        attention = "cuDNN's fused kernel, which keeps no scores; FLOPs are of the pairs that its mask leaves"
    return (
        f"precision: {dtype} parameters and activations; {master}gradients and Adam moments in float32",
        f"attention: {attention}",
        *(f"but {remark}" for remark in p.remarks),
        f"rates: {target.description}, {target.peak_flops_per_s(dtype) / 1e12:g} TFLOP/s × {e.matmul_of(target):g}, "
        f"{target.memory_bytes_per_s / 1e9:g} GB/s × {e.bandwidth:g}, links × {e.link:g}, host × {e.host:g}{tp}",
        f"workspace: {workspace}",
        *(["post-validation: no step is clipped"] if pipe.passes.post_validation != "off" else []),
        *(["collectives: of a stage and microbatch at most " + "; ".join(_collectives(p))] if p.comm_s else []),
        *([] if p.experts is None else [_experts(p.experts, e.imbalance)]),
    )


def _collectives(p: Prediction) -> Iterator[str]:
    for axes, (f_s, b_s) in p.comm_s.items():
        yield f"F {format_seconds(f_s)}, B {format_seconds(b_s)} over {axes}"


def _experts(rows: ExpertRows, imbalance: float) -> str:
    """Say what a device receives for its experts, and what an uneven choice costs."""
    lost = f", which seconds are of; beyond {rows.room:.3g} a run drops rows" if imbalance > rows.room * 1.001 else ""
    return (
        f"experts: {rows.top_k} of {rows.num_experts} a position, {rows.mean:,.0f} rows a device, layer and microbatch; "
        f"buffers for {rows.room:.3g} × as many ({format_bytes(rows.room * rows.mean * rows.row_bytes)}), in the worst case "
        f"{rows.worst / rows.mean:.3g} × ({format_bytes(rows.worst * rows.row_bytes)}); imbalance {imbalance:g}{lost}"
    )


def _policies(p: Prediction) -> str:
    recompute = p.config.pipeline.recompute
    return recompute if isinstance(recompute, str) else ",".join(recompute)


def prediction_text(p: Prediction, lines: Sequence[str]) -> str:
    """Format the prediction: a summary, a table of ranks, assumptions."""
    pipe, config = p.config.pipeline, p.config
    worst = p.worst
    head = [
        f"{config.model.target}, {_parameters(p)}, {p.schedule.name} on {pipe.ranks} ranks "
        f"({p.devices} devices), {pipe.microbatches} microbatches of {config.run.batch // pipe.microbatches} × "
        f"{config.data.seq_len} tokens",
        f"{'fits' if p.fits else 'DOES NOT FIT'}: rank {worst.rank} needs {format_bytes(worst.peak_bytes)} of "
        f"{format_bytes(p.limit_bytes)}; activations {format_bytes(max(p.activation_bytes))} at most",
        f"step {format_seconds(p.step_s)} (update {format_seconds(p.update_s)}{_late(p)}), {p.tokens_per_s:,.0f} tokens/s, "
        f"{mfu_text(p.mfu, p.peers_mfu)}, bubble {100 * p.timeline.bubble_rate:.1f}% "
        f"(by longest span {100 * p.timeline.span_bubble_rate:.1f}%)",
        f"offload: {100 * p.offloaded:.0f}% of the residuals, {format_bytes(max(p.offload_bytes))} a rank and step each way, "
        f"{format_bytes(max(m.host_peak_bytes for m in p.memory))} of host memory; "
        f"k = {p.k:.2f} (round trip of all residuals ÷ compute)",
    ]
    return "\n".join([*head, "", _rank_table(p), "", *(f"assumed  {line}" for line in lines)])


def _late(p: Prediction) -> str:
    """Return the step time with post-validation, in words, if that is clearly shorter."""
    gain = 1 - p.late_step_s / p.step_s
    return f"; {format_seconds(p.late_step_s)} with post-validation" if gain >= _WORTH_SAYING else ""


def _rank_table(p: Prediction) -> str:
    unit, scale = ("GB", 1e9) if p.worst.peak_bytes >= 1e9 else ("MB", 1e6)
    rows = [["rank", *_KINDS, f"total {unit}", "left"]]
    for m in p.memory:
        amounts = (*(m.by_kind[kind] for kind in _KINDS), m.peak_bytes, p.limit_bytes - m.peak_bytes)
        rows.append([str(m.rank), *(f"{n / scale:.1f}" for n in amounts)])
    return "\n".join(aligned(rows))


def suggestions_text(s: Suggestions, paths: Mapping[str, str]) -> str:
    """List the changes that fit, the fastest first; if none fits, the one that needs least memory. ``paths``: schedule
    files by change."""
    if not s.fitting:
        least = s.smallest
        return (
            f"none of {s.tried} changes fits; the least memory needed is "
            f"{format_bytes(least.prediction.worst.peak_bytes)} ({least.change})"
        )
    rows = [("change that fits", "peak", "step", "tokens/s", "per device", "override")]
    for one in s.fitting[:_SHOWN]:
        q = one.prediction
        override = " ".join(overrides_of(one, paths.get(one.change, "FILE (--schedules DIR writes it)")))
        speeds = (f"{q.tokens_per_s:,.0f}", f"{q.tokens_per_s_per_device:,.0f}")
        rows.append((one.change, format_bytes(q.worst.peak_bytes), format_seconds(q.step_s), *speeds, override))
    hidden_count = len(s.fitting) - _SHOWN
    untried = f"; no time for {s.left_out} more" if s.left_out else ""
    hidden = f"; {hidden_count} more that fit not shown" if hidden_count > 0 else ""
    return "\n".join([*aligned(rows, left=(0, 1, 2, 5)), f"{s.tried} changes tried{untried}{hidden}"])


def overrides_of(s: Suggestion, path: str = "FILE") -> tuple[str, ...]:
    """Return the overrides, with the schedule file's path where one is needed."""
    return s.overrides if s.schedule is None else (*s.overrides, f"pipeline.schedule={path}")


def prediction_json(p: Prediction, lines: Sequence[str]) -> dict[str, Any]:
    """Return the prediction as bytes, seconds and plain ratios."""
    return {
        "schedule": p.schedule.name,
        "ranks": p.schedule.num_ranks,
        "devices": p.devices,
        "microbatches": p.schedule.num_microbatches,
        "num_params": p.num_params,
        "active_params": p.active_params,
        "comm_s": {axes: {"F": f_s, "B": b_s} for axes, (f_s, b_s) in p.comm_s.items()},
        "limit_bytes": p.limit_bytes,
        **_reached(p),
        "peak_activation_bytes": max(p.activation_bytes),
        "memory": [_memory_json(m, a) for m, a in zip(p.memory, p.activation_bytes, strict=True)],
        "update_s": p.update_s,
        "post_validation_step_s": p.late_step_s,
        "bubble_rate": p.timeline.bubble_rate,
        "span_bubble_rate": p.timeline.span_bubble_rate,
        "offloaded_share": p.offloaded,
        "offload_bytes": list(p.offload_bytes),
        "host_bytes": [m.host_peak_bytes for m in p.memory],
        "k": p.k,
        "costs_from": p.costs.source,
        "assumptions": list(lines),
    }


def _memory_json(m: RankMemory, activations: float) -> dict[str, float]:
    kinds = {f"{kind}_bytes": m.by_kind[kind] for kind in _KINDS}
    return {"rank": m.rank, **kinds, "total_bytes": m.peak_bytes, "peak_activation_bytes": activations}


def suggestion_json(s: Suggestion, path: str | None = None) -> dict[str, Any]:
    """Return a change with its predicted numbers."""
    return {"change": s.change, "overrides": list(overrides_of(s, path or "FILE")), **_reached(s.prediction)}


def _reached(p: Prediction) -> dict[str, Any]:
    """Return the predicted step time and throughput of a config."""
    names = ("fits", "step_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "peers_mfu")
    return {"peak_bytes": p.worst.peak_bytes, **{name: getattr(p, name) for name in names}}


def tuned_text(tuned: TuneResult, space: Space) -> str:
    """Describe the best candidate, then list those that fit, the fastest first. ``tuned`` must have a best."""
    p = tuned.best
    assert p is not None
    counts = Counter[str]()
    for trial in tuned.trials:
        counts[trial.status] += trial.candidates
    status_counts = ", ".join(f"{n:,} {status}" for status, n in counts.items())
    early = f" ({tuned.stopped}: {counts['not reached']:,} candidates were not reached)" if tuned.stopped else ""
    head = [
        f"{p.config.model.target}, {_parameters(p)} on {space.devices} of {p.target.description}, "
        f"batch {p.config.run.batch} × {p.config.data.seq_len} tokens, {format_bytes(p.limit_bytes)} a device",
        f"best of {counts.total():,} candidates in {format_seconds(tuned.seconds)}{early}: {status_counts}",
        f"step {format_seconds(p.step_s)}, {p.tokens_per_s:,.0f} tokens/s ({p.tokens_per_s_per_device:,.0f} a device), "
        f"{mfu_text(p.mfu, p.peers_mfu)}, bubble {100 * p.timeline.bubble_rate:.1f}%, rank {p.worst.rank} needs "
        f"{format_bytes(p.worst.peak_bytes)}",
    ]
    columns = [axis.key for axis in space.axes]
    rows = [(*(key.rpartition(".")[2] for key in columns), "peak", "step", "tokens/s", "order")]
    for trial in tuned.leading[:_SHOWN]:
        order = " ".join(
            f"{key.rpartition('.')[2]}={shown(x)}" for key, x in trial.settings.items() if key not in columns
        )
        rows.append(
            (
                *(shown(trial.settings[key]) for key in columns),
                format_bytes(max(trial.peak_bytes)),
                format_seconds(trial.step_s or 0.0),
                f"{trial.tokens_per_s:,.0f}",
                order.removeprefix("schedule=") + " and the offload pass" * trial.offloaded,
            )
        )
    return "\n".join([*head, "", *aligned(rows, left=(len(columns) + 3,))])


def tuned_json(tuned: TuneResult, space: Space, stage_costs: StageCosts, limit_bytes: float) -> dict[str, Any]:
    """Return every candidate that was tried. A record's ``settings`` are overrides of ``base``; ``candidates`` of them
    share it."""
    best = tuned.best
    return {
        "base": space.base.to_dict(),
        "devices": space.devices,
        "target": target_json(stage_costs.target),
        "efficiency": asdict(stage_costs.efficiency),
        "limit_bytes": limit_bytes,
        "axes": {axis.key: list(axis.values) for axis in space.axes},
        "only": {key: list(values) for key, values in space.only.items()},
        "best": None if best is None else {"config": best.config.to_dict(), **_reached(best)},
        "seconds": tuned.seconds,
        "stopped": tuned.stopped,
        "tried": [_trial_json(t) for t in tuned.trials],
    }


def _trial_json(t: TuneTrial) -> dict[str, Any]:
    facts = {field.name: getattr(t, field.name) for field in fields(t)}
    return {name: x for name, x in facts.items() if x not in (None, (), "", False)}


def _parameters(p: Prediction) -> str:
    active = "" if p.active_params == p.num_params else f" ({_count(p.active_params)} active)"
    return f"{_count(p.num_params)} parameters{active}"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
