"""Cases of tensor and data parallelism for tests: tiny models whose sizes 8 shards divide, their pipelines on every factoring
of eight devices, and what one device computes without any of it.

Legend: pp pipeline ranks, tp, cp and dp devices of each rank. Everything is float64 unless told: the caller is under ``x64``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.axes import RankMesh
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.plan import plan_stages
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.train.update.optimizer import adamw, learning_rate
from models.gpt import GPT
from models.llama import Llama

VOCAB, SEQ, ROWS, MICROBATCHES = 24, 8, 8, 4
FACTORINGS = [(pp, tp, 8 // (pp * tp)) for pp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if pp * tp <= 8]
"""(pp, tp, dp) of eight devices."""


@dataclass(frozen=True)
class Case:
    """A run: ``name`` as ``gpt``, ``gpt-tied``, ``llama`` or ``llama-tied`` (the latter with 2 key-value heads for 8 heads)."""

    name: str
    pp: int
    tp: int
    dp: int
    family: str = "1f1b"
    sequence: bool = False
    zero1: bool = False
    fused: bool = False
    dtype: str = "float64"
    cp: int = 1
    cp_method: str = "gather"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    one_block: bool = False
    """Not two blocks at least: of two stages each has less to compile."""

    def __str__(self) -> str:
        flags = "".join(f"-{n}" for n in ("sequence", "zero1", "fused") if getattr(self, n))
        cp = f"-cp{self.cp}-{self.cp_method}" * (self.cp > 1)
        return f"{self.name}-{self.pp}x{self.tp}x{self.dp}-{self.family}{flags}{cp}" + f"-{self.dtype}" * (
            self.dtype != "float64"
        )

    @property
    def stages(self) -> int:
        return generate(self.family, self.pp, MICROBATCHES).num_stages

    @property
    def blocks(self) -> int:
        return 1 if self.one_block else max(2, self.stages - 3)


@cache
def model_of(name: str, blocks: int, dtype: str = "float64") -> Model:
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "d_model": 16, "num_layers": blocks, "num_heads": 8, "seq_len": SEQ, "dtype": dtype,
        "tied": name.endswith("-tied"),
    }  # fmt: skip
    if name.startswith("gpt"):
        return GPT(**common, mlp_ratio=2)
    return Llama(**common, num_kv_heads=2, mlp_size=24, qkv_bias=True)


def model_for(case: Case) -> Model:
    return model_of(case.name, case.blocks, case.dtype)


@cache
def pipeline(case: Case, rows: int = ROWS) -> Pipeline:
    """Return the pipeline of a case, microbatches of ``rows`` sequences."""
    schedule = generate(case.family, case.pp, MICROBATCHES)
    model = model_for(case)
    return Pipeline.build(
        model,
        schedule,
        microbatch_size=rows,
        boundaries=[(s.start, s.stop) for s in plan_stages(model, schedule.num_stages).stages],
        compute_dtype=jnp.dtype(case.dtype),
        dp=case.dp,
        tp=RankMesh(
            tp=case.tp, sequence=case.sequence, fused_residual=case.fused, cp=case.cp, cp_method=case.cp_method
        ),
    )


def batches(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return batches of uneven weights: rows, and so devices and microbatches, differ in their sums, and one half of a
    microbatch has none."""
    rng = np.random.default_rng(seed)
    shape = (MICROBATCHES, ROWS, SEQ)
    data = []
    for _ in range(count):
        weights = (rng.random(shape) < rng.random((*shape[:2], 1))).astype(np.float32)
        weights[1, : ROWS // 2] = 0
        tokens, targets = (rng.integers(0, VOCAB, shape).astype(np.int32) for _ in range(2))
        data.append({"tokens": tokens, "targets": targets, "weights": weights})
    return data


def two_axes(params: Any) -> Any:
    """A mask of weight decay."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def optimizer() -> optax.GradientTransformation:
    return adamw(learning_rate(1e-2, 2, 10, 0.1), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, mask=two_axes)


@cache
def parameters(name: str, blocks: int, dtype: str = "float64") -> Mapping[str, Any]:
    params = init_params(model_of(name, blocks, dtype), 0)
    return jax.tree.map(lambda a: np.asarray(a, "float64" if dtype == "float64" else "float32"), params)


def params_for(case: Case) -> Mapping[str, Any]:
    return parameters(case.name, case.blocks, case.dtype)


@cache
def _loss_and_grads(name: str, blocks: int, dtype: str) -> Any:
    model = model_of(name, blocks, dtype)

    def loss(params: Any, batch: Any) -> Any:
        total, weight = apply_model(model, params, batch, train=False)
        return total / weight

    return jax.jit(jax.value_and_grad(loss))


def on_one_device(case: Case, params: Any, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
    """Return loss and gradients of the whole batch, by ``jax.value_and_grad`` of the uncut model."""
    full_batch = {k: jnp.asarray(v.reshape(-1, *v.shape[2:])) for k, v in batch.items()}
    return _loss_and_grads(case.name, case.blocks, case.dtype)(params, full_batch)  # type: ignore[no-any-return]


@cache
def _update(clip_norm: float) -> Any:
    tx = optimizer()

    def update(params: Any, state: Any, grads: Any) -> Any:
        norm = optax.tree.norm(grads)
        scale = jnp.minimum(1.0, clip_norm / norm)
        updates, state = tx.update(jax.tree.map(lambda g: g * scale, grads), state, params)
        return optax.apply_updates(params, updates), state, norm

    return jax.jit(update)


def steps_on_one_device(
    case: Case, clip_norm: float, data: Sequence[Mapping[str, np.ndarray]]
) -> tuple[Any, list[tuple[float, float]]]:
    """Return parameters after a step of each batch, and the losses and norms, by optax over the uncut model."""
    params = jax.tree.map(jnp.asarray, dict(params_for(case)))
    state, records = optimizer().init(params), []
    for batch in data:
        loss, grads = on_one_device(case, params, batch)
        params, state, norm = _update(clip_norm)(params, state, grads)
        records.append((float(loss), float(norm)))
    return params, records


def assert_close(got: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    got_leaves, got_tree = jax.tree.flatten(got)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    assert got_tree == expected_tree
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)
