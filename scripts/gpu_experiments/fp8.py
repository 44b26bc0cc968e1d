"""The experiment on FP8: what its products gain on this card, and whether Flax's FP8 layers go through the split."""

from __future__ import annotations

from typing import Any

from scripts.gpu_experiments.card import seconds_each
from scripts.gpu_experiments.registry import Settings, experiment

_WIDTHS = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
"""Width of input and output of a block's products, in hidden sizes."""
_KERNEL = "$f8"
"""A part of the name of the custom call that multiplies in FP8."""


@experiment(
    "T15",
    version=1,
    question="is FP8 within reach?",
    backs='limits: "no fp8"',
    paths=("jaxpipe/stage", "scripts/gpu_experiments/fp8.py"),
    estimate_s=90,
    predicted={"a product": "1.5-1.7 × bfloat16", "Flax's layers": "refused: they hold variables beside parameters"},
    want={"least_speedup": ">= 1.35", "share_in_fp8": "== 1"},
)
def fp8_products(settings: Settings) -> dict[str, Any]:
    """Time the four products of a block as XLA's pattern writes them, values and scales apart, e4m3 by e4m3 as in F and e5m2 by
    e4m3 as in B, against bfloat16: speed, error, and whether a kernel of FP8 ran. Split a layer of Flax's FP8 operations."""
    rows = {
        f"{name} {values}": _product(settings, *widths, values)
        for name, widths in list(_WIDTHS.items())[: 1 if settings.tiny else None]
        for values in ("e4m3", "e5m2")
    }
    return {
        "products": rows,
        "least_speedup": min(row["speedup"] for row in rows.values()),
        "share_in_fp8": sum(row["in_fp8"] for row in rows.values()) / len(rows),
        "flax": flax_layer(),
    }


def _product(settings: Settings, width_in: int, width_out: int, values: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    kinds = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
    shapes = (settings.sequence, width_in * settings.hidden), (width_in * settings.hidden, width_out * settings.hidden)
    keys = jax.random.split(jax.random.key(0))
    exact = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    dtypes = kinds[values], kinds["e4m3"]
    scales = [
        jnp.abs(x).max().astype(jnp.float32) / float(jnp.finfo(kind).max) for x, kind in zip(exact, dtypes, strict=True)
    ]
    small = [(x / scale).astype(kind) for x, scale, kind in zip(exact, scales, dtypes, strict=True)]

    def scaled(x: Any, y: Any, of_x: Any, of_y: Any) -> Any:
        return (x.astype(jnp.bfloat16) * of_x.astype(jnp.bfloat16)) @ (
            y.astype(jnp.bfloat16) * of_y.astype(jnp.bfloat16)
        )

    in_fp8, in_bfloat16 = jax.jit(scaled), jax.jit(jnp.matmul)
    text = in_fp8.lower(*small, *scales).compile().as_text()
    count = 2 if settings.tiny else 300
    fp8_s = seconds_each(lambda: in_fp8(*small, *scales), count)
    bfloat16_s = seconds_each(lambda: in_bfloat16(*exact), count)
    with jax.default_matmul_precision("highest"):
        expected = jnp.matmul(*(x.astype(jnp.float32) for x in exact))
    error = jnp.linalg.norm(in_fp8(*small, *scales).astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
    return {
        "flops_per_s": 2 * shapes[0][0] * shapes[1][0] * shapes[1][1] / fp8_s,
        "speedup": bfloat16_s / fp8_s,
        "error": float(error),
        "in_fp8": int(_KERNEL in text),
    }


def flax_layer() -> dict[str, Any]:
    """Return whether a layer of Flax's FP8 operations is taken as one, and what is said of it."""
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    from jaxpipe.errors import StageError
    from jaxpipe.stage.model.adapters import from_linen

    example = jax.ShapeDtypeStruct((2, 16, 16), jnp.bfloat16)
    layer = from_linen("fp8", nn.Dense(16, dot_general_cls=nn.Fp8DotGeneralOp), example=(example,))
    try:
        jax.eval_shape(layer.init, jax.random.key(0))
    except StageError as error:
        return {"is_taken": 0, "said": str(error)}
    return {"is_taken": 1, "said": ""}
