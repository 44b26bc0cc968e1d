"""The door to attention: masks against plain softmax, and cuDNN's kernel traced, split and lowered where there is no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

from jaxpipe._jax_compat import Jaxpr, sub_jaxprs
from jaxpipe.axes import RankMesh
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.mesh import AnyMesh, mesh_over_none, pipeline_submeshes
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.jaxprs import PEERS, jaxpr_flops
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.params import compute_avals
from jaxpipe.stage.model.reference import apply_model, init_params
from models.attention import attention
from models.clip import CLIP
from models.gpt import GPT
from models.llama import Llama
from models.vlm import VLM

GPU = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
B, T, D, H, K = 2, 64, 128, 4, 32
SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": D, "num_heads": H, "seq_len": T, "num_layers": 1}
FORWARD, BACKWARD = (f"dot_product_attention_{pass_}_wrapper" for pass_ in ("fwd", "bwd"))


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX finds a cuDNN; nothing that needs it runs."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


def gpus(tp: int = 1) -> AnyMesh:
    return mesh_over_none(RankMesh(tp=tp), GPU)


def block_of(model: Model, mesh: AnyMesh, recompute: str = "none", dtype: Any = jnp.bfloat16) -> StageFunctions:
    stages = [model.layers[:1], model.layers[1:2], model.layers[2:]]
    avals = compute_avals(model.layers, dtype, jnp.float32)
    tp = RankMesh(tp=mesh.shape["tp"])
    return build_all(stages, avals, model.batch_spec(B), [mesh] * 3, recompute, tp=tp)[1]


def kernels(stage: StageFunctions, op: str) -> Counter[str]:
    function = stage.evaluation if op == "E" else stage.functions[op]
    names = (eqn.primitive.name for eqn in function.jaxpr.jaxpr.eqns)
    return Counter(name for name in names if "attention" in name)


def saved(stage: StageFunctions) -> list[tuple[tuple[int, ...], str]]:
    f = stage.functions["F"]
    avals = [a for p, a in zip(f.outputs, f.avals_out, strict=True) if p.kind == "res"]
    return [(tuple(n for n in a.shape if n > 1), str(a.dtype)) for a in avals]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("causal", "window", "lengths", "segments"),
    [(True, None, None, None), (True, 3, None, None), (False, None, [6, 2], None), (True, 2, [3, 6], "001122 000011")],
)
def test_masks_and_gradients_are_those_of_plain_softmax(
    causal: bool, window: int | None, lengths: list[int] | None, segments: str | None
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 6, 4, 4)), rng.normal(size=(2, 6, 2, 4)), rng.normal(size=(2, 6, 2, 4))
    n = None if lengths is None else np.asarray(lengths, np.int32)
    row, column = np.arange(6)[:, None], np.arange(6)[None, :]
    visible = (column <= row) & (column > row - (window or 6)) if causal else np.full((6, 6), True)
    present = np.arange(6) < np.asarray(lengths or [6, 6])[:, None]
    documents = np.array([[int(c) for c in row] for row in (segments or "000000 000000").split()], np.int32)
    same = documents[:, :, None] == documents[:, None, :]
    cotangent = rng.normal(size=q.shape) * present[:, :, None, None]

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2.0
        mask = jnp.asarray(visible[None, None] & present[:, None, None, :] & same[:, None])
        return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)

    @partial(jax.jit, static_argnums=0)
    def both_passes(attend: Any, *operands: jax.Array) -> Any:
        out, pullback = jax.vjp(attend, *operands)
        return out[present], pullback(jnp.asarray(cotangent))

    options = {"segments": jnp.asarray(documents)} if segments else {}
    ours = both_passes(partial(attention, causal=causal, window=window, lengths=n, **options), q, k, v)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), ours, both_passes(plain, q, k, v))


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("of", "recompute"),
    [(GPT, "none"), (GPT, "cheap"), (GPT, "mlp"), (Llama, "none"), (Llama, "dots"), (Llama, "flash"), (Llama, "full")],
)
def test_a_split_keeps_the_kernel_whole(of: Any, recompute: str) -> None:
    stage = block_of(of(**SIZES, attention="cudnn"), gpus(), recompute)
    runs_twice = recompute == "full"
    assert kernels(stage, "F") == kernels(stage, "E") == {FORWARD: 1}
    assert kernels(stage, "B") == kernels(stage, "BW") == {BACKWARD: 1} | ({FORWARD: 1} if runs_twice else {})
    assert not kernels(stage, "W")
    heads, statistics = ((B, T, H, K), "bfloat16"), ((B, H, T), "float32")
    assert (statistics in saved(stage)) is not runs_twice
    assert recompute in ("cheap", "dots", "full") or saved(stage).count(heads) == 4, "q, k, v and what it returns"
    assert not any(shape.count(T) > 1 for shape, _ in saved(stage)), "no scores"


@pytest.mark.usefixtures("cudnn")
def test_what_the_kernel_saves_and_computes() -> None:
    fused, plain = (block_of(GPT(**SIZES, attention=kernel), gpus()) for kernel in ("auto", "xla"))
    scores, statistics = 2 * B * H * T * T, 4 * B * H * T
    assert fused.residual_bytes == plain.residual_bytes - scores + statistics
    pairs, square = B * H * K * T * (T + 1) // 2, B * H * K * T * T
    assert fused.flops["F"] - 2 * 2 * pairs == plain.flops["F"] - 2 * 2 * square
    assert fused.flops["B"] - 5 * 2 * pairs == plain.flops["B"] - 4 * 2 * square, "q kᵀ again"
    assert fused.flops["W"] == plain.flops["W"]
    for op in ("F", "B", "BW"):
        assert jaxpr_flops(fused.functions[op].jaxpr, attention=PEERS) == plain.flops[op], "attention counted whole"
    few = block_of(Llama(**SIZES, window=16), gpus()).flops["F"]
    assert block_of(Llama(**SIZES), gpus()).flops["F"] - few == 2 * 2 * B * H * K * (48 * 49 // 2)


@pytest.mark.usefixtures("cudnn")
def test_shards_have_their_own_heads() -> None:
    stage = block_of(Llama(**SIZES, num_kv_heads=2, attention="cudnn"), gpus(tp=2))
    (eqn,) = (e for e in stage.functions["F"].jaxpr.jaxpr.eqns if e.primitive.name == FORWARD)
    assert [v.aval.shape for v in eqn.invars[:3]] == [(B, T, H // 2, K), (B, T, 1, K), (B, T, 1, K)]
    assert kernels(stage, "B") == {BACKWARD: 1}


@pytest.mark.usefixtures("cudnn")
def test_masks_reach_the_kernel() -> None:
    q, n = jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16), jax.ShapeDtypeStruct((B,), jnp.int32)

    def total(q: jax.Array, n: jax.Array | None, **options: Any) -> jax.Array:
        return attention(q, q, q, kernel="cudnn", lengths=n, **options).astype(jnp.float32).sum()

    def walk(jaxpr: Jaxpr) -> Iterator[tuple[str, str, int]]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in (FORWARD, BACKWARD):
                yield eqn.primitive.name, eqn.params["mask_type"].name, eqn.params["sliding_window_length"] or 0
            for body in sub_jaxprs(eqn):
                yield from walk(body)

    def calls(n: Any, **options: Any) -> list[tuple[str, str, int]]:
        with jax.sharding.use_abstract_mesh(gpus()):
            return list(walk(jax.make_jaxpr(jax.grad(lambda q, n: total(q, n, **options)))(q, n).jaxpr))

    both = (FORWARD, BACKWARD)
    assert calls(None) == [(name, "CAUSAL", 0) for name in both]
    assert calls(None, causal=False) == [(name, "NO_MASK", 0) for name in both]
    assert calls(n, window=16) == [(name, "PADDING_CAUSAL", 16) for name in both]
    assert calls(n, causal=False) == [(name, "PADDING", 0) for name in both]


def test_on_a_cpu_auto_is_xla_and_cudnn_is_refused() -> None:
    cpu = pipeline_submeshes(1)[0]
    auto, xla = (block_of(GPT(**SIZES, attention=kernel), cpu) for kernel in ("auto", "xla"))
    for op in ("F", "B", "W", "BW"):
        assert str(auto.functions[op].jaxpr) == str(xla.functions[op].jaxpr)
    with pytest.raises(StageError, match="attention=cudnn"):
        block_of(GPT(**SIZES, attention="cudnn"), cpu)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({}, jnp.float32, "Q must be fp16/bf16/.*, got float32"),
        ({"num_heads": 8, "d_model": 72}, jnp.bfloat16, "The head dim must be .* a multiple of 8, but got 9"),
        ({"num_heads": 1, "d_model": 264}, jnp.bfloat16, "The head dim must be <= .*, but got 264"),
    ],
)
def test_what_cudnn_can_not_do_is_one_line_and_auto_does_it_otherwise(
    options: dict[str, Any], dtype: Any, reason: str
) -> None:
    sizes = SIZES | options
    with pytest.raises(StageError, match=rf"^attention=cudnn can't do this: {reason}; use attention=auto or xla"):
        block_of(GPT(**sizes, attention="cudnn"), gpus(), dtype=dtype)
    assert not kernels(block_of(GPT(**sizes), gpus(), dtype=dtype), "F")


def test_without_cudnn_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", None)
    with pytest.raises(StageError, match="attention=cudnn"):
        block_of(GPT(**SIZES, attention="cudnn"), gpus())


@pytest.mark.usefixtures("cudnn")
def test_dropout_is_not_for_cudnn() -> None:
    with pytest.raises(ConfigError, match="'cudnn'"):
        GPT(**SIZES, dropout=0.1, attention="cudnn")
    assert not kernels(block_of(GPT(**SIZES, dropout=0.1), gpus()), "F")


@pytest.mark.parametrize("of", [GPT, Llama, CLIP, VLM])
def test_every_model_has_the_option(of: Any) -> None:
    of(attention="cudnn")
    with pytest.raises(ConfigError, match="'flash'"):
        of(attention="flash")


def test_a_model_of_the_kernel_has_the_same_parameters_and_is_evaluated_without() -> None:
    models = [Llama(**SIZES, attention=kernel) for kernel in ("xla", "cudnn")]
    params = [jax.eval_shape(partial(init_params, model), 0) for model in models]
    assert params[0] == params[1]
    evaluated = [
        jax.make_jaxpr(partial(apply_model, model, train=False))(params[0], model.batch_spec(B)) for model in models
    ]
    assert str(evaluated[0]) == str(evaluated[1])
