"""Models whose layers form a graph: joins, forks, skip edges, several sources and losses, frozen layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import StageError
from jaxpipe.stage.model.layer import Layer, LayerContext, Model
from jaxpipe.stage.model.reference import apply_model, init_params, metrics_of, model_output

B = 2


def _init(*shape: int) -> Any:
    return lambda key: {"w": 0.5 * jax.random.normal(key, shape)}


def source(name: str, read: str, width: int, out: int, **more: Any) -> Layer:
    """Begins a branch with a batch array ``[B, width]``."""
    return Layer(name, _init(width, out), lambda p, x, c: jnp.tanh(c.data[read] @ p["w"]), (read,), takes=(), **more)


def dense(name: str, width: int, out: int, **more: Any) -> Layer:
    """Of the sum of what it takes, or of the one thing."""

    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        return jnp.tanh((sum(x) if isinstance(x, tuple) else x) @ p["w"])

    return Layer(name, _init(width, out), apply, **more)


def squares(name: str, weight: str, **more: Any) -> Layer:
    """Σ weight · x², and Σ weight."""

    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        each = jnp.square(x if not isinstance(x, tuple) else jnp.concatenate(x, -1)).sum(-1)
        return (each * c.data[weight]).sum(), c.data[weight].sum()

    return Layer(name, lambda key: {}, apply, (weight,), **more)


def _spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {"a": (size, 3), "b": (size, 4), "u": (size,), "v": (size,)}
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def model_of(*layers: Layer) -> Model:
    return Model("graph", layers, _spec, 1, 1)


def batch_of(lead: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        n: rng.uniform(0.2, 1.0, (*lead, *a.shape)).astype(np.float32 if n in "uv" else np.float64)
        for n, a in _spec(B).items()
    }


TWO_TOWERS = (
    source("left", "a", 3, 4),
    dense("left_1", 4, 5),
    source("right", "b", 4, 5),
    dense("both", 5, 6, takes=("left_1", "right")),
    dense("skip", 6, 4),
    squares("aux", "u", takes=("left",)),
    squares("loss", "v", takes=("skip", "both")),
)


def test_the_unsplit_model_follows_takes() -> None:
    model = model_of(*TWO_TOWERS)
    params, batch = init_params(model, 0), batch_of(())
    assert model.losses == (5, 6)
    w = {name: p.get("w") for name, p in params.items()}
    left = jnp.tanh(batch["a"] @ w["left"])
    both = jnp.tanh((jnp.tanh(left @ w["left_1"]) + jnp.tanh(batch["b"] @ w["right"])) @ w["both"])
    skip = jnp.tanh(both @ w["skip"])
    out = model_output(model, params, {n: batch[n] for n in "ab"})
    np.testing.assert_allclose(out[0], skip, rtol=1e-6)
    u, v = batch["u"], batch["v"]
    aux, main = (left**2).sum(-1) @ u, ((skip**2).sum(-1) + (both**2).sum(-1)) @ v
    loss_sum, weight = apply_model(model, params, batch)
    np.testing.assert_allclose(loss_sum / weight, aux / u.sum() + main / v.sum(), rtol=1e-5)
    found = metrics_of(model, params, batch)
    assert list(found) == ["loss", "aux"]
    np.testing.assert_allclose(found["aux"][0] / found["aux"][1], aux / u.sum(), rtol=1e-5)


def test_a_chain_says_nothing_of_what_it_takes() -> None:
    chain = (source("a", "a", 3, 4), dense("b", 4, 4), squares("loss", "u"))
    named = (chain[0], replace(chain[1], takes=("a",)), replace(chain[2], takes=("b",)))
    params, batch = init_params(model_of(*chain), 0), batch_of(())
    assert apply_model(model_of(*chain), params, batch) == apply_model(model_of(*named), params, batch)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (dense("x", 4, 4, takes=("lefft",)), "layer x takes 'lefft'; layers before it are left"),
        (dense("x", 4, 4, takes=("x",)), "layer x takes its own result"),
        (dense("x", 4, 4, takes=("loss",)), "layer x takes 'loss', which comes after it"),
        (dense("x", 4, 4, takes="left"), r"layer x takes 'left'; want a tuple of names: \('left',\)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_takes_are_one_line(layer: Layer, told: str) -> None:
    with pytest.raises(StageError, match=told) as raised:
        model_of(source("left", "a", 3, 4), layer, squares("loss", "u"))
    assert "\n" not in str(raised.value)


def test_a_layer_that_nobody_takes_must_be_a_loss() -> None:
    model = model_of(source("left", "a", 3, 4), source("idle", "b", 4, 4), squares("loss", "u", takes=("left",)))
    with pytest.raises(StageError, match="layer 'idle', which no layer takes, returns a ArrayImpl; want"):
        apply_model(model, init_params(model, 0), batch_of(()))
