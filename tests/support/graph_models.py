"""Tiny models whose layers form graphs, by name for configs (``tests.support.graph_models:towers``), and data for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.stage.model.layer import Layer, LayerContext, Model

WIDTH = 4


def _init(rows: int) -> Any:
    return lambda key: {"w": 0.5 * jax.random.normal(key, (rows, WIDTH))}


def source(name: str, read: str, width: int, **options: Any) -> Layer:
    """Return a layer that begins a branch with a batch array ``[B, width]``."""
    return Layer(name, _init(width), lambda p, x, c: jnp.tanh(c.data[read] @ p["w"]), (read,), takes=(), **options)


def dense(name: str, drops: bool = True, **options: Any) -> Layer:
    """Return a dense layer of the sum of what it takes, or of the one thing, with dropout in training if ``drops``."""

    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        h = jnp.tanh((sum(x) if isinstance(x, tuple) else x) @ p["w"])
        return h if c.key is None else jnp.where(jax.random.bernoulli(c.key, 0.9, h.shape), h, 0.0)

    return Layer(name, _init(WIDTH), apply, uses_key=drops, **options)


def squares(name: str, weight: str, **options: Any) -> Layer:
    """Σ weight · (1 − x)², and Σ weight."""

    def apply(p: Any, x: Any, c: LayerContext) -> Any:
        each = jnp.square(1 - sum(x if isinstance(x, tuple) else (x,))).sum(-1)
        weights = c.data[weight].astype(each.dtype)
        return (each * weights).sum(), weights.sum()

    return Layer(name, lambda key: {}, apply, (weight,), **options)


def model_of(*layers: Layer) -> Model:
    shapes = {"a": (3,), "b": (5,), "u": (), "v": ()}
    return Model(
        "graph", layers, lambda n: {k: jax.ShapeDtypeStruct((n, *s), np.float32) for k, s in shapes.items()}, 256, 8
    )


def _tower(name: str, read: str, width: int, count: int, drops: bool) -> list[Layer]:
    return [source(f"{name}0", read, width), *(dense(f"{name}{i}", drops) for i in range(1, count))]


def towers(vocab_size: int = 0, seq_len: int = 0, drops: bool = True) -> Model:
    """Return two towers of 4 and 3 layers, joined in a loss."""
    both = [*_tower("a", "a", 3, 4, drops), *_tower("b", "b", 5, 3, drops)]
    return model_of(*both, squares("loss", "u", takes=("a3", "b2")))


def grouped(vocab_size: int = 0, seq_len: int = 0) -> Model:
    """Return two towers whose loss takes two microbatches at once, though rows do not count for each other."""
    model = towers(drops=False)
    return replace(model, layers=(*model.layers[:-1], replace(model.layers[-1], span=2)))


def ladder(vocab_size: int = 0, seq_len: int = 0, drops: bool = True) -> Model:
    """Return a chain of 6 with two skip edges, a frozen first part, a tie from the last to the fourth, and a loss in the
    middle."""
    a0, a1, a2, a3, a4, a5 = _tower("a", "a", 3, 6, drops)
    tied = replace(a5, takes=("a4", "a2"), init=lambda key: {}, tied={("w",): ("a3", ("w",))})
    aux = squares("aux", "v", takes=("a2",))
    frozen = (replace(a0, frozen=True), replace(a1, frozen=True))
    return model_of(*frozen, a2, aux, replace(a3, takes=("a2", "a0")), a4, tied, squares("main", "u"))


def two_losses(drops: bool = True) -> Model:
    """Return a chain of 6 with a loss in the middle and one at its end."""
    a0, a1, a2, a3, a4, a5 = _tower("a", "a", 3, 6, drops)
    aux = squares("aux", "v", takes=("a2",))
    return model_of(a0, a1, a2, aux, replace(a3, takes=("a2",)), a4, a5, squares("main", "u", takes=("a5",)))


def rows(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (3,), "b": (5,), "u": (), "v": ()}
    return {name: rng.uniform(0.2, 1, (n, *shape)).astype(np.float32) for name, shape in shapes.items()}


def data() -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """Train and held-out rows."""
    return rows(64), rows(16, 1)
