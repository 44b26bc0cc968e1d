"""Small pipelines for runtime tests, compiled once per test run, and a sequential reference that shares no code with lowering.

Sizes are tiny: compiling dominates. Every pipeline here is float64, so the caller must be under the ``x64`` fixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import Placement, Schedule, circular, op_spec
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.plan import plan_stages
from jaxpipe.stage.model.reference import apply_model, init_params
from models.gpt import GPT
from models.llama import Llama

VOCAB, SEQ, MICROBATCH = 17, 8, 2
MOST = 8
"""The most microbatches in a test."""
MODELS = ("gpt", "gpt-tied", "llama", "llama-tied")


@cache
def tiny_model(name: str, dropout: float = 0.0) -> Model:
    """Return a model of two blocks of width 16, so up to 5 stages; ``gpt@5`` has five blocks, so up to 8 stages."""
    name, _, blocks = name.partition("@")
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "d_model": 16, "num_layers": int(blocks or 2), "num_heads": 2, "seq_len": SEQ, "dtype": "float64",
        "tied": name.endswith("-tied"),
    }  # fmt: skip
    if name.startswith("gpt"):
        return GPT(**common, mlp_ratio=2, dropout=dropout)
    return Llama(**common, num_kv_heads=1, mlp_size=24, qkv_bias=True)


def some_schedule(placement: Placement, microbatches: int = 1) -> Schedule:
    """Return all forwards, then all backwards: the simplest valid schedule of any chain."""
    n = placement.num_stages
    actions = [("F", s, i) for i in range(microbatches) for s in range(n)]
    actions += [("BW", s, i) for i in range(microbatches) for s in reversed(range(n))]
    from jaxpipe.schedule import Action

    rows = tuple(
        tuple(Action(op, s, i) for op, s, i in actions if placement.ranks(s, i) == (rank,))
        for rank in range(placement.num_ranks)
    )
    return Schedule("plain", placement, microbatches, rows)


@cache
def compiled(
    name: str, placement: Placement, recompute: str | tuple[str, ...] = "none", dropout: float = 0.0
) -> Pipeline:
    """Return the stages of a tiny model on ``placement``; use :meth:`Pipeline.with_schedule` for another order."""
    model = tiny_model(name, dropout)
    plan = plan_stages(model, placement.num_stages)
    return Pipeline.build(
        model,
        some_schedule(placement),
        microbatch_size=MICROBATCH,
        boundaries=[(s.start, s.stop) for s in plan.stages],
        compute_dtype=jnp.float64,
        recompute=recompute,
    )


def pipeline_for(
    name: str, schedule: Schedule, recompute: str | tuple[str, ...] = "none", dropout: float = 0.0
) -> Pipeline:
    """Return a compiled pipeline that runs ``schedule``. Equal placements share their compiled stages."""
    placement = schedule.placement
    if placement.num_flows == 1 and placement.flows == circular(placement.num_ranks, placement.num_chunks).flows:
        placement = circular(placement.num_ranks, placement.num_chunks)
    return compiled(name, placement, recompute, dropout).with_schedule(schedule)


def random_batch(microbatches: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return tokens, targets and uneven weights ``[microbatches, MICROBATCH, SEQ]``."""
    rng = np.random.default_rng(seed)
    shape = (microbatches, MICROBATCH, SEQ)
    return {
        "tokens": rng.integers(0, VOCAB, shape).astype(np.int32),
        "targets": rng.integers(0, VOCAB, shape).astype(np.int32),
        "weights": (rng.random(shape) < 0.8).astype(np.float32),
    }


def sized(name: str, schedule: Schedule) -> str:
    """Return the model of that name with enough layers for the schedule's stages."""
    return name if schedule.num_stages <= 5 or "@" in name else f"{name}@5"


@cache
def parameters(name: str) -> Mapping[str, Any]:
    return jax.tree.map(np.asarray, init_params(tiny_model(name), 0))  # packed without compiling anything


def run_sequentially(
    pipe: Pipeline, schedule: Schedule, params: Mapping[Any, Any], batch: Mapping[str, np.ndarray], keys: Any = ()
) -> tuple[dict[tuple[int, int], list[Any]], list[tuple[Any, ...]]]:
    """Call the same compiled functions, one microbatch after another, without slots and programs.

    Only the accumulation order is the schedule's (floating-point sums depend on it): per stage, weights' gradients are added
    in the order of the W and BW of its row.
    """
    values: dict[tuple[Any, ...], Any] = {}
    losses: dict[int, dict[tuple[int, int], Any]] = {}
    acc = {at: pipe.zeros(at) for at in pipe.own_instances}

    def call(op: str, rank: int, s: int, i: int) -> None:
        f = pipe.functions[(rank, s)]
        mesh = pipe.submeshes[rank]
        home = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        inputs = []
        for port in f.functions[op].inputs:
            match port.kind:
                case "param":
                    inputs.append(params[(rank, s)][port.index])
                case "acc":
                    inputs.append(acc[(rank, s)][port.index])
                case "data":
                    inputs.append(jax.device_put(batch[f.data_names[port.index]][i], home))
                case "key":
                    inputs.append(jax.device_put(keys[i], home))
                case "x":
                    t, leaf = f.x_from[port.index]
                    inputs.append(jax.device_put(values[("y", t, i, leaf)], home))
                case "dy":
                    t, leaf = f.dy_from[port.index]
                    inputs.append(jax.device_put(values[("dx", t, i, leaf)], home))
                case kind:
                    inputs.append(values[(kind, s, i, port.index)])
        for port, out in zip(f.functions[op].outputs, f.functions[op].call(*inputs), strict=True):
            match port.kind:
                case "acc":
                    acc[(rank, s)][port.index] = out
                case "loss":
                    losses.setdefault(i, {})[(s, port.index)] = out
                case kind:
                    values[(kind, s, i, port.index)] = out

    stages = range(schedule.num_stages)
    for i in range(schedule.num_microbatches):
        for s in stages:
            call("F", schedule.placement.ranks(s, i)[0], s, i)
    later = []  # what adds to accumulators, in row order, once every cotangent is known
    for rank in range(schedule.num_ranks):
        later += [
            (rank, a)
            for a in schedule.actions(rank)
            if op_spec(a.op).lane == "compute" and a.op != "F" and not op_spec(a.op).is_sync
        ]
    # B first (it adds nothing), stage by stage from the last; W after, in row order. A BW does both, so the stages' rows
    # are followed as far as cotangents allow.
    finished = set()
    while len(finished) < len(later):
        progressed = False
        blocked: set[int] = set()
        for k, (rank, a) in enumerate(later):
            if k in finished:
                continue
            f = pipe.functions[(rank, a.stage)]
            dy = [f.dy_from[port.index] for port in f.functions[a.op].inputs if port.kind == "dy"]
            ready = all(("dx", t, a.microbatch, leaf) in values for t, leaf in dy)
            if a.op == "W":
                ready = any(later[j] == (rank, type(a)("B", a.stage, a.microbatch)) for j in finished)
            adds = a.op in ("W", "BW")
            if ready and not (adds and (rank, a.stage) in blocked):
                call(a.op, rank, a.stage, a.microbatch)
                finished.add(k)
                progressed = True
            elif adds:
                blocked.add((rank, a.stage))
        assert progressed, "the reference is stuck"
    return acc, [tuple(losses[i][k] for k in sorted(losses[i])) for i in sorted(losses)]


@cache
def _reference(name: str) -> Any:
    model = tiny_model(name)

    def loss(params: Any, batch: Any) -> Any:
        full_batch = {k: v.reshape(-1, *v.shape[2:]) for k, v in batch.items()}
        loss_sum, weight = apply_model(model, params, full_batch, train=False)
        return loss_sum / weight

    return jax.jit(jax.value_and_grad(loss))


def unpipelined(name: str, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
    """Return loss and gradients of the model without any pipeline: ``jax.value_and_grad``."""
    pad = MOST - len(batch["tokens"])  # microbatches of weight 0, so that one shape serves all
    padded = {k: np.concatenate([v, np.zeros((pad, *v.shape[1:]), v.dtype)]) for k, v in batch.items()}
    return _reference(name)(parameters(name), padded)


def assert_same_arrays(got: Any, expected: Any) -> None:
    """Assert that trees are equal bit for bit."""
    got_leaves, got_tree = jax.tree.flatten(got)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    assert got_tree == expected_tree
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
