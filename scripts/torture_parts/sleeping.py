"""The tiny GPT with a block that waits as long as a file is there; what waits writes its process's id beside it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.stage.model.layer import LayerContext, Model
from models.gpt import GPT


def sleepy(*, layer: int, mark: str, **options: Any) -> Model:
    """``layer``: of the model's, from 0. ``mark``: the file."""
    model = GPT(**options)
    whole = model.layers[layer]

    def apply(params: Any, x: Any, context: LayerContext) -> Any:
        out = whole.apply(params, x, context)
        first, *rest = jax.tree.leaves(out)
        seen = jax.lax.stop_gradient(first.ravel()[0])
        waited = jax.pure_callback(partial(_wait, mark), jax.ShapeDtypeStruct((), jnp.float32), seen)
        return jax.tree.unflatten(jax.tree.structure(out), [first + waited.astype(first.dtype), *rest])

    layers = [replace(whole, apply=apply) if k == layer else other for k, other in enumerate(model.layers)]
    return replace(model, layers=tuple(layers))


def _wait(mark: str, _: Any) -> Any:
    while Path(mark).exists():
        if not (said := Path(f"{mark}.pid")).exists():
            whole = Path(f"{mark}.new")
            whole.write_text(str(os.getpid()), encoding="utf-8")
            whole.rename(said)
        time.sleep(0.1)
    return np.float32(0)
