"""How to move a stage's residuals to the host and back: three ways, measured in turn (A B C A B C …), medians as JSON.

``device_put``: ``jax.device_put`` of all leaves with a memory kind. ``batched``: what the runtime does, one copy of all leaves
without asking how each time (:mod:`jaxpipe.runtime.transfer`). ``packed``: a compiled function concatenates the leaves' bytes,
one buffer is moved, and another function takes it apart. Per way: host microseconds of the two calls of a round trip, and
microseconds until the leaves are back.

    python scripts/bench_offload.py --d-model 128 --seq-len 128 --microbatch 4
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from jaxpipe.cost.seconds import arguments_of
from jaxpipe.mesh import PINNED_HOST, pipeline_submeshes
from jaxpipe.runtime.transfer import host_copies
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.functions import StageFunctions
from models.gpt import GPT

Move = Callable[[Sequence[jax.Array]], tuple[Any, Callable[[], Sequence[jax.Array]]]]


VOCAB_SIZE = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    stage = middle_stage(args.d_model, args.seq_len, args.microbatch, args.layers)
    leaves = residuals(stage)
    ways = {"device_put": by_device_put, "batched": by_batches(leaves), "packed": by_packing(leaves)}
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for n in range(args.repeats + 2):
        for name, move in ways.items():
            took = round_trip(move, leaves)
            if n >= 2:
                rows[name].append(took)
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "leaves": len(leaves),
        "bytes": sum(a.nbytes for a in leaves),
    }
    for name, row in rows.items():
        host, device = (statistics.median(column) for column in zip(*row, strict=True))
        result[name] = {"host_us": round(host * 1e6, 1), "done_us": round(device * 1e6, 1)}
    print(json.dumps(result))


def middle_stage(d_model: int, seq_len: int, microbatch: int, layers: int) -> StageFunctions:
    """Return a stage of ``layers`` transformer blocks."""
    model = GPT(
        vocab_size=VOCAB_SIZE, d_model=d_model, num_layers=layers, num_heads=max(1, d_model // 64), seq_len=seq_len
    )
    avals = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    cut = [model.layers[:1], model.layers[1:-1], model.layers[-1:]]
    meshes = list(pipeline_submeshes(1)) * 3
    return build_all(cut, avals, model.batch_spec(microbatch), meshes)[1]


def residuals(stage: StageFunctions) -> list[jax.Array]:
    """Return the arrays that the stage offloads, as its F makes them."""
    forward = stage.functions["F"]
    outputs = forward.call(*arguments_of(forward, VOCAB_SIZE))
    at = {port.index: k for k, port in enumerate(forward.outputs) if port.kind == "res"}
    return [outputs[at[index]] for index in stage.offloaded]


def by_device_put(leaves: Sequence[jax.Array]) -> tuple[Any, Callable[[], Sequence[jax.Array]]]:
    homes = [a.sharding for a in leaves]
    host = jax.device_put(list(leaves), [s.with_memory_kind(PINNED_HOST) for s in homes])
    return host, lambda: jax.device_put(host, homes)  # type: ignore[no-any-return]


def by_batches(leaves: Sequence[jax.Array]) -> Move:
    to_host, to_device = host_copies(leaves[0].sharding, fallback=False)

    def move(arrays: Sequence[jax.Array]) -> tuple[Any, Callable[[], Sequence[jax.Array]]]:
        host = to_host(arrays)
        return host, lambda: to_device(host)

    return move


def by_packing(leaves: Sequence[jax.Array]) -> Move:
    shapes = [(a.shape, a.dtype) for a in leaves]

    def as_bytes(a: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(a, jnp.uint8).reshape(-1) if a.dtype.itemsize > 1 else a.reshape(-1)

    @jax.jit
    def pack(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate([as_bytes(a) for a in arrays])

    @jax.jit
    def unpack(packed: jax.Array) -> tuple[jax.Array, ...]:
        out, start = [], 0
        for shape, dtype in shapes:
            size = math.prod(shape) * dtype.itemsize
            flat = packed[start : start + size]
            tail = (dtype.itemsize,) if dtype.itemsize > 1 else ()
            out.append(jax.lax.bitcast_convert_type(flat.reshape(*shape, *tail), dtype))
            start += size
        return tuple(out)

    to_host, to_device = host_copies(leaves[0].sharding, fallback=False)

    def move(arrays: Sequence[jax.Array]) -> tuple[Any, Callable[[], Sequence[jax.Array]]]:
        host = to_host([pack(*arrays)])
        return host, lambda: unpack(*to_device(host))

    return move


def round_trip(move: Move, leaves: Sequence[jax.Array]) -> tuple[float, float]:
    """Host seconds of both calls, and seconds until everything is back."""
    jax.block_until_ready(leaves)
    start = time.perf_counter()
    host, back = move(leaves)
    out_s = time.perf_counter() - start
    jax.block_until_ready(host)
    again = time.perf_counter()
    result = back()
    back_s = time.perf_counter() - again
    jax.block_until_ready(result)
    return out_s + back_s, time.perf_counter() - start


if __name__ == "__main__":
    main()
