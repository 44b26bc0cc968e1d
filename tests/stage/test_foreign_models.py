"""Foreign Flax models through pipelines: gradients are those of the unsplit model, with dropout, whatever the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.reference import apply_model, init_params
from tests.support import foreign_models

MICROBATCHES = 3
KEY = jax.random.key(11)


@cache
def unsplit(name: str) -> tuple[Model, Mapping[str, Any], Mapping[str, np.ndarray], float, Any]:
    """Return a model, parameters, a batch, the mean loss and its gradients by ``jax.grad``."""
    model = foreign_models.MODELS[name]()
    params = init_params(model, 0)
    batch = foreign_models.random_batch(model, MICROBATCHES)
    grad = jax.jit(jax.value_and_grad(lambda *a: apply_model(model, *a), has_aux=True))
    total, weight, grads = 0.0, 0.0, jax.tree.map(np.zeros_like, params)
    for i in range(MICROBATCHES):
        (loss, w), g = grad(params, {n: v[i] for n, v in batch.items()}, jax.random.fold_in(KEY, i))
        total, weight, grads = total + float(loss), weight + float(w), jax.tree.map(np.add, grads, g)
    return model, params, batch, total / weight, jax.tree.map(lambda g: g / weight, grads)


def check(name: str, pipe: Pipeline) -> None:
    _, params, batch, expected, expected_grads = unsplit(name)
    loss, grads = pipe.loss_and_grads(pipe.place(params), batch, KEY)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        scale = np.abs(b).max()
        assert scale > 0 and np.abs(a - b).max() <= 1e-6 * scale, jax.tree_util.keystr(path)


ALWAYS = ("t5",)


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.soak) for name in foreign_models.MODELS],
)
def test_gradients_under_1f1b_and_zb_1p(name: str) -> None:
    model = unsplit(name)[0]
    pipe = Pipeline.build(model, generate("1f1b", 2, MICROBATCHES), microbatch_size=foreign_models.B)
    check(name, pipe)
    check(name, pipe.with_schedule(generate("zb-1p", 2, MICROBATCHES)))


ALWAYS_ON_FOUR_STAGES = ("unet",)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS_ON_FOUR_STAGES else pytest.param(name, marks=pytest.mark.soak)
        for name in foreign_models.MODELS
    ],
)
def test_gradients_under_v_zb(name: str) -> None:
    check(name, Pipeline.build(unsplit(name)[0], generate("v-zb", 2, MICROBATCHES), microbatch_size=foreign_models.B))
