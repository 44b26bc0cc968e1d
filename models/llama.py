"""Llama: RMSNorm before each branch, rotary positions, SwiGLU MLP, grouped-query attention, no biases.

    B batch   T time   D d_model   H query heads   G key/value heads   R = H / G   K = D / H   F mlp_size   V vocabulary

After Touvron et al., "LLaMA" (2023) and "Llama 2" (2023); with ``qkv_bias=True`` the block is that of Qwen2 (2024). Rotary
positions after Su et al., "RoFormer" (2021), pairing dimension i with i + K/2. Initialisation is GPT-2's: N(0, 0.02), and
0.02 / √(2L) for the projections that write to the residual stream of L blocks.

q, k and v are one projection [D, G, R + 2, K]: for each key/value head its R query heads, then its key, then its value. Gate
and up are one projection [D, 2, F]. Compute follows the dtype of the parameters it is given. RMSNorm, rotation, softmax and
loss run in float32 (float64 if given float64). Not modelled: rope scaling for longer contexts, sliding windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpipe.errors import ConfigError
from jaxpipe.stage.adapters import from_linen
from jaxpipe.stage.layer import Layer, Model
from jaxpipe.stage.options import build_options, divisors
from models.attention import causal_attention
from models.loss import loss_layer


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Options of :func:`Llama`.

    ``num_kv_heads``: None means as many as ``num_heads`` (multi-head attention). ``mlp_size``: None means 8/3 of ``d_model``
    rounded up to a multiple of 32. ``tied``: the head uses the token embedding. ``dropout`` (which Llama trains without)
    applies to attention probabilities and to what each branch adds. ``dtype``: what parameters are created in.
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
    norm_eps: float = 1e-5
    dropout: float = 0.0
    tied: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "seq_len", "mlp_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Llama: {name} is {value}; want 1 or more")
        even = ", ".join(str(h) for h in range(1, self.d_model + 1) if self.d_model % (2 * h) == 0)
        if not even:
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
    hidden = jax.ShapeDtypeStruct((1, config.seq_len, config.d_model), config.dtype)
    embed = from_linen("embed", Embed(config), example=(tokens,), reads=("tokens",), kind="llama.embed")
    block = from_linen("block", Block(config), example=(hidden,), uses_key=config.dropout > 0, kind="llama.block")
    tied = {("kernel",): ("embed", ("tokens", "embedding"))} if config.tied else {}
    head = from_linen("head", Head(config), example=(hidden,), tied=tied, kind="llama.head")
    width = max(2, len(str(config.num_layers - 1)))
    blocks: list[Layer] = [replace(block, name=f"block_{i:0{width}d}") for i in range(config.num_layers)]

    def batch_spec(microbatch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        shape = (microbatch_size, config.seq_len)
        return {
            "tokens": jax.ShapeDtypeStruct(shape, jnp.int32),
            "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
            "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
        }

    return Model("llama", (embed, *blocks, head, loss_layer()), batch_spec, config.vocab_size, config.seq_len)


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

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [B, T] int32 → [B, T, D]"""
        c = self.config
        words = nn.Embed(c.vocab_size, c.d_model, param_dtype=c.dtype, embedding_init=_normal(0.02), name="tokens")
        return words(tokens)


class Block(nn.Module):
    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, T, D] → [B, T, D]"""
        c = self.config
        x = x + nn.Dropout(c.dropout)(self.attention(_norm(c, "norm_attn")(x), train), deterministic=not train)
        return x + nn.Dropout(c.dropout)(self.mlp(_norm(c, "norm_mlp")(x)), deterministic=not train)

    @nn.nowrap
    def attention(self, x: jax.Array, train: bool) -> jax.Array:
        c = self.config
        B, T, _ = x.shape
        R, K = c.num_heads // c.kv_heads, c.head_size
        qkv = _dense(c, (c.kv_heads, R + 2, K), "qkv", bias=c.qkv_bias)(x)  # [B, T, G, R + 2, K]
        q = qkv[:, :, :, :R].reshape(B, T, c.num_heads, K)  # [B, T, G, R, K] → [B, T, H, K]
        k, v = qkv[:, :, :, R], qkv[:, :, :, R + 1]  # each [B, T, G, K]
        key = self.make_rng("dropout") if train and c.dropout > 0 else None
        heads = causal_attention(rotate(q, c.rope_theta), rotate(k, c.rope_theta), v, c.dropout, key)
        return _dense(c, c.d_model, "out", axis=(-2, -1), std=_residual_std(c))(heads)  # [B, T, H, K] → [B, T, D]

    @nn.nowrap
    def mlp(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate_up = _dense(c, (2, c.mlp_width), "gate_up")(x)  # [B, T, 2, F]
        wide = nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]  # [B, T, F]
        return _dense(c, c.d_model, "down", std=_residual_std(c))(wide)


class Head(nn.Module):
    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → logits [B, T, V]. The kernel is [V, D], as the embedding's, so that it may be tied to it."""
        c = self.config
        kernel = self.param("kernel", _normal(0.02), (c.vocab_size, c.d_model), c.dtype)
        return jnp.einsum("btd,vd->btv", _norm(c, "norm")(x), kernel)


def _normal(std: float) -> Any:
    return nn.initializers.normal(std)


def _residual_std(c: LlamaConfig) -> float:
    return float(0.02 / (2 * c.num_layers) ** 0.5)


def _norm(c: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=c.norm_eps, param_dtype=c.dtype, name=name)


def _dense(
    c: LlamaConfig,
    features: int | tuple[int, ...],
    name: str,
    axis: int | tuple[int, ...] = -1,
    std: float = 0.02,
    bias: bool = False,
) -> nn.DenseGeneral:
    return nn.DenseGeneral(features, axis=axis, use_bias=bias, param_dtype=c.dtype, kernel_init=_normal(std), name=name)
