"""Recompute policies: the same gradients, fewer bytes, and nothing expensive done twice that need not be."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_stages as toy

from jaxpipe.errors import StageError
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compile import build_all
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.recompute import POLICIES

CUT = [
    [toy.embedding(), toy.attention("a"), toy.dropout_mlp("d")],
    [toy.attention("b"), toy.mlp("m"), toy.head(), toy.loss()],
]
MIDDLE = [[toy.embedding()], [toy.attention("a"), toy.mlp("m")], [toy.loss()]]


def build(cut: Any, recompute: str, dtype: Any = jnp.float32) -> tuple[tuple[StageFunctions, ...], Any]:
    params = toy.init_params(list(itertools.chain(*cut)), dtype)
    return build_all(cut, params, toy.batch_avals(), pipeline_submeshes(1) * len(cut), recompute), params


def saved_shapes(f: StageFunctions) -> list[tuple[int, ...]]:
    forward = f.functions["F"]
    return [a.shape for p, a in zip(forward.outputs, forward.avals_out, strict=True) if p.kind == "res"]


@pytest.fixture(scope="module")
def middle() -> dict[str, StageFunctions]:
    return {name: build(MIDDLE, name)[0][1] for name in POLICIES}


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_those_of_the_uncut_model(name: str, x64: None) -> None:
    functions, params = build(CUT, name, jnp.float64)
    layers = list(itertools.chain(*CUT))
    batch = toy.make_batch()
    want_loss, want = jax.value_and_grad(lambda p: toy.reference(layers, p, batch)[0])(params)
    for fused in (False, True):
        runner = toy.Runner(functions, CUT, params, compiled=False)
        np.testing.assert_allclose(runner.microbatch(batch, fused=fused)[0], want_loss, rtol=1e-12)
        toy.assert_trees_close(runner.gradients(), want, rtol=1e-10, atol=1e-12)


def test_each_policy_saves_less_than_none(middle: dict[str, StageFunctions]) -> None:
    saved = {name: f.residual_bytes for name, f in middle.items()}
    assert saved["full"] < saved["dots"] <= saved["cheap"] < saved["attention"] < saved["none"]


def test_full_saves_inputs_of_layers_only(middle: dict[str, StageFunctions]) -> None:
    assert saved_shapes(middle["full"]) == [(toy.B, toy.T, toy.D)]
    assert middle["full"].residual_bytes == 2 * 4 * toy.B * toy.T * toy.D


def test_products_run_twice_only_where_the_policy_says(middle: dict[str, StageFunctions]) -> None:
    none = middle["none"].flops
    scores = 2 * toy.B * toy.H * toy.T * toy.T * (toy.D // toy.H)
    for name in ("cheap", "dots"):
        assert middle[name].flops == none
    assert middle["attention"].flops == {**none, "B": none["B"] + scores, "BW": none["BW"] + scores}
    again = middle["full"].flops["BW"] - none["BW"]
    last_products = 2 * 2 * toy.B * toy.T * 4 * toy.D * toy.D - 2 * toy.B * toy.T * 4 * toy.D * toy.D
    projection = 2 * toy.B * toy.T * toy.D * toy.D
    assert again == none["F"] - last_products - projection, "results nothing reads are not recomputed"
    for name, f in middle.items():
        assert f.flops["F"] == none["F"], name
        assert f.flops["BW"] == f.flops["B"] + f.flops["W"], name


def test_attention_saves_nothing_of_the_size_of_scores(middle: dict[str, StageFunctions]) -> None:
    scores = (toy.B, toy.H, toy.T, toy.T)
    assert scores in saved_shapes(middle["none"])
    assert scores not in saved_shapes(middle["attention"])
    assert (toy.B, toy.T, 4 * toy.D) in saved_shapes(middle["attention"]), "the rest is saved as ever"


def test_cheap_recomputes_dropout_from_the_key() -> None:
    functions, _ = build([[toy.embedding()], [toy.dropout_mlp("d")], [toy.head(), toy.loss()]], "cheap")
    assert bool not in {a.dtype for a in functions[1].functions["F"].avals_out}
    assert "key" in {p.kind for p in functions[1].functions["B"].inputs}
    functions, _ = build([[toy.embedding()], [toy.dropout_mlp("d")], [toy.head(), toy.loss()]], "none")
    assert np.dtype(bool) in {a.dtype for a in functions[1].functions["F"].avals_out}
    assert "key" not in {p.kind for p in functions[1].functions["B"].inputs}


def test_checkpoint_inside_a_layer_is_honoured() -> None:
    cut = [[toy.embedding()], [toy.checkpointed("a")], [toy.head(), toy.loss()]]
    f = build(cut, "none")[0][1]
    assert not saved_shapes(f), "the checkpointed layer saves its input, which is x"
    up = 2 * toy.B * toy.T * toy.D * 4 * toy.D
    assert f.flops["B"] == f.flops["F"] + up, "the first product again; the second's result is not read"
    assert f.flops["W"] == f.flops["F"]


def test_policies_may_differ_between_stages() -> None:
    params = toy.init_params(list(itertools.chain(*MIDDLE)))
    meshes = pipeline_submeshes(1) * 3
    functions = build_all(MIDDLE, params, toy.batch_avals(), meshes, ["none", "full", "none"])
    assert len(saved_shapes(functions[1])) == 1


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(
        StageError, match="'some' does not exist; choose one of none, cheap, dots, attention, mlp, full, fused, flash"
    ):
        build(MIDDLE, "some")
