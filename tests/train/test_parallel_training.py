"""Pipeline × tensor × data parallelism against one device: gradients, and whole steps with clipping, ZeRO-1 and bfloat16."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.train.state import TrainState
from jaxpipe.train.step import TrainStep
from tests.support.parallel_cases import (
    FACTORINGS,
    Case,
    assert_close,
    batches,
    on_one_device,
    optimizer,
    params_for,
    pipeline,
    steps_on_one_device,
)

ACTIVE, INACTIVE = 0.05, 1e9
"""Bounds on the norm that clip every step, and none."""

DEFAULT = [
    Case("gpt-tied", 2, 2, 2, "stp", sequence=True, zero1=True),
]


def _grid() -> list[Case]:
    """Return every factoring × model × family, with and without sequence parallelism and ZeRO-1 in turn; tied models and fused
    residuals on every third, with each family in turn."""
    families = ("1f1b", "v-zb", "stp")
    cases: list[Case] = []
    for n, ((pp, tp, dp), name, family) in enumerate(itertools.product(FACTORINGS, ("gpt", "llama"), families)):
        turn = (n + n // len(families)) % 3
        tied = name + "-tied" * (turn == 0)
        fused = tp > 1 and turn == 1
        cases += [
            Case(tied, pp, tp, dp, family, sequence, zero1=n % 2 == 0, fused=fused) for sequence in {False, tp > 1}
        ]
    return cases


GRID = [*DEFAULT, *(pytest.param(c, marks=pytest.mark.soak, id=str(c)) for c in _grid() if c not in DEFAULT)]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Cases share nothing, and the whole grid's compiled programs would fill the memory."""
    yield
    pipeline.cache_clear()
    gc.collect()


def _step(case: Case, clip_norm: float = ACTIVE) -> TrainStep:
    return TrainStep(pipeline(case), optimizer(), clip_norm=clip_norm, zero1=case.zero1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", GRID, ids=str)
def test_gradients_and_steps_equal_one_device(case: Case) -> None:
    data, params = batches(2), params_for(case)
    pipe = pipeline(case)
    loss, grads = pipe.loss_and_grads(pipe.place(params), data[0])
    expected_loss, expected_grads = on_one_device(case, params, data[0])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    assert_close(grads, expected_grads, rtol=1e-9, atol=1e-12)

    expected, expected_records = steps_on_one_device(case, ACTIVE, data)
    step = _step(case)
    state, loss_and_norm = step.init(params), []
    for batch in data:
        state, metrics = step(state, batch)
        loss_and_norm.append((float(metrics.loss), float(metrics.grad_norm)))
        assert float(metrics.weight) == batch["weights"].sum()
    np.testing.assert_allclose(loss_and_norm, expected_records, rtol=1e-10)
    assert all(norm > ACTIVE for _, norm in loss_and_norm), "clipping was to be tested"
    assert_close(step.by_layer(state)[0], expected, rtol=1e-7, atol=1e-10)
    _assert_replicas_agree(state)


def _assert_replicas_agree(state: TrainState) -> None:
    """Devices that hold the same part of a parameter hold the same bits."""
    for buffers in state.compute.values():
        for buffer in buffers:
            parts: dict[str, np.ndarray] = {}
            for shard in buffer.addressable_shards:
                first = parts.setdefault(str(shard.index), np.asarray(shard.data))
                np.testing.assert_array_equal(np.asarray(shard.data), first)


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 1, 4, 2, "1f1b", fused=True, dtype="float32"),
        *(
            pytest.param(Case(name, pp, tp, dp, "v-zb", tp > 1, True, dtype="float32"), marks=pytest.mark.soak)
            for name in ("gpt", "llama-tied")
            for pp, tp, dp in FACTORINGS
        ),
    ],
    ids=str,
)
def test_float32_is_close_to_one_device(case: Case) -> None:
    (batch,), params = batches(1), params_for(case)
    pipe = pipeline(case)
    loss, grads = pipe.loss_and_grads(pipe.place(params), batch)
    expected_loss, expected_grads = on_one_device(case, params, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(
        grads,
        expected_grads,
        rtol=1e-5,
        atol=1e-5 * max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected_grads)),
    )
