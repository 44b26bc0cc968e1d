"""Context parallelism (``stp.txt`` section 5.3) against runs whose sequences are whole: layout, losses, gradients, dropout."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.axes import CP_METHODS, RankMesh
from jaxpipe.context_parallel import joined_times, laid_out
from jaxpipe.errors import ConfigError, JaxpipeError, StageError
from jaxpipe.runtime.assembly import Assembly
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.train.step import TrainStep
from models.clip import CLIP
from models.gpt import GPT
from models.llama import Llama
from tests.support import sharded
from tests.support.parallel_cases import (
    SEQ,
    Case,
    assert_close,
    batches,
    on_one_device,
    optimizer,
    params_for,
    pipeline,
    steps_on_one_device,
)

# layout


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_zigzag_divides_what_a_causal_mask_leaves_evenly(cp: int) -> None:
    T = 16
    positions = np.arange(T)[None, None] + np.zeros((2, 4, 1), int)
    layout = laid_out({"tokens": positions, "rows": positions[:, :, 0]}, ("tokens",), RankMesh(dp=2, cp=cp))
    assert (layout["rows"].shape, layout["tokens"].shape) == ((2, 4 * cp), (2, 4 * cp, T // cp))
    shards = layout["tokens"][0].reshape(2, cp, 2, T // cp)[1, :, 0]  # of one sequence
    np.testing.assert_array_equal(joined_times([s[None] for s in shards])[0], np.arange(T))
    pairs = (shards + 1).sum(axis=1)  # pairs of a query and a key
    assert pairs.max() == pairs.mean()


# a model on shards


def _model(name: str, **options: Any) -> Model:
    common = {"vocab_size": 16, "d_model": 16, "num_layers": 1, "num_heads": 4, "seq_len": SEQ, "dtype": "float64"}
    if name == "gpt":
        return GPT(**{**common, "mlp_ratio": 1, **options})
    return Llama(**{**common, "num_kv_heads": 2, "mlp_size": 8, **options})


def _batch(model: Model, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a batch of uneven weights: shard 1 of two has none."""
    rng = np.random.default_rng(seed)
    shape = (2, SEQ)
    arrays = {name: rng.integers(0, 16, shape).astype(np.int32) for name in ("tokens", "targets")}
    weights = rng.random(shape).astype(np.float32)
    weights[:, SEQ // 4 : 3 * SEQ // 4] = 0
    if "segments" in model.batch_spec(1):
        arrays["segments"] = np.repeat([[0] * 3 + [1] * (SEQ - 3)], 2, axis=0).astype(np.int32)
    return {**arrays, "weights": weights}


def _agree(model: Model, tp: RankMesh) -> None:
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), init_params(model, 0))
    batch, key = _batch(model), jax.random.key(7)

    def unsharded_loss(params: Any) -> Any:
        loss, weight = apply_model(model, params, {n: jnp.asarray(a) for n, a in batch.items()}, key)
        return loss, weight

    (expected, weight), grads = jax.jit(jax.value_and_grad(unsharded_loss, has_aux=True))(params)
    (got, sharded_weight), sharded_grads = sharded.loss_and_grads(model, params, batch, tp, key=key)  # type: ignore[arg-type]
    np.testing.assert_allclose([got, sharded_weight], [expected, weight], rtol=1e-12)
    assert_close(sharded_grads, grads, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("llama", "gather", {"dropout": 0.25}),
        ("gpt", "ring", {"dropout": 0.25}),
        pytest.param("gpt", "heads", {"dropout": 0.25}, marks=pytest.mark.soak),
        *(
            pytest.param(name, method, options, marks=pytest.mark.soak)
            for name in ("gpt", "llama")
            for method in CP_METHODS
            for options in ({"mask": "document"}, {"dropout": 0.1, "mask": "document"})
        ),
        *(pytest.param("llama", method, {"window": 3}, marks=pytest.mark.soak) for method in CP_METHODS),
    ],
)
def test_shards_draw_and_see_what_one_device_does(name: str, method: str, options: dict[str, Any]) -> None:
    """Dropout too: the masks are those of whole sequences."""
    _agree(_model(name, **options), RankMesh(cp=2, cp_method=method))


# memory and work


@pytest.mark.parametrize(
    ("method", "recompute"),
    [
        ("gather", "none"),
        ("ring", "cheap+attention"),
        *(pytest.param("ring", policy, marks=pytest.mark.soak) for policy in ("flash", "full")),
        *(pytest.param("heads", policy, marks=pytest.mark.soak) for policy in ("none", "cheap")),
        *(
            pytest.param("gather", policy, marks=pytest.mark.soak)
            for policy in ("cheap", "flash", "flash+gather", "full")
        ),
    ],
)
def test_activations_halve_and_a_ring_computes_what_the_mask_leaves(method: str, recompute: str) -> None:
    T, D, placement = 64, 16, generate("1f1b", 1, 1).placement
    model = GPT(vocab_size=16, d_model=D, num_layers=1, num_heads=4, seq_len=T, mlp_ratio=2, attention="xla")

    def stage(cp: int) -> StageFunctions:
        tp = RankMesh(cp=cp, cp_method=method)
        return Assembly.of(model, placement, microbatch_size=1, tp=tp, recompute=recompute).stages[0]

    one, *divided = (stage(cp) for cp in (1, 2, 4))
    for cp, part in zip((2, 4), divided, strict=True):
        assert part.residual_bytes == pytest.approx(one.residual_bytes / cp, rel=0.05)
        blocks = (
            (2 * cp + 1) / (4 * cp) if method == "ring" else 1.0
        )  # that are computed, of a shard's queries and all keys
        saved = (1 - blocks) * 4 * (T // cp) * T * D
        assert part.flops["F"] == pytest.approx(one.flops["F"] / cp - saved, rel=0.01)


def test_gathering_again_is_no_policy_of_its_own_here() -> None:
    model, placement = _model("gpt", dtype="float32"), generate("1f1b", 1, 1).placement
    tp = RankMesh(cp=2)
    (stage,) = Assembly.of(model, placement, microbatch_size=1, tp=tp, recompute="gather").stages
    (plain,) = Assembly.of(model, placement, microbatch_size=1, tp=tp).stages
    assert stage.residual_bytes == plain.residual_bytes and not plain.notes
    assert stage.notes == ("recompute=gather finds nothing that sequence parallelism gathers and recomputes nothing",)


# pipelines


GRID = [
    Case(name, 2, tp, dp, family, sequence, zero1=dp > 1, cp=cp, cp_method=method)
    for cp, tp, dp in itertools.product((1, 2, 4), (1, 2), (1, 2))
    for name, family, method in (("gpt-tied", "stp", "gather"), ("llama", "1f1b", "heads"), ("gpt", "v-zb", "ring"))
    for sequence in {False, tp > 1 and cp == 2}
    if not (method == "heads" and name == "llama" and cp * tp > 2)
]
CHEAP = Case("gpt-tied", 2, 1, 1, "1f1b", cp=2)


def _elsewhere(test: str, devices: int) -> None:
    """Run the test in a process with so many emulated devices."""
    flag = "--xla_force_host_platform_device_count="
    flags = [x for x in os.environ["XLA_FLAGS"].split() if not x.startswith(flag)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "soak", "-p", "no:cacheprovider", f"{__file__}::{test}"],
        env={**os.environ, "XLA_FLAGS": " ".join([*flags, f"{flag}{devices}"])}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", [CHEAP, *(pytest.param(c, marks=pytest.mark.soak) for c in GRID)], ids=str)
def test_pipelines_equal_one_device(case: Case) -> None:
    if (num_devices := case.pp * case.cp * case.tp * case.dp) > jax.device_count():
        _elsewhere(f"test_pipelines_equal_one_device[{case}]", num_devices)
        return
    data, params = batches(1), params_for(case)
    data[0]["weights"][0, :, SEQ // 4 : 3 * SEQ // 4] = 0  # shard 1 of two has no weight in a microbatch
    pipe = pipeline(case)
    loss, grads = pipe.loss_and_grads(pipe.place(params), data[0])
    expected_loss, expected_grads = on_one_device(case, params, data[0])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    assert_close(grads, expected_grads, rtol=1e-12, atol=1e-14)
    if case is CHEAP:
        return
    step = TrainStep(pipe, optimizer(), clip_norm=0.05, zero1=case.zero1)
    expected, _ = steps_on_one_device(case, 0.05, data)
    state, metrics = step(step.init(params), data[0])
    assert float(metrics.weight) == data[0]["weights"].sum()
    assert_close(step.by_layer(state)[0], expected, rtol=1e-7, atol=1e-10)
    logits = pipe.predict(state.compute, {"tokens": data[0]["tokens"]})
    assert logits.shape == (data[0]["tokens"].size // SEQ, SEQ, 24)


@pytest.mark.soak
@pytest.mark.parametrize("method", CP_METHODS)
def test_braids_have_the_bits_of_what_they_braid(method: str) -> None:
    model, (batch,) = _model("gpt", dtype="float32", num_layers=5), batches(1)
    params = init_params(model, 0)

    def run(braid: bool) -> Any:
        tp = RankMesh(tp=2, sequence=True, cp=2, cp_method=method)
        pipe = Pipeline.build(model, generate("stp", 2, 4), microbatch_size=8, tp=tp, braid=braid)
        return pipe.loss_and_grads(
            pipe.place(params), {k: v % 16 if v.dtype == np.int32 else v for k, v in batch.items()}
        )

    jax.tree.map(np.testing.assert_array_equal, run(True), run(False))


@pytest.mark.usefixtures("x64")
@pytest.mark.soak
def test_evaluation_gives_outputs_in_the_order_of_time() -> None:
    case = Case("gpt", 1, 2, 1, cp=2)
    (batch,), params = batches(1), params_for(case)
    single, divided = (pipeline(c) for c in (Case("gpt", 1, 1, 1), case))
    expected, got = (p.predict(p.place(params), {"tokens": batch["tokens"]}) for p in (single, divided))
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
    sums = [p.evaluate(p.place(params), batch) for p in (single, divided)]
    np.testing.assert_allclose(*sums, rtol=1e-12)


# what can't be


def _refused(model: Model, tp: RankMesh, error: type[JaxpipeError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        Pipeline.build(model, generate("1f1b", 1, 2), microbatch_size=2, tp=tp)
    assert "\n" not in str(caught.value)


def test_what_does_not_divide_is_told() -> None:
    _refused(GPT(seq_len=6), RankMesh(cp=2), ConfigError, "a multiple of 4 such as 8")
    _refused(CLIP(), RankMesh(cp=2), ConfigError, "use cp 1")
    _refused(GPT(num_heads=3, d_model=12), RankMesh(cp=2, cp_method="heads"), StageError, "3 key/value heads")
    _refused(GPT(attention="cudnn"), RankMesh(cp=2), StageError, "use cp_method=heads")
    with pytest.raises(ConfigError, match="use gather"):
        RankMesh(cp=2, cp_method="star")
