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
    """Of one microbatch; arguments as in :func:`~jaxpipe.stage.model.reference.apply_model`."""
    needed = last_readers(model, model.losses)
    made = run_layers(model, needed, needed, {}, params, batch, key, train)
    return named_metrics(model, [made[i] for i in model.losses])
