"""GPT and Llama against forwards written by hand in numpy, and against what their papers say they must do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from jaxpipe.errors import StageError
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.stage.model.reference import logits as eager_logits
from models.attention import attention
from models.gpt import GPT
from models.llama import Llama, LlamaConfig, rotate
from models.loss import cross_entropy

TINY = {"vocab_size": 29, "d_model": 16, "num_layers": 1, "num_heads": 4, "seq_len": 8}
FACTORIES = {"gpt": GPT, "llama": Llama}
CASES = [
    ("gpt", {"tied": True}),
    ("gpt", {"tied": False}),
    ("llama", {"tied": False}),
    ("llama", {"tied": True, "num_kv_heads": 2, "qkv_bias": True}),
    ("llama", {"num_kv_heads": 1}),
]


def make(kind: str, **options: Any) -> Model:
    return FACTORIES[kind](**{**TINY, **options})


def random_batch(model: Model, size: int = 2, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shape = (size, model.seq_len)
    return {
        "tokens": jnp.asarray(rng.integers(0, model.vocab_size, shape), jnp.int32),
        "targets": jnp.asarray(rng.integers(0, model.vocab_size, shape), jnp.int32),
        "weights": jnp.asarray(rng.integers(0, 2, shape), jnp.float32),
    }


def random_params(model: Model, seed: int = 0) -> Any:
    """Return parameters of order one, so that every term of the forward shows in the result, biases and scales too."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 0.5, a.shape), a.dtype), shapes(model))


def shapes(model: Model) -> Any:
    return jax.eval_shape(lambda: init_params(model, 0))


def logits(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    return jax.jit(lambda params, tokens: eager_logits(model, params, tokens))(params, tokens)


def loss(model: Model, params: Any, batch: Any, key: jax.Array | None = None, train: bool = True) -> Any:
    """Return ``(loss_sum, weight_sum)``, compiled: a program compiles faster than each of its operations alone."""
    return jax.jit(lambda p, b, k: apply_model(model, p, b, k, train))(params, batch, key)


def loss_and_grad(model: Model, params: Any, batch: Any, **compiler_options: Any) -> Any:
    program = jax.jit(jax.value_and_grad(lambda p, b: apply_model(model, p, b)[0]), compiler_options=compiler_options)
    return program(params, batch)


# --- the forward, written by hand -------------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend_by_loops(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q [B, T, H, K], k and v [B, T, G, K]: one query at a time."""
    B, T, H, K = q.shape
    R = H // k.shape[2]
    out = np.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                scores = k[b, : t + 1, h // R] @ q[b, t, h] / np.sqrt(K)
                out[b, t, h] = softmax(scores) @ v[b, : t + 1, h // R]
    return out


def rotate_by_loops(x: np.ndarray, theta: float) -> np.ndarray:
    out = x.copy()
    half = x.shape[-1] // 2
    for t in range(x.shape[1]):
        for i in range(half):
            angle = t * theta ** (-i / half)
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            pair = x[:, t, :, [i, i + half]]  # [2, B, N]
            out[:, t, :, [i, i + half]] = np.einsum("ij,jbn->ibn", turn, pair)
    return out


def layer_norm(x: np.ndarray, p: Any, eps: float = 1e-5) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def rms_norm(x: np.ndarray, p: Any, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"]


def gpt_by_hand(params: Any, tokens: np.ndarray) -> np.ndarray:
    embed, block, head = params["embed"], params["block_00"], params["head"]
    D, _, H, K = block["qkv"]["kernel"].shape
    x = embed["tokens"]["embedding"][tokens] + embed["positions"]
    h = layer_norm(x, block["norm_attn"])
    flat = h @ block["qkv"]["kernel"].reshape(D, 3 * H * K) + block["qkv"]["bias"].reshape(-1)
    q, k, v = (part.reshape(*x.shape[:2], H, K) for part in np.split(flat, 3, axis=-1))
    attended = attend_by_loops(q, k, v).reshape(*x.shape[:2], H * K)
    x = x + attended @ block["out"]["kernel"].reshape(H * K, D) + block["out"]["bias"]
    h = layer_norm(x, block["norm_mlp"]) @ block["up"]["kernel"] + block["up"]["bias"]
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    x = x + h @ block["down"]["kernel"] + block["down"]["bias"]
    return layer_norm(x, head["norm"]) @ head.get("kernel", embed["tokens"]["embedding"]).T


def llama_by_hand(params: Any, tokens: np.ndarray, theta: float) -> np.ndarray:
    embed, block, head = params["embed"], params["block_00"], params["head"]
    D, G, S, K = block["qkv"]["kernel"].shape
    H = G * (S - 2)
    x = embed["tokens"]["embedding"][tokens]
    h = rms_norm(x, block["norm_attn"])
    qkv = np.einsum("btd,dgsk->btgsk", h, block["qkv"]["kernel"])
    if "bias" in block["qkv"]:
        qkv = qkv + block["qkv"]["bias"]
    q, k, v = qkv[:, :, :, :-2].reshape(*x.shape[:2], H, K), qkv[:, :, :, -2], qkv[:, :, :, -1]
    attended = attend_by_loops(rotate_by_loops(q, theta), rotate_by_loops(k, theta), v).reshape(*x.shape[:2], H * K)
    x = x + attended @ block["out"]["kernel"].reshape(H * K, D)
    h = rms_norm(x, block["norm_mlp"])
    gate, up = h @ block["gate_up"]["kernel"][:, 0], h @ block["gate_up"]["kernel"][:, 1]
    x = x + (gate / (1 + np.exp(-gate)) * up) @ block["down"]["kernel"]
    return rms_norm(x, head["norm"]) @ head.get("kernel", embed["tokens"]["embedding"]).T


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.usefixtures("x64")
def test_logits_and_loss_equal_the_forward_written_by_hand(kind: str, options: dict[str, Any]) -> None:
    model = make(kind, dtype="float64", **options)
    params = random_params(model)
    batch = random_batch(model)
    plain = jax.tree.map(np.asarray, params)
    tokens, targets, weights = (np.asarray(batch[name]) for name in ("tokens", "targets", "weights"))
    expected = gpt_by_hand(plain, tokens) if kind == "gpt" else llama_by_hand(plain, tokens, 10000.0)
    np.testing.assert_allclose(logits(model, params, batch["tokens"]), expected, rtol=1e-10, atol=1e-10)
    picked = np.take_along_axis(softmax(expected), targets[..., None], axis=-1)[..., 0]
    loss_sum, weight_sum = loss(model, params, batch)
    np.testing.assert_allclose(loss_sum, -(weights * np.log(picked)).sum(), rtol=1e-10)
    assert weight_sum == weights.sum()
    assert loss_sum.dtype == jnp.float64


# --- shapes, dtypes, layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_layers_shapes_and_dtypes(kind: str, options: dict[str, Any]) -> None:
    model = make(kind, **{**options, "num_layers": 2})
    assert [layer.name for layer in model.layers] == ["embed", "block_00", "block_01", "head", "loss"]
    assert model.layers[1].kind == model.layers[2].kind and model.layers[1].apply is model.layers[2].apply
    assert model.layers[0].reads == ("tokens",) and model.layers[-1].reads == ("targets", "weights")
    spec = model.batch_spec(3)
    assert {name: (s.shape, str(s.dtype)) for name, s in spec.items()} == {
        "tokens": ((3, 8), "int32"),
        "targets": ((3, 8), "int32"),
        "weights": ((3, 8), "float32"),
    }
    params = shapes(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    batch = random_batch(model, 3)
    for dtype in (jnp.float32, jnp.bfloat16):
        cast = jax.tree.map(lambda a, dtype=dtype: jax.ShapeDtypeStruct(a.shape, dtype), params)
        out = jax.eval_shape(lambda p, b: eager_logits(model, p, b["tokens"]), cast, batch)
        assert (out.shape, out.dtype) == ((3, 8, 29), dtype)
        loss_sum, weight_sum = jax.eval_shape(lambda p, b: apply_model(model, p, b), cast, batch)
        assert (loss_sum.dtype, weight_sum.dtype, loss_sum.shape) == (jnp.float32, jnp.float32, ())


def test_bfloat16_stays_near_float32() -> None:
    model = make("llama", num_kv_heads=2)
    params, batch = init_params(model, 1), random_batch(model)
    exact, _ = loss(model, params, batch)
    rough, _ = loss(model, jax.tree.map(lambda a: a.astype(jnp.bfloat16), params), batch)
    np.testing.assert_allclose(rough, exact, rtol=2e-2)


def test_parameter_counts() -> None:
    V, D, L, T, H = 29, 16, 3, 8, 4
    block = (3 * D * D + 3 * D) + (D * D + D) + (4 * D * D + 4 * D) + (4 * D * D + D) + 4 * D
    for tied in (True, False):
        expected = V * D + T * D + L * block + 2 * D + (0 if tied else V * D)
        assert count(make("gpt", num_layers=L, tied=tied)) == expected
    for kv_heads, bias, mlp in ((4, False, 40), (2, True, 24), (1, False, 8)):
        K = D // H
        qkv = D * (H + 2 * kv_heads) * K + ((H + 2 * kv_heads) * K if bias else 0)
        expected = 2 * V * D + L * (qkv + D * D + 3 * D * mlp + 2 * D) + D
        assert count(make("llama", num_layers=L, num_kv_heads=kv_heads, qkv_bias=bias, mlp_size=mlp)) == expected


def count(model: Model) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes(model)))


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_initialisation_is_that_of_gpt2(kind: str) -> None:
    params = make(kind, d_model=64, num_layers=2, vocab_size=256, tied=False)
    tree = init_params(params, 0)
    for layer in ("block_00", "block_01"):
        for name, std in (("qkv", 0.02), ("out", 0.01), ("down", 0.01)):  # 0.02 / sqrt(2 · 2)
            assert abs(float(tree[layer][name]["kernel"].std()) / std - 1) < 0.05
    assert abs(float(tree["embed"]["tokens"]["embedding"].std()) / 0.02 - 1) < 0.05
    assert not jnp.array_equal(tree["block_00"]["qkv"]["kernel"], tree["block_01"]["qkv"]["kernel"])
    repeat, other = init_params(params, 0), init_params(params, 1)
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, tree, repeat)))
    assert not jnp.array_equal(tree["head"]["kernel"], other["head"]["kernel"])


# --- what the architecture promises -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), [("gpt", {}), ("llama", {"num_kv_heads": 2})])
def test_a_token_changes_no_logit_before_it(kind: str, options: dict[str, Any]) -> None:
    model = make(kind, num_layers=2, **options)
    params, tokens = random_params(model), random_batch(model)["tokens"]
    before = logits(model, params, tokens)
    after = logits(model, params, tokens.at[:, 5].set((tokens[:, 5] + 1) % 29))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.all(jnp.any(before[:, 5:] != after[:, 5:], axis=-1))


def test_a_prefix_alone_gives_the_same_logits() -> None:
    for kind in ("gpt", "llama"):
        model = make(kind)
        params, tokens = random_params(model), random_batch(model)["tokens"]
        full, part = logits(model, params, tokens), logits(model, params, tokens[:, :3])
        np.testing.assert_allclose(full[:, :3], part, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("x64")
def test_grouped_query_attention_is_multi_head_attention_with_repeated_heads() -> None:
    grouped = make("llama", num_kv_heads=2, qkv_bias=True, dtype="float64")
    params = random_params(grouped)
    qkv = params["block_00"]["qkv"]

    def repeat(a: jax.Array) -> jax.Array:
        """[…, G, R + 2, K] → […, H, 3, K]: every query head with a copy of its key and value."""
        q = a[..., :2, :].reshape(*a.shape[:-3], 4, 1, 4)
        kv = jnp.repeat(a[..., 2:, :], 2, axis=-3)
        return jnp.concatenate([q, kv], axis=-2)

    full = {**params, "block_00": {**params["block_00"], "qkv": jax.tree.map(repeat, qkv)}}
    tokens = random_batch(grouped)["tokens"]
    expected = logits(make("llama", qkv_bias=True, dtype="float64"), full, tokens)
    np.testing.assert_allclose(logits(grouped, params, tokens), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_rotation_keeps_lengths_and_sees_only_distance() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(np.broadcast_to(rng.normal(size=8), (1, 12, 1, 8))) for _ in range(2))
    turned_q, turned_k = rotate(q, 100.0), rotate(k, 100.0)
    np.testing.assert_array_equal(turned_q[:, 0], q[:, 0])  # position 0 is not turned
    np.testing.assert_allclose(jnp.linalg.norm(turned_q, axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-12)
    products = np.asarray(turned_q[0, :, 0] @ turned_k[0, :, 0].T)  # [T, T]
    for distance in range(-11, 12):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12)
    assert abs(products[0, 0] - products[0, 5]) > 1e-3


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.usefixtures("x64")
def test_a_tied_head_adds_its_gradient_to_the_embedding(kind: str) -> None:
    tied, untied = make(kind, tied=True, dtype="float64"), make(kind, tied=False, dtype="float64")
    params, batch = random_params(tied), random_batch(tied)
    assert "kernel" not in params["head"]
    embedding = params["embed"]["tokens"]["embedding"]
    split = {**params, "head": {**params["head"], "kernel": embedding}}
    np.testing.assert_array_equal(logits(tied, params, batch["tokens"]), logits(untied, split, batch["tokens"]))
    (_, ours), (_, parts) = loss_and_grad(tied, params, batch), loss_and_grad(untied, split, batch)
    total = parts["embed"]["tokens"]["embedding"] + parts["head"]["kernel"]
    np.testing.assert_allclose(ours["embed"]["tokens"]["embedding"], total, rtol=1e-10, atol=1e-12)


def test_qkv_bias_adds_one_leaf_a_block() -> None:
    plain, biased = shapes(make("llama")), init_params(make("llama", qkv_bias=True), 0)
    assert set(plain["block_00"]["qkv"]) == {"kernel"}
    assert set(biased["block_00"]["qkv"]) == {"kernel", "bias"}
    assert not jnp.any(biased["block_00"]["qkv"]["bias"])
    assert {"bias"} & {str(k.key) for path, _ in jax.tree_util.tree_leaves_with_path(plain) for k in path} == set()


# --- loss -------------------------------------------------------------------------------------------------------------


def test_positions_of_weight_zero_count_for_nothing() -> None:
    model = make("gpt")
    params, batch = random_params(model), random_batch(model)
    masked = {**batch, "weights": batch["weights"].at[:, 4:].set(0)}
    junk = {**masked, "targets": masked["targets"].at[:, 4:].set(-100)}
    gradient = jax.jit(jax.value_and_grad(lambda p, b: apply_model(model, p, b)[0]))
    first, second = gradient(params, masked), gradient(params, junk)
    assert jnp.isfinite(first[0])
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, first, second)))
    silent = {**batch, "weights": jnp.zeros_like(batch["weights"])}
    loss_sum, grads = gradient(params, silent)
    assert loss_sum == 0 and not any(jnp.any(g) for g in jax.tree.leaves(grads))
    assert loss(model, params, silent)[1] == 0


def test_targets_outside_the_vocabulary_show_as_nan() -> None:
    for bad in (-1, 5):
        loss = cross_entropy(jnp.zeros((1, 2, 5)), jnp.asarray([[0, bad]], jnp.int32))
        assert jnp.isfinite(loss[0, 0]) and jnp.isnan(loss[0, 1])


@pytest.mark.usefixtures("x64")
def test_cross_entropy_gradient_equals_that_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    x, targets = jnp.asarray(rng.normal(0, 3, (2, 3, 7))), jnp.asarray(rng.integers(0, 7, (2, 3)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(2, 3)))

    def plain(x: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(x), targets[:, :, None], axis=-1)[:, :, 0]

    np.testing.assert_allclose(cross_entropy(x, targets), plain(x), rtol=1e-12)
    ours, expected = (
        jax.grad(lambda x, f=f: jnp.sum(weights * f(x)))(x) for f in (lambda x: cross_entropy(x, targets), plain)
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-12)


# --- attention and dropout --------------------------------------------------------------------------------------------


def test_every_residual_that_grows_with_time_squared_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    T = 24
    q = jnp.ones((1, T, 2, 4), jnp.bfloat16)

    def attend(q: jax.Array) -> jax.Array:
        return attention(q, q, q, dropout=0.1, key=jax.random.key(0))

    print_saved_residuals(attend, q)
    square = [line for line in capsys.readouterr().out.splitlines() if f"{T},{T}]" in line]
    constants = [line for line in square if "broadcast_in_dim" in line]  # the zeros of dropped probabilities
    assert len(square) == 4 and all("attn_scores" in line for line in square if line not in constants)
    assert not any(line.startswith("f32") for line in square)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_dropout_depends_on_the_key_alone(kind: str) -> None:
    model = make(kind, num_layers=2, dropout=0.2)
    params, batch = random_params(model), random_batch(model)
    total = jax.jit(lambda key: apply_model(model, params, batch, key)[0])
    first, repeat, other = total(jax.random.key(1)), total(jax.random.key(1)), total(jax.random.key(2))
    assert first == repeat and first != other
    quiet, _ = loss(model, params, batch, train=False)
    without, _ = loss(make(kind, num_layers=2), params, batch)
    assert quiet == without and quiet != first
    with pytest.raises(StageError, match=r"give key=… or train=False"):
        apply_model(model, params, batch)


def test_dropout_keeps_the_mean_and_drops_the_rate() -> None:
    v = jnp.ones((4, 16, 2, 8))
    attend = jax.jit(lambda seed: attention(v, v, v, dropout=0.25, key=jax.random.key(seed)))
    out = jnp.stack([attend(i) for i in range(20)])
    assert abs(float(out.mean()) - 1) < 0.02
    first = attend(0)[:, 0]  # position 0 sees itself alone: dropped or scaled
    assert set(np.unique(np.asarray(first).round(4))) <= {0.0, np.float32(1.3333)}


@pytest.mark.parametrize(
    ("kind", "dtype", "d_model", "T"),
    [
        ("gpt", "float32", 32, 10),
        *(
            pytest.param(*x, marks=pytest.mark.soak)
            for x in [("llama", "bfloat16", 32, 10), ("gpt", "bfloat16", 16, 8)]
        ),
    ],
)
def test_gradients_compile_where_jax_0_10_may_abort(kind: str, dtype: str, d_model: int, T: int) -> None:
    """jax#39264: XLA's CPU backend, as users have it, aborts on gradients of some small attention models."""
    model = make(kind, d_model=d_model, seq_len=T)
    params = jax.tree.map(lambda a: np.full(a.shape, 0.1, dtype), shapes(model))
    value, grads = loss_and_grad(model, params, random_batch(model, 8), xla_cpu_use_fusion_emitters=True)
    assert jnp.isfinite(value) and all(np.isfinite(np.asarray(g, "f4")).all() for g in jax.tree.leaves(grads))


def test_llama_sizes_have_the_usual_defaults() -> None:
    config = LlamaConfig(d_model=4096, num_heads=32)
    assert (config.kv_heads, config.head_size, config.mlp_width) == (
        32,
        128,
        10944,
    )  # 8/3 · 4096 up to a multiple of 32


def test_too_many_tokens_for_learned_positions() -> None:
    model = make("gpt")
    with pytest.raises(StageError, match=r"8 positions.*9 tokens.*8"):
        logits(model, random_params(model), jnp.zeros((1, 9), jnp.int32))
