"""Times stage functions: seconds counted (FLOPs over a rate), or measured, each compiled function alone on its own device.

*Timing.* A sample is ``calls`` calls back to back, the last one's results awaited, divided by ``calls``: a GPU runs what it is
given in order, so while one call runs the next is being dispatched, and neither the latency of dispatch nor that of waking
up counts more than once a sample. The CPU backend gets one call a sample (its dispatch shares cores with the computation, and
a function's time is what a pipeline step sees). The median of several samples counts, after calls that warm up; quartiles tell
the spread.

*Emulated devices* share the cores and memory of one machine. A function that is timed alone gets all of them, in a pipeline
only its share: so the functions of all ranks are timed at once (:func:`time_at_once`), as in a run.

What a function takes without its tensor-parallel collectives is its own time less theirs, as long as nothing in it hides them,
which holds for F and B (`stp.txt` section 4.3).

Arguments are random (:func:`random_array`): power draw, and with it the speed of a GPU, depends on the data; a product of ones
took a fifth less on an H200 than the same product in a step (specs/gpu.md 1.1). Values are made on the host, so nothing is
compiled for them.

Every source of seconds ends as :data:`Seconds`: :func:`flop_seconds`, :func:`measured_seconds` (functions alone, or in a
rehearsed program), the roofline of a machine that is not here (:mod:`jaxpipe.planning.predict`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.schedule import op_spec
from jaxpipe.stage.compiled.braid import collectives_alone
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.functions import AnyFunction, StageFunction, StageFunctions, total_device_bytes
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.params import compute_avals

Seconds = Mapping[str, Sequence[float]]
"""Seconds by op, an entry a stage."""
LEAST_S = 1e-6
"""The least seconds of any function: one without matmuls takes time, too."""
# Samples on an accelerator are so long that the chip is as warm as in a step: in 50 ms it clocks higher. Fewer calls are in
# flight than the 32 computations that a device takes before dispatch blocks, and with few bytes of results, which are all
# there at once (on an H200 a device was fuller before the first step of a training, when stages were timed, than in it).
_SAMPLE_S, _MOST_CALLS, _MOST_IN_FLIGHT, _MOST_BYTES = 0.5, 10_000, 30, 1 << 30


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the median of ``count`` samples, and the first and third quartile (``low_s``, ``high_s``)."""

    median_s: float
    low_s: float
    high_s: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarize at least one sample, in seconds."""
        assert samples, "a timing needs a sample"
        low, median, high = statistics.quantiles(samples, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(median, low, high, len(samples))

    @property
    def spread(self) -> float:
        """Distance of the quartiles ÷ the median: how far to trust it. 0 where nothing took any time."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s > 0 else 0.0

    def __str__(self) -> str:
        """Format as ``12.34 ms ±3%`` (half the distance of the quartiles)."""
        half = f"{50 * self.spread:.0f}%" if math.isfinite(self.spread) else "?"
        return f"{self.median_s * 1e3:.3f} ms ±{half}"


def medians(timings: Mapping[Any, Timing]) -> dict[Any, float]:
    """Return the median of each timing, in seconds."""
    return {key: t.median_s for key, t in timings.items()}


def flop_seconds(stages: Sequence[StageFunctions], flops_per_s: float) -> Seconds:
    """Estimate seconds as FLOPs ÷ ``flops_per_s``."""
    return {op: tuple(max(LEAST_S, s.flops.get(op, 0) / flops_per_s) for s in stages) for op in ops_of(stages)}


def ops_of(stages: Sequence[StageFunctions]) -> tuple[str, ...]:
    """Return the ops that any of ``stages`` has a function for."""
    return tuple(dict.fromkeys(op for s in stages for op in s.functions))


def measured_seconds(
    stages: Sequence[StageFunctions],
    measured: Mapping[tuple[str, int], float],
    comm_s: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Seconds:
    """Complete measured seconds to all ops and stages.

    An op that does the work of several (BW) and was not measured takes what these take; any other takes its FLOPs at the rate
    of the same op where that was measured (of all ops, if it was nowhere).

    Args:
        measured: by (op, stage), of functions or copies that ran alone.
        comm_s: of collectives, by the field of a profile that holds them and by stage, which are taken off F and B; where there
            are any, BW takes no longer than B and W.
    """
    all_ops = ops_of(stages)

    def seconds_per_flop(*ops: str) -> float:
        samples = [(stages[s].flops.get(op, 0), x) for (op, s), x in measured.items() if op in ops]
        flops = sum(f for f, _ in samples)
        return sum(x for _, x in samples) / flops if flops else 0.0

    rates = {op: seconds_per_flop(op) or seconds_per_flop(*all_ops) for op in all_ops}

    def seconds(op: str, s: int) -> float:
        spec = op_spec(op)
        if spec.parts and (any(map(any, comm_s.values())) or (op, s) not in measured):
            return min(measured.get((op, s), math.inf), sum(seconds(part, s) for part in spec.parts))
        total_s = measured.get((op, s), max(LEAST_S, rates[op] * stages[s].flops.get(op, 0)))
        return max(0.0, total_s - comm_s[spec.collective][s]) if spec.collective in comm_s else total_s

    return {op: tuple(seconds(op, s) for s in range(len(stages))) for op in all_ops}


def timed(run: Callable[[], Any], repeats: int, warm_up: int = 1) -> Timing:
    """Time ``run()`` until its results are there, after ``warm_up`` untimed calls."""
    samples = []
    for n in range(warm_up + repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        if n >= warm_up:
            samples.append(time.perf_counter() - start)
    return Timing.of(samples)


def time_function(
    function: StageFunction, repeats: int, warm_up: int = 1, *, calls: int | None = None, vocab_size: int = 2
) -> Timing:
    """Time one call on random values.

    ``calls`` back to back between two waits: on an accelerator as many as make a sample of half a second, one on a CPU.
    ``vocab_size``: integers of the batch are below it.
    """
    sample = call_timer(function, arguments_of(function, vocab_size))
    # The first call compiles; it is neither a sample nor a warm-up.
    sample(1)
    warm = [sample(1) for _ in range(warm_up)]
    if calls is None:
        on_cpu = all(device.platform == "cpu" for device in devices_of(function))
        calls = 1 if on_cpu else max(2, min(_MOST_CALLS, math.ceil(_SAMPLE_S / min(warm or [sample(1)]))))
    return Timing.of([sample(calls) for _ in range(repeats)])


def time_at_once(
    ranks: Sequence[Sequence[StageFunction]], repeats: int, warm_up: int = 1, *, vocab_size: int = 2
) -> list[list[Timing]]:
    """Time one call of each function, those of a rank one after another, while all other ranks run theirs: a thread a rank,
    which goes on until the last one has ``repeats`` samples of everything. For devices that share a machine."""
    samplers = [[call_timer(f, arguments_of(f, vocab_size)) for f in functions] for functions in ranks]
    for sample in chain.from_iterable(samplers):
        sample(1)  # compiles
    behind = set(range(len(ranks)))
    # Tests set x64 for this thread alone; functions that run in others must see the same.
    wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined,unused-ignore]

    def run(rank: int) -> list[list[float]]:
        seconds: list[list[float]] = [[] for _ in samplers[rank]]
        try:
            with jax.enable_x64(wide):
                while behind:
                    for sample, samples in zip(samplers[rank], seconds, strict=True):
                        samples.append(sample(1))
                    if len(seconds[0]) == warm_up + repeats:
                        behind.discard(rank)
        # Else the threads of other ranks would run for ever, waiting for this one's samples.
        except BaseException:
            behind.clear()
            raise
        return seconds

    with ThreadPoolExecutor(len(ranks)) as pool:
        seconds_by_rank = list(pool.map(run, range(len(ranks))))
    return [
        [Timing.of(samples[warm_up : warm_up + repeats]) for samples in rank_samples]
        for rank_samples in seconds_by_rank
    ]


def call_timer(function: StageFunction, inputs: list[jax.Array]) -> Callable[[int], float]:
    """Return a function that times a number of calls on ``inputs`` back to back: seconds of one. Accumulators, which a call
    donates, go round and round."""
    updated = [(k, function.outputs.index(function.inputs[k])) for k in function.donated]
    donated = {o for _, o in updated}
    last = next((k for k in range(len(function.outputs)) if k not in donated), 0)  # no later call donates it
    in_flight = max(2, min(_MOST_IN_FLIGHT, _MOST_BYTES // max(1, total_device_bytes(function.avals_out))))

    def sample(count: int) -> float:
        markers: deque[jax.Array] = deque()
        start = time.perf_counter()
        for _ in range(count):
            results = function.call(*inputs)
            for i, o in updated:
                inputs[i] = results[o]
            markers.append(results[last])
            if len(markers) == in_flight:
                markers.popleft().block_until_ready()
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / count

    return sample


def time_collectives(function: StageFunction, repeats: int, warm_up: int = 1) -> Timing | None:
    """Time all collectives over ``tp`` of one call of ``function``; None if it has none."""
    exchange = collectives_alone(function)
    return None if exchange is None else timed(lambda: exchange[0](*exchange[1]), repeats, 1 + warm_up)


def devices_of(function: StageFunction) -> frozenset[jax.Device]:
    """Return the devices of a function's rank."""
    sharding = (*function.avals_in, *function.avals_out)[0].sharding
    assert sharding is not None, "stage functions know their devices"
    return frozenset(sharding.device_set)


def measured_layer_costs(model: Model, microbatch_size: int, *, repeats: int = 3) -> tuple[float, ...]:
    """Measure the seconds of forward and backward of each layer alone on the first device (F and BW of a stage of its own, in
    float32), median of ``repeats``. Layers of the same functions and shapes are timed once."""
    mesh, layers = pipeline_submeshes(1, devices=jax.devices()[:1])[0], [[layer] for layer in model.layers]
    avals, batch = compute_avals(model.layers, jnp.dtype(jnp.float32)), model.batch_spec(microbatch_size)
    seconds_of: dict[Hashable, float] = {}
    costs = []
    for (layer,), stage in zip(layers, build_all(layers, avals, batch, [mesh] * len(layers)), strict=True):
        functions = [stage.functions[op] for op in ("F", "BW") if op in stage.functions]
        same = (layer.code, *(f.avals_in for f in functions))
        if same not in seconds_of:
            seconds_of[same] = sum(time_function(f, repeats, vocab_size=model.vocab_size).median_s for f in functions)
        costs.append(seconds_of[same])
    return tuple(costs)


ACTIVATION, COTANGENT, PARAMETER = 1.0, 1e-2, 0.05
"""Largest absolute values, so that a few layers leave activations and cotangents finite."""


_SCALES = {"param": PARAMETER, "dy": COTANGENT, "dx": COTANGENT}


# Values repeat after so many. A prime: rows of a matrix, whose lengths are powers of two, are different ones.
_PERIOD = 65521


def random_array(
    aval: jax.ShapeDtypeStruct, scale: float = 1.0, limit: int = 2, *, positive: bool = False
) -> jax.Array:
    """Return an array of the shape, dtype and sharding of ``aval``: floats within ``±scale``, integers from 0 to
    ``limit − 1``, booleans, or PRNG keys. ``positive``: floats from a tenth of ``scale``."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        keys: jax.Array = jax.device_put(jax.random.key(0) if not aval.shape else _keys(aval), aval.sharding)
        return keys
    rng = np.random.default_rng(0)
    period = min(_PERIOD, max(1, aval.size))
    values: np.ndarray[Any, Any]
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        values = rng.uniform(0.1 * scale if positive else -scale, scale, period)
    else:
        largest = 1 if aval.dtype == np.bool_ else int(np.iinfo(aval.dtype).max)
        values = rng.integers(0, min(limit, largest + 1), period)
    array: jax.Array = jax.device_put(np.resize(values.astype(aval.dtype), aval.shape), aval.sharding)
    return array


def _keys(aval: jax.ShapeDtypeStruct) -> jax.Array:
    keys: jax.Array = jax.random.split(jax.random.key(0), aval.shape)
    return keys


def arguments_of(function: AnyFunction, vocab_size: int) -> list[jax.Array]:
    """Return random arguments of a stage function; integers of the batch are below ``vocab_size``, other integers 0 or 1.
    Residuals are positive: a variance below zero would make everything NaN, which is constant."""
    return [
        random_array(
            aval,
            _SCALES.get(port.kind, ACTIVATION),
            vocab_size if port.kind == "data" else 2,
            positive=port.kind in ("res", "wres"),
        )
        for port, aval in zip(function.inputs, function.avals_in, strict=True)
    ]
