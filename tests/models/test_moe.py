"""A decoder of experts against one that computes every expert on every token: pipelines, shards, drops, messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxpipe.axes import RankMesh
from jaxpipe.errors import ConfigError
from jaxpipe.experts import route
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import CostProfile, generate
from jaxpipe.schedule.passes.braid import braid
from jaxpipe.stage.compiled.compile import BuildCache, build_all
from jaxpipe.stage.jaxprs import jaxpr_flops
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.train.step import TrainStep
from jaxpipe.train.trainer import Trainer
from models.moe import MoE, MoEConfig
from tests.support.parallel_cases import assert_close

SMALL: Mapping[str, Any] = {
    "vocab_size": 16, "d_model": 8, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 8, "num_experts": 8,
    "expert_size": 6, "mlp_size": 8, "dense_layers": "0", "dtype": "float64", "balance_weight": 0.3,
}  # fmt: skip
M, ROWS = 4, 4


def every_expert(c: MoEConfig, p: Params, h: jax.Array) -> jax.Array:
    """Return the MLP of an expert layer, all experts on all tokens: h [B, T, D] → [B, T, D]."""
    x = h.reshape(-1, c.d_model)
    groups = {"groups": c.groups, "top_groups": c.top_groups, "group_best": c.group_best}
    score = {"score": c.score, "renormalise": c.renormalise, "scale": c.scale}
    choice = route(x, p["router"], c.top_k, bias=p.get("router_bias"), **groups, **score)
    hidden = jnp.einsum("nd,edgf->engf", x, p["gate_up"])
    results = jnp.einsum("enf,efd->end", nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], p["down"])
    share = jnp.sum(jax.nn.one_hot(choice.experts, c.num_experts, dtype=x.dtype) * choice.weights[:, :, None], axis=1)
    y = jnp.einsum("ne,end->nd", share, results)
    if c.shared_size:
        hidden = jnp.einsum("nd,dgf->ngf", x, p["shared_gate_up"]["kernel"])
        shared = (nn.silu(hidden[:, 0]) * hidden[:, 1]) @ p["shared_down"]["kernel"]
        y = y + (nn.sigmoid(x @ p["shared_gate"]) * shared if c.shared_gate else shared)
    return y.reshape(h.shape)


def with_every_expert(config: MoEConfig, layer: Layer) -> Layer:
    """Return an expert layer as a block without MLP, and then all experts."""

    def apply(params: Params, x: Any, context: LayerContext) -> Any:
        # Experts of zeros leave the residual stream as attention made it.
        silent = {**params, "down": jnp.zeros_like(params["down"])}
        if config.shared_size:
            silent["shared_down"] = {"kernel": jnp.zeros_like(params["shared_down"]["kernel"])}
        side = layer.apply(silent, x, context)
        x = side.y
        scale = params["norm_mlp"]["scale"]
        norm = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps) * scale[None, None]
        return replace(side, y=x + every_expert(config, params, norm))

    return replace(layer, apply=apply)


@cache
def reference(options: tuple[tuple[str, Any], ...]) -> tuple[Any, Any, Any, Any]:
    """Return parameters of order one, a batch, its loss, and the gradients of that and the balance loss, by every expert on
    every token."""
    kwargs = {**SMALL, **dict(options)}
    model, config = MoE(**kwargs), MoEConfig(**kwargs)
    dense = replace(
        model,
        layers=tuple(
            with_every_expert(config, x) if "router" in x.init(jax.random.key(0)) else x for x in model.layers
        ),
    )
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    params = jax.tree.map(lambda a: rng.normal(0, 0.5, a.shape), shapes)
    batch = {name: rng.integers(0, 16, (M, ROWS, 8)).astype(np.int32) for name in ("tokens", "targets")}
    batch["weights"] = rng.random((M, ROWS, 8)).astype(np.float32)

    def loss(params: Any) -> Any:
        whole: Any = {name: a.reshape(-1, 8) for name, a in batch.items()}
        (total, weight), (own, _) = (apply_model(dense, params, whole, train=train) for train in (True, False))
        return total / weight, own / weight

    (_, value), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return params, batch, value, grads


def pipeline(
    model: Model,
    family: str,
    tp: RankMesh,
    recompute: str = "none",
    ranks: int = 2,
    dtype: str = "float64",
    is_braided: bool = True,
) -> Pipeline:
    schedule = generate(family, ranks, M)
    stages = schedule.num_stages
    if is_braided and stages > ranks:
        costs = CostProfile.uniform(stages, chunks=stages // ranks, tp_comm=0.5, tp_collectives=4)
        schedule = braid(generate(family, ranks, M, costs=costs), costs)
    return Pipeline.build(
        model,
        schedule,
        microbatch_size=ROWS,
        compute_dtype=jnp.dtype(dtype),
        tp=tp,
        recompute=recompute,
    )


SHARED = {"shared_size": 4, "shared_gate": True, "renormalise": False}
DEEPSEEK = {
    "score": "sigmoid",
    "groups": 4,
    "top_groups": 2,
    "scale": 2.5,
    "router_bias": True,
    "shared_size": 4,
    "top_k": 3,
}
CASES = [
    ({}, "dualpipe-v", RankMesh(dp=4, ep=2), "experts"),
    ({"products": "ragged", **SHARED}, "zb-h1", RankMesh(dp=2, ep=2, tp=2, sequence=True), "none"),
    ({**DEEPSEEK, "balance": "batch"}, "stp", RankMesh(cp=2, tp=2, sequence=True), "full"),
]


GRID = [
    ({"products": products}, family, RankMesh(dp=4, ep=ep), recompute)
    for family in ("1f1b", "zb-h1", "v-zb", "dualpipe-v", "chimera")
    for products in ("padded", "ragged")
    for ep in (1, 2, 4)
    for recompute in ("none", "mlp", "full")
]
"""The families that have two chunks a rank are braided."""
GRID += [
    ({"products": products, **SHARED}, family, mesh, "experts")
    for family in ("1f1b", "zb-h1")
    for products in ("padded", "ragged")
    for mesh in (RankMesh(dp=2, ep=2, cp=2), RankMesh(dp=2, ep=2, tp=2, sequence=True, fused_residual=True))
]


@pytest.mark.parametrize(
    ("options", "family", "tp", "recompute"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in GRID)]
)
def test_gradients_are_those_of_every_expert_on_every_token(
    options: dict[str, Any], family: str, tp: RankMesh, recompute: str, x64: None
) -> None:
    key = tuple(options.items())
    params, batch, expected_loss, expected = reference(key)
    pipe = pipeline(MoE(**{**SMALL, **options}), family, tp, recompute)
    loss, grads = pipe.loss_and_grads(pipe.place(params), batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    # What is not trained has no gradient.
    untrained = {k: x for k, x in grads["block_01"].items() if k in ("router_bias", "router_fractions")}
    expected = {**expected, "block_01": {**expected["block_01"], **untrained}}
    assert_close(grads, expected, rtol=1e-10, atol=1e-12)


FIRST = ("1f1b", 1, False)
BITS = [
    (family, ep, is_braided)
    for family in ("1f1b", "zb-1p", "v-zb", "combined-1f1b", "dualpipe-v")
    for ep in (1, 2, 4)
    for is_braided in ((False,) if family in ("1f1b", "zb-1p") else (False, True))
]


def bits_of_a_step(dtype: str, family: str, ep: int, is_braided: bool) -> list[dict[str, bytes]]:
    """Return for each of two runs of a step the bits of its gradients, loss, balance and counts, by name."""
    model = MoE(**{**SMALL, "num_layers": 1, "dense_layers": "", "dtype": dtype})
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda a: rng.normal(0, 0.5, a.shape), jax.eval_shape(lambda: init_params(model, 0)))
    batch = {name: rng.integers(0, 16, (M, ROWS, 8)).astype(np.int32) for name in ("tokens", "targets")}
    batch["weights"] = rng.random((M, ROWS, 8)).astype(np.float32)
    pipe = pipeline(model, family, RankMesh(dp=4, ep=ep), dtype=dtype, is_braided=is_braided)
    # After one step the momentum is the gradient.
    step = TrainStep(pipe, optax.sgd(1.0, momentum=0.5))

    def run() -> dict[str, bytes]:
        state, metrics = step(step.init(params), batch)
        values = (step.by_layer(state)[1], metrics.loss, metrics.metrics, metrics.sums)
        leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(values))
        return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}

    return [run(), run()]


_first_bits = cache(lambda dtype: bits_of_a_step(dtype, *FIRST)[0])


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        ("float32", ("zb-1p", 4, False)),
        *(
            pytest.param(dtype, case, marks=pytest.mark.soak)
            for dtype in ("float32", "float64")
            for case in BITS
            if case != FIRST
        ),
    ],
)
def test_where_experts_lie_moves_no_bit_but_of_their_gradients(
    dtype: str, case: tuple[str, int, bool], request: pytest.FixtureRequest
) -> None:
    if dtype == "float64":
        request.getfixturevalue("x64")
    first = _first_bits(dtype)
    once, again = bits_of_a_step(dtype, *case)
    assert once == again and once.keys() == first.keys()
    names = {name for name in first if first[name] != once[name]}
    experts = {name for name in first if "gate_up" in name or "down" in name}
    assert len(first) > 8 and len(experts) == 2
    # Devices that share an expert sum their parts of its gradient in another order than one device sums its rows.
    assert names <= (experts if case[1] > 1 else set())


def trainer_of(
    pp: int,
    mesh: RankMesh,
    family: str = "1f1b",
    microbatches: int = 2,
    zero1: bool = False,
    recompute: str = "none",
    **options: Any,
) -> Trainer:
    """Return a trainer whose steps have eight rows, and whose first one subtracts the gradient."""
    model = MoE(**{**SMALL, "dense_layers": "", **options})
    schedule, size = generate(family, pp, microbatches), 8 // microbatches
    pipe = Pipeline.build(
        model, schedule, microbatch_size=size, compute_dtype=jnp.float64, tp=mesh, recompute=recompute
    )
    return Trainer.over(TrainStep(pipe, optax.sgd(1.0, momentum=0.5), clip_norm=0.0, zero1=zero1))


def rows_of(seed: int, microbatches: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    batch: dict[str, Any] = {name: rng.integers(0, 16, (8, 8)).astype(np.int32) for name in ("tokens", "targets")}
    batch["weights"] = rng.random((8, 8)).astype(np.float32)
    return {name: array.reshape(microbatches, -1, 8) for name, array in batch.items()}


@pytest.mark.soak
def test_balance_by_sequence_and_its_gradient_know_no_cut(x64: None) -> None:
    """The weight of the balance is such that little else is in what a step subtracts from the router. Choices are counted once,
    whatever is recomputed."""
    results = []
    for m, pp, dp, ep, recompute in (
        (1, 1, 1, 1, "none"), (8, 1, 1, 1, "full"), (4, 2, 2, 2, "experts"), (4, 4, 2, 2, "none"), (2, 2, 4, 2, "full"),
        (1, 1, 4, 2, "none"), (2, 2, 4, 1, "experts"),
    ):  # fmt: skip
        mesh = RankMesh(dp=dp, ep=ep)
        step = trainer_of(pp, mesh, microbatches=m, recompute=recompute, balance_weight=1e4).train_step
        state, metrics = step(step.init(init_params(step.pipeline.model, 0)), rows_of(0, m))
        assert [load.sum() for load in metrics.sums["load"].values()] == [2 * 8 * 8] * 2
        updated = step.by_layer(state)[0]
        routers = [np.asarray(updated[name]["router"]) for name in ("block_00", "block_01")]
        assert min(np.abs(router).max() for router in routers) > 1
        results.append([metrics.metrics["balance"], *routers])
        assert "balance" not in step.pipeline.eval_reported.metrics
    for result in results[1:]:
        for value, first in zip(result, results[0], strict=True):
            np.testing.assert_allclose(value, first, rtol=1e-12, atol=1e-12 * np.abs(first).max())


@pytest.mark.soak
def test_a_run_goes_on_over_other_ranks_and_shards_of_experts(tmp_path: Path, x64: None) -> None:
    options = {"balance": "batch", "router_bias": True, "bias_rate": 1e-2}
    runs = [
        trainer_of(2, RankMesh(dp=4), "zb-h1", **options),
        trainer_of(4, RankMesh(dp=2, ep=2), **options),
        trainer_of(2, RankMesh(dp=4, ep=4), "zb-h1", zero1=True, **options),
    ]
    initial = init_params(runs[0].pipeline.model, 0)

    def losses(trainer: Trainer, state: Any, steps: range) -> tuple[Any, list[float]]:
        reports = []
        for n in steps:
            state, metrics = trainer.train_step(state, rows_of(n))
            reports += [float(metrics.loss), float(metrics.grad_norm), float(metrics.metrics["balance"])]
        return state, reports

    _, expected = losses(runs[0], runs[0].train_step.init(initial), range(6))
    state, reports = losses(runs[0], runs[0].train_step.init(initial), range(2))
    for trainer, before, steps in ((runs[1], runs[0], range(2, 4)), (runs[2], runs[1], range(4, 6))):
        before.save(state, tmp_path)
        state, more_reports = losses(trainer, trainer.restore(tmp_path), steps)
        reports += more_reports
    np.testing.assert_allclose(reports, expected, rtol=1e-12)


@pytest.mark.parametrize("products", ["padded", "ragged"])
def test_weight_gradients_need_no_exchange_and_no_order(products: str) -> None:
    tp = RankMesh(dp=2, ep=2)
    model = MoE(**{**SMALL, "dense_layers": "", "num_layers": 1, "dtype": "float32", "products": products})
    cut = [model.layers[:1], model.layers[1:2], model.layers[2:]]
    avals = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    cache, meshes = BuildCache(), [*pipeline_submeshes(1, tp)] * 3
    counts, saved = {}, {}
    for policy in ("none", "experts", "full"):
        stage = build_all(cut, avals, model.batch_spec(ROWS), meshes, policy, tp=tp, cache=cache)[1]
        jaxprs = {op: stage.functions[op].jaxpr.jaxpr for op in ("F", "B", "W")}
        names = {op: Counter(eqn.primitive.name for eqn in jaxpr.eqns) for op, jaxpr in jaxprs.items()}
        counts[policy] = [[names[op][name] for name in ("all_to_all", "sort", "top_k")] for op in jaxprs]
        saved[policy] = stage.residual_bytes
        if policy == "none":
            flops = {op: jaxpr_flops(jaxpr) for op, jaxpr in jaxprs.items()}
            assert sum(flops.values()) <= 3.03 * flops["F"]
    # Ragged products exchange counts as well.
    forward = 3 if products == "ragged" else 2
    once = [[forward, 1, 1], [2, 0, 0], [0, 0, 0]]
    assert counts == {"none": once, "experts": once, "full": [once[0], [forward + 2, 1, 1], [0, 0, 0]]}
    assert saved["none"] > 2 * saved["experts"] > 2 * saved["full"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 9}, "top_k is 9.* 1 to 8"),
        ({"capacity": 0.0}, "capacity is 0.* above 0"),
        ({"products": "ragged", "buffer": -1.0}, "buffer is -1.* above 0"),
        ({"groups": 3}, "groups is 3.*1, 2, 4, 8"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_groups is 1.* 2 to 4"),
        ({"groups": 4, "top_groups": 2, "group_best": 3}, "group_best is 3.* 1 to 2"),
        ({"products": "dense"}, "products is 'dense'.*padded or ragged"),
        ({"dense_layers": "0,2"}, "dense_layers names '2'.* 0 to 1"),
        ({"shared_gate": True}, "shared_gate.*shared_size"),
        ({"head_dim": 3}, "MoE: head_dim is 3"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MoE(**{**SMALL, "dtype": "float32", **options})


@pytest.mark.parametrize(
    ("options", "tp", "words"),
    [
        ({}, RankMesh(tp=2), "tp 2 .*sequence_parallel=true"),
        ({"num_experts": 6}, RankMesh(dp=2, ep=2, tp=2, sequence=True), "num_experts is 6.*ep 2 × tp 2.* 1, 2, 3, 6"),
    ],
)
def test_experts_that_do_not_divide(options: dict[str, Any], tp: RankMesh, words: str) -> None:
    block = MoE(**{**SMALL, "dtype": "float32", **options}).layers[2]
    assert block.shards is not None
    with pytest.raises(ConfigError, match=words):
        block.shards(tp)
