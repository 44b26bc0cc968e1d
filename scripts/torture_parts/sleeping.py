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
    slow_layer = model.layers[layer]

    def apply(params: Any, x: Any, context: LayerContext) -> Any:
        out = slow_layer.apply(params, x, context)
        first, *rest = jax.tree.leaves(out)
        first_value = jax.lax.stop_gradient(first.ravel()[0])
        waited = jax.pure_callback(partial(_wait, mark), jax.ShapeDtypeStruct((), jnp.float32), first_value)
        return jax.tree.unflatten(jax.tree.structure(out), [first + waited.astype(first.dtype), *rest])

    layers = [replace(slow_layer, apply=apply) if k == layer else other for k, other in enumerate(model.layers)]
    return replace(model, layers=tuple(layers))


def _wait(mark: str, _: Any) -> Any:
    while Path(mark).exists():
        if not (pid_file := Path(f"{mark}.pid")).exists():
            new_file = Path(f"{mark}.new")
            new_file.write_text(str(os.getpid()), encoding="utf-8")
            new_file.rename(pid_file)
        time.sleep(0.1)
    return np.float32(0)
