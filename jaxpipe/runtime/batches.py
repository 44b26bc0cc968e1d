"""Puts a step's data and random keys on the ranks that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.axes import ROWS
from jaxpipe.errors import ProgramError
from jaxpipe.mesh import batch_sharded, device_sharded
from jaxpipe.runtime.grid import RankView, place
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.model.layer import divisors

Batch = Mapping[str, np.ndarray | jax.Array]
"""Arrays ``[microbatches, microbatch size, …]`` by name."""

Instance = tuple[int, int]
"""(rank, stage)."""

THREEFRY = "threefry2x32"
"""The implementation of random numbers that stages are traced with."""


def check_microbatch(microbatch_size: int, dp: int) -> None:
    """Raise ProgramError, with sizes that would work, where a microbatch does not divide over ``dp``."""
    if dp > 1 and microbatch_size % dp:
        below, above = microbatch_size // dp * dp, -(-microbatch_size // dp) * dp
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ProgramError(
            f"a microbatch of {microbatch_size} sequences does not divide over dp {dp}; use a microbatch size of {sizes}, or "
            f"dp {divisors(microbatch_size).replace(', ', ' or ')}"
        )


def checked_batch(
    batch: Batch, spec: Mapping[str, jax.ShapeDtypeStruct], microbatches: int, own: int | None = None
) -> Batch:
    """Return the arrays of ``batch`` that ``spec`` (those of a microbatch) names, in its dtypes. ``own``: they may have so many
    sequences a microbatch.

    Raises:
        ProgramError: one is missing, is no array, has another shape, or holds numbers that its dtype can't.
    """
    arrays = {}
    for name, aval in spec.items():
        if name not in batch:
            raise ProgramError(f"the batch has no {name!r}; the model reads {', '.join(spec)}")
        array: Any = batch[name]
        expected = (microbatches, *aval.shape)
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ProgramError(f"batch[{name!r}] is a {type(array).__name__}; want an array of shape {expected}")
        if tuple(array.shape) not in (expected, (microbatches, own, *aval.shape[1:])):
            raise ProgramError(f"batch[{name!r}] has shape {tuple(array.shape)}; this pipeline wants {expected}")
        arrays[name] = array if array.dtype == aval.dtype else _cast(name, array, aval.dtype)
    return arrays


def _cast(name: str, array: Any, dtype: Any) -> Any:
    """Cast ``array`` to ``dtype``: real numbers to floating-point ones, integers to integers that hold them.

    Raises:
        ProgramError: it holds other numbers.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        fits = jnp.issubdtype(array.dtype, jnp.number) and not jnp.issubdtype(array.dtype, jnp.complexfloating)
        if fits or array.dtype == bool:
            return array.astype(dtype)
    elif jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(array.dtype, jnp.integer):
        ours, theirs = jnp.iinfo(dtype), jnp.iinfo(array.dtype)  # type: ignore[no-untyped-call]
        # Only where the dtypes leave it open are the numbers looked at: that waits for an array on a device.
        if theirs.min < ours.min or theirs.max > ours.max:
            low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
            if low < ours.min or high > ours.max:
                raise ProgramError(
                    f"batch[{name!r}] holds {low if low < ours.min else high}; the model reads {np.dtype(dtype)}, from "
                    f"{ours.min} to {ours.max}"
                )
        return array.astype(dtype)
    raise ProgramError(f"batch[{name!r}] holds {array.dtype}; the model reads {dtype}")


def rows_of(batch: Batch, rows: range) -> Batch:
    """Return the sequences ``rows`` of each microbatch, of arrays that have all, or no others."""
    return {name: x if x.shape[1] == len(rows) else x[:, rows.start : rows.stop] for name, x in batch.items()}


def check_placed(params: Any, functions: Mapping[Instance, StageFunctions]) -> None:
    """Raise ProgramError where ``params`` are not buffers by (rank, stage)."""
    if not isinstance(params, Mapping) or any(at not in params for at in functions):
        raise ProgramError("these parameters are not on the ranks yet: pass what pipeline.place(params) returns")


def in_microbatches(
    batch: Mapping[str, Any],
    spec: Mapping[str, jax.ShapeDtypeStruct],
    microbatches: int | None,
    own: np.ndarray | None = None,
) -> dict[str, np.ndarray | jax.Array]:
    """Return the arrays of ``batch`` that ``spec`` (those of a microbatch) names, each ``[microbatches, microbatch size, …]``.
    They may come so, or flat: ``[microbatches · microbatch size, …]``, or as the sequences ``own`` of that. ``microbatches``:
    None for any number, the same for all.

    Raises:
        ProgramError: an array is missing, or its shape fits neither way.
    """
    arrays: dict[str, np.ndarray | jax.Array] = {}
    if not isinstance(batch, Mapping):
        raise ProgramError(f"the batch is a {type(batch).__name__}; want a dict of arrays: {', '.join(spec)}")
    for name, aval in spec.items():
        if name not in batch:
            raise ProgramError(f"the batch has no {name!r}; the model reads {', '.join(spec)}")
        try:
            array = batch[name] if isinstance(batch[name], jax.Array) else np.asarray(batch[name])
        except (TypeError, ValueError) as error:
            raise ProgramError(f"batch[{name!r}] is no array: {error}") from None
        size = aval.shape[0]
        if own is not None and microbatches and array.shape == (len(own), *aval.shape[1:]):
            arrays[name] = array.reshape(microbatches, len(own) // microbatches, *aval.shape[1:])
            continue
        if array.shape[1:] == aval.shape[1:] and array.ndim == len(aval.shape) and array.shape[0] % size == 0:
            array = array.reshape(-1, *aval.shape)
        if array.ndim != len(aval.shape) + 1 or array.shape[1:] != aval.shape or microbatches not in (None, len(array)):
            many = microbatches or "microbatches"
            flat = f"{microbatches * size}" if microbatches else f"microbatches · {size}"
            rest = "".join(f", {n}" for n in aval.shape[1:])
            raise ProgramError(
                f"batch[{name!r}] has shape {tuple(np.shape(batch[name]))}; want ({flat}{rest}) or ({many}, {size}{rest})"
            )
        if not len(array):
            raise ProgramError(f"batch[{name!r}] has no rows: its shape is {tuple(np.shape(batch[name]))}")
        arrays[name], microbatches = array, len(array)
    return arrays


def place_data(
    batch: Batch, functions: Mapping[Instance, StageFunctions], views: Sequence[RankView]
) -> dict[Instance, list[list[jax.Array]]]:
    """Place the arrays that each stage reads, by (rank, stage) and microbatch, split over the data axes of its functions' mesh
    in ``views``, by rank."""
    count = len(next(iter(batch.values())))
    names = {at: f.data_names for at, f in functions.items() if f.data_names}
    slices = [batch[n][i] for at in names for i in range(count) for n in names[at]]
    views_of = [views[r] for r, s in names for _ in range(count) for _ in names[(r, s)]]
    # One call for all: a call costs more than one more array, and there is an array a stage and microbatch.
    placed = place(slices, [batch_sharded(view.rank) for view in views_of])
    arrays = (view.narrow(array) for view, array in zip(views_of, placed, strict=True))
    return {at: [[next(arrays) for _ in names[at]] for _ in range(count)] for at in names}


def place_keys(
    key: jax.Array | None,
    count: int,
    functions: Mapping[Instance, StageFunctions],
    views: Sequence[RankView],
    shards: range | None,
) -> dict[int, Sequence[jax.Array]]:
    """Make, for each rank that draws random numbers, the keys for each of ``count`` microbatches. ``shards``: as for
    :func:`microbatch_keys`, those of its rows on the mesh of the rank's functions, in ``views``.

    Raises:
        ProgramError: a rank draws, and there is no ``key``, or it is no key.
    """
    users = sorted({r for (r, _), f in functions.items() if f.uses_key})
    if not users:
        return {}
    if key is None:
        raise ProgramError("the model draws random numbers (dropout): pass a PRNG key to every step")
    if not isinstance(key, jax.Array | np.ndarray):
        raise ProgramError(f"the PRNG key is a {type(key).__name__}; make one of a seed with jax.random.key(seed)")
    keys = microbatch_keys(_threefry(key), count, shards)
    homes = [device_sharded(views[r].rank, ROWS) for r in users]
    flat = iter(place([k for _ in users for k in keys], [h for h in homes for _ in keys]))
    return {r: views[r].narrow([next(flat) for _ in keys]) for r in users}


def _threefry(key: Any) -> Any:
    """Return a key, typed or raw data, as a typed one of the implementation that stages are traced with, whatever JAX's default
    is.

    Raises:
        ProgramError: it is of another implementation.
    """
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        kind = str(jax.random.key_impl(key))
    else:
        kind = THREEFRY if (key.shape, key.dtype) == ((2,), np.uint32) else f"raw data {key.dtype}{list(key.shape)}"
        key = jax.random.wrap_key_data(key, impl=THREEFRY) if kind == THREEFRY else key
    if kind != THREEFRY or key.shape:
        what = f"keys of shape {key.shape}" if kind == THREEFRY else kind
        raise ProgramError(f"the PRNG key is of {what}; make one with jax.random.key(seed, impl={THREEFRY!r})")
    return key


@partial(jax.jit, static_argnames=("count", "shards"))
def microbatch_keys(key: jax.Array, count: int, shards: range | None = None) -> list[jax.Array]:
    """Return each microbatch's key, ``fold_in(key, i)``, as threefry key data uint32 [2]; the same for any cut and schedule.
    ``shards``: of a microbatch that is divided over dp: the keys of these one after another, ``fold_in`` of that and their
    number."""
    keys = [jax.random.fold_in(key, i) for i in range(count)]
    if shards is not None:
        # Out of the programs: devices of another process would count from 0 again, and repeat the masks of the first ones.
        keys = [jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shards.start, shards.stop)) for key in keys]
    return [jax.random.key_data(key).reshape(-1) for key in keys]
