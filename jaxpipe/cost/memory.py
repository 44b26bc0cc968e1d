"""The bytes of a cost profile: what stages hold between and during their functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxpipe.schedule import CostProfile
from jaxpipe.stage.compiled.footprint import Footprint, total_device_bytes
from jaxpipe.stage.functions import StageFunction, StageFunctions

OPS = ("F", "B", "W", "BW")
"""The functions of a stage that a schedule runs."""


def with_memory(
    costs: CostProfile,
    stages: Sequence[StageFunctions],
    footprint_of: Callable[[StageFunction], Footprint] | None = None,
) -> CostProfile:
    """``costs`` with every byte of the stages in it, so that the simulator's peak bounds what the runtime holds.

    ``temp_bytes`` of an op: XLA's workspace (with ``footprint_of``, which compiles; 0 without) and what the runtime holds
    while the op runs beside residuals and cotangents: x where no backward pass reads it, y, dy and dx. Between actions
    ``boundary_buffers`` count what was sent and not read. ``param_bytes``: parameters. ``optimizer_bytes``: gradient
    accumulators and compiled code; add optimizer state and masters to them. Left to the caller, as it depends on the number
    of microbatches: batch arrays, keys and losses.
    """

    def temp(stage: StageFunctions, op: str) -> float:
        function = stage.functions[op]
        workspace = 0
        if footprint_of is not None:
            found = footprint_of(function)
            donated = total_device_bytes([function.avals_in[k] for k in function.donated])
            workspace = found.temp_bytes + max(0, donated - found.alias_bytes)
        return float(workspace + _passing_bytes(stage, function))

    def code(stage: StageFunctions) -> int:
        return 0 if footprint_of is None else sum(footprint_of(stage.functions[op]).code_bytes for op in OPS)

    return replace(
        costs,
        temp_bytes=tuple((op, tuple(temp(s, op) for s in stages)) for op in OPS),
        optimizer_bytes=tuple(float(total_device_bytes(s.acc_avals) + code(s)) for s in stages),
        boundary_buffers=True,
    )


def with_offloadable_bytes(costs: CostProfile, offloadable_bytes: tuple[float, ...]) -> CostProfile:
    """``costs`` of stages that offload other bytes: seconds of O and L in proportion, or as the host link says where nothing
    was offloaded before."""
    ratios = [new / old if old else 0.0 for new, old in zip(offloadable_bytes, costs.offloadable_bytes, strict=True)]
    linked = replace(costs, offloadable_bytes=offloadable_bytes, offload_s=(), load_s=())

    def scaled(name: str) -> tuple[float, ...]:
        rows = zip(getattr(costs, name), getattr(linked, name), ratios, costs.offloadable_bytes, strict=True)
        return tuple(seconds * ratio if old else link_s for seconds, link_s, ratio, old in rows)

    return replace(linked, offload_s=scaled("offload_s"), load_s=scaled("load_s"))


def _passing_bytes(stage: StageFunctions, function: StageFunction) -> int:
    """Bytes of the boundaries that a function reads or makes and that are no residual: gone when it has run and sent."""
    kept = {p for op in ("B", "W") for p in stage.functions[op].inputs if p.kind == "x"}
    shared = {
        k for n, k in function.forwarded.items() if function.outputs[n].kind == "wres"
    }  # a dy that is handed to W counts as a cotangent
    read = [
        aval
        for k, (port, aval) in enumerate(zip(function.inputs, function.avals_in, strict=True))
        if (port.kind == "dy" and k not in shared) or (port.kind == "x" and port not in kept)
    ]
    made = [
        aval
        for n, (port, aval) in enumerate(zip(function.outputs, function.avals_out, strict=True))
        if port.kind in ("y", "dx") and n not in function.forwarded
    ]
    return total_device_bytes([*read, *made])
