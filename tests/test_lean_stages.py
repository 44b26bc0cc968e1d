"""What the compiled functions of a stage need not do: copy operands of weight products."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_stages as toy

from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage import inline
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.functions import StageFunctions

CUT = [[toy.embedding()], [toy.mlp("a"), toy.mlp("b"), toy.mlp("c")], [toy.head(), toy.loss()]]


def middle() -> StageFunctions:
    params = toy.init_params(list(itertools.chain(*CUT)))
    return build_all(CUT, params, toy.batch_avals(), pipeline_submeshes(1) * 3)[1]


def arrays_like(avals: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jax.device_put(rng.standard_normal(a.shape).astype(a.dtype), a.sharding) for a in avals]


def test_weight_gradients_are_those_of_products_over_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, bit for bit: flattening batch and time changes no sum."""
    flat = middle()
    monkeypatch.setattr(inline, "_of_matrices", lambda eqn: None)
    plain = middle()
    for op in ("W", "BW"):
        assert "dimension_numbers=(([0, 1], [0, 1]), ([], []))" in str(plain.functions[op].jaxpr)
        assert "dimension_numbers=(([0, 1], [0, 1]), ([], []))" not in str(flat.functions[op].jaxpr)
        results = [f.functions[op].call(*arrays_like(f.functions[op].avals_in)) for f in (flat, plain)]
        jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("op", ["W", "BW"])
def test_no_operand_of_a_weight_gradient_is_copied(op: str) -> None:
    """XLA's CPU backend would copy operands transposed, each with all that leads to it fused into the copy."""
    function = middle().functions[op]
    text = function.jitted.lower(*function.avals_in).compile().as_text()
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|transpose)\(", text)
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in copied]
    assert max(sizes, default=0) < toy.B * toy.T * toy.D


def test_products_in_other_axes_stay_as_they_are() -> None:
    def products(a: Any, b: Any) -> Any:
        return (
            jnp.einsum("btd,bte->de", a, b),
            jnp.einsum("btd,bte->bde", a, b),
            jnp.einsum("btd,bse->tdse", a, b),
            jnp.einsum("btd,etd->be", a, b),
            jnp.einsum("btd,bte->", a, b),
        )

    avals = [jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)] * 2
    closed = jax.make_jaxpr(products)(*avals)
    flat = inline.flatten(closed.jaxpr, closed.consts).close()
    operands = [jnp.arange(24.0).reshape(2, 3, 4), jnp.ones((2, 3, 4))]
    for got, want in zip(jax.core.eval_jaxpr(flat.jaxpr, flat.consts, *operands), products(*operands), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    dims = [eqn.params["dimension_numbers"] for eqn in flat.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert dims.count((((0,), (0,)), ((), ()))) >= 2, "over batch and time, and over batch alone"
    assert any(batch for _, (batch, _) in dims)
