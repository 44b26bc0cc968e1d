"""Cutting the backward pass: gradients, arithmetic, bytes, and what may be saved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_stages as toy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compile import build_all
from jaxpipe.stage.flops import jaxpr_flops
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.layer import Layer

Cut = list[list[Layer]]


def plain() -> Cut:
    return [[toy.embedding(), toy.mlp("a")], [toy.mlp("b"), toy.mlp("c")], [toy.head(), toy.loss()]]


def transformer() -> Cut:
    return [
        [toy.embedding(), toy.attention("a0"), toy.mlp("m0")],
        [toy.attention("a1"), toy.mlp("m1")],
        [toy.attention("a2"), toy.mlp("m2"), toy.head(), toy.loss()],
    ]


CUTS = {
    "mlp": plain,
    "transformer": transformer,
    "one stage": lambda: [sum(plain(), [])],
    "tied in one stage": lambda: [[toy.embedding(), toy.mlp("a"), toy.head(tied_to="embed"), toy.loss()]],
    "tied across stages": lambda: [[toy.embedding(), toy.mlp("a")], [toy.mlp("b"), toy.head(tied_to="embed"), toy.loss()]],
    "embedding alone": lambda: [[toy.embedding()], [toy.mlp("a"), toy.head()], [toy.loss()]],
    "scan": lambda: [[toy.embedding(), toy.scanned("s")], [toy.scanned("t"), toy.head(), toy.loss()]],
    "dropout": lambda: [[toy.embedding(), toy.dropout_mlp("d")], [toy.dropout_mlp("e"), toy.head(), toy.loss()]],
    "carries": lambda: [
        [toy.embedding(), toy.with_carry(), toy.carry_step("s0")],
        [toy.carry_step("s1")],
        [toy.carry_step("s2"), toy.end_carry(), toy.head(), toy.loss()],
    ],
    "checkpoint in a layer": lambda: [[toy.embedding(), toy.checkpointed("a")], [toy.checkpointed("b"), toy.head(), toy.loss()]],
}


def build(cut: Cut, dtype: Any = None, dp: int = 1, **kwargs: Any) -> tuple[tuple[StageFunctions, ...], dict[str, Any]]:
    params = toy.init_params(list(itertools.chain(*cut)), dtype)
    meshes = pipeline_submeshes(len(cut), dp=dp)
    return build_all(cut, params, toy.batch_avals(), meshes, **kwargs), params


@pytest.mark.parametrize("name", CUTS)
def test_gradients_equal_value_and_grad(name: str, x64: None) -> None:
    cut = CUTS[name]()
    functions, params = build(cut, jnp.float64)
    batches = [toy.make_batch(i) for i in range(2)]
    layers = list(itertools.chain(*cut))
    gradient = jax.jit(jax.value_and_grad(lambda p, b: toy.reference(layers, p, b), has_aux=True))
    want_loss, want = 0.0, None
    for batch in batches:
        (loss, _), grads = gradient(params, batch)
        want_loss += loss
        want = grads if want is None else jax.tree.map(jnp.add, want, grads)
    for fused in (False, True):
        runner = toy.Runner(functions, cut, params)
        loss = sum(runner.microbatch(b, fused=fused)[0] for b in batches)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
        toy.assert_trees_close(runner.gradients(), want, rtol=1e-10, atol=1e-12)
