"""Llama: RMSNorm before each branch, rotary positions, SwiGLU MLP, grouped-query attention, no biases.

    B batch   T time   D d_model   H query heads   G key/value heads   R = H / G   K = D / H   F mlp_size   V vocabulary
    t tensor-parallel shards

After Touvron et al., "LLaMA" (2023) and "Llama 2" (2023); with ``qkv_bias=True`` the block is that of Qwen2 (2024), with
``window`` that of Mistral 7B (2023). Rotary positions after Su et al., "RoFormer" (2021), pairing dimension i with i + K/2.
Initialisation is GPT-2's: N(0, 0.02), and 0.02 / √(2L) for the projections that write to the residual stream of L blocks.

q, k and v are one projection [D, G, R + 2, K]: for each key/value head its R query heads, then its key, then its value. Gate
and up are one projection [D, 2, F]. Compute follows the dtype of the parameters it is given. RMSNorm, rotation, softmax and
loss run in float32 (float64 if given float64). Not modelled: rope scaling for longer contexts.

On t shards each has H/t query heads, G/t key/value heads, F/t of the MLP and V/t words. Where t is larger than G, t/G shards
compute the same key and value head and divide its query heads: qkv then lies whole on each shard, which takes its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import Layer, LayerContext, Matrix, Model, Params, Path, Shard
from jaxpipe.stage.model.options import build_options, check_sizes, divisors
from jaxpipe.tensor_parallel import (
    ONE_SHARD,
    Dropout,
    TensorParallel,
    VocabParallelEmbed,
    add_branch,
    check_shards,
    column_parallel,
    own_query_heads,
    row_parallel,
    shard_key,
    vocab_parallel_logits,
)
from models.attention import attention, check_attention
from models.loss import loss_layer


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Options of :func:`Llama`.

    ``num_kv_heads``: None means as many as ``num_heads`` (multi-head attention). ``mlp_size``: None means 8/3 of ``d_model``
    rounded up to a multiple of 32. ``window``: how many positions each one sees, itself the last of them; None: all up to
    itself. ``attention``: ``auto``, ``xla`` or ``cudnn`` (``models/attention.py``). ``tied``: the head uses the token
    embedding. ``dropout`` (which Llama trains without) applies to attention probabilities and to what each branch adds.
    ``dtype``: what parameters are created in.
    """

    vocab_size: int = 256
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    seq_len: int = 128
    mlp_size: int | None = None
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    window: int | None = None
    attention: str = "auto"
    norm_eps: float = 1e-5
    dropout: float = 0.0
    tied: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        names = ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "seq_len", "mlp_size", "window")
        check_sizes("Llama", **{name: getattr(self, name) for name in names})
        even = divisors(self.d_model // 2)
        if self.d_model % 2:
            raise ConfigError(f"Llama: d_model is {self.d_model}; rotary positions need an even number")
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"Llama: num_heads is {self.num_heads}, which does not divide d_model {self.d_model}; use one of {even}"
            )
        if self.head_size % 2:
            raise ConfigError(
                f"Llama: a head has d_model / num_heads = {self.head_size} dimensions, and rotary positions need an even "
                f"number; use num_heads of {even}"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"Llama: num_kv_heads is {self.kv_heads}, which does not divide num_heads {self.num_heads}; "
                f"use one of {divisors(self.num_heads)}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"Llama: dropout is {self.dropout}; want 0 or more and less than 1")
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"Llama: norm_eps is {self.norm_eps}; want a small positive number such as 1e-5")
        check_attention("Llama", self.attention, self.dropout)
        if not 1 < self.rope_theta < float("inf"):
            raise ConfigError(f"Llama: rope_theta is {self.rope_theta}; want a number above 1 such as 10000")
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise ConfigError(f"Llama: dtype is {self.dtype!r}; use float32, float64 or bfloat16")

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        return -(-8 * self.d_model // 96) * 32 if self.mlp_size is None else self.mlp_size


def Llama(**options: Any) -> Model:  # noqa: N802 - named as the model is
    """A Llama of the given :class:`LlamaConfig` options: layers ``embed``, ``block_00`` …, ``head``, ``loss``."""
    config = build_options(LlamaConfig, options, "models.llama:Llama")
    tokens = jax.ShapeDtypeStruct((1, config.seq_len), jnp.int32)
    embed = from_linen(
        "embed",
        Embed(config),
        example=(tokens,),
        reads=("tokens",),
        kind="llama.embed",
        shards=partial(embed_shards, config),
    )
    layers = (embed, *block_layers(config), head_layer(config), loss_layer())

    def batch_spec(microbatch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        shape = (microbatch_size, config.seq_len)
        return {
            "tokens": jax.ShapeDtypeStruct(shape, jnp.int32),
            "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
            "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
        }

    return Model("llama", layers, batch_spec, config.vocab_size, config.seq_len)


def block_layers(config: LlamaConfig) -> list[Layer]:
    """The layers ``block_00`` …"""
    hidden = jax.ShapeDtypeStruct((1, config.seq_len, config.d_model), config.dtype)
    block = from_linen(
        "block",
        Block(config),
        example=(hidden,),
        uses_key=config.dropout > 0,
        kind="llama.block",
        shards=partial(_block_shards, config),
    )
    block = replace(block, apply=partial(_with_own_heads, block.apply, config), matrices=_matrices(config))
    width = max(2, len(str(config.num_layers - 1)))
    return [replace(block, name=f"block_{i:0{width}d}") for i in range(config.num_layers)]


def head_layer(config: LlamaConfig) -> Layer:
    """The layer ``head``. Tied, it takes its kernel from ``embed/tokens/embedding``."""
    hidden = jax.ShapeDtypeStruct((1, config.seq_len, config.d_model), config.dtype)
    tied = {("kernel",): ("embed", ("tokens", "embedding"))} if config.tied else {}
    return from_linen(
        "head", Head(config), example=(hidden,), tied=tied, kind="llama.head", shards=partial(_head_shards, config)
    )


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions: ``x`` [B, T, N, K] with each pair (i, i + K/2) of position t turned by t · theta^(−2i/K)."""
    T, K = x.shape[1], x.shape[3]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = theta ** (-2.0 * jnp.arange(K // 2, dtype=wide) / K)
    angle = jnp.arange(T, dtype=wide)[:, None] * frequency[None, :]  # [T, K/2]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Embed(nn.Module):
    config: LlamaConfig
    tp: TensorParallel = ONE_SHARD

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [B, T] int32 → [B, T, D], or [B, T/t, D] with sequence parallelism"""
        c = self.config
        words = VocabParallelEmbed(
            c.vocab_size, c.d_model, param_dtype=c.dtype, embedding_init=normal(0.02), tp=self.tp, name="tokens"
        )
        return words(tokens)


class Block(nn.Module):
    config: LlamaConfig
    tp: TensorParallel = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, T, D] → [B, T, D]; both [B, T/t, D] with sequence parallelism"""
        c = self.config
        h = _norm(c, "norm_attn")(x)
        x = add_branch(x, partial(self.attention, h, train), Dropout(c.dropout, tp=self.tp), train=train)
        h = _norm(c, "norm_mlp")(x)
        return add_branch(x, partial(self.mlp, h), Dropout(c.dropout, tp=self.tp), train=train)

    @nn.nowrap
    def attention(self, x: jax.Array, train: bool, residual: jax.Array | None) -> jax.Array:
        c, tp = self.config, self.tp
        B, K = x.shape[0], c.head_size
        H, G = c.num_heads // tp.size, max(c.kv_heads // tp.size, 1)  # of this shard
        R = H // G
        whole = G * tp.size  # key/value heads of all shards, a shared one counted by each
        dense = _dense(c, bias=c.qkv_bias)
        qkv = column_parallel((whole, R + 2, K), tp, name="qkv", **dense)(x)  # [B, T, G, R + 2, K]
        T = qkv.shape[1]
        q = qkv[:, :, :, :R].reshape(B, T, H, K)  # [B, T, G, R, K] → [B, T, H, K]
        k, v = qkv[:, :, :, R], qkv[:, :, :, R + 1]  # each [B, T, G, K]
        key = shard_key(self.make_rng("dropout"), tp) if train and c.dropout > 0 else None
        q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
        kernel = "xla" if self.is_initializing() else c.attention
        heads = attention(q, k, v, kernel=kernel, window=c.window, dropout=c.dropout, key=key)
        return row_parallel(c.d_model, tp, residual=residual, axis=(-2, -1), name="out", **_dense(c, _residual_std(c)))(
            heads
        )  # [B, T, H, K] → [B, T, D]

    @nn.nowrap
    def mlp(self, x: jax.Array, residual: jax.Array | None) -> jax.Array:
        c, tp = self.config, self.tp
        gate_up = column_parallel((2, c.mlp_width), tp, split=1, name="gate_up", **_dense(c))(x)  # [B, T, 2, F/t]
        wide = nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]  # [B, T, F/t]
        return row_parallel(c.d_model, tp, residual=residual, name="down", **_dense(c, _residual_std(c)))(wide)


class Head(nn.Module):
    config: LlamaConfig
    tp: TensorParallel = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → logits [B, T, V/t]. The kernel is [V/t, D], as the embedding's, so that it may be tied to it."""
        c = self.config
        kernel = self.param("kernel", normal(0.02), (c.vocab_size // self.tp.size, c.d_model), c.dtype)
        return vocab_parallel_logits(_norm(c, "norm")(x), kernel, self.tp)


def _with_own_heads(
    apply: Callable[[Params, Any, LayerContext], Any], c: LlamaConfig, params: Params, x: Any, context: LayerContext
) -> Any:
    """``apply`` of a block, given this shard's part of a qkv that lies whole on each shard."""
    if context.tp.size > c.kv_heads:
        own = {name: own_query_heads(leaf, context.tp) for name, leaf in params["qkv"].items()}
        params = {**params, "qkv": own}
    return apply(params, x, context)


def embed_shards(c: LlamaConfig, tp: TensorParallel) -> Mapping[Path, Shard]:
    _check(c, tp)
    return {("tokens", "embedding"): 0}


def _block_shards(c: LlamaConfig, tp: TensorParallel) -> Mapping[Path, Shard]:
    _check(c, tp)
    shared = tp.size > c.kv_heads
    shards: dict[Path, Shard] = {("qkv", "kernel"): "partial" if shared else 1}
    if c.qkv_bias:
        shards[("qkv", "bias")] = "partial" if shared else 0
    shards |= {("out", "kernel"): 0, ("gate_up", "kernel"): 2, ("down", "kernel"): 0}
    return shards | _partial(tp, ("norm_attn", "scale"), ("norm_mlp", "scale"))


def _matrices(c: LlamaConfig) -> Mapping[Path, Matrix]:
    qkv = Matrix((0,), (1, 2, 3), split=(2, (c.num_heads // c.kv_heads, 1, 1)))  # [D, G, R + 2, K]: q, k and v
    return {
        ("qkv", "kernel"): qkv,
        ("out", "kernel"): Matrix((0, 1), (2,)),  # [H, K, D]
        ("gate_up", "kernel"): Matrix((0,), (2,)),  # [D, 2, F]: two matrices
        ("down", "kernel"): Matrix(),
    }


def _head_shards(c: LlamaConfig, tp: TensorParallel) -> Mapping[Path, Shard]:
    _check(c, tp)
    return {("kernel",): 0, **_partial(tp, ("norm", "scale"))}


def _partial(tp: TensorParallel, *paths: Path) -> dict[Path, Shard]:
    """What acts on the residual stream: each shard sees all of it, or with sequence parallelism a part."""
    return dict.fromkeys(paths, "partial") if tp.splits_time else {}


def _check(c: LlamaConfig, tp: TensorParallel) -> None:
    sizes = {"num_heads": c.num_heads, "mlp_size": c.mlp_width, "vocab_size": c.vocab_size}
    heads = [h for h in range(1, c.d_model + 1) if c.d_model % (2 * h) == 0 and h % c.kv_heads == 0]
    check_shards("Llama", tp, sizes, kv_heads=c.kv_heads, seq_len=c.seq_len, allowed={"num_heads": heads})


def normal(std: float) -> Any:
    return nn.initializers.normal(std)


def _residual_std(c: LlamaConfig) -> float:
    return float(0.02 / (2 * c.num_layers) ** 0.5)


def _norm(c: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=c.norm_eps, param_dtype=c.dtype, name=name)


def _dense(c: LlamaConfig, std: float = 0.02, bias: bool = False) -> dict[str, Any]:
    return {"use_bias": bias, "param_dtype": c.dtype, "kernel_init": normal(std)}
