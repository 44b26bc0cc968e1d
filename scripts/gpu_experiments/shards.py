"""The experiment on a rank of four GPUs that are not there: one card with a mock topology, collectives as local copies."""

from __future__ import annotations

from typing import Any

from scripts.gpu_experiments.blocks import OPS, pipeline, timed
from scripts.gpu_experiments.here import cannot_ask
from scripts.gpu_experiments.process import call_in_process, with_flags
from scripts.gpu_experiments.registry import Settings, experiment

SHARDS = 4
_MOCK = {"JAX_MOCK_GPU_TOPOLOGY": f"1x1x{SHARDS}"}
_LOOPBACK = "--xla_gpu_collectives_implementation=loopback"
_SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler={}"
_PROBE_S, _LIMIT_S = 40, 90


@experiment(
    "T21",
    version=1,
    question="what do the functions of a tp=4 rank take and hold on one card, its neighbours mocked?",
    backs="plan at tp, stp",
    paths=("jaxpipe/stage", "jaxpipe/tensor_parallel.py", "models/gpt.py"),
    estimate_s=120,
    predicted={"loopback": "its flag may be missing in this jaxlib", "peak": "memory_analysis within 2%"},
    want={"scheduled.peak_over_analysis": "0.98 to 1.02"},
)
def mocked_shards(settings: Settings) -> dict[str, Any]:
    """Probe whether this jaxlib takes a mock topology and loopback collectives; then time F, B, W, BW and a woven F+BW of a
    block divided by four, with and without the latency-hiding scheduler, and hold the allocator's peak to what XLA says. On a
    CPU four emulated devices stand in, and collectives are real."""
    variants = {"scheduled": "true", "unscheduled": "false"}
    if settings.tiny:
        return {"scheduled": shard_seconds(settings)}
    environment = _MOCK | with_flags(_LOOPBACK)
    probe = call_in_process(probe_collective, settings, limit_s=_PROBE_S, environment=environment)
    if probe.failure:
        said = next(reversed(probe.output.strip().splitlines()), "nothing")
        return cannot_ask(f"a mock topology with loopback collectives {probe.failure}: {said[:300]}")
    numbers: dict[str, Any] = {"probe": probe.answer}
    for name, value in variants.items():
        flags = _MOCK | with_flags(_LOOPBACK, _SCHEDULER.format(value))
        outcome = call_in_process(shard_seconds, settings, limit_s=_LIMIT_S, environment=flags)
        numbers[name] = outcome.answer or {"failure": outcome.failure, "said": outcome.output}
    return numbers


def probe_collective(settings: Settings) -> dict[str, Any]:
    """Add up over the devices, in the sense that loopback gives it: what comes back is finite."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((SHARDS,), ("tp",), devices=jax.devices()[:SHARDS])
    array = jax.device_put(jnp.ones((SHARDS, 8)), NamedSharding(mesh, PartitionSpec("tp")))
    added = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))(array)
    return {"devices": len(jax.devices()), "sum": float(added.addressable_shards[0].data[0])}


def shard_seconds(settings: Settings) -> dict[str, Any]:
    """Return seconds of the functions of a divided block, and the bytes that the largest is seen to take ÷ XLA's figure."""
    from jaxpipe.train.devices import request_devices

    # On a CPU, which has emulated none yet.
    request_devices(SHARDS)
    from jaxpipe.schedule import generate
    from jaxpipe.stage.compiled.braid import braid
    from jaxpipe.stage.compiled.compile import BuildCache
    from jaxpipe.stage.functions import footprint

    heads = max(SHARDS, settings.hidden // settings.head)
    stage = pipeline(settings, settings.hidden, generate("po", 2, 2), shards=SHARDS, num_heads=heads).stages[1]
    functions: dict[str, Any] = {op: stage.functions[op] for op in OPS}
    functions["F+BW"] = braid([(stage.stage, stage.functions[op]) for op in ("F", "BW")], BuildCache())
    # A peak never falls, so that of the largest comes first.
    largest = max(functions.values(), key=lambda f: footprint(f).peak_bytes)
    ratio = _peak_ratio(settings, largest)
    seconds = {name: timed(settings, f) for name, f in functions.items()}
    return {
        "seconds": seconds,
        "braid_over_apart": seconds["F+BW"] / (seconds["F"] + seconds["BW"]),
        "temp_bytes": {name: footprint(f).temp_bytes for name, f in functions.items()},
        "peak_over_analysis": ratio,
    }


def _peak_ratio(settings: Settings, function: Any) -> float:
    """Return the bytes that the first device's allocator saw in a call, arguments among them, ÷ XLA's figure. A CPU counts
    nothing: there it is arguments and results alone."""
    import jax

    from jaxpipe.cost.seconds import arguments_of
    from jaxpipe.stage.functions import footprint

    device, analysis = jax.devices()[0], footprint(function)
    before = device.memory_stats()
    inputs = arguments_of(function, settings.vocab)
    results = jax.block_until_ready(function.call(*inputs))
    if before is not None:
        return float(device.memory_stats()["peak_bytes_in_use"] - before["bytes_in_use"]) / analysis.peak_bytes
    shards = [s for x in (*inputs, *results) if not x.is_deleted() for s in x.addressable_shards if s.device == device]
    return sum(s.data.nbytes for s in shards) / (analysis.peak_bytes - analysis.temp_bytes)
