"""Small parameter trees, saved checkpoints and comparisons for the checkpoint tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint import CheckpointStore

META = {"data": {"epoch": 1, "position": 12345678901234567890}, "model": "tiny", "losses": [0.1, 1e-300]}


def make_params(fill: float = 0.0) -> dict[str, Any]:
    """A small model: two layers and one without parameters; mixed dtypes and a list."""
    base = np.arange(12, dtype=np.float32).reshape(3, 4) + np.float32(fill)
    return {
        "embed": {"table": jnp.asarray(base, jnp.bfloat16)},
        "h.0": {
            "attention": {"q/k": jnp.asarray(base), "b": jnp.asarray(base[0])},
            "mlp": [jnp.asarray(base[:1]), jnp.int32(7)],
        },
        "dropout": {},
    }


def make_optimizer(params: dict[str, Any]) -> dict[str, Any]:
    return {layer: optax.adamw(1e-3).init(tree) for layer, tree in params.items()}


def one_line(info: pytest.ExceptionInfo[CheckpointError]) -> str:
    """The message, which must be one line: the CLI prints it."""
    message = str(info.value)
    assert "\n" not in message
    return message


def assert_same(found: Any, expected: Any) -> None:
    """Same structure, dtypes and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def save_two(directory: Path) -> None:
    """Checkpoints of steps 10 and 20."""
    with CheckpointStore(directory) as store:
        for step in (10, 20):
            params = make_params(step)
            store.save(step, params, make_optimizer(params), META)


def save_losses(store: CheckpointStore, losses: dict[int, float | None]) -> None:
    """One checkpoint per step with its evaluation loss; the only array holds the step."""
    for step, loss in losses.items():
        store.save(step, {"a": np.float32(step)}, {}, {}, eval_loss=loss)
    store.wait()
