"""A trained model on several devices without a pipeline: consecutive layers on each, results handed from one to the next.

For models larger than one device, in evaluation and generation. The cut is by bytes of parameters alone. Calls are dispatched
and nothing is waited for, so that several batches are on their way at once, each on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from jaxpipe.errors import ConfigError, StageError
from jaxpipe.stage.leaves import is_array
from jaxpipe.stage.model.layer import Model, Params
from jaxpipe.stage.model.plan import cut
from jaxpipe.stage.model.reference import last_readers, run_layers
from jaxpipe.train.checkpoints.stored import placed_layers, stored_params

_SHARE = 0.8
"""Of a device's memory, what parameters may take."""


def devices_for(model: Model, count: int | None = None) -> tuple[jax.Device, ...]:
    """``count`` devices of this process; by default as few as hold the parameters, or all (one where a device's memory is not
    known, as on CPUs).

    Raises:
        ConfigError: there are fewer.
    """
    there = jax.local_devices()
    if count is not None:
        if count > len(there):
            raise ConfigError(f"--devices {count}: JAX sees {len(there)} here; use at most that many")
        return tuple(there[:count])
    room = (there[0].memory_stats() or {}).get("bytes_limit")
    sizes = _bytes_of(model)
    for n in range(1, len(there) if room else 1):
        if max(sum(sizes[i] for i in part) for part in _parts(model, n)) <= _SHARE * (room or 0):
            return tuple(there[:n])
    return tuple(there if room else there[:1])


def placement_over(model: Model, devices: Sequence[jax.Device]) -> dict[str, jax.Device]:
    """The device of each layer, by name."""
    parts = zip(_parts(model, len(devices)), devices, strict=False)
    return {model.layers[i].name: device for part, device in parts for i in part}


def results_over(
    model: Model, params: Mapping[str, Params], devices: Sequence[jax.Device], wanted: Sequence[int]
) -> Callable[[Mapping[str, Any]], list[Any]]:
    """A function of a batch: what the layers at ``wanted`` return in evaluation mode. ``params``: as :func:`placement_over` of
    ``devices`` places them; of tied leaves a device gets a copy."""
    needed = last_readers(model, wanted)
    calls: list[tuple[Callable[..., Any], Mapping[str, Params], jax.Device]] = []
    for part, device in zip(_parts(model, len(devices)), devices, strict=False):
        own = {name: jax.device_put(params[name], device) for name in placed_layers(model.layers[i] for i in part)}
        calls.append((jax.jit(partial(_run, model, needed, part, part.stop == len(model.layers))), own, device))

    def run(batch: Mapping[str, Any]) -> list[Any]:
        made: dict[int, Any] = {}
        for call, own, device in calls:
            made = call(jax.device_put(made, device), own, jax.device_put(dict(batch), device))
        return [made[i] for i in wanted]

    return run


def _run(model: Model, needed: Mapping[int, int], part: range, last: bool, made: Any, params: Any, batch: Any) -> Any:
    found = run_layers(model, needed, part, made, params, batch)
    if not last and not all(map(is_array, jax.tree.leaves(found))):
        raise StageError(f"{model.name}: a layer returns values that are no arrays; use one device")
    return found


def _parts(model: Model, count: int) -> Iterator[range]:
    sizes = [1 + size for size in _bytes_of(model)]
    return (range(*part) for part in cut(model.layers, min(count, len(sizes)), sizes))


def _bytes_of(model: Model) -> list[int]:
    """Of each layer's parameters, as a checkpoint has them."""
    stored = stored_params(model)
    return [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored[layer.name])) for layer in model.layers]
