"""Every registered family in the real runtime: two steps bit-equal to the same functions run one after another.

Gradients and losses equal bitwise those of :func:`~tests.support.pipelines.run_sequentially`, which knows of a schedule only
the order in which each stage's W and BW add up, and (float64, 1e-10) with ``jax.value_and_grad`` of the uncut model. A
stage's replicas (bidirectional placements) are added in the order of the flows. The second step starts from the parameters
that the first one's gradients give. A family registered later is tested without a change here.

The model is a chain of one matrix product a layer: compiling dominates, and families of one placement share what is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import FAMILIES, CostProfile, Placement, Schedule, chain, generate
from jaxpipe.schedule.passes import separate_gradients
from jaxpipe.stage.model.layer import Layer, Model
from jaxpipe.stage.model.reference import apply_model, init_params
from tests.support.pipelines import assert_same_arrays, run_sequentially, some_schedule

pytestmark = pytest.mark.usefixtures("x64", "one_build")

SIZES = [(1, 2), (2, 5), (3, 3), (4, 8)]
"""(ranks, microbatches); two and three ranks in the soak."""
WIDTH, MICROBATCH, LEARNING_RATE = 3, 2, 0.1


def _cases() -> Iterator[object]:
    for name in FAMILIES:
        for p, m in SIZES:
            yield pytest.param(name, p, m, id=f"{name}-p{p}-m{m}", marks=[pytest.mark.soak] if p in (2, 3) else [])


@pytest.mark.parametrize(("name", "p", "m"), list(_cases()))
def test_family_runs_two_steps_bit_equal_to_sequential(name: str, p: int, m: int) -> None:
    _require_bit_equal(_generated(name, p, m))


@pytest.mark.parametrize("name", ["1f1b", "chimera", "hanayo"])
def test_separated_gradients_run_bit_equal_to_sequential(name: str) -> None:
    plain = _generated(name, 4, 8)
    costs = CostProfile.uniform(plain.num_stages, chunks=plain.num_chunks, f=1, b=1.1, w=0.8)
    schedule = separate_gradients(plain, costs)
    assert {"B", "W", "BW"} <= {a.op for rank in range(4) for a in schedule.actions(rank)}
    _require_bit_equal(schedule)


def _require_bit_equal(schedule: Schedule) -> None:
    """Compare two steps in the runtime with the same functions one after another."""
    m = schedule.num_microbatches
    pipe = _compiled(schedule.num_stages, _ranks(schedule.placement)).with_schedule(schedule)
    params = _parameters(schedule.num_stages)
    for step in range(2):
        batch = _batch(m, seed=step)
        placed = pipe.place(params)
        out = pipe.run(placed, {at: pipe.zeros(at) for at in pipe.own_instances}, batch)
        acc, losses = run_sequentially(pipe, schedule, placed, batch)
        assert_same_arrays(dict(out.acc), acc)
        assert_same_arrays(list(out.losses), losses)

        assert_same_arrays(_of_primaries(pipe, pipe.sum_replicas(out.acc)), _replicas_added(pipe, acc))

        loss, grads = pipe.loss_and_grads(placed, batch)
        expected_loss, expected = _unpipelined(schedule.num_stages, params, batch)
        np.testing.assert_allclose(np.asarray(loss), expected_loss, rtol=1e-10)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), _arrays(grads), expected)
        params = jax.tree.map(lambda x, g: x - LEARNING_RATE * g, _arrays(params), _arrays(grads))


def test_offloads_are_among_what_runs() -> None:
    offloading = {
        name for name in FAMILIES if any(a.op == "O" for rank in range(4) for a in _generated(name, 4, 8).actions(rank))
    }
    assert offloading >= {"po-h", "po-f"}


def _of_primaries(pipe: Pipeline, acc: Mapping[tuple[int, int], Any]) -> list[list[Any]]:
    return [list(acc[pipe.primary(stage)]) for stage in pipe.instances]


def _replicas_added(pipe: Pipeline, acc: Mapping[tuple[int, int], Any]) -> list[list[Any]]:
    """Return per stage the gradient of the first flow's replica, plus the second's, if it has one."""
    sums = []
    for stage, (first, *replicas) in pipe.instances.items():
        total = [np.asarray(a) for a in acc[(first, stage)]]
        for rank in replicas:
            total = [a + np.asarray(b) for a, b in zip(total, acc[(rank, stage)], strict=True)]
        sums.append(total)
    return sums


@cache
def _generated(name: str, p: int, m: int) -> Schedule:
    try:
        return generate(name, p, m)
    except ScheduleError as error:
        assert p < 4, f"{name} must run on 4 ranks: {error}"
        pytest.skip(str(error))


def _ranks(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Return per flow the rank of each stage: what the runtime compiles for."""
    return tuple(tuple(rank for (rank,) in flow) for flow in placement.flows)


@cache
def _compiled(num_stages: int, ranks: tuple[tuple[int, ...], ...]) -> Pipeline:
    """Return one layer a stage on these ranks, in any order."""
    flows = tuple(tuple((r,) for r in flow) for flow in ranks)
    placement = Placement("any", 1 + max(map(max, ranks)), flows, chain(num_stages))
    return Pipeline.build(
        _model(num_stages),
        some_schedule(placement, 2),
        microbatch_size=MICROBATCH,
        boundaries=[(s, s + 1) for s in range(num_stages - 1)] + [(num_stages - 1, num_stages + 1)],
        compute_dtype=jnp.float64,
    )


@cache
def _model(num_stages: int) -> Model:
    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (WIDTH, WIDTH))}

    def first(params: Any, x: Any, context: Any) -> Any:
        return jnp.tanh(context.data["x"] @ params["w"])

    def middle(params: Any, x: Any, context: Any) -> Any:
        return jnp.tanh(x @ params["w"])

    def loss(params: Any, x: Any, context: Any) -> Any:
        return jnp.sum((x - context.data["y"]) ** 2), jnp.full((), MICROBATCH, x.dtype)

    layers = (
        Layer("layer0", init, first, reads=("x",)),
        *(Layer(f"layer{k}", init, middle) for k in range(1, num_stages)),
        Layer("loss", lambda key: {}, loss, reads=("y",)),
    )
    spec = {k: jax.ShapeDtypeStruct((MICROBATCH, WIDTH), np.dtype("float64")) for k in "xy"}
    return Model("chain", layers, lambda n: spec, 1, WIDTH)


@cache
def _parameters(num_stages: int) -> Mapping[str, Any]:
    return jax.tree.map(np.asarray, init_params(_model(num_stages), 0))


def _batch(microbatches: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(microbatches, MICROBATCH, WIDTH)) for k in "xy"}


def _unpipelined(num_stages: int, params: Any, batch: Mapping[str, np.ndarray]) -> Any:
    full_batch = {name: array.reshape(-1, WIDTH) for name, array in batch.items()}
    return _arrays(_value_and_grad(num_stages)(params, full_batch))


@cache
def _value_and_grad(num_stages: int) -> Any:
    def mean_loss(params: Any, batch: Any) -> Any:
        loss_sum, _ = apply_model(_model(num_stages), params, batch, train=False)
        return loss_sum / len(batch["x"])

    return jax.jit(jax.value_and_grad(mean_loss))


def _arrays(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
