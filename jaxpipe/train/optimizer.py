"""The optimizer of a run: AdamW with linear warm-up and cosine decay.

Clipping is not here: the norm is global over all ranks, and :mod:`jaxpipe.train.step` takes it. The transformation is applied
to one layer's parameters at a time, so its state is stored by layer name like the parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import optax


def learning_rate(lr: float, warmup_steps: int, steps: int, min_lr_ratio: float) -> optax.Schedule:
    """0 → ``lr`` over ``warmup_steps`` (the first step already moves), then a cosine to ``lr · min_lr_ratio`` at ``steps``."""
    decay = optax.cosine_decay_schedule(lr, max(1, steps - warmup_steps), alpha=min_lr_ratio)
    if warmup_steps == 0:
        return decay
    warmup = optax.linear_schedule(lr / warmup_steps, lr, max(1, warmup_steps - 1))
    return optax.join_schedules([warmup, decay], [warmup_steps])


def adamw(
    schedule: optax.Schedule, *, betas: tuple[float, float], eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW; matrices and embeddings decay, vectors (biases, norm scales) do not."""

    def decays(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim >= 2, params)

    return optax.adamw(schedule, b1=betas[0], b2=betas[1], eps=eps, weight_decay=weight_decay, mask=decays)
