"""The table of primitives: complete where it must be, careful where it does not know."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from jaxpipe._jax_compat import JaxprEqn
from jaxpipe.stage.jaxprs import PRIMITIVES, EqnKind, has_body, is_cheap, is_product, jaxpr_flops, kind, row, row_of
from jaxpipe.stage.weave.units import is_heavy

NO_EXCHANGE = {"axis_index", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p"}
"""Primitives beside the collectives in JAX's source that move nothing: an index, and casts of types."""


def equation(function: Any, *args: Any) -> JaxprEqn:
    """Return the last equation of a function."""
    eqn: JaxprEqn = jax.make_jaxpr(function)(*args).jaxpr.eqns[-1]
    return eqn


def unknown() -> JaxprEqn:
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    return equation(mystery.bind, jnp.ones(3))


def primitives_of(module: str) -> set[str]:
    return {p.name for p in vars(sys.modules[module]).values() if isinstance(p, Primitive)}


def test_every_collective_of_jax_is_an_exchange() -> None:
    names = primitives_of(jax.lax.psum.__module__) - NO_EXCHANGE
    assert {"psum", "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all", "ppermute", "pmax"} <= names
    missing = {name for name in names if row_of(name).kind is not EqnKind.EXCHANGE}
    assert not missing, "new collectives: give them rows in jaxpipe/stage/jaxprs.py"
    assert all(row_of(name).kind is not EqnKind.CUSTOM for name in NO_EXCHANGE)


def test_every_elementwise_primitive_of_jax_is_known() -> None:
    """All primitives in ``jax.lax`` that work element by element, reduce, or move are known."""
    names = {p.name for n, p in vars(jax.lax).items() if n.endswith("_p") and isinstance(p, Primitive)}
    special = {
        "custom_linear_solve",
        "igamma",
        "igammac",
        "igamma_grad_a",
        "polygamma",
        "zeta",
        "dce_sink",
        "eval_jaxpr",
    }
    special |= {
        "regularized_incomplete_beta",
        "random_gamma_grad",
        "create_token",
        "after_all",
        "composite",
        "to_edtype",
    }
    special |= {"from_edtype", "device_put", "tie", "stage"}
    assert not {n for n in names if n not in PRIMITIVES and row_of(n).kind is EqnKind.CUSTOM} - special


def test_an_unknown_primitive_is_not_cheap() -> None:
    eqn = unknown()
    assert kind(eqn) is EqnKind.CUSTOM
    assert not is_cheap(eqn)
    assert not row(eqn).view
    assert not is_product(eqn)
    assert is_heavy(eqn)


@pytest.mark.parametrize("name", ["scaled_matmul_wrapper", "ragged_dot_general", "conv_general_dilated", "dot_general"])
def test_products_are_products_everywhere(name: str) -> None:
    assert row_of(name).kind is EqnKind.PRODUCT


@pytest.mark.parametrize("name", ["pmax", "all_gather_invariant", "cummax", "gather", "scatter-mul", "pure_callback"])
def test_what_only_some_tables_knew_is_not_cheap(name: str) -> None:
    cheap = {
        EqnKind.ELEMENTWISE,
        EqnKind.REDUCTION,
        EqnKind.CAST,
        EqnKind.MOVE,
        EqnKind.WINDOW,
        EqnKind.RESHAPE,
        EqnKind.MAKE,
    }
    assert row_of(name).kind not in cheap


def test_a_loop_costs_what_its_body_costs() -> None:
    def loop(product: bool) -> JaxprEqn:
        return equation(lambda x: jax.lax.fori_loop(0, 3, lambda _, v: v @ v if product else v + 1, x), jnp.eye(2))

    assert has_body(loop(False))
    assert not is_cheap(loop(False))
    assert is_heavy(loop(True))
    assert not is_heavy(loop(False))


def test_products_in_groups_count_once_a_row() -> None:
    """Rows m, groups g, from k to n: 2 mkn each way, whatever g."""
    m, k, n, g = 6, 4, 5, 3
    sizes = jnp.array([1, 2, 3])

    def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, weights, sizes)

    rows, weights = jnp.ones((m, k)), jnp.ones((g, k, n))
    assert jaxpr_flops(jax.make_jaxpr(product)(rows, weights)) == 2 * m * k * n
    both = jax.make_jaxpr(lambda r, w: jax.vjp(product, r, w)[1](jnp.ones((m, n))))(rows, weights)
    assert jaxpr_flops(both) == 3 * 2 * m * k * n
