"""The metrics of a whole model, unpipelined."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxpipe.stage.model.layer import Model, Params
from jaxpipe.stage.model.reference import last_readers, named_metrics, run_layers


def metrics_of(
    model: Model,
    params: Mapping[str, Params],
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    train: bool = False,
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return the metrics of one microbatch; arguments are those of :func:`~jaxpipe.stage.model.reference.apply_model`."""
    readers = last_readers(model, model.losses)
    results = run_layers(model, readers, readers, {}, params, batch, key, train)
    return named_metrics(model, [results[i] for i in model.losses])
