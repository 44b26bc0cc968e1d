"""Muon for the matrices of a model, AdamW for the rest.

After Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): of each matrix the momentum (Nesterov's)
is brought near the orthogonal matrix next to it, by five steps of a quintic Newton-Schulz iteration. The scale is that of Liu
et al., "Muon is Scalable for LLM Training" (2025): ``0.2 · √max(rows, columns)``, with which an update is as large as AdamW's,
and one rate and one weight decay serve both. Differs from ``optax.contrib.muon``: parameters of more than two axes are folded
to the matrices that the model says they are (:class:`~jaxpipe.stage.model.layer.Matrix`), the momentum has no bias correction
(orthogonal matrices have no scale), and the rest gets AdamW, not NAdamW.

Where a device holds a piece of a parameter (tp, ZeRO-1), its momentum is a piece too; for the iteration the whole is gathered,
and every device of the rank makes the same steps: a matrix more of memory and of traffic, and no less time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.layer import Matrix, Model, Path, init_avals, taken_by
from jaxpipe.stage.model.params import Place, named_leaves

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS, _EPS, _RMS = 5, 1e-7, 0.2
_Function = Callable[[jax.Array], jax.Array]
Applied = Callable[[Place, _Function, jax.Array], jax.Array]
"""``function`` of the whole leaf at a place, of a device's piece of it: the piece of the result."""


@dataclass(frozen=True, slots=True)
class Muon:
    """An optax transformation of ``{layer: leaves}``. ``matrices``: as :func:`matrices_of` finds them; ``rest``: the
    transformation of all other leaves; ``applied``: how devices that hold pieces orthogonalise."""

    rate: optax.Schedule
    matrices: Mapping[Place, Matrix]
    rest: optax.GradientTransformation
    momentum: float
    weight_decay: float
    applied: Applied = lambda place, function, whole: function(whole)

    def init(self, params: Any) -> Any:
        return self._both.init(params)

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates_and_state: tuple[Any, Any] = self._both.update(grads, state, params)
        return updates_and_state

    def on_pieces(self, applied: Applied) -> Muon:
        """The same on a device that holds pieces of leaves: what :mod:`jaxpipe.train.update.pieces` need not check."""
        return replace(self, applied=applied)

    @property
    def _both(self) -> optax.GradientTransformation:
        muon = optax.chain(
            optax.trace(self.momentum, nesterov=True),
            optax.stateless(self._orthogonal),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(self.rate),
        )
        return optax.partition({"muon": muon, "adamw": self.rest}, self._labels)

    def _labels(self, params: Any) -> Any:
        labels = ["muon" if place in self.matrices else "adamw" for place, _ in _placed(params)]
        return jax.tree.unflatten(jax.tree.structure(params), labels)

    def _orthogonal(self, updates: Any, params: Any) -> Any:
        leaves = [self.applied(at, partial(orthogonal, self.matrices[at]), x) for at, x in _placed(updates)]
        return jax.tree.unflatten(jax.tree.structure(updates), leaves)


def orthogonal(matrix: Matrix, leaf: jax.Array) -> jax.Array:
    """The matrices of a leaf, each near the orthogonal one and scaled as the module says."""
    if matrix.split is None:
        return _folded(matrix, leaf)
    axis, sizes = matrix.split
    parts = jnp.split(leaf, np.cumsum(sizes)[:-1], axis)
    return jnp.concatenate([_folded(matrix, part) for part in parts], axis)


def _folded(matrix: Matrix, leaf: jax.Array) -> jax.Array:
    batch_axes = [k for k in range(leaf.ndim) if k not in (*matrix.rows, *matrix.columns)]
    order = (*batch_axes, *matrix.rows, *matrix.columns)
    rows, columns = (math.prod(leaf.shape[k] for k in axes) for axes in (matrix.rows, matrix.columns))
    moved = leaf.transpose(order)
    orthogonal_matrices = _newton_schulz(moved.reshape(-1, rows, columns)) * (_RMS * math.sqrt(max(rows, columns)))
    return orthogonal_matrices.reshape(moved.shape).transpose(np.argsort(order))


def _newton_schulz(x: jax.Array) -> jax.Array:
    """[n, rows, columns]: singular values brought to between 0.7 and 1.2."""
    if x.shape[1] > x.shape[2]:
        return _newton_schulz(x.mT).mT
    a, b, c = _COEFFICIENTS
    x = x / (jnp.sqrt(jnp.sum(x * x, (1, 2), keepdims=True)) + _EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def matrices_of(model: Model) -> dict[Place, Matrix]:
    """The parameters of ``model`` that are matrices: as its layers say, or, of a layer that says nothing, those of two axes,
    if it reads no batch array (embeddings do) and no loss takes from it (heads).

    Raises:
        ConfigError: what a layer says does not fit its parameters.
    """
    sources = taken_by(model.layers)
    ends = {*model.losses, *(k for loss in model.losses for k in sources[loss])}
    matrices: dict[Place, Matrix] = {}
    for number, layer in enumerate(model.layers):
        leaves = dict(named_leaves(init_avals(layer)))
        layer_matrices: Mapping[Path, Matrix] | None = layer.matrices
        if layer_matrices is None:
            inside = not layer.reads and number not in ends
            layer_matrices = {path: Matrix() for path, leaf in leaves.items() if inside and leaf.ndim == 2}
        for path, matrix in layer_matrices.items():
            if path not in leaves or not matrix.fits(leaves[path].shape):
                what = f"has the shape {list(leaves[path].shape)}" if path in leaves else "is none of its parameters"
                raise ConfigError(f"layer {layer.name} says that {'/'.join(path)} is {matrix}; it {what}")
            matrices[layer.name, path] = matrix
    if not matrices:
        raise ConfigError(
            f"optimizer.name=muon: no parameter of model {model.name} is a matrix; name some in Layer.matrices, or use adamw"
        )
    return matrices


def described(model: Model, matrices: Mapping[Place, Matrix]) -> str:
    """Which leaves Muon updates and which AdamW, in a line. Layers that differ by a number only are told once, vectors not."""
    paths_by_kind: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for layer in model.layers:
        name = re.sub(r"\d+$", "*", layer.name)
        for path, leaf in named_leaves(init_avals(layer)):
            if layer.trains(path) and leaf.ndim > 1:
                paths_by_kind[(layer.name, path) in matrices]["/".join((name, *path))] = None
    return f"Muon updates {', '.join(paths_by_kind[True])}; AdamW updates {', '.join([*paths_by_kind[False], 'all vectors'])}"


def _placed(tree: Any) -> list[tuple[Place, Any]]:
    return [((names[0], names[1:]), leaf) for names, leaf in named_leaves(tree)]
