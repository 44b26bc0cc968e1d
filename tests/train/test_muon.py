"""Muon: which parameters are matrices, what it makes of them, and that dividing them over devices changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.layer import Matrix, Model
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.step import TrainStep
from jaxpipe.train.update import optimizer as room
from jaxpipe.train.update.optimizer import Muon, described, matrices_of, optimizer_of
from tests.support import optimizer_cases as small
from tests.support.parallel_cases import Case, assert_close, batches, model_for, on_one_device, params_for, pipeline

pytestmark = pytest.mark.usefixtures("x64")


orthogonal = jax.jit(room.orthogonal, static_argnums=0)


def muon(model: Model) -> Muon:
    optimizer = optimizer_of(TrainConfig().override(["optimizer.name=muon", "optimizer.warmup_steps=2"]), model)
    assert isinstance(optimizer, Muon)
    return optimizer


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def test_a_matrix_is_made_orthogonal_as_optax_does_it() -> None:
    x = _normal(24, 8)
    tx = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)
    expected, _ = jax.jit(tx.update)(x, tx.init(x))
    got = orthogonal(Matrix(), x) / (0.2 * 24**0.5)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    values = jnp.linalg.svd(got)[1]
    assert min(values) > 0.6 and max(values) < 1.3


def test_leaves_of_more_axes_are_folded_to_their_matrices() -> None:
    llama = matrices_of(model_for(Case("llama", 2, 1, 1)))  # 8 heads of 2, 2 key/value heads
    qkv = _normal(16, 2, 6, 2)
    got = orthogonal(llama["block_00", ("qkv", "kernel")], qkv)
    for part in (slice(0, 4), slice(4, 5), slice(5, 6)):  # q, k, v
        expected = orthogonal(Matrix(), qkv[:, :, part].reshape(16, -1))
        np.testing.assert_allclose(got[:, :, part].reshape(16, -1), expected, atol=1e-6)
    gpt = matrices_of(model_for(Case("gpt", 2, 1, 1)))
    qkv, out = _normal(16, 3, 8, 2), _normal(8, 2, 16)
    got = orthogonal(gpt["block_00", ("qkv", "kernel")], qkv)
    np.testing.assert_allclose(got[:, 1].reshape(16, 16), orthogonal(Matrix(), qkv[:, 1].reshape(16, 16)), atol=1e-6)
    got = orthogonal(gpt["block_00", ("out", "kernel")], out)
    np.testing.assert_allclose(got.reshape(16, 16), orthogonal(Matrix(), out.reshape(16, 16)), atol=1e-6)


def test_a_run_says_which_parameters_get_which() -> None:
    model = model_for(Case("llama", 2, 1, 1))
    assert described(model, matrices_of(model)) == (
        "Muon updates block_*/down/kernel, block_*/gate_up/kernel, block_*/out/kernel, block_*/qkv/kernel; AdamW updates "
        "embed/tokens/embedding, block_*/qkv/bias, head/kernel, all vectors"
    )


def test_a_model_that_says_nothing_has_the_matrices_between_embedding_and_head() -> None:
    matrices = matrices_of(small.model())
    assert {"/".join((name, *path)) for name, path in matrices} == {"wide/up", "narrow/mlp/up", "narrow/mlp/down"}


@pytest.mark.parametrize(
    ("matrices", "wrong"),
    [
        ({("down",): Matrix()}, "is none of its parameters"),
        ({("up",): Matrix((0,), (2,))}, "it has the shape"),
        ({("up",): Matrix((0,), (0,))}, "it has the shape"),
        ({("up",): Matrix(split=(1, (3, 4)))}, "it has the shape"),
        (None, "no parameter of model"),
    ],
)
def test_what_does_not_fit_is_refused(matrices: Any, wrong: str) -> None:
    model = small.model()
    layers = [replace(x, matrices=matrices if x.name == "wide" and matrices else {}) for x in model.layers]
    with pytest.raises(ConfigError, match=wrong):
        matrices_of(replace(model, layers=tuple(layers)))


@pytest.mark.parametrize(
    ("dp", "tp", "zero1"),
    [
        (2, 2, True),
        *(pytest.param(*sizes, marks=pytest.mark.soak) for sizes in ((1, 2, False), (2, 1, True), (2, 2, False))),
    ],
)
def test_pieces_take_the_steps_of_one_device(dp: int, tp: int, zero1: bool) -> None:
    tx = muon(small.model())
    step = TrainStep(small.pipeline(dp, tp), tx, zero1=zero1)
    got, state, _ = small.over_ranks(step)
    assert_close(got, small.on_one_device(tx), rtol=1e-8, atol=1e-11)
    assert_close(step.by_layer(step.init(got, state, step=3))[1], state, rtol=0)


@pytest.fixture
def _forget() -> Iterator[None]:
    yield
    pipeline.cache_clear()


@pytest.mark.soak
@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize(
    "case",
    [
        Case("llama-tied", 2, 2, 2, zero1=True),
        Case("llama-tied", 2, 2, 2),
        Case("gpt", 2, 1, 4, zero1=True),
        Case("gpt-tied", 1, 8, 1, sequence=True),
        Case("llama", 2, 4, 1),
    ],
    ids=str,
)
def test_blocks_in_pieces_take_the_steps_of_one_device(case: Case) -> None:
    tx, params, data = muon(model_for(case)), params_for(case), batches(2)
    step = TrainStep(pipeline(case), tx, zero1=case.zero1)
    state = step.init(params)
    for batch in data:
        state, _ = step(state, batch)
    got, _ = step.by_layer(state)

    expected = jax.tree.map(jnp.asarray, dict(params))
    tx_state = tx.init(expected)
    for batch in data:
        _, grads = on_one_device(case, expected, batch)
        updates, tx_state = jax.jit(tx.update)(grads, tx_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert_close(got, expected, rtol=1e-8, atol=1e-11)
