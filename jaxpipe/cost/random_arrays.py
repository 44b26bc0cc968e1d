"""Arrays of random values to time functions and copies on.

Power draw, and with it the speed of a GPU, depends on the data: a product of ones took a fifth less on an H200 than the same
product in a step (specs/gpu.md 1.1). Values are made on the host, so nothing is compiled for them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.stage.functions import AnyFunction

ACTIVATION, COTANGENT, PARAMETER = 1.0, 1e-2, 0.05
"""Largest absolute values, so that a few layers leave activations and cotangents finite."""
_SCALES = {"param": PARAMETER, "dy": COTANGENT, "dx": COTANGENT}
# Values repeat after so many. A prime: rows of a matrix, whose lengths are powers of two, are different ones.
_PERIOD = 65521


def random_array(
    aval: jax.ShapeDtypeStruct, scale: float = 1.0, limit: int = 2, *, positive: bool = False
) -> jax.Array:
    """Return an array of the shape, dtype and sharding of ``aval``: floats within ``±scale``, integers from 0 to
    ``limit − 1``, booleans, or PRNG keys. ``positive``: floats from a tenth of ``scale``."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        keys: jax.Array = jax.device_put(jax.random.key(0) if not aval.shape else _keys(aval), aval.sharding)
        return keys
    rng = np.random.default_rng(0)
    period = min(_PERIOD, max(1, aval.size))
    values: np.ndarray[Any, Any]
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        values = rng.uniform(0.1 * scale if positive else -scale, scale, period)
    else:
        largest = 1 if aval.dtype == np.bool_ else int(np.iinfo(aval.dtype).max)
        values = rng.integers(0, min(limit, largest + 1), period)
    array: jax.Array = jax.device_put(np.resize(values.astype(aval.dtype), aval.shape), aval.sharding)
    return array


def _keys(aval: jax.ShapeDtypeStruct) -> jax.Array:
    keys: jax.Array = jax.random.split(jax.random.key(0), aval.shape)
    return keys


def arguments_of(function: AnyFunction, vocab_size: int) -> list[jax.Array]:
    """Return random arguments of a stage function; integers of the batch are below ``vocab_size``, other integers 0 or 1.
    Residuals are positive: a variance below zero would make everything NaN, which is constant."""
    return [
        random_array(
            aval,
            _SCALES.get(port.kind, ACTIVATION),
            vocab_size if port.kind == "data" else 2,
            positive=port.kind in ("res", "wres"),
        )
        for port, aval in zip(function.inputs, function.avals_in, strict=True)
    ]
